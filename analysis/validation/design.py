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
        # Grids have many equal values. Noise that is too small to reorder different values makes
        # the cut between equal ones random.
        column = standard[rows, widest] + 1e-9 * rng.random(len(rows))
        ordered, half = rows[np.argsort(column)], number // 2
        # Each side gets rows in proportion to the number to choose from it, and at least as many.
        cut = min(max(round(len(rows) * half / number), half), len(rows) - (number - half))
        boxes += [(ordered[:cut], half), (ordered[cut:], number - half)]
    return np.sort(np.array(chosen, dtype=np.intp))
