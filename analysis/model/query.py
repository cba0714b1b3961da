"""The cases to predict: problems, and how each is computed and timed."""

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
    """The cases to predict: problems, and how each is computed and timed."""

    problems: Sequence[Problem]
    implementations: Sequence[str]
    configs: Sequence[str]
    cached: Sequence[bool]
    sustained: Sequence[bool]

    @classmethod
    def plain(cls, problems: Sequence[Problem], implementation: str, warm: bool = False) -> Query:
        """Problems on one implementation, its default config, in bursts.

        Operands come from memory or, ``warm``, from the cache where they fit it.
        """
        return cls.with_implementations(problems, [implementation] * len(problems), warm)

    @classmethod
    def with_implementations(
        cls, problems: Sequence[Problem], implementations: Sequence[str], warm: bool = False
    ) -> Query:
        """As :meth:`plain`, each problem on its implementation."""
        n = len(problems)
        return cls(problems, implementations, [""] * n, [warm] * n, [False] * n)

    @classmethod
    def from_rows(cls, rows: pd.DataFrame) -> Query:
        """The cases of measured rows."""
        return cls(
            problems_of(rows),
            rows["implementation"].tolist(),
            rows["config"].tolist(),
            (rows["cache"] == "warm").tolist(),
            (rows["mode"] == "sustained").tolist(),
        )

    def groups(self) -> NDArray[Any]:
        """The group of each case."""
        pairs = zip(self.implementations, self.problems, strict=True)
        return np.array([group_of(name, problem) for name, problem in pairs], dtype=object)

    def take(self, where: NDArray[np.intp]) -> Query:
        """The cases at some positions."""
        columns = ([getattr(self, f.name)[i] for i in where] for f in fields(self))
        return Query(*columns)


def group_of(implementation: str, problem: Problem) -> str:
    """``cublas gemm bf16`` or ``cudnn dgrad bf16``."""
    what = problem.pass_ if isinstance(problem, Conv) else problem.op
    return f"{implementation} {what} {problem.dtype}"
