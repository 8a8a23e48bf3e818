"""Logs and traces of real training runs beside their predictions."""

from __future__ import annotations

import gzip
import json
import re

import pytest
from test_cli import cpsim, one_line

from cpsim.case.formats.logs import covered, read_observed
from cpsim.errors import ScenarioError

STEP = {
    "gpus": 8,
    "cluster": "dgx-h100",
    "model": "llama3-8b",
    "framework": "torchtitan",
    "seq_len": "8k",
    "batch": 8,
    "strategy": "none",
    "parallel": {"tp": 1, "pp": 1, "cp": 1, "recompute": "per_op"},
}
# ruff: noqa: E501 (lines of logs)
TITAN = """\
[rank0]:2026-01-01 - root - INFO - CUDA capacity: NVIDIA H100 80GB HBM3 with 79.11GiB memory
[rank0]:2026-01-01 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.2  \x1b[38;2;180mgrad_norm:  4.1  \x1b[36mmemory: 40.02GiB(50.1%)  \x1b[34mtps: 812  \x1b[36mtflops: 42.0  \x1b[35mmfu: 4.2%\x1b[39m
{rows}
"""
MEGATRON = " [2026-01-01 00:00:00] iteration {0:8d}/    1000 | consumed samples:         1024 | elapsed time per iteration (ms): {1:.1f} | throughput per GPU (TFLOP/s/GPU): 400.1 | learning rate: 1.0E-05 | global batch size:   128 | lm loss: 1.0E+01 |"


def titan(rates):
    row = "[rank0]:x - root - INFO - step: {0:2}  loss: 10.1  grad_norm:  2.1  memory: 47.50GiB(60.05%)  tps: {1:,}  tflops: 300.0  mfu: 30.1%"
    return TITAN.replace("{rows}", "\n".join(row.format(10 * (i + 1), rate) for i, rate in enumerate(rates)))


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_torchtitan(tmp_path):
    found = read_observed(written(tmp_path, "a.log", titan([5000, 5600, 5700, 5800, 5700, 5700, 5700, 5600])))
    assert found.what == "torchtitan's log"
    assert found.memory_bytes == int(47.5 * 2**30)
    assert found.seconds(8192) == pytest.approx(8192 / 5700)
    assert len(found.tokens_per_s_per_gpu) == 6  # of nine, the first three do not count


def test_megatron(tmp_path):
    rows = [MEGATRON.format(i + 1, ms) for i, ms in enumerate([60000, 7000, 5100, 5000, 5000, 4900, 5000, 5100])]
    memory = "[Rank 0] (after 2 iterations) memory (MB) | allocated: 100.0 | max allocated: 30000.5 | reserved: 3 | max reserved: 4"
    found = read_observed(written(tmp_path, "a.out", "\n".join([*rows, memory])))
    assert found.seconds(1) == pytest.approx(5.0)
    assert found.memory_bytes == int(30000.5 * 2**20)


@pytest.mark.parametrize(
    ("name", "text", "seconds"),
    [
        ("nemo.log", "Training epoch 0, iteration 1 | train_step_timing in s: 3.5 | loss 1\n" * 9, 3.5),
        ("lightning.log", "Epoch 0:  10%|█  | 10/100 [00:20<03:00,  0.50it/s, v_num=0]\r", 2.0),
        ("slow.log", "Epoch 0:  10%|█  | 10/100 [00:20<03:00,  4.25s/it, v_num=0]\r", 4.25),
        ("hf.log", "{'loss': 1.2, 'epoch': 0.1}\n{'train_runtime': 100.0, 'train_steps_per_second': 0.25}\n", 4.0),
        ("state.json", json.dumps({"log_history": [{"loss": 1}, {"train_steps_per_second": 0.2}]}), 5.0),
    ],
)
def test_other_logs(tmp_path, name, text, seconds):
    assert read_observed(written(tmp_path, name, text)).seconds(1) == pytest.approx(seconds)


def kernel(name, begin, end):
    return {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": end - begin}


EVENTS = [
    {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "ts": 0, "dur": 1000},
    kernel("flash_fwd_kernel", 0, 400),
    kernel("nvjet_hsh_128x256", 400, 800),
    kernel("ncclDevKernel_AllGather_RING_LL", 700, 900),
    kernel("vectorized_elementwise_kernel", 950, 1000),
    {"ph": "i", "name": "mark", "ts": 3},
]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_traces_say_what_a_gpu_did(tmp_path, name):
    text = json.dumps({"traceEvents": EVENTS}).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    found = read_observed(tmp_path / name)
    assert found.step_s == (pytest.approx(1e-3),)
    want = {"attention": 400, "matrix products": 400, "memory-bound ops": 50, "exposed communication": 100, "idle": 50}
    assert {part: pytest.approx(1e6 * seconds) for part, seconds in found.busy_s.items()} == want


def test_unions_of_intervals():
    assert covered([(0, 2), (1, 3), (5, 6)]) == 4
    assert covered([]) == 0


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.log", "hello\n", "expected lines of steps of torchtitan"),
        ("b.json", '{"traceEvents": []}', "expected kernels of a GPU in the trace"),
        ("c.json", '{"log_history": [{"loss": 1}]}', "expected train_steps_per_second"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path, name, text, said):
    with pytest.raises(ScenarioError, match=re.escape(said)):
        read_observed(written(tmp_path, name, text))


def test_a_log_stands_beside_its_prediction(tmp_path):
    case = written(tmp_path, "case.json", json.dumps(STEP))
    log = written(tmp_path, "run.log", titan([5600] * 12))
    found = json.loads(cpsim("validate", case, log, "--json"))
    assert found["measured_s"] == pytest.approx(8192 / 5600)
    assert found["error"] == pytest.approx(found["predicted_s"] / found["measured_s"] - 1)
    assert found["memory"][0]["kind"] == "reserved"
    assert found["differs_most"] is None
    assert "A log does not say which part differs" in " ".join(cpsim("validate", case, log).split())


def test_a_trace_names_the_part_that_differs(tmp_path):
    case = written(tmp_path, "case.json", json.dumps(STEP))
    slow = [EVENTS[0] | {"dur": 9e6}, kernel("flash_fwd", 0, 1e5), kernel("gemm", 1e5, 8e5), kernel("nccl", 8e5, 9e6)]
    trace = written(tmp_path, "trace.json", json.dumps({"traceEvents": slow}))
    found = json.loads(cpsim("validate", case, trace, "--json"))
    assert found["differs_most"] == "exposed communication"
    assert sum(part["measured"] for part in found["parts_s"].values()) == pytest.approx(9)


def test_a_log_needs_its_case(tmp_path):
    log = written(tmp_path, "run.log", titan([5600] * 12))
    assert "expected a case beside the logs" in one_line(cpsim("validate", log, status=2))


def test_a_framework_s_own_file_is_a_case(tmp_path):
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n[parallelism]\ndata_parallel_shard_degree = 8\n'
    job, log = written(tmp_path, "job.toml", text), written(tmp_path, "run.log", titan([5600] * 12))
    found = json.loads(cpsim("validate", job, log, "--cluster", "h100", "--json"))
    assert found["measured_s"] == pytest.approx(8192 / 5600)
