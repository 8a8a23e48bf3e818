"""Every strategy: coverage, data, races, numbers, bytes, balance, and what it says where it cannot run."""

from contextlib import suppress
from itertools import islice

import numeric
import numpy as np
import pytest
from cases import (
    ALL_KNOBS,
    ALL_MASKS,
    ALL_PASSES,
    ALL_RANKS,
    ALL_STRATEGIES,
    BLIND_MASK,
    DOCUMENTS,
    HEADS,
    PLAIN_MASKS,
    cluster,
    workload,
)

from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.masks.tiles import sequences
from cpsim.schedule.check import validate
from cpsim.schedule.schedule import ATTENTION_KINDS, Kind
from cpsim.strategies import STRATEGIES, plan

IDS = [f"{name}-{'-'.join(map(str, knobs.values()))}" for name, knobs in ALL_STRATEGIES]
every_strategy = pytest.mark.parametrize(("name", "knobs"), ALL_STRATEGIES, ids=IDS)
every_pass = pytest.mark.parametrize("pass_", ALL_PASSES)
every_cover = pytest.mark.parametrize("cover", ["pairs", pytest.param("product", marks=pytest.mark.slow)])


def problems(masks=ALL_MASKS, heads=tuple(HEADS)):
    """Every mask; those of documents with all lengths, plain ones with all heads."""
    for mask in masks:
        for documents in DOCUMENTS if mask in ("full_document", "causal_document") else ("uneven",):
            for shape in heads if mask in PLAIN_MASKS and documents == "uneven" else heads[:1]:
                yield workload(mask, documents, shape)


def feasible(name, knobs, pass_, ranks=ALL_RANKS, cover="product", **chosen):
    """(workload, schedule) of cases that the strategy can run: of all with all numbers of ranks, or of each with one
    number, in turn, so that any two of strategy, case and number of ranks still meet."""
    turn = ALL_STRATEGIES.index((name, knobs)) + ALL_PASSES.index(pass_)
    for i, case in enumerate(problems(**chosen)):
        first = (turn + i) % len(ranks)
        found = possible(name, knobs, pass_, case, ranks[first:] + ranks[:first])
        for schedule in found if cover == "product" else islice(found, 1):
            yield case, schedule


def possible(name, knobs, pass_, case, ranks):
    for num_ranks in ranks:
        with suppress(InfeasibleError):
            yield plan(name, case, cluster(num_ranks), pass_, knobs)


def test_every_strategy_has_test_cases():
    assert set(ALL_KNOBS) == set(STRATEGIES)


@every_cover
@every_pass
@every_strategy
def test_every_schedule_is_valid(name, knobs, pass_, cover):
    count = 0
    for case, schedule in feasible(name, knobs, pass_, cover=cover):
        validate(schedule, case, pass_)
        count += 1
    assert count >= (24 if name == "none" else 25 if cover == "pairs" else 40)


@every_cover
@every_pass
@every_strategy
def test_schedules_compute_dense_attention_in_any_legal_order(name, knobs, pass_, cover):
    """Validation proves that no order races; list order is what the executor's tests run."""
    count = 0
    for case, schedule in feasible(name, knobs, pass_, ranks=(1, 2, 3, 4), cover=cover, heads=("gqa", "mqa")):
        numeric.check(schedule, case, numeric.any_order(schedule, seed=len(schedule)))
        count += 1
    assert count >= 20


@every_pass
@every_strategy
def test_queries_that_see_no_key_have_no_output(name, knobs, pass_):
    count = 0
    for case, schedule in feasible(name, knobs, pass_, masks=[BLIND_MASK]):
        assert not numeric.dense_mask(case.slices(), 48)[:8].any()
        assert (numeric.tensors(case)["out"][:8, :, -1] == -np.inf).all()
        validate(schedule, case, pass_)
        numeric.check(schedule, case, numeric.any_order(schedule, seed=1))
        count += 1
    assert count


