"""How far do measured fp32 times lie from predictions that shipped constants give?

python -m tests.studies.fp32_interval FILE [--write FILE]

FILE is the table of linear layers in sitar-lab/NeuSight. A GPU's predictions have no measurement
of its own; but constants of three of the GPUs were fitted to rows of this table, and only the A100
40 GB had no part in any fit. ``FP32_LIKE`` of :mod:`analysis.model.fit` rests on the result.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from analysis.imports.public import read_source
from analysis.model.basis import find_basis
from kernels.common.program import ROOT
from kernels.machine import known_machine

_MACHINES = (
    "nvidia-h100-sxm", "nvidia-a100-pcie-80gb", "nvidia-a100-pcie-40gb", "nvidia-v100-pcie-32gb",
    "nvidia-l4", "nvidia-t4",
)  # fmt: skip


def judge(file: Path, machine: str) -> dict[str, Any]:
    """Compare a GPU's measured fp32 times with its predictions and their 90% interval."""
    measured = read_source(file, known_machine(machine), "fp32")
    basis = find_basis(machine, ROOT / "no-results")
    predicted = basis.model.predict(basis.query(measured.problems))
    ratio = measured.seconds / predicted.estimate.time
    within = (predicted.lo <= measured.seconds) & (measured.seconds <= predicted.hi)
    quantiles = np.quantile(ratio, [0.05, 0.5, 0.95])
    return {
        "machine": machine,
        "source": basis.kind_and_source(measured.problems[0])[1],
        "rows": len(ratio),
        "measured_over_predicted": dict(zip(("p5", "median", "p95"), quantiles, strict=True)),
        "coverage_90": float(within.mean()),
    }  # fmt: skip


def main(
    file: Annotated[Path, typer.Argument(help="NeuSight's table of linear layers.")],
    write: Annotated[Path, typer.Option(help="File to write.")] = (
        ROOT / "results" / "accuracy" / "fp32-interval.json"
    ),
) -> None:
    """Judge each GPU of the table and write a list of results."""
    text = json.dumps([judge(file, machine) for machine in _MACHINES], indent=1, ensure_ascii=False)
    write.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    typer.run(main)
