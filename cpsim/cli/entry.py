"""How command lines of this repository run: one-line errors, exit codes, interrupts."""

from __future__ import annotations

import os
import sys

import typer

from cpsim.errors import CpsimError
from cpsim.runtime.allocator import keep_freed_memory
from cpsim.runtime.interrupts import INTERRUPTED

USER_ERROR = 2


def run_app(app: typer.Typer, name: str) -> None:
    """Runs a command line: user errors are one line on stderr and exit code 2.

    Args:
        app: its commands.
        name: what the user typed to start it.
    """
    keep_freed_memory()
    if "OMP_NUM_THREADS" not in os.environ:  # matrices are small, and threads that wait take cores from other processes
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        status = app(sys.argv[1:] or ["--help"], prog_name=name, standalone_mode=False)
    except CpsimError as error:
        status = _fail(str(error))
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:  # the reader, e.g. `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except MemoryError:
        status = _fail("expected a case that fits into this machine's memory; give fewer tokens, documents or GPUs")
    except OSError as error:
        status = _fail(f"{error.filename or 'output'}: {error.strerror or error}")
    except Exception as error:
        if not hasattr(error, "format_message"):  # not a wrong option or argument: our own mistake
            raise
        asked = getattr(getattr(error, "ctx", None), "command_path", name)
        status = _fail(f"{error.format_message()} See `{asked} --help`.") if error.format_message() else USER_ERROR
    sys.exit(status or 0)


def _fail(message: str) -> int:
    print(f"cpsim: {' '.join(message.split())}", file=sys.stderr)
    return USER_ERROR
