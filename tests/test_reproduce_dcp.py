"""DCP's micro-benchmark: published bars, batches by its rules, and what is made of both."""

import json
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console
from targets import check

from cpsim.calibrate.measurement import load
from cpsim.errors import CpsimError
from cpsim.masks.blocks import visits
from cpsim.masks.slices import UNBOUNDED, Slices
from cpsim.models.attention.params import calls, listed_calls
from cpsim.models.profile import load_profile
from studies.dcp import report
from studies.dcp import reproduce as reproducing
from studies.dcp.report import dcp_record, dcp_view, ranges_record, ranges_view, read_ranges
from studies.dcp.reproduce import (
    CODES,
    FILLED,
    FOLDER,
    GPUS,
    PADDED,
    RANGED,
    TOKENS,
    Assumed,
    Range,
    batches,
    published,
    ranged_profile,
    reproduce,
    scenarios,
    sensitivity,
    slower_with_ranges,
    speed_ups,
    with_ranges,
)


def test_every_published_bar_is_there_and_gives_the_published_speed_ups():
    rows = published()
    assert len(rows) == 4 * 5 * 2 + 4 * 3 * 2 * 2
    assert {row.row for row in rows} == set(CODES)
    found = {(s.mask, s.scale): s.published for s in speed_ups(rows)}
    assert [round(found["causal", scale], 2) for scale in (0.5, 1.0, 2.0, 4.0)] == [2.43, 2.04, 1.64, 1.29]
    assert round(found["lambda", 4.0], 2) == 3.86
    assert [(s.mask, s.scale) for s in speed_ups(rows) if s.outlier] == [("lambda", 1.0)]
    assert [(row.mask, row.row, row.scale) for row in rows if row.outlier] == [
        ("causal", "ring", 1.0),
        ("lambda", "dcp", 1.0),
    ]


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0, 4.0])
def test_batches_are_full_of_whole_documents(scale):
    found = batches(scale, count=50)
    assert len(found) == 50
    assert all(FILLED * TOKENS <= sum(batch) <= TOKENS for batch in found)
    assert batches(scale, count=2) == found[:2]


def test_every_code_runs_its_own_padding():
    batch = batches(1.0, count=1)[0]
    chosen = {row.row: row for row in published() if row.mask == "causal" and row.scale == 1.0}
    documents = {name: next(scenarios(row, "a100", count=1))[0].documents for name, row in chosen.items()}
    assert all(length % PADDED == 0 for length in documents["zigzag"])
    assert documents["loongtrain"] == (max(documents["zigzag"]),) * len(batch)
    assert sum(documents["dcp"]) % GPUS == 0
    cut = np.subtract(batch, documents["dcp"])
    assert np.flatnonzero(cut).tolist() in ([], [batch.index(max(batch))])
    assert 0 <= cut.sum() < GPUS


def test_ranks_divide_the_tokens_of_dcp_even_where_the_last_document_is_tiny():
    row = next(row for row in published() if row.row == "dcp" and row.scale == 0.5)
    assert any(batch[-1] < sum(batch) % GPUS for batch in batches(0.5, count=12))
    for case, *_ in scenarios(row, "a100", count=12):
        assert case.num_tokens % GPUS == 0


def seconds(params, q, k, causal, heads, kv_heads):
    lengths = (np.array([n]) for n in (q, k, causal, heads, kv_heads))
    return calls(params, np.array([0, 1]), *lengths, 128, np.array([True]))[0][0]


def test_ranges_of_keys_cost_a_sixth_more_than_flash_attention_2_where_both_run(tmp_path):
    params = load_profile(str(ranged_profile(tmp_path))).attention
    for pass_, within in (("fwd", 0.1), ("bwd", 0.02)):
        times = [seconds(params[kernel, pass_], 8192, 8192, True, 8, 2) for kernel in ("fa2", RANGED)]
        assert times[1] == pytest.approx(slower_with_ranges(pass_) * times[0], rel=within)
        assert slower_with_ranges(pass_) == pytest.approx(7 / 6, rel=0.02)


