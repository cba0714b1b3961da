"""Read what a traced operation multiplies: its GEMM, convolution or attention.

An operation appears in a trace with the sizes, strides, types and settings of its inputs. The same
operations are read from fake tensors by :mod:`sweeps.capture.products`; tests compare the two.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Sequence

from analysis.traces.trace_events import OperationInputs
from kernels.common.checks import check_positive
from kernels.problem import Gemm
from sweeps.capture.captured import BACKWARD, FORWARD, WGRAD, Attention, GroupedGemm, Work
from sweeps.capture.convolutions import ConvolutionSettings, StoredTensor, convolutions_of

TRACED_DTYPES = {
    "float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16",
    "c10::Float8_e4m3fn": "fp8", "c10::Float8_e5m2": "fp8",
}  # fmt: skip
"""Dtypes by their names in a trace. An fp32 operation may have been computed in tf32."""

_NUMBERS = re.compile(r"\[?(-?\d{1,18}(?:, ?-?\d{1,18})*)?\]?")


def works_of(inputs: OperationInputs) -> tuple[Work, ...]:
    """Return what an operation multiplies: one problem, or both gradients of a convolution.

    It is empty for an operation that multiplies nothing, whose kind or dtype is not known, or whose
    inputs do not fit together.
    """
    reader = _READERS.get(inputs.name.removeprefix("aten::"))
    if reader is None:
        return ()
    try:
        return tuple(reader(inputs))
    except (LookupError, ValueError, ArithmeticError):  # a UserError is a ValueError, too
        return ()


def _dtype(inputs: OperationInputs, place: int) -> str:
    return TRACED_DTYPES[inputs.types[place]]


def _stored(inputs: OperationInputs, place: int) -> StoredTensor:
    """Return the sizes and strides of an input that must be a tensor.

    Without strides in the trace, those of a tensor with contiguous rows are assumed.
    """
    sizes = inputs.dims[place]
    strides = inputs.strides[place] if inputs.strides else _contiguous(sizes)
    if not sizes or len(sizes) != len(strides):
        raise ValueError("not a tensor")
    return StoredTensor(sizes, strides)


def _contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    inner = itertools.accumulate(reversed(sizes[1:]), operator.mul, initial=1)
    return tuple(reversed(list(inner)))


def _letter(tensor: StoredTensor) -> str:
    """Return ``t`` if a matrix's columns are contiguous and its rows are not, else ``n``."""
    rows, columns = tensor.strides[-2:]
    return "t" if columns != 1 and rows == 1 else "n"


def _gemm(inputs: OperationInputs, first: int) -> list[Work]:
    """Return the GEMM of the inputs ``first`` and the next: (…, m, k) and (…, k, n)."""
    a, b = _stored(inputs, first), _stored(inputs, first + 1)
    *batch, m, k = a.sizes
    if len(batch) > 1 or len(b.sizes) != len(a.sizes) or b.sizes[-2] != k:
        raise ValueError("not a GEMM")
    # Without strides, a linear layer's layout is assumed, as for a GEMM on the command line.
    layout = _letter(a) + _letter(b) if inputs.strides else "nt"
    return [Gemm(m, b.sizes[-1], k, _dtype(inputs, first), layout, batch[0] if batch else 1)]


def _linear(inputs: OperationInputs) -> list[Work]:
    """Return the GEMM of x (…, k) and the weight (n, k), for a call without an ``addmm`` in it."""
    x, weight = _stored(inputs, 0), _stored(inputs, 1)
    rows = math.prod(x.sizes[:-1])
    n, k = weight.sizes
    if x.sizes[-1] != k:
        raise ValueError("not a GEMM")
    by_columns = _letter(weight) == "n"
    return [Gemm(rows, n, k, _dtype(inputs, 0), "nt" if by_columns else "nn")]


def _mv(inputs: OperationInputs, first: int) -> list[Work]:
    """Return a matrix times a vector as a GEMM with one column."""
    a, x = _stored(inputs, first), _stored(inputs, first + 1)
    m, k = a.sizes
    if x.sizes != (k,):
        raise ValueError("not a matrix and a vector")
    # The vector as a matrix (k, 1) has the stride of the vector along k, and 1 along its column.
    return [Gemm(m, 1, k, _dtype(inputs, first), f"{_letter(a)}n")]


def _grouped(inputs: OperationInputs) -> list[Work]:
    a, b = _stored(inputs, 0), _stored(inputs, 1)
    dtype, layout = _dtype(inputs, 0), _letter(a) + _letter(b)
    if len(a.sizes) == 3 and len(b.sizes) == 3:
        return _gemm(inputs, 0)
    # Each of the rows (m, k) is multiplied by the weight (k, n) of its expert.
    if len(a.sizes) == 2 and len(b.sizes) == 3:
        return [GroupedGemm(a.sizes[0], b.sizes[2], b.sizes[1], b.sizes[0], dtype, layout)]
    # The gradients of the weights are A (n, rows) times B (rows, k), each over its expert's rows.
    # There are as many experts as ends of their rows, which come after A and B (and their scales).
    experts = next(
        sizes[0]
        for sizes, kind in zip(inputs.dims[2:], inputs.types[2:], strict=False)
        if kind == "int" and len(sizes) == 1
    )
    rows, n = a.sizes[1], a.sizes[0]
    return [GroupedGemm(rows, n, b.sizes[1], experts, dtype, layout, WGRAD)]


