"""Trace each call to PyTorch's RMS norm as one operation, as on a GPU.

Models are traced on the CPU, where PyTorch splits the norm into several operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


@torch.library.custom_op("rooftile::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    """Represent, in a trace, an RMS norm over the last dimensions of ``x``.

    The output has the shape and the dtype of ``x``.
    """
    raise RuntimeError("rooftile::rms_norm can only be traced with fake tensors, not computed.")


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor | None) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("rooftile::rms_norm_backward", mutates_args=())
def rms_norm_backward(gradient: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Represent the backward pass of :func:`rms_norm` in a trace.

    Returns:
        The gradients of the input and of the weight. If there is no weight, the second
        gradient is empty.
    """
    raise RuntimeError(
        "rooftile::rms_norm_backward can only be traced with fake tensors, not computed."
    )


@rms_norm_backward.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(0) if weight is None else torch.empty_like(weight)


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    of_x, of_weight = rms_norm_backward(gradient, x, weight)
    return of_x, None if weight is None else of_weight


rms_norm.register_autograd(_backward, setup_context=_save_operands)


class OneRmsNorm(TorchFunctionMode):
    """Context in which ``torch.nn.functional.rms_norm`` is traced as :func:`rms_norm`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (functional.rms_norm, torch.rms_norm):
            return _instead_of_pytorch(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _instead_of_pytorch(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Call :func:`rms_norm` with the arguments of ``torch.nn.functional.rms_norm``.

    ``eps`` is ignored, because a trace has no values.

    Raises:
        RuntimeError: if ``input.shape`` does not end with ``normalized_shape``.
    """
    if tuple(input.shape[-len(normalized_shape) :]) != tuple(normalized_shape):
        raise RuntimeError(
            f"an RMS norm over {list(normalized_shape)} got an input of shape {list(input.shape)}"
        )
    return rms_norm(input, weight)
