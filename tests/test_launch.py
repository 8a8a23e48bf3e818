"""What `cpsim run` starts, without starting it; and what it says where it cannot."""

import json
from pathlib import Path

import pytest
from test_cli import cpsim, one_line

from cpsim.case.load import scenario_from
from cpsim.cli import launch
from cpsim.cli.launch import Options

CASE = {"strategy": "ring", "gpus": 4, "cluster": "h200-4", "tokens": 4096, "heads": 8, "kv_heads": 2}


@pytest.fixture
def started(monkeypatch):
    """The commands and the cases of every launch."""
    calls = []

    def status(command, _):
        cases = Path(command[command.index("cpsim.real.run") + 1]).read_text().splitlines()
        calls.append((command, [json.loads(line) for line in cases]))
        return 0

    monkeypatch.setattr(launch, "_status", status)
    return calls


def test_there_is_one_launch_for_every_number_of_gpus_and_nodes(started, tmp_path):
    out = tmp_path / "runs.jsonl"
    out.write_text("old")
    changes = ({}, {"gpus": 2}, {"cluster": "h200-2x2-sockets"}, {"tokens": 8192}, {"gpus": 1, "strategy": "none"})
    asked = [scenario_from(CASE | change) for change in changes]
    options = Options(out=out, command="cpsim run x", num_gpus=4, num_nodes=2, minutes=3)
    assert launch.launch(asked, options) == 0
    assert out.read_text() == ""
    shapes = []
    for command, cases in started:
        gpus = command[command.index("--nproc-per-node") + 1]
        nodes = command[command.index("--emulate-nodes") + 1] if "--emulate-nodes" in command else "1"
        shapes.append((gpus, nodes, len(cases)))
        assert command[command.index("--command") + 1] == "cpsim run x"
        assert "--until" in command
    assert shapes == [("4", "2", 1), ("4", "1", 2), ("2", "1", 1), ("1", "1", 1)]


def test_resuming_keeps_the_file(started, tmp_path):
    out = tmp_path / "runs.jsonl"
    out.write_text("old")
    launch.launch([scenario_from(CASE)], Options(out=out, command="", num_gpus=4, resume=True))
    assert out.read_text() == "old"
    assert "--resume" in started[0][0]


@pytest.mark.parametrize("asked", [["run", "case.json", "--out", "runs.jsonl"], ["calibrate"]])
def test_without_pytorch_a_command_says_how_to_get_it(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "find_spec", lambda _: None)
    monkeypatch.chdir(tmp_path)
    error = one_line(cpsim(*asked, status=2))
    assert f"{asked[0]}: PyTorch is missing in this Python; install it, e.g. pip install" in error


@pytest.mark.parametrize("command", ["run", "calibrate"])
def test_a_broken_pytorch_is_an_error_of_the_command_that_needs_it(command, monkeypatch):
    monkeypatch.setattr(launch, "find_spec", lambda _: True)
    done = type("Done", (), {"returncode": 1, "stderr": "Traceback\nImportError: libcudart", "stdout": ""})
    monkeypatch.setattr(launch.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(launch.CpsimError, match=f"^{command}: PyTorch cannot be imported: ImportError: libcudart"):
        launch.local_gpus(command)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "expected --out FILE for times, or --trace FILE"),
        (["--out", "/no/such/folder/x"], "cannot be written"),
        (["--out", "x.jsonl", "--trace", "y.json"], "expected --out FILE for times, or --trace FILE"),
    ],
)
def test_user_errors_are_one_line(arguments, match, tmp_path):
    case = tmp_path / "case.json"
    case.write_text(json.dumps(CASE))
    assert match in one_line(cpsim("run", case, *arguments, status=2))
