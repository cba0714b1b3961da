"""The plan of a run: which cases, in which order, and what each is expected to take.

It is made once. Cases are admitted by lines (:func:`sweeps.planning.lines.lines_of`), whole or
not at all, because a line with holes answers nothing. Lines come in the order of what they add:
within a sweep, so that the first few already cover its axes; among sweeps, so that each gets the
same share of the time. A line is admitted while its expected cost fits what is left of the budget.
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
from kernels.common.program import target
from kernels.machine import Machine
from kernels.operation import Workload, products_of
from kernels.problem import DTYPE_BYTES, Problem
from kernels.timemodel.constants import default_constants
from kernels.timemodel.estimate import Array, Shapes, Tiles, fastest
from kernels.timemodel.workload_time import moving_seconds, workload_seconds
from sweeps.cases.case import CONFIRM, Case
from sweeps.planning.compiling import compilers, kernel_key
from sweeps.planning.lines import lines_of, share_out
from sweeps.timing.clock import CpuClock, CudaClock
from sweeps.timing.sampler import SUSTAINED_BATCH, SUSTAINED_SETTLE
from sweeps.timing.statistics import CHECKPOINTS

_T = TypeVar("_T")

_SAMPLES, _PLANNED_SAMPLES = CHECKPOINTS[0], 10
_SOUGHT = ("alignment", "steps", "conv-layouts")
"""Sweeps that people look for first: where time is short, others lose lines before these do."""
_SOUGHT_TIMES = 6.0
_ADMITTED = 0.92  # share of the budget that a plan fills: a machine is slower at times
_LARGEST_SHARE = 0.02  # of the budget, for one case
_CHEAPEST_TIMES = 2.0  # that share, or the cost of a sweep's cheapest case where that is over it
_BURST_SECONDS = {"cpu": 5e-4, "gpu": 1e-3}  # a batch with its gate and its flush
_CHECK_PASSES = {2: 6, 4: 3}  # over all operands for one check, by the bytes of an element

# Further costs of a GPU's cases. They are not measured: they are expected of an H200 from reading
# PyTorch's and Triton's sources.
_WAKE_SECONDS = 0.3 / 64  # the device is woken after each chunk
_CONV_PLAN_SECONDS = 0.05  # cuDNN builds a plan for every new convolution
_AUTOTUNE_SECONDS = 0.6  # its autotuner builds and times ten of them
_COMPILE_SECONDS = 2.0  # one Triton kernel on one core; the processes that compile share them

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
_FRESH = f"{target('sweep FRESH=1', 'run --fresh')} keeps the run aside and starts a new one."
_PLANNED = {**dict.fromkeys(_TEXTS, str), "expected_s": NOT_NEGATIVE, "shard?": SIZE}


@dataclass(frozen=True)
class PlanEntry:
    """A case of the plan, with the seconds that six samples and their preparation should take."""

    case: Case
    expected: float
    checking: float = 0.0  # of those, the seconds in which its results are checked
    more: float = 0.0  # seconds of the further samples that the plan leaves time for
    shard: int | None = None  # who measures it; None where there is one shard alone

    def to_json(self) -> dict[str, Any]:
        """For run.json."""
        row = {"id": self.case.id, **self.case.columns(), "expected_s": round(self.expected, 6)}
        return row if self.shard is None else {**row, "shard": self.shard}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> PlanEntry:
        """Inverse of :meth:`to_json`.

        Raises:
            UserError: it is no such row.
        """
        fault = misfit(row, _PLANNED, "a case of the plan in run.json")
        try:
            if not fault:
                case = Case.from_columns(row)
                _ = case.id  # which text that is half a character has none
                return cls(case, row["expected_s"], shard=row.get("shard"))
        except (ValueError, TypeError, KeyError, OverflowError):
            fault = "a case of the plan in run.json has no sizes"
        raise UserError(f"{fault}; {_FRESH}")


def read_plan(plan: Mapping[str, Any]) -> list[PlanEntry]:
    """The cases of the plan in run.json.

    Raises:
        UserError: it is no plan that a run can go on with.
    """
    if fault := misfit(plan, _PLAN, "the plan in run.json"):
        raise UserError(f"{fault}; {_FRESH}")
    planned = [PlanEntry.from_json(row) for row in plan["cases"]]
    of_shards = {*range(1, plan["shards"] + 1)} if plan["shards"] > 1 else {None, 1}
    if not {entry.shard for entry in planned} <= of_shards:
        raise UserError(
            f"the plan in run.json has cases that belong to none of its shards; {_FRESH}"
        )
    return planned


@dataclass(frozen=True)
class Costs:
    """Cost of a case without its launches, in seconds, and the launches' ratio to the estimate.

    The defaults of a CPU were measured on one; a run measures its own
    (:func:`sweeps.running.probing.probe`).
    Those of a GPU are expected of an H200.
    """

    prepare: float = 0.02
    """Seconds for operands and warm-up."""
    check: float = 1.5e-3
    """Seconds of one check of a result on the host, which runs 90 operations for it."""
    passes: float = 1.0
    """Factor on the passes over all operands that one check makes at the machine's bandwidth."""
    slower: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """For each :func:`kind_of`: pairs of FLOPs and the factor by which launches of that size take
    longer than the estimate says; between them the factor is interpolated."""

    def to_json(self) -> dict[str, Any]:
        """For run.json."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any] | None, kind: str) -> Costs:
        """Inverse of :meth:`to_json`; the default where a recording has none.

        Raises:
            UserError: a factor is not a pair of numbers.
        """
        if row is None:
            return cls.default(kind)
        if any(len(point) != 2 for points in row["slower"].values() for point in points):
            raise UserError(f"the costs of the plan in run.json are damaged; {_FRESH}")
        return cls(**{name: row[name] for name in _COSTS})

    @classmethod
    def default(cls, kind: str) -> Costs:
        """For a ``cpu`` or a ``gpu`` that has not been probed."""
        return cls() if kind == "cpu" else cls(check=8e-4)

    def launch_seconds(self, cases: Sequence[Case], machine: Machine) -> list[float]:
        """Seconds of one launch of each case."""
        estimates = expected_seconds([case.problem for case in cases], machine)
        return [
            seconds * self._factor(case) for case, seconds in zip(cases, estimates, strict=True)
        ]

    def _factor(self, case: Case) -> float:
        points = self.slower.get(kind_of(case)) if self.slower else None
        if not points:
            return 1.0
        flops, factors = np.log(np.array(points)).T
        return float(np.exp(np.interp(math.log(max(case.problem.flops, 1)), flops, factors)))


def kind_of(case: Case) -> str:
    """What decides how well the estimate fits: operation, pass and dtype."""
    columns = case.columns()
    return " ".join(str(columns[name]) for name in ("op", "pass", "dtype") if columns.get(name))


@dataclass(frozen=True)
class Plan:
    """Admitted cases in order, and how many of each sweep did not fit the budget."""

    planned: tuple[PlanEntry, ...]
    left_out: Mapping[str, int]


def naming_reserve(cases: Sequence[Case], budget: float) -> float:
    """Seconds of a budget that are left for naming the cases' kernels: a tenth of it at most.

    A further process has to start for that, and to prepare and launch each case again.
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
    """Order the cases of all sweeps and admit what fits ``budget`` seconds of each shard.

    The sweep that has had the least time gives the next line, so that every sweep is represented.
    Those that people look for first get six times as much. Or, ``in_order``, a sweep begins when
    the one before it is over, and any case may be as long as the budget allows. A sweep of which no
    line fits gives single cases instead.

    No case may take over 2% of the budget, unless every case of its sweep does. Cases that
    somebody compares, also with those planned ``before``, have one shard
    (:mod:`sweeps.planning.lines`).

    Args:
        sweeps: cases by the names of their sweeps.
        machine: where they will run.
        budget: seconds.
        shards: GPUs that share the work, each with that budget.
        in_order: one sweep after another.
        cores: of the host, which compile; None: as many as here.
        together: groups of sweeps that are compared with each other.
        before: what is planned already.
        costs: of a case; None: those of an unknown machine of this kind.
    """
    share = budget if in_order else _LARGEST_SHARE * budget
    compile_seconds = _COMPILE_SECONDS / max(1, compilers(machine, cores))
    compiled: set[tuple[object, ...]] = set()
    costs = costs or Costs.default(machine.kind)
    entries = {
        name: _with_costs(cases, machine, compile_seconds, compiled, costs)
        for name, cases in sweeps.items()
        if cases
    }
    largest = {name: _largest_cost(own, share) for name, own in entries.items()}
    if shards > 1:
        entries = _shared_out(entries, shards, together, before)
    room = _Room(budget, naming=machine.kind == "gpu")
    queues = {name: deque(_in_lines(own)) for name, own in entries.items()}
    spent = dict.fromkeys(queues, 0.0)
    weight = {name: _SOUGHT_TIMES if name in _SOUGHT else 1.0 for name in queues}
    planned: list[PlanEntry] = []
    admitted: set[str] = set()
    while queues:
        name = next(iter(queues)) if in_order else min(queues, key=lambda n: spent[n] / weight[n])
        line = queues[name].popleft()
        if not queues[name]:
            del queues[name]
        new = [e for e in _affordable(line, largest[name]) if e.case.id not in admitted]
        if room.take(new):
            spent[name] += sum(entry.expected for entry in new)
            planned += new
            admitted |= {entry.case.id for entry in new}
    for name, own in entries.items():
        if not spent[name]:  # not even one line fits: some of its cases are better than none
            for entry in _bit_reversal_order(own):
                if entry.expected <= largest[name] and room.take([entry]):
                    planned.append(entry)
                    admitted.add(entry.case.id)
    left_out = {name: sum(e.case.id not in admitted for e in own) for name, own in entries.items()}
    return Plan(tuple(planned), {name: count for name, count in left_out.items() if count})


