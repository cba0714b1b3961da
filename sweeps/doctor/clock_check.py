"""Compare the sampler with standard timers, to see whether the sampler's times can be trusted.

The standard timer is Triton's ``do_bench`` on a GPU and PyTorch's ``blocked_autorange`` on a CPU.
Each pass over the cases runs in its own process, because only times from several processes show how
repeatable a timer is. The effect of a profiler is measured in another process, because a profiler
slows the later launches of the process that loads it.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import torch

from kernels.common.counts import counted
from kernels.device import Device, make_current, select_device, software
from kernels.machine import Machine
from kernels.operands import TORCH_DTYPES
from kernels.problem import Conv, Gemm, Problem
from kernels.registry import library_for
from kernels.timers import blocked_autorange, do_bench, graph_replays
from sweeps.cases.case import Case
from sweeps.measuring.torch_bench import open_bench
from sweeps.planning.choice import choose_sweeps, sweep_cases
from sweeps.process import die_with_parent
from sweeps.schema import SCHEMA
from sweeps.timing.profiler_trace import cpu_tracer, trace_gpu
from sweeps.timing.sampler import PROTOCOL, Sampler, Subject

Pass = tuple[dict[str, float], float]
"""Median seconds per launch, by case id, and the seconds that the whole pass took."""

_GPU_SIZES = (16, 64, 128, 256, 384, 512, 1024, 2048, 4096)
_CPU_SIZES = (64, 96, 128, 160, 192, 256, 320, 384, 512)
# Sizes n, c, h, w and kout, then a 3×3 filter with stride, padding, dilation and groups of 1.
_CPU_CONVS = ("2,32,14,14,32,3,3,1,1,1,1", "4,64,14,14,64,3,3,1,1,1,1")
_PASSES = 2
_MAX_WEIGHTS = 32  # largest number of weight matrices that a CUDA graph rotates through
_PROFILER_CASES = 8  # cases that are timed before and after a profiler is loaded


def clock_cases(machine: Machine, count: int) -> list[Case]:
    """Return at most ``count`` cases, each of which a standard timer can time within seconds.

    On a GPU, the cases have a cold cache, because ``do_bench`` clears the cache. Calls with the
    same arguments choose the same cases.
    """
    rng = random.Random(0)
    if machine.kind == "gpu":
        # Twice as many problems are drawn as are needed, because equal ones are dropped below.
        problems: list[Problem] = [
            Gemm(rng.choice(_GPU_SIZES), rng.choice(_GPU_SIZES), rng.choice(_GPU_SIZES), "fp16")
            for _ in range(2 * count)
        ]
        cache = "cold"
    else:
        problems = [Gemm(size, size, size, "fp32") for size in _CPU_SIZES]
        problems += [Conv.parse(f"{sizes},fp32") for sizes in _CPU_CONVS]
        cache = "warm"
    cases = [
        Case("clock", problem, library_for(problem, machine), cache=cache) for problem in problems
    ]
    return list(dict.fromkeys(cases))[:count]


def check_clock(device: Device, count: int, note: Callable[[str], None]) -> dict[str, Any]:
    """Run all comparisons, and return the content of ``clock.json`` (see results/README.md).

    At most ``count`` cases are timed with a standard timer, and at most ``count`` GEMMs with CUDA
    graphs. ``note`` is called before each part of the work, with a text that tells the user what is
    timed.
    """
    machine, gpu = device.machine, device.gpu
    passes = []
    # A CPU has few cases, however many are requested.
    cases_in_words = counted(len(clock_cases(machine, count)), "case")
    for number in range(1, _PASSES + 1):
        note(
            f"Timing {cases_in_words} with the sampler and a standard timer, pass {number} of "
            f"{_PASSES} …"
        )
        passes.append(_in_process(_one_pass, machine, gpu, count))
    note("Timing launches before and after loading a profiler …")
    profiler = _in_process(_around_a_profiler, machine, gpu, _PROFILER_CASES)
    graphs: list[dict[str, Any]] = []
    if gpu is not None:
        note("Timing GEMMs by replaying CUDA graphs, as in the public tables …")
        graphs = _in_process(_time_graph_replays, machine, gpu, count)
    return {
        "schema": SCHEMA,
        "protocol": PROTOCOL,
        "machine": machine.to_json(),
        "software": software(device),
        "timers": summarise(passes),
        "passes": passes,
        "profiler": profiler,
        "graph_replays": graphs,
    }


def summarise(passes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return a summary of each timer's two passes.

    A timer is left out if no case was timed by that timer in both passes and by the sampler in the
    first pass.

    Returns:
        For each timer, a mapping with these entries:

        - ``seconds_per_case``: mean seconds of a pass, divided by the number of cases that the
          timer timed in the first pass;
        - ``passes_differ``: median relative difference between a case's times in the two passes;
        - ``over_sampler``: median ratio of the timer's time to the sampler's time, both in the
          first pass.
    """
    summaries = {}
    first, second = passes[0]["timers"], passes[1]["timers"]
    for name in first:
        first_us, second_us = first[name]["medians_us"], second[name]["medians_us"]
        sampler_us = first["sampler"]["medians_us"]
        # A case that failed, or whose samples all showed launch gaps, is missing in some passes.
        common = sorted(first_us.keys() & second_us.keys() & sampler_us.keys())
        if not common:
            continue
        seconds = (first[name]["seconds"] + second[name]["seconds"]) / 2
        summaries[name] = {
            "seconds_per_case": seconds / len(first_us),
            "passes_differ": statistics.median(
                abs(second_us[key] / first_us[key] - 1) for key in common
            ),
            "over_sampler": statistics.median(first_us[key] / sampler_us[key] for key in common),
        }
    return summaries


