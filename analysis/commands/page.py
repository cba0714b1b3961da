"""``page``: write results as an interactive page for a browser."""

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
from kernels.common.checks import check_folder
from kernels.common.errors import UserError
from kernels.common.program import RESULTS, command, extra

if TYPE_CHECKING:
    from analysis.advice.recommend import Advice
    from analysis.model.fitted import Analysis
    from analysis.page.page_report import PageReport
    from analysis.rules.judge import RuleResult

PAGE = "report.html"
_OLDEST_BOKEH = (3, 6)  # oldest supported version


@app.command("page")
def page_command(
    places: Annotated[
        list[str] | None,
        typer.Argument(
            help=(
                "Folders of recordings, or machines' slugs, to show together [default: the "
                "machine measured last]."
            )
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="HTML file to write [default: report.html in the first recording's folder].",
        ),
    ] = None,
    results: ResultsOption = RESULTS,
) -> None:
    """Write results as one interactive HTML file that needs no network."""
    missing = lacks_page()
    if missing:
        raise UserError(f"the page {missing}.")
    if output is not None:
        check_folder(output)
    from analysis.model.fitted import analyse
    from analysis.recordings.load import recording_folder
    from analysis.recordings.runs import load_runs

    chosen: Sequence[str | None] = places or [None]  # None is the machine measured last
    folders = [recording_folder(place, results) for place in chosen]
    analyses = [analyse(load_runs(folder)) for folder in folders]
    print(write_page(analyses, [None] * len(analyses), output))


def lacks_page() -> str:
    """Return the reason why no page can be written, or an empty string if a page can be written.

    The reason is a predicate whose subject is the page, such as ``needs the extra `page`; …``.
    """
    if importlib.util.find_spec("bokeh") and importlib.util.find_spec("jinja2"):
        major, minor = importlib.metadata.version("bokeh").split(".")[:2]
        if (int(major), int(minor)) >= _OLDEST_BOKEH:
            return ""
    return f"needs the extra `page`; {extra('page')}"


def write_page(
    analyses: Sequence[Analysis], advice: Sequence[list[Advice] | None], output: Path | None = None
) -> Path:
    """Write one page about one or more recordings; return its path.

    Args:
        analyses: one or more recordings, each with its fitted model.
        advice: each recording's recommendation table, or None to compute the table.
        output: the file to write; None for report.html in the first recording's folder.

    Raises:
        UserError: if a file of a recording is damaged, or if the page cannot be written.
    """
    from analysis.advice.table import build_table
    from analysis.page.document import page_html
    from sweeps.store import write_whole

    reports = []
    for analysis, given_advice in zip(analyses, advice, strict=True):
        table = build_table(analysis) if given_advice is None else given_advice
        reports.append(_page_report(analysis, table))
    path = output or analyses[0].recording.folder / PAGE
    write_whole(path, page_html(reports))
    return path


def add_page(analysis: Analysis, advice: list[Advice] | None = None) -> Path | None:
    """Write a recording's page at the end of another command; return the path of the page.

    If the page cannot be written, print a note with the reason and return None. ``advice`` is the
    recommendation table of the recording, or None to compute the table.
    """
    missing = lacks_page()
    if missing:
        note(f"{PAGE} is left out: it {missing}.")
        return None
    try:
        return write_page([analysis], [advice])
    except (UserError, ImportError) as error:  # an ImportError shows an incomplete installation
        note(f"{PAGE} is left out: {error}")
        return None


def renewed_page(folder: Path) -> Path | None:
    """Rewrite a recording's page after its folder changed, and return the page's path.

    Return None if the folder has no measurements.csv, or if the page cannot be written.

    Raises:
        UserError: if the recording cannot be read or analysed.
    """
    from analysis.model.fitted import analyse
    from analysis.recordings.runs import load_runs

    # A folder with only rules has no page. An imported table has no measurements.csv, and its page
    # already shows the verdicts on rules.
    if not (folder / "measurements.csv").exists():
        return None
    return add_page(analyse(load_runs(folder)))


def _page_report(analysis: Analysis, advice: list[Advice]) -> PageReport:
    """Return what a page shows about one recording: analysis, advice, verdicts and profiled steps.

    Verdicts and profiled steps may also be in ``rules/<machine>/``, the folder of the measurements
    by which rules are judged.
    """
    from analysis.page.page_report import PageReport
    from analysis.rules.tensor_cores import read_profiled_steps

    folder = analysis.recording.folder
    rules_folder = folder.parent / "rules" / folder.name
    steps = [*read_profiled_steps(folder), *read_profiled_steps(rules_folder)]
    rules = _read_rules(folder) or _read_rules(rules_folder)
    return PageReport(analysis, advice, rules, steps)


def _read_rules(folder: Path) -> list[RuleResult]:
    """Return the verdicts on rules from a folder's rules.json, or [] if the file does not exist.

    Raises:
        UserError: if the file cannot be read, or if its content is invalid.
    """
    from analysis.rules.judge import RuleResult

    path = folder / "rules.json"
    if not path.exists():
        return []
    try:
        rows = [RuleResult(**row) for row in json.loads(path.read_bytes())]
        has_repeated_ids = len({row.id for row in rows}) < len(rows)
        # Invalid values are reported like text that is not JSON.
        if has_repeated_ids or not all(_is_sound(row) for row in rows):
            raise ValueError
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        rules = f"analysis rules --machine {folder.name}"
        raise UserError(f"{path} cannot be read; run {command(rules)} to rewrite it.") from None
    return rows


def _is_sound(row: RuleResult) -> bool:
    """Return True if every field of a rule's result has a valid value.

    An effect of 0 is valid, because the effect of the rule ``tc-used`` is a share of time.

    Raises:
        OverflowError: if a ratio is an integer that is too large for a float.
    """
    effect_and_interval = [ratio for ratio in (row.effect, row.lo, row.hi) if ratio is not None]
    ratios = list(effect_and_interval)
    if row.predicted is not None:
        ratios.append(row.predicted)
    texts = (row.id, row.statement, row.source, row.verdict, row.reason)
    return (
        all(isinstance(ratio, int | float) and 0 <= float(ratio) < math.inf for ratio in ratios)
        and len(effect_and_interval) in (0, 3)
        and all(isinstance(text, str) for text in texts)
        and isinstance(row.cases, int)
    )
