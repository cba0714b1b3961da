"""Find the fits for fused attention on a machine, and predict the time of an attention call."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from analysis.attention_shapes import CONTEXT, DECODE, FULL, AttentionShapes
from analysis.imports.attention_tables import AttentionTable, read_calls
from analysis.model.attention import AttentionFit, peak_of
from kernels.common.errors import UserError, nearest
from kernels.common.program import command
from kernels.machine import Machine, known_machine
from sweeps.capture.captured import Attention

FILE = "attention.json"
"""Name of the file with the fits to a machine's imported attention tables."""

FRAMEWORKS = ("vllm", "trtllm", "sglang")
"""Frameworks with public tables of attention, in order of preference. vLLM comes first because it
uses FlashAttention, as PyTorch does."""

_SHIPPED = Path(__file__).parents[2] / "kernels" / "timemodel" / "attention.json"
_MAX_DECODE_QUERIES = 16  # A call with more queries per sequence does not count as decoding.
_MIN_DECODE_RATIO = 8  # A call with fewer keys per query does not count as decoding.
_DTYPES = ("bf16", "fp16")
_FEWEST_CALLS = 10  # Fewer calls are too few to fit the constants and to judge the fit.

Fits = Mapping[str, Mapping[str, AttentionFit]]
"""Fits for attention by framework, then by kind of call: ``context``, ``full`` or ``decode``."""


class AttentionTime(NamedTuple):
    """Predicted time of one attention call.

    Attributes:
        seconds: predicted time.
        lo: lower end of the time's 90% interval, in seconds.
        hi: upper end of the time's 90% interval, in seconds.
        limit: what limits the call: ``compute``, ``memory`` or ``launch``.
        spread: half-width of the fit's 90% range of log(measured / predicted). This range does not
            cover other frameworks or machines, even if the interval from ``lo`` to ``hi`` does.
    """

    seconds: float
    lo: float
    hi: float
    limit: str
    spread: float


@dataclass(frozen=True)
class AttentionBasis:
    """Fits for fused attention on a machine, and where they come from.

    In all methods, ``named`` is the framework that the user chose; None if the user did not choose
    a framework.

    Attributes:
        machine: the machine whose times are predicted.
        measured_on: slug of the machine whose times were fitted.
        fits: fits of at least one framework. Each of these frameworks has a fit for ``context``.
            This fit also predicts calls of the kinds that have no fit.
        kind: ``public`` for fits to imported tables of the machine, ``shipped`` for the machine's
            constants that come with Rooftile, ``generation`` for shipped constants of another
            machine.
        spreads: for each kind of call, the 5th and 95th percentiles of log(measured / predicted) if
            a fit to the times of one framework or machine predicts those of another. They replace
            the fit's own percentiles if no framework is named, or if the fits come from another
            machine.
    """

    machine: Machine
    measured_on: str
    fits: Fits
    kind: str
    spreads: Mapping[str, tuple[float, float]]

    def framework(self, named: str | None) -> str:
        """Return ``named``; if it is None, return the preferred framework that has fits.

        Raises:
            UserError: if the named framework has no fits.
        """
        if named is None:
            return next(name for name in (*FRAMEWORKS, *self.fits) if name in self.fits)
        if named not in self.fits:
            raise UserError(
                f"--attention-kernel: there are no attention times of {named!r} on "
                f"{self.measured_on}; {nearest(named, self.fits)}"
            )
        return named

    def source(self, named: str | None) -> str:
        """Describe the framework and the tables behind a prediction, in words for the user.

        Raises:
            UserError: if the named framework has no fits.
        """
        framework = self.framework(named)
        tables = "public tables" if self.kind == "public" else "constants from public tables"
        origin = "" if self.measured_on == self.machine.slug else f" of {self.measured_on}"
        coverage = "" if named else ", with an interval that covers other frameworks"
        return f"{framework}'s attention, {tables}{origin}{coverage}"

    def predict(self, work: Attention, named: str | None = None) -> AttentionTime:
        """Predict the time of an attention call's forward pass.

        Raises:
            UserError: if the named framework has no fits, or if the machine does not
                support the call's dtype.
        """
        self.machine.peak(work.dtype)  # raises a UserError for an unsupported dtype
        framework = self.framework(named)
        kind = kind_of(work)
        # 1. Choose the fit. The fit for causal calls stands in for a missing one. A causal mask
        #    halves the work, so a call without a mask is then predicted as a causal call with twice
        #    as many queries. With a window, causal and other calls do the same work. In decoding,
        #    memory accesses take longer than arithmetic, so this factor does not matter.
        fits = self.fits[framework]
        measured_kind = kind if kind in fits else CONTEXT
        fit = fits[measured_kind]
        seen = min(work.keys, work.window or work.keys)  # a window of 0 means no window
        is_twice_causal = kind == FULL and measured_kind == CONTEXT and seen == work.keys
        query_factor = 2.0 if is_twice_causal else 1.0
        # The shapes have a single width. With the mean of the two widths, the FLOPs and bytes of
        # the call remain right.
        mean_width = (work.width + work.value_width) / 2
        sizes = {
            "batch": work.batch,
            "heads": work.heads,
            "kv_heads": work.kv_heads,
            "queries": query_factor * work.queries,
            "keys": work.keys,
            "width": mean_width,
            "seen": seen,
        }
        shapes = AttentionShapes(**{name: np.array([float(size)]) for name, size in sizes.items()})
        # 2. Predict. In decoding, keys and values come from memory, because between two steps other
        #    layers replace them in the cache. If the fit for causal calls stands in for a missing
        #    fit for decoding, the call is predicted warm, as all calls other than decoding are.
        warm = measured_kind != DECODE
        seconds = float(fit.seconds(shapes, measured_kind, self.machine, warm)[0])
        # The names of the limits are in the order in which parts() returns the times.
        parts = fit.constants.parts(shapes, measured_kind, self.machine, warm)[:, 0]
        limit = ("launch", "compute", "memory")[int(np.argmax(parts))]
        # 3. Choose the interval. The interval of the fit only holds for the framework and machine
        #    whose times were fitted.
        low, high = fit.low, fit.high
        if named is None or self.measured_on != self.machine.slug:
            low, high = self.spreads[measured_kind]
        return AttentionTime(
            seconds=seconds,
            lo=seconds * math.exp(low),
            hi=seconds * math.exp(high),
            limit=limit,
            spread=(fit.high - fit.low) / 2,
        )


