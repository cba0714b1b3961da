"""Selection of the device to measure, the facts about it, and the versions of its software."""

from __future__ import annotations

import glob
import os
import platform
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernels.common.errors import UserError
from kernels.common.program import OTHER_TORCH, USE_CPU
from kernels.machine import DeviceProperties, Machine, cpu_machine, cpu_threads, from_properties

_MIN_DRIVER = {11: 450, 12: 525, 13: 580}
"""Major version of the oldest driver that supports each CUDA major version, from NVIDIA's
compatibility table."""


@dataclass(frozen=True)
class Device:
    """Device that PyTorch can use; ``gpu`` is the ordinal of a visible GPU, or None for the CPU."""

    machine: Machine
    torch_name: str
    gpu: int | None = None


def select_device(kind: str = "auto", gpu: int = 0) -> Device:
    """Select a GPU or the CPU; ``auto`` selects the CPU only if no NVIDIA GPU is found.

    Raises:
        UserError: if an argument is invalid, if ``kind`` is ``gpu`` and no GPU is found, or if the
            CPU is selected and the environment variable ``THREADS`` is invalid. Unless ``kind`` is
            ``cpu``, the error is also raised if PyTorch is built for ROCm or cannot use the GPU.
    """
    if kind not in ("auto", "gpu", "cpu"):
        raise UserError(f"--device takes auto, gpu or cpu, not {kind!r}.")
    if kind == "cpu":
        return this_cpu()
    if torch.version.hip is not None:
        raise UserError(
            "This PyTorch is built for ROCm. Rooftile measures NVIDIA GPUs and CPUs; install "
            f"a CUDA build of PyTorch, or use {USE_CPU}."
        )
    if torch.cuda.is_available():
        return _this_gpu(gpu)
    driver = nvidia_driver()
    if driver is not None:
        raise UserError(_why_unusable(driver), exit_code=1)
    if kind == "gpu":
        raise UserError(
            f"No NVIDIA GPU was found on this machine; to measure the CPU, use {USE_CPU}.",
            exit_code=1,
        )
    return this_cpu()


def make_current(gpu: int | None) -> None:
    """Make a GPU the calling thread's current GPU; do nothing if ``gpu`` is None (the CPU).

    PyTorch's events, streams and graphs, Triton's launches and ``torch.cuda.synchronize`` use the
    current GPU. :func:`select_device` does not change the current GPU, because a process that only
    plans must not open a GPU.
    """
    if gpu is not None:
        torch.cuda.set_device(gpu)


def this_cpu() -> Device:
    """Return the CPU, and set PyTorch's number of threads to :func:`kernels.machine.cpu_threads`.

    The peak rates and the bandwidth are 0, because they are not measured yet.

    Raises:
        UserError: if the environment variable ``THREADS`` is invalid.
    """
    threads = cpu_threads()
    torch.set_num_threads(threads)
    ceilings = {"fp32": 0.0, "bf16": 0.0}
    return Device(cpu_machine(ceilings, 0.0, threads), "cpu")


def _this_gpu(gpu: int) -> Device:
    count = torch.cuda.device_count()
    if not 0 <= gpu < count:
        seen = "only GPU 0" if count == 1 else f"GPUs 0 to {count - 1}"
        raise UserError(f"GPU {gpu} does not exist; PyTorch sees {seen}. Select another GPU.")
    # 1. Refuse a GPU that this build of PyTorch cannot use.
    properties = torch.cuda.get_device_properties(gpu)
    capability = properties.major, properties.minor
    if not _is_built_for(capability, torch.cuda.get_arch_list()):
        arch = f"sm_{properties.major}{properties.minor}"
        built = ", ".join(torch.cuda.get_arch_list())
        raise UserError(
            f"{properties.name} is {arch}, but PyTorch {torch.__version__} is built only for "
            f"{built}; {OTHER_TORCH} that supports {arch}, or use {USE_CPU}.",
            exit_code=1,
        )
    # 2. Collect the facts of the GPU.
    machine = from_properties(
        DeviceProperties(
            name=properties.name,
            capability=capability,
            sms=properties.multi_processor_count,
            memory_bytes=properties.total_memory,
            l2_bytes=properties.L2_cache_size,
            shared_sm_bytes=properties.shared_memory_per_multiprocessor,
            shared_cta_bytes=properties.shared_memory_per_block_optin,
            boost_mhz=clock_khz(properties, "clock_rate") / 1e3,
            memory_mhz=clock_khz(properties, "memory_clock_rate") / 1e3,
            bus_bits=properties.memory_bus_width,
        )
    )
    # The L2 size that the device reports is preferred, because cards of one name may differ: some
    # H200s report 50 MB and others 60 MB.
    machine = replace(machine, l2_bytes=properties.L2_cache_size or machine.l2_bytes)
    return Device(machine, f"cuda:{gpu}", gpu)


