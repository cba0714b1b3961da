"""``validate``: judge the model on held-out measurements."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.commands.app import app
from kernels.cli import JsonOption, note, print_json
from kernels.common.aliases import slug_meant
from kernels.common.checks import check_option, is_whole
from kernels.common.errors import UserError
from kernels.machine import Machine, known_machine, known_machines
from kernels.problem import DTYPE_BYTES

if TYPE_CHECKING:
    from analysis.model.predict import Model
    from analysis.model.query import Query

# Largest number of shapes that the speed of predictions is measured on.
_TIMED_SHAPES = 20_000

# Value of --prior if calibration starts from constants, without public tables.
_NONE = "none"


@app.command("validate")
def validate_command(
    file: Annotated[
        Path, typer.Argument(help="Folder of a recording, or file with a public table.")
    ],
    machine: Annotated[
        str,
        typer.Option("--machine", help="Slug of the machine whose measurements in FILE are used."),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help=(
                "Dtype of the measurements to judge the model on [default: bf16 if present, else "
                "the only dtype]."
            ),
        ),
    ] = None,
    calibrate: Annotated[
        str,
        typer.Option(
            "--calibrate",
            help=(
                "Number of measurements to calibrate on (0 for none), or all. With --holdout folds "
                "and without --prior, the number has no effect, because all measurements are used."
            ),
        ),
    ] = "256",
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            min=0,
            help="Random seed for choosing the calibration and the held-out measurements.",
        ),
    ] = 0,
    holdout: Annotated[
        str,
        typer.Option(
            "--holdout",
            help=(
                "Choice of the held-out measurements. rows: all that calibration does not use; "
                "with --prior, those of a fifth of the shapes. levels: those that share no M, N or "
                "K with any calibration measurement. beyond: those with M above 2,304; cannot be "
                "combined with --prior. folds: five-fold cross-validation."
            ),
        ),
    ] = "rows",
    algorithm: Annotated[
        str | None,
        typer.Option(
            "--algorithm",
            help=(
                "Convolution algorithm whose measurements in FILE are used, such as implicit-gemm "
                "[default: all]. The kernel names of a measurement show its algorithm."
            ),
        ),
    ] = None,
    constants: Annotated[
        str | None,
        typer.Option(
            "--constants",
            help=(
                "Slug of another machine, whose constants are the calibration's starting point "
                "[default: a machine of the same or the nearest generation]."
            ),
        ),
    ] = None,
    prior: Annotated[
        str,
        typer.Option(
            "--prior",
            help=(
                "Public tables that the calibration starts from: slugs of machines, or files, "
                "separated by commas."
            ),
        ),
    ] = _NONE,
    curve: Annotated[
        bool,
        typer.Option(
            "--curve",
            help=(
                "Add the learning curve from 32 to 2,048 calibration measurements; takes minutes."
            ),
        ),
    ] = False,
    again: Annotated[
        Path | None,
        typer.Option(
            "--again",
            help=(
                "File or folder with repeated measurements of the same cases, for the noise floor "
                "and for --measured."
            ),
        ),
    ] = None,
    advice: Annotated[
        bool,
        typer.Option(
            "--advice", help="Add the measured gain from following the model's advice on sizes."
        ),
    ] = False,
    measured: Annotated[
        str | None,
        typer.Option(
            "--measured",
            help=(
                "Numbers of the model's best candidates to compare, such as 1,2,4. For each "
                "number, add the gain from choosing the fastest of that many candidates by their "
                "times in --again. Needs --advice and --again."
            ),
        ),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option("--plots", help="Folder for plots of the validation [default: no plots]."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Judge the model on held-out measurements of a recording or of a public table."""
    from analysis.imports.public import read_source
    from analysis.model.query import Query
    from analysis.validation.advice_value import judge_advice, judge_measured
    from analysis.validation.holdout import HOLDOUTS, validate
    from analysis.validation.learning_curve import learning_curve, noise_floor
    from analysis.validation.prior_check import named_collections, validate_with_prior
    from analysis.validation.validation_report import advice_text, curve_text, validation_text

    # 1. Check the options.
    check_option("--holdout", holdout, tuple(HOLDOUTS))
    if dtype is not None:
        check_option("--dtype", dtype, tuple(DTYPE_BYTES))
    counts = _parse_candidate_counts(measured)
    if counts and not (advice and again):
        raise UserError(
            "--measured works only together with --advice and --again (repeated measurements); "
            "give all three, or leave --measured out."
        )
    calibration_count = _parse_calibration_count(calibrate)
    if prior != _NONE and constants is not None:
        raise UserError(
            "--prior and --constants cannot be combined, because the tables that --prior names "
            "also set the constants; leave one of the two options out."
        )
    # 2. Read the file, and judge the model that is calibrated on part of its rows.
    judged_machine = _machine_of(file, machine)
    source = read_source(file, judged_machine, dtype)
    if algorithm is not None:
        source = source.by_algorithm(algorithm)
    if prior == _NONE:
        validation = validate(source, judged_machine, calibration_count, seed, holdout, constants)
    else:
        if judged_machine.kind == "cpu":
            raise UserError("--prior works only for GPUs; leave --prior out for a CPU.")
        collections = named_collections(prior, file, judged_machine, source.dtype)
        validation = validate_with_prior(
            source, judged_machine, collections, calibration_count, seed, holdout
        )
    # 3. Compute the optional results (learning curve, noise floor, plots and the value of advice)
    # and the speed of predictions.
    points = learning_curve(source, judged_machine, seed) if curve else []
    repeated = read_source(again, judged_machine, source.dtype) if again else None
    floor = noise_floor(source, repeated) if repeated else None
    if plots is not None:
        from analysis.plots.model_quality import write_validation_plots

        for path in write_validation_plots(validation, plots, points, floor):
            note(str(path))
    advice_value = judge_advice(validation) if advice else None
    measured_values = judge_measured(validation, repeated, counts) if repeated and counts else {}
    tested = validation.tested
    query = Query.with_implementations(tested.problems, tested.implementations, tested.warm)
    rates = _shapes_per_second(validation.model, query)
    # 4. Print everything, as JSON or as text.
    if json:
        document = {**validation.to_json(), "shapes_per_second": rates}
        if curve:
            document["curve"] = [asdict(point) for point in points]
        if floor is not None:
            document["noise_floor"] = asdict(floor)
        if advice_value is not None:
            document["advice"] = advice_value.to_json()
        if advice_value is not None and measured_values:
            document["advice"]["measured"] = {
                str(count): asdict(value) for count, value in measured_values.items()
            }
        print_json(document)
        return
    print(validation_text(validation))
    print(
        f"Shapes predicted per second on one core: {rates['physics']:,.0f} with only the time "
        f"formula, {rates['full']:,.0f} with the whole model."
    )
    text_on_advice = advice_text(advice_value, measured_values) if advice_value else ""
    for text in (curve_text(points, floor), text_on_advice):
        if text:
            print(f"\n{text}")


