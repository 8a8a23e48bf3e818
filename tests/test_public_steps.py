"""Published training steps: what scenarios say of them, and how well they are predicted."""

from statistics import mean

import pytest
from targets import check

from studies import published_lines
from studies.public_steps.allocator import GROW, Allocator, last_reads, reserved_bytes
from studies.public_steps.compare import committed, compared, left_out
from studies.public_steps.own import steps
from studies.public_steps.rows import FOLDER, rows

NAMES = {
    ("torchtitan", "time"): "torchtitan's steps, time, mean",
    ("torchtitan", "memory"): "torchtitan's steps, memory, mean",
    ("automodel", "time"): "Automodel's steps, time, mean",
    ("megatron-bridge", "time"): "Megatron-Bridge's steps, time, mean",
    ("megatron-bridge, experts", "time"): "Megatron-Bridge's experts, time, mean",
    ("megatron-golden", "memory"): "Megatron's golden peaks, mean",
    ("megatron-golden, experts", "memory"): "Megatron's golden peaks of experts, mean",
}
MIB = 2**20


@pytest.fixture(scope="module")
def found():
    return list(compared())


def test_every_line_is_a_scenario_or_says_why_not():
    lines = list(rows())
    assert len(lines) == 23 + 15 + 173 + 155
    assert all(bool(row.left_out) != (row.scenario is not None) for row in lines)
    assert {row.key for row in lines if row.scenario is not None} <= committed().keys()
    assert sum(left_out().values()) + sum(row.scenario is not None for row in lines) == len(lines)


def test_tokens_of_a_step_are_those_of_its_published_throughput():
    """Tokens of the scenario over published seconds are the published tokens per second of a GPU."""
    lines = published_lines(FOLDER / "torchtitan.csv")
    for row in rows():
        if row.source == "torchtitan" and row.scenario is not None:
            assert row.time_s is not None
            rate = float(lines[row.number - 1]["tokens_per_s_per_gpu"])
            assert row.scenario.num_tokens / row.scenario.gpus / row.time_s == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize(("source", "quantity"), NAMES)
def test_published_steps(found, source, quantity):
    errors = [abs(one.error) for one in found if (one.row.group, one.quantity) == (source, quantity)]
    assert len(errors) >= 2
    check(NAMES[source, quantity], mean(errors))


def test_reserved_memory_of_our_own_steps():
    errors = [predicted / reserved - 1 for _, _, reserved, predicted in steps()]
    assert len(errors) == 39
    check("our FSDP2 steps, reserved memory, mean", mean(map(abs, errors)))


def test_ranges_grow_only_where_no_free_part_is_large_enough():
    memory = Allocator()
    for name, size in (("a", 40), ("b", 40), ("c", 40)):
        memory.take(name, size * MIB)
    assert memory.reserved == 120 * MIB
    memory.give("a")
    memory.take("d", 30 * MIB)  # fits where a was, and leaves 10
    memory.take("e", 10 * MIB)
    assert memory.reserved == 120 * MIB
    memory.give("b")
    memory.give("e")  # 10 and 40 are neighbours
    memory.take("f", 50 * MIB)
    assert memory.reserved == 120 * MIB
    memory.take("g", MIB + 1)
    assert memory.reserved == 120 * MIB + GROW
    memory.take("h", 40 * MIB, "gather")  # another stream
    assert memory.reserved == 160 * MIB + GROW


def test_segments_that_do_not_grow_leave_what_is_too_small_unused():
    memory = Allocator(expandable=False)
    memory.take("a", 40 * MIB)
    memory.give("a")
    memory.take("b", 60 * MIB)  # no neighbour of the free 40
    memory.take("c", 3 * MIB)
    assert memory.reserved == 100 * MIB
    memory.take("d", 38 * MIB)
    assert memory.reserved == 138 * MIB
    memory.take("e", 36 * MIB)  # beside c
    assert memory.reserved == 138 * MIB
    memory.take("f", 2 * MIB)
    assert memory.reserved == 138 * MIB + GROW


def test_a_hole_too_small_for_the_next_tensor_is_reserved_beside_it():
    """bf16 and fp32 logits leave a hole in which one gradient fits, but not two."""
    from cpsim.prediction.step.program import Node

    nodes = (
        Node(None, (), {"half": 200 * MIB}),
        Node(None, ("half",), {"full": 400 * MIB}),
        Node(None, ("full",), {"kept": 400 * MIB}),
        Node(None, (), {"first": 400 * MIB}),
        Node(None, ("first", "kept"), {"second": 400 * MIB}),
    )
    assert [sorted(names) for names in last_reads(nodes)] == [[], ["half"], ["full"], [], ["first", "kept", "second"]]
    assert reserved_bytes(nodes, [], 0) == 1400 * MIB
