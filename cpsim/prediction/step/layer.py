"""What a transformer layer does besides attention, op by op, on each tensor-parallel rank.

Tensor parallelism comes with sequence parallelism: norms and residual connections work on a shard of the tokens, which
is gathered before a linear layer cut by columns and summed and scattered after one cut by rows. In the backward pass
the gather of the input, which is not kept, hides behind the gradient of the input, and the scatter of that gradient
behind the gradient of the weights; everything else waits.

Reference: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.2.2;
Transformer Engine 2.4, module/linear.py and layernorm_linear.py (which communication is asynchronous).
Differs: no user-buffer overlap of products with communication, which is off by default.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from cpsim.case.model import Model
from cpsim.models.network.collective import wire_bytes
from cpsim.schedule.transformer import OP_BYTES

BF16, FP32 = 2, 4


@dataclass(frozen=True, slots=True)
class Gemm:
    """A matrix product [m, k] x [k, n]."""

    kind: Literal["forward", "dgrad", "wgrad"]
    m: int
    n: int
    k: int
    beside: Collective | None = None
    """Communication that runs meanwhile."""
    fp8: str = ""
    """Kernel of operands in FP8, a key of ``cpsim.models.gemm.FP8_KERNELS``; empty: they are in bf16."""
    times: int = 1
    """Products of this size that run one after another, of as many experts."""

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.times


@dataclass(frozen=True, slots=True)
class ElementwisePass:
    """A memory-bound op."""

    kind: str
    nbytes: int
    """Read and written."""
    times: int = 1
    """Passes over so many bytes that run one after another."""


@dataclass(frozen=True, slots=True)
class Collective:
    """Communication among the tensor-parallel ranks, or replicas; `nbytes` is nccl-tests' S."""

    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Copy:
    """What the copy engine of a GPU fetches from another tensor-parallel rank of its node, without an SM."""

    nbytes: int


Op = Gemm | ElementwisePass | Collective | Copy