@every_pass
@every_strategy
def test_knobs_worth_trying_can_be_planned(name, knobs, pass_):
    del knobs
    case = workload("causal_document", (320, 1216, 1536), "mha")
    if name in ("wlb", "per_sequence"):
        with pytest.raises(InfeasibleError, match="tried where it is asked for"):
            STRATEGIES[name].knobs(case, cluster(4))
        return
    settings = STRATEGIES[name].knobs(case, cluster(4))
    assert settings
    for chosen in settings if name != "none" else ():
        validate(plan(name, case, cluster(4), pass_, chosen), case, pass_)


@every_pass
@pytest.mark.parametrize("dtype", ["fp16", "fp32", "fp64"])
@pytest.mark.parametrize("name", [n for n in STRATEGIES if n != "none"])
def test_other_element_types_are_valid(name, dtype, pass_):
    case = workload("causal", "one", "gqa", dtype=dtype)
    validate(plan(name, case, cluster(2), pass_, {}), case, pass_)


@pytest.mark.parametrize(
    ("pass_", "ranks", "num_ops"),
    [
        ("fwd", 32, 3008),
        ("bwd", 32, 5088),
        pytest.param("fwd", 96, 27_456, marks=pytest.mark.slow),
        pytest.param("bwd", 96, 45_984, marks=pytest.mark.slow),
    ],
)
def test_a_zigzag_ring_of_many_ranks_is_valid(pass_, ranks, num_ops):
    case = workload("causal", (ranks * 8192,), num_heads=32, num_kv_heads=8, head_dim=128)
    schedule = plan("zigzag_ring", case, cluster(ranks), pass_, {})
    validate(schedule, case, pass_)
    assert len(schedule) == num_ops
    num_kernels = np.isin(schedule.kind, ATTENTION_KINDS).sum()
    assert num_kernels == ranks**2
    moves = ranks * (ranks - 1)
    assert (schedule.kind == Kind.TRANSFER).sum() == (moves if pass_ == "fwd" else moves + ranks**2)
    assert (schedule.kind == Kind.MERGE).sum() == (moves if pass_ == "fwd" else 0)


def work_of_ranks(schedule):
    """Unmasked pairs times heads that every rank computes."""
    attends = np.isin(schedule.kind, ATTENTION_KINDS)
    area = schedule.tiles.area[schedule.tile] * schedule.heads[:, 1] * attends
    return np.bincount(schedule.lane_rank[schedule.lane_start[:-1]], area, schedule.num_ranks)


# Bytes on the wire. N tokens, P ranks, a 2-byte element, e bytes of an accumulator; D = heads x head_dim.


def shapes(case):
    return case.num_tokens, case.num_heads * case.head_dim, case.num_kv_heads * case.head_dim


@pytest.mark.parametrize("num_ranks", ALL_RANKS)
@pytest.mark.parametrize("mask", ALL_MASKS)
@pytest.mark.parametrize("name", ["ring", "zigzag_ring", "striped_ring"])
def test_rings_send_every_shard_to_every_rank(name, mask, num_ranks):
    """Forward (P-1)/P of K and V; backward the same and P hops of fp32 gradients."""
    case = workload(mask, "uneven", "gqa")
    tokens, _, kv = shapes(case)
    local = 2 * kv * tokens / num_ranks
    sent = {p: plan(name, case, cluster(num_ranks), p, {}).bytes_sent() for p in ALL_PASSES}
    assert sent["fwd"] == pytest.approx(np.full(num_ranks, (num_ranks - 1) * local * 2))
    hops = num_ranks if num_ranks > 1 else 0
    assert sent["bwd"] == pytest.approx(np.full(num_ranks, (num_ranks - 1) * local * 2 + hops * local * 4))


