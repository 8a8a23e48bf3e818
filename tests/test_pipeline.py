"""Pipelines: closed forms where all passes take alike, and SimPy where they do not."""

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsim.prediction.step.pipeline import (
    most_in_flight,
    one_f_one_b,
    one_f_one_b_order,
    same_phase,
    same_phase_order,
)

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 5))
CHUNKED = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(2, 4), st.integers(2, 3))
"""Replicas, groups of microbatches, stages, chunks of each."""


def even(replicas, microbatches, stages, forward=1.0, backward=2.0):
    shape = replicas, microbatches, stages
    return np.stack([np.full(shape, forward), np.full(shape, backward)])


def random(shape, seed):
    return np.random.default_rng(seed).uniform(0.1, 2.0, (2, *shape))


@pytest.mark.parametrize("run", [one_f_one_b, same_phase])
@pytest.mark.parametrize(("microbatches", "stages"), [(1, 1), (4, 1), (1, 4), (8, 4), (3, 5)])
def test_even_pipelines_take_m_plus_p_minus_1_passes_each_way(run, microbatches, stages):
    found = run(even(2, microbatches, stages), 0.0)
    assert found.makespan_s == pytest.approx((microbatches + stages - 1) * 3.0)


def test_a_stage_holds_at_most_as_many_microbatches_as_stages_follow():
    stages, microbatches = 4, 8
    for stage in range(stages):
        held = np.cumsum([1 if which == 0 else -1 for which, _, _ in one_f_one_b_order(stage, stages, microbatches)])
        assert held.max() == stages - stage
        assert held[-1] == 0


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 4), (4, 8), (4, 2)])
def test_stages_of_one_phase_hold_what_their_passes_in_time_say(stages, microbatches):
    """Microbatches whose forward pass has ended and whose backward one has not, and one on its way."""
    done = same_phase(even(1, microbatches, stages), 0.0).done_s[:, 0]
    for stage in range(stages):
        order = same_phase_order(stage, stages, microbatches)
        assert sorted(order) == [(which, m, stage) for which in (0, 1) for m in range(microbatches)]
        assert order == sorted(order, key=lambda one: done[one])
        held = most_in_flight(order, {stage: 1})[stage] + 1
        assert held == min(microbatches, 2 * (stages - 1 - stage) + 1)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_bubbles_of_interleaved_stages_are_those_of_the_paper(stages, chunks, groups):
    """Narayanan et al. 2021, section 2.2.2: (p - 1) / (v m) of the ideal time."""
    microbatches = groups * stages
    seconds = even(1, microbatches, stages * chunks, 1 / chunks, 2 / chunks)
    ideal = microbatches * 3.0
    found = one_f_one_b(seconds, 0.0, chunks)
    assert found.makespan_s / ideal - 1 == pytest.approx((stages - 1) / (chunks * microbatches))


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaved_stages_hold_as_much_as_the_paper_says(stages, chunks):
    """Korthikanti et al. 2022, section 4.2.3: 1 + (p - 1) / (p v) times the activations of all layers of a stage, of
    as many microbatches as stages."""
    order = one_f_one_b_order(0, stages, 4 * stages, chunks)
    beside = most_in_flight(order, dict.fromkeys(range(stages * chunks), 1))
    assert (max(beside.values()) + 1) / chunks == pytest.approx(stages * (1 + (stages - 1) / (stages * chunks)))


def test_the_interleaved_order_is_that_of_megatron_core():
    """Two stages with two chunks each and four microbatches, written out by hand; virtual stages 0 and 2 are chunks of
    the first stage."""
    first = [(0, 0, 0), (0, 1, 0), (0, 0, 2), (0, 1, 2), (0, 2, 0), (1, 0, 2), (0, 3, 0), (1, 1, 2)]
    first += [(0, 2, 2), (1, 0, 0), (0, 3, 2), (1, 1, 0), (1, 2, 2), (1, 3, 2), (1, 2, 0), (1, 3, 0)]
    assert one_f_one_b_order(0, 2, 4, 2) == first
    assert one_f_one_b_order(1, 2, 4, 2)[:4] == [(0, 0, 1), (0, 1, 1), (0, 0, 3), (1, 0, 3)]


