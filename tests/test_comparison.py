"""Predictions beside real runs: errors, coverage, choices, and what cannot be compared, on times made by hand."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console
from test_cli import cpsim, one_line
from test_report import needs_chromium, opened
from test_runs import CASE, HEADER, pass_run, written

from cpsim.case.load import scenario_from
from cpsim.prediction.compare import Predicted, chances_of, compare, errors_of, group_key, load_predictions
from cpsim.prediction.runs import Run
from cpsim.report.comparison import comparison_record, comparison_view
from cpsim.report.comparison_html import comparison_html


def run(seconds, error=None, gpu="NVIDIA H200", **changes):
    scenario = scenario_from(CASE | {"pass": "fwd"} | changes)
    passes = {} if error else {"fwd": pass_run(seconds)}
    return Run(scenario=scenario, passes=passes, error=error, header=HEADER | {"gpu": gpu})


def predicted(seconds, error=None, spread=0.05, **changes):
    scenario = scenario_from(CASE | {"pass": "fwd"} | changes)
    if error:
        return Predicted(scenario=scenario, error=error)
    low, high = seconds * (1 - spread), seconds * (1 + spread)
    return Predicted(scenario=scenario, time_s=seconds, time_s_low=low, time_s_high=high)


RING, ULYSSES, ZIGZAG = ({"strategy": name} for name in ("ring", "ulysses", "zigzag_ring"))


@pytest.fixture
def comparison():
    return compare(
        [
            predicted(0.0110, **RING),
            predicted(0.0100, **ULYSSES),
            predicted(0.0104, **ZIGZAG),
            predicted(0.0005, tokens=1024),
            predicted(0.0130, implementation="ring-flash-attn", kernel="fa4", **RING),
            predicted(0.0001, kernel="cudnn"),
            predicted(0, error="out of memory", kernel="fa2"),
        ],
        [
            run(0.0110, **RING),
            run(0.0102, **ULYSSES),
            run(0.0100, **ZIGZAG),
            run(0.0004, tokens=1024),
            run(0.0125, implementation="ring-flash-attn", kernel="fa4", **RING),
            run(0.0020, kernel="fa2"),
            run(0, error="hung", tokens=2048),
            run(0.0030, kernel="sdpa_flash"),
        ],
    )


def test_pairs_come_worst_first_with_signed_errors(comparison):
    assert [pair.error for pair in comparison.pairs] == pytest.approx([0.25, 0.04, 0.04, -0.0196, 0.0], abs=1e-4)
    errors = errors_of(comparison.pairs)
    assert errors.num == 5
    assert errors.mean_absolute == pytest.approx(0.0699, abs=1e-4)
    assert errors.bias == pytest.approx(0.0621, abs=1e-4)
    assert errors.worst == pytest.approx(0.25)
    assert errors.covered == pytest.approx(0.8)


def test_choices_are_right_or_have_a_regret(comparison):
    (everyone,) = comparison.choices()
    assert len(everyone.pairs) == 4
    assert not everyone.is_right
    assert everyone.regret == pytest.approx(0.02)
    assert everyone.best.scenario.strategy == "zigzag_ring"
    assert [len(choice.pairs) for choice in comparison.choices("cpsim")] == [3]
    assert comparison.choices("ring-flash-attn") == []


def test_a_case_that_is_measured_twice_is_no_choice():
    twice = compare([predicted(0.01)], [run(0.01), run(0.011)])
    assert len(twice.pairs) == 2
    assert twice.choices() == []


def test_probabilities_stand_beside_what_came_true():
    """A ring is the fastest in three of four draws, of which it shares one; measured twice, it loses by its median."""
    ring = replace(predicted(0.01), draws_s=(1.0, 1.0, 2.0, 2.0))
    other = replace(predicted(0.02, **ULYSSES), draws_s=(2.0, 3.0, 2.0, 1.0))
    runs = [run(0.010), run(0.016), run(0.012, **ULYSSES)]
    (choice,) = compare([ring, other], runs).choices()
    assert choice.chances() == [(0.625, False), (0.375, True)]
    found = chances_of(choice.chances())
    assert (found.num, found.stated, found.was, found.brier) == (2, 0.5, 0.5, 0.625**2)


def test_groups_are_equal_but_for_how_and_by_whom():
    one, other = run(1, **RING).scenario, run(1, implementation="yunchang", kernel="fa4", **ULYSSES).scenario
    assert group_key(one) == group_key(other)
    assert group_key(one) != group_key(run(1, kernel="fa2").scenario)
    assert group_key(one) != group_key(run(1, mask="full").scenario)


def test_what_cannot_be_compared_is_listed_with_the_reason(comparison):
    assert sorted(why for _, why in comparison.failed) == ["prediction: out of memory", "run: hung"]
    assert sorted(why for _, why in comparison.unmatched) == ["measured, not predicted", "predicted, not measured"]


def test_the_table_fits_100_columns_and_says_it_all(comparison):
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(comparison_view(comparison))
    console.file.close()
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 100
    text = " ".join(text.split())
    assert "Mean error 2.5 % (bias +1.5 %) in 4 cases of 1 ms or more" in text
    assert "mean error 25.0 % (bias +25.0 %) in 1 case shorter" in text
    assert "80 % of all inside" in text
    assert "ring-flash-attn ring" in text
    assert "+25.0 %" in text


def test_the_record_is_json_with_every_case(comparison):
    record = json.loads(json.dumps(comparison_record(comparison)))
    assert record["num_pairs"] == len(record["cases"]) == 5
    assert record["cases"][0]["error"] == pytest.approx(0.25)
    assert record["choices"][0]["predicted_best"]["strategy"] == "ulysses"
    assert len(record["failed"]) == len(record["unmatched"]) == 2
    assert {row["strategy"] for row in record["errors"]} == {"ring", "ulysses", "zigzag_ring"}


def test_runs_on_another_gpu_say_nothing_about_a_cluster():
    for gpu in ("cpu", "NVIDIA H100 80GB HBM3"):
        other = compare([predicted(0.01)], [run(0.01, gpu=gpu)])
        assert other.pairs == ()
        assert other.failed[0][1] == f"run: measured on {gpu}, but h200-4 has h200"


class Links(HTMLParser):
    found = ()

    def handle_starttag(self, tag, attrs):  # noqa: ARG002
        self.found += tuple(v for n, v in attrs if n in ("src", "href") and not v.startswith("data:"))


def test_the_page_is_self_contained_and_has_its_plots(comparison):
    text = comparison_html(comparison)
    links = Links()
    links.feed(text)
    assert [link for link in links.found if not link.startswith("#")] == []
    ids = re.findall(r'<script>show\("([\w-]+)", ', text)
    assert ids == ["plot-scatter", "plot-residual-time", "plot-residual-strategy"]
    assert "Not compared: 4" in text
    empty = comparison_html(compare([], []))
    assert "No case is both predicted and measured" in empty
    assert len(empty) < 10_000


@pytest.mark.chromium
@needs_chromium
def test_the_page_opens_in_chromium_with_every_point_and_a_clean_console(comparison, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(comparison_html(comparison))
    dom, console = opened(path, tmp_path / "profile")
    assert console == []
    _, *parts = re.split(r'<div id="([\w-]+)"[^>]*class="[^"]*js-plotly-plot', dom)
    plots = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(plots) == ["plot-scatter", "plot-residual-time", "plot-residual-strategy"]
    assert all(plot.count('<path class="point"') == 5 for plot in plots.values())


@pytest.fixture
def files(tmp_path):
    cases, runs = tmp_path / "cases.jsonl", tmp_path / "runs.jsonl"
    scenario = run(1).scenario
    cases.write_text(json.dumps(scenario.to_dict()) + "\n")
    runs.write_text(written(run(0.0012), run(0, error="hung", tokens=2048)))
    return cases, runs


def test_validate_compares_files_or_predicts_now(files, tmp_path):
    cases, runs = files
    predictions, page = tmp_path / "predictions.jsonl", tmp_path / "page.html"
    cpsim("predict", cases, "--out", predictions)
    given = json.loads(cpsim("validate", predictions, runs, "--json", "--html", page))
    assert given == json.loads(cpsim("validate", runs, "--json"))
    assert given["num_pairs"] == 1
    assert given["failed"][0]["reason"] == "run: hung"
    assert 1e6 < page.stat().st_size < 3e6
    assert "in 1 case of 1 ms or more" in cpsim("validate", runs)


def test_files_come_in_any_number_and_order(files, tmp_path):
    cases, runs = files
    predictions = tmp_path / "predictions.jsonl"
    cpsim("predict", cases, "--out", predictions)
    given = json.loads(cpsim("validate", runs, predictions, "--json"))
    assert given == json.loads(cpsim("validate", predictions, runs, "--json"))
    assert json.loads(cpsim("validate", runs, runs, "--json"))["num_pairs"] == 2 * given["num_pairs"]


def test_files_without_runs_are_one_line(files):
    cases, _ = files
    assert "expected a header" in one_line(cpsim("validate", cases, status=2))


def test_runs_are_compared_without_the_planning_that_predictions_charge(tmp_path):
    line = {"scenario": CASE, "time_s": 0.03, "time_s_low": 0.02, "time_s_high": 0.05, "parts_s": {"planning": 0.01}}
    file = tmp_path / "predictions.jsonl"
    file.write_text(json.dumps(line) + "\n")
    (entry,) = load_predictions(file)
    assert (entry.time_s, entry.time_s_low, entry.time_s_high) == pytest.approx((0.02, 0.01, 0.04))


def test_a_run_whose_cluster_file_is_gone_is_left_out_alone():
    runs = [run(0.01, cluster="gone.json"), run(0.01)]
    found = compare([predicted(0.01, cluster="gone.json"), predicted(0.011)], runs)
    assert [pair.error for pair in found.pairs] == pytest.approx([0.1])
    ((scenario, why),) = found.failed
    assert scenario.cluster == "gone.json"
    assert "gone.json" in why
    assert "\n" not in why
