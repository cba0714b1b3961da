"""Offsets: corrections of the formula that are learned from public tables.

A collection is a public table of one machine, measured with one framework. For each collection of a
machine or of its siblings (GPUs of the same generation), trees learn log(measured / formula). The
offset of a shape is a weighted sum of the log ratios that the collections predict. Constants and
weights are fitted together to the machine's measurements (:mod:`analysis.model.fitting`).

A shape's time has three kinds of limits: launches, the work of the SMs, and memory. A collection of
the machine itself has one weight for each kind, because the collection that best predicts launch
times may not be the one that best predicts memory times. A collection of a sibling has a single
weight. Differences between the collections of a sibling show how the framework affects the times.

The trees must not grow from the shapes that the weights are fitted to. Otherwise the trees would
predict these shapes better than other shapes, and the collections would get too much weight.

Three alternatives were tried and predicted times less accurately: Gaussian processes, boosted
trees, and a single set of trees for all machines, with datasheet values among the features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from analysis.model.features import Inputs
from analysis.model.forest import Forest
from analysis.model.query import Query
from kernels.common.documents import COUNT, Each, Number, misfit
from kernels.machine import Machine
from kernels.problem import Gemm
from kernels.timemodel.constants import Constants, scaled_constants
from kernels.timemodel.estimate import Array, Estimate

LIBRARY = "cublas"
"""Implementation that computed the GEMMs of all collections."""

_USUAL_DISAGREEMENT = 0.02  # Typical standard deviation of the trees at familiar shapes.
_KINDS = (("launch",), ("compute", "feed", "latency"), ("memory",))  # Kinds of limits.
_SHARPNESS = 4  # The weight of a kind is this power of its time, so that the longest dominates.


@dataclass(frozen=True)
class TreeSettings:
    """Number of trees that grow from a collection, and minimum number of rows in a leaf."""

    trees: int
    leaf_rows: int


WHOLE = TreeSettings(64, 2)
"""Settings for collections of the machine itself, and for those that predict times before any
measurement (:func:`analysis.model.prior.leaders`)."""

COARSE = TreeSettings(16, 4)
"""Settings for the other collections. Fewer and coarser trees are enough, because there are many
such collections and each has a small weight."""

_JSON_SHAPE = {
    "source": str, "dtype": str, "rows": COUNT, "machine": dict, "constants": Each(Number()),
    "trees": dict,
}  # fmt: skip


@dataclass(frozen=True)
class CollectionTrees:
    """Constants and trees that were fitted to one collection's GEMMs of one dtype.

    The predicted times are warm: operands that fit into the last-level cache are already in it.

    Attributes:
        machine: the machine that was measured.
        source: framework and version, in words.
        dtype: dtype of the measured GEMMs.
        rows: number of measured GEMMs.
        constants: constants of the formula.
        trees: trees that predict log(measured / formula).
    """

    machine: Machine
    source: str
    dtype: str
    rows: int
    constants: Constants
    trees: Forest

    @property
    def name(self) -> str:
        """Name of the collection, such as ``vLLM 0.24.0 of nvidia-h200``."""
        return f"{self.source} of {self.machine.slug}"

    def constants_on(self, machine: Machine, dtype: str) -> Constants:
        """Scale the constants to another machine, to predict GEMMs in ``dtype`` there."""
        return scaled_constants(self.constants, self.machine, machine, dtype)

    @classmethod
    def grown(
        cls,
        machine: Machine,
        source: str,
        gemms: Sequence[Gemm],
        seconds: Array,
        constants: Constants,
        settings: TreeSettings = WHOLE,
    ) -> Self:
        """Grow the trees of a collection.

        Args:
            machine: the machine that was measured.
            source: framework and version, in words.
            gemms: the measured GEMMs, all of one dtype.
            seconds: measured seconds of each GEMM, with warm operands.
            constants: constants of the formula that were fitted to these times.
            settings: number and size of the trees.
        """
        inputs = Inputs.from_query(machine, Query.plain(gemms, LIBRARY, warm=True))
        guess = inputs.estimate(constants)
        features = inputs.features(constants, guess)
        log_ratios = np.log(seconds / guess.time)
        trees = Forest.grown(features, log_ratios, settings.trees, settings.leaf_rows)
        return cls(machine, source, gemms[0].dtype, len(gemms), constants, trees)

    def log_ratios(self, gemms: Sequence[Gemm]) -> tuple[Array, Array]:
        """Predict log(measured / formula) of GEMMs on the collection's machine.

        Args:
            gemms: GEMMs of any dtype and layout. The prediction is for GEMMs of the same sizes in
                the collection's dtype and in layout ``nt``.

        Returns:
            The log ratio of each GEMM, and the standard deviation of the trees' predictions.
        """
        queried = [replace(gemm, dtype=self.dtype, layout="nt") for gemm in gemms]
        inputs = Inputs.from_query(self.machine, Query.plain(queried, LIBRARY, warm=True))
        guess = inputs.estimate(self.constants)
        return self.trees.predict(inputs.features(self.constants, guess))

    def to_json(self) -> dict[str, Any]:
        """Return the constants and trees as an entry of calibration.json."""
        return {
            "source": self.source,
            "dtype": self.dtype,
            "rows": self.rows,
            "machine": self.machine.to_json(),
            "constants": self.constants.to_json(),
            "trees": self.trees.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_json`.

        Raises:
            TypeError, ValueError: if the entry is invalid.
        """
        if fault := misfit(data, _JSON_SHAPE):
            raise ValueError(fault)
        return cls(
            Machine.from_json(data["machine"]),
            data["source"],
            data["dtype"],
            data["rows"],
            Constants.from_json(data["constants"]),
            Forest.from_json(data["trees"]),
        )


