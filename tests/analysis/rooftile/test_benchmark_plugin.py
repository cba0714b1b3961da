from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from analysis.imports.benchmarks import read_benchmarks
from analysis.rooftile.benchmark_plugin import KernelReplay
from sweeps.wheel import in_namespace
from tests.conftest import ROOT

TESTS = """
import pytest, torch

@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_matmul(kernel_benchmark, cache):
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    result = kernel_benchmark(torch.matmul, a, b, cache=cache, reference=torch.matmul)
    assert torch.equal(result, a @ b)

def test_wrong(kernel_benchmark):
    kernel_benchmark(lambda a: a * 1.1, torch.randn(64, 64), reference=torch.clone)

def test_unknown_cache(kernel_benchmark):
    kernel_benchmark(torch.clone, torch.randn(64), cache="hot")

def test_both(benchmark, kernel_benchmark):
    kernel_benchmark(torch.clone, torch.randn(64))

def test_plain(benchmark):
    benchmark.pedantic(sum, ([1, 2],), rounds=3)
"""


def run(folder: Path, *options: str) -> str:
    (folder / "test_mine.py").write_text(TESTS)
    arguments = ("-q", "-p", "analysis.rooftile.benchmark_plugin", "-p", "no:cacheprovider")
    # In a worker of pytest-xdist, pytest-benchmark times nothing. It recognises a worker by an
    # environment variable, so the test removes such variables.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, *options], cwd=folder, check=False,
        env={**outside, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    ).stdout  # fmt: skip


@pytest.mark.slow
def test_samples_become_a_benchmark_of_pytest_benchmark(tmp_path: Path) -> None:
    output = run(tmp_path, "--benchmark-json", "out.json")
    assert "3 failed, 3 passed" in output
    assert "error of the result is 0.1 times the reference's largest absolute value" in output
    entries = {e["name"]: e for e in json.loads((tmp_path / "out.json").read_text())["benchmarks"]}
    assert entries.keys() == {
        "test_matmul[cold]", "test_matmul[warm]", "test_both", "test_plain",
    }  # fmt: skip
    cold, warm = (entries[f"test_matmul[{cache}]"]["extra_info"] for cache in ("cold", "warm"))
    assert (cold["sets"], warm["sets"]) == (cold["launches"], 1)
    assert cold["rel_error"] < 1e-5
    times = read_benchmarks(tmp_path / "out.json").cases["test_mine.py::test_matmul[cold]"]
    assert times.count == entries["test_matmul[cold]"]["stats"]["rounds"] >= 6


@pytest.mark.slow
def test_without_benchmarks_kernels_are_only_checked(tmp_path: Path) -> None:
    output = run(tmp_path, "--benchmark-disable")
    assert "2 failed, 4 passed" in output
    assert "cache is 'hot'; use 'cold' or 'warm'." in output
    only = run(tmp_path, "--benchmark-only", "--benchmark-disable-gc", "-k", "warm or both")
    assert "1 failed, 1 passed" in only
    assert "must not also use the benchmark fixture" in only


def test_the_timer_reads_each_sample_once() -> None:
    replay = KernelReplay()
    replay.load([0.1, 0.2])
    assert replay.read() == 0.0
    replay.take()
    assert (replay.read(), replay.read()) == (0.1, 0.0)
    replay.take()
    assert replay.read() == 0.2


def test_an_installation_registers_the_plugin_and_imports_nothing_heavy() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = project["entry-points"]["pytest11"]["rooftile"]
    module = "analysis.rooftile.benchmark_plugin"
    assert in_namespace(module) == name
    assert hasattr(import_module(module), "kernel_benchmark")
    code = (
        f"import sys, pytest, {module}\n"
        "assert not {'numpy', 'torch', 'pandas', 'triton'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
