"""Settings (configs) of the implementations, and the arithmetic of tiles and waves.

A tile is the block of the result that one CTA computes at a time. A wave is the set of tiles that a
machine computes at the same time. The arithmetic works on numbers and, except for
:func:`next_wave_edge`, on NumPy arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from kernels.common.checks import is_whole
from kernels.common.errors import UserError, nearest
from kernels.machine import Machine
from kernels.problem import DTYPE_BYTES, Gemm

MIN_ASYNC_ROWS = 64
"""Smallest number of rows in a tile that wgmma or tcgen05 can compute."""

_MAX_ACCUMULATORS = 128  # accumulator registers per thread; see TileConfig.invalid


@dataclass(frozen=True)
class Storage:
    """Placement of a problem's operands in memory; by default they are aligned and dense.

    ``offset`` is the distance, in elements, from an aligned address to an operand's first element.
    In a GEMM, the leading dimension of each matrix is rounded up to a multiple of ``ld_multiple``
    elements, so there may be a gap after each stored row. With ``ld_multiple=64``, rows of 50,257
    elements start 50,304 elements apart.
    """

    offset: int = 0
    ld_multiple: int = 1


DENSE = Storage()


class Config:
    """Base class of configs: frozen dataclasses that hold the settings of an implementation.

    The text of a config consists of ``key=value`` settings, separated by semicolons.
    """

    def __str__(self) -> str:
        return ";".join(f"{f.name}={_word(getattr(self, f.name))}" for f in fields(self))  # type: ignore[arg-type]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text of a config; a missing key means the setting's default.

        Raises:
            UserError: if the text is empty, or does not describe a config of this type.
        """
        defaults = {f.name: f.default for f in fields(cls)}  # type: ignore[arg-type]
        values: dict[str, int | bool] = {}
        for setting in text.split(";"):
            key, _, word = setting.partition("=")
            if key not in defaults:
                raise UserError(f"config key {key!r} is not known; {nearest(key, defaults)}")
            if isinstance(defaults[key], bool):
                if word not in ("on", "off"):
                    raise UserError(f"config key {key!r} must be 'on' or 'off', not {word!r}.")
                values[key] = word == "on"
            else:
                if not is_whole(word):
                    raise UserError(f"config key {key!r} must be a whole number, not {word!r}.")
                values[key] = int(word)
        return cls(**values)

    @property
    def storage(self) -> Storage:
        """Placement of the operands in memory."""
        return DENSE

    @property
    def experimental(self) -> str | None:
        """Name of the experimental feature that this config turns on, or None."""
        return None


def _word(value: int | bool) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


