"""DCP's code.

Read: chenyu-jiang/dcp at 942a2c7. Its executor calls one instruction after another from Python: copies, all-to-alls of
uneven parts, varlen calls of its flash-attn 2, merges. A sequence of such a call is one block of queries of one head,
padded, with the blocks of keys that it sees, each of which gets gradients of its own (dcp/core/scheduler.py,
_gen_attn_bw_instr_for_stage): set to zero before the call, copied where they are kept after it, and added up by a
SumInstr. Inputs are copied into blocks once, a rank's own at first and others when they have come. Copies, merges and
sums are Triton kernels (dcp/ops/fused_ops.py), timed by studies.dcp.measure; all work in the working type. Its
flash-attn is called as ours is, without PyTorch's wrapper of later versions.
"""

from __future__ import annotations

from typing import Final

from cpsim.strategies.others.facts import Implementation, Support

_TRITON: Final[dict[str, tuple[str, ...]]] = {
    "copy": ("dcp_copy",),
    "merge": ("dcp_merge",),
    "accumulate": ("dcp_sum",),
    "elementwise": ("dcp_gradients",),
}

DCP: Final = Implementation(
    name="dcp",
    source="chenyu-jiang/dcp at 942a2c7",
    strategies={"dcp": Support(knobs={"variant": ("paper", "released")})},
    kernels=("fa2_ranges",),
    launches=_TRITON
    | {
        "attention": ("fa2 fwd",),
        "attention_backward": ("fa2 bwd",),
        "all_to_all": ("sync_all_to_all",),
    },
    row_kernels=_TRITON,
    paged=True,
)
