"""Stages with several chunks of layers or unequal numbers of them, and microbatches of several sequences."""

import pytest
from test_training_step import STEP, step

from cpsim.case.load import scenario_from
from cpsim.case.model import MODELS
from cpsim.case.resolve import flops_of, parallel_of, workload_of
from cpsim.case.scenario import ParallelSection
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.prediction.predict import predict
from cpsim.prediction.step_advice import advise_step, words

PIPELINE = {"tp": 4, "pp": 4, "microbatches": 8}


def layers(number, **fields):
    return parallel_of(ParallelSection(**fields), fields["pp"], 1).chunk_layers(number)


def test_chunks_of_a_stage_shorten_the_bubble_and_hold_more():
    one, two, four = (step(parallel=PIPELINE | {"virtual_pp": chunks}) for chunks in (1, 2, 4))
    assert one.time_s > two.time_s > four.time_s
    assert one.idle_share > 1.4 * two.idle_share
    assert one.memory[0].activations < four.memory[0].activations < two.memory[0].activations
    assert sum(stage.weights for stage in two.memory) == sum(stage.weights for stage in one.memory)
    assert two.sent > one.sent
    assert two.flops == one.flops


@pytest.mark.parametrize("gradients", ["none", "exposed", "overlapped"])
@pytest.mark.parametrize("cut", [{"virtual_pp": 2}, {"virtual_pp": 8}, {"layers_first": 5}])
def test_parts_of_the_critical_path_sum_to_the_time(cut, gradients):
    found = step(parallel=PIPELINE | {"gradients": gradients} | cut)
    assert sum(found.parts.values()) == pytest.approx(found.time_s)
    assert 0 <= found.idle_share < 1


def test_llama_405b_has_126_layers_on_8_and_on_16_stages():
    """The Llama 3 Herd of Models (2024), section 3.3.2: the first and the last stage have a layer less than others."""
    assert layers(126, pp=8, layers_first=15, layers_last=15) == (15, *[16] * 6, 15)
    assert layers(126, pp=16, embedding_as_layer=True, loss_as_layer=True) == (7, *[8] * 14, 7)
    assert layers(126, pp=16, virtual_pp=8, embedding_as_layer=True, loss_as_layer=True) == (0, *[1] * 126, 0)


def test_layers_of_chunks_are_those_of_megatron_core():
    assert layers(8, pp=2, virtual_pp=4) == (1,) * 8
    assert layers(61, pp=16, layers_last=1) == (*[4] * 15, 1)
    assert layers(14, pp=4, virtual_pp=2, layers_first=2) == (1, 2, 2, 2) * 2
    assert layers(7, pp=4, loss_as_layer=True) == (2, 2, 2, 1)
    assert layers(61, pp=4, virtual_pp=4, layout=(*[4] * 15, 1)) == (*[4] * 15, 1)


@pytest.mark.parametrize(
    "cut",
    [
        {"layers_first": 5},
        {"layers_first": 7, "layers_last": 7},
        {"virtual_pp": 2, "layers_first": 2, "layers_last": 6},
        {"virtual_pp": 2, "layout": (1, 5, 5, 4, 4, 5, 5, 3)},
    ],
)
def test_unequal_stages_hold_the_whole_model(cut):
    found, parameters = step(parallel=PIPELINE | cut), MODELS["llama3-8b"].parameters()
    assert sum(stage.weights for stage in found.memory) * 4 == pytest.approx(2 * parameters, rel=1e-3)
    assert found.flops == step(parallel=PIPELINE).flops


def test_the_stage_with_the_most_layers_sets_the_pace():
    even, uneven = step(parallel=PIPELINE), step(parallel=PIPELINE | {"layers_first": 5})
    assert 1.0 < uneven.time_s / even.time_s < 9 / 8


INFEASIBLE = {
    "layers": ({"pp": 4, "virtual_pp": 3}, "virtual_pp: expected a divisor of 8 layers of a stage, got 3"),
    "one stage": ({"pp": 1, "virtual_pp": 2}, "virtual_pp: expected several stages, got pp = 1"),
    "microbatches": ({"pp": 8, "microbatches": 4, "virtual_pp": 2}, "microbatches to be a multiple of pp = 8, got 4"),
    "phase": ({"pp": 4, "virtual_pp": 2, "schedule": "same_phase"}, "virtual_pp: expected schedule 1f1b"),
    "undivided": ({"pp": 8, "embedding_as_layer": True}, "33 layers with embedding or loss, got 8; .* layers_first"),
    "both": ({"pp": 4, "layers_first": 4, "loss_as_layer": True}, "cannot go with embedding_as_layer"),
    "own": ({"pp": 4, "layers_first": 4}, r"a multiple of 3 other stages, got 32 - 4 = 28"),
    "too many": ({"pp": 2, "layers_first": 20, "layers_last": 20}, r"expected a sum of 32 layers, got 20 \+ 20"),
    "no pipeline": ({"pp": 1, "layers_last": 20}, "expected several stages, got pp = 1"),
    "layout": ({"pp": 4, "layout": (8, 8, 8)}, "layout: expected pp x virtual_pp = 4 x 1 numbers of layers, got 3"),
    "layout's sum": ({"pp": 2, "layout": (8, 8)}, "layout: expected a sum of 32 layers, got 16"),
    "layout and ends": ({"pp": 2, "layout": (8, 24), "layers_last": 24}, "layout: cannot go with layers_last"),
    "uneven chunks": ({"pp": 4, "layers_first": 5, "virtual_pp": 3}, "virtual_pp: expected a divisor of 5 layers"),
}


