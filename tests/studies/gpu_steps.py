"""Is an audit right on a GPU? Predicted and real steps of known models.

    python -m tests.studies.gpu_steps measure --write FILE [--traces DIR] [--only gpt2]
    python -m tests.studies.gpu_steps judge FILE [--traces DIR] [--write RECORD]

``measure`` needs a GPU. It runs real steps of each case of :data:`CASES` with random weights and
tokens: forward pass, loss, backward pass and a fused AdamW, or only the forward pass if the case is
a prefill. If the case has a change, blocks of steps with and without it take turns, so that the
clock's drift affects both alike. Each block is timed with the GPU idle before and after it.

``judge`` needs no GPU. It audits each measured case from the published recording and the shipped
constants, neither of which has seen a step, and the shares of the bandwidth, which were learned
from traces of these steps. It records predicted next to real times, gains and memory. If a case was
traced, the kernels' times are added up by the kind of the operation that launched them: matrix
operations, attention, or a kind of other operations. The shares of the bandwidth that these kinds
reach are fitted to all models but one, and judged on that one. ``FILE`` may also be an earlier
record, which already has the times of its traces.
"""

from __future__ import annotations

import gc
import gzip
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch.nn import functional

from analysis.audit.audit import Audit, LeverSearch, audit
from analysis.audit.bandwidth import reached_bandwidth
from analysis.audit.runtime import Runtime
from analysis.model.basis import Basis, find_basis
from kernels.common.program import RESULTS
from kernels.device import select_device, software
from sweeps.capture.capture import capture
from sweeps.capture.known import IMAGES, KNOWN, LanguageModel
from sweeps.capture.sources import find_source
from sweeps.capture.step import IMAGE_SIZE, PREFILL, TRAIN, ModelStep
from sweeps.capture.traffic import ELEMENTWISE, kind_of_name, kind_with_order
from sweeps.timing.profiler_trace import profile_document

WARM_UPS = 3
BLOCK = 3
"""Steps in one timed block."""
ROUNDS = 6
"""Rounds of four blocks: without, with, with and without the change."""


@dataclass(frozen=True)
class StepCase:
    """A step of a known model in bf16, and a change of its sizes."""

    model: str
    batch: int
    seq: int = 1024
    mode: str = TRAIN
    runtime: str = "eager"
    change: dict[str, int] = field(default_factory=dict)
    loss_chunks: int = 1
    """Parts of the tokens, each of which computes its head and loss and their gradients at once."""


CASES = (
    StepCase("gpt2", 12, change={"vocab": 50304}),
    StepCase("gpt2", 12, loss_chunks=8),
    StepCase("gpt2-medium", 8, change={"vocab": 50304}),
    StepCase("gpt2-medium", 8, loss_chunks=8),
    StepCase("gpt2-large", 4, change={"vocab": 50304}),
    StepCase("gpt2-xl", 8, change={"vocab": 50304}),
    StepCase("gpt2-xl", 8, change={"heads": 20}),
    StepCase("gpt2-xl", 8, change={"hidden": 1536, "heads": 24}),
    StepCase("llama-2-7b", 4, 2048, PREFILL, change={"ffn": 10752}),
    StepCase("llama-3-8b", 1, 2048, PREFILL),
    StepCase("resnet-50", 64, 0, change={"stem": 72}),
    StepCase("unet", 8, 0),
    StepCase("gpt2", 12, runtime="compile", change={"vocab": 50304}),
)

LEAST_WAIT = 1.2
"""Smallest ratio of a step's time to that of its kernels at which the host limits the step."""
LEAST_MS = 0.1
"""Shortest time of a kind of operations in a step that counts towards its share."""

