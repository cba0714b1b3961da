"""What a page shows of one recording."""

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
    """What a page shows of one recording."""

    analysis: Analysis
    advice: Sequence[Advice]
    rules: Sequence[RuleResult] = ()
    steps: Sequence[TimedStep] = ()

    @property
    def name(self) -> str:
        """The name of its folder, which tells two runs of a machine apart."""
        return self.analysis.recording.folder.resolve().name

    @property
    def left_out(self) -> str:
        """A sentence where not every case has a point; else empty."""
        cases = len(self.analysis.recording.rows)
        shown = cases - self.analysis.measured + len(self.analysis.table)
        if min(shown, MOST) == cases:
            return ""
        return f"The charts show {min(shown, MOST):,} of {cases:,} cases, drawn at random."
