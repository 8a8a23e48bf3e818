"""What must happen to an answer when its question changes: relations that hold for every strategy.

A rule changes a case and says how time, memory and bytes sent may change. Slack is a share of the number before, and
is 0 unless a rule says otherwise; an exception of a strategy stands in ``EXCEPT`` with its reason.
"""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
from cases import one_in

from cpsim.case.cluster import Fault
from cpsim.case.load import scenario_from
from cpsim.errors import CpsimError
from cpsim.prediction.advise import advise
from cpsim.prediction.case import Case, resolve
from cpsim.prediction.passes import least_memory
from cpsim.prediction.predict import predict_many, prediction_of
from cpsim.prediction.results import Prediction
from cpsim.strategies import STRATEGIES

TIME, MEMORY, BYTES = "time_s", "peak_memory_bytes", "bytes_sent_per_gpu"
ALL = (TIME, MEMORY, BYTES)
Fields = dict[str, object]
SHARES = (1, 5, 2, 9, 3, 1, 7, 4)


def documents(tokens):
    parts = [tokens * share // sum(SHARES) for share in SHARES]
    return [*parts[:-1], tokens - sum(parts[:-1])]


def base(gpus, cluster, tokens_per_gpu, mask, **changes):
    fields = {"gpus": gpus, "cluster": cluster, "tokens_per_gpu": tokens_per_gpu, "mask": mask}
    if "document" in mask:
        fields["documents"] = documents(gpus * tokens_per_gpu)
    return fields | {"heads": 32, "kv_heads": 8} | changes


BASES = (
    base(4, "h200-4", 2048, "causal"),
    base(16, "dgx-h100", 1024, "causal_document"),
    base(8, "dgx-h200", 4096, "full"),
    base(1, "dgx-h200", 8192, "causal"),
    base(8, "dgx-h100", 8192, "causal_document"),
    base(4, "h200-4", 4096, "full_document"),
    base(8, "dgx-h200", 2048, "causal_sliding_window", kernel="flex"),
    base(16, "dgx-h200", 4096, "causal", protocol="streamed"),
)


class Rule(NamedTuple):
    """A change, and what every one of some numbers then is compared with the number before."""

    change: Callable
    """Of the fields; None where it has no meaning."""
    relation: str
    """``==``, ``<=`` or ``>=``."""
    numbers: tuple[str, ...] = ALL
    slack: float = 0.0
    case: Callable[[Case], Case] | None = None
    """What is changed of the case that the fields give instead."""


def scaled(factor):
    def change(fields):
        found = {"tokens_per_gpu": int(fields["tokens_per_gpu"] * factor)}
        if "documents" in fields:
            found["documents"] = [int(length * factor) for length in fields["documents"]]
        return fields | found

    return change


def longer(fields, by=2):
    found = {"tokens_per_gpu": fields["tokens_per_gpu"] + by}
    if "documents" in fields:
        first, *others = fields["documents"]
        found["documents"] = [first + by * fields["gpus"], *others]
    return fields | found


def of_documents(change):
    return lambda fields: fields | {"documents": change(list(fields["documents"]))} if "documents" in fields else None


def shuffled(seed):
    return of_documents(lambda lengths: random.Random(seed).sample(lengths, len(lengths)))


def of_cluster(change):
    """A change of the cluster of a case."""
    return lambda case: replace(case, cluster=change(case.cluster))


def of_fabric(**factors):
    def change(cluster):
        changed = {name: getattr(cluster.fabric, name) * factor for name, factor in factors.items()}
        return replace(cluster, fabric=replace(cluster.fabric, **changed))

    return of_cluster(change)


def faulty(part, rate):
    return of_cluster(lambda cluster: replace(cluster, faults=(Fault(part=part, number=0, rate=rate),)))


def same(fields):
    return fields


def of_nodes(fields):
    """Cases of several nodes."""
    return fields if fields["gpus"] > 8 else None


def of_gpus(fields):
    """Cases of several GPUs."""
    return fields if fields["gpus"] > 1 else None


RULES = {
    # the same question
    "asked again": Rule(same, "=="),
    "fields in another order": Rule(lambda f: dict(reversed(f.items())), "=="),
    "tokens of all GPUs": Rule(
        lambda f: {k: v for k, v in f.items() if k != "tokens_per_gpu"} | {"tokens": f["gpus"] * f["tokens_per_gpu"]},
        "==",
    ),
    "defaults said": Rule(lambda f: {"kernel": "fa4", "head_dim": 128, "dtype": "bf16", "pass": "fwd_bwd"} | f, "=="),
    "one document said": Rule(
        lambda f: f | {"documents": [f["gpus"] * f["tokens_per_gpu"]]} if "documents" not in f else None, "=="
    ),
    "the other half type": Rule(lambda f: f | {"dtype": "fp16"}, "=="),
    # more or less of everything
    "twice the tokens": Rule(scaled(2), ">="),
    "half the tokens": Rule(scaled(0.5), "<="),
    "two tokens more": Rule(longer, ">=", slack=0.02),
    "a tile of tokens more": Rule(lambda f: longer(f, 128), ">=", slack=0.02),
    "twice the heads": Rule(lambda f: f | {"heads": 64, "kv_heads": 16}, ">="),
    "twice the key-value heads": Rule(lambda f: f | {"kv_heads": 16}, ">=", slack=0.02),
    "half the head dimension": Rule(lambda f: f | {"head_dim": 64}, "<="),
    "one pass": Rule(lambda f: f | {"pass": "fwd"}, "<="),
    "the other pass": Rule(lambda f: f | {"pass": "bwd"}, "<="),
    "iterations back to back": Rule(lambda f: f | {"protocol": "streamed"}, "<=", slack=1e-3),
    # masks
    "a full mask": Rule(
        lambda f: f | {"mask": f["mask"].replace("causal", "full")} if "window" not in f["mask"] else None,
        ">=",
        slack=0.02,
    ),
    "documents ignored": Rule(
        lambda f: (
            {k: v for k, v in f.items() if k != "documents"} | {"mask": f["mask"].removesuffix("_document")}
            if "documents" in f
            else None
        ),
        ">=",
        slack=0.02,
    ),
    "documents in halves": Rule(
        of_documents(lambda lengths: [part for n in lengths for part in (n - n // 2, n // 2)]), "<=", slack=0.03
    ),
    "a wider window": Rule(
        lambda f: f | {"mask": {"name": f["mask"], "window": 2048}} if "window" in f["mask"] else None,
        ">=",
        slack=0.01,
    ),
    **{
        f"documents in another order {seed}": Rule(shuffled(seed), "==", (TIME, MEMORY), slack=0.05)
        for seed in range(2)
    },
    # machines
    "twice the network": Rule(
        of_nodes, "<=", (TIME,), case=of_fabric(nic_bandwidth_bytes_per_s=2, flow_bandwidth_bytes_per_s=2)
    ),
    "half the latency": Rule(of_nodes, "<=", (TIME,), case=of_fabric(latency_s=0.5)),
    "a crowded uplink": Rule(of_nodes, ">=", (TIME,), case=of_fabric(oversubscription=4)),
    "more memory": Rule(
        same, "==", case=of_cluster(lambda c: replace(c, gpu=replace(c.gpu, memory_bytes=2 * c.gpu.memory_bytes)))
    ),
    "a slow GPU": Rule(same, ">=", (TIME,), case=faulty("gpu", 0.5)),
    "a slow port": Rule(of_gpus, ">=", (TIME,), case=faulty("nvlink", 0.5)),
    "a slow NIC": Rule(of_nodes, ">=", (TIME,), case=faulty("nic", 0.5)),
    "a slow uplink": Rule(of_nodes, ">=", (TIME,), case=faulty("uplink", 0.5)),
    "a fault that is none": Rule(same, "==", case=faulty("gpu", 1.0)),
    "twice the GPUs for the same tokens": Rule(
        lambda f: f | {"gpus": 2 * f["gpus"], "tokens_per_gpu": f["tokens_per_gpu"] // 2} if f["gpus"] >= 8 else None,
        "<=",
        (MEMORY,),
    ),
    "twice the GPUs with as many tokens each": Rule(
        lambda f: (
            f | {"gpus": 2 * f["gpus"]} | ({"documents": [2 * n for n in f["documents"]]} if "documents" in f else {})
            if f["gpus"] >= 8
            else None
        ),
        ">=",
        (TIME, BYTES),
    ),
    "no strategy on one GPU": Rule(lambda f: f | {"strategy": "none"} if f["gpus"] == 1 else None, "=="),
}
RINGS = ("ring", "zigzag_ring", "striped_ring", "hybrid_cp", "usp", "loongtrain")
CUT = ("zigzag_ring", "hybrid_cp", "usp", "loongtrain", "allgather", "per_sequence", "wlb", "magi", "dcp", "distca")
PLANNERS = ("dcp", "distca", "magi", "hybrid_cp")
MORE = ("two tokens more", "a tile of tokens more")
REASONS = (
    (
        "planners are heuristics: another few tokens, heads or documents may lead to a plan that moves or holds less",
        PLANNERS,
        (*MORE, "twice the key-value heads", "documents in halves", "documents ignored", "a full mask"),
        ALL,
        0.65,
    ),
    (
        "planners place documents in the order of the batch: it decides what must move",
        ("dcp", "distca", "magi"),
        ("documents in another order 0", "documents in another order 1"),
        (TIME, MEMORY),
        0.5,
    ),
    (
        "shards are cut from the sequence, so the order of documents decides how work is spread",
        ("ring", "allgather", "per_sequence"),
        ("documents in another order 0", "documents in another order 1"),
        (TIME, MEMORY),
        0.25,
    ),
    (
        "NCCL gives a message beyond 64 MiB more channels, so that slightly longer ones are faster",
        RINGS,
        MORE,
        (TIME,),
        0.2,
    ),
    (
        "halves of zigzag shards see different keys under a causal mask: kernels get copies, and partial results",
        CUT,
        ("a full mask", "documents ignored"),
        (MEMORY,),
        0.3,
    ),
    (
        "what a GPU holds of all keys does not shrink with more GPUs, and they exchange with more others",
        ("allgather", "per_sequence", "dcp", "distca"),
        ("twice the GPUs for the same tokens",),
        (MEMORY,),
        0.3,
    ),
    (
        "a planner looks at rates of the machine, and another plan may turn out slower",
        ("dcp",),
        ("twice the network", "half the latency", "a crowded uplink"),
        (TIME,),
        0.05,
    ),
)
"""Why some strategies may break some rules for some numbers, and how far."""
EXCEPT = {
    (rule, strategy, number): slack
    for _, strategies, rules, numbers, slack in sorted(REASONS, key=lambda reason: reason[-1])
    for rule in rules
    for strategy in strategies
    for number in numbers
}


class Answer(NamedTuple):
    time_s: float
    peak_memory_bytes: int
    bytes_sent_per_gpu: float


@cache
def answer(text, rule=None):
    try:
        case = resolve(scenario_from(json.loads(text)))
        change = RULES[rule].case if rule else None
        found = prediction_of(change(case) if change else case)
    except CpsimError:
        return None
    return Answer(found.time_s, found.peak_memory_bytes, found.bytes_sent_per_gpu)


def broken(rule, before, after, strategy):
    """Numbers that break a rule."""
    _, relation, numbers, slack, _ = RULES[rule]
    for number in numbers:
        most = max(slack, EXCEPT.get((rule, strategy, number), 0.0))
        a, b = getattr(before, number), getattr(after, number)
        change = (b - a) / a if a else float(b > 0)
        if (relation != ">=" and change > most + 1e-9) or (relation != "<=" and change < -most - 1e-9):
            yield f"{rule}: {number} of {strategy} {a:.6g} -> {b:.6g} ({change:+.1%}), expected {relation}"


@pytest.mark.parametrize(("strategy", "number"), one_in(3, [(s, n) for n in range(len(BASES)) for s in STRATEGIES]))
def test_answers_change_as_their_questions_do(strategy, number):
    fields, found = BASES[number] | {"strategy": strategy}, []
    before = answer(json.dumps(fields))
    if before is None:
        pytest.skip("cannot run")
    for rule, (change, *_, case) in RULES.items():
        changed = change(fields)
        after = answer(json.dumps(changed), rule if case else None) if changed else None
        if after is not None:
            found += broken(rule, before, after, strategy)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("strategy", "number"), one_in(4, [(s, n) for n in range(len(BASES)) for s in STRATEGIES]))
def test_numbers_of_an_answer_fit_together(strategy, number):
    fields = BASES[number] | {"strategy": strategy}
    asked = [scenario_from(fields | {"pass": name}) for name in ("fwd", "bwd", "fwd_bwd")]
    found = predict_many(asked, jobs=1)
    if not all(isinstance(one, Prediction) for one in found):
        pytest.skip("cannot run")
    forward, backward, both = found
    case = resolve(asked[-1])
    flops = sum(case.workload.flops(name) for name in ("fwd", "bwd"))
    for one in found:
        assert 0 < one.time_s_low <= one.time_s <= one.time_s_high < float("inf")
        assert sum(one.parts_s.values()) == pytest.approx(one.time_s, rel=1e-9)
        assert all(seconds > 0 for seconds in one.parts_s.values())
        assert 0 <= one.exposed_comm_s <= one.time_s
        assert one.bytes_sent_per_gpu >= 0
        assert (one.bytes_sent_per_gpu == 0) == (fields["gpus"] == 1)
        assert one.planning_s >= 0
        assert one.peak_memory_bytes >= least_memory(case.workload, fields["gpus"], "fwd")
        assert 0 < one.tflops_per_gpu * 1e12 < case.cluster.gpu.peak_flops_per_s
    alone, together = (
        sum(one.time_s - one.parts_s.get("planning", 0.0) for one in some) for some in ((forward, backward), (both,))
    )
    assert together == pytest.approx(alone)
    assert both.bytes_sent_per_gpu <= (forward.bytes_sent_per_gpu + backward.bytes_sent_per_gpu) * (1 + 1e-12)
    assert both.peak_memory_bytes == max(forward.peak_memory_bytes, backward.peak_memory_bytes)
    assert both.tflops_per_gpu * both.time_s * fields["gpus"] * 1e12 == pytest.approx(flops)
    assert both.time_s * fields["gpus"] * case.cluster.gpu.peak_flops_per_s > flops


@pytest.mark.parametrize("number", [0, 1])
def test_advice_is_what_predict_tells_of_every_candidate(number):
    advice = advise(BASES[number])
    assert len(advice.candidates) > 5
    assert [c.total_s for c in advice.candidates] == sorted(c.total_s for c in advice.candidates)
    assert sum(c.probability_best for c in advice.candidates) == pytest.approx(1)
    asked = [c.scenario.model_copy(update={"pass_": name}) for c in advice.candidates for name in ("fwd_bwd", "fwd")]
    found = iter(predict_many(asked, jobs=1))
    for candidate, both, forward in zip(advice.candidates, found, found, strict=True):
        assert (both.time_s, both.time_s_low, both.time_s_high) == (
            candidate.total_s,
            candidate.total_s_low,
            candidate.total_s_high,
        )
        assert forward.time_s == candidate.forward.time_s
    only = advise(BASES[number] | {"strategy": advice.candidates[0].scenario.strategy})
    assert only.candidates[0].total_s == advice.candidates[0].total_s


def test_a_busy_machine_changes_no_answer():
    """Planning has a time, but it is an estimate."""
    fields = BASES[1] | {"strategy": "dcp", "knobs": {"layers": 1, "planners": 1}}
    first, second = predict_many([scenario_from(fields | {"head_dim": d}) for d in (128, 64, 128)], jobs=1)[::2]
    assert first.parts_s["planning"] > 0
    assert (first.time_s, first.draws_s) == (second.time_s, second.draws_s)
