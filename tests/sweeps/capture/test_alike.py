"""Identical layers are traced once, and layers that differ are not taken for identical."""

from __future__ import annotations

import functools
from collections import Counter

import torch
from torch import Tensor, nn

from kernels.problem import Gemm
from sweeps.capture.capture import capture
from sweeps.capture.sources import find_source
from sweeps.capture.step import ModelStep
from tests.support.captures import SMALL, STEP, forward, products_of

of = functools.partial(products_of, __name__)


def test_layers_that_are_alike_are_traced_once() -> None:
    few, many = (
        capture(find_source("gpt2", {**SMALL, "layers": layers}), STEP) for layers in (4, 40)
    )
    assert len(few.products) == len(many.products)
    assert {p.count for p in few.products if "*" in p.path} == {4}
    assert {p.count for p in many.products if "*" in p.path} == {40}
    before, after = ({m.what: m.bytes for m in each.moved} for each in (few, many))
    assert before.keys() == after.keys()
    assert all(before[what] <= after[what] <= 10 * before[what] for what in before)


class Halved(nn.Module):
    """A layer that multiplies only half of the rows, depending on the call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 48)

    def forward(self, x: Tensor, halve: bool, mask: Tensor | None, other: Tensor | None) -> Tensor:
        rows = len(x) // 2 if halve or mask is None else len(x)
        return torch.cat([self.linear(x[:rows]), x[rows:]])


class HalvedBySettings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Halved() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        calls = [(False, x, None), (True, x, None), (False, None, x), (False, x, None)]
        for layer, call in zip(self.layers, calls, strict=True):
            x = layer(x, *call)
        return x


def halved() -> nn.Module:
    return HalvedBySettings()


def test_calls_of_identical_layers_with_other_settings_are_traced_too() -> None:
    rows: Counter[int] = Counter()
    for product in forward(tuple(of("halved", "x[64,48]"))):
        assert isinstance(product.work, Gemm)
        rows[product.work.m] += product.count
    assert rows == {64: 2, 32: 2}


def partly_frozen() -> nn.Module:
    layers = nn.Sequential(*(nn.Linear(48, 48) for _ in range(4)))
    for layer in layers[:2]:
        layer.requires_grad_(False)
    return layers


def test_a_frozen_layer_is_not_identical_to_one_that_is_trained() -> None:
    passes: Counter[str] = Counter()
    for product in of("partly_frozen", "x[16,48]"):
        passes[product.pass_] += product.count
    assert passes == {"forward": 4, "wgrad": 2, "dgrad": 1}


class Rotated(nn.Module):
    """A layer that keeps its angles in a tuple of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 48)
        self.angles = (torch.zeros(2), torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def rotated() -> nn.Module:
    return nn.Sequential(Rotated(), Rotated(), Rotated())


def test_layers_with_tuples_of_tensors_can_be_compared() -> None:
    assert sum(p.count for p in of("rotated", "x[16,48]", step=ModelStep("prefill"))) == 3


class Branches(nn.Module):
    """Identical heads on branches that differ; the head of the second branch is not traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 32)
        self.second = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 32))
        self.heads = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[0](self.first(x)) + self.heads[1](self.second(x))


def branches() -> nn.Module:
    return Branches()


def test_gradients_pass_through_a_skipped_layer_of_another_width() -> None:
    passes: Counter[tuple[str, str]] = Counter()
    for product in of("branches", "x[16,48]"):
        passes[product.path, product.pass_] += product.count
    assert passes == {
        ("first", "forward"): 1, ("first", "wgrad"): 1,
        ("second.*", "forward"): 2, ("second.*", "dgrad"): 1, ("second.*", "wgrad"): 2,
        ("heads.*", "forward"): 2, ("heads.*", "dgrad"): 2, ("heads.*", "wgrad"): 2,
    }  # fmt: skip


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))

    def forward(self, x: Tensor, time: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Stages(nn.Module):
    """Identical stages of identical blocks, called once at time 0 and twice at time 1."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.stages[1](self.stages[0](self.stages[0](x, 0), 1), 1)


def stages() -> nn.Module:
    return Stages()


def test_identical_layers_inside_calls_that_differ_are_counted_apart() -> None:
    assert sum(p.count for p in forward(tuple(of("stages", "x[16,48]")))) == 6


class Numbered(nn.Module):
    """A layer that stores its position in the list."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position
        self.linear = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class TwoLists(nn.Module):
    """A model whose first layers are also in a list of their own."""

    def __init__(self) -> None:
        super().__init__()
        layers = [Numbered(position) for position in range(5)]
        self.first = nn.ModuleList(layers[:2])
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def two_lists() -> nn.Module:
    return TwoLists()


def test_positions_are_those_in_the_list_even_if_other_layers_are_in_two_lists() -> None:
    products = of("two_lists", "x[16,48]", step=ModelStep("prefill"))
    assert [p.count for p in products] == [2, 3]
