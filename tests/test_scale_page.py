"""The page of our own speed is made of the committed measurement, and bars hold in it."""

import json

import pytest
from scripts import load_script


@pytest.fixture(scope="module")
def docs():
    return load_script("docs/scale.py")


@pytest.fixture(scope="module")
def data(docs):
    return json.loads(docs.DATA.read_text())


def test_the_page_has_a_row_for_every_large_machine(docs, data):
    rows = [line for line in docs.page(data).splitlines() if line.startswith("| ")]
    machines = {row["gpus"] for row in data["large"]}
    assert machines
    assert not [n for n in machines if not any(str(n) in row or f"{n:,}" in row for row in rows)]


def test_bars_that_the_measurement_meets(docs, data):
    at = data["stages"]["96"]
    assert at["ops"] / at["constant"] > 5e6
    assert at["ops"] / at["simulate"] > 1e6
    assert at["plan"] < at["simulate"]
    assert sum(at[stage] for stage in ("plan", "price", "simulate")) <= 0.010
    assert docs.exponent(data, "simulate") <= 1.05
    assert docs.exponent(data, "plan", "price", "simulate") <= 1.05
    assert at["draws"] <= 20 * at["simulate"]
    forward = {(row["strategy"], row["gpus"]): row["seconds"] for row in data["large"] if row["pass"] == "fwd"}
    assert forward["zigzag_ring", 4096] <= 2
    assert forward["usp", 4096] <= 2
    assert forward["usp", 16384] <= 5
    assert max(row["peak_bytes"] for row in data["large"]) <= 2 * 2**30


def test_stages_are_measured_on_the_schedule_that_the_page_names(docs):
    small = docs.stages(8)
    assert small["ops"] == 8**2 + 2 * 8 * 7
    assert all(small[stage] > 0 for stage in docs.STAGES)


def test_what_an_op_touches_is_counted(docs):
    touched = docs.touched_bytes()
    assert touched["constant"] < touched["simulate"] < 400
