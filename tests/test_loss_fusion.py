"""Megatron's cross entropy: three kinds of kernels, what they move and hold, and gradients that stand in for others."""

from dataclasses import replace

import pytest
from layer_cases import there_after

from cpsim.case.formats.megatron import read
from cpsim.case.model import MODELS
from cpsim.errors import InfeasibleError
from cpsim.prediction.predict import predict
from cpsim.prediction.step.frameworks import LOSS_KERNELS, MEGATRON, Sizes

STEP = {
    "framework": "megatron",
    "strategy": "none",
    "model": {"layers": 1, "hidden": 1024, "heads": 8, "kv_heads": 8, "ffn": 2816, "vocab": 128000},
    "gpus": 2,
    "cluster": "dgx-h200",
    "kernel": "cudnn",
    "mask": "causal",
    "tokens": 16384,
    "context": 16384,
}
LOGITS = 16384 * 128000


def step(fusion, tp=1, **changes):
    parallel = {"tp": tp, "dp": 2 // tp, "sharding": "none", "loss_fusion": fusion, "cuda_graphs": "layers"}
    tokens = STEP["tokens"] * (2 // tp)
    return predict(STEP | {"tokens": tokens, "parallel": parallel} | changes)


def test_what_is_usual_is_compiled():
    assert step(None).time_s == step("native").time_s
    assert step(None).peak_memory_bytes == step("native").peak_memory_bytes


@pytest.mark.parametrize("tp", [1, 2])
def test_transformer_engine_holds_no_logits_in_fp32(tp):
    held = {fusion: step(fusion, tp).memory["logits"] for fusion in ("te", "none", "native")}
    logits = LOGITS // tp
    assert held["te"] == pytest.approx(2 * logits, rel=1e-3)
    assert held["none"] == pytest.approx((2 + 4) * logits, rel=1e-3)
    assert held["native"] == pytest.approx((2 + 4 + 4) * logits, rel=1e-3)


@pytest.mark.parametrize("tp", [1, 2])
def test_it_is_the_fastest_too(tp):
    engine, native, plain = (step(fusion, tp).time_s for fusion in ("te", "native", "none"))
    assert engine < native < plain


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("fusion", ["none", "native", "te"])
def test_every_tensor_that_is_read_was_made_or_is_there(fusion, tp):
    code = MEGATRON.losses[fusion](Sizes(model=MODELS["llama3-8b"], tp=tp, tokens=4096), False, 1)
    there = there_after((*code.forward, *code.backward), {"x", "weights"})
    assert "dx" in there
    assert code.kept <= there


def test_kernels_move_what_their_source_says():
    """Bytes of a logit: casts, differences, exponentials and quotients, the compiled ones as in the trace of a step."""
    moved = {}
    for fusion in ("none", "native", "te"):
        code = MEGATRON.losses[fusion](Sizes(model=MODELS["llama3-8b"], tp=1, tokens=64), False, 1)
        nodes = [n for n in (*code.forward, *code.backward) if getattr(n.what, "kind", "") == "copy"]
        moved[fusion] = sum(n.what.nbytes for n in nodes) / (64 * MODELS["llama3-8b"].vocab)
    assert moved == {"none": 10 + 20 + 8 + 14, "native": 6 + 16 + 8 + 8 + 10, "te": 6 + 4}
    assert len(LOSS_KERNELS) == 5


def test_other_frameworks_have_no_choice():
    with pytest.raises(InfeasibleError, match="loss_fusion: expected framework megatron, got torch; leave it out"):
        predict(STEP | {"framework": "torch", "kernel": "sdpa_flash", "parallel": {"loss_fusion": "te"}})


@pytest.mark.parametrize(
    ("flags", "fusion"),
    [
        ("", "none"),
        ("--cross-entropy-loss-fusion", None),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "te"),
    ],
)
def test_arguments_say_it(flags, fusion):
    arguments = "--num-layers 2 --hidden-size 1024 --num-attention-heads 8 --seq-length 4096 --vocab-size 32000 "
    found = read(f"python pretrain_gpt.py {arguments} --micro-batch-size 1 --global-batch-size 8 {flags}", "run.sh")
    assert found.fields["parallel"].get("loss_fusion") == fusion


def test_a_gradient_stands_in_for_all_weights_of_a_shape():
    """Two layers alike add none to those of one; four of half the width are of other shapes, half the bytes."""
    model = replace(MODELS["llama3-8b"], layers=2)
    assert model.weight_shapes(1, dense=False) == replace(model, layers=1).weight_shapes(1, dense=False)
    shapes = model.weight_shapes(2, dense=False)
    assert sum(a * b for a, b in shapes) * 2 == sum(a * b for a, b in model.weight_shapes(1, dense=False))
    routed = replace(model, experts=8, top_k=2, expert_ffn=1024)
    assert len(routed.weight_shapes(1, dense=True)) == len(routed.weight_shapes(1, dense=False)) + 2
