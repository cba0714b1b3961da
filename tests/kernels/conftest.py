"""Two things that Triton's interpreter does for nothing, left out: it takes half the time then.

Where Triton's insides differ from the ones meant here, the interpreter stays as it is.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any

import torch
from triton.language.core import is_builtin
from triton.runtime import interpreter

_patch = getattr(interpreter, "_patch_builtin", None)


@functools.cache
def _builtins(package: Any) -> tuple[str, ...]:
    return tuple(name for name, member in inspect.getmembers(package) if is_builtin(member))


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """As the interpreter's own, which looks all members through at every call of a function."""
    for name in _builtins(package):
        if is_builtin(member := getattr(package, name)):
            interpreter._patch_attr(package, name, member, builder, scope)


if not torch.cuda.is_available():
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # then what it finds of overflows is thrown away
        builder.options = replace(builder.options, sanitize_overflow=False)
    if _patch and [*inspect.signature(_patch).parameters] == ["pkg", "builder", "scope"]:
        interpreter._patch_builtin = _patch_builtin
