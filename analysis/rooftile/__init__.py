"""Find out which GEMM and convolution shapes are fast on your GPU, why, and what to change.

    >>> import rooftile
    >>> rooftile.predict("2048,2048,4096,bf16", "nvidia-h200")[["problem", "time_us", "limit"]]
                        problem    time_us    limit
    0  2048,2048,4096,bf16,nt,1  44.877432  compute

A shape is text in the form that the options ``--gemm`` and ``--conv`` take, a tuple of the same
values, or a :class:`Gemm` or :class:`Conv`. Functions that take a shape also take a list of shapes,
or a DataFrame with the columns ``m,n,k,dtype``. A machine is a slug from :func:`machines`, or any
unambiguous part of a slug, such as ``h200``. If no machine is given, :func:`explain` uses the
traced machine, and all other functions that take a machine use the machine measured last.

Bad input raises a :class:`UserError`, which is a ``ValueError``. The error's message may name an
option of the command line, such as ``--pad``. In Python, this option is the argument ``pad``.

No function needs a GPU, and only :func:`audit` needs PyTorch. To measure a machine, run the command
``rooftile run``. In a checkout, import this module with
``from analysis import rooftile``.
"""

from __future__ import annotations

import copy
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
    """Predict the times of GEMMs and convolutions, and say what limits their speed.

    If a time was measured, it is returned instead of a prediction.

    Args:
        shapes: one or more shapes.
        machine: one or more machines; the machine measured last if None.
        results: folder of all machines' results.

    Returns:
        A table with one row per shape and machine; the rows of one shape are adjacent. Its columns
        include:

        - ``problem`` and its fields ``op, m, n, k, batch, dtype, layout``; a convolution also has
          ``c, h, w, kout, …``;
        - ``machine``;
        - ``time_us`` and ``tflops``, and the interval of the time, ``lo_us, hi_us``: 95% for a time
          that was measured with an interval, otherwise 90%;
        - ``limit``, the bottleneck, such as ``compute``; ``tile``, ``waves`` and other parts of the
          estimate; and an ``explanation`` in words;
        - ``evidence``: ``measured`` if the time was measured, else ``predicted``;
        - ``basis`` and ``source`` of the answer, as in :func:`machines`.

    Raises:
        UserError: if a shape or a machine is missing or not valid, or a recording cannot be read.

    >>> sizes = [(4096, hidden, 4096, "bf16") for hidden in (4096, 4224)]
    >>> rooftile.predict(sizes, ["h200", "b200"])[["problem", "machine", "tflops"]].round()
                        problem      machine  tflops
    0  4096,4096,4096,bf16,nt,1  nvidia-h200   794.0
    1  4096,4096,4096,bf16,nt,1  nvidia-b200  1535.0
    2  4096,4224,4096,bf16,nt,1  nvidia-h200   815.0
    3  4096,4224,4096,bf16,nt,1  nvidia-b200  1561.0
    """
    import pandas as pd

    from analysis.advice.times import times_of
    from analysis.imports.problems import as_problems
    from analysis.model.basis import find_basis

    problems = as_problems(shapes)
    names = [machine] if machine is None or isinstance(machine, str) else list(machine)
    if not names:
        raise UserError(
            "machine is empty; give at least one machine, or None for the machine that was "
            "measured last."
        )
    # Each machine has one row per shape. In the result, the rows of one shape are adjacent.
    rows_by_machine = [times_of(problems, find_basis(name, Path(results))) for name in names]
    rows_by_shape = zip(*rows_by_machine, strict=True)
    return pd.DataFrame([row for rows_of_shape in rows_by_shape for row in rows_of_shape])


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
    """Recommend faster sizes near a shape, another implementation, or no change.

    A pad query looks for larger sizes that take less time. A choose query looks for larger or
    smaller sizes that reach more FLOP/s.

    Args:
        shapes: one or more shapes.
        machine: the machine that the shapes run on; the machine measured last if None.
        pad: largest increase of each size and of the FLOPs, as a fraction or as text such as
            ``"10%"``, up to ``"1000%"``. If neither ``pad`` nor ``choose`` is given, ``pad`` is
            0.125. An integer or a string without ``%`` is refused if it is 1 or more, because it
            could also mean a percentage.
        choose: largest increase or decrease of each size and of the FLOPs, in the same form as
            ``pad``.
        change: the only dimensions that may change, such as ``"n"``, ``"m,k"`` or ``["m", "k"]``;
            ``()`` for all dimensions. An empty string is refused.
        fix: dimensions that must not change.
        multiple: number that divides every changed size.
        any_size: if False, every changed size is a multiple of 8, or of 4 if it is below 16.
        results: folder of all machines' results.

    Returns:
        A table with one row per shape. Its columns include:

        - ``problem`` and its fields, as in :func:`predict`;
        - ``instead``, the recommended problem, and its sizes: ``new_m, new_n, new_k``, or ``new_c,
          new_kout`` for a convolution;
        - ``change`` in words, and the ``verdict``: ``do it``, ``likely`` or ``leave it``;
        - ``measured_gain`` and ``predicted_gain`` as fractions, with intervals: 95% for measured
          gains, 90% for predicted gains;
        - the ``probability`` that the change brings a gain, its ``expected_gain`` after costs, and
          the costs;
        - the ``reason``, and ``basis`` and ``source`` of the answer, as in :func:`machines`.

    Raises:
        UserError: as in :func:`predict`, or if another argument is invalid or does not fit a shape.

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
    seq: int | None = None,
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
    """Report where a model's step spends its time, and which changes of dimensions would save time.

    Args:
        model: a Hugging Face ``config.json``, a name such as ``gpt2-xl``, or ``module:factory``.
        machine: the machine that the model runs on; the machine measured last if None.
        mode: kind of step (``train``, ``prefill`` or ``decode``).
        batch: batch size in sequences or images.
        seq: sequence length in tokens; in a decoding step, the number of earlier tokens. None for
            2,048, or fewer if the model has too few positions.
        tokens: number of new tokens per sequence in a decoding step.
        dtype: dtype of the model (``fp32``, ``tf32``, ``fp16`` or ``bf16``).
        autocast: if True, parameters stay in fp32, and GEMMs, convolutions and attention are
            computed in ``dtype``.
        tp: tensor-parallel degree, which is the number of GPUs that share a layer.
        runtime: PyTorch runtime (``eager`` or ``compile``).
        fuse: groups of GEMMs, each of which is computed as one GEMM (``qkv``, ``gate_up`` or
            both).
        recompute: if True, the backward pass recomputes the forward pass of repeated layers.
        loss_chunks: largest number of chunks into which the tokens are divided to compute the head
            and the loss.
        optimizer: optimizer of a training step (``adamw``, ``sgd`` or ``none``).
        attention: share of peak FLOP/s that attention reaches. If None, the time of attention is
            predicted from measured calls; on a CPU, and in fp32 and tf32, a share of 50% is assumed
            instead.
        attention_kernel: framework whose attention kernels are used (``vllm``, ``trtllm`` or
            ``sglang``); None if the framework is not known. It cannot be combined with
            ``attention``, and is refused if no attention times are known in the model's dtype.
        causal_half: if True, a causal mask halves the FLOPs of attention.
        skew: expert skew, 1 or more. A skew of 4 means that only one in four experts gets tokens.
        vary: the only dimensions to vary, such as ``hidden``; ``()`` for all dimensions. An empty
            string is refused.
        parameters: largest fraction by which combined changes may increase the number of
            parameters.
        multiple: number that divides every proposed width; None for 64, or for 8 if no multiple of
            64 is near.
        tries: values to compare, by dimension; all their combinations are compared, and there is
            no search. ``vary`` and ``multiple`` are then refused, and ``parameters`` has no effect.
        sizes: new values of the model's sizes, by name.
        inputs: inputs of a factory's module, such as ``int64[8,2048]``. Several inputs are given as
            a sequence of strings, because the commas in a string separate the sizes of a shape.
        results: folder of all machines' results.

    Returns:
        An :class:`Audit`. Print it, or use its two DataFrames: ``products`` has one row per matrix
        operation, and ``changes`` has one row per proposed change.

    Raises:
        UserError: if PyTorch is not installed, the model cannot be built, the machine's
            measurements cannot be read, or an argument is invalid.

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
        from sweeps.capture.step import ModelStep, default_seq
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UserError(needs_extra("torch", "models", "rooftile.audit")) from None

    run_options = Runtime(
        kind=runtime,
        fuse=names_in(fuse, "fuse"),
        tp=tp,
        recompute=recompute,
        loss_chunks=loss_chunks,
        optimizer=optimizer,
        attention=None if attention is None else share_of(attention, "attention"),
        attention_kernel=attention_kernel,
        causal_half=causal_half,
        skew=skew,
    )
    search = LeverSearch(
        vary=names_in(vary, "vary"),
        more_parameters=share_of(parameters, "parameters"),
        multiple=multiple,
        tries=tries or {},
    )
    source = find_source(str(model), sizes, [inputs] if isinstance(inputs, str) else inputs)
    if seq is None:
        seq = default_seq(source.positions, mode, tokens)
    step = ModelStep(mode, batch, seq, tokens, dtype, autocast)
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
    """Find the shapes that take longer than they should in a trace from PyTorch's profiler.

    Args:
        traces: one trace (``.json`` or ``.json.gz``), or several traces of one job.
        machine: the machine to compare with; None for the traced machine. It must be None if
            ``against`` is the folder of a single machine.
        against: folder of the machine to compare with, or a folder to search before ``results``,
            with results of several machines.
        pad: largest increase of each size and of the FLOPs, as in :func:`recommend`. If neither
            ``pad`` nor ``choose`` is given, the largest increase is 12.5%, or up to 50% if the
            next multiples of 8 are further away.
        choose: largest increase or decrease of each size and of the FLOPs, in the same form as
            ``pad``.
        results: folder of all machines' results.

    Returns:
        A :class:`TraceExplanation`. Print it to get the output of ``rooftile explain``. Its method
        ``to_json()`` returns the document that ``rooftile explain --json`` prints. Its attribute
        ``operations`` is a DataFrame with one row per operation. The DataFrame's columns include:

        - ``op, problem, calls`` and ``time_us``, which is the time of one call;
        - ``share`` of the operations' total time, the main ``kernel``, and ``tensor_cores``:
          ``used``, ``eligible`` (they could be used, but are not) or ``no``; missing if unknown;
        - ``predicted_us``, the time that the shape should take, with its interval ``lo_us, hi_us``;
        - ``finding``, the remedies that could save time, and the reasons why the operation is slow;
        - ``change``, the recommended change of sizes;
        - ``saves_us``, the time that the best remedy could save over all calls.

    Raises:
        UserError: if a trace or a recording cannot be read, if the machine is unknown or does not
            fit the traces, or if another argument is invalid.
    """
    from analysis.advice.options import question_of
    from analysis.advice.sizes import ANY_DIMENSION
    from analysis.explain.explain import explain_traces
    from analysis.explain.explain_report import TraceExplanation

    paths = [Path(traces)] if isinstance(traces, str | Path) else [Path(path) for path in traces]
    question = None
    if pad is not None or choose is not None:
        question = question_of(pad, choose, ANY_DIMENSION)
    against_folder = None if against is None else Path(against)
    explained = explain_traces(paths, machine, Path(results), against_folder, question)
    return TraceExplanation(explained)


