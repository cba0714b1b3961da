"""Read the names of real kernels, and compare the facts with facts written by hand."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from kernels.names import KINDS, KernelName, conv_algorithm, read_name

_FFMA = "_warpsize2x2x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas"


def gemm(library: str, tile: tuple[int, int], tensor_cores: bool, **more: object) -> KernelName:
    return KernelName("gemm", library, tile, tensor_cores=tensor_cores, **more)  # type: ignore[arg-type]


def conv(tile: tuple[int, int] | None, tensor_cores: bool, **more: object) -> KernelName:
    return KernelName("conv", "cudnn", tile, tensor_cores=tensor_cores, **more)  # type: ignore[arg-type]


def nvjet(
    tile: tuple[int, int], stages: int, cluster: tuple[int, int], split_k: bool = False
) -> KernelName:
    return KernelName("gemm", "cublas", tile, 64, stages, cluster, split_k, None, True)


BY_HAND: dict[str, KernelName] = {
    # Hopper and Blackwell: tile, K step x stages, cluster, split K
    "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT": nvjet((256, 128), 4, (1, 2)),
    "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN": nvjet((128, 256), 4, (2, 1)),
    "nvjet_hsh_320x128_64x3_1x2_h_bz_coopA_NNT": nvjet((320, 128), 3, (1, 2)),
    "nvjet_hsh_64x8_64x16_1x1_v_bz_splitK_NNT": nvjet((64, 8), 16, (1, 1), True),
    "nvjet_hss_64x8_64x16_1x1_v_bz_splitK_NNT": nvjet((64, 8), 16, (1, 1), True),
    "nvjet_sm90_hss_64x8_64x16_1x1_h_bz_splitK_NNT": nvjet((64, 8), 16, (1, 1), True),
    "nvjet_sm100_hsh_64x8_64x16_1x1_h_bz_splitK_NNT": nvjet((64, 8), 16, (1, 1), True),
    "nvjet_sm103_hsh_64x8_64x16_1x1_h_bz_splitK_NNT": nvjet((64, 8), 16, (1, 1), True),
    "nvjet_hsh_32x64_64x16_4x1_v_bz_splitK_TNN": nvjet((32, 64), 16, (4, 1), True),
    "nvjet_tst_64x32_64x16_2x2_2cta_h_bz_splitK_TNT": nvjet((64, 32), 16, (2, 2), True),
    "nvjet_tst_256x96_64x5_2x1_2cta_v_badd_NNT": nvjet((256, 96), 5, (2, 1)),
    "nvjet_tst_128x192_64x5_4x1_v_badd_NNT": nvjet((128, 192), 5, (4, 1)),
    "nvjet_tst_128x16_64x11_2x1_v_bz_TNT": nvjet((128, 16), 11, (2, 1)),
    "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN": nvjet((192, 192), 4, (2, 1)),
    "nvjet_tst_192x192_64x3_2x1_v_bz_coopB_NTN": nvjet((192, 192), 3, (2, 1)),
    "nvjet_tst_256x8_64x6_2x1_v_bz_TNT": nvjet((256, 8), 6, (2, 1)),
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas": gemm("cublas", (128, 128), True, depth=64),
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize256x128x64_warpgroupsize2x1x1_execute_segment_k_off_kernel__5x_cublas": gemm("cublas", (256, 128), True, depth=64),
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas": gemm("cublas", (64, 64), True, depth=64),
    # Ampere
    "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn": gemm("cublas", (128, 256), True, depth=64, stages=3),
    "ampere_bf16_s16816gemm_bf16_64x64_ldg8_f2f_stages_64x6_tn": gemm("cublas", (64, 64), True, depth=64, stages=6),
    "ampere_bf16_s16816gemm_bf16_64x64_sliced1x2_ldg8_f2f_stages_64x6_nn": gemm("cublas", (64, 64), True, depth=64, stages=6),
    "ampere_fp16_s16816gemm_fp16_256x64_ldg8_f2f_stages_64x3_tn": gemm("cublas", (256, 64), True, depth=64, stages=3),
    "ampere_fp16_s16816gemm_fp16_128x128_ldg8_relu_f2f_stages_64x4_tn": gemm("cublas", (128, 128), True, depth=64, stages=4),
    "ampere_sgemm_128x128_nn": gemm("cublas", (128, 128), False),
    "ampere_sgemm_128x32_sliced1x4_tn": gemm("cublas", (128, 32), False),
    "ampere_sgemm_32x128_tn": gemm("cublas", (32, 128), False),
    "ampere_sgemm_64x64_tn": gemm("cublas", (64, 64), False),
    f"sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3{_FFMA}": gemm("cublas", (128, 128), False, depth=8, stages=3),
    f"sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize256x64x8_stage3{_FFMA}": gemm("cublas", (256, 64), False, depth=8, stages=3),
    f"sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize128x32x8_stage3{_FFMA}": gemm("cublas", (128, 32), False, depth=8, stages=3),
    # Volta, Maxwell and older
    "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn": gemm("cublas", (128, 128), True),
    "volta_fp16_s884gemm_fp16_256x128_ldg8_f2f_nn": gemm("cublas", (256, 128), True),
    "volta_s884gemm_128x128_ldg8_f2f_nn": gemm("cublas", (128, 128), True),
    "volta_h884gemm_128x128_ldg8_mods_nt": gemm("cublas", (128, 128), True),
    "volta_sgemm_128x64_nn": gemm("cublas", (128, 64), False),
    "volta_sgemm_32x32_sliced1x4_tn": gemm("cublas", (32, 32), False),
    "maxwell_sgemm_128x32_tn": gemm("cublas", (128, 32), False),
    "sgemm_128x128x8_NT_vec": gemm("cublas", (128, 128), False, depth=8),
    "sgemm_32x32x32_NN": gemm("cublas", (32, 32), False, depth=32),
    # CUTLASS
    "void cutlass::Kernel<cutlass_80_simt_sgemm_128x256_8x4_nn_align1>(cutlass_80_simt_sgemm_128x256_8x4_nn_align1::Params)": gemm("cutlass", (128, 256), False, depth=8, stages=4, alignment=1),
    "void cutlass::Kernel<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(cutlass_80_simt_sgemm_128x32_8x5_nn_align1::Params)": gemm("cutlass", (128, 32), False, depth=8, stages=5, alignment=1),
    "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_nn_align1>(cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_nn_align1::Params)": gemm("cutlass", (128, 128), True, alignment=1),
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_64x3_tn_align2>(cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_64x3_tn_align2::Params)": gemm("cutlass", (256, 128), True, depth=64, stages=3, alignment=2),
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_32x6_nn_align8>(cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_32x6_nn_align8::Params)": gemm("cutlass", (64, 64), True, depth=32, stages=6, alignment=8),
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_32x1_nn_align8>(cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_32x1_nn_align8::Params)": gemm("cutlass", (16, 16), True, depth=32, stages=1, alignment=8),
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align2>(cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align2::Params)": gemm("cutlass", (32, 32), True, depth=128, stages=2, alignment=2),
    "_ZN7cutlass7Kernel2I66cutlass_80_tensorop_f16_s16816gemm_relu_f16_256x128_32x3_tn_align8EEvNT_6ParamsE": gemm("cutlass", (256, 128), True, depth=32, stages=3, alignment=8),
    # Convolutions
    "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x32x32_stage4_warpsize4x1x1_g1_tensor16x8x16_execute_kernel__5x_cudnn": conv((128, 32), True, depth=32, stages=4),
    "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize256x128x64_warpgroupsize2x1x1_g1_execute_segment_k_off_kernel__5x_cudnn": conv((256, 128), True, depth=64),
    "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize64x128x64_warpgroupsize1x1x1_g1_execute_segment_k_off_kernel__5x_cudnn": conv((64, 128), True, depth=64),
    "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4_warpsize2x2x1_g1_tensor16x8x8": conv((128, 128), True, depth=16, stages=4),
    "sm90_xmma_dgrad_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x64x32_warpgroupsize1x1x1_g1_execute_segment_k_on_kernel__5x_cudnn": conv((128, 64), True, depth=32),
    "cutlass_tensorop_s1688fprop_optimized_tf32_64x64_16x10_nhwc_align4": conv((64, 64), True, depth=16, stages=10, alignment=4),
    "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_256x64_32x4_nhwc_align8>(cutlass_tensorop_bf16_s16816fprop_optimized_bf16_256x64_32x4_nhwc_align8::Params)": conv((256, 64), True, depth=32, stages=4, alignment=8),
    "cudnn_infer_ampere_scudnn_128x64_relu_medium_nn_v1": conv((128, 64), False),
    "cudnn_infer_volta_scudnn_128x32_sliced1x4_ldg4_relu_exp_small_nhwc_tn_v1": conv((128, 32), False),
    "cudnn_infer_maxwell_scudnn_128x128_3dconv_fprop_small_nn_v0": conv((128, 128), False),
    "volta_fp16_s884cudnn": conv(None, True),
    "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false, false, true>(int)": conv(None, False),
    "void precomputed_convolve_sgemm<float, 512, 6, 7, 4, 3, 5, 1, false>(int)": conv(None, False),
    "void explicit_convolve_sgemm<float, int, 128, 5, 5, 3, 3, 3, 0, false>(int)": conv(None, False),
    "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int)": conv(None, False),
    "void wgrad_alg0_engine_NHWC<float, 128, 5, 5, 3, 3, 3, false, 512>(int)": conv(None, False),
    "void cudnn::cnn::wgrad_alg1_engine_NHWC<float, float, 128, 6, 7, 3, 3, 5, false, true>(int)": conv(None, False),
    "void convolve_common_engine_float_NHWC<float, float, 1024, 5, 5, 3, 3, 3, true>(int)": conv(None, False),
    # Other algorithms: their tiles are those of a transformed problem
    "cudnn_infer_ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1": KernelName("winograd", "cudnn", (128, 128), tensor_cores=False),
    "cudnn_infer_maxwell_scudnn_winograd_128x128_ldg1_ldg4_mobile_relu_tile148t_nt_v0": KernelName("winograd", "cudnn", (128, 128), tensor_cores=False),
    "ampere_gcgemm_64x32_nt": KernelName("fft", "cublas", (64, 32), tensor_cores=False),
    "volta_gcgemm_32x32_nt": KernelName("fft", "cublas", (32, 32), tensor_cores=False),
    # What runs around them
    "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16, float>(float*)": KernelName("reduce", "cublas"),
    "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, float>(float*)": KernelName("transform", "cudnn"),
    "void cudnn::engines_precompiled::nhwcToNchwKernel<__nv_bfloat16, float>(float*)": KernelName("transform", "cudnn"),
    "void tensorTransformGeneric<__nv_bfloat16, __nv_bfloat16, float, true>(int)": KernelName("transform", "cudnn"),
    "void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensorStridedBatched<float> > >(int)": KernelName("gemv", "cublas", tensor_cores=False),
    "fmha_cutlassF_bf16_aligned_32x128_gmem_sm80(PyTorchMemEffAttention::AttentionKernel::Params)": KernelName("attention", tensor_cores=True),
    "fmha_cutlassB_f32_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel::Params)": KernelName("attention", tensor_cores=True),
    "fmha_cutlassF_f32_aligned_64x64_rf_sm75(PyTorchMemEffAttention::AttentionKernel::Params)": KernelName("attention"),
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_1x1x1_kernel0_0": KernelName("attention", "cudnn", tensor_cores=True),
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128> >(int)": KernelName("attention", tensor_cores=True),
    "elementwise_kernel": KernelName("elementwise"),
    # A CPU's libraries, as they name themselves when asked to be verbose
    "matmul brg_matmul:avx512_core_bf16": KernelName("gemm", "onednn"),
    "convolution brg_conv_fwd:avx512_core": KernelName("conv", "onednn"),
    "reorder jit:blk": KernelName("transform", "onednn"),
    "mkl_sgemm": KernelName("gemm", "mkl"),
    # Our own
    "matmul_tiled": KernelName("gemm", "triton"),
}  # fmt: skip


def test_there_are_at_least_sixty_real_gpu_names() -> None:
    ours = ("matmul ", "convolution ", "reorder ", "mkl_", "matmul_")
    assert sum(not name.startswith(ours) for name in BY_HAND) >= 60


@pytest.mark.parametrize("name", BY_HAND, ids=lambda name: name[:70])
def test_facts_by_hand(name: str) -> None:
    assert read_name(name) == BY_HAND[name]


def test_cublas_names_tiles_column_major() -> None:
    # The first number lies along our n: a 128×256 name is 256 rows × 128 columns of ours.
    assert read_name("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT").tile_text() == "256x128x64"
    # The first number of a convolution's tile counts rows.
    name = "cudnn_infer_ampere_scudnn_128x64_relu_medium_nn_v1"
    assert read_name(name).tile_text() == "128x64"
    assert read_name("elementwise_kernel").tile_text() == ""


@pytest.mark.parametrize(
    ("names", "algorithm"),
    [
        (["computeOffsetsKernel", "ampere_scudnn_128x64_relu_medium_nn_v1"], "implicit-gemm"),
        (["winogradForwardData4x4", "winogradForwardFilter4x4", "ampere_sgemm_128x128_nn",
          "winogradForwardOutput4x4"], "winograd-4x4"),
        (["void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>"], "winograd-4x4"),
        (["generateWinogradTilesKernel",
          "ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1"], "winograd-2x2"),
        (["ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile442t_nt_v1"], "winograd-2x2"),
        (["fft2d_r2c_32x32", "ampere_gcgemm_64x64_nt", "fft2d_c2r_32x32"], "fft"),
        (["elementwise_kernel"], ""),
        ([], ""),
    ],
)  # fmt: skip
def test_a_convolutions_algorithm_is_read_off_all_its_kernels(
    names: list[str], algorithm: str
) -> None:
    # The GEMM of a Winograd convolution is an ordinary sgemm, so its name shows no convolution.
    assert conv_algorithm(names) == algorithm


def test_every_public_name_is_understood(public_data: Path) -> None:
    with open(public_data / "kernel_names.csv", encoding="utf-8") as file:
        names = [row["kernel_name"] for row in csv.DictReader(file)]
    assert len(names) >= 200
    for name in names:
        facts = read_name(name)
        assert facts.kind in KINDS
        assert facts.kind != "other", name
        if facts.kind in ("gemm", "conv", "winograd"):
            assert facts.tensor_cores is not None, name
        if facts.kind == "gemm":
            assert facts.tile is not None, name
