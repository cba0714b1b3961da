"""Constants of the time estimate: their meaning, their bounds, and the values that are shipped."""

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
    """Physical properties that the datasheet does not state, each with its :data:`BOUNDS`."""

    compute: float  # share of the peak that a tile's main loop reaches
    dram: float  # share of the datasheet's bandwidth that is reached
    feed: float  # bytes/s that one SM reads
    l2: float  # bytes/s that all SMs together read from the L2
    store: float  # bytes/s at which one SM's epilogue writes its tile
    epilogue: float  # seconds per tile in addition to that
    step: float  # shortest time of a K step, in seconds
    launch: float  # seconds that every launch takes, however small its problem
    tail: float  # 1: a partial wave costs as much as a whole one; 0: its share of one
    ramp: float  # CTAs in flight at which half of the bandwidth is reached
    split: float  # seconds of a helper kernel, which reduces a split K or transforms
    partials: float  # share of a split K's partial sums that goes through memory
    slow: float  # how much longer a kernel takes per e-fold over 2 ms, as the clocks drop
    misalignment: float  # work slows by (alignment / 16 bytes)^-misalignment
    fallback: float  # how much longer misaligned rows take to load, without bulk copies
    fallback_split: float  # 1: kernels for misaligned rows split K; 0: they do not
    repack: float  # times that B is moved again, to repack it before the GEMM (CPUs)
    resident: float  # share of A that hits the last-level cache, if A fits it
    cached: float  # bandwidth relative to memory, with all operands in the last-level cache
    sustained: float  # share of the rate in bursts that is reached without pauses

    def to_json(self) -> dict[str, float]:
        """Return the constants by name, for calibration.json."""
        return {f.name: float(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, float]) -> Constants:
        """Read what :meth:`to_json` returned, also in earlier versions.

        A constant that was renamed is read by its old name. A constant that an earlier version did
        not have gets its default.

        Raises:
            TypeError: if a constant is missing or unknown.
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
"""Range of what is physically possible for each constant."""


LINEAR = frozenset(
    {
        "tail", "partials", "slow", "misalignment", "fallback", "fallback_split", "repack",
        "resident",
    }
)  # fmt: skip
"""Dimensionless constants that are often 0; all others are fitted and averaged as logarithms."""

RATES = frozenset({"compute", "dram", "feed", "l2", "store"})
"""Constants that are smaller on a machine that is slower throughout."""

DURATIONS = frozenset({"epilogue", "step", "launch", "split"})
"""Constants that are larger on a machine that is slower throughout."""

_LEAST = 1e-10  # smallest value of which a logarithm is taken


def to_fit_scale(name: str, value: float) -> float:
    """Convert a constant to the scale on which it is fitted and averaged.

    This is its logarithm, or the constant itself if it is one of :data:`LINEAR`.
    """
    return value if name in LINEAR else float(np.log(max(value, _LEAST)))


def from_fit_scale(name: str, value: Any) -> Any:
    """Convert a number or an array back; inverse of :func:`to_fit_scale`."""
    return value if name in LINEAR else np.exp(value)


def mean_constants(several: Sequence[Constants]) -> Constants:
    """Average several sets of constants, each constant on the scale on which it is fitted."""
    means = {
        name: np.mean([to_fit_scale(name, getattr(one, name)) for one in several])
        for name in BOUNDS
    }
    return Constants(**{name: float(from_fit_scale(name, mean)) for name, mean in means.items()})


def physical_bounds(machine: Machine) -> dict[str, tuple[float, float]]:
    """Return :data:`BOUNDS` for one machine, whose clocks cap the share of the peak."""
    if not machine.tensor_mhz:  # a CPU: its peak was measured, and a case may exceed it a little
        return BOUNDS
    low, _ = BOUNDS["compute"]
    return {**BOUNDS, "compute": (low, max(1.0, machine.boost_mhz / machine.tensor_mhz))}


def default_constants(generation: str, dtype: str) -> Constants:
    """Return the shipped constants of a generation, before any calibration (``constants.toml``)."""
    c = _constants(_entry(_constants_table()["like"].get(generation, generation), dtype))
    return replace(c, **_misaligned_constants(generation, dtype))


@functools.cache
def shipped_fits() -> dict[str, Any]:
    """Return the document that the command ``ship`` wrote; do not change it.

    Its keys are:

    - ``source``: package of the public tables.
    - ``software``: range of errors between frameworks, over all machines.
    - ``generation``: range of errors of constants carried over from another machine of the
      generation.
    - ``generations``: range of errors of the mean of other generations' constants.
    - ``spreads``: spread of each kind of prior (:class:`analysis.model.prior.Spread`).
    - ``groups``: factors of intervals for kinds of shapes (:mod:`analysis.model.groups`).
    - ``floor``: errors of a framework's earlier version as a prediction of its later one.
    - ``machines``: for each slug, the range of frameworks there, what the constants were fitted to,
      and the fits by group, as in calibration.json. Their ``shift`` also applies to answers from
      the machine's imported table.
    """
    fits: dict[str, Any] = json.loads(_SHIPPED.read_bytes())
    return fits


def foreign_constants(
    machine: Machine, dtype: str, slug: str | None = None
) -> tuple[Constants, str]:
    """Return constants for a machine from the measurements of another one.

    They are scaled by the two datasheets (:func:`scaled_constants`). The launch time is the one
    recorded for the machine's generation, if there is one.

    Args:
        machine: machine that the constants are for.
        dtype: dtype of the constants.
        slug: machine to take them from. If None: another machine of the same generation, or of the
            latest generation before it, or of the first one after it.

    Returns:
        The constants, and the slug of the machine on which they were measured.

    Raises:
        UserError: if no constants are shipped for ``slug``.
    """
    if machine.kind == "cpu":
        return default_constants("cpu", dtype), "cpu"
    table = _constants_table()
    generations = table["order"]["generations"]
    position = generations.index(machine.generation)
    # The machine's own generation and those before it come first, the latest of them in front.
    up_to_own = generations[: position + 1]
    nearest_first = [*reversed(up_to_own), *generations[position + 1 :]]
    entries = [_entry(name, dtype) for name in nearest_first if name in table]
    by_slug = {entry["machine"]: entry for entry in entries if entry["machine"] != machine.slug}
    if slug is not None and slug not in by_slug:
        suggestion = nearest(slug, by_slug)
        raise UserError(f"no constants are shipped for {slug!r} in {dtype}; {suggestion}")
    origin = slug or next(iter(by_slug))
    origin_machine = known_machine(origin)
    origin_constants = _constants(by_slug[origin])
    scaled = scaled_constants(origin_constants, origin_machine, machine, dtype)
    generation_facts = table["facts"].get(machine.generation, {})
    launch = generation_facts.get("launch", origin_constants.launch)
    return replace(scaled, launch=launch), origin


def scaled_constants(
    c: Constants, there: Machine, here: Machine, dtype: str, growth: float = 1.0
) -> Constants:
    """Scale the constants of one machine to another, by the two datasheets.

    The bytes that one SM reads or writes per second scale with its arithmetic, because SMs are
    built in proportion; the latency of a K step scales inversely. L2 bandwidth scales with clock
    and SMs. The share of the peak that is reached scales with the generation's share on real data.

    Args:
        c: the constants.
        there: machine on which they were measured.
        here: machine that they are scaled to.
        dtype: dtype whose peaks are compared.
        growth: exponent applied to the ratio of the two machines' arithmetic per SM.
    """
    facts = _constants_table()["facts"]
    clock = here.boost_mhz / there.boost_mhz
    # A card without this dtype (bf16 on Volta) is compared by the other 16-bit dtype, fp16.
    their_peak = there.peaks.get(dtype) or there.peak("fp16")
    arithmetic = (here.peak(dtype) / here.sms / (their_peak / there.sms)) ** growth
    facts_here = facts.get(here.generation, {})
    facts_there = facts.get(there.generation, {})
    sharing = facts_here.get("share", 1.0) / facts_there.get("share", 1.0)
    reached = facts_here.get("achievable", 1.0) / facts_there.get("achievable", 1.0)
    return replace(
        c,
        compute=min(c.compute * reached, BOUNDS["compute"][1]),
        feed=c.feed * arithmetic,
        store=c.store * arithmetic,
        l2=c.l2 * clock * here.sms / there.sms * sharing,
        step=c.step / arithmetic,
        **_misaligned_constants(here.generation, dtype),
    )


def _misaligned_constants(generation: str, dtype: str) -> dict[str, float]:
    """Return the two constants of a generation's kernels for misaligned rows.

    Plain fp32 needs no bulk copies, so these kernels cost it nothing.
    """
    facts = _constants_table()["facts"].get(generation, {})
    if dtype == "fp32":
        facts = {}
    return {
        "fallback": facts.get("fallback", 0.0),
        "fallback_split": facts.get("fallback_split", 1.0),
    }


def measured_on(generation: str, dtype: str) -> str | None:
    """Return the slug of the machine on which a generation's constants were measured, if any.

    A generation without constants of its own uses those of another generation. The machine is then
    the other generation's.
    """
    table = _constants_table()
    origin = _entry(table["like"].get(generation, generation), dtype).get("machine")
    return None if origin is None else str(origin)


def _entry(generation: str, dtype: str) -> dict[str, Any]:
    """Return a generation's entry in constants.toml: the dtype's own, or the one for all dtypes."""
    table = _constants_table()
    entry: dict[str, Any] = table.get(f"{generation}-{dtype}") or table[generation]
    return entry


def _constants(entry: dict[str, Any]) -> Constants:
    """Return the constants of an entry in constants.toml, without its other keys."""
    return Constants.from_json({name: entry[name] for name in BOUNDS if name in entry})


@functools.cache
def _constants_table() -> dict[str, Any]:
    """Return the content of constants.toml; do not change it."""
    return tomllib.loads(Path(__file__).with_name("constants.toml").read_text(encoding="utf-8"))
