"""Plan a run: which cases it measures, in which order, and what each is expected to take.

A plan is made once. Cases are admitted by lines (:func:`sweeps.planning.lines.lines_of`), whole or
not at all, because a line with holes answers nothing. Lines come in the order of what they add.
Within a sweep, the first few lines already cover its axes. Among sweeps, each gets the same share
of the time. A line is admitted if its expected cost fits what is left of the budget.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from kernels.common.documents import COUNT, NOT_NEGATIVE, POSITIVE, SIZE, Each, misfit
from kernels.common.errors import UserError
from kernels.machine import Machine
from kernels.operation import Workload, products_of
from kernels.problem import DTYPE_BYTES, Problem
from kernels.timemodel.constants import default_constants
from kernels.timemodel.estimate import Array, Shapes, Tiles, fastest
from kernels.timemodel.workload_time import moving_seconds, workload_seconds
from sweeps.cases.case import CONFIRM, Case
from sweeps.planning.compiling import compilers, kernel_key
from sweeps.planning.lines import lines_of, share_out
from sweeps.store import START_OVER
from sweeps.timing.clock import CpuClock, CudaClock
from sweeps.timing.sampler import SUSTAINED_BATCH, SUSTAINED_SETTLE
from sweeps.timing.statistics import CHECKPOINTS

_T = TypeVar("_T")

_SAMPLES, _PLANNED_SAMPLES = CHECKPOINTS[0], 10
_SOUGHT = ("alignment", "steps", "conv-layouts")
"""Sweeps that people look for first. If time is short, other sweeps lose lines before these do."""
_SOUGHT_TIMES = 6.0  # factor on the time that these sweeps get, compared with others
_ADMITTED = 0.92  # share of the budget that a plan fills, because a machine is slower at times
_LARGEST_SHARE = 0.02  # share of the budget that one case may take
# A case may exceed that share by this factor if its line stays whole that way. If even the cheapest
# case of a sweep exceeds the share, the others may cost up to this many times as much as that case.
_CHEAPEST_TIMES = 2.0
_BURST_SECONDS = {"cpu": 5e-4, "gpu": 1e-3}  # one batch, with its gate and its flush
_CHECK_PASSES = {2: 6, 4: 3}  # passes over all operands for one check, by bytes per element

# Further costs of cases on a GPU. They were not measured: they are expectations for an H200, from
# reading the sources of PyTorch and Triton.
_WAKE_SECONDS = 0.3 / 64  # the device is woken after each chunk
_CONV_PLAN_SECONDS = 0.05  # cuDNN builds a plan for every new convolution
_AUTOTUNE_SECONDS = 0.6  # cuDNN's autotuner builds and times ten plans
_COMPILE_SECONDS = 2.0  # one Triton kernel on one core; the compiling processes share the kernels

_NAMING_START, _NAMING_SECONDS, _NAMING_SHARE = 5.0, 0.005, 0.1


_TEXTS = (
    "id", "sweep", "op", "dtype", "layout?", "implementation", "config", "mode", "cache", "fill",
)  # fmt: skip
_COSTS = {
    "prepare": NOT_NEGATIVE, "check": NOT_NEGATIVE, "passes": NOT_NEGATIVE,
    "slower": Each([[POSITIVE]]),
}  # fmt: skip
_PLAN = {
    "cases": [dict], "budget_s": NOT_NEGATIVE, "shards": SIZE, "sweeps": [str],
    "left_out": Each(COUNT), "recorded_elsewhere": [str], "costs?": _COSTS,
}  # fmt: skip
_PLANNED = {**dict.fromkeys(_TEXTS, str), "expected_s": NOT_NEGATIVE, "shard?": SIZE}


@dataclass(frozen=True)
class PlanEntry:
    """A case of the plan, with the expected seconds of its preparation and of six samples."""

    case: Case
    expected: float
    checking: float = 0.0  # the part of these seconds in which results are checked
    more: float = 0.0  # seconds of the further samples that the plan leaves time for
    shard: int | None = None  # number of the shard that measures it; None if there is only one

    def to_json(self) -> dict[str, Any]:
        """Return the entry as a row of the plan's cases."""
        row = {"id": self.case.id, **self.case.columns(), "expected_s": round(self.expected, 6)}
        return row if self.shard is None else {**row, "shard": self.shard}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> PlanEntry:
        """Build an entry from its row; ``checking`` and ``more`` are not stored in it.

        Raises:
            UserError: if the row does not describe a case.
        """
        fault = misfit(row, _PLANNED, "a case of the plan in run.json")
        try:
            if not fault:
                case = Case.from_columns(row)
                _ = case.id  # raises ValueError for text with half a surrogate pair
                return cls(case, row["expected_s"], shard=row.get("shard"))
        except (ValueError, TypeError, KeyError, OverflowError):
            fault = "a case of the plan in run.json has no sizes"
        raise UserError(f"{fault}. {START_OVER}")


