"""The recommendation table of a recording, as CSV, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from analysis.advice.highlights import health_of
from analysis.advice.measurements import read_measurements
from analysis.advice.recommend import Advice, advise_all
from analysis.markdown import plain, table_row
from analysis.model.basis import for_any_software
from analysis.model.fitted import Analysis
from analysis.recordings.load import library_rows
from analysis.recordings.write import write_records
from kernels.problem import Gemm, Problem
from sweeps.store import write_whole

ALLOWANCE = {"pad": 0.125, "choose": 0.15}
"""How far the table looks in each dimension, by question."""

_QUESTION_TEXT = {
    "pad": "I need at least this size: what should I pad to?",
    "choose": "I may pick within ±15 %: which size computes most a second?",
}
_GAINS = {
    "pad": "A gain of 12 % means that the padded one takes 1/1.12 of the time although it computes "
    "more.",
    "choose": "A gain of 12 % means that the chosen one computes 12 % more a second.",
}
_MAX_LISTED = 40
_MAX_DRAWN = 500  # problems of others' table: nobody reads more


def build_table(analysis: Analysis) -> list[Advice]:
    """Both questions' advice for every problem that the sweeps measured with the library.

    Those to *pad* first, then those to *choose*; of each the largest gains first. Of others' table,
    which has tens of thousands of problems, some are drawn. An unusable run gives no advice.
    """
    recording, model = analysis.recording, analysis.model
    if recording.unusable:
        return []
    measured = read_measurements(library_rows(recording.products), recording)
    problems = {problem: next(iter(measured.of(problem))) for problem in measured.problems}
    if recording.public:
        model = for_any_software(model)
        problems = _drawn(problems)
    by_any = read_measurements(recording.products, recording)
    return [
        answer
        for question, allowance in ALLOWANCE.items()
        for answer in advise_all(problems, model, by_any, question, allowance)
    ]


def _drawn(problems: Mapping[Problem, str]) -> dict[Problem, str]:
    """At most :data:`_MAX_DRAWN`, the same ones each time, without a look at any time."""
    order = np.random.default_rng(0).permutation(len(problems))[:_MAX_DRAWN]
    items = list(problems.items())
    return dict(items[i] for i in sorted(order))


def write_table(analysis: Analysis, advice: Sequence[Advice]) -> None:
    """recommendations.csv and .json in full; .md with what is worth changing."""
    folder = analysis.recording.folder
    write_records(folder, "recommendations", [answer.to_json() for answer in advice])
    write_whole(folder / "recommendations.md", recommendations_markdown(analysis, advice))


def recommendations_markdown(analysis: Analysis, advice: Sequence[Advice]) -> str:
    """What to change, what it gains, what it costs and why; the rest is counted."""
    lines = [
        f"# Which shapes to use on {plain(analysis.recording.machine.name)}",
        "",
        plain(analysis.recording.caption()).replace("  ·  ", ", ") + ".",
        "",
        *(line for text in health_of(analysis) for line in (plain(text), "")),
        "In brackets: what a second run would measure, in 95 %; of a predicted gain its 90 % "
        "interval. A row is here only if its whole interval is above 1 %.",
        "",
    ]
    if analysis.recording.unusable:
        return "\n".join([*lines[:-2], "Nothing is advised from times such as these.", ""])
    drawn = "of the table, drawn by chance, " if analysis.recording.public else ""
    for question, text in _QUESTION_TEXT.items():
        answers = [answer for answer in advice if answer.question == question]
        changes = sum(answer.verdict != "leave it" for answer in answers)
        lines += [
            f"## {question.capitalize()}: {text}",
            "",
            f"{len(answers)} problems {drawn}were looked at, within {ALLOWANCE[question]:.1%} of "
            f"each dimension. {changes} have a better one nearby beyond doubt; leave the others. "
            f"{_GAINS[question]}",
            "",
        ]
        for op in ("gemm", "conv"):
            lines += _listed([a for a in answers if a.verdict == question and a.problem.op == op])
    return "\n".join(lines)


def _listed(changes: Sequence[Advice]) -> list[str]:
    """The table of the best answers; empty for none."""
    if not changes:
        return []
    shape = "shape (M×N×K)" if isinstance(changes[0].problem, Gemm) else "convolution"
    lines = [
        f"| {shape} | {changes[0].question} | what that is | measured gain | predicted gain "
        "| more FLOPs | more bytes | by | why |",
        "|---|---|---|---|---|---|---|---|---|",
        *map(_row, changes[:_MAX_LISTED]),
        "",
    ]
    if len(changes) > _MAX_LISTED:
        lines += [f"{len(changes) - _MAX_LISTED} more are in recommendations.csv.", ""]
    return lines


def _row(answer: Advice) -> str:
    cells = [
        str(answer.problem),
        answer.change,
        answer.roles,
        _gain(answer.measured_gain, answer.measured_lo, answer.measured_hi),
        _gain(answer.predicted_gain, answer.predicted_lo, answer.predicted_hi),
        f"{answer.extra_flops:+.1%}",
        f"{answer.extra_bytes:+.1%}",
        answer.implementation,
        answer.reason,
    ]
    return table_row(cells)


def _gain(gain: float | None, lo: float | None, hi: float | None) -> str:
    if gain is None or lo is None or hi is None:
        return "–"
    gain, lo, hi = (round(value, 3) + 0.0 for value in (gain, lo, hi))  # no -0.0 %
    return f"{gain:+.1%} [{lo:+.1%}, {hi:+.1%}]"
