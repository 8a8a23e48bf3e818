"""DCP's released code.

Read: chenyu-jiang/dcp at 942a2c7. Its executor calls one instruction after another from Python; what is our own is how
the copies of a stage are divided into kernels.
"""

from __future__ import annotations

from typing import Final

from cpsim.implementations.facts import Implementation, Support

DCP: Final = Implementation(
    name="dcp",
    source="chenyu-jiang/dcp at 942a2c7",
    support={"dcp": Support(knobs={"variant": ("released",)})},
    kernels=("fa2_ranges",),
    predicted_only=True,
)
