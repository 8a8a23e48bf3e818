"""Attention whose tasks are placed: closed forms of both ways to run it."""

import numpy as np
import pytest

from cpsim.case.model import MODELS
from cpsim.models.profile import load_profile
from cpsim.prediction.step.attention import task_seconds
from cpsim.prediction.step.costs import PARTS, Costs
from cpsim.prediction.step.layer import Ops
from cpsim.prediction.step.placed import Placed, gathered, ping_pong

H200, MODEL, TP = load_profile("h200"), MODELS["llama-34b"], 8
LENGTH = 32768
OPS, COSTS = Ops(MODEL, TP, LENGTH), Costs(H200, TP, 64)
SLOWEST = {"fwd": 1.0, "bwd": 1.0}
NETWORK = "collective between nodes"


def head_tail(ranks):
    """One document in 2 P chunks, rank r with chunks r and 2 P - 1 - r."""
    chunk = LENGTH // (2 * ranks)
    ends = [np.array([r + 1, 2 * ranks - r]) * chunk for r in range(ranks)]
    return Placed(
        num_ranks=ranks,
        rank=np.repeat(np.arange(ranks), 2),
        q_len=np.full(2 * ranks, chunk),
        kv_len=np.concatenate(ends),
    )


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_shards_have_the_pairs_of_their_document(ranks):
    assert head_tail(ranks).area() == LENGTH * (LENGTH + 1) // 2


def test_a_rank_without_tasks_takes_no_time():
    placed = Placed(num_ranks=3, rank=np.array([0, 2]), q_len=np.array([64, 64]), kv_len=np.array([64, 128]))
    seconds = placed.seconds(H200, "fa2", MODEL, TP)
    assert seconds.shape == (2, 3)
    assert (seconds[:, 1] == 0).all()
    assert (seconds[:, [0, 2]] > 0).all()


def test_heads_and_tails_are_faster_than_shares_one_after_the_other():
    quarter = np.full(4, LENGTH // 4)
    plain = Placed(num_ranks=4, rank=np.arange(4), q_len=quarter, kv_len=np.cumsum(quarter))
    paired, slow = (p.seconds(H200, "fa2", MODEL, TP).max(axis=1) for p in (head_tail(4), plain))
    assert (paired < 0.75 * slow).all()


def test_gathering_comes_on_top_of_the_slowest_rank():
    placed, talks = head_tail(4), np.array([1e-3, 2e-3])
    found = gathered(placed, H200, "fa2", MODEL, TP, (NETWORK, talks), SLOWEST)
    slowest = placed.seconds(H200, "fa2", MODEL, TP).max(axis=1)
    assert [sum(parts.values()) for parts in found.parts] == pytest.approx((slowest + talks).tolist())
    assert found.kept == 2 * 2 * LENGTH * MODEL.kv_heads // TP * MODEL.head_dim
    assert found.area == placed.area()


def test_copies_come_on_top_of_kernels():
    placed, talks, copies = head_tail(4), np.zeros(2), np.array([3e-3, 4e-3])
    plain, copied = (gathered(placed, H200, "fa2", MODEL, TP, (NETWORK, talks), SLOWEST, c) for c in (None, copies))
    more = [sum(b.values()) - sum(a.values()) for a, b in zip(plain.parts, copied.parts, strict=True)]
    assert more == pytest.approx(copies.tolist())


def passes(exchange_s, recompute="none", packs=None, layers=1):
    attends = np.array([[1.0, 2.0], [3.0, 4.0]])
    return ping_pong(OPS, COSTS, recompute, attends, np.full((2, 4), exchange_s), NETWORK, packs, layers)


def layer(ops):
    return sum(COSTS.seconds(ops).values())


def test_hidden_exchanges_leave_two_nano_batches_of_computation():
    forward, backward = passes(0.0)
    assert forward.sum() == pytest.approx(2 * layer(OPS.forward()) + 3.0)
    assert backward.sum() == pytest.approx(2 * layer(OPS.backward()) + 7.0)
    assert forward[PARTS.index(NETWORK)] == backward[PARTS.index(NETWORK)] == 0


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_slow_exchanges_pace_every_tick(layers):
    """But for the first and the last one, beside which there is nothing to exchange."""
    for made, ops in zip(passes(100.0, layers=layers), (OPS.forward(), OPS.backward()), strict=True):
        assert made.sum() == pytest.approx(400.0 * layers + layer(ops))


def test_exchanges_hide_less_at_the_ends_of_a_stage_than_between_layers():
    """An exchange as long as a layer hides between two layers; before the first it has the part before attention."""
    exchange_s = layer(OPS.forward())
    alone, twice = (passes(exchange_s, layers=layers)[0] for layers in (1, 2))
    shown = 2 * exchange_s - layer(OPS.before_attention()) - layer(OPS.after_attention())
    assert alone[PARTS.index(NETWORK)] == pytest.approx(shown)
    assert twice[PARTS.index(NETWORK)] == pytest.approx(shown)
    assert twice.sum() - alone.sum() == pytest.approx(2 * exchange_s + 3.0)


def test_an_exchange_hides_behind_its_own_tick_only():
    attends, exchanges = np.ones((2, 2)), np.zeros((2, 4))
    exchanges[1, 0] = 1.5  # Q, K and V of nano-batch 1, beside attention of nano-batch 0
    forward, backward = ping_pong(OPS, COSTS, "none", attends, exchanges, NETWORK)
    assert forward[PARTS.index(NETWORK)] == pytest.approx(0.5)
    assert backward[PARTS.index(NETWORK)] == 0


def test_the_mlp_runs_again_before_the_backward_pass():
    (forward, backward), (same, longer) = passes(0.0), passes(0.0, "mlp")
    assert same.sum() == pytest.approx(forward.sum())
    assert longer.sum() - backward.sum() == pytest.approx(2 * layer(OPS.again("mlp")))


def test_a_rank_packs_beside_its_own_layer():
    """Packing takes time of its own, and exchanges beside that layer hide behind it."""
    packs = np.array([[10.0, 20.0], [30.0, 40.0]])
    for (plain, packed), more in zip(zip(passes(0.0), passes(0.0, packs=packs), strict=True), (30, 70), strict=True):
        assert packed.sum() - plain.sum() == pytest.approx(more)
    forward, backward = passes(20.0, packs=packs)
    before, after = layer(OPS.before_attention()), layer(OPS.after_attention())
    assert forward.sum() == pytest.approx(30.0 + 2 * before + 20.0 + 20.0 + 20.0 + after)
    before, after = layer(OPS.before_attention_backward()), layer(OPS.after_attention_backward())
    assert backward.sum() == pytest.approx(70.0 + 2 * after + 20.0 + 20.0 + 20.0 + before)


def test_calls_are_priced_alike_together_and_alone():
    lens = np.array([4096, 8192, 100])
    together = task_seconds(H200, "fa2", MODEL, TP, np.arange(4), lens, lens)
    alone = [task_seconds(H200, "fa2", MODEL, TP, np.array([0, 1]), lens[i : i + 1], lens[i : i + 1]) for i in range(3)]
    np.testing.assert_array_equal(together, np.concatenate(alone, axis=1))
