"""Read a recording: ``run.json`` and ``measurements.csv`` of one machine and one run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.markdown import printable
from analysis.recordings.imported import (
    FILE,
    OTHERS_PROTOCOL,
    folder_of,
    is_complete,
    read_imported,
)
from analysis.recordings.row_reader import read_rows
from kernels.common.aliases import slug_meant
from kernels.common.errors import UserError
from kernels.common.program import RESULTS, target
from kernels.config import HAND_WRITTEN
from kernels.machine import Machine, known_machines
from kernels.names import conv_algorithm
from kernels.operation import Workload, as_problem
from kernels.problem import Conv, Problem
from sweeps.folding.health import UNUSABLE
from sweeps.schema import SCHEMA, problem_of
from sweeps.store import read_run
from sweeps.timing.sampler import PROTOCOL

_DISTURBED = {
    "noisy": "  ·  noisy run",
    "unusable": "  ·  unusable run: no conclusions possible",
}
PRODUCTS = ("gemm", "conv")
"""Operations that the model knows."""


@dataclass(frozen=True)
class SourceRun:
    """A run that rows are of: its folder, and its run.json."""

    folder: Path
    run: Mapping[str, Any]


@dataclass(frozen=True)
class Recording:
    """A run as it was recorded, or several of one machine and one software.

    ``run`` is the run.json of the one that it is mostly of, ``damaged`` has a sentence for each
    line that was left out.
    """

    folder: Path
    machine: Machine
    run: dict[str, Any]
    rows: pd.DataFrame
    damaged: tuple[str, ...] = ()
    parts: tuple[SourceRun, ...] = ()
    """The runs that the rows are of, the best first; empty for others' tables."""

    @property
    def health(self) -> Mapping[str, Any]:
        """The verdict on the run that it is mostly of, and its reasons; empty where not judged."""
        return self.run.get("health") or {}

    @property
    def unusable(self) -> bool:
        """Whether nothing should be advised from it."""
        return self.health.get("verdict") == UNUSABLE

    @property
    def ok(self) -> pd.DataFrame:
        """The rows that have times."""
        return self.rows[self.rows["status"] == "ok"]

    @property
    def products(self) -> pd.DataFrame:
        """Of those, the GEMMs and convolutions: what the model, plots and tables are about.

        Left out are those with one operand in the cache, and those whose operands lie at odd
        addresses or in padded rows: the model has no term for either, and fitting it to them would
        spoil its predictions of ordinary products.
        """
        rows = self.ok
        ordinary = stored_ordinarily(rows) & (rows["cache"] != "weights-cold")
        return rows[rows["op"].isin(PRODUCTS) & ordinary]

    @property
    def public(self) -> bool:
        """Whether it was imported: a table of others, or a file of the user's."""
        return "public" in self.run

    @property
    def is_public_table(self) -> bool:
        """Whether it is a table that others published: whoever asks may run other software."""
        return self.public and self.run["public"]["framework"] != FILE

    @property
    def cache(self) -> str:
        """How most of its cases are timed: from memory, but others' tables from a warm cache."""
        return str(self.run["public"]["cache"]) if self.public else "cold"

    @property
    def source(self) -> str:
        """Whose table it is; empty for our own measurements."""
        of = self.run.get("public")
        return ", ".join(filter(None, (of["source"], of["package"]))) if of else ""

    def caption(self, dates: Sequence[str] = ()) -> str:
        """Machine, versions and date, for below a plot, and whether the run was disturbed.

        ``dates`` are those to name; the run's own if empty.
        """
        if self.public:
            return f"{self.machine.name}  ·  {self.source}  ·  {self.cache}"
        software = self.run["software"]
        names = ("torch", "triton", "cuda", "cudnn", "driver", "mkl", "onednn")
        versions = ", ".join(f"{name} {software[name]}" for name in names if name in software)
        # A merged recording's own run is of the moment of merging.
        own = sorted(part["run"][:10] for part in self.run.get("merged") or [self.run])
        date = " and ".join(dates) or " to ".join(dict.fromkeys((own[0], own[-1])))
        disturbed = _DISTURBED.get(self.health.get("verdict", ""), "")
        return f"{self.machine.name}  ·  {versions}  ·  measured {date}{disturbed}"


def find_recording(machine: str | None, results: Path = RESULTS) -> Path:
    """The folder of a machine's recording: its local run, a published one, an imported table.

    Without a name: the machine that was measured last.

    Raises:
        UserError: there is none.
    """
    folders = [path.parent for path in results.glob("*/run.json")]
    if machine is None:
        if not folders:
            raise UserError(f"nothing is recorded yet; run {target('sweep', 'run')} first.")
        return max(folders, key=lambda folder: (folder / "run.json").stat().st_mtime)
    recorded = sorted(recorded_machines(results))
    if not recorded:
        raise UserError(f"nothing is recorded yet; run {target('sweep', 'run')} first.")
    machine = slug_at(results, machine)
    for folder in (results / f"{machine}-local", results / machine):
        if (folder / "run.json").exists():
            return folder
    if is_complete(folder_of(results, machine)):
        return folder_of(results, machine)
    raise UserError(f"nothing is recorded of {machine}; recorded are {', '.join(recorded)}.")


