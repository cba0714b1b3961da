"""Plan a run: which cases it measures, in which order, and how long each is expected to take.

Cases are admitted in whole lines if possible. A line has the cases of one sweep whose sizes differ
in only one dimension (:func:`sweeps.planning.lines.lines_of`). A line with missing cases might not
answer the ``question`` of its sweep. The lines of a sweep are ordered so that the first few lines
are spread over the sweep's axes. The sweeps take turns, so that each sweep gets its share of the
time.
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
from kernels.config import HAND_WRITTEN
from kernels.correctness import sets_at_once
from kernels.machine import Machine
from kernels.operation import Series, Workload, products_of
from kernels.problem import DTYPE_BYTES, Gemm, Problem
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

_SAMPLES = CHECKPOINTS[0]  # number of samples that a case's expected seconds include
_PLANNED_SAMPLES = 10  # number of samples for which the plan leaves time
_PREFERRED = ("alignment", "steps", "conv-layouts")
"""Sweeps that get more time than other sweeps, because users look at their results first."""
_PREFERRED_FACTOR = 6.0  # these sweeps get this many times as much time as others
_ADMITTED = 0.92  # share of the budget that a plan fills, because a machine is slower at times
_LARGEST_SHARE = 0.02  # share of the budget that one case may take
# A case may exceed its limit by this factor if that keeps its line whole. If even the cheapest case
# of a sweep exceeds the share, the limit is this many times the cost of that case instead.
_EXCESS_FACTOR = 2.0
_BURST_SECONDS = {"cpu": 5e-4, "gpu": 1e-3}  # seconds of one batch; on a GPU, with gate and flush
_CHECK_PASSES = {2: 6, 4: 3}  # passes over all operands for one check, by bytes per element

# Further costs of cases on a GPU. Those of cuDNN are what preparing 466 convolutions without
# autotuning and 108 with it took on average, in the runs of 2026-11-27 on an H100 and an H200 whose
# recordings are published (their samples are not). The others are expectations from reading the
# sources of PyTorch and Triton.
_WAKE_SECONDS = 0.3 / 64  # a case's part of waking the device, once for each chunk of 64 cases
_CONV_PLAN_SECONDS = 0.03  # cuDNN builds a plan for every new convolution
_AUTOTUNE_SECONDS = 0.25  # cuDNN's autotuner builds and times ten plans
_COMPILE_SECONDS = 2.0  # one Triton kernel on one core; the compiling processes share the kernels

# Naming the kernels of 1,800 cases took 25 s in the same runs.
_NAMING_START = 5.0  # seconds to start the process that names kernels
_NAMING_SECONDS = 0.011  # seconds to name the kernels of one case
_NAMING_SHARE = 0.2  # largest share of the budget that naming may take

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
    """A case of the plan, with the seconds that it is expected to take."""

    case: Case
    expected: float
    """Seconds of the case's preparation, its checks and six samples."""
    checking: float = 0.0
    """The part of ``expected`` in which results are checked."""
    more: float = 0.0
    """Seconds of the further samples for which the plan leaves time."""
    compiling: float = 0.0
    """Seconds in which the compiling processes compile the case's kernel, next to the run.

    0 if an earlier case has the same kernel."""
    shard: int | None = None
    """Number of the shard that measures the case; None if the run is not divided into shards."""

    def to_json(self) -> dict[str, Any]:
        """Return the entry as a row of the plan's ``cases``, which are stored in plan.jsonl."""
        row = {"id": self.case.id, **self.case.columns(), "expected_s": round(self.expected, 6)}
        return row if self.shard is None else {**row, "shard": self.shard}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> PlanEntry:
        """Build an entry from its row; ``checking``, ``more`` and ``compiling`` are not stored.

        Raises:
            UserError: if the row does not describe a case.
        """
        fault = misfit(row, _PLANNED, "case")
        if fault:
            raise UserError(f"the plan is damaged: {fault}. {START_OVER}")
        try:
            case = Case.from_columns(row)
            _ = case.id  # raises ValueError for text with half a surrogate pair
        except (ValueError, TypeError, KeyError, OverflowError):
            raise UserError(
                f"a case of the plan has missing or invalid values. {START_OVER}"
            ) from None
        return cls(case, row["expected_s"], shard=row.get("shard"))