def clock_khz(properties: Any, name: str) -> float:
    """Return the clock property ``name`` in kHz, or 0 if this PyTorch lacks the property."""
    return float(getattr(properties, name, 0))


def _is_built_for(capability: tuple[int, int], arches: list[str]) -> bool:
    """Return True if a PyTorch that is built for ``arches`` runs on a GPU of this capability.

    A binary (``sm_80``) runs on GPUs with the same major version and the same or a later minor
    version. PTX (``compute_90``) runs on GPUs with the same or any later capability. The suffix
    ``a`` (``sm_90a``) restricts a binary or PTX to exactly the capability in its name. The suffix
    ``f`` restricts PTX to the major version in its name.
    """
    if not arches:  # the architectures are not known, so assume that it runs
        return True
    for arch in arches:
        kind, _, digits = arch.partition("_")
        # The last digit is the minor version: sm_120 is 12.0.
        match = re.match(r"(\d+)(\d)([af]?)", digits)
        if match is None:
            continue
        built_for = int(match.group(1)), int(match.group(2))
        suffix = match.group(3)
        if suffix == "a":
            runs = built_for == capability
        else:
            same_major = built_for[0] == capability[0]
            any_major = kind == "compute" and suffix != "f"
            runs = built_for <= capability and (same_major or any_major)
        if runs:
            return True
    return False


def nvidia_driver() -> str | None:
    """Return the NVIDIA driver's version, or None if Linux lists no NVIDIA GPU.

    The version is ``unknown`` if it cannot be read.
    """
    if not glob.glob("/dev/nvidia[0-9]*") and not Path("/proc/driver/nvidia/gpus").is_dir():
        return None
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    # The open modules add their architecture, as in "Kernel Module for aarch64  580.65.06".
    match = re.search(r"Kernel Module(?: for \w+)?\s+(\d+(?:\.\d+)+)", text)
    return match.group(1) if match else "unknown"


def _why_unusable(driver: str) -> str:
    # Each message completes this sentence.
    start = f"This machine has an NVIDIA GPU (driver {driver}), but PyTorch {torch.__version__} "
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return start + (
            "cannot see it because CUDA_VISIBLE_DEVICES hides it; unset that "
            f"variable, or use {USE_CPU}."
        )
    if torch.version.cuda is None:
        return start + f"is a CPU build; install a CUDA build, or use {USE_CPU}."
    major = int(torch.version.cuda.split(".")[0])
    # A CUDA version that is newer than the table needs at least the newest driver in the table.
    oldest = _MIN_DRIVER.get(major, max(_MIN_DRIVER.values()))
    version = re.match(r"\d+", driver)
    if version is None or int(version.group()) >= oldest:
        # The driver is new enough, or its version is unknown. CUDA itself has to say what is wrong,
        # for example that no fabric manager is running on a node whose GPUs are connected by
        # NVSwitches.
        return start + (
            f"cannot use it: {_initialisation_error()}. Remove the cause, or use {USE_CPU}."
        )
    return start + (
        f"cannot use it: a build for CUDA {torch.version.cuda} needs driver {oldest} or later. "
        f"Update the driver, {OTHER_TORCH} that the driver supports, or use {USE_CPU}."
    )


def _initialisation_error() -> str:
    try:
        torch.cuda.init()
    except Exception as error:  # PyTorch raises RuntimeError, AssertionError and its own errors
        lines = str(error).strip().splitlines()
        return lines[0].rstrip(".") if lines else type(error).__name__
    return "CUDA can be initialised, but PyTorch finds no GPU"


def software(device: Device) -> dict[str, str]:
    """Return the versions of the software on which measured times depend, by name.

    For a CPU, the result also has PyTorch's number of threads as ``threads``. Host names, user
    names and paths are not included.
    """
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()}",
    }
    try:
        import triton

        versions["triton"] = triton.__version__
    except ImportError:
        pass
    if device.gpu is not None:
        versions["cuda"] = str(torch.version.cuda)
        versions["cudnn"] = str(torch.backends.cudnn.version())
        versions["driver"] = nvidia_driver() or "unknown"
    else:
        build_settings = torch.__config__.show()
        for name, pattern in (
            ("mkl", r"Math Kernel Library Version (\S+)"),
            ("onednn", r"MKL-DNN v(\S+)"),
        ):
            match = re.search(pattern, build_settings)
            if match:
                versions[name] = match.group(1)
        versions["threads"] = str(torch.get_num_threads())
    return versions
