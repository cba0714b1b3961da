"""Constants for a GPU that nobody measured, carried over from another one of its generation.

Two datasheets say how constants differ as far as peaks, clocks, SMs and bandwidth go. How wrong
they still are is learned from pairs of measured machines, each predicted by the constants of the
other (:mod:`analysis.validation.generation`). Of machines that lie further apart than those pairs
nothing was learned: then a factor of two remains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

from analysis.model.fit import Fit, SoftwareRange
from analysis.model.prior import LIBRARY
from analysis.model.shift import Shift
from kernels.constants import scaled_constants
from kernels.machine import Machine, known_machine

DTYPE = "bf16"
"""The dtype that is learned from; of others, the tables say too little or nothing."""

GROUP = f"{LIBRARY} gemm {DTYPE}"
"""Its products by the library, as a model's fits are named."""


def sibling_pairs(measured: Iterable[str]) -> list[tuple[Machine, Machine]]:
    """The ordered pairs of machines of one generation: where constants come from, where they go."""
    machines = map(known_machine, measured)
    pairs = itertools.permutations(machines, 2)
    return [(there, here) for there, here in pairs if there.generation == here.generation]


def nearest_sibling(machine: Machine, measured: Iterable[str]) -> Machine | None:
    """The measured machine that another one's constants come from, if there is one like it.

    It is another machine of the same generation, and neither its peak nor its bandwidth differs by
    a larger factor than it does in some pair of measured machines of one generation. Of several,
    it is the one whose two factors multiply to the least. So an L4 or an RTX 4090 takes nothing
    from an L40S, nor an H20 from an H200: nobody has shown that constants carry so far. What a
    datasheet does not say, as that a card on PCIe may draw less power, this cannot see.

    Args:
        machine: the one that constants are wanted for.
        measured: slugs of machines that have some.
    """
    slugs = list(measured)
    reach = [_apart(there, here) for there, here in sibling_pairs(slugs)]
    if not reach or DTYPE not in machine.peaks:
        return None
    furthest = [max(factors) for factors in zip(*reach, strict=True)]
    near = [
        there
        for there in map(known_machine, slugs)
        if there.generation == machine.generation
        and there.slug != machine.slug
        and all(x <= most for x, most in zip(_apart(there, machine), furthest, strict=True))
    ]
    return min(near, key=lambda there: sum(_apart(there, machine)), default=None)


def _apart(one: Machine, other: Machine) -> tuple[float, float]:
    """By which factors two machines' peaks and bandwidths differ, as logs without a sign."""
    peaks = math.log(one.peak(DTYPE) / other.peak(DTYPE))
    return abs(peaks), abs(math.log(one.bandwidth / other.bandwidth))


def carried_fit(fit: Fit, there: Machine, here: Machine, learned: SoftwareRange) -> Fit:
    """The fit of one machine for another, of which no row was seen.

    Its interval is the one that was learned from pairs, or the fit's own where that is wider:
    elsewhere constants are no surer than where they were fitted.
    """
    constants = scaled_constants(fit.constants, there, here, DTYPE)
    unseen = replace(
        fit, constants=constants, shift=Shift(), rows=0, pairs=0, median=None, mean=None, p95=None
    )
    return unseen.widened(learned)
