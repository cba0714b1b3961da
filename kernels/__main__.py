"""Commands of this package: ``list``, ``check`` and ``compile``."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernels import Conv, Gemm, implementations
from kernels.cli import (
    ConvOption,
    DeviceOption,
    GemmOption,
    GpuOption,
    JsonOption,
    new_app,
    note,
    parse_problems,
    print_json,
    run,
)
from kernels.common.checks import check_folder
from kernels.common.counts import counted
from kernels.common.errors import UserError, nearest
from kernels.common.program import needs_extra, target
from kernels.config import HAND_WRITTEN
from kernels.operation import SERIES, Layer, Lstm, Series, Workload
from kernels.problem import TIMED_DTYPES

if TYPE_CHECKING:
    from kernels.correctness.check import CheckRow

app = new_app(
    "List and check the implementations that Rooftile times, and compile its Triton kernels."
)


@app.command("list")
def list_command(
    device: DeviceOption = "auto", gpu: GpuOption = 0, json: JsonOption = False
) -> None:
    """List the operations of each implementation, with the dtypes supported on this machine.

    If an operation is supported in no dtype, the reason is listed instead.
    """
    from kernels.device import select_device

    machine = select_device(device, gpu).machine
    rows: list[dict[str, Any]] = []
    for name, implementation in implementations().items():
        for op in implementation.ops:
            # Reason why each dtype is not supported, or None for a supported dtype.
            refusals = {
                dtype: implementation.supports(_plain_problem(op, dtype), machine)
                for dtype in TIMED_DTYPES
            }
            supported = [dtype for dtype, refusal in refusals.items() if refusal is None]
            # The reason for fp32 is the most useful one, because every machine computes fp32.
            reason = None if supported else refusals["fp32"]
            rows.append({"implementation": name, "op": op, "supports": supported, "reason": reason})
    if json:
        print_json(rows)
        return
    print(f"{machine.name} ({machine.slug})")
    for row in rows:
        support = " ".join(row["supports"]) or row["reason"]
        print(f"  {row['implementation']:18}{row['op']:12}{support}")


@app.command("check")
def check_command(
    implementation: Annotated[
        list[str] | None,
        typer.Option(
            "--implementation", help="Implementation to check; repeatable [default: all]."
        ),
    ] = None,
    gemm: GemmOption = None,
    conv: ConvOption = None,
    device: DeviceOption = "auto",
    gpu: GpuOption = 0,
    json: JsonOption = False,
) -> None:
    """Check the results of implementations against a float64 reference.

    On a CPU, Triton's interpreter runs the Triton kernels. Without ``--gemm`` or ``--conv``, small
    problems with awkward sizes are checked. Problems that an implementation does not support are
    listed only if an implementation or a problem is given. The exit code is 1 if a check failed or
    nothing was checked.
    """
    from kernels.device import select_device

    # 1. Select the device, and then import what depends on it.
    selected = select_device(device, gpu)
    if selected.gpu is None:
        # Triton reads this variable when it is first imported, which happens below.
        os.environ["TRITON_INTERPRET"] = "1"
    from kernels.correctness.check import SUITE, check_all

    # 2. Check the implementations on the problems, and print the rows.
    names = implementation or list(implementations())
    _check_names(names, implementations())
    problems = parse_problems(gemm, conv) or [
        *map(Gemm.parse, SUITE["gemm"]),
        *map(Conv.parse, SUITE["conv"]),
    ]
    user_chose = bool(implementation or gemm or conv)
    rows = check_all(names, problems, selected)
    if not user_chose:
        # No implementation supports all built-in problems, so unsupported ones are not listed.
        rows = [row for row in rows if row.status != "unsupported"]
    if json:
        print_json([asdict(row) for row in rows])
    else:
        for row in rows:
            print(check_line(row))
    # 3. Print a summary, and exit.
    failures = sum(row.status in ("wrong", "error") for row in rows)
    passed = sum(row.status == "ok" for row in rows)
    unsupported = len(rows) - passed - failures
    summary = f"{counted(passed, 'check')} passed, {failures:,} failed"
    if user_chose:
        summary += f", {unsupported:,} not supported"
    note(f"{summary}.")
    if failures or not passed:
        raise typer.Exit(1)


def check_line(row: CheckRow) -> str:
    """Return the line that ``kernels check`` prints about one result."""
    error = ""
    if row.rel_error is not None and row.tolerance is not None:
        relation = "≤" if row.rel_error <= row.tolerance else ">"
        error = f"{row.rel_error:.1e} {relation} {row.tolerance:.1e}"
    return f"{row.status:12}{row.implementation:18}{row.problem:56} {error} {row.message}"


@app.command("compile")
def compile_command(
    arch: Annotated[
        list[str] | None,
        typer.Option(
            "--arch",
            help=(
                "GPU architecture to compile for; repeatable "
                "[default: sm_80, sm_89, sm_90, sm_100 and sm_120]."
            ),
        ),
    ] = None,
    implementation: Annotated[
        list[str] | None,
        typer.Option(
            "--implementation",
            help=(
                "Family of Triton kernels to compile, such as triton-conv; repeatable "
                "[default: all]."
            ),
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="Compile every candidate config, not only the preferred one."),
    ] = False,
    write: Annotated[
        Path | None, typer.Option("--write", help="Markdown file to write the table of kernels to.")
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            "--compare",
            help=(
                "Markdown file with an earlier table to compare with; the exit code is 1 if a cell "
                "differs."
            ),
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Compile the Triton kernels for GPU architectures; no GPU is needed.

    The exit code is 1 if a kernel cannot be compiled or its code is not as expected, if a cell of
    the table of kernels differs from the table given to ``--compare``, or if nothing was compiled.
    """
    from kernels.compiler.compilecheck import ARCHES, CompileRow, compile_rows
    from kernels.compiler.compiletable import compile_markdown, differing_cells

    # 1. Check the options, and read the earlier table.
    names = implementation or []
    _check_names(names, HAND_WRITTEN)
    if every and (write or compare):
        raise UserError(
            "--all does not work with --write or --compare, because the table of kernels covers "
            "only the preferred configs; leave --all out."
        )
    if write is not None:
        check_folder(write)
    try:
        recorded = None if compare is None else compare.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(
            f"{compare} is not text in UTF-8; give a Markdown file to --compare."
        ) from None
    except OSError as error:
        raise UserError(
            f"{compare} cannot be read: {error.strerror}. Give a readable file to --compare."
        ) from None

    # 2. Compile the kernels, and print each row when it is finished, or all of them as JSON.
    def show(row: CompileRow) -> None:
        print(
            f"{'ok' if row.ok else 'BAD':4}{row.kernel:18}{row.operation:6}{row.arch:7}"
            f"{row.dtype} {row.layout:5}align {row.alignment:2}  {row.mma:9}"
            f"{row.registers:4} registers {row.shared_bytes >> 10:4} KiB shared "
            f"{row.copy_bytes:6} B copies  {row.config}  {row.message}",
            flush=True,
        )

    rows = compile_rows(arch or ARCHES, every, names, done=None if json else show)
    if json:
        print_json([asdict(row) for row in rows])
    # 3. Write the new table, and compare it with the earlier one.
    document = compile_markdown(rows)
    if write is not None:
        write.write_text(document, encoding="utf-8")
    failures = [row for row in rows if not row.ok]
    note(f"Kernels checked: {len(rows):,}. Kernels with a problem: {len(failures):,}.")
    differences = [] if recorded is None else differing_cells(recorded, document)
    for line in differences:
        note(line)
    if differences:
        accept_command = target(f"compile-check WRITE={compare}", f"compile --write {compare}")
        note(f"To accept the changes, run: {accept_command}")
    if failures or differences or not rows:
        raise typer.Exit(1)


