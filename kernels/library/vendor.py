"""Libraries that PyTorch calls: cuBLAS and cuDNN on GPUs, a BLAS and oneDNN on CPUs, ATen on both.

In fp32, PyTorch's default is IEEE precision for GEMMs, and tf32 for cuDNN's convolutions. Each
launch sets the precision that it needs, using only the ``fp32_precision`` settings. Reading one of
PyTorch's older flags (``allow_tf32``) raises an error while the flag disagrees with these settings.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch

from kernels.common.errors import UserError
from kernels.config import Config, Storage
from kernels.launch import Launch
from kernels.library.calls import (
    Call,
    conv_call,
    fused_series_call,
    gemm_call,
    graph_captured,
    layer_call,
    lstm_call,
    series_call,
)
from kernels.machine import Machine
from kernels.operands import Operands
from kernels.operation import LAYERS, SERIES, Layer, Series, Workload
from kernels.problem import DTYPE_BYTES, Conv, Gemm

DtypesByOp = dict[str, tuple[str, ...]]
"""Dtypes that a library computes, by operation."""


@dataclass(frozen=True)
class LibraryConfig(Config):
    """Config of a PyTorch call; its text has only the settings that differ from the defaults.

    - ``autotune`` turns on ``cudnn.benchmark``, which times cuDNN's algorithms at first use.
    - ``reduced`` lets cuBLAS add partial sums in 16 bits.
    - ``offset`` and ``ld_multiple`` are the fields of :class:`kernels.config.Storage`.
    - ``fused`` computes a series of GEMMs as one GEMM.
    - ``paced`` times launches at the speed at which the host issues them, so the measured time
      includes the gaps between launches.
    - ``graph`` captures the kernel launches of a call in a CUDA graph, and replays the graph. The
      measured time includes gaps, as with ``paced``.
    """

    autotune: bool = False
    reduced: bool = True
    offset: int = 0
    ld_multiple: int = 1
    fused: bool = False
    paced: bool = False
    graph: bool = False

    def __post_init__(self) -> None:
        if self.ld_multiple < 1:
            raise UserError(f"config ld_multiple must be at least 1, not {self.ld_multiple}.")

    @property
    def storage(self) -> Storage:
        """Placement of the operands in memory."""
        return Storage(self.offset, self.ld_multiple)

    def __str__(self) -> str:
        texts = super().__str__().split(";")  # one for each field, in order
        return ";".join(
            text
            for field, text in zip(fields(self), texts, strict=True)
            if getattr(self, field.name) != field.default
        )


class Library:
    """Library that PyTorch calls for some operations and dtypes.

    ``serves`` holds these dtypes by kind of device, ``gpu`` or ``cpu``, and then by operation.
    """

    def __init__(self, name: str, serves: dict[str, DtypesByOp]) -> None:
        self.name = name
        self.serves = serves

    @property
    def ops(self) -> tuple[str, ...]:
        """Operations that the library computes on at least one kind of device."""
        return tuple(dict.fromkeys(op for served in self.serves.values() for op in served))

    def supports(self, problem: Workload, machine: Machine) -> str | None:
        """Return the reason why the library cannot compute the problem, or None if it can."""
        kinds = [kind for kind, served in self.serves.items() if problem.op in served]
        if not kinds:
            return f"{self.name} does not compute {problem.op}."
        if machine.kind not in kinds:
            return (
                f"{self.name} computes {problem.op} only on a {kinds[0].upper()}; this machine is "
                f"{machine.name}."
            )
        if problem.dtype not in machine.peaks:
            return f"{problem.dtype} is not supported on {machine.name}."
        if problem.dtype not in self.serves[machine.kind][problem.op]:
            return f"PyTorch does not use {self.name} for {problem.dtype} {problem.op}."
        return None

    def configs(
        self, problem: Workload, machine: Machine, experimental: bool = False
    ) -> list[Config | None]:
        """Return the default config, which is None, and the alternative if the problem has one.

        The alternative is ``fused`` for a series, and ``autotune`` for a cuDNN convolution in a
        16-bit dtype. In fp32 and tf32, the autotuner cannot be compared with the default
        (:func:`library_settings`).
        """
        if isinstance(problem, Series):
            return [None, LibraryConfig(fused=True)]
        if self.name == "cudnn" and isinstance(problem, Conv) and DTYPE_BYTES[problem.dtype] == 2:
            return [None, LibraryConfig(autotune=True)]
        return [None]

    def parse_config(self, text: str) -> Config | None:
        """Parse a config's text; return None for an empty text.

        Raises:
            UserError: if the text does not describe a valid :class:`LibraryConfig`.
        """
        return LibraryConfig.parse(text) if text else None

    def prepare(
        self, problem: Workload, operand_sets: Sequence[Operands], config: Config | None = None
    ) -> Launch:
        """Return a launch on the operand sets, which must be stored as the config specifies.

        Raises:
            TypeError: if the config is neither None nor a :class:`LibraryConfig`.
            UserError: if ``ld_multiple`` is more than 1 and the problem is not a GEMM.
            RuntimeError: if ``graph`` is set and PyTorch cannot capture the call.
        """
        library_config = LibraryConfig() if config is None else config
        if not isinstance(library_config, LibraryConfig):
            raise TypeError(f"{self.name} needs a LibraryConfig; use one from configs().")
        if library_config.ld_multiple > 1 and not isinstance(problem, Gemm):
            raise UserError(
                f"config ld_multiple applies only to GEMMs, not to {problem.op}; leave it out."
            )
        settings = functools.partial(library_settings, problem.dtype, library_config)
        call = _call(problem, operand_sets, library_config)
        if library_config.graph:
            # The settings decide which kernels are captured, and a replay does not read them.
            with settings():
                call = graph_captured(call, len(operand_sets))
        paced = library_config.paced or library_config.graph
        return Launch(call, operand_sets, settings, paced)

    def compile_ahead(self, cases: Sequence[tuple[Workload, Config | None]]) -> None:
        """Do nothing: a vendor library has nothing to compile."""


def _call(problem: Workload, sets: Sequence[Operands], library_config: LibraryConfig) -> Call:
    if isinstance(problem, Gemm):
        return gemm_call(problem, sets)
    if isinstance(problem, Conv):
        return conv_call(problem, sets)
    if isinstance(problem, Layer):
        return layer_call(problem, sets)
    if isinstance(problem, Series):
        make_call = fused_series_call if library_config.fused else series_call
        return make_call(problem, sets)
    return lstm_call(problem, sets)


@contextmanager
def library_settings(dtype: str, library_config: LibraryConfig) -> Iterator[None]:
    """Apply PyTorch's process-wide settings for a launch, and restore the previous ones afterwards.

    PyTorch caches one cuDNN execution plan per convolution, whether cuDNN's default choice or the
    autotuner selected it. The key of the cache includes the fp32 precision, which 16-bit
    convolutions ignore. For a 16-bit dtype with ``autotune``, this precision is set to tf32, so
    that the autotuner's plans are cached separately from the default plans. In fp32 and tf32, the
    dtype determines the precision, so the default choice and the autotuner cannot be compared in
    one process.
    """
    cuda, cudnn, onednn = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
    backends = (cuda, cudnn.conv, cudnn.rnn, onednn.matmul, onednn.conv, onednn.rnn)
    separate_plans = library_config.autotune and DTYPE_BYTES[dtype] == 2
    precision = "tf32" if dtype == "tf32" or separate_plans else "ieee"
    switches = [
        *((owner, "fp32_precision", precision) for owner in backends),
        (cuda, "allow_fp16_reduced_precision_reduction", library_config.reduced),
        (cuda, "allow_bf16_reduced_precision_reduction", library_config.reduced),
        # The switch is set as an attribute: the context manager cudnn.flags() would also switch
        # cuDNN off.
        (cudnn, "benchmark", library_config.autotune),
    ]
    saved = [getattr(owner, name) for owner, name, _ in switches]
    try:
        for owner, name, value in switches:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), saved_value in zip(switches, saved, strict=True):
            setattr(owner, name, saved_value)


def libraries() -> list[Library]:
    """Return cuBLAS, cuDNN and ATen for a GPU, and the libraries that PyTorch uses on this CPU."""
    gpu_dtypes = ("fp32", "tf32", "fp16", "bf16")
    layer_dtypes = ("fp32", "fp16", "bf16")  # a memory-bound layer has no use for tf32
    # PyTorch calls cuDNN for an LSTM in bf16 only if it was built with cuDNN 9.13 or later. Older
    # builds use PyTorch's own kernels, so bf16 is left out.
    lstm_dtypes = ("fp32", "tf32", "fp16")
    on_gpu: dict[str, DtypesByOp] = {
        "cublas": dict.fromkeys(("gemm", *SERIES), gpu_dtypes),
        "cudnn": {"conv": gpu_dtypes, "lstm": lstm_dtypes},
        "aten": dict.fromkeys(LAYERS, layer_dtypes),
    }
    # Implementations are found by name, so ATen is one library that serves both kinds.
    serves: dict[str, dict[str, DtypesByOp]] = {}
    for kind, by_name in (("gpu", on_gpu), ("cpu", _served_by_cpu())):
        for name, dtypes_by_op in by_name.items():
            serves.setdefault(name, {})[kind] = dtypes_by_op
    return [Library(name, by_kind) for name, by_kind in serves.items()]


def _served_by_cpu() -> dict[str, DtypesByOp]:
    """Return the dtypes that PyTorch computes on this CPU, by library and operation.

    The libraries are a BLAS, oneDNN and ATen. oneDNN computes bf16 only on CPUs with suitable
    vector instructions. ATen computes bf16 on other CPUs, and takes oneDNN's place in a build of
    PyTorch without oneDNN. fp16 is left out, because PyTorch computes fp16 in a scalar loop on CPUs
    without AVX512-FP16 or AMX.
    """
    # 1. Find out which libraries this build of PyTorch has.
    blas = "mkl"
    if not torch.backends.mkl.is_available():
        match = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
        blas = match.group(1).lower() if match else "blas"
    has_onednn = torch.backends.mkldnn.is_available()
    fast_bf16 = has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    # 2. Collect the dtypes of each library's operations.
    gemms = ("gemm", *SERIES)
    # The dtypes, by the library's name and then by operation.
    served: dict[str, DtypesByOp] = {blas: dict.fromkeys(gemms, ("fp32",))}
    # Each line has operations, a dtype, and whether oneDNN computes them in place of ATen.
    for ops, dtype, in_onednn in (
        (gemms, "bf16", fast_bf16),
        (("conv", "lstm"), "fp32", has_onednn),
        (("conv", "lstm"), "bf16", fast_bf16),
        (LAYERS, "fp32", False),
        (LAYERS, "bf16", False),
    ):
        dtypes_by_op = served.setdefault("onednn" if in_onednn else "aten", {})
        for op in ops:
            dtypes_by_op[op] = (*dtypes_by_op.get(op, ()), dtype)
    return served
