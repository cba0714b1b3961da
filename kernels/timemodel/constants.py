"""The constants of the time estimate: what they mean, what is possible, and what is shipped."""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from kernels.common.errors import UserError, nearest
from kernels.machine import Machine, known_machine


@dataclass(frozen=True)
class Constants:
    """What the datasheet does not say. Physical, readable, each with bounds in :data:`BOUNDS`."""

    compute: float  # share of the peak that a tile's main loop reaches
    dram: float  # share of the datasheet's bandwidth that is reached
    feed: float  # bytes/s that one SM reads
    l2: float  # bytes/s that all SMs together read from the L2
    store: float  # bytes/s at which one SM's epilogue writes its tile
    epilogue: float  # seconds per tile beside that
    step: float  # seconds that a K step takes at least
    launch: float  # seconds that every launch takes, however small its problem
    tail: float  # 1: a partial wave costs as much as a whole one; 0: its share of one
    ramp: float  # CTAs in flight at which half of the bandwidth is reached
    split: float  # seconds of a kernel beside the product: it reduces a split K, or transforms
    partials: float  # share of a split K's partial sums that goes through memory
    slow: float  # how much longer a kernel takes per e-fold over 2 ms, as the clocks drop
    misalignment: float  # work slows by (alignment / 16 bytes)^-misalignment
    fallback: float  # how much longer misaligned rows take to load, for want of bulk copies
    fallback_split: float  # 1: kernels for misaligned rows split K; 0: they do not
    repack: float  # times that B is moved again, to repack it before the product (CPUs)
    resident: float  # share of A that hits the last-level cache, where A fits it
    cached: float  # bandwidth over that of memory, with all operands in the last-level cache
    sustained: float  # share of the burst's rate that is reached without pauses

    def to_json(self) -> dict[str, float]:
        """By name, for calibration.json."""
        return {f.name: float(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, float]) -> Constants:
        """Inverse of :meth:`to_json`; reads the files of earlier versions, too.

        A constant that was renamed is read by its old name, one that did not exist has its default.

        Raises:
            TypeError: a constant is missing or unknown.
        """
        known = {_EARLIER_NAMES.get(name, name): value for name, value in data.items()}
        return cls(**{**_constants_table()["defaults"], **known})


_SHIPPED = Path(__file__).with_name("shipped.json")

_EARLIER_NAMES = {"narrow": "misalignment", "pack": "repack"}

BOUNDS: dict[str, tuple[float, float]] = {
    "compute": (0.05, 1.1),
    "dram": (0.05, 1.0),
    "feed": (1e9, 1e12),
    "l2": (1e10, 1e14),
    "store": (1e8, 1e12),
    "epilogue": (0.0, 5e-6),
    "step": (0.0, 5e-6),
    "launch": (5e-7, 3e-4),
    "tail": (0.0, 1.0),
    "ramp": (0.0, 80.0),
    "split": (0.0, 2e-5),
    "partials": (0.0, 2.0),
    "slow": (0.0, 0.3),
    "misalignment": (0.0, 2.0),
    "fallback": (0.0, 10.0),
    "fallback_split": (0.0, 1.0),
    "repack": (0.0, 20.0),
    "resident": (0.0, 1.0),
    "cached": (1.0, 20.0),
    "sustained": (0.3, 1.1),
}
"""What is physically possible for each constant."""


LINEAR = frozenset(
    {
        "tail", "partials", "slow", "misalignment", "fallback", "fallback_split", "repack",
        "resident",
    }
)  # fmt: skip
"""Dimensionless constants that are often 0; all others are fitted and averaged as logarithms."""

RATES = frozenset({"compute", "dram", "feed", "l2", "store"})
"""Constants that a machine which is slower throughout has less of."""

DURATIONS = frozenset({"epilogue", "step", "launch", "split"})
"""Constants that a machine which is slower throughout has more of."""

_LEAST = 1e-10  # below which a logarithm is not taken


def to_fit_scale(name: str, value: float) -> float:
    """A constant on the scale on which it is fitted and averaged: its logarithm, or as it is."""
    return value if name in LINEAR else float(np.log(max(value, _LEAST)))


def from_fit_scale(name: str, value: Any) -> Any:
    """Inverse of :func:`to_fit_scale`, for a number or an array."""
    return value if name in LINEAR else np.exp(value)


def mean_constants(several: Sequence[Constants]) -> Constants:
    """The mean of several sets of constants, each constant on the scale on which it is fitted."""
    means = {
        name: np.mean([to_fit_scale(name, getattr(one, name)) for one in several])
        for name in BOUNDS
    }
    return Constants(**{name: float(from_fit_scale(name, v)) for name, v in means.items()})


def physical_bounds(machine: Machine) -> dict[str, tuple[float, float]]:
    """:data:`BOUNDS` for one machine: the clock caps the share of the peak."""
    if not machine.tensor_mhz:  # a CPU: its peak was measured, and a case may exceed it a little
        return BOUNDS
    low, _ = BOUNDS["compute"]
    return {**BOUNDS, "compute": (low, max(1.0, machine.boost_mhz / machine.tensor_mhz))}


