"""Memory-bound ops of a transformer layer, forward and backward written out, plain or through torch.compile.

Legend of tensor suffixes: T tokens, C elements of a token, H heads, D head dimension, V words, N parameters.
Every op returns what the next one reads; gradients of weights are summed over the tokens. Working tensors are bf16,
optimizer states fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from cpsim.schedule.transformer import OP_BYTES

EPS = 1e-5


def _wide(x: Tensor) -> Tensor:
    """In fp32, or fp64 where it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x_TC: Tensor, weight_C: Tensor) -> Tensor:
    """x / rms(x) * weight, in fp32 inside."""
    wide = _wide(x_TC)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x_TC.dtype) * weight_C


def rms_norm_bwd(dout_TC: Tensor, x_TC: Tensor, weight_C: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    wide = _wide(x_TC)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    unit, grad = wide * scale, _wide(dout_TC)
    inner = grad * _wide(weight_C)
    dx = scale * (inner - unit * (inner * unit).mean(-1, keepdim=True))
    return dx.to(x_TC.dtype), (grad * unit).sum(0).to(weight_C.dtype)


def rotary(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotates pairs (d, d + D/2); its gradient is the rotation by -sin."""
    low, high = _wide(x_THD).chunk(2, -1)
    cos, sin = cos_TD[:, None], sin_TD[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x_THD.dtype)


def swiglu(gate_up_TC: Tensor) -> Tensor:
    """silu(gate) * up of [gate | up]."""
    gate, up = gate_up_TC.chunk(2, -1)
    return (torch.nn.functional.silu(_wide(gate)) * _wide(up)).to(gate_up_TC.dtype)


def swiglu_bwd(dout_TC: Tensor, gate_up_TC: Tensor) -> Tensor:
    """Gradient of [gate | up]."""
    gate, up = (_wide(x) for x in gate_up_TC.chunk(2, -1))
    grad, sigmoid = _wide(dout_TC), torch.sigmoid(gate)
    dgate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((dgate, grad * gate * sigmoid), -1).to(gate_up_TC.dtype)


def add(x_TC: Tensor, y_TC: Tensor) -> Tensor:
    """Residual connection."""
    return x_TC + y_TC


def cross_entropy(logits_TV: Tensor, words_T: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and log-sum-exp of every token."""
    wide = logits_TV.float()
    lse = torch.logsumexp(wide, -1)
    return lse - wide.gather(1, words_T[:, None])[:, 0], lse


def cross_entropy_bwd(logits_TV: Tensor, words_T: Tensor, lse_T: Tensor) -> Tensor:
    """Gradient of the logits, for a loss that is summed."""
    one = torch.arange(logits_TV.shape[1], device=logits_TV.device)[None] == words_T[:, None]
    return (torch.exp(logits_TV.float() - lse_T[:, None]) - one.float()).to(logits_TV.dtype)


def embedding(weight_VC: Tensor, words_T: Tensor) -> Tensor:
    """Rows of the embedding."""
    return torch.nn.functional.embedding(words_T, weight_VC)


def embedding_bwd(dout_TC: Tensor, words_T: Tensor, weight_VC: Tensor) -> Tensor:
    """Gradient of the embedding."""
    grad: Tensor = torch.ops.aten.embedding_dense_backward(dout_TC, words_T, len(weight_VC), -1, False)
    return grad


def adam(param_N: Tensor, narrow_N: Tensor, grad_N: Tensor, first_N: Tensor, second_N: Tensor) -> None:
    """One step of AdamW on fp32 states in place, and the parameters' bf16 copy."""
    first_N.lerp_(grad_N, 0.1)
    second_N.lerp_(grad_N.square(), 0.05)
    param_N.mul_(1 - 1e-5).sub_(1e-4 * first_N / (second_N.sqrt() + 1e-8))
    narrow_N.copy_(param_N)


def norm(grad_N: Tensor) -> Tensor:
    """Norm of fp32 gradients."""
    return grad_N.square().sum().sqrt()


OPS: dict[str, Callable[..., object]] = {
    f.__name__: f
    for f in (
        rms_norm,
        rms_norm_bwd,
        rotary,
        swiglu,
        swiglu_bwd,
        add,
        cross_entropy,
        cross_entropy_bwd,
        embedding,
        embedding_bwd,
        adam,
        norm,
    )
}
LIBRARY = ("embedding", "embedding_bwd")
"""Kernels of PyTorch that compilation leaves as they are."""


@cache
def compiled(kind: str) -> Callable[..., object]:
    """The op compiled for any number of tokens; tokens' elements are static."""
    return torch.compile(OPS[kind])


def nbytes(kind: str, tokens: int, width: int, vocab: int = 0) -> int:
    """Bytes that an op must read and write.

    Args:
        kind: of OPS.
        tokens: rows; of `adam` and `norm` the number of parameters.
        width: elements of a row: of the hidden state, of all heads, of SwiGLU's output, or words of the logits.
        vocab: rows of the embedding, whose gradient is filled with zeros first.
    """
    each = OP_BYTES[kind]
    if kind in ("adam", "norm"):
        return tokens * each
    return tokens * width * each + (2 * vocab * width if kind == "embedding_bwd" else 0)
