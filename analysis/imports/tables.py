"""Find and read the public GEMM tables of a package, and choose one for each GPU's recording.

``aiconfigurator-core`` has a ``gemm_perf.parquet`` for each GPU, framework and version. The times
in these files are means of six CUDA-graph replays of y = x Wᵀ. The cache is not flushed between
replays, so operands may come from the cache. Clocks are not controlled. The package is never
imported, because that would load native code. The files are found by their names, because their
paths have changed between versions of the package.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from kernels.common.errors import UserError
from kernels.common.program import needs_extra
from kernels.machine import slug_of_device
from kernels.problem import Gemm

PACKAGE = "aiconfigurator-core"
_MODULE = "aiconfigurator_core"
_FILE = "gemm_perf.parquet"
_TABLE = "gemm_perf"  # name of the table in the YAML files next to it
_NEEDED = {"framework", "version", "device", "gemm_dtype", "m", "n", "k", "latency"}
_NAMES = {"trtllm": "TensorRT-LLM", "sglang": "SGLang", "vllm": "vLLM"}
_PREFERRED = list(_NAMES)  # frameworks; the one whose tables repeat best comes first
_ENOUGH = 0.5  # share of the largest table's rows below which a table has too few rows
_UNFINISHED = {"dev": -4, "a": -3, "b": -2, "rc": -1}  # marks of unfinished versions, by stage
BF16 = "bfloat16"
DTYPES = {BF16: "bf16", "fp8": "fp8"}
"""Rooftile's name for each dtype that is read, keyed by the dtype's name in the tables."""


@dataclass(frozen=True)
class PublicTable:
    """One table: the GEMMs that one version of one framework ran on one GPU.

    Attributes:
        rows: number of rows in bf16.
        package: name and version of the package that the file comes with; empty for a single file.
        licence: licence of the package; empty for a single file.
        complete: False if the publishers call the table incomplete.
        also_for: other versions for which the publishers reuse this table.
    """

    path: Path
    device: str
    framework: str
    version: str
    rows: int
    package: str
    licence: str
    complete: bool = True
    also_for: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """Slug of the GPU."""
        return slug_of_device(self.device)

    @property
    def source(self) -> str:
        """Framework and version in words, such as ``TensorRT-LLM 1.3.0rc20``."""
        return f"{framework_name(self.framework)} {self.version}"


def framework_name(framework: str) -> str:
    """Return a framework's official name, such as ``vLLM`` for ``VLLM``.

    The name of an unknown framework is returned unchanged.
    """
    return _NAMES.get(framework.lower(), framework)


def find_tables() -> list[PublicTable]:
    """Find every GEMM table in the installed package.

    Raises:
        UserError: if the package is not installed, has no table, or has an unreadable table.
    """
    folders, package, licence = package_folders()
    paths = sorted(path for folder in folders for path in folder.rglob(_FILE))
    tables = [read_table(path, package, licence) for path in paths]
    if not tables:
        raise UserError(
            f"{package} has no {_FILE}; install the version that constraints.txt names."
        )
    return tables


def package_folders() -> tuple[list[Path], str, str]:
    """Return the folders of the installed package, its name with its version, and its licence.

    Raises:
        UserError: if the package is not installed.
    """
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(needs_extra(PACKAGE, "public"))
    metadata = importlib.metadata.metadata(PACKAGE)
    licence = metadata["License-Expression"] or metadata["License"] or ""
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    return folders, f"{PACKAGE} {metadata['Version']}", licence


def read_table(path: Path, package: str = "", licence: str = "") -> PublicTable:
    """Read what a table covers: its GPU, framework and version, and whether it is complete.

    Raises:
        UserError: if the file cannot be read as a table of GEMMs.
    """
    try:
        columns = set(parquet.read_schema(path).names)
        if not columns >= _NEEDED:
            missing = sorted(_NEEDED - columns)
            noun = "column" if len(missing) == 1 else "columns"
            raise UserError(f"{path} lacks the {noun} {', '.join(missing)}; give a table of GEMMs.")
        table = parquet.read_table(path, columns=["framework", "version", "device", "gemm_dtype"])
        if not len(table):
            raise UserError(f"{path} has no rows; give another table.")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; check the path.") from None
    except (OSError, pa.ArrowException) as error:
        lines = str(error).splitlines()
        reason = lines[0] if lines else "empty"
        raise UserError(
            f"{path} cannot be read as a table ({reason}); give an undamaged gemm_perf.parquet."
        ) from None
    # All rows have the same GPU, framework and version.
    (first_row,) = table.slice(0, 1).to_pylist()
    for name in ("framework", "version", "device"):
        if not isinstance(first_row[name], str):
            raise UserError(
                f"{path} has {first_row[name]!r} instead of text in the column {name}; give an "
                "undamaged gemm_perf.parquet."
            )
    return PublicTable(
        path=path,
        device=first_row["device"],
        framework=first_row["framework"],
        version=first_row["version"],
        rows=sum(value == BF16 for value in table.column("gemm_dtype").to_pylist()),
        package=package,
        licence=licence,
        complete=_is_complete(path.parent),
        also_for=_later_versions(path.parent),
    )


def _is_complete(folder: Path) -> bool:
    """Return False if collection_meta.yaml in the table's folder calls the table incomplete."""
    # The publishers of the table write this file, so it may be missing or have any form.
    tables = _read_yaml(folder / "collection_meta.yaml").get("tables")
    entry = tables.get(_TABLE) if isinstance(tables, dict) else None
    if not isinstance(entry, dict):
        return True
    return entry.get("status", "complete") == "complete"


