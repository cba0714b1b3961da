"""Account for the time of a traced step: which operations took it, and why the GPU was idle.

On a GPU, an operation's time is that of its kernels. A kernel belongs to the innermost operation
that multiplies matrices around its launch, with the copies and transposes that it launches, or else
to the innermost operation of any kind. Kernels of several streams may overlap; each counts its own
time, and the GPU is busy while any of them runs. On a CPU, an operation's time is its own, without
that of the operations within it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

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
"""Reasons for which a GPU was idle.

``launching``: the next kernel was launched too late, by a host that launched one after another.
``host``: the host did something else, or waited for the GPU. ``copies``: data was copied between
host and device. ``between kernels``: the next kernel had been launched in time.
"""

GRAPH, NO_OPERATION = "CUDA graph", "no operation"
"""Names that stand for the operation of kernels that were launched by a graph, or by no operation
that the trace has."""

MULTIPLYING = ("gemm", "conv", "winograd", "fft", "attention", "gemv")
"""Kinds of kernels that do the arithmetic of a matrix operation."""

_PAUSE_NS = 100_000
"""Longest pause between two calls of a host that launches kernels one after another, in ns.

PyTorch needs microseconds from one operation to the next. A host that loads data or computes
something else needs milliseconds. The value lies between the two.
"""


@dataclass(frozen=True)
class ProfiledOperation:
    """Operations of one name, shape and place in the model. Times are of all calls, in µs.

    Attributes:
        op: name without ``aten::``; :data:`GRAPH` or :data:`NO_OPERATION` for other kernels.
        works: what a call multiplies; both gradients of a convolution if one call computes them and
            its kernels' names do not tell which is which; empty if that is not known.
        module: classes of the modules around it, such as ``GPT2Model.GPT2Block.Linear``; empty if
            the trace has none.
        matrix: True if it multiplies matrices, even if the shapes are not known.
        calls: number of calls.
        time_us: time of all calls.
        kernels: time of all calls by the kernel's name; empty on a CPU.
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
        """Mean time of one call in µs; an operation that only calls itself has no calls."""
        return self.time_us / max(self.calls, 1)

    @property
    def dtype(self) -> str:
        """Dtype of the operands; empty if it is not known."""
        return self.works[0].dtype if self.works else ""

    @property
    def shape(self) -> str:
        """Words for what a call multiplies; empty if that is not known."""
        *first, last = self.works or ("",)
        if len(first) == 1 and isinstance(last, Conv) and isinstance(first[0], Conv):
            return f"{first[0].pass_} and {last}"  # both gradients of one convolution
        return str(last)

    @property
    def flops(self) -> int:
        """FLOPs of one call; 0 if the shapes are not known."""
        return sum(work.flops for work in self.works)

    @property
    def bytes(self) -> int:
        """Least traffic of one call in bytes; 0 if it is not known."""
        known = [work.bytes for work in self.works if isinstance(work, Gemm | Conv)]
        return sum(known) if len(known) == len(self.works) else 0

    @property
    def kernel(self) -> str:
        """Name of the main kernel: of those that multiply, the one that takes longest."""
        order = sorted(self.kernels, key=lambda name: -self.kernels[name])
        multiplying = [name for name in order if read_name(name).kind in MULTIPLYING]
        return next(iter((*multiplying, *order)), "")

    @property
    def kernel_name(self) -> KernelName:
        """Facts that the main kernel's name shows."""
        return read_name(self.kernel)

    @property
    def uses_tensor_cores(self) -> bool | None:
        """True if any kernel uses Tensor Cores; None if no kernel's name shows it."""
        return any_tensor_cores(self.kernels)

    def share_of_kind(self, kind: str) -> float:
        """Return the share of the time in kernels of a kind, from :data:`kernels.names.KINDS`."""
        total = sum(self.kernels.values())
        of_kind = sum(us for name, us in self.kernels.items() if read_name(name).kind == kind)
        return of_kind / total if total else 0.0


def any_tensor_cores(kernels: Iterable[str]) -> bool | None:
    """Return True if any kernel uses Tensor Cores; None if no kernel's name shows it."""
    uses = [read_name(name).tensor_cores for name in kernels]
    return True if any(uses) else False if False in uses else None


