"""DCP: blocks of computation on the ranks that a planner chose, in stages; inputs of the next arrive during each.

A rank fetches what its computations of a stage lack: from another node once, by an all-to-all of uneven parts over all
ranks, and from its own node by another, which passes on what has come from others. Inputs are copied together for the
kernel, which runs all head groups of a stage in one call. Partial outputs are merged where they are computed, and those
of other ranks' queries go home after the last stage: in as many rounds as some query has ranks, since a rank can take
one partial output of a row at a time. Backward moves Q, O, dO and log-sum-exp where queries are away, and gradients
home.

Reference: DCP (arXiv 2510.10620), section 4; chenyu-jiang/dcp at 942a2c7. Differs: inputs are packed for kernels
instead of read through block tables; arrived blocks stay to the end; gradients of keys are summed for each kernel, not
for each block of computation, and in fp32, not in the working type, except where an implementation is priced that does
so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsim.case.cluster import Cluster
from cpsim.case.documents import Order
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.masks.slices import Ints
from cpsim.masks.tiles import sequences
from cpsim.schedule.builder import NOTHING, Access
from cpsim.schedule.schedule import Int32, Kind, Mask, Pass, Planning, Schedule
from cpsim.strategies.cell_program import SIDES, CellProgram, Held, Wanted
from cpsim.strategies.dcp.blocks import cut
from cpsim.strategies.dcp.placing import Settings
from cpsim.strategies.dcp.planning import Plan, plan_case
from cpsim.strategies.dcp.program import Calls, Cells, fetches, given, make_calls, routes
from cpsim.strategies.others import CPSIM, Implementation

BLOCKS: Final = (512, 4096)
"""Tokens of a block by default: a quarter of a rank's, but from the one to the other."""
GRAIN: Final = 128
"""Tokens that larger default blocks are multiples of: a tile of a kernel."""
COMPUTATIONS: Final = 20_000
"""Computation blocks that larger token blocks and fewer head groups keep to by default, so that planning takes
seconds."""
QUICK: Final = 5_000
"""Computation blocks that are planned in a part of a second."""


def plan_dcp(
    workload: Workload,
    cluster: Cluster,
    pass_: Pass,
    code: Implementation = CPSIM,
    *,
    variant: str = "cpsim",
    order: Order | None = None,
    block: int | None = None,
    head_groups: int | None = None,
    eps_inter: float = 0.4,
    eps_intra: float = 0.1,
    stages: int = 4,
    solver: str = "mtkahypar",
    seed: int = 0,
    layers: int = 32,
    planners: int = 16,
) -> Schedule:
    """Blocks of computation anywhere, in stages.

    Args:
        workload, cluster, pass_: the case.
        code: whose implementation.
        variant: ``cpsim``, ``paper`` or ``released`` (what its code does instead).
        order: that of the documents, which the workload has already, see ``cpsim.case.documents``.
        block: tokens of a block; default: a quarter of a rank's, from 512 to 4096, and a rank's where it has fewer.
        head_groups: groups of heads that are placed apart, up to as many as there are heads; default: as many as there
            are key-value heads, or fewer where that makes more than ``COMPUTATIONS`` computation blocks.
        eps_inter, eps_intra: work of a node, and of a GPU in its node, over the mean, at most, less 1.
        stages: of which the next one's inputs arrive during each.
        solver: of the other variants: ``mtkahypar``, ``kahypar``, or ``greedy``, which is ours and stands for neither.
        seed: of whatever is random.
        layers: that run by one plan, and ``planners``: processes of every node that plan later batches meanwhile. What
            planning takes longer than that is charged.

    Raises:
        ScenarioError: a knob has no such value.
        InfeasibleError: there are fewer blocks than ranks, head groups do not divide the key-value heads, or the solver
            is not installed.
    """
    del order
    settings = Settings(variant=variant, eps_inter=eps_inter, eps_intra=eps_intra, stages=stages, solver=solver)
    counts = {"block": block, "head_groups": head_groups, "layers": layers, "planners": planners, "seed": seed}
    for name, value in counts.items():
        least = int(name != "seed")
        if value is not None and (type(value) is not int or value < least):
            raise ScenarioError(f"knobs.{name}: expected a whole number from {least}, got {value!r}")
    ranks = cluster.num_gpus
    if ranks == 1:
        raise InfeasibleError("dcp runs on 2 GPUs or more, got 1; use none")
    size = block or default_block(workload, ranks)
    planned = plan_case(workload, cluster, size, head_groups or default_groups(workload, size), settings, seed)
    if len(planned.blocks) < ranks:
        raise InfeasibleError(
            f"dcp needs a block of tokens for every rank, got {len(planned.blocks)} of {size} tokens for {ranks} "
            f"ranks; use block: {default_block(workload, ranks)}"
        )
    emitted = _Dcp(workload.by_group(planned.blocks.num_groups), cluster, planned, pass_, code.paged)
    schedule = emitted.forward() if pass_ == "fwd" else emitted.backward()
    solver = planned.placement.solver
    planning = Planning(
        seconds=planned.seconds,
        share=layers * planners * cluster.num_nodes,
        notes=(f"blocks placed by {solver}",) if solver else (),
    )
    return replace(schedule, planning=planning)


