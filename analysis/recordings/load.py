"""Find a machine's recording, and read its run.json and its table of times."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.markdown import printable
from analysis.recordings.imported import (
    FILE,
    MEASUREMENTS,
    OTHERS_PROTOCOL,
    PLACE,
    folder_of,
    is_complete,
    read_imported,
)
from analysis.recordings.kept import until_changed
from analysis.recordings.row_reader import read_rows
from kernels.common.aliases import slug_meant
from kernels.common.errors import UserError
from kernels.common.program import RESULTS, target
from kernels.config import HAND_WRITTEN
from kernels.machine import Machine, known_machines
from kernels.names import conv_algorithm
from kernels.operation import Workload, as_problem
from kernels.problem import Conv, Problem
from sweeps.folding.health import NOISY, UNUSABLE
from sweeps.schema import SCHEMA, problem_of
from sweeps.store import PLAN, read_run
from sweeps.timing.sampler import PROTOCOL

_DISTURBED = {
    NOISY: "  ·  noisy run",
    UNUSABLE: "  ·  unusable run: no conclusions possible",
}
_RESTORE = (
    "Restore the file from a copy. If the recording was made on this machine, you can instead run "
    f"{target('sweep FRESH=1', 'run --fresh')}, which sets the recording aside and starts a new "
    "run."
)
"""Sentences that say what to do about a damaged recording, whichever machine made it."""

_CPU_SLUG = re.compile(r"cpu-.+-\d+t")
"""Pattern of a CPU's slug, which ends in the number of threads, as in ``-16t``."""

PUBLISHED = "published"
"""Subfolder of the results folder, with the recordings that the project publishes."""

PRODUCTS = ("gemm", "conv")
"""Operations that the model can predict."""


@dataclass(frozen=True)
class SourceRun:
    """A run that contributed rows to a recording: its folder and its run.json."""

    folder: Path
    run: Mapping[str, Any]


@dataclass(frozen=True)
class Recording:
    """One run, a machine's combined runs with the same PyTorch and driver, or an import.

    Attributes:
        folder: folder of the recording.
        run: the run.json of the run that most rows come from, with the cases of its plan.
        rows: one row per case, with the columns of measurements.csv.
        damaged: a sentence for each damaged line in the measurements.csv of ``folder``.
        parts: runs that the rows come from, the best first; empty for imported recordings.
    """

    folder: Path
    machine: Machine
    run: dict[str, Any]
    rows: pd.DataFrame
    damaged: tuple[str, ...] = ()
    parts: tuple[SourceRun, ...] = ()

    @property
    def health(self) -> Mapping[str, Any]:
        """Health (verdict and reasons) of the run that most rows come from; {} if not judged."""
        return self.run.get("health") or {}

    @property
    def unusable(self) -> bool:
        """True if the run was too disturbed for advice to be based on it."""
        return self.health.get("verdict") == UNUSABLE

    @property
    def ok(self) -> pd.DataFrame:
        """Rows that have times."""
        return self.rows[self.rows["status"] == "ok"]

    @property
    def products(self) -> pd.DataFrame:
        """Rows of the timed GEMMs and convolutions, without cases that the model cannot describe.

        Cases with only one operand in the cache are left out, and so are cases whose operands are
        unaligned or stored with padded rows. The model has no term for these effects.
        """
        rows = self.ok
        ordinary = stored_ordinarily(rows) & (rows["cache"] != "weights-cold")
        return rows[rows["op"].isin(PRODUCTS) & ordinary]

    @property
    def public(self) -> bool:
        """True if the recording was imported, from a public table or a user's file."""
        return "public" in self.run

    @property
    def is_public_table(self) -> bool:
        """True if the recording was imported from a public table."""
        return self.public and self.run["public"]["framework"] != FILE

    @property
    def cache(self) -> str:
        """Cache state of most cases: ``cold`` in our runs, the recorded state in an import."""
        return str(self.run["public"]["cache"]) if self.public else "cold"

    @property
    def source(self) -> str:
        """Source and package of an imported recording, or "" for our own measurements."""
        public = self.run.get("public")
        if not public:
            return ""
        return ", ".join(filter(None, (public["source"], public["package"])))

    @property
    def dates(self) -> list[str]:
        """Start dates, such as ``2025-01-31``, of the run or of the runs merged into it."""
        # A merged run is named after the time of merging, so its dates are those of the runs that
        # were merged.
        runs = self.run.get("merged") or [self.run]
        return sorted({run["run"][:10] for run in runs})

    def caption(self, dates: Sequence[str] = ()) -> str:
        """Return a plot's caption: machine, versions, date, and a warning about a disturbed run.

        The caption of an imported recording names the machine, the source and the cache state.
        ``dates`` are the dates to print; if empty, the first and the last of :attr:`dates` are
        printed.
        """
        if self.public:
            return f"{self.machine.name}  ·  {self.source}  ·  {self.cache}"
        software = self.run["software"]
        names = ("torch", "triton", "cuda", "cudnn", "driver", "mkl", "onednn")
        versions = ", ".join(f"{name} {software[name]}" for name in names if name in software)
        if dates:
            period = " and ".join(dates)
        else:
            first = min(self.dates)
            last = max(self.dates)
            period = first if first == last else f"{first} to {last}"
        disturbed = _DISTURBED.get(self.health.get("verdict", ""), "")
        return f"{self.machine.name}  ·  {versions}  ·  measured {period}{disturbed}"