MATRIX, ATTENTION, OPTIMIZER = "matrix operations", "attention", "optimizer (adamw)"
_SPECIAL_KINDS = (
    (ATTENTION, r"attention"),
    (MATRIX, r"::(mm|addmm|bmm|cudnn_convolution|convolution_backward)"),
    (OPTIMIZER, r"adam"),
    ("fused", r"^triton"),
)
"""Kinds of launching operations that :mod:`sweeps.capture.traffic` does not know, with patterns."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def real_step(case: StepCase, changes: dict[str, int]) -> Callable[[], None]:
    """A call that runs one step without waiting for the GPU."""
    known = KNOWN[case.model]
    torch.manual_seed(0)
    sizes = {**known.sizes, **changes}
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            net = known.build(**sizes)
            if known.takes == IMAGES:
                inputs = torch.randn(case.batch, 3, IMAGE_SIZE, IMAGE_SIZE)
                net, inputs = (x.to(memory_format=torch.channels_last) for x in (net, inputs))
            else:
                inputs = torch.randint(0, sizes["vocab"], (case.batch, case.seq))
    finally:
        torch.set_default_dtype(torch.float32)
    is_language_model = known.takes != IMAGES

    def loss() -> torch.Tensor:
        out = net(inputs)
        if is_language_model:
            return functional.cross_entropy(out.flatten(0, -2).float(), inputs.flatten())
        return out.float().mean()

    if case.mode == PREFILL:
        net.eval()

        def prefill() -> None:
            with torch.no_grad():
                net(inputs)

        return prefill
    computed = torch.compile(loss, dynamic=False) if case.runtime == "compile" else loss
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        if case.loss_chunks > 1:
            backward_in_chunks(net, inputs, case.loss_chunks)
        else:
            computed().backward()
        optimizer.step()

    return train


def backward_in_chunks(net: LanguageModel, tokens: torch.Tensor, chunks: int) -> None:
    """Run the forward and backward pass with a head and a loss in chunks of tokens.

    The gradients of a chunk are computed before its logits are freed, and the next chunk's follow
    (Hsu et al. 2024, arXiv:2410.10989).
    """
    hidden = net.hidden_states(tokens).flatten(0, -2)
    targets = tokens.flatten()
    head_input = hidden.detach().requires_grad_()
    for part, expected in zip(head_input.chunk(chunks), targets.chunk(chunks), strict=True):
        logits = net.head(part).float()
        loss = functional.cross_entropy(logits, expected, reduction="sum") / len(targets)
        loss.backward()
    hidden.backward(head_input.grad)


def block_ms(step: Callable[[], None]) -> float:
    """Milliseconds of one step, as the mean over a block."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(BLOCK):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / BLOCK * 1e3


def traced(step: Callable[[], None], path: Path) -> None:
    """Write PyTorch's trace of one step, with input shapes."""

    def whole_step() -> None:
        step()
        torch.cuda.synchronize()

    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    document = profile_document(whole_step, kinds)
    kept = {key: document[key] for key in ("schemaVersion", "deviceProperties", "record_shapes",
                                           "traceEvents") if key in document}  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(kept).encode(), mtime=0))


def measured(case: StepCase, trace: Path | None) -> dict[str, Any]:
    """The times of a case's steps, and the largest memory of a step without the change."""
    begin = time.perf_counter()
    base = real_step(case, {})
    for _ in range(WARM_UPS):
        base()
    torch.cuda.synchronize()
    line: dict[str, Any] = {
        **asdict(case),
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9,
    }
    changed = real_step(case, case.change) if case.change else base
    for _ in range(WARM_UPS):
        changed()
    times: dict[str, list[float]] = {"base": [], "changed": []}
    ratios = []
    for _ in range(ROUNDS):
        blocks = [block_ms(step) for step in (base, changed, changed, base)]
        times["base"] += blocks[0], blocks[3]
        times["changed"] += blocks[1:3]
        ratios.append((blocks[0] + blocks[3]) / (blocks[1] + blocks[2]))
    line["step_ms"] = times["base"]
    if case.change:
        line |= {"changed_ms": times["changed"], "gains": [ratio - 1 for ratio in ratios]}
    if trace is not None:
        traced(base, trace)
    line["took_s"] = time.perf_counter() - begin
    return line