def _later_versions(folder: Path) -> tuple[str, ...]:
    """Return the versions whose reuse.yaml names the table in ``folder``, in ascending order."""
    reused_table = {"table": _TABLE, "from_version": folder.name}
    versions = []
    for path in folder.parent.glob("*/reuse.yaml"):
        entries = _read_yaml(path).get("reuse")
        # The publishers of the table write this file, so it may have any form.
        if not isinstance(entries, list):
            continue
        mappings = [entry for entry in entries if isinstance(entry, dict)]
        # An entry may also have other keys, so only these two are compared.
        if any(reused_table.items() <= entry.items() for entry in mappings):
            versions.append(path.parent.name)
    return tuple(sorted(versions, key=version_numbers))


def _read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file.

    The result is empty if the file is missing or has no valid mapping, or if PyYAML is not
    installed. PyYAML comes with ``aiconfigurator-core``, which is not needed for a table that is
    given as a file.
    """
    if not path.is_file() or importlib.util.find_spec("yaml") is None:
        return {}
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return document if isinstance(document, dict) else {}


def choose_tables(tables: Sequence[PublicTable]) -> dict[str, PublicTable]:
    """Choose the table from which each machine's recording is made; return the tables by slug.

    Tables with at least half as many rows in bf16 as the machine's largest table are preferred. The
    next criteria are completeness, the framework (TensorRT-LLM, then SGLang, vLLM and others) and
    the latest version. Tables without rows in bf16 are left out.
    """
    by_slug: dict[str, list[PublicTable]] = {}
    for table in tables:
        if table.rows:
            by_slug.setdefault(table.slug, []).append(table)
    return {
        slug: max(tables_of_slug, key=lambda table: _rank(table, tables_of_slug))
        for slug, tables_of_slug in by_slug.items()
    }


def _rank(
    table: PublicTable, tables_of_slug: Sequence[PublicTable]
) -> tuple[bool, bool, int, tuple[int, ...]]:
    """Return the sort key of a table; the best table of a machine has the largest key."""
    most_rows = max(candidate.rows for candidate in tables_of_slug)
    has_enough = table.rows >= _ENOUGH * most_rows
    framework = table.framework.lower()
    # A framework that is not listed comes after all listed ones.
    position = _PREFERRED.index(framework) if framework in _PREFERRED else len(_PREFERRED)
    return has_enough, table.complete, -position, version_numbers(table.version)


def version_numbers(text: str) -> tuple[int, ...]:
    """Return a sort key for versions: 1.10 comes after 1.9, and 1.3.0 after 1.3.0rc20."""
    public_version, _, _ = text.partition("+")  # a build is named after the +, such as +cu128
    key = [
        int(part) if part.isdigit() else _UNFINISHED[part]
        for part in re.findall(r"\d+|dev|a|b|rc", public_version)
    ]
    # The end of a version (0) is above the marks of unfinished versions, which are negative.
    return (*key, 0)


def read_rows(table: PublicTable, *dtypes: str) -> pd.DataFrame:
    """Read a table's rows with a time above 0; return the columns m, n, k, dtype and time_us.

    ``dtypes`` are Rooftile's names of the dtypes to read. If none is given, only bf16 is read.
    """
    wanted_dtypes = dtypes or ("bf16",)
    published = pd.read_parquet(table.path, columns=["gemm_dtype", "m", "n", "k", "latency"])
    time_us = published["latency"] * 1e3  # latencies are in milliseconds
    rows = published.assign(dtype=published["gemm_dtype"].map(DTYPES), time_us=time_us)
    rows = rows[rows["dtype"].isin(wanted_dtypes) & (rows["latency"] > 0)]
    return rows[["m", "n", "k", "dtype", "time_us"]].reset_index(drop=True)


def gemms_of(rows: pd.DataFrame) -> list[Gemm]:
    """Return the GEMM y = x Wᵀ of each row; the columns are those of :func:`read_rows`."""
    sizes = zip(rows["m"], rows["n"], rows["k"], rows["dtype"], strict=True)
    return [Gemm(int(m), int(n), int(k), dtype) for m, n, k, dtype in sizes]
