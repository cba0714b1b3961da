"""``audit``: find out which dimension of a model to change, and how much time this saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.commands.app import ResultsOption, app, basis_of
from analysis.words import names_in, share_of
from kernels.cli import DeviceOption, GpuOption, JsonOption, note, parse_seconds, print_json
from kernels.common.checks import check_folder, check_option, is_whole
from kernels.common.counts import counted
from kernels.common.errors import UserError
from kernels.common.program import RESULTS, needs_extra
from sweeps.store import make_folder

if TYPE_CHECKING:
    from analysis.audit.audit import Audit
    from analysis.audit.levers import Lever
    from analysis.model.basis import Basis
    from sweeps.running.request import Request

# Largest number of combinations of --try values. The model is captured for each combination, which
# takes up to about a second.
_MOST_TRIES = 64

# Default measuring time of --measure.
_BUDGET = "60s"

# Number of best levers (changes of dimensions) whose GEMMs and convolutions --measure times.
_MEASURED_LEVERS = 3

# Largest number of GEMM pairs to re-time: enough for three GEMMs and their gradients.
_CONFIRMED_PAIRS = 9


@app.command("audit")
def audit_command(
    model: Annotated[
        str,
        typer.Argument(
            help="Model: a Hugging Face config.json, a known name such as gpt2-xl, or "
            "module:factory."
        ),
    ],
    machine: Annotated[
        str | None,
        typer.Option(
            "--machine",
            "--compare",
            help=(
                "Slugs of machines or unambiguous parts of them, separated by commas [default: the "
                "machine measured last; with --measure, this machine]."
            ),
        ),
    ] = None,
    mode: Annotated[str, typer.Option(help="Kind of step: train, prefill or decode.")] = "train",
    batch: Annotated[int, typer.Option(min=1, help="Batch size in sequences or images.")] = 1,
    seq: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "Sequence length in tokens; in a decoding step, the number of earlier tokens "
                "[default: 2048, or less if the model has too few positions]."
            ),
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Number of new tokens per sequence in a decoding step.")
    ] = 1,
    dtype: Annotated[
        str, typer.Option(help="Dtype of the model: fp32, tf32, fp16 or bf16.")
    ] = "bf16",
    autocast: Annotated[
        bool,
        typer.Option(
            help=(
                "Keep parameters in fp32, and compute GEMMs, convolutions and attention in --dtype "
                "(fp16 or bf16)."
            )
        ),
    ] = False,
    tp: Annotated[
        int,
        typer.Option(
            "--tp", min=1, help="Tensor-parallel degree: number of GPUs that share each layer."
        ),
    ] = 1,
    runtime: Annotated[str, typer.Option(help="PyTorch runtime: eager or compile.")] = "eager",
    fuse: Annotated[
        str, typer.Option(help="GEMMs to fuse: qkv, gate_up or qkv,gate_up [default: none].")
    ] = "",
    recompute: Annotated[
        bool,
        typer.Option(help="Recompute the repeated layers in the backward pass of a training step."),
    ] = False,
    loss_chunks: Annotated[
        int,
        typer.Option(
            min=1,
            help=(
                "Largest number of chunks into which the tokens are split to compute the output "
                "head and the loss."
            ),
        ),
    ] = 1,
    optimizer: Annotated[str, typer.Option(help="Optimizer: adamw, sgd or none.")] = "adamw",
    attention: Annotated[
        str | None,
        typer.Option(
            help=(
                "Share of peak FLOP/s that attention reaches, such as 60% [default: as measured, "
                "or 50% if it was not measured]."
            )
        ),
    ] = None,
    attention_kernel: Annotated[
        str | None,
        typer.Option(
            help="Framework that computes attention: vllm, trtllm or sglang [default: unknown]."
        ),
    ] = None,
    causal: Annotated[
        str, typer.Option(help="FLOPs to count for causal attention: half or full.")
    ] = "half",
    skew: Annotated[
        float,
        typer.Option(help="Expert skew (1 or more). With 4, only one in four experts gets tokens."),
    ] = 1.0,
    vary: Annotated[
        str, typer.Option(help="Dimensions to vary, such as hidden,ffn [default: all].")
    ] = "",
    tries: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            help=(
                "Values of a dimension to compare, such as hidden=768,1024; repeatable. All "
                "combinations are compared."
            ),
        ),
    ] = None,
    multiple: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "Number that divides every proposed width [default: 64, or 8 if no multiple of 64 "
                "is near]."
            ),
        ),
    ] = None,
    parameters: Annotated[
        str,
        typer.Option(
            help="Largest growth in the number of parameters when several changes are combined."
        ),
    ] = "1%",
    arg: Annotated[
        list[str] | None,
        typer.Option(
            "--arg", help="New value of one of the model's sizes, such as hidden=4096; repeatable."
        ),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help=(
                "Input to the module that the factory returns, as dtype[shape], such as "
                "int64[8,2048]; repeatable."
            ),
        ),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", help="CSV file to write, with one row per matrix operation."),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Markdown file to write for a pull request.")
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option("--plots", help="Folder for plots of the step's time and of the changes."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help=(
                "Time the GEMMs and convolutions of the model and of its best changes on this "
                "machine."
            ),
        ),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            help=(
                "Measuring time for --measure, such as 2m, excluding re-timing [default: "
                f"{_BUDGET}]."
            )
        ),
    ] = None,
    device: DeviceOption = "auto",
    gpu: GpuOption = 0,
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Say which dimension of a model to change, and what this saves.

    Lists the GEMMs, convolutions and attention calls of a step, how long each takes, and what
    limits each.
    """
    from sweeps.capture.known_names import check_model

    # 1. Check the arguments. Importing PyTorch takes seconds, so the names of the model and of the
    # machines are checked first.
    check_model(model)
    if budget is not None and not measure:
        raise UserError("--budget needs --measure; add --measure, or leave --budget out.")
    seconds = parse_seconds(budget or _BUDGET)
    # None is the machine measured last or, with --measure, this machine.
    machines: list[str | None] = [*names_in(machine, "machine")] if machine else [None]
    if measure and len(machines) > 1:
        raise UserError("--measure runs on this machine; give at most one name with --machine.")
    bases = [] if measure else [basis_of(name, results) for name in machines]
    from analysis.audit.audit import LeverSearch, audit
    from analysis.audit.audit_report import as_comparison, sources
    from analysis.audit.runtime import Runtime
    from sweeps.running.request import Request

    try:
        from sweeps.capture.sources import find_source
        from sweeps.capture.step import ModelStep, default_seq
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UserError(
            f"{needs_extra('torch', 'models')} PyTorch's CPU build is enough without --measure."
        ) from None
    check_option("--causal", causal, ("half", "full"))
    for file in (csv, markdown):
        if file is not None:
            check_folder(file)
    if plots is not None:
        make_folder(plots)
    run_options = Runtime(
        kind=runtime,
        fuse=names_in(fuse or None, "fuse"),
        tp=tp,
        recompute=recompute,
        loss_chunks=loss_chunks,
        optimizer=optimizer,
        attention=None if attention is None else share_of(attention, "attention"),
        attention_kernel=attention_kernel,
        causal_half=causal == "half",
        skew=skew,
    )
    source = find_source(model, _sizes(arg or []), inputs or [])
    if seq is None:
        seq = default_seq(source.positions, mode, tokens)
    step = ModelStep(mode, batch, seq, tokens, dtype, autocast)
    search = LeverSearch(
        vary=names_in(vary or None, "vary"),
        more_parameters=share_of(parameters, "parameters"),
        multiple=multiple,
        tries=_tries(tries or []),
    )

    # 2. Audit the model on each machine or, with --measure, on this machine after measuring.
    def audit_on(*bases: Basis) -> list[Audit]:
        return audit(source, step, run_options, list(bases), search)

    if measure:
        request = Request(results=results, device=device, gpu=gpu, budget=seconds)
        audits = measured_audit(audit_on, machines[0], request)
    else:
        audits = audit_on(*bases)
    # 3. Print the audits, and write the requested files.
    if json:
        documents = [result.to_json() for result in audits]
        print_json(documents if len(documents) > 1 else documents[0])
    elif len(audits) > 1:
        print(as_comparison([result.report for result in audits]))
    else:
        print(audits[0])
    for result in audits:
        note(f"{result.account.machine}: {sources(result.report)}.")
    if csv is not None:
        import pandas as pd

        frames = [result.products.assign(machine=result.account.machine) for result in audits]
        pd.concat(frames).to_csv(csv, index=False)
    if markdown is not None:
        pages = [result.markdown() for result in audits]
        markdown.write_text("\n".join(pages), encoding="utf-8")
    if plots is not None:
        from analysis.plots.audit import plot_levers, plot_step

        title = f"{model}, {mode}"
        accounts = {result.account.machine: result.account for result in audits}
        levers = {result.account.machine: result.levers for result in audits}
        plot_step(accounts, title, plots)
        plot_levers(levers, title, plots)


