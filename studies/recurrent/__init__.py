"""Layers with a state instead of keys: exchanges beside each other."""