@app.command()
def measure(
    write: Annotated[Path, typer.Option(help="Append one line of JSON for each case.")],
    traces: Annotated[Path | None, typer.Option(help="Folder for traces of a step.")] = None,
    only: Annotated[str, typer.Option(help="Models to run, separated by commas.")] = "",
    runtime: Annotated[str, typer.Option(help="Run only cases of this runtime.")] = "",
) -> None:
    """Time real steps on this machine's GPU."""
    device = select_device("gpu")
    for case in CASES:
        is_left_out = only and case.model not in only.split(",")
        if is_left_out or (runtime and case.runtime != runtime):
            continue
        trace = trace_path(case, traces)
        if trace is not None and trace.exists():
            trace = None
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            line = measured(case, trace)
            gain = f", gain {median(line['gains']):+.2%}" if "gains" in line else ""
            print(f"{case}: {median(line['step_ms']):.2f} ms{gain}", flush=True)
        except Exception as error:  # a failure of one case must not cost the others
            line = {**asdict(case), "error": f"{type(error).__name__}: {str(error)[:300]}"}
            print(f"{case}: {line['error']}", flush=True)
        line |= {"machine": device.machine.slug, "software": software(device),
                 "date": datetime.now(UTC).date().isoformat()}  # fmt: skip
        with write.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")


def trace_path(case: StepCase, traces: Path | None) -> Path | None:
    """Path of a case's trace; None if it has none, as a step with a loss in chunks."""
    if traces is None or case.loss_chunks > 1:
        return None
    return traces / f"{case.model}-{case.runtime}.json.gz"


def predicted(case: StepCase, basis: Basis) -> Audit:
    """Audit a case and its change."""
    source = find_source(case.model)
    step = ModelStep(case.mode, case.batch, case.seq or ModelStep.seq)
    # Without a change, the value of a size is tried that the model has anyway.
    changes = case.change or dict([next(iter(source.sizes.items()))])
    search = LeverSearch(tries={name: [value] for name, value in changes.items()})
    runtime = Runtime(kind=case.runtime, loss_chunks=case.loss_chunks)
    (result,) = audit(source, step, runtime, [basis], search)
    return result


def captured_operations(case: StepCase) -> int:
    """Number of operations that an eager step launches, without the optimizer."""
    step = ModelStep(case.mode, case.batch, case.seq or ModelStep.seq)
    return capture(find_source(case.model), step).operations


def predicted_by_kind(result: Audit) -> dict[str, float]:
    """Predicted times in ms by kind of operation."""
    times = {other.what: other.time_us / 1e3 for other in result.account.other}
    for line in result.account.counted:
        kind = ATTENTION if line.product.work.op == "attention" else MATRIX
        times[kind] = times.get(kind, 0.0) + line.total_us / 1e3
    return times


def traced_kinds(path: Path) -> dict[str, Any]:
    """Sum up the kernels of a trace.

    Returns:
        ``ms`` maps each kind of operation to the time of its kernels in ms. ``kernels`` is their
        number, and ``span_ms`` the time from the first kernel's begin to the last one's end.
    """
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    operations = {
        event["args"]["External id"]: event for event in events if event.get("cat") == "cpu_op"
    }
    times: dict[str, float] = {}
    ends = []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        # Kernels without an operation are the profiler's dummy launches.
        operation = operations.get(event["args"].get("External id"))
        if operation is None:
            continue
        kind = traced_kind(operation, events)
        times[kind] = times.get(kind, 0.0) + event["dur"] / 1e3
        ends.append((event["ts"], event["ts"] + event["dur"]))
    return {
        "ms": times,
        "kernels": len(ends),
        "span_ms": (max(end for _, end in ends) - min(begin for begin, _ in ends)) / 1e3,
    }


