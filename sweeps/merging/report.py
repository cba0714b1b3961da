"""What is said of a merged recording: on the terminal, and in its merged.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sweeps.cases.case import Case
from sweeps.merging.combining import worker_name
from sweeps.merging.comparing import Comparison, Times
from sweeps.merging.source import Source

FILE = "merged.md"

_MOST_LISTED = 100  # cases that several recordings timed, the furthest apart first


def duplicates_sentence(cases: Sequence[Times]) -> str:
    """How many cases were timed by several recordings, and what the table has of them."""
    count = len(_duplicates(cases))
    if not count:
        return "No case was timed by two of them."
    subject = "1 case was" if count == 1 else f"{count} cases were"
    return (
        f"{subject} timed by several of them: samples of two are never pooled, and the table has "
        "the time of the one that took most samples."
    )


def report_text(
    sources: Sequence[Source], comparisons: Sequence[Comparison], cases: Sequence[Times]
) -> str:
    """The text of merged.md. It names no folder, since recordings are handed on."""
    workers = [worker_name(i, len(sources)) for i in range(1, len(sources) + 1)]
    known = {e.case.id: e.case for source in sources for e in source.planned}
    lines = [
        f"# Merged of {len(sources)} recordings", "",
        *_table(
            ["worker", "run", "cases timed", "health"],
            [[worker, source.record["run"], str(len(times)), _health(source.record)]
             for worker, source, times in zip(workers, sources, cases, strict=True)],
        ),
        "", *(f"- {comparison.sentence(workers)}" for comparison in comparisons),
        f"- {duplicates_sentence(cases)}",
    ]  # fmt: skip
    both = _duplicates(cases)
    if both:
        lines += [
            "", "## Timed by several", "",
            f"In µs; {min(len(both), _MOST_LISTED)} of {len(both)}, the furthest apart first.", "",
            *_table(
                ["case", "sweep", *workers, "longest / shortest"],
                [_row(known[case], case, cases) for case in both[:_MOST_LISTED]],
            ),
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _duplicates(cases: Sequence[Times]) -> list[str]:
    """The cases that several recordings timed, the furthest apart first."""
    every = dict.fromkeys(case for times in cases for case in times)
    both = [case for case in every if sum(case in times for times in cases) > 1]
    return sorted(both, key=lambda case: -_spread(case, cases))


def _spread(case: str, cases: Sequence[Times]) -> float:
    seconds = [times[case] for times in cases if case in times]
    return max(seconds) / min(seconds)


def _row(case: Case, name: str, cases: Sequence[Times]) -> list[str]:
    times = [f"{times[name] * 1e6:.2f}" if name in times else "" for times in cases]
    return [str(case), case.sweep, *times, f"{_spread(name, cases):.3f}"]


def _health(record: Mapping[str, Any]) -> str:
    judged = record.get("health") or {"verdict": "not judged", "reasons": []}
    return "; ".join([judged["verdict"], *judged["reasons"]])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Of Markdown. Texts of strangers' recordings may have bars and line breaks."""
    cells = [header, ["---"] * len(header), *rows]
    return [
        f"| {' | '.join(' '.join(cell.split()).replace('|', '/') for cell in row)} |"
        for row in cells
    ]
