"""Group the cases that are compared with each other, so that one GPU measures them.

Cards of one model differ by several percent, which is as much as many of the gains that advice is
about. Cases that a rule, an analysis of cliffs or alignment, or a recommendation compares are
therefore *linked*:

- cases of one sweep with the same sizes, whatever else differs (dtype, layout, config, cache);
- cases of one sweep that differ in only one size;
- problems of any sweeps that are near each other in every size (the options of a recommendation),
  unless one series contains both already;
- all cases of sweeps that are needed together, because a rule compares one with the other.

A *series* contains the cases that these links connect. A plan is shared out by whole series.
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
"""Largest ratio of two sizes that a recommendation compares: by default, up to 15% fewer."""

_WAYS = ("dtype", "layout", "pass", "implementation", "config", "mode", "cache", "fill")
_SLACK = 1e-9  # tolerance of logarithms, so that two sizes exactly at the limit are near


def series_of(cases: Sequence[Case], together: Collection[Collection[str]] = ()) -> list[int]:
    """Return the number of each case's series, counted from 0 in the order of the cases.

    Args:
        cases: the cases of a plan.
        together: groups of sweeps that are needed together.
    """
    from scipy.cluster.hierarchy import DisjointSet  # slow to import, and only needed for shards

    # 1. Join cases that share a key.
    series = DisjointSet(range(len(cases)))
    first_with_key: dict[Hashable, int] = {}
    for i, case in enumerate(cases):
        for key in _keys(case, together):
            series.merge(first_with_key.setdefault(key, i), i)
    # 2. Join problems that are near each other, unless one series contains both already.
    for positions, near_positions in _near_pairs(cases):
        pairs = list(itertools.product(positions, near_positions))
        if not any(series.connected(*pair) for pair in pairs):
            # Several series could be joined. The two smallest are, because small series are easier
            # to share out evenly.
            series.merge(*min(pairs, key=lambda pair: sum(map(series.subset_size, pair))))
    # 3. Number the series. The set knows each of them by one of its cases.
    numbers: dict[int, int] = {}
    return [numbers.setdefault(series[i], len(numbers)) for i in range(len(cases))]


def lines_of(cases: Sequence[Case]) -> list[list[int]]:
    """Return groups of cases that are only informative together, as positions in ``cases``.

    A line has the cases of one sweep whose sizes differ in one dimension, with everything that is
    timed at those sizes: dtypes, layouts, passes, implementations and modes. The longest lines are
    taken first, and further lines only for sizes that no line has yet. Two lines that cross share
    the case where they meet. Each remaining size is a group of its own.
    """
    # 1. Collect the points (the sizes at which a sweep has cases) and every line through them.
    positions: dict[Hashable, list[int]] = defaultdict(list)
    lines: dict[Hashable, dict[Hashable, None]] = defaultdict(dict)
    for i, case in enumerate(cases):
        columns = case.columns()
        sizes = _sizes(columns)
        point = case.sweep, columns["op"], tuple(sizes.items())
        positions[point].append(i)
        for varied_name in sizes:
            fixed = tuple((name, value) for name, value in sizes.items() if name != varied_name)
            lines[case.sweep, columns["op"], varied_name, fixed][point] = None
    # 2. Take lines, the longest first, if they have a point that no line taken before has.
    groups: list[list[int]] = []
    uncovered = dict.fromkeys(positions)
    for line in sorted(lines.values(), key=len, reverse=True):
        if len(line) > 1 and not uncovered.keys().isdisjoint(line):
            groups.append(sorted(i for point in line for i in positions[point]))
            for covered in line:
                uncovered.pop(covered, None)
    # 3. Add the points that are on none of them.
    return sorted([*groups, *(positions[point] for point in uncovered)])


def share_out(
    cases: Sequence[Case],
    seconds: Sequence[float],
    shards: int,
    together: Collection[Collection[str]] = (),
    taken: Mapping[str, int] | None = None,
) -> list[int]:
    """Return the shard of each case, counted from 1.

    Whole series are given out, the longest first, each to the shard that has the least to do. The
    busiest shard takes at most 4/3 of what the best sharing of whole series would need (Graham
    1969).

    Args:
        cases: the cases of a plan, including those that have a shard already.
        seconds: expected seconds of each case.
        shards: number of shards.
        together: groups of sweeps that are needed together.
        taken: shards that some cases have already, by the cases' ids.
    """
    taken = taken or {}
    # 1. Add up the seconds of each series. One that has a case in a shard already goes there, too.
    series_numbers = series_of(cases, together)
    series_seconds: dict[int, float] = defaultdict(float)
    shard_of_series: dict[int, int] = {}
    for case, series, expected in zip(cases, series_numbers, seconds, strict=True):
        series_seconds[series] += expected
        if case.id in taken:
            shard_of_series.setdefault(series, taken[case.id])
    # 2. Give the other series out.
    loads = dict.fromkeys(range(1, shards + 1), 0.0)
    for series, shard in shard_of_series.items():
        loads[shard] += series_seconds[series]
    free_series = series_seconds.keys() - shard_of_series.keys()
    for series in sorted(free_series, key=lambda number: (-series_seconds[number], number)):
        shard = min(loads, key=loads.__getitem__)
        shard_of_series[series] = shard
        loads[shard] += series_seconds[series]
    return [
        taken.get(case.id, shard_of_series[series])
        for case, series in zip(cases, series_numbers, strict=True)
    ]


def _keys(case: Case, together: Collection[Collection[str]]) -> Iterator[Hashable]:
    """Yield the keys of a case; cases that share at least one key are compared with each other."""
    columns = case.columns()
    sizes = _sizes(columns)
    ways = tuple(columns.get(name, "") for name in _WAYS)
    sweep = case.sweep, columns["op"]
    yield sweep, tuple(sizes.items())
    for varied_name in sizes:
        fixed = tuple((name, value) for name, value in sizes.items() if name != varied_name)
        yield sweep, varied_name, ways, fixed
    for group in together:
        if case.sweep in group:
            yield "together", tuple(group)


def _sizes(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of a case: its columns without its sweep and how it is computed and timed.

    A convolution's implied GEMM is left out, because it follows from the convolution's own sizes.
    """
    implied = ("m", "n", "k") if columns["op"] == "conv" else ()
    return {
        name: value
        for name, value in columns.items()
        if name not in (*_WAYS, *implied, "sweep", "op")
    }


