"""Areas and restrictions of masks against a brute-force boolean matrix."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsim.masks.shapes import mask_slices
from cpsim.masks.slices import UNBOUNDED, RangeSets, Slices, coarse_mask, dense_mask, restrict, slices_of


@st.composite
def masks(draw, num_tokens=24):
    """A random mask: disjoint query ranges in order, each with any key range and any band."""
    cuts = sorted(draw(st.sets(st.integers(0, num_tokens), min_size=2, max_size=7)))
    rows = []
    for q_start, q_end in pairwise(cuts):
        k_start = draw(st.integers(0, num_tokens - 1))
        k_end = draw(st.integers(k_start + 1, num_tokens))
        low = draw(st.one_of(st.just(-UNBOUNDED), st.integers(-num_tokens, num_tokens)))
        high = draw(st.one_of(st.just(UNBOUNDED), st.integers(-num_tokens, num_tokens)))
        rows.append((q_start, q_end, k_start, k_end, low, high))
    return Slices(*(column.copy() for column in np.array(rows, np.int64).T))


@st.composite
def range_sets(draw, num_tokens=24):
    """A few sets of disjoint ascending ranges, empty ones included."""
    sets = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(0, num_tokens), max_size=8)))
        sets.append(list(zip(cuts[::2], cuts[1::2], strict=False)))
    start = np.cumsum([0, *map(len, sets)])
    ranges = np.array([r for ranges in sets for r in ranges], np.int64).reshape(-1, 2)
    return RangeSets(start.astype(np.int64), ranges)


def tokens_of(ranges, num_tokens):
    chosen = np.zeros(num_tokens, bool)
    for first, end in ranges.tolist():
        chosen[first:end] = True
    return chosen


@settings(deadline=None)
@given(masks())
def test_area_of_any_band_is_the_brute_force_area(slices):
    assert slices.areas().sum() == dense_mask(slices, 24).sum()


def test_types_have_the_literature_s_areas_and_names():
    for kind, name, area in [(0, "full", 15), (1, "causal", 12), (2, "invcausal", 12), (3, "bicausal", 9)]:
        slices = slices_of([(0, 3, 0, 5, kind)])
        assert slices.types() == [name]
        assert slices.areas().tolist() == [area]


def test_area_of_a_billion_tokens_is_exact():
    n = 10**9
    assert mask_slices("causal", [n]).areas().sum() == n * (n + 1) // 2


@settings(deadline=None)
@given(masks(), st.integers(1, 30))
def test_cells_have_the_brute_force_share_of_pairs(mask, size):
    """Also where cells are narrower than a token, so that some are empty."""
    dense, edges = dense_mask(mask, 24), np.arange(size + 1) * 24 // size
    for (i, j), share in np.ndenumerate(coarse_mask(mask, 24, size)):
        cell = dense[edges[i] : edges[i + 1], edges[j] : edges[j + 1]]
        assert share == (cell.mean() if cell.size else 0)


@settings(max_examples=300, deadline=None)
@given(masks(), range_sets(), range_sets(), st.randoms(use_true_random=False))
def test_restriction_is_the_brute_force_intersection(mask, q_sets, k_sets, random):
    pairs = [(random.randrange(len(q_sets)), random.randrange(len(k_sets))) for _ in range(random.randint(0, 5))]
    pair_q, pair_k = np.array(pairs, np.int64).reshape(-1, 2).T.copy()
    start, rows, areas = restrict(mask, q_sets, k_sets, pair_q, pair_k)
    allowed = dense_mask(mask, 24)
    for pair, (i, j) in enumerate(pairs):
        here = slice(start[pair], start[pair + 1])
        mask_row, *ranges = rows[here].astype(np.int64).T
        part = Slices(*(column.copy() for column in ranges), mask.low[mask_row], mask.high[mask_row])
        expected = allowed & tokens_of(q_sets.of(i), 24)[:, None] & tokens_of(k_sets.of(j), 24)[None, :]
        assert np.array_equal(dense_mask(part, 24), expected)
        assert np.array_equal(part.areas(), areas[here])
        assert (areas[here] > 0).all()
        assert (np.diff(mask_row) >= 0).all()
        assert areas[here].sum() == expected.sum()
    assert start[-1] == len(rows) == len(areas)


@given(range_sets())
def test_range_sets_count_their_tokens(sets):
    assert sets.num_tokens().tolist() == [tokens_of(sets.of(i), 24).sum() for i in range(len(sets))]
