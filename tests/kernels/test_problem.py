from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.common.errors import UserError
from kernels.problem import PASSES, Conv, Gemm, linear, pair_text, parse_pair

sizes = st.integers(1, 5000)
small = st.integers(1, 6)


def test_gemm_counts_by_hand() -> None:
    gemm = Gemm(2, 3, 5, "bf16", "nn", 7)
    assert gemm.flops == 7 * 2 * 2 * 3 * 5
    assert gemm.bytes == 7 * 2 * (2 * 5 + 5 * 3 + 2 * 3)
    assert gemm.intensity == gemm.flops / gemm.bytes


def test_the_linear_layer_of_the_guides_has_their_intensity() -> None:
    # "Linear layer (4096 outputs, 1024 inputs, batch size 512): 315 FLOPS/B"; at batch 1: 1.
    assert linear(512, 1024, 4096, "fp16")["forward"].intensity == pytest.approx(315, abs=1)
    assert linear(1, 1024, 4096, "fp16")["forward"].intensity == pytest.approx(1, abs=0.01)


@given(sizes, sizes, sizes)
def test_gradients_of_a_linear_layer_are_what_autograd_multiplies(
    tokens: int, features_in: int, features_out: int
) -> None:
    passes = linear(tokens, features_in, features_out, "fp32")
    assert {p.flops for p in passes.values()} == {2 * tokens * features_in * features_out}
    x, w = torch.empty(tokens, features_in), torch.empty(features_out, features_in)
    dy = torch.empty(tokens, features_out)
    for name, a, b in (("forward", x, w.t()), ("dgrad", dy, w), ("wgrad", dy.t(), x)):
        gemm = passes[name]
        assert (gemm.m, gemm.k) == a.shape
        assert (gemm.k, gemm.n) == b.shape
        for letter, operand in zip(gemm.layout, (a, b), strict=True):
            if 1 not in operand.shape:  # a dimension of 1 is contiguous both ways
                assert operand.is_contiguous() == (letter == "n")


@pytest.mark.parametrize(
    ("spec", "bytes_", "name"),
    [
        ("4096,4096,4096,bf16", 16, "large"),
        ("4096,4096,4095,bf16", 2, "misaligned"),
        ("4096,4095,4096,bf16,nt", 2, "misaligned"),  # the rows of C have length N
        ("4095,4096,4096,bf16,nt", 16, "large"),  # in nt, no rows have length M
        ("4095,4096,4096,bf16,tn", 2, "misaligned"),
        ("4096,4092,4096,bf16", 8, "misaligned"),
        ("4096,4092,4096,fp32", 16, "large"),
        ("256,256,256,bf16", 16, "small"),
        ("64,8192,8192,bf16", 16, "skinny"),
        ("512,512,16384,bf16", 16, "long-k"),
        ("512,512,512,bf16,nt,16", 16, "batched"),
    ],
)
def test_alignment_and_class(spec: str, bytes_: int, name: str) -> None:
    gemm = Gemm.parse(spec)
    assert gemm.alignment == bytes_
    assert gemm.shape_class == name


@given(
    n=small, c=small, h=st.integers(1, 40), w=st.integers(1, 40), kout=small, r=st.integers(1, 7),
    s=st.integers(1, 7), stride=st.tuples(small, small), padding=st.tuples(small, small),
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)), groups=st.integers(1, 3),
    pass_=st.sampled_from(PASSES),
)  # fmt: skip
def test_convolution_geometry_is_pytorchs(
    n: int, c: int, h: int, w: int, kout: int, r: int, s: int, stride: tuple[int, int],
    padding: tuple[int, int], dilation: tuple[int, int], groups: int, pass_: str,
) -> None:  # fmt: skip
    sizes = (n, c * groups, h, w, kout * groups, r, s)
    try:
        conv = Conv.build(sizes, (stride, padding, dilation), groups, "fp32", "nchw", pass_)
    except UserError:
        reach = (dilation[0] * (r - 1) + 1, dilation[1] * (s - 1) + 1)
        assert h + 2 * padding[0] < reach[0] or w + 2 * padding[1] < reach[1]
        return
    x = torch.empty(n, conv.c, h, w, device="meta")
    weight = torch.empty(conv.kout, c, r, s, device="meta")
    y = torch.conv2d(x, weight, None, stride, padding, dilation, groups)
    assert y.shape == (n, conv.kout, conv.p, conv.q)
    assert conv.operand_elements == (x.numel(), weight.numel(), y.numel())
    assert conv.flops == 2 * y.numel() * c * r * s
    implied = conv.implied_gemm
    assert implied.batch == groups
    if pass_ != "dgrad":  # a strided dgrad also multiplies zeros
        assert implied.flops == conv.flops
    rows = {"fprop": n * conv.p * conv.q, "dgrad": n * h * w, "wgrad": kout}[pass_]
    assert implied.m == rows


