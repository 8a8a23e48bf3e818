"""Mesh attention: what it sends in closed form, its shapes, balance and shards, and the claims of papers."""

from collections import Counter

import numpy as np
import pytest
from cases import ALL_PASSES, HEADS, cluster, workload
from scripts import ROOT

from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.schedule.schedule import ATTENTION_KINDS, COLLECTIVE_KINDS, Kind
from cpsim.strategies import STRATEGIES, plan
from cpsim.strategies.mesh import fewest_bytes, token_bytes
from studies.claims import CLAIMS, MARKS, PAGE

every_pass = pytest.mark.parametrize("pass_", ALL_PASSES)
SHAPES = [(ranks, keys) for ranks in (2, 4, 6, 8) for keys in range(1, ranks + 1) if ranks % keys == 0]


def mesh(case, ranks, pass_="fwd", **knobs):
    return plan("mesh", case, cluster(ranks), pass_, knobs)


def shards(schedule, tensor):
    """Ranges of tokens of a tensor that every rank is given."""
    found = {}
    for buffer, block in schedule.inputs.tolist():
        if schedule.block_tensors[schedule.block_tensor[block]] == tensor:
            found[int(schedule.buffer_rank[buffer])] = schedule.sets.of(int(schedule.block_set[block])).tolist()
    return found


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("ranks", "keys"), SHAPES)
def test_rows_send_queries_and_results_and_columns_gather_keys(ranks, keys, heads):
    """Of rows of a ranks and columns of b, a rank sends a token of its own a - 1 and b - 1 times."""
    case = workload("full", "uneven", heads)
    tokens, row = case.num_tokens // ranks, ranks // keys
    q, kv = case.num_heads * case.head_dim * 2, case.num_kv_heads * case.head_dim * 2
    lse = case.num_heads * 4
    sent = {p: mesh(case, ranks, p, keys=keys).bytes_sent() / tokens for p in ALL_PASSES}
    assert sent["fwd"] == pytest.approx(np.full(ranks, (row - 1) * (2 * q + lse) + (keys - 1) * 2 * kv))
    assert sent["bwd"] == pytest.approx(np.full(ranks, (row - 1) * (4 * q + lse) + (keys - 1) * 2 * (kv + 2 * kv)))
    for pass_ in ALL_PASSES:
        assert sum(token_bytes(case, ranks, keys, pass_)) == pytest.approx(sent[pass_][0])


def test_by_default_the_fewest_bytes_are_sent_which_grow_as_the_root_of_the_ranks():
    case = workload("causal", (4096,), num_heads=32, num_kv_heads=32, head_dim=128)
    for ranks in (16, 64, 256):
        sent = {keys: sum(token_bytes(case, ranks, keys, "fwd")) for keys in (1, 2, 4, 8, 16, 32, 64) if keys <= ranks}
        assert sent[fewest_bytes(case, ranks)] == min(sent.values())
    few, many = (sum(token_bytes(case, n, fewest_bytes(case, n), "fwd")) for n in (64, 1024))
    assert many / few == pytest.approx((32 - 1) / (8 - 1), rel=0.01)
    assert fewest_bytes(workload("causal", "one", "gqa"), 64) > 8, "keys are few, so they are what travels"


@every_pass
def test_one_column_is_allgather(pass_):
    case = workload("causal_document", (96, 160, 256), "gqa")
    ours, theirs = (
        mesh(case, 4, pass_, keys=4),
        plan("allgather", case, cluster(4), pass_, {"layout": "document_zigzag"}),
    )
    for schedule in (ours, theirs):
        assert not (schedule.kind == Kind.TRANSFER).any()
    made = [
        Counter(zip(s.kind.tolist(), s.nbytes.tolist(), s.tiles.area[s.tile].tolist(), strict=True))
        for s in (ours, theirs)
    ]
    assert made[0] == made[1]


@every_pass
def test_one_row_leaves_keys_where_they_are(pass_):
    schedule = mesh(workload("causal", "one", "mha"), 4, pass_, keys=1)
    assert not np.isin(schedule.kind, COLLECTIVE_KINDS).any()
    moved = {
        schedule.block_tensors[schedule.block_tensor[schedule.access_block[a]]]
        for a in range(len(schedule.access_block))
        if schedule.kind[schedule.op_of_access()[a]] == Kind.TRANSFER
    }
    assert moved == ({"q", "out"} if pass_ == "fwd" else {"q", "out", "dout", "dq"})


