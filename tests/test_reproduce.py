"""Published studies of others: their data, the command, and how well they are predicted."""

import json
import re
from functools import cache
from statistics import mean

import pytest
from targets import check
from test_cli import called, one_line
from typer.testing import CliRunner

from cpsim.case.cluster import load_cluster
from cpsim.cli.entry import run_app
from cpsim.strategies.others import DENSE
from studies import published_lines
from studies.__main__ import app
from studies.magi.reproduce import (
    FOLDER,
    READING_ERROR,
    Score,
    fit,
    grouped,
    packs,
    published,
    rank_correlations,
    reproduce,
    summary,
)

STUDIES = "magi-h100", "magi-b200", "longca-96", "dcp", "distca"


def studies(*arguments, status=0):
    return called(lambda: run_app(app, "python -m studies"), "studies", *arguments, status=status)


@cache
def predicted():
    return reproduce(jobs=1)


def test_every_published_row_is_there_and_named_once():
    rows = published()
    assert len(rows) == 192
    assert len({(r.strategy, *r.panel) for r in rows}) == 192
    assert {len([r for r in rows if r.panel == panel]) for panel in {r.panel for r in rows}} == {8}


@pytest.mark.parametrize(("gpus", "documents", "area"), [(8, 45, 0.110), (16, 77, 0.0973)])
def test_packs_are_those_of_the_benchmark(gpus, documents, area):
    """Mean documents and mean area of the full mask, as the benchmark's sampler was replayed elsewhere."""
    tokens = 8192 * gpus
    assert len(packs(gpus)) == 20
    assert {sum(pack) for pack in packs(gpus)} == {tokens}
    assert mean(map(len, packs(gpus))) == pytest.approx(documents, abs=0.5)
    assert mean(sum(n**2 for n in pack) / tokens**2 for pack in packs(gpus)) == pytest.approx(area, rel=0.005)


@pytest.mark.slow
def test_rows_of_the_benchmark_are_predicted():
    """Nothing was fitted to those of 32 and 64 GPUs."""
    scores = summary(predicted())
    check("MagiAttention's benchmark, 32 and 64 GPUs, mean", scores["32 and 64 GPUs"].mean_absolute)
    check("MagiAttention's benchmark, mean", scores["all"].mean_absolute)


def test_rows_on_b200_are_those_that_were_predicted_before_they_were_read():
    lines = published_lines(FOLDER / "predicted-b200.csv")
    rows = published("b200")
    assert [(r.mask, r.pass_, str(r.gpus), r.strategy) for r in rows] == [
        (line["mask"], line["pass"], line["gpus"], line["row"]) for line in lines
    ]
    some = [i for i, row in enumerate(rows) if row.gpus == 8 and row.mask in DENSE]
    assert len(some) == 20
    said = [float(lines[i]["predicted_tflops_per_gpu"]) for i in some]
    today = [row.predicted for row in reproduce([rows[i] for i in some], jobs=1)]
    moved = max(abs(a - b) for a, b in zip(today, said, strict=True))
    check("B200 rows, today less said before, over the last digit said", moved / 0.1)


@pytest.mark.slow
def test_rows_on_b200_are_predicted_though_nothing_was_fitted_to_them():
    rows = reproduce(published("b200"), jobs=1)
    dense, documents = (
        Score.of([row for row in rows if (row.mask in DENSE) == is_dense]) for is_dense in (True, False)
    )
    assert (dense.rows, documents.rows) == (80, 40)
    assert dense.mean_absolute < 0.06
    check("MagiAttention's benchmark on B200, documents, mean", documents.mean_absolute)
    assert abs(dense.bias) < 0.015
    assert {sum(pack) for gpus in (8, 16) for pack in packs(gpus, "b200")} == {8 * 16384, 16 * 16384}


