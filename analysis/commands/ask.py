"""``predict`` and ``recommend``: answer queries about the shapes of operations."""

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
    problems_given,
)
from analysis.units import microseconds, rate
from analysis.words import names_in
from kernels.cli import (
    ConvOption,
    DeviceOption,
    GemmOption,
    GpuOption,
    GpusOption,
    JsonOption,
    note,
    print_json,
)
from kernels.common.errors import UserError
from kernels.common.program import RESULTS
from kernels.problem import TIMED_DTYPES

if TYPE_CHECKING:
    from analysis.advice.recommend import Advice

FileOption = Annotated[
    Path | None,
    typer.Option(
        "--file",
        help="CSV file of shapes, with columns such as m,n,k,dtype, named as in measurements.csv.",
    ),
]


@app.command("predict")
def predict_command(
    machines: Annotated[
        list[str] | None,
        typer.Option(
            "--machine",
            help=(
                "Machine's slug or an unambiguous part of it; repeatable [default: the machine "
                "measured last]."
            ),
        ),
    ] = None,
    gemm: GemmOption = None,
    conv: ConvOption = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            "--attention",
            help=(
                "Attention call as B,S,HEADS,KV_HEADS,HEAD_DIM,dtype[,causal|full|decode]; "
                "repeatable."
            ),
        ),
    ] = None,
    attention_kernel: Annotated[
        str | None,
        typer.Option(
            "--attention-kernel",
            help="Framework that computes attention: vllm, trtllm or sglang [default: unknown].",
        ),
    ] = None,
    file: FileOption = None,
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Predict the time of each shape, and say what limits its speed.

    Works for every machine that the `machines` command lists, measured or not.
    """
    from analysis.advice.attention import attention_row, parse_attention
    from analysis.advice.times import times_of

    # 1. Read the shapes, and find the machines. `problems_given` raises an error if no shape is
    # given, so it is not called if only --attention is given.
    if not (gemm or conv or attention or file):
        raise UserError("no shape is given; add --gemm, --conv, --attention or --file.")
    if attention_kernel and not attention:
        raise UserError(
            "--attention-kernel needs --attention; add --attention, or leave "
            "--attention-kernel out."
        )
    calls = [parse_attention(text) for text in attention or ()]
    problems = problems_given(gemm, conv, file) if gemm or conv or file else []
    chosen: Sequence[str | None] = machines or [None]  # None is the machine measured last
    bases = [basis_of(machine, results) for machine in chosen]
    # 2. Predict all shapes on each machine.
    rows_by_machine = []
    for basis in bases:
        times = times_of(problems, basis) if problems else []
        attention_rows = [attention_row(call, basis, attention_kernel) for call in calls]
        rows_by_machine.append([*times, *attention_rows])
    # In the output, the rows of one shape on all machines are adjacent.
    rows_by_shape = zip(*rows_by_machine, strict=True)
    rows = [row for rows_of_shape in rows_by_shape for row in rows_of_shape]
    # 3. Print the rows, as JSON or as text. With --file, the JSON document is a list even if the
    # file has only one shape.
    if json:
        print_json(rows if len(rows) > 1 or file else rows[0])
        return
    for row in rows:
        prefix = f"{row['machine']}: " if len(bases) > 1 else ""
        measured = "measured " if row["evidence"] == "measured" else ""
        time = microseconds(row["time_us"])
        lo = microseconds(row["lo_us"])
        hi = microseconds(row["hi_us"])
        print(
            f"{prefix}{row['problem']}: {measured}{time} µs ({lo}–{hi} µs), "
            f"{rate(row['tflops'])}\n    {row['explanation']}."
        )
    _note_sources([(row["machine"], row["problem"], row["source"]) for row in rows])


@app.command("recommend")
def recommend_command(
    machine: MachineOption = None,
    gemm: GemmOption = None,
    conv: ConvOption = None,
    pad: Annotated[
        str | None,
        typer.Option(
            "--pad",
            help="Pad query: largest increase in a size and in the FLOPs [default: 12.5%].",
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
    file: FileOption = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help=(
                "Time the best candidates on this machine, then re-time the winners. Without a "
                "shape, candidates for the shapes in this machine's recording are timed."
            ),
        ),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            help=(
                "Time budget, such as 30s, for --measure without a shape [default: the rest of "
                "the sweep's budget]."
            ),
        ),
    ] = None,
    change: Annotated[
        str | None,
        typer.Option(
            "--change", help="Dimensions that may change, such as N or M,K [default: all]."
        ),
    ] = None,
    fix: Annotated[
        str | None,
        typer.Option("--fix", help="Dimensions that must not change, such as K [default: none]."),
    ] = None,
    multiple: Annotated[
        int, typer.Option("--multiple", min=1, help="Number that divides every changed size.")
    ] = 1,
    any_size: Annotated[
        bool,
        typer.Option(
            "--any", help="Allow any size, not only multiples of 8 (or of 4 for sizes below 16)."
        ),
    ] = False,
    device: DeviceOption = "auto",
    gpu: GpuOption = 0,
    gpus: GpusOption = None,
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Recommend faster sizes or another implementation, or no change."""
    from analysis.advice.answers import answers_to
    from analysis.advice.options import question_of
    from analysis.advice.sizes import SizeConstraints

    # 1. Without a shape, --measure times the best candidates for the recording's shapes.
    if measure and not (gemm or conv or file):
        has_limits = bool(pad or choose or change or fix or multiple > 1 or any_size)
        if machine is not None or json or has_limits:
            raise UserError(
                "without a shape, --measure takes only --budget, --device, --gpu, --gpus and "
                "--results; leave the other options out, or add --gemm, --conv or --file."
            )
        from analysis.commands.confirm import measure_best_guesses

        measure_best_guesses(budget, device, gpu, gpus, results)
        return
    if budget or gpus:
        raise UserError(
            "--budget and --gpus are only for --measure without a shape; leave both out."
        )
    # 2. Read the shapes and the limits on how their sizes may change. With --measure, time
    # candidates on this machine; otherwise, find the basis of the answers.
    constraints = SizeConstraints(
        names_in(change, "change"), names_in(fix, "fix"), multiple, any_size
    )
    question = question_of(pad, choose, constraints)
    problems = problems_given(gemm, conv, file)
    if measure:
        if any(problem.dtype not in TIMED_DTYPES for problem in problems):
            raise UserError(
                "fp8 GEMMs cannot be timed yet; leave --measure out or give another dtype."
            )
        from analysis.commands.confirm import measure_questions
        from sweeps.running.request import Request

        request = Request(results=results, device=device, gpu=gpu)
        basis = measure_questions(problems, question, machine, request)
    else:
        basis = basis_of(machine, results)
    # 3. Print the answers, as JSON or as text. With --file, the JSON document is a list even if the
    # file has only one shape.
    answers = answers_to(problems, basis, question)
    if json:
        documents = [answer.to_json() for answer in answers]
        print_json(documents if len(documents) > 1 or file else documents[0])
        return
    _print_answers([answer.advice for answer in answers])
    slug = basis.model.machine.slug
    _note_sources([(slug, answer.advice.problem.spec(), answer.source) for answer in answers])


