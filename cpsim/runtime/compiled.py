"""How inner functions are compiled that run millions of times, and where their machine code is kept.

Machine code lies in the user's cache folder, named by a digest of all that it holds: the sources of the function's
module and of its helpers' modules, and constants. So it outlasts a new installation of the same sources, and an edit of
any of them compiles what it concerns again.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import IO, Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, config, event, types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, NullCache
from numba.core.registry import CPUDispatcher
from numba.core.serialize import dumps
from numba.core.types.misc import unliteral
from numba.extending import intrinsic
from numba.misc.appdirs import AppDirs
from numpy.typing import NDArray

from cpsim.runtime.files import write
from cpsim.runtime.streams import say

try:
    import fcntl
except ImportError:  # Windows, where processes that start together compile the same
    fcntl = None  # type: ignore[assignment]

TOLD_AFTER_S: Final = 1.0, 3.0
"""Seconds of compiling after which stderr is told of it: where it is a terminal, and elsewhere."""
WAIT_S: Final = 60.0
"""How long to wait for another process that compiles the same, which may have been stopped."""


@cache
def folder() -> Path | None:
    """Where machine code is kept: ``NUMBA_CACHE_DIR``, or the user's cache folder (``XDG_CACHE_HOME``), or none if
    there is no such folder and none can be made. One that cannot be written to, or is full, is read from.
    """
    versions = f"{sys.implementation.cache_tag}-numba-{numba.__version__}-numpy-{np.__version__}"
    path = Path(config.CACHE_DIR or AppDirs("cpsim", False).user_cache_dir)
    if not config.CACHE_DIR and not path.is_absolute():  # nobody knows the user's home
        _tell_uncached(path, "the user has no home")
        return None
    try:
        (path / versions).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        _tell_uncached(path, getattr(error, "strerror", None) or str(error))
        return None
    return path / versions


_told: Final[set[Path]] = set()


def _tell_uncached(path: Path, why: str) -> None:
    """Say once, for all processes of a pool, that machine code cannot be kept."""
    first = multiprocessing.parent_process() is None or multiprocessing.current_process().name.endswith("Process-1")
    if first and path not in _told:
        again = "every process compiles cpsim's engines again (up to a minute)"
        say(f"cpsim: {path}: {why}: {again}; set NUMBA_CACHE_DIR to a folder that can be written to")
    _told.add(path)


@cache
def _content(file: str) -> str:
    return sha256(Path(file).read_bytes()).hexdigest()


_frozen: Final[dict[str, str]] = {}


def frozen(names: Mapping[str, Any]) -> str:
    """A digest of what machine code of a module holds: its source and constants, and those of its helpers' modules.

    Args:
        names: globals of a module that is fully imported.
    """
    file = names["__file__"]
    if file not in _frozen:
        held: list[Any] = [_content(__file__), _content(file)]
        for name, value in sorted(names.items()):
            if isinstance(value, CPUDispatcher) and (helper := value.py_func.__globals__) is not names:
                held.append((name, frozen(helper)))
            elif isinstance(value, bool | int | float | str | tuple) and not name.startswith("__"):
                held.append((name, value))
            elif isinstance(value, np.ndarray):
                held.append((name, value.dtype.str, value.shape, value.tobytes()))
        _frozen[file] = sha256(repr(held).encode()).hexdigest()
    return _frozen[file]


class _Place:
    """Where the machine code of one function is kept; what numba calls a locator."""

    def __init__(self, function: FunctionType) -> None:
        self.digest = frozen(function.__globals__)[:16]

    @classmethod
    def from_function(cls, function: FunctionType, _file: str) -> _Place | None:
        return cls(function) if folder() else None

    def ensure_cache_path(self) -> None: ...

    def get_cache_path(self) -> str:
        return str(folder())

    def get_source_stamp(self) -> str:
        return self.digest

    def get_disambiguator(self) -> str:
        return self.digest


class _Kept(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Place,)


class _Files:
    """The machine code of one function, a file for each combination of types; what numba calls a cache file.

    A file begins with a digest of the rest: machine code that is not whole must never run.
    """

    def __init__(self, where: Path, name: str) -> None:
        self.where, self.name = where, name

    def file(self, key: object) -> Path:
        """Of a combination of types."""
        return self.where / f"{self.name}.{sha256(repr(key).encode()).hexdigest()[:16]}.nbc"

    def load(self, key: object) -> Any:
        """What is kept, or None."""
        whole = self.file(key).read_bytes()
        if sha256(whole[32:]).digest() != whole[:32]:
            return None
        kept, data = pickle.loads(whole[32:])
        return data if kept == key else None

    def save(self, key: object, data: object) -> None:
        """Keeps it."""
        content: bytes = dumps((key, data))
        write(self.file(key), sha256(content).digest() + content)


class _Cache(FunctionCache):  # type: ignore[misc]
    _impl_class = _Kept

    def __init__(self, function: FunctionType) -> None:
        super().__init__(function)
        self._cache_file = _Files(Path(self._cache_path), self._impl.filename_base)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Machine code that is kept, or None: where there is none, where it is broken or its argument types are gone.

        Whatever is wrong with it, it is made and kept again.
        """
        try:
            return super().load_overload(sig, target_context)
        except Exception:
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keeps machine code, where there is room for it."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _tell_uncached(Path(self._cache_path), error.strerror or str(error))


