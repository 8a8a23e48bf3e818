"""Sweeps: grids and samples, what a kill leaves, bad scenarios, and a Dask cluster that loses a worker."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from test_cli import cpsim, one_line

from cpsim.case.cluster import load_cluster
from cpsim.case.load import scenario_from
from cpsim.errors import CpsimError, MachineError, ScenarioError
from cpsim.models.profile import load_profile, to_json
from cpsim.prediction.predict import predict, predict_many
from cpsim.prediction.sweep import PART, SWEEP_FILE, Grid, load_sweep, run_sweep
from cpsim.runtime import files

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


def asked(path, out, *more):
    return ["sweep", str(path), "--out", str(out), "--json", *more]


def command(path, out, *more):
    """The same as a process, for what is killed, stopped or limited."""
    return [sys.executable, "-m", "cpsim", *asked(path, out, *more)]


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
    assert "go on with --resume" in cpsim(*asked(path, out), status=2)
    done = cpsim(*asked(path, out, "--jobs", "1", "--resume"))
    assert json.loads(done)["num_predicted"] == 400
    assert [row["number"] for row in rows_of(out)] == list(range(400))
    assert kept.items() <= {part.name: part.stat().st_mtime_ns for part in out.glob("part-*")}.items()
    assert children
    ends = time.monotonic() + 20  # they notice by themselves
    while [pid for pid in children if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < ends
        time.sleep(0.1)


def _children(pid):
    """Of a process, before it is killed."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def test_two_sweeps_never_write_to_one_folder(tmp_path):
    path, out = file_of(tmp_path, LONG), tmp_path / "out"
    first = subprocess.Popen(command(path, out, "--jobs", "2"), stdout=subprocess.DEVNULL)
    while not (out / SWEEP_FILE).exists():
        assert first.poll() is None
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)
    for more in ((), ("--resume",)):
        said = one_line(cpsim(*asked(path, out, *more), status=2))
        assert f"process {first.pid} on " in said
        assert "writes there; wait for it, or choose another --out" in said
    first.send_signal(signal.SIGCONT)
    assert first.wait() == 0
    assert [row["number"] for row in rows_of(out)] == list(range(400))


def test_sweeps_that_nothing_keeps_apart_write_the_same(tmp_path, monkeypatch):
    """As on a file system without locks."""
    sweep, out, told = load_sweep(file_of(tmp_path)), tmp_path / "out", []

    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("cpsim.runtime.files.fcntl.lockf", unsupported)

    def meanwhile(done, _):
        if done == 1:
            run_sweep(sweep, out, jobs=1, resume=True)

    run_sweep(sweep, out, jobs=1, progress=meanwhile, tell=told.append)
    assert told == [f"{out}: its file system has no locks; see to it that nobody else writes there"]
    run_sweep(sweep, tmp_path / "alone", jobs=1)
    assert rows_of(out) == rows_of(tmp_path / "alone")


@pytest.fixture
def with_files(tmp_path):
    """A sweep over a preset, a cluster file that names a profile file, which has a base, and a model's."""
    profile = json.loads(to_json(replace(load_profile("h200"), name="mine"), load_profile("h200")))
    (tmp_path / "mine.json").write_text(json.dumps(profile | {"base": "theirs"}))
    (tmp_path / "theirs.json").write_text(to_json(replace(load_profile("h200"), name="theirs")))
    cluster = load_cluster("dgx-h200").to_dict() | {"name": "own", "profile": "mine.json"}
    (tmp_path / "own.json").write_text(json.dumps(cluster))
    base = {"heads": 32, "kv_heads": 8, "pass": "fwd", "strategy": "usp"}
    grid = {"gpus": [16, 32], "tokens_per_gpu": [1024, 2048], "cluster": ["dgx-h200", "own.json"]}
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump({"base": base, "grid": grid}, sort_keys=False))
    return path


def changed(path, field, value):
    """Writes a JSON file with another value, at a place like a.b."""
    fields = inner = json.loads(path.read_text())
    *above, last = field.split(".")
    for name in above:
        inner = inner[name]
    inner[last] = value(inner.get(last))
    path.write_text(json.dumps(fields))


