"""Compile kernels for GPUs that are not present, in processes without Triton's interpreter."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.compiler.assembly import InnerLoop
from kernels.compiler.compilecheck import (
    ARCHES,
    CompileRow,
    _complaints,
    _expected_instructions,
    _Facts,
    _Job,
    _jobs,
)
from kernels.compiler.compiletable import compile_markdown, differing_cells
from kernels.config import HAND_WRITTEN, PersistentConfig, TileConfig
from kernels.machine import machine_of_arch
from kernels.problem import Gemm

ROOT = Path(__file__).resolve().parents[3]


# All tests that need the compiled kernels run in one worker. Otherwise each worker would compile.
compiled_once = pytest.mark.xdist_group("compiled")


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Compile all families for Hopper; `make compile-check` compiles them for all architectures.

    The command also compares the kernels with COMPILED.md. The first worker that needs the rows
    compiles them, which takes two minutes.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    place = tmp_path_factory.getbasetemp().parent / f"compiled-{run}.json"
    with open(place.with_suffix(".lock"), "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            place.write_text(_compile(), encoding="utf-8")
    found: list[dict[str, Any]] = json.loads(place.read_text(encoding="utf-8"))
    return found


def _compile() -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [
        sys.executable, "-m", "kernels", "compile", "--arch", "sm_90", "--json",
        "--compare", "kernels/COMPILED.md",
    ]  # fmt: skip
    answer = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


GEMM_FAMILIES = HAND_WRITTEN.keys() - {"triton-conv"}


@pytest.mark.slow
@compiled_once
def test_a_row_each_for_dtype_layout_and_alignment(rows: list[dict[str, Any]]) -> None:
    assert {row["kernel"] for row in rows} == HAND_WRITTEN.keys()
    for family in GEMM_FAMILIES:
        mine = [row for row in rows if row["kernel"] == family]
        keys = {(row["dtype"], row["layout"], row["alignment"]) for row in mine}
        assert len(keys) == len(mine) == 4 * 4 * 2
    convs = [row for row in rows if row["kernel"] == "triton-conv"]
    keys = {(row["dtype"], row["operation"], row["alignment"]) for row in convs}
    assert len(keys) == len(convs) == 4 * 3 * 2
    assert set(rows[0]) == {
        "kernel", "operation", "config", "dtype", "layout", "alignment", "arch", "mma",
        "registers", "spill_bytes", "shared_bytes", "copy_bytes", "products", "copied",
        "instructions", "matrix", "waits_for_all", "launches", "ok", "message",
    }  # fmt: skip


@compiled_once
def test_tensor_cores_are_used_and_fp32_is_exact(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["dtype"] == "fp32":
            assert row["mma"] == "fma"
        elif row["dtype"] in ("fp16", "bf16"):
            assert row["mma"] == "wgmma"
        else:
            assert row["mma"] in ("wgmma", "mma.sync")
        assert row["ok"], row
        assert 0 < row["registers"] <= 255
        assert row["spill_bytes"] == 0
        assert row["shared_bytes"] <= 227 << 10


@compiled_once
def test_the_inner_loop_does_no_extra_work(rows: list[dict[str, Any]]) -> None:
    """A K step needs bm · bn · bk multiply-adds, and copies (bm + bn) · bk elements."""
    for row in rows:
        if row["alignment"] == 16:
            assert row["products"] == pytest.approx(1, rel=0.1), row
            assert row["copied"] == pytest.approx(1, rel=0.1), row


@compiled_once
def test_no_turn_of_an_aligned_loop_waits_for_every_wgmma(rows: list[dict[str, Any]]) -> None:
    aligned = [row for row in rows if row["alignment"] == 16]
    assert not [row for row in aligned if row["waits_for_all"]]
    assert all(row["instructions"] > row["matrix"] > 0 for row in rows)


@compiled_once
def test_copies_are_as_wide_as_rows_allow(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        aligned, turned = (
            row["alignment"] == 16,
            row["message"].startswith("Operands are transposed"),
        )
        if row["kernel"] == "triton-persistent" and aligned and not turned:
            assert row["copy_bytes"] >= 1024  # TMA: a block at a time
        elif aligned and not turned:
            assert row["copy_bytes"] == 16
        else:
            assert row["copy_bytes"] == (2 if row["dtype"] in ("fp16", "bf16") else 4)


JOB = _Job("triton-tiled", TileConfig(), Gemm(4096, 4096, 4096, "bf16"), 16, "sm_90")
LOOP = InnerLoop("wgmma", 128 * 128 * 64, 256 * 64 * 2, 16)
GOOD = _Facts(LOOP, 200, 0, 1 << 17, False, False)
TMA = PersistentConfig(specialize=True)


@pytest.mark.parametrize(
    ("job", "facts", "words"),
    [
        (JOB, {}, None),
        (
            JOB,
            {"loop": replace(LOOP, instruction="mma.sync")},
            "The kernel uses mma.sync; wgmma was expected.",
        ),
        (JOB, {"spill_bytes": 8}, "register spills: 8 bytes are stored or loaded."),
        (JOB, {"shared_bytes": 1 << 18}, "bytes of shared memory"),
        (
            JOB,
            {"shared_bytes": 3 << 15},
            "98,304 bytes of shared memory; 131,072 were predicted from the config.",
        ),
        (
            JOB,
            {"serialised": "C7515"},
            "Every wgmma waits for the previous one (ptxas warning C7515).",
        ),
        (replace(JOB, chosen=False), {"serialised": "C7515"}, None),
        (
            JOB,
            {"loop": replace(LOOP, products=2 * LOOP.products)},
            "computes 2.00 times the multiply-adds",
        ),
        (JOB, {"loop": replace(LOOP, copied=LOOP.copied // 2)}, "copies 0.50 times the bytes"),
        (replace(JOB, alignment=1), {"loop": replace(LOOP, copied=0)}, None),
        (replace(JOB, config=TMA), {}, "no TMA copies. The kernel has no specialised warps."),
        (
            replace(JOB, config=TMA),
            {"shared_bytes": 5 << 15, "bulk_copies": True, "moves_registers": True},
            None,
        ),
        (replace(JOB, arch="sm_100"), {}, "tcgen05 was expected"),
        (
            replace(JOB, arch="sm_80"),
            {"shared_bytes": 3 << 15, "loop": replace(LOOP, instruction="mma.sync")},
            None,
        ),
    ],
)
def test_what_counts_as_not_ok(job: _Job, facts: dict[str, Any], words: str | None) -> None:
    complaints = " ".join(_complaints(job, machine_of_arch(job.arch), replace(GOOD, **facts)))
    assert complaints == "" if words is None else words in complaints


@pytest.mark.parametrize(
    ("dtype", "layout", "wanted"),
    [
        ("fp32", "nt", ("fma",)),
        ("bf16", "tn", ("wgmma",)),
        ("tf32", "nt", ("wgmma",)),
        ("tf32", "nn", ("wgmma", "mma.sync")),  # wgmma needs tf32 operands in K-major order
    ],
)
def test_which_instruction_is_expected(dtype: str, layout: str, wanted: tuple[str, ...]) -> None:
    problem = Gemm(4096, 4096, 4096, dtype, layout)
    assert _expected_instructions(replace(JOB, problem=problem)) == wanted


def test_both_kinds_of_datacenter_blackwell_are_expected_to_use_tcgen05() -> None:
    for arch in ("sm_100", "sm_103"):
        assert _expected_instructions(replace(JOB, arch=arch)) == ("tcgen05",)
    assert _expected_instructions(replace(JOB, arch="sm_120")) == ("mma.sync",)


def test_all_architectures_of_the_contract_have_jobs() -> None:
    for arch in ARCHES:
        assert len(_jobs(arch, every_candidate=False)) == len(GEMM_FAMILIES) * 32 + 24
        assert len(_jobs(arch, every_candidate=True)) > 1000


AHEAD = """
import triton
from kernels.compiler.compilecheck import _TargetDriver
from kernels.config import HAND_WRITTEN
from kernels.machine import machine_of_arch
from kernels.operands import random_operands
from kernels.problem import Conv, Gemm
from kernels.registry import all_implementations

