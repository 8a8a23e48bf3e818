"""flash-attn itself, on one GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cpsim.strategies.others.facts import DENSE, DOCUMENTS, FLASH_ATTN, Implementation, Support, under_compile

_EAGER: Final = Implementation(
    name="flash-attn",
    source="flash-attn 2.8.3, flash_attn_func and flash_attn_varlen_func",
    strategies={"none": Support(masks=DENSE + DOCUMENTS, varlen=DOCUMENTS)},
    kernels=("fa2",),
    launches=FLASH_ATTN,
)
PLAIN: Final = replace(_EAGER, compiled=under_compile(_EAGER, FLASH_ATTN))
