"""DCP's code.

Read: chenyu-jiang/dcp at 942a2c7. Its executor calls one instruction after another from Python: copies, all-to-alls of
uneven parts, varlen calls of its flash-attn 2, merges. A sequence of such a call is one block of queries of one head,
padded, with the blocks of keys that it sees, each of which gets gradients of its own (dcp/core/scheduler.py,
_gen_attn_bw_instr_for_stage); a SumInstr adds them up. How copies are divided into kernels is our schedule's, and so
are merges in fp32, where its are in the working type.
"""

from __future__ import annotations

from typing import Final

from cpsim.implementations.facts import EAGER, Implementation, Support

DCP: Final = Implementation(
    name="dcp",
    source="chenyu-jiang/dcp at 942a2c7",
    support={"dcp": Support(knobs={"variant": ("paper", "released")})},
    kernels=("fa2_ranges",),
    launches=EAGER
    | {
        "attention": ("flash_attn_varlen fwd",),
        "attention_backward": ("flash_attn_varlen bwd",),
        "all_to_all": ("sync_all_to_all",),
    },
    replicates=True,
    predicted_only=True,
)