GEMMS = ["256,256,256,bf16", "255,256,77,fp16,tn", "64,1,64,fp32,nn,3"]
CONVS = ["2,16,8,8,16,3,3,1,1,1,1,bf16", "1,3,9,7,5,3,1,2,1,1,1,fp16,nhwc,dgrad",
         "1,1,4,4,1,1,1,1,0,1,1,fp32,nhwc,wgrad"]

if __name__ == "__main__":
    machine = machine_of_arch("sm_90")
    triton.runtime.driver.set_active(_TargetDriver(machine))
    for name in HAND_WRITTEN:
        family = all_implementations()[name]
        conv = "conv" in family.ops
        problems = [*map(Conv.parse, CONVS)] if conv else [*map(Gemm.parse, GEMMS)]
        cases = [(problem, family.configs(problem, machine)[0]) for problem in problems]
        family.compile_ahead(cases)
        calls = [call for problem, config in cases
                 for call in family.unbound_calls(problem, random_operands(problem, "cpu"), config)]
        caches = {call.kernel.fn.__name__: call.kernel.device_caches[90][0] for call in calls}
        compiled = {kernel: len(cache) for kernel, cache in caches.items()}
        for call in calls:
            call.warmup()
        assert compiled == {kernel: len(cache) for kernel, cache in caches.items()}, name
        print(name, sum(compiled.values()) > 0)