class CollectionEstimates(NamedTuple):
    """Predictions of several collections for the same cases. In all arrays, a row is a case.

    Attributes:
        columns: log(predicted / formula) of each collection (columns). The formula always uses the
            first collection's constants.
        deviations: standard deviation of the log ratios over the trees of each collection
            (columns).
        shares: share of each kind of limit (columns), proportional to the fourth power of the
            longest time among the kind's limits. The shares of a case sum to 1.
    """

    columns: Array
    deviations: Array
    shares: Array

    @classmethod
    def from_trees(cls, collections: Sequence[CollectionTrees], inputs: Inputs) -> Self:
        """Predict GEMMs with each collection's formula and trees.

        Args:
            collections: at least one collection.
            inputs: the cases, all of them GEMMs.
        """

        def estimate_with(collection: CollectionTrees) -> Estimate:
            return inputs.estimate(collection.constants_on(inputs.machine, inputs.dtype))

        # 1. Predict log ratios with each collection. All ratios refer to the formula with the
        #    constants of the first collection.
        gemms = [problem for problem in inputs.problems if isinstance(problem, Gemm)]
        first = estimate_with(collections[0])
        columns, deviations = [], []
        for collection in collections:
            log_ratios, disagreement = collection.log_ratios(gemms)
            columns.append(log_ratios + np.log(estimate_with(collection).time / first.time))
            deviations.append(disagreement)
        # 2. Compute the weights of the kinds of limits.
        kind_times = []
        for kind in _KINDS:
            limit_times = [getattr(first, name) for name in kind]
            kind_times.append(np.max(limit_times, axis=0))
        powers = (np.column_stack(kind_times) / first.time[:, None]) ** _SHARPNESS
        shares = powers / powers.sum(axis=1, keepdims=True)
        return cls(np.column_stack(columns), np.column_stack(deviations), shares)

    def take(self, positions: NDArray[np.intp]) -> Self:
        """Return the estimates of the cases at the given positions."""
        return type(self)(*(array[positions] for array in self))

    def regressors(self, same_machine: Sequence[bool]) -> Array:
        """Return the matrix whose product with the weights is the offset of each case.

        Args:
            same_machine: for each collection, True if it was measured on the machine itself. Such a
                collection has one column for each kind of limit; a sibling's collection has a
                single column.
        """
        blocks = []
        for log_ratios, is_same in zip(self.columns.T, same_machine, strict=True):
            column = log_ratios[:, np.newaxis]
            # A weight for one kind of limit counts in proportion to the share of this kind.
            blocks.append(column * self.shares if is_same else column)
        return np.hstack(blocks)


