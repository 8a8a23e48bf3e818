"""Logs of nccl-tests of many years and launchers, `nvidia-smi topo -m` and `ibstat`: read right, or refused with a line
that says what to do."""

import json
from pathlib import Path

import pytest
from test_cli import cpsim, one_line
from test_imports import log

from cpsim.calibrate.nccl_logs import Said, read_nccl_log
from cpsim.calibrate.topology import Nics, Topology, describes_a_node, read_node
from cpsim.errors import ProfileError

LOGS = Path(__file__).parent / "logs"


def shapes(points):
    return {(p["op"], p["kind"], p["num_ranks"], p.get("num_nodes", 1)) for p in points}


@pytest.mark.parametrize(
    ("name", "gpu", "shape", "count", "last_s"),
    [
        ("a3mega-all_reduce", "NVIDIA H100 80GB HBM3", ("fabric", "all_reduce", 16, 2), 18, 47743e-6),
        ("prefix0-all_reduce", "NVIDIA H100 80GB HBM3", ("fabric", "all_reduce", 16, 2), 18, 47743e-6),
        ("tagged-all_reduce", "NVIDIA H100 80GB HBM3", ("fabric", "all_reduce", 16, 2), 18, 47743e-6),
        ("alltoall-4xh100", "NVIDIA H100 80GB HBM3", ("collective", "all_to_all", 4, 1), 1, 1174.14e-6),
        ("h20-alltoall", "NVIDIA H20-3e", ("collective", "all_to_all", 8, 1), 3, 59.35e-6),
        ("old-format-a100-all_reduce", "NVIDIA A100-SXM-80GB", ("collective", "all_reduce", 8, 1), 2, 2208.8e-6),
    ],
)
def test_logs_of_all_years_and_launchers(name, gpu, shape, count, last_s):
    found = read_nccl_log(LOGS / f"{name}.log")
    assert found.header["gpu"] == gpu
    assert shapes(found.points) == {shape}
    assert len(found.points) == count
    assert found.points[-1]["samples_s"] == [pytest.approx(last_s)]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("all_gather_perf-inf", r"line 16: expected 1e-09 to 10000 seconds, got inf"),
        ("all_gather_perf-lost-rank", r"line 7: expected rank 3 next, got rank 4; give the whole log"),
        (
            "no-ranks-sendrecv",
            r"of 8 GPUs by its command; give .*, or say what it lacks: --gpu h100 --ranks 8 --nodes 1",
        ),
        ("nvl72-all_reduce", r"calls the GPU 'NVIDIA Graphics Device'; say which it is: --gpu gb200"),
    ],
)
def test_what_a_log_cannot_tell_is_asked_for(name, match):
    with pytest.raises(ProfileError, match=match) as caught:
        read_nccl_log(LOGS / f"{name}.log")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "before",
    [
        "2025-05-22T07:36:17.123456789Z {}",  # kubectl logs --timestamps
        "[2025-05-22 07:36:17] {}",
        ">        [1,0]<stdout>:{}",  # quoted in a letter
        "gpu-node-1: {}",  # pdsh
        "[pod/nccl-launcher-x7k/nccl] {}",
        "\x1b[32m{}\x1b[0m",
    ],
)
def test_what_tools_put_before_lines_is_no_part_of_them(before, write):
    text = "mpirun -np 16 ./all_gather_perf -b 1M -e 1G\n" + log("all_gather", ["a", "b"], 1e-5, 3e11)
    plain, other = (
        read_nccl_log(write(f"{i}.log", text))
        for i, text in enumerate([text, "\n".join(before.format(line) for line in text.split("\n"))])
    )
    assert other.points == plain.points
    assert shapes(plain.points) == {("fabric", "all_gather", 16, 2)}


def test_words_with_a_colon_are_no_tags_unless_a_test_prints_behind_them(write):
    text = "Running: ./alltoall_perf -b 1M\nsrun: job 12 queued\nnote: # Rank lists follow\n"
    found = read_nccl_log(write("x.log", text + log("alltoall", ["a"], 1e-5, 3e11, named=False)))
    assert shapes(found.points) == {("collective", "all_to_all", 8, 1)}


