"""Float64 reference for sampled entries of a result, and the only table of tolerances.

Computing the whole result in float64 would cost more than all timing. Instead, random rows and
columns are checked. The last ones are always among them, because that is where masks go wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.operands import Operands, conv_shapes
from kernels.operation import Layer, Lstm, Series, Workload
from kernels.problem import Conv, Gemm

TOLERANCE = {"fp32": 1e-4, "tf32": 2e-3, "fp16": 4e-3, "bf16": 1.6e-2}
"""Largest allowed max |y − ref| / max |ref|, by dtype.

The limit of fp32 leaves room for a sum of 65,536 terms, but not for tf32, whose error is about
3.5e-4. The limits of the 16-bit dtypes are about eight rounding errors of the largest result (2⁻¹¹
in fp16, 2⁻⁹ in bf16), which leaves room for fp16's partial sums.
"""

_ROWS, _COLUMNS = 32, 32  # sampled rows (pixels) and columns (channels) of a result
_TAPS = 16  # sampled columns of a filter gradient: each costs a sum over all pixels


@dataclass(frozen=True)
class CheckResult:
    """Outcome of a comparison.

    ``rel_error`` is max |y − ref| / max |ref|, and NaN if y has a NaN.
    """

    rel_error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """True if the error is within the tolerance; always False if anything is NaN."""
        return self.rel_error <= self.tolerance


def check(problem: Workload, operands: Operands, result: Tensor, seed: int = 0) -> CheckResult:
    """Compare sampled entries of a result with float64 arithmetic on the same operands."""
    rng = np.random.default_rng(seed)
    if isinstance(problem, Gemm):
        got, want = _gemm(problem, operands, result, rng)
    elif isinstance(problem, Layer):
        got, want = _layer(problem, operands, result, rng)
    elif isinstance(problem, Series):
        got, want = _series(problem, operands, result, rng)
    elif isinstance(problem, Lstm):
        got, want = _lstm(problem, operands, result, rng)
    else:
        pick = {"fprop": _fprop, "dgrad": _dgrad, "wgrad": _wgrad}[problem.pass_]
        got, want = pick(problem, operands, result, rng)
    error, scale = (got.double() - want).abs().max(), want.abs().max()
    if scale == error == 0:  # a filter that meets only padding
        return CheckResult(0.0, TOLERANCE[problem.dtype])
    return CheckResult(float(error / scale), TOLERANCE[problem.dtype])


def _sample_indices(
    rng: np.random.Generator, size: int, count: int, device: torch.device
) -> Tensor:
    """Return sorted indices below ``size``: all, or ``count`` random ones with first and last."""
    if size <= count:
        return torch.arange(size, device=device)
    middle = rng.choice(size - 2, count - 2, replace=False) + 1
    return torch.as_tensor(np.sort(np.r_[0, middle, size - 1]), device=device)


def _gemm(
    problem: Gemm, operands: Operands, result: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    a, b, y = (
        t if t.dim() == 3 else t.unsqueeze(0) for t in (operands.a, operands.b, result)
    )  # (batch, rows, columns)
    rows = _sample_indices(rng, problem.m, _ROWS, a.device)
    columns = _sample_indices(rng, problem.n, _COLUMNS, a.device)
    which = _sample_indices(rng, problem.batch, 3, a.device)
    # All axes are indexed at once, because one axis after another would copy whole matrices.
    left, right = a[which[:, None], rows], b.mT[which[:, None], columns]
    got = y[which[:, None, None], rows[:, None], columns]
    return got, torch.matmul(left.double(), right.mT.double())


def _series(
    series: Series, operands: Operands, result: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    shape = (series.count, -1, -1)
    a, w = operands.a, operands.b  # (m, k) or (count, m, k); (count, n, k) or (n, k)
    b = w.transpose(-1, -2)
    rows = _sample_indices(rng, series.m, _ROWS, a.device)
    columns = _sample_indices(rng, series.n, _COLUMNS, a.device)
    left = a[..., rows, :].double().expand(*shape)
    right = b[..., columns].double().expand(*shape)
    return result[:, rows][..., columns], torch.bmm(left, right)


def _layer(
    layer: Layer, operands: Operands, result: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Return samples of a layer's result and their reference.

    They are whole images, or whole channels for batch norm, which takes means over the batch.
    """
    x, parameters = operands.a, operands.b.double()
    if layer.op == "batchnorm":
        channels = _sample_indices(rng, layer.c, 4, x.device)
        sample, parameters = x[:, channels].double(), parameters[:, channels]
        return result[:, channels], _normalised(sample, (0, 2, 3), parameters)
    images = _sample_indices(rng, layer.n, 4, x.device)
    sample = x[images].double()
    if layer.op == "layernorm":
        want = _normalised(sample, (1,), parameters)
    elif layer.op == "softmax":
        powers = (sample - sample.amax(1, keepdim=True)).exp()
        want = powers / powers.sum(1, keepdim=True)
    elif layer.op == "gelu":
        want = sample * 0.5 * (1 + torch.erf(sample / math.sqrt(2)))
    elif layer.op == "relu":
        want = torch.where(sample > 0, sample, 0.0)
    else:  # max-pool: the largest of nine shifted copies
        padded = torch.nn.functional.pad(sample, (1, 1, 1, 1), value=-math.inf)
        shifts = [
            padded[:, :, r : r + layer.h, s : s + layer.w] for r in range(3) for s in range(3)
        ]
        want = torch.stack(shifts).amax(0)
    return result[images], want


