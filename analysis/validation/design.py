"""Choose rows to measure, or to calibrate on, before any time is known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernels.timemodel.estimate import Array


def choose_rows(features: Array, count: int, seed: int = 0) -> NDArray[np.intp]:
    """Choose ``count`` rows that are spread evenly over the space of their features.

    The space is cut in two again and again, and one row is taken from each box. A cut divides the
    feature with the largest spread in its box, at a quantile, so that every final box has about the
    same number of rows.

    Args:
        features: one row per candidate; each column is divided by its standard deviation.
        count: number of rows to choose; all of them if there are fewer.
        seed: seed that breaks ties and picks the row of a box.

    Returns:
        Positions of the chosen rows, in ascending order.
    """
    rng = np.random.default_rng(seed)
    # The tiny constant keeps a column of equal values from being divided by zero.
    standardised = (features - features.mean(axis=0)) / (features.std(axis=0) + 1e-12)
    all_rows = np.arange(len(standardised))
    boxes = [(all_rows, min(count, len(all_rows)))]  # rows, and how many of them to choose
    chosen = []
    while boxes:
        rows, to_choose = boxes.pop()
        if to_choose == 1:
            chosen.append(rng.choice(rows))
            continue
        widest = int(np.argmax(standardised[rows].std(axis=0)))
        # Grids have many equal values. Noise that is too small to reorder different values makes
        # the cut between equal ones random.
        column = standardised[rows, widest] + 1e-9 * rng.random(len(rows))
        ordered = rows[np.argsort(column)]
        # Each side gets rows in proportion to the number to choose from it, and at least as many.
        left_share = to_choose // 2
        right_share = to_choose - left_share
        cut = round(len(rows) * left_share / to_choose)
        cut = min(max(cut, left_share), len(rows) - right_share)
        boxes += [(ordered[:cut], left_share), (ordered[cut:], right_share)]
    return np.sort(np.array(chosen, dtype=np.intp))
