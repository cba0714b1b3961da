from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.imports.tables import PublicTable, choose_tables, find_tables, read_rows, read_table
from analysis.model.basis import find_basis
from analysis.model.fit import SOFTWARE_ERROR, UNCALIBRATED, Fit, SoftwareRange
from analysis.model.prior import GROUP
from analysis.model.query import Query
from analysis.model.shift import Shift
from analysis.validation.software import CollectionErrors, errors_on_other_tables
from kernels.common.errors import UserError
from kernels.machine import known_machine, known_machines
from kernels.problem import Gemm
from kernels.timemodel.constants import default_constants, physical_bounds, shipped_fits
from tests.studies.shipping.learning import (
    FITTED_ROWS,
    Move,
    ShippedFit,
    advised_moves,
    group_in,
    judge_model,
    judge_moves,
    judge_shipped,
    shipped_fit,
    sibling_shift,
    software_range,
    widened_by_others,
)
from tests.support.synthetic import H100, model_law, random_sizes

A, B, C, D = "nvidia-h100-sxm", "nvidia-a100-sxm-80gb", "nvidia-l40s", "nvidia-b300"


def collection(
    slug: str, scatter: float, rows: int = 4000, spread: float = 1.0
) -> CollectionErrors:
    """Return errors of random shapes whose times scatter in proportion to their spreads."""
    rng = np.random.default_rng(rows)
    problems = [Gemm(m, n, k, "bf16") for m, n, k in random_sizes(rows, rows)]
    # Predicted times are random, so that many larger neighbours are predicted to be faster.
    predicted = model_law()(problems) * np.exp(0.2 * rng.standard_normal(rows))
    spreads = spread * rng.uniform(1, 3, rows)
    measured = predicted * np.exp(scatter * spreads * rng.standard_normal(rows))
    query = Query.plain(problems, "cublas", warm=True)
    return CollectionErrors.from_times(slug, "made up", query, predicted, measured, spreads)


def test_the_interval_of_other_machines_holds_nine_in_ten_rows_of_a_like_one() -> None:
    alike = [collection(slug, 0.05, rows) for slug, rows in ((A, 3000), (B, 4000), (C, 5000))]
    for row in judge_model(alike):
        assert row["coverage_90"] == pytest.approx(0.9, abs=0.02)
        assert row["median_width"] == pytest.approx(2 * np.sinh(1.645 * 0.05 * 2), rel=0.1)
    *_, wild = judge_model([*alike, collection(D, 0.15, 3500)])
    assert wild["coverage_90"] < 0.6
    # The interval is wider on a machine whose frameworks are known to differ more.
    *_, known = judge_model([*alike, collection(D, 0.15, 3000), collection(D, 0.15, 3500)])
    assert known["coverage_90"] == pytest.approx(0.9, abs=0.02)


def test_every_machine_weighs_as_much_however_many_rows_and_collections_it_has() -> None:
    calm, wild = collection(A, 0.02, 500), collection(B, 0.2, 3000)
    once = software_range([calm, wild])
    again = software_range([calm, wild, wild, wild])
    assert again.low == pytest.approx(once.low, rel=0.01)
    assert again.high == pytest.approx(once.high, rel=0.01)


def test_the_models_own_error_and_that_of_other_software_add_in_quadrature() -> None:
    fit = Fit(
        default_constants(H100.generation, "bf16"), low=-0.12 * 1.645, high=0.12 * 1.645
    ).for_software(SoftwareRange(-1.0, 2.0, -0.5, 0.5), Shift())
    assert fit.spreads(np.array([0.0, 1.0, 2.0])) == pytest.approx(
        [SOFTWARE_ERROR, np.hypot(0.12, SOFTWARE_ERROR), np.hypot(0.24, SOFTWARE_ERROR)]
    )
    # The lower end follows from the measured framework, and the upper end from other frameworks.
    assert (fit.low, fit.high) == (pytest.approx(-1.645), 2.0)


