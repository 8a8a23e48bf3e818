"""`cpsim kernels`: the list agrees with what pricing takes, and its rates with what was measured."""

import json
from functools import cache

import numpy as np
import pytest
from targets import check
from test_cli import cpsim, one_line

from cpsim.calibrate import measurement
from cpsim.calibrate.recipes import points_file
from cpsim.calibrate.residuals import flops
from cpsim.case.load import scenario_from
from cpsim.case.workload import Workload
from cpsim.errors import CpsimError, InfeasibleError
from cpsim.masks.blocks import sequence_slices, slice_windows
from cpsim.masks.names import MASK_NAMES
from cpsim.masks.shapes import mask_slices
from cpsim.masks.slices import dense_mask
from cpsim.models.attention.calls import attention_op_seconds
from cpsim.models.feasible import hidden_runs
from cpsim.models.profile import load_profile
from cpsim.prediction.kernel_tables import EXAMPLE, one_call, peak_bytes, speeds, support
from cpsim.prediction.kernels_beside import beside, supported
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


def test_published_calls_stand_beside_predictions():
    rows = beside([load_profile("h100")], ["magi"])
    assert {row.gpu for row in rows} == {"h100"}
    assert {row.kernel for row in rows} == {"fa2", "fa3", "cudnn", "flex", "flash_mask", "sdpa", "ffa"}
    assert {row.profile for row in rows if row.kernel in ("fa2", "fa3")} == {"h100", "h100-fa3"}
    assert {row.kernel for row in rows if row.fitted} == {"fa3", "flash_mask", "ffa"}
    (row,) = [r for r in rows if (r.kernel, r.pass_, r.mask, r.tokens) == ("fa2", "fwd", "causal", 32768)]
    (speed,) = [s for s in speeds(load_profile("h100"), 64, 8, 128, [32768]) if (s.kernel, s.mask) == ("fa2", "causal")]
    assert row.tflops == pytest.approx(speed.tflops["fwd"])
    assert row.published_tflops == 366.9
    assert all(row.why.startswith("PyTorch chooses") == (row.tflops is None) for row in rows)
    of_fa2 = [abs(row.error) for row in rows if row.kernel == "fa2" and not row.short]
    check("published calls of flash-attn 2 on H100, mean", sum(of_fa2) / len(of_fa2))
    assert any(row.short for row in rows if row.tokens == 1024)
    assert not any(row.short for row in rows if row.tokens > 8192)


def test_what_benchmarks_say_of_kernels_stands_beside_what_is_priced():
    rows = {row.kernel: row for row in supported()}
    assert rows["flash_mask"].masks["mixed"] == (True, "yes")
    assert rows["flash_mask"].masks["uniform"] == (False, "no")
    assert rows["ffa"].masks["variable"] == (True, "yes")
    assert (rows["vsa"].passes, rows["vsa"].ours) == ("fwd bwd", "")
    assert "fastvideo-kernel" in rows["triton_vsa"].why
    assert rows["fa2_sparse"].ours == "fwd"
    assert rows["cudnn"].masks["dense"] == (True, "3 of 4")


def test_the_published_tables_are_shown_and_are_json(monkeypatch):
    monkeypatch.setattr("cpsim.prediction.kernels_beside.beside.__defaults__", (("magi",),))
    text = cpsim("kernels", "--published", "--profile", "b200")
    assert "MagiAttention's kernel benchmark, b200" in text
    assert "no table is published of the GPUs of a100" in one_line(
        cpsim("kernels", "--published", "--profile", "a100", status=2)
    )
    assert "--published has heads of its own" in one_line(cpsim("kernels", "--published", "--heads", 8, status=2))
    found = json.loads(cpsim("kernels", "--published", "--profile", "b200", "--json"))
    assert {row["kernel"] for row in found["support"]} >= {"vsa", "ffa_fa4"}
    assert {row["gpu"] for row in found["calls"]} == {"b200"}


@pytest.mark.parametrize("mask", MASK_NAMES)
def test_slices_as_sequences_have_the_pairs_of_the_mask(mask):
    slices = mask_slices(mask, (700, 300, 500, 548), {"window": 100} if "window" in MASK_NAMES[mask].options else {})
    q_len, k_len, *window = slice_windows(slices).T
    again = sequence_slices(q_len, k_len, np.stack(window, axis=1))
    assert again.areas().sum() == slices.areas().sum()
    seen = dense_mask(slices, 2048)
    hidden = (np.diff(np.pad(~seen.T, ((0, 0), (1, 0))).astype(int), axis=1) > 0).sum(axis=1)
    assert hidden_runs(slices, 2048) == hidden.max()


def test_kernels_of_slices_pay_for_slices_and_kernels_of_blocks_for_those_that_they_pass_over():
    ffa, profile = ("ffa", "fwd"), load_profile("h100-fa3")

    def seconds(kernel, pass_, mask, documents):
        case = Workload(documents=documents, mask=mask, num_heads=8, num_kv_heads=2, head_dim=128, dtype="bf16")
        params = profile.attention_params(kernel, pass_)
        return attention_op_seconds(params, kernel, "bf16", 128, one_call(case))[0, 0]

    whole, parts = (32768,), (8192,) * 4
    assert seconds(*ffa, "full_document", parts) < 0.3 * seconds(*ffa, "full", whole)
    assert seconds(*ffa, "shared_question", whole) < 0.6 * seconds(*ffa, "causal", whole)
    mine, free = ("flash_mask", "fwd"), ("fa2", "fwd")
    slower = seconds(*mine, "full_document", parts) / seconds(*free, "full_document", parts)
    assert slower > 1.02 * seconds(*mine, "full", whole) / seconds(*free, "full", whole)


def test_wrong_heads_are_one_line():
    assert "expected a divisor of heads = 32, got 7" in one_line(cpsim("kernels", "--kv-heads", 7, status=2))
