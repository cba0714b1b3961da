"""``audit``: find the dimension of a model to change, and what its step gains."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.commands.app import ResultsOption, app, basis_of
from analysis.words import names_in, share_of
from kernels.cli import DeviceOption, GpuOption, JsonOption, note, parse_seconds, print_json
from kernels.common.checks import check_option, is_whole
from kernels.common.errors import UserError
from kernels.common.program import RESULTS, needs_extra
from sweeps.store import make_folder

if TYPE_CHECKING:
    from analysis.audit.audit import Audit
    from analysis.model.basis import Basis
    from sweeps.running.request import Request

_MOST_TRIES = 64  # combinations, each of which is captured in about a second
_MEASURED_LEVERS = 3  # levers whose GEMMs are timed together with the model's own
_CONFIRMED_PAIRS = 9  # three GEMMs and their gradients


@app.command("audit")
def audit_command(
    model: Annotated[
        str, typer.Argument(help="config.json, a known name such as gpt2-xl, or module:factory.")
    ],
    machine: Annotated[
        str | None,
        typer.Option(
            "--machine",
            "--compare",
            help=("Machines, separated by commas [default: measured last]."),
        ),
    ] = None,
    mode: Annotated[str, typer.Option(help="train, prefill or decode.")] = "train",
    batch: Annotated[int, typer.Option(min=1, help="Batch size: sequences or images.")] = 1,
    seq: Annotated[int, typer.Option(min=1, help="Sequence length in tokens.")] = 2048,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens per sequence when decoding.")] = 1,
    dtype: Annotated[str, typer.Option(help="Dtype: fp32, tf32, fp16 or bf16.")] = "bf16",
    autocast: Annotated[bool, typer.Option(help="fp32 parameters, GEMMs in --dtype.")] = False,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel degree.")] = 1,
    runtime: Annotated[str, typer.Option(help="Runtime: eager or compile.")] = "eager",
    fuse: Annotated[str, typer.Option(help="GEMMs to fuse: qkv,gate_up.")] = "",
    recompute: Annotated[bool, typer.Option(help="Recompute layers in backward.")] = False,
    loss_chunks: Annotated[int, typer.Option(min=1, help="Parts in which head and loss run.")] = 1,
    optimizer: Annotated[str, typer.Option(help="Optimizer: adamw, sgd or none.")] = "adamw",
    attention: Annotated[
        str | None,
        typer.Option(help="Attention's share of the peak, such as 50% [default: as measured]."),
    ] = None,
    attention_kernel: Annotated[
        str | None,
        typer.Option(
            help="Framework whose attention is used: vllm, trtllm or sglang [default: not known]."
        ),
    ] = None,
    causal: Annotated[str, typer.Option(help="Count causal attention: half or full.")] = "half",
    skew: Annotated[
        float, typer.Option(help="Expert skew: one in this many experts gets tokens.")
    ] = 1.0,
    vary: Annotated[str, typer.Option(help="Dimensions to vary: hidden,ffn.")] = "",
    tries: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            help="Values to compare, hidden=768,1024; repeatable, for every combination.",
        ),
    ] = None,
    multiple: Annotated[
        int | None, typer.Option(min=1, help="Propose only widths that are multiples of this.")
    ] = None,
    parameters: Annotated[
        str, typer.Option(help="Largest growth in parameters of the joint change.")
    ] = "1%",
    arg: Annotated[
        list[str] | None, typer.Option("--arg", help="Model size, hidden=4096; repeatable.")
    ] = None,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", help="Module input: int64[8,2048].")
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="CSV file for the GEMMs.")] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Markdown file for a pull request.")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option("--plots", help="Folder for plots of step and levers.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time GEMMs and best levers here.")
    ] = False,
    budget: Annotated[str, typer.Option(help="Measuring time of --measure.")] = "60s",
    device: DeviceOption = "auto",
    gpu: GpuOption = 0,
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Say which dimension of a model to change, and what it gains.

    Lists every GEMM of a step, forward and backward, with its time and what limits it.
    """
    from sweeps.capture.known_names import check_model

    # 1. Check the arguments; those that need no imports of seconds come first.
    check_model(model)
    machines: list[str | None] = [*machine.split(",")] if machine else [None]
    bases = [] if measure else [basis_of(name, results) for name in machines]
    from analysis.audit.audit import LeverSearch, audit
    from analysis.audit.audit_report import as_comparison, sources
    from analysis.audit.runtime import Runtime
    from sweeps.running.request import Request

    try:
        from sweeps.capture.sources import find_source
        from sweeps.capture.step import ModelStep
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UserError(f"{needs_extra('torch', 'models')} Its CPU build is enough.") from None
    check_option("--causal", causal, ("half", "full"))
    for file in (csv, markdown):
        if file is not None and not file.parent.is_dir():
            raise UserError(
                f"{file.parent} is not a folder, so {file.name} cannot be written there."
            )
    run_options = Runtime(
        runtime,
        names_in(fuse or None, "fuse"),
        tp,
        recompute,
        loss_chunks,
        optimizer,
        None if attention is None else share_of(attention, "attention"),
        attention_kernel,
        causal == "half",
        skew,
    )
    step = ModelStep(mode, batch, seq, tokens, dtype, autocast)
    source = find_source(model, _sizes(arg or []), inputs or [])
    search = LeverSearch(
        names_in(vary or None, "vary"),
        share_of(parameters, "parameters"),
        multiple,
        _tries(tries or []),
    )

    # 2. Audit on each machine; with --measure, on this one, with new measurements.
    def audit_on(*bases: Basis) -> list[Audit]:
        return audit(source, step, run_options, list(bases), search)

    if measure:
        if len(machines) > 1:
            raise UserError("--measure times on this machine; name no other machine.")
        request = Request(results=results, device=device, gpu=gpu, budget=parse_seconds(budget))
        audits = measured_audit(audit_on, machines[0], request)
    else:
        audits = audit_on(*bases)
    # 3. Print the audits, and write the files that were asked for.
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

        make_folder(plots)
        title = f"{model}, {mode}"
        accounts = {result.account.machine: result.account for result in audits}
        levers = {result.account.machine: result.levers for result in audits}
        plot_step(accounts, title, plots)
        plot_levers(levers, title, plots)


