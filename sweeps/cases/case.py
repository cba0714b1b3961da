"""A case of a sweep: a problem, an implementation and its config, a timing mode and a cache state.

This module does not import PyTorch.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernels.operation import Workload
from kernels.problem import Problem
from sweeps.schema import IDENTITY, problem_columns, problem_of

MODES = ("burst", "sustained")
CACHES = ("cold", "warm", "weights-cold")
"""Cache states before a launch.

- ``cold``: the cache does not contain the operands.
- ``warm``: an earlier launch has just read the same operands.
- ``weights-cold``: the cache contains only the first operand, which holds the activations in
  inference. This state exists only for GEMMs in bursts."""
FILLS = ("normal",)
"""Distributions of the operands' values."""

CONFIRM = "confirm"
"""Name of the sweep whose cases are timed by ``recommend --measure`` and other advice commands.

No file declares this sweep.
"""

Contender = tuple[Problem, str]
"""A problem and the name of an implementation that computes it.

Contenders that are compared may differ in the problem, the implementation or both.
"""


@dataclass(frozen=True)
class Case:
    """Case of a sweep, identified by its columns ``sweep`` to ``fill`` in measurements.csv."""

    sweep: str
    problem: Workload
    implementation: str
    config: str = ""
    mode: str = "burst"
    cache: str = "cold"
    fill: str = "normal"

    @property
    def shared_a(self) -> bool:
        """True if all operand sets share their first operand, which then stays in the cache."""
        return self.cache == "weights-cold"

    def columns(self) -> dict[str, Any]:
        """Return the identifying columns, without those that do not apply to the problem."""
        return {
            "sweep": self.sweep,
            **problem_columns(self.problem),
            "implementation": self.implementation,
            "config": self.config,
            "mode": self.mode,
            "cache": self.cache,
            "fill": self.fill,
        }

    @functools.cached_property
    def id(self) -> str:
        """Twelve hex digits that identify the case in sample files and in the plan."""
        columns = self.columns()
        text = json.dumps([columns.get(name, "") for name in IDENTITY], ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @classmethod
    def from_columns(cls, row: Mapping[str, Any]) -> Case:
        """Build a case from its columns; the inverse of :meth:`columns`.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: if the columns do not describe a case.
        """
        names = ("sweep", "implementation", "config", "mode", "cache", "fill")
        return cls(problem=problem_of(row), **{name: row[name] for name in names})

    def __str__(self) -> str:
        # Most cases are cold bursts, so only other modes and cache states are named.
        unusual = [word for word in (self.mode, self.cache) if word not in ("burst", "cold")]
        words = [str(self.problem), self.implementation, self.config, *unusual]
        return " ".join(word for word in words if word)
