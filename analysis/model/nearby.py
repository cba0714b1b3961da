"""Build priors for a recording from imported public tables of its machine and of siblings.

Siblings are other GPUs of the machine's generation.
"""

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
"""Dtype of the collections that are used for each measured dtype. Both 16-bit dtypes run on the
same arithmetic units."""

_MOST_ROWS = 10_000  # With more measurements of a dtype, public tables do not help any more.
_MOST_SIBLINGS = 3  # Maximum number of siblings whose collections are used.


@dataclass(frozen=True)
class Collection:
    """Public measurements of one machine, framework and dtype.

    ``source`` has the framework and its version.
    """

    machine: Machine
    source: str
    gemms: Sequence[Gemm]
    seconds: Array

    @classmethod
    def from_rows(cls, machine: Machine, source: str, rows: pd.DataFrame) -> Collection:
        """Make a collection from the rows of an imported public table."""
        return cls(machine, source, gemms_of(rows), rows["time_us"].to_numpy(dtype=float) * 1e-6)

    def without(
        self, shapes: NDArray[np.int64], values: Sequence[NDArray[np.int64]] = ()
    ) -> Collection:
        """Return the collection without the given shapes.

        Args:
            shapes: shapes to leave out, as an array with the columns M, N and K.
            values: up to three arrays, with values of M, of N and of K, in this order. A shape is
                also left out if its M, N or K is in the corresponding array.
        """
        sizes = sizes_of(self.gemms)
        removed = {(m, n, k) for m, n, k in shapes.tolist()}
        is_kept = np.array([(m, n, k) not in removed for m, n, k in sizes.tolist()], dtype=bool)
        for column, removed_values in enumerate(values):
            is_kept &= ~np.isin(sizes[:, column], removed_values)
        gemms = list(itertools.compress(self.gemms, is_kept))
        return replace(self, gemms=gemms, seconds=self.seconds[is_kept])

    def fitted(self, settings: TreeSettings) -> CollectionTrees:
        """Fit constants to the collection and grow its trees."""
        return fit_collection(self.machine, self.source, self.gemms, self.seconds, settings)


def fitted_all(machine: Machine, collections: Sequence[Collection]) -> tuple[CollectionTrees, ...]:
    """Fit constants to each collection, and grow trees from it.

    In the result, the collections of ``machine`` itself come first. Collections with fewer than
    :data:`analysis.model.residual.MIN_ROWS` GEMMs are left out.

    Args:
        machine: the machine whose times are predicted.
        collections: collections of the machine and of its siblings, the most trusted first.
    """
    large = [collection for collection in collections if len(collection.gemms) >= MIN_ROWS]
    # False sorts before True, so the collections of the machine itself come first.
    large.sort(key=lambda collection: collection.machine.slug != machine.slug)
    leading = leaders(machine, [collection.machine for collection in large])
    fitted = []
    for position, collection in enumerate(large):
        is_fine = position in leading or collection.machine.slug == machine.slug
        fitted.append(collection.fitted(WHOLE if is_fine else COARSE))
    return tuple(fitted)


def sizes_of(problems: Sequence[Problem]) -> NDArray[np.int64]:
    """Return an array with the columns M, N and K, and a row for each problem.

    A convolution's row has the sizes of its implicit GEMM.
    """
    gemms = (problem.implied_gemm for problem in problems)
    return np.array([(g.m, g.n, g.k) for g in gemms], dtype=np.int64).reshape(-1, 3)


def priors_for(recording: Recording, rows: pd.DataFrame) -> dict[str, Prior]:
    """Build priors for the groups of a recording from imported public tables.

    The measured shapes are left out of the tables, so that no prior is fitted to a shape that it
    predicts. A prior is only built for cuBLAS GEMMs in bf16, fp16 and fp8, and only for a dtype in
    which 1 to 10,000 cases of such GEMMs were measured.

    The result is empty for CPUs and without scikit-learn. It is also empty for published recordings
    and for imported public tables, because their models must not depend on what else was imported.

    Args:
        recording: the recording, whose results folder has the imported tables.
        rows: measured cases to which the model will be fitted.
    """
    # 1. Stop if no prior can be built, or if the model must not depend on imported tables.
    if recording.machine.kind != "gpu" or not can_grow():  # growing trees needs scikit-learn
        return {}
    if recording.run.get("published") or recording.is_public_table:
        return {}
    # 2. Find the results folder. The recording of an imported file is in the folder of imported
    #    tables, one level deeper than other recordings.
    results = recording.folder.parent
    if results.name == PLACE:
        results = results.parent
    # 3. Build a prior for each group of the library's GEMMs. Its trees grow without the measured
    #    shapes.
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
    yield from _read_machine(results, machine, dtype)
    siblings = [
        candidate
        for candidate in known_machines().values()
        if candidate.generation == machine.generation and candidate.slug != machine.slug
    ]
    siblings_with_tables = 0
    for sibling in siblings:
        collections = _read_machine(results, sibling, dtype)
        if not collections:
            continue
        yield from collections
        siblings_with_tables += 1
        if siblings_with_tables == _MOST_SIBLINGS:
            return


def _read_machine(results: Path, machine: Machine, dtype: str) -> list[Collection]:
    try:
        by_source = read_collections(folder_of(results, machine.slug))
    except UserError as error:
        note(str(error))
        return []  # a calibration is possible without collections
    collections = []
    for source, all_rows in by_source.items():
        rows = all_rows[all_rows["dtype"] == dtype]
        if len(rows):
            collections.append(Collection.from_rows(machine, source, rows))
    return collections
