"""Real runs on a CPU: two gloo processes under torchrun, with runners that fail in every way, and with our executor."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from cpsim.case.cluster import presets  # noqa: E402
from cpsim.case.load import scenario_from  # noqa: E402
from cpsim.case.resolve import cluster_of, workload_of  # noqa: E402
from cpsim.errors import CpsimError  # noqa: E402
from cpsim.prediction.runs import load_runs  # noqa: E402
from cpsim.real.run.__main__ import select  # noqa: E402
from cpsim.real.run.node import emulate_nodes  # noqa: E402
from cpsim.report.trace import MEASURED  # noqa: E402
from cpsim.strategies import plan  # noqa: E402

ROOT = Path(__file__).parent.parent
CASE = {
    "strategy": "zigzag_ring",
    "gpus": 2,
    "cluster": "h200-4",
    "tokens": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "dtype": "fp64",
}


def processes(*command, status=0):
    """Runs a command that starts processes of its own, and returns its stdout and stderr."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=200, env=environment, cwd=ROOT
    )
    assert done.returncode == status, done.stderr[-3000:]
    return done.stdout + done.stderr


def torchrun(*arguments, restarts=0, status=0):
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts", restarts)
    return processes(*start, *arguments, status=status)


@pytest.fixture
def cases(tmp_path):
    def write(*changes):
        path = tmp_path / "cases.jsonl"
        path.write_text("".join(json.dumps(CASE | change) + "\n" for change in changes))
        return path

    return write


def failing(*ways):
    return [{"knobs": {"fail": way}} for way in ways]


def test_a_case_that_fails_is_recorded_and_the_others_go_on(cases, tmp_path):
    out = tmp_path / "runs.jsonl"
    ways = ("set-up", "alike", "memory", "crash", "hang")
    asked = cases({}, {"pass": "bwd", "protocol": "streamed"}, {"gpus": 4}, *failing(*ways))
    log = torchrun("tests/fake_run.py", asked, "--out", out, "--cpu", "--limit", 5, "--seconds", 0.05, restarts=5)
    runs = load_runs(out)
    assert len(runs) == 8, log
    errors = {run.scenario.knobs.get("fail"): run.error for run in runs if run.error and run.scenario.gpus == 2}
    assert errors == {
        "set-up": "no such thing",
        "alike": "RuntimeError: all fail alike",
        "memory": "rank 1: MemoryError: only on one rank",
        "crash": "a process died",
        "hang": "took more than 5 s, or hung",
    }
    assert next(run.error for run in runs if run.scenario.gpus == 4).startswith("gpus: needs 4, this launch has 2")
    measured = {run.scenario.pass_: run for run in runs if not run.error}
    assert list(measured["fwd_bwd"].passes) == ["fwd", "bwd"]
    assert measured["fwd_bwd"].passes["fwd"].samples_s[0] > 0.004  # the slowest rank sleeps for 4 ms
    assert len(measured["bwd"].rank_time_s) == 2
    assert all(len(p.warmup_s) >= 5 and len(p.samples_s) >= 5 for run in measured.values() for p in run.passes.values())
    assert not out.with_suffix(".running").exists()


@pytest.mark.slow
def test_a_rank_that_fails_while_others_wait_for_it_ends_the_processes(cases, tmp_path):
    out = tmp_path / "runs.jsonl"
    log = torchrun("tests/fake_run.py", cases(*failing("one")), "--out", out, "--cpu", "--limit", 60, restarts=1)
    (run,) = load_runs(out)
    assert run.error in ("RuntimeError: one fails alone", "rank 1: RuntimeError: one fails alone"), log


@pytest.mark.slow
def test_runs_stop_when_the_time_is_over_and_go_on_later(cases, tmp_path):
    out = tmp_path / "runs.jsonl"
    asked = cases({"gpus": 1}, {"gpus": 1, "tokens": 128})
    common = ("tests/fake_run.py", asked, "--out", out, "--cpu", "--seconds", 0.01)
    assert "2 cases not run: the time is over" in processes(*common, "--until", 1)
    assert load_runs(out) == []
    processes(*common)
    assert len(load_runs(out)) == 2
    processes(*common, "--resume")
    assert len(load_runs(out)) == 2


