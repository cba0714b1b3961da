"""Generate the other sizes that a problem might have, and predict the time of each."""

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

_MAX_COMBINATIONS = 256  # up to this many, all combinations of sizes are tried
_ROUNDED = 1e-9  # tolerance for shares of FLOPs that rounding moves past the allowance
_BEST_SIZES = 3  # sizes of each dimension that are combined if there are more combinations


@dataclass(frozen=True)
class Question:
    """A pad or choose query.

    Attributes:
        kind: ``pad`` or ``choose``.
        allowance: how much larger a dimension and the FLOPs may become, as a fraction; for
            ``choose``, also how much smaller.
        wishes: constraints on the sizes that may be named.
    """

    kind: str = "pad"
    allowance: float = 0.125
    wishes: SizeConstraints = ANY_DIMENSION

    @property
    def choose(self) -> bool:
        """True if smaller sizes count too, and speeds are compared instead of times."""
        return self.kind == "choose"

    def holds(self, problem: Problem, option: Problem) -> bool:
        """Return True if the FLOPs of an option are within the allowance, too.

        Otherwise, two sizes that each grow by the allowance would let the FLOPs grow by twice it.
        """
        more = option.flops / problem.flops - 1
        return -self.allowance - _ROUNDED <= more <= self.allowance + _ROUNDED

    def work(self, problem: Problem, option: Problem) -> float:
        """Return the factor that turns a time ratio into a ratio of what the query compares.

        The factor is 1 for a pad query, which compares times. For a choose query, which compares
        speeds, it is the option's FLOPs over the problem's.
        """
        return option.flops / problem.flops if self.choose else 1.0


def question_of(
    pad: str | float | None, choose: str | float | None, wishes: SizeConstraints
) -> Question:
    """Return the query for at most one of two allowances; by default, pad by up to an eighth.

    Raises:
        UserError: if both allowances are given, or one is not a share.
    """
    if pad is not None and choose is not None:
        raise UserError("give either --pad or --choose, not both.")
    kind, given = ("pad", pad) if choose is None else ("choose", choose)
    return Question(
        kind, Question.allowance if given is None else share_of(given, kind, MOST), wishes
    )


MOST = 10.0
"""Largest allowance. A dimension of only a few rows may well become several times as large."""


Options = tuple[list[Problem], pd.DataFrame]
"""A problem followed by other sizes of it, and the model's prediction of each."""


def options_of(
    problem: Problem, model: Model, measured: Measurements, library: str, question: Question
) -> Options:
    """Return the problem, then other sizes of it, and the model's prediction of each.

    If there are few combinations of round sizes, all are options. Otherwise the options are all
    sizes of one dimension at a time, and combinations of the best of these. Measured problems
    nearby are options, too, if their sizes may be named.
    """
    return options_of_each({problem: library}, model, measured, question)[0]


def options_of_each(
    problems: Mapping[Problem, str], model: Model, measured: Measurements, question: Question
) -> list[Options]:
    """Return the options of many problems, given as a mapping from problems to vendor libraries.

    Options of all problems are predicted together, which is faster than one problem at a time.
    """
    libraries = list(problems.values())

    def predict(lists: Sequence[list[Problem]]) -> list[pd.DataFrame]:
        names = [name for name, options in zip(libraries, lists, strict=True) for _ in options]
        query = Query.with_implementations(
            [option for options in lists for option in options], names, measured.warm
        )
        frame = model.predict(query).frame() if names else pd.DataFrame()
        ends = itertools.accumulate(map(len, lists), initial=0)
        return [frame.iloc[i:j].reset_index(drop=True) for i, j in itertools.pairwise(ends)]

    first = [_first_options(problem, model, measured, question) for problem in problems]
    frames = predict([options for options, _ in first])
    # Combine sizes only after a first prediction, and only the best sizes of each dimension: three
    # dimensions with fifteen values each would make thousands of combinations.
    combinations = [
        [] if complete else _combinations_of_best(options, frame, question)
        for (options, complete), frame in zip(first, frames, strict=True)
    ]
    results: list[Options] = []
    for (options, _), frame, combined, combined_frame in zip(
        first, frames, combinations, predict(combinations), strict=True
    ):
        full = pd.concat([frame, combined_frame], ignore_index=True) if combined else frame
        results.append(([*options, *combined], full))
    return results


def _first_options(
    problem: Problem, model: Model, measured: Measurements, question: Question
) -> tuple[list[Problem], bool]:
    """Return all options if there are few, else only those that change a single size.

    The second value is True if these are all options.
    """
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
    singles: Sequence[Problem], frame: pd.DataFrame, question: Question
) -> list[Problem]:
    """Combine the best sizes of each dimension; return the combinations that are not yet options.

    Args:
        singles: the problem itself, followed by the options that change only one size or that were
            measured.
        frame: the model's prediction of each.
        question: the query.
    """
    problem, time = singles[0], dict(zip(singles, frame["time_us"], strict=True))

    def best(d: str) -> set[int]:
        """Return a dimension's size, and its best sizes if no other dimension changes."""
        fixed = {o: getattr(o, d) for o in singles if set(changed(problem, o)) <= {d}}
        order = sorted(fixed, key=lambda o: time[o] / question.work(problem, o))
        return {getattr(problem, d), *(fixed[o] for o in order[:_BEST_SIZES])}

    combined = _combined(problem, {d: sorted(best(d)) for d in dimensions(problem)})
    return [o for o in combined if o not in time and question.holds(problem, o)]


def _tile_edges(model: Model, dtype: str) -> list[int]:
    """Return the edges of the vendor library's tiles that are not a power of two."""
    edges = {edge for tile in library_tiles(model.machine.generation, dtype) for edge in tile}
    return sorted(edge for edge in edges if edge.bit_count() > 1)


def _combined(problem: Problem, sizes: Mapping[str, Sequence[int]]) -> Iterator[Problem]:
    """Yield the problem with every combination of the given sizes."""
    products = itertools.product(*sizes.values())
    return with_sizes(problem, [dict(zip(sizes, values, strict=True)) for values in products])


def _ordered(problem: Problem, options: Sequence[Problem]) -> list[Problem]:
    """Return the problem first, then the options by FLOPs, without duplicates."""
    unique = {problem, *options}
    return sorted(unique, key=lambda option: (option != problem, option.flops, option.spec()))
