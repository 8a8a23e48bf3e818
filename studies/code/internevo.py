"""InternEvo, LoongTrain's code, as DCP's benchmark runs it.

Read: InternLM/InternEvo at 0607da8, internlm/core/parallel/comm/isp.py (``_SeqAllToAll``), and chenyu-jiang/dcp at
942a2c7, benchmark/microbenchmark/baselines/loong_train, whose zigzag_ring_flash_attn_with_sliding_window.py is
InternEvo's with flash-attn 2.6.3. Its steps are those of ring-flash-attn's zigzag: two messages, and a merge, which
TorchScript fuses on few ranks of a ring, since every batch has other shapes. Inner and outer rings, and gradients in
each, have process groups of their own. Documents are the rows of a batch, so all are of one length.

Left out: hosts that wait for their GPU before and after a backward pass. Differs: gradients go from one inner ring to
the next by one hop, not home first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cpsim.schedule.schedule import Kind
from cpsim.strategies.others.facts import (
    BACK,
    BACK_K,
    EAGER_ROW_KERNELS,
    FLASH_ATTN,
    Implementation,
    RowKernel,
    Support,
    UlyssesCode,
)
from cpsim.strategies.others.ring_flash_attn import RING

_LSE: Final = (RowKernel("lse", 0, 2),)
_HALF: Final = RowKernel("k", 2, 0)
_UNPACK: Final = (RowKernel("kv", 1, 0), _HALF)  # gradient of kv[:, :, i]: zeros, and a copy into them
_RING: Final = replace(
    RING,
    groups=True,
    batch=True,
    narrows=True,  # _first_window_backward ends with casts
    shapes_change=True,  # documents of every batch are others; data/points/h200/merges.jsonl
    enter={"fwd": (_HALF, _HALF), "bwd": ()},  # contiguous keys and values
    read=_LSE,  # contiguous log-sum-exps, before every kernel
    read_tails=_LSE,
    leave={
        "fwd": (BACK,),
        "bwd": (BACK, BACK_K, BACK_K, *_UNPACK * 2, RowKernel("kv", 3, 0, kind=Kind.ACCUMULATE)),
    },
)

INTERNEVO: Final = Implementation(
    name="internevo",
    source="InternLM/InternEvo at 0607da8, as in chenyu-jiang/dcp at 942a2c7",
    strategies={
        "loongtrain": Support(
            masks=("causal", "causal_document"), chunks=2, alike=True, knobs={"zigzag": ("document",)}
        )
    },
    kernels=("fa2",),
    double_ring=_RING,
    ulysses=UlyssesCode(  # tensor_split, all_to_all of lists, cat
        there={"fwd": 2, "bwd": 2}, back={"fwd": 2, "bwd": 2}, overlaps=True, packed=True, lists=True
    ),
    launches=FLASH_ATTN
    | {
        "merge": ("jit_merge",),
        "transfer": ("transfer_of_two",),
        "all_to_all": ("seq_all_to_all", "sync_all_to_all"),
    },
    row_kernels=EAGER_ROW_KERNELS | {"merge": ("jit_merge", "merge")},
    messages=2,  # RingComm.send_recv of keys, then of values
)
