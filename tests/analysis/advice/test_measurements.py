from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.advice.measurements import Measurements
from analysis.recordings.repetition import MeasuredTime, places_of
from kernels.problem import Gemm

ONE, OTHER = (Gemm(m, 4096, 4096, "bf16") for m in (4095, 4096))


def time(seconds: float, place: str) -> MeasuredTime:
    return MeasuredTime(seconds, 0.99 * seconds, 1.01 * seconds, run=place)


def test_times_of_two_gpus_are_not_compared() -> None:
    apart = Measurements(
        {ONE: {"cublas": time(1.2, "1/2 0")}, OTHER: {"cublas": time(1.0, "2/2 1")}}
    )
    assert apart.ratio(ONE, OTHER) is None


def test_of_several_places_one_that_has_both_is_compared() -> None:
    """The second problem was timed in two sweeps, by a slower GPU with the narrower interval."""
    times = [time(1.0, "1/2 0"), MeasuredTime(1.1, 1.099, 1.101, run="2/2 1")]
    known = Measurements(
        {ONE: {"cublas": time(1.2, "1/2 0")}, OTHER: {"cublas": times[1]}},
        again={(OTHER, "cublas"): times},
    )
    ratio = known.ratio(ONE, OTHER)
    assert ratio is not None
    assert ratio[0] == pytest.approx(1.2)


def test_rows_without_a_gpu_are_of_one_place() -> None:
    rows = pd.DataFrame(
        {"run": "now", "worker": "1/1", "gpu": pd.array([None, np.nan], dtype="Int64")}
    )
    assert places_of(rows).nunique(dropna=False) == 1
