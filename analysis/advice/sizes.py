"""Generate nearby sizes that advice may recommend, and name the role of each dimension."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from kernels.common.checks import check_counts
from kernels.common.errors import UserError
from kernels.config import ceil_div
from kernels.problem import DTYPE_BYTES, WIDE_BYTES, Gemm, Problem

_MULTIPLES = (8, 16, 32, 64, 128, 256)
_LARGE_STEPS = {64, 128}  # a size that is a multiple of one of these may grow to the next multiple
_OF_SMALL = 4  # sizes below 16 may be multiples of this, so that 3 channels of images can become 4
_OF_VOCABULARY = (512, 1024)  # for a vocabulary; each GPU's part then consists of whole tiles
_WINDOW_SIZES = 6  # the sizes spread over a window are at least a sixth of the window apart
_EVERY = 16  # widest window in which every size is tried, if any size may be recommended
_MIN_VOCABULARY = 30_000  # this many or more output features are assumed to be a vocabulary
# Tolerance of the ends of a window, because rounding may move them: 800 × 1.15 is just below 920.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class SizeConstraints:
    """Constraints on the sizes that a recommendation may name.

    Attributes:
        change: the only dimensions that may change; if empty, all except those in ``fix`` may
            change.
        fix: dimensions that must not change.
        multiple: number that every changed size has to be a multiple of.
        any_size: if False, a changed size also has to be a multiple of 8, or of 4 if it is below
            16.
    """

    change: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()
    multiple: int = 1
    any_size: bool = False

    def __post_init__(self) -> None:
        check_counts(self, "multiple")
        # Dimensions may be named in upper or lower case. The class is frozen, so its fields cannot
        # be assigned in the usual manner.
        for field in ("change", "fix"):
            names = tuple(name.lower() for name in getattr(self, field))
            object.__setattr__(self, field, names)

    def check(self, problem: Problem) -> None:
        """Refuse constraints that do not fit a problem.

        Raises:
            UserError: if the problem lacks a named dimension, or if no dimension may change.
        """
        names = dimensions(problem)
        listed = ", ".join(name.upper() for name in names)
        for name in (*self.change, *self.fix):
            if name not in names:
                raise UserError(f"{problem} has no size {name.upper()}; name one of {listed}.")
        if not self.free(problem):
            raise UserError(
                f"{problem} has no size left to change; allow at least one of {listed} to change."
            )

    def free(self, problem: Problem) -> list[str]:
        """Return the dimensions that may change."""
        return [
            name
            for name in dimensions(problem)
            if name not in self.fix and (not self.change or name in self.change)
        ]

    def groups(self, problem: Problem) -> list[tuple[str, ...]]:
        """Return the dimensions that may change, in groups whose dimensions change together.

        The dimensions of :func:`sequence_dimensions` form a group. If one of them must not change,
        the other may change by itself.
        """
        free = self.free(problem)
        sequence = sequence_dimensions(problem)
        if not sequence or not set(sequence) <= set(free):
            return [(name,) for name in free]
        return [sequence, *((name,) for name in free if name not in sequence)]

    def allow(self, problem: Problem, option: Problem) -> bool:
        """Return True if an option changes only allowed dimensions, and only to allowed sizes.

        The dimensions of each group in :meth:`groups` must also have one common size.
        """
        free = self.free(problem)
        sizes_fit = all(
            name in free and self.fits(getattr(option, name)) for name in changed(problem, option)
        )
        return sizes_fit and all(
            len({getattr(option, name) for name in group}) == 1 for group in self.groups(problem)
        )

    def fits(self, size: int) -> bool:
        """Return True if the constraints allow this value for a changed size."""
        if self.any_size:
            step = 1
        elif size < 2 * _MULTIPLES[0]:
            step = _OF_SMALL
        else:
            step = _MULTIPLES[0]
        return size % step == 0 and size % self.multiple == 0


ANY_DIMENSION = SizeConstraints()


def changed(problem: Problem, option: Problem) -> list[str]:
    """Return the dimensions in which an option differs from a problem."""
    return [name for name in dimensions(problem) if getattr(problem, name) != getattr(option, name)]


def dimensions(problem: Problem) -> tuple[str, ...]:
    """Return the dimensions that advice may change: m, n and k, or a convolution's channels."""
    return ("m", "n", "k") if isinstance(problem, Gemm) else ("c", "kout")


