"""DistCA's data, packings and schedulers: functions of integer arrays. ``tasks`` says what they exchange.

A new scheduler of tasks belongs here. Covered by tests/test_distca.py and tests/test_distca_plans.py.
"""
