"""``make bench``: the sampler against the timers that people use today, in one run.

On a CPU against PyTorch's ``blocked_autorange``, from about 10 µs to 5 ms; on a GPU against
``triton.testing.do_bench``, 200 shapes. Two passes of each. Printed: seconds per case, and
repeatability (the median over the cases of the difference between the passes).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest

from kernels.device import select_device, this_cpu
from kernels.operands import random_operands
from kernels.problem import Conv, Gemm, Problem
from kernels.registry import all_implementations, library_for
from kernels.timers import blocked_autorange, do_bench
from sweeps.cases.case import Case
from sweeps.health.clockcheck import Pass, in_rounds, one_by_one
from sweeps.running.bench import TorchBench
from sweeps.running.rounds import Ready
from sweeps.timing.clock import CpuClock
from sweeps.timing.sampler import Sampler, Subject

SIZES = (48, 64, 80, 96, 112, 128, 144, 160, 192, 208, 224, 256, 288, 320, 352, 384, 448, 512, 640)
CPU_PROBLEMS: list[Problem] = [
    *(Gemm(size, size, size, dtype) for size in SIZES for dtype in ("fp32", "bf16")),
    *(Gemm(1, n, n, "fp32") for n in (256, 512, 1024)),
    *(
        Conv.parse(f"{n},{c},14,14,{c},3,3,1,1,1,1,fp32")
        for n, c in ((2, 32), (2, 64), (4, 64), (4, 128))
    ),
]
SHORTEST, LONGEST = 8e-6, 6e-3


def compare(
    benchmark: Any, capsys: Any, cases: int, ours: Callable[[], Pass], other: str,
    theirs: Callable[[], Pass],
) -> None:  # fmt: skip
    """Two passes of each in turn; print and record seconds per case and repeatability."""

    def passes() -> dict[str, tuple[float, float]]:
        runs: dict[str, list[Pass]] = {"sampler": [], other: []}
        for _ in range(2):
            runs["sampler"].append(ours())
            runs[other].append(theirs())
        return {
            name: (
                (first[1] + second[1]) / 2 / cases,
                statistics.median(abs(second[0][key] / first[0][key] - 1) for key in first[0]),
            )
            for name, (first, second) in runs.items()
        }

    outcome = benchmark.pedantic(passes, rounds=1)
    benchmark.extra_info.update(
        cases=cases,
        **{
            name: {"seconds_a_case": seconds, "passes_differ": scatter}
            for name, (seconds, scatter) in outcome.items()
        },
    )
    (mine, scatter), (yours, your_scatter) = outcome["sampler"], outcome[other]
    with capsys.disabled():
        print(
            f"\n  {cases} cases: sampler {mine * 1e3:.1f} ms a case, passes differ by "
            f"{scatter:.2%}; {other} {yours * 1e3:.1f} ms, {your_scatter:.2%}; "
            f"{mine / yours:.2f} of the time"
        )


def test_against_blocked_autorange(benchmark: Any, capsys: Any) -> None:
    """Warm and in bursts, as ``blocked_autorange`` measures."""
    machine = this_cpu().machine
    sampler = Sampler(CpuClock())
    found = []
    for problem in CPU_PROBLEMS[:: 8 if benchmark.disabled else 1]:
        if problem.dtype not in machine.peaks:
            continue
        implementation = all_implementations()[library_for(problem, machine)]
        launch = implementation.prepare(problem, [random_operands(problem, "cpu")])
        launch(0)
        # Run once as a test, it takes them all: how fast they are today is not what is tested.
        if benchmark.disabled or SHORTEST <= sampler.estimate(launch.bare) <= LONGEST:
            found.append(Subject(problem.spec(), launch.bare, cache="warm"))
    compare(
        benchmark, capsys, len(found), lambda: in_rounds(sampler, found), "blocked_autorange",
        lambda: one_by_one(blocked_autorange, found),
    )  # fmt: skip


@pytest.mark.gpu
def test_against_do_bench(benchmark: Any, capsys: Any) -> None:
    """Cold and in bursts: ``do_bench`` clears the L2 cache before each launch, too."""
    device = select_device("gpu")
    rng = random.Random(0)
    cases: list[Case] = []
    for _ in range(200):
        m, n, k = (rng.choice((16, 64, 128, 256, 384, 512, 1024, 2048, 4096)) for _ in "mnk")
        problem = Gemm(m, n, k, "fp16")
        cases.append(Case(f"bench {len(cases)}", problem, "cublas"))
    bench = TorchBench(device.machine, "gpu", device.gpu, cases)
    results = bench.prepare(cases, {}, lambda case, seconds: None)
    found = [result.subject for result in results if isinstance(result, Ready)]
    assert len(found) == 200
    compare(
        benchmark, capsys, len(found), lambda: in_rounds(bench.sampler, found),
        "do_bench", lambda: one_by_one(do_bench, found),
    )  # fmt: skip
