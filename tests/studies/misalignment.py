"""What does a misaligned N cost, and is that foreseen on GPUs that nothing was learned from?

    python -m tests.studies.misalignment

reads two sources. All other constants are those shipped for each GPU, which were fitted to aligned
shapes.

1. **Narrow.** ``aisimulate/small-n-bf16-vllm-0.25.csv`` has times of `y = x Wᵀ` at N from 1 to 32.
   The rows of N = 4 and N = 12 are not multiples of 16 bytes. For each generation the study tries
   values of the two constants ``fallback`` and ``fallback_split`` on some GPUs and some K at N = 4,
   and judges the best ones at all N, on the other GPUs and at all K.
2. **Wide.** The published recording of an H100 has cold times of cuBLAS in all layouts. The study
   tries values of the constant ``misalignment`` on bf16 GEMMs, and judges the best one on the other
   dtypes that Tensor Cores compute.

results/accuracy/misalignment.json has what was learned. For each GPU and N, and for each dtype and
alignment of the recording, it has the median factor between measured and predicted time, with the
price and without (``fallback`` = 0; ``misalignment`` = 0.3, which had been assumed before), and the
middle 90% of log(measured / predicted).
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from analysis.model.features import Inputs
from analysis.model.prior import GROUP, prior_without_tables
from analysis.model.query import Query
from analysis.recordings.load import load
from kernels.machine import known_machine
from kernels.problem import WIDE_BYTES, Gemm
from kernels.timemodel.constants import Constants
from kernels.timemodel.estimate import Array, priced_alignment
from tests.studies.evidence import DATA, ROOT
from tests.studies.shipping.learning import group_in

RECORD = ROOT / "results" / "accuracy" / "misalignment.json"
RECORDING = ROOT / "results" / "published" / "nvidia-h100-sxm"
WIDE_SLUG = "nvidia-h100-sxm"
ASSUMED = 0.3  # ``misalignment`` before it was measured
MISALIGNMENTS = np.arange(0.0, 1.55, 0.05)
LEARNED_ON = {
    "hopper": ("nvidia-h100-sxm",), "blackwell": ("nvidia-b200", "nvidia-b300"),
}  # fmt: skip
LEARNED_K = (1024, 4096)
LEARNED_N = 4
FALLBACKS = np.arange(0, 8.25, 0.25)


def log_errors(rows: pd.DataFrame, slug: str, fallback: float, split: float) -> Array:
    """log(measured / predicted) of one GPU's rows with a price of misalignment."""
    machine = known_machine(slug)
    constants: Constants = prior_without_tables(machine, GROUP).fit.constants
    constants = replace(constants, fallback=fallback, fallback_split=split)
    gemms = [Gemm(int(m), int(n), int(k), "bf16") for m, n, k in rows[["m", "n", "k"]].to_numpy()]
    inputs = Inputs.from_query(machine, Query.plain(gemms, "cublas", warm=True))
    return np.log(rows["time_us"].to_numpy() * 1e-6 / inputs.estimate(constants).time)


def learned(rows: pd.DataFrame, generation: str) -> dict[str, Any]:
    """The two constants with the smallest median error at N = 4 on the GPUs learned from."""
    seen = rows[(rows["n"] == LEARNED_N) & rows["k"].isin(LEARNED_K)]

    def error(fallback: float, split: float) -> float:
        parts = [
            log_errors(seen[seen["machine"] == slug], slug, fallback, split)
            for slug in LEARNED_ON[generation]
        ]
        return float(np.median(np.abs(np.concatenate(parts))))

    pairs = list(itertools.product(FALLBACKS.tolist(), (0.0, 1.0)))
    best = min(pairs, key=lambda pair: error(*pair))
    return {
        "fallback": best[0], "fallback_split": best[1], "learned_on": LEARNED_ON[generation],
        "learned_k": LEARNED_K, "learned_n": LEARNED_N, "median_factor": np.exp(error(*best)),
    }  # fmt: skip


def judged(rows: pd.DataFrame, slug: str, price: dict[str, Any]) -> list[dict[str, Any]]:
    """One GPU's errors by N; of a GPU that was learned from, only at the other K."""
    held_out = slug not in price["learned_on"]
    found = []
    for n, part in rows[rows["machine"] == slug].groupby("n"):
        if not held_out and n == LEARNED_N:
            part = part[~part["k"].isin(LEARNED_K)]
        errors = log_errors(part, slug, price["fallback"], price["fallback_split"])
        free = log_errors(part, slug, 0.0, 1.0)
        low, high = np.quantile(errors, [0.05, 0.95])
        found.append(
            {
                "machine": slug, "held_out": held_out, "n": int(n), "rows": len(part),
                "median_factor": float(np.exp(np.median(np.abs(errors)))),
                "low": float(low), "high": float(high),
                "median_factor_without": float(np.exp(np.median(np.abs(free)))),
            }
        )  # fmt: skip
    return found