"""


def outside_the_interpreter(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(script), *arguments], env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_what_is_compiled_ahead_is_what_a_launch_asks_for(tmp_path: Path) -> None:
    """Meta operands and real operands must have the same keys in the cache of compiled kernels."""
    script = tmp_path / "ahead.py"
    script.write_text(AHEAD)
    answer = outside_the_interpreter(script)
    assert answer.stdout.splitlines() == [f"{name} True" for name in HAND_WRITTEN], answer.stderr


COUNTERS = """
import torch
import triton
from kernels.compiler.compilecheck import _TargetDriver
from kernels.machine import machine_of_arch
from kernels.triton.sm_clock import read_counters

if __name__ == "__main__":
    for arch in ("sm_80", "sm_90", "sm_120"):
        triton.runtime.driver.set_active(_TargetDriver(machine_of_arch(arch)))
        out = torch.empty(396, dtype=torch.int64, device="meta")
        kernel = read_counters.warmup(out, grid=(132,), num_warps=1)
        ptx = kernel.asm["ptx"]
        places = [ptx.index(name) for name in ("%clock64", "%globaltimer")]
        print(arch, places == sorted(places), "%smid" in ptx, ptx.count("st.global"))
"""


@pytest.mark.slow
def test_the_sm_clock_reads_its_counters_in_order(tmp_path: Path) -> None:
    script = tmp_path / "counters.py"
    script.write_text(COUNTERS)
    answer = outside_the_interpreter(script)
    wanted = [f"{arch} True True 3" for arch in ("sm_80", "sm_90", "sm_120")]
    assert answer.stdout.splitlines() == wanted, answer.stderr


BROKEN = """
import contextlib
import io

import triton
import triton.language as tl
from kernels.common.errors import error_summary
from triton.backends.compiler import GPUTarget

@triton.jit
def unknown_instruction(out):
    value = tl.inline_asm_elementwise(
        "no.such.instruction $0;", "=r", [], dtype=tl.int32, is_pure=True, pack=1
    )
    tl.store(out, value)

@triton.jit
def unknown_name(out):
    tl.store(out, nowhere)

@triton.jit
def calls_unknown_name(out):
    unknown_name(out)

if __name__ == "__main__":
    for kernel in (unknown_instruction, unknown_name, calls_unknown_name):
        source = triton.compiler.ASTSource(kernel, {"out": "*i32"})
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                triton.compile(source, target=GPUTarget("cuda", 90, 32))
        except Exception as error:
            print(error_summary(error))
"""


@pytest.mark.slow
def test_an_error_of_the_compiler_is_summarised_by_its_reason(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    answer = outside_the_interpreter(script)
    assert answer.stdout.splitlines() == [
        "PTXASError: error : Unknown modifier '.such'",
        *2 * ["CompilationError: NameError('nowhere is not defined')"],
    ], answer.stderr


CACHED = """
import sys
from pathlib import Path

