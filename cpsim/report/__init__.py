"""Predictions and recommendations for people: words, tables, records for machines, and one HTML file."""
