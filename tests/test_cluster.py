import json
from dataclasses import replace

import numpy as np
import pytest
import yaml

from cpsim.case.cluster import Cluster, cluster_from, load_cluster, presets
from cpsim.case.transports import Inside, constants
from cpsim.errors import ScenarioError

NAMES = [
    "h200-4",
    "h200-2x2-sockets",
    "dgx-h100",
    "magi-h100",
    "dgx-h200",
    "dgx-b200",
    "p4de",
    "p5",
    "a3-mega",
    "gb200-nvl72",
]


def test_presets_are_the_documented_ones():
    assert list(presets()) == NAMES
    profiles = {name: cluster.profile for name, cluster in presets().items()}
    assert profiles == {
        "h200-4": "h200",
        "h200-2x2-sockets": "h200",
        "dgx-h100": "h100",
        "magi-h100": "h100-fa3",
        "dgx-h200": "h200",
        "dgx-b200": "b200",
        "p4de": "a100",
        "p5": "h100",
        "a3-mega": "h100",
        "gb200-nvl72": None,
    }


@pytest.mark.parametrize("name", NAMES[1:-1])
def test_every_network_number_states_its_source(name):
    fabric = presets()[name].fabric
    assert fabric is not None
    assert fabric.grade in ("measured here", "published", "data sheet")
    assert len(fabric.source) > 40
    assert fabric.flow_bandwidth_bytes_per_s <= fabric.nic_bandwidth_bytes_per_s


def test_ranks_fill_one_node_after_another():
    cluster = load_cluster("dgx-h200").with_gpus(24)
    assert cluster.num_nodes == 3
    assert [cluster.node_of(rank) for rank in (0, 7, 8, 23)] == [0, 0, 1, 2]
    assert cluster.node_of(np.array([0, 7, 8, 23])).tolist() == [0, 0, 1, 2]


def test_a_part_of_one_node_is_allowed():
    assert load_cluster("dgx-h200").with_gpus(3).num_nodes == 1


def test_nodes_are_filled_or_the_error_says_which_numbers_fit():
    with pytest.raises(ScenarioError, match="got 20; use 16 or 24"):
        load_cluster("dgx-h200").with_gpus(20)
    with pytest.raises(ScenarioError, match="one machine of 4 GPUs"):
        load_cluster("h200-4").with_gpus(8)


def test_oversubscription_narrows_the_uplink():
    fabric = presets()["dgx-h200"].fabric
    assert fabric.uplink_bandwidth_bytes_per_s == 8 * 39.7e9
    assert replace(fabric, oversubscription=2.0).uplink_bandwidth_bytes_per_s == 4 * 39.7e9


@pytest.mark.parametrize("name", NAMES)
def test_clusters_round_trip_through_files(name, tmp_path):
    cluster = presets()[name]
    for suffix, dump in ((".json", json.dumps), (".yaml", yaml.safe_dump)):
        path = tmp_path / f"mine{suffix}"
        path.write_text(dump(cluster.to_dict()))
        assert load_cluster(str(path)) == cluster


