"""Words, tables, records and the HTML report, on predictions made by hand; Chromium opens the report."""

import json
import re
import subprocess
import time
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import handmade
import numpy as np
import pytest
from browser import CHROMIUM, DRIVER, LOOKS, SCREENS, chromium, serious, sized
from rich.console import Console

from cpsim.case.load import scenario_from
from cpsim.errors import ScenarioError
from cpsim.prediction.predict import predict
from cpsim.prediction.results import Infeasible
from cpsim.prediction.step_advice import advise_step
from cpsim.report import axes, caveats, figures, front, frontier, html, lengths, page, records, tables, views, words
from cpsim.report.step_page import write_step_report


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
    assert re.search(r"• kernels +attention: extrapolated beyond 65,536 tokens", text)


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
        self.found += [
            value for name, value in attrs if name in ("src", "href") and not value.startswith(("data:", "#"))
        ]


def test_report_is_self_contained_and_escapes_what_users_wrote(report):
    text = report.read_text()
    links = Links()
    links.feed(text)
    assert links.found == []
    assert "figures of &lt;others&gt; &amp; co" in text
    assert "figures of <others>" not in text


def test_report_goes_from_the_answer_to_caveats_and_links_to_every_section(report):
    text = report.read_text()
    order = [
        "answer",
        "why",
        "alternatives",
        "map",
        "timeline",
        "memory",
        "mask",
        "measured",
        "lengths",
        "scenario",
        "checked",
    ]
    sections = re.findall(r'<section id="([\w-]+)">', text)
    assert sections == [*order, "caveats"]
    assert re.findall(r'<li><a href="#([\w-]+)">', text) == sections
    front = text[text.index('<section id="answer">') : text.index('<section id="why">')].replace("\u00a0", " ")
    for needle in ("Run zigzag_ring", "7.40 ms", "7.10–7.77 ms", "tokens/s", "1.48 GB", "of 150 GB", "Checked."):
        assert needle in front, needle
    assert front.index("zigzag_ring") < front.index("allgather")
    assert '<details class="caveats"><summary>' in text
    assert text.index(handmade.NOTE.split("<")[0]) > text.index('<section id="caveats">')


def test_report_is_small_and_a_failure_is_not_green(report, advice):
    assert report.stat().st_size < 3e6
    failed = html.report_html(replace(advice, candidates=()), [])
    assert '<p class="lead none">No strategy can run this case' in failed
    assert 'class="lead"' not in failed


def test_ties_stand_together_in_the_ranking(advice):
    first, second, third, *_ = advice.candidates
    draws = tuple(first.total_s * (1 + 0.01 * i) for i in (-1, 0, 1))
    close = replace(second, total_s=first.total_s * 1.001, draws_s=tuple(reversed(draws)))
    far = replace(third, draws_s=tuple(2 * x for x in draws))
    below = views.ranking(replace(advice, candidates=(replace(first, draws_s=draws), close, far))).below
    tied, slower = below.index("Cannot be told from the fastest"), below.index(">Slower<")
    assert tied < below.index("zigzag_ring") < below.index("ulysses") < slower < below.index("allgather")


def test_time_is_taken_apart_without_a_rest(advice):
    candidate = advice.candidates[0]
    parts = front.parts_of({"attention fwd": 3.0, "attention bwd": 5.0, "transfer": 1.0, "transfer between nodes": 2.0})
    assert parts == {"attention": 8.0, "communication between nodes": 2.0, "communication inside nodes": 1.0}
    figure = front.why([candidate])
    assert sum(trace["x"][0] for trace in figure["data"]) == pytest.approx(candidate.total_s * 1e3)
    assert "80 % attention, 20 % communication inside nodes" in front.path_text(candidate)


def test_caveats_are_grouped_by_what_they_change():
    notes = ["network between nodes of x: published", "attention: extrapolated", "documents: ignored", "host-bound: y"]
    text = caveats.caveats_html(notes)
    assert "1 on the network, 1 on hosts, 1 on kernels, 1 on the case" in text
    assert text.startswith("<details")
    assert caveats.caveats_html([]) == ""


