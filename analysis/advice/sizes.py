"""The sizes near a problem's that a recommendation may name, and what each size stands for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.common.checks import check_counts
from kernels.common.errors import UserError
from kernels.config import ceil_div
from kernels.problem import Gemm, Problem

_MULTIPLES = (8, 16, 32, 64, 128, 256)
_LARGE_STEPS = {64, 128}  # of which the next multiple counts even if the size is one
_OF_SMALL = 4  # what a size under 16 may be a multiple of: images have three channels
_OF_VOCABULARY = (512, 1024)  # as many processes as share one want whole tiles each
_WINDOW_SIZES = 6  # across a window, beside the nearest multiples
_EVERY = 16  # sizes in a window, up to which every one is tried if any may be named
_MIN_VOCABULARY = 30_000  # so many output features are taken for a vocabulary


@dataclass(frozen=True)
class SizeConstraints:
    """Which sizes a recommendation may name.

    ``change`` are the only dimensions that it may change (all if empty), ``fix`` those that it may
    not, and a changed size is a multiple of ``multiple``. Unless ``any_size``, it is also one that
    an engineer would choose: a multiple of 8, or of 4 if it is under 16.
    """

    change: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()
    multiple: int = 1
    any_size: bool = False

    def __post_init__(self) -> None:
        check_counts(self, "multiple")
        for name in ("change", "fix"):  # sizes have names in both cases
            object.__setattr__(self, name, tuple(size.lower() for size in getattr(self, name)))

    def check(self, problem: Problem) -> None:
        """
        Raises:
            UserError: the problem has no such dimension, or none is left to be changed.
        """
        known = dimensions(problem)
        names = ", ".join(name.upper() for name in known)
        for name in (*self.change, *self.fix):
            if name not in known:
                raise UserError(f"{problem} has no size {name.upper()} to change; it has {names}.")
        if not self.free(problem):
            raise UserError(f"{problem} has no size left to change; its sizes are {names}.")

    def free(self, problem: Problem) -> list[str]:
        """The dimensions that may be changed."""
        return [
            name
            for name in dimensions(problem)
            if name not in self.fix and (not self.change or name in self.change)
        ]

    def allow(self, problem: Problem, option: Problem) -> bool:
        """Whether every size that differs may be changed, and to that."""
        free = self.free(problem)
        return all(
            name in free and self.fits(getattr(option, name)) for name in changed(problem, option)
        )

    def fits(self, size: int) -> bool:
        """Whether a size may be named."""
        step = 1 if self.any_size else _OF_SMALL if size < 2 * _MULTIPLES[0] else _MULTIPLES[0]
        return size % step == 0 and size % self.multiple == 0


ANY_DIMENSION = SizeConstraints()


def changed(problem: Problem, option: Problem) -> list[str]:
    """The dimensions in which an option differs."""
    return [d for d in dimensions(problem) if getattr(problem, d) != getattr(option, d)]


def dimensions(problem: Problem) -> tuple[str, ...]:
    """The sizes of a problem that may be changed: M, N and K, or a convolution's channels."""
    return ("m", "n", "k") if isinstance(problem, Gemm) else ("c", "kout")


def sizes_of(problem: Problem) -> list[int]:
    """Their values."""
    return [getattr(problem, name) for name in dimensions(problem)]


def kind_of(problem: Problem) -> Any:
    """Everything of a problem but the sizes that a recommendation may change."""
    fixed = [f.name for f in fields(problem) if f.name not in dimensions(problem)]
    return problem.op, tuple(getattr(problem, name) for name in fixed)


