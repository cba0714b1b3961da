"""Float64 reference for sampled entries of a result, and the tolerance of each dtype.

Computing whole results in float64 would take too long. A sample along an axis always includes the
last index, because errors in a kernel's masks appear there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.operands import Operands, conv_shapes
from kernels.operation import GATES, Layer, Lstm, Series, Workload
from kernels.problem import Conv, Gemm

TOLERANCE = {"fp32": 1e-4, "tf32": 2e-3, "fp16": 4e-3, "bf16": 1.6e-2}
"""Largest allowed error of a result y, max |y − ref| / max |ref|, by dtype.

The limit for fp32 allows the rounding errors of a sum of 65,536 terms, but not the error of tf32,
which is about 3.5e-4. Rounding a result to 16 bits causes a relative error of at most 2⁻¹¹ in fp16
and 2⁻⁸ in bf16. The limit for fp16 is about eight times this error, and the limit for bf16 about
four times, to leave room for partial sums in 16 bits.
"""

_ROWS, _COLUMNS = 32, 32  # sampled rows (pixels) and columns (channels) of a result
_BATCHES = 3  # sampled GEMMs of a batch: the first, the last and one between them
# Number of sampled filters in a filter's gradient, and of sampled taps (channel, row and column) in
# each filter. Both are small, because each tap is a sum over all pixels.
_TAPS = 16
# Number of sampled images of a layer, channels of a batch norm or sequences of an LSTM. It is
# small, because each of them is computed whole.
_WHOLE_SLICES = 4


@dataclass(frozen=True)
class CheckResult:
    """Outcome of comparing a result y with its reference.

    ``rel_error`` is max |y − ref| / max |ref| over the sampled entries. It is 0 if all of these
    entries are 0 in both y and ref. It is infinite if any of them is infinite in y, or if all of
    them are 0 in ref but not all are 0 in y. It is NaN if any of them is NaN in y.
    """

    rel_error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """True if the error is within the tolerance; False for a NaN."""
        return self.rel_error <= self.tolerance


def check(problem: Workload, operands: Operands, result: Tensor, seed: int = 0) -> CheckResult:
    """Compare sampled entries of a result with a float64 reference from the same operands.

    ``result`` has the problem's logical shape; ``seed`` decides which of its entries are sampled.
    """
    rng = np.random.default_rng(seed)
    if isinstance(problem, Gemm):
        actual, expected = _gemm(problem, operands, result, rng)
    elif isinstance(problem, Layer):
        actual, expected = _layer(problem, operands, result, rng)
    elif isinstance(problem, Series):
        actual, expected = _series(problem, operands, result, rng)
    elif isinstance(problem, Lstm):
        actual, expected = _lstm(problem, operands, result, rng)
    else:
        sample = {"fprop": _fprop, "dgrad": _dgrad, "wgrad": _wgrad}[problem.pass_]
        actual, expected = sample(problem, operands, result, rng)
    error = (actual.double() - expected).abs().max()  # NaN if the result has a NaN
    scale = expected.abs().max()
    if scale == 0 and error == 0:  # all values are 0, as for a filter that covers only padding
        return CheckResult(0.0, TOLERANCE[problem.dtype])
    return CheckResult(float(error / scale), TOLERANCE[problem.dtype])


def _sample_indices(
    rng: np.random.Generator, size: int, count: int, device: torch.device
) -> Tensor:
    """Return up to ``count`` sorted indices below ``size``, including the first and last index."""
    if size <= count:
        return torch.arange(size, device=device)
    middle = rng.choice(size - 2, count - 2, replace=False) + 1
    return torch.as_tensor(np.sort(np.r_[0, middle, size - 1]), device=device)


# The functions for the operations return sampled entries of a result, and the float64 reference of
# these entries in the same shape.


def _gemm(
    problem: Gemm, operands: Operands, result: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    a, b, y = _batched(operands.a), _batched(operands.b), _batched(result)
    rows = _sample_indices(rng, problem.m, _ROWS, a.device)
    columns = _sample_indices(rng, problem.n, _COLUMNS, a.device)
    batches = _sample_indices(rng, problem.batch, _BATCHES, a.device)
    # All axes are indexed at once, because one axis after another would copy whole matrices.
    a_rows, b_columns = a[batches[:, None], rows], b.mT[batches[:, None], columns]
    actual = y[batches[:, None, None], rows[:, None], columns]
    # Both are (batches, rows, columns).
    return actual, torch.matmul(a_rows.double(), b_columns.mT.double())


def _batched(matrix: Tensor) -> Tensor:
    """View a matrix, or a batch of matrices, as (batch, rows, columns)."""
    return matrix if matrix.dim() == 3 else matrix.unsqueeze(0)


def _series(
    series: Series, operands: Operands, result: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    a = operands.a  # (m, k) if all GEMMs share it, else (count, m, k)
    b = operands.b.transpose(-1, -2)  # (k, n) if all GEMMs share it, else (count, k, n)
    rows = _sample_indices(rng, series.m, _ROWS, a.device)
    columns = _sample_indices(rng, series.n, _COLUMNS, a.device)
    # The shared operand is expanded to one matrix per GEMM.
    a_rows = a[..., rows, :].double().expand(series.count, -1, -1)
    b_columns = b[..., columns].double().expand(series.count, -1, -1)
    return result[:, rows][..., columns], torch.bmm(a_rows, b_columns)


def _layer(
    layer: Layer, operands: Operands, result: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    x, parameters = operands.a, operands.b.double()
    if layer.op == "batchnorm":
        channels = _sample_indices(rng, layer.c, _WHOLE_SLICES, x.device)
        sample, parameters = x[:, channels].double(), parameters[:, channels]
        return result[:, channels], _normalised(sample, (0, 2, 3), parameters)
    images = _sample_indices(rng, layer.n, _WHOLE_SLICES, x.device)
    sample = x[images].double()
    if layer.op == "layernorm":
        expected = _normalised(sample, (1,), parameters)
    elif layer.op == "softmax":
        # The largest value is subtracted, so that no exponential overflows.
        exponentials = (sample - sample.amax(1, keepdim=True)).exp()
        expected = exponentials / exponentials.sum(1, keepdim=True)
    elif layer.op == "gelu":
        expected = sample * 0.5 * (1 + torch.erf(sample / math.sqrt(2)))
    elif layer.op == "relu":
        expected = torch.where(sample > 0, sample, 0.0)
    else:  # max-pool: the largest of nine shifted copies
        padded = torch.nn.functional.pad(sample, (1, 1, 1, 1), value=-math.inf)
        shifts = [
            padded[:, :, r : r + layer.h, s : s + layer.w] for r in range(3) for s in range(3)
        ]
        expected = torch.stack(shifts).amax(0)
    return result[images], expected


def _normalised(x: Tensor, over: tuple[int, ...], parameters: Tensor) -> Tensor:
    """Normalise ``x`` (n, c, h, w) along the axes ``over``, then apply scales and shifts (2, c)."""
    scale, shift = parameters[:, None, :, None, None]  # each (1, c, 1, 1)
    centred = x - x.mean(over, keepdim=True)
    variance = centred.square().mean(over, keepdim=True)
    return centred / (variance + 1e-5).sqrt() * scale + shift  # PyTorch adds 1e-5 by default


def _lstm(
    lstm: Lstm, operands: Operands, result: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    sequences = _sample_indices(rng, lstm.minibatch, _WHOLE_SLICES, operands.a.device)
    x = operands.a[:, sequences].double()  # (steps, sequences, features)
    weights = operands.b.double() * lstm.weight_scale  # for the input, then for the hidden state
    hidden = cell = x.new_zeros(len(sequences), lstm.hidden)
    hidden_states = []
    for step_input in x:
        gates = torch.cat([step_input, hidden], dim=1) @ weights.T  # in PyTorch's order
        input_gate, forget_gate, candidate, output_gate = gates.chunk(GATES, dim=1)
        cell = forget_gate.sigmoid() * cell + input_gate.sigmoid() * candidate.tanh()
        hidden = output_gate.sigmoid() * cell.tanh()
        hidden_states.append(hidden)
    return result[:, sequences], torch.stack(hidden_states)  # (steps, sequences, hidden)


# Sampled entries of a convolution are computed only from the elements that they depend on. An
# output pixel depends on the patch under the filter. The gradient of an input pixel depends on the
# outputs that read it. The gradient of a tap depends on all pixels that the tap reads.


def _taps(position: Tensor, taps: int, stride: int, padding: int, dilation: int) -> Tensor:
    """Return the input positions (…, taps) that output ``position`` reads along one axis."""
    offsets = torch.arange(taps, device=position.device) * dilation - padding
    return position[..., None] * stride + offsets


def _readers(
    position: Tensor, taps: int, stride: int, padding: int, dilation: int
) -> tuple[Tensor, Tensor]:
    """Return the output positions (…, taps) that read input ``position``, and a mask.

    The mask is False for the taps that skip this input because of the stride.
    """
    shifted = position[..., None] + padding - torch.arange(taps, device=position.device) * dilation
    return shifted.div(stride, rounding_mode="floor"), shifted % stride == 0


def _gather(image: Tensor, n: Tensor, h: Tensor, w: Tensor, valid: Tensor) -> Tensor:
    """Return image[n, :, h, w] in float64 as (pixels L, taps R and S, channels C).

    The values are zero where ``valid`` is False, and outside the image.

    Args:
        image: tensor (N, C, H, W).
        n: index of the image that each pixel reads (L,).
        h: row that each tap reads (L, R).
        w: column that each tap reads (L, S).
        valid: whether each tap reads the image at all (L, R, S), or one value for all taps (1,).
    """
    inside_h = (h >= 0) & (h < image.shape[2])
    inside_w = (w >= 0) & (w < image.shape[3])
    inside = inside_h[:, :, None] & inside_w[:, None, :] & valid
    # A position outside is read at the image's edge, and then multiplied by zero.
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
    """Sample up to 32 pixels of a batch of images; ``shape`` is (images, rows, columns).

    Return the image, the row and the column of each sampled pixel.
    """
    images, rows, columns = shape
    pixels = _sample_indices(rng, images * rows * columns, _ROWS, device)
    in_image = pixels % (rows * columns)
    return pixels // (rows * columns), in_image // columns, in_image % columns


def _by_group(channels: Tensor, per_group: int, compute: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Call ``compute`` with each group and its part of ``channels``, and return all results.

    The results are concatenated along the last axis, group by group. ``channels`` must be sorted,
    so that the results are in the order of the channels.
    """
    group_of_channel = channels // per_group
    results = [
        compute(int(group), channels[group_of_channel == group])
        for group in group_of_channel.unique(sorted=True)
    ]
    return torch.cat(results, dim=-1)


