"""Read the events of a trace into columns, and find the operation that launched each kernel.

An operation runs on a thread of the host, often within other operations. Each kernel is launched by
a call to CUDA's runtime or driver, and the kernel's event has the number of that call
(``correlation``). A kernel therefore belongs to the innermost operation that was running on the
call's thread when the call began. If no operation was running, or the record of the call is lost,
the kernel's ``External id`` names its operation. One call launches all kernels of a CUDA graph, so
no operation is known for them. The same rules hold for copies and memsets.

Events are kept as columns of numbers. An event takes about 200 bytes, including its links to other
events, so a trace of several gigabytes fits in memory.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from analysis.markdown import printable
from analysis.traces.trace_reader import DEVICES, read_events
from kernels.common.errors import UserError

OPERATION, ANNOTATION, MODULE, LAUNCH = range(4)
"""Kinds of host events: an operation, a range that the user named, a module of ``torch.nn``, and a
call to CUDA's runtime or driver."""

KERNEL, COPY, MEMSET = range(3)
"""Kinds of device events: a kernel, a copy and a memset."""

NOTHING = -1
"""Number that stands for a missing position or id."""

_HOST_KINDS = {
    "cpu_op": OPERATION, "user_annotation": ANNOTATION, "python_function": MODULE,
    "cuda_runtime": LAUNCH, "cuda_driver": LAUNCH,
}  # fmt: skip
_DEVICE_KINDS = {"kernel": KERNEL, "gpu_memcpy": COPY, "gpu_memset": MEMSET}
_MODULE_NAME = "nn.Module: "
_INSTANCE = re.compile(r"_\d+\b")  # number that distinguishes modules of one class

MATRIX = re.compile(
    r"(^|_)(mm|addmm|bmm|baddbmm|linear|matmul|mv|addmv)_?(_v2)?$"
    r"|addmm_activation|convolution|conv\d|conv_|attention|_rnn|lstm"
)
"""Pattern that recognizes matrix operations by their names without ``aten::``. Matrix operations
are GEMMs, convolutions, attention and recurrent layers."""

_INPUT_KEYS = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
"""Keys in the ``args`` of an operation's event that describe the operation's inputs. Older versions
of PyTorch write only the first two."""

# Largest accepted time in µs. It is 285 years, which is later than any clock in use shows. In ns,
# it still fits in the signed 64-bit integers that hold times.
_LATEST = 9e15
_LONGEST_NS = 100_000 * 10**9  # an event of more than a day is damaged
_LONGEST_SPAN_NS = _LONGEST_NS  # a trace of more than a day is damaged, too
_LARGEST_ID = 2**62  # ids are kept as signed 64-bit integers
# With 13 digits in µs, the begin and the end of an event each have an error of up to a nanosecond.
_ROUNDING_NS = 2
_SLACK_NS = 1000  # earlier versions of PyTorch round times down to µs
_LONGEST_NAME = 1000  # characters of a name that are kept; template kernels' names have hundreds
_LONGEST_ARGUMENTS = 10_000  # characters of an operation's inputs; longer ones are left out
_MOST_EVENTS = 20_000_000  # maximum number of events in memory, where they take four gigabytes


@dataclass(frozen=True)
class OperationInputs:
    """Inputs of an operation, as recorded in the trace.

    All tuples have one element per argument, but ``strides`` and ``settings`` are empty if the
    trace does not record them.

    Attributes:
        name: name of the operation, usually with ``aten::``.
        dims: sizes of each tensor; an empty tuple for an argument that is not a tensor.
        strides: strides of each tensor, in elements; an empty tuple for an argument that is not a
            tensor.
        types: name of each argument's type, such as ``c10::BFloat16``.
        settings: text of each argument that is not a tensor; "" for a tensor.
    """

    name: str
    dims: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    settings: tuple[str, ...]


