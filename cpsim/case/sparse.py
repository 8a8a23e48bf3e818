"""Sparse attention in which every query chooses its keys: which patterns there are, and how many pairs each one has.

Which keys are chosen depends on data; how many does not. Every query takes as many as the pattern allows and its
causal mask leaves, so that areas are exact. What a rank wants of another's keys is an expectation, under one
assumption: queries that lie beside each other, ``alike`` of them, choose the same, and others choose independently and
evenly among what they see.

Reference: DeepSeek-V3.2 (arXiv 2512.02556, section 2.1; ``dsa``), NSA (arXiv 2502.11089, section 3; ``nsa``), MoBA
(arXiv 2502.13189, section 2.2; ``moba``), MInference (arXiv 2407.02490, section 3.2; ``blocks``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsim.errors import nearest, shown

Ints = NDArray[np.int64]
Pattern = Literal["dsa", "nsa", "moba", "blocks"]
PAGE: Final = 64
"""Fewest keys that travel together where chosen ones are fetched [tokens]."""
INDEX_BYTES: Final = 4
"""Of the number of a chosen key or block."""
MOST: Final = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """One pattern; tokens count from the start of their document."""

    kind: Pattern
    top_k: int
    """Keys (``dsa``) or blocks, a query's own among them, that it attends to."""
    block: int = 1
    """Keys of a block."""
    stride: int = 0
    """``nsa``: tokens for each compressed key, to which every query after them attends."""
    window: int = 0
    """``nsa``: keys that a query sees besides, its own among them."""
    index_heads: int = 0
    index_dim: int = 0
    """``dsa``: heads and elements of the indexer, which has one key for all heads."""
    alike: int = PAGE
    """Queries beside each other that choose the same; assumed, not measured."""

    @property
    def scores(self) -> bool:
        """Whether queries are scored against candidates; a list of blocks is there before."""
        return self.kind != "blocks"

    @property
    def latent(self) -> bool:
        """Values are the first elements of keys, as in absorbed multi-head latent attention."""
        return self.kind == "dsa"

    def choosers(self, num_heads: int, num_kv_heads: int) -> int:
        """Heads that choose for themselves: none with an indexer, groups in ``nsa``, all in others."""
        return {"dsa": 1, "nsa": num_kv_heads}.get(self.kind, num_heads)

    def candidate_bytes(self, tokens: ArrayLike, num_kv_heads: int, key: int, value: int, element: int) -> Ints:
        """Bytes that queries elsewhere need for their scores: the indexer's keys, compressed keys and values, or means
        of blocks of keys.

        Args:
            tokens: whose.
            num_kv_heads, key, value: heads, elements of a key and of a value.
            element: bytes.
        """
        per, step = {
            "dsa": (self.index_dim, 1),
            "nsa": (num_kv_heads * (key + value), self.stride),
            "moba": (num_kv_heads * key, self.block),
            "blocks": (0, 1),
        }[self.kind]
        return np.asarray(-(-np.asarray(tokens, np.int64) // step) * per * element)

    def choice_bytes(self, num_heads: int, num_kv_heads: int) -> int:
        """Bytes of one query's choice."""
        return self.top_k * self.choosers(num_heads, num_kv_heads) * INDEX_BYTES if self.scores else 0

    def attended(self, first: ArrayLike, end: ArrayLike) -> Ints:
        """Pairs of queries ``first`` to ``end`` and the keys that they attend to, compressed ones not counted."""
        return self._attended_before(end) - self._attended_before(first)

    def _attended_before(self, count: ArrayLike) -> Ints:
        n = np.asarray(count, np.int64)
        if self.kind == "dsa":
            return _ramp(n, self.top_k)
        blocks, rest = np.divmod(n, self.block)
        own = blocks * (self.block * (self.block + 1) // 2) + rest * (rest + 1) // 2
        most = self.top_k - 1
        whole = self.block * _ramp(blocks - 1, most) + rest * np.minimum(blocks, most)
        return np.asarray(own + self.block * whole + (_ramp(n, self.window) if self.window else 0))

    def windowed(self, first: ArrayLike, end: ArrayLike) -> Ints:
        """Those of the attended pairs that lie in the window."""
        return _ramp(end, self.window) - _ramp(first, self.window)

    def scored(self, first: ArrayLike, end: ArrayLike) -> Ints:
        """Pairs of queries ``first`` to ``end`` and candidates: keys, compressed keys, or earlier blocks."""
        return self._scored_before(end) - self._scored_before(first)

    def _scored_before(self, count: ArrayLike) -> Ints:
        n = np.asarray(count, np.int64)
        match self.kind:
            case "dsa":
                return np.asarray(n * (n + 1) // 2)
            case "nsa":  # those that end with the query or before it
                return _steps(n + 1, self.stride)
            case "moba":
                return _steps(n, self.block)
        return np.zeros_like(n)

    def chances(self, first: Ints, end: Ints, choosers: int) -> NDArray[np.float64]:
        """How likely each unit of keys of a document is wanted by some query of a rank.

        Args:
            first, end: ranges of the rank's queries in the document.
            choosers: heads that choose for themselves among the same keys.

        Returns:
            ``[units]`` up to the last query: units of a block, or of a page where blocks are smaller.
        """
        units = -(-int(end.max(initial=0)) // self.unit)
        missed = np.zeros(units + 1)  # logarithm of the chance that nobody of the queries up to here wants it
        at = np.concatenate([np.arange(a, b, self.alike) for a, b in zip(first.tolist(), end.tolist(), strict=True)])
        took = np.minimum(self.alike, end[np.searchsorted(first, at, side="right") - 1] - at) / self.alike
        before = at // self.block
        one = np.minimum(1.0, (self.top_k - (self.block > 1)) / np.maximum(before, 1))
        per_unit = self.unit // self.block
        with np.errstate(divide="ignore"):
            log = np.log1p(-np.minimum(one, 1 - 1e-15)) * choosers * per_unit * took
        np.add.at(missed, np.minimum(at // self.unit, units), log)
        reach = np.cumsum(missed[::-1])[::-1]
        wanted = -np.expm1(reach[1:])  # of a unit, by queries of later ones
        low = np.arange(units) * self.unit
        for a, b in zip(first.tolist(), end.tolist(), strict=True):  # its own, and the window before
            wanted[(low < b) & (low + self.unit > a - max(self.window - 1, 0))] = 1.0
        return wanted

    @property
    def unit(self) -> int:
        """Keys that are wanted together [tokens]."""
        return max(self.block, PAGE)


def _ramp(count: ArrayLike, most: int) -> Ints:
    """Sum of min(i, most) over i = 1 .. count."""
    n = np.maximum(np.asarray(count, np.int64), 0)
    low = np.minimum(n, most)
    return np.asarray(low * (low + 1) // 2 + (n - low) * most)


def _steps(count: ArrayLike, step: int) -> Ints:
    """Sum of i // step over i = 0 .. count - 1."""
    blocks, rest = np.divmod(np.asarray(count, np.int64), step)
    return np.asarray(step * (blocks * (blocks - 1) // 2) + rest * blocks)


PATTERNS: Final[Mapping[str, Sparse]] = {
    "dsa": Sparse(kind="dsa", top_k=2048, index_heads=64, index_dim=128),
    "nsa": Sparse(kind="nsa", top_k=16, block=64, stride=16, window=512),
    "moba": Sparse(kind="moba", top_k=3, block=512),
    "blocks": Sparse(kind="blocks", top_k=16, block=128),
}
"""As their papers have them: NSA and MoBA of the models that were trained (sections 4.1 and 3.1)."""
_OWN: Final = {
    "dsa": ("top_k", "index_heads", "index_dim", "alike"),
    "nsa": ("top_k", "block", "stride", "window", "alike"),
    "moba": ("top_k", "block", "alike"),
    "blocks": ("top_k", "block", "alike"),
}
"""Fields of each pattern."""


def read_sparse(value: object) -> Sparse:
    """A pattern from its name, or a mapping with ``kind`` and the fields that differ from its paper's.

    Raises:
        ValueError: one line that names the field and what was expected.
    """
    if isinstance(value, Sparse):
        return value
    given: dict[str, Any] = {"kind": value} if not isinstance(value, Mapping) else dict(value)
    kind = given.pop("kind", None)
    if kind not in PATTERNS:
        close = nearest(kind, PATTERNS) if isinstance(kind, str) else f"expected {', '.join(PATTERNS)}"
        raise ValueError(f"kind: expected one of {', '.join(PATTERNS)}, got {shown(kind)}; {close}")
    for name, number in given.items():
        if name not in _OWN[kind] and number == getattr(PATTERNS[str(kind)], name, None):
            continue
        if name not in _OWN[kind]:
            raise ValueError(f"{shown(name)}: {kind} has {', '.join(_OWN[kind])}")
        if type(number) is not int or not 1 <= number <= MOST:
            raise ValueError(f"{name}: expected a whole number from 1 to {MOST}, got {shown(number)}")
    return replace(PATTERNS[str(kind)], **given)


def written(sparse: Sparse) -> dict[str, Any]:
    """The mapping that ``read_sparse`` reads, without what is the paper's."""
    usual = PATTERNS[sparse.kind]
    own = {f.name: getattr(sparse, f.name) for f in fields(sparse) if f.name in _OWN[sparse.kind]}
    return {"kind": sparse.kind, **{name: n for name, n in own.items() if n != asdict(usual)[name]}}
