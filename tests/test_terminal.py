"""What commands do with the streams and the terminal that they are given: odd ones, closed ones, full ones."""

import errno
import json
import os
import pty
import signal
import subprocess
import sys

import pytest
from test_cli import EXAMPLES, GOOD, one_line
from test_interrupts import hear

from cpsim.runtime.streams import NARROWEST, WIDEST, prepare

COMMAND = [sys.executable, "-m", "cpsim"]
CASE = EXAMPLES / "h200-4-zigzag.yaml"
ANSWERS = {
    "words": ["clusters"],
    "JSON": ["clusters", "--json"],
    "help": ["--help"],
    "a prediction": ["predict", CASE],
}
ANSWER = pytest.mark.parametrize("arguments", ANSWERS.values(), ids=ANSWERS)


def shell(script, *arguments, **environment):
    """What a script does with a command, ``"$@"``."""
    whole = ["bash", "-c", script, "-", *COMMAND, *map(str, arguments)]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    return done


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1:strict", marks=pytest.mark.slow)])
def test_what_an_encoding_lacks_is_replaced(encoding):
    usual = shell('"$@"', "predict", CASE, PYTHONIOENCODING="utf-8").stdout
    done = shell('"$@"', "predict", CASE, PYTHONIOENCODING=encoding)
    name = encoding.partition(":")[0]
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == usual.splitlines()[-1].encode(name, "replace").decode(name) != ""
    assert "?" in done.stdout.splitlines()[-1]


def test_a_file_name_that_no_encoding_has_is_shown_all_the_same(tmp_path):
    bad = os.fsencode(tmp_path) + b"/\xff.yaml"
    done = subprocess.run([*COMMAND, "predict", bad], capture_output=True)
    assert done.returncode == 2
    assert b"cannot be read" in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("asked", "columns"),
    [
        ("0", None),
        ("-5", None),
        ("abc", None),
        ("", None),
        ("1e3", None),
        ("1", NARROWEST),
        ("100000", WIDEST),
        ("80", 80),
    ],
)
def test_odd_widths_are_ignored_or_brought_into_range(asked, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", asked)
    prepare()
    assert os.environ.get("COLUMNS") == (None if columns is None else str(columns))


@pytest.mark.parametrize("columns", ["0", "abc", "1", "100000"])
def test_tables_are_laid_out_whatever_the_width(columns):
    done = shell('"$@"', "clusters", COLUMNS=columns)
    assert (done.returncode, done.stderr) == (0, "")
    assert "dgx-h200" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= {"1": NARROWEST, "100000": WIDEST}.get(columns, 100)


@ANSWER
def test_a_reader_that_has_had_enough_ends_a_command_quietly(arguments):
    done = shell('"$@" | true; exit ${PIPESTATUS[0]}', *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@ANSWER
def test_a_closed_stdout_is_as_if_nobody_read_it(arguments):
    done = shell('"$@" >&-', *arguments)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_written_to_a_file_never_meets_what_is_said(tmp_path):
    """A file that is opened gets the lowest number that is free: that of a stream that is closed."""
    out = tmp_path / "out.jsonl"
    for closed in (">&-", "<&- >&- 2>&-"):
        assert shell(f'"$@" {closed}', "predict", CASE, "--out", out).returncode == 0
        assert len(json.loads(out.read_text())["notes"]) == 1


@ANSWER
def test_a_full_stdout_is_one_line_and_exit_code_1(arguments):
    done = shell('"$@" >/dev/full', *arguments)
    assert done.returncode == 1
    assert one_line(done.stderr) == "cpsim: output: No space left on device\n"


def test_messages_that_nobody_can_hear_change_nothing(tmp_path):
    trace = tmp_path / "trace.json"
    assert shell('"$@" 2>/dev/full', "predict", CASE, "--trace", trace).returncode == 0
    assert json.loads(trace.read_text())["traceEvents"]
    assert shell('"$@" 2>/dev/full', "predict", "missing.yaml").returncode == 2


@pytest.mark.parametrize("option", ["--out", pytest.param("--trace", marks=pytest.mark.slow)])
def test_a_full_device_as_a_file_is_one_line_and_exit_code_1(option):
    done = shell('"$@"', "predict", CASE, option, "/dev/full")
    assert done.returncode == 1
    assert one_line(done.stderr) == "cpsim: /dev/full: No space left on device\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["predict", CASE, "--json", "--out"],
        ["trace", CASE, "--out"],
        ["sweep", EXAMPLES / "sweep.jsonl", "--jobs", "1", "--out"],
        ["mask", "causal", "--html"],
        ["mask", "causal", "--png"],
    ],
    ids=lambda arguments: " ".join(map(str, (arguments[0], arguments[-1]))),
)
def test_no_room_is_one_line_and_leaves_what_was_there(arguments, tmp_path):
    """Files may have no bytes."""
    out = tmp_path / ("out.jsonl" if arguments[0] != "trace" else "out.json")
    out.write_text("what was there")
    done = shell('ulimit -f 0; "$@"', *arguments, out)
    assert done.returncode == 1
    assert done.stderr.startswith(f"cpsim: {out}: {os.strerror(errno.EFBIG)}")
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    assert out.read_text() == "what was there"


def test_devices_and_links_are_written_to_and_stay_what_they_are(tmp_path):
    target, link = tmp_path / "target.jsonl", tmp_path / "link.jsonl"
    target.write_text("")
    target.chmod(0o640)
    link.symlink_to(target)
    printed = shell('"$@"', "predict", CASE, "--out", "/dev/stdout").stdout
    assert shell('"$@"', "predict", CASE, "--out", link).returncode == 0
    assert link.is_symlink()
    assert target.read_text() == printed
    assert target.stat().st_mode & 0o777 == 0o640


def test_an_interrupt_that_whoever_started_a_command_ignores_is_ignored():
    """As with ``nohup``, or in the background of a script."""
    code = (
        "import os, signal; from cpsim.runtime import interrupts\n"
        "interrupts.end_at_once(); os.kill(os.getpid(), signal.SIGINT)\n"
        "with interrupts.unwinding(): os.kill(os.getpid(), signal.SIGINT)\n"
        "print('still here')"
    )
    done = shell(f"trap '' INT; exec {sys.executable} -c \"$CODE\"", CODE=code)
    assert (done.returncode, done.stdout) == (0, "still here\n")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_command_on_a_terminal_ends_with_a_visible_cursor(number, tmp_path):
    case = tmp_path / "cases.jsonl"
    case.write_text((json.dumps(GOOD) + "\n") * 20_000)
    parent, child = pty.openpty()
    command = [*COMMAND, "predict", str(case), "--jobs", "2"]
    with subprocess.Popen(command, stdout=child, stderr=child, preexec_fn=hear) as running:
        os.close(child)
        said = b""
        while b"Predicting" not in said:
            said += os.read(parent, 4096)
        running.send_signal(number)
        try:
            while chunk := os.read(parent, 4096):
                said += chunk
        except OSError:  # the other end is closed
            pass
    os.close(parent)
    assert running.returncode == 128 + number
    assert said.rfind(b"\x1b[?25h") > said.rfind(b"\x1b[?25l")
    assert b"Traceback" not in said