def load(place: str | Path | None = None, *, results: str | Path = RESULTS) -> Recording:
    """Read a machine's measurements, whether made by Rooftile or imported.

    A machine's usable runs with the same PyTorch and driver are combined, as they are for all other
    functions. If ``place`` is the folder of an older run, only that run is read.

    Args:
        place: a machine, or the folder of a recording; the machine measured last if None.
        results: folder of all machines' results.

    Returns:
        A :class:`Recording`. Its attribute ``rows`` is a DataFrame with the columns of
        measurements.csv and one row per case. ``ok`` has the rows with times, and ``machine``
        describes the machine. ``health`` says how quiet the machine was in the run that most rows
        come from; it is empty if that run was not judged.

    Raises:
        UserError: if no recording or more than one machine matches ``place``, or if the recording
            cannot be read.

    >>> recording = rooftile.load("results/published/cpu-intel-xeon-avx512bf16-1t")
    >>> recording.ok[["m", "n", "k", "dtype", "time_us"]].head(2)
         m    n    k dtype   time_us
    0  512  512  512  fp32  2047.875
    1  527  512  512  bf16  3551.250
    """
    from analysis.recordings.load import recording_folder
    from analysis.recordings.runs import load_runs

    folder = recording_folder(None if place is None else str(place), Path(results))
    # Rooftile keeps the recording for later calls, so the user gets a copy.
    return copy.deepcopy(load_runs(folder))


