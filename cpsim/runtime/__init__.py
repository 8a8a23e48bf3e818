"""The Python process itself: compiled functions and their cache, worker processes, files, streams, Ctrl-C, memory.

Nothing here knows what cpsim computes. Covered by tests/test_compiled.py, tests/test_interrupts.py,
tests/test_terminal.py and tests/test_sweeps.py.
"""
