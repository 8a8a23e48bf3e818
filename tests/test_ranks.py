"""Single ranks: what they compute is a schedule, can be measured without the others, and is predicted."""

import json
import subprocess
import sys
from statistics import mean, median

import numpy as np
import pytest
from scripts import ROOT, load_script
from targets import check

from cpsim.calibrate.measurement import load
from cpsim.calibrate.recipes import manifest, points_file, runs_file
from cpsim.case.load import scenario_from
from cpsim.case.resolve import cluster_of, workload_of
from cpsim.models.attention.params import attention_seconds
from cpsim.models.profile import load_profile
from cpsim.schedule.schedule import COMMUNICATION_KINDS, Kind
from cpsim.strategies.steps.layer import plan_scenario

CASE = {"gpus": 4, "cluster": "h200-4", "tokens": 1024, "heads": 4, "kv_heads": 2, "head_dim": 64, "kernel": "fa2"}
ENV = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}


PAGE = load_script("studies/ranks/page.py")


@pytest.fixture(scope="module")
def measured():
    return [r for name in ("h200", "h200-2") for r in PAGE.ranks(runs_file(f"ranks-{name}.jsonl"))]


def schedule_of(strategy, pass_):
    scenario = scenario_from(CASE | {"strategy": strategy})
    return plan_scenario(scenario, workload_of(scenario), cluster_of(scenario), pass_)


@pytest.mark.parametrize("strategy", ["zigzag_ring", "allgather", "ulysses", "magi", "dcp", "hybrid_cp"])
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_a_ranks_computation_is_its_program_without_communication(strategy, pass_):
    schedule = schedule_of(strategy, pass_)
    for rank in range(4):
        alone = schedule.computation(rank)
        wanted = [op for op in schedule.project(rank) if op.kind not in COMMUNICATION_KINDS]
        made = alone.project(rank)
        assert [(op.name, op.lanes, op.accesses, op.nbytes, op.area) for op in made] == [
            (op.name, op.lanes, op.accesses, op.nbytes, op.area) for op in wanted
        ]
        number = {op.index: i for i, op in enumerate(wanted)}
        assert [op.deps for op in made] == [tuple(number[d] for d in op.deps if d in number) for op in wanted]


def test_sums_of_magi_count_the_rows_that_see_keys():
    """Of two documents, the keys of others that a stage brings are seen by some queries of a rank only."""
    scenario = scenario_from(CASE | {"strategy": "magi", "mask": "causal_document", "documents": [512, 512]})
    schedule = plan_scenario(scenario, workload_of(scenario), cluster_of(scenario), "fwd")
    row = 4 * (64 * 2 + 4)  # heads of an output and its log-sum-exp
    merges = schedule.nbytes[schedule.kind == Kind.MERGE]
    assert np.all(merges > 0)
    assert np.all(merges <= 256 * 3 * row)
    assert np.any(merges < 256 * 3 * row)


def test_what_ranks_of_up_to_96_compute_is_predicted(measured):
    assert {r.scenario.gpus for r in measured} == {4, 8, 16, 32, 96}
    long, short = (mean(abs(r.error) for r in measured if (r.measured_s >= 1e-3) == side) for side in (True, False))
    check("ranks, mean", long)
    check("ranks, shorter than 1 ms, mean", short)


def test_ranks_that_ran_later_are_predicted_too():
    """Drawn and measured after the cache had its model."""
    later = PAGE.ranks(runs_file("ranks-h200-3.jsonl"))
    check("ranks, later, mean", mean(abs(r.error) for r in later))


def test_ranks_that_no_model_had_seen_are_predicted_as_well():
    """The last problems of cases-2.jsonl, which ran when nothing was changed any more."""
    errors = [abs(r.error) for r in PAGE.ranks(runs_file("ranks-h200-4.jsonl"))]
    assert len(errors) == 90
    check("ranks, unseen, mean", mean(errors))
    check("ranks, unseen, worst", max(errors))


def test_ranks_of_problems_drawn_after_the_last_change_of_the_model_are_predicted():
    unseen = PAGE.ranks(runs_file("ranks-h200-5.jsonl"))
    errors = [r.error for r in unseen]
    assert len(errors) == 180
    check("ranks, unseen again, worst", max(map(abs, errors)))
    check("ranks, unseen again, mean", mean(map(abs, errors)))
    check("ranks, unseen again, signed", mean(errors))