@dataclass(frozen=True, slots=True)
class Ops:
    """Ops of one microbatch on one rank of `tp`, by part of the model; lists run one op after another. Of models with
    experts, both ends alone."""

    model: Model
    tp: int
    tokens: int
    """Tokens of the microbatch on this context-parallel rank; each of `tp` ranks has its shard of them."""

    def forward(self) -> list[Op]:
        """A layer without attention."""
        return self.before_attention() + self.after_attention()

    def backward(self) -> list[Op]:
        """Backward of `forward`."""
        return self.after_attention_backward() + self.before_attention_backward()

    def again(self, recompute: str) -> list[Op]:
        """What runs a second time before the backward pass, attention aside: `none`, `mlp` or `full`."""
        return {"none": [], "mlp": self.mlp(), "full": self.forward()}[recompute]

    def before_attention(self) -> list[Op]:
        """Forward: norm, QKV, rotary positions."""
        return [self._norm(), *self._column("qkv"), self._rotary()]

    def after_attention(self) -> list[Op]:
        """Forward: projection, residual, and all of the MLP."""
        return [*self._row("proj"), self._add(), *self.mlp(), self._add()]

    def mlp(self) -> list[Op]:
        """Forward: norm, gate and up, SwiGLU, down."""
        inner = self.model.linears(self.tp)["down"][0] * self.tokens
        return [self._norm(), *self._column("gate_up"), _elementwise("swiglu", inner), *self._row("down")]

    def after_attention_backward(self) -> list[Op]:
        """Backward of `after_attention`."""
        inner = self.model.linears(self.tp)["down"][0] * self.tokens
        mlp = [*self._row_backward("down"), _elementwise("swiglu_bwd", inner), *self._column_backward("gate_up")]
        return [*mlp, self._norm(backward=True), self._add(), *self._row_backward("proj")]

    def before_attention_backward(self) -> list[Op]:
        """Backward of `before_attention`."""
        return [self._rotary(), *self._column_backward("qkv"), self._norm(backward=True), self._add()]

    def embedding(self) -> list[Op]:
        """Forward of the first stage: rows of this rank's words, summed over the ranks."""
        return [_elementwise("embedding", self.tokens * self.model.hidden), *self._scatter()]

    def embedding_backward(self) -> list[Op]:
        """Backward of `embedding`."""
        zeros = BF16 * self.model.vocab // self.tp * self.model.hidden
        nbytes = OP_BYTES["embedding_bwd"] * self.tokens * self.model.hidden + zeros
        return [*self._gather(), ElementwisePass("embedding_bwd", nbytes)]

    def loss(self) -> list[Op]:
        """Forward of the last stage: norm, logits of this rank's words, cross entropy."""
        shared: list[Op] = [Collective("all_reduce", FP32 * self.tokens)] * 3 if self.tp > 1 else []
        words = self.model.vocab // self.tp
        logits = Gemm("forward", self.tokens, words, self.model.hidden)
        return [self._norm(), *self._gather(), logits, _elementwise("cross_entropy", self.tokens * words), *shared]

    def loss_backward(self) -> list[Op]:
        """Backward of `loss`."""
        words = self.model.vocab // self.tp
        loss = _elementwise("cross_entropy_bwd", self.tokens * words)
        return [loss, *self._products_backward(self.model.hidden, words), self._norm(backward=True)]

    def _shard(self) -> int:
        return self.tokens // self.tp * self.model.hidden

    def _norm(self, *, backward: bool = False) -> Op:
        return _elementwise("rms_norm_bwd" if backward else "rms_norm", self._shard())

    def _add(self) -> Op:
        return _elementwise("add", self._shard())

    def _rotary(self) -> Op:
        heads = (self.model.heads + self.model.kv_heads * (not self.model.borrows)) // self.tp
        return _elementwise("rotary", self.tokens * heads * self.model.head_dim)

    def _whole(self) -> int:
        """Bytes of the hidden state of all tokens."""
        return BF16 * self.tokens * self.model.hidden

    def _gather(self) -> list[Op]:
        return [Collective("all_gather", self._whole())] if self.tp > 1 else []

    def _scatter(self) -> list[Op]:
        return [Collective("reduce_scatter", self._whole())] if self.tp > 1 else []

    def _column(self, name: str) -> list[Op]:
        inner, outer = self.model.linears(self.tp)[name]
        return [*self._gather(), Gemm("forward", self.tokens, outer, inner)]

    def _row(self, name: str) -> list[Op]:
        inner, outer = self.model.linears(self.tp)[name]
        return [Gemm("forward", self.tokens, outer, inner), *self._scatter()]

    def _column_backward(self, name: str) -> list[Op]:
        return self._products_backward(*self.model.linears(self.tp)[name])

    def _products_backward(self, inner: int, outer: int) -> list[Op]:
        gather = Collective("all_gather", self._whole()) if self.tp > 1 else None
        scatter = Collective("reduce_scatter", self._whole()) if self.tp > 1 else None
        return [
            Gemm("dgrad", self.tokens, inner, outer, gather),
            Gemm("wgrad", outer, inner, self.tokens, scatter),
        ]

    def _row_backward(self, name: str) -> list[Op]:
        inner, outer = self.model.linears(self.tp)[name]
        products: list[Op] = [Gemm("dgrad", self.tokens, inner, outer), Gemm("wgrad", outer, inner, self.tokens)]
        return [*self._gather(), *products]


def _elementwise(kind: str, elements: int) -> ElementwisePass:
    return ElementwisePass(kind, OP_BYTES[kind] * elements)


def flops(ops: Iterable[Op]) -> float:
    """FLOP of the matrix products."""
    return sum(op.flops for op in ops if isinstance(op, Gemm))


def sent_bytes(ops: Iterable[Op], tp: int) -> float:
    """Bytes that a rank sends to others of its `tp`."""
    talks = [op.beside if isinstance(op, Gemm) else op for op in ops]
    copied = sum(op.nbytes for op in talks if isinstance(op, Copy))
    return copied + sum(float(wire_bytes(op.kind, op.nbytes, tp)) for op in talks if isinstance(op, Collective))
