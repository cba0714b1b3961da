"""Description of a run for the process that carries it out: files, cases, bench and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeps.measuring.bench import TORCH_BENCH
from sweeps.planning.plan import PlanEntry

MEASURE = "measure"
"""Name of the gate at which a worker waits after timing its anchors, before it measures."""


@dataclass(frozen=True)
class NodePeers:
    """Peers of a run: the workers that measure on other GPUs of its node at the same time."""

    workers: int
    """Number of workers that share the host, this one included."""
    parent: int
    """Id of the process that started all workers. It folds the samples into the tables after all
    workers have ended."""
    wait: Callable[[str], None]
    """Function that blocks until the phase with the given name may begin. It is called before each
    of the anchors' phases and before :data:`MEASURE`."""


@dataclass
class Run:
    """Run of one shard, as described to the process that carries it out."""

    folder: Path
    """Folder of the run's files."""
    planned: Sequence[PlanEntry]
    """Cases to measure."""
    budget: float
    """Seconds that measuring may take, including those that earlier calls spent."""
    bench: str = TORCH_BENCH
    """``module:callable`` of the function that creates the bench, which prepares and times
    cases."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of that callable, such as ``machine`` and ``device``."""
    shard: tuple[int, int] = (1, 1)
    """Number of the shard, counted from 1, and the number of shards."""
    whole: bool = True
    """True if ``planned`` has all cases of the shard, so that the shard ends with this run.

    Cases that are timed for advice are ignored here."""
    place: int | None = None
    """Number of the GPU, or of a CPU's node, within the run; None if it is not known."""
    anchors: Sequence[PlanEntry] = ()
    """Cases that every GPU times first, to show how fast the GPUs are compared with one another."""
    anchor_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of :func:`sweeps.measuring.anchor_timing.time_anchors`."""
    peers: NodePeers | None = None
    min_patience: float = 30.0
    """Seconds without a message before a child process may be considered hung."""
    compile_in_parallel: bool = True
    """True if other processes may open the GPU to compile kernels for it."""
    repeats: bool = True
    """True if some cases are re-timed at the end, in another process."""
    names: bool = True
    """True if kernels are named at the end, in another process. If not, a later call names them.

    On a CPU, kernels are named before they are timed."""
    longest: float | None = None
    """Seconds that six samples of a case may take, with the exception that
    :class:`sweeps.measuring.rounds.Rounds` describes; None for a share of the budget."""
    stop_at: float | None = None
    """Time on the ``time.monotonic`` clock at which this call ends, including naming kernels; None
    for no limit."""

    @property
    def workers(self) -> int:
        """Number of runs that share the host, this one included."""
        return self.peers.workers if self.peers else 1

    @property
    def parent(self) -> int | None:
        """Id of the process that started all runs on the host; None if this is the only one."""
        return self.peers.parent if self.peers else None

    @property
    def worker(self) -> str:
        """Name of the shard in the tables, such as ``1/4``."""
        return f"{self.shard[0]}/{self.shard[1]}"