def kind_of(work: Attention) -> str:
    """Return the kind of a call: ``decode``, ``context`` (causal) or ``full`` (no causal mask).

    A call with few queries and many more keys is treated as decoding, even if it has more than one
    query per sequence, because reading keys and values takes most of its time.
    """
    if work.queries <= _MAX_DECODE_QUERIES and work.keys >= _MIN_DECODE_RATIO * work.queries:
        return DECODE
    return CONTEXT if work.causal else FULL


def find_attention(machine: Machine, dtype: str, folder: Path | None) -> AttentionBasis | None:
    """Find the best fits for fused attention on a machine.

    The result is the first of these that exists:

    1. fits to the machine's imported tables;
    2. constants that Rooftile ships for the machine;
    3. shipped constants of another machine (:func:`nearest_measured`).

    All fits and constants come from times of bf16 calls on GPUs, but they are also used for fp16
    calls. The result is None for a CPU, and for dtypes other than bf16 and fp16.

    ``folder`` is the folder that may contain fits to the machine's imported tables. It is None if
    the machine has no such folder.

    Raises:
        UserError: if the file with the fits to the imported tables cannot be read.
    """
    if machine.kind == "cpu" or dtype not in _DTYPES:
        return None
    shipped = _shipped()
    if folder is not None and (folder / FILE).exists():
        fits = read_fits(folder)
        # The file has no fits if the imported tables have no attention times.
        if fits:
            spreads = _spreads(shipped["software"]["trees"])
            return AttentionBasis(machine, machine.slug, fits, "public", spreads)
    if machine.slug in shipped["machines"]:
        fits = fits_from_json(shipped["machines"][machine.slug])
        spreads = _spreads(shipped["software"]["constants"])
        return AttentionBasis(machine, machine.slug, fits, "shipped", spreads)
    measured_on = nearest_measured(machine, list(shipped["machines"]))
    fits = fits_from_json(shipped["machines"][measured_on])
    spreads = _spreads(shipped["generation"])
    return AttentionBasis(machine, measured_on, fits, "generation", spreads)


def nearest_measured(machine: Machine, slugs: list[str]) -> str:
    """Return the slug of the measured machine whose 16-bit peak is nearest to that of ``machine``.

    If measured machines of the same generation exist, only these are compared.
    """
    measured = [known_machine(slug) for slug in slugs]
    siblings = [other for other in measured if other.generation == machine.generation]

    def log_distance(other: Machine) -> float:
        return abs(math.log(peak_of(other) / peak_of(machine)))

    return min(siblings or measured, key=log_distance).slug


def _spreads(data: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Read the percentiles for each kind of call from an entry of the shipped attention.json."""
    return {kind: (float(low), float(high)) for kind, (low, high) in data.items()}


def fit_tables(
    tables: Sequence[AttentionTable], machine: Machine | None = None
) -> dict[str, dict[str, AttentionFit]]:
    """Fit each table of attention times, and return the fits by framework and kind of call.

    A table with fewer than ten usable calls gets no fit. A framework without a fit for causal calls
    is left out, because the fit for causal calls must stand in for missing fits.

    ``machine`` is the machine that was measured; None to look it up by the slug of each table.

    Raises:
        UserError: if a table cannot be read, or if ``machine`` is None and a table's machine is not
            known.
    """
    fits: dict[str, dict[str, AttentionFit]] = {}
    for table in tables:
        shapes, seconds = read_calls(table)
        if len(seconds) < _FEWEST_CALLS:
            continue
        measured = machine or known_machine(table.slug)
        fit = AttentionFit.from_times(shapes, seconds, table.kind, measured)
        fits.setdefault(table.framework, {})[table.kind] = fit
    return {framework: by_kind for framework, by_kind in fits.items() if CONTEXT in by_kind}


def read_fits(folder: Path) -> dict[str, dict[str, AttentionFit]]:
    """Read the fits to a machine's imported tables from the file :data:`FILE` in ``folder``.

    Raises:
        UserError: if the file cannot be read.
    """
    path = folder / FILE
    try:
        return fits_from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f"{path} cannot be read. Run {command('analysis import')} to write it again."
        ) from None


def fits_from_json(data: Mapping[str, Any]) -> dict[str, dict[str, AttentionFit]]:
    """Restore the fits from the document that :func:`fits_to_json` returned.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: if the document is invalid.
    """
    fits = {
        framework: {kind: AttentionFit.from_json(fit) for kind, fit in kinds.items()}
        for framework, kinds in data.items()
    }
    if not all(CONTEXT in kinds for kinds in fits.values()):
        raise ValueError("a framework has no fit for causal calls")
    return fits


def fits_to_json(fits: Fits) -> dict[str, Any]:
    """Return fits as a JSON document."""
    return {
        framework: {kind: fit.to_json() for kind, fit in kinds.items()}
        for framework, kinds in fits.items()
    }


@functools.cache
def _shipped() -> dict[str, Any]:
    """Read the fits that Rooftile ships, and their errors for other frameworks and machines."""
    document: dict[str, Any] = json.loads(_SHIPPED.read_bytes())
    return document
