"""The page of our own speed is made from the committed measurement, and bars hold in it."""

import json

import pytest
from scripts import load_script
from targets import check


@pytest.fixture(scope="module")
def docs():
    return load_script("docs/scale.py")


@pytest.fixture(scope="module")
def data(docs):
    return json.loads(docs.DATA.read_text())


def test_the_page_follows_the_measurement(docs, data):
    slower = json.loads(json.dumps(data))
    slower["stages"]["96"]["plan"] *= 3
    assert docs.page(data) != docs.page(slower)


def test_bars_that_the_measurement_meets(docs, data):
    at = data["stages"]["96"]
    assert at["ops"] / at["constant"] > 5e6
    assert at["ops"] / at["simulate"] > 1e6
    assert at["plan"] < at["simulate"]
    assert sum(at[stage] for stage in ("plan", "price", "simulate")) <= 0.010
    assert docs.exponent(data, "plan", "price", "simulate") <= 1.05
    assert at["draws"] <= 20 * at["simulate"]
    forward = {(row["strategy"], row["gpus"]): row["seconds"] for row in data["large"] if row["pass"] == "fwd"}
    assert forward["zigzag_ring", 4096] <= 2
    assert forward["usp", 4096] <= 2
    assert forward["usp", 16384] <= 5
    assert max(row["peak_bytes"] for row in data["large"]) <= 2 * 2**30


def test_simulation_grows_with_the_number_of_ops(docs, data):
    check("growth of simulations with ops, exponent less 1", docs.exponent(data, "simulate") - 1)


def test_stages_are_measured_on_the_schedule_that_the_page_names(docs):
    small = docs.stages(8)
    assert small["ops"] == 8**2 + 2 * 8 * 7
    assert all(small[stage] > 0 for stage in docs.STAGES)


def test_what_an_op_touches_is_counted(docs):
    touched = docs.touched_bytes()
    assert touched["constant"] < touched["simulate"] < 400
