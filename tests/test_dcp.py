"""DCP: blocks, placements and what they move, against brute force."""

import numpy as np
import pytest
from cases import ALL_MASKS, DOCUMENTS, cluster, workload

from cpsim.dcp.blocks import Placement, cut, first_hops, judge, wanted
from cpsim.errors import InfeasibleError
from cpsim.masks import dense_mask

GPUS = cluster(1).gpus_per_node


def random_placement(blocks, num_ranks, seed=0):
    rng = np.random.default_rng(seed)
    return Placement(rng.integers(0, num_ranks, len(blocks)), rng.integers(0, num_ranks, blocks.computations))


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("mask", ALL_MASKS)
def test_blocks_hold_every_token_and_every_unmasked_pair_once(mask, documents):
    case = workload(mask, documents)
    blocks, seen = cut(case, 7, 2), dense_mask(case.slices(), 48)
    assert blocks.first.tolist() == (np.cumsum(blocks.tokens) - blocks.tokens).tolist()
    assert blocks.tokens.sum() == 48
    assert blocks.tokens.max() <= 7
    ends = blocks.first + blocks.tokens
    for query, key, area in zip(blocks.query, blocks.key, blocks.area, strict=True):
        part = seen[blocks.first[query] : ends[query], blocks.first[key] : ends[key]]
        assert part.sum() == area > 0
    assert blocks.area[blocks.group == 0].sum() == blocks.area[blocks.group == 1].sum() == seen.sum()


def test_blocks_cross_no_document_that_the_mask_knows():
    assert cut(workload("causal_document", "uneven"), 8, 1).tokens.tolist() == [5, 8, 8, 3, 8, 8, 8]
    assert cut(workload("causal", "uneven"), 8, 1).tokens.tolist() == [8] * 6


def test_head_groups_share_key_value_heads():
    assert cut(workload(heads="gqa"), 8, 2).q_bytes == 4 * 4 * 2
    with pytest.raises(InfeasibleError, match="got 3 for 2 kv_heads; use head_groups: 1"):
        cut(workload(heads="gqa"), 8, 3)


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize("num_ranks", [2, 8, 32])
def test_a_placement_moves_inputs_once_to_every_rank_and_once_to_every_node(num_ranks, pass_):
    blocks = cut(workload("causal_document", "uneven"), 6, 2)
    placement = random_placement(blocks, num_ranks)
    quality = judge(blocks, placement, num_ranks, GPUS, pass_)
    got, between = np.zeros(num_ranks, np.int64), 0
    for side, (there, back) in (
        (blocks.query, blocks.query_bytes(pass_)), (blocks.key, blocks.key_bytes(pass_)),
    ):  # fmt: skip
        units = set(zip(side.tolist(), blocks.group.tolist(), placement.worker.tolist(), strict=True))
        nodes = {(block, group, rank // GPUS) for block, group, rank in units}
        for block, _, rank in units:
            home, tokens = placement.home[block], blocks.tokens[block]
            got[rank] += tokens * there * (rank != home)
            got[home] += tokens * back * (rank != home)
            between += tokens * back * (rank // GPUS != home // GPUS)
        between += sum(blocks.tokens[b] * there for b, _, node in nodes if node != placement.home[b] // GPUS)
    assert quality.moved.sum(axis=0).tolist() == got.tolist()
    assert quality.between_nodes.sum() == between
    assert quality.work.sum() == blocks.area.sum()
    assert quality.tokens.sum() == 48


def test_relays_take_turns_and_need_what_they_pass_on():
    blocks = cut(workload("full", "one"), 2, 2)
    placement = random_placement(blocks, 32)
    needs = wanted(blocks, placement.worker, blocks.key, 32)
    home = np.repeat(placement.home, 2)
    hops = first_hops(needs, home, GPUS)
    crossings = set()
    for unit, rank in np.argwhere(needs).tolist():
        source = hops[unit, rank]
        if source // GPUS != rank // GPUS:
            assert source == home[unit]
            assert (unit, rank // GPUS) not in crossings
            crossings.add((unit, rank // GPUS))
        else:
            assert source == home[unit] or needs[unit, source]
    assert len(np.unique(hops[needs] % GPUS)) == GPUS