def read_plan(plan: Mapping[str, Any]) -> list[PlanEntry]:
    """Return the entries of a plan that :func:`sweeps.store.read_run` has read.

    Raises:
        UserError: if the plan is damaged, or has a case that belongs to none of its shards.
    """
    fault = misfit(plan, _PLAN, "plan")
    if fault:
        raise UserError(f"run.json is damaged: {fault}. {START_OVER}")
    planned = [PlanEntry.from_json(row) for row in plan["cases"]]
    # The entries of a plan with one shard may have no shard number.
    valid_shards = {*range(1, plan["shards"] + 1)} if plan["shards"] > 1 else {None, 1}
    if not {entry.shard for entry in planned} <= valid_shards:
        raise UserError(f"the plan has cases that belong to none of its shards. {START_OVER}")
    return planned


@dataclass(frozen=True)
class Costs:
    """Costs of a case apart from its launches, and corrections of the launches' estimated times.

    The defaults for a CPU were measured on one CPU; each run on a CPU measures the costs again
    (:func:`sweeps.running.probing.probe`). The defaults for a GPU are estimates for an H200.
    """

    prepare: float = 0.02
    """Seconds to prepare operands and warm up."""
    check: float = 1.5e-3
    """Seconds that the host spends on one check, of a single result or of small ones together.

    A check of a GEMM or a convolution takes about 60 to 140 PyTorch operations. On an H100 and an
    H200, checking a batch of large GEMMs took 1.0 to 1.3 ms for each result."""
    passes: float = 1.0
    """Factor by which a check's passes over the operands take longer than at full bandwidth."""
    slower: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """Corrections of the estimated launch time for each kind of case (:func:`kind_of`), as pairs of
    FLOPs and a factor.

    The pairs are in ascending order of FLOPs. The estimated time is multiplied by the factor.
    Between two pairs, the logarithm of the factor is interpolated linearly in the logarithm of the
    FLOPs. Below the first pair and above the last pair, the factor is constant. Estimates for a
    kind without pairs are not corrected."""

    def to_json(self) -> dict[str, Any]:
        """Return the costs for run.json."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any] | None, kind: str) -> Costs:
        """Build the costs from ``row``, the entry ``costs`` of a plan in run.json.

        If ``row`` is None, return the default costs of a machine of this ``kind``. Any other row
        must have passed the checks of :func:`read_plan`.

        Raises:
            UserError: if a correction is not a pair.
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
        return cls() if kind == "cpu" else cls(check=1.2e-3)

    def launch_seconds(self, cases: Sequence[Case], machine: Machine) -> list[float]:
        """Estimate the seconds that one launch of each case takes, corrected by :attr:`slower`.

        The result is 0 for a case whose dtype the machine does not support.
        """
        estimates = expected_seconds([case.problem for case in cases], machine)
        return [
            seconds * self._factor(case) for case, seconds in zip(cases, estimates, strict=True)
        ]

    def _factor(self, case: Case) -> float:
        points = self.slower.get(kind_of(case))
        if not points:
            return 1.0
        # Each row of the array has the FLOPs and the factor of one point.
        log_flops, log_factors = np.log(np.array(points)).T
        # Operations that only move memory have no FLOPs, and zero has no logarithm.
        log_case_flops = math.log(max(case.problem.flops, 1))
        return float(np.exp(np.interp(log_case_flops, log_flops, log_factors)))