def default_constants(generation: str, dtype: str) -> Constants:
    """The shipped constants of a generation, before any calibration (``constants.toml``)."""
    c = _constants(_entry(_constants_table()["like"].get(generation, generation), dtype))
    return replace(c, **_price_of_misalignment(generation, dtype))


@functools.cache
def shipped_fits() -> dict[str, Any]:
    """Constants of single machines, as the command ``ship`` wrote them; do not change them.

    Keys: ``software``, the range of other frameworks' errors on all machines; ``generation``, that
    of constants carried over from another machine of the generation; ``generations``, that of the
    mean of other generations' constants; ``spreads``, by kind of prior
    (:class:`analysis.model.prior.Spread`); ``machines``, by slug the range of frameworks there,
    what the constants were fitted to, and the fits by group, as in calibration.json. Their
    ``shift`` applies to answers from the machine's imported table, too.
    """
    fits: dict[str, Any] = json.loads(_SHIPPED.read_bytes())
    return fits


def foreign_constants(
    machine: Machine, dtype: str, slug: str | None = None
) -> tuple[Constants, str]:
    """Constants for a machine from measurements of another, scaled by the two datasheets.

    As :func:`scaled_constants` does; the seconds of a launch are the generation's.

    Args:
        machine: the one that they are for.
        dtype: whose constants.
        slug: the machine to take them from. If None: another one of the same generation, or of the
            latest one before it, or of the first one after it.

    Returns:
        The constants, and the slug of the machine that they were measured on.

    Raises:
        UserError: no constants are shipped for ``slug``.
    """
    if machine.kind == "cpu":
        return default_constants("cpu", dtype), "cpu"
    table = _constants_table()
    order = table["order"]["generations"]
    here = order.index(machine.generation)
    nearest_first = [*order[: here + 1][::-1], *order[here + 1 :]]
    entries = [_entry(name, dtype) for name in nearest_first if name in table]
    by_slug = {e["machine"]: e for e in entries if e["machine"] != machine.slug}
    if slug is not None and slug not in by_slug:
        known = nearest(slug, by_slug)
        raise UserError(f"no constants are shipped for {slug!r} in {dtype}; {known}")
    origin = slug or next(iter(by_slug))
    there, c = known_machine(origin), _constants(by_slug[origin])
    facts = table["facts"].get(machine.generation, {})
    scaled = scaled_constants(c, there, machine, dtype)
    return replace(scaled, launch=facts.get("launch", c.launch)), origin


def scaled_constants(
    c: Constants, there: Machine, here: Machine, dtype: str, growth: float = 1.0
) -> Constants:
    """Constants of one machine as they are on another, by the two datasheets.

    What one SM reads or writes per second scales with its arithmetic, because SMs are built in
    proportion; the latency of a K step scales inversely. L2 bandwidth scales with clock and SMs.
    The share of the peak that real data reach is the generation's.

    Args:
        c: the constants.
        there: where they were measured.
        here: where they are wanted.
        dtype: whose peaks are compared.
        growth: the power of the ratio of two SMs' arithmetic by which they read and write more.
    """
    facts = _constants_table()["facts"]
    clock = here.boost_mhz / there.boost_mhz
    # A card without this dtype (bf16 on Volta) is compared by the other 16-bit dtype, fp16.
    their_peak = there.peaks.get(dtype) or there.peak("fp16")
    arithmetic = (here.peak(dtype) / here.sms / (their_peak / there.sms)) ** growth
    mine, theirs = (facts.get(m.generation, {}) for m in (here, there))
    sharing = mine.get("share", 1.0) / theirs.get("share", 1.0)
    reached = mine.get("achievable", 1.0) / theirs.get("achievable", 1.0)
    return replace(
        c,
        compute=min(c.compute * reached, BOUNDS["compute"][1]),
        feed=c.feed * arithmetic,
        store=c.store * arithmetic,
        l2=c.l2 * clock * here.sms / there.sms * sharing,
        step=c.step / arithmetic,
        **_price_of_misalignment(here.generation, dtype),
    )


def _price_of_misalignment(generation: str, dtype: str) -> dict[str, float]:
    """What a generation's kernels for misaligned rows cost; plain fp32 needs no bulk copies."""
    facts = _constants_table()["facts"].get(generation, {})
    known = {} if dtype == "fp32" else facts
    return {
        "fallback": known.get("fallback", 0.0),
        "fallback_split": known.get("fallback_split", 1.0),
    }


def measured_on(generation: str, dtype: str) -> str | None:
    """The slug of the machine that a generation's shipped constants were measured on, if any.

    A generation without constants of its own takes another's, whose machine is returned.
    """
    table = _constants_table()
    origin = _entry(table["like"].get(generation, generation), dtype).get("machine")
    return None if origin is None else str(origin)


def _entry(generation: str, dtype: str) -> dict[str, Any]:
    table = _constants_table()
    entry: dict[str, Any] = table.get(f"{generation}-{dtype}") or table[generation]
    return entry


def _constants(entry: dict[str, Any]) -> Constants:
    return Constants.from_json({name: entry[name] for name in BOUNDS if name in entry})


@functools.cache
def _constants_table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("constants.toml").read_text(encoding="utf-8"))