def in_rounds(sampler: Sampler, subjects: Sequence[Subject]) -> Pass:
    """Time subjects with the sampler, in shuffled rounds, until every subject is finished.

    The samples are added to copies of the subjects. A subject whose samples all show launch gaps is
    left out of the result.
    """
    begin = time.perf_counter()
    # 1. Copy the subjects without their earlier samples and without a checker.
    fresh_subjects = [replace(subject, samples=[], exposed=0, checker=None) for subject in subjects]
    # 2. Estimate the time of a launch of each subject, to choose the number of launches in a batch.
    for subject in fresh_subjects:
        with subject.settings():
            sampler.set_batch(subject, sampler.estimate(subject.launch))
    # 3. Sample them.
    sampler.wake()
    unfinished = list(fresh_subjects)
    while unfinished:
        random.shuffle(unfinished)
        for subject in unfinished:
            sampler.sample(subject)
        unfinished = [subject for subject in unfinished if not subject.finished]
    medians = {
        subject.key: statistics.median(subject.samples)
        for subject in fresh_subjects
        if subject.samples
    }
    return medians, time.perf_counter() - begin


def one_by_one(
    measure: Callable[[Callable[[], object]], float], subjects: Sequence[Subject]
) -> Pass:
    """Time subjects one after the other with ``measure``, which returns seconds per launch."""
    begin = time.perf_counter()
    medians = {}
    for subject in subjects:
        with subject.settings():
            medians[subject.key] = measure(functools.partial(subject.launch, 0))
    return medians, time.perf_counter() - begin


