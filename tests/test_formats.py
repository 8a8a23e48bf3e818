"""Files of other tools: read right, or refused with the line that is wrong; and what is written is read back."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cpsim.case.formats import check_written, launch_text, read_foreign
from cpsim.case.formats.megatron import _layout
from cpsim.case.load import scenario_from
from cpsim.case.model import MODELS, PUBLISHED, known_model, model_from
from cpsim.case.resolve import parallel_of
from cpsim.errors import ScenarioError

FOLDER = Path(__file__).parent / "formats"
SHAPES = {
    "llama31-8b.json": "llama3.1-8b",
    "llama31-405b.json": "llama3.1-405b",
    "llama2-7b.json": "llama2-7b",
    "llama32-1b.json": "llama3.2-1b",
    "mistral-v01.json": "mistral-7b-v0.1",
    "mistral-v03.json": "mistral-7b",
    "mixtral.json": "mixtral-8x7b",
    "qwen25-7b.json": "qwen2.5-7b",
    "qwen3-32b.json": "qwen3-32b",
    "qwen3-moe.json": "qwen3-30b-a3b",
    "gpt-oss.json": "gpt-oss-20b",
    "llama3-fp8.sh": "llama3-8b",
    "one-line.txt": "llama3-8b",
    "a2a-p2p.args": "llama3-70b",
    "bridge.yaml": "llama3-8b",
    "deepseek-v3.json": "deepseek-v3",
    "deepseek.sh": "deepseek-v3",
    "kimi-k2.sh": "kimi-k2",
    "qwen3-next.json": "qwen3-next-80b-a3b",
    "nemotron-h-8b.json": "nemotron-h-8b",
    "nemotron-3-nano.json": "nemotron-3-nano-30b-a3b",
    "nemotron-h-8b.sh": "nemotron-h-8b",
    "nemotron-3-nano.sh": "nemotron-3-nano-30b-a3b",
    "kimi-linear.json": "kimi-linear-48b-a3b",
    "gemma3n-e4b.json": "gemma3n-e4b",
    "hunyuan-large.json": "hunyuan-large",
}
"""Files that hold the dimensions of a model that ships."""
RIGHT = {
    "llama3-8b.toml": {
        "framework": "torchtitan",
        "model": "llama3-8b",
        "gpus": 64,
        "context": 131072,
        "sequences": 8,
        "strategy": "allgather",
        "parallel": {"tp": 1, "cp": 8, "dp": 8, "batch": 1, "recompute": "full"},
    },
    "llama3-8b-old.toml": {"model": "llama3-8b", "compile": True, "parallel": {"batch": 1, "recompute": "per_op"}},
    "llama3-70b-hsdp.toml": {
        "gpus": 128,
        "sequences": 64,
        "precision": {"fp8": "rowwise"},
        "parallel": {"tp": 8, "dp": 16, "replicate": 2, "tp_overlap": True, "batch": 2, "recompute": "none"},
    },
    "qwen3.toml": {"model": "qwen3-32b", "strategy": "zigzag_ring", "gpus": 32, "sequences": 32},
    "llama3-debug.toml": {"context": 2048},
    "llama3-fp8.sh": {
        "gpus": 16,
        "context": 8192,
        "sequences": 128,
        "kernel": "cudnn",
        "strategy": "zigzag_ring",
        "precision": {"fp8": "current"},
        "parallel": {"tp": 1, "pp": 1, "cp": 2, "batch": 1, "sharding": "zero1", "recompute": "none"},
    },
    "mixtral.sh": {"gpus": 32, "sequences": 256, "parallel": {"pp": 4, "ep": 8, "virtual_pp": 2, "batch": 1}},
    "one-line.txt": {"context": 131072, "sequences": 128, "parallel": {"tp": 4, "cp": 8, "recompute": "full"}},
    "a2a-p2p.args": {
        "context": 262144,
        "strategy": "usp",
        "knobs": {"ulysses": 8, "placement": "head_first"},
        "parallel": {"tp": 8, "cp": 16, "recompute": "mlp"},
    },
    "bridge.yaml": {"context": 65536, "sequences": 64, "strategy": "allgather", "parallel": {"tp": 2, "cp": 4}},
    "nemo-1.yaml": {
        "gpus": 32,
        "context": 16384,
        "sequences": 128,
        "parallel": {"tp": 4, "pp": 2, "cp": 2, "virtual_pp": 4, "recompute": "full"},
    },
    "nemotron-h-8b.sh": {"gpus": 16, "strategy": "ulysses", "parallel": {"tp": 2, "cp": 2}},
    "nemotron-3-nano.sh": {"gpus": 32, "parallel": {"pp": 4, "ep": 8, "layout": [7, 7, 7, 8]}},
    "accelerate-cp.yaml": {"framework": "huggingface", "gpus": 8, "strategy": "zigzag_ring", "parallel": {"cp": 8}},
    "trl-sft.yaml": {"model": "qwen3-8b", "context": 32768, "parallel": {"batch": 1, "recompute": "full"}},
    "glm4-moe.json": {"model": {"dense_layers": 1, "shared_experts": 1, "experts": 128, "kv_heads": 8, "ffn": 10944}},
    "gemma3-27b.json": {"model": {"window": 1024, "window_pattern": 6, "kv_heads": 16, "layers": 62}},
}
"""What the fields of a file are, or some of them."""
WRONG = {
    "llama4.json": "line 7: llama4 cannot be predicted: three of four layers attend within chunks",
    "nemotron-order.json": "line 8: hybrid_override_pattern: expected 52 of M (Mamba-2), * (attention), and - or E",
    "gpt2.json": "line 5: gpt2 cannot be predicted: layers have LayerNorm",
    "layers-in-words.json": "line 12: num_hidden_layers: expected a whole number from 1, got 'thirty-two'",
    "pipeline.toml": "line 7: pipelines of torchtitan are not predicted, got 8",
    "wrong-rotation.toml": "line 8: parallelism.context_parallel_rotate_method: expected allgather, alltoall, got",
    "every-second-layer.toml": "line 9: selective of every second layer is not predicted",
    "not-torchtitan.toml": "expected torchtitan's sections [model], [training], [parallelism]; got 'tool'",
    "broken.toml": "not valid TOML",
    "wrong-sizes.args": "line 3: hierarchical_context_parallel_sizes: expected sizes of a2a and of p2p whose product",
    "four-ranks.sh": "line 5: tensor_model_parallel_size: expected a whole number from 1, got 'four'",
    "gpt3-fp16.sh": "line 9: fp16: steps were measured in bf16",
    "every-second-expert.sh": "line 6: moe_layer_freq: expected dense layers before those with experts",
    "hybrid.sh": "line 4: hybrid_layer_pattern: expected 52 of M (Mamba-2), * (attention), and - or E (MLP) each",
    "hybrid-both.sh": "line 1: hybrid_layer_pattern: expected - or E, got both",
    "nothing.sh": "expected Megatron's arguments",
    "bridge-wrong.yaml": "line 7: cp_comm_type: expected p2p, all_gather, a2a, a2a+p2p, got 'ring'",
    "accelerate-deepspeed.yaml": "line 4: distributed_type DEEPSPEED is not predicted; use FSDP",
    "accelerate-fsdp1.yaml": "line 4: FSDP version 1 is not predicted",
    "accelerate-fp16.yaml": "line 2: mixed_precision fp16 is not predicted",
    "trl-unknown.yaml": "line 1: model ours/secret-9b is not known",
}
"""What is said of a file that cannot be read."""


def test_layouts_of_stages_are_read_and_written_as_megatron_does():
    """Megatron-Core 0.15, transformer/pipeline_parallel_layer_layout.py: E embedding, t decoder layer, L loss."""
    parallel = read_foreign(FOLDER / "kimi-k2.sh").fields["parallel"]
    assert parallel["layout"] == [4] * 15 + [1]
    assert (parallel["pp"], parallel["virtual_pp"], parallel["ep_overlap"]) == (4, 4, True)
    assert parallel["dispatcher"] == "flex"
    assert _layout("E|t*2|L", "") == [0, 2, 0]
    for said in ("E|tmL", "Et|tDL", "t(t", ""):
        with pytest.raises(ScenarioError, match=r"predict several|expected E, t and L"):
            _layout(said, "line 1")


def test_every_file_is_read_or_refused():
    names = {path.name for path in FOLDER.iterdir()}
    assert names == {*SHAPES, *RIGHT, *WRONG, "scenario.yaml"}
    assert len(names) > 40
    assert read_foreign(FOLDER / "scenario.yaml") is None


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_those_that_ship(name):
    reading = read_foreign(FOLDER / name)
    assert model_from(reading.fields["model"]) == MODELS[SHAPES[name]]
    assert reading.said


@pytest.mark.parametrize("name", RIGHT)
def test_fields_are_read(name):
    found = read_foreign(FOLDER / name).fields
    for field, value in RIGHT[name].items():
        if isinstance(value, dict):
            assert {key: found[field].get(key) for key in value} == value
        else:
            assert found[field] == value


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_wrong_is_refused_with_its_line(name):
    with pytest.raises(ScenarioError, match=re.escape(WRONG[name])) as error:
        read_foreign(FOLDER / name)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_a_branch_of_a_script_is_a_caveat():
    (caveat,) = read_foreign(FOLDER / "llama3-fp8.sh").caveats
    assert caveat == "fp8_format, fp8_recipe in a branch that is taken to run"


CUTS = [
    ("megatron", {"tp": 2, "pp": 2, "cp": 4, "virtual_pp": 2, "recompute": "mlp"}, "usp", {"ulysses": 2}),
    ("megatron", {"tp": 8, "cp": 8, "recompute": "full"}, "zigzag_ring", {}),
    ("megatron", {"tp": 1, "cp": 8}, "ulysses", {}),
    ("megatron", {"tp": 4, "cp": 1, "sharding": "none"}, "none", {}),
    ("torchtitan", {"tp": 2, "cp": 4, "recompute": "per_op", "sharding": "fsdp"}, "allgather", {"layout": "zigzag"}),
    ("torchtitan", {"tp": 1, "cp": 8, "replicate": 2, "recompute": "full", "sharding": "fsdp"}, "zigzag_ring", {}),
    ("huggingface", {"tp": 2, "cp": 2, "recompute": "full", "sharding": "fsdp"}, "zigzag_ring", {}),
    ("huggingface", {"tp": 1, "cp": 1, "sharding": "fsdp", "batch": 1}, "none", {}),
]


@pytest.mark.parametrize(("framework", "cut", "strategy", "knobs"), CUTS)
def test_what_is_written_is_read_back(framework, cut, strategy, knobs):
    fields = {"gpus": 64, "cluster": "dgx-h100", "model": "llama3-8b", "seq_len": "32k", "batch": 64}
    scenario = scenario_from(
        fields
        | {"framework": framework, "parallel": {"recompute": "none", **cut}, "strategy": strategy, "knobs": knobs}
    )
    parallel = parallel_of(scenario.parallel, 64, scenario.num_sequences)
    text = launch_text(scenario, parallel)
    assert not check_written(text, scenario, parallel)
    other = replace(parallel, tp=parallel.tp * 2, dp=parallel.dp // 2)
    assert any(line.startswith("tp:") for line in check_written(text, scenario, other))
    assert all(len(line) <= 80 for line in text.splitlines() if "SFTConfig" not in line)


def test_models_are_known_by_their_repositories():
    for name, one in PUBLISHED.items():
        assert known_model(name) is one
        assert known_model(one.hub).hub == one.hub or known_model(one.hub).model == one.model
    assert known_model("meta-llama/Llama-3.1-8B-Instruct").name == "llama3.1-8b"
    assert known_model("nobody/nothing-1b") is None


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama3.1-405b", 405.9), ("qwen3-235b-a22b", 235.1), ("mixtral-8x22b", 140.6), ("gpt-oss-120b", 116.8)],
)
def test_models_have_their_published_size(name, billions):
    assert MODELS[name].parameters() / 1e9 == pytest.approx(billions, abs=0.1)
