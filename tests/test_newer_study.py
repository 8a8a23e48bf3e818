"""Strategies and masks of later papers ran as predicted before."""

from statistics import mean

import pytest
from targets import check

from studies.newer.__main__ import SHORT_S, of_ranks, of_runs


@pytest.mark.parametrize(("name", "rows", "count"), [("runs", of_runs, 62), ("single ranks", of_ranks, 181)])
def test_what_was_said_before_came_out(name, rows, count):
    errors = [error for _, took, error in rows() if took >= SHORT_S]
    assert len(errors) == count
    check(f"later strategies, {name}, mean", mean(map(abs, errors)))
