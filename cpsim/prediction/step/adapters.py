"""Low-rank adapters: weights of the model are frozen, and beside linear layers two thin ones are trained.

Frozen weights are in the working type and have no gradients and no optimizer states; gradients of their inputs are
computed all the same. An adapter of rank r multiplies the input with A [r, K] and that with B [N, r], scales it and
adds it to what its linear layer makes.

- ``megatron``: as Megatron-Bridge and NeMo have it, two products of cuBLAS in bf16 and pointwise ops, whatever the
  precision of the frozen layer; what goes into an adapter is dropped out, where asked for. With tensor parallelism one
  product of the two is over a rank's shard of the tokens, and what is exchanged is as thin as the rank. A frozen layer
  in FP8 has its weights in FP8 and casts inputs and gradients in one layout; before Blackwell weights are transposed
  for every backward pass.
- ``huggingface``: as NeMo Automodel trains Transformers' models: Liger's Triton kernels for norms, rotary positions and
  SwiGLU, an eager loss on logits in fp32, and Triton kernels for adapters, whose time is that of the memory they read
  and write: forward one reads the input and writes the adapter's output, which is dropped out, where asked for, and
  added; backward three read the input twice and the gradient twice, and write the gradient of the input, which is added
  to that of the weights.

Reference: Hu et al., "LoRA" (2021). Source: NVIDIA-NeMo/Megatron-Bridge@067f987df, src/megatron/bridge/peft/lora.py,
lora_layers.py and utils.py (ParallelLinearAdapter); NVIDIA-NeMo/Automodel@507bfb751, nemo_automodel/_transformers/
auto_model.py and registry.py, components/_peft/lora.py and lora_kernel.py, components/loss/masked_ce.py;
linkedin/Liger-Kernel, transformers/monkey_patch.py.
mlcommons/training_results_v5.0, NVIDIA's llama2_70b_lora (train.py: a2a_experimental, dropout_position, fp8_params;
disable_parameter_transpose_cache).
Differs: the first layer's input has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, Literal

from cpsim.case.gpu import BLACKWELL, Gpu
from cpsim.case.model import Lora
from cpsim.errors import InfeasibleError
from cpsim.prediction.step.frameworks import (
    EMBEDDING_SUM,
    Framework,
    Held,
    Sizes,
    eager,
    torch_held,
    torch_last,
    torch_layer,
)
from cpsim.prediction.step.layer import BF16, Collective, Gemm
from cpsim.prediction.step.precision import FP8, TRANSPOSE, Recipe, in_fp8
from cpsim.prediction.step.program import GRADIENT, LayerCode, Node, Nodes

DROPOUT: Final = 5
"""Bytes per element that a dropout reads and writes: values, and a mask of a byte."""
ADDED: Final = 6
"""Bytes per element of a sum of two."""
SCALED: Final = 4
"""Bytes per element of a product with a number."""
MODULES: Final = {
    4: ("qkv", "proj", "gate_up", "down"),
    7: ("qkv", "qkv", "qkv", "proj", "gate_up", "gate_up", "down"),
}
"""Linear layers by their number, in the order in which they run forward."""
Forward = Callable[[Gemm, Node, str], Nodes]
"""The adapter of a product, of its node, and what it adds to a tensor of that name."""
Backward = Callable[[Gemm, Node, bool], Nodes]
"""The same of the gradients, of the node that made that of the weights, and whether there is another sum."""


def adapted(framework: Framework, lora: Lora, recipe: Recipe | None = None) -> Framework:
    """A framework that trains adapters.

    Args:
        framework: whose.
        lora: them.
        recipe: how frozen layers compute in FP8, see ``frozen_recipe``; None: they do not.

    Raises:
        InfeasibleError: nobody has read how it does.
    """
    if framework.name == "megatron":
        return replace(
            framework,
            lora=lora,
            layer=partial(_beside, framework.layer, lora, recipe),
            first=lambda s, compiled: frozen(framework.first(s, compiled)),
            last=lambda s, compiled, chunks: frozen(framework.last(s, compiled, chunks)),
            held=lambda sharding: _lowest(framework.held(sharding), recipe),
        )
    if recipe is not None:
        raise InfeasibleError(f"precision: steps of {framework.name} with adapters are predicted in bf16; leave it out")
    if framework.name == "huggingface":
        return replace(
            framework,
            lora=lora,
            layer=partial(_layer, _liger, lora, partial(_triton, lora), partial(_triton_back, lora)),
            first=lambda s, compiled: frozen(framework.first(s, compiled)),
            last=lambda s, compiled, chunks: frozen(torch_last(s, compiled, chunks)),
            held=lambda _sharding: torch_held("none"),
            launches={},
            offloads=None,
        )
    raise InfeasibleError(f"trainable: {framework.name} has no adapters; use framework megatron or huggingface, or all")


def frozen(code: LayerCode) -> LayerCode:
    """Without gradients of weights."""
    backward = tuple(node for node in code.backward if not _of_weights(node))
    return replace(code, backward=backward, kept=code.kept & _reads(backward))


def _liger(s: Sizes, _compiled: bool) -> LayerCode:
    """Transformers' layer with Liger's kernels."""
    return torch_layer(s, True)


def _layer(
    plain: Callable[[Sizes, bool], LayerCode],
    lora: Lora,
    forward_of: Forward,
    backward_of: Backward,
    s: Sizes,
    compiled: bool,
) -> LayerCode:
    """A layer whose linear layers have adapters."""
    code = plain(s, compiled)
    products = sum(isinstance(node.what, Gemm) for node in code.forward)
    names = list(MODULES[products])
    forward, backward = list[Node](), list[Node]()
    for node in code.forward:
        if isinstance(node.what, Gemm) and names.pop(0) in lora.modules:
            ((to, nbytes),) = node.makes.items()
            forward += [replace(node, makes={f"{to} alone": nbytes}), *forward_of(node.what, node, to)]
        else:
            forward.append(node)
    last = ""
    for node in code.backward:
        if isinstance(node.what, Gemm) and node.what.kind == "dgrad":
            (last,) = node.makes
        if not _of_weights(node):
            backward.append(node)
        elif isinstance(node.what, Gemm) and _module(node.reads[1]) in lora.modules:
            backward += backward_of(node.what, node, not compiled and last[-1].isdigit())
    made = {name for node in forward for name in node.makes}
    return LayerCode(forward=tuple(forward), backward=tuple(backward), kept=frozenset(made & _reads(tuple(backward))))


def _module(kept: str) -> str:
    """The linear layer that reads such an input."""
    if kept.startswith("x norm"):
        return "qkv"
    if kept.startswith("h norm"):
        return "gate_up"
    return "proj" if kept == "out" else "down"


def _of_weights(node: Node) -> bool:
    """Whether an op makes a gradient of weights."""
    embeds = "embedding_bwd" in str(node.what) or EMBEDDING_SUM in node.makes
    return embeds or (isinstance(node.what, Gemm) and node.what.kind == "wgrad")


def _reads(nodes: Nodes) -> frozenset[str]:
    return frozenset(name for node in nodes for name in node.reads)


def _gradient(lora: Lora, what: Gemm, of: str) -> dict[str, int]:
    """Of A and B."""
    return {f"{GRADIENT} adapter {of}": BF16 * lora.rank * (what.m + what.n)}


def frozen_recipe(recipe: Recipe, gpu: Gpu) -> Recipe:
    """A recipe of frozen layers: nothing is cast for gradients of weights, and weights are in FP8 for good.

    Tensor cores before Blackwell want weights transposed for gradients of inputs, and no copy of them is kept.
    """
    turns = 0 if gpu.architecture in BLACKWELL else TRANSPOSE
    return replace(
        recipe.on(gpu),
        cast=BF16 + FP8,
        after_norm=0,
        gradient=BF16 + FP8,
        kept=0,
        weight=0,
        weight_back=turns,
        weight_step=0,
        saves=False,
    )


def _lowest(held: Held, recipe: Recipe | None) -> Held:
    """With weights in FP8, where there is a recipe."""
    return replace(held, weight=FP8) if recipe else held


COLUMN: Final = {"qkv": ("x norm", "qkv", "dqkv", "dx norm"), "gate_up": ("h norm", "gate up", "dgate up", "dh norm")}
"""Of linear layers cut by columns, by name: input, output, and the gradients of output and input."""
ROW: Final = {"proj": ("out", "proj", "dh", "dout"), "down": ("swiglu", "down", "dy", "dswiglu")}
"""The same of those cut by rows."""


def _beside(
    plain: Callable[[Sizes, bool], LayerCode], lora: Lora, recipe: Recipe | None, s: Sizes, compiled: bool
) -> LayerCode:
    """A frozen layer with adapters beside some of its linear layers."""
    code = plain(s, compiled)
    backward = tuple(node for node in code.backward if not _of_weights(node))
    code = LayerCode(forward=code.forward, backward=_needed(backward), kept=code.kept)
    code = in_fp8(code, s.tp, recipe) if recipe else code
    forward, backward = code.forward, code.backward
    for name in lora.modules:
        forward = _after(forward, (COLUMN | ROW)[name][1], _adapter(lora, name, s))
        backward = _after(backward, (COLUMN | ROW)[name][3], _adapter_back(lora, name, s))
    made = {name for node in forward for name in node.makes}
    return LayerCode(forward=forward, backward=backward, kept=frozenset(made & _reads(backward)))


def _needed(nodes: Nodes) -> Nodes:
    """Without gathers of what nobody reads any more."""
    read = _reads(nodes)
    return tuple(node for node in nodes if node.stream != "comm" or not node.makes or node.makes.keys() & read)


def _after(nodes: Nodes, name: str, new: Nodes) -> Nodes:
    """With ops behind the last one that makes a tensor."""
    at = max(i for i, node in enumerate(nodes) if name in node.makes)
    return (*nodes[: at + 1], *new, *nodes[at + 1 :])


def _ends(name: str, s: Sizes) -> tuple[int, int, int, int]:
    """Elements of an adapter's input and output of one token, and tokens that a rank has of each."""
    inner, outer = s.model.linears(s.tp)[name]
    shard = s.tokens // s.tp
    return (inner, outer, shard, s.tokens) if name in COLUMN else (inner, outer, s.tokens, shard)


