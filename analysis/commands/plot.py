"""``plot``: draw the plots of a recording, or the lesson about waves for one N and K."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from analysis.commands.app import MachineOption, ResultsOption, analyse_machine, app, basis_of
from kernels.cli import JsonOption, note, print_json
from kernels.common.checks import check_option
from kernels.common.errors import UserError, nearest
from kernels.common.program import RESULTS
from kernels.problem import Gemm

if TYPE_CHECKING:
    import pandas as pd

    from analysis.model.basis import Basis

_WAVE = "wave"
_FORMATS = ("png", "svg", "pdf")
_LISTED = 10


@app.command("plot")
def plot_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help=(
                "Plots to draw, such as roofline [default: all]; "
                "or wave, which draws one class of shapes."
            )
        ),
    ] = None,
    machine: MachineOption = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Draw only this dtype.")] = None,
    sweep: Annotated[str | None, typer.Option("--sweep", help="Draw only this sweep.")] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help=("File format: png, svg or pdf; repeatable.")),
    ] = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="For wave: N of the class.")] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="For wave: K of the class.")] = None,
    m: Annotated[
        int | None, typer.Option("--m", min=1, help="For wave: M before the cliff.")
    ] = None,
    find: Annotated[
        bool, typer.Option("--find", help="For wave: list the largest cliffs to choose from.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="For wave: folder for the plot.")
    ] = None,
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Draw the plots that a recording has data for.

    Names select some of them. `wave` draws a lesson about waves, for one N and K.
    """
    kinds = tuple(formats or ("png", "svg"))
    for kind in kinds:
        check_option("--format", kind, _FORMATS)
    if _WAVE in (names or []) and names != [_WAVE]:
        raise UserError("wave is drawn by itself; leave the other names out.")
    has_size = bool(n or k or m)
    if names == [_WAVE]:
        is_contradictory = (find and has_size) or (json and not find)
        if sweep is not None or is_contradictory:
            raise UserError("`plot wave` takes --n and --k, or --find; --json goes with --find.")
        basis = basis_of(machine, results)
        if find:
            _print_steps(basis, dtype or "bf16", results, json)
            return
        if n is None or k is None:
            raise UserError(
                "`plot wave` needs --n and --k. Run `plot wave --find` to list the pairs with "
                "large cliffs."
            )
        print(_draw_lesson(basis, Gemm(1, n, k, dtype or "bf16"), m, kinds, output, results))
        return
    if find or has_size or output or json:
        raise UserError("--n, --k, --m, --find, --output and --json are for `plot wave`.")
    _draw_recording(names or [], machine, dtype, sweep, kinds, results)


def _draw_recording(
    names: list[str],
    machine: str | None,
    dtype: str | None,
    sweep: str | None,
    kinds: tuple[str, ...],
    results: Path,
) -> None:
    """Draw the named plots of a recording, or all, and print their files.

    Raises:
        UserError: if a name, dtype or sweep is not known, or nothing can be drawn.
    """
    from analysis.plots import PLOTS, write_plots

    for name in names:
        if name not in PLOTS:
            raise UserError(f"plot {name!r} is not known; {nearest(name, [*PLOTS, _WAVE])}")
    analysis = analyse_machine(machine, results)
    table = analysis.table
    for column, value in (("dtype", dtype), ("sweep", sweep)):
        if value is not None:
            check_option(f"--{column}", value, sorted(set(analysis.table[column])))
            table = table[table[column] == value]
    if table.empty:  # the table has both values, but no case has both
        raise UserError(f"{sweep} has no case in {dtype}.")
    written = write_plots(replace(analysis, table=table), names, kinds)
    if not written:
        raise UserError(f"{analysis.recording.folder} has no data for {', '.join(names or PLOTS)}.")
    for path in written:
        print(path)


