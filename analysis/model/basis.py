"""Find the basis of the answers about a machine: its recording, a public table, or constants."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from analysis.model.fit import Fit
from analysis.model.offsets import LIBRARY
from analysis.model.predict import Model, model_from_json
from analysis.model.prior import (
    GROUP,
    TWINS,
    UNKNOWN,
    Prior,
    factors_of_prior,
    prior_without_tables,
    shared_prior,
    shift_of,
    software_of,
)
from analysis.model.query import Query, group_of
from analysis.model.residual import MIN_ROWS as MIN_RESIDUAL_ROWS
from analysis.recordings.imported import FILE, PLACE, folder_of, is_complete
from analysis.recordings.load import (
    PUBLISHED,
    find_recording,
    load_run,
    recorded_machines,
    slug_at,
)
from analysis.recordings.runs import why_unusable
from kernels.common.counts import counted
from kernels.common.errors import UserError
from kernels.common.program import command
from kernels.config import HAND_WRITTEN
from kernels.machine import Machine, known_machine, known_machines
from kernels.problem import Conv, Problem
from kernels.registry import library_for
from sweeps.cases.case import CONFIRM


class Origin(NamedTuple):
    """Basis of the answers about one group of cases; the fields are as in :class:`Basis`."""

    kind: str
    source: str
    warm: bool


@dataclass(frozen=True)
class Basis:
    """A machine's model, and where it comes from.

    ``kind`` is one of:

    - ``recorded``: measurements that Rooftile made, or that were imported from a user's file;
    - ``public``: an imported public table of the machine;
    - ``shipped``: the machine's constants that come with Rooftile;
    - ``generation``: constants that were fitted to at least one machine of the same generation;
    - ``none``: constants of other generations, or constants that were not fitted to any machine.

    Attributes:
        source: where the model comes from, in words for the user.
        folder: folder of the recording whose measured times are looked up; None if no recording is
            usable.
        warm: True if the model predicts warm times, as in public tables: operands that fit into the
            last-level cache are already in it.
        calibrated: False if the recording has not been calibrated yet.
        measured: source of the measured times in ``folder``, in words, if the run in ``folder``
            only measured pad/choose queries; otherwise empty.
        model_folder: folder of the recording that the model was fitted to, if it is not ``folder``.
            None if it is ``folder``, or if the model was not fitted to a recording. Measured times
            that ``folder`` lacks are looked up in ``model_folder``.
    """

    model: Model
    kind: str
    source: str
    folder: Path | None = None
    warm: bool = False
    calibrated: bool = True
    measured: str = ""
    model_folder: Path | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """Origin of each group whose basis differs from ``kind``, ``source`` and ``warm``."""

    def library(self, problem: Problem) -> str:
        """Return the implementation that predictions assume if none is named.

        This is the first implementation, other than Rooftile's hand-written kernels, that has a fit
        for the problem's operation and dtype. Without such a fit, it is the vendor library that
        usually computes such problems on the machine.

        Raises:
            UserError: if there is no such fit, and the machine is a CPU that does not support the
                dtype.
        """
        operation = problem.pass_ if isinstance(problem, Conv) else problem.op
        for group in self.model.fits:
            # Names of implementations come from the user's files, and may contain spaces.
            implementation, *operation_and_dtype = group.rsplit(maxsplit=2)
            matches = operation_and_dtype == [operation, problem.dtype]
            if matches and implementation not in HAND_WRITTEN:
                return implementation
        if self.model.machine.kind == "cpu":
            self.model.machine.peak(problem.dtype)  # raises a UserError for an unsupported dtype
            return _library_of_cpu(problem, self.model.machine)
        return "cublas" if problem.op == "gemm" else "cudnn"

    @property
    def attention_folder(self) -> Path | None:
        """Folder that may contain fits to attention tables; None if no recording is usable."""
        return self.model_folder or self.folder

    def kind_and_source(
        self, problem: Problem, measured: bool = False, in_model_folder: bool = False
    ) -> tuple[str, str]:
        """Return the kind and the source of an answer about one problem.

        ``measured`` is True if the answer uses only measured times, and ``in_model_folder`` if
        these times are from ``model_folder``.
        """
        if measured and self.measured and not in_model_folder:
            return "recorded", self.measured
        if measured:  # the times are from the recording to which the model was fitted
            return self.kind, self.source
        kind, source = self.group_kind_and_source(problem)
        fit = self.model.fit_of(group_of(self.library(problem), problem))
        # Without calibration, all intervals are a factor of two, and the source already says so.
        if fit.has_like(problem) or fit.is_uncalibrated:
            return kind, source
        return kind, (
            f"{source}. The shape's alignment, layout or batching was not measured, so the "
            "interval is at least a factor of two either way"
        )

    def group_kind_and_source(self, problem: Problem) -> tuple[str, str]:
        """Return the kind and the source of the predictions for the problem's group."""
        group = group_of(self.library(problem), problem)
        if group in self.model.fits:
            kind, source, _ = self._origin(group)
            return kind, source
        # A group without a fit is answered by its prior.
        prior = prior_without_tables(self.model.machine, group)
        return prior.kind, f"{problem.dtype} from {prior.source}"

    def _origin(self, group: str) -> Origin:
        return self.origins.get(group, Origin(self.kind, self.source, self.warm))

    def query(self, problems: Sequence[Problem]) -> Query:
        """Make a query for problems, with the library and the cache state of each problem."""
        libraries = [self.library(problem) for problem in problems]
        groups = map(group_of, libraries, problems)
        # A group without a fit is predicted with cold operands.
        warm = [group in self.model.fits and self._origin(group).warm for group in groups]
        return replace(Query.with_implementations(problems, libraries), cached=warm)


