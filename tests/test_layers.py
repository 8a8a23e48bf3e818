"""Who may import whom, and what ``import cpsim`` must not load."""

import ast
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

CORE = {"errors", "units", "files", "compiled"}
CASE = {"mask_names", "mask_shapes", "masks", "stripes", "documents", "workload", "cluster", "scenario"}
PLAN = {"tiles", "schedule"}
ALLOWED = {
    "errors": set(),
    "allocator": set(),
    "interrupts": set(),
    "processes": {"allocator", "interrupts"},
    "compiled": set(),
    "units": set(),
    "files": {"errors"},
    "masks": CORE,
    "block_masks": {"masks", "compiled"},
    "stripes": {"masks", "compiled"},
    "mask_names": {"files"},
    "mask_shapes": CORE | {"masks", "mask_names"},
    "documents": CORE,
    "cluster": CORE,
    "workload": CORE | {"masks", "mask_names", "mask_shapes", "stripes"},
    "scenario": CORE | {"mask_names", "documents", "workload", "cluster", "training.model", "training.parallel"},
    "tiles": {"masks", "stripes", "compiled"},
    "schedule": {"masks", "stripes", "tiles", "errors", "compiled"},
    "transformer": set(),
    "builder": {"masks", "tiles", "schedule", "compiled"},
    "implementations": CORE | {"masks", "workload", "schedule"},
    "dcp": CORE | CASE - {"scenario"} | PLAN,
    "distca": CORE | {"masks", "documents"},
    "strategies": CORE | CASE - {"scenario"} | PLAN | {"builder", "implementations", "dcp", "distca"},
    "sim": PLAN | {"masks", "errors", "compiled"},
    # price fills the engines' input, so it knows its format: sim.work and nothing else of sim
    "models": CORE
    | {
        "distca",
        "masks",
        "block_masks",
        "workload",
        "cluster",
        "calibrate.profile",
        "sim.work",
        "transformer",
        "implementations",
    }
    | PLAN,
    "calibrate": CORE | {"models", "masks", "mask_shapes", "block_masks", "cluster", "tiles", "processes"},
    "validation": CORE | {"masks", "workload", "tiles", "schedule"},
    "training": CORE
    | {"cluster", "workload", "implementations", "schedule", "strategies", "sim", "models", "calibrate.profile"}
    | {"transformer"},
    "layer": CORE | CASE | PLAN | {"builder", "implementations", "strategies", "training.model", "transformer"},
    "uncertainty": {"calibrate.profile", "cluster", "implementations", "models", "scenario"},
    "passes": CORE
    | CASE
    | PLAN
    | {"calibrate.profile", "implementations", "layer", "models", "sim", "strategies", "uncertainty"},
    "sweeps": CORE | {"prediction", "predictor", "processes", "scenario"},
    "steps": CORE | {"scenario", "cluster", "implementations", "calibrate.profile", "training"},
    "step_advice": CORE
    | {"passes", "scenario", "prediction", "predictor", "processes", "steps", "strategies", "training"},
    "support": CORE | CASE - {"scenario"} | PLAN | {"strategies", "implementations", "models"},
    "prediction": CORE | {"scenario", "sim.timeline"},
    "runs": CORE | {"scenario"},
    "launch": CORE | {"scenario"},
    "kernel_tables": CORE | CASE | {"models", "calibrate", "strategies", "schedule"},
    "reproduce": CORE
    | {"distca", "masks", "schedule", "cluster", "documents", "scenario", "prediction", "predictor", "models"}
    | {"calibrate", "training", "steps", "processes"},
    "comparison": CORE | {"cluster", "scenario", "runs", "prediction", "predictor", "processes"},
    "predictor": CORE
    | CASE
    | PLAN
    | {"strategies", "implementations", "sim", "models", "calibrate", "prediction", "validation", "steps", "training"}
    | {"layer", "passes", "processes", "uncertainty"},
    "report": CORE
    | CASE
    | PLAN
    | {"strategies", "implementations", "sim", "predictor", "prediction", "calibrate", "comparison"}
    | {"runs", "kernel_tables", "support", "reproduce", "step_advice", "training", "processes"},
    "explore": CORE
    | CASE
    | PLAN
    | {"calibrate", "comparison", "interrupts", "prediction", "predictor", "processes", "report", "runs"},
    "terminal": {"errors", "processes"},
    "cli_reproduce": {"errors", "terminal", "report", "reproduce"},
    "cli": CORE
    | CASE
    | {"predictor", "prediction", "report", "strategies", "calibrate", "validation", "schedule"}
    | {"runs", "launch", "comparison", "kernel_tables", "support", "implementations", "step_advice"}
    | {"allocator", "explore", "interrupts", "sweeps", "terminal", "cli_reproduce"},
    "__init__": CORE | CASE | PLAN | {"builder", "predictor", "prediction", "strategies", "sim", "validation"},
    "__main__": {"cli", "interrupts"},
}
"""Module or package of cpsim -> what it may import from cpsim, itself aside."""

FORBIDDEN = {"torch", "flash_attn", "real"}
SLOW = {"torch", "flash_attn", "simpy", "plotly", "scipy", "numba", "pandas"}


def modules():
    return sorted((ROOT / "cpsim").rglob("*.py"))


def layer_of(path):
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


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_the_layers(path):
    layer = layer_of(path)
    assert layer in ALLOWED, f"{layer}: add it to ALLOWED"
    for name in imported(path):
        assert name.split(".")[0] not in FORBIDDEN, f"{path} imports {name}"
        if not name.startswith("cpsim."):
            continue
        parts = name.split(".")[1:]
        names = {parts[0], ".".join(parts[:2])}
        assert parts[0] == layer or names & ALLOWED[layer], f"{path} imports {name}"


def test_the_map_has_no_cycles():
    known = {layer: {n.split(".")[0] for n in below} for layer, below in ALLOWED.items()}
    known["models"] -= {"calibrate"}  # profile.py is data; calibrate's fits use the models
    done = set()
    while len(done) < len(known):
        free = {layer for layer, below in known.items() if below <= done} - done
        assert free, f"cycle among {sorted(set(known) - done)}"
        done |= free


def fresh(code):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout)


def test_import_cpsim_loads_nothing_slow():
    loaded = fresh("import sys, json, cpsim; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))")
    assert not SLOW & set(loaded)


def test_import_cpsim_takes_less_than_300_ms():
    code = "import time; t = time.perf_counter(); import cpsim; print(time.perf_counter() - t)"
    assert statistics.median(fresh(code) for _ in range(5)) < 0.3
