"""How fast each GPU is compared with the others, kind by kind of anchor, and how GPUs interfere.

A GPU's speed in a kind of anchor is the median over the anchors of its log speed relative to the
fleet's median. Its 95% interval is 1.96 standard errors of three parts, added as variances:

1. how much anchors of one GPU disagree (by the median absolute deviation, which a sick GPU does not
   move), or what their own intervals say if that is more;
2. how much a GPU's speed changes from one time to the next, by what its bursts changed between both
   phases compared with its node's other GPUs; where hardly any GPU was timed twice, an assumption;
3. how well the median of so many GPUs is known.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import median_abs_deviation

from analysis.fleet.anchors import KINDS, SENSORS, Array, Fleet
from sweeps.schema import PHASES
from sweeps.timing.statistics import TOLERANCE, Z95

MIN_GPUS = 3
"""Of fewer, a median does not say which one is slow."""

_MIN_SPREAD = 8  # GPUs, of which a standard deviation says something
_ALONE, _TOGETHER = range(len(PHASES))
_ASSUMED = 0.005  # standard deviation of a log speed between two times, if none was measured
_ASSUMED_AS = 2  # as many GPUs timed twice as that counts for
_OF_MEDIANS = math.pi / 2  # variance of the median of normal values over that of their mean
_FAR = 3.5  # standard deviations: values further out do not count towards a spread
_MAD = 1.4826  # standard deviations in the median of absolute values of a normal law
_MANY = 6  # anchors of one GPU, of which a deviation says something of that GPU


@dataclass(frozen=True)
class AnchorSpeeds:
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
class SpeedChange:
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
    all: SpeedChange
    kinds: Mapping[str, SpeedChange]


@dataclass(frozen=True)
class FleetSpeeds:
    """The speeds by kind, those with no device left out; ``overall`` is the kind that a GPU's one
    speed is of: sustained compute, which is what a job sees, or the next that most GPUs have.

    ``spread`` is the standard deviation between GPUs of that, without the noise of measuring; NaN
    of few GPUs.
    """

    kinds: Mapping[str, AnchorSpeeds]
    overall: str
    spread: float
    interference: tuple[Interference, ...]


def fleet_speeds(fleet: Fleet) -> FleetSpeeds:
    """The speeds of all devices; of two, relative to the middle between them."""
    again = _between_times(fleet)
    phase = _phases(fleet)
    kinds: dict[str, AnchorSpeeds] = {}
    scatter = math.nan
    for kind in sorted(KINDS, key=lambda kind: kind != "burst"):  # whose scatter single anchors use
        found = _speeds(fleet, kind, phase, again, scatter)
        if found is not None:
            kinds[kind], own_scatter = found
            scatter = own_scatter if kind == "burst" else scatter
    kinds = {kind: kinds[kind] for kind in KINDS if kind in kinds}
    count = len(fleet.devices)
    usual = [kind for kind in kinds if np.isfinite(kinds[kind].log).sum() * 2 >= count]
    overall = next(iter(usual or kinds), "")
    between = math.nan
    if overall and np.isfinite(kinds[overall].log).sum() >= _MIN_SPREAD:
        between = _spread(kinds[overall].log, kinds[overall].variance)
    return FleetSpeeds(kinds, overall, between, _interference(fleet, again))


def median_of(values: Array, axis: int = 0) -> Array:
    """Medians of what is known; NaN where nothing is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of slices in which nothing is known
        return np.asarray(np.nanmedian(values, axis=axis))


def deviation_of(values: Array) -> float:
    """Standard deviation of normal values with this median absolute deviation; NaN of none."""
    known = values[np.isfinite(values)]
    return float(median_abs_deviation(known, scale="normal")) if len(known) else math.nan


def _spread(values: Array, noise: Array) -> float:
    """Standard deviation of what values measure, without the variance that they are measured with.

    Values beyond 3.5 standard deviations, by the median absolute deviation, do not count.
    """
    known = np.isfinite(values) & np.isfinite(noise)
    if not known.any():
        return math.nan
    far = _FAR * max(deviation_of(values[known]), float(np.sqrt(np.median(noise[known]))))
    near = known & (np.abs(values - median_of(values)) <= far)
    if near.sum() < 2:
        return math.nan
    variance = float(np.var(values[near], ddof=1)) - float(np.mean(noise[near]))
    return math.sqrt(max(0.0, variance))


@dataclass(frozen=True)
class _Medians:
    """The median of each row of a table and its variance; ``scatter`` is a single value's."""

    median: Array
    variance: Array
    scatter: float


def _medians(values: Array, own: Array, scatter: float = math.nan) -> _Medians:
    """Medians over the columns of (rows, columns), NaN for what is not known.

    Args:
        values: one row per device or node.
        own: the standard error of each value.
        scatter: the standard deviation of a single value around its row's median, where all rows
            have just one; otherwise it is that of all rows, or of the row itself if that is more.
    """
    count = np.isfinite(values).sum(axis=1).astype(float)
    count[count == 0] = np.nan
    middle = median_of(values, axis=1)
    several = count > 1
    with np.errstate(invalid="ignore", divide="ignore"):
        # A median lies nearer to few values than to the middle of their law.
        apart = (values - middle[:, None]) * np.sqrt(count / (count - 1))[:, None]
    if several.any():
        scatter = _deviation_from_zero(apart[several])
    each = np.full(len(values), scatter)
    for i in np.flatnonzero(count >= _MANY):
        each[i] = max(scatter, _deviation_from_zero(apart[i]))
    own_each = np.sqrt(median_of(own**2, axis=1))
    share = np.where(count > 2, _OF_MEDIANS, 1.0) / count
    return _Medians(middle, np.fmax(each, own_each) ** 2 * share, scatter)


