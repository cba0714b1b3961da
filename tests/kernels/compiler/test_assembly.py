"""Read inner loops from short PTX texts that were written for the test, with known answers."""

from __future__ import annotations

from kernels.compiler.assembly import InnerLoop, inner_loop

AMPERE = """
\tcp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
$L__BB0_2:                              // =>This Inner Loop Header: Depth=1
\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 }, { %r2 }, { %r3 }, { %r4 };
\t@%p5 bra \t$L__BB0_4;
// %bb.3:                               //   in Loop: Header=BB0_2 Depth=1
\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 }, { %r2 }, { %r3 }, { %r4 };
\tcp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
\tcp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x4;
\t@%p7 bra \t$L__BB0_2;
$L__BB0_4:                              // %._crit_edge
\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 }, { %r2 }, { %r3 }, { %r4 };
\tst.global.v4.b32 [ %rd4 + 0 ], { %r5, %r6, %r7, %r8 };
"""


def test_only_the_loop_over_k_counts() -> None:
    """Instructions that fill the pipeline before the loop, or follow the loop, are not counted."""
    turn = inner_loop(AMPERE, warps=4)
    assert turn == InnerLoop("mma.sync", 2 * 16 * 8 * 16 * 4, (16 + 4) * 32 * 4, 4)


def test_the_size_of_a_copy_may_be_decimal() -> None:
    """PTX has no fixed base for integers: 16 and 0x10 are the same size."""
    assert inner_loop(AMPERE.replace("0x10", "16"), warps=4) == inner_loop(AMPERE, warps=4)


SPECIALISED = """
$L__BB0_2:                              // =>This Loop Header: Depth=1
                                        //     Child Loop BB0_6 Depth 2
\tcp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1];
$L__BB0_6:                              // %.lr.ph
                                        //   Parent Loop BB0_2 Depth=1
                                        // =>  This Inner Loop Header: Depth=2
\t@%p55 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r328], 8192;
\t@%p92 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1];
\tbra.uni \t$L__BB0_6;
$L__BB0_18:                             // %.lr.ph
                                        //   Parent Loop BB0_2 Depth=1
                                        // =>  This Inner Loop Header: Depth=2
\twgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%r1,%r2}, %rd1, %rd2, 1, 1, 1, 0, 1;
$L__BB0_20:                             // %.lr.ph
                                        // =>This Inner Loop Header: Depth=1
\twgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%r1,%r2}, %rd1, %rd2, 1, 1, 1, 0, 1;
"""


def test_the_loops_of_specialised_warps_are_added_up() -> None:
    turn = inner_loop(SPECIALISED, warps=4)
    assert turn == InnerLoop("wgmma", 2 * 64 * 256 * 16, 8192, 8192)


BLACKWELL = """
\tmov.b32 \t%r117, 138413200;
$L__BB0_3:                              // =>This Inner Loop Header: Depth=1
\t@%p43 tcgen05.mma.cta_group::1.kind::f16 [ %r955 + 0 ], %rd16, %rd17, %r117, %p42;
\t@%p29 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r101], 49152;
\t@%p30 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1];
\t@%p31 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1];
"""


def test_the_shape_of_tcgen05_is_read_from_its_descriptor() -> None:
    # 138413200 = 8 << 24 (M = 128) | 32 << 17 (N = 256) | the dtypes' bits
    turn = inner_loop(BLACKWELL, warps=8)
    assert turn == InnerLoop("tcgen05", 128 * 256 * 16, 49152, 24576)


PLAIN = """
$L__BB0_3:                              // =>This Inner Loop Header: Depth=1
\tfma.rn.f32 \t%r1, %r2, %r3, %r4;
\tfma.rn.f32x2 \t%rd1, %rd2, %rd3, %rd4;
\t@%p1 ld.global.b16 { %rs1 }, [ %rd33 + 0 ];
\tld.global.L1::evict_last.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd34 + 0 ];
"""


def test_plain_products_and_loads() -> None:
    assert inner_loop(PLAIN, warps=2) == InnerLoop("fma", 3 * 64, (2 + 16) * 64, 2)


def test_a_kernel_without_products() -> None:
    assert inner_loop("\tst.global.b32 [%rd1], %r1;\n", warps=4) == InnerLoop("", 0, 0, 0)
