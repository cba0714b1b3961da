"""Find changes of a model's dimensions that make its step faster, and compute their gains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from analysis.advice.measurements import Measurements
from analysis.advice.recommend import measured_ratio, predicted_ratio
from analysis.advice.times import measurements_near
from analysis.advice.verdict import (
    CONFIRMED,
    LEAVE_IT,
    MEASURED,
    PREDICTED,
    Gain,
    net,
    probability,
    verdict,
)
from analysis.audit.account import (
    ATTENTION_RANGE,
    MOVED_RANGE,
    Account,
    AccountLine,
    account_of,
    as_problem,
)
from analysis.audit.candidates import REACH, Changes, candidates, narrows, pairs_of
from analysis.audit.runtime import COMPILE, Runtime
from analysis.audit.step_totals import SumChange, gain_of_step
from analysis.model.basis import Basis
from analysis.model.query import group_of
from kernels.common.errors import UserError
from kernels.problem import Problem
from sweeps.capture.captured import FORWARD, Captured, Dimension, Product

_CAPTURED = 2  # number of the best estimated candidates for which the model is captured
_CLOSE = 0.01  # largest difference from the best estimated gain at which the second is captured
_NEGLIGIBLE = 0.05  # evidence for at most this share of the changed time is ignored
_NAMED_ROLES = 4  # maximum number of roles that a reason names

Capture = Callable[[Mapping[str, int]], Captured]
"""Function that captures the model again with other sizes."""


def words_of(changes: Mapping[str, tuple[int, int]]) -> str:
    """Return changes in words, such as ``vocab 50257 → 50304``."""
    return ", ".join(f"{name} {old} → {new}" for name, (old, new) in changes.items())


@dataclass(frozen=True)
class Lever:
    """A change of one or more dimensions, and the effect of the change on the step.

    Attributes:
        changes: old and new value of each dimension.
        pairs: GEMMs and convolutions that change, each as (before, after), in order of decreasing
            time.
        gain: gain of the step with its interval; 0.02 means that the changed step takes 1/1.02 of
            the original time.
        products: gain of the matrix operations that change, without the rest of the step.
        share: share of the original step's time that these operations take.
        parameters: increase in the number of parameters, as a fraction.
        flops: increase in the FLOPs, as a fraction.
        bytes: increase in the bytes that all operations other than GEMMs, convolutions and
            attention move, as a fraction; the optimizer is not counted.
        verdict: verdict on the change; if the FLOPs fall, the verdict is about the gain per FLOP.
        evidence: weakest kind of evidence for the operations that change. A kind that covers at
            most 5% of the original time of these operations is ignored.
        reason: what the change does to these matrix operations and to the model, in words.
    """

    changes: Mapping[str, tuple[int, int]]
    pairs: tuple[tuple[Problem, Problem], ...]
    gain: Gain
    products: float
    share: float
    parameters: float
    flops: float
    bytes: float
    verdict: str
    evidence: str
    reason: str

    @property
    def name(self) -> str:
        """Names of the dimensions, such as ``hidden`` or ``hidden and heads``."""
        return " and ".join(self.changes)

    @property
    def words(self) -> str:
        """Changes of the dimensions in words, such as ``vocab 50257 → 50304``."""
        return words_of(self.changes)

    @property
    def expected_gain(self) -> float:
        """Expected gain of the step after costs; if the FLOPs fall, the gain is per FLOP."""
        return net(_judged_gain(self.gain, self.flops), self.flops)

    @property
    def probability(self) -> float:
        """Probability that the change brings a gain, or a gain per FLOP if the FLOPs fall."""
        return probability(_judged_gain(self.gain, self.flops), self.evidence)


def find_levers(
    captured: Captured,
    dimensions: Sequence[Dimension],
    capture: Capture,
    runtime: Runtime,
    basis: Basis,
    account: Account,
    more_parameters: float = 0.01,
    multiple: int | None = None,
) -> list[Lever]:
    """Return the best change of each dimension, and of each set of dimensions that belong together.

    The changes are sorted by expected gain, the largest first. If a combination of worthwhile
    changes has a larger expected gain than each of them, the combination comes before all other
    changes. It increases the number of parameters by at most the fraction ``more_parameters``.

    ``account`` is the account of the original model. ``multiple`` has the same meaning as in
    :func:`analysis.audit.candidates.candidates`.

    Raises:
        UserError: if the machine's measurements cannot be read.
    """
    baseline = _Baseline.from_account(captured, capture, runtime, basis, account)
    # 1. Find the best change of each dimension.
    best: list[Lever] = []
    for dimension in dimensions:
        values = _promising(captured, dimension, baseline, multiple)
        levers = [baseline.lever({dimension.name: (dimension.value, value)}) for value in values]
        possible = [lever for lever in levers if lever is not None]
        if possible:
            best.append(max(possible, key=lambda lever: lever.expected_gain))
    # 2. Find the best change of dimensions that belong together. Changes of the same dimensions
    #    compete with one another.
    paired: dict[tuple[str, ...], list[Lever]] = {}
    for changes in pairs_of(captured, dimensions, runtime.tp, multiple):
        lever = baseline.lever(changes)
        if lever is not None:
            paired.setdefault(tuple(changes), []).append(lever)
    best += [max(rivals, key=lambda lever: lever.expected_gain) for rivals in paired.values()]
    best.sort(key=lambda lever: -lever.expected_gain)
    # 3. Combine the worthwhile changes.
    joint = _combined_lever(best, baseline, more_parameters)
    return [joint, *best] if joint is not None else best


def try_levers(
    captured: Captured,
    changes: Sequence[Changes],
    capture: Capture,
    runtime: Runtime,
    basis: Basis,
    account: Account,
) -> tuple[list[Lever], dict[str, str]]:
    """Return a lever for each change that can be judged, in the given order, and all other changes.

    The second value maps each of the other changes, as formatted by :func:`words_of`, to the reason
    why it cannot be judged.

    Raises:
        UserError: if the machine's measurements cannot be read.
    """
    baseline = _Baseline.from_account(captured, capture, runtime, basis, account)
    levers: list[Lever] = []
    refused: dict[str, str] = {}
    for change in changes:
        try:
            lever = baseline.changed_step(change)
        except UserError as error:
            refused[words_of(change)] = str(error)
        else:
            levers.append(lever)
    return levers, refused


@dataclass(frozen=True)
class _Baseline:
    """The original model, with which all changes are compared."""

    captured: Captured
    capture: Capture
    runtime: Runtime
    basis: Basis
    account: Account
    measured: Measurements

    @classmethod
    def from_account(
        cls, captured: Captured, capture: Capture, runtime: Runtime, basis: Basis, account: Account
    ) -> _Baseline:
        """Create a baseline with measurements of problems similar to the model's operations.

        Raises:
            UserError: if the machine's measurements cannot be read.
        """
        problems = dict.fromkeys(as_problem(line.product.work) for line in account.lines)
        without_attention = [problem for problem in problems if problem is not None]
        # Some sizes, such as a number of heads, may change by more than REACH.
        largest_ratio = 1 + 2 * REACH
        measured = measurements_near(basis, without_attention, largest_ratio)
        return cls(captured, capture, runtime, basis, account, measured)

    def lever(self, changes: Mapping[str, tuple[int, int]]) -> Lever | None:
        """Return the lever of a change, or None if the change cannot be judged."""
        try:
            return self.changed_step(changes)
        except UserError:
            return None

    def changed_step(self, changes: Mapping[str, tuple[int, int]]) -> Lever:
        """Return the lever of a change.

        Raises:
            UserError: if the change cannot be judged, for example because the model cannot be
                built with these sizes.
        """
        # 1. Account for the step of the changed model.
        changed = self.capture({name: new for name, (_, new) in changes.items()})
        account = account_of(changed, self.runtime, self.basis)
        # Operations are compared one by one, so both models need the same number of each. A new
        # number of layers, for example, is refused, because it changes only how often operations
        # occur.
        counts = [line.product.count for line in account.lines]
        if counts != [line.product.count for line in self.account.lines]:
            raise UserError(
                "with these sizes, the model has a different number of operations, so its time "
                "cannot be compared."
            )
        # 2. Find the operations that change. Operations that are not counted cannot be compared.
        pairs: list[tuple[AccountLine, AccountLine]] = []
        has_uncounted = False
        for before, after in zip(self.account.lines, account.lines, strict=True):
            if before.product.work == after.product.work:
                continue
            if math.isnan(before.time_us + after.time_us):
                has_uncounted = True
            else:
                pairs.append((before, after))
        if not pairs:
            works_before = [product.work for product in self.captured.products]
            works_after = [product.work for product in changed.products]
            if works_before != works_after and not has_uncounted:
                raise UserError(
                    "compiled code already pads its GEMMs to these sizes, even without the change."
                )
            raise UserError(
                "the change affects no GEMM, convolution or attention whose time is counted."
            )
        # 3. Judge the change by the gain of the step.
        gain, products_gain, evidence = self._gain(pairs, account)
        more_flops = account.flops / self.account.flops - 1
        share = sum(before.total_us for before, _ in pairs) / self.account.step_us
        moved_before = _moved_bytes(self.captured, self.runtime)
        moved_after = _moved_bytes(changed, self.runtime)
        reason = _reason(changes, pairs, products_gain, share, more_flops)
        if has_uncounted:
            reason += " The effect on attention is not counted."
        return Lever(
            changes=changes,
            pairs=_changed_problems(pairs),
            gain=gain,
            products=products_gain,
            share=share,
            parameters=_growth(self.captured.parameters, changed.parameters),
            flops=more_flops,
            bytes=_growth(moved_before, moved_after),
            verdict=verdict(_judged_gain(gain, more_flops), evidence, more_flops),
            evidence=evidence,
            reason=reason,
        )

    def _gain(
        self, pairs: Sequence[tuple[AccountLine, AccountLine]], changed_account: Account
    ) -> tuple[Gain, float, str]:
        """Return the ``gain``, ``products`` and ``evidence`` of a :class:`Lever`."""
        # 1. Find the ratio of each operation's times: measured if possible, else predicted.
        predictions = ratios_of(
            [(as_problem(old.product.work), as_problem(new.product.work)) for old, new in pairs],
            self.basis,
        )
        sum_changes: list[SumChange] = []
        unsure_attention_us = 0.0  # half width of the interval of the attention's change
        time_by_evidence = dict.fromkeys((PREDICTED, MEASURED, CONFIRMED), 0.0)  # weakest first
        for (old, new), predicted in zip(pairs, predictions, strict=True):
            evidence = PREDICTED
            if predicted is None:
                # Attention has its own fits, and the spread of a line is that of a ratio of times.
                # The changed attention was never measured, so this counts as a prediction.
                ratio = old.time_us / new.time_us
                spread = max(old.spread, new.spread)
                interval = ratio * math.exp(-spread), ratio * math.exp(spread)
                change = SumChange(old.total_us, (ratio, *interval))
                # Only times from an assumed share of the peak have no spread.
                is_assumed = spread == 0
                if is_assumed:
                    # The assumed share may be wrong. It is then wrong for all calls in the same
                    # way, so their uncertainties add up.
                    change_us = abs(new.total_us - old.total_us)
                    unsure_attention_us += change_us * (ATTENTION_RANGE - 1)
            elif (measurement := self._measured_ratio(old, new)) is not None:
                ratio_and_interval, evidence = measurement
                change = SumChange(old.total_us, ratio_and_interval)
            else:
                expected, in_sums = predicted
                change = SumChange(old.total_us, expected, in_sums)
            time_by_evidence[evidence] += old.total_us
            sum_changes.append(change)
        # 2. Add the time in which all other operations move more or fewer bytes.
        other_before_us = sum(operations.time_us for operations in self.account.other)
        other_after_us = sum(operations.time_us for operations in changed_account.other)
        more_other_us = other_after_us - other_before_us
        unsure_other_us = abs(more_other_us) * (MOVED_RANGE - 1)
        # The uncertainties of attention and of all other operations are independent.
        unsure_us = math.hypot(unsure_attention_us, unsure_other_us)
        gain = gain_of_step(self.account.step_us, sum_changes, more_other_us, unsure_us)
        # 3. Find the weakest evidence for more than a negligible share of the changed time. At
        #    least one of the three kinds of evidence has a larger share.
        changed_before_us = math.fsum(change.before for change in sum_changes)
        changed_after_us = math.fsum(change.after for change in sum_changes)
        weakest = next(
            name
            for name, time_us in time_by_evidence.items()
            if time_us > _NEGLIGIBLE * changed_before_us
        )
        return gain, changed_before_us / changed_after_us - 1, weakest

    def _measured_ratio(
        self, old: AccountLine, new: AccountLine
    ) -> tuple[tuple[float, float, float], str] | None:
        """Return the measured ratio of times, old over new, with its 95% interval and evidence.

        Return None if no such ratio was measured.
        """
        before, after = as_problem(old.product.work), as_problem(new.product.work)
        # Only attention has no problem, and the caller treats attention separately.
        assert before is not None
        assert after is not None
        # The ratio for either kind of query is a ratio of times. If a size becomes smaller, only a
        # choose query has one.
        for kind in ("pad", "choose"):
            if (ratio := self.measured.confirmed(before, after, kind)) is not None:
                return ratio, CONFIRMED
        fit = self.basis.model.fit_of(group_of(self.basis.library(before), before))
        ratio = measured_ratio(before, after, self.measured, fit)
        return None if ratio is None else (ratio, MEASURED)


def ratios_of(
    pairs: Sequence[tuple[Problem | None, Problem | None]], basis: Basis
) -> list[tuple[tuple[float, float, float], tuple[float, float]] | None]:
    """Predict, for each pair, the first problem's time divided by the second problem's time.

    Returns:
        For each pair, the ratio with its 90% interval, as (ratio, lo, hi), and
        :attr:`analysis.audit.step_totals.SumChange.in_sums`; None if a problem of the pair is None,
        as for attention.
    """
    problems = list(
        dict.fromkeys(problem for pair in pairs for problem in pair if problem is not None)
    )
    if not problems:
        return [None] * len(pairs)
    predicted = basis.model.predict(basis.query(problems))
    position_of = {problem: i for i, problem in enumerate(problems)}
    ratios: list[tuple[tuple[float, float, float], tuple[float, float]] | None] = []
    for before, after in pairs:
        if before is None or after is None:
            ratios.append(None)
            continue
        old_position, new_position = position_of[before], position_of[after]
        fit = basis.model.fit_of(group_of(basis.library(before), before))
        spreads = (
            fit.spread(predicted.lo[old_position], predicted.hi[old_position]),
            fit.spread(predicted.lo[new_position], predicted.hi[new_position]),
        )
        seconds = predicted.estimate.time
        times = (float(seconds[old_position]), float(seconds[new_position]))
        # The factors for sums were fitted to measured shapes, so they hold only for similar ones.
        were_measured = fit.has_like(before) and fit.has_like(after)
        in_sums = (fit.change_low, fit.change_high) if were_measured else (1.0, 1.0)
        ratios.append((predicted_ratio(before, after, times, spreads, fit), in_sums))
    return ratios


def _judged_gain(gain: Gain, more_flops: float) -> Gain:
    """Return the gain that a verdict is based on, which is the gain per FLOP if the FLOPs fall.

    A model with fewer FLOPs is nearly always faster, so its gain in time would say nothing about
    its shapes.
    """
    if more_flops >= 0:
        return gain
    work = 1 + more_flops  # ratio of the FLOPs, after the change over before it
    return Gain(
        (1 + gain.value) * work - 1,
        (1 + gain.lo) * work - 1,
        (1 + gain.hi) * work - 1,
    )


def _growth(before: int, after: int) -> float:
    return after / before - 1 if before else 0.0


def _moved_bytes(captured: Captured, runtime: Runtime) -> int:
    """Return the bytes that all operations but matrix operations and the optimizer move."""
    moved = captured.moved_fused if runtime.kind == COMPILE else captured.moved
    return sum(entry.bytes for entry in moved)


def _promising(
    captured: Captured, dimension: Dimension, baseline: _Baseline, multiple: int | None
) -> list[int]:
    """Return the most promising new values of a dimension.

    Gains are estimated from only the forward GEMMs and convolutions.
    """
    # 1. Collect the forward problems at the current value and at each candidate that is possible.
    values = candidates(dimension, captured, baseline.runtime.tp, multiple)
    # A size that shrinks as the dimension grows, such as the width of a head at a fixed total
    # width, is inversely proportional to the dimension, so it cannot be extrapolated.
    if len(values) <= 1 or narrows(dimension):
        return values
    current = _resized(captured, dimension, dimension.value, baseline.runtime)
    if current is None:
        return []
    resized: dict[int, list[tuple[Problem, int]]] = {}  # (problem, count) pairs by new value
    for value in values:
        pairs = _resized(captured, dimension, value, baseline.runtime)
        if pairs is not None:
            resized[value] = pairs
    versions = [current, *resized.values()]
    problems = list(dict.fromkeys(problem for pairs in versions for problem, _ in pairs))
    if not problems:
        return []
    # 2. Predict each distinct problem once, and add up the times and FLOPs of each value.
    predicted = baseline.basis.model.predict(baseline.basis.query(problems)).estimate.time
    time_of = dict(zip(problems, predicted, strict=True))

    def totals(pairs: Sequence[tuple[Problem, int]]) -> tuple[float, int]:
        time = sum(time_of[problem] * count for problem, count in pairs)
        flops = sum(problem.flops * count for problem, count in pairs)
        return time, flops

    current_time, current_flops = totals(current)
    gains: dict[int, float] = {}
    for value, pairs in resized.items():
        time, flops = totals(pairs)
        gains[value] = _net_gain(current_time / time - 1, flops / current_flops - 1)
    # 3. Keep the best value, and the second best if it is nearly as good.
    best_first = sorted(gains, key=lambda value: -gains[value])[:_CAPTURED]
    return [value for value in best_first if gains[value] >= gains[best_first[0]] - _CLOSE]


def _net_gain(gain: float, more_flops: float) -> float:
    """Return a gain after the cost of more FLOPs, or the gain per FLOP if the FLOPs fall."""
    return net(_judged_gain(Gain(gain, gain, gain), more_flops), more_flops)


def _resized(
    captured: Captured, dimension: Dimension, value: int, runtime: Runtime
) -> list[tuple[Problem, int]] | None:
    """Return the forward GEMMs and convolutions for a new value of a dimension, with their counts.

    Return None if an operation cannot have its new sizes, or if the sizes cannot be divided among
    the GPUs.
    """
    # 1. Resize the forward operations.
    difference = value - dimension.value
    forward: list[Product] = []
    for position, product in enumerate(captured.products):
        # The slopes of a dimension describe only the original forward pass.
        is_forward = product.forward_position == position and product.pass_ == FORWARD
        if not is_forward or product.recomputed:
            continue
        sizes = {
            name: round(size + dimension.slopes.get((position, name), 0.0) * difference)
            for name, size in product.sizes.items()
        }
        # ``forward_position`` is the position in ``forward``, which lacks the gradients.
        try:
            forward.append(replace(product.resized(sizes), forward_position=len(forward)))
        except UserError:
            return None
    # 2. Apply the runtime. It fails if the GPUs cannot divide these sizes.
    try:
        products = runtime.products(replace(captured, products=tuple(forward)))
    except UserError:
        return None
    problems = [(as_problem(product.work), product.count) for product in products]
    return [(problem, count) for problem, count in problems if problem is not None]


def _combined_lever(
    best: Sequence[Lever], baseline: _Baseline, more_parameters: float
) -> Lever | None:
    """Return a combination of worthwhile levers, or None if none is better than a single lever.

    The levers in ``best`` are added one by one, in their order. Each stays in the combination if it
    raises the expected gain. ``more_parameters`` is the largest increase of the number of
    parameters, as a fraction.
    """
    chosen: Lever | None = None
    for lever in best:
        if lever.verdict == LEAVE_IT or lever.parameters > more_parameters:
            continue
        if chosen is None:
            chosen = lever
            continue
        # A dimension can only change once.
        if set(lever.changes) & set(chosen.changes):
            continue
        combined = baseline.lever({**chosen.changes, **lever.changes})
        if combined is None or combined.parameters > more_parameters:
            continue
        if combined.expected_gain > chosen.expected_gain:
            chosen = combined
    is_single_lever = any(chosen is lever for lever in best)
    if chosen is None or is_single_lever:
        return None
    return replace(chosen, reason=f"This change combines several other changes. {chosen.reason}")


def _changed_problems(
    pairs: Sequence[tuple[AccountLine, AccountLine]],
) -> tuple[tuple[Problem, Problem], ...]:
    """Return the GEMMs and convolutions that a change affects, without duplicates."""
    longest_first = sorted(pairs, key=lambda pair: pair[0].total_us, reverse=True)
    problems = dict.fromkeys(
        (as_problem(before.product.work), as_problem(after.product.work))
        for before, after in longest_first
    )
    return tuple(
        (before, after) for before, after in problems if before is not None and after is not None
    )


def _better_alignment(pairs: Sequence[tuple[AccountLine, AccountLine]]) -> int | None:
    """Return the smallest new alignment, in bytes, of the problems that become better aligned.

    Return None if no problem does.
    """
    better = (
        after.alignment
        for before, after in _changed_problems(pairs)
        if after.alignment > before.alignment
    )
    return min(better, default=None)


def _reason(
    changes: Mapping[str, tuple[int, int]],
    pairs: Sequence[tuple[AccountLine, AccountLine]],
    products_gain: float,
    share: float,
    more_flops: float,
) -> str:
    """Explain a change: its effect on the changed operations, and on the size of the model."""
    roles = list(dict.fromkeys(before.product.role for before, _ in pairs))
    if len(roles) > _NAMED_ROLES:
        roles = [*roles[:_NAMED_ROLES], "…"]
    direction = "faster" if products_gain >= 0 else "slower"
    percent = f"{abs(products_gain):.1%}"
    effect = "is about as fast as before" if percent == "0.0%" else f"becomes {percent} {direction}"
    sentences = [f"{share:.0%} of the step ({', '.join(roles)}) {effect}."]
    alignment = _better_alignment(pairs)
    if alignment is not None:
        sentences.append(f"Operands become aligned to {alignment} bytes.")
    if more_flops <= 0:
        model_change = "becomes smaller" if more_flops < 0 else "changes"
        sentences.append(f"The model {model_change}; its quality is not predicted.")
    elif all("vocab" in name or "classes" in name for name in changes):
        sentences.append("The new entries are never used.")
    elif any(new < old for old, new in changes.values()):
        sentences.append("The model changes; its quality is not predicted.")
    else:
        sentences.append("The model becomes larger.")
    return " ".join(sentences)