def written(tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return str(path)


def test_a_short_file_names_a_known_gpu_and_writes_numbers_like_people(tmp_path):
    text = """
    name: mine
    gpus_per_node: 8
    gpu: h200
    profile: h200
    fabric: {nics_per_node: 8, nic_bandwidth_bytes_per_s: 45e9, flow_bandwidth_bytes_per_s: 2.2e10,
             latency_s: 1e-5, sigma_log: 0.05, flow_sigma_log: 0.05, grade: measured here,
             source: nccl-tests of last Monday}
    """
    cluster = load_cluster(written(tmp_path, text))
    assert isinstance(cluster, Cluster)
    assert cluster.gpu == presets()["h200-4"].gpu
    assert cluster.fabric.nic_bandwidth_bytes_per_s == 45e9
    assert cluster.num_gpus == 8


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("name: x\ngpus_per_node: 8\ngpu: h2000", "gpu: 'h2000' is unknown; did you mean 'h200'"),
        ("name: x\ngpus_per_node: 8\ngpu: h200\nfabrik: 3", "fabrik: unknown field; did you mean 'fabric'"),
        ("name: x\ngpu: h200", "gpus_per_node: missing"),
        (
            "name: x\ngpus_per_node: -8\ngpu: h200",
            "gpus_per_node: expected greater than or equal to 1, got -8",
        ),
        ("name: x\ngpus_per_node: true\ngpu: h200", "expected a whole number, got True"),
        ("name: x\ngpus_per_node: 8\ngpu: h200\nfabric: {nics_per_node: 8}", "fabric.nic_bandwidth"),
        ("gpus_per_node: 8\ngpu: h200\nnics: four", r"nics: expected their number and line rate, e.g. 4 x 200G"),
        ("gpus_per_node: 8\ngpu: h200\ninside: nvlinks", "inside: expected a link and a port's rate in one direction"),
        (
            "gpus_per_node: 8\ngpu: h200\nnics: 4 x 2G\ntransport: roze",
            "fabric.transport: .*got 'roze'; did you mean 'roce'",
        ),
        (
            "gpus_per_node: 0\ngpu: h200\nfabrik: 3\nfabric: {nics: 4 x 200G, latency_s: -1}",
            "gpus_per_node: .*fabric.latency_s: .*fabrik: unknown field|fabrik.*gpus_per_node|latency_s.*fabrik",
        ),
        ("name: x\ngpus_per_node: 8\ngpu: h200\nschema: 7", "schema: expected 1, got 7"),
        ("- 1\n- 2", "expected one cluster"),
        ("just text", "expected the fields of a cluster"),
        ("name: [", "not valid YAML"),
    ],
)
def test_bad_cluster_files_are_one_line_errors(text, match, tmp_path):
    with pytest.raises(ScenarioError, match=match) as caught:
        load_cluster(written(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_number_and_rate_of_nics_are_enough(tmp_path):
    fabric = load_cluster(written(tmp_path, "gpus_per_node: 8\ngpu: H100\nprofile: h100\nnics: 4 x 200G")).fabric
    assert fabric.nics_per_node == 4
    assert 0.8 * 25e9 < fabric.nic_bandwidth_bytes_per_s < 25e9
    assert fabric.transport == "roce"
    for words in ("transport roce, as none is said", "of its line rate of 200 Gb/s", "sigma_log", "grade data sheet"):
        assert words in fabric.source


@pytest.mark.parametrize(
    ("nics", "count", "line"),
    [("8x400G", 8, 50e9), ("8 x 50 GB/s", 8, 50e9), ("4 x 100 Gbps", 4, 12.5e9), ("1 X 25 Gbit/s", 1, 3.125e9)],
)
def test_line_rates_are_written_in_many_ways(nics, count, line, tmp_path):
    text = f"gpus_per_node: 8\ngpu: h100\nfabric: {{nics: {nics}, transport: EFA}}"
    fabric = load_cluster(written(tmp_path, text)).fabric
    assert fabric.nics_per_node == count
    assert fabric.nic_bandwidth_bytes_per_s == pytest.approx(line * constants().transports["efa"].share)


def test_nics_of_one_gpu_are_one(tmp_path):
    fabric = load_cluster(written(tmp_path, "gpus_per_node: 8\ngpu: h100\nnics: 32 x 100G\ntransport: efa")).fabric
    assert fabric.nics_per_node == 8
    assert fabric.nic_bandwidth_bytes_per_s == pytest.approx(50e9 * constants().transports["efa"].share)
    assert "4 NICs of a GPU as one" in fabric.source
    assert load_cluster(written(tmp_path, "gpus_per_node: 8\ngpu: h100\nnics: 12 x 100G")).fabric.nics_per_node == 12


def test_what_a_file_states_is_not_replaced_by_defaults(tmp_path):
    text = "gpus_per_node: 8\ngpu: h100\nfabric: {nics: 4 x 200G, nic_bandwidth_bytes_per_s: 21e9, sigma_log: 0.4}"
    fabric = load_cluster(written(tmp_path, text)).fabric
    assert (fabric.nic_bandwidth_bytes_per_s, fabric.sigma_log) == (21e9, 0.4)
    assert "line rate" not in fabric.source


def test_links_inside_a_node_are_stated_in_a_line_or_by_fields(tmp_path):
    short = load_cluster(written(tmp_path, "gpus_per_node: 8\ngpu: h100\ninside: NVLink 450 GB/s nvls")).inside
    fields = "inside: {link: nvlink, port_bandwidth_bytes_per_s: 450e9, nvls: true}"
    assert short == load_cluster(written(tmp_path, f"gpus_per_node: 8\ngpu: h100\n{fields}")).inside
    assert short == Inside(link="nvlink", port_bandwidth_bytes_per_s=450e9, nvls=True)


def test_all_problems_are_listed_at_once(tmp_path):
    text = (
        "gpus_per_node: 0\ngpu: x900\ninside: ropes\nfabric: {nics: many, transport: pigeon, latency_s: -1}\nfabrik: 1"
    )
    with pytest.raises(ScenarioError) as caught:
        load_cluster(written(tmp_path, text))
    for words in (
        "gpus_per_node",
        "gpu: 'x900'",
        "inside: expected",
        "nics: expected",
        "transport",
        "latency_s",
        "fabrik",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"gpu": {}, "fabric": {"nic": 2, "x": 3}, "inside": {}, "name": 1},
        {"gpu": "x900", "gpus_per_node": 0, "inside": "ropes", "notes": 1, "name": 2, "profile": 3, "faults": 4},
        {"gpu": {"name": "none"}, "faults": [{"part": "door", "number": -1, "rate": 2}] * 3, "host": "", "fabrik": {}},
    ],
)
def test_a_message_about_many_problems_is_short_and_names_every_field(fields):
    with pytest.raises(ScenarioError) as caught:
        cluster_from(fields)
    assert len(str(caught.value)) <= 350
    assert not {name for name in fields if name not in str(caught.value)}


def test_of_hundreds_of_problems_the_first_are_named():
    with pytest.raises(ScenarioError, match=r"x0, x1, .*\.\.\.$") as caught:
        cluster_from({f"x{i}": i for i in range(300)})
    assert len(str(caught.value)) <= 350


def test_unknown_cluster_names_the_nearest():
    with pytest.raises(ScenarioError, match="did you mean 'dgx-h200'"):
        load_cluster("dgxh200")
