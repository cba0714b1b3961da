"""Compute the speed of each GPU relative to the others, and the interference between GPUs.

Anchors (:mod:`analysis.fleet.anchors`) are timed in two phases. In the phase ``alone``, one GPU of
a node works at a time. In the phase ``together``, all GPUs of a node work in parallel. In each
anchor, a GPU's log speed is compared with the fleet's median log speed. The median difference over
the anchors of a kind is the GPU's relative log speed in that kind. The relative log speeds are then
shifted so that their median over all GPUs is 0. The 95% interval of a relative log speed reaches
1.96 standard errors to either side. The standard error has three sources, which are treated as
independent, so their variances are added:

1. The anchors of one GPU disagree. Their scatter is estimated from the median absolute deviation
   over all GPUs, because one faulty GPU hardly affects that deviation. The scatter of a GPU's own
   anchors is used instead if it is larger and the GPU has at least six anchors. If the 95%
   intervals of the anchors' times show even larger errors, these errors are used.
2. A GPU's speed changes from one measurement to the next. For each GPU, the change of its burst
   times between the two phases is compared with the median change on its node. The scatter of these
   differences is averaged with an assumed value.
3. The fleet's median is itself uncertain, especially if there are few GPUs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import median_abs_deviation

from analysis.fleet.anchors import KINDS, SENSORS, Array, Fleet
from sweeps.schema import PHASES
from sweeps.timing.statistics import TOLERANCE, Z95

MIN_GPUS = 3
"""Smallest number of GPUs for which the median shows which GPU is slow."""

_MIN_SPREAD = 8  # minimum number of GPUs for a meaningful standard deviation
_ALONE, _TOGETHER = range(len(PHASES))
_ASSUMED = 0.005  # assumed standard deviation of a log speed between two measurements
_ASSUMED_AS = 2  # weight of the assumption, as a number of GPUs timed in both phases
_FAR = 3.5  # standard deviations from the median beyond which a value does not count
_MAD = 1.4826  # standard deviation of normal values over the median of their absolute values
_MANY = 6  # minimum number of anchors of one GPU for using the scatter of these anchors


@dataclass(frozen=True)
class AnchorSpeeds:
    """Speeds in one kind of anchor, one value per device; NaN where a value is not known.

    Attributes:
        log: logarithm of the speed relative to the fleet's median.
        half: half-width of the 95% interval of ``log``.
        variance: variance of ``log`` without the uncertainty of the fleet's median.
        clock: logarithm of the SM clock relative to the fleet's median.
        sensors: median reading of each sensor.
        throttled: for each throttling reason, True for the devices that reported it.
    """

    log: Array
    half: Array
    variance: Array
    clock: Array
    sensors: Mapping[str, Array]
    throttled: Mapping[str, NDArray[np.bool_]]

    @property
    def speed(self) -> Array:
        """Speed relative to the fleet's median."""
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
        """Return a mask of the devices whose whole interval is below ``1 - margin``."""
        return self.hi < 1 - margin  # False for NaN


@dataclass(frozen=True)
class SpeedChange:
    """Time in the phase ``together`` over the time in the phase ``alone``, with a 95% interval.

    If the interval is unknown, its ends are NaN. ``slowed`` is True if the ratio is above 1.01 and
    the whole interval is above 1.
    """

    ratio: float
    lo: float
    hi: float
    slowed: bool


@dataclass(frozen=True)
class Interference:
    """Slowdown of a node's anchors while all GPUs of the node work in parallel.

    The slowdown of an anchor is its time in the phase ``together`` over that in the phase
    ``alone``.
    ``all`` is the median slowdown over all anchors. ``kinds`` has the median slowdown for each kind
    of anchor that was timed in both phases. ``node`` is None if the node's number is unknown.
    """

    node: int | None
    all: SpeedChange
    kinds: Mapping[str, SpeedChange]


