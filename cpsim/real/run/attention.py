"""The one adapter to attention kernels: forward with log-sum-exp, and backward from given output and log-sum-exp.

Legend of tensor suffixes: T tokens (all sequences of one call, packed), H query heads, K key/value heads,
D head dimension. Log-sum-exp is [H, T] fp32 in natural logarithms for every kernel.

Kernels: `fa2` (flash-attn 2.x), `fa4` (flash-attn-4, CuTe DSL; `fa4_sparse` with lists of blocks), `cudnn` and
`sdpa_flash` (PyTorch's own), `flex` (FlexAttention, compiled), `flashinfer` (blocks of any sizes, forward only, with
the backend of its choice; `flashinfer_fa2` with that one), `sdpa_math` (naive: a matrix of all scores, products in
the working type) and `math` (the same in fp32 or better on any device and dtype: the oracle of the tests).
A call with one sequence uses the kernel's dense entry point unless `varlen=True`; several use the varlen one.
A causal mask is aligned to the bottom right: query i of q sees keys up to i + k - q. Kernels of ANY_MASK take a mask of
slices instead, from `prepare_mask`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpsim.masks.blocks import BLOCK, FULL, block_kinds, rectangles, sequence_slices, table_of
from cpsim.masks.slices import Slices
from cpsim.real.run.inductor import compile_what_fits, static
from cpsim.real.run.mask_blocks import Blocks, blocks_of

aten = torch.ops.aten


class UnsupportedCall(ValueError):
    """The kernel has no such call (for example cuDNN with a causal mask and unequal lengths)."""


@dataclass(frozen=True, kw_only=True, eq=False)
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
    mask: Slices | None = None
    """Which keys of the one sequence every query sees, where that is neither full nor causal."""
    plans: dict[object, Any] = field(default_factory=dict)
    """What kernels that plan a call have planned, by backend, heads and type."""

    @cached_property
    def blocks(self) -> Blocks:
        """Tables for kernels that visit listed blocks; made when such a kernel first runs the call."""
        return blocks_of(self.slices, sum(self.q_lens), sum(self.k_lens), self.cu_q.device)

    @cached_property
    def slices(self) -> Slices:
        """The mask, whether it has a name or is that of sequences."""
        if self.mask is not None:
            return self.mask
        return sequence_slices(np.array(self.q_lens), np.array(self.k_lens), np.full(len(self.q_lens), self.causal))

    @cached_property
    def visible(self) -> Tensor:
        """The mask [queries, keys] of the one sequence."""
        assert self.mask is not None
        kinds = block_kinds(table_of(self.mask), self.max_q, self.max_k, 1)
        return torch.from_numpy(kinds == FULL).to(self.cu_q.device)


def prepare_mask(mask: Slices, num_q: int, num_k: int, *, device: torch.device | str) -> Call:
    """Builds the Call of one sequence under any mask: disjoint slices of query and key rows."""
    ends = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (num_q, num_k))
    cu_q, cu_k = ends
    return Call(
        q_lens=(num_q,),
        k_lens=(num_k,),
        causal=False,
        varlen=False,
        cu_q=cu_q,
        cu_k=cu_k,
        max_q=num_q,
        max_k=num_k,
        mask=mask,
    )


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
        q_lens=tuple(q_lens),
        k_lens=tuple(k_lens),
        causal=causal,
        varlen=varlen or len(q_lens) > 1,
        cu_q=offsets(q_lens),
        cu_k=offsets(k_lens),
        max_q=max(q_lens),
        max_k=max(k_lens),
    )


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
        out_THD in the dtype of q and lse_HT in fp32 (fp64 for `math` on fp64). A query that sees no key has output 0
        and log-sum-exp -inf.
    """
    _check_mask(kernel, call)
    return _KERNELS[kernel][0](q_THD, k_TKD, v_TKD, call, out_THD)


