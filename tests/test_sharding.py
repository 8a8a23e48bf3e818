"""Token layouts: partitions of the tokens, equally large."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsim.masks.shapes import mask_slices
from cpsim.strategies import sharding

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=8)
ranks = st.integers(1, 9)


def holders(sets, num_tokens, num_sets):
    """How many of the first sets hold each token."""
    count = np.zeros(num_tokens, int)
    for i in range(num_sets):
        for first, end in sets.of(i).tolist():
            assert first < end
            count[first:end] += 1
    return count


@given(st.integers(1, 200), ranks)
def test_contiguous_shards_partition_the_tokens(num_tokens, num_ranks):
    sets = sharding.contiguous(num_tokens, num_ranks)
    sizes = sets.num_tokens()
    assert sizes.sum() == num_tokens
    assert np.ptp(sizes) <= 1
    bounds = sets.ranges
    assert np.array_equal(bounds[1:, 0], bounds[:-1, 1])


@given(lengths, ranks)
def test_document_zigzag_gives_every_rank_equally_many_tokens(documents, num_ranks):
    total = sum(documents)
    chunks = sharding.document_zigzag(np.concatenate(([0], np.cumsum(documents))), num_ranks)
    assert len(chunks) == 2 * num_ranks
    assert (holders(chunks, total, 2 * num_ranks) == 1).all()
    held = chunks.num_tokens().reshape(2, num_ranks).sum(axis=0)
    assert held.tolist() == [(total + r) // num_ranks for r in range(num_ranks)]


@given(lengths, ranks)
def test_zigzag_tails_mirror_heads_in_every_document(documents, num_ranks):
    """Heads ascend with the rank and tails descend, so chunk r pairs with chunk 2P - 1 - r."""
    bounds = np.concatenate(([0], np.cumsum(documents)))
    chunks = sharding.document_zigzag(bounds, num_ranks)
    for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        starts = []
        for i in [*range(num_ranks), *reversed(range(num_ranks, 2 * num_ranks))]:
            mine = [r for r in chunks.of(i).tolist() if first <= r[0] < end]
            assert len(mine) <= 1
            starts.extend(mine)
        assert sorted(starts) == starts
        assert starts[0][0] == first
        assert starts[-1][1] == end
        assert all(a[1] == b[0] for a, b in pairwise(starts))


def test_zigzag_of_one_sequence_is_that_of_one_document():
    chunks = sharding.zigzag(16, 2)
    assert [chunks.of(i).tolist() for i in range(4)] == [[[0, 4]], [[4, 8]], [[12, 16]], [[8, 12]]]


@given(lengths, ranks)
def test_union_holds_both_and_joins_what_touches(documents, num_ranks):
    bounds = np.concatenate(([0], np.cumsum(documents)))
    chunks = sharding.document_zigzag(bounds, num_ranks)
    heads, tails = sharding.part(chunks, 0, num_ranks), sharding.part(chunks, num_ranks, num_ranks)
    shards = sharding.union(heads, tails)
    assert (holders(shards, sum(documents), num_ranks) == 1).all()
    for i in range(num_ranks):
        ranges = shards.of(i)
        assert (ranges[1:, 0] > ranges[:-1, 1]).all()


def test_stack_and_part_are_inverse():
    one, two = sharding.contiguous(12, 3), sharding.contiguous(12, 2)
    both = sharding.stack(one, two)
    for got, wanted in ((sharding.part(both, 0, 3), one), (sharding.part(both, 3, 2), two)):
        assert np.array_equal(got.start, wanted.start)
        assert np.array_equal(got.ranges, wanted.ranges)


@pytest.mark.parametrize(
    ("mask", "bounds"),
    [
        ("full", [0, 9]),
        ("causal", [0, 9]),
        ("full_document", [0, 4, 6, 9]),
        ("causal_document", [0, 4, 6, 9]),
        ("lambda", [0, 4, 6, 9]),
        ("shared_question_document", [0, 9]),
        ("causal_blockwise_document", [0, 9]),
    ],
)
def test_documents_are_spans_that_share_no_mask_row(mask, bounds):
    slices = mask_slices(mask, [4, 2, 3])
    assert sharding.documents_of(slices, 9).tolist() == bounds
    assert sharding.is_causal(slices) == (not mask.startswith("full"))
