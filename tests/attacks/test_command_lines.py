"""Command lines of words that mean something, often in the wrong place, and of others."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from tests.support.command_line import ANALYSIS, KERNELS, SWEEPS, said
from tests.support.damage import CELLS, small_recording
from tests.support.synthetic import H100
from tests.support.tiers import quick_and_long

LINES, CHUNKS, QUICK = 40, 125, 1

NOT_HERE = {
    "record", "import", "plot", "report", "doctor", "profile", "check", "compile", "validate",
}  # fmt: skip
"""Commands that measure, draw or read everything there is, whatever the words are."""

WORDS = (
    *(cell for cell in CELLS if "\x00" not in cell),
    "nvidia-h100-sxm", "h100", "nvidia-b200,nvidia-h100-sxm", "fp32", "bf16", "fp8", "nt", "nhwc",
    "4096,4096,4096,bf16", "4096,50257,768,bf16,nn,8", "²,2,2,bf16", "64,64,64", ",,,",
    "1,1,1,bf16", "99999999999,99999999999,99999999999,bf16", "2000000000,1,1,bf16",
    "2147483647,2147483647,2147483647,fp32", "1,1,1,bf16,nt,2000000000",
    "32,64,56,56,64,3,3,1,1,1,1,fp16", "1,1,1,1,1,9,9,1,0,1,1,bf16",
    "1,3,8,8,4,3,3,0,0,0,2,bf16", "10m", "0s", "9" * 400 + "m", "1e3s", "12.5%", "101%", "nan%",
    "-1%", "square", "alignment,square", "M", "N,K", "64", "hidden=4096", "vocab",
    "int64[8,2048]", "train", "decode", "qkv", "gpt2", "no-such-model", "math:sqrt", "1/2", "3/2",
    "a/b", "/", ".", "/dev/null", "/no/such/place", "é", "--", "-", "a" * 5000, "cpu", "gpu",
)  # fmt: skip


def drawn(app: typer.Typer, draw: random.Random) -> list[str]:
    """A command and some of its options, with words for those that take one."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    name = draw.choice(sorted(commands.keys() - NOT_HERE))
    line = [name]
    for parameter in commands[name].params:
        takes = 0.7 if not getattr(parameter, "opts", [""])[0].startswith("-") else 0.3
        if parameter.name in ("help", "measure", "results") or draw.random() > takes:
            continue
        if parameter.param_type_name == "argument":
            line.append(_model(draw) if name == "audit" else draw.choice(WORDS))
        elif parameter.is_flag:
            line.append(parameter.opts[0])
        else:
            line += [parameter.opts[0], draw.choice(WORDS)]
    if name == "run":  # with names that no sweep has, so that nothing is measured
        line += ["no-such-sweep", "--device", "cpu"]
    elif draw.random() < 0.05:
        line.append(draw.choice(["--no-such-option", *WORDS]))
    return line


def _model(draw: random.Random) -> str:
    """Seldom one that there is, which takes seconds to capture."""
    return "gpt2" if draw.random() < 0.02 else draw.choice([w for w in WORDS if w != "gpt2"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "chunk",
    quick_and_long(range(CHUNKS), QUICK),
)
def test_every_command_line_gets_an_answer_or_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.chdir(tmp_path)
    small_recording(tmp_path / "results" / H100.slug)
    draw = random.Random(chunk)
    faults = []
    for _ in range(LINES):
        app = draw.choice([ANALYSIS, ANALYSIS, SWEEPS, KERNELS])
        line = drawn(app, draw)
        takes_results = line[0] not in ("list", "show")
        results = ["--results", str(tmp_path / "results")] if takes_results else []
        found = said(app, line[0], *results, *line[1:]).faults
        # Any word may name the file that a command writes, and it says that name.
        if found := [fault for fault in found if fault not in line]:
            faults.append((line, found))
    assert not faults
