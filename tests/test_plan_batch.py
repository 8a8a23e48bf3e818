"""Plans of global batches: every document once, memory kept to, prices those of predictions, and close to the best."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from targets import check

import cpsim
from cpsim.case.cluster import load_cluster
from cpsim.case.documents import draw_documents
from cpsim.case.model import MODELS
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.prediction.batches.plan import costs_of
from cpsim.prediction.batches.prices import prices_of
from studies.plan.exhaustive import best_time_s

FIELDS = {"parallel": {"recompute": "full"}, "most_tokens": 16384}


def cluster(gpus):
    return load_cluster("dgx-h100").with_gpus(gpus)


PRICES = {gpus: prices_of(cluster(gpus), "llama3-8b", **FIELDS) for gpus in (4, 8, 24, 64)}


def planned(lengths, gpus, **more):
    return cpsim.plan_batch(lengths, cluster(gpus), "llama3-8b", prices=PRICES[gpus], **more)


def batch(name, gpus, seed=1, tokens=65536):
    return np.array(draw_documents(name, tokens * gpus, seed, max_length=min(2**19, 16384 * gpus)))


# Plans


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 60_000), min_size=1, max_size=40),
    st.sampled_from([4, 8, 24]),
    st.booleans(),
    st.sampled_from([0.1, 10.0]),
)
def test_every_document_is_in_one_pack_that_memory_holds_on_an_aligned_group(lengths, gpus, pack, budget):
    plan = planned(lengths, gpus, pack=pack, budget_ms=budget)
    assert sorted(d for one in plan.packs for d in one.documents) == list(range(len(lengths)))
    for one in plan.packs:
        assert gpus % one.size == 0
        assert one.first_rank % one.size == 0
        assert sum(-(-lengths[d] // one.size) for d in one.documents) <= 16384
        assert pack or len(one.documents) == 1
    sizes = [one.size for one in plan.packs]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("name", ["prolong64k", "magi", "distca_pretrain"])
def test_no_rank_waits_for_its_group(name):
    """Played through one after another, every pack finds all ranks of its group free at the same time."""
    plan = planned(batch(name, 64), 64)
    free = np.zeros(64)
    for one in plan.packs:
        ranks = slice(one.first_rank, one.first_rank + one.size)
        assert np.ptp(free[ranks]) <= 1e-9 * free.max()
        free[ranks] += one.seconds
    np.testing.assert_allclose(free, plan.rank_s)
    assert plan.time_s == pytest.approx(free.max())


@pytest.mark.parametrize("name", ["prolong64k", "magi", "distca_pretrain"])
@pytest.mark.parametrize("pack", [True, False])
def test_ranks_take_equally_long(name, pack):
    assert planned(batch(name, 64), 64, pack=pack).imbalance < 1.02


def test_a_long_document_gets_more_ranks_than_memory_asks_for_where_it_would_take_longest():
    (one,) = planned([16384], 8).packs
    assert one.size == 8
    even = planned([16384] * 8, 8)
    assert [one.size for one in even.packs] == [1] * 8


def test_packs_save_what_microbatches_take_besides():
    short = [512] * 640
    assert planned(short, 8).time_s < 0.95 * planned(short, 8, pack=False).time_s


def test_plans_are_the_same_again_and_better_with_a_larger_budget():
    lengths = batch("distca_pretrain", 8)[:12]
    one, other = (planned(lengths, 8) for _ in range(2))
    assert one.packs == other.packs
    assert one.time_s <= planned(lengths, 8, budget_ms=0.1).time_s


def test_4096_documents_take_ten_milliseconds():
    """The bar, in time of one core: the least of some, since machines of tests have others to serve."""
    lengths = batch("distca_pretrain", 64, tokens=2**19)[:4096]
    assert len(lengths) == 4096
    planned(lengths, 64)
    taken = []
    for _ in range(9):
        begun = time.process_time()
        planned(lengths, 64)
        taken.append(time.process_time() - begun)
    print(f"4,096 documents on 64 ranks: {1e3 * np.median(taken):.1f} ms")
    assert min(taken) < 0.010


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("name", ["magi", "distca_pretrain", "prolong512k"])
def test_plans_of_few_documents_are_close_to_the_best_of_all(name, pack):
    """Against every plan there is, by the same prices."""
    rng, regrets = np.random.default_rng(3), []
    for seed in range(24):
        lengths = np.minimum(rng.choice(batch(name, 64, seed), 6, replace=False) * 8, 100_000)
        lengths = np.sort(lengths)[::-1].astype(np.int64)
        costs = costs_of(PRICES[8], lengths, PRICES[8].sizes(), alone=not pack)
        plan = planned(lengths, 8, pack=pack)
        best = best_time_s(costs, np.inf)
        regrets.append(plan.time_s / best - 1)
    check("plans of few documents, mean", np.mean(regrets))
    check("plans of few documents, worst", max(regrets))


# Prices


@pytest.mark.parametrize("size", [1, 2, 8, 16])
def test_a_pack_costs_what_its_simulation_takes(size):
    """Documents of many lengths together; prices add what each costs in packs of its own kind."""
    lengths = draw_documents("prolong64k", 16384 * size, 4, max_length=8192 * size)
    prices = PRICES[64]
    (simulated,) = prices.seconds([lengths], size)
    column, rest = prices.column(size), prices.rest_table()
    priced = column.pack_s + column.of(np.array(lengths)).sum() + rest.of(np.array([16384]))[0]
    assert priced == pytest.approx(simulated, rel=0.06)


def test_prices_grow_with_length_and_fall_with_ranks_inside_a_node():
    lengths = np.geomspace(100, 60_000, 50).astype(np.int64)
    columns = [PRICES[8].column(size).of(lengths) for size in (1, 2, 4, 8)]
    assert all((np.diff(column) >= 0).all() for column in columns)
    assert (np.diff([column[-1] for column in columns]) < 0).all()


def test_memory_limits_packs_where_nothing_is_said():
    small, large = (prices_of(cluster(8), "llama3-8b", parallel={"recompute": way}) for way in ("none", "full"))
    assert 0 < small.most_tokens < large.most_tokens
    model = small.model(1)
    for tokens, fits in ((small.most_tokens, True), (small.most_tokens + 256, False)):
        assert (model.stage_memory(tokens, 0).needed <= small.case.cluster.gpu.memory_bytes) == fits


def test_dimensions_are_as_good_as_a_name():
    one, other = (prices_of(cluster(4), m, most_tokens=4096) for m in ("llama3-8b", MODELS["llama3-8b"]))
    assert one.seconds([(4096,)], 1) == other.seconds([(4096,)], 1)


# What loaders take


def test_megatron_gets_documents_of_every_rank_in_order():
    lengths = batch("distca_pretrain", 8)
    plan = planned(lengths, 8, pack=False)
    given = plan.megatron()
    assert given.samples == tuple((d,) for d in range(len(lengths)))
    (ranks,) = given.sample_id_groups
    assert len(ranks) == 8
    for one in plan.packs:
        (document,) = one.documents
        assert [rank for rank in range(8) if document in ranks[rank]] == list(one.ranks)
    for rank, samples in enumerate(ranks):  # as many as its context-parallel size, the largest first
        sizes = [sum(sample in other for other in ranks) for sample in samples]
        assert sizes == sorted(sizes, reverse=True), rank


def test_megatron_gets_packed_samples_with_their_bounds():
    lengths = batch("distca_pretrain", 8)
    given = planned(lengths, 8).megatron()
    assert sorted(d for sample in given.samples for d in sample) == list(range(len(lengths)))
    for sample, bounds in zip(given.samples, given.cu_seqlens, strict=True):
        assert np.diff(bounds).tolist() == lengths[list(sample)].tolist()
    assert {s for rank in given.sample_id_groups[0] for s in rank} == set(range(len(given.samples)))


def test_megatron_cannot_have_idle_ranks():
    plan = planned([128], 8, group_sizes=[1])
    with pytest.raises(InfeasibleError, match="none for rank 1"):
        plan.megatron()


def test_torchtitan_gets_rows_of_one_length_and_equally_many():
    lengths = batch("distca_pretrain", 8)
    rows = planned(lengths, 8, group_sizes=[8]).torchtitan()
    assert len(rows) == 1
    rows = planned(np.minimum(lengths, 32768), 8, group_sizes=[2]).torchtitan()
    assert len({len(rank) for rank in rows}) == 1
    assert sorted(d for rank in rows for row in rank for d in row.documents) == list(range(len(lengths)))
    for row in (row for rank in rows for row in rank):
        own = [min(32768, int(lengths[d])) for d in row.documents]
        wanted = np.concatenate([np.zeros(0, int), *map(np.arange, own)])
        assert len(row.positions) == 32768
        assert row.num_tokens == sum(own)
        np.testing.assert_array_equal(row.positions[: row.num_tokens], wanted)
        assert not row.positions[row.num_tokens :].any()


def test_torchtitan_has_one_size_of_groups():
    with pytest.raises(ScenarioError, match=r"group_sizes=\[n\]"):
        planned(batch("distca_pretrain", 8), 8).torchtitan()


# What is refused


@pytest.mark.parametrize(
    ("lengths", "more", "words"),
    [
        ([], {}, "lengths"),
        ([0, 5], {}, "lengths"),
        ([1.5], {}, "lengths"),
        ([[1]], {}, "lengths"),
        ([10], {"budget_ms": 0}, "budget_ms"),
        ([10], {"budget_ms": float("nan")}, "budget_ms"),
        ([10], {"budget_ms": float("inf")}, "budget_ms"),
        ([10], {"group_sizes": [3]}, "group_sizes"),
        ([10], {"group_sizes": [2, 3]}, "group_sizes"),
        ([10], {"group_sizes": []}, "group_sizes"),
        ([200_000], {}, "at most 131,072 tokens"),
        ([20_000], {"group_sizes": [1]}, "at most 16,384 tokens"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(lengths, more, words):
    with pytest.raises((ScenarioError, InfeasibleError), match=words) as error:
        planned(lengths, 8, **more)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"parallel": {"pp": 2}}, "leave pp and cp out"),
        ({"parallel": {"cp": 2}}, "leave pp and cp out"),
        ({"most_tokens": 0}, "most_tokens"),
        ({"strategy": "rings"}, "strategy"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"parallel": {"tp": 3}}, "tp"),
    ],
)
def test_prices_of_impossible_settings_are_refused(fields, words):
    with pytest.raises((ScenarioError, InfeasibleError), match=words):
        cpsim.plan_batch([1024], cluster(8), "llama3-8b", **fields)


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(InfeasibleError, match="raise tp"):
        prices_of(cluster(8), "llama3-70b")
