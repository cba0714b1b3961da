"""Name the cases of a recording, so that they can be matched with those of another recording."""

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

_USUAL = {"mode": "burst", "cache": "cold", "fill": "normal"}
"""Usual values of settings; the name of a case leaves out a setting that has its usual value."""


def timed_process(recording: Recording) -> TimedProcess:
    """Return a recording's cases by name, as if one process had timed all of them.

    A case with at least six recorded samples is summarised from these samples, after they are
    corrected for the machine's slowness in each round. Any other case keeps its recorded median and
    interval.

    Raises:
        UserError: if a rounds.csv cannot be read or is too damaged to use.
    """
    # 1. Summarise each case that has times.
    samples = steady_samples(recording)
    rows = keyed(recording.rows)
    ok = rows[rows["status"] == "ok"]
    times = {}
    for row, name, case in zip(ok.to_dict("records"), case_names(ok), case_ids(ok), strict=True):
        problem = problem_of(row)
        log_samples = samples.get(case, [])
        if len(log_samples) >= CHECKPOINTS[0]:
            times[name] = CaseTimes.from_samples(np.exp(log_samples).tolist(), problem)
        else:
            seconds = seconds_of(row["time_us"])
            lo = seconds_of(row["time_lo_us"])
            hi = seconds_of(row["time_hi_us"])
            times[name] = CaseTimes.from_interval(seconds, lo, hi, sample_count(row), problem)
    # 2. Say why each other case has no time.
    failed = _failed(rows)
    lost = dict(zip(case_names(failed), _reasons(failed), strict=True))
    facts = {"machine": recording.machine.name, "run": str(recording.run["run"])}
    return TimedProcess(str(recording.folder), times, lost, facts)


def lost_by_problem(recording: Recording) -> dict[str, str]:
    """Return the reason why each failed case has no time, by the case's problem as text.

    If several cases of a problem failed, the reason of the last one is returned.
    """
    failed = _failed(recording.rows)
    problems = [str(workload) for workload in workloads_of(failed)]
    return dict(zip(problems, _reasons(failed), strict=True))


def _failed(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["status"] != "ok"]


def _reasons(failed: pd.DataFrame) -> list[str]:
    return (failed["status"] + ": " + failed["message"].fillna("")).tolist()


def keyed(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with an added column ``choice``.

    Missing values in the columns that identify a case (:data:`IDENTITY`) are replaced by "".

    ``choice`` is the config, unless the kernel is hand-written and only one of its configs was
    recorded for the row's sweep, problem and settings. Such a kernel is assumed to have chosen the
    config itself, so its ``choice`` is empty. The case then still matches if another version of the
    kernel chooses a different config.

    ``rows`` must include failed cases, because the config of a failed case counts as recorded, too.
    """
    key_columns = [name for name in IDENTITY if name != "config"]
    identity = rows[list(IDENTITY)].astype(object)
    rows = rows.assign(
        **{name: identity[name].where(identity[name].notna(), "") for name in IDENTITY}
    )
    has_one_config = ~rows.duplicated(key_columns, keep=False)
    is_hand_written = rows["implementation"].isin(list(HAND_WRITTEN))
    return rows.assign(choice=rows["config"].where(~(has_one_config & is_hand_written), ""))


def case_names(rows: pd.DataFrame) -> list[str]:
    """Return the name of each row's case; no other case of the recording has the same name.

    ``rows`` are all or some of the rows that :func:`keyed` returned.
    """
    columns = ("implementation", "choice", "mode", "cache", "fill", "sweep")
    names = []
    for problem, row in zip(workloads_of(rows), rows.to_dict("records"), strict=True):
        words = [str(problem)]
        for column in columns:
            is_usual = row[column] == _USUAL.get(column)
            if not is_usual and row[column] != "":
                words.append(str(row[column]))
        names.append(" ".join(words))
    return names


def seconds_of(microseconds: Any) -> float:
    """Convert a time in microseconds to seconds; a missing time becomes NaN."""
    return math.nan if pd.isna(microseconds) else float(microseconds) * 1e-6


def sample_count(row: Mapping[Any, Any]) -> int:
    """Return the number of samples of a row, or 1 if the number was not recorded."""
    count = row.get("samples")
    return 1 if count is None or pd.isna(count) else int(count)
