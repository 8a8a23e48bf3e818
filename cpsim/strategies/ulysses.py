"""Ulysses: an all-to-all turns sequence shards into head shards, and another one turns the output back.

Reference: Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv 2309.14509), section 3. Differs: Q, K and V travel in one
all-to-all; key-value heads are replicated where there are fewer of them than ranks; heads can be cut into groups so
that one group's all-to-all overlaps the attention of another, and into chunks that share buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from cpsim.case.cluster import Cluster
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.masks.slices import Ints
from cpsim.masks.tiles import make_tiles
from cpsim.schedule.builder import Builder
from cpsim.schedule.schedule import Kind, Pass, Schedule
from cpsim.strategies import sharding
from cpsim.strategies.head_chunks import plan_head_chunks
from cpsim.strategies.heads import Bundle, HeadExchange, check_heads
from cpsim.strategies.others import CPSIM, Implementation, UlyssesCode
from cpsim.strategies.others.wrapped import RowKernelEmitter
from cpsim.strategies.token_chunks import plan_token_chunks


def plan_ulysses(
    workload: Workload,
    cluster: Cluster,
    pass_: Pass,
    code: Implementation = CPSIM,
    *,
    head_groups: int = 1,
    head_chunks: int = 1,
    buffers: int = 2,
    token_chunks: int = 1,
) -> Schedule:
    """All tokens of some heads on every rank.

    Args:
        workload, cluster, pass_: the case.
        code: whose implementation.
        head_groups: parts into which a rank's heads are cut; while one part is computed the next travels.
        head_chunks: parts that share buffers, see ``cpsim.strategies.head_chunks``.
        buffers: chunks that have buffers at a time; with one, exchanges and attention take turns.
        token_chunks: parts of the sequence that wait in the host's memory, see ``cpsim.strategies.token_chunks``.

    Raises:
        ScenarioError: a knob has no such value, or heads are cut twice.
        InfeasibleError: the heads do not divide over the ranks, groups or chunks.
    """
    counts = {"head_groups": head_groups, "head_chunks": head_chunks, "buffers": buffers, "token_chunks": token_chunks}
    for knob, value in counts.items():
        if type(value) is not int or value < 1:
            raise ScenarioError(f"knobs.{knob}: expected a positive integer, got {value!r}")
    if head_chunks > 1 and head_groups > 1:
        raise ScenarioError("knobs.head_chunks: heads are cut into groups or into chunks, got both; leave one out")
    if token_chunks > 1 and head_chunks * head_groups > 1:
        raise ScenarioError("knobs.token_chunks: cuts tokens, not heads; leave head_chunks and head_groups out")
    for knob in ("head_chunks", "token_chunks"):
        if counts[knob] > 1 and code is not CPSIM:
            raise InfeasibleError(f"{code.name} has no {knob}; leave the knob out")
    workload = code.padded(workload, ulysses=cluster.num_gpus)
    _check(workload, cluster.num_gpus, head_groups)
    if head_chunks > 1:
        return plan_head_chunks(workload, cluster.num_gpus, pass_, head_chunks, buffers)
    if token_chunks > 1:
        return plan_token_chunks(workload, cluster.num_gpus, pass_, token_chunks)
    plan = _Ulysses(workload, cluster.num_gpus, head_groups)
    if code.ulysses is not None:
        return plan.one_by_one(pass_, code.ulysses)
    return plan.forward() if pass_ == "fwd" else plan.backward()


def ulysses_knobs(workload: Workload, cluster: Cluster) -> Sequence[Mapping[str, object]]:
    """Knob settings worth trying: one head group, and two and four where heads allow."""
    per_rank = (workload.num_heads // cluster.num_gpus, max(1, workload.num_kv_heads // cluster.num_gpus))
    groups = [g for g in (2, 4) if cluster.num_gpus > 1 and all(n % g == 0 for n in per_rank)]
    return ({}, *({"head_groups": g} for g in groups))


def _check(workload: Workload, num_ranks: int, head_groups: int) -> None:
    """Raise ``InfeasibleError`` where heads or tokens do not divide."""
    check_heads("ulysses", workload, num_ranks, "ranks")
    per_rank, kv_per_rank = workload.num_heads // num_ranks, max(1, workload.num_kv_heads // num_ranks)
    if per_rank % head_groups or kv_per_rank % head_groups:
        raise InfeasibleError(
            f"ulysses with head_groups {head_groups} needs it to divide the heads of a rank, "
            f"got {per_rank} query and {kv_per_rank} key-value heads"
        )
    if workload.num_tokens % num_ranks:
        raise InfeasibleError(
            f"ulysses needs tokens divisible by ranks, got {workload.num_tokens} tokens on {num_ranks} GPUs"
        )


class _Ulysses:
    """One Ulysses schedule under construction."""

    def __init__(self, workload: Workload, num_ranks: int, head_groups: int) -> None:
        self.workload, self.ranks, self.num_groups = workload, np.arange(num_ranks), head_groups
        shards = sharding.contiguous(workload.num_tokens, num_ranks)
        sets = sharding.stack(shards, sharding.contiguous(workload.num_tokens, 1))
        b = self.b = Builder(num_ranks, sets, make_tiles(workload.slices(), sets, [num_ranks], [num_ranks]))
        whole = np.full(num_ranks, num_ranks)
        self.x = HeadExchange(b, workload, self.ranks[None, :], self.ranks, whole, head_groups)

    def forward(self) -> Schedule:
        b, x, tokens, groups = self.b, self.x, self.x.tokens, range(self.num_groups)
        qkv_bytes, out_bytes = x.q_bytes + x.kv_bytes, x.o_bytes + x.lse_bytes
        own_bytes = x.q_bytes + x.own_kv_bytes
        qkv = x.buffers("qkv", tokens * self.num_groups * own_bytes)
        out = x.buffers("out", tokens * self.num_groups * x.o_bytes)
        for access in x.own(qkv, ("q", "kv")):
            b.input(*access)
        for access in x.own(out, ("o",)):
            b.output(*access)
        packed = [x.by_rank("qkv", ("q", "kv"), tokens * qkv_bytes, g) for g in groups]
        gathered = [x.of_all("qkv", ("q", "kv"), tokens * qkv_bytes, g) for g in groups]
        made = [x.of_all("out", ("out",), tokens * out_bytes, g) for g in groups]
        returned = [x.by_rank("out", ("o",), tokens * x.o_bytes, g) for g in groups]
        ready = [
            x.copy(tokens * (own_bytes + qkv_bytes), x.own(qkv, ("q", "kv"), g), packed[g], group=g) for g in groups
        ]
        sizes = qkv_bytes, x.o_bytes
        back = self._pipeline(Kind.ATTENTION, sizes, packed, gathered, made, returned, [[]] * len(groups), ready)
        for g in groups:
            own = x.own(out, ("o",), g)
            x.copy(tokens * 2 * x.o_bytes, returned[g], own, back[g], g)
        return b.build()

    def backward(self) -> Schedule:
        b, x, tokens, groups = self.b, self.x, self.x.tokens, range(self.num_groups)
        qkv_bytes, out_bytes = x.q_bytes + x.kv_bytes, x.o_bytes + x.lse_bytes
        own_bytes = x.q_bytes + x.own_kv_bytes
        saved = [
            [
                *x.of_all("qkv", ("q", "kv"), tokens * qkv_bytes, g),
                *x.of_all("out", ("out",), tokens * out_bytes, g),
            ]
            for g in groups
        ]
        dout = x.buffers("dout", tokens * self.num_groups * x.o_bytes)
        dqkv = x.buffers("dqkv", tokens * self.num_groups * own_bytes)
        for access in (*chain.from_iterable(saved), *x.own(dout, ("dout",))):
            b.input(*access)
        for access in x.own(dqkv, ("dq", "dkv")):
            b.output(*access)
        packed = [x.by_rank("dout", ("dout",), tokens * x.o_bytes, g) for g in groups]
        gathered = [x.of_all("dout", ("dout",), tokens * x.o_bytes, g) for g in groups]
        made = [x.of_all("dqkv", ("dq", "dkv"), tokens * qkv_bytes, g) for g in groups]
        returned = [x.by_rank("dqkv", ("dq", "dkv"), tokens * qkv_bytes, g) for g in groups]
        ready = [x.copy(tokens * 2 * x.o_bytes, x.own(dout, ("dout",), g), packed[g], group=g) for g in groups]
        sizes = x.o_bytes, qkv_bytes
        back = self._pipeline(Kind.ATTENTION_BACKWARD, sizes, packed, gathered, made, returned, saved, ready)
        for g in groups:
            own = x.own(dqkv, ("dq", "dkv"), g)
            x.copy(tokens * (qkv_bytes + own_bytes), returned[g], own, back[g], g, x.home)
        return b.build()

    def one_by_one(self, pass_: Pass, code: UlyssesCode) -> Schedule:
        """Other people's code, where tensors travel one by one and every kernel waits for the last all-to-all."""
        b, x = self.b, self.x
        after, given = x.there(pass_, code)
        made = ("dq", "dkv") if pass_ == "bwd" else ("out",)
        results = {t: x.of_all(t, (t,), x.bytes_of(t))[0] for t in made}
        x.call()
        tokens = np.full(len(self.ranks), x.tokens)
        after = RowKernelEmitter(b, self.workload, replicas=x.replicas).attend(
            code.wrapper,
            pass_,
            self.ranks,
            q_rows=tokens,
            k_rows=tokens,
            tile=1,
            heads=x.heads(),
            deps=[after],
            reads=given,
            writes=[*results.values()],
        )
        x.back(pass_, results, after, code)
        return b.build()

    def _attend(self, kind: Kind, group: int, arrived: Ints, reads: Bundle, made: Bundle) -> Ints:
        """Attention over all tokens on every rank; returns indices, ``[ranks]``."""
        return self.b.add(
            kind,
            (self.ranks, "compute"),
            step=group,
            tile=1,
            heads=self.x.heads(group),
            deps=[arrived],
            reads=reads,
            writes=made,
        )

    def _pipeline(
        self,
        kind: Kind,
        sizes: tuple[int, int],
        packed: list[Bundle],
        gathered: list[Bundle],
        made: list[Bundle],
        returned: list[Bundle],
        saved: list[Bundle],
        ready: list[Ints],
    ) -> list[Ints]:
        """Exchange, attend and exchange back, the next group's exchange ahead of this group's attention."""
        x = self.x
        there, home = (x.tokens * size for size in sizes)
        back, arrived = [], x.exchange(there, packed[0], gathered[0], ready[0])
        for g in range(self.num_groups):
            here = arrived
            if g + 1 < self.num_groups:
                arrived = x.exchange(there, packed[g + 1], gathered[g + 1], ready[g + 1], g + 1)
            done = self._attend(kind, g, here, [*saved[g], *gathered[g]], made[g])
            back.append(x.exchange(home, made[g], returned[g], done, g))
        return back
