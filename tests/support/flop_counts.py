"""An independent count of a step's FLOPs: PyTorch's own, of every layer."""

from __future__ import annotations

from torch.utils.flop_counter import FlopCounterMode

from sweeps.capture.attention import OneAttention
from sweeps.capture.capture import fake_tensors
from sweeps.capture.captured import Captured
from sweeps.capture.step import ModelSource, ModelStep


def counted_by_pytorch(source: ModelSource, step: ModelStep) -> int:
    """Of all products but attention and grouped ones, which PyTorch's counter leaves out."""
    with fake_tensors(), OneAttention(), FlopCounterMode(display=False) as counter:
        source.start(step, {}).call().backward()
    return int(counter.get_total_flops())


def counted_here(captured: Captured, *ops: str) -> int:
    """Of the products of some operations."""
    return sum(p.count * p.work.flops for p in captured.products if p.work.op in ops)