def kind_of(case: Case) -> str:
    """Return a case's operation, pass and dtype as one string, such as ``conv fprop bf16``.

    The accuracy of a case's estimated time depends mostly on these three properties.
    """
    columns = case.columns()
    return " ".join(str(columns[name]) for name in ("op", "pass", "dtype") if columns.get(name))


@dataclass(frozen=True)
class Plan:
    """Planned cases in order, and the number of cases that were left out."""

    planned: tuple[PlanEntry, ...]
    left_out: Mapping[str, int]
    """Number of cases that were left out, by sweep; sweeps without such cases have no entry."""


def planned_seconds(entries: Iterable[PlanEntry]) -> float:
    """Return the expected seconds of cases that one GPU or CPU measures.

    Kernels are compiled while other cases are measured, so the longer of the two times counts.
    """
    measuring = compiling = 0.0
    for entry in entries:
        measuring += entry.expected
        compiling += entry.compiling
    return max(measuring, compiling)


def naming_reserve(cases: Sequence[Case], budget: float) -> float:
    """Return the seconds reserved for naming kernels: at most a fifth of the budget.

    To find the names of the kernels that each case launches, another process prepares and launches
    the cases again.
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
    """Order the cases of all sweeps, and admit those that fit into their shard's ``budget``.

    On a GPU, up to a fifth of the budget is reserved for naming kernels. Cases fill at most 92% of
    the remaining budget. A sweep in :data:`_PREFERRED` that has enough cases gets about six times
    as much time as a sweep that is not preferred.

    If no line of a sweep fits the budget, single problems of the sweep are admitted. A case may
    take at most 2% of the budget, or 4% if its line would otherwise be incomplete. If even the
    cheapest case of a sweep takes more than 2%, the two limits are instead twice and four times the
    time of that case.

    Cases that are compared with each other go to one shard (:mod:`sweeps.planning.lines`).

    Args:
        sweeps: cases by the names of their sweeps.
        machine: machine on which the cases will run.
        budget: measuring time in seconds.
        shards: number of GPUs that share the work, each for ``budget`` seconds.
        in_order: True to consider all lines of a sweep before those of the next one, and to let one
            case take the whole budget.
        cores: number of cores that the run shares with the processes that compile its kernels. None
            means all cores that this process may use.
        together: groups of sweeps; all cases of a group go to one shard, so that they can be
            compared.
        before: entries that are already planned, whose time is not taken from ``budget``. A new
            case that is compared with one of these entries goes to its shard.
        costs: costs of a case; None for the default costs of this kind of machine.
    """
    # 1. Estimate the cost of each case, and find the largest cost that a case of each sweep may
    # have.
    case_limit = budget if in_order else _LARGEST_SHARE * budget
    processes = compilers(machine, cores)
    costs = costs or Costs.default(machine.kind)
    # Only the first case with a kernel waits for its compilation, also across sweeps.
    compiled: set[tuple[object, ...]] = set()
    entries: dict[str, list[PlanEntry]] = {}
    for name, cases in sweeps.items():
        if cases:
            entries[name] = _with_costs(cases, machine, processes, compiled, costs)
    cost_limits = {name: _cost_limit(members, case_limit) for name, members in entries.items()}
    # 2. Assign the cases to shards.
    if shards > 1:
        entries = _with_shards(entries, shards, together, before)
    # 3. Admit whole lines. The next one is from the sweep with the least time for its weight.
    room = _Room(budget, naming=machine.kind == "gpu")
    queues = {name: deque(_in_lines(members)) for name, members in entries.items()}
    spent = dict.fromkeys(queues, 0.0)
    weights = {name: _PREFERRED_FACTOR if name in _PREFERRED else 1.0 for name in queues}
    planned: list[PlanEntry] = []
    admitted: set[str] = set()
    while queues:
        if in_order:
            name = next(iter(queues))  # the first sweep that still has lines
        else:
            name = min(queues, key=lambda sweep: spent[sweep] / weights[sweep])
        line = queues[name].popleft()
        if not queues[name]:
            del queues[name]
        # A line that crosses an admitted one shares cases with it, which are already planned.
        affordable = _affordable(line, cost_limits[name])
        new_entries = [entry for entry in affordable if entry.case.id not in admitted]
        if room.take(new_entries):
            spent[name] += planned_seconds(new_entries)
            planned += new_entries
            admitted |= {entry.case.id for entry in new_entries}
    # 4. Admit single problems of the sweeps of which no line was admitted, so no time was spent.
    for name, members in entries.items():
        if not spent[name]:
            for contenders in _bit_reversal_order(_by_contest(members)):
                affordable = [entry for entry in contenders if entry.expected <= cost_limits[name]]
                if room.take(affordable):
                    planned += affordable
                    admitted |= {entry.case.id for entry in affordable}
    # 5. Count the cases that were not admitted.
    left_out = {
        name: sum(entry.case.id not in admitted for entry in members)
        for name, members in entries.items()
    }
    return Plan(tuple(planned), {name: count for name, count in left_out.items() if count})


class _Room:
    """Remainder of each shard's budget, in seconds, while a plan is made."""

    def __init__(self, budget: float, naming: bool) -> None:
        self._budget = budget
        self._max_naming = _NAMING_SHARE * budget if naming else 0.0
        # Seconds of measuring, compiling and naming that are taken from each shard's budget.
        # Kernels are compiled while other cases are measured.
        self._measuring: dict[int | None, float] = defaultdict(float)
        self._compiling: dict[int | None, float] = defaultdict(float)
        self._naming: dict[int | None, float] = defaultdict(
            lambda: min(self._max_naming, _NAMING_START)
        )

    def take(self, entries: Sequence[PlanEntry]) -> bool:
        """Take the time of ``entries`` from their shards' budgets, and return True.

        If not all of the entries fit, take nothing and return False.
        """
        # 1. Add up the seconds that would then be taken from the shards of these cases.
        new_measuring: dict[int | None, float] = {}
        new_compiling: dict[int | None, float] = {}
        new_naming: dict[int | None, float] = {}
        for entry in entries:
            shard = entry.shard
            measuring_before = new_measuring.get(shard, self._measuring[shard])
            new_measuring[shard] = measuring_before + entry.expected + entry.more
            compiling_before = new_compiling.get(shard, self._compiling[shard])
            new_compiling[shard] = compiling_before + entry.compiling
            naming_before = new_naming.get(shard, self._naming[shard])
            case_naming = _NAMING_SECONDS + _cudnn_seconds(entry.case)
            new_naming[shard] = min(self._max_naming, naming_before + case_naming)
        # 2. Take them if every shard has enough time.
        for shard, seconds in new_measuring.items():
            longer = max(seconds, new_compiling[shard])
            if longer > _ADMITTED * (self._budget - new_naming[shard]):
                return False
        self._measuring |= new_measuring
        self._compiling |= new_compiling
        self._naming |= new_naming
        return True


