"""Tests of models that are built from a configuration of the transformers package."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kernels.common.errors import UserError
from sweeps.capture.capture import capture, dimensions
from sweeps.capture.captured import ROLES, Attention, GroupedGemm, Product, with_names
from sweeps.capture.sources import find_source
from sweeps.capture.step import ModelSource, ModelStep
from tests.support.flop_counts import counted_by_pytorch, counted_here
from tests.support.tiers import quick_and_slow

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs the extra `models`"
)
STEP = ModelStep(batch=2, seq=64)

# Sizes of each family that differ from its defaults: published sizes, and a small number of layers,
# because identical layers are traced only once.
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 1600, "n_head": 25, "n_layer": 6},
    "llama": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "num_hidden_layers": 4,
    },
    "qwen2": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "num_hidden_layers": 4,
    },
    "gemma2": {"num_hidden_layers": 4},
    "gemma3_text": {"num_hidden_layers": 7},
    "mixtral": {"num_hidden_layers": 4},
    "deepseek_v3": {"num_hidden_layers": 5},
    "phi3": {"num_hidden_layers": 4},
    "opt": {},
    "falcon": {"num_hidden_layers": 4},
    "bert": {},
    "t5": {},
    "vit": {},
    "gpt_oss": {"num_hidden_layers": 4},
}  # fmt: skip


def source_of(tmp_path: Path, kind: str, **settings: Any) -> ModelSource:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **CONFIGS.get(kind, {}), **settings}))
    return find_source(str(path))


@needs_transformers
@pytest.mark.parametrize("kind", quick_and_slow(CONFIGS, 3))
def test_flops_are_those_that_pytorch_counts_over_every_layer(kind: str, tmp_path: Path) -> None:
    source = source_of(tmp_path, kind)
    captured = capture(source, STEP)
    assert captured.uncounted == ()
    assert counted_here(captured, "gemm", "conv") == counted_by_pytorch(source, STEP)
    assert any(isinstance(p.work, Attention) for p in captured.products)
    assert {p.role for p in captured.products} <= set(ROLES)
    # Each kind of layer is traced only once, and no family has more than three kinds.
    assert len(captured.products) < 150


@needs_transformers
def test_entries_about_the_result_and_the_cache_change_nothing(tmp_path: Path) -> None:
    plain = capture(source_of(tmp_path, "llama"), STEP)
    for entry in ("return_dict", "use_cache"):
        assert capture(source_of(tmp_path, "llama", **{entry: False}), STEP).moved == plain.moved


@needs_transformers
def test_a_model_that_cannot_be_built_is_not_blamed_for_lacking_experts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be built \((?!.*implementation)"):
        capture(source_of(tmp_path, "convnext"), STEP)


@needs_transformers
def test_experts_are_grouped_products(tmp_path: Path) -> None:
    captured = capture(source_of(tmp_path, "mixtral"), STEP)
    tokens, hidden, ffn = 2 * 64 * 2, 4096, 14336  # each token goes to two of eight experts
    experts = [p for p in captured.products if p.role == "experts"]
    assert sum(p.count * p.work.flops for p in experts) == 4 * 3 * 2 * tokens * 3 * hidden * ffn
    assert {p.work.experts for p in experts if isinstance(p.work, GroupedGemm)} == {8}
    assert {p.role for p in captured.products} == {
        "q", "k", "v", "out", "router", "experts", "head", "attention",
    }  # fmt: skip


NAMES = [
    ("deepseek_v3", "experts", 0, {"n": "2·moe_intermediate_size", "k": "hidden_size"}),
    ("deepseek_v3", "experts", 1, {"n": "hidden_size", "k": "moe_intermediate_size"}),
    ("deepseek_v3", "q", 0, {"n": "q_lora_rank", "k": "hidden_size"}),
    ("llama", "k", 0, {"m": "fixed", "k": "hidden_size"}),
    ("llama", "down", 0, {"n": "hidden_size", "k": "intermediate_size"}),
    ("gpt2", "qkv", 0, {"n": "3·n_embd", "k": "n_embd"}),
    ("gpt2", "up", 0, {"n": "4·n_embd", "k": "n_embd"}),
    ("t5", "q", 0, {"n": "d_kv·num_heads", "k": "d_model"}),
    ("bert", "head", 0, {"n": "vocab_size", "k": "hidden_size"}),
]


@functools.cache
def named_products(kind: str) -> Sequence[Product]:
    """Capturing a model once for each of its sizes takes seconds: once for all its rows."""
    with tempfile.TemporaryDirectory() as folder:
        source = source_of(Path(folder), kind)
        step = ModelStep(mode="prefill", batch=2, seq=64)
        base = capture(source, step)
        return with_names(base, dimensions(source, step, base)).products


@needs_transformers
@pytest.mark.xdist_group("huggingface-names")
@pytest.mark.parametrize(("kind", "role", "place", "expected"), quick_and_slow(NAMES, 1))
def test_sizes_have_the_names_of_the_configuration(
    kind: str, role: str, place: int, expected: dict[str, str]
) -> None:
    names = [p.names for p in named_products(kind) if p.role == role][place]
    assert {size: names[size] for size in expected} == expected


@needs_transformers
def test_a_window_reaches_over_the_keys_that_are_known(tmp_path: Path) -> None:
    source = source_of(tmp_path, "mistral", num_hidden_layers=1, sliding_window=64)
    captured = capture(source, ModelStep("decode", batch=1, seq=256))
    (work,) = (p.work for p in captured.products if isinstance(p.work, Attention))
    assert (work.keys, work.window, work.pairs) == (257, 64, 64)


@needs_transformers
def test_a_width_that_follows_from_others_has_one_name(tmp_path: Path) -> None:
    source = source_of(tmp_path, "llama")
    step = ModelStep(mode="prefill", batch=2, seq=64)
    base = capture(source, step)
    products = with_names(base, dimensions(source, step, base)).products
    (q,) = (p for p in products if p.role == "q")
    assert q.names["n"] in ("hidden_size", "head_dim·num_attention_heads")


@needs_transformers
def test_the_text_part_of_a_model_of_images_too_is_captured(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "num_hidden_layers": 2}
    captured = capture(source_of(tmp_path, "gemma3", text_config=text), STEP)
    assert "only the text part of the model" in captured.assumptions


@needs_transformers
def test_the_number_and_the_size_of_images_are_stated(tmp_path: Path) -> None:
    source = source_of(tmp_path, "vit", num_hidden_layers=1, image_size=[64, 32], patch_size=16)
    captured = capture(source, STEP)
    assert captured.assumptions == ("a batch of 2 images of 64 × 32 pixels",)


@needs_transformers
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "has no model_type"),
        ({"model_type": ["llama"]}, "has no model_type"),
        ({"model_type": "llamma"}, "correct the model_type, update transformers, or give"),
        ({"model_type": "x1", "auto_map": {}}, "the model comes with its own code"),
        ({"model_type": "gemma3_text", "num_attention_heads": 7}, "not a multiple"),
        ({"model_type": "wav2vec2"}, "give this model as module:factory"),
    ],
)
def test_a_wrong_configuration_gets_a_sentence(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=words):
        capture(find_source(str(path)), STEP)


@needs_transformers
def test_warnings_of_transformers_are_not_printed(tmp_path: Path) -> None:
    from transformers import logging as transformers_logging

    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[assignment, method-assign]
    transformers_logging.set_verbosity_warning()
    transformers_logging.add_handler(handler)
    try:
        settings = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "unknown": 1}
        source_of(tmp_path, "llama", rope_parameters=settings)
    finally:
        transformers_logging.remove_handler(handler)
    assert [record.getMessage() for record in records] == []


@needs_transformers
def test_a_misspelt_size_is_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path, "llama")
    with pytest.raises(UserError, match="no size 'hiden_size'; did you mean 'hidden_size'"):
        find_source(source.name, {"hiden_size": 512})
    # A size whose default is None can be set, too.
    assert find_source(source.name, {"head_dim": 64}).sizes["head_dim"] == 64


@pytest.mark.parametrize("text", ["[]", "{", "", pytest.param("[" * 100_000, id="nested too deep")])
def test_what_is_no_configuration_gets_a_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match="does not contain a JSON object|is not valid JSON"):
        find_source(str(path))
