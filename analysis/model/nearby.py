"""Public collections of a machine and of its siblings, used as priors for its own measurements."""

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
"""Dtype of the collections that are used for each dtype. Both 16-bit dtypes run on the same units,
so bf16 is used for fp16."""

_MOST_ROWS = 10_000  # own measurements; beyond this number, public tables say nothing new
_MOST_SIBLINGS = 3


@dataclass(frozen=True)
class Collection:
    """Public measurements of one machine and dtype; ``seconds`` has one element for each GEMM."""

    machine: Machine
    source: str
    gemms: Sequence[Gemm]
    seconds: Array

    @classmethod
    def from_rows(cls, machine: Machine, source: str, rows: pd.DataFrame) -> Collection:
        """Convert rows as :func:`analysis.imports.tables.read_rows` returns them."""
        return cls(machine, source, gemms_of(rows), rows["time_us"].to_numpy(dtype=float) * 1e-6)

    def without(
        self, shapes: NDArray[np.int64], levels: Sequence[NDArray[np.int64]] = ()
    ) -> Collection:
        """Return the collection without some shapes and without all shapes that have certain sizes.

        Args:
            shapes: M, N and K (columns) of the shapes to leave out.
            levels: the values of M, of N and of K whose shapes are left out.
        """
        sizes = sizes_of(self.gemms)
        removed = set(map(tuple, shapes.tolist()))
        kept = np.array([tuple(size) not in removed for size in sizes.tolist()], dtype=bool)
        for column, values in enumerate(levels):
            kept &= ~np.isin(sizes[:, column], values)
        gemms = list(itertools.compress(self.gemms, kept))
        return replace(self, gemms=gemms, seconds=self.seconds[kept])

    def fitted(self, settings: TreeSettings) -> CollectionTrees:
        """Fit constants to the collection and grow its trees."""
        return fit_collection(self.machine, self.source, self.gemms, self.seconds, settings)


def fitted_all(machine: Machine, collections: Sequence[Collection]) -> tuple[CollectionTrees, ...]:
    """Fit the collections near a machine, its own first.

    The machine's own collections and those that answer without own measurements
    (:func:`analysis.model.prior.leaders`) get finer trees than the others. Collections with fewer
    than :data:`analysis.model.residual.MIN_ROWS` GEMMs are left out.
    """
    large = [collection for collection in collections if len(collection.gemms) >= MIN_ROWS]
    # False sorts before True, so the machine's own collections come first.
    large.sort(key=lambda collection: collection.machine.slug != machine.slug)
    leading = leaders(machine, [collection.machine for collection in large])
    fitted = []
    for position, collection in enumerate(large):
        is_fine = position in leading or collection.machine.slug == machine.slug
        fitted.append(collection.fitted(WHOLE if is_fine else COARSE))
    return tuple(fitted)


def sizes_of(problems: Sequence[Problem]) -> NDArray[np.int64]:
    """Return M, N and K (columns) of each problem's GEMM (rows)."""
    gemms = (problem.implied_gemm for problem in problems)
    return np.array([(g.m, g.n, g.k) for g in gemms], dtype=np.int64).reshape(-1, 3)


def priors_for(recording: Recording, rows: pd.DataFrame) -> dict[str, Prior]:
    """Build a prior for each group of a recording that imported public tables apply to.

    The tables are those of the machine itself and of its siblings. Shapes of the recording are left
    out of them, so that no prior has seen such a shape. Published recordings and imported public
    tables get no priors, because they must not depend on what else was imported.

    Args:
        recording: the recording; imports are looked for next to its folder.
        rows: the rows that the model will be fitted to.
    """
    if (
        recording.machine.kind != "gpu"
        or recording.run.get("published")
        or recording.is_public_table
    ):
        return {}
    if not can_grow():  # without scikit-learn, only the formula predicts
        return {}
    results = recording.folder.parent
    # The recording of an imported file lies among the imported tables.
    if results.name == PLACE:
        results = results.parent
    priors: dict[str, Prior] = {}
    is_library_gemm = (rows["op"] == "gemm") & (rows["implementation"] == LIBRARY)
    for dtype, table_dtype in _DTYPES.items():
        measured = rows[is_library_gemm & (rows["dtype"] == dtype)]
        if not 0 < len(measured) <= _MOST_ROWS:
            continue
        shapes = measured[["m", "n", "k"]].to_numpy(dtype=np.int64)
        nearby = [
            collection.without(shapes)
            for collection in _nearby_collections(results, recording.machine, table_dtype)
        ]
        if trees := fitted_all(recording.machine, nearby):
            query = Query.from_rows(measured)
            priors[f"{LIBRARY} gemm {dtype}"] = prior_from_tables(
                recording.machine, dtype, trees, query
            )
    return priors


def _nearby_collections(results: Path, machine: Machine, dtype: str) -> Iterator[Collection]:
    """Yield the collections of the machine, then those of at most three siblings."""
    siblings = [
        candidate
        for candidate in known_machines().values()
        if candidate.generation == machine.generation and candidate.slug != machine.slug
    ]
    yield from _read_machine(results, machine, dtype)
    by_sibling = (_read_machine(results, sibling, dtype) for sibling in siblings)
    # Siblings without imported tables do not count.
    imported = filter(None, by_sibling)
    for collections in itertools.islice(imported, _MOST_SIBLINGS):
        yield from collections


def _read_machine(results: Path, machine: Machine, dtype: str) -> list[Collection]:
    """Read a machine's collections in one dtype; report a damaged file and return none."""
    try:
        by_source = read_collections(folder_of(results, machine.slug))
    except UserError as error:  # a damaged file must not keep the other machines from calibrating
        note(str(error))
        return []
    of_dtype = {source: rows[rows["dtype"] == dtype] for source, rows in by_source.items()}
    return [
        Collection.from_rows(machine, source, rows)
        for source, rows in of_dtype.items()
        if len(rows)
    ]
