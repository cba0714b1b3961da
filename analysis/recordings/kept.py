"""Keep what was read from a folder until its files change.

Several parts of a command read the same recording, and reading a recording may take a second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, TypeVarTuple

_Others = TypeVarTuple("_Others")
_Result = TypeVar("_Result")

_MOST_KEPT = 4  # results kept for each function; a table may have a million rows


def until_changed(
    *names: str,
) -> Callable[[Callable[[Path, *_Others], _Result]], Callable[[Path, *_Others], _Result]]:
    """Return a decorator for a function that reads the files with these names in a folder.

    The folder is the function's first argument; other arguments must be hashable. While none of the
    files changes, the decorated function may return the same object again, so its callers must not
    modify the object.
    """

    def decorate(
        read: Callable[[Path, *_Others], _Result],
    ) -> Callable[[Path, *_Others], _Result]:
        # The versions are arguments only so that the cache distinguishes the files' versions.
        def read_version(versions: object, folder: Path, *others: *_Others) -> _Result:
            return read(folder, *others)

        read_cached: Callable[..., _Result] = functools.lru_cache(_MOST_KEPT)(read_version)

        @functools.wraps(read)
        def read_unless_kept(folder: Path, /, *others: *_Others) -> _Result:
            # The versions are taken before reading. If a file changes in the meantime, the next
            # call finds other versions, and reads the file again.
            versions = tuple(_version(folder / name) for name in names)
            return read_cached(versions, folder, *others)

        return read_unless_kept

    return decorate


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
