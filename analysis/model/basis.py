"""Basis of the answers about a machine: its own recording, a public table, or constants."""

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
    DTYPE,
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
from analysis.recordings.imported import FILE, folder_of, is_complete
from analysis.recordings.load import (
    PUBLISHED,
    find_recording,
    load_run,
    recorded_machines,
    slug_at,
)
from analysis.recordings.runs import why_unusable
from kernels.common.errors import UserError
from kernels.common.program import command
from kernels.config import HAND_WRITTEN
from kernels.machine import Machine, known_machine, known_machines
from kernels.problem import Conv, Problem
from sweeps.cases.case import CONFIRM


class Origin(NamedTuple):
    """Basis of the answers about one group; the fields are as in :class:`Basis`."""

    kind: str
    source: str
    warm: bool


@dataclass(frozen=True)
class Basis:
    """A machine's model, and where it comes from.

    ``kind`` is one of:

    - ``recorded``: measured by this project, or imported from a file of the user;
    - ``public``: an imported public table;
    - ``shipped``: constants fitted to that very machine;
    - ``generation``: constants of other machines, some of them of its generation;
    - ``none``: constants of other generations only.

    ``folder`` is the folder of the recording, None without one. ``warm`` is True if operands come
    from the cache where they fit it, as in public tables. ``calibrated`` is False if the recording
    was not calibrated yet. ``measured`` is the source of times that were measured on the machine
    itself while the model comes from elsewhere.
    """

    model: Model
    kind: str
    source: str
    folder: Path | None = None
    warm: bool = False
    calibrated: bool = True
    measured: str = ""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """Origins of the groups that rest on something other than what ``kind`` and ``source`` name."""

    def library(self, problem: Problem) -> str:
        """Return the library that such problems were measured with, otherwise the vendor library.

        Raises:
            UserError: if the machine is a CPU that does not compute the dtype.
        """
        operation = problem.pass_ if isinstance(problem, Conv) else problem.op
        for group in self.model.fits:
            implementation, *operation_and_dtype = group.split()
            matches = operation_and_dtype == [operation, problem.dtype]
            if matches and implementation not in HAND_WRITTEN:
                return implementation
        if self.model.machine.kind == "cpu":
            self.model.machine.peak(problem.dtype)  # raises an error for an unsupported dtype
            return _library_of_cpu(problem, self.model.machine)
        return "cublas" if problem.op == "gemm" else "cudnn"

    def kind_and_source(self, problem: Problem, measured: bool = False) -> tuple[str, str]:
        """Return the kind and the source of an answer about one problem.

        If nobody measured its operation and dtype, only constants of the generation are left. An
        answer from times of the problem itself (``measured``) rests on those times, whatever the
        model knows.
        """
        if measured and self.measured:
            return "recorded", self.measured
        if measured:  # the model comes from the same recording as the times
            return self.kind, self.source
        group = group_of(self.library(problem), problem)
        if group not in self.model.fits:
            prior = prior_without_tables(self.model.machine, group)
            return prior.kind, f"{problem.dtype} by {prior.source}"
        kind, source, _ = self._origin(group)
        if self.model.fit(group).has_like(problem) or problem.dtype == "tf32":
            return kind, source  # the interval for tf32 is already as wide as it gets
        return kind, (
            f"{source}; no such alignment or layout was measured, so a factor of two either way"
        )

    def _origin(self, group: str) -> Origin:
        """Return what the fit of a group rests on."""
        return self.origins.get(group, Origin(self.kind, self.source, self.warm))

    def query(self, problems: Sequence[Problem]) -> Query:
        """Return a query with each problem's library and the cache state of its measurements."""
        libraries = [self.library(problem) for problem in problems]
        groups = map(group_of, libraries, problems)
        # Constants for a group without a fit are for operands from memory.
        warm = [group in self.model.fits and self._origin(group).warm for group in groups]
        return replace(Query.with_implementations(problems, libraries), cached=warm)


def _library_of_cpu(problem: Problem, machine: Machine) -> str:
    """Return the library that PyTorch calls on this CPU or, if PyTorch is missing, on most CPUs."""
    try:
        from kernels.registry import library_for  # asks PyTorch what it was built with
    except ModuleNotFoundError:
        return "mkl" if (problem.op, problem.dtype) == ("gemm", "fp32") else "onednn"
    return library_for(problem, machine)