def _parse_calibration_count(text: str) -> int | None:
    """Parse the number of rows to calibrate on; return None for ``all``."""
    if text == "all":
        return None
    if not is_whole(text):
        raise UserError(f"--calibrate must be a number of measurements or all, not {text!r}.")
    return int(text)


def _parse_candidate_counts(text: str | None) -> list[int]:
    """Parse the numbers of candidates in --measured, such as ``1,2,4``; return [] for None."""
    if text is None:
        return []
    counts = []
    for word in text.split(","):
        if not is_whole(word.strip()) or int(word) == 0:
            raise UserError(
                f"--measured is {text!r}; give one or more whole numbers of at least 1, such as "
                "1,2,4."
            )
        counts.append(int(word))
    return counts


def _machine_of(file: Path, slug: str) -> Machine:
    """Return the machine that a slug names: one from machines.toml, or the recording's machine.

    ``file`` is a recording's folder, a file in such a folder, or a public table.
    """
    from analysis.recordings.load import load_run

    folder = file if file.is_dir() else file.parent
    if not (folder / "run.json").exists():
        return known_machine(slug)
    recorded = Machine.from_json(load_run(folder)["machine"])
    listed = known_machines()
    # The facts in machines.toml have sources, so they are preferred to those in the recording.
    return listed.get(slug_meant(slug, [*listed, recorded.slug]), recorded)


def _shapes_per_second(model: Model, query: Query) -> dict[str, float]:
    """Measure how many shapes per second the model predicts on one core.

    The result has the rate of the time formula without learned corrections (``physics``) and the
    rate of the whole model (``full``). The time for reading shapes into arrays is left out.
    """
    import numpy as np

    from analysis.model.corrected import corrected_estimate
    from analysis.model.features import Inputs

    # Only the shapes of one group are timed, because each group has a fit of its own.
    group = str(query.groups()[0])
    positions = np.flatnonzero(query.groups() == group)[:_TIMED_SHAPES]
    cases = query.take(positions)
    inputs = Inputs.from_query(model.machine, cases)
    fit = model.fits[group]
    rates = {}
    corrections = {"physics": (None, None), "full": (fit.residual, fit.offsets)}
    for name, (residual, offsets) in corrections.items():
        began = time.perf_counter()
        estimate, spread = corrected_estimate(inputs, fit.constants, residual, offsets)
        # The ends of the interval belong to a prediction, so they are computed and timed, too.
        _lo = estimate.time * np.exp(fit.low * spread)
        _hi = estimate.time * np.exp(fit.high * spread)
        rates[name] = len(cases.problems) / (time.perf_counter() - began)
    return rates
