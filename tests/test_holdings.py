"""What `cpsim strategies NAME` draws: tokens, pairs and bytes of every rank are those of its schedules."""

import json

import numpy as np
import pytest
from cases import ALL_KNOBS, cluster, workload
from test_cli import cpsim, one_line

from cpsim.errors import InfeasibleError
from cpsim.report.holdings import shares
from cpsim.strategies import plan


@pytest.mark.parametrize("name", sorted(set(ALL_KNOBS) - {"none"}))
def test_every_rank_sends_what_its_schedules_say(name):
    case, checked = workload("causal_document", "short" if name == "wlb" else "uneven"), 0
    for knobs in ALL_KNOBS[name]:
        try:
            schedules = {pass_: plan(name, case, cluster(4), pass_, knobs) for pass_ in ("fwd", "bwd")}
        except InfeasibleError:
            continue
        found = shares(schedules, case)
        for pass_, schedule in schedules.items():
            sent = [sum(row["nbytes"] for row in one.sends if row["pass"] == pass_) for one in found]
            wanted = schedule.bytes_sent()
            assert np.allclose(sent, wanted, rtol=0.01, atol=64), (knobs, pass_)  # collectives cut into whole bytes
        assert sum(one.pairs for one in found) == case.area() * case.num_heads
        held = sorted(token for one in found for first, end in one.tokens for token in range(first, end))
        assert held == list(range(case.num_tokens)), knobs
        checked += 1
    assert checked


def test_a_strategy_is_drawn(tmp_path):
    text = cpsim("strategies", "zigzag_ring")
    assert max(map(len, text.splitlines())) <= 100
    assert "0–1023, 7168–8191" in text
    assert "fwd transfer to 1: keys and values, 12.6 MB" in " ".join(text.split())
    assert "0 00······························" in text
    found = json.loads(cpsim("strategies", "usp", "--gpus", 8, "--knob", "ulysses=4", "--json"))
    assert [row["rank"] for row in found["ranks"]] == list(range(8))
    for gpus, knob in ((4, "head_chunks=4"), (8, "token_chunks=4"), (8, "head_chunks=2")):
        assert "heads of 128" in cpsim("strategies", "ulysses", "--gpus", gpus, "--knob", knob)
    picture = tmp_path / "zigzag.png"
    cpsim("strategies", "ring", "--documents", "20,12", "--png", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zigzag",), "strategy: expected one of none, ulysses"),
        (("ring", "--documents", "9,9"), "documents: expected lengths that add up to 32, got 9,9"),
        (("ring", "--mask", "casual"), "mask: 'casual' is unknown; did you mean causal"),
        (("usp", "--knob", "ulysses"), "knob: expected K=V, e.g. ulysses=2, got 'ulysses'"),
        (("--gpus", 8), "all are listed where none is named"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message):
    assert message in one_line(cpsim("strategies", *arguments, status=2)).replace("'causal'", "causal")
