"""Check on random models that every proposed change can be built. Nothing is captured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.audit.candidates import candidates, pairs_of
from kernels.problem import Gemm
from sweeps.capture.captured import Attention, Captured, Dimension, GroupedGemm, Product, Work

TOKENS = 512
SIZES = ("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "experts")


@dataclass(frozen=True)
class Config:
    """Sizes of a transformer; ``head_dim`` is 0 if it follows from the hidden size."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    experts: int

    @property
    def width(self) -> float:
        return self.head_dim or self.hidden / self.heads

    def sizes(self) -> dict[str, int]:
        return {name: value for name in SIZES if (value := getattr(self, name))}

    def with_sizes(self, sizes: dict[str, int]) -> Config:
        return replace(self, **sizes)

    def fault(self, before: Config, tp: int) -> str:
        """Return the reason why the model cannot be built; empty if it can."""
        if self.width != int(self.width) or int(self.width) % 8:
            return "a head's width is not a multiple of 8"
        if self.heads % self.kv_heads:
            return "key/value heads do not divide heads"
        if before.hidden % before.heads == 0 and self.hidden % self.heads:
            return "heads do not divide the hidden size"
        if any(size % tp for size in (self.heads, self.kv_heads, self.ffn, self.experts)):
            return "tensor parallelism does not divide it"
        return ""


def works(config: Config) -> list[tuple[str, Work]]:
    """Return the forward products of one layer and of the head, with their roles."""
    width = int(config.width)
    total, of_keys = config.heads * width, config.kv_heads * width
    found: list[tuple[str, Work]] = [
        ("q", Gemm(TOKENS, total, config.hidden, "bf16")),
        ("k", Gemm(TOKENS, of_keys, config.hidden, "bf16")),
        ("v", Gemm(TOKENS, of_keys, config.hidden, "bf16")),
        (
            "attention",
            Attention(
                1, config.heads, config.kv_heads, TOKENS, TOKENS, width, width, "bf16", causal=True
            ),
        ),
        ("out", Gemm(TOKENS, config.hidden, total, "bf16")),
        ("gate", Gemm(TOKENS, config.ffn, config.hidden, "bf16")),
        ("up", Gemm(TOKENS, config.ffn, config.hidden, "bf16")),
        ("down", Gemm(TOKENS, config.hidden, config.ffn, "bf16")),
        ("head", Gemm(TOKENS, config.vocab, config.hidden, "bf16")),
    ]
    if config.experts:
        experts = GroupedGemm(2 * TOKENS, config.ffn, config.hidden, config.experts, "bf16")
        found.append(("experts", experts))
    return found


def captured(config: Config) -> Captured:
    products = [
        Product(work, role, f"layer.{role}", "forward", 1, -1, place)
        for place, (role, work) in enumerate(works(config))
    ]
    return Captured(tuple(products), (), (), 1, 2)


