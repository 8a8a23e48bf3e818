"""Training steps whose queries choose their keys: ops of an indexer and of absorbed latents, time, memory, and what
makes no sense."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from cpsim.case.formats import read_foreign
from cpsim.case.load import scenario_from
from cpsim.case.model import MODELS, model_from
from cpsim.case.resolve import flops_of, workload_of
from cpsim.case.sparse import PATTERNS
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.prediction.case import resolve
from cpsim.prediction.predict import predict
from cpsim.prediction.step.layer import Gemm
from cpsim.prediction.step.memory import chunk_memory, occupancy
from cpsim.prediction.step.program import live_bytes
from cpsim.prediction.steps import StepCase

TOKENS = 8192
DENSE = {"experts": 0, "top_k": 0, "expert_ffn": 0, "shared_experts": 0, "dense_layers": 0}
LATENT = replace(MODELS["deepseek-v3.2-exp"], layers=6, vocab=32000, **DENSE)
GROUPED = replace(MODELS["llama3-8b"], layers=6, vocab=32000)


def case_of(model=LATENT, tokens=TOKENS, **changes):
    model = asdict(model) if hasattr(model, "layers") else model
    base = {"gpus": 1, "cluster": "dgx-h100", "tokens": tokens, "model": model, "strategy": "none"}
    return scenario_from({**base, "kernel": "cudnn", "parallel": {"sharding": "none"}, **changes})


def model_for(scenario):
    case = resolve(scenario)
    steps = StepCase(case.scenario, case.cluster, case.profile)
    return steps, steps.model(steps.parallel(), str(scenario.strategy), scenario.knobs)


def flop(nodes):
    return sum(node.what.flops for node in nodes if isinstance(node.what, Gemm))


def test_products_are_those_of_the_linear_layers():
    """What is multiplied into queries and outputs is as much as what expands latents; indexers have no gradients."""
    _, model = model_for(case_of())
    layer = model._programs(TOKENS, -1)(1)
    assert flop(layer.forward) == 2 * TOKENS * LATENT.products()
    indexer = 2 * TOKENS * sum(inner * outer for inner, outer in LATENT.indexer().values())
    assert flop(layer.backward) == 2 * (flop(layer.forward) - indexer)
    assert indexer == 2 * TOKENS * (1536 * 64 * 128 + 7168 * 128 + 7168 * 64)


def test_weights_are_deepseeks():
    """0.85 billion more than DeepSeek-V3: 61 indexers."""
    more = MODELS["deepseek-v3.2-exp"].parameters() - MODELS["deepseek-v3"].parameters()
    assert more == 61 * (1536 * 64 * 128 + 7168 * 128 + 7168 * 64)


@pytest.mark.parametrize(
    ("model", "sparse", "alone"),
    [
        (LATENT, None, {"heads": 128, "kv_heads": 1, "head_dim": 576, "value_dim": 512, "sparse": "dsa"}),
        (GROUPED, "moba", {"heads": 32, "kv_heads": 8, "sparse": "moba"}),
        (GROUPED, "nsa", {"heads": 32, "kv_heads": 8, "sparse": "nsa"}),
        (GROUPED, "blocks", {"heads": 32, "kv_heads": 8, "sparse": "blocks"}),
    ],
)
@pytest.mark.parametrize("ranks", [1, 4])
def test_attention_takes_what_it_takes_alone(model, sparse, alone, ranks):
    """As the field of attention alone, the indexer's choice included; in a step after seconds of load, up to 2.3 %."""
    more = {"gpus": ranks, "strategy": "allgather" if ranks > 1 else "none"}
    if ranks > 1:
        more["knobs"] = {"layout": "zigzag"}
    step = {"parallel": {"sharding": "none", "cp": ranks}, **({"sparse": sparse} if sparse else {})}
    _, found = model_for(case_of(model, tokens=4 * TOKENS, **more, **step))
    (attended,) = found.attention.of([(4 * TOKENS,)])
    both = predict(
        {"cluster": "dgx-h100", "tokens": 4 * TOKENS, "kernel": "cudnn", "protocol": "streamed", **alone, **more}
    )
    assert both.time_s < 1.001 * attended.seconds < 1.025 * both.time_s


def test_work_is_counted_alike_everywhere():
    """By the scenario alone, and by what was simulated."""
    for scenario in (case_of(), case_of(GROUPED, sparse="moba")):
        step = steps_of(scenario)
        assert step.flops == pytest.approx(flops_of(scenario, workload_of(scenario)), rel=1e-6)


def steps_of(scenario):
    steps, _ = model_for(scenario)
    return steps.simulate(steps.parallel(), "none", {})


def test_choices_are_kept_for_the_backward_pass():
    """4 bytes for each of 2048 keys of every token and layer; computed again, of one layer at a time."""
    kept = PATTERNS["dsa"].top_k * 4 * TOKENS
    _, model = model_for(case_of())
    (attended,) = model.attention.of([(TOKENS,)])
    assert attended.kept == kept
    less, more = (model._programs(TOKENS, 0, 0, n)(4) for n in (0, kept))
    at = [live_bytes(run.forward, ("beside",), lambda _: 0, 1)[0][-1] for run in (less, more)]
    assert at[1] - at[0] == 4 * kept


