"""Check the results of a case's launches before, during and after its samples.

A kernel may be wrong from the start, or only after many launches. It may be wrong only now and
then, only on certain operand sets, or only in a corner of the result. It may also compute nothing,
and return the result of an earlier launch. The checks are designed to detect all of these faults.
The sampler decides which batches are checked.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kernels.common.errors import WrongResultError
from kernels.correctness.verify import CheckVerdict, verify
from kernels.launch import Launch
from kernels.operands import Operands
from kernels.operation import Workload

_CHANGED = CheckVerdict(math.nan, math.nan, "the kernel changes its operands.")


class ResultChecker:
    """Checker of one case's launches.

    Checks test Freivalds' identity alternately from the left and from the right. The check before
    timing also compares sampled entries with a reference in float64. For memory-bound layers and
    LSTMs, to which the identity does not apply, every check compares entries.
    """

    def __init__(self, problem: Workload, launch: Launch, seed: str) -> None:
        """Prepare the checks of a case; ``seed`` should differ between cases and processes."""
        self._problem = problem
        self._launch = launch
        self._random = random.Random(seed)
        self._side = self._random.randrange(2)
        self._negated: int | None = None  # set whose first operand is negated at present
        self.first_seconds = 0.0
        """Seconds until the launch of :meth:`check_before_timing` returned.

        A launch on a GPU returns before its result is computed."""
        self.allocates = False
        """True if the launch of :meth:`check_before_timing` allocated memory for its result."""
        # Norms of the operands of the first and the last set, by the index of the set.
        self._norms = {i: _norms(launch.sets[i]) for i in {0, len(launch.sets) - 1}}

    def for_sets(self, launch: Launch) -> ResultChecker:
        """Switch to a launch that has the same first operand set, and return this checker."""
        self._launch = launch
        last = len(launch.sets) - 1
        if last not in self._norms:
            self._norms[last] = _norms(launch.sets[last])
        return self

    def check_before_timing(self) -> CheckVerdict:
        """Launch on the first set, and return a verdict on the result and the operands."""
        self._launch.sets[0].out.fill_(math.nan)
        begin = time.perf_counter()
        result = self._launch(0)
        self.first_seconds = time.perf_counter() - begin
        self.allocates = result.data_ptr() != self._launch.sets[0].out.data_ptr()
        verdict = self._check_results({0: result}, entries=True)
        return verdict if self._unchanged() else _CHANGED

    def poison(self, changed: int | None) -> None:
        """Fill every result buffer with a wrong value, so that unwritten elements are found.

        If ``changed`` is None, the value is NaN. If ``changed`` is the index of a set, the value is
        0, because a kernel might compute only where it finds NaN. The first operand of this set is
        then negated until :meth:`release`, so that a result from an earlier launch is wrong, too.
        """
        self.release()  # if the batch is timed a second time, an operand is still negated
        if changed is not None:
            self._launch.sets[changed].a.neg_()
            self._negated = changed
        value = math.nan if changed is None else 0.0
        # Several sets may share a result buffer, which is then filled only once.
        buffers = {operands.out.data_ptr(): operands.out for operands in self._launch.sets}
        for out in buffers.values():
            out.fill_(value)

    def check_batch(self, indices: Sequence[int], last: object) -> None:
        """Check the results of a timed batch, before which :meth:`poison` was called.

        If launches write into the result buffers of their operand sets, the content of these
        buffers is checked. If each launch allocates its result, only the last result is checked.
        The operands are checked only if :meth:`poison` negated one of them.

        Raises:
            WrongResultError: if a result is wrong or is not a tensor, or if the operands have
                changed.
        """
        sets = self._launch.sets
        final = indices[-1]
        if not isinstance(last, Tensor):
            raise WrongResultError(
                f"a launch returned an object of type {type(last).__name__}, not a tensor."
            )
        results = {final: last}  # by the index of the set
        if last.data_ptr() == sets[final].out.data_ptr():
            # Sets may share a result buffer, which holds the result of the last launch on them.
            last_writers = {sets[i].out.data_ptr(): i for i in indices}
            results = {i: _result_view(last, sets[i].out) for i in last_writers.values()}
        self._require(self._check_results(results), "of a timed batch")
        if self._negated is not None and not self._unchanged():
            self._require(_CHANGED, "of a timed batch")

    def release(self) -> None:
        """Restore the operand that :meth:`poison` negated, if any."""
        if self._negated is not None:
            self._launch.sets[self._negated].a.neg_()
            self._negated = None

    def check_after_timing(self) -> None:
        """Launch on the last set with its first operand negated, and check the result.

        The negation changes the result, so a kernel that returns an old result is detected.

        Raises:
            WrongResultError: if the result is wrong, or if the operands have changed.
        """
        index = len(self._launch.sets) - 1
        a, _, out = self._launch.sets[index]
        out.zero_()  # not NaN: a kernel might compute only where it finds NaN
        a.neg_()
        try:
            verdict = self._check_results({index: self._launch(index)})
            if not self._unchanged():
                verdict = _CHANGED
            self._require(verdict, "after a sample")
        finally:
            a.neg_()

    def _require(self, verdict: CheckVerdict, when: str) -> None:
        if not verdict.ok:
            raise WrongResultError(f"a check {when} failed: {verdict.message}")

    def _unchanged(self) -> bool:
        return all(_norms(self._launch.sets[i]) == norms for i, norms in self._norms.items())

    def _check_results(self, results: Mapping[int, Tensor], entries: bool = False) -> CheckVerdict:
        """Return a verdict on results, each given with the index of its operand set."""
        for index, result in results.items():
            out = self._launch.sets[index].out
            if result.shape != out.shape or result.dtype != out.dtype:
                returned = f"shape {tuple(result.shape)} and dtype {result.dtype}"
                expected = f"shape {tuple(out.shape)} and dtype {out.dtype}"
                message = f"the result has {returned} instead of {expected}."
                return CheckVerdict(math.nan, math.nan, message)
        sets = [self._launch.sets[index] for index in results]
        seed = self._random.getrandbits(31)
        self._side = 1 - self._side
        return verify(self._problem, sets, list(results.values()), seed, self._side, entries)


def _norms(operands: Operands) -> tuple[float, float]:
    """Return the norms of both operands.

    Overwriting an operand nearly always changes its norm.
    """
    norm_a = torch.linalg.vector_norm(operands.a, dtype=torch.float32)
    norm_b = torch.linalg.vector_norm(operands.b, dtype=torch.float32)
    # The norms are stacked, so that the host waits for a GPU only once.
    both_norms = torch.stack([norm_a, norm_b]).tolist()
    return both_norms[0], both_norms[1]


def _result_view(result: Tensor, buffer: Tensor) -> Tensor:
    return buffer.as_strided(result.shape, result.stride(), buffer.storage_offset())
