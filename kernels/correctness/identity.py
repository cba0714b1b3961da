"""Test the whole result of a GEMM or convolution, at a fraction of the operation's cost.

Freivalds' identity (IFIP Congress 1977) is Y·V = A·(B·V). If it holds for a random V, then Y = A·B
is very likely. V has four columns of random signs, +1 or −1, so each element of Y·V is a signed sum
along a row of Y. Each sum covers a block of at most 1,024 columns of Y. In a longer sum, the
rounding errors of the correct elements would hide a single wrong element.

The identity also holds for Yᵀ = Bᵀ·Aᵀ, so the columns of Y are tested in the same way. The tests
along rows and along columns are called the two sides. A convolution is linear in each operand, so
it has two sides as well (:func:`_conv_sides`).

The remainder, Y·V − A·(B·V), is compared with the expected size of the sums, σ_A σ_B √K (√n + 4).
Here σ is the root mean square of an operand's elements, and n is the number of columns in a block.
The standard deviation is σ_A σ_B √K for one element of Y, and √n times as large for a sum of n
elements. The 4 allows for one large element, which dominates the sum if n is small. For a correctly
rounded result, the ratio of the remainder to the expected size hardly depends on M, N and K. The
V-ABFT paper (arXiv 2602.08043) compares thresholds for such tests.

The sums are computed in fp32. Their rounding errors add about 1e-6 to the ratio, which is far below
every limit in :data:`LIMIT`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import conv2d
from torch.nn.grad import conv2d_input, conv2d_weight

from kernels.correctness import sets_at_once
from kernels.library.vendor import LibraryConfig, library_settings
from kernels.operands import Operands, conv_shapes
from kernels.operation import Layer, Lstm, Series, Workload
from kernels.problem import Conv

LIMIT = {"fp32": 2e-4, "tf32": 2e-2, "fp16": 5e-3, "bf16": 3e-2}
"""Largest allowed remainder by dtype, relative to the expected size of a block's sum.

A block's remainder is the root mean square over the four columns of V. Correct results were
simulated with K up to 65,536. The typical and the largest remainder of 512 blocks are:

- fp32, summed in order: 1.2e-6 and 2.3e-6 (K = 4,096; the remainders grow with √K),
- tf32 with truncated inputs: 0.8e-3 and 2.3e-3,
- fp16: 0.21e-3 and 0.5e-3,
- fp16 with 64 partial sums in 16 bits: 1.2e-3 and 2.7e-3,
- bf16: 1.7e-3 and 3.9e-3,
- bf16 with 64 partial sums in 16 bits: 9.8e-3 and 2.1e-2.

The limits leave room for very small K. In that case, the largest elements of the result are several
times as large as the elements' standard deviation, and their rounding errors are larger by the same
factor.

