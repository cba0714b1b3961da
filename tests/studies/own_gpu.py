"""How well are the times of GPUs that we measured predicted, before and after calibration?

    python -m tests.studies.own_gpu

reads the published recordings of GPUs and writes results/accuracy/own-gpu.json. Two predictions are
judged:

- ``shipped``: constants as they are shipped, fitted to warm bf16 times of another program. No time
  of the recordings went into them, except for the price of misaligned rows, which was learned from
  the H100's bf16 GEMMs (:mod:`tests.studies.misalignment`). Only GEMMs of cuBLAS have shipped
  constants.
- ``calibrated``: the model as it is fitted to the recording. Each case is predicted by a fit to the
  other folds.

Errors are of single cases: |predicted / measured − 1|. ``inside`` is the share of times inside the
90% interval.
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

import numpy as np
import pandas as pd

from analysis import rooftile
from analysis.model.fitted import analyse
from analysis.recordings.load import load, problems_of
from kernels.problem import WIDE_BYTES, Gemm
from kernels.timemodel.estimate import priced_alignment
from tests.studies.evidence import ROOT

RECORD = ROOT / "results" / "accuracy" / "own-gpu.json"
PUBLISHED = ROOT / "results" / "published"
SLUGS = ("nvidia-h100-sxm", "nvidia-h200")


def errors(rows: pd.DataFrame, **names: str) -> dict[str, Any]:
    """The errors of rows with the columns ``time_us``, ``predicted``, ``lo`` and ``hi``."""
    error = (rows["predicted"] / rows["time_us"] - 1).abs()
    inside = (rows["lo"] <= rows["time_us"]) & (rows["time_us"] <= rows["hi"])
    return {
        **names, "rows": len(rows), "median": float(error.median()), "mean": float(error.mean()),
        "p95": float(np.quantile(error, 0.95)), "inside": float(inside.mean()),
    }  # fmt: skip


def judged_table(slug: str) -> pd.DataFrame:
    """A recording's cases of the vendor libraries, with the calibrated, held-out predictions."""
    table = analyse(load(PUBLISHED / slug)).table
    table = table[table["implementation"].isin(["cublas", "cudnn"]) & (table["mode"] == "burst")]
    table = table.rename(
        columns={
            "predicted_time_us": "predicted", "predicted_lo_us": "lo", "predicted_hi_us": "hi",
        }
    )  # fmt: skip
    table["problem"] = problems_of(table)
    aligned = np.array([priced_alignment(p) >= WIDE_BYTES for p in table["problem"]])
    table["rows_are"] = np.where(aligned, "aligned", "misaligned")
    return table


def shipped_errors(table: pd.DataFrame, slug: str) -> list[dict[str, Any]]:
    """Errors of the shipped constants, by dtype, state of the cache and alignment of rows."""
    gemms = table[table["op"] == "gemm"].copy()
    with tempfile.TemporaryDirectory() as nothing:  # without any recording or import
        shapes = [problem for problem in gemms["problem"] if isinstance(problem, Gemm)]
        answers = rooftile.predict(shapes, slug, results=nothing)
    for ours, theirs in (("predicted", "time_us"), ("lo", "lo_us"), ("hi", "hi_us")):
        gemms[ours] = answers[theirs].to_numpy()
    found = []
    for (dtype, cache, rows_are), part in gemms.groupby(["dtype", "cache", "rows_are"]):
        names = {"dtype": str(dtype), "cache": str(cache), "rows_are": str(rows_are)}
        found.append(errors(part, **names))
    return found


def calibrated_errors(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Errors of the calibrated model, by operation and dtype."""
    return [
        errors(part, op=str(op), dtype=str(dtype))
        for (op, dtype), part in table.groupby(["op", "dtype"])
    ]


def _cells(row: dict[str, Any]) -> str:
    return " | ".join(
        [f"{row['rows']:,}", *(f"{row[name]:.1%}" for name in ("median", "mean", "p95")),
         f"{row['inside']:.0%}"]
    )  # fmt: skip


def shipped_markdown(document: dict[str, Any]) -> str:
    """The table of shipped constants, as how-accurate-it-is.md has it."""
    lines = ["| dtype | operands | rows | cases | median | mean | 95th percentile | inside |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    lines += [
        f"| {row['dtype']} | {row['cache']} | {row['rows_are']} | {_cells(row)} |"
        for row in document["shipped"]
    ]
    return "\n".join(lines)


def calibrated_markdown(document: dict[str, Any]) -> str:
    """The table of the calibrated model, as how-accurate-it-is.md has it."""
    lines = ["| what | dtype | cases | median | mean | 95th percentile | inside |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in document["calibrated"]:
        what = "GEMMs" if row["op"] == "gemm" else "convolutions"
        lines.append(f"| {what} | {row['dtype']} | {_cells(row)} |")
    return "\n".join(lines)


def main() -> None:
    """Judge, write and print."""
    judged = {}
    for slug in SLUGS:
        table = judged_table(slug)
        judged[slug] = {
            "recording": str((PUBLISHED / slug).relative_to(ROOT)),
            "shipped": shipped_errors(table, slug),
            "calibrated": calibrated_errors(table),
        }
        print(slug, calibrated_markdown(judged[slug]), shipped_markdown(judged[slug]), sep="\n\n")
    RECORD.write_text(json.dumps(judged, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