def traced_kind(operation: dict[str, Any], events: list[dict[str, Any]]) -> str:
    """Return the kind of an operation of a trace, in the words of an audit.

    Filling a tensor has the kind of the operation that needs it, such as a loss's gradient.
    """
    name = operation["name"]
    if name == "aten::fill_":
        around = [event["name"] for event in events if is_within(operation, event)]
        return next((kind for kind in map(kind_of_name, around) if kind == "loss"), ELEMENTWISE)
    for kind, pattern in _SPECIAL_KINDS:
        if re.search(pattern, name):
            return kind
    arguments = operation["args"]
    shapes = list(tensors(arguments["Input Dims"]))
    strides = list(tensors(arguments["Input Strides"]))
    in_order = all(map(is_in_order, shapes, strides))
    several = {tuple(shape) for shape in shapes if math.prod(shape) > 1}
    return kind_with_order(kind_of_name(name), in_order, len(several) > 1)


def is_within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    """True if one operation of a trace called the other."""
    return (
        outer.get("cat") == "cpu_op"
        and outer["tid"] == inner["tid"]
        and outer["ts"] <= inner["ts"]
        and outer["ts"] + outer["dur"] >= inner["ts"] + inner["dur"]
    )


def tensors(entries: list[Any]) -> Iterator[list[int]]:
    """Sizes or strides of each tensor in the arguments, including those in lists of tensors."""
    for entry in entries:
        if entry and isinstance(entry[0], list):
            yield from entry
        else:
            yield entry


def is_in_order(shape: list[int], strides: list[int]) -> bool:
    """True for contiguous tensors and channels last, apart from dimensions of stride 0."""
    orders: list[Sequence[int]] = [range(len(shape))]
    if len(shape) == 4:
        orders.append((0, 2, 3, 1))
    return any(is_dense([(shape[d], strides[d]) for d in order]) for order in orders)


def is_dense(dimensions: list[tuple[int, int]]) -> bool:
    """True if elements follow each other, the last of the dimensions (size, stride) fastest."""
    expected = 1
    for size, stride in reversed(dimensions):
        if size == 1 or stride == 0:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def judged(line: dict[str, Any], traces: Path | None, basis: Basis) -> dict[str, Any]:
    """Add the prediction to a measured case and, if it was traced, the times of its trace."""
    names = [name for name in StepCase.__dataclass_fields__ if name in line]
    case = StepCase(**{name: line[name] for name in names})
    result = predicted(case, basis)
    lo_us, hi_us = result.account.interval_us
    prediction: dict[str, Any] = {
        "step_ms": result.account.step_us / 1e3,
        "lo_ms": lo_us / 1e3,
        "hi_ms": hi_us / 1e3,
        "operations": captured_operations(case),
        "memory_gb": result.report.memory.total / 1e9,
        "ms": predicted_by_kind(result),
        "bytes": {other.what: other.bytes for other in result.account.other},
    }
    if case.change:
        # The tries of several sizes are all combinations, but each size has one value to try.
        (lever,) = result.levers
        prediction |= {"gain": lever.gain.value, "gain_lo": lever.gain.lo, "gain_hi": lever.gain.hi}
    trace = trace_path(case, traces)
    if trace is not None and trace.exists():
        line |= {"traced": traced_kinds(trace)}
    return {**line, "predicted": prediction}


