"""Tests of captured models: the FLOPs, layouts, roles, passes and names of their products."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kernels.common.errors import UserError
from kernels.problem import Conv, Gemm, linear
from sweeps.capture.capture import capture, dimensions
from sweeps.capture.captured import (
    ROLES,
    Attention,
    Captured,
    Dimension,
    GroupedGemm,
    Product,
    with_names,
)
from sweeps.capture.known import KNOWN
from sweeps.capture.sources import find_source
from sweeps.capture.step import ModelStep, first_line
from tests.support.captures import SMALL, STEP, forward, products_of
from tests.support.flop_counts import counted_by_pytorch, counted_here
from tests.support.tiers import quick_and_slow

of = functools.partial(products_of, __name__)


@pytest.mark.parametrize("name", quick_and_slow(KNOWN, 3))
def test_flops_are_those_that_pytorch_counts_over_every_layer(name: str) -> None:
    source = find_source(name)
    captured = capture(source, STEP)
    assert counted_here(captured, "gemm", "conv") == counted_by_pytorch(source, STEP)
    assert captured.uncounted == ()


def test_a_transformer_s_flops_are_the_closed_formula_s() -> None:
    """Each weight takes 6 FLOPs per token (Kaplan et al. 2020), and attention adds to that."""
    captured = capture(find_source("llama-3-8b"), STEP)
    tokens, hidden, kv, ffn = 2 * 128, 4096, 1024, 14336
    weights = 32 * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn) + hidden * 128256
    assert counted_here(captured, "gemm") == 6 * tokens * weights
    causal_pairs = 128 * 128 // 2
    assert counted_here(captured, "attention") == 7 * 32 * 2 * 32 * causal_pairs * 2 * 128
    norms = 65 * hidden
    assert captured.parameters == weights + hidden * 128256 + norms


def test_a_linear_layer_s_three_products_are_those_that_are_timed() -> None:
    captured = capture(find_source("llama-3-8b"), STEP)
    ups = {p.pass_: p.work for p in captured.products if p.role == "up"}
    expected = linear(2 * 128, 4096, 14336, "bf16")
    assert ups == {name: expected[name] for name in ("forward", "dgrad", "wgrad")}


def test_roles_and_places_of_gradients_are_those_of_the_forward_product() -> None:
    captured = capture(find_source("gpt2", SMALL), STEP)
    by_role: dict[str, list[str]] = {}
    for product in captured.products:
        by_role.setdefault(product.role, []).append(product.pass_)
    both = ["dgrad", "forward", "wgrad"]
    assert {role: sorted(passes) for role, passes in by_role.items()} == {
        **dict.fromkeys(("qkv", "out", "up", "down", "head"), both),
        "attention": ["backward", "forward"],
    }
    for product in captured.products:
        assert product.role in ROLES
        assert captured.products[product.forward_position].path == product.path


def test_a_resnet_s_convolutions_have_all_three_passes() -> None:
    captured = capture(find_source("resnet-50"), ModelStep(batch=2))
    convs = [p for p in captured.products if isinstance(p.work, Conv)]
    counts = {
        name: sum(p.count for p in convs if isinstance(p.work, Conv) and p.work.pass_ == name)
        for name in ("fprop", "dgrad", "wgrad")
    }
    assert counts == {"fprop": 53, "dgrad": 52, "wgrad": 53}  # images need no gradient
    assert {p.work.layout for p in convs if isinstance(p.work, Conv)} == {"nhwc"}
    # He et al. 2016 count 3.8e9 multiply-adds with the stride in a block's first convolution. With
    # the stride in the 3 × 3 convolution, as here and in torchvision, there are 4.1e9.
    assert sum(p.count * p.work.flops for p in forward(captured.products)) / 2 / 2e9 == (
        pytest.approx(4.09, abs=0.01)
    )


@pytest.mark.parametrize(
    ("name", "changes"),
    quick_and_slow(
        [
            ("gpt2", {"hidden": 832, "heads": 13}),
            ("gpt2", {"vocab": 50304}),
            ("llama-3-8b", {"ffn": 15000}),
            ("llama-3-8b", {"kv_heads": 4}),
            ("resnet-50", {"width": 72}),
            ("resnet-50", {"stem": 80}),
            ("unet", {"width": 48}),
        ],
        2,
    ),
)
def test_slopes_foresee_a_third_value(name: str, changes: dict[str, int]) -> None:
    source = find_source(name)
    step = ModelStep(mode="prefill", batch=2, seq=128)
    base = capture(source, step)
    named = {d.name: d for d in dimensions(source, step, base)}
    changed = capture(source, step, changes)
    for place, (before, after) in enumerate(zip(base.products, changed.products, strict=True)):
        if isinstance(before.work, Attention):
            continue  # the width of a head is a quotient of two sizes, which slopes cannot predict
        for size, value in before.sizes.items():
            grown = value + sum(
                named[name].slopes.get((place, size), 0.0) * (to - named[name].value)
                for name, to in changes.items()
            )
            assert after.sizes[size] == grown, (before, size)


def names(source_name: str) -> dict[str, dict[str, str]]:
    source = find_source(source_name)
    base = capture(source, STEP)
    captured = with_names(base, dimensions(source, STEP, base))
    return {f"{p.role} {p.pass_}": dict(p.names) for p in captured.products}


def test_sizes_have_the_names_of_what_they_follow() -> None:
    llama = names("llama-2-7b")
    assert llama["q forward"] | {"batch": ""} == {
        "m": "fixed", "n": "128·heads", "k": "hidden", "batch": "",
    }  # fmt: skip
    assert llama["k wgrad"]["m"] == "128·kv_heads"
    assert llama["down dgrad"]["n"] == "ffn"
    assert llama["head forward"]["n"] == "vocab"
    gpt2 = names("gpt2-medium")
    assert (gpt2["qkv forward"]["n"], gpt2["up forward"]["n"]) == ("3·hidden", "4·hidden")
    assert gpt2["attention forward"]["heads"] == "heads"


class Odd(nn.Module):
    """A module with many kinds of products that the known models lack."""

    def __init__(self, width: int = 24, experts: int = 4) -> None:
        super().__init__()
        self.width = width
        self.weights = nn.Parameter(torch.empty(experts, width, 2 * width))
        self.one_d = nn.Conv1d(width, width, 3, padding=1, groups=2)
        self.scale = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to (batch · length,) in fp32."""
        batch, length, width = x.shape
        scores = torch.baddbmm(torch.zeros(batch, length, length, dtype=x.dtype), x, x.mT)
        x = torch.bmm(scores.softmax(-1), x)
        x = self.one_d(x.mT).mT
        rows = x.reshape(-1, width)
        ends = torch.full((self.weights.shape[0],), rows.shape[0], dtype=torch.int32)
        y = functional.grouped_mm(rows, self.weights, offs=ends)
        y = functional.scaled_dot_product_attention(y[None, None], y[None, None], y[None, None])
        return (y[0, 0, :, :width] @ self.scale).float()


