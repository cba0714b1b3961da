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
    Wishes,
    changed,
    dimensions,
    sizes_near,
    with_sizes,
)
from analysis.model.predict import Model
from analysis.model.query import Query
from analysis.words import share_of
from kernels.config import library_tiles
from kernels.errors import UserError
from kernels.problem import Problem

_MAX_COMBINATIONS = 256  # up to which all combinations of sizes are tried
_BEST_SIZES = 3  # per dimension, which are combined where there are more


@dataclass(frozen=True)
class Question:
    """What is asked of a problem.

    ``kind`` is ``pad`` or ``choose``, ``allowance`` how much larger a dimension may become, as a
    fraction, and to choose also how much smaller; ``wishes`` says which sizes may be named.
    """

    kind: str = "pad"
    allowance: float = 0.125
    wishes: Wishes = ANY_DIMENSION

    @property
    def choose(self) -> bool:
        """Whether smaller sizes count, and speed rather than time."""
        return self.kind == "choose"

    def work(self, problem: Problem, option: Problem) -> float:
        """What a time ratio is multiplied by: choosing compares speeds, padding compares times."""
        return option.flops / problem.flops if self.choose else 1.0


def question_of(pad: str | float | None, choose: str | float | None, wishes: Wishes) -> Question:
    """The question of whoever gave one of two allowances, or neither: to pad by an eighth.

    Raises:
        UserError: both are given, or one is no share.
    """
    if pad is not None and choose is not None:
        raise UserError("give --pad or --choose, not both: they are two questions.")
    kind, given = ("pad", pad) if choose is None else ("choose", choose)
    return Question(kind, Question.allowance if given is None else share_of(given, kind), wishes)


def options_of(
    problem: Problem, model: Model, measured: Measurements, library: str, question: Question
) -> tuple[list[Problem], pd.DataFrame]:
    """The problem first, then other sizes of it, and the model's prediction of each.

    All combinations of round sizes where they are few; else all sizes of one dimension at a time,
    and the combinations of the best of these. Measured neighbours that may be named are options.
    """

    def predict(options: Sequence[Problem]) -> pd.DataFrame:
        return model.predict(Query.plain(options, library, measured.warm)).frame()

    near = [
        option for option in measured.near(problem, -question.allowance if question.choose else 0.0,
                                           question.allowance)
        if question.wishes.allow(problem, option)
    ]  # fmt: skip
    sizes = sizes_near(problem, question.allowance, question.choose,
                       _tile_edges(model, problem.dtype), question.wishes)  # fmt: skip
    if math.prod(map(len, sizes.values())) <= _MAX_COMBINATIONS:
        options = _ordered(problem, [*near, *_combined(problem, sizes)])
        return options, predict(options)
    # Three sizes with fifteen values each make thousands of combinations.
    one_by_one = [{d: v} for d, values in sizes.items() for v in values]
    alone = _ordered(problem, [*near, *with_sizes(problem, one_by_one)])
    first = predict(alone)
    time = dict(zip(alone, first["time_us"], strict=True))

    def best(d: str) -> set[int]:
        """The problem's size in one dimension, and the best ones if only that one changes."""
        fixed = {o: getattr(o, d) for o in alone if set(changed(problem, o)) <= {d}}
        order = sorted(fixed, key=lambda o: time[o] / question.work(problem, o))
        return {getattr(problem, d), *(fixed[o] for o in order[:_BEST_SIZES])}

    combined = _combined(problem, {d: sorted(best(d)) for d in dimensions(problem)})
    rest = [option for option in combined if option not in time]
    if not rest:
        return alone, first
    return [*alone, *rest], pd.concat([first, predict(rest)], ignore_index=True)


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
