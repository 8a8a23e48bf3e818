"""Whole layers as schedules: attention, matrix products and memory-bound ops, forward and backward.

A part of a training step that becomes ops of a schedule belongs here. Covered by tests/test_layer.py.
"""
