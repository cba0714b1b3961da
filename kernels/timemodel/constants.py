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
    """Properties of a machine that its datasheet does not state."""

    compute: float  # share of the peak that a tile's main loop reaches
    dram: float  # share of the datasheet's memory bandwidth that a kernel reaches
    feed: float  # bytes/s that one SM reads
    l2: float  # bytes/s that all SMs together read from the L2
    store: float  # bytes/s at which one SM's epilogue writes its tile
    epilogue: float  # seconds of an epilogue in addition to writing the tile
    step: float  # shortest time of a K step, in seconds
    launch: float  # seconds that every launch takes, however small its problem
    tail: float  # 1: a partial wave takes as long as a full one; 0: in proportion to its tiles
    ramp: float  # number of CTAs in flight that reach half of the bandwidth
    split: float  # seconds of a helper kernel, such as one that reduces a split K
    partials: float  # share of a split K's partial sums that goes through memory
    slow: float  # relative slowdown of a kernel per e-fold over 2 ms, because the clocks drop
    misalignment: float  # misaligned rows slow the work by (16 bytes / alignment)^misalignment
    fallback: float  # relative extra time to load misaligned rows, which have no bulk copies
    fallback_split: float  # 1: kernels for misaligned rows split K; 0: they do not
    repack: float  # bytes moved to repack B before the GEMM, per byte of B (CPUs)
    resident: float  # share of A that hits the last-level cache, if A fits in it
    cached: float  # bandwidth with all operands in the last-level cache, relative to memory
    sustained: float  # FLOP/s of launches without pauses, relative to bursts

    def to_json(self) -> dict[str, float]:
        """Return the constants by name, for calibration.json."""
        return {f.name: float(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, float]) -> Constants:
        """Read the constants that :meth:`to_json` returned, in this version or an earlier one.

        A constant that was renamed is read under its old name. A constant that an earlier version
        did not have gets its default.

        Raises:
            TypeError: if a constant without a default is missing, or a constant is unknown.
        """
        renamed = {_EARLIER_NAMES.get(name, name): value for name, value in data.items()}
        return cls(**{**_constants_table()["defaults"], **renamed})


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
"""Lowest and highest physically possible value of each constant."""


LINEAR = frozenset(
    {
        "tail", "partials", "slow", "misalignment", "fallback", "fallback_split", "repack",
        "resident",
    }
)  # fmt: skip
"""Constants that are fitted and averaged directly. All others are converted to logarithms first."""

RATES = frozenset({"compute", "dram", "feed", "l2", "store"})
"""Constants that are smaller on a machine that is slower throughout."""

DURATIONS = frozenset({"epilogue", "step", "launch", "split"})
"""Constants that are larger on a machine that is slower throughout."""

_SMALLEST = 1e-10  # smaller constants are raised to this value before their logarithm is taken


def to_fit_scale(name: str, value: float) -> float:
    """Convert a constant to the scale on which it is fitted and averaged.

    This is its logarithm, or the constant itself if it is one of :data:`LINEAR`.
    """
    return value if name in LINEAR else float(np.log(max(value, _SMALLEST)))


def from_fit_scale(name: str, value: Any) -> Any:
    """Convert fitted values of a constant back; the inverse of :func:`to_fit_scale`."""
    return value if name in LINEAR else np.exp(value)


def mean_constants(sets: Sequence[Constants]) -> Constants:
    """Average several sets of constants, each constant on the scale on which it is fitted."""
    means: dict[str, float] = {}
    for name in BOUNDS:
        fitted = [to_fit_scale(name, getattr(constants, name)) for constants in sets]
        means[name] = float(from_fit_scale(name, np.mean(fitted)))
    return Constants(**means)


def physical_bounds(machine: Machine) -> dict[str, tuple[float, float]]:
    """Return :data:`BOUNDS` for one machine, whose clocks limit the share of the peak.

    The peak holds at the Tensor Core clock, and the boost clock may be higher.
    """
    if not machine.tensor_mhz:  # a CPU: its peak was measured, and a case may exceed it a little
        return BOUNDS
    low, _ = BOUNDS["compute"]
    return {**BOUNDS, "compute": (low, max(1.0, machine.boost_mhz / machine.tensor_mhz))}


def default_constants(generation: str, dtype: str) -> Constants:
    """Return a generation's constants from ``constants.toml``, before any calibration."""
    c = _constants(_entry(_constants_table()["like"].get(generation, generation), dtype))
    return replace(c, **_misaligned_constants(generation, dtype))


@functools.cache
def shipped_fits() -> dict[str, Any]:
    """Return the document that the command ``ship`` wrote. Callers must not change it.

    Its keys are:

    - ``source``: package of the public tables.
    - ``software``: range of errors between frameworks, over all machines.
    - ``generation``: range of errors of constants carried over from another machine of the same
      generation.
    - ``generations``: range of errors of the mean of other generations' constants.
    - ``spreads``: spread of each kind of prior (:class:`analysis.model.prior.Spread`).
    - ``groups``: factors of intervals for kinds of shapes (:mod:`analysis.model.groups`).
    - ``floor``: errors if a framework's earlier version is used to predict its later one.
    - ``machines``: for each slug, the range of errors between frameworks on this machine, the
      measurements that the constants were fitted to, and the fits by group, as in calibration.json.
      The ``shift`` of a fit also applies to answers from the machine's imported table.
    """
    fits: dict[str, Any] = json.loads(_SHIPPED.read_bytes())
    return fits


