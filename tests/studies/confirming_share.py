"""What share of a sweep's budget earns most if it is left for measuring the best guesses?

    python -m tests.studies.confirming_share MEASURED TRUTH [--budgets 256,1024] [--seeds 3]
                                             [--write FILE]

plays it on two collections of one machine's table: the first is what a machine measures, the second
the truth that a change is judged by. The unit of a budget is a case of a sweep: six samples and
their preparation. A share is left, as by ``--leave``. The rest is measured as a sweep, its rows
chosen among those of the whole budget as the validation chooses rows, and a model is calibrated on
them. Then confirming is played at its own costs (``sweeps/running/confirming.py``). A question's
problem, its two best guesses and up to two more neighbours that were measured are explored with 8/6
of a case's samples each, and 40/6 are set aside for the pair (A B B A in five blocks of two
processes): 10⅔ cases or more, less where two questions share a shape. What promises most comes
first, until nothing fits.

The questions are the table's, to pad by 12.5 % and to choose within 15 %, among shapes of the table
of times. So that shares can be compared, each answers the same ones: of all problems above 1e9 FLOP
that the whole budget would sweep. Those that a smaller sweep leaves out are answered by the model
and cannot be confirmed, as in a recording. Beside them stand problems that no sweep has
(``elsewhere``): what the model is worth to whoever asks about another shape. An answer is the
table's: what was confirmed counts most, then measured times, then the prediction; a shape is moved
if that says *do it* or *likely*. *Do it* is said by the project's own rule.

What is simpler than in a run: every case costs the same, what is explored does not calibrate the
model, and a pair's mean is that of the measuring collection's own times, so that nothing is fresh
about it. Its two processes are drawn about that, as far apart as the collections are for most
shapes: more than processes of one machine are, as the software differs, too.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray

from analysis.advice.measurements import Measurements
from analysis.advice.options import Question
from analysis.advice.recommend import Choice, best_choice, weigh
from analysis.advice.sizes import SizeIndex
from analysis.advice.table import QUESTIONS
from analysis.advice.trials import Trial, affordable, pairs_to_confirm, trial_among
from analysis.advice.verdict import DO_IT, MIN_GAIN
from analysis.commands.confirm import GUESSES
from analysis.imports.public import PublicRows, read_source
from analysis.model.predict import Model
from analysis.model.query import Query, group_of
from analysis.recordings.confirmed import Pair
from analysis.recordings.repetition import MeasuredTime
from analysis.validation.holdout import validate
from kernels.machine import Machine, known_machine
from kernels.problem import Problem
from kernels.timemodel.estimate import Array
from sweeps.cases.case import Contender
from sweeps.folding.history import BLOCKS, PROCESSES
from sweeps.running.confirming import CANDIDATE_COST, PAIR_COST

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7)
MIN_FLOPS = 1e9
ELSEWHERE = 500
_REPEATED = 24  # cases by which a run knows how far processes are apart
_HEAD = (
    "share  swept  tried   anew  do it  moved   gain       over none  unconfirmed    pad  choose  "
    "regret  elsewhere: pad  regret"
)
_NORMAL = 1.4826  # standard deviations in a normal deviate's median distance from its median


class Asked(NamedTuple):
    """A question, and the rows that may answer it, of which the first is the problem."""

    question: Question
    rows: list[int]


@dataclass(frozen=True)
class Worth:
    """What a share earns; gains and regrets are fractions, means over questions moved or not.

    ``swept`` counts cases, ``tried`` the questions whose guesses are measured, ``confirmed`` the
    pairs that are timed anew; ``told`` questions are answered with *do it*, ``moved`` with that or
    *likely*. ``gain`` is over both kinds of questions: of time to pad, of speed to choose;
    ``unconfirmed_gain`` is that of the same sweep if nothing were measured after it.
    """

    share: float
    swept: int
    questions: int
    tried: int
    confirmed: int
    told: int
    moved: int
    gain: float
    unconfirmed_gain: float
    pad_gain: float
    choose_gain: float
    choose_regret: float
    elsewhere_pad_gain: float
    elsewhere_choose_regret: float


@dataclass(frozen=True)
class Collections:
    """The rows that two collections share: as they are measured, and the truth in seconds."""

    machine: Machine
    measured: PublicRows
    truth: Array

    @classmethod
    def match(cls, machine: Machine, measured: PublicRows, truth: PublicRows) -> Collections:
        """Of both collections what they share."""
        known = dict(zip(truth.problems, truth.seconds, strict=True))
        seconds = np.array([known.get(problem, np.nan) for problem in measured.problems])
        both = np.isfinite(seconds)
        return cls(machine, measured.take(both), seconds[both])

    @cached_property
    def apart(self) -> float:
        """By how much a log time differs between them: the standard deviation for most rows."""
        log = np.log(self.measured.seconds / self.truth)
        return float(_NORMAL * np.median(np.abs(log - np.median(log))))

    @cached_property
    def flops(self) -> Array:
        """Of each row."""
        return np.array([float(problem.flops) for problem in self.measured.problems])

    @cached_property
    def index(self) -> SizeIndex:
        """Finds rows."""
        return SizeIndex(self.measured.problems)

    def asked_of(self, rows: Iterable[int]) -> list[Asked]:
        """Both questions of each of some rows, where other rows may answer it."""
        asked = []
        for row in map(int, rows):
            for question in QUESTIONS:
                less = -question.allowance if question.choose else 0.0
                problem = self.measured.problems[row]
                near = self.index.near(problem, less, question.allowance)
                others = [int(i) for i in near if i != row]
                if others:
                    asked.append(Asked(question, [row, *others]))
        return asked

    def times(self, rows: Iterable[int], pairs: Sequence[Pair] = ()) -> Measurements:
        """What is known once some rows were measured."""
        source = self.measured
        times: dict[Problem, dict[str, MeasuredTime]] = {}
        for i in map(int, rows):
            seconds = float(source.seconds[i])
            time = MeasuredTime(
                seconds, seconds, seconds, between=self.apart, between_cases=self.apart
            )
            times[source.problems[i]] = {source.implementations[i]: time}
        return Measurements(times, pairs=pairs)

    def retimed(self, contenders: tuple[Contender, Contender], draw: np.random.Generator) -> Pair:
        """A pair, as two processes would find it that agree with the times in the mean."""
        before, after = (self.measured.seconds[self.row[problem]] for problem, _ in contenders)
        middle, off = float(np.log(before / after)), self.apart * draw.standard_normal()
        processes = middle + off * np.resize([1, -1], PROCESSES)
        blocks = tuple((float(ratio),) * BLOCKS for ratio in processes)
        return Pair(*contenders, blocks, self.apart, _REPEATED)

    @cached_property
    def row(self) -> dict[Problem, int]:
        """Of each problem."""
        return {problem: i for i, problem in enumerate(self.measured.problems)}


class Swept:
    """What a sweep of some rows leads to: a model, and predictions of all rows asked about."""

    def __init__(
        self, of: Collections, model: Model, rows: NDArray[np.intp], asked: Sequence[Asked]
    ) -> None:
        self._of, self._model, self.rows = of, model, rows
        needed = np.unique([row for one in asked for row in one.rows])
        source = of.measured
        query = Query.with_implementations(
            source.problems, source.implementations, source.warm
        ).take(needed)
        frame = model.predict(query).frame().set_index(needed)
        self._frame = frame[["time_us", "lo_us", "hi_us"]]

    def trials(self, asked: Sequence[Asked]) -> list[Trial]:
        """What may be measured for the questions about rows of the sweep."""
        own, known = set(self.rows.tolist()), self._of.times(self.rows)
        trials = [
            trial_among(self._problems(one), self._frame.loc[one.rows], self._model, known,
                        self._of.measured.implementations[one.rows[0]], one.question, GUESSES)
            for one in asked if one.rows[0] in own
        ]  # fmt: skip
        return [trial for trial in trials if trial is not None and trial.promise >= MIN_GAIN]

    def answers(
        self, asked: Sequence[Asked], known: Measurements
    ) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Which of a question's rows the table's answer takes, and whether it says *do it*."""
        taken, told = [], []
        for one in asked:
            choices = self._choices(one, known)
            best = best_choice(choices)
            taken.append(best)
            told.append(bool(best) and choices[best].verdict == DO_IT)
        return np.array(taken, dtype=np.intp), np.array(told, dtype=bool)

    def _choices(self, one: Asked, known: Measurements) -> list[Choice]:
        options = self._problems(one)
        group = group_of(self._of.measured.implementations[one.rows[0]], options[0])
        frame = self._frame.loc[one.rows]
        return weigh(options[0], options, frame, self._model.fit_of(group), known, one.question)

    def _problems(self, one: Asked) -> list[Problem]:
        return [self._of.measured.problems[row] for row in one.rows]


