"""What is known about a machine before any of its own measurements, and how sure that is.

An estimate starts from the best prior there is: the machine's own public table, else the constants
that are shipped for it, else a sibling's constants scaled by the two datasheets, else the mean of
the constants of all generations, scaled likewise. Each kind of prior has two learned spreads: by
how much the machine as a whole is faster or slower (``scale``), and by how much single shapes still
are once that is corrected (``shape``). Own measurements move the estimate away from the prior only
as far as they outweigh these spreads: the scale first, because it is the least certain and shared
by all measurements; then single constants; then the weights of public tables; then trees
(:mod:`analysis.model.fitting`). The 90% interval is the prior's, narrowed as the scale becomes
known, and is replaced by that of own held-out errors as these become many
(:mod:`analysis.model.calibrate`).

A sibling is near enough only where both datasheets differ no more than those of the pairs of
measured GPUs that its interval was learned from.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.model.features import Inputs
from analysis.model.fit import (
    FP32_LIKE,
    SOFTWARE_ERROR,
    UNCALIBRATED,
    UNCALIBRATED_PAIR,
    Fit,
    SoftwareRange,
)
from analysis.model.offsets import LIBRARY, CollectionTrees, Offsets
from analysis.model.query import Query
from analysis.model.shift import Shift
from kernels.machine import Machine, known_machine
from kernels.timemodel.constants import (
    Constants,
    default_constants,
    mean_constants,
    measured_on,
    scaled_constants,
    shipped_fits,
)

DTYPE = "bf16"
"""The dtype that priors are learned from; public tables say too little about others, or nothing."""

GROUP = f"{LIBRARY} gemm {DTYPE}"
"""Its GEMMs by the vendor library, as a model's fits are named."""

TWINS = {"bf16": "fp16", "fp16": "bf16"}
"""The two 16-bit dtypes, which share their units."""

_TWIN_WIDER = 1.1
"""Factor by which an interval is wider in the other 16-bit dtype. bf16's shipped constants predict
fp16 Llama layers on an H100 (casys-kaist/LLMServingSim, 10,240 times) with a mean error of 5.7%,
and the 90% interval holds 97% of them (tests/recordings/every-m.jsonl)."""

_GROWTH = 0.75
"""Across generations, an SM reads and writes as much more as this power of its arithmetic. With 1,
GPUs for graphics, whose arithmetic is halved in 16 bits, are predicted too slow. It was chosen by
predicting the public tables of each generation from the constants of the others."""
_TREES_MISFIT = 0.05  # what public tables of the machine leave, as a log ratio
_NORMAL = 1.645  # standard deviations on either side that hold nine in ten normal values
_FACTOR_OF_TWO = "a factor of two either way"
_FP32_WORDS = "−10% to +42%, as on GPUs like it"


@dataclass(frozen=True)
class Spread:
    """How far a prior may be off: standard deviations of log(measured / predicted).

    ``scale`` is the error that all shapes of a machine share, ``shape`` that of a single shape once
    the shared one is corrected. A part of the latter comes from ``constants``, the error of each
    constant once the scale is corrected; ``misfit`` is what the best constants still leave.
    """

    scale: float
    shape: float
    constants: float = 0.15
    misfit: float = 0.1

    def after(self, rows: int) -> float:
        """The standard deviation of one shape's error once some rows corrected the scale."""
        return math.hypot(self.shape, 1 / math.sqrt(1 / self.scale**2 + rows / self.shape**2))

    def narrowing(self, rows: int) -> float:
        """The factor by which some rows narrow the prior's interval, at most 1."""
        return self.after(rows) / self.after(0)

    @classmethod
    def from_shipped(cls, kind: str) -> Spread:
        """The learned spread of one kind of prior: public, shipped, sibling or generation."""
        learned = shipped_fits()["spreads"][kind]
        return cls(**learned, misfit=_TREES_MISFIT if kind == "public" else cls.misfit)


UNKNOWN = Spread(scale=0.37, shape=0.2, constants=1.0)
"""Where nothing was learned: together, as wide as :data:`analysis.model.fit.UNCALIBRATED`. The
constants are hardly held: those of a CPU are only a starting point."""


