"""What studies/dcp/README.md says comes out of its script and the committed record."""

import json

import pytest
from scripts import load_script


@pytest.fixture(scope="module")
def docs():
    return load_script("studies/dcp/page.py")


def test_the_record_makes_a_table_of_every_study(docs):
    record = json.loads(docs.REPRODUCED.read_text())
    lines = docs.reproduced(record)
    assert len(lines) > 10
    assert all(line.startswith("|") or not line.strip() or line[0].isalpha() for line in lines)


def test_a_zigzag_that_moves_what_it_needs_is_the_published_one(docs):
    """Node-level bytes of static zigzag layouts, counted independently: 302, 28.3, 109 and 147 MB."""
    found = {mask: docs.zigzag(mask, docs.ONE).between_nodes_mb for mask in docs.STUDIED}
    assert found == pytest.approx(
        {"causal": 302.0, "lambda": 28.3, "causal_blockwise": 109.1, "shared_question": 146.8}, abs=0.05
    )


def test_points_of_the_figure_are_inside_their_panel(docs):
    points = [docs.Point("cpsim", 0.1, mb, imbalance, 0, 0.0, 0.0) for mb, imbalance in ((10.0, 1.0), (300.0, 5.0))]
    marks = [part for part in docs.panel("causal", points, 52, 30) if part.startswith("<circle")]
    assert len(marks) == 1  # the other one is less even than the axis reaches
    assert 'cx="52.0"' in marks[0]


def test_plans_are_made_with_as_many_orders_as_cut_no_more_than_kahypar_does(docs):
    """In the mean of the committed points; fewer orders cut more between nodes."""
    found, best = docs.means(), f"mtkahypar, {docs.ORDERS} orders"
    assert found["nodes", best][0] < 1.05 * found["nodes", "kahypar"][0] < found["nodes", "mtkahypar, 3 orders"][0]
    assert found["GPUs", best][0] < found["GPUs", "kahypar"][0]
    for between in ("nodes", "GPUs"):
        _, beyond, imbalance, _ = zip(found[between, best], found[between, "kahypar"], strict=True)
        assert beyond[0] <= beyond[1]
        assert imbalance[0] <= imbalance[1]