@dataclass(frozen=True)
class FleetSpeeds:
    """Speeds of a fleet by kind of anchor.

    Attributes:
        kinds: speeds by kind, without kinds that were timed on too few devices.
        overall: the kind of anchor that defines a GPU's speed; empty if ``kinds`` is empty.
        spread: standard deviation of the GPUs' log speeds in the kind ``overall``, without
            measurement noise; NaN if it cannot be estimated.
        interference: how much the GPUs of a node slow each other down, for each node whose anchors
            were timed in both phases.
    """

    kinds: Mapping[str, AnchorSpeeds]
    overall: str
    spread: float
    interference: tuple[Interference, ...]


def fleet_speeds(fleet: Fleet) -> FleetSpeeds:
    """Compute the speeds of all devices, and how much the devices of a node slow each other down.

    With two devices, the fleet's median is halfway between their log speeds.
    """
    time_deviation = _deviation_between_times(fleet)
    phase = _phases(fleet)
    # 1. Compute the speeds in each kind. Bursts come first, because a kind with a single anchor
    #    uses the scatter of the bursts.
    speeds: dict[str, AnchorSpeeds] = {}
    burst_scatter = math.nan
    for kind in ("burst", *(kind for kind in KINDS if kind != "burst")):
        speeds_and_scatter = _speeds(fleet, kind, phase, time_deviation, burst_scatter)
        if speeds_and_scatter is not None:
            speeds[kind], scatter = speeds_and_scatter
            if kind == "burst":
                burst_scatter = scatter
    kinds = {kind: speeds[kind] for kind in KINDS if kind in speeds}
    # 2. Choose the first kind that was timed on at least half of the devices, or else the first.
    known_counts = {kind: int(np.isfinite(kinds[kind].log).sum()) for kind in kinds}
    common_kinds = [kind for kind in kinds if 2 * known_counts[kind] >= len(fleet.devices)]
    candidates = common_kinds or list(kinds)
    overall = candidates[0] if candidates else ""
    # 3. Estimate how much the devices differ in that kind.
    spread = math.nan
    if overall and known_counts[overall] >= _MIN_SPREAD:
        spread = _spread(kinds[overall].log, kinds[overall].variance)
    return FleetSpeeds(kinds, overall, spread, _interference(fleet, time_deviation))


