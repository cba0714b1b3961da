"""Judge common performance rules by the measurements in recordings and public tables.

``rules.toml`` says what each rule claims, which sweeps test it and how cases are paired. Both cases
of a pair come from one run. Verdicts depend on measured effects and their intervals
(:mod:`analysis.rules.rule_finding`), never on predictions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.imports.public import PublicRows
from analysis.model.calibrate import calibrate
from analysis.model.fitted import sampled_positions
from analysis.model.predict import Model
from analysis.model.query import Query
from analysis.recordings.imported import import_again
from analysis.recordings.load import Recording, workloads_of
from analysis.recordings.repetition import places_of, steady_times
from analysis.rules.catalogue import Rule, all_rules
from analysis.rules.pairing import PAIRINGS, Match, TimedCase, pairs_of
from analysis.rules.rule_finding import Effect, RuleFinding, find_verdict
from kernels.common.counts import counted
from kernels.common.errors import UserError
from kernels.common.program import target
from kernels.config import HAND_WRITTEN
from kernels.machine import Machine
from kernels.operation import Series, products_of
from kernels.problem import TIMED_DTYPES, Problem
from kernels.timemodel.estimate import Array
from kernels.timemodel.workload_time import moving_seconds, workload_seconds

_MAX_GROUPS = 6  # maximum number of groups of pairs whose effects a reason lists
_UNCERTAIN_SPAN = 10.0  # ratio of an interval's ends above which the interval is not printed
NOT_MEASURED = "not measured here"
_UNUSABLE = "measured, but unusable"


@dataclass(frozen=True)
class RuleResult:
    """Result of a rule: the verdict, the effect with its interval, and the reason.

    Attributes:
        verdict: verdict on the claim, or :data:`NOT_MEASURED`.
        effect: quantity that the rule's field ``effect`` in ``rules.toml`` names, usually a ratio
            of times or speeds that is above 1 if the advice pays; None if the rule was not judged.
        lo: lower end of the effect's interval, usually a 95% interval (``rules.md`` names the
            exceptions); None if the rule was not judged.
        hi: upper end of the same interval; None if the rule was not judged.
        predicted: the effect that the model predicts; None if it predicts none.
        cases: number of pairs, or of models or steps if the rule is about whole models; 0 if the
            rule was not judged.
        reason: description of the comparison, or the reason why the rule was not judged.
    """

    id: str
    statement: str
    source: str
    verdict: str
    effect: float | None
    lo: float | None
    hi: float | None
    predicted: float | None
    cases: int
    reason: str

    @property
    def unusable(self) -> bool:
        """True if the rule's cases were measured, but only by an unusable run."""
        return self.verdict == NOT_MEASURED and self.reason.startswith(_UNUSABLE)

    def to_json(self) -> dict[str, Any]:
        """Return the result as a record of rules.json."""
        return asdict(self)


