"""Submit what is not done of a run, follow it, and say what is left."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kernels.errors import UserError
from sweeps.planning.plan import read_plan
from sweeps.progress import Reporter
from sweeps.running.folding import fold
from sweeps.running.request import Request
from sweeps.sharing.following import Follower, report
from sweeps.store import make_folder, read_run, refuse_if_running, set_aside, write_json
from sweeps.submitting.clusters import Cluster, Resources
from sweeps.submitting.node_job import NodeJob, NodeNote, jobs_folder

_LOOK_SECONDS = 2.0
_LOOKS = 5  # before a cluster's controller, which answers many, is asked about the jobs


@dataclass(frozen=True)
class Outcome:
    """What became of a submission: the folders of its runs, and a sentence for what is missing."""

    folders: tuple[Path, ...]
    missing: tuple[str, ...]


def submit(
    request: Request, nodes: int, kind: str, resources: Resources, reporter: Reporter,
    note: Callable[[str], None],
) -> Outcome:  # fmt: skip
    """Submit the nodes that are not done and have no job; return when no job is left.

    However it ends, what was measured is folded. Jobs of Slurm go on without this process; the same
    call follows them again.

    Args:
        request: what was asked for; its shard and GPU do not matter.
        nodes: how many share the run.
        kind: of cluster.
        resources: of each node's job.
        reporter: told how far all nodes are.
        note: told what happens.

    Raises:
        UserError: there is no such cluster, or it refused the jobs.
        KeyboardInterrupt: after folding.
    """
    request = replace(request, results=request.results.resolve())
    make_folder(jobs_folder(request.results))
    cluster = Cluster(kind, jobs_folder(request.results) / "output", resources)
    return _Submission(request, nodes, cluster, reporter, note).carry_out()


class _Submission:
    def __init__(
        self, request: Request, nodes: int, cluster: Cluster, reporter: Reporter,
        note: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._request = request
        self._results = request.results
        self._nodes = range(1, nodes + 1)
        self._cluster = cluster
        self._reporter = reporter
        self._note = note
        self._runs = {number: _NodeRun(self._results, (number, nodes)) for number in self._nodes}
        self._list = jobs_folder(self._results) / f"jobs-of-{nodes}.json"
        self._ids = self._known_jobs()

    def carry_out(self) -> Outcome:
        self._look()
        living = self._living()
        if self._request.fresh:
            self._set_aside(living)
        budget = self._request.measuring or 0.0
        due = [n for n in self._nodes if n not in living and self._runs[n].is_open(budget)]
        if living:
            self._note(f"{len(living)} jobs of an earlier call still wait or run.")
        if not due and not living:
            self._note("Every share is done already.")
        try:
            while due or living:
                due = self._submit_some(due, living)
                living = self._follow()
        except KeyboardInterrupt:
            self._cluster.cancel()
            raise
        finally:
            self._look()
            for folder in self._folders:
                fold(folder)
        return Outcome(tuple(self._folders), tuple(self._missing(budget)))

    def _known_jobs(self) -> dict[int, str]:
        """The jobs of an earlier call."""
        with suppress(OSError, ValueError, KeyError, AttributeError):
            document = json.loads(self._list.read_text(encoding="utf-8"))
            if document["cluster"] == self._cluster.kind == "slurm":
                return {int(node): str(job) for node, job in document["jobs"].items()}
        return {}

    def _living(self) -> set[int]:
        jobs = self._cluster.living([*self._ids.values()])
        return {node for node, job in self._ids.items() if job in jobs}

    def _submit_some(self, due: list[int], living: set[int]) -> list[int]:
        """Submit all, or one at a time where all would share one machine; returns what is left."""
        at_once = len(due) if self._cluster.kind == "slurm" else not living
        now, later = due[:at_once], due[at_once:]
        if now:
            submitted = self._cluster.submit(NodeJob(self._job_request, len(self._nodes)), now)
            self._ids.update(submitted)
            jobs = {str(node): job for node, job in sorted(self._ids.items())}
            write_json(self._list, {"cluster": self._cluster.kind, "jobs": jobs})
            whose = f"node{'s' if len(now) > 1 else ''} {', '.join(map(str, now))}"
            self._note(f"Submitted {whose} of {len(self._nodes)}: {', '.join(submitted.values())}.")
        return later

    @property
    def _job_request(self) -> Request:
        return replace(self._request, fresh=False)  # what was there is set aside by now

    def _follow(self) -> set[int]:
        """Show how far the nodes are, and after a while ask which jobs are left."""
        for _ in range(_LOOKS if self._cluster.kind == "slurm" else 1):
            time.sleep(_LOOK_SECONDS)
            self._look()
            followers = [run.follower for run in self._runs.values() if run.follower]
            if followers:
                report(followers, self._reporter, max(run.budget for run in self._runs.values()))
        return self._living()

    def _look(self) -> None:
        for run in self._runs.values():
            run.look()

    @property
    def _folders(self) -> list[Path]:
        """The runs' folders, that of most nodes first."""
        found = Counter(run.folder for run in self._runs.values() if run.folder is not None)
        return [folder for folder, _ in found.most_common()]

    def _set_aside(self, living: set[int]) -> None:
        if living:
            raise UserError(
                f"{len(living)} jobs of an earlier call still wait or run; cancel them before "
                "a fresh run."
            )
        for folder in self._folders:
            refuse_if_running(folder)
            self._note(f"A fresh run was asked for; the old one is kept in {set_aside(folder)}.")
        for run in self._runs.values():
            run.forget()

    def _missing(self, budget: float) -> Iterator[str]:
        """A sentence for each node that is not done, and for each that measured another machine."""
        first = next(iter(self._folders), None)
        for number, run in self._runs.items():
            of = f"Node {number} of {len(self._nodes)}"
            if run.is_open(budget):
                yield f"{of} is not done: {run.failure or 'its job ended too early.'}"
            elif run.folder != first:
                yield (
                    f"{of} has another GPU than most: what it measured is in {run.folder}, and "
                    f"its shares of {first} are missing."
                )


