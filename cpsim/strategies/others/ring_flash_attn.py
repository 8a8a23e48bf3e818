"""ring-flash-attn and yunchang, whose rings are alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cpsim.schedule.schedule import Kind
from cpsim.strategies.others.facts import (
    ADD,
    ADD_K,
    BACK,
    BACK_K,
    CAST,
    DENSE,
    DOCUMENTS,
    EAGER_MERGE,
    EAGER_ROW_KERNELS,
    FLASH_ATTN,
    LSE,
    STRIDED,
    GatherCode,
    Implementation,
    RingCode,
    RowKernel,
    Support,
    UlyssesCode,
)

_FUSED: Final = (
    RowKernel("q", 1, 2, kind=Kind.MERGE),
    *LSE * 3,
)  # utils.py, _update_out_and_lse: TorchScript fuses one
_JOIN: Final = (RowKernel("q", 0, 2), RowKernel("lse", 0, 2))  # out[slice_], lse[slice_] = ...
RING: Final = RingCode(  # ring_flash_attn.py and zigzag_ring_flash_attn.py, forward and backward
    copies=2,
    enter={"fwd": (), "bwd": (RowKernel("lse", 0, 2, "tails"),)},  # softmax_lse1
    first=(CAST,),  # utils.py, update_out_and_lse
    merge=_FUSED,
    merge_tails=(*_FUSED, *_JOIN),  # the same, with slice_
    # fused for two layouts of log-sum-exps, that of the first step and that of later ones; theirs would be a third
    merges_unfused=(EAGER_MERGE, (*EAGER_MERGE, *_JOIN)),
    leave={"fwd": (BACK,), "bwd": (BACK, BACK_K, BACK_K)},
)
_RING_STRIPED: Final = replace(  # stripe_flash_attn.py
    RING,
    enter={"fwd": (), "bwd": ()},
    read_tails=(RowKernel("lse", 0, 2),),  # softmax_lse_1, made in every such step
)
_TINY: Final = RowKernel("lse", 0, 0)
"""A launch, or a few bytes to or from the host: index masks live on the CPU."""
_PUT: Final = (_TINY, RowKernel("q", 0, 2, kind=STRIDED))  # x[half_index] = ...
_PUT_K: Final = (_TINY, RowKernel("k", 0, 2), ADD_K, _TINY, RowKernel("k", 0, 2, kind=STRIDED))
_RING_VARLEN: Final = replace(  # zigzag_ring_flash_attn_varlen.py, several documents
    RING,
    enter={"fwd": (_TINY,) * 6, "bwd": (_TINY,) * 6},  # get_half_index, get_half_lse, cu_seqlens // 2
    merges_unfused=None,  # x[half_index] is a tensor of its own
    per_document={"fwd": 8, "bwd": 3},
    pack=(_TINY,) * 3,
    merge_tails=(
        *_FUSED,
        _TINY,
        RowKernel("q", 0, 2),
        _TINY,
        RowKernel("lse", 0, 2),
        *_PUT,
        _TINY,
        RowKernel("lse", 0, 2),
    ),
    sum_dq_tails=(ADD, _TINY, RowKernel("q", 0, 2), *_PUT),
    sum_dkv_heads=(*_PUT_K, *_PUT_K),
)

RING_FLASH_ATTN: Final = Implementation(
    name="ring-flash-attn",
    source="ring-flash-attn 0.1.8",
    strategies={
        "ring": Support(masks=DENSE + DOCUMENTS, chunks=1, varlen=DOCUMENTS, views=(2, 0)),
        "zigzag_ring": Support(
            masks=("causal", "causal_document"),
            chunks=2,
            knobs={"zigzag": ("document",)},
            varlen=DOCUMENTS,
            views=(3, 8),
            reads=DOCUMENTS,  # get_half_index: values of cu_seqlens
        ),
        "striped_ring": Support(masks=("causal",), chunks=1, views=(5, 12)),
        "allgather": Support(
            masks=DENSE + DOCUMENTS, knobs={"layout": ("contiguous",)}, varlen=DENSE + DOCUMENTS, views=(9, 23)
        ),  # llama3_flash_attn_varlen.py
    },
    kernels=("fa2",),
    ring=RING,
    zigzag_documents=_RING_VARLEN,
    striped=_RING_STRIPED,
    allgather=GatherCode(leave=(RowKernel("q", 2, 0), RowKernel("lse", 0, 2))),  # torch.cat(out_list), (lse_list)
    launches=FLASH_ATTN
    | {
        "begin": ("ring-flash-attn begin {pass}",),
        "merge": ("jit_merge",),
        "transfer": ("transfer_of_two",),
        "all_gather": ("async_all_gather",),
        "reduce_scatter": ("sync_reduce_scatter",),
    },
    row_kernels=EAGER_ROW_KERNELS | {"merge": ("jit_merge", "merge")},
    messages=2,  # RingComm.send_recv_kv
)

YUNCHANG: Final = Implementation(
    name="yunchang",
    source="yunchang 0.6.4",
    strategies={
        "ulysses": Support(masks=DENSE, chunks=1, knobs={"head_groups": (1,)}, whole_heads=True),
        "usp": Support(
            masks=DENSE,
            chunks=2,
            knobs={"ring": ("zigzag", "basic"), "zigzag": ("document",)},
            balanced=("ring", "zigzag"),
        ),
    },
    kernels=("fa2",),
    ring=RING,  # ring/ring_flash_attn.py and ring/zigzag_ring_flash_attn.py launch the same
    ulysses=UlyssesCode(rings_of_one=True),  # comm/all_to_all.py, all_to_all_4D with one sequence a batch
    launches=FLASH_ATTN
    | {
        "begin": ("yunchang begin {pass}",),
        "all_to_all": ("seq_all_to_all", "sync_all_to_all"),
        "merge": ("jit_merge",),
        "transfer": ("transfer_of_two",),
    },
    row_kernels=EAGER_ROW_KERNELS | {"merge": ("jit_merge", "merge")},
    messages=2,  # RingComm.send_recv_kv
)
