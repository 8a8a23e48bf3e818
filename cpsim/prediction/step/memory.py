"""Peak memory of a training step on each pipeline stage: weights, gradients, optimizer states, activations.

Activations are counted tensor by tensor, as Megatron-LM with sequence parallelism and fused norms keeps them; what a
layer allocates while it runs comes on top, once. Gradients of weights are summed in fp32 buffers.

Reference: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4;
Rajbhandari et al., "ZeRO" (2020), section 5.1 (optimizer states over replicas).
Differs: SwiGLU and grouped-query attention instead of GELU and equal heads, no dropout; flash attention keeps its
output and log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpsim.case.model import Model
from cpsim.case.parallel import Parallel
from cpsim.prediction.step.layer import BF16, FP32

STATES = 3 * FP32
"""Bytes of a parameter's optimizer state: AdamW's master copy and both moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on each rank of a stage."""

    weights: int
    """bf16."""
    gradients: int
    """fp32."""
    optimizer: int
    activations: int
    """Kept for the backward passes of the microbatches in flight."""
    working: int
    """What passes allocate while they run."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.working


@dataclass(frozen=True, slots=True)
class Tensors:
    """Bytes of the tensors of one layer, of one microbatch on one rank."""

    model: Model
    tp: int
    tokens: int
    """On this context-parallel rank; each of `tp` ranks has its shard of them."""

    @property
    def shard(self) -> int:
        """Hidden state of this rank's shard of the tokens."""
        return BF16 * self.tokens // self.tp * self.model.hidden

    @property
    def whole(self) -> int:
        """Hidden state of all tokens."""
        return BF16 * self.tokens * self.model.hidden

    @property
    def qkv(self) -> int:
        """Queries, keys and values."""
        return BF16 * self.tokens * self.model.linears(self.tp)["qkv"][1]

    @property
    def out(self) -> int:
        """Attention's output, without its log-sum-exp."""
        return BF16 * self.tokens * self.model.linears(self.tp)["proj"][0]

    @property
    def lse(self) -> int:
        """Log-sum-exp."""
        return FP32 * self.tokens * self.model.heads // self.tp

    @property
    def inner(self) -> int:
        """SwiGLU's output; gate and up have twice as much."""
        return BF16 * self.tokens * self.model.linears(self.tp)["down"][0]

    @property
    def logits(self) -> int:
        """Bytes of the logits of this rank's words."""
        return BF16 * self.tokens * self.model.vocab // self.tp

    def kept(self, recompute: str) -> int:
        """What a layer keeps for its backward pass, its input included and its output not."""
        if recompute == "full":
            return self.shard
        attention = 2 * self.shard + self.qkv + self.out + self.lse
        return attention + self.shard + (self.shard + 3 * self.inner if recompute == "none" else 0)

    def working(self, recompute: str, *, asynchronous: bool = True) -> int:
        """The most that a layer allocates in its backward pass beyond what it keeps.

        Args:
            recompute: as of Parallel.
            asynchronous: whether a layer's input is gathered again while the gradient of that input is computed.

        What runs again is kept first, whole. Then the gradient of SwiGLU's output needs the gathered gradient of the
        layer's output; that of gate and up follows when SwiGLU's output is gone; then that of the MLP's input,
        gathered, when gate and up are gone, too. Where the MLP is small, gradients of attention are more: those of
        output and QKV, and the fp32 accumulator of queries' that flash attention has; nothing of the MLP is left then.
        """
        again = self.kept("none") - self.kept(recompute)
        gathered, gone = (self.whole if self.tp > 1 else 0), self.shard + 3 * self.inner
        down, swiglu = gathered + self.inner, 2 * self.inner
        up = self.whole + gathered * asynchronous - self.inner
        attention = self.out + self.qkv + FP32 // BF16 * self.out - gone
        return self.shard + again + max(down, swiglu, up, attention)


def stage_memory(
    model: Model, parallel: Parallel, tokens: int, stage: int, exchange: int = 0, more: int = 0
) -> StageMemory:
    """Peak memory of one stage.

    Args:
        model: dimensions.
        parallel: degrees.
        tokens: of the largest microbatch on a context-parallel rank.
        stage: 0 is the first.
        exchange: bytes that attention allocates beyond its inputs and output, gathered keys for example.
        more: bytes that attention of a layer keeps beyond its inputs and output.
    """
    first, last = stage == 0, stage == parallel.pp - 1
    layers = model.layers // parallel.pp
    tensors = Tensors(model, parallel.tp, tokens)
    parameters = model.layer_parameters(parallel.tp) * layers
    parameters += model.vocab // parallel.tp * model.hidden * (first + last)
    in_flight = min(parallel.microbatches, parallel.pp - stage)
    more = 0 if parallel.recompute == "full" else more
    kept = layers * (tensors.kept(parallel.recompute) + more) + (2 * tensors.shard + 3 * tensors.logits if last else 0)
    working = tensors.working(parallel.recompute) + exchange
    return StageMemory(
        weights=BF16 * parameters,
        gradients=FP32 * parameters,
        optimizer=-(-STATES * parameters // parallel.replicas) if parallel.optimizer else 0,
        activations=in_flight * kept,
        working=working,
    )
