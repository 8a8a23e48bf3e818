"""Linear layers in FP8: which products, casts and gathers take the place of those in bf16.

A framework's layer says its products in bf16. A recipe says how their operands become FP8: bytes that kernels read and
write for every element, in which type ranks gather them, and what is kept for the backward pass. cuBLAS multiplies
operands of which both are contiguous along the inner axis, so that gradients need every operand a second time,
transposed: the weights for the gradient of the input, the input and the gradient of the output for that of the weights.

Source: pytorch/ao, torchao/float8 (float8_linear.py, config.py, fsdp_utils.py, float8_tensor_parallel.py,
float8_ops.py) and torchao/testing/training/roofline_utils.py (which kernels Inductor makes of casts); commits eab345c
and 6243040. NVIDIA/TransformerEngine, transformer_engine/pytorch/module/linear.py and layernorm_linear.py, and
common/recipe (norms that write FP8, casts that transpose, weights cast once a step).
Differs: a kernel of its own finds largest magnitudes, though compilers now and then fuse it with the op before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from cpsim.case.gpu import BLACKWELL, Gpu
from cpsim.case.parallel import Fp8
from cpsim.errors import InfeasibleError
from cpsim.models.gemm import FP8_RATE, FP8_SIGMA
from cpsim.prediction.step.layer import BF16, Collective, ElementwisePass, Gemm
from cpsim.prediction.step.program import LayerCode, Node, Nodes

FP8: Final = 1
"""Bytes of an element."""
FP8_NOTE: Final = (
    f"FP8 products: {FP8_RATE} x as fast along k as in bf16, by kernels measured on one H100 and published ones; "
    f"uncertain by {FP8_SIGMA:.0%}"
)
TRANSPOSE: Final = 2 * FP8
"""Bytes that a transpose in FP8 reads and writes for an element."""
BLOCK_SCALED: Final = (*BLACKWELL, "cdna4")
"""Architectures that multiply blocks of 32 elements with scales of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How linear layers compute in FP8. Bytes are read and written for an element of an operand."""

    name: Fp8
    kernel: str = "tensorwise"
    """Of products, a key of ``cpsim.models.gemm.FP8_KERNELS``."""
    kernel_back: str = "exact"
    """Of products of the backward pass, on Hopper."""
    casts: str = "copy"
    """Memory-bound kernel that casts are priced as."""
    largest: int = 0
    """To find the largest magnitude, before a cast."""
    cast: int
    """Of an input in the forward pass."""
    after_norm: int | None = None
    """The same of what a norm makes, beyond what the norm writes in bf16; None: as others."""
    kept: int
    """Of a kept input, transposed in the backward pass; 0 where the forward pass has made it."""
    gradient: int
    """Of the gradient of an output, in both layouts."""
    weight: int = 0
    """Of weights in every forward pass."""
    weight_back: int = 0
    """Of weights in every backward pass, transposed."""
    weight_step: int = 0
    """Of weights once a step, in both layouts."""
    scaled: int = 0
    """Of results of gradients' products, where scales are multiplied afterwards."""
    gathers: bool = True
    """Whether tensor-parallel ranks gather FP8."""
    shards: bool = False
    """Whether FSDP gathers weights in FP8, with scales that follow the optimizer's step."""
    saves: bool = False
    """Whether inputs are kept in FP8."""

    def on(self, gpu: Gpu) -> Recipe:
        """On a GPU; other tensor cores than Hopper's add up exactly at full speed."""
        exact = self.kernel_back == "exact" and gpu.architecture not in ("hopper", None)
        return replace(self, kernel_back="tensorwise") if exact else self

    def unsharded(self) -> Recipe:
        """Where every GPU has the weights in bf16."""
        if not self.shards:
            return self
        return replace(self, shards=False, weight=self.largest + self.cast, weight_back=self.cast)


TENSORWISE: Final = Recipe(
    name="tensorwise", largest=2, cast=3, kept=3, gradient=BF16 + 2 * FP8, weight_back=TRANSPOSE, shards=True
)
"""torchao's, with ``enable_fsdp_float8_all_gather`` and ``precompute_float8_dynamic_scale_for_fsdp``."""
ROWWISE: Final = Recipe(
    name="rowwise",
    kernel="rowwise",
    casts="fp8_cast_rows",
    cast=3,
    kept=4 + 3,
    gradient=5 + 3,
    weight=3,
    weight_back=4 + 3,
    scaled=4,
    gathers=False,
)
"""torchao's. Scales along the other axis take a transpose in bf16 and a cast; without fast accumulation, in the
backward pass, it multiplies by cuBLAS's kernels and scales afterwards."""
DELAYED: Final = Recipe(name="delayed", cast=4, after_norm=1, kept=0, gradient=4, weight_step=4, saves=True)
"""Transformer Engine's: scales of earlier steps, so that casts are one kernel and norms write FP8."""
CURRENT: Final = replace(DELAYED, name="current", largest=2, after_norm=None, weight_step=6)
"""Transformer Engine's: the largest magnitude first."""
MXFP8: Final = replace(DELAYED, name="mxfp8", kernel="mxfp8", kernel_back="mxfp8", after_norm=0)
"""Transformer Engine's: a scale for 32 elements."""
NVFP4: Final = replace(
    MXFP8,
    name="nvfp4",
    kernel="nvfp4",
    kernel_back="nvfp4",
    largest=2,
    cast=3,
    after_norm=None,
    gradient=3,
    weight_step=5,
)
"""Transformer Engine's: a scale for 16 elements and one for the tensor, whose largest magnitude comes first. What is
kept and gathered counts as in FP8."""
TORCH_RECIPES: Final[Mapping[str, Recipe]] = {one.name: one for one in (TENSORWISE, ROWWISE)}
ENGINE_RECIPES: Final[Mapping[str, Recipe]] = {one.name: one for one in (DELAYED, CURRENT, MXFP8, NVFP4)}


