"""Whole training steps of PyTorch and Hugging Face on gloo: every way to cut one has the loss and gradients of none."""

import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ranks import HERE, run_script
from scripts import load_script

torch = pytest.importorskip("torch")

from cpsim.case.load import scenario_from  # noqa: E402
from cpsim.case.resolve import flops_of, model_of, workload_of  # noqa: E402
from cpsim.errors import InfeasibleError  # noqa: E402
from cpsim.prediction.runs import load_runs  # noqa: E402
from cpsim.real.steps import make  # noqa: E402
from cpsim.real.steps.cut import cut_of  # noqa: E402
from cpsim.real.steps.megatron import _shard  # noqa: E402

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
]
ON_A_HOST = [
    (4, FSDP | {"replicate": 2}),
    (4, FSDP | {"tp": 2, "recompute": "per_op"}),
    (8, FSDP | {"tp": 2, "recompute": "full"}),
]
CONTEXT_PARALLEL = [
    (2, NONE | {"cp": 2}, "zigzag_ring"),
    (2, FSDP | {"cp": 2, "recompute": "full"}, "allgather"),
    (2, FSDP | {"cp": 2}, "ring"),
]
CONTEXT_PARALLEL_ON_A_HOST = [
    (n, FSDP | {"recompute": "full"} | cut, strategy)
    for n in (4, 8)
    for cut, strategy in [
        ({"cp": n}, "allgather"),
        ({"cp": n}, "zigzag_ring"),
        ({"tp": 2, "cp": n // 2}, "allgather"),
        ({"tp": 2, "cp": n // 2}, "zigzag_ring"),
    ]
]


def check(tmp_path, cases):
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps(CASE | case) + "\n" for case in cases), encoding="utf-8")
    assert run_script("steps_worker.py", path, tmp_path, timeout_s=200) == len(cases)


@pytest.mark.parametrize(
    "cuts", [CUTS, pytest.param(ON_A_HOST, marks=pytest.mark.slow)], ids=["one and two", "four and eight"]
)
def test_every_cut_of_a_torch_step_has_the_gradients_of_an_uncut_one(cuts, tmp_path):
    check(tmp_path, [{"gpus": gpus, "parallel": cut} for gpus, cut in cuts])


@pytest.mark.parametrize(
    "cuts",
    [CONTEXT_PARALLEL, pytest.param(CONTEXT_PARALLEL_ON_A_HOST, marks=pytest.mark.slow)],
    ids=["two", "four and eight"],
)
def test_context_parallel_steps_have_the_gradients_of_an_uncut_one(cuts, tmp_path):
    one = {"microbatches": 4}  # PyTorch's context parallelism takes one sequence at a time
    check(tmp_path, [{"gpus": n, "strategy": s, "parallel": cut | (one if "cp" in cut else {})} for n, cut, s in cuts])


@pytest.mark.slow
def test_compiled_steps_have_the_gradients_of_eager_ones(tmp_path):
    cuts = [(1, NONE), (1, FSDP | {"recompute": "full"}), (1, NONE | {"recompute": "per_op"}), (2, NONE | {"tp": 2})]
    check(tmp_path, [{"gpus": gpus, "parallel": cut, "compile": True} for gpus, cut in cuts])


def test_every_cut_of_a_hugging_face_step_has_the_gradients_of_an_uncut_one(tmp_path):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    cuts = [(1, NONE | {"recompute": "full"}), (1, FSDP | {"microbatches": 2}), (2, FSDP), (2, NONE)]
    check(tmp_path, [{"gpus": gpus, "parallel": cut, "framework": "huggingface"} for gpus, cut in cuts])


MEGATRON = {"framework": "megatron", "kernel": "cudnn"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"framework": "torchtitan"},
            "framework: torchtitan cannot be run here; expected one of torch, huggingface, m",
        ),
        (MEGATRON | {"kernel": "sdpa_flash"}, "kernel: expected cudnn or fa2, got sdpa_flash"),
        (MEGATRON | {"strategy": "usp", "parallel": {"cp": 2}}, "strategy: expected zigzag_ring, allgather or ulysses"),
        (MEGATRON | {"parallel": {"loss_chunks": 2}}, "loss_chunks: expected 1, got 2"),
        (MEGATRON, "framework: megatron needs package transformer_engine, which is not installed"),
        ({"parallel": {"pp": 2}}, "pp: .* got pp = 2"),
        ({"parallel": {"sharding": "zero1"}}, "sharding: expected none or fsdp, got zero1"),
        ({"parallel": {"recompute": "mlp"}}, "recompute: expected none, full or per_op, got mlp"),
        ({"parallel": {"tp": 2, "loss_chunks": 2}}, "loss_chunks: cannot be run with tp = 2"),
        ({"parallel": {"tp": 2, "tp_overlap": True}}, "tp_overlap: cannot be run here"),
        ({"precision": {"fp8": "rowwise"}}, "precision: expected bf16, got {'fp8': 'rowwise'}"),
        ({"kernel": "fa4"}, "kernel: expected sdpa_flash, cudnn or fa2, got fa4"),
        ({"strategy": "ulysses", "parallel": {"cp": 2}}, "strategy: expected allgather, .* got ulysses"),
        ({"mask": "full"}, "mask: steps run here with causal, got full"),
        ({"framework": "huggingface", "trainable": {"lora": 8}}, "trainable: steps run here train all weights"),
        ({"offload": "activations"}, "offload: steps run here keep activations on the GPU"),
        ({"parallel": {"microbatches": 3}}, "tokens: expected a multiple of dp x microbatches x context"),
    ],
)
def test_steps_that_cannot_run_here_say_why(change, reason):
    node = SimpleNamespace(cuda=False, size=2, rank=0, device=torch.device("cpu"))
    with pytest.raises(InfeasibleError, match=reason):
        make(scenario_from(CASE | {"gpus": 2} | change), node)


