"""All-gather: every rank gathers all keys and values, some heads at a time, and computes its own queries.

Forward: while one group of key-value heads is computed the next is gathered; gathered zigzag shards are packed into
the order that the kernel reads. Backward: keys and values are gathered again, and each group's gradients are
reduce-scattered in fp32 while the next group is computed.

Reference: Llama 3 (arXiv 2407.21783), section 3.3.2; Zhu, ring-flash-attention (llama3 variant). Differs: zigzag
shards as well as contiguous ones, fp32 gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cpsim.case.cluster import Cluster
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.masks.slices import Ints, RangeSets, sets_of
from cpsim.masks.tiles import Tiles, make_tiles, sequences
from cpsim.schedule.builder import Access, Builder
from cpsim.schedule.schedule import Int32, Kind, Pass, Schedule
from cpsim.strategies import sharding
from cpsim.strategies.allgather_halves import plan_halves
from cpsim.strategies.others import CPSIM, GatherCode, HalvesCode, Implementation
from cpsim.strategies.ring.ring import plan_cut
from cpsim.strategies.sizes import Sizes
from cpsim.strategies.sparse import plan_fetch

LAYOUTS = ("contiguous", "zigzag", "document_zigzag")
KEYS = ("all", "chosen")
UNEVEN = 1.05
"""Largest over mean work of contiguous shards from which on another layout is worth trying."""


def plan_allgather(
    workload: Workload,
    cluster: Cluster,
    pass_: Pass,
    code: Implementation = CPSIM,
    *,
    layout: str = "zigzag",
    heads_per_gather: int | None = None,
    keys: str = "all",
) -> Schedule:
    """Queries stay; keys and values of all ranks are gathered.

    Args:
        workload, cluster, pass_: the case.
        code: whose implementation.
        layout: ``contiguous``, ``zigzag`` (packed sequence) or ``document_zigzag`` (every document).
        heads_per_gather: key-value heads gathered at a time; default all of them, without overlap.
        keys: ``all``, or where queries choose their keys ``chosen``: only those that a rank's queries chose.

    Raises:
        InfeasibleError: ``heads_per_gather`` does not divide the key-value heads, or the ranks the tokens.
    """
    if layout not in LAYOUTS:
        raise ScenarioError(f"knobs.layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
    if keys not in KEYS:
        raise ScenarioError(f"knobs.keys: expected one of {', '.join(KEYS)}, got {keys!r}")
    if code.gathered is not None:
        chunks = "contiguous" if layout == "contiguous" else "sequence"
        return plan_cut(workload, cluster, pass_, chunks, code.gathered)
    at_once = workload.num_kv_heads if heads_per_gather is None else heads_per_gather
    if not isinstance(at_once, int) or at_once < 1 or workload.num_kv_heads % at_once:
        raise InfeasibleError(
            f"allgather needs heads_per_gather to divide the key-value heads, "
            f"got {at_once!r} for {workload.num_kv_heads} kv_heads"
        )
    workload = code.padded(workload, cluster.num_gpus)
    if workload.num_tokens % cluster.num_gpus:
        raise InfeasibleError(
            f"allgather needs tokens divisible by ranks, since collectives move equal parts, "
            f"got {workload.num_tokens} tokens on {cluster.num_gpus} GPUs"
        )
    if keys == "chosen":
        bounds = sharding.documents_of(workload.slices(), workload.num_tokens)
        return plan_fetch(workload, _shards(layout, bounds, cluster.num_gpus), pass_)
    if isinstance(code.allgather, HalvesCode):
        return plan_halves(workload, cluster.num_gpus, pass_, code.allgather)
    plan = _AllGather(workload, _cut(workload, cluster.num_gpus, layout), at_once, code.allgather)
    return plan.forward() if pass_ == "fwd" else plan.backward()


def plan_groups(workload: Workload, pass_: Pass, shards: RangeSets, num_groups: int) -> Schedule:
    """Groups of equally many consecutive ranks, each gathering the keys of its own tokens; no query sees others.

    Args:
        workload, pass_: the case.
        shards: tokens of every rank.
        num_groups: of ranks.

    Raises:
        InfeasibleError: ranks of a group have unequal shards.
    """
    tokens = shards.num_tokens().reshape(num_groups, -1)
    if (tokens != tokens[:, :1]).any():
        raise InfeasibleError(
            f"ranks that gather from each other need equally many tokens, got {tokens.tolist()}; use documents whose "
            f"lengths are multiples of {2 * tokens.shape[1]}"
        )
    group = np.repeat(np.arange(num_groups), tokens.shape[1])
    plan = _AllGather(workload, _cut_groups(workload, shards, group), workload.num_kv_heads, None)
    return plan.forward() if pass_ == "fwd" else plan.backward()


def allgather_knobs(workload: Workload, cluster: Cluster) -> Sequence[Mapping[str, object]]:
    """Knob settings worth trying: layouts that can balance the mask, with and without overlap."""
    mask = workload.slices()
    work = _cut(workload, cluster.num_gpus, "contiguous").tiles.area[1:]
    layouts = ["zigzag"] if sharding.is_causal(mask) else ["contiguous"]
    if work.max() > UNEVEN * work.mean() and not sharding.is_causal(mask):
        layouts = ["contiguous", "zigzag"]
    if len(sharding.documents_of(mask, workload.num_tokens)) > 2:
        layouts = ["contiguous", "zigzag", "document_zigzag"]
    per_gather = dict.fromkeys([workload.num_kv_heads, max(1, workload.num_kv_heads // 4), 1])
    divisors = [n for n in per_gather if workload.num_kv_heads % n == 0]
    tried: list[Mapping[str, object]] = [{"layout": one, "heads_per_gather": n} for one in layouts for n in divisors]
    if workload.sparse is not None:
        tried += [{"layout": layout, "keys": "chosen"} for layout in ("contiguous", "zigzag")]
    return tuple(tried)


class _AllGather:
    """One all-gather schedule under construction."""

    def __init__(self, workload: Workload, cut: _Cut, heads_per_gather: int, code: GatherCode | None) -> None:
        self.workload, self.code = workload, code
        shards, sets, tiles, self.group = cut.shards, cut.sets, cut.tiles, cut.group
        num_ranks, gathering = len(shards), int(cut.group[-1]) + 1
        self.ranks, self.together = np.arange(num_ranks), np.arange(num_ranks).reshape(gathering, -1)
        self.num_groups = workload.num_kv_heads // heads_per_gather
        self.tile, self.whole = 1 + self.ranks, num_ranks + np.arange(gathering)
        self.seen = num_ranks + gathering + self.ranks
        calls = sequences(tiles)
        self.in_order = cut.ordered and bool(calls.in_place[self.tile].all())
        """Gathered shards lie in the order in which the kernel reads them, so it reads them in place."""
        self.keys = np.where(calls.one_call[self.tile], calls.keys()[self.tile], sets.num_tokens()[self.seen])
        """Key rows that every rank's kernel call reads; where no kernel can run it, those that some query sees."""
        self.b, self.sizes = Builder(num_ranks, sets, tiles), Sizes(workload)
        self.tokens, self.total = shards.num_tokens(), sets.num_tokens()[self.whole]
        self.kv_heads = heads_per_gather
        self.q_heads = workload.num_heads // self.num_groups
        self.q_bytes, self.o_bytes = self.sizes.query(workload.num_heads), self.sizes.output(workload.num_heads)
        self.kv_bytes = self.sizes.kv(heads_per_gather)
        """One token of K and V of one group."""
        self.lse_bytes = self.sizes.lse(workload.num_heads)
        self.all_heads, self.all_kv_heads = (0, workload.num_heads), (0, workload.num_kv_heads)

    def heads(self, group: int) -> tuple[int, int, int, int]:
        """First query head, query heads, first key-value head, key-value heads of a group."""
        return group * self.q_heads, self.q_heads, group * self.kv_heads, self.kv_heads

    def forward(self) -> Schedule:
        b = self.b
        q = self._shard("q", self.q_bytes, self.all_heads)
        out = self._shard("out", self.o_bytes + self.lse_bytes, self.all_heads)
        b.input(*q)
        b.output(*out)
        gather = _Gather(self, is_paced=False)
        for g in range(self.num_groups):
            keys, after = gather.keys(g)
            done = b.add(
                Kind.ATTENTION,
                (self.ranks, "compute"),
                step=g,
                tile=self.tile,
                heads=self.heads(g),
                deps=after,
                reads=[self._part(q, "q", g), keys],
                writes=[self._part(out, "out", g)],
            )
            gather.read_by(g, done)
        for row_kernel in self.code.leave if self.code else ():
            b.add(row_kernel.kind, (self.ranks, "compute"), nbytes=row_kernel.nbytes(self.tokens, self.workload))
        return b.build()

    def backward(self) -> Schedule:
        b = self.b
        widths = {"q": self.q_bytes, "out": self.o_bytes + self.lse_bytes, "dout": self.o_bytes}
        given = {tensor: self._shard(tensor, width, self.all_heads) for tensor, width in widths.items()}
        for access in given.values():
            b.input(*access)
        dq = self._shard("dq", self.q_bytes, self.all_heads)
        dkv = self._shard("dkv", self.kv_bytes * self.num_groups, self.all_kv_heads)
        b.output(*dq)
        b.output(*dkv)
        gather, scatter = _Gather(self, is_paced=True), _Scatter(self, dkv)
        for g in range(self.num_groups):
            keys, after = gather.keys(g)
            reads = [self._part(access, tensor, g) for tensor, access in given.items()]
            b.add(
                Kind.ATTENTION_BACKWARD,
                (self.ranks, "compute"),
                step=g,
                tile=self.tile,
                heads=self.heads(g),
                deps=after,
                reads=[*reads, keys],
                writes=[self._part(dq, "dq", g), scatter.partial(g)],
            )
            scatter.reduce(g)
        scatter.finish()
        return b.build()

    def _shard(self, tensor: str, width: int, heads: tuple[int, int]) -> Access:
        return self.b.buffers(tensor, self.tokens * width), self.b.blocks(tensor, self.ranks, heads)

    def _part(self, access: Access, tensor: str, group: int) -> Access:
        """One group's query heads of a shard."""
        return access[0], self.b.blocks(tensor, self.ranks, self.heads(group)[:2])

    def keys_of_all(self, tensor: str, group: int) -> Int32:
        """Block of all tokens of those who gather together, of one group of heads, once per rank."""
        return self.b.blocks(tensor, self.whole, self.heads(group)[2:])[self.group]

    def of_all(self, width: int) -> Ints:
        """Bytes of what every rank gathers, ``width`` a token."""
        return self.total[self.group] * width


