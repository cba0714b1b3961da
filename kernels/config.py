"""How an implementation is tuned, and the arithmetic of tiles and waves. Torch-free.

A tile is the block of the result that one CTA computes; a wave is as many tiles as the machine
holds at once. The arithmetic works on numbers and on NumPy arrays alike.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from kernels.common.checks import is_whole
from kernels.common.errors import UserError, nearest
from kernels.machine import Machine
from kernels.problem import DTYPE_BYTES, Gemm


@dataclass(frozen=True)
class Storage:
    """How the operands of a problem lie in memory, where that is not as densely as they can.

    ``offset``: elements by which each operand misses an aligned address. ``ld_multiple``: elements
    of which the leading dimension of each matrix of a GEMM is made a multiple, by a gap after every
    row that is stored. With 64, rows of 50,257 elements lie 50,304 apart.
    """

    offset: int = 0
    ld_multiple: int = 1


DENSE = Storage()


class Config:
    """Base of the frozen dataclasses that tune an implementation; its text is ``key=value;…``."""

    def __str__(self) -> str:
        return ";".join(f"{f.name}={_word(getattr(self, f.name))}" for f in fields(self))  # type: ignore[arg-type]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what :meth:`__str__` writes; keys left out keep their default."""
        known = {f.name: f.type for f in fields(cls)}  # type: ignore[arg-type]
        values: dict[str, int | bool] = {}
        for part in text.split(";"):
            key, _, word = part.partition("=")
            if key not in known:
                raise UserError(f"config key {key!r} is not known; {nearest(key, known)}")
            if word not in ("on", "off") and not is_whole(word):
                raise UserError(f"config {key} takes a whole number, on or off, not {word!r}.")
            values[key] = word == "on" if word in ("on", "off") else int(word)
        return cls(**values)

    @property
    def storage(self) -> Storage:
        """How the operands lie in memory."""
        return DENSE

    @property
    def experimental(self) -> str | None:
        """The feature of this config that made compilers crash or hang; None if it has none."""
        return None


