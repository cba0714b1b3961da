"""Speed of each GPU compared with the others, by kind of anchor, and interference between GPUs.

A GPU's speed in a kind of anchor is the median over the anchors of its log speed relative to the
fleet's median. The 95% interval reaches 1.96 standard errors to either side. The error has three
parts, which are added as variances:

1. how much the anchors of one GPU disagree (by the median absolute deviation, which a faulty GPU
   does not move), or what their own intervals say if that is more;
2. how much a GPU's speed changes from one time to the next, by the change of its bursts between
   both phases compared with its node's other GPUs; where hardly any GPU was timed twice, an
   assumption;
3. how well the median of so many GPUs is known.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import median_abs_deviation

from analysis.fleet.anchors import KINDS, SENSORS, Array, Fleet
from sweeps.schema import PHASES
from sweeps.timing.statistics import TOLERANCE, Z95

MIN_GPUS = 3
"""Number of GPUs from which on a median shows which one is slow."""

_MIN_SPREAD = 8  # GPUs from which on a standard deviation is meaningful
_ALONE, _TOGETHER = range(len(PHASES))
_ASSUMED = 0.005  # the standard deviation of a log speed between two times if none was measured
_ASSUMED_AS = 2  # number of GPUs timed twice that the assumption counts as
_OF_MEDIANS = math.pi / 2  # variance of the median of normal values over that of their mean
_FAR = 3.5  # standard deviations: values further out do not count towards a spread
_MAD = 1.4826  # standard deviation of normal values over the median of their absolute values
_MANY = 6  # anchors of one GPU from which on their deviation is meaningful


@dataclass(frozen=True)
class AnchorSpeeds:
    """Speeds in one kind of anchor, one value per device; NaN where a value is not known.

    Attributes:
        log: logarithm of the speed over the fleet's median.
        half: half the width of its 95% interval.
        variance: variance of the device's own measurement.
        clock: logarithm of its SM clock over the fleet's median.
        sensors: median reading of each sensor.
        throttled: for each reason, True where the device reported it.
    """

    log: Array
    half: Array
    variance: Array
    clock: Array
    sensors: Mapping[str, Array]
    throttled: Mapping[str, NDArray[np.bool_]]

    @property
    def speed(self) -> Array:
        """Speed over the fleet's median."""
        return np.exp(self.log)

    @property
    def lo(self) -> Array:
        """Lower end of the speed's interval."""
        return np.exp(self.log - self.half)

    @property
    def hi(self) -> Array:
        """Upper end of the speed's interval."""
        return np.exp(self.log + self.half)

    def beyond(self, margin: float) -> NDArray[np.bool_]:
        """Return, per device, whether its whole interval is more than a margin below the median."""
        return self.hi < 1 - margin  # False for NaN


@dataclass(frozen=True)
class SpeedChange:
    """A ratio of times with its 95% interval.

    ``slowed`` is True if the times are longer, beyond the interval and by more than 1%.
    """

    ratio: float
    lo: float
    hi: float
    slowed: bool


@dataclass(frozen=True)
class Interference:
    """Ratio of times with all GPUs of a node at work to times of one GPU that works alone.

    ``all`` is the ratio over all anchors. ``kinds`` has the ratio of each kind that was timed both
    ways.
    """

    node: int | None
    all: SpeedChange
    kinds: Mapping[str, SpeedChange]


@dataclass(frozen=True)
class FleetSpeeds:
    """Speeds of a fleet by kind of anchor.

    Attributes:
        kinds: speeds by kind, without kinds that no device has.
        overall: the kind that stands for a GPU's speed. It is sustained compute, which is what a
            job sees, or else the next kind that most GPUs have.
        spread: standard deviation between GPUs in that kind, without the noise of measuring; NaN if
            there are few GPUs.
        interference: what the GPUs of each node do to each other.
    """

    kinds: Mapping[str, AnchorSpeeds]
    overall: str
    spread: float
    interference: tuple[Interference, ...]


