"""Read measured times of problems from recordings, users' CSV files and public tables.

Public tables are those of AIConfigurator, NeuSight and DeepBench. :func:`read_source` returns the
rows of one machine and dtype. :func:`read_public` returns a machine's rows in all dtypes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.imports.timings import (
    HEADER,
    FileDefaults,
    FileTimings,
    most_common,
    name_of,
    read_timings,
)
from analysis.recordings.load import (
    algorithms_of,
    bursts,
    kernels_of,
    library_rows,
    load,
    problems_of,
)
from kernels.common.errors import UserError, nearest
from kernels.machine import Machine, slug_of_device
from kernels.names import read_name
from kernels.operation import as_problem
from kernels.problem import DTYPE_BYTES, Conv, Gemm, Problem
from kernels.timemodel.estimate import Array
from sweeps.schema import problem_columns, problem_of

_NO_DEFAULTS = FileDefaults()
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class PublicRows:
    """Measured problems of one machine and one dtype; arrays and lists have one element per row.

    Attributes:
        seconds: time of one call in seconds.
        kernels: names of the kernels that a call runs; empty where the source does not name them.
        skipped: number of rows that were left out, by reason.
        warm: True if the times count as warm, with operands from the cache.
    """

    name: str
    dtype: str
    problems: Sequence[Problem]
    implementations: Sequence[str]
    seconds: Array
    kernels: Sequence[tuple[str, ...]]
    skipped: dict[str, int]
    warm: bool = False

    def __len__(self) -> int:
        return len(self.problems)

    @property
    def algorithms(self) -> list[str]:
        """Algorithm of each row; "" for GEMMs, and where the kernel names show no algorithm."""
        return algorithms_of(self.problems, self.kernels)

    @property
    def tiles(self) -> list[str]:
        """Tile of each row, such as ``128x64``, or "" if no kernel name contains one."""
        first_tiles = []
        for kernel_names in self.kernels:
            tiles = [read_name(name).tile_text() for name in kernel_names]
            first_tiles.append(next((tile for tile in tiles if tile), ""))
        # A third number, the tile's depth along K, is left out.
        return ["x".join(tile.split("x")[:2]) for tile in first_tiles]

    def by_algorithm(self, algorithm: str) -> PublicRows:
        """Return the convolutions whose kernel names show that they ran with the given algorithm.

        Raises:
            UserError: if no kernel name shows the algorithm.
        """
        algorithms = self.algorithms
        if algorithm not in algorithms:
            present = sorted({name for name in algorithms if name})
            remedy = nearest(algorithm, present) if present else "leave out --algorithm."
            raise UserError(
                f"no kernel name in {self.name} shows the algorithm {algorithm!r}; {remedy}"
            )
        return self.take([i for i, name in enumerate(algorithms) if name == algorithm])

    @classmethod
    def joined(cls, parts: Sequence[PublicRows]) -> PublicRows:
        """Concatenate one or more selections of rows from one source.

        The counts in ``skipped`` are those of the first selection.
        """
        return replace(
            parts[0],
            problems=[problem for part in parts for problem in part.problems],
            implementations=[name for part in parts for name in part.implementations],
            seconds=np.concatenate([part.seconds for part in parts]),
            kernels=[names for part in parts for names in part.kernels],
        )

    def take(self, selection: Sequence[int] | NDArray[Any] | slice) -> PublicRows:
        """Return the rows that a list of positions, a mask or a slice selects.

        The counts in ``skipped`` stay those of the whole source.
        """
        positions = np.arange(len(self))[selection].tolist()
        return replace(
            self,
            problems=[self.problems[i] for i in positions],
            implementations=[self.implementations[i] for i in positions],
            seconds=self.seconds[positions],
            kernels=[self.kernels[i] for i in positions],
        )


@dataclass(frozen=True)
class _FileRows:
    """Rows of a file before a machine and a dtype are selected, with one sequence per column."""

    devices: Sequence[str | None]  # None if the source does not name the row's GPU
    dtypes: Sequence[str]
    problems: Sequence[Problem | None]  # None if the row is not a problem that we support
    seconds: Sequence[float]
    implementations: Sequence[str]
    kernels: Sequence[tuple[str, ...]]
    warm: bool = False
    name: str = ""  # the file's name if empty
    slug: str = ""  # machine of all rows, if the source names it by its slug

    @property
    def readable(self) -> NDArray[np.bool_]:
        """Mask of the rows that have a supported problem and a finite time above 0."""
        has_problem = np.array([problem is not None for problem in self.problems], dtype=bool)
        seconds = np.asarray(self.seconds, dtype=float)
        return has_problem & np.isfinite(seconds) & (seconds > 0)


def read_source(path: Path, machine: Machine, dtype: str | None = None) -> PublicRows:
    """Read the rows of one machine and dtype from a recording, a CSV file or a public table.

    Rows of a CSV file that do not name their dtype are assumed to be in ``dtype``. If ``dtype`` is
    None, rows in bf16 are read. If the machine has no row in bf16, all its rows must have the same
    dtype.

    Raises:
        UserError: if no row of the machine and dtype can be read, or if the dtype is ambiguous.
    """
    # 1. Find the readable rows of the machine.
    rows = _read(path, FileDefaults(dtype or ""))
    slugs = _slugs_of(rows, machine)
    on_machine = np.array([slug == machine.slug for slug in slugs], dtype=bool)
    seconds = np.asarray(rows.seconds, dtype=float)
    dtypes = np.array(rows.dtypes, dtype=object)
    readable = rows.readable
    present = sorted(set(dtypes[on_machine & readable]))
    if not present:
        raise _no_readable_row(path, machine, slugs)
    # 2. Keep the rows in the dtype, and count those that are left out.
    kept_dtype = _choose_dtype(path, machine, dtype, present)
    has_dtype = dtypes == kept_dtype
    kept = [int(i) for i in np.flatnonzero(on_machine & readable & has_dtype)]
    return PublicRows(
        name=rows.name or name_of(path),
        dtype=kept_dtype,
        problems=[rows.problems[i] for i in kept],  # type: ignore[misc]
        implementations=[rows.implementations[i] for i in kept],
        seconds=seconds[kept],
        kernels=[rows.kernels[i] for i in kept],
        skipped={
            "other_machines": int((~on_machine).sum()),
            "other_dtypes": int((on_machine & ~has_dtype).sum()),
            "unreadable": int((on_machine & has_dtype & ~readable).sum()),
        },
        warm=rows.warm,
    )


def _slugs_of(rows: _FileRows, machine: Machine) -> list[str]:
    """Return the slug of each row's machine, or ``machine.slug`` if the source names no machine."""
    if rows.slug:
        return [rows.slug] * len(rows.devices)
    return [machine.slug if device is None else slug_of_device(device) for device in rows.devices]


