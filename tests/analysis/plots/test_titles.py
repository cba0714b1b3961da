"""Titles state the known findings of made-up data."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.plots import titles
from kernels.machine import known_machine

H100 = known_machine("nvidia-h100-sxm")


def test_a_roofline_says_how_much_of_its_ceiling_each_dtype_reaches() -> None:
    peak = H100.peak("bf16") / 1e12
    fastest = pd.DataFrame({
        "dtype": ["bf16", "fp32", "fp16", "fp32"], "op": ["gemm", "gemm", "gemm", "conv"],
        "tflops": [peak * 0.8, 66.9 / 2, peak, 70.0],  # a convolution may exceed the peak
    })  # fmt: skip
    slow = [fastest[:2].assign(tflops=0.1)] * 7  # fp16 has one GEMM, which is too few
    rows = pd.concat([*slow, fastest], ignore_index=True).assign(tflops_lo=np.nan, tflops_hi=np.nan)
    assert titles.roofline_title(rows, H100) == (
        "The fastest GEMMs reach 80% of the peak in bf16 and 50% in fp32"
    )


def test_squares_say_from_which_size_on_they_are_fast() -> None:
    rows = pd.DataFrame({"m": [256, 512, 768, 1024], "tflops": [1.0, 9.5, 8.0, 10.0]})
    rows["tflops_hi"] = np.nan
    title = titles.square_title(rows.assign(dtype="bf16"))
    assert title == "Square GEMMs reach 90% of their best speed from M\u00a0=\u00a01024 in bf16"
    slower = rows.assign(dtype="fp32", tflops=[1.0, 10.0, 9.5, 5.0])
    assert (
        titles.square_title(slower)
        == "The largest square GEMM is below 90% of the best speed in fp32"
    )
    both = pd.concat([rows.assign(dtype="bf16"), slower])
    assert titles.square_title(both) == f"{title}; the largest GEMM is below 90% in fp32"
    noisy = slower.assign(tflops_hi=slower["tflops"] * 2)
    assert titles.square_title(noisy) == (
        "The largest square GEMM is below 90% of the best speed in fp32 (not significant)"
    )


def line(*times: float, error: float = 0.001) -> pd.DataFrame:
    rows = pd.DataFrame({"m": [1024 + i for i in range(len(times))], "time_us": times})
    logs = np.log(times)
    return rows.assign(n=64, k=64, dtype="bf16", steady_log=logs, steady_error=error)


@pytest.mark.parametrize(
    ("error", "title"),
    [
        (0.001, "Largest cliff: M 1025 → 1026 takes 50% more time in bf16"),
        (1.0, "No cliff from one size to the next is significant"),
    ],
)
def test_steps_name_the_largest_one_beyond_its_interval(error: float, title: str) -> None:
    assert titles.steps_title({"m": line(10, 11, 16.5, 17, error=error)}) == title


def test_a_cliff_to_a_misaligned_size_says_so() -> None:
    rows = line(10, 30, 31).rename(columns={"m": "n", "n": "m"})
    rows["n"] = [1024, 1025, 1026]
    assert titles.steps_title({"n": rows}) == (
        "Largest cliff: N 1024 → 1025, not a multiple of 8, takes 200% more time in bf16"
    )


def alignment(offset: int, relative: float, width: float = 0.01) -> dict[str, object]:
    return {"along": "n", "base": 1024, "offset": offset, "dtype": "fp32", "relative": relative,
            "relative_lo": relative - width, "relative_hi": relative + width}  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "title"),
    [
        ([alignment(15, 0.79), alignment(7, 0.9), alignment(8, 1.0)],
         "N = 1039 is 21% slower than the round size in fp32. "
         "No multiple of 8 is significantly slower"),
        ([alignment(15, 0.79), alignment(8, 0.95)],
         "N = 1039 is 21% slower than the round size in fp32. Multiples of 8 are up to 5% slower"),
        ([alignment(15, 0.79)], "N = 1039 is 21% slower than the round size in fp32"),
        ([alignment(15, 0.99, 0.05)],
         "No misaligned size is significantly slower than the round size"),
        ([alignment(offset, 0.94, 0.065) for offset in range(1, 16)],
         "On average, misaligned sizes along N in fp32 are 6% slower than the round size; no "
         "single size is significantly slower"),
        # The error of the base is shared by all sizes, so a mean is hardly more certain.
        ([alignment(offset, 0.96, 0.065) for offset in range(1, 16)],
         "No misaligned size is significantly slower than the round size"),
    ],
)  # fmt: skip
def test_alignment_names_the_worst_offset_and_what_round_sizes_cost(
    rows: list[dict[str, object]], title: str
) -> None:
    assert titles.alignment_title(pd.DataFrame([alignment(0, 1.0, 0.0), *rows])) == title


def test_channels_are_compared_with_the_next_multiple_of_eight() -> None:
    tflops = np.array([3.0, 2.0, 4.0, 5.0, 6.0])
    # Counts are numbers with a missing value, as in a table that also has GEMMs.
    counts = pd.array([32, 33, 40, 63, 64], dtype="Int64")
    rows = pd.DataFrame({"c": counts, "dtype": "bf16", "tflops": tflops})

    def title(half_width: float, rows: pd.DataFrame = rows) -> str:
        lo, hi = rows["tflops"] - half_width, rows["tflops"] + half_width
        return titles.channels_title(rows.assign(tflops_lo=lo, tflops_hi=hi))

    assert title(0.1) == "33 channels are 50% slower than 40 in bf16"
    assert title(1.1) == "No channel count is significantly slower than the next multiple of 8"
    # 40 was not measured, and 64 is faster than 33 because it is larger.
    assert title(0.1, rows[rows["c"] != 40]) == "63 channels are 17% slower than 64 in bf16"
    multiples = rows[rows["c"] % 8 == 0]
    assert title(0.1, multiples) == "No channel count can be compared with the next multiple of 8"


def test_layouts_count_what_is_clear() -> None:
    pairs = pd.DataFrame({"ratio": [2.0, 0.5, 1.0], "ratio_lo": [1.5, 0.4, 0.9],
                          "ratio_hi": [2.5, 0.6, 1.1]})  # fmt: skip
    assert titles.layouts_title(pairs) == (
        "NHWC is 1.00× as fast as NCHW on average. It is clearly faster in 1 of 3 pairs, and "
        "clearly slower in 1"
    )
