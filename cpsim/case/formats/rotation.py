"""How PyTorch's context parallelism sends keys and values around, by the words that configurations have for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cpsim.case.scenario import Scenario

ROTATIONS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "allgather": ("allgather", {"layout": "zigzag"}),
    "alltoall": ("zigzag_ring", {}),
}
"""Strategy and knobs by rotation; load balancing is on where nothing is said, and the first is the default."""


def rotation(scenario: Scenario) -> str:
    """The rotation of a scenario's strategy."""
    return "allgather" if scenario.strategy == "allgather" else "alltoall"