@dataclass
class HostEvents:
    """Columns of the host's events; times are in ns on the trace's clock.

    :data:`NOTHING` stands for a position or id that an event lacks.

    Attributes:
        kind: ``OPERATION``, ``ANNOTATION``, ``MODULE`` or ``LAUNCH``.
        name: position of the event's name in :attr:`TraceEvents.names`.
        thread: number of the event's thread among the threads of all processes.
        inputs: position of a matrix operation's inputs in :attr:`TraceEvents.inputs`.
        external: id by which device events name an operation.
        correlation: id by which device events name the call that launched them.
        sequence: sequence number of the autograd node that a forward operation makes, or that an
            operation of the backward pass evaluates.
        backward: 1 for an operation of the backward pass, else 0.
    """

    kind: array[int] = field(default_factory=lambda: array("b"))
    name: array[int] = field(default_factory=lambda: array("i"))
    thread: array[int] = field(default_factory=lambda: array("i"))
    begin: array[int] = field(default_factory=lambda: array("q"))
    duration: array[int] = field(default_factory=lambda: array("q"))
    inputs: array[int] = field(default_factory=lambda: array("i"))
    external: array[int] = field(default_factory=lambda: array("q"))
    correlation: array[int] = field(default_factory=lambda: array("q"))
    sequence: array[int] = field(default_factory=lambda: array("q"))
    backward: array[int] = field(default_factory=lambda: array("b"))


@dataclass
class DeviceEvents:
    """Columns of the devices' events; times are in ns on the trace's clock.

    :data:`NOTHING` stands for an id that an event lacks.

    Attributes:
        kind: ``KERNEL``, ``COPY`` or ``MEMSET``.
        name: position of the event's name in :attr:`TraceEvents.names`.
        device: id of the device.
        external: id of the operation that launched the event.
        correlation: id of the call that launched the event.
        graph: 1 for an event that the trace describes as part of a CUDA graph, else 0.
    """

    kind: array[int] = field(default_factory=lambda: array("b"))
    name: array[int] = field(default_factory=lambda: array("i"))
    device: array[int] = field(default_factory=lambda: array("q"))
    begin: array[int] = field(default_factory=lambda: array("q"))
    duration: array[int] = field(default_factory=lambda: array("q"))
    external: array[int] = field(default_factory=lambda: array("q"))
    correlation: array[int] = field(default_factory=lambda: array("q"))
    graph: array[int] = field(default_factory=lambda: array("b"))


@dataclass
class TraceEvents:
    """Events of one trace, as columns, and the names and inputs to which the columns refer.

    Attributes:
        device_names: names of those GPUs in the trace's GPU list that have events, or of all GPUs
            in this list if none of them has events; empty if the trace has no GPU list.
        left_out: number of events that were left out because they have impossible times or no name.
    """

    path: Path
    host: HostEvents = field(default_factory=HostEvents)
    device: DeviceEvents = field(default_factory=DeviceEvents)
    names: list[str] = field(default_factory=list)
    inputs: list[OperationInputs] = field(default_factory=list)
    device_names: tuple[str, ...] = ()
    left_out: int = 0


def read_trace(path: Path) -> TraceEvents:
    """Read the events of one trace.

    Raises:
        UserError: if the file cannot be read, or is not a usable trace.
    """
    header: dict[str, Any] = {}
    trace = TraceEvents(path)
    columns = _Columns(trace)
    for event in read_events(path, header):
        columns.add(event)
    trace.device_names = _device_names(header.get(DEVICES), set(trace.device.device))
    begins = np.concatenate([_numbers(trace.host.begin), _numbers(trace.device.begin)])
    if OPERATION not in trace.host.kind and not len(trace.device.begin):
        raise UserError(
            f"{path} has no operations. Record a trace with "
            "torch.profiler.profile(record_shapes=True) around at least one step of the model."
        )
    if begins.max() - begins.min() > _LONGEST_SPAN_NS:
        raise UserError(
            f"{path} spans more than a day, so one of its times is damaged. Record the trace again."
        )
    return trace


def _device_names(device_list: Any, used_ids: Collection[int]) -> tuple[str, ...]:
    """Return :attr:`TraceEvents.device_names`, without repetitions."""
    entries = device_list if isinstance(device_list, list) else []
    all_names: list[str] = []
    used_names: list[str] = []
    for entry in entries:
        if not isinstance(entry, dict):
            continue
        name = _short_text(entry.get("name"))
        if name:
            all_names.append(name)
            if _id(entry.get("id")) in used_ids:
                used_names.append(name)
    return tuple(dict.fromkeys(used_names or all_names))


