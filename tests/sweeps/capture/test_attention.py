"""Calls to attention are captured with the shapes that PyTorch computes."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.common.errors import UserError
from kernels.problem import Gemm
from sweeps.capture.capture import capture
from sweeps.capture.captured import Attention
from sweeps.capture.sources import find_source
from sweeps.capture.step import ModelStep
from tests.support.captures import SMALL, products_of

of = functools.partial(products_of, __name__)


class Latents(nn.Module):
    """Attention of queries without a batch dimension of their own to a batch of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.empty(1, 2, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        result = functional.scaled_dot_product_attention(self.queries, x, x)
        assert result.shape == (4, 2, 8, 16)
        return result


def latents() -> nn.Module:
    return Latents()


def test_batches_of_attention_are_broadcast() -> None:
    products = of("latents", "x[4,2,32,16]")
    assert {p.work.batch for p in products if isinstance(p.work, Attention)} == {4}


class Pooled(nn.Module):
    """Attention of one query head to several heads of keys, with and without a batch."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, heads, length, width) to (batch, heads, 1, width)."""
        query = x[:, :1, :1]
        pooled = functional.scaled_dot_product_attention(query, x, x)
        return pooled + functional.scaled_dot_product_attention(query[0], x[0], x[0])


def pooled() -> nn.Module:
    return Pooled()


def test_one_query_head_attends_to_the_keys_of_every_head() -> None:
    module, x = Pooled(), torch.randn(2, 3, 5, 8)
    assert module(x).shape == (2, 3, 1, 8)
    works = [p.work for p in of("pooled", "x[2,3,5,8]", step=ModelStep("prefill"))]
    batched = Attention(2, 3, 3, queries=1, keys=5, width=8, value_width=8, dtype="bf16")
    assert works == [batched, replace(batched, batch=1)]


class SharedQuery(nn.Module):
    """Attention of one matrix of queries, without a dimension for heads, to all heads of keys."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (heads, length, width) to the same shape."""
        result = functional.scaled_dot_product_attention(x[0], x, x)
        assert result.shape == x.shape
        return result


def shared_query() -> nn.Module:
    return SharedQuery()


def test_queries_without_heads_attend_to_the_keys_of_every_head() -> None:
    SharedQuery()(torch.randn(3, 5, 8))
    (work,) = {p.work for p in of("shared_query", "x[3,5,8]", step=ModelStep("prefill"))}
    assert work == Attention(1, 3, 3, queries=5, keys=5, width=8, value_width=8, dtype="bf16")


def test_an_operand_is_cast_before_it_is_broadcast() -> None:
    step = ModelStep("prefill", autocast=True)
    captured = capture(find_source(f"{__name__}:pooled", inputs=["x[2,3,5,8]"]), step)
    moved = {moved.what: moved.bytes for moved in captured.moved}
    # For each of the three images, the query is one vector. The keys and the values are 15 vectors
    # each. A cast reads 4 bytes per element, and writes 2.
    vectors = 3 * (1 + 15 + 15)
    # The queries of two images are a slice. The results of 3 heads for each image are added, too.
    sliced = 2 * 8 * (4 + 2)
    added = 3 * (2 + 1 + 2) * 8 * 2
    assert moved["copies and casts"] == vectors * 8 * (4 + 2) - sliced
    assert moved["strided access"] == sliced + added


def test_sizes_of_attention_are_positive() -> None:
    with pytest.raises(UserError, match="kv_heads must be a whole number of at least 1"):
        Attention(1, 8, 0, 16, 16, 64, 64, "bf16")


def encoder(width: int = 32) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 3)


@pytest.mark.parametrize("mode", ["train", "prefill"])
def test_pytorch_s_own_attention_is_one_operation(mode: str) -> None:
    products = of("encoder", "x[2,128,32]", step=ModelStep(mode))
    attention = [p for p in products if isinstance(p.work, Attention)]
    assert sum(p.count for p in attention if p.pass_ == "forward") == 3
    assert sum(p.count for p in attention if p.pass_ == "backward") == 3 * (mode == "train")
    assert not [p for p in products if isinstance(p.work, Gemm) and p.work.batch > 1]


def test_when_decoding_keys_are_those_of_all_tokens_before() -> None:
    captured = capture(find_source("gpt2", SMALL), ModelStep("decode", batch=8, seq=500, tokens=1))
    (attention,) = (p.work for p in captured.products if isinstance(p.work, Attention))
    assert (attention.queries, attention.keys, attention.causal) == (1, 501, False)
    assert {p.work.m for p in captured.products if isinstance(p.work, Gemm)} == {8}
    assert {p.pass_ for p in captured.products} == {"forward"}
    # An embedding only reads the rows that it looks up, not its whole table of 1003 by 256.
    (embedding,) = (m.bytes for m in captured.moved if m.what == "embedding")
    assert embedding < 1003 * 256 * 2 / 4