@pytest.mark.parametrize("num_ranks", ALL_RANKS)
@pytest.mark.parametrize("knobs", ALL_KNOBS["allgather"])
def test_all_gather_sends_shards_once_and_reduces_fp32_gradients(knobs, num_ranks):
    case = workload("causal", "uneven", "gqa")
    tokens, _, kv = shapes(case)
    share = (num_ranks - 1) / num_ranks * 2 * kv * tokens
    sent = {p: plan("allgather", case, cluster(num_ranks), p, knobs).bytes_sent() for p in ALL_PASSES}
    assert sent["fwd"] == pytest.approx(np.full(num_ranks, share * 2))
    assert sent["bwd"] == pytest.approx(np.full(num_ranks, share * 2 + share * 4))


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", HEADS)
def test_ulysses_sends_all_tensors_once_and_replicas_of_scarce_heads(shape, num_ranks):
    """Each way (P-1)/P^2 of Q, K, V and of O; where key-value heads are fewer than ranks, P travel."""
    case = workload("causal", "uneven", shape)
    tokens, q, kv = shapes(case)
    kv = max(kv, num_ranks * case.head_dim)
    share = (num_ranks - 1) / num_ranks**2 * tokens * 2
    sent = {p: plan("ulysses", case, cluster(num_ranks), p, {}).bytes_sent() for p in ALL_PASSES}
    for total in sent.values():
        assert total == pytest.approx(np.full(num_ranks, share * (q + 2 * kv) + share * q))


@every_pass
def test_one_gpu_sends_nothing(pass_):
    assert plan("none", workload(), cluster(1), pass_, {}).bytes_sent().tolist() == [0]


# Balance


def test_a_causal_ring_leaves_early_ranks_idle():
    """Rank r computes in r + 1 of P steps."""
    schedule = plan("ring", workload("causal", "one"), cluster(8), "fwd", {})
    kernels = schedule.lane_rank[schedule.lane_start[:-1]][schedule.kind == Kind.ATTENTION]
    assert np.bincount(kernels).tolist() == list(range(1, 9))
    pairs = work_of_ranks(schedule) / 8
    assert pairs.tolist() == [6 * 7 / 2 + 36 * r for r in range(8)]


def test_a_zigzag_ring_is_exactly_balanced_where_chunks_are_equal():
    schedule = plan("zigzag_ring", workload("causal", "one"), cluster(8), "fwd", {})
    assert np.ptp(work_of_ranks(schedule)) == 0


@pytest.mark.parametrize("name", ["zigzag_ring", "allgather"])
def test_zigzag_by_document_is_balanced_over_any_documents(name):
    lengths = tuple(np.random.default_rng(1).integers(50, 4000, 40).tolist())
    case = workload("causal_document", (*lengths, 8 - sum(lengths) % 8 + 64))
    knobs = {"zigzag": "document"} if name == "zigzag_ring" else {"layout": "document_zigzag"}
    work = work_of_ranks(plan(name, case, cluster(8), "fwd", knobs))
    assert work.max() / work.mean() < 1.01


def test_ulysses_is_balanced():
    assert np.ptp(work_of_ranks(plan("ulysses", workload("causal_document", "uneven"), cluster(8), "bwd", {}))) == 0


@pytest.mark.parametrize("num_ranks", ALL_RANKS)
def test_zigzag_kernels_of_a_dense_causal_step_are_one_plain_sequence(num_ranks):
    schedule = plan("zigzag_ring", workload("causal", (num_ranks * 2 * 64,)), cluster(num_ranks), "fwd", {})
    found = sequences(schedule.tiles)
    assert found.regular.all()
    assert np.diff(found.start)[1:].tolist() == [1] * num_ranks**2


@pytest.mark.parametrize("num_ranks", ALL_RANKS)
def test_striped_kernels_are_one_causal_triangle_that_loses_its_diagonal_where_keys_are_later(num_ranks):
    schedule = plan("striped_ring", workload("causal", (num_ranks * 64,)), cluster(num_ranks), "fwd", {})
    found = sequences(schedule.tiles)
    step, rank = np.divmod(np.arange(num_ranks**2), num_ranks)
    expected = np.where((rank - step) % num_ranks <= rank, 64, 63).tolist()
    assert (found.q_len.tolist(), found.k_len.tolist()) == (expected, expected)
    assert found.causal.all()
    assert found.regular.all()


