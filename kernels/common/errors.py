"""Errors of the project, and suggestions for misspelled words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class UserError(ValueError):
    """Error that a user can fix, such as bad input or the choice of an unsuitable machine.

    Its text says what is wrong and what to do. The command line prints the text and exits with
    ``exit_code``, which is 2 for bad input.
    """

    def __init__(self, text: str, exit_code: int = 2) -> None:
        super().__init__(text)
        self.exit_code = exit_code


_DTYPES = {
    "float": "fp32", "float32": "fp32", "half": "fp16", "float16": "fp16", "bfloat16": "bf16",
    "float8": "fp8",
}  # fmt: skip
"""Our names of dtypes, by the names that frameworks use."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggest the valid word that is most similar, or list all valid words if none is similar.

    For a framework's name of a dtype, suggest our name.

    >>> nearest("bf61", ["bf16", "fp32"]), nearest("torch.float32", ["tf32", "fp32"])
    ("did you mean 'bf16'?", "did you mean 'fp32'?")
    """
    words = list(known)
    dtype = _DTYPES.get(word.lower().removeprefix("torch."))
    if dtype in words:
        return f"did you mean {dtype!r}?"
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    if len(words) == 1:
        return f"use {words[0]}."
    return f"use one of {', '.join(words)}."


# Start of the text of a CompilationError of Triton: the line and column in the kernel's source.
_QUOTES_SOURCE = re.compile(r"at \d+:\d+:")


def error_summary(error: Exception) -> str:
    """Return an error's type and the line of its text that says most, as in ``KeyError: 'bf61'``.

    This is the first line, except in two errors of Triton. One quotes the kernel's source before
    the reason. The other quotes all messages of ``ptxas``, of which the first is the reason.
    """
    text = str(error).strip()
    _, _, ptxas_messages = text.partition("`ptxas` stderr:\n")
    if ptxas_messages:
        _, _, line = ptxas_messages.partition("; ")  # after the name of a temporary file
        line = " ".join((line or ptxas_messages).splitlines()[0].split())
    elif _QUOTES_SOURCE.match(text):
        line = text.splitlines()[-1].strip()
    else:
        line = text.partition("\n")[0]
    return f"{type(error).__name__}: {line or 'no message'}"


class WrongResultError(Exception):
    """Error that is raised when a launch computes a wrong result."""
