"""The manifest says what every measurement and run is, and nothing that the files contradict."""

import json

import pytest
from scripts import load_script

from cpsim.calibrate.measurement import load
from cpsim.calibrate.recipes import DATA, fitted_files, manifest, measurements
from cpsim.case.resolve import cluster_of
from cpsim.models.profile import shipped_profiles
from cpsim.prediction.runs import load_runs

KNOWN = {
    "machine",
    "gpus",
    "day",
    "about",
    "command",
    "fits",
    "without",
    "because",
    "effect",
    "left_out",
    "leaked",
    "cluster",
}
FILES = {**manifest()["points"], **manifest()["runs"]}


def header(path):
    """The first line of a file, where that is a header."""
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(file.readline())
    except ValueError:
        return {}
    return first if isinstance(first, dict) and "num_gpus" in first and path.suffix == ".jsonl" else {}


def test_every_file_is_in_the_manifest_and_every_entry_is_a_file():
    there = {str(p.relative_to(DATA)) for kind in ("points", "runs") for p in (DATA / kind).rglob("*") if p.is_file()}
    assert there == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_entries_agree_with_the_headers_of_their_files(name):
    about, said = FILES[name], header(DATA / name)
    assert set(about) <= KNOWN
    assert about["about"]
    for key, field in (("gpus", "num_gpus"), ("command", "command")):
        assert about.get(key, said.get(field)) == said.get(field), key
    if said.get("date"):
        assert about["day"] == said["date"][:10]
        assert about["machine"].startswith("h100x" if "H100" in said["gpu"] else "h200x")
        assert int(about["machine"].split("x")[1].split("-")[0]) == said.get("gpus_of_host", said["num_gpus"])
    if name.startswith("runs/"):
        assert name.split("/")[1] == about["machine"]


def test_runs_are_compared_on_the_cluster_that_was_measured_on_their_own_machine():
    accuracy, runs = load_script("docs/accuracy.py"), manifest()["runs"]
    told = {name: about for name, about in runs.items() if "cluster" in about}
    assert told
    for name, about in told.items():
        assert runs[about["cluster"]]["machine"] == about["machine"]
        preset, own = (
            {cluster_of(run.scenario) for run in found} for found in (load_runs(DATA / name), accuracy.recorded(name))
        )
        assert {cluster.fabric for cluster in preset}.isdisjoint(cluster.fabric for cluster in own)
        assert {(cluster.num_gpus, cluster.gpu) for cluster in preset} == {
            (cluster.num_gpus, cluster.gpu) for cluster in own
        }


@pytest.mark.slow
def test_what_fits_leave_out_is_there_and_explained():
    left_out = {name: about for name, about in FILES.items() if "without" in about}
    assert left_out
    for name, about in left_out.items():
        assert about["because"]
        assert about["effect"]
        kinds = {p.get("kind", p.get("kernel")) for p in load(DATA / name).points}
        for profile, without in about["without"].items():
            assert profile in about["fits"]
            assert set(without) <= kinds, name
            (read,) = [m for m in measurements(profile) if m.source == load(DATA / name).source]
            assert not {p.get("kind", p.get("kernel")) for p in read.points} & set(without)


def test_every_shipped_profile_of_this_repository_has_a_recipe():
    made = set(manifest()["profiles"])
    assert made <= set(shipped_profiles())
    assert all(fitted_files(name) for name in made)