@pytest.mark.parametrize(("ranks", "keys"), SHAPES)
def test_meshes_of_any_shape_are_balanced_under_a_causal_mask(ranks, keys):
    schedule = mesh(workload("causal", (ranks * 32,)), ranks, keys=keys)
    attends = np.isin(schedule.kind, ATTENTION_KINDS)
    area = schedule.tiles.area[schedule.tile] * attends
    work = np.bincount(schedule.lane_rank[schedule.lane_start[:-1]], area, ranks)
    assert np.ptp(work) == 0


@pytest.mark.parametrize("keys_backward", [1, 2, 4, 8])
def test_a_rank_has_the_same_tokens_in_both_passes_whatever_their_shapes(keys_backward):
    case, knobs = workload("causal_document", "uneven", "mha"), {"keys": 2, "keys_backward": keys_backward}
    assert shards(mesh(case, 8, "fwd", **knobs), "q") == shards(mesh(case, 8, "bwd", **knobs), "q")


@pytest.mark.parametrize("zigzag", ["document", "sequence"])
def test_a_ring_may_send_queries_backward_on_the_shards_that_it_has(zigzag):
    case, knobs = workload("causal_document", (5, 17, 27), "mha"), {"zigzag": zigzag, "backward": "queries"}
    forward, backward = (plan("zigzag_ring", case, cluster(4), p, knobs) for p in ALL_PASSES)
    assert shards(forward, "q") == shards(backward, "q")
    others = plan("zigzag_ring", case, cluster(4), "fwd", {"zigzag": zigzag})
    assert forward.bytes_sent().tolist() == others.bytes_sent().tolist()


def test_queries_travel_backward_where_they_are_fewer_bytes_than_keys():
    """Q, O, dO and dQ against K, V and their gradients in fp32."""
    tried = {heads: STRATEGIES["zigzag_ring"].knobs(workload("causal", "one", heads), cluster(8)) for heads in HEADS}
    assert {"backward": "queries"} in tried["mha"]
    assert tried["gqa"] == tried["mqa"] == ({},)
    assert STRATEGIES["zigzag_ring"].knobs(workload("causal", "one", "mha"), cluster(1)) == ({},)


def test_queries_stay_away_from_ranks_whose_keys_they_do_not_see():
    """Whole documents on ranks: half of the pairs of a row share none."""
    case = workload("full_document", (12, 12, 12, 12))
    few, all_ = (mesh(workload(m, (12,) * 4), 4, keys=1, zigzag="sequence") for m in ("full_document", "full"))
    assert few.bytes_sent().sum() < all_.bytes_sent().sum() / 2
    assert few.flops(case.head_dim) == case.flops("fwd")


@pytest.mark.parametrize(
    ("knobs", "ranks", "error", "match"),
    [
        ({"keys": 3}, 4, InfeasibleError, "keys to divide the ranks, got 3 of 4 GPUs"),
        ({"keys": 2, "keys_backward": 3}, 4, InfeasibleError, "keys_backward to divide the ranks, got 3 of 4 GPUs"),
        ({"keys": 0}, 4, ScenarioError, "knobs.keys: expected a positive integer, got 0"),
        ({"keys": True}, 4, ScenarioError, "knobs.keys: expected a positive integer, got True"),
        ({"heads_per_gather": 3}, 4, InfeasibleError, "heads_per_gather to divide the key-value heads, got 3 for 2"),
        ({"zigzag": "none"}, 4, ScenarioError, "knobs.zigzag: expected 'document' or 'sequence', got 'none'"),
        ({"keys": 5}, 5, InfeasibleError, "tokens divisible by ranks"),
    ],
)
def test_what_it_cannot_run_is_said(knobs, ranks, error, match):
    with pytest.raises(error, match=match):
        mesh(workload(), ranks, **knobs)


def test_a_ring_sends_queries_or_keys_backward():
    with pytest.raises(ScenarioError, match=r"knobs\.backward: expected 'keys' or 'queries', got 'both'"):
        plan("zigzag_ring", workload(), cluster(4), "bwd", {"backward": "both"})


@pytest.mark.parametrize("claim", CLAIMS, ids=[claim.paper.split()[0] for claim in CLAIMS])
def test_signs_of_published_claims_are_right(claim):
    this, that = claim.predicted(*claim.cases()[0])
    assert (this.time_s < that.time_s) == claim.faster


def test_the_page_shows_every_claim():
    shown = PAGE.read_text(encoding="utf-8").split(MARKS[0])[1].split(MARKS[1])[0]
    assert all(claim.paper in shown and claim.claim in shown for claim in CLAIMS)
    assert len(shown.splitlines()) == 2 + sum(len(claim.cases()) for claim in CLAIMS)
    assert PAGE == ROOT / "docs" / "strategies.md"
