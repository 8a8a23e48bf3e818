"""Mixture of experts op by op, on each rank: a router sends every token to some experts, which other ranks may hold.

Ranks of an expert-parallel group hold a part of the experts each. Copies of tokens go to their experts by an all-to-all
among the ranks of the group, and come back by another; tensor parallelism cuts each expert, so that its ranks gather
copies before and sum and scatter them after. Every expert gets as many tokens as any other.

Reference: Lepikhin et al., "GShard" (2020), section 2.2 (top-k routing, all-to-all); Megatron-Core 0.12,
transformer/moe: router.py, token_dispatcher.py (MoEAlltoAllTokenDispatcher: order of permutations and collectives;
results are weighted where they arrive, so that they are kept), experts.py (TEGroupedMLP: products of one expert after
the other). By default nothing runs beside the all-to-alls. Hosts read how many tokens each expert gets before they
launch what sends them (MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize). Biases of second linear layers
(TEGroupedMLP._apply_bias) and clamps (fusions/fused_bias_geglu.py, weighted_bias_quick_geglu_impl) are no part of other
kernels.
Differs: counts of tokens that ranks tell each other are left out; permutations are fused, as its example for Mixtral
has them, which is not the default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from cpsim.case.model import Model
from cpsim.prediction.step.layer import BF16, FP32, Collective, ElementwisePass, Gemm
from cpsim.prediction.step.program import LayerCode, Node, Nodes, Stream
from cpsim.schedule.transformer import OP_BYTES

What = Collective | ElementwisePass
BIASED: Final = {"mixed": 4 + 10 + 6, "copy": 8}
"""Bytes of every element of results by kernel: a product in fp32, its sum with them and the cast back, which mix types;
and all put together."""
BIASED_BACK: Final = {"mixed": 6 + 6 + 12 + 12, "copy": 4}
"""The same of gradients: two casts, sums of products for the router's weights and for the bias; and put together."""
CLAMPS: Final = {"clamped_halves": (8, 3), "clamped_halves_bwd": (10, 7)}
"""Bytes that are read and written for an element, and launches of the host."""
NOTE: Final = (
    "experts: each gets equally many tokens, and grouped products are priced as the sum of the experts' own; "
    "an estimate, not measured"
)
ALONE: Final = (
    "experts: nothing runs beside exchanges of tokens; parallel.ep_overlap: true has them beside another microbatch"
)


def once_a_rank(code: LayerCode, model: Model, ep: int) -> LayerCode:
    """A layer whose tokens are sent once to each rank that has some of their experts: as many bytes of those of an
    all-to-all as ranks that random routing meets.

    Source: deepseek-ai/DeepEP, README; NVIDIA/Megatron-LM, core_v0.15.0, transformer/moe/token_dispatcher.py
    (MoEFlexTokenDispatcher).
    """
    if not model.experts:
        return code
    return code.with_exchanges([ep * (1 - (1 - 1 / ep) ** model.top_k) / model.top_k])


