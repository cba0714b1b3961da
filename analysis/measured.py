"""What was measured, to be asked for a problem and for its neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd

from analysis.load import problems_of, stored_ordinarily
from analysis.nearby import dimensions, sizes_of
from kernels.problem import Problem


@dataclass(frozen=True)
class Measured:
    """A measured time and its interval, in seconds; the interval is NaN under six samples."""

    time: float
    lo: float
    hi: float

    @property
    def width(self) -> float:
        """Of the interval; infinite where there is none."""
        return math.inf if math.isnan(self.lo) else self.hi - self.lo


class Measurements:
    """What was measured, cold and in bursts, to be asked for a problem and for its neighbours."""

    def __init__(self, times: Mapping[Problem, Mapping[str, Measured]]) -> None:
        """``times`` maps a problem to the time of each implementation that computed it."""
        self._times = times
        kinds: dict[Any, list[Problem]] = {}
        for problem in times:
            kinds.setdefault(kind_of(problem), []).append(problem)
        self._kinds = {
            kind: (members, np.array([sizes_of(problem) for problem in members]))
            for kind, members in kinds.items()
        }

    @property
    def problems(self) -> Iterable[Problem]:
        """Every problem that was measured."""
        return self._times

    def of(self, problem: Problem) -> Mapping[str, Measured]:
        """Time of each implementation; empty if the problem was not measured."""
        return self._times.get(problem, {})

    def near(self, problem: Problem, less: float, more: float) -> list[Problem]:
        """Measured problems each of whose sizes is this one's, ``less`` to ``more`` larger."""
        kind = kind_of(problem)
        if kind not in self._kinds:
            return []
        members, sizes = self._kinds[kind]
        own = np.array(sizes_of(problem))
        near = ((sizes >= own * (1 + less)) & (sizes <= own * (1 + more))).all(axis=1)
        return [members[i] for i in np.flatnonzero(near)]

    def ratio(self, problem: Problem, option: Problem) -> tuple[float, float, float] | None:
        """Time of ``problem`` over that of ``option`` and its interval, each by the fastest of the
        implementations that computed both; None where no interval is known.
        """
        both = self.of(problem).keys() & self.of(option).keys()
        if not both:
            return None
        own, other = (
            min((self.of(p)[name] for name in both), key=lambda t: t.time)
            for p in (problem, option)
        )
        if math.isnan(own.lo + other.lo):
            return None
        return own.time / other.time, own.lo / other.hi, own.hi / other.lo

    def winner(self, problem: Problem, library: str) -> str:
        """The fastest implementation, if its interval says so; else the library."""
        entry = self.of(problem)
        if library not in entry:
            return library
        name = min(entry, key=lambda key: entry[key].time)
        return name if entry[name].hi < entry[library].lo else library


def kind_of(problem: Problem) -> Any:
    """Everything of a problem but the sizes that a recommendation may change."""
    fixed = [f.name for f in fields(problem) if f.name not in dimensions(problem)]
    return problem.op, tuple(getattr(problem, name) for name in fixed)


def read_measurements(rows: pd.DataFrame) -> Measurements:
    """The measured times of ``ok`` rows: cold, in bursts, of operands stored ordinarily."""
    rows = rows[(rows["cache"] == "cold") & (rows["mode"] == "burst") & stored_ordinarily(rows)]
    columns = (
        rows[name].to_numpy(dtype=float, na_value=np.nan) * 1e-6
        for name in ("time_us", "time_lo_us", "time_hi_us")
    )
    times: dict[Problem, dict[str, Measured]] = {}
    for problem, name, *values in zip(
        problems_of(rows), rows["implementation"], *columns, strict=True
    ):
        found = Measured(*values)
        known = times.setdefault(problem, {})
        # The same problem in two sweeps: the narrower interval stands for it.
        if name not in known or found.width < known[name].width:
            known[name] = found
    return Measurements(times)
