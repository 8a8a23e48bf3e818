"""Thousands of GPUs: what is folded is exact, what is continued says so, and neither takes long."""

import json
import re
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from targets import check

import studies  # noqa: F401  (adds implementations)
from cpsim.case.cluster import load_cluster
from cpsim.case.load import scenario_from
from cpsim.errors import InfeasibleError, OutOfMemoryError
from cpsim.models.profile import load_profile
from cpsim.models.uncertainty import draws_of
from cpsim.prediction import passes
from cpsim.prediction.case import resolve
from cpsim.prediction.passes import _continued, _continues, _copies, _simulated, run_pass
from cpsim.prediction.predict import predict
from cpsim.prediction.size import KNOWN_PLACES

ERRORS = draws_of(load_profile("h200"), load_cluster("dgx-h200"), "fa4", captured=True, layers=False, seed=(1,))
FIELDS = {"gpus": 32, "cluster": "dgx-h200", "tokens_per_gpu": 1024, "heads": 32, "kv_heads": 8, "mask": "causal"}


def scenario(**changes):
    return scenario_from(FIELDS | changes)


def simulated(case, pass_, copies, num_gpus):
    return _simulated(case, pass_, copies, num_gpus)


def close(a, b, most):
    return np.allclose(a, b, rtol=most, atol=0)


def with_fabric(case, **changes):
    return replace(case, cluster=replace(case.cluster, fabric=replace(case.cluster.fabric, **changes)))


def assert_same(folded, spelled, copies, apart=True, most=1e-9):
    """``apart``: no two GPUs share a link. If they do, what they lose to each other is the transfer's own time, times
    are equal but for rounding, and of ranks and paths that are equally long another may be the one that is told."""
    assert close(folded.time_s, spelled.time_s, most)
    assert not apart or close(*(found.makespans(ERRORS) for found in (folded, spelled)), most)
    tied = 1e-6 * spelled.time_s
    for name, seconds in spelled.parts_s.items() if apart else ():
        assert np.isclose(folded.parts_s[name], seconds, rtol=0, atol=tied), name
    assert not apart or np.isclose(folded.exposed_s, spelled.exposed_s, rtol=0, atol=tied)
    assert close(folded.sent, spelled.sent[::copies], most)
    assert folded.memory_bytes == spelled.memory_bytes


@given(
    strategy=st.sampled_from(["usp", "loongtrain"]),
    degree=st.sampled_from([2, 4, 8]),
    nodes=st.sampled_from([1, 2, 3, 4]),
    tokens=st.sampled_from([512, 1024, 4096]),
    kv_heads=st.sampled_from([1, 4, 8, 32]),
    mask=st.sampled_from(["full", "causal", "causal_document"]),
    pass_=st.sampled_from(["fwd", "bwd"]),
    protocol=st.sampled_from(["synced", "streamed"]),
    nics=st.sampled_from([1, 2, 4, 8, 16]),
    oversubscription=st.sampled_from([1.0, 1.5, 4.0]),
    spine=st.sampled_from([1.0, 3.0, 16.0]),
    seed=st.integers(0, 9),
)
@settings(max_examples=20, deadline=None)
def test_one_gpu_of_a_ulysses_group_stands_for_all(
    strategy, degree, nodes, tokens, kv_heads, mask, pass_, protocol, nics, oversubscription, spine, seed
):
    asked = scenario(
        strategy=strategy,
        gpus=8 * nodes,
        tokens_per_gpu=tokens,
        kv_heads=kv_heads,
        mask=mask,
        documents={"distribution": "prolong64k", "seed": seed} if mask == "causal_document" else None,
        knobs={"ulysses": degree},
        protocol=protocol,
    )
    leaves = {"nodes_per_leaf": 2, "spine_oversubscription": spine}
    case = with_fabric(resolve(asked), nics_per_node=nics, oversubscription=oversubscription, **leaves)
    folded = simulated(case, pass_, degree, case.cluster.num_gpus)
    assert folded.timeline.schedule.num_ranks * degree == case.cluster.num_gpus
    spelled = simulated(case, pass_, 1, case.cluster.num_gpus)
    assert_same(folded, spelled, degree, apart=nics >= 8 and oversubscription == spine == 1)


