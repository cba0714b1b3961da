"""``python -m analysis``: predict, recommend, validate, calibrate, plot, table, compare, …"""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from analysis.load import Recording, find_recording, load, load_run
from analysis.model import Model, Query, explain, model_from_json
from analysis.units import rate
from kernels.cli import (
    ConvOption,
    GemmOption,
    JsonOption,
    new_app,
    note,
    parse_problems,
    print_json,
    run,
)
from kernels.errors import UserError, nearest
from kernels.machine import Machine, known_machines
from kernels.problem import DTYPE_BYTES, Conv, Gemm, Problem
from sweeps.store import RESULTS

app = new_app("What the measurements mean.")

MachineOption = Annotated[
    str | None, typer.Option("--machine", help="Its slug; without it, the one measured last.")
]
ResultsOption = Annotated[Path, typer.Option("--results", help="Folder of all machines' results.")]


def _problems(gemm: list[str] | None, conv: list[str] | None) -> list[Problem]:
    problems = parse_problems(gemm, conv)
    if not problems:
        raise UserError("give at least one --gemm or --conv.")
    return problems


def _model(machine: str | None, results: Path) -> tuple[Model, Path | None]:
    """The model of a machine, from its recording's calibration where there is one."""
    recorded = [path.parent.name for path in results.glob("*/run.json")]
    if machine is None or machine in recorded or f"{machine}-local" in recorded:
        folder = find_recording(machine, results)
        facts = Machine.from_json(load_run(folder)["machine"])
        path = folder / "calibration.json"
        if not path.exists():
            note("This recording is not calibrated yet: predictions use shipped constants.")
            return Model(facts), folder
        try:
            return model_from_json(facts, json_module.loads(path.read_bytes())), folder
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"{path} cannot be read; `python -m analysis calibrate --machine {folder.name}` "
                "writes it again."
            ) from None
    known = known_machines()
    if machine not in known:
        raise UserError(
            f"machine {machine!r} is not known; {nearest(machine, [*known, *recorded])}"
        )
    return Model(known[machine]), None


def _library(model: Model, problem: Problem) -> str:
    """The library that the recording has for such a problem; cublas or cudnn where none has."""
    what = problem.pass_ if isinstance(problem, Conv) else problem.op
    for group in model.fits:
        name, *rest = group.split()
        if rest == [what, problem.dtype] and not name.startswith("triton-"):
            return name
    return "cublas" if problem.op == "gemm" else "cudnn"


