"""Summarise advice in one line for each group of similar changes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.advice.recommend import Advice
from analysis.advice.sizes import aligned_multiple, misaligned
from analysis.advice.verdict import LEAVE_IT, VERDICTS
from analysis.units import percent_range
from kernels.common.counts import counted, enumerated

MAX_FINDINGS = 10
_UNIT = 8  # least multiple advised for alignment, unless a new size is a multiple of only 4
_CLEAR_STEP = 32  # smallest multiple that is named if alignment is not the cause
_STEPS = (256, 192, 128, 96, 64, 32, 16, 8, 4)  # multiples that a set of sizes is tested for
_QUERY_WORDS = {"pad": "when padding", "choose": "when choosing freely"}


@dataclass(frozen=True)
class AdviceFinding:
    """Advice that recommends similar changes, with the same verdict and for one kind of query."""

    advice: tuple[Advice, ...]

    @property
    def best(self) -> Advice:
        """Advice with the largest gain."""
        return max(self.advice, key=lambda answer: answer.gain.value)

    @property
    def weight(self) -> float:
        """Sum of all gains."""
        return sum(answer.gain.value for answer in self.advice)

    def text(self) -> str:
        """Format the finding as text, and name the shape with the largest gain as an example.

        Example: ``**likely** when padding in fp32: make N a multiple of 64. The gain is 4–8% (…).``
        """
        best = self.best
        gains = sorted(answer.gain.value for answer in self.advice)
        smallest, largest = f"{gains[0]:.0%}", f"{gains[-1]:.0%}"
        gain_range = smallest if smallest == largest else percent_range(gains[0], gains[-1])
        example = f"{best.problem} with {best.change or best.implementation}"
        if len(gains) > 1:
            example = f"{len(gains):,} shapes, such as {example}"
        # A gain per FLOP already accounts for more FLOPs. Any other gain is printed together
        # with the share of FLOPs that the change adds.
        if best.question == "choose":
            qualifier = " per FLOP"
        else:
            extra_flops = max(answer.extra_flops for answer in self.advice)
            is_printable = extra_flops >= 5e-4  # less would be printed as 0.0%
            up_to = "up to " if len(gains) > 1 else ""
            qualifier = f" for {up_to}{extra_flops:.1%} more FLOPs" if is_printable else ""
        return (
            f"**{best.verdict}** {_QUERY_WORDS[best.question]} in {best.problem.dtype}: "
            f"{self._action()}. The gain is {gain_range}{qualifier} ({example})."
        )

    def _action(self) -> str:
        """Describe the action in words, for example: make N a multiple of 64."""
        best = self.best
        if not best.changed:
            return f"use {best.implementation} instead of the vendor library"
        dimensions = _dimensions(best)
        names = enumerated([name.upper() for name in dimensions])
        if len(dimensions) == 1:
            make_multiple, nearby = f"make {names} a multiple", "a nearby size"
        else:
            make_multiple, nearby = f"make {names} multiples", "nearby sizes"
        step = self._step()
        if _cause(best) == "alignment" and step is not None:
            # Sizes below 16 may become multiples of only 4, such as 4 channels instead of 3.
            multiple = min(max(_UNIT, aligned_multiple(best.problem)), step)
            return f"{make_multiple} of {multiple} to align rows"
        if step is not None and step >= _CLEAR_STEP:
            return f"{make_multiple} of {step}"
        return f"change {names} to {nearby}"

    def _step(self) -> int | None:
        """Return the largest of :data:`_STEPS` that divides all new sizes; None if none does."""
        new_sizes = [
            getattr(answer.instead, name) for answer in self.advice for name in _dimensions(answer)
        ]
        divisor = math.gcd(*new_sizes)
        return next((step for step in _STEPS if divisor % step == 0), None)


def findings(advice: Sequence[Advice]) -> list[AdviceFinding]:
    """Group the advice that recommends a change, and sort the groups by verdict and total gain."""
    groups: dict[tuple[object, ...], list[Advice]] = defaultdict(list)
    for answer in advice:
        if answer.verdict != LEAVE_IT:
            groups[answer.verdict, answer.question, *kind_of_change(answer)].append(answer)
    grouped = [AdviceFinding(tuple(members)) for members in groups.values()]
    return sorted(
        grouped, key=lambda finding: (VERDICTS.index(finding.best.verdict), -finding.weight)
    )


def kind_of_change(answer: Advice) -> tuple[object, ...]:
    """Return what similar changes share: operation, dtype, dimensions, cause, implementation."""
    # If no size changes, the implementation is the change.
    implementation = answer.implementation if not answer.changed else ""
    problem = answer.problem
    return problem.op, problem.dtype, _dimensions(answer), _cause(answer), implementation


def findings_lines(advice: Sequence[Advice]) -> list[str]:
    """Format advice as a Markdown list of at most ten findings.

    Further items give the number of other findings, if any, and the number of queries whose answer
    is *leave it*, with the reasons.
    """
    groups = findings(advice)
    lines = [f"- {finding.text()}" for finding in groups[:MAX_FINDINGS]]
    if len(groups) > MAX_FINDINGS:
        more = counted(len(groups) - MAX_FINDINGS, "more finding is", "more findings are")
        lines.append(f"- {more} in the tables below.")
    unchanged = [answer for answer in advice if answer.verdict == LEAVE_IT]
    query_count = f"{len(unchanged):,} of {len(advice):,} queries"
    reasons = Counter(answer.reason for answer in unchanged).most_common()
    lines.append(f"- **leave it** is the answer to {query_count}{':' if reasons else '.'}")
    lines += [f"  - {reason} ({counted(count, 'query', 'queries')})" for reason, count in reasons]
    return lines


def _dimensions(answer: Advice) -> tuple[str, ...]:
    """Return the dimensions to change, or only the misaligned ones if alignment is the cause."""
    if _cause(answer) != "alignment":
        return tuple(answer.changed)
    return tuple(misaligned(answer.problem, answer.instead))


def _cause(answer: Advice) -> str:
    return "alignment" if answer.instead.alignment > answer.problem.alignment else "size"
