"""Account for the time of a traced step: which operations took it, and why the GPU was idle.

On a GPU, an operation's time is the time of its kernels, copies and memsets. All kernels that were
launched within a matrix operation with known shapes belong to this operation, unless it contains
another matrix operation with known shapes. Any other kernel belongs to the innermost operation
around its launch, if there is one. Overlapping kernels each add their full time to their
operations. On a CPU, an operation's time excludes the time of the operations within it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from analysis.traces.trace_events import (
    COPY,
    KERNEL,
    MATRIX,
    NOTHING,
    OPERATION,
    HostEvents,
    TraceEvents,
    TraceJoin,
    join,
    read_trace,
)
from analysis.traces.trace_shapes import works_of
from kernels.common.errors import UserError
from kernels.names import KernelName, read_name
from kernels.problem import Conv, Gemm
from sweeps.capture.captured import Work

LAUNCH_BOUND, HOST_BOUND, COPY_BOUND, BETWEEN_KERNELS, UNKNOWN_IDLE = (
    "launching", "host", "copies", "between kernels", "unknown",
)  # fmt: skip
"""Reasons why a GPU was idle between two activities, which are kernels, copies or memsets.

``launching``: the host launched kernels one after another, but not fast enough. ``host``: the host
did something else, or waited for the GPU. ``copies``: the activity before or after the idle time
copied data between host and device. ``between kernels``: the next activity had been launched before
the idle time began. ``unknown``: the trace does not have the launch of the next activity.
"""

GRAPH, NO_OPERATION = "CUDA graph", "no operation"
"""Names that stand for the unknown operation of a kernel: the first if a CUDA graph launched the
kernel, the second if the kernel's operation is not in the trace."""

MULTIPLYING = ("gemm", "conv", "winograd", "fft", "attention", "gemv")
"""Kinds of kernels that do the arithmetic of a matrix operation."""

_PAUSE_NS = 100_000
"""Longest pause, in ns, between two calls of a host thread that launches one kernel after another.

PyTorch takes only microseconds to get from one operation to the next. A host that loads data or
computes something else takes milliseconds.
"""


@dataclass(frozen=True)
class ProfiledOperation:
    """Total over all calls of the operations with the same name, shape and module.

    Attributes:
        op: name without ``aten::``; :data:`GRAPH` or :data:`NO_OPERATION` for kernels without an
            operation.
        works: problems that a call of a matrix operation computes, usually one; empty if they are
            not known, and for other operations. The two gradients of a convolution are two
            problems.
        module: classes of the modules around the operation, such as
            ``GPT2Model.GPT2Block.Linear``; empty if ``works`` is empty or the modules are not
            known.
        matrix: True if the operation multiplies matrices, even if the shapes are not known.
        time_us: time of all calls, in µs.
        kernels: time of all calls in µs, by the name of the kernel, copy or memset; empty on a CPU.
    """

    op: str
    works: tuple[Work, ...]
    module: str
    matrix: bool
    calls: int
    time_us: float
    kernels: Mapping[str, float]

    @property
    def each_us(self) -> float:
        """Mean time of one call, in µs."""
        return self.time_us / max(self.calls, 1)

    @property
    def dtype(self) -> str:
        """Dtype of the problem that a call computes, or "" if the problem is not known."""
        return self.works[0].dtype if self.works else ""

    @property
    def shape(self) -> str:
        """Problem that a call computes, as text, or "" if the problem is not known."""
        if not self.works:
            return ""
        first, last = self.works[0], self.works[-1]
        # Two convolutions are the two gradients of one convolution.
        if len(self.works) == 2 and isinstance(first, Conv) and isinstance(last, Conv):
            return f"{first.pass_} and {last}"
        return str(last)

    @property
    def flops(self) -> int:
        """FLOPs of one call, or 0 if the problem is not known."""
        return sum(work.flops for work in self.works)

    @property
    def bytes(self) -> int:
        """Minimum traffic of one call in bytes, or 0 if the traffic is not known."""
        traffic = [work.bytes for work in self.works if isinstance(work, Gemm | Conv)]
        return sum(traffic) if len(traffic) == len(self.works) else 0

    @property
    def kernel(self) -> str:
        """Name of the main kernel: the one with the longest time among those that multiply.

        If no kernel multiplies, the main kernel is the one with the longest time of all. The name
        is "" if the operation launched no kernel.
        """
        longest_first = sorted(self.kernels, key=lambda name: -self.kernels[name])
        multiplying = [name for name in longest_first if read_name(name).kind in MULTIPLYING]
        candidates = multiplying or longest_first
        return candidates[0] if candidates else ""

    @property
    def kernel_name(self) -> KernelName:
        """Properties of the main kernel that its name shows."""
        return read_name(self.kernel)

    @property
    def uses_tensor_cores(self) -> bool | None:
        """Result of :func:`any_tensor_cores` for the operation's kernels."""
        return any_tensor_cores(self.kernels)

    def share_of_kind(self, kind: str) -> float:
        """Return the share of the kernels' time that kernels of one kind take."""
        total_us = sum(self.kernels.values())
        kind_us = sum(us for name, us in self.kernels.items() if read_name(name).kind == kind)
        return kind_us / total_us if total_us else 0.0


