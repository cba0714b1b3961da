"""The parent process of a node: it plans a run, follows its workers, and folds the samples.

A worker is a process that measures one shard of the run on one GPU. If a worker fails or dies, its
shard is tried once more, on another GPU if possible. If the shard moves to another GPU, its
unfinished series start over there. A series contains cases that are compared with each other, so
one GPU must measure all of them (:mod:`sweeps.planning.lines`).
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from kernels.common.counts import counted
from kernels.common.errors import UserError
from kernels.common.program import USE_FRESH, same_command
from kernels.device import Device
from sweeps.folding.fold import fold
from sweeps.planning.plan import read_plan
from sweeps.process import terminated_as_interrupt, undisturbed
from sweeps.progress import Reporter
from sweeps.running.child_process import how_it_died
from sweeps.running.devices import (
    DifferentLimitsError,
    has_timed_anchors,
    last_place,
    read_places,
    take_part,
)
from sweeps.running.opening import begin, refuse_other_sweeps
from sweeps.running.request import Request
from sweeps.running.supervisor import carry_out
from sweeps.schema import TOGETHER
from sweeps.sharing.following import Follower, report, shards_of_node
from sweeps.sharing.interference import interference
from sweeps.sharing.node_gates import Gates
from sweeps.sharing.worker import WorkerJob, work
from sweeps.store import (
    Event,
    planning,
    read_events,
    read_run,
    samples_path,
    write_run,
)

_LOOK_SECONDS = 1.0  # longest wait for messages before progress is shown again
_MAX_DEATHS = 2  # workers that fail or die before their shard is given up
_END_SECONDS = 20.0  # time for workers to write their last lines after they were told to end
_START_SECONDS = 1200.0  # time until a worker's first message; many may wait for the same plan
_ANCHOR_SECONDS = 60.0  # if fewer seconds are left, anchors are not timed


def share(
    request: Request,
    gpus: Mapping[int, Device],
    node: tuple[int, int],
    reporter: Reporter,
    note: Callable[[str], None],
    begun: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Measure a node's shards of a run on the node's GPUs. Return the run's folder.

    The samples are folded into the tables even after an error or an interrupt.

    Args:
        request: the options of the run; ``shard`` and ``gpu`` among them are ignored.
        gpus: the devices by their numbers, all of one model.
        node: the number of this node, counted from 1, and the number of nodes.
        reporter: shows the progress of all workers.
        note: called with each sentence for the user.
        begun: called with the run's folder once the run is planned.

    Raises:
        UserError: if the run cannot be started or resumed, measuring fails before all shards are
            finished, or the samples cannot be written or folded.
        OSError: if a sample file cannot be read.
        KeyboardInterrupt: if the user interrupts.
    """
    # 1. Count the shards, and number those of this node.
    _, nodes = node
    # All GPUs are of one model, so the run's folder is the same for each of them. The run is
    # planned on the first GPU.
    first_gpu = next(iter(gpus))
    folder = request.results / gpus[first_gpu].machine.slug
    total = _shards_to_share(folder, request, nodes, len(gpus))
    shards = shards_of_node(node, total)
    # 2. Plan the run, or resume the one that another node or an earlier call has planned.
    run = begin(replace(request, shard=(shards[0], total), gpu=first_gpu), note)
    begun(run.folder)
    # 3. Measure the shards. A single shard on a single GPU needs no worker.
    if total == nodes and len(gpus) == 1:
        carry_out(run, reporter, note)
    else:
        _Parent(run.folder, request, gpus, shards, total, reporter, note).carry_out()
    return run.folder


def _shards_to_share(folder: Path, request: Request, nodes: int, gpus_per_node: int) -> int:
    """Return the run's number of shards. Refuse a request that does not fit the recorded run."""
    if not (folder / "run.json").exists() or request.sets_all_aside:
        return nodes * gpus_per_node
    record = read_run(folder)
    if request.sets_aside(record):
        return nodes * gpus_per_node
    shards = int(record["plan"].get("shards", 1))
    # Each node must get the same number of shards. A node may have fewer or more GPUs than shards:
    # GPUs take the next shard, or stay idle. A run with one shard for each node was made for nodes
    # with one GPU, so several GPUs are probably a mistake.
    if shards % nodes or (shards == nodes and gpus_per_node > 1):
        each = " each" if nodes > 1 else ""
        raise UserError(
            f"the run in {folder} was planned for {counted(shards, 'shard')} and cannot be shared "
            f"by {counted(nodes, 'node')} with {counted(gpus_per_node, 'GPU')}{each}. Resume with "
            f"the original numbers of nodes and GPUs, or use {USE_FRESH} to set the run aside and "
            "start a new one."
        )
    # `begin` can add sweeps only to a run with one shard.
    if shards > 1:
        refuse_other_sweeps(folder, request, record["plan"])
    return shards


