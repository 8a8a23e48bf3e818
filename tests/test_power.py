"""The clock under the power limit."""

import numpy as np
import pytest

from cpsim.calibrate.residuals import predicted_attention
from cpsim.models.power import load_of, settled_seconds, slowdown
from cpsim.models.profile import load_profile

POWER = 0.35


def settled(full, endless, period, rank=None, num_ranks=1, others=0.0):
    rank = np.zeros(len(full), np.int64) if rank is None else np.array(rank)
    return settled_seconds(np.array(full), np.array(endless), rank, np.full(num_ranks, others), period, POWER)


def test_an_op_that_runs_without_a_pause_takes_its_endless_time():
    assert settled([1.0], [1.2], period=1.0) == pytest.approx([1.2])


def test_idle_time_lets_the_clock_rise_up_to_the_full_one():
    times = [settled([1.0], [1.2], period)[0] for period in (1.0, 1.1, 1.3, 2.0, 5.0)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(1.0, rel=1e-6)


def test_every_gpu_has_a_clock_of_its_own():
    busy, idle = settled([1.0, 0.2], [1.2, 0.24], period=1.0, rank=[0, 1], num_ranks=2)
    assert busy == pytest.approx(1.2)
    assert idle == pytest.approx(0.2, rel=1e-6)


def test_what_else_draws_power_lowers_the_clock():
    assert settled([1.0], [1.2], period=1.5, others=0.4) > settled([1.0], [1.2], period=1.5)


def test_ops_of_one_gpu_share_its_clock():
    heavy, light = settled([0.5, 0.5], [0.6, 0.5], period=1.0)
    assert heavy == pytest.approx(light)


def test_load_inverts_slowdown():
    load = np.array([0.5, 0.9, 1.0, 1.3, 2.0])
    assert load_of(slowdown(load, POWER), POWER) == pytest.approx(load, rel=1e-3)


def test_a_kernel_that_never_meets_the_limit_keeps_its_time():
    assert settled_seconds(np.array([1.0]), np.array([1.0]), np.zeros(1, int), np.zeros(1), 1.0, 0.0) == [1.0]


def test_a_pause_between_two_calls_lets_a_measured_kernel_run_faster():
    params = load_profile("h200").attention_params("fa4", "fwd")
    point = {
        "q_lens": [8192],
        "k_lens": [8192],
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "causal": True,
        "varlen": False,
    }
    endless, paused, rested = predicted_attention(params, [point, point | {"pause_s": 3e-4}, point | {"rested": True}])
    assert rested < paused < endless
    assert predicted_attention(params, [point | {"pause_s": 1e3}])[0] == pytest.approx(rested)
