"""Both engines on generated schedules and on every strategy, and what must hold for any engine."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsim.case.cluster import load_cluster
from cpsim.case.workload import Workload
from cpsim.errors import ScheduleError
from cpsim.masks.names import MASK_NAMES
from cpsim.masks.slices import RangeSets, slices_of
from cpsim.masks.tiles import ListedTiles
from cpsim.schedule.builder import Builder
from cpsim.schedule.schedule import STREAMS, Kind, Schedule
from cpsim.schedule.work import Work, free_work, waits
from cpsim.sim.fast import simulate
from cpsim.sim.heap import pop, set_key
from cpsim.sim.reference import share_fairly, simulate_reference
from cpsim.strategies import STRATEGIES, plan

NO_TILES = ListedTiles(
    np.zeros(2, np.int64), np.zeros((0, 5), np.int32), np.zeros(0, np.int64), np.zeros(1, np.int64), slices_of([])
)
NO_SETS = RangeSets(np.zeros(1, np.int64), np.zeros((0, 2), np.int64))
TIMES = st.sampled_from([0.0, 1e-6, 1e-5, 3e-5, 1e-4, 0.1, 1 / 3])


def schedule_of(num_ranks: int, lanes: list[list[tuple[int, int]]], deps: list[list[int]]) -> Schedule:
    """A schedule of bare ops on the given (rank, stream index) lanes."""
    builder = Builder(num_ranks, NO_SETS, NO_TILES)
    for places, before in zip(lanes, deps, strict=True):
        two_ranks = len(places) == 2 and places[0][0] != places[1][0]
        builder.add(
            Kind.TRANSFER if two_ranks else Kind.BARRIER,
            *((np.array([rank]), STREAMS[stream]) for rank, stream in places),
            deps=[np.array([d]) for d in before],
        )
    return builder.build()


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    num_ranks = draw(st.integers(1, 4))
    num_ops = draw(st.integers(1, 24))
    place = st.tuples(st.integers(0, num_ranks - 1), st.integers(0, 2))
    lanes = [draw(st.lists(place, min_size=1, max_size=4, unique_by=lambda p: p[0])) for _ in range(num_ops)]
    deps = [draw(st.lists(st.integers(0, i - 1), max_size=3)) if i else [] for i in range(num_ops)]
    return schedule_of(num_ranks, lanes, deps)


@st.composite
def free_cases(draw: st.DrawFn) -> tuple[Schedule, Work]:
    schedule = draw(schedules())
    times = st.lists(TIMES, min_size=len(schedule), max_size=len(schedule))
    work = free_work(np.array(draw(times)), np.array(draw(times)))
    early = draw(st.lists(st.booleans(), min_size=len(schedule), max_size=len(schedule)))
    return schedule, dataclasses.replace(work, eager=np.array(early) & (schedule.kind == Kind.TRANSFER))


@st.composite
def shared_cases(draw: st.DrawFn) -> tuple[Schedule, Work]:
    schedule, work = draw(free_cases())
    num_links = draw(st.integers(1, 4))
    rates = st.sampled_from([1e9, 1e10, 3e6])
    flows = [
        draw(st.dictionaries(st.integers(0, num_links - 1), st.sampled_from([1e3, 5e5, 1e6]), max_size=3))
        for _ in range(len(schedule))
    ]
    classes = draw(st.lists(st.integers(0, 2), min_size=len(schedule), max_size=len(schedule)))
    factors = draw(st.lists(st.sampled_from([1.0, 1.1, 2.0]), min_size=9, max_size=9))
    return schedule, dataclasses.replace(
        work,
        flow_start=np.concatenate(([0], np.cumsum([len(f) for f in flows]))).astype(np.int32),
        flow_link=np.array([link for f in flows for link in f], np.int32),
        flow_bytes=np.array([nbytes for f in flows for nbytes in f.values()], np.float64),
        link_bytes_per_s=np.array(draw(st.lists(rates, min_size=num_links, max_size=num_links))),
        pressure=np.array(classes, np.int8),
        slowdown=np.array(factors).reshape(3, 3),
    )


@given(free_cases())
@settings(max_examples=60, deadline=None)
def test_fast_engine_equals_the_reference_bit_for_bit_at_constant_rates(case):
    fast, reference = simulate(*case), simulate_reference(*case)
    assert np.array_equal(fast.start_s, reference.start_s)
    assert np.array_equal(fast.end_s, reference.end_s)


@given(shared_cases())
@settings(max_examples=60, deadline=None)
def test_fast_engine_equals_the_reference_where_links_are_shared(case):
    fast, reference = simulate(*case), simulate_reference(*case)
    np.testing.assert_allclose(fast.start_s, reference.start_s, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(fast.end_s, reference.end_s, rtol=1e-9, atol=1e-15)


@given(shared_cases())
@settings(max_examples=40, deadline=None)
def test_event_engine_without_sharing_equals_max_plus(case):
    schedule, work = case
    free = dataclasses.replace(free_work(work.duration_s, work.release_s), eager=work.eager)
    unshared = dataclasses.replace(free, slowdown=np.array([[1.0, 1.0], [2.0, 1.0]]))
    np.testing.assert_allclose(simulate(schedule, unshared).end_s, simulate(schedule, free).end_s, rtol=1e-12)


@given(shared_cases())
@settings(max_examples=40, deadline=None)
def test_every_op_waits_for_its_predecessors_and_its_host(case):
    schedule, work = case
    line = simulate(schedule, work)
    first, before = waits(schedule, work.eager)
    for op in range(len(schedule)):
        ends = line.end_s[before[first[op] : first[op + 1]]]
        assert line.start_s[op] == max(work.release_s[op], ends.max(initial=0.0))
        assert line.end_s[op] >= line.start_s[op] + work.duration_s[op] * (1 - 1e-12)


@given(free_cases())
@settings(max_examples=40, deadline=None)
def test_every_op_waits_for_its_dependencies_and_for_its_lanes(case):
    schedule, work = case
    line, last = simulate(schedule, dataclasses.replace(work, eager=np.zeros(len(schedule), np.bool_))), {}
    for op in range(len(schedule)):
        lanes = schedule.op(op).lanes
        for earlier in {*schedule.op(op).deps, *(last[lane] for lane in lanes if lane in last)}:
            assert line.start_s[op] >= line.end_s[earlier]
        last |= dict.fromkeys(lanes, op)


@given(shared_cases())
@settings(max_examples=40, deadline=None)
def test_what_an_op_waits_for_is_named_once(case):
    schedule, work = case
    first, before = waits(schedule, work.eager)
    for op in range(len(schedule)):
        mine = before[first[op] : first[op + 1]].tolist()
        assert len(set(mine)) == len(mine)
        of_them = {one for other in mine for one in before[first[other] : first[other + 1]].tolist()}
        assert not of_them & set(mine)


@given(free_cases())
@settings(max_examples=40, deadline=None)
def test_makespan_lies_between_the_busiest_lane_and_the_sum_of_all(case):
    schedule, work = case
    line = simulate(schedule, work)
    lane = schedule.lane_rank.astype(np.int64) * 128 + schedule.lane_stream
    busy = np.bincount(lane, weights=np.repeat(work.duration_s, np.diff(schedule.lane_start)))
    assert busy.max() <= line.makespan_s * (1 + 1e-12)
    assert line.makespan_s <= (work.release_s.max() + work.duration_s.sum()) * (1 + 1e-12)


@given(free_cases(), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_lengthening_an_op_never_shortens_the_makespan(case, which):
    schedule, work = case
    longer = work.duration_s.copy()
    longer[which % len(longer)] += 1e-5
    slower = dataclasses.replace(work, duration_s=longer)
    assert simulate(schedule, slower).makespan_s >= simulate(schedule, work).makespan_s


@given(shared_cases())
@settings(max_examples=40, deadline=None)
def test_critical_path_is_a_chain_that_ends_with_the_last_op(case):
    line = simulate(*case)
    path = line.critical_path()
    assert line.end_s[path[-1]] == line.makespan_s
    np.testing.assert_array_equal(line.start_s[path[1:]], line.end_s[path[:-1]])


@given(shared_cases())
@settings(max_examples=40, deadline=None)
def test_shares_are_max_min_fair(case):
    """The certificate: links hold, and what is below its own limit is on a full link where nobody gets more."""
    _, work = case
    running = [op for op in range(len(work.duration_s)) if work.duration_s[op] > 0]
    speed = share_fairly(running, dict.fromkeys(running, 1.0), work)
    flows = {
        op: [(int(work.flow_link[a]), work.flow_bytes[a]) for a in range(work.flow_start[op], work.flow_start[op + 1])]
        for op in running
    }
    rate = {op: speed[op] / work.duration_s[op] * max((b for _, b in f), default=0.0) for op, f in flows.items()}
    load = np.zeros(len(work.link_bytes_per_s))
    for op, f in flows.items():
        for link, nbytes in f:
            load[link] += speed[op] * nbytes / work.duration_s[op]
    assert (load <= work.link_bytes_per_s * (1 + 1e-9)).all()
    for op, f in flows.items():
        if speed[op] >= 1 - 1e-9:
            continue
        full = [link for link, _ in f if load[link] >= work.link_bytes_per_s[link] * (1 - 1e-9)]
        assert any(
            all(rate[other] <= rate[op] * (1 + 1e-9) for other, g in flows.items() if link in dict(g)) for link in full
        )


def test_two_flows_share_a_link_equally_and_the_rest_is_free_again():
    schedule = schedule_of(2, [[(0, 0)], [(1, 0)]], [[], []])
    work = dataclasses.replace(
        free_work(np.array([1.0, 2.0]), np.zeros(2)),
        flow_start=np.array([0, 1, 2], np.int32),
        flow_link=np.zeros(2, np.int32),
        flow_bytes=np.array([10.0, 20.0]),
        link_bytes_per_s=np.array([10.0]),
    )
    for engine in (simulate, simulate_reference):
        np.testing.assert_allclose(engine(schedule, work).end_s, [2.0, 3.0])


def test_interference_slows_both_sides_only_while_both_run():
    schedule = schedule_of(1, [[(0, 0)], [(0, 1)]], [[], []])
    work = dataclasses.replace(
        free_work(np.array([1.0, 3.0]), np.zeros(2)),
        pressure=np.array([0, 1], np.int8),
        slowdown=np.array([[1.0, 1.25], [2.0, 1.0]]),
    )
    for engine in (simulate, simulate_reference):
        np.testing.assert_allclose(engine(schedule, work).end_s, [1.25, 1.25 + 3.0 - 1.25 / 2])


def _relay(eager: bool) -> tuple[Schedule, Work]:
    """Two exchanges of rank 0 with ranks 1 and 2, in each of which it sends and receives; rank 1 is busy until 9."""
    ring = [[(0, 1), (1, 2)], [(2, 1), (0, 2)]]
    lanes = [[(1, 0)], *ring, [(0, 0)]]
    schedule = schedule_of(3, lanes, [[], [0], [], [1]])  # at last rank 0 overwrites what it sent
    work = free_work(np.array([9.0, 1.0, 2.0, 4.0]), np.zeros(4))
    return schedule, dataclasses.replace(work, eager=np.array([False, eager, eager, False]))


@pytest.mark.parametrize("engine", [simulate, simulate_reference])
@pytest.mark.parametrize(("eager", "overwritten"), [(False, 10.0), (True, 2.0)])
def test_a_message_that_fits_the_buffers_leaves_its_sender_before_the_receiver_is_there(engine, eager, overwritten):
    line = engine(*_relay(eager))
    assert line.start_s.tolist() == [0.0, 9.0, 0.0, overwritten]  # the sender's launch ends with what it receives


@pytest.mark.parametrize("engine", [simulate, simulate_reference])
def test_what_a_rank_sends_starts_when_it_is_ready_for_what_it_receives_in_the_same_step(engine):
    lanes = [[(0, 0)], [(0, 1), (1, 2)], [(2, 1), (0, 2)]]
    schedule = schedule_of(3, lanes, [[], [], [0]])  # rank 0 receives into what it computes with until 5
    line = engine(schedule, free_work(np.array([5.0, 1.0, 1.0]), np.zeros(3)))
    assert line.start_s.tolist() == [0.0, 5.0, 5.0]


def test_deadlock_names_rank_stream_and_op():
    schedule = schedule_of(1, [[(0, 0)], [(0, 1)]], [[], [0]])
    broken = dataclasses.replace(schedule, dep_start=np.array([0, 1, 2]), dep=np.array([1, 0], np.int32))
    for engine in (simulate, simulate_reference):
        with pytest.raises(ScheduleError, match=r"never starts: +0 barrier 0 +0\.compute"):
            engine(broken, free_work(np.ones(2), np.zeros(2)))


def test_an_empty_schedule_takes_no_time():
    schedule = schedule_of(1, [], [])
    nothing = free_work(np.zeros(0), np.zeros(0))
    assert simulate(schedule, nothing).makespan_s == simulate_reference(schedule, nothing).makespan_s == 0.0


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize("mask", MASK_NAMES)
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "none"])
def test_engines_agree_on_every_strategy_and_mask(name, mask, pass_):
    workload = Workload(
        documents=(700, 3, 897),
        mask=mask,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        dtype="bf16",
    )
    schedule = plan(name, workload, load_cluster("dgx-h200").with_gpus(4), pass_, {})
    rng = np.random.default_rng(1)
    work = free_work(rng.uniform(1e-5, 1e-3, len(schedule)), rng.uniform(0, 1e-4, len(schedule)))
    assert np.array_equal(simulate(schedule, work).end_s, simulate_reference(schedule, work).end_s)


@settings(deadline=None)  # the first example compiles
@given(st.lists(st.tuples(st.integers(0, 19), TIMES), min_size=1, max_size=60))
def test_ops_leave_the_heap_in_the_order_of_their_latest_keys(keys):
    heap, place, key = np.zeros(21, np.uint32), np.zeros(20, np.int32), np.zeros(21)
    latest = {}
    for op, value in keys:
        set_key(heap, place, key, np.uint32(op), value)
        latest[op] = value
    left = [int(pop(heap, place, key)) for _ in latest]
    assert sorted(left) == sorted(latest)
    assert [latest[op] for op in left] == sorted(latest.values())
    assert heap[0] == 0
    assert not place.any()
