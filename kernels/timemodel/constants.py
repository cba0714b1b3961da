"""Constants of the time estimate: their meaning, their bounds and their shipped values."""

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
    """Constants that no datasheet states, for one machine and dtype."""

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
        """Build constants from the result of :meth:`to_json` in this or an earlier version.

        A missing constant gets its default from constants.toml.

        Raises:
            TypeError: if a constant is unknown, or if it is missing and has no default.
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
"""Lowest and highest value that a fit may give to each constant."""


LINEAR = frozenset(
    {
        "tail", "partials", "slow", "misalignment", "fallback", "fallback_split", "repack",
        "resident",
    }
)  # fmt: skip
"""Constants that are fitted and averaged on a linear scale.

The logarithms of all other constants are fitted and averaged.
"""

RATES = frozenset({"compute", "dram", "feed", "l2", "store"})
"""Constants that are smaller on a machine that is slower in every respect."""

DURATIONS = frozenset({"epilogue", "step", "launch", "split"})
"""Constants that are larger on a machine that is slower in every respect."""

_SMALLEST = 1e-10  # smallest constant whose logarithm is taken


def to_fit_scale(name: str, value: float) -> float:
    """Convert a constant to the scale on which it is fitted and averaged; see :data:`LINEAR`."""
    return value if name in LINEAR else float(np.log(max(value, _SMALLEST)))


def from_fit_scale(name: str, value: Any) -> Any:
    """Convert a constant, or an array of its values, from the scale of :func:`to_fit_scale`."""
    return value if name in LINEAR else np.exp(value)


def mean_constants(sets: Sequence[Constants]) -> Constants:
    """Average one or more sets of constants, each constant on the scale on which it is fitted."""
    means: dict[str, float] = {}
    for name in BOUNDS:
        fitted = [to_fit_scale(name, getattr(constants, name)) for constants in sets]
        means[name] = float(from_fit_scale(name, np.mean(fitted)))
    return Constants(**means)


def physical_bounds(machine: Machine) -> dict[str, tuple[float, float]]:
    """Return :data:`BOUNDS`, except that a GPU's clocks set the upper bound of ``compute``.

    A datasheet states the peak at the Tensor Core clock. If the boost clock is higher, a kernel may
    exceed this peak, so ``compute`` may exceed 1.
    """
    if not machine.tensor_mhz:  # a CPU: its peak was measured, and a case may exceed it a little
        return BOUNDS
    low, _ = BOUNDS["compute"]
    return {**BOUNDS, "compute": (low, max(1.0, machine.boost_mhz / machine.tensor_mhz))}


def default_constants(generation: str, dtype: str, hand_written: bool = False) -> Constants:
    """Return a generation's constants from ``constants.toml``, before any calibration.

    A generation without measured constants gets those of a similar generation. The constants for
    misaligned rows are then replaced by those that :func:`_misaligned_constants` returns.

    If ``hand_written`` is True, as it is for Triton kernels, ``misalignment`` is not replaced. Its
    values in the ``facts`` of constants.toml are for vendor libraries, which compute misaligned
    rows with kernels for older GPUs.
    """
    measured_generation = _constants_table()["like"].get(generation, generation)
    measured = _constants(_entry(measured_generation, dtype))
    misaligned_constants = _misaligned_constants(generation, dtype)
    if hand_written:
        misaligned_constants["misalignment"] = measured.misalignment
    return replace(measured, **misaligned_constants)


@functools.cache
def shipped_fits() -> dict[str, Any]:
    """Return the content of shipped.json, which a study of the public tables writes.

    Callers must not change the content. Its keys are:

    - ``source``: package of the public tables.
    - ``software``: error range of predictions for another framework, over all machines
      (:class:`analysis.model.fit.SoftwareRange`).
    - ``generation``: error range of predictions with constants from another machine of the same
      generation.
    - ``generations``: error range of predictions with the mean of other generations' constants.
    - ``spreads``: uncertainty of each kind of prior (:class:`analysis.model.prior.Spread`).
    - ``groups``: factors for the two ends of an interval, by kind of prior, generation and kind of
      shape (:mod:`analysis.model.groups`).
    - ``floor``: prediction errors if the times of a framework's earlier version are taken as
      predictions for a later version.
    - ``machines``: one entry per machine, by slug. In an entry, ``source`` is the framework and
      version with which the machine was measured, ``software`` is the error range of predictions
      for another framework on this machine only, and ``groups`` has the fits by group, as in
      calibration.json.
    """
    fits: dict[str, Any] = json.loads(_SHIPPED.read_bytes())
    return fits


def foreign_constants(
    machine: Machine, dtype: str, slug: str | None = None
) -> tuple[Constants, str]:
    """Return constants for a GPU, scaled from those of another GPU, and the other GPU's slug.

    The launch time is that of the machine's generation, if constants.toml states it. ``slug``
    selects the other GPU. None selects one of the same generation if possible, otherwise of the
    latest earlier generation, and otherwise of the first later generation.

    For a CPU, return the CPU constants from constants.toml, and ``cpu`` as the slug.

    Raises:
        UserError: if the GPU does not support the dtype, or if ``slug`` names the machine
            itself or a machine without constants for the dtype.
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
    if slug == machine.slug:
        raise UserError(
            f"constants for {slug} cannot come from {slug} itself; name another machine as the "
            "source of the constants."
        )
    if slug is not None and slug not in by_slug:
        suggestion = nearest(slug, by_slug)
        raise UserError(f"constants.toml has no {dtype} constants for {slug!r}; {suggestion}")
    # 2. Scale the constants of the selected machine, or of the first one, which is the closest.
    origin = next(iter(by_slug)) if slug is None else slug
    origin_machine = known_machine(origin)
    origin_constants = _constants(by_slug[origin])
    scaled = scaled_constants(origin_constants, origin_machine, machine, dtype)
    generation_facts = table["facts"].get(machine.generation, {})
    launch = generation_facts.get("launch", origin_constants.launch)
    return replace(scaled, launch=launch), origin


