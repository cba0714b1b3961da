"""A model's step: what it computes, the model that is built for it, and where models come from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kernels.common.checks import check_counts, check_option
from kernels.common.errors import UserError

TRAIN, PREFILL, DECODE = "train", "prefill", "decode"
TORCH_DTYPES = {
    "fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
}  # fmt: skip


@dataclass(frozen=True)
class ModelStep:
    """What a step computes: on how many sequences of which length, forwards or both ways.

    ``mode`` is ``train``, ``prefill`` or ``decode``, ``dtype`` fp32, tf32, fp16 or bf16.
    ``autocast`` keeps parameters in fp32 and multiplies in ``dtype``. When decoding, ``tokens`` new
    tokens of each sequence are computed, after ``seq`` that are known.
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
            raise UserError(f"--autocast casts to fp16 or bf16, not to {self.dtype}.")
        check_counts(self, "batch", "seq", "tokens")

    @property
    def length(self) -> int:
        """Tokens of each sequence that are computed."""
        return self.tokens if self.mode == DECODE else self.seq

    @property
    def parameter_dtype(self) -> torch.dtype:
        """In which the model is built."""
        return torch.float32 if self.autocast else TORCH_DTYPES[self.dtype]


@dataclass(frozen=True)
class StartedStep:
    """A model that is built, where tensors are fake, and its step's forward pass.

    ``call`` returns the loss where the step trains; else nobody looks at what it returns.
    """

    model: nn.Module
    call: Callable[[], Any]
    assumptions: tuple[str, ...] = ()


class ModelSource(Protocol):
    """Where a model comes from."""

    @property
    def name(self) -> str:
        """What it was asked for as."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Its sizes by name, those that may be changed."""

    def start(self, step: ModelStep, changes: Mapping[str, int]) -> StartedStep:
        """Build it with some sizes changed. To be called where tensors are fake."""


def tokens_of(step: ModelStep) -> tuple[str, ...]:
    """What is assumed of a language model's input."""
    tokens = "1 token" if step.length == 1 else f"{step.length:,} tokens"
    return (f"a batch of {step.batch}, {tokens} each",)


def refuse_decoding(name: str, step: ModelStep) -> None:
    """
    Raises:
        UserError: the step decodes, which a model of other things than tokens does not.
    """
    if step.mode == DECODE:
        raise UserError(
            f"{name} does not decode one token at a time: use --mode prefill with the sizes of "
            "such a step."
        )


def mean_of(result: Any) -> Tensor:
    """A loss of whatever a module returns."""
    if isinstance(result, Tensor) and result.is_floating_point():
        return result.float().mean()
    values = result.values() if isinstance(result, Mapping) else result
    for value in values if isinstance(values, Sequence) or values is not result else ():
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.float().mean()
    raise UserError(
        "the module returns no floating-point tensor, so there is no loss to differentiate."
    )


def first_line(error: Exception) -> str:
    """What an exception says, in one line: of an announcement, what it announces."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        return re.sub(r"^\w*Error: ", "", lines[1])
    return lines[0] if lines else type(error).__name__
