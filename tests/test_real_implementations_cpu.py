"""Other people's context parallel code through our adapters: on gloo, against dense attention."""

import importlib.util
import json

import pytest
from ranks import HERE, run_script

pytest.importorskip("torch")

PACKAGES = {"ring-flash-attn": "ring_flash_attn", "yunchang": "yunchang", "torch": "torch"}
DENSE = ("full", "causal")
CASES = {
    "ring-flash-attn": [
        *(("ring", {}, mask) for mask in (*DENSE, "full_document", "causal_document")),
        *(("zigzag_ring", {}, mask) for mask in ("causal", "causal_document")),
        ("striped_ring", {}, "causal"),
        *(("allgather", {}, mask) for mask in (*DENSE, "full_document", "causal_document")),
        ("allgather", {"heads_per_gather": 1}, "causal_document"),
    ],
    "yunchang": [
        *(("ulysses", {}, mask) for mask in DENSE),
        *(("usp", {"ulysses": 2, "ring": "basic"}, mask) for mask in DENSE),
        ("usp", {"ulysses": 2}, "causal"),
        ("usp", {"ulysses": 2, "placement": "context_first"}, "causal"),
        ("usp", {"ulysses": 4}, "causal"),
        ("usp", {"ulysses": 4, "ring": "basic"}, "full"),
    ],
    "torch": [
        ("ring", {}, "full"),
        ("ring", {}, "causal"),
        ("zigzag_ring", {}, "causal"),
        ("allgather", {}, "causal"),
        ("allgather", {"layout": "contiguous"}, "causal"),
        ("allgather", {"layout": "contiguous"}, "full"),
    ],
}


def scenarios(name, num_ranks):
    kernel = "sdpa_flash" if name == "torch" else "fa2"
    common = {
        "implementation": name,
        "kernel": kernel,
        "gpus": num_ranks,
        "cluster": "dgx-h200",
        "tokens": 96,
        "heads": 4,
        "kv_heads": 4 if name == "yunchang" else 2,
        "head_dim": 8,
        "dtype": "fp16",
        "documents": [24, 48, 24],
    }
    for strategy, knobs, mask in CASES[name]:
        if strategy == "usp" and num_ranks < 4:
            continue
        yield {**common, "strategy": strategy, "knobs": knobs, "mask": mask}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "yunchang")) for name in CASES]
)
def test_outputs_and_gradients_are_those_of_dense_attention(name, tmp_path):
    if importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{name} is not installed")
    asked = [case for num_ranks in ((2, 4) if name == "yunchang" else (2, 3)) for case in scenarios(name, num_ranks)]
    cases = tmp_path / "cases.jsonl"
    cases.write_text("".join(json.dumps(case) + "\n" for case in asked), encoding="utf-8")
    fake = HERE / "fake_flash_attn"
    assert run_script("implementations_worker.py", cases, timeout_s=300, ahead=[fake]) == len(asked)


@pytest.mark.slow
def test_compiled_calls_run_one_operator_a_pass_and_say_what_they_cost_a_host():
    assert run_script("compiled_worker.py", timeout_s=200) == 2


@pytest.mark.slow
def test_what_was_compiled_with_one_backend_does_not_run_for_another():
    assert run_script("sdpa_worker.py", timeout_s=200) == 2