@dataclass(frozen=True)
class TileConfig(Config):
    """Settings that the configs of all hand-written kernels have in common.

    - ``bm`` and ``bn`` are the numbers of rows and columns of the tile that a CTA computes.
    - ``bk`` is the number of elements along K in one step of the loop over K.
    - ``stages`` is the number of pipeline stages. A stage holds the blocks of A and B for one step.
    - ``warps`` is the number of warps in a CTA.
    - ``group`` is the number of rows of tiles that are computed together, so that concurrent CTAs
      share operands in L2.
    """

    bm: int = 128
    bn: int = 128
    bk: int = 64
    stages: int = 4
    warps: int = 4
    group: int = 8

    def shared_bytes(self, dtype: str, machine: Machine) -> int:
        """Return how many bytes of shared memory the compiler allocates for blocks of A and B.

        Instructions that read their operands from shared memory (wgmma, tcgen05) need the blocks of
        all stages in shared memory. All other instructions read the blocks of the current step from
        registers, so shared memory holds one stage fewer.
        """
        stages_held = self.stages if self._reads_shared(dtype, machine) else self.stages - 1
        return stages_held * (self.bm + self.bn) * self.bk * DTYPE_BYTES[dtype]

    def _reads_shared(self, dtype: str, machine: Machine) -> bool:
        """Return True if the machine computes this tile with wgmma or tcgen05."""
        return machine.multiplies_from_shared and dtype != "fp32" and self.bm >= MIN_ASYNC_ROWS

    @property
    def accumulators(self) -> int:
        """Number of accumulator registers per thread."""
        return self.bm * self.bn // (32 * self.warps)

    def parts(self, gemm: Gemm) -> float:
        """Return the average number of parts into which the kernel divides a tile's sum over K."""
        return 1.0

    def fitted(self, dtype: str, machine: Machine) -> Self:
        """Return this config, with fewer stages if shared memory is too small for all stages.

        The number of stages is not reduced below two, even if two stages do not fit.
        """
        config = self
        while config.stages > 2 and config.shared_bytes(dtype, machine) > machine.shared_cta_bytes:
            config = replace(config, stages=config.stages - 1)
        return config

    def invalid(self, dtype: str, machine: Machine) -> str | None:
        """Return the reason why the config is invalid, as a sentence, or None for a valid config.

        ``tl.dot`` requires block sizes of at least 16. A thread may have at most 128 accumulators,
        because its 255 registers must also hold the operands.
        """
        for name, smallest in (("bm", 16), ("bn", 16), ("bk", 16), ("warps", 1)):
            value = getattr(self, name)
            if value < smallest or value & (value - 1):
                return (
                    f"{name}={value} is invalid; it must be a power of two, and at least "
                    f"{smallest}."
                )
        if self.accumulators > _MAX_ACCUMULATORS:
            return (
                f"{self.accumulators} accumulators per thread do not fit in the registers; "
                "use more warps."
            )
        shared = self.shared_bytes(dtype, machine)
        if shared > machine.shared_cta_bytes:
            return (
                f"the config needs {shared:,} bytes of shared memory, but a CTA of {machine.name} "
                f"has at most {machine.shared_cta_bytes:,}; use fewer stages or a smaller tile."
            )
        return None


@dataclass(frozen=True)
class TiledConfig(TileConfig):
    """Config of a plain tiled GEMM.

    With ``repack``, operands that are stored in a slow order are transposed by separate launches
    before the GEMM.
    """

    repack: bool = False


@dataclass(frozen=True)
class SplitConfig(TiledConfig):
    """Config of a split-K GEMM, which divides the sum over K into at most ``split`` parts.

    ``repack`` is as in :class:`TiledConfig`.
    """

    split: int = 1

    def parts(self, gemm: Gemm) -> int:
        """Return ``split``, but at most the number of K steps, so that no part is empty."""
        return min(self.split, ceil_div(gemm.k, self.bk))


@dataclass(frozen=True)
class StreamConfig(TileConfig):
    """Config of a stream-K GEMM that runs on ``ctas`` persistent CTAs."""

    ctas: int = 8

    def parts(self, gemm: Gemm) -> float:
        """Return the average number of CTAs per tile, or 1 if there are fewer CTAs than tiles."""
        return max(1.0, self.ctas / tile_count(gemm.m, gemm.n, self.bm, self.bn, gemm.batch))


