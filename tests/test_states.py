"""Layers with a state under context parallelism: exchanges against the whole recurrence, and bytes in closed form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cpsim.case.model import Recurrent
from cpsim.real.run.recurrent import recurrence
from cpsim.strategies.states import (
    EXCHANGES,
    Shard,
    by_heads,
    combined,
    convolved,
    joined,
    passed_on,
    scan,
    traffic,
    transition,
)

GDN = Recurrent(kind="gated_delta", key_heads=16, value_heads=32, key_dim=128, value_dim=128)
MAMBA = Recurrent(kind="mamba2", key_heads=8, value_heads=128, key_dim=128, value_dim=64)
KDA = Recurrent(kind="kda", key_heads=32, value_heads=32, key_dim=128, value_dim=128)


def shards_of(lens: list[int], delta: bool, resets: tuple[int, ...] = (), by_key: bool = False) -> list[Shard]:
    rng = np.random.default_rng(len(lens))
    total, heads, groups, key, value = sum(lens), 4, 2, 5, 3
    k = rng.standard_normal((total, groups, key))
    log_decay = -rng.exponential(0.1, (total, heads, key) if by_key else (total, heads))
    log_decay[list(resets)] = -np.inf
    whole = Shard(
        q_TGK=rng.standard_normal((total, groups, key)),
        k_TGK=k / np.linalg.norm(k, axis=-1, keepdims=True),
        v_THV=rng.standard_normal((total, heads, value)),
        log_decay_TH=log_decay,
        strength_TH=rng.uniform(0, 1, (total, heads)) if delta else None,
    )
    ends = np.cumsum(lens)
    parts = [slice(int(end - n), int(end)) for n, end in zip(lens, ends, strict=True)]
    strength = whole.strength_TH
    return [
        Shard(
            q_TGK=whole.q_TGK[p],
            k_TGK=whole.k_TGK[p],
            v_THV=whole.v_THV[p],
            log_decay_TH=whole.log_decay_TH[p],
            strength_TH=None if strength is None else strength[p],
        )
        for p in parts
    ]


KINDS = [(False, False), (True, False), (True, True)]
"""Whether a layer has the delta rule, and a decay of every key dimension: Mamba-2, Gated DeltaNet, KDA."""


@pytest.mark.parametrize(("delta", "by_key"), KINDS)
@pytest.mark.parametrize("resets", [(), (0, 11, 12, 30)])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_exchange_gives_the_whole_recurrence(exchange: str, delta: bool, by_key: bool, resets: tuple[int, ...]) -> None:
    shards = shards_of([9, 7, 12, 8], delta, resets, by_key)
    whole, _ = scan(joined(shards))
    if exchange == "heads":
        out = np.concatenate([scan(shard)[0] for shard in by_heads(shards)], axis=1)
    else:
        own, changes = [scan(s)[1] for s in shards], [transition(s) for s in shards]
        before = passed_on(own, changes)
        if exchange == "gather":
            before = [combined(own, changes, rank) for rank in range(len(shards))]
        out = np.concatenate([scan(s, state)[0] for s, state in zip(shards, before, strict=True)])
    np.testing.assert_allclose(out, whole, rtol=1e-12, atol=1e-12)


def test_more_ranks_than_key_heads() -> None:
    shards = shards_of([4, 4, 4, 4], True)
    assert [s.k_TGK.shape[1] for s in by_heads(shards)] == [1, 1, 1, 1]


def test_documents_stop_states() -> None:
    """Without the resets the states of other documents do reach a rank."""
    (first, second), (_, free) = shards_of([6, 6], True, (6,)), shards_of([6, 6], True)
    assert np.abs(transition(second)).max() == 0
    assert np.abs(transition(free)).max() > 0
    assert np.abs(scan(first)[1]).max() > 0


@pytest.mark.parametrize(("delta", "by_key"), KINDS)
def test_backward_runs_the_other_way(delta: bool, by_key: bool) -> None:
    """Gradients of ranks that pass states forward and their gradients back, and of ranks that combine what they have
    gathered with transposed transitions, equal those of the whole."""
    shards = shards_of([5, 6, 4], delta, by_key=by_key)
    leaves = [[torch.tensor(x, requires_grad=True) for x in tensors(s)] for s in shards]
    given = [torch.randn(s.v_THV.shape, dtype=torch.float64) for s in shards]
    whole = [torch.cat(parts).detach().requires_grad_() for parts in zip(*leaves, strict=True)]
    expected = torch.autograd.grad(run(whole, None)[0], whole, torch.cat(given))

    own, changes = [scan(s)[1] for s in shards], [transition(s) for s in shards]
    before = [torch.tensor(state, requires_grad=True) for state in passed_on(own, changes)]
    found, alone = list[tuple[torch.Tensor, ...]](), list[np.ndarray]()
    dstate = torch.zeros_like(before[0])
    for rank in reversed(range(3)):
        out, last = run(leaves[rank], before[rank])
        wanted = [*leaves[rank], before[rank]]
        *grads, dbefore = torch.autograd.grad((out, last), wanted, (given[rank], dstate), retain_graph=True)
        (own_gradient,) = torch.autograd.grad(out, [before[rank]], given[rank])
        alone.append(own_gradient.numpy())
        gathered = combined(alone, [c.transpose(0, 2, 1) for c in changes[::-1]], len(alone) - 1)
        np.testing.assert_allclose(dstate.numpy(), gathered, rtol=1e-10, atol=1e-12)
        found.insert(0, tuple(grads))
        dstate = dbefore
    for parts, one in zip(zip(*found, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), one, rtol=1e-10, atol=1e-12)


def tensors(shard: Shard) -> list[np.ndarray]:
    decay = shard.log_decay_TH
    named = [shard.q_TGK, shard.k_TGK, shard.v_THV, decay if decay.ndim == 3 else decay[..., None]]
    return [*named, shard.strength_TH] if shard.strength_TH is not None else named


def run(x: list[torch.Tensor], state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return recurrence(x[0], x[1], x[2], x[3], x[4] if len(x) > 4 else None, state)


@pytest.mark.parametrize("by_key", [False, True])
def test_recurrences_agree(by_key: bool) -> None:
    (shard,) = shards_of([20], True, by_key=by_key)
    out, state = run([torch.tensor(x) for x in tensors(shard)], None)
    np.testing.assert_allclose(out.numpy(), scan(shard)[0], rtol=1e-12)
    np.testing.assert_allclose(state.numpy(), scan(shard)[1], rtol=1e-12)


def test_convolution_needs_its_halo() -> None:
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((30, 6)), rng.standard_normal((6, 4))
    whole = convolved(x, weight)
    parts = [convolved(x[:13], weight), convolved(x[13:], weight, x[10:13])]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-13)
    assert not np.allclose(np.concatenate([parts[0], convolved(x[13:], weight)]), whole)


@pytest.mark.parametrize("ranks", [2, 4, 8, 32])
def test_bytes(ranks: int) -> None:
    """What arrays of the exchanges hold, and the published layouts: fla gathers [H, K, K + V] in fp32."""
    tokens = 1024
    gathered = traffic("gather", GDN, tokens, ranks)
    assert gathered.gathered == ranks * 32 * 128 * (128 + 128) * 4
    assert traffic("gather", KDA, tokens, ranks).gathered == gathered.gathered  # as many heads
    assert traffic("gather", MAMBA, tokens, ranks).gathered == ranks * 128 * (128 * 64 + 1) * 4
    ring = traffic("ring", GDN, tokens, ranks)
    assert (ring.state, ring.hops) == (32 * 128 * 128 * 4, ranks - 1)
    assert ring.halo == gathered.halo == 3 * (2 * 16 * 128 + 32 * 128) * 2
    heads = traffic("heads", MAMBA, tokens, ranks)
    repeats = max(1, ranks // 8)
    assert heads.to_heads == 2 * tokens * (2 * 8 * 128 * repeats + 2 * 8192 + 128)
    assert heads.to_tokens == 2 * tokens * 8192
    assert heads.sent(ranks) == (heads.to_heads + heads.to_tokens) * (ranks - 1) / ranks
    assert traffic("heads", MAMBA, 2 * tokens, ranks).to_heads == 2 * heads.to_heads
    assert traffic("ring", GDN, 2 * tokens, ranks) == ring  # states do not grow with tokens
    assert traffic("ring", GDN, tokens, ranks, tp=2).state == ring.state // 2
    assert traffic("heads", GDN, tokens, 1).sent(1) == 0