def _thin(kind: Literal["all_gather", "reduce_scatter"], lora: Lora, s: Sizes, source: str, to: str) -> Nodes:
    """What tensor-parallel ranks exchange between both products."""
    nbytes = BF16 * s.tokens * lora.rank
    return (Node(Collective(kind, nbytes), (source,), {to: nbytes}, "comm"),) if s.tp > 1 else ()


def _adapter(lora: Lora, name: str, s: Sizes) -> Nodes:
    """Forward, in place of what the frozen layer makes."""
    source, to, _, _ = (COLUMN | ROW)[name]
    inner, outer, before, after = _ends(name, s)
    dropped, thin = f"{source} dropped for {name}", f"{name} thin"
    drops = eager(
        before * inner, DROPOUT, 1, source, **{dropped: BF16 * before * inner, f"{name} mask": before * inner}
    )
    read = dropped if lora.drops else source
    exchange = _thin("all_gather" if name in COLUMN else "reduce_scatter", lora, s, thin, f"{thin} all")
    whole = f"{thin} all" if exchange else thin
    return (
        *((drops,) if lora.drops else ()),
        Node(Gemm("forward", before, lora.rank, inner), (read,), {thin: BF16 * before * lora.rank}),
        *exchange,
        Node(Gemm("forward", after, outer, lora.rank), (whole,), {f"{name} beside": BF16 * after * outer}),
        eager(after * outer, SCALED + ADDED, 2, f"{name} beside", to),
    )