def _deviation_from_zero(values: Array) -> float:
    """Standard deviation of normal values around 0 with this median of absolute values."""
    return _MAD * float(np.median(np.abs(values[np.isfinite(values)])))


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
    fleet: Fleet, kind: str, phase: NDArray[np.intp], again: float, scatter: float
) -> tuple[AnchorSpeeds, float] | None:
    """The speeds of a kind, and the scatter of its anchors; None if it has none.

    A kind of a single anchor, which has no scatter of its own, takes ``scatter``.
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
        found = _medians(logs[1:] - logs[:1], np.hypot(*own)[None], scatter)
        log = np.array([0.5, -0.5]) * found.median
        variance = np.repeat(found.variance / 2 + again**2, 2)
        halves = np.repeat(Z95 * np.sqrt(found.variance + 2 * again**2) / 2, 2)
    else:
        found = _medians(median_of(logs) - logs, own, scatter)
        log = found.median - float(median_of(found.median))
        variance = found.variance + again**2
        halves = Z95 * np.sqrt(variance + _median_variance(log, variance))
    sensors = {name: taken(fleet.sensors[name]) for name in SENSORS}
    clocks = np.log(sensors["sm_mhz"])
    return AnchorSpeeds(
        log=log,
        half=halves,
        variance=variance,
        clock=median_of(clocks - median_of(clocks), axis=1),
        sensors={name: median_of(values, axis=1) for name, values in sensors.items()},
        throttled={
            reason: np.take_along_axis(seen, phase, axis=0)[0][:, of].any(axis=1)
            for reason, seen in fleet.throttled.items()
        },
    ), found.scatter


def _median_variance(log: Array, variance: Array) -> float:
    """Variance of the median of the devices' speeds: as of many normal values, but never more than
    that of one device.
    """
    one = float(median_of(variance))
    count = int(np.isfinite(log).sum())
    return float(np.fmin(one, _OF_MEDIANS * np.fmax(deviation_of(log) ** 2, one) / count))


def _changes(fleet: Fleet, of: NDArray[np.bool_]) -> tuple[Array, Array]:
    """Log time together over alone, (devices, anchors), and its standard error."""
    logs, own = fleet.log_time[:, :, of], fleet.error[:, :, of]
    return logs[_TOGETHER] - logs[_ALONE], np.hypot(own[_ALONE], own[_TOGETHER])


def _groups(fleet: Fleet) -> dict[int | None, NDArray[np.intp]]:
    """The devices of each node, in the nodes' order."""
    nodes = [device.node for device in fleet.devices]
    return {
        node: np.array([i for i, other in enumerate(nodes) if other == node])
        for node in dict.fromkeys(nodes)
    }


def _between_times(fleet: Fleet) -> float:
    """Standard deviation by which a device's speed differs from one time to the next.

    By what its bursts changed from one phase to the other compared with the others of its node; the
    difference has the error of both times. The assumption counts as two devices.
    """
    changes, own = _changes(fleet, fleet.kinds == "burst")
    found = _medians(changes, own)
    rest = np.full(len(changes), np.nan)
    nodes = 0
    for members in _groups(fleet).values():
        if np.isfinite(found.median[members]).sum() > 1:
            rest[members] = found.median[members] - median_of(found.median[members])
            nodes += 1
    count = int(np.isfinite(rest).sum())
    known = count - nodes
    squares, total = _ASSUMED_AS * _ASSUMED**2, _ASSUMED_AS
    if known > 0:
        # As many medians were taken off as there are nodes; a difference has two times' errors.
        squares += count * _spread(rest, found.variance * known / count) ** 2 / 2
        total += known
    return math.sqrt(squares / total)


def _interference(fleet: Fleet, again: float) -> tuple[Interference, ...]:
    """How much longer anchors take on each node while all of its devices work."""
    groups = _groups(fleet)
    counts = np.array([len(members) for members in groups.values()])
    tables = {}
    for kind in ("", *KINDS):
        changes, own = _changes(fleet, (fleet.kinds == kind) | (kind == ""))
        if not np.isfinite(changes).any():
            continue
        of_nodes = np.array([median_of(changes[members]) for members in groups.values()])
        errors = np.array([_error_of_median(own[members]) for members in groups.values()])
        found = _medians(of_nodes, errors)
        half = Z95 * np.sqrt(found.variance + _OF_MEDIANS * 2 * again**2 / counts)
        ratio, lo, hi = (np.exp(found.median + sign * half) for sign in (0, -1, 1))
        slowed = (ratio > 1 + TOLERANCE) & (lo > 1)
        columns = (array.tolist() for array in (ratio, lo, hi, slowed))
        tables[kind] = [SpeedChange(*row) for row in zip(*columns, strict=True)]
    if "" not in tables:
        return ()
    return tuple(
        Interference(
            node,
            tables[""][i],
            {
                kind: rows[i]
                for kind, rows in tables.items()
                if kind and not math.isnan(rows[i].ratio)
            },
        )
        for i, node in enumerate(groups)
        if not math.isnan(tables[""][i].ratio)
    )


def _error_of_median(own: Array) -> Array:
    """Of each anchor's median over a node's devices."""
    count = np.isfinite(own).sum(axis=0)
    squares = _OF_MEDIANS * np.nansum(own**2, axis=0)
    return np.sqrt(np.divide(squares, count**2, out=np.full(len(count), np.nan), where=count > 0))
