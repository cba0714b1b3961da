"""Fleets whose slow GPUs are known: are they found, and is any other one accused?

    python -m tests.studies.fleets [--fleets 1000] [--write FILE]

Fleets of GPUs are made up, each timing the anchors of ``sweeps/specs/anchors.toml``: samples whose
medians are off by 0.5 % in all, 0.3 % of which all anchors of a GPU share in a phase, 0.3 % are an
anchor's own in a process, and the rest is what few samples are off by. A GPU's sustained speed
follows its clock, its bursts by a third. Then the verdicts are compared with the truth: how often
the GPU that is 9 % slow at its full clock and the one that throttles are named, how often one is
called slow that is within the margin, and how many 95 % intervals hold the true speed. The last
lines are of a fleet of 1,000 GPUs on the machine that they name.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from analysis.fleet.anchors import (
    KINDS,
    Fleet,
    FleetDevice,
    kind_of,
    standard_error,
)
from analysis.fleet.device_verdict import SLOW, DeviceVerdict, judge
from analysis.fleet.speeds import FleetSpeeds, fleet_speeds
from kernels.machine import cpu_machine, known_machine
from kernels.operation import Layer
from kernels.problem import Gemm
from sweeps.cases.case import Case
from sweeps.schema import PHASES, SCHEMA
from sweeps.store import write_anchors, write_run
from sweeps.timing.sampler import PROTOCOL
from sweeps.timing.statistics import interval_rank

MACHINE = known_machine("nvidia-h100-sxm")
RUN = "2026-01-02T03:04:05Z"
MARGIN = 0.05
_BF16 = ((256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048),
         (4096, 4096, 4096), (8192, 8192, 8192), (1, 14336, 4096), (16, 14336, 4096),
         (64, 14336, 4096))  # fmt: skip
BURSTS = [
    *(Case("anchors", Gemm(*size, "bf16"), "cublas") for size in _BF16),
    *(Case("anchors", Gemm(*size, dtype), "cublas")
      for size in ((4096, 4096, 4096), (4096, 14336, 4096)) for dtype in ("fp16", "tf32")),
    *(Case("anchors", Gemm(size, size, size, "fp32"), "cublas") for size in (2048, 4096)),
    *(Case("anchors", Gemm(size, size, size, "bf16"), "cublas", cache="warm")
      for size in (1024, 2048)),
]  # fmt: skip
LAST = [
    Case("anchors", Gemm(8192, 8192, 8192, "bf16"), "cublas", mode="sustained"),
    Case("anchors-memory", Layer("relu", 65536, 4096, 1, 1, "fp16"), "torch"),
]
CASES = [*BURSTS, *LAST]
SAMPLES = [8] * len(BURSTS) + [17, 6]
BAD, HOT, DIM = 3, 20, 41
"""Which GPU is slow in compute at its full clock, which throttles, and whose memory is slow."""

_PHASE, _PROCESS, _SAMPLE = 0.003, 0.003, 0.006  # a median of eight of these is off by 0.27 %


@dataclass(frozen=True)
class Setting:
    """What fleets are like; shares of speed as standard deviations or losses."""

    nodes: int = 8
    per_node: int = 8
    spread: float = 0.01
    bad: float = 0.0
    hot: float = 0.0
    dim: float = 0.0
    nvml: bool = True
    samples_apart: bool = True  # whether intervals are known
    crowded: float = 0.0  # by which launches take longer while all GPUs of node 1 work

    @property
    def gpus(self) -> int:
        """Of a fleet."""
        return self.nodes * self.per_node


PLAIN = Setting()
MAIN = replace(PLAIN, bad=0.09, hot=0.12)
SETTINGS = {
    "64 GPUs that differ by 1 %, one 9 % slow, one throttled": MAIN,
    "the same without NVML": replace(MAIN, nvml=False),
    "the same without intervals": replace(MAIN, samples_apart=False),
    "64 GPUs that differ by 1 %, all of them sound": PLAIN,
    "64 GPUs that differ by 3 %": replace(PLAIN, spread=0.03),
    "64 GPUs that differ by 1 %, the memory of one 9 % slow": replace(PLAIN, dim=0.09),
    "4 GPUs of one node, one 9 % slow": replace(MAIN, nodes=1, per_node=4, hot=0.0),
    "8 GPUs of one node, one 9 % slow": replace(MAIN, nodes=1, hot=0.0),
    "16 nodes of one GPU, one 9 % slow": Setting(16, 1, bad=0.09),
    "8 nodes, launches 5 % longer on one while all its GPUs work": replace(PLAIN, crowded=0.05),
}


@dataclass(frozen=True)
class Truth:
    """The logarithm of each GPU's speed in each kind of anchor, relative to the fleet's median."""

    log: dict[str, np.ndarray]

    def within(self, margin: float) -> np.ndarray:
        """Which GPUs are within the margin in every kind."""
        worst = np.min(list(self.log.values()), axis=0)
        return worst >= math.log1p(-margin)


def kinds() -> np.ndarray:
    """Of the anchors, in their order."""
    return np.array([kind_of(case, MACHINE) for case in CASES])


def simulate(setting: Setting, seed: int) -> tuple[Fleet, Truth]:
    """A fleet's anchors as they would be read, and the truth."""
    draw = np.random.default_rng(seed)
    count, anchors = setting.gpus, len(CASES)
    clock = setting.spread * draw.standard_normal(count)
    temperature = 60 + 3 * draw.standard_normal(count)
    power = 690 + 5 * draw.standard_normal(count)
    truth = {
        "sustained": clock.copy(), "burst": clock / 3,
        "memory": 0.003 * draw.standard_normal(count),
        "small": 0.005 * draw.standard_normal(count),
    }  # fmt: skip
    seen = np.zeros((len(PHASES), count, anchors), dtype=bool)
    for kind in ("sustained", "burst"):
        truth[kind][BAD % count] = math.log1p(-setting.bad) if setting.bad else truth[kind][
            BAD % count]  # fmt: skip
    if setting.bad:
        clock[BAD % count] = 0.0
    if setting.hot:
        truth["sustained"][HOT] = clock[HOT] = math.log1p(-setting.hot)
        temperature[HOT] += 20
        power[HOT] -= 80
        seen[:, HOT, len(BURSTS) :] = True
    if setting.dim:
        truth["memory"][DIM] = math.log1p(-setting.dim)
    of = kinds()
    roofs = [max(c.problem.flops / MACHINE.peaks[c.problem.dtype],
                 c.problem.bytes / MACHINE.bandwidth) for c in CASES]  # fmt: skip
    base = np.log(1e6 * (1.4 * np.array(roofs) + 4e-6))
    speed = np.stack([truth[kind] for kind in of], axis=1)
    middles = base - speed + _PHASE * draw.standard_normal((len(PHASES), count, 1))
    middles = middles + _PROCESS * draw.standard_normal(middles.shape)
    if setting.crowded:
        crowded = np.arange(count) // setting.per_node == 1
        middles[1] += setting.crowded * crowded[:, None] * (of == "small")
    log, error = np.full(middles.shape, np.nan), np.full(middles.shape, np.nan)
    for a, taken in enumerate(SAMPLES):
        noise = np.sort(_SAMPLE * draw.standard_normal((len(PHASES), count, taken)), axis=2)
        log[:, :, a] = middles[:, :, a] + np.median(noise, axis=2)
        rank = interval_rank(taken)
        error[:, :, a] = standard_error(noise[:, :, rank - 1], noise[:, :, -rank])
    if setting.per_node > 1:
        log[0, :, len(BURSTS) :] = np.nan
    else:  # there is nobody to work together with
        log[1] = np.nan
    if not setting.samples_apart:
        error[:] = np.nan
    sensors = {
        "sm_mhz": 15 * np.round(np.where(of == "sustained", 1500 * np.exp(clock)[:, None],
                                         1980 * np.exp(clock / 3)[:, None]) / 15),
        "power_w": np.where(of == "sustained", power[:, None], np.nan),
        "temp_c": np.round(np.repeat(temperature[:, None], anchors, axis=1)),
    }  # fmt: skip
    missing = np.nan if not setting.nvml else 1.0
    fleet = Fleet(
        devices=tuple(
            FleetDevice(i, f"{seed % 16**4:04x}{i:04x}", i // setting.per_node, f"{i + 1}/{count}",
                   700.0 if setting.nvml else math.nan, 1980.0 if setting.nvml else math.nan)
            for i in range(count)
        ),
        kinds=of, log_time=log, error=np.where(np.isnan(log), np.nan, error),
        sensors={name: missing * values + 0 * log for name, values in sensors.items()},
        throttled={"hw_thermal_slowdown": seen & setting.nvml},
    )  # fmt: skip
    return fleet, Truth({kind: log - np.median(log) for kind, log in truth.items()})


