"""Choose the sweeps of a run, expand them for a machine, and count the cases that are planned."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
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
from sweeps.planning.plan import make_plan, planned_seconds

EXPERIMENTAL = "experimental"
"""Value of a sweep's axis ``config`` that selects only the experimental configs."""


def choose_sweeps(names: Sequence[str]) -> dict[str, Sweep]:
    """Return the named sweeps, or the default sweeps if none is named.

    A name that ends in ``.toml`` is the path of a file.

    Raises:
        UserError: if a named sweep is unknown, its file cannot be read or is invalid, or a file has
            the name of another sweep. An invalid file in ``sweeps/specs`` is ignored unless its
            sweep is named.
    """
    valid, broken = all_sweeps(), broken_sweeps()
    if not names:
        return {name: sweep for name, sweep in valid.items() if sweep.default}
    chosen: dict[str, Sweep] = {}
    for name in dict.fromkeys(names):  # a name may be given twice
        if is_file(name):
            sweep = read_sweep(Path(name))
            # CONFIRM names the cases that are timed for advice, which have no file.
            if sweep.name in {*valid, *broken, *chosen, CONFIRM}:
                raise UserError(f"a sweep named {sweep.name!r} already exists; rename {name}.")
            chosen[sweep.name] = sweep
        elif name in broken:
            raise broken[name]
        elif name in valid:
            chosen[name] = valid[name]
        else:
            raise UserError(f"sweep {name!r} is not known; {nearest(name, valid)}")
    return chosen


def sweep_name(name: str) -> str:
    """Return the name of a sweep that the user gave by its name or by the path of its file."""
    return Path(name).stem if is_file(name) else name


def is_file(name: str) -> bool:
    """Return True if ``name`` is the path of a sweep's file, not the name of a sweep."""
    return name.endswith(".toml")


def sweep_cases(sweep: Sweep, machine: Machine, dtypes: Sequence[str] = ()) -> list[Case]:
    """Return the cases of a sweep on a machine.

    If ``dtypes`` is not empty, only cases of these dtypes are returned, even of dtypes that the
    machine emulates.

    Raises:
        UserError: if :func:`expand` refuses the sweep, for example because of an unknown
            implementation.
    """
    configured = functools.partial(_chosen_configs, sweep.name)
    cases = expand(sweep, machine, library_for, configured, requested=dtypes)
    return [case for case in cases if not dtypes or case.problem.dtype in dtypes]


def _chosen_configs(
    sweep: str, implementation_name: str, declared: str, problem: Workload, machine: Machine
) -> list[str]:
    """Return the texts of the configs with which a sweep times a problem.

    ``declared`` is the value of the sweep's axis ``config``, such as ``best 4``. An empty text
    stands for the implementation's default config, or for a problem that the implementation does
    not support. No config is returned if a hand-written kernel is requested but Triton is not
    installed, or if the implementation has no config of the requested kind.
    """
    # 1. Find the implementation.
    implementation = implementations().get(implementation_name)
    if implementation is None and implementation_name in HAND_WRITTEN:
        return []
    if implementation is None:
        raise UserError(
            f"{sweep}.toml: implementation {implementation_name!r} is not known; "
            f"{nearest(implementation_name, implementations())}"
        )
    # 2. A word that selects none of the implementation's configs must be a config itself. Check
    # such a word, and return it unchanged.
    count = _candidate_count(declared)
    if count == 0:
        try:
            implementation.parse_config(declared)
        except UserError as error:
            raise UserError(f"{sweep}.toml: config {declared!r} is invalid: {error}") from None
        return [declared]
    # 3. Let the implementation choose its configs.
    if implementation.supports(problem, machine) is not None:
        return [""]  # a single case, whose row in measurements.csv says why it has no time
    if declared != EXPERIMENTAL:
        configs = implementation.configs(problem, machine)[:count]
    else:
        # The implementation lists experimental configs together with all others.
        candidates = implementation.configs(problem, machine, experimental=True)
        configs = [config for config in candidates if config and config.experimental]
    return ["" if config is None else str(config) for config in configs]


def _candidate_count(declared: str) -> int | None:
    """Return how many of an implementation's configs ``declared`` may select.

    None stands for no limit. 0 means that ``declared`` must itself be a config.
    """
    if declared == "":
        return 1
    if declared in ("all", EXPERIMENTAL):
        return None
    best = re.fullmatch(r"best (\d+)", declared)
    return int(best.group(1)) if best else 0


def plan_rows(
    names: Sequence[str], machine: Machine, budget: float, cores: int | None = None
) -> tuple[list[dict[str, Any]], float]:
    """Plan a run without measuring, and return a row for each sweep.

    Returns:
        The rows, and the expected seconds of the whole plan. The seconds may be fewer than the sum
        over the rows, because the kernels of one sweep compile while another one is measured. The
        rows are dictionaries with these entries:

        - ``name``: the sweep's name;
        - ``cases``: the number of cases that the sweep has on the machine;
        - ``planned``: the number of those cases that fit the budget;
        - ``expected_s``: expected seconds to prepare the planned cases, check them and take six
          samples of each, or to compile their kernels if that takes longer;
        - ``checking_s``: the part of ``expected_s`` in which results are checked.

    Raises:
        UserError: if a named sweep is unknown, or if it cannot be used.
    """
    cases = {name: sweep_cases(sweep, machine) for name, sweep in choose_sweeps(names).items()}
    plan = make_plan(cases, machine, budget, cores=cores)
    rows: list[dict[str, Any]] = []
    for name, cases_of_sweep in cases.items():
        entries = [entry for entry in plan.planned if entry.case.sweep == name]
        rows.append(
            {
                "name": name,
                "cases": len(cases_of_sweep),
                "planned": len(entries),
                "expected_s": planned_seconds(entries),
                "checking_s": sum(entry.checking for entry in entries),
            }
        )
    return rows, planned_seconds(plan.planned)
