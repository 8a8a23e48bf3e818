"""LongCA-bench and MagiAttention's benchmark, which is its later state: the same authors and, mostly, the same code.

Read: NJUDeepEngine/LongCA-bench at 22683e3 and SandAI-org/MagiAttention at 2c64135, exps/dist_attn/baselines. Their
rings descend from Transformer Engine's. Kernels are wrapped in gathers that drop padding and scatters that put it back,
with masks that have none, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cpsim.schedule.schedule import Kind
from cpsim.strategies.others.facts import (
    DENSE,
    DOCUMENTS,
    EAGER,
    EAGER_ROW_KERNELS,
    STRIDED,
    HalvesCode,
    HeldRingCode,
    Implementation,
    ProjectionCode,
    RowKernel,
    Support,
    UlyssesCode,
    WrapperCode,
)

_LSE: Final = RowKernel("lse", 0, 2)


def _wrapper(gather: Kind) -> WrapperCode:
    """Of ``_fa3_varlen_forward`` and ``_fa3_varlen_backward``; ``gather``: what PyTorch's takes as long as."""
    q, k = (RowKernel(tensor, 2, 0, kind=gather) for tensor in ("q", "k"))
    put_q, put_k = (
        (RowKernel(tensor, 1, 0), RowKernel(tensor, 2, 0, kind=Kind.SCATTER)) for tensor in ("q", "k")
    )  # zeros, scatter_
    return WrapperCode(
        before={"fwd": (q, k, k), "bwd": (q, k, k, q, q, _LSE)},
        after={"fwd": (*put_q, RowKernel("lse", 0, 1), _LSE), "bwd": (*put_q, *put_k, *put_k)},
    )


# Until PyTorch 2.7, which NGC 25.02 has, gathers move elements as scatters do; from 2.8 on, whole rows, as fast as
# copies (``studies.probes.rows``).
_WRAPPER, _WRAPPER_OF_ROWS = _wrapper(gather=Kind.SCATTER), _wrapper(gather=Kind.COPY)
_HALF_Q, _HALF_KV = RowKernel("q", 2, 0), RowKernel("kv", 2, 0)  # thd_read_half_tensor
_JOIN: Final = RowKernel("kv", 2, 0)
_OUT: Final = RowKernel("q", 3, 0, kind=Kind.MERGE)  # thd_out_correction
_RING: Final = HeldRingCode(  # FA3RingAttnFunc
    wrapper=_WRAPPER,
    enter={"fwd": (_JOIN,), "bwd": (RowKernel("lse", 0, 2, "tails"), _JOIN)},
    tails={"fwd": (_HALF_Q,), "bwd": (_HALF_Q, _HALF_Q, _HALF_Q)},
    key_heads={"fwd": (_HALF_KV,), "bwd": (_HALF_KV,)},
    first_lse=(RowKernel("q", 1, 0), RowKernel("lse", 0, 2)),  # zeros, clone
    sum_lse=(RowKernel("lse", 0, 3),) * 6,  # flash_attn_fwd_softmax_lse_correction, fp32
    first_out=_OUT,
    sum_out=_OUT,
    first_dq=RowKernel("q", 2, 0),
    sum_dq=RowKernel("q", 3, 0, kind=Kind.ACCUMULATE),
    join_dkv=(_JOIN,),
    first_dkv=(_JOIN,),
    sum_dkv=(RowKernel("kv", 3, 0, kind=Kind.ACCUMULATE),),
    turns=True,
)
# Transformer Engine's fused attention knows padding, so nothing is gathered; backward, keys and values are repeated for
# every query head, and their gradients summed, since calls with shared heads fail (TERingAttnFunc, TERingAGAttnFunc);
# kernels are priced with shared heads, for which cuDNN writes gradients of every query head, too.
_REPEAT, _SUM = RowKernel("repeated", 1, 0, kind=STRIDED), RowKernel("repeated", 1, 0, kind=Kind.ACCUMULATE)
_TE_WRAPPER: Final = WrapperCode(
    before={"fwd": (), "bwd": (_REPEAT, _REPEAT)},
    after={"fwd": (RowKernel("lse", 0, 2, kind=STRIDED),), "bwd": (_SUM, _SUM)},  # packed log-sum-exp, transposed
)
_TE_RING: Final = replace(
    _RING,
    wrapper=_TE_WRAPPER,
    enter={"fwd": (_JOIN,), "bwd": (RowKernel("lse", 0, 2, "tails"), RowKernel("lse", 0, 2, kind=STRIDED), _JOIN)},
)
_FP64_RING: Final = replace(
    _RING,
    first_lse=(RowKernel("q", 1, 0), RowKernel("lse", 0, 2), RowKernel("lse", 0, 3)),
    sum_lse=(RowKernel("lse", 0, 6),) * 6,
    in_loop=True,
)
_ULYSSES: Final = UlyssesCode(  # permute, all_to_all_single and permute; the output's only after it
    there={"fwd": 2, "bwd": 1},
    back={"fwd": 1, "bwd": 2},
    wrapper=_WRAPPER,
    rings_of_one=True,
    groups_of_one=True,
)
_ALLGATHER: Final = HalvesCode(  # FA3RingAGAttnFunc
    wrapper=_WRAPPER,
    enter={"fwd": (_HALF_Q,), "bwd": (_HALF_Q, _HALF_Q)},
    order=RowKernel("k", 2, 0, kind=Kind.SCATTER),
    leave=RowKernel("q", 2, 0),  # thd_grad_correction, copying
    zero=RowKernel("k", 1, 0),
    sum=RowKernel("k", 3, 0, kind=Kind.ACCUMULATE),
)
_MASKS: Final = DENSE + DOCUMENTS
_SUPPORT: Final = {
    "ulysses": Support(masks=_MASKS, knobs={"head_groups": (1,)}),
    "zigzag_ring": Support(masks=_MASKS, knobs={"zigzag": ("document",)}),
    "allgather": Support(masks=_MASKS, knobs={"layout": ("document_zigzag",)}),
    "usp": Support(masks=_MASKS, knobs={"ring": ("zigzag",), "zigzag": ("document",)}),
    "loongtrain": Support(masks=_MASKS, knobs={"zigzag": ("document",)}),
}
_LAUNCHES: Final = EAGER | {
    "barrier": ("autograd {pass}",),
    "attention": ("flash_attn_varlen fwd",),
    "attention_backward": ("flash_attn_varlen bwd",),
    "transfer": ("unbatched_transfer_pair",),
    "all_to_all": ("sync_all_to_all",),
    "all_gather": ("async_all_gather",),
    "reduce_scatter": ("sync_reduce_scatter",),
}
_ROW_KERNELS: Final = EAGER_ROW_KERNELS | {"merge": ("merge",)}