def test_marks_of_comments_and_names_of_hosts_may_be_lost(write):
    text = "all_reduce_perf -b 1M\n" + log("all_reduce", ["a"], 1e-5, 3e11)
    plain = read_nccl_log(write("x.log", text)).points
    assert read_nccl_log(write("y.log", text.replace("#", " "))).points == plain
    assert text.count(" on          a device") == 8
    assert read_nccl_log(write("z.log", text.replace(" on          a device", " on        device"))).points == plain


def test_what_people_say_completes_a_log():
    found = read_nccl_log(LOGS / "no-ranks-sendrecv.log", Said(gpu="h100"))
    assert shapes(found.points) == {("transfer", "ring", 8, 1)}
    assert len(found.points) == 4
    two = read_nccl_log(LOGS / "no-ranks-sendrecv.log", Said(gpu="h100", ranks=16, nodes=2))
    assert shapes({**p, "kind": "ring", "num_ranks": 16} for p in two.points) == {("fabric", "ring", 16, 2)}


def test_hosts_of_one_nvlink_domain_are_one_node():
    found = read_nccl_log(LOGS / "nvl72-all_reduce.log", Said(gpu="gb200"))
    assert shapes(found.points) == {("collective", "all_reduce", 72, 1)}
    assert "taken as one NVLink domain of 72; say --domain 4 where they are nodes" in found.notes[0]
    apart = read_nccl_log(LOGS / "nvl72-all_reduce.log", Said(gpu="gb200", domain=4))
    assert shapes(apart.points) == {("fabric", "all_reduce", 72, 18)}


ONE = log("all_reduce", ["a"], 1e-5, 3e11)
TWO = log("all_reduce", ["b"], 1e-5, 2.9e11)


def test_jobs_one_after_another_are_told_apart(write):
    found = read_nccl_log(write("x.log", ONE + TWO + log("all_gather", ["a", "b"], 5e-5, 2e11)))
    assert [p["num_ranks"] for p in found.points] == [8] * 42 + [16] * 21
    assert shapes(found.points) == {("collective", "all_reduce", 8, 1), ("fabric", "all_gather", 16, 2)}


def test_jobs_side_by_side_are_told_apart_by_their_tags(write):
    lines = [
        f"[1,{i}]<stdout>:{line}"
        for pair in zip(ONE.splitlines(), TWO.splitlines(), strict=True)
        for i, line in enumerate(pair)
    ]
    found = read_nccl_log(write("x.log", "\n".join(lines)))
    assert shapes(found.points) == {("collective", "all_reduce", 8, 1)}
    assert len(found.points) == 42


def test_jobs_side_by_side_without_tags_are_refused_and_not_made_one(write):
    pairs = zip(ONE.splitlines(), TWO.splitlines(), strict=True)
    mixed = "\n".join(line for pair in pairs for line in pair)
    with pytest.raises(
        ProfileError, match=r"line \d+: rank 0 stands twice, on a and b: several jobs in one list.*MPI=1"
    ):
        read_nccl_log(write("x.log", mixed))


def test_tests_without_a_model_are_left_out_by_name(write):
    broadcast = log("all_reduce", ["a"], 1e-5, 3e11).replace("all_reduce_perf", "broadcast_perf")
    found = read_nccl_log(write("x.log", broadcast + ONE))
    assert shapes(found.points) == {("collective", "all_reduce", 8, 1)}
    assert found.notes == ["broadcast_perf is left out: it has no model"]
    with pytest.raises(ProfileError, match="broadcast_perf has no model; those that have are all_gather_perf"):
        read_nccl_log(write("x.log", broadcast))


@pytest.mark.parametrize("tag", ["[default0]:", "3: ", "nccl-0 | ", "[1,12]<stdout>: "])
def test_tags_of_launchers_are_read_over(tag, write):
    text = "\n".join(tag + line for line in ONE.splitlines())
    assert read_nccl_log(write("x.log", text)).points == read_nccl_log(write("y.log", ONE)).points


