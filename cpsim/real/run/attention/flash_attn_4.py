"""flash-attn 4 (CuTe DSL), of sequences and of listed blocks.

It calls the functions under the package's autograd wrappers, because those cannot take a given log-sum-exp.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cpsim.masks.blocks import BLOCK
from cpsim.masks.slices import UNCUT
from cpsim.real.run.attention.call import Call, Grads, UnsupportedCall


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    if call.varlen:
        out, lse, *_ = _flash_attn_fwd(
            q,
            k,
            v,
            cu_seqlens_q=call.cu_q,
            cu_seqlens_k=call.cu_k,
            max_seqlen_q=call.max_q,
            max_seqlen_k=call.max_k,
            **_mask(call),
            return_lse=True,
            out=into,
        )
        return out, lse
    target = None if into is None else into[None]
    out, lse, *_ = _flash_attn_fwd(q[None], k[None], v[None], **_mask(call), return_lse=True, out=target)
    return out[0], lse[0]


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Grads | None
) -> Grads:
    from flash_attn.cute.interface import _flash_attn_bwd

    dq, dk, dv = into or (None,) * 3
    if call.varlen:
        dq, dk, dv = _flash_attn_bwd(
            q,
            k,
            v,
            out,
            dout,
            lse,
            **_mask(call),
            cu_seqlens_q=call.cu_q,
            cu_seqlens_k=call.cu_k,
            max_seqlen_q=call.max_q,
            max_seqlen_k=call.max_k,
            dq=dq,
            dk=dk,
            dv=dv,
        )[:3]
        return dq, dk, dv
    if into is not None:
        dq, dk, dv = (g[None] for g in into)
    dq, dk, dv = _flash_attn_bwd(
        q[None], k[None], v[None], out[None], dout[None], lse[None], **_mask(call), dq=dq, dk=dk, dv=dv
    )[:3]
    return dq[0], dk[0], dv[0]


def _mask(call: Call) -> dict[str, Any]:
    if not call.is_window:
        return {"causal": call.causal}
    left, right = (None if side == UNCUT else side for side in call.window)
    return {"causal": False, "window_size_left": left, "window_size_right": right}


def sparse_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    blocks, target = _blocks(call, slice(0, 4)), None if into is None else into[None]
    out, lse, *_ = _flash_attn_fwd(q[None], k[None], v[None], block_sparse_tensors=blocks, return_lse=True, out=target)
    return out[0], lse[0]


def sparse_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Grads | None
) -> Grads:
    from flash_attn.cute.interface import _flash_attn_bwd

    blocks = _blocks(call, slice(4, 8))
    dq, dk, dv = (None,) * 3 if into is None else (g[None] for g in into)
    dq, dk, dv = _flash_attn_bwd(
        q[None], k[None], v[None], out[None], dout[None], lse[None], block_sparse_tensors=blocks, dq=dq, dk=dk, dv=dv
    )[:3]
    return dq[0], dk[0], dv[0]


def _blocks(call: Call, side: slice) -> Any:
    """flash-attn 4's lists of the blocks that each row of query blocks visits (or each row of key blocks)."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    partial_count, partial_list, full_count, full_list = call.blocks.tables[side]
    if call.blocks.num_partial:
        raise UnsupportedCall(f"fa4_sparse takes masks of whole blocks of {BLOCK} tokens here; use flex")
    tables = {
        "mask_block_cnt": partial_count,
        "mask_block_idx": partial_list,
        "full_block_cnt": full_count,
        "full_block_idx": full_list,
        "block_size": (BLOCK, BLOCK),
    }
    return BlockSparseTensorsTorch(**{name: tables[name] for name in BlockSparseTensorsTorch._fields if name in tables})
