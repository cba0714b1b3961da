"""Test the factors of intervals for each kind of shape."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from analysis.model.fit import Fit
from analysis.model.groups import GroupErrors, factors_of, group_factors, shape_group
from analysis.model.predict import Model
from analysis.model.prior import GROUP
from analysis.model.query import Query
from kernels.problem import Gemm
from kernels.timemodel.constants import default_constants
from tests.support.synthetic import H100


@pytest.mark.parametrize(
    ("gemm", "kind"),
    [
        (Gemm(4096, 4096, 4096, "bf16"), "aligned"),
        (Gemm(8, 4096, 4096, "bf16"), "aligned, few M"),
        (Gemm(4096, 16, 4096, "bf16"), "narrow"),
        (Gemm(4096, 50304, 4096, "bf16"), "vocabulary"),
        (Gemm(4096, 50257, 4096, "bf16"), "misaligned"),
        (Gemm(1, 12, 4096, "bf16"), "narrow, few M"),  # a result with one row is not misaligned
        (Gemm(4096, 1, 4096, "bf16"), "narrow"),
        (Gemm(4096, 1, 4095, "bf16"), "misaligned"),
    ],
)
def test_kinds(gemm: Gemm, kind: str) -> None:
    assert shape_group(gemm) == kind


def errors(scatter: dict[str, float], rows: int = 2000, seed: int = 0) -> GroupErrors:
    """Return normal errors; with a scatter of 1, nine in ten are between −1 and 1."""
    rng = np.random.default_rng(seed)
    groups = rng.choice(np.array(list(scatter), dtype=object), rows)
    sizes = np.array([scatter[name] for name in groups]) / 1.645
    return GroupErrors(sizes * rng.standard_normal(rows), groups)


def test_a_kind_that_is_less_sure_gets_a_wider_interval_and_a_wider_one_is_believed_sooner() -> (
    None
):
    planted = {"aligned": 1.0, "narrow": 2.0, "vocabulary": 0.7}
    one = group_factors([errors(planted)])
    many = group_factors([errors(planted, seed=seed) for seed in range(20)])
    for name, truth in planted.items():
        assert many[name] == pytest.approx((truth, truth), rel=0.12)
    # A single collection widens the interval by more than half if it requires twice the width, and
    # hardly narrows it if two thirds would be enough.
    assert 1.4 < one["narrow"][0] < 1.8
    assert 0.88 < one["vocabulary"][1] < 0.98


def test_the_two_ends_are_learned_apart_and_a_handful_of_rows_tells_nothing() -> None:
    late = errors({"aligned": 1.0})
    late = late._replace(relative=np.where(late.relative > 0, 3 * late.relative, late.relative))
    below, above = group_factors([late])["aligned"]
    assert above > 1.8 > 1.2 > below
    assert group_factors([errors({"narrow": 5.0}, rows=19)]) == {}


def test_intervals_differ_by_kind_and_survive_json() -> None:
    fit = Fit(
        default_constants("hopper", "bf16"), low=-0.1, high=0.2, groups={"narrow": (2.0, 3.0)}
    )
    asked = [Gemm(4096, 4096, 4096, "bf16"), Gemm(4096, 16, 4096, "bf16")]
    assert [list(ends) for ends in factors_of(asked, fit.groups)] == [[1, 2], [1, 3]]
    assert [list(ends) for ends in factors_of(asked, {})] == [[1, 1], [1, 1]]
    again = Fit.from_json(json.loads(json.dumps(fit.to_json())))
    assert again.groups == fit.groups
    found = Model(H100, {GROUP: again}).predict(Query.plain(asked, "cublas"))
    low, high = (np.log(end / found.estimate.time) for end in (found.lo, found.hi))
    assert low == pytest.approx([-0.1, -0.2])
    assert high == pytest.approx([0.2, 0.6])
    with pytest.raises(ValueError, match="groups"):
        Fit.from_json({**fit.to_json(), "groups": {"narrow": ["wide", 1]}})


def test_a_spread_is_read_back_from_a_widened_interval() -> None:
    """The ratios of times of such a kind also become less certain."""
    fit = Fit(default_constants("hopper", "bf16"), low=-0.1, high=0.2)
    wide = replace(fit, groups={"narrow": (2.0, 2.0)})
    one = Query.plain([Gemm(4096, 16, 4096, "bf16")], "cublas")
    found = Model(H100, {GROUP: wide}).predict(one)
    assert wide.spread(float(found.lo[0]), float(found.hi[0])) == pytest.approx(2.0)
