"""Find the GEMMs that Inductor, the compiler of ``torch.compile``, pads to aligned sizes.

The rules are those of PyTorch 2.11 (``torch/_inductor/fx_passes/pad_mm.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analysis.advice.times import times_of
from analysis.audit.bandwidth import reached_bandwidth
from analysis.model.basis import Basis
from kernels.config import ceil_div
from kernels.machine import Machine
from kernels.problem import DTYPE_BYTES, Gemm
from sweeps.capture.captured import DGRAD, FORWARD, Product

_LEAST_RATIO = 1.1
"""Speedup, including the time of copies, above which Inductor pads a GEMM."""

_BALANCE_SHARE = 0.5
"""Share of the machine's ridge point that a GEMM's FMAs per element read or written must exceed.

Inductor does not try to pad other GEMMs, because memory limits them."""


def with_padding(products: Sequence[Product], basis: Basis) -> tuple[list[Product], int]:
    """Pad the GEMMs that Inductor pads on a machine.

    Returns:
        All products, with padded sizes where Inductor pads, and the number of bytes that a step
        moves to copy operands into padded tensors.

    Raises:
        UserError: if measurements cannot be read, or if the machine does not support a dtype of the
            GEMMs.
    """
    machine = basis.model.machine
    # 1. Find the GEMMs that Inductor tries to pad. It never pads on a CPU.
    padded_of = {
        product.work: padded
        for product in products
        if isinstance(product.work, Gemm)
        and machine.kind == "gpu"
        and (padded := _padded(product.work, machine)) != product.work
    }
    problems = list(dict.fromkeys([*padded_of, *padded_of.values()]))
    if not problems:
        return list(products), 0
    # 2. Keep the padded GEMM if it is faster, including its copies.
    answers = times_of(problems, basis)
    seconds_of = {
        problem: answer["time_us"] * 1e-6 for problem, answer in zip(problems, answers, strict=True)
    }
    bandwidth = reached_bandwidth(basis)
    computed = []
    total_copied = 0
    for product in products:
        work = product.work
        if isinstance(work, Gemm) and work in padded_of:
            padded = padded_of[work]
            copied = _copied_bytes(product, padded)
            seconds = seconds_of[padded] + copied / bandwidth
            if seconds_of[work] > _LEAST_RATIO * seconds:
                product = replace(product, work=padded)
                total_copied += product.count * copied
        computed.append(product)
    return computed, total_copied


def _padded(gemm: Gemm, machine: Machine) -> Gemm:
    """Return a GEMM with sizes padded to multiples of 16 bytes.

    If Inductor does not try to pad the GEMM, the result is the same GEMM.
    """
    if gemm.dtype not in ("bf16", "fp16", "fp32", "tf32"):
        return gemm
    elements = gemm.m * gemm.k + gemm.n * gemm.k + gemm.m * gemm.n
    if gemm.m * gemm.n * gemm.k / elements <= _BALANCE_SHARE * machine.ridge(gemm.dtype):
        return gemm
    multiple = 16 // DTYPE_BYTES[gemm.dtype]

    # A size of 1 is not padded.
    def whole(size: int) -> int:
        return multiple * int(ceil_div(size, multiple)) if size > 1 else size

    return replace(gemm, m=whole(gemm.m), n=whole(gemm.n), k=whole(gemm.k))


def _copied_bytes(product: Product, padded: Gemm) -> int:
    """Return the number of bytes that are read and written to pad the operands of one GEMM.

    A weight is copied in every step. Other operands are not copied, because the operations that
    compute them write padded outputs.
    """
    gemm = product.work
    assert isinstance(gemm, Gemm)
    has_weight = product.pass_ in (FORWARD, DGRAD) and gemm.batch == 1
    is_padded = (gemm.n, gemm.k) != (padded.n, padded.k)
    if not has_weight or not is_padded:
        return 0
    return (gemm.n * gemm.k + padded.n * padded.k) * DTYPE_BYTES[gemm.dtype]
