"""Find pairs of cases in a run: one case against a rule's advice, and one that follows the advice.

Every pairing is a function that yields a :class:`Match` for each pair. Its arguments are the timed
cases of one run, the machine that ran the cases, and the ``options`` of a rule in ``rules.toml``.
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
from kernels.timemodel.estimate import Array, priced_alignment

_REACH = 0.125  # largest relative distance between a size and the round size that it is paired with
_JUST_PAST = 16  # largest difference, in elements, between the sizes on both sides of an edge
_REFERENCE_LAYER = "linear, batch 512"  # layer whose speed the others are compared with


@dataclass(frozen=True)
class TimedCase:
    """A case with its time in seconds, and the standard error of the time's logarithm.

    An unknown error is NaN.
    """

    workload: Workload
    implementation: str
    config: str
    cache: str
    sweep: str
    seconds: float
    error: float
    gpu: int = 0  # number that stands for the worker and GPU that timed the case


@dataclass(frozen=True)
class Match:
    """One pair of cases; a case is given by its position in the list of cases.

    Attributes:
        against: the case against the advice.
        following: the case that follows the advice.
        work: factor that the ratio of times (``against`` over ``following``) is multiplied by, such
            as the ratio of FLOPs (``following`` over ``against``).
        claim: ratio that the rule's source claims; NaN if it claims no number.
        words: words that may name the pair's group, by kind, such as ``{"dim": "m"}``.
        plus: case whose time is added to that of ``against``; None if no time is added.
        control: two more cases, one against the advice and one following it. The pair's ratio is
            divided by the ratio of the times of these two cases. None if the pair has no control.
    """

    against: int
    following: int
    work: float = 1.0
    claim: float = math.nan
    words: Mapping[str, str] = field(default_factory=dict)
    plus: int | None = None
    control: tuple[int, int] | None = None


Pairing = Callable[..., Iterator[Match]]


def switch(
    cases: Sequence[TimedCase], machine: Machine, axis: str, against: str, following: Sequence[str]
) -> Iterator[Match]:
    """Pair cases that differ in config, dtype or layout, and otherwise at most in implementation.

    - ``axis``: property that differs: ``config``, ``dtype`` or ``layout``.
    - ``against``: value on this axis in the case against the advice.
    - ``following``: values that follow the advice, each of which is paired with ``against``.
    """
    # Positions of the cases that differ only on the axis, by their values on it.
    by_key: dict[Any, dict[str, int]] = defaultdict(dict)
    for i, case in enumerate(cases):
        value, key = _split_axis(case, axis)
        by_key[key][value] = i
    for by_value in by_key.values():
        for value in following:
            if against in by_value and value in by_value:
                yield Match(by_value[against], by_value[value], words={"value": value})


def separable(cases: Sequence[TimedCase], machine: Machine) -> Iterator[Match]:
    """Pair a separable convolution with the dense convolution of the same sizes.

    A separable convolution is a depthwise and a pointwise convolution, whose times are added. The
    speeds of the separable and the dense convolution are compared.
    """
    pointwise: dict[Any, int] = {}
    depthwise: dict[Any, int] = {}
    dense: dict[Any, int] = {}
    for i, case in enumerate(cases):
        conv = case.workload
        if not isinstance(conv, Conv):
            continue
        # The pointwise convolution reads the output of the depthwise one, so all images of a pair
        # must have the same size and the same number of channels.
        if (conv.p, conv.q, conv.kout) != (conv.h, conv.w, conv.c):
            continue
        sizes = conv.n, conv.c, conv.h, conv.w, conv.kout, conv.dtype, conv.layout, conv.pass_
        key = *sizes, case.config, case.cache, case.gpu
        window = conv.r, conv.s, conv.stride, conv.padding, conv.dilation
        if conv.groups == 1 and conv.r == conv.s == 1:
            pointwise[key] = i
        elif conv.groups == 1:
            dense[key, window] = i
        elif conv.groups == conv.c:
            depthwise[key, window] = i
    for (key, window), depthwise_position in depthwise.items():
        pointwise_position = pointwise.get(key)
        dense_position = dense.get((key, window))
        if pointwise_position is None or dense_position is None:
            continue
        depthwise_flops = cases[depthwise_position].workload.flops
        separable_flops = depthwise_flops + cases[pointwise_position].workload.flops
        work = cases[dense_position].workload.flops / separable_flops
        yield Match(depthwise_position, dense_position, work, plus=pointwise_position)


def rounded(
    cases: Sequence[TimedCase],
    machine: Machine,
    dims: Sequence[str],
    unit: int,
    units: Mapping[str, int] | None = None,
    among: int = 1,
    whole: bool = False,
) -> Iterator[Match]:
    """Pair each size that is not a multiple of ``unit`` with the nearest measured multiples.

    A multiple counts only if it differs from the size by at most 12.5%.

    - ``dims``: fields of the workload, one of which differs; ``m+n`` means two equal fields that
      change together.
    - ``unit``: number that a size should be a multiple of.
    - ``units``: exceptions to ``unit``, by dtype.
    - ``among``: number that must divide the size of the case against the advice.
    - ``whole``: if True, each size is paired only with the nearest larger multiple, and times are
      compared, as for padding. Otherwise, each size is paired with the nearest multiples on both
      sides, and speeds are compared.
    """
    for dim, by_size in _lines(cases, dims):
        first_case = cases[next(iter(by_size.values()))]  # all cases of a line have one dtype
        dtype = first_case.workload.dtype
        divisor = units[dtype] if units and dtype in units else unit
        round_sizes = [size for size in by_size if size % divisor == 0]
        for size, against in by_size.items():
            if size % divisor == 0 or size % among:
                continue
            above = [larger for larger in round_sizes if size < larger <= size * (1 + _REACH)]
            below = [smaller for smaller in round_sizes if size * (1 - _REACH) <= smaller < size]
            nearest = []
            if above:
                nearest.append(min(above))
            if below and not whole:
                nearest.append(max(below))
            for round_size in nearest:
                following = by_size[round_size]
                work = 1.0 if whole else _work_ratio(cases[against], cases[following], "flops")
                yield Match(against, following, work, words={"dim": dim})


def padded(
    cases: Sequence[TimedCase], machine: Machine, dims: Sequence[str], to: Mapping[str, int]
) -> Iterator[Match]:
    """Pair cases of given sizes with otherwise equal cases of padded sizes, and compare times.

    - ``dims``: fields of the workload, one of which is padded; ``m+n`` means two equal fields that
      are padded together.
    - ``to``: padded sizes by original size. The original sizes are text, because they are TOML
      keys.
    """
    for dim, by_size in _lines(cases, dims):
        for original_text, padded_size in to.items():
            against = by_size.get(int(original_text))
            following = by_size.get(padded_size)
            if against is not None and following is not None:
                yield Match(against, following, words={"dim": dim})


def doubled(
    cases: Sequence[TimedCase],
    machine: Machine,
    dims: Sequence[str],
    per: str = "flops",
    claim: float = math.nan,
) -> Iterator[Match]:
    """Pair each size with twice that size, and compare times per FLOP or per byte.

    - ``dims``: fields of the workload, one of which is doubled; ``m+n+k`` means equal fields that
      are doubled together.
    - ``per``: ``flops`` or ``bytes``.
    - ``claim``: ratio that the rule's source claims.
    """
    for dim, by_size in _lines(cases, dims):
        for size, against in by_size.items():
            if 2 * size in by_size:
                following = by_size[2 * size]
                work = _work_ratio(cases[against], cases[following], per)
                yield Match(against, following, work, claim, {"dim": dim})


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
    """Pair each small size with the smallest large size, and compare their speeds.

    - ``dims``: fields of the workload, one of which differs.
    - ``small``: largest size that counts as small.
    - ``large``: smallest size that counts as large; it must be above ``small``.
    - ``claim``: ratio that the rule's source claims.
    - ``least``: smallest size that counts as small.
    - ``dtypes``: dtypes whose cases are paired; all if empty.
    - ``over``: if given, the claim is about speed-ups over this dtype, so speed-ups are compared.
      If no speed-up is known, speeds are compared without a claim.
    """
    # 1. Pair the sizes to compare their speeds.
    # If ``over`` is given, the claim is about speed-ups and not about speeds.
    claim_about_speeds = math.nan if over else claim
    matches = []
    for dim, by_size in _lines(cases, dims):
        large_size = min((size for size in by_size if size >= large), default=None)
        if large_size is None:
            continue
        following = by_size[large_size]
        for size, against in by_size.items():
            is_wanted = not dtypes or cases[against].workload.dtype in dtypes
            if is_wanted and least <= size <= small:
                work = _work_ratio(cases[against], cases[following], "flops")
                words = {"dim": dim, "of": "speed"}
                matches.append(Match(against, following, work, claim_about_speeds, words))
    # 2. Compare speed-ups instead, if any can be computed.
    if over:
        speed_ups = _speed_ups(cases, matches, over, claim)
        if speed_ups:
            matches = speed_ups
    yield from matches


def _speed_ups(
    cases: Sequence[TimedCase], matches: Sequence[Match], over: str, claim: float
) -> list[Match]:
    """Return the matches whose two problems were also timed in dtype ``over``, with controls.

    The control of a match has the same two problems in dtype ``over``. Matches that are already in
    this dtype are left out. ``claim`` is the claimed speed-up of the case that follows the advice,
    divided by the claimed speed-up of the case against it.
    """
    # The key is equal for cases that differ only in dtype.
    keys = [_split_axis(case, "dtype")[1] for case in cases]
    baselines = {keys[i]: i for i, case in enumerate(cases) if case.workload.dtype == over}
    speed_ups = []
    for match in matches:
        if cases[match.against].workload.dtype == over:
            continue
        against = baselines.get(keys[match.against])
        following = baselines.get(keys[match.following])
        if against is None or following is None:
            continue
        words = {**match.words, "of": "speed-up"}
        control = (against, following)
        # The work of a case and of its control is the same, so it cancels.
        speed_ups.append(Match(match.against, match.following, 1.0, claim, words, control=control))
    return speed_ups


def edge(cases: Sequence[TimedCase], machine: Machine, kind: str) -> Iterator[Match]:
    """Pair a GEMM just past a tile or wave edge with one just before the edge, and compare times.

    The tile and wave edges follow from the tile size that :func:`large_tile` returns. Past an edge
    of the kind ``wave``, the GEMM has more waves, and the claim is the ratio of the numbers of
    waves. Past an edge of the kind ``tile``, the GEMM has more tiles but not more waves, and the
    pair has no claim. A CPU has no waves, so it has only tile edges.

    Two GEMMs on Tensor Cores are paired only if their rows have the same alignment in bytes,
    because cuBLAS on an H100 takes up to eight times as long for misaligned rows.
    """
    if machine.kind == "cpu" and kind == "wave":
        return
    for dim, by_size in _lines(cases, ("m", "n")):
        for small, large in itertools.pairwise(sorted(by_size)):
            # The case before the edge follows the advice, the case past it is against the advice.
            following = by_size[small]
            against = by_size[large]
            before = cases[following].workload
            after = cases[against].workload
            if large - small > _JUST_PAST or not isinstance(before, Gemm):
                continue
            assert isinstance(after, Gemm)
            on_tensor_cores = machine.kind == "gpu" and before.dtype != "fp32"
            if on_tensor_cores and priced_alignment(before) != priced_alignment(after):
                continue
            tiles_before, waves_before = _tiles_and_waves(before, machine)
            tiles_after, waves_after = _tiles_and_waves(after, machine)
            more_waves = waves_after > waves_before
            if kind == "wave" and more_waves:
                yield Match(against, following, 1.0, waves_after / waves_before, {"dim": dim})
            within_wave = machine.kind == "cpu" or not more_waves
            if kind == "tile" and tiles_after > tiles_before and within_wave:
                yield Match(against, following, 1.0, math.nan, {"dim": dim})


def intensity(cases: Sequence[TimedCase], machine: Machine) -> Iterator[Match]:
    """Pair each layer with the GEMM M = 512, N = 4096, K = 1024, and compare speeds.

    These layers are paired: every memory-bound layer that was timed, at its largest size, and the
    linear layer (a GEMM) with M = 1 and the same N and K. The claim is the ratio of the speeds that
    the machine's roofline allows. The two cases of a pair may have been timed on different GPUs of
    the run.
    """

    def roof(workload: Workload) -> float:
        return min(machine.peak(workload.dtype), workload.intensity * machine.bandwidth)

    # Take the largest case of each layer, because the launch is the smallest share of its time.
    largest: dict[tuple[str, str], int] = {}
    for i, case in enumerate(cases):
        name = _intensity_name(case.workload)
        if not name or case.workload.dtype not in machine.peaks:
            continue
        key = name, case.workload.dtype
        if key not in largest or case.workload.bytes > cases[largest[key]].workload.bytes:
            largest[key] = i
    for (name, dtype), against in largest.items():
        following = largest.get((_REFERENCE_LAYER, dtype))
        if following is not None and following != against:
            low = cases[against].workload
            high = cases[following].workload
            work = high.flops / low.flops
            yield Match(against, following, work, roof(high) / roof(low), {"op": name})


def _intensity_name(workload: Workload) -> str:
    """Return the name of a layer that :func:`intensity` uses, or "" for any other workload."""
    if isinstance(workload, Layer):
        return workload.op
    if isinstance(workload, Gemm) and (workload.n, workload.k, workload.batch) == (4096, 1024, 1):
        return {1: "linear, batch 1", 512: _REFERENCE_LAYER}.get(workload.m, "")
    return ""


def ridge(cases: Sequence[TimedCase], machine: Machine) -> Iterator[Match]:
    """Pair the fastest layer (in bytes/s) with the fastest GEMM (in FLOP/s) of each dtype.

    The ratio of a pair is the GEMM's FLOP/s over the layer's bytes/s, divided by the machine's
    ridge point. The two cases of a pair may have been timed on different GPUs of the run.
    """
    if machine.kind == "cpu":
        return
    layers = [i for i, case in enumerate(cases) if isinstance(case.workload, Layer)]
    by_dtype: dict[str, list[int]] = defaultdict(list)
    for i, case in enumerate(cases):
        if isinstance(case.workload, Gemm) and case.workload.dtype in machine.peaks:
            by_dtype[case.workload.dtype].append(i)
    if not layers:
        return
    layer = max(layers, key=lambda i: cases[i].workload.bytes / cases[i].seconds)
    for dtype, gemms in by_dtype.items():
        gemm = max(gemms, key=lambda i: cases[i].workload.flops / cases[i].seconds)
        work = cases[gemm].workload.flops / cases[layer].workload.bytes
        yield Match(layer, gemm, work / machine.ridge(dtype), words={"dtype": dtype})


PAIRINGS: dict[str, Pairing] = {
    pairing.__name__: pairing
    for pairing in (switch, separable, rounded, padded, doubled, threshold, edge, intensity, ridge)
}
"""Pairings by the names that ``rules.toml`` uses."""


def pairs_of(
    cases: Sequence[TimedCase], matches: Sequence[Match], by: Sequence[str], predicted: Array
) -> Pairs:
    """Convert matches to arrays of pairs, and compute the predicted ratios.

    Args:
        cases: timed cases of one run.
        matches: pairs of these cases. Either all of them have a control, or none has.
        by: kinds of words that together name the group of a pair, such as ``dtype`` or ``dim``.
        predicted: predicted seconds of each case; NaN for a case that the model cannot predict.
    """
    # 1. If the times of two cases are to be added, append a case with their sum. The lists are
    # copies, so that those of the caller do not change.
    cases = list(cases)
    matches = list(matches)
    for number, match in enumerate(matches):
        if match.plus is not None:
            first = cases[match.against]
            second = cases[match.plus]
            seconds = first.seconds + second.seconds
            # Errors of logarithms are relative errors, but only absolute errors add in quadrature.
            error = math.hypot(first.seconds * first.error, second.seconds * second.error) / seconds
            matches[number] = replace(match, against=len(cases))
            cases.append(replace(first, seconds=seconds, error=error))
            predicted = np.append(predicted, predicted[match.against] + predicted[match.plus])
    # 2. Make the arrays, without predicted ratios for now.
    controls = [match.control for match in matches if match.control is not None]
    groups = []
    for match in matches:
        words = [_group_word(name, cases[match.against], match.words) for name in by]
        groups.append(" ".join(words))
    pairs = Pairs(
        log_time=np.log([case.seconds for case in cases]),
        error=np.array([case.error for case in cases]),
        against=np.array([match.against for match in matches], dtype=np.intp),
        following=np.array([match.following for match in matches], dtype=np.intp),
        log_work=np.log([match.work for match in matches]),
        log_claim=np.log([match.claim for match in matches]),
        log_predicted=np.full(len(matches), np.nan),
        group=groups,
        control=np.array(controls, dtype=np.intp) if controls else None,
    )
    # 3. Compute predicted ratios like measured ones, with predicted instead of measured times. A
    # ratio of 1 between cases that the model cannot tell apart would not be a prediction.
    log_predicted = replace(pairs, log_time=np.log(predicted)).log_ratio
    are_alike = [_are_alike(cases[match.against], cases[match.following]) for match in matches]
    return replace(pairs, log_predicted=np.where(are_alike, np.nan, log_predicted))


def _are_alike(first: TimedCase, second: TimedCase) -> bool:
    """Return True if the model cannot tell two cases apart.

    Fusing a series is the only setting of a library that the model knows.
    """
    are_fused = ["fused=on" in case.config for case in (first, second)]
    return first.workload == second.workload and are_fused[0] == are_fused[1]


def _group_word(name: str, case: TimedCase, words: Mapping[str, str]) -> str:
    """Return the word of kind ``name`` for a group's name, from ``words`` or else ``case``."""
    if name in words:
        return words[name]
    workload = case.workload
    if name == "pass":
        if isinstance(workload, Conv):
            return workload.pass_
        # The layout of a linear layer's operands shows its pass. A workload with another layout
        # does not belong to a pass of a linear layer, so it is grouped by its layout.
        passes = {"nt": "forward", "nn": "dgrad", "tn": "wgrad"}
        layout = str(getattr(workload, "layout", ""))
        return passes.get(layout, layout)
    if name == "size":
        return f"{workload.flops:.0e} FLOP"
    return str(getattr(workload, name))


