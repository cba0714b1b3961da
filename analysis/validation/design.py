"""Choose cases to calibrate on, without looking at their measured times."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernels.timemodel.estimate import Array


def choose_rows(features: Array, count: int, seed: int = 0) -> NDArray[np.intp]:
    """Choose ``count`` candidates whose features are distributed like those of all candidates.

    The features are standardised, and their space is divided into boxes by repeated cuts. One
    candidate is drawn from each final box. A cut divides a box along the standardised feature that
    has the largest standard deviation in that box. The cut is at a quantile, so that all final
    boxes have about the same number of candidates.

    Args:
        features: array of shape (candidates, features), with at least one candidate.
        count: number of candidates to choose, at least 1. If fewer exist, all are chosen.
        seed: random seed.

    Returns:
        Positions of the chosen candidates, in ascending order.
    """
    rng = np.random.default_rng(seed)
    # The tiny constant prevents a division by zero for a feature that is the same everywhere.
    standardised = (features - features.mean(axis=0)) / (features.std(axis=0) + 1e-12)
    all_rows = np.arange(len(standardised))
    # A box is the positions of its candidates, and how many of them to choose.
    boxes = [(all_rows, min(count, len(all_rows)))]
    chosen = []
    while boxes:
        rows, to_choose = boxes.pop()
        if to_choose == 1:
            chosen.append(rng.choice(rows))
            continue
        widest = int(np.argmax(standardised[rows].std(axis=0)))
        # Candidates from a grid of sizes often share a value. A little noise orders equal values at
        # random, so that the cut can separate them. The noise is too small to reorder different
        # values.
        column = standardised[rows, widest] + 1e-9 * rng.random(len(rows))
        ordered = rows[np.argsort(column)]
        # Each side gets candidates in proportion to the number to choose from it, but never fewer
        # than that number.
        left_count = to_choose // 2
        right_count = to_choose - left_count
        cut = round(len(rows) * left_count / to_choose)
        cut = min(max(cut, left_count), len(rows) - right_count)
        boxes += [(ordered[:cut], left_count), (ordered[cut:], right_count)]
    return np.sort(np.array(chosen, dtype=np.intp))
