"""One step of a model, captured: what it multiplies, what it moves, and what its sizes do to it."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.common.errors import UserError
from sweeps.capture.attention import OneAttention
from sweeps.capture.captured import Attention, Captured, Dimension, Product
from sweeps.capture.products import products_of
from sweeps.capture.step import (
    DECODE,
    PREFILL,
    TORCH_DTYPES,
    TRAIN,
    ModelSource,
    ModelStep,
    first_line,
)
from sweeps.capture.trace import trace
from sweeps.capture.traffic import bytes_moved

_SIZE = re.compile(
    r"size|dim|d_model|d_ff|d_kv|n_embd|n_inner|n_head|heads|rank|experts|width|channels|features"
    r"|ffn|vocab|hidden|stem|classes|intermediate"
)
_HEADS = re.compile(r"heads|n_head$")
_NO_SIZE = re.compile(
    r"token|layer|position|window|patch|image|kernel|stride|per_tok|top|n_group|factor|chunk|_id$"
    r"|type_vocab|depth|block|bucket|num_labels|index"
)


def capture(
    source: ModelSource, step: ModelStep, changes: Mapping[str, int] | None = None
) -> Captured:
    """One step of a model, with some sizes changed, without memory and without a GPU.

    Raises:
        UserError: it cannot be built or called with these sizes.
    """
    with fake_tensors(), _autocast(step):
        try:
            started = source.start(step, changes or {})
            with OneAttention(), torch.set_grad_enabled(step.mode == TRAIN):
                operations = trace(started.model, started.call, backward=step.mode == TRAIN)
        except UserError:
            raise
        except Exception as error:  # whatever a model's own code raises at sizes of any kind
            raise UserError(f"{source.name} cannot be computed: {first_line(error)}") from error
    parameters = list(started.model.parameters())
    products, unknown = products_of(operations)
    return Captured(
        products=tuple(_of_context(product, step) for product in products),
        moved=bytes_moved(operations, fused=False),
        moved_fused=bytes_moved(operations, fused=True),
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        uncounted=tuple(unknown),
        assumptions=started.assumptions,
    )


def dimensions(
    source: ModelSource, step: ModelStep, base: Captured, named: Sequence[str] = ()
) -> list[Dimension]:
    """The sizes of a model that change its products, and how.

    Each is changed by a step that the model allows, and the products are compared. ``named`` are
    those that are asked for; else all whose names say that they are sizes.

    Raises:
        UserError: the model has no size of a name that is asked for.
    """
    sizes = source.sizes
    for name in named:
        if name not in sizes:
            known = ", ".join(sorted(sizes)) or "none"
            raise UserError(f"{source.name} has no size {name!r} to vary; available: {known}.")
    wanted = named or [
        name
        for name, value in sizes.items()
        if value > 1 and _SIZE.search(name) and not _NO_SIZE.search(name)
    ]
    forward = replace(step, mode=PREFILL if step.mode == TRAIN else step.mode)
    plain = capture(source, forward) if step.mode == TRAIN else base
    unit = 2 * math.lcm(1, *(v for n, v in sizes.items() if _HEADS.search(n) and v > 0))
    found = []
    for name in wanted:
        dimension = _dimension(source, forward, plain, name, sizes[name], unit)
        if dimension is not None:
            found.append(dimension)
    return found


def _dimension(
    source: ModelSource, step: ModelStep, base: Captured, name: str, value: int, unit: int
) -> Dimension | None:
    for other in dict.fromkeys((value + unit, value + 64, 2 * value, value // 2, value + 8)):
        if other < 1 or other == value:
            continue
        try:
            changed = capture(source, step, {name: other})
        except UserError:
            continue
        if not _comparable(base.products, changed.products):
            continue
        slopes = {
            (place, size): (changed.products[place].sizes[size] - before) / (other - value)
            for place, product in enumerate(base.products)
            for size, before in product.sizes.items()
            if changed.products[place].sizes[size] != before
        }
        return Dimension(name, value, slopes) if slopes else None
    return None


def _comparable(one: Sequence[Product], other: Sequence[Product]) -> bool:
    return len(one) == len(other) and all(
        (a.path, a.pass_, a.work.op, a.count) == (b.path, b.pass_, b.work.op, b.count)
        for a, b in zip(one, other, strict=True)
    )


def _of_context(product: Product, step: ModelStep) -> Product:
    """When decoding, the keys are those of all tokens before; fp32 may be multiplied as TF32."""
    if isinstance(product.work, Attention) and step.mode == DECODE:
        known = replace(product.work, keys=step.seq + step.tokens, causal=False)
        product = replace(product, work=known)
    if step.dtype == "tf32" and product.work.dtype == "fp32":
        product = replace(product, work=replace(product.work, dtype="tf32"))
    return product


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Where tensors have shapes and no values, as if on the CPU.

    On the device ``meta``, masks would be read and attention taken apart.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.disabled = True  # a size that does not fit is an answer here, not an accident
    try:
        with (
            warnings.catch_warnings(),
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.device("cpu"),
        ):
            warnings.simplefilter("ignore")  # of models' own code, about what nobody computes
            yield
    finally:
        log.disabled = False


def _autocast(step: ModelStep) -> contextlib.AbstractContextManager[object]:
    if not step.autocast:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=TORCH_DTYPES[step.dtype])
