"""Sweeps: grids and samples, what a kill leaves, bad scenarios, and a Dask cluster that loses a worker."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from cpsim.case.load import scenario_from
from cpsim.errors import CpsimError, ScenarioError
from cpsim.prediction.predict import predict
from cpsim.prediction.sweep import PART, SWEEP_FILE, Grid, load_sweep, run_sweep

BASE = {"cluster": "dgx-h200", "heads": 32, "kv_heads": 8, "pass": "fwd"}
GRID = {"strategy": ["usp", "zigzag_ring"], "gpus": [8, 12, 16], "tokens_per_gpu": [1024, 2048]}
LONG = {"strategy": ["usp"], "gpus": [8], "tokens_per_gpu": list(range(1024, 1024 + 16 * 400, 16))}


def file_of(tmp_path, grid=GRID, **more):
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump({"base": BASE, "grid": grid, **more}))
    return path


def rows_of(folder):
    return sorted(pq.read_table(folder).to_pylist(), key=lambda row: row["number"])


def test_a_grid_is_all_combinations_and_the_last_field_changes_first():
    grid = Grid(base=BASE, grid=GRID)
    points = [tuple(grid.fields(number)[name] for name in GRID) for number in grid.numbers()]
    assert points == list(product(*GRID.values()))


def test_a_sample_takes_each_combination_once_at_most_and_repeats_itself():
    taken = [list(Grid(grid=LONG, sample={"count": 50, "seed": s}).numbers()) for s in (1, 1, 2)]
    assert taken[0] == taken[1] != taken[2]
    assert len(set(taken[0])) == 50
    assert len(Grid(grid=GRID, sample={"count": 50}).numbers()) == 12


def test_every_scenario_has_a_row_that_is_its_prediction_or_why_there_is_none(tmp_path):
    sweep = load_sweep(file_of(tmp_path))
    done = run_sweep(sweep, tmp_path / "out", jobs=2)
    rows = rows_of(tmp_path / "out")
    assert [row["number"] for row in rows] == list(range(12)) == list(sweep.numbers())
    assert (done.num_scenarios, done.num_predicted) == (12, 8)
    for row in rows:
        fields = sweep.entry(row["number"])[1]
        assert (row["strategy"], row["gpus"], row["tokens"]) == (
            fields["strategy"],
            fields["gpus"],
            fields["gpus"] * fields["tokens_per_gpu"],
        )
        if row["gpus"] == 12:
            assert "use 8 or 16" in row["error"]
            assert row["time_s"] is None
        else:
            found = predict(scenario_from(fields))
            assert row["error"] is None
            assert row["time_s"] == found.time_s
            assert dict(row["parts_s"]) == found.parts_s
            assert json.loads(row["scenario"]) == scenario_from(fields).to_dict()


def test_a_list_of_scenarios_is_a_sweep_and_a_bad_line_is_an_error_in_its_row(tmp_path):
    path = tmp_path / "cases.jsonl"
    good = BASE | {"strategy": "usp", "gpus": 8, "tokens": 8192}
    path.write_text("\n".join([json.dumps(good), "{", json.dumps(good | {"gpu": 8})]))
    assert run_sweep(load_sweep(path), tmp_path / "out", jobs=1).num_predicted == 1
    errors = [row["error"] for row in rows_of(tmp_path / "out")]
    assert errors[0] is None
    assert "line 2" in errors[1]
    assert "did you mean 'gpus'" in errors[2]


def command(path, out, *more):
    return [sys.executable, "-m", "cpsim", "sweep", str(path), "--out", str(out), "--json", *more]


def test_a_killed_sweep_goes_on_where_it_was_with_nothing_lost_and_nothing_twice(tmp_path):
    path, out = file_of(tmp_path, LONG), tmp_path / "out"
    running = subprocess.Popen(command(path, out, "--jobs", "2"), stdout=subprocess.DEVNULL)
    while len(list(out.glob("part-*"))) < 3:
        assert running.poll() is None
        time.sleep(0.01)
    children = _children(running.pid)
    running.send_signal(signal.SIGKILL)
    running.wait()
    kept = {part.name: part.stat().st_mtime_ns for part in out.glob("part-*")}
    held = len(rows_of(out))
    assert 3 <= held < 400
    refused = subprocess.run(command(path, out), capture_output=True, text=True)
    assert refused.returncode == 2
    assert "go on with --resume" in refused.stderr
    done = subprocess.run(command(path, out, "--jobs", "1", "--resume"), check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["num_predicted"] == 400
    assert [row["number"] for row in rows_of(out)] == list(range(400))
    assert kept.items() <= {part.name: part.stat().st_mtime_ns for part in out.glob("part-*")}.items()
    assert children
    assert not [pid for pid in children if os.path.exists(f"/proc/{pid}")]


def _children(pid):
    """Of a process, before it is killed."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def test_a_folder_of_another_sweep_is_not_touched(tmp_path):
    out = tmp_path / "out"
    run_sweep(load_sweep(file_of(tmp_path)), out, jobs=1)
    before = sorted(part.name for part in out.iterdir())
    other = load_sweep(file_of(tmp_path, GRID | {"gpus": [8]}))
    with pytest.raises(CpsimError, match="got another; choose another --out"):
        run_sweep(other, out, jobs=1, resume=True)
    assert sorted(part.name for part in out.iterdir()) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(CpsimError, match="expected a new folder"):
        run_sweep(other, tmp_path / "mine", jobs=1)


