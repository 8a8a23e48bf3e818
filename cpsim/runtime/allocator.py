"""Freed memory is kept for the next prediction."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES: Final = 1 << 24
"""Free memory at the end of the heap beyond which it is given back."""
ARRAY_BYTES: Final = 1 << 20
"""Size of arrays that are always given back: those of a schedule of half a million ops, which would leave holes in the
heap that nothing else fits into, a sixth of the memory that such a prediction needs."""


def keep_freed_memory() -> None:
    """Tell glibc's malloc that this process soon wants again what it frees; no other allocator is told anything.

    Arrays of a prediction are just large enough that glibc gives their pages back to the system after each one, which
    then has to clear new ones. Processes of cpsim's own call this.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        library.mallopt(M_MMAP_THRESHOLD, ARRAY_BYTES)
