"""Whole layers: what they compute, what that costs, and what nano-batches hide."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import ALL_PASSES, cluster, workload
from layer_cases import EVEN, LAYERS, MODEL
from ranks import run_script
from scripts import load_script
from test_validate import with_other_dependencies

from cpsim.case.load import load_scenarios, scenario_from
from cpsim.case.resolve import cluster_of, model_of, workload_of
from cpsim.errors import InfeasibleError, ScenarioError, ScheduleError
from cpsim.models.gemm import gemm_seconds
from cpsim.models.price import price
from cpsim.models.profile import load_profile
from cpsim.models.spread import expected_maximum
from cpsim.prediction.advise import advise
from cpsim.prediction.case import resolve
from cpsim.prediction.passes import least_memory
from cpsim.prediction.predict import predict, predict_many
from cpsim.prediction.results import Prediction
from cpsim.prediction.runs import case_key
from cpsim.prediction.step.layer import ElementwisePass, Gemm, Ops
from cpsim.prediction.step_advice import advise_step
from cpsim.schedule.check import validate
from cpsim.schedule.schedule import ATTENTION_KINDS, COLLECTIVE_KINDS, Kind
from cpsim.schedule.work import free_work
from cpsim.sim.fast import simulate
from cpsim.strategies import plan
from cpsim.strategies.distca.packing import head_tail, wlb_pack
from cpsim.strategies.distca.packing import per_sequence as cut_in_order
from cpsim.strategies.steps.layer import plan_layer, plan_scenario, weights

HERE = Path(__file__).parent
CASE = {
    "model": "llama3-8b",
    "part": "layer",
    "gpus": 4,
    "cluster": "h200-4",
    "tokens": 65536,
    "kernel": "fa2",
    "mask": "causal_document",
    "documents": [32768, *[2048] * 16],
}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_layers_give_results_and_gradients_of_one_dense_process_on_gloo(num_ranks):
    pytest.importorskip("torch")
    assert run_script("layer_worker.py", num_ranks, timeout_s=600) == 2 * len(LAYERS)


@pytest.mark.parametrize("pass_", ALL_PASSES)
@pytest.mark.parametrize(("documents", "strategy", "knobs"), [case[1:] for case in LAYERS])
def test_layers_are_valid_and_take_6_flop_per_weight_and_token(documents, strategy, knobs, pass_):
    case = workload("causal_document", documents)
    found = plan_layer(strategy, case, MODEL, cluster(4), pass_, knobs)
    validate(found, case, pass_)
    assert found.memory().max() >= least_memory(case, 4, pass_)
    linear = [size for name, size in weights(MODEL).items() if "norm" not in name]
    products = sum(rows * heads * MODEL.head_dim for rows, heads in linear)
    assert found.nbytes[found.kind == Kind.GEMM].sum() == (2 if pass_ == "fwd" else 4) * products * case.num_tokens
    assert (2 * found.products[:, 1:].prod(axis=1) == found.nbytes[found.products[:, 0]]).all()


@pytest.mark.parametrize(("strategy", "pass_"), [("distca", "fwd"), ("distca", "bwd"), ("wlb", "fwd"), ("wlb", "bwd")])
def test_every_dependency_between_a_layer_and_its_attention_is_needed(strategy, pass_):
    case = workload("causal_document", EVEN)
    found = plan_layer(strategy, case, MODEL, cluster(2), pass_, {})
    attention = plan(strategy, case, cluster(2), pass_, {})
    owner, layers = np.repeat(np.arange(len(found)), np.diff(found.dep_start)), (Kind.GEMM, Kind.ELEMENTWISE)
    between = np.flatnonzero(np.isin(found.kind[owner], layers) | np.isin(found.kind[found.dep], layers))
    assert len(between) == len(found.dep) - len(attention.dep)
    check = with_other_dependencies(found, pass_, case)
    check(found)
    for i in between.tolist():
        start = found.dep_start - (np.arange(len(found) + 1) > owner[i])
        with pytest.raises(ScheduleError):
            check(replace(found, dep=np.delete(found.dep, i), dep_start=start))


@pytest.mark.parametrize("pass_", ALL_PASSES)
def test_a_layer_consists_of_the_ops_of_a_training_step(pass_):
    """Of a GPU without tensor parallelism; values are copied with the rotation of queries and keys."""
    scenario = scenario_from({**CASE, "strategy": "per_sequence"})
    found = plan_scenario(scenario, workload_of(scenario), cluster_of(scenario), pass_)
    model, tokens = model_of(scenario), 65536 // 4
    ops = Ops(model, 1, tokens)
    wanted = ops.forward() if pass_ == "fwd" else ops.backward()
    products = [(op.m, op.n, op.k) for op in wanted if isinstance(op, Gemm)]
    mine = [tuple(row[1:]) for row in found.products.tolist() if 0 in found.ranks_of(row[0])]
    assert sorted(mine) == sorted(products)
    swept = [o.nbytes for o in found.project(0) if o.kind == Kind.ELEMENTWISE]
    values = 4 * tokens * model.kv_heads * model.head_dim
    assert sorted(swept) == sorted(
        op.nbytes + values * (op.kind == "rotary") for op in wanted if isinstance(op, ElementwisePass)
    )


def test_products_take_what_was_fitted_to_them_on_the_slowest_gpu():
    scenario = scenario_from({**CASE, "strategy": "distca"})
    case, profile = resolve(scenario), load_profile("h200")
    found = plan_scenario(scenario, case.workload, case.cluster, "bwd")
    priced = price(found, case.conditions())
    op, m, n, k = found.products.T
    alone = gemm_seconds(profile.layers.gemm, m, n, k) * (1 + profile.sigma["run to run"] * expected_maximum(4))
    gain = alone - priced.work.duration_s[op]
    assert (gain >= 0).all()
    assert gain.max() <= profile.host.captured_gain_s["fwd"] * 1.001
    assert predict(scenario).parts_s["matrix products"] > 0.5 * predict(scenario).time_s


@pytest.mark.parametrize("pass_", ALL_PASSES)
def test_layers_of_one_nano_batch_hide_exchanges_of_the_other(pass_):
    """An op of the layer takes 10 us, a kernel 30, an exchange 20, a copy none: the first inputs run beside the ops of
    the second nano-batch before attention, the last results beside those of the first one after it."""
    found_us = []
    for count in (1, 2):
        case = workload("causal_document", (640, *[16] * 24) * count)
        found = plan_layer("distca", case, MODEL, cluster(4), pass_, {"nano_batches": count})
        us = np.select(
            [
                np.isin(found.kind, (Kind.GEMM, Kind.ELEMENTWISE)),
                np.isin(found.kind, ATTENTION_KINDS),
                np.isin(found.kind, COLLECTIVE_KINDS),
            ],
            [10.0, 30.0, 20.0],
            0.0,
        )
        span = simulate(found, free_work(us / 1e6, np.zeros(len(found)))).makespan_s * 1e6
        of_one = sum(us[i] for i in range(len(found)) if 0 in found.ranks_of(i))
        found_us.append((span, of_one, 20 * (found.kind == Kind.ALL_TO_ALL).sum()))
    (alone, computed, exchanged), (span, of_both, exchanged_by_both) = found_us
    assert alone == pytest.approx(computed)
    assert span < of_both - exchanged_by_both + exchanged / 2


def test_advice_ranks_strategies_by_the_time_of_the_whole_layer():
    advice = advise(scenario_from(CASE))
    names = {c.scenario.strategy for c in advice.candidates}
    assert {"distca", "allgather", "zigzag_ring"} <= names
    assert any("keeps all heads" in i.reason for i in advice.infeasible if i.scenario.strategy == "ulysses")
    assert all(c.forward.parts_s["matrix products"] > 0 for c in advice.candidates)
    with pytest.raises(ScenarioError, match="part: advise --step is of whole steps"):
        advise_step(scenario_from(CASE))


@pytest.mark.parametrize(
    ("name", "gpus", "cluster", "number"),
    [("distca-layer-2", 2, "h200-4", 40), ("distca-layer-4", 4, "h200-4", 52), ("four/layers", 4, "dgx-h100", 52)],
)
def test_cases_for_gpus_are_what_their_script_writes_and_can_be_predicted(name, gpus, cluster, number):
    path = HERE.parent / "data" / "cases" / f"{name}.jsonl"
    wanted = load_script("data/cases/distca_layer.py").text(gpus, cluster)
    assert path.read_text() == wanted, "run python data/cases/distca_layer.py"
    scenarios = list(load_scenarios(path))
    assert len(scenarios) == len({case_key(s) for s in scenarios}) == number
    found = predict_many(scenarios[::5], jobs=1)
    assert [str(r) for r in found if not isinstance(r, Prediction)] == []


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_baselines_place_work_as_their_packers_do(cp):
    case = workload("causal_document", EVEN)
    bounds, groups = np.cumsum(EVEN), 4 // cp
    found = plan("wlb", case, cluster(4), "fwd", {"cp": cp})
    group, ops = wlb_pack(np.array(EVEN), groups, 96 // groups, 64_000), found.kind == Kind.ATTENTION
    wanted = np.concatenate([head_tail(np.array(EVEN)[group == g], cp).work(cp) for g in range(groups)])
    assert found.tiles.area[found.tile[ops]].tolist() == wanted.tolist()
    if cp == 4:
        found = plan("per_sequence", case, cluster(4), "fwd", {})
        assert found.tiles.area[found.tile[ops]].tolist() == cut_in_order(np.array(EVEN), cp).work(cp).tolist()
    assert bounds[-1] == case.num_tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None, "heads": 32, "kv_heads": 8}, "part: belongs to a training step, which needs a model"),
        ({"context": 8192}, "context: belongs to a whole step; leave it out of one layer"),
        ({"parallel": {"tp": 2}}, "parallel: belongs to a whole step; leave it out of one layer"),
    ],
)
def test_scenarios_of_a_layer_that_mean_nothing_are_refused(change, message):
    with pytest.raises(ScenarioError, match=message):
        scenario_from({**CASE, "strategy": "distca"} | change)


@pytest.mark.parametrize(
    ("strategy", "knobs", "documents", "message"),
    [
        ("ulysses", {}, EVEN, "keeps all heads of whole tokens on every GPU"),
        ("wlb", {"cp": 2}, (45, 51), "multiples of 4"),
        ("wlb", {"cp": 1}, (96,), "1 documents are too few for 4 replicas"),
        ("per_sequence", {"cp": 2}, (64, 32), "the document at token 48 lies in two sequences"),
    ],
)
def test_layers_that_cannot_be_planned_say_why(strategy, knobs, documents, message):
    with pytest.raises(InfeasibleError, match=message):
        plan_layer(strategy, workload("causal_document", documents), MODEL, cluster(4), "fwd", knobs)
