"""Which sweeps are asked for, their cases on a machine, and what these should take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernels import implementations
from kernels.common.errors import UserError, nearest
from kernels.config import HAND_WRITTEN
from kernels.machine import Machine
from kernels.operation import Workload
from kernels.registry import library_for
from sweeps.cases.case import CONFIRM, Case
from sweeps.cases.expand import expand
from sweeps.cases.spec import Sweep, all_sweeps, broken_sweeps, read_sweep
from sweeps.planning.plan import make_plan

EXPERIMENTAL = "experimental"
"""A sweep's word for the candidates that an implementation leaves out by default."""


def choose_sweeps(names: Sequence[str]) -> dict[str, Sweep]:
    """The named sweeps, or the default ones. A name that ends in ``.toml`` is a file's.

    Raises:
        UserError: a sweep is not known, or its file is wrong. A wrong file that is not named is no
            reason to measure nothing.
    """
    known, broken = all_sweeps(), broken_sweeps()
    if not names:
        return {name: sweep for name, sweep in known.items() if sweep.default}
    chosen: dict[str, Sweep] = {}
    for name in names:
        if is_file(name):
            sweep = read_sweep(Path(name))
            if sweep.name in {*known, *chosen, CONFIRM}:
                raise UserError(f"a sweep named {name} already exists; rename yours.")
            chosen[sweep.name] = sweep
        elif name in broken:
            raise broken[name]
        elif name in known:
            chosen[name] = known[name]
        else:
            raise UserError(f"sweep {name!r} is not known; {nearest(name, known)}")
    return chosen


def sweep_name(name: str) -> str:
    """The name of a sweep that is called by its name or by its file's."""
    return Path(name).stem if is_file(name) else name


def is_file(name: str) -> bool:
    """Whether a sweep's name on the command line is that of a file."""
    return name.endswith(".toml")


def sweep_cases(sweep: Sweep, machine: Machine, dtypes: Sequence[str] = ()) -> list[Case]:
    """The cases of a sweep here, with the configs that the implementations choose.

    Args:
        sweep: the declaration.
        machine: which it is expanded for.
        dtypes: only cases of these, emulated ones too; none: what the sweep declares.
    """
    if dtypes:
        left_out = tuple(dtype for dtype in machine.emulated if dtype not in dtypes)
        cases = sweep_cases(sweep, replace(machine, emulated=left_out))
        return [case for case in cases if case.problem.dtype in dtypes]

    def configured(name: str, declared: str, problem: Workload, machine: Machine) -> list[str]:
        implementation = implementations().get(name)
        if implementation is None and name in HAND_WRITTEN:
            return []  # Triton is not installed, which the doctor says
        if implementation is None:
            raise UserError(
                f"{sweep.name}.toml: implementation is {name!r}; {nearest(name, implementations())}"
            )
        count = _candidate_count(declared)
        if count == 0:
            try:
                implementation.parse_config(declared)
            except UserError as error:
                raise UserError(f"{sweep.name}.toml: config is {declared!r}: {error}") from None
            return [declared]
        if implementation.supports(problem, machine) is not None:
            return [""]  # becomes one row that says why
        experimental = declared == EXPERIMENTAL
        configs = implementation.configs(problem, machine, experimental)[:count]
        if experimental:
            configs = [config for config in configs if config and config.experimental]
        return ["" if config is None else str(config) for config in configs]

    return expand(sweep, machine, library_for, configured)


def plan_rows(
    names: Sequence[str], machine: Machine, budget: float, cores: int | None = None
) -> list[dict[str, Any]]:
    """Of each sweep: its cases on a machine, and what of them a plan of ``budget`` seconds has.

    ``cores`` are those of its host, which compile; None: as many as here.

    Returns:
        ``name``, ``cases``, ``planned``, ``expected_s`` for six samples of each planned case, and
        ``checking_s``, those of them in which results are checked.
    """
    cases = {name: sweep_cases(sweep, machine) for name, sweep in choose_sweeps(names).items()}
    plan = make_plan(cases, machine, budget, cores=cores)
    rows: dict[str, dict[str, Any]]
    rows = {
        name: {"name": name, "cases": len(all_), "planned": 0, "expected_s": 0.0, "checking_s": 0.0}
        for name, all_ in cases.items()
    }
    for entry in plan.planned:
        row = rows[entry.case.sweep]
        row["planned"] += 1
        row["expected_s"] += entry.expected
        row["checking_s"] += entry.checking
    return list(rows.values())


def _candidate_count(declared: str) -> int | None:
    """How many of an implementation's configs a sweep's word asks for; 0 if it spells one out.

    ``""`` is the implementation's own choice, ``best 4`` the four that it ranks first, ``all`` and
    ``experimental`` (None) every one.
    """
    match = re.fullmatch(rf"best (\d+)|(all|{EXPERIMENTAL}|)", declared)
    if match is None:
        return 0
    return int(match.group(1)) if match.group(1) else None if declared else 1
