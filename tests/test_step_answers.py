"""Answers about training steps: what fits, what would, and what nobody can say; searches for how to cut one."""

import itertools
import json
import math
import re

import numpy as np
import pytest
from test_cli import cpsim

from cpsim.case.load import scenario_from
from cpsim.errors import NotMeasuredError, OutOfMemoryError, ScenarioError
from cpsim.prediction.advise import advise
from cpsim.prediction.predict import attempt, predict, predict_many, sweep
from cpsim.prediction.results import Infeasible, Prediction, refusal
from cpsim.prediction.step_advice import advise_step, opened, words
from cpsim.prediction.step_changes import NAMED
from cpsim.report.records import prediction_record
from cpsim.report.step_page import memory_view, step_report_html, timeline_view
from cpsim.report.steps import step_advice_record, step_recommendation
from cpsim.report.validation import closest, closest_html, closest_text

TITAN = {
    "gpus": 8,
    "cluster": "dgx-h100",
    "model": "llama3-8b",
    "tokens": 262144,
    "context": 262144,
    "kernel": "sdpa_flash",
    "framework": "torchtitan",
    "strategy": "zigzag_ring",
    "parallel": {"cp": 8},
}
SMALL = {"layers": 4, "hidden": 2048, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 8192, "vocab": 32000}
LARGE = {
    "gpus": 8,
    "cluster": "dgx-h100",
    "model": "llama3-70b",
    "tokens": 8 * 131072,
    "context": 131072,
    "kernel": "sdpa_flash",
    "framework": "huggingface",
}
ATTENTION = {"gpus": 8, "cluster": "dgx-h100", "heads": 32, "kv_heads": 8, "kernel": "fa2", "strategy": "zigzag_ring"}
ANSWERS = {
    "fits": (TITAN | {"parallel": {"cp": 8, "recompute": "full"}}, None, True),
    "cannot": (TITAN | {"parallel": {"cp": 8, "sharding": "none"}}, "cannot", False),
    "not measured": (TITAN | {"profile": "mi300x", "kernel": "cudnn"}, "not_measured", False),
    "does not fit": (TITAN, "does_not_fit", True),
    "attention does not fit": (ATTENTION | {"tokens": 2**29}, "does_not_fit", False),
    "attention cannot": (
        ATTENTION | {"tokens": 8192, "strategy": "ulysses", "kv_heads": 1, "heads": 1},
        "cannot",
        False,
    ),
}


@pytest.mark.parametrize(("case", "kind", "timed"), ANSWERS.values(), ids=ANSWERS)
def test_three_answers_are_three(case, kind, timed):
    scenario = scenario_from(case)
    result = attempt(scenario)
    record = prediction_record(scenario, result)
    assert refusal(result) == record.get("kind") == kind
    assert isinstance(result, Prediction) == timed == ("time_s" in record)
    assert ("error" in record) != timed
    columns = sweep([scenario])
    assert columns["kind"].tolist() == [kind or ""]
    assert math.isnan(columns["time_s"][0]) != timed
    assert bool(columns["error"][0]) != timed


def test_what_cannot_be_read_is_none_of_them():
    assert refusal(ScenarioError("why")) is None
    assert prediction_record(ScenarioError("why"), ScenarioError("why")) == {"error": "why"}


def test_errors_say_which_answer_they_are():
    with pytest.raises(OutOfMemoryError, match="out of memory"):
        predict(ANSWERS["attention does not fit"][0])
    with pytest.raises(NotMeasuredError, match="lacks"):
        predict(ANSWERS["not measured"][0])


def test_a_table_tells_answers_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps(case) + "\n" for case, _, _ in ANSWERS.values()))
    shown = " ".join(cpsim("predict", path).split())
    for words_of in ("cannot run", "not measured", "does not fit"):
        assert words_of in shown


def test_advice_of_attention_tells_answers_apart():
    found = advise(scenario_from(ATTENTION | {"strategy": None, "tokens": 3 * 2**20, "gpus": 4, "heads": 64}))
    kinds = {entry.kind for entry in found.infeasible}
    assert kinds <= {"cannot", "does_not_fit"}
    for entry in found.infeasible:
        assert (entry.kind == "does_not_fit") == entry.reason.startswith("out of memory")


