"""What memory-bound kernels find in the L2 cache: a model of its own, followed through schedules, and fitted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsim.calibrate.fit_host import fit_elementwise
from cpsim.calibrate.fit_layers import latency_and_bandwidth
from cpsim.calibrate.measurement import load
from cpsim.calibrate.recipes import points_file
from cpsim.calibrate.residuals import measured
from cpsim.case.load import scenario_from
from cpsim.case.resolve import cluster_of, workload_of
from cpsim.models.cache import share_cached, shares_cached
from cpsim.models.elementwise import ElementwiseParams, elementwise_seconds
from cpsim.models.profile import load_profile
from cpsim.schedule.schedule import Kind
from cpsim.strategies.steps.layer import plan_scenario

MB = 1e6
CASE = {
    "strategy": "zigzag_ring",
    "gpus": 8,
    "cluster": "dgx-h200",
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "mask": "causal",
    "kernel": "fa2",
    "pass": "fwd",
}


@given(st.floats(0, 1e12), st.floats(1, 1e9))
def test_the_more_is_touched_in_between_the_less_the_cache_still_holds(reused, size):
    share = share_cached(reused, size)
    assert 0 <= share <= 1
    assert share_cached(1.1 * reused, size) <= share
    assert share_cached(reused, 2 * size) >= share


def test_half_of_a_cache_is_kept_and_nothing_of_what_came_a_whole_cache_before():
    np.testing.assert_allclose(share_cached([0, 30 * MB, 45 * MB, 60 * MB], 60 * MB), [1, 1, 0.5, 0])
    assert share_cached(1.0, 0.0) == 0, "a cache that is not known saves nothing"


def shares_of_merges(tokens_per_gpu, cache_bytes=60 * MB):
    scenario = scenario_from(CASE | {"tokens_per_gpu": tokens_per_gpu})
    schedule = plan_scenario(scenario, workload_of(scenario), cluster_of(scenario), "fwd")
    return shares_cached(schedule, cache_bytes)[schedule.kind == Kind.MERGE]


def test_a_merge_finds_the_partial_result_before_it_and_of_short_sequences_the_sum_too():
    row = 32 * 128 * 2  # bytes of a partial output; the sum's are twice as wide, and count twice
    assert np.median(shares_of_merges(512)) == 1
    fits = 20 * MB // row  # of queries, partial results and sums together more than the cache
    assert np.median(shares_of_merges(int(fits) // 256 * 256)) == pytest.approx(1 / 5, abs=0.15)
    assert np.median(shares_of_merges(32768)) == 0


def test_nothing_is_held_before_it_is_touched():
    scenario = scenario_from(CASE | {"tokens_per_gpu": 512, "strategy": "ulysses"})
    schedule = plan_scenario(scenario, workload_of(scenario), cluster_of(scenario), "fwd")
    first = schedule.kind == Kind.COPY
    assert shares_cached(schedule, 60 * MB)[np.argmax(first)] == 0


def points(size, gain, rng):
    """Two kinds of kernels, as `cpsim.real.measure.cached` measures them."""
    known = ElementwiseParams(
        latency_s={"copy": 3e-6, "merge": 4e-6},
        bandwidth_bytes_per_s={"copy": 4e12, "merge": 3.8e12},
        cache_bytes=size,
        cache_gain=gain,
    )
    for kind in ("copy", "merge"):
        for nbytes in np.geomspace(2e6, 3e8, 10):
            for sets in (1, 2, 4, 8):
                cached = share_cached(sets * nbytes, size)
                seconds = elementwise_seconds(known, kind, nbytes, cached) * np.exp(0.02 * rng.standard_normal(9))
                point = {"kind": kind, "nbytes": nbytes, "samples_s": seconds.tolist()}
                yield point | {"op": "cached", "reused": sets * nbytes}
                if sets == 8:
                    yield point | {"op": "elementwise"}


def test_the_fit_finds_the_cache_that_made_noisy_points():
    found = fit_elementwise(list(points(45 * MB, 0.4, np.random.default_rng(0))), None)
    assert found.cache_bytes == pytest.approx(45 * MB, rel=0.05)
    assert found.cache_gain == pytest.approx(0.4, abs=0.03)


@pytest.mark.parametrize(("gain", "mean", "worst"), [(None, 0.035, 0.15), (0.0, 0.12, 0.45)])
def test_kernels_of_an_h200_are_told_by_what_its_cache_holds(gain, mean, worst):
    """Every kind with a latency and a bandwidth of its own; without a cache they are off three times as far."""
    h200 = load_profile("h200").elementwise
    errors = []
    for kind in ("copy", "accumulate", "merge"):
        mine = [p for p in load(points_file("h200-cached.jsonl")).of("cached") if p["kind"] == kind]
        held = share_cached([p["reused"] for p in mine], h200.cache_bytes)
        nbytes = np.array([p["nbytes"] for p in mine]) * (1 - (h200.cache_gain if gain is None else gain) * held)
        latency, bandwidth = latency_and_bandwidth(nbytes, measured(mine))
        errors += np.abs(np.log((latency + nbytes / bandwidth) / measured(mine))).tolist()
    assert len(errors) == 106
    assert 0.7 * mean < np.mean(errors) < mean
    assert np.max(errors) < worst


def test_the_few_points_of_a_calibration_tell_the_cache_as_all_do():
    pytest.importorskip("torch")
    from cpsim.real.measure.cached import FEW_SIZES, parameters

    few = [parameters(*size) for size in FEW_SIZES]
    measured_points = load(points_file("h200-cached.jsonl")).of("cached")
    chosen = [p for p in measured_points if {name: p[name] for name in few[0]} in few]
    assert len(chosen) >= len(few) - 1  # one moves more than all points do
    others = [p | {"op": "elementwise"} for p in chosen]
    found, h200 = fit_elementwise(chosen + others, None), load_profile("h200").elementwise
    assert found.cache_bytes == pytest.approx(h200.cache_bytes, rel=0.05)
    assert found.cache_gain == pytest.approx(h200.cache_gain, rel=0.05)
