from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sweeps.submitting.clusters import Resources
from sweeps.submitting.script import sbatch_script
from tests.support.slurm_cluster import PARTITION, available, made_up_cluster, variables

ROOT = Path(__file__).resolve().parents[3]


def printed(*more: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-m", "sweeps", "submit", "--print", *more],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.mark.slow
def test_a_script_asks_for_what_the_options_say() -> None:
    text = printed("square", "--nodes", "4", "--gpus-per-node", "8", "--cpus-per-gpu", "6",
                   "--partition", "h100", "--account", "me", "--time", "30", "--budget", "5m",
                   "--results", "/shared/results")  # fmt: skip
    flags = dict(line.removeprefix("#SBATCH --").partition("=")[::2]
                 for line in text.splitlines() if line.startswith("#SBATCH"))  # fmt: skip
    assert flags == {
        "job-name": "rooftile", "array": "1-4", "nodes": "1", "ntasks": "1", "gpus-per-node": "8",
        "cpus-per-task": "48", "time": "30", "partition": "h100", "account": "me", "requeue": "",
        "output": "rooftile-%A_%a.log",
    }  # fmt: skip
    words = shlex.split(text.replace("\\\n", "").splitlines()[-1])
    assert words == [
        "exec", sys.executable, "-m", "sweeps", "run", "square", "--budget", "5m", "--results",
        "/shared/results", "--device", "gpu", "--gpus", "all", "--shard", "$SLURM_ARRAY_TASK_ID/4",
        "--stop-after", "27m",
    ]  # fmt: skip


def test_what_is_not_asked_for_is_the_cluster_s_default() -> None:
    text = sbatch_script(["--device", "cpu"], Resources(0, 4, 5), 1)
    for word in ("partition", "account", "gpus-per-node", "cpus-per-task", "exclusive"):
        assert f"--{word}" not in text


def test_a_path_with_a_space_stays_one_word() -> None:
    assert "'/a b/results'" in sbatch_script(["--results", "/a b/results"], Resources(8, 4, 30), 2)


def on_the_page() -> str:
    """The script that sweeps/clusters.md shows."""
    page = (ROOT / "sweeps" / "clusters.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", page, re.DOTALL)
    return str(block)


@pytest.mark.slow
def test_the_page_shows_what_its_command_prints() -> None:
    page = (ROOT / "sweeps" / "clusters.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"python -m sweeps submit (--print [^\n]*\\\n[^\n]*)", page)
    text = printed(*shlex.split(command.replace("\\\n", "")))
    text = text.replace(sys.executable, "python").replace(str(ROOT), "/shared/rooftile")
    assert text == on_the_page()


@pytest.mark.xdist_group("slurm")
@pytest.mark.skipif(bool(available()), reason=available() or "there is a Slurm")
def test_a_real_slurm_of_four_nodes_with_eight_gpus_accepts_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("m")
    with made_up_cluster(folder, nodes=4, gpus=8) as conf:

        def judged(text: str) -> subprocess.CompletedProcess[str]:
            script = folder / "job.sh"
            script.write_text(text.replace("partition=gpu", f"partition={PARTITION}"))
            return subprocess.run(["sbatch", "--test-only", str(script)], env=variables(conf),
                                  capture_output=True, text=True, check=False)  # fmt: skip

        accepted = judged(on_the_page())
        assert accepted.returncode == 0, accepted.stderr
        assert judged(on_the_page().replace("node=8", "node=9")).returncode != 0
