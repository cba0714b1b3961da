"""Trace each call to the attention function of PyTorch or transformers as one operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

NAME = "rooftile"
"""Name under which :func:`for_transformers` is registered with transformers."""


@torch.library.custom_op("rooftile::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int) -> Tensor:
    """Represent a call to attention in a trace.

    The queries ``q``, the keys ``k`` and the values ``v`` are (batch, heads, length, width). Keys
    and values may have fewer heads than the queries. The output is (batch, heads of the queries,
    number of queries, width of the values). ``window`` is the largest number of keys that a query
    sees; 0 means no limit.
    """
    raise RuntimeError("rooftile::attention can only be traced with fake tensors, not computed.")


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int) -> Tensor:
    # Fused kernels store the result as (batch, length, heads, width) and return a view of it.
    batch, heads, queries, _ = q.shape
    return q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)


@torch.library.custom_op("rooftile::attention_backward", mutates_args=())
def attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Represent the backward pass of :func:`attention` in a trace."""
    raise RuntimeError(
        "rooftile::attention_backward can only be traced with fake tensors, not computed."
    )


@attention_backward.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, causal, window = inputs
    ctx.save_for_backward(q, k, v, output)  # fused kernels need the output, too
    ctx.mask = (causal, window)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    q, k, v, _ = ctx.saved_tensors
    return (*attention_backward(gradient, q, k, v, *ctx.mask), None, None)


attention.register_autograd(_backward, setup_context=_save_operands)


class OneAttention(TorchFunctionMode):
    """Context in which ``scaled_dot_product_attention`` is traced as :func:`attention`.

    A torch function mode intercepts calls even from code that imported the function by name.
    PyTorch's own modules may call the function while no mode is active, so the function is also
    replaced in ``torch.nn.functional``. The fast path of these modules does not call the function,
    so the context disables the fast path.
    """

    def __enter__(self) -> OneAttention:
        self._pytorch_attention = functional.scaled_dot_product_attention
        self._had_fast_path = torch.backends.mha.get_fastpath_enabled()
        functional.scaled_dot_product_attention = _trace_pytorch  # type: ignore[assignment]
        torch.backends.mha.set_fastpath_enabled(False)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        functional.scaled_dot_product_attention = self._pytorch_attention
        torch.backends.mha.set_fastpath_enabled(self._had_fast_path)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is self._pytorch_attention:
            return _trace_pytorch(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _trace_pytorch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> Tensor:
    """Call :func:`attention` with the arguments of ``scaled_dot_product_attention``.

    The operands are (…, heads, length, width) or (length, width). Dimensions before the heads are
    broadcast. A single query head is broadcast to the heads of the keys. ``attn_mask``,
    ``dropout_p`` and all ``others``, such as ``scale``, are ignored.
    """
    # The operands are cast first, because casting a broadcast operand would copy it.
    query = _cast(query)
    key = _cast(key)
    value = _cast(value)
    has_one_query_head = query.dim() == 2 or query.shape[-3] == 1
    if has_one_query_head and key.dim() > 2:
        query = query.expand(*query.shape[:-3], key.shape[-3], *query.shape[-2:])
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    operands = []
    for tensor in (query, key, value):
        heads = tensor.shape[-3] if tensor.dim() > 2 else 1
        length, width = tensor.shape[-2:]
        broadcast = tensor.expand(*batch, *tensor.shape[-3:])
        operands.append(broadcast.reshape(-1, heads, length, width))
    result = attention(*operands, is_causal, 0)
    return result.reshape(*batch, *query.shape[-3:-1], value.shape[-1])


def _cast(tensor: Tensor) -> Tensor:
    """Cast an operand of attention as autocast would."""
    if not torch.is_autocast_enabled("cpu"):
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def for_transformers(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Trace attention with the arguments of transformers' ``AttentionInterface``.

    If ``is_causal`` is None, attention is causal unless the module's attribute ``is_causal`` is
    False. ``attention_mask``, ``scaling`` and ``dropout`` are ignored.

    Returns:
        The result (batch, length, heads, width), and None in place of the attention weights.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    q = _cast(query)
    k = _cast(key)
    v = _cast(value)
    mixed = attention(q, k, v, bool(causal), int(sliding_window or 0))
    return mixed.transpose(1, 2), None