def test_a_part_is_small_enough_to_lose(tmp_path):
    out = tmp_path / "out"
    run_sweep(load_sweep(file_of(tmp_path)), out, jobs=1)
    assert max(pq.read_table(part).num_rows for part in out.glob("part-*")) <= PART
    assert json.loads((out / SWEEP_FILE).read_text())["scenarios"] == 12


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"base": BASE, "grid": {"gpu": [8]}}, "gpu: unknown field of a scenario; did you mean 'gpus'"),
        ({"base": BASE, "grid": {"heads": [8]}}, "heads: expected in base or in grid, got both"),
        ({"grid": {"gpus": []}}, "at least 1 item"),
        ({"grid": GRID, "samples": {"count": 3}}, "samples: unknown field; did you mean 'sample'"),
    ],
)
def test_a_grid_that_is_wrong_as_a_whole_is_one_clear_line(tmp_path, content, why):
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ScenarioError, match=why) as error:
        load_sweep(path)
    assert "\n" not in str(error.value)


def test_a_mistake_of_ours_is_recorded_and_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("cpsim.prediction.sweep.predict", lambda _: 1 // 0)
    assert run_sweep(load_sweep(file_of(tmp_path)), tmp_path / "out", jobs=1).num_predicted == 0
    assert all("internal error: ZeroDivisionError" in row["error"] for row in rows_of(tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_dask_cluster_that_loses_a_worker_answers_everything_once(tmp_path):
    from distributed import LocalCluster

    sweep, out = load_sweep(file_of(tmp_path, LONG)), tmp_path / "out"
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        victim = next(iter(cluster.workers.values())).process.pid
        killed = []

        def halfway(done, total):
            if done >= total // 2 and not killed:
                os.kill(victim, signal.SIGKILL)
                killed.append(done)

        done = run_sweep(sweep, out, scheduler=cluster.scheduler_address, progress=halfway)
    assert killed
    assert killed[0] < 400
    assert (done.num_scenarios, done.num_predicted) == (400, 400)
    assert [row["number"] for row in rows_of(out)] == list(range(400))
    alone = predict(scenario_from(sweep.entry(7)[1]))
    assert rows_of(out)[7]["time_s"] == alone.time_s


def test_an_address_where_nothing_answers_is_one_clear_line(tmp_path):
    with pytest.raises(CpsimError, match="expected the address of a Dask scheduler, got 'nowhere'"):
        run_sweep(load_sweep(file_of(tmp_path)), tmp_path / "out", scheduler="nowhere")


def test_the_example_is_a_sample_of_its_grid():
    sweep = load_sweep(Path("examples/sweeps/96gpu.yaml"))
    assert len(sweep.numbers()) == 40
    assert sweep.entries.combinations == 160
    assert scenario_from(sweep.entry(sweep.numbers()[0])[1]).cluster == "dgx-h200"
