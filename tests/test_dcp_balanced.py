"""The planner of variant ``cpsim``: even tokens, even computation, little traffic, and counts that stay exact."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from cases import ALL_MASKS, workload
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsim.case.cluster import load_cluster
from cpsim.case.documents import in_order
from cpsim.strategies import sharding
from cpsim.strategies.dcp.balanced import even_fill, place
from cpsim.strategies.dcp.blocks import Placement, cut, judge
from cpsim.strategies.dcp.search import OUTSIDE, move_bundles, swap_homes, tally
from cpsim.strategies.dcp.timing import STAGE_S, Rates, _cut, _one_by_one, _seconds, stage_by_time

NODES, GPUS = 4, 8
RATES = Rates.of(load_cluster("p4de"))
TOKENS, BLOCK = 131072, 1024
LIMITS = {"causal": 1.0, "lambda": 0.6, "causal_blockwise": 0.3, "shared_question": 0.8}
"""Bytes between nodes over those of a zigzag that moves only what is needed, at most."""
SMALL = in_order((512, 2560, 1024, 4608, 1536, 512, 3584, 2048), "alternating")
BATCH = (40000, 700, 9000, 30000, 5000, 24, 21348, 25000)


def published(mask, documents=(TOKENS,)):
    """The operator of DCP's micro-benchmark: 8 query heads, 2 key-value heads of dimension 128."""
    case = workload(mask, documents=documents, heads="gqa", head_dim=128, mask_options=())
    return cut(case, BLOCK, 2)


@cache
def placed(mask, documents=(TOKENS,), eps=0.1):
    """Blocks of `published` with their placement, made once for all tests."""
    blocks = published(mask, documents)
    return blocks, place(blocks, (NODES, GPUS), RATES, eps, 4, 0)


def quality(blocks, placement):
    return judge(blocks, placement, NODES * GPUS, GPUS, "fwd")


def zigzag(blocks):
    """Every rank holds chunks r and 2P - 1 - r and computes what its queries see."""
    chunks = sharding.zigzag(TOKENS, NODES * GPUS)
    chunk = np.searchsorted(chunks.ranges[:, 0], blocks.first, "right", sorter=np.argsort(chunks.ranges[:, 0])) - 1
    home = np.argsort(chunks.ranges[:, 0])[chunk] % (NODES * GPUS)
    return Placement(home, home[blocks.query])


def test_small_documents_stay_within_nodes_where_exchanges_between_them_are_late():
    case = workload("causal_document", SMALL, head_dim=128, num_heads=32, num_kv_heads=8)
    blocks, rates = cut(case, 512, 8), Rates.of(load_cluster("dgx-h100"))
    late, same = (
        judge(blocks, place(blocks, (2, 8), r, 0.1, 4, 0), 16, 8, "fwd").between_nodes.sum()
        for r in (rates, replace(rates, node_latency_s=0.0))
    )
    assert late == 0 < same


@pytest.mark.parametrize("mask", LIMITS)
def test_one_long_document_moves_less_between_nodes_than_a_zigzag(mask):
    blocks, placement = placed(mask)
    ours, other = quality(blocks, placement), quality(blocks, zigzag(blocks))
    assert ours.between_nodes.sum() <= LIMITS[mask] * other.between_nodes.sum()
    assert ours.imbalance <= 1.1
    assert np.ptp(ours.tokens) <= BLOCK


@pytest.mark.parametrize("mask", LIMITS)
@pytest.mark.parametrize("eps", [0.03, 0.1])
def test_computation_of_packed_documents_is_balanced_as_far_as_asked(mask, eps):
    found = quality(*placed(mask, BATCH, eps))
    assert found.imbalance <= 1 + eps + 1e-6
    assert np.ptp(found.tokens) <= BLOCK


@settings(max_examples=40, deadline=None)
@given(
    mask=st.sampled_from(ALL_MASKS),
    documents=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    nodes=st.sampled_from((1, 2, 3, 12)),
    gpus=st.sampled_from((1, 2, 4, 8)),
    block=st.sampled_from((4, 16)),
    groups=st.sampled_from((1, 2)),
    seed=st.integers(0, 3),
)
def test_any_case_is_placed_with_even_tokens(mask, documents, nodes, gpus, block, groups, seed):
    blocks = cut(workload(mask, documents=tuple(documents)), block, groups)
    found = place(blocks, (nodes, gpus), RATES, 0.1, 4, seed)
    assert found.home.shape == blocks.tokens.shape
    assert found.worker.shape == blocks.area.shape
    for ranks in (found.home, found.worker):
        assert np.all((ranks >= 0) & (ranks < nodes * gpus))
    assert np.ptp(np.bincount(found.home, blocks.tokens, nodes * gpus)) <= blocks.tokens.max()


def test_a_seed_says_the_placement():
    blocks = published("causal_document", BATCH)
    first, second = (place(blocks, (NODES, GPUS), RATES, 0.1, 4, 5) for _ in range(2))
    np.testing.assert_array_equal(first.home, second.home)
    np.testing.assert_array_equal(first.worker, second.worker)


