"""Every address that a kernel reads or writes in Triton's interpreter lies in an operand.

A mask that is wrong by a row often goes unnoticed: memory next to an operand belongs to another
one, and what was read there is multiplied by zero. On a GPU such an access may end the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

Span = tuple[int, int]
"""The first address, and the one after the last."""


class OutOfBoundsError(AssertionError):
    """A kernel reads or writes memory that is not its own."""


def span_of(tensor: Tensor) -> Span:
    """The addresses from a tensor's first element to its last one."""
    reach = sum(step * (n - 1) for step, n in zip(tensor.stride(), tensor.shape, strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (reach + 1) * tensor.element_size()


@contextmanager
def guarded(read: Sequence[Tensor], written: Sequence[Tensor]) -> Iterator[None]:
    """Check the kernels launched meanwhile, which may also use what ``torch.empty`` gives them.

    Args:
        read: tensors that may be read.
        written: tensors that may be written, and read.

    Raises:
        OutOfBoundsError: an address lies outside all of them.
    """
    builder = interpreter.interpreter_builder
    load, store, empty = builder.create_masked_load, builder.create_masked_store, torch.empty
    to_write = [span_of(tensor) for tensor in written]
    to_read = [span_of(tensor) for tensor in read]

    def recorded(*size: Any, **how: Any) -> Tensor:
        tensor = empty(*size, **how)
        to_write.append(span_of(tensor))
        return tensor

    def check(pointers: Any, mask: Any, allowed: Sequence[Span], what: str) -> None:
        places = np.broadcast_to(pointers.data, np.shape(mask.data))[np.asarray(mask.data, bool)]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        inside = np.zeros(places.shape, dtype=bool)
        for begin, end in allowed:
            inside |= (places >= begin) & (places + size <= end)
        if not inside.all():
            first = int(places[~inside][0])
            near = min(allowed, key=lambda span: min(abs(first - span[0]), abs(first - span[1])))
            raise OutOfBoundsError(
                f"{int((~inside).sum())} addresses are {what} outside the operands, the first "
                f"{first - near[0]} bytes after the start of one of {near[1] - near[0]} bytes."
            )

    def checked_load(pointers: Any, mask: Any, *more: Any, **named: Any) -> Any:
        check(pointers, mask, [*to_read, *to_write], "read")
        return load(pointers, mask, *more, **named)

    def checked_store(pointers: Any, value: Any, mask: Any, *more: Any, **named: Any) -> Any:
        check(pointers, mask, to_write, "written")
        return store(pointers, value, mask, *more, **named)

    replaced = {"create_masked_load": checked_load, "create_masked_store": checked_store}
    for name, function in replaced.items():
        setattr(builder, name, function)
    torch.empty = recorded
    try:
        yield
    finally:
        torch.empty = empty
        for name in replaced:
            delattr(builder, name)