def worth_of(
    of: Collections, budget: int, seed: int, shares: Sequence[float] = SHARES,
    elsewhere: int = ELSEWHERE,
) -> list[Worth]:  # fmt: skip
    """What each share of a budget earns.

    Args:
        of: the collections.
        budget: in cases of a sweep.
        seed: of the choice of rows, and of what is drawn.
        shares: how much of it is left for confirming.
        elsewhere: how many problems that no sweep has are asked about, too.
    """
    whole = validate(of.measured, of.machine, budget, seed)
    draw = np.random.default_rng(seed)
    large = np.flatnonzero(of.flops > MIN_FLOPS)
    others = draw.permutation(np.setdiff1d(large, whole.calibrated))[:elsewhere]
    asked = of.asked_of(np.intersect1d(large, whole.calibrated))
    also = of.asked_of(others)
    found = []
    for share in shares:
        model, rows = whole.model, whole.calibrated
        if share:
            chosen = of.measured.take(whole.calibrated)
            part = validate(chosen, of.machine, round((1 - share) * budget), seed)
            model, rows = part.model, whole.calibrated[part.calibrated]
        swept = Swept(of, model, rows, [*asked, *also])
        tried, explored, pairs = confirm(of, swept.trials(asked), share * budget, draw)
        known = of.times([*rows, *explored], pairs)
        taken, told = swept.answers(asked, known)
        gain, regret = judged(of, asked, taken)
        without, _ = judged(of, asked, swept.answers(asked, of.times(rows))[0])
        choose = np.array([one.question.choose for one in asked])
        also_gain, also_regret = judged(of, also, swept.answers(also, known)[0])
        also_choose = np.array([one.question.choose for one in also])
        found.append(Worth(
            share, len(rows), len(asked), tried, len(pairs), int(told.sum()),
            int(np.count_nonzero(taken)), float(gain.mean()), float(without.mean()),
            float(gain[~choose].mean()), float(gain[choose].mean()), float(regret[choose].mean()),
            float(also_gain[~also_choose].mean()), float(also_regret[also_choose].mean()),
        ))  # fmt: skip
    return found


