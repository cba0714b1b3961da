"""The request for a run: its options as the command line gave them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sweeps.planning.choice import sweep_name

DEFAULT_BUDGET = {"gpu": 600.0, "cpu": 120.0}


@dataclass(frozen=True)
class Request:
    """Options of one run, as the command line gave them; None where it left the choice open."""

    names: tuple[str, ...] = ()
    """Names of sweeps. Sweeps joined by commas are needed together."""
    budget: float | None = None
    results: Path = Path()
    shard: tuple[int, int] = (1, 1)
    fresh: bool = False
    device: str = "auto"
    gpu: int = 0
    dtypes: tuple[str, ...] = ()
    """Dtypes to measure, emulated ones included; empty: those that the sweeps declare."""
    skip_recorded: Path | None = None
    """Folder of other results. Sweeps that this machine's recording there has completely are left
    out, provided that it also has all others that are needed together with them."""
    add: bool = False
    """True to add the sweeps to the plan and measure only them, for ``budget`` from now."""
    stop_at: float | None = None
    """Moment of ``time.monotonic`` at which this call ends, even with budget left."""
    leave: float = 0.0
    """Share of the budget that is kept for measuring what advice asks for."""
    identify: bool = True
    """True if run.json tells GPUs apart by a hash."""
    fresh_since: float | None = None
    """Moment, in seconds since 1970, from which a run is fresh.

    If several nodes ask for a fresh run, one of them begins it and the others resume that one."""

    @property
    def sets_all_aside(self) -> bool:
        """True if any run is set aside, even one whose run.json cannot be read."""
        return self.fresh and self.fresh_since is None

    def sets_aside(self, record: Mapping[str, Any]) -> bool:
        """Return True if the run of this run.json is set aside because a fresh one is requested."""
        if not self.fresh:
            return False
        if self.fresh_since is None:
            return True
        try:
            begun = datetime.strptime(record["run"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        except ValueError:  # damaged: no node has just begun it
            return True
        # The time in run.json has whole seconds, so a run of this very second is fresh.
        return begun.timestamp() < math.floor(self.fresh_since)

    @property
    def measuring(self) -> float | None:
        """Seconds of the budget without those kept for advice; None if it was left open."""
        return None if self.budget is None else self.budget * (1 - self.leave)

    def measuring_on(self, kind: str) -> float:
        """Return :attr:`measuring`, or that of the kind's default budget if none was given."""
        budget = self.budget or DEFAULT_BUDGET[kind]
        return budget * (1 - self.leave)

    def left(self, measuring: float) -> float:
        """Return the seconds to keep for advice in addition to ``measuring`` seconds.

        They are the share :attr:`leave` of both together.
        """
        return measuring * self.leave / (1 - self.leave)

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Names in groups; the names of a group are needed together."""
        return [tuple(name.split(",")) for name in self.names]

    @property
    def together(self) -> list[tuple[str, ...]]:
        """Groups of several sweeps that are needed together, by the sweeps' own names."""
        return [tuple(map(sweep_name, group)) for group in self.groups if len(group) > 1]

    @property
    def sweeps(self) -> tuple[str, ...]:
        """All names, each once."""
        return tuple(dict.fromkeys(name for group in self.groups for name in group))
