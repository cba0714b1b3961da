"""Whether what a case's launches compute is right: before its samples, in them and after.

Needs PyTorch. This guards against kernels that are wrong: from the start, later, sporadically, on
another set, in a corner of the result, or because they return what they never computed. The
sampler decides which batches are checked, and sees this only as a
:class:`sweeps.timing.sampler.Checker`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kernels.correctness.verify import Verdict, verify
from kernels.errors import WrongResultError
from kernels.launch import Launch
from kernels.operands import Operands
from kernels.operation import Workload

_CHANGED = Verdict(math.nan, math.nan, "it changes its operands.")


class ResultChecker:
    """Checks the launches of one case."""

    def __init__(self, problem: Workload, launch: Launch, seed: str) -> None:
        """``seed`` is of every random choice, so that each case is checked at other entries."""
        self._problem = problem
        self._launch = launch
        self._random = random.Random(seed)
        self._norms = {i: _norms(launch.sets[i]) for i in {0, len(launch.sets) - 1}}

    def before(self) -> Verdict:
        """Check the first set's result, with NaN in its place before the launch."""
        self._launch.sets[0].out.fill_(math.nan)
        verdict = self._verdict({0: self._launch(0)})
        return verdict if self._unchanged() else _CHANGED

    def poison(self) -> None:
        """NaN-fill every place for a result, so that unwritten elements fail the check."""
        for out in {one.out.data_ptr(): one.out for one in self._launch.sets}.values():
            out.fill_(math.nan)

    def batch(self, indices: Sequence[int], last: object) -> None:
        """The results of a timed batch, after :meth:`poison`.

        Where launches write into the arena, sets may share a place, which then holds the result of
        the last to write. Where each launch allocates its result, only the last one is still there.

        Args:
            indices: the sets that were launched on, in order.
            last: what the last launch returned.

        Raises:
            WrongResultError: one is wrong, with the sentence that says how.
        """
        sets, final = self._launch.sets, indices[-1]
        if not isinstance(last, Tensor):
            raise WrongResultError(f"a launch returned {type(last).__name__} and no tensor.")
        results = {final: last}
        if last.data_ptr() == sets[final].out.data_ptr():
            places = {sets[i].out.data_ptr(): i for i in indices}
            results = {i: _result_view(last, sets[i].out) for i in places.values()}
        # One side is enough here: there are many results, and before() tested the case from both.
        self._require(self._verdict(results, one_side=True), "in a timed batch")

    def after(self) -> None:
        """Check the last set's result on inputs that no launch has seen: the first operand negated.

        Raises:
            WrongResultError: it is wrong, or the operands are not what they were.
        """
        index = len(self._launch.sets) - 1
        a, _, out = self._launch.sets[index]
        out.zero_()  # not NaN: a kernel might compute only where it finds NaN
        a.neg_()
        try:
            verdict = self._verdict({index: self._launch(index)})
            self._require(verdict if self._unchanged() else _CHANGED, "after its samples")
        finally:
            a.neg_()

    def _require(self, verdict: Verdict, when: str) -> None:
        if not verdict.ok:
            raise WrongResultError(f"{when} it was wrong: {verdict.message}")

    def _unchanged(self) -> bool:
        return all(_norms(self._launch.sets[i]) == norms for i, norms in self._norms.items())

    def _verdict(self, results: Mapping[int, Tensor], one_side: bool = False) -> Verdict:
        for index, result in results.items():
            out = self._launch.sets[index].out
            if result.shape != out.shape or result.dtype != out.dtype:
                what = f"{tuple(result.shape)} of {result.dtype}"
                return Verdict(math.nan, math.nan, f"it returned {what}.")
        sets = [self._launch.sets[index] for index in results]
        seed = self._random.getrandbits(31)
        return verify(self._problem, sets, list(results.values()), seed, one_side)


def _norms(operands: Operands) -> tuple[float, float]:
    """Norms of both operands, by which a change of their values shows."""
    both = [torch.linalg.vector_norm(x, dtype=torch.float32) for x in (operands.a, operands.b)]
    a, b = torch.stack(both).tolist()
    return a, b


def _result_view(result: Tensor, place: Tensor) -> Tensor:
    """The view of ``place`` that a launch which writes there returns, shaped as ``result``."""
    return place.as_strided(result.shape, result.stride(), place.storage_offset())