def any_tensor_cores(kernels: Iterable[str]) -> bool | None:
    """Return True if any kernel's name shows that the kernel uses Tensor Cores.

    Otherwise, the result is False if any name shows that its kernel does not use them, and None if
    no name shows whether its kernel does.
    """
    uses = [read_name(name).tensor_cores for name in kernels]
    if any(uses):
        return True
    return False if False in uses else None


@dataclass(frozen=True)
class DeviceTime:
    """Busy and idle time of one traced device, in µs.

    Attributes:
        span_us: time from the beginning of the first activity to the end of the last.
        idle_us: time within the span during which no activity was running, by reason.
    """

    file: str
    span_us: float
    busy_us: float
    idle_us: Mapping[str, float]


@dataclass(frozen=True)
class ProfileAccount:
    """Account of where the time went in one or several traces.

    Attributes:
        kind: ``gpu`` or ``cpu``.
        operations: operations of all traces, or only of the GPU traces if there are any, sorted
            from the longest time to the shortest.
        devices: busy and idle time of each traced device; a CPU is one device without idle time.
        calls_without_kernel: number of calls of matrix operations with known shapes that have no
            kernel in a GPU's trace, for example because records were lost or a graph was captured.
        with_shapes: True if the traces have the input shapes of at least one matrix operation.
        with_strides: False if any matrix operation has input shapes without strides; its layout is
            then assumed.
        left_out: number of events without a name or with impossible times, which were left out.
    """

    kind: str
    device_names: tuple[str, ...]
    operations: tuple[ProfiledOperation, ...]
    devices: tuple[DeviceTime, ...]
    calls_without_kernel: int = 0
    with_shapes: bool = True
    with_strides: bool = True
    left_out: int = 0

    @property
    def total_us(self) -> float:
        """Total time of all operations, in µs."""
        return sum(operation.time_us for operation in self.operations)

    @property
    def span_us(self) -> float:
        """Sum over all devices of the time from the first activity to the last, in µs."""
        return sum(device.span_us for device in self.devices)

    @property
    def idle_us(self) -> dict[str, float]:
        """Idle time of all devices in µs, by reason, with the longest time first."""
        reasons: dict[str, float] = defaultdict(float)
        for device in self.devices:
            for reason, us in device.idle_us.items():
                reasons[reason] += us
        return dict(sorted(reasons.items(), key=lambda item: -item[1]))

    @property
    def matrix_share(self) -> float:
        """Share of the operations' time that is spent in matrix operations; 0 if no time passed."""
        total_us = self.total_us
        matrix_us = sum(operation.time_us for operation in self.operations if operation.matrix)
        return matrix_us / total_us if total_us else 0.0

    @property
    def bound(self) -> float:
        """Amdahl's bound: the speed-up if matrix operations took no time; it may be infinite."""
        # A share below 1e-9 is a rounding error of the sum.
        other_share = 1 - self.matrix_share
        return 1 / other_share if other_share > 1e-9 else float("inf")

    @property
    def graph_us(self) -> float:
        """Time of all kernels of CUDA graphs, in µs; the operations of such kernels are unknown."""
        return sum(operation.time_us for operation in self.operations if operation.op == GRAPH)


def account_of(paths: Sequence[Path]) -> ProfileAccount:
    """Account for the time in all traces of a job, such as one trace from each rank.

    Raises:
        UserError: if no trace is given, or if a file cannot be read or is not a usable trace.
    """
    if not paths:
        raise UserError("no trace is given; give at least one.")
    sums = _Sums()
    for path in paths:
        sums.add(read_trace(path))
    return sums.account()


