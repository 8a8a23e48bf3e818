"""Work for processes of ``cpsim.runtime.workers``: what takes time, and what takes memory."""

import math
import time


def busy(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        math.sqrt(2)
    return seconds


def large(nbytes):
    return len(bytes(nbytes))
