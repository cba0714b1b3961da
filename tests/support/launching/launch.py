"""Launch every kernel family through Triton's own launchers, on a libcuda that only records.

    python -m tests.support.launching.launch FOLDER [TRITON]

FOLDER is for the stub, Triton's cache and whatever Triton builds. TRITON is a folder with another
version of Triton; without it the installed one is used. Prints a line of JSON for each launch: what
was asked for, and every way in which what reached the driver differs from it.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ARCH = "sm_90"
PROBLEMS = {
    "triton-tiled": ("160,96,64,bf16", "33,70,129,fp32,tn,3", "290,270,129,tf32,tn,2"),
    "triton-splitk": ("64,64,2048,fp16", "40,24,8,bf16"),
    "triton-streamk": ("300,500,129,bf16,nn,2",),
    "triton-persistent": (
        "256,256,256,bf16", "256,256,256,bf16,nt,3", "255,256,256,bf16,tn", "256,255,250,bf16,tt",
    ),
    "triton-conv": (
        "2,8,9,11,16,3,3,1,1,1,1,fp16,nhwc,fprop", "2,8,10,9,8,3,3,2x1,1x0,1x2,2,bf16,nhwc,dgrad",
        "2,16,8,8,32,1,1,2,0,1,1,bf16,nhwc,wgrad", "1,1,7,7,1,3,3,1,1,2,1,fp32,nhwc,fprop",
        "2,16,8,8,32,1,1,1,0,1,1,bf16,nhwc,fprop", "8,64,16,16,64,1,1,1,0,1,1,fp16,nhwc,wgrad",
    ),
}  # fmt: skip

MAP = "tensor map"
_MAP_WORDS = 16


def main(folder: Path, other_triton: str | None) -> int:
    """Build the stub, then launch every problem of :data:`PROBLEMS`; 1 if anything differs."""
    folder.mkdir(parents=True, exist_ok=True)
    if other_triton:
        sys.path.insert(0, other_triton)
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)

    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia

    from kernels.machine import machine_of_arch
    from kernels.operands import random_operands
    from kernels.problem import Conv, Gemm
    from kernels.registry import all_implementations

    stub = _build_stub(folder, Path(nvidia.__file__).parent / "include")

    class Driver(nvidia.CudaDriver):
        """Triton's own driver, except that it asks PyTorch for no device."""

        def __init__(self) -> None:
            self.utils = nvidia.CudaUtils()
            self.launcher_cls = nvidia.CudaLauncher
            self.get_current_stream = lambda device: 0
            self.get_current_device = lambda: 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", int(ARCH.removeprefix("sm_")), 32)

    triton.runtime.driver.set_active(Driver())
    machine, differing = machine_of_arch(ARCH), 0
    for name, texts in PROBLEMS.items():
        family: Any = all_implementations()[name]
        for text in texts:
            problem = (Conv if name == "triton-conv" else Gemm).parse(text)
            config = family.configs(problem, machine)[0]
            operands = random_operands(problem, "cpu")
            shape = family.scratch(problem, config)
            scratch = torch.empty(shape, dtype=torch.float32)
            for call in family.unbound_calls(problem, operands, config):
                kernel = call.warmup()
                wanted = _parameters(call, kernel, call.bound(scratch))
                stub.expect([kind for kind, _ in wanted])
                call.launch(scratch)
                found = stub.differences(call, kernel, wanted)
                differing += bool(found)
                row = {
                    "triton": triton.__version__, "family": name, "problem": text,
                    "kernel": kernel.metadata.name, "parameters": len(wanted), "differs": found,
                }  # fmt: skip
                print(json.dumps(row), flush=True)
    return int(differing > 0)


def _parameters(call: Any, kernel: Any, arguments: list[Any]) -> list[tuple[str, Any]]:
    """Type and value of each parameter of a compiled kernel: without what was compiled in."""
    values = {**dict(zip(call.kernel.arg_names, arguments, strict=False)), **call.options}
    flat: list[tuple[str, Any]] = []

    def add(kind: Any, value: Any) -> None:
        if isinstance(kind, tuple):
            for one, of_it in zip(kind, value, strict=True):
                add(one, of_it)
        elif kind.startswith("tensordesc"):
            flat.append((MAP, value))
            flat.extend(("i32", size) for size in value.shape)
            flat.extend(("i64", stride) for stride in value.strides)
        elif kind != "constexpr":
            flat.append((kind, value))

    for name in call.kernel.arg_names:
        add(kernel.src.signature[name], values[name])
    return flat


class _Stub:
    """The library that recorded the last launch."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)

    def _read(self, kind: Any, name: str) -> Any:
        return kind.in_dll(self._library, name)

    def expect(self, kinds: list[str]) -> None:
        """Say which parameters the next launch has."""
        self._read(ctypes.c_uint, "parameter_count").value = len(kinds)
        words = self._read(ctypes.c_uint * 256, "parameter_words")
        words[: len(kinds)] = [_MAP_WORDS if kind == MAP else 1 for kind in kinds]

    def differences(self, call: Any, kernel: Any, wanted: list[tuple[str, Any]]) -> list[str]:
        """What of the recorded launch is not what was asked for, as sentences."""
        grid = (*call.grid, 1, 1)[:3]
        facts = {
            "name": (kernel.metadata.name,
                     self._read(ctypes.c_char * 256, "recorded_name").value.decode()),
            "grid": (grid, tuple(self._read(ctypes.c_uint * 3, "recorded_grid"))),
            "threads": (32 * kernel.metadata.num_warps,
                        self._read(ctypes.c_uint, "recorded_block").value),
            "shared bytes": (kernel.metadata.shared,
                             self._read(ctypes.c_uint, "recorded_shared").value),
        }  # fmt: skip
        given = self._read(ctypes.c_uint64 * _MAP_WORDS * 256, "recorded_parameters")
        for i, (kind, value) in enumerate(wanted):
            if kind == MAP:
                words = _map_words(value)
                facts[f"parameter {i} ({kind})"] = words, list(given[i])[: len(words)]
                continue
            bits = 32 if kind == "i32" else 64
            expected = value.data_ptr() if kind.startswith("*") else value & (1 << bits) - 1
            facts[f"parameter {i} ({kind})"] = expected, given[i][0] & (1 << bits) - 1
        return [f"{what}: {got} instead of {want}" for what, (want, got) in facts.items()
                if got != want]  # fmt: skip


def _map_words(descriptor: Any) -> list[int]:
    """What the stub's tensor map of a descriptor holds."""
    size = descriptor.base.element_size()
    strides = [size * stride for stride in descriptor.strides[:-1]]
    shape = [*descriptor.shape]
    return [descriptor.base.data_ptr(), len(shape), *shape[::-1], *strides[::-1]]


def _build_stub(folder: Path, include: Path) -> _Stub:
    library = folder / "libcuda.so.1"
    source = Path(__file__).with_name("stub.c")
    subprocess.run(
        [
            "gcc",
            "-shared",
            "-fPIC",
            "-O1",
            "-Wl,-soname,libcuda.so.1",
            f"-I{include}",
            str(source),
            "-o",
            str(library),
        ],
        check=True,
    )
    return _Stub(library)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2] if len(sys.argv) > 2 else None))