def _draw_lesson(
    basis: Basis,
    gemm: Gemm,
    size: int | None,
    kinds: tuple[str, ...],
    output: Path | None,
    results: Path,
) -> Path:
    """Draw the lesson about waves for a class of GEMMs; return the first file.

    Args:
        basis: basis of the predictions.
        gemm: the class; its M is not used.
        size: the M before the cliff; the largest cliff if None.
        kinds: file formats.
        output: folder for the files; None for the folder of the recording's plots.
        results: folder of all machines' results.

    Raises:
        UserError: if the size, or the size next to it, was not measured.
    """
    from analysis.plots.style import save
    from analysis.plots.wave import draw_wave, lesson

    rows = _rows(basis, gemm.dtype)
    line = rows[(rows["n"] == gemm.n) & (rows["k"] == gemm.k)]
    if size is not None and size not in set(line["m"]):
        raise UserError(f"M {size} was not measured with N {gemm.n} and K {gemm.k}.")
    if line.empty:
        note("Nothing of this class was measured: the plot shows only predictions.")
    if size is not None and lesson(line, size) is None:
        raise UserError(f"no size next to M {size} was measured with N {gemm.n} and K {gemm.k}.")
    figure = draw_wave(basis, gemm, line, size)
    slug = basis.model.machine.slug
    folder = output or (basis.folder or results / slug) / "plots"
    caption = f"{basis.model.machine.name}  ·  {basis.source}"
    name = f"wave-{slug}-n{gemm.n}-k{gemm.k}-{gemm.dtype}"
    return save(figure, caption, folder, name, kinds)


def _print_steps(basis: Basis, dtype: str, results: Path, json: bool) -> None:
    """Print the largest cliffs along M, up and down.

    If there is another collection of the machine, only cliffs that it repeats are printed.
    """
    from analysis.recordings.imported import folder_of, read_collections
    from analysis.slices.cliffs import largest, repeated_steps, steps_of

    # 1. Find the cliffs, and those that other collections repeat.
    rows = _rows(basis, dtype)
    if rows.empty:
        raise UserError(
            f"there are no {dtype} GEMM measurements for {basis.model.machine.slug}; give another "
            "--dtype, or measure some first."
        )
    steps = steps_of(rows)
    others = read_collections(folder_of(results, basis.model.machine.slug))
    if basis.kind == "public":  # the first collection is the one that the rows come from
        others = dict(list(others.items())[1:])
    count = len(steps)
    if others:
        steps = repeated_steps(steps, others)
    ups, downs = largest(steps, _LISTED)
    # 2. Print them, as JSON or as text.
    if json:
        columns = ["m", "after", "n", "k", "dtype", "time_us", "after_us", "ratio"]
        columns += ["again", "by"] if others else []
        print_json({"up": _records(ups[columns]), "down": _records(downs[columns])})
        return
    for title, cliffs in (("slower", ups), ("faster", downs)):
        print(f"One more row, {title}:")
        for row in cliffs.to_dict("records"):
            again = f"; {row['again']:.2f}× according to {row['by']}" if others else ""
            print(
                f"  M {row['m']} → {row['after']}, N {row['n']}, K {row['k']}: "
                f"{row['time_us']:.4g} → {row['after_us']:.4g} µs, {row['ratio']:.2f}×{again}"
            )
    repeated = f", {len(steps):,} of them repeated by another collection" if others else ""
    note(f"{count:,} pairs of neighbouring sizes{repeated}. {basis.source}.")


def _records(frame: pd.DataFrame) -> Any:
    """Return the rows for JSON, with Python's numbers instead of NumPy's."""
    return frame.astype(object).to_dict("records")


def _rows(basis: Basis, dtype: str) -> pd.DataFrame:
    """Return the measured plain GEMMs of the vendor library in a dtype; empty if there are none."""
    from analysis.recordings.load import bursts, library_rows
    from analysis.recordings.repetition import with_steady_times
    from analysis.recordings.runs import load_runs

    if basis.folder is None:
        import pandas as pd

        return pd.DataFrame(columns=["m", "n", "k", "time_us"])
    recording = load_runs(basis.folder)
    rows = bursts(library_rows(recording.products), recording.cache)
    is_plain = (rows["op"] == "gemm") & (rows["layout"] == "nt") & (rows["batch"] == 1)
    rows = rows[is_plain & (rows["dtype"] == dtype)]
    # A public table has one time per case, without rounds to correct for.
    return rows if recording.public else with_steady_times(rows, recording)
