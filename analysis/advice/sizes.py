"""The sizes near a problem's that a recommendation may name, and what each size stands for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.config import ceil_div
from kernels.errors import UserError
from kernels.problem import Gemm, Problem

_MULTIPLES = (8, 16, 32, 64, 128, 256)
_WINDOW_SIZES = 6  # across a window, beside the nearest multiples
_MIN_VOCABULARY = 30_000  # so many output features are taken for a vocabulary


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


def sizes_near(problem: Problem, allowance: float, choose: bool) -> dict[str, list[int]]:
    """Round sizes of each dimension within the allowance, and the problem's own.

    To pad, the nearest multiples above; to choose, also those below, and some across the window.
    """
    sizes = {}
    for name in dimensions(problem):
        size = getattr(problem, name)
        low = math.ceil(size * (1 - allowance)) if choose else size
        high = math.floor(size * (1 + allowance))
        rounded = {int(ceil_div(size, step)) * step for step in _MULTIPLES}
        if choose:
            rounded |= {size // step * step for step in _MULTIPLES}
            coarse = _MULTIPLES[-1] * ceil_div(high - low, _WINDOW_SIZES * _MULTIPLES[-1])
            step = next((s for s in _MULTIPLES if high - low <= _WINDOW_SIZES * s), coarse)
            rounded |= set(range(ceil_div(low, step) * step, high + 1, step))
        sizes[name] = sorted({size} | {v for v in rounded if low <= v <= high and v > 0})
    return sizes


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
