"""Layers that attend to keys and values of an earlier layer: sizes, what they run and keep, and whole steps."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from layer_cases import there_after

from cpsim.case.formats import read_foreign
from cpsim.case.load import scenario_from
from cpsim.case.model import MODELS, Model
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.prediction.predict import predict
from cpsim.prediction.step.frameworks import FRAMEWORKS, Sizes
from cpsim.prediction.step.layer import ElementwisePass, Gemm
from cpsim.prediction.step.recurrent import SHARED_KEYS
from cpsim.prediction.step_advice import advise_step

T = 8192
PLAIN = Model(layers=8, hidden=2048, heads=16, kv_heads=8, head_dim=128, ffn=8192, vocab=32000)
BORROWS = replace(PLAIN, kv_shared_layers=PLAIN.layers)
KEYS = 2 * 8 * 128
"""Elements of a token's keys and values."""
FORMATS = Path(__file__).parent / "formats"


def step(model: Model, **changes: Any) -> Any:
    """One sequence on one GPU, or as the changes say."""
    fields = {name: value for name, value in asdict(model).items() if value or name == "gated"}
    given: dict[str, Any] = {"cluster": "dgx-h100", "gpus": 1, "mask": "causal", "kernel": "cudnn", "strategy": "none"}
    return predict({**given, "framework": "megatron", "model": fields, "tokens": T, "context": T, **changes})


def test_models_have_their_published_size() -> None:
    """Hunyuan-Large (2024), table 1: 389 billion, 52 active; its word embeddings are tied, which Model counts twice."""
    hunyuan = MODELS["hunyuan-large"]
    tied = hunyuan.vocab * hunyuan.hidden
    assert (hunyuan.parameters() - tied) / 1e9 == pytest.approx(389, rel=2e-3)
    assert (hunyuan.active_parameters() - tied) / 1e9 == pytest.approx(52, rel=0.02)


def test_a_layer_that_borrows_lacks_the_weights_of_keys_and_values() -> None:
    half = replace(PLAIN, kv_shared_layers=4)
    assert [(share, model.borrows) for share, model in half.kinds] == [(0.5, False), (0.5, True)]
    assert PLAIN.parameters() - half.parameters() == 4 * 2048 * KEYS
    assert PLAIN.products() - half.products() == 2048 * KEYS / 2


@pytest.mark.parametrize("framework", ["megatron", "torch", "huggingface", "torchtitan"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_layers_read_what_was_made_or_borrowed(framework: str, compiled: bool, tp: int) -> None:
    code = FRAMEWORKS[framework].runs(Sizes(BORROWS, tp, T), compiled, None, False)
    borrowed = {"k", "v"} if framework != "megatron" else set()
    there_after(code.forward, {"x", "weights", *borrowed})
    assert "dx" in there_after(code.backward, {"x", "weights", "dy", *borrowed, *code.kept})
    whats = [node.what for node in (*code.forward, *code.backward)]
    products = sum(what.m * what.n * what.k for what in whats if isinstance(what, Gemm))
    assert products == 3 * T * sum(inner * outer for inner, outer in BORROWS.linears(tp).values())
    summed = [node.what for node in code.backward if {"dk", "dv"} <= {*node.reads} or "dk dv" in node.reads]
    assert [what.nbytes for what in summed if isinstance(what, ElementwisePass)] == [6 * T * KEYS // tp]


@pytest.mark.parametrize("framework", ["megatron", "torch"])
def test_keys_are_kept_by_the_layer_that_made_them_alone(framework: str) -> None:
    def kept(model: Model) -> int:
        code = FRAMEWORKS[framework].runs(Sizes(model, 1, T), True, None, False)
        return sum(nbytes for node in code.forward for name, nbytes in node.makes.items() if name in code.kept)

    assert kept(PLAIN) - kept(BORROWS) == 2 * T * KEYS


def test_steps_are_on_the_line_between_their_kinds() -> None:
    seconds, memory = [], []
    for shared in (0, 2, 4):
        made = step(replace(PLAIN, kv_shared_layers=shared))
        seconds.append(made.time_s)
        memory.append(made.memory["weights"] + made.memory["optimizer"] + made.memory["activations"])
    assert seconds[0] > seconds[1] > seconds[2]
    assert seconds[1] == pytest.approx((seconds[0] + seconds[2]) / 2, rel=0.01)
    assert memory[0] - memory[1] == pytest.approx(memory[1] - memory[2], rel=0.1)
    assert SHARED_KEYS in made.notes


def test_context_parallel_ranks_exchange_keys_in_every_layer() -> None:
    cut = {"gpus": 4, "tokens": 4 * T, "context": 4 * T, "strategy": "zigzag_ring", "parallel": {"cp": 4}}
    own, half = (step(replace(PLAIN, kv_shared_layers=shared), **cut) for shared in (0, 4))
    assert half.parts_s["transfer"] == pytest.approx(own.parts_s["transfer"], rel=1e-9)
    weights = 4 * 2048 * KEYS
    assert own.memory["weights"] - half.memory["weights"] == pytest.approx(2 * weights, rel=0.01)


def test_a_config_is_advised() -> None:
    foreign = read_foreign(FORMATS / "gemma3n-e4b.json")
    assert foreign is not None
    model = foreign.fields["model"]
    assert (model["kv_shared_layers"], model["window"], model["window_pattern"]) == (15, 512, 5)
    case = {"gpus": 8, "cluster": "dgx-h100", "model": model, "tokens": 8 * 32768, "context": 32768, "kernel": "fa2"}
    asked = scenario_from({**case, "mask": "causal", "parallel": {"tp": 1, "pp": 1}})
    found = advise_step(asked).recommended.step
    shorter = {**asked.to_dict(), "model": {**model, "kv_shared_layers": 0}}
    assert found.time_s < advise_step(scenario_from(shorter)).recommended.step.time_s


def test_layers_that_differ_in_their_mlp_are_refused(tmp_path: Path) -> None:
    value = json.loads((FORMATS / "gemma3n-e4b.json").read_text())
    value["text_config"]["intermediate_size"][3] = 8192
    path = tmp_path / "config.json"
    path.write_text(json.dumps(value))
    with pytest.raises(ScenarioError, match="intermediate_size: expected the same of every layer"):
        read_foreign(path)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"kv_shared_layers": 8}, "kv_shared_layers: expected less than 8 layers, got 8"),
        ({"kv_shared_layers": 2, "kv_rank": 512, "rope_dim": 64, "kv_heads": 16}, "does not go with kv_rank"),
    ],
)
def test_what_makes_no_sense_is_one_line(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ScenarioError, match=match):
        step(replace(PLAIN, **changes))


def test_adapters_are_refused() -> None:
    with pytest.raises(InfeasibleError, match="share keys are predicted without adapters"):
        step(replace(PLAIN, kv_shared_layers=2), trainable={"lora": 16})
