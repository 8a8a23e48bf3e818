"""DistCA's data: sampling, packing into sequences, and the packings and shards of its baselines."""

import numpy as np
import pytest

from cpsim.case.documents import load_bins
from cpsim.errors import ScenarioError
from cpsim.strategies.distca.batches import LONG, NUM_DOCUMENTS, iteration, pack, sample, stand_in
from cpsim.strategies.distca.packing import head_tail, per_sequence, wlb_limit, wlb_pack

CONTEXT = 2 * LONG


def documents(seed=0, count=200, longest=9000):
    return np.random.default_rng(seed).integers(1, longest, count)


def one_by_one(lengths, context):
    """Sequences filled document by document."""
    made, room = [[]], context
    for length in lengths.tolist():
        left = (length + 15) // 16 * 16
        while left:
            if room == 0:
                made, room = [*made, []], context
            piece = min(left, room)
            made[-1].append(piece)
            left, room = left - piece, room - piece
    return made


@pytest.mark.parametrize("context", [4096, 100_000, *(pytest.param(n, marks=pytest.mark.slow) for n in (16, 8192))])
def test_sequences_are_filled_exactly_and_documents_are_cut_where_they_end(context):
    lengths = documents()
    packed = pack(lengths, context)
    assert [packed.documents(i, 1).tolist() for i in range(len(packed))] == one_by_one(lengths, context)


def test_pretrain_is_drawn_without_replacement_and_elongated():
    lengths = np.concatenate([documents(1, 900), LONG + documents(2, 30)])
    short, long = lengths[:900].tolist(), lengths[900:].tolist()
    pool = short[:450] + long * 4
    drawn = np.random.default_rng(7).choice(pool, size=500, replace=False) * 2
    got = sample("pretrain", CONTEXT, lengths=lengths, seed=7, count=500)
    assert [got.documents(i, 1).tolist() for i in range(len(got))] == one_by_one(drawn, CONTEXT)


def test_prolong_has_all_long_documents_first_and_replaces_some_by_full_sequences():
    lengths = np.concatenate([documents(1, 900), LONG + documents(2, 30)])
    rng = np.random.default_rng(7)
    long = [CONTEXT if rng.random() < 0.3 else length for length in lengths[900:].tolist() * 4]
    got = sample("prolong", CONTEXT, lengths=lengths, seed=7)
    expected = one_by_one(np.array(long + lengths[:450].tolist()), CONTEXT)
    assert [got.documents(i, 1).tolist() for i in range(len(got))] == expected


@pytest.mark.parametrize("dataset", NUM_DOCUMENTS)
def test_stand_ins_have_the_published_documents_and_tokens_in_every_bin(dataset):
    bins, lengths = load_bins(f"distca_{dataset}"), stand_in(dataset)
    assert len(lengths) == NUM_DOCUMENTS[dataset]
    published_mean = {"pretrain": 3961.79, "prolong": 3051.9}[dataset]
    assert lengths.mean() == pytest.approx(published_mean, rel=0.002)
    counts = np.histogram(lengths, np.append(bins.low, bins.high[-1] + 1))[0]
    assert counts / len(lengths) == pytest.approx(np.diff(bins.cumulative, prepend=0), abs=1e-9)
    assert (lengths >= LONG).sum() == {"pretrain": 528, "prolong": 47}[dataset]


@pytest.mark.parametrize(
    ("dataset", "quantiles"),
    [("pretrain", {0.1: 646, 0.5: 3227, 0.9: 5784, 0.99: 26058}), ("prolong", {0.1: 919, 0.5: 1913, 0.9: 6051})],
)
def test_stand_ins_come_close_to_the_published_quantiles(dataset, quantiles):
    assert np.quantile(stand_in(dataset), list(quantiles)) == pytest.approx(list(quantiles.values()), rel=0.12)


