"""Heads and context together: all-to-alls in Ulysses groups around rings of the ranks that have the same heads.

Reference: Fang & Zhao 2024, "USP: A Unified Sequence Parallelism Approach" (arXiv 2405.07719), algorithm 1; double
rings: Gu et al. 2024, "LoongTrain" (arXiv 2406.18485), section 4.3. Differs: Q, K and V travel in one all-to-all;
key-value heads are replicated where there are fewer of them than ranks of a group; gradients of queries travel home
while those of keys and values make their last hop; from one inner ring to the next gradients go straight to who
needs them, one hop where LoongTrain takes two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cpsim.case.cluster import Cluster
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.masks.slices import Ints
from cpsim.schedule.builder import NOTHING, Access, Builder
from cpsim.schedule.schedule import Kind, Pass, Schedule
from cpsim.strategies import sharding
from cpsim.strategies.heads import HeadExchange, check_heads
from cpsim.strategies.others import CPSIM, HeldRingCode, Implementation, UlyssesCode
from cpsim.strategies.ring.grid import PLACEMENTS, RingGrid, make_grid
from cpsim.strategies.ring.held import as_run, make_ring, runs_whole
from cpsim.strategies.ring.ring import AnyRing, cut, plan_rings
from cpsim.strategies.ring.steps import Steps


def plan_usp(
    workload: Workload,
    cluster: Cluster,
    pass_: Pass,
    code: Implementation = CPSIM,
    *,
    ulysses: int | None = None,
    ring: str = "zigzag",
    zigzag: str = "document",
    placement: str = "head_first",
) -> Schedule:
    """Ulysses groups times rings.

    Args:
        workload, cluster, pass_: the case.
        code: whose implementation.
        ulysses: ranks of a Ulysses group; default: as many of a node as heads allow.
        ring: ``zigzag`` shards balance causal masks; ``basic`` ones are contiguous.
        zigzag: ``document`` or ``sequence``, as of ``zigzag_ring``.
        placement: ``head_first``: Ulysses groups are consecutive ranks, so they fill nodes first; ``context_first``:
            rings are.

    Raises:
        InfeasibleError: the degree does not divide ranks or heads, or the ranks do not divide the tokens.
    """
    degree = ulysses_degree("usp", workload, cluster, ulysses, placement, code)
    chunks = _chunks(ring, zigzag)
    grid = make_grid(cluster.num_gpus, degree // cluster.copies, placement, copies=cluster.copies)
    return _plan(code.padded(workload, grid.num_places, degree), grid, pass_, chunks, code, code.ring)


def plan_loongtrain(
    workload: Workload,
    cluster: Cluster,
    pass_: Pass,
    code: Implementation = CPSIM,
    *,
    ulysses: int | None = None,
    inner_ring: int | None = None,
    zigzag: str = "document",
    placement: str = "head_first",
) -> Schedule:
    """Ulysses groups times double rings: keys and values circle in an inner ring while its shards travel to the next.

    Args:
        workload, cluster, pass_: the case.
        code: whose implementation.
        ulysses, zigzag, placement: as of ``plan_usp``.
        inner_ring: ranks of an inner ring; default: the ranks of a ring that share a node, or where that is one or
            all of them, ring / w for the largest divisor w of the ring with w <= ring / w.

    Raises:
        InfeasibleError: as of ``plan_usp``, or the inner ring does not divide the ring.
    """
    degree = ulysses_degree("loongtrain", workload, cluster, ulysses, placement, code)
    ring = cluster.all_gpus // degree
    inner = _default_inner(cluster, ring, placement) if inner_ring is None else inner_ring
    if type(inner) is not int or inner < 1:
        raise ScenarioError(f"knobs.inner_ring: expected a positive integer, got {inner!r}")
    if ring % inner:
        raise InfeasibleError(f"loongtrain needs inner_ring to divide the {ring} ranks of a ring, got {inner}")
    grid = make_grid(cluster.num_gpus, degree // cluster.copies, placement, inner, copies=cluster.copies)
    workload = code.padded(workload, ring, degree)
    return _plan(workload, grid, pass_, _chunks("zigzag", zigzag), code, code.double_ring)


def usp_knobs(workload: Workload, cluster: Cluster) -> Sequence[Mapping[str, object]]:
    """Knob settings worth trying: degrees about the default one, groups inside nodes and rings inside nodes."""
    degrees = _degrees_worth_trying(workload, cluster)
    placements = PLACEMENTS if cluster.num_nodes > 1 else PLACEMENTS[:1]
    return [{"ulysses": d, "placement": p} for d in degrees for p in placements] or [{}]


def loongtrain_knobs(workload: Workload, cluster: Cluster) -> Sequence[Mapping[str, object]]:
    """Knobs of ``usp`` where a ring has several inner rings; else a double ring of all ranks."""
    found: list[Mapping[str, object]] = []
    for d in _degrees_worth_trying(workload, cluster):
        for placement in PLACEMENTS:
            ring = cluster.num_gpus // d
            if 1 < _default_inner(cluster, ring, placement) < ring:
                found.append({"ulysses": d, "placement": placement})
    return found or [{"ulysses": 1}]


def _degrees_worth_trying(workload: Workload, cluster: Cluster) -> list[int]:
    """The default, twice of it, and half of it where the default leaves no ring or replicates key-value heads."""
    best, ranks = default_degree(workload, cluster), cluster.num_gpus
    halved = best == ranks or best > workload.num_kv_heads
    degrees = (best, 2 * best, *([best // 2] if halved else []))
    return [d for d in degrees if 1 < d < ranks and _allowed(workload, cluster, d)]


def default_degree(workload: Workload, cluster: Cluster) -> int:
    """The largest Ulysses group inside a node that the heads allow."""
    node = min(cluster.num_gpus, cluster.gpus_per_node)
    return max(d for d in range(1, node + 1) if node % d == 0 and _allowed(workload, cluster, d))


def _allowed(workload: Workload, cluster: Cluster, degree: int) -> bool:
    kv_heads = workload.num_kv_heads
    fits = kv_heads % degree == 0 or degree % kv_heads == 0
    return fits and workload.num_heads % degree == 0 and cluster.num_gpus % degree == 0


def ulysses_degree(
    who: str, workload: Workload, cluster: Cluster, asked: int | None, placement: str, code: Implementation = CPSIM
) -> int:
    """The Ulysses degree, checked.

    Raises:
        ScenarioError: a knob has no such value.
        InfeasibleError: the case cannot be run with that degree.
    """
    if placement not in PLACEMENTS:
        raise ScenarioError(f"knobs.placement: expected {' or '.join(map(repr, PLACEMENTS))}, got {placement!r}")
    if asked is not None and (type(asked) is not int or asked < 1):
        raise ScenarioError(f"knobs.ulysses: expected a positive integer, got {asked!r}")
    ranks, tokens = cluster.all_gpus, workload.num_tokens
    degree = default_degree(workload, cluster) if asked is None else asked
    if ranks % degree:
        raise InfeasibleError(f"{who} needs a Ulysses degree that divides the ranks, got {degree} on {ranks} GPUs")
    check_heads(who, workload, degree, "ranks of a Ulysses group")
    if tokens % ranks and not code.pads:
        raise InfeasibleError(f"{who} needs tokens divisible by ranks, got {tokens} tokens on {ranks} GPUs")
    if code.ulysses is not None:
        _check_theirs(who, code, workload, degree, ranks)
    return degree


def _check_theirs(who: str, code: Implementation, workload: Workload, degree: int, ranks: int) -> None:
    assert code.ulysses is not None
    if workload.num_kv_heads % degree:
        raise InfeasibleError(
            f"{who} of {code.name} does not replicate key-value heads, so it needs them divisible by the Ulysses "
            f"degree, got {workload.num_kv_heads} kv_heads and degree {degree}; set knob ulysses"
        )
    for what, one, may_be in (
        ("Ulysses groups", degree == 1, code.ulysses.groups_of_one),
        ("rings", degree == ranks, code.ulysses.rings_of_one),
    ):
        if one and not may_be:
            raise InfeasibleError(
                f"{who} of {code.name} is planned for {what} of 2 GPUs or more, got degree {degree} on {ranks} GPUs; "
                f"set knob ulysses"
            )


def _default_inner(cluster: Cluster, ring: int, placement: str) -> int:
    """Ranks of an inner ring: those of a node, or about the root of the ring."""
    node = cluster.gpus_per_node if placement == "context_first" else 1
    if 1 < node < ring and ring % node == 0:
        return node
    return ring // max(w for w in range(1, ring + 1) if ring % w == 0 and w * w <= ring)


def _chunks(ring: str, zigzag: str) -> str:
    """How tokens are cut, as ``cut`` names it."""
    if ring not in ("zigzag", "basic"):
        raise ScenarioError(f"knobs.ring: expected 'zigzag' or 'basic', got {ring!r}")
    if zigzag not in ("document", "sequence"):
        raise ScenarioError(f"knobs.zigzag: expected 'document' or 'sequence', got {zigzag!r}")
    return zigzag if ring == "zigzag" else "contiguous"


def _plan(
    workload: Workload, grid: RingGrid, pass_: Pass, chunks: str, code: Implementation, facts: AnyRing
) -> Schedule:
    """``facts``: of the ring that the code runs."""
    if grid.num_parts == 1:
        return plan_rings(workload, grid, pass_, chunks, facts)
    plan = _Hybrid(workload, as_run(grid, pass_, facts), chunks, facts)
    if code.ulysses is not None:
        return plan.one_by_one(pass_, code.ulysses)
    return plan.forward() if pass_ == "fwd" else plan.backward()


class _Hybrid:
    """One schedule of all-to-alls around rings under construction."""

    def __init__(self, workload: Workload, grid: RingGrid, chunks: str, facts: AnyRing) -> None:
        shards = cut(workload, grid.num_places, chunks, grid.inner, grid.backwards, not runs_whole(workload, facts))
        pieces = sharding.split(sharding.part(shards.sets, 0, grid.num_places), grid.num_parts)
        own = len(shards.sets) + grid.place * grid.num_parts + grid.part
        b = self.b = Builder(
            grid.ranks.size,
            sharding.stack(shards.sets, pieces),
            shards.tiles,
            narrow_sums=isinstance(facts, HeldRingCode),
            copies=grid.copies,
        )
        x = self.x = Steps(workload, shards, grid)
        self.ring = make_ring(b, x, facts)
        self.exchange = HeadExchange(b, workload, grid.ranks, own, grid.place, copies=grid.copies)

    def forward(self) -> Schedule:
        b, e, x, ring, tokens = self.b, self.exchange, self.x, self.ring, self.exchange.tokens
        own_bytes, qkv_bytes = e.q_bytes + e.own_kv_bytes, e.q_bytes + e.kv_bytes
        qkv = e.own(e.buffers("qkv", tokens * own_bytes), ("q", "kv"))
        final = e.own(e.buffers("out", tokens * e.o_bytes), ("o",))
        for access in qkv:
            b.input(*access)
        b.output(*final[0])
        packed = e.by_rank("qkv", ("q", "kv"), tokens * qkv_bytes)
        gathered = e.buffers("qkv of group", tokens * qkv_bytes)
        q, kv = (gathered, ring.blocks("q")), (gathered, ring.blocks("kv"))
        ready = e.copy(tokens * (own_bytes + qkv_bytes), qkv, packed)
        ring.ready = e.exchange(tokens * qkv_bytes, packed, [ring.shard(q), ring.shard(kv)], ready)
        if x.grid.num_places > 1:
            kv = self.keys_apart(kv)
        out = ring.result("out", x.o_bytes, x.lse_bytes, output=False)
        done = ring.forward(q, kv, out)
        returned = e.by_rank("out", ("o",), tokens * e.o_bytes)
        back = e.exchange(tokens * e.o_bytes, [ring.shard(out)], returned, done)
        e.copy(2 * tokens * e.o_bytes, returned, final, back)
        return b.build()

    def keys_apart(self, kv: Access) -> Access:
        """Keys and values side by side, as transfers need them; the ring starts after that."""
        x, ring = self.x, self.ring
        apart = self.b.buffers("kv of group", x.tokens * x.kv_bytes), kv[1]
        ring.keys_ready = self.b.add(
            Kind.COPY,
            (x.ranks, "compute"),
            heads=x.heads,
            nbytes=2 * x.tokens * x.kv_bytes,
            deps=[ring.ready],
            reads=[ring.shard(kv)],
            writes=[ring.shard(apart)],
        )
        ring.ready = np.full_like(ring.ready, NOTHING)
        return apart

    def backward(self) -> Schedule:
        b, e, x, ring, tokens = self.b, self.exchange, self.x, self.ring, self.exchange.tokens
        widths = {"q": x.q_bytes, "out": x.o_bytes + x.lse_bytes, "kv": x.kv_bytes}
        q, out, kv = (ring.given(name, width) for name, width in widths.items())
        given = e.own(e.buffers("dout", tokens * e.o_bytes), ("dout",))
        b.input(*given[0])
        packed = e.by_rank("dout", ("dout",), tokens * e.o_bytes)
        dout = e.buffers("dout of group", tokens * e.o_bytes), ring.blocks("dout")
        ready = e.copy(2 * tokens * e.o_bytes, given, packed)
        ring.ready = e.exchange(tokens * e.o_bytes, packed, [ring.shard(dout)], ready)
        dq = ring.result("dq", x.q_bytes, output=False)
        dkv = ring.result("dkv", x.kv_bytes, summed=False, output=False)
        done = ring.backward([q, dout, out], kv, dq, dkv)
        self.bring_home("dq", ring.shard(dq), done[0], e.q_bytes, Kind.COPY)
        later = np.where(done[1] == done[0], NOTHING, done[1])
        self.bring_home("dkv", ring.shard(dkv), later, e.own_kv_bytes, e.home)
        return b.build()

    def bring_home(self, tensor: str, made: Access, after: Ints, width: int, kind: Kind) -> None:
        """Gradients from the ranks of their heads to those of their tokens."""
        e, nbytes = self.exchange, self.exchange.bytes_of(tensor)
        returned = e.by_rank(tensor, (tensor,), nbytes)
        back = e.exchange(nbytes, [made], returned, after)
        final = e.own(e.buffers(tensor, e.tokens * width), (tensor,))
        self.b.output(*final[0])
        e.copy(nbytes + e.tokens * width, returned, final, back, kind=kind)

    def one_by_one(self, pass_: Pass, code: UlyssesCode) -> Schedule:
        """Other people's code, where tensors travel one by one."""
        e, x, ring = self.exchange, self.x, self.ring
        ring.ready, given = e.there(pass_, code, x.source[0], code.outputs_again)
        made = ("q", "kv", "out", "dout") if pass_ == "bwd" else ("q", "kv")
        held = {t: (access[0], ring.blocks(t)) for t, access in zip(made, given, strict=True)}
        if pass_ == "fwd":
            out = ring.result("out", x.o_bytes, x.lse_bytes, output=False)
            results, done = {"out": out}, ring.forward(held["q"], held["kv"], out)
        else:
            dq, dkv = (ring.result(t, w, output=False) for t, w in (("dq", x.q_bytes), ("dkv", x.kv_bytes)))
            results = {"dq": dq, "dkv": dkv}
            done = ring.backward([held["q"], held["dout"], held["out"]], held["kv"], dq, dkv)[1]
        e.back(pass_, {t: ring.shard(access) for t, access in results.items()}, done, code)
        return self.b.build()