def test_what_would_fit_does_when_it_is_asked_for():
    found = predict(TITAN)
    assert 0 < len(found.would_fit) <= NAMED
    times = [one.time_s for one in found.would_fit]
    assert times == sorted(times)
    for one in found.would_fit:
        again = predict(TITAN | {"parallel": TITAN["parallel"] | dict(one.change)})
        assert again.fits
        assert (again.time_s, again.needed_bytes) == (pytest.approx(one.time_s), one.needed_bytes)
    assert found.notes[0] == (
        f"does not fit: needs {found.needed_bytes / 1e9:.1f} of {found.gpu_memory_bytes / 1e9:.1f} GB; what would: "
        + ", ".join(
            f"{one} ({one.needed_bytes / 1e9:.1f} GB, {100 * (one.time_s / found.time_s - 1):+.0f} % time)"
            for one in found.would_fit
        )
    )


def test_more_ranks_are_among_what_would_fit():
    case = TITAN | {"framework": "torch", "strategy": "none", "tokens": 8 * 65536, "context": 65536}
    found = predict(
        case
        | {
            "parallel": {"recompute": "full", "loss_chunks": 64},
            "model": "llama3-70b",
            "gpus": 64,
            "tokens": 64 * 65536,
        }
    )
    assert not found.fits
    for one in found.would_fit:
        assert set(one.change) <= {"tp", "cp", "sharding", "loss_chunks"}
    assert {"tp"} in [set(one.change) for one in found.would_fit]


def test_where_no_single_change_fits_the_answer_says_so():
    found = predict(LARGE | {"strategy": "none"})
    assert not found.fits
    assert found.would_fit == ()
    assert "no single change does" in found.notes[0]
    assert found.time_s > 0


def test_a_record_of_a_step_has_memory_by_kind_throughput_and_utilisation():
    found = predict(TITAN)
    record = json.loads(json.dumps(prediction_record(found.scenario, found)))
    beside = ("communicators", "context")
    assert record["peak_memory_bytes"] == sum(n for kind, n in record["memory"].items() if kind not in beside)
    assert record["fits"] == (sum(record["memory"].values()) <= record["gpu_memory_bytes"])
    assert record["memory_low"] < sum(record["memory"].values()) < record["memory_high"]
    assert record["tokens_per_s_per_gpu"] == pytest.approx(262144 / 8 / record["time_s"])
    assert record["mfu"] == pytest.approx(record["tflops_per_gpu"] / 989.4)
    assert [set(one) for one in record["would_fit"]] == [{"change", "time_s", "needed_bytes"}] * len(found.would_fit)
    attention = predict(ATTENTION | {"tokens": 8192})
    assert not {"memory", "mfu", "fits"} & prediction_record(attention.scenario, attention).keys()


def test_a_step_alone_is_shown_with_its_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "case.json"
    path.write_text(json.dumps(TITAN))
    shown = cpsim("predict", path)
    assert max(map(len, shown.splitlines())) <= 80
    for needle in ("tokens/s per GPU", "MFU", "does not fit", "activations", "communicators", "context"):
        assert needle in shown


@pytest.fixture(scope="module")
def nothing_fits():
    return advise_step(scenario_from(LARGE))


def test_where_nothing_fits_the_nearest_is_ranked(nothing_fits):
    assert nothing_fits.candidates == ()
    needed = [one.step.needed_bytes for one in nothing_fits.nearest]
    assert needed == sorted(needed)
    assert not any(one.step.fits for one in nothing_fits.nearest)
    told = step_recommendation(nothing_fits)
    assert told.startswith("No way to cut this step fits into memory. Nearest: tp ")
    assert f"{needed[0] / 1e9:.1f} of " in told
    assert {one.kind for one in nothing_fits.refused} == {"does_not_fit"}
    assert not [note for note in nothing_fits.notes if note.startswith("does not fit")]
    record = step_advice_record(nothing_fits)
    assert [one["kind"] for one in record["nearest"]] == ["does_not_fit"] * len(needed)


