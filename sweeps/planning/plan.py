"""The plan of a run: which cases, in which order, and what each is expected to take.

It is made once. Cases come in the order of what they add: within a sweep, so that any beginning
of it already covers its axes from end to end; among sweeps, so that each gets the same share of
the time. A case is admitted while its expected cost fits what is left of the budget.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kernels.constants import default_constants
from kernels.documents import COUNT, NOT_NEGATIVE, SIZE, Each, misfit
from kernels.errors import UserError
from kernels.estimate import Array, Shapes, Tiles, fastest
from kernels.machine import Machine
from kernels.operation import Workload, products_of
from kernels.problem import DTYPE_BYTES, Problem
from kernels.program import target
from kernels.workload_time import moving_seconds, workload_seconds
from sweeps.cases.case import CONFIRM, Case
from sweeps.planning.compiling import compilers, kernel_key
from sweeps.timing.clock import CpuClock, CudaClock
from sweeps.timing.sampler import SUSTAINED_BATCH, SUSTAINED_SETTLE
from sweeps.timing.statistics import CHECKPOINTS

_SAMPLES = CHECKPOINTS[0]
_LARGEST_SHARE = 0.02  # of the budget, for one case
_CHEAPEST_TIMES = 2.0  # the cost of a sweep's cheapest case, where that is over the share
_PREPARE_SECONDS = {"cpu": 0.02, "gpu": 0.02}  # operands, warm-up
_BURST_SECONDS = {"cpu": 5e-4, "gpu": 1e-3}  # a batch with its gate and its flush

# One check of a result: what the host needs for its 90 operations, and passes over all operands, by
# the bytes of an element. A CPU's are measured; fp32 is not copied into a wider type.
_CHECK_SECONDS = {"cpu": 1.5e-3, "gpu": 8e-4}
_CHECK_PASSES = {2: 10, 4: 4}

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
_PLAN = {
    "cases": [dict], "budget_s": NOT_NEGATIVE, "shards": SIZE, "sweeps": [str],
    "left_out": Each(COUNT), "recorded_elsewhere": [str],
}  # fmt: skip
_FRESH = f"{target('sweep FRESH=1', 'run --fresh')} keeps the run aside and starts a new one."
_PLANNED = {**dict.fromkeys(_TEXTS, str), "expected_s": NOT_NEGATIVE, "shard?": SIZE}


@dataclass(frozen=True)
class PlanEntry:
    """A case of the plan, with the seconds that six samples and their preparation should take."""

    case: Case
    expected: float
    checking: float = 0.0  # of those, the seconds in which its results are checked
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
            fault = "a case of the plan in run.json has no sizes of its operation"
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
        raise UserError(f"the plan in run.json has cases of none of its shards; {_FRESH}")
    return planned


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
) -> Plan:
    """Order the cases of all sweeps and admit what fits ``budget`` seconds of each shard.

    The sweep that has had the least time gives the next case, so every sweep is represented; or,
    ``in_order``, a sweep begins when the one before it is over, and any case may be as long as the
    budget allows. ``cores`` are those of the host; None: as many as here.

    No case may take over 2 % of the budget, unless every case of its sweep does. Cases that
    somebody compares, also with those planned ``before``, have one shard
    (:mod:`sweeps.planning.series`).
    """
    share = budget if in_order else _LARGEST_SHARE * budget
    compile_seconds = _COMPILE_SECONDS / max(1, compilers(machine, cores))
    compiled: set[tuple[object, ...]] = set()
    queues = {name: _with_costs(_bit_reversal_order(cases), machine, compile_seconds, compiled)
              for name, cases in sweeps.items() if cases}  # fmt: skip
    largest = {name: _largest_cost(queue, share) for name, queue in queues.items()}
    if shards > 1:
        queues = _shared_out(queues, shards, together, before)
    planned: list[PlanEntry] = []
    left_out = dict.fromkeys(queues, 0)
    spent = dict.fromkeys(queues, 0.0)
    total: dict[int | None, float] = defaultdict(float)
    naming: dict[int | None, float] = defaultdict(lambda: naming_reserve((), budget))
    while queues:
        name = next(iter(queues)) if in_order else min(queues, key=spent.__getitem__)
        next_one = queues[name].popleft()
        if not queues[name]:
            del queues[name]
        cost = next_one.expected
        shard = next_one.shard
        if cost > largest[name] or total[shard] + naming[shard] + cost > budget:
            left_out[name] += 1
            continue
        spent[name] += cost
        total[shard] += cost
        planned.append(next_one)
        naming[shard] = min(
            _NAMING_SHARE * budget,
            naming[shard] + _NAMING_SECONDS + _cudnn_seconds(next_one.case),
        )
    return Plan(tuple(planned), {name: count for name, count in left_out.items() if count})


def _shared_out(
    queues: Mapping[str, deque[PlanEntry]],
    shards: int,
    together: Collection[Collection[str]],
    before: Sequence[PlanEntry],
) -> dict[str, deque[PlanEntry]]:
    """The queues with each case's shard; the first measures what advice asks for."""
    from sweeps.planning.series import share_out  # SciPy, which a run without shards can do without

    entries = [*before, *(entry for queue in queues.values() for entry in queue)]
    taken = {entry.case.id: entry.shard for entry in before if entry.shard is not None}
    taken |= {entry.case.id: 1 for entry in entries if entry.case.sweep == CONFIRM}
    numbers = share_out(
        [e.case for e in entries], [e.expected for e in entries], shards, together, taken
    )
    shard = {entry.case.id: number for entry, number in zip(entries, numbers, strict=True)}
    return {
        name: deque(replace(entry, shard=shard[entry.case.id]) for entry in queue)
        for name, queue in queues.items()
    }


