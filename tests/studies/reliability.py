"""Does advice that states a probability gain that often?

    python -m tests.studies.reliability --results DIR

DIR has the public tables of nine GPUs, as ``make import`` makes them. Each GPU answers about shapes
that another framework's collection of the same GPU timed. It does so in four ways: *predicted* by
the imported table; *measured*, since both shapes are in the imported table; predicted by the
*constants* that are shipped; and predicted from 64 *own* measurements of the collection that
judges, with the shipped constants as the prior. The advice is the measured neighbour that ranks
first, among those up to 15% larger (pad) or up to 15% away (choose), however little it promises, so
that all probabilities occur. A gain is real if the collection's own times show one.

results/accuracy/reliability.json has, for each way, each question and each tenth of the stated
probability, how many answers there were, the mean stated probability, the share that gained, and
the stated and the real mean gain; and the same of whole steps, made of 3 to 12 such GEMMs, whose
gain an audit would state (:mod:`tests.studies.baskets`). results/figures/reliability.png
draws the shares.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd

from analysis.advice.measurements import Measurements, read_measurements
from analysis.advice.options import Question
from analysis.advice.recommend import predicted_ratio, weigh
from analysis.advice.sizes import SizeIndex
from analysis.advice.verdict import LEAST_PROBABILITY, PREDICTED, probability
from analysis.audit.step_totals import SumChange, gain_of_step
from analysis.imports.tables import PublicTable, choose_tables, find_tables, gemms_of, read_rows
from analysis.model.basis import find_basis
from analysis.model.calibrate import calibrate_query
from analysis.model.predict import Model
from analysis.model.prior import DTYPE, GROUP, prior_without_tables
from analysis.model.query import Query
from analysis.model.sum_errors import simulated_counts
from analysis.recordings.imported import folder_of
from analysis.recordings.load import load
from kernels.machine import known_machine, known_machines

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "results" / "accuracy" / "reliability.json"
PICTURE = ROOT / "results" / "figures" / "reliability.png"

SHAPES = 400  # of each collection, question and way
STEPS = 400  # of each collection and way
OWN_ROWS = 64
QUESTIONS = (Question("pad", 0.15), Question("choose", 0.15))
_LEAST_FLOPS = 1e9
_DECILES = np.arange(0, 1.01, 0.1)


class Answer(NamedTuple):
    """One piece of advice: what it stated and what came of it; gains are fractions."""

    way: str
    question: str
    probability: float
    stated: float
    real: float


class Judged:
    """A collection whose shapes are asked about, and the truth about them."""

    def __init__(self, table: PublicTable, seed: int) -> None:
        rows = read_rows(table, DTYPE).drop_duplicates(["m", "n", "k"])
        self.machine = known_machine(table.slug)
        gemms = gemms_of(rows)
        keep = [i for i, gemm in enumerate(gemms) if gemm.flops >= _LEAST_FLOPS]
        self.gemms = [gemms[i] for i in keep]
        self.seconds = rows["time_us"].to_numpy()[keep] * 1e-6
        self.index = SizeIndex(self.gemms)
        self.order = np.random.default_rng(seed).permutation(len(keep))

    def query(self) -> Query:
        """All of its shapes."""
        return Query.plain(self.gemms, "cublas", warm=True)

    def asked(self, question: Question) -> Iterator[list[int]]:
        """Positions of a shape and of its neighbours allowed size, the shape first."""
        less = -question.allowance if question.choose else 0.0
        for i in self.order:
            near = [int(j) for j in self.index.near(self.gemms[i], less, question.allowance)]
            near = [
                j for j in near if j != i and question.allows_flops(self.gemms[i], self.gemms[j])
            ]
            if near:
                yield [int(i), *near]

    def answers(
        self, way: str, question: Question, model: Model, measured: Measurements, skip: set[int]
    ) -> Iterator[Answer]:
        """Advice about some shapes, without those that were measured."""
        frame, found = model.predict(self.query()).frame(), 0
        for places in self.asked(question):
            if skip & set(places):
                continue
            options = [self.gemms[j] for j in places]
            rows = frame.iloc[places].reset_index(drop=True)
            choices = weigh(options[0], options, rows, model.fit_of(GROUP), measured, question)
            best = max(range(1, len(options)), key=lambda j: choices[j].rank)
            one = choices[best]
            work = question.work(options[0], options[best])
            real = self.seconds[places[0]] / self.seconds[places[best]] * work - 1
            yield Answer(
                way, question.kind, probability(one.gain, one.evidence), one.gain.value, real
            )
            found += 1
            if found == SHAPES:
                return

    def steps(self, way: str, model: Model, skip: set[int]) -> Iterator[Answer]:
        """What audits would state about steps of several GEMMs, padded where that is faster."""
        prediction, fit = model.predict(self.query()), model.fit_of(GROUP)
        times, rng = prediction.estimate.time, np.random.default_rng(0)
        padded = {}
        for places in self.asked(QUESTIONS[0]):
            if not skip & set(places):
                padded[places[0]] = min(places[1:], key=times.__getitem__)
            if len(padded) == SHAPES:
                break
        for counts in simulated_counts(rng, STEPS):
            counts = counts[counts > 0]
            chosen = rng.choice(list(padded), len(counts), replace=False)
            before = float(counts @ times[chosen])
            true = after = float(counts @ self.seconds[chosen])
            changes = []
            for n, i in zip(counts, chosen, strict=True):
                j = padded[i]
                if times[j] >= times[i]:
                    continue
                spreads = [fit.spread(prediction.lo[p], prediction.hi[p]) for p in (i, j)]
                ratio = predicted_ratio(
                    self.gemms[i], self.gemms[j], (times[i], times[j]),
                    (spreads[0], spreads[1]), fit,
                )  # fmt: skip
                in_sums = (fit.change_low, fit.change_high)
                changes.append(SumChange(n * times[i], ratio, in_sums))
                after += n * (self.seconds[j] - self.seconds[i])
            if changes:
                gain = gain_of_step(before, changes)
                sure = probability(gain, PREDICTED)
                yield Answer(way, "step", sure, gain.value, true / after - 1)


def answers_of(table: PublicTable, results: Path, seed: int) -> Iterator[Answer]:
    """All answers about one collection."""
    one = Judged(table, seed)
    basis = find_basis(table.slug, results)
    recording = load(folder_of(results, table.slug))
    public = read_measurements(recording.products, recording)
    shipped = prior_without_tables(one.machine, GROUP)
    own = np.random.default_rng(seed).permutation(len(one.gemms))[:OWN_ROWS]
    learned = calibrate_query(
        one.machine, one.query().take(own), one.seconds[own], priors={GROUP: shipped}
    ).model
    nothing, constants = Measurements({}), Model(one.machine, {GROUP: shipped.fit})
    ways = {
        "predicted": (basis.model, nothing, set()), "measured": (basis.model, public, set()),
        "constants": (constants, nothing, set()), "own": (learned, nothing, set(own.tolist())),
    }  # fmt: skip
    for way, (model, measured, skip) in ways.items():
        for question in QUESTIONS:
            yield from one.answers(way, question, model, measured, skip)
        if way != "measured":
            yield from one.steps(way, model, skip)


def deciles(answers: pd.DataFrame) -> list[dict[str, Any]]:
    """One row for each tenth of the stated probability that enough answers are in."""
    rows = []
    tenth = pd.cut(answers["probability"], _DECILES, include_lowest=True)
    for interval, part in answers.groupby(tenth, observed=True):
        rows.append(
            {
                "from": round(max(interval.left, 0), 1), "to": round(interval.right, 1),
                "answers": len(part), "stated": part["probability"].mean(),
                "gained": (part["real"] > 0).mean(), "stated_gain": part["stated"].mean(),
                "real_gain": part["real"].mean(),
            }
        )  # fmt: skip
    return rows


def markdown(document: dict[str, Any]) -> str:
    """The shares that gained by tenths, as how-advice-is-decided.md has it."""
    lines = [
        "| stated probability | one GEMM: answers | gained | a whole step: answers | gained |",
        "|---|---|---|---|---|",
    ]
    single, steps = ({row["from"]: row for row in document[name]} for name in ("gemm", "step"))
    for begin in sorted(single | steps):
        cells = [
            f"{row['answers']:,} | {row['gained']:.0%}" if row else "– | –"
            for row in (single.get(begin), steps.get(begin))
        ]
        lines.append(f"| {begin:.0%}–{begin + 0.1:.0%} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(document: dict[str, Any]) -> None:
    """The share that gained over the stated probability, with the diagonal."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 5))
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    names = {"gemm": "one GEMM", "step": "a whole step"}
    for kind, label in names.items():
        rows = [row for row in document[kind] if row["answers"] >= 50]
        axes.plot(
            [row["stated"] for row in rows],
            [row["gained"] for row in rows],
            marker="o",
            label=label,
        )
    axes.axvline(LEAST_PROBABILITY, color="0.6", linestyle=":")
    axes.set(
        xlabel="stated probability that a change gains", ylabel="share of changes that gained",
        xlim=(0, 1), ylim=(0, 1),
    )  # fmt: skip
    axes.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    """Judge every collection that the imported tables were not made of."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, required=True)
    results = parser.parse_args().results
    tables = [t for t in find_tables() if t.rows and t.slug in known_machines()]
    first = {t.path for t in choose_tables(tables).values()}
    judged = [t for t in tables if t.path not in first]
    answers = pd.DataFrame(
        [answer for seed, table in enumerate(judged) for answer in answers_of(table, results, seed)]
    )
    single = answers[answers["question"] != "step"]
    document = {
        "judged": [f"{t.source} of {t.slug}" for t in judged],
        "gemm": deciles(single), "step": deciles(answers[answers["question"] == "step"]),
        "ways": {
            f"{way}, {question}": deciles(part)
            for (way, question), part in answers.groupby(["way", "question"])
        },
        "advised": {
            way: {
                "answers": len(part), "gained": float((part["real"] > 0).mean()),
                "stated": float(part["probability"].mean()),
            }
            for way, part in single[
                (single["probability"] >= LEAST_PROBABILITY) & (single["stated"] >= 0.01)
            ].groupby("way")
        },
    }  # fmt: skip
    RECORD.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draw(document)
    for name in ("gemm", "step"):
        print(name)
        print(pd.DataFrame(document[name]).round(3).to_string(index=False))
    print(json.dumps(document["advised"], indent=1))


if __name__ == "__main__":
    main()
