"""Memory-bound kernels of the executor, in Triton on a GPU and in plain PyTorch elsewhere.

Legend of tensor suffixes: T tokens, H heads, D head dimension, N rows, C contiguous elements of a row.
Bytes moved (read and written) of each, for tensors of n elements of `out`, besides the small log-sum-exp:
`merge` fp32 += bf16: 10 n; `merge` into bf16: 8 n; `accumulate` fp32 += bf16: 10 n; `transpose_rows`,
`gather_rows`, `join_sinks` and `add_sink_gradients` of bf16: 4 n.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

with suppress(ImportError):  # CPU builds of PyTorch come without Triton
    import triton

    from cpsim.real.run import triton_rows


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
    triton_rows.merge_kernel[(triton.cdiv(num_tokens, tokens), num_heads)](
        acc_THD,
        lse_HT,
        part_THD,
        part_lse_HT,
        out_THD,
        num_tokens,
        num_heads * head_dim,
        lse_HT.stride(0),
        part_lse_HT.stride(0),
        head_dim,
        tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """Tables of `sum_rows`; offsets [N] int32 count units of D elements from the start of memory, -1: none."""

    width: int
    """Units of every row."""
    source: Tensor
    """[S, N]: what is added."""
    source_wide: bool
    """Whether sources are in the accumulators' dtype."""
    old: tuple[Tensor | None, Tensor | None]
    """What is added to, in the working dtype and in the accumulators' dtype."""
    target: tuple[Tensor | None, Tensor | None]
    """Where the sum goes, in either dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Columns of log-sum-exps that go along with rows, never more than these."""

    source_HT: Tensor
    """fp32."""
    source: Tensor
    """[L] int32."""
    target_HT: Tensor
    """fp32, of as many heads."""
    target: Tensor
    """[L] int32."""


