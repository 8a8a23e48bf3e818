"""What a user may switch off for all processes of a command."""

from __future__ import annotations

from typing import Final

FORCE: Final = "CPSIM_FORCE"
"""Environment variable that lets a prediction take as long and be as large as it is; see ``cpsim.prediction.size``."""
