"""Attention sinks: joined once whatever is merged, their gradients, bytes, and who joins them."""

from dataclasses import replace
from pathlib import Path

import numeric
import numpy as np
import pytest
from cases import ALL_PASSES, ALL_STRATEGIES, BLIND_MASK, cluster, workload

import cpsim
from cpsim.case.formats.huggingface import read
from cpsim.case.load import scenario_from
from cpsim.case.model import MODELS
from cpsim.errors import InfeasibleError, ScenarioError, ScheduleError
from cpsim.prediction.predict import predict
from cpsim.schedule.check import validate
from cpsim.schedule.schedule import UPDATE, Kind
from cpsim.strategies import plan
from cpsim.strategies.sinks import with_sinks

IDS = [f"{name}-{'-'.join(map(str, knobs.values()))}" for name, knobs in ALL_STRATEGIES]
every_strategy = pytest.mark.parametrize(("name", "knobs"), ALL_STRATEGIES, ids=IDS)
every_pass = pytest.mark.parametrize("pass_", ALL_PASSES)
GPT_OSS = {"cluster": "dgx-h100", "gpus": 8, "tokens": 2**17, "heads": 64, "kv_heads": 8, "head_dim": 64}


def planned(name, case, ranks, pass_, knobs):
    """None where the strategy cannot run the case without sinks either."""
    try:
        plan(name, replace(case, sinks=False), cluster(ranks), pass_, knobs)
    except InfeasibleError:
        return None
    return plan(name, case, cluster(ranks), pass_, knobs)


def joins(schedule):
    """Ops that join sinks, or add to sums of their gradients."""
    updates = schedule.op_of_access()[schedule.access_mode == UPDATE]
    return np.intersect1d(np.flatnonzero(schedule.kind == Kind.ELEMENTWISE), updates)


@every_pass
@every_strategy
def test_every_strategy_computes_softmax_with_one_column_more_and_its_gradients(name, knobs, pass_):
    cases = [("causal", "one", "gqa"), ("causal_document", "short", "mha"), (BLIND_MASK, "uneven", "mqa")]
    count = 0
    for ranks in (1, 2, 4, 8):
        for mask, documents, heads in cases:
            case = workload(mask, documents, heads, sinks=True)
            schedule = planned(name, case, ranks, pass_, knobs)
            if schedule is not None:
                validate(schedule, case, pass_)
                numeric.check(schedule, case, numeric.any_order(schedule, seed=ranks))
                count += 1
    assert count >= 3


def test_dense_attention_of_the_tests_has_the_sink_as_a_key_without_a_value():
    case = workload("causal", "one", "gqa", sinks=True)
    dense, plain = numeric.tensors(case), numeric.tensors(replace(case, sinks=False))
    assert np.array_equal(dense["q"], plain["q"])
    sink, lse = dense["sink"][0, :, 0], plain["out"][..., -1]
    assert dense["out"][..., -1] == pytest.approx(np.logaddexp(lse, sink))
    assert dense["o"] == pytest.approx(plain["o"] / (1 + np.exp(sink - lse))[..., None])
    step = 1e-6
    allowed = numeric.dense_mask(case.slices(), case.num_tokens)

    def loss(sinks):
        return (numeric.attend(dense["q"], dense["kv"], allowed, sinks)[..., :-1] * dense["dout"]).sum()

    for head in range(case.num_heads):
        moved = np.eye(case.num_heads)[head] * step
        slope = (loss(sink + moved) - loss(sink - moved)) / (2 * step)
        assert dense["dsink"][0, head, 0] == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("name", ["ring", "ulysses", "mesh"])
