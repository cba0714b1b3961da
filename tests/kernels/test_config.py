from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.common.errors import UserError
from kernels.config import (
    PersistentConfig,
    SplitConfig,
    TileConfig,
    ceil_div,
    next_wave_edge,
    tail_efficiency,
    tile_count,
    tile_efficiency,
)  # fmt: skip
from kernels.machine import known_machine
from kernels.problem import Gemm

sizes = st.integers(1, 3000)
blocks = st.sampled_from([16, 32, 64, 128, 192, 256])


@given(sizes, sizes, blocks, blocks, st.integers(1, 4), st.integers(1, 4))
def test_tiles_cover_the_result_and_no_row_of_them_is_idle(
    m: int, n: int, bm: int, bn: int, batch: int, split: int
) -> None:
    rows = len(range(0, m, bm))
    columns = len(range(0, n, bn))
    assert tile_count(m, n, bm, bn, batch, split) == rows * columns * batch * split
    assert tile_efficiency(m, n, bm, bn) == pytest.approx(m * n / (rows * bm * columns * bn))


@given(st.integers(1, 10_000), st.integers(1, 300))
def test_tail_efficiency_is_the_mean_of_the_waves(tiles: int, slots: int) -> None:
    waves = math.ceil(tiles / slots)
    per_wave = [slots] * (waves - 1) + [tiles - slots * (waves - 1)]
    assert tail_efficiency(tiles, slots) == pytest.approx(sum(per_wave) / (slots * waves))


def test_the_guides_example_of_wave_quantization() -> None:
    # 256×128 tiles of a 2304 × 1536 result on 108 SMs fill one wave; 1664 columns start another.
    assert tile_count(2304, 1536, 256, 128) == 108
    assert ceil_div(tile_count(2304, 1664, 256, 128), 108) == 2
    assert next_wave_edge(1536, 2304, 128, 256, 108) == 1536


def test_the_guides_example_of_tile_quantization() -> None:
    assert tile_count(256, 256, 128, 128) == 4
    assert tile_count(257, 256, 128, 128) == 6


@given(sizes, sizes, blocks, blocks, st.integers(1, 200))
def test_a_wave_ends_at_its_edge_and_not_before(
    size: int, other: int, block: int, other_block: int, slots: int
) -> None:
    edge = next_wave_edge(size, other, block, other_block, slots)

    def waves(length: int) -> int:
        return math.ceil(math.ceil(length / block) * math.ceil(other / other_block) / slots)

    assert edge >= size
    assert waves(edge) == waves(size)
    assert waves(edge + 1) > waves(size)


@given(blocks, blocks, blocks, st.integers(1, 6), st.sampled_from([4, 8]), st.integers(1, 16))
def test_configs_read_back(bm: int, bn: int, bk: int, stages: int, warps: int, group: int) -> None:
    config = TileConfig(bm, bn, bk, stages, warps, group)
    assert TileConfig.parse(str(config)) == config


def test_a_config_text_is_checked() -> None:
    with pytest.raises(UserError, match="config key 'bx' is not known; did you mean"):
        TileConfig.parse("bx=128")
    for text in ("bm=many", "bm=on", "bm"):
        with pytest.raises(UserError, match="config key 'bm' must be a whole number"):
            TileConfig.parse(text)
    with pytest.raises(UserError, match="config key 'tma' must be 'on' or 'off', not '1'"):
        PersistentConfig.parse("tma=1")


@pytest.mark.parametrize(
    ("config", "slug", "words"),
    [
        (TileConfig(192, 128), "nvidia-h200", "power of two"),
        (TileConfig(warps=0), "nvidia-h200", "warps=0 is invalid"),
        (TileConfig(warps=3), "nvidia-h200", "warps=3 is invalid"),
        (TileConfig(256, 256, warps=8), "nvidia-h200", "256 accumulators"),
        (TileConfig(128, 128, 64, stages=8), "nvidia-h200", "shared memory"),
        (TileConfig(128, 128, 64, stages=5), "nvidia-l40s", "shared memory"),
        (TileConfig(128, 128, 64, stages=4), "nvidia-h200", None),
    ],
)
def test_the_validity_rule(config: TileConfig, slug: str, words: str | None) -> None:
    reason = config.invalid("bf16", known_machine(slug))
    assert reason is None if words is None else words in str(reason)


@pytest.mark.parametrize(("k", "parts"), [(8, 1), (64, 1), (65, 2), (500, 8), (513, 8)])
def test_no_part_of_a_split_sum_is_empty(k: int, parts: int) -> None:
    """The kernels' loop over K must not be empty."""
    assert SplitConfig(64, 64, 64, split=8).parts(Gemm(64, 64, k, "bf16")) == parts
