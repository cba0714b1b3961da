"""Test constants that are carried over to a GPU without measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analysis.advice.times import measurements_near, times_of
from analysis.model.basis import Basis, basis_at, find_basis, machine_rows
from analysis.model.fit import FP32_LIKE, UNCALIBRATED, SoftwareRange
from analysis.model.fitted import analyse, write_predictions
from analysis.model.prior import (
    GROUP,
    carried_fit,
    mean_fit,
    nearest_sibling,
    prior_without_tables,
)
from analysis.recordings.imported import VALIDATION
from analysis.recordings.load import load
from kernels.machine import known_machine
from kernels.problem import Conv, Gemm, Problem
from kernels.timemodel.constants import default_constants, scaled_constants, shipped_fits
from sweeps.cases.case import CONFIRM, Case
from tests.support.synthetic import record

MEASURED = list(shipped_fits()["machines"])
LARGE = Gemm(4096, 4096, 4096, "bf16")


@pytest.mark.parametrize(
    ("slug", "origin"),
    [
        ("nvidia-h800", "nvidia-h100-sxm"),  # not the H200, whose memory is faster
        ("nvidia-a100-sxm-40gb", "nvidia-a100-sxm-80gb"),
        ("nvidia-rtx-pro-6000-workstation", "nvidia-rtx-pro-6000"),
        ("nvidia-b200", "nvidia-b300"),  # never itself
        ("nvidia-l4", None),  # a third of an L40S's peak and bandwidth
        ("nvidia-geforce-rtx-4090", None),  # half of its peak
        ("nvidia-h20", None),
        ("nvidia-h100-pcie", None),
        ("nvidia-t4", None),  # the only GPU of its generation
    ],
)
def test_constants_come_from_the_nearest_machine_of_the_generation_if_one_is_near(
    slug: str, origin: str | None
) -> None:
    there = nearest_sibling(known_machine(slug), MEASURED)
    assert (there and there.slug) == origin


def test_a_peak_beyond_those_that_were_learned_from_is_too_far() -> None:
    h100 = replace(known_machine("nvidia-h100-sxm"), slug="a-sibling")
    assert nearest_sibling(h100, MEASURED) is not None
    # Between measured siblings, bandwidths differ by factors up to 1.4, but peaks only up to 1.1.
    slow = replace(h100, peaks={"bf16": h100.peak("bf16") / 1.3})
    assert nearest_sibling(slow, MEASURED) is None
    assert nearest_sibling(replace(h100, bandwidth=h100.bandwidth * 1.3), MEASURED) is not None
    assert nearest_sibling(replace(h100, peaks={"fp32": 1e13}), MEASURED) is None
    # With one machine of each generation, there is no pair to learn from.
    assert nearest_sibling(h100, ["nvidia-h100-sxm", "nvidia-b200"]) is None


def ends(basis: Basis, problem: Problem) -> tuple[float, float, float]:
    """Return the predicted seconds, and the log ratios of the interval's ends to them."""
    p = basis.model.predict(basis.query([problem]))
    time = p.estimate.time[0]
    return float(time), float(np.log(p.lo[0] / time)), float(np.log(p.hi[0] / time))


def test_a_machine_without_measurements_answers_like_its_sibling_and_no_surer(
    tmp_path: Path,
) -> None:
    here, there = (find_basis(slug, tmp_path) for slug in ("nvidia-h800", "nvidia-h100-sxm"))
    assert here.kind_and_source(LARGE)[0] == here.kind == "generation"
    assert here.source.startswith("constants of nvidia-h100-sxm, scaled, warm, with ")
    assert "factor of two" not in here.source
    time, low, high = ends(here, LARGE)
    its_time, its_low, its_high = ends(there, LARGE)
    # The two datasheets are nearly equal, but no table shows other frameworks on the H800.
    assert time == pytest.approx(its_time, rel=0.05)
    assert UNCALIBRATED[0] < low < its_low + 1e-9
    assert its_high - 1e-9 < high < UNCALIBRATED[1]


def test_no_interval_is_narrower_than_where_the_constants_were_fitted() -> None:
    fit = find_basis("nvidia-h100-sxm", Path("nowhere")).model.fits[GROUP]
    h100, h800 = (known_machine(slug) for slug in ("nvidia-h100-sxm", "nvidia-h800"))
    narrow = carried_fit(fit, h100, h800, SoftwareRange(-0.01, 0.01, -0.01, 0.01))
    assert (narrow.low, narrow.pair_high) == (fit.low, fit.pair_high)
    wide = carried_fit(fit, h100, h800, SoftwareRange(-5.0, 6.0, -7.0, 8.0))
    assert (wide.low, wide.high, wide.pair_low, wide.pair_high) == (-5.0, 6.0, -7.0, 8.0)
    assert (wide.rows, wide.median) == (0, None)  # the H800 was not measured