def _library_of_cpu(problem: Problem, machine: Machine) -> str:
    """Return the library that PyTorch calls for a problem on a CPU.

    If PyTorch is not installed, the result is the library that PyTorch calls on most CPUs.
    """
    try:
        return library_for(problem, machine)  # imports PyTorch
    except ModuleNotFoundError:
        return "mkl" if (problem.op, problem.dtype) == ("gemm", "fp32") else "onednn"


def find_basis(machine: str | None, results: Path) -> Basis:
    """Find the best basis for a machine: one of its recordings, or constants if none is usable.

    A recording that was measured here is preferred to an import, and an import is preferred to a
    published recording.

    Args:
        machine: slug of the machine, or an unambiguous part of it; None for the machine that was
            measured here last.
        results: folder with the results of all machines.

    Raises:
        UserError: if the machine is not found, or its recording cannot be used.
    """
    return _with_missing_dtypes(_measured_basis(machine, results))


def _measured_basis(machine: str | None, results: Path) -> Basis:
    """Find the best basis as :func:`find_basis` does, but only with fits for measured dtypes."""
    slug = None
    if machine is not None:
        # A caller in Python may give something else, such as a list of machines.
        if not isinstance(machine, str):
            raise UserError(f"machine is {machine!r}; give one machine, such as 'nvidia-h200'.")
        slug = slug_at(results, machine)
    if slug is None or slug in recorded_machines(results):
        folder = find_recording(slug, results)
        run = load_run(folder)
        # A run whose only sweep is CONFIRM has just the times of pad/choose queries, which are too
        # few to fit a model.
        if set(run["plan"].get("sweeps", ())) == {CONFIRM}:
            return _basis_with_queries(folder, run, results)
        reason = why_unusable(folder)
        if not reason:
            basis = _basis_from_recording(folder)
            is_import = folder.parent == results / PLACE
            return _with_published_groups(basis, results) if is_import else basis
        # The times of the run are unusable, so use another recording or constants.
        slug = run["machine"]["slug"]
        other = _basis_from_other_recording(folder, slug, results)
        if other is not None:
            return other
        if slug not in known_machines():
            raise UserError(
                f"{reason}. Measure {slug} again when no other program uses the machine.",
                exit_code=1,
            )
    return _basis_from_constants(known_machine(slug))


def _basis_from_other_recording(folder: Path, slug: str, results: Path) -> Basis | None:
    """Return the basis from an imported or published recording other than ``folder``, or None."""
    imported = folder_of(results, slug)
    if folder != imported and is_complete(imported):
        return _with_published_groups(_basis_from_recording(imported), results)
    published = results / PUBLISHED / slug
    if folder != published and (published / "run.json").exists():
        return _basis_from_recording(published)
    return None