def _normalised(x: Tensor, over: tuple[int, ...], parameters: Tensor) -> Tensor:
    """Normalise (n, c, h, w) to mean 0 and variance 1, then scale and shift each channel.

    Mean and variance are taken over the axes ``over``.
    """
    scale, shift = parameters[:, None, :, None, None]
    centred = x - x.mean(over, keepdim=True)
    return centred / (centred.square().mean(over, keepdim=True) + 1e-5).sqrt() * scale + shift


def _lstm(
    lstm: Lstm, operands: Operands, result: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Return all steps of some sequences of an LSTM, and their reference.

    Gates are in PyTorch's order: input, forget, cell, output.
    """
    rows = _sample_indices(rng, lstm.minibatch, 4, operands.a.device)
    x, weights = operands.a[:, rows].double(), operands.b.double() * lstm.weight_scale
    hidden = cell = x.new_zeros(len(rows), lstm.hidden)
    steps = []
    for step in x:
        gates = torch.cat([step, hidden], dim=1) @ weights.T
        into, forget, new, out = gates.chunk(4, dim=1)
        cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
        hidden = out.sigmoid() * cell.tanh()
        steps.append(hidden)
    return result[:, rows], torch.stack(steps)


# Sampled entries of a convolution are computed from what they read: for each output pixel the patch
# under the filter, for each input pixel the outputs that read it, and for each tap the pixels under
# it.


def _taps(position: Tensor, taps: int, stride: int, padding: int, dilation: int) -> Tensor:
    """Return the input positions (…, taps) that output ``position`` reads along one axis."""
    offsets = torch.arange(taps, device=position.device) * dilation - padding
    return position[..., None] * stride + offsets


def _readers(
    position: Tensor, taps: int, stride: int, padding: int, dilation: int
) -> tuple[Tensor, Tensor]:
    """Return output positions (…, taps) whose taps read input ``position``, and a mask.

    The mask is True where there is such an output position.
    """
    shifted = position[..., None] + padding - torch.arange(taps, device=position.device) * dilation
    return shifted.div(stride, rounding_mode="floor"), shifted % stride == 0


def _gather(image: Tensor, n: Tensor, h: Tensor, w: Tensor, valid: Tensor) -> Tensor:
    """Return image[n, :, h, w] in float64 as (L, R, S, C), and zero where it is not valid.

    ``h`` is (L, R) and ``w`` is (L, S). Positions outside the image are not valid either.
    """
    inside_h = (h >= 0) & (h < image.shape[2])
    inside_w = (w >= 0) & (w < image.shape[3])
    inside = inside_h[:, :, None] & inside_w[:, None, :] & valid
    values = image[
        n[:, None, None],
        :,
        h.clamp(0, image.shape[2] - 1)[:, :, None],
        w.clamp(0, image.shape[3] - 1)[:, None, :],
    ]
    return values.double() * inside[..., None]


def _pixels(
    rng: np.random.Generator, shape: tuple[int, int, int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sampled (image, row, column) triples of ``shape``; the last one is always included."""
    flat = _sample_indices(rng, shape[0] * shape[1] * shape[2], _ROWS, device)
    rest = flat % (shape[1] * shape[2])
    return flat // (shape[1] * shape[2]), rest // shape[2], rest % shape[2]


def _by_group(channels: Tensor, per_group: int, product: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Concatenate ``product(group, its channels)`` along the last axis, in channel order."""
    groups = channels // per_group
    return torch.cat(
        [product(int(g), channels[groups == g]) for g in groups.unique(sorted=True)], dim=-1
    )


def _fprop(
    problem: Conv, operands: Operands, result: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    x, w = operands.a, operands.b
    n, p, q = _pixels(rng, (problem.n, problem.p, problem.q), x.device)
    axes = zip(problem.stride, problem.padding, problem.dilation, strict=True)
    (rows, columns) = axes
    h, v = _taps(p, problem.r, *rows), _taps(q, problem.s, *columns)
    patches = _gather(x, n, h, v, torch.ones(1, dtype=torch.bool, device=x.device))
    kouts = _sample_indices(rng, problem.kout, _COLUMNS, x.device)
    width = problem.c // problem.groups

    def product(group: int, members: Tensor) -> Tensor:
        patch = patches[..., group * width : (group + 1) * width]
        return torch.einsum("lrsc,kcrs->lk", patch, w[members].double())

    want = _by_group(kouts, problem.kout // problem.groups, product)
    return result[n, :, p, q][:, kouts], want


def _dgrad(
    problem: Conv, operands: Operands, result: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    dy, w = operands.a, operands.b
    n, h, v = _pixels(rng, (problem.n, problem.h, problem.w), dy.device)
    rows, columns = zip(problem.stride, problem.padding, problem.dilation, strict=True)
    p, hit_p = _readers(h, problem.r, *rows)
    q, hit_q = _readers(v, problem.s, *columns)
    patches = _gather(dy, n, p, q, hit_p[:, :, None] & hit_q[:, None, :])
    channels = _sample_indices(rng, problem.c, _COLUMNS, dy.device)
    width, depth = problem.c // problem.groups, problem.kout // problem.groups

    def product(group: int, members: Tensor) -> Tensor:
        outputs = slice(group * depth, (group + 1) * depth)
        taps = w[outputs][:, members - group * width].double()
        return torch.einsum("lrsk,kcrs->lc", patches[..., outputs], taps)

    want = _by_group(channels, width, product)
    return result[n, :, h, v][:, channels], want


def _wgrad(
    problem: Conv, operands: Operands, result: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    x, dy = operands.a, operands.b
    kouts = _sample_indices(rng, problem.kout, _TAPS, x.device)
    _, per_group, _, _ = conv_shapes(problem)["w"]
    flat = _sample_indices(rng, per_group * problem.r * problem.s, _TAPS, x.device)
    c, rest = flat // (problem.r * problem.s), flat % (problem.r * problem.s)
    r, s = rest // problem.s, rest % problem.s
    rows, columns = zip(problem.stride, problem.padding, problem.dilation, strict=True)
    h = _taps(torch.arange(problem.p, device=x.device), problem.r, *rows)  # (P, R)
    v = _taps(torch.arange(problem.q, device=x.device), problem.s, *columns)
    want = torch.empty(len(kouts), len(flat), dtype=torch.float64, device=x.device)
    outputs_per_group = problem.kout // problem.groups
    for column in range(len(flat)):
        under_h, under_v = h[:, r[column]], v[:, s[column]]
        for group in (kouts // outputs_per_group).unique():
            channel = group * per_group + c[column]
            members = kouts // outputs_per_group == group
            inside = ((under_h >= 0) & (under_h < problem.h))[:, None] & (
                (under_v >= 0) & (under_v < problem.w)
            )[None, :]
            pixels = x[:, channel][:, under_h.clamp(0, problem.h - 1)][
                :, :, under_v.clamp(0, problem.w - 1)
            ]
            want[members, column] = torch.einsum(
                "npq,nkpq->k", pixels.double() * inside, dy[:, kouts[members]].double()
            )
    return result[kouts[:, None], c[None], r[None], s[None]], want