import triton
from kernels.compiler.compilecheck import _compile, _Job, _TargetDriver
from kernels.config import SplitConfig
from kernels.triton.family import meta_operands
from kernels.machine import machine_of_arch
from kernels.problem import Gemm
from kernels.registry import all_implementations

def damage(pattern, harm):
    for path in Path(sys.argv[1]).glob(pattern):
        harm(path)

if __name__ == "__main__":
    compiled = []
    triton.knobs.cache.dir = sys.argv[1]
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: compiled.append(not cache_hit)
    family, problem = all_implementations()["triton-splitk"], Gemm(4096, 4096, 4096, "bf16")
    config = SplitConfig(64, 64, 64, 3, 4, split=2)
    triton.runtime.driver.set_active(_TargetDriver(machine_of_arch("sm_90")))
    calls = family.unbound_calls(problem, meta_operands(problem), config)
    for call in calls:
        call.warmup()  # as a launch would
    rows, counts = [], []
    for harm in (None, None, lambda: damage("*/ptxas.log", lambda path: path.write_text("")),
                 lambda: damage("*/*.ptx", Path.unlink), None):
        if harm:
            harm()
        for call in calls:
            call.kernel.device_caches.clear()
        rows.append(_compile(_Job("triton-splitk", config, problem, 16, "sm_90")))
        counts.append(sum(compiled))
    print(rows[0].ok, rows[0].registers > 0, all(row == rows[0] for row in rows), *counts)
"""


@pytest.mark.long
def test_a_kernel_in_the_cache_tells_what_it_told_when_compiled(tmp_path: Path) -> None:
    """The two kernels are compiled again if their log or their PTX is missing or damaged."""
    script = tmp_path / "cached.py"
    script.write_text(CACHED)
    answer = outside_the_interpreter(script, str(tmp_path / "cache"))
    told = ["True", "True", "True", "4", "4", "6", "8", "8"]
    assert answer.stdout.split() == told, answer.stdout + answer.stderr


SASS = """
import triton
from kernels.compiler.compilecheck import _TargetDriver
from kernels.triton.family import meta_operands
from kernels.machine import machine_of_arch
from kernels.problem import Gemm
from kernels.registry import all_implementations

if __name__ == "__main__":
    machine = machine_of_arch("sm_90")
    triton.runtime.driver.set_active(_TargetDriver(machine))
    family = all_implementations()["triton-persistent"]
    problem = Gemm(4096, 4096, 4096, "bf16")
    config = next(c for c in family.configs(problem, machine, True) if c.specialize)
    (call,) = family.unbound_calls(problem, meta_operands(problem), config)
    sass = call.warmup().asm["sass"]
    print(*(word in sass for word in ("UTMALDG", "UTMASTG", "HGMMA", "USETMAXREG")))
"""


@pytest.mark.slow
def test_tma_and_specialised_warps_reach_the_machine_code(tmp_path: Path) -> None:
    script = tmp_path / "sass.py"
    script.write_text(SASS)
    answer = outside_the_interpreter(script)
    assert answer.stdout.split() == ["True"] * 4, answer.stderr


MASKED = """
from kernels.compiler.compilecheck import _compile, _Job
from kernels.machine import machine_of_arch
from kernels.problem import Conv, Gemm
from kernels.registry import all_implementations