@dataclass(frozen=True, slots=True)
class _Cut:
    """Who has and sees what."""

    shards: RangeSets
    sets: RangeSets
    """Shards, all tokens of those who gather together, and the keys that each rank sees."""
    tiles: Tiles
    """Tiles of shards x all tokens of those who gather together."""
    group: Ints
    """Group of every rank: consecutive ranks gather together."""
    ordered: bool
    """Whether gathered shards lie in the order of tokens."""


@lru_cache(maxsize=2)
def _cut(workload: Workload, num_ranks: int, layout: str) -> _Cut:
    shards = _shards(layout, sharding.documents_of(workload.slices(), workload.num_tokens), num_ranks)
    whole, group = sharding.contiguous(workload.num_tokens, 1), np.zeros(num_ranks, np.int64)
    return _cut_of(workload, shards, whole, group, layout == "contiguous")


def _cut_groups(workload: Workload, shards: RangeSets, group: Ints) -> _Cut:
    edges = sharding.edges_of(shards)
    held = sharding.cells_of(shards, edges).reshape(group[-1] + 1, -1, len(edges) - 1)
    return _cut_of(workload, shards, sets_of(np.asarray(held.any(axis=1)), edges), group, ordered=False)


def _cut_of(workload: Workload, shards: RangeSets, whole: RangeSets, group: Ints, ordered: bool) -> _Cut:
    sets, num_ranks = sharding.stack(shards, whole), len(shards)
    tiles = make_tiles(workload.slices(), sets, np.arange(num_ranks), num_ranks + group)
    return _Cut(shards, sharding.stack(sets, sharding.seen_keys(tiles, num_ranks)), tiles, group, ordered)