LONGCA_BENCH: Final = Implementation(
    name="longca-bench",
    source="NJUDeepEngine/LongCA-bench at 22683e3",
    strategies=_SUPPORT,
    kernels=("fa3",),
    ring=_FP64_RING,
    double_ring=replace(_FP64_RING, turns=False),
    ulysses=_ULYSSES,
    allgather=_ALLGATHER,
    projections=ProjectionCode(width=1024, inputs=True),
    launches=_LAUNCHES,
    row_kernels=_ROW_KERNELS,
    pads=True,  # shard.py, get_cu_seqlens_padded
    unbatched=True,
)
_NEWER_RING: Final = replace(_RING, wrapper=_WRAPPER_OF_ROWS)
_MAGI: Final = replace(  # whose images have PyTorch 2.8 and newer
    LONGCA_BENCH,
    name="magi-attention",
    source="SandAI-org/MagiAttention at 2c64135, with the baselines of its benchmark",
    strategies=_SUPPORT | {"hybrid_cp": Support(masks=_MASKS), "magi": Support(masks=_MASKS)},
    ring=_NEWER_RING,
    double_ring=replace(_NEWER_RING, turns=False),
    ulysses=replace(_ULYSSES, wrapper=_WRAPPER_OF_ROWS),
    allgather=replace(_ALLGATHER, wrapper=_WRAPPER_OF_ROWS, order=RowKernel("k", 2, 0)),
    projections=ProjectionCode(width=1024, inputs=False),
)
MAGI_ATTENTION: Final = replace(
    _MAGI,
    kernels=("fa3", "cudnn"),
    with_kernel={
        "cudnn": replace(  # AttnBackend.TE
            _MAGI,
            strategies=_SUPPORT,
            kernels=("cudnn",),
            direct=("cudnn",),
            ring=_TE_RING,
            double_ring=replace(_TE_RING, turns=False),
            ulysses=replace(_ULYSSES, wrapper=None),
            allgather=replace(  # repeats once for both halves: a half of it with each
                _ALLGATHER,
                wrapper=replace(
                    _TE_WRAPPER, before={"fwd": (), "bwd": (_REPEAT,)}, after={"fwd": (), "bwd": (_SUM, _SUM)}
                ),
            ),
            launches=_LAUNCHES
            | {"attention": ("{kernel} fwd", "flash_attn_varlen fwd")}
            | {"attention_backward": ("{kernel} bwd", "flash_attn_varlen bwd")},
        )
    },
)