def measured_audit(
    audit_on: Callable[[Basis], list[Audit]], machine: str | None, request: Request
) -> list[Audit]:
    """Audit on this machine, after timing the GEMMs of the model and of its best levers.

    Everything is timed once, in shuffled rounds. The shapes that the best lever changes are then
    re-timed together with the original ones, in other processes. All measurements are added to the
    machine's recording.

    Args:
        audit_on: audits the model by a basis; the result is a list of one audit.
        machine: the machine that the user named, if any.
        request: where to measure, and for how long.

    Raises:
        UserError: if ``machine`` is not this machine, or it is too disturbed to measure on.
    """
    from analysis.audit.account import as_problem
    from analysis.commands.confirm import basis_here, usable
    from sweeps.running.confirming import confirm_choices, explore

    # 1. Time the matrix operations of the model and those of the levers that look best.
    basis = basis_here(machine, request)
    (predicted,) = audit_on(basis)
    works = [as_problem(row.product.work) for row in predicted.account.rows]
    problems = [problem for problem in works if problem is not None]
    for lever in predicted.levers[:_MEASURED_LEVERS]:
        problems += [after for _, after in lever.pairs]
    cases = [(problem, basis.library(problem)) for problem in dict.fromkeys(problems)]
    note(f"Measuring {len(cases)} GEMMs and convolutions …")
    run = explore(request, cases, note, quickly=True)
    # 2. Audit again with these times, and re-time what the best lever changes.
    (measured,) = audit_on(usable(run.folder, request))
    planned = {(entry.case.problem, entry.case.implementation) for entry in run.planned}
    pairs = []
    for lever in measured.levers[:1]:
        for before, after in lever.pairs[:_CONFIRMED_PAIRS]:
            pair = (before, basis.library(before)), (after, basis.library(after))
            # Measured times may favour another lever, whose problems were not planned.
            if lever.gain.value > 0 and planned.issuperset(pair):
                pairs.append(pair)
    if not pairs:
        note("No lever is clearly better, so none was re-timed.")
        return [measured]
    confirm_choices(run, pairs, note)
    return audit_on(usable(run.folder, request))


def _tries(arguments: list[str]) -> dict[str, list[int]]:
    """Return the sizes of each dimension from arguments such as ``hidden=4096,4224``.

    Raises:
        UserError: if an argument has another form, or there are too many combinations.
    """
    tries: dict[str, list[int]] = {}
    for text in arguments:
        name, _, values = text.partition("=")
        sizes = values.split(",")
        if not name or not all(is_whole(size) and int(size) for size in sizes):
            raise UserError(f"--try takes sizes such as hidden=4096,4224, not {text!r}.")
        tries.setdefault(name, []).extend(map(int, sizes))
    if math.prod(map(len, tries.values())) > _MOST_TRIES:
        raise UserError(f"--try has more than {_MOST_TRIES} combinations; give fewer values.")
    return tries


def _sizes(arguments: list[str]) -> dict[str, int]:
    """Return the size of each dimension from arguments such as ``hidden=4096``.

    Raises:
        UserError: if an argument has another form.
    """
    sizes = {}
    for text in arguments:
        name, _, value = text.partition("=")
        if not is_whole(value) or not int(value):
            raise UserError(f"--arg takes a size such as hidden=4096, not {text!r}.")
        sizes[name] = int(value)
    return sizes
