"""How command lines of this repository run: one-line errors, exit codes, interrupts."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable
from functools import cache

import typer

from cpsim.errors import (
    CpsimError,
    InfeasibleError,
    MachineError,
    NotMeasuredError,
    OutOfMemoryError,
    UnmeasuredError,
    cut,
    plain,
)
from cpsim.runtime.allocator import keep_freed_memory
from cpsim.runtime.interrupts import INTERRUPTED
from cpsim.runtime.streams import prepare, say, silence

MACHINE_ERROR = 1
"""Exit code where not what was asked is wrong, but the machine: its disk, a scheduler."""
USER_ERROR = 2
KINDS = {"cannot": 3, "not_measured": 4, "does_not_fit": 5}
"""Exit codes where a case has no plain answer, by why; see ``cpsim.prediction.results.Refusal``."""
LONGEST_WORDS = 240
"""Characters of what is wrong with options, which quotes them whole."""
NO_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""What can be wrong with stdout."""


def exit_code(kinds: Iterable[str | None]) -> int:
    """Exit code of a question without an answer, of why its parts have none: that which is nearest to one."""
    known = [KINDS[kind] for kind in kinds if kind in KINDS]
    return max(known, default=USER_ERROR)


def run_app(app: typer.Typer, name: str) -> None:
    """Runs a command line: user errors are one line on stderr and exit code 2, those of the machine exit code 1.

    A reader of stdout that has had enough, e.g. ``head``, is no error.

    Args:
        app: its commands.
        name: what the user typed to start it.
    """
    prepare()
    keep_freed_memory()
    if "OMP_NUM_THREADS" not in os.environ:  # matrices are small, and threads that wait take cores from other processes
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    status = _status(app, name)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        silence("stdout")
    except OSError as error:
        silence("stdout")
        status = status or _fail(f"output: {error.strerror}", MACHINE_ERROR)
    sys.exit(status)


def _status(app: typer.Typer, name: str) -> int:
    try:
        return _command(app)(sys.argv[1:] or ["--help"], prog_name=name, standalone_mode=False) or 0
    except MachineError as error:
        return _fail(str(error), MACHINE_ERROR)
    except OutOfMemoryError as error:
        return _fail(str(error), KINDS["does_not_fit"])
    except (NotMeasuredError, UnmeasuredError) as error:
        return _fail(str(error), KINDS["not_measured"])
    except InfeasibleError as error:
        return _fail(str(error), KINDS["cannot"])
    except CpsimError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return 0
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # Click and Rich exit then
            return 0
        raise
    except MemoryError:
        return _fail("expected a case that fits into this machine's memory; give fewer tokens, documents or GPUs")
    except OSError as error:
        what = error.filename or ("output" if error.errno in NO_OUTPUT else "this machine")
        return _fail(f"{what}: {error.strerror or error}", MACHINE_ERROR)
    except Exception as error:
        if not hasattr(error, "format_message"):  # not a wrong option or argument: our own mistake
            raise
        asked = getattr(getattr(error, "ctx", None), "command_path", name)
        words = cut(plain(error.format_message()), LONGEST_WORDS)
        return _fail(f"{words} See `{asked} --help`.") if words else USER_ERROR


@cache
def _command(app: typer.Typer) -> Callable[..., int | None]:
    """What an app does, made once for a process, which may call it many times."""
    return typer.main.get_command(app)


def _fail(message: str, status: int = USER_ERROR) -> int:
    say(f"cpsim: {' '.join(message.split())}")
    return status