class _Columns:
    """Writer that adds events to a trace's columns.

    Equal names get the same number, as do equal inputs and equal threads.
    """

    def __init__(self, trace: TraceEvents) -> None:
        self._trace = trace
        self._names: dict[str, int] = {}
        self._inputs: dict[str, int] = {}
        self._threads: dict[str, int] = {}

    def add(self, event: Any) -> None:
        # 1. Leave out events that are neither host events nor device events of a known kind.
        if not isinstance(event, dict) or event.get("ph") != "X":
            return
        category = event.get("cat")
        if not isinstance(category, str):
            return
        host_kind, device_kind = _HOST_KINDS.get(category), _DEVICE_KINDS.get(category)
        name = event.get("name")
        if host_kind is None and device_kind is None:
            return
        if host_kind == MODULE and not (isinstance(name, str) and name.startswith(_MODULE_NAME)):
            return
        # 2. Leave out events with impossible times or without a name, and count them.
        begin, duration = _time_ns(event.get("ts")), _time_ns(event.get("dur"))
        short_name = _short_text(name)
        if begin is None or duration is None or duration > _LONGEST_NS or not short_name:
            self._trace.left_out += 1
            return
        arguments = event.get("args")
        if not isinstance(arguments, dict):
            arguments = {}
        # 3. Add the event to its columns.
        if device_kind is not None:
            self._add_device(device_kind, short_name, begin, duration, event, arguments)
        elif host_kind is not None:
            self._add_host(host_kind, short_name, begin, duration, event, arguments)
        if len(self._trace.host.begin) + len(self._trace.device.begin) > _MOST_EVENTS:
            raise UserError(
                f"{self._trace.path} has more than {_MOST_EVENTS:,} events. Record fewer steps."
            )

    def _add_host(
        self,
        kind: int,
        name: str,
        begin: int,
        duration: int,
        event: Mapping[str, Any],
        arguments: Mapping[str, Any],
    ) -> None:
        host = self._trace.host
        if kind == MODULE:
            name = _INSTANCE.sub("", name.removeprefix(_MODULE_NAME))
        host.kind.append(kind)
        host.name.append(self._number_of(name))
        # The ids of threads are unique only within a process.
        thread = f"{event.get('pid')} {event.get('tid')}"[:_LONGEST_NAME]
        host.thread.append(self._threads.setdefault(thread, len(self._threads)))
        host.begin.append(begin)
        host.duration.append(duration)
        host.inputs.append(self._inputs_of(name, arguments) if kind == OPERATION else NOTHING)
        host.external.append(_id(arguments.get("External id")))
        host.correlation.append(_id(arguments.get("correlation")))
        host.sequence.append(_id(arguments.get("Sequence number")))
        # An operation of the backward pass names the thread of its forward operation. In all other
        # operations, the entry is 0 or missing.
        host.backward.append(_id(arguments.get("Fwd thread id")) > 0)

    def _add_device(
        self,
        kind: int,
        name: str,
        begin: int,
        duration: int,
        event: Mapping[str, Any],
        arguments: Mapping[str, Any],
    ) -> None:
        device = self._trace.device
        # Traces show each device as a process, and the process id is the id of the device.
        device_id = arguments.get("device", event.get("pid"))
        device.kind.append(kind)
        device.name.append(self._number_of(name))
        device.device.append(_id(device_id))
        device.begin.append(begin)
        device.duration.append(duration)
        device.external.append(_id(arguments.get("External id")))
        device.correlation.append(_id(arguments.get("correlation")))
        device.graph.append(_id(arguments.get("graph id")) > 0)

    def _number_of(self, name: str) -> int:
        number = self._names.setdefault(name, len(self._names))
        if number == len(self._trace.names):
            self._trace.names.append(name)
        return number

    def _inputs_of(self, name: str, arguments: Mapping[str, Any]) -> int:
        """Return the position of a matrix operation's inputs, and add them if they are new.

        The result is NOTHING if the operation is not a matrix operation, or if its inputs are
        missing, malformed or too long.
        """
        if not MATRIX.search(name.removeprefix("aten::")):
            return NOTHING
        # Each of these lists has one element per argument, or is empty if the trace lacks it.
        described = [arguments.get(key, []) for key in _INPUT_KEYS]
        if not all(isinstance(column, list) for column in described):
            return NOTHING
        dims, types, strides, settings = described
        if not dims or not types:
            return NOTHING
        signature = f"{name} {described}"
        if len(signature) > _LONGEST_ARGUMENTS:
            return NOTHING
        if signature not in self._inputs:
            self._inputs[signature] = len(self._trace.inputs)
            self._trace.inputs.append(
                OperationInputs(
                    name,
                    tuple(map(_sizes, dims)),
                    tuple(map(_sizes, strides)),
                    tuple(map(str, types)),
                    tuple(map(str, settings)),
                )
            )
        return self._inputs[signature]


