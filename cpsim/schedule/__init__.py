"""The schedule: what every rank computes, sends and keeps, op by op; strategies write it, all others read it.

A new kind of op is a member of ``schedule.Kind``; the builder emits it, models price it, the executor runs it. Covered
by tests/test_schedule.py.
"""
