"""Sizes are told before anything is planned: what is absurd is refused at once, and what people ask for is not."""

import time

import pytest

from cpsim.case.cluster import load_cluster
from cpsim.case.load import scenario_from
from cpsim.errors import InfeasibleError
from cpsim.prediction.advise import evaluate
from cpsim.prediction.predict import predict
from cpsim.prediction.results import Infeasible
from cpsim.prediction.size import MOST_BYTES, MOST_S, size_of
from cpsim.runtime.limits import FORCE

MODEL = {"layers": 4, "hidden": 512, "heads": 4, "kv_heads": 4, "head_dim": 128, "ffn": 1024, "vocab": 8192}
STEP = {
    "gpus": 8,
    "model": MODEL,
    "heads": 4,
    "kv_heads": 4,
    "tokens_per_gpu": 2**19,
    "context": 4096,
    "kernel": "fa2",
}
FIELDS = {"gpus": 64, "cluster": "dgx-h200", "tokens_per_gpu": 8192, "heads": 32, "kv_heads": 8, "strategy": "ring"}
TINY = {"mask": "causal_document", "documents": {"distribution": "pile", "max_length": 8}}
DRAWN = {"mask": "causal_document", "documents": {"distribution": "prolong512k"}}


@pytest.mark.parametrize(
    "changes",
    [
        {
            "documents": {"distribution": "pile", "max_length": 8},
            "mask": "causal_document",
            "tokens_per_gpu": 2 * 10**6,
        },
        {"gpus": 100_000, **DRAWN},
        {"gpus": 1_000_000, "tokens_per_gpu": 512, "strategy": "distca"},
        {"mask": {"name": "block_sparse", "block": 1}, "kernel": "flex"},
        {"gpus": 2048, "tokens_per_gpu": 512, "mask": "shared_question", "kernel": "flex", "strategy": "zigzag_ring"},
        {**STEP, "tokens_per_gpu": 2**26, "strategy": "none", "mask": "full_document", "documents": DRAWN["documents"]},
        {
            "model": {"layers": 10_000, "hidden": 1024, "heads": 8, "kv_heads": 8, "ffn": 1024, "vocab": 1000},
            "heads": 8,
            "strategy": "none",
            "gpus": 100_000,
            "tokens_per_gpu": 1000,
            "parallel": {"pp": 10_000, "dp": 10, "microbatches": 10_000},
        },
    ],
)
def test_absurd_sizes_are_refused_at_once_with_what_they_would_take(changes):
    begun = time.process_time()
    with pytest.raises(
        InfeasibleError, match=r"too large to predict: it would take about .* GB on one core; use fewer"
    ):
        predict(FIELDS | changes)
    assert time.process_time() - begun < 1


@pytest.mark.parametrize(
    "changes",
    [
        {"gpus": 1024, **DRAWN},
        {"gpus": 512, "strategy": "usp", **DRAWN},
        {"gpus": 256, "strategy": "zigzag_ring", **DRAWN},
        {"gpus": 16_384, "strategy": "usp"},
        {"gpus": 1024, "strategy": "distca", **DRAWN},
        {"gpus": 4096, "strategy": "allgather"},
    ],
)
def test_what_is_asked_of_large_clusters_is_not_refused(changes):
    size = size_of(scenario_from(FIELDS | changes), load_cluster("dgx-h200"))
    assert size.seconds < MOST_S / 2
    assert size.nbytes < MOST_BYTES / 2


def test_one_setting_that_is_too_large_is_no_candidate_and_loses_no_other():
    asked = {"gpus": 10**6, "tokens_per_gpu": 512, "strategy": "usp", "knobs": {"placement": "context_first"}}
    found = evaluate(scenario_from(FIELDS | asked))
    assert isinstance(found, Infeasible)
    assert "too large to predict" in found.reason


@pytest.mark.parametrize("strategy", ["zigzag_ring", "usp"])
def test_code_of_others_is_folded_and_continued_as_ours_is(strategy):
    knobs = {"knobs": {"ulysses": 2}} if strategy == "usp" else {}
    asked = (
        FIELDS | {"gpus": 8192, "tokens_per_gpu": 2048, "strategy": strategy, "kernel": "fa2", "mask": "causal"} | knobs
    )
    theirs = scenario_from(asked | {"implementation": "yunchang" if knobs else "ring-flash-attn"})
    assert size_of(theirs, load_cluster("dgx-h200")).seconds < 10
    begun = time.process_time()
    assert predict(theirs).time_s > predict(asked).time_s
    assert time.process_time() - begun < 20


def test_a_user_may_insist(monkeypatch):
    asked = FIELDS | {"mask": {"name": "block_sparse", "block": 1}, "kernel": "flex", "gpus": 4, "tokens_per_gpu": 1024}
    monkeypatch.setattr("cpsim.prediction.size.MOST_S", 0.1)
    with pytest.raises(InfeasibleError, match="--force"):
        predict(asked)
    monkeypatch.setenv(FORCE, "1")
    assert predict(asked | {"mask": "causal"}).time_s > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"gpus": 512},
        {"gpus": 512, "strategy": "hybrid_cp"},
        {"gpus": 256, "strategy": "zigzag_ring", **DRAWN},
        {"gpus": 256, "strategy": "striped_ring", **DRAWN},
        {"gpus": 8, "tokens_per_gpu": 10**6, "strategy": "distca", **TINY},
        {"gpus": 1024, "strategy": "distca", "tokens_per_gpu": 512},
        {"gpus": 128, "tokens_per_gpu": 512, "mask": "shared_question", "kernel": "flex", "strategy": "zigzag_ring"},
        {**STEP, "strategy": "none", **DRAWN},
        {**STEP, "strategy": "none", **DRAWN, "mask": "full_document"},
        {**STEP, "strategy": "zigzag_ring", **DRAWN, "parallel": {"cp": 4}},
    ],
)
def test_sizes_are_what_predictions_take(changes):
    """Within a factor of five for both passes of what is not small; the constants are from these cases."""
    predict(FIELDS)
    expected = size_of(scenario_from(FIELDS | changes), load_cluster("dgx-h200")).seconds
    begun = time.process_time()
    predict(FIELDS | changes)
    taken = time.process_time() - begun
    print(f"{changes}: {taken:.1f} s, expected {expected:.1f}")
    assert expected / 5 < taken < 5 * expected