def _shards(layout: str, bounds: Ints, num_ranks: int) -> RangeSets:
    if layout == "contiguous":
        return sharding.contiguous(int(bounds[-1]), num_ranks)
    return sharding.zigzag_shards(bounds if layout == "document_zigzag" else bounds[[0, -1]], num_ranks)[0]


class _Gather:
    """Gathered keys and values, double-buffered over head groups."""

    def __init__(self, plan: _AllGather, is_paced: bool) -> None:
        self.plan, b = plan, plan.b
        kv = plan._shard("kv", plan.kv_bytes * plan.num_groups, plan.all_kv_heads)
        b.input(*kv)
        self.source, self.ready = kv, np.full(len(plan.ranks), -1)
        if plan.code:
            self.ready = b.add(Kind.BARRIER, (plan.ranks, "compute"))
        if plan.num_groups > 1 and not plan.code:
            self.source = (b.buffers("kv by group", plan.tokens * plan.kv_bytes * plan.num_groups), kv[1])
            self.ready = b.add(
                Kind.COPY,
                (plan.ranks, "compute"),
                reads=[kv],
                writes=[self.source],
                nbytes=2 * plan.tokens * plan.kv_bytes * plan.num_groups,
            )
        count = min(2, plan.num_groups)
        self.buffers = [b.buffers(f"kv of all {i}", plan.of_all(plan.kv_bytes)) for i in range(count)]
        apart = count if plan.code and plan.num_groups > 1 else 0
        self.sliced = [b.buffers(f"kv of group {i}", plan.tokens * plan.kv_bytes) for i in range(apart)]
        self.packed = None if plan.in_order else b.buffers("keys in order", plan.keys * plan.kv_bytes)
        self.free = [np.full(len(plan.ranks), -1)] * 2
        """Last op of every rank that read each buffer."""
        self.is_paced = is_paced
        """On ``comm``, the reduce-scatter of the group that last used a buffer comes before its next gather."""
        self.arrived = self._gather(0)

    def _gather(self, group: int) -> Ints:
        return self._gather_apart(group) if self.plan.code else self._gather_together(group)

    def _gather_apart(self, group: int) -> Ints:
        """Keys, then values, each after a copy of its heads; the copies wait for the gather before."""
        plan, half = self.plan, self.plan.kv_bytes // 2
        mine, parts = plan.b.blocks("kv", plan.ranks, plan.heads(group)[2:]), [half, plan.kv_bytes - half]
        source, waits = self.source[0], self.ready if group == 0 else self.arrived[plan.group]
        if plan.num_groups > 1:
            source = self.sliced[group % 2]
            for i, width in enumerate(parts):
                waits = plan.b.add(
                    Kind.COPY,
                    (plan.ranks, "compute"),
                    step=group,
                    nbytes=2 * plan.tokens * width,
                    deps=[waits],
                    reads=[(self.source[0], mine)] * i,
                    writes=[(source, mine)] * i,
                )
        target = self.buffers[group % 2], plan.keys_of_all("kv", group)
        for i, width in enumerate(parts):
            gathered = plan.b.add(
                Kind.ALL_GATHER,
                (plan.together, "comm"),
                step=group,
                nbytes=plan.total * width,
                deps=[waits[plan.together], self.free[group % 2][plan.together]],
                reads=[(source, mine)] * i,
                writes=[target] * i,
            )
        return gathered

    def _gather_together(self, group: int) -> Ints:
        plan = self.plan
        mine = plan.b.blocks("kv", plan.ranks, plan.heads(group)[2:])
        waits = [self.ready] if group == 0 else [] if self.is_paced else [self.free[group % 2]]
        return plan.b.add(
            Kind.ALL_GATHER,
            (plan.together, "comm"),
            step=group,
            nbytes=plan.total * plan.kv_bytes,
            deps=[after[plan.together] for after in waits],
            reads=[(self.source[0], mine)],
            writes=[(self.buffers[group % 2], plan.keys_of_all("kv", group))],
        )

    def keys(self, group: int) -> tuple[Access, list[Ints]]:
        """What the kernel reads for a group and which ops it waits for; starts gathering the next group."""
        plan, arrived = self.plan, self.arrived[self.plan.group]
        if group + 1 < plan.num_groups:
            self.arrived = self._gather(group + 1)
        seen = plan.b.blocks("kv", plan.seen, plan.heads(group)[2:])
        if self.packed is None:
            return (self.buffers[group % 2], seen), [arrived]
        self.free[group % 2] = plan.b.add(
            Kind.COPY,
            (plan.ranks, "compute"),
            step=group,
            heads=plan.heads(group),
            nbytes=2 * plan.keys * plan.kv_bytes,
            deps=[arrived],
            reads=[(self.buffers[group % 2], seen)],
            writes=[(self.packed, seen)],
        )
        return (self.packed, seen), []

    def read_by(self, group: int, kernels: Ints) -> None:
        """These kernels read the keys of a group, unless they read packed copies."""
        if self.packed is None:
            self.free[group % 2] = kernels


