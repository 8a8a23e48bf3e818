"""Freed memory is kept for the next prediction."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES: Final = 1 << 22
"""Free memory at the end of the heap beyond which it is given back, and the size of arrays that always are. Arrays of
half a million ops and more would leave holes in the heap that nothing else fits into: 1,024 GPUs whose prediction takes
0.96 GB take 1.05 GB where all is kept."""


def keep_freed_memory() -> None:
    """Tell glibc's malloc that this process soon wants again what it frees; no other allocator is told anything.

    Arrays of a prediction are just large enough that glibc gives their pages back to the system after each one, which
    then has to clear new ones. Processes of cpsim's own call this.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            library.mallopt(option, KEPT_BYTES)
