"""Group the cases that are compared with each other, so that one GPU measures them.

GPUs of one model differ in speed by several percent, and many of the gains that advice finds are no
larger than these differences. Cases are therefore *linked* if a rule, a recommendation, or an
analysis of cliffs or alignment compares them:

- cases of one sweep that have the same sizes but differ in options such as dtype, layout or config;
- cases of one sweep that differ in only one size;
- problems with equal options that are near each other in every size (:data:`NEAR`), even if they
  are from different sweeps, because a recommendation may compare them;
- all cases of sweeps that are needed together, because a rule compares one sweep with another.

A *series* contains the cases that these links connect. Shards consist of whole series. If two
problems are near each other but not connected yet, only one pair of their cases is linked, so that
series stay small.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kernels.problem import Conv, Gemm
from sweeps.cases.case import Case

NEAR = 1 / (1 - 0.15)
"""Largest ratio of two sizes that a recommendation compares.

The choose query of the recommendation table considers sizes that are up to 15% smaller or larger
than the original size. Two sizes have the largest ratio if one of them is 15% smaller than the
other."""

# Columns that say how a problem is computed and timed, as opposed to its sizes.
_OPTIONS = ("dtype", "layout", "pass", "implementation", "config", "mode", "cache", "fill")
_SLACK = 1e-9  # tolerance of log ratios, so that two sizes exactly at the limit are near


def series_of(cases: Sequence[Case], together: Collection[Collection[str]] = ()) -> list[int]:
    """Return the number of each case's series, counted from 0.

    ``together`` has the groups of sweeps that are needed together.
    """
    from scipy.cluster.hierarchy import DisjointSet  # slow to import, and only needed for shards

    # 1. Join cases that share a key.
    series = DisjointSet(range(len(cases)))
    first_with_key: dict[Hashable, int] = {}
    for i, case in enumerate(cases):
        for key in _keys(case, together):
            first = first_with_key.setdefault(key, i)
            series.merge(first, i)

    def joined_size(pair: tuple[int, int]) -> int:
        return int(series.subset_size(pair[0]) + series.subset_size(pair[1]))

    # 2. Join problems that are near each other, unless one series contains both already.
    for positions, near_positions in _near_pairs(cases):
        pairs = list(itertools.product(positions, near_positions))
        if any(series.connected(first, second) for first, second in pairs):
            continue
        # The cases of the two problems may be in several series. The two smallest series are
        # joined, because small series are easier to distribute evenly.
        first, second = min(pairs, key=joined_size)
        series.merge(first, second)
    # 3. Number the series in the order of their first cases.
    numbers: list[int] = []
    number_of_series: dict[int, int] = {}
    for i in range(len(cases)):
        representative = series[i]  # position of the case that represents the series
        number = number_of_series.setdefault(representative, len(number_of_series))
        numbers.append(number)
    return numbers


def lines_of(cases: Sequence[Case]) -> list[list[int]]:
    """Group the cases into lines, and return the positions in ``cases`` of each group.

    A line has the cases of one sweep whose sizes differ in only one dimension. It includes every
    dtype, layout, implementation and other option that is timed at those sizes. Two lines that
    cross share the cases where they meet. Lines are chosen in descending order of length, and a
    line is left out if earlier lines contain all its cases. If a combination of sizes is on no
    line, the cases with these sizes form a separate group.
    """
    # 1. Collect the points, which are the sizes at which a sweep has cases, and all lines through
    # them. The points of a line are the keys of a dictionary, which is used as an ordered set.
    positions: dict[Hashable, list[int]] = defaultdict(list)  # of the cases at each point
    lines: dict[Hashable, dict[Hashable, None]] = defaultdict(dict)
    for i, case in enumerate(cases):
        columns = case.columns()
        sizes = _sizes(columns)
        point = case.sweep, columns["op"], tuple(sizes.items())
        positions[point].append(i)
        for varied_name in sizes:
            fixed = tuple((name, value) for name, value in sizes.items() if name != varied_name)
            line_key = case.sweep, columns["op"], varied_name, fixed
            lines[line_key][point] = None
    # 2. Take lines, the longest first, if they have a point that is on no line yet.
    groups: list[list[int]] = []
    uncovered = dict.fromkeys(positions)
    for line in sorted(lines.values(), key=len, reverse=True):
        if len(line) > 1 and not uncovered.keys().isdisjoint(line):
            groups.append(sorted(i for point in line for i in positions[point]))
            for covered in line:
                uncovered.pop(covered, None)
    # 3. Add the points that are on no line. Sort all groups by the positions of their first cases.
    return sorted([*groups, *(positions[point] for point in uncovered)])


def share_out(
    cases: Sequence[Case],
    seconds: Sequence[float],
    shards: int,
    together: Collection[Collection[str]] = (),
    assigned: Mapping[str, int] | None = None,
) -> list[int]:
    """Return the number of each case's shard, counted from 1.

    Whole series are assigned, the longest first, each to the shard with the least work. If no case
    has a shard yet, the time of the busiest shard is at most 4/3 of the shortest time that any
    assignment of whole series allows (Graham 1969).

    ``seconds`` has the expected seconds of each case, and ``together`` the groups of sweeps that
    are needed together. ``assigned`` maps the id of each case that already has a shard to the
    shard's number. These cases keep their shards, and the other cases of their series follow them.
    None means that no case has a shard yet.
    """
    assigned = assigned or {}
    # 1. Add up the seconds of each series. A series with a case that has a shard goes to that
    # shard.
    series_numbers = series_of(cases, together)
    series_seconds: dict[int, float] = defaultdict(float)
    shard_of_series: dict[int, int] = {}
    for case, series, expected in zip(cases, series_numbers, seconds, strict=True):
        series_seconds[series] += expected
        if case.id in assigned:
            shard_of_series.setdefault(series, assigned[case.id])
    # 2. Assign the other series.
    shard_seconds = dict.fromkeys(range(1, shards + 1), 0.0)
    for series, shard in shard_of_series.items():
        shard_seconds[shard] += series_seconds[series]
    free_series = series_seconds.keys() - shard_of_series.keys()
    for series in sorted(free_series, key=lambda number: (-series_seconds[number], number)):
        shard = min(shard_seconds, key=lambda number: shard_seconds[number])
        shard_of_series[series] = shard
        shard_seconds[shard] += series_seconds[series]
    return [
        assigned.get(case.id, shard_of_series[series])
        for case, series in zip(cases, series_numbers, strict=True)
    ]


def _keys(case: Case, together: Collection[Collection[str]]) -> Iterator[Hashable]:
    """Yield the keys of a case; cases that share at least one key are compared with each other."""
    columns = case.columns()
    sizes = _sizes(columns)
    options = tuple(columns.get(name, "") for name in _OPTIONS)
    sweep = case.sweep, columns["op"]
    # Cases with the first key have equal sizes, and differ only in options.
    yield sweep, tuple(sizes.items())
    # Cases with one of these keys have equal options, and differ in one size at most.
    for varied_name in sizes:
        fixed = tuple((name, value) for name, value in sizes.items() if name != varied_name)
        yield sweep, varied_name, options, fixed
    for group in together:
        if case.sweep in group:
            yield "together", tuple(group)


def _sizes(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of a case: its columns without the sweep, the operation and the options.

    A convolution's implied GEMM is left out, because it follows from the convolution's own sizes.
    """
    implied = ("m", "n", "k") if columns["op"] == "conv" else ()
    return {
        name: value
        for name, value in columns.items()
        if name not in (*_OPTIONS, *implied, "sweep", "op")
    }


