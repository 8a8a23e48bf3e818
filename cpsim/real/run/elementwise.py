"""Memory-bound kernels of the executor, in Triton on a GPU and in plain PyTorch elsewhere.

Legend of tensor suffixes: T tokens, H heads, D head dimension, N rows, C contiguous elements of a row.
Bytes moved (read and written) of each, for tensors of n elements of `out`, besides the small log-sum-exp:
`merge` fp32 += bf16: 10 n; `merge` into bf16: 8 n; `accumulate` fp32 += bf16: 10 n; `transpose_rows` and
`gather_rows` of bf16: 4 n.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """Tables of `sum_rows`; offsets [N] int32 count heads of D elements from the start of memory, -1: none."""

    width: int
    """Heads of every row."""
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
        narrow_ND: memory in the working dtype, one head a row.
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
        total = sum(_take(base, source, tables.width) for source in tables.source)
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
    _sum_kernel[(triton.cdiv(count, rows), triton.cdiv(elements, block))](
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
    """[N, width * D] of the rows that start at these heads; zeros where there is none."""
    at = rows.long()[:, None] + torch.arange(width)
    return torch.where((rows >= 0)[:, None, None], memory[at.clamp(min=0)], 0).flatten(1)


def _put(memory: Tensor, rows: Tensor, width: int, values: Tensor) -> None:
    there = rows >= 0
    at = rows[there].long()[:, None] + torch.arange(width)
    memory[at] = values[there].unflatten(1, (width, -1)).to(memory.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Tables of `merge_rows`; offsets [N] int32 count heads of D elements from the start of memory, -1: none."""

    num_heads: int
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
        narrow_ND: memory in the working dtype, one head a row.
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
    _merge_rows_kernel[(triton.cdiv(count, tokens), heads)](
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
        tokens,
    )


