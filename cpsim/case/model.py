"""Decoder-only transformers by their dimensions, and what one tensor-parallel rank has of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """RMSNorm, grouped-query attention with rotary positions, SwiGLU; no biases, input and output embeddings apart."""

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

    def linears(self, tp: int) -> dict[str, tuple[int, int]]:
        """(input, output) elements of a layer's linear layers on each of `tp` ranks.

        QKV, gate and up are cut by columns, projection and down by rows.

        Reference: Shoeybi et al., Megatron-LM (2019), section 3.
        """
        return {
            "qkv": (self.hidden, (self.heads + 2 * self.kv_heads) * self.head_dim // tp),
            "proj": (self.heads * self.head_dim // tp, self.hidden),
            "gate_up": (self.hidden, 2 * self.ffn // tp),
            "down": (self.ffn // tp, self.hidden),
        }

    def layer_parameters(self, tp: int) -> int:
        """Weights of a layer on each of `tp` ranks; norms are on all of them."""
        return sum(inner * outer for inner, outer in self.linears(tp).values()) + 2 * self.hidden

    def parameters(self) -> int:
        """Weights of the whole model."""
        return self.layers * self.layer_parameters(1) + 2 * self.vocab * self.hidden + self.hidden


MODELS = {
    "llama3-8b": Model(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256),
    "llama-34b": Model(layers=48, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=22016, vocab=32000),
    "llama3-70b": Model(layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocab=128256),
}
"""Published dimensions; `llama-34b` is CodeLlama-34b as DistCA runs it (8 key-value heads in its scripts, 16 in Table
2 of its paper)."""
