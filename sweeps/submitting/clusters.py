"""Run jobs through submitit: on a Slurm cluster, on this machine, or in this process.

``squeue`` reports which Slurm jobs are still queued or running. On a cluster without Slurm's
accounting, submitit itself would never notice that a job was killed.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.common.counts import enumerated
from kernels.common.errors import UserError
from kernels.common.program import FOLDER, needs_extra
from sweeps.submitting.node_job import NodeJob

if TYPE_CHECKING:
    import submitit

CLUSTERS = ("slurm", "local", "debug")

JOB_NAME = "rooftile"

SIGNAL_SECONDS = 120
"""Seconds before a job's time limit at which Slurm signals the job to end. The job needs this time
to write its last samples and to fold all samples into the tables."""

_MAX_REQUEUES = 100  # requeues of one job, which resumes from its files each time
_MAX_RUNNING_JOBS = 1000  # jobs of an array that may run at once; submitit's default is 256
_SQUEUE_SECONDS = 60.0  # time after which squeue counts as not answering


@dataclass(frozen=True)
class Resources:
    """Resources that each node's job requests.

    If the partition or the account is None, Slurm's default applies.
    """

    gpus_per_node: int
    """Number of GPUs; 0 for a run on CPUs."""
    cpus_per_gpu: int
    minutes: int
    """Time limit of the job."""
    partition: str | None = None
    account: str | None = None
    exclusive: bool = False
    """True if no other job may share the node."""


class NoAnswerError(UserError):
    """Raised if Slurm does not say which jobs are still queued or running."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; try again later.", exit_code=1)
        self.reason = reason


class Cluster:
    """Cluster that takes jobs, and reports which of them are still queued or running."""

    def __init__(self, kind: str, folder: Path, resources: Resources) -> None:
        """Prepare for submitting jobs; ``kind`` is one of :data:`CLUSTERS`.

        All nodes must see ``folder``, to which the jobs' output is written.

        Raises:
            UserError: if ``kind`` is unknown, submitit is not installed, or ``kind`` is ``slurm``
                and sbatch is not installed.
        """
        if kind not in CLUSTERS:
            raise UserError(f"--cluster must be {enumerated(CLUSTERS, 'or')}, not {kind!r}.")
        if kind == "slurm" and not shutil.which("sbatch"):
            raise UserError(
                "sbatch is not installed on this machine: submit from a node that has it, or "
                "use --cluster local."
            )
        try:
            import submitit
        except ModuleNotFoundError:
            raise UserError(needs_extra("submitit", "slurm")) from None
        # Without Slurm's accounting, which is not needed here, submitit would warn repeatedly.
        logging.getLogger("submitit").setLevel(logging.ERROR)
        self.kind = kind
        options = {"slurm_max_num_timeout": _MAX_REQUEUES} if kind == "slurm" else {}
        self._executor: submitit.Executor = submitit.AutoExecutor(
            folder=folder, cluster=kind, **options
        )
        self._executor.update_parameters(**_parameters(kind, resources))
        self._jobs: dict[str, submitit.Job[None]] = {}

    def submit(self, work: NodeJob, nodes: Sequence[int]) -> dict[int, str]:
        """Submit a job for each node, and return the job ids by node.

        Raises:
            UserError: if the cluster refuses the jobs.
        """
        from submitit.core.utils import FailedJobError

        try:
            jobs = self._executor.map_array(work, nodes)
        except FailedJobError as error:
            # The last line of the error is the cluster's reason.
            lines = [line for line in str(error).splitlines() if line.strip()]
            reason = lines[-1].strip().rstrip(".") if lines else "it gave no reason"
            raise UserError(
                f"The cluster refused the jobs: {reason}. Correct the options and submit again."
            ) from None
        self._jobs.update({str(job.job_id): job for job in jobs})
        return {node: str(job.job_id) for node, job in zip(nodes, jobs, strict=True)}

    def living(self, ids: Sequence[str]) -> dict[str, str]:
        """Return the queued and running jobs among ``ids``, by job id.

        The value for a job is the reason why it waits, or an empty string if it does not wait. On
        the cluster ``debug``, this call carries out the jobs, so no job is left.

        Raises:
            NoAnswerError: if Slurm does not say which jobs are left.
            Exception: any exception that a job on the cluster ``debug`` raises.
        """
        if self.kind == "slurm":
            return living_in_slurm(ids)
        # Without Slurm, jobs end together with the process that submitted them, so only those of
        # this process can be alive.
        jobs = {job_id: self._jobs[job_id] for job_id in ids if job_id in self._jobs}
        if self.kind == "debug":
            for job in jobs.values():
                # This carries the job out. On an error, result() would start a debugger instead.
                if error := job.exception():
                    raise error
            return {}
        return {job_id: "" for job_id, job in jobs.items() if not job.done()}

    def cancel(self) -> None:
        """Cancel the jobs on the cluster ``local``; on other clusters, do nothing."""
        if self.kind == "local":
            for job in self._jobs.values():
                job.cancel()


