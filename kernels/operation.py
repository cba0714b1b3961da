"""Operations, other than GEMMs and convolutions, for which performance guides state rules.

These operations are memory-bound layers, series of GEMMs that share an operand, and LSTM layers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernels.common.checks import check_bytes, check_positive, check_word
from kernels.common.counts import counted
from kernels.common.errors import UserError
from kernels.problem import CONV_LAYOUTS, DTYPE_BYTES, TIMED_DTYPES, Gemm, Problem

LAYERS = {"relu": 1, "gelu": 5, "softmax": 5, "layernorm": 7, "batchnorm": 7, "maxpool": 9}
"""FLOPs per element in the textbook formula of each memory-bound layer.

A comparison, an exp and an erf count as one FLOP each. Max-pool is 3×3 with stride 1, as in the
performance guide that states 2.25 FLOP per byte for max-pool. PyTorch's max-pool also writes a
64-bit index for each element; the minimum traffic does not include these indices.
"""

# Layers with a scale and a shift for each channel.
_LAYERS_WITH_PARAMETERS = ("layernorm", "batchnorm")

GATES = 4
"""Number of gates in an LSTM: the input, forget, cell and output gates."""


class _OperationBase(ABC):
    """Base class that derives bytes and intensity from an operation's FLOPs and elements."""

    __slots__ = ()
    dtype: str

    @property
    @abstractmethod
    def flops(self) -> int:
        """Number of floating-point operations."""

    @property
    @abstractmethod
    def operand_elements(self) -> tuple[int, int, int]:
        """Numbers of elements in the input, the parameters and the result."""

    @property
    def bytes(self) -> int:
        """Minimum traffic in bytes: every operand is read once, and the result is written once."""
        return sum(self.operand_elements) * DTYPE_BYTES[self.dtype]

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOP per byte of minimum traffic."""
        return self.flops / self.bytes


@dataclass(frozen=True, slots=True)
class Layer(_OperationBase):
    """Memory-bound layer on activations (n, c, h, w); the result has the same shape.

    Layer norm and softmax normalise over the channels of each pixel, so activations with h = w = 1
    are n rows of c features. Batch norm normalises each channel over the pixels of all images, with
    the statistics of the batch, as in training.
    """

    op: str
    n: int
    c: int
    h: int
    w: int
    dtype: str
    layout: str = "nhwc"

    def __post_init__(self) -> None:
        check_word("layer", self.op, LAYERS)
        check_positive(self, ("n", "c", "h", "w"))
        check_word("dtype", self.dtype, TIMED_DTYPES)
        check_word("layer layout", self.layout, CONV_LAYOUTS)
        if self.op == "batchnorm" and self.n * self.h * self.w == 1:
            raise UserError(
                "batchnorm needs more than one value per channel; give a larger n, h or w."
            )
        check_bytes(self)

    @property
    def elements(self) -> int:
        """Number of elements in the activations."""
        return self.n * self.c * self.h * self.w

    @property
    def flops(self) -> int:
        """Number of floating-point operations in the textbook formula, over all elements."""
        return LAYERS[self.op] * self.elements

    @property
    def operand_elements(self) -> tuple[int, int, int]:
        """Numbers of elements in the activations, in the scales and shifts, and in the result."""
        parameters = 2 * self.c if self.op in _LAYERS_WITH_PARAMETERS else 0
        return self.elements, parameters, self.elements

    @property
    def products(self) -> tuple[tuple[int, Gemm], ...]:
        """Empty tuple, because a memory-bound layer has no GEMMs."""
        return ()

    @property
    def shape_class(self) -> str:
        """Shape class in reports: every layer is ``memory-bound``."""
        return "memory-bound"

    def columns(self) -> dict[str, Any]:
        """Return the values of the layer's columns in measurements.csv."""
        return {
            "op": self.op,
            "batch": self.n,
            "c": self.c,
            "h": self.h,
            "w": self.w,
            "dtype": self.dtype,
            "layout": self.layout,
        }

    @classmethod
    def from_columns(cls, row: Mapping[str, Any]) -> Layer:
        """Create a layer from its columns in measurements.csv."""
        n = int(row["batch"])
        c = int(row["c"])
        h = int(row["h"])
        w = int(row["w"])
        return cls(row["op"], n, c, h, w, row["dtype"], row["layout"])

    def __str__(self) -> str:
        pixels = f"×{self.h}×{self.w} {self.layout}" if self.h * self.w > 1 else ""
        return f"{self.op} {self.n}×{self.c}{pixels} {self.dtype}"


SERIES = ("projections", "timesteps")


