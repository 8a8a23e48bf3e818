"""How inner functions are compiled that run millions of times.

Machine code is kept beside the sources. numba alone would take it for current until the file that a function is in
changes, but it also holds what the function takes from other files: helpers, and constants of the module.
"""

from collections.abc import Mapping
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.core.caching import CacheImpl
from numba.core.dispatcher import Dispatcher
from numba.extending import intrinsic
from numpy.typing import NDArray


@cache
def _content(file: str) -> str:
    return sha256(Path(file).read_bytes()).hexdigest()


def frozen(names: Mapping[str, Any]) -> list[Any]:
    """What machine code of a module holds of the world: constants, and all of the modules whose helpers it calls.

    Args:
        names: globals of the module.
    """
    held: list[Any] = [_content(names["__file__"])]
    for name, value in names.items():
        if isinstance(value, Dispatcher) and (helper := value.py_func.__globals__) is not names:
            held.append((name, frozen(helper)))
        elif isinstance(value, bool | int | float | str | tuple) and not name.startswith("__"):
            held.append((name, value))
        elif isinstance(value, np.ndarray):
            held.append((name, value.dtype.str, value.shape, value.tobytes()))
    return held


def _stamped(locator: Any) -> Any:
    """A place for machine code of this package, which is current while all that it holds stays as it is."""

    class Stamped(locator):  # type: ignore[misc]
        @classmethod
        def from_function(cls, function: Any, file: str) -> Any:
            made = super().from_function(function, file) if function.__module__.startswith("cpsim.") else None
            if made is not None:
                made.stamp = sha256(repr((_content(__file__), frozen(function.__globals__))).encode()).hexdigest()
            return made

        def get_source_stamp(self) -> str:
            return str(self.stamp)

    return Stamped


CacheImpl._locator_classes = [*map(_stamped, CacheImpl._locator_classes), *CacheImpl._locator_classes]

compiled: Final = partial(njit, cache=True)
bare: Final = partial(njit, cache=True, nogil=True, error_model="numpy", _nrt=False)
"""Without counting references to arrays, which no such function makes or keeps. With counts every call of a helper
costs two atomic increments for each array that it is given, which was two thirds of the event engine's time."""
inlined: Final = partial(bare, inline="always")
"""The same for a helper that becomes part of its callers."""


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
        item = cgutils.get_item_pointer(  # type: ignore[no-untyped-call]
            context, builder, kind, made, [position], wraparound=False
        )
        address, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        wanted = ir.FunctionType(ir.VoidType(), [address, number, number, number])
        call = builder.module.declare_intrinsic("llvm.prefetch", [address], wanted)
        for_writing, into_all_caches, data = number(1), number(3), number(1)
        builder.call(call, [builder.bitcast(item, address), for_writing, into_all_caches, data])
        return context.get_dummy_value()

    return types.void(array, index), generate


prefetch: Final[Any] = intrinsic(_prefetch)
"""Of (array, index): begin to fetch from memory what the array has there, which may be beyond its end."""