def build(width: int = 24, experts: int = 4) -> nn.Module:
    return Odd(width, experts)


def test_any_module_s_products_are_seen() -> None:
    source = find_source(f"{__name__}:build", inputs=["x[3,40,24]"])
    captured = capture(source, ModelStep(dtype="bf16"))
    works = [p.work for p in forward(captured.products)]
    assert works[0] == Gemm(40, 40, 24, "bf16", "nt", 3)
    assert works[1] == Gemm(40, 24, 40, "bf16", "nn", 3)
    conv = works[2]
    assert isinstance(conv, Conv)
    assert (conv.h, conv.w, conv.r, conv.s, conv.groups) == (1, 40, 1, 3, 2)
    assert works[3] == GroupedGemm(120, 48, 24, 4, "bf16", "nn")
    assert isinstance(works[4], Attention)
    assert works[5] == Gemm(120, 1, 24, "bf16", "nn")
    assert {p.pass_ for p in captured.products} == {"forward", "dgrad", "wgrad", "backward"}
    effects = dimensions(source, ModelStep(), capture(source, ModelStep()), ("experts",))
    assert [d.name for d in effects] == ["experts"]


class WithOutputDtype(nn.Module):
    """Products of bf16 operands that store an fp32 result, such as the logits of a router."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to (batch, length, length) in fp32."""
        scores = torch.bmm(x, x.mT, out_dtype=torch.float32)
        return scores + torch.mm(x[0], x[0].mT, out_dtype=torch.float32)