def sequence_dimensions(problem: Problem) -> tuple[str, ...]:
    """Return the two dimensions that are the sequence length of self-attention, or ().

    A batched GEMM is assumed to belong to attention. In the layout nt, it computes scores or their
    gradients, and m and n are the sequence length. In other layouts, it computes sums over keys or
    queries, and m and k are the sequence length. The result is () for other problems, or if the two
    sizes differ.
    """
    if not isinstance(problem, Gemm) or problem.batch == 1:
        return ()
    names = ("m", "n") if problem.layout == "nt" else ("m", "k")
    return names if getattr(problem, names[0]) == getattr(problem, names[1]) else ()


def aligned_multiple(problem: Problem) -> int:
    """Return the number that every aligned size of a problem is a multiple of.

    For a GEMM, it is the number of elements that take 16 bytes. For a convolution, this number is
    multiplied by the number of groups.
    """
    groups = 1 if isinstance(problem, Gemm) else problem.groups
    return groups * WIDE_BYTES // DTYPE_BYTES[problem.dtype]


def misaligned(problem: Problem, option: Problem) -> list[str]:
    """Return the changed dimensions whose sizes in ``problem`` misalign its stored rows."""
    multiple = aligned_multiple(problem)
    return [
        name
        for name in changed(problem, option)
        if name in problem.row_dimensions and getattr(problem, name) % multiple
    ]


def sizes_of(problem: Problem) -> list[int]:
    """Return the sizes of a problem in the order of :func:`dimensions`."""
    return [getattr(problem, name) for name in dimensions(problem)]


Kind = tuple[str, tuple[object, ...]]
"""A problem's operation, and the values of all fields that advice never changes."""


def kind_of(problem: Problem) -> Kind:
    """Return the kind of a problem; advice compares only problems of the same kind."""
    fixed = [f.name for f in fields(problem) if f.name not in dimensions(problem)]
    return problem.op, tuple(getattr(problem, name) for name in fixed)


