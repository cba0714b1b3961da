"""Read convolutions from the sizes, strides and settings of PyTorch's operations.

Both captures with fake tensors and profiler traces of real steps use this module, so that they
agree on what an operation computes. This module does not import PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernels.problem import Conv

_CHANNELS_LAST = (1, 3, 2, 0)  # dimensions of (n, c, h, w), the one that varies fastest first
_CONTIGUOUS = (3, 2, 1, 0)  # the same for channels first


@dataclass(frozen=True)
class ConvolutionSettings:
    """Settings of a convolution, in the order in which PyTorch's operations take them.

    Sequences have one number per spatial dimension. A ``transposed`` convolution computes the
    gradient of an ordinary convolution's input.
    """

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


@dataclass(frozen=True)
class StoredTensor:
    """Sizes of a tensor, and the strides in elements with which it is stored."""

    sizes: Sequence[int]
    strides: Sequence[int]

    def is_channels_last(self) -> bool:
        """Return True if a tensor (n, c, h, w) is stored with channels last, not channels first.

        Filters of one tap and images of one channel are contiguous in both formats at once, so they
        do not show which format is meant.
        """
        if len(self.sizes) != 4 or len(self.strides) != 4:
            return False
        return self._is_dense(_CHANNELS_LAST) and not self._is_dense(_CONTIGUOUS)

    def _is_dense(self, order: Sequence[int]) -> bool:
        """Return True if elements are stored without gaps in the given order of dimensions.

        The strides of dimensions of size 1 are ignored, because they have no meaning.
        """
        expected = 1
        for dimension in order:
            size = self.sizes[dimension]
            if size != 1 and self.strides[dimension] != expected:
                return False
            expected *= size
        return True


def convolutions_of(
    x: StoredTensor,
    weight: StoredTensor,
    settings: ConvolutionSettings,
    dtype: str,
    passes: Sequence[str],
) -> list[Conv]:
    """Return the given passes of one convolution over one or two dimensions.

    Args:
        x: the input (n, c, h, w) or (n, c, w).
        weight: the filters (kout, c/groups, r, s) or (kout, c/groups, s).
        settings: stride, padding and the other settings of the call.
        dtype: dtype of the operands.
        passes: passes of the call to return (``fprop``, ``dgrad`` or ``wgrad``). The call may be
            transposed.

    Raises:
        KeyError: if the convolution has more than two dimensions.
        UserError: if the sizes do not fit together.
    """
    # 1. Turn a convolution over one dimension into one over images of one row.
    spatial = len(x.sizes) - 2
    if not 1 <= spatial <= 2:
        raise KeyError("a convolution with more than two dimensions")
    ones = [1] * (2 - spatial)
    image, taps = [*ones, *x.sizes[2:]], [*ones, *weight.sizes[2:]]
    pads = [*([0] * len(ones)), *settings.padding]
    steps, dilations = [*ones, *settings.stride], [*ones, *settings.dilation]
    # 2. Find the layout, which is NHWC if one of the tensors is contiguous only in that format.
    nhwc = x.is_channels_last() or weight.is_channels_last()
    # 3. Collect the sizes of the ordinary convolution that the call is a pass of.
    channels, out = x.sizes[1], weight.sizes[0]
    names = list(passes)
    if settings.transposed:
        # A transposed convolution computes the gradient of an ordinary convolution's input. The
        # gradient of the transposed convolution's input is the ordinary forward pass.
        channels, out = weight.sizes[1] * settings.groups, x.sizes[1]
        output_pads = [*([0] * len(ones)), *settings.output_padding]
        # This is the formula for the output size in the documentation of ConvTranspose2d.
        image = [
            (size - 1) * s - 2 * p + d * (t - 1) + o + 1
            for size, s, p, d, t, o in zip(
                image, steps, pads, dilations, taps, output_pads, strict=True
            )
        ]
        names = [{"fprop": "dgrad", "dgrad": "fprop"}.get(name, name) for name in names]
    conv = Conv(
        x.sizes[0],
        channels,
        image[0],
        image[1],
        out,
        taps[0],
        taps[1],
        (steps[0], steps[1]),
        (pads[0], pads[1]),
        (dilations[0], dilations[1]),
        settings.groups,
        dtype,
        "nhwc" if nhwc else "nchw",
    )
    return [replace(conv, pass_=name) for name in names]