def ranged_slices(mask, queries, keys, count):
    """What studies.probes.ranged asks its sequences for: queries are the last of the keys."""
    at = np.arange(count)
    q0, k0 = at * queries, at * keys
    last = k0 - q0 + keys - queries
    parts = {
        "full": [(k0 + keys, -UNBOUNDED, UNBOUNDED)],
        "causal": [(k0 + keys, -UNBOUNDED, last)],
        "lambda": [(k0 + 64, -UNBOUNDED, last - 4096), (k0 + keys, last - 4095, last)],
    }[mask]
    columns = [np.broadcast_arrays(q0, q0 + queries, k0, end, low, high) for end, low, high in parts]
    return Slices(*(np.concatenate(column) for column in zip(*columns, strict=True)))


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_what_ranges_took_on_h200_is_predicted(pass_):
    """From flash-attn 2's model, its split kernel forward, and one factor; backward sparse masks of 32k keys are worst,
    since every block looks through the ranges of all queries."""
    params, errors = with_ranges(load_profile("h200").attention["fa2", pass_].at(128), pass_), []
    for p in load(FOLDER / "fa2-ranges-h200.jsonl").of("ranged"):
        sizes, one = (p["block"], p["keys"], p["sequences"]), np.array([1])
        if p["pass_"] == pass_ and p["ranged"]:
            found = visits(ranged_slices(p["mask"], *sizes), sizes[0] * sizes[2], sizes[1] * sizes[2])
            predicted = listed_calls(params, [found], one, one, 128)[0][0]
            errors.append(abs(predicted / np.median(p["samples_s"]) - 1))
    assert len(errors) == 3 * 18
    check(f"DCP's ranges {pass_}, mean", np.mean(errors))
    check(f"DCP's ranges {pass_}, worst", np.max(errors))


def test_ranges_run_the_kernel_of_split_keys_as_fast_as_it_was_measured(tmp_path):
    ranged, plain = (load_profile(str(ranged_profile(tmp_path))).attention[kernel, "fwd"] for kernel in (RANGED, "fa2"))
    measured = load_profile("h200").attention["fa2", "fwd"]
    slower = slower_with_ranges("fwd") * measured.split_pair_s / measured.pair_s
    assert ranged.pair_s / plain.pair_s == pytest.approx(slower, rel=1e-3)
    blocks = ranged.block_s + 64 * 65536 * ranged.pair_s * ranged.alone_factor  # two, each with an SM to itself
    assert seconds(ranged, 128, 65536, False, 1, 1) == pytest.approx(ranged.call_s + blocks, rel=0.01)
    assert seconds(ranged, 128, 65536, False, 100, 100) < 2.1 * blocks / ranged.alone_factor


def test_bars_are_predicted_and_set_beside_published_ones(capsys):
    wanted = [row for row in published() if (row.mask, row.scale, row.row) == ("causal", 4.0, "zigzag")]
    rows = reproduce(wanted, count=1, jobs=1)
    assert all(np.isfinite(row.predicted_s) and row.predicted_s > 0 for row in rows)
    dcp = [replace(row, row="dcp", predicted_s=row.predicted_s / 2, published_s=row.published_s / 3) for row in rows]
    (found,) = speed_ups([*rows, *dcp])
    assert (found.published, found.predicted) == (pytest.approx(3), pytest.approx(2))
    assert found.agrees
    record = dcp_record([*rows, *dcp], Assumed(lengths="pile"), 7)
    assert json.loads(json.dumps(record))["speed_up_mean_error"] == pytest.approx(1 / 3, abs=1e-3)
    assert dcp_view([*rows, *dcp], Assumed(lengths="pile"), 3)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("low", "high", "inside"), [(1.0, 4.0, "yes"), (1.0, 2.9, "no")])
