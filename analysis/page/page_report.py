"""Define what a page reports about one recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.advice.recommend import Advice
from analysis.model.fitted import Analysis
from analysis.page.points import MOST_POINTS
from analysis.rules.judge import RuleResult
from analysis.rules.tensor_cores import TimedStep


@dataclass(frozen=True)
class PageReport:
    """Content of a page about one recording.

    Attributes:
        analysis: the recording, with the model and its predictions.
        advice: answers to pad and choose queries.
        rules: results of the rules, including rules that were not judged.
        steps: profiled training steps of models.
    """

    analysis: Analysis
    advice: Sequence[Advice]
    rules: Sequence[RuleResult] = ()
    steps: Sequence[TimedStep] = ()

    @property
    def name(self) -> str:
        """Name of the recording's folder, usually the slug of the machine."""
        return self.analysis.recording.folder.resolve().name

    @property
    def left_out(self) -> str:
        """Sentence that says how many cases the charts show, or "" if they show all cases."""
        cases = len(self.analysis.recording.rows)
        # The table of the analysis may have only a sample of the measured cases. The page shows all
        # cases of the table and all cases without a prediction, or a sample of MOST_POINTS of them.
        without_prediction = cases - self.analysis.measured
        shown = min(len(self.analysis.table) + without_prediction, MOST_POINTS)
        if shown == cases:
            return ""
        return f"The charts show {shown:,} of {cases:,} cases, drawn at random."
