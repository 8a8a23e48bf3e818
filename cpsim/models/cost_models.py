"""The cost models that a price is made of, each of which is wrong by a factor of its own."""

from typing import Final

OF_ATTENTION: Final = (
    "attention fwd",
    "attention bwd",
    "memory-bound",
    "transfer",
    "collective",
    "transfer between nodes",
    "collective between nodes",
    "host",
    "interference",
)
"""Cost models of attention alone whose uncertainty is sampled together; no op belongs to the last two."""
GROUPS: Final = (*OF_ATTENTION, "matrix products", "elementwise of layers")
"""All cost models."""
