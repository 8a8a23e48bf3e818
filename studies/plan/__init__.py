"""Planners of global batches side by side in one simulation: ``python -m studies.plan``."""
