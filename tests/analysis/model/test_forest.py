from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.model.forest import Forest


def _depth_first(forest: Forest, row: np.ndarray, root: int) -> float:
    """The value of a row in one tree, one comparison after another."""
    node = root
    while np.isfinite(forest.cut[node]):
        node = forest.left[node] + int(np.float32(row[forest.feature[node]]) > forest.cut[node])
    return float(forest.value[node])


@settings(deadline=None, max_examples=30)
@given(
    n=st.integers(2, 70),
    width=st.integers(1, 5),
    leaf=st.integers(1, 4),
    levels=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_a_leaf_has_the_mean_of_its_rows_and_enough_of_them(
    n: int, width: int, leaf: int, levels: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, levels, (n, width)).astype(float), rng.standard_normal(n)
    forest = Forest.grown(x, y, trees=3, leaf=leaf)
    for leaves in forest._leaves(x.astype(np.float32)):
        for node in np.unique(leaves):
            own = y[leaves == node]
            assert len(own) >= min(leaf, n)
            assert forest.value[node] == pytest.approx(own.mean())
    assert not np.isfinite(forest.cut[np.unique(forest._leaves(x.astype(np.float32)))]).any()


def test_many_rows_at_once_go_the_way_of_each_alone() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (400, 6))
    forest = Forest.grown(x, x[:, 0] * x[:, 1], trees=5, leaf=2)
    asked = rng.uniform(-2, 2, (1500, 6))  # more than are looked up at once
    mean, apart = forest.predict(asked)
    for i in range(0, 1500, 97):
        alone = [_depth_first(forest, asked[i], root) for root in forest.roots]
        assert mean[i] == pytest.approx(np.mean(alone))
        assert apart[i] == pytest.approx(np.std(alone))


def test_a_step_is_found_among_features_that_say_nothing() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (500, 10))
    step = np.where(x[:, 3] > 0.2, 1.0, 0.0)
    mean, _ = Forest.grown(x[:300], step[:300], trees=64, leaf=2).predict(x[300:])
    assert np.abs(mean - step[300:]).mean() < 0.05


def test_rows_alike_stay_together_and_growing_again_gives_the_same() -> None:
    x, y = np.ones((6, 2)), np.arange(6.0)
    forest = Forest.grown(x, y, trees=2, leaf=1)
    assert forest.value.tolist() == [2.5, 2.5]
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-1, 1, (100, 3)), rng.standard_normal(100)
    one, other = (Forest.grown(x, y, trees=4, leaf=2) for _ in range(2))
    assert one.cut.tolist() == other.cut.tolist()
