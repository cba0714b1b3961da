"""Is an audit right? Predicted and real steps of two models on this machine's CPU.

    python -m tests.studies.audit_steps [--budget 60s] [--rounds 12] [--write FILE]

1. The products of a training step of ResNet-50 and of a small GPT-2 are timed by ``audit
   --measure``, each alone, and their total is compared with what PyTorch's profiler says that they
   take within real steps.
2. Three levers (a vocabulary, a hidden size, a first convolution's channels): what the audit says
   that the products and the step gain by its best value, and what real steps gain, of which one
   with and one without the change take turns.

Prints a line for each and ``--write`` appends it as JSON. Both are of one machine at one time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from sweeps.capture.known import KNOWN
from sweeps.folding.health import health_sentence
from sweeps.store import read_run

ROOT = Path(__file__).resolve().parents[2]

GPT2 = {"hidden": 252, "heads": 4, "layers": 4, "vocab": 8003}
MODELS: dict[str, dict[str, int]] = {"gpt2": GPT2, "resnet-50": {}}
BATCH, LENGTH = {"gpt2": 2, "resnet-50": 2}, 128
VARIED = {"gpt2": "vocab,hidden", "resnet-50": "stem"}
_PRODUCTS = ("mm", "addmm", "bmm", "convolution", "convolution_backward", "mkldnn")


def audited(model: str, results: Path, budget: str) -> dict[str, Any]:
    """The audit of a model, its products measured."""
    sizes = [word for name, size in MODELS[model].items() for word in ("--arg", f"{name}={size}")]
    command = [sys.executable, "-m", "analysis", "audit", model, *sizes, "--dtype", "fp32",
               "--batch", str(BATCH[model]), "--seq", str(LENGTH), "--measure", "--budget", budget,
               "--optimizer", "none", "--device", "cpu", "--vary", VARIED[model],
               "--results",
               str(results), "--json"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def training_step(model: str, changes: dict[str, int]) -> Callable[[], None]:
    """A call that computes a loss and all gradients once, without an optimizer."""
    torch.manual_seed(0)
    net = KNOWN[model].build(**{**KNOWN[model].sizes, **MODELS[model], **changes})
    if model == "gpt2":
        inputs = torch.randint(0, 1000, (BATCH[model], LENGTH))
    else:
        inputs = torch.randn(BATCH[model], 3, 224, 224).to(memory_format=torch.channels_last)
        net = net.to(memory_format=torch.channels_last)

    def step() -> None:
        net.zero_grad(set_to_none=True)
        out = net(inputs)
        if model == "gpt2":
            loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), inputs.flatten())
        else:
            loss = out.mean()
        loss.backward()

    return step


def profiled_products(step: Callable[[], None], rounds: int) -> float:
    """Microseconds of a step's products, as PyTorch's profiler sees them, the median of rounds."""
    totals = []
    for _ in range(rounds):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
        totals.append(sum(
            event.self_cpu_time_total for event in profile.key_averages()
            if any(word in event.key.split("::")[-1].split("_") for word in _PRODUCTS)
        ))  # fmt: skip
    return median(totals)


def real_gain(one: Callable[[], None], other: Callable[[], None], rounds: int) -> float:
    """What the second step gains on the first; they take turns."""
    ratios = []
    for call in (one, other) * 3:
        call()
    for _ in range(4 * rounds):
        times = []
        for call in (one, other, other, one):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        ratios.append((times[0] + times[3]) / (times[1] + times[2]))
    return median(ratios) - 1


def main(
    budget: Annotated[str, typer.Option(help="Measuring time of each audit.")] = "60s",
    rounds: Annotated[int, typer.Option(min=1, help="Steps that are profiled.")] = 12,
    write: Annotated[Path | None, typer.Option(help="Append lines of JSON to it.")] = None,
) -> None:
    """Compare audits with real steps."""
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder)
        for model in MODELS:
            document = audited(model, results, budget)
            products = sum(
                p["count"] * p["time_us"] for p in document["products"] if p["role"] != "attention"
            )
            real = profiled_products(training_step(model, {}), rounds)
            run = read_run(results / document["machine"])
            lines.append({
                "what": "products", "model": model, "predicted_us": products, "profiled_us": real,
                "ratio": products / real, "health": health_sentence(run),
                "machine": document["machine"], "torch": torch.__version__,
            })  # fmt: skip
            for lever in document["levers"]:
                if isinstance(lever["to"], dict):
                    continue
                change = {lever["dimension"]: lever["to"]}
                gain = real_gain(training_step(model, {}), training_step(model, change), rounds)
                lines.append({
                    "what": "lever", "model": model, **{k: lever[k] for k in (
                        "dimension", "from", "to", "gain", "lo", "hi", "products_gain", "verdict",
                        "evidence",
                    )}, "real_gain": gain,
                })  # fmt: skip
    for line in lines:
        print(json.dumps(line))
    if write is not None:
        with write.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in lines)


if __name__ == "__main__":
    typer.run(main)
