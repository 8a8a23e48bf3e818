"""What `import cpsim` offers, and what it costs."""

import doctest
import json
import pkgutil
import statistics
import subprocess
import sys

import numpy as np
import pytest

import cpsim
import cpsim.case.load
import cpsim.case.scenario
import cpsim.prediction.batches.plan
import cpsim.prediction.predict

CASE = {"gpus": 4, "cluster": "h200-4", "tokens_per_gpu": 8192, "heads": 32, "kv_heads": 8}

COST = """
import sys, time
start = time.perf_counter()
import cpsim
print(time.perf_counter() - start)
"""


def test_all_public_names_exist():
    assert sorted(cpsim.__all__) == sorted(cpsim._MODULE_OF)
    assert all(getattr(cpsim, name) is not None for name in cpsim.__all__)


def test_no_submodule_hides_a_public_name():
    submodules = {module.name for module in pkgutil.iter_modules(cpsim.__path__)}
    assert not submodules & set(cpsim.__all__)


@pytest.mark.benchmark
def test_import_is_fast():
    runs = [
        subprocess.run([sys.executable, "-c", COST], capture_output=True, text=True, check=True).stdout
        for _ in range(5)
    ]
    assert statistics.median(map(float, runs)) < 0.3


@pytest.mark.parametrize(
    ("module", "least"), [(cpsim.prediction.predict, 8), (cpsim.case.load, 1), (cpsim.prediction.batches.plan, 3)]
)
def test_examples_in_docstrings_are_true(module, least):
    failed, attempted = doctest.testmod(module)
    assert failed == 0
    assert attempted >= least


def test_a_sweep_keeps_every_case_in_order_and_says_why_one_has_no_answer():
    cases = cpsim.grid(CASE | {"strategy": "ring"}, {"gpus": [2, 8], "kv_heads": [8, 5]})
    columns = cpsim.sweep([*cases, CASE, {"gpus": 4}])
    assert {len(column) for column in columns.values()} == {6}
    assert columns["gpus"].tolist() == [2, 0, 8, 0, 4, 0]
    assert np.isfinite(columns["time_s"]).tolist() == [True] + [False] * 5
    assert columns["time_s"][0] == cpsim.predict(cases[0]).time_s
    for row, part in enumerate(("", "a divisor of heads", "one machine of 4", "a divisor", "strategy:", "missing")):
        assert part in columns["error"][row]
        assert bool(columns["error"][row]) == bool(part)


def test_columns_of_an_advice_are_its_candidates():
    advice = cpsim.advise(CASE | {"strategy": "allgather"})
    columns = advice.columns()
    assert len(advice.candidates) > 2
    assert columns["total_s"].tolist() == sorted(c.total_s for c in advice.candidates)
    assert columns["knobs"][0] == json.dumps(dict(advice.candidates[0].scenario.knobs), sort_keys=True)
    assert columns["probability_best"].sum() == pytest.approx(1)


def test_pandas_takes_columns_as_they_are():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(cpsim.sweep(cpsim.grid(CASE, {"strategy": ["ring", "ulysses"]})))
    assert frame.set_index("strategy")["time_s"].idxmin() == "ulysses"
    assert frame.time_s.dtype == float


def test_a_case_may_be_a_file(tmp_path):
    path = tmp_path / "case.json"
    path.write_text(json.dumps(CASE | {"strategy": "ring"}))
    assert cpsim.predict(path).time_s == cpsim.predict(CASE | {"strategy": "ring"}).time_s
