"""Frameworks as facts: what their code runs for a layer and both ends of a model, and what it holds of every weight.

Every op says which tensors it makes and reads, so that time and memory of a step follow from the same lines; see
`cpsim.prediction.step.program`. What is kept for the backward pass is what a backward op reads. A new framework is a
row of ``FRAMEWORKS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from cpsim.case.model import Model
from cpsim.case.parallel import Parallel, Recompute, Sharding
from cpsim.case.resolve import parallel_of
from cpsim.case.scenario import ParallelSection
from cpsim.errors import InfeasibleError, check_name
from cpsim.prediction.step.layer import BF16, FP32, Collective, ElementwisePass, Gemm
from cpsim.prediction.step.program import LayerCode, Node, Nodes
from cpsim.schedule.transformer import OP_BYTES


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the tensors of a layer, of one microbatch on one rank."""

    model: Model
    tp: int
    tokens: int
    """On this context-parallel rank; each of `tp` ranks has its shard of them."""

    @property
    def shard(self) -> int:
        """Hidden state of this rank's shard of the tokens."""
        return BF16 * (self.tokens // self.tp) * self.model.hidden

    @property
    def whole(self) -> int:
        """Hidden state of all tokens."""
        return BF16 * self.tokens * self.model.hidden

    def wide(self, name: str) -> int:
        """What a linear layer makes of all tokens."""
        return BF16 * self.tokens * self.model.linears(self.tp)[name][1]

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
    def words(self) -> int:
        """Words of this rank."""
        return self.model.vocab // self.tp

    def weight(self, name: str) -> int:
        """Parameters of a linear layer."""
        inner, outer = self.model.linears(self.tp)[name]
        return inner * outer


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes per parameter that a GPU holds all the time, of what is its own."""

    weight: int
    gradient: int
    """0 where gradients are there from the backward pass to the optimizer's step only."""
    states: int
    """Of the optimizer."""
    made_gradient: int = 0
    """Of a gradient that the backward pass makes."""
    optimizer: int = OP_BYTES["adam"]
    """Read and written by the optimizer's step."""
    clipped: bool = False
    """Whether gradients are read once more for their norm, and scaled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One framework."""

    name: str
    source: str
    """What was read: package and version."""
    sharding: Sharding
    """Where nothing is said."""
    shardings: tuple[Sharding, ...]
    """All that it has."""
    recompute: Recompute = "none"
    """Where nothing is said."""
    loss_chunks: int = 1
    """Where nothing is said."""
    compiles: bool | None = None
    """Whether it compiles layers where nothing is said; None: it cannot."""
    layer: Callable[[Sizes, bool], LayerCode]
    """A layer, of sizes, compiled or not."""
    first: Callable[[Sizes, bool], LayerCode]
    last: Callable[[Sizes, bool], LayerCode]
    held: Callable[[Sharding], Held]
    kept: Mapping[Recompute, frozenset[str]] = field(default_factory=dict)
    """Tensors of a layer that are kept beside its input, by what is computed again; all where it has no row."""
    again_to: Mapping[Recompute, frozenset[str]] = field(default_factory=dict)
    """Tensors that a second run makes though nobody reads them, as whole functions run again."""
    root: bool = False
    """Whether, where weights are sharded, both ends are one part that is gathered once; see ``Shards``."""
    pipelines: bool = False
    launches: Mapping[str, str] = field(default_factory=dict)
    """Names of host measurements, by stream; empty: hosts are never late."""

    def cut(self, section: ParallelSection | None, gpus: int, sequences: int) -> Parallel:
        """How a scenario cuts the step, with what this framework does where nothing is said; see ``parallel_of``."""
        return parallel_of(section, gpus, sequences, self.recompute, self.sharding, self.loss_chunks)

    def compiled(self, asked: bool | None) -> bool:
        """Whether layers are compiled.

        Raises:
            InfeasibleError: it cannot compile them.
        """
        if asked and self.compiles is None:
            raise InfeasibleError(f"compile: layers of {self.name} are not compiled as a whole; leave it out")
        return bool(self.compiles if asked is None else asked)

    def check(self, parallel: Parallel) -> None:
        """Whether this framework can cut a step like this.

        Raises:
            InfeasibleError: it cannot; says what it has.
        """
        if parallel.sharding not in self.shardings:
            known = ", ".join(self.shardings)
            raise InfeasibleError(f"sharding: {self.name} has {known}, got {parallel.sharding}")
        known = ", ".join(self.recomputes)
        if parallel.recompute not in self.recomputes:
            raise InfeasibleError(f"recompute: {self.name} has {known}, got {parallel.recompute}")
        if parallel.pp > 1 and not self.pipelines:
            raise InfeasibleError(f"pp: steps of {self.name} are predicted without pipelines, got pp = {parallel.pp}")
        if parallel.replicate > 1 and parallel.sharding != "fsdp":
            raise InfeasibleError("replicate: belongs to sharding fsdp; leave it out")

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """What it can compute again."""
        return ("none", *(kind for kind in self.kept if kind != "none"))


def node(kind: str, elements: int, *reads: str, **makes: int) -> Node:
    """A memory-bound op over so many elements; names of what it makes have ``_`` for spaces."""
    return Node(ElementwisePass(kind, OP_BYTES[kind] * elements), reads, named(makes))


def named(makes: Mapping[str, int]) -> dict[str, int]:
    """Names with spaces."""
    return {name.replace("_", " "): nbytes for name, nbytes in makes.items()}


def gathered(sizes: Sizes, source: str, to: str) -> Nodes:
    """A shard of hidden states to those of all tokens, among tensor-parallel ranks."""
    return (Node(Collective("all_gather", sizes.whole), (source,), {to: sizes.whole}, "comm"),)


def scattered(sizes: Sizes, source: str, to: str) -> Nodes:
    """Sums of hidden states of all tokens, a shard to each tensor-parallel rank."""
    return (Node(Collective("reduce_scatter", sizes.whole), (source,), {to: sizes.shard}, "comm"),)


def forward_product(sizes: Sizes, name: str, source: str, to: str) -> Node:
    """Of a linear layer."""
    inner, outer = sizes.model.linears(sizes.tp)[name]
    made = {to: BF16 * sizes.tokens * outer}
    return Node(Gemm("forward", sizes.tokens, outer, inner), (source, "weights"), made)


def input_gradient(sizes: Sizes, name: str, source: str, to: str) -> Node:
    """Of a linear layer."""
    inner, outer = sizes.model.linears(sizes.tp)[name]
    made = {to: BF16 * sizes.tokens * inner}
    return Node(Gemm("dgrad", sizes.tokens, inner, outer), (source, "weights"), made)


def weight_gradient(sizes: Sizes, name: str, source: str, kept: str, each: int) -> Node:
    """Of a linear layer; ``each`` bytes of a gradient."""
    inner, outer = sizes.model.linears(sizes.tp)[name]
    made = {f"dw {name}": each * inner * outer} if each else {}
    return Node(Gemm("wgrad", outer, inner, sizes.tokens), (source, kept), made)


def megatron_layer(s: Sizes, _compiled: bool, gradient: int = 0, asynchronous: bool = True) -> LayerCode:
    """Transformer Engine's fused linear layers with sequence parallelism; gradients are summed into buffers.

    Args:
        s: sizes.
        gradient: bytes per parameter of gradients that the backward pass allocates.
        asynchronous: whether a layer's input is gathered again while the gradient of that input is computed.

    In the backward pass the gather of a linear layer's input hides behind the gradient of that input, and the scatter
    of that gradient behind the gradient of the weights; everything else waits.
    """
    many, hidden = s.tp > 1, s.tokens // s.tp * s.model.hidden
    inner, heads = s.inner // BF16, s.tokens * (s.model.heads + s.model.kv_heads) // s.tp * s.model.head_dim
    qkv, every = s.wide("qkv"), " all" if many else ""

    def column(name: str, source: str, to: str) -> Nodes:
        return (*(gathered(s, source, f"{source} all") if many else ()), forward_product(s, name, source + every, to))

    def row(name: str, source: str, to: str) -> Nodes:
        return (forward_product(s, name, source, to + every), *(scattered(s, f"{to} all", to) if many else ()))

    def column_backward(name: str, source: str, kept: str, to: str) -> Nodes:
        again = gathered(s, kept, f"{kept} again") if many else ()
        scatter = scattered(s, f"{to} all", to) if many else ()
        product = input_gradient(s, name, source, to + every)
        sums = weight_gradient(s, name, source, f"{kept} again" if many else kept, gradient)
        return (*again, product, *scatter, sums) if asynchronous else (product, *scatter, *again, sums)

    def row_backward(name: str, source: str, kept: str, to: str) -> Nodes:
        return (
            *(gathered(s, source, f"{source} all") if many else ()),
            input_gradient(s, name, source + every, to),
            weight_gradient(s, name, source + every, kept, gradient),
        )

    return LayerCode(
        forward=(
            node("rms_norm", hidden, "x", x_norm=s.shard),
            *column("qkv", "x norm", "qkv"),
            node("rotary", heads, "qkv", q_k_v=qkv),
            Node("fwd", ("q k v",), {"out": s.out, "lse": s.lse}),
            *row("proj", "out", "proj"),
            node("add", hidden, "x", "proj", h=s.shard),
            node("rms_norm", hidden, "h", h_norm=s.shard),
            *column("gate_up", "h norm", "gate up"),
            node("swiglu", inner, "gate up", swiglu=s.inner),
            *row("down", "swiglu", "down"),
            node("add", hidden, "h", "down", y=s.shard),
        ),
        backward=(
            *row_backward("down", "dy", "swiglu", "dswiglu"),
            node("swiglu_bwd", inner, "dswiglu", "gate up", dgate_up=2 * s.inner),
            *column_backward("gate_up", "dgate up", "h norm", "dh norm"),
            node("rms_norm_bwd", hidden, "dh norm", "h", dh_part=s.shard),
            node("add", hidden, "dy", "dh part", dh=s.shard),
            *row_backward("proj", "dh", "out", "dout"),
            Node("bwd", ("dout", "q k v", "out", "lse"), {"dq k v": qkv, "dq sums": FP32 // BF16 * s.out}),
            node("rotary", heads, "dq k v", dqkv=qkv),
            *column_backward("qkv", "dqkv", "x norm", "dx norm"),
            node("rms_norm_bwd", hidden, "dx norm", "x", dx_part=s.shard),
            node("add", hidden, "dh", "dx part", dx=s.shard),
        ),
        kept=frozenset({"x norm", "q k v", "out", "lse", "h", "h norm", "gate up", "swiglu"}),
    )


def megatron_first(s: Sizes, _compiled: bool) -> LayerCode:
    """Embedding: rows of this rank's words, summed over the ranks."""
    many, hidden = s.tp > 1, s.tokens * s.model.hidden
    zeros = BF16 * s.words * s.model.hidden
    back = Node(
        ElementwisePass("embedding_bwd", OP_BYTES["embedding_bwd"] * hidden + zeros), ("dy all",) if many else ("dy",)
    )
    return LayerCode(
        forward=(
            node("embedding", hidden, "weights", **({"y_all": s.whole} if many else {"y": s.shard})),
            *(scattered(s, "y all", "y") if many else ()),
        ),
        backward=(*(gathered(s, "dy", "dy all") if many else ()), back),
        kept=frozenset(),
    )


def megatron_last(s: Sizes, _compiled: bool) -> LayerCode:
    """Norm, logits of this rank's words, vocabulary-parallel cross entropy in fp32."""
    many, hidden, logits = s.tp > 1, s.tokens // s.tp * s.model.hidden, s.tokens * s.words
    shared = (Node(Collective("all_reduce", FP32 * s.tokens), ("losses",), {"loss": FP32 * s.tokens}, "comm"),) * 3
    every = " all" if many else ""
    return LayerCode(
        forward=(
            node("rms_norm", hidden, "x", z=s.shard),
            *(gathered(s, "z", "z all") if many else ()),
            Node(
                Gemm("forward", s.tokens, s.words, s.model.hidden), ("z" + every, "weights"), {"logits": BF16 * logits}
            ),
            node("cross_entropy", logits, "logits", logits_fp32=FP32 * logits, losses=FP32 * s.tokens),
            *(shared if many else ()),
        ),
        backward=(
            node("cross_entropy_bwd", logits, "logits fp32", dlogits=BF16 * logits),
            *(gathered(s, "z", "z again") if many else ()),
            Node(Gemm("dgrad", s.tokens, s.model.hidden, s.words), ("dlogits", "weights"), {"dz" + every: s.whole}),
            *(scattered(s, "dz all", "dz") if many else ()),
            Node(Gemm("wgrad", s.words, s.model.hidden, s.tokens), ("dlogits", "z again" if many else "z")),
            node("rms_norm_bwd", hidden, "dz", "x", dx=s.shard),
        ),
        kept=frozenset({"z", "logits fp32"}),
    )


MEGATRON: Final = Framework(
    name="megatron",
    source="Megatron-Core 0.12 with Transformer Engine 2.4",
    sharding="zero1",
    shardings=("none", "zero1"),
    layer=megatron_layer,
    first=megatron_first,
    last=megatron_last,
    held=lambda _sharding: Held(weight=BF16, gradient=FP32, states=3 * FP32, clipped=True),
    kept={"mlp": frozenset({"x norm", "q k v", "out", "lse", "h"}), "full": frozenset()},
    again_to={"mlp": frozenset({"down"}), "full": frozenset({"y"})},
    pipelines=True,
)
DEFAULT: Final = "megatron"
FRAMEWORKS: Final = {one.name: one for one in (MEGATRON,)}


def framework(name: str) -> Framework:
    """A row of the table.

    Raises:
        ScenarioError: nobody has read that framework yet.
    """
    check_name("framework", name, FRAMEWORKS)
    return FRAMEWORKS[name]