@dataclass(frozen=True)
class DeviceTime:
    """Time of one traced device, in µs.

    Attributes:
        file: name of the trace.
        span_us: from the first to the last activity.
        busy_us: time in which anything was running.
        idle_us: the rest of the span, by reason.
    """

    file: str
    span_us: float
    busy_us: float
    idle_us: Mapping[str, float]


@dataclass(frozen=True)
class ProfileAccount:
    """Account of the time of one or several traces, in µs.

    Attributes:
        kind: ``gpu`` or ``cpu``.
        device_names: names of the GPUs.
        operations: the operations, those that take longest first.
        devices: busy and idle time of each traced device; a CPU is one device without idle time.
        calls_without_kernel: calls of matrix operations whose kernels the trace does not have,
            because records were lost or a graph was captured.
        with_shapes: True if any matrix operation has the shapes of its inputs.
        with_strides: True unless shapes lack their strides, so that layouts are assumed.
        left_out: events with impossible times.
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
        """Time of all operations."""
        return sum(operation.time_us for operation in self.operations)

    @property
    def span_us(self) -> float:
        """Time from the first to the last activity, of all devices together."""
        return sum(device.span_us for device in self.devices)

    @property
    def idle_us(self) -> dict[str, float]:
        """Time in which devices were idle, by reason; the longest first."""
        reasons: dict[str, float] = defaultdict(float)
        for device in self.devices:
            for reason, us in device.idle_us.items():
                reasons[reason] += us
        return dict(sorted(reasons.items(), key=lambda item: -item[1]))

    @property
    def matrix_share(self) -> float:
        """Share of the operations' time that is spent in matrix operations."""
        total = self.total_us
        return sum(o.time_us for o in self.operations if o.matrix) / total if total else 0.0

    @property
    def bound(self) -> float:
        """Amdahl's bound: the speed-up if matrix work took no time; infinite without other work."""
        rest = 1 - self.matrix_share
        return 1 / rest if rest > 1e-9 else float("inf")

    @property
    def graph_us(self) -> float:
        """Time of the kernels of CUDA graphs, whose operations and shapes are not known."""
        return sum(o.time_us for o in self.operations if o.op == GRAPH)


def account_of(paths: Sequence[Path]) -> ProfileAccount:
    """Account for the time of traces of one job, such as one of each rank.

    Operations of one name, shape and module are added up.

    Raises:
        UserError: if there is no trace, or one cannot be read.
    """
    if not paths:
        raise UserError("give at least one trace.")
    sums = _Sums()
    for path in paths:
        sums.add(read_trace(path))
    return sums.account()


@dataclass
class _OperationSum:
    """Sum of the calls of one kind of operation."""

    calls: int = 0
    time_ns: float = 0.0
    kernels: dict[str, float] = field(default_factory=dict)

    def add_kernels(self, kernels: Iterable[tuple[str, float]]) -> None:
        """Add the kernels of one call."""
        self.calls += 1
        for name, ns in kernels:
            self.time_ns += ns
            self.kernels[name] = self.kernels.get(name, 0.0) + ns


_Key = tuple[str, tuple[Work, ...], str, bool]


