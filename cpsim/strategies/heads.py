"""All-to-alls inside groups of ranks that turn sequence shards into head shards, and back.

Reference: Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv 2309.14509), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError
from cpsim.masks.slices import Ints
from cpsim.schedule.builder import NOTHING, Access, Builder
from cpsim.schedule.schedule import Int32, Kind, Pass
from cpsim.strategies.others import UlyssesCode
from cpsim.strategies.sizes import Sizes

Bundle = list[Access]
"""Accesses of one op: one per tensor."""


def check_heads(who: str, workload: Workload, degree: int, what: str) -> None:
    """Raise ``InfeasibleError`` where heads do not divide over the ``degree`` ranks of a group, named ``what``."""
    heads, kv_heads = workload.num_heads, workload.num_kv_heads
    if heads % degree:
        hint = f"; it can use at most {heads}, or combine it with a ring (usp)" if who == "ulysses" else ""
        raise InfeasibleError(f"{who} needs query heads divisible by {what}, got {heads} heads on {degree} GPUs{hint}")
    if kv_heads % degree and degree % kv_heads:
        raise InfeasibleError(
            f"{who} needs key-value heads to divide the {what} or the reverse, got {kv_heads} kv_heads on {degree} GPUs"
        )


@dataclass(frozen=True, slots=True)
class Trip:
    """A tensor on its way through an all-to-all of other people's code."""

    tensor: str
    nbytes: int
    before: list[Bundle]
    """Where it is, and where it lies ordered by rank, if there is a row kernel before."""
    then: list[Bundle]
    """Where it arrives, and where it lies in the end, if there is a row kernel after."""

    by_document: tuple[int, int] = (0, 0)
    """Number of row kernels of every document in front of the row kernel before, and in front of the one after."""
    packed: bool = False
    """Keys and values travel together."""

    def parts(self) -> Iterator[Trip]:
        """Keys and values apart, unless they are packed; the second one stands for both."""
        if self.packed or not self.tensor.endswith("kv"):
            yield self
            return
        half = self.nbytes // 2
        yield Trip(self.tensor, half, [[] for _ in self.before], [[] for _ in self.then], self.by_document)
        yield Trip(self.tensor, half, self.before, self.then, self.by_document)


