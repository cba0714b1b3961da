"""Read the public tables of fused attention.

The package ``aiconfigurator-core`` has tables of causal attention over prompts
(``context_attention``), decoding (``generation_attention``), and attention in encoders
(``encoder_attention``). The times were measured in the same way as those in the package's GEMM
tables (:mod:`analysis.imports.tables`). Only calls in bf16 are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from analysis.attention_shapes import CONTEXT, DECODE, FULL, AttentionShapes
from analysis.imports.tables import (
    BF16,
    PACKAGE,
    framework_name,
    package_folders,
    version_numbers,
)
from kernels.common.errors import UserError
from kernels.machine import slug_of_device
from kernels.timemodel.estimate import Array

_FILES = {
    CONTEXT: "context_attention_perf.parquet",
    DECODE: "generation_attention_perf.parquet",
    FULL: "encoder_attention_perf.parquet",
}


@dataclass(frozen=True)
class AttentionTable:
    """One table: times of one kind of call, on one GPU, with one version of one framework.

    ``kind`` is one of :data:`analysis.attention_shapes.KINDS`.
    """

    path: Path
    slug: str
    framework: str
    version: str
    kind: str

    @property
    def source(self) -> str:
        """Framework and version in words, such as ``vLLM 0.24.0``."""
        return f"{framework_name(self.framework)} {self.version}"


def find_attention_tables(machine: str | None = None) -> list[AttentionTable]:
    """Find the tables in the installed package, one per GPU, framework and kind of call.

    If a framework has tables for several versions, the table for the latest version is chosen.

    Args:
        machine: slug of the machine whose tables are returned; None for all machines.

    Raises:
        UserError: if the package is not installed, or a table cannot be read.
    """
    folders, _, _ = package_folders()
    latest: dict[tuple[str, str, str], AttentionTable] = {}
    for kind, file_name in _FILES.items():
        paths: list[Path] = []
        for folder in folders:
            paths += folder.rglob(file_name)
        for path in sorted(paths):
            table = _read_table(path, kind)
            if table is None:
                continue
            key = table.slug, table.framework, kind
            version = version_numbers(table.version)
            previous = latest.get(key)
            if previous is None or version_numbers(previous.version) < version:
                latest[key] = table
    return [table for table in latest.values() if machine in (None, table.slug)]


def _read_table(path: Path, kind: str) -> AttentionTable | None:
    """Return the table in a file, or None if the file has no rows."""
    table = _read_parquet(path, ["framework", "version", "device"])
    if not len(table):
        return None
    # All rows have the same GPU, framework and version.
    (first_row,) = table.slice(0, 1).to_pylist()
    slug = slug_of_device(first_row["device"])
    return AttentionTable(path, slug, first_row["framework"].lower(), first_row["version"], kind)


def _read_parquet(path: Path, columns: list[str] | None = None) -> pa.Table:
    try:
        return parquet.read_table(path, columns=columns)
    except (OSError, pa.ArrowException) as error:
        lines = str(error).splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise UserError(
            f"{path} cannot be read as a table ({reason}); re-install {PACKAGE}."
        ) from None


def read_calls(table: AttentionTable) -> tuple[AttentionShapes, Array]:
    """Read the shapes of a table's calls in bf16, and their times in seconds.

    Only calls that ran with the most frequent kernel are read. Kernels differ in speed, and a fit
    could not tell them apart, because the shapes do not say which kernel ran.

    Raises:
        UserError: if the file cannot be read.
    """
    # 1. Keep the calls in bf16 that have a time, and among them those of the most frequent kernel.
    frame = _read_parquet(table.path).to_pandas()
    kept = (frame["attn_dtype"] == BF16) & (frame["latency"] > 0)
    if "kv_cache_dtype" in frame:
        kept &= frame["kv_cache_dtype"] == BF16
    frame = frame[kept]
    # A table without calls in bf16 has no most frequent kernel, so isin() keeps none of its rows.
    most_frequent = frame["kernel_source"].mode().head(1)
    frame = frame[frame["kernel_source"].isin(most_frequent)]

    def column(name: str) -> Array:
        return frame[name].to_numpy(float)

    # 2. Translate the columns. In decoding, a call has one query, whose keys are the prompt and the
    #    tokens after it. Encoders have as many heads of keys and values as of queries. A call with
    #    a window of 0, or without a window, sees every key.
    heads = column("num_heads")
    tokens = column("isl")
    keys = tokens + column("step") if table.kind == DECODE else tokens
    windows = column("window_size") if "window_size" in frame else np.zeros(len(frame))
    windows = np.nan_to_num(windows)
    shapes = AttentionShapes(
        batch=column("batch_size"),
        heads=heads,
        kv_heads=heads if table.kind == FULL else column("num_key_value_heads"),
        queries=np.ones(len(frame)) if table.kind == DECODE else tokens,
        keys=keys,
        width=column("head_dim"),
        seen=np.where(windows > 0, np.minimum(keys, windows), keys),
    )
    seconds = column("latency") * 1e-3  # latencies are in milliseconds
    return shapes, seconds
