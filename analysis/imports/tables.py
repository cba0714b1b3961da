"""Tables that others measured and published in a package, each as a recording of its GPU.

``aiconfigurator-core`` carries, for each GPU, framework and version, a ``gemm_perf.parquet``: the
mean of six CUDA-graph replays of y = x Wᵀ, nothing flushed between them (so that operands may come
from the cache), no control of clocks. Nothing of it is imported: that would load native code. Its
files are found by their name, since their paths have changed between versions, and whose they are
their own columns say.
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
_TABLE = "gemm_perf"  # as the files beside it call it
_NEEDED = {"framework", "version", "device", "gemm_dtype", "m", "n", "k", "latency"}
_NAMES = {"trtllm": "TensorRT-LLM", "sglang": "SGLang", "vllm": "vLLM"}
_PREFERRED = list(_NAMES)  # by how well a framework's tables repeat themselves
_ENOUGH = 0.5  # of the largest collection's rows: a smaller one knows too few shapes
BF16 = "bfloat16"
DTYPES = {BF16: "bf16", "fp8": "fp8"}
"""The dtypes that are read, by the tables' names, with ours."""


@dataclass(frozen=True)
class PublicTable:
    """One collection: the GEMMs of one GPU as one version of one framework ran them.

    ``rows`` counts those in bf16. ``package`` is the name and version of the package that the file
    comes with and ``licence`` its licence, both empty of a file by itself. ``complete`` says
    whether its publishers call it so, and ``also_for`` are later versions that they declare it for,
    in whose place they publish nothing else.
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
        """The machine's."""
        return slug_of_device(self.device)

    @property
    def source(self) -> str:
        """In words: ``TensorRT-LLM 1.3.0rc20``."""
        return f"{_NAMES.get(self.framework.lower(), self.framework)} {self.version}"


def find_tables() -> list[PublicTable]:
    """Every table of the installed package.

    Raises:
        UserError: the package is not installed, or has no table that can be read.
    """
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(needs_extra(PACKAGE, "public"))
    told = importlib.metadata.metadata(PACKAGE)
    version, licence = told["Version"], told["License-Expression"] or told["License"] or ""
    roots = [Path(root) for root in spec.submodule_search_locations]
    paths = sorted(path for root in roots for path in root.rglob(_FILE))
    tables = [read_table(path, f"{PACKAGE} {version}", licence) for path in paths]
    if not tables:
        raise UserError(
            f"{PACKAGE} {version} has no {_FILE}; install the version that constraints.txt names."
        )
    return tables


def read_table(path: Path, package: str = "", licence: str = "") -> PublicTable:
    """What a file says of itself.

    Raises:
        UserError: it cannot be read, or is no such table.
    """
    try:
        columns = set(parquet.read_schema(path).names)
        if not columns >= _NEEDED:
            missing = ", ".join(sorted(_NEEDED - columns))
            raise UserError(f"{path} lacks the columns {missing}: it is not a table of GEMMs.")
        table = parquet.read_table(path, columns=["framework", "version", "device", "gemm_dtype"])
        if not len(table):
            raise UserError(f"{path} has no rows.")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give a gemm_perf.parquet.") from None
    except (OSError, pa.ArrowException) as error:
        reason = (str(error).splitlines() or ["empty"])[0]
        raise UserError(f"{path} is not a table that can be read ({reason}).") from None
    first = table.slice(0, 1).to_pylist()[0]
    return PublicTable(
        path=path,
        device=first["device"],
        framework=first["framework"],
        version=first["version"],
        rows=sum(value == BF16 for value in table.column("gemm_dtype").to_pylist()),
        package=package,
        licence=licence,
        complete=_is_complete(path.parent),
        also_for=_later_versions(path.parent),
    )


def _is_complete(folder: Path) -> bool:
    """Whether the file beside a table calls it complete; a table without such a file is."""
    tables = _read_yaml(folder / "collection_meta.yaml").get("tables")
    entry = tables.get(_TABLE) if isinstance(tables, dict) else None
    return not isinstance(entry, dict) or entry.get("status", "complete") == "complete"


def _later_versions(folder: Path) -> tuple[str, ...]:
    """The versions whose folders, beside a table's, hold only a pointer to it."""
    pointers = {path.parent.name: _read_yaml(path) for path in folder.parent.glob("*/reuse.yaml")}
    here = {"table": _TABLE, "from_version": folder.name}
    reused = {version: told.get("reuse") for version, told in pointers.items()}
    return tuple(
        version
        for version, entries in sorted(reused.items(), key=lambda item: version_numbers(item[0]))
        if isinstance(entries, list)
        and any(isinstance(entry, dict) and here.items() <= entry.items() for entry in entries)
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    """A file beside a table; empty where there is none, or where it says nothing readable.

    PyYAML comes with the package of tables. Where a table is given by itself, neither may be there.
    """
    if not path.is_file() or importlib.util.find_spec("yaml") is None:
        return {}
    import yaml

    try:
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return told if isinstance(told, dict) else {}


def choose_tables(tables: Sequence[PublicTable]) -> dict[str, PublicTable]:
    """The table of each machine that its recording is made of, by slug.

    TensorRT-LLM's latest where it has as many shapes as others, else SGLang's, else vLLM's.
    """
    by_slug: dict[str, list[PublicTable]] = {}
    for table in tables:
        if table.rows:
            by_slug.setdefault(table.slug, []).append(table)
    return {slug: max(group, key=lambda t: _rank(t, group)) for slug, group in by_slug.items()}


def _rank(table: PublicTable, group: Sequence[PublicTable]) -> tuple[Any, ...]:
    enough = table.rows >= _ENOUGH * max(other.rows for other in group)
    name = table.framework.lower()
    order = -_PREFERRED.index(name) if name in _PREFERRED else -len(_PREFERRED)
    return enough, table.complete, order, version_numbers(table.version)


def version_numbers(text: str) -> tuple[int, ...]:
    """``1.3.0rc20`` as (1, 3, 0, 20): numbers compare as numbers."""
    return tuple(int(part) for part in re.findall(r"\d+", text))


def read_rows(table: PublicTable, *dtypes: str) -> pd.DataFrame:
    """Rows of a table: m, n, k, dtype and time_us, without those that are no time.

    Args:
        table: whose rows.
        dtypes: which of ours; bf16 if none is given.
    """
    columns = ["gemm_dtype", "m", "n", "k", "latency"]
    frame = pd.read_parquet(table.path, columns=columns)
    frame = frame.assign(dtype=frame["gemm_dtype"].map(DTYPES), time_us=frame["latency"] * 1e3)
    frame = frame[frame["dtype"].isin(dtypes or ("bf16",)) & (frame["latency"] > 0)]
    return frame[["m", "n", "k", "dtype", "time_us"]].reset_index(drop=True)


def gemms_of(rows: pd.DataFrame) -> list[Gemm]:
    """The products of rows as :func:`read_rows` returns them, y = x Wᵀ."""
    sizes = zip(rows["m"], rows["n"], rows["k"], rows["dtype"], strict=True)
    return [Gemm(int(m), int(n), int(k), dtype) for m, n, k, dtype in sizes]
