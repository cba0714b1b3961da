"""Signals of a process that tests start, as a terminal's shell leaves them."""

from __future__ import annotations

import signal


def as_in_a_terminal() -> None:
    """Make this process end at Ctrl-C and when its terminal closes; for ``preexec_fn``.

    Processes in a shell's background ignore Ctrl-C, and those under nohup a closed terminal. Their
    children inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
