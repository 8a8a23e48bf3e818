"""One transformer layer op by op: which tensors every op reads and writes, for schedules, prices and the executor.

Tensors of tokens have a row for every token, weights ``[out, in]`` one for every output; rows are heads of ``head_dim``
elements side by side. Attention itself is a strategy's: it reads ``q`` and ``kv`` and makes ``out``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

OP_BYTES: Final = {
    "rms_norm": 4,
    "rms_norm_bwd": 6,
    "rotary": 4,
    "swiglu": 6,
    "swiglu_bwd": 10,
    "add": 6,
    "cross_entropy": 2,
    "cross_entropy_bwd": 4,
    "embedding": 4,
    "embedding_bwd": 4,
    "adam": 30,
    "norm": 4,
}
"""Bytes that a memory-bound op reads and writes at least, per element: of its output; of the logits; of the
parameters."""

LayerKind = Literal["forward", "dgrad", "wgrad", "rms_norm", "rms_norm_bwd", "rotary", "swiglu", "swiglu_bwd", "add"]
PRODUCTS: Final = ("forward", "dgrad", "wgrad")


@dataclass(frozen=True, slots=True)
class LayerOp:
    """One op: products as ``Gemm.kind`` names them, others as ``OP_BYTES`` does."""

    kind: LayerKind
    reads: tuple[str, ...]
    """Tensors that it reads: a product first what has the rows of its result, ``wgrad`` first the gradient."""
    writes: tuple[str, ...]
    """The last one of ``wgrad`` and ``rms_norm_bwd`` is a gradient of weights, summed over tokens."""

    def nbytes(self, elements: int) -> int:
        """Read and written by a memory-bound op with so many elements of its first result."""
        return OP_BYTES[self.kind] * elements // (2 if self.kind == "swiglu_bwd" else 1)  # OP_BYTES: of SwiGLU's output


BEFORE: Final = {
    "fwd": (
        LayerOp("rms_norm", ("x", "w attention norm"), ("x norm",)),
        LayerOp("forward", ("x norm", "w qkv"), ("qkv",)),
        LayerOp("rotary", ("qkv",), ("q", "kv")),
    ),
    "bwd": (
        LayerOp("dgrad", ("dy", "w down"), ("dswiglu",)),
        LayerOp("wgrad", ("dy", "swiglu"), ("dw down",)),
        LayerOp("swiglu_bwd", ("dswiglu", "gate up"), ("dgate up",)),
        LayerOp("dgrad", ("dgate up", "w gate up"), ("dh norm",)),
        LayerOp("wgrad", ("dgate up", "h norm"), ("dw gate up",)),
        LayerOp("rms_norm_bwd", ("dh norm", "h", "w mlp norm"), ("dh part", "dw mlp norm")),
        LayerOp("add", ("dy", "dh part"), ("dh",)),
        LayerOp("dgrad", ("dh", "w proj"), ("dout",)),
        LayerOp("wgrad", ("dh", "out"), ("dw proj",)),
    ),
}
"""By pass: what comes before attention."""
AFTER: Final = {
    "fwd": (
        LayerOp("forward", ("out", "w proj"), ("proj",)),
        LayerOp("add", ("x", "proj"), ("h",)),
        LayerOp("rms_norm", ("h", "w mlp norm"), ("h norm",)),
        LayerOp("forward", ("h norm", "w gate up"), ("gate up",)),
        LayerOp("swiglu", ("gate up",), ("swiglu",)),
        LayerOp("forward", ("swiglu", "w down"), ("down",)),
        LayerOp("add", ("h", "down"), ("y",)),
    ),
    "bwd": (
        LayerOp("rotary", ("dq", "dkv"), ("dqkv",)),
        LayerOp("dgrad", ("dqkv", "w qkv"), ("dx norm",)),
        LayerOp("wgrad", ("dqkv", "x norm"), ("dw qkv",)),
        LayerOp("rms_norm_bwd", ("dx norm", "x", "w attention norm"), ("dx part", "dw attention norm")),
        LayerOp("add", ("dh", "dx part"), ("dx",)),
    ),
}
"""By pass: what comes after attention."""
MAKER: Final = {op.writes[0]: op for side in (BEFORE, AFTER) for ops in side.values() for op in ops}
"""The op that makes a tensor its first result."""
GIVEN: Final = {"fwd": ("x",), "bwd": ("dy",)}
"""By pass: what a layer is given beside weights and what it has kept."""
KEPT: Final = ("x", "x norm", "q", "kv", "out", "h", "h norm", "gate up", "swiglu")
"""For the backward pass, ``out`` with its log-sum-exp."""
RESULT: Final = {"fwd": "y", "bwd": "dx"}
ACROSS: Final = ("dh",)
"""Made before attention and read after it."""


TENSORS: Final = frozenset(
    name for side in (BEFORE, AFTER) for ops in side.values() for op in ops for name in (*op.reads, *op.writes)
) - {"q", "kv", "out", "dq", "dkv", "dout"}
"""All that attention knows nothing of."""
WEIGHTS: Final = frozenset(name for name in TENSORS if name.startswith("w "))