def confirm(
    of: Collections, trials: Sequence[Trial], units: float, draw: np.random.Generator
) -> tuple[int, list[int], list[Pair]]:
    """How many trials so many units pay for, the rows that are explored, and the pairs."""
    cost = {
        contender: (CANDIDATE_COST, PAIR_COST / 2)
        for trial in trials
        for contender in trial.contenders
    }
    tried = affordable(trials, cost, units)
    explored = [of.row[problem] for trial in tried for problem, _ in trial.contenders]
    chosen = pairs_to_confirm(tried, of.times(explored))
    return len(tried), explored, [of.retimed(contenders, draw) for contenders in chosen]


def judged(of: Collections, asked: Sequence[Asked], taken: NDArray[np.intp]) -> tuple[Array, Array]:
    """What answers gain in truth, and how far they stay behind the best in hindsight: of speed, or
    to pad of time.
    """
    gain, regret = np.zeros(len(asked)), np.zeros(len(asked))
    for i, one in enumerate(asked):
        work = of.flops[one.rows] if one.question.choose else 1.0
        speed = work / of.truth[one.rows]
        took = speed[taken[i]]
        gain[i], regret[i] = took / speed[0] - 1, 1 - took / speed.max()
    return gain, regret


def summary(runs: Sequence[dict[str, Any]]) -> str:
    """Means over the seeds, a table for each budget; ``over none`` is the gain over that of leaving
    nothing, with its standard error.
    """
    lines = []
    for budget in sorted({run["budget"] for run in runs}):
        seeds = [run["shares"] for run in runs if run["budget"] == budget]
        lines.append(f"{budget:,} cases, seeds: {len(seeds)}")
        lines.append(_HEAD)
        for of_share in zip(*seeds, strict=True):
            mean = {name: float(np.mean([one[name] for one in of_share])) for name in of_share[0]}
            none = [shares[0]["gain"] for shares in seeds]
            over = np.array([one["gain"] for one in of_share]) - none
            error = np.std(over, ddof=1) / len(over) ** 0.5 if len(over) > 1 else np.nan
            lines.append(
                f"{mean['share']:5.0%} {mean['swept']:6.0f} {mean['tried']:6.1f} "
                f"{mean['confirmed']:6.1f} {mean['told']:6.1f} {mean['moved']:6.1f} "
                f"{mean['gain']:6.2%} {np.mean(over):+6.2%} ± {error:5.2%} "
                f"{mean['unconfirmed_gain']:12.2%} {mean['pad_gain']:6.2%} "
                f"{mean['choose_gain']:7.2%} {mean['choose_regret']:7.2%} "
                f"{mean['elsewhere_pad_gain']:14.2%} {mean['elsewhere_choose_regret']:7.2%}"
            )
    return "\n".join(lines)