class SizeIndex:
    """Finds the problems whose sizes are near another's, of those that differ in nothing else."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        """Positions in ``problems`` are what :meth:`near` returns."""
        kinds: dict[Any, list[int]] = {}
        for i, problem in enumerate(problems):
            kinds.setdefault(kind_of(problem), []).append(i)
        self._kinds = {
            kind: (np.array(where), np.array([sizes_of(problems[i]) for i in where]))
            for kind, where in kinds.items()
        }

    def near(self, problem: Problem, less: float, more: float) -> NDArray[np.intp]:
        """Positions of problems each of whose sizes is this one's plus ``less`` to ``more`` of it.

        Both are fractions; a negative one allows smaller sizes.
        """
        nothing = np.empty(0, dtype=np.intp), np.empty((0, len(dimensions(problem))))
        where, sizes = self._kinds.get(kind_of(problem), nothing)
        center = np.array(sizes_of(problem))
        inside = (sizes >= center * (1 + less)) & (sizes <= center * (1 + more))
        return where[inside.all(axis=1)]


def sizes_near(
    problem: Problem,
    allowance: float,
    choose: bool,
    tiles: Sequence[int] = (),
    wishes: SizeConstraints = ANY_DIMENSION,
) -> dict[str, list[int]]:
    """Sizes of each dimension within the allowance that may be named, and the problem's own.

    To pad, the nearest multiples above; to choose, also those below, and some across the window.

    Args:
        problem: whose sizes.
        allowance: how much larger or, to choose, smaller, as a fraction.
        choose: whether smaller ones count.
        tiles: edges of the library's tiles, whose multiples count, too.
        wishes: which sizes may be named.
    """
    sizes = {}
    free = wishes.free(problem)
    for name in dimensions(problem):
        size = getattr(problem, name)
        low = math.ceil(size * (1 - allowance)) if choose else size
        high = math.floor(size * (1 + allowance))
        steps = {math.lcm(step, wishes.multiple) for step in _steps(problem, name, tiles, wishes)}
        rounded = {int(ceil_div(size, step)) * step for step in steps}
        rounded |= {int(size // step + 1) * step for step in steps & _LARGE_STEPS}
        if wishes.any_size and high - low <= _EVERY:
            rounded |= set(range(low, high + 1))
        if choose:
            rounded |= {size // step * step for step in steps}
            rounded |= _across(low, high, wishes.multiple)
        allowed = {v for v in rounded if low <= v <= high and v > 0 and wishes.fits(v)}
        sizes[name] = sorted({size} | (allowed if name in free else set()))
    return sizes


def _steps(problem: Problem, name: str, tiles: Sequence[int], wishes: SizeConstraints) -> set[int]:
    """What a dimension's sizes may be multiples of."""
    steps = {*_MULTIPLES, *tiles}
    if getattr(problem, name) < 2 * _MULTIPLES[0]:
        steps.add(_OF_SMALL)
    if role(problem, name) == "vocabulary":
        steps |= {*_OF_VOCABULARY}
    return steps | {1, 2, 4} if wishes.any_size else steps


def _across(low: int, high: int, multiple: int) -> set[int]:
    """Some sizes from end to end of a window: multiples of as large a step as leaves six."""
    steps = [math.lcm(step, multiple) for step in _MULTIPLES]
    coarse = steps[-1] * int(ceil_div(high - low, _WINDOW_SIZES * steps[-1]))
    step = next((s for s in steps if high - low <= _WINDOW_SIZES * s), coarse)
    return set(range(int(ceil_div(low, step)) * step, high + 1, step))


def with_sizes(problem: Problem, sizes: Sequence[Mapping[str, int]]) -> Iterator[Problem]:
    """The problem with other sizes, where it can have them: groups divide channels."""
    for values in sizes:
        try:
            yield replace(problem, **values)  # type: ignore[arg-type]
        except UserError:
            continue


def role(problem: Problem, name: str) -> str:
    """What a dimension stands for in a model, as far as the layout tells."""
    if not isinstance(problem, Gemm):
        return {"c": "channels in", "kout": "channels out"}[name]
    if problem.batch > 1:
        value = getattr(problem, name)
        return "sequence" if name == "m" or value == problem.m else "head"
    roles = {
        "nt": ("tokens", "features out", "features in"),  # y = x Wᵀ
        "nn": ("tokens", "features in", "features out"),  # dx = dy W
        "tn": ("features out", "features in", "tokens"),  # dW = dyᵀ x
    }.get(problem.layout, ("rows", "columns", "depth"))
    meaning = roles["mnk".index(name)]
    large = meaning == "features out" and getattr(problem, name) >= _MIN_VOCABULARY
    return "vocabulary" if large else meaning