def with_output_dtype() -> nn.Module:
    return WithOutputDtype()


def test_products_with_an_output_dtype_are_read() -> None:
    products = of("with_output_dtype", "x[3,40,24]", step=ModelStep("prefill"))
    assert [p.work for p in products] == [
        Gemm(40, 40, 24, "bf16", "nt", 3),
        Gemm(40, 40, 24, "bf16", "nt"),
    ]


class Checkpointed(nn.Module):
    def __init__(self, width: int, last: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, width), nn.Linear(width, 96), last

    def body(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.body, x, use_reentrant=False))


def checkpointed(width: int = 96) -> nn.Module:
    return Checkpointed(width, nn.Linear(96, 1))


def checkpointed_to_the_end(width: int = 96) -> nn.Module:
    return Checkpointed(width, nn.Identity())


@pytest.mark.parametrize("factory", ["checkpointed", "checkpointed_to_the_end"])
def test_recomputed_products_have_no_names(factory: str) -> None:
    """The width decides the size of the first layer, which the backward pass recomputes.

    If the checkpoint includes the last product, the recomputation precedes all gradients.
    """
    source = find_source(f"{__name__}:{factory}", inputs=["x[32,64]"])
    base = capture(source, STEP)
    products = with_names(base, dimensions(source, STEP, base)).products
    first, recomputed = (p for p in forward(products) if p.path == "first")
    assert (first.recomputed, recomputed.recomputed) == (False, True)
    assert first.names["n"] == "width"
    assert recomputed.names == {}


def thrice() -> nn.Module:
    layer = nn.Linear(48, 48)
    return nn.Sequential(layer, layer, layer)


class Upsampled(nn.Module):
    """A convolution whose settings are one number for both directions, and upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.empty(16, 8, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.conv2d(x, self.filters, stride=[2], padding=[1])
        x = functional.interpolate(x, scale_factor=2, mode="bilinear", antialias=True)
        return functional.interpolate(x, scale_factor=2, mode="bilinear")


def upsampled() -> nn.Module:
    return Upsampled()


def test_one_number_in_a_list_stands_for_both_directions() -> None:
    (work,) = {p.work for p in of("upsampled", "x[2,8,16,16]", step=ModelStep("prefill"))}
    assert isinstance(work, Conv)
    assert (work.stride, work.padding) == ((2, 2), (1, 1))


def test_upsampling_is_no_product_whatever_its_name() -> None:
    captured = capture(find_source(f"{__name__}:upsampled", inputs=["x[2,8,16,16]"]), STEP)
    assert captured.uncounted == ()
    assert "pooling" in {moved.what for moved in captured.moved}


class TwoStacks(nn.Module):
    """Two stacks of layers that differ only in their activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.ReLU() for _ in range(3))
        self.second = nn.ModuleList(nn.Tanh() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.first, *self.second):
            x = layer(x)
        return x


def two_stacks() -> nn.Module:
    return TwoStacks()


def test_layers_with_equal_numbers_are_not_fused_with_each_other() -> None:
    source = find_source(f"{__name__}:two_stacks", inputs=["x[64,32]"])
    captured = capture(source, ModelStep("prefill"))
    (moved,) = captured.moved_fused
    assert moved.what == "activation"
    # Three layers of each kind read their input and write their result, of 2 bytes per element.
    assert moved.bytes == 2 * 3 * 2 * 64 * 32 * 2


def test_a_softmax_outside_of_a_loss_is_not_called_a_loss() -> None:
    step = ModelStep("prefill")
    captured = capture(find_source(f"{__name__}:build", inputs=["x[3,40,24]"]), step)
    kinds = {moved.what for moved in captured.moved}
    assert "softmax" in kinds
    assert "loss" not in kinds


def test_the_name_of_an_error_is_left_out_of_a_sentence() -> None:
    assert first_line(RuntimeError("ValueError: no such size")) == "no such size"
    assert first_line(RuntimeError("While it ran:\n\nValueError: no such size")) == "no such size"
    assert first_line(RuntimeError("no such size\nValueError: other")) == "no such size"
    assert first_line(RuntimeError()) == "RuntimeError"


