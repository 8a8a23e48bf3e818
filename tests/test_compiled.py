import subprocess
import sys

import pytest

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


def result(folder):
    """What the caller returns in a new process, and whether its machine code was kept."""
    done = subprocess.run([sys.executable, "-B", "-c", RUN, str(folder)], capture_output=True, text=True, check=True)
    value, hits = done.stdout.split()
    return int(value), hits == "1"


@pytest.mark.parametrize(
    ("changed", "text", "expected"),
    [("own_helper", HELPER.replace("2 * x", "3 * x"), 16), ("own_constants", "ADDED = 7\n", 17)],
)
def test_machine_code_is_kept_until_what_it_holds_of_other_files_changes(tmp_path, changed, text, expected):
    for name, first in (("own_helper", HELPER), ("own_constants", "ADDED = 1\n"), ("own_caller", CALLER)):
        (tmp_path / f"{name}.py").write_text(first)
    assert result(tmp_path) == (11, False)
    assert result(tmp_path) == (11, True)
    (tmp_path / f"{changed}.py").write_text(text)
    assert result(tmp_path) == (expected, False)
    assert result(tmp_path) == (expected, True)