def _parameters(kind: str, resources: Resources) -> Mapping[str, Any]:
    """Return the parameters of submitit's executor for one job per node.

    submitit ignores a parameter that is None, so the cluster's default applies.
    """
    # In a checkout, Python finds the package only from the checkout's folder. Jobs start there.
    start_folder = {} if FOLDER is None else {"chdir": str(FOLDER)}
    slurm_only = {
        "slurm_partition": resources.partition,
        "slurm_account": resources.account,
        "slurm_exclusive": resources.exclusive or None,
        "slurm_signal_delay_s": SIGNAL_SECONDS,
        "slurm_array_parallelism": _MAX_RUNNING_JOBS,
        "slurm_additional_parameters": {"requeue": True, **start_folder},
    }
    parameters = {
        "name": JOB_NAME,
        "nodes": 1,
        "tasks_per_node": 1,
        "timeout_min": resources.minutes,
        "gpus_per_node": resources.gpus_per_node or None,
        "cpus_per_task": resources.cpus_per_gpu * resources.gpus_per_node or None,
    }
    return {**parameters, **slurm_only} if kind == "slurm" else parameters


def living_in_slurm(ids: Sequence[str]) -> dict[str, str]:
    """Return the jobs among ``ids`` that ``squeue`` lists, as :meth:`Cluster.living` returns them.

    Raises:
        NoAnswerError: if squeue does not answer, or fails for any reason except that it no longer
            knows the jobs.
    """
    if not ids:
        return {}
    # 1. Ask about job arrays: the job 12_3 is part of the array 12.
    arrays = sorted({job_id.split("_")[0] for job_id in ids})
    try:
        answer = subprocess.run(
            [
                "squeue",
                "--noheader",
                "--array",
                "--me",
                f"--name={JOB_NAME}",
                f"--jobs={','.join(arrays)}",
                "--format=%i|%t|%r",
            ],
            capture_output=True,
            text=True,
            timeout=_SQUEUE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"squeue did not answer within {_SQUEUE_SECONDS:.0f} s") from None
    except OSError as error:
        raise NoAnswerError(f"squeue could not be started ({error.strerror})") from None
    # squeue fails with this message for a job that ended long ago, which it no longer knows.
    if answer.returncode and "Invalid job id" not in answer.stderr:
        raise NoAnswerError(f"squeue failed ({answer.stderr.strip()})")
    # 2. Parse the answer, which has a line such as ``12_3|PD|Resources`` for each job. PD means
    # pending.
    requested_ids = set(ids)
    living: dict[str, str] = {}
    for line in answer.stdout.splitlines():
        if line.count("|") < 2:  # not the line of a job
            continue
        job_id, state, reason = line.split("|", 2)
        if job_id in requested_ids:
            living[job_id] = reason if state == "PD" else ""
    return living
