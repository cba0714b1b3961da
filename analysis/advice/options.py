"""Other sizes that a problem might have, and how long the model predicts each to take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from analysis.advice.measurements import Measurements
from analysis.advice.sizes import (
    ANY_DIMENSION,
    SizeConstraints,
    changed,
    dimensions,
    sizes_near,
    with_sizes,
)
from analysis.model.predict import Model
from analysis.model.query import Query
from analysis.words import share_of
from kernels.common.errors import UserError
from kernels.config import library_tiles
from kernels.problem import Problem

_MAX_COMBINATIONS = 256  # up to which all combinations of sizes are tried
_ROUNDED = 1e-9
_BEST_SIZES = 3  # per dimension, which are combined where there are more


@dataclass(frozen=True)
class Question:
    """What is asked of a problem.

    ``kind`` is ``pad`` or ``choose``, ``allowance`` how much larger a dimension and the FLOPs may
    become, as a fraction, and to choose also how much smaller; ``wishes`` says which sizes may be
    named.
    """

    kind: str = "pad"
    allowance: float = 0.125
    wishes: SizeConstraints = ANY_DIMENSION

    @property
    def choose(self) -> bool:
        """Whether smaller sizes count, and speed rather than time."""
        return self.kind == "choose"

    def holds(self, problem: Problem, option: Problem) -> bool:
        """Whether an option's FLOPs are within the allowance, too: two sizes that each use all of
        it would use it twice.
        """
        more = option.flops / problem.flops - 1
        return -self.allowance - _ROUNDED <= more <= self.allowance + _ROUNDED

    def work(self, problem: Problem, option: Problem) -> float:
        """What a time ratio is multiplied by: choosing compares speeds, padding compares times."""
        return option.flops / problem.flops if self.choose else 1.0


def question_of(
    pad: str | float | None, choose: str | float | None, wishes: SizeConstraints
) -> Question:
    """The question of whoever gave one of two allowances, or neither: to pad by an eighth.

    Raises:
        UserError: both are given, or one is no share.
    """
    if pad is not None and choose is not None:
        raise UserError("give either --pad or --choose, not both.")
    kind, given = ("pad", pad) if choose is None else ("choose", choose)
    return Question(
        kind, Question.allowance if given is None else share_of(given, kind, MOST), wishes
    )


MOST = 10.0
"""The largest allowance: of a handful of rows, a size may well be several times as large."""


Options = tuple[list[Problem], pd.DataFrame]
"""A problem and other sizes of it, and the model's prediction of each."""


def options_of(
    problem: Problem, model: Model, measured: Measurements, library: str, question: Question
) -> Options:
    """The problem first, then other sizes of it, and the model's prediction of each.

    All combinations of round sizes where they are few; else all sizes of one dimension at a time,
    and the combinations of the best of these. Measured neighbours that may be named are options.
    """
    return options_of_each({problem: library}, model, measured, question)[0]


def options_of_each(
    problems: Mapping[Problem, str], model: Model, measured: Measurements, question: Question
) -> list[Options]:
    """The options of each of many problems (mapped to their library).

    All are predicted together: one problem after another takes longer.
    """
    libraries = list(problems.values())

    def predicted(lists: Sequence[list[Problem]]) -> list[pd.DataFrame]:
        names = [name for name, some in zip(libraries, lists, strict=True) for _ in some]
        query = Query.with_implementations(
            [option for some in lists for option in some], names, measured.warm
        )
        frame = model.predict(query).frame() if names else pd.DataFrame()
        ends = itertools.accumulate(map(len, lists), initial=0)
        return [frame.iloc[i:j].reset_index(drop=True) for i, j in itertools.pairwise(ends)]

    first = [_first_options(problem, model, measured, question) for problem in problems]
    frames = predicted([options for options, _ in first])
    # Three sizes with fifteen values each make thousands of combinations.
    more = [
        [] if whole else _combinations_of_best(options, frame, question)
        for (options, whole), frame in zip(first, frames, strict=True)
    ]
    found: list[Options] = []
    for (options, _), frame, rest, of_rest in zip(
        first, frames, more, predicted(more), strict=True
    ):
        both = pd.concat([frame, of_rest], ignore_index=True) if rest else frame
        found.append(([*options, *rest], both))
    return found


def _first_options(
    problem: Problem, model: Model, measured: Measurements, question: Question
) -> tuple[list[Problem], bool]:
    """All options where they are few, else those that change one size; and whether that is all."""
    near = [
        option
        for option in measured.near(
            problem, -question.allowance if question.choose else 0.0, question.allowance
        )
        if question.wishes.allow(problem, option) and question.holds(problem, option)
    ]
    sizes = sizes_near(
        problem,
        question.allowance,
        question.choose,
        _tile_edges(model, problem.dtype),
        question.wishes,
    )
    if math.prod(map(len, sizes.values())) <= _MAX_COMBINATIONS:
        combined = (o for o in _combined(problem, sizes) if question.holds(problem, o))
        return _ordered(problem, [*near, *combined]), True
    one_by_one = [{d: v} for d, values in sizes.items() for v in values]
    return _ordered(problem, [*near, *with_sizes(problem, one_by_one)]), False


def _combinations_of_best(
    alone: Sequence[Problem], frame: pd.DataFrame, question: Question
) -> list[Problem]:
    """What combines the best sizes of each dimension, without the options that change one.

    Args:
        alone: the problem, then the options that change one size, or were measured.
        frame: the model's prediction of each.
        question: what is asked.
    """
    problem, time = alone[0], dict(zip(alone, frame["time_us"], strict=True))

    def best(d: str) -> set[int]:
        """The problem's size in one dimension, and the best ones if only that one changes."""
        fixed = {o: getattr(o, d) for o in alone if set(changed(problem, o)) <= {d}}
        order = sorted(fixed, key=lambda o: time[o] / question.work(problem, o))
        return {getattr(problem, d), *(fixed[o] for o in order[:_BEST_SIZES])}

    combined = _combined(problem, {d: sorted(best(d)) for d in dimensions(problem)})
    return [o for o in combined if o not in time and question.holds(problem, o)]


def _tile_edges(model: Model, dtype: str) -> list[int]:
    """Edges of the library's tiles on a machine that are no power of two."""
    edges = {edge for tile in library_tiles(model.machine.generation, dtype) for edge in tile}
    return sorted(edge for edge in edges if edge.bit_count() > 1)


def _combined(problem: Problem, sizes: Mapping[str, Sequence[int]]) -> Iterator[Problem]:
    products = itertools.product(*sizes.values())
    return with_sizes(problem, [dict(zip(sizes, values, strict=True)) for values in products])


def _ordered(problem: Problem, options: Sequence[Problem]) -> list[Problem]:
    """The problem first, then the options by FLOPs, without duplicates."""
    unique = {problem, *options}
    return sorted(unique, key=lambda option: (option != problem, option.flops, option.spec()))