@dataclass
class _OperationSum:
    """Number and total time of the calls with the same :class:`_CallKey`.

    ``kernels`` has the total time of each kernel in these calls, in ns, by the kernel's name.
    """

    calls: int = 0
    time_ns: float = 0.0
    kernels: dict[str, float] = field(default_factory=dict)

    def add_kernels(self, kernels: Iterable[tuple[str, float]]) -> None:
        """Add the kernels of one call, each with its name and its time in ns."""
        self.calls += 1
        for name, ns in kernels:
            self.time_ns += ns
            self.kernels[name] = self.kernels.get(name, 0.0) + ns


class _CallKey(NamedTuple):
    """Properties that calls must share to be added up.

    ``kernel`` is the name of a kernel without an operation, so that only kernels with the same name
    are added up. It is empty for a call of an operation.
    """

    op: str
    works: tuple[Work, ...]
    module: str
    matrix: bool
    kernel: str = ""


class _Sums:
    """Sums over traces that are read one after another."""

    def __init__(self) -> None:
        self._gpu_sums: dict[_CallKey, _OperationSum] = defaultdict(_OperationSum)
        self._cpu_sums: dict[_CallKey, _OperationSum] = defaultdict(_OperationSum)
        self._devices: list[DeviceTime] = []
        self._hosts: list[DeviceTime] = []
        self._names: dict[str, None] = {}  # names of devices, in order of appearance
        self._without_kernel = 0
        self._with_shapes = False
        self._with_strides = True
        self._left_out = 0

    def add(self, trace: TraceEvents) -> None:
        joined = join(trace)
        products = _products(trace, joined)
        self._names.update(dict.fromkeys(trace.device_names))
        self._left_out += trace.left_out
        self._with_shapes |= bool(trace.inputs)
        self._with_strides &= all(inputs.strides for inputs in trace.inputs)
        if len(trace.device.begin):
            self._add_kernels(trace, joined, products)
            self._devices += _device_times(trace, joined)
        else:
            self._add_host_times(trace, joined, products)

    def _add_kernels(self, trace: TraceEvents, joined: TraceJoin, products: _ProductCalls) -> None:
        # 1. Collect the kernels of each call of an operation. Add up kernels without an operation
        # by the name of the kernel.
        device, names = trace.device, trace.names
        kernels_by_call: dict[int, list[tuple[str, float]]] = defaultdict(list)
        for activity, operation in enumerate(joined.operation):
            kernel_name = names[device.name[activity]]
            kernel = kernel_name, float(device.duration[activity])
            if operation != NOTHING:
                product = products.around[operation]
                call = operation if product == NOTHING else product
                kernels_by_call[call].append(kernel)
                continue
            is_kernel = device.kind[activity] == KERNEL
            multiplies = is_kernel and read_name(kernel_name).kind in MULTIPLYING
            op = GRAPH if joined.in_graph[activity] else NO_OPERATION
            key = _CallKey(op, (), "", multiplies, kernel_name)
            self._gpu_sums[key].add_kernels([kernel])
        # 2. Add up the calls by name, shape and module.
        for call, kernels in kernels_by_call.items():
            works = products.works.get(call, ())
            if any_tensor_cores(name for name, _ in kernels):
                works = _in_tf32(works)
            for pass_works, pass_kernels in _by_pass(works, kernels):
                self._gpu_sums[_key(trace, joined, call, pass_works)].add_kernels(pass_kernels)
        self._without_kernel += sum(call not in kernels_by_call for call in products.works)

    def _add_host_times(
        self, trace: TraceEvents, joined: TraceJoin, products: _ProductCalls
    ) -> None:
        begins, ends = [], []
        names = trace.host.name
        children: dict[int, list[int]] = defaultdict(list)
        for event in joined.order:
            children[joined.parent[event]].append(event)
        for event in joined.order:
            if trace.host.kind[event] != OPERATION:
                continue
            works = products.works.get(event, ())
            operation_sum = self._cpu_sums[_key(trace, joined, event, works)]
            # The recorded times of inner operations may add up to more than that of the outer one.
            operation_sum.time_ns += max(joined.self_ns[event], 0)
            # For a scalar argument, an operation only calls itself with a tensor. The outer and the
            # inner operation are counted as one call.
            inner = children[event]
            only_calls_itself = len(inner) == 1 and names[inner[0]] == names[event]
            if not only_calls_itself:
                operation_sum.calls += 1
            begins.append(trace.host.begin[event])
            ends.append(_end(trace.host, event))
        if begins:
            span = (max(ends) - min(begins)) / 1e3
            self._hosts.append(DeviceTime(trace.path.name, span, span, {}))

    def account(self) -> ProfileAccount:
        """Return the account; if any trace has kernels, the times of CPU traces are left out."""
        on_gpu = bool(self._devices)
        sums = self._gpu_sums if on_gpu else self._cpu_sums
        operations = []
        for key, total in sums.items():
            operation = ProfiledOperation(
                op=key.op.removeprefix("aten::"),
                works=key.works,
                module=key.module,
                matrix=key.matrix,
                calls=total.calls,
                time_us=total.time_ns / 1e3,
                kernels={name: ns / 1e3 for name, ns in total.kernels.items()},
            )
            operations.append(operation)
        return ProfileAccount(
            kind="gpu" if on_gpu else "cpu",
            device_names=tuple(self._names),
            operations=tuple(sorted(operations, key=lambda operation: -operation.time_us)),
            devices=tuple(self._devices if on_gpu else self._hosts),
            calls_without_kernel=self._without_kernel,
            with_shapes=self._with_shapes,
            with_strides=self._with_strides,
            left_out=self._left_out,
        )