class Biased(nn.Module):
    """Two batched GEMMs of different inputs with the same bias, and one of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(4, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.zeros(4, 64, 64, dtype=x.dtype)
        once = torch.baddbmm(bias, x, x.mT)
        twice = torch.baddbmm(bias, once, x)
        return torch._grouped_mm(twice, self.weights)


def biased() -> nn.Module:
    return Biased()


def test_the_input_of_a_product_is_not_its_bias() -> None:
    first, second, experts, *gradients = of("biased", "x[4,64,64]")
    assert first.input_id != second.input_id
    assert experts.pass_ == "forward"
    assert {p.pass_ for p in gradients} == {"backward"}


class Experts(nn.Module):
    def __init__(self, width: int, ffn: int, transposed: bool) -> None:
        super().__init__()
        shape = (4, ffn, width) if transposed else (4, width, ffn)
        self.weights = nn.Parameter(torch.empty(shape))
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights.mT if self.transposed else self.weights
        rows = functional.pad(x, (0, weights.shape[1] - x.shape[1]))
        ends = torch.full((4,), len(x), dtype=torch.int32)
        return functional.grouped_mm(rows, weights, offs=ends)


def experts(width: int = 64, ffn: int = 96) -> nn.Module:
    return Experts(width, ffn, False)


def transposed_experts(width: int = 64, ffn: int = 96) -> nn.Module:
    return Experts(width, ffn, True)


class MatrixPerExpert(nn.Module):
    """Grouped GEMM in which each expert has its own first operand."""

    def forward(self, x: Tensor) -> Tensor:
        columns = torch.empty(32, 64, dtype=x.dtype)
        ends = torch.full((4,), 64, dtype=torch.int32)
        return functional.grouped_mm(x, columns, offs=ends)


def matrix_per_expert() -> nn.Module:
    return MatrixPerExpert()


def test_a_grouped_gemm_of_another_kind_is_named() -> None:
    source = find_source(f"{__name__}:matrix_per_expert", inputs=["x[4,16,32]"])
    captured = capture(source, ModelStep("prefill"))
    assert captured.products == ()
    assert captured.uncounted == ("aten::_grouped_mm",)


@pytest.mark.parametrize("factory", ["experts", "transposed_experts"])
def test_gradients_of_experts_have_the_names_of_their_sizes(factory: str) -> None:
    source = find_source(f"{__name__}:{factory}", inputs=["x[128,16]"])
    base = capture(source, STEP)
    products = with_names(base, dimensions(source, STEP, base, ("width", "ffn"))).products
    (gradient,) = (p for p in products if p.pass_ == "wgrad")
    by_value = {gradient.sizes[size]: name for size, name in gradient.names.items()}
    assert by_value == {128: "fixed", 64: "width", 96: "ffn"}


def four_times(width: int = 64, ffn: int = 0) -> nn.Module:
    return nn.Linear(width, ffn or 4 * width)


def test_a_size_of_zero_cannot_be_varied() -> None:
    source = find_source(f"{__name__}:four_times", inputs=["x[16,64]"])
    with pytest.raises(UserError, match="ffn of .* is 0, but only sizes of at least 1 can"):
        dimensions(source, STEP, capture(source, STEP), ["ffn"])


def test_a_size_that_is_named_twice_is_varied_once() -> None:
    source = find_source(f"{__name__}:four_times", {"ffn": 96}, ["x[16,64]"])
    effects = dimensions(source, STEP, capture(source, STEP), ["ffn", "ffn"])
    assert [d.name for d in effects] == ["ffn"]


def recurrent() -> nn.Module:
    return nn.LSTM(16, 16)


def mixed_filters() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3))


def test_what_is_computed_again_for_its_gradient_is_a_forward_product() -> None:
    products = of("checkpointed", "x[8,64]")
    seen = [(p.path, p.pass_, p.work) for p in products]
    first = ("first", "forward", Gemm(8, 96, 64, "bf16", "nt"))
    assert seen.count(first) == 2
    # The last layer has one output feature. The gradient of its weight, (1, 96), is therefore
    # row-major and column-major at once.
    assert ("last", "wgrad") in {(path, pass_) for path, pass_, _ in seen}
    assert sum(p.pass_ == "wgrad" for p in products) == 3


def test_a_layer_may_be_called_more_than_once() -> None:
    products = of("thrice", "x[16,48]")
    assert sum(p.count for p in products if p.pass_ == "forward") == 3
    assert sum(p.count for p in products if p.pass_ == "wgrad") == 3


def test_filters_of_one_tap_are_stored_as_the_images_are() -> None:
    products = of("mixed_filters", "x[2,8,16,16]")
    assert {p.work.layout for p in products if isinstance(p.work, Conv)} == {"nchw"}


def test_what_nobody_times_is_named() -> None:
    captured = capture(find_source(f"{__name__}:recurrent", inputs=["float32[5,2,16]"]),
                       ModelStep(dtype="fp32"))  # fmt: skip
    assert not captured.products
    assert any("rnn" in name or "lstm" in name for name in captured.uncounted)


def test_names_of_gradients_do_not_depend_on_sizes_that_are_the_same() -> None:
    source = find_source("llama-2-7b", {"layers": 2})
    step = ModelStep(batch=2, seq=2048)  # the number of tokens equals the hidden size
    base = capture(source, step)
    products = with_names(base, dimensions(source, step, base)).products
    (q,) = (p for p in products if p.role == "q" and p.pass_ == "wgrad")
    assert dict(q.names) == {"m": "128·heads", "n": "hidden", "k": "fixed"}


def test_parts_of_one_tensor_are_each_read() -> None:
    step = ModelStep("prefill")
    halves, apart = (
        capture(find_source(f"{__name__}:{name}", inputs=["x[64,32]"]), step)
        for name in ("gated_together", "gated_apart")
    )
    assert sum(m.bytes for m in halves.moved_fused) == sum(m.bytes for m in apart.moved_fused)


def test_a_result_that_is_written_in_parts_is_written_in_full() -> None:
    source = find_source(f"{__name__}:Joined", inputs=["x[64,32]"])
    captured = capture(source, ModelStep("prefill"))
    # Each half of x is read, and each half of the result is written, in bf16.
    assert sum(moved.bytes for moved in captured.moved_fused) == 2 * 64 * 32 * 2


class Joined(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        joined = torch.empty_like(x)
        joined[:32] = 2 * x[:32]
        joined[32:] = 3 * x[32:]
        return joined


def test_parts_of_a_result_may_be_written_in_different_kernels() -> None:
    source = find_source(f"{__name__}:JoinedAround", inputs=["x[64,32]"])
    captured = capture(source, ModelStep("prefill"))
    # As above: half of x and the result of the GEMM are read, and both halves are written.
    assert sum(moved.bytes for moved in captured.moved_fused) == 2 * 64 * 32 * 2


class JoinedAround(nn.Module):
    """A GEMM comes between the halves, so no kernel can write both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.empty_like(x)
        joined[:32] = 2 * x[:32]
        joined[32:] = 3 * self.linear(x[32:])
        return joined


