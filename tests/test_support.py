"""Which kernels and implementations can run a mask, and why the others cannot."""

import numpy as np
import pytest
from cases import ALL_MASKS, PLAIN_MASKS, cluster

from cpsim.case.workload import Workload
from cpsim.masks.shapes import mask_slices
from cpsim.masks.slices import dense_mask
from cpsim.masks.tiles import make_tiles, sequence_places, sequences
from cpsim.models.feasible import check_calls
from cpsim.prediction.support import KERNELS, OTHERS, support
from cpsim.strategies import STRATEGIES, plan, sharding


def case(mask, documents=(4096,), **options):
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bf16"}
    return Workload(documents=documents, mask=mask, mask_options=tuple(options.items()), **shape)


def of(mask, documents=(4096,), **options):
    """Support of every strategy on 4 GPUs."""
    return {s.strategy: s for s in support(case(mask, documents, **options), cluster(4))}


@pytest.mark.parametrize("mask", ALL_MASKS)
def test_every_strategy_plans_every_mask(mask):
    found = of(mask)
    assert list(found) == list(STRATEGIES)
    assert {s.plan for s in found.values()} == {""}


@pytest.mark.parametrize("mask", PLAIN_MASKS)
def test_flash_kernels_run_plain_masks_of_every_strategy(mask):
    for s in of(mask, (1024, 3072)).values():
        assert (s.kernels["fa2"], s.kernels["fa4"], s.kernels["sdpa_flash"]) == ("", "", ""), s.strategy


def test_only_gathered_keys_can_be_shared_by_answers():
    found = of("shared_question")
    assert found["allgather"].kernels["fa4"] == ""
    assert found["allgather"].is_general
    for name in ("none", "ulysses", "ring", "zigzag_ring"):
        assert "sequences share keys" in found[name].kernels["fa4"]


def test_reasons_name_what_the_kernel_lacks():
    assert "takes windows of keys before a query's own" in of("full_sliding_window")["none"].kernels["cudnn"]
    assert "one window a call" in of("full_sliding_window")["distca"].kernels["fa2"]
    assert "full and bottom-right causal" in of("lambda", window=512)["none"].kernels["fa4"]
    assert "causal or full sequences in one call" in of("prefix_lm_causal", prefix=1000)["none"].kernels["fa4"]
    assert "sequences of one length a call" in of("shared_question")["allgather"].kernels["cudnn"]


def test_windows_are_arguments_of_flash_kernels_and_of_cudnn():
    found = of("causal_sliding_window", window=512)
    for name in ("none", "allgather", "ulysses", "ring", "zigzag_ring"):
        assert {found[name].kernels[kernel] for kernel in ("fa2", "fa3", "fa4", "sdpa_flash")} == {""}, name
    assert found["none"].kernels["cudnn"] == found["ulysses"].kernels["cudnn"] == ""


def test_windows_as_wide_as_the_documents_are_plain_causal_calls():
    found = of("causal_sliding_window", window=4096)
    assert found["ring"].kernels["fa4"] == found["allgather"].kernels["fa4"] == ""


def test_other_people_s_refusals_are_told():
    found = of("lambda")
    assert "ring of ring-flash-attn runs masks" in found["ring"].others["ring-flash-attn"]
    assert found["ring"].is_general
    assert not of("causal")["ring"].is_general
    assert set(found["none"].others) == {"torch", "flash-attn"}
    assert {name for s in found.values() for name in s.others} <= {code.name for code in OTHERS}
    assert set(found["ring"].kernels) == set(KERNELS)


# Calls: sequences are checked against dense masks, one call after another.


def local_mask(i, tiles):
    """The mask of sequence i, ``[queries, keys]``, from the definition of its place."""
    first_row, end_row, q_from, q_to = sequence_places(tiles)[i].tolist()
    dense, total = dense_mask(tiles.mask, int(tiles.mask.q_end.max())), int(tiles.mask.q_end.max())
    rows = tiles.rows[first_row:end_row]
    inside, queries = np.zeros((total, total), bool), np.zeros(total, bool)
    for _, q0, q1, k0, k1 in rows.tolist():
        inside[q0:q1, k0:k1] = True
        queries[q0:q1] = True
    queries[:q_from] = queries[q_to:] = False
    seen = (dense & inside)[queries]
    return seen[:, seen.any(axis=0)]


@pytest.mark.parametrize("mask", ALL_MASKS)
@pytest.mark.parametrize("layout", ["whole", "contiguous", "zigzag"])
def test_regular_sequences_are_exactly_full_or_bottom_right_causal(mask, layout):
    options = {"block": 5, "window": 9, "prefix": 11, "answers": 3, "sink": 2, "min_block": 2, "density": 0.4}
    from cpsim.masks.names import MASK_NAMES

    known = {key: value for key, value in options.items() if key in MASK_NAMES[mask].options}
    slices = mask_slices(mask, (20, 7, 13, 24), known)
    whole = sharding.contiguous(64, 1)
    parts = {
        "whole": whole,
        "contiguous": sharding.contiguous(64, 4),
        "zigzag": sharding.zigzag_shards(np.array([0, 64]), 4)[0],
    }[layout]
    sets = sharding.stack(parts, whole)
    pairs = [(q, k) for q in range(len(parts)) for k in (*range(len(parts)), len(parts))]
    tiles = make_tiles(slices, sets, *np.array(pairs).T)
    found = sequences(tiles)
    for tile in range(len(tiles.area)):
        here = range(found.start[tile], found.start[tile + 1])
        assert sum(found.area[i] for i in here) == tiles.area[tile]
        for i in here:
            seen = local_mask(i, tiles)
            q_len, k_len = seen.shape
            causal = np.tri(q_len, k_len, k_len - q_len, dtype=bool)
            plain = seen.all() or (k_len >= q_len and np.array_equal(seen, causal))
            assert plain or not found.regular[i]
            if found.regular[i]:
                assert (found.q_len[i], found.k_len[i]) == (q_len, k_len)
                assert found.causal[i] == (not seen.all())


def test_calls_that_read_keys_in_place_read_no_key_twice():
    """Blocks of a causal document share their beginning, documents share nothing."""
    whole = sharding.contiguous(48, 1)
    for mask, in_place in [("causal_document", True), ("block_causal_document", False), ("lambda", False)]:
        tiles = make_tiles(mask_slices(mask, (20, 28), {"block": 4} if "block" in mask else {}), whole, [0], [0])
        assert sequences(tiles).in_place[1] == (in_place or mask == "lambda"), mask


def test_a_copy_of_keys_with_room_for_each_sequence_is_what_a_call_needs():
    asked = case("block_causal_document", (4096,), block=256)
    packed = plan("allgather", asked, cluster(4), "fwd", {"layout": "zigzag"})
    check_calls("fa4", "bf16", 128, packed)
    assert sequences(packed.tiles).keys().sum() > 4096 * 4
