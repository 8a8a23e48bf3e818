"""Measurements that profiles are fitted to: kernels, networks, launches and layers, each alone.

A new measurement is a module that writes points of ``cpsim.calibrate.measurement``. Covered by
tests/test_calibrate_node.py and tests/test_measure_layers.py, on CPUs.
"""
