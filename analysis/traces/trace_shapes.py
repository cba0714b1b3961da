"""Derive the problems that a traced operation computes: GEMMs, convolutions or attention.

:mod:`sweeps.capture.products` derives the same problems from fake tensors; tests compare the two
results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from analysis.traces.trace_events import OperationInputs
from kernels.common.checks import check_positive
from kernels.config import ceil_div
from kernels.problem import DTYPE_BYTES, WIDE_BYTES, Gemm
from sweeps.capture.captured import BACKWARD, FORWARD, WGRAD, Attention, GroupedGemm, Work
from sweeps.capture.convolutions import ConvolutionSettings, StoredTensor, convolutions_of

TRACED_DTYPES = {
    "float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16",
    "c10::Float8_e4m3fn": "fp8", "c10::Float8_e5m2": "fp8",
}  # fmt: skip
"""Rooftile's name for each dtype, by the dtype's name in a trace. If an operation has fp32 inputs,
the trace does not show whether tf32 was used to compute the result."""

_NUMBERS = re.compile(r"\[?(-?\d{1,18}(?:, ?-?\d{1,18})*)?\]?")


def works_of(inputs: OperationInputs) -> tuple[Work, ...]:
    """Return the problems that an operation computes, such as both gradients of a convolution.

    The result is empty if the operation, its dtype or its inputs are not supported.
    """
    reader = _READERS.get(inputs.name.removeprefix("aten::"))
    if reader is None:
        return ()
    try:
        return tuple(reader(inputs))
    except (LookupError, ValueError, ArithmeticError):  # a UserError is a ValueError, too
        return ()


def _dtype(inputs: OperationInputs, position: int) -> str:
    return TRACED_DTYPES[inputs.types[position]]


def _stored(inputs: OperationInputs, position: int) -> StoredTensor:
    """Return the sizes and strides of the input at a position.

    If the trace has no strides, the tensor is assumed to be contiguous.
    """
    sizes = inputs.dims[position]
    strides = inputs.strides[position] if inputs.strides else _contiguous(sizes)
    if not sizes or len(sizes) != len(strides):
        raise ValueError("not a tensor")
    return StoredTensor(sizes, strides)


def _contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[dimension + 1 :]) for dimension in range(len(sizes)))


def _letter(tensor: StoredTensor) -> str:
    """Return a matrix's layout letter: ``t`` if only its columns are contiguous, else ``n``."""
    row_stride, column_stride = tensor.strides[-2:]
    return "t" if column_stride != 1 and row_stride == 1 else "n"


def _gemm(inputs: OperationInputs, first: int) -> list[Work]:
    """Return the GEMM of A (m, k) at position ``first`` and B (k, n) at the next position.

    A and B may both have a batch dimension in front.
    """
    a, b = _stored(inputs, first), _stored(inputs, first + 1)
    *batch, m, k = a.sizes
    *batch_of_b, rows_of_b, n = b.sizes
    if len(batch) > 1 or batch_of_b != batch or rows_of_b != k:
        raise ValueError("not a GEMM")
    dtype = _dtype(inputs, first)
    # Without strides, a linear layer's layout is assumed, as for a GEMM on the command line.
    layout = _letter(a) + _letter(b) if inputs.strides else "nt"
    if inputs.strides:
        along_m = [a] if layout[0] == "t" else []  # operands whose rows are as long as m
        along_k = [
            operand
            for operand, is_along_k in ((a, layout[0] == "n"), (b, layout[1] == "t"))
            if is_along_k
        ]
        m = _padded_size(m, along_m, dtype)
        k = _padded_size(k, along_k, dtype)
    return [Gemm(m, n, k, dtype, layout, batch[0] if batch else 1)]


