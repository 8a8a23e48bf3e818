"""The network between nodes: fitted from measurements, with the model that prices ops; the preset follows its file."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scripts import load_script

from cpsim.calibrate.fabric import Network, fit_fabric, seconds
from cpsim.calibrate.measurement import Measurements, load
from cpsim.calibrate.recipes import DATA, manifest, runs_file
from cpsim.case.cluster import Fabric, presets
from cpsim.errors import ProfileError
from cpsim.masks.slices import RangeSets, slices_of
from cpsim.masks.tiles import ListedTiles
from cpsim.models.conditions import Conditions
from cpsim.models.price import price
from cpsim.models.profile import load_profile
from cpsim.schedule.builder import Builder
from cpsim.schedule.schedule import Kind
from cpsim.sim.fast import simulate

HEADER = {"gpu": "NVIDIA H200", "num_gpus": 4, "torch": "x", "date": "2026-11-21", "commit": "c", "command": "m"}
NINETY = 1.645
"""Standard deviations of a 90 % interval, on either side."""
FLOWS = {
    "one_flow": [[0, 2]],
    "both_directions": [[0, 2], [2, 0]],
    "all_flows": [[0, 2], [1, 3]],
    "ring": [[0, 1], [1, 2], [2, 3], [3, 0]],
}
GROUPS = ((4, 1), (2, 1), (2, 2))


def made(latency_s, flow, nic, num_nics, noise=0.0, proxy=np.inf):
    """Measurements that follow the model."""
    rng = np.random.default_rng(0)
    shared = {"op": "fabric", "num_nodes": 2, "gpus_per_node": 2}
    points = []
    for nbytes in np.geomspace(2**14, 2**28, 9).round().tolist():
        points += [shared | {"kind": kind, "flows": pairs, "nbytes": nbytes} for kind, pairs in FLOWS.items()]
        for kind in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce"):
            points += [
                shared | {"kind": kind, "num_ranks": ranks, "num_groups": groups, "nbytes": nbytes}
                for ranks, groups in GROUPS
            ]
    for point in points:
        exact = seconds(point, Network(latency_s, flow, nic, proxy), num_nics)
        point["samples_s"] = (exact * np.exp(noise * rng.standard_normal(9))).tolist()
    return Measurements(source="made.jsonl", header=HEADER, points=tuple(points))


@pytest.mark.parametrize("num_nics", [1, 2])
def test_fit_finds_the_network_that_made_the_measurements(num_nics):
    fabric = fit_fabric([made(8e-5, 2.5e9, 4e9, num_nics, noise=0.02)])
    assert fabric.latency_s == pytest.approx(8e-5, rel=0.03)
    assert fabric.flow_bandwidth_bytes_per_s == pytest.approx(2.5e9, rel=0.03)
    assert fabric.uplink_bandwidth_bytes_per_s == pytest.approx(num_nics * 4e9, rel=0.03)
    assert fabric.sigma_log < 0.03
    assert fabric.grade == "measured here"
    assert "made.jsonl" in fabric.source


@pytest.mark.parametrize("sockets", [False, True])
def test_a_flow_that_only_what_flows_share_holds_up_is_as_fast_as_that(sockets):
    proxy = {"proxy": 5e9} if sockets else {}
    fabric = fit_fabric([made(8e-5, 1e12, 4e9, 1, noise=0.02, **proxy)], sockets=sockets)
    shared = fabric.proxy_bandwidth_bytes_per_s if sockets else fabric.nic_bandwidth_bytes_per_s
    assert fabric.flow_bandwidth_bytes_per_s == shared == pytest.approx(5e9 if sockets else 4e9, rel=0.05)


def test_flows_that_never_leave_their_node_say_nothing_of_the_network_between_nodes():
    between = made(8e-5, 2.5e9, 4e9, 2, noise=0.02)
    shared = {"op": "fabric", "kind": "inside", "num_nodes": 2, "gpus_per_node": 2}
    inside = {"flows": [[0, 1], [1, 0], [2, 3], [3, 2]], "nbytes": 2**20, "samples_s": [1e-5] * 9}
    assert fit_fabric([replace(between, points=(shared | inside, *between.points))]) == fit_fabric([between])


def test_fit_finds_the_threads_that_copy_messages_over_sockets():
    fabric = fit_fabric([made(8e-5, 2.5e9, 4e9, 1, noise=0.02, proxy=3e9)], sockets=True)
    assert fabric.flow_bandwidth_bytes_per_s == pytest.approx(2.5e9, rel=0.03)
    assert fabric.uplink_bandwidth_bytes_per_s == pytest.approx(4e9, rel=0.03)
    assert fabric.proxy_bandwidth_bytes_per_s == pytest.approx(3e9, rel=0.03)
    assert fit_fabric([made(8e-5, 2.5e9, 4e9, 1)]).proxy_bandwidth_bytes_per_s is None


OPS = {
    "one_flow": (Kind.TRANSFER, [[0], [2]]),
    "both_directions": (Kind.TRANSFER, [[0, 2], [2, 0]]),
    "all_flows": (Kind.TRANSFER, [[0, 1], [2, 3]]),
    "all_gather": (Kind.ALL_GATHER, [[[0, 1, 2, 3]]]),
    "all_to_all": (Kind.ALL_TO_ALL, [[[0, 1, 2, 3]]]),
    "all_reduce": (Kind.ALL_REDUCE, [[[0, 1, 2, 3]]]),
    "columns": (Kind.REDUCE_SCATTER, [[[0, 2], [1, 3]]]),
}


@pytest.mark.parametrize("proxy", [None, 3e9])
@pytest.mark.parametrize("num_nics", [1, 2])
@pytest.mark.parametrize("name", OPS)
def test_the_model_of_the_fit_is_the_one_that_prices_ops(name, num_nics, proxy):
    rates = {"latency_s": 8e-5, "flow_bandwidth_bytes_per_s": 2.5e9, "nic_bandwidth_bytes_per_s": 4e9}
    preset = presets()["h200-2x2-sockets"]
    fabric = replace(preset.fabric, nics_per_node=num_nics, proxy_bandwidth_bytes_per_s=proxy, **rates)
    cluster = replace(preset, fabric=fabric).with_gpus(4)
    kind, lanes = OPS[name]
    streams = ("send", "recv") if kind == Kind.TRANSFER else ("comm",)
    sets = RangeSets(np.zeros(1, np.int64), np.zeros((0, 2), np.int64))
    no_pairs = np.zeros(1, np.int64)
    tiles = ListedTiles(
        np.zeros(2, np.int64), np.zeros((0, 5), np.int32), np.zeros(0, np.int64), no_pairs, slices_of([])
    )
    builder = Builder(4, sets, tiles)
    builder.add(kind, *zip(map(np.array, lanes), streams, strict=True), nbytes=2**28)
    schedule = builder.build()
    shape = {"kernel": "fa4", "head_dim": 128, "dtype": "bf16", "ahead_s": np.inf}
    pricing = Conditions(cluster=cluster, profile=load_profile("h200"), **shape)
    shared = {"num_nodes": 2, "gpus_per_node": 2, "nbytes": 2**28, "kind": name}
    if kind == Kind.TRANSFER:
        point = shared | {"flows": FLOWS[name]}
    else:
        ranks = np.array(lanes[0])
        point = shared | {"kind": kind.name.lower(), "num_ranks": ranks.shape[1], "num_groups": len(ranks)}
    want = seconds(point, Network(*rates.values(), proxy or np.inf), num_nics)
    assert simulate(schedule, price(schedule, pricing).work).makespan_s == pytest.approx(want, rel=0.01)


def test_too_few_points_are_one_line():
    empty = Measurements(source="x.jsonl", header=HEADER, points=())
    with pytest.raises(ProfileError, match=r"x.jsonl: expected at least 10 flows"):
        fit_fabric([empty])


def docs():
    return load_script("docs/fabric.py")


def test_the_preset_is_what_the_committed_measurement_says():
    module = docs()
    text = module.CLUSTERS.read_text()
    assert module.with_fabric(text) == text, "run python docs/fabric.py"


def test_networks_of_machines_are_what_their_measurements_say():
    module = docs()
    for name in module.MACHINES:
        assert module.of_machine(name) == runs_file(f"{name}.json").read_text(), "run python docs/fabric.py"


def test_the_interval_of_the_preset_spans_the_machines_behind_it():
    preset, files = presets()["h200-2x2-sockets"].fabric, docs().MEASURED
    machines = {manifest()["points"][str(file.relative_to(DATA))]["machine"] for file in files}
    assert len(machines) == 4
    for name in (name for name in docs().MACHINES if name.startswith("h200")):
        own = Fabric(**json.loads(runs_file(f"{name}.json").read_text())["fabric"])
        together = math.log(own.uplink_bandwidth_bytes_per_s / preset.uplink_bandwidth_bytes_per_s)
        alone = math.log(own.flow_bandwidth_bytes_per_s / preset.flow_bandwidth_bytes_per_s)
        assert abs(together) < NINETY * preset.sigma_log
        assert abs(alone) < NINETY * preset.flow_sigma_log


def test_the_preset_is_replaced_and_nothing_else(tmp_path, monkeypatch):
    module = docs()
    measured = made(8e-5, 2.5e9, 4e9, 1, proxy=3e9)
    file = tmp_path / "made.jsonl"
    lines = [{"schema": 1, "format": "cpsim-measurement", **HEADER}, *measured.points]
    file.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(module, "MEASURED", [file])
    before = json.loads(module.CLUSTERS.read_text())
    after = json.loads(module.with_fabric(module.CLUSTERS.read_text()))
    changed = [a for a, b in zip(after["clusters"], before["clusters"], strict=True) if a != b]
    assert [cluster["name"] for cluster in changed] == [module.PRESET]
    assert changed[0]["fabric"]["latency_s"] == 8e-5
    assert load(file).points == measured.points
