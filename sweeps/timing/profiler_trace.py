"""Name the kernels of a launch, and find each kernel's share of their total time.

On a GPU, the kernels are read from the JSON trace of PyTorch's profiler, because the profiler's
printed table truncates names. On a CPU, oneDNN and MKL print the names of their kernels to stdout
in verbose mode.
"""

from __future__ import annotations

import bisect
import ctypes
import json
import math
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kernels.names import read_name

# Silence the log of PyTorch's profiler on stderr. The profiler reads this environment variable when
# it is first used, so it is set at import.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

LaunchOnce = Callable[[], object]
_MARK = "rooftile launch "
_APIS = ("cuda_runtime", "cuda_driver")
_LAUNCHES = re.compile("LaunchKernel|LaunchCooperative|GraphLaunch")
_SACRIFICED = 64
"""Number of dummy launches at the start of a profiler session.

The first records of a session may be lost. The k-th session of a process loses about k records."""


@dataclass(frozen=True)
class Kernel:
    """One kernel of a launch: its name, its time in seconds, and its grid (empty on a CPU)."""

    name: str
    seconds: float
    grid: tuple[int, ...] = ()


@contextmanager
def cpu_tracer() -> Iterator[Callable[[LaunchOnce], list[Kernel]]]:
    """Yield a function that calls a launch, and returns the launch's oneDNN and MKL kernels.

    The function returns an empty list if the launch uses neither library. Other output to stdout
    inside the ``with`` block may be lost.
    """
    with _captured_stdout() as read, ExitStack() as verbose:
        for library in (torch.backends.mkldnn, torch.backends.mkl):
            if library.is_available():
                verbose.enter_context(library.verbose(library.VERBOSE_ON))

        def trace(launch: LaunchOnce) -> list[Kernel]:
            read()  # discard what was printed before the launch
            launch()
            return parse_verbose(read())

        yield trace


_ONEDNN_LINE = re.compile(
    r"onednn_verbose,[^,]*,primitive,exec,[^,]*,([^,]*),([^,]*),.*,(\d+\.?\d*(?:e[+-]?\d+)?)$"
)


def parse_verbose(text: str) -> list[Kernel]:
    """Return the kernels in the output that oneDNN and MKL print in verbose mode.

    Each kernel has a line in one of these formats:

    oneDNN: ``onednn_verbose,v1,primitive,exec,cpu,<kind>,<implementation>,…,<ms>``.
    MKL: ``MKL_VERBOSE SGEMM(N,N,…) 1.30ms …``.
    """
    units = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
    kernels = []
    for line in text.splitlines():
        if match := _ONEDNN_LINE.match(line):
            kind, implementation, milliseconds = match.groups()
            kernels.append(Kernel(f"{kind} {implementation}", float(milliseconds) * 1e-3))
        elif match := re.match(r"MKL_VERBOSE (\w+)\(.*?\) ([\d.]+)([mun]?s)\b", line):
            name, number, unit = match.groups()
            kernels.append(Kernel(f"mkl_{name.lower()}", float(number) * units[unit]))
    return kernels


def trace_gpu(launches: Iterable[LaunchOnce]) -> list[list[Kernel] | None]:
    """Profile all launches in one session, and return the kernels of each launch.

    The entry of a launch is None if the launch's records in the trace are incomplete
    (:func:`split_trace`). Errors of the launches are ignored. ``launches`` may be an iterator that
    prepares each launch when its turn comes.

    A process should call this function only once, because CUPTI of CUDA 12.6 U2 to 13.0 loses the
    first kernel records of each session, and more of them with every further session
    (pytorch#192021).
    """
    count = 0  # number of launches so far

    def work() -> None:
        nonlocal count
        for launch in launches:
            with torch.profiler.record_function(f"{_MARK}{count}"), suppress(Exception):
                launch()
            count += 1
        torch.cuda.synchronize()

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    return split_trace(profile_document(work, activities)["traceEvents"], count)


def profile_document(
    work: Callable[[], object], activities: Sequence[torch.profiler.ProfilerActivity]
) -> dict[str, Any]:
    """Call ``work``, and return PyTorch's trace of it, with input shapes, as parsed JSON.

    ``work`` has to wait for the device before it returns, so that the trace has all kernels.
    """
    with warnings.catch_warnings():
        # PyTorch 2.11 warns that it keeps only events of the last cycle, but there is one cycle.
        # acc_events=True would avoid the warning, but would also parse all events in Python.
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
            # The records at the start of a session may be lost, so dummy launches come first.
            if torch.profiler.ProfilerActivity.CUDA in activities:
                for _ in range(_SACRIFICED):
                    torch.cuda._sleep(1000)  # a kernel of 1,000 cycles, without operands
                torch.cuda.synchronize()
            work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return document


