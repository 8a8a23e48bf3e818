"""Whole training steps: what they consist of, who waits for whom, and what `advise --step` makes of them."""

import dataclasses
import json

import numpy as np
import pytest
from test_cli import cpsim, one_line

from cpsim.case.load import scenario_from
from cpsim.case.model import MODELS
from cpsim.case.parallel import Parallel
from cpsim.case.resolve import cluster_of, model_of, parallel_of
from cpsim.case.scenario import ParallelSection
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.models.parameters import IN_TURNS
from cpsim.models.profile import load_profile, save_profile
from cpsim.prediction.predict import predict
from cpsim.prediction.step.attention import task_seconds
from cpsim.prediction.step.step import cut, deal
from cpsim.prediction.step_advice import advise_step, reasons
from cpsim.prediction.steps import StepCase

STEP = {
    "gpus": 32,
    "cluster": "dgx-h200",
    "model": "llama3-8b",
    "tokens": 32 * 16384,
    "context": 32768,
    "kernel": "fa2",
    "strategy": "none",
    "mask": "causal_document",
    "parallel": {"tp": 4, "recompute": "mlp"},
}


ALONE = load_profile("h200")
ALONE = dataclasses.replace(ALONE, sustained={name: log for name, log in ALONE.sustained.items() if name != IN_TURNS})
"""Where kernels of a layer take as long as alone."""


def step(**changes):
    """The simulated step of STEP with changes; those to `parallel` go on top of its own."""
    changes["parallel"] = STEP["parallel"] | changes.get("parallel", {})
    scenario = scenario_from(STEP | changes)
    case = StepCase(scenario, cluster_of(scenario), load_profile("h200"))
    return case.simulate(case.parallel(), scenario.strategy, scenario.knobs)


@pytest.mark.parametrize(
    ("implementation", "strategy", "mask"),
    [
        ("cpsim", "zigzag_ring", "causal_document"),
        ("ring-flash-attn", "ring", "causal_document"),
        ("ring-flash-attn", "zigzag_ring", "causal_document"),
        ("ring-flash-attn", "allgather", "causal"),
        ("yunchang", "ulysses", "causal"),
    ],
)
def test_attention_of_a_step_takes_as_long_as_it_does_alone(implementation, strategy, mask):
    documents = [65536] if mask == "causal" else [1024] * 64
    how = {"implementation": implementation, "strategy": strategy, "mask": mask, "cluster": "dgx-h200", "kernel": "fa2"}
    scenario = scenario_from(STEP | how | {"gpus": 4, "tokens": 65536, "documents": documents, "parallel": {"cp": 4}})
    case = StepCase(scenario, cluster_of(scenario), ALONE)
    (found,) = case.model(case.parallel(), strategy, {}).attention.of([tuple(documents)])
    for pass_, parts in zip(("fwd", "bwd"), found.parts, strict=True):
        alone = predict(
            how
            | {
                "gpus": 4,
                "tokens": 65536,
                "documents": documents,
                "heads": 32,
                "kv_heads": 8,
                "pass": pass_,
                "protocol": "streamed",
            }
        )
        assert sum(parts.values()) == pytest.approx(alone.time_s, rel=1e-9)


@pytest.mark.parametrize("cp", [2, 4])
def test_ranks_of_compiled_context_parallel_layers_wait_for_each_others_backward_kernels(cp):
    """As ``python -m studies.steps.order`` shows: n kernels of n - 1 ranks, and then n - 1 of the last."""
    how = {"framework": "torch", "kernel": "sdpa_flash", "gpus": cp, "tokens": 65536, "context": None, "mask": "causal"}
    cut = {"tp": 1, "cp": cp, "recompute": "full"}
    compiled, eager = (
        step(**how, strategy="zigzag_ring", compile=compiles, parallel=cut) for compiles in (True, False)
    )
    assert compiled.busy["attention bwd"] == pytest.approx((2 - 1 / cp) * eager.busy["attention bwd"], rel=0.02)
    assert compiled.busy["attention fwd"] == pytest.approx(eager.busy["attention fwd"], rel=0.02)
    assert compiled.busy["memory-bound"] < eager.busy["memory-bound"]
    assert any("wait for each other" in note for note in compiled.notes)


