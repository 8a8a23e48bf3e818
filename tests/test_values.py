"""Values of another size than keys, as in multi-head latent attention: bytes, numbers, prices and refusals."""

from pathlib import Path

import numeric
import pytest
from cases import ALL_KNOBS, ALL_PASSES, cluster, workload

from cpsim.case.load import scenario_from
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.prediction.predict import predict
from cpsim.schedule.check import validate
from cpsim.strategies import ANY_VALUES, STRATEGIES, plan

CASES = [(name, knobs) for name in ANY_VALUES for knobs in ALL_KNOBS[name]]
CASE = {"strategy": "none", "gpus": 1, "cluster": "h200-4", "tokens": 8192, "heads": 32, "kv_heads": 32}
LATENT = {"head_dim": 192, "value_dim": 128, "kernel": "cudnn"}
ABSORBED = {"heads": 128, "kv_heads": 1, "head_dim": 576, "value_dim": 512}


@pytest.mark.parametrize("pass_", ALL_PASSES)
@pytest.mark.parametrize(("name", "knobs"), CASES)
def test_schedules_are_valid_and_compute_attention(name, knobs, pass_):
    for mask in ("causal", "causal_document"):
        case = workload(mask, "uneven" if mask == "causal_document" else "one", head_dim=6, value_dim=4)
        try:
            schedule = plan(name, case, cluster(1 if name == "none" else 4), pass_, knobs)
        except InfeasibleError as reason:
            pytest.skip(str(reason))
        validate(schedule, case, pass_)
        numeric.check(schedule, case, numeric.any_order(schedule, seed=3))


def test_outputs_and_values_are_sent_as_small_as_they_are():
    """Of 6 elements of queries and keys and 3 of values, Ulysses sends queries, keys, values and outputs: 18 for a head
    that has keys of its own, where equal sizes are 24."""

    def sent(**dims):
        case = workload("causal", "one", "mha", dtype="fp64", **dims)
        return plan("ulysses", case, cluster(4), "fwd", {}).bytes_sent().sum()

    assert sent(head_dim=6, value_dim=3) / sent(head_dim=6) == pytest.approx(18 / 24)


def test_latent_attention_takes_its_own_time():
    def seconds(pass_, **dims):
        return predict(scenario_from(CASE | LATENT | {"pass": pass_} | dims)).time_s

    for pass_ in ALL_PASSES:
        small, large = (seconds(pass_, head_dim=n, value_dim=n) for n in (128, 192))
        assert small < seconds(pass_) < large


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - set(ANY_VALUES)))
def test_strategies_that_do_not_know_say_so(name):
    with pytest.raises(InfeasibleError, match="value_dim: values of another size"):
        plan(name, workload("causal", head_dim=6, value_dim=4), cluster(4), "fwd", {})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kernel": "fa2"}, InfeasibleError, "kernel fa2 runs values as large as keys, got values of 128 elements"),
        ({"kernel": "flex"}, InfeasibleError, "nobody has measured what they cost"),
        ({"model": "llama3-8b", "kv_heads": 8, "head_dim": 128}, ScenarioError, "belongs to attention alone"),
        ({"value_dim": 0}, ScenarioError, "value_dim"),
        (ABSORBED | {"kernel": "fa3", "pass": "bwd"}, InfeasibleError, "fa3 takes keys of 576 .* forward alone; use"),
        (ABSORBED | {"kernel": "cudnn"}, InfeasibleError, "cudnn does not take keys of 576 .* fa3 does, forward; use"),
        (ABSORBED | {"kernel": "fa4"}, InfeasibleError, "head_dim: 192, value_dim: 128 and as many kv_heads as heads"),
    ],
)
def test_refusals_say_why(changes, error, message):
    with pytest.raises(error, match=message):
        predict(scenario_from(CASE | LATENT | changes))


def test_attention_to_latents_is_priced_by_its_flop_beside_what_flashmla_states_and_sends_latents():
    case = ABSORBED | {"cluster": "dgx-h100", "profile": "h100-fa3", "kernel": "fa3", "mask": "causal", "pass": "fwd"}
    one = predict(case | {"gpus": 1, "strategy": "none", "tokens": 8192})
    assert one.tflops_per_gpu == pytest.approx(660, rel=0.15), "FlashMLA, dense decoding on H800"
    assert one.time_s_low < one.time_s * one.tflops_per_gpu / 660 < one.time_s_high
    assert any("nobody has measured it here" in note for note in one.notes)
    said = Path(__file__).parent.parent.joinpath("docs", "sparse-attention.md").read_text(encoding="utf-8")
    assert f"{one.tflops_per_gpu:.0f} TFLOP/s\nfor 8,192 tokens" in said
    tokens = 65536
    for layout in ("contiguous", "zigzag"):
        shared = predict(case | {"gpus": 8, "strategy": "allgather", "knobs": {"layout": layout}, "tokens": tokens})
        assert shared.bytes_sent_per_gpu == pytest.approx(7 / 8 * tokens * 576 * 2)
