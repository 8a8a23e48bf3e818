"""The validation set: what its generator says, large and varied enough, and everything of ours can run."""

import json
from collections import Counter

import pytest
from scripts import ROOT, load_script
from targets import check

from cpsim.calibrate.recipes import runs_file
from cpsim.case.load import scenario_from
from cpsim.prediction.compare import chances_of, compare, errors_of, group_key, grouped, predict_runs
from cpsim.prediction.predict import predict_many
from cpsim.prediction.results import Prediction
from cpsim.prediction.runs import case_key, load_runs


def generator():
    return load_script("data/cases/cases.py")


def scenarios(name):
    return [scenario_from(json.loads(line)) for line in (ROOT / "data" / "cases" / name).read_text().splitlines()]


def test_files_are_what_the_generator_writes():
    for path, text in generator().files().items():
        assert path.read_text() == text, "run python data/cases/cases.py"


@pytest.mark.parametrize(
    ("name", "num_cases"),
    [
        ("cases.jsonl", 150),
        ("emulated.jsonl", 20),
        ("documents.jsonl", 44),
        ("drawn.jsonl", 58),
        ("drawn-2.jsonl", 50),
        ("small-others.jsonl", 33),
    ],
)
def test_every_case_is_there_once(name, num_cases):
    keys = Counter(case_key(scenario) for scenario in scenarios(name))
    assert len(keys) >= num_cases
    assert max(keys.values()) == 1


def test_predictions_of_the_run_on_eight_gpus_are_committed_before_it():
    for name in ("cases", "nodes-2", "nodes-4"):
        folder = ROOT / "data" / "cases" / "eight"
        asked = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        told = [json.loads(line) for line in (folder / f"predicted-{name}.jsonl").read_text().splitlines()]
        assert len(asked) == len(told) >= 9
        assert all(
            case.items() <= line["scenario"].items() and line["time_s"] > 0
            for case, line in zip(asked, told, strict=True)
        )


@pytest.mark.parametrize(("names", "num_ours"), [("h200 h200-b", 157), ("h100-two", 64), ("h200-drawn-2", 18)])
def test_real_runs_of_our_executor_are_predicted(names, num_ours):
    """All of them, those of every strategy of five runs or more, and the shorter ones."""
    found = [run for name in names.split() for run in load_runs(runs_file(f"{name}.jsonl"))]
    runs = [run for run in found if run.scenario.implementation == "cpsim"]
    pairs = grouped(compare(predict_runs(runs), runs).pairs, lambda pair: pair.is_long)
    assert len(pairs[True]) == num_ours
    check("runs, ours, 1 ms or more, mean", errors_of(pairs[True]).mean_absolute)
    check("runs, ours, shorter, mean", errors_of(pairs[False]).mean_absolute)
    for mine in grouped(pairs[True], lambda pair: pair.scenario.strategy).values():
        if len(mine) >= 5:
            check("runs, ours, by strategy, signed", errors_of(mine).bias)


@pytest.mark.slow
def test_the_best_is_the_best_as_often_as_its_probability_says():
    """Of each file the choices between our strategies and those between others'."""
    names = "h100-two h100-two-2 h100-two-others h100-windows-1 h100-windows-2 h100-windows-3 h200 h200-b h200-dcp-magi"
    names += " h200-drawn h200-drawn-2 h200-drawn-3 h200-small-others h200-small-others-2"
    found = []
    for name in names.split():
        runs = load_runs(runs_file(f"{name}.jsonl"))
        for mine in grouped(runs, lambda run: run.scenario.implementation == "cpsim").values():
            found += [choice.chances() for choice in compare(predict_runs(mine), mine).choices()]
    first = chances_of([each[0] for each in found])
    of_all = chances_of([one for each in found for one in each])
    guess = chances_of([(1 / len(each), was) for each in found for _, was in each])
    check("P(best), chosen way, stated less was", first.stated - first.was)
    check("P(best), Brier score over that of a guess", of_all.brier / guess.brier)


def test_the_set_is_varied():
    found = scenarios("cases.jsonl")
    assert {s.gpus for s in found} == {1, 2, 4}
    assert {s.mask_name for s in found} == {
        "full",
        "causal",
        "full_document",
        "causal_document",
        "lambda",
        "causal_blockwise",
        "shared_question",
    }
    assert {s.implementation for s in found} == {"cpsim", "ring-flash-attn", "yunchang", "torch"}
    assert {s.strategy for s in found} == {
        "none",
        "ulysses",
        "ring",
        "zigzag_ring",
        "striped_ring",
        "allgather",
        "usp",
        "loongtrain",
        "hybrid_cp",
        "magi",
        "dcp",
    }
    assert {s.num_tokens // s.gpus for s in found} >= {1024 * 2**i for i in range(7)}
    choices = Counter(group_key(s) for s in found)
    assert sum(count >= 2 for count in choices.values()) >= 30


@pytest.mark.slow
def test_our_executor_can_run_all_of_its_cases():
    ours = [s for name in ("cases.jsonl", "emulated.jsonl") for s in scenarios(name) if s.implementation == "cpsim"]
    results = predict_many(ours, jobs=2)
    assert [str(r) for r in results if not isinstance(r, Prediction)] == []