class _Sums:
    """Sums of traces that are read one after another."""

    def __init__(self) -> None:
        self._operations: dict[_Key, _OperationSum] = defaultdict(_OperationSum)
        self._own: dict[_Key, _OperationSum] = defaultdict(_OperationSum)
        self._devices: list[DeviceTime] = []
        self._hosts: list[DeviceTime] = []
        self._names: dict[str, None] = {}
        self._without_kernel = 0
        self._with_shapes, self._with_strides = False, True
        self._left_out = 0

    def add(self, trace: TraceEvents) -> None:
        """Add the events of one trace."""
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
            self._add_own_times(trace, joined, products)

    def _add_kernels(self, trace: TraceEvents, joined: TraceJoin, products: _ProductCalls) -> None:
        # 1. Collect the kernels of each call of an operation. Other kernels have no call.
        device, names = trace.device, trace.names
        of_call: dict[int, list[tuple[str, float]]] = defaultdict(list)
        for place, operation in enumerate(joined.operation):
            kernel = names[device.name[place]], float(device.duration[place])
            if operation != NOTHING:
                product = products.around[operation]
                of_call[operation if product == NOTHING else product].append(kernel)
                continue
            multiplies = device.kind[place] == KERNEL and read_name(kernel[0]).kind in MULTIPLYING
            op = GRAPH if joined.in_graph[place] else NO_OPERATION
            # The kernel's name tells them apart in place of a module.
            self._operations[op, (), kernel[0], multiplies].add_kernels([kernel])
        # 2. Add up the calls by name, shape and module.
        for call, kernels in of_call.items():
            for works, part in _by_pass(products.works.get(call, ()), kernels):
                self._operations[_key(trace, joined, call, works)].add_kernels(part)
        self._without_kernel += sum(call not in of_call for call in products.works)

    def _add_own_times(
        self, trace: TraceEvents, joined: TraceJoin, products: _ProductCalls
    ) -> None:
        begins, ends = [], []
        name = trace.host.name
        inner: dict[int, list[int]] = defaultdict(list)
        for event in joined.order:
            inner[joined.parent[event]].append(event)
        for event in joined.order:
            if trace.host.kind[event] != OPERATION:
                continue
            total = self._own[_key(trace, joined, event, products.works.get(event, ()))]
            total.time_ns += max(joined.own_ns[event], 0)
            # An operation on a scalar only calls itself on a tensor, which is not a second call.
            within = inner[event]
            total.calls += len(within) != 1 or name[within[0]] != name[event]
            begins.append(trace.host.begin[event])
            ends.append(_end(trace.host, event))
        if begins:
            span = (max(ends) - min(begins)) / 1e3
            self._hosts.append(DeviceTime(trace.path.name, span, span, {}))

    def account(self) -> ProfileAccount:
        """Return the account; if any trace has kernels, only those of kernels count."""
        on_gpu = bool(self._devices)
        operations = [
            ProfiledOperation(
                key[0].removeprefix("aten::"),
                key[1],
                "" if key[0] in (GRAPH, NO_OPERATION) else key[2],
                key[3],
                total.calls,
                total.time_ns / 1e3,
                {name: ns / 1e3 for name, ns in total.kernels.items()},
            )
            for key, total in (self._operations if on_gpu else self._own).items()
        ]
        return ProfileAccount(
            "gpu" if on_gpu else "cpu",
            tuple(self._names),
            tuple(sorted(operations, key=lambda operation: -operation.time_us)),
            tuple(self._devices if on_gpu else self._hosts),
            self._without_kernel,
            self._with_shapes,
            self._with_strides,
            self._left_out,
        )


def _key(trace: TraceEvents, joined: TraceJoin, event: int, works: tuple[Work, ...]) -> _Key:
    """Return what an operation is added up by. Only matrix operations are told apart by module."""
    name = trace.names[trace.host.name[event]]
    place = joined.module[event]
    module = joined.modules[place] if works and place != NOTHING else ""
    is_matrix = bool(works) or MATRIX.search(name.removeprefix("aten::")) is not None
    return name, works, module, is_matrix


@dataclass(frozen=True)
class _ProductCalls:
    """Calls of operations whose shapes are known.

    ``works`` is what each call multiplies. Where one such operation calls another, only the inner
    one counts. ``around`` is the innermost such call around each host event, itself included.
    """

    works: Mapping[int, tuple[Work, ...]]
    around: Sequence[int]


def _products(trace: TraceEvents, joined: TraceJoin) -> _ProductCalls:
    known = [works_of(inputs) for inputs in trace.inputs]
    inputs, parent = trace.host.inputs, joined.parent
    works = {
        event: known[inputs[event]]
        for event in joined.order
        if inputs[event] != NOTHING and known[inputs[event]]
    }
    # 1. Leave out the operations around other products, such as aten::linear around aten::addmm.
    outer: set[int] = set()
    for event in works:
        around = parent[event]
        while around != NOTHING and around not in outer:
            outer.add(around)
            around = parent[around]
    works = {event: multiplied for event, multiplied in works.items() if event not in outer}
    # 2. Find the product around each operation. Outer operations come first in the order.
    inner = [NOTHING] * len(parent)
    for event in joined.order:
        if event in works:
            inner[event] = event
        elif parent[event] != NOTHING:
            inner[event] = inner[parent[event]]
    return _ProductCalls(works, inner)