class _Room:
    """What is left of the budget of each shard.

    With ``naming``, time is left for naming kernels at the end.
    """

    def __init__(self, budget: float, naming: bool) -> None:
        self._budget = budget
        self._most_naming = _NAMING_SHARE * budget if naming else 0.0
        self._total: dict[int | None, float] = defaultdict(float)
        self._naming: dict[int | None, float] = defaultdict(
            lambda: min(self._most_naming, _NAMING_START)
        )

    def take(self, entries: Sequence[PlanEntry]) -> bool:
        """Take the time of some cases, if all of them fit."""
        total, naming = dict[int | None, float](), dict[int | None, float]()
        for entry in entries:
            shard = entry.shard
            total[shard] = total.get(shard, self._total[shard]) + entry.expected + entry.more
            naming[shard] = min(
                self._most_naming,
                naming.get(shard, self._naming[shard])
                + _NAMING_SECONDS
                + _cudnn_seconds(entry.case),
            )
        if any(total[shard] > _ADMITTED * (self._budget - naming[shard]) for shard in total):
            return False
        self._total |= total
        self._naming |= naming
        return True


def _affordable(line: Sequence[PlanEntry], largest: float) -> Sequence[PlanEntry]:
    """A line without the cases that cost too much, which are those of its largest sizes.

    A line of like sizes, some of which cost a little too much, stays whole.
    """
    costs = [entry.expected for entry in line]
    if min(costs) <= largest and max(costs) <= _CHEAPEST_TIMES * largest:
        return line
    return [entry for entry in line if entry.expected <= largest]