def table(folder: Path, framework: str, factor: float) -> PublicTable:
    """Write a table of one framework: times of the law, times a factor, with 2% noise."""
    sizes = sorted(set(random_sizes(2 * FITTED_ROWS, 0)))
    seconds = model_law()([Gemm(m, n, k, "bf16") for m, n, k in sizes])
    noise = np.exp(0.02 * np.random.default_rng(0).standard_normal(len(sizes)))
    frame = pd.DataFrame(sizes, columns=list("mnk")).assign(
        framework=framework, version="1.0", device=H100.name, gemm_dtype="bfloat16",
        latency=seconds * factor * noise * 1e3,
    )  # fmt: skip
    path = folder / framework / "gemm_perf.parquet"
    path.parent.mkdir(parents=True)
    frame.to_parquet(path)
    return read_table(path)


def test_shipped_constants_are_as_sure_as_they_are_right_about_other_software(
    tmp_path: Path,
) -> None:
    tables = [table(tmp_path, *of) for of in (("TRTLLM", 1.0), ("SGLANG", 1.2), ("VLLM", 1.15))]
    shipped = shipped_fit(H100, tables[0], tables)
    assert shipped.fit.rows == FITTED_ROWS
    assert [c.source for c in shipped.collections] == [t.source for t in tables]
    own, slower, other = judge_shipped([shipped])
    assert own["median"] < 0.03
    assert slower["median"] == pytest.approx(1 - 1 / 1.2, abs=0.02)
    # The shipped interval covers the slower framework. An interval that was learned only from
    # faster ones does not.
    assert np.exp(shipped.fit.high * shipped.fit.typical_spread) > 1.15
    assert slower["coverage_90"] < 0.7
    assert other["coverage_90"] > 0.9


def test_shipped_intervals_are_as_wide_as_other_machines_ask_for() -> None:
    fit = Fit(default_constants(H100.generation, "bf16"), low=-1.0, high=1.0)
    calm, wild = collection(A, 0.05), collection(B, 1.0)
    fits = widened_by_others({A: ShippedFit(fit, [calm]), B: ShippedFit(fit, [wild])})
    ends = software_range([wild])
    assert (fits[A].low, fits[A].high) == (ends.low, ends.high)
    assert (fits[A].pair_low, fits[A].pair_high) == (
        ends.pair_low,
        ends.pair_high,
    )
    # B's fit already covers its collection, and A's small errors do not narrow any interval.
    assert (fits[B].low, fits[B].high) == (-1.0, 1.0)
    assert widened_by_others({B: ShippedFit(fit, [wild])})[B] is fit


def test_no_interval_is_learned_from_nothing() -> None:
    assert software_range([collection(A, 0.05)]).low < 0
    with pytest.raises(UserError, match="import more tables"):
        judge_model([collection(A, 0.05)])


def test_siblings_say_how_other_software_differs_and_the_machine_itself_nothing(
    tmp_path: Path,
) -> None:
    names = ("nvidia-b200", "nvidia-b300", "nvidia-gb200", "nvidia-gb300", "nvidia-h200")
    tables = []
    for name in names:
        # The other framework is slower on the machine to predict, and faster on its siblings.
        factor = 1.5 if name == "nvidia-b200" else 0.9
        for framework, times in (("TRTLLM", 1.0), ("VLLM", factor)):
            made = table(tmp_path / name, framework, times)
            tables.append(replace(made, device=known_machine(name).name))
    chosen = choose_tables(tables)
    seconds = np.array([1e-5, 1e-3])
    shift = sibling_shift(chosen["nvidia-b200"], chosen, tables)
    assert np.log(shift.applied(seconds) / seconds) == pytest.approx(np.log(0.9) / 2, abs=0.01)
    # An H200's only sibling is not among them.
    assert sibling_shift(chosen["nvidia-h200"], chosen, tables) == Shift()
    # Differences from the table of another framework show nothing about this framework's table.
    other = {name: t if name == "nvidia-b200" else tables[2 * i + 1]
             for i, (name, t) in enumerate(chosen.items())}  # fmt: skip
    assert sibling_shift(chosen["nvidia-b200"], other, tables) == Shift()


