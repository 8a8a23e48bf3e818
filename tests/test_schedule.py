"""The columnar schedule as people and ranks see it."""

from dataclasses import fields

import numpy as np
import pytest
from cases import ALL_PASSES, ALL_STRATEGIES, cluster, workload

from cpsim.errors import InfeasibleError
from cpsim.masks.tiles import make_tiles
from cpsim.schedule.builder import Builder
from cpsim.schedule.schedule import COLLECTIVE_KINDS, STREAMS, Kind, Schedule
from cpsim.strategies import plan, sharding


def schedules(num_ranks=4):
    for name, knobs in ALL_STRATEGIES:
        for pass_ in ALL_PASSES:
            try:
                yield plan(name, workload("causal", "one", "mha"), cluster(num_ranks), pass_, knobs)
            except InfeasibleError:
                continue


def builder(num_ranks):
    sets = sharding.contiguous(8, 1)
    return Builder(num_ranks, sets, make_tiles(workload("full", (8,)).slices(), sets, [0], [0]))


def test_programs_of_all_ranks_are_all_ops_in_order():
    for schedule in schedules():
        seen = np.zeros(len(schedule), int)
        for rank in range(schedule.num_ranks):
            program = schedule.project(rank)
            indices = [op.index for op in program]
            assert indices == sorted(indices)
            assert all(rank in [r for r, _ in op.lanes] for op in program)
            seen[indices] += 1
        assert np.array_equal(seen, np.diff(schedule.lane_start))


def test_programs_keep_only_dependencies_that_their_rank_sees():
    for schedule in schedules():
        kept = 0
        for rank in range(schedule.num_ranks):
            program = schedule.project(rank)
            known = {op.index for op in program}
            for op in program:
                assert set(op.deps) == set(schedule.op(op.index).deps) & known
                kept += len(op.deps)
        assert kept >= len(schedule.dep)


def test_text_has_one_line_per_buffer_and_op():
    for schedule in schedules():
        lines = list(schedule.lines())
        assert len(lines) == len(schedule.buffer_nbytes) + len(schedule)
        assert lines[0].startswith("buffer #0 ")
        assert all(line == str(schedule.op(i)) for i, line in enumerate(lines[-len(schedule) :]))


def test_text_says_everything_about_an_op():
    text = list(plan("zigzag_ring", workload("causal", "one"), cluster(2), "fwd", {}).lines())
    assert text[0] == "buffer #0 q on rank 0: 1536 B"
    transfer = next(line for line in text if "transfer 0" in line)
    expected = "0 transfer 0 0.send,1.recv 768 B reads #2=kv[0:12+36:48]h0:2 writes #9=kv[0:12+36:48]h0:2"
    assert " ".join(transfer.split()) == expected
    late = next(line for line in text if "attention 1" in line)
    assert "0.compute  after 1,0  area 288 heads 8:2" in late


def test_columns_cannot_be_changed():
    schedule = next(schedules())
    columns = [getattr(schedule, column.name) for column in fields(Schedule)]
    assert all(not c.flags.writeable for c in columns if isinstance(c, np.ndarray))


def test_builder_emits_steps_for_all_ranks_at_once():
    b = builder(3)
    ranks = np.arange(3)
    first = b.add(Kind.COPY, (ranks, "compute"), nbytes=[10, 20, 30])
    moved = b.add(
        Kind.TRANSFER,
        (ranks, "send"),
        ((ranks + 1) % 3, "recv"),
        nbytes=7,
        deps=[first, np.where(ranks == 1, -1, first[(ranks + 1) % 3])],
    )
    together = b.add(Kind.ALL_GATHER, (ranks[None, :], "comm"), nbytes=30, deps=[moved[None, :]])
    schedule = b.build()
    assert first.tolist() == [0, 1, 2]
    assert [op.lanes for op in map(schedule.op, moved.tolist())] == [
        ((r, "send"), ((r + 1) % 3, "recv")) for r in range(3)
    ]
    assert [schedule.op(int(i)).deps for i in moved] == [(0, 1), (1,), (2, 0)]
    assert schedule.op(int(together[0])).deps == (3, 4, 5)
    assert schedule.ranks_of(int(together[0])) == [0, 1, 2]
    assert schedule.nbytes.tolist() == [10, 20, 30, 7, 7, 7, 30]


def test_builder_adds_nothing_for_nobody():
    b = builder(2)
    assert len(b.add(Kind.COPY, (np.zeros(0, int), "compute"))) == 0
    assert len(b.build()) == 0


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_collectives_send_what_ring_algorithms_send(kind):
    b = builder(4)
    b.add(kind, (np.arange(4)[None, :], "comm"), nbytes=400)
    expected = 600 if kind == Kind.ALL_REDUCE else 300
    assert b.build().bytes_sent().tolist() == [expected] * 4


def test_only_the_source_of_a_transfer_sends():
    b = builder(3)
    b.add(Kind.TRANSFER, (np.array([2]), "send"), (np.array([0]), "recv"), nbytes=9)
    assert b.build().bytes_sent().tolist() == [0, 0, 9]


def test_memory_is_the_sum_of_buffers():
    b = builder(2)
    b.buffers("one", [5, 6])
    b.buffers("two", 7, [1])
    assert b.build().memory().tolist() == [5, 13]


def test_streams_are_distinct():
    assert len(set(STREAMS)) == len(STREAMS)
