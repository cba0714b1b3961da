"""Write an sbatch script that users can adapt and that carries out the same run as a submission."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from kernels.common.program import FOLDER, command_words
from sweeps.submitting.clusters import JOB_NAME, Resources

_CLOSING_MINUTES = 3  # time before Slurm's limit to write the last samples and fold


def sbatch_script(options: Sequence[str], resources: Resources, nodes: int) -> str:
    """Return the script of a job array in which each node's task runs ``sweeps run``.

    ``options`` are the arguments of that command, except --gpus, --shard and --stop-after.
    """
    gpus = resources.gpus_per_node
    # A flag that is None is left out. On a CPU, zero GPUs and their zero cores become None, too.
    flags = {
        "job-name": JOB_NAME,
        "array": f"1-{nodes}",
        "nodes": 1,
        "ntasks": 1,
        "gpus-per-node": gpus or None,
        "cpus-per-task": gpus * resources.cpus_per_gpu or None,
        "time": resources.minutes,
        "partition": resources.partition,
        "account": resources.account,
        "output": "rooftile-%A_%a.log",
    }
    stop_minutes = max(1, resources.minutes - _CLOSING_MINUTES)
    command = [sys.executable, *command_words(["sweeps", "run"])]
    # 1. Write what the job requests.
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{name}={value}" for name, value in flags.items() if value is not None]
    if resources.exclusive:
        lines.append("#SBATCH --exclusive")
    lines.append("#SBATCH --requeue")
    # 2. Write what each task runs. In a checkout, Python finds the packages only from the
    # checkout's folder.
    lines += ["", "# Submit this script again to resume unfinished work."]
    if FOLDER is not None:
        lines.append(f"cd {shlex.quote(str(FOLDER))} || exit 1")
    lines += [
        # ``exec`` replaces the shell, so that Slurm's signals reach the program itself, which then
        # writes its last samples and folds.
        f"exec {shlex.join(command)} \\",
        f"    {shlex.join(options)} \\",
        f'    --gpus all --shard "$SLURM_ARRAY_TASK_ID/{nodes}" --stop-after {stop_minutes}m',
    ]
    return "\n".join(lines) + "\n"
