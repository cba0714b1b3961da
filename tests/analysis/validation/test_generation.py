"""Test the error of constants that are carried over to another machine of the generation."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.imports.tables import PublicTable, choose_tables, find_tables, read_table
from analysis.model.features import Inputs
from analysis.model.fit import Fit, SoftwareRange
from analysis.model.predict import model_from_json
from analysis.model.prior import GROUP
from analysis.validation.software import CollectionErrors, ErrorRange, warm_query
from kernels.machine import known_machine, slug_of_device
from kernels.timemodel.constants import shipped_fits
from tests.studies.shipping.generation import carried_collections, judge_generation
from tests.studies.shipping.learning import ShippedFit, software_range
from tests.support.published import ACCURACY
from tests.support.synthetic import random_sizes

RECORDED = ACCURACY / "generation.json"
HOPPER = ("nvidia-h100-sxm", "nvidia-h200")
BLACKWELL = ("nvidia-b200", "nvidia-b300")


def fits() -> dict[str, Fit]:
    """Return the shipped bf16 fit of each machine."""
    machines = shipped_fits()["machines"]
    return {
        slug: model_from_json(known_machine(slug), m).fits[GROUP] for slug, m in machines.items()
    }


def table(folder: Path, slug: str, factor: float, rows: int) -> PublicTable:
    """Write a table of times by the machine's shipped constants, times a factor, with 2% noise."""
    machine = known_machine(slug)
    assert slug_of_device(machine.name) == slug
    sizes = pd.DataFrame(sorted(set(random_sizes(rows, 0))), columns=list("mnk"))
    inputs = Inputs.from_query(machine, warm_query(sizes.assign(dtype="bf16")))
    noise = np.exp(0.02 * np.random.default_rng(rows).standard_normal(len(sizes)))
    frame = sizes.assign(
        framework="TRTLLM", version="1.0", device=machine.name, gemm_dtype="bfloat16",
        latency=inputs.estimate(fits()[slug].constants).time * factor * noise * 1e3,
    )  # fmt: skip
    path = folder / f"{slug}-{factor}" / "gemm_perf.parquet"
    path.parent.mkdir(parents=True)
    frame.to_parquet(path)
    return read_table(path)


def test_each_machine_is_predicted_by_every_other_one_of_its_generation(tmp_path: Path) -> None:
    known = {slug: fit for slug, fit in fits().items() if slug in (*HOPPER, "nvidia-b200")}
    # The two tables of the H200 differ by a factor. The B200 has no sibling here, and the L40S has
    # no constants.
    tables = [
        table(tmp_path, "nvidia-h100-sxm", 1.0, 300), table(tmp_path, "nvidia-h200", 1.0, 300),
        table(tmp_path, "nvidia-h200", 1.5, 300), table(tmp_path, "nvidia-b200", 1.0, 300),
        table(tmp_path, "nvidia-l40s", 1.0, 300),
    ]  # fmt: skip
    found = carried_collections(known, tables)
    assert [(c.origin, c.slug) for c in found] == [HOPPER[::-1], HOPPER, HOPPER]
    right, slow = (np.median(c.log_ratios) for c in found[1:])
    assert slow - right == pytest.approx(np.log(1.5), abs=0.01)
    assert abs(right) < 0.1  # the scaled constants of the H100 predict the H200 well


def errors(origin: str, slug: str, scatter: float, rows: int = 2000) -> CollectionErrors:
    """Return errors of one machine's constants on another, as log ratios that scatter about 0."""
    sizes = pd.DataFrame(random_sizes(rows, 0), columns=list("mnk")).assign(dtype="bf16")
    predicted = np.full(rows, 1e-5)
    log_ratios = scatter * np.random.default_rng(rows).standard_normal(rows)
    seconds, spreads = predicted * np.exp(log_ratios), np.ones(rows)
    one = CollectionErrors.from_times(
        slug, "made up", warm_query(sizes), predicted, seconds, spreads
    )
    return replace(one, origin=origin)


