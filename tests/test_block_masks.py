"""Masks in blocks against the dense mask."""

import dataclasses

import numpy as np
import pytest
from cases import ALL_MASKS, ALL_STRATEGIES, BLIND_MASK, MASK_OPTIONS, cluster, workload

from cpsim.errors import InfeasibleError
from cpsim.masks import blocks as block_masks
from cpsim.masks.blocks import (
    BANDS,
    CELLS,
    FULL,
    PARTIAL,
    RUNS,
    band_cells,
    block_kinds,
    causal_windows,
    key_runs,
    rectangles,
    sequence_slices,
    table_of,
)
from cpsim.masks.shapes import mask_slices
from cpsim.masks.slices import dense_mask
from cpsim.models.feasible import dense_sequences, gathered_sequences, refusal, tile_visits
from cpsim.models.profile import load_profile
from cpsim.schedule.schedule import Kind
from cpsim.strategies import plan

DOCUMENTS = (37, 5, 64, 1, 53)
TOKENS = sum(DOCUMENTS)


def small(name):
    slices = mask_slices(name, DOCUMENTS, MASK_OPTIONS.get(name, {}))
    return table_of(slices), dense_mask(slices, TOKENS)


@pytest.mark.parametrize("name", ALL_MASKS)
@pytest.mark.parametrize("size", [4, 16, 100])
def test_block_kinds_equal_brute_force(name, size):
    table, seen = small(name)
    kinds = block_kinds(table, TOKENS, TOKENS, size)
    for i, j in np.ndindex(kinds.shape):
        block = seen[i * size : (i + 1) * size, j * size : (j + 1) * size]
        expected = FULL if block.sum() == size * size else PARTIAL if block.any() else 0
        assert kinds[i, j] == expected


@pytest.mark.parametrize("name", ALL_MASKS)
def test_cells_and_runs_decide_every_pair_as_the_mask_does(name):
    table, seen = small(name)
    of_q, of_k, cells, limits = band_cells(table, TOKENS, TOKENS)
    low, high, low_2, high_2 = limits[:, cells[of_q[:, None], of_k[None, :]]]
    offset = np.arange(TOKENS)[None, :] - np.arange(TOKENS)[:, None]
    assert np.array_equal((low <= offset) & (offset <= high) | (low_2 <= offset) & (offset <= high_2), seen)
    (first, end), one_run = key_runs(table, TOKENS)
    keys = np.arange(TOKENS)[None, :]
    in_run = (first[:, None] <= keys) & (keys < end[:, None])
    assert one_run == np.array_equal(in_run, seen)


def test_sequences_are_full_or_causal_to_the_bottom_right():
    slices = sequence_slices(np.array([3, 0, 5]), np.array([6, 4, 5]), causal_windows(np.array([True, False, False])))
    kinds = block_kinds(table_of(slices), 8, 15, 1)
    seen = np.zeros((8, 15), bool)
    seen[:3, :6] = np.tril(np.ones((3, 6), bool), 3)
    seen[3:, 10:] = True
    assert np.array_equal(kinds == FULL, seen)


def planned(strategy, knobs, mask):
    """A case of uneven documents on 4 ranks, its forward schedule and the attention ops of that."""
    case = workload(mask, "uneven")
    try:
        schedule = plan(strategy, case, cluster(4), "fwd", knobs)
    except InfeasibleError:
        pytest.skip("this strategy does not take this mask")
    return case, schedule, np.flatnonzero(schedule.kind == Kind.ATTENTION)


@pytest.mark.parametrize("mask", ["causal", "full_document", "lambda", "shared_question", "block_sparse", BLIND_MASK])
@pytest.mark.parametrize(("strategy", "knobs"), ALL_STRATEGIES)
def test_with_blocks_of_one_token_every_op_visits_its_pairs(strategy, knobs, mask, monkeypatch):
    monkeypatch.setattr(block_masks, "BLOCK", 1)
    case, schedule, ops = planned(strategy, knobs, mask)
    found = tile_visits(schedule, ops, case.head_dim * 2)
    area = schedule.tiles.area
    for tile in schedule.tile[ops].tolist():
        assert found[tile].of_queries[:, 1].sum() == found[tile].of_keys[:, 1].sum() == area[tile]
    start, q_len, k_len, _ = dense_sequences(schedule, ops, case.head_dim * 2)
    for tile in schedule.tile[ops].tolist():
        assert (q_len * k_len)[start[tile] : start[tile + 1]].sum() >= area[tile]