@app.command("predict")
def predict_command(
    machine: MachineOption = None,
    gemm: GemmOption = None,
    conv: ConvOption = None,
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Predict times, with the limit and an explanation; for any machine of machines.toml."""
    model, _ = _model(machine, results)
    rows: list[dict[str, Any]] = []
    for problem in _problems(gemm, conv):
        query = Query.plain([problem], _library(model, problem))
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
    """Say what a GEMM should be padded to, or which near size computes most; or to leave it."""
    from analysis.recommend import Measurements, advise, read_measurements

    if pad is not None and choose is not None:
        raise UserError("give --pad or --choose, not both: they are two questions.")
    question = "pad" if choose is None else "choose"
    allowance = parse_share(choose or pad or "12.5%", question)
    model, folder = _model(machine, results)
    measured = Measurements({}) if folder is None else read_measurements(load(folder).ok)
    answers = [
        advise(problem, model, measured, _library(model, problem), allowance, question)
        for problem in _problems(gemm, None)
        if isinstance(problem, Gemm)
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


@app.command("calibrate")
def calibrate_command(
    machine: MachineOption = None, results: ResultsOption = RESULTS, json: JsonOption = False
) -> None:
    """Fit the model to a recording; writes calibration.json and predicted.csv."""
    from analysis.tidy import analyse, write_predictions

    analysis = analyse(_load(machine, results))
    write_predictions(analysis)
    if json:
        print_json(analysis.calibration.to_json())
        return
    print("group                          rows  median    mean     p95  on rows not seen")
    for group, fit in analysis.model.fits.items():
        print(f"{group:28} {fit.rows:6} {fit.median:7.1%} {fit.mean:7.1%} {fit.p95:7.1%}")


@app.command("plot")
def plot_command(machine: MachineOption = None, results: ResultsOption = RESULTS) -> None:
    """Draw every plot that the recording has data for."""
    from analysis.plots import write_plots
    from analysis.tidy import analyse

    for path in write_plots(analyse(_load(machine, results))):
        print(path)


@app.command("table")
def table_command(machine: MachineOption = None, results: ResultsOption = RESULTS) -> None:
    """Write the recommendation table as CSV, Markdown and JSON."""
    from analysis.table import build_table, write_table
    from analysis.tidy import analyse

    analysis = analyse(_load(machine, results))
    write_table(analysis, build_table(analysis))
    print(analysis.recording.folder / "recommendations.md")


@app.command("families")
def families_command(
    machine: MachineOption = None, results: ResultsOption = RESULTS, json: JsonOption = False
) -> None:
    """Compare the hand-written kernels with the library, by class of shape."""
    from analysis.families import compare_families, summarise, write_families

    recording = _load(machine, results)
    table = compare_families(recording)
    text = write_families(recording, table)
    if json:
        print_json(summarise(table))
        return
    print(text)


@app.command("compare")
def compare_command(
    old: Annotated[str, typer.Argument(help="Folder of the earlier recording, or its slug.")],
    new: Annotated[str, typer.Argument(help="Folder of the later recording, or its slug.")],
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Compare two recordings of one machine; exits 1 if any case is slower or lost its time."""
    from analysis.compare import compare, text, to_json

    comparison = compare(*(_recording_at(place, results) for place in (old, new)))
    if json:
        print_json(to_json(comparison))
    else:
        print(text(comparison))
    if comparison.counts()["slower"] or len(comparison.lost):
        raise typer.Exit(1)


@app.command("report")
def report_command(machine: MachineOption = None, results: ResultsOption = RESULTS) -> None:
    """Everything: predictions, plots, table, and the five lines that matter most."""
    from analysis.plots import write_plots
    from analysis.report import five_lines
    from analysis.table import build_table, write_table
    from analysis.tidy import analyse, write_predictions

    note("Calibrating the model, drawing plots and looking for better shapes …")
    analysis = analyse(_load(machine, results))
    write_predictions(analysis)
    plots = write_plots(analysis)
    advice = build_table(analysis)
    write_table(analysis, advice)
    folder = analysis.recording.folder
    print()
    for line in five_lines(analysis, advice):
        print(f"  • {line}")
    print(f"\n{len(plots)} plots: {folder / 'plots'}")
    print(f"What to pad: {folder / 'recommendations.md'}")


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
    plots: Annotated[Path | None, typer.Option("--plots", help="Folder to draw plots in.")] = None,
    json: JsonOption = False,
) -> None:
    """Judge the model on measured rows that it has not seen: ours, or others' tables."""
    from analysis.curve import learning_curve, noise_floor
    from analysis.source import read_source
    from analysis.validate import HOLDOUTS, validate
    from analysis.validation import curve_report, report

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
    if json:
        print_json(found.to_json())
        return
    print(report(found) + curve_report(points, floor))


def _load(machine: str | None, results: Path) -> Recording:
    return _read(find_recording(machine, results))


def _read(folder: Path) -> Recording:
    """Load, and say which lines are damaged."""
    recording = load(folder)
    for sentence in recording.damaged:
        note(sentence)
    return recording


def _recording_at(place: str, results: Path) -> Recording:
    """A recording by its folder, or by a machine's slug."""
    folder = Path(place)
    if not (folder / "run.json").exists():
        if folder.is_dir() or "/" in place:
            raise UserError(f"{place} has no run.json; give the folder of a recording.")
        folder = find_recording(place, results)
    return _read(folder)


def parse_share(text: str, option: str = "pad") -> float:
    """Read ``12.5%`` or ``0.125`` as a fraction."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UserError(f"--{option} takes a share such as 12.5% or 0.125, not {text!r}.")
    return share


if __name__ == "__main__":
    run(app, "python -m analysis")
