"""Judge predictions that combine public tables with a few measurements of a machine.

A collection contains the GEMM times of one public table or file. Collections serve as priors. The
measurements for calibration and testing come from another table or file.

Tested shapes are removed from the priors, because most of a user's shapes are not in any table.
With the hold-out ``levels``, all shapes with a withheld value of M, N or K are removed, too. The
calibration shapes are also removed. Otherwise the priors would predict the calibration shapes
better than the tested shapes, and calibration would trust the priors too much.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from analysis.imports.public import PublicRows, read_source
from analysis.imports.tables import PublicTable, choose_tables, find_tables, read_rows, read_table
from analysis.model.calibrate import calibrate_query
from analysis.model.nearby import Collection, fitted_all, sizes_of
from analysis.model.offsets import LIBRARY
from analysis.model.predict import Model, PartialPrediction, Prediction
from analysis.model.prior import Prior, Spread, leaders, prior_from_tables
from analysis.model.query import Query
from analysis.validation.baselines import baseline_errors
from analysis.validation.holdout import FOLDS, Validation, choose_calibration_rows, split_rows
from kernels.common.aliases import slug_meant
from kernels.common.counts import enumerated
from kernels.common.errors import UserError
from kernels.machine import Machine, known_machine, known_machines
from kernels.problem import Gemm
from kernels.timemodel.constants import foreign_constants

_HOLDOUTS = ("rows", "levels", "folds")


def named_collections(names: str, judged: Path, machine: Machine, dtype: str) -> list[Collection]:
    """Return the collections that ``--prior`` names.

    Args:
        names: files, folders of recordings or slugs of machines, separated by commas. A slug means
            all public tables of that machine in ``dtype``, except the file ``judged``. The table
            that ``rooftile import`` would choose comes first.
        judged: file with the measurements under test, which must not be a prior.
        machine: the machine whose times are in ``judged``.
        dtype: dtype of the collections.

    Raises:
        UserError: if a name is empty, unknown or ambiguous, if its files cannot be read or are
            from an unknown GPU, if they have no times in ``dtype`` other than those under test, or
            if they have rows that are not GEMMs.
    """
    collections: list[Collection] = []
    for name in names.split(","):
        collections += _find_collections(name.strip(), judged, machine, dtype)
    return collections


def _find_collections(name: str, judged: Path, machine: Machine, dtype: str) -> list[Collection]:
    """Return the collections for one of the names that :func:`named_collections` takes."""
    if not name:
        raise UserError("--prior has an empty name; give machines or files, separated by commas.")
    path = Path(name)
    if path.exists():
        if path.resolve() == judged.resolve():
            raise UserError(f"{name} is the file under test; give another file to --prior.")
        collection = _collection_from_file(path, machine, dtype)
        if not collection.gemms:
            raise UserError(f"{name} has no times in {dtype}; give another file to --prior.")
        return [collection]
    # A collection needs the facts of its machine.
    tables = [table for table in find_tables() if table.slug in known_machines()]
    slug = slug_meant(name, {table.slug for table in tables})
    chosen = choose_tables(tables).get(slug)  # None if no table has rows in bf16
    tables_of_slug = [table for table in tables if table.slug == slug]
    tables_of_slug.sort(key=lambda table: table is not chosen)  # False sorts before True
    collections = [
        _collection_from_table(table, dtype)
        for table in tables_of_slug
        if table.path.resolve() != judged.resolve()
    ]
    collections = [collection for collection in collections if collection.gemms]
    if not collections:
        raise UserError(
            f"{name} has no {dtype} table other than the one under test; give another --prior."
        )
    return collections


def _collection_from_file(path: Path, machine: Machine, dtype: str) -> Collection:
    """Read a collection from a public table (.parquet), another file or a folder of a recording.

    Unless the file is a public table, only the rows of ``machine`` are read.
    """
    if path.suffix == ".parquet":
        return _collection_from_table(read_table(path), dtype)
    source = read_source(path, machine, dtype)
    gemms = [problem for problem in source.problems if isinstance(problem, Gemm)]
    if len(gemms) < len(source):
        raise UserError(
            f"{path} has measurements of operations other than GEMMs; give --prior a file with "
            "only GEMMs."
        )
    return Collection(machine, source.name, gemms, source.seconds)


def _collection_from_table(table: PublicTable, dtype: str) -> Collection:
    return Collection.from_rows(known_machine(table.slug), table.source, read_rows(table, dtype))


def validate_with_prior(
    source: PublicRows,
    machine: Machine,
    named: Sequence[Collection],
    calibrate: int | None = 256,
    seed: int = 0,
    holdout: str = "rows",
) -> Validation:
    """Calibrate on some rows, with collections as the prior, and judge the model on other rows.

    The hold-out decides which rows are tested:

    - ``rows``: about a fifth of the shapes.
    - ``levels``: as in :func:`analysis.validation.holdout.validate`.
    - ``folds``: each fold of about a fifth of the shapes in turn, so that all rows are tested.

    With the hold-out ``folds``, no baseline is judged, and the model, the prior and the calibration
    rows in the result are those that were used to test the first fold.

    Args:
        source: the measured rows. Their times are treated as warm times of the vendor library,
            because public tables contain only such times.
        machine: the machine on which ``source`` was measured.
        named: the collections, the most trusted first.
        calibrate: number of rows to calibrate on; 0 for no calibration, None for all rows that may
            be calibrated on.
        seed: seed for choosing the calibration rows and the held-out rows. With the hold-out
            ``folds``, ``seed`` has no effect.
        holdout: one of the hold-outs above.

    Raises:
        UserError: if the hold-out or the dtype is not supported, if a problem is not a GEMM, if the
            source or the collections have too few rows, or if there are neither collections nor
            calibration rows.
    """
    if holdout not in _HOLDOUTS:
        valid = enumerated(_HOLDOUTS, "or")
        raise UserError(f"with --prior, --holdout must be {valid}, not {holdout!r}.")
    if not all(isinstance(problem, Gemm) for problem in source.problems):
        raise UserError(
            "--prior works only for GEMMs; to judge other operations, leave --prior out."
        )
    source = replace(source, warm=True, implementations=[LIBRARY] * len(source))
    if holdout != "folds":
        return _validate_once(source, machine, named, calibrate, seed, holdout)
    folds = [
        _validate_once(source, machine, named, calibrate, fold, holdout) for fold in range(FOLDS)
    ]
    return _combine_folds(folds, seed)


def _validate_once(
    source: PublicRows,
    machine: Machine,
    named: Sequence[Collection],
    calibrate: int | None,
    seed: int,
    holdout: str,
) -> Validation:
    # 1. Choose the rows to calibrate on, without looking at times.
    query = Query.plain(source.problems, LIBRARY, warm=True)
    other_constants, _ = foreign_constants(machine, source.dtype)
    pool, tested = _split(source, holdout, seed)
    count = len(pool) if calibrate is None else calibrate
    calibration_rows = choose_calibration_rows(machine, source, pool, count, seed, other_constants)
    if not len(tested):
        raise UserError(f"{source.name} has no measurements to test; give another --holdout.")
    group = str(query.groups()[0])
    # 2. Fit the public collections, without shapes that are tested or calibrated on. With the
    #    hold-out "levels", also leave out each value of M, N and K that no row of the pool has.
    sizes = sizes_of(source.problems)  # columns: M, N and K
    excluded = sizes[np.concatenate([tested, calibration_rows])]
    withheld_levels = []
    if holdout == "levels":
        withheld_levels = [
            np.setdiff1d(sizes[:, column], sizes[pool, column]) for column in range(sizes.shape[1])
        ]
    collections = list(named)
    if not count:  # without calibration, only the leading collections are used
        machines = [collection.machine for collection in named]
        collections = [named[position] for position in leaders(machine, machines)]
    remaining = [collection.without(excluded, withheld_levels) for collection in collections]
    trees = fitted_all(machine, remaining)  # a collection with too few shapes has none
    if named and not trees:
        raise UserError(
            "the tables of --prior have too few shapes that are neither held out nor calibrated "
            "on; add another table to --prior."
        )
    # 3. Calibrate with the collections as the prior, or predict with the prior only.
    if count:
        prior = Prior.bare(other_constants, Spread.from_shipped("generation"))
        if trees:
            prior = prior_from_tables(machine, source.dtype, trees, query.take(calibration_rows))
        model = calibrate_query(
            machine,
            query.take(calibration_rows),
            source.seconds[calibration_rows],
            FOLDS,
            priors={group: prior},
        ).model
    elif trees:
        prior = prior_from_tables(machine, source.dtype, trees, query.take(tested))
        model = Model(machine, {group: prior.fit})
    else:
        raise UserError(
            "with neither --prior nor calibration measurements, nothing can be judged; give "
            "--prior, or a number above 0 for --calibrate."
        )
    # 4. Predict the held-out rows.
    held_out = source.take(tested)
    held_out_query = query.take(tested)
    baselines = dict(
        baseline_errors(model, source.take(calibration_rows), held_out, held_out_query)
    )
    return Validation(
        machine=machine,
        source=source,
        seed=seed,
        holdout=holdout,
        calibrated=calibration_rows,
        tested=held_out,
        prediction=model.predict(held_out_query),
        model=model,
        constants_from="",
        baselines=baselines,
        prior=[collection_trees.name for collection_trees in trees],
    )


def _split(
    source: PublicRows, holdout: str, seed: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the positions of the rows that may be calibrated on, and of the rows to test.

    If ``holdout`` is ``rows`` or ``folds``, ``seed`` selects which fifth of the shapes is tested.
    """
    if holdout == "levels":
        return split_rows(source, holdout, seed)
    # The fifth depends on a hash of the shape, so the same shapes are held out in every table.
    shapes = (f"{m},{n},{k}".encode() for m, n, k in sizes_of(source.problems))
    is_withheld = np.array([zlib.crc32(shape) % FOLDS == seed % FOLDS for shape in shapes])
    return np.flatnonzero(~is_withheld), np.flatnonzero(is_withheld)


def _combine_folds(folds: Sequence[Validation], seed: int) -> Validation:
    """Combine the validations of the folds, as :func:`validate_with_prior` describes."""
    predictions = []
    rows_before = 0  # number of tested rows in the folds before this one
    for fold in folds:
        prediction = fold.prediction
        rows = rows_before + np.arange(len(fold.tested))  # positions among all tested rows
        log_low = np.log(prediction.lo / prediction.estimate.time)
        log_high = np.log(prediction.hi / prediction.estimate.time)
        predictions.append(PartialPrediction(rows, prediction.estimate, log_low, log_high))
        rows_before += len(fold.tested)
    return replace(
        folds[0],
        seed=seed,
        tested=PublicRows.joined([fold.tested for fold in folds]),
        prediction=Prediction.from_parts(rows_before, predictions),
        baselines=dict.fromkeys(folds[0].baselines),
    )
