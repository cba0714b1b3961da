"""What others' tables say about a machine before it was measured much: log ratios as offsets.

For each collection of a machine, or of a sibling of its generation, trees learned by how much its
times differ from the formula. A machine's own rows then need to tell only what is left: constants
and the collections' weights are fitted together, and trees grow from the rest
(:func:`analysis.model.fitting.fit_group`). The collections' trees must not have seen the shapes of
those rows: they know them better than others, and all that is fitted would rely on it. Pooling all
machines' rows with their facts as features, Gaussian processes and boosted trees were tried and did
worse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from analysis.model.features import Inputs
from analysis.model.forest import Forest
from analysis.model.query import Query
from kernels.constants import Constants
from kernels.documents import COUNT, Each, Number, misfit
from kernels.estimate import Array
from kernels.machine import Machine
from kernels.problem import Gemm, Problem

LIBRARY = "cublas"
"""The library that all collections are of."""

_TREES = 64
_LEAF_ROWS = 2
_USUAL = 0.02  # of a log ratio, by which trees disagree about shapes like those they grew from

_FIGURES = {
    "source": str, "dtype": str, "rows": COUNT, "machine": dict, "constants": Each(Number()),
    "trees": dict,
}  # fmt: skip


@dataclass(frozen=True)
class Prior:
    """One collection of one machine and dtype: fitted constants, and trees from all of its rows.

    ``source`` says whose it is, ``rows`` how many rows the trees grew from. Its operands came from
    the cache where they fit it.
    """

    machine: Machine
    source: str
    dtype: str
    rows: int
    constants: Constants
    trees: Forest

    @property
    def name(self) -> str:
        """In words: ``vLLM 0.24.0 of nvidia-h200``."""
        return f"{self.source} of {self.machine.slug}"

    @classmethod
    def grown(
        cls, machine: Machine, source: str, gemms: Sequence[Gemm], seconds: Array, c: Constants
    ) -> Self:
        """The trees of a collection's rows.

        Args:
            machine: what it was measured on.
            source: whose it is, in words.
            gemms: the rows' products, all of one dtype.
            seconds: their times.
            c: constants that were fitted to them.
        """
        inputs = Inputs.of(machine, Query.plain(gemms, LIBRARY, warm=True))
        guess = inputs.estimate(c)
        features, log_ratios = inputs.features(c, guess), np.log(seconds / guess.time)
        trees = Forest.grown(features, log_ratios, _TREES, _LEAF_ROWS)
        return cls(machine, source, gemms[0].dtype, len(gemms), c, trees)

    def log_ratios(self, gemms: Sequence[Gemm]) -> tuple[Array, Array]:
        """Log of measured over the formula's time, as the collection has it at some shapes, and by
        how much its trees disagree about each: more where they know nothing like it.

        Args:
            gemms: of any dtype and layout: they are looked up by their sizes.
        """
        asked = [replace(gemm, dtype=self.dtype, layout="nt") for gemm in gemms]
        inputs = Inputs.of(self.machine, Query.plain(asked, LIBRARY, warm=True))
        guess = inputs.estimate(self.constants)
        return self.trees.predict(inputs.features(self.constants, guess))

    def to_json(self) -> dict[str, Any]:
        """For calibration.json."""
        return {
            "source": self.source, "dtype": self.dtype, "rows": self.rows,
            "machine": self.machine.to_json(), "constants": self.constants.to_json(),
            "trees": self.trees.to_json(),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: something is missing, or no number; UserError is one.
        """
        if fault := misfit(data, _FIGURES):
            raise ValueError(fault)
        return cls(
            Machine.from_json(data["machine"]), data["source"], data["dtype"], data["rows"],
            Constants.from_json(data["constants"]), Forest.from_json(data["trees"]),
        )  # fmt: skip


@dataclass(frozen=True)
class Offsets:
    """What several collections say together: the weighted sum of their log ratios."""

    priors: tuple[Prior, ...]
    weights: tuple[float, ...]

    def at(self, problems: Sequence[Problem]) -> tuple[Array, Array]:
        """What each collection says at some problems: :func:`columns_of`."""
        return columns_of(self.priors, problems)

    def together(self, columns: Array) -> Array:
        """The offset at each problem, of each collection's (columns) there (rows)."""
        return columns @ np.array(self.weights)

    def spread(self, deviations: Array) -> Array:
        """How far it may be off, as the trees of each collection (columns) disagree; at least 1.

        In units of :data:`_USUAL`.
        """
        return np.hypot(1.0, np.hypot.reduce(deviations * np.array(self.weights), axis=1) / _USUAL)

    @property
    def source(self) -> str:
        """Whose collections they are, in words."""
        return " and ".join(prior.name for prior in self.priors)

    def named_weights(self) -> dict[str, float]:
        """The weights by whose collection each is."""
        return {prior.name: w for prior, w in zip(self.priors, self.weights, strict=True)}

    def to_json(self) -> dict[str, Any]:
        """For calibration.json."""
        return {
            "weights": list(self.weights), "collections": [p.to_json() for p in self.priors]
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: something is missing, or no number; or there are more weights than priors.
        """
        if fault := misfit(data, {"weights": [Number()], "collections": [dict]}):
            raise ValueError(fault)
        priors = tuple(Prior.from_json(one) for one in data["collections"])
        if len(priors) != len(data["weights"]):
            raise ValueError("there is not one weight for each collection")
        return cls(priors, tuple(data["weights"]))


def columns_of(priors: Sequence[Prior], problems: Sequence[Problem]) -> tuple[Array, Array]:
    """Each collection's log ratio (columns) at each problem (rows), which all are GEMMs, and by how
    much its trees disagree there.
    """
    gemms = [problem for problem in problems if isinstance(problem, Gemm)]
    parts = [prior.log_ratios(gemms) for prior in priors]
    means, deviations = zip(*parts, strict=True)
    return np.column_stack(means), np.column_stack(deviations)
