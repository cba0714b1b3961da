"""Questions that write nothing: predict, recommend, validate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from analysis.cli import (
    MachineOption,
    ResultsOption,
    app,
    library_of,
    model_of,
    parse_share,
    problems,
)
from analysis.load import load, load_run
from analysis.model import Query, explain
from analysis.units import rate
from kernels.cli import (
    ConvOption,
    GemmOption,
    JsonOption,
    note,
    print_json,
)
from kernels.errors import UserError, nearest
from kernels.machine import Machine, known_machines
from kernels.problem import DTYPE_BYTES
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
    model, _ = model_of(machine, results)
    rows: list[dict[str, Any]] = []
    for problem in problems(gemm, conv):
        query = Query.plain([problem], library_of(model, problem))
        row = model.predict(query).frame().iloc[0].to_dict()
        row["tflops"] = problem.flops / row["time_us"] / 1e6
        names = ("time_us", "tflops", "limit", "tile", "tiles", "waves", "tail_efficiency",
                 "tile_efficiency", "bytes", "lo_us", "hi_us")  # fmt: skip
        rows.append(
            {"problem": problem.spec(), **{name: row[name] for name in names},
             "explanation": explain(row)}
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
    from analysis.measured import Measurements, read_measurements
    from analysis.recommend import advise

    if pad is not None and choose is not None:
        raise UserError("give --pad or --choose, not both: they are two questions.")
    question = "pad" if choose is None else "choose"
    allowance = parse_share(choose or pad or "12.5%", question)
    model, folder = model_of(machine, results)
    measured = Measurements({}) if folder is None else read_measurements(load(folder).products)
    answers = [
        advise(problem, model, measured, library_of(model, problem), allowance, question)
        for problem in problems(gemm, conv)
    ]
    if json:
        documents = [answer.to_json() for answer in answers]
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
            f"{answer.basis} {what} {gain:.1%} ({lo:.1%} to {hi:.1%}), {answer.extra_flops:+.1%} "
            f"FLOPs ({answer.reason})."
        )


@app.command("validate")
def validate_command(
    file: Path,
    machine: Annotated[str, typer.Option("--machine", help="Whose rows of the file are wanted.")],
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="bf16 if present, else the only one.")
    ] = None,
    calibrate: Annotated[
        int, typer.Option("--calibrate", min=0, help="Rows to calibrate on; 0 for none.")
    ] = 256,
    seed: Annotated[int, typer.Option("--seed", help="Breaks ties among rows.")] = 0,
    holdout: Annotated[
        str,
        typer.Option(
            "--holdout",
            help="rows; levels: M, N and K all unseen; beyond: M above 2304; folds: five, in turn.",
        ),
    ] = "rows",
    algorithm: Annotated[
        str | None,
        typer.Option("--algorithm", help="Only convolutions whose kernels' names say this one."),
    ] = None,
    constants: Annotated[
        str | None, typer.Option("--constants", help="The machine to take constants from.")
    ] = None,
    curve: Annotated[
        bool, typer.Option("--curve", help="Also the learning curve, 32 to 2,048 rows; minutes.")
    ] = False,
    again: Annotated[
        Path | None, typer.Option("--again", help="The same grid measured again: the noise floor.")
    ] = None,
    advice: Annotated[
        bool, typer.Option("--advice", help="Also what following the advice is worth there.")
    ] = False,
    plots: Annotated[Path | None, typer.Option("--plots", help="Folder to draw plots in.")] = None,
    json: JsonOption = False,
) -> None:
    """Judge the model on measured rows that it has not seen: ours, or others' tables."""
    from analysis.curve import learning_curve, noise_floor
    from analysis.source import read_source
    from analysis.validate import HOLDOUTS, validate
    from analysis.validation import curve_report, report, value_report
    from analysis.value import value

    if holdout not in HOLDOUTS:
        raise UserError(f"--holdout takes {' or '.join(HOLDOUTS)}, not {holdout!r}.")
    if dtype is not None and dtype not in DTYPE_BYTES:
        raise UserError(f"--dtype is {dtype!r}; {nearest(dtype, DTYPE_BYTES)}")
    here = known_machines().get(machine)
    if here is None and (file if file.is_dir() else file.parent).joinpath("run.json").exists():
        here = Machine.from_json(
            load_run(file if file.is_dir() else file.parent)["machine"]
        )  # a machine of its own, which no table has
    if here is None:
        raise UserError(f"machine {machine!r} is not known; {nearest(machine, known_machines())}")
    source = read_source(file, here, dtype)
    if algorithm is not None:
        source = source.by_algorithm(algorithm)
    found = validate(source, here, calibrate, seed, holdout, constants)
    points = learning_curve(source, here, seed) if curve else []
    floor = noise_floor(source, read_source(again, here, dtype)) if again else None
    if plots is not None:
        from analysis.plots.validation import write_validation_plots

        for path in write_validation_plots(found, plots, points, floor):
            note(str(path))
    worth = value(found) if advice else None
    if json:
        extra = {} if worth is None else {"advice": worth.to_json()}
        print_json({**found.to_json(), **extra})
        return
    print(report(found) + curve_report(points, floor) + (value_report(worth) if worth else ""))
