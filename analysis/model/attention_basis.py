"""Find the fits for attention on a machine, and predict calls with an interval."""

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
from kernels.machine import Machine, known_machine
from sweeps.capture.captured import Attention

FILE = "attention.json"
"""File of an imported machine's fits, next to its measurements."""

FRAMEWORKS = ("vllm", "trtllm", "sglang")
"""Frameworks with measured attention. If no framework is named, the first one with fits for the
machine answers: its kernels are FlashAttention's, like those of PyTorch."""

_SHIPPED = Path(__file__).parents[2] / "kernels" / "timemodel" / "attention.json"
_FEW = 16  # queries per sequence up to which keys and values decide the time, as when decoding
_LIKE = 8  # keys per query from which a call is like decoding
_DTYPES = ("bf16", "fp16")

Fits = Mapping[str, Mapping[str, AttentionFit]]
"""Fits by framework and kind of call."""


class AttentionTime(NamedTuple):
    """Predicted time of a call in seconds, with its 90% interval and what limits it.

    ``limit`` is ``compute``, ``memory`` or ``launch``. ``spread`` is the half width of the 90%
    interval of the logarithm of its ratio to a similar call by the same framework.
    """

    seconds: float
    lo: float
    hi: float
    limit: str
    spread: float


@dataclass(frozen=True)
class AttentionBasis:
    """Fits for attention on a machine, and where they come from.

    Attributes:
        machine: the machine that is predicted.
        measured_on: the machine that was measured; another one if this one was not.
        fits: fits by framework and kind of call.
        kind: ``public`` if the fits are to imported tables, ``shipped`` if they are constants that
            are shipped for the machine, ``generation`` if they are those of another machine.
        spreads: by kind of call, the 90% interval of the logarithm of the true time over the
            predicted one. It replaces a fit's own interval if the framework is not known, or if
            another machine was measured.
    """

    machine: Machine
    measured_on: str
    fits: Fits
    kind: str
    spreads: Mapping[str, tuple[float, float]]

    def framework(self, named: str | None) -> str:
        """Return the framework to predict: the named one, or else the first one with fits.

        Raises:
            UserError: if the named framework was not measured on the machine.
        """
        if named is None:
            return next(name for name in FRAMEWORKS if name in self.fits)
        if named not in self.fits:
            raise UserError(
                f"--attention-kernel {named!r} was not measured on {self.measured_on}; "
                f"{nearest(named, self.fits)}"
            )
        return named

    def source(self, named: str | None) -> str:
        """Name the framework and the tables behind a prediction, in words."""
        framework = self.framework(named)
        tables = "public tables" if self.kind == "public" else "constants from public tables"
        origin = "" if self.measured_on == self.machine.slug else f" of {self.measured_on}"
        coverage = "" if named else ", with an interval that covers other frameworks"
        return f"{framework}'s attention, {tables}{origin}{coverage}"

    def predict(self, work: Attention, named: str | None = None) -> AttentionTime:
        """Predict the forward pass of a call.

        Args:
            work: the call.
            named: framework whose kernel computes it; None if it is not known.
        """
        framework = self.framework(named)
        kind = kind_of(work)
        # 1. Choose the fit. Not every machine has fits for encoders. A call without a mask does
        #    twice the work of a causal one, as if it had twice the queries.
        fits = self.fits[framework]
        measured_kind = kind if kind in fits else CONTEXT
        query_factor = 1.0 if measured_kind == kind else 2.0
        fit = fits[measured_kind]
        sizes = {
            "batch": work.batch,
            "heads": work.heads,
            "kv_heads": work.kv_heads,
            "queries": query_factor * work.queries,
            "keys": work.keys,
            "width": (work.width + work.value_width) / 2,
            "seen": min(work.keys, work.window or work.keys),  # 0 means no window
        }
        shapes = AttentionShapes(**{name: np.array([float(size)]) for name, size in sizes.items()})
        # 2. Predict. Between two decoding steps, weights and other layers replace a layer's keys
        #    and values in the cache.
        warm = measured_kind != DECODE
        seconds = float(fit.seconds(shapes, measured_kind, self.machine, warm)[0])
        parts = fit.constants.parts(shapes, measured_kind, self.machine, warm)[:, 0]
        limit = ("launch", "compute", "memory")[int(np.argmax(parts))]
        # 3. The fit's own interval only holds for the framework and the machine that it was fitted
        #    to.
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
    """Return the kind of measured calls that a call is most like."""
    if work.queries <= _FEW and work.keys >= _LIKE * work.queries:
        return DECODE
    return CONTEXT if work.causal else FULL


def find_attention(machine: Machine, dtype: str, folder: Path | None) -> AttentionBasis | None:
    """Find the best fits for attention on a machine.

    These are, in this order:

    1. fits to the machine's imported tables;
    2. the constants that are shipped for it;
    3. the constants of the measured machine with the nearest peak, of the same generation if there
       is one.

    The result is None for a CPU, and for dtypes other than bf16 and fp16, which were not measured.

    Args:
        machine: the machine.
        dtype: dtype of the operands.
        folder: folder of the machine's imported tables; None if there is none.

    Raises:
        UserError: if the imported fits cannot be read.
    """
    if machine.kind == "cpu" or dtype not in _DTYPES:
        return None
    shipped = _shipped()
    if folder is not None and (folder / FILE).exists():
        path = folder / FILE
        try:
            fits = fits_from_json(json.loads(path.read_bytes()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path} cannot be read. Import the tables again.") from None
        # The file has no fits if the imported tables have no attention.
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
    """Return the slug with the nearest peak, from the machine's generation if one of them is."""
    measured = [known_machine(slug) for slug in slugs]
    siblings = [other for other in measured if other.generation == machine.generation]

    def log_distance(other: Machine) -> float:
        return abs(math.log(peak_of(other) / peak_of(machine)))

    return min(siblings or measured, key=log_distance).slug


def _spreads(data: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Convert intervals by kind of call, as JSON has them, for :class:`AttentionBasis`."""
    return {kind: (float(low), float(high)) for kind, (low, high) in data.items()}


def fit_tables(
    tables: Sequence[AttentionTable], machine: Machine | None = None
) -> dict[str, dict[str, AttentionFit]]:
    """Fit each collection of one machine, and return the fits by framework and kind of call.

    ``machine`` is the machine of all tables; if it is None, each table names its own.
    """
    fits: dict[str, dict[str, AttentionFit]] = {}
    for table in tables:
        shapes, seconds = read_calls(table)
        measured = machine or known_machine(table.slug)
        fit = AttentionFit.from_times(shapes, seconds, table.kind, measured)
        fits.setdefault(table.framework, {})[table.kind] = fit
    return fits


def fits_from_json(data: Mapping[str, Any]) -> dict[str, dict[str, AttentionFit]]:
    """Read what :func:`fits_to_json` returned.

    Raises:
        KeyError, TypeError, ValueError: if the document does not have such fits.
    """
    return {
        framework: {kind: AttentionFit.from_json(fit) for kind, fit in kinds.items()}
        for framework, kinds in data.items()
    }


def fits_to_json(fits: Fits) -> dict[str, Any]:
    """Return fits as a document."""
    return {
        framework: {kind: fit.to_json() for kind, fit in kinds.items()}
        for framework, kinds in fits.items()
    }


@functools.cache
def _shipped() -> dict[str, Any]:
    """Read the fits that are shipped for some machines, and how far they may be off."""
    document: dict[str, Any] = json.loads(_SHIPPED.read_bytes())
    return document