A block of n elements that are all unrelated to the operands has a remainder of about
1.4 √n / (√n + 4). If only one element is unrelated to the operands, the remainder is about
1.4 / (√n + 4).
"""

_BLOCK = 1024  # adjacent elements that are summed and tested together
_VECTORS = 4  # random vectors: columns of V
_LARGEST = 4.0  # standard deviations of one large element, which dominates a short sum
_MAX_ELEMENTS = 1 << 25  # largest part of a 16-bit operand that is held in fp32 at a time


def remainders(
    problem: Workload,
    sets: Sequence[Operands],
    results: Sequence[Tensor],
    seed: int,
    side: int | None = None,
) -> list[float] | None:
    """Return each result's largest remainder relative to the expected size, to compare with LIMIT.

    The remainder of a result with a NaN is NaN. For layers and LSTMs, which are not linear in their
    operands, return None.

    Each result has the problem's logical shape and was computed from the operand set at the same
    index. If ``side`` is None, both sides of the identity are tested, as the module's docstring
    explains. To save time, 0 or 1 restricts the test to one side.
    """
    if isinstance(problem, Layer | Lstm):
        return None
    signs = _signs(seed, sets[0].a.device)
    # Mean number of products that are added up in one element of the result. In a strided gradient,
    # this number differs from pixel to pixel.
    terms = problem.flops / 2 / sets[0].out.numel()
    # Largest squared remainders, one for each set; a tensor may hold those of several sets.
    largest_squares: list[Tensor] = []
    # TF32 would add rounding errors to the test's own sums.
    with library_settings("fp32", LibraryConfig()), torch.no_grad():
        if isinstance(problem, Conv):
            # Convolutions are tested set by set, because conv2d has no axis for sets.
            for operands, result in zip(sets, results, strict=True):
                variance = terms * _mean_square(operands.a) * _mean_square(operands.b)
                sides = _tested_sides(_conv_sides(problem, operands, result), side)
                per_side = [_remainder(tested, signs, variance).amax() for tested in sides]
                largest_squares.append(torch.stack(per_side).amax(0, keepdim=True))
        else:
            for stacked in _stackable_slices(sets):
                a, b, y = _stack_sets(problem, sets[stacked], results[stacked])
                variance = terms * _mean_square(a, (-2, -1)) * _mean_square(b, (-2, -1))
                # The columns of Y = A·B are summed, or those of its transpose Yᵀ = Bᵀ·Aᵀ.
                sides = [
                    _Side(torch.matmul, a, b, y, folded_axis=-1, result_axis=-1, cut=-2),
                    _Side(torch.matmul, b.mT, a.mT, y.mT, folded_axis=-1, result_axis=-1, cut=-2),
                ]
                sides = _tested_sides(sides, side)
                block_squares = [_remainder(tested, signs, variance) for tested in sides]
                # Axis 0 counts the sets, and each set keeps its own remainder.
                per_side = [squares.flatten(1).amax(1) for squares in block_squares]
                largest_squares.append(torch.stack(per_side).amax(0))
    return [float(square) for square in torch.cat(largest_squares).sqrt().tolist()]


@dataclass(frozen=True)
class _Side:
    """One way to test ``result = apply(kept, folded)``, where ``apply`` is linear in each argument.

    Summing ``folded`` along ``folded_axis`` sums the result along ``result_axis``, too. ``kept`` is
    processed in parts along its axis ``cut``, or whole if ``cut`` is None. If ``adds_up`` is True,
    ``folded`` is cut as well, and the results of the parts are added. Otherwise, these results are
    concatenated.
    """

    apply: Callable[[Tensor, Tensor], Tensor]
    kept: Tensor
    folded: Tensor
    result: Tensor
    folded_axis: int
    result_axis: int
    cut: int | None = 0
    adds_up: bool = False


def _tested_sides(sides: list[_Side], only: int | None) -> list[_Side]:
    """Return the sides to test, or a single one of them if ``only`` is 0 or 1.

    A side whose summed axis has length 1 would compute the whole result again. Such sides are left
    out, but if no other side remains, the first one is tested.
    """
    useful = [side for side in sides if side.folded.shape[side.folded_axis] > 1]
    if not useful:
        useful = sides[:1]
    if only is None:
        return useful
    return [useful[only % len(useful)]]  # if there is only one useful side, both numbers mean it


def _remainder(side: _Side, signs: Tensor, variance: Tensor) -> Tensor:
    """Return each block's mean squared remainder, relative to the square of the expected size.

    The returned tensor has the axes of the side's result except the summed axis, followed by an
    axis of blocks. ``variance`` is the expected variance of one element of the side's result.
    """
    # 1. Fold one operand with random signs, and apply the operation to it: A·(B·V).
    sums = _signed_sums(side.folded, side.folded_axis, signs)
    if side.cut is None:
        expected = side.apply(side.kept.float(), sums)
    else:
        # 16-bit operands are widened part by part, so that no whole copy is held in fp32.
        kept_parts = side.kept.split(_positions_at_once(side.kept, side.cut), side.cut)
        if side.adds_up:
            # Both operands are cut along axis 0, the images.
            folded_parts = sums.split(len(kept_parts[0]))
            pairs = zip(kept_parts, folded_parts, strict=True)
            results = [side.apply(kept.float(), folded) for kept, folded in pairs]
            expected = torch.stack(results).sum(0)
        else:
            results = [side.apply(kept.float(), sums) for kept in kept_parts]
            expected = torch.cat(results, side.cut)
    # 2. Subtract the result, folded with the same signs: Y·V.
    remainder = expected - _signed_sums(side.result, side.result_axis, signs)
    squares = remainder.square().movedim(side.result_axis, -1)
    # 3. Divide by the square of the expected size, which is smaller for a shorter last block.
    length = side.result.shape[side.result_axis]
    block_lengths = [min(_BLOCK, length - start) for start in range(0, length, _BLOCK)]
    scale = squares.new_tensor(block_lengths).sqrt() + _LARGEST
    by_block = squares.unflatten(-1, (len(block_lengths), -1))  # (…, blocks, vectors)
    mean = by_block.mean(-1)
    # If an operand is all zeros, the expected size is 0, and so is the remainder of a right result.
    return torch.where(mean == 0, mean, mean / (variance * scale.square()))


def _signed_sums(tensor: Tensor, axis: int, signs: Tensor) -> Tensor:
    """Replace an axis with signed sums in fp32: one sum for each block and vector."""
    axis %= tensor.dim()
    # 1. View the tensor as a cube (before the axis, axis, after the axis).
    # In memory order, the reshape below is usually a view; in logical order, it would often be a
    # copy.
    order = sorted(range(tensor.dim()), key=lambda i: -tensor.stride(i))
    position = order.index(axis)
    stored = tensor.permute(order)
    outer, inner = stored.shape[:position], stored.shape[position + 1 :]
    cube = stored.reshape(math.prod(outer), -1, math.prod(inner))
    # A sum needs at most as many vectors as it has terms. With a single term, for example, every
    # sign gives the same square.
    needed_signs = signs[:, : cube.shape[1]]
    # 2. Sum each block of the axis.
    block_sums = []
    for block in cube.split(_BLOCK, 1):
        # Cut along the longer of the two other axes, because the summed axis must stay whole.
        cut_axis = 0 if len(block) > block.shape[2] else 2
        weights = needed_signs[: block.shape[1]]
        sums = [
            _sum_block(part.float(), weights)
            for part in block.split(_positions_at_once(block, cut_axis), cut_axis)
        ]
        block_sums.append(torch.cat(sums, cut_axis))
    folded = torch.cat(block_sums, 1).reshape(*outer, -1, *inner)
    # 3. Restore the logical order of the axes.
    return folded.permute([order.index(i) for i in range(tensor.dim())])


def _sum_block(cube: Tensor, weights: Tensor) -> Tensor:
    """Reduce a cube (before, block, after) to its signed sums (before, vectors, after)."""
    if cube.shape[2] == 1:
        # This is one matrix multiplication, instead of a batch with a single column each.
        return (cube[:, :, 0] @ weights)[:, :, None]
    return torch.bmm(weights.T.expand(len(cube), -1, -1), cube)


def _signs(seed: int, device: torch.device) -> Tensor:
    """Return a matrix (block, vectors) of random signs, +1 or −1, in fp32.

    Each vector is contiguous, because CPUs then multiply faster.
    """
    bits = torch.randint(2, (_VECTORS, _BLOCK), generator=torch.Generator().manual_seed(seed))
    return (2 * bits - 1).to(device, torch.float32).T


def _positions_at_once(tensor: Tensor, axis: int) -> int:
    """Return how many positions along an axis to convert to fp32 at a time."""
    return max(1, tensor.shape[axis] * _MAX_ELEMENTS // tensor.numel())


def _mean_square(tensor: Tensor, axes: tuple[int, ...] | None = None) -> Tensor:
    """Return the mean square over ``axes``, or over all elements if ``axes`` is None.

    Given axes are kept with length 1.
    """
    norm = torch.linalg.vector_norm(tensor, dim=axes, keepdim=axes is not None, dtype=torch.float32)
    size = tensor.numel() if axes is None else math.prod(tensor.shape[axis] for axis in axes)
    return norm.square() / size


def _stackable_slices(sets: Sequence[Operands]) -> Iterator[slice]:
    """Yield slices of ``sets``, each to be tested at once: one large set, or several small sets."""
    count = sets_at_once(sum(tensor.numel() for tensor in sets[0]))
    for start in range(0, len(sets), count):
        yield slice(start, start + count)


def _stack_sets(
    problem: Workload, sets: Sequence[Operands], results: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Stack the sets, and return A (sets, …, m, k), B (sets, …, k, n) and Y (sets, …, m, n)."""
    a = _stacked([operands.a for operands in sets])
    b = _stacked([operands.b for operands in sets])
    y = _stacked(results)
    if isinstance(problem, Series):
        b = b.mT  # weights are stored (n, k)
        # The operand that all GEMMs of a set share is one matrix (sets, rows, columns), which is
        # expanded to (sets, count, rows, columns) without a copy.
        if a.dim() == 3:
            a = a.unsqueeze(1)
        if b.dim() == 3:
            b = b.unsqueeze(1)
        one_per_gemm = (len(a), problem.count, -1, -1)
        a, b = a.expand(one_per_gemm), b.expand(one_per_gemm)
    return a, b, y


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors along a new first axis; a single tensor is not copied."""
    return torch.stack(list(tensors)) if len(tensors) > 1 else tensors[0].unsqueeze(0)


def _conv_sides(conv: Conv, operands: Operands, result: Tensor) -> list[_Side]:
    """Return the two sides of a convolution: sums over the result's channels, and over its images.

    The filter's gradient has no images, so the sums are over its output channels, and over its
    input channels.
    """
    sides_of_pass = {"fprop": _fprop_sides, "dgrad": _dgrad_sides, "wgrad": _wgrad_sides}
    return sides_of_pass[conv.pass_](conv, operands.a, operands.b, result)


def _grouped(conv: Conv, tensor: Tensor, axis: int) -> Tensor:
    """View an axis of channels as two axes: the groups, and the channels of one group."""
    return tensor.unflatten(axis, (conv.groups, -1))


def _fprop_sides(conv: Conv, x: Tensor, w: Tensor, y: Tensor) -> list[_Side]:
    geometry = (conv.stride, conv.padding, conv.dilation, conv.groups)

    def forward(x: Tensor, w: Tensor) -> Tensor:
        """Return the output (n, groups, channels, p, q) for filters (groups, channels, …)."""
        return _grouped(conv, conv2d(x, w.flatten(0, 1), None, *geometry), 1)

    def forward_of_filter(w: Tensor, x: Tensor) -> Tensor:
        return forward(x, w)

    filters = _grouped(conv, w, 0)  # (groups, channels, …)
    output = _grouped(conv, y, 1)  # (n, groups, channels, p, q)
    return [
        _Side(forward, x, filters, output, folded_axis=1, result_axis=2),
        _Side(forward_of_filter, filters, x, output, folded_axis=0, result_axis=0, cut=None),
    ]


def _dgrad_sides(conv: Conv, dy: Tensor, w: Tensor, dx: Tensor) -> list[_Side]:
    geometry = (conv.stride, conv.padding, conv.dilation, conv.groups)

    def backward(dy: Tensor, w: Tensor) -> Tensor:
        """Return the input's gradient (n, groups, channels, h, w) for filters (kout, …)."""
        size = (len(dy), conv.groups * w.shape[1], conv.h, conv.w)
        return _grouped(conv, conv2d_input(size, w, dy, *geometry), 1)

    def backward_of_filter(w: Tensor, dy: Tensor) -> Tensor:
        return backward(dy, w)

    gradient = _grouped(conv, dx, 1)  # (n, groups, channels, h, w)
    return [
        _Side(backward, dy, w, gradient, folded_axis=1, result_axis=2),
        _Side(backward_of_filter, w, dy, gradient, folded_axis=0, result_axis=0, cut=None),
    ]


