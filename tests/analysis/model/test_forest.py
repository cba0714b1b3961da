from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import ExtraTreesRegressor

from analysis.model.forest import Forest
from kernels.common.errors import UserError

ROOT = Path(__file__).resolve().parents[3]


def _small(seed: int = 0, trees: int = 4) -> Forest:
    rng = np.random.default_rng(seed)
    return Forest.grown(rng.uniform(-1, 1, (100, 3)), rng.standard_normal(100), trees, leaf_rows=2)


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
    forest = Forest.grown(x, y, trees=3, leaf_rows=leaf)
    for leaves in forest._leaves(x.astype(np.float32)):
        assert (forest.feature[leaves] == -1).all()
        for node in np.unique(leaves):
            own = y[leaves == node]
            assert len(own) >= min(leaf, n)
            assert forest.number[node] == pytest.approx(own.mean(), abs=1e-6)


@settings(deadline=None, max_examples=30)
@given(n=st.integers(2, 300), trees=st.integers(1, 9), seed=st.integers(0, 99))
def test_every_row_is_predicted_as_by_scikit_learn(n: int, trees: int, seed: int) -> None:
    """Rows next to a threshold are included: it is stored as float32, not float64."""
    rng = np.random.default_rng(seed)
    x, y = rng.uniform(-1, 1, (n, 4)), rng.standard_normal(n)
    forest = Forest.grown(x, y, trees, leaf_rows=2)
    theirs = ExtraTreesRegressor(trees, min_samples_leaf=2, random_state=0).fit(
        x.astype(np.float32), y
    )
    asked = rng.uniform(-2, 2, (1500, 4)).astype(np.float32)  # more than one chunk of rows
    cuts = forest.number[forest.feature >= 0]
    if len(cuts):
        beside = rng.choice(cuts, (500, 4))
        asked[:500] = np.nextafter(beside, rng.choice([-np.inf, np.inf], (500, 4)), dtype="f4")
        asked[250:500] = beside[250:]
    mean, apart = forest.predict(asked.astype(np.float64))
    alone = np.array([tree.predict(asked) for tree in theirs.estimators_])
    assert mean == pytest.approx(alone.mean(axis=0), abs=1e-6)
    assert apart == pytest.approx(alone.std(axis=0), abs=1e-6)


def test_a_step_is_found_among_features_that_say_nothing() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (500, 10))
    step = np.where(x[:, 3] > 0.2, 1.0, 0.0)
    mean, _ = Forest.grown(x[:300], step[:300], trees=64, leaf_rows=2).predict(x[300:])
    assert np.abs(mean - step[300:]).mean() < 0.05


def test_rows_alike_stay_together_and_growing_again_gives_the_same() -> None:
    x, y = np.ones((6, 2)), np.arange(6.0)
    forest = Forest.grown(x, y, trees=2, leaf_rows=1)
    assert forest.number.tolist() == [2.5, 2.5]
    assert _small().number.tolist() == _small().number.tolist()


def test_all_cores_grow_the_trees_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = _small(trees=16)
    monkeypatch.setattr("analysis.model.forest._MANY_ROWS", 1)
    together = _small(trees=16)
    assert together.feature.tolist() == alone.feature.tolist()
    assert together.number.tolist() == alone.number.tolist()


def test_trees_survive_json() -> None:
    forest, asked = _small(), np.random.default_rng(1).uniform(-1, 1, (50, 3))
    again = Forest.from_json(json.loads(json.dumps(forest.to_json())))
    assert again.feature.tolist() == forest.feature.tolist()
    assert again.number.tolist() == forest.number.tolist()
    for one, other in zip(again.predict(asked), forest.predict(asked), strict=True):
        assert one.tolist() == other.tolist()


def _text(values: list[float], kind: str) -> str:
    return base64.b64encode(np.array(values, dtype=kind).tobytes()).decode()


def _written(feature: list[float], number: list[float], width: object = 3) -> dict[str, object]:
    return {"width": width, "feature": _text(feature, "i1"), "number": _text(number, "<f4")}


