"""`cpsim init cluster`: answers, files of a node and logs become a file that loads and says where it is from."""

import json
from pathlib import Path
from unittest import mock

import pytest
from test_cli import cpsim, one_line
from test_nccl_logs import IBSTAT, MATRIX

from cpsim import predict
from cpsim.calibrate.describe import QUESTIONS
from cpsim.case.cluster import load_cluster
from cpsim.case.load import scenario_from
from cpsim.case.transports import constants

LOGS = Path(__file__).parent / "logs"
CASE = {"tokens_per_gpu": 4096, "heads": 8, "kv_heads": 8, "mask": "causal", "strategy": "ring"}


@pytest.fixture
def init(tmp_path):
    def to(*arguments):
        out = tmp_path / "mine.yaml"
        printed = json.loads(cpsim("init", "cluster", *arguments, "--out", out, "--json"))
        cluster = load_cluster(str(out))
        assert cluster.to_dict() == printed["cluster"]
        return cluster, out.read_text(), printed["notes"]

    return to


def test_a_gpu_and_nics_are_enough(init):
    cluster, text, _ = init("--gpu", "H100", "--nics", "4 x 200G")
    assert (cluster.gpus_per_node, cluster.gpu.name, cluster.profile) == (8, "h100", "h100")
    assert cluster.fabric.transport == "roce"
    assert "nics: 4 x 200G  # as said" in text
    assert "transport: roce  # usual" in text
    assert f"# nic_bandwidth_bytes_per_s: {25e9 * constants().transports['roce'].share:.4g}" in text
    assert cluster.name == "mine"


@pytest.mark.parametrize(
    ("gpu", "domain", "inside"),
    [
        ("GB200 NVL72", 72, "nvlink 900 GB/s"),
        ("mi300x", 8, "xgmi 448 GB/s"),
        ("L40S", 8, "pcie without p2p 16 GB/s"),
    ],
)
def test_what_is_usual_goes_by_the_gpu(init, gpu, domain, inside):
    cluster, text, _ = init("--gpu", gpu)
    assert cluster.gpus_per_node == domain
    assert f"# inside: {inside}" in text


def test_what_it_writes_predicts(init, tmp_path):
    init("--gpu", "h100", "--nics", "4 x 200G", "--transport", "EFA")
    answer = predict(scenario_from(CASE | {"gpus": 16, "cluster": str(tmp_path / "mine.yaml")}))
    assert answer.time_s > 0


@pytest.mark.parametrize("uncomment", ["latency_s", "sigma_log", "nic_bandwidth_bytes_per_s"])
def test_defaults_in_comments_are_those_that_hold(init, uncomment, tmp_path):
    cluster, text, _ = init("--gpu", "h100", "--nics", "4 x 200G")
    path = tmp_path / "own.yaml"
    path.write_text(text.replace(f"# {uncomment}", uncomment).replace("name: mine", "name: own"))
    value = getattr(load_cluster(str(path)).fabric, uncomment)
    assert value == pytest.approx(getattr(cluster.fabric, uncomment), rel=1e-3)


def test_files_of_a_node_are_read(init, tmp_path):
    (tmp_path / "topo.txt").write_text(MATRIX)
    (tmp_path / "ib.txt").write_text(IBSTAT)
    cluster, text, notes = init(tmp_path / "topo.txt", tmp_path / "ib.txt", "--gpu", "h100")
    assert (cluster.gpus_per_node, cluster.fabric.nics_per_node, cluster.fabric.transport) == (4, 2, "infiniband")
    assert cluster.inside is None  # as its profile was measured
    assert "gpus_per_node: 4  # topo.txt" in text
    assert [note.partition(": ")[2] for note in notes] == ["left out, as other ports are faster together: mlx5_3"]
    alone = init(tmp_path / "topo.txt", "--gpu", "h100")[2]
    assert "2 NICs, of unknown rate: add the output of ibstat, or --nics '2 x 400G'" in alone[0]


def test_pcie_is_not_taken_for_nvlink(init, tmp_path):
    cluster, _, notes = init(LOGS / "topo.txt", "--gpu", "a100")
    assert cluster.inside.link == "pcie"
    assert "NV12 between some pairs is left out" in notes[0]
    mine, nvlink = (
        predict(scenario_from(CASE | {"gpus": 8, "cluster": name, "kernel": "fa2"}))
        for name in (str(tmp_path / "mine.yaml"), "p4de")
    )
    assert mine.time_s > 1.5 * nvlink.time_s
    assert any("pcie of 31.5 GB/s" in note for note in mine.notes)


@pytest.mark.parametrize(("gpu", "rate", "said"), [("h100 nvl", 63e9, "h100-nvl"), ("l40s", 31.5e9, "l40s")])
def test_pcie_is_that_of_the_gpu(init, gpu, rate, said):
    cluster, _, notes = init(LOGS / "topo.txt", "--gpu", gpu)
    assert (cluster.gpu.name, cluster.inside.link, cluster.inside.port_bandwidth_bytes_per_s) == (said, "pcie", rate)
    assert f"PCIe taken to be {rate / 1e9:g} GB/s, as the data sheet of {said} says" in notes[0]


def test_logs_set_the_network(init):
    log = LOGS / "tagged-all_reduce.log"
    cluster, text, notes = init(log, "--nics", "8 x 200G", "--transport", "tcpxo", "--inside", "nvlink 450 GB/s")
    assert (cluster.gpu.name, cluster.gpus_per_node) == ("h100", 8)
    assert cluster.fabric.grade == "measured here"
    assert cluster.fabric.sigma_log < 0.1
    assert "gpu: h100  # tagged-all_reduce.log" in text
    assert [note.split(":")[0] for note in notes] == ["no sendrecv", "no all_to_all"]


def test_logs_of_several_nodes_ask_for_their_nics(init):
    cluster, _, notes = init(LOGS / "tagged-all_reduce.log")
    assert cluster.fabric is None
    assert "say --nics" in notes[0]


def test_questions_are_asked_of_people(tmp_path):
    answers = dict(zip(QUESTIONS, ("h200", "8", "measured", "8 x 400G", "infiniband"), strict=True))
    asked = []

    def answer(question, **_):
        asked.append(question)
        return next(answers[name] for name, words in QUESTIONS.items() if words == question)

    with mock.patch("sys.stdin.isatty", return_value=True), mock.patch("typer.prompt", side_effect=answer):
        cpsim("init", "cluster", "--gpus-per-node", 4, "--out", tmp_path / "x.yaml")
    assert asked == [words for name, words in QUESTIONS.items() if name != "gpus_per_node"]
    cluster = load_cluster(str(tmp_path / "x.yaml"))
    assert (cluster.gpus_per_node, cluster.fabric.transport, cluster.gpu.name) == (4, "infiniband", "h200")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ((), "which GPU? --gpu a100|a100-40gb|a100-pcie|"),
        (("--gpu", "x900"), "gpu: 'x900' is unknown"),
        (("--gpu", "h100", "--nics", "many"), "nics: expected their number and line rate"),
        (("--gpu", "h100", "--inside", "ropes"), "inside: expected a link"),
        (("--gpu", "h100", "--nics", "4 x 200G", "--transport", "pigeon"), "fabric.transport: expected infiniband"),
        ((LOGS / "all_gather_perf-lost-rank.log",), "expected rank 3 next"),
    ],
)
def test_what_cannot_be_is_one_line_and_writes_nothing(options, match, tmp_path):
    assert match in one_line(cpsim("init", "cluster", *options, "--out", tmp_path / "x.yaml", status=2))
    assert not (tmp_path / "x.yaml").exists()
