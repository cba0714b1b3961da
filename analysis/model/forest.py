"""Extremely randomised trees: grown by scikit-learn, kept as two arrays, asked in NumPy.

Every tree is grown from all rows. A node tries one random cut of each feature and keeps the one
that leaves the least squared error (Geurts, Ernst & Wehenkel, Extremely randomized trees, Machine
Learning 63, 2006; all features are tried at every node). Importing scikit-learn takes longer than
answering a question, so what only asks never does.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kernels.errors import UserError
from kernels.estimate import Array

_CHUNK = 1024  # rows: their nodes in all trees stay in a cache
_UNSETTLED = 6  # levels above which hardly any row has come to a leaf
_LEAF = -1  # in place of a feature
_WIDEST = 127  # features: the largest number of one byte


@dataclass(frozen=True)
class Forest:
    """Trees, one after another in arrays with one element a node.

    A node stands before its left subtree, and that before its right one, so that the features alone
    say which nodes are whose children.

    ``width`` is how many features a row has. ``feature`` is the one that a node looks at, −1 in a
    leaf. ``number`` is the cut above which a row goes right; in a leaf, the value.
    """

    width: int
    feature: NDArray[np.int8]
    number: NDArray[np.float32]

    @classmethod
    def grown(cls, features: Array, values: Array, trees: int, leaf: int) -> Self:
        """Grow trees; equal rows grow equal ones.

        Args:
            features: one row a measurement.
            values: what is to be predicted of each.
            trees: how many.
            leaf: the least number of rows in a leaf.

        Raises:
            ValueError: these are no rows of at most 127 finite features.
        """
        from sklearn.ensemble import ExtraTreesRegressor

        if features.ndim != 2 or features.shape[1] > _WIDEST:
            raise ValueError(f"trees grow from rows of up to {_WIDEST} features")
        regressor = ExtraTreesRegressor(
            trees, min_samples_leaf=leaf, max_features=1.0, bootstrap=False, random_state=0
        )
        regressor.fit(features.astype(np.float32), values)
        grown = [_in_order(estimator.tree_) for estimator in regressor.estimators_]
        feature, number = (np.concatenate(parts) for parts in zip(*grown, strict=True))
        return cls(features.shape[1], feature, number)

    def predict(self, features: Array) -> tuple[Array, Array]:
        """For each row the mean of the trees' values, and their standard deviation.

        Raises:
            UserError: the rows have other features than those that the trees grew from.
        """
        if features.shape[1] != self.width:
            raise UserError(
                "calibration.json is of another version; `python -m analysis calibrate` writes it "
                "again."
            )
        rows = features.astype(np.float32)
        mean, apart = np.empty(len(rows)), np.empty(len(rows))
        for start in range(0, len(rows), _CHUNK):
            part = slice(start, start + _CHUNK)
            values = self.number[self._leaves(rows[part])].astype(np.float64)
            mean[part], apart[part] = values.mean(axis=0), values.std(axis=0)
        return mean, apart

    def _leaves(self, rows: NDArray[np.float32]) -> NDArray[np.intp]:
        """The leaf of every row (columns) in every tree (rows)."""
        count, width = rows.shape
        cells, tried = rows.ravel(), np.maximum(self.feature, 0)
        node = np.repeat(self._roots, count)
        row = np.tile(np.arange(count) * width, len(self._roots))
        leaves, open_, level = np.empty_like(node), np.arange(len(node)), 0
        while len(open_):
            right = cells.take(row + tried.take(node)) > self.number.take(node)
            child = self._children.take(2 * node + right)
            level += 1
            if level > _UNSETTLED:
                done = child == node
                leaves[open_[done]] = node[done]
                going = np.flatnonzero(~done)
                open_, child, row = open_[going], child[going], row[going]
            node = child
        return leaves.reshape(len(self._roots), count)

    @cached_property
    def _lacking(self) -> NDArray[np.intp]:
        """How many subtrees are still to come before each node, and after the last one.

        A node with a cut takes the place of one subtree and calls for two; a leaf ends one. A tree
        that begins is not called for: every tree leaves one fewer than the one before it.
        """
        steps = np.where(self.feature == _LEAF, -1, 1)
        return np.concatenate([[0], np.cumsum(steps)])

    @cached_property
    def _roots(self) -> NDArray[np.intp]:
        """Where a tree begins: as few are lacking as never before."""
        before = self._lacking[:-1]
        least = np.minimum.accumulate(before)
        return np.flatnonzero(np.diff(least, prepend=1) < 0)

    @cached_property
    def _children(self) -> NDArray[np.intp]:
        """The left and the right child of each node, in turn; a leaf is its own children.

        The left one is the next node. When its subtree has ended, as many are lacking as before
        the node, for the first time since: there the right one begins.
        """
        before = self._lacking[:-1]
        order = np.argsort(before, kind="stable")
        right = np.empty_like(order)
        right[order[:-1]] = order[1:]
        own = np.arange(len(order))
        pairs = np.where(self.feature == _LEAF, own, [own + 1, right])
        return np.ascontiguousarray(pairs.T).ravel()

    def to_json(self) -> dict[str, Any]:
        """For calibration.json: numbers as base64 of little-endian bytes, a fifth of the text."""
        feature, number = self.feature.astype("i1"), self.number.astype("<f4")
        texts = (base64.b64encode(part.tobytes()).decode() for part in (feature, number))
        return {"width": self.width, **dict(zip(("feature", "number"), texts, strict=True))}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: these are no trees. Recordings come from strangers.
        """
        feature, number = (
            np.frombuffer(base64.b64decode(data[name], validate=True), kind)
            for name, kind in (("feature", "i1"), ("number", "<f4"))
        )
        forest = cls(data["width"], feature, number)
        if len(feature) != len(number) or not len(feature):
            raise ValueError("the trees' arrays are of different lengths, or empty")
        if feature.min() < _LEAF or feature.max() >= forest.width:
            raise ValueError("a tree looks at a feature that no row has")
        if not np.isfinite(number).all():
            raise ValueError("a tree has a cut or a value that is no number")
        if forest._lacking[-1] >= forest._lacking[:-1].min():
            raise ValueError("the last tree lacks a branch")
        return forest


def _in_order(tree: Any) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Feature and number of the nodes of scikit-learn's tree, which are in a forest's order.

    Its cuts are doubles between rows that are singles: rounded down, they part the same rows.
    """
    leaf = tree.children_left < 0
    cut = tree.threshold.astype(np.float32)
    cut = np.where(cut > tree.threshold, np.nextafter(cut, np.float32(-np.inf)), cut)
    feature = np.where(leaf, _LEAF, tree.feature).astype(np.int8)
    return feature, np.where(leaf, tree.value[:, 0, 0], cut).astype(np.float32)
