"""Attention masks: which keys every query sees, as exact sets of ranges.

A new mask is an entry of ``names.MASK_NAMES`` (its meaning and options) and one function in ``shapes`` (documents in,
slices out). Covered by tests/test_mask_shapes.py, which defines every mask pair by pair, and tests/test_masks.py.
"""
