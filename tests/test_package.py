"""The wheel: what it holds, and how large it is."""

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    sources, built = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, sources)
    shutil.copytree(ROOT / "cpsim", sources / "cpsim", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD, str(built)], cwd=sources, check=True, capture_output=True)
    return next(built.iterdir())


def test_it_installs_one_package_and_its_command(wheel):
    with ZipFile(wheel) as files:
        names = files.namelist()
        command = files.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"cpsim"}
    assert command.split() == ["[console_scripts]", "cpsim", "=", "cpsim.__main__:run"]


def test_it_holds_all_sources_and_what_they_read_but_no_measurements(wheel):
    names = set(ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "cpsim").rglob("*.py")}
    assert sources <= names
    for pattern in ("cpsim/data/*.json", "cpsim/data/profiles/*.json", "cpsim/explore/assets/*", "cpsim/py.typed"):
        wanted = {str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)}
        assert wanted, pattern
        assert wanted <= names
    assert not [name for name in names if "calibrate/data" in name or "tests/" in name]


@pytest.mark.slow
def test_the_oldest_versions_that_it_allows_are_enough():
    done = subprocess.run([ROOT / "tests" / "lowest.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_it_is_smaller_than_two_megabytes(wheel):
    assert wheel.stat().st_size < 2e6
