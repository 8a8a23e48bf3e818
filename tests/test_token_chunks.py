"""Ulysses with chunks of tokens that wait in the host's memory: numbers, bytes, memory, overlap, what it refuses."""

from dataclasses import replace

import numeric
import numpy as np
import pytest
from cases import ALL_MASKS, ALL_PASSES, BLIND_MASK, HEADS, cluster, workload

from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.prediction.predict import predict
from cpsim.schedule.check import validate
from cpsim.schedule.schedule import ATTENTION_KINDS, HOST_STREAMS, Kind
from cpsim.strategies import plan

every_pass = pytest.mark.parametrize("pass_", ALL_PASSES)
TIMED = {"cluster": "dgx-h100", "gpus": 8, "heads": 64, "kv_heads": 8, "mask": "causal", "strategy": "ulysses"}


def ulysses(case, ranks, pass_="fwd", **knobs):
    return plan("ulysses", case, cluster(ranks), pass_, knobs)


def over_link(schedule):
    """Bytes that every rank sends to its host, and gets from it."""
    moves, lane = schedule.over_host_link(), schedule.lane_start[:-1]
    found = []
    for stream in HOST_STREAMS:
        mine = moves & (schedule.lane_stream[lane] == stream)
        found.append(np.bincount(schedule.lane_rank[lane[mine]], schedule.nbytes[mine], schedule.num_ranks))
    return found


@every_pass
@pytest.mark.parametrize("chunks", [2, 3, 4, 6])
@pytest.mark.parametrize("mask", [*ALL_MASKS, BLIND_MASK])
def test_any_number_of_chunks_computes_dense_attention_under_any_mask(mask, chunks, pass_):
    for ranks, heads in ((2, "gqa"), (4, "mqa"), (4, "mha")):
        case = workload(mask, "uneven", heads)
        schedule = ulysses(case, ranks, pass_, token_chunks=chunks)
        validate(schedule, case, pass_)
        numeric.check(schedule, case, numeric.any_order(schedule, seed=chunks))


@every_pass
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("heads", HEADS)
def test_it_sends_what_ulysses_sends(ranks, heads, pass_):
    """Forward (P-1)/P of Q, K, V and O of a rank's tokens, backward of dO, dQ, dK and dV."""
    case = workload("causal", "uneven", heads)
    chunked, whole = (ulysses(case, ranks, pass_, **knobs).bytes_sent() for knobs in ({"token_chunks": 3}, {}))
    q = case.num_heads * case.head_dim * 2
    kv = max(case.num_kv_heads, ranks) * case.head_dim * 2 * 2
    assert chunked == pytest.approx(np.full(ranks, (ranks - 1) / ranks**2 * case.num_tokens * (2 * q + kv)))
    assert chunked == pytest.approx(whole)


