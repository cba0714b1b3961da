"""Extremely randomised trees: grown by scikit-learn, stored in two arrays, evaluated by NumPy.

Every tree is grown from all training rows. A node tries one random threshold for each feature, or
for each feature in a random subset, and keeps the threshold that leaves the smallest squared error.
The method is described in Geurts, Ernst & Wehenkel, Extremely randomized trees, Machine Learning
63, 2006. Importing scikit-learn takes longer than a prediction, so it is only imported to grow
trees.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kernels.common.documents import COUNT, misfit
from kernels.common.errors import UserError
from kernels.common.program import command
from kernels.machine import usable_processors
from kernels.timemodel.estimate import Array

_CHUNK = 1024  # Rows to predict at a time, so that their nodes in all trees stay in a CPU cache.
_MANY_ROWS = 5000  # From this number of rows on, growing takes seconds and uses several cores.
_MIN_DEPTH = 6  # Number of levels below the root on which hardly any row reaches a leaf.
_LEAF = -1  # Value of ``feature`` in a leaf, which tests no feature.
_MAX_FEATURES = 127  # Largest value of the signed byte that stores a feature's number.


@dataclass(frozen=True)
class Forest:
    """Trees, stored one after another in arrays with one element per node.

    Nodes are in preorder: a node, its left subtree, its right subtree. No pointers to children are
    stored. Every inner node has two children, so it is enough to know which nodes are leaves.

    Attributes:
        width: number of features in a row of inputs.
        feature: number of the feature that each node tests; −1 in a leaf.
        number: for an inner node, the threshold above which a row goes right; for a leaf, the
            predicted value.
    """

    width: int
    feature: NDArray[np.int8]
    number: NDArray[np.float32]

    @classmethod
    def grown(
        cls,
        features: Array,
        values: Array,
        trees: int,
        leaf_rows: int,
        share_of_features: float = 1.0,
    ) -> Self:
        """Grow trees from rows of features. The same arguments always give the same trees.

        Args:
            features: array of shape (rows, features).
            values: value to predict for each row.
            trees: number of trees.
            leaf_rows: smallest number of rows in a leaf.
            share_of_features: fraction of the features that a node tries. Each node chooses these
                features at random.

        Raises:
            ValueError: if ``features`` has another shape or more than 127 columns, or if the arrays
                are empty, have different lengths, or contain NaN or infinity.
            ModuleNotFoundError: if scikit-learn is not installed.
        """
        from sklearn import config_context
        from sklearn.tree import ExtraTreeRegressor

        if features.ndim != 2 or not 1 <= features.shape[1] <= _MAX_FEATURES:
            raise ValueError(
                f"features have the shape {features.shape}; the shape must be (rows, features), "
                f"with 1 to {_MAX_FEATURES} features"
            )
        if not len(values) or len(features) != len(values):
            raise ValueError("features and values must have equally many rows, at least one")
        inputs = features.astype(np.float32)
        targets = values.astype(np.float64).reshape(-1, 1)
        # scikit-learn takes NaN for a missing value, which predict() does not support.
        if not (np.isfinite(inputs).all() and np.isfinite(targets).all()):
            raise ValueError("a feature or a value is NaN or infinite; all must be finite")

        # scikit-learn's ensemble gives the same trees, but with few rows it takes longer to check
        # its arguments for each tree than to grow the tree.
        def grow(seed: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
            with config_context(skip_parameter_validation=True):
                tree = ExtraTreeRegressor(
                    min_samples_leaf=leaf_rows, max_features=share_of_features, random_state=seed
                )
                tree.fit(inputs, targets, check_input=False)
            return _preorder_arrays(tree.tree_)

        seeds = np.random.RandomState(0).randint(np.iinfo(np.int32).max, size=trees)
        # For few rows, distributing the work to several cores takes longer than growing the trees.
        threads = usable_processors() if len(values) >= _MANY_ROWS else 1
        with ThreadPoolExecutor(threads) as executor:
            grown = list(executor.map(grow, seeds))
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
            UserError: if the rows do not have ``width`` features.
        """
        if features.shape[1] != self.width:
            raise UserError(
                "calibration.json was written by another version of Rooftile. Run "
                f"{command('analysis calibrate')} with the same --machine to write it again."
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
        """Return the position of the leaf that each row reaches in each tree.

        The result has the shape (trees, rows).
        """
        count, width = rows.shape
        # 1. Start every pair of a tree and a row at the tree's root. A leaf tests feature 0 instead
        #    of none. The result does not matter, because both of its children are the leaf itself.
        cells = rows.ravel()
        tested = np.maximum(self.feature, 0)
        node = np.repeat(self._roots, count)
        offset = np.tile(np.arange(count) * width, len(self._roots))  # start of a row in cells
        leaves = np.empty_like(node)
        active = np.arange(len(node))  # positions of the pairs that are not yet in a leaf
        depth = 0
        # 2. Move all pairs down, one level at a time, until each has reached a leaf.
        while len(active):
            right = cells.take(offset + tested.take(node)) > self.number.take(node)
            child = self._children.take(2 * node + right)
            depth += 1
            # On the first levels, removing the few pairs in leaves takes longer than moving them.
            if depth > _MIN_DEPTH:
                arrived = child == node
                leaves[active[arrived]] = node[arrived]
                moving = np.flatnonzero(~arrived)
                active, child, offset = active[moving], child[moving], offset[moving]
            node = child
        return leaves.reshape(len(self._roots), count)

    @cached_property
    def _open_subtrees(self) -> NDArray[np.intp]:
        """Number of announced subtrees that have not begun, before each node and at the end.

        Each node begins a subtree, which lowers the count by 1. An inner node also announces two
        subtrees, those of its children, so the count changes by +1 at an inner node and by −1 at a
        leaf. The root of a tree lowers the count, too, although no node announces the root. A
        complete tree therefore changes the count by −1 in total.
        """
        steps = np.where(self.feature == _LEAF, -1, 1)
        return np.concatenate([[0], np.cumsum(steps)])

    @cached_property
    def _roots(self) -> NDArray[np.intp]:
        """Position of each tree's root."""
        before = self._open_subtrees[:-1]
        # Within a tree, the count before a node is never below the count before the root. The last
        # leaf of the tree makes the count one lower than before the root. The next root is
        # therefore the first node with a lower count.
        minimum = np.minimum.accumulate(before)
        # The count before the first root is 0. The 1 in front of it marks this root, too.
        return np.flatnonzero(np.diff(minimum, prepend=1) < 0)

    @cached_property
    def _children(self) -> NDArray[np.intp]:
        """Positions of each node's two children, interleaved; for a leaf, its position twice.

        The left child is the next node. An inner node raises the count of :attr:`_open_subtrees` by
        one, and its left subtree lowers the count by one. The right child is therefore the next
        node before which the count is the same as before the inner node.
        """
        before = self._open_subtrees[:-1]
        # A stable sort by count leaves nodes of equal count in their original order. The next node
        # in the sorted order is then the right child. Leaves get a wrong one, which is not used.
        # NumPy sorts 16-bit integers by radix sort, which is faster than a comparison sort.
        fits_16_bits = np.abs(before).max(initial=0) <= np.iinfo(np.int16).max
        order = np.argsort(before.astype(np.int16) if fits_16_bits else before, kind="stable")
        right = np.empty_like(order)
        right[order[:-1]] = order[1:]
        node = np.arange(len(order))
        pairs = np.where(self.feature == _LEAF, node, [node + 1, right])
        return np.ascontiguousarray(pairs.T).ravel()

    def to_json(self) -> dict[str, Any]:
        """Return the trees as a JSON document.

        The arrays are stored as little-endian bytes in base64, which takes less space than JSON
        numbers.
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
            ValueError: if the document does not describe trees. A recording may come from an
                untrusted source, so the document is checked.
        """
        if fault := misfit(data, {"width": COUNT, "feature": str, "number": str}):
            raise ValueError(fault)
        feature = np.frombuffer(base64.b64decode(data["feature"], validate=True), "i1")
        number = np.frombuffer(base64.b64decode(data["number"], validate=True), "<f4")
        forest = cls(data["width"], feature, number)
        if len(feature) != len(number) or not len(feature):
            raise ValueError("the arrays of the trees have different lengths or are empty")
        if feature.min() < _LEAF or feature.max() >= forest.width:
            raise ValueError("a tree tests a feature whose number is out of range")
        if not np.isfinite(number).all():
            raise ValueError("a threshold or a value of a tree is not a finite number")
        # After a complete tree, the count is lower than before any of its nodes. Otherwise an inner
        # node of the last tree lacks a child.
        if forest._open_subtrees[-1] >= forest._open_subtrees[:-1].min():
            raise ValueError("the last tree is incomplete: a node lacks a child")
        return forest


def _preorder_arrays(tree: Any) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return ``feature`` and ``number`` of each node of a scikit-learn tree, in preorder.

    scikit-learn stores its nodes in preorder, too. Its thresholds are float64, and the features are
    float32. A threshold is rounded down to float32 and still separates the same rows, because no
    other float32 lies between the original and the rounded threshold.
    """
    is_leaf = tree.children_left < 0
    threshold = tree.threshold.astype(np.float32)
    is_above = threshold > tree.threshold
    threshold = np.where(is_above, np.nextafter(threshold, np.float32(-np.inf)), threshold)
    feature = np.where(is_leaf, _LEAF, tree.feature).astype(np.int8)
    return feature, np.where(is_leaf, tree.value[:, 0, 0], threshold).astype(np.float32)