def fleet_speeds(fleet: Fleet) -> FleetSpeeds:
    """Compute the speeds of all devices; if there are two, relative to the middle between them."""
    time_deviation = _deviation_between_times(fleet)
    phase = _phases(fleet)
    # 1. Compute the speeds in each kind. Bursts come first, because kinds with a single anchor use
    #    their scatter.
    speeds: dict[str, AnchorSpeeds] = {}
    burst_scatter = math.nan
    for kind in ("burst", *(kind for kind in KINDS if kind != "burst")):
        speeds_and_scatter = _speeds(fleet, kind, phase, time_deviation, burst_scatter)
        if speeds_and_scatter is not None:
            speeds[kind], scatter = speeds_and_scatter
            if kind == "burst":
                burst_scatter = scatter
    kinds = {kind: speeds[kind] for kind in KINDS if kind in speeds}
    # 2. Choose the first kind that at least half of the devices have, or else any.
    known_counts = {kind: int(np.isfinite(kinds[kind].log).sum()) for kind in kinds}
    usual = [kind for kind, known in known_counts.items() if 2 * known >= len(fleet.devices)]
    overall = next(iter(usual or kinds), "")
    # 3. Estimate how much the devices differ in it.
    spread = math.nan
    if overall and known_counts[overall] >= _MIN_SPREAD:
        spread = _spread(kinds[overall].log, kinds[overall].variance)
    return FleetSpeeds(kinds, overall, spread, _interference(fleet, time_deviation))


