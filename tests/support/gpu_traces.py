"""Simulated traces of GPUs as PyTorch's profiler writes them: the keys are real, the times are not.

A step is written as operations that launch kernels. The host launches them one after another, and
each stream of the GPU computes its kernels in order.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

H100_NAME = "NVIDIA H100 80GB HBM3"
A100_NAME = "NVIDIA A100-SXM4-80GB"
DTYPE_NAMES = {
    "fp32": "float", "bf16": "c10::BFloat16", "fp16": "c10::Half", "fp8": "c10::Float8_e4m3fn",
}  # fmt: skip
_BASE = 4_772_211_041_271.7  # µs; profilers count from far away
_CALL = 5.0  # µs of a call that launches a kernel
_STREAM = 7
PROCESS = 4242  # of the host, and its only thread

Kernels = Sequence[tuple[str, float]]


@dataclass
class GpuTrace:
    """A trace that is being made: ``host`` and ``streams`` are how far each of them has come."""

    device: str = H100_NAME
    overhead: float = 3.0  # µs of an operation on the host before and after it launches
    record_shapes: bool = True
    events: list[dict[str, Any]] = field(default_factory=list)
    host: float = _BASE
    streams: dict[int, float] = field(default_factory=dict)
    _number: int = 0

    def _next(self) -> int:
        self._number += 1
        return self._number

    def event(self, cat: str, name: str, ts: float, dur: float, tid: int, **args: Any) -> None:
        pid = 0 if cat in ("kernel", "gpu_memcpy", "gpu_memset") else PROCESS
        self.events.append({
            "ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": round(ts, 3),
            "dur": round(dur, 3), "args": args,
        })  # fmt: skip

    def op(
        self,
        name: str,
        dims: list[Any] | None = None,
        strides: list[Any] | None = None,
        types: list[str] | None = None,
        settings: list[str] | None = None,
        kernels: Kernels = (),
        around: str = "",
        stream: int = _STREAM,
        lost_call: bool = False,
        lost_kernel: bool = False,
    ) -> None:
        """An operation that launches kernels, within another one if ``around`` names it."""
        begin, ident = self.host, self._next()
        args: dict[str, Any] = {"External id": ident, "Record function id": 0, "Ev Idx": ident}
        if self.record_shapes and dims is not None:
            args |= {
                "Concrete Inputs": settings or [""] * len(dims), "Input type": types,
                "Input Strides": strides, "Input Dims": dims,
            }  # fmt: skip
        self.host += self.overhead
        for kernel, dur in kernels:
            call = self._next()
            if not lost_call:
                self.event(
                    "cuda_runtime", "cudaLaunchKernel", self.host, _CALL, PROCESS,
                    **{"External id": ident, "cbid": 211, "correlation": call},
                )  # fmt: skip
            self.host += _CALL
            if not lost_kernel:
                self.kernel(kernel, dur, call, stream, ident)
        self.host += self.overhead
        if around:
            outer = dict(args, **{"External id": self._next()})
            self.event("cpu_op", around, begin - 1, self.host - begin + 2, PROCESS, **outer)
        self.event("cpu_op", name, begin, self.host - begin, PROCESS, **args)
        self.host += 2.0

    def kernel(
        self, name: str, dur: float, call: int, stream: int = _STREAM, ident: int = 0,
        graph: int = 0,
    ) -> None:  # fmt: skip
        """A kernel that begins when its launch and the kernel before it have ended."""
        begin = max(self.streams.get(stream, 0.0) + 0.8, self.host + 1.0)
        self.streams[stream] = begin + dur
        args = {
            "External id": ident, "queued": 0, "device": 0, "context": 1, "stream": stream,
            "correlation": call, "registers per thread": 168, "shared memory": 213248,
            "blocks per SM": 1.0, "warps per SM": 12.0, "grid": [2, 66, 1], "block": [384, 1, 1],
            "est. achieved occupancy %": 0, "graph id": graph, "graph node id": graph,
        }  # fmt: skip
        self.event("kernel", name, begin, dur, stream, **args)

    def graph(self, kernels: Kernels, pause: float = 0.0) -> None:
        """A CUDA graph: one call launches all kernels, and no operation is known."""
        call = self._next()
        self.host += pause
        self.event(
            "cuda_runtime", "cudaGraphLaunch", self.host, _CALL, PROCESS,
            **{"External id": 0, "cbid": 311, "correlation": call},
        )  # fmt: skip
        self.host += _CALL
        for name, dur in kernels:
            self.kernel(name, dur, call, graph=5)

    def copy(self, direction: str, dur: float) -> None:
        """A copy between host and device, for which the host waits."""
        call, ident = self._next(), self._next()
        begin = self.host
        self.event(
            "cuda_runtime", "cudaMemcpyAsync", begin + 1, _CALL, PROCESS,
            **{"External id": ident, "cbid": 41, "correlation": call},
        )  # fmt: skip
        start = max(begin + 8, self.streams.get(_STREAM, 0.0) + 1)
        self.event(
            "gpu_memcpy", f"Memcpy {direction} (Pageable -> Device)", start, dur, _STREAM,
            **{"External id": ident, "device": 0, "context": 1, "stream": _STREAM,
               "correlation": call, "bytes": 4096, "memory bandwidth (GB/s)": 1.0},
        )  # fmt: skip
        self.streams[_STREAM] = start + dur
        self.host = start + dur + 5
        self.event("cpu_op", "aten::copy_", begin, self.host - begin, PROCESS,
                   **{"External id": ident})  # fmt: skip

    def gemm(
        self, m: int, n: int, k: int, dtype: str, kernels: Kernels, name: str = "aten::mm",
        around: str = "aten::linear", **more: Any,
    ) -> None:  # fmt: skip
        """``y = x Wᵀ`` as a linear layer without a bias computes it."""
        kind = DTYPE_NAMES[dtype]
        self.op(name, [[m, k], [k, n]], [[k, 1], [1, k]], [kind, kind], ["", ""], kernels, around,
                **more)  # fmt: skip

    def gradients(self, m: int, n: int, k: int, dgrad: Kernels, wgrad: Kernels) -> None:
        """The gradients of ``y = x Wᵀ`` in bf16, by the input and by the weight."""
        kinds = [DTYPE_NAMES["bf16"]] * 2
        node = "MmBackward0"
        self.op("aten::mm", [[m, n], [n, k]], [[n, 1], [k, 1]], kinds, ["", ""], dgrad, node)
        self.op("aten::mm", [[n, m], [m, k]], [[1, n], [k, 1]], kinds, ["", ""], wgrad, node)

    def conv(
        self, sizes: tuple[int, int, int, int], kout: int, taps: int, dtype: str, kernels: Kernels,
        nhwc: bool = True,
    ) -> None:  # fmt: skip
        """A forward convolution as cuDNN computes it, with padding that keeps the size."""
        n, c, h, w = sizes
        strides = [c * h * w, 1, c * w, c] if nhwc else [c * h * w, h * w, w, 1]
        filters = (
            [c * taps * taps, 1, c * taps, c] if nhwc else [c * taps * taps, taps * taps, taps, 1]
        )
        kind, pad = DTYPE_NAMES[dtype], taps // 2
        self.op(
            "aten::cudnn_convolution",
            [[n, c, h, w], [kout, c, taps, taps], [], [], [], [], [], [], []],
            [strides, filters, [], [], [], [], [], [], []],
            [kind, kind, "ScalarList", "ScalarList", "ScalarList", *["Scalar"] * 4],
            ["", "", f"[{pad}, {pad}]", "[1, 1]", "[1, 1]", "1", "False", "False", "True"],
            kernels, "aten::_convolution",
        )  # fmt: skip

    def document(self) -> dict[str, Any]:
        """The trace as the profiler exports it."""
        return {
            "schemaVersion": 1,
            "deviceProperties": [{
                "id": 0, "name": self.device, "totalGlobalMem": 85045870592, "computeMajor": 9,
                "computeMinor": 0, "warpSize": 32, "numSms": 132,
            }],
            "cupti_version": 24, "cuda_runtime_version": 12060, "record_shapes": 1,
            "trace_id": "0" * 32, "displayTimeUnit": "ms",
            "baseTimeNanoseconds": 1_790_857_026_000_000_000,
            "traceEvents": [
                {"ph": "M", "name": "process_name", "ts": _BASE, "pid": 0, "tid": 0,
                 "args": {"name": "python"}},
                *sorted(self.events, key=lambda e: (str(e["pid"]), e["ts"], -e["dur"])),
                {"ph": "s", "id": 3, "pid": PROCESS, "tid": PROCESS, "ts": _BASE, "cat": "ac2g",
                 "name": "ac2g"},
            ],
            "traceName": "trace.json",
        }  # fmt: skip

    def write(self, path: Path) -> Path:
        """Write the trace, compressed if the name ends in .gz."""
        data = json.dumps(self.document()).encode()
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
        return path


NVJET = "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT"
ALIGN2 = (
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align2>"
    "(cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align2::Params)"
)
_LAYERS = {  # features out and in: µs of the forward pass and of both gradients
    (2304, 768): (45.0, 41.0, 46.0),
    (768, 768): (17.0, 17.0, 20.0),
    (3072, 768): (60.0, 53.0, 54.0),
    (768, 3072): (53.0, 60.0, 54.0),
}


def training_step(layers: int = 12, tokens: int = 8192, vocabulary: int = 50257) -> GpuTrace:
    """A step of a GPT-2 that takes as long as an H100 is expected to, but for its vocabulary.

    Its size is not a multiple of 8, so its GEMMs run on a kernel that loads two elements at a time.
    """
    made = GpuTrace()
    for gradients in (False, True):
        for _ in range(layers):
            for (n, k), (forward, dgrad, wgrad) in _LAYERS.items():
                if gradients:
                    made.gradients(tokens, n, k, [(NVJET, dgrad)], [(NVJET, wgrad)])
                else:
                    made.gemm(tokens, n, k, "bf16", [(NVJET, forward)])
            made.op("aten::native_layer_norm", kernels=[("vectorized_layer_norm_kernel", 25.0)])
            made.op("aten::gelu", kernels=[("vectorized_elementwise_kernel", 60.0)])
        if not gradients:
            made.gemm(tokens, vocabulary, 768, "bf16", [(ALIGN2, 3400.0)])
            made.op("aten::_log_softmax", kernels=[("cunn_SoftMaxForward", 900.0)])
            made.gradients(tokens, vocabulary, 768, [(ALIGN2, 3300.0)], [(ALIGN2, 3500.0)])
    return made
