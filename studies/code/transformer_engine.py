"""Transformer Engine's context parallel, for PyTorch.

Read: NVIDIA/TransformerEngine v2.9 (70f5366), pytorch/attention/dot_product_attention/context_parallel.py; its
``cp_comm_type`` p2p is ``zigzag_ring``, all_gather ``allgather``, a2a ``ulysses`` and a2a+p2p ``usp``. All of them
have zigzag shards, which do not change what Ulysses sends. One sequence is BSHD of batch 1, where halves of a shard
are views; several documents are THD, which p2p alone takes and callers have to pad.

DCP's benchmark has a fork of 1.13, read as chenyu-jiang/TransformerEngine at d114223 (December 2024), pytorch/
attention.py; ranges of keys, and lengths on the host, came to it later. Its a2a+p2p takes THD, and orders tensors
document by document (``reorder_seq_chunks_for_a2a_varlen``). On A100 flash-attn alone runs THD
(``nvte_get_fused_attn_backend``). Its hosts wait for their GPU where they read the last length on it, which a later
fork that is given lengths need not: left out.

Windows run with all_gather, whose kernels read the keys that a half sees (``get_kv_seq_info_after_all_gather``), and
with a2a (``attn_forward_func_with_cp``); a learned sink, whose logits a2a deals out by heads, with a2a and cuDNN alone.

Left out: biases, FP8; kernels of one thread block (random states, zeros behind the last document);
what Python between calls costs the host.
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
    WINDOWS,
    HalvesCode,
    HeldRingCode,
    Implementation,
    RowKernel,
    Support,
    UlyssesCode,
    WrapperCode,
)

_HALF_Q, _HALF_K = RowKernel("q", 2, 0), RowKernel("k", 2, 0)
_ADD, _ADD_K = RowKernel("q", 3, 0, kind=Kind.ACCUMULATE), RowKernel("k", 3, 0, kind=Kind.ACCUMULATE)
_JOIN, _CLONE = RowKernel("kv", 2, 0), RowKernel("lse", 0, 2)
_MERGE: Final = RowKernel("q", 3, 0, kind=Kind.MERGE)
_RING: Final = HeldRingCode(  # AttnFuncWithCPAndKVP2P, BSHD; torch.compile makes one kernel of every correction
    enter={"fwd": (_JOIN,), "bwd": (RowKernel("lse", 0, 2, "tails"), _JOIN)},
    first_lse=(_CLONE,),
    sum_lse=(RowKernel("lse", 0, 3),),
    first_out=RowKernel("q", 2, 0, kind=Kind.MERGE),
    sum_out=_MERGE,
    in_loop=True,
    first_dq=RowKernel("q", 2, 0),
    sum_dq=_ADD,
    join_dkv=(),
    first_dkv=(_HALF_K, _HALF_K),
    sum_dkv=(_ADD_K, _ADD_K),
    turns=True,
    batches_pairs=True,  # on GPUs before Blackwell
)
_TINY: Final = RowKernel("lse", 0, 0)
_RING_THD: Final = replace(
    _RING,
    enter={"fwd": (_TINY, _TINY, _JOIN), "bwd": _RING.enter["bwd"]},
    wrapper=WrapperCode(  # cp_p2p_fwd_prepare_qkv: lengths of a step
        before={"fwd": (_TINY, _TINY), "bwd": ()}, after={"fwd": (), "bwd": ()}
    ),
    tails={"fwd": (_HALF_Q,), "bwd": (_HALF_Q,) * 3},  # thd_read_half_tensor
    key_heads={"fwd": (_HALF_K, _HALF_K), "bwd": (_HALF_K, _HALF_K)},
    first_lse=(_CLONE, RowKernel("q", 1, 0)),  # and zeros, to which thd_out_correction adds
    first_out=_MERGE,
)

TRANSFORMER_ENGINE: Final = Implementation(
    name="transformer-engine",
    source="NVIDIA/TransformerEngine v2.9",
    strategies={
        "ulysses": Support(
            masks=DENSE + WINDOWS, chunks=2, knobs={"head_groups": (1,)}, whole_heads=True, sinks=("cudnn",)
        ),
        "zigzag_ring": Support(masks=DENSE + DOCUMENTS, chunks=2, knobs={"zigzag": ("document",)}),
        "allgather": Support(masks=DENSE + WINDOWS, chunks=2, knobs={"layout": ("zigzag",)}),
        "usp": Support(
            masks=DENSE,
            chunks=2,
            knobs={"ring": ("zigzag",), "zigzag": ("document",), "placement": ("head_first",)},
        ),
    },
    kernels=("cudnn", "fa2", "fa3"),
    direct=("cudnn",),
    ring=_RING,
    zigzag_documents=_RING_THD,
    ulysses=UlyssesCode(  # flash_attn_a2a_communicate
        there={"fwd": 2, "bwd": 2}, back={"fwd": 2, "bwd": 2}, overlaps=True, outputs_again=True
    ),
    allgather=HalvesCode(  # AttnFuncWithCPAndKVAllGather
        order=RowKernel("k", 2, 0, kind=STRIDED),  # index_select
        leave=RowKernel("q", 2, 0),
        zero=RowKernel("k", 1, 0),
        sum=_ADD_K,
        sums_seen=True,
    ),
    launches=EAGER
    | {
        "entry": ("autograd entry {pass}",),
        "barrier": ("autograd {pass}",),
        "attention": ("{kernel} fwd", "flash_attn fwd"),
        "attention_backward": ("{kernel} bwd", "flash_attn bwd"),
        "transfer": ("unbatched_transfer_pair",),
        "all_to_all": ("sync_all_to_all",),
        "all_gather": ("async_all_gather",),
        "reduce_scatter": ("sync_reduce_scatter",),
    },
    row_kernels=EAGER_ROW_KERNELS | {"merge": ("merge",)},
    unbatched=True,
)

_HALF_KV: Final = RowKernel("kv", 2, 0)  # both in one kernel, since they are one tensor
_FORK_RING: Final = replace(  # AttnFuncWithCPAndKVP2P of the fork, THD and flash-attn
    _RING_THD,
    enter={
        # Contiguous keys and values (FlashAttention.forward; callers give views of one tensor); lengths of a shard, on
        # the host, too; chunk ids; the last of these lengths, read twice; both in one message.
        "fwd": (RowKernel("k", 2, 0), RowKernel("k", 2, 0), *(_TINY,) * 8, _JOIN),
        # thd_read_second_half_lse, which zeroes first; chunk ids; the last length.
        "bwd": (RowKernel("lse", 0, 1, "tails"), RowKernel("lse", 0, 2, "tails"), *(_TINY,) * 3, _JOIN),
    },
    wrapper=WrapperCode(  # lengths of a step; zeros for gradients of queries
        before={"fwd": (_TINY, _TINY), "bwd": (RowKernel("q", 1, 0),)}, after={"fwd": (), "bwd": ()}
    ),
    key_heads={"fwd": (_HALF_KV,), "bwd": (_HALF_KV,)},
    first_lse=(_CLONE, RowKernel("lse", 0, 3), RowKernel("q", 1, 0)),  # to fp64
    sum_lse=(RowKernel("lse", 0, 5),),  # flash_attn_fwd_softmax_lse_correction or thd_second_half_lse_correction, fp64
    first_dkv=(_JOIN,),
    sum_dkv=(RowKernel("kv", 3, 0, kind=Kind.ACCUMULATE),),
    whole_steps=True,  # the benchmark's mask type is not a causal one then, and its ranges are of whole shards
    leave={"fwd": (RowKernel("lse", 0, 3),), "bwd": (_JOIN, _TINY, _TINY)},  # to fp32; gradients into a padded tensor
)

TRANSFORMER_ENGINE_THD: Final = replace(
    TRANSFORMER_ENGINE,
    name="transformer-engine-thd",
    source="chenyu-jiang/TransformerEngine at d114223, of 1.13, for chenyu-jiang/dcp at 942a2c7",
    strategies={
        "usp": Support(chunks=2, knobs={"ring": ("zigzag",), "zigzag": ("document",), "placement": ("head_first",)})
    },
    kernels=("fa2", "fa2_ranges"),
    ring=_FORK_RING,
    ulysses=UlyssesCode(  # flash_attn_a2a_communicate_thd: a copy and an index_select of every document, then cat
        there={"fwd": 2, "bwd": 2},
        back={"fwd": 2, "bwd": 2},
        overlaps=True,
        outputs_again=True,
        there_by_document=2,
        back_by_document=1,  # a document of what leaves is a view
    ),
)
"""a2a+p2p for packed documents, and for other masks with DCP's kernel, while keys travel as under a causal one."""