def test_what_lies_outside_of_measured_ranges_is_one_caveat_that_says_how_far():
    notes = [
        "reduce_scatter of 1611 MB, measured up to 881",
        "all_gather among 8 GPUs of a node, measured up to 4",
        "reduce_scatter of 6442 MB, measured up to 881",
        "reduce_scatter among 8 GPUs of a node, measured up to 4",
        "fa4 fwd: 20 keys in a sequence, measured from 64",
    ]
    assert caveats.caveats(notes) == {
        "the network": [
            "beyond what was measured: reduce_scatter of 6,442 MB (measured up to 881); all_gather, reduce_scatter "
            "among 8 GPUs of a node (measured up to 4)"
        ],
        "kernels": ["beyond what was measured: fa4 fwd: 20 keys in a sequence (measured from 64)"],
    }


def test_legends_name_every_group_once_and_say_what_they_hide():
    traces = [
        {"type": "bar", "name": "a &amp; b", "marker": {"color": "#123456"}},
        {"type": "bar", "name": "a &amp; b", "marker": {"color": "#123456"}},
        {"type": "scatter", "name": "c", "marker": {"color": "#654321", "symbol": "star"}},
        {"type": "scatter", "name": "d", "showlegend": False},
    ]
    made = page.drawn({"data": traces, "layout": figures.house(400)})
    text = page.legend_html(made, "plot-x")
    assert re.findall('data-group="([^"]*)"', text) == ["a &amp; b", "c"]
    assert "#123456" in text
    assert "★" in text
    assert page.legend_html({"data": traces[:2]}, "plot-x") == ""
    assert made["layout"]["showlegend"] is False
    assert made["layout"]["height"] < 400  # without the room for a legend


@pytest.mark.parametrize("ground", ["#ffffff", "#1e293b"])  # of figures, light and dark
def test_colours_of_figures_have_the_contrast_of_graphics(ground):
    for colour in (*figures.PALETTE, *figures.KIND_COLOURS.values(), figures.FORWARD, figures.BACKWARD):
        light, dark = sorted((figures.luminance(colour) + 0.05, figures.luminance(ground) + 0.05), reverse=True)
        assert light / dark >= 3, (colour, ground)


def test_logarithmic_axes_say_whole_numbers():
    axis = figures.log_axis("x", [18.0, 150.0])
    assert axis["ticktext"] == ["20", "50", "100"]
    assert figures.log_axis("x", [1e-4, 50.0])["ticktext"][0] == "10<sup>-4</sup>"


def test_colours_of_strategies_are_told_apart_by_all_kinds_of_colour_vision():
    """As people without one kind of cone see them (Machado et al. 2009): no two nearer than 8 in CIE Lab."""
    seen = {
        "all cones": np.eye(3),
        "protanopia": [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ],
        "deuteranopia": [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ],
        "tritanopia": [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ],
    }
    names = [*figures.STRATEGY_COLOURS]
    for kind, matrix in seen.items():
        labs = [lab(np.array(matrix), figures.STRATEGY_COLOURS[name]) for name in names]
        near = {
            (a, b): float(np.linalg.norm(labs[i] - labs[j]))
            for i, a in enumerate(names)
            for j, b in enumerate(names)
            if i < j
        }
        pair = min(near, key=near.get)
        assert near[pair] > 8, (kind, pair, near[pair])


def lab(matrix, colour):
    """A colour as seen, in CIE Lab under D65."""
    srgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.clip(matrix @ np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4), 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ linear / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_a_case_that_nobody_ran_is_said_to_be_so(advice):
    text = html.report_html(advice, [], runs=[handmade.run("ring")])
    elsewhere = replace(advice, scenario=advice.scenario.model_copy(update={"heads": 16}))
    assert "Nobody has run this case for real" not in text
    assert "Nobody has run this case for real" in html.report_html(elsewhere, [], runs=[handmade.run("ring")])


