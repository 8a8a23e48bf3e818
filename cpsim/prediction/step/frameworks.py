"""Frameworks as facts: what their code runs for a layer and both ends of a model, and what it holds of every weight.

Every op says which tensors it makes and reads, so that time and memory of a step follow from the same lines; see
`cpsim.prediction.step.program`. What is kept for the backward pass is what a backward op reads. A new framework is a
row of ``FRAMEWORKS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Final

from cpsim.case.model import Lora, Model
from cpsim.case.parallel import LossFusion, Parallel, Precision, Recompute, Sharding
from cpsim.case.resolve import parallel_of
from cpsim.case.scenario import ParallelSection
from cpsim.errors import InfeasibleError, check_name
from cpsim.models.recurrent import saved_bytes, states_bytes
from cpsim.prediction.step.experts import Experts
from cpsim.prediction.step.layer import BF16, FP32, Collective, ElementwisePass, Gemm
from cpsim.prediction.step.overlap import micro_pipelined, userbuffers
from cpsim.prediction.step.precision import ENGINE_RECIPES, TORCH_RECIPES, Recipe, in_fp8
from cpsim.prediction.step.program import GRADIENT, LayerCode, Node, Nodes
from cpsim.schedule.transformer import OP_BYTES
from cpsim.strategies.others.facts import DENSE, DOCUMENTS, Support
from cpsim.strategies.states import Exchange


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the tensors of a layer, of one microbatch on one rank."""

    model: Model
    tp: int
    tokens: int
    """On this context-parallel rank; each of `tp` ranks has its shard of them."""
    ep: int = 1
    """Ranks that share the experts of a layer."""

    @property
    def experts(self) -> Experts | None:
        """Router and routed experts, in place of the MLP."""
        if not self.model.experts:
            return None
        return Experts(model=self.model, tp=self.tp, ep=self.ep, tokens=self.tokens)

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
    def qkv(self) -> int:
        """Queries, keys and values."""
        return BF16 * self.tokens * self.model.attended(self.tp)

    @property
    def borrowed(self) -> int:
        """Keys and values that another layer made; 0 where this one makes its own."""
        return 2 * BF16 * self.tokens * self.model.kv_heads // self.tp * self.model.head_dim * self.model.borrows

    @property
    def out(self) -> int:
        """Attention's output, without its log-sum-exp."""
        return BF16 * self.tokens * self.model.linears(self.tp)["proj"][0]

    @property
    def queries(self) -> int:
        """Queries alone."""
        return BF16 * self.tokens * self.model.heads // self.tp * self.model.head_dim

    @property
    def latents(self) -> int:
        """Latents of keys and values, with what all heads share."""
        return BF16 * self.tokens * self.model.latent_dim

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
    optimizer_kernel: str = "adam"
    """Of the optimizer's step, as ``cpsim.models.elementwise`` prices it."""
    clipped: bool = False
    """Whether gradients are read once more for their norm, and scaled."""
    cleared: int = 0
    """Written before a step to clear buffers of gradients, of all that a GPU computes."""


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
    last: Callable[[Sizes, bool, int], LayerCode]
    """Of sizes, compiled or not, in so many chunks of the loss."""
    losses: Mapping[LossFusion, Callable[[Sizes, bool, int], LayerCode]] = field(default_factory=dict)
    """The same by the kernels of its cross entropy, where it has a choice."""
    held: Callable[[Sharding], Held]
    kept: Mapping[Recompute, frozenset[str] | Callable[[Sizes, bool], frozenset[str]]] = field(default_factory=dict)
    """Tensors of a layer that are kept beside its input, by what is computed again, or what says them of sizes and of
    layers that are compiled or not; all where it has no row."""
    again_to: Mapping[Recompute, frozenset[str]] = field(default_factory=dict)
    """Tensors that a second run makes though nobody reads them, as whole functions run again."""
    root: bool = False
    """Whether, where weights are sharded, both ends are one part that is gathered once; see ``Shards``."""
    divides: bool = False
    """Whether gradients are divided by the number of replicas before they are summed, where they are not sharded, as
    PyTorch's DistributedDataParallel does (torch/csrc/distributed/c10d/reducer.cpp)."""
    lists: bool = False
    """Whether the optimizer's step makes lists of tensors, of roots of second moments for one."""
    overlap: Callable[[LayerCode, int], LayerCode] | None = None
    """A layer whose tensor-parallel communication runs beside products, of one whose does not and the number of ranks;
    None: it cannot. Of frameworks that compile, compiled layers only."""
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    """How linear layers compute in FP8, by name, the one that it takes first; of frameworks that compile, compiled
    layers only."""
    joins: Callable[[LayerCode], LayerCode] = field(default=lambda code: code)
    """A layer with copies of what tensor-parallel ranks exchange, where there are some."""
    pipelines: bool = False
    offloads: Recompute | None = None
    """What it computes again where activations wait in the host's memory; None: they cannot. See
    ``cpsim.prediction.step.offload``."""
    graphs: bool = False
    """Whether its layers may be launched as CUDA graphs."""
    engine: bool = False
    """Whether linear layers are Transformer Engine's."""
    lora: Lora | None = None
    """Adapters that it trains; None: all weights."""
    experts: bool = False
    """Whether steps of models with experts, or latent attention, are predicted."""
    exchange: Exchange = "gather"
    """What context-parallel ranks exchange in layers with a state."""
    attention: str = "cpsim"
    """Whose code context parallelism is, where a scenario does not say."""
    offers: Mapping[str, Support] = field(default_factory=dict)
    """Strategies that it has, each with its masks and knobs; of scenarios that name the framework no others are tried.
    """
    kernels: tuple[str, ...]
    """Kernels that its attention calls, the usual one first."""
    kernels_apart: tuple[str, ...] = ()
    """The same where documents of a sequence do not see each other; none: they always do."""
    parts_loss: bool = False
    """Whether it computes logits and loss in parts."""
    tiles_mlp: bool = False
    """Whether its MLP may run in chunks of the tokens; see ``cpsim.prediction.step.tiles``."""
    launches: Mapping[bool, Mapping[str, str]] = field(default_factory=dict)
    """Names of host measurements by stream, of layers that are compiled and of those that are not; empty: hosts are
    never late."""
    host: str = ""
    """Whose layers hosts were timed with; see ``cpsim.prediction.step.hosts``."""

    def cut(self, section: ParallelSection | None, gpus: int, sequences: int) -> Parallel:
        """How a scenario cuts the step, with what this framework does where nothing is said; see ``parallel_of``."""
        cut = parallel_of(section, gpus, sequences, self.recompute, self.sharding, self.loss_chunks)
        unsaid = section is None or section.sharding is None
        alone = cut.replicas == 1 and cut.sharding == "fsdp" and "none" in self.shardings
        return replace(cut, sharding="none") if unsaid and alone else cut

    def with_loss(self, fusion: LossFusion | None) -> Framework:
        """With a cross entropy of its choice, or with the usual one.

        Raises:
            InfeasibleError: it has no choice.
        """
        if fusion is None:
            return self
        if fusion not in self.losses:
            known = ", ".join(one.name for one in FRAMEWORKS.values() if one.losses)
            raise InfeasibleError(f"loss_fusion: expected framework {known}, got {self.name}; leave it out")
        return replace(self, last=self.losses[fusion])

    def compiled(self, asked: bool | None) -> bool:
        """Whether layers are compiled.

        Raises:
            InfeasibleError: it cannot compile them.
        """
        if asked and self.compiles is None:
            raise InfeasibleError(f"compile: layers of {self.name} are not compiled as a whole; leave it out")
        return bool(self.compiles if asked is None else asked)

    def recipe(self, precision: Precision | None, compiled: bool) -> Recipe | None:
        """How linear layers compute in FP8; None: they do not.

        Raises:
            InfeasibleError: this framework cannot; says what it has.
        """
        if precision in (None, "bf16"):
            return None
        if not self.recipes:
            raise InfeasibleError(f"precision: {self.name} is predicted in bf16 only")
        first = "nvfp4" if precision == "nvfp4" else next(iter(self.recipes))
        name = first if isinstance(precision, str) else precision["fp8"]
        if name not in self.recipes:
            raise InfeasibleError(f"precision: {self.name} has fp8 {', '.join(self.recipes)}, got {name}")
        if self.compiles is not None and not compiled:
            raise InfeasibleError(f"precision: fp8 of {self.name} is predicted of compiled layers; use compile: true")
        return self.recipes[name]

    def runs(
        self, sizes: Sizes, compiled: bool, recipe: Recipe | None, overlapped: bool, recompute: Recompute = "none"
    ) -> LayerCode:
        """A layer as it runs: in its precision, with its copies, and with communication beside products or not."""
        code = self.layer(replace(sizes, model=replace(sizes.model, bare_layers=0)), compiled)
        code = without_mlp(code) if sizes.model.bare else code
        code = gates_again(code) if compiled and recompute != "none" else code
        code = self.joins(in_fp8(code, sizes.tp, recipe) if recipe else code)
        return self.overlap(code, sizes.tp) if overlapped and self.overlap and sizes.tp > 1 else code

    def keeps(self, recompute: Recompute, layer: LayerCode, sizes: Sizes, compiled: bool) -> frozenset[str]:
        """Tensors of a layer that are kept beside its input."""
        found = self.kept.get(recompute, layer.kept)
        return found(sizes, compiled) if callable(found) else found

    def check(self, parallel: Parallel, model: Model, compiled: bool = False) -> None:
        """Whether this framework can cut a step of that model like this, with layers that are compiled or not.

        Raises:
            InfeasibleError: it cannot; says what it has.
        """
        if (model.experts or model.kv_rank or model.sparse) and not self.experts:
            known = ", ".join(one.name for one in FRAMEWORKS.values() if one.experts)
            what = "experts" if model.experts else "latent attention" if model.kv_rank else "chosen keys"
            raise InfeasibleError(f"model: steps of {self.name} cannot be predicted with {what}; use framework {known}")
        if parallel.sharding not in self.shardings:
            known = ", ".join(self.shardings)
            raise InfeasibleError(f"sharding: {self.name} has {known}, got {parallel.sharding}")
        if not model.gated and not self.experts:
            raise InfeasibleError(f"model: steps of {self.name} are predicted with a gate in the MLP; use megatron")
        if model.recurrent and self.lora:
            raise InfeasibleError("trainable: layers with a state are predicted without adapters; leave it out")
        if model.kv_shared_layers and self.lora:
            raise InfeasibleError("trainable: layers that share keys are predicted without adapters; leave it out")
        known = ", ".join(self.recomputes)
        if parallel.recompute not in self.recomputes:
            raise InfeasibleError(f"recompute: {self.name} has {known}, got {parallel.recompute}")
        if parallel.pp > 1 and not self.pipelines:
            raise InfeasibleError(f"pp: steps of {self.name} are predicted without pipelines, got pp = {parallel.pp}")
        if parallel.tp_overlap and self.overlap is None:
            raise InfeasibleError(f"tp_overlap: {self.name} does not overlap tensor parallelism; leave it out")
        if parallel.tp_overlap and self.compiles is not None and not compiled:
            raise InfeasibleError(f"tp_overlap: {self.name} overlaps in compiled layers only; use compile: true")
        if parallel.cuda_graphs != "none" and not self.graphs:
            known = ", ".join(one.name for one in FRAMEWORKS.values() if one.graphs)
            raise InfeasibleError(f"cuda_graphs: expected framework {known}, got {self.name}; leave it out")
        self._check_chunks(parallel, compiled)
        asked = {"ep_overlap": parallel.ep_overlap, "dispatcher": parallel.dispatcher != "alltoall"}
        for name in (name for name, is_asked in asked.items() if is_asked and not (self.experts and parallel.ep > 1)):
            raise InfeasibleError(
                f"{name}: expected experts that several ranks of megatron share, got {self.name} with "
                f"ep = {parallel.ep}; leave it out"
            )
        if parallel.ep_overlap and parallel.pp > 1 and parallel.virtual_pp == 1:
            raise InfeasibleError("ep_overlap: expected several chunks of layers on each stage; use virtual_pp")
        if parallel.ep_overlap and parallel.recompute not in ("none", "selective"):
            raise InfeasibleError(
                f"ep_overlap: {self.name} exchanges nothing again beside others, so it cannot go with recompute "
                f"{parallel.recompute}; use none"
            )
        if parallel.replicate > 1 and parallel.sharding != "fsdp":
            raise InfeasibleError("replicate: belongs to sharding fsdp; leave it out")

    def _check_chunks(self, parallel: Parallel, compiled: bool) -> None:
        """Whether its MLP can run in chunks."""
        chunks = parallel.mlp_chunks
        if chunks == 1:
            return
        if not self.tiles_mlp or self.lora:
            known = ", ".join(one.name for one in FRAMEWORKS.values() if one.tiles_mlp)
            own = " with adapters" if self.lora else ""
            raise InfeasibleError(
                f"mlp_chunks: expected framework {known} with all weights trained, got {self.name}{own} and {chunks} "
                "chunks; leave it out"
            )
        if compiled:
            raise InfeasibleError(
                f"mlp_chunks: {chunks} chunks run backward within a backward pass, which is not compiled; use compile: "
                "false"
            )
        if parallel.tp > 1:
            raise InfeasibleError(
                f"mlp_chunks: chunks are predicted without tensor parallelism, got tp = {parallel.tp}"
            )

    @property
    def recomputes(self) -> tuple[Recompute, ...]:
        """What it can compute again."""
        return ("none", *(kind for kind in self.kept if kind != "none"))


