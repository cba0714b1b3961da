"""``explain``: judge a profiler's trace shape by shape, and say what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from analysis.commands.app import ResultsOption, app
from kernels.cli import JsonOption, print_json
from kernels.common.checks import check_folder
from kernels.common.program import RESULTS


@app.command("explain")
def explain_command(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE…",
            help="Traces from PyTorch's profiler (.json or .json.gz), one for each rank of a job.",
        ),
    ],
    machine: Annotated[
        str | None,
        typer.Option(
            "--machine", help="Slug of the machine to compare with [default: the traced machine]."
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            help="Folder with the results of one or more machines, searched before --results.",
        ),
    ] = None,
    pad: Annotated[
        str | None,
        typer.Option(
            "--pad",
            help=(
                "Pad query: largest increase in a size and in the FLOPs [default: 12.5%, or more "
                "if the next multiple of 8 is farther away]."
            ),
        ),
    ] = None,
    choose: Annotated[
        str | None,
        typer.Option(
            "--choose",
            help=(
                "Choose query: largest change in a size and in the FLOPs, up or down, such as 15%."
            ),
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="CSV file to write, with one row per operation.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Markdown file to write for a pull request.")
    ] = None,
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Say what is slow in a profiler's trace, and what to change.

    Compares the time of each GEMM, convolution and attention call with the time that its shape
    should take on the machine, and names sizes that would be faster.
    """
    from analysis.advice.options import question_of
    from analysis.advice.sizes import ANY_DIMENSION
    from analysis.explain.explain import explain_traces
    from analysis.explain.explain_report import TraceExplanation

    for file in (csv, markdown):
        if file is not None:
            check_folder(file)
    has_limit = pad is not None or choose is not None
    question = question_of(pad, choose, ANY_DIMENSION) if has_limit else None
    verdict = explain_traces(traces, machine, results, against, question)
    explanation = TraceExplanation(verdict)
    if json:
        print_json(explanation.to_json())
    else:
        print(explanation)
    if csv is not None:
        explanation.operations.to_csv(csv, index=False)
    if markdown is not None:
        markdown.write_text(explanation.markdown(), encoding="utf-8")