class HeadExchange:
    """Between every rank's own tokens with all heads, and all tokens of its group with the rank's own heads.

    Args:
        b: the schedule under construction.
        workload: the case.
        groups: ranks of every group, ``[groups, members]``; a member's place says which heads it has.
        own: token set of every rank's own tokens, ``[ranks]``; all have equally many.
        whole: token set of all tokens of every rank's group, ``[ranks]``.
        head_groups: parts into which a rank's heads are cut.
        copies: members of a group for each rank that is there.
    """

    def __init__(
        self,
        b: Builder,
        workload: Workload,
        groups: Ints,
        own: Ints,
        whole: Ints,
        head_groups: int = 1,
        copies: int = 1,
    ) -> None:
        self.b, self.groups, self.own_set, self.whole_set = b, groups, own, whole
        num_ranks, degree = groups.size, int(groups.shape[1]) * copies
        self.ranks, self.degree = np.arange(num_ranks), degree
        self.group, self.member = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
        self.group[groups], self.member[groups] = np.indices(groups.shape)
        self.tokens, self.num_groups = workload.num_tokens // (num_ranks * copies), head_groups
        self.shares = np.asarray(workload.documents) / sum(workload.documents)
        """Share of all tokens of every document, ``[documents]``."""
        self.group_heads = workload.num_heads // degree // head_groups
        self.group_kv_heads = max(1, workload.num_kv_heads // degree) // head_groups
        self.replicas = max(1, degree // workload.num_kv_heads)
        self.sizes = Sizes(workload)
        self.q_bytes = self.sizes.query(workload.num_heads) // head_groups
        """One token of Q or dQ, all ranks' heads of one group."""
        self.o_bytes = self.sizes.output(workload.num_heads) // head_groups
        """One token of O or dO, all ranks' heads of one group."""
        self.lse_bytes = self.sizes.lse(self.group_heads) * degree
        """One token of the log-sum-exp, all ranks' heads of one group."""
        self.kv_bytes = self.sizes.kv(self.group_kv_heads) * degree
        """One token of K and V of one group, replicas included."""
        self.own_kv_bytes = self.kv_bytes // self.replicas
        """One token of K and V of one group without replicas, as a rank holds its own tokens."""
        self.all_heads, self.kv_heads = (0, workload.num_heads), workload.num_kv_heads

    def heads(self, group: int = 0) -> Ints:
        """Heads of every rank, ``[ranks, 4]``: first query head, query heads, first kv head, kv heads."""
        first = (group * self.degree + self.member) * self.group_heads
        kv_first = first * self.kv_heads // self.all_heads[1]
        counts = np.full(len(self.ranks), self.group_heads), np.full(len(self.ranks), self.group_kv_heads)
        return np.stack([first, counts[0], kv_first, counts[1]], axis=1)

    def buffers(self, name: str, nbytes: int) -> Int32:
        """A buffer of every rank."""
        return self.b.buffers(name, np.full(len(self.ranks), nbytes))

    def own(self, buffers: Int32, tensors: tuple[str, ...], group: int | None = None) -> Bundle:
        """Every rank's own tokens, all heads or those of one group."""
        count = self.group_heads * self.degree * (self.num_groups if group is None else 1)
        heads = (count * (group or 0), count)
        return [(buffers, self.b.blocks(t, self.own_set, self._heads_of(t, heads))) for t in tensors]

    def by_rank(self, name: str, tensors: tuple[str, ...], nbytes: int, group: int = 0) -> Bundle:
        """Every rank's own tokens, all ranks' heads of one group, ordered by rank."""
        return self.own(self.buffers(f"{name} by rank", nbytes), tensors, group)

    def of_all(
        self, name: str, tensors: tuple[str, ...], nbytes: int, group: int = 0, whole: Ints | None = None
    ) -> Bundle:
        """All tokens of a rank's group, or those of set ``whole``; every rank's own heads of one head group."""
        buffers = self.buffers(f"{name} of group", nbytes)
        columns = [slice(2, 4) if t.endswith("kv") else slice(0, 2) for t in tensors]
        sets = self.whole_set if whole is None else whole
        wanted = list(zip(sets.tolist(), self.heads(group).tolist(), strict=True))
        return [
            (buffers, np.concatenate([self.b.blocks(t, [one], tuple(row[c])) for one, row in wanted]))
            for t, c in zip(tensors, columns, strict=True)
        ]

    def _heads_of(self, tensor: str, heads: tuple[int, int]) -> tuple[int, int]:
        """The key-value heads of a range of query heads for K and V and their gradients, else the range."""
        if not tensor.endswith("kv"):
            return heads
        first, count = (n * self.kv_heads // self.all_heads[1] for n in heads)
        return first, count

    def copy(
        self,
        nbytes: int,
        source: Bundle,
        target: Bundle,
        after: Ints | None = None,
        group: int = 0,
        kind: Kind = Kind.COPY,
    ) -> Ints:
        """Order one group by rank, or back and sum replicas, after an exchange; returns indices, ``[ranks]``."""
        return self.b.add(
            kind,
            (self.ranks, "compute"),
            step=group,
            nbytes=nbytes,
            deps=[] if after is None else [after],
            heads=self.heads(group),
            reads=source,
            writes=target,
        )

    def exchange(self, nbytes: int, source: Bundle, target: Bundle, after: Ints, group: int = 0) -> Ints:
        """An all-to-all in every group, after an op of every rank; returns indices by rank, ``[ranks]``."""
        sides = [[(buffer[self.groups], block[self.groups]) for buffer, block in side] for side in (source, target)]
        moved = self.b.add(
            Kind.ALL_TO_ALL,
            (self.groups, "comm"),
            step=group,
            nbytes=nbytes,
            deps=[after[self.groups]],
            reads=sides[0],
            writes=sides[1],
        )
        return moved[self.group]

    @property
    def home(self) -> Kind:
        """The op that orders gradients as a rank's own tokens lie: it sums those of replicas."""
        return Kind.COPY if self.replicas == 1 else Kind.ACCUMULATE

    # --- other people's code, where tensors travel one by one ---

    def bytes_of(self, tensor: str) -> int:
        """A rank's own tokens of a tensor, all heads, replicas included."""
        if tensor.endswith("kv"):
            return self.tokens * self.kv_bytes
        row = self.o_bytes if tensor in ("out", "dout") else self.q_bytes
        return self.tokens * (row + self.lse_bytes * (tensor == "out"))

    def there(
        self, pass_: Pass, code: UlyssesCode, keys: Ints | None = None, again: bool = False
    ) -> tuple[Ints, Bundle]:
        """Bring what a pass is given to the ranks of its heads; returns the last ops ``[ranks]``, and where it is.

        Args:
            pass_, code: of the call.
            keys: token set of the keys that every rank has kept from the forward pass, if they are not its group's.
            again: backward, outputs are exchanged, too; the schedule has those of a group as inputs nevertheless,
                since the log-sum-exp that goes with them has stayed.
        """
        backward = pass_ == "bwd"
        given = [
            access
            for t in ("q", "kv", "out")
            if backward
            for access in self.of_all(t, (t,), self.bytes_of(t), whole=keys if t == "kv" else None)
        ]
        for access in given:
            self.b.input(*access)
        documents = 0, code.there_by_document
        trips = [Trip("out", self.bytes_of("o"), [[]] * 2, [[]] * 2, documents)] if again and backward else []
        for tensor in ("dout",) if backward else ("q", "kv"):
            nbytes = self.bytes_of(tensor)
            own = self.own(self.buffers(tensor, nbytes), (tensor,))
            self.b.input(*own[0])
            packed, here = self.by_rank(tensor, (tensor,), nbytes), self.of_all(tensor, (tensor,), nbytes)
            then = [here]
            if code.there[pass_] == 2:
                then = [self.of_all(f"{tensor} by rank", (tensor,), nbytes), here]
            trips.append(Trip(tensor, nbytes, [own, packed], then, documents, code.packed))
            given += here
        return self._travel(trips, np.full(len(self.ranks), NOTHING), code), given

    def back(self, pass_: Pass, results: Mapping[str, Access], after: Ints, code: UlyssesCode) -> None:
        """Bring results to the ranks of their tokens, the last tensor first."""
        trips = []
        for tensor, result in [*results.items()][::-1]:
            home = "o" if tensor == "out" else tensor
            nbytes = self.bytes_of(home)
            own = self.own(self.buffers(home, nbytes), (home,))
            self.b.output(*own[0])
            returned, before = self.by_rank(home, (home,), nbytes), [[result]]
            if code.back[pass_] == 2:
                before.append(self.of_all(f"{home} by rank", (home,), nbytes))
            trips.append(Trip(home, nbytes, before, [returned, own], (code.back_by_document, 0), code.packed))
        self._travel(trips, after, code)

    def call(self, after: Ints | None = None) -> Ints:
        """The host runs a function of somebody's autograd graph."""
        return self.b.add(Kind.BARRIER, (self.ranks, "compute"), deps=[] if after is None else [after])

    def _travel(self, trips: Sequence[Trip], after: Ints, code: UlyssesCode) -> Ints:
        """Order tensors by rank, exchange them and order them again; keys and values one after the other.

        Args:
            trips: of tensors.
            after: what the first op waits for.
            code: where it overlaps, all are ordered by rank before any is ordered again, by one function; otherwise
                one tensor has arrived before the next leaves.

        Returns:
            the last ops, ``[ranks]``.
        """
        arrived = []
        for part in (part for trip in trips for part in trip.parts()):
            if not code.overlaps:
                self.call()
            ready = after
            self.documents(part.nbytes, part.by_document[0], after)
            if len(part.before) == 2:
                num_kernels = self.degree if code.lists else 1
                for _ in range(num_kernels - 1):
                    self.copy(2 * part.nbytes // num_kernels, [], [], after, kind=Kind.ELEMENTWISE)
                ready = self.copy(
                    2 * part.nbytes // num_kernels, part.before[0], part.before[1], after, kind=Kind.ELEMENTWISE
                )
            moved = self.exchange(part.nbytes, part.before[-1], part.then[0], ready)
            if code.overlaps:
                arrived.append((part, moved))
            else:
                after = self._order(part, moved)
        for part, moved in arrived:
            after = self._order(part, moved)
        return after

    def documents(self, nbytes: int, num_kernels: int, after: Ints) -> None:
        """Emit so many row kernels for every document of a tensor."""
        for share in self.shares.tolist() if num_kernels else ():
            for _ in range(num_kernels):
                self.copy(2 * round(nbytes * share), [], [], after, kind=Kind.ELEMENTWISE)

    def _order(self, part: Trip, after: Ints) -> Ints:
        """Order what arrived as it lay before, and sum gradients of heads that were replicated."""
        if len(part.then) == 1:
            return after
        nbytes, there = part.nbytes, part.then
        self.documents(nbytes, part.by_document[1], after)
        if self.replicas == 1 or part.tensor != "dkv":
            return self.copy(2 * nbytes, there[0], there[1], after, kind=Kind.ELEMENTWISE)
        after = self.copy(2 * nbytes, [], [], after, kind=Kind.ELEMENTWISE)
        return self.copy(nbytes + nbytes // self.replicas, there[0], there[1], after, kind=self.home)
