"""What a table's rows have in common: shapes that share a reason, as one line."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.advice.recommend import Advice
from analysis.advice.verdict import LEAVE_IT, VERDICTS
from kernels.problem import DTYPE_BYTES, WIDE_BYTES

MAX_FINDINGS = 10
_UNIT = 8  # which the alignment of every dtype but fp8 divides
_CLEAR_STEP = 32  # nearly all sizes are a multiple of a smaller one
_STEPS = (256, 192, 128, 96, 64, 32, 16, 8, 4)  # what sizes are said to be a multiple of


@dataclass(frozen=True)
class AdviceFinding:
    """Shapes of which the same should be changed for the same reason."""

    advice: tuple[Advice, ...]

    @property
    def best(self) -> Advice:
        """The shape that gains most."""
        return max(self.advice, key=lambda a: a.gain.value)

    @property
    def weight(self) -> float:
        """The sum of all gains: what findings are put in order by."""
        return sum(a.gain.value for a in self.advice)

    def text(self) -> str:
        """``likely, fp32, N: make it a multiple of 16; 4 to 8 %, 13 shapes (…)``."""
        best = self.best
        gains = sorted(a.gain.value for a in self.advice)
        ends = f"{gains[0]:.0%} to {gains[-1]:.0%}" if len(gains) > 1 else f"{gains[0]:.0%}"
        count = f"{len(gains)} shapes, such as" if len(gains) > 1 else ""
        per_flop = " per FLOP" if best.question == "choose" else ""
        more = max(a.extra_flops for a in self.advice)
        cost = f" for up to {more:.1%} more FLOPs" if more >= 5e-4 and not per_flop else ""
        example = " ".join(
            filter(None, [count, str(best.problem), f"with {best.change or best.implementation}"])
        )
        return f"**{best.verdict}**, {self._what()}; {ends}{per_flop}{cost} ({example})."

    def _what(self) -> str:
        best = self.best
        if not best.changed:
            return f"{best.problem.dtype}: use {best.implementation} instead"
        dims = _dimensions(best)
        names = " and ".join(name.upper() for name in dims)
        step = self._step()
        one = len(dims) == 1
        if _cause(best) == "alignment":
            unit = max(_UNIT, WIDE_BYTES // DTYPE_BYTES[best.problem.dtype])
            what = f"make {'it' if one else 'them'} a multiple of {unit}; misalignment costs time"
        elif step is not None and step >= _CLEAR_STEP:
            what = f"make {'it' if one else 'them'} a multiple of {step}"
        else:
            what = f"{'another size' if one else 'other sizes'} nearby"
        return f"{best.problem.dtype}, {names}: {what}"

    def _step(self) -> int | None:
        """The largest step of which all changed sizes are multiples."""
        sizes = [getattr(a.instead, name) for a in self.advice for name in a.changed]
        common = math.gcd(*sizes)
        return next((step for step in _STEPS if common % step == 0), None)


def findings(advice: Sequence[Advice]) -> list[AdviceFinding]:
    """The advice that changes something, by what it shares; the surest first, then the largest."""
    groups: dict[tuple[object, ...], list[Advice]] = defaultdict(list)
    for answer in advice:
        if answer.verdict != LEAVE_IT:
            who = answer.implementation if not answer.changed else ""
            key = (
                answer.verdict,
                answer.question,
                answer.problem.op,
                answer.problem.dtype,
                _dimensions(answer),
                _cause(answer),
                who,
            )
            groups[key].append(answer)
    grouped = [AdviceFinding(tuple(members)) for members in groups.values()]
    return sorted(grouped, key=lambda f: (VERDICTS.index(f.best.verdict), -f.weight))


def findings_lines(advice: Sequence[Advice]) -> list[str]:
    """The findings as a Markdown list, at most ten, and what is not to be changed."""
    found = findings(advice)
    lines = [f"- {finding.text()}" for finding in found[:MAX_FINDINGS]]
    if len(found) > MAX_FINDINGS:
        lines.append(f"- {len(found) - MAX_FINDINGS} more findings are in the rows below.")
    left = [answer for answer in advice if answer.verdict == LEAVE_IT]
    asked = f"{len(left)} of {len(advice)} queries"
    reasons = Counter(answer.reason for answer in left).most_common(4)
    told = "; ".join(f"{count}: {reason}" for reason, count in reasons)
    lines.append(f"- **leave it** is the answer for {asked}" + (f" ({told})." if told else "."))
    return lines


def _dimensions(answer: Advice) -> tuple[str, ...]:
    """The dimensions that a finding is about: those changed, or of these the misaligned ones."""
    if _cause(answer) != "alignment":
        return tuple(answer.changed)
    unit = WIDE_BYTES // DTYPE_BYTES[answer.problem.dtype]
    return tuple(name for name in answer.changed if getattr(answer.problem, name) % unit)


def _cause(answer: Advice) -> str:
    return "alignment" if answer.instead.alignment > answer.problem.alignment else "size"
