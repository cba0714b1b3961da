"""Titles of the plots. Each title states the main result that its plot shows."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from analysis.slices.cliffs import largest_cliff
from analysis.slices.series import (
    NEARLY,
    fast_from,
    fastest_gemms,
    layout_summary,
    mean_alignment,
)
from kernels.common.counts import enumerated
from kernels.config import ceil_div
from kernels.machine import Machine


def roofline_title(rows: pd.DataFrame, machine: Machine) -> str:
    """Return a title with the share of the peak that the fastest GEMM in each dtype reaches.

    Dtypes with fewer than eight GEMMs are left out. The title is empty if no dtype is left.

    ``rows`` is a table from :func:`analysis.slices.series.roofline_series`.
    """
    phrases: list[str] = []
    for gemm in fastest_gemms(rows, machine):
        of_peak = "" if phrases else " of the peak"
        phrases.append(f"{gemm.share:.0%}{of_peak} in {gemm.dtype}")
    return f"The fastest GEMMs reach {enumerated(phrases)}" if phrases else ""


def square_title(rows: pd.DataFrame) -> str:
    """Return a title that says from which size square GEMMs reach 90% of their best speed.

    If even the largest size in a dtype is slower, the title says so instead.

    ``rows`` is a table from :func:`analysis.slices.series.square_series`.
    """
    reached = []
    slow_at_end = []  # dtypes in which the largest measured size is below 90% of the best speed
    for dtype, group in rows.groupby("dtype", sort=False):
        size = fast_from(group)
        if size is None:
            # The upper end of the largest size's speed may be fast enough.
            is_certain = fast_from(group, "tflops_hi") is None
            slow_at_end.append(str(dtype) if is_certain else f"{dtype} (not significant)")
        else:
            # Non-breaking spaces keep the size on one line.
            reached.append(f"from M\u00a0=\u00a0{size} in {dtype}")
    if not reached:
        dtypes = enumerated(slow_at_end)
        return f"The largest square GEMM is below {NEARLY:.0%} of the best speed in {dtypes}"
    slower = ""
    if slow_at_end:
        slower = f"; the largest GEMM is below {NEARLY:.0%} in {enumerated(slow_at_end)}"
    return f"Square GEMMs reach {NEARLY:.0%} of their best speed {enumerated(reached)}{slower}"


def steps_title(lines: Mapping[str, pd.DataFrame]) -> str:
    """Return a title that names the largest significant slowdown from one size to the next.

    ``lines`` maps dimensions to the cases to search, in the form that
    :func:`analysis.slices.series.steps_series` returns.
    """
    along_and_cliff = largest_cliff(lines)
    if along_and_cliff is None:
        return "No cliff from one size to the next is significant"
    along, cliff = along_and_cliff
    sizes = f"{along.upper()} {cliff[along]} → {cliff['after']}"
    # All cases are in layout nt. M is not the length of a row of any matrix there, so its alignment
    # is not mentioned.
    if along != "m" and cliff[along] % 8 == 0 and cliff["after"] % 8:
        sizes += ", not a multiple of 8,"
    more_time = f"{cliff['ratio'] - 1:.0%} more time"
    return f"Largest cliff: {sizes} takes {more_time} in {cliff['dtype']}"


def alignment_title(rows: pd.DataFrame) -> str:
    """Return a title with the slowest misaligned size, and the largest slowdown at multiples of 8.

    If no misaligned size is significantly slower than the round size, the title is based on the
    mean speeds of misaligned sizes instead, because a mean is more certain than the speed of a
    single size.

    ``rows`` is a table from :func:`analysis.slices.series.alignment_series`, with a single base,
    which is the round size.
    """
    # 1. Find the slowest misaligned size. The base is round, so the offset shows the alignment.
    is_multiple = rows["offset"] % 8 == 0
    is_slower = rows["relative_hi"] < 1
    slower = rows[~is_multiple & is_slower]
    if slower.empty:
        return _mean_alignment_title(rows[~is_multiple])
    worst = slower.loc[slower["relative"].idxmin()]
    size = f"{worst['along'].upper()} = {int(worst['base'] + worst['offset'])}"
    # 2. Describe the multiples of 8, except the round size itself (offset 0).
    is_other_multiple = is_multiple & (rows["offset"] > 0)
    slower_multiples = rows[is_other_multiple & is_slower]
    if not is_other_multiple.any():
        multiples_phrase = ""
    elif slower_multiples.empty:
        multiples_phrase = ". No multiple of 8 is significantly slower"
    else:
        most = 1 - slower_multiples["relative"].min()
        multiples_phrase = f". Multiples of 8 are up to {most:.0%} slower"
    return (
        f"{size} is {1 - worst['relative']:.0%} slower than the round size in {worst['dtype']}"
        f"{multiples_phrase}"
    )


def _mean_alignment_title(misaligned: pd.DataFrame) -> str:
    """Return a title with the dimension and dtype whose misaligned sizes are slowest on average.

    ``misaligned`` has the rows of misaligned sizes, none of which is significantly slower than the
    round size. If no average is significant either, the title says that no size is significantly
    slower.
    """
    slowest: tuple[float, str] | None = None  # mean relative speed, and a phrase for the title
    for (along, dtype), group in misaligned.groupby(["along", "dtype"], sort=False):
        if len(group) < 2:  # the scatter of a single ratio is unknown
            continue
        mean, _, highest_mean = mean_alignment(group)
        # A loss below half a percent would be printed as 0%.
        if highest_mean < 1 and mean < 0.995 and (slowest is None or mean < slowest[0]):
            slowest = mean, f"{str(along).upper()} in {dtype} are {1 - mean:.0%} slower"
    if slowest is None:
        return "No misaligned size is significantly slower than the round size"
    return (
        f"On average, misaligned sizes along {slowest[1]} than the round size; no single size is "
        "significantly slower"
    )


def channels_title(rows: pd.DataFrame) -> str:
    """Return a title with the channel count that is slowest relative to the next multiple of 8.

    Larger multiples are not used for the comparison, because convolutions with more
    channels are usually faster anyway.

    ``rows`` is a table from :func:`analysis.slices.series.channel_series`.
    """
    is_compared = False
    ratio_by_title: dict[str, float] = {}  # speed of each slower count, over that of the multiple
    for dtype, group in rows.groupby("dtype", sort=False):
        fastest = group.loc[group.groupby("c")["tflops"].idxmax()].set_index("c")
        for channels in fastest.index[fastest.index % 8 != 0]:
            next_multiple = 8 * ceil_div(int(channels), 8)
            if next_multiple not in fastest.index:
                continue
            is_compared = True
            at_count = fastest.loc[channels]
            at_multiple = fastest.loc[next_multiple]
            if at_count["tflops_hi"] < at_multiple["tflops_lo"]:
                ratio = at_count["tflops"] / at_multiple["tflops"]
                difference = f"{1 - ratio:.0%} slower than {next_multiple} in {dtype}"
                ratio_by_title[f"{channels} channels are {difference}"] = ratio
    if ratio_by_title:
        return min(ratio_by_title, key=lambda title: ratio_by_title[title])
    if not is_compared:
        return "No channel count can be compared with the next multiple of 8"
    return "No channel count is significantly slower than the next multiple of 8"


def layouts_title(pairs: pd.DataFrame) -> str:
    """Return a title with NHWC's mean speed relative to NCHW.

    ``pairs`` is a table from :func:`analysis.slices.series.layout_series`, with at least one row.
    """
    mean, faster, slower = layout_summary(pairs)
    return (
        f"NHWC is {mean:.2f}× as fast as NCHW on average. It is clearly faster in {faster} of "
        f"{len(pairs)} pairs, and clearly slower in {slower}"
    )