def sum_rows(narrow_ND: Tensor, wide_ND: Tensor, tables: Sum, columns: Columns | None = None) -> None:
    """target = old + sum of sources, row by row, summed in the accumulators' dtype: copies, casts and gradients.

    Args:
        narrow_ND: memory in the working dtype, one unit a row.
        wide_ND: the same memory in the accumulators' dtype.
        tables: which rows.
        columns: what is copied beside them.
    """
    dim, count = narrow_ND.shape[1], tables.source.shape[1]
    if count == 0:
        return
    assert columns is None or len(columns.source) <= count
    base = wide_ND if tables.source_wide else narrow_ND
    if not narrow_ND.is_cuda:
        first, *others = (_take(base, source, tables.width) for source in tables.source)
        total = sum(others, first)
        for memory, old in zip((narrow_ND, wide_ND), tables.old, strict=True):
            total = total if old is None else total + _take(memory, old, tables.width)
        for memory, target in zip((narrow_ND, wide_ND), tables.target, strict=True):
            if target is not None:
                _put(memory, target, tables.width, total)
        if columns:
            columns.target_HT[:, columns.target.long()] = columns.source_HT[:, columns.source.long()]
        return
    elements = tables.width * dim
    block = min(1024, triton.next_power_of_2(elements))
    rows = max(1, 4096 // block)
    spare, heads = tables.source, columns.source_HT.shape[0] if columns else 0
    given = [t is not None for t in (*tables.old, *tables.target)]
    beside = (
        (spare,) * 4 + (0,) * 3
        if columns is None
        else (
            columns.source_HT,
            columns.source,
            columns.target_HT,
            columns.target,
            len(columns.source),
            columns.source_HT.stride(0),
            columns.target_HT.stride(0),
        )
    )
    triton_rows.sum_kernel[(triton.cdiv(count, rows), triton.cdiv(elements, block))](
        base,
        narrow_ND,
        wide_ND,
        tables.source,
        *(spare if t is None else t for t in (*tables.old, *tables.target)),
        *beside,
        count,
        dim,
        elements,
        len(tables.source),
        *given,
        heads,
        triton.next_power_of_2(heads),
        rows,
        block,
    )


def _take(memory: Tensor, rows: Tensor, width: int) -> Tensor:
    """[N, width * D] of the rows that start at these units; zeros where there is none."""
    at = rows.long()[:, None] + torch.arange(width)
    return torch.where((rows >= 0)[:, None, None], memory[at.clamp(min=0)], 0).flatten(1)


def _put(memory: Tensor, rows: Tensor, width: int, values: Tensor) -> None:
    there = rows >= 0
    at = rows[there].long()[:, None] + torch.arange(width)
    memory[at] = values[there].unflatten(1, (width, -1)).to(memory.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Tables of `merge_rows`; offsets [N] int32 count units of D elements from the start of memory, -1: none."""

    num_heads: int
    width: int
    """Units of a head."""
    part: Tensor
    """The partial output's rows."""
    part_column: Tensor
    """Their columns in its log-sum-exp."""
    old: tuple[Tensor | None, Tensor | None]
    """The accumulator's rows, in the working dtype and in the accumulators' dtype; in neither: nothing yet."""
    target: tuple[Tensor | None, Tensor | None]
    """Where merged rows go."""
    column: Tensor
    """Their columns in the log-sum-exp."""


def merge_rows(narrow_ND: Tensor, wide_ND: Tensor, lse_HT: Tensor, part_lse_HT: Tensor, tables: Merge) -> None:
    """Merges rows of a partial attention result into rows of an accumulator by log-sum-exp, in place.

    out = old exp(lse - new) + part exp(part_lse - new), new = log(exp lse + exp part_lse).

    Args:
        narrow_ND: memory in the working dtype, one unit a row.
        wide_ND: the same memory in the accumulators' dtype.
        lse_HT: log-sum-exp of the accumulator, updated.
        part_lse_HT: log-sum-exp of the partial result.
        tables: which rows.

    Reference: Liu, Zaharia, Abbeel, Ring Attention (2023); Dao, FlashAttention-2 (2023), section 3.1.
    Differs: rows may change from the working dtype to the accumulators' and back as they are merged.
    """
    count, heads = len(tables.part), tables.num_heads
    if count == 0:
        return
    if not narrow_ND.is_cuda:
        _merge_on_cpu(narrow_ND, wide_ND, lse_HT, part_lse_HT, tables)
        return
    tokens = 16
    given = [t is not None for t in (*tables.old, *tables.target)]
    triton_rows.merge_rows_kernel[(triton.cdiv(count, tokens), heads)](
        narrow_ND,
        wide_ND,
        lse_HT,
        part_lse_HT,
        tables.part,
        tables.part_column,
        tables.column,
        *(tables.part if t is None else t for t in (*tables.old, *tables.target)),
        count,
        lse_HT.stride(0),
        part_lse_HT.stride(0),
        *given,
        narrow_ND.shape[1],
        tables.width * narrow_ND.shape[1],
        tokens,
    )


def _merge_on_cpu(narrow: Tensor, wide: Tensor, lse: Tensor, part_lse: Tensor, tables: Merge) -> None:
    heads, column = tables.num_heads, tables.column.long()
    units = heads * tables.width
    part, total = _take(narrow, tables.part, units), torch.zeros(())
    there = torch.zeros(len(column), dtype=torch.bool)
    for memory, old in zip((narrow, wide), tables.old, strict=True):
        if old is not None:
            total, there = total + _take(memory, old, units), there | (old >= 0)
    before = torch.where(there, lse[:, column], float("-inf"))
    added = part_lse[:, tables.part_column.long()]
    new = torch.logaddexp(before, added)
    finite = new.nan_to_num(neginf=0.0)  # a row that has seen no key yet keeps the weights 0, not NaN
    weight = [torch.exp(x - finite).T[..., None] for x in (before, added)]
    merged = total.unflatten(-1, (heads, -1)) * weight[0] if there.any() else 0.0
    merged = merged + part.unflatten(1, (heads, -1)) * weight[1]
    lse[:, column] = new
    for memory, target in zip((narrow, wide), tables.target, strict=True):
        if target is not None:
            _put(memory, target, units, merged.flatten(1))


def join_sinks(out_THD: Tensor, lse_HT: Tensor, sinks_H: Tensor, untouched_T: Tensor) -> None:
    """Scales complete outputs and their log-sum-exps, in place, as a sink of every head has it.

    out = out exp(lse - new), new = log(exp lse + exp sink).

    Args:
        out_THD: outputs; heads of a token lie side by side.
        lse_HT: their log-sum-exp.
        sinks_H: a logit of every head.
        untouched_T: rows that no kernel has written in this launch, zeros, whose log-sum-exps are the sinks alone.
    """
    if not out_THD.is_cuda:
        joined = torch.where(untouched_T, sinks_H[:, None], torch.logaddexp(lse_HT, sinks_H[:, None]))
        out_THD.mul_(torch.exp(lse_HT - joined).nan_to_num(0.0).T[..., None].to(out_THD.dtype))
        lse_HT.copy_(joined)
        return
    num_tokens, num_heads, head_dim = out_THD.shape
    tokens = 16
    triton_rows.join_sinks_kernel[(triton.cdiv(num_tokens, tokens), num_heads)](
        out_THD,
        lse_HT,
        sinks_H,
        untouched_T.view(torch.uint8),
        num_tokens,
        out_THD.stride(0),
        lse_HT.stride(0),
        head_dim,
        triton.next_power_of_2(head_dim),
        tokens,
    )


def add_sink_gradients(out_THD: Tensor, dout_THD: Tensor, lse_HT: Tensor, sinks_H: Tensor, total_H: Tensor) -> None:
    """Adds to the gradients of sinks: total -= sum over tokens of exp(sink - lse) (dout . out).

    Args:
        out_THD: outputs with sinks; heads of a token lie side by side, here and in
        dout_THD: their gradients.
        lse_HT: log-sum-exp with sinks.
        sinks_H: a logit of every head.
        total_H: sums, in the type of log-sum-exps.
    """
    if not out_THD.is_cuda:
        delta_HT = (dout_THD.to(total_H.dtype) * out_THD).sum(2).T
        total_H.sub_((torch.exp(sinks_H[:, None] - lse_HT) * delta_HT).sum(1))
        return
    num_tokens, num_heads, head_dim = out_THD.shape
    tokens, turns = 32, 16
    triton_rows.sink_gradients_kernel[(triton.cdiv(num_tokens, tokens * turns), num_heads)](
        out_THD,
        dout_THD,
        lse_HT,
        sinks_H,
        total_H,
        num_tokens,
        out_THD.stride(0),
        dout_THD.stride(0),
        lse_HT.stride(0),
        head_dim,
        triton.next_power_of_2(head_dim),
        tokens,
        turns,
    )


def accumulate(acc: Tensor, x: Tensor) -> None:
    """acc += x for contiguous tensors of one shape, acc fp32 and x bf16."""
    if not acc.is_cuda:
        acc += x
        return
    n, block = acc.numel(), 4096
    triton_rows.accumulate_kernel[(triton.cdiv(n, block),)](acc, x, n, block)


def transpose_rows(x_ABC: Tensor, out_BAC: Tensor) -> None:
    """out[b, a] = x[a, b] for rows of C contiguous elements: the packing around an all-to-all."""
    if not x_ABC.is_cuda:
        out_BAC.copy_(x_ABC.transpose(0, 1))
        return
    a, b, c = x_ABC.shape
    block = min(1024, triton.next_power_of_2(c))
    rows = max(1, 4096 // block)
    triton_rows.transpose_kernel[(triton.cdiv(a * b, rows), triton.cdiv(c, block))](
        x_ABC, out_BAC, a, b, c, rows, block
    )


def gather_rows(x_NC: Tensor, index_N: Tensor, out_NC: Tensor) -> None:
    """out[i] = x[index[i]] for rows of C contiguous elements: re-ordering of tokens."""
    if not x_NC.is_cuda:
        torch.index_select(x_NC, 0, index_N, out=out_NC)
        return
    n, c = out_NC.shape
    block = min(1024, triton.next_power_of_2(c))
    rows = max(1, 4096 // block)
    triton_rows.gather_kernel[(triton.cdiv(n, rows), triton.cdiv(c, block))](x_NC, index_N, out_NC, n, c, rows, block)