def _in_lines(entries: Sequence[PlanEntry]) -> list[list[PlanEntry]]:
    """The lines of a sweep in bit-reversal order, each in that order too."""
    lines = [[entries[i] for i in line] for line in lines_of([e.case for e in entries])]
    return [_bit_reversal_order(line) for line in _bit_reversal_order(lines)]


def _shared_out(
    queues: Mapping[str, Sequence[PlanEntry]],
    shards: int,
    together: Collection[Collection[str]],
    before: Sequence[PlanEntry],
) -> dict[str, list[PlanEntry]]:
    """The cases with their shards; the first measures what advice asks for."""
    entries = [*before, *(entry for queue in queues.values() for entry in queue)]
    taken = {entry.case.id: entry.shard for entry in before if entry.shard is not None}
    taken |= {entry.case.id: 1 for entry in entries if entry.case.sweep == CONFIRM}
    numbers = share_out(
        [e.case for e in entries], [e.expected for e in entries], shards, together, taken
    )
    shard = {entry.case.id: number for entry, number in zip(entries, numbers, strict=True)}
    return {
        name: [replace(entry, shard=shard[entry.case.id]) for entry in queue]
        for name, queue in queues.items()
    }


def _largest_cost(queue: Iterable[PlanEntry], share: float) -> float:
    """What a case of a sweep may cost at most: ``share``, unless every case of it costs more.

    A sweep is then represented by those that cost least. Where a cache of 260 MB is flushed before
    each of six samples, even the smallest cold product takes half a second.
    """
    cheapest = min(entry.expected for entry in queue)
    return share if cheapest <= share else _CHEAPEST_TIMES * cheapest


