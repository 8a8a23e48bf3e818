"""Other people's measurements: logs of nccl-tests and published tables become points that fits take."""

import json
import re

import numpy as np
import pytest
from refits import drift
from targets import check
from test_cli import cpsim, one_line

from cpsim.calibrate import fit, fit_attention
from cpsim.calibrate.fabric import fit_fabric
from cpsim.calibrate.fit_shapes import is_usual
from cpsim.calibrate.imports import Table, read_kernel_table
from cpsim.calibrate.measurement import load
from cpsim.calibrate.nccl_logs import read_nccl_log
from cpsim.calibrate.recipes import DATA, measurements, stand_in
from cpsim.calibrate.residuals import predicted_attention
from cpsim.case.load import scenario_from
from cpsim.case.published import FOLDER, packs_of
from cpsim.errors import ProfileError
from cpsim.models.network.collective import collective_seconds
from cpsim.models.profile import load_profile, to_json
from cpsim.models.standin import StandIn
from cpsim.prediction.predict import predict

PUBLISHED = DATA / "points" / "published"
BUS = {"all_gather": 1, "reduce_scatter": 1, "alltoall": 1, "all_reduce": 2}
COLUMNS = """\
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""


def log(test, hosts, latency_s, rate, *, per_node=8, named=True, sizes=range(10, 31), old=False):
    """What nccl-tests prints for a network of a latency and a bus bandwidth [bytes/s] of every rank."""
    n = len(hosts) * per_node
    factor = BUS[test] * (n - 1) / n if test in BUS else 1.0
    lines = [f"# Collective test starting: {test}_perf"] if named else []
    lines += [
        "# nThread 1 nGpus 1 minBytes 1024 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 "
        "validation: 1 graph: 0",
        "#",
        "# Using devices",
    ]
    for r in range(n):
        group, bus = ("", f"{0x18 + r:02x}") if old else ("Group  0 ", f"0000:{0x18 + r:02x}:00")
        host = hosts[r // per_node]
        lines.append(
            f"#  Rank {r:2d} {group}Pid {41000 + r:6d} on {host:>10s} device {r % per_node:2d} [0x{bus}] "
            "NVIDIA H100 80GB HBM3"
        )
    lines += COLUMNS.splitlines()
    for nbytes in (2**k for k in sizes):
        cells = []
        for faster, place in ((1.0, 0), (0.9, 1)):
            seconds = faster * (latency_s + nbytes * factor / rate)
            wrong = "N/A" if place and test in ("alltoall", "sendrecv") else "0"
            algorithm = nbytes / seconds / 1e9
            cells.append(f"{seconds * 1e6:7.2f} {algorithm:7.2f} {algorithm * factor:7.2f} {wrong:>6s}")
        count = nbytes // 4 // (1 if test in ("all_reduce", "sendrecv") else n)
        redop = "sum" if "reduce" in test else "none"
        lines.append(f"{nbytes:12d}  {count:12d}     float  {redop:>6s}      -1  {'  '.join(cells)}")
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1 ", "#", ""])


@pytest.mark.parametrize("test", [*BUS, "sendrecv"])
@pytest.mark.parametrize("named", [True, False])
def test_a_log_of_one_node_becomes_collectives_and_transfers(test, named, write):
    found = read_nccl_log(write("x.log", log(test, ["a"], 1e-5, 3e11, named=named, old=not named)))
    header, points = found.header, found.points
    assert header == {"gpu": "NVIDIA H100 80GB HBM3", "num_gpus": 8, "nccl": ""}
    kind = {"alltoall": "all_to_all", "sendrecv": "ring"}.get(test, test)
    assert {(p["op"], p["kind"], p["num_ranks"]) for p in points} == {
        ("transfer" if kind == "ring" else "collective", kind, 8)
    }
    wire = points[-1]["nbytes"] * (BUS[test] * 7 / 8 if test in BUS else 1.0)
    in_place = 0.9 if test == "all_reduce" else 1.0
    assert points[-1]["samples_s"][0] == pytest.approx(in_place * (1e-5 + wire / 3e11), rel=1e-3)


def test_several_tests_and_other_output_in_one_log(write):
    text = "mpirun -np 8 ...\nNCCL version 2.21.5+cuda12.4\n" + log("all_gather", ["a"], 1e-5, 3e11)
    found = read_nccl_log(write("x.log", text + "node-a: done\n" + log("all_reduce", ["a"], 1e-5, 3e11)))
    header, points = found.header, found.points
    assert header["nccl"] == "2.21.5"
    assert [p["kind"] for p in points] == ["all_gather"] * 21 + ["all_reduce"] * 21


def test_logs_of_two_nodes_give_the_network_between_them(write, tmp_path):
    latency, nic, flow = 6e-5, 45e9, 22e9
    per_bus = {"alltoall": nic * 15 / 8}
    paths = [write(f"{t}.log", log(t, ["a", "b"], latency, per_bus.get(t, 8 * nic))) for t in BUS]
    paths.append(write("sendrecv.log", log("sendrecv", ["a", "b"], latency, flow)))
    out = tmp_path / "points.jsonl"
    assert json.loads(cpsim("import", *paths, "--out", out, "--json"))["points"] == {"fabric": 105}
    fabric = fit_fabric([load(out)], likely_nics=8)
    assert fabric.nics_per_node == 8
    assert fabric.latency_s == pytest.approx(latency, rel=0.15)
    assert fabric.flow_bandwidth_bytes_per_s == pytest.approx(flow, rel=0.05)
    assert fabric.uplink_bandwidth_bytes_per_s == pytest.approx(8 * nic, rel=0.05)
    assert "nccl-tests" in fabric.source
    cluster = json.loads(cpsim("fit-fabric", out, "--cluster", "dgx-h100", "--json"))
    assert cluster["fabric"]["nics_per_node"] == 8


def test_logs_of_a_node_replace_the_network_of_a_profile(write, tmp_path):
    paths = [write(f"{t}.log", log(t, ["a"], 2e-5, 3.6e11)) for t in (*BUS, "sendrecv")]
    cpsim("import", *paths, "--out", tmp_path / "points.jsonl")
    files = [load(PUBLISHED / "h100-magi.jsonl"), load(tmp_path / "points.jsonl")]
    profile = fit.fit_profile(files, "mine", StandIn.of(load_profile("h100"), None))
    seconds = float(collective_seconds(profile.collective, "all_gather", 2**28, 8))
    assert seconds == pytest.approx(2e-5 + 2**28 * 7 / 8 / 3.6e11, rel=0.03)
    assert "network" not in profile.grade.split("interference")[-1]
    assert "nccl-tests" in profile.grade or "published" in profile.grade


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("nothing", "expected rows of an nccl-tests log"),
        ("\n".join(log("all_gather", ["a"], 1e-5, 3e11).splitlines()[12:]), "without a list of ranks"),
        (log("all_gather", ["a"], 1e-5, 3e11).replace("  0  ", "  ", 99), "."),
        (log("broadcast", ["a"], 1e-5, 3e11, named=False, sizes=range(4, 6)), "which test is this"),
    ],
)
def test_broken_logs_are_refused_in_one_line(text, match, write):
    with pytest.raises(ProfileError, match=match) as excinfo:
        read_nccl_log(write("x.log", text))
    assert "\n" not in str(excinfo.value)


TABLE = "gpu,kernel,wd,mask,seqlen,tflops\nh100,fa3,fwd,full_mask,8k,600\nh100,fa3,fwd,causal_mask,8k,500\n"


def test_a_table_becomes_points_of_the_same_rate(write):
    header, points, left = read_kernel_table(write("x.csv", "# a paper\n" + TABLE), Table(heads=64, kv_heads=8))
    assert (header["gpu"], header["num_sms"], header["published"], left) == ("h100", 132, "a paper", [])
    assert points[0]["samples_s"][0] == pytest.approx(4 * 8192**2 * 64 * 128 / 600e12)
    assert points[1]["causal"]
    assert points[1]["samples_s"][0] == pytest.approx(2 * 8192 * 8193 * 64 * 128 / 500e12)


def test_a_table_may_give_times_instead_of_rates(write):
    text = "gpu,kernel,pass,mask,tokens,heads,ms\nh100,fa3,fwd,causal,8k,64,12.5\n"
    _, (point,), _ = read_kernel_table(write("x.csv", text), Table())
    assert point["samples_s"] == [0.0125]


def timed(host_ms, lengths=(1, 2, 4, 8, 16, 32), grows=0.0):
    """A table of calls at 1 PFLOP/s that wait for their host, or lose time that grows with their length."""
    rows = [
        f"b200,fa4,bwd,{mask},{n}k,64,{5 * (n * 1024) ** 2 * 64 * 128 * share / 1e12 + host_ms + grows * n:.6f}"
        for mask, share in (("full", 2), ("causal", 1))
        for n in lengths
    ]
    return "gpu,kernel,pass,mask,tokens,heads,ms\n" + "\n".join(rows) + "\n"


def test_what_every_call_of_a_table_takes_beyond_its_rate_is_its_hosts(write):
    _, points, left = read_kernel_table(write("x.csv", timed(0.5)), Table())
    assert [line for line in left if "host" in line] == [
        "0.49 ms of each call of fa4 bwd: as long at every length, so its host's"
    ]
    flop = 10 * 4096**2 * 64 * 128
    assert points[0]["samples_s"][0] == pytest.approx(flop / 1e15, rel=0.02)
    for others in (timed(0.0), timed(0.0, grows=0.1), timed(0.5, (1, 32))):
        assert not [line for line in read_kernel_table(write("x.csv", others), Table())[2] if "host" in line]


def test_a_table_says_of_which_cudnn_it_is(write):
    head = "gpu,kernel,pass,mask,tokens,heads,ms,version\n"
    rows = ["9.13.1 at 0b1577c", "9.10.2", "of December 2025"]
    text = head + "".join(
        f"b200,cudnn,fwd,full,{8 * (i + 1)}k,64,{9 * (i + 1)},cuDNN {v}\n" for i, v in enumerate(rows)
    )
    assert read_kernel_table(write("x.csv", text), Table())[0]["kernels"] == {"cudnn": "91301"}
    assert "kernels" not in read_kernel_table(write("x.csv", text.replace("cuDNN", "")), Table())[0]
    assert "kernels" not in read_kernel_table(write("x.csv", text.replace("cudnn", "fa4")), Table())[0]


def test_documents_of_a_table_are_sequences(write):
    text = "gpu,kernel,pass,mask,tokens,documents,tflops\nh100,fa3,bwd,causal_document,3000,1000 2000,5\n"
    _, (point,), _ = read_kernel_table(write("x.csv", text), Table(heads=4))
    assert (point["q_lens"], point["varlen"], point["num_kv_heads"]) == ([1000, 2000], True, 4)


def test_a_row_over_drawn_packs_is_a_call_of_the_pack_in_the_middle(write):
    text = "gpu,kernel,pass,mask,tokens,documents,tflops\nh100,fa3,fwd,full_document,65536,magi 5 x 16384,500\n"
    _, (point,), _ = read_kernel_table(write("x.csv", text), Table(heads=4))
    areas = sorted(sum(n * n for n in pack) for pack in packs_of("magi 5 x 16384", 65536))
    assert sum(point["q_lens"]) == 65536
    assert sum(n * n for n in point["q_lens"]) == areas[2]
    assert point["samples_s"][0] == pytest.approx(4 * areas[2] * 4 * 128 / 500e12)


def test_masks_of_a_table_are_windows_or_masks_as_their_kernel_takes_them(write):
    head = "gpu,kernel,pass,mask,options,tokens,tflops\n"
    rows = "h100,{},fwd,causal_sliding_window,window=1024,131072,300\n"
    text = head + "".join(rows.format(kernel) for kernel in ("fa3", "flash_mask"))
    text += "h100,fa2_sparse,fwd,block_sparse,block=128 density=0.5,32768,30\n"
    _, (window, mask, blocks), _ = read_kernel_table(write("x.csv", text), Table(heads=64))
    assert window["window"] == [1024, 0]
    assert window["causal"]
    assert (mask["mask"], mask["options"]) == ("causal_sliding_window", {})  # 1,024 is what the mask has by default
    assert window["samples_s"] == pytest.approx(mask["samples_s"])
    assert blocks["area"] == 32768**2 // 2
    assert blocks["options"] == {"block": 128, "density": 0.5}


def test_times_that_are_missing_and_documents_of_single_calls_are_left_out(write):
    head = "gpu,kernel,pass,mask,tokens,documents,tflops\n"
    text = head + "h100,fa3,fwd,full,65536,,OOM\nh100,fa3,fwd,full,65536,,600\n"
    text += "h100,cudnn,fwd,full_document,65536,32768 32768,500\n"
    _, points, left = read_kernel_table(write("x.csv", text), Table(heads=4))
    assert len(points) == 1
    assert [line.partition(": ")[2] for line in left] == [
        "no time",
        "documents, which cudnn takes from other code alone",
    ]


def test_what_no_model_takes_is_left_out_by_name(write):
    more = "h100,vsa,fwd,full_mask,8k,600\nh100,fa3,fwd,sw_causal_mask,8k,1\nh100,fa3,fwd,varlen_full_mask,8k,1\n"
    _, points, left = read_kernel_table(write("x.csv", TABLE + more), Table(heads=64))
    assert len(points) == 2
    assert [line.partition(": ")[2] for line in left] == [
        "kernel vsa fwd has no model",
        "mask sw_causal_mask without a model",
        "mask varlen_full_mask without a model",
    ]


@pytest.mark.parametrize(
    ("text", "given", "match"),
    [
        (TABLE, {}, "how many heads"),
        (TABLE.replace("tflops", "speed"), {"heads": 4}, "got no tflops"),
        (TABLE.replace("600", "fast"), {"heads": 4}, "expected numbers"),
        (TABLE + "b200,fa4,fwd,full,8k,9\n", {"heads": 4}, "which GPU"),
        (TABLE.replace("h100", "mi300"), {"heads": 4}, "how many SMs has mi300"),
        (TABLE.replace("seqlen,", "seqlen,options,").replace("8k,", "8k,block=1,"), {"heads": 4}, "'full' takes no"),
        ("", {}, "expected columns"),
    ],
)
def test_broken_tables_are_refused_in_one_line(text, given, match, write):
    with pytest.raises(ProfileError, match=match) as excinfo:
        read_kernel_table(write("x.csv", text), Table(**given))
    assert "\n" not in str(excinfo.value)


def test_the_command_refuses_mixed_gpus_in_one_line(write, tmp_path):
    paths = write("h.csv", TABLE), write("b.csv", TABLE.replace("h100", "b200"))
    error = cpsim("import", *paths, "--heads", 64, "--out", tmp_path / "x.jsonl", status=2)
    assert "expected points of one GPU type, got 4 of b200, h100" in one_line(error)


@pytest.mark.parametrize(
    "path", sorted(path for path in PUBLISHED.glob("*.jsonl") if load(path).header["files"]), ids=lambda path: path.stem
)
def test_published_points_are_their_tables(path):
    points = load(path)
    (name,) = points.header["files"]
    table = next(folder / name for folder in (PUBLISHED, FOLDER) if (folder / name).exists())
    _, read, _ = read_kernel_table(table, Table(gpu=points.header["gpu"]))
    assert [p["samples_s"][0] for p in points.points] == pytest.approx([p["samples_s"][0] for p in read], abs=1e-10)
    assert [p.get("rested") for p in points.points] == [p.get("rested") for p in read]


@pytest.mark.parametrize("name", ["h100-fa3", "b200", "a100", "a100-pcie", "gb200", "gb300"])
def test_published_profiles_are_remade_and_say_what_they_are(name):
    base, files = stand_in(name), measurements(name)
    made, shipped = fit.fit_profile(files, name, base), load_profile(name)
    for model, relative in drift(made, shipped, [p for file in files for p in file.points]).items():
        assert relative.max() <= 0.02, model  # not always 0: other processors round otherwise
    again, then = (json.loads(to_json(p)) for p in (made, shipped))
    assert all(again[part] == then[part] for part in ("collective", "host", "interference", "elementwise"))
    single = " of single documents" if name not in ("h100-fa3", "b200") else ""
    assert re.match(rf"kernels from published figures{single}( \(cuDNN up to [0-9.]+\))?; ", shipped.grade)
    assert f"from profile {base.source.name}" in shipped.grade
    own = [row for row in shipped.held_out if row["model"].startswith("attention")]
    assert own
    check("published calls held out, mean", max(row["mean_absolute"] for row in own))


def test_predictions_from_published_figures_say_so():
    case = {
        "strategy": "ulysses",
        "gpus": 8,
        "cluster": "dgx-b200",
        "profile": "b200",
        "kernel": "fa4",
        "heads": 64,
        "kv_heads": 8,
        "tokens_per_gpu": 8192,
    }
    made = predict(scenario_from(case))
    assert any("published figures" in note and "NVLink x 2" in note for note in made.notes)
    h200 = predict(scenario_from(case | {"cluster": "dgx-h200", "profile": "h200"}))
    assert made.time_s < h200.time_s
    assert made.time_s_high / made.time_s_low > h200.time_s_high / h200.time_s_low


FLASH_ATTENTION_2 = {
    False: {1024: 173, 2048: 187, 4096: 196, 8192: 201, 16384: 203},
    True: {512: 99, 1024: 133, 2048: 155, 4096: 173, 8192: 182, 16384: 189},
}
"""TFLOP/s, forward and backward, of FlashAttention-2 on A100-80GB SXM4, causal or not, by the length of documents that
are 16k tokens in all, 16 heads of 128: labels of assets/flash2_a100_fwd_bwd_benchmark.png of Dao-AILab/flash-attention
at 0251105; a legend covers that of 512 without a mask. A causal mask counts as half of all pairs."""


def test_the_a100_profile_gives_what_flash_attention_publishes_of_its_kernel():
    a100, errors = load_profile("a100"), []
    for causal, by_length in FLASH_ATTENTION_2.items():
        for length, tflops in by_length.items():
            lens = [length] * (16384 // length)
            call = {
                "num_heads": 16,
                "num_kv_heads": 16,
                "head_dim": 128,
                "causal": causal,
                "varlen": False,
                "q_lens": lens,
                "k_lens": lens,
            }
            seconds = sum(predicted_attention(a100.attention["fa2", pass_], [call])[0] for pass_ in ("fwd", "bwd"))
            flop = 3.5 * 4 * 16384 * length * 16 * 128 / (2 if causal else 1)
            errors.append(flop / seconds / (tflops * 1e12) - 1)
    check("A100, flash-attn 2's table, mean", np.abs(errors).mean())
    check("A100, flash-attn 2's table, worst", np.abs(errors).max())


def test_pairs_of_split_keys_take_as_much_longer_as_all_on_a_gpu_of_which_few_calls_are_published():
    theirs, a100 = (load_profile(name).attention["fa2", "fwd"] for name in ("h200", "a100"))
    assert a100.pair_s > 1.3 * theirs.pair_s
    assert a100.split_pair_s / a100.pair_s == pytest.approx(theirs.split_pair_s / theirs.pair_s, rel=1e-3)


def test_few_points_fit_few_parameters_near_the_kernel_that_stands_in():
    points = [p for p in load(PUBLISHED / "h100-magi.jsonl").points if p["kernel"] == "fa3" and is_usual(p)]
    points = [p for p in points if p["pass"] == "fwd" and not p["varlen"]]
    start = StandIn.of(load_profile("h100"), None).start(("fa3", "fwd"))
    made = fit_attention.fit_few(points, start, fit_attention.FITTED_TO_FEW)
    assert made.traffic_s_per_byte == start.traffic_s_per_byte
    errors = np.log(predicted_attention(made, points) / [p["samples_s"][0] for p in points])
    assert np.abs(errors).mean() < 0.03