def foreign_constants(
    machine: Machine, dtype: str, slug: str | None = None
) -> tuple[Constants, str]:
    """Return constants for a machine from the measurements of another one.

    The constants are scaled according to the two datasheets (:func:`scaled_constants`). The launch
    time is that of the machine's generation in constants.toml, if the file has one. For a CPU, the
    result is the CPU's shipped constants and ``cpu``.

    Args:
        machine: machine that the constants are for.
        dtype: dtype of the constants.
        slug: slug of the machine that was measured. None selects a machine of the same generation,
            otherwise of the latest earlier generation, otherwise of the first later one.

    Returns:
        The constants, and the slug of the machine on which they were measured.

    Raises:
        UserError: if no constants in this dtype are shipped for ``slug``, or if it names
            ``machine`` itself.
    """
    if machine.kind == "cpu":
        return default_constants("cpu", dtype), "cpu"
    table = _constants_table()
    # 1. List the machines with constants: those of the machine's generation first, then earlier
    # generations from new to old, then later ones.
    generations = table["order"]["generations"]
    position = generations.index(machine.generation)
    not_later, later = generations[: position + 1], generations[position + 1 :]
    entries = [_entry(name, dtype) for name in (*reversed(not_later), *later) if name in table]
    by_slug = {entry["machine"]: entry for entry in entries if entry["machine"] != machine.slug}
    if slug is not None and slug not in by_slug:
        suggestion = nearest(slug, by_slug)
        raise UserError(f"no constants are shipped for {slug!r} in {dtype}; {suggestion}")
    # 2. Scale the constants of the selected machine, or of the first one.
    origin = slug or next(iter(by_slug))
    origin_machine = known_machine(origin)
    origin_constants = _constants(by_slug[origin])
    scaled = scaled_constants(origin_constants, origin_machine, machine, dtype)
    generation_facts = table["facts"].get(machine.generation, {})
    launch = generation_facts.get("launch", origin_constants.launch)
    return replace(scaled, launch=launch), origin


def scaled_constants(
    c: Constants, there: Machine, here: Machine, dtype: str, exponent: float = 1.0
) -> Constants:
    """Scale the constants of one machine to another, according to the two datasheets.

    The bytes that one SM reads or writes per second scale with its arithmetic, because SMs are
    built in proportion; the latency of a K step scales inversely. L2 bandwidth scales with the
    clock, the SMs and the number of CTAs that share a block. The share of the peak that is reached
    scales with the share that GEMMs of the generation reach on real data.

    Args:
        c: constants to scale.
        there: machine on which the constants were measured.
        here: machine that the constants are scaled to.
        dtype: dtype whose peaks are compared.
        exponent: power to which the ratio of the two machines' arithmetic per SM is raised.
    """
    facts = _constants_table()["facts"]
    clock = here.boost_mhz / there.boost_mhz
    # If the measured machine does not have this dtype, as Volta does not have bf16, its peak in
    # fp16 is compared.
    peak_there = there.peaks.get(dtype) or there.peak("fp16")
    arithmetic = (here.peak(dtype) / here.sms / (peak_there / there.sms)) ** exponent
    facts_here = facts.get(here.generation, {})
    facts_there = facts.get(there.generation, {})
    sharing = facts_here.get("share", 1.0) / facts_there.get("share", 1.0)
    achievable = facts_here.get("achievable", 1.0) / facts_there.get("achievable", 1.0)
    return replace(
        c,
        compute=min(c.compute * achievable, BOUNDS["compute"][1]),
        feed=c.feed * arithmetic,
        store=c.store * arithmetic,
        l2=c.l2 * clock * here.sms / there.sms * sharing,
        step=c.step / arithmetic,
        **_misaligned_constants(here.generation, dtype),
    )


def _misaligned_constants(generation: str, dtype: str) -> dict[str, float]:
    """Return a generation's two constants for kernels that read misaligned rows.

    Plain FMAs in fp32 need no bulk copies, so misaligned rows cost them nothing.
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

    A generation without measured constants uses those of another generation. The slug is then that
    of the other generation's machine.
    """
    table = _constants_table()
    origin = _entry(table["like"].get(generation, generation), dtype).get("machine")
    return None if origin is None else str(origin)


def _entry(generation: str, dtype: str) -> dict[str, Any]:
    """Return a generation's entry in constants.toml: the one for the dtype, or the general one."""
    table = _constants_table()
    entry: dict[str, Any] = table.get(f"{generation}-{dtype}") or table[generation]
    return entry


def _constants(entry: dict[str, Any]) -> Constants:
    """Return the constants of an entry in constants.toml, without its other keys."""
    return Constants.from_json({name: entry[name] for name in BOUNDS if name in entry})


@functools.cache
def _constants_table() -> dict[str, Any]:
    """Return the content of constants.toml. Callers must not change it."""
    return tomllib.loads(Path(__file__).with_name("constants.toml").read_text(encoding="utf-8"))
