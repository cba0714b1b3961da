"""What the answers about a machine rest on: its own recording, others' table, or constants."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from analysis.model.fit import (
    SOFTWARE_ERROR,
    UNCALIBRATED,
    UNCALIBRATED_PAIR,
    Fit,
    SoftwareRange,
)
from analysis.model.generation import DTYPE, GROUP, carried_fit, nearest_sibling, sibling_pairs
from analysis.model.predict import Model, is_fp32_known, model_from_json
from analysis.model.query import Query, group_of
from analysis.model.shift import Shift
from analysis.recordings.imported import FILE, folder_of, is_complete
from analysis.recordings.load import find_recording, load_run, recorded_machines, slug_at
from analysis.recordings.runs import why_unusable
from kernels.config import HAND_WRITTEN
from kernels.constants import measured_on, shipped_fits
from kernels.errors import UserError
from kernels.machine import Machine, known_machine, known_machines
from kernels.problem import Conv, Problem
from kernels.program import command
from sweeps.cases.case import CONFIRM

_SHARED = {
    **dict.fromkeys(("fp16", "bf16"), "; {} by what is known of {}, whose peak is the same"),
    "tf32": "; {} by the constants of {} at its own peak, a factor of two either way",
}
_FACTOR_OF_TWO = "a factor of two either way"
_SHARED_WIDER = 1.1
"""Factor by which an interval is wider in the other 16-bit dtype. bf16's shipped constants predict
fp16 Llama layers on an H100 (casys-kaist/LLMServingSim, 10,240 times) with a mean error of 5.6%,
and the 90% interval holds 98% of them (tests/recordings/every-m.jsonl)."""

_FEW = 19  # rows, below which an interval is as wide as without any


@dataclass(frozen=True)
class Basis:
    """A machine's model, and where it comes from.

    ``kind`` is ``recorded`` (measured by this project's sweeps), ``public`` (an imported table of
    others), ``shipped`` (constants fitted to that very machine), ``generation`` (constants of
    another machine of its generation) or ``none`` (of another generation: a guess). ``folder`` is
    the recording's, None without one. ``warm`` says whether operands come from the cache where
    they fit it, as in others' tables. ``measured`` is the source of times that were measured here,
    where the model comes from elsewhere.
    """

    model: Model
    kind: str
    source: str
    folder: Path | None = None
    warm: bool = False
    calibrated: bool = True
    measured: str = ""
    lent: frozenset[str] = frozenset()
    """Groups whose fits are shipped, since the recording has none or too few rows of them."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Groups whose fit is another dtype's, since nobody measured theirs, with that dtype."""

    def library(self, problem: Problem) -> str:
        """The library that was measured with such a problem, else the vendor's for it."""
        what = problem.pass_ if isinstance(problem, Conv) else problem.op
        for group in self.model.fits:
            name, *rest = group.split()
            if rest == [what, problem.dtype] and name not in HAND_WRITTEN:
                return name
        if self.model.machine.kind == "cpu":
            self.model.machine.peak(problem.dtype)  # which refuses what it does not compute
            return _library_of_cpu(problem, self.model.machine)
        return "cublas" if problem.op == "gemm" else "cudnn"

    def of(self, problem: Problem, measured: bool = False) -> tuple[str, str]:
        """The kind and the source of an answer about one problem.

        Where nobody measured its operation and dtype, constants of the generation are all there is.
        An answer by times of the problem itself rests on them, whatever the model knows.
        """
        if measured:
            return ("recorded", self.measured) if self.measured else (self.kind, self.source)
        if not self.has(problem):
            group = group_of(self.library(problem), problem)
            kind, source = _generation(self.model.machine, group)
            return kind, f"{problem.dtype} by {source}"
        kind, source = self.kind, self.source
        group = group_of(self.library(problem), problem)
        if group in self.lent or (kind == "shipped" and problem.dtype == "fp8"):
            kind, source = "shipped", "shipped constants, fitted to public rows of it, warm"
        if group in self.shared:
            source += _SHARED[problem.dtype].format(problem.dtype, self.shared[group])
        like = self.model.fit(group).has_like(problem)
        if problem.dtype == "tf32" and group in self.shared:
            return kind, source  # which says already how far it may be off
        unlike = "" if like else "; none of its alignment or layout, so a factor of two either way"
        return kind, source + unlike

    def has(self, problem: Problem) -> bool:
        """Whether its operation and dtype were measured by the library."""
        return group_of(self.library(problem), problem) in self.model.fits

    def query(self, problems: Sequence[Problem]) -> Query:
        """The problems on the library, from the cache where those that were measured are."""
        libraries = [self.library(problem) for problem in problems]
        warm = [self.warm and self.has(problem) for problem in problems]
        return replace(Query.each(problems, libraries), cached=warm)


