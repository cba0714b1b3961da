"""What others' tables are worth to a machine that was measured little; over an hour on one core.

    python -m tests.studies.prior_accuracy [--machine SLUG ...]

plays six GPUs by vLLM's collection of each, which no prior has seen; on top of their other
collections and all of their siblings', and of their own alone. Three are played by their own table
with siblings' as priors. Each line of tests/recordings/prior.jsonl is one validation; those that
are there are not made again.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from analysis.recordings.public import read_source
from analysis.recordings.tables import Table, choose_tables, find_tables
from analysis.validation.prior import named_collections, validate_with_prior
from kernels.machine import known_machine, known_machines

ROOT = Path(__file__).resolve().parents[2]

RECORD = ROOT / "tests" / "recordings" / "prior.jsonl"
GPUS = {
    "nvidia-h100-sxm": ("bf16", "fp8"), "nvidia-h200": ("bf16", "fp8"),
    "nvidia-b200": ("bf16", "fp8"), "nvidia-a100-sxm-80gb": ("bf16",),
    "nvidia-l40s": ("bf16", "fp8"), "nvidia-rtx-pro-6000": ("bf16", "fp8"),
}  # fmt: skip
SIBLINGS = {
    "nvidia-h100-sxm": ("nvidia-h200",), "nvidia-h200": ("nvidia-h100-sxm",),
    "nvidia-b200": ("nvidia-gb200", "nvidia-gb300", "nvidia-b300"),
}  # fmt: skip
COUNTS = (0, 256, 2048)


def cases(tables: list[Table]) -> Iterator[dict[str, Any]]:
    """What is judged, in the order of its worth; ``prior`` is empty for none."""
    by_vllm = {t.slug: t for t in tables if t.framework.lower() == "vllm"}
    chosen = choose_tables(tables)
    near = {slug: ",".join([slug, *SIBLINGS.get(slug, ())]) for slug in GPUS}
    for slug, count in itertools.product(GPUS, COUNTS):
        yield case(by_vllm[slug], near[slug], "bf16", "rows", count)
    # A100's own table is SGLang's: TensorRT-LLM's is other software there, too.
    a100 = "nvidia-a100-sxm-80gb"
    other = next(t for t in tables if t.slug == a100 and t.framework.lower() == "trtllm")
    for count in COUNTS:
        yield case(other, a100, "bf16", "rows", count)
    for slug, count in itertools.product(SIBLINGS, COUNTS):
        yield case(chosen[slug], ",".join(SIBLINGS[slug]), "bf16", "rows", count)
    for slug, count in itertools.product(SIBLINGS, COUNTS[1:]):
        yield case(by_vllm[slug], slug, "bf16", "rows", count)
    for (slug, dtypes), holdout in itertools.product(GPUS.items(), ("rows", "levels")):
        for dtype, count in itertools.product(dtypes, COUNTS):
            yield case(by_vllm[slug], near[slug], dtype, holdout, count)
    for slug, count in itertools.product(GPUS, COUNTS[1:]):
        yield case(by_vllm[slug], "", "bf16", "rows", count)


def case(table: Table, prior: str, dtype: str, holdout: str, count: int) -> dict[str, Any]:
    """One validation's settings."""
    return {
        "machine": table.slug, "judged": table.source, "path": table.path, "named": prior,
        "dtype": dtype, "holdout": holdout, "calibrated": count,
    }  # fmt: skip


def judged(one: dict[str, Any]) -> dict[str, Any]:
    """The record of one validation."""
    machine = known_machine(one["machine"])
    source = read_source(one["path"], machine, one["dtype"])
    named = []
    if one["named"]:
        named = named_collections(one["named"], one["path"], machine, one["dtype"])
    found = validate_with_prior(
        source, machine, named, one["calibrated"], holdout=one["holdout"]
    ).to_json()
    kept = ("rows", "median", "mean", "p95", "coverage_90", "prior", "weights")
    return {k: v for k, v in one.items() if k != "path"} | {name: found[name] for name in kept}


def main() -> None:
    """Judge what the record lacks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--machine", action="append", choices=list(GPUS))
    wanted = parser.parse_args().machine or list(GPUS)
    tables = [t for t in find_tables() if t.rows and t.slug in known_machines()]
    settings = ("machine", "judged", "named", "dtype", "holdout", "calibrated")
    for one in cases(tables):
        lines = RECORD.read_text(encoding="utf-8").splitlines() if RECORD.exists() else []
        done = [tuple(json.loads(line)[name] for name in settings) for line in lines]
        if one["machine"] in wanted and tuple(one[name] for name in settings) not in done:
            with RECORD.open("a", encoding="utf-8") as record:
                record.write(json.dumps(judged(one), allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
