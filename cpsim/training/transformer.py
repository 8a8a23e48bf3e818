"""One transformer layer op by op: which tensors every op reads and writes, for schedules, prices and the executor.

Tensors of tokens have a row for every token, weights ``[out, in]`` one for every output; rows are heads of ``head_dim``
elements side by side. Attention itself is a strategy's: it reads ``q`` and ``kv`` and makes ``out``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from cpsim.training.layer import OP_BYTES
from cpsim.training.model import Model

LayerKind = Literal["forward", "dgrad", "wgrad", "rms_norm", "rms_norm_bwd", "rotary", "swiglu", "swiglu_bwd", "add"]
PRODUCTS: Final = ("forward", "dgrad", "wgrad")


@dataclass(frozen=True, slots=True)
class LayerOp:
    """One op: products as ``Gemm.kind`` names them, others as ``OP_BYTES`` does."""

    kind: LayerKind
    reads: tuple[str, ...]
    """Of a product: what has the rows of the result, or of ``wgrad`` the gradient, first."""
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


def widths(model: Model) -> dict[str, int]:
    """Heads of ``head_dim`` elements in a row of every tensor of tokens; of ``kv`` and ``dkv`` those of keys alone."""
    hidden, inner = model.hidden // model.head_dim, model.ffn // model.head_dim
    found = dict.fromkeys(("x", "x norm", "proj", "h", "h norm", "down", "y"), hidden)
    found |= {"q": model.heads, "out": model.heads, "kv": model.kv_heads, "qkv": model.heads + 2 * model.kv_heads}
    found |= {"gate up": 2 * inner, "swiglu": inner, "x part": hidden, "h part": hidden}
    return found | {f"d{name}": width for name, width in found.items()}


def weights(model: Model) -> dict[str, tuple[int, int]]:
    """Rows, and heads of ``head_dim`` elements in a row, of every weight."""
    names = {"qkv": "w qkv", "proj": "w proj", "gate_up": "w gate up", "down": "w down"}
    linear = {names[name]: (outer, inner // model.head_dim) for name, (inner, outer) in model.linears(1).items()}
    return linear | dict.fromkeys(("w attention norm", "w mlp norm"), (1, model.hidden // model.head_dim))


TENSORS: Final = frozenset(
    name for side in (BEFORE, AFTER) for ops in side.values() for op in ops for name in (*op.reads, *op.writes)
) - {"q", "kv", "out", "dq", "dkv", "dout"}
"""All that attention knows nothing of."""
WEIGHTS: Final = frozenset(name for name in TENSORS if name.startswith("w "))