def dimensions(config: Config) -> list[Dimension]:
    """Return each size with its slopes, which follow from the model at another value."""
    found = []
    before = captured(config)
    for name, value in config.sizes().items():
        for other in (2 * value, value // 2):
            changed = config.with_sizes({name: other})
            if other and changed.width == int(changed.width) and not other % 2:
                if changed.heads % changed.kv_heads:
                    continue
                after = captured(changed)
                slopes = {
                    (place, size): (after.products[place].sizes[size] - was) / (other - value)
                    for place, product in enumerate(before.products)
                    for size, was in product.sizes.items()
                    if after.products[place].sizes[size] != was
                }
                found.append(Dimension(name, value, slopes))
                break
    return found


@st.composite
def configs(draw: st.DrawFn) -> tuple[Config, int]:
    tp = draw(st.sampled_from((1, 2, 4)))
    kv_heads = tp * draw(st.integers(1, 4))
    heads = kv_heads * draw(st.sampled_from((1, 2, 3, 4, 8)))
    width = 8 * draw(st.integers(4, 20))
    explicit = draw(st.booleans())
    hidden = heads * width if draw(st.booleans()) or not explicit else 64 * draw(st.integers(4, 90))
    ffn = tp * draw(st.integers(100, 5000))
    vocab = draw(st.integers(100, 200_000))
    experts = tp * draw(st.sampled_from((0, 2, 8)))
    return Config(hidden, heads, kv_heads, width if explicit else 0, ffn, vocab, experts), tp


@settings(max_examples=300, deadline=None)
@given(configs())
def test_every_proposed_change_can_be_built(drawn: tuple[Config, int]) -> None:
    config, tp = drawn
    model, varied = captured(config), dimensions(config)
    proposed: list[dict[str, int]] = [
        {dimension.name: value}
        for dimension in varied
        for value in candidates(dimension, model, tp)
    ]
    proposed += [
        {name: new for name, (_, new) in changes.items()} for changes in pairs_of(model, varied, tp)
    ]
    for sizes in proposed:
        assert not config.with_sizes(sizes).fault(config, tp), sizes


def test_the_sizes_that_people_ask_for_are_proposed() -> None:
    llama = Config(4096, 32, 32, 0, 11008, 32000, 0)
    named = {d.name: d for d in dimensions(llama)}
    model = captured(llama)
    assert {10752, 11264} <= set(candidates(named["ffn"], model))
    assert candidates(replace(named["ffn"], value=11000), model)[0] % 64 == 0
    assert 11008 in candidates(Dimension("ffn", 11000, named["ffn"].slopes), model)
    # Twelve heads of 64 never become thirteen, and a head's width never changes by itself.
    vit = Config(768, 12, 12, 64, 3072, 1000, 0)
    assert candidates({d.name: d for d in dimensions(vit)}["head_dim"], captured(vit)) == []
    pairs = list(pairs_of(captured(vit), dimensions(vit)))
    assert {"heads": (12, 6), "head_dim": (64, 128), "kv_heads": (12, 6)} in pairs


def test_a_multiple_replaces_the_usual_ones() -> None:
    llama = Config(4096, 32, 8, 128, 14336, 128256, 0)
    (ffn,) = (d for d in dimensions(llama) if d.name == "ffn")
    assert candidates(ffn, captured(llama), multiple=1000) == [13000, 14000, 15000]
    wide = Config(4096, 32, 32, 0, 11008, 32000, 0)
    hidden_sizes = {
        multiple: {
            changes["hidden"][1]
            for changes in pairs_of(captured(wide), dimensions(wide), multiple=multiple)
            if "hidden" in changes
        }
        for multiple in (None, 256)
    }
    assert hidden_sizes[256] == {size for size in hidden_sizes[None] if size % 256 == 0} != set()


def test_a_hidden_size_that_sets_the_number_of_heads_changes_like_a_width() -> None:
    """The model has ``hidden // 64`` heads of 64, as many as key/value heads."""
    before = Config(1408, 22, 22, 64, 5632, 50257, 0)
    model = captured(before)
    after = captured(replace(before, hidden=1472, heads=23, kv_heads=23))
    slopes = {
        (place, size): (after.products[place].sizes[size] - value) / 64
        for place, product in enumerate(model.products)
        for size, value in product.sizes.items()
        if after.products[place].sizes[size] != value
    }
    hidden = Dimension("hidden", 1408, slopes)
    assert candidates(hidden, model) == [1280, 1344, 1472, 1536]
    assert candidates(hidden, model, tp=2) == [1280, 1536]  # with an even number of heads
    assert list(pairs_of(model, [hidden])) == []


def test_a_wide_feed_forward_layer_is_not_a_vocabulary() -> None:
    llama_405b = Config(16384, 128, 8, 128, 53248, 128256, 0)
    model = captured(llama_405b)
    named = {dimension.name: dimension for dimension in dimensions(llama_405b)}
    assert min(candidates(named["ffn"], model)) < 53248
    assert min(candidates(named["vocab"], model)) > 128256
