"""What the project publishes: the recording of a CPU, and the recorded figures."""

from __future__ import annotations

from kernels.common.program import ROOT

SLUG = "cpu-intel-xeon-avx512bf16-1t"
PUBLISHED = ROOT / "results" / "published"
RECORDED = PUBLISHED / SLUG
"""The CPU's sweep, with its table, rules, plots and page."""

FOR_RULES = PUBLISHED / "rules" / SLUG
"""What was measured for its rules in addition."""

ACCURACY = ROOT / "results" / "accuracy"