def _no_readable_row(path: Path, machine: Machine, slugs: Sequence[str]) -> UserError:
    if not slugs:
        return UserError(f"{path} has no rows; give another file.")
    if machine.slug in slugs:
        return UserError(
            f"{path} has rows for {machine.slug}, but none with a time above 0 and a problem that "
            "Rooftile supports; give another file."
        )
    return UserError(
        f"{path} has no row for {machine.slug}; its rows are from "
        f"{', '.join(sorted(set(slugs)))}. Give another --machine or another file."
    )


def _choose_dtype(path: Path, machine: Machine, dtype: str | None, present: Sequence[str]) -> str:
    """Return the given dtype, else bf16 if it is present, else the only dtype that is present."""
    if dtype:
        if dtype not in present:
            raise UserError(
                f"{path} has no readable row for {machine.slug} in {dtype}; "
                f"{nearest(dtype, present)}"
            )
        return dtype
    if "bf16" in present:
        return "bf16"
    if len(present) > 1:
        raise UserError(
            f"{path} has rows in several dtypes ({', '.join(present)}); choose one with --dtype."
        )
    return present[0]


def read_public(path: Path, machine: Machine) -> FileTimings:
    """Read a machine's rows in all dtypes from a recording, a CSV file or a public table.

    Unreadable rows and the names of kernels are left out.

    Raises:
        UserError: if no row of the machine can be read.
    """
    rows = _read(path)
    cache = "warm" if rows.warm else "cold"
    cases = []
    times_us = []
    slugs = _slugs_of(rows, machine)
    on_machine = np.array([slug == machine.slug for slug in slugs], dtype=bool)
    for i in np.flatnonzero(on_machine & rows.readable).tolist():
        problem = rows.problems[i]
        assert problem is not None  # readable rows have a problem
        cases.append(problem_columns(problem) | {"implementation": rows.implementations[i]})
        times_us.append(rows.seconds[i] * 1e6)
    if not cases:
        raise _no_readable_row(path, machine, slugs)
    cells = pd.DataFrame(cases).assign(time_us=times_us, cache=cache, mode="burst", config="")
    return FileTimings(cells, "times as given in the source", cache)


