"""Offsets: log ratios that public tables predict for a machine with few measurements.

For each collection of a machine, or of a sibling of its generation, trees learn how much its times
differ from the formula. Own measurements then only need to show what is left: constants and the
weights of collections are fitted together, and trees grow from the rest
(:func:`analysis.model.fitting.fit_group`).

A collection of the machine itself has one weight for each kind of limit, because one framework's
table may say most about launches and another's most about memory. A collection of a sibling has a
single weight; together with the sibling's other collections it shows what a framework changes.

The trees must not have seen the shapes of the machine's own measurements. They would predict those
shapes better than others, and the fit would trust them too much.

Three alternatives were tried and did worse: pooling the rows of all machines with their facts as
features, Gaussian processes, and boosted trees.
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
"""Library with which all collections were measured."""

_USUAL = 0.02  # log ratio by which trees disagree about shapes like those they grew from
_KINDS = (("launch",), ("compute", "feed", "latency"), ("memory",))  # kinds of limits
_SHARPNESS = 4  # exponent of the times that weigh the kinds, so that the largest dominates


@dataclass(frozen=True)
class TreeSettings:
    """Number of trees that grow from a collection, and minimum number of rows in a leaf."""

    trees: int
    leaf_rows: int


WHOLE = TreeSettings(64, 2)
COARSE = TreeSettings(16, 4)
"""Settings for collections of sibling machines that are not among the leading ones. There are many
of them and each has a small weight, so fewer and coarser trees are enough."""

_FIGURES = {
    "source": str, "dtype": str, "rows": COUNT, "machine": dict, "constants": Each(Number()),
    "trees": dict,
}  # fmt: skip


@dataclass(frozen=True)
class CollectionTrees:
    """Fitted constants of one collection of one machine and dtype, and trees grown from its rows.

    ``source`` names the framework and its version. ``rows`` is the number of rows, from all of
    which the trees grew. Operands came from the cache where they fit it.
    """

    machine: Machine
    source: str
    dtype: str
    rows: int
    constants: Constants
    trees: Forest

    @property
    def name(self) -> str:
        """Name in words, such as ``vLLM 0.24.0 of nvidia-h200``."""
        return f"{self.source} of {self.machine.slug}"

    def constants_on(self, machine: Machine, dtype: str) -> Constants:
        """Return the constants scaled to another machine of the generation by both datasheets."""
        return scaled_constants(self.constants, self.machine, machine, dtype)

    @classmethod
    def grown(
        cls,
        machine: Machine,
        source: str,
        gemms: Sequence[Gemm],
        seconds: Array,
        c: Constants,
        settings: TreeSettings = WHOLE,
    ) -> Self:
        """Grow the trees of a collection.

        Args:
            machine: the machine that was measured.
            source: framework and version of the collection, in words.
            gemms: the GEMM of each row, all of one dtype.
            seconds: their times.
            c: constants that were fitted to them.
            settings: number of trees, and minimum number of rows in a leaf.
        """
        inputs = Inputs.from_query(machine, Query.plain(gemms, LIBRARY, warm=True))
        guess = inputs.estimate(c)
        features = inputs.features(c, guess)
        log_ratios = np.log(seconds / guess.time)
        trees = Forest.grown(features, log_ratios, settings.trees, settings.leaf_rows)
        return cls(machine, source, gemms[0].dtype, len(gemms), c, trees)

    def log_ratios(self, gemms: Sequence[Gemm]) -> tuple[Array, Array]:
        """Predict the log of measured time over the formula's time for some shapes.

        Args:
            gemms: GEMMs of any dtype and layout; they are looked up by their sizes.

        Returns:
            The log ratios, and the standard deviation of the trees, which is larger for unfamiliar
            shapes.
        """
        queried = [replace(gemm, dtype=self.dtype, layout="nt") for gemm in gemms]
        inputs = Inputs.from_query(self.machine, Query.plain(queried, LIBRARY, warm=True))
        guess = inputs.estimate(self.constants)
        return self.trees.predict(inputs.features(self.constants, guess))

    def to_json(self) -> dict[str, Any]:
        """Return the document for calibration.json."""
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
            ValueError: if something is missing or is not a number. This includes UserErrors.
        """
        if fault := misfit(data, _FIGURES):
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
    """Predictions of several collections for some cases of a machine.

    Attributes:
        columns: log of the time that each collection (columns) predicts for each case (rows), over
            the time of the formula with the first collection's constants.
        deviations: how much the trees of each collection disagree about each case.
        shares: weight of each kind of limit (columns) in each case (rows). It is proportional to
            the fourth power of the limit's time, and the weights of a case sum to one.
    """

    columns: Array
    deviations: Array
    shares: Array

    @classmethod
    def from_trees(cls, collections: Sequence[CollectionTrees], inputs: Inputs) -> Self:
        """Predict GEMMs by each collection: by its formula, plus what its trees add."""

        def estimate_with(collection: CollectionTrees) -> Estimate:
            return inputs.estimate(collection.constants_on(inputs.machine, inputs.dtype))

        # 1. Predict the log ratios of all collections to the formula of the first one.
        gemms = [problem for problem in inputs.problems if isinstance(problem, Gemm)]
        first = estimate_with(collections[0])
        columns, deviations = [], []
        for collection in collections:
            log_ratios, disagreement = collection.log_ratios(gemms)
            columns.append(log_ratios + np.log(estimate_with(collection).time / first.time))
            deviations.append(disagreement)
        # 2. Weigh the kinds of limits. The time of a kind is that of its longest limit.
        kind_times = [np.max([getattr(first, name) for name in kind], axis=0) for kind in _KINDS]
        powers = (np.column_stack(kind_times) / first.time[:, None]) ** _SHARPNESS
        shares = powers / powers.sum(axis=1, keepdims=True)
        return cls(np.column_stack(columns), np.column_stack(deviations), shares)

    def take(self, where: NDArray[np.intp]) -> Self:
        """Return the estimates of the cases at some positions."""
        return type(self)(*(array[where] for array in self))

    def regressors(self, own: Sequence[bool]) -> Array:
        """Return the factor of each weight (columns) in each case (rows).

        Args:
            own: for each collection, True if it is of the machine itself. It then has a weight for
                each kind of limit, otherwise a single weight.
        """
        # Each collection's column keeps a second axis, so that it can be multiplied by the shares.
        columns = self.columns.T[:, :, None]
        return np.hstack(
            [
                column * self.shares if is_own else column
                for column, is_own in zip(columns, own, strict=True)
            ]
        )


