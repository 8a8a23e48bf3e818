"""Published rings on A100 and H800: what is compared, and how well it is predicted."""

from statistics import mean

import pytest
from targets import check

from studies.public_attention.compare import FILES, committed, compared, rows


@pytest.fixture(scope="module")
def found():
    return compared(committed())


@pytest.fixture(scope="module")
def today():
    from studies.public_attention.compare import predict_all

    return compared(predict_all())[0]


def head_dim(one):
    return one.row.scenario["head_dim"]


def test_every_row_is_compared_or_says_why_not(found):
    assert len(rows()) == 12 + 87
    assert len(found[0]) + sum(found[1].values()) == len(rows())
    assert sum(found[1].values()) == 18


def test_rings_of_two_gpus_that_nobody_measured_here(today):
    mine = [one for one in today if one.row.file == FILES[0]]
    check("ring-flash-attn's table, mean", mean(abs(one.error) for one in mine))
    assert all(one.inside for one in mine)


def test_rankings_of_rings_are_those_published(today):
    groups = {}
    for one in today:
        if one.row.file == FILES[0]:
            groups.setdefault((one.row.scenario["cluster"], one.row.scenario["pass"]), []).append(one)
    assert len(groups) == 4
    for some in groups.values():
        by_time, published = (sorted(some, key=key) for key in (lambda one: one.time_s, lambda one: one.row.measured_s))
        assert by_time == published


def test_a_port_caps_a_message_and_does_not_scale_it(today):
    """An H800 has 0.444 of H100's port, and its rings on four channels take as long."""
    from cpsim import predict
    from cpsim.case.load import scenario_from

    one = next(one for one in today if "h800" in one.row.scenario["cluster"] and one.row.scenario["strategy"] == "ring")
    h100 = predict(scenario_from({**one.row.scenario, "cluster": "dgx-h100"}))
    assert one.time_s == pytest.approx(h100.time_s, rel=0.05)


def test_usp_of_a_hundred_and_twenty_eight(today):
    mine = [one for one in today if one.row.file == FILES[1] and head_dim(one) == 128]
    check("yunchang's picture, head_dim 128, mean", mean(abs(one.error) for one in mine))


def test_usp(today):
    mine = [one for one in today if one.row.file == FILES[1]]
    check("yunchang's picture, mean", mean(abs(one.error) for one in mine))
