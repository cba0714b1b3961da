"""Check the memory of a step against PyTorch for small models, and by hand for large ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from analysis.audit.audit import audit
from analysis.audit.memory import Memory, kv_cache_bytes, memory_of, what_fits
from analysis.audit.runtime import Runtime
from analysis.model.basis import find_basis
from kernels.common.program import RESULTS
from kernels.machine import known_machine
from sweeps.capture.capture import capture
from sweeps.capture.captured import Captured
from sweeps.capture.known import IMAGES, KNOWN
from sweeps.capture.sources import Factory, KnownModel, find_source
from sweeps.capture.step import ModelStep

H100 = known_machine("nvidia-h100-sxm")


def kept_by_pytorch(model: nn.Module, call: Callable[[], Tensor]) -> int:
    """Return the bytes that autograd saves in a real forward pass, without the parameters."""
    owned = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
    saved: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(
        tensor.untyped_storage().nbytes() for data, tensor in saved.items() if data not in owned
    )


@pytest.mark.parametrize(
    ("name", "sizes", "batch", "seq"),
    [
        ("gpt2", {"hidden": 128, "heads": 4, "layers": 3, "vocab": 1000}, 2, 64),
        (
            "llama-3-8b",
            {"hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 352, "layers": 4, "vocab": 500},
            3,
            96,
        ),
        ("resnet-50", {"stem": 16, "width": 16, "classes": 10}, 2, 0),
    ],
)
def test_saved_tensors_are_those_that_pytorch_saves(
    name: str, sizes: dict[str, int], batch: int, seq: int
) -> None:
    step = ModelStep(batch=batch, seq=max(seq, 1), dtype="fp32")
    captured = capture(find_source(name, sizes), step)
    source = KnownModel(name, sizes)
    started = source.start(step, {})
    real = kept_by_pytorch(started.model, started.call)
    assert captured.saved == pytest.approx(real, rel=0.15)
    parameters = sum(p.numel() * p.element_size() for p in started.model.parameters())
    memory = memory_of(captured, Runtime(), H100, trains=True)
    assert memory.weights == memory.gradients == parameters
    assert memory.optimizer == 2 * parameters
    assert KNOWN[name].takes == IMAGES or captured.saved > 0


@pytest.fixture(scope="module")
def llama() -> Captured:
    return capture(find_source("llama-3-8b"), ModelStep(batch=4, seq=4096))


def test_llama_by_hand(llama: Captured) -> None:
    """8.03 billion parameters in two bytes, and what each of 32 layers keeps of 16,384 tokens."""
    memory = memory_of(llama, Runtime(), H100, trains=True)
    assert memory.weights == pytest.approx(2 * 8.03e9, rel=0.001)
    assert memory.optimizer == 2 * memory.weights
    tokens, hidden, ffn, keys = 4 * 4096, 4096, 14336, 1024
    # Eager, in two bytes an element: the input, its norm (once more as fp32 inside), q, k, v as
    # they are attended with, the result, and two widths of the gated layer, its gate's and product.
    least = 32 * 2 * tokens * (4 * hidden + (2 * hidden + 2 * keys) + 3 * ffn)
    assert least < memory.activations < 2 * least
    assert not memory.fits
    assert memory.total > 160e9


def test_gpt2_xl_by_hand() -> None:
    """34 bytes per token and hidden unit in each layer without dropout's masks: Korthikanti 2022.

    Their 34 include 3 bytes of masks, and the scores are not kept by fused attention.
    """
    captured = capture(find_source("gpt2-xl"), ModelStep(batch=8, seq=1024))
    memory = memory_of(captured, Runtime(), H100, trains=True)
    layers = 48 * 34 * 8 * 1024 * 1600
    logits = 8 * 1024 * 50257 * (2 + 4)  # in bf16 and as fp32 for the loss
    assert memory.activations == pytest.approx(layers + logits, rel=0.15)


def test_an_eager_loss_needs_two_gradients_in_fp32_next_to_what_is_saved() -> None:
    captured = capture(find_source("gpt2"), ModelStep(batch=4, seq=256))
    eager, compiled = (
        memory_of(captured, Runtime(kind=kind), H100, trains=True) for kind in ("eager", "compile")
    )
    logits = 4 * 256 * 50257 * 4
    assert eager.activations - compiled.activations == pytest.approx(2 * logits, rel=0.01)
    assert compiled.activations == captured.saved


def test_a_loss_in_chunks_keeps_the_logits_of_one_chunk() -> None:
    captured = capture(find_source("gpt2"), ModelStep(batch=4, seq=256))

    def activations(kind: str, chunks: int) -> int:
        runtime = Runtime(kind=kind, loss_chunks=chunks)
        return memory_of(captured, runtime, H100, trains=True).activations

    logits = 4 * 256 * 50257 * 4  # in fp32, as the loss keeps them
    fewer = activations("compile", 1) - activations("compile", 8)
    assert fewer == pytest.approx(logits * 7 / 8, rel=0.01)
    # In eager mode, two gradients of the logits shrink, too. The gradients of the head's weight and
    # input exist in full, and at the same time as the logits.
    whole = (50257 + 4 * 256) * 768 * 2
    fewer = activations("eager", 1) - activations("eager", 8)
    assert fewer == pytest.approx(3 * logits * 7 / 8 - whole, rel=0.01)
    # 7 chunks of 1,024 tokens have at most 147 tokens each.
    fewer = activations("compile", 1) - activations("compile", 7)
    assert fewer == pytest.approx(logits * (1 - 147 / 1024), rel=0.01)
    # A chunk has at least one token.
    assert activations("compile", 10**6) == activations("compile", 1024)
    # With very many chunks, the rest of the backward pass needs the most.
    assert activations("eager", 1024) >= captured.loss.peak_elsewhere


def test_a_model_without_an_output_head_keeps_its_memory_in_chunks() -> None:
    captured = capture(find_source("resnet-50"), ModelStep(batch=2))
    whole = memory_of(captured, Runtime(), H100, trains=True)
    assert memory_of(captured, Runtime(loss_chunks=8), H100, trains=True) == whole


def test_gradients_take_the_place_of_activations() -> None:
    memory = Memory(
        weights=10, gradients=10, optimizer=20, activations=30, kv_cache=0, available=100
    )
    assert memory.total == 60
    assert replace(memory, activations=5).total == 40


def test_what_would_fit_does_fit(llama: Captured) -> None:
    step = ModelStep(batch=4, seq=4096)
    ways = what_fits(llama, Runtime(), H100, trains=True, batch=step.batch)
    # Weights and optimizer take 48 GB. One sequence fits, and recomputing four does not.
    assert ways == ["--batch 1", "--tp 4"]
    split = memory_of(llama, Runtime(tp=4), H100, trains=True)
    assert split.fits
    assert not memory_of(llama, Runtime(tp=2), H100, trains=True).fits
    b200 = known_machine("nvidia-b200")
    more = capture(find_source("llama-3-8b"), ModelStep(batch=5, seq=4096))
    assert what_fits(more, Runtime(), b200, trains=True, batch=5)[0] == "--batch 4"
    assert memory_of(llama, Runtime(), b200, trains=True).fits
    assert not memory_of(more, Runtime(), b200, trains=True).fits


def test_recomputed_layers_keep_their_inputs(llama: Captured) -> None:
    inputs = 32 * 2 * 4 * 4096 * 4096
    memory = memory_of(llama, Runtime(recompute=True), H100, trains=True)
    whole = memory_of(llama, Runtime(), H100, trains=True).activations
    assert inputs < memory.activations < whole / 3


def test_the_cache_is_that_of_all_tokens() -> None:
    step = ModelStep("decode", batch=8, seq=4096)
    decoding = capture(find_source("llama-2-7b"), step)
    by_hand = 32 * 8 * (4096 + 1) * 2 * 4096 * 2  # keys and values of 4,096 units in two bytes
    assert kv_cache_bytes(decoding) == by_hand
    memory = memory_of(decoding, Runtime(tp=2), H100, trains=False)
    assert memory.kv_cache == by_hand // 2
    assert memory.gradients == memory.optimizer == 0
    assert memory.fits
    images = capture(find_source("resnet-50"), ModelStep("prefill", batch=1))
    assert kv_cache_bytes(images) == 0


def test_a_batch_that_fits_is_told() -> None:
    step = ModelStep("decode", batch=512, seq=4096)
    decoding = capture(find_source("llama-2-7b"), step)
    (most, *_) = what_fits(decoding, Runtime(), H100, trains=False, batch=512)
    count = int(most.removeprefix("--batch "))
    for batch, fits in ((count, True), (count + 2, False)):
        smaller = capture(find_source("llama-2-7b"), replace(step, batch=batch))
        assert memory_of(smaller, Runtime(), H100, trains=False).fits is fits


def test_unknown_memory_is_neither_enough_nor_too_little() -> None:
    basis = find_basis("nvidia-t4", RESULTS)
    silent = replace(basis.model.machine, memory_bytes=0)
    basis = replace(basis, model=replace(basis.model, machine=silent))
    (result,) = audit(
        find_source("gpt2"), ModelStep("prefill", seq=64, dtype="fp16"), Runtime(), [basis]
    )
    assert result.to_json()["memory"]["fits"] is None
    assert result.to_json()["fits_with"] == []
    assert "the machine did not report how much it has." in str(result)


def test_only_a_degree_that_divides_the_heads_is_proposed() -> None:
    step = ModelStep(batch=1, seq=1024, dtype="fp16")
    captured = capture(find_source("gpt2-xl", {"layers": 64}), step)  # 25 heads
    t4 = known_machine("nvidia-t4")
    assert memory_of(captured, Runtime(tp=2), t4, trains=True).fits
    assert what_fits(captured, Runtime(), t4, trains=True, batch=1) == []


def test_no_batch_is_proposed_for_a_factory_whose_inputs_have_one() -> None:
    def build(width: int = 4096) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))

    source = Factory("module:build", build, {}, ((None, (2**21, 4096)),))
    step = ModelStep(batch=64, dtype="fp16")
    (found,) = audit(source, step, Runtime(), [find_basis("nvidia-t4", RESULTS)])
    assert found.report.title == "module:build, train"
    assert not found.report.memory.fits
    assert not any(option.startswith("--batch") for option in found.report.fits_with)
    captured = capture(source, step)
    t4 = known_machine("nvidia-t4")
    assert what_fits(captured, Runtime(), t4, trains=True, batch=64)[0].startswith("--batch ")