@pytest.mark.parametrize("gradients", ["none", "exposed", "overlapped"])
@pytest.mark.parametrize("pipeline", ["1f1b", "same_phase"])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_parts_of_the_critical_path_sum_to_the_time(pp, pipeline, gradients):
    found = step(parallel={"pp": pp, "schedule": pipeline, "gradients": gradients})
    assert sum(found.parts.values()) == pytest.approx(found.time_s)
    assert 0 <= found.idle_share < 1


def test_even_documents_leave_one_replica_as_busy_as_another():
    assert step().imbalance == pytest.approx(1.0)
    assert step().idle_share < 0.02


def test_the_step_waits_for_the_replica_with_the_longest_document():
    documents = [32768] + [1024] * 480
    skewed, even = step(documents=documents), step(documents=[1024] * 512)
    assert skewed.imbalance > 1.2
    assert skewed.time_s > even.time_s
    assert skewed.parts["matrix products"] == pytest.approx(even.parts["matrix products"])
    more = skewed.parts["attention fwd"] - even.parts["attention fwd"]
    assert skewed.time_s - even.time_s > more > 0


def test_flops_are_those_of_the_model_however_it_is_cut():
    model, tokens = MODELS["llama3-8b"], STEP["tokens"]
    weights = model.parameters() - model.vocab * model.hidden - model.hidden * (2 * model.layers + 1)
    pairs = tokens // 32768 * 32768 * 32769 // 2
    want = 6 * weights * tokens + 3.5 * 4 * pairs * model.heads * model.head_dim * model.layers
    for parallel in ({}, {"pp": 4}, {"tp": 8, "recompute": "full"}):
        assert step(parallel=parallel).flops == pytest.approx(want)


def test_bubbles_shrink_with_more_microbatches():
    few, many = (step(tokens=n * 32768, parallel={"pp": 4, "cp": 1}).idle_share for n in (4, 32))
    assert few > 0.4
    assert many < few / 2


def test_recomputation_trades_time_for_memory():
    none, mlp, full = (step(parallel={"recompute": kind}) for kind in ("none", "mlp", "full"))
    assert none.time_s < mlp.time_s < full.time_s
    assert none.peak_memory_bytes > mlp.peak_memory_bytes > full.peak_memory_bytes


def test_gradients_beside_the_backward_pass_cost_less_than_after_it():
    none, beside, after = (step(parallel={"gradients": how}).time_s for how in ("none", "overlapped", "exposed"))
    assert none < beside < after


def test_a_step_without_optimizer_holds_no_states_and_is_shorter():
    without, whole = step(parallel={"optimizer": False}), step()
    assert whole.memory[0].optimizer > 0 == without.memory[0].optimizer
    assert whole.time_s > without.time_s


def test_weights_states_and_gradients_add_up_to_the_model():
    found, parameters = step(parallel={"pp": 4}), MODELS["llama3-8b"].parameters()
    assert sum(stage.weights for stage in found.memory) * 4 == pytest.approx(2 * parameters, rel=1e-3)
    assert sum(stage.gradients for stage in found.memory) * 4 == pytest.approx(4 * parameters, rel=1e-3)
    assert sum(stage.optimizer for stage in found.memory) * 4 * 2 == pytest.approx(12 * parameters, rel=1e-3)


def test_the_first_stage_holds_the_most_microbatches():
    found = step(parallel={"pp": 4})
    kept = found.memory[3].activations
    assert [round(stage.activations / kept) for stage in found.memory[:3]] == [4, 3, 2]


def test_context_parallelism_shares_a_long_document():
    alone = step(tokens=32 * 32768, context=131072, parallel={"tp": 4})
    shared = step(tokens=32 * 32768, context=131072, strategy="allgather", parallel={"tp": 4, "cp": 4})
    assert shared.peak_memory_bytes < 0.5 * alone.peak_memory_bytes
    assert shared.time_s == pytest.approx(alone.time_s, rel=0.15)
    assert shared.flops == alone.flops


