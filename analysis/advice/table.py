"""Build the recommendation table of a recording, and write it as CSV, Markdown and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from analysis.advice.findings import findings_lines
from analysis.advice.headlines import health_of
from analysis.advice.measurements import Measurements, read_measurements, rows_near
from analysis.advice.options import Question, options_of_each
from analysis.advice.recommend import Advice, advise_all
from analysis.advice.trials import Trial, trial_among
from analysis.advice.verdict import DO_IT, LEAVE_IT, LIKELY, MIN_GAIN, verdict_text
from analysis.markdown import plain, table_row
from analysis.model.basis import for_any_framework
from analysis.model.fitted import MOST_ROWS, Analysis
from analysis.recordings.confirmed import confirmed_pairs
from analysis.recordings.load import Recording, library_rows, problems_of
from analysis.recordings.runs import health_reasons
from analysis.recordings.write import write_records
from kernels.common.counts import counted
from kernels.config import HAND_WRITTEN
from kernels.problem import Gemm, Problem
from sweeps.cases.case import CONFIRM
from sweeps.schema import IDENTITY
from sweeps.store import write_whole

QUESTIONS = (Question("pad", 0.125), Question("choose", 0.15))
"""Queries that are answered for every problem of the table."""

_QUESTION_TEXT = {
    "pad": "I need at least this size. What should I pad it to?",
    "choose": "I may pick a size within ±15%. Which one computes the most per second?",
}
_SIZES_CONSIDERED = {"pad": "Larger sizes", "choose": "Other sizes"}
_LIMITED_CHANGE = {"pad": "grow", "choose": "change"}
_GAINS = {
    "pad": "A gain of 12% means that the padded shape takes 1/1.12 of the original shape's time, "
    "although it computes more.",
    "choose": "A gain of 12% means that the chosen shape computes 12% more per second.",
}
_LEGEND = (
    "Square brackets contain the 95% interval of a measured gain, or the 90% interval of a "
    "predicted gain. The expected gain after costs is the gain minus a tenth of the additional "
    "FLOPs.\n\n"
    "- *do it*: the gain was measured in new samples after the change was chosen. The whole "
    "interval of the gain and the expected gain after costs are at least 1%.\n"
    "- *likely*: the change brings a gain with the stated probability, which is at least 80%, and "
    "the expected gain after costs is at least 1%."
)
_MAX_LISTED = 40  # maximum number of changes in one table of the Markdown page
_SHAPE = list(IDENTITY[IDENTITY.index("op") : IDENTITY.index("layout") + 1])  # columns of a shape
_MOST = 2500  # problems; up to this many, the table has answers about all of them
_DRAWN = 500  # problems in the random sample that the table answers if there are more than _MOST
_REACH = 1.2  # largest ratio of a recommended size to the original size, or the reverse


def build_table(analysis: Analysis) -> list[Advice]:
    """Return advice on the problems of a recording, for each query in :data:`QUESTIONS`.

    If there are thousands of problems, as in a public table, only a sample and the re-timed
    problems get advice. The result is empty if the recording is unusable.

    Raises:
        UserError: if a rounds.csv or the confirmed.csv of the recording cannot be used.
    """
    recording, model = analysis.recording, analysis.model
    if recording.unusable:
        return []
    # The user's framework may differ from that of a public table.
    if recording.is_public_table:
        model = for_any_framework(model)
    measured = _table_measurements(recording)
    problems = _problems_to_answer(recording, measured)
    return [
        answer
        for question in QUESTIONS
        for answer in advise_all(problems, model, measured, question)
    ]


def open_trials(analysis: Analysis, count: int) -> list[Trial]:
    """Return a trial for each query that has a candidate with a worthwhile expected gain.

    A query is left out if another size was already re-timed for it. A trial has the best ``count``
    candidates, and the best two that were already measured.

    Raises:
        UserError: if a rounds.csv or the confirmed.csv of the recording cannot be used.
    """
    recording, model = analysis.recording, analysis.model
    measured = _table_measurements(recording)
    problems = _problems_to_answer(recording, measured)
    trials = []
    for question in QUESTIONS:
        options_of_problems = options_of_each(problems, model, measured, question)
        for library, (options, frame) in zip(problems.values(), options_of_problems, strict=True):
            trial = trial_among(options, frame, model, measured, library, question, count)
            if trial is not None and trial.promise >= MIN_GAIN:
                trials.append(trial)
    return trials


def _table_measurements(recording: Recording) -> Measurements:
    """Return the measured times of a recording.

    If a recording has more than :data:`MOST_ROWS` rows, only the times of shapes near the table's
    problems are read.
    """
    rows = recording.products
    if len(rows) > MOST_ROWS:
        problems = problems_of(_sample_rows(recording))
        for pair in confirmed_pairs(recording):
            before, _ = pair.before
            after, _ = pair.after
            problems += [before, after]
        rows = rows_near(rows, problems, _REACH, always=True)
    return read_measurements(rows, recording)


def _sample_rows(recording: Recording) -> pd.DataFrame:
    """Return one row for each problem in a fixed random sample from :func:`_table_rows`."""
    shapes = _table_rows(recording).drop_duplicates(_SHAPE)
    drawn = np.random.default_rng(0).permutation(len(shapes))[:_DRAWN]
    return shapes.iloc[np.sort(drawn)]


def _library_problems(recording: Recording) -> dict[Problem, str]:
    """Map each problem in the rows of :func:`_table_rows` to a vendor library that computed it."""
    measured = read_measurements(_table_rows(recording), recording)
    return _with_libraries(measured.problems, measured)


def _with_libraries(problems: Iterable[Problem], measured: Measurements) -> dict[Problem, str]:
    """Map each problem to a vendor library that computed it; leave out problems without one."""
    libraries = {}
    for problem in problems:
        implementations = measured.times_of(problem)
        library = next((name for name in implementations if name not in HAND_WRITTEN), None)
        if library is not None:
            libraries[problem] = library
    return libraries


def _table_rows(recording: Recording) -> pd.DataFrame:
    """Return the rows of vendor libraries, except the rows of cases that were timed for advice."""
    rows = library_rows(recording.products)
    return rows[rows["sweep"] != CONFIRM]


def _problems_to_answer(recording: Recording, measured: Measurements) -> dict[Problem, str]:
    """Return the problems that the table gives advice on, mapped to their vendor libraries.

    A large recording is reduced to its re-timed problems and a random sample. The sample does not
    depend on any measured time.
    """
    if len(recording.products) > MOST_ROWS:
        rows = _sample_rows(recording)
        sampled = dict(zip(problems_of(rows), rows["implementation"], strict=True))
        return sampled | _with_libraries(measured.retimed, measured)
    problems = _library_problems(recording)
    if len(problems) <= _MOST:
        return problems
    drawn = np.random.default_rng(0).permutation(len(problems))[:_DRAWN]
    drawn_positions = set(drawn.tolist())
    retimed = measured.retimed
    return {
        problem: library
        for position, (problem, library) in enumerate(problems.items())
        if position in drawn_positions or problem in retimed
    }


def write_table(analysis: Analysis, advice: Sequence[Advice]) -> None:
    """Write all advice as CSV and JSON, and a summary with the recommended changes as Markdown."""
    folder = analysis.recording.folder
    write_records(folder, "recommendations", [answer.to_json() for answer in advice])
    write_whole(folder / "recommendations.md", recommendations_markdown(analysis, advice))


def recommendations_markdown(analysis: Analysis, advice: Sequence[Advice]) -> str:
    """Return the text of recommendations.md: a list of changes, and counts of all verdicts."""
    # 1. Introduce the recording with the caption of its plots, whose parts are separated by dots.
    caption = plain(analysis.recording.caption()).replace("  ·  ", ", ")
    lines = [
        f"# Which shapes to use on {plain(analysis.recording.machine.name)}",
        "",
        f"{caption}.",
        "",
    ]
    for text in health_of(analysis):
        lines += [plain(text), ""]
    steady = _steadiness(analysis.recording)
    if analysis.recording.unusable:
        return "\n".join(
            [
                *lines,
                "These times do not support any advice. Run the sweep again on a quieter machine.",
                "",
                *steady,
            ]
        )
    # 2. Summarise the advice, then list the changes that each query recommends.
    lines += [*findings_lines(advice), "", _LEGEND, ""]
    shape_count = len(_table_rows(analysis.recording).drop_duplicates(_SHAPE))
    is_large = shape_count > _MOST or len(analysis.recording.products) > MOST_ROWS
    for question in QUESTIONS:
        answers = [answer for answer in advice if answer.question == question.kind]
        verdict_counts = Counter(answer.verdict for answer in answers)
        is_sample = is_large and len(answers) < shape_count
        sample = " (the re-timed ones, and others drawn at random)" if is_sample else ""
        lines += [
            f"## {question.kind.capitalize()}: {_QUESTION_TEXT[question.kind]}",
            "",
            f"{_SIZES_CONSIDERED[question.kind]} were considered for {len(answers):,} of "
            f"{counted(shape_count, 'measured shape')}{sample}. Neither a size nor the FLOPs may "
            f"{_LIMITED_CHANGE[question.kind]} by more than {question.allowance:.1%}. "
            f"Verdicts: {verdict_counts[DO_IT]:,} *do it*, {verdict_counts[LIKELY]:,} *likely*, "
            f"{verdict_counts[LEAVE_IT]:,} *leave it*. {_GAINS[question.kind]}",
            "",
        ]
        for op in ("gemm", "conv"):
            changes = [
                answer
                for answer in answers
                if answer.verdict != LEAVE_IT and answer.problem.op == op
            ]
            lines += _folded(_markdown_table(changes), len(changes))
    return "\n".join([*lines, *steady])


def _steadiness(recording: Recording) -> list[str]:
    """Return the lines of a section on what made a run noisy or unusable; [] for a quiet run."""
    reasons = health_reasons(recording)
    if not reasons:
        return []
    return ["## How steady the machine was", "", *(f"- {plain(text)}" for text in reasons), ""]


def _folded(rows: Sequence[str], count: int) -> list[str]:
    if not rows:
        return []
    summary = f"<summary>{counted(count, 'recommended change')}</summary>"
    return [f"<details>{summary}", "", *rows, "</details>", ""]


def _markdown_table(changes: Sequence[Advice]) -> list[str]:
    """Format changes as a Markdown table of at most 40 rows."""
    if not changes:
        return []
    shape = "shape (M×N×K)" if isinstance(changes[0].problem, Gemm) else "convolution"
    lines = [
        f"| {shape} | verdict | {changes[0].question} | meaning | measured gain "
        "| predicted gain | more FLOPs | more bytes | implementation | why |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *map(_row, changes[:_MAX_LISTED]),
        "",
    ]
    if len(changes) > _MAX_LISTED:
        more = counted(len(changes) - _MAX_LISTED, "more is", "more are")
        lines += [f"{more} in recommendations.csv.", ""]
    return lines


def _row(answer: Advice) -> str:
    cells = [
        str(answer.problem),
        f"{verdict_text(answer.verdict, answer.probability)}, {answer.evidence}",
        answer.change or "unchanged size",
        answer.roles,
        _gain_text(answer.measured_gain, answer.measured_lo, answer.measured_hi),
        _gain_text(answer.predicted_gain, answer.predicted_lo, answer.predicted_hi),
        f"{answer.extra_flops:+.1%}",
        f"{answer.extra_bytes:+.1%}",
        answer.implementation,
        answer.reason,
    ]
    return table_row(cells)


def _gain_text(gain: float | None, lo: float | None, hi: float | None) -> str:
    """Format a gain and its interval as ``+12.0% [+8.1%, +15.9%]``, or None as a dash."""
    if gain is None or lo is None or hi is None:
        return "–"
    # Adding 0.0 turns -0.0 into 0.0, so that no number is printed as -0.0%.
    gain = round(gain, 3) + 0.0
    lo = round(lo, 3) + 0.0
    hi = round(hi, 3) + 0.0
    return f"{gain:+.1%} [{lo:+.1%}, {hi:+.1%}]"
