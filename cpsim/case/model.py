"""Decoder-only transformers by their dimensions, and what one tensor-parallel rank has of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from cpsim.case.sparse import Sparse, read_sparse
from cpsim.errors import nearest


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
class Recurrent:
    """A layer with a state instead of keys: gated linear attention or a state-space model.

    A projection makes queries and keys of key heads, values and gates of value heads; a short convolution mixes
    neighbours of the first three; the scan follows, a norm with a gate, and a projection back. In Kimi Delta Attention
    (`kda`) every element of a key has a decay of its own; decays and the norm's gates are made by way of as few
    elements as a head of values has.

    References: Yang, Kautz, Hatamizadeh, Gated Delta Networks (2024), figure 1; Dao, Gu, Transformers are SSMs (2024),
    section 7.1 (queries are called C there, keys B and value heads heads); Kimi Linear (2510.26692), section 4.
    """

    kind: Literal["gated_delta", "mamba2", "kda"]
    key_heads: int
    """Of queries and keys, each of several value heads; Mamba-2's groups."""
    value_heads: int
    key_dim: int
    """Elements of a head of queries and keys; Mamba-2's state."""
    value_dim: int
    """Elements of a head of values; Mamba-2's head dimension."""
    conv: int = 4
    """Tokens that the convolution sees."""

    @property
    def values(self) -> int:
        """Elements of a token's values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Elements of a token that the convolution mixes."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def gates(self) -> int:
        """Numbers of a token and value head that say what the state keeps and takes: decays, and the delta rule's
        strength."""
        return {"gated_delta": 2, "mamba2": 1, "kda": self.key_dim + 1}[self.kind]

    @property
    def reads(self) -> int:
        """Products of a token with a state: what it reads of it, and what the delta rule takes from it."""
        return 1 if self.kind == "mamba2" else 2

    @property
    def projected(self) -> int:
        """Elements that the projection makes of a token; the norm's gates are as many as values."""
        if self.kind == "kda":
            return self.channels + self.value_heads + len(self.expanded) * self.value_dim
        return self.channels + self.values + self.gates * self.value_heads

    @property
    def expanded(self) -> dict[str, tuple[int, int]]:
        """(input, output) elements of linear layers that make decays and the norm's gates of a part of what is
        projected."""
        if self.kind != "kda":
            return {}
        return {"decay": (self.value_dim, self.value_heads * self.key_dim), "norm_gate": (self.value_dim, self.values)}

    @property
    def state_elements(self) -> int:
        """Of the states of all heads."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def transition_elements(self) -> int:
        """Of what a shard of tokens multiplies states with: a matrix of each head, or a number."""
        return self.value_heads * (1 if self.kind == "mamba2" else self.key_dim**2)

    def small_parameters(self) -> int:
        """Weights beside linear layers: of the convolution and its biases (Mamba-2), gates, skip (Mamba-2), norm."""
        mamba = self.kind == "mamba2"
        if self.kind == "kda":
            return self.conv * self.channels + self.value_heads * self.gates + self.value_dim
        of_heads = (3 if mamba else 2) * self.value_heads
        return (self.conv + mamba) * self.channels + of_heads + (self.values if mamba else self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """RMSNorm, grouped-query attention with rotary positions, SwiGLU; input and output embeddings apart.

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
    kv_rank: int = 0
    """Elements that keys and values of all heads are made from (multi-head latent attention); 0: there are none.

    Reference: DeepSeek-V2 (2024), section 2.1.
    """
    q_rank: int = 0
    """The same of queries; 0: they are made from the hidden state."""
    rope_dim: int = 0
    """Elements of a head that have rotary positions; all heads share those of keys. 0: all have, of every head."""
    value_dim: int = 0
    """Elements of a head of values; 0: as `head_dim`."""
    dense_layers: int = 0
    """Layers before those with experts, whose MLP is dense."""
    gated: bool = True
    """Whether the MLP is SwiGLU's; without a gate it is one squared ReLU between two linear layers, experts' too."""
    recurrent: Recurrent | None = None
    """Layers with a state instead of keys; None: all layers attend."""
    attention_layers: int = 0
    """Layers that attend all the same."""
    bare_layers: int = 0
    """Layers with a state that have no MLP."""
    sinks: bool = False
    """Whether every head of attention has a sink: a learned logit that joins the denominators of its softmax."""
    clamped: bool = False
    """Whether gate and up projections of experts are clamped before their activation (gpt-oss)."""
    expert_bias: bool = False
    """Whether linear layers of experts have biases."""
    sparse: Sparse | None = None
    """How queries of every layer choose their keys; None: they see all."""
    kv_shared_layers: int = 0
    """Layers that attend to keys and values of an earlier layer and make none.

    Reference: Brandon et al., "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention" (2024); Gemma 3n.
    """

    @property
    def borrows(self) -> bool:
        """Whether all layers attend to keys and values that others made."""
        return self.kv_shared_layers == self.layers

    @property
    def absorbed(self) -> bool:
        """Whether queries attend to latents themselves, into which what would expand them is multiplied.

        Reference: DeepSeek-V3.2 (2512.02556), section 2.1 and appendix A (DSA in the MQA mode of MLA).
        """
        return self.sparse is not None and self.sparse.latent

    @property
    def latent_dim(self) -> int:
        """Elements of a latent of keys and values with what all heads share."""
        return self.kv_rank + self.rope_dim

    @property
    def kernel_shape(self) -> tuple[int, int, int, int]:
        """Heads, key-value heads, and elements of a head of keys and of values, as attention's kernel sees them."""
        if self.absorbed:
            return self.heads, 1, self.latent_dim, self.kv_rank
        return self.heads, self.kv_heads, self.head_dim, self.values

    @property
    def bare(self) -> bool:
        """Whether no layer has an MLP."""
        return self.bare_layers == self.layers

    @property
    def kinds(self) -> tuple[tuple[float, Model], ...]:
        """Kinds of layers: the share of each, and the model if all layers were of that kind."""
        if 0 < self.kv_shared_layers < self.layers:
            borrowed = self.kv_shared_layers / self.layers
            makes, borrows = (replace(self, kv_shared_layers=number) for number in (0, self.layers))
            return (1.0 - borrowed, makes), (borrowed, borrows)
        if self.recurrent is None or not (self.attention_layers or 0 < self.bare_layers < self.layers):
            return ((1.0, self),)
        alike = replace(self, attention_layers=0, bare_layers=0)
        bare = replace(alike, bare_layers=self.layers, experts=0, top_k=0, shared_experts=0, expert_ffn=0)
        others = self.layers - self.attention_layers - self.bare_layers
        attends = replace(alike, recurrent=None)
        alike, bare = (replace(one, kv_rank=0, q_rank=0, rope_dim=0, value_dim=0) for one in (alike, bare))
        counts = (self.attention_layers, attends), (others, alike), (self.bare_layers, bare)
        return tuple((count / self.layers, model) for count, model in counts if count)

    def _mean(self, of: Callable[[Model], float]) -> int:
        """Of a layer, where layers differ."""
        return round(sum(share * of(model) for share, model in self.kinds))

    @property
    def inner(self) -> int:
        """Inner elements of the MLP, or of one expert."""
        return self.expert_ffn or self.ffn

    @property
    def values(self) -> int:
        """Elements of a head of values."""
        return self.value_dim or self.head_dim

    def attended(self, tp: int) -> int:
        """Elements of a token's queries, keys and values on each of `tp` ranks, of those that a layer makes."""
        if self.recurrent:
            return self.recurrent.channels // tp
        if self.borrows:
            return self.heads * self.head_dim // tp
        if self.absorbed:
            return (self.heads // tp + 1) * self.latent_dim
        return (self.heads * self.head_dim + self.kv_heads * (self.head_dim + self.values)) // tp

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

        QKV, gate and up are cut by columns, projection and down by rows, and layers that make latents are not cut. With
        experts, gate, up and down are those of the shared ones, if there are any.

        Reference: Shoeybi et al., Megatron-LM (2019), section 3; DeepSeek-V2 (2024), equations 9 to 13.
        """
        inner = 0 if self.bare else self.shared_experts * self.inner if self.experts else self.ffn
        mlp = {"gate_up": (self.hidden, (1 + self.gated) * inner // tp), "down": (inner // tp, self.hidden)}
        if self.recurrent:
            projected, values = self.recurrent.projected // tp, self.recurrent.values // tp
            expanded = {name: (inner, outer // tp) for name, (inner, outer) in self.recurrent.expanded.items()}
            mixer = {"qkv": (self.hidden, projected), **expanded, "proj": (values, self.hidden)}
            return {**mixer, **(mlp if inner else {})}
        return {
            **(self._latent(tp) if self.kv_rank else {"qkv": (self.hidden, self.attended(tp))}),
            "proj": (self.heads * self.values // tp, self.hidden),
            **(mlp if inner else {}),
        }

    def _latent(self, tp: int) -> dict[str, tuple[int, int]]:
        """Those that make latents, and queries, keys and values from them."""
        down = {"q_down": (self.hidden, self.q_rank)} if self.q_rank else {}
        of_head = self.head_dim - self.rope_dim + self.values
        return {
            **self.indexer(),
            **down,
            "q_up": (self.q_rank or self.hidden, self.heads * self.head_dim // tp),
            "kv_down": (self.hidden, self.kv_rank + self.rope_dim),
            "kv_up": (self.kv_rank, self.heads * of_head // tp),
        }

    def indexer(self) -> dict[str, tuple[int, int]]:
        """(input, output) elements of the linear layers that choose keys, which no rank cuts: of its queries, of its
        key, and of weights of its heads.

        Reference: DeepSeek-V3.2 (2512.02556), equation 1; deepseek-ai/DeepSeek-V3.2-Exp, inference/model.py (Indexer).
        """
        if self.sparse is None or not self.absorbed:
            return {}
        return {
            "index_q": (self.q_rank or self.hidden, self.sparse.index_heads * self.sparse.index_dim),
            "index_k": (self.hidden, self.sparse.index_dim),
            "index_w": (self.hidden, self.sparse.index_heads),
        }

    def expert(self, tp: int) -> dict[str, tuple[int, int]]:
        """(input, output) elements of a routed expert's linear layers on each of `tp` ranks."""
        return {"gate_up": (self.hidden, (1 + self.gated) * self.inner // tp), "down": (self.inner // tp, self.hidden)}

    def weight_shapes(self, tp: int, *, dense: bool) -> set[tuple[int, int]]:
        """(input, output) elements of linear layers on each of `tp` ranks, alike ones once; those of a ``dense`` MLP
        beside experts where asked for."""
        found = {shape for _, model in self.kinds for shape in model.linears(tp).values()}
        if self.experts:
            found |= set(self.expert(tp).values())
        if dense:
            found |= {(self.hidden, (1 + self.gated) * self.ffn // tp), (self.ffn // tp, self.hidden)}
        return found

    def products(self) -> int:
        """Multiplications of one token in the matrix products of a layer, forward: FLOP are twice as many. Of a state,
        what a token adds to it, reads of it, and what the delta rule takes from it."""
        if len(self.kinds) > 1:
            return self._mean(Model.products)
        dense = sum(inner * outer for inner, outer in self.linears(1).values())
        routed = sum(inner * outer for inner, outer in self.expert(1).values())
        if self.recurrent:
            dense += (1 + self.recurrent.reads) * self.recurrent.state_elements
        return dense + self.hidden * self.experts + self.top_k * routed

    def expert_parameters(self, tp: int) -> int:
        """Weights of all routed experts of a layer, each cut by `tp`."""
        if len(self.kinds) > 1:
            return self._mean(lambda model: model.expert_parameters(tp))
        return self.experts * sum(inner * outer for inner, outer in self.expert(tp).values())

    def layer_parameters(self, tp: int) -> int:
        """Weights of a layer on each of `tp` ranks, with all experts; norms and the router are on all of them."""
        if len(self.kinds) > 1:
            return self._mean(lambda model: model.layer_parameters(tp))
        dense = sum(inner * outer for inner, outer in self.linears(tp).values())
        return dense + self.whole_parameters() + self.expert_parameters(tp)

    def whole_parameters(self) -> int:
        """Weights of a layer's norms and of its router, which no rank cuts, and small ones of a layer with a state."""
        if len(self.kinds) > 1:
            return self._mean(Model.whole_parameters)
        small = self.recurrent.small_parameters() if self.recurrent else 0
        return (2 - self.bare + self.experts) * self.hidden + self.q_rank + self.kv_rank + small

    def more_dense(self, tp: int) -> int:
        """Weights by which a layer with a dense MLP has more than one with experts, these aside."""
        shared = self.shared_experts * self.inner
        return (2 + self.gated) * self.hidden * (self.ffn - shared) // tp - self.experts * self.hidden

    def parameters(self) -> int:
        """Weights of the whole model."""
        dense = self.dense_layers * (self.more_dense(1) - self.expert_parameters(1))
        layers = sum(round(share * self.layers) * model.layer_parameters(1) for share, model in self.kinds)
        return layers + dense + 2 * self.vocab * self.hidden + self.hidden

    def size(self) -> str:
        """Weights in words, e.g. ``8.03 billion parameters``."""
        billions = self.parameters() / 1e9
        number = f"{billions:.3g} billion" if billions < 999.5 else f"{billions / 1e3:.3g} trillion"
        return f"{number} parameters"

    def active_parameters(self) -> int:
        """Weights that a token passes: all but those of the experts that it is not sent to."""
        if not self.experts:
            return self.parameters()
        idle = sum(inner * outer for inner, outer in self.expert(1).values()) * (self.experts - self.top_k)
        return self.parameters() - (self.layers - self.dense_layers - self.bare_layers) * idle


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published model, as its repository describes it."""

    name: str
    hub: str
    """Its repository on the Hugging Face hub."""
    model: Model | None
    """None where the parts of a step cannot say it."""
    caveats: tuple[str, ...] = ()
    """What it has that a step does not say."""
    why: str = ""
    """What cannot be said of it, where there is no model."""
    nearest: str = ""
    """The model that is most like it, where there is no model."""

    def refusal(self) -> str:
        """Why there is no model, in one line."""
        return f"{self.name} cannot be predicted: {self.why}; nearest that can: {self.nearest}"


def model_from(fields: Mapping[str, Any]) -> Model:
    """A model of the fields of a file."""
    state, sparse = fields.get("recurrent"), fields.get("sparse")
    given = {"recurrent": Recurrent(**state) if state else None, "sparse": read_sparse(sparse) if sparse else None}
    return Model(**{**fields, **given})


def _published() -> dict[str, Published]:
    shipped = json.loads(Path(__file__).parent.with_name("data").joinpath("models.json").read_text(encoding="utf-8"))
    found = {}
    for name, entry in shipped["models"].items():
        hub, caveats = entry.pop("hub"), tuple(entry.pop("caveats", ()))
        found[name] = Published(name=name, hub=hub, model=model_from(entry), caveats=caveats)
    for name, entry in shipped["cannot"].items():
        found[name] = Published(name=name, model=None, **entry)
    return found


PUBLISHED: Final = _published()
"""Models that ship, and those that a step cannot say; `cpsim/data/models.json`."""
MODELS: Final = {name: one.model for name, one in PUBLISHED.items() if one.model}
"""Published dimensions; `llama-34b` is CodeLlama-34b as DistCA runs it (8 key-value heads in its scripts, 16 in Table
2 of its paper)."""
_SUFFIX: Final = re.compile(r"(hf|instruct|base|pt|it|chat|original)$")


def known_model(name: str) -> Published | None:
    """A published model by our name, by that of its repository, or by something like it.

    Examples:
        >>> known_model("meta-llama/Llama-3.1-8B-Instruct").name
        'llama3.1-8b'
    """
    return PUBLISHED.get(name) or _by_spelling().get(_spelled(name))


@cache
def _by_spelling() -> dict[str, Published]:
    every = list(PUBLISHED.values())
    return {_spelled(one.hub): one for one in reversed(every)} | {_spelled(one.name): one for one in every}


def _spelled(name: str) -> str:
    """A name without what spellings differ in: the owner, capitals, signs, and words such as Instruct."""
    short = name.lower().rsplit("/", 1)[-1].removeprefix("meta-")
    while len(bare := _SUFFIX.sub("", short.rstrip("-_ "))) < len(short):
        short = bare
    return re.sub(r"[^a-z0-9.]", "", short)


def likely(name: str) -> str:
    """``did you mean 'x'? or `` for the model that a name is most like; nothing where none is like it."""
    hint = nearest(name, PUBLISHED)
    return f"{hint} or " if hint.startswith("did") else ""
