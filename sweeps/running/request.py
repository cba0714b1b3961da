"""What a run is asked for."""

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
    """What the command line asked for; None where it left the choice open."""

    names: tuple[str, ...] = ()
    """Sweeps; those joined by commas are needed together."""
    budget: float | None = None
    results: Path = Path()
    shard: tuple[int, int] = (1, 1)
    fresh: bool = False
    device: str = "auto"
    gpu: int = 0
    dtypes: tuple[str, ...] = ()
    """Measure only cases of these dtypes, emulated ones too; none: what the sweeps declare."""
    skip_recorded: Path | None = None
    """Leave out the sweeps that this machine's recording in another folder has whole, with all
    others that are needed together with them."""
    add: bool = False
    """Add the sweeps to the existing plan, and measure only them, for ``budget`` from now."""
    stop_at: float | None = None
    """Moment of ``time.monotonic`` at which this call ends, even with budget left."""
    leave: float = 0.0
    """Share of the budget that is left for measuring what advice asks for."""
    identify: bool = True
    """Whether run.json tells GPUs apart by a hash."""
    fresh_since: float | None = None
    """Moment since 1970 from which a run is fresh: one of several nodes that ask for a fresh run
    begins it, and the others go on with that."""

    @property
    def sets_all_aside(self) -> bool:
        """Whether any run is kept aside, also one whose run.json cannot be read."""
        return self.fresh and self.fresh_since is None

    def sets_aside(self, record: Mapping[str, Any]) -> bool:
        """Whether the run of a run.json is kept aside, because a fresh one was asked for."""
        if not self.fresh or self.fresh_since is None:
            return self.fresh
        try:
            begun = datetime.strptime(record["run"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        except ValueError:  # damaged: no node has just begun it
            return True
        return begun.timestamp() < math.floor(self.fresh_since)

    @property
    def measuring(self) -> float | None:
        """Seconds of the budget that are not left; None where it was left open."""
        return None if self.budget is None else self.budget * (1 - self.leave)

    def measuring_on(self, kind: str) -> float:
        """Likewise, of the default for a kind of machine where it was left open."""
        return DEFAULT_BUDGET[kind] * (1 - self.leave) if not self.budget else self.measuring or 0.0

    def left(self, measuring: float) -> float:
        """Seconds that are left beside so many of measuring."""
        return measuring * self.leave / (1 - self.leave)

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The names that are needed together."""
        return [tuple(name.split(",")) for name in self.names]

    @property
    def together(self) -> list[tuple[str, ...]]:
        """The sweeps that are needed together, by their own names."""
        return [tuple(map(sweep_name, group)) for group in self.groups if len(group) > 1]

    @property
    def sweeps(self) -> tuple[str, ...]:
        """Every name once."""
        return tuple(dict.fromkeys(name for group in self.groups for name in group))
