"""Real runs: the executor of schedules, other people's code, and measurements, on PyTorch.

The only room that imports torch; no other one imports it, ``cpsim run`` and ``cpsim calibrate`` start it as a process.
Covered by tests/test_executor.py and tests/test_real_run_cpu.py, on CPUs.
"""
