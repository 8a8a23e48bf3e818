"""Keys from before: new tokens see a cached prefix that lies on the ranks already."""

import numeric
import numpy as np
import pytest
from cases import ALL_MASKS, cluster, workload

from cpsim.case.load import scenario_from
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.prediction.advise import advise
from cpsim.prediction.predict import predict
from cpsim.schedule.check import validate
from cpsim.schedule.schedule import ATTENTION_KINDS
from cpsim.strategies import CACHED, STRATEGIES, plan
from cpsim.strategies.mesh import fewest_bytes, token_bytes

WAYS = {
    "none": ({}, 1),
    "ring": ({}, 4),
    "striped_ring": ({}, 4),
    "mesh": ({"keys": 1}, 4),
    "mesh ": ({"keys": 4, "heads_per_gather": 1}, 4),
    "mesh of two columns": ({"keys": 2}, 4),
}
SERVED = {"cluster": "dgx-h100", "gpus": 16, "heads": 128, "kv_heads": 8, "mask": "causal", "pass": "fwd"}


def planned(way, case):
    knobs, ranks = WAYS[way]
    return plan(way.split()[0], case, cluster(ranks), "fwd", knobs)


@pytest.mark.parametrize("cached", [1, 24, 45])
@pytest.mark.parametrize("way", WAYS)
def test_new_tokens_attend_to_cached_ones_under_any_mask(way, cached):
    for mask in ALL_MASKS:
        case = workload(mask, "uneven", "gqa", cached=cached)
        schedule = planned(way, case)
        validate(schedule, case, "fwd")
        numeric.check(schedule, case, numeric.any_order(schedule, seed=cached))


@pytest.mark.parametrize("way", WAYS)
def test_cached_tokens_are_held_once_and_have_neither_queries_nor_outputs(way):
    case = workload("causal", "one", "gqa", cached=32)
    schedule = planned(way, case)
    cells = {}
    for block in (*schedule.inputs[:, 1].tolist(), *schedule.outputs[:, 1].tolist()):
        tensor, heads = schedule.block_tensors[schedule.block_tensor[block]], int(schedule.block_heads[block, 1])
        tokens = int(schedule.sets.num_tokens()[schedule.block_set[block]])
        cells[tensor] = cells.get(tensor, 0) + tokens * heads
    assert cells == {"q": 16 * 8, "kv": 48 * 2, "out": 16 * 8}


@pytest.mark.parametrize("cached", [0, 16, 40])
def test_a_ring_sends_all_keys_and_pass_q_new_queries_and_outputs(cached):
    """Of N tokens on P ranks, T of them new: (P-1)/P N (K + V) against (P-1)/P T (Q + O + LSE)."""
    case = workload("causal", "one", "gqa", cached=cached)
    q, kv, lse = case.num_heads * case.head_dim * 2, case.num_kv_heads * case.head_dim * 2, case.num_heads * 4
    new = case.num_tokens - cached
    queries = planned("mesh", case).bytes_sent()
    for ring in ("ring", "striped_ring"):
        assert planned(ring, case).bytes_sent() == pytest.approx(np.full(4, 3 / 4 * case.num_tokens * 2 * kv))
    assert queries == pytest.approx(np.full(4, 3 / 4 * new * (2 * q + lse)))
    assert token_bytes(case, 4, 1, "fwd")[0] * case.num_tokens / 4 == pytest.approx(queries[0], rel=0.02)


def test_by_default_queries_travel_where_few_are_new():
    """Columns of one rank, whose keys stay, of two, and of all, whose queries stay."""
    shape = {"num_heads": 128, "num_kv_heads": 8, "head_dim": 128}
    cases = (workload("causal", (128_000,), cached=128_000 - new, **shape) for new in (1_600, 6_400, 25_600))
    assert [fewest_bytes(case, 4) for case in cases] == [1, 2, 4]


@pytest.mark.parametrize(("way", "uneven"), [("mesh", 0), ("striped_ring", 1024)])
def test_work_is_that_of_the_mask_and_balanced_by_zigzag_and_by_stripes(way, uneven):
    case = workload("causal", (4096,), cached=3072)
    assert case.area() == 1024 * 3072 + 1024 * 1025 // 2
    schedule = planned(way, case)
    area = schedule.tiles.area[schedule.tile] * np.isin(schedule.kind, ATTENTION_KINDS)
    assert np.ptp(np.bincount(schedule.lane_rank[schedule.lane_start[:-1]], area, 4)) <= uneven


def test_a_longer_prefix_takes_longer_but_less_than_its_own_queries_would():
    times = [
        predict(SERVED | {"tokens": tokens, "strategy": "ring"} | ({"cached": cached} if cached else {})).time_s
        for tokens, cached in ((16_384, 0), (131_072, 114_688), (131_072, 0))
    ]
    assert times == sorted(times)


def test_advice_is_about_both_passes():
    with pytest.raises(ScenarioError, match="predict ring, striped_ring, mesh one by one"):
        advise(SERVED | {"tokens": 131_072, "cached": 65_536})


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - {*CACHED, "wlb", "per_sequence"}))
def test_other_strategies_refuse_it(name):
    with pytest.raises(InfeasibleError, match="planned for the forward pass of none, ring, striped_ring, mesh"):
        plan(name, workload(cached=8), cluster(2), "fwd", {})


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"cached": 131_072}, "expected fewer than all 131072 tokens"),
        ({"cached": 1024, "pass": "fwd_bwd"}, "forward pass alone"),
        ({"cached": 0}, "greater than or equal to 1|at least 1"),
    ],
)
def test_what_makes_no_sense_is_said(fields, match):
    with pytest.raises(ScenarioError, match=match):
        scenario_from(SERVED | {"tokens": 131_072} | fields)
