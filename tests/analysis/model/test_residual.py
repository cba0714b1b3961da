from __future__ import annotations

import json
import math

import numpy as np
import pytest

from analysis.model import residual
from analysis.model.residual import MANY_ROWS, MIN_ROWS, Residual, fit_residual


def test_a_residual_learns_what_is_smooth_and_leaves_noise_alone() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (300, 3))
    smooth = np.sin(2 * x[:, 0]) * 0.2
    found = fit_residual(x[:200], smooth[:200] + 0.01 * rng.standard_normal(200))
    assert found is not None
    mean, spread = found.predict(x[200:])
    left = smooth[200:] - mean
    assert np.abs(left).mean() < 0.25 * np.abs(smooth[200:]).mean()
    assert fit_residual(x, 0.1 * rng.standard_normal(300)) is None
    assert fit_residual(x[: MIN_ROWS - 1], smooth[: MIN_ROWS - 1]) is None
    again = Residual.from_json(json.loads(json.dumps(found.to_json())))
    assert again.predict(x[200:])[0] == pytest.approx(mean)
    assert again.predict(x[200:])[1] == pytest.approx(spread)
    # Held-out rows have the typical spread of 1, and rows that the trees grew from a smaller one.
    assert 0.7 < np.median(spread) < 1.4
    assert np.median(found.predict(x[:200])[1]) < 0.8 * np.median(spread)


def test_a_residual_from_before_trees_were_written_grows_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = np.random.default_rng(0).uniform(-2, 2, (200, 3))
    y = 0.1 * x[:, 0]
    old = {"features": x.tolist(), "log_ratios": y.tolist(), "seen": 0.1, "unseen": 0.2}
    mean, spread = Residual.from_json(old).predict(x)
    assert np.abs(mean - y).mean() < 0.01
    assert (spread >= 0.5).all()
    damages: list[dict[str, object]] = [
        {"features": 1.0},
        {"features": [1.0, 2.0]},
        {"features": [[0.0] * 128] * 200},  # more features than trees can have
        {"log_ratios": [1.0]},
        {"log_ratios": [math.nan] * 200},
        {"log_ratios": [10**400] * 200},
    ]
    for damaged in damages:
        with pytest.raises(ValueError):  # noqa: PT011
            Residual.from_json({**old, **damaged})
    monkeypatch.setattr(residual, "can_grow", lambda: False)
    with pytest.raises(ValueError, match="needs scikit-learn"):
        Residual.from_json(old)


@pytest.mark.parametrize("name", ["seen", "unseen"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, "0.1", 10**400, None])
def test_a_residual_without_a_doubt_is_refused(name: str, value: object) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (100, 3))
    found = fit_residual(x, 0.1 * x[:, 0])
    assert found is not None
    with pytest.raises(ValueError, match="above 0"):
        Residual.from_json({**found.to_json(), name: value})


def test_a_residual_doubts_most_where_it_is_most_wrong() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (1200, 4))
    rough = np.where(x[:, 0] > 0, 0.3 * np.sign(np.sin(20 * x[:, 1])), 0.02 * x[:, 1])
    found = fit_residual(x[:600], rough[:600])
    assert found is not None
    mean, spread = found.predict(x[600:])
    wrong, hard = np.abs(rough[600:] - mean), x[600:, 0] > 0
    assert wrong[hard].mean() > 3 * wrong[~hard].mean()
    assert spread[hard].mean() > 1.5 * spread[~hard].mean()


def test_one_mishap_does_not_teach_a_residual_about_its_neighbours() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (300, 2))
    smooth = 0.2 * x[:, 0]
    spoilt = smooth + 0.01 * rng.standard_normal(300)
    spoilt[::30] += 2.5  # twelve times too slow
    found = fit_residual(x, spoilt)
    assert found is not None
    others = np.arange(300) % 30 != 0
    wrong = np.abs(found.predict(x)[0] - smooth)[others]
    assert wrong.mean() < 0.25 * np.abs(smooth).mean()


@pytest.mark.slow
def test_of_very_many_rows_the_few_that_are_unlike_all_near_them_are_learned() -> None:
    rng = np.random.default_rng(0)
    rows = MANY_ROWS + 2000
    x = rng.uniform(0, 1, (rows, 6))
    x[:, :2] = rng.integers(0, 20, (rows, 2))
    # Five of 400 pairs of sizes are fast, like weights whose two sizes are powers of two.
    fast = (x[:, 0] == x[:, 1]) & (x[:, 0] % 4 == 0)
    y = 0.02 * x[:, 2] - 0.7 * fast + 0.01 * rng.standard_normal(rows)
    found = fit_residual(x, y)
    assert found is not None
    mean, spread = found.predict(x)
    # If their times were clipped as outliers, they would be predicted like all other rows.
    assert mean[fast].mean() < -0.3
    assert np.abs(mean[~fast] - y[~fast]).mean() < 0.015
    assert 0.5 < np.median(spread) < 1.2
    # With ``part_of``, the rows of a fold are not clipped either, but fewer trees grow.
    part, alone = (fit_residual(x[:8000], y[:8000], part_of=of) for of in (rows, None))
    assert part is not None
    assert alone is not None
    assert part.predict(x)[0][fast].mean() < -0.3 < alone.predict(x)[0][fast].mean()
    assert len(part.trees.number) < 0.85 * len(alone.trees.number)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.4])
def test_what_slows_some_rows_alone_is_learned_and_no_mishap(share: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 1, (600, 6))
    slow = x[:, 2] < share
    found = fit_residual(x, 0.3 * slow + 0.01 * rng.standard_normal(600))
    assert found is not None
    mean, _ = found.predict(rng.uniform(0, 1, (500, 6)) * [1, 1, 0.8 * share, 1, 1, 1])
    assert np.abs(mean - 0.3).mean() < 0.03


def test_trees_that_agree_in_everything_still_doubt_a_little() -> None:
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.integers(0, 2, 200), rng.uniform(0, 1, 200)]).astype(float)
    found = fit_residual(x, 0.3 * x[:, 0])
    assert found is not None
    _, spread = found.predict(rng.uniform(0, 1, (200, 2)))
    assert spread.min() > 0
    assert spread.max() < 100


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e6])
def test_a_residual_survives_features_that_say_everything_or_nothing(scale: float) -> None:
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.uniform(-1, 1, 120) * scale, np.ones(120), rng.integers(0, 2, 120)])
    found = fit_residual(x, 0.5 * x[:, 2])
    assert found is not None
    mean, spread = found.predict(x)
    assert np.abs(mean - 0.5 * x[:, 2]).mean() < 0.05
    assert np.isfinite(spread).all()