def find_recording(machine: str | None, results: Path = RESULTS) -> Path:
    """Find the folder of a machine's recording.

    A run that was measured here is preferred to an imported table. An imported table is preferred
    to a published recording, because users choose what they import.

    ``machine`` is a slug or an unambiguous part of it. None stands for the machine that was
    measured here last.

    Raises:
        UserError: if no recording matches, if several machines match, or if ``machine`` is None and
            no machine was measured here.
    """
    recorded = sorted(recorded_machines(results))
    if not recorded:
        raise UserError(f"nothing is recorded yet; run {target('sweep', 'run')} first.")
    if machine is None:
        folders = [path.parent for path in results.glob("*/run.json")]
        if not folders:
            raise UserError(
                f"no machine was measured here yet; run {target('sweep', 'run')} first, or name a "
                f"recorded machine: {', '.join(recorded)}."
            )
        return max(folders, key=lambda folder: (folder / "run.json").stat().st_mtime)
    slug = slug_at(results, machine)
    measured = results / slug
    imported = folder_of(results, slug)
    published = results / PUBLISHED / slug
    if (measured / "run.json").exists():
        return measured
    if is_complete(imported):
        return imported
    if (published / "run.json").exists():
        return published
    raise UserError(f"{slug} has no recording; choose a recorded machine: {', '.join(recorded)}.")


def recording_folder(place: str | None, results: Path = RESULTS) -> Path:
    """Find the folder of a recording.

    ``place`` is the folder's path, or a machine as in :func:`find_recording`.

    Raises:
        UserError: if the folder has no run.json, if no recording matches, or if several machines
            match.
    """
    if place is not None:
        folder = Path(place)
        if (folder / "run.json").exists():
            return folder
        if folder.is_dir() or "/" in place:
            raise UserError(f"{place} has no run.json; give the folder of a recording.")
    return find_recording(place, results)


def recorded_machines(results: Path) -> set[str]:
    """Return the slugs of all machines whose recordings :func:`find_recording` can find."""
    measured = [path.parent for path in results.glob("*/run.json")]
    published = [path.parent for path in results.glob(f"{PUBLISHED}/*/run.json")]
    # An import that was interrupted may have a run.json, but no answers can be based on it.
    imported = [path for path in (results / PLACE).glob("*") if is_complete(path)]
    return {folder.name for folder in [*measured, *published, *imported]}


def slug_at(results: Path, word: str) -> str:
    """Return the slug of the known or recorded machine that a word names.

    The full slug of a CPU is accepted even if that CPU was never recorded.

    Raises:
        UserError: if the word matches no machine, or several machines.
    """
    slugs = [*known_machines(), *sorted(recorded_machines(results))]
    # A CPU's full slug may be a part of another CPU's slug. It must only match itself.
    if _CPU_SLUG.fullmatch(word):
        slugs.append(word)
    return slug_meant(word, slugs)


