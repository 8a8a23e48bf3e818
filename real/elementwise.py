"""Memory-bound kernels of the executor, in Triton on a GPU and in plain PyTorch elsewhere.

Legend of tensor suffixes: T tokens, H heads, D head dimension, N rows, C contiguous elements of a row.
Bytes moved (read and written) of each, for tensors of n elements of `out`, besides the small log-sum-exp:
`merge` fp32 += bf16: 10 n; `merge` into bf16: 8 n; `accumulate` fp32 += bf16: 10 n; `transpose_rows` and
`gather_rows` of bf16: 4 n.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without Triton
    triton = None


def merge(acc_THD: Tensor, lse_HT: Tensor, part_THD: Tensor, part_lse_HT: Tensor, out_THD: Tensor) -> None:
    """Merges a partial attention result into an accumulator by log-sum-exp; updates `lse_HT` in place.

    out = acc exp(lse - new) + part exp(part_lse - new), new = log(exp lse + exp part_lse).

    Args:
        acc_THD: running output, fp32 or bf16 (read).
        lse_HT: its log-sum-exp, fp32, overwritten with the merged one.
        part_THD: partial output of the new block of keys.
        part_lse_HT: its log-sum-exp, fp32.
        out_THD: receives the merged output; may be `acc_THD` itself, or bf16 in the last step.

    Reference: Liu, Zaharia, Abbeel, Ring Attention (2023); Dao, FlashAttention-2 (2023), section 3.1.
    Differs: none.
    """
    if not acc_THD.is_cuda:
        new = torch.logaddexp(lse_HT, part_lse_HT)
        finite = new.nan_to_num(neginf=0.0)  # a row that has seen no key yet keeps the weights 0, not NaN
        old_weight, weight = (torch.exp(x - finite).T[..., None] for x in (lse_HT, part_lse_HT))
        out_THD.copy_(acc_THD * old_weight + part_THD * weight)
        lse_HT.copy_(new)
        return
    num_tokens, num_heads, head_dim = acc_THD.shape
    tokens = 16
    _merge_kernel[(triton.cdiv(num_tokens, tokens), num_heads)](
        acc_THD, lse_HT, part_THD, part_lse_HT, out_THD, num_tokens, num_heads * head_dim,
        lse_HT.stride(0), part_lse_HT.stride(0), head_dim, tokens,
    )  # fmt: skip


def accumulate(acc: Tensor, x: Tensor) -> None:
    """acc += x for contiguous tensors of one shape, acc fp32 and x bf16."""
    if not acc.is_cuda:
        acc += x
        return
    n, block = acc.numel(), 4096
    _accumulate_kernel[(triton.cdiv(n, block),)](acc, x, n, block)


def transpose_rows(x_ABC: Tensor, out_BAC: Tensor) -> None:
    """out[b, a] = x[a, b] for rows of C contiguous elements: the packing around an all-to-all."""
    if not x_ABC.is_cuda:
        out_BAC.copy_(x_ABC.transpose(0, 1))
        return
    a, b, c = x_ABC.shape
    block = min(1024, triton.next_power_of_2(c))
    rows = max(1, 4096 // block)
    _transpose_kernel[(triton.cdiv(a * b, rows), triton.cdiv(c, block))](x_ABC, out_BAC, a, b, c, rows, block)


def gather_rows(x_NC: Tensor, index_N: Tensor, out_NC: Tensor) -> None:
    """out[i] = x[index[i]] for rows of C contiguous elements: re-ordering of tokens."""
    if not x_NC.is_cuda:
        torch.index_select(x_NC, 0, index_N, out=out_NC)
        return
    n, c = out_NC.shape
    block = min(1024, triton.next_power_of_2(c))
    rows = max(1, 4096 // block)
    _gather_kernel[(triton.cdiv(n, rows), triton.cdiv(c, block))](x_NC, index_N, out_NC, n, c, rows, block)


if triton is not None:

    @triton.jit
    def _merge_kernel(
        acc, lse, part, part_lse, out, num_tokens, token_stride, lse_stride, part_lse_stride,
        head_dim: tl.constexpr, tokens: tl.constexpr,
    ):  # fmt: skip
        t = tl.program_id(0) * tokens + tl.arange(0, tokens)
        head = tl.program_id(1)
        d = tl.arange(0, head_dim)
        inside = t < num_tokens
        old = tl.load(lse + head * lse_stride + t, mask=inside, other=0.0)
        new_part = tl.load(part_lse + head * part_lse_stride + t, mask=inside, other=0.0)
        top = tl.maximum(old, new_part)
        top = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen no key yet: weights 0, not NaN
        new = top + tl.log(tl.exp(old - top) + tl.exp(new_part - top))
        finite = tl.where(new == float("-inf"), 0.0, new)
        at = t.to(tl.int64)[:, None] * token_stride + head * head_dim + d[None, :]
        x = tl.load(acc + at, mask=inside[:, None], other=0.0).to(tl.float32)
        y = tl.load(part + at, mask=inside[:, None], other=0.0).to(tl.float32)
        merged = x * tl.exp(old - finite)[:, None] + y * tl.exp(new_part - finite)[:, None]
        tl.store(out + at, merged.to(out.dtype.element_ty), mask=inside[:, None])
        tl.store(lse + head * lse_stride + t, new, mask=inside)

    @triton.jit
    def _accumulate_kernel(acc, x, n, block: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = at < n
        total = tl.load(acc + at, mask=inside) + tl.load(x + at, mask=inside).to(tl.float32)
        tl.store(acc + at, total, mask=inside)

    @triton.jit
    def _transpose_kernel(x, out, a, b, c, rows: tl.constexpr, block: tl.constexpr):
        row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)  # row of `out`: (b, a)
        col = tl.program_id(1) * block + tl.arange(0, block)
        inside = (row < a * b)[:, None] & (col < c)[None, :]
        source = (row % a) * b + row // a
        value = tl.load(x + source[:, None] * c + col[None, :], mask=inside)
        tl.store(out + row[:, None] * c + col[None, :], value, mask=inside)

    @triton.jit
    def _gather_kernel(x, index, out, n, c, rows: tl.constexpr, block: tl.constexpr):
        row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
        col = tl.program_id(1) * block + tl.arange(0, block)
        inside = (row < n)[:, None] & (col < c)[None, :]
        source = tl.load(index + row, mask=row < n, other=0).to(tl.int64)
        value = tl.load(x + source[:, None] * c + col[None, :], mask=inside)
        tl.store(out + row[:, None] * c + col[None, :], value, mask=inside)
