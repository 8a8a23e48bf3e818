"""Ulysses with chunks of heads that share buffers: bytes, memory, overlap, numbers, and what it refuses."""

import numeric
import numpy as np
import pytest
from cases import ALL_PASSES, HEADS, cluster, workload

from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.prediction.predict import predict
from cpsim.schedule.check import validate
from cpsim.schedule.schedule import ATTENTION_KINDS, Kind
from cpsim.strategies import plan

every_pass = pytest.mark.parametrize("pass_", ALL_PASSES)
TIMED = {"cluster": "dgx-h100", "gpus": 8, "heads": 32, "kv_heads": 8, "mask": "causal", "strategy": "ulysses"}


def ulysses(case, ranks, pass_="fwd", **knobs):
    return plan("ulysses", case, cluster(ranks), pass_, knobs)


@every_pass
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("chunks", "buffers"), [(2, 1), (4, 1), (4, 2), (4, 3)])
def test_any_number_of_chunks_and_buffers_computes_dense_attention(chunks, buffers, heads, pass_):
    case = workload("causal_document", "uneven", heads)
    schedule = ulysses(case, 2, pass_, head_chunks=chunks, buffers=buffers)
    validate(schedule, case, pass_)
    numeric.check(schedule, case, numeric.any_order(schedule, seed=chunks))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("heads", HEADS)
def test_forward_sends_what_ulysses_sends_and_backward_queries_and_keys_again(ranks, heads):
    """(P-1)/P^2 of Q, K, V and O forward, and of Q, K, V, dO, dQ, dK and dV backward; of keys P heads at least."""
    case = workload("causal", "uneven", heads)
    q = case.num_heads * case.head_dim * 2
    kv = max(case.num_kv_heads, ranks) * case.head_dim * 2 * 2
    share = (ranks - 1) / ranks**2 * case.num_tokens
    sent = {pass_: ulysses(case, ranks, pass_, head_chunks=2).bytes_sent() for pass_ in ALL_PASSES}
    assert sent["fwd"] == pytest.approx(np.full(ranks, share * (2 * q + kv)))
    assert sent["fwd"] == pytest.approx(ulysses(case, ranks).bytes_sent())
    assert sent["bwd"] == pytest.approx(np.full(ranks, share * (3 * q + 2 * kv)))


@every_pass
def test_buffers_of_exchanges_are_as_many_times_smaller_as_chunks_share_one(pass_):
    """Of equally many heads of keys as of queries, all that is exchanged is cut."""
    case = workload("causal", (4096,), "mha", head_dim=64)

    def exchanged(**knobs):
        s = ulysses(case, 2, pass_, **knobs)
        kept = {int(b) for b in (*s.inputs[:, 0], *s.outputs[:, 0])}
        names = np.array(s.buffer_names)[s.buffer_name]
        moved = [b for b in range(len(names)) if b not in kept and not names[b].startswith("out of group")]
        return int(s.buffer_nbytes[moved].sum())

    whole = exchanged(head_chunks=4, buffers=4)
    assert [whole / exchanged(head_chunks=4, buffers=n) for n in (1, 2)] == [4, 2]


def test_chunks_that_share_keys_bring_them_once_and_send_one_sum_of_gradients():
    case = workload("causal", "uneven", "gqa")
    forward, backward = (ulysses(case, 2, pass_, head_chunks=4) for pass_ in ALL_PASSES)
    assert [(s.kind == Kind.ALL_TO_ALL).sum() for s in (forward, backward)] == [1 + 4 + 4, 1 + 4 + 4 + 1]
    assert (backward.kind == Kind.ACCUMULATE).sum() == 4 * 2
    assert [np.isin(s.kind, ATTENTION_KINDS).sum() for s in (forward, backward)] == [4 * 2] * 2


def test_a_second_set_of_buffers_hides_exchanges_and_costs_memory():
    whole, apart, beside = (
        predict(TIMED | {"tokens": 2**17, "knobs": knobs})
        for knobs in ({}, {"head_chunks": 4, "buffers": 1}, {"head_chunks": 4})
    )
    assert beside.time_s < apart.time_s
    assert beside.time_s < whole.time_s
    assert apart.peak_memory_bytes < beside.peak_memory_bytes


@pytest.mark.parametrize(
    ("knobs", "error", "match"),
    [
        ({"head_chunks": 3}, InfeasibleError, "head_chunks 3 needs it to divide the heads of a rank"),
        ({"head_chunks": 0}, ScenarioError, "knobs.head_chunks: expected a positive integer, got 0"),
        ({"head_chunks": 2, "buffers": True}, ScenarioError, "knobs.buffers: expected a positive integer, got True"),
        ({"head_chunks": 2, "head_groups": 2}, ScenarioError, "into groups or into chunks, got both"),
    ],
)
def test_what_it_cannot_run_is_said(knobs, error, match):
    with pytest.raises(error, match=match):
        ulysses(workload(), 2, **knobs)


def test_others_have_no_chunks():
    with pytest.raises(InfeasibleError, match="head_chunks"):
        predict(TIMED | {"tokens": 2**17, "implementation": "yunchang", "knobs": {"head_chunks": 4}})