def test_advice_says_whose_code_it_assumes(tmp_path):
    path = tmp_path / "case.json"
    path.write_text(json.dumps(TITAN | {"parallel": {"tp": 1, "cp": 8}}))
    said = " ".join(cpsim("advise", "--step", path).split())
    assert re.match(r"Assumes torchtitan \(torchtitan of December 2024.*?\), sharding fsdp", said)
    case = {name: value for name, value in TITAN.items() if name != "framework"}
    path.write_text(json.dumps(case | {"kernel": "fa2", "parallel": {"tp": 8, "pp": 1}, "strategy": "none"}))
    assert cpsim("advise", "--step", path).startswith("Assumes megatron (")


def test_the_report_of_a_step_has_what_the_terminal_has(nothing_fits, tmp_path):
    path, html = tmp_path / "case.json", tmp_path / "report.html"
    path.write_text(json.dumps(TITAN | {"parallel": {"tp": 1, "cp": 8}}))
    cpsim("advise", "--step", path, "--html", html)
    page = html.read_text()
    for needle in ("Assumes torchtitan", "Run tp 1", "tokens/s", "MFU", "communicators", "memory of the GPU"):
        assert needle in page
    page = step_report_html(nothing_fits)
    assert "What comes nearest to fitting" in page
    assert "does not fit" in page


def test_published_steps_that_are_closest_come_first_and_are_of_the_same_framework():
    case = {"cluster": "dgx-b200", "model": "llama3.1-8b", "context": 8192, "framework": "megatron"}
    for gpus in (16, 32):
        scenario = scenario_from(case | {"gpus": gpus, "tokens": 32 * 8192})
        found = closest(scenario, 1, 5)
        assert {one.group for one in found} == {"megatron"}
        assert (found[0].gpu, found[0].gpus, found[0].context) == ("B200", gpus, 8192)
        assert f"Closest published run: {found[0].what}," in closest_text(scenario, 1)
        cells = re.findall(r"<tr><td>([^<]+)</td><td>(\w+)</td>", closest_html(scenario, 1))
        assert cells[:5] == [(one.what, one.gpu) for one in found]
    assert closest_html(scenario_from(case | {"gpus": 16, "tokens": 32 * 8192, "framework": "torch"}), 1) == ""


@pytest.mark.parametrize("framework", ["megatron", "torch", "torchtitan", "huggingface"])
def test_advice_is_no_slower_than_any_way_to_cut(framework):
    """Against every way to cut that a grid of scenarios has."""
    asked = {
        "gpus": 16,
        "cluster": "dgx-h100",
        "model": SMALL,
        "tokens": 16 * 32768,
        "context": 65536,
        "kernel": "sdpa_flash",
        "framework": framework,
    }
    best = advise_step(scenario_from(asked)).candidates[0]
    assert best.step.fits
    recomputes, stages = ("none", "full"), (1, 2, 4) if framework == "megatron" else (1,)
    cases = [
        scenario_from(asked | {"strategy": strategy, "parallel": {"tp": tp, "pp": pp, "cp": cp, "recompute": kind}})
        for tp, pp, cp, kind in itertools.product((1, 2, 4, 8), stages, (1, 2, 4, 8), recomputes)
        for strategy in (("none",) if cp == 1 else ("zigzag_ring", "allgather", "ulysses"))
    ]
    found = [one for one in predict_many(cases, jobs=1) if isinstance(one, Prediction) and one.fits]
    assert len(found) > 10
    assert best.step.time_s <= min(one.time_s for one in found) * 1.001


def test_advice_keeps_what_is_said_of_parallel():
    fixed = {"tp": 1, "cp": 8, "recompute": "full", "loss_chunks": 8, "sharding": "fsdp"}
    (one,) = advise_step(scenario_from(TITAN | {"parallel": fixed})).candidates
    assert {name: getattr(one.parallel, name) for name in fixed} == fixed
    assert one.prediction.scenario.strategy == "zigzag_ring"


def test_a_strategy_that_is_said_is_kept():
    asked = TITAN | {"strategy": "none", "context": 65536, "parallel": {"tp": 2, "recompute": "full"}}
    found = advise_step(scenario_from(asked))
    assert {one.parallel.cp for one in (*found.candidates, *found.nearest)} == {1}
    assert {one.kind for one in found.refused if "cp 1" not in one.degrees} == {"cannot"}