@dataclass(frozen=True)
class Prior:
    """What answers for a group without own measurements, and what own measurements start from.

    ``kind`` is ``public``, ``shipped``, ``generation`` or ``none``. ``fit`` has the intervals of an
    answer without own measurements. ``collections`` are public tables whose weights own
    measurements move; ``leading`` has the positions of those that answer without any. ``warm`` says
    whether ``fit`` is of operands that come from the cache where they fit it.
    """

    fit: Fit
    kind: str
    source: str
    spread: Spread
    warm: bool = False
    collections: tuple[CollectionTrees, ...] = ()
    leading: tuple[int, ...] = ()

    @classmethod
    def bare(cls, constants: Constants, spread: Spread = UNKNOWN) -> Prior:
        """Only constants, of unknown origin."""
        end = _NORMAL * spread.after(0)
        return cls(Fit(constants, low=-end, high=end, aligned_only=True), "none", "", spread)

    def is_own(self, machine: Machine) -> list[bool]:
        """Whether each collection is of the machine itself."""
        return [one.machine.slug == machine.slug for one in self.collections]

    @property
    def weights(self) -> list[float]:
        """The weight of each collection without own measurements."""
        share = 1 / max(len(self.leading), 1)
        return [share * (i in self.leading) for i in range(len(self.collections))]


_TREES_ERROR = 0.04
"""Standard deviation of a public table's log ratios to its own model, typically."""


def prior_from_tables(
    machine: Machine, dtype: str, collections: Sequence[CollectionTrees], query: Query
) -> Prior:
    """Public tables of the machine itself or of its siblings, whose trees have not seen a query.

    Without own measurements the machine's first collection answers, else the first one of each
    sibling together. The interval is the learned one of other frameworks; that was learned from
    tables whose own error is known, which here is assumed to be typical.

    Args:
        machine: the one that is asked about.
        dtype: of the answers; the collections may be of the other 16-bit dtype.
        collections: the most trusted first.
        query: shapes at which the trees' typical disagreement is taken.
    """
    leading = leaders(machine, [one.machine for one in collections])
    prior = Prior(
        Fit(collections[0].constants_on(machine, dtype)),
        "public",
        "public tables",
        Spread.from_shipped("public"),
        True,
        tuple(collections),
        tuple(leading),
    )
    offsets = Offsets.from_weights(collections, prior.weights)
    usual = float(np.median(offsets.spread(offsets.at(Inputs.from_query(machine, query)))))
    software = software_of(machine.slug, dtype)
    fit = Fit(
        prior.fit.constants,
        offsets=offsets,
        aligned_only=True,
        layout="nt",
        low=software.low,
        high=software.high,
        pair_low=software.pair_low,
        pair_high=software.pair_high,
        scale=_TREES_ERROR / usual,
        beside=SOFTWARE_ERROR,
        groups=factors_of_prior("public", machine.generation) if dtype in TWINS else {},
    )
    return replace(prior, fit=fit, source=offsets.source)


def leaders(machine: Machine, machines: Sequence[Machine]) -> list[int]:
    """Positions of the collections that answer without own measurements.

    That is the first of the machine itself, else the first of each sibling.

    Args:
        machine: the one that is asked about.
        machines: whose each collection is.
    """
    slugs = [each.slug for each in machines]
    if machine.slug in slugs:
        return [slugs.index(machine.slug)]
    return [slugs.index(slug) for slug in dict.fromkeys(slugs)]


def software_of(slug: str, dtype: str = DTYPE) -> SoftwareRange:
    """How far frameworks lie apart on a machine, in spreads: as on all, or more if they do there.

    It was learned from bf16. Each framework quantises for fp8 in its own way: of that, no more is
    known than of a machine without any measurement, even where the model's own error is nothing.
    """
    if dtype == "fp8":
        pair = (end / math.sqrt(2) for end in UNCALIBRATED_PAIR)
        return SoftwareRange(*(end / SOFTWARE_ERROR for end in (*UNCALIBRATED, *pair)))
    shipped = shipped_fits()
    software = SoftwareRange(**shipped["software"])
    here = shipped["machines"].get(slug)
    return software.joined(SoftwareRange(**here["software"])) if here else software


def factors_of_prior(kind: str, generation: str) -> dict[str, tuple[float, float]]:
    """What kinds of shapes multiply an interval by (:mod:`analysis.model.groups`).

    Args:
        kind: of the prior, ``public`` or ``shipped``.
        generation: of the machine.
    """
    found = shipped_fits()["groups"][kind].get(generation, {})
    return {name: (low, high) for name, (low, high) in found.items()}