@pytest.mark.parametrize("recompute", ["none", "mlp", "full"])
@pytest.mark.parametrize("tp", [1, 4])
def test_folded_layers_have_the_memory_of_all_of_them(recompute, tp):
    scenario = case_of(gpus=tp, parallel={"sharding": "none", "tp": tp, "recompute": recompute})
    _, model = model_for(scenario)
    make = model._programs(TOKENS, 0, 3000, 1000)
    for layers in (5, 6, 9):
        run = make(layers)
        live = live_bytes([*run.forward, *run.backward], ("dw",), lambda _: 0, 1)[0]
        assert chunk_memory(lambda count: occupancy(make(count), ("dw",)), layers).peak.sum() == live.max()


def test_recomputation_saves_memory_and_costs_time():
    found = [predict(case_of(parallel={"sharding": "none", "recompute": kind})) for kind in ("none", "mlp", "full")]
    assert [one.time_s for one in found] == sorted(one.time_s for one in found)
    memory = [one.memory["activations"] for one in found]
    assert memory == sorted(memory, reverse=True)


def test_every_tensor_parallel_rank_has_the_whole_indexer():
    """Attention is shared among ranks, its choice is not."""
    seconds = []
    for tp in (1, 4):
        _, model = model_for(case_of(gpus=tp, tokens=65536, parallel={"sharding": "none", "tp": tp}))
        (one,) = model.attention.of([(65536,)])
        seconds.append([parts[f"attention {p}"] for p, parts in zip(("fwd", "bwd"), one.parts, strict=True)])
        assert any("every tensor-parallel rank" in note for note in one.notes) is (tp > 1)
    (fwd, bwd), (fwd_4, bwd_4) = seconds
    assert bwd / bwd_4 == pytest.approx(4, rel=0.1)
    assert 1 < fwd / fwd_4 < 2


def test_chosen_keys_win_where_sequences_are_long():
    """MoBA's own code costs more than it saves at 8k tokens, and a fraction of dense attention at 512k."""
    faster = []
    for tokens in (8192, 2**19):
        chosen, dense = (
            case_of(GROUPED, tokens=tokens, sparse=s, parallel={"recompute": "full"}) for s in ("moba", None)
        )
        faster.append(predict(dense).time_s / predict(chosen).time_s)
    assert faster[0] < 1 < faster[1]


def test_intervals_are_those_of_what_was_not_measured():
    """Lists of blocks were not measured: a wide interval, and a note that says so."""
    long = {"tokens": 2**18, "cluster": "dgx-h200"}
    moba, blocks = (predict(case_of(GROUPED, **long, sparse=s)) for s in ("moba", {"kind": "blocks", "top_k": 512}))
    width = [np.log(one.time_s_high / one.time_s_low) for one in (moba, blocks)]
    assert width[1] > 1.2 * width[0]
    assert any("not measured as it runs" in note for note in blocks.notes)
    assert not any("not measured as it runs" in note for note in moba.notes)


CONFIG = {
    "model_type": "deepseek_v32",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "vocab_size": 129280,
}


def test_a_config_of_the_hub_gives_the_model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    found = read_foreign(path)
    assert model_from(found.fields["model"]) == MODELS["deepseek-v3.2-exp"]
    path.write_text(json.dumps({name: value for name, value in CONFIG.items() if name != "index_topk"}))
    with pytest.raises(ScenarioError, match="index_topk"):
        read_foreign(path)


def test_arguments_of_megatron_give_the_indexer(tmp_path):
    path = tmp_path / "run.sh"
    words = (
        "--num-layers 6 --hidden-size 7168 --num-attention-heads 128 --ffn-hidden-size 18432 --seq-length 4096 "
        "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
        "--v-head-dim 128 --vocab-size 32000 --swiglu --untie-embeddings-and-output-weights "
        "--experimental-attention-variant {} --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 "
        "--dsa-indexer-topk 1024"
    )
    path.write_text(f"torchrun pretrain_gpt.py {words.format('dsa')}\n")
    found = model_from(read_foreign(path).fields["model"])
    assert found == replace(LATENT, sparse=replace(PATTERNS["dsa"], top_k=1024))
    path.write_text(f"torchrun pretrain_gpt.py {words.format('gated_delta_net')}\n")
    with pytest.raises(ScenarioError, match="experimental_attention_variant: expected dsa"):
        read_foreign(path)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": "llama3-8b", "sparse": "dsa"}, "sparse: dsa chooses latents, of which the model has none"),
        ({"sparse": "moba"}, "sparse: expected dsa of a model with latents, got moba"),
        ({"model": "gpt-oss-20b", "sparse": "moba"}, "sparse: does not go with window"),
        ({"model": "nemotron-h-8b", "sparse": "moba"}, "sparse: does not go with recurrent"),
        ({"precision": "fp8"}, "sparse: steps are predicted in bf16"),
        ({"offload": "activations"}, "sparse: steps are predicted in bf16"),
        ({"trainable": {"lora": 8}}, "trainable: adapters are predicted with dense attention"),
        ({"model": "llama3-8b", "sparse": "moba", "part": "layer", "parallel": None}, "sparse: one layer"),
        ({"model": {**asdict(GROUPED), "sparse": "mobs"}}, "sparse: .*moba"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, match):
    with pytest.raises(ScenarioError, match=match):
        case_of(**changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"framework": "torch", "model": "llama3-8b", "sparse": "moba"}, "steps of torch cannot .* chosen keys"),
        ({"gpus": 2, "strategy": "zigzag_ring", "parallel": {"cp": 2}}, "sparse: chosen keys are planned for none"),
    ],
)
def test_who_cannot_says_so(changes, match):
    with pytest.raises(InfeasibleError, match=match):
        predict(case_of(**changes))
