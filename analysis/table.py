"""The recommendation table of a recording, as CSV, Markdown and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

from analysis.recommend import Advice, advise_all, read_measurements
from analysis.tidy import Analysis
from kernels.problem import Gemm
from sweeps.store import write_whole

_TOP = 40


def build_table(analysis: Analysis) -> list[Advice]:
    """Advice for every GEMM that the sweeps measured with the library, largest gains first."""
    rows = analysis.recording.products
    library = rows[~rows["implementation"].str.startswith("triton-") & (rows["op"] == "gemm")]
    measured = read_measurements(library)
    problems = {p: next(iter(measured.of(p))) for p in measured.problems if isinstance(p, Gemm)}
    return advise_all(problems, analysis.model, read_measurements(rows))


def write_table(analysis: Analysis, advice: Sequence[Advice]) -> None:
    """recommendations.csv and .json in full; .md with what is worth changing."""
    folder = analysis.recording.folder
    records = [answer.to_json() for answer in advice]
    write_whole(
        folder / "recommendations.json",
        json.dumps(records, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
    )
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(records[0] if records else [])
    for record in records:
        writer.writerow(["" if value is None else value for value in record.values()])
    write_whole(folder / "recommendations.csv", buffer.getvalue())
    write_whole(folder / "recommendations.md", markdown(analysis, advice))


def markdown(analysis: Analysis, advice: Sequence[Advice]) -> str:
    """What to pad, what it gains, what it costs and why; the rest is counted."""
    pads = [answer for answer in advice if answer.verdict == "pad"]
    lines = [
        f"# What to pad on {analysis.recording.machine.name}",
        "",
        analysis.recording.caption().replace("  ·  ", ", ") + ".",
        "",
        f"{len(advice)} GEMM shapes were looked at, with up to 12.5 % of padding in each "
        f"dimension. {len(pads)} are faster padded beyond their uncertainty; leave the others.",
        "",
    ]
    if pads:
        lines += [
            "| shape (M×N×K) | pad | measured gain | predicted gain | more FLOPs | more bytes "
            "| by | why |",
            "|---|---|---|---|---|---|---|---|",
            *map(_row, pads[:_TOP]),
            "",
        ]
    if len(pads) > _TOP:
        lines += [f"{len(pads) - _TOP} more are in recommendations.csv.", ""]
    lines += [
        "A gain of 12 % means that the padded product takes 1/1.12 of the time. In brackets: the "
        "95 % interval of a measured gain, the 90 % interval of a predicted one.",
        "",
    ]
    return "\n".join(lines)


def _row(answer: Advice) -> str:
    cells = [
        str(answer.problem),
        answer.change,
        _gain(answer.measured_gain, answer.measured_lo, answer.measured_hi),
        _gain(answer.predicted_gain, answer.predicted_lo, answer.predicted_hi),
        f"{answer.extra_flops:.1%}",
        f"{answer.extra_bytes:.1%}",
        answer.implementation,
        answer.reason,
    ]
    return f"| {' | '.join(cells)} |"


def _gain(gain: float | None, lo: float | None, hi: float | None) -> str:
    if gain is None or lo is None or hi is None:
        return "–"
    gain, lo, hi = (round(value, 3) + 0.0 for value in (gain, lo, hi))  # no -0.0 %
    return f"{gain:+.1%} [{lo:+.1%}, {hi:+.1%}]"
