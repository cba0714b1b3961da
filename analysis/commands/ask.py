"""Questions about a problem: predict and recommend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.commands.app import (
    MachineOption,
    ResultsOption,
    app,
    basis_of,
    parse_share,
    problems,
)
from analysis.units import rate
from kernels.cli import ConvOption, GemmOption, JsonOption, note, print_json
from kernels.errors import UserError
from sweeps.store import RESULTS

if TYPE_CHECKING:
    from analysis.advice.recommend import Advice

FileOption = Annotated[
    Path | None,
    typer.Option("--file", help="A CSV of problems: m,n,k,dtype, or more of our columns."),
]


@app.command("predict")
def predict_command(
    machines: Annotated[
        list[str] | None,
        typer.Option("--machine", help="Its slug, also several; else the one measured last."),
    ] = None,
    gemm: GemmOption = None,
    conv: ConvOption = None,
    file: FileOption = None,
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Say what problems take, with the limit and the reason; for any machine of machines.toml."""
    from analysis.advice.times import times_of

    asked = problems(gemm, conv, file)
    wanted: Sequence[str | None] = machines or [None]
    columns = [times_of(asked, basis_of(machine, results)) for machine in wanted]
    rows = [row for beside in zip(*columns, strict=True) for row in beside]
    if json:
        print_json(rows if len(rows) > 1 or file else rows[0])
        return
    for row in rows:
        where = f"{row['machine']}: " if len(columns) > 1 else ""
        measured = "measured " if row["evidence"] == "measured" else ""
        print(
            f"{where}{row['problem']}: {measured}{row['time_us']:.2f} µs ({row['lo_us']:.2f} to "
            f"{row['hi_us']:.2f}), {rate(row['tflops'])}, {row['explanation']}."
        )
    for machine, source in dict.fromkeys((row["machine"], row["source"]) for row in rows):
        note(f"{machine}: {source}.")


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
    file: FileOption = None,
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Say what sizes should be padded to, or which near ones compute most; or to leave them."""
    from analysis.advice.recommend import advise
    from analysis.advice.times import measurements_near

    if pad is not None and choose is not None:
        raise UserError("give --pad or --choose, not both: they are two questions.")
    question = "pad" if choose is None else "choose"
    allowance = parse_share(choose or pad or "12.5%", question)
    asked = problems(gemm, conv, file)
    basis = basis_of(machine, results)
    # Padded by a share in each size, or smaller by it.
    measured = measurements_near(basis, asked, 1 / max(1 - allowance, 1e-9))
    answers = [
        advise(problem, basis.model, measured, basis.library(problem), allowance, question)
        for problem in asked
    ]
    if json:
        documents = [
            {**answer.to_json(), **dict(zip(("basis", "source"), basis.of(problem), strict=True))}
            for answer, problem in zip(answers, asked, strict=True)
        ]
        print_json(documents if len(documents) > 1 or file else documents[0])
        return
    _print_answers(answers)
    for source in dict.fromkeys(basis.of(problem)[1] for problem in asked):
        note(f"{basis.model.machine.slug}: {source}.")


def _print_answers(answers: Sequence[Advice]) -> None:
    for answer in answers:
        if answer.verdict == "leave it":
            print(f"{answer.problem}: leave it ({answer.reason}).")
            continue
        gain, lo, hi = answer.gain_with_interval
        what = "gain" if answer.question == "pad" else "gain per FLOP"
        print(
            f"{answer.problem}: {answer.question} {answer.change} with {answer.implementation}; "
            f"{answer.evidence} {what} {gain:.1%} ({lo:.1%} to {hi:.1%}), "
            f"{answer.extra_flops:+.1%} FLOPs ({answer.reason})."
        )
