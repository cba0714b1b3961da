"""Series: cases that somebody will compare, and that are therefore measured on one GPU.

Cards of one model differ by several percent, as much as many a gain that advice is about. What is
compared, by a rule, a step, an alignment plot or a recommendation, are

- cases of one sweep with the same sizes, whatever else differs (dtype, layout, config, cache);
- cases of one sweep that differ in one size alone;
- problems near each other in every size, of whichever sweeps (a recommendation's options), unless
  a series has both already;
- all cases of sweeps that are needed together, because a rule compares one with the other.

A series is what these links connect. A plan is shared out between series, never inside one.
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
"""Ratio of two sizes up to which a recommendation compares them: up to 15 % fewer, by default."""

_WAYS = ("dtype", "layout", "pass", "implementation", "config", "mode", "cache", "fill")
_SLACK = 1e-9  # of logarithms: two sizes at the very limit are near


def series_of(cases: Sequence[Case], together: Collection[Collection[str]] = ()) -> list[int]:
    """The number of each case's series, counted from 0 in the order of the cases.

    Args:
        cases: of a plan.
        together: groups of sweeps that are needed together.
    """
    from scipy.cluster.hierarchy import DisjointSet  # slow to import, and for shards only

    series, first = DisjointSet(range(len(cases))), dict[Hashable, int]()
    for i, case in enumerate(cases):
        for key in _keys(case, together):
            series.merge(first.setdefault(key, i), i)
    for one, other in _near(cases):
        pairs = list(itertools.product(one, other))
        if not any(series.connected(*pair) for pair in pairs):
            # Of several ways to join them, the one that leaves series small: they share better.
            series.merge(*min(pairs, key=lambda pair: sum(map(series.subset_size, pair))))
    order: dict[int, int] = {}
    return [order.setdefault(series[i], len(order)) for i in range(len(cases))]


def lines_of(cases: Sequence[Case]) -> list[list[int]]:
    """Groups of cases that answer something only together, as positions in ``cases``.

    A line has the cases of one sweep whose sizes differ in one, with everything that is timed at
    those sizes: dtypes, layouts, passes, implementations, modes. The longest lines are taken
    first, and further ones only for sizes that no line has yet. Two lines
    that cross share the case where they meet. Any other size is a group of its own.
    """
    places: dict[Hashable, list[int]] = defaultdict(list)
    lines: dict[Hashable, dict[Hashable, None]] = defaultdict(dict)
    for i, case in enumerate(cases):
        columns = case.columns()
        sizes = _sizes(columns)
        place = case.sweep, columns["op"], tuple(sizes.items())
        places[place].append(i)
        for size in sizes:
            rest = tuple((name, value) for name, value in sizes.items() if name != size)
            lines[case.sweep, columns["op"], size, rest][place] = None
    found: list[list[int]] = []
    left = dict.fromkeys(places)
    for line in sorted(lines.values(), key=len, reverse=True):
        if len(line) > 1 and not left.keys().isdisjoint(line):
            found.append(sorted(i for place in line for i in places[place]))
            for crossed in line:
                left.pop(crossed, None)
    return sorted([*found, *(places[place] for place in left)])


def share_out(
    cases: Sequence[Case],
    seconds: Sequence[float],
    shards: int,
    together: Collection[Collection[str]] = (),
    taken: Mapping[str, int] | None = None,
) -> list[int]:
    """The shard of each case, from 1: whole series, the longest first, to whoever has least.

    No shard takes over 4/3 of what the best sharing would need (Graham 1969), or as long as the
    longest series.

    Args:
        cases: of a plan, those that have a shard already among them.
        seconds: what each should take.
        shards: how many there are.
        together: groups of sweeps that are needed together.
        taken: the shards that some cases have already, by their ids.
    """
    numbers = series_of(cases, together)
    total: dict[int, float] = defaultdict(float)
    shard: dict[int, int] = {}
    for case, number, expected in zip(cases, numbers, seconds, strict=True):
        total[number] += expected
        if taken and case.id in taken:
            shard.setdefault(number, taken[case.id])
    loads = dict.fromkeys(range(1, shards + 1), 0.0)
    for number, where in shard.items():
        loads[where] += total[number]
    for number in sorted(total.keys() - shard.keys(), key=lambda n: (-total[n], n)):
        shard[number] = min(loads, key=loads.__getitem__)
        loads[shard[number]] += total[number]
    return [(taken or {}).get(case.id, shard[n]) for case, n in zip(cases, numbers, strict=True)]


def _keys(case: Case, together: Collection[Collection[str]]) -> Iterator[Hashable]:
    """What two cases that are compared within their sweep have in common; one key is enough."""
    columns = case.columns()
    sizes = _sizes(columns)
    ways = tuple(columns.get(name, "") for name in _WAYS)
    sweep = case.sweep, columns["op"]
    yield sweep, tuple(sizes.items())
    for size in sizes:
        rest = tuple((name, value) for name, value in sizes.items() if name != size)
        yield sweep, size, ways, rest
    for group in together:
        if case.sweep in group:
            yield "together", tuple(group)


def _sizes(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a case that are neither its sweep, nor how it is computed and timed.

    A convolution's GEMM follows from its own sizes.
    """
    implied = ("m", "n", "k") if columns["op"] == "conv" else ()
    return {
        name: value
        for name, value in columns.items()
        if name not in (*_WAYS, *implied, "sweep", "op")
    }


def _near(cases: Sequence[Case]) -> Iterator[tuple[list[int], list[int]]]:
    """Pairs of problems that a recommendation may compare: the cases that time either."""
    groups: dict[Hashable, dict[tuple[int, ...], list[int]]] = defaultdict(dict)
    for i, case in enumerate(cases):
        problem, columns = case.problem, case.columns()
        if isinstance(problem, Gemm):
            sizes, free = (problem.m, problem.n, problem.k), ("m", "n", "k")
        elif isinstance(problem, Conv):
            sizes, free = (problem.n, problem.c, problem.kout), ("batch", "c", "kout")
        else:
            continue
        fixed = tuple(value for name, value in _sizes(columns).items() if name not in free)
        ways = tuple(columns.get(name, "") for name in _WAYS)
        groups[columns["op"], fixed, ways].setdefault(sizes, []).append(i)
    from scipy.spatial import KDTree  # likewise

    for problems in groups.values():
        timed = list(problems.values())
        tree = KDTree(np.log(np.array(list(problems), dtype=float)))
        near = tree.query_pairs(np.log(NEAR) + _SLACK, p=np.inf, output_type="ndarray")
        for one, other in near.tolist():
            yield timed[one], timed[other]
