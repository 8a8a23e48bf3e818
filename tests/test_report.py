"""Words, tables, records and the HTML report, on predictions made by hand; Chromium opens the report."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import handmade
import pytest
from rich.console import Console

from cpsim.case.load import scenario_from
from cpsim.errors import ScenarioError
from cpsim.prediction.predict import predict
from cpsim.prediction.results import Infeasible
from cpsim.report import axes, figures, frontier, html, lengths, records, tables, views, words


@pytest.fixture(scope="module")
def advice():
    return handmade.advice()


@pytest.fixture(scope="module")
def report(advice, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    asked = axes.Around(scenario=advice.scenario).spots()
    best = [frontier.Cell(spot=spot, strategy="usp", label="usp", time_s=0.01) for spot in asked]
    html.write_report(path, advice, handmade.lengths(), best, [handmade.run("zigzag_ring"), handmade.run("ring")])
    return path


def printed(view):
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view)
    console.file.close()
    return console.export_text()


def test_recommendation_says_what_how_long_and_how_sure(advice):
    text = words.recommendation(advice)
    assert text.startswith("Run zigzag_ring: 7.40 ms forward and backward (90 %: 7.10–7.77 ms)")
    assert "probability 83 %; ulysses (head groups 1) comes second and takes 7 % longer" in text


def test_recommendation_admits_a_close_race(advice):
    first, second, *_ = advice.candidates
    close = replace(advice, candidates=(replace(first, probability_best=0.52), second))
    assert "but it is close: it is the fastest with probability 52 %" in words.recommendation(close)
    alone = replace(advice, candidates=(first,), infeasible=(Infeasible(scenario=first.scenario, reason="no"),))
    assert "the only strategy that can" in words.recommendation(alone)
    assert "the only one asked about" in words.recommendation(replace(alone, infeasible=()))
    assert words.recommendation(replace(advice, candidates=())).startswith("No strategy can run this case")


def test_table_fits_100_columns_and_shows_everything(advice):
    text = printed(tables.advice_view(advice))
    assert max(map(len, text.splitlines())) <= 100
    for needle in ("zigzag_ring", "heads per gather 2", "7.10–7.77", "432", "12 %", "1.48 GB", "83 %"):
        assert needle in text
    assert "cannot run" in text
    assert "usp" in text
    assert "• attention: extrapolated beyond 65,536 tokens" in text


def test_square_brackets_are_not_markup(advice):
    odd = replace(advice, notes=("see [bold]this[/bold] and [/]",))
    assert "see [bold]this[/bold] and [/]" in printed(tables.advice_view(odd))


def test_predictions_are_shown_alone_or_in_a_table(advice):
    scenario = advice.candidates[0].scenario
    alone = printed(tables.prediction_view([handmade.prediction(scenario)]))
    assert "90 %: 9.50–10.6 ms" in alone
    assert "attention fwd" in alone
    many = [handmade.prediction(scenario), advice.infeasible[0], ScenarioError("line 3: gpus: missing")]
    assert "no answer" in printed(tables.prediction_view(many))
    assert tables.reasons(many) == [f"#2 none: {advice.infeasible[0].reason}", "#3 line 3: gpus: missing"]


def test_prediction_record_has_the_contract_s_keys(advice):
    scenario = advice.candidates[0].scenario
    record = records.prediction_record(scenario, handmade.prediction(scenario))
    times = {"time_s", "time_s_low", "time_s_high", "exposed_comm_s"}
    others = {"tflops_per_gpu", "bytes_sent_per_gpu", "peak_memory_bytes", "notes"}
    assert times | others <= set(record)
    assert "error" not in record
    assert scenario_from(record["scenario"]) == scenario
    json.dumps(record)


def test_infeasible_and_unreadable_records_have_an_error(advice):
    scenario, why = advice.scenario, ScenarioError("why")
    cannot = records.prediction_record(scenario, advice.infeasible[0])
    assert cannot == {"scenario": scenario.to_dict(), "error": advice.infeasible[0].reason, "kind": "cannot"}
    assert records.prediction_record(scenario, why) == {"scenario": scenario.to_dict(), "error": "why"}
    assert records.prediction_record(why, why) == {"error": "why"}


def test_advice_record_is_json(advice):
    record = json.loads(json.dumps(records.advice_record(advice, "Run it")))
    assert [row["strategy"] for row in record["candidates"]] == [
        "zigzag_ring",
        "ulysses",
        "allgather",
        "ring",
    ]
    assert record["candidates"][1]["knobs"] == {"head_groups": 1}
    assert [row["strategy"] for row in record["infeasible"]] == ["none", "usp"]


def test_profiles_show_their_errors_worst_first():
    rows = (
        {
            "model": "collective",
            "points": 40,
            "mean_absolute": 0.021,
            "p95": 0.06,
            "worst": 0.08,
            "bias": -0.004,
            "covered": 0.85,
        },
        {
            "model": "attention fwd fa4",
            "points": 1200,
            "mean_absolute": 0.034,
            "p95": 0.08,
            "worst": 0.11,
            "bias": 0.01,
            "covered": 0.91,
        },
    )
    kernels = {("fa4", "fwd"): None, ("fa4", "bwd"): None, ("cudnn", "fwd"): None}
    profile = SimpleNamespace(name="h200", gpu="H200", grade="measured", attention=kernels, held_out=rows, valid={})
    text = printed(tables.profile_view(profile))
    assert "h200: H200, measured; kernels cudnn, fa4" in text
    assert text.index("attention fwd fa4") < text.index("collective")
    assert "3.4 %" in text
    assert "-0.4 %" in text
    assert "91 %" in text
    assert json.loads(json.dumps(records.profile_record(profile)))["held_out"] == list(rows)


def test_lengths_scale_tokens_and_documents():
    drawn = scenario_from(handmade.CASE | {"strategy": "ring"})
    doubled = lengths.at_length(drawn, 2)
    assert doubled.num_tokens == 2 * drawn.num_tokens
    assert scenario_from(doubled.to_dict()) == doubled
    fields = {key: value for key, value in handmade.CASE.items() if key != "tokens_per_gpu"}
    listed = scenario_from(fields | {"tokens": 32768, "documents": [1, 32000, 767]})
    half = lengths.at_length(listed, 0.5)
    assert sum(half.documents) == half.num_tokens == 16384
    assert half.documents == (16000, 384)
    assert lengths.at_length(drawn, 1 / 32) is None
    assert lengths.at_length(drawn, 1e6) is None


def test_other_lengths_take_the_best_knobs_of_every_strategy(advice):
    slower = replace(advice.candidates[0], total_s=1.0)
    best = lengths.best_of_strategies(replace(advice, candidates=(*advice.candidates, slower)))
    assert best == list(advice.candidates)


def bars_of_ops(figure):
    return sum(len(trace["x"]) for trace in figure["data"] if trace["name"] in figures.KIND_COLOURS)


def test_timeline_marks_the_critical_path_and_what_is_exposed():
    """On the shown ranks: every op of the path, and as long an exposed time as the slowest rank is said to have."""
    case = {"gpus": 16, "cluster": "dgx-h200", "tokens_per_gpu": 2048, "heads": 8, "kv_heads": 2, "strategy": "ring"}
    (forward, backward) = (predict(case | {"pass": pass_}) for pass_ in ("fwd", "bwd"))
    candidate = replace(handmade.candidate("ring", 0.01, 1.0), forward=forward, backward=backward)
    found = forward.timelines["fwd"]
    slowest = int(found.rank_end_s().argmax())
    figure, _ = figures.timeline(candidate, [slowest])
    exposed, critical = (
        [trace for trace in figure["data"] if trace["name"] == name] for name in (figures.EXPOSED, figures.CRITICAL)
    )
    assert forward.exposed_comm_s > 0
    assert sum(exposed[0]["x"]) == pytest.approx(forward.exposed_comm_s * 1e3, rel=1e-6)
    on_path = [row for row in found.rows([slowest]) if row["op"] in set(found.critical_path().tolist())]
    assert len(critical[0]["x"]) == len(on_path) > 3


def test_timeline_draws_every_op_or_says_how_many(advice, monkeypatch):
    candidate = advice.candidates[0]
    ranks = [0, 1, 4, 7]
    num_ops = sum(len(p.timelines[k].rows(ranks)) for p, k in ((candidate.forward, "fwd"), (candidate.backward, "bwd")))
    figure, text = figures.timeline(candidate, ranks)
    assert bars_of_ops(figure) == num_ops
    assert text == f"{num_ops} ops of ranks 0, 1, 4, 7"
    monkeypatch.setattr(figures, "COLUMNS", 10)
    thinned, text = figures.timeline(candidate, ranks)
    num_bars = bars_of_ops(thinned)
    assert num_bars < num_ops
    assert f"drawn as {num_bars} bars" in text


def test_the_ranks_shown_are_few_and_hold_the_critical_path(advice):
    candidate = advice.candidates[0]
    ranks = figures.shown_ranks(candidate)
    assert {0, 1, 4, 7} <= set(ranks)
    assert len(ranks) <= 6
    for prediction, pass_ in ((candidate.forward, "fwd"), (candidate.backward, "bwd")):
        timeline = prediction.timelines[pass_]
        assert any(row["critical"] for row in timeline.rows(ranks))


def test_one_gpu_has_one_rank_to_show(advice):
    candidate = advice.candidates[0]
    alone = replace(candidate.forward, scenario=candidate.scenario.model_copy(update={"gpus": 1}), timelines={})
    assert figures.shown_ranks(replace(candidate, forward=alone, backward=alone)) == [0]


class Links(HTMLParser):
    """Collects what a page would load from elsewhere."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):  # noqa: ARG002
        self.found += [value for name, value in attrs if name in ("src", "href") and not value.startswith("data:")]


