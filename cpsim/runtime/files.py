"""Files: written whole or not at all, remembered until they change, and folders that one process at a time works in."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import stat
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

try:
    import fcntl
except ImportError:  # Windows, which has other locks
    fcntl = None  # type: ignore[assignment]

UNFINISHED: Final = ".cpsim-"
"""How names of files begin that are being written; a process that is killed may leave one."""
OPEN_FILES: Final = ("/dev/fd/", "/dev/std", "/proc/")
"""Where names stand for what a process holds open, which cannot be replaced."""
HELD: Final = "_lock"
"""In a folder: who works in it."""
NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
REMEMBERED: Final = 64
"""Values that a function remembers at most."""

Args = ParamSpec("Args")
Value = TypeVar("Value")


def write(path: Path, content: str | bytes) -> None:
    """Writes a file whole or not at all: beside it first, then into its place.

    Who reads meanwhile, is killed or has no space left finds the old content, or the new. A link stays a link; devices
    and pipes, and files whose folder cannot be written to, are written to as they are.

    Raises:
        OSError: it cannot be written; names it.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        target = Path(os.path.realpath(path))
        if str(path).startswith(OPEN_FILES) or (path.exists() and not path.is_file()):
            _put(path, data, "wb")
            return
        try:
            _replace(target, data)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EXDEV) or not target.is_file():
                raise
            _put(target, data, "wb")
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def _replace(target: Path, data: bytes) -> None:
    beside = target.with_name(f"{UNFINISHED}{os.getpid()}-{secrets.token_hex(4)}")
    try:
        _put(beside, data, "xb")
        with suppress(OSError):
            beside.chmod(stat.S_IMODE(target.stat().st_mode))
        beside.replace(target)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def _put(path: Path, data: bytes, mode: str) -> None:
    with open(path, mode) as file:
        file.write(data)
        file.flush()
        with suppress(OSError):  # of devices and pipes
            os.fsync(file.fileno())


@contextmanager
def alone_in(folder: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """No other process is within for the same folder; the system lets go of it with the process, however that ends.

    What killed processes left unfinished there is removed.

    Args:
        folder: where they write; both must lock it.
        tell: called with a line where the file system has no locks, and nobody is kept out.

    Raises:
        BlockingIOError: another process is; says which.
        OSError: the folder cannot be written to.
    """
    with (folder / HELD).open("a+", encoding="utf-8") as file:
        try:
            if fcntl:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            who = " ".join(file.read(200).split()) or "another process"
            raise BlockingIOError(errno.EAGAIN, f"{who} writes there", str(folder)) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            tell(f"{folder}: its file system has no locks; see to it that nobody else writes there")
        else:
            for left in (*folder.glob(f"{UNFINISHED}*"), *folder.glob("_part-*")):
                left.unlink(missing_ok=True)
        with suppress(OSError):
            file.truncate(0)
            now = datetime.now().astimezone().isoformat(" ", "seconds")
            file.write(f"process {os.getpid()} on {socket.gethostname()}, since {now},\n")
            file.flush()
        yield


Stamp = tuple[int, ...] | None
_rest_on: ContextVar[dict[Path, Stamp] | None] = ContextVar("_rest_on", default=None)


def noted(path: Path) -> Path:
    """The path; what is being loaded rests on what is there, or on there being nothing; see ``while_unchanged``."""
    if (files := _rest_on.get()) is not None:
        files.setdefault(path, _stamp(path))
    return path


def _stamp(path: Path) -> Stamp:
    """What changes with the content of a file; None where there is none."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def while_unchanged(load: Callable[Args, Value]) -> Callable[Args, Value]:
    """A decorator: what a function made of files is remembered until one of those that it ``noted`` changes."""
    known: dict[Hashable, tuple[Any, dict[Path, Stamp]]] = {}

    @wraps(load)
    def current(*args: Args.args, **kwargs: Args.kwargs) -> Value:
        key, outer = (args, tuple(sorted(kwargs.items()))), _rest_on.get()
        value, files = known.get(key, (None, {}))
        if key in known and all(_stamp(path) == stamp for path, stamp in files.items()):
            if outer is not None:
                outer.update(files)
            return value  # type: ignore[no-any-return]
        token = _rest_on.set(files := {})
        try:
            value = load(*args, **kwargs)
        finally:
            _rest_on.reset(token)
            if outer is not None:
                outer.update(files)
        known.pop(key, None)
        known[key] = value, files
        while len(known) > REMEMBERED:
            known.pop(next(iter(known)))
        return value

    return current