def scaled_constants(
    c: Constants, there: Machine, here: Machine, dtype: str, exponent: float = 1.0
) -> Constants:
    """Scale the constants ``c`` of the GPU ``there`` to the GPU ``here``.

    The bytes that one SM reads or writes per second are assumed to scale with its FLOP/s, and the
    latency of a K step inversely. The ratio of the two SMs' FLOP/s is raised to ``exponent``. An
    exponent below 1 suits GPUs whose SMs differ less in their read and write rates than in their
    FLOP/s: many graphics GPUs halve only the rate of their Tensor Cores.

    The constants for misaligned rows are not scaled. Those that :func:`_misaligned_constants`
    returns for the generation of ``here`` replace those in ``c``, even if ``c`` was fitted.
    """
    # 1. Compare the two datasheets. Each ratio is the value of ``here`` relative to ``there``.
    clock_ratio = here.boost_mhz / there.boost_mhz
    # If ``there`` does not support this dtype, as Volta does not support bf16, its peak in fp16 is
    # compared.
    peak_there = there.peaks.get(dtype) or there.peak("fp16")
    sm_flops_ratio = (here.peak(dtype) / here.sms / (peak_there / there.sms)) ** exponent
    # 2. Compare the facts of the two generations in constants.toml, which explains them.
    facts = _constants_table()["facts"]
    facts_here = facts.get(here.generation, {})
    facts_there = facts.get(there.generation, {})
    sharing_ratio = facts_here.get("share", 1.0) / facts_there.get("share", 1.0)
    achievable_ratio = facts_here.get("achievable", 1.0) / facts_there.get("achievable", 1.0)
    # 3. Scale the constants that depend on these ratios, and replace those of misaligned rows.
    return replace(
        c,
        compute=min(c.compute * achievable_ratio, BOUNDS["compute"][1]),
        feed=c.feed * sm_flops_ratio,
        store=c.store * sm_flops_ratio,
        l2=c.l2 * clock_ratio * here.sms / there.sms * sharing_ratio,
        step=c.step / sm_flops_ratio,
        **_misaligned_constants(here.generation, dtype),
    )


def _misaligned_constants(generation: str, dtype: str) -> dict[str, float]:
    """Return a generation's constants for misaligned rows, by name.

    ``misalignment`` is left out if the generation's facts in constants.toml do not state it. In
    fp32, it is always left out, and the other constants are the same for all generations, because
    plain FMAs need no bulk copies.
    """
    facts: dict[str, float] = {}
    if dtype != "fp32":
        facts = _constants_table()["facts"].get(generation, {})
    constants = {
        "fallback": facts.get("fallback", 0.0),
        "fallback_split": facts.get("fallback_split", 1.0),
    }
    if "misalignment" in facts:
        constants["misalignment"] = facts["misalignment"]
    return constants


def measured_on(generation: str, dtype: str) -> str | None:
    """Return the slug of the machine on which a generation's constants were measured.

    The machine may be of another generation. The result is None for a CPU.
    """
    table = _constants_table()
    origin = _entry(table["like"].get(generation, generation), dtype).get("machine")
    return None if origin is None else str(origin)


def _entry(generation: str, dtype: str) -> dict[str, Any]:
    """Return the entry GENERATION-DTYPE of constants.toml or, if there is none, GENERATION."""
    table = _constants_table()
    entry: dict[str, Any] = table.get(f"{generation}-{dtype}") or table[generation]
    return entry


def _constants(entry: dict[str, Any]) -> Constants:
    return Constants.from_json({name: entry[name] for name in BOUNDS if name in entry})


@functools.cache
def _constants_table() -> dict[str, Any]:
    """Return the content of constants.toml. Callers must not change it."""
    return tomllib.loads(Path(__file__).with_name("constants.toml").read_text(encoding="utf-8"))