def machines(*, results: str | Path = RESULTS) -> pd.DataFrame:
    """List every machine, and what the answers about it are based on.

    Args:
        results: folder of all machines' results.

    Returns:
        A table with one row per machine. Its columns are:

        - ``slug`` and ``name``;
        - ``basis`` and ``source`` of the answers;
        - ``rows``, the largest number of measurements of one operation and dtype;
        - ``median, mean, p95``, the errors of predictions for this operation and dtype, as
          fractions. Unknown values are missing.

        The basis is one of:

        - ``recorded``: measurements on the machine itself, or your own imported times;
        - ``public``: an imported public table;
        - ``shipped``: constants that were fitted to public times of this machine;
        - ``generation``: constants of the machine's generation, or the mean of such constants and
          those of other generations;
        - ``none``: constants of other generations, or constants that were not fitted to any
          machine.

    Raises:
        UserError: if a machine's recording cannot be read.

    >>> rooftile.machines()[["slug", "basis"]].head(2)
                        slug       basis
    0  nvidia-v100-sxm2-16gb  generation
    1  nvidia-v100-sxm2-32gb  generation
    """
    import pandas as pd

    from analysis.model.basis import machine_rows

    return pd.DataFrame(machine_rows(Path(results)))


def __getattr__(name: str) -> object:
    """Import the types of arguments and results only when they are first used."""
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
