"""Who may import whom, and what ``import cpsim`` must not load."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

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
)
"""Rooms of the package, each of which imports only those above it; rooms of one line do not know each other."""
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
ON_TOP = ("__init__", "__main__")
SLOW = {"torch", "flash_attn", "simpy", "plotly", "scipy", "numba", "pandas"}
WITH_GPUS = {"torch", "flash_attn", "triton", "cupy"}


def modules():
    return sorted((ROOT / "cpsim").rglob("*.py"))


def room_of(path):
    return path.relative_to(ROOT / "cpsim").with_suffix("").parts[0]


def imported(path):
    """Absolute names of all imports of a file, also those inside functions."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.extend([f"{node.module}.{alias.name}" for alias in node.names])
    return names


def test_nothing_but_errors_and_units_lies_in_the_root_of_the_package():
    assert {p.stem for p in (ROOT / "cpsim").glob("*.py")} == {*ON_TOP, "errors", "units"}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_the_rooms(path):
    room = room_of(path)
    for name in imported(path):
        first, _, rest = name.partition(".")
        assert first not in {"studies", "tests"}, f"{path} imports {name}"
        assert first not in WITH_GPUS or room == "real", f"{path} imports {name}"
        if first == "cpsim" and rest:
            other = rest.split(".")[0]
            if room in ON_TOP:
                assert other != "real", f"{path} imports {name}"
            elif other != room:
                assert LEVEL[other] < LEVEL[room], f"{path} imports {name}"


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def needs():
    """The modules of the package that each module imports when it is imported itself."""
    known = {module_name(path) for path in modules()}
    found = {}
    for path in modules():
        names = [f"{node.module}.{alias.name}" for node in at_import(path) for alias in node.names]
        owners = {name if name in known else name.rpartition(".")[0] for name in names}
        found[module_name(path)] = (owners & known) - {module_name(path)}
    return found


def at_import(path):
    """Import statements of a module that run when it is imported."""
    waiting, found = [ast.parse(path.read_text(encoding="utf-8"))], []
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.ImportFrom):
                found.append(node)
            elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                waiting.append(node)
    return found


def test_no_modules_import_each_other():
    waiting = needs()
    while waiting:
        free = {name for name, below in waiting.items() if not below & waiting.keys()}
        assert free, f"a circle among {sorted(waiting)}"
        waiting = {name: below for name, below in waiting.items() if name not in free}


def fresh(code):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout)


def test_import_cpsim_loads_nothing_slow():
    loaded = fresh("import sys, json, cpsim; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))")
    assert not SLOW & set(loaded)