@dataclass
class _Worker:
    """State of a worker, the process that measures a shard on a GPU."""

    process: BaseProcess
    connection: Connection
    gpu: int
    shard: int
    started: float = field(default_factory=time.monotonic)
    spoke: bool = False
    """True once the worker has sent a message."""
    is_over: bool = False
    """True if the worker reported that it has ended without a failure."""
    failure: str = ""
    """Sentence or clause that says why the worker failed; empty if no reason is known."""


class _Parent:
    """Parent process of a node's workers."""

    def __init__(
        self,
        folder: Path,
        request: Request,
        gpus: Mapping[int, Device],
        shards: range,
        total: int,
        reporter: Reporter,
        note: Callable[[str], None],
    ) -> None:
        """Read the run's plan. ``total`` is the number of shards of the whole run."""
        self._folder = folder
        self._fresh = request.fresh  # for the message that says how to resume
        # A worker that requested a fresh run would set this one aside.
        self._request = replace(request, fresh=False)
        self._gpus = gpus
        self._total = total
        self._reporter = reporter
        self._note = note
        self._noted: set[str] = set()  # notes of workers that the user has already seen
        plan = read_run(folder)["plan"]
        self._budget: float = plan["budget_s"]
        self._follower = Follower(folder, read_plan(plan), shards, total)
        self._shards = shards
        self._workers: dict[int, _Worker] = {}  # by GPU
        self._places: dict[int, int] = {}  # number within the run of each GPU that takes part
        self._idle: dict[int, None] = {}  # GPUs that may be given a shard, in order
        self._due: deque[int] = deque()  # unfinished shards that no worker carries out
        self._deaths: Counter[int] = Counter()  # number of workers that failed or died, by shard
        self._failure = ""  # how the latest worker that failed or died ended
        self._gates: Gates  # set by _start_all() before any worker starts

    def carry_out(self) -> None:
        """Measure the node's shards with workers on the node's GPUs, and fold the samples."""
        self._reporter.begin("Measuring", self._budget)
        try:
            with terminated_as_interrupt():
                self._start_all()
                while self._workers:
                    self._receive()
                    self._kill_silent()
                    self._follower.look()
                    report([self._follower], self._reporter, self._budget)
        finally:
            # A second Ctrl-C must not stop the folding halfway.
            with undisturbed():
                self._stop_all()
                # Another node may have folded these files already, together with its own.
                written = [
                    samples_path(self._folder, (shard, self._total)) for shard in self._shards
                ]
                fold(self._folder, written)
        if self._due and self._seconds_left() > 0:
            raise UserError(
                f"{len(self._due)} of {counted(len(self._shards), 'shard')} did not finish "
                f"(latest failure: {self._failure}). Run {same_command(self._fresh)} to resume.",
                exit_code=1,
            )

    def _start_all(self) -> None:
        """Register the GPUs with the run, assign them unfinished shards, and start workers."""
        # 1. Assign the shards. GPUs that get none may take over the shard of another GPU later.
        self._follower.look()
        unfinished = self._follower.unfinished(self._budget)
        if not unfinished:
            return
        self._take_part()  # fills self._places
        shard_events = {shard: self._events(shard) for shard in unfinished}
        last_places = {shard: last_place(events) for shard, events in shard_events.items()}
        assigned = _assigned(self._places, last_places)
        self._due.extend(shard for shard in unfinished if shard not in assigned.values())
        self._idle.update(dict.fromkeys(gpu for gpu in self._places if gpu not in assigned))
        # 2. Decide whether the GPUs time the anchors: a few cases that all GPUs time, first alone
        # and then together, to show which GPU is slow and how much they slow one another. They do
        # so if several GPUs have a shard and there is time, unless each of these GPUs has timed
        # them together with others before, in the shard that it resumes.
        all_timed_before = all(
            has_timed_anchors(shard_events[shard], self._places[gpu], TOGETHER)
            for gpu, shard in assigned.items()
        )
        has_time = self._seconds_left() > _ANCHOR_SECONDS
        time_anchors = len(assigned) > 1 and has_time and not all_timed_before
        # 3. Start the workers. The gates ask whether the GPUs have to take turns.
        self._gates = Gates(assigned, lambda: self._decide_turns([*assigned.values()]))
        for gpu, shard in assigned.items():
            self._start(gpu, shard, time_anchors)

    def _seconds_left(self) -> float:
        """Return the seconds until this call must end, or infinity if it has no time limit."""
        stop_at = self._request.stop_at
        return math.inf if stop_at is None else stop_at - time.monotonic()

    def _take_part(self) -> None:
        """Register the GPUs, except those whose power or clock limits differ from the run's.

        Raise a UserError if the limits of more than half of the GPUs differ.
        """
        with planning(self._folder):
            for gpu, device in self._gpus.items():
                try:
                    self._places[gpu] = take_part(self._folder, self._request, device)
                except DifferentLimitsError as error:
                    self._note(f"{self._label(gpu)} is left out: {error.difference}.")
        # If most GPUs differ, the limits of the node have probably changed since the run began. The
        # few other GPUs should not measure everything instead.
        if 2 * len(self._places) < len(self._gpus):
            left_out = len(self._gpus) - len(self._places)
            has = "has" if left_out == 1 else "have"
            all_gpus = counted(len(self._gpus), "GPU")
            raise UserError(
                f"{left_out} of {all_gpus} {has} power or clock limits that differ from those of "
                "the run. Set every GPU to the run's limits, or name only GPUs with equal limits "
                f"in --gpus and use {USE_FRESH} to start a new run.",
                exit_code=1,
            )

    def _events(self, shard: int) -> list[Event]:
        events, _ = read_events(self._folder, (shard, self._total))
        return events

    def _label(self, gpu: int) -> str:
        """Return the label of a GPU, or of a worker on a CPU, for messages."""
        return f"worker {gpu}" if self._gpus[gpu].gpu is None else f"GPU {gpu}"

    def _start(self, gpu: int, shard: int, time_anchors: bool) -> None:
        context = get_context("spawn")  # a forked process would inherit CUDA's and OpenMP's state
        parent_end, worker_end = context.Pipe()
        request = replace(self._request, shard=(shard, self._total), gpu=gpu)
        job = WorkerJob(request, len(self._places), os.getpid(), time_anchors)
        process = context.Process(target=work, args=(worker_end, job), name="rooftile-gpu")
        process.start()
        # If this process kept the worker's end open, recv() would not notice the worker's death.
        worker_end.close()
        self._workers[gpu] = _Worker(process, parent_end, gpu, shard)

    def _receive(self) -> None:
        """Wait at most a second for messages from the workers, and act on them."""
        workers = list(self._workers.values())  # handling a message may remove and add workers
        ready = wait([worker.connection for worker in workers], _LOOK_SECONDS)
        for worker in workers:
            if worker.connection not in ready:
                continue
            try:
                # The docstring of sweeps.sharing.worker.work lists the messages.
                kind, content = worker.connection.recv()
            except (EOFError, ConnectionResetError):
                self._ended(worker)
                continue
            worker.spoke = True
            match kind:
                case "wait":
                    self._let_go(self._gates.arrive(worker.gpu, content))
                case "end":
                    worker.is_over = True
                case "failed":
                    worker.failure = content
                case "note" if content not in self._noted:  # several workers may send the same note
                    self._noted.add(content)
                    self._note(f"{self._label(worker.gpu)}: {content}")

    def _let_go(self, gpus: list[int]) -> None:
        """Let the workers of these GPUs pass the gate at which they wait."""
        for gpu in gpus:
            # If a worker has died in the meantime, _receive() notices it.
            with suppress(BrokenPipeError, ConnectionResetError):
                self._workers[gpu].connection.send("go")

    def _kill_silent(self) -> None:
        """Kill workers whose first message is overdue, for example because their GPU is lost.

        Other workers might otherwise wait for them at a gate.
        """
        for worker in self._workers.values():
            if not worker.spoke and time.monotonic() - worker.started > _START_SECONDS:
                worker.failure = (
                    f"the process did not respond within {_START_SECONDS / 60:.0f} minutes"
                )
                worker.process.kill()

    def _ended(self, worker: _Worker) -> None:
        """Clean up after a worker that has ended, and hand out the remaining shards."""
        worker.process.join()
        worker.connection.close()
        del self._workers[worker.gpu]
        self._let_go(self._gates.leave(worker.gpu))
        if worker.is_over:
            self._idle[worker.gpu] = None
        else:
            self._deaths[worker.shard] += 1
            self._due.append(worker.shard)
            how = worker.failure or how_it_died(worker.process.exitcode)
            # The messages put this text in parentheses, where a sentence has no full stop.
            self._failure = how.rstrip(".")
            self._note(
                f"The process of {self._label(worker.gpu)} ended before shard {worker.shard} was "
                f"finished ({self._failure})."
            )
        self._hand_out()

    def _hand_out(self) -> None:
        """Give idle GPUs the unfinished shards that have no worker."""
        for shard in [shard for shard in self._due if self._deaths[shard] < _MAX_DEATHS]:
            if self._seconds_left() <= 0:
                return
            free_gpus = [*self._idle]
            # A GPU whose worker failed gets another shard only if no other GPU is left.
            if not free_gpus and not self._workers:
                free_gpus = [*self._places]
            if not free_gpus:
                return
            gpu = free_gpus[0]
            self._due.remove(shard)
            self._idle.pop(gpu, None)
            if self._deaths[shard]:
                self._note(f"Shard {shard} continues on {self._label(gpu)}.")
            self._start(gpu, shard, time_anchors=False)

    def _decide_turns(self, shards: list[int]) -> bool:
        """Return True if the anchors of these shards show that the GPUs must take turns.

        In that case, also tell the user and record the node in run.json.
        """
        slowdown = interference([event for shard in shards for event in self._events(shard)])
        if slowdown is None or not slowdown.slowed:
            return False
        who = "workers" if _is_cpu(self._gpus) else "GPUs"
        self._note(
            f"Working in parallel slows the {who}: the same cases take {slowdown.ratio:.2f} times "
            f"as long. The 95% interval of this ratio is {slowdown.lo:.2f}–{slowdown.hi:.2f}. The "
            f"{who} therefore take turns, so the run may take {len(shards)} times as long as its "
            "budget."
        )
        self._record_turns()
        return True

    def _record_turns(self) -> None:
        """Add this node to run.json's ``turns``, the list of the nodes whose GPUs take turns."""
        with planning(self._folder):
            record = read_run(self._folder)
            places_here = {*self._places.values()}
            # The nodes are read from places.json, because the run.json of CPUs lists no places.
            nodes_here = {
                place["node"] for place in read_places(self._folder) if place["gpu"] in places_here
            }
            record["turns"] = sorted({*record.get("turns", ()), *nodes_here})
            write_run(self._folder, record)

    def _stop_all(self) -> None:
        """Tell all workers to end, and kill those that take too long."""
        until = time.monotonic() + _END_SECONDS
        for worker in self._workers.values():
            worker.process.terminate()
        for worker in self._workers.values():
            worker.process.join(max(0.0, until - time.monotonic()))
            worker.process.kill()


def _is_cpu(gpus: Mapping[int, Device]) -> bool:
    return any(device.gpu is None for device in gpus.values())


def _assigned(places: Mapping[int, int], last_places: Mapping[int, int | None]) -> dict[int, int]:
    """Assign shards to GPUs, and return the shard of each GPU that gets one.

    Args:
        places: the number of each GPU within the run.
        last_places: the number of the GPU that measured each unfinished shard last; None if no GPU
            is recorded, for example because the shard has not begun.
    """
    assigned: dict[int, int] = {}
    unassigned = list(last_places)
    # 1. Give each GPU a shard that it measured before, so that the shard does not move.
    for gpu, place in places.items():
        for shard in unassigned:
            if last_places[shard] == place:
                assigned[gpu] = shard
                unassigned.remove(shard)
                break
    # 2. Give the other GPUs the remaining shards, first those that nobody has begun, because
    # unfinished series of a begun shard start over on another GPU.
    unassigned.sort(key=lambda shard: last_places[shard] is not None)
    other_gpus = [gpu for gpu in places if gpu not in assigned]
    # The numbers of GPUs and shards may differ.
    assigned.update(zip(other_gpus, unassigned, strict=False))
    return assigned
