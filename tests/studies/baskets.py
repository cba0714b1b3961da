"""Made-up models out of rows that the model has not seen, whose steps' true times are known.

A basket is up to a dozen of a table's shapes, each so and so often, as the products of a model's
step. Those of which a neighbour that pads them a little is predicted to take less are replaced by
the one that is predicted to take least, as somebody would who looks for a better dimension.

    python -m tests.studies.baskets TABLE --machine nvidia-h100-sxm

prints how often the intervals of whole steps hold, as JSON.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from analysis.advice.recommend import predicted_ratio
from analysis.advice.sizes import SizeIndex
from analysis.advice.verdict import LIKELY, PREDICTED, Gain, verdict
from analysis.audit.step_totals import SumChange, gain_of_step, summed
from analysis.imports.public import read_source
from analysis.model.fit import NEAR
from analysis.model.query import group_of
from analysis.model.sum_errors import MOST_GEMMS, simulated_counts
from analysis.validation.holdout import Validation, validate
from kernels.common.errors import UserError
from kernels.machine import known_machine

_MIN_FLOPS = 1e9
DRAWS = 6000


@dataclass(frozen=True)
class BasketsWorth:
    """What intervals of whole steps are worth; shares and widths are fractions.

    ``step_coverage`` is the share of steps whose time lies in its 90 % interval, ``step_width`` the
    median width of that, relative to the time; ``gain_coverage`` and ``gain_width`` are the same of
    the gain of the ``changed`` steps, those of which any product is changed. ``claims`` counts the
    changes that are said to be *likely* to pay, and ``sign_right`` the share of them that do gain.
    """

    baskets: int
    step_coverage: float
    step_width: float
    changed: int
    gain_coverage: float
    gain_width: float
    claims: int
    sign_right: float | None

    def to_json(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def judge_baskets(validation: Validation, draws: int = DRAWS) -> BasketsWorth:
    """Judge the intervals of steps and of their gains on a validation's held-back rows.

    Raises:
        UserError: too few of them have neighbours.
    """
    rng = np.random.default_rng(validation.seed)
    tested, prediction = validation.tested, validation.prediction
    keep = [i for i, problem in enumerate(tested.problems) if problem.flops > _MIN_FLOPS]
    problems = [tested.problems[i] for i in keep]
    index = SizeIndex(problems)
    padded = {}
    for place in rng.permutation(len(keep))[: 4 * draws]:
        near = [int(j) for j in index.near(problems[place], 0.0, NEAR) if j != place]
        if near:
            padded[int(place)] = near
    if len(padded) < MOST_GEMMS:
        raise UserError(f"{validation.source.name} has too few neighbours for baskets.")
    seconds = tested.seconds[keep]
    names = [tested.implementations[i] for i in keep]
    groups = [group_of(name, problem) for name, problem in zip(names, problems, strict=True)]
    times, lo, hi = (
        ends[keep] for ends in (prediction.estimate.time, prediction.lo, prediction.hi)
    )
    steps, gains, claims = [], [], []
    places = np.array(list(padded))
    for counts in simulated_counts(rng, draws):
        counts = counts[counts > 0]
        chosen = rng.choice(places, len(counts), replace=False)
        products = list(zip(counts, chosen, strict=True))
        fits = [validation.model.fit_of(groups[i]) for i in chosen]
        total = summed([
            (
                n * times[i],
                n * (times[i] - fit.sum_low * (times[i] - lo[i])),
                n * (times[i] + fit.sum_high * (hi[i] - times[i])),
            )
            for (n, i), fit in zip(products, fits, strict=True)
        ])  # fmt: skip
        true = float(counts @ seconds[chosen])
        steps.append((true / total.time, total.lo / total.time, total.hi / total.time))
        changes, after, work = [], true, 0.0
        for (n, i), fit in zip(products, fits, strict=True):
            j = min(padded[i], key=times.__getitem__)
            if times[j] >= times[i]:
                continue
            spreads = fit.spread(lo[i], hi[i]), fit.spread(lo[j], hi[j])
            ratio = predicted_ratio(problems[i], problems[j], (times[i], times[j]), spreads, fit)
            changes.append(SumChange(n * times[i], ratio, (fit.change_low, fit.change_high)))
            after += n * (seconds[j] - seconds[i])
            work += n * (problems[j].flops - problems[i].flops)
        if not changes:
            continue
        gain = gain_of_step(total.time, changes)
        real = true / after - 1
        gains.append((real, gain))
        flops = sum(n * problems[i].flops for n, i in products)
        if verdict(gain, PREDICTED, work / flops) == LIKELY:
            claims.append(real > 0)
    return BasketsWorth(
        baskets=draws,
        step_coverage=float(np.mean([low <= real <= high for real, low, high in steps])),
        step_width=float(np.median([high - low for _, low, high in steps])),
        changed=len(gains),
        gain_coverage=float(np.mean([_inside(real, gain) for real, gain in gains])),
        gain_width=float(np.median([gain.hi - gain.lo for _, gain in gains])),
        claims=len(claims),
        sign_right=float(np.mean(claims)) if claims else None,
    )


def _inside(real: float, gain: Gain) -> bool:
    return gain.lo <= real <= gain.hi and math.isfinite(real)


def main(table: Path, machine: Annotated[str, typer.Option()], seed: int = 1) -> None:
    """Judge the steps made of a table's rows, each predicted by a fit to four fifths of them."""
    here = known_machine(machine)
    validation = validate(read_source(table, here), here, None, seed, "folds")
    print(json.dumps({"machine": here.slug, **judge_baskets(validation).to_json()}, indent=1))


if __name__ == "__main__":
    typer.run(main)
