"""Exception classes, summaries of errors, and suggestions for misspelled words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class UserError(ValueError):
    """Error that a user can fix, such as bad input or the choice of an unsuitable machine.

    Its text says what is wrong and what to do. A command prints the text and exits with
    ``exit_code``, which is 2 for bad input.
    """

    def __init__(self, text: str, exit_code: int = 2) -> None:
        super().__init__(text)
        self.exit_code = exit_code


_DTYPES = {
    "float": "fp32", "float32": "fp32", "half": "fp16", "float16": "fp16", "bfloat16": "bf16",
    "float8": "fp8",
}  # fmt: skip
"""Our names for dtypes, by the names that frameworks use."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggest the valid word that is most similar, or list all valid words if none is similar.

    If ``word`` is a framework's name for a dtype and our name is valid, suggest our name.

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


def error_summary(error: Exception) -> str:
    """Summarise an error as its type and its most informative line, as in ``KeyError: 'bf61'``.

    For most errors, that is the first line. A ``PTXASError`` of Triton quotes all messages of
    ``ptxas``, so the first error among them is used. A ``CompilationError`` of Triton quotes the
    kernel's source before the reason, so the first line of the reason is used.
    """
    return f"{type(error).__name__}: {_reason(error) or 'no message'}"


def _reason(error: BaseException) -> str:
    # 1. Find the first error among the messages of ptxas, after the name of a temporary file.
    text = str(error).strip()
    _, _, ptxas_output = text.partition("`ptxas` stderr:\n")
    for message in ptxas_output.partition("Repro command:")[0].splitlines():
        if re.search(r"\b(error|fatal)\b", message):
            place, _, reason = message.partition("; ")
            return " ".join((reason or place).split())
    # 2. Find the reason of a CompilationError. If a function that the kernel calls cannot be
    #    compiled, the error has no reason, but its cause has one.
    if hasattr(error, "error_message"):
        if not error.error_message and error.__cause__ is not None:
            return _reason(error.__cause__)
        text = str(error.error_message or text).strip()
    return next(iter(text.splitlines()), "")


class WrongResultError(Exception):
    """Error that is raised if a launch returns a wrong result or changes its operands."""
