"""How good is an estimate with 0, 1, 5, 10, 50, 256 and 2,048 own measurements?

    python -m tests.studies.evidence [--machine SLUG ...] [--prior tables|constants] [--draws 20]

Each GPU is played by one public collection that no prior has seen. A fifth of its shapes, chosen
by a hash, judges. Own measurements are drawn at random from another fifth. The priors' trees know
only the shapes that are left. With ``tables`` the prior is the GPU's other collections and those of
its siblings. With ``constants`` it is what somebody has who imported nothing: constants fitted to
another framework's table of that GPU, as they are shipped. Nobody can import a table of the RTX
3090 and 4090. The files of casys-kaist/LLMServingSim play them, whose own measurements are drawn
from all rows that do not judge.

Each line of results/accuracy/evidence.jsonl is one draw: errors and the share of the judging rows
inside the 90% interval are fractions, ``width`` is the median of hi / lo. Lines that are there are
not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from analysis.imports.public import read_source
from analysis.imports.tables import PublicTable, choose_tables, find_tables, read_rows
from analysis.model.calibrate import calibrate_query
from analysis.model.fit import SoftwareRange
from analysis.model.nearby import Collection, fitted_all, sizes_of
from analysis.model.predict import Model
from analysis.model.prior import Prior, prior_from_tables, prior_without_tables
from analysis.model.query import Query, group_of
from kernels.machine import Machine, known_machine, known_machines
from kernels.problem import Gemm
from kernels.timemodel.estimate import Array
from tests.studies.shipping.learning import shipped_fit

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("ROOFTILE_PUBLIC_DATA", ROOT.parent / "shared" / "data"))
RECORD = ROOT / "results" / "accuracy" / "evidence.jsonl"

COUNTS = (0, 1, 5, 10, 50, 256, 2048)
JUDGED_BY = "VLLM"
GPUS = (
    "nvidia-h100-sxm", "nvidia-h200", "nvidia-b200", "nvidia-a100-sxm-80gb", "nvidia-l40s",
)  # fmt: skip
SIBLINGS = {
    "nvidia-h100-sxm": ("nvidia-h200",), "nvidia-h200": ("nvidia-h100-sxm",),
    "nvidia-b200": ("nvidia-gb200", "nvidia-gb300", "nvidia-b300"),
}  # fmt: skip
FILES = {"nvidia-rtx-4090": "rtx4090-bf16.csv", "nvidia-rtx-3090": "rtx3090-fp16-every-m.csv"}
_PARTS = 5  # of the shapes: one judges, one is drawn from, three are the priors'
_MOST_JUDGING = 3000


class Played(NamedTuple):
    """A GPU, the shapes and seconds that play it, who judges, who is drawn from, and its prior."""

    machine: Machine
    source: str
    gemms: list[Gemm]
    seconds: Array
    warm: bool
    judging: NDArray[np.intp]
    pool: NDArray[np.intp]
    prior: Prior


def part_of(gemm: Gemm) -> int:
    """The part of a shape, the same in every collection."""
    return zlib.crc32(f"{gemm.m},{gemm.n},{gemm.k}".encode()) % _PARTS


def played(slug: str, kind: str) -> Played:
    """A GPU as one of its collections plays it, and the prior that has not seen that."""
    if slug in FILES:
        return played_by_file(slug)
    machine = known_machine(slug)
    tables = [t for t in find_tables() if t.rows and t.slug in known_machines()]
    judged = next(t for t in tables if t.slug == slug and t.framework == JUDGED_BY)
    one = Collection.from_rows(machine, judged.source, read_rows(judged))
    part = np.array([part_of(gemm) for gemm in one.gemms])
    others = [t for t in tables if t.slug == slug and t.path != judged.path]
    first = {table.path for table in choose_tables(tables).values()}
    others.sort(key=lambda table: table.path not in first)  # the one that an import rests on
    if kind == "constants":
        prior = shipped_without(machine, others)
    else:
        near = [t for t in tables if t.slug in SIBLINGS.get(slug, ())]
        near.sort(key=lambda table: table.path not in first)
        prior = prior_of_tables(machine, [*others, *near])
    return Played(
        machine, judged.source, list(one.gemms), one.seconds, True,
        thinned(np.flatnonzero(part == 0)), np.flatnonzero(part == 1), prior,
    )  # fmt: skip


def prior_of_tables(machine: Machine, tables: list[PublicTable]) -> Prior:
    """Collections of a machine and its siblings, of the shapes that neither judge nor are drawn."""
    collections = []
    for table in tables:
        rows = read_rows(table)
        one = Collection.from_rows(known_machine(table.slug), table.source, rows)
        seen = [gemm for gemm in one.gemms if part_of(gemm) < 2]
        collections.append(one.without(sizes_of(seen)))
    trees = fitted_all(machine, collections)
    held_out = Query.plain([gemm for gemm in seen if part_of(gemm) == 1], "cublas", True)
    return prior_from_tables(machine, "bf16", trees, held_out)


def shipped_without(machine: Machine, others: list[PublicTable]) -> Prior:
    """The prior of shipped constants, as they would be without the collection that judges."""
    prior = prior_without_tables(machine, "cublas gemm bf16")
    table = choose_tables(others)[machine.slug]
    fit = shipped_fit(machine, table, others).fit
    ends = prior.fit
    fit = fit.widened(SoftwareRange(ends.low, ends.high, ends.pair_low, ends.pair_high))
    return Prior(fit, prior.kind, table.source, prior.spread, True)


def played_by_file(slug: str) -> Played:
    """A GPU of which there is a file, and no table."""
    machine = known_machine(slug)
    source = read_source(DATA / "llmservingsim" / FILES[slug], machine, None)
    gemms = [p for p in source.problems if isinstance(p, Gemm)]
    order = np.random.default_rng(0).permutation(len(gemms))
    half = len(order) // 2
    group = group_of("cublas", gemms[0])
    return Played(
        machine, source.name, gemms, source.seconds, False, thinned(order[:half]), order[half:],
        prior_without_tables(machine, group),
    )  # fmt: skip


def thinned(rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """At most :data:`_MOST_JUDGING` rows."""
    return np.random.default_rng(0).permutation(rows)[:_MOST_JUDGING]


def judge(one: Played, count: int, draw: int) -> dict[str, float]:
    """The errors of an estimate from so many own measurements."""
    query = Query.plain(one.gemms, "cublas", one.warm)
    group = group_of("cublas", one.gemms[0])
    model = Model(one.machine, {group: one.prior.fit})
    if count:
        rng = np.random.default_rng(1000 * count + draw)
        chosen = rng.choice(one.pool, count, replace=False)
        model = calibrate_query(
            one.machine, query.take(chosen), one.seconds[chosen], priors={group: one.prior}
        ).model
    found, true = model.predict(query.take(one.judging)), one.seconds[one.judging]
    error = np.abs(found.estimate.time / true - 1)
    return {
        "rows": len(true), "median": float(np.median(error)), "mean": float(error.mean()),
        "p95": float(np.quantile(error, 0.95)),
        "coverage_90": float(((found.lo <= true) & (true <= found.hi)).mean()),
        "width": float(np.median(found.hi / found.lo)),
    }  # fmt: skip


def settings(slugs: list[str], kinds: list[str]) -> Iterator[tuple[str, str]]:
    """Each GPU with each kind of prior that it has."""
    for slug in slugs:
        yield from ((slug, kind) for kind in (["constants"] if slug in FILES else kinds))


def recorded() -> list[dict[str, Any]]:
    """All lines of the record."""
    lines = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.exists() else []
    return [json.loads(line) for line in lines]


def mean_of(rows: list[dict[str, Any]], name: str, **wanted: Any) -> float:
    """The mean over the draws with some settings; NaN without any."""
    values = [row[name] for row in rows if all(row[k] == v for k, v in wanted.items())]
    return float(np.mean(values)) if values else float("nan")


def table_text(rows: list[dict[str, Any]]) -> str:
    """Mean over the draws, by GPU, prior and number of own measurements."""
    lines = [f"{'GPU':22} {'prior':10} {'rows':>5}  median   mean     p95  inside   width  draws"]
    for key in dict.fromkeys((r["machine"], r["prior"], r["calibrated"]) for r in rows):
        wanted = dict(zip(("machine", "prior", "calibrated"), key, strict=True))
        these = [r["mean"] for r in rows if all(r[k] == v for k, v in wanted.items())]
        error = np.std(these) / max(len(these) - 1, 1) ** 0.5
        median, mean, p95, inside, width = (
            mean_of(rows, name, **wanted)
            for name in ("median", "mean", "p95", "coverage_90", "width")
        )
        lines.append(
            f"{key[0]:22} {key[1]:10} {key[2]:5}  {median:6.1%} {mean:6.1%} ±{error:.1%} "
            f"{p95:6.1%} {inside:6.1%}  ×{width:.2f} {len(these):5}"
        )
    return "\n".join(lines)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of mean errors and coverages, as how-a-prediction-is-made.md has it."""
    lines = [
        "| GPU, prior | " + " | ".join(f"{count:,}" for count in COUNTS) + " |",
        "|---|" + "---|" * len(COUNTS),
    ]
    for slug, kind in dict.fromkeys((r["machine"], r["prior"]) for r in rows):
        cells = []
        for count in COUNTS:
            wanted = {"machine": slug, "prior": kind, "calibrated": count}
            error = mean_of(rows, "mean", **wanted)
            inside = mean_of(rows, "coverage_90", **wanted)
            cells.append("–" if np.isnan(error) else f"{error:.1%} ({inside:.0%})")
        lines.append(f"| {slug.removeprefix('nvidia-')}, {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Judge what the record lacks, and print it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--machine", action="append", choices=[*GPUS, *FILES])
    parser.add_argument("--prior", action="append", choices=["tables", "constants"])
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)))
    parser.add_argument("--draws", type=int, default=20)
    given = parser.parse_args()
    counts = [int(count) for count in given.counts.split(",")]
    done = {(r["machine"], r["prior"], r["calibrated"], r["draw"]) for r in recorded()}
    chosen = given.machine or [*GPUS, *FILES]
    for slug, kind in settings(chosen, given.prior or ["tables", "constants"]):
        one = None
        for count in counts:
            for draw in range(given.draws if count else 1):
                if (slug, kind, count, draw) in done:
                    continue
                one = one or played(slug, kind)
                if count > len(one.pool):
                    continue
                line = {
                    "machine": slug, "prior": kind, "judged": one.source, "calibrated": count,
                    "draw": draw, **judge(one, count, draw),
                }  # fmt: skip
                with RECORD.open("a", encoding="utf-8") as record:
                    record.write(json.dumps(line, allow_nan=False) + "\n")
    print(table_text([r for r in recorded() if r["machine"] in chosen]))


if __name__ == "__main__":
    main()
