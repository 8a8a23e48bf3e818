"""Heads and context together: bytes, balance, placement, overlap, and what cannot be run."""

import numpy as np
import pytest
from cases import ALL_PASSES, HEADS, cluster, workload
from hypothesis import given
from hypothesis import strategies as st

from cpsim.case.cluster import load_cluster
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.schedule.schedule import ATTENTION_KINDS, STREAMS, Kind
from cpsim.schedule.work import free_work
from cpsim.sim.fast import simulate
from cpsim.strategies import STRATEGIES, plan, sharding
from cpsim.strategies.ring.grid import make_grid, sources
from cpsim.strategies.usp import default_degree

NODES = load_cluster("dgx-h200")
BIG = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}


def lane_of(schedule, op):
    return STREAMS[schedule.lane_stream[schedule.lane_start[op]]]


def groups(schedule, kind):
    """Distinct sets of ranks of the ops of a kind."""
    return {tuple(sorted(schedule.ranks_of(i))) for i in np.flatnonzero(schedule.kind == kind).tolist()}


def crossings(schedule, of, gpus_per_node):
    """Transfers of keys and values that every rank sends to other nodes, ``[ranks]``."""
    moves = [
        schedule.ranks_of(i)
        for i in np.flatnonzero(schedule.kind == Kind.TRANSFER).tolist()
        if lane_of(schedule, i) in of
    ]
    far = [source for source, target in moves if source // gpus_per_node != target // gpus_per_node]
    return np.bincount(far, minlength=schedule.num_ranks)


@pytest.mark.parametrize(
    ("name", "knobs", "wanted"),
    [
        ("zigzag_ring", {}, {(0, 1, 2, 3, 4, 5, 6, 7)}),
        ("usp", {"ulysses": 2}, {(0, 2, 4, 6), (1, 3, 5, 7)}),
        ("usp", {"ulysses": 2, "placement": "context_first"}, {(0, 1, 2, 3), (4, 5, 6, 7)}),
        ("loongtrain", {"ulysses": 1, "inner_ring": 4}, {(0, 1, 2, 3), (4, 5, 6, 7), (0, 4), (1, 5), (2, 6), (3, 7)}),
    ],
)
def test_every_ring_has_a_process_group_of_its_own(name, knobs, wanted):
    schedule = plan(name, workload("causal", (96,), "mha"), cluster(8), "fwd", knobs)
    of_op, ranks = schedule.process_groups()
    assert set(ranks) == wanted
    for op in np.flatnonzero(schedule.kind == Kind.TRANSFER).tolist():
        assert set(schedule.ranks_of(op)) <= set(ranks[of_op[op]])
    assert ((of_op >= 0) == (schedule.kind == Kind.TRANSFER)).all()


# Bytes on the wire. N tokens, P ranks in groups of u and rings of P / u, a 2-byte element.


@pytest.mark.parametrize(("num_ranks", "degree"), [(4, 2), (8, 2), (8, 4), (8, 8), (8, 1)])
@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("name", ["usp", "loongtrain"])
def test_heads_travel_in_groups_and_shards_around_rings(name, shape, num_ranks, degree):
    """Forward (u-1)/u of Q, K, V and O, then P/u - 1 hops of K and V of a part of the heads; backward the same of
    gradients, which make P/u hops in fp32."""
    case = workload("causal", (96,), shape)
    tokens, q = case.num_tokens // num_ranks, case.num_heads * case.head_dim
    kv = 2 * max(degree, case.num_kv_heads) * case.head_dim
    places = num_ranks // degree
    sent = {p: plan(name, case, cluster(num_ranks), p, {"ulysses": degree}).bytes_sent() for p in ALL_PASSES}
    exchanged = (degree - 1) / degree * tokens * 2 * (2 * q + kv)
    hop = tokens * kv
    assert sent["fwd"] == pytest.approx(np.full(num_ranks, exchanged + (places - 1) * hop * 2))
    home = places if places > 1 else 0
    assert sent["bwd"] == pytest.approx(np.full(num_ranks, exchanged + (places - 1) * hop * 2 + home * hop * 4))


@pytest.mark.parametrize("name", ["usp", "loongtrain"])
@pytest.mark.parametrize("pass_", ALL_PASSES)
def test_zigzag_rings_balance_causal_masks_whatever_the_grid(name, pass_):
    for degree in (1, 2, 4):
        schedule = plan(name, workload("causal", (96,)), cluster(8), pass_, {"ulysses": degree})
        area = schedule.tiles.area[schedule.tile] * schedule.heads[:, 1] * np.isin(schedule.kind, ATTENTION_KINDS)
        assert np.ptp(np.bincount(schedule.lane_rank[schedule.lane_start[:-1]], area, 8)) == 0


# Placement


@pytest.mark.parametrize(
    ("placement", "wanted"), [("head_first", {(0, 1), (2, 3)}), ("context_first", {(0, 2), (1, 3)})]
)
def test_head_first_puts_ulysses_groups_on_consecutive_ranks_and_context_first_rings(placement, wanted):
    schedule = plan("usp", workload("full", (96,)), cluster(4), "fwd", {"ulysses": 2, "placement": placement})
    assert groups(schedule, Kind.ALL_TO_ALL) == wanted
    assert groups(schedule, Kind.TRANSFER) == {(0, 1), (2, 3), (0, 2), (1, 3)} - wanted


def test_the_default_group_is_the_largest_of_a_node_that_heads_allow():
    for gpus, shape, degree in ((96, (32, 8), 8), (4, (32, 8), 4), (96, (24, 6), 2), (96, (40, 8), 8), (8, (12, 4), 4)):
        assert default_degree(workload(num_heads=shape[0], num_kv_heads=shape[1]), NODES.with_gpus(gpus)) == degree


@pytest.mark.parametrize("gpus", [2, 4, 8, 16, 96])
def test_settings_worth_trying_are_few_distinct_and_feasible(gpus):
    case = workload("causal", (96 * 64,), **BIG)
    for name in ("usp", "loongtrain"):
        settings = STRATEGIES[name].knobs(case, NODES.with_gpus(gpus))
        assert 1 <= len(settings) <= 6
        assert len({tuple(s.items()) for s in settings}) == len(settings)
        for knobs in settings:
            plan(name, case, NODES.with_gpus(gpus), "fwd", knobs)


# Double rings


@given(st.integers(1, 6), st.integers(1, 6))
def test_every_place_of_a_double_ring_uses_every_shard_once(windows, inner):
    found = sources(windows * inner, inner)
    everyone = np.arange(windows * inner)
    assert (np.sort(found, axis=0) == everyone[:, None]).all()
    assert (np.sort(found, axis=1) == everyone[None]).all()
    assert (found[0] == everyone).all()


def test_inner_rings_of_one_or_of_all_are_a_plain_ring():
    for inner in (1, 6):
        assert (sources(6, inner) == sources(6)).all()
        assert [t.lanes for t in make_grid(6, inner=inner).tracks] == [("send", "recv")]


def test_all_ranks_of_a_double_ring_cross_nodes_equally_often_and_a_plain_ring_only_at_their_ends():
    case = workload("full", (16 * 8,))
    knobs = {"ulysses": 1, "inner_ring": 8, "placement": "context_first"}
    double = plan("loongtrain", case, NODES.with_gpus(16), "fwd", knobs)
    assert crossings(double, ("send", "outer_send"), 8).tolist() == [1] * 16
    plain = plan("usp", case, NODES.with_gpus(16), "fwd", {"ulysses": 1})
    assert crossings(plain, ("send",), 8).tolist() == [0] * 7 + [15] + [0] * 7 + [15]


def test_a_hop_between_inner_rings_hides_behind_a_whole_inner_ring():
    """Kernels of 1 s, hops of 0.9 s inside, of 3.9 s between inner rings of four: nothing is exposed."""
    case = workload("full", (16 * 8,))
    schedule = plan("loongtrain", case, cluster(16), "fwd", {"ulysses": 1, "inner_ring": 4})
    seconds = np.where(schedule.kind == Kind.ATTENTION, 1.0, 0.0)
    lanes = schedule.lane_stream[schedule.lane_start[:-1]]
    seconds[lanes == STREAMS.index("send")] = 0.9
    seconds[lanes == STREAMS.index("outer_send")] = 3.9
    assert simulate(schedule, free_work(seconds, np.zeros(len(schedule)))).makespan_s == pytest.approx(16.0)


# What cannot be run


@pytest.mark.parametrize(
    ("name", "num_ranks", "changes", "knobs", "reason"),
    [
        ("usp", 4, {}, {"ulysses": 3}, "a Ulysses degree that divides the ranks, got 3 on 4 GPUs"),
        ("usp", 6, {}, {"ulysses": 3}, "query heads divisible by ranks of a Ulysses group, got 8 heads on 3 GPUs"),
        ("usp", 8, {"num_heads": 12, "num_kv_heads": 3}, {"ulysses": 2}, "or the reverse, got 3 kv_heads on 2 GPUs"),
        ("usp", 4, {"documents": (49,)}, {}, "tokens divisible by ranks, got 49 tokens on 4 GPUs"),
        ("loongtrain", 8, {}, {"ulysses": 2, "inner_ring": 3}, "inner_ring to divide the 4 ranks of a ring, got 3"),
    ],
)
@pytest.mark.parametrize("pass_", ALL_PASSES)
def test_infeasible_grids_say_why(name, num_ranks, changes, knobs, reason, pass_):
    with pytest.raises(InfeasibleError, match=reason):
        plan(name, workload(**changes), cluster(num_ranks), pass_, knobs)


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("usp", {"ulysses": 0}, "knobs.ulysses: expected a positive integer, got 0"),
        ("usp", {"ulysses": True}, "knobs.ulysses: expected a positive integer, got True"),
        ("usp", {"ring": "striped"}, "expected 'zigzag' or 'basic', got 'striped'"),
        ("usp", {"zigzag": "both"}, "expected 'document' or 'sequence', got 'both'"),
        ("usp", {"placement": "ulysses"}, "expected 'head_first' or 'context_first', got 'ulysses'"),
        ("loongtrain", {"inner_ring": "2"}, "knobs.inner_ring: expected a positive integer, got '2'"),
        ("loongtrain", {"ring": "basic"}, "has no knob 'ring'; it has ulysses, inner_ring, zigzag, placement"),
    ],
)
def test_wrong_knobs_say_what_is_possible(name, knobs, message):
    with pytest.raises(ScenarioError, match=message):
        plan(name, workload(), cluster(4), "fwd", knobs)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 5), st.integers(1, 5))
def test_runs_of_a_shard_are_consecutive_and_equally_long(documents, places, parts):
    bounds = np.concatenate(([0], np.cumsum(documents)))
    shards = sharding.zigzag_shards(bounds, places)[0]
    runs = sharding.split(shards, parts)

    def tokens(sets, i):
        return [t for first, end in sets.of(i).tolist() for t in range(first, end)]

    for i in range(places):
        pieces = [tokens(runs, i * parts + j) for j in range(parts)]
        assert [t for piece in pieces for t in piece] == tokens(shards, i)
        assert np.ptp([len(piece) for piece in pieces]) <= 1