def _key(trace: TraceEvents, joined: TraceJoin, event: int, works: tuple[Work, ...]) -> _CallKey:
    """Return the key of a call, with a module only for a matrix operation with known shapes."""
    name = trace.names[trace.host.name[event]]
    module_number = joined.module[event]
    module = joined.modules[module_number] if works and module_number != NOTHING else ""
    is_matrix = bool(works) or MATRIX.search(name.removeprefix("aten::")) is not None
    return _CallKey(name, works, module, is_matrix)


@dataclass(frozen=True)
class _ProductCalls:
    """Calls of matrix operations with known shapes, except calls that contain another such call.

    Attributes:
        works: the problems that each such call computes, by the call's host event.
        around: for a call in ``works``, its own host event. For any other operation or annotation,
            the host event of the call in ``works`` that contains it, or NOTHING if no call does.
    """

    works: Mapping[int, tuple[Work, ...]]
    around: Sequence[int]


def _products(trace: TraceEvents, joined: TraceJoin) -> _ProductCalls:
    # 1. Find the calls whose inputs show what they compute.
    works_by_inputs = [works_of(inputs) for inputs in trace.inputs]
    inputs, parent = trace.host.inputs, joined.parent
    all_works = {
        event: works_by_inputs[inputs[event]]
        for event in joined.order
        if inputs[event] != NOTHING and works_by_inputs[inputs[event]]
    }
    # 2. Leave out calls that contain another such call, as aten::linear contains aten::addmm.
    outer: set[int] = set()
    for event in all_works:
        outer_event = parent[event]
        # Everything around an event of the set is already in the set.
        while outer_event != NOTHING and outer_event not in outer:
            outer.add(outer_event)
            outer_event = parent[outer_event]
    works = {event: computed for event, computed in all_works.items() if event not in outer}
    # 3. Find the call around each operation. Outer operations come first in the order, so the
    # result of a parent is known before its children.
    innermost = [NOTHING] * len(parent)
    for event in joined.order:
        if event in works:
            innermost[event] = event
        elif parent[event] != NOTHING:
            innermost[event] = innermost[parent[event]]
    return _ProductCalls(works, innermost)


def _by_pass(
    works: tuple[Work, ...], kernels: Sequence[tuple[str, float]]
) -> list[tuple[tuple[Work, ...], list[tuple[str, float]]]]:
    """Divide a call's kernels between a convolution's gradients if the kernels' names allow it.

    Each kernel is a pair of a name and a time in ns. If a kernel's name does not show its gradient,
    each gradient gets a share of the kernel's time, in proportion to the total time of the kernels
    whose names show this gradient. The result has one entry for each gradient, or a single entry
    with all kernels if they cannot be divided.
    """
    # 1. Find the pass of each kernel whose name contains only one of the passes, and sum the times
    # of each pass. If there is only one pass, or if a sum is 0, the kernels cannot be divided.
    work_by_pass = {work.pass_: work for work in works if isinstance(work, Conv)}
    pass_by_name: dict[str, str] = {}
    named_ns = dict.fromkeys(work_by_pass, 0.0)
    for name, ns in kernels:
        passes_in_name = [pass_ for pass_ in work_by_pass if pass_ in name.lower()]
        if len(passes_in_name) == 1:
            pass_by_name[name] = passes_in_name[0]
            named_ns[passes_in_name[0]] += ns
    if len(work_by_pass) < 2 or not all(named_ns.values()):
        return [(works, list(kernels))]
    # 2. Give each pass its kernels, and a share of the others, such as transposes.
    total_ns = sum(named_ns.values())
    divided: list[tuple[tuple[Work, ...], list[tuple[str, float]]]] = []
    for pass_, work in work_by_pass.items():
        pass_kernels = []
        for name, ns in kernels:
            if name not in pass_by_name:
                pass_kernels.append((name, ns * named_ns[pass_] / total_ns))
            elif pass_by_name[name] == pass_:
                pass_kernels.append((name, ns))
        divided.append(((work,), pass_kernels))
    return divided


