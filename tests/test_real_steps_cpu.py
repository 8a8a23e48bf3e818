"""Whole training steps of PyTorch and Hugging Face on gloo: every way to cut one has the loss and gradients of none."""

import importlib.util
import json
import os
from types import SimpleNamespace

import pytest
from ranks import run_script

torch = pytest.importorskip("torch")

from cpsim.case.load import scenario_from  # noqa: E402
from cpsim.errors import InfeasibleError  # noqa: E402
from cpsim.real.steps import make  # noqa: E402

MODEL = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64, "vocab": 96}
CASE = {
    "model": MODEL,
    "framework": "torch",
    "compile": False,
    "cluster": "dgx-h100",
    "kernel": "sdpa_flash",
    "tokens": 128,
    "context": 32,
    "strategy": "none",
}
FSDP, NONE = {"sharding": "fsdp"}, {"sharding": "none"}
CUTS = [
    (1, FSDP),
    (1, NONE | {"recompute": "full"}),
    (1, NONE | {"recompute": "per_op"}),
    (1, NONE | {"loss_chunks": 4}),
    (1, NONE | {"microbatches": 4}),
    (2, FSDP),
    (2, NONE | {"microbatches": 2}),
    (2, NONE | {"tp": 2}),
    (2, FSDP | {"tp": 2, "recompute": "full"}),
    (2, FSDP | {"recompute": "per_op", "loss_chunks": 2, "microbatches": 2}),
    (4, FSDP | {"replicate": 2}),
    (4, FSDP | {"tp": 2, "recompute": "per_op"}),
]
CONTEXT_PARALLEL = [
    (2, NONE | {"cp": 2}, "zigzag_ring"),
    (2, FSDP | {"cp": 2, "recompute": "full"}, "allgather"),
    (2, FSDP | {"cp": 2}, "ring"),
]


def check(tmp_path, cases):
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps(CASE | case) + "\n" for case in cases), encoding="utf-8")
    assert run_script("steps_worker.py", path, tmp_path, timeout_s=200) == len(cases)


def test_every_cut_of_a_torch_step_has_the_gradients_of_an_uncut_one(tmp_path):
    check(tmp_path, [{"gpus": gpus, "parallel": cut} for gpus, cut in CUTS])


def test_context_parallel_steps_have_the_gradients_of_an_uncut_one(tmp_path):
    one = {"microbatches": 4}  # PyTorch's context parallelism takes one sequence at a time
    check(tmp_path, [{"gpus": n, "strategy": s, "parallel": cut | one} for n, cut, s in CONTEXT_PARALLEL])


@pytest.mark.slow
def test_compiled_steps_have_the_gradients_of_eager_ones(tmp_path):
    cuts = [(1, NONE), (1, FSDP | {"recompute": "full"}), (1, NONE | {"recompute": "per_op"}), (2, NONE | {"tp": 2})]
    check(tmp_path, [{"gpus": gpus, "parallel": cut, "compile": True} for gpus, cut in cuts])


def test_every_cut_of_a_hugging_face_step_has_the_gradients_of_an_uncut_one(tmp_path):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    cuts = [(1, NONE | {"recompute": "full"}), (1, FSDP | {"microbatches": 2}), (2, FSDP), (2, NONE)]
    check(tmp_path, [{"gpus": gpus, "parallel": cut, "framework": "huggingface"} for gpus, cut in cuts])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"framework": "megatron"}, "framework: megatron cannot be run here; expected one of torch, huggingface"),
        ({"parallel": {"pp": 2}}, "pp: .* got pp = 2"),
        ({"parallel": {"sharding": "zero1"}}, "sharding: expected none or fsdp, got zero1"),
        ({"parallel": {"recompute": "mlp"}}, "recompute: expected none, full or per_op, got mlp"),
        ({"parallel": {"tp": 2, "loss_chunks": 2}}, "loss_chunks: cannot be run with tp = 2"),
        ({"kernel": "fa4"}, "kernel: expected sdpa_flash, cudnn or fa2, got fa4"),
        ({"strategy": "ulysses", "parallel": {"cp": 2}}, "strategy: expected one of allgather, .* got ulysses"),
        ({"mask": "full"}, "mask: steps run here with causal, got full"),
        ({"parallel": {"microbatches": 3}}, "tokens: expected a multiple of dp x microbatches x context"),
    ],
)
def test_steps_that_cannot_run_here_say_why(change, reason):
    node = SimpleNamespace(cuda=False, size=2, rank=0, device=torch.device("cpu"))
    with pytest.raises(InfeasibleError, match=reason):
        make(scenario_from(CASE | {"gpus": 2} | change), node)
