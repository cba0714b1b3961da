"""Capture of launches in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

_T = TypeVar("_T")


def capture(launches: Callable[[], _T]) -> tuple[torch.cuda.CUDAGraph, _T]:
    """Return a CUDA graph of the launches, and their result, which each replay computes.

    ``launches`` is called twice: once to warm up, and once for the capture, which records the
    launches without running them. The result is therefore undefined before the first replay.

    Raises:
        RuntimeError: if PyTorch cannot capture the launches.
    """
    # PyTorch requires a run on a side stream before a capture, because what is loaded or allocated
    # at first use must not be captured.
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        launches()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = launches()
    return graph, result
