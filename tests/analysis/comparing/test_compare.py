"""Test the comparison of two recordings whose differences are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.comparing.compare import (
    compare,
    comparison_json,
    comparison_text,
    ratio_verdicts,
    summarise,
)
from analysis.recordings.load import load
from analysis.recordings.named_cases import timed_process
from kernels.common.errors import UserError
from kernels.machine import known_machine
from sweeps.cases.case import Case
from sweeps.store import write_table
from sweeps.timing.statistics import finished, median, median_interval
from tests.support.command_line import analysis
from tests.support.synthetic import gemm_cases, record

CASES = gemm_cases([(4096, 4096, 4096), (1024, 1024, 1024), (16, 4096, 4096), (2048, 2048, 512)])
SECONDS = [200e-6, 10e-6, 12e-6, 20e-6]


def two(
    tmp_path: Path, factors: list[float], half_width: float = 0.005, cases: list[Case] = CASES
) -> tuple[Path, Path]:
    after = [s * factor for s, factor in zip(SECONDS, factors, strict=True)]
    old = record(tmp_path / "old", CASES, SECONDS, half_width)
    new = record(tmp_path / "new", cases, after, half_width,
                 software={"torch": "2.14.0", "cuda": "13.0"})  # fmt: skip
    return old, new


def test_each_case_gets_its_verdict(tmp_path: Path) -> None:
    old, new = two(tmp_path, [1.08, 0.9, 1.001, 1.025])
    comparison = compare(load(old), load(new))
    assert comparison.table["verdict"].tolist() == ["slower", "faster", "same", "slower"]
    assert comparison.table["ratio"].tolist() == pytest.approx([1.08, 0.9, 1.001, 1.025])
    assert comparison.counts() == {"slower": 2, "faster": 1, "same": 1, "ambiguous": 0}
    assert comparison.software == {"torch": ("2.13.0", "2.14.0")}
    assert (comparison.only_old, comparison.only_new, len(comparison.lost)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("ratio", "lo", "hi", "verdict"),
    [
        (1.02, 1.001, 1.04, "slower"),
        (1.005, 1.001, 1.01, "same"),  # surely different, but by less than 1%
        (1.02, 0.99, 1.05, "ambiguous"),
        (1.02, 1.0, 1.025, "same"),
        (0.98, 0.96, 0.999, "faster"),
        (1.08, np.nan, np.nan, "ambiguous"),  # fewer than six samples, so there is no interval
    ],
)
def test_the_rule(ratio: float, lo: float, hi: float, verdict: str) -> None:
    assert ratio_verdicts(*(pd.Series([value]) for value in (ratio, lo, hi))).tolist() == [verdict]


@pytest.mark.parametrize("noise", [0.003, 0.03])
def test_what_changed_is_told_from_what_did_not(noise: float) -> None:
    """5% of the cases are 8% slower; at most 1% of the others may be called changed."""
    rng = np.random.default_rng(0)

    def measure(truth: float) -> tuple[float, float, float]:
        """Time a case like the sampler, until its interval is narrow or it has 30 samples."""
        samples: list[float] = []
        while not finished(samples):
            samples.append(truth * float(np.exp(noise * rng.standard_normal())))
        interval = median_interval(samples)
        assert interval is not None
        return median(samples), *interval

    count, changed = 2000, 100
    truth = np.where(np.arange(count) < changed, 1.08, 1.0)
    old = np.array([measure(1.0) for _ in truth])
    new = np.array([measure(factor) for factor in truth])
    verdicts = ratio_verdicts(
        *(pd.Series(values) for values in
          (new[:, 0] / old[:, 0], new[:, 1] / old[:, 2], new[:, 2] / old[:, 1]))
    )  # fmt: skip
    assert (verdicts[:changed] == "slower").mean() >= 0.95
    assert np.isin(verdicts[changed:], ("slower", "faster")).mean() <= 0.01


def test_cases_of_one_recording_alone_and_lost_ones_are_counted(tmp_path: Path) -> None:
    other = gemm_cases([(8, 8, 8)])
    old, new = two(tmp_path, [1.0] * 4, cases=[*CASES[:3], *other])
    rows = load(new).rows
    broken = CASES[3].columns()
    write_table(new, [
        *({k: v for k, v in row.items() if not pd.isna(v)} for row in rows.to_dict("records")),
        {**{k: rows.iloc[0][k] for k in ("schema", "run", "time_utc", "worker")}, **broken,
         "status": "wrong", "message": "the result differs."},
    ])  # fmt: skip
    comparison = compare(load(old), load(new))
    assert (comparison.only_old, comparison.only_new) == (0, 1)
    assert comparison.lost["message"].tolist() == ["the result differs."]
    line = "no longer timed: 2048×2048×512 bf16 nt cublas (wrong: the result differs.)"
    assert line in comparison_text(comparison)


def test_a_kernel_that_chooses_another_config_is_still_compared(tmp_path: Path) -> None:
    def run(folder: str, configs: list[str], seconds: float) -> Path:
        cases = [Case("families", CASES[0].problem, "triton-tiled", text) for text in configs]
        return record(tmp_path / folder, cases, [seconds] * len(cases), 0.005)

    old, new = run("old", ["bm=128"], 1e-4), run("new", ["bm=64"], 1.2e-4)
    comparison = compare(load(old), load(new))
    assert comparison.table["verdict"].tolist() == ["slower"]
    assert comparison.table["config"].tolist() == ["bm=64"]
    searched = [run(name, ["bm=128", "bm=64"], 1e-4) for name in ("three", "four")]
    assert len(compare(*map(load, searched)).table) == 2  # each config matches itself


def test_a_config_that_fails_in_the_new_recording_is_lost(tmp_path: Path) -> None:
    """The other config must still match, although it is the only one with a time."""
    cases = [Case("candidates", CASES[0].problem, "triton-tiled", f"bm={bm}") for bm in (64, 128)]
    old, new = (record(tmp_path / name, cases, [1e-4, 1e-4], 0.005) for name in ("old", "new"))
    table = load(new).rows
    broken = table["config"] == "bm=128"
    rows = [
        {key: value for key, value in row.items() if not pd.isna(value)}
        for row in table.assign(status=table["status"].mask(broken, "error")).to_dict("records")
    ]
    write_table(new, rows)
    comparison = compare(load(old), load(new))
    assert comparison.table["config"].tolist() == ["bm=64"]
    assert comparison.lost["config"].tolist() == ["bm=128"]
    assert (comparison.only_old, comparison.only_new) == (0, 0)
    before, after = timed_process(load(old)), timed_process(load(new))
    assert set(after.cases) < set(before.cases)
    assert set(after.lost) == set(before.cases) - set(after.cases)


def test_a_case_that_fails_in_the_new_recording_is_lost_with_a_pattern_too(tmp_path: Path) -> None:
    old, new = two(tmp_path, [1.0] * 4)
    rows = [
        {key: value for key, value in row.items() if not pd.isna(value)}
        for row in load(new).rows.to_dict("records")
    ]
    rows[0].update(status="error", message="illegal memory access")
    write_table(new, rows)
    compared = analysis("compare", old, new, "--pattern", "m{m}_n{n}_k{k}_{dtype}")
    assert compared.returncode == 1
    assert "illegal memory access" in compared.stdout


def test_imported_tables_are_named_by_their_folders(tmp_path: Path) -> None:
    old, new = two(tmp_path, [1.0] * 4)
    before = load(old)
    unnamed = replace(before, run={**before.run, "run": ""})
    first = comparison_text(compare(unnamed, load(new))).splitlines()[0]
    assert first == f"NVIDIA H100 80GB HBM3: {old} → 2026-01-02T03:04:05Z"


def test_classes_are_summed_up(tmp_path: Path) -> None:
    old, new = two(tmp_path, [1.08, 0.9, 1.0, 1.0])
    rows = {row["class"]: row for row in summarise(compare(load(old), load(new)))}
    assert rows["large"]["cases"] == 3
    assert rows["large"]["worst"] == pytest.approx(1.08)
    assert rows["skinny"]["same"] == 1
    assert rows["all"]["ratio"] == pytest.approx((1.08 * 0.9) ** 0.25)


def test_other_machines_and_strangers_are_refused(tmp_path: Path) -> None:
    old, _ = two(tmp_path, [1.0] * 4)
    a100 = known_machine("nvidia-a100-sxm-80gb")
    elsewhere = record(tmp_path / "a100", CASES, SECONDS, machine=a100)
    with pytest.raises(UserError, match="give two recordings of one machine"):
        compare(load(old), load(elsewhere))
    stranger = record(tmp_path / "other", gemm_cases([(8, 8, 8)]), [1e-6])
    with pytest.raises(UserError, match="no timed case in common"):
        compare(load(old), load(stranger))


def test_the_command_exits_1_only_if_something_is_slower(tmp_path: Path) -> None:
    old, new = two(tmp_path, [1.08, 1.0, 1.0, 1.0])
    worse = analysis("compare", old, new, "--json")
    assert worse.returncode == 1
    document = json.loads(worse.stdout)
    assert document["counts"]["slower"] == 1
    assert document["software"] == {"torch": ["2.13.0", "2.14.0"]}
    assert document == comparison_json(compare(load(old), load(new)))
    better = analysis("compare", new, old)
    assert better.returncode == 0
    assert "faster: 1" in better.stdout
    missing = analysis("compare", tmp_path / "nowhere", new)
    assert missing.returncode == 2
    assert missing.stderr.strip().endswith("has no run.json; give the folder of a recording.")


def test_the_head_s_ratio_is_that_of_all_classes(tmp_path: Path) -> None:
    old, new = two(tmp_path, [1.3, 1.0, 1.0, 1.0])
    text = comparison_text(compare(load(old), load(new)))
    assert "\ngeometric mean of the ratios new/old: 1.068\n" in text
    assert text.splitlines()[-1].split()[-2] == "1.068"