def _affordable(line: Sequence[PlanEntry], cost_limit: float) -> Sequence[PlanEntry]:
    """Return a line without the cases that cost more than ``cost_limit`` seconds.

    The line stays whole if its cheapest case costs at most ``cost_limit``, and no case costs more
    than twice ``cost_limit``.
    """
    costs = [entry.expected for entry in line]
    if min(costs) <= cost_limit and max(costs) <= _EXCESS_FACTOR * cost_limit:
        return line
    return [entry for entry in line if entry.expected <= cost_limit]


def _by_contest(entries: Sequence[PlanEntry]) -> list[list[PlanEntry]]:
    """Group entries that differ only in their implementation or its config."""
    contests: dict[tuple[object, ...], list[PlanEntry]] = defaultdict(list)
    for entry in entries:
        case = entry.case
        contests[case.problem, case.mode, case.cache, case.fill].append(entry)
    return list(contests.values())


def _in_lines(entries: Sequence[PlanEntry]) -> list[list[PlanEntry]]:
    """Return the lines of a sweep; lines, and cases within a line, are in bit-reversal order."""
    cases = [entry.case for entry in entries]
    lines = [[entries[i] for i in positions] for positions in lines_of(cases)]
    return [_bit_reversal_order(line) for line in _bit_reversal_order(lines)]


