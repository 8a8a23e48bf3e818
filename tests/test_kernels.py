"""`cpsim kernels`: the list agrees with what pricing takes, and its rates with what was measured."""

import json
from functools import cache

import numpy as np
import pytest
from test_cli import cpsim, one_line

from cpsim.calibrate import measurement
from cpsim.calibrate.recipes import points_file
from cpsim.calibrate.residuals import flops
from cpsim.case.load import scenario_from
from cpsim.errors import CpsimError, InfeasibleError
from cpsim.models.profile import load_profile
from cpsim.prediction.kernel_tables import EXAMPLE, peak_bytes, speeds, support
from cpsim.prediction.predict import predict

CASE = {"strategy": "none", "gpus": 1, "cluster": "h200-4", "tokens": 4096, "heads": 8, "kv_heads": 2}


@pytest.mark.parametrize("entry", [entry for entry in support() if entry.profiles], ids=lambda entry: entry.kernel)
def test_the_matrix_says_what_predictions_do(entry):
    for mask, reason in entry.masks.items():
        asked = {"kernel": entry.kernel, "mask": mask, "profile": entry.profiles[0]}
        asked |= {"pass": "fwd_bwd" if "bwd" in entry.passes else "fwd"}
        case = scenario_from(CASE | asked | {"tokens": sum(EXAMPLE), "documents": list(EXAMPLE)})
        if reason:
            with pytest.raises(CpsimError):
                predict(case)
        else:
            assert predict(case).time_s > 0
    for dtype in {"bf16", "fp16", "fp32", "fp64"} - set(entry.dtypes):
        case = scenario_from(CASE | {"kernel": entry.kernel, "dtype": dtype, "profile": entry.profiles[0]})
        with pytest.raises(InfeasibleError, match="got dtype"):
            predict(case)


@pytest.mark.slow
def test_rates_are_those_of_the_committed_measurements():
    points = measurement.load(points_file("h200-kernels-0.jsonl")).of("attention")
    long = [p for p in points if len(p["q_lens"]) == 1 and p["q_lens"] == p["k_lens"] and p["q_lens"][0] > 16000]
    assert len(long) > 20
    found = cache(lambda heads, kv_heads, tokens: speeds(load_profile("h200"), heads, kv_heads, 128, [tokens]))
    for p in long:
        mask, rows = "causal" if p["causal"] else "full", found(p["num_heads"], p["num_kv_heads"], p["q_lens"][0])
        (row,) = [speed for speed in rows if (speed.kernel, speed.mask) == (p["kernel"], mask)]
        measured = flops(p) / float(np.median(p["samples_s"])) / 1e12
        assert row.tflops[p["pass"]] == pytest.approx(measured, rel=0.12)


def test_memory_counts_what_a_call_holds():
    rows = {(s.kernel, s.tokens): s for s in speeds(load_profile("h200"), 32, 8, 128, [1024, 2048])}
    tensors = 2 * (1024 * 32 * 128 * 2) + 2 * (1024 * 8 * 128 * 2) + 1024 * 32 * 4  # q, out; k, v; log-sum-exp
    assert rows["fa4", 1024].memory_bytes["fwd"] == tensors
    assert rows["fa4", 2048].memory_bytes == {p: 2 * n for p, n in rows["fa4", 1024].memory_bytes.items()}
    assert rows["fa2", 1024].memory_bytes["bwd"] > rows["fa4", 1024].memory_bytes["bwd"] > 2 * tensors


def test_memory_is_what_was_measured():
    points = [p for gpu in ("h200", "h100") for p in measurement.load(points_file(f"{gpu}-memory.jsonl")).of("memory")]
    assert {p["kernel"] for p in points} >= {"fa4", "fa2", "cudnn", "sdpa_flash", "flex", "sdpa_math"}
    for p in points:
        shape = p["num_heads"], p["num_kv_heads"], p["head_dim"]
        assert peak_bytes(p["kernel"], p["pass"], *p["q_lens"], shape) == pytest.approx(p["peak_bytes"], rel=0.03)


def test_both_tables_are_shown_and_are_json():
    text = cpsim("kernels")
    assert max(map(len, text.splitlines())) <= 100
    assert "cudnn takes sequences of one length a call" in text
    assert "h100: TFLOP/s" in text
    found = json.loads(cpsim("kernels", "--json", "--profile", "b200", "--heads", "64"))
    assert {row["profile"] for row in found["speeds"]} == {"b200"}
    unmeasured = next(row for row in found["kernels"] if row["kernel"] == "fa2_ranges")
    assert unmeasured["masks"]["full"].startswith("nobody")


def test_wrong_heads_are_one_line():
    assert "expected a divisor of heads = 32, got 7" in one_line(cpsim("kernels", "--kv-heads", 7, status=2))
