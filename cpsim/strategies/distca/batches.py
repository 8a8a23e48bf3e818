"""Batches as DistCA's experiments draw and pack them: documents in sequences of one length, deterministic by seed.

The sampler takes the list of document lengths of a data set. With the original lists it gives the original batches, one
by one. These lists are not shipped: ``stand_in`` makes one with the published number of documents and mean length in
every bin of the published histogram, so that batches agree with the original ones in distribution only.

Reference: DistCA (arXiv 2510.18121), section 6; hao-ai-lab/DistCA at 2afd219, simulator/optimizers/samples.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from cpsim.case.documents import load_bins
from cpsim.errors import ScenarioError
from cpsim.masks.slices import Ints

DataSet = Literal["pretrain", "prolong"]

LONG: Final = 64 * 1024
"""Documents of at least this many tokens are long, and a context of this many elongates nothing."""
ROUNDED: Final = 16
"""Documents are rounded up to multiples of this many tokens."""
NUM_DOCUMENTS: Final = {"pretrain": 99_519, "prolong": 77_932}
"""Documents of the original lists."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Documents in sequences, in the order of the stream."""

    lengths: Ints
    """Tokens of every document or piece of one, ``[D]``."""
    start: Ints
    """First document of every sequence, ``[S + 1]``."""

    def __len__(self) -> int:
        return len(self.start) - 1

    def documents(self, first: int, count: int) -> Ints:
        """Lengths of the documents of ``count`` sequences [tokens]."""
        return self.lengths[self.start[first] : self.start[first + count]]


def iteration(packed: Packed, index: int, batch_size: int, num_nano_batches: int = 2) -> list[Ints]:
    """Documents of every nano-batch of an iteration, of ``batch_size`` sequences each; DistCA has two.

    Args:
        packed: the stream.
        index: of the iteration, from 0.
        batch_size: sequences of a nano-batch; "batch size" in the paper's tables is twice as much.

    Raises:
        ScenarioError: the stream has no such iteration.
    """
    first, count = index * batch_size * num_nano_batches, batch_size * num_nano_batches
    if first + count > len(packed):
        raise ScenarioError(f"iteration {index} needs sequences {first} to {first + count - 1}, got {len(packed)}")
    return [packed.documents(first + nano * batch_size, batch_size) for nano in range(num_nano_batches)]


def sample(
    dataset: DataSet,
    context: int,
    *,
    lengths: Ints | None = None,
    seed: int = 42,
    kept: float = 0.5,
    repeats: int = 4,
    replaced: float = 0.3,
    count: int = 10_000,
) -> Packed:
    """Sequences of a data set.

    Args:
        dataset: ``pretrain`` or ``prolong``.
        context: tokens of a sequence, called MaxDocLen; a multiple of 64K.
        lengths: the original list [tokens], in order; None takes ``stand_in``.
        seed: of the sampler.
        kept: share of the short documents that are kept, the first ones of the list.
        repeats: times that every long document is taken.
        replaced: of ProLong, the share of long documents that become exactly ``context`` tokens.
        count: of Pretrain, documents drawn without replacement.

    Raises:
        ScenarioError: the data set is unknown, the context is no multiple of 64K, or the list is too short.
    """
    if dataset not in NUM_DOCUMENTS:
        raise ScenarioError(f"dataset: expected one of {', '.join(NUM_DOCUMENTS)}, got {dataset!r}")
    if context < LONG or context % LONG:
        raise ScenarioError(f"context: expected a multiple of {LONG} tokens, got {context}")
    lengths = stand_in(dataset) if lengths is None else lengths
    is_long, rng = lengths >= LONG, np.random.default_rng(seed)
    short = lengths[~is_long]
    short, long = short[: int(len(short) * kept)], np.tile(lengths[is_long], repeats)
    if len(short) + len(long) < (count if dataset == "pretrain" else 1):
        raise ScenarioError(f"lengths: a list of {len(lengths)} documents is too short for {dataset}")
    if dataset == "pretrain":
        drawn = rng.choice(np.concatenate([short, long]), size=count, replace=False) * (context // LONG)
    else:  # not shuffled: all long documents come first
        drawn = np.concatenate([np.where(rng.random(len(long)) < replaced, context, long), short])
    return pack(drawn, context)


def pack(lengths: Ints, context: int) -> Packed:
    """Documents one after the other in sequences of exactly ``context`` tokens; what overflows opens the next one.

    Args:
        lengths: of the documents [tokens], ``[D]``; rounded up to multiples of 16.
        context: tokens of a sequence, a multiple of 16; the last one may have fewer.
    """
    ends = np.cumsum(-(-lengths // ROUNDED) * ROUNDED)
    edges = np.union1d(ends, np.arange(0, ends[-1], context))
    start = np.searchsorted(edges, np.append(np.arange(0, ends[-1], context), ends[-1]))
    return Packed(np.diff(edges), start)


def stand_in(dataset: DataSet, seed: int = 0) -> Ints:
    """A list of document lengths with the published number and mean length of every bin [tokens], in random order.

    Inside a bin lengths are spread as ``case.documents`` draws them, without chance: ``seed`` is of the order alone.
    """
    bins = load_bins(f"distca_{dataset}")
    per_bin = np.rint(np.diff(bins.cumulative, prepend=0.0) * NUM_DOCUMENTS[dataset]).astype(np.int64)
    row = np.repeat(np.arange(len(per_bin)), per_bin)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(per_bin) - per_bin, per_bin)
    span = (bins.high - bins.low)[row] + 1
    lengths = bins.low[row] + np.floor(span * ((nth + 0.5) / per_bin[row]) ** bins.exponent[row])
    made: Ints = np.random.default_rng(seed).permutation(np.maximum(lengths, 1).astype(np.int64))
    return made
