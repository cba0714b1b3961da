"""Export the time model to the page, whose script predicts the times of unmeasured shapes.

The script evaluates the same formula as :mod:`analysis.model.predict` and, if possible, the same
trees. It cannot evaluate the trees that compute offsets, which are corrections learned from public
tables (:mod:`analysis.model.offsets`). These trees, and trees that are too large for a page, are
replaced by smaller trees that imitate them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from analysis.model.basis import Basis
from analysis.model.corrected import corrected_estimate
from analysis.model.features import Inputs
from analysis.model.fit import NEAR, UNCALIBRATED, UNCALIBRATED_PAIR, Fit
from analysis.model.forest import Forest
from analysis.model.query import group_of
from kernels.common.errors import UserError
from kernels.config import library_tiles
from kernels.problem import PASSES, Conv, Gemm, Problem
from kernels.timemodel.estimate import Array

MOST_NODES = 300_000
"""Maximum number of nodes in the original trees of a model on a page.

At 5 bytes each, these nodes take 2 MB in base64.
"""

# Number of smaller trees, and minimum number of shapes in a leaf. 16 trees whose leaves have at
# least 24 shapes have at most 1.4 nodes for each shape. The trees for the spread are fewer and
# smaller, because the width of an interval matters less than the time.
_TREES, _LEAF = 16, 24
_SPREAD_TREES, _SPREAD_LEAF = 8, 100
_RANDOM_SHAPES = 12_000  # random GEMMs that are added to the shapes that smaller trees grow from
_HELD_OUT = 2_000  # maximum number of held-out shapes, on which both models are compared
_M, _N, _K = (1, 2**17), (16, 2**17), (16, 2**16)  # ranges of random sizes
_STEPS = (1, 8, 16, 64, 128)  # random sizes are multiples of one of these

# Attributes of a fit from which the script computes intervals.
_INTERVAL_FIELDS = (
    "low", "high", "pair_low", "pair_high", "scale", "beside", "aligned_only", "layout",
)  # fmt: skip


@dataclass(frozen=True)
class PageGroup:
    """A group of problems with the same operation and dtype, whose times the page predicts.

    Attributes:
        problem: an example with this operation and dtype.
        group: name of the group (:func:`analysis.model.query.group_of`).
        fit: the fit that predicts the group's times.
    """

    problem: Problem
    group: str
    fit: Fit

    @property
    def name(self) -> str:
        """Name by which the script looks the group up, such as ``gemm bf16``."""
        return _without_implementation(self.group)

    @property
    def has_trees(self) -> bool:
        """True if trees correct the formula's times for this group."""
        return self.fit.residual is not None or self.fit.offsets is not None

    @property
    def nodes(self) -> int:
        """Number of nodes in all trees of this group."""
        forests = []
        if self.fit.residual:
            forests.append(self.fit.residual.trees)
        if self.fit.offsets:
            forests += [collection.trees for collection in self.fit.offsets.collections]
        return sum(len(forest.feature) for forest in forests)


def page_model(basis: Basis, measured: Iterable[Problem]) -> dict[str, Any]:
    """Return the model of a machine as JSON for the page's script.

    Args:
        basis: the machine's model, as the command ``predict`` uses it.
        measured: measured problems, from which smaller trees grow if the model's trees are too
            large.

    Raises:
        UserError: if smaller trees must imitate trees that another version of Rooftile wrote.
    """
    machine = basis.model.machine
    groups = list(page_groups(basis))
    # 1. Find the groups that share trees, because one dtype may be predicted by the trees of
    # another.
    by_trees: dict[tuple[int, int], list[PageGroup]] = {}
    for group in groups:
        if group.has_trees:
            # Trees are large, so they are compared by identity.
            trees = (id(group.fit.residual), id(group.fit.offsets))
            by_trees.setdefault(trees, []).append(group)
    # 2. Export the trees themselves, or smaller ones if all trees together are too large, or if
    # they belong to offsets, which the script does not compute. Shared trees count once.
    too_large = sum(sharing[0].nodes for sharing in by_trees.values()) > MOST_NODES
    # If only offsets need smaller trees, random GEMMs are enough, because offsets only correct
    # GEMMs.
    problems = list(measured) if too_large else []
    tree_numbers: dict[str, int] = {}
    documents = []
    for number, sharing in enumerate(by_trees.values()):
        tree_numbers |= {group.name: number for group in sharing}
        fit = sharing[0].fit
        if too_large or fit.offsets:
            documents.append(_smaller_trees(basis, sharing, problems))
        else:
            documents.append(_original_trees(fit))
    return {
        "machine": {
            name: getattr(machine, name)
            for name in ("kind", "sms", "bandwidth", "l2_bytes", "memory_bytes")
        },
        "uncalibrated": UNCALIBRATED,
        "uncalibrated_pair": UNCALIBRATED_PAIR,
        "near": NEAR,
        "trees": documents,
        "groups": {
            group.name: {**_group_document(basis, group), "trees": tree_numbers.get(group.name)}
            for group in groups
        },
    }


def page_groups(basis: Basis) -> Iterable[PageGroup]:
    """Yield a group for each operation and dtype whose times the page predicts.

    On a CPU, only groups with a fit are included, because a CPU's default constants are only a
    starting point.
    """
    machine = basis.model.machine
    fitted = {_without_implementation(group) for group in basis.model.fits}
    for dtype in machine.peaks:
        for operation in ("gemm", *PASSES):
            if machine.kind == "cpu" and f"{operation} {dtype}" not in fitted:
                continue
            try:
                problem = _plain_problem(operation, dtype)
            except UserError:  # fp8 has no convolutions
                continue
            group = group_of(basis.library(problem), problem)
            yield PageGroup(problem, group, basis.model.fit_of(group))


