"""Answer pad/choose queries with advice on each problem, and name the data behind the advice."""

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


@dataclass(frozen=True)
class Answer:
    """Advice on one problem, with the kind and the source of the data behind the advice.

    Attributes:
        basis: kind of the data, such as ``recorded`` or ``public``.
        source: where the data come from, in words.
    """

    advice: Advice
    basis: str
    source: str

    def to_json(self) -> dict[str, Any]:
        """Return the answer as ``recommend --json`` prints it."""
        return {**self.advice.to_json(), "basis": self.basis, "source": self.source}


def answers_to(problems: Sequence[Problem], basis: Basis, question: Question) -> list[Answer]:
    """Return an answer for each problem.

    Raises:
        UserError: for an unreadable recording, an unsupported dtype, or constraints that do not
            fit a problem.
    """
    measured = measurements_near(basis, problems, question.farthest_factor)
    answers = []
    for problem in problems:
        library = basis.library(problem)
        advice = advise(problem, basis.model, measured, library, question)
        is_measured = advice.evidence != PREDICTED
        kind, source = basis.kind_and_source(
            problem,
            measured=is_measured,
            in_model_folder=(problem, library) in measured.older,
        )
        answers.append(Answer(advice, kind, source))
    return answers