def library_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return all rows except those of hand-written kernels."""
    return rows[~rows["implementation"].isin(list(HAND_WRITTEN))]


def bursts(rows: pd.DataFrame, cache: str = "cold") -> pd.DataFrame:
    """Return the rows that were timed in short batches with pauses, in the given cache state."""
    return rows[(rows["cache"] == cache) & (rows["mode"] == "burst")]


def stored_ordinarily(rows: pd.DataFrame) -> pd.Series:
    """Return a mask of the cases whose operands are aligned and stored without padded rows."""
    return ~rows["config"].str.contains("offset=|ld_multiple=", na=False)


@until_changed("run.json", PLAN, "measurements.csv", MEASUREMENTS)
def load(folder: Path) -> Recording:
    """Read the recording in a folder; report and leave out damaged lines of its measurements.csv.

    Callers must not modify the recording, because it is kept for the next call.

    Raises:
        UserError: if a file is missing or too badly damaged, or if this version cannot read it.
    """
    run = load_run(folder)
    if "public" in run:
        return Recording(folder, Machine.from_json(run["machine"]), run, read_imported(folder))
    rows, damaged = read_rows(folder / "measurements.csv", run["run"])
    parts = (SourceRun(folder, run),)
    return Recording(folder, Machine.from_json(run["machine"]), run, rows, damaged, parts)


@until_changed("run.json", PLAN)
def load_run(folder: Path) -> dict[str, Any]:
    """Read a folder's run.json and plan, and check the schema and the protocol.

    Callers must not modify the result, because it is kept for the next call.

    Raises:
        UserError: if run.json or the plan is missing or damaged, or if this version does not
            support the schema or the protocol.
    """
    run: dict[str, Any] = printable(read_run(folder, _RESTORE))
    try:
        Machine.from_json(run["machine"])
    except UserError as error:
        raise UserError(f"{folder / 'run.json'}: {error}") from None
    schema, protocol = run["schema"], run["protocol"]
    readable_protocol = OTHERS_PROTOCOL if "public" in run else PROTOCOL
    if schema != SCHEMA or protocol != readable_protocol:
        remedy = (
            "Move the folder away and import the table again"
            if "public" in run
            else "Measure again"
        )
        raise UserError(
            f"{folder / 'run.json'} has schema {schema} and protocol {protocol}. This "
            f"version reads schema {SCHEMA} and protocol {readable_protocol}. {remedy}, or read "
            "the folder with the version of Rooftile that wrote it."
        )
    return run


_PROBLEM = [
    "op", "pass", "m", "n", "k", "batch", "c", "h", "w", "kout", "r", "s", "stride", "padding",
    "dilation", "groups", "dtype", "layout",
]  # fmt: skip
"""Columns that describe the workload of a row."""


def workloads_of(rows: pd.DataFrame) -> list[Workload]:
    """Return the workload of each row of a recording."""
    records: Sequence[dict[str, Any]] = rows[_PROBLEM].to_dict("records")
    return [problem_of(record) for record in records]


def problems_of(rows: pd.DataFrame) -> list[Problem]:
    """Return the problem of each row; all rows must be GEMMs or convolutions."""
    return [as_problem(workload) for workload in workloads_of(rows)]


def kernels_of(rows: pd.DataFrame) -> list[tuple[str, ...]]:
    """Return the names of each row's kernels; a tuple is empty if no names were recorded."""
    listings = rows["kernels"].fillna("").tolist()
    return [tuple(name for name, _ in json.loads(text)) if text else () for text in listings]


def algorithms_of(problems: Sequence[Problem], kernels: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the algorithm of each problem, according to the names of its kernels.

    The algorithm is "" for a GEMM, and for a convolution whose algorithm the names do not show.
    """
    return [
        conv_algorithm(names) if isinstance(problem, Conv) else ""
        for problem, names in zip(problems, kernels, strict=True)
    ]