def dcp_knobs(workload: Workload, cluster: Cluster) -> Sequence[Mapping[str, object]]:
    """Knob settings worth trying: the defaults.

    Raises:
        InfeasibleError: planning takes seconds.
    """
    size = default_block(workload, cluster.num_gpus)
    count = _computations(workload, size) * default_groups(workload, size)
    if count > QUICK:
        raise InfeasibleError(
            f"not tried: {count} computation blocks take seconds to plan; name strategy dcp to predict it"
        )
    return ({},)


def default_block(workload: Workload, num_ranks: int) -> int:
    """A quarter of a rank's tokens, a multiple of ``GRAIN`` within ``BLOCKS``, or more where many blocks see many; of
    ranks with fewer tokens, as many as they have."""
    whole = workload.num_tokens // num_ranks
    quarter = -(-whole // (4 * GRAIN)) * GRAIN
    size = min(BLOCKS[1], whole, max(quarter, BLOCKS[0]))
    while 2 * size <= min(whole, BLOCKS[1]) and _computations(workload, size) > COMPUTATIONS:
        size *= 2
    return size


def default_groups(workload: Workload, block: int) -> int:
    """Key-value heads, or the largest divisor of their number that keeps to ``COMPUTATIONS``."""
    most, heads = COMPUTATIONS // max(_computations(workload, block), 1), workload.num_kv_heads
    return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= max(most, 1))


@lru_cache(maxsize=32)
def _computations(workload: Workload, block: int) -> int:
    """Computation blocks of one head group; remembered, since every default asks and masks of many parts take seconds.

    Raises:
        InfeasibleError: there are too many blocks of tokens.
    """
    return cut(workload, block, 1).computations


class _Sum:
    """Rows of a result that partial results are added to, and the bytes that each row has now."""

    def __init__(
        self, tensor: str, result: Access, cells: Mask, parts: Ints, sizes: tuple[int, int, int], plain: bool
    ) -> None:
        self.tensor, self.result, self.cells, self.plain = tensor, result, cells, plain
        self.left = parts.copy()
        """Partial results that every row still gets, ``[ranks, cells]``; the last one leaves it narrow."""
        self.narrow, self.wide, self.lse = sizes
        self.held = np.full(cells.shape, self.wide if plain else 0)
        """Bytes of a token; plain sums are wide zeros at first and stay wide."""

    def place(self, rank: Ints, cells: Mask) -> None:
        """A kernel writes these rows."""
        self.left[rank] -= cells
        self.held[rank] = np.where(cells, self.narrow + self.lse, self.held[rank])

    def add(self, rank: Ints, cells: Mask, tokens: Ints) -> Ints:
        """Bytes read and written beside the partial result of these rows when it is added, ``[len(rank)]``."""
        self.left[rank] -= cells
        wide = (self.left[rank] > 0) | self.plain
        after = np.where(wide, self.wide, self.narrow) + self.lse
        nbytes = np.where(cells, self.held[rank] + after, 0) @ tokens
        self.held[rank] = np.where(cells, after, self.held[rank])
        return np.asarray(nbytes)