def measured_audit(
    audit_on: Callable[[Basis], list[Audit]], machine: str | None, request: Request
) -> list[Audit]:
    """Time a model's GEMMs and convolutions on this machine, then audit the model.

    The GEMMs and convolutions of the best levers (changes of dimensions) are timed, too. All
    measurements are added to the machine's recording.

    ``audit_on`` audits the model on one basis, and returns a list of one audit.

    Raises:
        UserError: if ``machine`` names another machine, a file cannot be read, this machine cannot
            be measured, the new measurements are unusable, or the model cannot be audited.
        OSError: if a sample file cannot be read.
        KeyboardInterrupt: if the user interrupts the call; measurements taken so far are saved.
    """
    from analysis.audit.account import as_problem
    from analysis.commands.confirm import basis_after, basis_here
    from sweeps.running.confirming import confirm_choices, explore

    # 1. Time the GEMMs and convolutions of the model and of the levers that are predicted to be the
    # best.
    basis = basis_here(machine, request)
    (predicted,) = audit_on(basis)
    problems = []
    for row in predicted.account.rows:
        problem = as_problem(row.product.work)
        if problem is not None:  # attention has no problem that can be timed
            problems.append(problem)
    for lever in _best_first(predicted.levers)[:_MEASURED_LEVERS]:
        problems += [after for _, after in lever.pairs]
    cases = [(problem, basis.library(problem)) for problem in dict.fromkeys(problems)]
    count = counted(len(cases), "GEMM or convolution", "GEMMs and convolutions")
    note(f"Measuring {count} …")
    run = explore(request, cases, note, quickly=True)
    # 2. Audit again with these times, and re-time the shapes that the best lever changes.
    (measured,) = audit_on(basis_after(run.folder, request))
    planned = {(entry.case.problem, entry.case.implementation) for entry in run.planned}
    best = next(iter(_best_first(measured.levers)), None)
    if best is None or best.gain.value <= 0:
        note("Nothing was re-timed, because no change brings a gain.")
        return [measured]
    pairs = []
    for before, after in best.pairs[:_CONFIRMED_PAIRS]:
        pair = (before, basis.library(before)), (after, basis.library(after))
        # With measured times, the best lever may be a different lever, whose problems were not
        # timed.
        if planned.issuperset(pair):
            pairs.append(pair)
    if not pairs:
        note(
            "Nothing was re-timed, because the change that now looks best was not timed. Run the "
            "same command again to time it."
        )
        return [measured]
    confirm_choices(run, pairs, note)
    return audit_on(basis_after(run.folder, request))


