"""Titles of the plots: what each one found, computed from what it shows."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from analysis.slices.cliffs import steepest
from analysis.slices.series import NEARLY, fast_from, layout_summary
from kernels.machine import Machine


def roofline_title(rows: pd.DataFrame, machine: Machine) -> str:
    """Say how much of its peak each dtype reaches with a GEMM.

    Args:
        rows: table from :func:`analysis.slices.series.roofline_series`.
        machine: the machine with the ceilings.
    """
    best = rows[rows["op"] == "gemm"].groupby("dtype", sort=False)["tflops"].max()
    # A measured ceiling is itself uncertain, so no GEMM is reported to exceed it.
    shares = {
        str(dtype): min(1.0, top * 1e12 / machine.peak(str(dtype))) for dtype, top in best.items()
    }
    told = [f"{share:.0%} in {dtype}" for dtype, share in shares.items()]
    return f"The fastest GEMMs reach {_listed(told)} of the peak" if told else ""


def square_title(rows: pd.DataFrame) -> str:
    """Say from which size on each dtype is nearly as fast as it gets.

    Args:
        rows: table from :func:`analysis.slices.series.square_series`.
    """
    told = []
    for dtype, group in rows.groupby("dtype", sort=False):
        size = fast_from(group)
        told.append(f"{dtype} from {size} on" if size else f"{dtype} above {group['m'].max()}")
    return f"{NEARLY:.0%} of the best speed: {_listed(told)}"


def steps_title(lines: Mapping[str, pd.DataFrame]) -> str:
    """Name the largest cliff that lies beyond its interval.

    Args:
        lines: tables from :func:`analysis.slices.series.steps_series`.
    """
    found = steepest(lines)
    if found is None:
        return "No cliff from one size to the next exceeds its interval"
    along, row = found
    where = f"{along.upper()} {row[along]} → {row['after']}"
    return f"{where} takes {row['ratio'] - 1:.0%} more time in {row['dtype']}, the largest cliff"


def alignment_title(rows: pd.DataFrame) -> str:
    """Name the worst offset from a round size, and say what multiples of 8 cost.

    Args:
        rows: table from :func:`analysis.slices.series.alignment_series`, with only one base.
    """
    eighth = rows["offset"] % 8 == 0
    odd, round_ = rows[~eighth], rows[eighth & (rows["offset"] > 0)]
    slower = odd[odd["relative_hi"] < 1]
    if slower.empty:
        return "No offset from a round size is slower beyond its interval"
    worst = slower.loc[slower["relative"].idxmin()]
    size = f"{worst['along'].upper()} = {int(worst['base'] + worst['offset'])}"
    eights = round_[round_["relative_hi"] < 1]
    if round_.empty:
        rest = ""
    elif eights.empty:
        rest = "; multiples of 8 cost nothing beyond their intervals"
    else:
        rest = f"; multiples of 8 up to {1 - eights['relative'].min():.0%}"
    return f"{size} costs {1 - worst['relative']:.0%} in {worst['dtype']}{rest}"


def channels_title(rows: pd.DataFrame) -> str:
    """Name the number of channels that is slowest compared with the next multiple of 8.

    Args:
        rows: table from :func:`analysis.slices.series.channel_series`.
    """
    worst: tuple[float, str] = (1.0, "")
    for dtype, group in rows.groupby("dtype", sort=False):
        speed = group.groupby("c")["tflops"].max()
        for channels in speed.index[speed.index % 8 != 0]:
            larger = speed[(speed.index > channels) & (speed.index % 8 == 0)]
            if len(larger):
                ratio = float(speed[channels] / larger.iloc[0])
                text = f"{channels} channels compute {1 - ratio:.0%} less per second than "
                worst = min(worst, (ratio, f"{text}{larger.index[0]} in {dtype}"))
    return worst[1] or "No number of channels is slower than the next multiple of 8"


def layouts_title(pairs: pd.DataFrame) -> str:
    """Report the geometric mean of NHWC's speed over NCHW's, and how many pairs are clear.

    Args:
        pairs: table from :func:`analysis.slices.series.layout_series`.
    """
    mean, faster, slower = layout_summary(pairs)
    return (
        f"NHWC is {mean:.2f}× as fast as NCHW: clearly faster in {faster} of {len(pairs)} pairs, "
        f"clearly slower in {slower}"
    )


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
