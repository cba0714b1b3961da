"""Keep what is needed of a trace's events, and join operations with the kernels they launched.

An operation runs on a thread of the host, within other operations. It launches kernels by calls of
CUDA's runtime, and a kernel has the number of its call (``correlation``). A kernel therefore
belongs to the innermost operation that was running on the call's thread when the call began. If the
record of the call is lost, the kernel's ``External id`` names the operation. The kernels of a CUDA
graph were all launched by one call, so no operation is known for them.

Events are kept as columns of numbers, some two hundred bytes each with their links, so a trace of
gigabytes fits in memory.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.markdown import printable
from analysis.traces.trace_reader import DEVICES, read_events
from kernels.common.errors import UserError

OPERATION, ANNOTATION, MODULE, LAUNCH = range(4)
"""Kinds of host events: an operation, a range that the user named, a module of ``torch.nn``, and a
call of CUDA's runtime or driver."""

KERNEL, COPY, MEMSET = range(3)
"""Kinds of device events."""

NOTHING = -1
"""Number that stands for no event, no name and no id."""

_HOST_KINDS = {
    "cpu_op": OPERATION, "user_annotation": ANNOTATION, "python_function": MODULE,
    "cuda_runtime": LAUNCH, "cuda_driver": LAUNCH,
}  # fmt: skip
_DEVICE_KINDS = {"kernel": KERNEL, "gpu_memcpy": COPY, "gpu_memset": MEMSET}
_MODULE_NAME = "nn.Module: "
_INSTANCE = re.compile(r"_\d+\b")  # number that tells modules of one class apart

MATRIX = re.compile(
    r"(^|_)(mm|addmm|bmm|baddbmm|linear|matmul|mv|addmv)_?(_v2)?$"
    r"|convolution|conv\d|conv_|attention|_rnn|lstm"
)
"""Pattern of the names, without ``aten::``, of operations that multiply matrices."""

_INPUT_KEYS = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs")
"""Arguments of an operation that describe its inputs. Only the first two are in every trace with
shapes; earlier versions of PyTorch did not write the others."""

_LATEST = 1e16  # µs; three centuries, so that every clock in use fits
_LONGEST_NS = 100_000 * 10**9  # an event of more than a day is damaged
_LONGEST_SPAN_NS = _LONGEST_NS  # so is a trace of more than a day
_LARGEST_ID = 2**62
_SLACK_NS = 1000  # earlier versions of PyTorch round times down to µs
_LONGEST_NAME = 1000  # characters of a name; kernels of templates have hundreds
_LONGEST_ARGUMENTS = 10_000  # characters of an operation's sizes and settings
_MOST_EVENTS = 20_000_000  # four gigabytes of columns


@dataclass(frozen=True)
class OperationInputs:
    """Inputs of an operation as the trace has them, in the order of its arguments.

    ``dims`` and ``strides`` have a list of numbers for each tensor, and an empty list for anything
    else. ``types`` are names such as ``c10::BFloat16``. ``settings`` are arguments that are not
    tensors, as text. Without strides in the trace, ``strides`` is empty.
    """

    name: str
    dims: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    settings: tuple[str, ...]


@dataclass
class HostEvents:
    """Columns of the host's events. Times are in ns; ``thread`` numbers threads of all processes.

    ``inputs`` is the position of the operation's inputs in :attr:`TraceEvents.inputs`.
    ``sequence`` is the number of the autograd node that an operation made or, if ``backward`` is 1,
    whose gradient it computes.
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
    """Columns of the devices' events. Times are in ns.

    ``graph`` is 1 for a kernel that the trace itself describes as part of a CUDA graph.
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
    """Events of one trace, as columns, with the texts that they share.

    ``device_names`` are those of the GPUs that computed something, or of all GPUs of the node if
    none did. ``left_out`` counts events whose times are impossible or that have no name.
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
        UserError: if the file is damaged or not a trace, or its times span more than a day.
    """
    header: dict[str, Any] = {}
    trace = TraceEvents(path)
    columns = _Columns(trace)
    for event in read_events(path, header):
        columns.add(event)
    trace.device_names = _device_names(header.get(DEVICES), set(trace.device.device))
    begins = np.concatenate([_numbers(trace.host.begin), _numbers(trace.device.begin)])
    if not len(begins):
        raise UserError(
            f"{path} has no operations. Record it with torch.profiler.profile(record_shapes=True) "
            "around at least one step."
        )
    if begins.max() - begins.min() > _LONGEST_SPAN_NS:
        raise UserError(
            f"{path} spans more than a day, so a time in it is damaged. Record the trace again."
        )
    return trace


