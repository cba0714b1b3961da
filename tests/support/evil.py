"""Kernels that are wrong, each in its own way: what a checker of results has to find.

An evil kernel is made of the library's right one. It is given the operand sets and a function that
computes one of them right, and returns what is timed in its place.
"""

from __future__ import annotations

import functools
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import implementations
from kernels.config import Config
from kernels.launch import Launch
from kernels.machine import Machine
from kernels.operands import Operands
from kernels.operation import Workload
from kernels.registry import library_for
from sweeps.cases.case import Case
from sweeps.measuring import torch_bench as bench_module
from sweeps.measuring.torch_bench import TorchBench

Right = Callable[[int], Tensor]
Make = Callable[[Sequence[Operands], Right], Right]

LATER = 0.05
"""Seconds after a kernel's first launch at which those that turn wrong later do so."""

WRONG: dict[str, Make] = {}
"""Kernels whose results are wrong: none may have a time."""
CHANCES: dict[str, float] = {}
"""Kernels that are wrong now and then, and with what chance at each launch: they escape if every
result that is looked at is right."""
FATAL: dict[str, Make] = {}
"""Kernels that fail, or take the process with them: rows with a reason."""


def _in(group: dict[str, Make]) -> Callable[[Make], Make]:
    def add(make: Make) -> Make:
        group[make.__name__.replace("_", "-")] = make
        return make

    return add


def spoils(change: Callable[[Tensor], object]) -> Make:
    """Right, then changed in place: all of a matrix, or the first image of a convolution."""

    def make(sets: Sequence[Operands], right: Right) -> Right:
        def launch(i: int) -> Tensor:
            result = right(i)
            change(result if result.dim() == 2 else result[0])
            return result

        return launch

    return make