def _padded_size(size: int, operands: Sequence[StoredTensor], dtype: str) -> int:
    """Return a size in elements, rounded up to whole 16-byte units if the stored rows are padded.

    ``operands`` are the operands whose rows are as long as the size. For example, ``torch.compile``
    pads rows of 50,257 bf16 elements to 50,304, so that kernels can use wide loads. The function
    then returns 50,264. The size is returned unchanged if ``operands`` is empty, if the rows are
    not padded, or if rounding would add more than 1%.
    """
    multiple = WIDE_BYTES // DTYPE_BYTES[dtype]
    rounded = ceil_div(size, multiple) * multiple
    row_lengths = [max(operand.strides[-2:]) for operand in operands]
    are_padded = bool(row_lengths) and all(length % multiple == 0 for length in row_lengths)
    return int(rounded) if are_padded and rounded <= 1.01 * size else size


def _linear(inputs: OperationInputs) -> list[Work]:
    """Return the GEMM of a linear layer with the input x (…, k) and the weight (n, k).

    Most linear layers call ``addmm`` or ``mm``, and the trace contains this inner call, too. This
    function is for linear layers that make no such inner call, such as those of oneDNN.
    """
    x, weight = _stored(inputs, 0), _stored(inputs, 1)
    rows = math.prod(x.sizes[:-1])
    n, k = weight.sizes
    if x.sizes[-1] != k:
        raise ValueError("not a GEMM")
    # The weight (n, k) is multiplied transposed, as a matrix (k, n).
    weight_letter = "t" if _letter(weight) == "n" else "n"
    # An input with more than two dimensions is flattened to the rows of a matrix.
    x_letter = _letter(x) if len(x.sizes) == 2 else "n"
    return [Gemm(rows, n, k, _dtype(inputs, 0), f"{x_letter}{weight_letter}")]


def _mv(inputs: OperationInputs, first: int) -> list[Work]:
    """Return a matrix-vector product as a GEMM with N = 1; ``first`` is the matrix's position."""
    a, x = _stored(inputs, first), _stored(inputs, first + 1)
    m, k = a.sizes
    if x.sizes != (k,):
        raise ValueError("the inputs are not a matrix and a vector")
    # The vector is a matrix (k, 1). Its rows have one element, so they are contiguous: letter n.
    return [Gemm(m, 1, k, _dtype(inputs, first), f"{_letter(a)}n")]


def _grouped(inputs: OperationInputs) -> list[Work]:
    """Return the batched or grouped GEMM of an operation that computes one GEMM per expert.

    The dimensions of its first two inputs, A and B, tell which of three problems it computes:

    - A (experts, m, k) and B (experts, k, n): a batch of GEMMs of one size;
    - A (m, k) and B (experts, k, n): each row of A is multiplied by the weight of the row's expert;
    - A (n, m) and B (m, k): the gradient of each expert's weight, summed over the expert's rows.
    """
    a, b = _stored(inputs, 0), _stored(inputs, 1)
    dtype = _dtype(inputs, 0)
    layout = _letter(a) + _letter(b)
    if len(a.sizes) == 3 and len(b.sizes) == 3:
        return _gemm(inputs, 0)
    if len(a.sizes) == 2 and len(b.sizes) == 3:
        m = a.sizes[0]
        experts, k, n = b.sizes
        if a.sizes[1] != k:
            raise ValueError("not a GEMM")
        return [GroupedGemm(m, n, k, experts, dtype, layout)]
    if len(a.sizes) != 2 or len(b.sizes) != 2 or a.sizes[1] != b.sizes[0]:
        raise ValueError("not the gradient of a weight")
    # Only the vector of integers after A and B tells the number of experts. For each expert, it has
    # one element, the end of the expert's rows. The scales before this vector are not integers.
    vector_lengths = [
        sizes[0]
        for sizes, type_name in zip(inputs.dims[2:], inputs.types[2:], strict=False)
        if type_name == "int" and len(sizes) == 1
    ]
    if not vector_lengths:
        raise ValueError("no vector tells the number of experts")
    experts = vector_lengths[0]
    n, m = a.sizes
    k = b.sizes[1]
    return [GroupedGemm(m, n, k, experts, dtype, layout, WGRAD)]


