"""Answers about problems on a machine: the advice on each, and what it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analysis.advice.options import Question
from analysis.advice.recommend import Advice, advise
from analysis.advice.times import measurements_near
from analysis.advice.verdict import PREDICTED
from analysis.model.basis import Basis
from kernels.problem import Problem

_LEAST = 0.1  # of a size, below which measured sizes are not looked for


@dataclass(frozen=True)
class Answer:
    """The advice on one problem; ``basis`` and ``source`` are what it rests on, as of
    :meth:`analysis.model.basis.Basis.of`.
    """

    advice: Advice
    basis: str
    source: str

    def to_json(self) -> dict[str, Any]:
        """Flat, as promised of ``recommend --json``."""
        return {**self.advice.to_json(), "basis": self.basis, "source": self.source}


def answers_to(problems: Sequence[Problem], basis: Basis, question: Question) -> list[Answer]:
    """An answer for each problem, in their order.

    Raises:
        UserError: the recording cannot be read, or a problem has no size that may be changed.
    """
    # Larger by the allowance in each size or, to choose, smaller by it.
    factor = max(1 + question.allowance, 1 / max(1 - question.allowance, _LEAST))
    measured = measurements_near(basis, problems, factor)
    found = []
    for problem in problems:
        advice = advise(problem, basis.model, measured, basis.library(problem), question)
        origin = basis.kind_and_source(problem, measured=advice.evidence != PREDICTED)
        found.append(Answer(advice, *origin))
    return found
