"""Ctrl-C: what it leaves of a command, and of its processes."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from test_cli import EXAMPLES

from cpsim.runtime.processes import spread

RING = {"strategy": "zigzag_ring", "gpus": 96, "cluster": "dgx-h200", "heads": 32, "kv_heads": 8}


def many(tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps({**RING, "tokens": 96 * 64 * n}) + "\n" for n in range(1, 5001)))
    return path


def hear():
    """Before a command starts: it hears of interrupts, whether these tests do or not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("command", "seconds", "send"),
    [
        (lambda folder: ["cpsim", "predict", many(folder), "--jobs", "2", "--out", folder / "out.jsonl"], 4, os.killpg),
        pytest.param(
            lambda folder: ["cpsim", "predict", many(folder), "--jobs", "2", "--out", folder / "out.jsonl"],
            4,
            os.kill,
            marks=pytest.mark.slow,
        ),
        (lambda folder: ["cpsim", "sweep", many(folder), "--jobs", "2", "--out", folder / "out"], 4, os.killpg),
        pytest.param(lambda _: ["studies", "longca-96", "--jobs", "2"], 4, os.killpg, marks=pytest.mark.slow),
        pytest.param(
            lambda _: ["cpsim", "advise", "--step", EXAMPLES / "llama3-8b-step-64gpu.yaml"],
            4,
            os.killpg,
            marks=pytest.mark.slow,
        ),
        (lambda _: ["cpsim", "advise", EXAMPLES / "llama3-8b-96gpu.yaml"], 0.4, os.killpg),
        (lambda _: ["cpsim", "explore", "--port", "0"], 3, os.killpg),
    ],
    ids=["predict", "sent to it alone", "sweep", "studies", "advise --step", "during imports", "explore"],
)
def test_an_interrupt_ends_a_command_and_its_processes_at_once(command, seconds, send, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-m", *map(str, command(tmp_path))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hear,
    ) as running:
        time.sleep(seconds)
        assert running.poll() is None, "it ended before it could be interrupted"
        send(running.pid, signal.SIGINT)
        said = running.communicate(timeout=10)
    assert running.returncode == 130
    assert "Traceback" not in "".join(said)
    assert ended(lambda: is_there(running.pid))


def is_there(group):
    """Whether a group has a process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def ended(lasts):
    """Whether something ends within ten seconds."""
    return any(not lasts() or time.sleep(0.1) for _ in range(100))


def test_who_stops_early_waits_for_none_of_the_rest():
    results = spread(time.sleep, [0.0, *[600.0] * 5], 2)
    assert next(results) == (0, None)
    closing = threading.Thread(target=results.close, daemon=True)
    closing.start()
    closing.join(timeout=60)
    assert not closing.is_alive()
    assert ended(multiprocessing.active_children)


def test_a_launch_ends_with_an_interrupt_of_which_it_hears_once(tmp_path):
    heard = tmp_path / "heard"
    launched = f'sleep 60 & trap "echo once >> {heard}; kill $!; exit" TERM INT; touch {heard}; wait'
    waits = (
        "from cpsim.cli.launch import _status; from cpsim.runtime.interrupts import unwinding\n"
        f"with unwinding(): _status(['sh', '-c', {launched!r}], {{}})"
    )
    with subprocess.Popen(
        [sys.executable, "-c", waits], stderr=subprocess.PIPE, start_new_session=True, preexec_fn=hear
    ) as running:
        while not heard.exists():
            time.sleep(0.1)
        os.killpg(running.pid, signal.SIGINT)
        running.communicate(timeout=10)
    assert heard.read_text() == "once\n"
