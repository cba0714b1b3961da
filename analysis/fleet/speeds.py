"""How fast each GPU is beside the others, kind by kind of anchor, and what they do to one another.

Speeds are logarithms relative to the fleet's median, and their intervals have three parts: how much
a GPU's anchors disagree, or what their own intervals say if that is more; how much a GPU's speed
changes from one time to the next, by what its bursts changed between both phases beyond its node's
others (where hardly any GPU was timed twice, what is assumed); and how well the median of so many
GPUs is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analysis.fleet.anchors import KINDS, SENSORS, Fleet
from analysis.fleet.robust import Array, centres, deviation, middle, spread
from sweeps.schema import PHASES
from sweeps.timing.statistics import TOLERANCE

MIN_GPUS = 3
"""Of fewer, a median does not say which one is slow."""

_MIN_SPREAD = 8  # GPUs, of which a standard deviation says something
_ALONE, _TOGETHER = range(len(PHASES))
_ASSUMED = 0.005  # standard deviation of a log speed between two times, if none was measured
_ASSUMED_AS = 2  # as many GPUs timed twice as that counts for
_TURNS = 4  # of taking medians off rows and columns by turns; later ones change nothing
_OF_MEDIANS = math.pi / 2  # variance of normal values' median over that of their mean


@dataclass(frozen=True)
class Speeds:
    """Of one kind of anchor, a value for each device; NaN where it is not known.

    ``log`` is the logarithm of the speed over the fleet's median, ``half`` the half width of its
    95 % interval, ``variance`` that of the device's own measurement, and ``clock`` the logarithm of
    its SM clock over the fleet's median; the sensors' medians are as recorded.
    """

    log: Array
    half: Array
    variance: Array
    clock: Array
    sensors: Mapping[str, Array]
    throttled: Mapping[str, NDArray[np.bool_]]

    @property
    def speed(self) -> Array:
        """Over the fleet's median."""
        return np.exp(self.log)

    @property
    def lo(self) -> Array:
        """Lower end of its interval."""
        return np.exp(self.log - self.half)

    @property
    def hi(self) -> Array:
        """Upper end."""
        return np.exp(self.log + self.half)

    def beyond(self, margin: float) -> NDArray[np.bool_]:
        """Which devices' whole interval lies further below the median than a margin."""
        return self.hi < 1 - margin  # of NaN, False


@dataclass(frozen=True)
class Change:
    """A ratio of times with its 95 % interval, and whether they are longer beyond that and by more
    than 1 %.
    """

    ratio: float
    lo: float
    hi: float
    slowed: bool


@dataclass(frozen=True)
class Interference:
    """What anchors take while all GPUs of a node work, over what they take alone: all of them, and
    each kind that has both.
    """

    node: int | None
    all: Change
    kinds: Mapping[str, Change]


@dataclass(frozen=True)
class FleetSpeeds:
    """The speeds by kind, those with no device left out; ``overall`` is the kind that a GPU's one
    speed is of: sustained compute, which is what a job sees, or the next that most GPUs have.

    ``spread`` is the standard deviation between GPUs of that, without the noise of measuring; NaN
    of few GPUs.
    """

    kinds: Mapping[str, Speeds]
    overall: str
    spread: float
    interference: tuple[Interference, ...]


def fleet_speeds(fleet: Fleet) -> FleetSpeeds:
    """The speeds of all devices; of two, relative to the middle between them."""
    again = _between_times(fleet)
    phase = _phases(fleet)
    kinds: dict[str, Speeds] = {}
    borrowed = math.nan
    for kind in sorted(KINDS, key=lambda kind: kind != "burst"):  # it lends the others its scatter
        found = _speeds(fleet, kind, phase, again, borrowed)
        if found is not None:
            kinds[kind], lent = found
            borrowed = lent if kind == "burst" else borrowed
    kinds = {kind: kinds[kind] for kind in KINDS if kind in kinds}
    count = len(fleet.devices)
    usual = [kind for kind in kinds if np.isfinite(kinds[kind].log).sum() * 2 >= count]
    overall = next(iter(usual or kinds), "")
    between = math.nan
    if overall and np.isfinite(kinds[overall].log).sum() >= _MIN_SPREAD:
        between = spread(kinds[overall].log, kinds[overall].variance)
    return FleetSpeeds(kinds, overall, between, _interference(fleet, again))


def _phases(fleet: Fleet) -> NDArray[np.intp]:
    """The phase that each device's time of each anchor is taken from: (1, devices, anchors).

    Where devices timed an anchor in both, that which most did, alone if as many; so all are
    compared in one state. Otherwise the one that there is.
    """
    has = np.isfinite(fleet.log_time)
    counts = has.sum(axis=1)
    most = np.where(counts[_TOGETHER] > counts[_ALONE], _TOGETHER, _ALONE)
    both = has.all(axis=0).any(axis=0)
    own = np.where(has[_TOGETHER], _TOGETHER, _ALONE)
    chosen: NDArray[np.intp] = np.where(both, most, own)[None].astype(np.intp)
    return chosen


