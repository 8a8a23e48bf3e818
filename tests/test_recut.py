"""Older runs count the iterations before the gap in which the clock recovered."""

import json

import pytest
from scripts import load_script

from cpsim.prediction.runs import load_runs

HEADER = {
    "format": "cpsim-runs",
    "schema": 1,
    "gpu": "NVIDIA H200",
    "num_gpus": 2,
    "torch": "2.11",
    "date": "2026-11-21",
    "commit": "abc",
    "command": "x",
}
SCENARIO = {
    "strategy": "ring",
    "gpus": 2,
    "cluster": "h200-4",
    "tokens": 4096,
    "heads": 8,
    "kv_heads": 2,
    "pass": "fwd",
}


def line(warmup, samples):
    run = {"samples_s": samples, "rank_time_s": [0.01, 0.01], "warmup_s": warmup, "peak_memory_bytes": 0, "clock": {}}
    return {"scenario": SCENARIO, "time_s": samples[0], "tflops_per_gpu": 100.0, "passes": {"fwd": run}}


@pytest.fixture
def recut(tmp_path, monkeypatch):
    module = load_script("validation/recut.py")

    def of(*lines):
        path = tmp_path / "runs.jsonl"
        path.write_text("".join(json.dumps(entry) + "\n" for entry in (HEADER, *lines)))
        monkeypatch.setattr("sys.argv", ["recut.py", str(path)])
        module.main()
        return path

    return of


def test_the_last_iterations_before_the_gap_count_and_nothing_is_lost(recut):
    warmup, samples = [0.03] + [0.012] * 39, [0.010] * 20
    path = recut(line(warmup, samples))
    (run,) = load_runs(path)
    found = run.passes["fwd"]
    assert run.time_s == pytest.approx(0.012)
    assert found.samples_s == (0.012,) * 10
    assert found.warmup_s + found.samples_s == tuple(warmup)
    assert found.after_gap_s == tuple(samples)
    assert json.loads(path.read_text().splitlines()[1])["tflops_per_gpu"] == pytest.approx(100 / 1.2, rel=1e-3)


def test_recutting_again_changes_nothing(recut):
    path = recut(line([0.012] * 40, [0.010] * 20))
    before = path.read_text()
    assert recut(*(json.loads(entry) for entry in before.splitlines()[1:])).read_text() == before


def test_long_iterations_and_failures_stay_as_they_are(recut):
    failed = {"scenario": SCENARIO | {"tokens": 8192}, "error": "hung"}
    long, second = load_runs(recut(line([0.8] * 5, [0.7] * 5), failed))
    assert long.time_s == 0.7
    assert second.error == "hung"