def test_dgrad_without_stride_has_no_more_products_than_fprop_has_pixels() -> None:
    conv = Conv.parse("2,8,10,10,16,3,3,1,1,1,1,fp32,nhwc,dgrad")
    assert conv.implied_gemm.flops == conv.flops


@given(sizes, sizes, sizes, st.sampled_from(["nn", "nt", "tn", "tt"]), small)
def test_gemm_spec_reads_back(m: int, n: int, k: int, layout: str, batch: int) -> None:
    gemm = Gemm(m, n, k, "tf32", layout, batch)
    assert Gemm.parse(gemm.spec()) == gemm


def test_conv_spec_reads_back_and_defaults() -> None:
    text = "32,64,56,56,128,3,1,2x1,1x0,1,2,bf16,nchw,wgrad"
    assert Conv.parse(text).spec() == text
    plain = Conv.parse("32,64,56,56,64,3,3,1,1,1,1,bf16")
    assert (plain.layout, plain.pass_) == ("nhwc", "fprop")
    assert Gemm.parse("1,2,3,fp16") == Gemm(1, 2, 3, "fp16", "nt", 1)


def test_pairs_of_numpys_integers_become_pythons() -> None:
    two = np.int64(2)
    conv = Conv(2, 8, 9, 9, 8, 3, 3, (two, two), np.int8(1), 1, 1, "fp32")  # type: ignore[arg-type]
    assert conv == Conv.parse("2,8,9,9,8,3,3,2,1,1,1,fp32")
    assert {type(value) for value in (*conv.stride, *conv.padding, conv.p)} == {int}


def test_a_stride_of_three_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="too many values"):
        Conv(2, 8, 9, 9, 8, 3, 3, (1, 1, 2), 1, 1, 1, "fp32")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,2,3", "--gemm takes M,N,K,dtype"),
        ("1,2,x,bf16", "K in M,N,K"),
        ("0,2,3,bf16", "M in M,N,K"),
        ("1,2,3,bf61", "did you mean 'bf16'"),
        ("1,2,3,bf16,nq", "GEMM layout"),
        ("1,2,3,bf16,nt,-1", "batch in"),
    ],
)
def test_a_bad_gemm_gets_a_sentence(text: str, words: str) -> None:
    with pytest.raises(UserError, match="^[^\n]+$") as caught:
        Gemm.parse(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,2,3", "--conv takes N,C,H,W"),
        ("1,2,3,3,4,5,5,1,0,1,1,fp32", "5×5 filter does not fit into 3×3"),
        ("1,3,8,8,4,3,3,1,1,1,2,fp32", "groups=2 must divide"),
        ("1,2,8,8,4,3,3,1xx,1,1,1,fp32", "stride must be one number"),
        ("1,2,8,8,4,3,3,0,1,1,1,fp32", "stride must be at least 1, not 0"),
        ("1,2,8,8,4,3,3,1,1,1,1,fp32,nhcw", "did you mean 'nhwc'"),
        ("1,2,8,8,4,3,3,1,1,1,1,fp32,nhwc,fwd", "pass 'fwd' is not known"),
        ("1,2,8,8,4,3,3,1,1,1,1,int8", "use one of fp32, tf32, fp16, bf16."),
    ],
)
def test_a_bad_conv_gets_a_sentence(text: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        Conv.parse(text)
    assert words in str(caught.value)


@given(st.integers(0, 9), st.integers(0, 9))
def test_pairs_read_back(a: int, b: int) -> None:
    assert parse_pair(pair_text((a, b)), "stride") == (a, b)