def _attention(inputs: OperationInputs, first: int, causal: int, pass_: str) -> list[Work]:
    """Return attention of the queries (batch, heads, queries, width) at ``first``, keys and values.

    ``causal`` is the position of the setting ``is_causal``.
    """
    q, k, v = (_stored(inputs, first + i).sizes for i in range(3))
    batch, heads, queries, width = q
    is_causal = inputs.settings[causal] == "True"
    dtype = _dtype(inputs, first)
    work = Attention(batch, heads, k[1], queries, k[2], width, v[3], dtype, is_causal, pass_=pass_)
    check_positive(work, ("batch", "heads", "kv_heads", "queries", "keys", "width", "value_width"))
    return [work]


def _list(text: str) -> tuple[int, ...]:
    """Read whole numbers such as ``[1, 1]`` or ``1``."""
    match = _NUMBERS.fullmatch(text)
    if match is None:
        raise ValueError("not a list of numbers")
    return tuple(int(part) for part in (match.group(1) or "").split(",") if part)


def _convolution(
    inputs: OperationInputs,
    settings: dict[str, int],
    first: int = 0,
    passes: Sequence[str] = ("fprop",),
) -> list[Work]:
    """Return the passes of the convolution of the input at ``first`` by the filters after it.

    ``settings`` has the position of each setting that the function takes. ``stride`` and
    ``padding`` are always there; the others have PyTorch's defaults.
    """

    def setting(name: str) -> tuple[int, ...]:
        return _list(inputs.settings[settings[name]])

    x, weight = _stored(inputs, first), _stored(inputs, first + 1)
    dimensions = len(x.sizes) - 2
    ones, zeros = (1,) * dimensions, (0,) * dimensions

    def per_dimension(name: str) -> tuple[int, ...]:
        """Return a setting with one number per dimension; a single number is for all of them."""
        numbers = setting(name)
        return numbers * dimensions if len(numbers) == 1 else numbers

    # Filters are (kout, c / groups, r, s), so the sizes give the number of groups.
    groups = setting("groups")[0] if "groups" in settings else x.sizes[1] // weight.sizes[1]
    known = ConvolutionSettings(
        stride=per_dimension("stride"),
        padding=per_dimension("padding"),
        dilation=per_dimension("dilation") if "dilation" in settings else ones,
        transposed="transposed" in settings and inputs.settings[settings["transposed"]] == "True",
        output_padding=per_dimension("output_padding") if "output_padding" in settings else zeros,
        groups=groups,
    )
    return list(convolutions_of(x, weight, known, _dtype(inputs, first), passes))


_PLAIN = {
    "stride": 3, "padding": 4, "dilation": 5, "transposed": 6, "output_padding": 7, "groups": 8,
}  # fmt: skip
_OF_GRADIENTS = {name: place + 1 for name, place in _PLAIN.items()}
_OF_CUDNN = {"padding": 2, "stride": 3, "dilation": 4, "groups": 5}
_OF_MKLDNN = {"padding": 3, "stride": 4, "dilation": 5, "groups": 6}
_OF_DEPTHWISE = {"stride": 4, "padding": 5, "dilation": 6}
_OF_SLOW = {"stride": 4, "padding": 5}  # how PyTorch itself computes on one thread of a CPU


def _gradients(inputs: OperationInputs, settings: dict[str, int], mask_place: int) -> list[Work]:
    """Return the gradients that a call computes, as its mask of outputs says."""
    mask = inputs.settings[mask_place].strip("[]").split(", ")
    asked = zip(("dgrad", "wgrad"), mask, strict=False)
    passes = [name for name, wanted in asked if wanted == "True"]
    return _convolution(inputs, settings, first=1, passes=passes)


_Reader = Callable[[OperationInputs], list[Work]]
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
    "convolution": lambda inputs: _convolution(inputs, _PLAIN),
    "_convolution": lambda inputs: _convolution(inputs, _PLAIN),
    "cudnn_convolution": lambda inputs: _convolution(inputs, _OF_CUDNN),
    "mkldnn_convolution": lambda inputs: _convolution(inputs, _OF_MKLDNN),
    "_conv_depthwise2d": lambda inputs: _convolution(inputs, _OF_DEPTHWISE),
    "_slow_conv2d_forward": lambda inputs: _convolution(inputs, _OF_SLOW),
    "convolution_backward": lambda inputs: _gradients(inputs, _OF_GRADIENTS, 10),
    "_slow_conv2d_backward": lambda inputs: _gradients(inputs, _OF_SLOW, 6),
    f"{_SDPA}flash_attention": lambda inputs: _attention(inputs, 0, 4, FORWARD),
    f"{_SDPA}flash_attention_for_cpu": lambda inputs: _attention(inputs, 0, 4, FORWARD),
    f"{_SDPA}efficient_attention": lambda inputs: _attention(inputs, 0, 6, FORWARD),
    f"{_SDPA}cudnn_attention": lambda inputs: _attention(inputs, 0, 6, FORWARD),
    f"{_SDPA}flash_attention_backward": lambda inputs: _attention(inputs, 1, 11, BACKWARD),
    f"{_SDPA}flash_attention_for_cpu_backward": lambda inputs: _attention(inputs, 1, 7, BACKWARD),
    f"{_SDPA}efficient_attention_backward": lambda inputs: _attention(inputs, 1, 11, BACKWARD),
    f"{_SDPA}cudnn_attention_backward": lambda inputs: _attention(inputs, 1, 14, BACKWARD),
}