def _read(path: Path, defaults: FileDefaults = _NO_DEFAULTS) -> _FileRows:
    """Read a public table, or the vendor-library times in a CSV file or a recording."""
    if path.is_dir() or path.name == "measurements.csv":
        return _from_recording(path if path.is_dir() else path.parent)
    if path.suffix != ".parquet" and (timings := read_timings(path, defaults)):
        return _from_timings(timings, path)
    try:
        frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or error}); check its path and permissions."
        ) from None
    except Exception as error:  # pandas and Arrow have many errors for an invalid table
        lines = str(error).splitlines()
        reason = lines[0] if lines else "empty"
        raise UserError(
            f"{path} cannot be read as a table ({reason}); give a valid CSV or Parquet file."
        ) from None
    frame.columns = pd.Index([str(column).strip() for column in frame.columns])
    for needed, reader in _FORMATS:
        if needed <= set(frame.columns):
            try:
                return reader(frame, path)
            except UserError:
                raise
            except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
                raise UserError(
                    f"{path} lacks a column of its format, or has an invalid cell ({error}); give "
                    "the table as it was published."
                ) from None
    raise UserError(
        f"{path} has no known format. Give a public table, the measurements.csv of a recording, a "
        "CSV file from the CUTLASS profiler or TritonBench, or a CSV file with the columns "
        f"{HEADER}. Public tables are those of AIConfigurator (GEMMs), NeuSight (linear layers and "
        "convolutions) and DeepBench (GEMMs and convolutions)."
    )


def _from_timings(timings: FileTimings, path: Path) -> _FileRows:
    """Convert the vendor-library times in a CSV file.

    Only times that were measured in bursts are used, and only those in the most frequent cache
    state.
    """
    rows = library_rows(timings.rows)
    rows = rows[rows["mode"] == "burst"]
    if rows.empty:
        raise UserError(
            f"{path} has no vendor-library times that were measured in bursts; give a file with "
            "such times."
        )
    cache = most_common(rows["cache"])
    rows = bursts(rows, cache).reset_index(drop=True)
    kernels = kernels_of(rows) if "kernels" in rows else [()] * len(rows)
    return _FileRows(
        devices=[None] * len(rows),
        dtypes=rows["dtype"].tolist(),
        problems=[as_problem(problem_of(row)) for row in rows.to_dict("records")],
        seconds=(rows["time_us"] * 1e-6).tolist(),
        implementations=rows["implementation"].tolist(),
        kernels=kernels,
        warm=cache == "warm",
    )


def _from_recording(folder: Path) -> _FileRows:
    """Read the vendor-library times in a recording.

    Only times that were measured in bursts, in the recording's usual cache state, are used.
    """
    recording = load(folder)
    rows = library_rows(bursts(recording.products, recording.cache))
    return _FileRows(
        devices=[None] * len(rows),
        dtypes=rows["dtype"].tolist(),
        problems=problems_of(rows),
        seconds=(rows["time_us"] * 1e-6).tolist(),
        implementations=rows["implementation"].tolist(),
        kernels=kernels_of(rows),
        warm=recording.cache == "warm",
        name=recording.source,
        slug=recording.machine.slug,
    )