@dataclass(frozen=True)
class Evidence:
    """Cases that rules may pair, all from one run or one table.

    Attributes:
        predicted: predicted seconds of each case; NaN for a case that the model cannot predict.
        public: True if the cases come from an imported or public table, which has neither sweeps
            nor intervals.
        planned: sweeps that the run planned to measure, and for which its budget was too small.
        unusable: sweeps that an unusable run measured; empty for a usable run.
    """

    machine: Machine
    cases: Sequence[TimedCase]
    predicted: Array
    public: bool = False
    planned: frozenset[str] = frozenset()
    unusable: frozenset[str] = frozenset()

    @classmethod
    def none(cls, machine: Machine) -> Evidence:
        """Return evidence that has no cases."""
        return cls(machine, [], np.empty(0))

    @classmethod
    def from_unusable(cls, recording: Recording) -> Evidence:
        """Return evidence that has no cases, but names the sweeps that an unusable run measured."""
        measured = frozenset(recording.ok["sweep"])
        return replace(cls.none(recording.machine), unusable=measured)

    @classmethod
    def from_recording(cls, recording: Recording) -> Evidence:
        """Return a recording's evidence: the vendor libraries' cases, timed in short batches.

        If the recording was not imported, cases with fewer than six samples are left out, because
        their times have no interval.

        Raises:
            UserError: if a rounds.csv or the predictions of an import cannot be read.
        """
        if recording.public:
            return cls._from_imported(recording)
        # 1. Collect all cases with times, corrected for the machine's speed in each round. If there
        # are very many GEMMs and convolutions, the model is fitted to a sample of them.
        products = recording.products
        products = products.iloc[sampled_positions(products)]
        is_fitted = recording.ok.index.isin(products.index)
        rows = recording.ok.reset_index(drop=True)
        log_time, error = steady_times(rows, recording)
        gpus, _ = pd.factorize(places_of(rows[["worker", "gpu"]]))
        cases = _timed_cases(rows, np.exp(log_time), error, gpus)
        # 2. Predict the fitted cases with models that were fitted without them, and all others with
        # the fitted model.
        model = Model(recording.machine)
        predicted = np.full(len(cases), np.nan)
        if len(products):
            calibration = calibrate(recording.machine, products.reset_index(drop=True))
            model = calibration.model
            predicted[is_fitted] = calibration.held_out.estimate.time
        not_fitted = np.flatnonzero(~is_fitted)
        predicted[not_fitted] = predicted_seconds([cases[i] for i in not_fitted], model)
        # 3. Keep the cases that rules may use. The error of a case with fewer than six samples is
        # NaN.
        kept = np.flatnonzero(_are_bursts_of_libraries(rows) & np.isfinite(error))
        planned = _cut_short(recording.run)
        kept_cases = [cases[i] for i in kept]
        return cls(recording.machine, kept_cases, predicted[kept], planned=planned)

    @classmethod
    def _from_imported(cls, recording: Recording) -> Evidence:
        """Return the evidence of an imported table, whose times have no intervals.

        Cases in fp8 are left out, because their times include the quantisation of the activations.

        Raises:
            UserError: if predicted.csv is missing or damaged.
        """
        # predicted.csv has one row for each case of the same sample, in the same order.
        products = recording.products
        products = products.iloc[sampled_positions(products)]
        path = recording.folder / "predicted.csv"
        try:
            predicted_us = pd.read_csv(path, usecols=["time_us"], dtype=float)["time_us"].to_numpy()
        except (OSError, ValueError):
            predicted_us = np.empty(0)
        if len(predicted_us) != len(products):
            raise UserError(f"{path} is missing or damaged. {import_again(recording.folder)}")
        is_timed_dtype = products["dtype"].isin(TIMED_DTYPES)
        kept = np.flatnonzero(is_timed_dtype & _are_bursts_of_libraries(products))
        rows = products.iloc[kept]
        seconds = rows["time_us"].to_numpy(dtype=float) * 1e-6
        unknown = np.full(len(rows), np.nan)
        cases = _timed_cases(rows, seconds, unknown, np.zeros(len(rows), dtype=int))
        return cls(recording.machine, cases, predicted_us[kept] * 1e-6, public=True)

    @classmethod
    def from_public(cls, source: PublicRows, model: Model) -> Evidence:
        """Return the evidence of a public table or a user's file, whose times have no intervals.

        The predictions come from ``model``, even if it was fitted to the same cases.
        """
        rows = zip(source.problems, source.implementations, source.seconds, strict=True)
        cases = [
            TimedCase(
                problem,
                implementation,
                config="",
                cache="",
                sweep="",
                seconds=float(seconds),
                error=np.nan,
            )
            for problem, implementation, seconds in rows
        ]
        return cls(model.machine, cases, predicted_seconds(cases, model), public=True)

    def matches(self, rule: Rule) -> tuple[list[TimedCase], list[Match], Array]:
        """Return the cases that a rule may use, the pairs of these cases, and predicted seconds.

        The predicted seconds have one element per case. All three results are empty if the rule
        is about whole models or about another kind of machine.
        """
        if rule.models or (rule.on and rule.on != self.machine.kind):
            return [], [], np.empty(0)
        # An imported table has no sweeps, so a rule may use all of its cases.
        sweeps = {*rule.sweeps, *rule.also}
        positions = [i for i, case in enumerate(self.cases) if self.public or case.sweep in sweeps]
        cases = [self.cases[i] for i in positions]
        matches = list(PAIRINGS[rule.pairing](cases, self.machine, **rule.options))
        return cases, matches, self.predicted[positions]


