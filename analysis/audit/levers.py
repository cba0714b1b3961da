"""Find the changes of a model's dimensions that are worth making, and the gain of the step."""

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
from analysis.audit.candidates import REACH, Changes, candidates, pairs_of
from analysis.audit.runtime import Runtime
from analysis.audit.step_totals import SumChange, gain_of_step
from analysis.model.basis import Basis
from analysis.model.query import group_of
from kernels.common.errors import UserError
from kernels.problem import Problem
from sweeps.capture.captured import Captured, Dimension, Product

_CAPTURED = 2  # candidates per dimension that are captured, after all were estimated
_CLOSE = 0.01  # estimated gain by which a captured candidate may fall behind the best one
_NEGLIGIBLE = 0.05  # evidence for at most this share of the changed time is ignored

Capture = Callable[[Mapping[str, int]], Captured]
"""Function that captures the model again with some sizes changed."""


def words_of(changes: Mapping[str, tuple[int, int]]) -> str:
    """Return changes in words, such as ``vocab 50257 → 50304``."""
    return ", ".join(f"{name} {old} → {new}" for name, (old, new) in changes.items())


@dataclass(frozen=True)
class Lever:
    """A change of one or more dimensions, and what it does to the step.

    Attributes:
        changes: old and new value of each dimension.
        pairs: problems that change, before and after; those that take most time come first.
        gain: gain of the step with its 90% interval; 0.02 means 1/1.02 of the step's time.
        products: gain of only the matrix operations that change.
        share: share of the step's time that these operations take.
        parameters: how many more parameters there are, as a fraction.
        flops: how many more FLOPs there are, as a fraction.
        bytes: how many more bytes are moved, as a fraction.
        verdict: verdict on the change; for a smaller model, by its gain per FLOP.
        evidence: weakest evidence for the gain.
        reason: explanation in words.
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
        """The changes in words, such as ``vocab 50257 → 50304``."""
        return words_of(self.changes)

    @property
    def expected_gain(self) -> float:
        """Expected gain after costs; for a smaller model, per FLOP."""
        return net(_judged_gain(self.gain, self.flops), self.flops)

    @property
    def probability(self) -> float:
        """Probability that the change gains; for a smaller model, per FLOP."""
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
    """Return the best change of each dimension, of pairs that belong together, and of all at once.

    The change of all worthwhile dimensions at once comes first, then the others by expected gain.
    If no change of a dimension is worth making, its best one has the verdict to leave it.

    Args:
        captured: the model as it is.
        dimensions: dimensions that may change.
        capture: captures the model with other sizes.
        runtime: how the model is run.
        basis: what times on the machine rest on.
        account: account of the model as it is.
        more_parameters: how many more parameters the joint change may have, as a fraction.
        multiple: number that widths have to be multiples of; None for the usual multiples.
    """
    question = _Question.from_account(captured, capture, runtime, basis, account)
    best: list[Lever] = []
    for dimension in dimensions:
        tried = [
            lever
            for value in _promising(captured, dimension, question, multiple)
            if (lever := question.lever({dimension.name: (dimension.value, value)})) is not None
        ]
        if tried:
            best.append(max(tried, key=lambda lever: lever.expected_gain))
    # Changes of the same dimensions compete with one another.
    paired: dict[tuple[str, ...], list[Lever]] = {}
    for changes in pairs_of(captured, dimensions, runtime.tp):
        lever = question.lever(changes)
        # Where a head's width follows from their number, both changes are the same.
        if lever is not None and not any(lever.pairs == known.pairs for known in best):
            paired.setdefault(tuple(changes), []).append(lever)
    best += [max(levers, key=lambda lever: lever.expected_gain) for levers in paired.values()]
    best.sort(key=lambda lever: -lever.expected_gain)
    joint = _joint(best, question, more_parameters)
    return [joint, *best] if joint is not None else best


def try_levers(
    captured: Captured,
    changes: Sequence[Changes],
    capture: Capture,
    runtime: Runtime,
    basis: Basis,
    account: Account,
) -> tuple[list[Lever], dict[str, str]]:
    """Judge the given changes; return their levers in order, and why others cannot be judged.

    The second value maps a change in words to the reason why it cannot be judged: the model cannot
    be built that way, or no counted operation changes.
    """
    question = _Question.from_account(captured, capture, runtime, basis, account)
    levers: list[Lever] = []
    refused: dict[str, str] = {}
    for change in changes:
        try:
            lever = question.changed_step(change)
        except UserError as error:
            refused[words_of(change)] = str(error)
        else:
            levers.append(lever)
    return levers, refused


@dataclass(frozen=True)
class _Question:
    """A model as it is and how it is run; the starting point of all changes that are tried."""

    captured: Captured
    capture: Capture
    runtime: Runtime
    basis: Basis
    account: Account
    measured: Measurements

    @classmethod
    def from_account(
        cls, captured: Captured, capture: Capture, runtime: Runtime, basis: Basis, account: Account
    ) -> _Question:
        """Add the measurements near the operations of a model to its account."""
        problems = [p for line in account.lines if (p := as_problem(line.product.work)) is not None]
        measured = measurements_near(basis, list(dict.fromkeys(problems)), 1 + 2 * REACH)
        return cls(captured, capture, runtime, basis, account, measured)

    def lever(self, changes: Mapping[str, tuple[int, int]]) -> Lever | None:
        """Return the effect of a change; None if it has none or cannot be built."""
        try:
            return self.changed_step(changes)
        except UserError:
            return None

    def changed_step(self, changes: Mapping[str, tuple[int, int]]) -> Lever:
        """Return the effect of a change.

        Raises:
            UserError: if the model cannot be built that way, or if no counted operation changes.
        """
        changed = self.capture({name: to for name, (_, to) in changes.items()})
        account = account_of(changed, self.runtime, self.basis)
        # Lines are compared one by one, which needs the same number of them in both models.
        if len(account.lines) != len(self.account.lines):
            raise UserError("the model has other operations with these sizes.")
        pairs = [
            (before, after)
            for before, after in zip(self.account.lines, account.lines, strict=True)
            if before.product.work != after.product.work
        ]
        uncounted = [pair for pair in pairs if math.isnan(pair[0].time_us + pair[1].time_us)]
        pairs = [pair for pair in pairs if pair not in uncounted]
        if not pairs:
            raise UserError("no GEMM, convolution or attention that is counted changes.")
        gain, products, evidence = self._gain(pairs, account)
        more = account.flops / self.account.flops - 1
        worth = _judged_gain(gain, more)
        share = sum(before.total_us for before, _ in pairs) / self.account.step_us
        return Lever(
            changes,
            _changed_problems(pairs),
            gain,
            products,
            share,
            parameters=changed.parameters / self.captured.parameters - 1,
            flops=more,
            bytes=_moved_bytes(changed, self.runtime)
            / max(_moved_bytes(self.captured, self.runtime), 1)
            - 1,
            verdict=verdict(worth, evidence, more),
            evidence=evidence,
            reason=_reason(changes, pairs, products, share, more)
            + ("; attention is not counted" if uncounted else ""),
        )

    def _gain(
        self, pairs: Sequence[tuple[AccountLine, AccountLine]], changed: Account
    ) -> tuple[Gain, float, str]:
        """Return the gain of the step, the gain of only what changes, and the evidence.

        The evidence is the weakest one that more than a negligible share of the time rests on.
        """
        # 1. The ratio of each operation's times: measured if possible, else predicted.
        ratios = ratios_of(
            [(as_problem(a.product.work), as_problem(b.product.work)) for a, b in pairs], self.basis
        )
        changes: list[SumChange] = []
        unsure = 0.0
        weight = dict.fromkeys((PREDICTED, MEASURED, CONFIRMED), 0.0)
        for (old, new), predicted in zip(pairs, ratios, strict=True):
            evidence = PREDICTED
            if predicted is None:  # attention: both times are by the same framework
                faster = old.time_us / new.time_us
                spread = max(old.spread, new.spread)
                ends = faster * math.exp(-spread), faster * math.exp(spread)
                change = SumChange(old.total_us, (faster, *ends))
                if not spread:  # an assumed share of the peak, which may be another one
                    unsure += abs(new.total_us - old.total_us) * (ATTENTION_RANGE - 1)
            elif (known := self._known(old, new)) is not None:
                ratio, evidence = known
                change = SumChange(old.total_us, ratio)
            else:
                change = SumChange(old.total_us, *predicted)
            weight[evidence] += old.total_us
            changes.append(change)
        # 2. All other operations move more or fewer bytes.
        moved = sum(o.time_us for o in changed.other) - sum(o.time_us for o in self.account.other)
        unsure = math.hypot(unsure, abs(moved) * (MOVED_RANGE - 1))
        gain = gain_of_step(self.account.step_us, changes, moved, unsure)
        # 3. The weakest evidence decides, unless almost no time rests on it.
        before = math.fsum(change.before for change in changes)
        after = math.fsum(change.before / change.ratio[0] for change in changes)
        small = _NEGLIGIBLE * before
        evidence = next(name for name, total in weight.items() if total > small)
        return gain, before / after - 1, evidence

    def _known(
        self, old: AccountLine, new: AccountLine
    ) -> tuple[tuple[float, float, float], str] | None:
        """Return the measured ratio of an operation's times and its evidence; None if not measured.

        Samples of a confirmed pair come before other measurements.
        """
        before, after = as_problem(old.product.work), as_problem(new.product.work)
        assert before is not None
        assert after is not None
        for kind in ("pad", "choose"):
            if (ratio := self.measured.confirmed(before, after, kind)) is not None:
                return ratio, CONFIRMED
        fit = self.basis.model.fit(group_of(self.basis.library(before), before))
        ratio = measured_ratio(before, after, self.measured, fit)
        return None if ratio is None else (ratio, MEASURED)


def ratios_of(
    pairs: Sequence[tuple[Problem | None, Problem | None]], basis: Basis
) -> list[tuple[tuple[float, float, float], tuple[float, float]] | None]:
    """Predict the ratio of the times of each pair, the first over the second.

    Each ratio has its 90% interval and the factors by which this interval is wider in sums, below
    and above. Pairs that the model does not predict (attention) are None.
    """
    problems = list(dict.fromkeys(p for pair in pairs for p in pair if p is not None))
    if not problems:
        return [None] * len(pairs)
    predicted = basis.model.predict(basis.query(problems))
    place = {problem: i for i, problem in enumerate(problems)}
    found: list[tuple[tuple[float, float, float], tuple[float, float]] | None] = []
    for before, after in pairs:
        if before is None or after is None:
            found.append(None)
            continue
        i, j = place[before], place[after]
        fit = basis.model.fit(group_of(basis.library(before), before))
        spreads = (
            fit.spread(predicted.lo[i], predicted.hi[i]),
            fit.spread(predicted.lo[j], predicted.hi[j]),
        )
        times = float(predicted.estimate.time[i]), float(predicted.estimate.time[j])
        like = fit.has_like(before) and fit.has_like(after)
        in_sums = (fit.change_low, fit.change_high) if like else (1.0, 1.0)
        found.append((predicted_ratio(before, after, times, spreads, fit), in_sums))
    return found


def _judged_gain(gain: Gain, more_flops: float) -> Gain:
    """Return the gain that a verdict is based on.

    A smaller model is always faster, so only its gain per FLOP counts.
    """
    if more_flops >= 0:
        return gain
    return Gain(*((1 + part) * (1 + more_flops) - 1 for part in gain))


def _moved_bytes(captured: Captured, runtime: Runtime) -> int:
    moved = captured.moved_fused if runtime.kind == "compile" else captured.moved
    return sum(each.bytes for each in moved)


def _promising(
    captured: Captured, dimension: Dimension, question: _Question, multiple: int | None
) -> list[int]:
    """Return the most promising values, estimated only from the forward matrix operations."""
    # 1. The forward operations at the current value and at each candidate that is possible.
    values = candidates(dimension, captured, question.runtime.tp, multiple)
    # Where more heads are narrower, sizes do not grow in proportion.
    if len(values) < _CAPTURED or any(slope < 0 for slope in dimension.slopes.values()):
        return values
    asis, *changed = (
        _resized(captured, dimension, value, question.runtime)
        for value in (dimension.value, *values)
    )
    if asis is None:
        return []
    possible = [(v, row) for v, row in zip(values, changed, strict=True) if row is not None]
    values, sizes = [v for v, _ in possible], [asis, *(row for _, row in possible)]
    problems = list(dict.fromkeys(p for row in sizes for p, _ in row))
    if not problems:
        return []
    # 2. Predict each distinct problem once, and add up the times of each value.
    times = question.basis.model.predict(question.basis.query(problems)).estimate.time
    known = dict(zip(problems, times, strict=True))
    steps = [sum(known[p] * count for p, count in row) for row in sizes]
    flops = [sum(p.flops * count for p, count in row) for row in sizes]
    gains = {
        value: _net_gain(steps[0] / step - 1, work / flops[0] - 1)
        for value, step, work in zip(values, steps[1:], flops[1:], strict=True)
    }
    best_first = sorted(gains, key=lambda value: -gains[value])[:_CAPTURED]
    return [value for value in best_first if gains[value] >= gains[best_first[0]] - _CLOSE]


def _net_gain(gain: float, more_flops: float) -> float:
    return net(_judged_gain(Gain(gain, gain, gain), more_flops), more_flops)


def _resized(
    captured: Captured, dimension: Dimension, value: int, runtime: Runtime
) -> list[tuple[Problem, int]] | None:
    """Return the forward problems with one dimension changed as its slopes say, and their counts.

    None if the problems cannot have these sizes, for instance because heads do not divide.
    """
    forward: list[Product] = []
    for place, product in enumerate(captured.products):
        if product.of != place:
            continue
        sizes = {
            name: round(size + dimension.slopes.get((place, name), 0.0) * (value - dimension.value))
            for name, size in product.sizes.items()
        }
        try:
            forward.append(replace(product.resized(sizes), of=len(forward)))
        except UserError:
            return None
    try:
        products = runtime.products(replace(captured, products=tuple(forward)))
    except UserError:
        return None
    problems = [(as_problem(product.work), product.count) for product in products]
    return [(problem, count) for problem, count in problems if problem is not None]


def _joint(best: Sequence[Lever], question: _Question, more_parameters: float) -> Lever | None:
    """Combine the levers that are worth a change, one after another, while parameters are left.

    None if no two of them combine.
    """
    chosen: Lever | None = None
    for lever in best:
        if lever.verdict == LEAVE_IT or lever.parameters > more_parameters:
            continue
        if chosen is None:
            chosen = lever
            continue
        if set(lever.changes) & set(chosen.changes):
            continue
        both = question.lever({**chosen.changes, **lever.changes})
        if both is None or both.parameters > more_parameters:
            continue
        if both.expected_gain > chosen.expected_gain:
            chosen = both
    if chosen is None or any(chosen is lever for lever in best):
        return None
    return replace(chosen, reason=f"all of the profitable changes below together: {chosen.reason}")


def _changed_problems(
    pairs: Sequence[tuple[AccountLine, AccountLine]],
) -> tuple[tuple[Problem, Problem], ...]:
    """Return the pairs of problems to measure for a change, each once, the longest first."""
    unique: dict[tuple[Problem, Problem], None] = {}
    for old, new in sorted(pairs, key=lambda pair: -pair[0].total_us):
        before, after = as_problem(old.product.work), as_problem(new.product.work)
        if before is not None and after is not None:
            unique[before, after] = None
    return tuple(unique)


def _aligns(pairs: Sequence[tuple[AccountLine, AccountLine]]) -> bool:
    """Return True if the rows of any operation become multiples of a larger number of bytes."""
    both = [(as_problem(a.product.work), as_problem(b.product.work)) for a, b in pairs]
    return any(a is not None and b is not None and b.alignment > a.alignment for a, b in both)


def _reason(
    changes: Mapping[str, tuple[int, int]],
    pairs: Sequence[tuple[AccountLine, AccountLine]],
    products: float,
    share: float,
    more_flops: float,
) -> str:
    """Explain a change, and say what it means for the model's quality."""
    roles = list(dict.fromkeys(before.product.role for before, _ in pairs))
    role_names = ", ".join(roles[:4]) + (", …" if len(roles) > 4 else "")
    direction = "faster" if products >= 0 else "slower"
    words = f"{role_names}: {share:.0%} of the step, which becomes {abs(products):.1%} {direction}"
    if _aligns(pairs):
        words += "; rows become multiples of 16 bytes"
    if more_flops > 0:
        only_vocabulary = all("vocab" in name or "classes" in name for name in changes)
        quality = "entries that are never used" if only_vocabulary else "a larger model"
    else:
        size = "smaller" if more_flops < 0 else "different"
        quality = f"a {size} model; its quality is not predicted"
    return f"{words}; {quality}"
