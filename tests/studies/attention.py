"""How well is attention predicted, and what does another framework change?

    python -m tests.studies.attention

fits every public collection of attention (:mod:`analysis.imports.attention_tables`) and writes the
errors to results/accuracy/attention.json and the constants to kernels/timemodel/attention.json. It
needs the extra ``public`` and takes about ten minutes on two cores.

Errors within a collection are mean relative errors on held-out calls: random ones, all calls with
some numbers of heads, or all calls with some lengths. Of prompts and encoders only calls of more
than 1 GFLOP are judged, because shorter ones are launches. The same is given for the formula
without trees.

Each framework is also predicted by the others on the same GPU. The 90% interval of such predictions
is learned from the other GPUs and judged on this one. ``generation`` is the same for a GPU that was
not measured: it is predicted by the constants of another one.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.attention_shapes import CONTEXT, DECODE, FULL, KINDS, AttentionShapes
from analysis.imports.attention_tables import find_attention_tables, read_calls
from analysis.imports.tables import package_folders
from analysis.model.attention import NINE_TENTHS, AttentionFit, features, grow_trees
from analysis.model.attention_basis import (
    FRAMEWORKS,
    fit_tables,
    fits_to_json,
    nearest_measured,
)
from kernels.machine import Machine, known_machine, known_machines
from kernels.timemodel.estimate import Array

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "results" / "accuracy" / "attention.json"
SHIPPED = ROOT / "kernels" / "timemodel" / "attention.json"
_FOLDS = 5
_JUDGED = 4000  # calls of a collection by which another one is judged
_LEAST_FLOPS = 1e9

Calls = tuple[AttentionShapes, Array]
Key = tuple[str, str, str]
"""Machine, framework and kind of calls."""


def judged_calls(calls: Calls, kind: str) -> NDArray[np.bool_]:
    """Return which calls count: those that are more than a launch."""
    shapes, _ = calls
    if kind == DECODE:
        return np.ones(len(shapes.batch), bool)
    return shapes.flops(kind) > _LEAST_FLOPS


def folds_by(values: Array) -> NDArray[np.int64]:
    """Assign calls to folds so that equal values are in the same fold."""
    distinct, place = np.unique(values, return_inverse=True)
    return np.random.default_rng(0).permutation(len(distinct))[place] % _FOLDS


def held_out_error(
    fit: AttentionFit, calls: Calls, kind: str, here: Machine, folds: NDArray[np.int64]
) -> float:
    """Return the mean error on calls whose fold the trees have not seen."""
    shapes, seconds = calls
    rows = features(shapes, kind, here)
    residual = np.log(seconds / fit.constants.seconds(shapes, kind, here))
    left = residual.copy()
    for fold in np.unique(folds):
        test = folds == fold
        left[test] -= grow_trees(rows[~test], residual[~test]).predict(rows[test])[0]
    return float(np.abs(np.expm1(-left[judged_calls(calls, kind)])).mean())


def within(fit: AttentionFit, calls: Calls, kind: str, here: Machine) -> dict[str, float]:
    """Return the errors within one collection."""
    shapes, seconds = calls
    formula = np.log(seconds / fit.constants.seconds(shapes, kind, here))
    random = np.random.default_rng(0).permutation(len(seconds)) % _FOLDS
    return {
        "formula": float(np.abs(np.expm1(-formula[judged_calls(calls, kind)])).mean()),
        "rows": held_out_error(fit, calls, kind, here, random),
        "heads": held_out_error(fit, calls, kind, here, folds_by(shapes.heads)),
        "lengths": held_out_error(fit, calls, kind, here, folds_by(shapes.keys)),
    }


def log_errors(fit: AttentionFit, calls: Calls, kind: str, here: Machine) -> Array:
    """Return the logarithm of true over predicted time for some calls of another collection."""
    shapes, seconds = calls
    some = np.random.default_rng(0).permutation(len(seconds))[:_JUDGED]
    left = np.log(seconds[some] / fit.seconds(shapes.take(some), kind, here))
    # Each collection counts as much as any other.
    return np.quantile(left, (np.arange(_JUDGED) + 0.5) / _JUDGED)


def interval(errors: list[Array]) -> list[float]:
    """Return the 90% interval of errors."""
    return [round(float(end), 5) for end in np.quantile(np.concatenate(errors), NINE_TENTHS)]


def spreads(
    errors: Mapping[Key, Array],
) -> tuple[dict[str, list[float]], list[dict[str, Any]]]:
    """Return the interval of each kind, and how much of each collection the others' one holds."""
    learned = {
        kind: interval([e for (_, _, of), e in errors.items() if of == kind]) for kind in KINDS
    }
    rows = []
    for (slug, framework, kind), own in errors.items():
        others = [e for (at, _, of), e in errors.items() if of == kind and at != slug]
        low, high = interval(others)
        rows.append(
            {
                "machine": slug, "framework": framework, "kind": kind,
                "median": round(float(np.median(own)), 4), "low": low, "high": high,
                "coverage_90": round(float(np.mean((low <= own) & (own <= high))), 4),
            }
        )  # fmt: skip
    return learned, rows


