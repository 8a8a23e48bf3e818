"""Measurements in, profiles out: the measurement file, the fits, their residuals, and other people's measurements.

Fits are pure functions of measured points and never read whole runs. A new GPU is an entry of ``data/manifest.yaml``.
Covered by tests/test_calibrate.py and tests/test_imports.py.
"""