def median_of(values: Array, axis: int = 0) -> Array:
    """Return the medians of the known values; NaN where none is known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # raised by slices without a known value
        return np.asarray(np.nanmedian(values, axis=axis))


def deviation_of(values: Array) -> float:
    """Estimate the standard deviation of normal values from their median absolute deviation.

    It is NaN if no value is known.
    """
    known = values[np.isfinite(values)]
    return float(median_abs_deviation(known, scale="normal")) if len(known) else math.nan


def _spread(values: Array, noise: Array) -> float:
    """Return the standard deviation of what values measure, without measurement noise.

    Values more than 3.5 standard deviations from the median, by the median absolute deviation, do
    not count.

    Args:
        values: the measured values.
        noise: variance of the noise of each value.
    """
    known = np.isfinite(values) & np.isfinite(noise)
    if not known.any():
        return math.nan
    # Nearly equal values differ by at least their noise.
    typical_noise = float(np.sqrt(np.median(noise[known])))
    limit = _FAR * max(deviation_of(values[known]), typical_noise)
    counted = known & (np.abs(values - median_of(values)) <= limit)
    if counted.sum() < 2:
        return math.nan
    variance = float(np.var(values[counted], ddof=1)) - float(np.mean(noise[counted]))
    return math.sqrt(max(0.0, variance))  # the values may differ less than their noise by chance


@dataclass(frozen=True)
class _Medians:
    """Median of each row of a table, and its variance.

    ``scatter`` is the standard deviation of a single value around its row's median.
    """

    median: Array
    variance: Array
    scatter: float


def _medians(values: Array, errors: Array, scatter: float = math.nan) -> _Medians:
    """Return medians over the columns of (rows, columns); NaN stands for unknown values.

    Args:
        values: one row per device or node.
        errors: the standard error of each value.
        scatter: the standard deviation of a single value around its row's median, used if every row
            has only one value. Otherwise it is estimated from all rows, or from the row itself if
            that is more.
    """
    # 1. The median of each row, and the distance of its values from it.
    count = np.isfinite(values).sum(axis=1).astype(float)
    count[count == 0] = np.nan
    medians = median_of(values, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        # The median of few values lies closer to them than the centre of their distribution.
        residuals = (values - medians[:, None]) * np.sqrt(count / (count - 1))[:, None]
    # 2. The scatter of single values, from all rows together. A row of many values may scatter
    #    more.
    has_several = count > 1
    if has_several.any():
        scatter = _deviation_from_zero(residuals[has_several])
    deviations = np.full(len(values), scatter)
    for i in np.flatnonzero(count >= _MANY):
        deviations[i] = max(scatter, _deviation_from_zero(residuals[i]))
    # 3. The variance of the medians. Values scatter at least as much as their errors say. The
    #    median of one or two values is their mean.
    row_errors = np.sqrt(median_of(errors**2, axis=1))
    variance_factor = np.where(count > 2, _OF_MEDIANS, 1.0) / count
    variance = np.fmax(deviations, row_errors) ** 2 * variance_factor
    return _Medians(medians, variance, scatter)


def _deviation_from_zero(values: Array) -> float:
    """Estimate the standard deviation of normal values around 0 from the median of their sizes."""
    return _MAD * float(np.median(np.abs(values[np.isfinite(values)])))


def _phases(fleet: Fleet) -> NDArray[np.intp]:
    """Choose the phase from which each device's time of each anchor is taken.

    All devices should be compared in one state. If devices timed an anchor in both phases, the
    phase is the one that more devices have, and the phase "alone" in a tie. If a device timed the
    anchor in one phase only, that phase is taken.

    Returns:
        Numbers of phases, of shape (1, devices, anchors).
    """
    is_timed = np.isfinite(fleet.log_time)
    device_counts = is_timed.sum(axis=1)  # of shape (phases, anchors)
    common_phase = np.where(device_counts[_TOGETHER] > device_counts[_ALONE], _TOGETHER, _ALONE)
    own_phase = np.where(is_timed[_TOGETHER], _TOGETHER, _ALONE)
    timed_twice = is_timed.all(axis=0).any(axis=0)  # by any device, for each anchor
    chosen = np.where(timed_twice, common_phase, own_phase)
    with_phase_axis: NDArray[np.intp] = chosen[np.newaxis].astype(np.intp)
    return with_phase_axis


def _speeds(
    fleet: Fleet, kind: str, phase: NDArray[np.intp], time_deviation: float, scatter: float
) -> tuple[AnchorSpeeds, float] | None:
    """Return the speeds in a kind of anchor and the scatter of its anchors; None if it has none.

    A kind with a single anchor has no scatter of its own and takes ``scatter``.

    Args:
        fleet: the times of all anchors.
        kind: the kind of anchor.
        phase: phase that counts for each device and anchor, from :func:`_phases`.
        time_deviation: standard deviation of a log speed between two times.
        scatter: standard deviation of the log ratios of a device's anchors in another kind.
    """
    # 1. Take each device's times in its phase, without anchors that few devices have.
    anchors = np.flatnonzero(fleet.kinds == kind)

    def taken(array: NDArray[Any]) -> Any:
        """Return this kind's values, of shape (devices, anchors), each in its phase."""
        return np.take_along_axis(array, phase, axis=0)[0][:, anchors]

    log_times, errors = taken(fleet.log_time), taken(fleet.error)
    device_count = len(fleet.devices)
    # An anchor that few devices have says nothing about the others.
    is_sparse = np.isfinite(log_times).sum(axis=0) < max(2, min(MIN_GPUS, device_count))
    log_times[:, is_sparse] = np.nan
    if is_sparse.all():
        return None
    # 2. Compare two devices with each other, and more devices with the fleet's median. The speed
    #    of a device is that of its median anchor.
    if device_count == 2:
        # Half of the difference of two devices is above the middle between them, half below.
        medians = _medians(log_times[1:] - log_times[:1], np.hypot(*errors)[None], scatter)
        log_speed = np.array([0.5, -0.5]) * medians.median
        variance = np.repeat(medians.variance / 2 + time_deviation**2, 2)
        halves = np.repeat(Z95 * np.sqrt(medians.variance + 2 * time_deviation**2) / 2, 2)
    else:
        medians = _medians(median_of(log_times) - log_times, errors, scatter)
        log_speed = medians.median - float(median_of(medians.median))
        variance = medians.variance + time_deviation**2
        halves = Z95 * np.sqrt(variance + _median_variance(log_speed, variance))
    # 3. Summarise the sensors, relative to the fleet for the clock.
    sensors = {name: taken(fleet.sensors[name]) for name in SENSORS}
    log_clocks = np.log(sensors["sm_mhz"])
    speeds = AnchorSpeeds(
        log=log_speed,
        half=halves,
        variance=variance,
        clock=median_of(log_clocks - median_of(log_clocks), axis=1),
        sensors={name: median_of(values, axis=1) for name, values in sensors.items()},
        throttled={
            reason: taken(is_reported).any(axis=1)
            for reason, is_reported in fleet.throttled.items()
        },
    )
    return speeds, medians.scatter


def _median_variance(log: Array, variance: Array) -> float:
    """Return the variance of the median of the devices' speeds.

    The formula holds for many normal values. The result is never more than one device's variance.
    """
    of_one_device = float(median_of(variance))
    # The speeds scatter by what the devices differ, and at least by the noise of measuring.
    scatter = np.fmax(deviation_of(log) ** 2, of_one_device)
    count = int(np.isfinite(log).sum())
    return float(np.fmin(of_one_device, _OF_MEDIANS * scatter / count))


def _changes(fleet: Fleet, anchors: NDArray[np.bool_]) -> tuple[Array, Array]:
    """Return the log ratio of times in parallel to times alone, and its standard error.

    Both have the shape (devices, anchors).
    """
    logs, errors = fleet.log_time[:, :, anchors], fleet.error[:, :, anchors]
    return logs[_TOGETHER] - logs[_ALONE], np.hypot(errors[_ALONE], errors[_TOGETHER])