def split_trace(events: Sequence[Mapping[str, Any]], count: int) -> list[list[Kernel] | None]:
    """Return the kernels of each of ``count`` marked launches in a trace.

    A mark is the span of host time in which one launch ran. The CUDA calls of that launch lie
    within the span, and each kernel has the number of the call that launched it (``correlation``).

    The entry of a launch is None if the launch's records are incomplete. They are incomplete if a
    call that launches kernels has no kernel in the trace. They also count as incomplete if the
    launch has no kernel at all, but other launches have kernels.
    """
    # 1. Find the mark of each call that launched a kernel, and of each operation around such calls.
    marks = _Marks(events)
    mark_of_call: dict[Any, int] = {}  # by correlation
    mark_of_operation: dict[Any, int] = {}  # by external id
    runtime_ends: dict[Any, float] = {}  # end of the last launch through the runtime, by thread
    for event in sorted(events, key=lambda event: float(event.get("ts", 0.0))):
        arguments = event.get("args", {})
        mark = marks.number_around(event)
        if mark is None:
            continue
        if event.get("cat") in _APIS and _LAUNCHES.search(event["name"]):
            begin = float(event["ts"])
            thread = event["tid"]
            if event["cat"] == "cuda_runtime":
                runtime_ends[thread] = begin + float(event["dur"])
            elif begin <= runtime_ends.get(thread, -math.inf):
                continue  # the runtime call that made this driver call was counted already
            mark_of_call[arguments.get("correlation")] = mark
        elif event.get("cat") in ("cpu_op", "user_annotation") and "External id" in arguments:
            mark_of_operation[arguments["External id"]] = mark
    # 2. Give each kernel to the launch of its call, in the order in which the kernels began.
    kernel_events = [event for event in events if event.get("cat") == "kernel"]
    kernel_events.sort(key=lambda event: float(event["ts"]))
    kernels_by_mark: list[list[Kernel]] = [[] for _ in range(count)]
    recorded_calls = set()
    for event in kernel_events:
        arguments = event.get("args", {})
        call = arguments.get("correlation")
        mark = mark_of_call.get(call)
        if mark is None:  # the call was not recorded, but perhaps the operation around it
            mark = mark_of_operation.get(arguments.get("External id"))
        if mark is not None and mark < count:
            grid = tuple(arguments.get("grid", ()))
            kernels_by_mark[mark].append(Kernel(event["name"], event["dur"] * 1e-6, grid))
            recorded_calls.add(call)
    # 3. Return None for launches whose records are incomplete. The records of the calls of a launch
    # without kernels may have been lost, too.
    incomplete = {mark for call, mark in mark_of_call.items() if call not in recorded_calls}
    if recorded_calls:
        incomplete.update(mark for mark, kernels in enumerate(kernels_by_mark) if not kernels)
    return [None if mark in incomplete else kernels for mark, kernels in enumerate(kernels_by_mark)]


class _Span(NamedTuple):
    """One mark of a trace; ``begin`` and ``end`` are in microseconds on the trace's clock."""

    begin: float
    end: float
    number: int
    thread: Any


class _Marks:
    """Marks of a trace, sorted by start time."""

    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        spans = []
        for event in events:
            if event.get("cat") == "user_annotation" and event["name"].startswith(_MARK):
                begin = float(event["ts"])
                number = int(event["name"].removeprefix(_MARK))
                spans.append(_Span(begin, begin + float(event["dur"]), number, event["tid"]))
        self._spans = sorted(spans)
        self._begins = [span.begin for span in self._spans]

    def number_around(self, event: Mapping[str, Any]) -> int | None:
        """Return the number of the mark during which a host event began.

        Return None if the event has no time, or if there is no such mark on its thread.
        """
        if "ts" not in event:
            return None
        moment = float(event["ts"])
        last_begun = bisect.bisect_right(self._begins, moment) - 1
        if last_begun < 0:
            return None
        span = self._spans[last_begun]
        if moment > span.end or event.get("tid") != span.thread:
            return None
        return span.number


def kernel_columns(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Return the columns ``kernel``, ``tile``, ``grid``, ``kernels`` and ``tensor_cores``.

    If the kernels are not known, ``kernel`` is empty, and the other columns are left out.
    """
    if not kernels:
        return {"kernel": ""}
    # The sum is 0 if every kernel is shorter than the resolution of its time.
    total = sum(kernel.seconds for kernel in kernels) or 1.0
    shares: dict[str, float] = {}
    for kernel in kernels:
        shares[kernel.name] = shares.get(kernel.name, 0.0) + kernel.seconds / total
    # The main kernel has the largest share of the time, perhaps because it runs several times.
    main_name = max(shares, key=lambda name: shares[name])
    main = next(kernel for kernel in kernels if kernel.name == main_name)
    facts = read_name(main.name)
    listing = [[name, round(share, 4)] for name, share in shares.items()]
    return {
        "kernel": main.name,
        "tile": facts.tile_text(),
        "grid": "x".join(map(str, main.grid)),
        "kernels": json.dumps(listing, ensure_ascii=False),
        "tensor_cores": facts.tensor_cores,
    }


@contextmanager
def _captured_stdout() -> Iterator[Callable[[], str]]:
    """Capture what C libraries print to stdout.

    Yield a function that returns the text printed since its previous call.
    """
    # Python and C libraries buffer stdout separately. Both buffers are flushed while descriptor 1
    # is still the real stdout.
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    libc.fflush(None)
    real_stdout = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)

        def read() -> str:
            libc.fflush(None)
            file.seek(0)
            text = file.read().decode(errors="replace")
            # Stdout continues at the file's position, which both descriptors share.
            file.seek(0)
            file.truncate()
            return text

        try:
            yield read
        finally:
            libc.fflush(None)
            os.dup2(real_stdout, 1)
            os.close(real_stdout)
