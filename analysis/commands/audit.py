"""``audit``: from a model to the dimension to change, and what the step gains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.commands.app import ResultsOption, app, basis_of, parse_share
from kernels.checks import is_whole
from kernels.cli import DeviceOption, GpuOption, JsonOption, note, parse_seconds, print_json
from kernels.errors import UserError, nearest
from sweeps.store import RESULTS, make_folder

if TYPE_CHECKING:
    from analysis.audit.account import Account
    from analysis.audit.levers import Lever
    from analysis.audit.runtime import Runtime
    from analysis.model.basis import Basis
    from sweeps.capture.captured import Captured, Dimension
    from sweeps.capture.sources import Source, Step
    from sweeps.running.resume import Request

_MODES = ("train", "prefill", "decode")
_MEASURED_LEVERS = 3  # whose products are timed beside the model's own
_CONFIRMED_PAIRS = 9  # three products and their gradients


@app.command("audit")
def audit_command(
    model: Annotated[
        str, typer.Argument(help="A config.json, a name such as gpt2-xl, or module:factory.")
    ],
    machine: Annotated[
        str | None,
        typer.Option("--machine", "--compare", help="Its slug, or several with commas between."),
    ] = None,
    mode: Annotated[str, typer.Option(help="train, prefill or decode.")] = "train",
    batch: Annotated[int, typer.Option(min=1, help="Sequences or images.")] = 1,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 2048,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of each, when decoding.")] = 1,
    dtype: Annotated[str, typer.Option(help="fp32, tf32, fp16 or bf16.")] = "bf16",
    autocast: Annotated[
        bool, typer.Option(help="Parameters in fp32, products in --dtype.")
    ] = False,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel degree.")] = 1,
    runtime: Annotated[str, typer.Option(help="eager or compile.")] = "eager",
    fuse: Annotated[str, typer.Option(help="Products that are one: qkv,gate_up.")] = "",
    recompute: Annotated[bool, typer.Option(help="Layers are computed again.")] = False,
    loss_chunks: Annotated[int, typer.Option(min=1, help="Parts of head and loss.")] = 1,
    optimizer: Annotated[str, typer.Option(help="adamw, sgd or none.")] = "adamw",
    attention: Annotated[
        str, typer.Option(help="Share of the peak that attention is taken to reach.")
    ] = "50%",
    causal: Annotated[str, typer.Option(help="A causal mask leaves half of it, or full.")] = "half",
    skew: Annotated[float, typer.Option(help="Tokens go to one expert in so many.")] = 1.0,
    vary: Annotated[str, typer.Option(help="Only these dimensions, such as hidden,ffn.")] = "",
    parameters: Annotated[str, typer.Option(help="More parameters allowed at once.")] = "1%",
    arg: Annotated[
        list[str] | None, typer.Option("--arg", help="A size, such as hidden=4096; repeatable.")
    ] = None,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", help="Of a factory's module: int64[8,2048].")
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write the products here.")] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Write it for a pull request here.")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option("--plots", help="Draw step and levers into this folder.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time the products and the best levers here.")
    ] = False,
    budget: Annotated[str, typer.Option(help="Measuring time of --measure.")] = "60s",
    device: DeviceOption = "auto",
    gpu: GpuOption = 0,
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Say where a model's step goes, which dimension to change, and what the step gains."""
    from analysis.audit.report import (
        as_comparison,
        as_markdown,
        as_text,
        audit_json,
        products_frame,
    )
    from analysis.audit.runtime import FUSIONS, Runtime
    from sweeps.capture.sources import Step, find_source
    from sweeps.running.resume import Request

    _one_of("--mode", mode, _MODES)
    _one_of("--runtime", runtime, ("eager", "compile"))
    _one_of("--optimizer", optimizer, ("adamw", "sgd", "none"))
    _one_of("--causal", causal, ("half", "full"))
    _one_of("--dtype", dtype, ("fp32", "tf32", "fp16", "bf16"))
    if autocast and dtype in ("fp32", "tf32"):
        raise UserError(f"--autocast casts to fp16 or bf16, not to {dtype}.")
    if recompute and mode != "train":
        raise UserError("--recompute is for training: nothing else computes layers again.")
    if not 1 <= skew < math.inf:
        raise UserError(f"--skew is {skew:g}: give 1, for all experts alike, or more.")
    share = parse_share(attention, "attention")
    if not share:
        raise UserError("--attention takes a share of the peak above 0%.")
    for file in (csv, markdown):
        if file is not None and not file.parent.is_dir():
            raise UserError(f"{file.parent} is no folder to write {file.name} into.")
    fused = tuple(filter(None, fuse.split(",")))
    for name in fused:
        _one_of("--fuse", name, tuple(FUSIONS))
    how = Runtime(
        runtime, fused, tp, recompute, loss_chunks, optimizer, share, causal == "half", skew
    )
    source = find_source(model, _sizes(arg or []), inputs or [])
    step = Step(mode, batch, seq, tokens, dtype, autocast)
    machines: list[str | None] = [*machine.split(",")] if machine else [None]
    wanted = tuple(filter(None, vary.split(",")))
    more = parse_share(parameters, "parameters")

    def on(*bases: Basis) -> list[Audit]:
        return audit(source, step, how, list(bases), wanted, more)

    if measure:
        if len(machines) > 1:
            raise UserError("--measure times on this machine; leave the others out.")
        request = Request(results=results, device=device, gpu=gpu, budget=parse_seconds(budget))
        found = measured_audit(on, machines[0], request)
    else:
        found = on(*(basis_of(name, results) for name in machines))
    documents = []
    for each in found:
        assumed = each.assumptions
        documents.append(audit_json(each.account, each.levers, mode, assumed, each.basis.source))
        if not json and len(found) == 1:
            print(as_text(each.account, each.levers, assumed))
        note(f"{each.account.machine}: {each.basis.source}.")
    if not json and len(found) > 1:
        print(as_comparison({e.account.machine: (e.account, e.levers) for e in found}))
        print(f"Assumed: {'; '.join(found[0].assumptions)}.")
    if json:
        print_json(documents if len(documents) > 1 else documents[0])
    if csv is not None:
        import pandas as pd

        frames = [products_frame(e.account).assign(machine=e.account.machine) for e in found]
        pd.concat(frames).to_csv(csv, index=False)
    if markdown is not None:
        pages = [
            as_markdown(f"{model} on {e.account.machine}", e.account, e.levers, e.assumptions)
            for e in found
        ]
        markdown.write_text("\n".join(pages), encoding="utf-8")
    if plots is not None:
        from analysis.plots.audit import plot_levers, plot_step

        make_folder(plots)
        plot_step({e.account.machine: e.account for e in found}, f"{model}, {mode}", plots)
        plot_levers({e.account.machine: e.levers for e in found}, f"{model}, {mode}", plots)