def rounded(value: Any) -> Any:
    """Round all numbers in a document to five significant digits."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    if isinstance(value, float) and value:
        return round(value, 4 - math.floor(math.log10(abs(value))))
    return value


def shares_of(cases: list[dict[str, Any]], bandwidth: float) -> dict[str, dict[str, float]]:
    """Share of the bandwidth that each kind of other operations reaches, by kind and model.

    A share counts if the kind takes at least :data:`LEAST_MS`, predicted and in the trace.
    """
    shares: dict[str, dict[str, float]] = {}
    for case in cases:
        traced = case["traced"]["ms"]
        for kind, moved in case["predicted"]["bytes"].items():
            at_full_ms = moved / bandwidth * 1e3
            if min(at_full_ms, traced.get(kind, 0.0)) >= LEAST_MS:
                shares.setdefault(kind, {})[case["model"]] = at_full_ms / traced[kind]
    return shares


def other_ms(case: dict[str, Any], bandwidth: float, shares: dict[str, float]) -> float:
    """Predicted time of all other operations of a case, at given shares of the bandwidth."""
    return sum(
        moved / (bandwidth * shares.get(kind, 1.0)) * 1e3
        for kind, moved in case["predicted"]["bytes"].items()
    )


def waits_for_host(case: dict[str, Any]) -> bool:
    """True if a step takes clearly longer than its kernels."""
    return median(case["step_ms"]) > LEAST_WAIT * sum(case["traced"]["ms"].values())


def held_out(cases: list[dict[str, Any]], bandwidth: float) -> list[dict[str, Any]]:
    """Predict the other operations of each traced case by the shares of all other models.

    Only eager steps teach shares, because a compiled step has kernels of several kinds.
    """
    results = []
    for case in cases:
        rest = [each for each in cases
                if each["model"] != case["model"] and each["runtime"] == "eager"]  # fmt: skip
        shares = {
            kind: median(by_model.values()) for kind, by_model in shares_of(rest, bandwidth).items()
        }
        traced = case["traced"]["ms"]
        results.append({
            "model": case["model"], "runtime": case["runtime"],
            "real_ms": sum(ms for kind, ms in traced.items() if kind not in (MATRIX, ATTENTION)),
            "without_shares_ms": other_ms(case, bandwidth, {}),
            "with_shares_ms": other_ms(case, bandwidth, shares),
        })  # fmt: skip
    return results


@app.command()
def judge(
    file: Annotated[Path, typer.Argument(help="Lines of `measure`, or an earlier record.")],
    traces: Annotated[Path | None, typer.Option(help="Folder with the traces.")] = None,
    write: Annotated[Path | None, typer.Option(help="Record to write.")] = None,
) -> None:
    """Audit the measured cases, and compare the predictions with the real steps."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        lines = [json.loads(line) for line in text.splitlines()]
    else:
        lines = json.loads(text)["cases"]
    basis = find_basis(lines[0]["machine"], RESULTS)
    cases = [judged(line, traces, basis) for line in lines]
    for case in cases:
        prediction = case["predicted"]
        print(
            f"{case['model']}, batch {case['batch']}, {case['mode']}, {case['runtime']}, "
            f"loss in {case.get('loss_chunks', 1)}: "
            f"{prediction['step_ms']:.1f} ms ({prediction['lo_ms']:.1f} to "
            f"{prediction['hi_ms']:.1f}), real {median(case['step_ms']):.1f} ms; "
            f"{prediction['memory_gb']:.1f} GB, real {case['peak_memory_gb']:.1f} GB"
        )
        if case["change"]:
            print(
                f"    {case['change']}: {prediction['gain']:+.1%} ({prediction['gain_lo']:+.1%} to "
                f"{prediction['gain_hi']:+.1%}), real {median(case['gains']):+.1%}"
            )
    # The cases of a model and a runtime share one trace.
    traced = list({(case["model"], case["runtime"]): case
                   for case in cases if "traced" in case}.values())  # fmt: skip
    bandwidth = reached_bandwidth(basis)
    eager = [case for case in traced if case["runtime"] == "eager"]
    shares = {
        kind: {"median": median(by_model.values()), **by_model}
        for kind, by_model in shares_of(eager, bandwidth).items()
    }
    host_us = {
        case["model"]: median(case["step_ms"]) / case["predicted"]["operations"] * 1e3
        for case in eager
        if case["mode"] == TRAIN and waits_for_host(case)
    }
    others = held_out(traced, bandwidth)
    for entry in others:
        print(
            f"Other operations of {entry['model']}, {entry['runtime']}: "
            f"{entry['with_shares_ms']:.2f} ms by the shares of other models, "
            f"{entry['without_shares_ms']:.2f} ms without, real {entry['real_ms']:.2f} ms"
        )
    if write is not None:
        document = rounded(
            {
                "bandwidth": bandwidth,
                "shares": shares,
                "other": others,
                "host_us_per_operation": host_us,
                "cases": cases,
            }
        )
        write.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


@app.callback()
def main() -> None:
    """Compare audits with real steps on a GPU."""


if __name__ == "__main__":
    app()