def backward(
    kernel: str,
    dout_THD: Tensor,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    call: Call,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq_THD, dk_TKD, dv_TKD) for given output and log-sum-exp, which may cover more keys than the call.

    That is what a ring step needs: `out_THD` and `lse_HT` are those of the whole softmax, keys only one block.
    `grads` receive them where given; PyTorch's kernels need copies for that.
    """
    _check_mask(kernel, call)
    return _KERNELS[kernel][1](dout_THD, q_THD, k_TKD, v_TKD, out_THD, lse_HT, call, grads)


def _check_mask(kernel: str, call: Call) -> None:
    if call.mask is not None and kernel not in ANY_MASK + WHOLE_BLOCKS + RECTANGLES:
        raise UnsupportedCall(f"{kernel} takes full and causal sequences, got another mask; use {ANY_MASK[0]}")


def kernel_version(kernel: str) -> str:
    """Package version behind a kernel, for provenance."""
    from importlib.metadata import PackageNotFoundError, version

    package = {
        "fa2": "flash-attn",
        "fa4": "flash-attn-4",
        "fa4_sparse": "flash-attn-4",
        "flashinfer": "flashinfer-python",
        "flashinfer_fa2": "flashinfer-python",
    }.get(kernel)
    if kernel == "cudnn":
        return str(torch.backends.cudnn.version())
    if package is None:
        return torch.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return "unpackaged build"


Grads = tuple[Tensor, Tensor, Tensor]
LN_2 = math.log(2.0)
"""The log-sum-exp of FlashInfer and of FlexAttention is to base 2."""


def _placed(made: Tensor, into: Tensor | None) -> Tensor:
    """The result of a kernel that allocates its own output, where the caller wants it."""
    return made if into is None else into.copy_(made)


def _all_placed(made: Grads, into: Grads | None) -> Grads:
    if into is None:
        return made
    dq, dk, dv = (_placed(m, i) for m, i in zip(made, into, strict=True))
    return dq, dk, dv


# --- flash-attn 2: the compiled extension itself, which both its Python interfaces end in ---


def _fa2_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None) -> tuple[Tensor, Tensor]:
    import flash_attn_2_cuda as ext

    scale = q.shape[-1] ** -0.5
    if call.varlen:
        out, lse, *_ = ext.varlen_fwd(
            q,
            k,
            v,
            into,
            call.cu_q,
            call.cu_k,
            None,
            None,
            None,
            None,
            call.max_q,
            call.max_k,
            0.0,
            scale,
            False,
            call.causal,
            -1,
            -1,
            0.0,
            False,
            None,
        )
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
            dout,
            q,
            k,
            v,
            out,
            lse,
            *(into or (None,) * 3),
            call.cu_q,
            call.cu_k,
            None,
            call.max_q,
            call.max_k,
            0.0,
            scale,
            False,
            call.causal,
            -1,
            -1,
            0.0,
            False,
            None,
            None,
        )
        return dq, dk, dv
    dq, dk, dv, _ = ext.bwd(
        dout[None],
        q[None],
        k[None],
        v[None],
        out[None],
        lse[None],
        *((None,) * 3 if into is None else (g[None] for g in into)),
        None,
        0.0,
        scale,
        call.causal,
        -1,
        -1,
        0.0,
        False,
        None,
        None,
    )
    return dq[0], dk[0], dv[0]


# --- flash-attn 4: the functions under its autograd wrappers, because those cannot take a given lse ---


def _fa4_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None) -> tuple[Tensor, Tensor]:
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
            causal=call.causal,
            return_lse=True,
            out=into,
        )
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
            q,
            k,
            v,
            out,
            dout,
            lse,
            causal=call.causal,
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
        q[None], k[None], v[None], out[None], dout[None], lse[None], causal=call.causal, dq=dq, dk=dk, dv=dv
    )[:3]
    return dq[0], dk[0], dv[0]


# --- PyTorch's flash kernel (a copy of flash-attn 2) ---


def _sdpa_flash_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None) -> tuple[Tensor, Tensor]:
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
        dout[None],
        q[None],
        k[None],
        v[None],
        out[None],
        lse[None],
        None,
        None,
        call.max_q,
        call.max_k,
        0.0,
        call.causal,
        unused,
        unused,
    )
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


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None) -> tuple[Tensor, Tensor]:
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
        _heads_first(dout),
        _heads_first(q),
        _heads_first(k),
        _heads_first(v),
        _heads_first(out),
        lse.reshape(1, q.shape[1], q.shape[0], 1),
        unused,
        unused,
        None,
        None,
        None,
        call.max_q,
        call.max_k,
        0.0,
        call.causal,
    )
    dq, dk, dv = (g.transpose(1, 2)[0] for g in grads)
    return _all_placed((dq, dk, dv), into)


# --- flash-attn 4 with lists of blocks ---


def _fa4_blocks(call: Call, side: slice) -> Any:
    """The listed blocks of rows of queries, or of keys, as flash-attn 4 takes them."""
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


def _fa4_sparse_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    blocks, target = _fa4_blocks(call, slice(0, 4)), None if into is None else into[None]
    out, lse, *_ = _flash_attn_fwd(q[None], k[None], v[None], block_sparse_tensors=blocks, return_lse=True, out=target)
    return out[0], lse[0]


def _fa4_sparse_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Grads | None
) -> Grads:
    from flash_attn.cute.interface import _flash_attn_bwd

    blocks = _fa4_blocks(call, slice(4, 8))
    dq, dk, dv = (None,) * 3 if into is None else (g[None] for g in into)
    dq, dk, dv = _flash_attn_bwd(
        q[None], k[None], v[None], out[None], dout[None], lse[None], block_sparse_tensors=blocks, dq=dq, dk=dk, dv=dv
    )[:3]
    return dq[0], dk[0], dv[0]


# --- FlashInfer: rows of blocks, each with keys of its own; it plans a call on the host and has no backward pass ---


@cache
def _flashinfer_workspace(device: torch.device) -> Tensor:
    """Where parts of split keys are kept; calls run one after another."""
    return torch.empty(256 * 2**20, dtype=torch.uint8, device=device)


def _flashinfer_plan(backend: str, q: Tensor, k: Tensor, call: Call) -> Any:
    from flashinfer.sparse import VariableBlockSparseAttentionWrapper

    key = backend, q.shape[1:], k.shape[1], q.dtype
    if key not in call.plans:
        try:
            seen, rows, columns = rectangles(table_of(call.slices), len(q), len(k))
        except ValueError as error:
            raise UnsupportedCall(f"flashinfer takes blocks that no mask cuts ({error}); use flex") from error
        every = k.shape[1], 1
        blocks = torch.from_numpy(seen)[None].repeat(*every, 1).to(q.device)
        sizes = (torch.from_numpy(x).int()[None].repeat(*every).to(q.device) for x in (rows, columns))
        plan = VariableBlockSparseAttentionWrapper(_flashinfer_workspace(q.device), backend=backend)
        plan.plan(blocks, *sizes, q.shape[1], k.shape[1], q.shape[2], q_data_type=q.dtype, kv_data_type=k.dtype)
        call.plans[key] = plan
    return call.plans[key]


def _flashinfer_forward(
    backend: str, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None
) -> tuple[Tensor, Tensor]:
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    out, lse = _flashinfer_plan(backend, q, k, call).run(*heads_first, return_lse=True)
    return _placed(out.transpose(0, 1), into), lse * LN_2


def _flashinfer_backward(*_: object) -> Grads:
    raise UnsupportedCall("flashinfer has no backward pass; use flex")


# --- FlexAttention: the operators under its autograd wrapper, because that cannot take a given lse ---


def _score(score: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _k: Tensor) -> Tensor:
    return score


def _score_gradient(
    _score: Tensor, _b: Tensor, _h: Tensor, _q: Tensor, _k: Tensor, grad: Tensor
) -> list[Tensor | None]:
    return [grad, None, None, None, None]


def _flex_arguments(
    blocks: Blocks, q: Tensor, k: Tensor, given: Sequence[Tensor], options: Mapping[str, int]
) -> tuple[Any, ...]:
    """What follows the tensors of both operators: block mask, scale, options, captured tensors."""
    from torch.nn.attention.flex_attention import BlockMask, _apply_kernel_options

    tables, captured = given[: len(blocks.tables)], given[len(blocks.tables) :]
    names = (
        "kv_num_blocks",
        "kv_indices",
        "full_kv_num_blocks",
        "full_kv_indices",
        "q_num_blocks",
        "q_indices",
        "full_q_num_blocks",
        "full_q_indices",
    )
    mask = BlockMask(
        seq_lengths=(q.shape[2], k.shape[2]),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=blocks.sees,
        **dict(zip(names, tables, strict=True)),
    )
    # One kernel for all numbers of queries.
    wanted: Any = {"FORCE_USE_FLEX_ATTENTION": True, "IS_DIVISIBLE": blocks.aligned, **options}
    every = _apply_kernel_options(q, k, k, True, wanted)
    return mask.as_tuple(), q.shape[-1] ** -0.5, every, (), tuple(captured)


def _flex_forward(q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None) -> tuple[Tensor, Tensor]:
    blocks = call.blocks

    def run(options: Mapping[str, int], q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        from torch._higher_order_ops.flex_attention import flex_attention

        out, lse, *_ = flex_attention(q, k, v, _score, *_flex_arguments(blocks, q, k, given, options))
        return out, lse * LN_2

    out, lse = _flex("fwd", run, blocks, tuple(_heads_first(x) for x in (q, k, v)))
    return _placed(out[0].transpose(0, 1), into), lse[0]


def _flex_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Grads | None
) -> Grads:
    blocks = call.blocks

    def run(
        options: Mapping[str, int],
        lse: Tensor,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        *given: Tensor,
    ) -> Grads:
        from torch._higher_order_ops.flex_attention import flex_attention_backward

        rest = _flex_arguments(blocks, q, k, given, options)
        dq, dk, dv, _ = flex_attention_backward(q, k, v, out, lse / LN_2, dout, None, _score, _score_gradient, *rest)
        return dq, dk, dv

    heads_first = (_heads_first(x) for x in (dout, q, k, v, out))
    dq, dk, dv = (g[0].transpose(0, 1) for g in _flex("bwd", run, blocks, (lse[None], *heads_first)))
    return _all_placed((dq, dk, dv), into)


_COMPILED: dict[object, Callable[..., tuple[Tensor, ...]]] = {}
_fewer: dict[object, int] = {}
"""Which of inductor.STAGES is the first to fit, where it is not the default: by what shared memory depends on."""


def _flex(
    pass_: str, run: Callable[..., tuple[Tensor, ...]], blocks: Blocks, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Runs a pass: compiled once for all numbers of tokens on a GPU, PyTorch's own dense code on a CPU."""
    every = *tensors, *blocks.tables, *blocks.given
    if tensors[0].device.type == "cpu":
        return run({}, *every)
    # Of tensors dimension 2 counts tokens, of tables all that are not 1.
    free = [{2}] * len(tensors) + [set(range(x.dim())) for x in every[len(tensors) :]]
    key = pass_, blocks.sees, blocks.aligned, tuple(static(x, f) for x, f in zip(every, free, strict=True))
    if key not in _COMPILED:
        kind = pass_, blocks.sees, tensors[-1].dtype, tensors[-1].shape[-1]
        _COMPILED[key], _fewer[kind] = compile_what_fits(run, every, free, _fewer.get(kind, 0))
    return _COMPILED[key](*every)


