"""Options, exit codes, error messages and JSON output that all command lines share."""

from __future__ import annotations

import io
import json
import os
import re
import select
import sys
import traceback
from contextlib import suppress
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup
from typer.main import get_command

from kernels.common.errors import UserError, error_summary
from kernels.common.program import needs_extra
from kernels.problem import Conv, Gemm, Problem

_SHOWN_CHARACTERS = 40  # longest part of an invalid time that an error message repeats
_MAX_SECONDS = 365 * 24 * 3600.0  # longest time that an option accepts: one year

GemmOption = Annotated[
    list[str] | None,
    typer.Option(
        "--gemm", help="GEMM as M,N,K,dtype[,layout[,batch]], by default in layout nt; repeatable."
    ),
]
ConvOption = Annotated[
    list[str] | None,
    typer.Option(
        "--conv",
        help=(
            "Convolution as N,C,H,W,KOUT,R,S,stride,padding,dilation,groups,dtype"
            "[,layout[,pass]], by default nhwc and fprop; repeatable."
        ),
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device", help="Device to use: gpu, cpu, or auto (a GPU if the machine has one)."
    ),
]
GpuOption = Annotated[int, typer.Option("--gpu", help="Number of the GPU to use, counted from 0.")]
GpusOption = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        help=(
            "GPUs to use together: all, or numbers such as 0,3 [default: the GPU that --gpu "
            "selects]."
        ),
    ),
]


def parse_problems(gemm: list[str] | None, conv: list[str] | None) -> list[Problem]:
    """Parse a command line's ``--gemm`` and ``--conv`` options into problems."""
    return [*map(Gemm.parse, gemm or []), *map(Conv.parse, conv or [])]


def parse_seconds(text: str | None, option: str = "budget") -> float | None:
    """Parse a time such as ``90s``, ``10m``, ``1.5h`` or ``90`` (seconds) into seconds.

    If ``text`` is None or empty, return None. ``option`` is the name of the command-line option,
    without its leading dashes, for error messages.

    Raises:
        UserError: if the text is not a positive time of at most a year.
    """
    if not text:
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([smh]?)", text)
    # A longer text is refused here, because the message about times above a year repeats the whole
    # text.
    is_too_long = len(text) > _SHOWN_CHARACTERS
    if match is None or is_too_long or float(match.group(1)) == 0:
        shown = text[:_SHOWN_CHARACTERS]
        raise UserError(f"--{option} is {shown!r}; give a time such as 90s, 10m or 2h.")
    number, unit = match.groups()
    seconds = float(number) * {"": 1, "s": 1, "m": 60, "h": 3600}[unit]
    if seconds > _MAX_SECONDS:
        raise UserError(f"--{option} {text} is more than a year; give a shorter time.")
    return seconds


def new_app(help_text: str, cls: type[TyperGroup] = TyperGroup) -> typer.Typer:
    """Return a Typer application with the settings that all command lines share."""
    return typer.Typer(
        cls=cls,
        help=help_text + " Add --debug to a command to print the traceback of an error.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def run(app: typer.Typer, program: str) -> None:
    """Run a command line and exit the process.

    The exit code is one of these:

    - 0: the work was done, or the reader of the output exited before the work ended,
    - 1: the work failed, or it found a fault, such as a wrong result or a slower case,
    - 2: the command line or another input is invalid, or an optional package is missing,
    - 3: ``compare --gate`` cannot decide,
    - 130: the command was interrupted.

    An error is printed on stderr without its traceback. With ``--debug`` anywhere on the command
    line, the traceback is printed instead.
    """
    # 1. Run the command, and print its error if it fails.
    _make_printable()
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = "--debug" in sys.argv[1:]
    command = get_command(app)
    exit_code = 0
    try:
        # The command's ``main`` is not called, because it would exit with code 1 if the reader of a
        # pipe has exited.
        with command.make_context(program, arguments) as context:
            command.invoke(context)
    except typer.Exit as requested_exit:
        exit_code = requested_exit.exit_code
    except KeyboardInterrupt:
        exit_code = 130
    except Exception as error:
        # If the reader of stdout has exited, as `| head` does, the output is not wanted any more.
        if not isinstance(error, BrokenPipeError) or _has_reader(sys.stdout):
            explanation, exit_code = _explain(error, program)
            with suppress(BrokenPipeError):  # the reader of stderr may have exited
                text = traceback.format_exc().rstrip() if debug else explanation
                print(text, file=sys.stderr, flush=True)
    # 2. Print the remaining output. Printing may fail because the reader has exited or the disk is
    # full.
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python flushes stdout once more when it exits, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            explanation, exit_code = _explain(error, program)
            print(explanation, file=sys.stderr)
    sys.exit(exit_code)


def _has_reader(stream: TextIO) -> bool:
    """Return False if a stream is a pipe whose reader has exited."""
    poll = select.poll()
    poll.register(stream, select.POLLOUT)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def _make_printable() -> None:
    """Prevent ``print`` from failing on closed streams and on terminals without Unicode."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the stream was closed before Python started
            # The null device stays open until the process exits.
            null_device = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, null_device)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _explain(error: Exception, program: str) -> tuple[str, int]:
    """Return the text to print for an error, and the exit code."""
    if isinstance(error, UserError):
        return str(error), error.exit_code
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "triton"):
        return needs_extra(error.name), 2
    if isinstance(error, OSError) and error.strerror:
        place = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{place}.", 1
    # Click's usage errors are recognised by their method ``format_message`` instead of their class,
    # because Typer may bring its own copy of Click. If no command was given, the message is the
    # help text.
    if hasattr(error, "format_message"):
        message = error.format_message()
        if not message or message.startswith("Usage:"):
            return message, 2
        command_path = getattr(getattr(error, "ctx", None), "command_path", program)
        return f"{message.rstrip('.')}. See `{command_path} --help`.", 2
    return f"{error_summary(error).rstrip('.')} (for a traceback, add --debug).", 1


def print_json(document: Any) -> None:
    """Print one JSON document on stdout.

    Raises:
        ValueError: if the document contains infinity or NaN, because JSON has neither.
    """
    print(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False))


def note(text: str) -> None:
    """Print a line for the user on stderr, so that stdout holds only the command's answer."""
    print(text, file=sys.stderr, flush=True)