def _word(value: int | bool) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class TileConfig(Config):
    """Block sizes of a tiled matmul: a CTA's tile is ``bm`` × ``bn``, its K step ``bk`` elements.

    ``group`` rows of tiles are visited together so that concurrent CTAs share operands in L2.
    """

    bm: int = 128
    bn: int = 128
    bk: int = 64
    stages: int = 4
    warps: int = 4
    group: int = 8

    def shared_bytes(self, dtype: str, machine: Machine) -> int:
        """Shared memory that the compiler allocates for the pipeline's blocks of A and B.

        Instructions that read their operands from shared memory (wgmma, tcgen05) need the blocks
        of all stages there. Others read registers: the blocks of the step that is being multiplied
        have left shared memory, and those of one stage fewer remain.
        """
        held = self.stages if self._reads_shared(dtype, machine) else self.stages - 1
        return held * (self.bm + self.bn) * self.bk * DTYPE_BYTES[dtype]

    def _reads_shared(self, dtype: str, machine: Machine) -> bool:
        major = machine.capability[0] if machine.capability else 0
        return major in (9, 10) and dtype != "fp32" and self.bm >= 64

    @property
    def accumulators(self) -> int:
        """Accumulator registers of one thread."""
        return self.bm * self.bn // (32 * self.warps)

    def parts(self, gemm: Gemm) -> float:
        """Parts, on average, into which the sum of a tile of a GEMM is cut."""
        return 1.0

    def fitted(self, dtype: str, machine: Machine) -> Self:
        """With as many of its stages as fit the CTA's shared memory, at least two."""
        config = self
        while config.stages > 2 and config.shared_bytes(dtype, machine) > machine.shared_cta_bytes:
            config = replace(config, stages=config.stages - 1)
        return config

    def invalid(self, dtype: str, machine: Machine) -> str | None:
        """Why this config cannot run, as a sentence; None if it can.

        The one rule: powers of two of at least 16 (Triton's ``tl.dot``), at most 128 accumulators
        per thread (255 registers hold no more beside the operands), stages that fit the CTA's
        shared memory.
        """
        for name in ("bm", "bn", "bk"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                return f"{name}={size} is not a power of two of at least 16."
        if self.accumulators > 128:
            return (
                f"{self.accumulators} accumulators per thread do not fit in the registers; "
                "use more warps."
            )
        shared = self.shared_bytes(dtype, machine)
        if shared > machine.shared_cta_bytes:
            return (
                f"{self.stages} stages need {shared >> 10} KiB of shared memory; a CTA of "
                f"{machine.name} has {machine.shared_cta_bytes >> 10}."
            )
        return None


@dataclass(frozen=True)
class SplitConfig(TileConfig):
    """A sum cut into ``split`` parts, added by a second kernel."""

    split: int = 1

    def parts(self, gemm: Gemm) -> int:
        """The split, or one part for each K step where there are fewer: no part is empty."""
        return min(self.split, ceil_div(gemm.k, self.bk))


@dataclass(frozen=True)
class StreamConfig(TileConfig):
    """A stream-K matmul by ``ctas`` persistent CTAs."""

    ctas: int = 8

    def parts(self, gemm: Gemm) -> float:
        """CTAs per tile, where there are more CTAs than tiles."""
        return max(1.0, self.ctas / tile_count(gemm.m, gemm.n, self.bm, self.bn, gemm.batch))


@dataclass(frozen=True)
class PersistentConfig(TileConfig):
    """A persistent matmul by ``ctas`` CTAs, with TMA, with a warp that only copies.

    ``halves``: TMA stores a tile's result in two halves, one after the other, from half the shared
    memory. ``flatten``: the loops over tiles and over K are one pipeline, so that the copies of the
    next tile start before this one is stored.
    """

    ctas: int = 8
    tma: bool = True
    specialize: bool = False
    halves: bool = False
    flatten: bool = True

    @property
    def experimental(self) -> str | None:
        """Warp specialisation, on which the compiler crashed on Hopper (tritonbench#1094)."""
        return "warp specialisation" if self.specialize else None

    @property
    def accumulators(self) -> int:
        """Specialised, a second group of as many warps takes half of the sums."""
        return super().accumulators // (2 if self.specialize else 1)

    def invalid(self, dtype: str, machine: Machine) -> str | None:
        """Also: what a specialised kernel stores is not halved."""
        if self.specialize and self.halves:
            return "specialize=on and halves=on cannot be combined."
        return super().invalid(dtype, machine)

    @property
    def stored_columns(self) -> int:
        """Columns of the block that TMA stores at once."""
        return self.bn // 2 if self.halves else self.bn

    def shared_bytes(self, dtype: str, machine: Machine) -> int:
        """The pipeline's stages and, with TMA, the block of the result that is being stored."""
        stored = self.bm * self.stored_columns * DTYPE_BYTES[dtype] if self.tma else 0
        return super().shared_bytes(dtype, machine) + stored


@dataclass(frozen=True)
class ConvConfig(SplitConfig):
    """A convolution's implicit GEMM; ``gemm``: computed by the kernels for a plain GEMM instead.

    With ``ctas`` that is the persistent one with TMA, which stores in ``halves``; otherwise the
    tiled one, or the one that splits the sum.
    """

    gemm: bool = False
    ctas: int = 0
    halves: bool = False

    @classmethod
    def from_gemm(cls, config: TileConfig) -> ConvConfig:
        """The config of a GEMM's kernel as a convolution's."""
        names = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in vars(config).items() if k in names}, gemm=True)

    @property
    def gemm_config(self) -> TileConfig:
        """The config of the GEMM's kernel that this one names."""
        tile = {f.name: getattr(self, f.name) for f in fields(TileConfig)}
        if self.ctas:
            return PersistentConfig(**tile, ctas=self.ctas, halves=self.halves)
        return SplitConfig(**tile, split=self.split) if self.split > 1 else TileConfig(**tile)

    def shared_bytes(self, dtype: str, machine: Machine) -> int:
        """Bytes of shared memory that the kernel in use allocates."""
        if self.ctas:
            return self.gemm_config.shared_bytes(dtype, machine)
        return super().shared_bytes(dtype, machine)


HAND_WRITTEN: dict[str, type[TileConfig]] = {
    "triton-tiled": TileConfig,
    "triton-splitk": SplitConfig,
    "triton-streamk": StreamConfig,
    "triton-persistent": PersistentConfig,
    "triton-conv": ConvConfig,
}
"""How each hand-written family is tuned, for those who read configs without Triton."""


