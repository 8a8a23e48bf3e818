"""Every unmasked (query, key) pair is computed exactly once per query head."""

from __future__ import annotations

import numpy as np

from cpsim.case.workload import Workload
from cpsim.errors import ScheduleError
from cpsim.masks.slices import Slices, slice_area
from cpsim.runtime.compiled import compiled
from cpsim.schedule.check.fault import fail
from cpsim.schedule.schedule import ATTENTION_KINDS, Kind, Pass, Schedule, is_one_of


def check_tiles(s: Schedule, mask: Slices) -> None:
    """Slices of tiles lie in their mask rows and have the areas that they state."""
    t, rows = s.tiles, s.tiles.rows.astype(np.int64)
    row, q0, q1, k0, k1 = rows.T
    inside = (row >= 0) & (row < len(mask))
    row = np.where(inside, row, 0)
    inside &= (q0 >= mask.q_start[row]) & (q1 <= mask.q_end[row]) & (k0 >= mask.k_start[row]) & (k1 <= mask.k_end[row])
    if not inside.all():
        raise ScheduleError(f"tiles: slice {int(np.flatnonzero(~inside)[0])} lies outside its mask row")
    areas = Slices(q0, q1, k0, k1, mask.low[row], mask.high[row]).areas()
    total = np.concatenate(([0], np.cumsum(areas)))
    if (areas != t.row_area).any() or (total[t.start[1:]] - total[t.start[:-1]] != t.area).any():
        raise ScheduleError("tiles: areas differ from those of their slices")


def check_heads(s: Schedule, workload: Workload, pass_: Pass) -> None:
    """Attention is of this pass; its heads exist, and its key-value heads are those of its query heads."""
    wanted = ATTENTION_KINDS[pass_ == "bwd"]
    attends = is_one_of(s.kind, ATTENTION_KINDS)
    first, count, kv_first, kv_count = s.heads.T
    per_kv = workload.num_heads // workload.num_kv_heads
    last = (first + count - 1) // per_kv
    bad = attends & (s.kind != wanted)
    if bad.any():
        fail(s, int(np.flatnonzero(bad)[0]), f"does not belong to pass {pass_}")
    bad = attends & ((count < 1) | (first + count > workload.num_heads))
    bad |= attends & ((kv_first != first // per_kv) | (kv_first + kv_count - 1 != last))
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        fail(s, i, f"heads {s.heads[i].tolist()} do not match: {per_kv} query heads share a key-value head")
    bad = ~attends & (s.tile != 0) & (s.kind != Kind.SELECT)
    if bad.any():
        fail(s, int(np.flatnonzero(bad)[0]), "has a tile but is not attention")


def check_coverage(s: Schedule, mask: Slices, num_heads: int, kinds: tuple[Kind, ...] = ATTENTION_KINDS) -> None:
    """Every unmasked pair is in exactly one tile of every query head, of ops of these kinds."""
    ops = np.flatnonzero(is_one_of(s.kind, kinds))
    first, count = s.heads_of(ops)[:, :2].T
    end = first + count
    bounds = np.unique(np.concatenate(([0, num_heads], first, end)))
    table = mask.table()
    known: set[bytes] = set()
    for head in bounds[:-1].tolist():
        here = ops[(first <= head) & (head < end)]
        tiles = np.sort(s.tile[here])
        if tiles.tobytes() in known:
            continue
        known.add(tiles.tobytes())
        rows = np.concatenate([np.arange(s.tiles.start[t], s.tiles.start[t + 1]) for t in tiles] or [bounds[:0]])
        ordered = s.tiles.rows[rows][np.argsort(s.tiles.rows[rows, 0], kind="stable")].astype(np.int64)
        q0, q1, k0, k1, times = _first_uneven(table, ordered)
        if times == 1:
            continue
        queries, keys = s.range_text(q0, q1), s.range_text(k0, k1)
        where = f"head {head}: queries {queries} x keys {keys} are computed {times} times, expected once"
        guilty = [i for i in here.tolist() if _touches(s, i, q0, k0)]
        if guilty:
            fail(s, guilty[-1], f"{where}, by ops {guilty[:8]}")
        raise ScheduleError(f"coverage: {where}")


def _touches(s: Schedule, index: int, query: int, key: int) -> bool:
    rows = s.tiles.rows[s.tiles.start[s.tile[index]] : s.tiles.start[s.tile[index] + 1]]
    hit = (rows[:, 1] <= query) & (query < rows[:, 2]) & (rows[:, 3] <= key) & (key < rows[:, 4])
    return bool(hit.any())


@compiled()
def _first_uneven(table, rows):  # type: ignore[no-untyped-def]
    """First cell with unmasked pairs that the rectangles do not cover once: (q0, q1, k0, k1, times).

    ``rows`` are ordered by mask row. Each mask row is counted on its own compressed grid by a 2-D difference
    array.
    """
    at = 0
    for m in range(len(table)):
        last = at
        while last < len(rows) and rows[last, 0] == m:
            last += 1
        low, high = table[m, 4], table[m, 5]
        qs = np.unique(np.concatenate((rows[at:last, 1], rows[at:last, 2], table[m, :2])))
        ks = np.unique(np.concatenate((rows[at:last, 3], rows[at:last, 4], table[m, 2:4])))
        count = np.zeros((len(qs), len(ks)), np.int32)
        for r in range(at, last):
            i0, i1 = np.searchsorted(qs, rows[r, 1]), np.searchsorted(qs, rows[r, 2])
            j0, j1 = np.searchsorted(ks, rows[r, 3]), np.searchsorted(ks, rows[r, 4])
            count[i0, j0] += 1
            count[i1, j0] -= 1
            count[i0, j1] -= 1
            count[i1, j1] += 1
        for i in range(len(qs) - 1):
            running = 0
            for j in range(len(ks) - 1):
                running += count[i, j]
                count[i, j] = running + (count[i - 1, j] if i > 0 else 0)
                if count[i, j] != 1 and slice_area(qs[i], qs[i + 1], ks[j], ks[j + 1], low, high) > 0:
                    return qs[i], qs[i + 1], ks[j], ks[j + 1], count[i, j]
        at = last
    return 0, 0, 0, 0, 1
