"""Which config each Triton family chooses for 200 real shapes, next to another checkout's choice.

python -m tests.studies.chosen_configs OTHER [--write FILE]

OTHER is a checkout of an earlier version. The shapes are drawn from the sweeps `families` and
`families-conv` (seed 0), for an H200; nothing is timed. The file has a line for each shape and
family with both configs, the formula's time for them, and the kernels of a call.
"""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kernels.common.program import ROOT
from kernels.machine import known_machine
from kernels.operation import as_problem
from sweeps.cases.spec import all_sweeps
from sweeps.planning.choice import sweep_cases

MACHINE = "nvidia-h200"
SHAPES = {"families": 100, "families-conv": 100}
CHOOSE = f"""
import json, sys
from kernels.timemodel.constants import default_constants
from kernels.machine import known_machine
from kernels.problem import Conv, Gemm
from kernels.registry import all_implementations
from kernels.triton.family import meta_operands

machine = known_machine("{MACHINE}")
for line in sys.stdin:
    name, op, spec = json.loads(line)
    problem = (Gemm if op == "gemm" else Conv).parse(spec)
    family = all_implementations()[name]
    config = family.configs(problem, machine)[0]
    constants = default_constants(machine.generation, problem.dtype)
    (seconds,) = family.seconds(problem, [config], machine, constants)
    calls = family.unbound_calls(problem, meta_operands(problem), config)
    names = [call.kernel.fn.__name__ for call in calls]
    print(json.dumps([str(config), round(seconds * 1e6, 2), " + ".join(names)]), flush=True)
"""
"""Run in a checkout: reads questions from standard input and answers each with a line."""


def questions() -> list[tuple[str, str, str]]:
    """(family, op, problem) for the shapes that are drawn."""
    machine, asked = known_machine(MACHINE), []
    for name, count in SHAPES.items():
        cases = sweep_cases(all_sweeps()[name], machine)
        problems = list(dict.fromkeys(case.problem for case in cases))
        drawn = set(random.Random(0).sample(problems, count))
        asked += [
            (case.implementation, case.problem.op, as_problem(case.problem).spec())
            for case in cases
            if case.problem in drawn and case.implementation.startswith("triton-")
        ]
    return list(dict.fromkeys(asked))


def choices(checkout: Path, asked: Sequence[Any]) -> list[list[Any]]:
    """What a checkout answers."""
    answer = subprocess.run(
        [sys.executable, "-c", CHOOSE], cwd=checkout, text=True, check=True, capture_output=True,
        input="\n".join(json.dumps(one) for one in asked),
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )  # fmt: skip
    return [json.loads(line) for line in answer.stdout.splitlines()]


def differs(old: Sequence[Any], new: Sequence[Any]) -> bool:
    """Whether two choices differ in more than what only one of them has words for."""
    one, other = (dict(part.split("=") for part in choice[0].split(";")) for choice in (old, new))
    return old[2] != new[2] or any(one[key] != other[key] for key in one.keys() & other.keys())


def main(
    other: Annotated[Path, typer.Argument(help="A checkout of an earlier version.")],
    write: Annotated[Path, typer.Option(help="Where the table goes.")] = (
        ROOT / "results" / "accuracy" / "chosen-configs.csv"
    ),
) -> None:
    """Compare the choices."""
    asked = questions()
    before, after = choices(other.resolve(), asked), choices(ROOT, asked)
    names = ("config", "formula_us", "kernels")
    with open(write, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        head = [f"{name}_{when}" for when in ("before", "after") for name in names]
        table.writerow(["family", "op", "problem", *head])
        rows = zip(asked, before, after, strict=True)
        table.writerows([*question, *old, *new] for question, old, new in rows)
    changed = sum(map(differs, before, after))
    print(f"{len(asked)} choices for {sum(SHAPES.values())} shapes, {changed} of them changed.")


if __name__ == "__main__":
    typer.run(main)