class _NodeRun:
    """How far one node's shares are, by the files that it writes."""

    def __init__(self, results: Path, node: tuple[int, int]) -> None:
        self._results = results
        self._node = node
        self._read: tuple[Path, int] | None = None  # the plan that is followed, and its file's time
        self.folder: Path | None = None
        self.failure = ""
        self.budget = 0.0
        self.follower: Follower | None = None

    def look(self) -> None:
        """Read what is new: the node's note, the plan and the samples."""
        said = NodeNote.read(self._results, self._node)
        self.folder, self.failure = said.folder, said.failure
        try:
            at = None if said.folder is None else (said.folder / "run.json").stat().st_mtime_ns
        except OSError:  # the job is still planning
            at = None
        if said.folder is None or at is None:
            self.follower = self._read = None
            return
        if self._read != (said.folder, at):
            self._read = (said.folder, at)
            self._begin(said.folder)
        if self.follower is not None:
            self.follower.look()

    def _begin(self, folder: Path) -> None:
        """Follow the plan in a folder, if it is one that so many nodes share."""
        plan = read_run(folder)["plan"]
        (number, nodes), shards = self._node, plan.get("shards", 1)
        each = shards // nodes
        self.budget = plan["budget_s"]
        of_node = range((number - 1) * each + 1, number * each + 1)
        planned = read_plan(plan)
        self.follower = None if shards % nodes else Follower(folder, planned, of_node, shards)

    def is_open(self, budget: float) -> bool:
        """Whether a job would advance the node's shares with so many seconds for each."""
        follower = self.follower
        return follower is None or bool(follower.unfinished(max(budget, self.budget)))

    def forget(self) -> None:
        """What an earlier job said."""
        NodeNote.path(self._results, self._node).unlink(missing_ok=True)
        self.look()
