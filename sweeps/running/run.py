"""A run as it is carried out: its files, its cases and the bench that they run on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeps.planning.plan import PlanEntry


@dataclass
class Run:
    """A run of one shard: its files, its cases and the bench that they run on."""

    folder: Path
    planned: Sequence[PlanEntry]
    budget: float
    bench: str = f"{__package__}.bench:TorchBench"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    shard: tuple[int, int] = (1, 1)
    place: int | None = None
    """Number of the GPU, or of a CPU's node, within the run; None: not known."""
    anchors: Sequence[PlanEntry] = ()
    """Cases that tell how fast each GPU is, to be timed before the others."""
    anchor_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of :func:`sweeps.running.anchor_set.time_anchors`."""
    min_patience: float = 30.0
    compile_beside: bool = True
    """Whether other processes may use the GPU to compile for it."""
    repeats: bool = True
    """Whether some cases are timed again at the end, by a process that has to start for it."""
    names: bool = True
    """Whether kernels are named at the end, likewise; else a later call names them."""
    longest: float | None = None
    """Seconds that six samples of a case may take; None: a share of the budget."""
    stop_at: float | None = None
    """Moment of ``time.monotonic`` at which this call ends, naming included; None: no limit."""

    @property
    def worker(self) -> str:
        """The shard's name in the rows."""
        return f"{self.shard[0]}/{self.shard[1]}"
