"""Pipelines: closed forms where all passes take alike, and SimPy where they do not."""

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsim.prediction.step.pipeline import one_f_one_b, one_f_one_b_order, same_phase

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 5))


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


@settings(deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**16), hop_s=st.sampled_from([0.0, 0.3]))
def test_1f1b_equals_simpy(shape, seed, hop_s):
    seconds = random(shape, seed)
    replicas, microbatches, stages = shape
    found = one_f_one_b(seconds, hop_s)
    for replica in range(replicas):
        env = simpy.Environment()
        done = {(w, m, s): env.event() for w in (0, 1) for m in range(microbatches) for s in range(stages)}

        def stage(env, done, replica, s):
            for which, m, _ in one_f_one_b_order(s, stages, microbatches):
                source = s - 1 if which == 0 else s + 1
                if 0 <= source < stages:
                    sent = yield done[which, m, source]
                    yield env.timeout(max(0.0, sent + hop_s - env.now))
                yield env.timeout(seconds[which, replica, m, s])
                done[which, m, s].succeed(env.now)
            return env.now

        ends = [env.process(stage(env, done, replica, s)) for s in range(stages)]
        env.run(until=env.all_of(ends))
        np.testing.assert_allclose(found.end_s[replica], [end.value for end in ends], rtol=1e-12)


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