@pytest.mark.parametrize(("cut", "match"), INFEASIBLE.values(), ids=INFEASIBLE)
def test_what_cannot_run_is_one_line(cut, match):
    with pytest.raises(InfeasibleError, match=match) as caught:
        step(parallel={"tp": 4, "microbatches": 8} | cut)
    assert "\n" not in str(caught.value)


def test_a_batch_is_microbatches_by_another_name():
    """16 sequences of 32,768 tokens on two replicas."""
    whole = {"tp": 4, "pp": 4}
    by_batch, by_count = step(parallel=whole | {"batch": 2}), step(parallel=whole | {"microbatches": 4})
    assert by_batch == by_count == step(parallel=whole | {"batch": 2, "microbatches": 4})
    assert step(parallel=whole | {"batch": 1}) == step(parallel=whole)
    assert by_batch.memory[0].activations == pytest.approx(2 * step(parallel=whole).memory[0].activations, rel=0.1)


def test_without_a_context_a_batch_cuts_a_microbatch_into_sequences():
    """524,288 tokens on 8 replicas: 4 microbatches of 2 sequences of 8,192."""
    cut = {"microbatches": 4, "batch": 2}
    assert step(context=None, parallel=cut) == step(context=8192, parallel=cut)


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_sequences_of_a_microbatch_do_not_see_each_other(mask):
    cut = {"microbatches": 4, "batch": 2}
    dense = step(context=8192, mask=mask, parallel=cut)
    assert dense == step(context=8192, mask=f"{mask}_document", documents=[8192] * 64, parallel=cut)
    scenario = scenario_from(STEP | {"mask": mask, "context": None, "parallel": {"tp": 4, **cut}})
    assert flops_of(scenario, workload_of(scenario)) == pytest.approx(dense.flops)


@pytest.mark.parametrize(
    ("context", "cut", "match"),
    [
        (32768, {"batch": 3}, "batch: expected .* = 16 sequences of 32768 tokens, got 8 x 1 x 3 = 24"),
        (32768, {"batch": 2, "microbatches": 4}, "got 8 x 4 x 2 = 64; leave batch or microbatches out"),
        (
            32768,
            {"mask": "global_sliding", "batch": 2},
            "batch: several .* mask global_sliding; use a microbatch for each",
        ),
        (None, {"batch": 3}, "tokens: expected a multiple of dp x microbatches x batch = 8 x 1 x 3, got 524288"),
    ],
)
def test_a_batch_that_does_not_go_with_the_rest_is_one_line(context, cut, match):
    mask = cut.get("mask", "causal_document")
    with pytest.raises((ScenarioError, InfeasibleError), match=match) as caught:
        step(context=context, mask=mask, parallel={name: value for name, value in cut.items() if name != "mask"})
    assert "\n" not in str(caught.value)


def tried(advice):
    """All ways to cut that fit, those included that a bound shows to be slower."""
    return [*(one.parallel for one in advice.candidates), *(parallel for parallel, _ in advice.slower)]


def test_advice_tries_chunks_of_layers_and_says_so():
    advice = advise_step(scenario_from(STEP | {"strategy": "none", "parallel": {"tp": 4, "pp": 4, "cp": 1}}))
    found = advice.candidates
    assert {parallel.virtual_pp for parallel in tried(advice)} == {1, 2, 4}
    for one in found:
        assert predict(one.prediction.scenario).time_s == one.prediction.time_s
    assert words(found[0].parallel).endswith("virtual_pp 4")


def test_advice_keeps_what_is_said_of_stages():
    cut = {"tp": 4, "cp": 1, "embedding_as_layer": True, "loss_as_layer": True}
    advice = advise_step(scenario_from(STEP | {"strategy": "none", "parallel": cut}))
    assert {parallel.pp for parallel in tried(advice)} == {1, 2}
    batches = advise_step(scenario_from(STEP | {"strategy": "none", "parallel": {"tp": 4, "cp": 1, "batch": 2}}))
    assert {parallel.dp * parallel.microbatches for parallel in tried(batches)} == {8}
