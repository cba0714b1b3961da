"""Extremely randomised trees, grown by scikit-learn, kept as two arrays and evaluated in NumPy.

Every tree is grown from all rows. A node tries one random cut of each feature, or of a random share
of the features, and keeps the cut that leaves the least squared error (Geurts, Ernst & Wehenkel,
Extremely randomized trees, Machine Learning 63, 2006). Importing scikit-learn takes longer than a
prediction, so code that only predicts never imports it.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kernels.common.errors import UserError
from kernels.common.program import command
from kernels.timemodel.estimate import Array

_CHUNK = 1024  # rows at a time, so that their nodes in all trees stay in a cache
_MANY_ROWS = 5000  # rows from which on growing takes seconds and is worth several cores
_MIN_DEPTH = 6  # the level down to which hardly any row has reached a leaf
_LEAF = -1  # value of ``feature`` in a leaf, which tests no feature
_MAX_FEATURES = 127  # the largest value of the signed byte that holds a feature's number


@dataclass(frozen=True)
class Forest:
    """Trees, stored one after another in arrays with one element per node.

    Nodes are in preorder: a node, its left subtree, its right subtree. Every inner node has two
    children, so ``feature``, which tells inner nodes from leaves, determines the shape of every
    tree.

    ``width`` is the number of features of a row. ``feature`` is the number of the feature that a
    node tests, −1 in a leaf. ``number`` is the cut above which a row goes right or, in a leaf, the
    value.
    """

    width: int
    feature: NDArray[np.int8]
    number: NDArray[np.float32]

    @classmethod
    def grown(
        cls, features: Array, values: Array, trees: int, leaf: int, share: float = 1.0
    ) -> Self:
        """Grow trees. The same rows always grow the same trees.

        Args:
            features: one row per measurement.
            values: the value to predict for each row.
            trees: number of trees.
            leaf: minimum number of rows in a leaf.
            share: share of the features that a node tries; every node draws its own.

        Raises:
            ValueError: if the rows have more than 127 features, or a feature that is not finite.
        """
        from sklearn.ensemble import ExtraTreesRegressor

        if features.ndim != 2 or features.shape[1] > _MAX_FEATURES:
            raise ValueError(
                f"features have the shape {features.shape}; trees grow from rows of at most "
                f"{_MAX_FEATURES} features"
            )
        # With few rows, handing work to other cores takes longer than growing the trees.
        cores = -1 if len(values) >= _MANY_ROWS else 1
        regressor = ExtraTreesRegressor(
            trees,
            min_samples_leaf=leaf,
            max_features=share,
            bootstrap=False,
            random_state=0,
            n_jobs=cores,
        )
        regressor.fit(features.astype(np.float32), values)
        grown = [_preorder_arrays(estimator.tree_) for estimator in regressor.estimators_]
        feature = np.concatenate([tree_feature for tree_feature, _ in grown])
        number = np.concatenate([tree_number for _, tree_number in grown])
        return cls(features.shape[1], feature, number)

    def scaled(self, factor: float) -> Self:
        """Return the same trees with the values of all leaves multiplied by a factor."""
        number = np.where(self.feature == _LEAF, self.number * np.float32(factor), self.number)
        return replace(self, number=number.astype(np.float32))

    def predict(self, features: Array) -> tuple[Array, Array]:
        """Return the mean and the standard deviation of the trees' values for each row.

        Raises:
            UserError: if the rows do not have as many features as those that the trees grew from.
        """
        if features.shape[1] != self.width:
            raise UserError(
                f"calibration.json is of another version. Run {command('analysis calibrate')} to "
                "write it again."
            )
        rows = features.astype(np.float32)
        mean, deviation = np.empty(len(rows)), np.empty(len(rows))
        for start in range(0, len(rows), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            values = self.number[self._leaves(rows[chunk])].astype(np.float64)
            mean[chunk] = values.mean(axis=0)
            deviation[chunk] = values.std(axis=0)
        return mean, deviation

    def _leaves(self, rows: NDArray[np.float32]) -> NDArray[np.intp]:
        """Return the leaf, as a node number, of every row (columns) in every tree (rows)."""
        count, width = rows.shape
        # 1. Start every pair of a tree and a row at the tree's root. A leaf tests feature 0, which
        #    is harmless, because both of its children are the leaf itself.
        cells, tested = rows.ravel(), np.maximum(self.feature, 0)
        node = np.repeat(self._roots, count)
        offset = np.tile(np.arange(count) * width, len(self._roots))  # of the pair's row in cells
        leaves = np.empty_like(node)
        active = np.arange(len(node))  # the pairs that are still moving
        depth = 0
        # 2. Move all pairs down one level at a time until each has arrived in a leaf.
        while len(active):
            right = cells.take(offset + tested.take(node)) > self.number.take(node)
            child = self._children.take(2 * node + right)
            depth += 1
            # On the first levels, dropping the pairs that have arrived costs more than it saves.
            if depth > _MIN_DEPTH:
                arrived = child == node
                leaves[active[arrived]] = node[arrived]
                moving = np.flatnonzero(~arrived)
                active, child, offset = active[moving], child[moving], offset[moving]
            node = child
        return leaves.reshape(len(self._roots), count)

    @cached_property
    def _open_subtrees(self) -> NDArray[np.intp]:
        """Number of announced subtrees not yet begun, before each node and after the last one.

        An inner node begins one subtree and announces two, which adds 1. A leaf begins one and
        announces none, which subtracts 1. A root is not announced, so each complete tree sums to
        −1, and the count before tree t (from 0) is −t.
        """
        steps = np.where(self.feature == _LEAF, -1, 1)
        return np.concatenate([[0], np.cumsum(steps)])

    @cached_property
    def _roots(self) -> NDArray[np.intp]:
        """First node of each tree, which is where the count reaches a new minimum."""
        before = self._open_subtrees[:-1]
        # Within a tree the count never falls below its value at the root. Only the leaf that ends
        # the tree takes it one lower, and the next root is the first node to see that.
        minimum = np.minimum.accumulate(before)
        return np.flatnonzero(np.diff(minimum, prepend=1) < 0)

    @cached_property
    def _children(self) -> NDArray[np.intp]:
        """Left and right child of each node, interleaved; a leaf is its own left and right child.

        The left child is the next node. An inner node raises the count by one and its left subtree
        lowers it by one, so the right child is the next node with the same count before it.
        """
        before = self._open_subtrees[:-1]
        # A stable sort by count keeps nodes of equal count in their order, so each node's successor
        # in it is the next node of the same count. Leaves get a wrong successor, which is not used.
        # NumPy sorts 16-bit integers by radix, which is faster than comparing them.
        short = np.abs(before).max(initial=0) <= np.iinfo(np.int16).max
        order = np.argsort(before.astype(np.int16) if short else before, kind="stable")
        right = np.empty_like(order)
        right[order[:-1]] = order[1:]
        node = np.arange(len(order))
        pairs = np.where(self.feature == _LEAF, node, [node + 1, right])
        return np.ascontiguousarray(pairs.T).ravel()

    def to_json(self) -> dict[str, Any]:
        """Return the document for calibration.json.

        The arrays are base64 of little-endian bytes, a fifth of the text that lists of numbers
        would take.
        """
        feature = self.feature.astype("i1").tobytes()
        number = self.number.astype("<f4").tobytes()
        return {
            "width": self.width,
            "feature": base64.b64encode(feature).decode(),
            "number": base64.b64encode(number).decode(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: if the arrays do not form trees. A recording may come from a stranger, so
                this is checked.
        """
        feature = np.frombuffer(base64.b64decode(data["feature"], validate=True), "i1")
        number = np.frombuffer(base64.b64decode(data["number"], validate=True), "<f4")
        forest = cls(data["width"], feature, number)
        if len(feature) != len(number) or not len(feature):
            raise ValueError("the trees' arrays are of different lengths, or empty")
        if feature.min() < _LEAF or feature.max() >= forest.width:
            raise ValueError("a tree looks at a feature that no row has")
        if not np.isfinite(number).all():
            raise ValueError("a tree has a cut or a value that is not a number")
        # Complete trees end on a new minimum of the count. In an incomplete one, an inner node
        # lacks its right child.
        if forest._open_subtrees[-1] >= forest._open_subtrees[:-1].min():
            raise ValueError("the last tree lacks a branch")
        return forest


def _preorder_arrays(tree: Any) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return the feature and the number of each node of a scikit-learn tree, in its preorder.

    The tree's cuts are float64 and the features float32. A cut rounded down to float32 separates
    the same rows, because no float32 lies between the two.
    """
    is_leaf = tree.children_left < 0
    cut = tree.threshold.astype(np.float32)
    cut = np.where(cut > tree.threshold, np.nextafter(cut, np.float32(-np.inf)), cut)
    feature = np.where(is_leaf, _LEAF, tree.feature).astype(np.int8)
    return feature, np.where(is_leaf, tree.value[:, 0, 0], cut).astype(np.float32)
