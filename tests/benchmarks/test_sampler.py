"""``make bench``: the sampler against the timers that people use today, in one run.

On a CPU against PyTorch's ``blocked_autorange``, from about 10 µs to 5 ms; on a GPU against
``triton.testing.do_bench``, 200 shapes. The timers take turns case by case, over several passes.
Printed: the bias of the sampler's medians and the scatter of both over the passes, with intervals
over the cases, and the time that each takes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.device import select_device, this_cpu
from kernels.operands import random_operands
from kernels.problem import Conv, Gemm, Problem
from kernels.registry import all_implementations, library_for
from kernels.timers import blocked_autorange, do_bench
from sweeps.cases.case import Case
from sweeps.measuring.bench import Ready
from sweeps.measuring.torch_bench import TorchBench
from sweeps.timing.clock import CpuClock
from sweeps.timing.sampler import Sampler, Subject
from sweeps.timing.statistics import CHECKPOINTS

pytestmark = pytest.mark.slow

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
PASSES = 16


@dataclass
class Timer:
    """What one of two timers found: by case the median of each pass, and the seconds it took."""

    medians: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    seconds: float = 0.0

    def scatter(self) -> NDArray[np.float64]:
        """The standard deviation of a case's log medians over the passes, of each case."""
        return np.array([np.std(np.log(values), ddof=1) for values in self.medians.values()])


def alternate(
    sampler: Sampler,
    subjects: Sequence[Subject],
    other: Callable[[Callable[[], object]], float],
    passes: int,
) -> tuple[Timer, Timer]:
    """Time every case by both timers, pass by pass, so that both meet the machine in each mood.

    A pass is shuffled rounds until the sampler has finished every case; in one of the first six
    each case is timed by the other timer too, before or after the sampler's sample.
    """
    mine, theirs = Timer(), Timer()
    rng = random.Random(0)

    def by_other(subject: Subject) -> None:
        begin = time.perf_counter()
        with subject.settings():
            theirs.medians[subject.key].append(other(lambda: subject.launch(0)))
        theirs.seconds += time.perf_counter() - begin

    def by_sampler(subject: Subject) -> None:
        begin = time.perf_counter()
        if not subject.launches:
            with subject.settings():
                sampler.set_batch(subject, sampler.estimate(subject.launch))
        sampler.sample(subject)
        mine.seconds += time.perf_counter() - begin

    for _ in range(passes):
        fresh = [replace(s, samples=[], launches=0, checker=None) for s in subjects]
        turn = {s.key: rng.randrange(CHECKPOINTS[0]) for s in fresh}
        number, open_ = 0, fresh
        while open_:
            for subject in rng.sample(open_, len(open_)):
                todo = [by_sampler]
                if turn[subject.key] == number:
                    todo.insert(rng.randrange(2), by_other)
                for take in todo:
                    take(subject)
            number += 1
            open_ = [s for s in fresh if not s.finished or turn[s.key] >= number]
        for subject in fresh:
            mine.medians[subject.key].append(statistics.median(subject.samples))
    return mine, theirs


def middle_with_interval(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """The median of values that belong to cases, and its 95 % interval by drawing cases again."""
    rng = np.random.default_rng(0)
    drawn = np.median(rng.choice(values, (2000, len(values))), axis=1)
    lo, hi = np.quantile(drawn, [0.025, 0.975])
    return float(np.median(values)), float(lo), float(hi)


def compare(
    benchmark: Any,
    capsys: Any,
    sampler: Sampler,
    subjects: Sequence[Subject],
    name: str,
    other: Callable[[Callable[[], object]], float],
) -> None:
    """Bias (the sampler's medians over the other's), scatter over the passes, and cost."""
    passes = 2 if benchmark.disabled else PASSES
    mine, theirs = benchmark.pedantic(alternate, (sampler, subjects, other, passes), rounds=1)
    ratios = {k: np.log(mine.medians[k]) - np.log(theirs.medians[k]) for k in mine.medians}
    bias = middle_with_interval(np.array([np.median(r) for r in ratios.values()]))
    scatter = middle_with_interval(np.log(mine.scatter() / theirs.scatter()))
    told = {
        "cases": len(subjects),
        "passes": passes,
        "bias": [float(np.expm1(x)) for x in bias],
        "scatter_over_other": [float(np.exp(x)) for x in scatter],
        "scatter": float(np.median(mine.scatter())),
        "other_scatter": float(np.median(theirs.scatter())),
        "time_over_other": mine.seconds / theirs.seconds,
        "seconds_per_case": mine.seconds / passes / len(subjects),
        "other_seconds_per_case": theirs.seconds / passes / len(subjects),
    }
    benchmark.extra_info.update({"other": name, **told})
    with capsys.disabled():
        print(
            f"\n  {len(subjects)} cases, {passes} passes: the sampler reads {told['bias'][0]:+.2%} "
            f"[{told['bias'][1]:+.2%}, {told['bias'][2]:+.2%}] of {name}; medians scatter by "
            f"{told['scatter']:.2%} against {told['other_scatter']:.2%} "
            f"({told['scatter_over_other'][0]:.2f} [{told['scatter_over_other'][1]:.2f}, "
            f"{told['scatter_over_other'][2]:.2f}]); {told['time_over_other']:.2f} of the time"
        )


def test_against_blocked_autorange(benchmark: Any, capsys: Any) -> None:
    """Warm and in bursts, as ``blocked_autorange`` measures."""
    machine = this_cpu().machine
    sampler = Sampler(CpuClock())
    found = []
    for problem in CPU_PROBLEMS[:: 16 if benchmark.disabled else 1]:
        if problem.dtype not in machine.peaks:
            continue
        implementation = all_implementations()[library_for(problem, machine)]
        launch = implementation.prepare(problem, [random_operands(problem, "cpu")])
        launch(0)
        # Run once as a test, it takes a few: how fast they are today is not what is tested.
        if benchmark.disabled or SHORTEST <= sampler.estimate(launch.bare) <= LONGEST:
            found.append(Subject(problem.spec(), launch.bare, cache="warm"))
    compare(benchmark, capsys, sampler, found, "blocked_autorange", blocked_autorange)


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
    compare(benchmark, capsys, bench.sampler, found, "do_bench", do_bench)
