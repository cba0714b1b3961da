"""Record every operation of a step as PyTorch dispatches it, with its place in the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from sweeps.capture.alike import AlikeLayers, TracedLayer


@dataclass(frozen=True)
class TensorAccess:
    """A tensor that an operation reads or writes: its storage, its offset and the bytes touched."""

    storage: int
    offset: int
    bytes: int


@dataclass(frozen=True)
class TracedOperation:
    """One operation: its name, its arguments, and its place in the model.

    ``module`` is the innermost module of the forward pass that the operation belongs to, also for a
    gradient. ``node`` is the number of an autograd node: the one that the operation made or, if
    ``backward``, the one whose gradient it computes.
    """

    name: str
    args: tuple[Any, ...]
    result: Any
    module: str
    node: int
    backward: bool
    layers: tuple[TracedLayer, ...]
    reads: tuple[TensorAccess, ...]
    writes: tuple[TensorAccess, ...]

    @property
    def count(self) -> int:
        """Number of times that the operation runs in a step, in all identical layers together."""
        return math.prod(layer.calls for layer in self.layers)


class Trace(TorchDispatchMode):
    """Recorder of operations, active while it is entered, inside the mode of fake tensors.

    A gradient finds its place by the number that autograd gives to each node when the forward
    operation runs. PyTorch's profiler links the two in the same way.
    """

    def __init__(self, layers: AlikeLayers) -> None:
        super().__init__()
        self.operations: list[TracedOperation] = []
        self._layers = layers
        self._path: list[str] = []
        self._places: dict[int, tuple[str, tuple[TracedLayer, ...]]] = {}
        # Storages are kept alive, so that no other one gets their address.
        self._kept: dict[int, Any] = {}

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Keep track of the path of the module that is called, while the context is entered."""
        names = {module: name for name, module in model.named_modules()}

        def enter(module: nn.Module, args: Any) -> None:
            # A module that is not part of the model counts as part of the one that calls it.
            self._path.append(names.get(module, self._current_path()))

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            self._path.pop()

        hooks = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _current_path(self) -> str:
        """Return the path of the innermost module that is being called; empty if there is none."""
        return self._path[-1] if self._path else ""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # 1. Run the operation on fake tensors.
        result = func(*args, **(kwargs or {}))
        inputs = _tensors((args, kwargs or {}))
        outputs = _tensors(result)
        if not outputs:
            return result  # a query of a tensor, such as the device that it is on
        # 2. Find its place in the model; a gradient has that of its forward operation.
        node = torch._C._current_autograd_node()
        backward = node is not None and not torch.is_grad_enabled()
        if node is None or not backward:
            # This includes what a checkpoint recomputes while gradients are computed.
            number = torch._C._autograd._get_sequence_nr() - 1
            module, layers = self._current_path(), tuple(self._layers.stack)
            # The first operation with a number made the node. Without gradients, no node is made.
            self._places.setdefault(number, (module, layers))
        else:
            number = node._sequence_nr()
            module, layers = self._places.get(number, ("", ()))
        # 3. Record what it reads and writes.
        reads = tuple(map(self._access, inputs))
        input_storages = {access.storage for access in reads}
        writes = tuple(map(self._access, outputs))
        if not func._schema.is_mutable:
            if writes and all(access.storage in input_storages for access in writes):
                return result  # a view moves nothing
            writes = tuple(access for access in writes if access.storage not in input_storages)
        operation = TracedOperation(
            name=func._schema.name,
            args=args,
            result=result,
            module=module,
            node=number,
            backward=backward,
            layers=layers,
            reads=reads,
            writes=writes,
        )
        self.operations.append(operation)
        return result

    def _access(self, tensor: Tensor) -> TensorAccess:
        """Return the access to all elements of a tensor, and keep its storage alive."""
        storage = tensor.untyped_storage()
        self._kept[storage._cdata] = storage
        # Elements along a dimension of stride 0 share their memory.
        elements = math.prod(
            size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride
        )
        return TensorAccess(
            storage._cdata, tensor.storage_offset(), elements * tensor.element_size()
        )


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in arguments or results, which may be nested."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [tensor for value in tree for tensor in _tensors(value)]
    return []


@dataclass(frozen=True)
class SavedTensor:
    """Bytes of a tensor that the forward pass keeps for the backward pass, and its layers."""

    bytes: int
    layers: tuple[TracedLayer, ...]

    @property
    def count(self) -> int:
        """Number of such tensors in a step, including those of identical layers."""
        return math.prod(layer.calls for layer in self.layers)


class SavedTensors:
    """Recorder of the tensors that autograd saves, each storage once; parameters do not count."""

    def __init__(self, model: nn.Module, layers: AlikeLayers) -> None:
        self.tensors: dict[int, SavedTensor] = {}
        self._layers = layers
        owned = (*model.parameters(), *model.buffers())
        # Storages are kept alive, so that no other one gets their address.
        self._kept = {tensor.untyped_storage()._cdata: tensor for tensor in owned}

    def pack(self, tensor: Tensor) -> Tensor:
        """Record a tensor as it is saved."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._kept:
            self._kept[storage._cdata] = tensor
            layers = tuple(self._layers.stack)
            self.tensors[storage._cdata] = SavedTensor(storage.nbytes(), layers)
        return tensor


def trace(
    model: nn.Module, call: Callable[[], Any], backward: bool
) -> tuple[list[TracedOperation], list[SavedTensor]]:
    """Return the operations of a step, and the tensors that are saved for its backward pass.

    The operations are those of ``call`` and, with ``backward``, of its gradients. Call this where
    tensors are fake.
    """
    layers = AlikeLayers()
    recorder = Trace(layers)
    saved = SavedTensors(model, layers)
    with recorder.following(model), layers.skipping(model), recorder:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            loss = call()
        if backward:
            loss.backward()
    return recorder.operations, list(saved.tensors.values())