def test_what_is_written_is_a_node_before_its_left_and_that_before_its_right_subtree() -> None:
    # The first tree has three leaves, and the second one is a single leaf.
    forest = Forest.from_json(_written([2, 0, -1, -1, -1, -1], [0.5, -1, 10, 20, 30, 50]))
    mean, apart = forest.predict(np.array([[-2.0, 0, 0], [0, 0, 0.5], [0, 0, 1]]))
    assert mean.tolist() == [30, 35, 40]
    assert apart.tolist() == [20, 15, 10]


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        _written([], []),
        _written([0, -1, -1], [0.5, 1]),  # a number is missing
        _written([0, -1], [0.5, 1]),  # a subtree is missing
        _written([0, 0, 0], [0.5, 1, 2]),  # there is no leaf
        _written([-1, 0, -1], [0.5, 1, 2]),
        _written([3, -1, -1], [0.5, 1, 2]),  # no such feature
        _written([-2, -1, -1], [0.5, 1, 2]),
        _written([0, -1, -1], [0.5, np.nan, 2]),
        _written([0, -1, -1], [np.inf, 1, 2]),
        _written([0, -1, -1], [0.5, 1, 2], width="3"),
        _written([0, -1, -1], [0.5, 1, 2], width=None),
        _written([0, -1, -1], [0.5, 1, 2], width=3.5),
        {**_written([0, -1, -1], [0.5, 1, 2]), "number": "AAAAAAA="},  # not a multiple of 4 bytes
        {**_written([0, -1, -1], [0.5, 1, 2]), "number": "Ä"},
        {**_written([0, -1, -1], [0.5, 1, 2]), "feature": [0, -1, -1]},
    ],
)
def test_what_are_no_trees_is_refused(damaged: dict[str, object]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        Forest.from_json(damaged)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(-1, 2), min_size=1, max_size=25))
def test_whatever_is_read_can_be_asked_and_every_walk_ends_in_a_leaf(feature: list[float]) -> None:
    try:
        forest = Forest.from_json(_written(feature, list(range(len(feature)))))
    except ValueError:
        return
    leaves = forest._leaves(np.random.default_rng(0).uniform(-5, 30, (20, 3)).astype(np.float32))
    assert (forest.feature[leaves] == -1).all()
    assert len(leaves) == (forest.feature == -1).sum() - (forest.feature >= 0).sum()
    # Each node except the roots is the child of exactly one node, which comes before it.
    inner = np.flatnonzero(forest.feature >= 0)
    pairs = forest._children.reshape(-1, 2)[inner]
    assert (pairs > inner[:, None]).all()
    everything = [*pairs.ravel().tolist(), *forest._roots.tolist()]
    assert sorted(everything) == list(range(len(feature)))


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_trees_do_not_grow_from_what_is_no_number(number: float) -> None:
    features = np.random.default_rng(0).normal(size=(20, 2))
    features[3, 1] = number
    with pytest.raises(ValueError, match="is NaN or infinite"):
        Forest.grown(features, features[:, 0], trees=2, leaf_rows=1)
    with pytest.raises(ValueError, match="is NaN or infinite"):
        Forest.grown(features[:3], features[1:4, 1], trees=2, leaf_rows=1)


def test_trees_need_rows_and_a_value_for_each() -> None:
    for rows, values in ((0, 0), (3, 2)):
        with pytest.raises(ValueError, match="equally many rows"):
            Forest.grown(np.zeros((rows, 2)), np.zeros(values), trees=2, leaf_rows=1)


@pytest.mark.parametrize("rows", [50, 6000])
def test_trees_are_those_of_scikit_learns_ensemble(rows: int) -> None:
    """With few rows they are grown by one thread, and with many rows by several."""
    rng = np.random.default_rng(1)
    features, values = rng.normal(size=(rows, 5)), rng.normal(size=rows)
    regressor = ExtraTreesRegressor(4, min_samples_leaf=3, max_features=0.5, random_state=0)
    regressor.fit(features.astype(np.float32), values)
    mean, _ = Forest.grown(features, values, 4, 3, 0.5).predict(features)
    assert mean == pytest.approx(regressor.predict(features.astype(np.float32)), abs=1e-6)


def test_trees_of_other_features_are_a_sentence() -> None:
    with pytest.raises(UserError, match="python -m analysis calibrate"):
        _small().predict(np.zeros((1, 4)))


def test_asking_trees_imports_nothing_that_grows_them() -> None:
    code = (
        "import json, sys, numpy, analysis.__main__; from analysis.model.forest import Forest\n"
        "print(Forest.from_json(json.load(sys.stdin)).predict(numpy.zeros((1, 3)))[0])\n"
        "assert not {'sklearn', 'scipy.stats'} & {*sys.modules}"
    )
    subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, input=json.dumps(_small().to_json()), text=True,
        check=True,
    )  # fmt: skip