def measured_audit(
    on: Callable[[Basis], list[Audit]], machine: str | None, request: Request
) -> list[Audit]:
    """The audit on this machine, its products and the best levers' timed.

    Everything is timed once in shuffled rounds; then what the best lever changes anew, beside what
    it is now, in other processes. The rows become part of the machine's recording.

    Raises:
        UserError: another machine is meant, or this one is too disturbed to say anything.
    """
    from analysis.audit.account import as_problem
    from analysis.commands.confirming import basis_here, usable
    from sweeps.running.confirming import confirm_choices, explore

    basis = basis_here(machine, request)
    (first,) = on(basis)
    problems = [p for row in first.account.rows if (p := as_problem(row.product.work)) is not None]
    problems += [changed for lever in first.levers[:_MEASURED_LEVERS] for _, changed in lever.pairs]
    ways = [(p, basis.library(p)) for p in dict.fromkeys(problems)]
    note(f"Measuring {len(ways)} products …")
    run = explore(request, ways, note, quickly=True)
    (second,) = on(usable(run.folder, request))
    pairs = [
        ((before, basis.library(before)), (after, basis.library(after)))
        for lever in second.levers[:1] if lever.gain.value > 0
        for before, after in lever.pairs[:_CONFIRMED_PAIRS]
    ]  # fmt: skip
    known = {(entry.case.problem, entry.case.implementation) for entry in run.planned}
    pairs = [pair for pair in pairs if known >= set(pair)]
    if not pairs:
        note("No lever is better enough to be timed anew.")
        return [second]
    confirm_choices(run, pairs, note)
    return on(usable(run.folder, request))


