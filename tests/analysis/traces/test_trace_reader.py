"""The reader of traces yields every event of a valid file, and an error for any other file."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.traces import trace_reader
from analysis.traces.trace_reader import read_events
from kernels.common.errors import UserError

EVENTS: list[Any] = [
    {"ph": "X", "name": "aten::mm", "args": {"Input Dims": [[1, 2], []]}},
    {"ph": "M", "name": "tab\tand \"quote\" and ] }", "args": {}},
    {"ts": 4772211041271.7, "dur": -1, "big": 10**30, "nan": float("nan")},
    17, "text", None, [],
]  # fmt: skip


def events(path: Path) -> tuple[list[Any], dict[str, Any]]:
    header: dict[str, Any] = {}
    return list(read_events(path, header)), header


@pytest.mark.parametrize("window", [1, 2, 7, 100, 1 << 20])
@pytest.mark.parametrize("indent", [None, 1])
def test_events_are_read_however_the_text_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, indent: int | None
) -> None:
    monkeypatch.setattr(trace_reader, "_WINDOW", window)
    document = {"schemaVersion": 12345, "deviceProperties": [{"name": "x"}],
                "traceEvents": EVENTS, "traceName": "t"}  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document, indent=indent))
    found, header = events(path)
    assert json.dumps(found) == json.dumps(EVENTS)
    assert header == {"deviceProperties": [{"name": "x"}]}


@given(st.lists(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
), max_size=6), st.integers(1, 40))  # fmt: skip
def test_any_list_of_events_is_read_as_json_reads_it(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], window: int
) -> None:
    path = tmp_path_factory.mktemp("any") / "trace.json"
    path.write_text(json.dumps({"traceEvents": values}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_reader, "_WINDOW", window)
        assert events(path)[0] == values


def test_a_compressed_trace_and_a_bare_list_are_traces_too(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": EVENTS[:2]})
    for name, data in {
        "trace.json.gz": gzip.compress(text.encode()),
        "named-otherwise": gzip.compress(text.encode()),
        "bom.json": b"\xef\xbb\xbf" + text.encode(),
        "list.json": json.dumps(EVENTS[:2]).encode(),
        "bytes.json": text.replace("mm", "m?").encode().replace(b"m?", b"m\xff"),
    }.items():
        (tmp_path / name).write_bytes(data)
        assert len(events(tmp_path / name)[0]) == 2, name


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no list 'traceEvents'"),
        (b"17", "no list 'traceEvents'"),
        (b"{}", "no list 'traceEvents'"),
        (b'{"schemaVersion": 1}', "no list 'traceEvents'"),
        (b'{"traceEvents": {}}', "no list 'traceEvents'"),
        (b'{"traceEvents": [{"ph": "X"}, {"ph"', "incomplete after 2 JSON values"),
        (b'{"traceEvents": [{"ph": "X"} {"ph": "X"}]}', "incomplete after 2 JSON values"),
        (b'{"traceEvents": [1, 2]', "damaged or incomplete"),
        (b'{"traceEvents": [1, 2] "x": 1}', "damaged or incomplete"),
        (b'{"traceEvents" [1]}', "damaged or incomplete"),
        (b'{17: [1]}', "damaged or incomplete"),
        (b'{"traceEvents": [' + b"[" * 200_000, "damaged or incomplete"),
        (b'{"traceEvents": [' + b"1" * 5000 + b"]}", "damaged or incomplete"),
        (b"\x00" * 100, "no list 'traceEvents'"),
        ('{"traceEvents": []}'.encode("utf-16"), "no list 'traceEvents'"),
        (gzip.compress(b'{"traceEvents": [1, 2, 3]}', mtime=0)[:20], "damaged gzip file"),
        (b"\x1f\x8bnot gzip", "damaged gzip file"),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else "",
)  # fmt: skip
def test_a_damaged_file_gets_one_sentence(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(data)
    with pytest.raises(UserError, match=says):
        events(path)


def test_a_file_that_cannot_be_opened_gets_one_sentence(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(UserError, match="cannot be read: "):
            events(path)


def test_a_value_without_an_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_reader, "_LONGEST", 1000)
    monkeypatch.setattr(trace_reader, "_WINDOW", 100)
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [{"name": "' + "x" * 100_000)
    with pytest.raises(UserError, match="damaged or incomplete"):
        events(path)


def test_a_number_is_read_without_the_rest_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_reader, "_WINDOW", 10)
    file = io.StringIO("1." + "x" * 1000)
    assert trace_reader._Window(file, Path("trace.json")).value() == 1
    assert file.tell() == 10  # the rest of the file is not read


@pytest.mark.long
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    event = json.dumps({"ph": "X", "cat": "python_function", "name": "f" * 80, "ts": 1.5})
    with gzip.open(path, "wt", compresslevel=1) as file:  # 50 MB of text
        file.write('{"traceEvents": [' + event)
        for _ in range(50_000_000 // (len(event) + 1)):
            file.write("," + event)
        file.write("]}")
    tracemalloc.start()
    assert sum(1 for _ in read_events(path, {})) > 350_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16_000_000