@pytest.mark.slow
def test_every_strategy_is_predicted_on_every_mask():
    scores = grouped(predicted(), lambda r: (r.strategy, r.mask)).values()
    check("MagiAttention's benchmark, worst strategy and mask, mean", max(score.mean_absolute for score in scores))


@pytest.mark.slow
def test_strategies_are_ordered_as_published():
    assert mean(rank_correlations(predicted()).values()) > 0.8
    assert mean(rank_correlations(predicted(), 2 * READING_ERROR).values()) > 0.84


@pytest.mark.slow
def test_the_network_of_the_preset_is_what_the_fit_finds():
    """From rows of 8 and 16 GPUs alone; it also agrees with 39.7 GB/s, measured on another cluster (dgx-h200)."""
    rate = load_cluster("magi-h100").fabric.nic_bandwidth_bytes_per_s
    assert rate == pytest.approx(39.7e9, rel=0.02)
    check("magi-h100, NIC, fit over preset", fit() / rate - 1)


def test_tau_counts_pairs_and_leaves_out_those_that_cannot_be_told_apart():
    from dataclasses import replace

    row = published()[0]
    values = [(100.0, 1.0), (102.0, 0.5), (200.0, 2.0)]  # the first two are ordered the other way round
    rows = [replace(row, published=a, predicted=b) for a, b in values]
    assert rank_correlations(rows)[row.panel] == pytest.approx(1 / 3)
    assert rank_correlations(rows, 6.0)[row.panel] == 1.0


@pytest.mark.slow
def test_the_command_writes_rows_and_scores(tmp_path, monkeypatch):
    rows, out = predicted(), tmp_path / "magi.json"
    monkeypatch.setattr("studies.magi.reproduce.reproduce", lambda **_: rows)
    shown = CliRunner().invoke(app, ["magi-h100", "--jobs", "1", "--out", str(out)])
    assert shown.exit_code == 0
    assert "32 and 64 GPUs" in shown.stdout
    record = json.loads(out.read_text())
    assert len(record["rows"]) == 192
    assert record["scores"]["all"]["mean_absolute"] == pytest.approx(summary(predicted())["all"].mean_absolute)


def test_an_unknown_study_is_an_error_that_names_the_known_ones():
    error = one_line(studies("magi", status=2))
    assert "studies: expected magi-h100, magi-b200, longca-96, dcp, distca or public, got 'magi'" in error
    assert studies() == studies("--help")


@pytest.mark.parametrize("study", STUDIES)
def test_every_study_has_help_and_json(study):
    assert f" {study} " in studies("--help")
    assert "--json" in studies(study, "--help")


@pytest.mark.parametrize(
    ("study", "option"),
    [
        *(("magi-h100", option) for option in ("--html", "--lengths", "--variant", "--batches", "--scale")),
        *(("longca-96", option) for option in ("--worst", "--lengths", "--variant", "--batches", "--scale", "--fit")),
        *(("dcp", option) for option in ("--html", "--scale", "--fit")),
        *(("distca", option) for option in ("--worst", "--variant", "--batches", "--fit")),
    ],
)
def test_an_option_of_another_study_is_refused(study, option):
    error = one_line(studies(study, option, "7", status=2))
    assert re.search(rf"No such option:? '?{option}'?.* See `python -m studies {study} --help`", error), error


@pytest.mark.parametrize(
    ("study", "flag", "option"),
    [
        *(("magi-h100", "--fit", option) for option in (["--out", "x"], ["--json"], ["--jobs", 1], ["--worst", 0])),
    ],
)
def test_an_option_that_a_flag_would_drop_is_refused(study, flag, option):
    error = one_line(studies(study, flag, *option, status=2))
    assert f"studies: {flag} " in error
    assert f"leave {option[0]} out" in error


def test_lists_that_only_a_flag_reads_are_refused_without_it():
    said = one_line(studies("distca", "--pretrain", "x", status=2))
    assert "only --scale and --speed-ups have runs of Pretrain" in said
