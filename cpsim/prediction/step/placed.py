"""Attention whose tasks a planner has placed: keys that a context-parallel group gathers, and servers for all ranks.

Tasks come as plain arrays, one entry each: the rank that computes it, its query tokens, and the keys that it sees, the
prefix of its document up to its last query.

Reference: WLB-LLM (OSDI 2025), section 4 (per-document context parallelism); DistCA (arXiv 2510.18121), section 4.1 and
figure 7 (ping-pong execution), hao-ai-lab/DistCA, ping_pong/transformer_block.py (its ticks).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from cpsim.case.model import Model
from cpsim.prediction.step.attention import PASSES, Attended, task_seconds
from cpsim.prediction.step.costs import PARTS, Costs, stacked
from cpsim.prediction.step.layer import BF16, Op, Ops

if TYPE_CHECKING:
    from cpsim.models.profile import Profile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

COPIES: Final = "elementwise of layers"
"""Cost model of copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Tasks of one microbatch, or nano-batch, on a group of ranks."""

    num_ranks: int
    rank: Ints
    """Rank that computes each task, ``[N]``, ascending."""
    q_len: Ints
    """Query tokens, ``[N]``."""
    kv_len: Ints
    """Keys that the last query sees, ``[N]``."""

    def area(self) -> int:
        """Unmasked pairs of one head."""
        return int((self.q_len * self.kv_len - self.q_len * (self.q_len - 1) // 2).sum())

    def seconds(self, profile: Profile, kernel: str, model: Model, tp: int) -> Floats:
        """One varlen call on every rank, forward and backward, ``[2, num_ranks]``."""
        start = np.searchsorted(self.rank, np.arange(self.num_ranks + 1))
        return task_seconds(profile, kernel, model, tp, start, self.q_len, self.kv_len)


def gathered(
    placed: Placed,
    profile: Profile,
    kernel: str,
    model: Model,
    tp: int,
    exchange: tuple[str, Floats],
    slowest: Mapping[str, float],
    copies: Floats | None = None,
    *,
    again: bool = False,
) -> Attended:
    """Attention of a group that gathers keys and values first, and sums their gradients and scatters them afterwards,
    nothing beside it. Gathered keys and values are kept for the backward pass, or it gathers and attends once more.

    Args:
        placed: tasks on the ranks of the group.
        profile, kernel: that compute them.
        model, tp: heads of both kinds are divided by `tp`.
        exchange: cost model and seconds ``[2]`` of gathering, and of scattering, keys and values.
        slowest: by pass, time of the slowest GPU over that of the mean one.
        copies: seconds ``[2]`` in which tensors are copied around kernels; None: in none.
        again: whether all of the forward pass runs once more before the backward one.
    """
    where, talks = exchange
    seconds = placed.seconds(profile, kernel, model, tp).max(axis=1)
    forward, backward = (
        {f"attention {pass_}": float(attends) * slowest[pass_], where: float(talk), COPIES: float(copy)}
        for pass_, attends, talk, copy in zip(
            PASSES, seconds, talks, np.zeros(2) if copies is None else copies, strict=True
        )
    )
    if again:
        backward = {name: forward.get(name, 0.0) + backward.get(name, 0.0) for name in {**forward, **backward}}
    tokens = int(placed.q_len.sum())
    kv = 2 * BF16 * tokens * model.kv_heads // tp * model.head_dim
    sent = (2.0 + again) * kv * (placed.num_ranks - 1) / placed.num_ranks
    return Attended(parts=(forward, backward), exchange=kv, kept=0 if again else kv, sent=sent, area=placed.area())


def ping_pong(
    ops: Ops,
    costs: Costs,
    recompute: str,
    attends: Floats,
    exchanges: Floats,
    where: str,
    packs: Floats | None = None,
    layers: int = 1,
) -> tuple[Floats, Floats]:
    """Seconds of layers of two nano-batches whose attention is served, forward and backward, by cost model.

    Computation of one nano-batch runs beside communication of the other, and both wait for each other after it.
    Forward, in every layer: attention 0 ‖ qkv 1, attention 1 ‖ out 0, and between two layers what is after attention of
    one and before that of the next: 0 ‖ out 1, 1 ‖ qkv 0. Backward: attention 1 ‖ bundle 0, attention 0 ‖ grads 1, and
    between layers 1 ‖ grads 0, 0 ‖ bundle 1. What is before the first layer's attention and after the last one's
    hides less: it is only part of a layer, and nothing is exchanged beside the first and the last of it.

    Args:
        ops: of one nano-batch on one server.
        costs: of ops.
        recompute: of `ops`, before the backward pass.
        attends: seconds of attention of the busiest server, ``[2, 2]``: forward and backward, nano-batch.
        exchanges: seconds, ``[2, 4]``, of every nano-batch: qkv (Q, K and V to servers), out (O and log-sum-exp home),
            and backward bundle (dO, O, log-sum-exp, Q, K and V to servers) and grads (dQ, dK and dV home).
        where: cost model of exchanges.
        packs: seconds, ``[2, 2]`` as of `attends`, in which a rank packs and unpacks what it exchanges, before
            attention or its gradient; None: in none.
        layers: that follow each other.

    Returns:
        ``[len(PARTS)]`` each.
    """
    copies = np.zeros((2, 2)) if packs is None else packs
    sides = [
        (_parts(costs, ops.before_attention()), _parts(costs, ops.after_attention())),
        (
            _parts(costs, ops.before_attention_backward()),
            _parts(costs, ops.again(recompute) + ops.after_attention_backward()),
        ),
    ]
    attention = [
        [stacked([{f"attention {pass_}": float(s)}])[0] for s in of_pass]
        for pass_, of_pass in zip(PASSES, attends, strict=True)
    ]
    qkv, out, bundle, grads = exchanges.T
    passes = []
    for which, (first, then, served) in enumerate(
        (
            (0, 1, ((qkv[0], qkv[1]), (out[0], out[1]))),  # nano-batch 0 goes first
            (1, 0, ((bundle[1], bundle[0]), (grads[1], grads[0]))),
        )
    ):
        before, after = sides[which]
        packed = [stacked([{COPIES: float(seconds)}])[0] for seconds in copies[which]]
        opens, closes = (before, after) if which == 0 else (after, before)
        (to_first, to_then), (from_first, from_then) = served
        inner = [(attention[which][first], to_then), (attention[which][then], from_first)]
        ticks = [(opens + packed[first], 0.0, 1), (opens + packed[then], to_first, 1)]
        ticks += [(computes, talks, layers) for computes, talks in inner]
        ticks += [(closes + opens + packed[first], from_then, layers - 1)]
        ticks += [(closes + opens + packed[then], to_first, layers - 1)]
        ticks += [(closes, from_then, 1), (closes, 0.0, 1)]
        passes.append(_ticks(ticks, where))
    return passes[0], passes[1]


def _parts(costs: Costs, ops: list[Op]) -> Floats:
    return np.asarray(stacked([costs.seconds(ops)])[0])


def _ticks(ticks: list[tuple[Floats, float, int]], where: str) -> Floats:
    """Sum over ticks, and how often each comes, of computation and of what communication takes longer."""
    total = np.zeros(len(PARTS))
    for computation, communication, times in ticks:
        total += times * computation
        total[PARTS.index(where)] += times * max(0.0, communication - float(computation.sum()))
    return total
