"""Rotate results through memory that is not cached, for launches that allocate their result.

If the caller drops each result, PyTorch's allocator returns the same block for every launch, and
all results of a batch are written to memory that the last-level cache still holds. Such launches
would seem faster than a kernel that writes to the result buffers of its operand sets, which are not
cached. This module therefore keeps the latest results alive, so that the allocator returns other
blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.config import ceil_div


class ResultRotation:
    """Latest results of the case that is being timed.

    There are as many results as a batch has launches, or fewer if fewer fill the cache twice.
    """

    def __init__(self, cache_bytes: int) -> None:
        self._bytes = 2 * cache_bytes
        self._kept: deque[Tensor] = deque()

    def launch(self, bare: Callable[[int], Tensor], example: Tensor) -> RotatingLaunch:
        """Wrap the launch ``bare`` so that its results, all shaped like ``example``, rotate."""
        return RotatingLaunch(bare, example, self)

    def reserve(self, example: Tensor, launches: int) -> None:
        """Drop the kept results, and hold unused blocks for the results of the next batch.

        The blocks are allocated here because an allocation in a timed batch may wait for the
        device.
        """
        self._kept.clear()
        # With this many blocks, a batch writes at least twice the cache's size before it writes to
        # a block again, if it does so at all.
        count = min(launches, ceil_div(self._bytes, example.nbytes))
        self._kept.extend(torch.empty_like(example) for _ in range(count))

    def replace(self, bare: Callable[[int], Tensor], index: int) -> Tensor:
        """Release the oldest kept result, launch into its memory, and keep the new result.

        PyTorch's allocator gives the released memory to the result that ``bare`` allocates, because
        all results are shaped alike.
        """
        if self._kept:
            self._kept.popleft()
        result = bare(index)
        self._kept.append(result)
        return result


class RotatingLaunch:
    """Launch of one case whose results rotate. Call :meth:`renew` before each batch."""

    def __init__(
        self, bare: Callable[[int], Tensor], example: Tensor, rotation: ResultRotation
    ) -> None:
        self._bare, self._example, self._rotation = bare, example, rotation

    def __call__(self, index: int) -> Tensor:
        """Launch once on the operand set with this index."""
        return self._rotation.replace(self._bare, index)

    def renew(self, launches: int) -> None:
        """Drop the kept results, and hold unused blocks for a batch of this many launches."""
        self._rotation.reserve(self._example, launches)