def _speeds(
    fleet: Fleet, kind: str, phase: NDArray[np.intp], again: float, borrowed: float
) -> tuple[Speeds, float] | None:
    """The speeds of a kind, and the variance that its anchors scatter with; None if it has none.

    A kind of a single anchor, which has no scatter, borrows that of anchors in bursts.
    """
    of = np.flatnonzero(fleet.kinds == kind)

    def taken(array: Array) -> Array:
        return np.take_along_axis(array, phase, axis=0)[0][:, of]

    logs, own = taken(fleet.log_time), taken(fleet.error)
    count = len(fleet.devices)
    # What few have says nothing of the others.
    few = np.isfinite(logs).sum(axis=0) < max(2, min(MIN_GPUS, count))
    logs[:, few] = np.nan
    if few.all():
        return None
    if count == 2:
        found = centres(logs[1:] - logs[:1], np.hypot(*own)[None], lent=borrowed)
        log = np.array([0.5, -0.5]) * found.centre
        variance = np.repeat(found.variance / 2 + again**2, 2)
        halves = np.repeat(found.half_width(2 * again**2) / 2, 2)
    else:
        found = centres(_relative(logs), own, count, borrowed)
        log = found.centre - np.nanmedian(found.centre)
        variance = found.variance + again**2
        halves = found.half_width(again**2 + _median_variance(log, variance))
    sensors = {name: taken(fleet.sensors[name]) for name in SENSORS}
    clocks = np.log(sensors["sm_mhz"])
    return Speeds(
        log=log,
        half=halves,
        variance=variance,
        clock=middle(clocks - middle(clocks), axis=1),
        sensors={name: middle(values, axis=1) for name, values in sensors.items()},
        throttled={
            reason: np.take_along_axis(seen, phase, axis=0)[0][:, of].any(axis=1)
            for reason, seen in fleet.throttled.items()
        },
    ), found.each


def _relative(logs: Array) -> Array:
    """Log speeds relative to each anchor's median over the devices: (devices, anchors).

    The devices' own levels are taken off before the median, by turns, so that a device without
    some anchors does not move it (J. Tukey, "Exploratory Data Analysis", 1977, median polish).
    """
    level = np.zeros(len(logs))
    for _ in range(_TURNS):
        anchor = middle(logs - np.where(np.isfinite(level), level, 0.0)[:, None])
        level = middle(logs - anchor, axis=1)
        level = level - np.nanmedian(level)
    return anchor - logs


def _median_variance(log: Array, variance: Array) -> float:
    """Of the median of the devices' speeds: as of many normal values, but never more than one
    device's own.
    """
    one = float(np.nanmedian(variance)) if np.isfinite(variance).any() else math.nan
    count = int(np.isfinite(log).sum())
    return float(np.fmin(one, _OF_MEDIANS * np.fmax(deviation(log) ** 2, one) / count))


def _changes(fleet: Fleet, of: NDArray[np.bool_]) -> tuple[Array, Array]:
    """Log time together over alone, (devices, anchors), and its standard error."""
    logs, own = fleet.log_time[:, :, of], fleet.error[:, :, of]
    return logs[_TOGETHER] - logs[_ALONE], np.hypot(own[_ALONE], own[_TOGETHER])


def _groups(fleet: Fleet) -> dict[int | None, NDArray[np.intp]]:
    """The devices of each node, in the nodes' order."""
    nodes = [device.node for device in fleet.devices]
    return {node: np.array([i for i, other in enumerate(nodes) if other == node])
            for node in dict.fromkeys(nodes)}  # fmt: skip


def _between_times(fleet: Fleet) -> float:
    """Standard deviation by which a device's speed differs from one time to the next.

    By what its bursts changed from one phase to the other beyond the others of its node, which has
    the error of both times. What is assumed counts as two devices.
    """
    changes, own = _changes(fleet, fleet.kinds == "burst")
    found = centres(changes, own)
    left = np.full(len(changes), np.nan)
    nodes = 0
    for members in _groups(fleet).values():
        if np.isfinite(found.centre[members]).sum() > 1:
            left[members] = found.centre[members] - middle(found.centre[members])
            nodes += 1
    df = int(np.isfinite(left).sum()) - nodes
    measured = spread(left, found.variance, nodes) ** 2 / 2
    squares = _ASSUMED_AS * _ASSUMED**2 + (0.0 if math.isnan(measured) else df * measured)
    return math.sqrt(squares / (_ASSUMED_AS + (0 if math.isnan(measured) else df)))


def _interference(fleet: Fleet, again: float) -> tuple[Interference, ...]:
    """Of every node whose devices timed anchors alone and together."""
    groups = _groups(fleet)
    counts = np.array([len(members) for members in groups.values()])
    tables = {}
    for kind in ("", *KINDS):
        changes, own = _changes(fleet, (fleet.kinds == kind) | (kind == ""))
        if not np.isfinite(changes).any():
            continue
        of_nodes = np.array([middle(changes[members]) for members in groups.values()])
        errors = np.array([_error_of_median(own[members]) for members in groups.values()])
        found = centres(of_nodes, errors)
        half = found.half_width(_OF_MEDIANS * 2 * again**2 / counts)
        ratio, lo, hi = (np.exp(found.centre + sign * half) for sign in (0, -1, 1))
        slowed = (ratio > 1 + TOLERANCE) & (lo > 1)
        columns = (array.tolist() for array in (ratio, lo, hi, slowed))
        tables[kind] = [Change(*row) for row in zip(*columns, strict=True)]
    if "" not in tables:
        return ()
    return tuple(
        Interference(node, tables[""][i],
                     {kind: rows[i] for kind, rows in tables.items()
                      if kind and not math.isnan(rows[i].ratio)})
        for i, node in enumerate(groups) if not math.isnan(tables[""][i].ratio)
    )  # fmt: skip


def _error_of_median(own: Array) -> Array:
    """Of each anchor's median over a node's devices."""
    count = np.isfinite(own).sum(axis=0)
    squares = _OF_MEDIANS * np.nansum(own**2, axis=0)
    return np.sqrt(np.divide(squares, count**2, out=np.full(len(count), np.nan), where=count > 0))
