from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.advice.measurements import Measurements, rows_near
from analysis.advice.times import _with_reported_interval
from analysis.model.fit import Fit, SoftwareRange
from analysis.model.shift import CollectionPair, Shift
from analysis.recordings.repetition import MeasuredTime, places_of
from kernels.problem import Gemm
from kernels.timemodel.constants import default_constants

ONE, OTHER = (Gemm(m, 4096, 4096, "bf16") for m in (4095, 4096))


def time(seconds: float, place: str) -> MeasuredTime:
    return MeasuredTime(seconds, 0.99 * seconds, 1.01 * seconds, place=place)


def test_times_of_two_gpus_are_not_compared() -> None:
    apart = Measurements(
        {ONE: {"cublas": time(1.2, "1/2 0")}, OTHER: {"cublas": time(1.0, "2/2 1")}}
    )
    assert apart.ratio(ONE, OTHER) is None


def test_of_several_places_one_that_has_both_is_compared() -> None:
    """The second problem was timed in two sweeps, by a slower GPU with the narrower interval."""
    times = [time(1.0, "1/2 0"), MeasuredTime(1.1, 1.099, 1.101, place="2/2 1")]
    known = Measurements(
        {ONE: {"cublas": time(1.2, "1/2 0")}, OTHER: {"cublas": times[1]}},
        repeats={(OTHER, "cublas"): times},
    )
    ratio = known.ratio(ONE, OTHER)
    assert ratio is not None
    assert ratio[0] == pytest.approx(1.2)


def test_rows_without_a_gpu_are_of_one_place() -> None:
    rows = pd.DataFrame(
        {"run": "now", "worker": "1/1", "gpu": pd.array([None, np.nan], dtype="Int64")}
    )
    assert places_of(rows).nunique(dropna=False) == 1


@pytest.mark.parametrize("percent", range(1, 90))
def test_the_ends_of_an_allowance_are_near(percent: int) -> None:
    """1.05 · 100 is 105, but 105 / 100 is a larger float than 1 + 0.05."""
    sizes = [100 + percent, 100 - percent]
    rows = pd.DataFrame({"m": sizes, "n": 100, "k": 100})
    factor = 1 / (1 - percent / 100)
    assert len(rows_near(rows, [Gemm(100, 100, 100, "bf16")], factor)) == 2
    grown = rows_near(rows.head(1), [Gemm(100, 100, 100, "bf16")], 1 + percent / 100)
    assert len(grown) == 1


def test_a_time_of_others_has_the_interval_of_what_other_software_should_take() -> None:
    seconds = np.geomspace(1e-6, 1e-3, 100)
    shift = Shift.learned([[CollectionPair(seconds, np.full(100, -0.08))]] * 3)
    known, software = MeasuredTime(1e-5, np.nan, np.nan), SoftwareRange(-1.0, 2.0, -0.5, 0.5)
    fit = Fit(default_constants("hopper", "bf16"), low=-0.1, high=0.1).for_software(software, shift)
    spread = 3 * fit.typical_spread
    row = {f"{name}_us": 9.0 * np.exp(end * spread) for name, end in
           (("lo", fit.low), ("hi", fit.high))}  # fmt: skip
    found = _with_reported_interval(known, row, fit)
    # The time remains that of the table. The interval lies around a time that is shifted by half of
    # the difference between the collections.
    assert found.time == 1e-5
    assert np.log(found.lo / 1e-5) == pytest.approx(-0.04 + fit.low * spread)
    assert np.log(found.hi / 1e-5) == pytest.approx(-0.04 + fit.high * spread)
    # A time with an interval keeps it, widened to that of a repetition.
    again = MeasuredTime(1e-5, 0.99e-5, 1.01e-5)
    widened = _with_reported_interval(again, row, fit)
    assert (widened.lo, widened.hi) == again.repetition