def test_a_collection_without_a_common_shape_is_left_out(tmp_path: Path) -> None:
    imported, alike = (table(tmp_path, name, 1.0) for name in ("TRTLLM", "VLLM"))
    elsewhere = tmp_path / "SGLANG" / "gemm_perf.parquet"
    elsewhere.parent.mkdir()
    frame = pd.read_parquet(imported.path)
    frame.assign(framework="SGLANG", k=frame["k"] + 1).to_parquet(elsewhere)
    other = read_table(elsewhere)
    fit = Fit(default_constants(H100.generation, "bf16"), low=-1.0, high=1.0)
    (tmp_path / "calibration.json").write_text(json.dumps({"groups": {GROUP: fit.to_json()}}))
    rows = read_rows(imported)
    predicted = rows.assign(lo_us=rows["time_us"] / 1.1, hi_us=rows["time_us"] * 1.1)
    predicted.to_csv(tmp_path / "predicted.csv")
    found = errors_on_other_tables(tmp_path, imported, [imported, other, alike], Shift())
    assert [errors.source for errors in found] == [alike.source]


def test_moves_are_judged_by_what_other_software_took(tmp_path: Path) -> None:
    first, second = (table(tmp_path, name, 1.0) for name in ("TRTLLM", "VLLM"))
    rows = read_rows(second)
    shapes = [",".join(map(str, row)) + ",bf16" for row in rows[["m", "n", "k"]].to_numpy()[:3]]
    unknown = "7777,7777,7777,bf16"
    told = [
        {"question": "pad", "verdict": "likely", "problem": shapes[0], "instead": shapes[1]},
        {"question": "choose", "verdict": "likely", "problem": shapes[0], "instead": shapes[2]},
        {"question": "pad", "verdict": "leave it", "problem": shapes[0], "instead": shapes[0]},
        {"question": "pad", "verdict": "likely", "problem": shapes[0], "instead": unknown},
    ]
    answers = [{**answer, "predicted_gain": 0.2, "predicted_lo": 0.1} for answer in told]
    (tmp_path / "recommendations.json").write_text(json.dumps(answers))
    pad, choose = advised_moves(tmp_path, first, [first, second])
    time = rows["time_us"].to_numpy()
    assert pad.gained == pytest.approx(time[0] / time[1] - 1)
    flops = [Gemm.parse(shape).flops for shape in shapes]
    assert choose.gained == pytest.approx(flops[2] / time[2] / (flops[0] / time[0]) - 1)
    judged = judge_moves([pad, Move("pad", 0.3, 0.1, 0.05), Move("pad", 0.3, 0.1, -0.5)])
    assert judged[0]["moves"] == 3
    assert judged[0]["median_claimed"] == 0.3


def test_what_is_shipped_answers_for_nine_gpus_within_its_error(tmp_path: Path) -> None:
    machines = shipped_fits()["machines"]
    assert len(machines) == 9
    for slug in machines:
        basis = find_basis(slug, tmp_path)
        assert (basis.kind, basis.warm) == ("shipped", True)
        fits = basis.model.fits
        dtypes = ["bf16", *(["fp8"] if "fp8" in basis.model.machine.peaks else [])]
        fits = {g: fit for g, fit in fits.items() if g.split()[-1] in dtypes}
        assert list(fits) == [group_in(dtype) for dtype in dtypes]
        for group, fit in fits.items():
            # For a typical spread, only fp8 may have a wider interval than without any fit.
            most = UNCALIBRATED[1] * (1.5 if group.endswith("fp8") else 1) / fit.typical_spread
            assert -most < fit.low < 0 < fit.high < most, (slug, group)
            for name, (low, high) in physical_bounds(basis.model.machine).items():
                assert low <= getattr(fit.constants, name) <= high, (slug, name)
        assert basis.kind_and_source(Gemm(64, 64, 64, "fp32"))[0] in ("generation", "none")


@pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None, reason="needs the extra `public`"
)
@pytest.mark.slow
def test_the_shipped_constants_are_what_the_tables_give() -> None:
    tables = find_tables()
    slug = "nvidia-h200"
    shipped = Fit.from_json(shipped_fits()["machines"][slug]["groups"][group_in("bf16")])
    chosen = {s: t for s, t in choose_tables(tables).items() if s in known_machines()}
    shift = sibling_shift(chosen[slug], chosen, tables)
    assert shift.log_ratios == pytest.approx(shipped.shift.log_ratios, abs=1e-3)
    again = shipped_fit(known_machine(slug), chosen[slug], tables, shift=shift).fit
    for name in ("median", "mean", "p95", "scale"):
        assert getattr(again, name) == pytest.approx(getattr(shipped, name), rel=0.02)
    # The interval is as wide as its own collections and those of other machines require.
    assert shipped.low <= again.low + 0.02
    assert shipped.high >= again.high - 0.02
