"""``triton-tiled``: one CTA a tile of the result, tiles visited in groups that share L2.

The textbook matmul. A CTA walks K in steps of BK; the loads of the next steps run while this one
multiplies (Triton pipelines the loop over ``num_stages``). Sums are fp32 whatever the dtype.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kernels.config import TileConfig, ceil_div
from kernels.family import INTERPRETED, Call, TritonFamily, input_precision
from kernels.operands import Operands
from kernels.problem import DTYPE_BYTES, WIDE_BYTES, Problem


@triton.jit
def matmul_tiled(
    a_ptr, b_ptr, c_ptr,
    M, N, K,
    stride_az, stride_am, stride_ak,
    stride_bz, stride_bk, stride_bn,
    stride_cz, stride_cm, stride_cn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """C (batch, M, N) = A (batch, M, K) B (batch, K, N), any strides.

    EVEN: M and N are multiples of the tile. EVEN_K: K is one of BK. WIDE: offsets inside a tile
    pass 2³¹. UPCAST: Triton's interpreter multiplies bf16 as raw integers, so there it widens.
    """
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    tile = tl.program_id(0)
    z = (tile // (rows * columns)).to(tl.int64)
    tile = tile % (rows * columns)

    # GROUP rows of tiles, column by column: concurrent CTAs then read few blocks of A and B.
    per_group = GROUP * columns
    first = tile // per_group * GROUP
    height = min(rows - first, GROUP)
    m0 = (first + tile % per_group % height) * BM
    n0 = (tile % per_group // height) * BN

    m, n, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    m_in, n_in = m0 + m < M, n0 + n < N
    if WIDE:
        m, n, k = m.to(tl.int64), n.to(tl.int64), k.to(tl.int64)
    # Where the tile starts is 64-bit: an operand may have more than 2³¹ elements.
    a_ptr += z * stride_az + m0.to(tl.int64) * stride_am
    b_ptr += z * stride_bz + n0.to(tl.int64) * stride_bn
    a_block = a_ptr + m[:, None] * stride_am + k[None, :] * stride_ak
    b_block = b_ptr + k[:, None] * stride_bk + n[None, :] * stride_bn

    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in range(0, K, BK):
        if EVEN and EVEN_K:
            a = tl.load(a_block)
            b = tl.load(b_block)
        elif EVEN_K:
            a = tl.load(a_block, mask=m_in[:, None], other=0.0)
            b = tl.load(b_block, mask=n_in[None, :], other=0.0)
        else:
            k_in = k0 + tl.arange(0, BK) < K
            a = tl.load(a_block, mask=m_in[:, None] & k_in[None, :], other=0.0)
            b = tl.load(b_block, mask=k_in[:, None] & n_in[None, :], other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        a_block += BK * stride_ak
        b_block += BK * stride_bk

    c_ptr += z * stride_cz + m0.to(tl.int64) * stride_cm + n0.to(tl.int64) * stride_cn
    c_block = c_ptr + m[:, None] * stride_cm + n[None, :] * stride_cn
    result = total.to(c_ptr.dtype.element_ty)
    if EVEN:
        tl.store(c_block, result)
    else:
        tl.store(c_block, result, mask=m_in[:, None] & n_in[None, :])


class TritonTiled(TritonFamily):
    """The launcher of :func:`matmul_tiled`."""

    name = "triton-tiled"
    ops = ("gemm",)

    def candidates(self, problem: Problem) -> list[TileConfig]:
        """Tensor Core tiles from 128×256 down; smaller ones for fp32's plain FMAs.

        Rows that are no multiple of 16 bytes are copied an element or two at a time, through
        registers and with an address each: a shallow K step and eight warps keep them from
        spilling (128×128 with 64 elements of K and four warps spills kilobytes).
        """
        fma = problem.dtype == "fp32"
        if problem.alignment < WIDE_BYTES:
            rows = [(64, 64, 8, 2), (64, 32, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2), (16, 64, 4, 2)]
            if not fma:
                rows = [(128, 128, 8, 2), (128, 64, 8, 2), (64, 128, 8, 2), *rows]
        elif fma:
            rows = [(128, 64, 8, 3), (64, 128, 8, 3), (64, 64, 4, 3), (64, 32, 4, 3),
                    (32, 64, 4, 3), (32, 32, 4, 3), (16, 64, 4, 3)]  # fmt: skip
        else:
            rows = [(128, 256, 8, 3), (256, 128, 8, 3), (128, 128, 8, 4), (128, 64, 4, 4),
                    (64, 128, 4, 4), (64, 64, 4, 5), (64, 32, 4, 5), (32, 64, 4, 5),
                    (32, 32, 4, 5), (16, 64, 4, 5)]  # fmt: skip
        deep = 128 if problem.alignment == WIDE_BYTES and not fma else 64
        bk = deep // DTYPE_BYTES[problem.dtype]
        return [
            TileConfig(bm, bn, bk, stages=stages, warps=warps) for bm, bn, warps, stages in rows
        ]

    def calls(self, problem: Problem, operands: Operands, config: TileConfig) -> list[Call]:
        """One launch of batch × tiles CTAs."""
        a, b, c = (t if t.dim() == 3 else t.unsqueeze(0) for t in operands)
        batch, m, k = a.shape
        n = b.shape[-1]
        strides = [_strides(t) for t in (a, b, c)]
        blocks = ((config.bm, config.bk), (config.bk, config.bn), (config.bm, config.bn))
        reach = max(
            rows * stride[1] + columns * stride[2]
            for (rows, columns), stride in zip(blocks, strides, strict=True)
        )
        options: dict[str, Any] = {
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
        tiles = batch * ceil_div(m, config.bm) * ceil_div(n, config.bn)
        arguments = (a, b, c, m, n, k, *strides[0], *strides[1], *strides[2])
        return [Call(matmul_tiled, (tiles,), arguments, options)]


def _strides(tensor: Any) -> tuple[int, int, int]:
    """Strides of a 3-D tensor; a dimension of one element has none that matters, so 0 batch."""
    batch, rows, columns = tensor.stride()
    return (batch if tensor.shape[0] > 1 else 0), rows, columns
