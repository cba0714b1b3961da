"""Read convolutions from the sizes, strides and settings of PyTorch's operations.

The capture with fake tensors and the reader of profiler traces both use this module, so that they
agree on what an operation computes. This module does not import PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernels.problem import Conv

_CHANNELS_LAST = (1, 3, 2, 0)  # dimensions of (n, c, h, w), the one that varies fastest first
_CONTIGUOUS = (3, 2, 1, 0)  # the same for channels first


class UnsupportedOperationError(ValueError):
    """Error for an operation that matches no kind of problem that Rooftile knows."""


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
    """Sizes of a tensor, and its strides in elements."""

    sizes: Sequence[int]
    strides: Sequence[int]

    def is_channels_last(self) -> bool:
        """Return True if a tensor (n, c, h, w) is contiguous only in the channels-last format.

        Filters of one tap and images of one channel are contiguous in both formats, so they do not
        show which format the model uses.
        """
        if len(self.sizes) != 4 or len(self.strides) != 4:
            return False
        return self._is_dense(_CHANNELS_LAST) and not self._is_dense(_CONTIGUOUS)

    def _is_dense(self, order: Sequence[int]) -> bool:
        """Return True if the elements are stored without gaps and in this order of dimensions.

        ``order`` begins with the dimension that varies fastest.
        """
        expected = 1
        for dimension in order:
            size = self.sizes[dimension]
            # The stride of a dimension of size 1 has no meaning.
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
    """Return a :class:`Conv` for each of the given passes of a convolution.

    ``x`` is the input (n, c, h, w) or (n, c, w). ``weight`` has the filters (kout, c/groups, r, s)
    or (kout, c/groups, s), or (c, kout/groups, …) in a transposed convolution. ``passes`` has the
    passes of the call: ``fprop``, ``dgrad`` or ``wgrad``. For a transposed convolution, the result
    has ``dgrad`` in place of ``fprop``, and ``fprop`` in place of ``dgrad``.

    Raises:
        UnsupportedOperationError: if the convolution does not have one or two spatial dimensions.
        UserError: if the sizes and settings do not make a valid convolution.
    """
    # 1. Turn a convolution over one dimension into one over images of one row.
    spatial = len(x.sizes) - 2
    if not 1 <= spatial <= 2:
        raise UnsupportedOperationError(f"a convolution with {spatial} spatial dimensions")
    ones = [1] * (2 - spatial)
    zeros = [0] * (2 - spatial)
    image = [*ones, *x.sizes[2:]]
    taps = [*ones, *weight.sizes[2:]]
    padding = [*zeros, *settings.padding]
    stride = [*ones, *settings.stride]
    dilation = [*ones, *settings.dilation]
    # 2. Find the layout, which is NHWC if one of the tensors is contiguous only in that format.
    nhwc = x.is_channels_last() or weight.is_channels_last()
    # 3. Collect the sizes of the ordinary convolution that the call is a pass of.
    channels_in = x.sizes[1]
    channels_out = weight.sizes[0]
    ordinary_passes = list(passes)
    if settings.transposed:
        # The gradient of the transposed convolution's input is the ordinary forward pass.
        channels_in = weight.sizes[1] * settings.groups
        channels_out = x.sizes[1]
        output_padding = [*zeros, *settings.output_padding]
        # This is the formula for the output size in the documentation of ConvTranspose2d.
        axes = zip(image, stride, padding, dilation, taps, output_padding, strict=True)
        image = [
            (size - 1) * step - 2 * pad + spacing * (tap_count - 1) + output_pad + 1
            for size, step, pad, spacing, tap_count, output_pad in axes
        ]
        swapped = {"fprop": "dgrad", "dgrad": "fprop"}
        ordinary_passes = [swapped.get(name, name) for name in passes]
    conv = Conv(
        n=x.sizes[0],
        c=channels_in,
        h=image[0],
        w=image[1],
        kout=channels_out,
        r=taps[0],
        s=taps[1],
        stride=(stride[0], stride[1]),
        padding=(padding[0], padding[1]),
        dilation=(dilation[0], dilation[1]),
        groups=settings.groups,
        dtype=dtype,
        layout="nhwc" if nhwc else "nchw",
    )
    return [replace(conv, pass_=name) for name in ordinary_passes]
