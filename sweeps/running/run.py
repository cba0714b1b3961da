"""A run as it is carried out: its files, its cases and the bench that they run on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeps.measuring.bench import TORCH_BENCH
from sweeps.planning.plan import PlanEntry

MEASURE = "measure"
"""Gate at which a worker waits after the anchors' phases, before it measures."""


@dataclass(frozen=True)
class NodePeers:
    """Peers of a run: the workers that measure with other GPUs of its node at the same time."""

    workers: int
    """Number of workers that share the host, this one included."""
    parent: int
    """Id of the process that started all of them, and that folds when they have ended."""
    wait: Callable[[str], None]
    """Function that is called before each of the anchors' phases and before :data:`MEASURE`. It
    blocks until that phase may begin."""


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
    """True if ``planned`` has all cases of the shard, so that the shard ends when they do."""
    place: int | None = None
    """Number of the GPU, or of a CPU's node, within the run; None: not known."""
    anchors: Sequence[PlanEntry] = ()
    """Cases that show how fast each GPU is. They are timed before the others."""
    anchor_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of :func:`sweeps.measuring.anchor_timing.time_anchors`."""
    peers: NodePeers | None = None
    min_patience: float = 30.0
    """Shortest silence, in seconds, after which a child that handles cases counts as hung."""
    compile_in_parallel: bool = True
    """True if other processes may use the GPU to compile for it."""
    repeats: bool = True
    """True if some cases are re-timed at the end, in another process."""
    names: bool = True
    """True if kernels are named at the end, in another process; if not, a later call names them.

    On a CPU, kernels are named before they are timed."""
    longest: float | None = None
    """Seconds that six samples of a case may take; None: a share of the budget."""
    stop_at: float | None = None
    """Moment of ``time.monotonic`` at which this call ends, including naming; None: no limit."""

    @property
    def workers(self) -> int:
        """Number of runs that share the host."""
        return self.peers.workers if self.peers else 1

    @property
    def parent(self) -> int | None:
        """Id of the process that started all runs on the host; None if this is the only one."""
        return self.peers.parent if self.peers else None

    @property
    def worker(self) -> str:
        """Name of the shard, as the tables have it."""
        return f"{self.shard[0]}/{self.shard[1]}"
