"""Questions about a problem: predict and recommend."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from analysis.commands.app import (
    MachineOption,
    ResultsOption,
    app,
    basis_of,
    library_of,
    parse_share,
    problems,
)
from analysis.model.predict import explain
from analysis.model.query import Query
from analysis.recordings.load import load
from analysis.units import rate
from kernels.cli import (
    ConvOption,
    GemmOption,
    JsonOption,
    print_json,
)
from kernels.errors import UserError
from sweeps.store import RESULTS


@app.command("predict")
def predict_command(
    machine: MachineOption = None,
    gemm: GemmOption = None,
    conv: ConvOption = None,
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Predict times, with the limit and an explanation; for any machine of machines.toml."""
    basis = basis_of(machine, results)
    model = basis.model
    rows: list[dict[str, Any]] = []
    for problem in problems(gemm, conv):
        query = Query.plain([problem], library_of(model, problem), basis.warm)
        row = model.predict(query).frame().iloc[0].to_dict()
        row["tflops"] = problem.flops / row["time_us"] / 1e6
        names = ("time_us", "tflops", "limit", "tile", "tiles", "waves", "tail_efficiency",
                 "tile_efficiency", "bytes", "lo_us", "hi_us")  # fmt: skip
        rows.append(
            {"problem": problem.spec(), **{name: row[name] for name in names},
             "explanation": explain(row), "basis": basis.kind, "source": basis.source}
        )  # fmt: skip
    if json:
        print_json(rows if len(rows) > 1 else rows[0])
        return
    for row in rows:
        print(
            f"{row['problem']}: {row['time_us']:.2f} µs ({row['lo_us']:.2f} to "
            f"{row['hi_us']:.2f}), {rate(row['tflops'])}, {row['explanation']}."
        )


@app.command("recommend")
def recommend_command(
    machine: MachineOption = None,
    gemm: GemmOption = None,
    conv: ConvOption = None,
    pad: Annotated[
        str | None,
        typer.Option("--pad", help="I need at least this: padding allowed. The default, 12.5%."),
    ] = None,
    choose: Annotated[
        str | None,
        typer.Option("--choose", help="I may pick within this share, such as 15%, either way."),
    ] = None,
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Say what sizes should be padded to, or which near ones compute most; or to leave them."""
    from analysis.advice.measurements import Measurements, read_measurements
    from analysis.advice.recommend import advise

    if pad is not None and choose is not None:
        raise UserError("give --pad or --choose, not both: they are two questions.")
    question = "pad" if choose is None else "choose"
    allowance = parse_share(choose or pad or "12.5%", question)
    basis = basis_of(machine, results)
    model, measured = basis.model, Measurements({})
    if basis.folder is not None:
        recording = load(basis.folder)
        measured = read_measurements(recording.products, recording.cache)
    answers = [
        advise(problem, model, measured, library_of(model, problem), allowance, question)
        for problem in problems(gemm, conv)
    ]
    if json:
        told = {"basis": basis.kind, "source": basis.source}
        documents = [{**answer.to_json(), **told} for answer in answers]
        print_json(documents if len(documents) > 1 else documents[0])
        return
    for answer in answers:
        if answer.verdict == "leave it":
            print(f"{answer.problem}: leave it ({answer.reason}).")
            continue
        measured_too = answer.measured_gain is not None
        gain, lo, hi = (
            (answer.measured_gain, answer.measured_lo, answer.measured_hi)
            if measured_too
            else (answer.predicted_gain, answer.predicted_lo, answer.predicted_hi)
        )
        what = "gain" if question == "pad" else "gain per FLOP"
        print(
            f"{answer.problem}: {question} {answer.change} with {answer.implementation}; "
            f"{answer.evidence} {what} {gain:.1%} ({lo:.1%} to {hi:.1%}), "
            f"{answer.extra_flops:+.1%} FLOPs ({answer.reason})."
        )