def wide_rows() -> pd.DataFrame:
    """The recording's cold, dense, misaligned cuBLAS GEMMs, with their problem and alignment."""
    rows = load(RECORDING).ok
    plain = (rows["op"] == "gemm") & (rows["implementation"] == "cublas") & (rows["config"] == "")
    plain &= (rows["cache"] == "cold") & (rows["mode"] == "burst") & (rows["dtype"] != "fp32")
    rows = rows[plain & (rows["sweep"] != "confirm")].copy()
    fields = ["m", "n", "k", "dtype", "layout", "batch"]
    rows["problem"] = [
        Gemm(int(m), int(n), int(k), dtype, layout, int(batch))
        for m, n, k, dtype, layout, batch in rows[fields].to_numpy()
    ]
    rows["alignment"] = [priced_alignment(problem) for problem in rows["problem"]]
    return rows[rows["alignment"] < WIDE_BYTES]


def wide_log_errors(rows: pd.DataFrame, misalignment: float) -> Array:
    """log(measured / predicted) of the recording's rows, which have one dtype."""
    machine = known_machine(WIDE_SLUG)
    prior = prior_without_tables(machine, group_in(rows["dtype"].iloc[0]))
    constants: Constants = replace(prior.fit.constants, misalignment=misalignment)
    inputs = Inputs.from_query(machine, Query.plain(list(rows["problem"]), "cublas"))
    return np.log(rows["time_us"].to_numpy() * 1e-6 / inputs.estimate(constants).time)


def wide() -> dict[str, Any]:
    """What was learned on the recording's bf16 rows, and the errors of each dtype."""
    rows = wide_rows()
    seen = rows[rows["dtype"] == "bf16"]

    def error(misalignment: float) -> float:
        return float(np.median(np.abs(wide_log_errors(seen, misalignment))))

    best = min(MISALIGNMENTS.tolist(), key=error)
    judged_rows = []
    for (dtype, alignment), part in rows.groupby(["dtype", "alignment"]):
        errors, assumed = wide_log_errors(part, best), wide_log_errors(part, ASSUMED)
        low, high = np.quantile(errors, [0.05, 0.95])
        judged_rows.append(
            {
                "dtype": dtype, "alignment": int(alignment), "rows": len(part),
                "held_out": dtype != "bf16",
                "median_factor": float(np.exp(np.median(np.abs(errors)))),
                "low": float(low), "high": float(high),
                "median_factor_assumed": float(np.exp(np.median(np.abs(assumed)))),
            }
        )  # fmt: skip
    return {
        "source": "results/published/nvidia-h100-sxm, cublas, cold, all layouts",
        "misalignment": round(best, 2), "learned_on": "bf16",
        "learned_rows": len(seen), "median_factor": float(np.exp(error(best))),
        "judged": judged_rows,
    }  # fmt: skip


def wide_markdown(document: dict[str, Any]) -> str:
    """The table of wide GEMMs, as how-a-prediction-is-made.md has it."""
    lines = ["| dtype | rows begin at multiples of | GEMMs | assumed before | learned |"]
    lines.append("|---|---|---|---|---|")
    for row in document["wide"]["judged"]:
        learned = "" if row["held_out"] else ", learned on"
        lines.append(
            f"| {row['dtype']}{learned} | {row['alignment']} bytes | {row['rows']} | "
            f"{row['median_factor_assumed']:.2f} | {row['median_factor']:.2f} |"
        )
    return "\n".join(lines)


def markdown(document: dict[str, Any]) -> str:
    """The table of median factors, as how-a-prediction-is-made.md has it."""
    rows = {(row["machine"], row["n"]): row for row in document["judged"]}
    lines = [
        "| GPU | N = 4, without the price | with it | N = 12, without the price | with it |",
        "|---|---|---|---|---|",
    ]
    for slug in sorted({slug for slug, _ in rows}, key=lambda s: (not rows[s, 4]["held_out"], s)):
        cells = [
            f"{rows[slug, n][name]:.2f}"
            for n in (4, 12)
            for name in ("median_factor_without", "median_factor")
        ]
        name = slug.removeprefix("nvidia-")
        learned = "" if rows[slug, 4]["held_out"] else ", learned on its other K"
        lines.append(f"| {name}{learned} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Learn, judge and write."""
    rows = pd.read_csv(DATA / "aisimulate" / "small-n-bf16-vllm-0.25.csv")
    generations = {slug: known_machine(slug).generation for slug in rows["machine"].unique()}
    prices = {generation: learned(rows, generation) for generation in LEARNED_ON}
    document = {
        "source": "ai-dynamo/aisimulate, vLLM 0.25.0, bf16, y = x Wᵀ, warm",
        "prices": prices,
        "judged": [
            one
            for slug, generation in generations.items()
            for one in judged(rows, slug, prices[generation])
        ],
        "wide": wide(),
    }
    RECORD.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(prices, indent=1))
    print(pd.DataFrame(document["judged"]).round(2).to_string(index=False))
    print(markdown(document), wide_markdown(document), sep="\n\n")


if __name__ == "__main__":
    main()