def _with_published_groups(basis: Basis, results: Path) -> Basis:
    """Add to an import's basis the groups that only the machine's published recording has.

    A public table has only GEMMs of the vendor library, and only in some dtypes.
    """
    folder = results / PUBLISHED / basis.model.machine.slug
    if not (folder / "run.json").exists():
        return basis
    published = _basis_from_recording(folder)
    added = {
        group: fit for group, fit in published.model.fits.items() if group not in basis.model.fits
    }
    origin = Origin(published.kind, published.source, published.warm)
    model = Model(basis.model.machine, {**basis.model.fits, **added})
    return replace(basis, model=model, origins=dict.fromkeys(added, origin))


def _with_missing_dtypes(basis: Basis) -> Basis:
    """Return the basis with additional fits for dtypes that were not measured."""
    machine = basis.model.machine
    # The dtypes of a CPU do not share arithmetic units, and no public table was measured on a CPU.
    if machine.kind == "cpu":
        return basis
    fits = dict(basis.model.fits)
    origins = dict(basis.origins)
    # 1. Use the fits of measured dtypes for other dtypes.
    for group, fit in basis.model.fits.items():
        implementation, operation, dtype = group.rsplit(maxsplit=2)
        if dtype not in TWINS or implementation in HAND_WRITTEN:
            continue
        # No fit starts from this prior, so its spread (UNKNOWN) does not matter.
        kind, source, warm = basis._origin(group)
        measured_prior = Prior(fit, kind, source, UNKNOWN, warm)
        other_dtypes = [TWINS[dtype]]
        if dtype == "bf16":
            other_dtypes.append("tf32")
        for other_dtype in other_dtypes:
            other_group = f"{implementation} {operation} {other_dtype}"
            if other_group in fits or other_dtype not in machine.peaks:
                continue
            shared = shared_prior(measured_prior, machine, dtype, other_dtype)
            if shared is not None:
                fits[other_group] = shared.fit
                origins[other_group] = Origin(shared.kind, shared.source, shared.warm)
    # 2. Add the priors of the dtypes that are still missing. Model.fit_of would find the same
    #    fits later, but their origins must say here that they predict warm times.
    for peak_dtype in machine.peaks:
        group = f"{LIBRARY} gemm {peak_dtype}"
        prior = prior_without_tables(machine, group)
        if group not in fits and prior.warm:
            fits[group] = prior.fit
            origins[group] = Origin(prior.kind, prior.source, prior.warm)
    return replace(basis, model=Model(machine, fits), origins=origins)


def machine_rows(results: Path) -> list[dict[str, Any]]:
    """Return the output of ``machines --json``: one entry for each known or recorded machine.

    The values ``median``, ``mean`` and ``p95`` are the errors of predictions for held-out cases of
    the machine's largest group, as fractions. They are None if no measurements of the machine were
    fitted.

    Raises:
        UserError: if the recording of one of the machines cannot be used.
    """
    slugs = [*known_machines(), *sorted(recorded_machines(results) - known_machines().keys())]
    return [_machine_row(slug, find_basis(slug, results)) for slug in slugs]


def _machine_row(slug: str, basis: Basis) -> dict[str, Any]:
    machine = basis.model.machine
    # A model may have no fits, such as that of a CPU without usable measurements.
    fits = basis.model.fits.values()
    largest = max(fits, key=lambda fit: fit.rows, default=None)
    return {
        "slug": slug,
        "name": machine.name,
        "basis": basis.kind,
        # Constants that were carried over from another machine have 0 rows.
        "rows": None if largest is None or largest.rows == 0 else largest.rows,
        "source": basis.source,
        "median": None if largest is None else largest.median,
        "mean": None if largest is None else largest.mean,
        "p95": None if largest is None else largest.p95,
    }


def _basis_with_queries(folder: Path, run: Mapping[str, Any], results: Path) -> Basis:
    """Return the basis of a machine whose run only measured pad/choose queries."""
    machine = Machine.from_json(run["machine"])
    basis = _basis_from_other_recording(folder, machine.slug, results)
    if basis is None:
        basis = _basis_from_constants(known_machines().get(machine.slug, machine))
    if why_unusable(folder):
        return basis
    return replace(basis, folder=folder, model_folder=basis.folder, measured=_date_source(run))


