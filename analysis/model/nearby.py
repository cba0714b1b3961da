"""Public collections of a machine and of its siblings, as priors for its own measurements."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.imports.tables import gemms_of
from analysis.model.fitting import fit_collection
from analysis.model.offsets import COARSE, LIBRARY, WHOLE, CollectionTrees, TreeSettings
from analysis.model.prior import Prior, leaders, prior_from_tables
from analysis.model.query import Query
from analysis.model.residual import MIN_ROWS, can_grow
from analysis.recordings.imported import PLACE, folder_of, read_collections
from analysis.recordings.load import Recording
from kernels.cli import note
from kernels.common.errors import UserError
from kernels.machine import Machine, known_machines
from kernels.problem import Gemm, Problem
from kernels.timemodel.estimate import Array

_DTYPES = {"bf16": "bf16", "fp16": "bf16", "fp8": "fp8"}
"""The dtype of the collections that tell about a dtype; both 16-bit types share their units."""

_MOST_ROWS = 10_000  # own measurements, beyond which public tables say nothing new
_MOST_SIBLINGS = 3


@dataclass(frozen=True)
class Collection:
    """Public rows of one machine and dtype; ``seconds`` has one element for each GEMM."""

    machine: Machine
    source: str
    gemms: Sequence[Gemm]
    seconds: Array

    @classmethod
    def from_rows(cls, machine: Machine, source: str, rows: pd.DataFrame) -> Collection:
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

    def fitted(self, settings: TreeSettings) -> CollectionTrees:
        """Its constants and trees."""
        return fit_collection(self.machine, self.source, self.gemms, self.seconds, settings)


def fitted_all(machine: Machine, collections: Sequence[Collection]) -> tuple[CollectionTrees, ...]:
    """Collections near a machine: its own first, with finer trees than siblings' next to them.

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


def priors_for(recording: Recording, rows: pd.DataFrame) -> dict[str, Prior]:
    """The prior of each group of a recording that imported public tables tell about.

    The tables are of the machine itself and of its generation's others. None has seen a shape of
    the recording. A published recording must not depend on what was imported, and public tables
    say the same with and without it.

    Args:
        recording: whose machine; its folder says where imports lie.
        rows: the rows that the model will be fitted to.
    """
    if (
        recording.machine.kind != "gpu"
        or recording.run.get("published")
        or recording.is_public_table
    ):
        return {}
    if not can_grow():  # a node without scikit-learn predicts by the formula alone
        return {}
    results = recording.folder.parent
    if results.name == PLACE:
        results = results.parent
    found: dict[str, Prior] = {}
    of_library = (rows["op"] == "gemm") & (rows["implementation"] == LIBRARY)
    for dtype, theirs in _DTYPES.items():
        own = rows[of_library & (rows["dtype"] == dtype)]
        if not 0 < len(own) <= _MOST_ROWS:
            continue
        shapes = own[["m", "n", "k"]].to_numpy(dtype=np.int64)
        near = [each.without(shapes) for each in _near(results, recording.machine, theirs)]
        if trees := fitted_all(recording.machine, near):
            query = Query.from_rows(own)
            found[f"{LIBRARY} gemm {dtype}"] = prior_from_tables(
                recording.machine, dtype, trees, query
            )
    return found


def _near(results: Path, machine: Machine, dtype: str) -> Iterator[Collection]:
    """The machine's collections, then its siblings'."""
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
    return [
        Collection.from_rows(machine, source, rows)
        for source, rows in of_dtype.items()
        if len(rows)
    ]
