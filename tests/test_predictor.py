"""Predictions and recommendations: what they consist of, and what they may not hide."""

import contextlib
import json
import time

import numpy as np
import pytest
from cases import ALL_PASSES, ALL_STRATEGIES, OTHERS, cluster, workload

from cpsim.case.scenario import Scenario
from cpsim.errors import InfeasibleError, NotMeasuredError, ProfileError, ScenarioError
from cpsim.models.profile import load_profile
from cpsim.models.spread import expected_maximum
from cpsim.prediction.advise import advise
from cpsim.prediction.passes import least_memory
from cpsim.prediction.predict import predict, predict_many
from cpsim.prediction.results import Infeasible, Prediction
from cpsim.runtime.processes import mapped
from cpsim.strategies import STRATEGIES, plan
from cpsim.strategies.others import CPSIM


def scenario(**changes):
    case = {
        "strategy": "zigzag_ring",
        "gpus": 4,
        "cluster": "h200-4",
        "tokens_per_gpu": 4096,
        "heads": 32,
        "kv_heads": 8,
    }
    return Scenario(**{**case, **changes})


def test_forward_and_backward_add_up():
    both, forward, backward = (predict(scenario(**{"pass": p})) for p in ("fwd_bwd", "fwd", "bwd"))
    apart = forward.time_s + backward.time_s  # in one window the second is launched while the first runs
    assert 0.998 * apart < both.time_s <= apart
    exposed = forward.exposed_comm_s + backward.exposed_comm_s
    assert 0.999 * exposed < both.exposed_comm_s <= exposed
    assert both.bytes_sent_per_gpu == forward.bytes_sent_per_gpu + backward.bytes_sent_per_gpu


@pytest.mark.parametrize("strategy", ["ring", "zigzag_ring", "ulysses", "allgather"])
def test_parts_of_the_critical_path_add_up_to_the_time(strategy):
    answer = predict(scenario(strategy=strategy))
    assert sum(answer.parts_s.values()) == pytest.approx(answer.time_s, rel=1e-9)
    assert answer.time_s_low < answer.time_s < answer.time_s_high


def test_predictions_repeat_exactly():
    assert predict(scenario()).draws_s == predict(scenario()).draws_s


def test_more_tokens_take_longer_and_more_gpus_less():
    times = [predict(scenario(tokens_per_gpu=t)).time_s for t in (1024, 4096, 16384)]
    assert times == sorted(times)
    work = {"tokens_per_gpu": None, "tokens": 65536, "cluster": "dgx-h200"}
    times = [predict(scenario(gpus=g, **work)).time_s for g in (2, 4, 8)]
    assert times == sorted(times, reverse=True)


def test_throughput_stays_below_what_the_kernel_reaches():
    for strategy in ("ring", "zigzag_ring", "ulysses", "allgather"):
        assert 100 < predict(scenario(strategy=strategy, tokens_per_gpu=16384)).tflops_per_gpu < 800


def test_small_cases_of_eager_code_wait_for_their_hosts():
    case = {"tokens_per_gpu": 256, "implementation": "ring-flash-attn", "kernel": "fa2"}
    answer = predict(scenario(**case))
    assert answer.parts_s["host"] > 0.3 * answer.time_s
    assert predict(scenario(**case, protocol="streamed")).time_s < answer.time_s


def test_a_captured_program_is_launched_once():
    host, case = load_profile("h200").host, scenario(tokens_per_gpu=256)
    last = np.exp(load_profile("h200").sigma["graph"] * expected_maximum(case.gpus))  # of all ranks, in either pass
    each = host.graph_s * last + host.cold_start_s, host.graph_queued_s + host.cold_start_s  # the second is queued
    assert predict(case).parts_s["host"] == pytest.approx(sum(each), rel=0.01)
    streamed = predict(scenario(tokens_per_gpu=256, protocol="streamed", pass_="fwd"))
    assert streamed.parts_s["host"] == pytest.approx(host.graph_queued_s + host.cold_start_s, rel=0.01)


