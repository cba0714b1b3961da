"""Two things that Triton's interpreter does for nothing, left out to save much of its time.

Where Triton is missing, or its insides are not the ones meant here, all stays as it is.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch


def _hurry() -> None:
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    builder, patch_attr = interpreter.interpreter_builder, interpreter._patch_attr
    if not builder.options.debug:  # then what it finds of overflows is thrown away
        builder.options = replace(builder.options, sanitize_overflow=False)

    @functools.cache
    def builtins(package: Any) -> tuple[str, ...]:
        return tuple(name for name, member in inspect.getmembers(package) if is_builtin(member))

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        """As the interpreter's own, which looks all members through at every call of a function."""
        for name in builtins(package):
            if is_builtin(member := getattr(package, name)):
                patch_attr(package, name, member, builder, scope)

    if [*inspect.signature(interpreter._patch_builtin).parameters] == ["pkg", "builder", "scope"]:
        interpreter._patch_builtin = patch_builtin


if not torch.cuda.is_available():
    with suppress(ImportError, AttributeError, TypeError):
        _hurry()
