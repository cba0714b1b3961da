"""Submit jobs for the unfinished nodes of a run, follow the jobs, and report what is missing."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kernels.common.counts import counted
from kernels.common.errors import UserError
from sweeps.claim import Claim
from sweeps.folding.fold import fold
from sweeps.planning.plan import read_plan
from sweeps.progress import Reporter
from sweeps.running.opening import refuse_other_sweeps
from sweeps.running.request import Request
from sweeps.sharing.following import Follower, report, shards_of_node
from sweeps.store import make_folder, read_run, write_json
from sweeps.submitting.clusters import Cluster, NoAnswerError, Resources
from sweeps.submitting.node_job import NodeJob, NodeNote, jobs_folder

_LOOK_SECONDS = 2.0  # seconds between two looks at the files
_LIST = "jobs.json"
_MAX_UNANSWERED = 30  # times in a row that the cluster's controller may fail to answer
# Number of looks at the files between two queries to the cluster's controller, which serves many
# users.
_LOOKS = 5


@dataclass(frozen=True)
class Outcome:
    """Outcome of a submission."""

    folders: tuple[Path, ...]
    """Folders of the run, one for each GPU model; the folder with the most nodes comes first."""
    missing: tuple[str, ...]
    """One message for each node that is not finished, or whose GPU model differs from that of the
    first folder in ``folders``."""


def submit(
    request: Request,
    nodes: int,
    kind: str,
    resources: Resources,
    reporter: Reporter,
    note: Callable[[str], None],
) -> Outcome:
    """Submit a job for each unfinished node that has no job, and wait until no job is left.

    ``kind`` is one of :data:`sweeps.submitting.clusters.CLUSTERS`. The shard and GPU of ``request``
    are ignored. If an interrupt ends the wait, the samples are still folded into the tables. Slurm
    jobs continue without this process, and a later call that does not request a fresh run follows
    them.

    Raises:
        UserError: if the jobs cannot be submitted or followed, another submission is following the
            run, this call does not fit the recorded run or the jobs of an earlier call, or a file
            of the run cannot be read or written.
        OSError: if a sample file cannot be read.
        Exception: any exception that a job on the cluster ``debug`` raises.
        KeyboardInterrupt: if the user interrupts.
    """
    request = replace(request, results=request.results.resolve())
    folder = jobs_folder(request.results)
    make_folder(folder)
    cluster = Cluster(kind, folder / "output", resources)
    claim = Claim(
        folder / _LIST,
        f"another submission is following the run in {request.results}; wait until it ends.",
    )
    try:
        # submitit replaces this variable for jobs on this machine.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") if kind == "local" else None
        # If no GPUs are requested, the run is on CPUs, with one worker on each node.
        work = NodeJob(request, nodes, max(1, resources.gpus_per_node), visible)
        return _Submission(work, cluster, reporter, note).carry_out()
    finally:
        claim.release()


class _Submission:
    """Submission of one run, from the search for earlier jobs to the folding of the samples."""

    def __init__(
        self, work: NodeJob, cluster: Cluster, reporter: Reporter, note: Callable[[str], None]
    ) -> None:
        self._work = work
        self._request = work.request
        self._results = work.request.results
        self._nodes = range(1, work.nodes + 1)
        self._cluster = cluster
        self._reporter = reporter
        self._note = note
        self._noted: set[str] = set()  # sentences that _note_once() has sent to the user
        self._unanswered = 0  # queries in a row that the cluster's controller did not answer
        self._runs = {
            number: _NodeRun(self._results, (number, work.nodes)) for number in self._nodes
        }
        self._ids: dict[int, str] = {}  # id of each node's job

    def carry_out(self) -> Outcome:
        """Submit jobs for unfinished nodes, follow all jobs to their end, and fold the samples."""
        # 1. Find the nodes that have a job (``living``) and those that need one (``due``).
        living = self._find_jobs()
        if self._request.fresh:
            for run in self._runs.values():
                run.forget()
        self._look()
        for run in self._runs.values():
            run.refuse_other_sweeps(self._request)
        # Without a budget in this call, only the plan's budget counts.
        budget = self._request.measuring or 0.0
        due = [
            node for node in self._nodes if node not in living and self._runs[node].is_open(budget)
        ]
        if living:
            self._note(
                f"Still queued or running: {counted(len(living), 'job')} from an earlier "
                "submission."
            )
        if not due and not living:
            self._note("All shards are already finished.")
        # 2. Submit and follow jobs until no node needs or has one.
        self._reporter.begin("Measuring", None)
        try:
            while due or living:
                due = self._submit_some(due, living)
                living = self._follow(living)
        except KeyboardInterrupt:
            self._cluster.cancel()
            raise
        finally:
            self._look()
            for folder in self._folders:
                fold(folder)
        return Outcome(tuple(self._folders), tuple(self._missing(budget)))

    def _find_jobs(self) -> set[int]:
        """Return the nodes whose jobs from an earlier call are still queued or running.

        The ids of these jobs are stored in ``self._ids``.

        Raises:
            UserError: if the request does not fit these jobs, or Slurm does not say which jobs are
                left.
        """
        jobs: dict[int, str] = {}  # id of each node's job
        node_count = 0
        # 1. Read the list of jobs. If it cannot be read, there is no earlier call to follow.
        # The number of nodes may be infinite in a damaged list, which causes an OverflowError.
        unreadable = (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        )
        with suppress(*unreadable):
            text = (jobs_folder(self._results) / _LIST).read_text(encoding="utf-8")
            document = json.loads(text)
            node_count = int(document["nodes"])
            jobs = {int(node): str(job) for node, job in document["jobs"].items()}
        # Only Slurm jobs continue after the process that submitted them has ended.
        if self._cluster.kind != "slurm" or not jobs:
            return set()
        # 2. Ask which of the jobs are alive, and refuse a call that does not fit them.
        living = self._cluster.living([*jobs.values()])
        self._ids = {node: job for node, job in jobs.items() if job in living}
        if self._ids and (self._request.fresh or node_count != len(self._nodes)):
            raise UserError(
                f"an earlier submission for {counted(node_count, 'node')} still has jobs that are "
                f"queued or running ({', '.join(self._ids.values())}); wait for them, cancel them "
                f"with scancel, or submit for {counted(node_count, 'node')} without --fresh."
            )
        return {*self._ids}

    def _submit_some(self, due: list[int], living: set[int]) -> list[int]:
        """Submit jobs for nodes in ``due``, and return the nodes that are left for a later call.

        Clusters other than Slurm run all jobs on this machine, so they get one job at a time.
        """
        is_slurm = self._cluster.kind == "slurm"
        if is_slurm:
            count = len(due)
        elif living:
            count = 0  # another job still occupies this machine
        else:
            count = 1
        nodes = due[:count]
        later_nodes = due[count:]
        if not nodes:
            return later_nodes
        for node in nodes:
            self._runs[node].forget_failure()
        submitted = self._cluster.submit(self._work, nodes)
        self._ids.update(submitted)
        # Store the list in which another call finds these jobs.
        if is_slurm:
            jobs = {str(node): job for node, job in sorted(self._ids.items())}
            document = {"nodes": len(self._nodes), "jobs": jobs}
            write_json(jobs_folder(self._results) / _LIST, document)
        jobs_and_nodes = "a job for node" if len(nodes) == 1 else "jobs for nodes"
        ids = "id" if len(nodes) == 1 else "ids"
        numbers = ", ".join(map(str, nodes))
        self._note(
            f"Submitted {jobs_and_nodes} {numbers} of {len(self._nodes)} "
            f"({ids} {', '.join(submitted.values())})."
        )
        return later_nodes

    def _follow(self, living: set[int]) -> set[int]:
        """Show progress for a few seconds, and return the nodes with unfinished jobs.

        If Slurm does not say which jobs are left, jobs that were unfinished before still count as
        unfinished.

        Raises:
            NoAnswerError: if Slurm fails to say so more than :data:`_MAX_UNANSWERED` times in a
                row.
            Exception: any exception that a job on the cluster ``debug`` raises.
        """
        looks = _LOOKS if self._cluster.kind == "slurm" else 1
        for _ in range(looks):
            time.sleep(_LOOK_SECONDS)
            self._look()
            followers = [run.follower for run in self._runs.values() if run.follower]
            if followers:
                budget = max(run.budget for run in self._runs.values())
                report(followers, self._reporter, budget)
        try:
            jobs = self._cluster.living([*self._ids.values()])
        except NoAnswerError as error:
            # A controller that is busy or restarts is not a reason to abandon jobs that take hours.
            self._unanswered += 1
            if self._unanswered > _MAX_UNANSWERED:
                raise
            self._note_once(f"{error.reason}; the query will be repeated.")
            # Right after submitting, ``living`` is still empty.
            return living or {*self._ids}
        self._unanswered = 0
        for node, job in self._ids.items():
            if reason := jobs.get(job):
                self._note_once(
                    f"The job for node {node} of {len(self._nodes)} is waiting (Slurm's reason: "
                    f"{reason})."
                )
        return {node for node, job in self._ids.items() if job in jobs}

    def _note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._note(text)

    def _look(self) -> None:
        for run in self._runs.values():
            run.look()

    @property
    def _folders(self) -> list[Path]:
        """Folders of the run, those with the most nodes first."""
        counts = Counter(run.folder for run in self._runs.values() if run.folder is not None)
        return [folder for folder, _ in counts.most_common()]

    def _missing(self, budget: float) -> Iterator[str]:
        """Yield the messages of :attr:`Outcome.missing`."""
        # The folder of a run is named after the GPU model, and the first one has the most nodes.
        folders = self._folders
        folder_of_most = folders[0] if folders else None
        output = jobs_folder(self._results) / "output"
        for number, run in self._runs.items():
            label = f"Node {number} of {len(self._nodes)}"
            if run.is_open(budget):
                why = run.failure or f"its job ended too early; look for the cause in {output}."
                yield f"{label} is not finished: {why}"
            elif run.folder != folder_of_most:
                yield (
                    f"{label} has a different GPU model than the run in {folder_of_most}, so its "
                    f"shards are missing there. Its measurements are in {run.folder}. Submit to "
                    "nodes with one GPU model, for example with --partition."
                )


class _NodeRun:
    """Progress of one node's shards, read from the files that the node writes."""

    def __init__(self, results: Path, node: tuple[int, int]) -> None:
        self._results = results
        self._node = node
        # Folder of the plan that is followed, and the modification time of its run.json.
        self._followed_plan: tuple[Path, int] | None = None
        self.folder: Path | None = None  # folder of the run; None if it has no plan
        self.failure = ""
        self.budget = 0.0  # seconds, from the plan
        self.follower: Follower | None = None

    def look(self) -> None:
        note = NodeNote.read(self._results, self._node)
        self.failure = note.failure
        plan = _find_plan(note.folder)
        self.folder = None if plan is None else note.folder
        is_new = plan != self._followed_plan
        self._followed_plan = plan
        if plan is None:
            self.follower = None
        elif is_new:
            folder, _ = plan
            self._begin(folder)
        if self.follower is not None:
            self.follower.look()

    def _begin(self, folder: Path) -> None:
        """Follow a folder's plan if its shards can be divided evenly among the nodes."""
        plan = read_run(folder)["plan"]
        self.budget = plan["budget_s"]
        planned = read_plan(plan)
        _, nodes = self._node
        total = plan.get("shards", 1)
        if total % nodes:
            self.follower = None
        else:
            shards = shards_of_node(self._node, total)
            self.follower = Follower(folder, planned, shards, total)

    def is_open(self, budget: float) -> bool:
        """Return True if any of the node's shards needs a job.

        A shard needs no job once it has ended with a budget of at least ``budget`` seconds or the
        plan's budget, whichever is larger.
        """
        # There may be no plan yet, or the plan may be for another number of nodes.
        if self.follower is None:
            return True
        return bool(self.follower.unfinished(max(budget, self.budget)))

    def refuse_other_sweeps(self, request: Request) -> None:
        if self.folder is not None:
            refuse_other_sweeps(self.folder, request, read_run(self.folder)["plan"])

    def forget_failure(self) -> None:
        """Remove the failure of an earlier job from the note."""
        if self.failure:
            NodeNote(self.folder, "").write(self._results, self._node)

    def forget(self) -> None:
        NodeNote.path(self._results, self._node).unlink(missing_ok=True)


def _find_plan(folder: Path | None) -> tuple[Path, int] | None:
    """Return ``folder`` and the modification time, in nanoseconds, of its run.json.

    Return None if ``folder`` is None or has no run.json.
    """
    if folder is None:
        return None
    try:
        return folder, (folder / "run.json").stat().st_mtime_ns
    except OSError:  # the run was removed or set aside after the note was written
        return None