def shift_of(slug: str, group: str = GROUP) -> Shift:
    """What other software's times are expected to be on a machine, by those of its table."""
    shipped = shipped_fits()["machines"].get(slug, {"groups": {}})
    return Fit.from_json(shipped["groups"][group]).shift if group in shipped["groups"] else Shift()


def floor_sentences(slug: str | None = None) -> list[str]:
    """How far a framework's earlier version is from its later one: the floor of predictions.

    Args:
        slug: only on this machine; on all that were measured with two versions if None.
    """
    return [
        f"Floor on {one['machine']}: the times of {one['earlier']} predict those of {one['later']} "
        f"with a median error of {one['median']:.1%}, mean {one['mean']:.1%}."
        for one in shipped_fits()["floor"]
        if slug in (None, one["machine"])
    ]


def prior_without_tables(machine: Machine, group: str) -> Prior:
    """The best prior that needs no imported table.

    Args:
        machine: the one that is asked about.
        group: implementation, operation and dtype, as in :func:`analysis.model.query.group_of`.
    """
    known = _measured_prior(machine, group) or _twin_prior(machine, group)
    return known or _default(machine, group)


def _measured_prior(machine: Machine, group: str) -> Prior | None:
    """Shipped constants, a sibling's, or the mean of all generations'; None if there are none."""
    shipped = shipped_fits()
    here = shipped["machines"].get(machine.slug)
    if here and group in here["groups"]:
        fit = Fit.from_json(here["groups"][group])
        if group == GROUP:
            fit = replace(fit, groups=factors_of_prior("shipped", machine.generation))
        source = f"shipped constants, fitted to {fit.rows:,} public rows of it, {here['source']}"
        return Prior(fit, "shipped", f"{source}, warm", Spread.from_shipped("shipped"), True)
    if group != GROUP or DTYPE not in machine.peaks:
        return None
    fits = {
        slug: Fit.from_json(there["groups"][GROUP]) for slug, there in shipped["machines"].items()
    }
    there = nearest_sibling(machine, fits)
    if there is not None:
        learned = SoftwareRange(**shipped["generation"])
        source = (
            f"constants of {there.slug}, scaled, warm; interval learned from "
            f"{len(sibling_pairs(fits))} pairs of GPUs of the same generation"
        )
        fit = carried_fit(fits[there.slug], there, machine, learned)
        fit = replace(fit, groups=factors_of_prior("shipped", machine.generation))
        return Prior(fit, "generation", source, Spread.from_shipped("sibling"), True)
    learned = SoftwareRange(**shipped["generations"])
    fit = mean_fit({slug: fit.constants for slug, fit in fits.items()}, machine, learned)
    source = (
        f"mean of the constants of {len(fits)} GPUs, scaled, warm; interval learned by leaving "
        "each GPU's generation out"
    )
    measured = {known_machine(slug).generation for slug in fits}
    kind = "generation" if machine.generation in measured else "none"
    return Prior(fit, kind, source, Spread.from_shipped("generation"), True)


def _twin_prior(machine: Machine, group: str) -> Prior | None:
    """The prior of the other 16-bit dtype at the same peak; for tf32, bf16's constants."""
    what, _, dtype = group.rpartition(" ")
    twin = TWINS.get(dtype, DTYPE if dtype == "tf32" else None)
    if twin is None or dtype not in machine.peaks or twin not in machine.peaks:
        return None
    known = _measured_prior(machine, f"{what} {twin}")
    return known and shared_prior(known, machine, twin, dtype)


def shared_prior(known: Prior, machine: Machine, twin: str, dtype: str) -> Prior | None:
    """What is known about one dtype, for another one; None where their peaks differ."""
    if dtype == "tf32":
        source = (
            f"{known.source}; tf32 by the constants of {twin} at its own peak, {_FACTOR_OF_TWO}"
        )
        fit = Fit(known.fit.constants, aligned_only=True)
        return Prior(fit, known.kind, source, UNKNOWN, known.warm)
    if machine.peaks[dtype] != machine.peaks[twin]:
        return None
    source = f"{known.source}; {dtype} uses what is known of {twin}, which has the same peak"
    return replace(known, fit=known.fit.stretched(_TWIN_WIDER), source=source)


