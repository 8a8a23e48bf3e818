"""Triton kernels of `cpsim.real.run.elementwise`, which says what each computes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_kernel(
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
def sum_kernel(
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
def merge_rows_kernel(
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
    unit: tl.constexpr,
    dim: tl.constexpr,
    tokens: tl.constexpr,
):
    i = tl.program_id(0) * tokens + tl.arange(0, tokens)
    inside = i < count
    head = tl.program_id(1)
    d = (head * dim + tl.arange(0, dim))[None, :]
    at = tl.load(part + i, mask=inside, other=0).to(tl.int64)
    y = tl.load(narrow + at[:, None] * unit + d, mask=inside[:, None], other=0.0).to(tl.float32)
    x = tl.zeros((tokens, dim), tl.float32)
    known = tl.zeros((tokens,), tl.int1)
    if has_old_narrow:
        at = tl.load(old_narrow + i, mask=inside, other=-1).to(tl.int64)
        known = known | (at >= 0)
        x += tl.load(narrow + at[:, None] * unit + d, mask=(at >= 0)[:, None], other=0.0).to(tl.float32)
    if has_old_wide:
        at = tl.load(old_wide + i, mask=inside, other=-1).to(tl.int64)
        known = known | (at >= 0)
        x += tl.load(wide + at[:, None] * unit + d, mask=(at >= 0)[:, None], other=0.0)
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
        tl.store(narrow + at[:, None] * unit + d, merged.to(narrow.dtype.element_ty), mask=(at >= 0)[:, None])
    if has_to_wide:
        at = tl.load(to_wide + i, mask=inside, other=-1).to(tl.int64)
        tl.store(wide + at[:, None] * unit + d, merged, mask=(at >= 0)[:, None])


@triton.jit
def join_sinks_kernel(
    out,
    lse,
    sinks,
    untouched,
    num_tokens,
    token_stride,
    lse_stride,
    head_dim: tl.constexpr,
    block: tl.constexpr,
    tokens: tl.constexpr,
):
    t = tl.program_id(0) * tokens + tl.arange(0, tokens)
    head = tl.program_id(1)
    d = tl.arange(0, block)[None, :]
    inside = t < num_tokens
    sink = tl.load(sinks + head)
    at_lse = lse + head.to(tl.int64) * lse_stride + t
    old = tl.load(at_lse, mask=inside, other=0.0)
    old = tl.where(tl.load(untouched + t, mask=inside, other=0) != 0, float("-inf"), old)
    top = tl.maximum(old, sink)
    new = top + tl.log(tl.exp(old - top) + tl.exp(sink - top))
    at = out + t.to(tl.int64)[:, None] * token_stride + head * head_dim + d
    there = inside[:, None] & (d < head_dim)
    x = tl.load(at, mask=there, other=0.0).to(tl.float32) * tl.exp(old - new)[:, None]
    tl.store(at, x.to(out.dtype.element_ty), mask=there)
    tl.store(at_lse, new, mask=inside)


@triton.jit
def sink_gradients_kernel(
    out,
    dout,
    lse,
    sinks,
    total,
    num_tokens,
    token_stride,
    dout_stride,
    lse_stride,
    head_dim: tl.constexpr,
    block: tl.constexpr,
    tokens: tl.constexpr,
    turns: tl.constexpr,
):
    head = tl.program_id(1)
    d = tl.arange(0, block)[None, :]
    sink = tl.load(sinks + head)
    found = tl.zeros((tokens,), tl.float32)
    for turn in range(turns):
        t = (tl.program_id(0) * turns + turn) * tokens + tl.arange(0, tokens)
        inside = t < num_tokens
        there = inside[:, None] & (d < head_dim)
        wide_t = t.to(tl.int64)[:, None]
        x = tl.load(out + wide_t * token_stride + head * head_dim + d, mask=there, other=0.0).to(tl.float32)
        y = tl.load(dout + wide_t * dout_stride + head * head_dim + d, mask=there, other=0.0).to(tl.float32)
        known = tl.load(lse + head.to(tl.int64) * lse_stride + t, mask=inside, other=float("inf"))
        found += tl.exp(sink - known) * tl.sum(x * y, axis=1)
    tl.atomic_add(total + head, -tl.sum(found, axis=0))


@triton.jit
def accumulate_kernel(acc, x, n, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < n
    total = tl.load(acc + at, mask=inside) + tl.load(x + at, mask=inside).to(tl.float32)
    tl.store(acc + at, total, mask=inside)


@triton.jit
def transpose_kernel(x, out, a, b, c, rows: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)  # row of `out`: (b, a)
    col = tl.program_id(1) * block + tl.arange(0, block)
    inside = (row < a * b)[:, None] & (col < c)[None, :]
    source = (row % a) * b + row // a
    value = tl.load(x + source[:, None] * c + col[None, :], mask=inside)
    tl.store(out + row[:, None] * c + col[None, :], value, mask=inside)


@triton.jit
def gather_kernel(x, index, out, n, c, rows: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    col = tl.program_id(1) * block + tl.arange(0, block)
    inside = (row < n)[:, None] & (col < c)[None, :]
    source = tl.load(index + row, mask=row < n, other=0).to(tl.int64)
    value = tl.load(x + source[:, None] * c + col[None, :], mask=inside)
    tl.store(out + row[:, None] * c + col[None, :], value, mask=inside)
