"""DistCA's strategy: what moves is what its planner says, nano-batches hide each other, and plans are balanced."""

import numeric
import numpy as np
import pytest
from cases import ALL_PASSES, cluster, workload

from cpsim.case.scenario import Scenario
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.prediction.predict import predict
from cpsim.schedule.check import validate
from cpsim.schedule.schedule import ATTENTION_KINDS, Kind
from cpsim.schedule.work import free_work
from cpsim.sim.fast import simulate
from cpsim.strategies import plan
from cpsim.strategies.distca.kernel import flash_attention_4
from cpsim.strategies.distca.planning import schedule
from cpsim.strategies.distca.tasks import TokenBytes, dispatch

SKEWED = (420, 30, 41, 8, 97)
"""Documents of which parts move."""
VARIANTS = ("released", "paper", "cpsim")


def moved(schedule, tensors):
    """Bytes from rank to rank of the all-to-alls that carry some tensors."""
    found, ranks = np.zeros((schedule.num_ranks,) * 2, int), schedule.num_ranks
    owner = np.repeat(np.arange(len(schedule)), np.diff(schedule.access_start))
    named = np.array(schedule.block_tensors)[schedule.block_tensor[schedule.access_block]]
    for op in np.flatnonzero(schedule.kind == Kind.ALL_TO_ALL):
        if set(named[owner == op]) <= set(tensors):
            here = schedule.routes[:, 0] == op
            found += (
                np.bincount(
                    schedule.routes[here, 1] * ranks + schedule.routes[here, 2], schedule.route_nbytes[here], ranks**2
                )
                .astype(int)
                .reshape(ranks, ranks)
            )
    return found


def off_diagonal(matrix):
    return (matrix - np.diag(np.diag(matrix))).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("pass_", ALL_PASSES)
def test_exchanges_carry_the_bytes_of_the_planners_dispatch(pass_, num_ranks, variant):
    """Nano-batches share no document here, so that they are planned on their own."""
    halves = (700, 30, 41, 129), (400, 300, 8, 192)
    case = workload("causal_document", halves[0] + halves[1])
    found = plan("distca", case, cluster(num_ranks), pass_, {"variant": variant})
    sizes = TokenBytes(q=8 * 4 * 2, kv=2 * 2 * 4 * 2, lse=8 * 4)
    kernel = flash_attention_4(pass_ == "bwd", 8, 2)
    there, back = np.zeros((2, num_ranks, num_ranks), int)
    for documents in map(np.array, halves):
        sent = dispatch(schedule(documents, num_ranks, sizes, kernel, variant=variant), num_ranks, sizes)
        there += sent.qkv if pass_ == "fwd" else sent.bundle
        back += sent.out if pass_ == "fwd" else sent.grads
    inputs, outputs = (("q", "kv"), ("out",)) if pass_ == "fwd" else (("q", "out", "dout", "kv"), ("dq", "dkv"))
    assert moved(found, inputs).tolist() == off_diagonal(there)
    assert moved(found, outputs).tolist() == off_diagonal(back)
    assert there.sum() > np.trace(there)


@pytest.mark.parametrize(
    "knobs",
    [*({"variant": v} for v in VARIANTS), {"nano_batches": 3}, {"tolerance": 0.0}, {"servers": 2, "barriers": True}],
)
@pytest.mark.parametrize("mask", ["causal_document", "lambda"])
@pytest.mark.parametrize("pass_", ALL_PASSES)
def test_parts_of_long_documents_are_computed_elsewhere_and_come_home(pass_, mask, knobs):
    case = workload(mask, SKEWED, "gqa", num_heads=2, num_kv_heads=1)
    found = plan("distca", case, cluster(3), pass_, knobs)
    validate(found, case, pass_)
    numeric.check(found, case, numeric.any_order(found, seed=2))


def test_queries_move_only_where_work_is_uneven():
    for documents, moves in (((64,) * 16, False), ((640, *[16] * 24), True)):
        found = plan("distca", workload("causal_document", documents), cluster(4), "fwd", {"nano_batches": 1})
        assert bool(moved(found, ("q",)).any()) == moves


