"""Predict the times of single attention calls."""

from __future__ import annotations

from typing import Any

from analysis.model.attention_basis import FRAMEWORKS, find_attention
from analysis.model.basis import Basis
from kernels.common.checks import check_option, check_size, check_word, is_whole
from kernels.common.errors import UserError
from kernels.problem import DTYPE_BYTES
from sweeps.capture.captured import Attention

CAUSAL, FULL, DECODE = "causal", "full", "decode"
_SIZES = ("B", "S", "HEADS", "KV_HEADS", "HEAD_DIM")
_FORM = f"{','.join(_SIZES)},dtype[,{CAUSAL}|{FULL}|{DECODE}]"
_FIELDS_WITH_MASK = len(_SIZES) + 2  # the sizes, the dtype and the mask
_LIMIT_WORDS = {"compute": "arithmetic", "memory": "memory", "launch": "launching"}


def parse_attention(text: str) -> Attention:
    """Parse an attention call from the command line, such as ``8,2048,32,8,128,bf16,causal``.

    The text has the form ``B,S,HEADS,KV_HEADS,HEAD_DIM,dtype[,mask]``, where the mask is ``causal``
    (the default), ``full`` or ``decode``. With ``decode``, each of the B sequences has one query
    and S keys.

    Raises:
        UserError: if the text does not describe a valid attention call.
    """
    fields = [field.strip().lower() for field in text.split(",")]
    if len(fields) < _FIELDS_WITH_MASK:
        fields.append(CAUSAL)
    *sizes, dtype, mask = fields
    if len(sizes) != len(_SIZES) or not all(is_whole(size) and int(size) for size in sizes):
        raise UserError(
            f"{text!r} is not an attention call; give --attention as {_FORM}, such as "
            "8,2048,32,8,128,bf16."
        )
    for name, size in zip(_SIZES, sizes, strict=True):
        check_size(int(size), name)
    check_word("dtype", dtype, DTYPE_BYTES)
    check_option("--attention", mask, (CAUSAL, FULL, DECODE))
    batch, tokens, heads, kv_heads, head_width = [int(size) for size in sizes]
    return Attention(
        batch,
        heads,
        kv_heads,
        queries=1 if mask == DECODE else tokens,
        keys=tokens,
        width=head_width,
        value_width=head_width,
        dtype=dtype,
        causal=mask == CAUSAL,
    )


def attention_row(work: Attention, basis: Basis, framework: str | None) -> dict[str, Any]:
    """Return the row that ``predict --json`` prints for an attention call.

    ``framework`` is the name of the framework that computes the attention; None if the user did not
    name one.

    Raises:
        UserError: if the machine or the dtype is not supported, if the named framework has no fits,
            or if the file with the fits cannot be read.
    """
    machine = basis.model.machine
    attention_basis = find_attention(machine, work.dtype, basis.attention_folder)
    if attention_basis is None:
        if machine.kind == "cpu":
            remedy = "give a GPU as --machine"
        else:
            remedy = "give bf16 or fp16 as the dtype in --attention"
        raise UserError(
            f"attention in {work.dtype} cannot be predicted for {machine.slug}; {remedy}."
        )
    peak = machine.peak(work.dtype)
    if framework is not None:
        check_option("--attention-kernel", framework, FRAMEWORKS)
    time = attention_basis.predict(work, framework)
    flops_per_second = work.flops / time.seconds
    peak_share = flops_per_second / peak
    return {
        "machine": machine.slug,
        "problem": work.spec(),
        "time_us": time.seconds * 1e6,
        "lo_us": time.lo * 1e6,
        "hi_us": time.hi * 1e6,
        "tflops": flops_per_second / 1e12,
        "limit": time.limit,
        "peak_share": peak_share,
        "evidence": "predicted",
        "basis": attention_basis.kind,
        "source": attention_basis.source(framework),
        "explanation": f"limited by {_LIMIT_WORDS[time.limit]}, at {peak_share:.0%} of the peak",
    }
