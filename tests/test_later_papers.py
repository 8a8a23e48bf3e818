"""Findings of papers on later strategies: signs, sizes, and a reason for every size that is off."""

import pytest
from targets import check

from studies import claims, later


@pytest.mark.parametrize("some", [later.of_claims, later.of_sparse], ids=lambda one: one.__name__)
def test_signs_are_right_and_sizes_have_reasons(some):
    rows = list(some())
    assert all(row.sign is not False for row in rows)
    assert all(row.explained for row in rows)
    assert {row.reason for row in rows if row.error is not None and abs(row.error) > later.CLOSE} <= {
        later.MESH,
        later.WHOLE_LAYERS,
        later.NSA,
    }


def test_signs_and_reasons_are_counted():
    row = later.Row("one", "two", 1.5, 2.0, True)
    assert (row.sign, row.explained) == (True, False)
    assert later.Row("one", "two", 1.5, 0.9, True, "why").sign is False
    assert later.Row("one", "two", 1.01, 2.0, True).sign is None
    assert later.Row("one", "two", None, 0.5, False).sign is True
    text = "\n".join(later.lines([row, later.Row("one", "two", 1.5, 0.9, True, "why")]))
    assert "Signs: 1 of 2 right. Sizes: 0 of 2 within 20 %, and of 1 of 2 others there is a reason:" in text
    assert "\n1. why." in text


@pytest.mark.slow
def test_the_page_has_all_findings():
    rows = later.found()
    shown = claims.PAGE.read_text(encoding="utf-8").split(later.MARKS[0])[1].split(later.MARKS[1])[0]
    assert shown == "\n".join(later.lines(rows)) + "\n"
    signs = [row.sign for row in rows if row.sign is not None]
    check("later papers, signs that are wrong", 1 - sum(signs) / len(signs))
    assert all(row.explained for row in rows)
