import os
import resource
import subprocess
import sys

import pytest

from cpsim.runtime import compiled

HELPER = "from cpsim.runtime.compiled import compiled\n\n@compiled()\ndef helper(x):\n    return 2 * x\n"
CALLER = """from cpsim.runtime.compiled import compiled
from cpsim.own_constants import ADDED
from cpsim.own_helper import helper

@compiled()
def caller(x):
    return inner(x)

@compiled()
def inner(x):
    return helper(x) + ADDED
"""
RUN = """import sys, cpsim
cpsim.__path__.append(sys.argv[1])
from cpsim.own_caller import caller
print(caller(5), sum(caller.stats.cache_hits.values()))
"""


FILES = {"own_helper": HELPER, "own_constants": "ADDED = 1\n", "own_caller": CALLER}


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path / "sources")


def written(folder):
    folder.mkdir()
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def started(folder, run=RUN):
    """A process whose machine code is kept beside the folder of sources."""
    kept = {**os.environ, "NUMBA_CACHE_DIR": str(folder.parent / "kept")}
    command = [sys.executable, "-B", "-c", run, str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=kept)


def result(folder):
    """What the caller returns in a new process, and whether its machine code was kept."""
    return answer(started(folder))


def answer(process):
    said, errors = process.communicate()
    assert process.returncode == 0, errors
    value, hits = said.split()
    return int(value), hits == "1"


@pytest.mark.parametrize(
    ("changed", "text", "expected"),
    [
        ("own_helper", HELPER.replace("2 * x", "3 * x"), 16),
        pytest.param("own_constants", "ADDED = 7\n", 17, marks=pytest.mark.slow),
    ],
)
def test_machine_code_is_kept_until_what_it_holds_of_other_files_changes(folder, changed, text, expected):
    assert result(folder) == (11, False)
    assert result(folder) == (11, True)
    (folder / f"{changed}.py").write_text(text)
    assert result(folder) == (expected, False)
    assert result(folder) == (expected, True)


def test_machine_code_outlasts_another_installation_of_the_same_sources(folder):
    assert result(folder) == (11, False)
    assert result(written(folder.with_name("installed"))) == (11, True)


def test_kept_machine_code_that_is_not_whole_is_made_again(folder):
    assert result(folder) == (11, False)
    first, second, third = (folder.parent / "kept").rglob("*.nbc")
    first.write_bytes(first.read_bytes()[:-20])
    second.write_bytes(b"")
    whole = third.read_bytes()
    third.write_bytes(whole[:-999] + bytes([whole[-999] ^ 1]) + whole[-998:])
    assert [result(folder), result(folder)] == [(11, False), (11, True)]


def test_of_processes_that_start_together_one_compiles(folder):
    together = [started(folder) for _ in range(3)]
    assert sorted(answer(process)[1] for process in together) == [False, True, True]


def test_without_a_folder_to_keep_it_in_machine_code_is_made_for_the_process(folder):
    (folder.parent / "kept").write_text("a file, not a folder")
    assert result(folder) == (11, False)
    assert result(folder) == (11, False)


PLACES = {
    "a file": ({"NUMBA_CACHE_DIR": __file__}, "Not a directory"),
    "a file of the user's": ({"XDG_CACHE_HOME": __file__}, "Not a directory"),
    "nowhere": ({"XDG_CACHE_HOME": "/proc/cache"}, "No such file or directory"),
    "a home that is missing": ({"HOME": "/proc/me"}, "No such file or directory"),
    "no home": ({"HOME": "~"}, "the user has no home"),
    "a full disk": ({"NUMBA_CACHE_DIR": "/dev/full"}, "Not a directory"),
}


@pytest.mark.parametrize(("place", "why"), PLACES.values(), ids=PLACES)
def test_where_machine_code_cannot_be_kept_is_said_once(place, why, monkeypatch, capsys):
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(compiled.config, "CACHE_DIR", place.get("NUMBA_CACHE_DIR", ""))
    monkeypatch.setattr(compiled, "_told", set())
    assert [compiled.folder.__wrapped__() for _ in range(2)] == [None, None]
    said = capsys.readouterr().err
    assert said.startswith(f"cpsim: {next(iter(place.values()))}")
    assert why in said
    assert "set NUMBA_CACHE_DIR" in said
    assert said.count("\n") == 1


def full():
    """Files may have so many bytes only."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))


def test_where_there_is_no_room_for_it_machine_code_is_made_for_the_process(folder):
    kept = folder.parent / "kept"
    command, environment = [sys.executable, "-B", "-c", RUN, str(folder)], {**os.environ, "NUMBA_CACHE_DIR": str(kept)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, preexec_fn=full)
    assert done.stdout.split() == ["11", "0"]
    assert done.stderr.startswith(f"cpsim: {kept}")
    assert "File too large" in done.stderr
    assert done.stderr.count("\n") == 1
    assert {path.name for path in kept.rglob("*") if path.is_file()} == {"locks"}
    assert result(folder) == (11, False)


def test_a_constant_argument_is_no_specialisation_of_its_own(monkeypatch):
    monkeypatch.setattr(compiled, "folder", lambda: None)

    @compiled.compiled()
    def helper(x):
        return x + 1

    @compiled.compiled()
    def caller(x):
        return helper(x) + helper(3) + helper(4)

    assert caller(2) == 3 + 4 + 5
    assert len(helper.signatures) == 1


@pytest.mark.parametrize(("patience", "told"), [((0.0, 0.0), 1), ((60.0, 60.0), 0)])
def test_compiling_for_long_is_said_once_on_stderr(folder, patience, told):
    run = f"from cpsim.runtime import compiled\ncompiled.TOLD_AFTER_S = {patience}\n{RUN}"
    process = started(folder, run)
    assert process.communicate()[1].count("cpsim: compiling") == told
    assert started(folder, run).communicate()[1] == ""
