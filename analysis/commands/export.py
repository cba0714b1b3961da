"""``export``: write a recording in a format that other programs read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from analysis.commands.app import ResultsOption, app
from kernels.common.errors import UserError, nearest
from kernels.common.program import RESULTS


@app.command("export")
def export_command(
    to: Annotated[
        str,
        typer.Option(
            "--to", help="Format of the file: pytest-benchmark, csv, parquet or xla-perf-table."
        ),
    ],
    place: Annotated[
        str | None,
        typer.Argument(
            help="Folder of a recording, or a machine's slug [default: the machine measured last]."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help=(
                "File to write, or - for stdout [default: the machine's slug and the format's "
                "file extension, in the current folder]."
            ),
        ),
    ] = None,
    results: ResultsOption = RESULTS,
) -> None:
    """Write a recording in a format that other programs read.

    An xla-perf-table has the FLOP/s of 16-bit GEMMs. The other formats have all columns and the
    recorded samples of each case.
    """
    from analysis.exports.formats import FORMATS
    from analysis.recordings.load import load, recording_folder
    from sweeps.store import write_whole

    if to not in FORMATS:
        raise UserError(f"--to is {to!r}; {nearest(to, FORMATS)}")
    recording = load(recording_folder(place, results))
    if recording.ok.empty:
        raise UserError(f"{recording.folder} has no case with a time. Run its sweeps again.")
    extension, write = FORMATS[to]
    content = write(recording)
    if str(output) == "-":
        sys.stdout.buffer.write(content)
        return
    path = output or Path(f"{recording.machine.slug}.{extension}")
    if (path.exists() and not path.is_file()) or not path.parent.is_dir():
        raise UserError(f"{path} cannot be written; name a file in an existing folder with -o.")
    write_whole(path, content)
    print(path)
