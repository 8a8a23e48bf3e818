"""Layers with a state instead of keys: exchanges beside each other, and published steps of Nemotron 3 Nano."""
