"""The page of calibrations: its head and its replay agree with the committed measurements."""

from itertools import pairwise

import pytest
from scripts import load_script


@pytest.fixture(scope="module")
def docs():
    return load_script("docs/calibration.py")


@pytest.fixture(scope="module")
def files(docs):
    return docs.measured_files()


def test_every_machine_has_counts_of_what_was_measured(docs, files):
    rows = docs.head(files)
    assert rows
    assert len({len(measured) for measured in rows.values()}) == 1
    assert all(any(character.isdigit() for character in cell) for cell in next(iter(rows.values())))


def test_costs_of_points_add_up_to_what_their_files_took(docs, files):
    whole = [f"h200-{kind}-{gpu}.jsonl" for kind in ("kernels", "rested") for gpu in range(4)]
    checked = [files[name] for name in whole]
    for m in checked:
        points = [*m.of("attention"), *m.of("elementwise")]
        seconds = sum(map(docs.timed_seconds, points)) + 3 * len(m.of("sustained"))
        assert seconds == pytest.approx(m.of("end")[0]["samples_s"][0], rel=0.12)


def test_points_of_a_real_calibration_cost_what_the_replay_says(docs):
    m = docs.load(docs.REAL)
    points = [p for p in m.points if p.get("rank", 0) == 0]
    spent = [(p, p["at_s"] - before["at_s"]) for before, p in pairwise(points)]
    attention = sum(seconds for p, seconds in spent if p["op"] == "attention")
    compiled = {
        (p["pass"], p["num_heads"] // p["num_kv_heads"], p["causal"], p["varlen"])
        for p in m.of("attention")
        if p["kernel"] == "fa4"
    }
    said = sum(docs.timed_seconds(p) for p, _ in spent if p["op"] == "attention") + docs.COMPILE_S * len(compiled)
    assert said == pytest.approx(attention, rel=0.1)
    assert points[0]["at_s"] < docs.START_S
    assert sum(seconds for p, seconds in spent if p["op"] == "host") == pytest.approx(docs.LAUNCHES_S, rel=0.2)


def test_more_minutes_measure_more_and_keep_to_their_time(docs, files):
    parts = docs.queues(docs.split(files)[0])
    sets, least = [], docs.LEAST_CALLS * len(docs.KERNELS) * docs.NUM_GPUS
    for minutes in (1, 2, 3, 4):
        tasks, seconds = docs.replay(parts, minutes)
        sets.append({id(point) for task in tasks for point in task.points})
        assert sum("pass" in task.points[0] for task in tasks) >= least
        assert minutes < 2 or seconds < 60 * minutes + 12
    assert all(few < many for few, many in pairwise(sets))


def test_no_held_out_point_is_fitted(docs, files):
    left, held = docs.split(files)
    kept = {id(point) for m in left.values() for point in m.points}
    assert len(held) > 800
    assert not kept & {id(point) for point in held}
