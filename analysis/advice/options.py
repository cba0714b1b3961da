"""Generate variants of a problem with other sizes, and predict the time of each variant."""

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
_ROUNDED = 1e-9  # tolerance, because rounding may move a share of FLOPs past the allowance
_BEST_SIZES = 3  # sizes of each dimension that are combined if not all combinations are tried


@dataclass(frozen=True)
class Question:
    """A pad or choose query.

    Attributes:
        kind: ``pad`` or ``choose``.
        allowance: largest increase of a dimension and of the FLOPs, as a fraction; for ``choose``,
            also the largest decrease.
        constraints: limits on which dimensions may change, and on the new sizes.
    """

    kind: str = "pad"
    allowance: float = 0.125
    constraints: SizeConstraints = ANY_DIMENSION

    @property
    def choose(self) -> bool:
        """True if sizes may also shrink; the query then compares speeds instead of times."""
        return self.kind == "choose"

    @property
    def farthest_factor(self) -> float:
        """Factor between the current size and the size farthest from it within the allowance.

        Shrinking by 20% is a larger factor than growing by 20%. With an allowance of 100%, a size
        may shrink to nearly nothing.
        """
        return 1 / max(1 - self.allowance, 1e-9) if self.choose else 1 + self.allowance

    def allows_flops(self, problem: Problem, option: Problem) -> bool:
        """Return True if the FLOPs of an option are within the allowance.

        If several sizes grow at once, the FLOPs may exceed the allowance although no size does.
        """
        extra_flops = option.flops / problem.flops - 1
        return -self.allowance - _ROUNDED <= extra_flops <= self.allowance + _ROUNDED

    def work(self, problem: Problem, option: Problem) -> float:
        """Return the factor that converts a time ratio to a ratio of what the query compares.

        A pad query compares times, so its factor is 1. A choose query compares speeds, so its
        factor is the ratio of the FLOPs, option over problem.
        """
        return option.flops / problem.flops if self.choose else 1.0


def question_of(
    pad: str | float | None, choose: str | float | None, constraints: SizeConstraints
) -> Question:
    """Return the query for a pad or a choose allowance; by default, pad by up to 12.5%.

    Raises:
        UserError: if both allowances are given, or if the given one is not a number, is ambiguous,
            or is out of range.
    """
    if pad is not None and choose is not None:
        raise UserError("--pad and --choose are different queries; give one of them, not both.")
    if choose is not None:
        return Question("choose", share_of(choose, "choose", MOST), constraints)
    if pad is not None:
        return Question("pad", share_of(pad, "pad", MOST), constraints)
    return Question(constraints=constraints)


MOST = 10.0
"""Largest allowance. A dimension of 1 may have to become several times as large to be aligned."""


Options = tuple[list[Problem], pd.DataFrame]
"""A problem followed by its variants with other sizes, and the model's prediction of each."""


def options_of(
    problem: Problem, model: Model, measured: Measurements, library: str, question: Question
) -> Options:
    """Return the problem, its variants with other sizes, and the model's prediction of each.

    All variants are within the limits of the query. If the sizes have too many combinations, only
    the best sizes of each dimension are combined. Measured problems nearby are tried, too.
    """
    return options_of_each({problem: library}, model, measured, question)[0]