def find_basis(machine: str | None, results: Path) -> Basis:
    """Find the best basis for a machine: its own measurements, then a public table, then constants.

    Args:
        machine: slug of the machine; None for the machine that was measured last.
        results: the folder of all machines' results.

    Raises:
        UserError: if nobody knows the machine, or its calibration cannot be read.
    """
    return _with_missing_dtypes(_measured_basis(machine, results))


def _measured_basis(machine: str | None, results: Path) -> Basis:
    """Find the best basis as :func:`find_basis` does, without dtypes that were not measured."""
    if machine is not None:
        if not isinstance(machine, str):
            raise UserError(f"give one machine, such as nvidia-h200, not {machine!r}.")
        machine = slug_at(results, machine)
    if machine is None or machine in recorded_machines(results):
        folder = find_recording(machine, results)
        run = load_run(folder)
        # Only pad/choose queries were measured, and no sweep.
        if set(run["plan"].get("sweeps", ())) == {CONFIRM}:
            return _basis_with_queries(folder, run, results)
        reason = why_unusable(folder)
        if not reason:
            return _basis_from_recording(folder)
        # A public table or constants are better than the times of an unusable run.
        machine = run["machine"]["slug"]
        if is_complete(folder_of(results, machine)):
            return _basis_from_recording(folder_of(results, machine))
        if machine not in known_machines():
            raise UserError(f"{reason}: measure {machine} again when it is quiet.", exit_code=1)
    return _basis_from_constants(known_machine(machine))


def _with_missing_dtypes(basis: Basis) -> Basis:
    """Add fits for dtypes that were not measured.

    Measured dtypes answer for others: each 16-bit dtype for the other one if both have the same
    peak, and bf16 for tf32, because no public table has fp16 or tf32. GEMMs of the vendor library
    in the remaining dtypes get the machine's prior if it was learned from warm operands.
    """
    machine = basis.model.machine
    if machine.kind == "cpu":  # each of its dtypes has its own units, and no public table has any
        return basis
    fits = dict(basis.model.fits)
    origins: dict[str, Origin] = {}
    # 1. Let measured dtypes answer for others.
    for group, fit in basis.model.fits.items():
        implementation, operation, dtype = group.split()
        if dtype not in TWINS or implementation in HAND_WRITTEN:
            continue
        measured_prior = Prior(fit, basis.kind, basis.source, UNKNOWN, basis.warm)
        targets = [TWINS[dtype], "tf32"] if dtype == DTYPE else [TWINS[dtype]]
        for target in targets:
            name = f"{implementation} {operation} {target}"
            if name not in fits and target in machine.peaks:
                shared = shared_prior(measured_prior, machine, dtype, target)
                if shared is not None:
                    fits[name] = shared.fit
                    origins[name] = Origin(shared.kind, shared.source, shared.warm)
    # 2. Add the priors of the dtypes that are still missing. Model.fit would find the same fits,
    #    but only an origin says that their operands come from the cache.
    for group in (f"{LIBRARY} gemm {dtype}" for dtype in machine.peaks):
        prior = prior_without_tables(machine, group)
        if group not in fits and prior.warm:
            fits[group] = prior.fit
            origins[group] = Origin(prior.kind, prior.source, prior.warm)
    return replace(basis, model=Model(machine, fits), origins=origins)


def machine_rows(results: Path) -> list[dict[str, Any]]:
    """Return a row for each machine that is known or recorded, for ``machines --json``.

    Errors are fractions on held-out measurements of the largest group, and None for a machine
    without a fit.
    """
    slugs = [*known_machines(), *sorted(recorded_machines(results) - known_machines().keys())]
    return [_machine_row(slug, find_basis(slug, results)) for slug in slugs]


def _machine_row(slug: str, basis: Basis) -> dict[str, Any]:
    """Return the row of one machine, with the rows and errors of its largest group."""
    largest = max(basis.model.fits.values(), key=lambda fit: fit.rows, default=None)
    # Constants that were carried over from another machine have no rows.
    rows = None if largest is None or largest.rows == 0 else largest.rows
    return {
        "slug": slug,
        "name": basis.model.machine.name,
        "basis": basis.kind,
        "rows": rows,
        "source": basis.source,
        "median": largest and largest.median,
        "mean": largest and largest.mean,
        "p95": largest and largest.p95,
    }