def median_of(values: Array, axis: int = 0) -> Array:
    """Return the medians of the known values; NaN where no value is known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # raised by slices without a known value
        return np.asarray(np.nanmedian(values, axis=axis))


def deviation_of(values: Array) -> float:
    """Estimate the standard deviation of values from their median absolute deviation.

    The values are assumed to be normally distributed. The result is NaN if no value is known.
    """
    finite = values[np.isfinite(values)]
    return float(median_abs_deviation(finite, scale="normal")) if len(finite) else math.nan


def _spread(values: Array, noise: Array) -> float:
    """Return the standard deviation of the true values, given noisy measurements of them.

    ``noise`` is the variance of each value's noise. Values far from the median are ignored. The
    result is NaN if fewer than two values are left.
    """
    is_known = np.isfinite(values) & np.isfinite(noise)
    if not is_known.any():
        return math.nan
    # If most values happen to be nearly equal, their noise sets the limit.
    typical_noise = float(np.sqrt(np.median(noise[is_known])))
    limit = _FAR * max(deviation_of(values[is_known]), typical_noise)
    is_near = is_known & (np.abs(values - median_of(values)) <= limit)
    if is_near.sum() < 2:
        return math.nan
    variance = float(np.var(values[is_near], ddof=1)) - float(np.mean(noise[is_near]))
    # By chance, values may differ by less than their noise.
    return math.sqrt(max(0.0, variance))


@dataclass(frozen=True)
class _Medians:
    """Medians of an array's rows, and the variance of each median.

    ``scatter`` is the standard deviation of a single value around its row's median.
    """

    median: Array
    variance: Array
    scatter: float


def _medians(values: Array, errors: Array, usual_scatter: float = math.nan) -> _Medians:
    """Return the median of each row and the variance of that median; unknown values are NaN.

    Each row is a device, a pair of devices or a node, and each column is an anchor. ``errors`` has
    the standard error of each value. ``usual_scatter`` is used if no row has several values.
    """
    # 1. Compute the median of each row, and the distances of the row's values from it.
    count = np.isfinite(values).sum(axis=1).astype(float)
    count[count == 0] = np.nan
    medians = median_of(values, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        # The median of a few values is closer to them than the centre of their distribution is, so
        # the distances are scaled up.
        residuals = (values - medians[:, None]) * np.sqrt(count / (count - 1))[:, None]
    # 2. Estimate the scatter of single values from all rows together. A row with many values uses
    #    its own scatter if that is larger.
    has_several = count > 1
    scatter = usual_scatter
    if has_several.any():
        scatter = _deviation_from_zero(residuals[has_several])
    deviations = np.full(len(values), scatter)
    for i in np.flatnonzero(count >= _MANY):
        deviations[i] = max(scatter, _deviation_from_zero(residuals[i]))
    # 3. Compute the variance of the medians. Values scatter at least as much as their errors say.
    row_errors = np.sqrt(median_of(errors**2, axis=1))
    variance = np.fmax(deviations, row_errors) ** 2 * _median_factors(count) / count
    return _Medians(medians, variance, scatter)


def _median_factors(counts: ArrayLike) -> Array:
    """Return the variance of a median, divided by that of the mean, for each number of values.

    The values are assumed to be normally distributed. The median of one or two values is their
    mean, so the result is 1. For more values, the result is π/2, which is the limit for very many
    values and up to a third too large for few values.
    """
    return np.where(np.asarray(counts) > 2, math.pi / 2, 1.0)


def _deviation_from_zero(values: Array) -> float:
    """Estimate the standard deviation of values around 0 from the median of their absolute values.

    The values are assumed to be normally distributed.
    """
    return _MAD * float(np.median(np.abs(values[np.isfinite(values)])))


def _phases(fleet: Fleet) -> NDArray[np.intp]:
    """Choose the phase whose time is used, for each device and anchor.

    If any device timed an anchor in both phases, all devices are compared in the phase in which
    more devices timed the anchor. Otherwise, each device uses the phase in which it timed the
    anchor. The result has the shape (1, devices, anchors).
    """
    is_timed = np.isfinite(fleet.log_time)
    device_counts = is_timed.sum(axis=1)  # of shape (phases, anchors)
    common_phase = np.where(device_counts[_TOGETHER] > device_counts[_ALONE], _TOGETHER, _ALONE)
    only_phase = np.where(is_timed[_TOGETHER], _TOGETHER, _ALONE)
    is_timed_twice = is_timed.all(axis=0).any(axis=0)  # by any device, for each anchor
    chosen = np.where(is_timed_twice, common_phase, only_phase)
    with_phase_axis: NDArray[np.intp] = chosen[np.newaxis].astype(np.intp)
    return with_phase_axis


def _speeds(
    fleet: Fleet, kind: str, phase: NDArray[np.intp], time_deviation: float, usual_scatter: float
) -> tuple[AnchorSpeeds, float] | None:
    """Return the devices' speeds in a kind of anchor, and the scatter of the anchors of that kind.

    The result is None if every anchor of the kind was timed on too few devices. ``usual_scatter``
    is used if the scatter of this kind cannot be estimated.
    """
    # 1. Take each device's times in its phase, without anchors that were timed on few devices.
    anchors = np.flatnonzero(fleet.kinds == kind)

    def in_its_phase(array: NDArray[Any]) -> Any:
        """Return the values of this kind's anchors in the chosen phases, by device and anchor."""
        return np.take_along_axis(array, phase, axis=0)[0][:, anchors]

    log_times, errors = in_its_phase(fleet.log_time), in_its_phase(fleet.error)
    device_count = len(fleet.devices)
    # If an anchor was timed on few devices, its median does not show which of them is slow.
    is_sparse = np.isfinite(log_times).sum(axis=0) < max(2, min(MIN_GPUS, device_count))
    log_times[:, is_sparse] = np.nan
    errors[:, is_sparse] = np.nan
    if is_sparse.all():
        return None
    # 2. Compare two devices with each other, and more devices with the fleet's median. The speed
    #    of a device is the median over its anchors.
    if device_count == 2:
        # Both arrays have one row: how much longer the second device takes than the first.
        differences = log_times[1:] - log_times[:1]
        difference_errors = np.hypot(errors[0], errors[1])[np.newaxis]
        medians = _medians(differences, difference_errors, usual_scatter)
        # Both devices may also have changed their speed between two measurements.
        difference_variance = medians.variance + 2 * time_deviation**2
        # The middle between two devices is half their difference away from each of them.
        log_speed = np.array([0.5, -0.5]) * medians.median
        halves = np.repeat(Z95 * np.sqrt(difference_variance) / 2, 2)
        # Each device contributes half of the variance of the difference.
        variance = np.repeat(difference_variance / 2, 2)
    else:
        medians = _medians(median_of(log_times) - log_times, errors, usual_scatter)
        log_speed = medians.median - float(median_of(medians.median))
        variance = medians.variance + time_deviation**2
        halves = Z95 * np.sqrt(variance + _median_variance(log_speed, variance))
    # 3. Take the median reading of each sensor. The clock is also compared with the fleet's median.
    sensors = {name: in_its_phase(fleet.sensors[name]) for name in SENSORS}
    log_clocks = np.log(sensors["sm_mhz"])
    speeds = AnchorSpeeds(
        log=log_speed,
        half=halves,
        variance=variance,
        clock=median_of(log_clocks - median_of(log_clocks), axis=1),
        sensors={name: median_of(values, axis=1) for name, values in sensors.items()},
        throttled={
            reason: in_its_phase(is_reported).any(axis=1)
            for reason, is_reported in fleet.throttled.items()
        },
    )
    return speeds, medians.scatter