CHANGES = {
    "cluster": ("own.json", "fabric.latency_s", lambda seconds: 2 * seconds),
    "profile": ("mine.json", "grade", lambda _: "measured elsewhere"),
    "base of a profile": ("theirs.json", "collective.port_bytes_per_s", lambda rate: rate / 2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_rows_that_rest_on_files_that_have_changed_are_predicted_again(name, with_files, tmp_path):
    sweep, out, told = load_sweep(with_files), tmp_path / "out", []
    run_sweep(sweep, out, jobs=1)
    before = rows_of(out)
    assert run_sweep(sweep, out, jobs=1, resume=True, tell=told.append).num_again == 0
    assert told == []
    file, field, value = CHANGES[name]
    changed(tmp_path / file, field, value)
    with pytest.raises(CpsimError, match=r"holds 8 of 8 scenarios; go on with --resume"):
        run_sweep(sweep, out, jobs=1)
    done = run_sweep(sweep, out, jobs=1, resume=True, tell=told.append)
    assert (done.num_again, done.num_predicted, done.lost) == (4, 8, {})
    assert told == [f"{out}: 4 of 8 rows are predicted again: cpsim, or files that they rest on, have changed"]
    run_sweep(sweep, tmp_path / "new", jobs=1)
    after = rows_of(out)
    assert after == rows_of(tmp_path / "new")
    assert after[::2] == before[::2]
    assert all(one != other for one, other in zip(after[1::2], before[1::2], strict=True))


def test_rows_of_another_cpsim_are_predicted_again(tmp_path, monkeypatch):
    sweep, out = load_sweep(file_of(tmp_path)), tmp_path / "out"
    run_sweep(sweep, out, jobs=1)
    monkeypatch.setattr("cpsim.prediction.basis._cpsim", lambda: "newer")
    assert run_sweep(sweep, out, jobs=1, resume=True).num_again == 12
    assert run_sweep(sweep, out, jobs=1, resume=True).num_again == 0


def test_a_broken_file_makes_errors_of_its_own_rows_until_it_is_mended(with_files, tmp_path):
    whole = (tmp_path / "mine.json").read_text()
    (tmp_path / "mine.json").write_text(whole[:-100])
    sweep, out = load_sweep(with_files), tmp_path / "out"
    assert run_sweep(sweep, out, jobs=1).num_predicted == 4
    assert [row["error"] is None for row in rows_of(out)] == [True, False] * 4
    (tmp_path / "mine.json").write_text(whole)
    done = run_sweep(sweep, out, jobs=1, resume=True)
    assert (done.num_again, done.num_predicted) == (4, 8)


def test_a_file_that_changes_during_a_sweep_is_said_and_mended_by_the_next(with_files, tmp_path):
    sweep, out = load_sweep(with_files), tmp_path / "out"
    done = run_sweep(
        sweep,
        out,
        jobs=1,
        progress=lambda done, _: done == 5 and changed(tmp_path / "own.json", *CHANGES["cluster"][1:]),
    )
    assert 0 < len(done.lost) < 4
    assert set(done.lost.values()) == {"the files that it rests on are others here and now"}
    assert run_sweep(sweep, out, jobs=1, resume=True).num_again == len(done.lost)
    run_sweep(sweep, tmp_path / "new", jobs=1)
    assert rows_of(out) == rows_of(tmp_path / "new")


@pytest.mark.parametrize("written", [0, 1, 2, 7, 12])
def test_a_disk_that_gets_full_loses_nothing_that_was_written(written, tmp_path, monkeypatch):
    """At the start, in the middle and at the end; the folder's own file comes first."""
    sweep, out = load_sweep(file_of(tmp_path)), tmp_path / "out"
    room = iter(range(written))

    def put(path, data, mode, put=files._put):
        if next(room, None) is None:
            put(path, data[: len(data) // 2], mode)
            raise OSError(errno.ENOSPC, "No space left on device")
        put(path, data, mode)

    with monkeypatch.context() as full:
        full.setattr(files, "_put", put)
        with pytest.raises(
            MachineError, match=r"No space left on device; .* is kept: mend it and go on with --resume$"
        ):
            run_sweep(sweep, out, jobs=1)
    assert not list(out.glob(".*"))
    assert len(list(out.glob("part-*"))) == max(0, written - 1)
    kept = rows_of(out) if written > 1 else []
    assert run_sweep(sweep, out, jobs=1, resume=written > 1).num_again == 0
    run_sweep(sweep, tmp_path / "new", jobs=1)
    assert rows_of(out) == rows_of(tmp_path / "new")
    assert [row for row in rows_of(out) if row in kept] == kept


def test_a_full_disk_is_one_line_and_exit_code_1(tmp_path):
    path, out = file_of(tmp_path), tmp_path / "out"
    limited = ["bash", "-c", 'ulimit -f 4; "$@"', "-", *command(path, out, "--jobs", "1")]
    done = subprocess.run(limited, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"cpsim: {out}/part-")
    assert "File too large; what was written before is kept" in done.stderr
    assert done.stderr.count("\n") == 1
    assert run_sweep(load_sweep(path), out, jobs=1).num_predicted == 8


BREAKS = {
    "an empty index": (lambda out: (out / SWEEP_FILE).write_text(""), 0),
    "an index that is cut off": (lambda out: (out / SWEEP_FILE).write_text('{"schema": 2, "di'), 0),
    "no index": (lambda out: (out / SWEEP_FILE).unlink(), 0),
    "an empty part": (lambda out: part_of(out).write_bytes(b""), 1),
    "a part that is cut off": (lambda out: part_of(out).write_bytes(part_of(out).read_bytes()[:-50]), 1),
    "a part with a wrong bit": (lambda out: part_of(out).write_bytes(flipped(part_of(out).read_bytes())), 1),
    "a part of something else": (lambda out: pq.write_table(pa.table({"number": [3]}), part_of(out)), 1),
}


def part_of(out):
    return sorted(out.glob("part-*"))[3]


def flipped(whole):
    """Bits of some pages of a Parquet file."""
    return whole[:1000] + bytes(byte ^ 1 for byte in whole[1000:1100]) + whole[1100:]


@pytest.mark.parametrize(("broken", "num_unreadable"), BREAKS.values(), ids=BREAKS)
def test_what_is_broken_in_a_folder_is_set_aside_and_made_again(broken, num_unreadable, tmp_path):
    sweep, out, told = load_sweep(file_of(tmp_path)), tmp_path / "out", []
    run_sweep(sweep, out, jobs=1)
    whole, index = rows_of(out), (out / SWEEP_FILE).read_text()
    broken(out)
    done = run_sweep(sweep, out, jobs=1, resume=True, tell=told.append)
    assert (done.num_scenarios, done.num_predicted, done.lost) == (12, 8, {})
    assert rows_of(out) == whole
    assert (out / SWEEP_FILE).read_text() == index
    assert len(told) == len(list(out.glob("_unreadable-*"))) == num_unreadable


def test_a_worker_that_is_killed_costs_a_line_and_no_scenario(tmp_path):
    path, out = file_of(tmp_path, LONG | {"gpus": [4, 8, 16]}), tmp_path / "out"
    with subprocess.Popen(command(path, out, "--jobs", "2"), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        while not list(out.glob("part-*")):
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGSTOP)  # so that it is not done before it notices
        os.kill(_children(running.pid)[0], signal.SIGKILL)
        running.send_signal(signal.SIGCONT)
        said, errors = running.communicate()
    assert running.returncode == 0
    assert errors == b"cpsim: a process died, perhaps for lack of memory; what it had is tried again, alone\n"
    assert json.loads(said)["num_predicted"] == 1200
    assert [row["number"] for row in rows_of(out)] == list(range(1200))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_scenario_that_kills_its_process_loses_no_other(tmp_path, monkeypatch, capsys):
    sweep, out = load_sweep(file_of(tmp_path)), tmp_path / "out"

    def deadly(scenario, *_):
        if scenario.gpus == 16 and scenario.tokens_per_gpu == 2048:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ScenarioError("fine")

    monkeypatch.setattr("cpsim.prediction.predict._predict_scenario", deadly)
    done = run_sweep(sweep, out, jobs=2)
    assert sorted(done.lost) == [9, 11]
    assert "a process died of it, alone, too" in done.lost[9]
    assert {row["number"] for row in rows_of(out)} == set(range(12)) - {9, 11}
    assert "tried again, alone" in capsys.readouterr().err
    asked = [scenario_from(sweep.entry(number)[1]) for number in range(12)]
    found = predict_many(asked * 2, jobs=2)
    assert [n % 12 for n, answer in enumerate(found) if isinstance(answer, MachineError)] == [9, 11] * 2
    assert len(found) == 24


def test_being_told_to_end_leaves_a_folder_that_can_go_on_and_no_process(tmp_path):
    path, out = file_of(tmp_path, LONG), tmp_path / "out"
    with subprocess.Popen(command(path, out, "--jobs", "2"), stderr=subprocess.PIPE) as running:
        while len(list(out.glob("part-*"))) < 3:
            assert running.poll() is None
            time.sleep(0.01)
        children = _children(running.pid)
        running.terminate()
        assert running.communicate() == (None, b"")
    assert running.returncode == 128 + signal.SIGTERM
    for _ in range(100):
        if not any(os.path.exists(f"/proc/{pid}") for pid in children):
            break
        time.sleep(0.1)
    else:
        pytest.fail("processes outlive the sweep")
    assert run_sweep(load_sweep(path), out, jobs=2, resume=True).num_predicted == 400
    assert [row["number"] for row in rows_of(out)] == list(range(400))


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
    monkeypatch.setattr("cpsim.prediction.predict._predict_scenario", lambda *_: 1 // 0)
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


@pytest.mark.slow
def test_a_scheduler_that_dies_is_one_line_and_what_was_done_is_kept(tmp_path):
    path, out = file_of(tmp_path, LONG), tmp_path / "out"
    start = (
        "from distributed import LocalCluster as C; c = C(n_workers=1, threads_per_worker=1, dashboard_address=None)"
    )
    code = (
        f"if __name__ == '__main__':\n {start}\n print(c.scheduler_address, flush=True)\n import time; time.sleep(600)"
    )
    (tmp_path / "cluster.py").write_text(code)
    with subprocess.Popen([sys.executable, tmp_path / "cluster.py"], stdout=subprocess.PIPE, text=True) as cluster:
        address = cluster.stdout.readline().strip()
        words = command(path, out, "--scheduler", address)
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            while len(list(out.glob("part-*"))) < 3:
                assert running.poll() is None
                time.sleep(0.01)
            cluster.kill()
            said = running.communicate(timeout=90)
    assert running.returncode == 1
    assert said[0] == ""
    assert said[1].startswith(f"cpsim: scheduler {address}: ")
    assert said[1].count("\n") == 1
    assert run_sweep(load_sweep(path), out, jobs=2, resume=True).num_predicted == 400
    assert [row["number"] for row in rows_of(out)] == list(range(400))


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("nowhere", 2),
        ("foo://127.0.0.1:8786", 2),
        ("tcp://127.0.0.1:x", 2),
        pytest.param("127.0.0.1:1", 1, marks=pytest.mark.slow),
    ],
)
def test_an_address_where_nothing_answers_is_one_clear_line(address, status, tmp_path):
    words = command(file_of(tmp_path), tmp_path / "out", "--scheduler", address)
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == status
    assert f"scheduler: expected the address of a Dask scheduler, got {address!r}" in done.stderr
    assert done.stderr.count("\n") == 1
    assert run_sweep(load_sweep(file_of(tmp_path)), tmp_path / "out", jobs=1).num_predicted == 8


def test_the_example_is_a_sample_of_its_grid():
    sweep = load_sweep(Path("examples/sweeps/96gpu.yaml"))
    assert len(sweep.numbers()) == 40
    assert sweep.entries.combinations == 160
    assert scenario_from(sweep.entry(sweep.numbers()[0])[1]).cluster == "dgx-h200"