def test_one_rank_takes_as_long_by_tasks_as_by_its_schedule():
    scenario = scenario_from(STEP)
    case = StepCase(scenario, cluster_of(scenario), ALONE)
    documents = (20000, 12000, 768)
    attention = case.model(case.parallel(), "none", {}).attention
    fast, slow = attention.of([documents])[0], attention._simulated(attention.workload(documents))
    for i, name in enumerate(("attention fwd", "attention bwd")):
        assert fast.parts[i][name] == pytest.approx(sum(slow.parts[i].values()), rel=0.05)
    assert fast.area == slow.area
    assert slow.exchange == 0


def test_tasks_of_one_document_take_about_as_long_as_the_document():
    profile, model, length = load_profile("h200"), MODELS["llama-34b"], 65536
    shard = length // 8
    whole = task_seconds(profile, "fa2", model, 8, np.array([0, 1]), np.array([length]), np.array([length]))
    ends = np.arange(1, 9) * shard
    shards = task_seconds(profile, "fa2", model, 8, np.array([0, 8]), np.full(8, shard), ends)
    np.testing.assert_allclose(shards, whole, rtol=0.1)


def test_sequences_are_cut_where_they_are_full():
    assert cut([5, 3, 9, 3], 10) == [(5, 3, 2), (7, 3)]
    assert cut([10, 10], 10) == [(10,), (10,)]
    assert cut([25, 3], 10) == [(10,), (10,), (5, 3)]


def test_sequences_are_dealt_to_replicas_in_turn():
    cuts = {"tp": 1, "pp": 1, "cp": 1, "recompute": "none", "schedule": "1f1b", "gradients": "none", "optimizer": False}
    batch = deal([(i,) for i in range(8)], Parallel(dp=2, microbatches=2, **cuts))
    assert batch == [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]
    with pytest.raises(InfeasibleError, match="8 sequences"):
        deal([(i,) for i in range(8)], Parallel(dp=3, microbatches=1, **cuts))


INFEASIBLE = {
    "heads": ({"parallel": {"tp": 16}}, "tp: expected a divisor of 8"),
    "layers": ({"gpus": 24, "tokens": 24 * 32768, "parallel": {"tp": 8, "pp": 3}}, "pp: expected a divisor of 32"),
    "nodes": ({"gpus": 24, "tokens": 24 * 32768, "parallel": {"tp": 1, "cp": 12}}, "cp and dp: groups of 12 GPUs"),
    "sequences": ({"tokens": 6 * 32768, "gpus": 16, "parallel": {"dp": 4}}, "6 sequences to divide into"),
    "strategy without ranks": ({"strategy": "zigzag_ring"}, "cp: strategy zigzag_ring needs several ranks"),
}


@pytest.mark.parametrize(("changes", "match"), INFEASIBLE.values(), ids=INFEASIBLE)
def test_what_cannot_run_is_one_line(changes, match):
    with pytest.raises((InfeasibleError, ScenarioError), match=match) as caught:
        step(**changes)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_has_a_time_all_the_same():
    changes = {"tokens": 32 * 131072, "context": 131072, "parallel": {"tp": 4, "recompute": "none"}}
    found = predict(scenario_from(STEP | changes))
    assert not found.fits
    assert found.time_s > 0
    assert found.notes[0].startswith("does not fit: needs ")
    beside = found.memory["communicators"] + found.memory["context"]
    assert found.needed_bytes == sum(found.memory.values()) == found.peak_memory_bytes + beside > 141e9


def test_degrees_must_multiply_to_the_gpus():
    with pytest.raises(ScenarioError, match="tp x pp x cp x dp = 32 GPUs, got 4 x 1 x 3 x 2"):
        parallel_of(ParallelSection(tp=4, cp=3), 32, 1)


def test_a_prediction_of_a_step_has_an_interval_and_says_what_it_rests_on():
    found = predict(scenario_from(STEP))
    assert found.time_s_low < found.time_s < found.time_s_high
    assert found.tflops_per_gpu == pytest.approx(step().flops / 32 / found.time_s / 1e12)
    assert any("published" in note for note in found.notes)


@pytest.mark.parametrize("model", ["llama3-8b", dataclasses.asdict(MODELS["llama3-70b"])], ids=["name", "dimensions"])
def test_a_step_survives_a_round_trip(model):
    scenario = scenario_from(STEP | {"model": model})
    assert scenario_from(json.loads(json.dumps(scenario.to_dict()))) == scenario
    assert scenario.heads == model_of(scenario).heads