def _from_aiconfigurator(frame: pd.DataFrame, path: Path) -> _FileRows:
    """Convert AIConfigurator's GEMMs: ``y = x Wᵀ`` (layout nt) with x (m, k) and W (n, k).

    Latencies are in milliseconds. The cache was not flushed between the CUDA-graph replays that
    were timed. The times still count as cold, because the validations under results/ were recorded
    with a model of cold times.
    """
    dtypes = [_DTYPES.get(name, name) for name in frame["gemm_dtype"]]
    problems = [
        _build_gemm(int(m), int(n), int(k), dtype) if dtype in DTYPE_BYTES else None
        for m, n, k, dtype in zip(frame["m"], frame["n"], frame["k"], dtypes, strict=True)
    ]
    return _FileRows(
        devices=_device_names(frame["device"]),
        dtypes=dtypes,
        problems=problems,
        seconds=(frame["latency"] * 1e-3).tolist(),
        implementations=["cublas"] * len(frame),
        kernels=[()] * len(frame),
    )


def _from_neusight_linear(frame: pd.DataFrame, path: Path) -> _FileRows:
    """Convert NeuSight's linear layers, which ran in FP32 without TF32.

    The output of a layer has B·M rows and K columns, and the sum runs over N. Latencies are in
    milliseconds.
    """
    problems = [
        _build_gemm(int(m), int(n), int(k), "fp32") if operation == "linear" else None
        for operation, m, n, k in zip(
            frame["OPName"], frame["B"] * frame["M"], frame["K"], frame["N"], strict=True
        )
    ]
    return _FileRows(
        devices=_device_names(frame["Device"]),
        dtypes=["fp32"] * len(frame),
        problems=problems,
        seconds=(frame["Latency"] * 1e-3).tolist(),
        implementations=["cublas"] * len(frame),
        kernels=_neusight_kernels(frame),
    )


def _from_neusight_conv(frame: pd.DataFrame, path: Path) -> _FileRows:
    """Convert NeuSight's convolutions: forward passes in FP32 and NCHW.

    Latencies are in milliseconds. The filter's size is in the column "Kernel_Szie", which is
    misspelt in the table.
    """
    columns = [
        "B",
        "Input_Channel",
        "Input_Size",
        "Output_Channel",
        "Kernel_Szie",
        "Stride",
        "Padding",
    ]
    problems: list[Problem | None] = []
    # Images and filters are square.
    for n, c, size, kout, r, stride, padding in frame[columns].astype(int).itertuples(index=False):
        pairs = [(stride, stride), (padding, padding), (1, 1)]
        problems.append(_build_conv((n, c, size, size, kout, r, r), pairs, "fp32", "fprop"))
    return _FileRows(
        devices=_device_names(frame["Device"]),
        dtypes=["fp32"] * len(frame),
        problems=problems,
        seconds=(frame["Latency"] * 1e-3).tolist(),
        implementations=["cudnn"] * len(frame),
        kernels=_neusight_kernels(frame),
    )


def _device_names(column: pd.Series) -> list[str]:
    """Return each row's GPU name; an empty cell becomes an empty name, which no machine has."""
    return column.fillna("").astype(str).tolist()


def _neusight_kernels(frame: pd.DataFrame) -> list[tuple[str, ...]]:
    """Return each row's kernel names from "Kernels" or, if that cell is empty, "Kernel Name"."""
    lists = frame["Kernels"].fillna(frame["Kernel Name"])
    texts = ["" if pd.isna(cell) else str(cell) for cell in lists]
    return [tuple(name for name in text.split(";") if name) for text in texts]


def _from_deepbench_gemm(frame: pd.DataFrame, path: Path) -> _FileRows:
    """Convert DeepBench's GEMMs. Times are in milliseconds.

    The matrices are column-major, so DeepBench's M and N are our n and m, and our layout is
    DeepBench's transB followed by transA.
    """
    dtype = _deepbench_dtype(path)
    layouts = [
        f"{trans_b}{trans_a}".lower()
        for trans_a, trans_b in zip(frame["transA"], frame["transB"], strict=True)
    ]
    sizes = zip(frame["N"], frame["M"], frame["K"], layouts, strict=True)  # in our order
    problems = [_build_gemm(int(m), int(n), int(k), dtype, layout) for m, n, k, layout in sizes]
    return _FileRows(
        devices=[None] * len(frame),
        dtypes=[dtype] * len(frame),
        problems=problems,
        seconds=(pd.to_numeric(frame["time_ms"], errors="coerce") * 1e-3).tolist(),
        implementations=["cublas"] * len(frame),
        kernels=[()] * len(frame),
    )


