"""Attention kernels behind one pair of functions: forward with log-sum-exp, backward from given output and log-sum-exp.

Legend of tensor suffixes: T tokens (all sequences of one call, packed), H query heads, K key/value heads,
D head dimension. Log-sum-exp is [H, T] fp32 in natural logarithms for every kernel.

Kernels: `fa2` (flash-attn 2.x), `fa4` (flash-attn-4, CuTe DSL; `fa4_sparse` with lists of blocks), `cudnn` and
`sdpa_flash` (PyTorch's own), `flex` (FlexAttention, compiled), `flashinfer` (blocks of any sizes, forward only, with
the backend of its choice; `flashinfer_fa2` with that one), `sdpa_math` (naive: a matrix of all scores, products in
the working type) and `math` (the same in fp32 or better on any device and dtype: the oracle of the tests).
A call with one sequence uses the kernel's dense entry point unless `varlen=True`; several use the varlen one.
A causal mask is aligned to the bottom right: query i of q sees keys up to i + k - q. Kernels of ANY_MASK also take a
mask of slices, from `prepare_mask`.

Each package has a module of its own, which imports it when a call needs it; `kernels` has one row for each kernel.
Tests: tests/test_real_kernels_cpu.py.
"""

from __future__ import annotations

from torch import Tensor

from cpsim.real.run.attention.call import Call, Grads, UnsupportedCall, prepare, prepare_mask
from cpsim.real.run.attention.kernels import ANY_MASK, KERNELS, RECTANGLES, WHOLE_BLOCKS, Kernel

__all__ = [
    "ANY_MASK",
    "KERNELS",
    "RECTANGLES",
    "WHOLE_BLOCKS",
    "Call",
    "Grads",
    "Kernel",
    "UnsupportedCall",
    "backward",
    "forward",
    "kernel_version",
    "prepare",
    "prepare_mask",
]


def forward(
    kernel: str, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, call: Call, out_THD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of every sequence in the call.

    Args:
        kernel: one of KERNELS.
        q_THD: queries, packed as the call says; the heads of one token are contiguous.
        k_TKD: keys.
        v_TKD: values.
        call: from `prepare` or `prepare_mask`.
        out_THD: receives the output where given; PyTorch's kernels need a copy for that.

    Returns:
        out_THD in the dtype of q and lse_HT in fp32 (fp64 for `math` on fp64). A query that sees no key has output 0
        and log-sum-exp -inf.

    Raises:
        UnsupportedCall: the kernel has no such call.
    """
    return _taking(kernel, call).forward(q_THD, k_TKD, v_TKD, call, out_THD)


def backward(
    kernel: str,
    dout_THD: Tensor,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    call: Call,
    grads: Grads | None = None,
) -> Grads:
    """Gradients (dq_THD, dk_TKD, dv_TKD) from given output and log-sum-exp, which may cover more keys than the call.

    A ring step needs that: `out_THD` and `lse_HT` are those of the whole softmax, the keys only one block.
    `grads` receive them where given; PyTorch's kernels need copies for that.

    Raises:
        UnsupportedCall: the kernel has no such call.
    """
    return _taking(kernel, call).backward(dout_THD, q_THD, k_TKD, v_TKD, out_THD, lse_HT, call, grads)


def kernel_version(kernel: str) -> str:
    """Version of the package behind a kernel, for provenance."""
    return _row(kernel).version()


def _row(kernel: str) -> Kernel:
    if kernel not in KERNELS:
        raise ValueError(f"kernel: expected one of {', '.join(KERNELS)}; got {kernel!r}")
    return KERNELS[kernel]


def _taking(kernel: str, call: Call) -> Kernel:
    row = _row(kernel)
    if call.mask is not None and row.masks == "sequences":
        raise UnsupportedCall(f"{kernel} takes full and causal sequences, got another mask; use {ANY_MASK[0]}")
    return row
