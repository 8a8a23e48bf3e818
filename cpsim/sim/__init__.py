"""The engines: a schedule with the costs of its ops in, a timeline out.

``reference`` is short and slow, the oracle; ``fast`` means the same, compiled. Engines know neither strategies nor
prices. Covered by tests/test_engines.py, where both agree, and tests/test_draws.py.
"""
