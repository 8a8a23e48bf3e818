"""Every document in a ring of its own subgroup: who gets what, balance, bytes, and that one document is a ring."""

from dataclasses import fields

import numeric
import numpy as np
import pytest
from cases import ALL_MASKS, ALL_PASSES, cluster, workload
from hypothesis import given
from hypothesis import strategies as st

from cpsim.case.documents import draw_documents
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.schedule.check import validate
from cpsim.schedule.schedule import ATTENTION_KINDS, Kind, Schedule
from cpsim.schedule.work import free_work
from cpsim.sim.fast import simulate
from cpsim.strategies import STRATEGIES, plan, sharding
from cpsim.strategies.hybrid_cp import subgroup_sizes, zigzag_of_subgroups

BIG = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
DRAWN = draw_documents("prolong64k", 32 * 8192, seed=42)


def held(schedule, case):
    """Tokens of every document that every rank holds, ``[ranks, documents]``."""
    starts = np.cumsum((0, *case.documents))
    found = np.zeros((schedule.num_ranks, len(case.documents)), int)
    for buffer, block in schedule.outputs.tolist():
        if schedule.block_tensors[schedule.block_tensor[block]] == "out":
            for first, end in schedule.sets.of(int(schedule.block_set[block])).tolist():
                here = np.diff(np.clip(starts, first, end))
                found[schedule.buffer_rank[buffer]] += here
    return found


def same(one, other):
    """Whether two schedules are the same, column by column."""
    for name in (f.name for f in fields(Schedule) if f.name not in ("tiles", "sets")):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    for part, columns in (("tiles", ("start", "rows", "row_area", "area")), ("sets", ("start", "ranges"))):
        for name in columns:
            a, b = (getattr(getattr(s, part), name) for s in (one, other))
            np.testing.assert_array_equal(a, b, err_msg=f"{part}.{name}")


# Who gets what


@pytest.mark.parametrize(
    ("num_ranks", "sizes"),
    [(1, [1]), (2, [1, 2]), (6, [1, 2, 6]), (8, [1, 2, 4, 8]), (24, [1, 2, 4, 8, 24]), (96, [1, 2, 4, 8, 16, 32, 96])],
)
def test_subgroups_are_powers_of_two_that_divide_the_ranks_and_all_of_them(num_ranks, sizes):
    assert subgroup_sizes(num_ranks).tolist() == sizes


@pytest.mark.parametrize("limit", [4096, 8192, 16384])
def test_every_document_is_on_an_aligned_subgroup_that_holds_it(limit):
    case = workload("causal_document", DRAWN, **BIG)
    shares = held(plan("hybrid_cp", case, cluster(32), "fwd", {"tokens_per_rank": limit}), case)
    assert shares.sum(axis=0).tolist() == list(DRAWN)
    for document, length in zip(shares.T, DRAWN, strict=True):
        ranks = np.flatnonzero(document)
        size = len(ranks)
        if length >= 2 * 32:  # shorter ones need not reach every rank of their subgroup
            assert size in (1, 2, 4, 8, 16, 32)
            assert ranks.tolist() == list(range(ranks[0], ranks[0] + size))
            assert ranks[0] % size == 0
            assert np.ptp(document[ranks]) <= 1
        assert document.max() <= limit + 1


def test_the_default_limit_is_a_rank_s_part_of_all_tokens():
    case = workload("causal_document", (8 * 100, 8 * 50, 8 * 50), **BIG)
    same(*(plan("hybrid_cp", case, cluster(8), "fwd", knobs) for knobs in ({}, {"tokens_per_rank": 200})))


