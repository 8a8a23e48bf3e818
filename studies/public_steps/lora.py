"""NeMo Automodel's fine-tuning with low-rank adapters on one GPU, as a framework: weights are frozen, adapters are not.

Projections of q, k and v are one linear layer, and those of gate and up; norms, rotary positions and SwiGLU are
PyTorch's eager ops. Every linear layer has an adapter of rank 16 in Triton kernels, whose time is that of the memory
they read and write: forward one kernel reads the input and writes the adapter's output, which is dropped out, where
asked for, and added; backward three read the input twice and the gradient twice, and write the gradient of the input,
which is added to that of the weights.

Source: NVIDIA-NeMo/Automodel@507bfb751, nemo_automodel/components/models/llama/model.py and qwen2/model.py,
components/_peft/lora.py and lora_kernel.py, components/loss/masked_ce.py; recipes/llm/benchmark.py (no clipping).
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
    norm_back,
    norm_by_ops,
    torch_first,
    torch_last,
)
from cpsim.prediction.step.layer import BF16, FP32, Gemm
from cpsim.prediction.step.program import LayerCode, Node, Nodes

DROPOUT: Final = 5
"""Bytes per element that a dropout reads and writes: values, and a mask of a byte."""
ADDED: Final = 6
"""Bytes per element of a sum of two."""


def layer(s: Sizes, _compiled: bool, *, dropout: bool) -> LayerCode:
    """A layer with adapters; tensor parallelism is not said."""
    tokens, model = s.tokens, s.model
    hidden, heads = tokens * model.hidden, tokens * (model.heads + model.kv_heads) * model.head_dim
    qkv, inner = s.wide("qkv") // BF16, s.inner // BF16

    def forward(name: str, source: str, to: str) -> Nodes:
        into, out = model.linears(1)[name]
        adapter = tokens * (BF16 * (into + out) + (ADDED + DROPOUT * dropout) * out)
        product = Node(Gemm("forward", tokens, out, into), (source, "weights"), {f"{to} alone": BF16 * tokens * out})
        return (product, eager(1, adapter, 2 + dropout, f"{to} alone", source, **{to: BF16 * tokens * out}))

    def backward(name: str, source: str, kept: str, to: str) -> Nodes:
        into, out = model.linears(1)[name]
        adapter = tokens * (BF16 * (3 * into + 2 * out) + ADDED * into + DROPOUT * dropout * out)
        product = Node(Gemm("dgrad", tokens, into, out), (source, "weights"), {f"{to} alone": BF16 * tokens * into})
        return (product, eager(1, adapter, 4 + dropout, f"{to} alone", source, kept, **{to: BF16 * tokens * into}))

    nodes = (
        *norm_by_ops(s, "x", "x norm"),
        *forward("qkv", "x norm", "qkv"),
        eager(heads, 20, 10, "qkv", rotated=BF16 * qkv),
        Node("fwd", ("rotated",), {"out": s.out, "lse": s.lse}),
        *forward("proj", "out", "proj"),
        node("add", hidden, "x", "proj", h=s.shard),
        *norm_by_ops(s, "h", "h norm"),
        *forward("gate_up", "h norm", "gates"),
        eager(inner, 4, 1, "gates", silu=s.inner),
        eager(inner, 6, 1, "silu", "gates", product=s.inner),
        *forward("down", "product", "down"),
        node("add", hidden, "h", "down", y=s.shard),
    )
    gradients = {"drotated": BF16 * qkv, "dq sums": FP32 // BF16 * s.out}
    back = (
        *backward("down", "dy", "product", "dproduct"),
        eager(inner, 18, 3, "dproduct", "gates", "silu", dparts=2 * s.inner),
        eager(2 * inner, 4, 1, "dparts", dgates=2 * s.inner),  # side by side again
        *backward("gate_up", "dgates", "h norm", "dh norm"),
        *norm_back(s, "dh norm", "h", "dh part", False, True),
        node("add", hidden, "dy", "dh part", dh=s.shard),
        *backward("proj", "dh", "out", "dout"),
        Node("bwd", ("dout", "rotated", "out", "lse"), gradients),
        eager(heads, 20, 14, "drotated", dparts_qkv=BF16 * qkv),
        eager(qkv, 4, 1, "dparts qkv", dqkv=BF16 * qkv),
        *backward("qkv", "dqkv", "x norm", "dx norm"),
        *norm_back(s, "dx norm", "x", "dx part", False, True),
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
        source="NVIDIA-NeMo/Automodel@507bfb751, adapters of rank 16 on all linear layers but the last",
        layer=partial(layer, dropout=dropout),
        first=lambda s, compiled: frozen(torch_first(s, compiled)),
        last=lambda s, compiled, chunks: frozen(torch_last(s, compiled, chunks)),
        held=lambda _sharding: Held(weight=BF16, gradient=0, states=0, optimizer=0),
        kept={},
    )