class _Scatter:
    """Gradients of keys and values on their way home, double-buffered over head groups."""

    def __init__(self, plan: _AllGather, dkv: Access) -> None:
        self.plan, self.dkv, b = plan, dkv, plan.b
        self.width = plan.kv_bytes if plan.code else plan.sizes.accumulator(plan.kv_bytes)
        self.rows = b.buffers("dkv partial", plan.keys * plan.kv_bytes)
        count = min(2, plan.num_groups)
        self.full = [b.buffers(f"dkv of all {i}", plan.of_all(self.width)) for i in range(count)]
        self.home: list[Access] = []
        """What came home of every group."""
        self.reduced = np.full(len(plan.together), -1)
        """The last reduce-scatter; the one before it ended before this group's keys were gathered."""

    def partial(self, group: int) -> Access:
        """What the kernel writes: gradients of the keys that this rank's queries see."""
        return self.rows, self.plan.b.blocks("dkv", self.plan.seen, self.plan.heads(group)[2:])

    def reduce(self, group: int) -> None:
        """Fill a full-length buffer with this rank's gradients (in fp32) and zeros elsewhere, and reduce-scatter it.

        Every row is written once, and read nowhere, even where several of the kernel's rows are summed.
        """
        plan = self.plan
        full = self.full[group % 2], plan.keys_of_all("dkv", group)
        mine = plan.b.blocks("dkv", plan.ranks, plan.heads(group)[2:])
        straight = plan.code is not None and plan.num_groups == 1
        home = self.dkv[0] if straight else plan.b.buffers(f"dkv fp32 {group}", plan.tokens * self.width)
        self.home.append((home, mine))
        moved = plan.keys * plan.kv_bytes if plan.code is None else 0
        added = plan.b.add(
            Kind.ACCUMULATE,
            (plan.ranks, "compute"),
            step=group,
            heads=plan.heads(group),
            nbytes=plan.of_all(self.width) + moved,
            reads=[self.partial(group)],
            writes=[full],
        )
        for i in range(2 if plan.code else 1):
            self.reduced = plan.b.add(
                Kind.REDUCE_SCATTER,
                (plan.together, "comm"),
                step=group,
                nbytes=plan.total * self.width // (2 if plan.code else 1),
                deps=[added[plan.together]],
                reads=[full] * (i or not plan.code),
                writes=[self.home[group]] * (i or not plan.code),
            )
        if plan.code and not straight:
            self._put(group, (self.dkv[0], mine))

    def _put(self, group: int, target: Access) -> None:
        """Other people's gradients of one group are copied home, keys and then values; a kernel waits for that."""
        plan, after = self.plan, self.reduced[self.plan.group]
        for i in range(2):
            plan.b.add(
                Kind.COPY,
                (plan.ranks, "compute"),
                step=group,
                nbytes=plan.tokens * self.width,
                deps=[after],
                reads=[self.home[group]] * i,
                writes=[target] * i,
            )

    def finish(self) -> None:
        """Cast what came home into the gradients' own type and layout."""
        plan = self.plan
        if plan.code:
            return
        last = [self.reduced[plan.group]]
        plan.b.add(
            Kind.COPY,
            (plan.ranks, "compute"),
            step=plan.num_groups,
            nbytes=plan.tokens * (self.width + plan.kv_bytes) * plan.num_groups,
            deps=last,
            reads=self.home,
            writes=[self.dkv],
        )
