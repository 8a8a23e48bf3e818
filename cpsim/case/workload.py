"""The attention problem of one case: documents, mask and attention shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from cpsim.case.sparse import Sparse
from cpsim.errors import ScenarioError
from cpsim.masks.names import Options

if TYPE_CHECKING:
    from cpsim.masks.slices import Slices

BYTES_PER_ELEMENT: Final = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
LSE_BYTES: Final = 4
"""Log-sum-exp of one row and head, fp32."""


LATENT: Final = (576, 512)
"""Elements of keys, and of values that are a part of them, in absorbed multi-head latent attention.

Source: flash-attn 3, hopper/flash_api.cpp (``qv``: queries of 512 elements more, forward alone); FlashMLA at 9241ae3,
README (dense decoding and sparse prefill, forward alone; prefill of 192 and 128 elements on Blackwell). No package that
was read has a backward pass of dense attention to latents.
"""


def mean_head_bytes(head_dim: int, value_dim: int, dtype: str) -> int:
    """Bytes of one head of one token, of keys and values in the mean."""
    values = 0 if (head_dim, value_dim) == LATENT else value_dim or head_dim
    return (head_dim + values) * BYTES_PER_ELEMENT[dtype] // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Self-attention over packed documents, all heads, before anything is sharded."""

    documents: tuple[int, ...]
    """Document lengths in packing order [tokens]; without documents, one of all tokens."""
    mask: str
    """A key of ``cpsim.masks.names.MASK_NAMES``."""
    mask_options: Options = ()
    """Options of the mask that differ from its defaults."""
    num_heads: int
    num_kv_heads: int
    """A divisor of ``num_heads``."""
    head_dim: int
    """Elements per head of queries and keys."""
    value_dim: int = 0
    """Elements per head of values and outputs; 0: as many."""
    dtype: str
    """Element type of Q, K, V and O: a key of ``BYTES_PER_ELEMENT``."""
    padding: tuple[int, ...] = ()
    """Tokens behind every document that see nothing and are not seen, which some people's code adds; empty: none."""
    cached: int = 0
    """First tokens of all, whose keys and values are there from before: others see them, but they have no queries."""
    sinks: bool = False
    """Every head has a sink, a learned logit that joins the denominators of its softmax and has no value."""
    head_groups: int = 1
    """Times that all tokens are counted, once for every group of heads, where groups are apart; see ``by_group``."""
    groups_per_kv: int = 1
    """Head groups, one after the other, that see the keys of the first of them."""
    sparse: Sparse | None = None
    """How every query chooses among the keys that the mask shows it; None: it sees all of them."""

    def __post_init__(self) -> None:
        if not self.documents or min(self.documents) < 1:
            raise ScenarioError("documents: expected at least one document of at least one token")
        assert len(self.padding) in (0, len(self.documents))
        if not 0 <= self.cached < sum(self.documents):
            raise ScenarioError(f"cached: expected fewer than all {sum(self.documents)} tokens, got {self.cached}")
        if min(self.num_heads, self.num_kv_heads, self.head_dim, self.values) < 1 or self.num_heads % self.num_kv_heads:
            raise ScenarioError(f"kv_heads: expected a divisor of heads = {self.num_heads}, got {self.num_kv_heads}")
        if self.sparse is not None:
            self._check_sparse(self.sparse)
        if self.dtype not in BYTES_PER_ELEMENT:
            raise ScenarioError(f"dtype: expected one of {', '.join(BYTES_PER_ELEMENT)}, got {self.dtype!r}")

    def _check_sparse(self, sparse: Sparse) -> None:
        if self.mask not in ("causal", "causal_document"):
            raise ScenarioError(f"sparse: queries choose under causal or causal_document masks, got mask {self.mask}")
        if self.sinks:
            raise ScenarioError("sparse: kernels of chosen keys were read without sinks; leave sinks or sparse out")
        if self.cached:
            raise ScenarioError(f"sparse: expected no cached tokens, got {self.cached}; leave cached out")
        if sparse.latent and (self.num_kv_heads != 1 or self.values > self.head_dim):
            raise ScenarioError(
                f"sparse: dsa chooses latents, one for all heads, e.g. heads: 128, kv_heads: 1, head_dim: 576, "
                f"value_dim: 512; got {self.num_kv_heads} kv_heads of {self.head_dim} with values of {self.values}"
            )

    @property
    def num_tokens(self) -> int:
        """Total tokens of all documents, padding included, of all head groups."""
        return self.head_groups * (sum(self.documents) + sum(self.padding))

    def by_group(self, head_groups: int) -> Workload:
        """This problem with heads in groups, one group's tokens after the other's: token t of group g is token
        ``g * num_tokens + t``, and heads are those of one group. Groups that share a key-value head see the keys of the
        first of them.
        """
        if head_groups == 1:
            return self
        heads, kv_heads = self.num_heads // head_groups, max(1, self.num_kv_heads // head_groups)
        shared = max(1, head_groups // self.num_kv_heads)
        return replace(self, num_heads=heads, num_kv_heads=kv_heads, head_groups=head_groups, groups_per_kv=shared)

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one element of Q, K, V or O."""
        return BYTES_PER_ELEMENT[self.dtype]

    def slices(self, stride: int = 1) -> Slices:
        """The mask as slices of tokens, or of positions in the order of a stride; see ``cpsim.masks.stripes``.

        Raises:
            ScenarioError: the mask or one of its options is unknown, or a value is not allowed.
        """
        from cpsim.masks.shapes import mask_slices, moved_apart, repeated  # numba: 0.3 s that scenarios need not pay
        from cpsim.masks.stripes import striped

        mask = mask_slices(self.mask, self.documents, self.mask_options)
        if self.cached:
            mask = mask.from_query(self.cached)
        if self.padding:
            mask = moved_apart(mask, self.documents, self.padding)
        if self.head_groups > 1:
            mask = repeated(mask, self.head_groups, self.num_tokens // self.head_groups, self.groups_per_kv)
        return mask if stride == 1 else striped(mask, self.num_tokens, stride)

    def area(self) -> int:
        """Unmasked (query, key) pairs of one head, exact."""
        return int(self.slices().areas().sum())

    def flops(self, pass_: Literal["fwd", "bwd"]) -> float:
        """Model FLOP of one pass over all heads.

        Forward: 4 * area * num_heads * head_dim (two products of two FLOP per pair and element, one over the elements
        of keys, one over those of values). Backward: 2.5 times that (three products and two). Of chosen keys
        alone, what choosing takes not counted.

        Reference: Dao, FlashAttention-2 (2023), section 4.1. Differs: exact mask area, not half, for causal.
        """
        of_keys, of_values = (2, 2) if pass_ == "fwd" else (6, 4)
        elements = of_keys * self.head_dim + of_values * self.values
        return float((self.area() if self.sparse is None else self.pairs()) * self.num_heads * elements)

    def pairs(self) -> int:
        """(query, key) pairs of one head that are attended to: unmasked and, where keys are chosen, chosen ones."""
        if self.sparse is None:
            return self.area()
        lengths = np.array(self.documents if self.mask == "causal_document" else (self.num_tokens,))
        return int(self.sparse.attended(np.zeros_like(lengths), lengths).sum())

    @property
    def kv_elements(self) -> int:
        """Elements of a key and its value, which may be a part of it."""
        latent = (self.sparse is not None and self.sparse.latent) or (self.head_dim, self.value_dim) == LATENT
        return self.head_dim + (0 if latent else self.values)

    @property
    def values(self) -> int:
        """Elements per head of values and outputs."""
        return self.value_dim or self.head_dim