def _median_variance(log: Array, variance: Array) -> float:
    """Return the variance of the devices' median log speed.

    ``variance`` has, for each log speed, the part of its variance that is due to measurement noise.
    The computation assumes many normally distributed values. It is inaccurate for few devices, so
    the result is limited to the median of ``variance``.
    """
    device_variance = float(median_of(variance))
    # The speeds scatter because the devices differ, and at least by the measurement noise.
    scatter = np.fmax(deviation_of(log) ** 2, device_variance)
    count = int(np.isfinite(log).sum())
    return float(np.fmin(device_variance, _median_factors(count) * scatter / count))


def _changes(fleet: Fleet, anchors: NDArray[np.bool_]) -> tuple[Array, Array]:
    """Return the log ratio of each time in phase "together" to that in "alone", and its error.

    Both arrays have the shape (devices, chosen anchors).
    """
    logs, errors = fleet.log_time[:, :, anchors], fleet.error[:, :, anchors]
    return logs[_TOGETHER] - logs[_ALONE], np.hypot(errors[_ALONE], errors[_TOGETHER])


def _devices_by_node(fleet: Fleet) -> dict[int | None, NDArray[np.intp]]:
    positions: dict[int | None, list[int]] = {}
    for i, device in enumerate(fleet.devices):
        positions.setdefault(device.node, []).append(i)
    return {node: np.array(members) for node, members in positions.items()}