def test_results_that_rest_on_published_numbers_or_reach_beyond_measured_sizes_say_so():
    answer = predict(scenario(strategy="allgather", gpus=16, cluster="dgx-h200"))
    assert any("published" in note for note in answer.notes)
    assert any("measured up to 4" in note for note in answer.notes)
    assert not any("published" in note for note in predict(scenario()).notes)


def test_a_ranking_says_that_it_is_of_both_passes_where_one_was_asked_for():
    assert any("pass fwd" in note for note in advise(scenario(pass_="fwd")).notes)
    assert not any("pass fwd" in note for note in advise(scenario()).notes)


def test_a_case_too_large_for_this_machine_is_one_line_and_loses_no_other(monkeypatch):
    def full(case, **_):
        raise MemoryError if case.scenario.gpus == 4 else InfeasibleError("other")

    monkeypatch.setattr("cpsim.prediction.predict.prediction_of", full)
    large, other = predict_many([scenario(gpus=4), scenario(gpus=2)], jobs=1)
    assert "this machine's memory" in str(large)
    assert other.reason == "other"


def test_a_case_that_does_not_fit_in_memory_is_infeasible():
    with pytest.raises(InfeasibleError, match=r"out of memory: needs \d+\.\d GB on one GPU, h200 has 150\.1 GB"):
        predict(scenario(strategy="allgather", gpus=64, cluster="dgx-h200", tokens_per_gpu=131072))


@pytest.mark.parametrize("pass_", ALL_PASSES)
@pytest.mark.parametrize(("documents", "mask"), [("one", "full"), ("short", "causal_document")])
def test_no_schedule_holds_less_than_is_known_before_planning(documents, mask, pass_):
    case, gpus = workload(mask, documents), cluster(4, 2)
    ours = [(CPSIM, name, knobs) for name, knobs in ALL_STRATEGIES]
    held = {}
    for code, name, knobs in (*ours, *OTHERS):
        with contextlib.suppress(InfeasibleError):
            held[code.name, name, str(knobs)] = plan(name, case, gpus, pass_, knobs, code).memory().max()
    least = least_memory(case, 4, pass_)
    assert len(held) > 40
    assert [who for who, nbytes in held.items() if nbytes < least] == []


def test_what_cannot_fit_is_known_before_planning():
    with pytest.raises(InfeasibleError, match=r"out of memory: needs at least \d+\.\d GB on one GPU, h200 has"):
        predict(scenario(strategy="dcp", gpus=8, cluster="dgx-h200", tokens_per_gpu=10_000_000))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"strategy": None}, ScenarioError, "strategy: expected one of none, ulysses"),
        ({"implementation": "distca"}, ScenarioError, "implementation: expected cpsim, .*; got 'distca'"),
        ({"cluster": "p4de", "kernel": "fa4"}, ProfileError, "profile a100 lacks kernel 'fa4' fwd; it has cudnn, fa2"),
        ({"profile": "h300"}, ProfileError, "did you mean 'h.*'.; shipped are a100, .*, derived those of GPUs .*l40s"),
        ({"kernel": "ffb"}, ScenarioError, "kernel: expected fa2, .*; got 'ffb'"),
        ({"kernel": "ffa"}, NotMeasuredError, "profile h200 lacks kernel 'ffa' fwd; it has cudnn"),
        ({"kernel": "vsa"}, NotMeasuredError, "kernel vsa was not measured: .* package fastvideo-kernel runs it"),
        ({"heads": 30, "kv_heads": 10, "strategy": "ulysses"}, InfeasibleError, "divisible by ranks"),
    ],
)
def test_what_cannot_be_answered_says_why(changes, error, message):
    with pytest.raises(error, match=message):
        predict(scenario(**changes))