def record_fleet(folder: Path, fleet: Fleet, **run: Any) -> Path:
    """A recording with a fleet's anchors.csv, as a run would leave it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_run(folder, {
        "schema": SCHEMA, "protocol": PROTOCOL, "published": False, "run": RUN,
        "machine": MACHINE.to_json(), "software": {"torch": "2.13.0", "cuda": "13.0"},
        "plan": {"cases": []},
        "gpus": [
            {"gpu": d.gpu, **({"id": d.id} if d.id else {}), "node": d.node,
             "power_limit_w": None if math.isnan(d.power_limit_w) else d.power_limit_w,
             "sm_limit_mhz": None if math.isnan(d.sm_limit_mhz) else d.sm_limit_mhz}
            for d in fleet.devices
        ],
        **run,
    })  # fmt: skip
    write_anchors(folder, list(rows_of(fleet)))
    return folder


def rows_of(fleet: Fleet) -> Iterator[dict[str, Any]]:
    """A fleet as rows of anchors.csv."""
    for p, i, a in zip(*np.nonzero(np.isfinite(fleet.log_time)), strict=True):
        middle, error = float(fleet.log_time[p, i, a]), float(fleet.error[p, i, a])
        device = fleet.devices[i]
        half = 1.959964 * error
        row = {
            "run": RUN, "worker": device.worker, "gpu": device.gpu, "gpu_id": device.id,
            "node": device.node, "phase": PHASES[p], "time_utc": f"2026-01-02T03:05:{p:02}Z",
            **CASES[a].columns(), "samples": SAMPLES[a], "time_us": math.exp(middle),
            "throttled": ";".join(name for name, seen in fleet.throttled.items() if seen[p, i, a]),
        }  # fmt: skip
        if not math.isnan(error):
            row["time_lo_us"], row["time_hi_us"] = math.exp(middle - half), math.exp(middle + half)
        for name, values in fleet.sensors.items():
            value = float(values[p, i, a])
            row[name] = None if math.isnan(value) else value
        yield row


@dataclass
class Found:
    """Of how many fleets what was found."""

    fleets: int = 0
    bad: int = 0
    hot: int = 0
    dim: int = 0
    accused: int = 0  # fleets in which a GPU within the margin is called slow
    slow: int = 0  # GPUs that are beyond the margin
    named: int = 0  # and of those, how many are called slow
    ordinary: int = 0  # and of those, how many are said to be ordinary for the spread
    crowded: int = 0
    falsely_crowded: int = 0  # nodes
    spread: float = 0.0
    held: dict[str, int] | None = None
    count: int = 0  # intervals of each kind


def look(setting: Setting, fleets: int, seed: int = 0) -> Found:
    """Judge so many fleets."""
    found = Found(held=dict.fromkeys(KINDS, 0))
    assert found.held is not None
    for number in range(fleets):
        fleet, truth = simulate(setting, seed + number)
        speeds = fleet_speeds(fleet)
        verdicts = judge(fleet, speeds, MARGIN)
        _count(found, setting, truth, speeds, verdicts)
    return found


def _count(
    found: Found, setting: Setting, truth: Truth, speeds: FleetSpeeds, verdicts: list[DeviceVerdict]
) -> None:
    assert found.held is not None
    called = np.array([verdict.verdict == SLOW for verdict in verdicts])
    within = truth.within(MARGIN)
    found.fleets += 1
    found.bad += bool(setting.bad) and _unexplained(verdicts[BAD % len(verdicts)], "sustained")
    found.hot += bool(setting.hot) and _throttling(verdicts[HOT])
    found.dim += bool(setting.dim) and verdicts[DIM].slow == ("memory",)
    found.accused += bool((called & within).any())
    found.slow += int((~within).sum())
    found.named += int((called & ~within).sum())
    found.ordinary += sum(bool(v.in_spread) for v in np.array(verdicts)[called & ~within])
    for node in speeds.interference:
        slowed = any(change.slowed for change in node.kinds.values())
        found.crowded += bool(setting.crowded) and node.node == 1 and slowed
        found.falsely_crowded += slowed and not (setting.crowded and node.node == 1)
    found.spread += 0.0 if math.isnan(speeds.spread) else speeds.spread
    for kind, of in speeds.kinds.items():
        held = np.abs(of.log - truth.log[kind]) <= of.half
        found.held[kind] += int(held.sum())
    found.count += setting.gpus


def _unexplained(verdict: DeviceVerdict, kind: str) -> bool:
    return verdict.verdict == SLOW and kind in verdict.slow and not verdict.explained


def _throttling(verdict: DeviceVerdict) -> bool:
    """Named as one that throttled, and as slow for that reason."""
    return "hw_thermal_slowdown" in verdict.throttled and (
        verdict.explained.startswith("clock: hw_thermal_slowdown"))  # fmt: skip


def said(name: str, setting: Setting, found: Found) -> str:
    """What was found, in a few lines."""
    of = found.fleets
    lines = [name]
    for words, loss, count in (
        ("slow and unexplained", setting.bad, found.bad),
        ("throttled, which explains it", setting.hot if setting.nvml else 0, found.hot),
        ("slow in memory alone", setting.dim, found.dim),
        ("its node said to slow launches", setting.crowded, found.crowded),
    ):  # fmt: skip
        lines += [f"  {words:32} in {count} of {of} fleets"] if loss else []
    lines.append(f"  {'a GPU within 5 % called slow':32} in {found.accused} of {of} fleets")
    if found.slow:
        lines.append(
            f"  {'GPUs beyond 5 % called slow':32} {found.named} of {found.slow}, "
            f"{found.ordinary} of them as ordinary for the spread"
        )
    lines.append(f"  {'nodes falsely said to be slowed':32} {found.falsely_crowded} of "
                 f"{of * setting.nodes}")  # fmt: skip
    if found.spread:
        lines.append(f"  {'spread between GPUs':32} {found.spread / of:.2%} in the mean")
    assert found.held is not None
    held = ", ".join(f"{kind} {count / found.count:.1%}" for kind, count in found.held.items())
    lines.append(f"  {'intervals that hold the speed':32} {held}")
    return "\n".join(lines)


def timed(nodes: int = 125) -> str:
    """How large anchors.csv is, and how long it takes to report on it."""
    from analysis.commands.fleet import report_on

    fleet, _ = simulate(replace(MAIN, nodes=nodes), 0)
    with tempfile.TemporaryDirectory() as name:
        folder = record_fleet(Path(name) / MACHINE.slug, fleet)
        path = folder / "anchors.csv"
        began = time.perf_counter()
        report_on(folder, MARGIN)
        seconds = time.perf_counter() - began
        size, rows = path.stat().st_size, len(path.read_text(encoding="utf-8").splitlines()) - 1
    machine = cpu_machine({}, 0.0, os.cpu_count() or 1).name
    return (
        f"{len(fleet.devices):,} GPUs: {rows:,} rows, {size / 1e6:.1f} MB; read, judged, drawn and "
        f"written in {seconds:.1f} s ({machine}, {os.cpu_count()} threads)"
    )


def main(
    fleets: Annotated[int, typer.Option()] = 1000,
    write: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Print what was found."""
    text = f"seeds 0 to {fleets - 1} of each kind of fleet, NumPy {np.__version__}\n"
    for name, setting in SETTINGS.items():
        text += said(name, setting, look(setting, fleets)) + "\n"
    text += timed() + "\n"
    print(text, end="")
    if write is not None:
        write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