def node(kind: str, elements: int, *reads: str, **makes: int) -> Node:
    """A memory-bound op over so many elements; names of what it makes have ``_`` for spaces."""
    return Node(ElementwisePass(kind, OP_BYTES[kind.removesuffix(" in place")] * elements), reads, named(makes))


def named(makes: Mapping[str, int]) -> dict[str, int]:
    """Names with spaces."""
    return {name.replace("_", " "): nbytes for name, nbytes in makes.items()}


def renamed(nodes: Nodes, names: Mapping[str, str]) -> Nodes:
    """Ops with other names for some tensors."""
    return tuple(one.renamed(lambda name: names.get(name, name)) for one in nodes)


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
    return weight_gradient_of(name, outer, inner, sizes.tokens, source, kept, each)


def weight_gradient_of(name: str, outer: int, inner: int, tokens: int, source: str, kept: str, each: int) -> Node:
    """Of a linear layer of so many outputs and inputs."""
    made = {f"dw {name}": each * inner * outer} if each else {}
    return Node(Gemm("wgrad", outer, inner, tokens), (source, kept), made)


def sink_gradients(s: Sizes) -> Nodes:
    """What cuDNN takes longer for products of outputs and their gradients where heads have sinks; it reads both."""
    return (Node(ElementwisePass("sink_gradient", 2 * s.out), ("dout", "out")),) if s.model.sinks else ()


