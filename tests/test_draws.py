"""Many draws of the costs in one pass."""

from dataclasses import replace

import numpy as np
import pytest
from test_benchmark import pricing, workload

from cpsim.case.cluster import load_cluster
from cpsim.case.load import scenario_from
from cpsim.models.cost_models import GROUPS
from cpsim.models.price import price
from cpsim.models.profile import load_profile
from cpsim.models.uncertainty import NOISE, NUM_DRAWS, draws_of
from cpsim.prediction.case import resolve
from cpsim.prediction.passes import run_pass
from cpsim.prediction.predict import draws_for, predict
from cpsim.schedule.work import free_work
from cpsim.sim.draws import BATCH, Followed
from cpsim.sim.fast import simulate
from cpsim.strategies import plan

CLUSTER = load_cluster("dgx-h200").with_gpus(16)


def simulated(strategy, pass_, constant=False):
    schedule = plan(strategy, workload(16), CLUSTER, pass_, {})
    priced = price(schedule, pricing(CLUSTER))
    work = free_work(priced.work.duration_s, priced.work.release_s) if constant else priced.work
    return schedule, replace(priced, work=work), simulate(schedule, work)


def drawn(num, seed=0):
    rng = np.random.default_rng(seed)
    return np.exp(0.2 * rng.standard_normal((len(GROUPS), num))), np.exp(0.2 * rng.standard_normal((2, num)))


@pytest.mark.parametrize("strategy", ["zigzag_ring", "ring", "usp", "allgather", "loongtrain"])
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_a_draw_that_changes_nothing_is_the_simulation(strategy, pass_):
    _, priced, timeline = simulated(strategy, pass_)
    ones = np.ones(BATCH + 3)
    found = Followed.of(timeline, priced.work, priced.group).makespans(np.ones((len(GROUPS), len(ones))), ones, ones)
    np.testing.assert_allclose(found, timeline.makespan_s, rtol=1e-12)


@pytest.mark.parametrize("strategy", ["zigzag_ring", "ring", "usp"])
def test_at_constant_rates_every_draw_is_a_simulation_of_its_own(strategy):
    schedule, priced, timeline = simulated(strategy, "bwd", constant=True)
    factors, (lost, host) = drawn(2 * BATCH + 1)
    found = Followed.of(timeline, priced.work, priced.group).makespans(factors, lost, host)
    for draw in (0, BATCH, 2 * BATCH):
        work = free_work(priced.work.duration_s * factors[priced.group, draw], priced.work.release_s * host[draw])
        assert found[draw] == pytest.approx(simulate(schedule, work).makespan_s, rel=1e-12)


def test_another_path_may_overtake_the_critical_one():
    """Drawn along the critical path alone, transfers that are a little hidden would never matter."""
    _, priced, timeline = simulated("zigzag_ring", "fwd", constant=True)
    on_path = set(priced.group[timeline.critical_path()].tolist())
    hidden = min(set(priced.group.tolist()) - on_path)
    factors = np.ones((len(GROUPS), 1))
    factors[hidden] = 50.0
    assert (
        Followed.of(timeline, priced.work, priced.group).makespans(factors, np.ones(1), np.ones(1))[0]
        > 2 * timeline.makespan_s
    )


def test_an_interval_is_that_of_the_draws_of_both_passes():
    fields = {"gpus": 16, "cluster": "dgx-h200", "tokens_per_gpu": 2048, "heads": 32, "kv_heads": 8}
    asked = scenario_from(fields | {"strategy": "zigzag_ring"})
    both = predict(asked)
    assert len(both.draws_s) == NUM_DRAWS
    assert both.time_s_low == np.quantile(both.draws_s, 0.05) < both.time_s < both.time_s_high
    case = resolve(asked)
    draws = draws_for(case, [run_pass(case, pass_) for pass_ in ("fwd", "bwd")])
    along = draws.along(both.parts_s) * draws.noise()
    assert np.corrcoef(along, both.draws_s)[0, 1] > 0.9
    assert np.mean(both.draws_s) >= np.mean(along)  # a maximum of several paths


def correlation(name, captured=False, steady=False):
    """Of the logarithms of what two predictions draw."""
    profile = load_profile("h200")
    one, other = (
        draws_of(profile, CLUSTER, "fa2", captured=captured, layers=False, steady=steady, seed=(seed,))
        for seed in (1, 2)
    )
    drawn = (d.noise() if name == NOISE else d.factor(name) for d in (one, other))
    return np.corrcoef(*map(np.log, drawn))[0, 1]


def test_what_a_machine_is_strategies_find_alike_and_threads_and_runs_are_their_own():
    sigma = load_profile("h200").sigma
    for found, of_machine, own in (
        (correlation("host"), sigma["host"], sigma["host thread"]),
        (correlation(NOISE, steady=True), sigma["sustained"], sigma[NOISE]),
        (correlation(NOISE), 0.0, 1.0),
        (correlation("host", captured=True), 1.0, 1.0),
        (correlation("attention fwd"), 1.0, 1.0),
    ):
        assert found == pytest.approx(of_machine**2 / (of_machine**2 + own**2), abs=0.1)


def test_strategies_that_come_to_one_schedule_tie():
    """A zigzag ring around Ulysses groups of one GPU is a zigzag ring: same time, same draws."""
    fields = {"gpus": 8, "cluster": "dgx-h200", "tokens_per_gpu": 4096, "heads": 32, "kv_heads": 8}
    ring, usp = (
        predict(scenario_from(fields | {"strategy": strategy, "knobs": knobs}))
        for strategy, knobs in (("zigzag_ring", {}), ("usp", {"ulysses": 1}))
    )
    assert ring.time_s == usp.time_s
    assert ring.draws_s == usp.draws_s
