"""Ctrl-C, as a terminal sends it: to a command and all its processes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from test_cli import EXAMPLES

RING = {"strategy": "zigzag_ring", "gpus": 96, "cluster": "dgx-h200", "heads": 32, "kv_heads": 8}


def many(tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps({**RING, "tokens": 96 * 64 * n}) + "\n" for n in range(1, 5001)))
    return path


@pytest.mark.parametrize(
    ("command", "seconds"),
    [
        (lambda folder: ["predict", many(folder), "--jobs", "2", "--out", folder / "out.jsonl"], 4),
        (lambda folder: ["sweep", many(folder), "--jobs", "2", "--out", folder / "out"], 4),
        (lambda _: ["reproduce", "longca-96", "--jobs", "2"], 4),
        (lambda _: ["advise", EXAMPLES / "llama3-8b-96gpu.yaml"], 0.4),
    ],
    ids=["predict", "sweep", "reproduce", "while modules are imported"],
)
def test_an_interrupt_ends_a_command_and_its_processes_at_once(command, seconds, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-m", "cpsim", *map(str, command(tmp_path))],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as running:  # fmt: skip
        time.sleep(seconds)
        assert running.poll() is None, "it ended before it could be interrupted"
        os.killpg(running.pid, signal.SIGINT)
        said = running.communicate(timeout=10)
    assert running.returncode == 130
    assert "Traceback" not in "".join(said)
    assert ends_within(10, running.pid)


def ends_within(seconds, group):
    """Whether no process of a group is left after some time."""
    for _ in range(10 * seconds):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
