"""`cpsim calibrate` on a CPU: two gloo processes measure, and what they find predicts real runs of this machine."""

import json
from collections import Counter

import pytest
import yaml
from test_cli import cpsim, one_line
from test_real_run_cpu import processes

pytest.importorskip("torch")

from cpsim.calibrate.measurement import load, point_key
from cpsim.cli.launch import PROGRESS
from cpsim.models.profile import load_profile

CASE = {
    "gpus": 2,
    "cluster": "mine.yaml",
    "kernel": "math",
    "dtype": "fp32",
    "tokens": 128,
    "heads": 4,
    "kv_heads": 2,
    "pass": "fwd",
}


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """The folder of a node that was calibrated for as short as possible."""
    folder = tmp_path_factory.mktemp("node")
    log = processes("-m", "cpsim", "calibrate", "--cpu", 2, "--minutes", 0.15, "--out", folder)
    assert "attention kernels" in log
    assert "attention fwd math" in log
    return folder


def keys(path):
    ops = ("attention", "elementwise", "collective", "transfer", "overlap")
    return Counter(point_key(**point) for point in load(path).points if point["op"] in ops)


def test_one_measurement_file_has_everything_and_the_profile_is_remade_from_it_byte_for_byte(node, tmp_path):
    measured = load(node / "mine.jsonl")
    ops = Counter(point["op"] for point in measured.points)
    assert {"attention", "elementwise", "collective", "transfer", "host"} <= set(ops)
    assert {point["rank"] for point in measured.of("attention")} == {0, 1}
    times = [point["at_s"] for point in measured.of("collective")]
    assert times == sorted(times)
    assert "/" not in measured.header["command"]
    assert set(keys(node / "mine.jsonl").values()) == {1}
    cpsim("fit", node / "mine.jsonl", "--out", tmp_path / "mine.json")
    assert (tmp_path / "mine.json").read_bytes() == (node / "mine.json").read_bytes()


def test_the_cluster_file_names_its_profile_and_says_what_the_node_is(node):
    cluster = yaml.safe_load((node / "mine.yaml").read_text())
    assert (cluster["gpus_per_node"], cluster["profile"], cluster["gpu"]["name"]) == (2, "mine.json", "cpu")
    assert load_profile(node / "mine.json").gpu == "cpu"


def test_a_calibrated_node_predicts_runs_and_validates(node):
    cases, runs = node / "cases.jsonl", node / "runs.jsonl"
    lines = [CASE | {"strategy": name} for name in ("zigzag_ring", "allgather")]
    cases.write_text("".join(json.dumps(line) + "\n" for line in lines))
    predicted = [json.loads(line) for line in cpsim("predict", cases, "--json").splitlines()]
    assert all(entry["time_s_low"] < entry["time_s"] < entry["time_s_high"] for entry in predicted)
    processes("-m", "cpsim", "run", cases, "--cpu", 2, "--seconds", 0.02, "--out", runs)
    compared = json.loads(cpsim("validate", runs, "--json"))
    assert len(compared["cases"]) == 2
    assert all(0.1 < case["predicted_s"] / case["measured_s"] < 10 for case in compared["cases"])


@pytest.mark.slow
def test_an_interrupted_calibration_goes_on_with_the_points_that_are_missing(node):
    path = node / "again.jsonl"
    whole = (node / "mine.jsonl").read_text().splitlines()
    few = [line for line in whole if '"op":"attention"' not in line] + whole[-1:]
    path.write_text("\n".join(few)[:-40])  # cut off in the middle of a line
    assert "go on with --resume" in one_line(cpsim("calibrate", "--cpu", 2, "--name", "again", "--out", node, status=2))
    processes("-m", "cpsim", "calibrate", "--cpu", 2, "--minutes", 0.1, "--name", "again", "--out", node, "--resume")
    counts = keys(path)
    assert set(counts.values()) == {1}
    assert sum(json.loads(key)[0] == "attention" for key in counts) >= 10
    assert path.read_text().splitlines()[: len(few) - 1] == few[:-1]


def test_a_file_of_another_machine_is_not_gone_on_with(node):
    error = one_line(cpsim("calibrate", "--cpu", 1, "--out", node, "--resume", status=2))
    assert "measured on 2 x cpu, here are 1 x cpu; start a new file" in error


def test_progress_lines_are_those_that_the_command_reads():
    from cpsim.real.measure import calibrate

    assert calibrate.PROGRESS is PROGRESS


@pytest.mark.parametrize(("cuda", "least"), [(False, 60), (True, 480)])
def test_every_run_measures_the_same_shapes_in_the_same_order(cuda, least):
    from cpsim.real.measure.calibrate import shapes_of

    shapes = shapes_of("fa4", cuda)
    assert shapes == shapes_of("fa4", cuda)
    assert len(set(shapes)) == len(shapes) == least
    assert {shape.causal for shape in shapes[:4]} == {True, False}
