"""The script of DCP's page gives sane rows from the committed record."""

import json

import pytest
from scripts import load_script


@pytest.fixture(scope="module")
def docs():
    return load_script("studies/dcp/page.py")


def test_the_committed_reproduction_gives_a_table_with_numbers(docs):
    rows = [line for line in docs.reproduced(json.loads(docs.REPRODUCED.read_text())) if line.startswith("|")]
    assert len(rows) > 2
    assert len({line.count("|") for line in rows}) == 1
    assert any(character.isdigit() for character in rows[-1])
    assert docs.FIGURE.read_text().startswith("<svg")


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