def test_every_pair_weighs_the_same_however_many_collections_it_has() -> None:
    calm, wild = errors(*HOPPER, 0.02), errors(*HOPPER[::-1], 0.2)
    once, again = (software_range([calm, *[wild] * times]) for times in (1, 4))
    assert (again.low, again.high) == pytest.approx((once.low, once.high), rel=0.01)
    # The constants of two machines on the same third machine are two pairs.
    other = replace(wild, slug=calm.slug)
    assert software_range([calm, other]) == once


def narrow() -> dict[str, ShippedFit]:
    """Return the shipped fits, as if their own collections required hardly any interval."""
    return {
        slug: ShippedFit(replace(fit, low=-1e-3, high=1e-3, scale=1.0, beside=0.0), [])
        for slug, fit in fits().items()
    }


def test_a_machine_is_judged_by_an_interval_that_no_pair_of_it_taught() -> None:
    scatter = dict.fromkeys((HOPPER, HOPPER[::-1]), 0.05) | dict.fromkeys(
        (BLACKWELL, BLACKWELL[::-1]), 0.1
    )
    found = [errors(*pair, size) for pair, size in scatter.items()]
    found.append(errors("nvidia-gb200", "nvidia-b200", 0.1))
    rows = {
        (row["constants_from"], row["machine"]): row for row in judge_generation(narrow(), found)
    }
    # Only the nearest sibling's constants answer, so those of the GB200 are not judged on a B200.
    assert rows.keys() == scatter.keys()
    # Hopper's errors scatter by 5%, those of the others by 10%. Each generation is judged by the
    # interval of the other one.
    for (_, slug), row in rows.items():
        assert row["coverage_90"] > 0.99 if slug in HOPPER else row["coverage_90"] < 0.85


def test_what_is_known_of_a_machine_widens_the_intervals_of_all_others_alone() -> None:
    pairs = (HOPPER, HOPPER[::-1], BLACKWELL, BLACKWELL[::-1])
    carried = [errors(*pair, 0.5) for pair in pairs]
    calm = [replace(one, log_ratios=0.01 * one.log_ratios) for one in carried]
    shipped = narrow()
    shipped["nvidia-b200"] = replace(
        shipped["nvidia-b200"], collections=[errors("", "nvidia-b200", 1.0)]
    )
    # The interval is learned from pairs with small errors, and the judged pairs have large errors.
    # The constants of the B300 come from the B200, whose fit already covers the B200's collections.
    for (origin, slug), wild in zip(pairs, carried, strict=True):
        taught = [wild if (c.origin, c.slug) == (origin, slug) else c for c in calm]
        rows = judge_generation(shipped, taught)
        (row,) = (row for row in rows if row["machine"] == slug)
        assert row["coverage_90"] > 0.9 if slug in HOPPER else row["coverage_90"] < 0.1


def test_the_recorded_coverage_is_of_all_machines_that_have_a_sibling() -> None:
    rows = json.loads(RECORDED.read_text())
    assert {row["machine"] for row in rows} == {
        *HOPPER, *BLACKWELL, "nvidia-gb200", "nvidia-gb300",
    }  # fmt: skip
    for machine in {row["machine"] for row in rows}:
        own = [row for row in rows if row["machine"] == machine]
        counts = [row["rows"] for row in own]
        assert 0.8 < np.average([row["coverage_90"] for row in own], weights=counts) < 0.97
        assert all(row["mean"] < 0.13 for row in own)


@pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None, reason="needs the extra `public`"
)
def test_what_is_recorded_is_what_the_tables_give() -> None:
    known, tables = fits(), find_tables()
    chosen = choose_tables(tables)["nvidia-h200"]
    (one,) = carried_collections(known, [chosen])
    assert (one.origin, one.source) == ("nvidia-h100-sxm", chosen.source)
    (recorded,) = (
        row
        for row in json.loads(RECORDED.read_text())
        if (row["machine"], row["source"]) == (one.slug, one.source)
    )
    for name in ("rows", "median", "mean", "p95"):
        assert getattr(one.errors, name) == pytest.approx(recorded[name], rel=0.02)
    # The shipped range was learned from these and other rows.
    learned = ErrorRange(SoftwareRange(**shipped_fits()["generation"]), {})
    assert one.inside(learned).mean() > 0.9