def _by_pass(
    works: tuple[Work, ...], kernels: Sequence[tuple[str, float]]
) -> list[tuple[tuple[Work, ...], list[tuple[str, float]]]]:
    """Return a call's kernels with what they multiply, a part for each gradient if names tell them.

    Kernels that do not name their pass, such as transposes, are divided in proportion to the time
    of those that do. Multiplying fp32 operands on Tensor Cores is tf32.
    """
    names = [name for name, _ in kernels]
    if any_tensor_cores(names):
        works = tuple(
            replace(work, dtype="tf32")
            if isinstance(work, Gemm | Conv) and work.dtype == "fp32"
            else work
            for work in works
        )
    passes = {work.pass_: work for work in works if isinstance(work, Conv)}
    times = dict.fromkeys(passes, 0.0)
    for name, ns in kernels:
        for pass_ in passes:
            times[pass_] += ns if pass_ in name.lower() else 0.0
    if len(passes) < 2 or not all(times.values()):
        return [(works, list(kernels))]
    total = sum(times.values())
    parts: list[tuple[tuple[Work, ...], list[tuple[str, float]]]] = []
    for pass_, work in passes.items():
        part = []
        for name, ns in kernels:
            named = [other for other in passes if other in name.lower()]
            if not named:
                part.append((name, ns * times[pass_] / total))
            elif pass_ in named:
                part.append((name, ns))
        parts.append(((work,), part))
    return parts


def _device_times(trace: TraceEvents, joined: TraceJoin) -> list[DeviceTime]:
    """Return the busy and idle time of each device of a trace."""
    device = trace.device
    by_device: dict[int, list[int]] = defaultdict(list)
    for place in sorted(range(len(device.begin)), key=device.begin.__getitem__):
        by_device[device.device[place]].append(place)
    before = _calls_before(trace, joined)
    times = []
    for places in by_device.values():
        idle: dict[str, float] = defaultdict(float)
        begin = end = device.begin[places[0]]
        last = places[0]
        for place in places:
            if device.begin[place] > end:
                reason = _idle_reason(trace, joined, before, (last, place), end)
                idle[reason] += (device.begin[place] - end) / 1e3
            if device.begin[place] + device.duration[place] >= end:
                end, last = device.begin[place] + device.duration[place], place
        span = (end - begin) / 1e3
        times.append(DeviceTime(trace.path.name, span, span - sum(idle.values()), dict(idle)))
    return times


def _calls_before(trace: TraceEvents, joined: TraceJoin) -> dict[int, int]:
    """Return, for each call of the runtime, the call before it on the same thread."""
    thread = trace.host.thread
    pairs = zip(joined.calls, joined.calls[1:], strict=False)
    return {call: before for before, call in pairs if thread[call] == thread[before]}


def _end(host: HostEvents, event: int) -> int:
    return host.begin[event] + host.duration[event]


def _idle_reason(
    trace: TraceEvents,
    joined: TraceJoin,
    before: Mapping[int, int],
    around: tuple[int, int],
    ended: int,
) -> str:
    """Return why a device was idle from ``ended``, in ns, until an activity began.

    ``around`` are the activities before and after the idle time.
    """
    host, device = trace.host, trace.device
    names = [trace.names[device.name[place]] for place in around if device.kind[place] == COPY]
    if any("HtoD" in name or "DtoH" in name for name in names):
        return COPY_BOUND
    call = joined.launch[around[1]]
    if call == NOTHING:
        return UNKNOWN_IDLE
    if _end(host, call) <= ended:
        return BETWEEN_KERNELS
    previous = before.get(call, NOTHING)
    # A call of the runtime that makes this call of the driver is not a call before it.
    while previous != NOTHING and _end(host, previous) > host.begin[call]:
        previous = before.get(previous, NOTHING)
    if previous == NOTHING or "Synchronize" in trace.names[host.name[previous]]:
        return HOST_BOUND
    pause = host.begin[call] - _end(host, previous)
    return LAUNCH_BOUND if pause <= _PAUSE_NS else HOST_BOUND
