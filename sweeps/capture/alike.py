"""Layers that are alike are traced once and counted: of 32, one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

_SCALARS = (bool, int, float, str, type(None), tuple, torch.dtype)


@dataclass
class TracedLayer:
    """A layer that was traced, and how many calls there were of it and of those alike."""

    calls: int = 1


@dataclass
class AlikeLayers:
    """Which layers of a model are alike, and the stack of those that are being traced.

    ``stack`` is read while operations are recorded: what is done inside a layer is done as often
    as the layers around it are called.
    """

    stack: list[TracedLayer] = field(default_factory=list)

    @contextmanager
    def skipping(self, model: nn.Module) -> Iterator[None]:
        """While it is entered, calls of layers like one that was traced are only counted."""
        before: dict[nn.Module, Any] = {}
        for module in model.modules():
            if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
                for kind in _kinds([layer for layer in module if layer not in before]):
                    traced: dict[Any, _Traced] = {}
                    for layer in dict.fromkeys(kind):
                        before[layer] = vars(layer).get("forward")
                        layer.forward = self._counting(layer.forward, traced)
        try:
            yield
        finally:
            for layer, own in before.items():
                del layer.forward
                if own is not None:
                    layer.forward = own

    def _counting(
        self, forward: Callable[..., Any], traced: dict[Any, _Traced]
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            inputs, shape = tree_flatten((args, kwargs))
            tensors = [x for x in inputs if isinstance(x, Tensor)]
            key = (str(shape), *(_kind(x) for x in tensors), torch.is_grad_enabled())
            if key in traced:
                traced[key].layer.calls += 1
                return traced[key].outputs_like(tensors)
            layer = TracedLayer()
            self.stack.append(layer)
            try:
                outputs = forward(*args, **kwargs)
            finally:
                self.stack.pop()
            traced[key] = _Traced.from_call(layer, tensors, outputs)
            return outputs

        return call


@dataclass(frozen=True)
class _Traced:
    """A traced layer, and how outputs of its shapes are made without computing it."""

    layer: TracedLayer
    leaves: tuple[Any, ...]
    tree: Any

    @classmethod
    def from_call(cls, layer: TracedLayer, inputs: list[Tensor], outputs: Any) -> _Traced:
        leaves, tree = tree_flatten(outputs)
        kinds = [_kind(tensor) for tensor in inputs]
        made: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                made.append(leaf)
            elif _kind(leaf) in kinds:
                made.append(kinds.index(_kind(leaf)))
            else:
                made.append(leaf.detach())
        return cls(
            layer, tuple(zip((isinstance(x, Tensor) for x in leaves), made, strict=True)), tree
        )

    def outputs_like(self, inputs: list[Tensor]) -> Any:
        """Inputs of an output's shape are passed on, so that gradients pass; others are empty."""
        leaves = []
        for tensor, made in self.leaves:
            if not tensor:
                leaves.append(made)
            elif isinstance(made, int):
                leaves.append(inputs[made])
            else:
                leaves.append(torch.empty_like(made))
        return tree_unflatten(leaves, self.tree)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _kinds(layers: list[nn.Module]) -> list[list[nn.Module]]:
    """The layers in groups of those that differ in nothing but their number."""
    kinds: list[tuple[int, dict[str, Any], list[nn.Module]]] = []
    for number, layer in enumerate(layers):
        facts = _facts(layer)
        for first, other, kind in kinds:
            if _same(facts, number, other, first):
                kind.append(layer)
                break
        else:
            kinds.append((number, facts, [layer]))
    return [kind for _, _, kind in kinds if len(kind) > 1]


def _facts(layer: nn.Module) -> dict[str, Any]:
    """The classes, settings and parameters of a layer and all in it, by name."""
    facts: dict[str, Any] = {}
    for name, module in layer.named_modules():
        facts[name] = type(module)
        for attribute, value in vars(module).items():
            if isinstance(value, _SCALARS):
                facts[f"{name}:{attribute}"] = value
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for attribute, tensor in tensors.items():
                shape = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
                facts[f"{name}:{kind}:{attribute}"] = shape
    return facts


def _same(one: dict[str, Any], number: int, other: dict[str, Any], first: int) -> bool:
    if one.keys() != other.keys():
        return False
    return all(
        value == other[name]
        # Many layers know their own number, the place of their keys in a cache.
        or (type(value) is int and (value, other[name]) == (number, first))
        for name, value in one.items()
    )
