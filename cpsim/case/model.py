"""Decoder-only transformers by their dimensions, and what one tensor-parallel rank has of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters of a layer's linear layers; everything else is frozen."""

    rank: int
    """Inner elements of an adapter."""
    drops: bool = False
    """Whether what adapters read or give is dropped out."""
    modules: tuple[str, ...] = ("qkv", "proj", "gate_up", "down")
    """Linear layers that have one."""

    def parameters(self, model: Model, tp: int) -> int:
        """Trained weights of a layer on each of `tp` ranks."""
        linears = model.linears(tp)
        return self.rank * sum(sum(linears[name]) for name in self.modules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """RMSNorm, grouped-query attention with rotary positions, SwiGLU; no biases, input and output embeddings apart.

    With experts, the MLP of every layer is a mixture of them: a router sends each token to some.
    """

    layers: int
    hidden: int
    """Elements of a token between layers."""
    heads: int
    kv_heads: int
    """Key-value heads, a divisor of heads."""
    head_dim: int
    ffn: int
    """Inner elements of the MLP; gate and up projections have as many each."""
    vocab: int
    experts: int = 0
    """Routed experts of a layer; 0: one dense MLP."""
    top_k: int = 0
    """Experts that a token is sent to."""
    expert_ffn: int = 0
    """Inner elements of an expert; 0: as `ffn`."""
    shared_experts: int = 0
    """Experts that every token passes besides; they are one MLP of so many times `expert_ffn`."""
    window: int = 0
    """Keys that a query sees in layers with a sliding window, its own among them [tokens]; 0: no layer has one."""
    window_pattern: int = 0
    """Of so many layers, one sees all keys and the others a window; 0: all have a window."""

    @property
    def inner(self) -> int:
        """Inner elements of the MLP, or of one expert."""
        return self.expert_ffn or self.ffn

    @property
    def windowed(self) -> float:
        """Share of the layers whose attention has a sliding window."""
        if not self.window:
            return 0.0
        return 1.0 - (self.layers // self.window_pattern / self.layers if self.window_pattern else 0.0)

    def pairs(self, length: int) -> float:
        """Pairs of queries and keys of one causal document of so many tokens, in the mean layer."""
        w = min(self.window or length, length)
        inside = w * (w + 1) / 2 + (length - w) * w
        return self.windowed * inside + (1 - self.windowed) * length * (length + 1) / 2

    def linears(self, tp: int) -> dict[str, tuple[int, int]]:
        """(input, output) elements of a layer's linear layers on each of `tp` ranks, routed experts aside.

        QKV, gate and up are cut by columns, projection and down by rows. With experts, gate, up and down are those of
        the shared ones, if there are any.

        Reference: Shoeybi et al., Megatron-LM (2019), section 3.
        """
        inner = self.shared_experts * self.inner if self.experts else self.ffn
        mlp = {"gate_up": (self.hidden, 2 * inner // tp), "down": (inner // tp, self.hidden)}
        return {
            "qkv": (self.hidden, (self.heads + 2 * self.kv_heads) * self.head_dim // tp),
            "proj": (self.heads * self.head_dim // tp, self.hidden),
            **(mlp if inner else {}),
        }

    def expert(self, tp: int) -> dict[str, tuple[int, int]]:
        """(input, output) elements of a routed expert's linear layers on each of `tp` ranks."""
        return {"gate_up": (self.hidden, 2 * self.inner // tp), "down": (self.inner // tp, self.hidden)}

    def products(self) -> int:
        """Multiplications of one token in the matrix products of a layer, forward: FLOP are twice as many."""
        dense = sum(inner * outer for inner, outer in self.linears(1).values())
        routed = sum(inner * outer for inner, outer in self.expert(1).values())
        return dense + self.hidden * self.experts + self.top_k * routed

    def expert_parameters(self, tp: int) -> int:
        """Weights of all routed experts of a layer, each cut by `tp`."""
        return self.experts * sum(inner * outer for inner, outer in self.expert(tp).values())

    def layer_parameters(self, tp: int) -> int:
        """Weights of a layer on each of `tp` ranks, with all experts; norms and the router are on all of them."""
        dense = sum(inner * outer for inner, outer in self.linears(tp).values())
        return dense + (2 + self.experts) * self.hidden + self.expert_parameters(tp)

    def parameters(self) -> int:
        """Weights of the whole model."""
        return self.layers * self.layer_parameters(1) + 2 * self.vocab * self.hidden + self.hidden

    def active_parameters(self) -> int:
        """Weights that a token passes: all but those of the experts that it is not sent to."""
        if not self.experts:
            return self.parameters()
        idle = self.expert_parameters(1) // self.experts * (self.experts - self.top_k)
        return self.parameters() - self.layers * idle


MODELS = {
    "llama3-8b": Model(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256),
    "llama-34b": Model(layers=48, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=22016, vocab=32000),
    "llama3-70b": Model(layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocab=128256),
    "mixtral-8x7b": Model(
        layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=32000, experts=8, top_k=2
    ),
    "qwen3-30b-a3b": Model(
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        ffn=6144,
        vocab=151936,
        experts=128,
        top_k=8,
        expert_ffn=768,
    ),
}
"""Published dimensions; `llama-34b` is CodeLlama-34b as DistCA runs it (8 key-value heads in its scripts, 16 in Table
2 of its paper), `qwen3-30b-a3b` without the norms of queries and keys."""
