"""Options of a run, as the user gave them on the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sweeps.planning.choice import sweep_name

DEFAULT_BUDGET = {"gpu": 600.0, "cpu": 120.0}
"""Budget in seconds if the user gives none, by the kind of machine."""


@dataclass(frozen=True)
class Request:
    """Options of one run."""

    names: tuple[str, ...] = ()
    """Names of sweeps or paths of their files; empty for the default sweeps.

    Sweeps that are joined by commas form a group: they are compared with each other, so one
    recording must have all of them."""
    budget: float | None = None
    """Seconds of measuring on each device, including those kept for advice. If None, a recorded
    plan keeps its budget, and new plans and new sweeps get the default."""
    results: Path = Path()
    """Folder of all results, with one subfolder for each machine."""
    shard: tuple[int, int] = (1, 1)
    """Number of the shard to measure, counted from 1, and the number of shards."""
    fresh: bool = False
    """True to set an old run aside and begin a new one (see :attr:`fresh_since`)."""
    device: str = "auto"
    """Device to measure on, as in :func:`kernels.device.select_device`."""
    gpu: int = 0
    """Ordinal of the GPU, counted from 0; ignored on a CPU."""
    dtypes: tuple[str, ...] = ()
    """Dtypes to measure, even if emulated; empty for the dtypes that the sweeps select."""
    skip_recorded: Path | None = None
    """Folder of results whose complete sweeps are not measured again; None to measure all sweeps.

    If a sweep of a group is incomplete in this folder, all sweeps of the group are measured."""
    add: bool = False
    """True to add the sweeps to the plan and measure only them, for another ``budget`` seconds."""
    stop_at: float | None = None
    """Time on the ``time.monotonic`` clock by which measuring is to end, even if budget is left;
    None for no limit."""
    leave: float = 0.0
    """Share of the budget that is kept for timing cases for advice, from 0 to below 1."""
    identify: bool = True
    """True to list a hash of each GPU in run.json."""
    fresh_since: float | None = None
    """Earliest start of a run that counts as fresh, in seconds since 1970; None if no old run does.

    If several nodes request a fresh run with the same value, one of them begins it, and the others
    resume it."""

    @property
    def sets_all_aside(self) -> bool:
        """True if an old run is set aside in any case, even if its run.json cannot be read."""
        return self.fresh and self.fresh_since is None

    def sets_aside(self, record: Mapping[str, Any]) -> bool:
        """Return True if the run in this record is to be set aside for a fresh run."""
        if not self.fresh:
            return False
        if self.fresh_since is None:
            return True
        try:
            begun = datetime.strptime(record["run"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        except ValueError:  # the record is damaged, so no node has just begun the run
            return True
        # The time in run.json has whole seconds, so a run that began in the same second is fresh.
        return begun.timestamp() < math.floor(self.fresh_since)

    @property
    def measuring(self) -> float | None:
        """Seconds of the budget without those kept for advice; None if no budget was given."""
        return None if self.budget is None else self.budget * (1 - self.leave)

    def measuring_on(self, kind: str) -> float:
        """Return the seconds of the budget without those kept for advice.

        If no budget was given, the default for this ``kind`` of machine is used.
        """
        budget = DEFAULT_BUDGET[kind] if self.budget is None else self.budget
        return budget * (1 - self.leave)

    def advice_seconds(self, measuring_seconds: float) -> float:
        """Return the seconds to keep for advice in addition to ``measuring_seconds``.

        They make up the share :attr:`leave` of the total, which includes ``measuring_seconds``.
        """
        return measuring_seconds * self.leave / (1 - self.leave)

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Groups of :attr:`names`. A name without commas is a group of one sweep."""
        return [tuple(name.split(",")) for name in self.names]

    @property
    def together(self) -> list[tuple[str, ...]]:
        """Groups of at least two sweeps, with sweep names in place of paths."""
        return [tuple(map(sweep_name, group)) for group in self.groups if len(group) > 1]

    @property
    def sweeps(self) -> tuple[str, ...]:
        """Names or paths of all sweeps, each once."""
        return tuple(dict.fromkeys(name for group in self.groups for name in group))