class Gated(nn.Module):
    def __init__(self, together: bool) -> None:
        super().__init__()
        self.both = nn.Linear(32, 128) if together else None
        self.one, self.other = nn.Linear(32, 64), nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.both(x).chunk(2, -1) if self.both is not None else (self.one(x), self.other(x))
        return self.down(functional.silu(a) * b)


def gated_together() -> nn.Module:
    return Gated(True)


def gated_apart() -> nn.Module:
    return Gated(False)


def test_autocast_multiplies_in_its_dtype_and_keeps_parameters_in_fp32() -> None:
    source = find_source("gpt2", SMALL)
    plain, cast = (capture(source, ModelStep(batch=2, seq=64, autocast=on)) for on in (False, True))
    assert {p.work.dtype for p in cast.products} == {"bf16"}  # including attention
    assert cast.parameter_bytes == 2 * plain.parameter_bytes
    assert sum(m.bytes for m in cast.moved) > sum(m.bytes for m in plain.moved)


def test_fused_operations_move_less() -> None:
    captured = capture(find_source("llama-3-8b"), STEP)
    together, apart = (sum(m.bytes for m in x) for x in (captured.moved_fused, captured.moved))
    assert 0 < together < apart


@pytest.mark.parametrize(
    ("model", "given", "inputs", "words"),
    [
        ("gpt3", {}, (), "did you mean 'gpt2'"),
        ("g" * 300, {}, (), "is not a config.json, a module:factory or a known model"),
        ("gpt2", {"hiden": 8}, (), "did you mean 'hidden'"),
        ("resnet-50", {"blocks": 3}, (), "has no size 'blocks'"),
        ("nowhere.json", {}, (), "cannot be read"),
        ("no_module_of_this_name:f", {}, ("x[2]",), "cannot be imported"),
        ("torch:nothing_like_it", {}, ("x[2]",), "has no 'nothing_like_it'"),
        ("torch:relu", {}, (), "inputs of the nn.Module that torch:relu returns are missing"),
        ("torch:relu", {}, ("float33[2]",), "is not a dtype of PyTorch"),
        ("torch:relu", {}, ("x2",), "--input takes a dtype and sizes"),
        ("gpt2", {}, ("x[2]",), "--input works only with module:factory, not with gpt2; leave out"),
        ("nowhere.json", {}, ("x[2]",), "not with nowhere.json; leave out --input."),
        (":", {}, ("x[2]",), "cannot be imported"),
        (".here:f", {}, ("x[2]",), "cannot be imported"),
    ],
)
def test_what_is_no_model_gets_a_sentence(
    model: str, given: dict[str, int], inputs: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        find_source(model, given, inputs)


def test_a_factory_may_import_modules_of_its_folder_when_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the current folder on the path, as for the command ``rooftile``."""
    (tmp_path / "sizes_of_a_factory.py").write_text("WIDTH = 24\n")
    (tmp_path / "a_lazy_factory.py").write_text(
        "def build():\n"
        "    from sizes_of_a_factory import WIDTH\n"
        "    from torch import nn\n"
        "    return nn.Linear(16, WIDTH)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    source = find_source("a_lazy_factory:build", {}, ("x[8,16]",))
    (product,) = capture(source, ModelStep("prefill")).products
    assert product.work == Gemm(8, 24, 16, "bf16")


def test_sizes_that_do_not_fit_get_a_sentence() -> None:
    words = r"^hidden \(256\) is not a multiple of heads \(13\); change one of them\.$"
    with pytest.raises(UserError, match=words):
        capture(find_source("gpt2", {**SMALL, "heads": 13}), STEP)
    source = find_source("gpt2", SMALL)
    for model in ("resnet-50", "unet"):
        with pytest.raises(UserError, match="--mode decode is not supported for"):
            capture(find_source(model), ModelStep("decode"))
    with pytest.raises(UserError, match="no size 'depth' to vary"):
        dimensions(source, STEP, capture(source, STEP), ("depth",))


def test_a_size_is_named_by_the_multiple_of_the_dimension_that_explains_it() -> None:
    """K is 3 × hidden; the number of heads also moves it, because hidden follows from heads."""
    product = Product(Gemm(8, 8, 24, "bf16"), "q", "", "forward", 1, 0, 0)
    hidden = Dimension("hidden", 8, {(0, "k"): 3.0})
    heads = Dimension("heads", 2, {(0, "k"): 5.0})
    captured = Captured((product,), (), (), parameters=0, parameter_bytes=0)
    names = with_names(captured, [hidden, heads]).products[0].names
    assert names["k"] == "3·hidden"


def test_the_rounding_error_of_a_slope_is_not_part_of_a_formula() -> None:
    """With 6 heads, hidden grows by 12 and a feed-forward width of 7/3 · hidden by 28."""
    product = Product(Gemm(8, 1008, 432, "bf16"), "up", "", "forward", 1, 0, 0)
    hidden = Dimension("hidden", 432, {(0, "n"): 28 / 12, (0, "k"): 1.0})
    captured = Captured((product,), (), (), parameters=0, parameter_bytes=0)
    names = with_names(captured, [hidden]).products[0].names
    assert names["n"] == "2.33333·hidden"