def test_a_gpu_without_a_profile_gets_costs_by_its_description_and_a_note_says_so(tmp_path):
    path = tmp_path / "new.json"
    gpu = {
        "name": "x900",
        "memory_bytes": 10**11,
        "num_sms": 200,
        "peak_flops_per_s": 2e15,
        "memory_bandwidth_bytes_per_s": 9e12,
    }
    path.write_text(json.dumps({"name": "new", "gpus_per_node": 8, "gpu": gpu}))
    answer = predict(scenario(cluster=str(path)))
    assert "derived by the description of x900 from" in answer.notes[0]
    assert "against h200" in answer.notes[0]
    assert "memory bandwidth x 1.88" in answer.notes[0]
    assert answer.time_s == predict(scenario(cluster=str(path), profile="data-sheet")).time_s


def test_one_bad_line_never_loses_the_others():
    cases = [scenario(), ScenarioError("line 2: no"), scenario(strategy="ulysses", heads=30, kv_heads=10), scenario()]
    answers = predict_many(cases, jobs=1)
    assert [type(a) for a in answers] == [Prediction, ScenarioError, Infeasible, Prediction]
    assert answers[0].time_s == answers[3].time_s


def test_processes_give_the_same_answers_in_order():
    cases = [scenario(tokens_per_gpu=t) for t in range(512, 512 + 20 * 64, 64)]
    alone, together = predict_many(cases, jobs=1), predict_many(cases, jobs=2)
    assert [a.time_s for a in alone] == [a.time_s for a in together]
    assert all(not a.timelines for a in together)


def slept(seconds):
    time.sleep(seconds)
    return seconds


@pytest.mark.parametrize("jobs", [1, 2])
def test_work_comes_back_in_the_order_of_its_items_whatever_ends_first(jobs):
    shown = []
    assert mapped(slept, (0.5, 0.0, 0.1), jobs, lambda *counts: shown.append(counts)) == [0.5, 0.0, 0.1]
    assert shown == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("jobs", [1, 2])
def test_progress_counts_scenarios(jobs):
    shown = []
    predict_many([ScenarioError("no")] * 20, jobs, lambda *counts: shown.append(counts))
    assert shown == [(8, 20), (16, 20), (20, 20)]


def test_advice_is_sorted_and_its_probabilities_add_up():
    advice = advise(scenario(strategy=None))
    totals = [c.total_s for c in advice.candidates]
    assert totals == sorted(totals)
    assert sum(c.probability_best for c in advice.candidates) == pytest.approx(1.0)
    left_out = {"none", "hybrid_cp", "wlb", "per_sequence"}
    assert {c.scenario.strategy for c in advice.candidates} == set(STRATEGIES) - left_out
    assert {i.scenario.strategy for i in advice.infeasible} == left_out


def test_shared_errors_do_not_blur_a_comparison():
    """Two candidates that spend their time in the same kernel are compared with the same draws of its error."""
    advice = advise(scenario(strategy=None, tokens_per_gpu=16384))
    first, second = (np.add(c.forward.draws_s, c.backward.draws_s) for c in advice.candidates[:2])
    assert np.std(first - second) < 0.85 * np.hypot(np.std(first), np.std(second))


def test_stripes_of_short_documents_are_tried_only_where_asked_for():
    short = {"mask": "causal_document", "documents": [128] * 128}
    advice = advise(scenario(strategy=None, **short))
    reasons = {i.scenario.strategy: i.reason for i in advice.infeasible}
    assert "tokens long on average" in reasons["striped_ring"]
    asked = advise(scenario(strategy="striped_ring", **short))
    assert [c.scenario.strategy for c in asked.candidates] == ["striped_ring"]


def test_on_one_gpu_there_is_nothing_to_choose():
    advice = advise(scenario(strategy=None, gpus=1))
    assert [c.scenario.strategy for c in advice.candidates] == ["none"]
    assert not advice.infeasible


def test_a_named_strategy_is_the_only_one_tried():
    advice = advise(scenario())
    assert {c.scenario.strategy for c in advice.candidates} == {"zigzag_ring"}