def experimental_feature(implementation: str, config: str) -> str | None:
    """What of an implementation's config, given as text, is experimental; None: nothing."""
    kind = HAND_WRITTEN.get(implementation)
    return kind.parse(config).experimental if kind and config else None


# --- Tiles and waves -----------------------------------------------------------------------------


def ceil_div(a: Any, b: Any) -> Any:
    """⌈a / b⌉ for whole numbers, or arrays of them as floats."""
    if isinstance(a, int) and isinstance(b, int):
        return -(-a // b)
    return np.ceil(a / b)  # five times as fast as a floor division of floats


def tile_count(m: Any, n: Any, bm: Any, bn: Any, batch: Any = 1, split: Any = 1) -> Any:
    """Tiles of a GEMM: batch · ⌈m/bm⌉ · ⌈n/bn⌉ · split."""
    return batch * ceil_div(m, bm) * ceil_div(n, bn) * split


def tile_efficiency(m: Any, n: Any, bm: Any, bn: Any) -> Any:
    """Useful share of the padded result: m·n over the area of all tiles, at most 1."""
    return (m * n) / (ceil_div(m, bm) * bm * ceil_div(n, bn) * bn)


def tail_efficiency(tiles: Any, slots: Any) -> Any:
    """Tiles over the slots of all waves, at most 1: what the last wave leaves idle."""
    return tiles / (ceil_div(tiles, slots) * slots)


def next_wave_edge(size: int, other: int, block: int, other_block: int, slots: int) -> int:
    """Largest ``size'`` ≥ ``size`` that needs no wave more than ``size``: the edge of its wave.

    ``size`` runs along the blocks of ``block`` elements; ``other`` is the result's other
    dimension. One element beyond the edge starts another wave.
    """
    across = ceil_div(other, other_block)
    waves = ceil_div(ceil_div(size, block) * across, slots)
    return waves * slots // across * block


# The tiles that libraries really use, seen in kernel names (cuBLAS and cuDNN under PyTorch 2.1 to
# 2.13): the time model takes the fastest of them where a kernel's own tile is not known.
_SIMT = [(32, 32), (32, 64), (64, 32), (64, 64), (128, 32), (32, 128), (128, 64), (64, 128),
         (128, 128)]  # fmt: skip
_AMPERE = [(16, 64), (32, 32), (32, 64), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128),
           (256, 64), (64, 256), (256, 128), (128, 256)]  # fmt: skip
# nvjet has far more than a table needs: 64·a columns by 8·b rows, none seen above 40,960 elements,
# among them 256x152, 192x208 and 64x104 (its first number is our columns). These 25 follow that
# pattern; not all of them were seen. A product often just fills its waves, and one row more starts
# another: whole waves over these 25 predict H100's steps better than partial waves over fourteen.
_NVJET = {64: (8, 16, 32, 64, 96, 128, 160), 128: (64, 96, 128, 160, 192, 256),
          192: (64, 96, 128, 160, 192), 256: (8, 16, 64, 96, 128, 160), 320: (128,)}  # fmt: skip
_HOPPER = [(rows, columns) for columns, sizes in _NVJET.items() for rows in sizes]
_CPU = [(8, 16), (16, 16), (32, 16), (64, 16), (128, 16)]  # rows × vector lanes


def library_tiles(generation: str, dtype: str) -> list[tuple[int, int]]:
    """(rows, columns) of the tiles that the vendor's library has for a generation and dtype."""
    if generation == "cpu":
        return _CPU
    if dtype == "fp32":
        return _SIMT
    return _HOPPER if generation in ("hopper", "blackwell") else _AMPERE


def large_tile(generation: str, dtype: str) -> tuple[int, int]:
    """(rows, columns) of the tile that a large product gets; its edges are where steps are.

    Seen in names: nvjet 128×256 and ampere 128×256, whose first number is our columns. How a
    CPU's libraries block is not known; there it only says which sizes to sample more densely.
    """
    if generation == "cpu":
        return 128, 64
    return (128, 128) if dtype == "fp32" else (256, 128)
