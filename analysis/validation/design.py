"""Which rows to measure, or to calibrate on, before any time is known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernels.estimate import Array


def choose_rows(features: Array, count: int, seed: int = 0) -> NDArray[np.intp]:
    """``count`` rows spread evenly: the space is halved again and again, a row taken of each box.

    Each cut goes through the feature that spreads most in its box, so that every box holds the
    same number of rows.

    Args:
        features: one row a candidate; each column counts by its standard deviation.
        count: how many rows to choose, at most as many as there are.
        seed: breaks ties and picks the row of a box.
    """
    rng = np.random.default_rng(seed)
    standard = (features - features.mean(axis=0)) / (features.std(axis=0) + 1e-12)
    boxes = [(np.arange(len(standard)), min(count, len(standard)))]
    chosen = []
    while boxes:
        rows, wanted = boxes.pop()
        if wanted == 1:
            chosen.append(rng.choice(rows))
            continue
        widest = int(np.argmax(standard[rows].std(axis=0)))
        column = standard[rows, widest] + 1e-9 * rng.random(len(rows))
        ordered, half = rows[np.argsort(column)], wanted // 2
        cut = min(max(round(len(rows) * half / wanted), half), len(rows) - (wanted - half))
        boxes += [(ordered[:cut], half), (ordered[cut:], wanted - half)]
    return np.sort(np.array(chosen, dtype=np.intp))