def main(
    measured: Annotated[Path, typer.Argument(help="The collection that a machine measures.")],
    truth: Annotated[Path, typer.Argument(help="The one that is the truth.")],
    machine: Annotated[str, typer.Option()] = "nvidia-h100-sxm",
    budgets: Annotated[str, typer.Option(help="In cases.")] = "256,1024",
    seeds: Annotated[int, typer.Option()] = 3,
    write: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Print what each share earns; runs that the file has are not made again."""
    here = known_machine(machine)
    of = Collections.match(here, *(read_source(path, here) for path in (measured, truth)))
    settings = {
        "at": time.strftime("%Y-%m-%d", time.gmtime()), "machine": machine,
        "measured": measured.name, "truth": truth.name, "rows": len(of.truth), "apart": of.apart,
        "candidate_cost": CANDIDATE_COST, "pair_cost": PAIR_COST, "guesses": GUESSES,
        "least_flops": MIN_FLOPS, "elsewhere": ELSEWHERE,
        "software": {name: version(name) for name in ("numpy", "scikit-learn", "scipy")},
    }  # fmt: skip
    runs = json.loads(write.read_text(encoding="utf-8"))["runs"] if write and write.exists() else []
    done = {(run["budget"], run["seed"]) for run in runs}
    for one in itertools.product(map(int, budgets.split(",")), range(seeds)):
        if one in done:
            continue
        shares = [asdict(worth) for worth in worth_of(of, *one)]
        runs.append({"budget": one[0], "seed": one[1], "shares": shares})
        if write is not None:
            lines = ",\n".join(json.dumps(run, allow_nan=False) for run in runs)
            text = f'{json.dumps(settings)[:-1]}, "runs": [\n{lines}\n]}}\n'
            write.write_text(text, encoding="utf-8")
    print(summary(runs))


if __name__ == "__main__":
    typer.run(main)
