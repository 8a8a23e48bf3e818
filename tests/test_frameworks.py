"""Frameworks: every one steps with all that it has, and its memory is that of its program op by op."""

import itertools

import numpy as np
import pytest

from cpsim.case.load import scenario_from
from cpsim.case.resolve import cluster_of, model_of
from cpsim.errors import InfeasibleError
from cpsim.models.profile import load_profile
from cpsim.prediction.predict import predict
from cpsim.prediction.step.attention import Attended
from cpsim.prediction.step.frameworks import FRAMEWORKS
from cpsim.prediction.step.memory import KINDS, _live, chunk_memory, communicators, occupancy, stage_memory
from cpsim.prediction.step.pipeline import one_f_one_b_order
from cpsim.prediction.step.program import BLOCK, SHARD, Node, live_bytes
from cpsim.prediction.steps import StepCase

MODEL = {"layers": 4, "hidden": 2048, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 8192, "vocab": 32000}
STEP = {
    "gpus": 4,
    "cluster": "dgx-h100",
    "model": MODEL,
    "tokens": 4 * 4096,
    "kernel": "sdpa_flash",
    "strategy": "none",
}


def having(name):
    """Kinds of sharding and recomputation of a framework, and whether it compiles."""
    one = FRAMEWORKS[name]
    return itertools.product(one.shardings, one.recomputes, (None,) if one.compiles is None else (False, True))


ALL = [(name, *how) for name in FRAMEWORKS for how in having(name)]


def case_of(framework="megatron", sharding=None, recompute="none", compiled=None, **changes):
    parallel = {"sharding": sharding, "recompute": recompute} | changes.pop("parallel", {})
    fields = STEP | {"framework": framework, "compile": compiled, "parallel": parallel} | changes
    return scenario_from({name: value for name, value in fields.items() if value is not None})


def model_for(framework, sharding, recompute, compiled, **changes):
    """How the step is simulated, and its tokens on a rank."""
    scenario = case_of(framework, sharding, recompute, compiled, **changes)
    case = StepCase(scenario, cluster_of(scenario), load_profile("h100"))
    parallel = case.parallel()
    tokens = scenario.num_tokens // (parallel.dp * parallel.microbatches * parallel.cp)
    return case.model(parallel, "none", {}), tokens


@pytest.mark.parametrize(("framework", "sharding", "recompute", "compiled"), ALL)
def test_every_framework_steps_with_all_that_it_has(framework, sharding, recompute, compiled):
    found = predict(case_of(framework, sharding, recompute, compiled))
    assert 0 < found.time_s_low < found.time_s < found.time_s_high
    assert sum(found.parts_s.values()) == pytest.approx(found.time_s)
    assert found.fits
    assert found.memory["weights"] > 0
    assert found.tokens_per_s_per_gpu == pytest.approx(4096 / found.time_s)
    assert 0 < found.mfu < 1


@pytest.mark.parametrize(("framework", "sharding", "recompute", "compiled"), ALL)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("chunks", [1, 8])
@pytest.mark.parametrize("kept", [0, 1000])
def test_folded_layers_have_the_memory_of_all_of_them(framework, sharding, recompute, compiled, tp, chunks, kept):
    parallel = {"tp": tp, "loss_chunks": chunks}
    model, tokens = model_for(framework, sharding, recompute, compiled, parallel=parallel)
    stays = (SHARD,) if sharding == "fsdp" else ()
    make = model._programs(tokens, 0, 3 * kept, kept)
    for layers in (5, 6, 9):
        chunk = {0: chunk_memory(lambda count: occupancy(make(count), stays), layers)}
        folded = stage_memory(chunk, one_f_one_b_order(0, 1, 1), (0, 0, 0))
        live = _live(make(layers), stays)
        assert folded.total == live.sum(axis=0).max()
        most = live[:, live.sum(axis=0) == folded.total].T.tolist()
        assert [getattr(folded, kind) for kind in KINDS] in most


@pytest.mark.parametrize(("framework", "sharding", "compiled"), sorted({(f, s, c) for f, s, _, c in ALL}, key=str))
def test_more_recomputation_needs_less_memory_and_takes_longer(framework, sharding, compiled):
    order = [kind for kind in ("none", "per_op", "mlp", "full") if kind in FRAMEWORKS[framework].recomputes]
    found = [predict(case_of(framework, sharding, kind, compiled, host=0.1)) for kind in order]
    for less, more in itertools.pairwise(found):
        assert more.time_s > less.time_s
        assert more.memory["activations"] < less.memory["activations"]


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_a_step_of_one_replica_needs_nothing_said_of_sharding(framework):
    found = predict(case_of(gpus=2, tokens=4096, framework=framework, sharding=None, parallel={"tp": 2}))
    assert found.time_s > 0


