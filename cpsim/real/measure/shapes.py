"""Random attention calls as context-parallel strategies make them, and which of them to measure first. No torch."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cpsim.masks.blocks import sequence_slices
from cpsim.masks.shapes import mask_slices
from cpsim.masks.slices import RangeSets, Slices, sets_of
from cpsim.masks.tiles import make_tiles, share_of
from cpsim.strategies import sharding

HEADS = ((32, 8), (64, 8), (8, 2), (4, 1), (16, 4), (8, 1), (8, 8), (32, 32), (1, 1))
HEADS_OF_4 = ((32, 8), (64, 16), (8, 2), (4, 1))
"""Query and key heads at other head dimensions: one ratio of heads, because flash-attn 4 is compiled for each."""
_HEAD_WEIGHTS = np.array((6, 5, 3, 4, 2, 2, 2, 1, 1)) / 26
HEAD_DIM = 128


def causal_pairs(num_q: int, num_k: int) -> int:
    """Pairs of a query and a key that it sees, where the last query's own key is the last one."""
    seeing = min(num_q, num_k)
    return seeing * num_k - seeing * (seeing - 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One attention kernel call."""

    family: str
    num_heads: int
    num_kv_heads: int
    causal: bool
    varlen: bool
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    head_dim: int = HEAD_DIM
    value_dim: int = 0
    """Head dimension of values and outputs; 0: that of queries and keys."""
    window: tuple[int, int] | None = None
    """Keys before and after a query's own that it sees; see `cpsim.real.run.attention.Call`. None: as `causal` says."""
    mask: str = ""
    """A name, over documents of `q_lens` tokens; without one, sequences are full or causal."""
    options: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Options of the mask."""
    documents: tuple[int, ...] = ()
    """Documents of a mask of which the call is a share; `q_lens` and `k_lens` then count the queries and keys of the
    share."""
    q_ranges: tuple[tuple[int, int], ...] = ()
    k_ranges: tuple[tuple[int, int], ...] = ()
    """Tokens of the share."""

    def slices(self) -> Slices | None:
        """The mask, where it has a name."""
        if not self.mask:
            return None
        mask = mask_slices(self.mask, self.documents or self.q_lens, self.options)
        return share_of(mask, self.q_ranges, self.k_ranges) if self.documents else mask

    def area(self) -> int:
        """Unmasked pairs, exact."""
        if (slices := self.slices()) is not None:
            return int(slices.areas().sum())
        if self.window is None:
            pairs = causal_pairs if self.causal else operator.mul
            return sum(map(pairs, self.q_lens, self.k_lens))
        windows = np.array([self.window] * len(self.q_lens))
        return int(sequence_slices(np.array(self.q_lens), np.array(self.k_lens), windows).areas().sum())

    def flops(self) -> float:
        """FLOP of the forward pass on the exact mask area."""
        return 2.0 * self.area() * self.num_heads * (self.head_dim + (self.value_dim or self.head_dim))

    def parameters(self) -> dict[str, Any]:
        """As measurement files describe a call."""
        named = {"mask": self.mask, "options": dict(self.options), "area": self.area()} if self.mask else {}
        share = {name: getattr(self, name) for name in ("documents", "q_ranges", "k_ranges") if self.documents}
        share |= {"value_dim": self.value_dim} if self.value_dim else {}
        share |= {"window": list(self.window), "area": self.area()} if self.window else {}
        return {
            "family": self.family,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "causal": self.causal,
            "varlen": self.varlen,
            "q_lens": list(self.q_lens),
            "k_lens": list(self.k_lens),
            **named,
            **share,
        }


FAMILIES = {
    "causal": 4,
    "full": 3,
    "gathered": 3,
    "short": 1,
    "one_varlen": 1,
    "equal": 2,
    "heavy_tail": 4,
    "ring_documents": 4,
    "gathered_documents": 1,
}
"""Weights of families of calls."""
OF_ONE_SEQUENCE = ("causal", "full", "short")
"""Families that kernels without lengths of sequences run."""


def draw(
    rng: np.random.Generator,
    max_flops: float,
    dense_only: bool = False,
    head_dim: int = HEAD_DIM,
    families: Sequence[str] = (),
) -> Shape:
    """One shape of a random family, or of one of `families`, its forward pass at most `max_flops`."""
    if unknown := [name for name in families if name not in FAMILIES]:
        raise ValueError(f"expected families among {', '.join(FAMILIES)}, got {', '.join(unknown)}")
    chosen = OF_ONE_SEQUENCE if dense_only else FAMILIES
    names = [name for name in families or FAMILIES if name in chosen]
    weights = np.array([FAMILIES[name] for name in names], float)
    while True:
        shape = _DRAW[str(rng.choice(names, p=weights / weights.sum()))](rng)
        if head_dim != HEAD_DIM:
            num_heads, num_kv_heads = HEADS_OF_4[rng.integers(len(HEADS_OF_4))]
            shape = replace(shape, head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
        if shape.flops() <= max_flops:
            return shape


MASKED_HEADS = ((64, 8), (32, 8), (8, 1), (16, 16))
"""Heads of calls with any mask: few, because FlexAttention is compiled for each."""
_MASKED_HEADS_WEIGHTS = np.array((5, 2, 2, 1)) / 10
MASKED = {
    "causal": 2,
    "full": 1,
    "rectangle": 3,
    "full_document": 2,
    "causal_document": 4,
    "full_sliding_window": 1,
    "causal_sliding_window": 2,
    "shared_question": 2,
    "shared_question_document": 1,
    "causal_blockwise": 2,
    "causal_blockwise_document": 1,
    "prefix_lm_causal": 1,
    "prefix_lm_document": 1,
    "block_causal_document": 2,
    "lambda": 2,
    "global_sliding": 1,
    "block_sparse": 6,
    "variable_block_sparse": 4,
}
"""Weights of masks, and of rectangles as all-gathers and rings make them."""
DRAWS = 500
"""Draws of masks until one is small enough."""


def draw_masked(
    rng: np.random.Generator,
    max_flops: float,
    names: Sequence[str] = (),
    *,
    whole_blocks: bool = False,
    naive: bool = False,
    shares: bool = False,
    head_dim: int = HEAD_DIM,
) -> Shape:
    """One shape of a random mask, its forward pass at most `max_flops`: of the mask, or, naively, of all pairs.

    `names` are those of MASKED to draw from, by default all; `whole_blocks` asks for masks of whole blocks of 128
    tokens, `shares` for what one rank of several computes of a mask at a time.
    """
    if unknown := [name for name in names if name not in MASKED]:
        raise ValueError(f"expected masks among {', '.join(MASKED)}, got {', '.join(unknown)}")
    names = [name for name in names or MASKED if not whole_blocks or name.endswith("block_sparse")]
    names = [name for name in names if not shares or name != "rectangle"]
    weights = np.array([MASKED[name] for name in names], float)
    for _ in range(DRAWS):
        name = str(rng.choice(names, p=weights / weights.sum()))
        shape = replace(_masked(rng, name, whole_blocks), head_dim=head_dim)
        shape = _share(rng, shape) if shares else shape
        pairs = sum(shape.q_lens) * sum(shape.k_lens) if naive else shape.area()
        if 0 < 4 * pairs * shape.num_heads * shape.head_dim <= max_flops:
            return shape
    raise ValueError(f"none of {DRAWS} random masks of {', '.join(names)} has at most {max_flops:g} FLOP")


def _masked(rng: np.random.Generator, name: str, whole_blocks: bool) -> Shape:
    """Sizes that blocks of 128 tokens do not divide are for one number of heads only."""
    num_heads, num_kv_heads = MASKED_HEADS[rng.choice(len(MASKED_HEADS), p=_MASKED_HEADS_WEIGHTS)]
    if whole_blocks:
        num_heads, num_kv_heads = MASKED_HEADS[rng.integers(3)]
    step = 1 if num_heads == 64 and rng.random() < 0.25 and not whole_blocks else 128
    sparse = name.endswith("block_sparse")
    total = max(step, round(float(np.exp(rng.uniform(np.log(8192 if sparse else 1024), np.log(65536)))) / step) * step)
    heads: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "varlen": False}
    if name == "rectangle":
        q = max(step, round(total / 2 ** rng.uniform(0, 5) / step) * step)
        return Shape(family=name, q_lens=(q,), k_lens=(total,), causal=bool(rng.random() < 0.5), **heads)
    lens: tuple[int, ...] = (total,)
    if "document" in name or (rng.random() < 0.3 and not sparse):
        lens = tuple(_documents(rng, total, _log_uniform(rng, 256, total / 2)))
    options: dict[str, float] = {}
    if sparse:
        blocks = (128, 256, 512) if whole_blocks else (64, 128, 256)
        options = {"density": float(rng.choice((0.1, 0.2, 0.35, 0.5, 0.8))), "seed": int(rng.integers(1000))}
        options["block"] = int(rng.choice(blocks if name == "block_sparse" else (128, 256, 512, 1024)))
        if whole_blocks and name == "variable_block_sparse":
            options["align"] = 128
    elif name == "global_sliding":
        options = {"window": int(rng.integers(128, total // 4))}
    return Shape(family=name, q_lens=lens, k_lens=lens, causal=False, mask=name, options=options, **heads)


def _share(rng: np.random.Generator, shape: Shape) -> Shape:
    """What one rank of 2 to 8 computes of a mask at a time; it may be nothing.

    Its two zigzag chunks of queries with all keys that these see, as after an all-gather, or with the chunks of a
    rank, as on a step of a ring; or some blocks of 1024 queries with some of keys, as planners place them.
    """
    total, num_ranks = sum(shape.q_lens), int(2 ** rng.integers(1, 4))
    by_block = rng.random() < 0.3
    num_cells = -(-total // 1024) if by_block else 2 * num_ranks
    edges = np.arange(num_cells + 1) * total // num_cells
    edges[1:-1] -= edges[1:-1] % 64
    if by_block:
        cells = rng.permuted(np.tile(np.arange(num_cells) < -(-num_cells // num_ranks), (2, 1)), axis=1)
    else:
        rank = rng.integers(num_ranks, size=2)[:, None]
        cells = (np.arange(num_cells) == rank) | (np.arange(num_cells) == num_cells - 1 - rank)
    sets = sets_of(cells, edges)
    q, k = sets.of(0), sets.of(1)
    if not by_block and rng.random() < 0.5 and (mask := shape.slices()) is not None:
        every = RangeSets(np.array([0, len(q), len(q) + 1]), np.concatenate([q, [[0, total]]]))
        k = sharding.seen_keys(make_tiles(mask, every, [0], [1]), 1).of(0)
    lens = [(int((ranges[:, 1] - ranges[:, 0]).sum()),) for ranges in (q, k)]
    listed = [tuple((int(a), int(b)) for a, b in ranges) for ranges in (q, k)]
    return replace(
        shape, documents=shape.q_lens, q_lens=lens[0], k_lens=lens[1], q_ranges=listed[0], k_ranges=listed[1]
    )


def listed_masks() -> list[Shape]:
    """What LongCA-bench and MagiAttention print of FlexAttention: full and causal, block-sparse at 16k; 64:8 heads."""
    heads: dict[str, Any] = {"num_heads": 64, "num_kv_heads": 8, "causal": False, "varlen": False}
    shapes = [
        Shape(family=mask, mask=mask, q_lens=(n,), k_lens=(n,), **heads)
        for n in (8192, 1024, 16384, 4096, 32768, 2048)
        for mask in ("causal", "full")
    ]
    for block, density in ((128, 0.2), (64, 0.2), (128, 0.8), (64, 0.8), (128, 0.5), (64, 0.5)):
        options = {"block": block, "density": density}
        shapes.append(
            Shape(
                family="block_sparse", mask="block_sparse", q_lens=(16384,), k_lens=(16384,), options=options, **heads
            )
        )
    return shapes


def informative_order(shapes: Sequence[Shape]) -> list[int]:
    """An order of shapes such that every prefix covers them well, the extreme ones first.

    In turns the shape farthest from those before it (Gonzalez 1985), which spans the ranges, and the one that brings
    all shapes nearest to some chosen one (facility location), which covers what is common. Distances are between
    logarithms of queries, keys, heads and documents, and flags.
    """
    features = np.array([_features(shape) for shape in shapes])
    features = (features - features.mean(axis=0)) * _WEIGHTS
    distance = np.sqrt(((features[:, None] - features[None]) ** 2).sum(axis=-1))
    near = np.full(len(shapes), distance.max(initial=0.0) + 1.0)
    first, order = int(np.abs(features).sum(axis=1).argmax()), list[int]()
    left = np.ones(len(shapes), bool)
    for turn in range(len(shapes)):
        if turn % 2:
            gain = np.maximum(near[:, None] - distance, 0).sum(axis=0)
            chosen = int(np.where(left, gain, -1.0).argmax())
        else:
            chosen = int(np.where(left, near, -1.0).argmax()) if turn else first
        order.append(chosen)
        left[chosen] = False
        near = np.minimum(near, distance[chosen])
    return order


_WEIGHTS = np.array([1.0, 1.0, 1.0, 0.7, 2.0, 2.0, 0.7, 1.0])
"""Weights of queries, keys, heads, sharing, causal, varlen, documents and their unevenness, in octaves."""


def _features(shape: Shape) -> list[float]:
    q, k = np.array(shape.q_lens, float), np.array(shape.k_lens, float)
    counts = q.sum(), q @ k / q.sum(), shape.num_heads, shape.num_heads / shape.num_kv_heads, len(q), q.max() / q.mean()
    queries, keys, heads, sharing, documents, unevenness = np.log2(counts).tolist()
    return [queries, keys, heads, sharing, float(shape.causal), float(shape.varlen), documents, unevenness]


ROUNDS = (0.35, 1.0)
"""Rounds of a calibration: shares of the time at which each round ends."""
SHARES = {
    "memory-bound kernels": 0.08,
    "collectives and transfers": 0.25,
    "interference": 0.2,
    "power": 0.07,
    "attention kernels": 0.4,
    "other people's code": 0.05,
}
"""Shares of a round's time, by part; what a part does not need goes to those after it."""
LEAST_CALLS, LEAST_SIZES = 8, 10
"""Calls of every kernel and GPU, and sizes of every kind of message, that are measured however short the time."""
RESTED_EVERY = 6
"""Calls between two at the full clock."""


def extremes_first(num: int) -> list[float]:
    """Places in [0, 1] such that every prefix is spread: both ends, the middle, quarters, ... (van der Corput)."""
    places, step = [0.0, 1.0], 0.5
    while len(places) < num:
        places += np.arange(step, 1.0, 2 * step).tolist()
        step /= 2
    return places[:num]


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> int:
    """Two in three are multiples of 128 (or 64), as real chunk lengths are."""
    n = float(np.exp(rng.uniform(np.log(low), np.log(high))))
    step = 1 if rng.random() < 1 / 3 else (128 if n >= 512 else 64)
    return max(1, round(n / step) * step)


def _shape(rng: np.random.Generator, family: str, causal: bool, q: list[int], k: list[int]) -> Shape:
    num_heads, num_kv_heads = HEADS[rng.choice(len(HEADS), p=_HEAD_WEIGHTS)]
    return Shape(
        family=family,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        causal=causal,
        varlen=len(q) > 1 or family == "one_varlen",
        q_lens=tuple(q),
        k_lens=tuple(k),
    )


def _causal(rng: np.random.Generator) -> Shape:
    n = _log_uniform(rng, 1024, 393216)
    return _shape(rng, "causal", True, [n], [n])


def _full(rng: np.random.Generator) -> Shape:
    n = _log_uniform(rng, 1024, 65536)
    q, k = ((n, n), (n, n), (n, n // 2), (n // 2, n))[rng.integers(4)]
    return _shape(rng, "full", False, [q], [k])


def _gathered(rng: np.random.Generator) -> Shape:
    """Few queries on many keys, as after an all-gather."""
    q, k = _log_uniform(rng, 512, 8192), _log_uniform(rng, 8192, 786432)
    return _shape(rng, "gathered", bool(rng.random() < 0.7), [q], [max(q, k)])


def _short(rng: np.random.Generator) -> Shape:
    n = _log_uniform(rng, 128, 1024)
    causal = bool(rng.random() < 0.5)
    return _shape(rng, "short", causal, [n], [n])


def _one_varlen(rng: np.random.Generator) -> Shape:
    """One sequence, at times after keys of other ranks."""
    n = _log_uniform(rng, 1024, 32768)
    k = n * int(rng.integers(2, 9)) if rng.random() < 0.5 else n
    return _shape(rng, "one_varlen", bool(rng.random() < 0.5), [n], [k])


def _equal(rng: np.random.Generator) -> Shape:
    total = _log_uniform(rng, 4096, 65536)
    n = min(total // 2, _log_uniform(rng, 64, 16384))
    return _shape(rng, "equal", bool(rng.random() < 0.6), [n] * (total // n), [n] * (total // n))


def _documents(rng: np.random.Generator, total: int, median: float) -> list[int]:
    """Log-normal document lengths (sigma 1.3, a heavy tail) that add up to `total`; the last is cut."""
    lens, left = list[int](), total
    while left > 0:
        n = max(8, int(median * np.exp(1.3 * rng.standard_normal())))
        lens.append(min(n, left))
        left -= lens[-1]
    return lens if len(lens) > 1 else [total // 2, total - total // 2]


def _heavy_tail(rng: np.random.Generator) -> Shape:
    total = _log_uniform(rng, 4096, 65536)
    lens = _documents(rng, total, _log_uniform(rng, 128, total / 3))
    return _shape(rng, "heavy_tail", bool(rng.random() < 0.8), lens, lens)


def _ring_documents(rng: np.random.Generator) -> Shape:
    """A per-document zigzag ring step: each document gives len/P or len/2P queries and keys, a full rectangle."""
    local = _log_uniform(rng, 2048, 16384)
    num_ranks = int(2 ** rng.integers(1, 7))
    documents = [n for n in _documents(rng, local * num_ranks, _log_uniform(rng, 512, local)) if n >= 2 * num_ranks]
    if len(documents) < 2:
        documents = [local * num_ranks // 2] * 2
    part = [max(2, n // num_ranks) for n in documents]
    half = [n // 2 for n in part]
    q, k, causal = ((part, half, False), (half, part, False), (part, part, False), (part, part, True))[rng.integers(4)]
    return _shape(rng, "ring_documents", causal, q, k)


def _gathered_documents(rng: np.random.Generator) -> Shape:
    """A contiguous query range that starts inside a long document: its keys reach back to the document's start."""
    total = _log_uniform(rng, 2048, 16384)
    q = _documents(rng, total, total / 6)
    return _shape(rng, "gathered_documents", True, q, [q[0] + _log_uniform(rng, 1024, 65536), *q[1:]])


_DRAW = {
    "causal": _causal,
    "full": _full,
    "gathered": _gathered,
    "short": _short,
    "one_varlen": _one_varlen,
    "equal": _equal,
    "heavy_tail": _heavy_tail,
    "ring_documents": _ring_documents,
    "gathered_documents": _gathered_documents,
}
