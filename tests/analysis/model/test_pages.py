"""Test that the tables in pages of analysis/ are those of the recorded studies."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from analysis.model.prior import floor_sentences
from kernels.timemodel.constants import default_constants
from tests.studies import attention, evidence, misalignment, own_gpu, reliability
from tests.support.published import ACCURACY as RECORDED_FIGURES

ROOT = Path(__file__).resolve().parents[3]
PREDICTION, ADVICE, ACCURACY = (
    (ROOT / "analysis" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("how-a-prediction-is-made", "how-advice-is-decided", "how-accurate-it-is")
)

KINDS = ("aligned", "aligned, few M", "vocabulary", "vocabulary, few M", "narrow", "narrow, few M")


def recorded(name: str) -> Any:
    return json.loads((RECORDED_FIGURES / name).read_text(encoding="utf-8"))


def coverage_table(rows: list[dict[str, Any]]) -> str:
    """Format the mean coverage over each GPU's collections; ``all`` excludes tables of small N."""
    by_kind: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by_kind[row["machine"]]["all"] += (
            [] if row["source"].startswith("small-n") else [row["coverage_90"]]
        )
        for kind, (share, count) in row["coverage_by_group"].items():
            if count >= 20:
                by_kind[row["machine"]][kind].append(share)
    lines = ["| GPU | all | " + " | ".join(KINDS) + " |", "|---|---|" + "---|" * len(KINDS)]
    for slug, kinds in by_kind.items():
        cells = [f"{np.mean(kinds[k]):.0%}" if kinds[k] else "–" for k in ("all", *KINDS)]
        lines.append(f"| {slug.removeprefix('nvidia-')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_accuracy_by_the_number_of_own_measurements() -> None:
    rows = evidence.recorded()
    assert evidence.markdown(rows) in PREDICTION
    assert floor_sentences()[0] in ACCURACY.replace("\n", " ")
    for slug, most in (("nvidia-rtx-4090", 0.065), ("nvidia-rtx-3090", 0.0755)):
        ten = {"machine": slug, "prior": "constants", "calibrated": 10}
        assert evidence.mean_of(rows, "mean", **ten) <= most
        assert evidence.mean_of(rows, "width", **ten) <= 1.6


def test_more_measurements_are_never_worse_than_fewer() -> None:
    """The error may rise by 0.3 points or by two standard errors of the mean over the draws."""
    rows = evidence.recorded()
    for slug, prior in {(row["machine"], row["prior"]) for row in rows}:
        before: tuple[float, float] | None = None
        for count in evidence.COUNTS:
            of = {"machine": slug, "prior": prior, "calibrated": count}
            means = [r["mean"] for r in rows if all(r[k] == v for k, v in of.items())]
            if not means:
                continue
            now = float(np.mean(means)), float(np.std(means) / max(len(means) - 1, 1) ** 0.5)
            if before is not None:
                allowed = max(0.003, 2 * float(np.hypot(now[1], before[1])))
                assert now[0] <= before[0] + allowed, (slug, prior, count)
            before = now


def test_coverage_by_kind_of_shape() -> None:
    rows = recorded("software.json")["model"]
    assert coverage_table(rows) in ACCURACY


def test_the_price_of_misalignment_is_the_recorded_one() -> None:
    document = recorded("misalignment.json")
    assert misalignment.markdown(document) in PREDICTION
    for generation, price in document["prices"].items():
        shipped = default_constants(generation, "bf16")
        assert (shipped.fallback, shipped.fallback_split) == (
            price["fallback"], price["fallback_split"],
        )  # fmt: skip
        assert default_constants(generation, "fp32").fallback == 0
    wide = document["wide"]
    assert misalignment.wide_markdown(document) in PREDICTION
    for generation in ("hopper", "blackwell"):  # Blackwell's is assumed
        assert default_constants(generation, "bf16").misalignment == wide["misalignment"]
    assert default_constants("hopper", "fp32").misalignment == 0
    others = [row for row in wide["judged"] if row["held_out"]]
    assert {row["dtype"] for row in others} == {"fp16", "tf32"}
    assert all(row["median_factor"] < 1.3 for row in others)
    held_out = [r for r in document["judged"] if r["held_out"] and r["n"] == misalignment.LEARNED_N]
    assert len(held_out) == 3
    assert all(row["median_factor"] < 1.3 for row in held_out)


def test_errors_on_our_own_gpu() -> None:
    for document in recorded("own-gpu.json").values():
        assert own_gpu.calibrated_markdown(document) in ACCURACY
        assert own_gpu.shipped_markdown(document) in ACCURACY


def test_stated_probabilities() -> None:
    assert reliability.markdown(recorded("reliability.json")) in ADVICE


def test_errors_of_attention() -> None:
    page = (ROOT / "analysis" / "auditing-a-model.md").read_text(encoding="utf-8")
    assert attention.markdown(recorded("attention.json")) in page


def test_gains_of_a_padded_vocabulary() -> None:
    page = (ROOT / "analysis" / "auditing-a-model.md").read_text(encoding="utf-8")
    lines = (RECORDED_FIGURES / "vocabulary.jsonl").read_text(encoding="utf-8").splitlines()
    runs = {(run["machine"], run["runtime"]): run for run in map(json.loads, lines)}

    def signed(share: float) -> str:
        return f"{share:+.1%}".replace("-", "−")

    for name, slug in (("A100 SXM", "nvidia-a100-sxm-80gb"), ("H100 SXM", "nvidia-h100-sxm")):
        cells = []
        for runtime in ("eager", "compile"):
            lever = runs[slug, runtime]["lever"]
            ends = f"{signed(lever['lo'])} to {signed(lever['hi'])}"
            cells.append(f"{signed(lever['gain'])} ({ends})")
        share = f"{runs[slug, 'compile']['head_share']:.0%}"
        assert f"| {name} | {' | '.join(cells)} | {share} |" in page
