"""What others' tables say about a machine before it was measured much: log ratios as offsets.

For each collection of a machine, or of a sibling of its generation, trees learned by how much its
times differ from the formula. A machine's own rows then need to tell only what is left: constants
and the collections' weights are fitted together, and trees grow from the rest
(:func:`analysis.model.fitting.fit_group`). A collection of the machine itself has a weight for each
kind of limit: one framework's table may tell most of launches, another's of the memory's speed. One
of a sibling has a single weight: with those of the same sibling's other collections, it tells what
a software changes. The collections' trees must not have seen the shapes of the machine's own rows:
they know them better than others, and all that is fitted would rely on it. Pooling all machines'
rows with their facts as features, Gaussian processes and boosted trees were tried and did worse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from analysis.model.features import Inputs
from analysis.model.forest import Forest
from analysis.model.query import Query
from kernels.constants import Constants, scaled_constants
from kernels.documents import COUNT, Each, Number, misfit
from kernels.estimate import Array, Estimate
from kernels.machine import Machine
from kernels.problem import Gemm

LIBRARY = "cublas"
"""The library that all collections are of."""

_USUAL = 0.02  # of a log ratio, by which trees disagree about shapes like those they grew from
_KINDS = (("launch",), ("compute", "feed", "latency"), ("memory",))  # of limits: fixed, SMs, memory
_SHARPNESS = 4  # the power of a limit's time by which its kind counts; the largest nearly alone


@dataclass(frozen=True)
class Growth:
    """How many trees grow from a collection's rows, and the minimum number of rows in a leaf."""

    trees: int
    leaf_rows: int


WHOLE = Growth(64, 2)
COARSE = Growth(16, 4)
"""Of siblings' tables beside the machine's own: their weights are small, and there are many."""

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

    def constants_on(self, machine: Machine, dtype: str) -> Constants:
        """Its constants, as they are on another machine of the generation by the datasheets."""
        return scaled_constants(self.constants, self.machine, machine, dtype)

    @classmethod
    def grown(
        cls,
        machine: Machine,
        source: str,
        gemms: Sequence[Gemm],
        seconds: Array,
        c: Constants,
        growth: Growth = WHOLE,
    ) -> Self:
        """The trees of a collection's rows.

        Args:
            machine: what it was measured on.
            source: whose it is, in words.
            gemms: the rows' products, all of one dtype.
            seconds: their times.
            c: constants that were fitted to them.
            growth: how many trees, of how many rows.
        """
        inputs = Inputs.of(machine, Query.plain(gemms, LIBRARY, warm=True))
        guess = inputs.estimate(c)
        features, log_ratios = inputs.features(c, guess), np.log(seconds / guess.time)
        trees = Forest.grown(features, log_ratios, growth.trees, growth.leaf_rows)
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


class Said(NamedTuple):
    """What several collections say about some cases of a machine.

    ``columns`` has the log of the time that each collection (columns) gives each case (rows), over
    the formula's by the first collection's constants; ``deviations`` by how much its trees disagree
    about it. ``shares`` says how much each kind of limit (columns) counts in each case: its time to
    the fourth power, so that they sum to one.
    """

    columns: Array
    deviations: Array
    shares: Array

    @classmethod
    def by(cls, priors: Sequence[Prior], inputs: Inputs) -> Self:
        """By some collections, of GEMMs: each one's formula and what its trees add."""

        def formula(prior: Prior) -> Estimate:
            return inputs.estimate(prior.constants_on(inputs.machine, inputs.dtype))

        gemms = [problem for problem in inputs.problems if isinstance(problem, Gemm)]
        first = formula(priors[0])
        columns, deviations = [], []
        for prior in priors:
            log_ratios, disagreement = prior.log_ratios(gemms)
            columns.append(log_ratios + np.log(formula(prior).time / first.time))
            deviations.append(disagreement)
        of_kinds = [np.max([getattr(first, name) for name in kind], axis=0) for kind in _KINDS]
        parts = (np.column_stack(of_kinds) / first.time[:, None]) ** _SHARPNESS
        shares = parts / parts.sum(axis=1, keepdims=True)
        return cls(np.column_stack(columns), np.column_stack(deviations), shares)

    def take(self, where: NDArray[np.intp]) -> Self:
        """The same of some of the cases."""
        return type(self)(*(part[where] for part in self))

    def regressors(self, own: Sequence[bool]) -> Array:
        """What each weight is multiplied by in each case (rows).

        Args:
            own: of each collection, whether it is of the machine itself, with a weight for each
                kind of limit, or has one weight.
        """
        each = self.columns.T[:, :, None]
        return np.hstack([c * self.shares if o else c for c, o in zip(each, own, strict=True)])


