"""The ``submit`` command: one run on several nodes of a cluster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from kernels.cli import JsonOption, note, parse_seconds, print_json
from kernels.common.errors import UserError
from kernels.common.program import RESULTS, same_command

_STARTING_MINUTES = 10  # time to load PyTorch, time anchors, name kernels, and fold
_GPUS_PER_NODE = 8
_CPUS_PER_GPU = 4


def submit_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help=(
                "Names of sweeps or paths of sweep files; a,b measures sweeps a and b on the same "
                "GPU [default: the default sweeps]."
            )
        ),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            help="Cluster to run on: slurm, local (this machine) or debug (this process).",
        ),
    ] = "slurm",
    nodes: Annotated[
        int,
        typer.Option("--nodes", min=1, max=100_000, help="Number of nodes that share the run."),
    ] = 1,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            "--gpus-per-node",
            min=1,
            max=1000,
            help=f"Number of GPUs on each node [default: {_GPUS_PER_NODE}].",
        ),
    ] = None,
    cpus_per_gpu: Annotated[
        int | None,
        typer.Option(
            "--cpus-per-gpu",
            min=1,
            max=1000,
            help="Number of CPU cores for each GPU; two carry out the run, and up to 12 others "
            f"compile kernels [default: {_CPUS_PER_GPU}].",
        ),
    ] = None,
    exclusive: Annotated[
        bool, typer.Option("--exclusive", help="Reserve whole nodes for the jobs.")
    ] = False,
    partition: Annotated[
        str | None,
        typer.Option("--partition", help="Slurm partition [default: the cluster's default]."),
    ] = None,
    account: Annotated[
        str | None, typer.Option("--account", help="Slurm account [default: the user's default].")
    ] = None,
    minutes: Annotated[
        int | None,
        typer.Option(
            "--time",
            min=5,
            help="Time limit of a job in minutes [default: twice the budget, plus "
            f"{_STARTING_MINUTES} minutes].",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Measuring time per GPU, such as 90s, 10m or 2h [default: 10m; 2m on a CPU]."
        ),
    ] = None,
    results: Annotated[
        Path, typer.Option("--results", help="Folder of all results, visible from every node.")
    ] = RESULTS,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Set an old run aside and start a new one.")
    ] = False,
    device: Annotated[
        str, typer.Option("--device", help="Device to use on the nodes: gpu or cpu.")
    ] = "gpu",
    gpu_ids: Annotated[
        bool,
        typer.Option(
            "--gpu-ids/--no-gpu-ids", help="Record in run.json a hash that identifies each GPU."
        ),
    ] = True,
    print_: Annotated[
        bool, typer.Option("--print", help="Print an sbatch script instead of submitting jobs.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Measure on several nodes of a cluster, and wait for the results.

    Run the same command again, without --fresh, to resume.
    """
    from sweeps.folding.counts import counts_sentence
    from sweeps.planning.choice import choose_sweeps
    from sweeps.progress import LiveReporter
    from sweeps.running.request import DEFAULT_BUDGET, Request
    from sweeps.store import read_run
    from sweeps.submitting.clusters import Resources
    from sweeps.submitting.script import sbatch_script
    from sweeps.submitting.submission import submit

    # 1. Check the options.
    if device not in ("gpu", "cpu"):
        raise UserError(f"--device {device!r} cannot be used to submit jobs; give gpu or cpu.")
    if device == "cpu" and (gpus_per_node or cpus_per_gpu):
        raise UserError(
            "--gpus-per-node and --cpus-per-gpu work only with --device gpu; leave them out."
        )
    full_names = tuple(_with_full_paths(group) for group in names or ())
    # A misspelt name is reported here instead of on every node.
    choose_sweeps(Request(full_names).sweeps)
    budget_seconds = parse_seconds(budget)
    default_minutes = 2 * (budget_seconds or DEFAULT_BUDGET[device]) / 60 + _STARTING_MINUTES
    limit_minutes = minutes or round(default_minutes)
    gpus = 0 if device == "cpu" else gpus_per_node or _GPUS_PER_NODE
    cpus = cpus_per_gpu or _CPUS_PER_GPU
    resources = Resources(gpus, cpus, limit_minutes, partition, account, exclusive)
    # 2. Print a script if the user requested that.
    if print_:
        if json:
            raise UserError("--print prints a script, not JSON; leave out --print or --json.")
        if cluster != "slurm":
            raise UserError(
                f"--print prints a script for Slurm, not for the cluster {cluster!r}; leave out "
                "--print or --cluster."
            )
        if fresh:
            raise UserError(
                "--print cannot be combined with --fresh, because each node that runs the script "
                "would set aside the run that the other nodes have begun; leave out --fresh, and "
                "choose another --results folder for a new run."
            )
        options = [*full_names]
        if budget:
            options += ["--budget", budget]
        options += ["--results", str(results.resolve()), "--device", device]
        if not gpu_ids:
            options.append("--no-gpu-ids")
        print(sbatch_script(options, resources, nodes), end="")
        return
    # 3. Submit the jobs and follow them.
    request = Request(
        names=full_names,
        budget=budget_seconds,
        results=results,
        fresh=fresh,
        device=device,
        identify=gpu_ids,
        fresh_since=time.time(),
    )
    try:
        with LiveReporter() as live:
            outcome = submit(request, nodes, cluster, resources, live, note)
    except KeyboardInterrupt:
        note(f"Stopped waiting. Measurements are saved. Run {same_command(fresh)} to resume.")
        raise
    # 4. Report the outcome.
    for folder in outcome.folders:
        note(counts_sentence(read_run(folder)))
        note(f"Results are in {folder}")
    for sentence in outcome.missing:
        note(sentence)
    if json:
        print_json(
            {
                "folders": [str(folder) for folder in outcome.folders],
                "missing": list(outcome.missing),
            }
        )
    if outcome.missing:
        raise UserError(
            f"The run is not complete. Run {same_command(fresh)} to resume.", exit_code=1
        )


def _with_full_paths(group: str) -> str:
    """Make the paths in a comma-separated list absolute, because a job may start elsewhere."""
    from sweeps.planning.choice import is_file

    names = group.split(",")
    return ",".join(str(Path(name).resolve()) if is_file(name) else name for name in names)
