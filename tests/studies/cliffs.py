"""Whether one more row costs what it is predicted to cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from analysis.imports.public import PublicRows
from kernels.problem import Gemm
from kernels.timemodel.estimate import Array

_MIN_FLOPS = 1e10  # in smaller products the launch hides the steps
_STEP, _SMALL_STEP = 0.10, 0.05


def cliffs(tested: PublicRows, predicted: Array) -> dict[str, Any]:
    """Whether one more row costs what it is predicted to cost, over pairs M, M + 1.

    Pairs of more than 1e10 FLOP, both held back. ``recall``: of the real steps over 10 %, the
    share predicted over 5 %. ``precision``: of those predicted over 5 %, the share really over
    5 %. ``recall_down``: of the real steps below −5 %, the share predicted below −5 %.
    """
    place = {p: i for i, p in enumerate(tested.problems) if isinstance(p, Gemm)}
    pairs = [
        (i, place[replace(p, m=p.m + 1)])
        for p, i in place.items()
        if p.flops > _MIN_FLOPS and replace(p, m=p.m + 1) in place
    ]
    empty = {"recall": None, "precision": None, "rank_correlation": None, "recall_down": None}
    if not pairs:
        return {"pairs": 0, **empty}
    before, after = np.array(pairs).T
    real = tested.seconds[after] / tested.seconds[before] - 1
    step = predicted[after] / predicted[before] - 1
    up, predicted_up, down = real > _STEP, step > _SMALL_STEP, real < -_SMALL_STEP
    rank = spearmanr(real, step).statistic if len(pairs) > 2 else np.nan
    return {
        "pairs": len(pairs),
        "recall": _share(predicted_up, up),
        "precision": _share(real > _SMALL_STEP, predicted_up),
        "rank_correlation": None if np.isnan(rank) else float(rank),
        "recall_down": _share(step < -_SMALL_STEP, down),
    }


def _share(hits: NDArray[np.bool_], among: NDArray[np.bool_]) -> float | None:
    return float(hits[among].mean()) if among.any() else None