def test_report_without_candidates_still_says_why(advice):
    text = html.report_html(replace(advice, candidates=()), [])
    assert "No strategy can run this case" in text
    assert "needs all 32,768 tokens on one GPU" in text
    assert len(text) < 25_000


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
    _, *parts = re.split(r'<div id="plot-([\w-]+)"[^>]*class="[^"]*js-plotly-plot', dom)
    plots = dict(zip(parts[::2], parts[1::2], strict=True))
    others = ["timeline", "memory", "memory-below", "mask", "measured", "lengths", "checked"]
    assert list(plots) == ["why", "map", *others]
    assert plots["map"].count('class="point"') == len(axes.Around(scenario=handmade.advice().scenario).spots())
    assert plots["memory"].count('class="point"') == 2 * 4
    assert plots["mask"].count("<image") == 4
    assert plots["why"].count('class="point"') == 2 * 4
    assert plots["why"].count('class="xerror"') == 4
    assert plots["timeline"].count('class="point"') > 300
    assert len(re.findall('class="point[" ]', plots["lengths"])) == 4 * 5
    assert len(re.findall('class="point[" ]', plots["measured"])) == 2 * 2  # predicted and measured


@pytest.mark.chromium
@needs_chromium
def test_a_page_that_fails_is_noticed(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<script>Plotly.newPlot('nowhere')</script>")
    _, console = opened(page, tmp_path / "profile")
    assert any("Plotly is not defined" in line for line in console)


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("selenium")
    driver = chromium()
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def step_report(tmp_path_factory):
    step = {"gpus": 8, "cluster": "dgx-h100", "model": "llama3.2-1b", "context": 8192, "tokens": 8192 * 16}
    path = tmp_path_factory.mktemp("step") / "report.html"
    write_step_report(path, advise_step(scenario_from(step)))
    return path


def in_browser(driver, page):
    """Opens a page and waits until its figures are drawn."""
    wait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
    driver.get(page.as_uri())
    missing = "return [...document.querySelectorAll('[id^=plot-]')].filter((p) => !p.querySelector('svg')).length"
    wait(driver, 30).until(lambda d: d.execute_script(missing) == 0)
    return wait(driver, 10)


@pytest.mark.chromium
@pytest.mark.skipif(DRIVER is None, reason="no chromedriver: apt-get install chromium-driver")
@pytest.mark.parametrize("name", ["report", "step_report"])
@pytest.mark.parametrize(
    "shown",
    [
        pytest.param([(390, "dark"), (1280, "light"), (1920, "dark")], id="some"),
        pytest.param(
            [(width, theme) for width in SCREENS for theme in ("light", "dark")], id="all", marks=pytest.mark.slow
        ),
    ],
)
def test_reports_fit_their_screens(browser, name, shown, request):
    pytest.importorskip("axe_core_python")
    sized(browser, shown[0][0])
    in_browser(browser, request.getfixturevalue(name))
    for width, theme in shown:
        sized(browser, width)
        colours = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", colours)
        time.sleep(0.5)  # figures are drawn anew
        assert browser.execute_script(LOOKS) == [], (width, theme)
        assert serious(browser) == [], (width, theme)
        ends = "return document.querySelector('.top li').getBoundingClientRect().bottom"
        assert browser.execute_script(ends) < SCREENS[width]  # the first screen holds the top of the ranking
    assert [one for one in browser.get_log("browser") if one["level"] == "SEVERE"] == []


@pytest.mark.chromium
@pytest.mark.skipif(DRIVER is None, reason="no chromedriver: apt-get install chromium-driver")
def test_legends_hide_what_they_name(browser, report):
    wait = in_browser(browser, report)
    count = "return document.querySelectorAll('#plot-why .trace').length"
    before = browser.execute_script(count)
    button = browser.find_element("css selector", "[data-plot='plot-why']")
    browser.execute_script("arguments[0].click()", button)
    wait.until(lambda d: d.execute_script(count) == before - 1)
    assert button.get_attribute("aria-pressed") == "false"
    assert [one for one in browser.get_log("browser") if one["level"] == "SEVERE"] == []
