"""How inner functions are compiled that run millions of times."""

from functools import partial
from typing import Any, Final

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

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
