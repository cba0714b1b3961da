from __future__ import annotations

import pytest
import torch

from kernels.common.errors import UserError
from kernels.config import TileConfig
from kernels.correctness.check import SUITE
from kernels.correctness.reference import check
from kernels.device import select_device, software, this_cpu
from kernels.library.vendor import LibraryConfig, _served_by_cpu, library_settings
from kernels.machine import known_machine
from kernels.operands import random_operands
from kernels.operation import LAYERS, OPERATIONS, Layer
from kernels.problem import GEMM_LAYOUTS, Conv, Gemm, Problem
from kernels.registry import all_implementations, library_for

HAS_GPU = torch.cuda.is_available()
BACKENDS = (
    torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn,
    torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv, torch.backends.mkldnn.rnn,
)  # fmt: skip
PROBLEMS: list[Problem] = [*map(Gemm.parse, SUITE["gemm"]), *map(Conv.parse, SUITE["conv"])]


def settings() -> list[object]:
    return [*(backend.fp32_precision for backend in BACKENDS), torch.backends.cudnn.benchmark]


@pytest.mark.parametrize(
    ("dtype", "wanted"), [("fp32", "ieee"), ("tf32", "tf32"), ("bf16", "ieee")]
)
@pytest.mark.parametrize("autotune", [False, True])
def test_precision_is_set_everywhere_and_restored(dtype: str, wanted: str, autotune: bool) -> None:
    before = settings()
    with library_settings(dtype, LibraryConfig(autotune=autotune)):
        # In 16 bits, the precision of fp32 has no effect but to separate the autotuner's plans.
        separate_plans = autotune and dtype == "bf16"
        precision = "tf32" if separate_plans else wanted
        assert {backend.fp32_precision for backend in BACKENDS} == {precision}
        assert torch.backends.cudnn.benchmark == autotune
        assert torch.backends.cudnn.enabled
    assert settings() == before
    # PyTorch's older flags raise an error while they disagree with these settings. Afterwards they
    # must work again.
    assert torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


def test_precision_is_restored_after_an_error() -> None:
    before = settings()
    with pytest.raises(ZeroDivisionError), library_settings("tf32", LibraryConfig(autotune=True)):
        raise ZeroDivisionError
    assert settings() == before


def test_a_config_of_another_type_is_refused() -> None:
    """The library would otherwise be timed with its default config."""
    problem = Gemm(16, 16, 16, "fp32")
    library = all_implementations()[library_for(problem, this_cpu().machine)]
    with pytest.raises(TypeError, match=r"LibraryConfig; use one from configs\(\)"):
        library.prepare(problem, [random_operands(problem, "cpu")], TileConfig())


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.spec())
def test_the_cpus_libraries_agree_with_float64(problem: Problem) -> None:
    machine = this_cpu().machine
    if problem.dtype not in machine.peaks:
        reasons = [
            implementation.supports(problem, machine)
            for name, implementation in all_implementations().items()
            if not name.startswith("triton-")
        ]
        assert all(reasons)
        return
    implementation = all_implementations()[library_for(problem, machine)]
    operands = random_operands(problem, "cpu")
    launch = implementation.prepare(problem, [operands])
    assert check(problem, operands, launch(0)).ok


@pytest.mark.gpu
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.spec())
def test_the_gpus_libraries_agree_with_float64(problem: Problem) -> None:
    device = select_device("gpu")
    implementation = all_implementations()[library_for(problem, device.machine)]
    if implementation.supports(problem, device.machine) is not None:
        pytest.skip("not supported on this GPU")
    operands = random_operands(problem, device.torch_name)
    for config in implementation.configs(problem, device.machine):
        assert check(problem, operands, implementation.prepare(problem, [operands], config)(0)).ok


def test_a_launch_uses_the_set_of_its_index() -> None:
    gemm = Gemm(8, 8, 8, "fp32")
    sets = [random_operands(gemm, "cpu", seed) for seed in range(3)]
    name = library_for(gemm, this_cpu().machine)
    launch = all_implementations()[name].prepare(gemm, sets)
    for index in (2, 0, 1):
        assert launch(index).data_ptr() == sets[index].out.data_ptr()
        assert check(gemm, sets[index], sets[index].out).ok