_DEEPBENCH_PASSES = {
    "Forward (msec)": "fprop", "wrt Inputs (msec)": "dgrad", "wrt Parameters (msec)": "wgrad",
}  # fmt: skip


def _from_deepbench_conv(frame: pd.DataFrame, path: Path) -> _FileRows:
    """Convert DeepBench's convolutions, all of which have the layout NCHW.

    A row has one time for each pass, in milliseconds. The time of a pass that was not run is
    ``N/A``.
    """
    dtype = _deepbench_dtype(path)
    problems: list[Problem | None] = []
    seconds: list[float] = []
    columns = [
        "N",
        "C",
        "H",
        "W",
        "K",
        "R (Filter height)",
        "S (Filter width)",
        "Vertical stride",
        "Horizontal stride",
        "pad_h",
        "pad_w",
    ]
    shapes = frame[columns].astype(int).itertuples(index=False, name=None)
    for shape, (_, row) in zip(shapes, frame.iterrows(), strict=True):
        *sizes, stride_h, stride_w, pad_h, pad_w = shape
        pairs = [(stride_h, stride_w), (pad_h, pad_w), (1, 1)]  # the dilation is 1
        for column, pass_ in _DEEPBENCH_PASSES.items():
            problems.append(_build_conv(sizes, pairs, dtype, pass_))
            milliseconds = pd.to_numeric(row[column], errors="coerce")
            seconds.append(float(milliseconds) * 1e-3)
    return _FileRows(
        devices=[None] * len(problems),
        dtypes=[dtype] * len(problems),
        problems=problems,
        seconds=seconds,
        implementations=["cudnn"] * len(problems),
        kernels=[()] * len(problems),
    )


def _deepbench_dtype(path: Path) -> str:
    """Return the dtype of a DeepBench table from the file's name, because no column contains it."""
    dtypes = set(re.findall(r"fp16|fp32", path.name.lower()))
    if len(dtypes) != 1:
        raise UserError(
            f"{path} is a DeepBench table, which has no column for the dtype; rename the file so "
            "that its name contains either fp16 or fp32."
        )
    (dtype,) = dtypes
    return dtype


def _build_gemm(m: int, n: int, k: int, dtype: str, layout: str = "nt") -> Gemm | None:
    try:
        return Gemm(m, n, k, dtype, layout)
    except UserError:
        return None


def _build_conv(
    sizes: Sequence[int], pairs: Sequence[tuple[int, int]], dtype: str, pass_: str
) -> Conv | None:
    """Return a convolution in NCHW with one group, or None if a size or a pair is invalid.

    ``sizes`` are n, c, h, w, kout, r and s. ``pairs`` are stride, padding and dilation.
    """
    try:
        return Conv.build(sizes, pairs, 1, dtype, "nchw", pass_)
    except ValueError:
        return None


_FORMATS: tuple[tuple[set[str], Callable[[pd.DataFrame, Path], _FileRows]], ...] = (
    ({"device", "gemm_dtype", "m", "n", "k", "latency"}, _from_aiconfigurator),
    ({"OPName", "Latency", "Device", "Kernels", "B", "M", "N", "K"}, _from_neusight_linear),
    ({"Latency", "Device", "Kernels", "Input_Channel", "Kernel_Szie"}, _from_neusight_conv),
    ({"M", "N", "K", "transA", "transB", "time_ms"}, _from_deepbench_gemm),
    ({"W", "H", "C", "N", "K", *_DEEPBENCH_PASSES}, _from_deepbench_conv),
)
"""Columns that identify each format of public tables, and the function that converts such a table.

The function also takes the table's path, because only the name of a DeepBench file shows its dtype.
"""