@pytest.mark.parametrize("dataset", NUM_DOCUMENTS)
def test_samples_are_the_same_for_the_same_seed_only(dataset):
    one, again, other = (sample(dataset, CONTEXT, seed=seed).lengths for seed in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_an_iteration_has_two_nano_batches_of_equally_many_tokens():
    packed = sample("prolong", CONTEXT)
    ping, pong = iteration(packed, 3, batch_size=4)
    assert ping.sum() == pong.sum() == 4 * CONTEXT
    assert np.array_equal(np.concatenate([ping, pong]), packed.documents(24, 8))
    with pytest.raises(ScenarioError, match="needs sequences 80000 to 80007, got"):
        iteration(packed, 10_000, batch_size=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("c4", CONTEXT), "expected one of pretrain, prolong"), (("pretrain", 100_000), "a multiple of 65536 tokens")],
)
def test_wrong_samples_say_what_is_possible(arguments, message):
    with pytest.raises(ScenarioError, match=message):
        sample(*arguments)


def packed_by_hand(lengths, groups, limit, breakpoint_):
    """WLB packing with lists, one document after the other."""
    made, late = [[] for _ in range(groups)], []
    for length in sorted(lengths.tolist(), reverse=True):
        work = [sum((x / breakpoint_) ** 2 + x / breakpoint_ for x in group) for group in made]
        tokens = [sum(group) for group in made]
        fits = [i for i in (work.index(min(work)), tokens.index(min(tokens))) if tokens[i] + length <= limit]
        made[fits[0]].append(length) if fits else late.append(length)
    for length in late:
        work = [sum((x / breakpoint_) ** 2 + x / breakpoint_ for x in group) for group in made]
        made[work.index(min(work))].append(length)
    return made


@pytest.mark.parametrize("limit", [0, 60_000, 120_000, 10**9])
@pytest.mark.parametrize("seed", range(4))
def test_wlb_packing_is_what_lists_give(seed, limit):
    lengths = documents(seed, 100)
    group = wlb_pack(lengths, 8, limit, 4000)
    expected = packed_by_hand(lengths, 8, limit, 4000)
    assert [sorted(lengths[group == g].tolist(), reverse=True) for g in range(8)] == [sorted(g)[::-1] for g in expected]


def test_with_microbatches_the_released_limit_is_too_small_and_packing_goes_by_work():
    kept, mean = (wlb_limit(CONTEXT, 4, 2, 4, quirk=quirk) for quirk in (True, False))
    assert mean == 4 * kept == CONTEXT * 2 * 4 // 2
    assert wlb_limit(CONTEXT, 4, 2) == wlb_limit(CONTEXT, 4, 2, quirk=False)
    lengths = np.concatenate(iteration(sample("pretrain", CONTEXT), 0, 16))
    work = (lengths / 131_072) ** 2 + lengths / 131_072
    by_work, by_both = (np.bincount(wlb_pack(lengths, 8, limit, 131_072), work, 8) for limit in (kept, mean))
    assert np.ptp(by_work) < np.ptp(by_both)


def tokens_of(shards, num_documents):
    """How often every token of every document is in a shard."""
    seen = [np.zeros(0, int) for _ in range(num_documents)]
    for document, first, kv in zip(shards.document, shards.first, shards.kv, strict=True):
        more = np.zeros(max(kv, len(seen[document])), int)
        more[: len(seen[document])] += seen[document]
        more[first:kv] += 1
        seen[document] = more
    return seen


@pytest.mark.parametrize("shard", [head_tail, per_sequence])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shards_hold_every_token_once_and_about_equally_many(shard, ranks):
    lengths = np.concatenate([documents(3, 20), [1, 2, 5]])
    shards = shard(lengths, ranks)
    seen = tokens_of(shards, len(lengths))
    assert [len(s) for s in seen] == lengths.tolist()
    assert all((s == 1).all() for s in seen)
    assert shards.pairs.sum() == (lengths * (lengths + 1) // 2).sum()
    assert np.ptp(np.bincount(shards.server, shards.tokens, ranks)) <= 2


def test_shards_by_document_are_balanced_and_those_of_the_buffer_are_not():
    lengths = np.array([70_000, 800, 900, 40_000, 3000, 16_000])
    balance = []
    for shard in (head_tail, per_sequence):
        shards = shard(lengths, 4)
        work = np.bincount(shards.server, shards.pairs, 4)
        balance.append(work.max() / work.mean())
    assert balance[0] < 1.001
    assert balance[1] > 1.1
