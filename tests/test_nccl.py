"""The law of collectives: its algorithms, what published clusters say of it, and predictions on described clusters."""

from dataclasses import replace

import numpy as np
import pytest
from targets import check

from cpsim import predict
from cpsim.case.cluster import load_cluster
from cpsim.case.load import scenario_from
from cpsim.case.transports import FILE, Inside, constants
from cpsim.models.network.collective import COLLECTIVES, collective_seconds, wire_bytes
from cpsim.models.network.nccl import Machine, collective_params, machine_of, seconds, way
from studies.collectives.__main__ import disputes, inside
from studies.collectives.fit import fit, left_out, predicted, spread_of
from studies.collectives.rows import CLUSTERS, DISPUTED, ONE_NODE, read

GIB = 2.0**30
H100 = Inside(link="nvlink", port_bandwidth_bytes_per_s=450e9, nvls=True)
NODE = Machine(num_nodes=1, per_node=8, inside=H100)
PAIR = Machine(num_nodes=2, per_node=8, inside=H100, transport=constants().transports["roce"], node_bytes_per_s=100e9)
SIZES = np.geomspace(2**10, 16 * GIB, 60)


def bus(kind, nbytes, machine):
    return float(wire_bytes(kind, nbytes, machine.num_ranks) / seconds(kind, nbytes, machine))


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("machine", [NODE, PAIR, replace(PAIR, num_nodes=64), replace(PAIR, per_node=1)])
def test_more_bytes_never_take_less_and_a_faster_network_never_more(kind, machine):
    took = seconds(kind, SIZES, machine)
    assert (took > 0).all()
    assert (np.diff(took) >= -0.1 * took[1:]).all()  # a change of algorithm may take a little off
    assert (seconds(kind, SIZES, replace(machine, node_bytes_per_s=200e9)) <= 1.1 * took).all()


def test_one_rank_takes_nothing():
    assert seconds("all_reduce", [1e6, 1e9], replace(NODE, per_node=1)).tolist() == [0, 0]


def test_of_two_nodes_a_tree_sends_an_array_once_and_of_more_twice():
    four, size = replace(PAIR, num_nodes=4), 8 * GIB
    assert way("all_reduce", size, PAIR).node_bytes == size
    assert bus("all_reduce", size, PAIR) == pytest.approx(100e9 * 2 * 15 / 16, rel=0.02)
    assert bus("all_reduce", size, four) == pytest.approx(100e9, rel=0.05)


def test_sharp_sends_an_array_once_however_many_nodes_there_are():
    many = replace(PAIR, num_nodes=128, sharp=True)
    assert way("all_reduce", 8 * GIB, many).node_bytes == 8 * GIB
    assert bus("all_reduce", 8 * GIB, many) > 1.8 * bus("all_reduce", 8 * GIB, replace(many, sharp=False))


def test_switches_that_add_beat_rings_and_only_for_sums():
    without = replace(NODE, inside=replace(H100, nvls=False))
    assert bus("all_reduce", 8 * GIB, NODE) > 450e9 > 1.2 * bus("all_reduce", 8 * GIB, without)
    assert bus("all_gather", 8 * GIB, NODE) == bus("all_gather", 8 * GIB, without)


def test_gathers_cross_every_boundary_once_on_all_nics():
    for nodes in (2, 8, 180):
        machine = replace(PAIR, num_nodes=nodes)
        assert bus("all_gather", 64 * GIB, machine) == pytest.approx(100e9, rel=0.03)


def test_curves_of_a_node_are_the_law():
    params = collective_params(H100, 8)
    for kind in COLLECTIVES:
        for n in (2, 5, 8):
            curve = collective_seconds(params, kind, SIZES, n)
            assert curve == pytest.approx(seconds(kind, SIZES, replace(NODE, per_node=n)), rel=0.1)
    assert max(collective_params(H100, 72).curves["all_reduce"]) == 72


# --- published clusters ---


@pytest.fixture(scope="module")
def rows():
    return read()[0]


def test_rows_are_published_ones_and_what_is_left_out_says_why(rows):
    left = read()[1]
    assert len(rows) + sum(left.values()) == 264 + 39
    assert {row.cluster for row in rows} == set(CLUSTERS)
    assert sum(left.values()) == 80 + 20 + 3