# --- plain PyTorch: `math` in fp32 or better, `sdpa_math` with products in the working type ---


def _wide(kernel: str, dtype: torch.dtype) -> torch.dtype:
    """The type of matrix products."""
    return dtype if kernel == "sdpa_math" else torch.promote_types(dtype, torch.float32)


def _math_parts(q: Tensor, k: Tensor, call: Call) -> list[tuple[slice, slice, Tensor]]:
    """Queries, keys and the mask [q, k] of every sequence."""
    if call.mask is not None:
        return [(slice(0, len(q)), slice(0, len(k)), call.visible)]
    parts, q0, k0 = [], 0, 0
    for nq, nk in zip(call.q_lens, call.k_lens, strict=True):
        seen = torch.ones(nq, nk, dtype=torch.bool, device=q.device)
        parts.append((slice(q0, q0 + nq), slice(k0, k0 + nk), seen.tril(nk - nq) if call.causal else seen))
        q0, k0 = q0 + nq, k0 + nk
    return parts


def _math_scores(q: Tensor, k: Tensor, visible: Tensor, wide: torch.dtype) -> Tensor:
    """Scaled and masked scores [H, q, k] in fp32 or better."""
    k = k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), k).to(torch.promote_types(wide, torch.float32))
    return (scores / math.sqrt(q.shape[-1])).masked_fill(~visible, float("-inf"))


