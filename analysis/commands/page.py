"""``page``: results that answer in a browser."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.commands.app import ResultsOption, app
from kernels.cli import note
from kernels.common.errors import UserError
from kernels.common.program import RESULTS, extra

if TYPE_CHECKING:
    from analysis.advice.recommend import Advice
    from analysis.model.fitted import Analysis
    from analysis.page.page_report import PageReport
    from analysis.rules.judge import RuleResult

PAGE = "report.html"
_OLDEST_BOKEH = (3, 6)


@app.command("page")
def page_command(
    places: Annotated[
        list[str] | None,
        typer.Argument(help="Machines or recordings' folders, shown together."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help=("File to write [default: report.html in the recording].")
        ),
    ] = None,
    results: ResultsOption = RESULTS,
) -> None:
    """Write results as one HTML file, which needs no network."""
    lack = lacks_page()
    if lack:
        raise UserError(f"the page {lack}.")
    from analysis.model.fitted import analyse
    from analysis.recordings.load import recording_folder
    from analysis.recordings.runs import load_runs

    named: Sequence[str | None] = places or [None]
    folders = [recording_folder(place, results) for place in named]
    analyses = [analyse(load_runs(folder)) for folder in folders]
    print(write_page(analyses, [None] * len(analyses), output))


def lacks_page() -> str:
    """What the page lacks here, as the end of a sentence; empty for nothing."""
    if importlib.util.find_spec("bokeh") and importlib.util.find_spec("jinja2"):
        major, minor = importlib.metadata.version("bokeh").split(".")[:2]
        if (int(major), int(minor)) >= _OLDEST_BOKEH:
            return ""
    return f"needs the extra `page`: {extra('page')}"


def write_page(
    analyses: Sequence[Analysis], advice: Sequence[list[Advice] | None], output: Path | None = None
) -> Path:
    """Write the page of some recordings; returns the file.

    Args:
        analyses: the recordings.
        advice: of each, where it is known already; else it is looked for.
        output: the file; beside the first recording if None.
    """
    from analysis.advice.table import build_table
    from analysis.page.document import page_html
    from sweeps.store import make_folder, write_whole

    reports = [
        _report(analysis, build_table(analysis) if known is None else known)
        for analysis, known in zip(analyses, advice, strict=True)
    ]
    path = output or analyses[0].recording.folder / PAGE
    make_folder(path.parent)
    write_whole(path, page_html(reports))
    return path


def add_page(analysis: Analysis, advice: list[Advice] | None = None) -> Path | None:
    """The page at the end of another command; without its extra a sentence instead."""
    lack = lacks_page()
    if lack:
        note(f"{PAGE} is left out: it {lack}.")
        return None
    try:
        return write_page([analysis], [advice])
    except (UserError, ImportError) as error:  # a damaged file beside it, half an installation
        note(f"{PAGE} is left out: {error}")
        return None


def renewed_page(folder: Path) -> Path | None:
    """The page of a folder that has something new beside its measurements."""
    from analysis.model.fitted import analyse
    from analysis.recordings.runs import load_runs

    # Rules alone have no page, and an imported table's was written with its rules.
    if not (folder / "measurements.csv").exists():
        return None
    return add_page(analyse(load_runs(folder)))


def _report(analysis: Analysis, advice: list[Advice]) -> PageReport:
    from analysis.page.page_report import PageReport
    from analysis.rules.tensor_cores import read_models

    folder = analysis.recording.folder
    folders = (folder, folder.parent / "rules" / folder.name)
    steps = [step for folder in folders for step in read_models(folder)]
    rules = next((rows for folder in folders if (rows := _rules(folder))), [])
    return PageReport(analysis, advice, rules, steps)


def _rules(folder: Path) -> list[RuleResult]:
    """The verdicts that were written beside a recording; none where there are none.

    Raises:
        UserError: the file is damaged.
    """
    from analysis.rules.judge import RuleResult

    path = folder / "rules.json"
    if not path.exists():
        return []
    try:
        rows = [RuleResult(**row) for row in json.loads(path.read_bytes())]
        for row in rows:
            ends = [value for value in (row.effect, row.lo, row.hi) if value is not None]
            known = [*ends, *([] if row.predicted is None else [row.predicted])]
            texts = (row.id, row.statement, row.source, row.verdict, row.reason)
            if not all(0 < float(value) < math.inf for value in known) or len(ends) in (1, 2):
                raise ValueError
            if not all(isinstance(text, str) for text in texts) or not isinstance(row.cases, int):
                raise ValueError
        if len({row.id for row in rows}) < len(rows):
            raise ValueError
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        raise UserError(f"{path} cannot be read; judge the rules again to rewrite it.") from None
    return rows