@dataclass(frozen=True)
class PersistentConfig(TileConfig):
    """Config of a persistent GEMM that runs on at most ``ctas`` CTAs.

    With ``tma``, the Tensor Memory Accelerator (TMA) copies the blocks of A and B. ``specialize``
    adds a warp that only copies, and a second group of ``warps`` warps that multiplies. ``halves``
    lets TMA store a tile's result in two halves, one after the other, so that the stored block
    needs half as much shared memory. ``flatten`` makes the loops over tiles and over K one
    pipeline, so that copying for the next tile starts before the current tile is stored.
    ``flatten`` has no effect with ``specialize``.
    """

    ctas: int = 8
    tma: bool = True
    specialize: bool = False
    halves: bool = False
    flatten: bool = True

    @property
    def experimental(self) -> str | None:
        """``warp specialisation`` if ``specialize`` is on, otherwise None.

        Triton's compiler has crashed on this feature for Hopper (tritonbench#1094).
        """
        return "warp specialisation" if self.specialize else None

    @property
    def accumulators(self) -> int:
        """Number of accumulator registers per thread.

        With ``specialize``, a second group with the same number of warps computes half of the tile.
        """
        return super().accumulators // (2 if self.specialize else 1)

    def invalid(self, dtype: str, machine: Machine) -> str | None:
        """Return the reason why the config is invalid, or None; see :meth:`TileConfig.invalid`."""
        if self.specialize and self.halves:
            return "specialize=on and halves=on cannot be combined; turn one of them off."
        return super().invalid(dtype, machine)

    @property
    def stored_columns(self) -> int:
        """Number of columns in the block that TMA stores at once."""
        return self.bn // 2 if self.halves else self.bn

    def shared_bytes(self, dtype: str, machine: Machine) -> int:
        """Return the bytes of shared memory for the stages and for the block that TMA stores."""
        stored = self.bm * self.stored_columns * DTYPE_BYTES[dtype] if self.tma else 0
        return super().shared_bytes(dtype, machine) + stored


@dataclass(frozen=True)
class ConvConfig(SplitConfig):
    """Config of a convolution's implicit GEMM.

    With ``repack``, a separate launch transposes the filters beforehand. With ``gemm``, a kernel
    for plain GEMMs computes the convolution, with the config :attr:`gemm_config`. If ``ctas`` is
    above 0, that kernel is the persistent one. ``halves`` applies only to the persistent kernel.
    """

    gemm: bool = False
    ctas: int = 0
    halves: bool = False

    @classmethod
    def from_gemm(cls, config: TileConfig) -> ConvConfig:
        """Return the config of a convolution that is computed by a GEMM kernel with ``config``."""
        # The config of a convolution lacks some fields of PersistentConfig, such as ``tma``.
        names = {f.name for f in fields(cls)}
        settings = {name: value for name, value in vars(config).items() if name in names}
        return cls(**settings, gemm=True)

    @property
    def gemm_config(self) -> TileConfig:
        """Config of the persistent, split-K or tiled kernel that is used if ``gemm`` is set."""
        tile = {f.name: getattr(self, f.name) for f in fields(TileConfig)}
        if self.ctas:
            return PersistentConfig(**tile, ctas=self.ctas, halves=self.halves)
        if self.split > 1:
            return SplitConfig(**tile, repack=self.repack, split=self.split)
        return TiledConfig(**tile, repack=self.repack)

    def shared_bytes(self, dtype: str, machine: Machine) -> int:
        """Return how many bytes of shared memory the convolution's kernel allocates."""
        if self.ctas:
            return self.gemm_config.shared_bytes(dtype, machine)
        return super().shared_bytes(dtype, machine)


HAND_WRITTEN: dict[str, type[TileConfig]] = {
    "triton-tiled": TiledConfig,
    "triton-splitk": SplitConfig,
    "triton-streamk": StreamConfig,
    "triton-persistent": PersistentConfig,
    "triton-conv": ConvConfig,
}
"""Config type of each hand-written Triton family, for code that does not import Triton."""


def experimental_feature(implementation: str, config: str) -> str | None:
    """Return the name of the experimental feature that a config, given as text, turns on.

    The result is None if ``config`` is empty or turns on no experimental feature, or if
    ``implementation`` is not a hand-written kernel.

    Raises:
        UserError: if ``config`` is not a valid config of the hand-written kernel
            ``implementation``.
    """
    config_type = HAND_WRITTEN.get(implementation)
    if config_type is None or not config:
        return None
    return config_type.parse(config).experimental


# --- Tiles and waves -----------------------------------------------------------------------------