@pytest.mark.parametrize(("pass_", "inputs", "results"), [("fwd", 2, 1), ("bwd", 2, 2)])
def test_a_nano_batch_hides_inputs_of_the_next_and_results_of_the_one_before(pass_, inputs, results):
    """A kernel takes 100 us, an exchange 20 and a copy none: exposed are the first inputs and the last results."""
    spans = []
    for count in (1, 2, 3):
        case = workload("causal_document", (640, *[16] * 24) * count)
        found = plan("distca", case, cluster(4), pass_, {"nano_batches": count})
        kernel, exchange = (np.isin(found.kind, kinds) for kinds in (ATTENTION_KINDS, [Kind.ALL_TO_ALL]))
        assert exchange.sum() == (inputs + results) * count
        seconds = np.where(kernel, 100e-6, np.where(exchange, 20e-6, 0.0))
        spans.append(simulate(found, free_work(seconds, np.zeros(len(found)))).makespan_s)
    assert spans == pytest.approx([count * 100e-6 + (inputs + results) * 20e-6 for count in (1, 2, 3)])


@pytest.mark.parametrize("pass_", ALL_PASSES)
def test_servers_apart_compute_all_attention_and_are_home_of_nothing(pass_):
    found = plan("distca", workload("causal_document", SKEWED), cluster(4), pass_, {"servers": 1})
    attention = np.flatnonzero(np.isin(found.kind, ATTENTION_KINDS))
    assert {r for i in attention.tolist() for r in found.ranks_of(i)} == {3}
    held = np.bincount(found.buffer_rank[found.inputs[:, 0]], found.buffer_nbytes[found.inputs[:, 0]], 4)
    assert held[3] == 0
    assert held[:3].max() <= 1.02 * held[:3].min()


@pytest.mark.parametrize("pass_", ALL_PASSES)
def test_barriers_make_a_tick_as_long_as_the_longer_of_its_two_streams(pass_):
    """Kernels of 10 us beside exchanges of 25: without barriers streams slip past each other's ends."""
    spans = []
    for barriers in (False, True):
        case = workload("causal_document", (640, *[16] * 24) * 3)
        found = plan("distca", case, cluster(4), pass_, {"nano_batches": 3, "barriers": barriers})
        seconds = np.where(np.isin(found.kind, ATTENTION_KINDS), 10e-6, (found.kind == Kind.ALL_TO_ALL) * 25e-6)
        spans.append(simulate(found, free_work(seconds, np.zeros(len(found)))).makespan_s)
    assert (found.kind == Kind.BARRIER).sum() == 3 * 4
    assert spans[1] >= spans[0]


def test_skewed_documents_run_faster_than_where_they_lie():
    """One GPU of each of four nodes, as DistCA's servers are; without a limit nothing but keys moves."""
    fields = {
        "strategy": "distca",
        "gpus": 4,
        "cluster": "h200-4",
        "tokens_per_gpu": 32768,
        "mask": "causal_document",
        "documents": [65536, *[2048] * 32],
        "heads": 8,
        "kv_heads": 1,
        "kernel": "fa4",
    }
    times = [predict(Scenario(**fields, knobs={"tolerance": t, "nano_batches": 1})).time_s for t in (0.05, 10.0)]
    assert times[0] < 0.75 * times[1]


@pytest.mark.parametrize(
    ("num_ranks", "knobs", "error", "message"),
    [
        (1, {}, InfeasibleError, "runs on 2 GPUs or more, got 1; use none"),
        (4, {"nano_batches": 16}, InfeasibleError, "a token for every GPU and nano-batch, got 48"),
        (4, {"nano_batches": 0}, ScenarioError, "nano_batches: expected a positive integer, got 0"),
        (4, {"servers": 4}, ScenarioError, "servers: expected fewer than all 4 GPUs, got 4"),
        (4, {"barriers": 1}, ScenarioError, "barriers: expected true or false, got 1"),
        (4, {"tolerance": "much"}, ScenarioError, "tolerance: expected a number, got 'much'"),
        (4, {"tolerance": -1}, ScenarioError, "a share of the mean work from 0, got -1"),
        (4, {"variant": "best"}, ScenarioError, "expected one of released, paper, cpsim, got 'best'"),
    ],
)
def test_what_cannot_be_planned_says_why(num_ranks, knobs, error, message):
    with pytest.raises(error, match=message):
        plan("distca", workload(), cluster(num_ranks), "fwd", knobs)
