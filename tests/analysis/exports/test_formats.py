from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_benchmark.stats import Stats

from analysis.exports.formats import (
    FORMATS,
    SAMPLES,
    _statistics,
    as_csv,
    as_parquet,
    as_pytest_benchmark,
    as_xla_perf_table,
)
from analysis.imports.benchmarks import read_benchmarks
from analysis.imports.timings import FileDefaults, read_timings
from analysis.recordings.load import Recording, load
from analysis.recordings.named_cases import timed_process
from analysis.recordings.repetition import case_ids, rounds_of
from kernels.common.errors import UserError
from tests.conftest import ROOT
from tests.support.command_line import analysis
from tests.support.synthetic import gemm_cases, record

PUBLISHED = ROOT / "results" / "published" / "cpu-intel-xeon-avx512bf16-1t"


@pytest.fixture(scope="module")
def published() -> Recording:
    return load(PUBLISHED)


@given(st.lists(st.floats(1e-7, 1.0), min_size=1, max_size=40))
def test_statistics_are_pytest_benchmark_s(data: list[float]) -> None:
    stats = Stats()
    for value in data:
        stats.update(value)
    expected, ours = stats.as_dict(), _statistics(data)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        # Whether a value is an outlier may depend on the last bit of a quartile.
        if not name.endswith(("outliers", "15iqr")):
            assert ours[name] == pytest.approx(value, rel=1e-9, abs=1e-15), name


def test_outliers_are_pytest_benchmark_s() -> None:
    rng = np.random.default_rng(0)
    for count in range(2, 40):
        stats = Stats()
        data = np.exp(0.5 * rng.standard_t(2, count)).tolist()
        for value in data:
            stats.update(value)
        assert _statistics(data) == pytest.approx(stats.as_dict())


def test_pytest_benchmark_keeps_every_sample(published: Recording, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_bytes(as_pytest_benchmark(published))
    process, recorded = read_benchmarks(path), timed_process(published)
    assert process.cases.keys() == recorded.cases.keys()
    rounds = rounds_of(published)
    names = dict(zip(recorded.cases, case_ids(published.ok), strict=True))
    for name, times in process.cases.items():
        expected = [seconds for _, seconds in sorted(rounds[names[name]].items())]
        assert times.samples == pytest.approx(expected, rel=1e-12)
    entry = json.loads(path.read_text())["benchmarks"][0]
    row = published.ok.iloc[0]
    assert entry["extra_info"]["time_us"] == row["time_us"]
    assert entry["extra_info"]["dtype"] == row["dtype"]


def test_a_case_without_samples_keeps_its_interval(tmp_path: Path) -> None:
    folder = record(tmp_path / "one", gemm_cases([(64, 64, 64), (128, 64, 64)]), [1e-5, 2e-5], 0.02)
    path = tmp_path / "out.json"
    path.write_bytes(as_pytest_benchmark(load(folder)))
    process, recorded = read_benchmarks(path), timed_process(load(folder))
    for name, times in recorded.cases.items():
        read = process.cases[name]
        assert (read.log, read.error) == pytest.approx((times.log, times.error))
        assert (read.count, read.freedom) == (times.count, times.freedom)


def test_pytest_benchmark_itself_reads_it(published: Recording, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_bytes(as_pytest_benchmark(published))
    table = tmp_path / "table"
    answer = subprocess.run(
        [sys.executable, "-m", "pytest_benchmark", "compare", str(path), "--csv", str(table)],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    rows = pd.read_csv(f"{table}.csv")
    assert len(rows) == len(published.ok)
    entries = {e["name"]: e["stats"] for e in json.loads(path.read_text())["benchmarks"]}
    for row in rows.to_dict("records"):
        assert row["median"] == pytest.approx(entries[row["name"]]["median"])


def test_tables_keep_every_column_and_sample(published: Recording, tmp_path: Path) -> None:
    parquet = pd.read_parquet(io.BytesIO(as_parquet(published)))
    csv = pd.read_csv(io.BytesIO(as_csv(published)))
    rounds = rounds_of(published)
    for frame in (parquet, csv):
        assert frame["time_us"].tolist() == published.ok["time_us"].tolist()
        assert frame["config"].fillna("").tolist() == published.ok["config"].fillna("").tolist()
    for case, listed, text in zip(
        case_ids(published.ok), parquet[SAMPLES], csv[SAMPLES], strict=True
    ):
        expected = [seconds * 1e6 for _, seconds in sorted(rounds[case].items())]
        assert listed.tolist() == expected
        assert [float(value) for value in text.split()] == expected
    path = tmp_path / "out.csv"
    path.write_bytes(as_csv(published))
    timings = read_timings(path, FileDefaults())
    assert timings is not None
    assert timings.rows["time_us"].sum() > 0


def test_an_xla_table_has_the_speed_of_each_shape(published: Recording, tmp_path: Path) -> None:
    cases = gemm_cases([(128, 64, 64), (64, 64, 64), (64, 64, 64)])
    text = as_xla_perf_table(load(record(tmp_path / "h100", cases[:2], [2e-6, 1e-6]))).decode()
    entry = r"entries \{\s+b: (\d+)\s+m: (\d+)\s+n: (\d+)\s+k: (\d+)\s+flops \{ key: \"(.*)\" value: (\d+) \}\s+\}"  # noqa: E501
    expected = [(m, 64, 64, round(2 * m * 64 * 64 / seconds))
                for m, seconds in ((64, 1e-6), (128, 2e-6))]  # fmt: skip
    found = re.findall(entry, text)
    assert [(int(m), int(n), int(k), int(f)) for _, m, n, k, _, f in found] == expected
    assert {key for *_, key, _ in found} == {"bf16xbf16->bf16"}
    assert text.startswith('entries {\n  key: "sm_90"\n  value {\n')
    assert text.count("{") == text.count("}")
    with pytest.raises(UserError, match="in bursts with a cold cache, but"):
        as_xla_perf_table(published)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "xla-perf-table"])
def test_the_command_writes_a_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "out"
    answer = analysis("export", PUBLISHED, "--to", name, "-o", path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == str(path)
    assert path.stat().st_size > 100_000


def test_bad_arguments_are_sentences(tmp_path: Path) -> None:
    for arguments, words in (
        ((PUBLISHED, "--to", "parket"), "did you mean 'parquet'?"),
        ((PUBLISHED, "--to", "csv", "-o", tmp_path), "name a file in an existing folder"),
        ((PUBLISHED, "--to", "csv", "-o", tmp_path / "a" / "b"), "in an existing folder"),
        ((PUBLISHED, "--to", "csv", "-o", "/dev/null"), "name a file in an existing folder"),
        ((tmp_path, "--to", "csv"), "has no run.json"),
        ((PUBLISHED, "--to", "xla-perf-table"), "GEMMs of a GPU's vendor library that"),
    ):
        answer = analysis("export", *arguments)
        assert (answer.returncode, words in answer.stderr) == (2, True), answer.stderr
