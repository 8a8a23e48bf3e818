"""The one adapter to attention kernels: forward with log-sum-exp, and backward from given output and log-sum-exp.

Legend of tensor suffixes: T tokens (all sequences of one call, packed), H query heads, K key/value heads,
D head dimension. Log-sum-exp is [H, T] fp32 in natural logarithms for every kernel.

Kernels: `fa2` (flash-attn 2.x), `fa4` (flash-attn-4, CuTe DSL), `cudnn` and `sdpa_flash` (PyTorch's own), and
`math` (plain PyTorch on any device and dtype: the oracle of the tests).
A call with one sequence uses the kernel's dense entry point unless `varlen=True`; several use the varlen one.
A causal mask is aligned to the bottom right: query i of q sees keys up to i + k - q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

aten = torch.ops.aten


class UnsupportedCall(ValueError):
    """The kernel has no such call (for example cuDNN with a causal mask and unequal lengths)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Shapes of one attention kernel call, prepared once and used for any number of launches."""

    q_lens: tuple[int, ...]
    """Query tokens of each sequence."""
    k_lens: tuple[int, ...]
    """Key tokens of each sequence."""
    causal: bool
    varlen: bool
    """Whether to use the varlen entry point."""
    cu_q: Tensor
    """[sequences + 1] int32 offsets of queries on the device."""
    cu_k: Tensor
    """[sequences + 1] int32 offsets of keys on the device."""
    max_q: int
    max_k: int


def prepare(
    q_lens: Sequence[int], k_lens: Sequence[int], *, causal: bool, device: torch.device | str, varlen: bool = False
) -> Call:
    """Builds the Call for packed sequences; one sequence goes to the dense entry point unless `varlen`."""
    if len(q_lens) != len(k_lens) or not q_lens:
        raise ValueError(f"needs as many query as key lengths, at least one, got {len(q_lens)} and {len(k_lens)}")

    def offsets(lens: Sequence[int]) -> Tensor:
        total = [0]
        for n in lens:
            total.append(total[-1] + n)
        return torch.tensor(total, dtype=torch.int32, device=device)

    return Call(
        q_lens=tuple(q_lens), k_lens=tuple(k_lens), causal=causal, varlen=varlen or len(q_lens) > 1,
        cu_q=offsets(q_lens), cu_k=offsets(k_lens), max_q=max(q_lens), max_k=max(k_lens),
    )  # fmt: skip


def forward(
    kernel: str, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, call: Call, out_THD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of every sequence in the call.

    Args:
        kernel: one of KERNELS.
        q_THD: queries; k_TKD, v_TKD: keys and values, packed as the call says; heads of one token are contiguous.
        call: from `prepare`.
        out_THD: receives the output where given; PyTorch's kernels need a copy for that.

    Returns:
        out_THD in the dtype of q and lse_HT in fp32 (fp64 for `math` on fp64).
    """
    return _KERNELS[kernel][0](q_THD, k_TKD, v_TKD, call, out_THD)


