"""Ulysses: an all-to-all turns sequence shards into head shards, and another one turns the output back.

Reference: Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv 2309.14509), section 3. Differs: Q, K and V travel in one
all-to-all; key-value heads are replicated where there are fewer of them than ranks; heads can be cut into groups so
that one group's all-to-all overlaps the attention of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from cpsim.builder import NOTHING, Access, Builder
from cpsim.cluster import Cluster
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.implementations import CPSIM, Implementation, UlyssesCode
from cpsim.masks import Ints
from cpsim.schedule import Int32, Kind, Pass, Schedule
from cpsim.strategies import sharding
from cpsim.strategies.sizes import Sizes
from cpsim.tiles import make_tiles
from cpsim.workload import Workload

Bundle = list[Access]
"""Accesses of one op: one per tensor."""


def plan_ulysses(
    workload: Workload, cluster: Cluster, pass_: Pass, code: Implementation = CPSIM, *, head_groups: int = 1
) -> Schedule:
    """All tokens of some heads on every rank.

    Args:
        workload, cluster, pass_: the case.
        code: whose implementation.
        head_groups: parts into which a rank's heads are cut; while one part is computed the next travels.

    Raises:
        InfeasibleError: the heads do not divide over the ranks or groups.
    """
    if not isinstance(head_groups, int) or head_groups < 1:
        raise ScenarioError(f"knobs.head_groups: expected a positive integer, got {head_groups!r}")
    plan = _Ulysses(workload, cluster.num_gpus, head_groups)
    if code.ulysses is not None:
        return plan.one_by_one(pass_, code.ulysses)
    return plan.forward() if pass_ == "fwd" else plan.backward()


def ulysses_knobs(workload: Workload, cluster: Cluster) -> Sequence[Mapping[str, object]]:
    """Knob settings worth trying: one head group, and two and four where heads allow."""
    per_rank = (workload.num_heads // cluster.num_gpus, max(1, workload.num_kv_heads // cluster.num_gpus))
    groups = [g for g in (2, 4) if cluster.num_gpus > 1 and all(n % g == 0 for n in per_rank)]
    return ({}, *({"head_groups": g} for g in groups))


def _check_heads(workload: Workload, num_ranks: int, head_groups: int) -> None:
    heads, kv_heads = workload.num_heads, workload.num_kv_heads
    if heads % num_ranks:
        raise InfeasibleError(
            f"ulysses needs query heads divisible by ranks, got {heads} heads on {num_ranks} GPUs; "
            f"it can use at most {heads}, or combine it with a ring (usp)"
        )
    if kv_heads % num_ranks and num_ranks % kv_heads:
        raise InfeasibleError(
            f"ulysses needs key-value heads to divide the ranks or the reverse, "
            f"got {kv_heads} kv_heads on {num_ranks} GPUs"
        )
    per_rank, kv_per_rank = heads // num_ranks, max(1, kv_heads // num_ranks)
    if per_rank % head_groups or kv_per_rank % head_groups:
        raise InfeasibleError(
            f"ulysses with head_groups {head_groups} needs it to divide the heads of a rank, "
            f"got {per_rank} query and {kv_per_rank} key-value heads"
        )


class _Ulysses:
    """One Ulysses schedule under construction."""

    def __init__(self, workload: Workload, num_ranks: int, head_groups: int) -> None:
        _check_heads(workload, num_ranks, head_groups)
        if workload.num_tokens % num_ranks:
            raise InfeasibleError(
                f"ulysses needs tokens divisible by ranks, got {workload.num_tokens} tokens on {num_ranks} GPUs"
            )
        self.ranks, self.num_groups = np.arange(num_ranks), head_groups
        self.together = self.ranks[None, :]
        self.whole = num_ranks
        """Index of the set of all tokens."""
        shards = sharding.contiguous(workload.num_tokens, num_ranks)
        sets = sharding.stack(shards, sharding.contiguous(workload.num_tokens, 1))
        self.b = Builder(num_ranks, sets, make_tiles(workload.slices(), sets, [self.whole], [self.whole]))
        self.tokens = workload.num_tokens // num_ranks
        self.group_heads = workload.num_heads // num_ranks // head_groups
        self.group_kv_heads = max(1, workload.num_kv_heads // num_ranks) // head_groups
        self.replicas = max(1, num_ranks // workload.num_kv_heads)
        self.sizes = Sizes(workload)
        self.q_bytes = self.sizes.query(workload.num_heads) // head_groups
        """One token of Q, O, dO or dQ, all ranks' heads of one group."""
        self.kv_bytes = self.sizes.kv(self.group_kv_heads) * num_ranks
        """One token of K and V of one group, replicas included."""
        self.own_kv_bytes = self.kv_bytes // self.replicas
        """The same without replicas: what a rank holds of its own tokens."""
        self.all_heads, self.kv_heads = (0, workload.num_heads), workload.num_kv_heads

    def heads(self, group: int) -> Ints:
        """Heads of every rank, ``[ranks, 4]``: first query head, query heads, first kv head, kv heads."""
        first = (group * len(self.ranks) + self.ranks) * self.group_heads
        kv_first = first * self.kv_heads // self.all_heads[1]
        counts = np.full(len(self.ranks), self.group_heads), np.full(len(self.ranks), self.group_kv_heads)
        return np.stack([first, counts[0], kv_first, counts[1]], axis=1)

    def forward(self) -> Schedule:
        b, tokens, groups = self.b, self.tokens, range(self.num_groups)
        qkv_bytes = self.q_bytes + self.kv_bytes
        out_bytes = self.q_bytes + self.sizes.lse(self.group_heads) * len(self.ranks)
        own_bytes = self.q_bytes + self.own_kv_bytes
        qkv = b.buffers("qkv", np.full(len(self.ranks), tokens * self.num_groups * own_bytes))
        out = b.buffers("out", np.full(len(self.ranks), tokens * self.num_groups * self.q_bytes))
        for access in self._own(qkv, ("q", "kv")):
            b.input(*access)
        for access in self._own(out, ("o",)):
            b.output(*access)
        packed = [self._group("qkv", ("q", "kv"), tokens * qkv_bytes, g) for g in groups]
        gathered = [self._heads_of_all("qkv", ("q", "kv"), tokens * qkv_bytes, g) for g in groups]
        made = [self._heads_of_all("out", ("out",), tokens * out_bytes, g) for g in groups]
        returned = [self._group("out", ("o",), tokens * self.q_bytes, g) for g in groups]
        ready = [
            self._copy(Kind.COPY, g, tokens * (own_bytes + qkv_bytes), self._own(qkv, ("q", "kv"), g), packed[g])
            for g in groups
        ]
        sizes = qkv_bytes, self.q_bytes
        back = self._pipeline(Kind.ATTENTION, sizes, packed, gathered, made, returned, [[]] * len(groups), ready)
        for g in groups:
            own = self._own(out, ("o",), g)
            self._copy(Kind.COPY, g, tokens * 2 * self.q_bytes, returned[g], own, back[g])
        return b.build()

    def backward(self) -> Schedule:
        b, tokens, groups = self.b, self.tokens, range(self.num_groups)
        qkv_bytes = self.q_bytes + self.kv_bytes
        out_bytes = self.q_bytes + self.sizes.lse(self.group_heads) * len(self.ranks)
        own_bytes = self.q_bytes + self.own_kv_bytes
        saved = [
            [
                *self._heads_of_all("qkv", ("q", "kv"), tokens * qkv_bytes, g),
                *self._heads_of_all("out", ("out",), tokens * out_bytes, g),
            ]
            for g in groups
        ]
        dout = b.buffers("dout", np.full(len(self.ranks), tokens * self.num_groups * self.q_bytes))
        dqkv = b.buffers("dqkv", np.full(len(self.ranks), tokens * self.num_groups * own_bytes))
        for access in (*chain.from_iterable(saved), *self._own(dout, ("dout",))):
            b.input(*access)
        for access in self._own(dqkv, ("dq", "dkv")):
            b.output(*access)
        packed = [self._group("dout", ("dout",), tokens * self.q_bytes, g) for g in groups]
        gathered = [self._heads_of_all("dout", ("dout",), tokens * self.q_bytes, g) for g in groups]
        made = [self._heads_of_all("dqkv", ("dq", "dkv"), tokens * qkv_bytes, g) for g in groups]
        returned = [self._group("dqkv", ("dq", "dkv"), tokens * qkv_bytes, g) for g in groups]
        ready = [
            self._copy(Kind.COPY, g, tokens * 2 * self.q_bytes, self._own(dout, ("dout",), g), packed[g])
            for g in groups
        ]
        sizes = self.q_bytes, qkv_bytes
        back = self._pipeline(Kind.ATTENTION_BACKWARD, sizes, packed, gathered, made, returned, saved, ready)
        home = Kind.COPY if self.replicas == 1 else Kind.ACCUMULATE
        for g in groups:
            own = self._own(dqkv, ("dq", "dkv"), g)
            self._copy(home, g, tokens * (qkv_bytes + own_bytes), returned[g], own, back[g])
        return b.build()

    def one_by_one(self, pass_: Pass, code: UlyssesCode) -> Schedule:
        """Other people's code, where tensors travel one by one and every kernel waits for the last all-to-all."""
        b, q, kv = self.b, self.tokens * self.q_bytes, self.tokens * self.kv_bytes
        backward, lse = pass_ == "bwd", self.tokens * self.sizes.lse(self.group_heads) * len(self.ranks)
        saved = [("q", q), ("kv", kv), ("out", q + lse)] if backward else []
        reads = [access for t, nbytes in saved for access in self._heads_of_all(t, (t,), nbytes, 0)]
        for access in reads:
            b.input(*access)
        after = np.full(len(self.ranks), NOTHING)
        for tensor, nbytes in [("dout", q)] if backward else [("q", q), ("kv", kv)]:
            own = self._own(b.buffers(tensor, np.full(len(self.ranks), nbytes)), (tensor,))
            b.input(*own[0])
            packed, here = self._group(tensor, (tensor,), nbytes, 0), self._heads_of_all(tensor, (tensor,), nbytes, 0)
            after = self._travel(tensor, nbytes, [own, packed], [here], after, code.there)
            reads += here
        made = [("dq", q), ("dkv", kv)] if backward else [("out", q + lse)]
        results = [self._heads_of_all(t, (t,), nbytes, 0) for t, nbytes in made]
        kind = Kind.ATTENTION_BACKWARD if backward else Kind.ATTENTION
        self._call()
        after = b.add(
            kind, (self.ranks, "compute"), tile=1, heads=self.heads(0), deps=[after], reads=reads,
            writes=[access for result in results for access in result],
        )  # fmt: skip
        for (tensor, nbytes), result in reversed(list(zip(made, results, strict=True))):
            home, size = ("o", q) if tensor == "out" else (tensor, nbytes)
            own = self._own(b.buffers(home, np.full(len(self.ranks), size)), (home,))
            b.output(*own[0])
            ordered = self._heads_of_all(f"{home} by rank", (home,), size, 0)
            returned = self._group(home, (home,), size, 0)
            after = self._travel(home, size, [result, ordered], [returned, own], after, code.back)
        return b.build()

    def _call(self) -> None:
        """The host runs a function of somebody's autograd graph."""
        self.b.add(Kind.BARRIER, (self.ranks, "compute"))

    def _travel(
        self, tensor: str, nbytes: int, before: list[Bundle], then: list[Bundle], after: Ints, num_sweeps: int
    ) -> Ints:
        """Order a tensor by rank, exchange it and order it again; keys and values one after the other.

        Args:
            tensor, nbytes: what travels.
            before: where it is, and where it lies ordered by rank.
            then: where it arrives, and where it lies in the end, if there is a second sweep.
            after: what the first sweep waits for.
            num_sweeps: one or two.

        Returns:
            the last ops, ``[ranks]``.
        """
        parts = 2 if tensor.endswith("kv") else 1
        size = nbytes // parts

        def sweep(source: Bundle, target: Bundle, whole: bool) -> Ints:
            return self.b.add(
                Kind.COPY, (self.ranks, "compute"), nbytes=2 * size, deps=[after], heads=self.heads(0),
                reads=source if whole else (), writes=target if whole else (),
            )  # fmt: skip

        for part in range(parts):
            self._call()
            whole = part == parts - 1
            after = sweep(before[0], before[1], whole)
            (moved,) = self.b.add(
                Kind.ALL_TO_ALL, (self.together, "comm"), nbytes=size, deps=[after[None, :]],
                reads=before[1] if whole else (), writes=then[0] if whole else (),
            ),  # fmt: skip
            after = moved.repeat(len(self.ranks))
            if num_sweeps == 2:
                after = sweep(then[0], then[1], whole)
        return after

    def _own(self, buffers: Int32, tensors: tuple[str, ...], group: int | None = None) -> Bundle:
        """Every rank's own tokens, all heads or those of one group."""
        count = self.group_heads * len(self.ranks) * (self.num_groups if group is None else 1)
        heads = (count * (group or 0), count)
        return [(buffers, self.b.blocks(t, self.ranks, self._heads_of(t, heads))) for t in tensors]

    def _group(self, name: str, tensors: tuple[str, ...], nbytes: int, group: int) -> Bundle:
        """Every rank's own tokens, all ranks' heads of one group, ordered by rank."""
        buffers = self.b.buffers(f"{name} by rank", np.full(len(self.ranks), nbytes))
        return self._own(buffers, tensors, group)

    def _heads_of_all(self, name: str, tensors: tuple[str, ...], nbytes: int, group: int) -> Bundle:
        """All tokens, every rank's own heads of one group."""
        buffers = self.b.buffers(f"{name} of group", np.full(len(self.ranks), nbytes))
        columns = [slice(2, 4) if t.endswith("kv") else slice(0, 2) for t in tensors]
        return [
            (
                buffers,
                np.concatenate([self.b.blocks(t, [self.whole], tuple(row[c])) for row in self.heads(group)]),
            )
            for t, c in zip(tensors, columns, strict=True)
        ]

    def _heads_of(self, tensor: str, heads: tuple[int, int]) -> tuple[int, int]:
        """The key-value heads of a range of query heads for K and V and their gradients, else the range."""
        if not tensor.endswith("kv"):
            return heads
        first, count = (n * self.kv_heads // self.all_heads[1] for n in heads)
        return first, count

    def _copy(
        self, kind: Kind, group: int, nbytes: int, source: Bundle, target: Bundle, after: Ints | None = None
    ) -> Ints:
        """Order one group by rank, or back and sum replicas; returns indices, ``[ranks]``."""
        deps = [] if after is None else [after.repeat(len(self.ranks))]
        return self.b.add(
            kind, (self.ranks, "compute"), step=group, nbytes=nbytes, deps=deps, heads=self.heads(group),
            reads=source, writes=target,
        )  # fmt: skip

    def _exchange(self, group: int, nbytes: int, source: Bundle, target: Bundle, after: Ints) -> Ints:
        """All-to-all of one group over all ranks; returns its index, ``[1]``."""
        return self.b.add(
            Kind.ALL_TO_ALL, (self.together, "comm"), step=group, nbytes=nbytes, deps=[after[None, :]],
            reads=source, writes=target,
        )  # fmt: skip

    def _attend(self, kind: Kind, group: int, arrived: Ints, reads: Bundle, made: Bundle) -> Ints:
        """Attention over all tokens on every rank; returns indices, ``[ranks]``."""
        return self.b.add(
            kind, (self.ranks, "compute"), step=group, tile=1, heads=self.heads(group),
            deps=[arrived.repeat(len(self.ranks))], reads=reads, writes=made,
        )  # fmt: skip

    def _pipeline(
        self, kind: Kind, sizes: tuple[int, int], packed: list[Bundle], gathered: list[Bundle],
        made: list[Bundle], returned: list[Bundle], saved: list[Bundle], ready: list[Ints],
    ) -> list[Ints]:  # fmt: skip
        """Exchange, attend and exchange back, the next group's exchange ahead of this group's attention."""
        there, home = (self.tokens * size for size in sizes)
        back, arrived = [], self._exchange(0, there, packed[0], gathered[0], ready[0])
        for g in range(self.num_groups):
            here = arrived
            if g + 1 < self.num_groups:
                arrived = self._exchange(g + 1, there, packed[g + 1], gathered[g + 1], ready[g + 1])
            done = self._attend(kind, g, here, [*saved[g], *gathered[g]], made[g])
            back.append(self._exchange(g, home, made[g], returned[g], done))
        return back
