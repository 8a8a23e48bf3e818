"""Predictions and recommendations for people: words, tables, records for machines, and one HTML file.

A new figure, table or page is a module here. Covered by tests/test_report.py.
"""