@cache
def _locks() -> IO[bytes] | None:
    """A file each of whose bytes stands for a function; who compiles one has locked its byte."""
    where = folder()
    with suppress(OSError):
        return (where / "locks").open("ab") if where and fcntl else None
    return None


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """No other process is within for the same name, unless one has been for long."""
    file, byte = _locks(), int(sha256(name.encode()).hexdigest()[:7], 16)
    if file is None:
        yield
        return
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:  # of a file system without locks
            break
        else:
            break
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN, 1, byte)


class _Notice(event.Listener):  # type: ignore[misc]
    """Tells stderr once that compiling takes a while; processes of a pool leave it to their parent."""

    def __init__(self) -> None:
        self.depth, self.begun, self.spent, self.told = 0, 0.0, 0.0, False

    def on_start(self, _event: Any) -> None:
        now = time.monotonic()
        if not self.depth:
            self.begun = now
        self.depth += 1
        patience = TOLD_AFTER_S[not (sys.stderr and sys.stderr.isatty())]
        if not self.told and self.spent + now - self.begun > patience and multiprocessing.parent_process() is None:
            self.told = True
            say("cpsim: compiling its engines, once for this machine (up to a minute) ...")

    def on_end(self, _event: Any) -> None:
        self.depth -= 1
        if not self.depth:
            self.spent += time.monotonic() - self.begun


_notice: Final = _Notice()


class Engine(CPUDispatcher):  # type: ignore[misc]
    """A function that is compiled for each combination of argument types that it is called with, unless it is kept."""

    _cache: Any

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """For a call by compiled code. An integer is one type, whether the caller writes it as a constant or not:
        numba's own dispatchers compile a function again for every constant.
        """
        named = {name: unliteral(kind) for name, kind in kws.items()}
        return super().get_call_template(tuple(map(unliteral, args)), named)

    def compile(self, sig: Any) -> Any:
        """Machine code of one combination of types. Of several processes that want it one compiles, the others wait."""
        if isinstance(self._cache, NullCache) and folder():
            self._cache = _Cache(self.py_func)
        with (
            _alone(f"{self.py_func.__module__}.{self.py_func.__qualname__}"),
            event.install_listener("numba:compile", _notice),
        ):
            return super().compile(sig)


def compiled(**options: Any) -> Callable[[Any], Any]:
    """A decorator like ``numba.njit``.

    Args:
        options: of ``numba.njit``.
    """
    return partial(Engine, targetoptions={"nopython": True, "boundscheck": None, **options})


bare: Final = partial(compiled, nogil=True, error_model="numpy", _nrt=False)
"""Without counting references to arrays, which no such function makes or keeps. With counts every call of a helper
costs two atomic increments for each array that it is given, which was two thirds of the event engine's time."""
inlined: Final = partial(bare, inline="always")
"""Like ``bare``, for a helper that becomes part of its callers."""


def unsigned(*indices: NDArray[Any]) -> list[NDArray[Any]]:
    """Views of integers that are not negative: compiled code asks of every signed index whether it counts from the end,
    which takes a third of what loops over a schedule do.
    """
    return [column.view(f"u{column.itemsize}") for column in indices]


def _prefetch(typing_context, array, index):  # type: ignore[no-untyped-def]  # noqa: ARG001
    def generate(context, builder, signature, given):  # type: ignore[no-untyped-def]
        kind, index_type = signature.args
        position = context.cast(builder, given[1], index_type, types.intp)
        made = context.make_array(kind)(context, builder, given[0])
        item = cgutils.get_item_pointer(context, builder, kind, made, [position], wraparound=False)
        address, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        wanted = ir.FunctionType(ir.VoidType(), [address, number, number, number])
        call = builder.module.declare_intrinsic("llvm.prefetch", [address], wanted)
        for_writing, into_all_caches, data = number(1), number(3), number(1)
        builder.call(call, [builder.bitcast(item, address), for_writing, into_all_caches, data])
        return context.get_dummy_value()

    return types.void(array, index), generate


prefetch: Final[Any] = intrinsic(_prefetch)
"""``prefetch(array, index)`` begins to fetch an element from memory; the index may be beyond the array's end."""