@pytest.mark.parametrize("num_ranks", ALL_RANKS)
def test_striped_documents_are_triangles_of_their_own(num_ranks):
    lengths = tuple(np.random.default_rng(num_ranks).integers(1, 90, 30).tolist())
    schedule = plan("striped_ring", workload("causal_document", lengths), cluster(num_ranks), "fwd", {})
    found = sequences(schedule.tiles)
    assert (found.q_len == found.k_len).all()
    assert (found.area == found.q_len * (found.q_len + 1) // 2).all()
    assert found.regular.all()
    longest = np.diff(found.start)[1:].max()
    assert longest <= len(lengths)


@pytest.mark.parametrize("lengths", [(8 * 500,), (8 * 500 - 3,), (1234, 77, 2500, 189)])
def test_a_striped_ring_is_balanced_in_every_step_over_any_documents(lengths):
    schedule = plan("striped_ring", workload("causal_document", lengths), cluster(8), "fwd", {})
    area = schedule.tiles.area[1:].reshape(8, 8)
    assert np.ptp(area, axis=1).max() <= 500 + 100
    assert area.max() / area.mean() < 1.01


# Infeasible cases and knobs


@pytest.mark.parametrize(
    ("name", "num_ranks", "knobs", "reason"),
    [
        ("none", 2, {}, "runs on 1 GPU, got 2"),
        ("ulysses", 3, {}, "query heads divisible by ranks, got 8 heads on 3 GPUs"),
        ("ulysses", 8, {"head_groups": 2}, "got 1 query and 1 key-value heads"),
        ("allgather", 2, {"heads_per_gather": 3}, "divide the key-value heads, got 3 for 2 kv_heads"),
    ],
)
@every_pass
def test_infeasible_cases_say_why(name, num_ranks, knobs, reason, pass_):
    with pytest.raises(InfeasibleError, match=reason):
        plan(name, workload(), cluster(num_ranks), pass_, knobs)


def test_ulysses_with_key_value_heads_that_do_not_fit_says_so():
    with pytest.raises(InfeasibleError, match="got 4 kv_heads on 6 GPUs"):
        plan("ulysses", workload(num_heads=12, num_kv_heads=4), cluster(6), "fwd", {})


@pytest.mark.parametrize("name", ["ulysses", "allgather"])
def test_collectives_refuse_tokens_that_ranks_do_not_divide(name):
    with pytest.raises(InfeasibleError, match=r"tokens divisible by ranks.*, got 49 tokens on 2"):
        plan(name, workload(documents=(49,)), cluster(2), "fwd", {})


@every_pass
@pytest.mark.parametrize(("name", "knobs"), [(n, k) for n, k in ALL_STRATEGIES if "ring" in n])
def test_shards_may_differ_by_a_token(name, knobs, pass_):
    for total in (49, 55, 5):
        case = workload("causal", (total,), "mha")
        schedule = plan(name, case, cluster(8), pass_, knobs)
        validate(schedule, case, pass_)
        numeric.check(schedule, case, numeric.any_order(schedule, seed=total))


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("ring", {"zigzag": "document"}, "has no knob 'zigzag'; it has none"),
        ("zigzag_ring", {"zig": 1}, "has no knob 'zig'; it has zigzag"),
        ("zigzag_ring", {"zigzag": "both"}, "expected 'document' or 'sequence', got 'both'"),
        ("ulysses", {"head_groups": 0}, "expected a positive integer, got 0"),
        ("allgather", {"layout": "striped"}, "expected one of contiguous, zigzag, document_zigzag"),
        ("rings", {}, "strategy: expected one of none, ulysses, ring, .*, got 'rings'"),
    ],
)
def test_wrong_names_and_knobs_say_what_is_possible(name, knobs, message):
    with pytest.raises(ScenarioError, match=message):
        plan(name, workload(), cluster(2), "fwd", knobs)


def test_documents_are_cut_one_by_one_where_their_shares_fill_kernels():
    knobs = STRATEGIES["zigzag_ring"].knobs
    assert knobs(workload("causal"), cluster(8)) == ({},)
    long, short = ((8192,) * 4, (256,) * 128)
    assert knobs(workload("causal_document", long), cluster(8)) == ({"zigzag": "document"}, {"zigzag": "sequence"})
    assert knobs(workload("causal_document", short), cluster(8)) == ({"zigzag": "sequence"},)
    with pytest.raises(InfeasibleError, match="not tried: stripes of 128 documents are 32 tokens long"):
        STRATEGIES["striped_ring"].knobs(workload("causal_document", short), cluster(8))