def _fprop(
    problem: Conv, operands: Operands, result: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    x, w = operands.a, operands.b
    # Sample output pixels (p, q) of images n.
    n, p, q = _pixels(rng, (problem.n, problem.p, problem.q), x.device)
    # Along each axis, the geometry is (stride, padding, dilation).
    vertical, horizontal = zip(problem.stride, problem.padding, problem.dilation, strict=True)
    rows_read = _taps(p, problem.r, *vertical)
    columns_read = _taps(q, problem.s, *horizontal)
    every_tap = torch.ones(1, dtype=torch.bool, device=x.device)
    patches = _gather(x, n, rows_read, columns_read, every_tap)
    kouts = _sample_indices(rng, problem.kout, _COLUMNS, x.device)
    per_group = problem.c // problem.groups

    def outputs(group: int, group_kouts: Tensor) -> Tensor:
        patch = patches[..., group * per_group : (group + 1) * per_group]
        return torch.einsum("lrsc,kcrs->lk", patch, w[group_kouts].double())

    expected = _by_group(kouts, problem.kout // problem.groups, outputs)
    return result[n, :, p, q][:, kouts], expected  # (pixels, channels)


def _dgrad(
    problem: Conv, operands: Operands, result: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    dy, w = operands.a, operands.b
    # Sample input pixels, and find the output pixel (p, q) that reads each of them with each tap.
    n, rows, columns = _pixels(rng, (problem.n, problem.h, problem.w), dy.device)
    # Along each axis, the geometry is (stride, padding, dilation).
    vertical, horizontal = zip(problem.stride, problem.padding, problem.dilation, strict=True)
    p, is_row_read = _readers(rows, problem.r, *vertical)
    q, is_column_read = _readers(columns, problem.s, *horizontal)
    patches = _gather(dy, n, p, q, is_row_read[:, :, None] & is_column_read[:, None, :])
    channels = _sample_indices(rng, problem.c, _COLUMNS, dy.device)
    c_per_group, kout_per_group = problem.c // problem.groups, problem.kout // problem.groups

    def gradients(group: int, group_channels: Tensor) -> Tensor:
        kouts = slice(group * kout_per_group, (group + 1) * kout_per_group)
        # A filter has only the channels of its group, so they are counted from the group's first.
        filters = w[kouts][:, group_channels - group * c_per_group].double()
        return torch.einsum("lrsk,kcrs->lc", patches[..., kouts], filters)

    expected = _by_group(channels, c_per_group, gradients)
    return result[n, :, rows, columns][:, channels], expected  # (pixels, channels)


def _wgrad(
    problem: Conv, operands: Operands, result: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    # 1. Sample filters and, in each of them, taps (channel of the group, row, column).
    x, dy = operands.a, operands.b
    kouts = _sample_indices(rng, problem.kout, _TAPS, x.device)
    _, c_per_group, _, _ = conv_shapes(problem)["w"]
    entries = _sample_indices(rng, c_per_group * problem.r * problem.s, _TAPS, x.device)
    entry_c = entries // (problem.r * problem.s)
    tap = entries % (problem.r * problem.s)
    entry_r, entry_s = tap // problem.s, tap % problem.s
    # 2. Find the input rows (P, R) and columns (Q, S) that each output reads through each tap.
    # Along each axis, the geometry is (stride, padding, dilation).
    vertical, horizontal = zip(problem.stride, problem.padding, problem.dilation, strict=True)
    rows_read = _taps(torch.arange(problem.p, device=x.device), problem.r, *vertical)
    columns_read = _taps(torch.arange(problem.q, device=x.device), problem.s, *horizontal)
    # 3. Sum over all pixels that an entry reads, for each group of filters.
    expected = torch.empty(len(kouts), len(entries), dtype=torch.float64, device=x.device)
    kout_groups = kouts // (problem.kout // problem.groups)
    for i in range(len(entries)):
        rows, columns = rows_read[:, entry_r[i]], columns_read[:, entry_s[i]]
        is_row = (rows >= 0) & (rows < problem.h)
        is_column = (columns >= 0) & (columns < problem.w)
        is_inside = is_row[:, None] & is_column[None, :]
        for group in kout_groups.unique():
            in_group = kout_groups == group
            images = x[:, group * c_per_group + entry_c[i]]  # one channel (n, h, w)
            # A position outside is read at the image's edge, and then multiplied by zero.
            pixels = images[:, rows.clamp(0, problem.h - 1)]
            pixels = pixels[:, :, columns.clamp(0, problem.w - 1)]
            expected[in_group, i] = torch.einsum(
                "npq,nkpq->k", pixels.double() * is_inside, dy[:, kouts[in_group]].double()
            )
    # Both are (filters, taps).
    return result[kouts[:, None], entry_c[None], entry_r[None], entry_s[None]], expected
