"""The account of GPU traces: times by operation and kernel, idle time, and missing information."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.traces.trace_account import (
    BETWEEN_KERNELS,
    COPY_BOUND,
    GRAPH,
    HOST_BOUND,
    LAUNCH_BOUND,
    NO_OPERATION,
    UNKNOWN_IDLE,
    ProfileAccount,
    ProfiledOperation,
    account_of,
)
from kernels.problem import Conv, Gemm
from sweeps.capture.captured import GroupedGemm
from tests.support.gpu_traces import A100_NAME, DTYPE_NAMES, PROCESS, GpuTrace

NVJET = "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT"
AMPERE = "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn"
SIMT = "ampere_sgemm_128x128_nn"
TF32 = "cutlass_80_tensorop_s1688gemm_128x128_32x3_nt_align4"
SPLIT = "nvjet_hsh_64x8_64x16_1x1_v_bz_splitK_NNT"
REDUCE = "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16, float>(float*)"
TO_NHWC = "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16, float>(float*)"
DGRAD = (
    "sm90_xmma_dgrad_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x64x32_"
    "warpgroupsize1x1x1_g1_execute_segment_k_on_kernel__5x_cudnn"
)
WGRAD = DGRAD.replace("dgrad", "wgrad")


def accounted(tmp_path: Path, *traces: GpuTrace) -> ProfileAccount:
    return account_of([
        trace.write(tmp_path / f"rank{rank}.json.gz") for rank, trace in enumerate(traces)
    ])  # fmt: skip


def by_name(account: ProfileAccount) -> dict[str, ProfiledOperation]:
    return {operation.op: operation for operation in account.operations}


@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", A100_NAME])
def test_an_operations_time_is_that_of_its_kernels(tmp_path: Path, device: str) -> None:
    made = GpuTrace(device)
    kernel = NVJET if "H100" in device else AMPERE
    for _ in range(3):
        made.gemm(64, 32, 16, "bf16", [(kernel, 10.0), (REDUCE, 2.0)])
    made.op("aten::relu", kernels=[("elementwise_kernel", 4.0)])
    made.op("aten::view")  # launches nothing
    account = accounted(tmp_path, made)
    found = by_name(account)
    assert account.device_names == (device,)
    assert (account.kind, set(found)) == ("gpu", {"mm", "relu"})
    mm = found["mm"]
    assert mm.works == (Gemm(64, 32, 16, "bf16", "nt"),)
    assert (mm.calls, mm.time_us, mm.each_us) == (3, pytest.approx(36.0), pytest.approx(12.0))
    assert mm.kernels == pytest.approx({kernel: 30.0, REDUCE: 6.0})
    assert (mm.kernel, mm.uses_tensor_cores) == (kernel, True)
    assert mm.share_of_kind("reduce") == pytest.approx(1 / 6)
    assert account.total_us == pytest.approx(40.0)
    assert account.matrix_share == pytest.approx(0.9)
    assert account.bound == pytest.approx(10.0)
    assert account.with_shapes


def test_fp32_on_tensor_cores_is_tf32(tmp_path: Path) -> None:
    made = GpuTrace(A100_NAME)
    made.gemm(64, 32, 16, "fp32", [(TF32, 10.0)])
    made.gemm(64, 32, 32, "fp32", [(SIMT, 30.0)])
    account = accounted(tmp_path, made)
    assert [o.works for o in account.operations] == [
        (Gemm(64, 32, 32, "fp32", "nt"),), (Gemm(64, 32, 16, "tf32", "nt"),),
    ]  # fmt: skip
    assert [o.uses_tensor_cores for o in account.operations] == [False, True]


def test_fp8_and_grouped_gemms_are_read(tmp_path: Path) -> None:
    made = GpuTrace()
    made.gemm(64, 32, 16, "fp8", [("nvjet_qqtst_128x128_128x6_2x1_v_bz_TNT", 10.0)],
              "aten::_scaled_mm", "")  # fmt: skip
    bf16 = DTYPE_NAMES["bf16"]
    made.op(
        "aten::_grouped_mm", [[64, 16], [4, 16, 32], [4]], [[16, 1], [512, 1, 16], [1]],
        [bf16, bf16, "int"], [""] * 3, [("void cutlass::device_kernel<GroupedGemm>", 8.0)],
    )  # fmt: skip
    found = by_name(accounted(tmp_path, made))
    assert found["_scaled_mm"].works == (Gemm(64, 32, 16, "fp8", "nt"),)
    assert found["_grouped_mm"].works == (GroupedGemm(64, 32, 16, 4, "bf16", "nt"),)


def test_a_gemm_with_a_fused_activation_is_read(tmp_path: Path) -> None:
    made = GpuTrace()
    bf16 = DTYPE_NAMES["bf16"]
    made.op(
        "aten::_addmm_activation", [[32], [64, 16], [16, 32]], [[1], [16, 1], [1, 16]],
        [bf16] * 3, [""] * 3, [(NVJET, 10.0)],
    )  # fmt: skip
    (operation,) = accounted(tmp_path, made).operations
    assert (operation.matrix, operation.works) == (True, (Gemm(64, 32, 16, "bf16", "nt"),))


def gradients(made: GpuTrace, kernels: list[tuple[str, float]], mask: str) -> None:
    dims = [[8, 64, 28, 28], [8, 32, 28, 28], [64, 32, 3, 3]]
    strides = [[50176, 784, 28, 1], [25088, 784, 28, 1], [288, 9, 3, 1]]
    settings = ["", "", "", "[0]", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", mask]
    made.op(
        "aten::convolution_backward", [*dims, *[[]] * 8], [*strides, *[[]] * 8],
        ["float"] * 3 + ["ScalarList"] * 8, settings, kernels,
    )  # fmt: skip


def test_both_gradients_of_a_convolution_are_told_apart_by_their_kernels(tmp_path: Path) -> None:
    conv = Conv(8, 32, 28, 28, 64, 3, 3, (1, 1), (1, 1), (1, 1), 1, "tf32", "nchw", "dgrad")
    made = GpuTrace()
    gradients(made, [(TO_NHWC, 3.0), (DGRAD, 10.0), (WGRAD, 20.0)], "[True, True, False]")
    account = accounted(tmp_path, made)
    times = {operation.works: operation.time_us for operation in account.operations}
    assert times == {
        (conv,): pytest.approx(11.0),
        (Conv.parse(conv.spec().replace("dgrad", "wgrad")),): pytest.approx(22.0),
    }
    assert account.total_us == pytest.approx(33.0)


def test_a_kernel_that_names_both_gradients_is_divided_between_them(tmp_path: Path) -> None:
    made = GpuTrace()
    kernels = [("dgrad_and_wgrad", 3.0), (DGRAD, 10.0), (WGRAD, 20.0)]
    gradients(made, kernels, "[True, True, False]")
    account = accounted(tmp_path, made)
    assert [one.time_us for one in account.operations] == pytest.approx([22.0, 11.0])
    assert account.total_us == pytest.approx(33.0)


def test_gradients_whose_kernels_tell_nothing_stay_together(tmp_path: Path) -> None:
    made = GpuTrace()
    gradients(made, [(SIMT, 10.0), (SIMT, 20.0)], "[True, True, False]")
    gradients(made, [(WGRAD, 10.0)], "[False, True, False]")
    both, one = accounted(tmp_path, made).operations
    assert [getattr(work, "pass_", "") for work in both.works] == ["dgrad", "wgrad"]
    assert [getattr(work, "pass_", "") for work in one.works] == ["wgrad"]
    assert both.time_us == pytest.approx(30.0)


def test_kernels_of_graphs_and_of_nothing_are_accounted_by_name(tmp_path: Path) -> None:
    made = GpuTrace()
    for _ in range(2):
        made.graph([(NVJET, 10.0), ("elementwise_kernel", 5.0)])
    made.kernel("orphan", 4.0, call=10**6)
    account = accounted(tmp_path, made)
    found = {(o.op, o.kernel): (o.calls, o.time_us, o.matrix) for o in account.operations}
    assert found == {
        (GRAPH, NVJET): (2, pytest.approx(20.0), True),
        (GRAPH, "elementwise_kernel"): (2, pytest.approx(10.0), False),
        (NO_OPERATION, "orphan"): (1, pytest.approx(4.0), False),
    }
    assert account.graph_us == pytest.approx(30.0)


def test_kernels_of_several_streams_each_count_but_the_gpu_is_busy_once(tmp_path: Path) -> None:
    made = GpuTrace(overhead=0.0)
    made.op("aten::a", kernels=[("a", 100.0)])
    made.op("aten::b", kernels=[("b", 50.0)], stream=20)
    account = accounted(tmp_path, made)
    (device,) = account.devices
    assert account.total_us == pytest.approx(150.0)
    assert device.busy_us == device.span_us == pytest.approx(100.0, abs=1.0)
    assert not account.idle_us


def test_lost_kernels_are_counted_and_missing_shapes_are_told(tmp_path: Path) -> None:
    made = GpuTrace()
    made.gemm(64, 32, 16, "bf16", [(NVJET, 10.0)])
    made.gemm(64, 32, 16, "bf16", [(NVJET, 10.0)], lost_kernel=True)
    account = accounted(tmp_path, made)
    assert by_name(account)["mm"].calls == 1
    assert account.calls_without_kernel == 1
    plain = GpuTrace(record_shapes=False)
    plain.gemm(64, 32, 16, "bf16", [(NVJET, 10.0)])
    without = accounted(tmp_path, plain)
    assert not without.with_shapes
    assert [(o.op, o.works, o.matrix) for o in without.operations] == [("mm", (), True)]


def test_ranks_are_added_up(tmp_path: Path) -> None:
    ranks = [GpuTrace(), GpuTrace()]
    for rank, made in enumerate(ranks):
        made.gemm(64, 32, 16, "bf16", [(NVJET, 10.0 + rank)])
    account = accounted(tmp_path, *ranks)
    (mm,) = account.operations
    assert (mm.calls, mm.time_us) == (2, pytest.approx(21.0))
    assert [device.file for device in account.devices] == ["rank0.json.gz", "rank1.json.gz"]


def launching(made: GpuTrace) -> None:
    for _ in range(20):
        made.op("aten::mul", kernels=[("elementwise_kernel", 1.0)])


def pausing(made: GpuTrace) -> None:
    for _ in range(20):
        made.op("aten::mul", kernels=[("elementwise_kernel", 1.0)])
        made.host += 5000.0


def waiting(made: GpuTrace) -> None:
    for _ in range(20):
        made.op("aten::mul", kernels=[("elementwise_kernel", 30.0)])
        made.event("cuda_runtime", "cudaDeviceSynchronize", made.host, 35.0, PROCESS)
        made.host += 40.0


def pausing_before_the_driver(made: GpuTrace) -> None:
    """Let each call of the runtime make a call of the driver, which launches the kernel."""
    for number in range(20):
        made.host += 5000.0
        made.event("cuda_runtime", "cudaLaunchKernelExC", made.host - 1, 9.0, PROCESS)
        made.op("aten::mul", kernels=[("elementwise_kernel", 1.0)])
        if number:
            launch = next(e for e in reversed(made.events) if e["name"] == "cudaLaunchKernel")
            launch.update(cat="cuda_driver", name="cuLaunchKernelEx")


def copying(made: GpuTrace) -> None:
    for _ in range(20):
        made.copy("HtoD", 5.0)
        made.op("aten::mul", kernels=[("elementwise_kernel", 1.0)])


def computing(made: GpuTrace) -> None:
    for _ in range(20):
        made.op("aten::mul", kernels=[("elementwise_kernel", 100.0)])


def unrecorded(made: GpuTrace) -> None:
    for _ in range(20):
        made.op("aten::mul", kernels=[("elementwise_kernel", 1.0)], lost_call=True)


@pytest.mark.parametrize(
    ("step", "reason"),
    [(launching, LAUNCH_BOUND), (pausing, HOST_BOUND),
     (pausing_before_the_driver, HOST_BOUND), (waiting, HOST_BOUND),
     (copying, COPY_BOUND), (computing, BETWEEN_KERNELS), (unrecorded, UNKNOWN_IDLE)],
)  # fmt: skip
def test_idle_time_has_a_main_reason(tmp_path: Path, step: object, reason: str) -> None:
    made = GpuTrace()
    step(made)  # type: ignore[operator]
    account = accounted(tmp_path, made)
    assert next(iter(account.idle_us)) == reason
    (device,) = account.devices
    assert device.span_us == pytest.approx(device.busy_us + sum(account.idle_us.values()))
    share = sum(account.idle_us.values()) / device.span_us
    assert share < 0.05 if step is computing else share > 0.3