def _middle(y: Tensor, axis: int) -> Tensor:
    return y.select(axis, y.shape[axis] // 2)


def _element(y: Tensor) -> Tensor:
    return y[tuple(slice(size // 2, size // 2 + 1) for size in y.shape)]


def _swap(y: Tensor, axis: int) -> None:
    one, two = y.select(axis, 0), y.select(axis, y.shape[axis] // 2)
    kept = one.clone()
    one.copy_(two)
    two.copy_(kept)


def _round(y: Tensor) -> None:
    """To three binary digits."""
    mantissa, exponent = torch.frexp(y.float())
    y.copy_(torch.ldexp((mantissa * 8).round() / 8, exponent))


WRONG |= {
    "zeros": spoils(lambda y: y.zero_()),
    "ones": spoils(lambda y: y.fill_(1.0)),
    "not-numbers": spoils(lambda y: y.fill_(math.nan)),
    "noise": spoils(lambda y: y.normal_(0.0, float(y.float().std()))),
    "negated": spoils(lambda y: y.neg_()),
    "absolute": spoils(lambda y: y.abs_()),
    "relu": spoils(lambda y: y.clamp_min_(0)),
    "doubled": spoils(lambda y: y.mul_(2)),
    "a-tenth-too-large": spoils(lambda y: y.mul_(1.1)),
    "biased": spoils(lambda y: y.add_(float(y.float().std()))),
    "clamped": spoils(lambda y: y.clamp_(-float(y.float().std()), float(y.float().std()))),
    "few-digits": spoils(_round),
    "a-row-of-zeros": spoils(lambda y: _middle(y, 0).zero_()),
    "a-row-negated": spoils(lambda y: _middle(y, 0).neg_()),
    "a-row-of-nan": spoils(lambda y: _middle(y, 0).fill_(math.nan)),
    "last-row-missing": spoils(lambda y: y[-1].zero_()),
    "rows-swapped": spoils(lambda y: _swap(y, 0)),
    "rows-shifted": spoils(lambda y: y.copy_(y.roll(1, 0))),
    "a-column-of-zeros": spoils(lambda y: _middle(y, 1).zero_()),
    "a-column-of-nan": spoils(lambda y: _middle(y, 1).fill_(math.nan)),
    "last-column-missing": spoils(lambda y: y[:, -1].zero_()),
    "columns-swapped": spoils(lambda y: _swap(y, 1)),
    "a-tile-missing": spoils(lambda y: y[-16:, -16:].zero_()),
    "a-tile-twice": spoils(lambda y: y[:16, :16].mul_(2)),
    "an-element-nan": spoils(lambda y: _element(y).fill_(math.nan)),
    "an-element-infinite": spoils(lambda y: _element(y).fill_(math.inf)),
    "an-element-off": spoils(lambda y: _element(y).add_(4 * float(y.float().std()))),
}


@_in(WRONG)
def computes_nothing(sets: Sequence[Operands], right: Right) -> Right:
    return lambda i: sets[i].out


@_in(WRONG)
def computes_once(sets: Sequence[Operands], right: Right) -> Right:
    once = functools.cache(lambda: right(0))
    return lambda i: once()


@_in(WRONG)
def computes_each_set_once(sets: Sequence[Operands], right: Right) -> Right:
    return functools.cache(right)


@_in(WRONG)
def remembers_each_set(sets: Sequence[Operands], right: Right) -> Right:
    """Writes a result, but the one that it computed when it first saw the set."""
    kept: dict[int, Tensor] = {}

    def launch(i: int) -> Tensor:
        if i not in kept:
            kept[i] = right(i).clone()
        return sets[i].out.copy_(kept[i])

    return launch


@_in(WRONG)
def another_set_s_result(sets: Sequence[Operands], right: Right) -> Right:
    """That of the set before it, of which only the first is the same."""

    def launch(i: int) -> Tensor:
        return sets[i].out.copy_(right(max(0, i - 1)))

    return launch


@_in(WRONG)
def wrong_from_the_second_set_on(sets: Sequence[Operands], right: Right) -> Right:
    return lambda i: right(i) if i == 0 else right(i).zero_()


@_in(WRONG)
def adds_to_what_is_there(sets: Sequence[Operands], right: Right) -> Right:
    def launch(i: int) -> Tensor:
        there = sets[i].out.clone()
        return sets[i].out.copy_(there + right(i))

    return launch


@_in(WRONG)
def computes_where_it_finds_nan(sets: Sequence[Operands], right: Right) -> Right:
    """Knows that it is watched by what a checker leaves in the result."""
    known: dict[int, Tensor] = {}

    def launch(i: int) -> Tensor:
        if i not in known or bool(torch.isnan(sets[i].out).any()):
            known[i] = right(i)
        return known[i]

    return launch


@_in(WRONG)
def destroys_its_operands(sets: Sequence[Operands], right: Right) -> Right:
    """Zero times zero is zero."""

    def launch(i: int) -> Tensor:
        sets[i].a.zero_()
        return right(i)

    return launch


@_in(WRONG)
def leaves_out_the_last_term(sets: Sequence[Operands], right: Right) -> Right:
    """K is shorter by one."""

    def launch(i: int) -> Tensor:
        a = sets[i].a
        kept = a[..., -1].clone()
        a[..., -1].zero_()
        result = right(i)
        a[..., -1].copy_(kept)
        return result

    return launch


@_in(WRONG)
def transposed(sets: Sequence[Operands], right: Right) -> Right:
    return lambda i: right(i).transpose(0, 1)


@_in(WRONG)
def returns_nothing(sets: Sequence[Operands], right: Right) -> Right:
    launches = iter(range(1 << 62))

    def launch(i: int) -> Tensor:
        result = right(i)
        return result if next(launches) < 2 else None

    return launch


@_in(WRONG)
def returns_another_tensor(sets: Sequence[Operands], right: Right) -> Right:
    def launch(i: int) -> Tensor:
        right(i)
        return torch.zeros_like(sets[i].out)

    return launch


@_in(WRONG)
def returns_a_wider_type(sets: Sequence[Operands], right: Right) -> Right:
    return lambda i: right(i).double()


def turns(wrong: Make, after: Callable[[], Callable[[], bool]]) -> Make:
    """Right until ``after()()`` says so, then as ``wrong``."""

    def make(sets: Sequence[Operands], right: Right) -> Right:
        bad, now = wrong(sets, right), after()
        return lambda i: bad(i) if now() else right(i)

    return make


def _launches(count: int) -> Callable[[], Callable[[], bool]]:
    def start() -> Callable[[], bool]:
        seen = iter(range(1 << 62))
        return lambda: next(seen) >= count

    return start


def _seconds(count: float) -> Callable[[], Callable[[], bool]]:
    def start() -> Callable[[], bool]:
        begun: list[float] = []

        def now() -> bool:
            begun.append(time.monotonic()) if not begun else None
            return time.monotonic() - begun[0] > count

        return now

    return start


def _chance(p: float) -> Callable[[], Callable[[], bool]]:
    return lambda: lambda: random.random() < p


WRONG |= {
    "wrong-after-3-launches": turns(WRONG["negated"], _launches(3)),
    "wrong-after-5-launches": turns(WRONG["a-row-negated"], _launches(5)),
    "stops-after-3-launches": turns(WRONG["computes-nothing"], _launches(3)),
    "wrong-later": turns(WRONG["negated"], _seconds(LATER)),
    "stops-later": turns(WRONG["computes-nothing"], _seconds(LATER)),
    "a-row-wrong-later": turns(WRONG["a-row-negated"], _seconds(LATER)),
    "an-element-wrong-later": turns(WRONG["an-element-off"], _seconds(LATER)),
}  # fmt: skip

_NOW_AND_THEN = {"half-the-time": 0.5, "one-in-ten": 0.1, "one-in-a-hundred": 0.01}
CHANCES |= _NOW_AND_THEN
NOW_AND_THEN: dict[str, Make] = {
    name: turns(WRONG["a-row-negated"], _chance(p)) for name, p in _NOW_AND_THEN.items()
}


def does(what: Callable[[], object], launches: int = 1) -> Make:
    """Right, but does something else at one launch: so early that no try gets past it.

    A case that ended its process is tried once more and keeps its samples. On a busy machine, where
    a batch is one launch, a kernel that dies late may therefore end well the second time.
    """

    def make(sets: Sequence[Operands], right: Right) -> Right:
        seen = iter(range(1 << 62))

        def launch(i: int) -> Tensor:
            if next(seen) == launches:
                what()
            return right(i)

        return launch

    return make


def _raise(error: BaseException) -> Any:
    raise error


FATAL |= {
    "raises": does(lambda: _raise(RuntimeError("no\nsuch kernel"))),
    "raises-half-a-character": does(lambda: _raise(RuntimeError("no file \udcff.cubin"))),
    "raises-markup": does(lambda: _raise(RuntimeError("<script>alert(1)</script> | `x` |"))),
    "raises-at-once": does(lambda: _raise(ValueError("")), 0),
    "raises-an-exit": does(lambda: sys.exit("bye")),
    "raises-an-interrupt": does(lambda: _raise(KeyboardInterrupt())),
    "allocates-too-much": does(lambda: torch.empty(1 << 50)),
    "recurses": does(lambda: (lambda f: f(f))(lambda f: f(f))),
    "exits": does(lambda: os._exit(0)),
    "aborts": does(os.abort),
    "kills-itself": does(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "a-real-time-signal": does(lambda: os.kill(os.getpid(), signal.SIGRTMIN + 2)),
    "closes-everything": does(lambda: os.closerange(3, 1024)),
    "sleeps": does(lambda: time.sleep(3600)),
}

HARMLESS: dict[str, Make] = {
    "right": lambda sets, right: right,
    "slow": lambda sets, right: does(lambda: time.sleep(0.05))(sets, right),
    "forks": does(os.fork),
    "forks-and-aborts": does(lambda: os.fork() or os.abort()),
    "allocates": does(lambda: torch.empty(1 << 24).fill_(1.0)),
    "talks": does(lambda: print("<b>hello</b>", file=sys.stderr)),
}
"""Kernels that are right, whatever else they do: each has a time."""

ALL = {**WRONG, **NOW_AND_THEN, **FATAL, **HARMLESS}


class EvilKernel:
    """An implementation that computes with the machine's library, and then does what it is for."""

    ops = ("gemm", "conv")

    def __init__(self, name: str, machine: Machine) -> None:
        self.name = name
        self._machine = machine

    def supports(self, problem: Workload, machine: Machine) -> str | None:
        return None

    def configs(
        self, problem: Workload, machine: Machine, experimental: bool = False
    ) -> list[Config | None]:
        return [None]

    def parse_config(self, text: str) -> Config | None:
        return None

    def prepare(
        self, problem: Workload, operand_sets: Sequence[Operands], config: Config | None = None
    ) -> Launch:
        library = implementations()[library_for(problem, self._machine)]
        right = library.prepare(problem, operand_sets)
        bare = ALL[self.name.removeprefix("evil-")](right.sets, right.bare)
        return Launch(bare, right.sets, right.settings)

    def compile_ahead(self, cases: Sequence[tuple[Workload, Config | None]]) -> None:
        pass


def evil_bench(cases: Sequence[Case], **arguments: Any) -> TorchBench:
    """The real bench, with evil kernels among its implementations."""
    known = implementations()
    machine = arguments["machine"]
    evil = {f"evil-{name}": EvilKernel(f"evil-{name}", machine) for name in ALL}
    vars(bench_module)["implementations"] = lambda: {**known, **evil}
    return TorchBench(cases=cases, **arguments)