def test_report_is_self_contained_and_escapes_what_users_wrote(report):
    text = report.read_text()
    links = Links()
    links.feed(text)
    assert links.found == []
    assert "figures of &lt;others&gt; &amp; co" in text
    assert "figures of <others>" not in text


def test_report_holds_every_view_of_the_explorer(report):
    text = report.read_text()
    assert [text.count(f"<h2>{title}</h2>") for title in views.TITLES.values()] == [1] * len(views.TITLES)


def test_a_case_that_nobody_ran_is_said_to_be_so(advice):
    text = html.report_html(advice, [], runs=[handmade.run("ring")])
    elsewhere = replace(advice, scenario=advice.scenario.model_copy(update={"heads": 16}))
    assert "Nobody has run this case for real" not in text
    assert "Nobody has run this case for real" in html.report_html(elsewhere, [], runs=[handmade.run("ring")])


def test_report_without_candidates_still_says_why(advice):
    text = html.report_html(replace(advice, candidates=()), [])
    assert "No strategy can run this case" in text
    assert "needs all 32,768 tokens on one GPU" in text
    assert len(text) < 20_000


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")


def opened(page, profile):
    """The page's DOM after its scripts ran, and what they wrote to the console."""
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=10000"
    )
    command = [CHROMIUM, *flags.split(), "--dump-dom", f"--user-data-dir={profile}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.chromium
@needs_chromium
def test_report_opens_in_chromium_with_every_plot_and_a_clean_console(report, tmp_path):
    dom, console = opened(report, tmp_path)
    assert console == []
    _, *parts = re.split(r'<div id="([\w-]+)"[^>]*class="[^"]*js-plotly-plot', dom)
    plots = dict(zip(parts[::2], parts[1::2], strict=True))
    others = ["timeline-1", "timeline-2", "memory", "memory-below", "mask", "measured", "lengths"]
    assert list(plots) == ["ranking", "map", *others]
    assert plots["map"].count('class="point"') == len(axes.Around(scenario=handmade.advice().scenario).spots())
    assert plots["memory"].count('class="point"') == 2 * 4
    assert plots["mask"].count("<image") == 4
    assert plots["ranking"].count('class="point"') == 2 * 4
    assert plots["ranking"].count('class="xerror"') == 4
    assert plots["timeline-1"].count('class="point"') > 300
    assert plots["timeline-2"].count('class="point"') == 40 + 2  # ops, and the last one of each pass is critical
    assert len(re.findall('class="point[" ]', plots["lengths"])) == 4 * 5
    assert len(re.findall('class="point[" ]', plots["measured"])) == 2 * 2  # predicted and measured


@pytest.mark.chromium
@needs_chromium
def test_a_page_that_fails_is_noticed(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<script>Plotly.newPlot('nowhere')</script>")
    _, console = opened(page, tmp_path / "profile")
    assert any("Plotly is not defined" in line for line in console)