def ceil_div(a: Any, b: Any) -> Any:
    """Return ⌈a / b⌉: an int for two ints; otherwise a float or an array of floats."""
    if isinstance(a, int) and isinstance(b, int):
        return -(-a // b)
    return np.ceil(a / b)  # faster than a floor division of arrays of floats


def tile_count(m: Any, n: Any, bm: Any, bn: Any, batch: Any = 1, split: Any = 1) -> Any:
    """Return the number of tiles of a GEMM, counting each of a tile's ``split`` parts."""
    return batch * ceil_div(m, bm) * ceil_div(n, bn) * split


def tile_efficiency(m: Any, n: Any, bm: Any, bn: Any) -> Any:
    """Return the share of the tiles' area that is useful: m·n divided by the area of all tiles."""
    return (m * n) / (ceil_div(m, bm) * bm * ceil_div(n, bn) * bn)


def tail_efficiency(tiles: Any, slots: Any) -> Any:
    """Return the number of tiles divided by the capacity of all waves that these tiles need.

    ``slots`` is the number of tiles in a full wave.
    """
    return tiles / (ceil_div(tiles, slots) * slots)


def next_wave_edge(size: int, other: int, block: int, other_block: int, slots: int) -> int:
    """Return the largest size that needs no more waves than ``size``.

    ``size`` and the returned size are along one dimension of a result, and ``other`` is the size of
    the other dimension. ``block`` and ``other_block`` are the sizes of a tile along the two
    dimensions. ``slots`` is the number of tiles in a full wave.
    """
    tiles_across = ceil_div(other, other_block)
    waves = ceil_div(ceil_div(size, block) * tiles_across, slots)
    # The slots of these waves hold this many complete lines of tiles across the other dimension.
    lines = waves * slots // tiles_across
    return lines * block


# GPU tiles from the names of vendor kernels (cuBLAS and cuDNN under PyTorch 2.1 to 2.13). If the
# time model does not know which tile a kernel has, it takes the fastest of these tiles.
_SIMT = [(32, 32), (32, 64), (64, 32), (64, 64), (128, 32), (32, 128), (128, 64), (64, 128),
         (128, 128)]  # fmt: skip
_AMPERE = [(16, 64), (32, 32), (32, 64), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128),
           (256, 64), (64, 256), (256, 128), (128, 256)]  # fmt: skip
# nvjet, cuBLAS's kernels for Hopper and Blackwell, has far more tiles than this table needs. Their
# columns are multiples of 64 and their rows multiples of 8, such as 256x152, 192x208 and 64x104
# (the first number in a name counts columns). No tile that was seen has more than 40,960 elements.
# The 25 tiles below follow that pattern; not all of them were seen. Counting whole waves of these
# tiles predicts the cliffs of an H100 better than counting partial waves of 14 tiles, because a
# GEMM often just fills its waves, and one more row then starts another wave.
_NVJET = {64: (8, 16, 32, 64, 96, 128, 160), 128: (64, 96, 128, 160, 192, 256),
          192: (64, 96, 128, 160, 192), 256: (8, 16, 64, 96, 128, 160), 320: (128,)}  # fmt: skip
_HOPPER = [(rows, columns) for columns, sizes in _NVJET.items() for rows in sizes]
_CPU = [(8, 16), (16, 16), (32, 16), (64, 16), (128, 16)]  # rows × vector lanes


def library_tiles(generation: str, dtype: str) -> list[tuple[int, int]]:
    """Return the (rows, columns) of the vendor library's tiles for a generation and dtype."""
    if generation == "cpu":
        return _CPU
    if dtype == "fp32":
        return _SIMT
    return _HOPPER if generation in ("hopper", "blackwell") else _AMPERE


def large_tile(generation: str, dtype: str) -> tuple[int, int]:
    """Return the typical (rows, columns) of a large GEMM's tile.

    Cliffs are expected at multiples of these sizes. The blocks that a CPU's libraries use are not
    known, so the tile for a CPU is only a guess at where to look for cliffs.
    """
    if generation == "cpu":
        return 128, 64
    return (128, 128) if dtype == "fp32" else (256, 128)
