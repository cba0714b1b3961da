"""Operand arena: memory for inputs and results, handed out as views.

Inputs are filled with normally distributed values. Kernels would run faster on zeros and constants,
because computing with these draws less power. The column ``fill`` of measurements.csv records the
distribution. Results have separate memory. If results overwrote the inputs, repeated multiplication
would make the values overflow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.config import DENSE, Storage, ceil_div
from kernels.operands import TORCH_DTYPES, Operands, element_counts, view_operands
from kernels.operation import Workload
from kernels.problem import DTYPE_BYTES

_ALIGN = 256  # bytes; each view is aligned like a block of cudaMalloc
_DRAWN = 4_194_319  # length of the block of random numbers that fills inputs; prime, see _fill


class ArenaFullError(Exception):
    """Raised when the arena has no room for the inputs or the result of one operand set."""


class Arena:
    """Flat memory on one device, handed out as views."""

    def __init__(self, device: str, cache_bytes: int, max_bytes: int) -> None:
        """Allocate the buffer with which :meth:`flush` evicts a cache of ``cache_bytes`` bytes.

        For each dtype, the inputs and the results each get at most ``max_bytes`` bytes.
        """
        self._device = device
        self._max_bytes = max_bytes
        self._needed: dict[torch.dtype, tuple[int, int]] = {}  # bytes of inputs and of results
        self._inputs: dict[torch.dtype, Tensor] = {}
        self._results: dict[torch.dtype, Tensor] = {}
        # Flushing reads this and never writes it: dirty lines would be written back to memory while
        # a kernel is timed.
        self._flush = torch.ones(2 * cache_bytes // torch.float32.itemsize, device=device)

    def reserve(
        self, problem: Workload, copies: int, shared_a: bool = False, storage: Storage = DENSE
    ) -> None:
        """Announce that ``copies`` operand sets of a problem are needed.

        All problems of a dtype must be announced before :meth:`capacity` or :meth:`sets` is called
        for that dtype, because the largest need determines the size of the memory. A problem that
        does not fit in the arena is ignored. With ``shared_a``, all sets share one first operand.
        """
        a_bytes, b_bytes, out_bytes = _padded_bytes(problem, storage)
        if max(a_bytes + b_bytes, out_bytes) > self._max_bytes:
            return
        input_bytes = a_bytes + b_bytes + (copies - 1) * set_bytes(problem, shared_a, storage)
        result_bytes = copies * out_bytes
        # A need above the limit is reduced to the limit. The problem then gets fewer sets, see
        # capacity().
        dtype = TORCH_DTYPES[problem.dtype]
        earlier_input_bytes, earlier_result_bytes = self._needed.get(dtype, (0, 0))
        self._needed[dtype] = (
            max(earlier_input_bytes, min(input_bytes, self._max_bytes)),
            max(earlier_result_bytes, min(result_bytes, self._max_bytes)),
        )

    def capacity(self, problem: Workload, shared_a: bool = False, storage: Storage = DENSE) -> int:
        """Return how many operand sets of a problem, with different inputs, the arena can hold.

        If necessary, the arena's memory for the problem's dtype is allocated first.

        Raises:
            ArenaFullError: if the arena has no room for the inputs or the result of one set.
            RuntimeError: if the device cannot hold the arena.
        """
        inputs, results = self._memory(problem, storage)
        a_bytes, b_bytes, out_bytes = _padded_bytes(problem, storage)
        first_set_bytes = a_bytes + b_bytes
        if first_set_bytes > inputs.nbytes:
            raise ArenaFullError(
                f"the inputs of one operand set need {first_set_bytes / 1e9:.2f} GB, but there is "
                f"room for only {inputs.nbytes / 1e9:.2f} GB."
            )
        if out_bytes > results.nbytes:
            raise ArenaFullError(
                f"the result of one launch needs {out_bytes / 1e9:.2f} GB, but there is room for "
                f"only {results.nbytes / 1e9:.2f} GB."
            )
        return 1 + (inputs.nbytes - first_set_bytes) // set_bytes(problem, shared_a, storage)

    def sets(
        self, problem: Workload, count: int, shared_a: bool = False, storage: Storage = DENSE
    ) -> list[Operands]:
        """Return ``count`` operand sets with different inputs.

        ``count`` is at most :meth:`capacity`. With ``shared_a``, only the second operands differ.
        If memory is short, several sets share the memory for their results.
        """
        inputs, results = self._memory(problem, storage)
        count_a, count_b, count_out = element_counts(problem, storage)
        step_a, step_b, step_out = _padded_counts(problem, storage)
        # The layout is A B A B …, or A B B … where the first operand is shared. Either way, B of
        # set i begins one A and i steps after the start.
        step = step_b if shared_a else step_a + step_b
        # If there are fewer slots for results than sets, the sets use the slots in turn.
        result_slots = max(1, results.numel() // step_out)
        operand_sets = []
        for index in range(count):
            start_a = 0 if shared_a else index * step
            start_b = step_a + index * step
            start_out = index % result_slots * step_out
            operand_sets.append(
                view_operands(
                    problem,
                    inputs[start_a : start_a + count_a],
                    inputs[start_b : start_b + count_b],
                    results[start_out : start_out + count_out],
                    storage,
                )
            )
        return operand_sets

    def flush(self) -> None:
        """Evict the cache by reading twice its size from memory. On a GPU, only queue the read."""
        self._flush.sum()

    def restore(self) -> None:
        """Restore the values of all inputs, because a wrong kernel may have written anywhere."""
        for inputs in self._inputs.values():
            self._fill(inputs)

    def _fill(self, inputs: Tensor) -> None:
        """Fill inputs with normally distributed values, which are the same in every call."""
        # One block of random numbers is repeated. More numbers would take a CPU long to draw, and
        # as many as there are inputs would need a second arena in fp32, which does not fit. The
        # block's length is a prime, so that no two rows are alike in a matrix of fewer rows and
        # columns.
        generator = torch.Generator(self._device).manual_seed(0)
        values = torch.randn(_DRAWN, generator=generator, device=self._device)
        for chunk in inputs.split(_DRAWN):
            chunk.copy_(values[: len(chunk)])

    def _memory(self, problem: Workload, storage: Storage = DENSE) -> tuple[Tensor, Tensor]:
        """Return the memory for the inputs and the results of a problem's dtype."""
        dtype = TORCH_DTYPES[problem.dtype]
        if dtype not in self._inputs:
            if dtype not in self._needed:
                self.reserve(problem, 1, storage=storage)
            # If not even one set of the problem fits, nothing is reserved.
            input_bytes, result_bytes = self._needed.get(dtype, (0, 0))
            inputs = torch.empty(input_bytes // dtype.itemsize, dtype=dtype, device=self._device)
            results = torch.empty(result_bytes // dtype.itemsize, dtype=dtype, device=self._device)
            self._fill(inputs)
            self._inputs[dtype], self._results[dtype] = inputs, results
        return self._inputs[dtype], self._results[dtype]


def set_bytes(problem: Workload, shared_a: bool = False, storage: Storage = DENSE) -> int:
    """Return the number of bytes that the inputs of one more operand set take in the arena.

    With ``shared_a``, only the second operand is counted.
    """
    a_bytes, b_bytes, _ = _padded_bytes(problem, storage)
    return b_bytes if shared_a else a_bytes + b_bytes


def _padded_counts(problem: Workload, storage: Storage) -> tuple[int, int, int]:
    """Return the element counts of A, B and the result, rounded up to align the next view."""
    unit = _ALIGN // DTYPE_BYTES[problem.dtype]  # elements between two aligned addresses
    count_a, count_b, count_out = element_counts(problem, storage)
    return (
        ceil_div(count_a, unit) * unit,
        ceil_div(count_b, unit) * unit,
        ceil_div(count_out, unit) * unit,
    )


def _padded_bytes(problem: Workload, storage: Storage) -> tuple[int, int, int]:
    element_bytes = DTYPE_BYTES[problem.dtype]
    count_a, count_b, count_out = _padded_counts(problem, storage)
    return count_a * element_bytes, count_b * element_bytes, count_out * element_bytes
