"""Selection of the device, and the messages about GPUs and builds of PyTorch that do not work."""

from __future__ import annotations

import glob
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels import device
from kernels.common.errors import UserError
from kernels.correctness.check import check_all
from kernels.problem import Gemm


@pytest.fixture
def broken_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Simulate a GPU with driver 550 that PyTorch cannot use."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "nvidia_driver", lambda: "550.54.15")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def the_sentence() -> str:
    with pytest.raises(UserError) as caught:
        device.select_device("auto")
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_with_a_new_driver_cuda_says_what_is_wrong(broken_gpu: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError(
            "Unexpected error from cudaGetDeviceCount(): system not yet initialized.\n"
        )

    broken_gpu.setattr(torch.version, "cuda", "12.6")
    broken_gpu.setattr(torch.cuda, "init", fail)
    sentence = the_sentence()
    assert "cannot use it: Unexpected error from cudaGetDeviceCount(): system not yet" in sentence
    assert "Update the driver" not in sentence


def test_an_unknown_driver_is_not_called_too_old(broken_gpu: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("No CUDA GPUs are available")

    broken_gpu.setattr(device, "nvidia_driver", lambda: "unknown")
    broken_gpu.setattr(torch.version, "cuda", "12.6")
    broken_gpu.setattr(torch.cuda, "init", fail)
    sentence = the_sentence()
    assert "cannot use it: No CUDA GPUs are available." in sentence
    assert "Update the driver" not in sentence


def test_an_old_driver_is_named_with_what_is_needed(broken_gpu: pytest.MonkeyPatch) -> None:
    broken_gpu.setattr(torch.version, "cuda", "13.0")
    sentence = the_sentence()
    assert "driver 550.54.15" in sentence
    assert "driver 580 or later" in sentence
    assert "DEVICE=cpu" in sentence


def test_a_cpu_build_on_a_gpu_node_is_named(broken_gpu: pytest.MonkeyPatch) -> None:
    broken_gpu.setattr(torch.version, "cuda", None)
    assert "is a CPU build" in the_sentence()


def test_a_hidden_gpu_is_named(broken_gpu: pytest.MonkeyPatch) -> None:
    broken_gpu.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES hides it" in the_sentence()


def test_the_cpu_can_be_selected_despite_a_broken_gpu(broken_gpu: pytest.MonkeyPatch) -> None:
    assert device.select_device("cpu").machine.kind == "cpu"


@pytest.mark.parametrize(
    ("capability", "arches", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),  # binaries run on later minor versions
        ((8, 0), ["sm_86", "sm_90"], False),  # but not on earlier ones
        ((7, 0), ["sm_75", "sm_80", "sm_120"], False),
        ((12, 1), ["sm_90", "sm_100", "sm_120"], True),
        ((13, 0), ["sm_120"], False),
        ((13, 0), ["sm_120", "compute_120"], True),  # the driver compiles PTX
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100a", "compute_100a"], False),  # only for that one capability
        ((10, 3), ["sm_100f"], True),
        ((12, 0), ["compute_100f"], False),  # only for that major version
        ((9, 0), [], True),
    ],
)
def test_the_architectures_that_a_pytorch_runs_on(
    capability: tuple[int, int], arches: list[str], runs: bool
) -> None:
    assert device._is_built_for(capability, arches) is runs


def test_rocm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(UserError, match="built for ROCm"):
        device.select_device()


class _Properties:
    """Properties that PyTorch reports for an H200."""

    name = "NVIDIA H200"
    major, minor = 9, 0
    multi_processor_count = 132
    total_memory = 150_754_820_096
    L2_cache_size = 62_914_560
    shared_memory_per_multiprocessor = 233_472
    shared_memory_per_block_optin = 232_448
    clock_rate = 1_980_000
    memory_clock_rate = 3_201_000
    memory_bus_width = 6144


def test_gpus_are_picked_by_ordinal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: _Properties())
    selected = device.select_device("auto", 1)
    assert (selected.machine.slug, selected.torch_name, selected.gpu) == (
        "nvidia-h200",
        "cuda:1",
        1,
    )
    assert selected.machine.l2_bytes == 62_914_560  # as the device reports, not the datasheet
    with pytest.raises(UserError, match="GPU 2 does not exist; PyTorch sees GPUs 0 to 1"):
        device.select_device("auto", 2)


def test_clocks_that_are_not_reported_are_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some builds of PyTorch have no ``clock_rate`` and no ``memory_clock_rate``."""
    silent = SimpleNamespace(**{n: v for n, v in vars(_Properties).items() if "clock" not in n})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: silent)
    assert (silent.name, device.clock_khz(silent, "clock_rate")) == ("NVIDIA H200", 0.0)
    selected = device.select_device("auto", 0)
    assert selected.machine.slug == "nvidia-h200"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue", "550.54.15"),
        ("NVRM version: UNIX Open Kernel Module for x86_64  580.159.03  x", "580.159.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86.15  x", "570.86.15"),
        ("something else", "unknown"),
    ],
)  # fmt: skip
def test_the_drivers_version_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, version: str
) -> None:
    file = tmp_path / "version"
    file.write_text(text)
    monkeypatch.setattr(glob, "glob", lambda pattern: ["/dev/nvidia0"])
    monkeypatch.setattr(device, "Path", lambda path: file)
    assert device.nvidia_driver() == version


def test_a_check_runs_on_the_gpu_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches and waits use the current GPU, which is number 0 unless another one is set."""
    current = [0]
    launched_on = []
    real = torch.mm

    def mm(*arguments: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        launched_on.append(current[-1])
        return real(*arguments, **options)

    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch, "mm", mm)
    second = replace(device.this_cpu(), gpu=1)
    (row,) = check_all(["mkl"], [Gemm(64, 64, 64, "fp32")], second)
    assert (row.status, launched_on) == ("ok", [1])
