"""Files of any kind at the door: numbers with units and ranges, YAML 1.2, limits of sizes, bytes that are no text."""

import json
import os
import time
from pathlib import Path

import pytest
import yaml
from test_cli import cpsim, one_line

from cpsim.calibrate import measurement
from cpsim.calibrate.imports import Table, read_kernel_table
from cpsim.calibrate.nccl_logs import read_nccl_log
from cpsim.case import files, yaml12
from cpsim.case.cluster import load_cluster, presets
from cpsim.case.load import load_scenario, load_scenarios, scenario_from
from cpsim.case.scenario import Scenario
from cpsim.errors import CpsimError, ProfileError, ScenarioError, shown
from cpsim.models import profile
from cpsim.models.profile import load_profile
from cpsim.prediction.compare import load_predictions
from cpsim.prediction.predict import predict
from cpsim.prediction.results import NUMBERS
from cpsim.prediction.standalone import standalone
from cpsim.prediction.sweep import load_sweep
from cpsim.units import Quantity

GOOD = {"strategy": "ring", "gpus": 4, "cluster": "h200-4", "tokens": 4096, "heads": 8, "kv_heads": 2}
BOM = b"\xef\xbb\xbf"


def said(error):
    """The message of an error, which is one line that any terminal shows as it is."""
    text = str(error.value if hasattr(error, "value") else error)
    assert "\n" not in text
    assert text.isprintable()
    assert len(text) < 500
    return text


# --- quantities ---


@pytest.mark.parametrize(
    ("unit", "text", "value"),
    [
        ("bytes/s", "400 Gb/s", 50e9),
        ("bytes/s", "400Gbps", 50e9),
        ("bytes/s", "39.7 GB/s", 39.7e9),
        ("bytes/s", "3.35 TB/s", 3.35e12),
        ("bytes", "80 GiB", 80 * 2**30),
        ("bytes", "141 GB", 141e9),
        ("s", "3 us", 3e-6),
        ("s", "3 µs", 3e-6),
        ("Hz", "1.98 GHz", 1.98e9),
        ("FLOP/s", "989.4 TFLOP/s", 989.4e12),
    ],
)
def test_units_are_read_and_a_small_b_is_a_bit(unit, text, value):
    assert Quantity(unit, 0, 1e18).read(text) == value


@pytest.mark.parametrize(
    "value",
    [39.7, "39.7", 0, -1e9, float("nan"), float("inf"), 10**400, True, None, [], "39.7 gb/s", "1e400 GB/s", "x"],
)
def test_what_is_no_rate_that_exists_is_refused_with_the_unit(value):
    with pytest.raises(ValueError, match=r"expected 100000 to 1e.16 bytes/s, got "):
        Quantity("bytes/s", 1e5, 1e16).read(value)


def cluster_file(folder, **fabric):
    fields = presets()["dgx-h200"].to_dict()
    path = folder / f"cluster-{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps(fields | {"fabric": fields["fabric"] | fabric}))
    return path


def test_a_cluster_may_give_units_and_refuses_what_no_machine_has(tmp_path):
    known = presets()["dgx-h200"].fabric
    said_so = load_cluster(str(cluster_file(tmp_path, nic_bandwidth_bytes_per_s="400 Gb/s", latency_s="3 us"))).fabric
    assert (said_so.nic_bandwidth_bytes_per_s, said_so.latency_s) == (50e9, 3e-6)
    assert said_so.flow_bandwidth_bytes_per_s == known.flow_bandwidth_bytes_per_s
    with pytest.raises(ScenarioError) as caught:
        load_cluster(str(cluster_file(tmp_path, nic_bandwidth_bytes_per_s=39.7)))
    assert "fabric.nic_bandwidth_bytes_per_s: expected 100000 to 1e+16 bytes/s, got 39.7" in said(caught)