def test_degrees_that_leave_replicas_without_sequences_are_said_to():
    found = advise_step(scenario_from(TITAN | {"parallel": {"tp": 2, "cp": 1}}))
    assert step_recommendation(found).startswith("No degrees of 8 GPUs give every replica whole sequences")


def test_published_runs_have_answers():
    """TRL's Qwen3-8B at a million tokens and more on 8 to 32 H100; torchtitan's 8B at 262,144 on 8."""
    qwen = {"layers": 36, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 12288, "vocab": 151936}
    trl = TITAN | {"model": qwen, "framework": "huggingface", "strategy": None, "parallel": {}}
    for gpus, length in ((8, 2**20), (16, 2**21), (32, 2**22)):
        found = advise_step(scenario_from(trl | {"gpus": gpus, "tokens": length, "context": length}))
        assert found.candidates or found.nearest
        best = (found.candidates or found.nearest)[0]
        assert 40e9 < best.step.needed_bytes < 120e9
    found = advise_step(scenario_from(TITAN | {"strategy": None, "parallel": {}}))
    assert "tp 1, pp 1, dp 1, cp 8" in [words(one.parallel) for one in found.candidates]


def test_probabilities_of_candidates_add_up(nothing_fits):
    assert np.isclose(sum(one.probability_best for one in nothing_fits.nearest), 1.0)
    assert isinstance(attempt(scenario_from(TITAN | {"parallel": {"cp": 8, "sharding": "none"}})), Infeasible)


@pytest.fixture(scope="module")
def cut_into_stages():
    """16 layers on four stages of two chunks of two layers each."""
    parallel = {"pp": 4, "virtual_pp": 2, "tp": 2, "cp": 1, "dp": 1, "microbatches": 8, "cuda_graphs": "layers"}
    case = {"gpus": 8, "cluster": "dgx-h100", "model": "llama3.2-1b", "context": 8192, "tokens": 8 * 8192}
    return advise_step(scenario_from(case | {"parallel": parallel}))


def test_a_step_that_is_opened_ends_when_it_does(cut_into_stages):
    """Passes lie behind each other and end as the step says; layers of a chunk take what its pass takes."""
    best, found = cut_into_stages.recommended, opened(cut_into_stages.recommended)
    passes = found.passes
    assert passes.start_s.shape == (2, 8, 8)
    assert passes.time_s == best.step.time_s > passes.end_s.max()
    assert passes.critical.any()
    seconds = passes.end_s - passes.start_s
    assert sorted(chunk for one in found.inside for chunk in one.chunks) == list(range(8))
    for one in found.inside:
        assert one.layers == one.shown == 2
        turn = max(op.end_s for op in one.ops if not op.backward)
        whole = max(op.end_s for op in one.ops)
        for chunk in one.chunks:
            assert seconds[0, :, chunk] == pytest.approx(turn, rel=0.02)
            assert seconds[1, :, chunk] == pytest.approx(whole - turn, rel=0.02)
        assert sum(op.kind == "attention" for op in one.ops) == 2


def test_passes_open_the_layers_of_their_stage(cut_into_stages):
    found = opened(cut_into_stages.recommended)
    where = {chunk: i for i, one in enumerate(found.inside) for chunk in one.chunks}
    pipeline, layers = timeline_view(found, 8).plots
    forward = next(trace for trace in pipeline["data"] if trace["name"] == "forward")
    assert len(forward["x"]) == 64
    for row, (text, inside) in zip(forward["y"], forward["customdata"], strict=True):
        stage, chunk = int(row.split()[1]), int(text.rsplit(" ", 1)[1])
        assert where[chunk * 4 + stage] == inside
    assert {trace["meta"]["inside"] for trace in layers["data"]} == set(where.values())
    assert {trace["meta"]["inside"] for trace in layers["data"] if trace["visible"]} == {0}


def test_every_rank_s_memory_is_that_of_its_stage(cut_into_stages):
    _, ranks = memory_view(cut_into_stages).plots
    stages = cut_into_stages.recommended.step.memory
    total = np.sum([trace["x"] for trace in ranks["data"]], axis=0) * 1e9
    assert total == pytest.approx([one.needed for one in stages])
    assert ranks["data"][0]["y"] == [f"stage {s} · GPUs {2 * s}–{2 * s + 1}" for s in range(4)]