def _without_implementation(group: str) -> str:
    """Return the operation and the dtype of a group, such as ``gemm bf16``.

    An implementation's name may come from a user's file and contain spaces.
    """
    return " ".join(group.rsplit(maxsplit=2)[1:])


def _plain_problem(operation: str, dtype: str) -> Problem:
    """Return an example of an operation (``gemm`` or a pass of a convolution) in a dtype.

    Raises:
        UserError: if the operation does not support the dtype.
    """
    if operation == "gemm":
        return Gemm(1024, 1024, 1024, dtype)
    return Conv.build((8, 64, 56, 56, 64, 3, 3), [(1, 1)] * 3, 1, dtype, pass_=operation)


def _group_document(basis: Basis, group: PageGroup) -> dict[str, Any]:
    """Return all that the script needs to predict the times of a group, except the trees."""
    machine, problem, fit = basis.model.machine, group.problem, group.fit
    kind, source = basis.group_kind_and_source(problem)
    return {
        "source": f"{source} ({kind})",
        "peak": machine.peak(problem.dtype),
        "tiles": library_tiles(machine.generation, problem.dtype),
        "warm": bool(basis.query([problem]).cached[0]),
        # Libraries were observed to use Winograd's algorithm only in fp32.
        "winograd": machine.kind == "gpu" and problem.op == "conv" and problem.dtype == "fp32",
        "constants": fit.constants.to_json(),
        "shift": fit.shift.to_json(),
        "groups": fit.groups,
        "uncalibrated": fit.is_uncalibrated,
        **{name: getattr(fit, name) for name in _INTERVAL_FIELDS},
    }


def _original_trees(fit: Fit) -> dict[str, Any]:
    assert fit.residual is not None
    residual = fit.residual
    return {"time": residual.trees.to_json(), "seen": residual.seen, "unseen": residual.unseen}


def _smaller_trees(
    basis: Basis, sharing: Sequence[PageGroup], measured: Sequence[Problem]
) -> dict[str, Any]:
    """Return small trees that imitate the corrections and spreads of large trees.

    The small trees are compared with the large trees on held-out shapes. The entry ``differs`` is
    the 90th percentile of the relative difference between the two predicted times of a shape.

    Args:
        basis: the machine's model.
        sharing: the groups that share the large trees, at least one.
        measured: measured problems of any group.
    """
    # 1. Compute what the large trees return for measured and random shapes.
    features_by_group: list[Array] = []
    log_corrections_by_group: list[Array] = []
    log_spreads_by_group: list[Array] = []
    for group in sharing:
        members = [problem for problem in measured if _is_like(problem, group.problem)]
        group_features, group_log_corrections, group_log_spreads = _large_tree_outputs(
            basis, group, members
        )
        features_by_group.append(group_features)
        log_corrections_by_group.append(group_log_corrections)
        log_spreads_by_group.append(group_log_spreads)
    features = np.concatenate(features_by_group)
    log_corrections = np.concatenate(log_corrections_by_group)
    log_spreads = np.concatenate(log_spreads_by_group)
    # 2. Grow the small trees from the shapes, of which at most a fifth is held out.
    held_out_count = min(_HELD_OUT, len(features) // 5)
    is_training = np.random.default_rng(0).permutation(len(features)) >= held_out_count
    time = Forest.grown(features[is_training], log_corrections[is_training], _TREES, _LEAF)
    spread = Forest.grown(
        features[is_training], log_spreads[is_training], _SPREAD_TREES, _SPREAD_LEAF
    )
    # 3. Compare the small and the large trees. With fewer than five shapes, none is held out.
    is_compared = ~is_training if held_out_count else is_training
    imitated, _ = time.predict(features[is_compared])
    log_differences = np.abs(imitated - log_corrections[is_compared])
    differs = float(np.expm1(np.quantile(log_differences, 0.9)))
    return {"time": time.to_json(), "spread": spread.to_json(), "differs": differs}


def _large_tree_outputs(
    basis: Basis, group: PageGroup, measured: Sequence[Problem]
) -> tuple[Array, Array, Array]:
    """Return the features of measured and random shapes, and the large trees' outputs for them.

    The outputs are the logarithm of the correction and the logarithm of the spread.
    """
    problems = list(measured)
    if isinstance(group.problem, Gemm):
        problems += _random_gemms(group.problem)
    # A dtype of convolutions that is predicted by the trees of another dtype was not measured.
    if not problems:
        problems = [group.problem]
    inputs = Inputs.from_query(basis.model.machine, basis.query(problems))
    fit = group.fit
    formula = inputs.estimate(fit.constants)
    corrected, spread = corrected_estimate(inputs, fit.constants, fit.residual, fit.offsets)
    features = inputs.features(fit.constants, formula)
    return features, np.log(corrected.time / formula.time), np.log(spread)


def _is_like(problem: Problem, other: Problem) -> bool:
    return group_of("", problem) == group_of("", other)


def _random_gemms(example: Gemm) -> list[Gemm]:
    """Return random GEMMs that differ from the example only in M, N and K.

    Sizes are rounded to multiples of random numbers from :data:`_STEPS`, so that all alignments
    occur.
    """
    rng = np.random.default_rng(0)
    log_ends = np.log2([_M, _N, _K])
    sizes = np.exp2(rng.uniform(log_ends[:, 0], log_ends[:, 1], (_RANDOM_SHAPES, 3)))
    steps = rng.choice(_STEPS, sizes.shape)
    rounded = np.maximum(np.round(sizes / steps), 1).astype(int) * steps
    return [replace(example, m=m, n=n, k=k) for m, n, k in rounded.tolist()]
