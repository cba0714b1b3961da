"""Which rows to measure, or to calibrate on, before any time is known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernels.timemodel.estimate import Array


def choose_rows(features: Array, count: int, seed: int = 0) -> NDArray[np.intp]:
    """``count`` rows spread evenly: space is cut in two again and again, one row taken per box.

    Each cut divides the feature that spreads most in its box, at a quantile, so that every final
    box holds about the same number of rows.

    Args:
        features: one row per candidate; each column is divided by its standard deviation.
        count: how many rows to choose; all if there are fewer.
        seed: breaks ties and picks the row of a box.
    """
    rng = np.random.default_rng(seed)
    standard = (features - features.mean(axis=0)) / (features.std(axis=0) + 1e-12)
    boxes = [(np.arange(len(standard)), min(count, len(standard)))]  # rows, how many to choose
    chosen = []
    while boxes:
        rows, number = boxes.pop()
        if number == 1:
            chosen.append(rng.choice(rows))
            continue
        widest = int(np.argmax(standard[rows].std(axis=0)))
        # Grids have many equal values: noise too small to reorder others cuts among them by chance.
        column = standard[rows, widest] + 1e-9 * rng.random(len(rows))
        ordered, half = rows[np.argsort(column)], number // 2
        # Rows in proportion to what is to be chosen of them, but on each side at least that many.
        cut = min(max(round(len(rows) * half / number), half), len(rows) - (number - half))
        boxes += [(ordered[:cut], half), (ordered[cut:], number - half)]
    return np.sort(np.array(chosen, dtype=np.intp))