def _library_of_cpu(problem: Problem, machine: Machine) -> str:
    """What PyTorch calls there; where it is not installed, what it calls on most CPUs."""
    try:
        from kernels.registry import library_for  # asks PyTorch what it was built with
    except ModuleNotFoundError:
        return "mkl" if (problem.op, problem.dtype) == ("gemm", "fp32") else "onednn"
    return library_for(problem, machine)


def find_basis(machine: str | None, results: Path) -> Basis:
    """The best that there is of a machine: of its own, then others' table, then constants.

    Args:
        machine: its slug; the machine that was measured last if None.
        results: the folder of all machines' results.

    Raises:
        UserError: nobody knows the machine, or its calibration cannot be read.
    """
    return _sharing(_unshared_basis(machine, results))


def _unshared_basis(machine: str | None, results: Path) -> Basis:
    if machine is not None:
        if not isinstance(machine, str):
            raise UserError(f"a machine is one name, such as nvidia-h200, not {machine!r}.")
        machine = slug_at(results, machine)
    if machine is None or machine in recorded_machines(results):
        folder = find_recording(machine, results)
        run = load_run(folder)
        if set(run["plan"].get("sweeps", ())) == {CONFIRM}:
            return _of_questions(folder, run, results)
        reason = why_unusable(folder)
        if not reason:
            return _of_recording(folder)
        # Others' table, or constants, are better than times of something else.
        machine = load_run(folder)["machine"]["slug"]
        if is_complete(folder_of(results, machine)):
            return _of_recording(folder_of(results, machine))
        if machine not in known_machines():
            raise UserError(f"{reason}: measure {machine} again when it is quiet.", exit_code=1)
    return _of_constants(known_machine(machine))


def _sharing(basis: Basis) -> Basis:
    """The same with what is known of a 16-bit dtype for the other one, where their peaks are equal,
    and of bf16 for tf32: no public table has fp16 or tf32.
    """
    machine, fits = basis.model.machine, dict(basis.model.fits)
    shared: dict[str, str] = {}
    for group, fit in basis.model.fits.items():
        what, _, dtype = group.rpartition(" ")
        twin = {"bf16": "fp16", "fp16": "bf16"}.get(dtype)
        if twin is None or what.split()[0] in HAND_WRITTEN:
            continue
        peak = machine.peaks.get(twin)
        if f"{what} {twin}" not in fits and peak == machine.peaks.get(dtype):
            fits[f"{what} {twin}"] = fit.stretched(_SHARED_WIDER)
            shared[f"{what} {twin}"] = dtype
        if dtype == "bf16" and f"{what} tf32" not in fits and "tf32" in machine.peaks:
            fits[f"{what} tf32"] = Fit(fit.constants, aligned_only=True)
            shared[f"{what} tf32"] = dtype
    lent = {g for g, dtype in shared.items() if f"{g.rpartition(' ')[0]} {dtype}" in basis.lent}
    return replace(basis, model=Model(machine, fits), shared=shared, lent=basis.lent | lent)


def machine_rows(results: Path) -> list[dict[str, Any]]:
    """A row per machine that is known or was recorded, as promised of ``machines --json``.

    Errors are fractions, of the largest group, on rows that the model had not seen; None where it
    was not fitted.
    """
    slugs = [*known_machines(), *sorted(recorded_machines(results) - known_machines().keys())]
    return [_machine_row(slug, find_basis(slug, results)) for slug in slugs]


def _machine_row(slug: str, basis: Basis) -> dict[str, Any]:
    fit = max(basis.model.fits.values(), key=lambda fit: fit.rows, default=None)
    return {
        "slug": slug, "name": basis.model.machine.name, "basis": basis.kind,
        "rows": (fit and fit.rows) or None, "source": basis.source, "median": fit and fit.median,
        "mean": fit and fit.mean, "p95": fit and fit.p95,
    }  # fmt: skip


def _of_questions(folder: Path, run: Mapping[str, Any], results: Path) -> Basis:
    """Of a machine on which questions were measured, and no sweep: the times are its own, and the
    model what there would be without them.
    """
    machine = Machine.from_json(run["machine"])
    published = results / machine.slug
    if folder != published and (published / "run.json").exists():
        basis = _of_recording(published)
    elif is_complete(folder_of(results, machine.slug)):
        basis = _of_recording(folder_of(results, machine.slug))
    else:
        basis = _of_constants(known_machines().get(machine.slug, machine))
    if why_unusable(folder):
        return replace(basis, folder=None)
    return replace(basis, folder=folder, measured=f"measured {run['run'][:10]}")