def markdown(record: Mapping[str, Any]) -> str:
    """Return the table of errors as pages show it: medians over GPUs of means over frameworks."""
    lines = [
        "| calls | formula | held-out calls | heads | lengths | another framework |",
        "|---|---|---|---|---|---|",
    ]
    words = {CONTEXT: "prompts (causal)", FULL: "encoders", DECODE: "decoding"}
    for kind, name in words.items():
        cells = []
        for error in ("formula", "rows", "heads", "lengths"):
            means = defaultdict(list)
            for row in record["collections"]:
                if row["kind"] == kind:
                    means[row["machine"]].append(row[error])
            cells.append(f"{np.median([np.mean(errors) for errors in means.values()]):.1%}")
        held = [r["coverage_90"] for r in record["another_framework"]["trees"] if r["kind"] == kind]
        lines.append(f"| {name} | {' | '.join(cells)} | {np.mean(held):.0%} |")
    return "\n".join(lines)


def main() -> None:
    """Fit all collections, judge them and write both files."""
    tables = [t for t in find_attention_tables() if t.slug in known_machines()]
    by_slug: dict[str, dict[str, dict[str, AttentionFit]]] = {}
    calls: dict[Key, Calls] = {}
    collections = []
    for slug in sorted({table.slug for table in tables}):
        here = known_machine(slug)
        own = [table for table in tables if table.slug == slug]
        by_slug[slug] = fit_tables(own, here)
        for table in own:
            key = slug, table.framework, table.kind
            calls[key] = read_calls(table)
            fit = by_slug[slug][table.framework][table.kind]
            row = {
                "machine": slug, "source": table.source, "kind": table.kind, "calls": fit.calls,
                **{k: round(v, 4) for k, v in within(fit, calls[key], table.kind, here).items()},
            }  # fmt: skip
            collections.append(row)
            print(row, flush=True)
    plain = {
        slug: {
            framework: {
                kind: replace(fit, forest=None).judged(
                    *calls[slug, framework, kind], kind, known_machine(slug)
                )
                for kind, fit in kinds.items()
            }
            for framework, kinds in fits.items()
        }
        for slug, fits in by_slug.items()
    }
    found: dict[str, dict[Key, Array]] = defaultdict(dict)
    for key, judge in calls.items():
        slug, framework, kind = key
        here = known_machine(slug)
        others = [
            name for name in FRAMEWORKS
            if name in by_slug[slug] and name != framework and kind in by_slug[slug][name]
        ]  # fmt: skip
        if others:
            found["trees"][key] = log_errors(by_slug[slug][others[0]][kind], judge, kind, here)
            found["constants"][key] = log_errors(plain[slug][others[0]][kind], judge, kind, here)
        origin = nearest_measured(here, [s for s in by_slug if s != slug])
        first = next(name for name in FRAMEWORKS if name in plain[origin])
        if kind in plain[origin][first]:
            found["generation"][key] = log_errors(plain[origin][first][kind], judge, kind, here)
    learned, judged = {}, {}
    for name, errors in found.items():
        learned[name], judged[name] = spreads(errors)
    _, package, _ = package_folders()
    record = {"source": package, "collections": collections, "another_framework": judged}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    shipped = {
        "source": package,
        "software": {name: learned[name] for name in ("trees", "constants")},
        "generation": learned["generation"],
        "machines": {slug: fits_to_json(fits) for slug, fits in plain.items()},
    }
    SHIPPED.write_text(json.dumps(shipped, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