def numbers(value, path=()):
    """Paths of all numbers in parsed JSON."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in pairs:
        yield from numbers(entry, (*path, key))
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def put(value, path, new):
    """Parsed JSON with another value at a path."""
    changed = list(value) if isinstance(value, list) else dict(value)
    changed[path[0]] = put(value[path[0]], path[1:], new) if len(path) > 1 else new
    return changed


@pytest.mark.parametrize(
    "new", [-1e30, 1e30, float("nan"), 10**400, "fast"], ids=["low", "high", "nan", "long", "text"]
)
def test_every_number_of_a_profile_has_a_range(new):
    data = profile.whole_data(profile.FOLDER / "h200.json")
    data |= {"attention": {"fa2 fwd": data["attention"]["fa2 fwd"]}, "provenance": [], "held_out": data["held_out"][:1]}
    kernel = data["attention"]["fa2 fwd"] = data["attention"]["fa2 fwd"] | {"head_dims": []}
    few = {name: kernel["discrepancy"][name][:2] for name in ("support", "weights")}
    kernel["discrepancy"] = kernel["discrepancy"] | few
    profile.from_json(data, "good")
    paths = {tuple(0 if isinstance(key, int) else key for key in path): path for path in numbers(data)}
    assert len(paths) > 300
    for path in paths.values():
        with pytest.raises(ProfileError) as caught:
            profile.from_json(put(data, path, new), "bad")
        assert str(path[0]) in said(caught)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"nbytes": [2e6, 1e6], "seconds": [1e-5, 2e-5]},
            "expected sizes that never fall, got 1e+06 bytes after 2e+06",
        ),
        ({"nbytes": [1e6, 2e6], "seconds": [2.0, 1e-5]}, "expected times that never fall, got 1e-05 s after 2"),
        ({"nbytes": [1e6], "seconds": [1e-5, 2e-5]}, "expected as many sizes as times, got 1 and 2"),
        ({"nbytes": [], "seconds": []}, "expected as many sizes as times"),
    ],
)
def test_curves_grow(change, says):
    data = profile.whole_data(profile.FOLDER / "h200.json")
    with pytest.raises(ProfileError) as caught:
        profile.from_json(put(data, ("collective", "rings", "8"), change), "bad")
    assert f"collective.rings.8: {says}" in said(caught)


def test_what_a_profile_lacks_is_one_line_when_it_is_needed(tmp_path):
    data = profile.whole_data(profile.FOLDER / "h200.json")
    del data["sigma"]["run to run"]
    (tmp_path / "mine.json").write_text(json.dumps(data))
    with pytest.raises(ProfileError) as caught:
        predict(GOOD | {"profile": str(tmp_path / "mine.json")})
    assert "lacks 'run to run'" in said(caught)


HEADER = {"schema": 1, "format": "cpsim-measurement", "num_gpus": 1}
HEADER |= dict.fromkeys(("gpu", "torch", "date", "commit", "command"), "")
FABRIC = {"op": "fabric", "num_nodes": 2, "gpus_per_node": 2}
ATTENTION = {"op": "attention", "kernel": "fa3", "pass": "fwd", "num_heads": 8, "num_kv_heads": 8, "head_dim": 128}
ATTENTION |= {"causal": True, "varlen": False, "q_lens": [65536], "k_lens": [65536]}
POINT = {"op": "collective", "kind": "all_gather", "num_ranks": 4, "nbytes": 2**20, "samples_s": [1e-4, 2e-4]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"samples_s": [float("inf")]}, "samples_s"),
        ({"samples_s": [0.0]}, "samples_s"),
        ({"samples_s": [True]}, "samples_s"),
        ({"nbytes": -1}, "nbytes: expected 1 to 1e+16 bytes, got -1"),
        ({"nbytes": "10**9"}, "nbytes"),
        ({"num_ranks": 10**400}, "num_ranks"),
        ({"kind": 3}, "kind: expected a text, got 3"),
        ({"at_s": -1}, "at_s: expected 0 to 1e+07 s, got -1"),
        ({"op": "attention"}, "missing; a point of op attention has kernel"),
        (
            {"kind": "all_gathr"},
            "kind: expected all_gather, reduce_scatter, all_to_all, all_reduce; got 'all_gathr'; did",
        ),
        ({"num_ranks": 2.5}, "num_ranks: expected a whole number, got 2.5"),
        ({"nbytes": 10**15, "samples_s": [1e-9]}, "samples_s: expected at most 1e+16 bytes/s, got 1e+24 bytes/s from"),
        (FABRIC | {"num_nodes": 3, "num_groups": 1}, "num_ranks: expected a multiple of num_nodes = 3, got 4"),
        (FABRIC | {"flows": [[0, 1], [2]]}, "flows: expected pairs of ranks, from and to, got [[0, 1], [2]]"),
        (ATTENTION | {"pass": "forward"}, "pass: expected fwd, bwd; got 'forward'"),
        (ATTENTION | {"samples_s": [1e-9]}, "samples_s: expected at most 1e+19 FLOP/s, got 1.76e+22 FLOP/s"),
    ],
)
def test_what_nobody_can_have_measured_is_refused_with_its_line(change, says, tmp_path):
    path = tmp_path / "points.jsonl"
    path.write_text("\n".join(map(json.dumps, (HEADER, POINT, POINT | change))))
    with pytest.raises(ProfileError) as caught:
        measurement.load(path)
    assert says in said(caught)
    assert "points.jsonl:3:" in said(caught)


def test_a_measurement_may_give_units(tmp_path):
    path = tmp_path / "points.jsonl"
    path.write_text("\n".join(map(json.dumps, (HEADER, POINT | {"nbytes": "1 MiB", "sm_clock_hz": "1.98 GHz"}))))
    (point,) = measurement.load(path).points
    assert (point["nbytes"], point["sm_clock_hz"]) == (2**20, 1.98e9)


# --- logs and tables ---


def log(ranks=range(8), time="22.57", algbw="46.46", busbw="40.65", gpus=8, size=2**20):
    lines = [f"# nThread 1 nGpus {gpus} minBytes 8 maxBytes 134217728 step: 2(factor)", "# Using devices"]
    lines += [f"#  Rank {r:2d} Group  0 Pid {1000 + r} on a device {r} [0x00] NVIDIA H100 80GB HBM3" for r in ranks]
    lines += [f"{size:12d} {32768:10d} float none -1 {time} {algbw} {busbw} 0 22.35 46.92 41.05 0"]
    return "\n".join([*lines, "134217728 4194304 float none -1 455.12 294.91 258.04 0 454.87 295.07 258.19 0"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (log(time="inf"), "line 11: expected 1e-09 to 10000 seconds, got inf"),
        (log(time="-22.57"), "line 11: expected 1e-09 to 10000 seconds, got -"),
        (log(time="nan"), "line 11: expected 1e-09 to 10000 seconds, got nan"),
        (log(time="fast"), "line 11: could not convert string to float"),
        (log(time="22570.0"), "line 11: expected the size over the time, 0.04646 GB/s, as algbw, got 46.46"),
        (log(busbw="inf"), "line 11: expected 0 to 1e+06 GB/s, got inf"),
        (log([0, 1, 2, 4, 5, 6, 7]), "line 6: expected rank 3 next, got rank 4"),
        (log([0, 1, 2, 3, 3, 5, 6, 7]), "line 7: rank 3 stands twice"),
        (log(range(7)), "line 9: expected a multiple of 8 ranks, nThread x nGpus, got 7"),
        (log(range(7), gpus=1), "line 10: expected a bus bandwidth of 39.82 GB/s for all_gather of 7 ranks, got 40.65"),
        (log(time="1" * 400), "line 11: expected"),
        (log(size=10**40), "line 11: expected"),
    ],
)
def test_a_log_that_cannot_be_is_refused_with_its_line(text, says, tmp_path):
    (tmp_path / "all_gather_perf.log").write_text(log())
    assert len(read_nccl_log(tmp_path / "all_gather_perf.log").points) == 2
    (tmp_path / "all_gather_perf.log").write_text(text)
    with pytest.raises(ProfileError) as caught:
        read_nccl_log(tmp_path / "all_gather_perf.log")
    assert says in said(caught)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("fa3,fwd,causal,8k,0,H100,16", "tflops: expected numbers of 1e-06 to 1e+07 TFLOP/s, got '0'"),
        ("fa3,fwd,causal,8k,-600,H100,16", "tflops: expected numbers of 1e-06 to 1e+07 TFLOP/s, got '-600'"),
        ("fa3,fwd,causal,8k,nan,H100,16", "tflops: expected numbers"),
        ("fa3,fwd,causal,8k,600 GB/s,H100,16", "tflops: expected numbers"),
        ("fa3,fwd,causal,-8k,600,H100,16", "tokens: expected a whole number, got '-8'"),
        ("fa3,fwd,causal,8k,600,H100,1.5", "heads: expected a whole number, got '1.5'"),
        ("fa3,fwd,causal,8k,600", "expected 7 cells, got 5"),
        ("fa3,fwd,causal,8k,600,H100,16,9", "expected 7 cells, got 8"),
    ],
)
def test_a_row_that_cannot_be_is_refused_with_its_line(row, says, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(f"# a source\nkernel,pass,mask,tokens,tflops,gpu,heads\n\nfa3,fwd,causal,8k,600,H100,16\n{row}\n")
    with pytest.raises(ProfileError) as caught:
        read_kernel_table(path, Table())
    assert f"line 5: {says}" in said(caught)


def test_a_cell_of_a_table_may_give_its_unit(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("kernel,pass,mask,tokens,ms,gpu,heads\nfa3,fwd,causal,8k,1250 us,h100,16\n")
    assert read_kernel_table(path, Table())[1][0]["samples_s"] == [1.25e-3]


# --- YAML ---


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010000", 10000),
        ("1:08:16", "1:08:16"),
        ("1_000", "1_000"),
        ("1e6", 1e6),
        ("0o17", 15),
        ("0x1F", 31),
        ("-3", -3),
        ("yes", "yes"),
        ("off", "off"),
        ("True", True),
        ("~", None),
        ("", None),
        ("2024-01-02", "2024-01-02"),
        ("'10'", "10"),
        ("!!str 10", "10"),
        (".5", 0.5),
        ("-.inf", float("-inf")),
    ],
)
def test_plain_values_are_those_of_yaml_1_2(text, value):
    found = yaml12.load(f"a: {text}")["a"]
    assert (found, type(found)) == (value, type(value))


def test_yaml_that_libraries_write_is_read_as_it_was():
    fields = [presets()["dgx-h200"].to_dict(), {"a": [1, 2.5, None, True, "no", "1:20", "010", "é", "a\nb"], "b": []}]
    for flow in (False, True):
        assert yaml12.load(yaml.safe_dump(fields, default_flow_style=flow, allow_unicode=flow)) == fields
    assert yaml12.load(json.dumps(fields)) == fields


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tokens: 1:08:16", "tokens: expected a whole number, got '1:08:16'"),
        ("tokens: 1_000", "tokens: expected a whole number, got '1_000'; write 1000"),
        ("tokens: 4e3", "tokens: expected a whole number, got 4000.0; write 4000"),
        ("tokens: " + "9" * 5000, "expected numbers of at most 40 digits"),
        ("tokens: " + "[" * 5000, "not valid YAML"),
        ("tokens: " + "{a: " * 5000, "expected at most 64 levels"),
        ("{a: 1, <<: {b: 2}}", "merge keys (<<) are not part of YAML 1.2; write the fields out at line 1"),
        ("a: 1\n---\nb: 2", "expected one document, got a second at line 2"),
        ("a: &x {b: *x}", "expected an alias of what stands before it, got *x at line 1"),
        ("a: !!python/name:os.system", "expected no tag"),
        ('cluster: "\\e[31mred"', "expected text without control characters, got '\\x1b[31mred'"),
    ],
)
def test_yaml_that_is_not_meant_is_one_line(text, says, tmp_path):
    path = tmp_path / "case.yaml"
    path.write_text("\n".join([text, *(f"{k}: {v}" for k, v in GOOD.items() if k != "tokens" and text[:5] == "token")]))
    with pytest.raises(ScenarioError) as caught:
        load_scenario(path)
    assert says in said(caught)


def test_aliases_of_aliases_are_refused_at_once(tmp_path):
    lists = ["&a [1,1,1,1,1,1,1,1,1]"] + [f"&{b} [{','.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi")]  # noqa: B905
    path = tmp_path / "laughs.yaml"
    path.write_text(f"gpus: [{', '.join(lists)}]\ncluster: h200-4\n")
    begun = time.perf_counter()
    with pytest.raises(ScenarioError) as caught:
        load_scenario(path)
    assert "expected at most 500000 values, aliases (*) written out" in said(caught)
    assert time.perf_counter() - begun < 2


def test_other_schemas_of_grids_are_sampled_without_expanding(tmp_path):
    path = tmp_path / "grid.yaml"
    values = {name: list(range(1, 1001)) for name in ("gpus", "tokens", "head_dim", "heads", "kv_heads")}
    for count in (5, 2):  # 1e15 combinations, and 1e6
        base = {"cluster": "dgx-h200"} | dict.fromkeys(list(values)[count:], 1)
        grid = {name: values[name] for name in list(values)[:count]} | {"knobs": [{"x": i} for i in range(10)]}
        path.write_text(json.dumps({"base": base, "grid": grid, "sample": {"count": 3, "seed": 1}}))
        sweep = load_sweep(path)
        assert sweep.entries.combinations == 10 * 1000**count
        entries = [sweep.entry(number)[1] for number in sweep.numbers()]
        assert len({json.dumps(entry) for entry in entries}) == 3
        assert [load_sweep(path).entry(number)[1] for number in sweep.numbers()] == entries
    huge = {f"{name}": values[name] for name in values} | {"context": values["gpus"], "seed": values["gpus"]}
    huge = {name: huge[name] for name in (*values, "context")} | {"dtype": ["bf16"] * 1000, "mask": ["full"] * 1000}
    path.write_text(json.dumps({"grid": huge, "sample": {"count": 3}}))  # more than numbers of 64 bits
    sweep = load_sweep(path)
    assert len({json.dumps(sweep.entry(number)[1]) for number in sweep.numbers()}) == 3
    path.write_text(json.dumps({"grid": huge}))
    with pytest.raises(ScenarioError) as caught:
        load_sweep(path)
    assert "expected at most 100,000,000 combinations, got 1e+24; ask for some of them" in said(caught)


# --- bytes, sizes, things that are no files ---


def test_only_the_line_with_a_bad_byte_is_an_error(tmp_path):
    line = json.dumps(GOOD).encode()
    path = tmp_path / "cases.jsonl"
    path.write_bytes(b"\n".join([line, b'{"gpus": 4, "cluster": "caf\xe9"}', line]))
    first, second, third = load_scenarios(path)
    assert isinstance(first, Scenario)
    assert isinstance(third, Scenario)
    assert "line 2: expected UTF-8 text, got byte 0xe9 at column 28" in said(second)
    lines = cpsim("predict", path, "--json").splitlines()
    assert ["time_s" in json.loads(text) for text in lines] == [True, False, True]


def test_a_byte_order_mark_is_read_over_in_files_of_every_kind(tmp_path):
    def marked(name, text):
        (tmp_path / name).write_bytes(BOM + text.encode())
        return tmp_path / name

    assert [type(s) for s in load_scenarios(marked("x.jsonl", f"{json.dumps(GOOD)}\n{json.dumps(GOOD)}"))] == [
        Scenario
    ] * 2
    assert load_scenario(marked("x.yaml", yaml.safe_dump(GOOD))) == scenario_from(GOOD)
    assert load_scenario(marked("x.json", json.dumps(GOOD))) == scenario_from(GOOD)
    assert load_cluster(str(marked("c.json", json.dumps(presets()["dgx-h100"].to_dict())))) == presets()["dgx-h100"]
    text = (profile.FOLDER / "h200.json").read_text()
    assert load_profile(marked("p.json", text)) == load_profile("h200")
    assert len(measurement.load(marked("m.jsonl", f"{json.dumps(HEADER)}\n{json.dumps(POINT)}")).points) == 1
    assert len(read_nccl_log(marked("all_gather_perf.log", log())).points) == 2
    table = "kernel,pass,mask,tokens,tflops,gpu,heads\nfa3,fwd,causal,64k,600,h100,16\n"
    assert len(read_kernel_table(marked("t.csv", table), Table())[1]) == 1


def doors(path):
    """Every way to read a file of a user."""
    return {
        "scenario": lambda: load_scenario(path),
        "scenarios": lambda: list(load_scenarios(path)),
        "sweep": lambda: load_sweep(path),
        "cluster": lambda: load_cluster(str(path)),
        "profile": lambda: load_profile(path),
        "measurement": lambda: measurement.load(path),
        "predictions": lambda: load_predictions(path),
        "log": lambda: read_nccl_log(path),
        "table": lambda: read_kernel_table(path, Table()),
    }


DOORS = list(doors(Path()))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("suffix", [".yaml", ".json", ".jsonl"])
def test_pipes_folders_and_devices_are_refused_without_waiting(door, suffix, tmp_path):
    os.mkfifo(tmp_path / f"pipe{suffix}")
    (tmp_path / f"folder{suffix}").mkdir()
    (tmp_path / f"device{suffix}").symlink_to("/dev/zero")
    for name in ("pipe", "folder", "device", "x" * 300):
        with pytest.raises(CpsimError) as caught:
            doors(tmp_path / f"{name}{suffix}")[door]()
        said(caught)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("suffix", [".yaml", ".json", ".jsonl"])
def test_files_beyond_a_limit_are_refused_before_they_are_read(door, suffix, tmp_path):
    path = tmp_path / f"large{suffix}"
    with path.open("wb") as file:
        file.truncate(files.MAX_BYTES + 1)  # takes no room on the disk
    begun = time.perf_counter()
    with pytest.raises(CpsimError, match=r"expected at most [0-9]+ MB, got 200 MB"):
        doors(path)[door]()
    assert time.perf_counter() - begun < 1


def test_a_line_beyond_a_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_DOCUMENT_BYTES", 1000)
    (tmp_path / "x.jsonl").write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | {"kernel": "x" * 1000}))
    with pytest.raises(ScenarioError, match=r"x.jsonl line 2: expected at most"):
        load_scenarios(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    "value",
    [10**5000, "x" * 10**8, [[]] * 10**6, {"a" * 10**7: 1}, ["\x1b[31m"]],
    ids=["long", "text", "list", "name", "escape"],
)
def test_messages_quote_the_beginning_of_a_value_only(value):
    begun = time.perf_counter()
    text = shown(value)
    assert time.perf_counter() - begun < 0.1
    assert len(text) <= 80
    assert text.isprintable()


def test_a_value_of_endless_depth_and_width_is_quoted_at_once():
    value = [1]
    for _ in range(300):
        value = [value] * 9
    assert shown(value) == "[" * 57 + "..."


def test_control_characters_never_reach_the_terminal(tmp_path):
    path = tmp_path / "a\x1b[31m\x9b\u202eb.yaml"
    path.write_text(json.dumps(GOOD | {"strategy": "x\x1b]0;y\x07"}))
    error = one_line(cpsim("predict", path, status=2))
    assert "\\x1b" in error
    assert error.strip().isprintable()
    for text in ("\x1b", "\x9b", "\u202e", "\ud800", "\x00"):
        with pytest.raises(ScenarioError, match="control characters"):
            files.parse_json(json.dumps({text: 1}), "x")
        with pytest.raises(ScenarioError, match="control characters"):
            files.parse_json(json.dumps({"a": [text]}), "x")
    assert files.parse_json('{"a": "two\\nlines\\tand \\u00e9"}', "x") == {"a": "two\nlines\tand é"}


# --- scenarios that stand alone ---


def test_a_scenario_with_its_own_cluster_and_profile_can_be_read_elsewhere(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "profiles").mkdir(parents=True)
    there.mkdir()
    h100 = json.loads((profile.FOLDER / "h100.json").read_text())
    (here / "profiles" / "ours.json").write_text(json.dumps(h100 | {"name": "ours", "base": "h200"}))
    cluster = presets()["dgx-h100"].to_dict() | {"name": "ours é", "profile": "profiles/ours.json"}
    (here / "ours.yaml").write_text(yaml.safe_dump(cluster))
    case = GOOD | {"cluster": "ours.yaml", "gpus": 16, "tokens": 16384}
    (here / "case.json").write_text(json.dumps(case))
    asked = load_scenario(here / "case.json")
    packed = standalone(asked)
    assert list(packed) == ["scenario.yaml", "cluster-profile.json", "ours.yaml"]
    for name, text in packed.items():
        (there / name).write_text(text)
        assert str(tmp_path) not in text
    expected = predict(asked)
    (here / "profiles" / "ours.json").unlink()
    (here / "ours.yaml").unlink()
    found = predict(load_scenario(there / "scenario.yaml"))
    for name in (*NUMBERS, "parts_s"):
        assert getattr(found, name) == getattr(expected, name), name


def test_a_scenario_of_shipped_parts_is_one_file():
    asked = scenario_from(GOOD | {"profile": "h200", "documents": {"distribution": "pile", "seed": 3}})
    assert list(standalone(asked)) == ["scenario.yaml"]
    assert scenario_from(yaml12.load(standalone(asked)["scenario.yaml"])) == asked
