"""Mixtures of experts by Megatron-Bridge's performance scripts and Megatron-LM's tests: what no field says.

- Gradients are summed in bf16.
- Routing is forced to be even, by random logits.
- Where `recompute_modules` says `layernorm` and `moe_act`, norms and the activation of experts run again; where it says
  `mla_up_proj`, queries, keys and values are made from their latents again.

Source: NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs of v0.2.0 to v0.5.1
(cutedsl_fused_grouped_mlp, recompute_modules, grad_reduce_in_fp32).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Final

from cpsim.prediction.step.frameworks import MEGATRON, Framework, Sizes
from cpsim.prediction.step.layer import BF16, ElementwisePass, Gemm
from cpsim.prediction.step.precision import FP8
from cpsim.prediction.step.program import LayerCode, Node
from studies.public.row import Code

AGAIN: Final = frozenset({"x norm", "h norm", "expert swiglu", "expert clamped"})
"""What is not kept with recompute_modules layernorm and moe_act."""
FROM_LATENTS: Final = frozenset({"q k v"})
"""The same with mla_up_proj."""


def weighted_inside(s: Sizes, compiled: bool) -> LayerCode:
    """A layer whose experts weight what their activation gives, so that this is kept and results are not.

    Source: NVIDIA/Megatron-LM@d98e8a64d, megatron/core/transformer/mlp.py (per_token_scale) and moe/experts.py
    (SequentialMLP), which runs where grouped products are not asked for.
    """
    code = MEGATRON.layer(s, compiled)
    assert s.experts is not None
    nbytes = BF16 * s.experts.inner
    weighted = Node(ElementwisePass("copy", 2 * nbytes), ("expert swiglu", "probs"), {"expert weighted": nbytes})

    def inside(node: Node) -> Node:
        if isinstance(node.what, Gemm):
            return replace(node, reads=tuple("expert weighted" if x == "expert swiglu" else x for x in node.reads))
        if "dy" in node.reads and "probs" in node.reads:
            return replace(node, reads=("dy",))
        return replace(node, reads=(*node.reads, "expert swiglu")) if "dexpert swiglu" in node.reads else node

    forward, backward = (list(map(inside, side)) for side in (code.forward, code.backward))
    forward.insert(1 + next(i for i, node in enumerate(forward) if "expert swiglu" in node.makes), weighted)
    made = {name for node in forward for name in node.makes}
    kept = made & {name for node in backward for name in node.reads}
    return LayerCode(forward=tuple(forward), backward=tuple(backward), kept=frozenset(kept))


TESTED: Final = replace(MEGATRON, source="Megatron-LM@d98e8a64d", layer=weighted_inside, last=MEGATRON.losses["none"])
"""Megatron-LM as its functional tests of experts run it."""
BRIDGE_DENSE: Final = replace(
    MEGATRON,
    source="Megatron-Bridge's Llama",
    last=MEGATRON.losses["te"],
    held=lambda sharding: replace(MEGATRON.held(sharding), gradient=BF16),
)
"""Gradients are summed in bf16 (set_llama3_common_configs); cross entropy is Transformer Engine's
(perf_recipes/_common.py, scripts/performance/utils/overrides.py: cross_entropy_fusion_impl)."""


SHARDED: Final = replace(
    BRIDGE_DENSE, source="Megatron-Bridge's Llama with Megatron's FSDP", shardings=("none", "zero1", "fsdp")
)
"""Weights are gathered layer by layer, as the whole of a step has them (use_megatron_fsdp)."""


def fused_experts(code: LayerCode) -> LayerCode:
    """A layer whose experts are Transformer Engine's fused grouped MLP: kernels of the first product write the
    activation in FP8, and those of its gradient that of the first product's output."""

    def fused(node: Node) -> Node:
        inside = ("expert swiglu", "expert swiglu fp8", "dexpert gate up", "dexpert gate up fp8")
        if isinstance(node.what, ElementwisePass) and node.makes.keys() & set(inside):
            return replace(node, what=None)
        return node

    forward, backward = (tuple(map(fused, side)) for side in (code.forward, code.backward))
    return LayerCode(forward=forward, backward=backward, kept=code.kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a configuration of Megatron-Bridge says of experts."""

    fused: bool
    """Experts are one kernel."""
    again: frozenset[str]
    """What is not kept but computed again."""
    native_loss: bool = False
    """Cross entropy is Megatron's own."""

    @property
    def framework(self) -> Framework:
        """Megatron, with what this says."""
        return replace(
            BRIDGE_DENSE,
            layer=self._layer,
            last=MEGATRON.losses["native" if self.native_loss else "te"],
            joins=fused_experts if self.fused else MEGATRON.joins,
            kept={"none": self._kept} if self.again else MEGATRON.kept,
        )

    def _layer(self, s: Sizes, compiled: bool) -> LayerCode:
        sizes = replace(s, model=replace(s.model, clamped=False)) if self.fused else s
        return MEGATRON.layer(sizes, compiled)

    def _kept(self, s: Sizes, compiled: bool) -> frozenset[str]:
        return self._layer(s, compiled).kept - self.again


def low_activations(layer: Callable[[Sizes, bool], LayerCode], s: Sizes, compiled: bool) -> LayerCode:
    """A layer whose SwiGLU keeps its input in FP8, cast by itself (activation_func_fp8_input_store)."""
    code, elements = layer(s, compiled), s.wide("gate_up") // BF16
    cast = Node(ElementwisePass("copy", (BF16 + FP8) * elements), ("gate up",), {"gate up low": FP8 * elements})
    at = next(i for i, node in enumerate(code.forward) if "swiglu" in node.makes)
    backward = tuple(
        replace(node, reads=tuple("gate up low" if name == "gate up" else name for name in node.reads))
        for node in code.backward
    )
    return LayerCode(
        forward=(*code.forward[:at], cast, *code.forward[at:]),
        backward=backward,
        kept=code.kept - {"gate up"} | {"gate up low"},
    )


@cache
def by_recipe(recipe: Recipe) -> Code:
    """What runs of experts."""
    return Code("Megatron-Core by Megatron-Bridge", lambda _: recipe.framework)


LOW_ACTIVATIONS: Final = Code(
    "NeMo's adapters with SwiGLU's input kept in FP8", lambda f: replace(f, layer=partial(low_activations, f.layer))
)
SUMS_IN_BF16: Final = replace(
    MEGATRON,
    source="NeMo as MLPerf's submissions run it",
    held=lambda sharding: replace(MEGATRON.held(sharding), weight=FP8, gradient=BF16),
)
"""Gradients are summed in bf16 (pretrain.py: grad_reduce_in_fp32), weights held and gathered in FP8 (FP8_PARAMS)."""