def test_the_log_called_two_nodes_is_of_eight_gpus(rows):
    mine = [row for row in rows if row.cluster == ONE_NODE and row.nbytes > GIB]
    assert all(row.machine.num_ranks == 8 for row in mine)
    assert mine[0].nbytes == 2 * GIB
    published = 444.02e9  # bus bandwidth of 2 GiB, in place 8,474 us
    assert published * 8463.7e-6 / mine[0].nbytes == pytest.approx(2 * 7 / 8, rel=1e-3)


def test_shipped_constants_are_what_the_rows_say(rows):
    found, shipped = fit(rows).constants(), constants()
    for name in ("call_s", "chain_hop_s", "nvls_share", "fill_bytes"):
        assert getattr(found, name) == pytest.approx(getattr(shipped, name), rel=0.01), FILE
    for name, transport in shipped.transports.items():
        assert found.transports[name].share == pytest.approx(transport.share, rel=0.01)
        assert found.transports[name].call_s == pytest.approx(transport.call_s, rel=0.02)


@pytest.fixture(scope="module")
def errors(rows):
    return left_out(rows)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_clusters_that_were_left_out(rows, errors, kind):
    mine = np.array([row.file == "nccl_multinode.csv" and row.kind == kind for row in rows])
    off = np.expm1(errors[mine])
    check(f"clusters left out, {kind.replace('_', '-')}, mean", np.abs(off).mean())
    assert abs(off.mean()) <= 0.04
    assert inside(rows, errors)[mine].mean() >= 0.85


@pytest.mark.slow
def test_clusters_of_all_logs_that_were_left_out(rows, errors):
    assert 0.85 <= inside(rows, errors).mean() <= 0.95
    assert constants().transports["efa"].sigma_log == pytest.approx(spread_of(errors), rel=0.02)
    check("clusters left out, more logs, mean", np.abs(np.expm1(errors)).mean())
    for kind in ("all_reduce", "all_gather"):
        mine = np.array([row.kind == kind and row.cluster not in DISPUTED for row in rows])
        check(f"clusters left out, undisputed, {kind.replace('_', '-')}, mean", np.abs(np.expm1(errors[mine])).mean())
    assert [line.partition(" takes ")[0] for line in disputes(rows)] == list(DISPUTED)


def test_a_cluster_that_was_left_out(rows):
    mine, others = ([row for row in rows if (row.cluster == "OCI MI300X") == here] for here in (True, False))
    off = predicted(mine, fit(others)) / [row.seconds for row in mine] - 1
    assert np.abs(off).mean() < 0.05


def test_a_folded_cluster_has_the_same_machine():
    whole = load_cluster("p5").with_gpus(64)
    folded = whole.folded(8)
    assert machine_of(folded, 64, 8, 355e9) == machine_of(whole, 64, 8, 355e9)
    assert machine_of(whole, 64, 8, 355e9).inside.nvls


# --- predictions ---

CASE = {"tokens_per_gpu": 8192, "heads": 32, "kv_heads": 8, "mask": "causal", "strategy": "allgather"}


def written(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text("gpus_per_node: 8\ngpu: h200\nprofile: h200\n" + text)
    return str(path)


def test_slower_networks_and_links_make_slower_predictions(tmp_path):
    def time(text, gpus):
        return predict(scenario_from(CASE | {"gpus": gpus, "cluster": written(tmp_path, text)})).time_s

    assert time("nics: 1 x 100G", 32) > 1.5 * time("nics: 8 x 400G", 32)
    assert time("inside: pcie 32 GB/s", 8) > 1.5 * time("inside: nvlink 450 GB/s nvls", 8)
    assert time("inside: nvlink 355 GB/s", 8) == pytest.approx(time("", 8), rel=0.1)


def test_a_rack_of_72_is_one_node():
    cluster = load_cluster("gb200-nvl72")
    answer = predict(
        scenario_from(
            CASE | {"gpus": 72, "strategy": "ring", "cluster": "gb200-nvl72", "kernel": "cudnn", "mask": "full"}
        )
    )
    assert cluster.num_nodes == 1
    assert answer.time_s > 0
