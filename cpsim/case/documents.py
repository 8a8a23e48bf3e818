"""Document lengths drawn from published distributions, and the order of the documents of a batch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cpsim.errors import ScenarioError, nearest, shown
from cpsim.masks.names import MASK_NAMES

MAX_DOCUMENTS: Final = 10_000_000
"""More documents than this in one batch are refused: a mistake rather than a case."""

_SECTIONS: Final = {
    "pile": ("longca_bench", "pile"),
    "prolong64k": ("longca_bench", "prolong64k"),
    "prolong512k": ("longca_bench", "prolong512k"),
    "magi": ("magi_attention", "default"),
    "distca_pretrain": ("distca", "pretrain"),
    "distca_prolong": ("distca", "prolong"),
}
DISTRIBUTIONS: Final = tuple(_SECTIONS)
"""Names of the shipped distributions."""

Order = Literal["given", "alternating", "shortest_first"]
"""Of the documents of a batch: as they come; the longest, the shortest, the longest of the others, and so on; the
shortest first."""
ORDERS: Final[dict[str, Order]] = {"dcp": "alternating", "distca": "shortest_first"}
"""Strategies that choose the order themselves, since any GPU may compute any document, so that it does not matter which
one a data loader had. Those of the papers take documents as they come."""


@dataclass(frozen=True, slots=True)
class Bins:
    """Columns of a distribution, each ``float64[B]``: a document falls into a bin, then somewhere inside."""

    low: NDArray[np.float64]
    """Shortest length of the bin [tokens]."""
    high: NDArray[np.float64]
    """Longest length of the bin [tokens], included."""
    cumulative: NDArray[np.float64]
    """Share of documents up to and with the bin, ending in 1."""
    exponent: NDArray[np.float64]
    """Inside a bin, length = low + (high - low) * u**exponent with u uniform: 1 is a uniform draw."""

    def mean(self) -> float:
        """Mean document length [tokens]."""
        share = np.diff(self.cumulative, prepend=0.0)
        return float(share @ (self.low + (self.high - self.low) / (1 + self.exponent)))


@cache
def load_bins(distribution: str) -> Bins:
    """A shipped distribution.

    As their samplers do, LongCA-bench's bins are drawn uniformly, both ends included, and MagiAttention's at
    their integer midpoints; DistCA's histograms with the exponent that keeps the published mean of every bin.

    Reference: LongCA-bench (arXiv 2510.17896); MagiAttention's benchmark; DistCA (arXiv 2510.18121).
    Differs: another random generator, so lengths agree in distribution and not one by one; DistCA's
    repetition and elongation of long documents are left out.

    Raises:
        ScenarioError: the name is unknown.
    """
    if distribution not in _SECTIONS:
        raise ScenarioError(f"documents.distribution: {distribution!r} is unknown; {nearest(distribution, _SECTIONS)}")
    project, name = _SECTIONS[distribution]
    shipped = json.loads(
        Path(__file__).parent.with_name("data").joinpath("length_distributions.json").read_text(encoding="utf-8")
    )
    section = shipped[project][name]
    rows = np.array((section if project != "distca" else section["histogram"])["bins"], np.float64)
    rows = rows[rows[:, 2] > 0]
    low, high, weight = rows[:, 0], rows[:, 1], rows[:, 2]
    exponent = np.ones(len(rows))
    if project == "magi_attention":
        low = high = (low + high) // 2
    if project == "distca":
        high = high - 1
        mean = rows[:, 3] * section["num_documents"] * section["mean"] / weight
        exponent = (high - low) / np.clip(mean - low, 1, None) - 1
    cumulative = np.cumsum(weight) / weight.sum()
    return Bins(low, high, cumulative, exponent)


@lru_cache(maxsize=64)
def draw_documents(
    distribution: str, num_tokens: int, seed: int, *, max_length: int | None = None, min_length: int = 1
) -> tuple[int, ...]:
    """Document lengths that sum exactly to ``num_tokens``; the same seed gives the same lengths.

    Args:
        distribution: one of ``DISTRIBUTIONS``.
        num_tokens: total length [tokens].
        seed: of ``numpy.random.default_rng``.
        max_length: longer documents are cut to it [tokens]; None cuts at ``num_tokens`` only.
        min_length: shorter documents are padded to it [tokens].

    Returns:
        Lengths [tokens]; the last is cut to what remains, so it alone can be shorter than ``min_length``.

    Raises:
        ScenarioError: the name is unknown or the bounds make no sense.
    """
    bins = load_bins(distribution)
    longest = num_tokens if max_length is None else min(max_length, num_tokens)
    if min_length < 1 or longest < min_length:
        raise ScenarioError(
            f"documents: expected 1 <= min_length <= max_length <= tokens, got min_length = {min_length}, "
            f"max_length = {max_length}, tokens = {num_tokens}"
        )
    if num_tokens > MAX_DOCUMENTS * min(longest, max(min_length, bins.mean())):
        raise ScenarioError(f"documents: {num_tokens} tokens would be over {MAX_DOCUMENTS} documents; raise max_length")
    rng = np.random.default_rng(seed)
    drawn: list[NDArray[np.int64]] = []
    missing = num_tokens
    while missing > 0:
        uniform = rng.random((1024, 2))
        row = np.searchsorted(bins.cumulative, uniform[:, 0], side="right").clip(max=len(bins.low) - 1)
        span = bins.high[row] - bins.low[row]
        lengths = bins.low[row] + np.floor((span + (span > 0)) * uniform[:, 1] ** bins.exponent[row])
        drawn.append(lengths.astype(np.int64).clip(min_length, longest))
        missing -= int(drawn[-1].sum())
    every = np.concatenate(drawn)
    ends = np.cumsum(every)
    count = int(np.searchsorted(ends, num_tokens)) + 1
    every[count - 1] -= ends[count - 1] - num_tokens
    return tuple(every[:count].tolist())


def order_of(strategy: str | None, knobs: Mapping[str, object]) -> Order:
    """The order in which a strategy takes the documents of a batch: that of knob ``order``, or its own.

    Raises:
        ScenarioError: the knob has no such value.
    """
    if strategy not in ORDERS:
        return "given"
    own = ORDERS[strategy] if knobs.get("variant", "cpsim") == "cpsim" else "given"
    order = knobs.get("order", own)
    if order not in get_args(Order):
        raise ScenarioError(f"knobs.order: expected one of {', '.join(get_args(Order))}, got {shown(order)}")
    return order  # type: ignore[return-value]


def as_taken(
    documents: tuple[int, ...], mask: str, strategy: str | None, knobs: Mapping[str, object]
) -> tuple[int, ...]:
    """Lengths [tokens] in the order in which a strategy takes them; given, where the mask relates documents.

    Raises:
        ScenarioError: knob ``order`` has no such value.
    """
    order = order_of(strategy, knobs)
    return in_order(documents, order) if MASK_NAMES[mask].documents == "apart" else documents


def in_order(documents: tuple[int, ...], order: Order) -> tuple[int, ...]:
    """These lengths [tokens] in an order, see ``Order``."""
    if order == "given":
        return documents
    ascending = sorted(documents)
    if order == "shortest_first":
        return tuple(ascending)
    pairs = zip(reversed(ascending), ascending, strict=True)
    return tuple(chain(*pairs))[: len(ascending)]
