"""How fast cpsim is, with the work of every measurement pinned by its op count.

Run with ``pytest -m benchmark tests/test_benchmark.py``; every claim of speed cites one of these.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scripts import load_script

from cpsim.case.cluster import load_cluster
from cpsim.case.load import as_scenario, load_scenario, scenario_from
from cpsim.case.scenario import Scenario
from cpsim.case.workload import Workload
from cpsim.models.conditions import Conditions
from cpsim.models.cost_models import GROUPS
from cpsim.models.price import price
from cpsim.models.profile import load_profile
from cpsim.prediction.advise import advise
from cpsim.prediction.predict import predict, predict_many
from cpsim.prediction.size import MOST_PLACES
from cpsim.prediction.sweep import load_sweep, run_sweep
from cpsim.report.axes import Around
from cpsim.report.frontier import best_in, likely
from cpsim.runtime.allocator import keep_freed_memory
from cpsim.schedule.schedule import Kind
from cpsim.schedule.work import free_work
from cpsim.sim.draws import Followed
from cpsim.sim.fast import simulate
from cpsim.sim.reference import simulate_reference
from cpsim.strategies import plan
from cpsim.strategies.dcp.balanced import place
from cpsim.strategies.dcp.blocks import cut, judge
from cpsim.strategies.dcp.planning import _planned
from cpsim.strategies.dcp.timing import Rates, stage_by_time
from cpsim.strategies.distca.batches import iteration, sample
from cpsim.strategies.distca.kernel import flash_attention_4
from cpsim.strategies.distca.planning import schedule
from cpsim.strategies.distca.tasks import TokenBytes, dispatch

pytestmark = pytest.mark.benchmark

GPUS = 96
CLUSTER = load_cluster("dgx-h200").with_gpus(GPUS)
keep_freed_memory()  # as commands and their workers do
EXAMPLE = "examples/llama3-8b-96gpu.yaml"
mixed_scenarios = load_script("docs/scale.py").mixed_scenarios


def workload(gpus=GPUS, tokens=8192):
    return Workload(documents=(gpus * tokens,), mask="causal", num_heads=32, num_kv_heads=8, head_dim=128, dtype="bf16")


def zigzag(pass_):
    return plan("zigzag_ring", workload(), CLUSTER, pass_, {})


def pricing(cluster=CLUSTER):
    case = {"kernel": "fa4", "head_dim": 128, "dtype": "bf16"}
    return Conditions(cluster=cluster, profile=load_profile("h200"), **case)


def ops(gpus):
    """Ops of a zigzag ring: attention, transfers and merges forward; two sums and two transfers backward."""
    forward = gpus**2 + 2 * gpus * (gpus - 1)
    backward = gpus**2 + gpus * (gpus - 1) + gpus * (gpus - 1) + 2 * gpus**2 + gpus
    return forward, backward


@pytest.mark.benchmark(group="96-rank zigzag ring, forward and backward")
def test_plan(benchmark):
    planned = benchmark(lambda: [zigzag(p) for p in ("fwd", "bwd")])
    assert tuple(len(s) for s in planned) == ops(GPUS)


@pytest.mark.benchmark(group="96-rank zigzag ring, forward and backward")
def test_price(benchmark):
    planned, prices = [zigzag(p) for p in ("fwd", "bwd")], pricing()
    priced = benchmark(lambda: [price(s, prices) for s in planned])
    assert sum(len(p.work.duration_s) for p in priced) == sum(ops(GPUS))


@pytest.mark.benchmark(group="96-rank zigzag ring, forward and backward")
def test_simulate_with_shared_links_and_interference(benchmark):
    planned, prices = [zigzag(p) for p in ("fwd", "bwd")], pricing()
    works = [price(s, prices).work for s in planned]
    lines = benchmark(lambda: [simulate(s, w) for s, w in zip(planned, works, strict=True)])
    assert sum(len(line.end_s) for line in lines) == sum(ops(GPUS))


@pytest.mark.benchmark(group="96-rank zigzag ring, forward and backward")
def test_plan_and_simulate(benchmark):
    prices = pricing()
    works = [price(zigzag(p), prices).work for p in ("fwd", "bwd")]
    lines = benchmark(lambda: [simulate(zigzag(p), w) for p, w in zip(("fwd", "bwd"), works, strict=True)])
    assert sum(len(line.end_s) for line in lines) == sum(ops(GPUS))


@pytest.mark.benchmark(group="96-rank zigzag ring, forward and backward")
def test_two_hundred_draws(benchmark):
    schedule = zigzag("fwd")
    priced = price(schedule, pricing())
    timeline, ones = simulate(schedule, priced.work), np.ones(200)
    factors = np.ones((len(GROUPS), len(ones)))
    found = benchmark(lambda: Followed.of(timeline, priced.work, priced.group).makespans(factors, ones, ones))
    assert found.tolist() == [timeline.makespan_s] * 200


@pytest.mark.benchmark(group="96-rank zigzag ring, forward and backward")
def test_plan_price_and_simulate_forward(benchmark):
    prices = pricing()

    def whole():
        schedule = zigzag("fwd")
        return simulate(schedule, price(schedule, prices).work)

    assert len(benchmark(whole).end_s) == ops(GPUS)[0]


@pytest.mark.benchmark(group="large machines, one document, causal, forward")
@pytest.mark.parametrize(("strategy", "gpus"), [("zigzag_ring", 4096), ("usp", 3072), ("usp", 4096), ("usp", 16384)])
def test_large_machines(benchmark, strategy, gpus):
    case = Scenario(
        strategy=strategy, gpus=gpus, cluster="dgx-h200", tokens_per_gpu=8192, heads=32, kv_heads=8, **{"pass": "fwd"}
    )
    found = benchmark.pedantic(lambda: predict(case), rounds=3 if benchmark.enabled else 1)
    spelled_out, places = found.timelines.get("fwd"), gpus // (8 if strategy == "usp" else 1)
    assert (spelled_out is None) == (places > MOST_PLACES)
    assert spelled_out is None or len(spelled_out.end_s) == ops(places)[0] + 5 * places


@pytest.mark.benchmark(group="commands")
def test_import(benchmark):
    command = [sys.executable, "-c", "import cpsim"]
    assert benchmark.pedantic(lambda: subprocess.run(command).returncode, rounds=5) == 0


@pytest.mark.benchmark(group="commands")
def test_a_sweep_into_parquet(benchmark, tmp_path):
    path, count = tmp_path / "cases.jsonl", 200 if benchmark.enabled else 20
    path.write_text("\n".join(json.dumps(case.to_dict()) for case in mixed_scenarios(count)))
    folders = iter(tmp_path / name for name in "abc")
    done = benchmark.pedantic(lambda: run_sweep(load_sweep(path), next(folders)), rounds=1)
    assert done.num_scenarios == count


def constant(schedule):
    work = price(schedule, pricing()).work
    return free_work(work.duration_s, work.release_s)


@pytest.mark.benchmark(group="engines, 96-rank zigzag ring, constant rates, forward")
def test_fast_engine(benchmark):
    schedule = zigzag("fwd")
    work = constant(schedule)
    assert len(benchmark(lambda: simulate(schedule, work)).end_s) == ops(GPUS)[0]


@pytest.mark.benchmark(group="engines, 96-rank zigzag ring, constant rates, forward")
def test_reference_engine(benchmark):
    schedule = zigzag("fwd")
    work = constant(schedule)
    line = benchmark.pedantic(lambda: simulate_reference(schedule, work), rounds=2)
    assert len(line.end_s) == ops(GPUS)[0]


@pytest.mark.benchmark(group="engines, 16-rank zigzag ring, shared links and interference, forward")
@pytest.mark.parametrize("engine", [simulate, simulate_reference])
def test_engines_with_sharing(benchmark, engine):
    cluster = CLUSTER.with_gpus(16)
    schedule = plan("zigzag_ring", workload(16), cluster, "fwd", {})
    work = price(schedule, pricing(cluster)).work
    assert len(benchmark(lambda: engine(schedule, work)).end_s) == ops(16)[0]


@pytest.mark.benchmark(group="commands")
def test_advise_at_96_gpus_with_start_up(benchmark):
    command = [sys.executable, "-m", "cpsim", "advise", EXAMPLE, "--json"]
    done = benchmark.pedantic(
        lambda: subprocess.run(command, check=True, capture_output=True), rounds=3, warmup_rounds=1
    )
    assert done.stdout


@pytest.mark.benchmark(group="commands")
def test_advise_at_96_gpus_in_process(benchmark):
    advice = benchmark.pedantic(lambda: advise(load_scenario(EXAMPLE)), rounds=3, warmup_rounds=1)
    assert advice.candidates


LLAMA = ("--model", "llama3-8b", "--gpus", "64", "--context", "128k")
FIRST_ANSWERS = {
    "megatron": (*LLAMA, "--cluster", "dgx-h100", "--framework", "megatron"),
    "torchtitan with fsdp": (
        *(*LLAMA, "--cluster", "dgx-h100", "--framework", "torchtitan"),
        *("--set", "parallel.sharding=fsdp"),
    ),
    "config.json": ("--model", "FORMATS/qwen3-32b.json", "--gpus", "32", "--cluster", "h200", "--context", "256k"),
    "own lengths": (*LLAMA, "--cluster", "dgx-h100", "--lengths", "OWN/lengths.txt"),
    "own cluster": (*LLAMA, "--cluster", "OWN/mine.json"),
    "attention on 96 GPUs": (EXAMPLE,),
}
MOST_S = dict.fromkeys(FIRST_ANSWERS, 5.0) | {"attention on 96 GPUs": 2.5}


def of_commands():
    """Seconds of cores that commands took which have ended."""
    spent = os.times()
    return spent.children_user + spent.children_system


@pytest.mark.benchmark(group="first answers of cpsim advise, start-up included, on one core", timer=of_commands)
@pytest.mark.parametrize("name", FIRST_ANSWERS)
def test_first_answers(benchmark, tmp_path, name):
    lengths = np.random.default_rng(1).lognormal(8, 1.5, 5000).clip(50, 120_000).astype(int)
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, lengths)))
    cluster = {"name": "mine", "gpus_per_node": 8, "gpu": "h100", "profile": "h100", "nics": "4 x 200G"}
    (tmp_path / "mine.json").write_text(json.dumps(cluster))
    words = [
        word.replace("FORMATS", str(Path(__file__).parent / "formats")).replace("OWN", str(tmp_path))
        for word in FIRST_ANSWERS[name]
    ]
    command = [sys.executable, "-m", "cpsim", "advise", *words, "--json"]
    done = benchmark.pedantic(
        lambda: subprocess.run(command, check=True, capture_output=True), rounds=3 if benchmark.enabled else 1
    )
    assert json.loads(done.stdout)["candidates"]
    if benchmark.stats:
        assert benchmark.stats.stats.min < MOST_S[name]


@pytest.mark.benchmark(group="commands")
def test_a_thousand_mixed_predictions(benchmark):
    cases = mixed_scenarios(1000 if benchmark.enabled else 100)  # beside other tests nothing is timed
    answers = benchmark.pedantic(lambda: predict_many(cases), rounds=1)
    assert len(answers) == len(cases)


MAPS = {
    "one document": {"gpus": 96, "cluster": "dgx-h200", "tokens_per_gpu": 4096, "heads": 32, "kv_heads": 8},
    "hundreds of documents": EXAMPLE,
}

MAP_S = 3
"""Until the last cell of a map is drawn."""


@pytest.mark.benchmark(group="a map of 20 cells around 96 GPUs, on one core", timer=time.process_time)
@pytest.mark.parametrize("how", ["cells of the map", "advise in each"])
@pytest.mark.parametrize("name", MAPS)
def test_maps(benchmark, name, how):
    case = as_scenario(MAPS[name])
    spots = Around(scenario=case).spots()[: 20 if benchmark.enabled else 2]
    first = likely(advise(case))
    answer = (lambda spot: best_in(spot, first)) if how == "cells of the map" else (lambda spot: advise(spot.scenario))

    def answers():
        _planned.cache_clear()
        return [answer(spot) for spot in spots]

    assert len(benchmark.pedantic(answers, rounds=1)) == len(spots)
    if benchmark.stats and (name, how) == ("one document", "cells of the map"):
        assert benchmark.stats.stats.median < 2 * MAP_S  # two cores share the cells


def test_kinds_of_a_zigzag_ring():
    schedule = zigzag("fwd")
    assert int((schedule.kind == Kind.ATTENTION).sum()) == GPUS**2


@pytest.mark.benchmark(
    group="variant cpsim of dcp, 131,072 tokens on 4 nodes of 8 GPUs, blocks of 1024", timer=time.process_time
)
@pytest.mark.parametrize(
    ("mask", "computations", "most_s"),
    [("causal", 16512, 2), ("lambda", 1506, 0.5), ("causal_blockwise", 1012, 0.5), ("shared_question", 8862, 1)],
)
def test_place_blocks(benchmark, mask, computations, most_s):
    case = Workload(documents=(131072,), mask=mask, num_heads=8, num_kv_heads=2, head_dim=128, dtype="bf16")
    rates = Rates.of(load_cluster("p4de"))
    place(cut(replace(case, documents=(8192,)), 1024, 2), (4, 8), rates, 0.1, 4, 0)  # compiles

    def planned():
        blocks = cut(case, 1024, 2)
        placement = place(blocks, (4, 8), rates, 0.1, 4, 0)
        return blocks, placement, stage_by_time(blocks, placement, (4, 8), rates, 4, "fwd")

    blocks, placement, _ = benchmark.pedantic(planned, rounds=3)
    assert blocks.computations == computations
    assert judge(blocks, placement, 32, 8, "fwd").imbalance <= 1.1
    if benchmark.stats:
        assert benchmark.stats.stats.median < most_s


@pytest.mark.benchmark(
    group="DistCA, both passes of both nano-batches of 4M tokens on 64 servers of 8 GPUs", timer=time.process_time
)
@pytest.mark.parametrize(("variant", "num_tasks"), [("released", 1092), ("paper", 1090), ("cpsim", 1000)])
def test_schedule_a_batch_of_512_gpus(benchmark, variant, num_tasks):
    nano_batches, sizes = iteration(sample("pretrain", 128 * 1024), 0, 32), TokenBytes(q=2048, kv=512, lse=32)

    def planned():
        count = 0
        for documents in nano_batches:
            for backward in (False, True):
                kernel = flash_attention_4(backward, 8, 1)
                tasks = schedule(documents, 64, sizes, kernel, variant=variant)
                dispatch(tasks, 64, sizes)
                count += len(tasks) * (not backward)
        return count

    planned()  # compiles
    assert benchmark.pedantic(planned, rounds=3) == num_tasks
    if benchmark.stats:
        assert benchmark.stats.stats.median < 1


STEP = {
    "gpus": 512,
    "cluster": "dgx-h200",
    "tokens": 64 * 131072,
    "context": 131072,
    "model": "llama-34b",
    "kernel": "fa2",
    "mask": "causal_document",
    "strategy": "allgather",
    "parallel": {"tp": 8, "pp": 2, "cp": 4, "recompute": "mlp"},
}


def drawn(seed):
    return {"documents": {"distribution": "distca_prolong", "seed": seed}}


@pytest.mark.benchmark(group="a step of 34B on 512 GPUs, 48 layers, 30 microbatches", timer=time.process_time)
def test_a_step_of_many_microbatches(benchmark):
    cut = {"tokens": 8 * 30 * 131072, "parallel": STEP["parallel"] | {"dp": 8, "microbatches": 30}}
    predict(scenario_from(STEP | drawn(0)))  # compiles
    asked = iter([scenario_from(STEP | cut | drawn(seed)) for seed in (1, 2, 3)])
    found = benchmark.pedantic(lambda: predict(next(asked)), rounds=3 if benchmark.enabled else 1)
    assert found.scenario.parallel.microbatches == 30
    if benchmark.stats:
        assert benchmark.stats.stats.median < 2


@pytest.mark.benchmark(group="30 training steps of 34B on 512 GPUs, 64 sequences of 131,072 tokens")
def test_training_steps(benchmark):
    def steps(count):
        return [predict(scenario_from(STEP | drawn(seed))) for seed in range(count)]

    steps(1)  # compiles
    found = benchmark.pedantic(lambda: steps(30), rounds=1)
    assert len({prediction.time_s for prediction in found}) == 30
    if benchmark.stats:
        assert benchmark.stats.stats.median < 60