def _with_shards(
    sweeps: Mapping[str, Sequence[PlanEntry]],
    shards: int,
    together: Collection[Collection[str]],
    before: Sequence[PlanEntry],
) -> dict[str, list[PlanEntry]]:
    """Return the entries of each sweep with their shards.

    ``before`` has the entries that are already planned. Cases that are compared with one of them go
    to its shard. Cases that are timed for advice go to the first shard.
    """
    entries = [*before, *(entry for members in sweeps.values() for entry in members)]
    assigned = {entry.case.id: entry.shard for entry in before if entry.shard is not None}
    assigned |= {entry.case.id: 1 for entry in entries if entry.case.sweep == CONFIRM}
    cases = [entry.case for entry in entries]
    seconds = [max(entry.expected, entry.compiling) for entry in entries]
    numbers = share_out(cases, seconds, shards, together, assigned)
    shard_of = {case.id: number for case, number in zip(cases, numbers, strict=True)}
    return {
        name: [replace(entry, shard=shard_of[entry.case.id]) for entry in members]
        for name, members in sweeps.items()
    }


def _cost_limit(entries: Iterable[PlanEntry], limit: float) -> float:
    """Return the seconds that a single case of a sweep may cost.

    The result is ``limit``, unless every case of the sweep costs more, as on a CPU with a large
    cache that is slow to flush. In that case, the result is twice the cost of the cheapest case, so
    that the cheapest cases represent the sweep.
    """
    cheapest = min(entry.expected for entry in entries)
    return limit if cheapest <= limit else _EXCESS_FACTOR * cheapest


def _bit_reversal_order(values: Sequence[_T]) -> list[_T]:
    """Return values in bit-reversal order; eight values come in the order 0, 4, 2, 6, 1, 5, 3, 7.

    For every n, the first n values of the result are spread nearly evenly over all values.
    """
    bits = max(1, (len(values) - 1).bit_length())

    def reversed_bits(position: int) -> int:
        binary_digits = f"{position:0{bits}b}"
        return int(binary_digits[::-1], 2)

    positions = sorted(range(len(values)), key=reversed_bits)
    return [values[position] for position in positions]


def _with_costs(
    cases: Sequence[Case],
    machine: Machine,
    processes: int,
    compiled: set[tuple[object, ...]],
    costs: Costs,
) -> list[PlanEntry]:
    """Return a plan entry for each case, with its expected seconds.

    ``processes`` compile kernels next to the run; if there are none, the run itself compiles them.
    ``compiled`` has the keys of the kernels that earlier cases need; this function adds the keys of
    the kernels that ``cases`` need.
    """
    launch_seconds = costs.launch_seconds(cases, machine)
    planned: list[PlanEntry] = []
    for case, seconds in zip(cases, launch_seconds, strict=True):
        # 1. Estimate the time of one sample, which is a batch of launches.
        if case.mode == "sustained":
            sample_seconds = SUSTAINED_SETTLE + max(seconds, SUSTAINED_BATCH)
        else:
            sample_seconds = max(seconds, _BURST_SECONDS[machine.kind])
            if machine.kind == "cpu" and case.cache != "warm":
                # The cache is flushed before the batch.
                sample_seconds += 2 * machine.l2_bytes / machine.bandwidth
        # 2. Add up the case's cost. Before the samples, the result of one launch is checked, and
        # further launches are timed to estimate the time of a launch. Together, they are assumed to
        # take the time of four launches.
        checking = _checking_seconds(case, seconds, machine, costs)
        cost = costs.prepare + 4 * seconds + _SAMPLES * sample_seconds + checking
        compiling = 0.0
        if machine.kind == "gpu":
            cost += _WAKE_SECONDS + _cudnn_seconds(case)
            # Only the first of the cases that share a kernel waits for the compiler.
            key = kernel_key(case)
            if key is not None and key not in compiled:
                compiled.add(key)
                if processes:
                    compiling = _COMPILE_SECONDS / processes
                else:
                    cost += _COMPILE_SECONDS
        more = (_PLANNED_SAMPLES - _SAMPLES) * sample_seconds
        planned.append(PlanEntry(case, cost, checking, more, compiling))
    return planned