@pytest.mark.parametrize("layout", GEMM_LAYOUTS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [(5, 37, 23), (64, 50, 101), (1, 33, 16), (130, 1, 65)])
def test_padded_storage_changes_strides_and_no_result(
    layout: str, batch: int, dtype: str, sizes: tuple[int, int, int]
) -> None:
    gemm = Gemm(*sizes, dtype, layout, batch)
    implementation = all_implementations()[library_for(gemm, this_cpu().machine)]
    config = LibraryConfig(ld_multiple=64)
    padded = random_operands(gemm, "cpu", storage=config.storage)
    launch = implementation.prepare(gemm, [padded], config)
    for tensor, letter in zip(padded, layout + "n", strict=True):
        row, leading, unit = (-1, -2, -1) if letter == "n" else (-2, -1, -2)
        assert tensor.stride(unit) == 1
        assert tensor.stride(leading) == -(-tensor.shape[row] // 64) * 64
        if batch > 1:
            assert tensor.stride(0) == tensor.stride(leading) * tensor.shape[leading]
    everything = padded.out.as_strided(
        (padded.out.untyped_storage().nbytes() // padded.out.element_size(),), (1,), 0
    )
    everything.fill_(7.0)
    out = launch(0)
    assert (out.data_ptr(), out.stride()) == (padded.out.data_ptr(), padded.out.stride())
    assert check(gemm, padded, out).ok
    gaps = torch.ones_like(everything, dtype=torch.bool)
    gaps.as_strided(out.shape, out.stride(), 0).fill_(False)
    assert (everything[gaps] == 7.0).all()  # the launch must not write between the rows


def test_padded_storage_is_a_config_of_gemms() -> None:
    config = LibraryConfig(ld_multiple=64)
    assert str(config) == "ld_multiple=64"
    assert LibraryConfig.parse("ld_multiple=64") == config
    assert str(LibraryConfig(ld_multiple=1)) == ""
    with pytest.raises(UserError, match="ld_multiple must be at least 1, not 0"):
        LibraryConfig.parse("ld_multiple=0")
    with pytest.raises(UserError, match="did you mean 'ld_multiple'"):
        LibraryConfig.parse("ld_multipel=64")
    conv = Conv.parse("1,8,8,8,8,3,3,1,1,1,1,fp32")
    implementation = all_implementations()[library_for(conv, this_cpu().machine)]
    with pytest.raises(UserError, match="applies only to GEMMs, not to conv"):
        implementation.prepare(conv, [random_operands(conv, "cpu")], config)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", GEMM_LAYOUTS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_gpus_library_writes_padded_rows_in_place(layout: str, batch: int) -> None:
    device = select_device("gpu")
    gemm = Gemm(130, 257, 101, "fp16", layout, batch)
    config = LibraryConfig(ld_multiple=64)
    operands = random_operands(gemm, device.torch_name, storage=config.storage)
    implementation = all_implementations()[library_for(gemm, device.machine)]
    launch = implementation.prepare(gemm, [operands], config)
    out = launch(0)
    assert out.data_ptr() == launch.sets[0].out.data_ptr()
    assert out.stride(-2) == 320
    assert check(gemm, operands, out).ok


def test_every_refusal_is_a_sentence() -> None:
    gemm, conv = Gemm(8, 8, 8, "bf16"), Conv.parse("1,8,8,8,8,3,3,1,1,1,1,tf32")
    volta, h200, cpu = (
        known_machine("nvidia-v100-sxm2-16gb"),
        known_machine("nvidia-h200"),
        this_cpu(),
    )
    ours = all_implementations()
    assert ours["cublas"].supports(gemm, h200) is None
    assert ours["cudnn"].supports(conv, h200) is None
    for reason in (
        ours["cublas"].supports(gemm, volta),  # no bf16 before Ampere
        ours["cublas"].supports(conv, h200),
        ours["cudnn"].supports(gemm, h200),
        ours["cublas"].supports(gemm, cpu.machine),
        ours["triton-tiled"].supports(gemm, volta),
        ours["triton-tiled"].supports(conv, h200),
    ):
        assert reason is not None
        assert reason.endswith(".")
    assert "sm_70" in str(ours["triton-tiled"].supports(gemm, volta))


def test_cudnns_autotuner_is_a_config() -> None:
    cudnn = all_implementations()["cudnn"]
    conv = Conv.parse("1,8,8,8,8,3,3,1,1,1,1,fp16")
    assert cudnn.configs(conv, known_machine("nvidia-h200")) == [None, LibraryConfig(autotune=True)]
    in_fp32 = Conv.parse("1,8,8,8,8,3,3,1,1,1,1,fp32")  # where both would share their plans
    assert cudnn.configs(in_fp32, known_machine("nvidia-h200")) == [None]
    assert str(LibraryConfig(autotune=True)) == "autotune=on"
    assert cudnn.parse_config("autotune=on") == LibraryConfig(autotune=True)
    assert cudnn.parse_config("") is None


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_without_a_gpu_the_cpu_is_selected_and_asking_for_a_gpu_says_so() -> None:
    assert select_device().machine.kind == "cpu"
    with pytest.raises(UserError, match="No NVIDIA GPU was found") as caught:
        select_device("gpu")
    assert caught.value.exit_code == 1
    with pytest.raises(UserError, match="auto, gpu or cpu"):
        select_device("tpu")


def test_versions_name_no_host_user_or_path() -> None:
    versions = software(this_cpu())
    assert {"python", "torch", "system"} <= set(versions)
    import getpass
    import platform

    text = " ".join(versions.values())
    assert platform.node() not in text or not platform.node()
    assert getpass.getuser() not in text.split()
    assert "/" not in text


@pytest.mark.parametrize("fast", [True, False])
def test_bf16_goes_where_pytorch_sends_it_on_this_cpu(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: fast)
    machine = this_cpu().machine
    served = {
        (op, dtype): name
        for name, dtypes_by_op in _served_by_cpu().items()
        for op, dtypes in dtypes_by_op.items()
        for dtype in dtypes
    }
    ops = ("gemm", "conv", *OPERATIONS)
    assert set(served) == {(op, dtype) for op in ops for dtype in machine.peaks}
    assert served["gemm", "bf16"] == served["conv", "bf16"] == ("onednn" if fast else "aten")


@pytest.mark.parametrize("op", LAYERS)
def test_layers_have_a_library_on_every_kind_of_device(op: str) -> None:
    """ATen on a CPU once hid ATen on a GPU, because both have the same name."""
    layer = Layer(op, 4, 8, 6, 6, "fp32")
    for machine in (known_machine("nvidia-h100-sxm"), this_cpu().machine):
        library = all_implementations()[library_for(layer, machine)]
        assert library.supports(layer, machine) is None
