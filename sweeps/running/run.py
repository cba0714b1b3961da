"""A run as it is carried out: its files, its cases and the bench that they run on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeps.measuring.bench import TORCH_BENCH
from sweeps.planning.plan import PlanEntry

MEASURE = "measure"
"""What a worker waits for after the anchors' phases."""


@dataclass(frozen=True)
class NodePeers:
    """What a run knows of those that measure with other GPUs of its node at the same time."""

    workers: int
    """How many share the host, itself among them."""
    parent: int
    """The process that started them all, and folds when they have ended."""
    wait: Callable[[str], None]
    """Called before an anchors' phase and before :data:`MEASURE`; returns when that may begin."""


@dataclass
class Run:
    """A run of one shard: its files, its cases and the bench that they run on."""

    folder: Path
    planned: Sequence[PlanEntry]
    budget: float
    bench: str = TORCH_BENCH
    arguments: Mapping[str, Any] = field(default_factory=dict)
    shard: tuple[int, int] = (1, 1)
    whole: bool = True
    """Whether these are all cases of the shard, so that it ends when they do."""
    place: int | None = None
    """Number of the GPU, or of a CPU's node, within the run; None: not known."""
    anchors: Sequence[PlanEntry] = ()
    """Cases that tell how fast each GPU is, to be timed before the others."""
    anchor_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of :func:`sweeps.measuring.anchor_timing.time_anchors`."""
    peers: NodePeers | None = None
    min_patience: float = 30.0
    compile_beside: bool = True
    """Whether other processes may use the GPU to compile for it."""
    repeats: bool = True
    """Whether some cases are timed again at the end, by a process that has to start for it."""
    names: bool = True
    """Whether kernels are named at the end, likewise; if not, a later call names them.

    On a CPU they are named before they are timed."""
    longest: float | None = None
    """Seconds that six samples of a case may take; None: a share of the budget."""
    stop_at: float | None = None
    """Moment of ``time.monotonic`` at which this call ends, naming included; None: no limit."""

    @property
    def workers(self) -> int:
        """How many runs share the host."""
        return self.peers.workers if self.peers else 1

    @property
    def parent(self) -> int | None:
        """The process that started them all, if there are several."""
        return self.peers.parent if self.peers else None

    @property
    def worker(self) -> str:
        """The shard's name in the rows."""
        return f"{self.shard[0]}/{self.shard[1]}"