def simulated(seconds, hop_s, chunks):
    """Ends of all stages of all replicas, by SimPy."""
    _, replicas, microbatches, virtual = seconds.shape
    ends, stages = [], virtual // chunks
    for replica in range(replicas):
        env = simpy.Environment()
        done = {(w, m, s): env.event() for w in (0, 1) for m in range(microbatches) for s in range(virtual)}

        def stage(env, done, replica, s):
            for which, m, v in one_f_one_b_order(s, stages, microbatches, chunks):
                source = v - 1 if which == 0 else v + 1
                if 0 <= source < virtual:
                    sent = yield done[which, m, source]
                    yield env.timeout(max(0.0, sent + hop_s - env.now))
                yield env.timeout(seconds[which, replica, m, v])
                done[which, m, v].succeed(env.now)
            return env.now

        processes = [env.process(stage(env, done, replica, s)) for s in range(stages)]
        env.run(until=env.all_of(processes))
        ends.append([one.value for one in processes])
    return ends


@settings(deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**16), hop_s=st.sampled_from([0.0, 0.3]))
def test_1f1b_equals_simpy(shape, seed, hop_s):
    seconds = random(shape, seed)
    np.testing.assert_allclose(one_f_one_b(seconds, hop_s).end_s, simulated(seconds, hop_s, 1), rtol=1e-12)


@settings(deadline=None)
@given(shape=CHUNKED, seed=st.integers(0, 2**16), hop_s=st.sampled_from([0.0, 0.3]))
def test_interleaved_1f1b_equals_simpy_and_its_path_is_the_makespan(shape, seed, hop_s):
    replicas, groups, stages, chunks = shape
    seconds = random((replicas, groups * stages, stages * chunks), seed)
    found = one_f_one_b(seconds, hop_s, chunks)
    np.testing.assert_allclose(found.end_s, simulated(seconds, hop_s, chunks), rtol=1e-12)
    passes = sum(seconds[which, replica, m, stage] for replica, (which, m, stage) in found.path)
    assert passes + found.hops * hop_s == pytest.approx(found.makespan_s)


@settings(deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**16), hop_s=st.sampled_from([0.0, 0.3]))
def test_the_path_consists_of_the_makespan(shape, seed, hop_s):
    seconds = random(shape, seed)
    for run in (one_f_one_b, same_phase):
        found = run(seconds, hop_s)
        passes = sum(seconds[which, replica, m, stage] for replica, (which, m, stage) in found.path)
        assert passes + found.hops * hop_s == pytest.approx(found.makespan_s)


@settings(deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**16))
def test_waiting_for_all_in_every_tick_is_never_faster(shape, seed):
    seconds = random(shape, seed)
    assert same_phase(seconds, 0.0).makespan_s >= one_f_one_b(seconds, 0.0).makespan_s * (1 - 1e-12)


@settings(deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**16))
def test_a_longer_pass_never_shortens_the_step(shape, seed):
    seconds = random(shape, seed)
    longer = seconds.copy()
    longer[tuple(np.random.default_rng(seed).integers(seconds.shape))] += 1.0
    for run in (one_f_one_b, same_phase):
        assert run(longer, 0.0).makespan_s >= run(seconds, 0.0).makespan_s


def test_one_heavy_microbatch_delays_all_stages_of_its_replica_only():
    seconds = even(2, 4, 3)
    seconds[:, 1, 2] *= 5
    found = one_f_one_b(seconds, 0.0)
    assert found.end_s[0].max() == pytest.approx(18.0)
    assert found.end_s[1].min() > 18.0
    assert same_phase(seconds, 0.0).makespan_s > found.makespan_s


@given(SHAPES, st.integers(0, 1000), st.floats(0, 0.5))
@settings(max_examples=60, deadline=None)
def test_ends_of_passes_are_those_of_a_schedule(shape, seed, hop_s):
    """Stages run one pass after another, none begins before what it needs is there, and the last one ends the step."""
    seconds = random(shape, seed)
    for run in (one_f_one_b, same_phase):
        found = run(seconds, hop_s)
        end, start = found.done_s, found.done_s - seconds
        assert end.max() == pytest.approx(found.makespan_s)
        assert (start > -1e-9).all()
        for r in range(shape[0]):
            for stage in range(shape[2]):
                order = np.argsort(start[:, r, :, stage].ravel())
                assert (start[:, r, :, stage].ravel()[order][1:] > end[:, r, :, stage].ravel()[order][:-1] - 1e-9).all()
        assert (start[0, :, :, 1:] > end[0, :, :, :-1] + hop_s - 1e-9).all()
        assert (start[1, :, :, :-1] > end[1, :, :, 1:] + hop_s - 1e-9).all()
        assert (start[1] > end[0] - 1e-9).all()
