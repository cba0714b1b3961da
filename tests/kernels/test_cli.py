from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.__main__ import check_line
from kernels.cli import _explain, parse_seconds
from kernels.common.errors import UserError
from kernels.correctness.check import CheckRow
from kernels.operation import OPERATIONS
from tests.support.command_line import KERNELS, command

ROOT = Path(__file__).resolve().parents[2]


def kernels(*arguments: str) -> subprocess.CompletedProcess[str]:
    return command(KERNELS, *arguments)


def process(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process, in the folder ``cwd``."""
    return subprocess.run(
        [sys.executable, "-m", "kernels", *arguments], cwd=cwd, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip


def test_list_says_what_is_supported_and_why_not() -> None:
    answer = kernels("list", "--device", "cpu", "--json")
    assert answer.returncode == 0
    rows = {(row["implementation"], row["op"]): row for row in json.loads(answer.stdout)}
    assert rows["cublas", "gemm"]["supports"] == []
    assert rows["cublas", "gemm"]["reason"]
    assert any("fp32" in row["supports"] for (_, op), row in rows.items() if op == "gemm")
    for op in OPERATIONS:  # an operation is not asked about as if it were a convolution
        answers = [row for (_, other), row in rows.items() if other == op]
        assert any("fp32" in row["supports"] for row in answers)
        assert not any("does not compute" in (row["reason"] or "") for row in answers)


@pytest.mark.parametrize(
    ("status", "error", "shown"),
    [("ok", 1e-3, "1.0e-03 ≤ 2.0e-03"), ("wrong", 1.0, "1.0e+00 > 2.0e-03"), ("wrong", None, "")],
)
def test_check_shows_on_which_side_of_the_tolerance_an_error_is(
    status: str, error: float | None, shown: str
) -> None:
    line = check_line(CheckRow("mkl", "8×8×8", status, error, 2e-3, "why"))
    assert line == f"{status:12}{'mkl':18}{'8×8×8':56} {shown} why"


def test_check_compares_every_implementation_and_prints_only_json() -> None:
    answer = kernels("check", "--device", "cpu", "--gemm", "33,17,65,bf16", "--json")
    assert answer.returncode == 0
    rows = {row["implementation"]: row for row in json.loads(answer.stdout)}
    keys = {"implementation", "problem", "status", "rel_error", "tolerance", "message"}
    assert all(set(row) == keys for row in rows.values())
    tiled = rows["triton-tiled"]  # runs in the interpreter, which may need an older NumPy
    assert tiled["status"] == "ok" or "NumPy before" in tiled["message"]
    if tiled["status"] == "ok":
        assert tiled["rel_error"] <= tiled["tolerance"]
    assert rows["cublas"]["status"] == "unsupported"


def test_check_fails_if_nothing_is_supported() -> None:
    answer = kernels("check", "--device", "cpu", "--implementation", "cudnn",
                 "--gemm", "8,8,8,fp32")  # fmt: skip
    assert answer.returncode == 1
    assert answer.stderr.strip() == "0 checks passed, 0 failed, 1 not supported."


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("check", "--gemm", "8,8,8"), 2, "--gemm takes"),
        (("check", "--gemm", "8,8,8,bf17"), 2, "did you mean 'bf16'"),
        (("check", "--implementation", "cubla"), 2, "did you mean 'cublas'"),
        (("check", "--device", "tpu"), 2, "--device takes"),
        (("compile", "--arch", "sm_91"), 2, "architecture 'sm_91' is not known"),
        (("compile", "--arch", "90"), 2, "did you mean 'sm_90'"),
        (("compile", "--arch", "cpu"), 2, "use one of sm_80"),
        (("compile", "--arch", "sm_70"), 2, "--arch sm_70 is too old"),
        (("compile", "--implementation", "mkl"), 2, "'mkl' has no Triton kernels to compile"),
        (("compile", "--compare", sys.executable), 2, "is not text in UTF-8"),
        (("compile", "--all", "--write", "a.md"), 2, "--all does not work with --write"),
        (("compile", "--all", "--compare", "a.md"), 2, "--all does not work with --write"),
        (("compile", "--write", "missing/a.md"), 2, "missing is not a folder, so a.md cannot be"),
        (("chekc",), 2, "No such command"),
        (("check", "--nonsense"), 2, "No such option"),
    ],
)
def test_a_usage_error_is_one_sentence_and_exit_2(
    arguments: tuple[str, ...], code: int, words: str
) -> None:
    answer = kernels(*arguments)
    assert answer.returncode == code
    assert answer.stdout == ""
    assert words in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(28, "No space left on device"), "No space left on device."),
        (OSError(13, "Permission denied", "a.md"), "Permission denied: a.md."),
        (RuntimeError("It failed."), "RuntimeError: It failed (for a traceback, add --debug)."),
    ],
)
def test_an_error_is_one_sentence_that_names_a_file_if_there_is_one(
    error: Exception, text: str
) -> None:
    assert _explain(error, "kernels") == (text, 1)


def test_debug_shows_where() -> None:
    answer = process("check", "--debug", "--gemm", "8,8,8")
    assert "Traceback" in answer.stderr
    assert answer.returncode == 2  # as without --debug


def test_it_runs_from_any_folder(tmp_path: Path) -> None:
    assert process("list", "--device", "cpu", cwd=tmp_path).returncode == 0


def plain_python(
    *arguments: str, close: bool = False, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a command line with changed environment variables, or without a standard output."""
    line = shlex.join([sys.executable, "-m", *arguments]) + (" >&-" if close else "")
    return subprocess.run(
        ["sh", "-c", line], cwd=ROOT, capture_output=True, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.slow
def test_a_terminal_without_unicode_gets_question_marks() -> None:
    asked = "sweeps", "show", "--plan", "square", "--machine", "nvidia-h100-sxm"
    done = plain_python(*asked, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert b"Error" not in done.stderr
    shape = "analysis", "predict", "--machine", "nvidia-h100-sxm", "--gemm", "64,64,64,bf16"
    told = plain_python(*shape, PYTHONIOENCODING="ascii")
    assert (told.returncode, b"?s" in told.stdout) == (0, True)  # µs


def test_a_closed_standard_output_is_no_error() -> None:
    shape = "analysis", "predict", "--machine", "nvidia-h100-sxm", "--gemm", "64,64,64,bf16"
    done = plain_python(*shape, close=True)
    assert done.returncode == 0
    assert b"Error" not in done.stderr


@pytest.mark.parametrize("text", ["9" * 400 + "m", "9" * 400, "1e3s", "-1m", "nan", "99999999h"])
def test_an_absurd_time_gets_a_sentence(text: str) -> None:
    with pytest.raises(UserError, match=r"--budget .*(give a time such as|more than a year)"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("body", "pipe", "code"),
    [
        ("[print('line') for _ in range(100_000)]", "| head -1", 0),
        ("print('line'); raise typer.Exit(1)", "| true", 1),
        ("print('line'); raise UserError('Give another one.')", "| true", 2),
        ("print('line'); raise KeyboardInterrupt", "| true", 130),
        ("os.write(closed_pipe(), b'x')", "| cat", 1),
        ("print('line')", "> /dev/full", 1),
    ],
)
def test_the_exit_code_does_not_depend_on_the_reader_of_the_output(
    body: str, pipe: str, code: int
) -> None:
    program = f"""
import os, time, typer
from kernels.cli import new_app, run
from kernels.common.errors import UserError

def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer

app = new_app("Test.")

@app.callback()
def group():
    pass

@app.command()
def work():
    time.sleep(0.2)  # the reader exits first
    {body}

run(app, "test")
"""
    line = f'"$PYTHON" -c "$PROGRAM" work {pipe}; exit "${{PIPESTATUS[0]}}"'
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "PROGRAM": program,
                   "PYTHONPATH": str(ROOT)}  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", line], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert "Exception ignored" not in done.stderr
