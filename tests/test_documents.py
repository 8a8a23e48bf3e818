import json
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cli import cpsim, one_line

import cpsim as package
from cpsim.case.documents import DISTRIBUTIONS, draw_documents, in_order, load_bins
from cpsim.case.load import scenario_from
from cpsim.errors import ScenarioError

TWO_NODES = {"gpus": 16, "cluster": "dgx-h100", "tokens_per_gpu": 1024, "heads": 32, "kv_heads": 8}
PACKED = TWO_NODES | {"mask": "causal_document", "documents": [2048, 6144, 1024, 7168]}


@given(st.sampled_from(DISTRIBUTIONS), st.integers(1, 300_000), st.integers(0, 2**40))
def test_lengths_sum_exactly_and_repeat_with_the_seed(distribution, num_tokens, seed):
    lengths = draw_documents(distribution, num_tokens, seed)
    assert sum(lengths) == num_tokens
    assert min(lengths) >= 1
    assert lengths == draw_documents(distribution, num_tokens, seed)


def test_a_seed_means_the_same_documents_on_every_machine():
    assert draw_documents("prolong512k", 65536, 42)[:4] == (750, 1005, 96, 729)


def test_another_seed_gives_other_lengths():
    assert draw_documents("prolong64k", 10**5, 1) != draw_documents("prolong64k", 10**5, 2)


@pytest.mark.parametrize(
    ("distribution", "mean"),
    [
        ("prolong512k", 2381.1),
        ("prolong64k", 1017.3),
        ("pile", 11218.6),
        ("distca_pretrain", 3961.79),
        ("distca_prolong", 3051.9),
    ],
)
def test_means_are_the_published_ones(distribution, mean):
    """Bin-uniform means of LongCA-bench; means of DistCA's raw lists."""
    assert load_bins(distribution).mean() == pytest.approx(mean, rel=1e-3)


@pytest.mark.parametrize("distribution", [name for name in DISTRIBUTIONS if name != "pile"])
def test_drawn_lengths_have_the_distribution_s_mean(distribution):
    """Over 100,000 and more documents; pile's last bin is too wide for that."""
    bins = load_bins(distribution)
    lengths = np.array(draw_documents(distribution, int(2e5 * bins.mean()), 7))
    error = lengths.std() / np.sqrt(len(lengths))
    assert abs(lengths.mean() - bins.mean()) < 4 * error


def test_shares_of_bins_are_the_published_ones():
    lengths = np.array(draw_documents("prolong64k", 10**8, 3))
    assert np.mean(lengths < 64) == pytest.approx(0.041225, rel=0.05)
    assert np.mean((lengths >= 928) & (lengths < 992)) == pytest.approx(0.016678, rel=0.05)


def test_magi_draws_midpoints():
    lengths = set(draw_documents("magi", 10**6, 0)[:-1])
    assert lengths <= {5, 30, 75, 150, 350, 762, 1536, 3072, 6144, 12288, 24576, 49152, 98304, 163840}


def test_bounds_are_kept():
    lengths = draw_documents("prolong512k", 10**6, 5, max_length=8192, min_length=128)
    assert max(lengths) == 8192
    assert min(lengths[:-1]) == 128
    assert sum(lengths) == 10**6


def test_more_tokens_only_append_documents():
    short, long = draw_documents("pile", 10**5, 9), draw_documents("pile", 10**8, 9)
    assert long[: len(short) - 1] == short[:-1] or len(short) == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("prolong12k", 100, 0, {}), "did you mean 'prolong512k'"),
        (("pile", 100, 0, {"min_length": 200}), "min_length = 200"),
        (("pile", 100, 0, {"max_length": 0}), "max_length = 0"),
        (("pile", 10**9, 0, {"max_length": 1}), "10000000 documents"),
    ],
)
def test_impossible_draws_are_one_line_errors(arguments, match):
    distribution, num_tokens, seed, bounds = arguments
    with pytest.raises(ScenarioError, match=match):
        draw_documents(distribution, num_tokens, seed, **bounds)


@pytest.mark.parametrize("strategy", ["dcp", "distca"])
def test_planners_that_choose_the_order_do_not_see_the_data_loaders(strategy):
    """To the last bit, intervals included."""
    found = {
        (one.time_s, one.draws_s, one.peak_memory_bytes, one.bytes_sent_per_gpu)
        for lengths in list(permutations(PACKED["documents"]))[::8]
        for one in [package.predict(PACKED | {"strategy": strategy, "documents": lengths})]
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    ("strategy", "knobs", "mask", "documents"),
    [
        ("dcp", {}, "causal_document", (7168, 1024, 6144, 2048)),
        ("distca", {}, "full_document", (1024, 2048, 6144, 7168)),
        ("dcp", {"order": "given"}, "causal_document", (2048, 6144, 1024, 7168)),
        ("distca", {"order": "alternating"}, "causal_document", (7168, 1024, 6144, 2048)),
        ("dcp", {"variant": "paper"}, "causal_document", (2048, 6144, 1024, 7168)),
        ("distca", {"variant": "released"}, "causal_document", (2048, 6144, 1024, 7168)),
        ("magi", {}, "causal_document", (2048, 6144, 1024, 7168)),
        ("dcp", {}, "shared_question", (7168, 1024, 6144, 2048)),
        ("dcp", {}, "shared_question_document", (2048, 6144, 1024, 7168)),
        ("dcp", {}, "causal", (2048, 6144, 1024, 7168)),
    ],
)
def test_documents_are_taken_in_the_order_that_a_strategy_or_its_knob_says(strategy, knobs, mask, documents):
    scenario = scenario_from(PACKED | {"strategy": strategy, "knobs": knobs, "mask": mask})
    assert package.workload_of(scenario).documents == documents


@given(st.lists(st.integers(1, 9), min_size=1).map(tuple), st.sampled_from(["alternating", "shortest_first"]))
def test_orders_keep_all_documents_and_forget_how_they_came(lengths, order):
    assert sorted(in_order(lengths, order)) == sorted(lengths)
    assert in_order(lengths, order) == in_order(lengths[::-1], order)
    assert in_order(lengths, "given") == lengths


def test_the_order_that_a_knob_says_is_what_is_predicted():
    alternating = PACKED | {"strategy": "dcp", "documents": [7168, 1024, 6144, 2048]}
    given = alternating | {"knobs": {"order": "given"}}
    assert package.predict(given).time_s == package.predict(alternating).time_s
    longest_last = given | {"documents": PACKED["documents"]}
    assert package.predict(longest_last).time_s != package.predict(given).time_s


@pytest.mark.parametrize("strategy", ["dcp", "distca"])
def test_an_unknown_order_is_one_line(tmp_path, strategy):
    (tmp_path / "case.json").write_text(json.dumps(PACKED | {"strategy": strategy, "knobs": {"order": "sideways"}}))
    said = one_line(cpsim("predict", tmp_path / "case.json", status=2))
    assert "knobs.order: expected one of given, alternating, shortest_first, got 'sideways'" in said