@dataclass(frozen=True)
class Offsets:
    """Weighted sum of the log ratios that several collections predict.

    ``weights`` has for each collection one weight per kind of limit: fixed costs, the work of the
    SMs, and memory.
    """

    collections: tuple[CollectionTrees, ...]
    weights: tuple[tuple[float, ...], ...]

    @classmethod
    def from_regression(
        cls, collections: Sequence[CollectionTrees], own: Sequence[bool], weights: Sequence[float]
    ) -> Self:
        """Take the weights that belong to the columns of :meth:`CollectionEstimates.regressors`.

        A sibling's collection has a single column, whose weight then holds for each kind of limit.
        """
        remaining = iter(weights)
        rows = []
        for is_own in own:
            if is_own:
                rows.append(tuple(next(remaining) for _ in _KINDS))
            else:
                rows.append((next(remaining),) * len(_KINDS))
        return cls(tuple(collections), tuple(rows))

    @staticmethod
    def for_regression(own: Sequence[bool], weights: Sequence[float]) -> list[float]:
        """Repeat the weight of each collection for each of its columns in a regression."""
        repeated: list[float] = []
        for is_own, weight in zip(own, weights, strict=True):
            repeated += [weight] * (len(_KINDS) if is_own else 1)
        return repeated

    @classmethod
    def from_weights(cls, collections: Sequence[CollectionTrees], weights: Sequence[float]) -> Self:
        """Give each collection one weight, whatever limits a case."""
        return cls(tuple(collections), tuple((weight,) * len(_KINDS) for weight in weights))

    def at(self, inputs: Inputs) -> CollectionEstimates:
        """Return the predictions of each collection for the cases."""
        return CollectionEstimates.from_trees(self.collections, inputs)

    def combined_offsets(self, estimates: CollectionEstimates) -> Array:
        """Return each case's offset: the weighted sum of the collections' estimates."""
        return np.sum(estimates.columns * self._weights_at(estimates), axis=1)

    def spread(self, estimates: CollectionEstimates) -> Array:
        """Return how far each offset may be off, by the disagreement of each collection's trees.

        The spread is in units of :data:`_USUAL` and at least 1.
        """
        weighted = estimates.deviations * self._weights_at(estimates)
        return np.hypot(1.0, np.hypot.reduce(weighted, axis=1) / _USUAL)

    def _weights_at(self, estimates: CollectionEstimates) -> Array:
        """Return each collection's weight (columns) in each case (rows)."""
        return estimates.shares @ np.array(self.weights).T

    @property
    def source(self) -> str:
        """Collections in words: by name, or how many there are of each machine."""
        if len(self.collections) <= 2:
            return " and ".join(collection.name for collection in self.collections)
        counts = Counter(collection.machine.slug for collection in self.collections)
        return "public tables: " + ", ".join(f"{count} of {slug}" for slug, count in counts.items())

    def named_weights(self) -> dict[str, list[float]]:
        """Return the weights by the name of each collection."""
        pairs = zip(self.collections, self.weights, strict=True)
        return {collection.name: list(values) for collection, values in pairs}

    def to_json(self) -> dict[str, Any]:
        """Return the document for calibration.json."""
        return {
            "weights": [list(weights) for weights in self.weights],
            "collections": [collection.to_json() for collection in self.collections],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: if something is missing or is not a number, or if there is not one weight
                for each collection and kind of limit.
        """
        if fault := misfit(data, {"weights": [[Number()]], "collections": [dict]}):
            raise ValueError(fault)
        collections = tuple(CollectionTrees.from_json(entry) for entry in data["collections"])
        weights = tuple(tuple(row) for row in data["weights"])
        if not collections or [len(row) for row in weights] != [len(_KINDS)] * len(collections):
            raise ValueError("there is not one weight for each collection and kind of limit")
        return cls(collections, weights)
