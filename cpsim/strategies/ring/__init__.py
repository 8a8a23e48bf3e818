"""Rings: keys and values travel from rank to rank while queries stay; alone, in pairs of rings, or in Ulysses groups.

A new order of tokens or another way to turn belongs here. Covered by tests/test_strategies.py and tests/test_usp.py.
"""