@pytest.mark.parametrize("mask", ["full_document", "causal_document"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_work_is_balanced_within_nodes(mask, seed):
    case = workload(mask, draw_documents("prolong64k", 8 * 8192, seed, max_length=4 * 8192), **BIG)
    schedule = plan("hybrid_cp", case, cluster(8), "fwd", {})
    attends = np.isin(schedule.kind, ATTENTION_KINDS)
    work = np.bincount(schedule.lane_rank[schedule.lane_start[:-1]], schedule.tiles.area[schedule.tile] * attends, 8)
    assert work.max() / work.mean() < 1.06


def test_documents_are_widened_inside_a_node_only():
    """One document of half of all tokens would be balanced on 16 ranks, but 8 hold it and are a node."""
    case = workload("causal_document", (8 * 512, *(64,) * 64), **BIG)
    shares = held(plan("hybrid_cp", case, cluster(16), "fwd", {"tokens_per_rank": 512}), case)
    assert np.flatnonzero(shares[:, 0]).tolist() == list(range(8))
    assert (shares[8:, 1:].sum(axis=1) > 0).all()


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=12), st.integers(1, 5))
def test_shards_of_subgroups_are_their_documents_once_and_equally_many_tokens(documents, size):
    length, group = np.array(documents).T
    bounds = np.concatenate(([0], np.cumsum(length)))
    shards, heads, tails = zigzag_of_subgroups(bounds[:-1], length, group, size, 4 * size)
    both = sharding.union(heads, tails)
    assert shards.ranges.tolist() == both.ranges.tolist()
    for g in range(4):
        tokens = [t for r in range(g * size, (g + 1) * size) for a, b in shards.of(r).tolist() for t in range(a, b)]
        wanted = [t for d in np.flatnonzero(group == g) for t in range(bounds[d], bounds[d + 1])]
        assert sorted(tokens) == wanted
        assert np.ptp(shards.num_tokens()[g * size : (g + 1) * size]) <= 1


# Bytes on the wire


def test_documents_of_one_rank_send_nothing():
    case = workload("causal_document", (64,) * 16, **BIG)
    for pass_ in ALL_PASSES:
        schedule = plan("hybrid_cp", case, cluster(8), pass_, {})
        assert set(schedule.kind.tolist()) <= set(ATTENTION_KINDS)
        assert np.bincount(schedule.lane_rank).tolist() == [1] * 8  # one kernel for both documents of a rank


@pytest.mark.parametrize("num_ranks", [6, 8, 32])
def test_a_document_on_s_ranks_sends_its_keys_s_minus_1_times_and_its_gradients_s_times(num_ranks):
    """Keys and values in 2 bytes; gradients in 4."""
    case = workload("causal_document", tuple(64 * n for n in (1, 1, 2, 3, 5, 8, 13, 2, 1, 24, 6, 30)), **BIG)
    row = 2 * case.num_kv_heads * case.head_dim
    ranks = (held(plan("hybrid_cp", case, cluster(num_ranks), "fwd", {}), case) > 0).sum(axis=0)
    assert len(set(ranks.tolist())) > 2
    lengths = np.array(case.documents)
    forward = 2 * row * (lengths * (ranks - 1)).sum()
    home = 4 * row * (lengths * np.where(ranks > 1, ranks, 0)).sum()
    for pass_, wanted in (("fwd", forward), ("bwd", forward + home)):
        assert plan("hybrid_cp", case, cluster(num_ranks), pass_, {}).bytes_sent().sum() == wanted


