"""Read convolutions from the sizes, strides and settings of PyTorch's operations.

Both a step that is captured by fake tensors and a profiler's trace of a real one are read by this
module, so they agree on what an operation computes. It does not import PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernels.problem import Conv

_CHANNELS_LAST = (1, 3, 2, 0)  # dimensions of (n, c, h, w), the one that varies fastest first
_CONTIGUOUS = (3, 2, 1, 0)


@dataclass(frozen=True)
class ConvolutionSettings:
    """Settings of a convolution in the order in which PyTorch takes them; lists are by dimension.

    ``transposed`` convolutions compute the gradient of an ordinary convolution's input.
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
        """Return True if images (n, c, h, w) are stored with channels last, and not otherwise.

        A filter of one tap and an image of one channel are contiguous in both formats at once, so
        they do not show which format is meant.
        """
        if len(self.sizes) != 4 or len(self.strides) != 4:
            return False
        return self._is_dense(_CHANNELS_LAST) and not self._is_dense(_CONTIGUOUS)

    def _is_dense(self, order: Sequence[int]) -> bool:
        """Return True if elements follow one another in an order of dimensions.

        The strides of dimensions of size 1 have no meaning.
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
        settings: the settings of the call.
        dtype: dtype of the operands.
        passes: ``fprop``, ``dgrad`` or ``wgrad``, as seen by the call.

    Raises:
        KeyError: if the convolution has more than two dimensions.
        UserError: if the sizes do not fit together.
    """
    # 1. Give a convolution over one dimension a second one of size 1.
    spatial = len(x.sizes) - 2
    if not 1 <= spatial <= 2:
        raise KeyError("a convolution with more than two dimensions")
    # A convolution over one dimension is a convolution over images of one row.
    ones = [1] * (2 - spatial)
    image, taps = [*ones, *x.sizes[2:]], [*ones, *weight.sizes[2:]]
    pads = [*([0] * len(ones)), *settings.padding]
    steps, dilations = [*ones, *settings.stride], [*ones, *settings.dilation]
    # 2. Find the layout: NHWC if either tensor is contiguous in that format only.
    nhwc = x.is_channels_last() or weight.is_channels_last()
    # 3. Collect the sizes of the convolution whose pass this is.
    channels, out = x.sizes[1], weight.sizes[0]
    names = list(passes)
    if settings.transposed:
        # A transposed convolution computes the gradient of a convolution's input, and the gradient
        # of its own input is that convolution's forward pass.
        channels, out = weight.sizes[1] * settings.groups, x.sizes[1]
        output_pads = [*([0] * len(ones)), *settings.output_padding]
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