def _largest_cost(queue: Iterable[PlanEntry], share: float) -> float:
    """What a case of a sweep may cost at most: ``share``, unless every case of it costs more.

    A sweep is then represented by those that cost least. Where a cache of 260 MB is flushed before
    each of six samples, even the smallest cold product takes half a second.
    """
    cheapest = min(entry.expected for entry in queue)
    return share if cheapest <= share else _CHEAPEST_TIMES * cheapest


def _bit_reversal_order(cases: Sequence[Case]) -> list[Case]:
    """Bit-reversal order: the first, the middle, the quarters, … of the declared order."""
    bits = max(1, (len(cases) - 1).bit_length())
    order = sorted(range(len(cases)), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
    return [cases[i] for i in order]


def _with_costs(
    cases: Sequence[Case],
    machine: Machine,
    compile_seconds: float,
    compiled: set[tuple[object, ...]],
) -> deque[PlanEntry]:
    """Each case with the seconds of six samples and their preparation.

    ``compiled`` are the kernels that earlier cases have compiled; those of these are added.
    """
    launch = expected_seconds([case.problem for case in cases], machine)
    planned: deque[PlanEntry] = deque()
    for case, seconds in zip(cases, launch, strict=True):
        batch = max(seconds, _BURST_SECONDS[machine.kind])
        if case.mode == "sustained":
            batch = SUSTAINED_SETTLE + max(seconds, SUSTAINED_BATCH)
        elif machine.kind == "cpu" and case.cache != "warm":
            batch += 2 * machine.l2_bytes / machine.bandwidth  # the flush
        # A few first launches come before the samples.
        cost = _PREPARE_SECONDS[machine.kind] + 4 * seconds + _SAMPLES * batch
        checking = _checking_seconds(case, seconds, machine)
        cost += checking
        if machine.kind == "gpu":
            cost += _WAKE_SECONDS + _cudnn_seconds(case)
            key = kernel_key(case)
            if key is not None and key not in compiled:
                compiled.add(key)
                cost += compile_seconds
        planned.append(PlanEntry(case, cost, checking))
    return planned


def _checking_seconds(case: Case, seconds: float, machine: Machine) -> float:
    """Seconds in which a case's results are checked, one launch taking ``seconds``.

    Before its samples (a launch that warms up in any case), after them, and in one of six from one
    side: there every launch of a cold batch has a result of its own.
    """
    one = _CHECK_PASSES[DTYPE_BYTES[case.problem.dtype]] * case.problem.bytes / machine.bandwidth
    clock = CudaClock if machine.kind == "gpu" else CpuClock
    launches = math.ceil(clock.batch_seconds / max(seconds, 1e-9)) if case.cache != "warm" else 1
    return 3 * _CHECK_SECONDS[machine.kind] + seconds + (2 + 0.5 * launches) * one


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
            shapes, tiles = Shapes.of([problems[i] for i in where]), Tiles.library(machine, dtype)
            constants = default_constants(machine.generation, dtype)
            seconds[where] = fastest(shapes, tiles, machine, machine.peak(dtype), constants).time
        return seconds

    return [float(seconds) for seconds in workload_seconds(products, moving, seconds_of)]