def balanced(total: int, parts: int) -> list[int]:
    """A number in almost equal parts, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Router and routed experts of a layer, of one microbatch on one rank."""

    model: Model
    tp: int
    ep: int
    """Ranks that share the experts."""
    tokens: int
    """On this context-parallel rank; each of `tp` ranks has its shard of them."""

    @property
    def rows(self) -> list[int]:
        """Tokens of each expert of this rank, those of all ranks of the group."""
        every = balanced(self.ep * self.tokens * self.model.top_k, self.model.experts)
        return every[: self.model.experts // self.ep]

    @property
    def alike(self) -> list[tuple[int, int]]:
        """Tokens of an expert of this rank, and how many experts have as many."""
        return list(Counter(self.rows).items())

    @property
    def shard(self) -> int:
        """Tokens of this tensor-parallel rank."""
        return self.tokens // self.tp

    @property
    def sent_bytes(self) -> int:
        """Copies of this rank's tokens, one for each expert that they are sent to."""
        return BF16 * self.shard * self.model.top_k * self.model.hidden

    def forward(self) -> Nodes:
        """From ``h norm``, this rank's shard, to ``routed``."""
        scores, hidden = self.shard * self.model.experts, BF16 * self.shard * self.model.hidden
        rows, there = self._there("sent")
        returned, back = self._back((*self._each("expert down"), *self._biased))
        router = Gemm("forward", self.shard, self.model.experts, self.model.hidden)
        first, *others = (*there, *self._products("forward", "gate_up", rows, "expert gate up"))
        return (
            Node(router, ("h norm", "weights"), {"router": BF16 * scores}),
            Node(ElementwisePass("copy", (BF16 + FP32) * scores), ("router",), {"probs": FP32 * scores}),
            Node(ElementwisePass("copy", 2 * self.sent_bytes), ("h norm", "probs"), {"sent": self.sent_bytes}),
            replace(first, awaits=("probs",)),
            *others,
            *self._clamps("clamped_halves", self._each("expert gate up"), "expert clamped"),
            self._swiglu("swiglu", self._gates, "expert swiglu", self.inner),
            *self._products("forward", "down", "expert swiglu", "expert down"),
            *self._biases(BIASED, self._each("expert down"), self._biased, len(self.rows) + 1),
            *back,
            Node(self._sums(), (*returned, "probs"), {"routed": hidden}),
        )

    def backward(self) -> Nodes:
        """From ``dy``, this rank's shard, to ``dh routed``."""
        scores, hidden = self.shard * self.model.experts, BF16 * self.shard * self.model.hidden
        rows, _ = self._there("sent")
        arrived, there = self._there("dsent")
        kept, _ = self._back(self._each("expert down"))
        returned, back = self._back(self._each("drows"))
        gates = ("dexpert swiglu", *self._gates)
        before = "dexpert clamped" if self.model.clamped else "dexpert gate up"
        to_input = Gemm("dgrad", self.shard, self.model.hidden, self.model.experts)
        to_router = Gemm("wgrad", self.model.experts, self.model.hidden, self.shard)
        return (
            Node(
                ElementwisePass("copy", 2 * self.sent_bytes + hidden),
                ("dy", "probs", *kept),
                {"dsent": self.sent_bytes},
            ),
            *there,
            *self._biases(BIASED_BACK, (arrived,), (), 3 * len(self.rows)),
            *self._gradients("down", arrived, "expert swiglu", "dexpert swiglu"),
            self._swiglu("swiglu_bwd", gates, before, (1 + self.model.gated) * self.inner),
            *self._clamps("clamped_halves_bwd", (before, *self._each("expert gate up")), "dexpert gate up"),
            *self._gradients("gate_up", "dexpert gate up", rows, "drows"),
            *back,
            Node(self._sums(), returned, {"dh sent": hidden}),
            Node(ElementwisePass("copy", (2 * FP32 + BF16) * scores), ("probs",), {"drouter": BF16 * scores}),
            Node(to_input, ("drouter", "weights"), {"dh router": hidden}),
            Node(to_router, ("drouter", "h norm")),
            Node(ElementwisePass("add", 3 * hidden), ("dh sent", "dh router"), {"dh routed": hidden}),
        )

    def kept(self) -> frozenset[str]:
        """What the backward pass reads of the forward one."""
        made = {name for node in self.forward() for name in node.makes}
        return frozenset(made & {name for node in self.backward() for name in node.reads})

    @property
    def inner(self) -> int:
        """Elements of SwiGLU's outputs of all experts of this rank."""
        return sum(self.rows) * self.model.expert(self.tp)["down"][0]

    def _each(self, name: str) -> tuple[str, ...]:
        """Names of a tensor of experts with equally many tokens."""
        return tuple(f"{name} {i}" for i in range(len(self.alike)))

    def _products(self, kind: Literal["forward", "dgrad"], name: str, source: str, to: str) -> Nodes:
        """Of a linear layer of each expert, or the gradients of its inputs."""
        inner, outer = self.model.expert(self.tp)[name]
        n, k = (outer, inner) if kind == "forward" else (inner, outer)
        return tuple(
            Node(
                Gemm(kind, rows, n, k, times=times),
                (source, "weights"),
                {made: BF16 * times * rows * n},
                calls=times,
            )
            for (rows, times), made in zip(self.alike, self._each(to), strict=True)
        )

    def _gradients(self, name: str, source: str, kept: str, to: str) -> Nodes:
        """Of inputs and weights of a linear layer of each expert."""
        inner, outer = self.model.expert(self.tp)[name]
        wgrads = (
            Node(Gemm("wgrad", outer, inner, rows, times=times), (source, kept), calls=times)
            for rows, times in self.alike
        )
        return (*self._products("dgrad", name, source, to), *wgrads)

    def _swiglu(self, kind: str, reads: tuple[str, ...], to: str, elements: int) -> Node:
        """Or its gradient, of all experts at once."""
        return Node(ElementwisePass(kind, OP_BYTES[kind] * self.inner), reads, {to: BF16 * elements})

    @property
    def _gates(self) -> tuple[str, ...]:
        """What the activation reads."""
        return ("expert clamped",) if self.model.clamped else self._each("expert gate up")

    def _clamps(self, kind: str, reads: tuple[str, ...], to: str) -> Nodes:
        """Halves of every row, clamped one by one and put together again, or the gradient of that."""
        if not self.model.clamped:
            return ()
        nbytes, calls = CLAMPS[kind]
        elements = (1 + self.model.gated) * self.inner
        return (Node(ElementwisePass(kind, nbytes * elements), reads, {to: BF16 * elements}, calls=calls),)

    @property
    def _biased(self) -> tuple[str, ...]:
        """What is made of results of experts with biases."""
        return ("expert biased",) if self.model.expert_bias else ()

    def _biases(self, kinds: Mapping[str, int], reads: tuple[str, ...], to: tuple[str, ...], calls: int) -> Nodes:
        """Ops of biases of second linear layers, and of their gradients; those of other layers are parts of products.

        Each expert's is multiplied with the router's weights in fp32 and added to its rows; these are put together and
        cast back, op by op.
        """
        if not self.model.expert_bias:
            return ()
        elements = sum(self.rows) * self.model.hidden
        ops = [Node(ElementwisePass(kind, each * elements), reads, {}, calls=calls) for kind, each in kinds.items()]
        return (*ops[:-1], replace(ops[-1], makes=dict.fromkeys(to, 0)))

    def _sums(self) -> ElementwisePass:
        """Copies of every token to one sum."""
        return ElementwisePass("copy", self.sent_bytes + BF16 * self.shard * self.model.hidden)

    def _sorted(self) -> list[tuple[What, int, Stream]]:
        """Copies from the order of ranks to that of experts, or the reverse, where they differ."""
        whole = self.tp * self.sent_bytes
        is_needed = len(self.rows) > 1 and self.ep * self.tp > 1
        return [(ElementwisePass("copy", 2 * whole), whole, "compute")] if is_needed else []

    def _exchanged(self) -> list[tuple[What, int, Stream]]:
        """Copies to ranks of other experts, or back."""
        sent = Collective("all_to_all", self.sent_bytes)
        return [(sent, self.sent_bytes, "gather")] if self.ep > 1 else []

    def _there(self, source: str) -> tuple[str, Nodes]:
        """Copies of tokens to the ranks of their experts, in the order of experts; with the name of what arrives."""
        whole = self.tp * self.sent_bytes
        gather: list[tuple[What, int, Stream]] = [(Collective("all_gather", whole), whole, "comm")]
        (name,), nodes = _chain((source,), [*self._exchanged(), *gather * (self.tp > 1), *self._sorted()])
        return name, nodes

    def _back(self, sources: tuple[str, ...]) -> tuple[tuple[str, ...], Nodes]:
        """Results of experts to the ranks of their tokens; with the names of what arrives."""
        whole = self.tp * self.sent_bytes
        scatter: list[tuple[What, int, Stream]] = [(Collective("reduce_scatter", whole), self.sent_bytes, "comm")]
        return _chain(sources, [*self._sorted(), *scatter * (self.tp > 1), *self._exchanged()])


def _chain(sources: tuple[str, ...], steps: list[tuple[What, int, Stream]]) -> tuple[tuple[str, ...], Nodes]:
    """Ops that each read what the one before made: op, bytes that it makes, stream."""
    nodes = list[Node]()
    for i, (what, nbytes, stream) in enumerate(steps):
        name = f"{sources[0]} to {i}"
        nodes.append(Node(what, sources, {name: nbytes}, stream))
        sources = (name,)
    return sources, tuple(nodes)
