"""Traces with one thing wrong with them: ``explain`` answers, or says in a sentence what is."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import ANALYSIS, said
from tests.support.damage import VALUES, damaged
from tests.support.gpu_traces import PROCESS, GpuTrace
from tests.support.tiers import quick_and_long

SEEDS, QUICK = 500, 60

_ODD = (
    *VALUES,
    1e16,
    4e12,
    -1e-9,
    2**63,
    2**40,
    2**31,
    [[2**40] * 8],
    [[-1]],
    "[1, 1",
    "[" * 50,
    [[0, 4]],
)


def sound() -> GpuTrace:
    """A trace with an event of every kind that is read."""
    made = GpuTrace()
    made.gemm(8192, 50257, 1024, "bf16", [("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", 4300.0)])
    made.gemm(4096, 4096, 4096, "fp32", [("ampere_sgemm_128x128_tn", 2800.0)])
    made.conv((8, 33, 28, 28), 64, 3, "bf16", [("nchwToNhwcKernel", 9.0), ("s1688fprop", 90.0)])
    made.copy("HtoD", 5.0)
    made.graph([("elementwise_kernel", 5.0)])
    made.op("aten::relu", kernels=[("elementwise_kernel", 1.0)], stream=20)
    made.event("user_annotation", "step", made.host - 50, 60.0, PROCESS)
    made.event("python_function", "nn.Module: Net_0", made.host - 900, 990.0, PROCESS)
    return made


def mutated(draw: random.Random) -> bytes:
    """The trace with one value of one event replaced or left out, or damaged as a file."""
    document = sound().document()
    if draw.random() < 0.3:
        return damaged(json.dumps(document).encode(), "json", draw)
    event = draw.choice([e for e in document["traceEvents"] if e["ph"] == "X"])
    node: Any = event["args"] if draw.random() < 0.6 and event["args"] else event
    key = draw.choice(sorted(node))
    if draw.random() < 0.2:
        del node[key]
    elif isinstance(node[key], list) and node[key] and draw.random() < 0.5:
        node[key][draw.randrange(len(node[key]))] = draw.choice(_ODD)
    else:
        node[key] = draw.choice(_ODD)
    return json.dumps(document).encode()


@pytest.mark.parametrize("seed", quick_and_long(range(SEEDS), QUICK))
def test_a_damaged_trace_gets_an_answer_or_a_sentence(seed: int, tmp_path: Path) -> None:
    draw = random.Random(f"trace {seed}")
    # A kernel that is named "nan" is shown as such, and is not an absurd number.
    data = mutated(draw).replace(b'"nan"', b'"none"')
    if draw.random() < 0.3:
        data = gzip.compress(data, 1)
        if draw.random() < 0.5:
            data = damaged(data, "bytes", draw)
    path = tmp_path / "trace.json"
    path.write_bytes(data)
    told = said(ANALYSIS, "explain", str(path), *draw.choice([[], ["--machine", "h100-sxm"]]))
    assert not told.faults
    assert len(told.err.splitlines()) <= 1
    assert bool(told.out) == (told.code == 0)
