"""Layers with a state instead of keys under context parallelism: what ranks exchange, and why it is enough.

A layer of gated linear attention or of a state-space model reads its tokens in order and keeps a state for each head,

    state_t = T_t state_{t-1} + k_t x_t^T,  out_t = state_t^T q_t,

with T_t = decay_t (Mamba-2) or (I - strength_t k_t k_t^T) decay_t (delta rule), where decay_t is a number or, in Kimi
Delta Attention, a diagonal matrix, so that what a shard of tokens does to a state is affine:
state_after = T state_before + own. Ranks hold consecutive shards, the first rank the first tokens.
Three exchanges bring each rank the state before its shard, or spare it:

* ``ring``: a rank adds its own to what comes from the rank before and sends the result on, one after another.
* ``gather``: all ranks gather each other's T and own, and combine those of the ranks before.
* ``heads``: an all-to-all gives every rank all tokens of some heads, and another one brings outputs back.

Backward the adjoint of the same recurrence runs from the last rank to the first, with T transposed. The short
convolution before it needs the last ``conv - 1`` tokens of the rank before (a halo), which ``heads`` spares, too. A
document begins where a decay is 0, so that its state cannot reach another one and nothing else changes.

Legend of array suffixes: T tokens, H value heads, G key heads, K key dimensions, V value dimensions, C channels.

References: Dao, Gu, Transformers are SSMs (2024), section 8.2 (passing of states, sequence parallelism); Sun et al.,
Linear Attention Sequence Parallelism (2024), section 3 (ring), and LASP-2 (2025), section 3 (gather); Yang, Kautz,
Hatamizadeh, Gated Delta Networks (2024), section 3.3; flash-linear-attention 0.6, fla/ops/cp/chunk_delta_h.py (gathers
T and own in fp32) and fla/modules/causal_conv1d/cp.py (halo); Megatron-Core, ssm/mamba_context_parallel.py (heads; it
repeats groups of keys where there are fewer of them than ranks).
Differs: fla's gather reaches all ranks whatever documents they hold; here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from cpsim.case.model import Recurrent

Floats = NDArray[np.float64]
Exchange = Literal["ring", "gather", "heads"]
EXCHANGES: Final[tuple[Exchange, ...]] = ("ring", "gather", "heads")
STATE_BYTES: Final = 4
"""Of an element of a state, a transition and their gradients: fp32 in both packages."""
TOKEN_BYTES: Final = 2
"""Of an element of what belongs to tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank has of a sequence."""

    q_TGK: Floats
    k_TGK: Floats
    v_THV: Floats
    log_decay_TH: Floats
    """Logarithm of what a token leaves of the state; -inf where a document begins. ``[T, H, K]`` where every key
    dimension has its own."""
    strength_TH: Floats | None = None
    """Of the delta rule; None without it."""

    def decays(self) -> Floats:
        """What a token leaves of the rows of a state, ``[T, H, K or 1, 1]``."""
        found = np.exp(self.log_decay_TH)
        return np.asarray(found.reshape(*found.shape[:2], -1, 1))

    def heads(self, part: slice, groups: slice) -> Shard:
        """Some value heads, and the key heads that they read."""
        strength = None if self.strength_TH is None else self.strength_TH[:, part]
        return Shard(
            q_TGK=self.q_TGK[:, groups],
            k_TGK=self.k_TGK[:, groups],
            v_THV=self.v_THV[:, part],
            log_decay_TH=self.log_decay_TH[:, part],
            strength_TH=strength,
        )


def scan(shard: Shard, state_HKV: Floats | None = None) -> tuple[Floats, Floats]:
    """Outputs ``[T, H, V]`` and the state after a shard, token by token.

    Args:
        shard: of consecutive tokens.
        state_HKV: before its first token; None: zeros.
    """
    num_tokens, heads, value_dim = shard.v_THV.shape
    q, k = (np.repeat(x, heads // x.shape[1], axis=1) for x in (shard.q_TGK, shard.k_TGK))
    state = np.zeros((heads, k.shape[-1], value_dim)) if state_HKV is None else state_HKV
    out_THV, decay = np.zeros((num_tokens, heads, value_dim)), shard.decays()
    for t in range(num_tokens):
        state = decay[t] * state
        x_HV = shard.v_THV[t]
        if shard.strength_TH is not None:
            x_HV = shard.strength_TH[t, :, None] * (x_HV - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t, :, :, None] * x_HV[:, None]
        out_THV[t] = np.einsum("hkv,hk->hv", state, q[t])
    return out_THV, state


def transition(shard: Shard) -> Floats:
    """T of a shard, ``[H, K, K]``: state_after = T state_before + own."""
    heads = shard.v_THV.shape[1]
    k = np.repeat(shard.k_TGK, heads // shard.k_TGK.shape[1], axis=1)
    found = np.broadcast_to(np.eye(k.shape[-1]), (heads, k.shape[-1], k.shape[-1])).copy()
    for t, decay in enumerate(shard.decays()):
        found *= decay
        if shard.strength_TH is not None:
            erased = np.einsum("hk,hkj->hj", k[t], found)
            found -= shard.strength_TH[t, :, None, None] * k[t, :, :, None] * erased[:, None]
    return found


def passed_on(own: Sequence[Floats], transitions: Sequence[Floats]) -> list[Floats]:
    """``ring``: the state before each shard.

    Args:
        own: state after each shard that begins with zeros, ``[H, K, V]``.
        transitions: T of each shard, ``[H, K, K]``.
    """
    before = [np.zeros_like(own[0])]
    for mine, change in zip(own[:-1], transitions[:-1], strict=True):
        before.append(change @ before[-1] + mine)
    return before


def combined(own: Sequence[Floats], transitions: Sequence[Floats], rank: int) -> Floats:
    """``gather``: the state before the shard of a rank, from what all have gathered; arguments as of ``passed_on``."""
    state = np.zeros_like(own[0])
    reach = np.broadcast_to(np.eye(own[0].shape[1]), transitions[0].shape)
    for i in reversed(range(rank)):
        state = state + reach @ own[i]
        reach = reach @ transitions[i]
    return state


def by_heads(shards: Sequence[Shard]) -> list[Shard]:
    """``heads``: all tokens of each rank's heads. Key heads are repeated where there are fewer than ranks."""
    ranks, heads, groups = len(shards), shards[0].v_THV.shape[1], shards[0].k_TGK.shape[1]
    whole = joined(shards)
    found = []
    for rank in range(ranks):
        first, end = rank * groups // ranks, max(rank * groups // ranks + 1, (rank + 1) * groups // ranks)
        found.append(whole.heads(slice(rank * heads // ranks, (rank + 1) * heads // ranks), slice(first, end)))
    return found


def joined(shards: Sequence[Shard]) -> Shard:
    """Shards one after another."""
    strength = [s.strength_TH for s in shards if s.strength_TH is not None]
    return Shard(
        q_TGK=np.concatenate([s.q_TGK for s in shards]),
        k_TGK=np.concatenate([s.k_TGK for s in shards]),
        v_THV=np.concatenate([s.v_THV for s in shards]),
        log_decay_TH=np.concatenate([s.log_decay_TH for s in shards]),
        strength_TH=np.concatenate(strength) if strength else None,
    )


def convolved(x_TC: Floats, weight_CW: Floats, halo: Floats | None = None) -> Floats:
    """A causal convolution of each channel over its last W tokens.

    Args:
        x_TC: tokens of a rank.
        weight_CW: the last column is the token's own.
        halo: the W - 1 tokens before, ``[W - 1, C]``; None: zeros.
    """
    width = weight_CW.shape[1]
    before = np.zeros((width - 1, x_TC.shape[1])) if halo is None else halo
    padded = np.concatenate([before, x_TC])
    return np.asarray(sum(padded[i : i + len(x_TC)] * weight_CW[:, i] for i in range(width)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a rank of a layer exchanges in one pass, in the order in which it waits for it."""

    to_heads: int = 0
    """Bytes of the first all-to-all: what a rank holds, of which a share of (ranks - 1) / ranks leaves it."""
    to_tokens: int = 0
    """The same of the second."""
    gathered: int = 0
    """Bytes of all ranks' states and transitions together, which an all-gather brings."""
    state: int = 0
    """Bytes of a state that a rank sends to the next one."""
    hops: int = 0
    """How many such messages follow each other."""
    halo: int = 0
    """Bytes of tokens for the convolution that a rank sends to the next one."""

    def sent(self, ranks: int) -> float:
        """Bytes that the busiest rank sends."""
        exchanged = (self.to_heads + self.to_tokens + self.gathered) * (ranks - 1) / ranks
        return exchanged + self.state + self.halo


def traffic(exchange: Exchange, layer: Recurrent, tokens: int, ranks: int, tp: int = 1) -> Traffic:
    """Bytes of one pass; the backward pass exchanges gradients of the same sizes the other way.

    Args:
        exchange: which one.
        layer: dimensions.
        tokens: of a rank.
        ranks: that share the sequence.
        tp: tensor-parallel ranks, which share the heads.
    """
    if ranks == 1:
        return Traffic()
    state = STATE_BYTES * layer.state_elements // tp
    halo = TOKEN_BYTES * (layer.conv - 1) * layer.channels // tp
    if exchange == "ring":
        return Traffic(state=state, hops=ranks - 1, halo=halo)
    if exchange == "gather":
        each = state + STATE_BYTES * layer.transition_elements // tp
        return Traffic(gathered=ranks * each, halo=halo)
    repeated = max(1, ranks * tp // layer.key_heads)
    keys = 2 * layer.key_heads * layer.key_dim * repeated
    values = layer.value_heads * layer.value_dim
    wide = keys + 2 * values + layer.gates * layer.value_heads
    return Traffic(to_heads=TOKEN_BYTES * tokens * wide // tp, to_tokens=TOKEN_BYTES * tokens * values // tp)
