"""The executor: one rank's ops of a schedule as torch calls on streams, checked against dense attention, and timed.

The one adapter to attention kernels is ``attention``; a new kernel is called there. Covered by tests/test_executor.py,
tests/test_real_kernels_cpu.py and tests/test_real_run_cpu.py.
"""