def test_less_bandwidth_costs_what_is_bound_by_it(tmp_path: Path) -> None:
    tall = Gemm(16, 16384, 16384, "bf16")
    slugs = ("nvidia-a100-sxm-80gb", "nvidia-a100-sxm-40gb")
    (large, _, _), (small, _, _) = (ends(find_basis(slug, tmp_path), tall) for slug in slugs)
    wide, narrow = (known_machine(slug).bandwidth for slug in slugs)
    assert small / large == pytest.approx(wide / narrow, rel=0.1)


@pytest.mark.parametrize(
    "problem",
    [
        Gemm(4096, 4096, 4096, "tf32"),
        Gemm(4096, 4096, 4096, "fp8"),
        Gemm(4095, 4095, 4095, "bf16"),
        Gemm(4096, 4096, 4096, "bf16", layout="nn"),
        Conv.parse("32,64,56,56,64,3,3,1,1,1,1,bf16"),
    ],
    ids=str,
)
def test_what_no_pair_tells_remains_a_factor_of_two(tmp_path: Path, problem: Problem) -> None:
    basis = find_basis("nvidia-h800", tmp_path)
    assert "a factor of two either way" in basis.kind_and_source(problem)[1]
    _, low, high = ends(basis, problem)
    assert (low, high) == pytest.approx(UNCALIBRATED)


def test_a_measured_tf32_fit_says_which_layouts_were_not_measured(tmp_path: Path) -> None:
    basis = find_basis("nvidia-h100-sxm", tmp_path)
    group = "cublas gemm tf32"
    borrowed = basis.model.fit_of(group)
    assert borrowed.rows == 0
    measured = replace(borrowed, rows=100, layout="nt", aligned_only=True)
    own = replace(basis, model=replace(basis.model, fits={**basis.model.fits, group: measured}))
    nt, nn = (Gemm(4096, 4096, 4096, "tf32", layout=layout) for layout in ("nt", "nn"))
    assert "alignment, layout or batching was not measured" not in own.kind_and_source(nt)[1]
    assert "alignment, layout or batching was not measured" in own.kind_and_source(nn)[1]


def test_the_other_16_bit_dtype_is_as_fast_and_a_little_less_sure(tmp_path: Path) -> None:
    basis = find_basis("nvidia-l40s", tmp_path)
    half = replace(LARGE, dtype="fp16")
    time, low, high = ends(basis, LARGE)
    its_time, its_low, its_high = ends(basis, half)
    assert its_time == time
    assert (its_low, its_high) == pytest.approx((1.1 * low, 1.1 * high))
    assert basis.kind_and_source(half)[0] == basis.kind_and_source(LARGE)[0] == "shipped"
    assert "fp16 uses the fit of bf16" in basis.kind_and_source(half)[1]


def test_tf32_goes_by_the_same_machines_constants(tmp_path: Path) -> None:
    """With half of the peak and twice the bytes, the time is about twice as long."""
    basis = find_basis("nvidia-l40s", tmp_path)
    time, low, high = ends(basis, replace(LARGE, dtype="tf32"))
    assert time == pytest.approx(2 * ends(basis, LARGE)[0], rel=0.1)
    assert (low, high) == pytest.approx(UNCALIBRATED)


def test_fp32_is_surer_where_its_generation_was_measured(tmp_path: Path) -> None:
    fp32 = replace(LARGE, dtype="fp32")
    slugs = ("nvidia-a100-sxm-40gb", "nvidia-l4", "nvidia-a10")  # an A10 has different SMs
    sure, *others = (find_basis(slug, tmp_path) for slug in slugs)
    assert ends(sure, fp32)[1:] == pytest.approx(FP32_LIKE)
    assert (
        "fp32 from constants of nvidia-a100-pcie-80gb, with an interval of −10% to +42%"
        in sure.kind_and_source(fp32)[1]
    )
    conv = Conv.parse("32,64,56,56,64,3,3,1,1,1,1,fp32")
    unsure: list[tuple[Basis, Problem]] = [(other, fp32) for other in others]
    for basis, problem in [*unsure, (sure, conv)]:
        assert ends(basis, problem)[1:] == pytest.approx(UNCALIBRATED)
        assert "a factor of two either way" in basis.kind_and_source(problem)[1]


