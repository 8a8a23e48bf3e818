"""Batches: whatever is wrong with one scenario's profile or cluster is an error of its own lines and of no other."""

import json

import pyarrow.parquet as pq
import pytest
from test_cli import GOOD, cpsim

from cpsim.models.profile import load_profile, to_json
from cpsim.prediction.predict import attempt, predict, predict_many
from cpsim.prediction.sweep import load_sweep, run_sweep

WHOLE = to_json(load_profile("h200"))
FILES = {
    "missing": None,
    "cut-off": WHOLE[:5000],
    "binary": b"\x00\xff" * 100,
    "empty": "",
    "list": "[1, 2]",
    "nested": "[" * 100_000,
    "older": WHOLE.replace('"schema": 4', '"schema": 3'),
    "part": json.dumps({"schema": 4, "format": "cpsim-profile"}),
    "base": json.dumps({"schema": 4, "format": "cpsim-profile", "base": "nobody"}),
    "own-base": json.dumps({"schema": 4, "format": "cpsim-profile", "base": "own-base"}),
    "texts": WHOLE.replace('"name": "h200"', '"name": "h200", "attention": "fast"'),
    "a" * 300: None,
    "folder": ...,
}


@pytest.fixture
def batch(tmp_path):
    """A file of good scenarios, one of each kind of broken profile and cluster between two of them."""
    bad = []
    for name, content in FILES.items():
        path = tmp_path / f"{name}.json"
        if content is ...:
            path.mkdir()
        elif content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        bad += [GOOD | {"profile": path.name}, GOOD | {"cluster": path.name}]
    lines = [line for broken in bad for line in (GOOD, broken)]
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def check(records):
    """Whether good lines have the answer that they have alone, and bad ones an error of theirs."""
    alone = predict(GOOD).time_s
    assert len(records) == 4 * len(FILES)
    assert [record.get("time_s") for record in records[::2]] == [alone] * 2 * len(FILES)
    for record in records[1::2]:
        assert record.get("time_s") is None
        assert "\n" not in record["error"]
        assert "internal error" not in record["error"]


def test_a_broken_profile_or_cluster_makes_only_its_own_lines_errors(batch, tmp_path):
    check([json.loads(line) for line in cpsim("predict", batch, "--json", "--jobs", 1).splitlines()])
    cpsim("sweep", batch, "--jobs", 2, "--out", tmp_path / "swept.jsonl")
    check([json.loads(line) for line in (tmp_path / "swept.jsonl").read_text().splitlines()])
    run_sweep(load_sweep(batch), tmp_path / "swept", jobs=1)
    check(sorted(pq.read_table(tmp_path / "swept").to_pylist(), key=lambda row: row["number"]))


@pytest.mark.parametrize("mistake", [ZeroDivisionError("x"), RecursionError("x"), MemoryError(), OSError(5, "x", "y")])
def test_whatever_goes_wrong_with_one_scenario_is_its_own_answer(mistake, monkeypatch):
    def wrong(*_):
        raise mistake

    monkeypatch.setattr("cpsim.prediction.predict._predict_scenario", wrong)
    found = predict_many([GOOD, GOOD], jobs=1)
    assert len(found) == 2
    assert str(found[0]) == str(attempt(GOOD)) != ""
