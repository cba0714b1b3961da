"""Find the cases of a run that make a pair: one against a rule's advice, one following it.

Every pairing takes the cases and a machine, and yields matches. A match has the positions of two
cases, the ratio of their work (second over first) if the pair is compared per unit of work, the
ratio that a source claims, and the words that name its group.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from analysis.rules.rule_finding import Pairs
from kernels.config import ceil_div, large_tile
from kernels.machine import Machine
from kernels.operation import Layer, Workload
from kernels.problem import Conv, Gemm
from kernels.timemodel.estimate import Array

_REACH = 0.125  # largest relative distance between a round size and one that is not
_JUST_PAST = 16  # largest distance past an edge in elements; more would be more work


@dataclass(frozen=True)
class TimedCase:
    """A case with its time in seconds, and the standard error of the time's logarithm.

    The error is NaN if it is unknown.
    """

    workload: Workload
    implementation: str
    config: str
    cache: str
    sweep: str
    seconds: float
    error: float
    gpu: int = 0  # number of its worker and GPU; cases of two GPUs are never paired


@dataclass(frozen=True)
class Match:
    """One pair, given by the positions of its cases.

    The time of ``beside`` is added to the time of ``against``. ``control`` has two more cases, one
    against and one following the advice; the ratio of the pair is divided by theirs.
    """

    against: int
    following: int
    work: float = 1.0
    claim: float = math.nan
    words: Mapping[str, str] = field(default_factory=dict)
    beside: int | None = None
    control: tuple[int, int] | None = None


Pairing = Callable[..., Iterator[Match]]


def switch(
    cases: Sequence[TimedCase], machine: Machine, axis: str, against: str, following: Sequence[str]
) -> Iterator[Match]:
    """Pair cases that differ only in ``axis``: config, dtype or layout."""
    by_key: dict[Any, dict[str, int]] = defaultdict(dict)
    for i, case in enumerate(cases):
        value, key = _split_axis(case, axis)
        by_key[key][value] = i
    for options in by_key.values():
        for value in following:
            if against in options and value in options:
                yield Match(options[against], options[value], words={"value": value})


def separable(cases: Sequence[TimedCase], machine: Machine) -> Iterator[Match]:
    """Pair a separable convolution with the dense one, and compare their speeds.

    The separable one consists of a depthwise and a pointwise convolution; their times are added.
    """
    by_shape: dict[Any, dict[str, int]] = defaultdict(dict)
    for i, case in enumerate(cases):
        conv = case.workload
        if isinstance(conv, Conv):
            shape = conv.n, conv.c, conv.h, conv.w, conv.kout, conv.dtype, conv.layout, conv.pass_
            if conv.groups == 1:
                kind = "pointwise" if conv.r == conv.s == 1 else "dense"
            else:
                kind = "depthwise" if conv.groups == conv.c else "grouped"
            by_shape[(*shape, case.config, case.gpu)][kind] = i
    for kinds in by_shape.values():
        if {"depthwise", "pointwise", "dense"} <= kinds.keys():
            depth = kinds["depthwise"]
            point = kinds["pointwise"]
            dense = kinds["dense"]
            flops = cases[depth].workload.flops + cases[point].workload.flops
            yield Match(depth, dense, cases[dense].workload.flops / flops, beside=point)


def rounded(
    cases: Sequence[TimedCase],
    machine: Machine,
    dims: Sequence[str],
    unit: int,
    units: Mapping[str, int] | None = None,
    among: int = 1,
    whole: bool = False,
) -> Iterator[Match]:
    """Pair sizes that are not a multiple of ``unit`` with the nearest multiples.

    All other properties of the two cases are equal.

    Args:
        cases: the cases.
        machine: not used.
        dims: fields of the workload; ``m+n`` changes both together.
        unit: number that a size should be a multiple of.
        units: unit of each dtype for which it differs from ``unit``.
        among: only sizes that are multiples of this are compared.
        whole: if True, times are compared with the next larger multiple only, which does all of the
            work; otherwise, speeds are compared with the nearest multiple on either side.
    """
    for dim, members in _along(cases, dims):
        for values in members.values():
            dtype = cases[next(iter(values.values()))].workload.dtype
            step = (units or {}).get(dtype, unit)
            round_sizes = sorted(v for v in values if v % step == 0)
            for v, i in values.items():
                if v % step == 0 or v % among:
                    continue
                above = [r for r in round_sizes if v < r <= v * (1 + _REACH)]
                below = [r for r in round_sizes if v * (1 - _REACH) <= r < v]
                nearest = [*above[:1], *([] if whole else below[-1:])]
                for size in nearest:
                    b = values[size]
                    work = 1.0 if whole else _work_ratio(cases[i], cases[b], "flops")
                    yield Match(i, b, work, words={"dim": dim})


def padded(
    cases: Sequence[TimedCase], machine: Machine, dims: Sequence[str], to: Mapping[str, int]
) -> Iterator[Match]:
    """Pair each size that ``to`` names with its padded size in ``to``, all else being equal."""
    for dim, members in _along(cases, dims):
        for values in members.values():
            for small, large in to.items():
                if int(small) in values and large in values:
                    yield Match(values[int(small)], values[large], words={"dim": dim})


def doubled(
    cases: Sequence[TimedCase],
    machine: Machine,
    dims: Sequence[str],
    per: str = "flops",
    claim: float = math.nan,
) -> Iterator[Match]:
    """Pair each size with twice that size; compare times per unit of ``per`` (flops, bytes)."""
    for dim, members in _along(cases, dims):
        for values in members.values():
            for v, i in values.items():
                if 2 * v in values:
                    b = values[2 * v]
                    work = _work_ratio(cases[i], cases[b], per)
                    yield Match(i, b, work, claim, {"dim": dim})


def threshold(
    cases: Sequence[TimedCase],
    machine: Machine,
    dims: Sequence[str],
    small: int,
    large: int,
    claim: float = math.nan,
    least: int = 1,
    dtypes: Sequence[str] = (),
    over: str = "",
) -> Iterator[Match]:
    """Pair sizes of ``least`` to ``small`` with the first size of at least ``large``, by speed.

    If ``over`` names a dtype, the pairs that were also measured in that dtype are compared by their
    speed-ups over it, and the claim is about these. If there are no such pairs, speeds are compared
    without a claim.
    """
    matches = []
    for dim, members in _along(cases, dims):
        for values in members.values():
            enough = min((v for v in values if v >= large), default=None)
            for v, i in values.items():
                if dtypes and cases[i].workload.dtype not in dtypes:
                    continue
                if enough is not None and least <= v <= small:
                    b = values[enough]
                    work = _work_ratio(cases[i], cases[b], "flops")
                    words = {"dim": dim, "of": "speed"}
                    matches.append(Match(i, b, work, math.nan if over else claim, words))
    yield from _speed_ups(cases, matches, over, claim) or matches


def _speed_ups(
    cases: Sequence[TimedCase], matches: Sequence[Match], over: str, claim: float
) -> list[Match]:
    """Return the matches with both cases measured in ``over``, too, and use those as controls."""
    # The key is equal for cases that differ only in dtype.
    key = [_split_axis(case, "dtype")[1] for case in cases]
    baseline = {key[i]: i for i, case in enumerate(cases) if case.workload.dtype == over}
    return [
        Match(
            match.against,
            match.following,
            1.0,
            claim,
            {**match.words, "of": "speed-up"},
            control=(baseline[key[match.against]], baseline[key[match.following]]),
        )
        for match in matches
        if cases[match.against].workload.dtype != over
        and {key[match.against], key[match.following]} <= baseline.keys()
    ]


def edge(cases: Sequence[TimedCase], machine: Machine, kind: str) -> Iterator[Match]:
    """Pair a GEMM just past an edge of a ``wave`` or a ``tile`` with the one just before it.

    The tile is the one that large GEMMs get on this machine. The claim about a wave is the ratio of
    the numbers of waves. Nothing is claimed about a tile within the same wave.
    """
    if machine.kind == "cpu" and kind == "wave":
        return
    for dim, members in _along(cases, ("m", "n")):
        for values in members.values():
            sizes = sorted(values)
            for small, big in itertools.pairwise(sizes):
                first, second = cases[values[small]].workload, cases[values[big]].workload
                if big - small > _JUST_PAST or not isinstance(first, Gemm):
                    continue
                assert isinstance(second, Gemm)
                (tiles, waves), (more_tiles, more_waves) = (
                    _tiles_and_waves(gemm, machine) for gemm in (first, second)
                )
                before, after = {"wave": (waves, more_waves), "tile": (tiles, more_tiles)}[kind]
                same_wave = waves == more_waves or machine.kind == "cpu"
                if after > before and (kind == "wave" or same_wave):
                    claim = after / before if kind == "wave" else math.nan
                    yield Match(values[big], values[small], 1.0, claim, {"dim": dim})


def intensity(cases: Sequence[TimedCase], machine: Machine) -> Iterator[Match]:
    """Pair a layer of low arithmetic intensity with the linear layer 4096 × 1024 at batch 512.

    Speeds are compared. The claim is their ratio under the machine's roofs.
    """

    def roof(workload: Workload) -> float:
        return min(machine.peak(workload.dtype), workload.intensity * machine.bandwidth)

    # Take the largest case of each layer, in which the launch counts least.
    largest: dict[tuple[str, str], int] = {}
    for i, case in enumerate(cases):
        name = _intensity_name(case.workload)
        key = name, case.workload.dtype
        if name and (
            key not in largest or case.workload.bytes > cases[largest[key]].workload.bytes
        ):
            largest[key] = i
    for (name, dtype), i in largest.items():
        high = largest.get(("linear, batch 512", dtype))
        if high is not None and high != i:
            a, b = cases[i].workload, cases[high].workload
            yield Match(i, high, b.flops / a.flops, roof(b) / roof(a), {"op": name})


def _intensity_name(workload: Workload) -> str:
    if isinstance(workload, Layer):
        return workload.op
    if isinstance(workload, Gemm) and (workload.n, workload.k) == (4096, 1024):
        return {1: "linear, batch 1", 512: "linear, batch 512"}.get(workload.m, "")
    return ""


def ridge(cases: Sequence[TimedCase], machine: Machine) -> Iterator[Match]:
    """Pair the layer with most bytes per second with the GEMM with most FLOPs per second.

    There is one pair per dtype. The ratio is the reached FLOP/s over the reached bytes/s, divided
    by the same ratio of the datasheet.
    """
    if machine.kind == "cpu":
        return
    layers = [i for i, case in enumerate(cases) if isinstance(case.workload, Layer)]
    by_dtype: dict[str, list[int]] = defaultdict(list)
    for i, case in enumerate(cases):
        if isinstance(case.workload, Gemm):
            by_dtype[case.workload.dtype].append(i)
    for dtype, products in by_dtype.items():
        best = max(products, key=lambda i: cases[i].workload.flops / cases[i].seconds)
        if layers:
            widest = max(layers, key=lambda i: cases[i].workload.bytes / cases[i].seconds)
            work = cases[best].workload.flops / cases[widest].workload.bytes
            yield Match(widest, best, work / machine.ridge(dtype), words={"dtype": dtype})


PAIRINGS: dict[str, Pairing] = {
    f.__name__: f
    for f in (switch, separable, rounded, padded, doubled, threshold, edge, intensity, ridge)
}
"""Pairings by the names that ``rules.toml`` uses."""


def pairs_of(
    cases: Sequence[TimedCase], matches: Sequence[Match], by: Sequence[str], predicted: Array
) -> Pairs:
    """Return matches as arrays.

    ``by`` has the words that name a group, and ``predicted`` the predicted seconds of each case.
    """
    cases, matches = list(cases), list(matches)
    # 1. Two cases with times to add become one additional case.
    for number, match in enumerate(matches):
        if match.beside is not None:
            parts = [cases[match.against], cases[match.beside]]
            seconds = sum(part.seconds for part in parts)
            # Errors of logs are relative; it is the absolute ones that add in quadrature.
            error = math.hypot(*(part.seconds * part.error for part in parts)) / seconds
            matches[number] = replace(match, against=len(cases))
            cases.append(replace(parts[0], seconds=seconds, error=error))
            predicted = np.append(predicted, predicted[match.against] + predicted[match.beside])
    # 2. One element per pair. The predicted ratios are not known yet.
    a, b = (np.array([getattr(m, n) for m in matches], dtype=np.intp) for n in _SIDES)
    work = np.log([match.work for match in matches])
    controls = [match.control for match in matches if match.control is not None]
    pairs = Pairs(
        log_time=np.log([case.seconds for case in cases]),
        error=np.array([case.error for case in cases]),
        against=a,
        following=b,
        log_work=work,
        log_claim=np.log([match.claim for match in matches]),
        log_predicted=np.full(len(matches), np.nan),
        group=[" ".join(_group_word(w, cases[m.against], m.words) for w in by) for m in matches],
        control=np.array(controls, dtype=np.intp) if controls else None,
    )
    # 3. Predicted ratios are the same contrasts, of predicted instead of measured times.
    log_predicted = replace(pairs, log_time=np.log(predicted)).log_ratio
    return replace(pairs, log_predicted=log_predicted)


_SIDES = ("against", "following")


def _group_word(name: str, case: TimedCase, words: Mapping[str, str]) -> str:
    """Return one word of a group's name: from the pairing, or a property of the first case."""
    if name in words:
        return words[name]
    workload = case.workload
    if name == "pass":  # the layout of a linear layer's operands tells its pass
        linear = {"nt": "forward", "nn": "dgrad", "tn": "wgrad"}
        return workload.pass_ if isinstance(workload, Conv) else linear[workload.layout]  # type: ignore[union-attr]
    if name == "size":
        return f"{workload.flops:.0e} FLOP"
    return str(getattr(workload, name))


