"""The constants of the time estimate: what they mean, what is possible, and what is shipped."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from kernels.errors import UserError, nearest
from kernels.machine import Machine, known_machine


@dataclass(frozen=True)
class Constants:
    """What the datasheet does not say. Physical, readable, each with bounds in :data:`BOUNDS`."""

    compute: float  # share of the peak that a tile's main loop reaches
    dram: float  # share of the datasheet's bandwidth that is reached
    feed: float  # bytes/s that one SM takes in
    l2: float  # bytes/s that all SMs together take from the L2
    store: float  # bytes/s at which one SM's epilogue writes its tile
    epilogue: float  # seconds a tile beside that
    step: float  # seconds that a K step takes at least
    launch: float  # seconds that no launch escapes
    tail: float  # 1: a started wave costs a whole one; 0: its share
    ramp: float  # CTAs in flight at which half of the bandwidth is reached
    split: float  # seconds of a kernel beside the product: it reduces a split K, or transforms
    partials: float  # share of a split K's partial sums that goes through memory
    slow: float  # how much longer a kernel takes for each e-fold over 2 ms: the clocks give way
    misalignment: float  # work slows by (alignment / 16 bytes)^-misalignment
    repack: float  # times that B is moved once more, repacked before the product; CPUs do
    resident: float  # share of an A that fits the last-level cache and is found there
    cached: float  # times that bandwidth when all operands are in the last-level cache
    sustained: float  # share of the burst's rate when the machine never pauses

    def to_json(self) -> dict[str, float]:
        """By name, for calibration.json."""
        return {f.name: float(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, float]) -> Constants:
        """Inverse of :meth:`to_json`; reads the names of earlier versions, too.

        Raises:
            TypeError: a constant is missing, or is none.
        """
        return cls(**{_EARLIER_NAMES.get(name, name): value for name, value in data.items()})


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
    "repack": (0.0, 20.0),
    "resident": (0.0, 1.0),
    "cached": (1.0, 20.0),
    "sustained": (0.3, 1.1),
}
"""What is physically possible for each constant."""


def physical_bounds(machine: Machine) -> dict[str, tuple[float, float]]:
    """:data:`BOUNDS` for one machine: nothing computes faster than its clock goes."""
    if not machine.tensor_mhz:  # a CPU, whose peak was measured and may be beaten a little
        return BOUNDS
    low, _ = BOUNDS["compute"]
    return {**BOUNDS, "compute": (low, max(1.0, machine.boost_mhz / machine.tensor_mhz))}


def default_constants(generation: str, dtype: str) -> Constants:
    """The shipped constants of a generation, before any calibration (``constants.toml``)."""
    return _constants(_entry(_shipped()["like"].get(generation, generation), dtype))


def foreign_constants(
    machine: Machine, dtype: str, slug: str | None = None
) -> tuple[Constants, str]:
    """Constants for a machine from measurements of another, scaled by the two datasheets.

    What one SM takes in or writes goes with its arithmetic, to which the rest of it is built; the
    latency of a K step goes against that. What all take from the L2 goes with clock and SMs.
    Launch, clusters and the share of the peak that real data reach are the generation's.

    Args:
        machine: the one that they are for.
        dtype: whose constants.
        slug: the machine to take them from. If None: another one of the same generation, or of the
            latest one before it, or of the first one after it.

    Returns:
        The constants, and the slug of the machine that they were measured on.

    Raises:
        UserError: ``slug`` is none whose constants are shipped.
    """
    if machine.kind == "cpu":
        return default_constants("cpu", dtype), "cpu"
    table = _shipped()
    order = table["order"]["generations"]
    here = order.index(machine.generation)
    nearest_first = [*order[: here + 1][::-1], *order[here + 1 :]]
    entries = [_entry(name, dtype) for name in nearest_first if name in table]
    found = {entry["machine"]: entry for entry in entries if entry["machine"] != machine.slug}
    if slug is not None and slug not in found:
        raise UserError(f"no constants of {slug!r} are shipped for {dtype}; {nearest(slug, found)}")
    origin = slug or next(iter(found))
    there, c = known_machine(origin), _constants(found[origin])
    clock = machine.boost_mhz / there.boost_mhz
    # A card that is too old for the dtype has the other one of 16 bits.
    theirs_peak = there.peaks.get(dtype) or there.peak("fp16")
    arithmetic = machine.peak(dtype) / machine.sms / (theirs_peak / there.sms)
    own, theirs = (table["facts"].get(m.generation, {}) for m in (machine, there))
    sharing = own.get("share", 1.0) / theirs.get("share", 1.0)
    reached = own.get("achievable", 1.0) / theirs.get("achievable", 1.0)
    scaled = replace(
        c,
        compute=min(c.compute * reached, BOUNDS["compute"][1]),
        feed=c.feed * arithmetic,
        store=c.store * arithmetic,
        l2=c.l2 * clock * machine.sms / there.sms * sharing,
        step=c.step / arithmetic,
        launch=own.get("launch", c.launch),
    )
    return scaled, origin


def _entry(generation: str, dtype: str) -> dict[str, Any]:
    table = _shipped()
    entry: dict[str, Any] = table.get(f"{generation}-{dtype}") or table[generation]
    return entry


def _constants(entry: dict[str, Any]) -> Constants:
    return Constants(**{name: entry[name] for name in BOUNDS})


@functools.cache
def _shipped() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("constants.toml").read_text(encoding="utf-8"))
