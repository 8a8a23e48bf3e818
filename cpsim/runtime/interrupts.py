"""What Ctrl-C does: a command ends at once, without a traceback, whatever it is in."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

INTERRUPTED: Final = 130
"""Exit code that shells know: 128 and the signal's number."""
_SHOW_CURSOR: Final = b"\x1b[?25h\n"


def end_at_once() -> None:
    """From now on an interrupt ends this process, and those that work for it, with code 130.

    Not by an exception: of those in compiled code, callbacks and pools some become tracebacks, others wait for work.
    """
    signal.signal(signal.SIGINT, _end)


def leave_to_parent() -> None:
    """From now on an interrupt does nothing to this process: who asked it to work ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def unwinding() -> Iterator[None]:
    """An interrupt is Python's exception within: for what has to end other programs or remove folders."""
    with _answered_by(signal.default_int_handler):
        yield


@contextmanager
def ignore_sigint() -> Iterator[None]:
    """Ignore SIGINT here and in child processes started here."""
    with _answered_by(signal.SIG_IGN):
        yield


@contextmanager
def _answered_by(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> None:
    del number, frame
    if sys.stderr.isatty():  # which a progress bar may have without a cursor
        os.write(sys.stderr.fileno(), _SHOW_CURSOR)
    for worker in getattr(sys.modules.get("multiprocessing"), "active_children", list)():
        worker.kill()
    os._exit(INTERRUPTED)
