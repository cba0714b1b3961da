"""Trace one of several equivalent calls to identical layers, and only count the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

# Types of a layer's attributes, and of the arguments of its call, that count as settings.
_SCALARS = (bool, int, float, str, type(None), tuple, torch.dtype)


@dataclass(eq=False)  # two layers differ even if their numbers agree
class TracedLayer:
    """A traced call to a layer, together with the skipped calls of the same kind.

    Attributes:
        input_bytes: bytes of the storages that hold one call's floating-point inputs. These inputs
            must be kept if the layer is recomputed in the backward pass.
        calls: number of calls of this kind to this layer and to identical layers, including the
            traced call.
    """

    input_bytes: int = 0
    calls: int = 1


@dataclass
class AlikeLayers:
    """Counter of calls to identical layers in a model.

    ``stack`` has the layers that are being traced, the outermost one first. To get the number of
    times that an operation inside them runs, multiply the ``calls`` of all these layers.
    """

    stack: list[TracedLayer] = field(default_factory=list)

    @contextmanager
    def skipping(self, model: nn.Module) -> Iterator[None]:
        """Skip calls that are equivalent to a traced call, and count the skipped calls.

        While the context is active, the ``forward`` of identical layers is replaced. Layers count
        as identical if they are in the same ``ModuleList`` or ``Sequential``, and if they differ
        at most in properties (:func:`_facts`) that state a layer's position. Calls to such layers
        are equivalent if they agree in the structure and the kinds of their inputs
        (:func:`_input_kind`), in whether gradients are enabled, and in the traced calls that
        enclose them (``stack``).
        """
        # The ``forward`` in each layer's instance attributes; None if only its class has one.
        replaced: dict[nn.Module, Any] = {}
        for module in model.modules():
            if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
                # A layer may be in two lists. Its forward is replaced only once, so that the
                # original is recorded and can be restored.
                new_layers = [
                    (position, layer)
                    for position, layer in enumerate(module)
                    if layer not in replaced
                ]
                for group in _groups_of_identical(new_layers):
                    traced_calls: dict[Any, _TracedCall] = {}  # shared by the layers of the group
                    for layer in dict.fromkeys(group):  # a list may have one layer twice
                        replaced[layer] = vars(layer).get("forward")
                        layer.forward = self._counting(layer.forward, traced_calls)
        try:
            yield
        finally:
            for layer, forward in replaced.items():
                del layer.forward
                if forward is not None:
                    layer.forward = forward

    def _counting(
        self, forward: Callable[..., Any], traced_calls: dict[Any, _TracedCall]
    ) -> Callable[..., Any]:
        """Return a replacement for ``forward`` that skips calls like those in ``traced_calls``.

        The replacement counts the calls that it skips, and adds the others to ``traced_calls``.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            # 1. If a call of this kind was traced before, only count this one. The layers around it
            # are part of the kind, because each of them has its own number of calls.
            inputs, structure = tree_flatten((args, kwargs))
            tensors = [value for value in inputs if isinstance(value, Tensor)]
            key = (
                str(structure),
                *map(_input_kind, inputs),
                torch.is_grad_enabled(),
                *self.stack,
            )
            if key in traced_calls:
                traced_calls[key].layer.calls += 1
                return traced_calls[key].outputs_like(tensors)
            # 2. Otherwise, trace it. Inputs that share a storage count once in ``input_bytes``.
            storages = [
                tensor.untyped_storage() for tensor in tensors if tensor.is_floating_point()
            ]
            bytes_by_storage = {storage._cdata: storage.nbytes() for storage in storages}
            layer = TracedLayer(input_bytes=sum(bytes_by_storage.values()))
            self.stack.append(layer)
            try:
                outputs = forward(*args, **kwargs)
            finally:
                self.stack.pop()
            traced_calls[key] = _TracedCall.from_call(layer, tensors, outputs)
            return outputs

        return call


