"""Which cliffs are foreseen where every M was measured?

python -m tests.studies.every_m FILE --machine NAME [--results DIR] [--write FILE]

FILE has the times of some layers at every M in a row: columns m, n, k, dtype and time_us. The
machine's answers rest on what is in DIR; without it on shipped constants, or on those of its
generation. Cliffs are those of :func:`tests.studies.cliffs.cliffs`: steps from M to M + 1 of
over 10%, foreseen if the predicted step at the same M is over 5%. The line that is written has
errors, coverage and width of the predictions, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer

from analysis.imports.public import PublicRows
from analysis.model.basis import find_basis
from kernels.common.program import ROOT
from kernels.problem import Gemm
from tests.studies.cliffs import cliffs


def judge(rows: pd.DataFrame, machine: str, results: Path) -> dict[str, Any]:
    """Compare predictions with every measured time, and predicted with measured cliffs."""
    problems = [Gemm(m, n, k, d) for m, n, k, d in rows[["m", "n", "k", "dtype"]].to_numpy()]
    basis = find_basis(machine, results)
    predicted = basis.model.predict(basis.query(problems))
    kind, source = basis.kind_and_source(problems[0])
    time = rows["time_us"].to_numpy(float) * 1e-6
    guess = predicted.estimate.time
    count = len(problems)
    tested = PublicRows(
        machine, str(rows["dtype"].iloc[0]), problems, ["cublas"] * count, time, [()] * count, {}
    )
    error = np.abs(guess / time - 1)
    return {
        "machine": machine, "basis": kind, "source": source, "rows": len(rows),
        "dtype": sorted(set(rows["dtype"])), "layers": len(rows[["n", "k"]].drop_duplicates()),
        "mean": float(error.mean()), "median": float(np.median(error)),
        "p95": float(np.quantile(error, 0.95)),
        "coverage_90": float(((predicted.lo <= time) & (time <= predicted.hi)).mean()),
        "width": float(np.exp(np.mean(np.log(predicted.hi / predicted.lo)))),
        "cliffs": cliffs(tested, guess),
    }  # fmt: skip


def main(
    file: Annotated[Path, typer.Argument(help="CSV of times at every M.")],
    machine: Annotated[str, typer.Option(help="Slug of the GPU that was measured.")],
    results: Annotated[Path, typer.Option(help="Folder of all machines' results.")] = (
        ROOT / "no-results"
    ),
    write: Annotated[Path, typer.Option(help="File that a line is added to.")] = (
        ROOT / "results" / "accuracy" / "every-m.jsonl"
    ),
) -> None:
    """Judge a file and add a line."""
    line = {"file": file.name, **judge(pd.read_csv(file), machine, results)}
    with open(write, "a", encoding="utf-8") as lines:
        lines.write(json.dumps(line, ensure_ascii=False) + "\n")
    print(json.dumps(line, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    typer.run(main)