def test_cpsim_run_launches_for_every_number_of_processes(cases, tmp_path):
    out = tmp_path / "runs.jsonl"
    model = {"layers": 1, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96, "vocab": 96}
    layer = {"strategy": "distca", "model": model, "part": "layer", "dtype": "bf16"}
    impossible = {"strategy": "ulysses", "heads": 3, "kv_heads": 3}
    asked = cases({}, {"gpus": 1, "strategy": "none"}, {"gpus": 4}, impossible, layer)
    log = processes("-m", "cpsim", "run", asked, "--cpu", 2, "--seconds", 0.02, "--out", out)
    assert "left out: gpus: needs 4, 2 may be used here" in log
    assert "3 of 4 runs measured" in log
    runs = {run.scenario.strategy: run for run in load_runs(out)}
    assert "heads" in runs["ulysses"].error
    assert [len(runs[name].rank_time_s) for name in ("zigzag_ring", "none")] == [2, 1]
    assert [len(run.attention_s) for run in runs["distca"].passes.values()] == [2, 2]
    header = runs["none"].header
    assert header["command"].startswith("cpsim run ")
    assert {"gpu", "torch", "nccl", "driver", "kernels", "commit", "date", "environment", "seed"} <= set(header)
    assert "measured on cpu" in processes("-m", "cpsim", "validate", out)


@pytest.mark.slow
def test_a_trace_has_the_ops_of_the_schedule_on_every_rank(cases, tmp_path):
    path = tmp_path / "trace.json"
    processes("-m", "cpsim", "run", cases({}), "--cpu", 2, "--trace", path)
    events = json.loads(path.read_text())["traceEvents"]
    scenario = scenario_from(CASE)
    for rank in range(2):
        seen = Counter(event["name"] for event in events if event["ph"] == "X" and event["pid"] == MEASURED + rank)
        for pass_ in ("fwd", "bwd"):
            schedule = plan("zigzag_ring", workload_of(scenario), cluster_of(scenario), pass_, {})
            assert {op.name for op in schedule.project(rank)} <= set(seen)
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0, measured", "rank 1, measured"]


def test_nodes_are_emulated_for_nccl(monkeypatch):
    for rank, host in ((0, "node0"), (1, "node0"), (2, "node1"), (3, "node1")):
        environment = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "4"}
        monkeypatch.setattr(os, "environ", environment)
        emulate_nodes(2)
        assert environment["NCCL_HOSTID"] == host
        assert environment["NCCL_SOCKET_IFNAME"] == "lo"
        assert environment["NCCL_IB_DISABLE"] == "1"
    with pytest.raises(CpsimError, match="expected a divisor of the 4 local ranks, got 3"):
        emulate_nodes(3)


def test_clusters_of_several_nodes_need_as_many(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    asked = [scenario_from(CASE | {"gpus": 4, "cluster": name}) for name in ("h200-4", "h200-2x2-sockets")]
    node = SimpleNamespace(size=4, cuda=True)
    for num_nodes, chosen in ((1, "h200-4"), (2, "h200-2x2-sockets")):
        mine, (other,) = select(asked, node, num_nodes, seed=1)
        assert [scenario.cluster for scenario in mine] == [chosen]
        assert "see --emulate-nodes" in other.error
    assert {"h200-4", "h200-2x2-sockets"} <= set(presets())


def test_cases_are_shuffled_alike_on_all_ranks():
    asked = [scenario_from(CASE | {"tokens": 64 * i}) for i in range(1, 9)]
    node = SimpleNamespace(size=2, cuda=False)
    orders = [[s.tokens for s in select(asked, node, 1, seed)[0]] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) != orders[0]