@pytest.mark.parametrize("mask", ["full", "full_document", "block_sparse", "variable_block_sparse"])
@pytest.mark.parametrize(("strategy", "knobs"), ALL_STRATEGIES)
def test_gathered_keys_are_those_that_rows_of_rectangles_see(strategy, knobs, mask):
    case, schedule, ops = planned(strategy, knobs, mask)
    start, q_len, k_len, causal = gathered_sequences(schedule, ops, case.head_dim * 2)
    assert not causal.any()
    for tile in schedule.tile[ops].tolist():
        assert (q_len * k_len)[start[tile] : start[tile + 1]].sum() == schedule.tiles.area[tile]


def test_gathered_keys_refuse_masks_that_cut_rectangles_and_backward_passes():
    def reason(mask, pass_="fwd"):
        case = workload(mask, (1024,), mask_options=(("block", 100),) if mask == "block_sparse" else (), head_dim=128)
        return refusal("flashinfer", "bf16", 128, plan("none", case, cluster(1), pass_, {}))

    assert reason("full") == reason("block_sparse") == ""
    assert "cuts some; use flex" in reason("causal")
    assert "no backward pass" in reason("full", "bwd")


def test_lists_of_whole_blocks_refuse_masks_that_cut_one():
    def reason(mask):
        case = workload(mask, (1024,), mask_options=(("block", 128),) if mask == "block_sparse" else (), head_dim=128)
        return refusal("fa4_sparse", "bf16", 128, plan("none", case, cluster(1), "fwd", {}))

    assert reason("full") == reason("block_sparse") == ""
    assert "cuts 8 of 36 blocks; use flex" in reason("causal")


def test_masks_unlike_all_measured_ones_are_refused():
    shipped = load_profile("h200")
    one_run = dataclasses.replace(shipped, valid={**shipped.valid, "attention fwd flex rule": (RUNS, RUNS)})
    one_run.check_rules("flex", "fwd", {RUNS, None})
    with pytest.raises(InfeasibleError, match="one run of keys"):
        one_run.check_rules("flex", "fwd", {CELLS})
    every = dataclasses.replace(shipped, valid={**shipped.valid, "attention fwd flex rule": (RUNS, BANDS)})
    every.check_rules("flex", "fwd", {CELLS, BANDS})


def test_masks_measured_at_another_head_dimension_only_are_noted():
    shipped = load_profile("h200")
    one_run = dataclasses.replace(shipped, valid={**shipped.valid, "attention bwd flex rule at 64": (RUNS, RUNS)})
    assert one_run.rule_notes("flex", "bwd", 64, {RUNS, None}) == ()
    assert one_run.rule_notes("flex", "bwd", 128, {BANDS}) == ()
    assert "not measured at head_dim 64" in one_run.rule_notes("flex", "bwd", 48, {BANDS})[0]


@pytest.mark.parametrize("name", ["full", "full_document", "block_sparse", "variable_block_sparse"])
def test_masks_of_rectangles_are_grids_of_rows_and_columns(name):
    table, seen = small(name)
    grid, rows, columns = rectangles(table, TOKENS, TOKENS)
    assert np.array_equal(np.repeat(np.repeat(grid, rows, axis=0), columns, axis=1), seen)


@pytest.mark.parametrize("name", ["causal", "lambda", "causal_sliding_window", "shared_question"])
def test_masks_that_cut_rectangles_are_no_grids(name):
    with pytest.raises(ValueError, match="that cuts them"):
        rectangles(small(name)[0], TOKENS, TOKENS)
