"""Cases to predict: problems, and how each of them is computed and timed."""

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
    """Cases to predict: problems, and how each of them is computed and timed.

    ``cached`` is True where operands come from the cache if they fit it. ``sustained`` is True
    where launches follow each other without pauses.
    """

    problems: Sequence[Problem]
    implementations: Sequence[str]
    configs: Sequence[str]
    cached: Sequence[bool]
    sustained: Sequence[bool]

    @classmethod
    def plain(cls, problems: Sequence[Problem], implementation: str, warm: bool = False) -> Query:
        """Take problems on one implementation, with its default config, timed in bursts.

        Operands come from memory or, if ``warm``, from the cache where they fit it.
        """
        return cls.with_implementations(problems, [implementation] * len(problems), warm)

    @classmethod
    def with_implementations(
        cls, problems: Sequence[Problem], implementations: Sequence[str], warm: bool = False
    ) -> Query:
        """Take each problem on its own implementation, otherwise as in :meth:`plain`."""
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
        """Read the cases of measured rows."""
        return cls(
            problems_of(rows),
            rows["implementation"].tolist(),
            rows["config"].tolist(),
            (rows["cache"] == "warm").tolist(),
            (rows["mode"] == "sustained").tolist(),
        )

    def groups(self) -> NDArray[Any]:
        """Return the name of each case's group."""
        pairs = zip(self.implementations, self.problems, strict=True)
        return np.array([group_of(name, problem) for name, problem in pairs], dtype=object)

    def take(self, where: NDArray[np.intp]) -> Query:
        """Return the cases at some positions."""
        columns = ([getattr(self, f.name)[i] for i in where] for f in fields(self))
        return Query(*columns)


def group_of(implementation: str, problem: Problem) -> str:
    """Name the group of a problem, such as ``cublas gemm bf16`` or ``cudnn dgrad bf16``."""
    operation = problem.pass_ if isinstance(problem, Conv) else problem.op
    return f"{implementation} {operation} {problem.dtype}"
