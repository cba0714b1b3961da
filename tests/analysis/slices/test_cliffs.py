"""Test cliffs between neighbouring sizes, and their confirmation by another collection."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.slices.cliffs import confirmed_pairs, largest, neighbouring_pairs


def rows(*times: tuple[int, float], n: int = 768, k: int = 10240, **more: object) -> pd.DataFrame:
    return pd.DataFrame(
        [{"m": m, "n": n, "k": k, "dtype": "bf16", "time_us": us, **more} for m, us in times]
    )


def test_neighbours_are_one_apart_or_nearly_as_large() -> None:
    steps = neighbouring_pairs(rows((1280, 31.0), (1281, 56.0), (1300, 57.0), (1500, 60.0)))
    assert list(zip(steps["m"], steps["after"], strict=True)) == [(1280, 1281), (1281, 1300)]
    assert steps["ratio"].iloc[0] == pytest.approx(56 / 31)
    assert steps["certain"].all()
    assert neighbouring_pairs(rows((1, 1.0), (2, 2.0))).empty  # twice as large


def test_lines_of_other_sizes_dtypes_or_implementations_are_apart() -> None:
    one, other = rows((64, 1.0)), rows((65, 9.0), n=1024)
    assert neighbouring_pairs(pd.concat([one, other])).empty
    mixed = pd.concat(
        [rows((64, 1.0), implementation="cublas"), rows((65, 9.0), implementation="x")]
    )
    assert neighbouring_pairs(mixed).empty


@pytest.mark.parametrize("along", ["m", "n", "k"])
def test_a_step_is_found_along_each_dimension(along: str) -> None:
    sizes = {"m": 64, "n": 64, "k": 64, "dtype": "bf16"}
    line = pd.DataFrame(
        [{**sizes, along: size, "time_us": us} for size, us in ((32, 1.0), (33, 3.0))]
    )
    (step,) = neighbouring_pairs(line, along).to_dict("records")
    assert (step[along], step["after"], step["ratio"]) == (32, 33, 3.0)


def test_a_step_within_its_intervals_is_not_certain() -> None:
    line = rows((64, 10.0), (65, 10.5), (66, 14.0))
    line = line.assign(steady_log=np.log(line["time_us"]), steady_error=0.05)
    assert list(neighbouring_pairs(line)["certain"]) == [False, True]
    ups, downs = largest(neighbouring_pairs(line), 5)
    assert list(ups["m"]) == [65]
    assert downs.empty


def test_only_steps_that_another_collection_shows_are_repeated() -> None:
    ours = rows((20, 10.0), (21, 20.0), (22, 10.0), (23, 20.0), (30, 10.0), (31, 20.0))
    theirs = rows((20, 5.0), (21, 9.0), (22, 9.5), (23, 9.0), (30, 5.0))
    again = confirmed_pairs(neighbouring_pairs(ours), {"theirs": theirs})
    assert list(again["m"]) == [20]
    assert again["again"].iloc[0] == pytest.approx(1.8)
    assert again["by"].iloc[0] == "theirs"
    assert confirmed_pairs(neighbouring_pairs(ours), {}).empty


def test_equal_times_are_not_confirmed() -> None:
    pairs = neighbouring_pairs(rows((20, 10.0), (21, 10.0)))
    assert confirmed_pairs(pairs, {"theirs": rows((20, 5.0), (21, 9.0))}).empty


def test_a_shape_is_confirmed_in_each_of_its_layouts() -> None:
    ours = rows((20, 10.0), (21, 20.0))
    pairs = neighbouring_pairs(pd.concat([ours.assign(layout="nt"), ours.assign(layout="nn")]))
    found = confirmed_pairs(pairs, {"theirs": ours, "others": ours})
    assert sorted(found["layout"]) == ["nn", "nt"]


def test_times_of_two_gpus_are_not_compared() -> None:
    line = rows((20, 10.0), (21, 20.0)).assign(gpu=[0, 1])
    assert neighbouring_pairs(line).empty


def test_of_several_collections_the_one_that_shows_least_is_named() -> None:
    ours = rows((20, 10.0), (21, 20.0))
    others = {"much": rows((20, 1.0), (21, 3.0)), "less": rows((20, 1.0), (21, 1.6)),
              "not": rows((20, 1.0), (21, 1.1))}  # fmt: skip
    (step,) = confirmed_pairs(neighbouring_pairs(ours), others).to_dict("records")
    assert (step["by"], round(step["again"], 6)) == ("less", 1.6)


def test_the_largest_up_and_down_come_first() -> None:
    times = np.array([10.0, 20.0, 5.0, 6.0])
    ups, downs = largest(neighbouring_pairs(rows(*zip(range(24, 28), times, strict=True))), 5)
    assert list(ups["m"]) == [24, 26]
    assert list(downs["m"]) == [25]