def _in_tf32(works: tuple[Work, ...]) -> tuple[Work, ...]:
    """Return the problems, with all GEMMs and convolutions in fp32 changed to tf32.

    Tensor Cores multiply fp32 operands in tf32.
    """
    return tuple(
        replace(work, dtype="tf32")
        if isinstance(work, Gemm | Conv) and work.dtype == "fp32"
        else work
        for work in works
    )


def _device_times(trace: TraceEvents, joined: TraceJoin) -> list[DeviceTime]:
    """Return the busy and idle time of each device in a trace."""
    # 1. Sort the activities of each device by the time at which they begin.
    device = trace.device
    by_device: dict[int, list[int]] = defaultdict(list)
    in_order = sorted(range(len(device.begin)), key=lambda activity: device.begin[activity])
    for activity in in_order:
        by_device[device.device[activity]].append(activity)
    # 2. Add up the gaps in which no activity is running. Of the activities so far, ``latest`` is
    # the one that ends last.
    call_before = _calls_before(trace, joined)
    times = []
    for activities in by_device.values():
        idle_us: dict[str, float] = defaultdict(float)
        latest = activities[0]
        span_begin = device.begin[latest]
        end = span_begin
        for activity in activities:
            activity_begin = device.begin[activity]
            activity_end = activity_begin + device.duration[activity]
            if activity_begin > end:
                reason = _idle_reason(trace, joined, call_before, latest, activity, end)
                idle_us[reason] += (activity_begin - end) / 1e3
            if activity_end >= end:
                end = activity_end
                latest = activity
        span_us = (end - span_begin) / 1e3
        busy_us = span_us - sum(idle_us.values())
        times.append(DeviceTime(trace.path.name, span_us, busy_us, dict(idle_us)))
    return times


def _calls_before(trace: TraceEvents, joined: TraceJoin) -> dict[int, int]:
    """Map each call of CUDA's runtime or driver, except a thread's first, to the call before it."""
    thread = trace.host.thread
    pairs = zip(joined.calls, joined.calls[1:], strict=False)
    return {call: before for before, call in pairs if thread[call] == thread[before]}


def _end(host: HostEvents, event: int) -> int:
    return host.begin[event] + host.duration[event]


def _idle_reason(
    trace: TraceEvents,
    joined: TraceJoin,
    call_before: Mapping[int, int],
    activity_before: int,
    activity_after: int,
    idle_begin: int,
) -> str:
    """Return why a device was idle between two activities, from ``idle_begin`` (in ns) onwards."""
    # 1. Check whether an activity next to the idle time copies between host and device.
    host, device = trace.host, trace.device
    for activity in (activity_before, activity_after):
        name = trace.names[device.name[activity]]
        if device.kind[activity] == COPY and ("HtoD" in name or "DtoH" in name):
            return COPY_BOUND
    # 2. Check whether the next activity was launched before the idle time.
    call = joined.launch[activity_after]
    if call == NOTHING:
        return UNKNOWN_IDLE
    if _end(host, call) <= idle_begin:
        return BETWEEN_KERNELS
    # 3. The launch came late, so the reason is what the thread did before it. A call of the runtime
    # that contains this call of the driver does not count as a call before it.
    previous = call_before.get(call, NOTHING)
    while previous != NOTHING and _end(host, previous) > host.begin[call]:
        previous = call_before.get(previous, NOTHING)
    if previous == NOTHING or "Synchronize" in trace.names[host.name[previous]]:
        return HOST_BOUND
    pause = host.begin[call] - _end(host, previous)
    return LAUNCH_BOUND if pause <= _PAUSE_NS else HOST_BOUND