def _attention(inputs: OperationInputs, first: int, causal_position: int, pass_: str) -> list[Work]:
    """Return the attention problem that an operation computes.

    ``first`` is the position of the queries (batch, heads, queries, width). The keys (batch,
    kv_heads, keys, width) and the values (batch, kv_heads, keys, value_width) follow.
    """
    query_sizes = _stored(inputs, first).sizes
    key_sizes = _stored(inputs, first + 1).sizes
    value_sizes = _stored(inputs, first + 2).sizes
    batch, heads, queries, width = query_sizes
    if key_sizes[0] != batch or key_sizes[3] != width or value_sizes[:3] != key_sizes[:3]:
        raise ValueError("not attention")
    work = Attention(
        batch=batch,
        heads=heads,
        kv_heads=key_sizes[1],
        queries=queries,
        keys=key_sizes[2],
        width=width,
        value_width=value_sizes[3],
        dtype=_dtype(inputs, first),
        causal=inputs.settings[causal_position] == "True",
        pass_=pass_,
    )
    check_positive(work, ("batch", "heads", "kv_heads", "queries", "keys", "width", "value_width"))
    return [work]


def _integers(text: str) -> tuple[int, ...]:
    """Return the whole numbers in a setting such as ``[1, 1]`` or ``1``; () for ``[]`` or ""."""
    match = _NUMBERS.fullmatch(text)
    if match is None:
        raise ValueError("the setting is not a list of whole numbers")
    numbers = match.group(1)
    if numbers is None:
        return ()
    return tuple(int(number) for number in numbers.split(","))


def _convolution(
    inputs: OperationInputs,
    setting_positions: dict[str, int],
    first: int = 0,
    passes: Sequence[str] = ("fprop",),
) -> list[Work]:
    """Return the convolution of two inputs, an image and filters, as one problem for each pass.

    ``setting_positions`` must have the keys ``stride`` and ``padding``. If the key ``groups`` is
    missing, the number of groups is derived from the sizes. Any other setting without a key has
    PyTorch's default value.
    """
    image, weight = _stored(inputs, first), _stored(inputs, first + 1)
    dimensions = len(image.sizes) - 2  # the image is (n, c, …)

    def setting(name: str) -> tuple[int, ...]:
        return _integers(inputs.settings[setting_positions[name]])

    def per_dimension(name: str) -> tuple[int, ...]:
        numbers = setting(name)
        return numbers * dimensions if len(numbers) == 1 else numbers

    # 1. Read the settings that not every operation takes.
    if "groups" in setting_positions:
        groups = setting("groups")[0]
    else:
        # Filters are (kout, c / groups, …), so the sizes give the number of groups.
        groups = image.sizes[1] // weight.sizes[1]
    dilation = (1,) * dimensions
    if "dilation" in setting_positions:
        dilation = per_dimension("dilation")
    is_transposed = False
    if "transposed" in setting_positions:
        is_transposed = inputs.settings[setting_positions["transposed"]] == "True"
    output_padding = (0,) * dimensions
    if "output_padding" in setting_positions:
        output_padding = per_dimension("output_padding")
    # Filters of a transposed convolution are (c, kout / groups, …).
    channels = weight.sizes[0] if is_transposed else weight.sizes[1] * groups
    if len(weight.sizes) != len(image.sizes) or image.sizes[1] != channels:
        raise ValueError("not a convolution")
    # 2. Derive the problems from these and the other settings.
    convolution_settings = ConvolutionSettings(
        stride=per_dimension("stride"),
        padding=per_dimension("padding"),
        dilation=dilation,
        transposed=is_transposed,
        output_padding=output_padding,
        groups=groups,
    )
    dtype = _dtype(inputs, first)
    return list(convolutions_of(image, weight, convolution_settings, dtype, passes))


# Positions of the settings among the arguments of each convolution operation of PyTorch.
_PLAIN_SETTINGS = {
    "stride": 3, "padding": 4, "dilation": 5, "transposed": 6, "output_padding": 7, "groups": 8,
}  # fmt: skip
_GRADIENT_SETTINGS = {name: position + 1 for name, position in _PLAIN_SETTINGS.items()}
_CUDNN_SETTINGS = {"padding": 2, "stride": 3, "dilation": 4, "groups": 5}
_MKLDNN_SETTINGS = {"padding": 3, "stride": 4, "dilation": 5, "groups": 6}
_DEPTHWISE_SETTINGS = {"stride": 4, "padding": 5, "dilation": 6}
_SLOW_SETTINGS = {"stride": 4, "padding": 5}  # PyTorch's slow_conv2d, on one thread of a CPU