def test_a_users_implementation_is_not_hand_written_because_of_its_first_word() -> None:
    machine = known_machine("nvidia-h100-sxm")
    library = default_constants(machine.generation, "bf16")
    hand_written = default_constants(machine.generation, "bf16", hand_written=True)
    assert library != hand_written
    for implementation, constants in (
        ("triton-tiled", hand_written),
        ("triton-tiled by us", library),
    ):
        prior = prior_without_tables(machine, f"{implementation} gemm bf16")
        assert prior.fit.constants == constants


@pytest.mark.parametrize(
    "problem", [Gemm(4097, 4097, 4097, "fp32"), Gemm(4096, 4096, 4096, "bf16", batch=8)], ids=str
)
def test_the_source_says_why_an_interval_is_wider(tmp_path: Path, problem: Gemm) -> None:
    basis = find_basis("nvidia-h100-sxm", tmp_path)
    assert ends(basis, problem)[1:] == pytest.approx(UNCALIBRATED)
    assert basis.kind_and_source(problem)[1].endswith(
        "The shape's alignment, layout or batching was not measured, so the interval is at least a "
        "factor of two either way"
    )


def test_a_machine_without_a_sibling_like_it_gets_the_mean_of_all_generations(
    tmp_path: Path,
) -> None:
    """The interval is narrower than a factor of two, and wider than with a sibling."""
    basis = find_basis("nvidia-h20", tmp_path)
    assert basis.kind == "generation"  # Hopper's GPUs are among them
    assert basis.source.startswith("mean of the constants of 9 GPUs, scaled, warm, with ")
    _, low, high = ends(basis, LARGE)
    _, near_low, near_high = ends(find_basis("nvidia-h800", tmp_path), LARGE)
    assert UNCALIBRATED[0] < low < near_low
    assert near_high < high < UNCALIBRATED[1]
    # A T4 has no bf16.
    assert find_basis("nvidia-t4", tmp_path).kind_and_source(LARGE)[0] == "none"


def test_every_generation_counts_the_same_in_the_mean() -> None:
    """The four Blackwell GPUs together have the weight of one generation."""
    h20 = known_machine("nvidia-h20")
    fits = {slug: find_basis(slug, Path("nowhere")).model.fits[GROUP] for slug in MEASURED}
    known = {slug: fit.constants for slug, fit in fits.items()}
    blackwell = [s for s in MEASURED if known_machine(s).generation == "blackwell"]
    assert len(blackwell) == 4
    nothing = SoftwareRange(0.0, 0.0, 0.0, 0.0)
    whole = mean_fit(known, h20, nothing).constants
    alike = {**known, **dict.fromkeys(blackwell[1:], known[blackwell[0]])}
    one = {slug: c for slug, c in alike.items() if slug not in blackwell[1:]}
    assert mean_fit(one, h20, nothing).constants.launch == pytest.approx(
        mean_fit(alike, h20, nothing).constants.launch
    )
    scaled = [scaled_constants(c, known_machine(s), h20, "bf16").feed for s, c in known.items()]
    assert min(scaled) < whole.feed < max(scaled)


def test_a_gpu_that_no_table_lists_has_siblings_too(tmp_path: Path) -> None:
    """Only pad/choose queries were measured on it, so its run.json has its facts."""
    unlisted = replace(known_machine("nvidia-h200"), slug="nvidia-h200-nvl", name="NVIDIA H200 NVL")
    plan = {"budget_s": 10.0, "shards": 1, "sweeps": [CONFIRM], "left_out": {}, "cases": []}
    cases = [Case(CONFIRM, LARGE, "cublas")]
    record(tmp_path / unlisted.slug, cases, [2e-5], machine=unlisted, plan=plan)
    basis = find_basis(unlisted.slug, tmp_path)
    assert basis.kind == "generation"
    assert basis.source.startswith("constants of nvidia-h200, scaled, ")
    assert basis.measured


def test_machines_have_no_error_figures_of_their_siblings(tmp_path: Path) -> None:
    rows = {row["slug"]: row for row in machine_rows(tmp_path)}
    row = rows["nvidia-h800"]
    assert row["basis"] == "generation"
    assert [row[name] for name in ("rows", "median", "mean", "p95")] == [None] * 4


