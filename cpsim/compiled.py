"""How inner functions are compiled that run millions of times."""

from functools import partial
from typing import Final

from numba import njit

bare: Final = partial(njit, cache=True, nogil=True, error_model="numpy", _nrt=False)
"""Without counting references to arrays, which no such function makes or keeps. With counts every call of a helper
costs two atomic increments for each array that it is given, which was two thirds of the event engine's time."""
inlined: Final = partial(bare, inline="always")
"""The same for a helper that becomes part of its callers."""