def _bit_reversal_order(values: Sequence[_T]) -> list[_T]:
    """Bit-reversal order: the first, the middle, the quarters, … of the declared order."""
    bits = max(1, (len(values) - 1).bit_length())
    order = sorted(range(len(values)), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
    return [values[i] for i in order]


def _with_costs(
    cases: Sequence[Case],
    machine: Machine,
    compile_seconds: float,
    compiled: set[tuple[object, ...]],
    costs: Costs,
) -> list[PlanEntry]:
    """Each case with the seconds of six samples and their preparation.

    ``compiled`` are the kernels that earlier cases have compiled; those of these are added.
    """
    launch = costs.launch_seconds(cases, machine)
    planned: list[PlanEntry] = []
    for case, seconds in zip(cases, launch, strict=True):
        batch = max(seconds, _BURST_SECONDS[machine.kind])
        if case.mode == "sustained":
            batch = SUSTAINED_SETTLE + max(seconds, SUSTAINED_BATCH)
        elif machine.kind == "cpu" and case.cache != "warm":
            batch += 2 * machine.l2_bytes / machine.bandwidth  # the flush
        # A few first launches come before the samples.
        cost = costs.prepare + 4 * seconds + _SAMPLES * batch
        checking = _checking_seconds(case, seconds, machine, costs)
        cost += checking
        if machine.kind == "gpu":
            cost += _WAKE_SECONDS + _cudnn_seconds(case)
            key = kernel_key(case)
            if key is not None and key not in compiled:
                compiled.add(key)
                cost += compile_seconds
        more = (_PLANNED_SAMPLES - _SAMPLES) * batch
        planned.append(PlanEntry(case, cost, checking, more))
    return planned


def _checking_seconds(case: Case, seconds: float, machine: Machine, costs: Costs) -> float:
    """Seconds in which a case's results are checked, one launch taking ``seconds``.

    Before its samples (a launch that warms up in any case), after them, and in one of twelve: there
    every launch of a cold batch has a result of its own.
    """
    one = costs.passes * checked_bytes(case) / machine.bandwidth
    clock = CudaClock if machine.kind == "gpu" else CpuClock
    launches = math.ceil(clock.batch_seconds / max(seconds, 1e-9)) if case.cache != "warm" else 1
    return 3 * costs.check + seconds + (2 + launches) * one


def checked_bytes(case: Case) -> float:
    """Bytes that one check of a case's result moves, as a count of passes over its operands."""
    return _CHECK_PASSES[DTYPE_BYTES[case.problem.dtype]] * case.problem.bytes


def _cudnn_seconds(case: Case) -> float:
    """What cuDNN needs for a new convolution before it launches anything."""
    if case.implementation != "cudnn":
        return 0.0
    return _AUTOTUNE_SECONDS if "autotune=on" in case.config else _CONV_PLAN_SECONDS


def expected_seconds(workloads: Sequence[Workload], machine: Machine) -> list[float]:
    """Seconds of one launch by the estimate's shipped constants; 0 where it cannot run.

    An operation takes as long as its products, or as moving its bytes where it has none.
    """
    runs = [workload.dtype in machine.peaks for workload in workloads]
    products = [products_of(w) if can else () for w, can in zip(workloads, runs, strict=True)]
    moving = [
        moving_seconds(w, machine) if can else 0.0 for w, can in zip(workloads, runs, strict=True)
    ]

    def seconds_of(_: Sequence[int], problems: Sequence[Problem]) -> Array:
        seconds = np.empty(len(problems))
        for dtype in {problem.dtype for problem in problems}:
            where = [i for i, problem in enumerate(problems) if problem.dtype == dtype]
            shapes, tiles = (
                Shapes.from_problems([problems[i] for i in where]),
                Tiles.library(machine, dtype),
            )
            constants = default_constants(machine.generation, dtype)
            seconds[where] = fastest(shapes, tiles, machine, machine.peak(dtype), constants).time
        return seconds

    return [float(seconds) for seconds in workload_seconds(products, moving, seconds_of)]