def _checking_seconds(case: Case, seconds: float, machine: Machine, costs: Costs) -> float:
    """Return the seconds for checking a case's results, if one launch takes ``seconds``.

    Results are checked before the samples, in a launch that also warms up, in the first sample,
    where every launch of a cold batch has a separate result, and after the samples. Small results
    of a batch of GEMMs are tested together, large ones one by one.
    """
    check_seconds = costs.passes * checked_bytes(case) / machine.bandwidth
    clock = CudaClock if machine.kind == "gpu" else CpuClock
    if not seconds:
        results_of_batch = 0  # the workload cannot run, so it is refused without any sample
    elif case.cache == "warm":
        results_of_batch = 1
    else:
        results_of_batch = math.ceil(clock.batch_seconds / seconds)
    if isinstance(case.problem, Gemm | Series):
        elements = case.problem.bytes // DTYPE_BYTES[case.problem.dtype]
        checks_of_batch = math.ceil(results_of_batch / sets_at_once(elements))
    elif case.implementation in HAND_WRITTEN:
        checks_of_batch = results_of_batch
    else:
        checks_of_batch = 1  # libraries allocate these results, and only the latest are kept
    # The check after the samples needs a further launch.
    passes_seconds = (2 + results_of_batch) * check_seconds
    return (2 + checks_of_batch) * costs.check + seconds + passes_seconds


def checked_bytes(case: Case) -> float:
    """Return the bytes that one check of a result moves, in several passes over the operands."""
    return _CHECK_PASSES[DTYPE_BYTES[case.problem.dtype]] * case.problem.bytes


def _cudnn_seconds(case: Case) -> float:
    """Return the seconds that cuDNN needs before a case's first launch; 0 if cuDNN is not used."""
    if case.implementation != "cudnn":
        return 0.0
    return _AUTOTUNE_SECONDS if "autotune=on" in case.config else _CONV_PLAN_SECONDS


def expected_seconds(workloads: Sequence[Workload], machine: Machine) -> list[float]:
    """Estimate the seconds that one launch of each workload takes.

    The estimate uses the default constants of the time model. The result is 0 for a workload whose
    dtype the machine does not support.
    """
    products: list[Sequence[tuple[int, Problem]]] = []
    moving: list[float] = []
    for workload in workloads:
        is_supported = workload.dtype in machine.peaks
        products.append(products_of(workload) if is_supported else ())
        moving.append(moving_seconds(workload, machine) if is_supported else 0.0)

    def seconds_of(_: Sequence[int], problems: Sequence[Problem]) -> Array:
        seconds = np.empty(len(problems))
        for dtype in {problem.dtype for problem in problems}:
            positions = [i for i, problem in enumerate(problems) if problem.dtype == dtype]
            shapes = Shapes.from_problems(
                [problems[i] for i in positions], on_gpu_library=machine.kind == "gpu"
            )
            tiles = Tiles.library(machine, dtype)
            constants = default_constants(machine.generation, dtype)
            peak = machine.peak(dtype)
            seconds[positions] = fastest(shapes, tiles, machine, peak, constants).time
        return seconds

    return [float(seconds) for seconds in workload_seconds(products, moving, seconds_of)]