def _note_sources(answers: Sequence[tuple[str, str, str]]) -> None:
    """Print the sources of answers; each answer is given as (machine, problem, source)."""
    # 1. Collect the problems by machine, then by source. Several machines may answer about the same
    # problem.
    sources_of_machines: dict[str, dict[str, list[str]]] = {}
    for machine, problem, source in answers:
        sources = sources_of_machines.setdefault(machine, {})
        sources.setdefault(source, []).append(problem)
    # 2. Print one note for each machine and source.
    for machine, sources in sources_of_machines.items():
        for source, problems in sources.items():
            subject = machine
            if len(sources) > 1:
                subject += f", {' and '.join(dict.fromkeys(problems))}"
            note(f"{subject}: {source}.")


def _print_answers(answers: Sequence[Advice]) -> None:
    from analysis.advice.verdict import LEAVE_IT, verdict_text

    for answer in answers:
        if answer.verdict == LEAVE_IT:
            print(f"{answer.problem}: leave it ({answer.reason}).")
            continue
        per_flop = " per FLOP" if answer.question == "choose" else ""
        # The advice may also be to use another implementation at the same size.
        if answer.changed:
            action = f"{answer.question} {answer.change} with {answer.implementation}"
        else:
            action = f"keep the size, but use {answer.implementation}"
        print(f"{answer.problem}: {verdict_text(answer.verdict, answer.probability)}: {action}.")
        print(
            f"    Expected gain{per_flop} {answer.gain.value:+.1%} ({answer.gain.lo:+.1%} to "
            f"{answer.gain.hi:+.1%}, {answer.evidence}), FLOPs {answer.extra_flops:+.2%}."
        )
        print(f"    Why: {answer.reason}.")