CASES = [  # rows aligned to 16, 8, 4 and 2 bytes; then masks, and C with odd rows
    ("sm_90", "triton-tiled", "4088,4088,4088,bf16"),
    ("sm_90", "triton-tiled", "4092,4092,4092,bf16"),
    ("sm_90", "triton-tiled", "4090,4090,4090,bf16"),
    ("sm_90", "triton-tiled", "4091,4091,4091,bf16"),
    ("sm_80", "triton-tiled", "4088,4088,4088,bf16"),
    ("sm_80", "triton-splitk", "4088,4088,4088,tf32,nn"),
    ("sm_90", "triton-streamk", "4088,4088,4088,bf16"),
    ("sm_90", "triton-streamk", "4096,4097,4096,bf16"),
    ("sm_90", "triton-persistent", "4096,4097,4096,bf16"),
    ("sm_80", "triton-persistent", "4088,4088,4088,bf16"),
    ("sm_90", "triton-conv", "32,120,28,28,120,3,3,1,1,1,1,bf16,nhwc,fprop"),
    ("sm_90", "triton-conv", "32,120,28,28,120,3,3,1,1,1,1,bf16,nhwc,wgrad"),
    ("sm_90", "triton-conv", "8,4,112,112,64,7,7,2,3,1,1,bf16,nhwc,fprop"),
]

if __name__ == "__main__":
    for arch, name, spec in CASES:
        problem = (Conv if name == "triton-conv" else Gemm).parse(spec)
        config = all_implementations()[name].configs(problem, machine_of_arch(arch))[0]
        row = _compile(_Job(name, config, problem, 16, arch))
        print(row.ok, row.copy_bytes, row.message)
"""


def test_sizes_that_are_not_multiples_of_a_tile_neither_spill_nor_narrow_the_copies(
    tmp_path: Path,
) -> None:
    """Triton finds only multiples of 16 elements by itself; the kernels declare other multiples."""
    script = tmp_path / "masked.py"
    script.write_text(MASKED)
    answer = outside_the_interpreter(script)
    found = [line.split()[:2] for line in answer.stdout.splitlines()]
    assert [ok for ok, _ in found] == ["True"] * 13, answer.stdout + answer.stderr
    widths = [int(width) for _, width in found]
    assert widths[:8] == [16, 8, 4, 2, 16, 16, 16, 16]
    assert widths[8] >= 1024  # TMA reads A and B even if the rows of C are odd
    assert widths[9:] == [16, 16, 16, 8]


def test_the_table_folds_layouts_and_shows_spills() -> None:
    good = CompileRow(
        "triton-tiled", "gemm", "bm=128", "bf16", "nt", 16, "sm_90", "wgmma", 168, 0, 1 << 17, 16,
        1.0, 1.0, 90, 4, False, 1, True, "",
    )  # fmt: skip
    rows = [
        good,
        replace(good, layout="nn", registers=180, copied=1.05),
        replace(
            good,
            dtype="tf32",
            mma="mma.sync",
            spill_bytes=24,
            copy_bytes=4,
            instructions=97,
            waits_for_all=True,
        ),
        replace(
            good,
            kernel="triton-persistent",
            arch="sm_100",
            mma="tcgen05",
            copy_bytes=16384,
            launches=2,
        ),
    ]
    text = compile_markdown(rows)
    assert "In the 4 kernels for aligned rows" in text
    assert "computes\n1.00 times the multiplications" in text
    assert "copies 1.00 to 1.05 times the bytes" in text
    assert "| bf16 | of 16 bytes | wgmma 180<br>16 B, 128 KiB<br>90:4 | – |" in text
    assert (
        "| tf32 | of 16 bytes | mma.sync 168, 24 B spilled<br>4 B, 128 KiB<br>97:4, waits | – |"
        in text
    )
    assert "| bf16 | of 16 bytes | – | tcgen05 168<br>TMA, 128 KiB<br>90:4, 2 kernels |" in text
    assert differing_cells(text, compile_markdown(rows[:2])) == []
    (changed,) = differing_cells(text, compile_markdown([replace(rows[0], registers=200)]))
    assert "wgmma 200<br>16 B, 128 KiB<br>90:4 instead of wgmma 180<br>" in changed
    (new,) = differing_cells(text, compile_markdown([replace(rows[0], arch="sm_120")]))
    assert "sm_120: new, wgmma 168" in new


def test_cells_that_a_damaged_table_lacks_are_new() -> None:
    head = "## triton-tiled\n| dtype | rows | sm_90 |\n"
    for line in ("| bf16 |", "| bf16 | odd |"):
        (new,) = differing_cells(head + line, f"{head}| bf16 | odd | wgmma 168 |")
        assert new == "triton-tiled bf16 odd sm_90: new, wgmma 168"
