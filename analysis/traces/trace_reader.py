"""Read the events of a trace from PyTorch's profiler one by one.

A trace is one JSON document, whose list ``traceEvents`` may have millions of small mappings. Only a
window of the text is in memory at a time. Python's JSON decoder reads one value after another from
this window. This method takes about as long as the streaming parser ijson with its C backend. For a
trace of 50 MB, it takes a tenth of the memory that the module ``json`` takes to load the whole file
(results/accuracy/trace-speed.jsonl).
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from kernels.common.counts import counted
from kernels.common.errors import UserError

EVENTS = "traceEvents"
"""Key of a trace's list of events."""

DEVICES = "deviceProperties"
"""Key of a trace's list of GPUs, which has all GPUs of the node."""

_WINDOW = 1 << 20  # characters that are read at a time
_LONGEST = 16 << 20
"""Approximate number of characters above which a value counts as damaged. An event has hundreds of
characters, or thousands with a long stack."""

_LONGEST_TAIL = len("e+5")  # if this many characters follow a number, the number is complete

_GZIP = b"\x1f\x8b"
_SPACE = re.compile(r"[ \t\r\n]*")


def read_events(path: Path, header: dict[str, Any]) -> Iterator[Any]:
    """Yield the events of a trace in the order in which the file lists them.

    Args:
        path: path of the trace, a JSON file that may be compressed with gzip.
        header: receives the list of GPUs under the key :data:`DEVICES`, if the trace has this list.
            The list may be at the end of the file, so ``header`` is complete only after all events
            have been yielded.

    Raises:
        UserError: if the file cannot be read, is damaged, or is not a trace.
    """
    try:
        with _opened(path) as file:
            yield from _document(_Window(file, path), header)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise UserError(
            f"{path} is a damaged gzip file. Copy the trace again, or record it again."
        ) from None
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror or error}. Check its path and permissions."
        ) from None


def _opened(path: Path) -> IO[str]:
    with open(path, "rb") as file:
        compressed = file.read(len(_GZIP)) == _GZIP
    # Replace bytes that are not UTF-8, because a kernel's name may have bytes of any encoding.
    if compressed:
        return gzip.open(path, "rt", encoding="utf-8-sig", errors="replace")
    return open(path, encoding="utf-8-sig", errors="replace")


def _document(window: _Window, header: dict[str, Any]) -> Iterator[Any]:
    """Yield the events of a trace.

    A trace is a list of events, or a mapping that has this list under the key :data:`EVENTS`.
    """
    first = window.next_character()
    if first == "[":
        yield from window.items()
        return
    if first != "{":
        raise window.not_a_trace()
    has_events = False
    window.skip()
    while window.next_character() != "}":
        name = window.value()
        if not isinstance(name, str) or window.next_character() != ":":
            raise window.damaged()
        window.skip()
        if name == EVENTS:
            if window.next_character() != "[":
                raise window.not_a_trace()
            has_events = True
            yield from window.items()
        else:
            value = window.value()
            if name == DEVICES:
                header[name] = value
        if window.next_character() == ",":
            window.skip()
        elif window.next_character() != "}":
            raise window.damaged()
    if not has_events:
        raise window.not_a_trace()


class _Window:
    """Part of a file's text, from which values are read one after another."""

    def __init__(self, file: IO[str], path: Path) -> None:
        self._file = file
        self._path = path
        # Names of kernels and files may have control characters, which strict JSON forbids.
        self._decode = json.JSONDecoder(strict=False).raw_decode
        self._text = ""
        self._position = 0  # position in the text of the next character to read
        self._values_read = 0  # number of values that have been read from the file

    def next_character(self) -> str:
        """Return the next character that is not white space, or "" at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._position)
            assert match is not None  # the pattern also matches an empty string
            self._position = match.end()
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._read_on():
                return ""

    def skip(self) -> None:
        """Move past the character that :meth:`next_character` returned."""
        self._position += 1

    def value(self) -> Any:
        self.next_character()
        while True:
            try:
                value, end = self._decode(self._text, self._position)
            except RecursionError:
                raise self.damaged() from None
            except ValueError:
                # The value may continue beyond the window.
                if len(self._text) - self._position > _LONGEST or not self._read_on():
                    raise self.damaged() from None
                continue
            # A number near the end of the window may continue: the decoder reads "1e+" as 1, but it
            # may be the beginning of 1e+5.
            may_continue = len(self._text) - end < _LONGEST_TAIL
            if may_continue and self._read_on():
                continue
            self._position = end
            self._values_read += 1
            return value

    def items(self) -> Iterator[Any]:
        """Yield the values of the list whose ``[`` is the next character."""
        self.skip()
        if self.next_character() == "]":
            self.skip()
            return
        while True:
            yield self.value()
            separator = self.next_character()
            self.skip()
            if separator == "]":
                return
            if separator != ",":
                raise self.damaged()

    def damaged(self) -> UserError:
        return UserError(
            f"{self._path} is damaged or incomplete after "
            f"{counted(self._values_read, 'JSON value')}. Copy the trace again, or record it again."
        )

    def not_a_trace(self) -> UserError:
        return UserError(
            f"{self._path} has no list {EVENTS!r}, so it is not a trace from PyTorch's profiler. "
            "Write a trace with the profiler's method export_chrome_trace."
        )

    def _read_on(self) -> bool:
        """Append the file's next part to the unread text; return False at the end of the file."""
        more = self._file.read(_WINDOW)
        if not more:
            return False
        self._text = self._text[self._position :] + more
        self._position = 0
        return True
