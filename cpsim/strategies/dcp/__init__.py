"""DCP: blocks of tokens and computation placed on ranks, computed in stages while later inputs arrive.

A new solver or placement belongs here. Covered by tests/test_dcp.py and tests/test_dcp_balanced.py.
"""
