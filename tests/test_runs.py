"""The file of real runs: what is written is read again, and what is wrong with one is one line."""

import io
import json
from pathlib import Path

import pytest

from cpsim.calibrate import measurement
from cpsim.case.cluster import load_cluster
from cpsim.case.load import scenario_from
from cpsim.case.resolve import cluster_of, workload_of
from cpsim.errors import CpsimError
from cpsim.prediction.runs import PassRun, Run, Writer, case_key, load_runs

HEADER = {"gpu": "NVIDIA H200", "num_gpus": 2, "torch": "2", "date": "2026-11-21", "commit": "c", "command": "run"}
CASE = {"strategy": "ring", "gpus": 2, "cluster": "h200-4", "tokens": 4096, "heads": 8, "kv_heads": 2}


def pass_run(seconds, peak=10):
    return PassRun(
        samples_s=tuple(round(share * seconds, 9) for share in (1, 1.1, 0.9)),
        rank_time_s=(round(0.8 * seconds, 9), seconds),
        warmup_s=(2 * seconds,),
        peak_memory_bytes=peak,
        clock={"sm_clock_hz": [1.9e9, 1.8e9]},
    )


def run(**changes):
    passes = {"fwd": pass_run(0.001), "bwd": pass_run(0.002, peak=30)}
    return Run(scenario=scenario_from(CASE | changes), passes=passes, header=HEADER)


def written(*runs):
    file = io.StringIO()
    writer = Writer(file, HEADER)
    for entry in runs:
        writer.add(entry)
    return file.getvalue()


@pytest.fixture
def file(tmp_path):
    def write(*lines):
        path = tmp_path / "runs.jsonl"
        path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
        return path

    return write


def test_a_time_is_the_sum_of_the_passes_and_memory_their_maximum():
    both = run()
    assert both.time_s == pytest.approx(0.003)
    assert both.samples_s == pytest.approx((0.003, 0.0033, 0.0027))
    assert both.rank_time_s == pytest.approx((0.0024, 0.003))
    assert both.peak_memory_bytes == 30
    record = both.to_dict()
    flops = workload_of(both.scenario).flops("fwd") * 3.5
    assert record["tflops_per_gpu"] == pytest.approx(flops / 2 / 0.003 / 1e12, abs=1e-3)


def test_files_keep_everything_and_may_be_joined(file):
    failed = Run(scenario=scenario_from(CASE | {"tokens": 8192}), error="out of memory", header=HEADER)
    once = written(run(), failed)
    assert load_runs(file(once)) == [run(), failed]
    again = once.replace("H200", "H100")
    assert [entry.header["gpu"] for entry in load_runs(file(once, again))] == ["NVIDIA H200"] * 2 + ["NVIDIA H100"] * 2


def test_cluster_files_of_runs_are_looked_up_beside_them_and_their_folder_does_not_count(file):
    path = file(written(run(cluster="mine.json")))
    cluster = json.loads(json.dumps(load_cluster("h200-4").to_dict())) | {"name": "mine", "gpus_per_node": 2}
    (path.parent / "mine.json").write_text(json.dumps(cluster | {"num_gpus": 2}))
    (found,) = load_runs(path)
    assert cluster_of(found.scenario).gpus_per_node == 2
    assert found.key == case_key(scenario_from(CASE | {"cluster": "elsewhere/mine.json"}))
    assert found.key != case_key(scenario_from(CASE | {"cluster": "yours.json"}))


def test_total_and_local_tokens_are_the_same_case():
    local = {key: value for key, value in CASE.items() if key != "tokens"} | {"tokens_per_gpu": 2048}
    assert case_key(scenario_from(local)) == case_key(scenario_from(CASE | {"profile": "h100"}))
    assert case_key(scenario_from(CASE)) != case_key(scenario_from(CASE | {"kernel": "fa2"}))


HEAD = {"schema": 1, "format": "cpsim-runs", **HEADER}
GOOD = json.loads(written(run()).splitlines()[1])


def without(key, line=GOOD):
    return {name: value for name, value in line.items() if name != key}


def changed(pass_, **fields):
    return GOOD | {"passes": GOOD["passes"] | {pass_: GOOD["passes"][pass_] | fields}}


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        ([], "empty file; expected a header line"),
        ([GOOD], "line 1: expected a header with format 'cpsim-runs'"),
        ([HEAD | {"format": "cpsim-measurement"}], "expected format 'cpsim-runs', got 'cpsim-measurement'"),
        ([HEAD | {"schema": 2}], "schema 2, this version reads 1"),
        ([without("torch", HEAD)], "header lacks torch"),
        ([HEAD, '{"scenario": {'], "line 2: not valid JSON.*is the file cut off"),
        ([HEAD, "[]"], "line 2: expected a JSON object, got list"),
        ([HEAD, without("scenario")], "line 2: run without 'scenario'"),
        ([HEAD, GOOD | {"scenario": {"gpu": 4}}], "line 2: scenario: gpu: unknown field"),
        ([HEAD, without("passes")], "line 2: expected passes fwd, bwd, or an error"),
        ([HEAD, changed("bwd", speed=3)], "line 2: bwd: expected samples_s, rank_time_s"),
        ([HEAD, changed("fwd", samples_s=[])], "line 2: fwd: expected samples and one rank_time_s for each of 2 ranks"),
        ([HEAD, changed("fwd", rank_time_s=[1.0])], "for each of 2 ranks"),
        ([HEAD, changed("fwd", samples_s=[-1.0])], "samples_s must be a list of seconds, above 0"),
        ([HEAD, changed("fwd", samples_s=3)], "samples_s must be a list of seconds"),
    ],
)
def test_what_is_wrong_is_one_line(file, lines, match):
    with pytest.raises(CpsimError, match=match) as caught:
        load_runs(file(*lines))
    assert "\n" not in str(caught.value)


def test_fits_refuse_real_runs(file):
    runs = file(written(run()))
    with pytest.raises(CpsimError, match="expected a header with format 'cpsim-measurement'"):
        measurement.load(runs)
    for path in (Path(measurement.__file__).parent).glob("*.py"):
        assert "cpsim.prediction.runs" not in path.read_text()


def test_a_missing_file_is_named():
    with pytest.raises(CpsimError, match=r"nowhere.jsonl: cannot be read"):
        load_runs("nowhere.jsonl")