def test_milliseconds_of_2019_and_blank_operations(write):
    ranks = "".join(f"# Rank {i} Pid 9 on a device {i} [0x0{i}] Tesla V100-SXM2-16GB\n" for i in range(2))
    head = "# bytes N type op time algbw busbw res time algbw busbw res\n"
    rows = "1048576 131072 float 2.059 0.51 0.25 0e+00 3.314 0.32 0.16 N/A\n"
    found = read_nccl_log(write("all_gather.log", ranks + head + rows))
    assert found.points == [
        {"op": "collective", "kind": "all_gather", "num_ranks": 2, "nbytes": 1048576, "samples_s": [2.059e-3]}
    ]


def test_columns_between_and_behind_the_usual_ones_are_read_over(write):
    head = (
        "# size count type redop root time algbw busbw #wrong i_min i_max time algbw busbw #wrong i_min i_max timestamp"
    )
    lines = [line for line in ONE.splitlines() if not line[:1].isspace()]
    row = "1073741824 268435456 float sum -1 5000.0 214.75 375.81 0 1.0 2.0 4900.0 219.13 383.48 0 1.0 2.0 2026-01-01"
    at = next(i for i, line in enumerate(lines) if line.startswith("#       size"))
    text = "\n".join([*lines[:at], head, row])
    assert [p["samples_s"] for p in read_nccl_log(write("x.log", text)).points] == [[4900e-6]]


def as_json(**more):
    place = {"time": 5000.0, "alg_bw": 214.748, "bus_bw": 375.809, "nwrong": 0.0}
    devices = [
        {
            "rank": i,
            "group": 0,
            "pid": 7,
            "hostname": "a",
            "device": i,
            "device_hex": "0x1",
            "device_info": "NVIDIA H200",
        }
        for i in range(8)
    ]
    row = {"size": 2**30, "count": 2**28, "type": "float", "redop": "sum", "root": "-1"}
    row |= {"out_of_place": place, "in_place": place | {"time": 4999.0}}
    config = {"nthreads": 1, "ngpus": 1, "devices": devices}
    return json.dumps({"args": "all_reduce_perf -J x.json", "config": config, "results": [row]} | more)


def test_json_is_read(write):
    found = read_nccl_log(write("x.json", as_json()))
    assert shapes(found.points) == {("collective", "all_reduce", 8, 1)}
    assert found.points[0]["samples_s"] == [4999e-6]
    assert found.header["gpu"] == "NVIDIA H200"


def test_one_process_of_json_stands_for_its_gpus(write):
    data = json.loads(as_json())
    data["config"] |= {"ngpus": 8, "devices": data["config"]["devices"][:1]}
    assert read_nccl_log(write("x.json", json.dumps(data))).points[0]["num_ranks"] == 8


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (as_json(config={}), "expected 'config' with 'devices'"),
        (as_json()[:-30], "is the file cut off"),
        (as_json(results=[{"size": 1}]), "got no 'redop'"),
        (as_json().replace("214.748", "999.0"), "result 0: expected the size over the time"),
    ],
)
def test_broken_json_is_refused_in_one_line(text, match, write):
    with pytest.raises(ProfileError, match=match) as caught:
        read_nccl_log(write("x.json", text))
    assert "\n" not in str(caught.value)


def test_the_command_says_what_other_tests_would_add(tmp_path):
    args = ("import", LOGS / "a3mega-all_reduce.log", "--out", tmp_path / "x.jsonl", "--json")
    notes = json.loads(cpsim(*args))["notes"]
    assert [note.split(":")[0] for note in notes] == ["no sendrecv", "no all_to_all", "no all_gather"]
    assert "sendrecv_perf" in notes[0]
    assert "alltoall_perf" in notes[1]


def test_an_all_reduce_alone_tells_a_described_network(tmp_path):
    cpsim("import", LOGS / "a3mega-all_reduce.log", "--out", tmp_path / "x.jsonl")
    fabric = json.loads(cpsim("fit-fabric", tmp_path / "x.jsonl", "--cluster", "a3-mega", "--json"))["fabric"]
    assert 0.85 * 25e9 < fabric["nic_bandwidth_bytes_per_s"] < 25e9
    assert fabric["nics_per_node"] == 8
    assert fabric["sigma_log"] < 0.15
    assert "flows not measured" in fabric["source"]
    error = cpsim("fit-fabric", tmp_path / "x.jsonl", "--cluster", "dgx-h100", status=2)
    assert "name the transport, --transport roce" in one_line(error)