def _groups(fleet: Fleet) -> dict[int | None, NDArray[np.intp]]:
    """Return the positions of each node's devices, in the order in which the nodes appear."""
    nodes = [device.node for device in fleet.devices]
    return {
        node: np.array([i for i, other in enumerate(nodes) if other == node])
        for node in dict.fromkeys(nodes)
    }


def _deviation_between_times(fleet: Fleet) -> float:
    """Return the standard deviation by which a device's speed differs from one time to the next.

    It comes from the change of a device's bursts from one phase to the other, compared with the
    other devices of its node. That difference has the errors of both times. An assumed value counts
    as two devices.
    """
    # 1. The change of each device, compared with the median of its node.
    changes, errors = _changes(fleet, fleet.kinds == "burst")
    medians = _medians(changes, errors)
    residuals = np.full(len(changes), np.nan)
    compared_nodes = 0
    for members in _groups(fleet).values():
        of_node = medians.median[members]
        if np.isfinite(of_node).sum() > 1:
            residuals[members] = of_node - median_of(of_node)
            compared_nodes += 1
    # 2. Combine the squared deviations of these devices with the assumed one. One median was
    #    subtracted per node, and a difference has the errors of two times.
    count = int(np.isfinite(residuals).sum())
    degrees = count - compared_nodes
    squares, weight = _ASSUMED_AS * _ASSUMED**2, _ASSUMED_AS
    if degrees > 0:
        noise = medians.variance * degrees / count
        squares += count * _spread(residuals, noise) ** 2 / 2
        weight += degrees
    return math.sqrt(squares / weight)


def _interference(fleet: Fleet, time_deviation: float) -> tuple[Interference, ...]:
    """Return how much longer anchors take on each node while all of its devices work."""
    # 1. The changes of each node over all anchors, and in each kind that was timed both ways.
    every_anchor = np.full(len(fleet.kinds), True)
    over_all = _node_changes(fleet, every_anchor, time_deviation)
    if over_all is None:
        return ()
    by_kind: dict[str, list[SpeedChange]] = {}
    for kind in KINDS:
        changes = _node_changes(fleet, fleet.kinds == kind, time_deviation)
        if changes is not None:
            by_kind[kind] = changes
    # 2. Keep the nodes that were timed both ways; the ratio of the others is NaN.
    interference = []
    for i, node in enumerate(_groups(fleet)):
        if not math.isnan(over_all[i].ratio):
            kinds = {
                kind: changes[i]
                for kind, changes in by_kind.items()
                if not math.isnan(changes[i].ratio)
            }
            interference.append(Interference(node, over_all[i], kinds))
    return tuple(interference)


def _node_changes(
    fleet: Fleet, anchors: NDArray[np.bool_], time_deviation: float
) -> list[SpeedChange] | None:
    """Return how much longer some anchors take on each node while all of its devices work.

    The result is None if no device timed them both ways; the ratio of a node where none did is NaN.
    """
    changes, device_errors = _changes(fleet, anchors)
    if not np.isfinite(changes).any():
        return None
    groups = _groups(fleet).values()
    # A node's change in an anchor is the median over its devices.
    of_nodes = np.array([median_of(changes[members]) for members in groups])
    errors = np.array([_error_of_median(device_errors[members]) for members in groups])
    medians = _medians(of_nodes, errors)
    counts = np.array([len(members) for members in groups])
    # Each device's speed may also change from one of the two times to the other.
    variance = medians.variance + _OF_MEDIANS * 2 * time_deviation**2 / counts
    half = Z95 * np.sqrt(variance)
    ratio = np.exp(medians.median)
    lo = np.exp(medians.median - half)
    hi = np.exp(medians.median + half)
    slowed = (ratio > 1 + TOLERANCE) & (lo > 1)
    columns = (ratio.tolist(), lo.tolist(), hi.tolist(), slowed.tolist())
    return [SpeedChange(*row) for row in zip(*columns, strict=True)]


def _error_of_median(errors: Array) -> Array:
    """Return the standard error of each anchor's median over a node's devices."""
    count = np.isfinite(errors).sum(axis=0)
    squares = _OF_MEDIANS * np.nansum(errors**2, axis=0)
    return np.sqrt(np.divide(squares, count**2, out=np.full(len(count), np.nan), where=count > 0))
