"""Seconds of collectives and transfers, the links that they share, and how they and computation slow each other.

A new kind of network, link or message is priced here. Covered by tests/test_collective_model.py, tests/test_fabric.py
and tests/test_networks.py.
"""
