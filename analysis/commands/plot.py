"""``plot``: draw the plots of a recording, or the wave plot of one N and K."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from analysis.commands.app import MachineOption, ResultsOption, analyse_machine, app, basis_of
from analysis.units import microseconds
from kernels.cli import JsonOption, note, print_json
from kernels.common.checks import check_option
from kernels.common.counts import counted
from kernels.common.errors import UserError, nearest
from kernels.common.program import RESULTS
from kernels.problem import Gemm

if TYPE_CHECKING:
    import pandas as pd

    from analysis.model.basis import Basis

_WAVE = "wave"
_FORMATS = ("png", "svg", "pdf")
_LISTED = 10  # maximum number of cliffs that --find lists under each heading


@app.command("plot")
def plot_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help=(
                "Names of plots, such as roofline [default: all], or wave to plot time against M "
                "for one N and K."
            )
        ),
    ] = None,
    machine: MachineOption = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Dtype to draw [default: all; bf16 for the wave plot]."),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option("--sweep", help="Sweep to draw, such as square [default: all].")
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format", help="File format: png, svg or pdf; repeatable [default: png and svg]."
        ),
    ] = None,
    n: Annotated[
        int | None, typer.Option("--n", min=1, help="N of the GEMMs in the wave plot.")
    ] = None,
    k: Annotated[
        int | None, typer.Option("--k", min=1, help="K of the GEMMs in the wave plot.")
    ] = None,
    m: Annotated[
        int | None,
        typer.Option(
            "--m",
            min=1,
            help=(
                "M just before the cliff to show in the wave plot [default: the M before the "
                "largest cliff]."
            ),
        ),
    ] = None,
    find: Annotated[
        bool,
        typer.Option(
            "--find", help="List the largest cliffs that the wave plot can show, with N and K."
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Folder for the wave plot [default: plots/ in the machine's folder].",
        ),
    ] = None,
    results: ResultsOption = RESULTS,
    json: JsonOption = False,
) -> None:
    """Draw the plots that a recording has data for.

    If names are given, draw only the named plots. The plot `wave` explains wave quantisation for
    one N and K.
    """
    # 1. Check the options that the wave plot and the plots of a recording have in common.
    file_formats = tuple(formats or ("png", "svg"))
    for file_format in file_formats:
        check_option("--format", file_format, _FORMATS)
    names = list(dict.fromkeys(names or []))
    if _WAVE in names and names != [_WAVE]:
        raise UserError("the plot `wave` is drawn by itself; leave the other names out.")
    has_size = bool(n or k or m)
    # 2. Draw the wave plot, or list the cliffs that it could show.
    if names == [_WAVE]:
        if find and (output or formats):
            raise UserError("`plot wave --find` draws no plot; leave --output and --format out.")
        is_contradictory = (find and has_size) or (json and not find)
        if sweep is not None or is_contradictory:
            raise UserError(
                "`plot wave` takes either --find or --n, --k and --m. Leave --sweep out, and give "
                "--json only with --find."
            )
        basis = basis_of(machine, results)
        if find:
            _print_cliffs(basis, dtype or "bf16", results, json)
            return
        if n is None or k is None:
            raise UserError(
                "`plot wave` needs --n and --k. Run `plot wave --find` to list the values of N and "
                "K with large cliffs."
            )
        gemm = Gemm(1, n, k, dtype or "bf16")  # the plot has every M
        print(_draw_wave_plot(basis, gemm, m, file_formats, output, results))
        return
    # 3. Draw the plots of the recording, which have none of the wave plot's options.
    if find or has_size or output or json:
        raise UserError(
            "--n, --k, --m, --find, --output and --json are only for `plot wave`; leave them out."
        )
    _draw_recording(names, machine, dtype, sweep, file_formats, results)


def _draw_recording(
    names: list[str],
    machine: str | None,
    dtype: str | None,
    sweep: str | None,
    file_formats: tuple[str, ...],
    results: Path,
) -> None:
    """Draw the named plots of a recording, or all plots if none is named; print their paths.

    Plots without enough data are left out.
    """
    from analysis.plots import PLOTS, write_plots

    for name in names:
        if name not in PLOTS:
            raise UserError(f"plot {name!r} is not known; {nearest(name, [*PLOTS, _WAVE])}")
    analysis = analyse_machine(machine, results)
    table = analysis.table
    filters = {"dtype": dtype, "sweep": sweep}
    for column, value in filters.items():
        if value is not None:
            check_option(f"--{column}", value, sorted(set(analysis.table[column])))
            table = table[table[column] == value]
    if table.empty:  # the table has both values, but no case has both
        raise UserError(f"sweep {sweep} has no case in {dtype}; give another --dtype.")
    written = write_plots(replace(analysis, table=table), names, file_formats)
    drawn = {path.stem for path in written}
    lacking = [name for name in names if name not in drawn]
    if lacking or not written:
        given = {column: value for column, value in filters.items() if value is not None}
        sentence = _too_little_data(analysis.recording.folder, lacking, given)
        if not written:
            raise UserError(sentence)
        note(sentence)
    for path in written:
        print(path)


def _too_little_data(folder: Path, names: Sequence[str], filters: Mapping[str, str]) -> str:
    """Return the message for a recording that has too little data for the named plots.

    ``filters`` has the given values of --dtype and --sweep, by the name of the option.
    """
    fault = f"{folder} has too little data for {' or '.join(names) or 'any plot'}"
    other_plots = "name other plots, or " if names else ""
    if not filters:
        return f"{fault}; {other_plots}run more sweeps."
    options = " and ".join(f"--{column} {value}" for column, value in filters.items())
    option_names = " or ".join(f"--{column}" for column in filters)
    return f"{fault} with {options}; {other_plots}leave {option_names} out."


def _draw_wave_plot(
    basis: Basis,
    gemm: Gemm,
    m_before_cliff: int | None,
    file_formats: tuple[str, ...],
    output: Path | None,
    results: Path,
) -> Path:
    """Draw the wave plot of one N and K; return the path of the file in the first format.

    ``gemm`` gives N, K and the dtype; its M is not used. ``m_before_cliff`` is the M just before
    the cliff, or None for the largest cliff.
    """
    from analysis.plots.style import save
    from analysis.plots.wave import cliff_at, draw_wave

    gemms = _plain_gemms(basis, gemm.dtype)
    rows = gemms[(gemms["n"] == gemm.n) & (gemms["k"] == gemm.k)]
    # Several sweeps may have timed the same GEMM. The shortest time is drawn.
    rows = rows.sort_values("time_us", kind="stable").drop_duplicates(["implementation", "m"])
    if m_before_cliff is not None:
        if rows.empty:
            raise UserError(
                f"no {gemm.dtype} GEMM with N {gemm.n} and K {gemm.k} was measured; leave --m out "
                "to plot only predictions."
            )
        if m_before_cliff not in set(rows["m"]):
            raise UserError(
                f"M {m_before_cliff} was not measured with N {gemm.n} and K {gemm.k} in "
                f"{gemm.dtype}; give another --m."
            )
        if cliff_at(rows, m_before_cliff) is None:
            raise UserError(
                f"no M just above {m_before_cliff} was measured with N {gemm.n} and K {gemm.k} in "
                f"{gemm.dtype}; give another --m."
            )
    if rows.empty:
        note(
            f"No {gemm.dtype} GEMM with this N and K was measured, so the plot shows only "
            "predictions."
        )
    figure = draw_wave(basis, gemm, rows, m_before_cliff)
    slug = basis.model.machine.slug
    folder = output or (basis.folder or results / slug) / "plots"
    caption = f"{basis.model.machine.name}  ·  {basis.source}"
    name = f"wave-{slug}-n{gemm.n}-k{gemm.k}-{gemm.dtype}"
    return save(figure, caption, folder, name, file_formats)


def _print_cliffs(basis: Basis, dtype: str, results: Path, json: bool) -> None:
    """Print the largest cliffs: neighbouring values of M between which a GEMM's time jumps.

    If the machine has other public tables, print only cliffs that at least one of these tables
    confirms.
    """
    from analysis.recordings.imported import folder_of, read_collections
    from analysis.slices.cliffs import confirmed_pairs, largest, neighbouring_pairs

    # 1. Find the pairs of neighbouring sizes, and keep those that other collections confirm.
    rows = _plain_gemms(basis, dtype)
    if rows.empty:
        raise UserError(
            f"no unbatched {dtype} GEMMs in layout nt were measured on "
            f"{basis.model.machine.slug}; give another --dtype, or measure some first."
        )
    pairs = neighbouring_pairs(rows)
    others = read_collections(folder_of(results, basis.model.machine.slug))
    # The rows of a public table are the first collection, which cannot confirm itself. If the
    # machine was also measured by Rooftile, the rows come from that recording instead.
    if basis.kind == "public" and not basis.measured:
        others = dict(list(others.items())[1:])
    pair_count = len(pairs)
    if others:
        pairs = confirmed_pairs(pairs, others)
    # 2. Print the largest cliffs among them, as JSON or as text.
    ups, downs = largest(pairs, _LISTED)
    if json:
        columns = ["m", "after", "n", "k", "dtype", "time_us", "after_us", "ratio"]
        if others:
            columns += ["again", "by"]
        print_json({"up": _records(ups[columns]), "down": _records(downs[columns])})
        return
    for title, listed in (("Slower", ups), ("Faster", downs)):
        none = "" if len(listed) else " none"
        print(f"{title} at the next larger M:{none}")
        for row in listed.to_dict("records"):
            confirmation = f"; {row['again']:.2f}× according to {row['by']}" if others else ""
            print(
                f"  M {row['m']} → {row['after']}, N {row['n']}, K {row['k']}: "
                f"{microseconds(row['time_us'])} → {microseconds(row['after_us'])} µs, "
                f"{row['ratio']:.2f}×"
                f"{confirmation}"
            )
    confirmed = ""
    if others:
        number = f"{len(pairs):,}" if len(pairs) else "none"
        confirmed = f", of which other tables confirm {number}"
    source = basis.measured or basis.source
    pairs_text = f"{counted(pair_count, 'pair')} of neighbouring sizes"
    note(f"The measurements have {pairs_text} ({source}){confirmed}.")


def _records(frame: pd.DataFrame) -> list[dict[Any, Any]]:
    """Return the rows of a table for JSON, with Python numbers instead of NumPy numbers."""
    return frame.astype(object).to_dict("records")


def _plain_gemms(basis: Basis, dtype: str) -> pd.DataFrame:
    """Return the unbatched GEMMs in layout nt that were measured in a dtype.

    Cases of hand-written kernels and cases with unusual settings, such as another cache state, are
    left out.
    """
    from analysis.recordings.load import bursts, library_rows
    from analysis.recordings.repetition import with_steady_times
    from analysis.recordings.runs import load_runs

    if basis.folder is None:
        import pandas as pd

        return pd.DataFrame(columns=["m", "n", "k", "implementation", "time_us"])
    recording = load_runs(basis.folder)
    rows = bursts(library_rows(recording.products), recording.cache)
    is_plain = (rows["op"] == "gemm") & (rows["layout"] == "nt") & (rows["batch"] == 1)
    rows = rows[is_plain & (rows["dtype"] == dtype)]
    # A public table has one time per case, without rounds to correct for.
    return rows if recording.public else with_steady_times(rows, recording)
