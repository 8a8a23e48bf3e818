"""Patterns of hybrid models, a letter for each of their layers: M (Mamba-2), * (attention), - (MLP), E (experts).

A step counts a mixer (M or *) and the MLP behind it as one layer.

Reference: Megatron-Core 0.16, ssm/mamba_hybrid_layer_allocation.py; Nemotron-H's ``config.json``.
"""

from __future__ import annotations

import re
from typing import Any, Final

from cpsim.case.formats.reading import Settings
from cpsim.errors import ScenarioError, shown

_MIXERS: Final = re.compile(r"(\*[-E]|M[-E]?)*")


def layers_of(s: Settings, name: str, pattern: str, layers: int | None) -> dict[str, Any]:
    """Layers of a pattern, each with what MLP follows it, those that attend, and those without MLP.

    Args:
        s: settings, which one of is the pattern.
        name: of that one.
        pattern: letters.
        layers: how many letters there should be; None: as many as there are.

    Raises:
        ScenarioError: layers are in another order, or not as many; names the line.
    """
    expected = len(pattern) if layers is None else layers
    mixers, attend = len(re.findall(r"[M*]", pattern)), pattern.count("*")
    if not _MIXERS.fullmatch(pattern) or len(pattern) != expected or attend == mixers:
        raise ScenarioError(
            f"{s.place(name)}: {name}: expected {layers or 'layers'} of M (Mamba-2), * (attention), and - or E (MLP) "
            f"each after one of these, * always with one; got {shown(pattern)}"
        )
    bare = mixers - len(re.findall(r"[-E]", pattern))
    return {"layers": mixers, "attention_layers": attend or None, "bare_layers": bare or None}