def test_speed_ups_stand_beside_their_ranges(tmp_path, monkeypatch, low, high, inside):
    rows = [row for row in published() if (row.mask, row.scale, row.row) == ("causal", 4.0, "zigzag")]
    rows = [replace(row, predicted_s=row.published_s) for row in rows]
    dcp = [replace(row, row="dcp", published_s=row.published_s / 3, predicted_s=row.predicted_s / 2) for row in rows]
    known = Range(mask="causal", scale=4.0, published=3.0, outlier=False, predicted={"as assumed": low, "seed 1": high})
    monkeypatch.setattr(report, "SENSITIVITY", tmp_path / "sensitivity.json")
    (before,) = dcp_record([*rows, *dcp], Assumed(), 2)["speed_ups"]
    report.SENSITIVITY.write_text(json.dumps(ranges_record([known], 2)))
    (after,) = dcp_record([*rows, *dcp], Assumed(), 2)["speed_ups"]
    assert (before["range"], after["range"]) == (None, (low, high))
    shown = Console(width=200, file=StringIO())
    shown.print(dcp_view([*rows, *dcp], Assumed(), 2))
    text = shown.file.getvalue()
    (line,) = (line for line in text.splitlines() if f"{low:.2f}-{high:.2f}" in line)
    assert inside in line.split()
    assert f"inside: {int(inside == 'yes')} of 1 without outliers" in text


def test_a_case_that_cannot_be_predicted_says_which(monkeypatch):
    monkeypatch.setitem(
        CODES, "zigzag", {"strategy": "zigzag_ring", "implementation": "ring-flash-attn", "kernel": "fa4"}
    )
    row = next(row for row in published() if row.row == "zigzag")
    with pytest.raises(CpsimError, match=r"reproduce: zigzag causal fwd, lengths x 0.5: .*fa4"):
        reproduce([row], count=1, jobs=1)


def test_a_solver_that_is_not_there_is_asked_for_before_anything_is_predicted():
    with pytest.raises(CpsimError, match="no_such_solver, which is not installed; pip install no_such_solver"):
        reproduce(assumed=Assumed(solver="no_such_solver"))


def test_published_speed_ups_lie_in_the_ranges_of_what_nobody_published():
    found = [one for one in read_ranges() if not one.outlier]
    assert len(found) == 15
    stated = {(s.mask, s.scale): s.published for s in speed_ups(published())}
    assert all(one.published == pytest.approx(stated[one.mask, one.scale], abs=1e-3) for one in found)
    check("DCP's published speed-ups outside of their ranges", sum(not one.inside for one in found) / len(found))


def test_what_is_assumed_anyway_is_a_speed_up_over_each_baseline_once(monkeypatch):
    bars = [replace(row, predicted_s=row.published_s) for row in published() if row.mask == "causal"]
    monkeypatch.setattr(reproducing, "reproduce", lambda rows, *_, **__: rows)
    found = sensitivity(1, ["seed 1", "lengths prolong64k"], bars, jobs=1)
    assert [one.published for one in found] == [s.published for s in speed_ups(bars)]
    assert all(value == one.published for one in found for value in one.predicted.values())


@pytest.mark.slow
def test_speed_ups_are_ranges_over_assumptions():
    """With one batch of one setting; other seeds change DCP's plan alone, other lengths all."""
    pytest.importorskip("mtkahypar")
    bars = [r for r in published() if (r.mask, r.scale) == ("causal", 4.0) and r.row in ("zigzag", "dcp")]
    (found,) = sensitivity(1, ["seed 1", "lengths prolong64k"], bars, jobs=1)
    assert list(found.predicted) == ["as assumed", "seed 1", "lengths prolong64k"]
    assert len(set(found.predicted.values())) == 3
    low, high = found.ends
    assert low < high
    assert found.inside == (low <= found.published <= high)
    (again,) = (Range(**row) for row in json.loads(json.dumps(ranges_record([found], 1)))["ranges"])
    assert again.published == found.published
    assert again.ends == pytest.approx(found.ends, abs=1e-3)
    assert ranges_view([found])