@pytest.mark.parametrize(("pass_", "most"), [("fwd", 0.02), ("bwd", 0.012)])
def test_varlen_calls_of_one_sequence_that_no_fit_knows_are_predicted_and_are_not_dense_calls(pass_, most):
    assert "h200-kernels-varlen.jsonl" not in [
        path.rsplit("/")[-1] for path, about in manifest()["points"].items() if "fits" in about
    ]
    params, errors = load_profile("h200").attention_params("fa2", pass_), {True: [], False: []}
    for p in load(points_file("h200-kernels-varlen.jsonl")).of("attention"):
        if p["pass"] == pass_ and p["family"] == "one_varlen":
            call = ([0, 1], p["q_lens"], p["k_lens"], [p["causal"]], [p["num_heads"]], [p["num_kv_heads"]])
            for varlen, found in errors.items():
                seconds = attention_seconds(params, *map(np.array, call), p["head_dim"], np.array([varlen]))[0]
                found.append(abs(seconds / median(p["samples_s"]) - 1))
    assert len(errors[True]) == 138
    assert mean(errors[True]) < most < mean(errors[False])


STANDS_FOR_ONE = """
import sys
from cpsim.case.load import scenario_from
from cpsim.real.others.cpsim import make
from cpsim.real.run.node import Node

with Node(cpu=True) as node:
    node.stand_for(2, 4)
    ways = [{"strategy": name} for name in ("ring", "ulysses", "dcp")]
    ways += [{"strategy": "mesh", "knobs": {"keys": 2}}, {"strategy": "zigzag_ring", "knobs": {"backward": "queries"}}]
    for strategy in ways:
        executor = make(scenario_from(eval(sys.argv[1]) | strategy), "bwd", node).executor
        tensors = executor.tensors
        assert tensors.narrow.ne(0).double().mean() > 0.99 and tensors.narrow.isfinite().all(), strategy
        assert tensors.lse and all(lse.isfinite().all() for lse in tensors.lse.values()), strategy
        executor.program.rehearse()
"""


def test_a_rank_without_others_does_not_work_on_zeros():
    """Tensor cores that multiply zeros draw less power, so that the clock would stay higher than among others."""
    pytest.importorskip("torch")
    command = [sys.executable, "-c", STANDS_FOR_ONE, repr(CASE | {"tokens": 256})]
    run = subprocess.run(command, env=ENV, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


ALONE = """
import torch
import torch.distributed as dist
from cpsim.real.measure import alone

for rank, size in ((1, 4), (0, 2)):
    alone.join(rank, size, torch.device("cpu"))
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    sent, got = torch.zeros(6, 8), [torch.zeros(6, 8), torch.zeros(2, 3, 8, dtype=torch.bfloat16), torch.zeros(48)]
    ops = [dist.P2POp(dist.isend, sent, 1 - rank % 2), dist.P2POp(dist.irecv, got[0], 1 - rank % 2)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    dist.all_to_all_single(got[1], got[1].clone(), async_op=True).wait()
    dist.all_gather_into_tensor(got[2], sent)
    assert [tuple(x.shape) for x in got] == [(6, 8), (2, 3, 8), (48,)]
    assert all(x.isfinite().all() and x.float().std() > 0.5 for x in got) and not sent.any()
"""


def test_other_peoples_code_on_a_rank_alone_receives_random_numbers():
    pytest.importorskip("torch")
    run = subprocess.run([sys.executable, "-c", ALONE], env=ENV, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_what_ranks_compute_in_other_peoples_code_is_predicted():
    others = PAGE.ranks(runs_file("ranks-others-h200.jsonl"))
    assert {r.scenario.implementation for r in others} == {"ring-flash-attn", "yunchang", "torch"}
    check("ranks, others' code, mean", mean(abs(r.error) for r in others))


def test_ranks_are_measured_without_the_others(tmp_path):
    (tmp_path / "cases.jsonl").write_text(json.dumps(CASE | {"strategy": "zigzag_ring", "tokens": 256}) + "\n")
    command = [sys.executable, "-m", "cpsim.real.measure.ranks", "cases.jsonl", "--out", "ranks.jsonl", "--cpu"]
    pytest.importorskip("torch")
    run = subprocess.run([*command, "--seconds", "0.01"], cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    points = load(tmp_path / "ranks.jsonl").of("rank")
    assert [(p["pass"], p["rank"]) for p in points] == [(p, r) for p in ("fwd", "bwd") for r in (0, 2, 3)]
    assert all(min(p["samples_s"]) > 0 for p in points)