@dataclass(frozen=True)
class _TracedCall:
    """A traced call, and templates for the outputs of skipped calls of the same kind.

    Attributes:
        leaves: a pair for each leaf of the output: whether the leaf is a tensor, and a template.
            If an input tensor is of the same kind as the leaf, the template is the position of this
            input among the input tensors. For any other tensor, the template is the tensor itself,
            detached. For a leaf that is not a tensor, the template is the leaf.
        tree: structure that arranges the leaves into the output.
    """

    layer: TracedLayer
    leaves: tuple[tuple[bool, Any], ...]
    tree: TreeSpec

    @classmethod
    def from_call(cls, layer: TracedLayer, inputs: list[Tensor], outputs: Any) -> _TracedCall:
        leaves, tree = tree_flatten(outputs)
        input_kinds = [_kind(tensor) for tensor in inputs]
        described: list[tuple[bool, Any]] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                described.append((False, leaf))
            elif _kind(leaf) in input_kinds:
                described.append((True, input_kinds.index(_kind(leaf))))
            else:
                template = leaf.detach().requires_grad_(leaf.requires_grad)
                described.append((True, template))
        return cls(layer, tuple(described), tree)

    def outputs_like(self, inputs: list[Tensor]) -> Any:
        """Return the outputs of a skipped call for the given input tensors.

        If an input is of the same kind as an output, the input itself takes the output's place.
        """
        leaves = []
        for is_tensor, template in self.leaves:
            if not is_tensor:
                leaves.append(template)
            elif isinstance(template, int):
                leaves.append(inputs[template])
            elif template.requires_grad:
                leaves.append(_SkippedLayer.apply(template, *inputs))
            else:
                leaves.append(torch.empty_like(template))
        return tree_unflatten(leaves, self.tree)


class _SkippedLayer(torch.autograd.Function):
    """Autograd node of a skipped layer. Its gradients have the inputs' shapes, but no values."""

    @staticmethod
    def forward(ctx: Any, template: Tensor, *inputs: Tensor) -> Tensor:
        ctx.inputs = inputs  # save_for_backward() would count them as saved tensors
        return torch.empty_like(template)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]  # without the template
        return None, *(
            torch.empty_like(tensor) if is_needed else None
            for tensor, is_needed in zip(ctx.inputs, needed, strict=True)
        )


def _input_kind(value: Any) -> Any:
    """Return the properties of an input that must be equal in two equivalent calls."""
    if isinstance(value, Tensor):
        return _kind(value)
    if isinstance(value, _SCALARS):
        return value
    return type(value)  # other objects are assumed to differ only by type


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """Return the properties in which two tensors must agree to replace each other in a trace."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _groups_of_identical(layers: list[tuple[int, nn.Module]]) -> list[list[nn.Module]]:
    """Return the groups of two or more layers that differ only in their position in a list."""
    # For each group: the position and the facts of its first layer, and all its layers.
    groups: list[tuple[int, dict[str, Any], list[nn.Module]]] = []
    for position, layer in layers:
        facts = _facts(layer)
        for first_position, first_facts, group in groups:
            if _differ_only_in_position(facts, position, first_facts, first_position):
                group.append(layer)
                break
        else:  # the layer fits no group, so it begins a new one
            groups.append((position, facts, [layer]))
    return [group for _, _, group in groups if len(group) > 1]


def _facts(layer: nn.Module) -> dict[str, Any]:
    """Return, by name, the properties of a layer that are compared with those of other layers."""
    facts: dict[str, Any] = {}
    for name, module in layer.named_modules():
        facts[name] = type(module)
        for attribute, value in vars(module).items():
            if _is_setting(value):
                facts[f"{name}:{attribute}"] = value
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for attribute, tensor in tensors.items():
                fact = None
                if tensor is not None:
                    fact = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
                facts[f"{name}:{kind}:{attribute}"] = fact
    return facts


def _is_setting(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_setting, value))  # two tuples of tensors could not be compared
    return isinstance(value, _SCALARS)


def _differ_only_in_position(
    facts: dict[str, Any], position: int, first_facts: dict[str, Any], first_position: int
) -> bool:
    """Return True if two layers differ at most in properties that state a layer's position."""
    if facts.keys() != first_facts.keys():
        return False
    return all(
        value == first_facts[name]
        # Many layers store their position, because a cache stores their keys at this position.
        or (type(value) is int and (value, first_facts[name]) == (position, first_position))
        for name, value in facts.items()
    )