def read_plan(plan: Mapping[str, Any]) -> list[PlanEntry]:
    """Return the entries of the plan in run.json.

    Raises:
        UserError: if a run cannot resume that plan.
    """
    if fault := misfit(plan, _PLAN, "the plan in run.json"):
        raise UserError(f"{fault}. {START_OVER}")
    planned = [PlanEntry.from_json(row) for row in plan["cases"]]
    # The entries of a plan with one shard need no number.
    valid_shards = {*range(1, plan["shards"] + 1)} if plan["shards"] > 1 else {None, 1}
    if not {entry.shard for entry in planned} <= valid_shards:
        raise UserError(
            f"the plan in run.json has cases that belong to none of its shards. {START_OVER}"
        )
    return planned


@dataclass(frozen=True)
class Costs:
    """Costs of a case in seconds, without its launches, and the launches' ratio to the estimate.

    The defaults for a CPU were measured on one; a run measures its own
    (:func:`sweeps.running.probing.probe`). The defaults for a GPU are expectations for an H200.
    """

    prepare: float = 0.02
    """Seconds to prepare operands and warm up."""
    check: float = 1.5e-3
    """Seconds that one check of a result takes on the host, which runs 90 operations for it."""
    passes: float = 1.0
    """Factor on the number of passes over all operands that one check makes at full bandwidth."""
    slower: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """Corrections of the estimate for each :func:`kind_of`, as pairs of FLOPs and a factor.

    Launches of that size take longer than estimated by that factor. Between the pairs it is
    interpolated."""

    def to_json(self) -> dict[str, Any]:
        """Return the costs as run.json has them."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any] | None, kind: str) -> Costs:
        """Build the costs from run.json; the inverse of :meth:`to_json`.

        A recording without costs gets the default.

        Raises:
            UserError: if a factor is not a pair of numbers.
        """
        if row is None:
            return cls.default(kind)
        all_points = [point for points in row["slower"].values() for point in points]
        if any(len(point) != 2 for point in all_points):
            raise UserError(f"the costs of the plan in run.json are damaged. {START_OVER}")
        return cls(**{name: row[name] for name in _COSTS})

    @classmethod
    def default(cls, kind: str) -> Costs:
        """Return the costs of a ``cpu`` or a ``gpu`` that has not been probed."""
        return cls() if kind == "cpu" else cls(check=8e-4)

    def launch_seconds(self, cases: Sequence[Case], machine: Machine) -> list[float]:
        """Return the expected seconds of one launch of each case."""
        estimates = expected_seconds([case.problem for case in cases], machine)
        return [
            seconds * self._factor(case) for case, seconds in zip(cases, estimates, strict=True)
        ]

    def _factor(self, case: Case) -> float:
        """Return the factor on the estimate of a case; 1 if its kind was not probed.

        It is interpolated between the logarithms of FLOPs and factors.
        """
        points = self.slower.get(kind_of(case)) if self.slower else None
        if not points:
            return 1.0
        log_flops, log_factors = np.log(np.array(points)).T
        # Operations that only move memory have no FLOPs, and zero has no logarithm.
        log_case_flops = math.log(max(case.problem.flops, 1))
        return float(np.exp(np.interp(log_case_flops, log_flops, log_factors)))


def kind_of(case: Case) -> str:
    """Return a case's operation, pass and dtype as one text, such as ``conv fprop bf16``.

    They decide how well the estimate fits the case.
    """
    columns = case.columns()
    return " ".join(str(columns[name]) for name in ("op", "pass", "dtype") if columns.get(name))


@dataclass(frozen=True)
class Plan:
    """Admitted cases in order, and how many of each sweep did not fit the budget."""

    planned: tuple[PlanEntry, ...]
    left_out: Mapping[str, int]


def naming_reserve(cases: Sequence[Case], budget: float) -> float:
    """Return the seconds of a budget that are left for naming kernels, at most a tenth of it.

    Naming starts another process, which prepares and launches each case again.
    """
    seconds = _NAMING_START + sum(_NAMING_SECONDS + _cudnn_seconds(case) for case in cases)
    return min(_NAMING_SHARE * budget, seconds)


def make_plan(
    sweeps: Mapping[str, Sequence[Case]],
    machine: Machine,
    budget: float,
    shards: int = 1,
    in_order: bool = False,
    cores: int | None = None,
    together: Collection[Collection[str]] = (),
    before: Sequence[PlanEntry] = (),
    costs: Costs | None = None,
) -> Plan:
    """Order the cases of all sweeps and admit those that fit ``budget`` seconds of each shard.

    The next line comes from the sweep that has had the least time, so that every sweep is
    represented. Sweeps that people look for first get six times as much time as others. With
    ``in_order``, a sweep begins only when the one before it is complete, and one case may take the
    whole budget. A sweep of which no line fits gives single cases instead.

    Without ``in_order``, no case may take over 2% of the budget, unless every case of its sweep
    does. Cases that are compared with each other, or with cases planned ``before``, go to one shard
    (:mod:`sweeps.planning.lines`).

    Args:
        sweeps: cases by the names of their sweeps.
        machine: machine that they will run on.
        budget: measuring time in seconds.
        shards: number of GPUs that share the work, each with that budget.
        in_order: complete each sweep before the next one begins.
        cores: cores of the host, which compile kernels; None means as many as this host has.
        together: groups of sweeps that are compared with each other.
        before: entries that are planned already.
        costs: costs of a case; None means those of an unknown machine of this kind.
    """
    # 1. Estimate the cost of each case, and the limit that applies to the cases of each sweep.
    case_limit = budget if in_order else _LARGEST_SHARE * budget
    compile_seconds = _COMPILE_SECONDS / max(1, compilers(machine, cores))
    compiled: set[tuple[object, ...]] = set()
    costs = costs or Costs.default(machine.kind)
    entries = {
        name: _with_costs(cases, machine, compile_seconds, compiled, costs)
        for name, cases in sweeps.items()
        if cases
    }
    largest = {name: _largest_cost(members, case_limit) for name, members in entries.items()}
    # 2. Assign the cases to shards.
    if shards > 1:
        entries = _shared_out(entries, shards, together, before)
    # 3. Admit whole lines. The next one is of the sweep with the least time for its weight.
    room = _Room(budget, naming=machine.kind == "gpu")
    queues = {name: deque(_in_lines(members)) for name, members in entries.items()}
    spent = dict.fromkeys(queues, 0.0)
    weight = {name: _SOUGHT_TIMES if name in _SOUGHT else 1.0 for name in queues}
    planned: list[PlanEntry] = []
    admitted: set[str] = set()
    while queues:
        if in_order:
            name = next(iter(queues))
        else:
            name = min(queues, key=lambda sweep: spent[sweep] / weight[sweep])
        line = queues[name].popleft()
        if not queues[name]:
            del queues[name]
        # A line that crosses an admitted one shares a case with it.
        new_entries = [e for e in _affordable(line, largest[name]) if e.case.id not in admitted]
        if room.take(new_entries):
            spent[name] += sum(entry.expected for entry in new_entries)
            planned += new_entries
            admitted |= {entry.case.id for entry in new_entries}
    # 4. Admit single cases of the sweeps of which no line fitted.
    for name, members in entries.items():
        if not spent[name]:
            for entry in _bit_reversal_order(members):
                if entry.expected <= largest[name] and room.take([entry]):
                    planned.append(entry)
                    admitted.add(entry.case.id)
    left_out = {
        name: sum(e.case.id not in admitted for e in members) for name, members in entries.items()
    }
    return Plan(tuple(planned), {name: count for name, count in left_out.items() if count})


class _Room:
    """Time that is left of the budget of each shard.

    With ``naming``, time is reserved for naming kernels at the end.
    """

    def __init__(self, budget: float, naming: bool) -> None:
        self._budget = budget
        self._most_naming = _NAMING_SHARE * budget if naming else 0.0
        self._total: dict[int | None, float] = defaultdict(float)
        self._naming: dict[int | None, float] = defaultdict(
            lambda: min(self._most_naming, _NAMING_START)
        )

    def take(self, entries: Sequence[PlanEntry]) -> bool:
        """Take the time of some cases if all of them fit, and return whether they do."""
        # Seconds of measuring and of naming that the shards of these cases would have then.
        total: dict[int | None, float] = {}
        naming: dict[int | None, float] = {}
        for entry in entries:
            shard = entry.shard
            total[shard] = total.get(shard, self._total[shard]) + entry.expected + entry.more
            case_naming = _NAMING_SECONDS + _cudnn_seconds(entry.case)
            naming[shard] = min(
                self._most_naming, naming.get(shard, self._naming[shard]) + case_naming
            )
        if any(total[shard] > _ADMITTED * (self._budget - naming[shard]) for shard in total):
            return False
        self._total |= total
        self._naming |= naming
        return True


def _affordable(line: Sequence[PlanEntry], largest: float) -> Sequence[PlanEntry]:
    """Return a line without the cases that cost too much, which are those of its largest sizes.

    A line of similar sizes stays whole if the largest ones cost only a little too much.
    """
    costs = [entry.expected for entry in line]
    if min(costs) <= largest and max(costs) <= _CHEAPEST_TIMES * largest:
        return line
    return [entry for entry in line if entry.expected <= largest]


def _in_lines(entries: Sequence[PlanEntry]) -> list[list[PlanEntry]]:
    """Return the lines of a sweep in bit-reversal order, each of them in that order as well."""
    cases = [entry.case for entry in entries]
    lines = [[entries[i] for i in positions] for positions in lines_of(cases)]
    return [_bit_reversal_order(line) for line in _bit_reversal_order(lines)]


def _shared_out(
    queues: Mapping[str, Sequence[PlanEntry]],
    shards: int,
    together: Collection[Collection[str]],
    before: Sequence[PlanEntry],
) -> dict[str, list[PlanEntry]]:
    """Return the entries of each sweep with their shards.

    Series keep the shard that has their cases ``before``. The first shard measures the cases that
    advice requests. ``together`` has groups of sweeps that are compared with each other.
    """
    entries = [*before, *(entry for queue in queues.values() for entry in queue)]
    assigned = {entry.case.id: entry.shard for entry in before if entry.shard is not None}
    assigned |= {entry.case.id: 1 for entry in entries if entry.case.sweep == CONFIRM}
    cases = [entry.case for entry in entries]
    seconds = [entry.expected for entry in entries]
    numbers = share_out(cases, seconds, shards, together, assigned)
    shard_of = {case.id: number for case, number in zip(cases, numbers, strict=True)}
    return {
        name: [replace(entry, shard=shard_of[entry.case.id]) for entry in queue]
        for name, queue in queues.items()
    }


def _largest_cost(entries: Iterable[PlanEntry], limit: float) -> float:
    """Return the most seconds that a case of a sweep may cost: ``limit``, unless all cost more.

    A sweep in which every case costs more is represented by its cheapest cases. For example, where
    a cache of 260 MB is flushed before each of six samples, even the smallest cold GEMM takes half
    a second.
    """
    cheapest = min(entry.expected for entry in entries)
    return limit if cheapest <= limit else _CHEAPEST_TIMES * cheapest


def _bit_reversal_order(values: Sequence[_T]) -> list[_T]:
    """Return values in bit-reversal order: the first, the middle, the quarters, and so on.

    Any beginning of that order samples the values evenly.
    """
    bits = max(1, (len(values) - 1).bit_length())

    def reversed_bits(position: int) -> int:
        return int(f"{position:0{bits}b}"[::-1], 2)

    return [values[position] for position in sorted(range(len(values)), key=reversed_bits)]


def _with_costs(
    cases: Sequence[Case],
    machine: Machine,
    compile_seconds: float,
    compiled: set[tuple[object, ...]],
    costs: Costs,
) -> list[PlanEntry]:
    """Return each case with the seconds of its preparation and of six samples.

    ``compiled`` has the kernels that earlier cases have compiled. The kernels of these cases are
    added to it.
    """
    launch_seconds = costs.launch_seconds(cases, machine)
    planned: list[PlanEntry] = []
    for case, seconds in zip(cases, launch_seconds, strict=True):
        # 1. Estimate the batch of launches that one sample times.
        batch = max(seconds, _BURST_SECONDS[machine.kind])
        if case.mode == "sustained":
            batch = SUSTAINED_SETTLE + max(seconds, SUSTAINED_BATCH)
        elif machine.kind == "cpu" and case.cache != "warm":
            batch += 2 * machine.l2_bytes / machine.bandwidth  # the flush
        # 2. Add up the case's cost. Four launches come before the samples.
        checking = _checking_seconds(case, seconds, machine, costs)
        cost = costs.prepare + 4 * seconds + _SAMPLES * batch + checking
        if machine.kind == "gpu":
            cost += _WAKE_SECONDS + _cudnn_seconds(case)
            # Only the first of the cases that share a kernel waits for the compiler.
            key = kernel_key(case)
            if key is not None and key not in compiled:
                compiled.add(key)
                cost += compile_seconds
        more = (_PLANNED_SAMPLES - _SAMPLES) * batch
        planned.append(PlanEntry(case, cost, checking, more))
    return planned


def _checking_seconds(case: Case, seconds: float, machine: Machine, costs: Costs) -> float:
    """Return the seconds for checking a case's results, where one launch takes ``seconds``.

    Results are checked three times: before the samples, in a launch that also warms up; after them;
    and in one sample of twelve, where every launch of a cold batch has its own result.
    """
    check_seconds = costs.passes * checked_bytes(case) / machine.bandwidth
    clock = CudaClock if machine.kind == "gpu" else CpuClock
    if case.cache == "warm":
        results_of_batch = 1
    else:
        # The estimate is 0 where a workload cannot run; the lower limit keeps the division valid.
        results_of_batch = math.ceil(clock.batch_seconds / max(seconds, 1e-9))
    return 3 * costs.check + seconds + (2 + results_of_batch) * check_seconds


def checked_bytes(case: Case) -> float:
    """Return the bytes that one check of a result moves in its passes over the operands."""
    return _CHECK_PASSES[DTYPE_BYTES[case.problem.dtype]] * case.problem.bytes


def _cudnn_seconds(case: Case) -> float:
    """Return the seconds that cuDNN needs for a new convolution before its first launch."""
    if case.implementation != "cudnn":
        return 0.0
    return _AUTOTUNE_SECONDS if "autotune=on" in case.config else _CONV_PLAN_SECONDS


def expected_seconds(workloads: Sequence[Workload], machine: Machine) -> list[float]:
    """Return the estimated seconds of one launch of each workload; 0 where it cannot run.

    The estimate uses the shipped constants. An operation takes as long as its GEMMs and
    convolutions or, if it has none, as long as moving its bytes.
    """
    products: list[Sequence[tuple[int, Problem]]] = []
    moving: list[float] = []
    for workload in workloads:
        is_supported = workload.dtype in machine.peaks
        products.append(products_of(workload) if is_supported else ())
        moving.append(moving_seconds(workload, machine) if is_supported else 0.0)

    def seconds_of(_: Sequence[int], problems: Sequence[Problem]) -> Array:
        """Return the estimated seconds of each problem; problems of one dtype share a call."""
        seconds = np.empty(len(problems))
        for dtype in {problem.dtype for problem in problems}:
            positions = [i for i, problem in enumerate(problems) if problem.dtype == dtype]
            shapes = Shapes.from_problems([problems[i] for i in positions])
            tiles = Tiles.library(machine, dtype)
            constants = default_constants(machine.generation, dtype)
            peak = machine.peak(dtype)
            seconds[positions] = fastest(shapes, tiles, machine, peak, constants).time
        return seconds

    return [float(seconds) for seconds in workload_seconds(products, moving, seconds_of)]