def _merge_on_cpu(narrow: Tensor, wide: Tensor, lse: Tensor, part_lse: Tensor, tables: Merge) -> None:
    heads, column = tables.num_heads, tables.column.long()
    part, total = _take(narrow, tables.part, heads), torch.zeros(())
    there = torch.zeros(len(column), dtype=torch.bool)
    for memory, old in zip((narrow, wide), tables.old, strict=True):
        if old is not None:
            total, there = total + _take(memory, old, heads), there | (old >= 0)
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
            _put(memory, target, heads, merged.flatten(1))


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
        acc,
        lse,
        part,
        part_lse,
        out,
        num_tokens,
        token_stride,
        lse_stride,
        part_lse_stride,
        head_dim: tl.constexpr,
        tokens: tl.constexpr,
    ):
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
    def _sum_kernel(
        base,
        narrow,
        wide,
        source,
        old_narrow,
        old_wide,
        to_narrow,
        to_wide,
        lse,
        lse_column,
        to_lse,
        to_lse_column,
        num_columns,
        lse_stride,
        to_lse_stride,
        count,
        dim: tl.constexpr,
        columns: tl.constexpr,
        num_sources: tl.constexpr,
        has_old_narrow: tl.constexpr,
        has_old_wide: tl.constexpr,
        has_to_narrow: tl.constexpr,
        has_to_wide: tl.constexpr,
        lse_heads: tl.constexpr,
        lse_block: tl.constexpr,
        rows: tl.constexpr,
        block: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
        col = (tl.program_id(1) * block + tl.arange(0, block))[None, :]
        inside, within = row < count, col < columns
        total = tl.zeros((rows, block), tl.float32)
        for s in tl.static_range(num_sources):
            at = tl.load(source + s * count + row, mask=inside, other=-1)
            there = (at >= 0)[:, None] & within
            total += tl.load(base + at.to(tl.int64)[:, None] * dim + col, mask=there, other=0.0).to(tl.float32)
        if has_old_narrow:
            at = tl.load(old_narrow + row, mask=inside, other=-1)
            there = (at >= 0)[:, None] & within
            total += tl.load(narrow + at.to(tl.int64)[:, None] * dim + col, mask=there, other=0.0).to(tl.float32)
        if has_old_wide:
            at = tl.load(old_wide + row, mask=inside, other=-1)
            there = (at >= 0)[:, None] & within
            total += tl.load(wide + at.to(tl.int64)[:, None] * dim + col, mask=there, other=0.0)
        if has_to_narrow:
            at = tl.load(to_narrow + row, mask=inside, other=-1)
            there = (at >= 0)[:, None] & within
            tl.store(narrow + at.to(tl.int64)[:, None] * dim + col, total.to(narrow.dtype.element_ty), mask=there)
        if has_to_wide:
            at = tl.load(to_wide + row, mask=inside, other=-1)
            there = (at >= 0)[:, None] & within
            tl.store(wide + at.to(tl.int64)[:, None] * dim + col, total, mask=there)
        if lse_heads > 0:
            head = tl.arange(0, lse_block)[None, :]
            of_rows = (row < num_columns) & (tl.program_id(1) == 0)
            there = of_rows[:, None] & (head < lse_heads)
            at = tl.load(lse_column + row, mask=of_rows, other=0)[:, None] + head * lse_stride
            to = tl.load(to_lse_column + row, mask=of_rows, other=0)[:, None] + head * to_lse_stride
            tl.store(to_lse + to, tl.load(lse + at, mask=there, other=0.0), mask=there)

    @triton.jit
    def _merge_rows_kernel(
        narrow,
        wide,
        lse,
        part_lse,
        part,
        part_column,
        column,
        old_narrow,
        old_wide,
        to_narrow,
        to_wide,
        count,
        lse_stride,
        part_lse_stride,
        has_old_narrow: tl.constexpr,
        has_old_wide: tl.constexpr,
        has_to_narrow: tl.constexpr,
        has_to_wide: tl.constexpr,
        dim: tl.constexpr,
        tokens: tl.constexpr,
    ):
        i = tl.program_id(0) * tokens + tl.arange(0, tokens)
        inside = i < count
        head = tl.program_id(1)
        d = (head * dim + tl.arange(0, dim))[None, :]
        at = tl.load(part + i, mask=inside, other=0).to(tl.int64)
        y = tl.load(narrow + at[:, None] * dim + d, mask=inside[:, None], other=0.0).to(tl.float32)
        x = tl.zeros((tokens, dim), tl.float32)
        known = tl.zeros((tokens,), tl.int1)
        if has_old_narrow:
            at = tl.load(old_narrow + i, mask=inside, other=-1).to(tl.int64)
            known = known | (at >= 0)
            x += tl.load(narrow + at[:, None] * dim + d, mask=(at >= 0)[:, None], other=0.0).to(tl.float32)
        if has_old_wide:
            at = tl.load(old_wide + i, mask=inside, other=-1).to(tl.int64)
            known = known | (at >= 0)
            x += tl.load(wide + at[:, None] * dim + d, mask=(at >= 0)[:, None], other=0.0)
        own = lse + head * lse_stride + tl.load(column + i, mask=inside, other=0)
        old = tl.load(own, mask=inside & known, other=float("-inf"))
        at_part = tl.load(part_column + i, mask=inside, other=0)
        added = tl.load(part_lse + head * part_lse_stride + at_part, mask=inside, other=float("-inf"))
        top = tl.maximum(old, added)
        top = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen no key yet: weights 0, not NaN
        new = top + tl.log(tl.exp(old - top) + tl.exp(added - top))
        finite = tl.where(new == float("-inf"), 0.0, new)
        merged = x * tl.exp(old - finite)[:, None] + y * tl.exp(added - finite)[:, None]
        tl.store(own, new, mask=inside)
        if has_to_narrow:
            at = tl.load(to_narrow + i, mask=inside, other=-1).to(tl.int64)
            tl.store(narrow + at[:, None] * dim + d, merged.to(narrow.dtype.element_ty), mask=(at >= 0)[:, None])
        if has_to_wide:
            at = tl.load(to_wide + i, mask=inside, other=-1).to(tl.int64)
            tl.store(wide + at[:, None] * dim + d, merged, mask=(at >= 0)[:, None])

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
