"""PyTorch's context parallel, and its attention on one GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cpsim.strategies.others.facts import (
    ADD,
    ADD_K,
    BACK,
    CAST,
    CAST_K,
    DENSE,
    EAGER,
    EAGER_MERGE,
    EAGER_ROW_KERNELS,
    STRIDED,
    Implementation,
    RingCode,
    RowKernel,
    Support,
    under_compile,
)

_ZEROS: Final = (RowKernel("q", 0, 1), RowKernel("k", 0, 1), RowKernel("k", 0, 1))
_CONTIGUOUS: Final = (RowKernel("k", 2, 0, kind=STRIDED),) * 2
_JOIN: Final = RowKernel("q", 0, 2, "whole", STRIDED)  # _partial_update
_HALF_K: Final = (ADD_K, RowKernel("k", 0, 2, "whole", STRIDED))
_RING: Final = RingCode(  # _templated_ring_attention and _templated_ring_attention_backward
    queries_last=True,
    copies=3,
    enter={"fwd": _CONTIGUOUS, "bwd": (*_ZEROS, *_CONTIGUOUS)},
    send=(RowKernel("kv", 2, 0),),
    read=(
        RowKernel("q", 2, 0, kind=STRIDED),
    ),  # _flash_attention_backward wants tokens first, a join leaves heads first
    read_tails=(RowKernel("lse", 0, 2), RowKernel("q", 2, 0, kind=STRIDED)),
    first=(CAST,),
    merge=EAGER_MERGE,  # _SDPAMerger, step and _merge_one
    merge_tails=(*EAGER_MERGE, RowKernel("lse", 0, 2, "whole"), _JOIN),
    leave={"fwd": (BACK,), "bwd": (BACK, RowKernel("kv", 1, 1))},
    first_dq=(ADD,),
    sum_dq_tails=(ADD, _JOIN),
    idle_dq=(RowKernel("q", 0, 3, "whole"),),
    first_dkv=(ADD_K, ADD_K, *(RowKernel("k", 0, 2, kind=STRIDED),) * 2),  # flatten
    sum_dkv_heads=(*_HALF_K, *_HALF_K),
    idle_dkv=(*_ZEROS, RowKernel("k", 0, 3, "whole"), RowKernel("k", 0, 3, "whole")),
    send_dkv=(RowKernel("kv", 0, 2, "whole"),),
)

_ATEN: Final = {"attention": ("aten_{kernel} fwd",), "attention_backward": ("aten_{kernel} bwd",)}
_ALONE: Final = EAGER | _ATEN | {"entry": ("autograd entry {pass}",), "exit": ("autograd exit {pass}",)}
_EAGER: Final = Implementation(
    name="torch",
    source="torch 2.11, scaled_dot_product_attention and torch.distributed.tensor.experimental.context_parallel",
    strategies={
        "none": Support(masks=DENSE, views=(4, 0), launches=_ALONE),  # transposes
        "ring": Support(masks=DENSE, chunks=1),
        "zigzag_ring": Support(masks=("causal",), chunks=2),
        "allgather": Support(
            masks=DENSE, chunks=2, knobs={"layout": ("zigzag", "contiguous")}, balanced=("layout", "zigzag")
        ),
    },
    kernels=("sdpa_flash", "cudnn"),
    ring=_RING,
    gathered=replace(_RING, gathers=True),
    launches=dict.fromkeys(EAGER, ("torch_eager {pass}", "eager"))
    | _ATEN
    | {
        "barrier": ("torch begin {pass}", "context_parallel {kernel} {pass}"),
        "exit": ("torch end {pass}",),
        "transfer": ("permute_tensor",),
        "all_gather": ("all_gather_tensor",),
    },
    row_kernels=EAGER_ROW_KERNELS,
)
_SUM: Final = (ADD,)
_FUSED: Final = replace(  # sums in one pass over each tensor
    _RING,
    enter={"fwd": (), "bwd": ()},
    merge=_SUM,
    merge_tails=_SUM,
    first_dq=(CAST,),
    sum_dq_tails=_SUM,
    idle_dq=(),
    first_dkv=(CAST_K, CAST_K),
    sum_dkv_heads=(ADD_K, ADD_K),
    idle_dkv=(),
)
_PLAIN: Final = under_compile(_EAGER, _ALONE)
_COMPILED: Final = replace(  # inside a layer; which order Inductor puts it in: python -m studies.steps.order
    _PLAIN,
    strategies={**(_EAGER.strategies or {}), **(_PLAIN.strategies or {})},
    ring=_FUSED,
    gathered=replace(_FUSED, gathers=True),
    late_gradients=True,
)
TORCH: Final = replace(_EAGER, compiled=_COMPILED)
