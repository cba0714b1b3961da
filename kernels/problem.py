"""GEMMs and convolutions as problems to compute, with their FLOPs and bytes.

Sizes are numbers of elements. A multiply-add counts as two FLOPs. Bytes are the minimum memory
traffic that every implementation needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from numbers import Integral
from operator import index

from kernels.common.checks import check_bytes, check_positive, check_word, is_whole
from kernels.common.errors import UserError

DTYPE_BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Bytes that one element of an operand takes in memory, by dtype.

``tf32`` is stored as fp32 and multiplied with 10 mantissa bits. An ``fp8`` GEMM has a 16-bit
result. The time of such a GEMM includes quantising the activations A from 16 bits, because a
neural network quantises them in every run.
"""

TIMED_DTYPES = tuple(dtype for dtype in DTYPE_BYTES if dtype != "fp8")
"""Dtypes that a sweep can time. Times in fp8 can only be imported."""

FP8_INCLUDES = "including the quantisation of the activations"

# Bytes of a 16-bit element: in an fp8 GEMM, A before its quantisation, and the result.
_HALF_BYTES = 2

GEMM_LAYOUTS = ("nn", "nt", "tn", "tt")
CONV_LAYOUTS = ("nhwc", "nchw")
PASSES = ("fprop", "dgrad", "wgrad")

WIDE_BYTES = 16
"""Size in bytes of a thread's widest copy, which is also the alignment that TMA requires.

Rows are called aligned if their length in bytes is a multiple of this number.
"""

# Thresholds of the shape classes, which only group shapes in reports.
_SMALL_FLOPS = 2.0 * 512**3  # FLOPs below which a GPU's time is mostly the launch
_SKINNY = 128  # largest value of the smaller of M and N in a skinny GEMM: one large tile
_LONG_K = 4  # smallest ratio of K to the larger of M and N in a long-k GEMM
_NARROW_CHANNELS = 64  # fewer channels are narrow; tuning guides advise multiples of at least 64


def _alignment(sizes: list[int], dtype: str) -> int:
    """Return the largest power of two, at most 16, that divides each of the sizes in bytes."""
    return math.gcd(WIDE_BYTES, *(size * DTYPE_BYTES[dtype] for size in sizes))


