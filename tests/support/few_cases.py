"""Commands with few cases of each sweep: ``python tests/support/few_cases.py -m sweeps run …``.

What they do with them is real. ``FEW_CASES`` is how many cases each sweep has of each
implementation and mode.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from sweeps.doctor import clock_check as clockcheck  # noqa: E402
from sweeps.planning import choice  # noqa: E402
from sweeps.running import opening  # noqa: E402

CASES = int(os.environ.get("FEW_CASES", "4"))
_all_cases = choice.sweep_cases


def few_cases(sweep: Any, machine: Any, dtypes: Any = ()) -> list[Any]:
    """Some of a sweep's cases, the same ones each time."""
    cases = _all_cases(sweep, machine, dtypes)
    few: list[Any] = []
    for kind in dict.fromkeys((case.implementation, case.mode) for case in cases):
        own = [case for case in cases if (case.implementation, case.mode) == kind]
        few += random.Random(1).sample(own, min(CASES, len(own)))
    return few


def install(file: str) -> None:
    """Let this process plan few cases, and the commands that a recording starts too.

    ``file`` is the script that runs them.
    """
    import analysis.commands.record

    vars(opening)["sweep_cases"] = few_cases
    vars(clockcheck)["sweep_cases"] = few_cases
    vars(analysis.commands.record)["INTERPRETER"] = [sys.executable, file]


def run_module() -> None:
    """What ``-m`` names, with the arguments after it."""
    flag, target, *arguments = sys.argv[1:]
    assert flag == "-m", f"python {sys.argv[0]} -m package …"
    sys.argv = [target, *arguments]
    # Not altering sys.modules: the processes that a run starts begin with this very file.
    runpy.run_module(target, run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    install(__file__)
    run_module()
