"""LongCA-bench's study: its samples to the last token, and its findings in what we simulate."""

import json
import statistics

import pytest
from cases import PLAIN_MASKS
from typer.testing import CliRunner

from studies.__main__ import app
from studies.longca.findings import REASONS, findings
from studies.longca.report import NAMES, study_html, study_lines, study_view, throughput_lines, throughput_rows
from studies.longca.reproduce import CODES, GPUS, OURS, points, rows_of, run, sample_documents
from studies.magi.reproduce import published

REPLAYED = {
    8: (41, 4, 69, 22.7, 0.203, 0.117, 0.334),
    16: (76, 8, 115, 30.8, 0.132, 0.077, 0.247),
    32: (127, 23, 202, 46.7, 0.084, 0.046, 0.188),
    48: (137, 21, 285, 88.7, 0.094, 0.031, 0.188),
    64: (158, 43, 366, 125, 0.092, 0.026, 0.158),
    96: (210, 36, 431, 191, 0.083, 0.026, 0.152),
}
"""By GPUs, of the benchmark's own sampler: mean, fewest and most documents, mean longest one [1000 tokens], and mean,
smallest and largest share of FULL DOCUMENT in all pairs."""


@pytest.mark.parametrize("gpus", REPLAYED)
def test_samples_are_those_of_the_benchmark(gpus):
    total = gpus * 8192
    drawn = sample_documents(total)
    counts, areas = [len(d) for d in drawn], [sum(n * n for n in d) / total**2 for d in drawn]
    longest = statistics.mean(max(d) for d in drawn) / 1000
    mean, fewest, most, length, area, smallest, largest = REPLAYED[gpus]
    assert all(sum(d) == total for d in drawn)
    assert (round(statistics.mean(counts)), min(counts), max(counts)) == (mean, fewest, most)
    assert longest == pytest.approx(length, abs=0.5)
    found = statistics.mean(areas), min(areas), max(areas)
    assert found == pytest.approx((area, smallest, largest), abs=0.0006)


@pytest.mark.slow
def test_the_grid_has_every_mask_sample_and_mechanism_and_dense_masks_once():
    found = points()
    assert len(found) == len(GPUS) * (2 + 2 * 30)
    assert {p.mask for p in found} == set(PLAIN_MASKS)
    rows = rows_of(next(p for p in found if p.gpus == 8 and p.sample == 3))
    assert {(r.mechanism, r.implementation) for r in rows} == {(m, code) for m in CODES for code in CODES[m]}
    assert all(r.time_s <= r.slowest_s for r in rows)


def test_published_throughputs_are_hollow_circles_beside_the_lines():
    small = run(gpus=(8, 16), samples=1, jobs=1)
    for mask in ("full", "causal_document"):
        data = [
            trace for trace in throughput_lines(small, mask).data if trace.marker.symbol == "circle-open" and trace.x[0]
        ]
        drawn = {(t.name.split(",")[0], x, y) for t in data for x, y in zip(t.x, t.y, strict=True)}
        rows = [r for r in published() if r.mask == mask and r.gpus <= 16 and not r.strategy.startswith("magi")]
        names = NAMES | {"hybrid_dcp": NAMES["hybrid_cp"]}
        assert drawn == {(names[r.strategy], str(r.gpus), r.published) for r in rows}
        assert len(rows) == 24


@pytest.fixture(scope="module")
def study():
    """A sixth of the study: five samples."""
    return run(samples=5, jobs=2)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(18))
def test_findings_come_out_of_the_simulation_but_for_those_with_a_known_reason(study, number):
    finding = findings(study)[number]
    assert finding.holds == (finding.claim not in REASONS), f"{finding.claim}: {finding.found}"


@pytest.mark.slow
def test_all_findings_are_tested(study):
    claims = [f.claim for f in findings(study)]
    assert len(claims) == 18
    assert set(REASONS) <= set(claims)


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_hybrid_cp_is_the_ring_on_dense_masks(study, mask):
    for gpus in study.gpus:
        for pass_ in ("fwd", "bwd"):
            assert study.mean(gpus, mask, pass_, "hybrid_cp", OURS) == study.mean(gpus, mask, pass_, "ring_p2p", OURS)


@pytest.mark.slow
def test_our_executor_is_faster_than_the_benchmark_s_code_on_dense_masks(study):
    dense = [row for row in study.rows if row.mask in ("full", "causal") and row.implementation == OURS]
    comparable = [row for row in dense if row.mechanism != "hybrid_cp" and not row.reason]
    assert len(comparable) == 2 * 2 * (len(GPUS) * 5 - 3)  # Ulysses cannot run on 24, 48 and 96 GPUs
    for row in comparable:
        assert row.tflops_per_gpu > study.mean(row.gpus, row.mask, row.pass_, row.mechanism)


@pytest.mark.slow
def test_what_cannot_run_says_why_once_per_number_of_gpus(study):
    reasons = study.reasons()
    assert sorted(gpus for found in reasons.values() for gpus in found) == [24, 48, 96]
    assert all("query heads divisible by ranks, got 64 heads" in reason for reason in reasons)
    assert [row[1] for row in throughput_rows(study, "full", "fwd")].count("X") == 3


@pytest.mark.slow
def test_lines_hold_every_case_with_its_time_or_reason(study):
    lines = [json.loads(line) for line in study_lines(study).splitlines()]
    assert len(lines) == len(study.rows)
    assert all(("time_s" in line) != ("reason" in line) for line in lines)
    assert {line["pass"] for line in lines} == {"fwd", "bwd"}


@pytest.mark.slow
def test_the_command_prints_tables_and_writes_lines_and_a_page(study, tmp_path, monkeypatch):
    monkeypatch.setattr("studies.longca.reproduce.run", lambda **_: study)
    lines, page = tmp_path / "cases.jsonl", tmp_path / "study.html"
    command = ["longca-96", "--out", str(lines), "--html", str(page)]
    shown = CliRunner().invoke(app, command, catch_exceptions=False)
    assert shown.exit_code == 0
    assert all(words in shown.stdout for words in ("CAUSAL DOCUMENT, backward", "best of all", "Why not:"))
    assert lines.read_text() == study_lines(study)
    assert page.read_text() == study_html(study)


@pytest.mark.slow
def test_the_page_has_a_figure_for_every_mask_and_every_finding(study):
    page = study_html(study)
    assert all(f'id="plot-mask-{mask}"' in page for mask in PLAIN_MASKS)
    assert page.count("<tr>") > 18 + 8 * 7
    assert study_view(study).renderables