def test_transfers_stay_in_subgroups():
    case = workload("causal_document", (256,) * 8, **BIG)
    schedule = plan("hybrid_cp", case, cluster(16), "bwd", {})
    moves = np.array([schedule.ranks_of(i) for i in np.flatnonzero(schedule.kind == Kind.TRANSFER)])
    assert len(moves)
    assert (moves[:, 0] // 2 == moves[:, 1] // 2).all()


# One document, or all ranks for all documents: the zigzag ring


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
@pytest.mark.parametrize("pass_", ALL_PASSES)
@pytest.mark.parametrize("mask", [m for m in ALL_MASKS if "document" not in m])
def test_tokens_that_see_each_other_are_one_document_and_run_as_a_zigzag_ring(mask, pass_, num_ranks):
    case = workload(mask, "one")
    assert len(sharding.documents_of(case.slices(), case.num_tokens)) == 2
    same(*(plan(name, case, cluster(num_ranks), pass_, {}) for name in ("hybrid_cp", "zigzag_ring")))


@pytest.mark.parametrize("pass_", ALL_PASSES)
def test_documents_that_need_all_ranks_run_as_a_zigzag_ring(pass_):
    case = workload("causal_document", (48, 96, 60))
    hybrid = plan("hybrid_cp", case, cluster(8), pass_, {"tokens_per_rank": 1})
    same(hybrid, plan("zigzag_ring", case, cluster(8), pass_, {}))


def test_answers_that_share_a_question_stay_with_it():
    case = workload("shared_question", (24, 24))
    shares = held(plan("hybrid_cp", case, cluster(8), "fwd", {}), case)
    assert sorted(map(tuple, (shares > 0).T.tolist())) == [(False,) * 4 + (True,) * 4, (True,) * 4 + (False,) * 4]


# Where documents go, as a planner of batches says

GIVEN = [[2, 0, 0], [1, 3, 2], [4, 0, 1], [1, 2, 2], [1, 2, 3], [2, 1, 0], [1, 3, 2]]


@pytest.mark.parametrize("pass_", ALL_PASSES)
def test_documents_go_where_they_are_told_and_results_are_those_of_dense_attention(pass_):
    case = workload("causal_document", (12, 3, 17, 5, 2, 8, 1))
    schedule = plan("hybrid_cp", case, cluster(4), pass_, {"groups": GIVEN})
    validate(schedule, case, pass_)
    numeric.check(schedule, case, numeric.any_order(schedule, seed=3))
    if pass_ == "fwd":
        shares = held(schedule, case) > 0
        wanted = [list(range(size * number, size * number + size)) for size, number, _ in GIVEN]
        assert [np.flatnonzero(document).tolist() for document in shares.T] == wanted


def test_documents_of_one_turn_and_group_share_a_kernel_and_turns_follow_each_other():
    case = workload("causal_document", (64, 64, 64), **BIG)
    for turns, calls in (((0, 0, 0), 1), ((0, 1, 1), 2), ((2, 1, 0), 3)):
        schedule = plan("hybrid_cp", case, cluster(2), "fwd", {"groups": [[1, 0, turn] for turn in turns]})
        attends = schedule.tile[np.isin(schedule.kind, ATTENTION_KINDS)]
        assert [int(schedule.tiles.area[tile]) for tile in attends if schedule.tiles.area[tile]] == [
            case.area() // 3 * turns.count(turn) for turn in sorted(set(turns))
        ]
        assert len(set(turns)) == calls


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([[1, 0, 0]], "for each of 2 documents"),
        ([[1, 0], [1, 0]], "for each of 2 documents"),
        ([[1, 0, 0], [3, 0, 0]], "divides 4 ranks"),
        ([[1, 0, 0], [2, 2, 0]], "number 2"),
        ("4", "for each of 2 documents"),
    ],
)
def test_groups_that_make_no_sense_are_refused(groups, words):
    case = workload("causal_document", (24, 24))
    with pytest.raises(ScenarioError, match=words):
        plan("hybrid_cp", case, cluster(4), "fwd", {"groups": groups})


# Order


def test_large_subgroups_go_first_so_that_local_documents_hide_the_last_hops():
    """A ring of 8 of which the last gradients come home while kernels of local documents run."""
    case = workload("causal_document", (1024, *(64,) * 16))
    schedule = plan("hybrid_cp", case, cluster(8), "bwd", {})
    seconds = np.where(np.isin(schedule.kind, ATTENTION_KINDS), 1.0, 0.0)
    seconds[schedule.kind == Kind.TRANSFER] = 0.9
    assert simulate(schedule, free_work(seconds, np.zeros(len(schedule)))).makespan_s == pytest.approx(9.0)


@pytest.mark.parametrize("pass_", ALL_PASSES)
def test_96_ranks_with_many_documents_are_valid(pass_):
    case = workload("causal_document", draw_documents("prolong512k", 96 * 8192, seed=1), **BIG)
    schedule = plan("hybrid_cp", case, cluster(96), pass_, {})
    validate(schedule, case, pass_)


# Knobs


@pytest.mark.parametrize("value", [0, -8, 2.5, "8k", True])
def test_a_limit_that_is_no_positive_integer_is_refused(value):
    with pytest.raises(ScenarioError, match=r"knobs\.tokens_per_rank: expected a positive integer, got"):
        plan("hybrid_cp", workload(), cluster(4), "fwd", {"tokens_per_rank": value})


def test_half_the_limit_is_worth_trying_where_it_changes_something():
    knobs = STRATEGIES["hybrid_cp"].knobs
    assert knobs(workload("causal_document", (8192, *(256,) * 32)), cluster(16)) == ({}, {"tokens_per_rank": 512})
    assert knobs(workload("causal_document", (64,) * 16), cluster(8)) == ({},)
    with pytest.raises(InfeasibleError, match="not tried: every document needs all ranks, which is the zigzag ring"):
        knobs(workload("causal", (4096,)), cluster(8))