def backward(
    kernel: str,
    dout_THD: Tensor, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, out_THD: Tensor, lse_HT: Tensor,
    call: Call, grads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients (dq_THD, dk_TKD, dv_TKD) for given output and log-sum-exp, which may cover more keys than the call.

    That is what a ring step needs: `out_THD` and `lse_HT` are those of the whole softmax, keys only one block.
    `grads` receive them where given; PyTorch's kernels need copies for that.
    """
    return _KERNELS[kernel][1](dout_THD, q_THD, k_TKD, v_TKD, out_THD, lse_HT, call, grads)


def kernel_version(kernel: str) -> str:
    """Package version behind a kernel, for provenance."""
    from importlib.metadata import PackageNotFoundError, version

    package = {"fa2": "flash-attn", "fa4": "flash-attn-4"}.get(kernel)
    if kernel == "cudnn":
        return str(torch.backends.cudnn.version())
    if package is None:
        return torch.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return "unpackaged build"


Grads = tuple[Tensor, Tensor, Tensor]


def _placed(made: Tensor, into: Tensor | None) -> Tensor:
    """The result of a kernel that allocates its own output, where the caller wants it."""
    return made if into is None else into.copy_(made)


def _all_placed(made: Grads, into: Grads | None) -> Grads:
    if into is None:
        return made
    dq, dk, dv = (_placed(m, i) for m, i in zip(made, into, strict=True))
    return dq, dk, dv


# --- flash-attn 2: the compiled extension itself, which both its Python interfaces end in ---


def _fa2_forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None
) -> tuple[Tensor, Tensor]:
    import flash_attn_2_cuda as ext

    scale = q.shape[-1] ** -0.5
    if call.varlen:
        out, lse, *_ = ext.varlen_fwd(
            q, k, v, into, call.cu_q, call.cu_k, None, None, None, None, call.max_q, call.max_k,
            0.0, scale, False, call.causal, -1, -1, 0.0, False, None,
        )  # fmt: skip
        return out, lse
    target = None if into is None else into[None]
    out, lse, *_ = ext.fwd(q[None], k[None], v[None], target, None, 0.0, scale, call.causal, -1, -1, 0.0, False, None)
    return out[0], lse[0]


def _fa2_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Grads | None
) -> tuple[Tensor, Tensor, Tensor]:
    import flash_attn_2_cuda as ext

    scale = q.shape[-1] ** -0.5
    if call.varlen:
        dq, dk, dv, _ = ext.varlen_bwd(
            dout, q, k, v, out, lse, *(into or (None,) * 3), call.cu_q, call.cu_k, None, call.max_q, call.max_k,
            0.0, scale, False, call.causal, -1, -1, 0.0, False, None, None,
        )  # fmt: skip
        return dq, dk, dv
    dq, dk, dv, _ = ext.bwd(
        dout[None], q[None], k[None], v[None], out[None], lse[None],
        *((None,) * 3 if into is None else (g[None] for g in into)), None, 0.0, scale, call.causal,
        -1, -1, 0.0, False, None, None,
    )  # fmt: skip
    return dq[0], dk[0], dv[0]


# --- flash-attn 4: the functions under its autograd wrappers, because those cannot take a given lse ---


def _fa4_forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None
) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    if call.varlen:
        out, lse, *_ = _flash_attn_fwd(
            q, k, v, cu_seqlens_q=call.cu_q, cu_seqlens_k=call.cu_k, max_seqlen_q=call.max_q,
            max_seqlen_k=call.max_k, causal=call.causal, return_lse=True, out=into,
        )  # fmt: skip
        return out, lse
    target = None if into is None else into[None]
    out, lse, *_ = _flash_attn_fwd(q[None], k[None], v[None], causal=call.causal, return_lse=True, out=target)
    return out[0], lse[0]


def _fa4_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Grads | None
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    dq, dk, dv = into or (None,) * 3
    if call.varlen:
        dq, dk, dv = _flash_attn_bwd(
            q, k, v, out, dout, lse, causal=call.causal, cu_seqlens_q=call.cu_q, cu_seqlens_k=call.cu_k,
            max_seqlen_q=call.max_q, max_seqlen_k=call.max_k, dq=dq, dk=dk, dv=dv,
        )[:3]  # fmt: skip
        return dq, dk, dv
    if into is not None:
        dq, dk, dv = (g[None] for g in into)
    dq, dk, dv = _flash_attn_bwd(
        q[None], k[None], v[None], out[None], dout[None], lse[None], causal=call.causal, dq=dq, dk=dk, dv=dv
    )[:3]
    return dq[0], dk[0], dv[0]


# --- PyTorch's flash kernel (a copy of flash-attn 2) ---


def _sdpa_flash_forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None
) -> tuple[Tensor, Tensor]:
    if call.varlen:
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, call.cu_q, call.cu_k, call.max_q, call.max_k, 0.0, call.causal, False
        )
        return _placed(out, into), lse
    out, lse, *_ = aten._flash_attention_forward(
        q[None], k[None], v[None], None, None, call.max_q, call.max_k, 0.0, call.causal, False
    )
    return _placed(out[0], into), lse[0]


def _sdpa_flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Grads | None
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty(2, dtype=torch.int64, device=q.device)  # dropout state; there is no dropout
    if call.varlen:
        dq, dk, dv = aten._flash_attention_backward(
            dout, q, k, v, out, lse, call.cu_q, call.cu_k, call.max_q, call.max_k, 0.0, call.causal, unused, unused
        )
        return _all_placed((dq, dk, dv), into)
    dq, dk, dv = aten._flash_attention_backward(
        dout[None], q[None], k[None], v[None], out[None], lse[None], None, None, call.max_q, call.max_k,
        0.0, call.causal, unused, unused,
    )  # fmt: skip
    return _all_placed((dq[0], dk[0], dv[0]), into)


# --- cuDNN through PyTorch: dense calls; a causal mask only with equal lengths (it aligns to the top left) ---


def _check_cudnn(call: Call) -> None:
    if call.varlen:
        raise UnsupportedCall("cudnn takes one dense sequence a call here, got a varlen call; use fa2 or fa4")
    if call.causal and call.max_q != call.max_k:
        raise UnsupportedCall(
            f"cudnn aligns causal masks to the top left, got {call.max_q} queries on {call.max_k} keys; use fa2 or fa4"
        )


def _heads_first(x: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D], a view."""
    return x[None].transpose(1, 2)


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None
) -> tuple[Tensor, Tensor]:
    _check_cudnn(call)
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        _heads_first(q), _heads_first(k), _heads_first(v), None, True, 0.0, call.causal, False
    )
    return _placed(out.transpose(1, 2)[0], into), lse.reshape(q.shape[1], q.shape[0])


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Grads | None
) -> tuple[Tensor, Tensor, Tensor]:
    _check_cudnn(call)
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # dropout seed and offset; there is no dropout
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        _heads_first(dout), _heads_first(q), _heads_first(k), _heads_first(v), _heads_first(out),
        lse.reshape(1, q.shape[1], q.shape[0], 1), unused, unused, None, None, None, call.max_q, call.max_k,
        0.0, call.causal,
    )  # fmt: skip
    dq, dk, dv = (g.transpose(1, 2)[0] for g in grads)
    return _all_placed((dq, dk, dv), into)


