"""What `import cpsim` offers, and what it costs."""

import pkgutil
import statistics
import subprocess
import sys

import cpsim

COST = """
import sys, time
start = time.perf_counter()
import cpsim
print(time.perf_counter() - start, *(m for m in ("torch", "simpy", "plotly", "scipy") if m in sys.modules))
"""


def test_all_public_names_exist():
    assert sorted(cpsim.__all__) == sorted(cpsim._MODULE_OF)
    assert all(getattr(cpsim, name) is not None for name in cpsim.__all__)


def test_no_submodule_hides_a_public_name():
    submodules = {module.name for module in pkgutil.iter_modules(cpsim.__path__)}
    assert not submodules & set(cpsim.__all__)


def test_import_is_fast_and_loads_no_heavy_package():
    runs = [
        subprocess.run([sys.executable, "-c", COST], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(5)
    ]
    assert all(len(run) == 1 for run in runs), runs
    assert statistics.median(float(run[0]) for run in runs) < 0.3