def _near_pairs(cases: Sequence[Case]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield pairs of problems that a recommendation may compare.

    Each problem is given by the positions of its cases in ``cases``.
    """
    # 1. Group the problems that differ only in sizes that a recommendation changes. Recommendations
    # change only GEMMs and convolutions.
    groups: dict[Hashable, dict[tuple[int, ...], list[int]]] = defaultdict(dict)
    for i, case in enumerate(cases):
        problem, columns = case.problem, case.columns()
        free_names: tuple[str, ...]
        if isinstance(problem, Gemm):
            free_names = ("m", "n", "k")
        elif isinstance(problem, Conv):
            free_names = ("c", "kout")
        else:
            continue
        sizes = tuple(getattr(problem, name) for name in free_names)
        fixed = tuple(value for name, value in _sizes(columns).items() if name not in free_names)
        options = tuple(columns.get(name, "") for name in _OPTIONS)
        groups[columns["op"], fixed, options].setdefault(sizes, []).append(i)
    # 2. Find the near pairs of each group. The logarithms of their sizes differ by at most
    # log(NEAR) in every size.
    from scipy.spatial import KDTree  # slow to import, and only needed for shards

    for problems in groups.values():
        positions = list(problems.values())
        tree = KDTree(np.log(np.array(list(problems), dtype=float)))
        near_pairs = tree.query_pairs(np.log(NEAR) + _SLACK, p=np.inf, output_type="ndarray")
        for first, second in near_pairs.tolist():
            yield positions[first], positions[second]
