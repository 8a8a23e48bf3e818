"""Comparing two cases, beginning files, explaining names, and the help."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from test_cli import cpsim, one_line

from cpsim.case.changes import changed
from cpsim.case.cluster import load_cluster
from cpsim.case.load import load_scenario, scenario_from
from cpsim.case.model import MODELS, PUBLISHED, Model
from cpsim.errors import ScenarioError
from cpsim.report.explain import explain, names
from cpsim.strategies import STRATEGIES

RING = {
    "gpus": 16,
    "cluster": "dgx-h200",
    "tokens": 131072,
    "heads": 32,
    "kv_heads": 8,
    "strategy": "zigzag_ring",
    "mask": "causal",
}


@pytest.fixture
def ring(tmp_path):
    path = tmp_path / "ring.json"
    path.write_text(json.dumps(RING))
    return path


def test_a_faster_network_is_faster(ring):
    found = json.loads(cpsim("compare", ring, "--set", "cluster.nic=2x", "--json"))
    assert found["ratio"] < 1
    assert found["ratio_low"] <= found["ratio"] <= found["ratio_high"]
    assert found["differing"] == {"cluster": ["dgx-h200", "dgx-h200 nic=2x"]}
    assert found["a"]["time_s"] * found["ratio"] == pytest.approx(found["b"]["time_s"])


def test_the_same_case_cannot_be_told_from_itself(ring):
    found = json.loads(cpsim("compare", ring, ring, "--json"))
    assert (found["ratio"], found["ratio_low"], found["ratio_high"]) == (1, 1, 1)
    assert "cannot be told apart" in found["verdict"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_two_cases_fit_the_terminal(ring, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    text = cpsim("compare", ring, "--set", "gpus=8", "--set", "strategy=ulysses")
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    assert "…" not in text
    assert re.search(r"strategy\s+'zigzag_ring'\s+'ulysses'", text)


def test_what_a_case_leaves_open_is_chosen_for_each_side(ring, tmp_path):
    path = tmp_path / "open.json"
    path.write_text(json.dumps({name: value for name, value in RING.items() if name != "strategy"} | {"gpus": 4}))
    found = json.loads(cpsim("compare", path, ring, "--json"))
    assert found["a"]["scenario"]["strategy"] in STRATEGIES


def test_something_to_compare_is_needed(ring):
    assert "--set field=value" in one_line(cpsim("compare", ring, status=2))


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ("tokens=2x", {"tokens": 262144}),
        ("parallel.tp=4", {"parallel": {"tp": 4}}),
        ("mask={name: lambda, window: 512}", {"mask": {"name": "lambda", "window": 512}}),
        ("cluster.nic=2x", {"cluster": "dgx-h200 nic=2x"}),
        ("compile=true", {"compile": True}),
    ],
)
def test_any_field_can_be_set(change, fields):
    found = changed(RING, [change])
    assert {name: found[name] for name in fields} == fields


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("tokens", "expected field=value"),
        ("strategy=2x", "expected a number to be there"),
        ("gpus.a=1", "which has no a"),
    ],
)
def test_changes_that_say_nothing_are_refused(change, said):
    with pytest.raises(ScenarioError, match=re.escape(said)):
        changed(RING, [change])


def test_clusters_are_changed_by_their_name(tmp_path):
    usual, other = load_cluster("dgx-h100"), load_cluster("dgx-h100 nic=4x200G memory=96GB latency=2x")
    assert other.fabric.nics_per_node == 4
    assert other.fabric.nic_bandwidth_bytes_per_s == pytest.approx(0.9 * 25e9)
    assert other.gpu.memory_bytes == 96e9
    assert other.fabric.latency_s == 2 * usual.fabric.latency_s
    (tmp_path / "mine.json").write_text(json.dumps(usual.to_dict()))
    (tmp_path / "case.json").write_text(json.dumps(RING | {"cluster": "mine.json nic=2x"}))
    scenario = load_scenario(tmp_path / "case.json")
    assert scenario.cluster == f"{tmp_path / 'mine.json'} nic=2x"
    assert load_cluster(scenario.cluster).fabric.nic_bandwidth_bytes_per_s == 90e9
    for name, said in {
        "dgx-h100 nik=2x": "did you mean 'nic'?",
        "h200-4 nic=2x": "is one machine",
        "dgx-h100 nic=a": "4x200G",
    }.items():
        with pytest.raises(ScenarioError, match=re.escape(said)):
            load_cluster(name)


def test_a_begun_scenario_is_one(tmp_path):
    path = tmp_path / "case.yaml"
    cpsim("init", "scenario", path, "--gpus", 8, "--context", "32k")
    scenario = load_scenario(path)
    assert (scenario.gpus, scenario.context, scenario.num_sequences) == (8, 32768, 32)
    assert "exists" in one_line(cpsim("init", "scenario", path, status=2))
    assert "did you mean" in one_line(cpsim("init", "scenario", tmp_path / "b.yaml", "--model", "lama3-8b", status=2))
    assert not (tmp_path / "b.yaml").exists()


def test_a_begun_model_is_one(tmp_path):
    path = tmp_path / "model.yaml"
    cpsim("init", "model", "Qwen/Qwen3-32B", "--out", path)
    fields = yaml.safe_load(path.read_text())
    assert Model(**fields["model"]) == MODELS["qwen3-32b"]
    assert scenario_from(fields | {"gpus": 8, "cluster": "dgx-h200", "tokens": 65536}).is_step


def test_every_name_is_explained():
    known = names()
    assert set(known["strategies"]) == set(STRATEGIES)
    assert set(known["models"]) == set(PUBLISHED)
    for every in known.values():
        for name in every:
            assert all(one.text and one.kind for one in explain(name))
    for name in STRATEGIES:
        assert explain(name)[0].picture, name


def test_the_picture_is_that_of_the_schedule():
    rows = explain("zigzag_ring")[0].picture.splitlines()[1:]
    assert [row.replace("· ", "")[0] for row in rows[:16:3]] == ["0", "1", "2", "3", "3", "2"]
    assert len({len(row) for row in rows}) == 1


@pytest.mark.parametrize("name", ["context", "mfu", "parallel.tp_overlap", "seed", "does_not_fit"])
def test_fields_are_explained(name):
    assert cpsim("explain", name)


def test_names_that_mean_nothing_are_refused():
    assert "did you mean 'zigzag_ring'" in one_line(cpsim("explain", "zigzag_rin", status=2))


def test_what_people_need_first_comes_first_in_the_help():
    text = cpsim("--help")
    at = [text.index(f" {name} ") for name in ("advise", "explore", "compare", "init", "predict", "calibrate", "fit")]
    assert at == sorted(at)
    assert re.match(r"cpsim \d+\.\d+", cpsim("--version"))