def _cut_short(run: Mapping[str, Any]) -> frozenset[str]:
    """Return the planned sweeps for which the run's budget was too small.

    These are the sweeps whose cases were not all planned, or not all finished. If run.json does not
    count the cases of a sweep, they are assumed to be unfinished.
    """
    counts = run.get("sweeps", {})
    left_out = run["plan"].get("left_out", {})
    return frozenset(
        name
        for name in run["plan"].get("sweeps", ())  # a run.json may lack this list
        if name in left_out or counts.get(name, {}).get("open", 1)
    )


def _timed_cases(rows: pd.DataFrame, seconds: Array, error: Array, gpus: Array) -> list[TimedCase]:
    """Convert rows, which have the columns of measurements.csv, to cases in the same order."""
    # These columns have the order of the fields of TimedCase.
    columns = (
        workloads_of(rows),
        rows["implementation"],
        rows["config"].fillna(""),
        rows["cache"],
        rows["sweep"],
        seconds,
        error,
        gpus,
    )
    return [TimedCase(*row) for row in zip(*columns, strict=True)]


def _are_bursts_of_libraries(rows: pd.DataFrame) -> pd.Series:
    """Return a mask of the vendor libraries' cases that were timed in short batches."""
    return ~rows["implementation"].isin(list(HAND_WRITTEN)) & (rows["mode"] == "burst")


def predicted_seconds(cases: Sequence[TimedCase], model: Model) -> Array:
    """Return the predicted seconds of each case: the sum over its GEMMs and convolutions.

    A case without GEMMs or convolutions takes the time of a launch, plus the time to move its bytes
    at the machine's bandwidth. The result is NaN for a case in a dtype that the machine does
    not support.
    """
    machine = model.machine
    # For each case: its GEMMs and convolutions with their counts, and the seconds that it takes if
    # it only moves memory.
    products: list[Sequence[tuple[int, Problem]]] = []
    memory_times = []
    for case in cases:
        is_known = case.workload.dtype in machine.peaks
        products.append(_products(case) if is_known else ())
        memory_times.append(moving_seconds(case.workload, machine) if is_known else np.nan)

    def seconds_of(owners: Sequence[int], problems: Sequence[Problem]) -> Array:
        """Predict each problem's time in seconds; ``owners`` has the positions of their cases."""
        implementations = [cases[i].implementation for i in owners]
        return model.predict(Query.with_implementations(problems, implementations)).estimate.time

    return workload_seconds(products, memory_times, seconds_of)


def _products(case: TimedCase) -> Sequence[tuple[int, Problem]]:
    """Return (count, problem) for each GEMM and convolution that a case computes.

    A series of GEMMs that was timed fused counts as one GEMM.
    """
    workload = case.workload
    if isinstance(workload, Series) and "fused=on" in case.config:
        return ((1, workload.fused),)
    return products_of(workload)


class _Candidate(NamedTuple):
    """Evidence of one run, and what :meth:`Evidence.matches` returns for a rule."""

    evidence: Evidence
    cases: list[TimedCase]
    matches: list[Match]
    predicted: Array


def judge_all(
    evidence: Sequence[Evidence], model_rows: Mapping[str, RuleResult] | None = None
) -> list[RuleResult]:
    """Judge each rule by the run with the strongest pairs (:func:`_strength`); return all results.

    Args:
        evidence: evidence of the runs of one machine. Cases of different runs are never paired.
        model_rows: results of the rules about profiled models, by the rule's id. A rule about
            models that has no result here is reported as :data:`NOT_MEASURED`.
    """
    results = []
    for rule in all_rules().values():
        if model_rows and rule.id in model_rows:
            results.append(model_rows[rule.id])
            continue
        candidates = [
            _Candidate(run, *run.matches(rule)) for run in evidence if rule.public or not run.public
        ]
        best = max(candidates, key=lambda candidate: _strength(candidate.matches), default=None)
        if best is not None and best.matches:
            results.append(_judge_rule(rule, best))
            continue
        sweeps = set(rule.sweeps)
        # Every GPU is assumed to have what a rule needs.
        results.append(
            not_measured(
                rule,
                can_be_measured=any(run.machine.kind == "gpu" for run in evidence),
                planned=any(run.planned & sweeps for run in evidence),
                unusable=any(run.unusable & sweeps for run in evidence),
            )
        )
    return results


