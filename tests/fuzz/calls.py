"""One command of `cpsim` inside this process, as a user meets it, within limits of time and memory."""

import faulthandler
import io
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from cpsim.cli.app import main

SECONDS = 10
"""Of the CPU, for one command; of the clock ten times as many, since other tests may run beside it."""
NBYTES = 10**9 - 25 * 10**7
"""Memory that a command may need beyond that of an interpreter which has loaded everything: 1 GB with it."""


class Hang(BaseException):
    """A command that does not end; nothing of cpsim's catches it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command said."""

    status: int
    out: str
    err: str
    nbytes: int
    """Memory that it needed beyond what was there before."""


def call(arguments: Sequence[str], *, limited: bool = True) -> Answer:
    """Runs a command, within limits or not, in an environment of its own, which `--force` changes. What is not a
    `SystemExit` leaves this function, as it would end with a traceback."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", newline="")
    status: object = None
    before, limits = _forget_peak(), _limits() if limited else nullcontext()
    alone = mock.patch.object(sys, "argv", ["cpsim", *arguments]), mock.patch.dict(os.environ)
    with alone[0], alone[1], redirect_stdout(out), redirect_stderr(err), limits:
        try:
            main()
        except SystemExit as end:
            status = end.code
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8"))  # type: ignore[attr-defined]
    assert isinstance(status, int), f"ended with {status!r}"
    return Answer(status, texts[0], texts[1], max(0, _peak() - before))


@contextmanager
def _limits() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang(f"more than {SECONDS} s")

    before = {name: signal.signal(name, stop) for name in (signal.SIGPROF, signal.SIGALRM)}
    memory = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + 4 * 10**9, memory[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 10 * SECONDS)
    faulthandler.dump_traceback_later(12 * SECONDS, exit=True, file=sys.__stderr__)  # compiled code hears no signals
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, memory)
        for name, handler in before.items():
            signal.signal(name, handler)


def _forget_peak() -> int:
    """Resident memory now [bytes], which is the peak from now on."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])