def _default(machine: Machine, group: str) -> Prior:
    """The constants of the machine's generation, whose interval is a factor of two."""
    dtype = group.rpartition(" ")[2]
    sure = is_fp32_known(machine, group)
    low, high = FP32_LIKE if sure else UNCALIBRATED
    fit = Fit(default_constants(machine.generation, dtype), low=low, high=high, aligned_only=True)
    origin = measured_on(machine.generation, dtype)
    if origin is None:
        return Prior(fit, "none", f"constants that were never measured, {_FACTOR_OF_TWO}", UNKNOWN)
    kind = "generation" if known_machine(origin).generation == machine.generation else "none"
    words = _FP32_WORDS if sure else _FACTOR_OF_TWO
    return Prior(fit, kind, f"constants of {origin}, {words}", UNKNOWN)


def is_fp32_known(machine: Machine, group: str) -> bool:
    """Whether a group is of GEMMs in fp32, and a GPU of the machine's compute capability was
    measured: of one generation, GPUs for graphics have twice the lanes for fp32.
    """
    what, _, dtype = group.rpartition(" ")
    origin = measured_on(machine.generation, dtype)
    if dtype != "fp32" or not what.endswith("gemm") or origin is None:
        return False
    return known_machine(origin).capability == machine.capability


def sibling_pairs(measured: Iterable[str]) -> list[tuple[Machine, Machine]]:
    """The ordered pairs of machines of one generation: where constants come from, where they go."""
    machines = map(known_machine, measured)
    pairs = itertools.permutations(machines, 2)
    return [(there, here) for there, here in pairs if there.generation == here.generation]


def nearest_sibling(machine: Machine, measured: Iterable[str]) -> Machine | None:
    """The measured machine whose constants suit another one of its generation, if there is one.

    Neither its peak nor its bandwidth may differ by a larger factor than in some pair of measured
    machines of one generation. Of several, it is the one whose two factors multiply to the least.
    So an L4 or an RTX 4090 takes nothing from an L40S, nor an H20 from an H200: nobody has shown
    that constants carry so far. What a datasheet does not say, such as the lower power limit of a
    card on PCIe, this cannot see.

    Args:
        machine: the one that constants are wanted for.
        measured: slugs of machines that have some.
    """
    slugs = list(measured)
    reach = [_apart(there, here) for there, here in sibling_pairs(slugs)]
    if not reach or DTYPE not in machine.peaks:
        return None
    furthest = [max(factors) for factors in zip(*reach, strict=True)]
    near = [
        there
        for there in map(known_machine, slugs)
        if there.generation == machine.generation
        and there.slug != machine.slug
        and all(x <= most for x, most in zip(_apart(there, machine), furthest, strict=True))
    ]
    return min(near, key=lambda there: sum(_apart(there, machine)), default=None)


def _apart(one: Machine, other: Machine) -> tuple[float, float]:
    """By which factors two machines' peaks and bandwidths differ, as logs without a sign."""
    peaks = math.log(one.peak(DTYPE) / other.peak(DTYPE))
    return abs(peaks), abs(math.log(one.bandwidth / other.bandwidth))


def carried_fit(fit: Fit, there: Machine, here: Machine, learned: SoftwareRange) -> Fit:
    """The fit of one machine for another one that was not measured.

    Its interval is the one that was learned from pairs, or the fit's own where that is wider:
    elsewhere constants are no surer than where they were fitted.
    """
    constants = scaled_constants(fit.constants, there, here, DTYPE)
    unseen = replace(
        fit, constants=constants, shift=Shift(), rows=0, pairs=0, median=None, mean=None, p95=None
    )
    return unseen.widened(learned)


def mean_fit(known: Mapping[str, Constants], here: Machine, learned: SoftwareRange) -> Fit:
    """The mean of measured machines' constants, for one of a generation that nobody measured.

    Each is scaled by the two datasheets, and every generation counts the same. One machine's
    constants alone, such as those of the nearest generation, are further off.

    Args:
        known: constants by the slug of the machine that they were fitted on.
        here: the machine that they are wanted for.
        learned: the range of such predictions' errors.
    """
    by_generation: dict[str, list[Constants]] = {}
    for slug, constants in known.items():
        there = known_machine(slug)
        scaled = scaled_constants(constants, there, here, DTYPE, _GROWTH)
        by_generation.setdefault(there.generation, []).append(scaled)
    constants = mean_constants([mean_constants(each) for each in by_generation.values()])
    return Fit(constants, aligned_only=True, layout="nt", low=0.0, high=0.0).widened(learned)