@pytest.mark.parametrize("chunks", [2, 3, 4, 6])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_over_the_host_link_have_a_closed_form(chunks, ranks):
    """With n chunks of a causal mask, in bytes of a chunk of a rank's heads: forward, all that arrives or is made
    leaves, and n (n - 1) / 2 - 1 chunks of keys return. Backward, keys return once, queries and outputs for all of
    n (n + 1) / 2 pairs but the last 3 (of two chunks: the last), and dO and fp32 dQ for those of them that are not
    the first of their queries; dO leaves where it returns."""
    case = workload("causal", "one", "mha", head_dim=16)
    q = case.num_tokens // chunks * case.num_heads // ranks * case.head_dim * 2
    kv, out = 2 * q, q + case.num_tokens // chunks * case.num_heads // ranks * 4
    there, back = over_link(ulysses(case, ranks, "fwd", token_chunks=chunks))
    assert there.tolist() == [chunks * (q + kv + out)] * ranks
    assert back.tolist() == [(chunks * (chunks - 1) // 2 - 1) * kv] * ranks
    there, back = over_link(ulysses(case, ranks, "bwd", token_chunks=chunks))
    turns = chunks * (chunks + 1) // 2 - (1 if chunks == 2 else 3)
    again = turns - chunks
    assert there.tolist() == [(chunks - 1) * q * (again > 0) + again * 2 * q] * ranks
    assert back.tolist() == [chunks * kv + turns * (q + out) + again * 3 * q] * ranks


@every_pass
def test_what_a_gpu_holds_beside_its_own_tokens_is_two_chunks_whatever_the_sequence(pass_):
    case = workload("causal", (4096,), "mha", head_dim=64)

    def exchanged(chunks):
        s = ulysses(case, 2, pass_, token_chunks=chunks)
        kept = np.isin(np.arange(len(s.buffer_nbytes)), [*s.inputs[:, 0], *s.outputs[:, 0]])
        return int(s.buffer_nbytes[~kept & ~s.on_host()].sum())

    assert [exchanged(2) / exchanged(n) for n in (4, 8, 16)] == [2, 4, 8]
    schedule = ulysses(case, 2, pass_, token_chunks=4)
    assert schedule.memory().sum() == schedule.buffer_nbytes[~schedule.on_host()].sum()
    there = {schedule.buffer_names[n] for n in schedule.buffer_name[schedule.on_host()]}
    assert there == {f"{t} on host" for t in ("q", "kv", "out", *(("dout", "dq") if pass_ == "bwd" else ()))}


def test_no_chunk_is_computed_of_which_a_mask_shows_nothing():
    kernels = [
        [
            np.isin(ulysses(workload(mask), 2, pass_, token_chunks=4).kind, ATTENTION_KINDS).sum() // 2
            for pass_ in ALL_PASSES
        ]
        for mask in ("causal", "full")
    ]
    assert kernels == [[10, 10], [16, 16]]
    merges = [(ulysses(workload(mask), 2, token_chunks=4).kind == Kind.MERGE).sum() // 2 for mask in ("causal", "full")]
    assert merges == [10 - 4, 16 - 4]


def test_long_sequences_hide_the_host_link_and_short_ones_do_not():
    long, chunked, short, cut = (
        predict(TIMED | {"tokens": tokens, "knobs": knobs})
        for tokens in (2**20, 2**16)
        for knobs in ({}, {"token_chunks": 8})
    )
    assert chunked.time_s < 1.02 * long.time_s
    assert chunked.peak_memory_bytes < 0.5 * long.peak_memory_bytes
    assert cut.time_s > 1.2 * short.time_s
    assert any(note.startswith("offload: 54.9 GB/s each way") for note in chunked.notes)
    assert any("GB of its host's memory" in note for note in chunked.notes)


def test_a_slower_host_link_takes_longer(tmp_path):
    path = tmp_path / "slow.yaml"
    path.write_text(
        "name: slow\ngpu: h100\ngpus_per_node: 8\nprofile: h100\nnics: 8 x 400G\ntransport: infiniband\n"
        "host_link_bytes_per_s: 4e9\n",
        encoding="utf-8",
    )
    case = TIMED | {"tokens": 2**18, "knobs": {"token_chunks": 8}}
    assert predict(case | {"cluster": str(path)}).time_s > 1.5 * predict(case).time_s


@pytest.mark.parametrize(
    ("knobs", "error", "match"),
    [
        ({"token_chunks": 5}, InfeasibleError, "token_chunks 5 needs tokens divisible by chunks and ranks, got 48"),
        ({"token_chunks": 0}, ScenarioError, "knobs.token_chunks: expected a positive integer, got 0"),
        ({"token_chunks": 2, "head_chunks": 2}, ScenarioError, "leave head_chunks and head_groups out"),
    ],
)
def test_what_it_cannot_run_is_said(knobs, error, match):
    with pytest.raises(error, match=match):
        ulysses(workload(), 2, **knobs)


def test_others_have_no_chunks():
    with pytest.raises(InfeasibleError, match="yunchang has no token_chunks"):
        predict(TIMED | {"tokens": 2**17, "implementation": "yunchang", "kernel": "fa2", "knobs": {"token_chunks": 4}})


@every_pass
def test_sinks_are_joined_before_outputs_leave_for_the_host(pass_):
    case = replace(workload("causal_document", "uneven", "gqa"), sinks=True)
    schedule = ulysses(case, 4, pass_, token_chunks=3)
    validate(schedule, case, pass_)
    numeric.check(schedule, case, numeric.any_order(schedule, seed=7))
