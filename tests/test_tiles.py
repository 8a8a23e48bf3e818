"""Tiles and the kernel sequences that they are made of, against brute force."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_masks import masks, range_sets, tokens_of

from cpsim.masks import tiles as tiles_module
from cpsim.masks.shapes import mask_slices
from cpsim.masks.slices import UNBOUNDED, RangeSets, dense_mask
from cpsim.masks.stripes import stripe_bounds, striped
from cpsim.masks.tiles import ListedTiles, _is_between, _sorted_keys, join_tiles, make_tiles, sequences, share_of
from cpsim.strategies import sharding


def covered(tiles, mask, tile, num_tokens):
    """The pairs of a tile as a boolean matrix."""
    pairs = np.zeros((num_tokens, num_tokens), int)
    offset = np.arange(num_tokens)[None] - np.arange(num_tokens)[:, None]
    for row, q0, q1, k0, k1 in tiles.rows[tiles.start[tile] : tiles.start[tile + 1]].tolist():
        inside = np.zeros((num_tokens, num_tokens), bool)
        inside[q0:q1, k0:k1] = True
        pairs += inside & (offset >= mask.low[row]) & (offset <= mask.high[row])
    return pairs


@settings(max_examples=200, deadline=None)
@given(masks(), range_sets(), st.randoms(use_true_random=False))
def test_a_tile_is_the_mask_in_its_product(mask, sets, random):
    pairs = np.array([(random.randrange(len(sets)), random.randrange(len(sets))) for _ in range(4)])
    tiles = make_tiles(mask, sets, pairs[:, 0], pairs[:, 1])
    assert tiles.area[0] == 0
    for tile, (q, k) in enumerate(pairs.tolist(), start=1):
        expected = dense_mask(mask, 24) & tokens_of(sets.of(q), 24)[:, None] & tokens_of(sets.of(k), 24)[None]
        got = covered(tiles, mask, tile, 24)
        assert np.array_equal(got, expected)
        assert tiles.area[tile] == expected.sum()


@settings(max_examples=200, deadline=None)
@given(masks(), range_sets())
def test_key_ranges_end_where_the_band_ends(mask, sets):
    tiles = make_tiles(mask, sets, np.arange(len(sets)), np.arange(len(sets)))
    offset = np.arange(24)[None] - np.arange(24)[:, None]
    for row, q0, q1, k0, k1 in tiles.rows.tolist():
        inside = (offset >= mask.low[row]) & (offset <= mask.high[row])
        assert inside[q0:q1, k0].any()
        assert inside[q0:q1, k1 - 1].any()


@settings(max_examples=100, deadline=None)
@given(masks(), range_sets())
def test_sequences_keep_queries_and_area(mask, sets):
    tiles = make_tiles(mask, sets, np.arange(len(sets)), np.arange(len(sets)))
    found = sequences(tiles)
    for tile in range(len(tiles.area)):
        here = slice(found.start[tile], found.start[tile + 1])
        assert found.area[here].sum() == tiles.area[tile]
        assert (found.area[here] <= found.q_len[here] * found.k_len[here]).all()
        assert (found.area[here] > 0).all()
    assert found.keys().tolist() == [
        found.k_len[found.start[t] : found.start[t + 1]].sum() for t in range(len(tiles.area))
    ]


@settings(max_examples=200, deadline=None)
@given(masks(), range_sets())
def test_query_ranges_begin_where_the_first_key_is_seen(mask, sets):
    tiles = make_tiles(mask, sets, np.arange(len(sets)), np.arange(len(sets)))
    for i in range(len(sets)):
        keys = np.flatnonzero(tokens_of(sets.of(i), 24))
        for row, q0, *_ in tiles.rows[tiles.start[i + 1] : tiles.start[i + 2]].tolist():
            first = keys[keys >= mask.k_start[row]][0]
            assert first - q0 <= mask.high[row]


COLUMNS = ("start", "q_len", "k_len", "area", "flags")


def of_slices(listed):
    """Sequences of tiles as their slices give them, however they were made."""
    return sequences(ListedTiles(listed.start, listed.rows, listed.row_area, listed.area, listed.mask))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mask=masks(), sets=range_sets(), room=st.integers(1, 6))
def test_tiles_whose_slices_find_no_room_are_the_same(monkeypatch, mask, sets, room):
    query, key = (np.array(side) for side in zip(*np.ndindex(len(sets), len(sets)), strict=True))
    kept = make_tiles(mask, sets, query, key)
    monkeypatch.setattr(tiles_module, "MAX_STORED_SLICES", room)
    unlisted = make_tiles(mask, sets, query, key)
    monkeypatch.undo()
    for name in COLUMNS:
        expected = getattr(of_slices(kept), name).tolist()
        assert getattr(sequences(kept), name).tolist() == expected
        assert getattr(sequences(unlisted), name).tolist() == expected
        assert getattr(sequences(join_tiles([unlisted])), name).tolist() == expected
    for name in ("start", "rows", "row_area", "area"):
        assert getattr(unlisted, name).tolist() == getattr(kept, name).tolist()


@settings(max_examples=100, deadline=None)
@given(masks(), st.integers(2, 7))
def test_sequences_between_stripes_are_those_of_the_striped_mask(mask, stride):
    sets = sharding.stack(*sharding.striped_shards(24, stride))
    query, key = (np.array(side) for side in zip(*np.ndindex(len(sets), len(sets)), strict=True))
    direct = make_tiles(mask, sets, query, key, stripe_bounds(24, stride))
    spelled_out = make_tiles(striped(mask, 24, stride), sets, query, key)
    for name in COLUMNS:
        assert getattr(sequences(direct), name).tolist() == getattr(sequences(spelled_out), name).tolist()
    for name in ("start", "rows", "row_area", "area"):
        assert getattr(direct, name).tolist() == getattr(spelled_out, name).tolist()


def test_a_zigzag_ring_step_is_one_sequence_and_an_all_gathered_zigzag_two():
    mask = mask_slices("causal", [32])
    chunks = sharding.zigzag(32, 2)
    shards = sharding.union(sharding.part(chunks, 0, 2), sharding.part(chunks, 2, 2))
    sets = sharding.stack(shards, sharding.contiguous(32, 1))
    ring = sequences(make_tiles(mask, sets, [0], [0]))
    assert (ring.q_len.tolist(), ring.k_len.tolist(), ring.causal.tolist()) == ([16], [16], [True])
    gathered = sequences(make_tiles(mask, sets, [0], [2]))
    assert (gathered.q_len.tolist(), gathered.k_len.tolist()) == ([8, 8], [8, 32])
    assert ring.regular.all()
    assert gathered.regular.all()


def test_a_window_is_no_plain_causal_sequence():
    mask = mask_slices("causal", [16])
    window = type(mask)(mask.q_start, mask.q_end, mask.k_start, mask.k_end, mask.high - 3, mask.high)
    assert window.low[0] > -UNBOUNDED
    whole = RangeSets(np.array([0, 1]), np.array([[0, 16]]))
    assert sequences(make_tiles(window, whole, [0], [0])).regular.tolist() == [False]


def test_every_document_is_a_sequence():
    mask = mask_slices("causal_document", [3, 1, 12])
    found = sequences(make_tiles(mask, sharding.contiguous(16, 1), [0], [0]))
    assert found.q_len.tolist() == [3, 1, 12]
    assert found.area.tolist() == [6, 1, 78]
    assert found.regular.all()


def test_queries_that_see_other_keys_are_no_rectangle_though_areas_agree():
    """A tile need not be a product of two sets: two blocks of queries, each with two blocks of keys of its own."""
    mask, sets = mask_slices("full", (32,)), RangeSets(np.arange(5), np.arange(32).reshape(4, 8)[:, [0, 7]] + [0, 1])
    parts = make_tiles(mask, sets, [0, 0, 1, 1], [0, 1, 2, 3])
    joined = ListedTiles(np.array([0, 0, 4]), parts.rows, parts.row_area, np.array([0, 256]), mask)
    found = sequences(joined)
    assert (found.q_len.tolist(), found.k_len.tolist()) == ([8, 8], [16, 16])
    assert found.one_call[1]
    assert found.in_place[1]
    apart = make_tiles(mask, sets, [0, 0, 1, 1], [0, 2, 1, 3])
    mixed = sequences(ListedTiles(np.array([0, 0, 4]), apart.rows, apart.row_area, np.array([0, 256]), mask))
    assert (mixed.q_len.tolist(), mixed.k_len.tolist()) == ([8, 8], [16, 16])
    assert not mixed.in_place[1]


@settings(deadline=None)
@given(masks(), range_sets())
def test_a_share_of_a_mask_has_the_pairs_of_its_queries_and_keys_side_by_side(mask, sets):
    q, k = sets.of(0), sets.of(len(sets) - 1)
    wanted = dense_mask(mask, 24)[tokens_of(q, 24)][:, tokens_of(k, 24)]
    assert np.array_equal(dense_mask(share_of(mask, q, k), 24)[: len(wanted), : wanted.shape[1]], wanted)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 40))
def test_keys_between_are_found_by_sorted_keys_as_one_by_one(seed, num_rows):
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.integers(0, 100, (num_rows, 2)), axis=1)
    rows = np.column_stack([np.zeros((num_rows, 3), np.int64), edges]).astype(np.int32)
    none = np.empty(0, np.int32)
    starts = np.sort(rng.choice(100, 6, replace=False)).reshape(3, 2)
    seen = np.column_stack([np.zeros((3, 3), np.int64), starts]).astype(np.int32)
    assert _is_between(rows, _sorted_keys(rows), seen) == _is_between(rows, (none, none), seen)


def test_many_chunks_of_one_document_are_cut_into_sequences():
    queries, chunk = np.arange(3, 4096, 8), 16
    ranges = np.stack([queries, queries + 1], axis=1) * chunk
    others = np.stack([np.arange(0, 4096, 8), np.arange(0, 4096, 8) + 2], axis=1) * chunk
    sets = RangeSets(np.array([0, len(ranges), len(ranges) + len(others)]), np.concatenate([ranges, others]))
    mask = mask_slices("causal", (4096 * chunk,), ())
    make_tiles(mask, sets, [0], [1])  # compiled
    calls = sequences(make_tiles(mask, sets, [0], [1]))
    assert calls.k_len.tolist() == [2 * chunk * (i + 1) for i in range(len(ranges))]
