"""Parts of a machine's recording, the most valuable first, and the commands that record them.

The commands run as separate processes, so this package does not need PyTorch, and a crash ends only
the command in which it happens.
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.rules.catalogue import rule_sweeps
from kernels.common.program import INSTALLED
from kernels.problem import Conv, Gemm
from sweeps.cases.spec import all_sweeps

PLACES = ("rules", "families")
"""Subfolders of the results folder that the ``place`` of a step may name."""

CHECKED_GEMMS = (
    "17,33,65,fp32", "128,128,128,fp32", "127,129,257,tf32", "256,256,256,tf32",
    "1,256,512,fp16", "64,64,2048,bf16", "33,70,129,bf16,tn,3", "512,512,512,bf16",
)  # fmt: skip
CHECKED_CONVS = (
    "2,8,9,11,16,3,3,1,1,1,1,fp16,nhwc,fprop", "2,8,9,11,16,3,3,1,1,1,1,bf16,nhwc,dgrad",
    "2,16,8,8,32,1,1,2,0,1,1,bf16,nhwc,wgrad", "1,3,17,19,8,7,7,2,3,1,1,fp32,nhwc,fprop",
)  # fmt: skip
"""Shapes of the correctness checks.

They include odd and even sizes, a single row, a long K, a batch, every convolution pass, and every
dtype except fp8. Both lists are short, because compiling the kernels of a shape takes most of the
time."""


@dataclass(frozen=True)
class RecorderStep:
    """One command of a recording.

    A step is done when its command has succeeded and all cases of its ``sweeps`` are measured.

    Attributes:
        command: words of the command; ``{slug}`` and ``{results}`` are placeholders.
        seconds: expected seconds on a GPU and on a CPU, without the start of the command; None for
            the kind of machine that skips the step.
        sweeps: sweeps whose cases the step has to measure.
        output: name of the file that stdout is saved to; empty if stdout is not saved.
        place: subfolder of the results folder, one of :data:`PLACES`, that the command writes to;
            empty for the results folder itself.
        on_device: True if the command takes ``--device`` and ``--gpu``.
    """

    name: str
    command: tuple[str, ...]
    seconds: tuple[float | None, float | None]
    sweeps: tuple[str, ...] = ()
    output: str = ""
    place: str = ""
    on_device: bool = True

    def expected(self, kind: str) -> float | None:
        """Return the expected seconds on a ``gpu`` or ``cpu``; None if the step is skipped."""
        on_gpu, on_cpu = self.seconds
        return on_gpu if kind == "gpu" else on_cpu


@dataclass(frozen=True)
class RecorderPart:
    """Part of a recording: the steps that serve one purpose."""

    name: str
    purpose: str
    steps: tuple[RecorderStep, ...]


def all_parts() -> tuple[RecorderPart, ...]:
    """Return the parts of a recording, the most informative per minute first.

    The pairs in the code below, such as ``(60, 15)``, give each step's
    :attr:`RecorderStep.seconds`: expected seconds on a GPU and on a CPU.
    """
    return (
        RecorderPart(
            "machine",
            "the machine, and whether results are correct",
            (
                _command("doctor", "sweeps doctor --json", (10, 5), "doctor.json"),
                _command("implementations", "kernels list --json", (10, 5), "implementations.json"),
                _command("checks", f"kernels check --json {_checks()}", (60, 15), "checks.json"),
            ),
        ),
        RecorderPart(
            "clock",
            "the sampler compared with the usual timer",
            (_command("clock", "sweeps doctor --clock --cases 30 --json", (60, 35)),),
        ),
        RecorderPart(
            "real-layers",
            "square GEMMs, and cliffs in real layers",
            (_sweeps("real-layers", ("square", "one-more"), (90, 40)),),
        ),
        RecorderPart(
            "convolutions",
            "convolutions by channels, pass and layout; misaligned GEMMs",
            (_sweeps("convolutions", ("conv-channels", "conv-layouts", "alignment"), (90, 25)),),
        ),
        RecorderPart(
            "families",
            "the Triton kernels against the vendor libraries",
            (_sweeps("families", ("families", "families-conv"), (60, None), "families"),),
        ),
        RecorderPart(
            "sustained",
            "sustained work, clocks and power",
            (_sweeps("sustained", ("sustained",), (30, 20)),),
        ),
        RecorderPart(
            "public-grid",
            "how well public tables fit the machine",
            (_sweeps("public-grid", ("public-grid",), (80, 10)),),
        ),
        RecorderPart(
            "sweeps",
            "all default sweeps, the rules and the report",
            (
                _sweeps("defaults", _defaults(), (600, 50)),
                _sweeps(
                    "rules", tuple(rule_sweeps()), (240, 30), "rules", "--skip-recorded {results}"
                ),
                _command("profiles", "sweeps profile --results {results}/rules", (60, 15)),
                _command("confirm", "analysis recommend --measure --budget 30s", (60, None)),
                _analysis("report", (90, 40)),
                _analysis("rules", (30, 10)),
            ),
        ),
        RecorderPart(
            "kernels",
            "all Triton families and candidates"
            + ("" if INSTALLED else ", then the checkout's GPU tests"),
            (
                _sweeps(
                    "candidates",
                    ("families", "families-conv", "candidates", "candidates-conv"),
                    (420, None),
                    "families",
                ),
                RecorderStep(
                    "analysis-families",
                    ("analysis", "compare", "{slug}", "--kernels"),
                    (20, None),
                    place="families",
                    on_device=False,
                ),
                _sweeps("warp-specialisation", ("warp-specialisation",), (120, None), "families"),
                *_gpu_tests(),
            ),
        ),
    )


def _command(
    name: str, command: str, seconds: tuple[float | None, float | None], output: str = ""
) -> RecorderStep:
    """Return a step that runs ``command`` (one line of text) on the device."""
    return RecorderStep(name, tuple(command.split()), seconds, output=output)


def _analysis(name: str, seconds: tuple[float | None, float | None]) -> RecorderStep:
    """Return a step that runs an ``analysis`` command for the machine, without device options."""
    return RecorderStep(
        f"analysis-{name}",
        ("analysis", name, "--machine", "{slug}"),
        seconds,
        on_device=False,
    )


def _sweeps(
    name: str,
    groups: tuple[str, ...],
    seconds: tuple[float | None, float | None],
    place: str = "",
    options: str = "",
) -> RecorderStep:
    """Return a step that measures sweeps and adds the results to those already in its folder.

    Each of ``groups`` is the name of one sweep, or several names joined by commas.
    """
    command = ("sweeps", "run", *groups, "--add", *options.split())
    sweeps = tuple(sweep for group in groups for sweep in group.split(","))
    return RecorderStep(f"sweep-{name}", command, seconds, sweeps, place=place)


def _gpu_tests() -> tuple[RecorderStep, ...]:
    if INSTALLED:
        return ()
    return (
        _tests("gpu-tests", "-m gpu --tier all --ignore=tests/benchmarks", 100),
        _tests("kernel-tests", "tests/kernels/triton --tier all", 240),
    )


def _tests(name: str, options: str, seconds: float) -> RecorderStep:
    command = ("pytest", "-q", "--tb=line", *options.split())
    return RecorderStep(name, command, (seconds, None), output=f"{name}.txt", on_device=False)


def _checks() -> str:
    # Parsing finds an invalid shape without a GPU.
    gemms = [f"--gemm {Gemm.parse(text).spec()}" for text in CHECKED_GEMMS]
    convs = [f"--conv {Conv.parse(text).spec()}" for text in CHECKED_CONVS]
    return " ".join([*gemms, *convs])


def _defaults() -> tuple[str, ...]:
    return tuple(name for name, sweep in all_sweeps().items() if sweep.default)
