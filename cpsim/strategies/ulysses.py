"""Ulysses: an all-to-all turns sequence shards into head shards, and another one turns the output back.

Reference: Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv 2309.14509), section 3. Differs: Q, K and V travel in one
all-to-all; key-value heads are replicated where there are fewer of them than ranks; heads can be cut into groups so
that one group's all-to-all overlaps the attention of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cpsim.cluster import Cluster
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.masks import Ints
from cpsim.schedule import Access, Builder, Kind, Pass, Schedule
from cpsim.strategies import sharding
from cpsim.strategies.sizes import Sizes
from cpsim.tiles import make_tiles
from cpsim.workload import Workload

Groups = list[Access]
"""One access per head group."""


def plan_ulysses(workload: Workload, cluster: Cluster, pass_: Pass, *, head_groups: int = 1) -> Schedule:
    """All tokens of some heads on every rank.

    Args:
        workload, cluster, pass_: the case.
        head_groups: parts into which a rank's heads are cut; while one part is computed the next travels.

    Raises:
        InfeasibleError: the heads do not divide over the ranks or groups.
    """
    if not isinstance(head_groups, int) or head_groups < 1:
        raise ScenarioError(f"knobs.head_groups: expected a positive integer, got {head_groups!r}")
    plan = _Ulysses(workload, cluster.num_gpus, head_groups)
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
        self.all_heads = (0, workload.num_heads)

    def heads(self, group: int) -> Ints:
        """Heads of every rank, ``[ranks, 4]``: first query head, query heads, first kv head, kv heads."""
        first = (self.ranks * self.num_groups + group) * self.group_heads
        kv_first = (self.ranks // self.replicas * self.num_groups + group) * self.group_kv_heads
        counts = np.full(len(self.ranks), self.group_heads), np.full(len(self.ranks), self.group_kv_heads)
        return np.stack([first, counts[0], kv_first, counts[1]], axis=1)

    def forward(self) -> Schedule:
        b, tokens, groups = self.b, self.tokens, range(self.num_groups)
        qkv_bytes = self.q_bytes + self.kv_bytes
        out_bytes = self.q_bytes + self.sizes.lse(self.group_heads) * len(self.ranks)
        own_bytes = self.q_bytes + self.own_kv_bytes
        qkv = self._shards("qkv", tokens * self.num_groups * own_bytes)
        out = self._shards("out", tokens * self.num_groups * self.q_bytes)
        b.input(*qkv)
        b.output(*out)
        packed = [self._group("qkv", tokens * qkv_bytes) for _ in groups]
        gathered = [self._heads_of_all("qkv", tokens * qkv_bytes, g) for g in groups]
        made = [self._heads_of_all("out", tokens * out_bytes, g) for g in groups]
        returned = [self._group("out", tokens * self.q_bytes) for _ in groups]
        ready = [self._copy(g, tokens * (own_bytes + qkv_bytes), qkv, packed[g]) for g in groups]
        sizes = qkv_bytes, self.q_bytes
        back = self._pipeline(Kind.ATTENTION, sizes, packed, gathered, made, returned, [], ready)
        for g in groups:
            self._copy(g, tokens * 2 * self.q_bytes, returned[g], out, back[g])
        return b.build()

    def backward(self) -> Schedule:
        b, tokens, groups = self.b, self.tokens, range(self.num_groups)
        qkv_bytes = self.q_bytes + self.kv_bytes
        out_bytes = self.q_bytes + self.sizes.lse(self.group_heads) * len(self.ranks)
        own_bytes = self.q_bytes + self.own_kv_bytes
        saved = [self._heads_of_all("qkv", tokens * qkv_bytes, g) for g in groups]
        saved += [self._heads_of_all("out", tokens * out_bytes, g) for g in groups]
        dout = self._shards("dout", tokens * self.num_groups * self.q_bytes)
        dqkv = self._shards("dqkv", tokens * self.num_groups * own_bytes)
        for access in (*saved, dout):
            b.input(*access)
        b.output(*dqkv)
        packed = [self._group("dout", tokens * self.q_bytes) for _ in groups]
        gathered = [self._heads_of_all("dout", tokens * self.q_bytes, g) for g in groups]
        made = [self._heads_of_all("dqkv", tokens * qkv_bytes, g) for g in groups]
        returned = [self._group("dqkv", tokens * qkv_bytes) for _ in groups]
        ready = [self._copy(g, tokens * 2 * self.q_bytes, dout, packed[g]) for g in groups]
        sizes = self.q_bytes, qkv_bytes
        back = self._pipeline(Kind.ATTENTION_BACKWARD, sizes, packed, gathered, made, returned, saved, ready)
        for g in groups:
            self._copy(g, tokens * (qkv_bytes + own_bytes), returned[g], dqkv, back[g])
        return b.build()

    def _shards(self, tensor: str, nbytes: int) -> Access:
        """Every rank's own tokens, all heads."""
        return self.b.buffers(tensor, nbytes), self.b.blocks(tensor, self.ranks, self.all_heads)

    def _group(self, tensor: str, nbytes: int) -> Access:
        """Every rank's own tokens, all ranks' heads of one group, ordered by rank."""
        name = f"{tensor} by rank"
        return self.b.buffers(name, nbytes), self.b.blocks(name, self.ranks, self.all_heads)

    def _heads_of_all(self, tensor: str, nbytes: int, group: int) -> Access:
        """All tokens, every rank's own heads of one group."""
        blocks = [
            self.b.blocks(tensor, [self.whole], (int(first), int(count)))
            for first, count, _, _ in self.heads(group)
        ]
        return self.b.buffers(f"{tensor} of group", nbytes), np.concatenate(blocks)

    def _copy(self, group: int, nbytes: int, source: Access, target: Access, after: Ints | None = None) -> Ints:
        """Order one group by rank, or back; returns indices, ``[ranks]``."""
        deps = [] if after is None else [after.repeat(len(self.ranks))]
        return self.b.add(
            Kind.COPY, (self.ranks, "compute"), step=group, nbytes=nbytes, deps=deps, heads=self.heads(group),
            reads=[source], writes=[target],
        )  # fmt: skip

    def _exchange(self, group: int, nbytes: int, source: Access, target: Access, after: Ints) -> Ints:
        """All-to-all of one group over all ranks; returns its index, ``[1]``."""
        return self.b.add(
            Kind.ALL_TO_ALL, (self.together, "comm"), step=group, nbytes=nbytes, deps=[after[None, :]],
            reads=[source], writes=[target],
        )  # fmt: skip

    def _attend(self, kind: Kind, group: int, arrived: Ints, reads: list[Access], made: Access) -> Ints:
        """Attention over all tokens on every rank; returns indices, ``[ranks]``."""
        return self.b.add(
            kind, (self.ranks, "compute"), step=group, tile=1, heads=self.heads(group),
            deps=[arrived.repeat(len(self.ranks))], reads=reads, writes=[made],
        )  # fmt: skip

    def _pipeline(
        self, kind: Kind, sizes: tuple[int, int], packed: Groups, gathered: Groups, made: Groups, returned: Groups,
        saved: Groups, ready: list[Ints],
    ) -> list[Ints]:  # fmt: skip
        """Exchange, attend and exchange back, the next group's exchange ahead of this group's attention."""
        tokens, groups = self.tokens, range(self.num_groups)
        back, arrived = [], self._exchange(0, tokens * sizes[0], packed[0], gathered[0], ready[0])
        for g in groups:
            here = arrived
            if g + 1 < self.num_groups:
                arrived = self._exchange(g + 1, tokens * sizes[0], packed[g + 1], gathered[g + 1], ready[g + 1])
            done = self._attend(kind, g, here, [*saved[g::self.num_groups], gathered[g]], made[g])
            back.append(self._exchange(g, tokens * sizes[1], made[g], returned[g], done))
        return back
