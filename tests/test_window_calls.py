"""Sliding windows as kernels' arguments: which calls one window runs, against the dense mask, and what they cost."""

import numpy as np
import pytest
from cases import ALL_STRATEGIES, cluster, workload

from cpsim.errors import CpsimError
from cpsim.masks.slices import UNCUT
from cpsim.masks.tiles import sequence_places, sequences
from cpsim.strategies import plan

MASKS = ("causal_sliding_window", "full_sliding_window")


def planned(mask, strategy, knobs, documents="uneven", ranks=4, pass_="fwd"):
    try:
        return plan(strategy, workload(mask, documents), cluster(ranks), pass_, knobs)
    except CpsimError as error:
        pytest.skip(str(error))


def dense(window, num_q, num_k):
    """The mask of one sequence, the last query's own key being the last one."""
    left, right = window
    behind = np.arange(num_k)[None, :] - (np.arange(num_q)[:, None] + num_k - num_q)
    return (behind >= -left if left != UNCUT else True) & (behind <= right if right != UNCUT else True) & True


@pytest.mark.parametrize("documents", ["one", "uneven"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("strategy", "knobs"), ALL_STRATEGIES)
def test_one_window_is_the_mask_of_every_sequence(strategy, knobs, mask, documents):
    schedule = planned(mask, strategy, knobs, documents)
    tiles, found = schedule.tiles, sequences(schedule.tiles)
    places, checked = sequence_places(tiles), 0
    for tile in np.flatnonzero(found.one_window).tolist():
        for i in range(found.start[tile], found.start[tile + 1]):
            first, end, q_from, q_to = places[i].tolist()
            q_to -= int(found.unseen[i])
            rows = tiles.rows[first:end].astype(int)
            rows = rows[(rows[:, 1] < q_to) & (rows[:, 2] > q_from)]
            k_from, k_to = rows[:, 3].min(), rows[:, 4].max()
            want = np.zeros((q_to - q_from, k_to - k_from), bool)
            for row, q0, q1, k0, k1 in rows:
                q0, q1 = max(q0, q_from), min(q1, q_to)
                offset = np.arange(k0, k1)[None, :] - np.arange(q0, q1)[:, None]
                want[q0 - q_from : q1 - q_from, k0 - k_from : k1 - k_from] |= (offset >= tiles.mask.low[row]) & (
                    offset <= tiles.mask.high[row]
                )
            if found.k_len[i] != k_to - k_from or found.q_len[i] - found.unseen[i] != q_to - q_from:
                continue  # in several places; its rows are counted below
            got = np.broadcast_to(dense(found.windows[tile], *want.shape), want.shape)
            assert (got == want).all()
            assert want.any(axis=1).all()
            checked += 1
    if strategy in ("none", "allgather", "ulysses"):
        assert checked > 0
    if strategy in ("allgather", "ulysses") and mask == "causal_sliding_window":
        assert (found.one_window | found.one_call)[schedule.tile[schedule.tile > 0]].all()