def _date_source(run: Mapping[str, Any]) -> str:
    return f"measured {run['run'][:10]}"  # a run is named by its start, beginning with the date


def basis_at(folder: Path, fitted: Model) -> Basis:
    """Return the basis from the recording in a folder.

    ``fitted`` is a model that was just fitted to the recording. It is only used if the recording
    has no calibration.json, because all answers about a recording must come from the same model.

    Raises:
        UserError: if run.json or calibration.json cannot be read.
    """
    basis = _basis_from_recording(folder)
    if not basis.calibrated:
        basis = _recorded_basis(folder, load_run(folder), fitted)
    if folder.parent.name == PLACE:
        basis = _with_published_groups(basis, folder.parent.parent)
    return _with_missing_dtypes(basis)


def _basis_from_recording(folder: Path) -> Basis:
    """Return a recording's basis, whose model has no fits if calibration.json is missing."""
    run = load_run(folder)
    machine = Machine.from_json(run["machine"])
    path = folder / "calibration.json"
    if not path.exists():
        basis = _recorded_basis(folder, run, Model(machine))
        return replace(basis, source=f"{basis.source}, not calibrated yet", calibrated=False)
    try:
        model = model_from_json(machine, json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f"{path} cannot be read; run {command(f'analysis calibrate --machine {folder.name}')} "
            "to write it again."
        ) from None
    return _recorded_basis(folder, run, model)


def _recorded_basis(folder: Path, run: Mapping[str, Any], model: Model) -> Basis:
    """Return the basis from a recording and the model that was fitted to it.

    The model of a public table is adapted to users of any framework here, so ``model`` must not
    have been adapted before.
    """
    public = run.get("public")  # None if Rooftile measured the times
    warm = public is not None and public["cache"] == "warm"
    # Measurements by Rooftile, and those in a user's file, show the framework that the user runs.
    is_user_data = public is None or public["framework"] == FILE
    if public is None:
        source = _date_source(run)
    elif is_user_data:
        measurements = counted(public["rows"], "measurement")
        source = f"{measurements} from {public['source']}, {public['cache']}"
    else:
        measurements = counted(public["rows"], "public measurement")
        source = f"{measurements}, {public['source']}, {public['cache']}"
    if not is_user_data:
        model = for_any_framework(model)
    # Name each prior once, even if the fits of several groups started from it.
    starts = dict.fromkeys(_start_of(fit) for fit in model.fits.values())
    named_starts = [start for start in starts if start]
    if named_starts:
        source += f", on top of {', and of '.join(named_starts)}"
    return Basis(model, "recorded" if is_user_data else "public", source, folder, warm)


def _start_of(fit: Fit) -> str:
    """Name the public tables that still influence a fit, or return "" if there are none.

    A fit to at least :data:`MIN_RESIDUAL_ROWS` cases hardly depends on the constants from which it
    started.
    """
    if fit.offsets:
        return fit.offsets.source
    return fit.start if fit.rows < MIN_RESIDUAL_ROWS else ""


def for_any_framework(model: Model) -> Model:
    """Adapt the model of a public table to users of any framework.

    Predicted times are shifted by the expected difference between frameworks, and the intervals
    cover other frameworks.
    """
    slug = model.machine.slug
    fits = {}
    for group, fit in model.fits.items():
        dtype = group.split()[-1]
        adapted = fit.for_software(software_of(slug, dtype), shift_of(slug, group))
        # All cases of a public table are GEMMs. The factors for kinds of shapes were learned from
        # bf16 GEMMs. They are also used for fp16, which runs on the same arithmetic units, but not
        # for other dtypes.
        if dtype in TWINS:
            factors = factors_of_prior("public", model.machine.generation)
            adapted = replace(adapted, groups=factors)
        fits[group] = adapted
    return Model(model.machine, fits)


def _basis_from_constants(machine: Machine) -> Basis:
    """Return a basis without fits, from the best prior that needs no imported table."""
    prior = prior_without_tables(machine, GROUP)
    return Basis(Model(machine), prior.kind, prior.source, warm=prior.warm)
