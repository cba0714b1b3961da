"""``fleet``: find the slow GPUs among GPUs of the same model, and say why they are slow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.commands.app import app
from analysis.words import share_of
from kernels.cli import JsonOption, note, print_json
from kernels.common.program import RESULTS

if TYPE_CHECKING:
    from analysis.fleet.fleet_report import FleetReport


@app.command("fleet")
def fleet_command(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]",
            help="Folder of one recording or of several [default: the results folder].",
        ),
    ] = None,
    margin: Annotated[
        str,
        typer.Option(
            "--margin",
            help=(
                "Margin below the median speed of all GPUs, as a share of the median. A GPU is "
                "slow only if the whole 95% interval of its speed is below the median by more "
                "than this margin."
            ),
        ),
    ] = "5%",
    json: JsonOption = False,
) -> None:
    """Say which GPU of a node or a cluster is slow or throttled, and why.

    Compares the times of the anchors, the few cases that every GPU of a run times. Writes
    fleet.json into each recording, and a plot if several GPUs can be compared. With --json, prints
    one document for a recording, or a list of documents for a folder of recordings.
    """
    from analysis.fleet.anchors import anchor_folders
    from analysis.fleet.fleet_report import report_json, report_text

    place = RESULTS if folder is None else folder
    margin_fraction = share_of(margin, "margin")
    documents = []
    for number, recording in enumerate(anchor_folders(place)):
        report, plot = report_on(recording, margin_fraction)
        documents.append(report_json(report))
        if not json:
            separator = "\n" if number else ""  # an empty line between two reports
            print(f"{separator}{report_text(report)}")
        if plot is not None:
            note(f"The plot is in {plot}")
    if json:
        is_recording = (place / "run.json").exists()
        print_json(documents[0] if is_recording else documents)


def report_on(folder: Path, margin: float) -> tuple[FleetReport, Path | None]:
    """Write the report on a recording, and draw its plot.

    ``margin`` is the option ``--margin`` as a fraction.

    Returns:
        The report, and the path of the plot. The path is None if no GPUs can be compared.

    Raises:
        UserError: if the anchors cannot be read, or a file cannot be written.
    """
    from analysis.fleet.fleet_report import make_report, write_report
    from analysis.plots.fleet import write_fleet_plot

    report = make_report(folder, margin)
    write_report(report)
    return report, write_fleet_plot(report)
