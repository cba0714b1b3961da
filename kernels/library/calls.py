"""PyTorch calls for each operation: ``call(i)`` computes the problem once, on operand set i.

GEMMs, series of GEMMs, ReLU, GELU and softmax write their result to the set's memory. The other
operations allocate memory for the result, as a real model does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cuda_graph import capture
from kernels.operands import Operands
from kernels.operation import Layer, Lstm, Series
from kernels.problem import Conv, Gemm

Call = Callable[[int], Tensor]


def gemm_call(problem: Gemm, sets: Sequence[Operands]) -> Call:
    """Return a call of ``mm`` or ``bmm`` that writes the result to the set's memory."""
    multiply = torch.bmm if problem.batch > 1 else torch.mm

    def call(index: int) -> Tensor:
        a, b, out = sets[index]
        return multiply(a, b, out=out)

    return call


def conv_call(problem: Conv, sets: Sequence[Operands]) -> Call:
    """Return a call that computes a convolution's output or one of its gradients."""
    geometry = (
        list(problem.stride),
        list(problem.padding),
        list(problem.dilation),
        False,  # not transposed
        [0, 0],  # padding of the output, which only transposed convolutions have
        problem.groups,
    )
    if problem.pass_ == "fprop":
        forward = torch.ops.aten.convolution

        def call(index: int) -> Tensor:
            x, w, _ = sets[index]
            return forward(x, w, None, *geometry)

        return call

    # PyTorch returns the gradients of the input, the filter and the bias. The mask selects which of
    # them it computes.
    backward = torch.ops.aten.convolution_backward
    is_dgrad = problem.pass_ == "dgrad"
    mask = [is_dgrad, not is_dgrad, False]

    def call_backward(index: int) -> Tensor:
        a, b, out = sets[index]
        # PyTorch reads only the shape and the layout of the tensor whose gradient it computes, so
        # the memory for the result can take this tensor's place.
        dy, x, w = (a, out, b) if is_dgrad else (b, a, out)
        dx, dw, _ = backward(dy, x, w, None, *geometry, mask)
        return dx if is_dgrad else dw

    return call_backward


def layer_call(layer: Layer, sets: Sequence[Operands]) -> Call:
    """Return a call of a memory-bound layer."""
    # Softmax and layer norm work along the last axis, which must be the channels.
    channels_last = [(x.permute(0, 2, 3, 1), y.permute(0, 2, 3, 1)) for x, _, y in sets]

    def relu(i: int) -> Tensor:
        return torch.clamp_min(sets[i].a, 0, out=sets[i].out)

    def gelu(i: int) -> Tensor:
        return torch.ops.aten.gelu.out(sets[i].a, out=sets[i].out)

    def softmax(i: int) -> Tensor:
        x, y = channels_last[i]
        torch.softmax(x, -1, out=y)
        return sets[i].out

    def layernorm(i: int) -> Tensor:
        x, _ = channels_last[i]
        scale, shift = sets[i].b
        return functional.layer_norm(x, [layer.c], scale, shift).permute(0, 3, 1, 2)

    def batchnorm(i: int) -> Tensor:
        x, (scale, shift), _ = sets[i]
        return functional.batch_norm(x, None, None, scale, shift, training=True)

    def maxpool(i: int) -> Tensor:
        return functional.max_pool2d(sets[i].a, 3, stride=1, padding=1)

    return {
        "relu": relu,
        "gelu": gelu,
        "softmax": softmax,
        "layernorm": layernorm,
        "batchnorm": batchnorm,
        "maxpool": maxpool,
    }[layer.op]


def series_call(series: Series, sets: Sequence[Operands]) -> Call:
    """Return a call that computes the GEMMs of a series one by one; the result is (count, m, n)."""

    def call(index: int) -> Tensor:
        x, w, out = sets[index]
        for number in range(series.count):
            # All projections share one input, and all timesteps share one weight.
            a, b = (x, w[number]) if series.op == "projections" else (x[number], w)
            torch.mm(a, b.T, out=out[number])
        return out

    return call


def fused_series_call(series: Series, sets: Sequence[Operands]) -> Call:
    """Return a call that computes a series as one GEMM; the result is (count, m, n).

    For projections, the result is a view of a matrix (m, count·n).
    """
    count, m, n = series.count, series.m, series.n

    def projections(index: int) -> Tensor:
        x, w, out = sets[index]
        torch.mm(x, w.view(count * n, -1).T, out=out.view(m, count * n))
        return out.view(m, count, n).transpose(0, 1)

    def timesteps(index: int) -> Tensor:
        x, w, out = sets[index]
        torch.mm(x.view(count * m, -1), w.T, out=out.view(count * m, n))
        return out

    return projections if series.op == "projections" else timesteps


def lstm_call(lstm: Lstm, sets: Sequence[Operands]) -> Call:
    """Return a call of ``torch.nn.LSTM``, which reads a scaled copy of the set's weights."""
    layers = []
    for x, weights, _ in sets:
        layer = (
            torch.nn.LSTM(lstm.features, lstm.hidden, bias=False, device=x.device, dtype=x.dtype)
            .requires_grad_(False)
            .eval()
        )
        # The set's weights are (gates, features + hidden): first those of the input, then those
        # of the hidden state.
        scaled = weights * lstm.weight_scale
        layer.weight_ih_l0.copy_(scaled[:, : lstm.features])
        layer.weight_hh_l0.copy_(scaled[:, lstm.features :])
        layers.append(layer)

    def call(i: int) -> Tensor:
        return layers[i](sets[i].a)[0]

    return call


def graph_captured(call: Call, set_count: int) -> Call:
    """Capture each set's launches in a CUDA graph, and return a call that replays a set's graph.

    Raises:
        RuntimeError: if PyTorch cannot capture the call.
    """
    graphs = [capture(functools.partial(call, index)) for index in range(set_count)]

    def replay(index: int) -> Tensor:
        graph, result = graphs[index]
        graph.replay()
        return result

    return replay
