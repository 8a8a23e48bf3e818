"""The Python process itself: compiled functions and their cache, worker processes, Ctrl-C, freed memory.

Nothing here knows what cpsim computes. Covered by tests/test_compiled.py and tests/test_interrupts.py.
"""
