"""Find out which GEMM and convolution shapes are fast on your GPU, why, and what to change.

    >>> import rooftile
    >>> rooftile.predict("2048,2048,4096,bf16", "nvidia-h100-sxm")[["problem", "time_us", "limit"]]
                        problem    time_us    limit
    0  2048,2048,4096,bf16,nt,1  46.193434  compute

A shape is text in the order of the command line's ``--gemm`` or ``--conv``, a tuple of the same
values, or a :class:`Gemm` or :class:`Conv`. Wherever one shape is accepted, so is a list of shapes,
or a DataFrame with the columns ``m,n,k,dtype``. A machine is a slug of :func:`machines`, or an
unambiguous part of one (``h200``). Without it, the machine that was measured last is used. Bad
input raises a :class:`UserError`, which is a ``ValueError``. Its message is one sentence that says
what to do; an option such as ``--pad`` in it is the argument ``pad``.

Queries need neither a GPU nor PyTorch, except for :func:`audit`, which needs PyTorch. To measure,
use the command ``rooftile run``, then ``rooftile report``. In a checkout, import this module with
``from analysis import rooftile``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.common.errors import UserError
from kernels.common.program import RESULTS, needs_extra
from kernels.problem import Conv, Gemm

if TYPE_CHECKING:
    import pandas as pd

    from analysis.audit.audit import Audit as Audit
    from analysis.explain.explain_report import TraceExplanation as TraceExplanation
    from analysis.imports.problems import Shape as Shape
    from analysis.recordings.load import Recording as Recording

__version__ = "0.1.0"

__all__ = [
    "Conv", "Gemm", "UserError", "__version__", "audit", "explain", "load", "machines", "predict",
    "recommend",
]  # fmt: skip


def predict(
    shapes: Shape | Iterable[Shape] | pd.DataFrame,
    machine: str | Sequence[str] | None = None,
    *,
    results: str | Path = RESULTS,
) -> pd.DataFrame:
    """Predict the time of GEMMs and convolutions, and say what limits it.

    Args:
        shapes: one or more shapes.
        machine: one or more machines. A shape's rows on all machines follow one another.
        results: folder of all machines' results.

    Returns:
        One row per shape and machine: ``problem`` and its columns ``op, m, n, k, batch, dtype,
        layout`` (for a convolution also ``c, h, w, kout, …``), ``machine``, ``time_us`` with its
        90% interval ``lo_us, hi_us``, ``tflops``, ``limit`` and the other parts of the estimate, an
        ``explanation``, ``evidence`` (``measured`` if this exact shape was measured, else
        ``predicted``), and ``basis`` and ``source``, which say what the row rests on.

    Raises:
        UserError: if a shape or a machine is not known, or a recording cannot be read.

    >>> sizes = [(4096, hidden, 4096, "bf16") for hidden in (4096, 4224)]
    >>> rooftile.predict(sizes, ["h200", "b200"])[["problem", "machine", "tflops"]].round()
                        problem      machine  tflops
    0  4096,4096,4096,bf16,nt,1  nvidia-h200   793.0
    1  4096,4096,4096,bf16,nt,1  nvidia-b200  1534.0
    2  4096,4224,4096,bf16,nt,1  nvidia-h200   814.0
    3  4096,4224,4096,bf16,nt,1  nvidia-b200  1563.0
    """
    import pandas as pd

    from analysis.advice.times import times_of
    from analysis.imports.problems import as_problems
    from analysis.model.basis import find_basis

    problems = as_problems(shapes)
    names = [machine] if machine is None or isinstance(machine, str) else list(machine)
    if not names:
        raise UserError("give at least one machine, or None for the one measured last.")
    # Each machine has one row per shape. The rows of a shape are then put together.
    by_machine = [times_of(problems, find_basis(name, Path(results))) for name in names]
    by_shape = zip(*by_machine, strict=True)
    return pd.DataFrame([row for rows_of_shape in by_shape for row in rows_of_shape])


def recommend(
    shapes: Shape | Iterable[Shape] | pd.DataFrame,
    machine: str | None = None,
    *,
    pad: str | float | None = None,
    choose: str | float | None = None,
    change: str | Sequence[str] = (),
    fix: str | Sequence[str] = (),
    multiple: int = 1,
    any_size: bool = False,
    results: str | Path = RESULTS,
) -> pd.DataFrame:
    """Recommend which sizes to pad to or to choose, or to leave a shape as it is.

    Args:
        shapes: one or more shapes.
        machine: the machine that the shapes run on.
        pad: how much larger each size and the FLOPs may become, as a fraction or as text such as
            ``"10%"``, up to ``"1000%"``; 0.125 unless ``pad`` or ``choose`` is given.
        choose: how much larger or smaller the sizes and the FLOPs may become, given like ``pad``.
        change: the only sizes that may change, such as ``"n"`` or ``"m,k"``; all if empty.
        fix: sizes that may not change.
        multiple: number that changed sizes are multiples of.
        any_size: if True, sizes that are not a multiple of 8 may be named, too.
        results: folder of all machines' results.

    Returns:
        One row per shape: ``problem`` and its columns as in :func:`predict`, ``instead`` and its
        sizes ``new_m, new_n, new_k`` (for a convolution ``new_c, new_kout``), ``change``,
        ``verdict`` (``do it``, ``likely`` or ``leave it``), the gains as fractions with their
        intervals (95% of measured ones, 90% of predicted ones), the ``probability`` that the change
        gains and its ``expected_gain`` after costs, what it costs, a ``reason``, and ``basis`` and
        ``source``.

    Raises:
        UserError: as in :func:`predict`; also if both ``pad`` and ``choose`` are given.

    >>> advice = rooftile.recommend("8192,50257,768,bf16", "h200", pad=0.01, change="n")
    >>> advice[["change", "verdict"]]
                  change verdict
    0  N 50257 → 50264  likely
    """
    import pandas as pd

    from analysis.advice.answers import answers_to
    from analysis.advice.options import question_of
    from analysis.advice.sizes import SizeConstraints
    from analysis.imports.problems import as_problems
    from analysis.model.basis import find_basis
    from analysis.words import names_in

    constraints = SizeConstraints(
        names_in(change, "change"), names_in(fix, "fix"), multiple, any_size
    )
    question = question_of(pad, choose, constraints)
    answers = answers_to(as_problems(shapes), find_basis(machine, Path(results)), question)
    return pd.DataFrame([answer.to_json() for answer in answers])


def audit(
    model: str | Path,
    machine: str | None = None,
    *,
    mode: str = "train",
    batch: int = 1,
    seq: int = 2048,
    tokens: int = 1,
    dtype: str = "bf16",
    autocast: bool = False,
    tp: int = 1,
    runtime: str = "eager",
    fuse: str | Sequence[str] = (),
    recompute: bool = False,
    loss_chunks: int = 1,
    optimizer: str = "adamw",
    attention: str | float | None = None,
    attention_kernel: str | None = None,
    causal_half: bool = True,
    skew: float = 1.0,
    vary: str | Sequence[str] = (),
    parameters: str | float = 0.01,
    multiple: int | None = None,
    tries: Mapping[str, Sequence[int]] | None = None,
    sizes: Mapping[str, int] | None = None,
    inputs: str | Sequence[str] = (),
    results: str | Path = RESULTS,
) -> Audit:
    """Say what takes the time of a model's step, which dimension to change, and what it gains.

    Args:
        model: a Hugging Face ``config.json``, a name such as ``gpt2-xl``, or ``module:factory``.
        machine: the machine that the model runs on.
        mode: ``train``, ``prefill`` or ``decode``.
        batch: number of sequences or images.
        seq: tokens of a sequence.
        tokens: new tokens of each sequence, when decoding.
        dtype: ``fp32``, ``tf32``, ``fp16`` or ``bf16``.
        autocast: if True, parameters remain in fp32.
        tp: tensor-parallel degree.
        runtime: ``eager`` or ``compile``.
        fuse: GEMMs that are computed as one, of ``qkv`` and ``gate_up``.
        recompute: if True, the backward pass recomputes the forward pass of repeated layers.
        loss_chunks: number of parts into which the head and the loss are cut.
        optimizer: ``adamw``, ``sgd`` or ``none``.
        attention: share of the peak that attention is assumed to reach; None to use measured times.
        attention_kernel: framework whose attention is used, such as ``vllm``; None if not known.
        causal_half: if True, a causal mask halves the work of attention.
        skew: only one in this many experts gets tokens.
        vary: the only dimensions to vary, such as ``hidden``; all if empty.
        parameters: how many more parameters the joint change may have, as a fraction.
        multiple: number that widths have to be multiples of; None for multiples of 64 and more.
        tries: values of dimensions to compare, in every combination, instead of searching.
        sizes: sizes of the model that replace its own.
        inputs: inputs of a factory's module, such as ``int64[8,2048]``.
        results: folder of all machines' results.

    Returns:
        An :class:`Audit`. Print it, or take its DataFrames ``products`` and ``changes``.

    Raises:
        UserError: if PyTorch is not installed, the model cannot be built, or an argument's value is
            not known.

    >>> gpt2 = rooftile.audit("gpt2", "h200", batch=8, seq=1024, vary=["vocab"])
    >>> gpt2.changes[["dimension", "from", "to", "verdict"]]
      dimension   from     to verdict
    0     vocab  50257  50304  likely
    """
    from analysis.audit.audit import LeverSearch
    from analysis.audit.audit import audit as audit_on
    from analysis.audit.runtime import Runtime
    from analysis.model.basis import find_basis
    from analysis.words import names_in, share_of

    try:
        from sweeps.capture.sources import find_source
        from sweeps.capture.step import ModelStep
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UserError(needs_extra("torch", "models", "rooftile.audit")) from None

    step = ModelStep(mode, batch, seq, tokens, dtype, autocast)
    run_options = Runtime(
        runtime,
        names_in(fuse, "fuse"),
        tp,
        recompute,
        loss_chunks,
        optimizer,
        None if attention is None else share_of(attention, "attention"),
        attention_kernel,
        causal_half,
        skew,
    )
    more_parameters = share_of(parameters, "parameters")
    search = LeverSearch(names_in(vary, "vary"), more_parameters, multiple, tries or {})
    source = find_source(str(model), sizes, [inputs] if isinstance(inputs, str) else inputs)
    basis = find_basis(machine, Path(results))
    (result,) = audit_on(source, step, run_options, [basis], search)
    return result


def explain(
    traces: str | Path | Sequence[str | Path],
    machine: str | None = None,
    *,
    against: str | Path | None = None,
    pad: str | float | None = None,
    choose: str | float | None = None,
    results: str | Path = RESULTS,
) -> TraceExplanation:
    """Explain a trace of PyTorch's profiler: which shapes take longer than they should.

    Args:
        traces: a trace, ``.json`` or ``.json.gz``, or several traces of one job.
        machine: the machine to compare with; None for the one that was traced.
        against: folder of results to look in first.
        pad: how much larger each size and the FLOPs may become, as in :func:`recommend`; by
            default, 12.5%, or as much as a multiple of 8 needs.
        choose: how much larger or smaller the sizes and the FLOPs may become.
        results: folder of all machines' results.

    Returns:
        A :class:`TraceExplanation`. Printing it gives the command's output. Its ``operations`` are
        a DataFrame with one row per operation: ``op, problem, calls, time_us`` (of one call),
        ``share``, ``kernel``, ``tensor_cores``, the expected ``predicted_us`` with its interval
        ``lo_us, hi_us``, and ``finding``, ``change`` and ``saves_us``. ``to_json()`` returns the
        document that the command prints.

    Raises:
        UserError: if a trace or a recording cannot be read, or the machine is not known.
    """
    from analysis.advice.options import question_of
    from analysis.advice.sizes import ANY_DIMENSION
    from analysis.explain.explain import explain_traces
    from analysis.explain.explain_report import TraceExplanation

    several = [traces] if isinstance(traces, str | Path) else traces
    paths = [Path(trace) for trace in several]
    question = None
    if pad is not None or choose is not None:
        question = question_of(pad, choose, ANY_DIMENSION)
    folder = None if against is None else Path(against)
    return TraceExplanation(explain_traces(paths, machine, Path(results), folder, question))


def load(place: str | Path | None = None, *, results: str | Path = RESULTS) -> Recording:
    """Read what was measured on a machine.

    Args:
        place: a machine, or the folder of a recording; the machine measured last if None.
        results: folder of all machines' results.

    Returns:
        A :class:`Recording`. Its ``rows`` are a DataFrame of measurements.csv, with one row per
        case. ``ok`` are the rows with times, ``machine`` has the facts about the machine, and
        ``health`` says how quiet it was.

    Raises:
        UserError: if nothing was recorded, or the recording cannot be read.

    ``rooftile.load()`` reads the machine measured last. A folder is read like this:

    >>> recording = rooftile.load("results/published/cpu-intel-xeon-avx512bf16-1t")
    >>> recording.ok[["m", "n", "k", "dtype", "time_us"]].head(2)
         m    n    k dtype   time_us
    0  512  512  512  fp32  2047.875
    1  527  512  512  bf16  3551.250
    """
    from analysis.recordings.load import recording_folder
    from analysis.recordings.runs import load_runs

    return load_runs(recording_folder(None if place is None else str(place), Path(results)))


def machines(*, results: str | Path = RESULTS) -> pd.DataFrame:
    """List every machine, and what the answers about it rest on.

    Args:
        results: folder of all machines' results.

    Returns:
        One row per machine: ``slug, name, basis`` (``recorded``, ``public``, ``shipped``,
        ``generation`` or ``none``), ``rows`` and ``source``, and the errors of predictions
        ``median, mean, p95`` as fractions, if they are known.

    >>> rooftile.machines()[["slug", "basis"]].head(2)
                        slug       basis
    0  nvidia-v100-sxm2-16gb  generation
    1  nvidia-v100-sxm2-32gb  generation
    """
    import pandas as pd

    from analysis.model.basis import machine_rows

    return pd.DataFrame(machine_rows(Path(results)))


def __getattr__(name: str) -> object:
    """Import the types of arguments and results only when they are used, which is rare."""
    if name == "Audit":
        from analysis.audit.audit import Audit

        return Audit
    if name == "Recording":
        from analysis.recordings.load import Recording

        return Recording
    if name == "TraceExplanation":
        from analysis.explain.explain_report import TraceExplanation

        return TraceExplanation
    if name == "Shape":
        from analysis.imports.problems import Shape

        return Shape
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