def _basis_with_queries(folder: Path, run: Mapping[str, Any], results: Path) -> Basis:
    """Return the basis of a machine on which only pad/choose queries were measured, and no sweep.

    The times are the machine's own; the model is the one that it would have without them.
    """
    machine = Machine.from_json(run["machine"])
    published = results / PUBLISHED / machine.slug
    if folder != published and (published / "run.json").exists():
        basis = _basis_from_recording(published)
    elif is_complete(folder_of(results, machine.slug)):
        basis = _basis_from_recording(folder_of(results, machine.slug))
    else:
        basis = _basis_from_constants(known_machines().get(machine.slug, machine))
    # Times of an unusable run answer nothing; only the model is left.
    if why_unusable(folder):
        return replace(basis, folder=None)
    return replace(basis, folder=folder, measured=f"measured {run['run'][:10]}")


def basis_at(folder: Path, fitted: Model) -> Basis:
    """Return the basis that the recording in a folder gives.

    ``fitted`` is a model that was fitted to it just now. It is used where the recording has no
    calibration.json, so that all answers about a recording come from the same model.

    Raises:
        UserError: if the calibration cannot be read.
    """
    basis = _basis_from_recording(folder)
    if not basis.calibrated:
        basis = _recorded_basis(folder, load_run(folder), fitted)
    return _with_missing_dtypes(basis)


def _basis_from_recording(folder: Path) -> Basis:
    """Return the basis that a recording gives; without a calibration, its model has no fits."""
    run = load_run(folder)
    machine = Machine.from_json(run["machine"])
    path = folder / "calibration.json"
    if not path.exists():
        basis = _recorded_basis(folder, run, Model(machine))
        return replace(basis, source=f"{basis.source}, not calibrated yet", calibrated=False)
    try:
        model = model_from_json(machine, json.loads(path.read_bytes()))
        return _recorded_basis(folder, run, model)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{path} cannot be read; {command(f'analysis calibrate --machine {folder.name}')} "
            "writes it again."
        ) from None


def _recorded_basis(folder: Path, run: Mapping[str, Any], model: Model) -> Basis:
    """Return the basis that a recording gives with a model that was fitted to it."""
    public = run.get("public")  # None for a recording by this project
    warm = public is not None and public["cache"] == "warm"
    # The user's own measurements are those by this project and those in a file of the user.
    is_own = public is None or public["framework"] == FILE
    source = f"measured {run['run'][:10]}"
    if public:
        row_words = f"{public['rows']:,} rows of" if is_own else f"{public['rows']:,} public rows,"
        source = f"{row_words} {public['source']}, {public['cache']}"
    if not is_own:
        model = for_any_framework(model)
    # Groups may share a start; each is named once.
    starts = dict.fromkeys(_start_of(fit) for fit in model.fits.values())
    source += "".join(f", on top of {start}" for start in starts if start)
    return Basis(model, "recorded" if is_own else "public", source, folder, warm)


def _start_of(fit: Fit) -> str:
    """Name the public tables or, where rows are few, the constants that a fit started from.

    The name is empty if the fit rests only on its own rows.
    """
    if fit.offsets:
        return fit.offsets.source
    return fit.start if fit.rows < MIN_RESIDUAL_ROWS else ""


def for_any_framework(model: Model) -> Model:
    """Return a copy of a public table's model, measured with one framework, for any framework."""
    slug = model.machine.slug
    fits = {}
    for group, fit in model.fits.items():
        dtype = group.split()[-1]
        fit = fit.for_software(software_of(slug, dtype), shift_of(slug, group))
        # The factors for kinds of shapes were learned from bf16 GEMMs. They also hold for fp16,
        # which runs on the same units; intervals of other dtypes stay the same for all kinds.
        if dtype in TWINS:
            fit = replace(fit, groups=factors_of_prior("public", model.machine.generation))
        fits[group] = fit
    return Model(model.machine, fits)


def _basis_from_constants(machine: Machine) -> Basis:
    """Return the best prior that needs no imported table, still without the fits of its dtypes."""
    prior = prior_without_tables(machine, GROUP)
    return Basis(Model(machine), prior.kind, prior.source, warm=prior.warm)
