"""Importing this loads costs and engines, so that copies of the process which did predict at once.

That an import does something is for ``multiprocessing.forkserver``, which knows no other way.
"""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
from typing import Final

from cpsim.explore.answers import warm_up
from cpsim.runtime.allocator import keep_freed_memory
from cpsim.runtime.interrupts import leave_to_parent

PR_SET_PDEATHSIG: Final = 1
"""Of prctl(2): the signal that a process gets when the thread ends that began it."""


def _warm() -> None:
    leave_to_parent()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    keep_freed_memory()
    warm_up()
    gc.collect()
    gc.freeze()


_warm()
