"""Read a recording: ``run.json`` and ``measurements.csv`` of one machine and one run."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyarrow import csv as arrow_csv

from kernels.errors import UserError, nearest
from kernels.machine import Machine
from kernels.problem import Problem
from sweeps.sampler import PROTOCOL
from sweeps.schema import COLUMNS, SCHEMA, problem_of
from sweeps.store import RESULTS

_TYPES = {"text": pa.string(), "whole": pa.int64(), "real": pa.float64(), "flag": pa.bool_()}
_FRAME_TYPES = {"text": "string", "whole": "Int64", "real": "float64", "flag": "boolean"}


@dataclass(frozen=True)
class Recording:
    """One run as it was recorded. ``damaged`` has a sentence for each line that was left out."""

    folder: Path
    machine: Machine
    run: dict[str, Any]
    rows: pd.DataFrame
    damaged: tuple[str, ...] = ()

    @property
    def ok(self) -> pd.DataFrame:
        """The rows that have times."""
        return self.rows[self.rows["status"] == "ok"]

    def caption(self) -> str:
        """Machine, versions and date, for below a plot."""
        software = self.run["software"]
        names = ("torch", "triton", "cuda", "cudnn", "driver", "mkl", "onednn")
        versions = ", ".join(f"{name} {software[name]}" for name in names if name in software)
        date = self.run["run"][:10]
        return f"{self.machine.name}  ·  {versions}  ·  measured {date}"


def find_recording(machine: str | None, results: Path = RESULTS) -> Path:
    """The folder of a machine's recording, its own local run before a published one.

    Without a name: the machine that was measured last.

    Raises:
        UserError: there is none.
    """
    folders = [path.parent for path in results.glob("*/run.json")]
    if machine is None:
        if not folders:
            raise UserError("nothing is recorded yet; run `make sweep` first.")
        return max(folders, key=lambda folder: (folder / "run.json").stat().st_mtime)
    for name in (f"{machine}-local", machine):
        if (results / name / "run.json").exists():
            return results / name
    known = [folder.name for folder in folders]
    hint = nearest(machine, known) if known else "nothing is recorded yet; run `make sweep` first."
    raise UserError(f"no results of machine {machine!r}; {hint}")


def load(folder: Path) -> Recording:
    """Read a folder of results.

    A line that cannot be read is left out and named. Rows of another schema, protocol or run are
    refused: such numbers do not compare.

    Raises:
        UserError: a file is missing or unreadable, or rows do not belong together.
    """
    run = _load_run(folder)
    text_path = folder / "measurements.csv"
    try:
        data = text_path.read_bytes()
    except OSError as error:
        raise UserError(f"{text_path} cannot be read ({error.strerror}).") from None
    rows, damaged = parse_measurements(data)
    if wrong := set(rows["schema"].dropna()) - {SCHEMA}:
        raise UserError(f"{text_path} has rows of schema {min(wrong)}; this reads {SCHEMA}.")
    runs = sorted(set(rows["run"].dropna()))
    if runs and runs != [run["run"]]:
        raise UserError(
            f"{text_path} has rows of other runs than its run.json ({', '.join(runs)}); rows of "
            "different runs or machines do not mix."
        )
    named = tuple(f"{text_path.name} {sentence}" for sentence in damaged)
    return Recording(folder, Machine.from_json(run["machine"]), run, rows, named)


def _load_run(folder: Path) -> dict[str, Any]:
    path = folder / "run.json"
    try:
        run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        versions = (run["schema"], run["protocol"])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} cannot be read ({error}).") from None
    if versions != (SCHEMA, PROTOCOL):
        raise UserError(
            f"{path} is of schema {versions[0]} and protocol {versions[1]}; this reads schema "
            f"{SCHEMA} and protocol {PROTOCOL}."
        )
    return run


def parse_measurements(data: bytes) -> tuple[pd.DataFrame, list[str]]:
    """The table of a measurements.csv and a sentence for every damaged line."""
    header = data.partition(b"\n")[0].decode("utf-8", errors="replace").rstrip("\r")
    if header.split(",") != list(COLUMNS):
        raise UserError("measurements.csv does not begin with the columns of this version.")
    try:
        table = _parse(data)
        damaged: list[str] = []
    except pa.ArrowInvalid:
        good, damaged = _sieve(data)
        table = _parse(good)
    frame = pd.DataFrame(
        {
            name: table.column(name).to_pandas().astype(_FRAME_TYPES[kind])
            for name, (kind, _) in COLUMNS.items()
        }
    )
    return frame, damaged


def _parse(data: bytes) -> pa.Table:
    """Strictly: every line has every column, every cell its kind. Floats come back exactly."""
    convert = arrow_csv.ConvertOptions(
        column_types={name: _TYPES[kind] for name, (kind, _) in COLUMNS.items()},
        include_columns=list(COLUMNS),
        null_values=[""],
        strings_can_be_null=False,
        true_values=["true"],
        false_values=["false"],
    )
    return arrow_csv.read_csv(io.BytesIO(data), convert_options=convert)


def _sieve(data: bytes) -> tuple[bytes, list[str]]:
    """The readable lines of a damaged file, and a sentence for each of the others."""
    lines = data.decode("utf-8", errors="replace").split("\n")
    good, damaged = [lines[0]], []
    for number, line in enumerate(lines[1:], 2):
        if not line:
            continue
        if _readable(line):
            good.append(line)
        else:
            damaged.append(f"line {number} is damaged and left out.")
    return ("\n".join(good) + "\n").encode(), damaged


def _readable(line: str) -> bool:
    try:
        cells = next(csv.reader([line], strict=True))
        if len(cells) != len(COLUMNS):
            return False
        for cell, (kind, _) in zip(cells, COLUMNS.values(), strict=True):
            if cell and kind in ("whole", "real"):
                (int if kind == "whole" else float)(cell)
            elif kind == "flag" and cell not in ("", "true", "false"):
                return False
    except (ValueError, csv.Error, StopIteration):
        return False
    return True


def problems_of(rows: pd.DataFrame) -> list[Problem]:
    """The problem of each row."""
    names = [
        "op", "pass", "m", "n", "k", "batch", "c", "h", "w", "kout", "r", "s", "stride",
        "padding", "dilation", "groups", "dtype", "layout",
    ]  # fmt: skip
    records: Sequence[dict[str, Any]] = rows[names].to_dict("records")
    return [problem_of(record) for record in records]
