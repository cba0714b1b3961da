"""Names of a recording's cases, by which they are matched with another version's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from analysis.recordings.case_times import CaseTimes, TimedProcess
from analysis.recordings.load import Recording, workloads_of
from analysis.recordings.repetition import case_ids, steady_samples
from kernels.config import HAND_WRITTEN
from sweeps.schema import IDENTITY, problem_of
from sweeps.timing.statistics import CHECKPOINTS

_TIMES = ("time_us", "time_lo_us", "time_hi_us")
_USUAL = {"mode": "burst", "cache": "cold", "fill": "normal"}


def timed_process(recording: Recording) -> TimedProcess:
    """Return the cases of a recording by name.

    Samples are corrected for the machine's speed in each round.
    """
    samples = steady_samples(recording)
    ok, failed = keyed(recording.ok), keyed(recording.rows[recording.rows["status"] != "ok"])
    times = {}
    for row, name, case in zip(ok.to_dict("records"), case_names(ok), case_ids(ok), strict=True):
        problem = problem_of(row)
        if len(logs := samples.get(case, [])) >= CHECKPOINTS[0]:
            times[name] = CaseTimes.from_samples(np.exp(logs).tolist(), problem)
        else:
            time, lo, hi = (seconds_of(row[column]) for column in _TIMES)
            times[name] = CaseTimes.from_interval(time, lo, hi, sample_count(row), problem)
    reasons = failed["status"] + ": " + failed["message"].fillna("")
    lost = dict(zip(case_names(failed), reasons, strict=True))
    facts = {"machine": recording.machine.name, "run": str(recording.run["run"])}
    return TimedProcess(str(recording.folder), times, lost, facts)


def keyed(rows: pd.DataFrame) -> pd.DataFrame:
    """Prepare rows for matching: fill empty identities, and add the column ``choice``.

    ``choice`` is the config. It is empty if a hand-written kernel has only one config for a
    problem, because this is the kernel's own choice, which may differ between versions.
    """
    key_columns = [name for name in IDENTITY if name != "config"]
    filled = rows[list(IDENTITY)].astype(object)
    rows = rows.assign(**{k: filled[k].where(filled[k].notna(), "") for k in IDENTITY})
    single = ~rows.duplicated(key_columns, keep=False) & rows["implementation"].isin(
        list(HAND_WRITTEN)
    )
    return rows.assign(choice=rows["config"].where(~single, ""))


def case_names(rows: pd.DataFrame) -> list[str]:
    """Return the name of each row's case: its problem, implementation, config and circumstances."""
    columns = ("implementation", "choice", "mode", "cache", "fill", "sweep")
    return [
        " ".join(
            [
                str(problem),
                *(str(row[name]) for name in columns if row[name] not in ("", _USUAL.get(name))),
            ]
        )
        for problem, row in zip(workloads_of(rows), rows.to_dict("records"), strict=True)
    ]


def seconds_of(microseconds: Any) -> float:
    """Return seconds from a cell in microseconds; NaN for a missing one."""
    return math.nan if pd.isna(microseconds) else float(microseconds) * 1e-6


def sample_count(row: Mapping[Any, Any]) -> int:
    """Return the number of samples of a row; 1 where it is not recorded."""
    count = row.get("samples")
    return 1 if count is None or pd.isna(count) else int(count)
