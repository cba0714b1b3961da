"""Settings of a model's step, and the interface and helpers that all sources of models share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kernels.common.checks import check_counts, check_option
from kernels.common.counts import counted
from kernels.common.errors import UserError

TRAIN, PREFILL, DECODE = "train", "prefill", "decode"
IMAGE_SIZE = 224
"""Height and width, in pixels, of the input images if the model does not state their size."""
TORCH_DTYPES = {
    "fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
}  # fmt: skip


@dataclass(frozen=True)
class ModelStep:
    """Settings of one step of a model.

    Attributes:
        batch: number of sequences or images.
        seq: number of tokens per sequence; in a decoding step, the number of earlier tokens.
        tokens: number of new tokens per sequence in a decoding step.
        autocast: True if parameters stay in fp32, and matrix multiplications are computed in
            ``dtype``.
    """

    mode: str = TRAIN
    batch: int = 1
    seq: int = 2048
    tokens: int = 1
    dtype: str = "bf16"
    autocast: bool = False

    def __post_init__(self) -> None:
        check_option("--mode", self.mode, (TRAIN, PREFILL, DECODE))
        check_option("--dtype", self.dtype, tuple(TORCH_DTYPES))
        if self.autocast and TORCH_DTYPES[self.dtype] is torch.float32:
            raise UserError(
                f"--autocast casts to fp16 or bf16, not to {self.dtype}; use --dtype fp16 or "
                "--dtype bf16."
            )
        check_counts(self, "batch", "seq", "tokens")

    @property
    def length(self) -> int:
        """Number of tokens per sequence that the step processes."""
        return self.tokens if self.mode == DECODE else self.seq

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Dtype in which the model is built."""
        return torch.float32 if self.autocast else TORCH_DTYPES[self.dtype]


@dataclass(frozen=True)
class StartedStep:
    """A model that was built with fake tensors, and the forward pass of its step.

    ``call`` runs the forward pass, and returns the loss if the step trains. ``assumptions`` states
    in words what is assumed about the model and its input.
    """

    model: nn.Module
    call: Callable[[], Any]
    assumptions: tuple[str, ...] = ()


class ModelSource(Protocol):
    """Source that lists a model's sizes, and builds the model for a step."""

    @property
    def name(self) -> str:
        """Name of the model in messages and reports."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes that can be changed, by name."""

    @property
    def positions(self) -> int | None:
        """Longest sequence in tokens for which the model was made; None if it is not stated."""

    def start(self, step: ModelStep, changes: Mapping[str, int]) -> StartedStep:
        """Build the model with ``changes`` to its sizes, and prepare the forward pass of the step.

        Call this method within :func:`sweeps.capture.capture.fake_tensors`.

        Raises:
            UserError: if the model cannot be built, or if its input or the step is not supported.
        """


def default_seq(positions: int | None, mode: str, tokens: int) -> int:
    """Return the default of :attr:`ModelStep.seq`: 2,048, or less if ``positions`` is too small.

    In a decoding step, the new tokens need positions, too. The default is at least 1. If
    ``positions`` is None, the default is 2,048.
    """
    if positions is None:
        return ModelStep.seq
    room = positions - tokens if mode == DECODE else positions
    return max(1, min(ModelStep.seq, room))


def tokens_of(step: ModelStep) -> tuple[str, ...]:
    """Return the assumption about the input of a language model, in words."""
    sequences = counted(step.batch, "sequence")
    return (f"a batch of {sequences} of {counted(step.length, 'token')}",)


def images_of(step: ModelStep, height: int, width: int) -> tuple[str, ...]:
    """Return the assumption about the input of an image model, in words."""
    images = counted(step.batch, "image")
    return (f"a batch of {images} of {height} × {width} pixels",)


def refuse_decoding(name: str, step: ModelStep) -> None:
    """Refuse a decoding step of a model for which decoding is not supported.

    Raises:
        UserError: if the step decodes.
    """
    if step.mode == DECODE:
        raise UserError(f"--mode decode is not supported for {name}; use --mode prefill instead.")


def mean_of(result: Any) -> Tensor:
    """Return the mean of the first floating-point tensor in a module's result, as a loss.

    Tensors in nested containers are not found.

    Raises:
        UserError: if the result has no floating-point tensor.
    """
    if isinstance(result, Mapping):
        values = list(result.values())
    elif isinstance(result, Sequence):
        values = list(result)
    else:
        values = [result]
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.float().mean()
    raise UserError(
        "training needs a loss, but the module returns no floating-point tensor. Let its forward "
        "method return such a tensor, or a list or dictionary that directly contains one, or use "
        "--mode prefill."
    )


def first_line(error: Exception) -> str:
    """Return the first informative line of an exception's message.

    If the message is empty, return the name of the exception's class.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    has_heading = len(lines) > 1 and lines[0].endswith(":")
    line = lines[1] if has_heading else lines[0]
    return re.sub(r"^\w*Error: ", "", line)
