"""Test that result files of other benchmark programs are read.

The files of pytest-benchmark 5.3.1 and torch 2.13.0 were written by these programs; details of the
machine and the commit were removed. The files of NVBench and Google Benchmark follow the schemas of
these programs.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.imports.benchmarks import NamePattern, read_benchmarks
from kernels.common.errors import UserError
from kernels.problem import Conv, Gemm
from tests.support.command_line import analysis

FILES = Path(__file__).parent / "benchmarks"
SHAPES = NamePattern.parse("m{m}_n{n}_k{k}_{dtype}")


def written(path: Path, document: Any) -> Path:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_pytest_benchmark_has_all_samples() -> None:
    process = read_benchmarks(FILES / "pytest-benchmark.json")
    document = json.loads((FILES / "pytest-benchmark.json").read_text())
    for entry in document["benchmarks"]:
        times = process.cases[entry["fullname"]]
        assert list(times.samples) == entry["stats"]["data"]
        assert times.count == entry["stats"]["rounds"]
    assert process.facts["program"] == "pytest-benchmark 5.3.1"
    assert "EPYC" in process.facts["machine"]


def test_pytest_benchmark_without_samples_has_its_mean_and_deviation() -> None:
    process = read_benchmarks(FILES / "pytest-benchmark-summary.json")
    document = json.loads((FILES / "pytest-benchmark-summary.json").read_text())
    stats = document["benchmarks"][0]["stats"]
    times = process.cases[document["benchmarks"][0]["fullname"]]
    assert math.exp(times.log) == pytest.approx(stats["mean"])
    assert times.error == pytest.approx(
        stats["stddev"] / stats["mean"] / math.sqrt(stats["rounds"])
    )
    assert (times.freedom, times.samples) == (stats["rounds"] - 1, ())


def test_torch_has_seconds_per_run() -> None:
    process = read_benchmarks(FILES / "torch.json", SHAPES)
    entry = json.loads((FILES / "torch.json").read_text())["measurements"][0]
    assert list(process.cases["64×64×64 fp32 nt"].samples) == entry["times"]


def test_torch_raw_times_are_divided_by_the_runs(tmp_path: Path) -> None:
    entry = {"raw_times": [4e-3, 6e-3], "number_per_run": 2, "label": "x", "num_threads": 4}
    process = read_benchmarks(written(tmp_path / "t.json", {"measurements": [entry, entry]}))
    assert process.cases["x, 4 threads"].samples == (2e-3, 3e-3, 2e-3, 3e-3)  # pooled


def test_google_benchmark_has_repetitions_or_aggregates() -> None:
    process = read_benchmarks(FILES / "google-benchmark.json")
    assert process.cases["BM_gemm/64/64/64/repeats:3"].samples == pytest.approx(
        (12.5e-6, 12.7e-6, 12.6e-6)
    )
    copy = process.cases["BM_copy/1024"]
    assert math.exp(copy.log) == pytest.approx(200e-9)
    assert (copy.error, copy.freedom) == (pytest.approx(0.02 / math.sqrt(5)), 4)
    assert process.lost == {"BM_broken": "no device"}
    assert process.facts["machine"] == "8 CPUs at 2,400 MHz"
    assert "builder" not in str(process.facts)


def test_nvbench_has_cold_gpu_times_and_sample_files(tmp_path: Path) -> None:
    pattern = NamePattern.parse("M={m} N={n} K={k}")
    with pytest.raises(UserError, match="has no dtype"):
        read_benchmarks(FILES / "nvbench.json", pattern)
    process = read_benchmarks(FILES / "nvbench.json")
    small, large = (process.cases[f"gemm Device=0 M={m} N=64 K=64"] for m in (64, 128))
    assert math.exp(small.log) == pytest.approx(1.25e-5)
    assert small.error == pytest.approx(0.03 / math.sqrt(499))
    assert large.samples == pytest.approx((2.0e-5, 2.1e-5, 1.9e-5, 2.05e-5))
    assert (math.exp(process.cases["host"].log), process.cases["host"].error) == (
        pytest.approx(3e-6), 0.0,
    )  # fmt: skip
    assert process.lost == {"gemm Device=0 M=1 N=1 K=1": "too small"}
    assert process.facts["machine"] == "NVIDIA H100 80GB HBM3"
    shutil.copy(FILES / "nvbench.json", tmp_path)  # the file of samples is not copied
    mean = read_benchmarks(tmp_path / "nvbench.json").cases["gemm Device=0 M=128 N=64 K=64"]
    assert (math.exp(mean.log), mean.samples) == (pytest.approx(2.0e-5), ())


def test_a_gpu_without_a_time_is_not_the_machine(tmp_path: Path) -> None:
    document = json.loads((FILES / "nvbench.json").read_text())
    document["devices"] += [{"id": 1, "name": "NVIDIA T400"}, {"id": 2, "name": "NVIDIA T600"}]
    states = [state for benchmark in document["benchmarks"] for state in benchmark["states"]]
    for state in states:
        if state["is_skipped"]:
            state["device"] = 1
    mean = {"tag": "nv/cold/time/gpu/mean", "data": [{"name": "value", "value": "0"}]}
    without_time = {**states[0], "name": "Device=2", "device": 2, "summaries": [mean]}
    document["benchmarks"][0]["states"].append(without_time)
    process = read_benchmarks(written(tmp_path / "nvbench.json", document))
    assert process.facts["machine"] == "NVIDIA H100 80GB HBM3"


def test_a_pattern_finds_problems() -> None:
    process = read_benchmarks(FILES / "pytest-benchmark.json", SHAPES)
    names = list(process.cases)
    assert names[:2] == ["64×64×64 fp32 nt", "128×64×32 fp32 nt"]
    assert process.cases[names[0]].problem == Gemm(64, 64, 64, "fp32")
    assert names[2].endswith("::test_plain")
    conv = NamePattern.parse("n{batch} c{c} {h}x{w} k{kout} r{r}s{s} pad{padding} {dtype}")
    found = conv.problem("conv n8 c64 56x56 k64 r3s3 pad1 torch.half warm")
    assert isinstance(found, Conv)
    assert (found.n, found.padding, found.dtype) == (8, (1, 1), "fp16")
    in_capitals = NamePattern.parse("{m}x{n}x{k}_{dtype}_{layout}").problem("8x16x32_FP16_TN")
    assert in_capitals == Gemm(8, 16, 32, "fp16", "tn")


@given(st.tuples(*[st.integers(1, 10_000)] * 3), st.sampled_from(["bf16", "torch.float32", "tf32"]))
def test_a_pattern_reads_what_was_written(sizes: tuple[int, int, int], dtype: str) -> None:
    m, n, k = sizes
    name = f"bench[m{m}_n{n}_k{k}_{dtype}-cold]"
    expected = {"torch.float32": "fp32"}.get(dtype, dtype)
    assert SHAPES.problem(name) == Gemm(m, n, k, expected)


@pytest.mark.parametrize(
    ("text", "words"),
    [("x", "has no field"), ("{q}", "use one of m, n, k"), ("{m}{m}", "'m' twice"),
     ("nothing{m}", "matches no case"), ("m{m}_n{n}", "has no k")],
)  # fmt: skip
def test_a_bad_pattern_is_a_sentence(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_benchmarks(FILES / "pytest-benchmark.json", NamePattern.parse(text))


def test_two_cases_of_one_problem_are_named(tmp_path: Path) -> None:
    names = ("m8_n8_k8_fp32 a", "m8_n8_k8_fp32 b")
    entries = [{"times": [1.0], "label": name} for name in names]
    with pytest.raises(UserError, match="have the same problem, 8×8×8 fp32 nt"):
        read_benchmarks(written(tmp_path / "t.json", {"measurements": entries}), SHAPES)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("no JSON", "is not a JSON file"),
        ("[" * 100_000, "is not a JSON file"),
        ([1], "is not the result of a benchmark program"),
        ({"a": 1}, "has no known format"),
        ({"measurements": []}, "has no case with a time"),
        (
            {"measurements": [{"times": [0.0], "label": "x"}]},
            r"with a time \(x: it has no times",
        ),
        ({"measurements": [{"times": [math.inf], "label": "x"}]}, "has no case with a time"),
        ({"measurements": 3}, "is damaged"),
        ({"measurements": [{"times": ["x"]}]}, "is damaged"),
        ({"benchmarks": [{}], "machine_info": {}}, r"is damaged or incomplete \(KeyError"),
        ({"benchmarks": [{"name": "x"}], "context": {}}, "is damaged"),
        ({"benchmarks": [{"states": [{}]}], "devices": None}, "is damaged"),
    ],
)
def test_a_damaged_file_is_a_sentence(tmp_path: Path, document: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_benchmarks(written(tmp_path / "t.json", document))


def test_files_of_other_programs_compare(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for side, slow in (("old", 1.0), ("new", 1.3)):
        (tmp_path / side).mkdir()
        for run in range(3):
            entries = [
                {"label": f"case {i}",
                 "times": (1e-3 * (slow if i == 2 else 1.0)
                           * np.exp(0.003 * rng.standard_normal(10))).tolist()}
                for i in range(8)
            ]  # fmt: skip
            written(tmp_path / side / f"{run}.json", {"measurements": entries})
    plain = analysis("compare", tmp_path / "old", tmp_path / "new", "--json")
    assert plain.returncode == 1, plain.stderr
    cases = {case["name"]: case for case in json.loads(plain.stdout)["cases"]}
    assert cases["case 2"]["verdict"] == "slower"
    assert cases["case 2"]["ratio"] == pytest.approx(1.3, rel=0.02)
    assert {case["verdict"] for name, case in cases.items() if name != "case 2"} == {"same"}
    gated = analysis("compare", tmp_path / "old", tmp_path / "new", "--gate", "5%")
    assert gated.returncode == 1
    assert gated.stdout.startswith("fail: 1 of 8 cases slower by 5% or more\n")
    assert "\nother cases: 7 below the threshold, 0 unclear\n" in gated.stdout
    empty = tmp_path / "empty"
    empty.mkdir()
    missing = analysis("compare", empty, tmp_path / "new")
    assert (missing.returncode, "neither a recording nor a" in missing.stderr) == (2, True)


def test_results_of_one_version_without_a_common_case_are_named(tmp_path: Path) -> None:
    for name, case in (("old/1", "a"), ("old/2", "b"), ("new/1", "a")):
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        written(path, {"context": {}, "benchmarks": [{"name": case, "real_time": 3.0}]})
    answer = analysis("compare", tmp_path / "old", tmp_path / "new")
    assert answer.returncode == 2
    lacking = tmp_path / "old" / "2.json"
    assert f"{lacking} has no time for 'a'. Leave {lacking} out" in answer.stderr


def test_zero_runs_are_a_sentence(tmp_path: Path) -> None:
    entry = {"label": "a", "number_per_run": 0, "raw_times": [1.0]}
    path = written(tmp_path / "torch.json", {"measurements": [entry]})
    with pytest.raises(UserError, match="is damaged or incomplete"):
        read_benchmarks(path)


def test_a_case_with_a_failed_repetition_is_not_lost(tmp_path: Path) -> None:
    entries = [
        {"name": "a", "real_time": 3.0},
        {"name": "a", "error_occurred": True, "error_message": "x"},
        {"name": "b", "error_occurred": True, "error_message": "y"},
    ]
    path = written(tmp_path / "google.json", {"context": {}, "benchmarks": entries})
    process = read_benchmarks(path)
    assert set(process.cases) == {"a"}
    assert process.lost == {"b": "y"}


def test_statements_without_labels_are_not_pooled(tmp_path: Path) -> None:
    entries = [{"stmt": text, "num_threads": 4, "times": [1.0]} for text in ("f(x)", "g(x)")]
    process = read_benchmarks(written(tmp_path / "t.json", {"measurements": entries}))
    assert list(process.cases) == ["f(x), 4 threads", "g(x), 4 threads"]


def test_repeated_cases_without_samples_are_refused(tmp_path: Path) -> None:
    stats = {"mean": 1.0, "stddev": 0.1, "rounds": 5}
    entries = [{"fullname": "a", "stats": stats}, {"fullname": "a", "stats": {"data": [1.0]}}]
    document = {"benchmarks": entries, "machine_info": {}}
    with pytest.raises(UserError, match="has the case 'a' twice"):
        read_benchmarks(written(tmp_path / "p.json", document))
    mean = {"name": "a_mean", "run_name": "a", "run_type": "aggregate", "aggregate_name": "mean"}
    aggregates = [{**mean, "real_time": 3.0}, {**mean, "real_time": 4.0}]
    with pytest.raises(UserError, match="has the case 'a' twice"):
        read_benchmarks(written(tmp_path / "g.json", {"context": {}, "benchmarks": aggregates}))


def test_a_number_at_the_end_of_a_pattern_is_not_a_pair() -> None:
    pattern = NamePattern.parse("{dtype}_m{m}_k{k}_n{n}")
    assert pattern.problem("bf16_m8_k8_n128x4warps") == Gemm(8, 128, 8, "bf16")


def test_a_problem_with_a_time_is_not_lost_under_another_name(tmp_path: Path) -> None:
    entries = [
        {"times": [1.0], "label": "m8_n8_k8_fp32 a"},
        {"times": [0.0], "label": "m8_n8_k8_fp32 b"},
    ]
    process = read_benchmarks(written(tmp_path / "t.json", {"measurements": entries}), SHAPES)
    assert (list(process.cases), process.lost) == (["8×8×8 fp32 nt"], {})