def _near_pairs(cases: Sequence[Case]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield pairs of problems that a recommendation may compare.

    Each problem is given by the positions of its cases in ``cases``. The two problems of a pair
    differ only in sizes that a recommendation changes, each by at most :data:`NEAR`.
    """
    # 1. Group the problems that agree in everything else.
    groups: dict[Hashable, dict[tuple[int, ...], list[int]]] = defaultdict(dict)
    for i, case in enumerate(cases):
        problem, columns = case.problem, case.columns()
        if isinstance(problem, Gemm):
            sizes, free_names = (problem.m, problem.n, problem.k), ("m", "n", "k")
        elif isinstance(problem, Conv):
            sizes, free_names = (problem.n, problem.c, problem.kout), ("batch", "c", "kout")
        else:
            continue
        fixed = tuple(value for name, value in _sizes(columns).items() if name not in free_names)
        ways = tuple(columns.get(name, "") for name in _WAYS)
        groups[columns["op"], fixed, ways].setdefault(sizes, []).append(i)
    # 2. Find the near pairs of each group: the logarithms of all their sizes differ by little.
    from scipy.spatial import KDTree  # slow to import, and only needed for shards

    for problems in groups.values():
        positions = list(problems.values())
        tree = KDTree(np.log(np.array(list(problems), dtype=float)))
        near_pairs = tree.query_pairs(np.log(NEAR) + _SLACK, p=np.inf, output_type="ndarray")
        for first, second in near_pairs.tolist():
            yield positions[first], positions[second]
