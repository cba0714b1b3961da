"""Make Triton's interpreter faster: omit two kinds of work that the tests do not need.

If Triton is not installed, or its internals are not those of the patched versions, nothing changes.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch


def _speed_up_interpreter() -> None:
    """Turn off overflow checks without debugging, and cache the builtins of each package."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    builder, patch_attr = interpreter.interpreter_builder, interpreter._patch_attr
    if not builder.options.debug:  # without debugging, the results of overflow checks are not used
        builder.options = replace(builder.options, sanitize_overflow=False)

    @functools.cache
    def builtins(package: Any) -> tuple[str, ...]:
        return tuple(name for name, member in inspect.getmembers(package) if is_builtin(member))

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        """Patch like the interpreter's function, which searches all members at every call."""
        for name in builtins(package):
            if is_builtin(member := getattr(package, name)):
                patch_attr(package, name, member, builder, scope)

    if [*inspect.signature(interpreter._patch_builtin).parameters] == ["pkg", "builder", "scope"]:
        interpreter._patch_builtin = patch_builtin


if not torch.cuda.is_available():
    with suppress(ImportError, AttributeError, TypeError):
        _speed_up_interpreter()