@pytest.mark.parametrize("strategy", ["usp", "loongtrain"])
def test_a_folded_timeline_is_that_of_the_first_gpu_of_every_group(strategy):
    case = resolve(scenario(strategy=strategy, knobs={"ulysses": 8}))
    folded, spelled = (simulated(case, "fwd", copies, 32).timeline for copies in (8, 1))
    ends = spelled.rank_end_s().reshape(-1, 8)
    assert close(ends, folded.rank_end_s()[:, None], 1e-9)


@pytest.mark.parametrize(
    ("implementation", "strategy", "kernel", "profile"),
    [
        ("yunchang", "usp", "fa2", None),
        ("transformer-engine", "usp", "fa3", "h100-fa3"),
        ("longca-bench", "usp", "fa3", "h100-fa3"),
        ("longca-bench", "loongtrain", "fa3", "h100-fa3"),
        ("internevo", "loongtrain", "fa2", None),
    ],
)
@pytest.mark.parametrize("degree", [2, 8])
def test_one_gpu_of_a_group_stands_for_all_in_code_of_others(implementation, strategy, kernel, profile, degree):
    what = {"strategy": strategy, "implementation": implementation, "kernel": kernel, "profile": profile}
    case = resolve(scenario(gpus=32, knobs={"ulysses": degree}, **what))
    for pass_ in ("fwd", "bwd"):
        assert_same(simulated(case, pass_, degree, 32), simulated(case, pass_, 1, 32), degree)
    assert _copies(resolve(scenario(gpus=512, knobs={"ulysses": degree}, **what))) == degree


def test_code_that_needs_divisible_tokens_needs_them_on_all_gpus_that_one_stands_for():
    what = {"strategy": "usp", "implementation": "transformer-engine", "kernel": "fa3", "profile": "h100-fa3"}
    with pytest.raises(InfeasibleError, match="divisible by 1024, got"):
        predict(scenario(gpus=512, tokens_per_gpu=1, **what))


def test_machines_that_can_be_drawn_are_not_folded():
    assert _copies(resolve(scenario(strategy="usp", gpus=256))) == 1
    assert _copies(resolve(scenario(strategy="usp", gpus=264))) == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "usp", "knobs": {"placement": "context_first", "ulysses": 8}},
        {"strategy": "usp", "knobs": {"ulysses": 1}},
        {"strategy": "zigzag_ring"},
        {"strategy": "usp", "sinks": True},
    ],
)
def test_what_is_not_known_to_be_alike_is_not_folded(changes):
    assert _copies(resolve(scenario(gpus=512, **changes))) == 1


@pytest.mark.parametrize(("nics", "copies"), [(3, 6), (8, 2), (12, 5), (12, 3)])
def test_gpus_with_unequal_shares_of_nics_are_not_folded(nics, copies):
    cluster = resolve(scenario(strategy="usp")).cluster
    cluster = replace(cluster, gpus_per_node=12, num_gpus=24, fabric=replace(cluster.fabric, nics_per_node=nics))
    assert cluster.can_fold(copies) == ((nics, copies) == (12, 3))


def worst_draw(asked, passes=("fwd", "bwd")):
    """Of the time with each draw of errors, how far a continued ring is at most from one that is simulated step by
    step; all else of both agrees."""
    case, copies, worst = resolve(asked), 8 if asked.strategy == "usp" else 1, 0.0
    assert _continues(case, copies)
    for pass_ in passes:
        spelled = simulated(case, pass_, copies, case.cluster.num_gpus)
        continued = _continued(case, pass_, copies)
        assert continued.timeline is None
        assert close(continued.time_s, spelled.time_s, 1e-4)
        draws = [found.makespans(ERRORS) for found in (continued, spelled)]
        worst = max(worst, float(np.abs(draws[0] / draws[1] - 1).max()))
        assert close(*(np.quantile(one, [0.05, 0.95]) for one in draws), 1e-3)
        assert np.isclose(continued.exposed_s, spelled.exposed_s, rtol=1e-2, atol=1e-4 * spelled.time_s)
        assert close(continued.host_s, spelled.host_s, 1e-9)
        assert close(continued.sent, spelled.sent.max(), 1e-9)
        assert continued.memory_bytes == spelled.memory_bytes
    return worst


