"""Plans of a batch, and what data loaders take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.prediction.batches.prices import Floats, Ints


@dataclass(frozen=True, slots=True)
class Pack:
    """Documents of one microbatch of one group."""

    first_rank: int
    """The group is this rank and those that follow."""
    size: int
    """Ranks of the group."""
    documents: tuple[int, ...]
    """Numbers of the documents in the batch."""
    seconds: float
    """Forward and backward, as priced."""

    @property
    def ranks(self) -> range:
        """Of the group."""
        return range(self.first_rank, self.first_rank + self.size)


@dataclass(frozen=True, slots=True)
class MegatronBatch:
    """A batch as Megatron-Core's hybrid context parallelism takes it."""

    samples: tuple[tuple[int, ...], ...]
    """Documents of every sample, numbered in the batch; a sample of several is packed, with ``cu_seqlens``."""
    cu_seqlens: tuple[tuple[int, ...], ...]
    """Where the documents of every sample begin, and its end [tokens]."""
    sample_id_groups: list[list[list[int]]]
    """Samples of every rank in the order in which it runs them: ``sample_id_groups[0][rank]``. There is one group,
    since nobody waits; a sample's context-parallel size is how many ranks have it."""


@dataclass(frozen=True, slots=True)
class TorchtitanRow:
    """A packed row as torchtitan's datasets yield it: one microbatch of one data-parallel rank."""

    documents: tuple[int, ...]
    """Numbers of the documents whose tokens follow each other; what remains of the row is padding."""
    positions: NDArray[np.int64]
    """Of every token in its document, from 0; 0 in padding, whose labels are to be ignored."""
    num_tokens: int
    """Tokens that are no padding."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """Where and when documents of a batch are computed."""

    lengths: Ints
    """Tokens of every document, ``[D]``."""
    num_ranks: int
    """Ranks of data and context parallelism together."""
    most_tokens: int
    """Tokens of a rank in a microbatch, at most."""
    document: Ints
    """Numbers of the documents, pack by pack, ``[D]``."""
    start: Ints
    """First entry of every pack in ``document``, ``[N]``; packs of the largest groups come first."""
    size: Ints
    """Ranks of every pack's group, ``[N]``."""
    first_rank: Ints
    """The group of every pack is this rank and those that follow, ``[N]``."""
    seconds: Floats
    """What every pack takes forward and backward, as priced, ``[N]``."""

    @property
    def packs(self) -> tuple[Pack, ...]:
        """The largest groups first; every rank runs its packs in this order, and never waits for others of a group."""
        documents = np.split(self.document, self.start[1:])
        columns = (self.first_rank.tolist(), self.size.tolist(), documents, self.seconds.tolist())
        return tuple(Pack(first, size, tuple(d.tolist()), s) for first, size, d, s in zip(*columns, strict=True))

    @property
    def rank_s(self) -> Floats:
        """Priced seconds of every rank, ``[R]``."""
        change = np.zeros(self.num_ranks + 1)
        np.add.at(change, self.first_rank, self.seconds)
        np.add.at(change, self.first_rank + self.size, -self.seconds)
        return np.cumsum(change)[:-1]

    @property
    def time_s(self) -> float:
        """Priced seconds of the busiest rank: passes of all its microbatches, without gradients' sums and updates."""
        return float(self.rank_s.max())

    @property
    def imbalance(self) -> float:
        """Time of the busiest rank over that of the mean one."""
        return self.time_s / float(self.rank_s.mean())

    def megatron(self) -> MegatronBatch:
        """The plan as ``hybrid_context_parallel_forward_backward`` takes it beside the samples.

        With ``pack=False`` samples are the documents themselves, in their order, which Megatron-Core 0.16 runs as it
        is; packed samples need a loader that concatenates their documents.

        Reference: megatron-core 0.16.1, core/pipeline_parallel/hybrid_cp_schedule.py, ``get_groups_and_subsamples``
        (the result) and ``_get_new_data_iterator`` (the size); core/parallel_state.py, ``create_hybrid_dp_cp_groups``
        (aligned groups of powers of two).

        Raises:
            InfeasibleError: a rank has no sample, which Megatron-Core does not allow.
        """
        packs, ranks = list(self.packs), [list[int]() for _ in range(self.num_ranks)]
        single = len(packs) == len(self.lengths)
        for i, pack in enumerate(packs):
            for rank in pack.ranks:
                ranks[rank].append(pack.documents[0] if single else i)
        packs = sorted(packs, key=lambda pack: pack.documents) if single else packs
        if [] in ranks:
            raise InfeasibleError(
                f"megatron: expected documents for each of {self.num_ranks} ranks, got none for rank "
                f"{ranks.index([])}; give a larger batch"
            )
        starts = tuple(self._starts(pack.documents) for pack in packs)
        return MegatronBatch(tuple(pack.documents for pack in packs), starts, [ranks])

    def torchtitan(self) -> list[list[TorchtitanRow]]:
        """Rows of every data-parallel rank by microbatch, as many of each, all of ``num_tokens_per_batch`` tokens: the
        memory limit times the size of the groups.

        torchtitan's context parallelism has one size for the whole run, so that the plan must, too.

        Reference: pytorch/torchtitan at b5bcd76, torchtitan/components/data/packing.py (``TextSequence`` of a packed
        row, positions from 0 in every document, zeros and ignored labels in padding).

        Raises:
            ScenarioError: the plan has groups of several sizes.
        """
        sizes = np.unique(self.size).tolist()
        if len(sizes) > 1:
            raise ScenarioError(
                f"torchtitan: expected groups of one size, got {', '.join(map(str, sizes))}; plan with group_sizes=[n]"
            )
        (size,) = sizes
        rows: list[list[TorchtitanRow]] = [[] for _ in range(self.num_ranks // size)]
        for pack in sorted(self.packs, key=lambda pack: -pack.seconds):
            rows[pack.first_rank // size].append(self._row(pack.documents, size))
        most = max(map(len, rows))
        return [row + [self._row((), size)] * (most - len(row)) for row in rows]

    def _row(self, documents: tuple[int, ...], size: int) -> TorchtitanRow:
        starts = self._starts(documents)
        positions = np.zeros(self.most_tokens * size, np.int64)
        for first, end in pairwise(starts):
            positions[first:end] = np.arange(end - first)
        return TorchtitanRow(documents, positions, starts[-1])

    def _starts(self, documents: Sequence[int]) -> tuple[int, ...]:
        return (0, *np.cumsum(self.lengths[list(documents)]).tolist())