@dataclass(frozen=True)
class Offsets:
    """What several collections say together: the weighted sum of their log ratios.

    ``weights`` has, for each collection, one for each kind of limit: what is the same however long
    a case takes, what the SMs do, and the memory.
    """

    priors: tuple[Prior, ...]
    weights: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, priors: Sequence[Prior], own: Sequence[bool], weights: Sequence[float]) -> Self:
        """From the weights of :meth:`Said.regressors`."""
        rest = iter(weights)
        matrix = []
        for alone in own:
            one = [next(rest) for _ in (_KINDS if alone else _KINDS[:1])]
            matrix.append(tuple(one if alone else one * len(_KINDS)))
        return cls(tuple(priors), tuple(matrix))

    @classmethod
    def mean(cls, priors: Sequence[Prior], chosen: Collection[int]) -> Self:
        """The mean of some of the collections, by their positions; the others have no weight."""
        weights = [float(i in chosen) / len(chosen) for i in range(len(priors))]
        return cls(tuple(priors), tuple((weight,) * len(_KINDS) for weight in weights))

    def at(self, inputs: Inputs) -> Said:
        """What each collection says of some cases."""
        return Said.by(self.priors, inputs)

    def together(self, said: Said) -> Array:
        """The offset of each case."""
        return np.sum(said.columns * self._weights_at(said), axis=1)

    def spread(self, said: Said) -> Array:
        """How far it may be off, as the trees of each collection disagree; at least 1.

        In units of :data:`_USUAL`.
        """
        weighted = said.deviations * self._weights_at(said)
        return np.hypot(1.0, np.hypot.reduce(weighted, axis=1) / _USUAL)

    def _weights_at(self, said: Said) -> Array:
        """Each collection's weight (columns) in each case (rows)."""
        return said.shares @ np.array(self.weights).T

    @property
    def source(self) -> str:
        """Whose collections they are, in words: by name, or how many there are of each machine."""
        if len(self.priors) <= 2:
            return " and ".join(prior.name for prior in self.priors)
        machines = Counter(prior.machine.slug for prior in self.priors)
        return "public tables: " + ", ".join(f"{n} of {slug}" for slug, n in machines.items())

    def named_weights(self) -> dict[str, list[float]]:
        """The weights by whose collection each is."""
        return {prior.name: list(w) for prior, w in zip(self.priors, self.weights, strict=True)}

    def to_json(self) -> dict[str, Any]:
        """For calibration.json."""
        return {
            "weights": [list(each) for each in self.weights],
            "collections": [p.to_json() for p in self.priors],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: something is missing, or no number; or there are more weights than priors.
        """
        if fault := misfit(data, {"weights": [[Number()]], "collections": [dict]}):
            raise ValueError(fault)
        priors = tuple(Prior.from_json(one) for one in data["collections"])
        weights = tuple(tuple(each) for each in data["weights"])
        if not priors or [len(each) for each in weights] != [len(_KINDS)] * len(priors):
            raise ValueError("there is not one weight for each collection and kind of limit")
        return cls(priors, weights)
