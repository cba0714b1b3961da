"""Widely used timers, for comparison with Rooftile's sampler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.benchmark import Timer

from kernels.cuda_graph import capture

_UNTIMED_REPLAYS = 3  # replays that warm up the GPU before the timed ones


def blocked_autorange(launch: Callable[[], object]) -> float:
    """Return the median seconds per launch over blocks of launches, from PyTorch's ``Timer``."""
    timer = Timer("launch()", globals={"launch": launch}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange().median)


def do_bench(launch: Callable[[], object]) -> float:
    """Return the median seconds per launch with a cold L2, from ``triton.testing.do_bench``."""
    from triton.testing import do_bench as triton_do_bench

    milliseconds = float(triton_do_bench(launch, return_mode="median"))
    return milliseconds * 1e-3


def graph_replays(launches: Callable[[], object], count: int, replays: int = 6) -> float:
    """Return the mean seconds per launch in replays of a CUDA graph, as in AIConfigurator.

    ``launches`` makes ``count`` launches. They should use several sets of weights in turn, because
    the L2 is not flushed between replays.

    Raises:
        RuntimeError: if PyTorch cannot capture the launches.
    """
    # 1. Capture the launches, and replay them without timing.
    graph, _ = capture(launches)
    for _ in range(_UNTIMED_REPLAYS):
        graph.replay()
    # 2. Time further replays. The elapsed time of CUDA's events is in milliseconds.
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / (replays * count)