def test_steps_are_timed_as_one_window_and_those_that_cannot_run_are_recorded(tmp_path):
    cases, out = tmp_path / "cases.jsonl", tmp_path / "runs.jsonl"
    asked = [{"gpus": 1}, {"gpus": 1, "protocol": "streamed"}, {"gpus": 1, "parallel": {"sharding": "zero2"}}]
    cases.write_text("".join(json.dumps(CASE | case) + "\n" for case in asked), encoding="utf-8")
    command = [sys.executable, "-m", "cpsim.real.run", str(cases), "--cpu", "--seconds", "0.05", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=100)
    runs = load_runs(out)
    assert [run.error for run in runs if run.error] == ["sharding: expected none or fsdp, got zero2"]
    measured = [run for run in runs if not run.error]
    assert {run.scenario.protocol for run in measured} == {"synced", "streamed"}
    assert all(list(run.passes) == ["fwd_bwd"] and run.time_s > 0 for run in measured)


def test_megatron_cuts_sequences_as_zigzag_shards():
    tokens = torch.arange(16).expand(2, -1)
    shards = [_shard(tokens, place, 2)[0].tolist() for place in (0, 1)]
    assert shards == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]


@pytest.mark.parametrize(
    ("gpus", "of", "frameworks"),
    [(gpus, *who) for gpus in (1, 2) for who in (("", {"torch", "huggingface"}), ("megatron-", {"megatron"}))],
)
def test_cases_are_those_that_the_script_draws_and_can_run(gpus, of, frameworks):
    text = (HERE.parent / f"data/cases/steps-{of}{gpus}-h100.jsonl").read_text(encoding="utf-8")
    files = load_script("data/cases/steps.py").files()
    assert text == {path.name: text for path, text in files.items()}[f"steps-{of}{gpus}-h100.jsonl"]
    node = SimpleNamespace(cuda=True, size=gpus, rank=0)
    cuts = [cut_of(scenario_from(json.loads(line)), node) for line in text.splitlines()]
    assert {cut.scenario.framework for cut in cuts} == frameworks
    assert all(cut.parallel.num_gpus == gpus for cut in cuts)


def test_flop_of_a_step_are_six_per_weight_and_token_and_attention_of_each_sequence():
    scenario = scenario_from(CASE | {"gpus": 1})
    m = model_of(scenario)
    weights = m.layers * sum(a * b for a, b in m.linears(1).values()) + m.hidden * m.vocab
    attention = m.layers * 3.5 * 4 * m.heads * m.head_dim * 4 * (32 * 33 // 2)  # four sequences of 32 tokens
    assert flops_of(scenario, workload_of(scenario)) == pytest.approx(6 * weights * 128 + attention)