def recording_folder(place: str | None, results: Path = RESULTS) -> Path:
    """The folder of a recording that is named by its folder, or by its machine.

    Raises:
        UserError: there is none.
    """
    if place is not None:
        folder = Path(place)
        if (folder / "run.json").exists():
            return folder
        if folder.is_dir() or "/" in place:
            raise UserError(f"{place} has no run.json; give the folder of a recording.")
    return find_recording(place, results)


def recorded_machines(results: Path) -> set[str]:
    """The slugs of all machines that :func:`find_recording` knows: own runs, imported tables."""
    folders = [path.parent for path in results.glob("*/run.json")]
    folders += [path for path in folder_of(results, "*").parent.glob("*") if is_complete(path)]
    return {folder.name.removesuffix("-local") for folder in folders}


def slug_at(results: Path, word: str) -> str:
    """The slug that a word means among the machines that are known or were recorded.

    A CPU's whole slug may be one that nobody has recorded yet.

    Raises:
        UserError: it means none, or several.
    """
    unknown = [word] if word.startswith("cpu-") else []
    return slug_meant(word, [*known_machines(), *sorted(recorded_machines(results)), *unknown])


def library_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Without the hand-written kernels."""
    return rows[~rows["implementation"].isin(list(HAND_WRITTEN))]


def bursts(rows: pd.DataFrame, cache: str = "cold") -> pd.DataFrame:
    """Short batches with pauses, operands from memory: how most cases are timed."""
    return rows[(rows["cache"] == cache) & (rows["mode"] == "burst")]


def stored_ordinarily(rows: pd.DataFrame) -> pd.Series:
    """Whether each row's operands are dense and at aligned addresses."""
    return ~rows["config"].str.contains("offset=|ld_multiple=", na=False)


def load(folder: Path) -> Recording:
    """Read a folder of results.

    A line that cannot be read, or says what cannot be, is left out and named. Rows of another
    schema, protocol or run are refused: such numbers do not compare.

    Raises:
        UserError: a file is missing or unreadable, or rows do not belong together.
    """
    run = load_run(folder)
    if "public" in run:
        return Recording(folder, Machine.from_json(run["machine"]), run, read_imported(folder))
    rows, damaged = read_rows(folder / "measurements.csv", run["run"])
    parts = (SourceRun(folder, run),)
    return Recording(folder, Machine.from_json(run["machine"]), run, rows, damaged, parts)


def load_run(folder: Path) -> dict[str, Any]:
    """The run.json of a folder, if it is of the schema and protocol that this code reads.

    Raises:
        UserError: it is unreadable, or of another version.
    """
    run: dict[str, Any] = printable(read_run(folder))
    try:
        Machine.from_json(run["machine"])
    except UserError as error:
        raise UserError(f"{folder / 'run.json'}: {error}") from None
    versions = run["schema"], run["protocol"]
    if versions != (SCHEMA, OTHERS_PROTOCOL if "public" in run else PROTOCOL):
        raise UserError(
            f"{folder / 'run.json'} has schema {versions[0]} and protocol {versions[1]}; this "
            f"version reads schema {SCHEMA} and protocol {PROTOCOL}."
        )
    return run


def workloads_of(rows: pd.DataFrame) -> list[Workload]:
    """What each row timed."""
    names = [
        "op",
        "pass",
        "m",
        "n",
        "k",
        "batch",
        "c",
        "h",
        "w",
        "kout",
        "r",
        "s",
        "stride",
        "padding",
        "dilation",
        "groups",
        "dtype",
        "layout",
    ]
    records: Sequence[dict[str, Any]] = rows[names].to_dict("records")
    return [problem_of(record) for record in records]


def problems_of(rows: pd.DataFrame) -> list[Problem]:
    """The problem of each row; all must be GEMMs or convolutions."""
    return [as_problem(workload) for workload in workloads_of(rows)]


def kernels_of(rows: pd.DataFrame) -> list[tuple[str, ...]]:
    """The names of all kernels of each row's launch; empty where none was seen."""
    listings = rows["kernels"].fillna("").tolist()
    return [tuple(name for name, _ in json.loads(text)) if text else () for text in listings]


def algorithms_of(problems: Sequence[Problem], kernels: Sequence[tuple[str, ...]]) -> list[str]:
    """How each problem was computed, as its kernels' names say; empty for a GEMM."""
    pairs = zip(problems, kernels, strict=True)
    return [conv_algorithm(names) if isinstance(p, Conv) else "" for p, names in pairs]
