"""Who may import whom, what lies where, and what ``import cpsim`` must not load."""

import ast
import json
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "cpsim"

ROOMS = (
    ("errors",),
    ("units",),
    ("runtime",),
    ("masks",),
    ("case",),
    ("schedule",),
    ("strategies", "models", "sim"),
    ("prediction", "calibrate"),
    ("report",),
    ("explore",),
    ("cli",),
    ("real",),
    ("__init__", "__main__"),
)
"""A room imports itself and rooms above it in this list; those of one line do not import each other."""
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}
IN_ROOT = {"__init__", "__main__", "errors", "units"}
WITH_GPUS = {"torch", "flash_attn", "triton", "cupy"}
OUTSIDE = {"studies", "tests"}
SLOW = {"torch", "flash_attn", "simpy", "plotly", "scipy", "numba", "pandas"}


def name_of(path):
    """Dotted name of a module, e.g. ``cpsim.masks.shapes``; of an ``__init__.py`` that of its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
PACKAGES = [path for path in MODULES.values() if path.name == "__init__.py" and path.parent != PACKAGE]


def short(path):
    return str(path.relative_to(ROOT))


def room_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path):
    """Absolute names of all modules that a file imports, also inside functions; names within them are left out."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            within = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else str(node.module) for name in within}
    return names


def target_of(name):
    """The room that an imported module of cpsim lies in."""
    return [*name.split("."), "__init__"][1]


def test_a_module_imports_its_own_room_and_rooms_above_it():
    unknown = sorted({room_of(path) for path in MODULES.values()} - set(FLOOR))
    assert not unknown, f"give them a place in ROOMS: {unknown}"
    wrong = [
        f"{short(path)} imports {name}"
        for path in MODULES.values()
        for name in sorted(imported(path) & set(MODULES))
        if target_of(name) != room_of(path) and FLOOR[target_of(name)] >= FLOOR[room_of(path)]
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_executor_imports_torch_and_nobody_imports_the_executor_studies_or_tests():
    wrong = [
        f"{short(path)} imports {name}"
        for path in MODULES.values()
        for name in sorted(imported(path))
        if name.split(".")[0] in OUTSIDE
        or (room_of(path) != "real" and (name.split(".")[0] in WITH_GPUS or name.startswith("cpsim.real")))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle():
    graph = {name: imported(path) & set(MODULES) - {name} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


def test_only_few_modules_lie_in_the_root():
    assert {path.stem for path in PACKAGE.glob("*.py")} == IN_ROOT


def test_no_room_is_called_like_a_folder_of_the_repository():
    """But ``data``: what ships lies in the package, measurements and runs in the repository."""
    rooms, folders = ({path.name for path in place.iterdir() if path.is_dir()} for place in (PACKAGE, ROOT))
    assert rooms & folders <= {"data", "__pycache__"}


@pytest.mark.parametrize("path", PACKAGES, ids=short)
def test_a_room_says_what_belongs_there_and_which_tests_cover_it(path):
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    tests = re.findall(r"tests/\w+\.py", text)
    assert tests, "name its tests"
    assert all((ROOT / name).exists() for name in tests), tests


def fresh(code):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout)


def test_import_cpsim_loads_nothing_slow():
    loaded = fresh("import sys, json, cpsim; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))")
    assert not SLOW & set(loaded)