def _split_axis(case: TimedCase, axis: str) -> tuple[str, Any]:
    """Return a case's value on an axis, and a key that both cases of a pair must share."""
    workload = case.workload
    values = _fields_of(workload)
    config = case.config
    if axis == "config":
        value, config = config, ""
    else:
        value = str(values.pop(axis, ""))
    # The implementation is not part of the key, because another dtype may use another library.
    return value, (workload.op, tuple(values.items()), config, case.cache, case.gpu)


def _fields_of(workload: Workload) -> dict[str, Any]:
    return {member.name: getattr(workload, member.name) for member in fields(workload)}


def _lines(cases: Sequence[TimedCase], dims: Sequence[str]) -> Iterator[tuple[str, dict[int, int]]]:
    """Yield every line of cases that differ only in one of ``dims``, together with the dimension.

    A line maps each size to the position of its case.
    """
    for dim in dims:
        tied = dim.split("+")  # fields that change together, such as m+n
        lines: dict[Any, dict[int, int]] = defaultdict(dict)
        for i, case in enumerate(cases):
            workload = case.workload
            if not all(hasattr(workload, name) for name in tied):
                continue
            # Only the fields that do not change are left in ``values``, which is part of the key.
            values = _fields_of(workload)
            sizes = {values.pop(name) for name in tied}
            if len(sizes) == 1:  # fields that change together must be equal
                (size,) = sizes
                settings = case.implementation, case.config, case.cache, case.gpu
                lines[workload.op, tuple(values.items()), settings][size] = i
        for by_size in lines.values():
            yield dim, by_size


def _work_ratio(first: TimedCase, second: TimedCase, per: str) -> float:
    """Return the ratio of work, second case over first; ``per`` is ``flops`` or ``bytes``."""
    return float(getattr(second.workload, per) / getattr(first.workload, per))


def _tiles_and_waves(gemm: Gemm, machine: Machine) -> tuple[int, int]:
    """Return a GEMM's numbers of tiles and waves, assuming the tile that large GEMMs get."""
    tile_rows, tile_columns = large_tile(machine.generation, gemm.dtype)
    tiles = gemm.batch * ceil_div(gemm.m, tile_rows) * ceil_div(gemm.n, tile_columns)
    return int(tiles), int(ceil_div(tiles, machine.sms))