@pytest.mark.parametrize("strategy", ["ring", "zigzag_ring", "striped_ring", "usp"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_a_continued_ring_is_the_simulated_one_to_a_ten_thousandth(strategy, mask):
    asked = scenario(strategy=strategy, mask=mask, gpus=320 * (8 if strategy == "usp" else 1))
    assert worst_draw(asked, ("fwd", "bwd") if mask == "causal" else ("fwd",)) <= 1e-3


@pytest.mark.parametrize(
    ("implementation", "strategy", "kernel"),
    [
        ("ring-flash-attn", "zigzag_ring", "fa2"),
        ("yunchang", "usp", "fa2"),
        ("torch", "zigzag_ring", "sdpa_flash"),
        ("transformer-engine", "zigzag_ring", "fa2"),
        ("longca-bench", "zigzag_ring", "fa3"),
    ],
)
def test_rings_of_others_are_continued(implementation, strategy, kernel):
    what = {"profile": "h100-fa3"} if kernel == "fa3" else {}
    gpus = 320 * (8 if strategy == "usp" else 1)
    asked = scenario(implementation=implementation, strategy=strategy, kernel=kernel, gpus=gpus, **what)
    check("continued rings of others and under windows, single draws", worst_draw(asked))


@pytest.mark.parametrize("strategy", ["ring", "zigzag_ring", "usp"])
@pytest.mark.parametrize(
    "mask",
    [{"name": "causal_sliding_window", "window": 4096}, "full_sliding_window", {"name": "lambda", "window": 6000}],
)
def test_rings_under_narrow_windows_are_continued(strategy, mask):
    asked = scenario(strategy=strategy, mask=mask, kernel="flex", gpus=320 * (8 if strategy == "usp" else 1))
    check("continued rings of others and under windows, single draws", worst_draw(asked))


@pytest.mark.parametrize(
    "changes",
    [
        {"mask": {"name": "lambda", "window": 8192}},
        {"mask": "prefix_lm_causal"},
        {"mask": "full_sliding_window", "strategy": "striped_ring"},
        {"mask": "causal_document", "documents": {"distribution": "prolong64k", "seed": 1}, "gpus": 520},
    ],
)
def test_a_ring_whose_masks_differ_with_its_length_is_not_continued(changes):
    assert not _continues(resolve(scenario(**{"strategy": "zigzag_ring", "gpus": 1024} | changes)), 1)


def test_what_would_fit_is_said_of_all_gpus_of_a_continued_ring():
    asked = {"strategy": "zigzag_ring", "gpus": 4096, "pass": "fwd"}
    with pytest.raises(OutOfMemoryError) as caught:
        predict(scenario(**asked, tokens_per_gpu=240_000, heads=1024, kv_heads=1024))
    told = re.search(r"about (\d+)M tokens would fit", str(caught.value))
    assert 100_000 < int(told[1]) * 2**20 / 4096 < 240_000


def test_outputs_that_a_ring_holds_are_counted_at_its_whole_length():
    """Transformer Engine keeps every partial output, which no short ring shows."""
    asked = {"strategy": "zigzag_ring", "implementation": "transformer-engine", "kernel": "fa2", "pass": "fwd"}
    found = [predict(scenario(**asked, gpus=gpus, heads=8)).peak_memory_bytes for gpus in (256, 1024)]
    assert 3.5 < found[1] / found[0] < 4
    with pytest.raises(OutOfMemoryError, match="needs at least"):
        predict(scenario(**asked, gpus=8192, tokens_per_gpu=8192))


@pytest.mark.parametrize("per_node", [4, 72, 96])
def test_rings_over_large_nodes_are_continued_from_whole_nodes(per_node):
    cluster = resolve(scenario(strategy="ring")).cluster
    fabric = replace(cluster.fabric, nics_per_node=per_node)
    cluster = replace(cluster, gpus_per_node=per_node, num_gpus=per_node, fabric=fabric).with_gpus(10 * per_node)
    case = resolve(scenario(strategy="zigzag_ring", gpus=8))
    case = replace(case, cluster=cluster, workload=replace(case.workload, documents=(10 * per_node * 1024,)))
    continued, spelled = _continued(case, "fwd", 1), simulated(case, "fwd", 1, 10 * per_node)
    assert close(continued.time_s, spelled.time_s, 1e-3)


def test_a_prediction_says_what_was_folded_and_what_was_continued():
    notes = predict(scenario(strategy="usp", gpus=8 * 1024, **{"pass": "fwd"})).notes
    assert any("8 GPUs of a node do the same" in note for note in notes)
    (said,) = [note for note in notes if note.startswith("rings of 1024 places: continued")]
    assert f"{KNOWN_PLACES[1]} and {KNOWN_PLACES[2]} places" in said


def test_documents_are_simulated_step_by_step(monkeypatch):
    monkeypatch.setattr(passes, "MOST_PLACES", 16)
    draw = {"distribution": "prolong64k", "seed": 1}
    case = resolve(scenario(strategy="zigzag_ring", mask="causal_document", documents=draw))
    assert run_pass(case, "fwd").timeline is not None
    case = resolve(scenario(strategy="zigzag_ring"))
    monkeypatch.setattr(passes, "KNOWN_PLACES", (8, 16, 24))
    assert run_pass(case, "fwd").timeline is None


@pytest.mark.parametrize(
    ("strategy", "gpus", "tokens", "most_s"),
    [
        ("zigzag_ring", 4096, 8192, 2),
        ("usp", 4096, 8192, 2),
        ("usp", 16384, 8192, 5),
        ("allgather", 16384, 64, 1),
    ],
)
def test_thousands_of_gpus_take_seconds(strategy, gpus, tokens, most_s):
    case = scenario(strategy=strategy, gpus=gpus, tokens_per_gpu=tokens, **{"pass": "fwd"})
    predict(scenario(strategy=strategy, gpus=512, **{"pass": "fwd"}))  # compiles
    started = time.process_time()
    predict(case)
    assert time.process_time() - started < 2 * most_s  # bars are medians of a machine that does nothing else


MEASURED = """
import json, resource, sys
from cpsim.prediction.predict import predict_many
from cpsim.case.load import scenario_from
from cpsim.runtime.allocator import keep_freed_memory
keep_freed_memory()
peaks = []
for gpus in (16, 384):
    predict_many([scenario_from(json.loads(sys.argv[1]) | {"gpus": gpus})], jobs=1, timelines=False)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(1024 * (peaks[1] - peaks[0]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a peak has another unit, or none")
def test_ops_take_few_bytes():
    asked = json.dumps(scenario(strategy="zigzag_ring").to_dict())
    done = subprocess.run([sys.executable, "-c", MEASURED, asked], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 350 * 384 * (5 * 384 - 1)  # ops of the backward pass, the larger one


def test_a_trace_of_what_was_not_simulated_is_refused(tmp_path):
    asked = scenario(strategy="zigzag_ring", gpus=520, **{"pass": "fwd"})
    (tmp_path / "case.json").write_text(json.dumps(asked.to_dict()))
    files = [str(tmp_path / "case.json"), "--trace", str(tmp_path / "t.json")]
    command = [sys.executable, "-m", "cpsim", "predict", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "trace: expected" in done.stderr
    assert not (tmp_path / "t.json").exists()
