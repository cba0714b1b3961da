"""Events of a trace are nested correctly, and each kernel is joined to its operation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.traces.trace_events import NOTHING, OPERATION, TraceEvents, join, read_trace
from kernels.common.errors import UserError
from tests.support.gpu_traces import GpuTrace

_BASE = 4_772_211_041_000.0


def op(name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": args.pop("cat", "cpu_op"), "name": name, "ts": ts, "dur": dur,
            "pid": 1, "tid": tid, "args": {key.replace("_", " "): v for key, v in args.items()},
            }  # fmt: skip


def trace_of(tmp_path: Path, *events: Any) -> TraceEvents:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return read_trace(path)


def own(trace: TraceEvents) -> dict[str, float]:
    joined = join(trace)
    return {trace.names[trace.host.name[e]]: joined.self_ns[e] / 1e3 for e in joined.order}


def test_an_operations_own_time_is_without_those_within_it(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        op("mm", 30, 40, tid=2),  # on another thread, so not within an operation
        op("copy_", 20, 10),
        op("addmm", 10, 60),
        op("linear", 0, 100),
        op("relu", 100, 5),  # begins where the one before it ends
    )
    assert own(trace) == {"linear": 40, "addmm": 50, "copy_": 10, "relu": 5, "mm": 40}


def test_operations_that_cross_are_not_within_one_another(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        op("first", 0, 10), op("crosses", 8, 10), op("within", 12, 2), op("later", 30, 5),
    )  # fmt: skip
    assert own(trace) == {"first": 10, "crosses": 8, "within": 2, "later": 5}
    rounded = trace_of(tmp_path, op("around", 100, 5), op("within", 101, 5))
    assert own(rounded) == {"around": 0, "within": 5}


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=40))
def test_own_times_add_up_to_what_the_outermost_operations_took(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, bool]]
) -> None:
    """In a random tree of operations, each step opens an operation or closes the innermost one."""
    now, running, events = _BASE, [], []
    for duration, opens in steps:
        if opens:
            running.append(now)
        now += duration / 8  # so that sums are exact
        if not opens and running:
            begin = running.pop()
            events.append(op("x", begin, now - begin))
            now += 0.125
    while running:
        begin = running.pop()
        now += 0.125
        events.append(op("x", begin, now - begin))
    if not events:
        return
    trace = trace_of(tmp_path_factory.mktemp("tree"), *events)
    joined = join(trace)
    outermost = [e for e in joined.order if joined.parent[e] == NOTHING]
    assert sum(joined.self_ns) == sum(trace.host.duration[e] for e in outermost)
    assert min(joined.self_ns) >= 0


def test_a_gradient_is_in_the_module_of_its_forward_operation(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        op("nn.Module: Net_0", 0, 100, cat="python_function"),
        op("nn.Module: Linear_3", 10, 50, cat="python_function"),
        op("aten::addmm", 20, 30, Sequence_number=7, Fwd_thread_id=0),
        op("forward.py(12): f", 5, 90, cat="python_function"),
        op("AddmmBackward0", 200, 50, tid=2, Sequence_number=7, Fwd_thread_id=1),
        op("aten::mm", 210, 20, tid=2),
        op("aten::sum", 300, 20, tid=2),
    )
    joined = join(trace)
    found = {trace.names[trace.host.name[e]]: joined.module[e] for e in joined.order}
    paths = {name: "" if at == NOTHING else joined.modules[at] for name, at in found.items()}
    assert paths == {
        "aten::addmm": "Net.Linear", "AddmmBackward0": "Net.Linear", "aten::mm": "Net.Linear",
        "aten::sum": "",
    }  # fmt: skip


def launchers(trace: TraceEvents) -> list[str]:
    joined = join(trace)
    return ["" if e == NOTHING else trace.names[trace.host.name[e]] for e in joined.operation]


def test_a_kernel_belongs_to_the_innermost_operation_around_its_launch(tmp_path: Path) -> None:
    made = GpuTrace()
    made.gemm(64, 64, 64, "bf16", [("gemm", 10.0), ("reduce", 1.0)])
    made.op("aten::relu", kernels=[("elementwise", 2.0)], stream=13)
    trace = read_trace(made.write(tmp_path / "trace.json.gz"))
    assert launchers(trace) == ["aten::mm", "aten::mm", "aten::relu"]
    assert trace.device_names == ("NVIDIA H100 80GB HBM3",)


def test_without_the_record_of_its_launch_the_external_id_names_it(tmp_path: Path) -> None:
    made = GpuTrace()
    made.gemm(64, 64, 64, "bf16", [("gemm", 10.0)], lost_call=True)
    trace = read_trace(made.write(tmp_path / "trace.json"))
    assert launchers(trace) == ["aten::mm"]


@pytest.mark.parametrize(
    ("properties", "names"),
    [
        ([{"id": 0, "name": "A"}, {"id": 1, "name": "B"}], ("A",)),
        ([{"id": 3, "name": "A"}, {"id": 4, "name": "A"}], ("A",)),
        ([{"name": "A"}, {"name": "B"}], ("A", "B")),
        ([{"id": 0}, {"name": "B"}, 7, {"id": 0, "name": 8}], ("B",)),
        ({"id": 0}, ()),
        (None, ()),
    ],
)
def test_the_devices_that_computed_are_named(
    tmp_path: Path, properties: Any, names: tuple[str, ...]
) -> None:
    made = GpuTrace()
    made.gemm(64, 64, 64, "bf16", [("gemm", 10.0)])
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({**made.document(), "deviceProperties": properties}))
    assert read_trace(path).device_names == names


def test_kernels_of_a_graph_have_no_operation(tmp_path: Path) -> None:
    made = GpuTrace()
    made.graph([("gemm", 10.0), ("elementwise", 2.0)])
    trace = read_trace(made.write(tmp_path / "trace.json"))
    assert launchers(trace) == ["", ""]
    assert join(trace).in_graph == [True, True]


def test_an_annotation_is_not_an_operation(tmp_path: Path) -> None:
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 5, "dur": 1,
            "pid": 1, "tid": 1, "args": {"correlation": 3}}  # fmt: skip
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "ts": 9, "dur": 1, "pid": 0, "tid": 7,
              "args": {"correlation": 3, "device": 0}}  # fmt: skip
    outer = op("my range", 0, 20, cat="user_annotation")
    trace = trace_of(tmp_path, outer, call, kernel)
    assert launchers(trace) == [""]
    within = trace_of(tmp_path, op("my_op", -1 + 1, 30), {**outer, "ts": 1}, call, kernel)
    assert launchers(within) == ["my_op"]


@pytest.mark.parametrize(
    "changed",
    [
        {"ts": -1}, {"ts": float("nan")}, {"ts": "12"}, {"ts": None}, {"ts": 1e300}, {"ts": True},
        {"ts": 9.5e15}, {"dur": -0.5}, {"dur": float("inf")}, {"dur": []}, {"dur": 1e15},
        {"name": 17}, {"name": ""}, {"name": "\x00\x1b"},
    ],
)  # fmt: skip
def test_an_event_with_impossible_values_is_left_out_and_counted(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    trace = trace_of(tmp_path, op("aten::relu", 5, 1), {**op("aten::mm", 1, 2), **changed})
    assert (len(trace.host.begin), trace.left_out) == (1, 1)


@pytest.mark.parametrize(
    "arguments",
    [None, [], 7, {"Input Dims": 3}, {"Input Dims": [[2**70]], "Input Strides": [["a"]]},
     {"External id": "x", "correlation": -1, "Sequence number": 2**80},
     {"Input Dims": [[-1, 2]], "Input Strides": [[1]], "Input type": [7], "Concrete Inputs": [{}]},
     {"Input Dims": [[1] * 9000], "Input Strides": [[]], "Input type": [], "Concrete Inputs": []}],
)  # fmt: skip
def test_arguments_of_any_kind_do_no_harm(tmp_path: Path, arguments: Any) -> None:
    trace = trace_of(tmp_path, {**op("aten::mm", 1, 2), "args": arguments})
    assert list(trace.host.kind) == [OPERATION]
    assert len(join(trace).order) == 1


@pytest.mark.parametrize("changed", [{"device": 2**40}, {"device": "0"}, {"correlation": 2**70}])
def test_arguments_of_a_kernel_may_be_anything(tmp_path: Path, changed: dict[str, Any]) -> None:
    made = GpuTrace()
    made.gemm(64, 64, 64, "bf16", [("gemm", 10.0)])
    for event in made.events:
        event["args"].update(changed)
    assert launchers(read_trace(made.write(tmp_path / "trace.json"))) == ["aten::mm"]


def test_a_name_cannot_move_the_cursor(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, op("aten::\x1b[2Jmm" + "x" * 5000, 1, 2))
    assert trace.names == ["aten:: [2Jmm" + "x" * (1000 - 12)]


def test_a_trace_without_operations_or_of_years_is_refused(tmp_path: Path) -> None:
    for kind in ("user_annotation", "cuda_runtime"):
        with pytest.raises(UserError, match="has no operations"):
            trace_of(tmp_path, op("outer", 1, 2, cat=kind))
    with pytest.raises(UserError, match="has no operations"):
        trace_of(tmp_path, {"ph": "M", "name": "process_name"}, 3, None)
    with pytest.raises(UserError, match="spans more than a day"):
        trace_of(tmp_path, op("a", 1, 1), op("b", 1e15, 1))


def test_too_many_events_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("analysis.traces.trace_events._MOST_EVENTS", 3)
    with pytest.raises(UserError, match="more than 3 events"):
        trace_of(tmp_path, *(op("a", i, 1) for i in range(5)))


def test_times_keep_a_nanosecond_of_thirteen_digits(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, op("a", _BASE + 0.123, 0.456), op("b", _BASE + 0.579, 1.0))
    assert np.diff(trace.host.begin).tolist() == [456]
    assert own(trace) == {"a": 0.456, "b": 1.0}
