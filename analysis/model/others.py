"""Others' collections near a machine, as priors for its own rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.model.fitting import fit_prior, leaders
from analysis.model.prior import COARSE, LIBRARY, WHOLE, Growth, Prior
from analysis.model.residual import MIN_ROWS, can_grow
from analysis.recordings.imported import PLACE, folder_of, read_collections
from analysis.recordings.load import Recording
from analysis.recordings.tables import gemms_of
from kernels.cli import note
from kernels.errors import UserError
from kernels.estimate import Array
from kernels.machine import Machine, known_machines
from kernels.problem import Gemm, Problem

THEIRS = {"bf16": "bf16", "fp16": "bf16", "fp8": "fp8"}
"""The dtype of the collections that tell about one of ours; both 16-bit types share their units."""

_MOST_ROWS = 10_000  # of one's own: beyond them others' rows say nothing that one's own do not
_MOST_SIBLINGS = 3


@dataclass(frozen=True)
class Collection:
    """Others' rows of one machine and dtype; ``seconds`` has one element for each product."""

    machine: Machine
    source: str
    gemms: Sequence[Gemm]
    seconds: Array

    @classmethod
    def of(cls, machine: Machine, source: str, rows: pd.DataFrame) -> Collection:
        """From rows of a table."""
        return cls(machine, source, gemms_of(rows), rows["time_us"].to_numpy(dtype=float) * 1e-6)

    def without(
        self, shapes: NDArray[np.int64], levels: Sequence[NDArray[np.int64]] = ()
    ) -> Collection:
        """Without some shapes, and without any that has one of some values of M, of N or of K."""
        sizes = sizes_of(self.gemms)
        gone = set(map(tuple, shapes.tolist()))
        known = np.array([tuple(size) not in gone for size in sizes.tolist()], dtype=bool)
        for column, values in enumerate(levels):
            known &= ~np.isin(sizes[:, column], values)
        gemms = list(itertools.compress(self.gemms, known))
        return replace(self, gemms=gemms, seconds=self.seconds[known])

    def fitted(self, growth: Growth) -> Prior:
        """As a prior, with so many trees."""
        return fit_prior(self.machine, self.source, self.gemms, self.seconds, growth)


def fitted_all(machine: Machine, collections: Sequence[Collection]) -> tuple[Prior, ...]:
    """Collections as priors of a machine: its own first; of siblings beside them, coarser trees.

    Those that are left with hardly any rows are left out.
    """
    known = [each for each in collections if len(each.gemms) >= MIN_ROWS]
    known.sort(key=lambda each: each.machine.slug != machine.slug)
    leading = leaders(machine, [each.machine for each in known])
    return tuple(
        each.fitted(WHOLE if i in leading or each.machine.slug == machine.slug else COARSE)
        for i, each in enumerate(known)
    )


def sizes_of(problems: Sequence[Problem]) -> NDArray[np.int64]:
    """M, N and K (columns) of each problem's GEMM (rows)."""
    gemms = (problem.implied_gemm for problem in problems)
    return np.array([(g.m, g.n, g.k) for g in gemms], dtype=np.int64).reshape(-1, 3)


def priors_of(recording: Recording, rows: pd.DataFrame) -> dict[str, tuple[Prior, ...]]:
    """What others' imported tables say about a recording's machine, by dtype.

    They are of the machine itself and of its generation's others. None of them has seen a shape of
    the recording. A published recording must not depend on what was imported, and others' tables
    say the same with and without it.

    Args:
        recording: whose machine; its folder says where imports lie.
        rows: the rows that the model will be fitted to.
    """
    if recording.machine.kind != "gpu" or recording.run.get("published") or recording.by_others:
        return {}
    if not can_grow():  # a node without scikit-learn predicts by the formula alone
        return {}
    results = recording.folder.parent
    if results.name == PLACE:
        results = results.parent
    found: dict[str, tuple[Prior, ...]] = {}
    of_library = (rows["op"] == "gemm") & (rows["implementation"] == LIBRARY)
    for dtype, theirs in THEIRS.items():
        own = rows[of_library & (rows["dtype"] == dtype)]
        if not 0 < len(own) <= _MOST_ROWS:
            continue
        shapes = own[["m", "n", "k"]].to_numpy(dtype=np.int64)
        near = [each.without(shapes) for each in _near(results, recording.machine, theirs)]
        if known := fitted_all(recording.machine, near):
            found[dtype] = known
    return found


def _near(results: Path, machine: Machine, dtype: str) -> Iterator[Collection]:
    """The machine's collections and its siblings'."""
    siblings = [
        other
        for other in known_machines().values()
        if other.generation == machine.generation and other.slug != machine.slug
    ]
    known = (_collections(results, sibling, dtype) for sibling in siblings)
    imported = itertools.islice(filter(None, known), _MOST_SIBLINGS)
    for collections in (_collections(results, machine, dtype), *imported):
        yield from collections


def _collections(results: Path, machine: Machine, dtype: str) -> list[Collection]:
    try:
        parts = read_collections(folder_of(results, machine.slug))
    except UserError as error:  # one machine's damaged file must not keep others from calibrating
        note(str(error))
        return []
    of_dtype = {source: rows[rows["dtype"] == dtype] for source, rows in parts.items()}
    return [Collection.of(machine, source, rows) for source, rows in of_dtype.items() if len(rows)]
