"""NeMo Automodel's fine-tuning with low-rank adapters on one GPU, as a framework: only adapters are trained.

The model is Transformers', as no implementation of Automodel's own is registered for it, with Liger's Triton kernels
for norms, rotary positions and SwiGLU, which are there by default; the loss is eager, on logits in fp32. Every linear
layer but the last has an adapter of rank 16 in Triton kernels, whose time is that of the memory they read and write:
forward one kernel reads the input and writes the adapter's output, which is dropped out, where asked for, and added;
backward three read the input twice and the gradient twice, and write the gradient of the input, which is added to that
of the weights.

Source: NVIDIA-NeMo/Automodel@507bfb751, nemo_automodel/_transformers/auto_model.py and registry.py,
components/_peft/lora.py and lora_kernel.py, components/loss/masked_ce.py; recipes/llm/benchmark.py (no clipping);
linkedin/Liger-Kernel, transformers/monkey_patch.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from cpsim.prediction.step.frameworks import (
    HUGGING_FACE,
    Framework,
    Held,
    Sizes,
    eager,
    node,
    torch_first,
    torch_last,
)
from cpsim.prediction.step.layer import BF16, ElementwisePass, Gemm
from cpsim.prediction.step.program import LayerCode, Node, Nodes
from cpsim.schedule.transformer import OP_BYTES

DROPOUT: Final = 5
"""Bytes per element that a dropout reads and writes: values, and a mask of a byte."""
ADDED: Final = 6
"""Bytes per element of a sum of two."""


def layer(s: Sizes, _compiled: bool, *, dropout: bool) -> LayerCode:
    """A layer with adapters; tensor parallelism is not said."""
    tokens, model = s.tokens, s.model
    hidden, inner = tokens * model.hidden, s.inner // BF16
    q, kv = (heads * model.head_dim for heads in (model.heads, model.kv_heads))
    shapes = {"q": (model.hidden, q), "k": (model.hidden, kv), "v": (model.hidden, kv), "proj": (q, model.hidden)}
    shapes |= dict.fromkeys(("gate", "up"), (model.hidden, model.ffn)) | {"down": (model.ffn, model.hidden)}

    def forward(name: str, source: str, to: str) -> Nodes:
        into, out = shapes[name]
        adapter = tokens * (BF16 * (into + out) + (ADDED + DROPOUT * dropout) * out)
        product = Node(Gemm("forward", tokens, out, into), (source, "weights"), {f"{to} alone": BF16 * tokens * out})
        return (product, eager(1, adapter, 2 + dropout, f"{to} alone", source, **{to: BF16 * tokens * out}))

    def backward(name: str, source: str, kept: str, to: str, before: str = "") -> Nodes:
        """Gradient of a layer's input, added to one that is there before."""
        into, out = shapes[name]
        sums = 2 if before else 1
        adapter = tokens * (BF16 * (3 * into + 2 * out) + sums * ADDED * into + DROPOUT * dropout * out)
        product = Node(Gemm("dgrad", tokens, into, out), (source, "weights"), {f"{to} alone": BF16 * tokens * into})
        reads = (f"{to} alone", source, kept, *((before,) if before else ()))
        return (product, eager(1, adapter, 3 + sums + dropout, *reads, **{to: BF16 * tokens * into}))

    def rotary(of: int, source: str, to: str) -> Node:
        kind = ElementwisePass("rotary in place", OP_BYTES["rotary"] * tokens * of)
        return Node(kind, (source,), {to: BF16 * tokens * of})

    nodes = (
        node("rms_norm in place", hidden, "x", x_norm=s.shard),
        *(one for name in ("q", "k", "v") for one in forward(name, "x norm", f"{name}0")),
        rotary(q, "q0", "q"),
        rotary(kv, "k0", "k"),
        Node("fwd", ("q", "k", "v0"), {"out": s.out, "lse": s.lse}),
        *forward("proj", "out", "proj"),
        node("add", hidden, "x", "proj", h=s.shard),
        node("rms_norm in place", hidden, "h", h_norm=s.shard),
        *(one for name in ("gate", "up") for one in forward(name, "h norm", name)),
        node("swiglu in place", inner, "gate", "up", product=s.inner),
        *forward("down", "product", "down"),
        node("add", hidden, "h", "down", y=s.shard),
    )
    gradients = {"dq": BF16 * tokens * q, "dk": BF16 * tokens * kv, "dv": BF16 * tokens * kv, "dq sums": 2 * s.out}
    back = (
        *backward("down", "dy", "product", "dproduct"),
        node("swiglu_bwd in place", inner, "dproduct", "gate", "up", dgate=s.inner, dup=s.inner),
        *backward("up", "dup", "h norm", "dh norm 1"),
        *backward("gate", "dgate", "h norm", "dh norm", "dh norm 1"),
        node("rms_norm_bwd in place", hidden, "dh norm", "h", dh_part=s.shard),
        node("add", hidden, "dy", "dh part", dh=s.shard),
        *backward("proj", "dh", "out", "dout"),
        Node("bwd", ("dout", "q", "k", "v0", "out", "lse"), gradients),
        rotary(q, "dq", "dq0"),
        rotary(kv, "dk", "dk0"),
        *backward("v", "dv", "x norm", "dx norm 1"),
        *backward("k", "dk0", "x norm", "dx norm 2", "dx norm 1"),
        *backward("q", "dq0", "x norm", "dx norm", "dx norm 2"),
        node("rms_norm_bwd in place", hidden, "dx norm", "x", dx_part=s.shard),
        node("add", hidden, "dh", "dx part", dx=s.shard),
    )
    made = {name for each in nodes for name in each.makes}
    read = {name for each in back for name in each.reads}
    return LayerCode(forward=nodes, backward=back, kept=frozenset(made & read))


def frozen(code: LayerCode) -> LayerCode:
    """Without gradients of weights."""
    backward = tuple(
        each
        for each in code.backward
        if not (isinstance(each.what, Gemm) and each.what.kind == "wgrad") and "embedding" not in str(each.what)
    )
    return replace(code, backward=backward)


def automodel(*, dropout: bool) -> Framework:
    """The framework, with or without dropout of what adapters give."""
    return replace(
        HUGGING_FACE,
        name="automodel",
        source="NVIDIA-NeMo/Automodel@507bfb751, Liger kernels, adapters of rank 16",
        layer=partial(layer, dropout=dropout),
        first=lambda s, compiled: frozen(torch_first(s, compiled)),
        last=lambda s, compiled, chunks: frozen(torch_last(s, compiled, chunks)),
        held=lambda _sharding: Held(weight=BF16, gradient=0, states=0, optimizer=0),
        kept={},
    )