@dataclass(frozen=True)
class Offsets:
    """Correction of the formula: a weighted sum of the log ratios that several collections predict.

    ``weights`` has three weights for each collection: for launches, for the work of the SMs, and
    for memory.
    """

    collections: tuple[CollectionTrees, ...]
    weights: tuple[tuple[float, ...], ...]

    @classmethod
    def from_regression(
        cls,
        collections: Sequence[CollectionTrees],
        same_machine: Sequence[bool],
        weights: Sequence[float],
    ) -> Self:
        """Make offsets from a weight for each column of :meth:`CollectionEstimates.regressors`."""
        weights_by_collection = []
        first = 0  # position of the collection's first weight
        for is_same in same_machine:
            if is_same:
                after_last = first + len(_KINDS)
                weights_by_collection.append(tuple(weights[first:after_last]))
            else:
                after_last = first + 1
                weights_by_collection.append((weights[first],) * len(_KINDS))
            first = after_last
        return cls(tuple(collections), tuple(weights_by_collection))

    @staticmethod
    def weights_by_column(same_machine: Sequence[bool], weights: Sequence[float]) -> list[float]:
        """Return a weight for each column of :meth:`CollectionEstimates.regressors`.

        ``weights`` has one weight for each collection.
        """
        repeated: list[float] = []
        for is_same, weight in zip(same_machine, weights, strict=True):
            repeated += [weight] * (len(_KINDS) if is_same else 1)
        return repeated

    @classmethod
    def from_weights(cls, collections: Sequence[CollectionTrees], weights: Sequence[float]) -> Self:
        """Make offsets in which each collection has one weight for all kinds of limits."""
        return cls(tuple(collections), tuple((weight,) * len(_KINDS) for weight in weights))

    def estimates(self, inputs: Inputs) -> CollectionEstimates:
        """Return each collection's predictions for the GEMMs of ``inputs``."""
        return CollectionEstimates.from_trees(self.collections, inputs)

    def combined_offsets(self, estimates: CollectionEstimates) -> Array:
        """Return each case's offset: the weighted sum of the predicted log ratios."""
        return np.sum(estimates.columns * self._weights_by_case(estimates), axis=1)

    def spread(self, estimates: CollectionEstimates) -> Array:
        """Return the relative spread of each offset's error, based on how much the trees disagree.

        The spread is 1 where the trees agree.
        """
        weighted = estimates.deviations * self._weights_by_case(estimates)
        # The collections are treated as independent, so their deviations add up in quadrature.
        disagreement = np.hypot.reduce(weighted, axis=1)
        return np.hypot(1.0, disagreement / _USUAL_DISAGREEMENT)

    def _weights_by_case(self, estimates: CollectionEstimates) -> Array:
        # The array has the shape (cases, collections).
        return estimates.shares @ np.array(self.weights).T

    @property
    def source(self) -> str:
        """Source of the offsets, in words for the user."""
        if len(self.collections) <= 2:
            return " and ".join(collection.name for collection in self.collections)
        counts = Counter(collection.machine.slug for collection in self.collections)
        return "public tables: " + ", ".join(f"{count} of {slug}" for slug, count in counts.items())

    def named_weights(self) -> dict[str, list[float]]:
        """Return each collection's weights for the kinds of limits, by the collection's name."""
        pairs = zip(self.collections, self.weights, strict=True)
        return {collection.name: list(values) for collection, values in pairs}

    def to_json(self) -> dict[str, Any]:
        """Return the offsets as an entry of calibration.json."""
        return {
            "weights": [list(weights) for weights in self.weights],
            "collections": [collection.to_json() for collection in self.collections],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_json`.

        Raises:
            TypeError, ValueError: if the entry is invalid.
        """
        if fault := misfit(data, {"weights": [[Number()]], "collections": [dict]}):
            raise ValueError(fault)
        collections = tuple(CollectionTrees.from_json(entry) for entry in data["collections"])
        weights = tuple(tuple(row) for row in data["weights"])
        weight_counts = [len(row) for row in weights]
        if not collections or weight_counts != [len(_KINDS)] * len(collections):
            raise ValueError(
                "there must be at least one collection, and each collection must have one weight "
                "for each kind of limit"
            )
        return cls(collections, weights)