@pytest.mark.parametrize("framework", ["torch", "huggingface"])
def test_one_replica_has_nothing_to_shard(framework):
    alone = {"gpus": 1, "tokens": 8192, "framework": framework, "host": 0.1}
    whole, unsaid = (predict(case_of(sharding=sharding, **alone)) for sharding in ("none", None))
    assert (unsaid.time_s, unsaid.memory) == (whole.time_s, whole.memory)
    sharded = predict(case_of(sharding="fsdp", **alone))
    assert sharded.parts_s["matrix products"] == pytest.approx(whole.parts_s["matrix products"], rel=1e-9)
    assert sharded.memory["activations"] == whole.memory["activations"]


@pytest.mark.parametrize("framework", ["torch", "torchtitan", "huggingface"])
def test_more_shards_hold_less(framework):
    hybrid = predict(case_of(framework, "fsdp", parallel={"replicate": 2}))
    whole = predict(case_of(framework, "fsdp"))
    assert hybrid.memory["optimizer"] == pytest.approx(2 * whole.memory["optimizer"], rel=1e-6)
    assert hybrid.needed_bytes > whole.needed_bytes


@pytest.mark.parametrize("framework", ["torch", "torchtitan", "huggingface"])
def test_a_loss_in_parts_holds_less(framework):
    whole, parts = (predict(case_of(framework, parallel={"loss_chunks": chunks})) for chunks in (1, 8))
    assert parts.memory["logits"] < whole.memory["logits"] / 2
    assert parts.time_s > whole.time_s


@pytest.mark.parametrize(
    ("framework", "changes", "match"),
    [
        ("torchtitan", {"sharding": "none"}, "sharding: torchtitan has fsdp, got none"),
        ("megatron", {"sharding": "fsdp"}, "sharding: megatron has none, zero1, got fsdp"),
        ("huggingface", {"recompute": "per_op"}, "recompute: huggingface has none, full, got per_op"),
        ("torch", {"parallel": {"pp": 2}}, "pp: steps of torch are predicted without pipelines, got pp = 2"),
        ("megatron", {"parallel": {"replicate": 2}}, "replicate: belongs to sharding fsdp; leave it out"),
    ],
)
def test_what_a_framework_lacks_is_one_line(framework, changes, match):
    with pytest.raises(InfeasibleError, match=match):
        predict(case_of(framework, **changes))


def test_memory_comes_in_blocks():
    nodes = [Node(None, (), {"a": 1}), Node(None, ("a",), {"b": BLOCK + 1}), Node(None, ("b",), {})]
    assert live_bytes(nodes, (), lambda _: 0, 1).tolist() == [[BLOCK, 3 * BLOCK, 2 * BLOCK]]
    assert live_bytes(nodes, ("a",), lambda _: 0, 1).tolist() == [[BLOCK, 3 * BLOCK, 3 * BLOCK]]


@pytest.mark.parametrize(
    ("parallel", "gigabytes"),
    [({"dp": 1, "tp": 1}, 0.0), ({"dp": 4}, 0.3), ({"tp": 2}, 0.6), ({"cp": 4}, 0.77), ({"cp": 2}, 1.07)],
    ids=str,
)
def test_communicators_are_of_the_groups_that_talk(parallel, gigabytes):
    gpus = 1 if parallel.get("dp") == 1 else 4
    cut = FRAMEWORKS["torch"].cut(case_of(gpus=gpus, parallel=parallel).parallel, gpus, 1)
    assert communicators(cut) == pytest.approx(gigabytes * 1e9)


def test_memory_beside_tensors_is_what_the_driver_saw():
    from cpsim.calibrate.recipes import DATA
    from cpsim.prediction.runs import load_runs

    runs = [
        run
        for folder in ("h", "i")
        for path in sorted((DATA / f"runs/h100x2-1127{folder}").glob("*.jsonl"))
        for run in load_runs(path)
        if not run.error
    ]
    assert len(runs) > 70
    first = [runs[0]] + [now for before, now in itertools.pairwise(runs) if before.scenario.gpus != now.scenario.gpus]
    for run in [one for one in runs if one.scenario.gpus == 1] + first:
        (window,) = run.passes.values()
        beside = np.subtract(window.memory_bytes["used"], window.memory_bytes["reserved"]).max()
        memory = predict(run.scenario).memory
        assert memory["communicators"] + memory["context"] == pytest.approx(beside, rel=0.02)


def test_what_attention_keeps_is_there_in_every_layer():
    model, tokens = model_for("torch", "fsdp", "none", True)
    batch = [[(tokens,)] for _ in range(4)]
    plain = model.memory(batch)[0]
    more = model.memory(batch, [[Attended(({}, {}), 7_000_000, 0.0, 0, kept=5_000_000)]] * 4)[0]
    layers = model_of(case_of()).layers
    assert more.activations - plain.activations == pytest.approx(layers * 5_000_000, rel=0.01)
