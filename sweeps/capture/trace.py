"""Record the operations that PyTorch dispatches in a step, and the tensors that autograd saves.

Each operation is recorded with its place in the model. Views, and queries of a tensor's properties,
are not recorded.
"""

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
    """An operation's access to a tensor.

    ``storage`` is an address that identifies the tensor's storage, and ``offset`` is the tensor's
    offset in the storage, in elements. ``bytes`` is the size of the tensor's elements; elements
    that share memory, as in an expanded tensor, count once. ``in_order`` is True if the elements
    lie in memory without gaps, in the order of the tensor's dimensions or in channels-last order.
    """

    storage: int
    offset: int
    bytes: int
    in_order: bool


@dataclass(frozen=True)
class TracedOperation:
    """One operation, with its arguments and its place in the model.

    Attributes:
        name: name of the operation, such as ``aten::mm``.
        module: path of the innermost module that called the operation. An operation that computes a
            gradient has the path of the module that called the forward operation.
        node: number of an autograd node. If ``backward`` is True, this node runs the operation.
            Otherwise, it is the newest node when the operation ends.
        backward: True if the operation computes a gradient.
        recomputed: True if a checkpoint recomputes the operation in the backward pass.
        layers: traced layers that the operation runs in, the outermost one first.
    """

    name: str
    args: tuple[Any, ...]
    result: Any
    module: str
    node: int
    backward: bool
    recomputed: bool
    layers: tuple[TracedLayer, ...]
    reads: tuple[TensorAccess, ...]
    writes: tuple[TensorAccess, ...]

    @property
    def count(self) -> int:
        """Number of times that the operation runs in a step, including runs in identical layers."""
        return math.prod(layer.calls for layer in self.layers)


class Trace(TorchDispatchMode):
    """Recorder of operations, to be entered within :func:`sweeps.capture.capture.fake_tensors`.

    The numbers of autograd's nodes link gradients to forward operations, as in PyTorch's profiler.
    """

    def __init__(self, layers: AlikeLayers) -> None:
        """Create a recorder. Enter it within ``layers.skipping(model)``."""
        super().__init__()
        self.operations: list[TracedOperation] = []
        self._layers = layers
        # Paths of the modules that are being called, the innermost last.
        self._module_paths: list[str] = []
        # Module and layers of each forward operation, by the number of its autograd node.
        self._places: dict[int, tuple[str, tuple[TracedLayer, ...]]] = {}
        # Storages by address. They are kept alive, so that no new storage gets the same address.
        self._kept: dict[int, Any] = {}

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Keep track of the module that is being called, as long as the context is active."""
        names = {module: name for name, module in model.named_modules()}

        def enter(module: nn.Module, args: Any) -> None:
            # A module that is not part of the model counts as part of the module that calls it.
            self._module_paths.append(names.get(module, self._current_path()))

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            self._module_paths.pop()

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
        return self._module_paths[-1] if self._module_paths else ""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # 1. Run the operation on fake tensors.
        result = func(*args, **(kwargs or {}))
        inputs = tensors_in((args, kwargs or {}))
        outputs = tensors_in(result)
        if not outputs:
            return result  # the operation only queries a property of a tensor, such as its device
        # 2. Find the operation's place in the model: the module and the layers. A gradient has the
        # place of its forward operation.
        node = torch._C._current_autograd_node()
        # A checkpoint enables gradients while it recomputes operations in the backward pass.
        recomputed = node is not None and torch.is_grad_enabled()
        backward = node is not None and not recomputed
        if backward:
            node_number = node._sequence_nr()
            module, layers = self._places.get(node_number, ("", ()))
        else:
            # A recomputed operation makes a node in a module, like one of the forward pass.
            node_number = torch._C._autograd._get_sequence_nr() - 1
            module = self._current_path()
            layers = tuple(self._layers.stack)
            # The first operation with a number made the node. Without gradients, no node is made.
            self._places.setdefault(node_number, (module, layers))
        # 3. Record what the operation reads and writes. If the operation does not change its
        # inputs, an output that shares the storage of an input is a view of that input, and is not
        # written.
        reads = tuple(map(self._access, inputs))
        input_storages = {access.storage for access in reads}
        writes = tuple(map(self._access, outputs))
        if not func._schema.is_mutable:
            if all(access.storage in input_storages for access in writes):
                return result  # the operation only makes views, so it moves nothing
            writes = tuple(access for access in writes if access.storage not in input_storages)
        operation = TracedOperation(
            name=func._schema.name,
            args=args,
            result=result,
            module=module,
            node=node_number,
            backward=backward,
            recomputed=recomputed,
            layers=layers,
            reads=reads,
            writes=writes,
        )
        self.operations.append(operation)
        return result

    def _access(self, tensor: Tensor) -> TensorAccess:
        """Return the access to all elements of a tensor, and keep the tensor's storage alive."""
        storage = tensor.untyped_storage()
        self._kept[storage._cdata] = storage
        # Elements along a dimension of stride 0 share their memory, so they count once.
        distinct = tensor[tuple(slice(None) if stride else 0 for stride in tensor.stride())]
        in_order = distinct.is_contiguous() or (
            distinct.dim() == 4 and distinct.is_contiguous(memory_format=torch.channels_last)
        )
        return TensorAccess(
            storage._cdata,
            tensor.storage_offset(),
            distinct.numel() * tensor.element_size(),
            in_order,
        )


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in arguments or results, including tensors in nested containers."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        return [tensor for value in tree for tensor in tensors_in(value)]
    return []


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that the forward pass keeps for the backward pass.

    Attributes:
        storage: address that identifies the tensor's storage, as in :class:`TensorAccess`.
        bytes: size of the tensor's storage in bytes.
        layers: traced layers in which the tensor was saved, the outermost one first.
    """

    storage: int
    bytes: int
    layers: tuple[TracedLayer, ...]

    @property
    def count(self) -> int:
        """Number of tensors like this one in a step, including those of identical layers."""
        return math.prod(layer.calls for layer in self.layers)


class SavedTensors:
    """Recorder of the tensors that autograd saves, except for parameters and buffers.

    Tensors with the same storage are recorded once.
    """

    def __init__(self, model: nn.Module, layers: AlikeLayers) -> None:
        self.tensors: dict[int, SavedTensor] = {}
        self._layers = layers
        owned = (*model.parameters(), *model.buffers())
        # Tensors are kept alive, so that no new storage gets the address of an earlier one.
        self._kept = {tensor.untyped_storage()._cdata: tensor for tensor in owned}

    def pack(self, tensor: Tensor) -> Tensor:
        """Record a tensor that autograd saves, and return the tensor unchanged."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._kept:
            self._kept[storage._cdata] = tensor
            layers = tuple(self._layers.stack)
            self.tensors[storage._cdata] = SavedTensor(storage._cdata, storage.nbytes(), layers)
        return tensor


def trace(
    model: nn.Module, call: Callable[[], Any], backward: bool
) -> tuple[list[TracedOperation], list[SavedTensor]]:
    """Run a step. Return its operations, and the tensors that are saved for its backward pass.

    Call this function within :func:`sweeps.capture.capture.fake_tensors`. ``call`` runs the forward
    pass. If ``backward`` is True, ``call`` must return the loss, and the backward pass is run and
    traced, too.
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