def _split_axis(case: TimedCase, axis: str) -> tuple[str, Any]:
    """Return a case's value on an axis, and everything else that identifies the case."""
    workload = case.workload
    values = {f.name: getattr(workload, f.name) for f in fields(workload)}
    config = case.config
    if axis == "config":
        value, config = config, ""
    else:
        value = str(values.pop(axis, ""))
    # The implementation is not part of the key, because another dtype may use another library.
    return value, (workload.op, tuple(values.items()), config, case.cache, case.gpu)


def _along(
    cases: Sequence[TimedCase], dims: Sequence[str]
) -> Iterator[tuple[str, dict[Any, dict[int, int]]]]:
    """Yield, for each dimension, the groups of cases that differ only in it.

    A group maps each size to the position of its case.
    """
    for dim in dims:
        tied = dim.split("+")  # fields that change together, such as m+n
        members: dict[Any, dict[int, int]] = defaultdict(dict)
        for i, case in enumerate(cases):
            workload = case.workload
            if not all(hasattr(workload, name) for name in tied):
                continue
            values = {f.name: getattr(workload, f.name) for f in fields(workload)}
            size = {values.pop(name) for name in tied}
            if len(size) == 1:
                key = workload.op, tuple(values.items()), case.config, case.cache
                members[(*key, case.implementation, case.gpu)][size.pop()] = i
        yield dim, members


def _work_ratio(a: TimedCase, b: TimedCase, per: str) -> float:
    """Ratio of the second case's ``per`` (such as ``flops``) to the first case's."""
    return float(getattr(b.workload, per) / getattr(a.workload, per))


def _tiles_and_waves(gemm: Gemm, machine: Machine) -> tuple[int, int]:
    """Return the numbers of tiles and of waves, with the tile that large GEMMs get."""
    bm, bn = large_tile(machine.generation, gemm.dtype)
    tiles = gemm.batch * ceil_div(gemm.m, bm) * ceil_div(gemm.n, bn)
    return int(tiles), int(ceil_div(tiles, machine.sms))