def _time_ns(value: Any) -> int | None:
    """Convert a time from µs to ns; return None if the value is not a possible time."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # NaN fails the comparison, too.
    return round(value * 1000) if 0 <= value <= _LATEST else None


def _id(value: Any) -> int:
    """Return a value as an id, or NOTHING if it is not a whole number from 0 to 2⁶² − 1."""
    usable = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST_ID
    return value if usable else NOTHING


def _sizes(value: Any) -> tuple[int, ...]:
    """Return the sizes or strides of a tensor, or () for anything else, such as a tensor list."""
    if not isinstance(value, list):
        return ()
    # Sizes and strides are whole numbers of at least 0, like ids.
    sizes = tuple(map(_id, value))
    return () if NOTHING in sizes else sizes


def _short_text(value: Any) -> str:
    """Return a name in printable characters, shortened if it is too long; "" if it is not text."""
    return printable(value[:_LONGEST_NAME]).strip() if isinstance(value, str) else ""


def _numbers(column: array[int]) -> NDArray[np.int64]:
    return np.array(column, dtype=np.int64)


@dataclass(frozen=True)
class TraceJoin:
    """Links between the events of a trace. A link is the position of a host event, or NOTHING.

    Attributes:
        order: links to all operations and annotations. An outer event comes before the events
            within it.
        calls: links to all calls to CUDA's runtime and driver, sorted by thread and time.
        parent: link from each host event to the innermost operation or annotation around it.
        self_ns: own time of each operation and annotation in ns, which is its duration minus the
            durations of the operations and annotations directly within it; for all other host
            events, the duration.
        module: for each host event, the position in ``modules`` of its path, or NOTHING if no
            module is around it. If no module is around an operation of the backward pass, its path
            is that of its forward operation.
        modules: paths of nested modules, given as the names of their classes, outermost first,
            such as ``GPT2Model.GPT2Block.Linear``.
        operation: link from each device event to the operation that launched it.
        launch: link from each device event to the call that launched it.
        in_graph: True for each device event that is part of a CUDA graph, else False.
    """

    order: Sequence[int]
    calls: Sequence[int]
    parent: Sequence[int]
    self_ns: Sequence[int]
    module: Sequence[int]
    modules: Sequence[str]
    operation: Sequence[int]
    launch: Sequence[int]
    in_graph: Sequence[bool]


def join(trace: TraceEvents) -> TraceJoin:
    """Link host events to the operations around them, and device events to what launched them."""
    host = trace.host
    # 1. Find the operation and the modules around each host event. If two events of a thread begin
    # at the same time, the longer event contains the shorter one and must come first.
    begin, duration = _numbers(host.begin), _numbers(host.duration)
    order = np.lexsort((-duration, begin, _numbers(host.thread))).tolist()
    nesting = _nest(trace, order)
    operations = [event for event in order if host.kind[event] in (OPERATION, ANNOTATION)]
    _pass_modules_on(host, operations, nesting)
    # 2. Find the call that launched each device event, and whether it launched a CUDA graph.
    calls = [event for event in order if host.kind[event] == LAUNCH]
    call_by_correlation = {host.correlation[event]: event for event in calls}
    # Calls without an id are entered under NOTHING, and must not be linked to device events.
    call_by_correlation[NOTHING] = NOTHING
    launch = [call_by_correlation.get(number, NOTHING) for number in trace.device.correlation]
    in_graph = [
        bool(graph) or (call != NOTHING and "GraphLaunch" in trace.names[host.name[call]])
        for graph, call in zip(trace.device.graph, launch, strict=True)
    ]
    # 3. Find the operation of each device event: the operation around the launch or, without one,
    # the operation with the event's external id.
    operation_by_id = {
        host.external[event]: event
        for event in operations
        if host.kind[event] == OPERATION and host.external[event] != NOTHING
    }
    device_operations = []
    for device_event, call in enumerate(launch):
        if in_graph[device_event]:
            device_operations.append(NOTHING)
            continue
        operation = nesting.parent[call] if call != NOTHING else NOTHING
        while operation != NOTHING and host.kind[operation] == ANNOTATION:
            operation = nesting.parent[operation]
        if operation == NOTHING:
            operation = operation_by_id.get(trace.device.external[device_event], NOTHING)
        device_operations.append(operation)
    return TraceJoin(
        order=operations,
        calls=calls,
        parent=nesting.parent,
        self_ns=nesting.self_ns,
        module=nesting.module,
        modules=nesting.modules,
        operation=device_operations,
        launch=launch,
        in_graph=in_graph,
    )


class _Nesting(NamedTuple):
    """Fields of :class:`TraceJoin` that :func:`_nest` computes."""

    parent: list[int]
    self_ns: list[int]
    module: list[int]
    modules: list[str]


class _RunningEvent(NamedTuple):
    """Host event that is running, and the operation and modules around the events within it."""

    end: int  # in ns
    operation: int  # link to the innermost operation or annotation
    path: int  # position of the path of modules


def _nest(trace: TraceEvents, order: Sequence[int]) -> _Nesting:
    """Find the operation and the modules around each host event, and each operation's own time."""
    host = trace.host
    parent = [NOTHING] * len(order)
    module = [NOTHING] * len(order)
    self_ns = list(host.duration)
    paths: dict[tuple[int, int], int] = {}  # position of a module's path, by outer path and name
    modules: list[str] = []
    running: list[_RunningEvent] = []  # stack of the thread's running events, the innermost last
    thread = NOTHING
    for event in order:
        if host.thread[event] != thread:
            thread = host.thread[event]
            running.clear()
        # 1. Remove the events that are not around this event: those that ended before it began, and
        # those that end before its end. Overlaps within the rounding of times do not count. The end
        # of a launch is ignored, because launches are timed with CUDA's clock, and may seem to end
        # after the operation around them.
        kind = host.kind[event]
        begin = host.begin[event]
        end = begin + host.duration[event]
        earliest_end = begin + _ROUNDING_NS  # of an event around this one
        if kind != LAUNCH:
            earliest_end = max(earliest_end, end - _SLACK_NS)
        while running and running[-1].end < earliest_end:
            running.pop()
        outer_operation = running[-1].operation if running else NOTHING
        path = running[-1].path if running else NOTHING
        parent[event] = outer_operation
        # 2. A module extends the path of modules.
        if kind == MODULE:
            key = path, host.name[event]
            if key not in paths:
                paths[key] = len(modules)
                name = trace.names[host.name[event]]
                modules.append(f"{modules[path]}.{name}" if path != NOTHING else name)
            path = paths[key]
        module[event] = path
        # 3. Subtract the event's time from the own time of the operation or annotation around it.
        is_operation = kind in (OPERATION, ANNOTATION)
        if is_operation and outer_operation != NOTHING:
            self_ns[outer_operation] -= host.duration[event]
        # 4. Keep the event for the events within it. No event is within a launch.
        if kind != LAUNCH:
            operation = event if is_operation else outer_operation
            running.append(_RunningEvent(end, operation, path))
    return _Nesting(parent, self_ns, module, modules)


def _pass_modules_on(host: HostEvents, operations: Sequence[int], nesting: _Nesting) -> None:
    """Copy the modules of forward operations to the backward pass, in ``nesting.module``.

    An operation of the backward pass has the same sequence number as its forward operation. PyTorch
    counts sequence numbers separately in each thread, so these operations may get wrong modules if
    several threads compute the forward pass. An operation that still has no modules gets the
    modules of its parent.
    """
    parent, module = nesting.parent, nesting.module
    # Only an operation that makes an autograd node uses up a number. The operations before it have
    # the same number, so the latest operation with a number made the node.
    module_by_sequence: dict[int, int] = {}
    for event in sorted(operations, key=lambda event: host.begin[event]):
        if host.sequence[event] != NOTHING and not host.backward[event]:
            module_by_sequence[host.sequence[event]] = module[event]
    # Parents come before their children, so a child may get the module that its parent just got.
    for event in operations:
        if module[event] == NOTHING and host.backward[event]:
            module[event] = module_by_sequence.get(host.sequence[event], NOTHING)
        if module[event] == NOTHING and parent[event] != NOTHING:
            module[event] = module[parent[event]]
