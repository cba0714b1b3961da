"""Recordings made from a law that is known, to see whether the analysis finds it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.recordings.load import Recording, load
from kernels.machine import Machine, known_machine
from kernels.operation import as_problem
from kernels.problem import Gemm, Problem
from kernels.timemodel.constants import Constants, default_constants
from kernels.timemodel.estimate import Shapes, Tiles, fastest
from sweeps.cases.case import Case
from sweeps.schema import SCHEMA
from sweeps.store import write_run, write_table
from sweeps.timing.sampler import PROTOCOL

H100 = known_machine("nvidia-h100-sxm")
Law = Callable[[Sequence[Problem]], np.ndarray]


def model_law(constants: Constants | None = None, machine: Machine = H100) -> Law:
    """The model's own formula with given constants: seconds of each problem."""

    def seconds(problems: Sequence[Problem]) -> np.ndarray:
        dtype = problems[0].dtype
        c = constants or default_constants(machine.generation, dtype)
        tiles = Tiles.library(machine, dtype)
        return fastest(Shapes.from_problems(problems), tiles, machine, machine.peak(dtype), c).time

    return seconds


RUN = "2026-01-02T03:04:05Z"


def record(
    folder: Path,
    cases: Sequence[Case],
    seconds: Iterable[float],
    half_width: float = 0.01,
    machine: Machine = H100,
    **run: Any,
) -> Path:
    """A folder as a run would leave it: each case measured with an interval of ± half_width."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "schema": SCHEMA, "run": run.get("run", RUN), "time_utc": "2026-01-02T03:05:00Z",
            "worker": "1/1", **case.columns(), "status": "ok", "time_us": float(s) * 1e6,
            "time_lo_us": float(s) * 1e6 * (1 - half_width),
            "time_hi_us": float(s) * 1e6 * (1 + half_width), "samples": 9,
            "converged": half_width <= 0.01,
            "tflops": case.problem.flops / float(s) / 1e12,
            "gbps": case.problem.bytes / float(s) / 1e9,
        }
        for case, s in zip(cases, seconds, strict=True)
    ]  # fmt: skip
    write_run(
        folder,
        {
            "schema": SCHEMA, "protocol": PROTOCOL, "published": False,
            "run": RUN, "machine": machine.to_json(),
            "software": {"torch": "2.13.0", "cuda": "13.0"},
            "plan": {"budget_s": 600.0, "shards": 1, "sweeps": [], "left_out": {}, "cases": []},
            **run,
        },
    )  # fmt: skip
    write_table(folder, rows)
    return folder


def measured_in_turn(*folders: Path) -> None:
    """Make these recordings one another's successors by their files' times.

    Written one right after another, they may have the same time: a file system's clock is coarse.
    """
    for moment, folder in enumerate(folders, 1):
        os.utime(folder / "run.json", (moment, moment))


def gemm_cases(sizes: Iterable[tuple[int, int, int]], sweep: str = "made-up") -> list[Case]:
    return [Case(sweep, Gemm(m, n, k, "bf16"), "cublas") for m, n, k in sizes]


def problems(cases: Iterable[Case]) -> list[Problem]:
    return [as_problem(case.problem) for case in cases]


def random_sizes(count: int, seed: int = 0) -> list[tuple[int, int, int]]:
    rng = np.random.default_rng(seed)
    drawn = (2 ** rng.uniform(4, 13.5, (count, 3))).astype(int)
    return [(int(m), int(n) // 8 * 8 + 8, int(k) // 8 * 8 + 8) for m, n, k in drawn]


def recorded(
    folder: Path, count: int = 200, noise: float = 0.02, law: Law | None = None, seed: int = 0
) -> Recording:
    """Random GEMMs under a law with noise."""
    cases = gemm_cases(dict.fromkeys(random_sizes(count, seed)))
    truth = (law or model_law())(problems(cases))
    rng = np.random.default_rng(seed)
    return load(record(folder, cases, truth * np.exp(noise * rng.standard_normal(len(truth)))))
