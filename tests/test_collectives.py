"""`cpsim collectives`: what nccl-tests would print, and logs beside it."""

import json
from pathlib import Path

import pytest
from test_cli import cpsim, one_line

from cpsim.case.cluster import load_cluster
from cpsim.errors import ScenarioError
from cpsim.models.network.collective import collective_seconds
from cpsim.models.profile import load_profile
from cpsim.prediction.collectives import TESTS, collectives, kind_named

LOGS = Path(__file__).parent / "logs"


def test_a_node_is_what_its_profile_measured():
    answer = collectives(load_cluster("h200-4"), ["all_gather"], [2**28])
    want = float(collective_seconds(load_profile("h200").collective, "all_gather", 2**28, 4))
    (size,) = answer.sizes
    assert size.time_s == pytest.approx(want)
    assert size.low_s < want < size.high_s
    assert size.bus_bytes_per_s == pytest.approx(0.75 * size.algorithm_bytes_per_s)


@pytest.mark.parametrize(("nbytes", "published_s"), [(2**26, 338.92e-6), (2**28, 1077.07e-6), (2**30, 4053.34e-6)])
def test_eight_gpus_of_a_node_add_in_its_switches_though_four_were_measured(nbytes, published_s):
    """Published: H200, NVLS (`studies/collectives/nccl_multinode.csv`)."""
    (size,) = collectives(load_cluster("dgx-h200").with_gpus(8), ["all_reduce"], [nbytes]).sizes
    assert size.time_s == pytest.approx(published_s, rel=0.06)
    assert any(
        "among 8 GPUs of a node, measured up to 4" in note
        for note in collectives(load_cluster("dgx-h200").with_gpus(8), ["all_reduce"], [nbytes]).notes
    )


@pytest.mark.parametrize("kind", TESTS)
@pytest.mark.parametrize(("cluster", "gpus"), [("p5", 64), ("dgx-h100", 16), ("gb200-nvl72", 72), ("p5", 1440)])
def test_every_test_has_an_answer(kind, cluster, gpus):
    answer = collectives(load_cluster(cluster).with_gpus(gpus), [kind], [2**20, 2**30])
    small, large = answer.sizes
    assert 0 < small.time_s < large.time_s < 1
    assert answer.notes


def test_names_are_those_of_nccl_tests_too():
    assert kind_named("alltoall_perf") == "all_to_all"
    assert kind_named("All-Reduce") == "all_reduce"
    with pytest.raises(ScenarioError, match="did you mean 'all_gather'"):
        kind_named("allgather")


def test_a_log_stands_beside():
    answer = json.loads(
        cpsim("collectives", "--cluster", "a3-mega", "--against", LOGS / "a3mega-all_reduce.log", "--json")
    )
    (compared,) = answer["compared"]
    assert (compared["kind"], compared["gpus"], compared["sizes"]) == ("all_reduce", 16, 18)
    large = [size for size in answer["sizes"] if size["bytes"] >= 2**28]
    assert all(abs(size["time_s"] / size["measured_s"] - 1) < 0.15 and size["inside"] for size in large)


def test_the_table_is_like_that_of_nccl_tests():
    text = cpsim("collectives", "--cluster", "p5", "--gpus", 16, "--kind", "all_gather", "--to", "2M")
    assert "all_gather, 16 GPUs of p5" in text
    assert "busbw (GB/s)" in text
    assert "2,097,152" in text
    assert "error" in cpsim("collectives", "--cluster", "dgx-h100", "--against", LOGS / "alltoall-4xh100.log")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (("--cluster", "p5", "--gpus", 12), "use 8 or 16"),
        (("--cluster", "p5", "--kind", "broadcast"), "kind: expected all_gather"),
        (("--cluster", "p5", "--from", "8x"), "expected a size of 1 to 1024G"),
        (("--cluster", "p5", "--from", "8G", "--to", "1G"), "expected at most --to"),
        (
            ("--cluster", "h200-4", "--against", LOGS / "a3mega-all_reduce.log"),
            "the log has 16 GPUs on 2 nodes, h200-4 4",
        ),
        (
            ("--cluster", "p5", "--gpus", 16, "--against", LOGS / "alltoall-4xh100.log"),
            "the log says which and how many",
        ),
    ],
)
def test_what_cannot_be_answered_is_one_line(options, match):
    assert match in one_line(cpsim("collectives", *options, status=2))