# --- plain PyTorch ---


def _math_slices(call: Call) -> list[tuple[slice, slice]]:
    slices, q0, k0 = [], 0, 0
    for nq, nk in zip(call.q_lens, call.k_lens, strict=True):
        slices.append((slice(q0, q0 + nq), slice(k0, k0 + nk)))
        q0, k0 = q0 + nq, k0 + nk
    return slices


def _bottom_right(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Which keys a sequence's queries see, [q, k]."""
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
    return seen.tril(len(k) - len(q)) if causal else seen


def _math_scores(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """Scaled and masked scores [H, q, k] in fp32 or better."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k = k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), k) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~visible, float("-inf"))


def masked_forward(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """`math` attention under any mask [q, k]; a query that sees no key has output 0 and log-sum-exp -inf."""
    scores = _math_scores(q, k, visible)
    lse = scores.logsumexp(dim=-1)
    p = torch.exp(scores - torch.where(lse.isfinite(), lse, 0)[..., None])
    wide_v = v.to(p.dtype).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.einsum("hqk,khd->qhd", p, wide_v).to(q.dtype), lse


def masked_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, visible: Tensor
) -> Grads:
    """Gradients of `masked_forward` for given output and log-sum-exp, which may cover more keys."""
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    scores = _math_scores(q, k, visible)
    wide = scores.dtype
    p = torch.exp(scores - torch.where(lse.isfinite(), lse, 0)[..., None].to(wide))
    do, o = dout.to(wide), out.to(wide)
    k_all = k.to(wide).repeat_interleave(group, dim=1)
    v_all = v.to(wide).repeat_interleave(group, dim=1)
    delta = (do * o).sum(-1).T[..., None]
    ds = p * (torch.einsum("qhd,khd->hqk", do, v_all) - delta) * scale
    dq = torch.einsum("hqk,khd->qhd", ds, k_all).to(q.dtype)
    per_head = torch.einsum("hqk,qhd->khd", ds, q.to(wide)), torch.einsum("hqk,qhd->khd", p, do)
    dk, dv = (full.unflatten(1, (-1, group)).sum(2).to(k.dtype) for full in per_head)
    return dq, dk, dv


def _math_forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, lses = torch.empty_like(q) if into is None else into, []
    for at_q, at_k in _math_slices(call):
        seen = _bottom_right(q[at_q], k[at_k], call.causal)
        out[at_q], lse = masked_forward(q[at_q], k[at_k], v[at_k], seen)
        lses.append(lse)
    return out, torch.cat(lses, dim=1)


def _math_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Grads | None
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = into or (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    for at_q, at_k in _math_slices(call):
        seen = _bottom_right(q[at_q], k[at_k], call.causal)
        given = (x[at_q] for x in (dout, q)), (x[at_k] for x in (k, v))
        dq[at_q], dk[at_k], dv[at_k] = masked_backward(*given[0], *given[1], out[at_q], lse[:, at_q], seen)
    return dq, dk, dv


_KERNELS: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, Tensor, Tensor]]]] = {
    "fa2": (_fa2_forward, _fa2_backward),
    "fa4": (_fa4_forward, _fa4_backward),
    "cudnn": (_cudnn_forward, _cudnn_backward),
    "sdpa_flash": (_sdpa_flash_forward, _sdpa_flash_backward),
    "math": (_math_forward, _math_backward),
}
KERNELS = tuple(_KERNELS)