@dataclass(frozen=True, slots=True)
class Gemm:
    """GEMM ``C = A B`` with logical shapes (m, k) @ (k, n) -> (m, n), ``batch`` times.

    ``layout`` has one letter for A and one for B: ``n`` if the matrix is stored row-major, and
    ``t`` if the transpose of the matrix is stored row-major. A linear layer ``y = x Wᵀ`` therefore
    has the layout ``nt``. C is stored row-major.
    """

    m: int
    n: int
    k: int
    dtype: str
    layout: str = "nt"
    batch: int = 1

    def __post_init__(self) -> None:
        check_positive(self, ("m", "n", "k", "batch"))
        check_word("dtype", self.dtype, DTYPE_BYTES)
        check_word("GEMM layout", self.layout, GEMM_LAYOUTS)
        check_bytes(self)

    op = "gemm"

    @property
    def flops(self) -> int:
        """Number of floating-point operations: 2 · batch · m · n · k."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Minimum traffic in bytes: A, B and C, each read or written once.

        The traffic of quantising A is not included.
        """
        a, b, c = self.operand_elements
        return self.batch * ((a + b) * DTYPE_BYTES[self.dtype] + c * self.result_bytes)

    @property
    def result_bytes(self) -> int:
        """Bytes that one element of C takes in memory."""
        return _HALF_BYTES if self.dtype == "fp8" else DTYPE_BYTES[self.dtype]

    @property
    def quantising_bytes(self) -> int:
        """Traffic of quantising A to fp8, in bytes; 0 for other dtypes."""
        if self.dtype != "fp8":
            return 0
        return self.batch * self.operand_elements[0] * (_HALF_BYTES + DTYPE_BYTES["fp8"])

    @property
    def operand_elements(self) -> tuple[int, int, int]:
        """Numbers of elements in A, B and C, for one GEMM of the batch."""
        return self.m * self.k, self.k * self.n, self.m * self.n

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOP per byte of minimum traffic."""
        return self.flops / self.bytes

    @property
    def implied_gemm(self) -> Gemm:
        """This GEMM itself, so that callers can treat a GEMM and a :class:`Conv` alike."""
        return self

    @property
    def row_dimensions(self) -> tuple[str, ...]:
        """Names of the dimensions along the stored rows of A, B and C."""
        a_row = "k" if self.layout[0] == "n" else "m"
        b_row = "n" if self.layout[1] == "n" else "k"
        return a_row, b_row, "n"

    @property
    def alignment(self) -> int:
        """Largest power of two, at most 16, that divides the length in bytes of every stored row.

        In fp8, the length of the rows of C is computed with one byte per element, although an
        element of C is stored in two bytes.
        """
        return _alignment([getattr(self, name) for name in self.row_dimensions], self.dtype)

    @property
    def shape_class(self) -> str:
        """First shape class that fits: misaligned, batched, small, skinny, long-k or large."""
        if self.alignment < WIDE_BYTES:
            return "misaligned"
        if self.batch > 1:
            return "batched"
        if self.flops < _SMALL_FLOPS:
            return "small"
        if min(self.m, self.n) <= _SKINNY:
            return "skinny"
        if self.k >= _LONG_K * max(self.m, self.n):
            return "long-k"
        return "large"

    def spec(self) -> str:
        """Return the value of ``--gemm`` for this GEMM: ``M,N,K,dtype,layout,batch``."""
        return f"{self.m},{self.n},{self.k},{self.dtype},{self.layout},{self.batch}"

    def __str__(self) -> str:
        batch = f"{self.batch}× " if self.batch > 1 else ""
        includes = f", {FP8_INCLUDES}" if self.dtype == "fp8" else ""
        return f"{batch}{self.m}×{self.n}×{self.k} {self.dtype} {self.layout}{includes}"

    @classmethod
    def parse(cls, text: str) -> Gemm:
        """Parse ``M,N,K,dtype[,layout[,batch]]``.

        Raises:
            UserError: if the text is not in this form, or does not describe a valid GEMM.
        """
        form = "M,N,K,dtype[,layout[,batch]]"
        parts = [part.strip() for part in text.split(",")]
        if not 4 <= len(parts) <= 6:
            raise UserError(
                f"--gemm takes {form}, not {text!r}; an example is 4096,4096,4096,bf16."
            )
        m = _parse_whole(parts[0], "M", form)
        n = _parse_whole(parts[1], "N", form)
        k = _parse_whole(parts[2], "K", form)
        layout = parts[4] if len(parts) > 4 else "nt"
        batch = _parse_whole(parts[5], "batch", form) if len(parts) > 5 else 1
        return cls(m, n, k, parts[3].lower(), layout.lower(), batch)


@dataclass(frozen=True, slots=True)
class Conv:
    """2-D convolution, or one of its gradients.

    The input is (n, c, h, w), the filter (kout, c/groups, r, s) and the output (n, kout, p, q).
    ``pass_`` names the tensor to compute: the output (``fprop``), the input's gradient (``dgrad``)
    or the filter's gradient (``wgrad``). ``stride``, ``padding`` and ``dilation`` are (vertical,
    horizontal) pairs. ``layout`` is the memory order of the activations and the filter: ``nhwc``
    (channels last) or ``nchw``.
    """

    n: int
    c: int
    h: int
    w: int
    kout: int
    r: int
    s: int
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    dtype: str
    layout: str = "nhwc"
    pass_: str = "fprop"

    op = "conv"

    def __post_init__(self) -> None:
        # 1. Check each field.
        check_positive(self, ("n", "c", "h", "w", "kout", "r", "s", "groups"))
        if self.dtype == "fp8":
            raise UserError(
                "fp8 is available only for GEMMs, not for convolutions; use another dtype."
            )
        check_word("dtype", self.dtype, TIMED_DTYPES)
        check_word("conv layout", self.layout, CONV_LAYOUTS)
        check_word("pass", self.pass_, PASSES)
        for name, minimum in (("stride", 1), ("padding", 0), ("dilation", 1)):
            pair = getattr(self, name)
            if isinstance(pair, Integral):  # one number stands for both directions
                pair = (pair, pair)
            # NumPy's integers are replaced by Python's, which do not overflow.
            vertical, horizontal = map(index, pair)
            if min(vertical, horizontal) < minimum:
                text = pair_text((vertical, horizontal))
                raise UserError(f"{name} must be at least {minimum}, not {text}.")
            object.__setattr__(self, name, (vertical, horizontal))  # the dataclass is frozen
        # 2. Check that the fields fit together.
        if self.c % self.groups or self.kout % self.groups:
            raise UserError(
                f"groups={self.groups} must divide the input channels ({self.c}) and the output "
                f"channels ({self.kout})."
            )
        if min(self.p, self.q) < 1:
            raise UserError(
                f"a {self.r}×{self.s} filter does not fit into {self.h}×{self.w} pixels with this "
                "padding and dilation; give a larger image or more padding."
            )
        check_bytes(self)

    @property
    def p(self) -> int:
        """Height of the output in pixels."""
        reach = self.dilation[0] * (self.r - 1) + 1
        return (self.h + 2 * self.padding[0] - reach) // self.stride[0] + 1

    @property
    def q(self) -> int:
        """Width of the output in pixels."""
        reach = self.dilation[1] * (self.s - 1) + 1
        return (self.w + 2 * self.padding[1] - reach) // self.stride[1] + 1

    @property
    def flops(self) -> int:
        """Number of floating-point operations, the same for all passes.

        Multiplications by the zeros of the padding are counted, as is usual.
        """
        return 2 * self.n * self.p * self.q * self.kout * (self.c // self.groups) * self.r * self.s

    @property
    def operand_elements(self) -> tuple[int, int, int]:
        """Numbers of elements in the input, the filter and the output."""
        return (
            self.n * self.c * self.h * self.w,
            self.kout * (self.c // self.groups) * self.r * self.s,
            self.n * self.kout * self.p * self.q,
        )

    @property
    def bytes(self) -> int:
        """Minimum traffic in bytes: the input, filter and output, each read or written once.

        If a stride is larger than the filter, the skipped input pixels are counted only in dgrad,
        which writes them.
        """
        all_inputs, filters, outputs = self.operand_elements
        if self.pass_ == "dgrad":
            inputs = all_inputs
        else:
            rows = _rows_read(self.h, self.p, self.r, self.stride[0])
            columns = _rows_read(self.w, self.q, self.s, self.stride[1])
            inputs = self.n * self.c * rows * columns
        return (inputs + filters + outputs) * DTYPE_BYTES[self.dtype]

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOP per byte of minimum traffic."""
        return self.flops / self.bytes

    @property
    def implied_gemm(self) -> Gemm:
        """GEMM to which an implicit-GEMM kernel maps this convolution (CUTLASS's convention).

        The GEMM's ``batch`` is the number of groups. If c and kout are the numbers of channels in
        one group, the GEMM's (m, n, k) is:

        - (n·p·q, kout, c·r·s) for fprop,
        - (n·h·w, c, kout·r·s) for dgrad,
        - (kout, c·r·s, n·p·q) for wgrad.

        For a strided dgrad, this GEMM usually has more FLOPs than :attr:`flops`, because many
        elements of the GEMM's left operand are zero.
        """
        c, kout = self.c // self.groups, self.kout // self.groups
        pixels = self.n * self.p * self.q
        taps = self.r * self.s
        m, n, k = {
            "fprop": (pixels, kout, c * taps),
            "dgrad": (self.n * self.h * self.w, c, kout * taps),
            "wgrad": (kout, c * taps, pixels),
        }[self.pass_]
        return Gemm(m, n, k, self.dtype, "nt", self.groups)

    def winograd_gemm(self, tile: int) -> Gemm | None:
        """Return the batched GEMM of the Winograd algorithm F(tile × tile, 3 × 3).

        For each pair of an input and an output channel, a block of ``tile``² outputs takes
        (``tile`` + 2)² multiplications instead of 9 · ``tile``² (Lavin and Gray, arXiv 1509.09308).
        The result is None for ``wgrad``, for several groups, for a stride or a dilation above 1,
        and for a filter that is not 3 × 3.
        """
        is_plain = (self.stride, self.dilation, self.groups) == ((1, 1), (1, 1), 1)
        if (self.r, self.s) != (3, 3) or not is_plain or self.pass_ == "wgrad":
            return None
        # The input's gradient is also a convolution: it reads the output's gradient.
        if self.pass_ == "fprop":
            height, width, channels_in, channels_out = self.p, self.q, self.c, self.kout
        else:
            height, width, channels_in, channels_out = self.h, self.w, self.kout, self.c
        tiles = self.n * math.ceil(height / tile) * math.ceil(width / tile)
        points = (tile + 2) ** 2
        return Gemm(tiles, channels_out, channels_in, self.dtype, "nt", points)

    @property
    def row_dimensions(self) -> tuple[str, ...]:
        """Names of the fields that hold the numbers of input and output channels."""
        return "c", "kout"

    @property
    def alignment(self) -> int:
        """Largest power of two, at most 16, that divides the size in bytes of a group's channels.

        It divides the size of the channels in an input pixel and in an output pixel.
        """
        return _alignment([self.c // self.groups, self.kout // self.groups], self.dtype)

    @property
    def shape_class(self) -> str:
        """Shape class: the pass and a kind.

        The kind is the first that fits: grouped, misaligned, narrow or wide.
        """
        if self.groups > 1:
            kind = "grouped"
        elif self.alignment < WIDE_BYTES:
            kind = "misaligned"
        elif min(self.c, self.kout) < _NARROW_CHANNELS:
            kind = "narrow"
        else:
            kind = "wide"
        return f"{self.pass_} {kind}"

    def spec(self) -> str:
        """Return the value of ``--conv`` for this convolution, with all its fields."""
        values = [getattr(self, field.name) for field in fields(self)]
        texts = [pair_text(value) if isinstance(value, tuple) else str(value) for value in values]
        return ",".join(texts)

    def __str__(self) -> str:
        unusual_geometry = ""
        if self.stride != (1, 1):
            unusual_geometry += f" stride {pair_text(self.stride)}"
        if self.padding != (0, 0):
            unusual_geometry += f" padding {pair_text(self.padding)}"
        if self.dilation != (1, 1):
            unusual_geometry += f" dilation {pair_text(self.dilation)}"
        groups = f" groups {self.groups}" if self.groups > 1 else ""
        return (
            f"{self.pass_} {self.n}×{self.c}×{self.h}×{self.w} -> {self.kout}, "
            f"{self.r}×{self.s}{unusual_geometry}{groups} {self.dtype} {self.layout}"
        )

    @classmethod
    def parse(cls, text: str) -> Conv:
        """Parse ``N,C,H,W,KOUT,R,S,stride,padding,dilation,groups,dtype[,layout[,pass]]``.

        Raises:
            UserError: if the text is not in this form, or does not describe a valid convolution.
        """
        form = "N,C,H,W,KOUT,R,S,stride,padding,dilation,groups,dtype[,layout[,pass]]"
        parts = [part.strip() for part in text.split(",")]
        if not 12 <= len(parts) <= 14:
            raise UserError(
                f"--conv takes {form}, not {text!r}; an example is 32,64,56,56,64,3,3,1,1,1,1,bf16."
            )
        names = ("N", "C", "H", "W", "KOUT", "R", "S")
        sizes = [
            _parse_whole(part, name, form) for part, name in zip(parts[:7], names, strict=True)
        ]
        pairs = [
            parse_pair(part, name)
            for part, name in zip(parts[7:10], ("stride", "padding", "dilation"), strict=True)
        ]
        groups = _parse_whole(parts[10], "groups", form)
        words = [part.lower() for part in parts[11:]]  # dtype, then optionally layout and pass
        return cls.build(sizes, pairs, groups, *words)

    @classmethod
    def build(
        cls,
        sizes: Iterable[int],
        pairs: Iterable[tuple[int, int]],
        groups: int,
        dtype: str,
        layout: str = "nhwc",
        pass_: str = "fprop",
    ) -> Conv:
        """Create a convolution from (n, c, h, w, kout, r, s) and (stride, padding, dilation)."""
        n, c, h, w, kout, r, s = sizes
        stride, padding, dilation = pairs
        return cls(n, c, h, w, kout, r, s, stride, padding, dilation, groups, dtype, layout, pass_)


def _rows_read(size: int, positions: int, taps: int, stride: int) -> int:
    """Return an upper bound on the number of input rows (or columns) that a filter reads."""
    # If the stride is at most the filter's size, all rows count as read. A dilated filter may skip
    # some of them, and the last position may end before the last row.
    return min(size, positions * taps) if stride > taps else size


Problem = Gemm | Conv


def linear(tokens: int, features_in: int, features_out: int, dtype: str) -> dict[str, Gemm]:
    """Return the three GEMMs of a linear layer in training, in the layouts of PyTorch's autograd.

    - ``forward`` is y (tokens, out) = x Wᵀ.
    - ``dgrad`` is dx (tokens, in) = dy W.
    - ``wgrad`` is dW (out, in) = dyᵀ x.
    """
    return {
        "forward": Gemm(tokens, features_out, features_in, dtype, "nt"),
        "dgrad": Gemm(tokens, features_in, features_out, dtype, "nn"),
        "wgrad": Gemm(features_out, features_in, tokens, dtype, "tn"),
    }


def pair_text(pair: tuple[int, int]) -> str:
    """Format a (vertical, horizontal) pair: (2, 2) as ``2``, and (2, 1) as ``2x1``."""
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}x{pair[1]}"


def parse_pair(text: str, name: str) -> tuple[int, int]:
    """Parse ``2`` or ``2x1`` into (vertical, horizontal); the error message contains ``name``.

    Raises:
        UserError: if the text is neither a whole number nor two whole numbers joined by ``x``.
    """
    parts = text.split("x")
    if len(parts) > 2 or not all(map(is_whole, parts)):
        raise UserError(f"{name} must be one number such as 2, or two such as 2x1, not {text!r}.")
    values = [int(part) for part in parts]
    return values[0], values[-1]  # a single number stands for both directions


def _parse_whole(text: str, name: str, form: str) -> int:
    """Parse a whole number of at least 1; the error message contains ``name`` and ``form``."""
    if not is_whole(text) or int(text) < 1:
        raise UserError(f"{name} in {form} must be a whole number of at least 1, not {text!r}.")
    return int(text)