@dataclass(frozen=True)
class Audit:
    """A model on a machine: what its step takes, and what would change that."""

    account: Account
    levers: list[Lever]
    basis: Basis
    assumptions: tuple[str, ...]


def audit(
    source: Source, step: Step, runtime: Runtime, bases: list[Basis],
    vary: tuple[str, ...] = (), more_parameters: float = 0.01,
) -> list[Audit]:  # fmt: skip
    """An audit for each machine.

    Args:
        source: the model, of :func:`sweeps.capture.sources.find_source`.
        step: what is computed.
        runtime: how it is run.
        bases: what times on each machine rest on, of :func:`analysis.model.basis.find_basis`.
        vary: the only dimensions to vary; all if empty.
        more_parameters: how many more parameters the joint change may have, as a fraction.

    Raises:
        UserError: the model cannot be built, or a machine does not compute its dtype.
    """
    from analysis.audit.account import account_of
    from analysis.audit.levers import find_levers
    from sweeps.capture.capture import capture, dimensions
    from sweeps.capture.captured import with_names

    captured = capture(source, step)
    if not captured.products:
        what = (
            f" but {', '.join(captured.uncounted)}, which is not counted"
            if captured.uncounted
            else ""
        )
        raise UserError(f"{source.name} multiplies nothing{what}, so there is nothing to audit.")
    named = dimensions(source, step, captured, vary)
    captured = with_names(captured, named)
    known: dict[tuple[tuple[str, int], ...], Captured] = {}

    def changed(changes: Mapping[str, int]) -> Captured:
        key = tuple(sorted(changes.items()))
        if key not in known:
            known[key] = capture(source, step, changes)
        return known[key]

    found = []
    for basis in bases:
        account = account_of(captured, runtime, basis)
        levers = find_levers(captured, named, changed, runtime, basis, account, more_parameters)
        assumed = _assumptions(captured, named, step, runtime)
        found.append(Audit(account, levers, basis, assumed))
    return found


def _assumptions(
    captured: Captured, named: list[Dimension], step: Step, runtime: Runtime
) -> tuple[str, ...]:
    """What the figures rest on beside the machine's times."""
    how = "each operation reads and writes memory"
    if runtime.kind == "compile":
        how = (
            "what lies between two products is fused, and Inductor may pad a vocabulary by itself "
            "(`shape_padding`)"
        )
    said = [
        f"{step.mode} in {step.dtype}",
        f"{runtime.kind}: {how}",
    ]
    if step.autocast:
        said.append("parameters in fp32, cast for each product")
    said += runtime.changes(captured)
    if step.mode == "train":
        said.append(f"optimizer {runtime.optimizer}, its state in the parameters' dtype")
    if not named:
        said.append("no dimension was found that changes a product")
    return (*said, *captured.assumptions)


def _sizes(arguments: list[str]) -> dict[str, int]:
    sizes = {}
    for text in arguments:
        name, _, value = text.partition("=")
        if not is_whole(value) or not int(value):
            raise UserError(f"--arg takes a size such as hidden=4096, not {text!r}.")
        sizes[name] = int(value)
    return sizes


def _one_of(option: str, word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise UserError(f"{option} takes {', '.join(known)}, not {word!r}; {nearest(word, known)}")
