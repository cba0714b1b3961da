"""Widely used timers, for comparison with Rooftile's sampler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.benchmark import Timer


def blocked_autorange(launch: Callable[[], object]) -> float:
    """Return the median seconds per launch over several blocks of ``torch.utils.benchmark``."""
    timer = Timer("launch()", globals={"launch": launch}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange().median)


def do_bench(launch: Callable[[], object]) -> float:
    """Return the median seconds per launch with a cold L2, from ``triton.testing.do_bench``."""
    from triton.testing import do_bench as triton_do_bench

    milliseconds = float(triton_do_bench(launch, return_mode="median"))
    return milliseconds * 1e-3


def graph_replays(launches: Callable[[], object], count: int, replays: int = 6) -> float:
    """Return the mean seconds per launch in replays of a CUDA graph, as in AIConfigurator.

    Args:
        launches: callable that makes the launches. They should use several sets of weights in turn,
            because the L2 is not flushed between replays.
        count: number of launches that ``launches`` makes.
        replays: number of timed replays, after three that are not timed.
    """
    # 1. Make the launches outside of a graph, on a side stream. PyTorch requires this before a
    # capture.
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        launches()  # what is loaded or allocated at first use must not be captured
    torch.cuda.current_stream().wait_stream(side_stream)
    # 2. Capture the launches, and replay them without timing.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    for _ in range(3):
        graph.replay()
    # 3. Time further replays. The elapsed time of CUDA's events is in milliseconds.
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / (replays * count)