class SizeIndex:
    """Index of problems by kind and sizes."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        kinds: dict[Kind, list[int]] = {}
        for i, problem in enumerate(problems):
            kinds.setdefault(kind_of(problem), []).append(i)
        # For each kind, the positions of its problems, and their sizes (one row per problem).
        self._kinds = {
            kind: (np.array(positions), np.array([sizes_of(problems[i]) for i in positions]))
            for kind, positions in kinds.items()
        }

    def near(self, problem: Problem, less: float, more: float) -> NDArray[np.intp]:
        """Return the positions of problems whose sizes are in a window around those of ``problem``.

        The window of a size s extends from s × (1 + ``less``) to s × (1 + ``more``). Only problems
        of the same kind as ``problem`` are included.
        """
        kind = kind_of(problem)
        if kind not in self._kinds:
            return np.empty(0, dtype=np.intp)
        positions, sizes = self._kinds[kind]
        center = np.array(sizes_of(problem))
        smallest = center * (1 + less) - _ROUNDING
        largest = center * (1 + more) + _ROUNDING
        inside = (sizes >= smallest) & (sizes <= largest)
        return positions[inside.all(axis=1)]


def sizes_near(
    problem: Problem,
    allowance: float,
    choose: bool,
    tiles: Sequence[int] = (),
    constraints: SizeConstraints = ANY_DIMENSION,
) -> dict[tuple[str, ...], list[int]]:
    """Return the sizes to try for each group of :meth:`SizeConstraints.groups`.

    The sizes include the current size, and the nearest allowed multiples of several numbers, such
    as 64 and the tile edges in ``tiles``. For a choose query, further sizes are spread over the
    range from (1 − ``allowance``) to (1 + ``allowance``) times the current size. ``allowance`` has
    the same meaning as :attr:`analysis.advice.options.Question.allowance`.
    """
    sizes = {}
    for group in constraints.groups(problem):
        name = group[0]
        size = getattr(problem, name)
        low = math.ceil(size * (1 - allowance) - _ROUNDING) if choose else size
        high = math.floor(size * (1 + allowance) + _ROUNDING)
        # 1. Collect the multiples of each step that are nearest to the size, and further sizes.
        steps = {
            math.lcm(step, constraints.multiple)
            for step in _steps(problem, name, tiles, constraints)
        }
        candidates = {int(ceil_div(size, step)) * step for step in steps}
        # If the size is a multiple of a large step, its nearest multiple is the size itself.
        large_steps = {math.lcm(step, constraints.multiple) for step in _LARGE_STEPS}
        candidates |= {(size // step + 1) * step for step in large_steps}
        if constraints.any_size and high - low <= _EVERY:
            candidates |= set(range(low, high + 1))
        if choose:
            candidates |= {size // step * step for step in steps}
            candidates |= _across(low, high, constraints.multiple)
        # 2. Keep the current size, and all candidates that the window and the constraints allow.
        allowed = {
            candidate
            for candidate in candidates
            if low <= candidate <= high and candidate > 0 and constraints.fits(candidate)
        }
        sizes[group] = sorted({size, *allowed})
    return sizes


def _steps(
    problem: Problem, name: str, tiles: Sequence[int], constraints: SizeConstraints
) -> set[int]:
    """Return the numbers whose multiples are worth trying."""
    steps = {*_MULTIPLES, *tiles}
    if getattr(problem, name) < 2 * _MULTIPLES[0]:
        steps.add(_OF_SMALL)
    if role(problem, name) == "vocabulary":
        steps.update(_OF_VOCABULARY)
    if constraints.any_size:
        steps |= {1, 2, 4}
    return steps


def _across(low: int, high: int, multiple: int) -> set[int]:
    """Return at most seven equally spaced sizes from ``low`` to ``high``.

    All sizes are multiples of ``multiple``.
    """
    steps = [math.lcm(step, multiple) for step in _MULTIPLES]
    wide_enough = [step for step in steps if high - low <= _WINDOW_SIZES * step]
    if wide_enough:
        step = wide_enough[0]
    else:
        # A very wide window has too many multiples even of the last step, which is the largest.
        step = steps[-1] * int(ceil_div(high - low, _WINDOW_SIZES * steps[-1]))
    first = int(ceil_div(low, step)) * step
    return set(range(first, high + 1, step))


def with_sizes(problem: Problem, sizes: Sequence[Mapping[str, int]]) -> Iterator[Problem]:
    """Yield the problem with each of the given sets of sizes, but skip invalid sets.

    For example, a set is invalid if a convolution's groups do not divide the channels.
    """
    for values in sizes:
        try:
            yield replace(problem, **values)  # type: ignore[arg-type]
        except UserError:
            continue


def role(problem: Problem, name: str) -> str:
    """Return the probable meaning of a dimension, such as ``tokens``."""
    if not isinstance(problem, Gemm):
        return {"c": "channels in", "kout": "channels out"}[name]
    # Batched GEMMs are assumed to belong to attention. There, m is the sequence length, and so is
    # any other dimension of the same size.
    if problem.batch > 1:
        value = getattr(problem, name)
        return "sequence" if name == "m" or value == problem.m else "head"
    # The meanings of m, n and k, in this order.
    roles = {
        "nt": ("tokens", "features out", "features in"),  # y = x Wᵀ
        "nn": ("tokens", "features in", "features out"),  # dx = dy W
        "tn": ("features out", "features in", "tokens"),  # dW = dyᵀ x
    }.get(problem.layout, ("rows", "columns", "depth"))
    meaning = roles["mnk".index(name)]
    if meaning == "features out" and getattr(problem, name) >= _MIN_VOCABULARY:
        return "vocabulary"
    return meaning