def _deviation_between_times(fleet: Fleet) -> float:
    """Return the standard deviation of a device's log speed over time, without measurement noise.

    The change between two measurements has twice the variance.
    """
    # 1. Compute the change of each device, relative to the median of its node.
    changes, errors = _changes(fleet, fleet.kinds == "burst")
    medians = _medians(changes, errors)
    residuals = np.full(len(changes), np.nan)
    compared_nodes = 0
    for members in _devices_by_node(fleet).values():
        node_changes = medians.median[members]
        if np.isfinite(node_changes).sum() > 1:
            residuals[members] = node_changes - median_of(node_changes)
            compared_nodes += 1
    # 2. Average the squared deviations with the assumed one. Over all residuals, the sum of squares
    #    is about ``count * spread**2``. One degree of freedom is lost per node, whose median was
    #    subtracted. A change is a difference of two measurements, so it has twice the variance of
    #    one.
    count = int(np.isfinite(residuals).sum())
    degrees = count - compared_nodes
    sum_of_squares = _ASSUMED_AS * _ASSUMED**2
    weight = _ASSUMED_AS
    if degrees > 0:
        # Subtracting the medians also removes a part of the noise.
        noise = medians.variance * degrees / count
        spread = _spread(residuals, noise)
        # If the noise is unknown, for example because no time has an interval, so is the spread.
        if not math.isnan(spread):
            sum_of_squares += count * spread**2 / 2
            weight += degrees
    return math.sqrt(sum_of_squares / weight)


def _interference(fleet: Fleet, time_deviation: float) -> tuple[Interference, ...]:
    """Return the interference on each node whose anchors were timed in both phases."""
    # 1. Compute the changes of each node over all anchors, and in each kind that was timed in both
    #    phases.
    every_anchor = np.full(len(fleet.kinds), True)
    over_all = _node_changes(fleet, every_anchor, time_deviation)
    if over_all is None:
        return ()
    by_kind: dict[str, list[SpeedChange]] = {}
    for kind in KINDS:
        changes = _node_changes(fleet, fleet.kinds == kind, time_deviation)
        if changes is not None:
            by_kind[kind] = changes
    # 2. Keep the nodes that were timed in both phases; the ratio of the others is NaN.
    interference = []
    for i, node in enumerate(_devices_by_node(fleet)):
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
    """Return how much longer the given anchors take on each node while all its devices work.

    The nodes are in the order of :func:`_devices_by_node`. The result is None if no device timed
    any of the anchors in both phases.
    """
    changes, device_errors = _changes(fleet, anchors)
    if not np.isfinite(changes).any():
        return None
    groups = _devices_by_node(fleet).values()
    # A node's change in an anchor is the median over its devices.
    node_changes = np.array([median_of(changes[members]) for members in groups])
    errors = np.array([_error_of_median(device_errors[members]) for members in groups])
    medians = _medians(node_changes, errors)
    # Only devices that were timed in both phases contribute. A node without any has a ratio of NaN.
    is_timed_twice = np.asarray(np.isfinite(changes).any(axis=1))
    counts = np.array([max(1, int(is_timed_twice[members].sum())) for members in groups])
    # The speed of each device may also have changed between the two measurements.
    variance = medians.variance + _median_factors(counts) * 2 * time_deviation**2 / counts
    half = Z95 * np.sqrt(variance)
    ratio = np.exp(medians.median)
    lo = np.exp(medians.median - half)
    hi = np.exp(medians.median + half)
    slowed = (ratio > 1 + TOLERANCE) & (lo > 1)
    return [
        SpeedChange(float(ratio[i]), float(lo[i]), float(hi[i]), bool(slowed[i]))
        for i in range(len(ratio))
    ]


def _error_of_median(errors: Array) -> Array:
    """Return the standard error of each anchor's median over a node's devices.

    ``errors`` has the shape (devices, anchors).
    """
    count = np.isfinite(errors).sum(axis=0)
    unknown = np.full(len(count), np.nan)
    # The variance of a mean is the sum of the variances over the squared count.
    sums = _median_factors(count) * np.nansum(errors**2, axis=0)
    variance = np.divide(sums, count**2, out=unknown, where=count > 0)
    return np.sqrt(variance)