def check_gpu(recipe: Recipe, gpu: Gpu) -> None:
    """Whether a GPU multiplies like this.

    Raises:
        InfeasibleError: it cannot.
    """
    if not gpu.fp8_ratio:
        raise InfeasibleError(f"precision: {gpu.name} cannot multiply FP8; use bf16")
    if recipe.kernel in ("mxfp8", "nvfp4") and gpu.architecture not in BLOCK_SCALED:
        raise InfeasibleError(
            f"precision: {gpu.name} cannot multiply {recipe.kernel}, Blackwell can; use delayed or current"
        )


def in_fp8(code: LayerCode, tp: int, recipe: Recipe) -> LayerCode:
    """A layer in bf16 with linear layers in FP8.

    Args:
        code: of the layer, before its tensor-parallel communication is cut into chunks.
        tp: ranks that gather and scatter.
        recipe: how.
    """
    sizes = {name: nbytes // BF16 for node in (*code.forward, *code.backward) for name, nbytes in node.makes.items()}
    layer = _Layer(recipe, tp, sizes)
    forward = layer.forward(code.forward)
    backward = layer.backward(code.backward)
    return LayerCode(forward=forward, backward=backward, kept=kept_in_fp8(code.kept, backward))


def kept_in_fp8(kept: Collection[str], backward: Nodes) -> frozenset[str]:
    """Tensors that are kept, of those that are kept in bf16: what the backward pass reads of each, or either."""
    read = {name for node in backward for name in node.reads}
    found = set[str]()
    for name in kept:
        low = f"{name} fp8"
        found |= {one for one in (name, low) if one in read} or {name}
    return frozenset(found)


@dataclass(slots=True)
class _Layer:
    """Walks through both passes of a layer."""

    recipe: Recipe
    tp: int
    sizes: Mapping[str, int]
    """Elements of tensors, of which products of experts read parts."""
    made: set[str] = field(default_factory=set)
    """Tensors in FP8, by the names of those in bf16, and gathered ones by their own."""

    def forward(self, nodes: Nodes) -> Nodes:
        """Inputs are cast before their first product, or before they are gathered."""
        found, normed = list[Node](), {name for node in nodes if _norms(node) for name in node.makes}
        weights = self.recipe.weight
        for node in nodes:
            if self._gathered(node, nodes):
                source = node.reads[0]
                found += self._cast(source, _elements(node) // self.tp, source in normed, whole=False)
                found.append(self._gather(node))
            elif isinstance(node.what, Gemm) and not _routes(node):
                m, n, k = node.what.m, node.what.n, node.what.k
                source = node.reads[0]
                found += self._cast(source, self._all(source, m * k), source in normed)
                if weights:
                    made = f"weights of {next(iter(node.makes))} fp8"
                    each, times = node.what.times * n * k, node.what.times
                    found.append(Node(self._casts(weights * each), ("weights",), {made: FP8 * each}, calls=times))
                    node = replace(node, reads=(*node.reads, made))
                found.append(self._product(node, self.recipe.kernel, self._low(source)))
            else:
                found.append(node)
        return tuple(found)

    def backward(self, nodes: Nodes) -> Nodes:
        """Gradients are cast before their first product, or before they are gathered."""
        found, recipe = list[Node](), self.recipe
        for node in nodes:
            if self._gathered(node, nodes):
                source = node.reads[0]
                # what the forward pass has cast is kept, and gathered again
                found += self._to_fp8(source, _elements(node) // self.tp, recipe.gradient - FP8)
                found.append(self._gather(node))
            elif not isinstance(node.what, Gemm) or _routes(node):
                found.append(node)
            elif node.what.kind == "dgrad":
                found += self._input_gradient(node, node.what)
            else:
                found += self._weight_gradient(node, node.what)
        return tuple(found)

    def _input_gradient(self, node: Node, what: Gemm) -> Nodes:
        gradient, inputs, outputs = node.reads[0], what.n, what.k
        found = list(self._to_fp8(gradient, self._all(gradient, what.m * outputs), self.recipe.gradient))
        (made,) = node.makes
        if self.recipe.weight_back:
            turned, elements = f"weights of {made} turned", what.times * inputs * outputs
            pass_ = self._casts(self.recipe.weight_back * elements)
            found.append(Node(pass_, ("weights",), {turned: FP8 * elements}, calls=what.times))
            node = replace(node, reads=(*node.reads, turned))
        found.append(self._product(node, self.recipe.kernel_back, self._low(gradient)))
        return (*found, *self._scaled(node, what))

    def _weight_gradient(self, node: Node, what: Gemm) -> Nodes:
        gradient, kept = node.reads
        ours, theirs = self._all(gradient, what.m * what.k), self._all(kept, what.n * what.k)
        found = list(self._to_fp8(gradient, ours, self.recipe.gradient))
        found += self._turned(gradient, ours, TRANSPOSE) if gradient in self.made else ()
        if kept in self.made:  # gathered in FP8
            found += self._turned(kept, theirs, TRANSPOSE)
            operand = f"{kept} turned"
        elif self.recipe.saves:
            operand = f"{kept} fp8"
        else:
            found += self._turned(kept, theirs, self.recipe.kept)
            operand = f"{kept} turned"
        left = f"{gradient} turned" if f"{gradient} turned" in self.made else self._low(gradient)
        found.append(replace(node, what=replace(what, fp8=self.recipe.kernel_back), reads=(left, operand)))
        return (*found, *self._scaled(node, what))

    def _all(self, name: str, elements: int) -> int:
        """Elements of a tensor, of which a product reads so many."""
        return max(elements, self.sizes.get(name, 0))

    def _gathered(self, node: Node, nodes: Nodes) -> bool:
        """Whether that is gathered in FP8: what products alone read."""
        if not (self.recipe.gathers and isinstance(node.what, Collective) and node.what.kind == "all_gather"):
            return False
        users = [one for one in nodes if set(one.reads) & node.makes.keys()]
        return bool(users) and all(isinstance(one.what, Gemm) for one in users)

    def _gather(self, node: Node) -> Node:
        assert isinstance(node.what, Collective)
        self.made |= node.makes.keys()
        half = {name: nbytes // BF16 for name, nbytes in node.makes.items()}
        return replace(
            node,
            what=replace(node.what, nbytes=node.what.nbytes // BF16),
            reads=(self._low(node.reads[0]), *node.reads[1:]),
            makes=half,
        )

    def _casts(self, nbytes: int) -> ElementwisePass:
        return ElementwisePass(self.recipe.casts, nbytes)

    def _low(self, name: str) -> str:
        """The name of a tensor in FP8."""
        return f"{name} fp8" if f"{name} fp8" in self.made else name

    def _cast(self, source: str, elements: int, normed: bool, whole: bool = True) -> Nodes:
        """A cast of an input; what is gathered is transposed after the gather of the backward pass."""
        after, early = self.recipe.after_norm if normed else None, self.recipe.saves and not whole
        each = self.recipe.cast - FP8 * early if after is None else after - TRANSPOSE * early
        return self._to_fp8(source, elements, each)

    def _to_fp8(self, source: str, elements: int, each: int) -> Nodes:
        """A cast, once; before it the largest magnitude, of all ranks."""
        low = f"{source} fp8"
        if low in self.made or source in self.made:
            return ()
        self.made.add(low)
        if each <= 0:  # a norm has written it
            return (Node(None, (source,), {low: FP8 * elements}),)
        found, scale = list[Node](), f"{source} scale"
        if self.recipe.largest:
            found.append(Node(ElementwisePass("copy", self.recipe.largest * elements), (source,), {scale: 4}))
            if self.tp > 1:
                found.append(Node(Collective("all_reduce", 4), (scale,), {f"{scale} of all": 4}, "comm"))
                scale = f"{scale} of all"
        reads = (source, scale) if self.recipe.largest else (source,)
        found.append(Node(self._casts(each * elements), reads, {low: FP8 * elements}))
        return tuple(found)

    def _turned(self, source: str, elements: int, each: int) -> Nodes:
        """An operand with its axes changed, once."""
        turned = f"{source} turned"
        if turned in self.made or not each:
            return ()
        self.made.add(turned)
        return (Node(self._casts(each * elements), (source,), {turned: FP8 * elements}),)

    def _product(self, node: Node, kernel: str, source: str) -> Node:
        assert isinstance(node.what, Gemm)
        return replace(node, what=replace(node.what, fp8=kernel), reads=(source, *node.reads[1:]))

    def _scaled(self, node: Node, what: Gemm) -> Nodes:
        """Scales that are multiplied after a product of the backward pass."""
        nbytes = self.recipe.scaled * what.times * what.m * what.n
        pass_ = ElementwisePass("copy", nbytes)
        return (Node(pass_, tuple(node.makes), dict(node.makes), calls=what.times),) if nbytes else ()


def _routes(node: Node) -> bool:
    """Whether it is a product of a router, which stays in the working type."""
    return "router" in node.makes or "drouter" in node.reads


def _norms(node: Node) -> bool:
    return isinstance(node.what, ElementwisePass) and node.what.kind.startswith("rms_norm")


def _elements(node: Node) -> int:
    """Of what is gathered, in bf16."""
    assert isinstance(node.what, Collective)
    return node.what.nbytes // BF16