def _best_first(levers: Sequence[Lever]) -> list[Lever]:
    return sorted(levers, key=lambda lever: lever.expected_gain, reverse=True)


def _tries(arguments: list[str]) -> dict[str, list[int]]:
    """Return the sizes to try for each dimension, from arguments such as ``hidden=4096,4224``."""
    tries: dict[str, list[int]] = {}
    for text in arguments:
        name, _, sizes_text = text.partition("=")
        size_texts = sizes_text.split(",")
        if not name or not all(is_whole(size) and int(size) for size in size_texts):
            raise UserError(f"--try is {text!r}; give sizes such as hidden=4096,4224.")
        sizes = [*tries.get(name, []), *map(int, size_texts)]
        tries[name] = list(dict.fromkeys(sizes))
    combination_count = math.prod(len(sizes) for sizes in tries.values())
    if combination_count > _MOST_TRIES:
        raise UserError(f"--try has more than {_MOST_TRIES} combinations; give fewer values.")
    return tries


def _sizes(arguments: list[str]) -> dict[str, int]:
    """Return the size of each dimension from arguments such as ``hidden=4096``."""
    sizes = {}
    for text in arguments:
        name, _, value = text.partition("=")
        if not name or not is_whole(value) or not int(value):
            raise UserError(f"--arg is {text!r}; give a size such as hidden=4096.")
        sizes[name] = int(value)
    return sizes
