"""What a user may ask of a process."""

from __future__ import annotations

from typing import Final

MAX_DEPTH: Final = 64
"""Levels of lists and mappings in a file."""
FORCE: Final = "CPSIM_FORCE"
"""Environment variable that lets a prediction take as long and be as large as it is; see ``cpsim.prediction.size``."""