def _device_names(properties: Any, used: Collection[int]) -> tuple[str, ...]:
    """Return the names of the used GPUs, from what a trace says about all GPUs of the node."""
    entries = properties if isinstance(properties, list) else []
    names = {
        _id(entry.get("id")): name
        for entry in entries
        if isinstance(entry, dict) and (name := _short_text(entry.get("name")))
    }
    chosen = [name for number, name in names.items() if number in used]
    return tuple(dict.fromkeys(chosen or names.values()))


class _Columns:
    """Adds events to the columns of a trace, and numbers the texts that they share."""

    def __init__(self, trace: TraceEvents) -> None:
        self._trace = trace
        self._names: dict[str, int] = {}
        self._inputs: dict[str, int] = {}
        self._threads: dict[str, int] = {}

    def add(self, event: Any) -> None:
        """Add an event if it is of a kind that is needed.

        Raises:
            UserError: if there are too many events.
        """
        # 1. Leave out events of other kinds, which are most of them.
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
        # 2. Leave out and count those whose times are impossible.
        begin, duration = _time_ns(event.get("ts")), _time_ns(event.get("dur"))
        text = _short_text(name)
        if begin is None or duration is None or duration > _LONGEST_NS or not text:
            self._trace.left_out += 1
            return
        arguments = event.get("args")
        if not isinstance(arguments, dict):
            arguments = {}
        # 3. Add the numbers of the others.
        if device_kind is not None:
            self._add_device(device_kind, text, begin, duration, event, arguments)
        elif host_kind is not None:
            self._add_host(host_kind, text, begin, duration, event, arguments)
        if len(self._trace.host.begin) + len(self._trace.device.begin) > _MOST_EVENTS:
            raise UserError(
                f"{self._trace.path} has more than {_MOST_EVENTS:,} operations and kernels. Record "
                "fewer steps."
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
        # Each process numbers its threads by itself.
        thread = f"{event.get('pid')} {event.get('tid')}"[:_LONGEST_NAME]
        host.thread.append(self._threads.setdefault(thread, len(self._threads)))
        host.begin.append(begin)
        host.duration.append(duration)
        host.inputs.append(self._inputs_of(name, arguments) if kind == OPERATION else NOTHING)
        host.external.append(_id(arguments.get("External id")))
        host.correlation.append(_id(arguments.get("correlation")))
        host.sequence.append(_id(arguments.get("Sequence number")))
        # Only operations of the backward pass name the thread of their forward operation.
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
        number = arguments.get("device", event.get("pid"))
        device.kind.append(kind)
        device.name.append(self._number_of(name))
        device.device.append(_id(number))
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
        """Return the number of an operation's inputs if it multiplies matrices, else NOTHING."""
        if not MATRIX.search(name.removeprefix("aten::")):
            return NOTHING
        parts = [arguments.get(key, []) for key in _INPUT_KEYS]
        if not all(isinstance(part, list) for part in parts) or not all(parts[:2]):
            return NOTHING
        key = f"{name} {parts}"
        if len(key) > _LONGEST_ARGUMENTS:
            return NOTHING
        if key not in self._inputs:
            self._inputs[key] = len(self._trace.inputs)
            dims, types, strides, settings = parts
            self._trace.inputs.append(
                OperationInputs(
                    name,
                    tuple(map(_sizes, dims)),
                    tuple(map(_sizes, strides)),
                    tuple(map(str, types)),
                    tuple(map(str, settings)),
                )
            )
        return self._inputs[key]


def _time_ns(value: Any) -> int | None:
    """Return a time given in µs in ns; None if it is not a time."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return round(value * 1000) if 0 <= value <= _LATEST else None  # not NaN, either


def _id(value: Any) -> int:
    """Return an id from a trace, or NOTHING if it is not a whole number from 0 on."""
    usable = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST_ID
    return value if usable else NOTHING


def _sizes(value: Any) -> tuple[int, ...]:
    """Return the sizes or strides of a tensor; empty for anything else, such as lists of tensors.

    A size is a whole number from 0 on.
    """
    if not isinstance(value, list):
        return ()
    sizes = tuple(map(_id, value))
    return () if NOTHING in sizes else sizes


def _short_text(value: Any) -> str:
    """Return a name that can be printed; empty if the value is not text."""
    return printable(value[:_LONGEST_NAME]).strip() if isinstance(value, str) else ""


def _numbers(column: array[int]) -> NDArray[np.int64]:
    return np.array(column, dtype=np.int64)


@dataclass(frozen=True)
class TraceJoin:
    """Links between the events of a trace. Values are positions of host events, or NOTHING.

    Attributes:
        order: operations and annotations, each after the one that is around it.
        calls: calls of CUDA's runtime and driver, by thread and time.
        parent: the innermost operation or annotation around each host event.
        own_ns: time of each operation and annotation without those within it, in ns.
        module: for each host event, the position in ``modules`` of the modules around it. Those of
            a gradient are around its forward operation.
        modules: paths of modules by class, such as ``GPT2Model.GPT2Block.Linear``.
        operation: the operation that launched each device event.
        launch: the call that launched each device event.
        in_graph: for each device event, whether a CUDA graph launched it.
    """

    order: Sequence[int]
    calls: Sequence[int]
    parent: Sequence[int]
    own_ns: Sequence[int]
    module: Sequence[int]
    modules: Sequence[str]
    operation: Sequence[int]
    launch: Sequence[int]
    in_graph: Sequence[bool]


def join(trace: TraceEvents) -> TraceJoin:
    """Find the operation around each operation and each launch, and that of each kernel."""
    host = trace.host
    # 1. Walk over the host's events by time, with the events that are running on each thread.
    begin, duration = _numbers(host.begin), _numbers(host.duration)
    order = np.lexsort((-duration, begin, _numbers(host.thread))).tolist()
    parent = [NOTHING] * len(order)
    module = [NOTHING] * len(order)
    own = list(host.duration)
    paths: dict[tuple[int, int], int] = {}
    modules: list[str] = []
    running: list[tuple[int, int, int]] = []  # end, operation and modules of what is running
    thread = NOTHING
    for event in order:
        if host.thread[event] != thread:
            thread = host.thread[event]
            running.clear()
        # What has ended is not around this event, nor is what ends before it. A time of 13 digits
        # in µs has an error of up to a nanosecond. A launch is timed by CUDA's clock, so it may
        # seem to end after its operation.
        end = host.begin[event] + host.duration[event]
        ends_within = end - _SLACK_NS if host.kind[event] != LAUNCH else 0
        while running and running[-1][0] < max(host.begin[event] + 2, ends_within):
            running.pop()
        _, around, path = running[-1] if running else (0, NOTHING, NOTHING)
        kind = host.kind[event]
        if kind == MODULE:
            key = path, host.name[event]
            if key not in paths:
                paths[key] = len(modules)
                name = trace.names[host.name[event]]
                modules.append(f"{modules[path]}.{name}" if path != NOTHING else name)
            path = paths[key]
        parent[event], module[event] = around, path
        if kind in (OPERATION, ANNOTATION):
            if around != NOTHING:
                own[around] -= host.duration[event]
            around = event
        if kind != LAUNCH:
            running.append((end, around, path))
    # 2. Give gradients the modules of their forward operations.
    operations = [event for event in order if host.kind[event] in (OPERATION, ANNOTATION)]
    forward = {
        host.sequence[event]: module[event]
        for event in sorted(operations, key=host.begin.__getitem__)
        if host.sequence[event] != NOTHING and not host.backward[event]
    }
    for event in operations:
        if module[event] == NOTHING and host.backward[event]:
            module[event] = forward.get(host.sequence[event], NOTHING)
        if module[event] == NOTHING and parent[event] != NOTHING:
            module[event] = module[parent[event]]
    # 3. Find the operation of each device event: around its launch, or by its external id.
    calls = [event for event in order if host.kind[event] == LAUNCH]
    launches = {host.correlation[event]: event for event in calls}
    by_id = {
        host.external[event]: event
        for event in operations
        if host.kind[event] == OPERATION and host.external[event] != NOTHING
    }
    launch = [
        launches.get(number, NOTHING) if number != NOTHING else NOTHING
        for number in trace.device.correlation
    ]
    in_graph = [
        bool(graph) or (call != NOTHING and "GraphLaunch" in trace.names[host.name[call]])
        for graph, call in zip(trace.device.graph, launch, strict=True)
    ]
    operation = []
    for place, call in enumerate(launch):
        if in_graph[place]:
            operation.append(NOTHING)
            continue
        found = parent[call] if call != NOTHING else NOTHING
        while found != NOTHING and host.kind[found] == ANNOTATION:
            found = parent[found]
        if found == NOTHING:
            found = by_id.get(trace.device.external[place], NOTHING)
        operation.append(found)
    return TraceJoin(operations, calls, parent, own, module, modules, operation, launch, in_graph)
