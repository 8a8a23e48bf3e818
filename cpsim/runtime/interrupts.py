"""What Ctrl-C and being told to end do: a command ends at once, without a traceback, whatever it is in."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

INTERRUPTED: Final = 130
"""Exit code that shells know: 128 and the signal's number."""
_SHOW_CURSOR: Final = b"\x1b[?25h\n"
Handler = Callable[[int, FrameType | None], Any] | int


def end_at_once() -> None:
    """From now on an interrupt, or being told to end, ends this process and those that work for it: code 130, or 143.

    Not by an exception: of those in compiled code, callbacks and pools some become tracebacks, others wait for work.
    """
    _answer(signal.SIGINT, _end)
    _answer(signal.SIGTERM, _end)


def leave_to_parent() -> None:
    """From now on an interrupt does nothing to this process: who asked it to work ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def unwinding() -> Iterator[None]:
    """Interrupts are Python's exceptions within: for what has to end other programs or remove folders."""
    before = _answer(signal.SIGINT, signal.default_int_handler), _answer(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        _answer(signal.SIGINT, before[0])
        _answer(signal.SIGTERM, before[1])


@contextmanager
def ignore_sigint() -> Iterator[None]:
    """Ignore SIGINT here and in child processes started here."""
    before = _answer(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _answer(number: signal.Signals, handler: Handler) -> Handler:
    """Sets what a signal does, and returns what it did; one that whoever started this process ignores stays ignored,
    as with ``nohup``.
    """
    before = signal.getsignal(number) or signal.SIG_DFL
    if before != signal.SIG_IGN:
        signal.signal(number, handler)
    return before


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    sys.exit(128 + number)


def _end(number: int, frame: FrameType | None) -> None:
    del frame
    terminal = sys.__stderr__  # a progress bar, which may have left it without a cursor, stands in for sys.stderr
    if terminal and terminal.isatty():
        os.write(terminal.fileno(), _SHOW_CURSOR)
    for worker in getattr(sys.modules.get("multiprocessing"), "active_children", list)():
        worker.kill()
    os._exit(128 + number)