def _of_recording(folder: Path) -> Basis:
    run = load_run(folder)
    machine = Machine.from_json(run["machine"])
    path = folder / "calibration.json"
    public = run.get("public")
    warm = public is not None and public["cache"] == "warm"
    own = public is None or public["framework"] == FILE
    kind = "recorded" if own else "public"
    source = f"measured {run['run'][:10]}"
    if public:
        rows = f"{public['rows']:,} rows of" if own else f"{public['rows']:,} public rows,"
        source = f"{rows} {public['source']}, {public['cache']}"
    if not path.exists():
        source += ", not calibrated yet"
        return Basis(Model(machine), kind, source, folder, warm, calibrated=False)
    try:
        model = model_from_json(machine, json.loads(path.read_bytes()))
        if not own:
            model = for_any_software(model)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{path} cannot be read; {command(f'analysis calibrate --machine {folder.name}')} "
            "writes it again."
        ) from None
    lent: dict[str, Fit] = {}
    if public and own and (shipped := shipped_fits()["machines"].get(machine.slug)):
        known = {group: fit for group, fit in model.fits.items() if fit.rows >= _FEW}
        shipped_model = model_from_json(machine, shipped)
        lent = {group: fit for group, fit in shipped_model.fits.items() if group not in known}
        model = Model(machine, {**model.fits, **lent})
    theirs = (fit.offsets.source for fit in model.fits.values() if fit.offsets)
    source += "".join(f", on top of {names}" for names in dict.fromkeys(theirs))
    return Basis(model, kind, source, folder, warm, lent=frozenset(lent))


def for_any_software(model: Model) -> Model:
    """A model of others' table, which is of one framework, for those who may run another."""
    slug = model.machine.slug
    fits = {
        group: fit.for_software(software_of(slug, group.split()[-1]), shift_of(slug, group))
        for group, fit in model.fits.items()
    }
    return Model(model.machine, fits)


def software_of(slug: str, dtype: str = DTYPE) -> SoftwareRange:
    """How far software lies apart on a machine, in spreads: as on all, or as there if that is more.

    It was learned from bf16. Each framework quantises for fp8 in its own way: of that, no more is
    known than of a machine without any measurement, even where the model's own error is nothing.
    """
    if dtype == "fp8":
        pair = (end / math.sqrt(2) for end in UNCALIBRATED_PAIR)
        return SoftwareRange(*(end / SOFTWARE_ERROR for end in (*UNCALIBRATED, *pair)))
    shipped = shipped_fits()
    software = SoftwareRange(**shipped["software"])
    here = shipped["machines"].get(slug)
    return software.joined(SoftwareRange(**here["software"])) if here else software


def shift_of(slug: str, group: str = GROUP) -> Shift:
    """What other software's times are expected to be on a machine, by those of its table."""
    shipped = shipped_fits()["machines"].get(slug, {"groups": {}})
    return Fit.from_json(shipped["groups"][group]).shift if group in shipped["groups"] else Shift()


def _of_constants(machine: Machine) -> Basis:
    shipped = shipped_fits()["machines"].get(machine.slug)
    if shipped is None:
        return _of_generation(machine)
    model = model_from_json(machine, shipped)
    fit = max(model.fits.values(), key=lambda fit: fit.rows)
    source = f"shipped constants, fitted to {fit.rows:,} public rows of it, {shipped['source']}"
    return Basis(model, "shipped", f"{source}, warm", warm=True)


def _of_generation(machine: Machine) -> Basis:
    """By a sibling's shipped constants where one is like it, else to a factor of two."""
    shipped = shipped_fits()
    there = nearest_sibling(machine, shipped["machines"])
    if there is None:
        return Basis(Model(machine), *_generation(machine, GROUP))
    fit = model_from_json(there, shipped["machines"][there.slug]).fits[GROUP]
    learned = SoftwareRange(**shipped["generation"])
    model = Model(machine, {GROUP: carried_fit(fit, there, machine, learned)})
    source = (
        f"constants of {there.slug}, scaled, warm; interval learned from "
        f"{len(sibling_pairs(shipped['machines']))} pairs of GPUs of one generation"
    )
    return Basis(model, "generation", source, warm=True)


def _generation(machine: Machine, group: str) -> tuple[str, str]:
    """The kind and the source of answers by constants of a whole generation."""
    origin = measured_on(machine.generation, group.split()[-1])
    if origin is None:
        return "none", f"constants that were never measured, {_FACTOR_OF_TWO}"
    known = known_machine(origin).generation == machine.generation
    sure = is_fp32_known(machine, group)
    range_ = "−10% to +42%, as on GPUs like it" if sure else _FACTOR_OF_TWO
    return "generation" if known else "none", f"constants of {origin}, {range_}"