def options_of_each(
    problems: Mapping[Problem, str], model: Model, measured: Measurements, question: Question
) -> list[Options]:
    """Return the options of many problems, given as a mapping from problems to vendor libraries.

    The options of all problems are predicted together, which is faster than predicting them one by
    one.
    """
    libraries = list(problems.values())

    def predict(option_lists: Sequence[list[Problem]]) -> list[pd.DataFrame]:
        all_options: list[Problem] = []
        library_of_each: list[str] = []
        for library, options in zip(libraries, option_lists, strict=True):
            all_options += options
            library_of_each += [library] * len(options)
        query = Query.with_implementations(all_options, library_of_each, measured.warm)
        frame = model.predict(query).frame() if all_options else pd.DataFrame()
        # Cut the rows of all options into one frame for each problem.
        bounds = itertools.accumulate(map(len, option_lists), initial=0)
        return [
            frame.iloc[start:end].reset_index(drop=True)
            for start, end in itertools.pairwise(bounds)
        ]

    # 1. Predict all options of a problem if they are few. Otherwise, predict only measured options,
    #    and options that change a single group of dimensions.
    first_options: list[list[Problem]] = []
    are_complete: list[bool] = []
    for problem in problems:
        options, is_complete = _first_options(problem, model, measured, question)
        first_options.append(options)
        are_complete.append(is_complete)
    first_frames = predict(first_options)
    # 2. Combine sizes only after this prediction, and only the best sizes of each dimension: three
    #    dimensions with fifteen values each would make thousands of combinations.
    combinations = [
        [] if is_complete else _combinations_of_best(options, frame, question)
        for options, is_complete, frame in zip(
            first_options, are_complete, first_frames, strict=True
        )
    ]
    combined_frames = predict(combinations)
    # 3. Append the combinations to the first options of each problem.
    results: list[Options] = []
    for options, frame, combined, combined_frame in zip(
        first_options, first_frames, combinations, combined_frames, strict=True
    ):
        if combined:
            frame = pd.concat([frame, combined_frame], ignore_index=True)
        results.append(([*options, *combined], frame))
    return results


def _first_options(
    problem: Problem, model: Model, measured: Measurements, question: Question
) -> tuple[list[Problem], bool]:
    """Return the options to predict first for a problem, and whether the problem has no others."""
    smallest_growth = -question.allowance if question.choose else 0.0
    near = [
        option
        for option in measured.near(problem, smallest_growth, question.allowance)
        if question.constraints.allow(problem, option) and question.allows_flops(problem, option)
    ]
    sizes = sizes_near(
        problem,
        question.allowance,
        question.choose,
        _tile_edges(model, problem.dtype),
        question.constraints,
    )
    if math.prod(map(len, sizes.values())) <= _MAX_COMBINATIONS:
        tried = list(_combined(problem, sizes))
        is_complete = True
    else:
        tried = [
            option
            for group, values in sizes.items()
            for option in _combined(problem, {group: values})
        ]
        is_complete = False
    allowed = [option for option in tried if question.allows_flops(problem, option)]
    return _ordered(problem, [*near, *allowed]), is_complete


def _combinations_of_best(
    options: Sequence[Problem], frame: pd.DataFrame, question: Question
) -> list[Problem]:
    """Return the combinations of the best sizes, except those that are already options."""
    problem = options[0]
    time_us_of = dict(zip(options, frame["time_us"], strict=True))

    def best_sizes(group: Sequence[str]) -> list[int]:
        """Return the current size and the best sizes of a group of dimensions."""
        candidates = [option for option in options if set(changed(problem, option)) <= {*group}]
        # The time per unit of work ranks the options of both kinds of queries.
        candidates.sort(key=lambda option: time_us_of[option] / question.work(problem, option))
        best = [getattr(option, group[0]) for option in candidates[:_BEST_SIZES]]
        return sorted({getattr(problem, group[0]), *best})

    groups = question.constraints.groups(problem)
    combined = _combined(problem, {group: best_sizes(group) for group in groups})
    return [
        option
        for option in combined
        if option not in time_us_of and question.allows_flops(problem, option)
    ]


def _tile_edges(model: Model, dtype: str) -> list[int]:
    """Return the edges of the vendor library's tiles.

    Edges that are powers of two are left out, because their multiples are tried anyway.
    """
    edges = {edge for tile in library_tiles(model.machine.generation, dtype) for edge in tile}
    return sorted(edge for edge in edges if edge.bit_count() > 1)


def _combined(
    problem: Problem, sizes: Mapping[tuple[str, ...], Sequence[int]]
) -> Iterator[Problem]:
    """Yield the problem with every valid combination of the given sizes."""
    combinations = [
        {name: value for group, value in zip(sizes, values, strict=True) for name in group}
        for values in itertools.product(*sizes.values())
    ]
    return with_sizes(problem, combinations)


def _ordered(problem: Problem, options: Sequence[Problem]) -> list[Problem]:
    """Return the problem, then the options in order of FLOPs, without duplicates."""
    unique = {problem, *options}
    return sorted(unique, key=lambda option: (option != problem, option.flops, option.spec()))