def _wgrad_sides(conv: Conv, x: Tensor, dy: Tensor, dw: Tensor) -> list[_Side]:

    def over_outputs(x: Tensor, dy: Tensor) -> Tensor:
        """Return the filter's gradient (groups, output channels, …) for dy (n, groups, …)."""
        size = (dy.shape[1] * dy.shape[2], *conv_shapes(conv)["w"][1:])
        return _grouped(conv, _filter_gradient(conv, x, size, dy.flatten(1, 2)), 0)

    def over_inputs(dy: Tensor, x: Tensor) -> Tensor:
        """Return the filter's gradient (output channels, input channels, …).

        ``x`` is (n, groups, input channels of a group, …).
        """
        size = (conv.kout, x.shape[2], conv.r, conv.s)
        return _filter_gradient(conv, x.flatten(1, 2), size, dy)

    grouped_x, grouped_dy = _grouped(conv, x, 1), _grouped(conv, dy, 1)
    grouped_dw = _grouped(conv, dw, 0)
    return [
        _Side(over_outputs, x, grouped_dy, grouped_dw, folded_axis=2, result_axis=1, adds_up=True),
        _Side(over_inputs, dy, grouped_x, dw, folded_axis=2, result_axis=1, adds_up=True),
    ]


def _filter_gradient(conv: Conv, x: Tensor, size: tuple[int, ...], dy: Tensor) -> Tensor:
    stride = conv.stride
    if conv.r == conv.s == 1 and conv.padding == (0, 0):
        # A single tap does not read the pixels that its stride leaves out, so they are removed
        # first. Otherwise oneDNN 3.12 (PyTorch 2.13) computes gradients that are wrong by 30–100%
        # on some CPUs, if the layout is channels last and there are few channels.
        x, stride = x[:, :, :: stride[0], :: stride[1]], (1, 1)
    return conv2d_weight(x, size, dy, stride, conv.padding, conv.dilation, conv.groups)
