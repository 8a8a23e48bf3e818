"""Seconds of attention kernels: tiles, thread blocks in waves over the SMs, the clock, and what is left over.

A new kernel is a row for each pass in ``kernels`` and its limits in ``cpsim.models.feasible``, then measurements.
Covered by tests/test_attention_model.py and tests/test_kernels.py.
"""
