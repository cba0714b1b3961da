"""Content of a page about one recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.advice.recommend import Advice
from analysis.model.fitted import Analysis
from analysis.page.points import MOST
from analysis.rules.judge import RuleResult
from analysis.rules.tensor_cores import TimedStep


@dataclass(frozen=True)
class PageReport:
    """Content of a page about one recording."""

    analysis: Analysis
    advice: Sequence[Advice]
    rules: Sequence[RuleResult] = ()
    steps: Sequence[TimedStep] = ()

    @property
    def name(self) -> str:
        """Name of the recording's folder, which tells two runs of a machine apart."""
        return self.analysis.recording.folder.resolve().name

    @property
    def left_out(self) -> str:
        """Sentence about cases without a point; empty if every case has one."""
        cases = len(self.analysis.recording.rows)
        # The table may have only a sample of the measured cases, and a page at most so many points.
        in_table = cases - self.analysis.measured + len(self.analysis.table)
        shown = min(in_table, MOST)
        if shown == cases:
            return ""
        return f"The charts show {shown:,} of {cases:,} cases, drawn at random."
