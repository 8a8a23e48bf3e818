"""Other people's context parallel code through our adapters: on gloo, against dense attention."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
HERE = Path(__file__).parent

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
        "implementation": name, "kernel": kernel, "gpus": num_ranks, "cluster": "dgx-h200", "tokens": 96, "heads": 4,
        "kv_heads": 4 if name == "yunchang" else 2, "head_dim": 8, "dtype": "fp16", "documents": [24, 48, 24],
    }  # fmt: skip
    for strategy, knobs, mask in CASES[name]:
        if strategy == "usp" and num_ranks < 4:
            continue
        yield {**common, "strategy": strategy, "knobs": knobs, "mask": mask}


@pytest.mark.parametrize(
    ("name", "num_ranks"), [(name, n) for name in CASES for n in ((2, 4) if name == "yunchang" else (2, 3))]
)
def test_outputs_and_gradients_are_those_of_dense_attention(name, num_ranks, tmp_path):
    if importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{name} is not installed")
    cases = tmp_path / "cases.jsonl"
    cases.write_text("".join(json.dumps(s) + "\n" for s in scenarios(name, num_ranks)), encoding="utf-8")
    paths = [str(HERE.parent), str(HERE / "fake_flash_attn"), os.environ.get("PYTHONPATH", "")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run(
        [*launch, str(HERE / "implementations_worker.py"), str(cases)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
