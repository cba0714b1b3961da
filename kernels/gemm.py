"""What the GEMM families share on the host: their arguments, and the tiles that they begin from."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from kernels.config import TileConfig
from kernels.family import INTERPRETED, TritonFamily, input_precision
from kernels.machine import Machine
from kernels.operands import Operands
from kernels.problem import DTYPE_BYTES, WIDE_BYTES, Gemm, Problem

Stride = tuple[int, int, int]


class Matrices(NamedTuple):
    """Operands with their batch: A (batch, m, k), B (batch, k, n), C (batch, m, n)."""

    a: Tensor
    b: Tensor
    c: Tensor

    @classmethod
    def of(cls, operands: Operands) -> Matrices:
        """Give every operand a batch dimension."""
        return cls(*(t if t.dim() == 3 else t.unsqueeze(0) for t in operands))

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(batch, m, n, k)."""
        batch, m, k = self.a.shape
        return batch, m, self.b.shape[-1], k

    @property
    def strides(self) -> tuple[Stride, Stride, Stride]:
        """(batch, row, column) of each, in elements."""
        return _stride(self.a), _stride(self.b), _stride(self.c)


class GemmFamily(TritonFamily):
    """Base of the families that compute a GEMM."""

    @property
    def ops(self) -> tuple[str, ...]:
        """GEMMs only."""
        return ("gemm",)

    def base_tiles(
        self, problem: Problem, machine: Machine, looped: bool = False
    ) -> list[TileConfig]:
        """Tensor Core tiles from 128×256 down; smaller ones for fp32's plain FMAs.

        Rows that are no multiple of 16 bytes are copied an element or two at a time, through
        registers and with an address each: a shallow K step and eight warps keep them from
        spilling (128×128 with 64 elements of K and four warps spills kilobytes). As many stages
        as the CTA's shared memory holds, up to the number given.

        A kernel that loops over tiles (``looped``) holds more in registers and spills with the
        largest of them, except with Hopper's wgmma, which reads both operands from shared memory.
        """
        fma, odd = problem.dtype == "fp32", problem.alignment < WIDE_BYTES
        if odd:
            rows = [(64, 64, 8, 2), (64, 32, 8, 2), (32, 64, 8, 2), (32, 32, 4, 2), (16, 64, 4, 2)]
            if not fma:
                rows = [(128, 128, 8, 2), (128, 64, 8, 2), (64, 128, 8, 2), *rows]
        elif fma:
            rows = [(128, 64, 8, 3), (64, 128, 8, 3), (64, 64, 4, 3), (64, 32, 4, 3),
                    (32, 64, 4, 3), (32, 32, 4, 3), (16, 64, 4, 3)]  # fmt: skip
        else:
            rows = [(128, 256, 8, 3), (256, 128, 8, 3), (128, 128, 8, 4), (128, 64, 4, 4),
                    (64, 128, 4, 4), (64, 64, 4, 5), (64, 32, 4, 5), (32, 64, 4, 5),
                    (32, 32, 4, 5), (16, 64, 4, 5)]  # fmt: skip
        deep = 64 if odd or fma else 128
        bk = deep // DTYPE_BYTES[problem.dtype]
        tiles = [TileConfig(bm, bn, bk, stages, warps) for bm, bn, warps, stages in rows]
        if looped and (odd or machine.generation != "hopper"):
            most = (64 * 32 if fma else 64 * 64) if odd else 128 * 128
            tiles = [tile for tile in tiles if tile.bm * tile.bn <= most]
        return [tile.fitted(problem.dtype, machine) for tile in tiles]


def gemm_options(problem: Gemm, matrices: Matrices, config: TileConfig) -> dict[str, Any]:
    """Compile-time arguments and options of a kernel that walks K in :func:`blocks.product`."""
    blocks = ((config.bm, config.bk), (config.bk, config.bn), (config.bm, config.bn))
    reach = max(
        rows * stride[1] + columns * stride[2]
        for (rows, columns), stride in zip(blocks, matrices.strides, strict=True)
    )
    _, m, n, k = matrices.sizes
    return {
        "BM": config.bm,
        "BN": config.bn,
        "BK": config.bk,
        "GROUP": config.group,
        "EVEN": m % config.bm == 0 and n % config.bn == 0,
        "EVEN_K": k % config.bk == 0,
        "PRECISION": input_precision(problem.dtype),
        "WIDE": reach >= 2**31,
        "UPCAST": INTERPRETED and problem.dtype == "bf16",
        "num_warps": config.warps,
        "num_stages": config.stages,
        # Left alone, ptxas gives up 8 to 40 bytes to spills to reach an occupancy step.
        "maxnreg": 255,
    }


def _stride(tensor: Tensor) -> Stride:
    """Strides of a 3-D tensor; a batch of one has none that matters, so 0."""
    batch, rows, columns = tensor.stride()
    return (batch if tensor.shape[0] > 1 else 0), rows, columns
