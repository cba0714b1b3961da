"""Cases of one group as arrays: inputs of the formula, and features of the trees."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.model.query import Query
from kernels.config import HAND_WRITTEN, tail_efficiency, tile_count
from kernels.machine import Machine
from kernels.problem import Conv, Problem
from kernels.timemodel.constants import Constants
from kernels.timemodel.estimate import (
    ALGORITHMS,
    LIMITS,
    Array,
    Estimate,
    Shapes,
    Tiles,
    estimate,
    fastest,
)

_DESIGN_FEATURES = 5  # number of leading columns of Inputs.features that Inputs.design returns

_USUAL_TILES = ((64, 64), (128, 64), (64, 128), (128, 128), (256, 128), (128, 256))
"""Rows and columns of output tiles that vendor libraries often use."""


@dataclass(frozen=True)
class Inputs:
    """Cases of one group as arrays, ready for estimates with different constants.

    Attributes:
        shapes: the cases as arrays, with convolutions as implicit GEMMs.
        tiles: the tile of each case if all cases have configs of a hand-written kernel, or if
            :meth:`settled` fixed their tiles; otherwise None.
        winograd: the cases as arrays, once for each of Winograd's algorithms that the vendor
            library may choose, by the algorithm's name.
        algorithms: the algorithm that computed each case, empty where it is not known.
    """

    machine: Machine
    dtype: str
    problems: Sequence[Problem]
    shapes: Shapes
    tiles: Tiles | None
    winograd: Mapping[str, Shapes]
    algorithms: NDArray[Any]

    @classmethod
    def from_query(
        cls, machine: Machine, query: Query, algorithms: NDArray[Any] | None = None
    ) -> Inputs:
        """Make inputs from a query whose cases all belong to one group.

        ``algorithms`` has the algorithm that computed each case, empty where it is not known; None
        if no algorithm is known.
        """
        # 1. Describe the shapes. Operands are only read from the cache if they fit into it together
        #    with the result.
        in_cache = [
            warm and problem.bytes <= machine.l2_bytes
            for warm, problem in zip(query.cached, query.problems, strict=True)
        ]
        # All cases of a group share the implementation, the operation and the dtype of the first.
        first = query.problems[0]
        config_type = HAND_WRITTEN.get(query.implementations[0])
        on_gpu_library = config_type is None and machine.kind == "gpu"
        shapes = Shapes.from_problems(
            query.problems, in_cache, query.sustained, on_gpu_library=on_gpu_library
        )
        # 2. Look up the tiles that the configs of a hand-written kernel name.
        tiles = None
        if config_type is not None and all(query.configs):
            configs = [config_type.parse(text) for text in query.configs]
            tile_rows = [
                (config.bm, config.bn, config.parts(problem.implied_gemm))
                for config, problem in zip(configs, query.problems, strict=True)
            ]
            tiles = Tiles(*np.array(tile_rows, dtype=np.float64).T)
        # 3. Describe the shapes for Winograd's algorithms, if the library may choose one of them.
        #    These algorithms were only observed in fp32. No public table has the kernel names of
        #    16-bit convolutions, which would show the algorithm.
        winograd = {}
        if on_gpu_library and isinstance(first, Conv) and first.dtype == "fp32":
            for name in list(ALGORITHMS)[1:]:  # the first one is the implicit GEMM
                winograd[name] = Shapes.from_problems(
                    query.problems, in_cache, query.sustained, algorithm=name
                )
        if algorithms is None:
            algorithms = np.array([""] * len(shapes), dtype=object)
        return cls(machine, first.dtype, query.problems, shapes, tiles, winograd, algorithms)

    @property
    def _library_tiles(self) -> Tiles:
        return Tiles.library(self.machine, self.dtype)

    def estimate(self, constants: Constants) -> Estimate:
        """Estimate each case with the formula only.

        Where a tile or an algorithm is not known, the fastest one is assumed. An algorithm that the
        formula does not describe, such as an FFT, is estimated as the implicit GEMM.
        """
        peak = self.machine.peak(self.dtype)
        if self.tiles is not None:
            guess = estimate(self.shapes, self.tiles, self.machine, peak, constants)
        else:
            guess = self._fastest(self.shapes, constants)
        for name, shapes in self.winograd.items():
            algorithm_number = list(ALGORITHMS).index(name)
            transformed = replace(
                self._fastest(shapes, constants), algorithm=np.full(len(shapes), algorithm_number)
            )
            is_chosen = (self.algorithms == "") & (transformed.time < guess.time)
            guess = guess.where(transformed, is_chosen | (self.algorithms == name))
        return guess

    def settled(self, guess: Estimate) -> Inputs:
        """Return the inputs with each case fixed to the tile and algorithm that an estimate chose.

        For the returned inputs, :meth:`estimate` does not search for the fastest tile again. The
        field ``algorithm`` of its result is 0 for all cases, whichever algorithm was chosen.
        """
        shapes = self.shapes
        for name, transformed in self.winograd.items():
            shapes = shapes.where(transformed, guess.algorithm == list(ALGORITHMS).index(name))
        tiles = Tiles(guess.bm, guess.bn, guess.split)
        return replace(self, shapes=shapes, tiles=tiles, winograd={})

    def _fastest(self, shapes: Shapes, constants: Constants) -> Estimate:
        peak = self.machine.peak(self.dtype)
        return fastest(shapes, self._library_tiles, self.machine, peak, constants)

    def design(self, constants: Constants) -> Array:
        """Return the features for choosing calibration cases: sizes, time and intensity."""
        return self.features(constants, self.estimate(constants))[:, :_DESIGN_FEATURES]

    def features(
        self, constants: Constants, guess: Estimate, offsets: Array | None = None
    ) -> Array:
        """Return the features from which trees predict log ratios, one row per case.

        The columns describe:

        - the sizes, their products and ratios, the estimated time and the intensity;
        - the parts of the estimated time, such as compute and memory, and the estimate's tile,
          waves and efficiencies;
        - the tail efficiency with each usual tile;
        - the factors of two in M, N and K, because libraries choose kernels by alignment;
        - if ``offsets`` is given, its columns, and the ratio of the problem's bytes to the size of
          the last-level cache;
        - for a convolution, its output, filter, strides and alignment, and each algorithm's time.

        The ratio to the cache's size is needed because operands that fit into this cache were read
        from it in public tables, but from memory in most of Rooftile's measurements.

        ``guess`` is the result of :meth:`estimate` with ``constants``. ``offsets`` has the log
        ratios that public tables predict, one column for each table; None without public tables.
        """
        shapes, machine = self.shapes, self.machine
        # ``density`` is the useful share of the multiply-adds.
        flops = 2 * shapes.batch * shapes.m * shapes.n * shapes.k * shapes.density
        intensity = flops / shapes.bytes
        ridge = machine.peak(self.dtype) / machine.bandwidth
        log_sizes = np.log2([shapes.m, shapes.n, shapes.k])
        columns = [*log_sizes, np.log(guess.time), np.log(intensity / ridge)]
        for first, second in itertools.combinations(log_sizes, 2):
            columns += [first + second, first - second]
        columns += [getattr(guess, name) / guess.time for name in LIMITS]
        counts = (guess.bm, guess.bn, guess.split, guess.tiles, guess.waves)
        columns += [np.log2(count) for count in counts]
        columns += [guess.tile_efficiency, guess.tail_efficiency]
        for bm, bn in _USUAL_TILES:
            tiles = tile_count(shapes.m, shapes.n, bm, bn, shapes.batch)
            columns.append(tail_efficiency(tiles, machine.sms))
        columns += [_factors_of_two(size) for size in (shapes.m, shapes.n, shapes.k)]
        if offsets is not None:
            columns += [*offsets.T, np.log(shapes.bytes / machine.l2_bytes)]
        return np.column_stack([*columns, *self._conv_features(constants, guess)])

    def _conv_features(self, constants: Constants, guess: Estimate) -> list[Array]:
        """Return the columns of :meth:`features` that only convolutions have, or [] for GEMMs."""
        if not isinstance(self.problems[0], Conv):
            return []
        convolutions = [problem for problem in self.problems if isinstance(problem, Conv)]
        rows = [
            (
                conv.n,
                conv.p,
                conv.q,
                conv.r * conv.s,
                conv.stride[0] * conv.stride[1],
                conv.alignment,
            )
            for conv in convolutions
        ]
        images, height, width, filter_area, both_strides, alignment = np.array(rows, dtype=float).T
        quantities = (images, height * width, filter_area, both_strides, alignment)
        columns = [np.log2(quantity) for quantity in quantities]
        # The implicit GEMM comes first, then Winograd's algorithms.
        by_algorithm = (self.shapes, *self.winograd.values())
        columns += [
            np.log(self._fastest(shapes, constants).time / guess.time) for shapes in by_algorithm
        ]
        for name in self.winograd:
            side = ALGORITHMS[name]  # side of Winograd's tile, in outputs
            padded_area = np.ceil(height / side) * np.ceil(width / side) * side**2
            columns.append(np.log(padded_area / (height * width)))
        return columns


def _factors_of_two(sizes: Array) -> Array:
    """Return the number of times that each size can be divided by two, but at most 8.

    Powers of two above 2⁸ do not matter, because even the next one, 512, is larger than any side of
    a vendor library's tile.
    """
    # For an integer x, x & -x is the largest power of two that divides x.
    integers = sizes.astype(np.int64)
    return np.minimum(np.log2(integers & -integers), 8.0)