def _adapter_back(lora: Lora, name: str, s: Sizes) -> Nodes:
    """Backward, added to the gradient of the frozen layer's input."""
    source, _, dy, dx = (COLUMN | ROW)[name]
    inner, outer, before, after = _ends(name, s)
    read = f"{source} dropped for {name}" if lora.drops else source
    scaled, thin, into = f"d{name} scaled", f"d{name} thin", f"d{name} beside"
    kept = f"{name} thin all" if s.tp > 1 else f"{name} thin"
    exchange = _thin("reduce_scatter" if name in COLUMN else "all_gather", lora, s, thin, f"{thin} all")
    whole = f"{thin} all" if exchange else thin
    masks = (f"{name} mask",) if lora.drops else ()
    return (
        eager(after * outer, SCALED, 1, dy, **{scaled: BF16 * after * outer}),
        Node(Gemm("wgrad", outer, lora.rank, after), (scaled, kept)),
        Node(Gemm("dgrad", after, lora.rank, outer), (scaled,), {thin: BF16 * after * lora.rank}),
        *exchange,
        Node(Gemm("wgrad", lora.rank, inner, before), (whole, read)),
        Node(Gemm("dgrad", before, inner, lora.rank), (whole,), {into: BF16 * before * inner}),
        eager(before * inner, ADDED + DROPOUT * lora.drops, 1 + lora.drops, into, dx, *masks),
    )


def _triton(lora: Lora, what: Gemm, node: Node, to: str) -> Nodes:
    tokens, outer, inner = what.m, what.n, what.k
    nbytes = tokens * (BF16 * (inner + outer) + (ADDED + DROPOUT * lora.drops) * outer)
    made = {to: BF16 * tokens * outer}
    return (replace(eager(1, nbytes, 2 + lora.drops, f"{to} alone", node.reads[0]), makes=made),)


def _triton_back(lora: Lora, what: Gemm, node: Node, sums: bool) -> Nodes:
    outer, inner, tokens = what.m, what.n, what.k
    each = BF16 * (3 * inner + 2 * outer) + ((1 + sums) * ADDED + DROPOUT * lora.drops) * inner
    made = _gradient(lora, what, " ".join(node.reads))
    return (replace(eager(1, each * tokens, 4 + sums + lora.drops, *node.reads), makes=made),)