def _in_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of ``work(*arguments)``, which runs in a new process."""
    context = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=die_with_parent) as pool:
        return pool.submit(work, *arguments).result()


def _one_pass(machine: Machine, gpu: int | None, count: int) -> dict[str, Any]:
    """Time the cases with the sampler and with a standard timer."""
    bench, ready = open_bench(machine, gpu, clock_cases(machine, count))
    subjects = [result.subject for result in ready]
    pass_by_timer: dict[str, Pass] = {"sampler": in_rounds(bench.sampler, subjects)}
    if gpu is not None:
        pass_by_timer["do_bench"] = one_by_one(do_bench, subjects)
    else:
        pass_by_timer["blocked_autorange"] = one_by_one(blocked_autorange, subjects)
    timers = {}
    for timer, (medians_s, seconds) in pass_by_timer.items():
        medians_us = {
            str(result.case.problem): medians_s[result.case.id] * 1e6
            for result in ready
            if result.case.id in medians_s
        }
        timers[timer] = {"seconds": seconds, "medians_us": medians_us}
    return {"timers": timers}


def _around_a_profiler(machine: Machine, gpu: int | None, count: int) -> list[dict[str, Any]]:
    """Time at most ``count`` short cases, before and after one of them runs in a profiler.

    On a CPU, the verbose mode of the vendor libraries takes the place of the profiler.
    """
    # A profiler slows launches, which shows most in the shortest ones.
    by_size = sorted(clock_cases(machine, 4 * count), key=lambda case: case.problem.flops)
    cases = by_size[:count]
    bench, ready = open_bench(machine, gpu, cases)
    subjects = [result.subject for result in ready]
    if not subjects:
        return []
    before, _ = in_rounds(bench.sampler, subjects)
    # One launch is enough, because a profiler slows all later launches once it is loaded.
    if gpu is None:
        with cpu_tracer() as trace:
            trace(lambda: subjects[0].launch(0))
    else:
        trace_gpu([lambda: subjects[0].launch(0)])
    after, _ = in_rounds(bench.sampler, subjects)
    return [
        {
            "problem": str(result.case.problem),
            "before_us": before[result.case.id] * 1e6,
            "after_us": after[result.case.id] * 1e6,
        }
        for result in ready
        if result.case.id in before and result.case.id in after
    ]


def _time_graph_replays(machine: Machine, gpu: int, count: int) -> list[dict[str, Any]]:
    """Time at most ``count`` GEMMs of the sweep ``public-grid`` with CUDA graphs.

    The GEMMs are chosen at even intervals from the sweep's list. Those that raise a RuntimeError,
    for example because memory runs out, are left out.
    """
    # 1. Choose the GEMMs.
    device = select_device("gpu", gpu).torch_name
    make_current(gpu)
    problems = list(
        dict.fromkeys(
            case.problem
            for sweep in choose_sweeps(["public-grid"]).values()
            for case in sweep_cases(sweep, machine)
        )
    )
    spacing = math.ceil(len(problems) / count)  # rounded up, so that at most ``count`` are chosen
    # 2. Time a graph of each, with one launch for each weight matrix.
    rows = []
    for problem in problems[::spacing]:
        assert isinstance(problem, Gemm)
        dtype = TORCH_DTYPES[problem.dtype]
        # Together the weights should be larger than twice the L2 cache, so that none stays in it.
        # Even if one is that large, there is a second one, so that no two launches in a row use the
        # same weights. The upper limit keeps the graph short, but small weights then stay in the
        # cache.
        weight_bytes = problem.n * problem.k * dtype.itemsize
        weight_count = min(max(2, 2 * machine.l2_bytes // weight_bytes + 1), _MAX_WEIGHTS)
        try:
            activations = torch.randn(problem.m, problem.k, dtype=dtype, device=device)
            weights = [
                torch.randn(problem.n, problem.k, dtype=dtype, device=device)
                for _ in range(weight_count)
            ]
            out = torch.empty(problem.m, problem.n, dtype=dtype, device=device)
            launches = functools.partial(_multiply_by_each, activations, weights, out)
            seconds = graph_replays(launches, weight_count)
        except RuntimeError:  # torch.OutOfMemoryError is one
            torch.cuda.empty_cache()
            continue
        rows.append({"problem": str(problem), "time_us": seconds * 1e6, "weights": weight_count})
    return rows


def _multiply_by_each(
    activations: torch.Tensor, weights: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    """Multiply the activations (M, K) by the transpose of each weight matrix (N, K)."""
    for weight in weights:
        torch.mm(activations, weight.T, out=out)