def _gradients(
    inputs: OperationInputs, setting_positions: dict[str, int], mask_position: int
) -> list[Work]:
    """Return the gradients that a call computes for a convolution, except the bias gradient.

    The argument at ``mask_position`` is a list such as ``[True, True, False]``. Its entries say
    whether the call computes the gradients of the input, the filter and the bias, in this order.
    """
    mask = inputs.settings[mask_position].strip("[]").split(", ")
    # The bias gradient is left out, because it is not a convolution.
    passes = [
        pass_
        for pass_, is_computed in zip(("dgrad", "wgrad"), mask, strict=False)
        if is_computed == "True"
    ]
    return _convolution(inputs, setting_positions, first=1, passes=passes)


_Reader = Callable[[OperationInputs], list[Work]]
"""Function that takes an operation's inputs, and returns the problems that the operation computes.

It raises a LookupError, a ValueError or an ArithmeticError if the inputs do not determine a valid
problem."""

_SDPA = "_scaled_dot_product_"
_READERS: dict[str, _Reader] = {
    "mm": lambda inputs: _gemm(inputs, 0),
    "bmm": lambda inputs: _gemm(inputs, 0),
    "matmul": lambda inputs: _gemm(inputs, 0),
    "_scaled_mm": lambda inputs: _gemm(inputs, 0),
    "_scaled_mm_v2": lambda inputs: _gemm(inputs, 0),
    "addmm": lambda inputs: _gemm(inputs, 1),
    "addmm_": lambda inputs: _gemm(inputs, 1),
    "_addmm_activation": lambda inputs: _gemm(inputs, 1),
    "baddbmm": lambda inputs: _gemm(inputs, 1),
    "baddbmm_": lambda inputs: _gemm(inputs, 1),
    "mv": lambda inputs: _mv(inputs, 0),
    "addmv": lambda inputs: _mv(inputs, 1),
    "addmv_": lambda inputs: _mv(inputs, 1),
    "linear": _linear,
    "_grouped_mm": _grouped,
    "_scaled_grouped_mm": _grouped,
    "convolution": lambda inputs: _convolution(inputs, _PLAIN_SETTINGS),
    "_convolution": lambda inputs: _convolution(inputs, _PLAIN_SETTINGS),
    "cudnn_convolution": lambda inputs: _convolution(inputs, _CUDNN_SETTINGS),
    "mkldnn_convolution": lambda inputs: _convolution(inputs, _MKLDNN_SETTINGS),
    "_conv_depthwise2d": lambda inputs: _convolution(inputs, _DEPTHWISE_SETTINGS),
    "_slow_conv2d_forward": lambda inputs: _convolution(inputs, _SLOW_SETTINGS),
    "convolution_backward": lambda inputs: _gradients(inputs, _GRADIENT_SETTINGS, 10),
    "_slow_conv2d_backward": lambda inputs: _gradients(inputs, _SLOW_SETTINGS, 6),
    f"{_SDPA}flash_attention": lambda inputs: _attention(inputs, 0, 4, FORWARD),
    f"{_SDPA}flash_attention_for_cpu": lambda inputs: _attention(inputs, 0, 4, FORWARD),
    f"{_SDPA}efficient_attention": lambda inputs: _attention(inputs, 0, 6, FORWARD),
    f"{_SDPA}cudnn_attention": lambda inputs: _attention(inputs, 0, 6, FORWARD),
    f"{_SDPA}flash_attention_backward": lambda inputs: _attention(inputs, 1, 11, BACKWARD),
    f"{_SDPA}flash_attention_for_cpu_backward": lambda inputs: _attention(inputs, 1, 7, BACKWARD),
    f"{_SDPA}efficient_attention_backward": lambda inputs: _attention(inputs, 1, 11, BACKWARD),
    f"{_SDPA}cudnn_attention_backward": lambda inputs: _attention(inputs, 1, 14, BACKWARD),
}
