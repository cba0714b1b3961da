"""Small recordings, and damage to files such as theirs."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np

from kernels.operation import Lstm
from kernels.problem import Conv
from sweeps.cases.case import Case
from sweeps.folding.fold import fold
from sweeps.planning.plan import PlanEntry
from sweeps.schema import SCHEMA
from sweeps.store import write_run
from sweeps.timing.sampler import PROTOCOL
from tests.support.synthetic import H100, gemm_cases, model_law, problems, random_sizes

CELLS = (
    "", " ", "nan", "NaN", "inf", "-inf", "1e400", "-1", "0", "-0.0", "1e-300", "1e300", "foo",
    "2.5", "true", "²", "٣", "9" * 30, "9" * 400, "\x00", "\ufeff1", "0x10", "1_000", '"', "a\nb",
    "'; DROP", "../..", "[]", "{}", "null", "None",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 1e300, -1e300, 10**30, "", "foo", "²", "nan", [], [1], {}, {"a": 1},
    [None], [[]], "\ud800", "9" * 400, float("nan"), float("inf"), "../../escaped", "\x00",
)  # fmt: skip


def small_recording(folder: Path, seed: int = 0) -> Path:
    """A run of 38 cases as its worker would leave it: plan, samples, and what they fold into."""
    cases = gemm_cases(dict.fromkeys(random_sizes(36, seed)), sweep="square")
    rng = np.random.default_rng(seed)
    times = [*model_law()(problems(cases)), 2e-5, 1e-3]
    cases.append(Case("conv-channels", Conv.parse("8,64,28,28,64,3,3,1,1,1,1,bf16"), "cudnn"))
    cases.append(Case("lstm", Lstm(4, 64, 512, 512, "bf16"), "cudnn"))
    planned = [PlanEntry(case, 0.01) for case in cases]
    plan = {
        "budget_s": 60.0, "shards": 1, "sweeps": ["square"], "left_out": {},
        "cases": [entry.to_json() for entry in planned],
    }  # fmt: skip
    (folder / "samples").mkdir(parents=True)
    run_name = "2026-01-02T03:04:05Z"
    ceilings = {"bandwidth": H100.bandwidth, "peaks": dict(H100.peaks)}
    write_run(folder, {
        "ceilings": {"start": ceilings}, "schema": SCHEMA, "protocol": PROTOCOL, "published": False,
        "run": run_name,
        "machine": H100.to_json(), "software": {"torch": "2.13.0", "cuda": "13.0"}, "plan": plan,
    })  # fmt: skip
    common = {"worker": "1/1", "gpu": 0}
    facts = {"rel_error": 1e-4, "kernel": "gemm", "kernels": '[["gemm",0.9],["split",0.1]]'}
    events: list[dict[str, Any]] = [
        {"event": "facts", "case": case.id, "facts": facts} for case in cases
    ]
    events.append({"event": "host", "case": "", "seconds": 0.0, "gpu_processes": 1})
    events.append({"event": "host", "case": "", "seconds": 9.0, "steal": 0.0, "others": 0.1})
    for r in range(1, 10):
        for case, time in zip(cases, times, strict=True):
            second = float(time * np.exp(0.01 * rng.standard_normal()))
            events.append({"event": "sample", "case": case.id, "s": second, "n": 10, "r": r})
    events += [{"event": "right", "case": case.id, "checking": 0.01} for case in cases]
    events += [
        {"event": "repeat", "case": case.id, "s": float(time) * 1.01, "n": 10, "r": 1}
        for case, time in zip(cases, times, strict=True) for _ in range(6)
    ]  # fmt: skip
    one, other = cases[0].id, cases[1].id
    events += [
        {"event": "confirm", "case": one, "against": other, "process": float(process),
         "s": [1e-5, 1.1e-5, 1.1e-5, 1.02e-5]}
        for process in (1, 2) for _ in range(5)
    ]  # fmt: skip
    lines = [
        json.dumps({**event, "at": 1.8e9 + 0.05 * i, "cost": 0.01, **common})
        for i, event in enumerate(events)
    ]
    (folder / "samples" / "1-of-1.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    fold(folder)
    return folder


def damaged(data: bytes, kind: str, draw: random.Random) -> bytes:
    """A file with one thing wrong with it, of its kind: csv, json, jsonl, toml, or any bytes."""
    ways = [_bytes] if kind == "bytes" else [_bytes, *[_OF_KIND[kind]] * 4]
    return draw.choice(ways)(data, draw)


def _bytes(data: bytes, draw: random.Random) -> bytes:
    """Cut, empty, overwritten, doubled, or of another encoding."""
    at, other = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    return draw.choice([
        data[:at], b"", data[:at] + data[other:], data[:other] + data[at:],
        data[:at] + draw.randbytes(draw.randint(1, 40)) + data[other:],
        b"\xef\xbb\xbf" + data, data.replace(b"\n", b"\r\n"), data.decode().encode("utf-16")
        if data.isascii() else data[::-1], b"\x00" * len(data), data + b"\n\n\n",
    ])  # fmt: skip


def _csv(data: bytes, draw: random.Random) -> bytes:
    lines = data.decode().split("\n")
    at = draw.randrange(1, max(2, len(lines) - 1))
    cells = lines[at].split(",")
    match draw.randrange(8):
        case 0:
            lines.insert(at, lines[at])
        case 1:
            lines[at] = ",".join(cells[:-1])
        case 2:
            names = lines[0].split(",")
            del names[draw.randrange(len(names))]
            lines[0] = ",".join(names)
        case _:
            cells[draw.randrange(len(cells))] = draw.choice(CELLS)
            lines[at] = ",".join(cells)
    return "\n".join(lines).encode(errors="replace")


def _json(data: bytes, draw: random.Random) -> bytes:
    document = json.loads(data)
    places: list[tuple[Any, Any]] = []

    def on_start(node: Any) -> None:
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in list(pairs):
            places.append((node, key))
            if isinstance(value, dict | list):
                on_start(value)

    on_start(document)
    # The deeper a place, the more of its like there are: an upper one is drawn as often.
    node, key = draw.choice(places if draw.random() < 0.5 else places[:40])
    if draw.random() < 0.3 and isinstance(node, dict):
        del node[key]
    else:
        node[key] = draw.choice(VALUES)
    return json.dumps(document).encode()


def _toml(data: bytes, draw: random.Random) -> bytes:
    """A word, a number or a text replaced, or a line left out."""
    text = data.decode()
    words = [(m.start(), m.end()) for m in re.finditer(r'"[^"\n]*"|[\w.]+', text)]
    if draw.random() < 0.2:
        lines = text.splitlines()
        del lines[draw.randrange(len(lines))]
        return "\n".join(lines).encode()
    start, end = draw.choice(words)
    new = draw.choice([*CELLS, "10000000000", "{ from = 1, to = 1000000000, step = 1 }", "[]", '"'])
    return (text[:start] + new + text[end:]).encode(errors="replace")


def _jsonl(data: bytes, draw: random.Random) -> bytes:
    lines = data.decode().splitlines()
    at = draw.randrange(len(lines))
    if draw.random() < 0.2:
        lines[at] = json.dumps(draw.choice(VALUES))
    else:
        lines[at] = _json(lines[at].encode(), draw).decode()
    return ("\n".join(lines) + "\n").encode()


_OF_KIND = {"csv": _csv, "toml": _toml, "json": _json, "jsonl": _jsonl}
