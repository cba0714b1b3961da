"""What happens in a step: every operation as it is dispatched, with its place in the model."""

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
    """A tensor that an operation reads or writes: where it is, and the bytes that it touches."""

    storage: int
    offset: int
    bytes: int


@dataclass(frozen=True)
class TracedOperation:
    """One operation: its name and arguments, and where it stands.

    ``module`` is the innermost module of the forward pass that it belongs to, also of a gradient;
    ``node`` the number of the autograd node that it made or, ``backward``, whose gradient it is.
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
        """How often it is done in a step, with the layers that are alike."""
        return math.prod(layer.calls for layer in self.layers)


class Trace(TorchDispatchMode):
    """Records operations while it is entered, inside fake tensors' mode.

    Gradients find their place by the number that autograd gives to each node when its forward
    operation runs, as the profiler links the two.
    """

    def __init__(self, layers: AlikeLayers) -> None:
        super().__init__()
        self.operations: list[TracedOperation] = []
        self._layers = layers
        self._path: list[str] = []
        self._places: dict[int, tuple[str, tuple[TracedLayer, ...]]] = {}
        # While a storage is referred to, no other gets its address.
        self._kept: dict[int, Any] = {}

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """While it is entered, the path of the module that is being called is known."""
        names = {module: name for name, module in model.named_modules()}

        def enter(module: nn.Module, args: Any) -> None:
            self._path.append(names.get(module, self._path[-1] if self._path else ""))

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

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = _tensors((args, kwargs or {}))
        made = _tensors(result)
        if not made:
            return result  # a question about a tensor, such as which device it is on
        node = torch._C._current_autograd_node()
        backward = node is not None and not torch.is_grad_enabled()
        if node is None or not backward:
            # Also of what a checkpoint computes again while gradients are computed.
            number = torch._C._autograd._get_sequence_nr() - 1
            place = (self._path[-1] if self._path else "", tuple(self._layers.stack))
            # The first operation with a number made the node; without gradients none is made.
            self._places.setdefault(number, place)
        else:
            number = node._sequence_nr()
            place = self._places.get(number, ("", ()))
        reads = tuple(map(self._access, given))
        owned = {access.storage for access in reads}
        writes = tuple(map(self._access, made))
        if not func._schema.is_mutable:
            if writes and all(access.storage in owned for access in writes):
                return result  # a view moves nothing
            writes = tuple(access for access in writes if access.storage not in owned)
        made_by = TracedOperation(
            func._schema.name,
            args,
            result,
            place[0],
            number,
            backward,
            place[1],
            reads,
            writes,
        )
        self.operations.append(made_by)
        return result

    def _access(self, tensor: Tensor) -> TensorAccess:
        storage = tensor.untyped_storage()
        self._kept[storage._cdata] = storage
        elements = math.prod(
            size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride
        )
        return TensorAccess(
            storage._cdata, tensor.storage_offset(), elements * tensor.element_size()
        )


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [t for value in tree.values() for t in _tensors(value)]
    if isinstance(tree, list | tuple):
        return [t for value in tree for t in _tensors(value)]
    return []


def trace(model: nn.Module, call: Callable[[], Any], backward: bool) -> list[TracedOperation]:
    """The operations of one step: of the forward pass, which is ``call``, and ``backward``.

    To be called where tensors are fake.
    """
    layers = AlikeLayers()
    recorder = Trace(layers)
    with recorder.following(model), layers.skipping(model), recorder:
        loss = call()
        if backward:
            loss.backward()
    return recorder.operations
