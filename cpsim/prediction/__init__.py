"""Answers: predictions with intervals, recommendations, sweeps, and predictions beside measured runs.

What puts strategies, models and engines together for one question belongs here. Covered by tests/test_predictor.py,
tests/test_sweeps.py and tests/test_comparison.py.
"""
