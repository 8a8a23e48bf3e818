"""``cpsim explore``: a local web page in which a person changes a case and sees what that does.

A new view is a function in ``views``; its figures lie in ``cpsim.report``. Covered by tests/test_explore.py.
"""
