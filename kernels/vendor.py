"""The vendors' libraries behind PyTorch: cuBLAS and cuDNN on a GPU, the CPU's own elsewhere.

``fp32`` and ``tf32`` are one storage type and two precisions, and PyTorch's defaults differ by
operation: matrix products are IEEE, cuDNN's convolutions tf32. Every launch here says which it
wants, through the ``fp32_precision`` settings alone: PyTorch's older flags (``allow_tf32``) raise
while the two say different things.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.config import Config
from kernels.launch import Launch
from kernels.machine import Machine
from kernels.operands import Operands
from kernels.problem import Conv, Gemm, Problem


@dataclass(frozen=True)
class CudnnConfig(Config):
    """``autotune``: PyTorch's ``cudnn.benchmark``, which times cuDNN's algorithms at first use."""

    autotune: bool = False


class Library:
    """A library that PyTorch calls for some operations and dtypes on one kind of device."""

    def __init__(self, name: str, kind: str, serves: dict[str, tuple[str, ...]]) -> None:
        """``serves`` maps ``gemm`` and ``conv`` to the dtypes that this library computes."""
        self.name = name
        self.kind = kind
        self.serves = serves

    @property
    def ops(self) -> tuple[str, ...]:
        """Operations that the library computes."""
        return tuple(self.serves)

    def supports(self, problem: Problem, machine: Machine) -> str | None:
        """None, or why not."""
        if machine.kind != self.kind:
            return f"{self.name} runs on a {self.kind.upper()}, and this is {machine.name}."
        if problem.dtype not in machine.peaks:
            return f"{machine.name} has no {problem.dtype} arithmetic."
        if problem.op not in self.serves:
            return f"{self.name} does not compute a {problem.op}."
        if problem.dtype not in self.serves[problem.op]:
            return f"PyTorch does not give a {problem.dtype} {problem.op} to {self.name}."
        return None

    def configs(self, problem: Problem, machine: Machine) -> list[Config | None]:
        """The library's own choice; cuDNN also with its autotuner."""
        return [None, CudnnConfig(autotune=True)] if self.name == "cudnn" else [None]

    def parse_config(self, text: str) -> Config | None:
        """Read a config's text."""
        return CudnnConfig.parse(text) if text else None

    def prepare(
        self, problem: Problem, operand_sets: Sequence[Operands], config: Config | None = None
    ) -> Launch:
        """Bind the sets to ``mm``, ``bmm`` or the convolution's pass.

        A GEMM writes into the set's ``out``. A convolution has no such form in PyTorch: its
        result is allocated at each launch, as it is in every model.
        """
        if isinstance(problem, Gemm):
            call = _gemm_call(problem, operand_sets)
        else:
            call = _conv_call(problem, operand_sets)
        autotune = isinstance(config, CudnnConfig) and config.autotune
        settings = functools.partial(
            _precision, problem.dtype, autotune if self.name == "cudnn" else None
        )
        return Launch(call, settings)

    def compile_ahead(self, cases: Sequence[tuple[Problem, Config | None]]) -> None:
        """Nothing to do."""


def _gemm_call(problem: Gemm, sets: Sequence[Operands]) -> Callable[[int], Tensor]:
    multiply = torch.bmm if problem.batch > 1 else torch.mm

    def call(index: int) -> Tensor:
        a, b, out = sets[index]
        return multiply(a, b, out=out)

    return call


def _conv_call(problem: Conv, sets: Sequence[Operands]) -> Callable[[int], Tensor]:
    geometry = (
        list(problem.stride), list(problem.padding), list(problem.dilation), False, [0, 0],
        problem.groups,
    )  # fmt: skip
    if problem.pass_ == "fprop":
        forward = torch.ops.aten.convolution

        def call(index: int) -> Tensor:
            x, w, _ = sets[index]
            return forward(x, w, None, *geometry)

        return call

    backward = torch.ops.aten.convolution_backward
    wanted = 0 if problem.pass_ == "dgrad" else 1
    mask = [wanted == 0, wanted == 1, False]

    def call_backward(index: int) -> Tensor:
        a, b, out = sets[index]
        # The tensor whose gradient is asked for is only looked at for its shape and layout: the
        # result's own place has both.
        dy, x, w = (a, out, b) if wanted == 0 else (b, a, out)
        return backward(dy, x, w, None, *geometry, mask)[wanted]

    return call_backward


@contextmanager
def _precision(dtype: str, autotune: bool | None) -> Iterator[None]:
    """Set fp32's precision everywhere that a product can look, and cuDNN's autotuner; restore."""
    wanted = "tf32" if dtype == "tf32" else "ieee"
    places = (
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,
        torch.backends.cudnn.rnn,
        torch.backends.mkldnn.matmul,
        torch.backends.mkldnn.conv,
        torch.backends.mkldnn.rnn,
    )
    before = [place.fp32_precision for place in places]
    benchmark = torch.backends.cudnn.benchmark
    try:
        for place in places:
            place.fp32_precision = wanted
        if autotune is not None:
            # By attribute: the context manager cudnn.flags() would also switch cuDNN off.
            torch.backends.cudnn.benchmark = autotune
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value
        torch.backends.cudnn.benchmark = benchmark


def libraries() -> list[Library]:
    """cuBLAS, cuDNN, and what this PyTorch computes with on the CPU."""
    gpu = ("fp32", "tf32", "fp16", "bf16")
    return [
        Library("cublas", "gpu", {"gemm": gpu}),
        Library("cudnn", "gpu", {"conv": gpu}),
        *_cpu_libraries(),
    ]


def _cpu_libraries() -> list[Library]:
    """What PyTorch computes with on this CPU: BLAS, oneDNN, and its own loops for the rest.

    oneDNN takes bf16 only where the CPU has vector instructions for it; elsewhere the kernels of
    PyTorch's tensor library, ATen, do. fp16 is left out: without AVX512-FP16 or AMX it is a
    scalar loop.
    """
    blas = "mkl"
    if not torch.backends.mkl.is_available():
        match = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
        blas = match.group(1).lower() if match else "blas"
    by_name: dict[str, dict[str, tuple[str, ...]]] = {blas: {"gemm": ("fp32",)}}
    onednn = torch.backends.mkldnn.is_available()
    fast_bf16 = onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for op, dtype, in_onednn in (
        ("gemm", "bf16", fast_bf16), ("conv", "fp32", onednn), ("conv", "bf16", fast_bf16),
    ):  # fmt: skip
        serves = by_name.setdefault("onednn" if in_onednn else "aten", {})
        serves[op] = (*serves.get(op, ()), dtype)
    return [Library(name, "cpu", serves) for name, serves in by_name.items()]
