"""Read facts about a kernel from its name, such as its kind, tile and number of stages.

Vendor libraries do not report how their kernels are tuned, but the kernels' names often show it.
A fact that a name does not show is None; an unknown kind is ``other``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

_MULTIPLYING_KINDS = ("gemm", "conv", "winograd", "fft", "attention", "gemv")
"""Kinds of kernels that do the arithmetic of a GEMM, a convolution or attention."""

KINDS = (*_MULTIPLYING_KINDS, "reduce", "transform", "elementwise", "other")
"""All kinds of kernels."""


@dataclass(frozen=True)
class KernelName:
    """Facts read from one kernel's name.

    ``tile`` has two sizes in the order in which the name lists them. Some names list the columns
    first (see :meth:`tile_text`).
    """

    kind: str
    library: str | None = None  # cublas, cudnn, cutlass, onednn, mkl, triton
    tile: tuple[int, int] | None = None
    depth: int | None = None  # elements along K in one step of the loop over K
    stages: int | None = None
    cluster: tuple[int, int] | None = None
    split_k: bool | None = None
    alignment: int | None = None  # elements
    tensor_cores: bool | None = None

    def tile_text(self) -> str:
        """Return the tile of a row-major result as ``ROWSxCOLUMNS[xDEPTH]``, or "" if unknown.

        PyTorch asks cuBLAS for Cᵀ = Bᵀ Aᵀ, so the names of cuBLAS's GEMM kernels list the columns
        first. Some of these kernels are CUTLASS kernels.
        """
        if self.tile is None:
            return ""
        rows, columns = self.tile
        if self.kind == "gemm" and self.library in ("cublas", "cutlass"):
            rows, columns = columns, rows
        sizes = [rows, columns] if self.depth is None else [rows, columns, self.depth]
        return "x".join(map(str, sizes))


# The order matters: the first pattern that matches decides.
_KIND_PATTERNS = [
    ("winograd", r"winograd"),
    ("fft", r"\bfft2d|gcgemm|region_transform|flip_filter"),
    ("attention", r"flash_fwd|flash_bwd|\bfmha|_sdpa_"),
    ("transform", r"nchwtonhwc|nhwctonchw|tensortransform|im2col|offsetskernel|kern_precompute|"
                  r"\breorder\b"),
    ("reduce", r"splitkreduce|reduce_kernel|computesum|reduction"),
    ("gemv", r"gemv\w*kernel|gemvns|\bdot_kernel|gemv2"),
    ("conv", r"fprop|dgrad|wgrad|convolve|scudnn|hcudnn|s\d+cudnn|\bconvolution\b|3dconv"),
    ("gemm", r"gemm|nvjet|\bmatmul|inner_product"),
    ("elementwise", r"elementwise"),
]  # fmt: skip

_LIBRARY_PATTERNS = [
    ("cudnn", r"cudnn|fprop|dgrad|wgrad|convolve_|winograd|fft2d|tensortransform"),
    ("cublas", r"cublas|nvjet|^(ampere|volta|turing|maxwell)_|^sgemm_|^gemm|dot_kernel|gemvns"),
    ("cutlass", r"cutlass\w*::kernel|cutlass7kernel|^cutlass_"),
    ("onednn", r"^(matmul|convolution|inner_product|reorder) "),
    ("mkl", r"^mkl_"),
    ("triton", r"^triton_|^_?matmul_"),
]

_CPU = ("onednn", "mkl")  # libraries whose kernel names do not show Tensor Cores

_TENSOR_CORES = re.compile(
    r"nvjet|tensorop|wmma|[sih]\d{3,6}(gemm|cudnn|fprop|dgrad|wgrad)|tensor16x8|gmma|warpgroupsize"
    r"|flash_fwd|flash_bwd|fmha\w*_(bf16|f16)"
    # PyTorch's attention in fp32 multiplies three times in TF32 from Ampere on.
    r"|fmha_cutlass[fb]_f32\w*_sm80"
)
_NO_TENSOR_CORES = re.compile(
    r"simt|ffma|gcgemm|\bsgemm|_sgemm|scudnn|winograd|fft2d|dot_kernel|gemv|elementwise"
    r"|(dgrad|wgrad_alg\d)_engine\w*<float|convolve_common_engine_float"
)
_TILES = [
    re.compile(r"tilesize(\d+)x(\d+)x(\d+)"),
    re.compile(r"nvjet_\w*?_(\d+)x(\d+)_(\d+)x\d+_"),
    re.compile(r"(?:gemm|fprop|dgrad|wgrad)\w*?_(\d+)x(\d+)_(\d+)x\d+_"),
    re.compile(r"\bsgemm_(\d+)x(\d+)x(\d+)"),
    re.compile(r"stages_(?P<depth>\d+)x\d+"),
    re.compile(r"(?:gemm|scudnn)\w*?_(\d+)x(\d+)_"),
]
_STAGES = [
    re.compile(r"nvjet_\w*?_\d+x\d+_\d+x(\d+)_"),
    re.compile(r"_stage(\d+)_"),
    re.compile(r"stages_\d+x(\d+)"),
    re.compile(r"(?:gemm|fprop|dgrad|wgrad)\w*?_\d+x\d+_\d+x(\d+)_"),
]
_CLUSTER = re.compile(r"nvjet_\w*?_\d+x\d+_\d+x\d+_(\d+)x(\d+)_")


@functools.lru_cache(maxsize=4096)
def read_name(name: str) -> KernelName:
    """Return the facts that a kernel's name shows.

    ``name`` is a GPU kernel's name as a profiler prints it, ``<kind> <implementation>`` for a
    oneDNN kernel, or ``mkl_<function>`` for an MKL kernel.
    """
    # 1. Recognise the kind and the library by the first pattern that matches.
    lowered = name.lower()
    kind = _first_match(_KIND_PATTERNS, lowered) or "other"
    library = _first_match(_LIBRARY_PATTERNS, lowered)
    # 2. Read the other facts. Tile, stages, split of K and Tensor Cores are read only for the kinds
    # of kernels that can have them.
    multiplies = kind in _MULTIPLYING_KINDS
    tile: tuple[int, int] | None = None
    depth: int | None = None
    if kind in ("gemm", "conv", "winograd", "fft"):
        tile, depth = _tile(lowered)
    cluster = _CLUSTER.search(lowered)
    align = re.search(r"_align(\d+)", lowered)
    return KernelName(
        kind=kind,
        library=library,
        tile=tile,
        depth=depth,
        stages=_stages(lowered) if multiplies else None,
        cluster=(int(cluster.group(1)), int(cluster.group(2))) if cluster else None,
        split_k=_split_k(lowered) if multiplies else None,
        alignment=int(align.group(1)) if align else None,
        tensor_cores=_tensor_cores(lowered) if multiplies and library not in _CPU else None,
    )


def _first_match(patterns: Sequence[tuple[str, str]], lowered: str) -> str | None:
    for word, pattern in patterns:
        if re.search(pattern, lowered):
            return word
    return None


def conv_algorithm(kernels: Sequence[str]) -> str:
    """Return the algorithm of a convolution, according to the names of all its kernels.

    The result is ``implicit-gemm`` (also for an explicit GEMM), ``winograd-2x2``, ``winograd-4x4``,
    ``fft``, or "" if no name shows the algorithm.
    """
    kinds = {read_name(name).kind for name in kernels}
    if "winograd" in kinds:
        # The three digits in the name of a fused kernel, as in ``tile148`` or ``tile442``, do not
        # tell the size of the output tile: their product is 32 in all known names.
        all_names = " ".join(kernels).lower()
        has_large_tile = re.search(r"winograd_nonfused|winogradforward\w*4x4", all_names)
        return "winograd-4x4" if has_large_tile else "winograd-2x2"
    if "fft" in kinds:
        return "fft"
    return "implicit-gemm" if kinds & {"conv", "gemm"} else ""


def _tile(lowered: str) -> tuple[tuple[int, int] | None, int | None]:
    """Return a kernel's tile and depth; either is None if the name does not show it."""
    tile: tuple[int, int] | None = None
    depth: int | None = None
    for pattern in _TILES:
        match = pattern.search(lowered)
        if match is None:
            continue
        numbers = [int(number) for number in match.groups()]
        # A pattern gives only the depth, only the tile, or both. The first pattern that gives a
        # fact decides it.
        if "depth" in pattern.groupindex:
            if depth is None:
                depth = numbers[0]
        elif tile is None:
            tile = numbers[0], numbers[1]
            if len(numbers) > 2 and depth is None:
                depth = numbers[2]
    return tile, depth


def _stages(lowered: str) -> int | None:
    for pattern in _STAGES:
        match = pattern.search(lowered)
        if match is not None:
            return int(match.group(1))
    return None


def _split_k(lowered: str) -> bool | None:
    if "splitk" in lowered:
        return True
    # An nvjet kernel that splits K says so in its name.
    return False if "nvjet" in lowered else None


def _tensor_cores(lowered: str) -> bool | None:
    # An xmma kernel that multiplies by plain FMAs has ffma in its name.
    # All other xmma kernels use Tensor Cores.
    if "xmma" in lowered:
        return "ffma" not in lowered
    if _TENSOR_CORES.search(lowered):
        return True
    return False if _NO_TENSOR_CORES.search(lowered) else None