def _check_names(names: list[str], known: Collection[str]) -> None:
    """Refuse names that are not in ``known``, and Triton families if Triton is not installed."""
    for name in names:
        if name in HAND_WRITTEN and name not in implementations():
            raise UserError(needs_extra("triton"))
        if name in known:
            continue
        if name in implementations():
            raise UserError(
                f"implementation {name!r} has no Triton kernels to compile; {nearest(name, known)}"
            )
        raise UserError(f"implementation {name!r} is not known; {nearest(name, known)}")


def _plain_problem(op: str, dtype: str) -> Workload:
    """Return an ordinary problem of an operation, to find out whether a dtype is supported."""
    if op == "gemm":
        return Gemm(1024, 1024, 1024, dtype)
    if op == "conv":
        return Conv(
            n=8,
            c=64,
            h=28,
            w=28,
            kout=64,
            r=3,
            s=3,
            stride=(1, 1),
            padding=(1, 1),
            dilation=(1, 1),
            groups=1,
            dtype=dtype,
        )
    if op == "lstm":
        return Lstm(steps=16, minibatch=64, hidden=1024, features=1024, dtype=dtype)
    if op in SERIES:
        return Series(op, count=4, m=1024, n=1024, k=1024, dtype=dtype)
    return Layer(op, n=8, c=64, h=28, w=28, dtype=dtype)


if __name__ == "__main__":
    run(app, f"python -m {__package__}")
