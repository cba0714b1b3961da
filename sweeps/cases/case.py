"""A case: one problem, one implementation, one config, one way of timing it. Torch-free."""

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
"""What a launch finds in the cache: nothing, all of its operands, or the first one alone.

``weights-cold`` is what inference sees: the first operand (the activations) comes from the cache,
the second (the weights) from memory. It is for products in bursts."""
FILLS = ("normal",)

CONFIRM = "confirm"
"""The sweep of the cases that advice asked for, which no file declares."""

Way = tuple[Problem, str]
"""A problem and the implementation that computes it."""


@dataclass(frozen=True)
class Case:
    """What is timed. Its identity is its columns from ``sweep`` to ``fill``."""

    sweep: str
    problem: Workload
    implementation: str
    config: str = ""
    mode: str = "burst"
    cache: str = "cold"
    fill: str = "normal"

    @property
    def shared_a(self) -> bool:
        """Whether all operand sets have one first operand, which stays in the cache."""
        return self.cache == "weights-cold"

    def columns(self) -> dict[str, Any]:
        """The identifying columns; those that do not apply are left out."""
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
        """Twelve hex digits that stand for the identity in sample files and in the plan."""
        columns = self.columns()
        text = json.dumps([columns.get(name, "") for name in IDENTITY], ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @classmethod
    def from_columns(cls, row: Mapping[str, Any]) -> Case:
        """Inverse of :meth:`columns`."""
        names = ("sweep", "implementation", "config", "mode", "cache", "fill")
        return cls(problem=problem_of(row), **{name: row[name] for name in names})

    def __str__(self) -> str:
        extra = [self.config, *(w for w in (self.mode, self.cache) if w not in ("burst", "cold"))]
        return " ".join(filter(None, [str(self.problem), self.implementation, *extra]))
