"""The timers that people use today, with their defaults, to compare this project's with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.benchmark import Timer


def blocked_autorange(launch: Callable[[], object]) -> float:
    """Seconds per launch by ``torch.utils.benchmark``: blocks of launches, their median."""
    timer = Timer("launch()", globals={"launch": launch}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange().median)


def do_bench(launch: Callable[[], object]) -> float:
    """Seconds per launch by ``triton.testing.do_bench``: the L2 cleared before each, the median."""
    from triton.testing import do_bench as triton_do_bench

    return float(triton_do_bench(launch, return_mode="median")) * 1e-3


def graph_replays(launches: Callable[[], object], count: int, replays: int = 6) -> float:
    """Seconds per launch, measured as AIConfigurator measures its tables: a replayed CUDA graph.

    Args:
        launches: makes ``count`` launches. The tables rotate the weights in it, so that they do not
            stay in the L2; nothing is flushed between replays.
        count: of launches.
        replays: timed ones, after three that are not; their mean is returned.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launches()  # what is loaded or allocated at first use must not be captured
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    for _ in range(3):
        graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / (replays * count)