def test_a_sink_that_is_joined_twice_or_not_at_all_is_found(name):
    case = workload("causal", "one", "gqa", sinks=True)
    with pytest.raises(ScheduleError, match="met 0 times, expected once"):
        validate(plan(name, replace(case, sinks=False), cluster(2), "fwd", {}), case, "fwd")
    with pytest.raises(ScheduleError, match="met 2 times, expected once"):
        validate(with_sinks(plan(name, case, cluster(2), "fwd", {}), case, "fwd"), case, "fwd")


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("name", "knobs"), [("zigzag_ring", {}), ("ulysses", {}), ("allgather", {}), ("usp", {})])
def test_what_sinks_add_is_a_pass_over_outputs_and_an_all_reduce_of_a_float_for_each_head(name, knobs, ranks):
    """T tokens of a rank: 2 T O bytes are read and written in either pass, and 2 (P-1)/P of 4 bytes a head sent."""
    plain = workload("causal", "one", "mha", head_dim=64)
    case = replace(plain, sinks=True)
    outputs = case.num_tokens * case.num_heads * case.head_dim * 2 // ranks
    for pass_ in ALL_PASSES:
        with_sinks, without = (plan(name, w, cluster(ranks), pass_, knobs) for w in (case, plain))
        own = np.bincount(
            with_sinks.lane_rank[with_sinks.lane_start[joins(with_sinks)]],
            with_sinks.nbytes[joins(with_sinks)],
            ranks,
        )
        assert own.tolist() == [2 * outputs] * ranks
        more = 2 * (ranks - 1) / ranks * case.num_heads * 4 if pass_ == "bwd" else 0
        assert with_sinks.bytes_sent() - without.bytes_sent() == pytest.approx(np.full(ranks, more))
        assert with_sinks.flops(case.head_dim) == without.flops(case.head_dim)


@pytest.mark.parametrize("strategy", ["ulysses", "allgather", "zigzag_ring"])
def test_sinks_cost_little_of_full_attention_and_more_of_windows(strategy):
    window = {"mask": {"name": "causal_sliding_window", "window": 127}}
    more = [
        predict(case | {"sinks": True}).time_s / predict(case).time_s - 1
        for case in ({**GPT_OSS, "strategy": strategy}, {**GPT_OSS, "strategy": strategy, **window})
    ]
    assert 0 < more[0] < 0.005
    assert 5 * more[0] < more[1] < 0.1


def test_other_peoples_code_joins_them_where_its_kernel_does():
    case = {**GPT_OSS, "strategy": "ulysses", "implementation": "transformer-engine", "kernel": "cudnn", "sinks": True}
    assert any(note.startswith("sinks: not measured in cudnn of transformer-engine") for note in predict(case).notes)
    for changed, match in (
        ({"strategy": "zigzag_ring"}, "sinks: zigzag_ring of transformer-engine joins none"),
        ({"kernel": "fa3"}, "sinks: ulysses of transformer-engine joins them in cudnn, got fa3"),
        ({"implementation": "yunchang", "kernel": "fa2"}, "sinks: ulysses of yunchang joins none"),
    ):
        with pytest.raises(InfeasibleError, match=match):
            predict(case | changed)


def test_gpt_oss_has_them_and_its_steps_run_where_transformer_engine_joins_them():
    assert MODELS["gpt-oss-20b"].sinks
    assert not MODELS["llama3-8b"].sinks
    step = {"gpus": 8, "cluster": "dgx-h200", "tokens": 2**17, "model": "gpt-oss-20b", "framework": "megatron"}
    step |= {"parallel": {"cp": 8, "ep": 8}}
    assert cpsim.predict(step | {"strategy": "ulysses"}).time_s > 0
    with pytest.raises(InfeasibleError, match="sinks: megatron has none with allgather"):
        cpsim.predict(step | {"strategy": "allgather"})


def test_configs_of_gpt_oss_are_read_with_sinks():
    path = Path(__file__).parent / "formats" / "gpt-oss.json"
    assert read(path.read_text(encoding="utf-8"), str(path)).fields["model"]["sinks"] is True


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"model": "llama3-8b", "heads": 32, "head_dim": 128}, "sinks: belong to attention alone to all keys"),
        ({"sparse": {"kind": "moba"}}, "leave sinks or sparse out"),
        ({"sinks": 3}, "sinks"),
    ],
)
def test_what_makes_no_sense_is_said(fields, match):
    with pytest.raises(ScenarioError, match=match):
        scenario_from({**GPT_OSS, "strategy": "ulysses", "sinks": True, **fields})
