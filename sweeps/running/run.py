"""Description of a run for the process that carries it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeps.measuring.bench import TORCH_BENCH
from sweeps.planning.plan import PlanEntry

MEASURE = "measure"
"""Name of the phase in which a worker measures its cases."""


@dataclass(frozen=True)
class NodePeers:
    """Link between a run's worker and its peers: the other workers of the same node."""

    workers: int
    """Largest number of workers that share the host at one time, including this one."""
    parent: int
    """Id of the process that started all workers and folds their samples."""
    wait: Callable[[str], None]
    """Function that is called with the name of a phase and blocks until that phase may begin."""


@dataclass
class Run:
    """Run of one shard."""

    folder: Path
    planned: Sequence[PlanEntry]
    budget: float
    """Seconds that measuring may take, including those that earlier calls spent."""
    bench: str = TORCH_BENCH
    """Callable that makes the bench, as ``module:name``."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the callable in :attr:`bench`, except the cases; for example ``machine``."""
    shard: tuple[int, int] = (1, 1)
    """Number of the shard, counted from 1, and the number of shards."""
    whole: bool = True
    """True if ``planned`` has all cases of the shard, except perhaps cases for advice. Only then is
    the end of this run recorded as the end of the shard."""
    place: int | None = None
    """Number of the place that measures the shard; None if the number is not known.

    A place is a GPU or, in a run on CPUs, a node. The number is unique within the whole run, unlike
    the ordinal of a GPU."""
    anchors: Sequence[PlanEntry] = ()
    """Cases that every place times first, so that the places can be compared."""
    anchor_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of :func:`sweeps.measuring.anchor_timing.time_anchors`."""
    peers: NodePeers | None = None
    """Peers of this run; None unless a worker of a node carries out the run."""
    min_patience: float = 30.0
    """Minimum number of seconds without a message after which a child process counts as hung."""
    compile_in_parallel: bool = True
    """True if other processes may open the GPU to compile kernels for it."""
    repeats: bool = True
    """True if some cases are re-timed at the end, in another process."""
    names_kernels: bool = True
    """True if kernels are named at the end, in another process.

    On a CPU, kernels are named before they are timed."""
    longest: float | None = None
    """Seconds that six samples of a case may take; None for the default of
    :class:`sweeps.measuring.rounds.Rounds`."""
    stop_at: float | None = None
    """Time on the ``time.monotonic`` clock by which measuring is to end; None for no limit."""

    @property
    def workers(self) -> int:
        """Largest number of workers that share the host at one time; 1 without peers."""
        return self.peers.workers if self.peers else 1

    @property
    def parent(self) -> int | None:
        """Id of the process that started this run's worker and its peers; None without peers."""
        return self.peers.parent if self.peers else None

    @property
    def worker(self) -> str:
        """Name of the shard in the tables, such as ``1/4``."""
        return f"{self.shard[0]}/{self.shard[1]}"