@given(tokens=st.lists(st.integers(1, 16), min_size=1, max_size=60), ranks=st.integers(1, 20), seed=st.integers(0, 9))
def test_ranks_are_filled_evenly_to_within_a_block(tokens, ranks, seed):
    tokens = np.array(tokens)
    home = even_fill(tokens, ranks, np.random.default_rng(seed).permutation(len(tokens)))
    assert np.ptp(np.bincount(home, tokens, ranks)) <= tokens.max()


def random_search(seed, parts=3, units=8, computations=40):
    """Homes, sides, bytes and areas of a random problem with some units of other nodes."""
    rng = np.random.default_rng(seed)
    home = rng.integers(OUTSIDE, parts, 2 * units)
    sides = np.stack([rng.integers(units, size=computations), units + rng.integers(units, size=computations)])
    bytes_in, bytes_out = rng.integers(1, 9, (2, 2 * units)).astype(float)
    return rng, home, sides, bytes_in, bytes_out, rng.integers(1, 9, computations).astype(float)


@pytest.mark.parametrize("seed", range(20))
def test_counts_after_moves_are_those_of_the_new_placement(seed):
    rng, home, sides, bytes_in, bytes_out, area = random_search(seed)
    worker = rng.integers(3, size=len(area))
    state = tally(worker, sides, home, bytes_in, bytes_out, area, 3)
    before = worker.copy()
    ways = np.stack([np.repeat(np.arange(22), [10, 10, *[1] * 20]), np.arange(40)])
    members = np.stack([rng.permutation(40), np.arange(40)])
    move_bundles(ways, members, worker, state, sides, home, bytes_in, bytes_out, area, 40.0, 50.0, 3)
    assert (worker != before).any()
    for kept, counted in zip(state, tally(worker, sides, home, bytes_in, bytes_out, area, 3), strict=True):
        np.testing.assert_allclose(kept, counted)


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 20))])
def test_swaps_of_homes_lessen_what_busy_parts_move_and_keep_tokens_even(seed):
    rng = np.random.default_rng(seed)
    blocks, parts = 24, 3
    home, tokens = rng.permutation(blocks) % parts, rng.integers(5, 9, blocks)
    slot, sees = home * 2 + rng.integers(2, size=blocks), np.tril(rng.random((blocks, blocks)) < 0.5)
    held = np.bincount(slot, tokens, 6).astype(np.int64)
    row_start, key = np.concatenate(([0], np.cumsum(sees.sum(axis=1)))), np.nonzero(sees)[1]
    nbytes, area = tokens * 2.0, sees.sum(axis=1) * 1.0

    def squares(home):
        needs = np.stack([sees[home == part].any(axis=0) for part in range(parts)]) & (
            home != np.arange(parts)[:, None]
        )
        sent = np.bincount(home, needs.sum(axis=0) * nbytes, parts)
        return ((needs @ nbytes) ** 2).sum() + (sent**2).sum()

    before, limits = squares(home), (held.min(), max(held.max(), held.min() + 40))
    pairs = rng.integers(blocks, size=(4000, 2))
    swap_homes(home, slot, held, 40, tokens, row_start, key, nbytes, area, np.inf, 0.0, pairs, 1 - rng.random(4000))
    assert squares(home) < before
    np.testing.assert_array_equal(held, np.bincount(slot, tokens, 6))
    assert limits[0] <= held.min()
    assert held.max() <= limits[1]
    np.testing.assert_array_equal(slot // 2, home)


@pytest.mark.parametrize("mask", LIMITS)
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_no_computation_comes_before_its_inputs_and_more_stages_cost_no_time(mask, pass_):
    blocks, placement = placed(mask, BATCH)
    seconds = []
    for count in (1, 2, 4, 6):
        stage, time = stage_by_time(blocks, placement, (NODES, GPUS), RATES, count, pass_)
        seconds.append(time)
        assert 0 <= stage.min() <= stage.max() < count
    assert all(after <= before for before, after in pairwise(seconds))
    local = (placement.home[blocks.query] == placement.worker) & (placement.home[blocks.key] == placement.worker)
    assert (stage[local] == 0).all()


def test_stages_hide_what_arrives_behind_what_has_arrived():
    blocks, placement = placed("causal")
    at_once, staged = (stage_by_time(blocks, placement, (NODES, GPUS), RATES, n, "fwd")[1] for n in (1, 4))
    assert staged < 0.95 * at_once


def test_what_arrives_first_is_what_most_work_waits_for_and_sources_take_turns():
    nbytes, source, work = np.array([10, 10, 10, 10]), np.array([0, 0, 1, 1]), np.array([1.0, 5.0, 2.0, 9.0])
    assert _one_by_one(nbytes, source, work).tolist() == [30, 10, 40, 20]


def test_cuts_overlap_arrivals_with_work():
    moments, work = np.array([0.0, 1.0, 2.0]), np.array([[1.0, 1.0, 1.0]])
    assert _seconds([2], moments, work) == pytest.approx(2.0 + STAGE_S + 3.0)
    assert _seconds([0, 1, 2], moments, work) == pytest.approx(3.0 + 2 * STAGE_S)
    ends, seconds = _cut(moments, work, 3)
    assert ends.tolist() == [0, 1, 2]
    assert seconds == pytest.approx(3.0 + 2 * STAGE_S)