@pytest.mark.parametrize("sweep", ["gemm", CONFIRM])
def test_an_unusable_run_leaves_the_published_recording_in_use(tmp_path: Path, sweep: str) -> None:
    """Measured times are then those of the published recording, too."""
    published = tmp_path / "published" / "nvidia-h100-sxm"
    record(published, [Case("gemm", LARGE, "cublas")], [2e-4])
    plan = {"budget_s": 10.0, "shards": 1, "sweeps": [sweep], "left_out": {}, "cases": []}
    health = {"verdict": "unusable", "reasons": ["launches waited"]}
    own = tmp_path / "nvidia-h100-sxm"
    record(own, [Case(sweep, LARGE, "cublas")], [9e-4], plan=plan, health=health)
    basis = find_basis("nvidia-h100-sxm", tmp_path)
    assert (basis.kind, basis.folder, basis.measured) == ("recorded", published, "")


def test_measured_queries_do_not_hide_the_other_recording(tmp_path: Path) -> None:
    slug, other = "nvidia-h100-sxm", Gemm(8192, 4096, 4096, "bf16")
    published = tmp_path / "published" / slug
    record(published, [Case("g", LARGE, "cublas"), Case("g", other, "cublas")], [2e-4, 4e-4])
    plan = {"budget_s": 10.0, "shards": 1, "sweeps": [CONFIRM], "left_out": {}, "cases": []}
    before = times_of([other], find_basis(slug, tmp_path))[0]
    record(tmp_path / slug, [Case(CONFIRM, LARGE, "cublas")], [3e-4], plan=plan)
    basis = find_basis(slug, tmp_path)
    assert basis.attention_folder == published
    asked, after = times_of([LARGE, other], basis)
    assert after == before
    assert (asked["evidence"], after["evidence"]) == ("measured", "measured")
    assert asked["time_us"] == pytest.approx(300)
    # Times of one place are still compared, although one of them was measured again.
    assert measurements_near(basis, [LARGE, other], 2.0).ratio(other, LARGE) is not None


def test_an_import_is_completed_by_the_published_recording(tmp_path: Path) -> None:
    """A public table has only bf16 GEMMs; other groups come from the recording."""
    slug = "nvidia-h100-sxm"
    published, imported = tmp_path / "published" / slug, tmp_path / "public" / slug
    sizes = [(256 * i, 256 * j, 1024) for i in (1, 2, 3) for j in (1, 2, 3, 4)]
    for folder, dtypes in ((published, ("bf16", "fp16")), (imported, ("bf16",))):
        cases = [Case("g", Gemm(*s, dtype), "cublas") for dtype in dtypes for s in sizes]
        if folder == published:
            convs = [f"8,{c},28,28,{k},3,3,1,1,1,1,fp16" for c in (32, 64, 96) for k in (32, 64)]
            cases += [Case("c", Conv.parse(spec), "cudnn") for spec in convs]
        record(folder, cases, [1e-5] * len(cases))
        write_predictions(analyse(load(folder)))
    assert find_basis(slug, tmp_path).folder == published
    run = json.loads((imported / "run.json").read_text(encoding="utf-8"))
    table = {
        "framework": "vLLM", "version": "1.0", "source": "vLLM 1.0", "package": "tables 1.0",
        "licence": "", "how": "graphs", "rows": 12, "cache": "warm",
    }  # fmt: skip
    (imported / "run.json").write_text(
        json.dumps({**run, "protocol": 0, "public": table}), encoding="utf-8"
    )
    assert find_basis(slug, tmp_path).folder == published  # the import is not complete
    (imported / VALIDATION).write_text("{}", encoding="utf-8")
    basis = find_basis(slug, tmp_path)
    assert (basis.kind, basis.folder) == ("public", imported)
    kinds = {d: basis.group_kind_and_source(Gemm(512, 512, 512, d))[0] for d in ("bf16", "fp16")}
    assert kinds == {"bf16": "public", "fp16": "recorded"}
    # The page of the import predicts from the same groups.
    assert basis_at(imported, basis.model).model.fits.keys() == basis.model.fits.keys()
    # A group that stands in for another dtype is of the recording, too.
    conv = Conv.parse("8,64,28,28,64,3,3,1,1,1,1,bf16")
    assert basis.group_kind_and_source(conv)[0] == "recorded"
    assert basis.query([conv]).cached == [False]
    # An own run that is unusable leaves the import in use.
    health = {"verdict": "unusable", "reasons": ["launches waited"]}
    record(tmp_path / slug, [Case("gemm", LARGE, "cublas")], [9e-4], health=health)
    again = find_basis(slug, tmp_path)
    assert (again.kind, again.folder) == ("public", imported)
    assert again.group_kind_and_source(Gemm(512, 512, 512, "fp16"))[0] == "recorded"