class _Dcp(CellProgram):
    """One schedule under construction; masks are ``[ranks, cells]``, see ``cpsim.strategies.dcp.program``."""

    def __init__(self, workload: Workload, cluster: Cluster, planned: Plan, pass_: Pass, paged: bool) -> None:
        self.paged = paged
        self.pass_, self.planned, self.blocks, self.cells = pass_, planned, planned.blocks, Cells(planned.blocks)
        worker, stage = planned.placement.worker, planned.stage[pass_]
        self.calls: Calls = make_calls(self.cells, workload.slices(), worker, stage, paged)
        self.home = self.cells.per_group(planned.placement.home)
        own = self.home == np.arange(cluster.num_gpus)[:, None]
        super().__init__(workload, own, self.cells.edges(), self.calls.tiles)
        self.moved = {t: (narrow, narrow if paged else wide, lse) for t, (narrow, wide, lse) in self.rows.items()}
        """As ``rows``, what is read and written."""
        self.per_node = min(cluster.gpus_per_node, self.num_ranks)
        self.sequences = sequences(self.calls.tiles)
        self.num_stages = int(stage.max(initial=0)) + 1
        needs = self.cells.needs(worker, stage, self.num_ranks)
        self.own_keys = own & self.cells.with_keys
        self.fetches = [list(fetches(need, self.home, self.per_node)) for need in needs]
        self.used = [need.any(axis=0) for need in needs]
        """Cells whose queries, and whose keys, a rank computes with."""
        self.away = [used & ~self.own for used in self.used]
        """Cells that it uses of other ranks."""
        self.held = [[self.given(tensors, own)] for tensors, own in zip(SIDES[pass_], self.owned, strict=True)]

    @property
    def owned(self) -> tuple[Mask, Mask]:
        """Cells that every rank is home of, of queries and of keys."""
        return self.own, self.own_keys

    # --- passes ---

    def forward(self) -> Schedule:
        direct, local, others = self.results("out", Kind.MERGE)
        for stage, ids in self.batches():
            self.attend(Kind.ATTENTION, stage, ids, direct[ids], (local, others))
        nth = np.cumsum(self.away[0], axis=0) * self.away[0]
        for number in range(1, int(nth.max(initial=0)) + 1):
            self.bring_home(Kind.MERGE, others, local, nth == number)
        return self.build()

    def replicas(self) -> Ints:
        """Rows of gradients of keys that every call makes where each computation has some of its own, for every query
        head."""
        calls, blocks = self.calls, self.blocks
        _, num_heads, _, num_kv_heads = self.heads
        replicas, keys = np.zeros((2, self.num_stages, self.num_ranks))
        np.add.at(replicas, (self.planned.stage["bwd"], self.planned.placement.worker), blocks.tokens[blocks.key])
        of_call = calls.key @ self.tokens
        np.add.at(keys, (calls.stage, calls.rank), of_call)
        share = of_call / np.maximum(keys[calls.stage, calls.rank], 1)
        rows = num_heads // num_kv_heads * share * replicas[calls.stage, calls.rank]
        return np.asarray(np.rint(rows), np.int64)

    def backward(self) -> Schedule:
        direct, local, others = self.results("dq", Kind.ACCUMULATE)
        replicas = self.replicas()
        keys = [self.sum_of("dkv", Kind.ACCUMULATE, cells) for cells in (self.own_keys, self.away[1])]
        for stage, ids in self.batches():
            made = self.attend(Kind.ATTENTION_BACKWARD, stage, ids, direct[ids], (local, others))
            if self.paged:  # set to zero before a kernel, and copied where they are kept
                self.b.add(
                    Kind.ELEMENTWISE,
                    (self.calls.rank[ids], "compute"),
                    step=stage,
                    heads=self.heads,
                    nbytes=3 * replicas[ids] * self.nbytes["dkv"],
                )
            repeats = self.key_rows(ids) / np.maximum(self.calls.key[ids] @ self.tokens, 1)
            for sums in keys:
                self.add_up(Kind.ACCUMULATE, self.calls.rank[ids], made, sums, self.calls.key[ids], None, repeats)
        self.bring_home(Kind.ACCUMULATE, others, local, self.away[0])
        self.bring_home(Kind.ACCUMULATE, keys[1], keys[0], self.away[1])
        rows = self.own_keys @ self.tokens
        dkv = self.b.buffers("dkv", rows * self.nbytes["dkv"]), keys[0].result[1]
        self.b.output(*dkv)
        self.b.add(
            Kind.COPY,
            (self.ranks, "compute"),
            step=self.num_stages,
            heads=self.heads,
            reads=[keys[0].result],
            writes=[dkv],
            nbytes=rows * sum(self.moved["dkv"][:2]),
        )
        return self.build()

    def batches(self) -> Iterator[tuple[int, Ints]]:
        """Every stage and calls of it, at most one of a rank; what the next stage needs is on its way by then."""
        self.fetch(0)
        for stage in range(self.num_stages):
            if stage + 1 < self.num_stages:
                self.fetch(stage + 1)
            for part in range(2):
                ids = np.flatnonzero((self.calls.stage == stage) & (self.calls.part == part))
                if len(ids):
                    yield stage, ids

    # --- inputs ---

    def fetch(self, stage: int) -> None:
        """Inputs of a stage: from other nodes first, then within nodes."""
        for side, tensors in enumerate(SIDES[self.pass_]):
            fetch, nodes = self.fetches[side][stage], self.ranks.reshape(-1, self.per_node)
            lane = "compute" if len(nodes) == 1 else "comm"
            for cells, source, groups, where in (
                (fetch.far, self.home, self.ranks[None], "compute"),
                (fetch.near, fetch.source, nodes, lane),
            ):
                if cells.any():
                    gives, moved = given(cells, source), self.routed(cells, source, tensors)
                    packed = self.pack(stage, tensors, self.held[side], gives, moved.sum(axis=1), where)
                    made, op = self.exchange(stage, tensors, packed, gives, cells, moved, groups)
                    self.held[side].append(Held(dict.fromkeys(tensors, made), cells, op))

    def routed(self, cells: Mask, source: Ints, tensors: Sequence[str]) -> Ints:
        return routes(cells, source, self.tokens, sum(self.nbytes[t] for t in tensors))

    def gathered(self, stage: int, ids: Ints) -> tuple[list[Access], Ints]:
        """What kernels read: a rank's own tokens where they are, if these are all; or copied together."""
        if self.paged:
            return self.through_tables(stage, ids)
        who, tile = self.calls.rank[ids], self.calls.tile[ids]
        any_order = self.sequences.in_place[tile] | ~self.sequences.one_call[tile]
        sides = []
        for side, tensors in enumerate(SIDES[self.pass_]):
            cells = (self.calls.query, self.calls.key)[side][ids]
            rows = self.key_rows(ids) if side else (cells @ self.tokens).astype(np.int64)
            apart = np.any(cells != self.owned[side][who], axis=1) | ~(any_order | (side == 0))
            sides.append(Wanted(tensors, self.held[side], cells, rows, apart))
        return self.gather(stage, who, sides)

    def through_tables(self, stage: int, ids: Ints) -> tuple[list[Access], Ints]:
        """What kernels read wherever it is; a rank's own tokens that it ever reads are copied into blocks before the
        first stage, and those of others before the stage that they come for."""
        who, reads, waits = self.calls.rank[ids], list[Access](), list[Ints]()
        of_group = np.repeat(np.arange(self.blocks.num_groups), len(self.blocks))
        come = [fetches[stage].far | fetches[stage].near for fetches in self.fetches]
        new = [self.own & used for used in self.used] if stage == 0 else come
        for side, tensors in enumerate(SIDES[self.pass_]):
            cells = (self.calls.query, self.calls.key)[side][ids]
            waits += self.waits(who, self.held[side], cells)
            for group in np.unique(of_group):  # heads have tables of their own
                reads += self.reads(who, tensors, self.held[side], cells & (of_group == group))
            nbytes = new[side][who] @ self.tokens * sum(self.nbytes[t] for t in tensors)
            some = np.flatnonzero(nbytes)
            self.b.add(
                Kind.COPY,
                (who[some], "compute"),
                step=stage,
                heads=self.heads,
                nbytes=2 * nbytes[some],
                deps=[waits[-1][some]],
            )
        return reads, np.max(waits, axis=0)

    def key_rows(self, ids: Ints) -> Ints:
        """Rows of keys as kernels read them: some several times where their sequences share them."""
        tile, tokens = self.calls.tile[ids], self.calls.key[ids] @ self.tokens
        copied = self.sequences.one_call[tile] & ~self.sequences.in_place[tile] & (not self.paged)
        return np.where(copied, np.maximum(self.sequences.keys()[tile], tokens), tokens)

    # --- results ---

    def results(self, tensor: str, kind: Kind) -> tuple[NDArray[np.bool_], _Sum, _Sum]:
        """Which calls write their rows of the result themselves, the first to do so and in one run; the result, and
        what belongs to other ranks."""
        calls, remote = self.calls, self.own & self.away[0].any(axis=0)
        direct, parts = np.zeros(len(calls.rank), np.bool_), np.zeros((2, *self.own.shape), np.int64)
        begun = np.zeros(self.num_ranks, np.bool_)
        """Ranks that add to rows which no kernel has written."""
        for i, (rank, cells) in enumerate(zip(calls.rank, calls.query, strict=True)):
            run = np.abs(np.diff(cells[self.own[rank]].astype(np.int8), prepend=0, append=0)).sum() == 2
            direct[i] = run and not (cells & (~self.own[rank] | (parts[0, rank] > 0))).any()
            begun[rank] |= not direct[i] and bool((cells & self.own[rank] & (parts[0, rank] == 0)).any())
            parts[:, rank] += cells & np.stack([self.own[rank], ~self.own[rank]])
        begun |= (remote & (parts[0] == 0)).any(axis=1)
        parts[0] += remote * (self.away[0].sum(axis=0) if kind == Kind.MERGE else 1)
        adds = begun | (parts[0] > 1).any(axis=1)
        narrow, wide, lse = self.rows[tensor]
        held = self.own @ self.tokens
        buffers = self.b.buffers(tensor, held * (narrow + lse) + np.where(adds, held * wide, 0))
        made = buffers, self.block(tensor, self.own)
        self.b.output(*made)
        self.begin(kind, made, begun, np.zeros(self.num_ranks, np.int64))
        local = _Sum(tensor, made, self.own, parts[0], self.moved[tensor], plain=False)
        return direct, local, self.sum_of(tensor, kind, self.away[0], parts[1])

    def sum_of(self, tensor: str, kind: Kind, cells: Mask, parts: Ints | int = 0) -> _Sum:
        """Sums of some rows on every rank, begun; partial outputs take turns in two types, gradients are wide."""
        narrow, wide, lse = self.rows[tensor]
        plain, rows = kind == Kind.ACCUMULATE, cells @ self.tokens
        made = self.b.buffers(f"{tensor} sum", rows * (wide + (not plain) * (narrow + lse))), self.block(tensor, cells)
        self.begin(kind, made, rows > 0, rows * wide * plain)
        return _Sum(tensor, made, cells, np.broadcast_to(parts, cells.shape), self.moved[tensor], plain)

    def begin(self, kind: Kind, made: Access, where: NDArray[np.bool_], nbytes: Ints) -> None:
        """Sums of nothing, so that parts can be added in any order."""
        r = np.flatnonzero(where)
        self.b.add(kind, (r, "compute"), heads=self.heads, nbytes=nbytes[r], writes=[(made[0][r], made[1][r])])

    def attend(self, kind: Kind, stage: int, ids: Ints, direct: NDArray[np.bool_], sums: tuple[_Sum, _Sum]) -> Int32:
        """Kernels of some calls, and their partial results on the queries' side added up; returns partial dKV."""
        calls, (tensor, *_) = self.calls, ("out",) if kind == Kind.ATTENTION else ("dq",)
        who, cells = calls.rank[ids], calls.query[ids]
        reads, deps = self.gathered(stage, ids)
        rows = np.where(direct, 0, cells @ self.tokens)
        partial = self.b.buffers(f"{tensor} partial", rows * self.nbytes[tensor], who)
        made = [(np.where(direct, sums[0].result[0][who], partial).astype(np.int32), self.block(tensor, cells))]
        dkv = np.zeros(0, np.int32)
        if kind == Kind.ATTENTION_BACKWARD:
            dkv = self.b.buffers("dkv partial", self.key_rows(ids) * self.nbytes["dkv"], who)
            made.append((dkv, self.block("dkv", calls.key[ids])))
        self.b.add(
            kind,
            (who, "compute"),
            step=stage,
            tile=calls.tile[ids],
            heads=self.heads,
            deps=[deps],
            reads=reads,
            writes=made,
        )
        sums[0].place(who[direct], cells[direct])
        for total in sums:
            self.add_up(
                Kind.MERGE if kind == Kind.ATTENTION else Kind.ACCUMULATE,
                who,
                partial,
                total,
                cells & ~direct[:, None],
            )
        return dkv

    def add_up(
        self,
        kind: Kind,
        who: Ints,
        partial: Int32,
        total: _Sum,
        cells: Mask,
        after: Ints | None = None,
        repeats: ArrayLike = 1,
    ) -> None:
        """Add partial results of cells ``[len(who), cells]`` to the rows that a sum has of them.

        DCP's own sums take as long as their results have programs, however many they add: bytes of results count.

        Args:
            repeats: times that a partial result has every row.
        """
        part = cells & total.cells[who]
        some = np.flatnonzero(part.any(axis=1))
        who, part, block = who[some], part[some], self.block(total.tensor, part[some])
        read = part @ self.tokens * np.broadcast_to(repeats, len(cells))[some] * (total.narrow + total.lse)
        read = read * (not self.paged or kind == Kind.MERGE)
        self.b.add(
            kind,
            (who, "compute"),
            step=self.num_stages,
            heads=self.heads,
            nbytes=np.rint(read).astype(np.int64) + total.add(who, part, self.tokens),
            deps=[] if after is None else [after[some]],
            reads=[(partial[some], block)],
            updates=[(total.result[0][who], block)],
        )

    def bring_home(self, kind: Kind, total: _Sum, home: _Sum, gives: Mask) -> None:
        """Partial results of other ranks' tokens, to be added where these are at home."""
        if not gives.any():
            return
        moved = routes(gives, self.home, self.tokens, total.narrow + total.lse).T
        gets = home.cells & gives.any(axis=0)
        held = [Held({total.tensor: total.result[0]}, total.cells, np.full(self.num_ranks, NOTHING))]
        sums = np.where(gives, total.held, 0) @ self.tokens
        packed = self.pack(self.num_stages, [total.tensor], held, gives, moved.sum(axis=1), "compute", sums)
        made, op = self.exchange(self.num_stages, [total.tensor], packed, gives, gets, moved, self.ranks[None])
        rows = moved.sum(axis=0) / (total.narrow + total.lse)
        self.add_up(kind, self.ranks, made, home, gets, op, rows / np.maximum(gets @ self.tokens, 1))
