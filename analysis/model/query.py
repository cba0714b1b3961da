"""Queries: lists of cases for which the model predicts the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.recordings.load import problems_of
from kernels.problem import Conv, Problem


@dataclass(frozen=True)
class Query:
    """Cases to predict: problems, and how each problem is computed and timed.

    All attributes have one element per case.

    Attributes:
        problems: the GEMMs and convolutions.
        implementations: name of the library or kernel that computes each problem.
        configs: config of the implementation in each case, empty for the default config.
        cached: True if operands that fit into the last-level cache are already in it.
        sustained: True if launches follow each other without pauses, False for bursts.
    """

    problems: Sequence[Problem]
    implementations: Sequence[str]
    configs: Sequence[str]
    cached: Sequence[bool]
    sustained: Sequence[bool]

    @classmethod
    def plain(cls, problems: Sequence[Problem], implementation: str, warm: bool = False) -> Query:
        """Make a query for problems that one implementation computes in bursts.

        The implementation uses its default config.

        Args:
            problems: the problems.
            implementation: name of the library or kernel.
            warm: True if operands that fit into the last-level cache are already in it.
        """
        return cls.with_implementations(problems, [implementation] * len(problems), warm)

    @classmethod
    def with_implementations(
        cls, problems: Sequence[Problem], implementations: Sequence[str], warm: bool = False
    ) -> Query:
        """Make a query as :meth:`plain` does, but with an implementation for each problem."""
        count = len(problems)
        return cls(
            problems,
            implementations,
            configs=[""] * count,
            cached=[warm] * count,
            sustained=[False] * count,
        )

    @classmethod
    def from_rows(cls, rows: pd.DataFrame) -> Query:
        """Make a query from the measured cases in a table with the columns of measurements.csv."""
        return cls(
            problems_of(rows),
            rows["implementation"].tolist(),
            rows["config"].tolist(),
            (rows["cache"] == "warm").tolist(),
            (rows["mode"] == "sustained").tolist(),
        )

    def groups(self) -> NDArray[Any]:
        """Return the name of each case's group (:func:`group_of`)."""
        pairs = zip(self.implementations, self.problems, strict=True)
        return np.array([group_of(name, problem) for name, problem in pairs], dtype=object)

    def take(self, positions: NDArray[np.intp]) -> Query:
        """Return a query of the cases at the given positions."""
        columns = []
        for field in fields(self):
            values = getattr(self, field.name)
            columns.append([values[i] for i in positions])
        return Query(*columns)


def group_of(implementation: str, problem: Problem) -> str:
    """Return the name of a case's group, such as ``cublas gemm bf16`` or ``cudnn dgrad bf16``.

    The cases of a group have the same implementation, operation and dtype. Here, the operation of a
    convolution is its pass.
    """
    operation = problem.pass_ if isinstance(problem, Conv) else problem.op
    return f"{implementation} {operation} {problem.dtype}"
