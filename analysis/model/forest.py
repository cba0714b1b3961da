"""Extremely randomised trees, in NumPy.

Every tree is grown from all rows. A node tries one random cut of each feature and keeps the one
that leaves the least squared error (Geurts, Ernst & Wehenkel, Extremely randomized trees, Machine
Learning 63, 2006; all features are tried at every node). A level of a tree is grown at once, so
that 64 trees of 2,048 rows take about a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kernels.estimate import Array

_CHUNK = 1024  # rows: their nodes in all trees stay in a cache
_UNSETTLED = 6  # levels above which hardly any row has come to a leaf


@dataclass(frozen=True)
class Forest:
    """Trees, one after another in arrays with one element a node.

    ``cut`` is infinite in a leaf, which is its own left child; a right child follows the left one.
    """

    roots: NDArray[np.intp]
    feature: NDArray[np.intp]
    cut: NDArray[np.float32]
    left: NDArray[np.intp]
    value: Array

    @classmethod
    def grown(cls, features: Array, values: Array, trees: int, leaf: int) -> Self:
        """Grow trees; equal rows grow equal ones.

        Args:
            features: one row a measurement.
            values: what is to be predicted of each.
            trees: how many.
            leaf: the least number of rows in a leaf.
        """
        rows, rng = features.astype(np.float32), np.random.default_rng(0)
        grown = [_grow(rows, values, leaf, rng) for _ in range(trees)]
        starts = np.cumsum([0, *(len(tree.value) for tree in grown)])
        return cls(
            roots=starts[:-1],
            feature=np.concatenate([tree.feature for tree in grown]),
            cut=np.concatenate([tree.cut for tree in grown]),
            left=np.concatenate([t.left + at for t, at in zip(grown, starts, strict=False)]),
            value=np.concatenate([tree.value for tree in grown]),
        )

    def predict(self, features: Array) -> tuple[Array, Array]:
        """For each row the mean of the trees' values, and their standard deviation."""
        rows = features.astype(np.float32)
        mean, apart = np.empty(len(rows)), np.empty(len(rows))
        for start in range(0, len(rows), _CHUNK):
            part = slice(start, start + _CHUNK)
            values = self.value[self._leaves(rows[part])]
            mean[part], apart[part] = values.mean(axis=0), values.std(axis=0)
        return mean, apart

    def _leaves(self, rows: NDArray[np.float32]) -> NDArray[np.intp]:
        """The leaf of every row (columns) in every tree (rows)."""
        count, width = rows.shape
        cells = rows.ravel()
        node = np.repeat(self.roots, count)
        row = np.tile(np.arange(count) * width, len(self.roots))
        leaves, open_, level = np.empty_like(node), np.arange(len(node)), 0
        while len(open_):
            right = cells.take(row + self.feature.take(node)) > self.cut.take(node)
            child = self.left.take(node) + right
            level += 1
            if level > _UNSETTLED:
                done = child == node
                leaves[open_[done]] = node[done]
                going = np.flatnonzero(~done)
                open_, child, row = open_[going], child[going], row[going]
            node = child
        return leaves.reshape(len(self.roots), count)


def _grow(rows: NDArray[np.float32], values: Array, leaf: int, rng: np.random.Generator) -> Forest:
    """One tree, level by level; ``order`` has the rows of the level's nodes one after another."""
    most = 2 * len(rows)
    feature, cut = np.zeros(most, dtype=np.intp), np.full(most, np.inf, dtype=np.float32)
    left, value = np.arange(most), np.full(most, values.mean())
    total, nodes = 1, np.zeros(1, dtype=np.intp)
    order, sizes = np.arange(len(rows)), np.array([len(rows)])
    while len(nodes):
        node = np.repeat(np.arange(len(nodes)), sizes)
        x, y, starts = rows[order], values[order], np.cumsum(sizes) - sizes
        low, high = np.minimum.reduceat(x, starts), np.maximum.reduceat(x, starts)
        tried = low + (high - low) * rng.random(low.shape, dtype=np.float32)
        right = x > tried[node]
        count = np.add.reduceat(right, starts, dtype=np.float64)
        own = np.add.reduceat(right * y[:, None], starts)
        rest, others = np.add.reduceat(y, starts)[:, None] - own, sizes[:, None] - count
        gain = own**2 / np.maximum(count, 1) + rest**2 / np.maximum(others, 1)
        gain[np.minimum(count, others) < leaf] = -np.inf
        chosen = gain.argmax(axis=1)
        at = (np.arange(len(nodes)), chosen)
        split = np.flatnonzero(np.isfinite(gain[at]))
        if not len(split):
            break
        feature[nodes[split]], cut[nodes[split]] = chosen[split], tried[at][split]
        child = total + 2 * np.arange(len(split))
        left[nodes[split]], total = child, total + 2 * len(split)
        pairs = [(others[at], count[at]), (rest[at], own[at])]
        sizes, sums = (np.column_stack([a[split], b[split]]).ravel() for a, b in pairs)
        sizes, nodes = sizes.astype(np.intp), np.column_stack([child, child + 1]).ravel()
        value[nodes] = sums / sizes
        # The rows of the nodes that were split, sorted into their children.
        place = np.full(len(gain), -1)
        place[split] = np.arange(len(split))
        below = 2 * place[node] + right[np.arange(len(order)), chosen[node]]
        order = order[np.argsort(below, kind="stable")][(below < 0).sum() :]
        large = sizes >= 2 * leaf
        order, nodes, sizes = order[np.repeat(large, sizes)], nodes[large], sizes[large]
    return Forest(np.zeros(1, np.intp), feature[:total], cut[:total], left[:total], value[:total])