def test_a_profile_without_layers_says_how_to_measure_them(tmp_path):
    path = tmp_path / "bare.json"
    save_profile(dataclasses.replace(load_profile("h200"), name="bare", layers=None), path)
    with pytest.raises(Exception, match=r"profile bare lacks products .* cpsim\.real\.measure\.layers"):
        predict(scenario_from(STEP | {"profile": str(path)}))


@pytest.fixture(scope="module")
def advice():
    return advise_step(scenario_from(STEP | {"gpus": 16, "strategy": None, "parallel": {"pp": 1}, "tokens": 524288}))


def test_advice_ranks_by_time_and_keeps_what_is_fixed(advice):
    times = [one.step.time_s for one in advice.candidates]
    assert times == sorted(times)
    assert len(times) > 1
    assert len(times) + len(advice.slower) > 4
    assert all(seconds > times[0] for _, seconds in advice.slower)
    assert {one.parallel.pp for one in advice.candidates} == {1}
    assert {one.parallel.num_gpus for one in advice.candidates} == {16}
    assert sum(one.probability_best for one in advice.candidates) == pytest.approx(1.0)


def test_advice_fits_into_memory_with_the_least_recomputation(advice):
    limit = cluster_of(advice.scenario).gpu.memory_bytes
    assert all(one.step.peak_memory_bytes <= limit for one in advice.candidates)
    assert advice.candidates[0].parallel.recompute == "none"


def test_advice_says_where_the_time_goes_and_why_other_degrees_are_slower(advice):
    best = advice.candidates[0]
    assert sum(best.aspects().values()) == pytest.approx(best.step.time_s)
    assert [line.split()[0] for line in reasons(advice)] == ["tp", "cp"]


def test_advice_says_what_it_did_not_try(advice):
    assert [note for note in advice.notes if note.startswith("not tried") and "dcp" in note]
    named = advise_step(scenario_from(STEP | {"strategy": "zigzag_ring", "parallel": {"tp": 2, "pp": 1, "cp": 2}}))
    assert not [note for note in named.notes if note.startswith("not tried")]


@pytest.mark.parametrize(
    ("context", "parallel", "said"),
    [
        (None, {"tp": 4, "pp": 1}, ["16,384 to 32,768 tokens"]),
        (None, {"tp": 4, "pp": 1, "cp": 1}, ["16,384 tokens"]),
        (None, {"tp": 4, "pp": 1, "cp": 2}, []),
        (16384, {"tp": 4, "pp": 1}, []),
    ],
    ids=["several lengths", "one that cuts documents", "all tokens", "the scenario's"],
)
def test_advice_says_what_sequences_it_cuts_where_the_scenario_has_none(context, parallel, said):
    asked = {"gpus": 8, "tokens": 32768, "documents": None, "context": context, "parallel": parallel}
    notes = advise_step(scenario_from(STEP | asked | {"strategy": None})).notes
    found = [note for note in notes if note.startswith("context: not given")]
    assert [length in note for length, note in zip(said, found, strict=True)] == [True] * len(said)


def test_the_command_line_predicts_and_advises_steps(tmp_path):
    path = tmp_path / "step.json"
    path.write_text(json.dumps(STEP))
    record = json.loads(cpsim("predict", path, "--json"))
    assert record["scenario"]["model"] == "llama3-8b"
    assert record["parts_s"]["matrix products"] > 0
    path.write_text(json.dumps(STEP | {"parallel": {"tp": 4, "pp": 1, "cp": 1}}))
    told = json.loads(cpsim("advise", "--step", path, "--json"))
    assert told["candidates"][0]["time_s"] == pytest.approx(record["time_s"], rel=0.5)
    assert "tp 4, pp 1, dp 8, cp 1" in cpsim("advise", "--step", path)


def test_the_command_line_refuses_steps_in_one_line(tmp_path):
    path = tmp_path / "step.json"
    path.write_text(json.dumps(STEP))
    assert cpsim("advise", path) == cpsim("advise", "--step", path)
    path.write_text(
        json.dumps(
            {k: v for k, v in STEP.items() if k not in ("model", "parallel", "context")} | {"heads": 8, "kv_heads": 8}
        )
    )
    assert "needs a model" in one_line(cpsim("advise", "--step", path, status=2))