@lru_cache(1024)
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
    every = " all" if many else ""

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

    def mlp() -> tuple[Nodes, Nodes, set[str]]:
        """Both passes of one that all tokens pass, from ``h norm`` to ``down`` and from ``dy`` to ``dh norm``, and what
        is kept."""
        forward = (
            *column("gate_up", "h norm", "gate up"),
            Node(ElementwisePass(*_gates(s, "")), ("gate up",), {"swiglu": s.inner}),
            *row("down", "swiglu", "down"),
        )
        backward = (
            *row_backward("down", "dy", "swiglu", "dswiglu"),
            Node(ElementwisePass(*_gates(s, "_bwd")), ("dswiglu", "gate up"), {"dgate up": s.wide("gate_up")}),
            *column_backward("gate_up", "dgate up", "h norm", "dh norm"),
        )
        return forward, backward, {"gate up", "swiglu"}

    def mixture(routed: Experts) -> tuple[Nodes, Nodes, set[str]]:
        """The same of routed experts, and of shared ones after them where there are any."""
        if not s.model.shared_experts:
            forward, backward = (
                renamed(side, {"routed": "down", "dh routed": "dh norm"})
                for side in (routed.forward(), routed.backward())
            )
            return forward, backward, set(routed.kept())
        own, own_back, kept = mlp()
        own, own_back = (
            renamed(
                side,
                {"down": "shared", "down all": "shared all", "dh norm": "dh shared", "dh norm all": "dh shared all"},
            )
            for side in (own, own_back)
        )
        forward = (*routed.forward(), *own, node("add", hidden, "shared", "routed", down=s.shard))
        sums = node("add", hidden, "dh routed", "dh shared", dh_norm=s.shard)
        return forward, (*own_back, *routed.backward(), sums), kept | routed.kept()

    def projected() -> tuple[Nodes, Nodes, set[str]]:
        """Both passes from ``x norm`` to ``q k v`` and from ``dq k v`` to ``dx norm``, and what is kept."""
        own = s.model.heads + s.model.kv_heads * (not s.borrowed)
        heads = s.tokens * own // s.tp * s.model.head_dim
        forward = (*column("qkv", "x norm", "qkv"), node("rotary", heads, "qkv", q_k_v=s.qkv))
        backward = (node("rotary", heads, "dq k v", dqkv=s.qkv), *column_backward("qkv", "dqkv", "x norm", "dx norm"))
        return forward, (*summed_keys(s, "dk dv"), *backward), set()

    def attended() -> tuple[Nodes, Nodes, set[str], str]:
        """Both passes from ``x norm`` to what the projection reads and from its gradient to ``dx norm``, what is kept,
        and what the projection reads."""
        if s.model.absorbed:
            return absorbed(s, gradient)
        before, before_back, kept = latent(s, gradient) if s.model.kv_rank else projected()
        forward = (*before, Node("fwd", ("q k v",), {"out": s.out, "lse": s.lse}))
        sums = {"dq k v": s.qkv, "dq sums": FP32 // BF16 * s.queries, **({"dk dv": s.borrowed} if s.borrowed else {})}
        back = Node("bwd", ("dout", "q k v", "out", "lse"), sums)
        return forward, (*sink_gradients(s), back, *before_back), kept, "out"

    def scanned() -> tuple[Nodes, Nodes, set[str], str]:
        """The same of a layer with a state."""
        inside, inside_back, kept = with_state(s, gradient)
        forward = (*column("qkv", "x norm", "projected"), *inside)
        return forward, (*inside_back, *column_backward("qkv", "dprojected", "x norm", "dx norm")), kept, "normed"

    over, over_back, kept_over = mlp() if s.experts is None else mixture(s.experts)
    before, before_back, kept_before, out = scanned() if s.model.recurrent else attended()
    return LayerCode(
        forward=(
            node("rms_norm", hidden, "x", x_norm=s.shard),
            *before,
            *row("proj", out, "proj"),
            node("add", hidden, "x", "proj", h=s.shard),
            node("rms_norm", hidden, "h", h_norm=s.shard),
            *over,
            node("add", hidden, "h", "down", y=s.shard),
        ),
        backward=(
            *over_back,
            node("rms_norm_bwd", hidden, "dh norm", "h", dh_part=s.shard),
            node("add", hidden, "dy", "dh part", dh=s.shard),
            *row_backward("proj", "dh", out, f"d{out}"),
            *before_back,
            node("rms_norm_bwd", hidden, "dx norm", "x", dx_part=s.shard),
            node("add", hidden, "dh", "dx part", dx=s.shard),
        ),
        kept=frozenset({"x norm", "q k v", "out", "lse", "h", "h norm", *kept_before, *kept_over}),
    )


def summed_keys(s: Sizes, *gradients: str) -> Nodes:
    """Gradients of keys and values that another layer made, added to those of the layers before."""
    return (node("add", s.borrowed // BF16, *gradients),) if s.borrowed else ()


def with_state(s: Sizes, gradient: int = 0) -> tuple[Nodes, Nodes, set[str]]:
    """Both passes of convolution, scan and gated norm, from ``projected`` to ``normed`` and from ``dnormed`` to
    ``dprojected``, and what is kept: inputs of each, and what the scan saves.

    All three are one op in time, see ``cpsim.prediction.step.recurrent``. Where decays and gates are expanded by linear
    layers, these are ops before it, whose results are kept.
    """
    assert s.model.recurrent is not None
    saved = saved_bytes(s.model.recurrent, s.tokens) // s.tp
    states = states_bytes(s.model.recurrent, s.tokens) // s.tp
    wide = tuple(s.model.recurrent.expanded)
    sizes = {name: s.wide(name) for name in wide}
    forward = (
        Node(None, ("projected",), {"q k v": s.qkv, "low": 0}),
        *(forward_product(s, name, "low", name) for name in wide),
        Node("fwd", ("q k v", "projected", *wide), {"out": s.out, "lse": saved, "states": states}),
        Node(None, ("out", "projected"), {"normed": s.out}),
    )
    more = {f"d{name}": size for name, size in sizes.items()}
    backward = (
        Node(None, ("dnormed", "out", "projected"), {"dout": s.out, "dgates": s.out}),
        Node("bwd", ("dout", "q k v", "projected", "lse", *wide), {"dq k v": s.qkv, "dstates": 2 * states, **more}),
        *(
            one
            for name in wide
            for one in (
                input_gradient(s, name, f"d{name}", f"dlow of {name}"),
                weight_gradient(s, name, f"d{name}", "low", gradient),
            )
        ),
        Node(
            None,
            ("dq k v", "dgates", "projected", *(f"dlow of {name}" for name in wide)),
            {"dprojected": s.wide("qkv")},
        ),
    )
    return forward, backward, {"projected", "q k v", "low", "out", "lse", "normed", *wide}


def without_mlp(code: LayerCode) -> LayerCode:
    """A layer that ends behind the sum of its input and what its first part makes of it."""
    ends = next(i for i, each in enumerate(code.forward) if "h" in each.makes) + 1
    begins = next(i for i, each in enumerate(code.backward) if "dh" in each.makes) + 1
    forward, backward = renamed(code.forward[:ends], {"h": "y"}), renamed(code.backward[begins:], {"dh": "dy"})
    made = {name for each in forward for name in each.makes}
    return LayerCode(forward=forward, backward=backward, kept=code.kept & made)


def latent(s: Sizes, gradient: int = 0) -> tuple[Nodes, Nodes, set[str]]:
    """Both passes of multi-head latent attention before its kernel, from ``x norm`` to ``q k v`` and from ``dq k v`` to
    ``dx norm``, and what is kept.

    Latents are made of a rank's shard of the tokens, gathered, and expanded to the rank's heads. One kernel turns
    positions of queries in place, another one makes keys and values contiguous.

    Reference: Megatron-Core 0.15, transformer/multi_latent_attention.py (MLASelfAttention, with apply_rope_fusion).
    """
    model, shard, heads = s.model, s.tokens // s.tp, s.tokens * s.model.heads // s.tp
    every = " all" if s.tp > 1 else ""
    keys, keys_back, from_keys = made_latent(s, "kv", model.kv_rank, gradient)
    queries, queries_back, from_queries = (
        made_latent(s, "q", model.q_rank, gradient) if model.q_rank else ((), (), "x norm")
    )
    widths = model.head_dim - model.rope_dim + model.values, model.head_dim + model.values
    turned = ElementwisePass("copy", BF16 * heads * (2 * model.rope_dim + sum(widths)))
    to_x = ("dx q", "dx kv") if model.q_rank else ("dq x", "dx kv")
    forward = (
        *queries,
        forward_product(s, "q_up", from_queries, "q"),
        *keys,
        forward_product(s, "kv_up", from_keys, "k v"),
        Node(turned, ("q", "k v", "kv latent"), {"q k v": s.qkv}, calls=2),
    )
    backward = (
        Node(turned, ("dq k v",), {"dq": s.queries, "dk v": s.wide("kv_up")}, calls=2),
        input_gradient(s, "kv_up", "dk v", f"dkv latent norm{every}"),
        weight_gradient(s, "kv_up", "dk v", from_keys, gradient),
        *keys_back,
        input_gradient(s, "q_up", "dq", f"dq latent norm{every}" if model.q_rank else "dq x"),
        weight_gradient(s, "q_up", "dq", from_queries, gradient),
        *queries_back,
        node("add", shard * model.hidden, *to_x, dx_norm=s.shard),
    )
    kept = {"kv latent", from_keys} | ({"q latent", from_queries} if model.q_rank else set())
    return forward, backward, kept


def made_latent(s: Sizes, name: str, width: int, gradient: int) -> tuple[Nodes, Nodes, str]:
    """A latent of so many elements with a norm over all of them, forward and backward; and what is expanded."""
    many, shard = s.tp > 1, s.tokens // s.tp
    inner, outer = s.model.linears(s.tp)[f"{name}_down"]
    raw, normed = f"{name} latent", f"{name} latent norm"
    whole = BF16 * s.tokens * outer
    forward = (
        Node(Gemm("forward", shard, outer, inner), ("x norm", "weights"), {raw: BF16 * shard * outer}),
        node("rms_norm", shard * width, raw, **{f"{name}_latent_norm": BF16 * shard * width}),
        *((Node(Collective("all_gather", whole), (normed,), {f"{normed} all": whole}, "comm"),) if many else ()),
    )
    scattered = (Node(Collective("reduce_scatter", whole), (f"d{normed} all",), {f"d{normed}": whole}, "comm"),)
    backward = (
        *(scattered if many else ()),
        node("rms_norm_bwd", shard * width, f"d{normed}", raw, **{f"d{name}_latent": BF16 * shard * outer}),
        Node(Gemm("dgrad", shard, inner, outer), (f"d{raw}", "weights"), {f"dx {name}": s.shard}),
        weight_gradient_of(f"{name}_down", outer, inner, shard, f"d{raw}", "x norm", gradient),
    )
    return forward, backward, normed + (" all" if many else "")


def indexed(s: Sizes, from_queries: str) -> Nodes:
    """Queries, key and weights of heads of an indexer, forward alone: its own loss is not predicted.

    Every tensor-parallel rank has all of its heads, as all heads of attention take the same keys; keys and weights are
    made of a rank's shard of the tokens and gathered. One kernel turns positions, rotates and quantizes.

    Source: deepseek-ai/DeepSeek-V3.2-Exp, inference/model.py (Indexer); Megatron-Core 0.16, transformer/
    experimental_attention_variant/dsa.py (DSAIndexer).
    """
    linears, shard = s.model.indexer(), s.tokens // s.tp
    (rank, wide), (hidden, key), (_, heads) = (linears[name] for name in ("index_q", "index_k", "index_w"))
    every, whole = " all" if s.tp > 1 else "", BF16 * s.tokens * (key + heads)
    gathered_keys = Node(Collective("all_gather", whole), ("index keys",), {"index keys all": whole}, "comm")
    return (
        Node(Gemm("forward", s.tokens, wide, rank), (from_queries, "weights"), {"index q": BF16 * s.tokens * wide}),
        Node(Gemm("forward", shard, key, hidden), ("x norm", "weights"), {"index keys": whole // s.tp}),
        Node(Gemm("forward", shard, heads, hidden), ("x norm", "weights"), {"index keys": whole // s.tp}),
        *((gathered_keys,) if every else ()),
        Node(
            ElementwisePass("copy", 2 * BF16 * s.tokens * (wide + key)),
            ("index q", f"index keys{every}"),
            {"indexed": BF16 * s.tokens * wide + whole},
            calls=2,
        ),
    )


def absorbed(s: Sizes, gradient: int = 0) -> tuple[Nodes, Nodes, set[str], str]:
    """Both passes of latent attention whose kernel sees latents, from ``x norm`` to ``out`` and from ``dout`` to ``dx
    norm``; what is kept; and what the projection reads.

    What would expand latents to keys is multiplied into queries, and what would expand them to values into outputs, one
    product for each head. An indexer has chosen keys before.

    Reference: DeepSeek-V3.2 (2512.02556), section 2.1 (DSA in the MQA mode of MLA).
    """
    model, shard = s.model, s.tokens // s.tp
    every, heads = " all" if s.tp > 1 else "", model.heads // s.tp
    keys, keys_back, from_keys = made_latent(s, "kv", model.kv_rank, gradient)
    queries, queries_back, from_queries = (
        made_latent(s, "q", model.q_rank, gradient) if model.q_rank else ((), (), "x norm")
    )
    rank, plain, rows = model.kv_rank, model.head_dim - model.rope_dim, s.tokens * heads
    latent_out, turned = BF16 * rows * rank, ElementwisePass("copy", 2 * s.qkv)
    to_x = ("dx q", "dx kv") if model.q_rank else ("dq x", "dx kv")

    def of_heads(outer: int, inner: int, source: str, kept: str, name: str) -> Node:
        """Gradients of what all heads have of ``kv_up`` for keys, or for values."""
        made = {f"dw {name}": gradient * heads * outer * inner} if gradient else {}
        return Node(Gemm("wgrad", heads * outer, inner, s.tokens), (source, kept), made)

    forward = (
        *queries,
        forward_product(s, "q_up", from_queries, "q"),
        *keys,
        Node(Gemm("forward", rows, rank, plain), ("q", "weights"), {"q of latents": BF16 * rows * rank}),
        Node(turned, ("q", "q of latents", "kv latent", from_keys), {"q k v": s.qkv}, calls=2),
        *indexed(s, from_queries),
        Node("fwd", ("q k v", "indexed"), {"out of latents": latent_out, "lse": s.lse}),
        Node(Gemm("forward", rows, model.values, rank), ("out of latents", "weights"), {"out": s.out}),
    )
    backward = (
        Node(Gemm("dgrad", rows, rank, model.values), ("dout", "weights"), {"dout of latents": latent_out}),
        of_heads(model.values, rank, "dout", "out of latents", "values of kv_up"),
        Node("bwd", ("dout of latents", "q k v", "out of latents", "lse"), {"dq k v": s.qkv}),
        Node(turned, ("dq k v",), {"dq of latents": BF16 * rows * rank, f"dkv latent norm{every}": s.latents}, calls=2),
        Node(Gemm("dgrad", rows, plain, rank), ("dq of latents", "dq k v", "weights"), {"dq": s.queries}),
        of_heads(rank, plain, "dq of latents", "q", "keys of kv_up"),
        *keys_back,
        input_gradient(s, "q_up", "dq", f"dq latent norm{every}" if model.q_rank else "dq x"),
        weight_gradient(s, "q_up", "dq", from_queries, gradient),
        *queries_back,
        node("add", shard * model.hidden, *to_x, dx_norm=s.shard),
    )
    kept = {"kv latent", "q", "out of latents"} | ({"q latent", from_queries} if model.q_rank else set())
    return forward, backward, kept, "out"


BOTH_HALVES: Final = 3 * 2 * BF16 + 2 * BF16
"""Bytes per element of SwiGLU's output that its backward kernel moves: it makes the gradients of gate and up as one
tensor, and reads all three inputs for an element of either."""


def _gates(s: Sizes, pass_: str) -> tuple[str, int]:
    """Kernel and bytes of the activation, which torch.compile makes of a concatenated gate and up.

    Source: Megatron-Core 0.16, fusions/fused_bias_swiglu.py (swiglu, swiglu_back) with jit.py.
    """
    elements, kind = s.inner // BF16, f"swiglu{pass_}"
    if not s.model.gated:
        return f"rms_norm{pass_}", OP_BYTES[f"rms_norm{pass_}"] * elements  # as many bytes
    return f"{kind} in place", (BOTH_HALVES if pass_ else OP_BYTES[kind]) * elements


EMBEDDING_SUM: Final = "sum of embedding gradients"


def megatron_first(s: Sizes, _compiled: bool) -> LayerCode:
    """Embedding: rows of this rank's words, summed over the ranks; its gradient is added to a buffer in fp32."""
    code, added = embedded(s), (BF16 + 2 * FP32) * s.words * s.model.hidden
    return replace(code, backward=(*code.backward, Node(ElementwisePass("copy", added), ("dy",), {EMBEDDING_SUM: 0})))


def embedded(s: Sizes) -> LayerCode:
    """Rows of this rank's words, summed over the ranks, and the gradient of all its words."""
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


def megatron_last(s: Sizes, _compiled: bool, _chunks: int = 1) -> LayerCode:
    """Norm, logits of this rank's words, and vocabulary-parallel cross entropy in fp32 by five compiled kernels.

    The first casts logits and finds the largest; the second takes that away in place and makes exponentials and their
    sums; the third divides these. Backward one takes 1 away where the target is, in a copy, and one scales that and
    casts it. Whoever calls the loss still holds the logits.

    Source: Megatron-Core 0.16, fusions/fused_cross_entropy.py (cross_entropy_fusion_impl native) and
    tensor_parallel/cross_entropy.py.
    """
    many, hidden, logits = s.tp > 1, s.tokens // s.tp * s.model.hidden, s.tokens * s.words
    every = " all" if many else ""

    def kernel(each: int, *reads: str, **makes: int) -> Node:
        return Node(ElementwisePass("copy", each * logits), reads, named(makes))

    def of_all(name: str, nbytes: int) -> Nodes:
        return (Node(Collective("all_reduce", nbytes), (name,), {f"{name} all": nbytes}, "comm"),) if many else ()

    return LayerCode(
        forward=(
            node("rms_norm", hidden, "x", z=s.shard),
            *(gathered(s, "z", "z all") if many else ()),
            Node(
                Gemm("forward", s.tokens, s.words, s.model.hidden), ("z" + every, "weights"), {"logits": BF16 * logits}
            ),
            kernel(BF16 + FP32, "logits", logits_fp32=FP32 * logits, logits_largest=FP32 * s.tokens),
            *of_all("logits largest", FP32 * s.tokens),
            kernel(4 * FP32, "logits", "logits fp32", exp_logits=FP32 * logits, logits_sums=2 * FP32 * s.tokens),
            *of_all("logits sums", 2 * FP32 * s.tokens),
            kernel(2 * FP32, "logits", "logits fp32", "exp logits", "logits sums" + every, losses=FP32 * s.tokens),
        ),
        backward=(
            kernel(2 * FP32, "exp logits", logits_less_targets=FP32 * logits),
            kernel(2 * FP32 + BF16, "exp logits", "logits less targets", dlogits=BF16 * logits),
            *(gathered(s, "z", "z again") if many else ()),
            Node(Gemm("dgrad", s.tokens, s.model.hidden, s.words), ("dlogits", "weights"), {"dz" + every: s.whole}),
            *(scattered(s, "dz all", "dz") if many else ()),
            Node(Gemm("wgrad", s.words, s.model.hidden, s.tokens), ("dlogits", "z again" if many else "z")),
            node("rms_norm_bwd", hidden, "dz", "x", dx=s.shard),
        ),
        kept=frozenset({"z", "exp logits"}),
    )


def unfused_last(s: Sizes, compiled: bool, chunks: int = 1) -> LayerCode:
    """The same op by op, most of them in place, on one copy of the logits in fp32.

    Source: Megatron-Core 0.16, tensor_parallel/cross_entropy.py.
    """
    logits, held = s.tokens * s.words, "logits fp32"
    largest, sums = {"logits_fp32": FP32 * logits, "logits_largest": FP32 * s.tokens}, 2 * FP32 * s.tokens
    by_name = {
        held: eager(logits, BF16 + 2 * FP32, 2, "logits", **largest),
        "exp logits": eager(logits, 5 * FP32, 6, "logits", held, logits_sums=sums),
        "losses": eager(
            logits, 2 * FP32, 4, "logits", held, "logits sums" + " all" * (s.tp > 1), losses=FP32 * s.tokens
        ),
        "dlogits": eager(logits, 3 * FP32 + BF16, 6, held, dlogits=BF16 * logits),
    }
    return _with_loss(megatron_last(s, compiled, chunks), by_name, frozenset({"z", held}))


def fused_last(s: Sizes, compiled: bool, chunks: int = 1) -> LayerCode:
    """The same by Transformer Engine: one kernel reads logits for the maximum and the sum, and again to write gradients
    over them in bf16; the backward pass multiplies these by the gradient of the loss.

    Source: NVIDIA/TransformerEngine, transformer_engine/common/triton/cross_entropy.py.
    """
    logits, made = s.tokens * s.words, {"logits largest": FP32 * s.tokens, "logits sums": 2 * FP32 * s.tokens}
    by_name = {
        "logits fp32": eager(logits, 3 * BF16, 1, "logits", **made, losses=FP32 * s.tokens),
        "dlogits": eager(logits, 2 * BF16, 1, "logits", dlogits=0),
    }
    code = _with_loss(megatron_last(s, compiled, chunks), by_name, frozenset({"z", "logits"}))

    def over(node: Node) -> Node:
        return replace(node, reads=tuple("logits" if name == "dlogits" else name for name in node.reads))

    return replace(code, backward=tuple(map(over, code.backward)))


def _with_loss(code: LayerCode, by_name: Mapping[str, Node], kept: frozenset[str]) -> LayerCode:
    """The end of a model with other kernels of the cross entropy, by what those of ``code`` make."""

    def instead(node: Node) -> Nodes:
        mine = next((name for name in LOSS_KERNELS if name in node.makes), None)
        found = node if mine is None else by_name.get(mine)
        return (found,) if found else ()

    forward, backward = (tuple(one for node in side for one in instead(node)) for side in (code.forward, code.backward))
    return LayerCode(forward=forward, backward=backward, kept=kept)


LOSS_KERNELS: Final = ("logits fp32", "exp logits", "losses", "logits less targets", "dlogits")
"""What kernels of Megatron's cross entropy make, by which they are known."""
TRANSFORMER_ENGINE: Final = {
    "zigzag_ring": Support(masks=DENSE + DOCUMENTS, chunks=2, knobs={"zigzag": ("document",)}),
    "ulysses": Support(masks=DENSE, chunks=2, knobs={"head_groups": (1,)}, whole_heads=True, sinks=("cudnn",)),
    "allgather": Support(masks=DENSE, chunks=2, knobs={"layout": ("zigzag",)}),
    "usp": Support(masks=DENSE, chunks=2, knobs={"placement": ("head_first",)}, whole_heads=True),
}
"""Strategies of Transformer Engine 2.4 by Megatron's ``cp_comm_type``: p2p, a2a, all_gather, a2a+p2p. Sinks run
with a2a (``softmax_type``, from version 2.8 on)."""
CONTEXT_PARALLEL: Final = {
    "zigzag_ring": Support(masks=("causal",), chunks=2),
    "allgather": Support(masks=("causal",), chunks=2, knobs={"layout": ("zigzag",)}),
}
"""Strategies of PyTorch's ``context_parallel`` by its rotation, with load balancing."""
_NCCL: Final = {"comm": "all_gather_tensor", "gather": "async_all_gather", "scatter": "sync_reduce_scatter"}
LAUNCHES: Final = {False: {"compute": "eager", **_NCCL}, True: {"compute": "copy", **_NCCL}}
"""Host measurements of launches: PyTorch's dispatcher, in the backward pass on autograd's thread; a Triton kernel from
Python."""
ADAM_AND_COPY: Final = 7 * FP32 + FP32 + BF16
"""Bytes per parameter of an fp32 AdamW, which reads four tensors and writes three, and of the copy to bf16 weights
(megatron/core/optimizer/optimizer.py)."""
MEGATRON: Final = Framework(
    name="megatron",
    source="Megatron-Core 0.16 with Transformer Engine 2.13",
    sharding="zero1",
    shardings=("none", "zero1"),
    layer=megatron_layer,
    first=megatron_first,
    last=megatron_last,
    losses={"none": unfused_last, "native": megatron_last, "te": fused_last},
    held=lambda _sharding: Held(
        weight=BF16, gradient=FP32, states=3 * FP32, optimizer=ADAM_AND_COPY, clipped=True, cleared=FP32
    ),
    kept={
        "mlp": frozenset({"x norm", "projected", "q k v", "low", "decay", "norm_gate", "out", "out of latents"})
        | {"lse", "normed", "h"},
        "full": frozenset(),
    },
    again_to={"mlp": frozenset({"down"}), "full": frozenset({"y"})},
    exchange="heads",
    overlap=userbuffers,
    recipes=ENGINE_RECIPES,
    pipelines=True,
    offers=TRANSFORMER_ENGINE,
    kernels=("cudnn", "fa3", "fa2"),
    kernels_apart=("cudnn", "fa3", "fa2"),
    offloads="none",
    engine=True,
    experts=True,
    graphs=True,
    launches={False: LAUNCHES[False]},
    host="megatron",
)


def eager(elements: int, each: int, calls: int, *reads: str, **makes: int) -> Node:
    """Some of PyTorch's pointwise kernels over so many elements, which read and write so many bytes of each."""
    return Node(ElementwisePass("copy", each * elements), reads, named(makes), calls=calls)


def torch_layer(
    s: Sizes, compiled: bool, *, norm: Callable[..., Nodes] | None = None, unfused: bool = False
) -> LayerCode:
    """A plain layer in PyTorch: seven linear layers, RMSNorm, rotary positions, SDPA and SwiGLU.

    Compiled, pointwise ops are fused, with what autograd's partitioner keeps: inputs of matrix products, and what
    kernels of attention and norms read. Eager, every op is a kernel. Tensor parallelism is DTensor's, with sequence
    parallelism: what was gathered is kept, and nothing runs beside communication.

    Args:
        s: sizes.
        compiled: whether layers are.
        norm: a norm of its own.
        unfused: whether rotary positions are complex numbers, of which Inductor makes no kernels, and keys and values
            are copied to all heads.
    """
    many, model, tokens = s.tp > 1, s.model, s.tokens
    hidden, inner = tokens // s.tp * model.hidden, s.inner // BF16
    q, kv = (tokens * heads // s.tp * model.head_dim for heads in (model.heads, model.kv_heads))
    every = " all" if many else ""
    norm_of = norm or (
        lambda source, to: (node(f"rms_norm{fused}", hidden, source, **{to.replace(" ", "_"): s.shard}),)
    )

    def product(n: int, k: int, source: str, to: str) -> Node:
        return Node(Gemm("forward", tokens, n, k), (source, "weights"), {to: BF16 * tokens * n})

    def back(n: int, k: int, source: str, kept: str, to: str, weight: str) -> Nodes:
        """Gradients of the input and of the weights of a linear layer."""
        dgrad = Node(Gemm("dgrad", tokens, k, n), (source, "weights"), {to: BF16 * tokens * k})
        return (dgrad, Node(Gemm("wgrad", n, k, tokens), (source, kept), {f"{GRADIENT} {weight}": BF16 * n * k}))

    def gather(source: str) -> Nodes:
        return gathered(s, source, f"{source} all") if many else ()

    def scatter(to: str) -> Nodes:
        return scattered(s, f"{to} all", to) if many else ()

    def rotary(kind: str, elements: int, source: str, to: str) -> Node:
        made = {to: BF16 * elements}
        if compiled and not unfused:
            return Node(ElementwisePass("rotary in place", OP_BYTES["rotary"] * elements), (source,), made)
        return Node(ElementwisePass("strided", 20 * elements), (source,), made, calls=5 if kind == "fwd" else 7)

    a, g, f, h = q // tokens, kv // tokens, inner // tokens, model.hidden
    join = partial(node, "add", hidden)
    fused = " in place" if compiled else ""  # Triton's kernels over contiguous rows
    if compiled:
        gates: Nodes = (node("swiglu in place", inner, "gate", "up", product=s.inner),)
        gates_back: Nodes = (node("swiglu_bwd in place", inner, "dproduct", "gate", "up", dgate=s.inner, dup=s.inner),)
    else:
        gates = (
            eager(inner, 4, 1, "gate", silu=s.inner),
            eager(inner, 6, 1, "silu", "up", product=s.inner),
        )
        gates_back = (
            eager(inner, 6, 1, "dproduct", "up", dsilu=s.inner),
            eager(inner, 6, 1, "dproduct", "silu", "up", dup=s.inner),  # autograd holds both until both are done
            eager(inner, 6, 1, "dsilu", "gate", dgate=s.inner),
        )
    grads = {"dq": BF16 * q, "dk": BF16 * kv, "dv": BF16 * kv, "dq sums": FP32 * q}
    grads |= {"dk dv of heads": 2 * BF16 * q} if kv < q else {}
    keys, values = ("keys", "values") if unfused and kv < q else ("k", "v")
    copies = tuple(
        Node(ElementwisePass("copy", BF16 * (kv + q)), (few,), {every_head: BF16 * q})
        for few, every_head in (("k", keys), ("v", values))
        if few != every_head
    )
    sum_of_two = () if compiled else (eager(tokens * h, 6, 1, "dh norm 2", **{"dh_norm" + every.replace(" ", "_"): 0}),)
    if model.recurrent:
        wide, a = model.linears(s.tp)["qkv"][1], model.linears(s.tp)["proj"][0]
        inside, inside_back, _ = with_state(s, BF16)
        out, sums_of_x = "normed", tuple[str, ...]()
        mixed: Nodes = (product(wide, h, "x norm" + every, "projected"), *inside)
        mixed_back: Nodes = (
            *inside_back,
            *back(wide, h, "dprojected", "x norm" + every, "dx norm" + every, "projected"),
        )
    else:
        own = not s.borrowed
        out, sums_of_x = "out", ("dx norm 2", "dx norm 3") if own else ()
        mixed = (
            product(a, h, "x norm" + every, "q0"),
            *(product(g, h, "x norm" + every, to) for to in ("k0", "v") if own),
            rotary("fwd", q, "q0", "q"),
            *((rotary("fwd", kv, "k0", "k"),) if own else ()),
            *copies,
            Node("fwd", ("q", keys, values), {"out": s.out, "lse": s.lse}),
        )
        of_keys = (
            *back(g, h, "dk0", "x norm" + every, "dx norm 2", "k"),
            *back(g, h, "dv", "x norm" + every, "dx norm 3", "v"),
            *(() if compiled else (eager(tokens * h, 12, 2, *sums_of_x),)),
        )
        mixed_back = (
            Node("bwd", ("dout", "q", keys, values, "out", "lse"), grads),
            rotary("bwd", q, "dq", "dq0"),
            *((rotary("bwd", kv, "dk", "dk0"),) if own else summed_keys(s, "dk", "dv")),
            *back(a, h, "dq0", "x norm" + every, "dx norm" + every, "q"),
            *(of_keys if own else ()),
        )
    forward = (
        *norm_of("x", "x norm"),
        *gather("x norm"),
        *mixed,
        product(h, a, out, "proj" + every),
        *scatter("proj"),
        join("x", "proj", h=s.shard),
        *norm_of("h", "h norm"),
        *gather("h norm"),
        product(f, h, "h norm" + every, "gate"),
        product(f, h, "h norm" + every, "up"),
        *gates,
        product(h, f, "product", "down" + every),
        *scatter("down"),
        join("h", "down", y=s.shard),
    )
    backward = (
        *gather("dy"),
        *back(h, f, "dy" + every, "product", "dproduct", "down"),
        *gates_back,
        *back(f, h, "dgate", "h norm" + every, "dh norm" + every, "gate"),
        *back(f, h, "dup", "h norm" + every, "dh norm 2", "up"),
        *sum_of_two,
        *scatter("dh norm"),
        *norm_back(s, "dh norm", "h", "dh part", compiled, norm is not None, "dh norm 2"),
        join("dy", "dh part", dh=s.shard),
        *gather("dh"),
        *back(h, a, "dh" + every, out, f"d{out}", "proj"),
        *mixed_back,
        *scatter("dx norm"),
        *norm_back(s, "dx norm", "x", "dx part", compiled, norm is not None, *sums_of_x),
        join("dh", "dx part", dx=s.shard),
    )
    made = {name for each in forward for name in each.makes}
    read = {name for each in backward for name in each.reads}
    return LayerCode(forward=forward, backward=backward, kept=frozenset(made & read))


def gates_again(code: LayerCode) -> LayerCode:
    """With SwiGLU's output, where it is computed again, made beside the gradients of gate and up, as Inductor fuses
    what reads the same: its weights' gradient follows.

    Source: the code that torch.compile of PyTorch 2.11 to 2.13 writes for a checkpointed layer.
    """
    late = [node for node in code.backward if "product" in node.reads]
    rest = [node for node in code.backward if "product" not in node.reads]
    after = 1 + max((i for i, node in enumerate(rest) if "dgate" in node.makes), default=-1)
    return replace(code, backward=(*rest[:after], *late, *rest[after:])) if after else code


def norm_back(s: Sizes, source: str, kept: str, to: str, compiled: bool, cast: bool, *sums: str) -> Nodes:
    """Gradient of a norm; of one in fp32 by single ops, ``cast``."""
    hidden = s.tokens // s.tp * s.model.hidden
    reads = (source, *(sums if compiled else ()))
    if not cast:
        kind = "rms_norm_bwd in place" if compiled else "rms_norm_bwd"
        return (node(kind, hidden, *reads, kept, **{to.replace(" ", "_"): s.shard}),)
    made = {to.replace(" ", "_"): s.shard, f"{to}_fp32".replace(" ", "_"): 3 * FP32 * hidden}
    return (eager(hidden, 70, 14, *reads, f"{kept} fp32", f"{kept} cast", **made),)


def hugging_face_layer(s: Sizes, compiled: bool) -> LayerCode:
    """Transformers' Llama layer: as PyTorch's, but norms are computed in fp32 by single ops, which keep their input in
    fp32, and what it is before the weights of the norm."""
    return torch_layer(s, compiled, norm=None if compiled else partial(norm_by_ops, s))


def norm_by_ops(s: Sizes, source: str, to: str) -> Nodes:
    """RMSNorm in fp32: a cast, a square, its mean, two small ops, a product, a cast back, and the product with the
    weights."""
    hidden = s.tokens // s.tp * s.model.hidden
    made = {f"{source} fp32": FP32 * hidden, f"{source} cast": BF16 * hidden, to: s.shard}
    return (Node(ElementwisePass("copy", 36 * hidden), (source,), made, calls=7),)


def torchtitan_layer(s: Sizes, compiled: bool) -> LayerCode:
    """torchtitan's Llama layer: norms as Transformers', complex rotary positions, keys and values of all heads.

    Source: pytorch/torchtitan@9dec370, torchtitan/models/norms.py (RMSNorm) and llama/model.py (apply_rotary_emb,
    repeat_kv); pytorch/torchtitan issue 15 on what Inductor makes of complex numbers.
    """
    return torch_layer(s, compiled, norm=None if compiled else partial(norm_by_ops, s), unfused=True)


def chunked(code: LayerCode) -> LayerCode:
    """With the copies of collectives along tokens, which are the second dimension of hidden states: what was gathered
    is put together from chunks, and what is scattered is cut into chunks before.

    Source: PyTorch 2.6, torch/distributed/_functional_collectives.py (all_gather_tensor, reduce_scatter_tensor);
    layouts Shard(1) of pytorch/torchtitan@9dec370, torchtitan/parallelisms/parallelize_llama.py. PyTorch of 2026 needs
    none where gathered hidden states are of one sequence.
    """

    def copies(nodes: Nodes) -> Nodes:
        return tuple(one for node in nodes for one in _with_chunks(node))

    return replace(code, forward=copies(code.forward), backward=copies(code.backward))


def _with_chunks(node: Node) -> Nodes:
    """An op, and the copy of its chunks where it is a collective of hidden states."""
    if not isinstance(node.what, Collective) or node.what.kind == "all_reduce":
        return (node,)
    whole = node.what.nbytes
    if node.what.kind == "all_gather":
        (name,) = node.makes
        copy = Node(ElementwisePass("copy", 2 * whole), (f"{name} chunks",), {name: whole})
        return (replace(node, makes={f"{name} chunks": whole}), copy)
    (source,) = node.reads
    copy = Node(ElementwisePass("copy", 2 * whole), (source,), {f"{source} chunks": whole})
    return (copy, replace(node, reads=(f"{source} chunks",)))


def torch_first(s: Sizes, _compiled: bool) -> LayerCode:
    """Embedding; with tensor parallelism its rows are cut by words, and sums are scattered."""
    code = embedded(s)
    *talks, back = code.backward
    made = {f"{GRADIENT} embedding": BF16 * s.words * s.model.hidden}
    return replace(code, backward=(*talks, replace(back, makes=made)))


def torch_last(s: Sizes, compiled: bool, chunks: int = 1) -> LayerCode:
    """Norm, logits, cross entropy in fp32; compiled, from logits in the working type, without tensor parallelism.

    PyTorch's softmax reads a row three times, and its gradient twice (aten/src/ATen/native/cuda/SoftMax.cu).

    In chunks, logits are there of one at a time, and are made again in the backward pass.
    """
    many, model = s.tp > 1, s.model
    hidden, logits = s.tokens // s.tp * model.hidden, s.tokens * s.words
    fused, every, held = compiled and not many, " all" if many else "", logits // chunks
    head = Node(Gemm("forward", s.tokens, s.words, model.hidden), ("z" + every, "weights"), {"logits": BF16 * held})
    kept: dict[str, int] = {"logits_losses": FP32 * s.tokens} if fused else {"log_logits": FP32 * held}
    if fused:
        loss: Nodes = (eager(logits, 4, 1, "logits", **kept),)  # logits are read twice
        loss_back: Nodes = (eager(logits, 4, 1, "logits", "logits losses", dlogits=BF16 * held),)
    elif many:  # the loss of DTensor, op by op
        loss = (eager(logits, 6, 1, "logits", logits_fp32=FP32 * held), eager(logits, 32, 5, "logits fp32", **kept))
        loss_back = (
            eager(logits, 20, 3, dlog_logits=FP32 * held),
            eager(logits, 8, 1, "log logits", exp_logits=FP32 * held),
            eager(logits, 24, 2, "dlog logits", "exp logits", "log logits", dlogits_fp32=FP32 * held),
            eager(logits, 6, 1, "dlogits fp32", dlogits=BF16 * held),
        )
    else:
        loss = (
            eager(logits, 6, 1, "logits", logits_fp32=FP32 * held),
            eager(logits, 16, 2, "logits fp32", **kept),  # for the maximum, for the sum, and for the result
        )
        loss_back = (
            eager(logits, 4, 2, dlog_logits=FP32 * held),
            eager(logits, 16, 1, "dlog logits", "log logits", dlogits_fp32=FP32 * held),  # gradients are read twice
            eager(logits, 6, 1, "dlogits fp32", dlogits=BF16 * held),
        )
    shared = (Node(Collective("all_reduce", FP32 * s.tokens), (), {"loss": FP32 * s.tokens}, "comm"),) * 3
    again = (head, *loss) if chunks > 1 else ()
    names = [name for each in (head, *loss) for name in each.makes]
    renamed = tuple(
        each.renamed(lambda name: f"{name} again" if name in names else name) for each in (*again, *loss_back)
    )
    backward = renamed if chunks > 1 else loss_back
    gradient = {f"{GRADIENT} output": BF16 * s.words * model.hidden}
    return LayerCode(
        forward=(
            node("rms_norm", hidden, "x", z=s.shard),
            *(gathered(s, "z", "z all") if many else ()),
            head,
            *loss,
            *(shared if many else ()),
        ),
        backward=(
            *backward,
            Node(Gemm("dgrad", s.tokens, model.hidden, s.words), ("dlogits", "weights"), {"dz" + every: s.whole}),
            Node(Gemm("wgrad", s.words, model.hidden, s.tokens), ("dlogits", "z" + every), gradient),
            *(scattered(s, "dz all", "dz") if many else ()),
            node("rms_norm_bwd", hidden, "dz", "x", dx=s.shard),
        ),
        kept=frozenset({"z" + every, *(() if chunks > 1 else ("logits",) if fused else ("log logits",))}),
    )


def torch_held(sharding: Sharding) -> Held:
    """Shards are fp32, and so are their gradients and both moments; whole weights are in the working type with all that
    goes with them. AdamW is PyTorch's fused one."""
    each, kernel = (FP32, "adamw_fp32") if sharding == "fsdp" else (BF16, "adamw_bf16")
    held = Held(weight=each, gradient=0, states=2 * each, made_gradient=each, optimizer=7 * each)
    return replace(held, optimizer_kernel=kernel)


def per_op(s: Sizes, compiled: bool) -> frozenset[str]:
    """Results of attention and of every second matrix product, the first of them, and with tensor parallelism those of
    reduce-scatters. Nobody reads what the layer ends with: eager code keeps it all the same, a compiler does not.

    Source: the save list of pytorch/torchtitan@9dec370, torchtitan/parallelisms/parallelize_llama.py; PyTorch 2.6,
    torch/_functorch/partitioners.py, which drops saved values without readers.
    """
    kept = {"q0", "v", "out", "lse", "gate", *(("proj",) if s.tp > 1 else ())}
    return frozenset(kept if compiled else kept | {"down"})


TORCH: Final = Framework(
    name="torch",
    source="torch 2.11: FSDP2, DTensor tensor parallelism, context_parallel, torch.compile of layers",
    sharding="fsdp",
    shardings=("none", "fsdp"),
    compiles=True,
    layer=torch_layer,
    first=torch_first,
    last=torch_last,
    held=torch_held,
    kept={"full": frozenset(), "per_op": per_op},
    overlap=micro_pipelined,
    recipes=TORCH_RECIPES,
    root=True,
    divides=True,
    attention="torch",
    offers=CONTEXT_PARALLEL,
    kernels=("sdpa_flash", "cudnn"),
    parts_loss=True,
    launches=LAUNCHES,
    host="torch",
)
FOREACH_ADAMW: Final = 20 * FP32
"""Bytes per parameter of AdamW by lists of tensors, ``_multi_tensor_adamw`` of PyTorch 2.6 (torch/optim/adamw.py):
decay 8, first moment 12, second 8 and 12, its root 8, corrected 8, epsilon 8, update 16."""
TORCHTITAN: Final = replace(
    TORCH,
    name="torchtitan",
    source="torchtitan of December 2024 (9dec370): one root of both ends, loss never compiled, AdamW by lists",
    recompute="per_op",
    shardings=("fsdp",),
    parts_loss=False,
    compiles=False,
    layer=torchtitan_layer,
    joins=chunked,
    first=lambda s, compiled: chunked(torch_first(s, compiled)),
    last=lambda s, _compiled, chunks: chunked(torch_last(s, False, chunks)),
    held=lambda sharding: replace(torch_held(sharding), clipped=True, optimizer=FOREACH_ADAMW, optimizer_kernel="adam"),
    lists=True,
)
HUGGING_FACE: Final = replace(
    TORCH,
    name="huggingface",
    source="Transformers' LlamaForCausalLM, FSDP2 as accelerate has it",
    host="huggingface",
    kernels_apart=("fa2", "fa3"),
    compiles=False,
    layer=hugging_face_layer,
    kept={"full": frozenset()},
    overlap=None,
    recipes={},
    tiles_mlp=True,
    offloads="full",
)
DEFAULT: Final = "megatron"
FRAMEWORKS: Final = {one.name: one for one in (MEGATRON, TORCH, TORCHTITAN, HUGGING_FACE)}


def framework(name: str) -> Framework:
    """A row of the table.

    Raises:
        ScenarioError: nobody has read that framework yet.
    """
    check_name("framework", name, FRAMEWORKS)
    return FRAMEWORKS[name]
