"""The predicted Chrome trace: every op of every rank once, on its stream, at its time."""

import json

from test_cli import EXAMPLES, cpsim, one_line

from cpsim.predictor import predict
from cpsim.scenario import load_scenario


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
    assert {event["pid"] for event in ops} == {0, 2, 4, 6}
    streams = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"compute", "send", "recv"} <= streams
    assert {"attention 0", "transfer 0", "attention backward 0"} <= {event["name"] for event in ops}


def test_a_trace_is_of_one_scenario(tmp_path):
    error = cpsim("predict", EXAMPLES / "sweep.jsonl", "--trace", tmp_path / "trace.json", status=2)
    assert "expected one scenario, got 10" in one_line(error)