def _math_forward_of(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    scores = _math_scores(q, k, visible, wide)
    lse = scores.logsumexp(dim=-1)
    p = torch.exp(scores - torch.where(lse.isfinite(), lse, 0)[..., None]).to(wide)
    wide_v = v.to(wide).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.einsum("hqk,khd->qhd", p, wide_v).to(q.dtype), lse


def _math_backward_of(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, visible: Tensor, wide: torch.dtype
) -> Grads:
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    scores = _math_scores(q, k, visible, wide)
    p = torch.exp(scores - torch.where(lse.isfinite(), lse, 0)[..., None].to(scores.dtype))
    do, o = dout.to(wide), out.to(wide)
    k_all = k.to(wide).repeat_interleave(group, dim=1)
    v_all = v.to(wide).repeat_interleave(group, dim=1)
    delta = (do * o).sum(-1, dtype=scores.dtype).T[..., None]
    ds = (p * (torch.einsum("qhd,khd->hqk", do, v_all) - delta) * scale).to(wide)
    dq = torch.einsum("hqk,khd->qhd", ds, k_all).to(q.dtype)
    per_head = torch.einsum("hqk,qhd->khd", ds, q.to(wide)), torch.einsum("hqk,qhd->khd", p.to(wide), do)
    dk, dv = (full.unflatten(1, (-1, group)).sum(2).to(k.dtype) for full in per_head)
    return dq, dk, dv


def _math_forward(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, lses = torch.empty_like(q) if into is None else into, []
    for at_q, at_k, seen in _math_parts(q, k, call):
        out[at_q], lse = _math_forward_of(q[at_q], k[at_k], v[at_k], seen, _wide(kernel, q.dtype))
        lses.append(lse)
    return out, torch.cat(lses, dim=1)


def _math_backward(
    kernel: str,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    into: Grads | None,
) -> Grads:
    dq, dk, dv = into or (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    for at_q, at_k, seen in _math_parts(q, k, call):
        given = (x[at_q] for x in (dout, q)), (x[at_k] for x in (k, v))
        dq[at_q], dk[at_k], dv[at_k] = _math_backward_of(
            *given[0], *given[1], out[at_q], lse[:, at_q], seen, _wide(kernel, q.dtype)
        )
    return dq, dk, dv


_KERNELS: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, Tensor, Tensor]]]] = {
    "fa2": (_fa2_forward, _fa2_backward),
    "fa4": (_fa4_forward, _fa4_backward),
    "cudnn": (_cudnn_forward, _cudnn_backward),
    "sdpa_flash": (_sdpa_flash_forward, _sdpa_flash_backward),
    "fa4_sparse": (_fa4_sparse_forward, _fa4_sparse_backward),
    "flashinfer": (partial(_flashinfer_forward, "auto"), _flashinfer_backward),
    "flashinfer_fa2": (partial(_flashinfer_forward, "fa2"), _flashinfer_backward),
    "flex": (_flex_forward, _flex_backward),
    "sdpa_math": (partial(_math_forward, "sdpa_math"), partial(_math_backward, "sdpa_math")),
    "math": (partial(_math_forward, "math"), partial(_math_backward, "math")),
}
KERNELS = tuple(_KERNELS)
ANY_MASK = ("flex", "sdpa_math", "math")
"""Kernels that take any mask."""
WHOLE_BLOCKS = ("fa4_sparse",)
"""Kernels that take masks of whole blocks of 128 tokens."""
RECTANGLES = ("flashinfer", "flashinfer_fa2")
"""Kernels that take masks of rectangles of any sizes, forward only."""
