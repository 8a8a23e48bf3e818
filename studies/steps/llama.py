"""A Llama of plain PyTorch on the device `meta`, with the kernels that CUDA would choose called by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

DTYPE = torch.bfloat16
aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes that all differ, so that a tensor's width names it."""

    tokens: int = 4099
    hidden: int = 480
    heads: int = 10
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 1100
    vocab: int = 5000
    layers: int = 3


def widths(s: Sizes) -> dict[str, int]:
    """Numbers of elements by their letters."""
    a, g = s.heads * s.head_dim, s.kv_heads * s.head_dim
    named = {"T": s.tokens, "h": s.hidden, "a": a, "g": g, "f": s.ffn, "V": s.vocab, "heads": s.heads, "d": s.head_dim}
    return named | {"kv_heads": s.kv_heads, "(a+2g)": a + 2 * g}


WIDTHS = widths(Sizes())


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    """Causal attention of one device by flash-attn 2: `scaled_dot_product_attention` as CUDA takes it."""
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    return out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotate_complex(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """torchtitan's rotary embedding: pairs as complex numbers of fp32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(3).type_as(x)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


@torch.library.custom_op("steps::_fused_rms_norm", mutates_args=())
def fused_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for `aten._fused_rms_norm`, which `meta` takes apart; the second result is 1 / root mean square."""
    raise NotImplementedError("only on meta")


@fused_rms_norm.register_fake
def _(x: torch.Tensor, _weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op("steps::_fused_rms_norm_backward", mutates_args=())
def fused_rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for `aten._fused_rms_norm_backward`."""
    raise NotImplementedError("only on meta")


@fused_rms_norm_backward.register_fake
def _(
    _grad: torch.Tensor, x: torch.Tensor, _rstd: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def keep_for_norm(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, output[1])


def norm_backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
    x, weight, rstd = ctx.saved_tensors
    return fused_rms_norm_backward(grad, x, rstd, weight)


fused_rms_norm.register_autograd(norm_backward, setup_context=keep_for_norm)


class Norm(nn.Module):
    """`nn.RMSNorm`, which is one kernel on CUDA and keeps its input and the reciprocal root (derivatives.yaml)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=DTYPE, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return functional.rms_norm(x, self.weight.shape, self.weight, 1e-5)
        out: torch.Tensor = fused_rms_norm(x, self.weight)[0]
        return out


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, dtype=DTYPE, device="meta")


class Block(nn.Module):
    def __init__(self, s: Sizes, fused_qkv: bool, complex_rotary: bool) -> None:
        super().__init__()
        a, g = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self.sizes, self.complex_rotary = s, complex_rotary
        self.norm1, self.norm2 = Norm(s.hidden), Norm(s.hidden)
        self.projections = nn.ModuleList(linear(s.hidden, n) for n in ((a + 2 * g,) if fused_qkv else (a, g, g)))
        self.o, self.gate, self.up = linear(a, s.hidden), linear(s.hidden, s.ffn), linear(s.hidden, s.ffn)
        self.down = linear(s.ffn, s.hidden)

    def qkv(self, x: torch.Tensor) -> list[torch.Tensor]:
        s = self.sizes
        if len(self.projections) == 3:
            return [p(x).view(*x.shape[:2], -1, s.head_dim) for p in self.projections]
        group = s.heads // s.kv_heads
        fused = self.projections[0](x).view(*x.shape[:2], s.kv_heads, group + 2, s.head_dim)
        parts = torch.split(fused, [group, 1, 1], dim=-2)
        return [part.reshape(*x.shape[:2], -1, s.head_dim).contiguous() for part in parts]

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x))
        if self.complex_rotary:
            q, k = rotate_complex(q, sin), rotate_complex(k, sin)
        else:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = flash_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.o(out.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        result: torch.Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return result


class Llama(nn.Module):
    """`complex_rotary` and `fused_qkv` are torchtitan's."""

    def __init__(self, s: Sizes, *, fused_qkv: bool = False, complex_rotary: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(s.vocab, s.hidden, dtype=DTYPE, device="meta")
        self.layers = nn.ModuleList(Block(s, fused_qkv, complex_rotary) for _ in range(s.layers))
        self.norm, self.head = Norm(s.hidden), linear(s.hidden, s.vocab)
        self.cos = self.sin = torch.empty(1, s.tokens, 1, s.head_dim, dtype=DTYPE, device="meta")
        if complex_rotary:
            self.sin = torch.empty(1, s.tokens, 1, s.head_dim // 2, dtype=torch.complex64, device="meta")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
