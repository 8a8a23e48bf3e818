"""Triton kernels of `cpsim.real.run.layer_calls`, which says what each computes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_kernel(x, weight, out, eps, columns: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    at = tl.arange(0, block)
    inside = at < columns
    values = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / columns + eps)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + at, (values * scale * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_bwd_kernel(dout, x, weight, dx, partial, tokens, rows, eps, columns: tl.constexpr, block: tl.constexpr):
    at = tl.arange(0, block)
    inside = at < columns
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((block,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * rows * columns
    for i in range(tl.minimum(rows, tokens - tl.program_id(0) * rows)):
        row = first + i * columns + at
        values = tl.load(x + row, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(dout + row, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, 0) / columns + eps)
        unit, inner = values * scale, grad * w
        made = scale * (inner - unit * (tl.sum(inner * unit, 0) / columns))
        tl.store(dx + row, made.to(dx.dtype.element_ty), mask=inside)
        total += grad * unit
    tl.store(partial + tl.program_id(0).to(tl.int64) * columns + at, total, mask=inside)


@triton.jit
def swiglu_kernel(gate_up, out, columns: tl.constexpr, block: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    inside = at < columns
    gate = tl.load(gate_up + row * 2 * columns + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * columns + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_bwd_kernel(dout, gate_up, made, columns: tl.constexpr, block: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    inside = at < columns
    gate = tl.load(gate_up + row * 2 * columns + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * columns + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(dout + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(made + row * 2 * columns + at, dgate.to(made.dtype.element_ty), mask=inside)
    dup = grad * gate * sigmoid
    tl.store(made + (row * 2 + 1) * columns + at, dup.to(made.dtype.element_ty), mask=inside)


@triton.jit
def rotary_kernel(
    joint,
    q,
    kv,
    cos,
    sin,
    q_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    block: tl.constexpr,
    back: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, block)[:, None], tl.arange(0, half)[None, :]
    heads: tl.constexpr = q_heads + 2 * kv_heads
    is_query, turns = head < q_heads, head < q_heads + kv_heads
    inside = (head < heads) & (d < half)
    c = tl.where(turns, tl.load(cos + row * half + d), 1.0)
    s = tl.where(turns, tl.load(sin + row * half + d), 0.0)
    whole = joint + (row * heads + head) * 2 * half + d
    queries = q + (row * q_heads + head) * 2 * half + d
    keys = kv + (row * 2 * kv_heads + head - q_heads) * 2 * half + d
    if back:
        low = tl.load(queries, mask=is_query, other=0.0) + tl.load(keys, mask=inside & ~is_query, other=0.0)
        high = tl.load(queries + half, mask=is_query, other=0.0)
        high += tl.load(keys + half, mask=inside & ~is_query, other=0.0)
        low, high = low.to(tl.float32), high.to(tl.float32)
        tl.store(whole, (low * c + high * s).to(joint.dtype.element_ty), mask=inside)
        tl.store(whole + half, (high * c - low * s).to(joint.dtype.element_ty), mask=inside)
    else:
        low = tl.load(whole, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(whole + half, mask=inside, other=0.0).to(tl.float32)
        one, two = (low * c - high * s).to(q.dtype.element_ty), (high * c + low * s).to(q.dtype.element_ty)
        tl.store(queries, one, mask=is_query)
        tl.store(queries + half, two, mask=is_query)
        tl.store(keys, one, mask=inside & ~is_query)
        tl.store(keys + half, two, mask=inside & ~is_query)