@dataclass(frozen=True, slots=True)
class Series(_OperationBase):
    """``count`` GEMMs (m, k) @ (k, n) that share an operand and could be fused into one GEMM.

    - ``projections`` share the input and have one weight each, like Q, K and V or the gates of an
      LSTM.
    - ``timesteps`` share the weight and have one input each, like the steps of a sequence.

    A weight is stored as (n, k), as in a linear layer.
    """

    op: str
    count: int
    m: int
    n: int
    k: int
    dtype: str

    def __post_init__(self) -> None:
        check_word("series", self.op, SERIES)
        check_positive(self, ("count", "m", "n", "k"))
        check_word("dtype", self.dtype, TIMED_DTYPES)
        check_bytes(self)

    @property
    def products(self) -> tuple[tuple[int, Gemm], ...]:
        """One pair: ``count``, and the GEMM that the series computes ``count`` times."""
        return ((self.count, Gemm(self.m, self.n, self.k, self.dtype, "nt")),)

    @property
    def fused(self) -> Gemm:
        """The whole series as one GEMM."""
        if self.op == "projections":
            return Gemm(self.m, self.n * self.count, self.k, self.dtype, "nt")
        return Gemm(self.m * self.count, self.n, self.k, self.dtype, "nt")

    @property
    def flops(self) -> int:
        """Number of floating-point operations in all GEMMs."""
        return self.fused.flops

    @property
    def operand_elements(self) -> tuple[int, int, int]:
        """Numbers of elements in the inputs, the weights and the results."""
        return self.fused.operand_elements

    @property
    def shape_class(self) -> str:
        """Shape class in reports: ``projections`` or ``timesteps``."""
        return self.op

    def columns(self) -> dict[str, Any]:
        """Return the values of the series' columns in measurements.csv."""
        return {
            "op": self.op,
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "batch": self.count,
            "dtype": self.dtype,
            "layout": "nt",
        }

    @classmethod
    def from_columns(cls, row: Mapping[str, Any]) -> Series:
        """Create a series from its columns in measurements.csv."""
        count = int(row["batch"])
        m = int(row["m"])
        n = int(row["n"])
        k = int(row["k"])
        return cls(row["op"], count, m, n, k, row["dtype"])

    def __str__(self) -> str:
        return f"{self.op} {self.count}× {self.m}×{self.n}×{self.k} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Lstm(_OperationBase):
    """Forward pass of one LSTM layer without biases, on ``steps`` inputs (minibatch, features)."""

    steps: int
    minibatch: int
    hidden: int
    features: int
    dtype: str

    op = "lstm"

    def __post_init__(self) -> None:
        check_positive(self, ("steps", "minibatch", "hidden", "features"))
        check_word("dtype", self.dtype, TIMED_DTYPES)
        check_bytes(self)

    @property
    def weight_scale(self) -> float:
        """Factor by which normally distributed values are multiplied to obtain weights.

        The factor is about 1/√(features + hidden), so that gates do not saturate. It is a power of
        two, so that the multiplication is exact unless the result is subnormal.
        """
        return 2.0 ** -round(math.log2(self.features + self.hidden) / 2)

    @property
    def products(self) -> tuple[tuple[int, Gemm], ...]:
        """GEMMs of the layer, as pairs (number of times, GEMM).

        The first GEMM multiplies the inputs of all steps by the input weights. The second GEMM
        multiplies one hidden state by the recurrent weights, and runs once per step.
        """
        gate_columns = GATES * self.hidden
        rows = self.steps * self.minibatch
        return (
            (1, Gemm(rows, gate_columns, self.features, self.dtype, "nt")),
            (self.steps, Gemm(self.minibatch, gate_columns, self.hidden, self.dtype, "nt")),
        )

    @property
    def flops(self) -> int:
        """Number of floating-point operations in all GEMMs.

        The elementwise arithmetic of the gates is not counted.
        """
        return sum(count * gemm.flops for count, gemm in self.products)

    @property
    def operand_elements(self) -> tuple[int, int, int]:
        """Numbers of elements in all inputs, in both weight matrices, and in all hidden states."""
        rows = self.steps * self.minibatch
        weights = GATES * self.hidden * (self.features + self.hidden)
        return rows * self.features, weights, rows * self.hidden

    @property
    def shape_class(self) -> str:
        """Shape class in reports: ``lstm``."""
        return self.op

    def columns(self) -> dict[str, Any]:
        """Return the values of the LSTM's columns in measurements.csv.

        ``m``, ``n`` and ``k`` are the sizes of a GEMM that multiplies the input of one step by the
        input weights, and ``batch`` is the number of steps.
        """
        return {
            "op": self.op,
            "m": self.minibatch,
            "n": GATES * self.hidden,
            "k": self.features,
            "batch": self.steps,
            "dtype": self.dtype,
        }

    @classmethod
    def from_columns(cls, row: Mapping[str, Any]) -> Lstm:
        """Create an LSTM from its columns in measurements.csv."""
        steps = int(row["batch"])
        minibatch = int(row["m"])
        gate_columns = int(row["n"])
        features = int(row["k"])
        return cls(steps, minibatch, gate_columns // GATES, features, row["dtype"])

    def __str__(self) -> str:
        return (
            f"lstm {counted(self.steps, 'step')} of {self.minibatch}×{self.features} -> "
            f"{self.hidden} {self.dtype}"
        )


Operation = Layer | Series | Lstm
Workload = Problem | Operation
"""A GEMM, a convolution, or one of the other operations."""

_KINDS: dict[str, type[Layer] | type[Series] | type[Lstm]] = {
    **dict.fromkeys(LAYERS, Layer),
    **dict.fromkeys(SERIES, Series),
    Lstm.op: Lstm,
}

OPERATIONS = tuple(_KINDS)
"""Names of all operations other than ``gemm`` and ``conv``."""


def as_problem(workload: Workload) -> Problem:
    """Return the workload if it is a GEMM or a convolution.

    Raises:
        TypeError: if the workload is another operation.
    """
    if isinstance(workload, Operation):
        raise TypeError(f"{workload} is neither a GEMM nor a convolution.")
    return workload


def products_of(workload: Workload) -> tuple[tuple[int, Problem], ...]:
    """Return a workload's GEMMs or convolution, as pairs (number of times, problem).

    The result is empty for a memory-bound layer.
    """
    return workload.products if isinstance(workload, Operation) else ((1, workload),)


def operation_of(row: Mapping[str, Any]) -> Operation:
    """Create the operation that a row of measurements.csv describes."""
    return _KINDS[row["op"]].from_columns(row)
