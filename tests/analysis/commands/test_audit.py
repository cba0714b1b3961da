"""Tests of the command ``audit``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from analysis.advice.verdict import Gain
from analysis.commands.audit import measured_audit
from kernels.problem import Gemm
from sweeps.running.request import Request
from tests.support.command_line import analysis

GPT2 = ("audit", "gpt2", "--machine", "nvidia-h100-sxm", "--seq", "256")


def test_a_document_has_what_scripts_lean_on(tmp_path: Path) -> None:
    written = ("--csv", tmp_path / "a.csv", "--markdown", tmp_path / "a.md", "--plots", tmp_path)
    result = analysis(*GPT2, "--vary", "vocab,hidden", "--json", *written)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert {
        "machine", "mode", "assumptions", "products", "other", "step_us", "lo_us", "hi_us", "levers"
    } <= document.keys()  # fmt: skip
    for product in document["products"]:
        assert {
            "role", "path", "pass", "count", "problem", "flops", "time_us", "lo_us", "hi_us",
            "share", "basis",
        } <= product.keys()  # fmt: skip
    assert {lever["dimension"] for lever in document["levers"]} == {"vocab", "hidden"}
    for lever in document["levers"]:
        assert {
            "dimension", "from", "to", "gain", "lo", "hi", "parameters", "flops", "verdict",
            "reason",
        } <= lever.keys()  # fmt: skip
    total = sum(p["count"] * p["time_us"] for p in document["products"])
    total += sum(other["time_us"] for other in document["other"])
    assert document["step_us"] == pytest.approx(total)
    assert len(pd.read_csv(tmp_path / "a.csv")) == len(document["products"])
    assert (
        (tmp_path / "a.md")
        .read_text(encoding="utf-8")
        .startswith("## gpt2, train, batch 1 on nvidia-h100-sxm")
    )
    drawn = {path.name for path in tmp_path.iterdir()}
    assert {"audit-step.png", "audit-step.svg", "audit-levers.png", "audit-levers.svg"} <= drawn


def test_machines_stand_side_by_side() -> None:
    result = analysis(
        "audit", "llama-2-7b", "--machine", "nvidia-h100-sxm,nvidia-b200", "--mode", "decode",
        "--batch", "32", "--seq", "1024", "--tp", "2", "--vary", "vocab",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    for machine in ("nvidia-h100-sxm", "nvidia-b200"):
        title = f"llama-2-7b, decode, batch 32, after 1,024 tokens on {machine}"
        assert f"{title}\nStep: " in result.stdout
    assert "communication is not counted" in result.stdout
    assert ["nvidia-h100-sxm", "nvidia-b200"] in [
        line.split() for line in result.stdout.splitlines()
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("audit", "gpt5"), "did you mean 'gpt2'"),
        ((*GPT2, "--mode", "training"), "--mode is 'training'; did you mean 'train'"),
        ((*GPT2, "--fuse", "kv"), "--fuse is 'kv'; did you mean 'qkv'"),
        ((*GPT2, "--tp", "5"), "--tp 5 does not divide"),
        ((*GPT2, "--vary", "depth"), "no size 'depth' to vary"),
        ((*GPT2, "--arg", "hidden"), "--arg is 'hidden'; give a size such as hidden=4096"),
        ((*GPT2, "--arg", "=768"), "--arg is '=768'; give a size such as hidden=4096"),
        ((*GPT2, "--attention", "150%"), "--attention takes a share"),
        ((*GPT2, "--attention", "0%"), "above 0%"),
        ((*GPT2, "--autocast", "--dtype", "fp32"), "--autocast casts to fp16 or bf16"),
        ((*GPT2, "--mode", "prefill", "--recompute"), "--recompute is only for training"),
        ((*GPT2, "--causal", "quarter"), "--causal is 'quarter'; use one of half, full"),
        ((*GPT2, "--try", "hidden"), "--try is 'hidden'; give sizes such as hidden=4096,4224"),
        ((*GPT2, "--try", "widht=4"), "gpt2 has no dimension 'widht'"),
        ((*GPT2, "--try", "hidden=1024", "--vary", "heads"), "--vary limits a search"),
        ((*GPT2, "--try", "hidden=1024", "--multiple", "64"), "--multiple limits a search"),
        (
            (
                *("audit", "torch.nn:Identity", "--machine", "h100-sxm"),
                *("--input", "x[8,8]", "--try", "width=4"),
            ),
            "torch.nn:Identity has no dimension that --try could change; leave --try out.",
        ),
        ((*GPT2, "--try", f"hidden={','.join(map(str, range(1, 70)))}"), "more than 64"),
        ((*GPT2, "--attention-kernel", "fa3"), "no attention times of 'fa3' on nvidia-h100-sxm"),
        (
            (*GPT2, "--dtype", "fp32", "--attention-kernel", "vllm"),
            "attention in fp32 was not measured on nvidia-h100-sxm; leave --attention-kernel out",
        ),
        ((*GPT2, "--attention", "50%", "--attention-kernel", "vllm"), "give only one of them"),
        ((*GPT2, "--skew", "0.5"), "--skew is 0.5; give 1"),
        ((*GPT2, "--skew", "nan"), "--skew is nan; give 1"),
        ((*GPT2, "--budget", "5s"), "--budget needs --measure"),
        ((*GPT2, "--csv", "/no/such/folder/a.csv"), "is not a folder"),
        ((*GPT2, "--plots", "/dev/null"), "/dev/null exists and is not a folder"),
        ((*GPT2, "--measure", "--budget", "5x"), "5x"),
        (("audit", "gpt2", "--machine", "nvidia-v100-sxm2-16gb"), "does not compute bf16"),
        (("audit", "gpt2", "--machine", "h200,"), "--machine has an empty name in 'h200,'"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], words: str) -> None:
    result = analysis(*arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout


def test_given_sizes_are_compared_in_one_table() -> None:
    result = analysis(
        *GPT2, "--try", "hidden=768,1024", "--try", "heads=12,16", "--try", "heads=13", "--json"
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    tried = [(lever["dimension"], lever["to"]) for lever in document["levers"]]
    assert ("heads", 16) in tried
    assert ("hidden", 1024) not in tried  # 12 heads do not divide 1024
    assert ("hidden and heads", {"hidden": 1024, "heads": 16}) in tried
    assert set(document["refused"]) == {
        "heads 12 → 13", "hidden 768 → 1024", "hidden 768 → 1024, heads 12 → 13",
    }  # fmt: skip
    words = analysis(*GPT2, "--try", "hidden=1024", "--try", "heads=13,16").stdout
    assert "hidden 768 → 1024, heads 12 → 16" in words
    assert "hidden 768 → 1024, heads 12 → 13 cannot be judged" in words


def test_what_does_not_fit_comes_first(tmp_path: Path) -> None:
    result = analysis(
        "audit", "llama-3-8b", "--machine", "nvidia-h100-sxm", "--batch", "4", "--seq", "16384",
        "--vary", "vocab", "--arg", "layers=8", "--results", tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    _, first, _, _, warning, *_ = result.stdout.splitlines()
    assert first.startswith("Memory: ")
    assert "of 80 GB; THE STEP DOES NOT FIT. It fits with --batch " in first
    assert warning == (
        "Warning: the model has 8,192 positions, but each sequence has 16,384 tokens; give a "
        "smaller --seq."
    )


def test_attention_is_named(tmp_path: Path) -> None:
    result = analysis(
        *GPT2, "--vary", "vocab", "--attention-kernel", "trtllm", "--results", tmp_path
    )
    assert "attention: trtllm's attention, constants from public tables" in result.stderr
    assert "other frameworks" not in result.stderr
    result = analysis(*GPT2, "--vary", "vocab", "--results", tmp_path)
    assert "attention: vllm's attention" in result.stderr
    assert "an interval that covers other frameworks" in result.stderr


def test_the_best_of_the_given_sizes_is_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The levers of ``--try`` are in the user's order, which need not begin with the best one."""
    original = Gemm(256, 1000, 1024, "fp32")

    def lever(width: int, gain: float) -> Any:
        changed = replace(original, n=width)
        return SimpleNamespace(
            pairs=((original, changed),), expected_gain=gain, gain=Gain(gain, gain, gain)
        )

    levers = [lever(n, gain) for n, gain in ((900, -0.3), (950, -0.2), (990, -0.1), (1024, 0.2))]
    audited: Any = SimpleNamespace(account=SimpleNamespace(rows=[]), levers=levers)
    timed: list[Gemm] = []
    confirmed: list[Any] = []

    def explore(_request: object, cases: list[tuple[Gemm, str]], *_: object, **__: object) -> Any:
        timed.extend(problem for problem, _ in cases)
        planned = [
            SimpleNamespace(case=SimpleNamespace(problem=problem, implementation="mkl"))
            for problem in (original, *timed)
        ]
        return SimpleNamespace(folder=Path(), planned=planned)

    basis = SimpleNamespace(library=lambda _problem: "mkl")
    monkeypatch.setattr("analysis.commands.confirm.basis_here", lambda *_: basis)
    monkeypatch.setattr("analysis.commands.confirm.basis_after", lambda *_: basis)
    monkeypatch.setattr("sweeps.running.confirming.explore", explore)
    monkeypatch.setattr(
        "sweeps.running.confirming.confirm_choices",
        lambda _run, pairs, _note: confirmed.extend(pairs),
    )
    measured_audit(lambda _basis: [audited], None, Request(results=Path(), device="cpu"))
    assert [problem.n for problem in timed] == [1024, 990, 950]
    assert confirmed == [((original, "mkl"), (replace(original, n=1024), "mkl"))]