def _strength(matches: Sequence[Match]) -> tuple[bool, int]:
    """Return a sort key: True if any match has a control, and then the number of matches.

    Pairs with a control are better than any number of pairs without a control, because a rule that
    uses controls makes its claim only about pairs with a control.
    """
    return any(match.control is not None for match in matches), len(matches)


def not_measured(
    rule: Rule, can_be_measured: bool = False, planned: bool = False, unusable: bool = False
) -> RuleResult:
    """Return the result of a rule that could not be judged; the reason says what is missing.

    Args:
        rule: rule that could not be judged.
        can_be_measured: True if the machine has what the rule's ``needs`` names.
        planned: True if a run had too small a budget for any of the rule's sweeps.
        unusable: True if an unusable run measured any of the rule's sweeps.
    """
    run_rules = f"run {target('rules', 'record')}"
    if unusable:
        reason = f"{_UNUSABLE}: {run_rules} again on a quieter machine"
    elif rule.sweeps and (can_be_measured or not rule.needs):
        with_budget = " with a larger budget" if planned else ""
        noun = "sweep" if len(rule.sweeps) == 1 else "sweeps"
        reason = (
            f"needs pairs of cases from the {noun} {', '.join(rule.sweeps)}: "
            f"{run_rules}{with_budget}"
        )
    else:
        reason = f"needs {rule.needs}"
    return RuleResult(
        id=rule.id,
        statement=rule.statement,
        source=rule.source,
        verdict=NOT_MEASURED,
        effect=None,
        lo=None,
        hi=None,
        predicted=None,
        cases=0,
        reason=reason,
    )


def _judge_rule(rule: Rule, candidate: _Candidate) -> RuleResult:
    """Judge a rule by a candidate that has at least one match."""
    matches = candidate.matches
    if rule.claim is not None:
        matches = [replace(match, claim=rule.claim) for match in matches]
    pairs = pairs_of(candidate.cases, matches, rule.by, candidate.predicted)
    finding = find_verdict(pairs, rule.largest, rule.tolerance)
    if not np.isfinite(finding.effect.hi):
        # An effect without a finite interval, such as that of a single pair without measured
        # errors, decides nothing, so more pairs are needed.
        return not_measured(rule, can_be_measured=True)
    log_predicted = pairs.log_predicted
    if finding.best_group is not None:
        # The effect is that of one group, so the prediction must be of the same group.
        log_predicted = pairs.by_group()[finding.best_group].log_predicted
    # Pairs that the model cannot predict do not contribute to the predicted effect.
    log_predicted = log_predicted[np.isfinite(log_predicted)]
    return RuleResult(
        id=rule.id,
        statement=rule.statement,
        source=rule.source,
        verdict=finding.verdict,
        effect=finding.effect.value,
        lo=finding.effect.lo,
        hi=finding.effect.hi,
        predicted=float(np.exp(log_predicted.mean())) if len(log_predicted) else None,
        cases=len(pairs),
        reason=_reason(rule, candidate.evidence, finding, len(pairs)),
    )


def _reason(rule: Rule, evidence: Evidence, finding: RuleFinding, pair_count: int) -> str:
    """Say what was compared, what the source claims, and which effects the groups have."""
    prefix = "on a CPU, " if evidence.machine.kind == "cpu" else ""
    claim = "" if finding.claim is None else f", advertised {finding.claim:.2g}×"
    text = f"{prefix}{rule.effect}{claim}; {counted(pair_count, 'pair')}"
    if len(finding.groups) > 1:
        text += f": {_group_effects(finding.groups)}"
    return text


def _group_effects(groups: Mapping[str, Effect]) -> str:
    """List at most six groups with their effects, the effects farthest from 1 first."""
    farthest_first = sorted(groups, key=lambda name: -abs(np.log(groups[name].value)))
    phrases = [f"{name} {_group_effect(groups[name])}" for name in farthest_first[:_MAX_GROUPS]]
    if len(groups) > _MAX_GROUPS:
        phrases.append("…")
    return "; ".join(phrases)


def _group_effect(effect: Effect) -> str:
    """Format a group's effect; a very wide interval around 1 is replaced by "(uncertain)"."""
    if effect.sign == 0 and effect.hi > _UNCERTAIN_SPAN * effect.lo:
        return f"{effect.value:.2f}× (uncertain)"
    return str(effect)