# --- nodes ---

MATRIX = """
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity
GPU0\t X \tNV18\tNV18\tNV18\tPXB\tSYS\t0-47
GPU1\tNV18\t X \tNV18\tNV18\tPXB\tSYS\t0-47
GPU2\tNV18\tNV18\t X \tNV18\tSYS\tPXB\t48-95
GPU3\tNV18\tNV18\tNV18\t X \tSYS\tPXB\t48-95
NIC0\tPXB\tPXB\tSYS\tSYS\t X \tSYS
"""
IBSTAT = """CA 'mlx5_0'
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 400
\t\tLink layer: InfiniBand
CA 'mlx5_1'
\tPort 1:
\t\tState: Active
\t\tRate: 400
\t\tLink layer: InfiniBand
CA 'mlx5_2'
\tPort 1:
\t\tState: Down
\t\tRate: 40
\t\tLink layer: Ethernet
CA 'mlx5_3'
\tPort 1:
\t\tState: Active
\t\tRate: 100
\t\tLink layer: Ethernet
"""


def test_a_matrix_of_links(write):
    found = read_node(write("topo.txt", MATRIX))
    assert found == Topology(num_gpus=4, links=18, bridged=18, across_sockets=False, num_nics=2)
    assert found.port_bytes_per_s("NVIDIA H100 80GB HBM3") == 450e9
    assert found.port_bytes_per_s("NVIDIA B200") == 900e9
    bridged = read_node(LOGS / "topo.txt")
    assert (bridged.num_gpus, bridged.links, bridged.bridged, bridged.across_sockets) == (8, 0, 12, True)


def test_a_column_of_numa_nodes_is_no_nic(write):
    header, *rows = MATRIX.split("\n")
    text = "\n".join(
        [f"\x1b[4m{header.lstrip()}\tNUMA Affinity\tGPU NUMA ID\x1b[0m", *(f"{row}\t0\tN/A" for row in rows)]
    )
    assert read_node(write("topo.txt", text.replace("\n", "\r\n"))).num_nics == 2


IBSTATUS = "".join(
    f"""Infiniband device '{name}' port 1 status:
\tdefault gid:\t fe80:0000:0000:0000:b83f:d203:00c8:0000
\tbase lid:\t 0x11
\tsm lid:\t\t 0x1
\tstate:\t\t {state}
\tphys state:\t 5: LinkUp
\trate:\t\t {rate}
\tlink_layer:\t {layer}

"""
    for name, state, rate, layer in (
        ("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"),
        ("mlx5_1", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"),
        ("mlx5_2", "1: DOWN", "40 Gb/sec (4X QDR)", "Ethernet"),
        ("mlx5_3", "4: ACTIVE", "100 Gb/sec (4X EDR)", "Ethernet"),
    )
)


@pytest.mark.parametrize("text", [IBSTAT, IBSTATUS])
def test_ports_of_the_network(write, text):
    found = read_node(write("ib.txt", text))
    assert isinstance(found, Nics)
    assert (found.count, found.line_bytes_per_s, found.transport) == (2, 50e9, "infiniband")
    assert "mlx5_3" in found.notes[0]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (IBSTAT.replace("Active", "Down"), "expected ports in State: Active"),
        (MATRIX.replace("NV18", "??"), "expected links of GPUs like NV18, PIX or SYS"),
    ],
)
def test_nodes_that_say_nothing_are_refused_in_one_line(text, match, write):
    with pytest.raises(ProfileError, match=match):
        read_node(write("x.txt", text))


def test_files_of_nodes_have_no_times_and_the_command_says_where_they_go(write, tmp_path):
    for text in (MATRIX, IBSTAT):
        path = write("x.txt", text)
        assert "2 NICs" in describes_a_node(path)
        error = cpsim("import", path, "--out", tmp_path / "x.jsonl", status=2)
        assert "no times; `cpsim init cluster" in one_line(error)
