"""Other people's schedules: valid, exact in numbers and bytes, and with the launches that their code makes."""

import json
from dataclasses import replace
from pathlib import Path

import numeric
import numpy as np
import pytest
from cases import ALL_MASKS, ALL_PASSES, HEADS, OTHERS, PLAIN_MASKS, cluster, one_in, workload

from cpsim import predict
from cpsim.case.load import scenario_from
from cpsim.cli.measure import _runnable
from cpsim.errors import InfeasibleError
from cpsim.models.network.collective import transfer_seconds
from cpsim.models.profile import load_profile
from cpsim.schedule.check import validate
from cpsim.schedule.schedule import MEMORY_BOUND_KINDS, STREAMS, WRITE, Kind
from cpsim.strategies import STRATEGIES, plan
from cpsim.strategies.others import CPSIM, IMPLEMENTATIONS, HeldRingCode

IDS = [f"{code.name}-{name}-{'-'.join(map(str, knobs.values()))}" for code, name, knobs in OTHERS]
every_other = pytest.mark.parametrize(("code", "name", "knobs"), OTHERS, ids=IDS)
some_others = pytest.mark.parametrize(("code", "name", "knobs"), one_in(3, OTHERS), ids=IDS)
every_pass = pytest.mark.parametrize("pass_", ALL_PASSES)
RING_FLASH_ATTN, TORCH, YUNCHANG = (IMPLEMENTATIONS[n] for n in ("ring-flash-attn", "torch", "yunchang"))
INTERNEVO, TE_THD = (IMPLEMENTATIONS[n] for n in ("internevo", "transformer-engine-thd"))
LONGCA, MAGI, TE = HELD = [IMPLEMENTATIONS[n] for n in ("longca-bench", "magi-attention", "transformer-engine")]
MERGES = Path(__file__).parents[1] / "data" / "points" / "h200" / "merges.jsonl"
"""Of studies.probes.profile_merges."""


@every_pass
@some_others
def test_schedules_are_valid_and_compute_dense_attention(code, name, knobs, pass_):
    count = 0
    for mask in ALL_MASKS:
        for documents in ((96,), (24, 48, 24), *(((48, 48),) if code is INTERNEVO else ())):
            for num_ranks in (4, 8) if code is INTERNEVO else (4, 6) if name == "usp" else (2, 3, 4):
                for heads in HEADS if num_ranks == 4 and mask in PLAIN_MASKS and name != "magi" else ("mha",):
                    case = workload(mask, documents, heads)
                    try:
                        schedule = plan(name, case, cluster(num_ranks), pass_, knobs, code)
                    except InfeasibleError:
                        continue
                    validate(schedule, case, pass_)
                    numeric.check(schedule, case, numeric.any_order(schedule, seed=len(schedule)))
                    count += 1
    assert count >= 6


PADDED = [entry for entry in OTHERS if entry[0].pads and entry[1] not in ("hybrid_cp", "magi")]


@every_pass
@pytest.mark.parametrize(("code", "name", "knobs"), PADDED, ids=[f"{c.name}-{n}-{k}" for c, n, k in PADDED])
def test_documents_are_padded_where_their_code_does(code, name, knobs, pass_):
    """Valid and exact for documents of any length: padding is stored and sent, and neither sees nor is seen."""
    ulysses = 4 if name == "ulysses" else knobs.get("ulysses", 1)
    for mask in PLAIN_MASKS:
        for documents in ((47,), "uneven", "short"):
            case = workload(mask, documents, "mha")
            padded = code.padded(case, 0 if name == "ulysses" else 4 // ulysses, ulysses)
            schedule = plan(name, case, cluster(4), pass_, knobs, code)
            validate(schedule, padded, pass_)
            numeric.check(schedule, padded, numeric.any_order(schedule, seed=len(schedule)))


def test_padding_makes_lengths_of_two_chunks_on_every_rank_of_a_ring():
    case = workload("causal_document", "uneven")
    assert LONGCA.padded(case, 2).padding == (3, 1, 0)
    assert LONGCA.padded(case, 2, ulysses=3).padding == (3, 1, 8)
    assert LONGCA.padded(case, ulysses=5).padding == (0, 0, 2)
    assert LONGCA.padded(workload("causal", "uneven"), 5).padding == (0, 0, 2)
    assert LONGCA.padded(case, 2).area() == case.area()
    assert RING_FLASH_ATTN.padded(case, 2) is case


def kernels(schedule, rank):
    """Kinds of the ops on a rank's compute stream, calls aside."""
    ops = [op for op in schedule.project(rank) if (rank, "compute") in op.lanes]
    return [op.kind for op in ops if op.kind != Kind.BARRIER]


# Launches of one iteration on rank 0 of 4 GPUs, as the profiler shows them: attention as one, communication aside.
# Striped: profiled on CPUs, where it runs the operators of zigzag and cuts its log-sum-exp in three steps, not once.
PROFILED = [
    (RING_FLASH_ATTN, "zigzag_ring", "causal", "fwd", 1 + 4 + 3 * 6 + 1),
    (RING_FLASH_ATTN, "zigzag_ring", "causal", "bwd", 1 + 4 + 4 * 3 + 3),
    (RING_FLASH_ATTN, "striped_ring", "causal", "fwd", 1 + 4 + 3 * 6 + 1),
    (RING_FLASH_ATTN, "striped_ring", "causal", "bwd", 3 + 4 + 4 * 3 + 3),
    (RING_FLASH_ATTN, "ring", "full", "fwd", 1 + 4 + 3 * 4 + 1),
    (RING_FLASH_ATTN, "ring", "causal", "fwd", 1 + 1 + 1),
    (YUNCHANG, "ulysses", "causal", "fwd", 3 + 1 + 2),
    (YUNCHANG, "ulysses", "causal", "bwd", 1 + 1 + 3 * 2),
    (YUNCHANG, "usp", "causal", "fwd", 3 + (1 + 2 + 6 + 1) + 2),
    (YUNCHANG, "usp", "causal", "bwd", 1 + (1 + 2 + 2 * 3 + 3) + 3 * 2),
    (TORCH, "zigzag_ring", "causal", "fwd", 2 + 3 + 4 + 1 + 3 * 11 + 1),
    (TORCH, "ring", "full", "fwd", 2 + 3 + 4 + 1 + 3 * 9 + 1),
]


@pytest.mark.parametrize(("code", "name", "mask", "pass_", "count"), PROFILED)
def test_launches_are_those_that_were_profiled(code, name, mask, pass_, count):
    case = workload(mask, (4096,), num_heads=32, num_kv_heads=8, head_dim=128)
    knobs = {"ulysses": 2} if name == "usp" else {}
    assert len(kernels(plan(name, case, cluster(4), pass_, knobs, code), 0)) == count


@every_pass
@pytest.mark.parametrize(("ring", "mask"), [("zigzag", "causal"), ("basic", "causal"), ("basic", "full")])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rings_of_one_are_valid_and_compute_dense_attention(ring, mask, num_ranks, pass_):
    case, knobs = workload(mask, (96,), "mha"), {"ulysses": num_ranks, "ring": ring}
    schedule = plan("usp", case, cluster(num_ranks), pass_, knobs, YUNCHANG)
    validate(schedule, case, pass_)
    numeric.check(schedule, case, numeric.any_order(schedule, seed=len(schedule)))


def test_a_ring_of_one_casts_its_only_result_and_sends_gradients_of_keys_to_itself():
    case, knobs = workload("causal", (4096,), num_heads=32, num_kv_heads=8, head_dim=128), {"ulysses": 4}
    forward, backward = (plan("usp", case, cluster(4), pass_, knobs, YUNCHANG) for pass_ in ALL_PASSES)
    exchanges = forward.kind == Kind.ALL_TO_ALL, backward.kind == Kind.ALL_TO_ALL
    assert [int(found.sum()) for found in exchanges] == [4, 4]
    assert not (forward.kind == Kind.TRANSFER).any()
    assert len(kernels(forward, 0)) == 3 + (1 + 1 + 1) + 2  # a cast to fp32, and one back
    assert len(kernels(backward, 0)) == 1 + (1 + 1 + 3 + 3) + 3 * 2  # softmax_lse1; three casts, and three back
    sent = np.flatnonzero(backward.kind == Kind.TRANSFER)
    ends = backward.lane_rank[backward.lane_start[sent][:, None] + [0, 1]]
    assert ends.tolist() == [[rank, rank] for rank in range(4)]
    assert set(backward.nbytes[sent].tolist()) == {4096 * 2 * (8 // 4) * 128 * 4}  # fp32, all tokens
    whole = backward.nbytes[exchanges[1]].sum() * 3 / 4
    assert backward.bytes_sent().tolist() == [whole] * 4


def test_what_a_gpu_sends_to_itself_is_on_no_link_and_said_to_be_an_estimate():
    case = {
        "implementation": "yunchang",
        "kernel": "fa2",
        "strategy": "usp",
        "knobs": {"ulysses": 4},
        "gpus": 4,
        "cluster": "h200-4",
        "tokens_per_gpu": 4096,
        "heads": 32,
        "kv_heads": 8,
    }
    said = predict(scenario_from({**case, "pass": "bwd"})).notes
    assert any(note.startswith("messages of a GPU to itself, not measured") for note in said)
    assert not any("to itself" in note for note in predict(scenario_from({**case, "pass": "fwd"})).notes)


@pytest.mark.parametrize(
    ("code", "name", "knobs", "gpus", "count"),
    [
        (RING_FLASH_ATTN, "zigzag_ring", {}, 4, 1 + 4 + (4 + 4 + 11) + 1),
        (RING_FLASH_ATTN, "striped_ring", {}, 4, 1 + 4 + (4 + 4 + 11) + 1),
        (YUNCHANG, "usp", {"ulysses": 2}, 8, 3 + 1 + 4 + (4 + 4 + 11) + 1 + 2),
        (YUNCHANG, "usp", {"ulysses": 2}, 16, 3 + 1 + 8 + (4 * 4 + 3 * 11) + 1 + 2),
    ],
)
def test_tails_are_merged_op_by_op_where_whole_outputs_were_merged_twice(code, name, knobs, gpus, count):
    """Of the rank in the middle, as `cpsim.real.measure.profile_implementations --alone` shows it on one GPU."""
    case = workload("causal", (4096,), num_heads=32, num_kv_heads=8, head_dim=128)
    assert len(kernels(plan(name, case, cluster(gpus), "fwd", knobs, code), gpus // 2)) == count


def test_tails_that_are_tensors_of_their_own_are_merged_in_one_kernel():
    case = workload("causal_document", (2048, 2048), num_heads=32, num_kv_heads=8, head_dim=128)
    schedule = plan("zigzag_ring", case, cluster(4), "fwd", {}, RING_FLASH_ATTN)
    assert [kernels(schedule, rank).count(Kind.MERGE) for rank in range(4)] == [3] * 4


# Launches of rank 1 of 4 GPUs that follow from the source; where ours zeroes a sum, Transformer Engine copies a half.
READ = [
    ("zigzag_ring", "causal", "fwd", 1 + 4 + 4 + 4),  # join, kernels, log-sum-exps, outputs
    ("zigzag_ring", "causal", "bwd", 2 + 4 + 5 + 4 * 2),  # half log-sum-exp and keys, kernels, dq, dk and dv
    ("zigzag_ring", "causal_document", "fwd", 3 + 4 * 3 + (2 + 2) + 5 + 4),  # and lengths, halves, zeros
    ("zigzag_ring", "causal_document", "bwd", 2 + 4 + (2 + 2 * 3) + 5 + 4 * 2),
    ("allgather", "causal", "fwd", 2 + 2 + 2),
    ("allgather", "causal", "bwd", 2 + 2 + 2 + 3 * 2 + 2),
    ("ulysses", "causal", "fwd", 3 * 2 + 1 + 2),
    ("ulysses", "causal", "bwd", 2 + 1 + 3 * 2),
    ("usp", "full", "fwd", 3 * 2 + (1 + 2 + 2 + 2) + 2),
    ("usp", "full", "bwd", 2 * 2 + (1 + 2 + 2 + 2 * 2) + 3 * 2),
]


@pytest.mark.parametrize(("name", "mask", "pass_", "count"), READ)
def test_launches_of_transformer_engine_are_those_of_its_source(name, mask, pass_, count):
    documents = (1024, 3072) if "document" in mask else (4096,)
    case = workload(mask, documents, num_heads=32, num_kv_heads=8, head_dim=128)
    knobs = {"ulysses": 2} if name == "usp" else {}
    assert len(kernels(plan(name, case, cluster(4), pass_, knobs, TE), 1)) == count


@pytest.mark.parametrize("documents", [(4096,), (1024, 1024, 2048)], ids=("one", "three"))
def test_transformer_engines_fork_orders_tensors_document_by_document(documents):
    """Launches of rank 1 of 4 GPUs in groups of 2, whose place in the ring has a step of tail queries."""
    case = workload("causal_document", documents, num_heads=32, num_kv_heads=8, head_dim=128)
    there, back = 1 + 2 * len(documents) + 1, len(documents) + 1 + 1
    for pass_, count in (
        ("fwd", 3 * there + 2 + 8 + 1 + 2 * (2 + 1) + 1 + (3 + 1) + 1 + 2 + back),
        ("bwd", 2 * there + 2 + 3 + 1 + 2 * (1 + 1) + 3 + 3 + 2 + 1 + 2 + 3 * back),
    ):
        schedule = plan("usp", case, cluster(4), pass_, {"ulysses": 2}, TE_THD)
        assert len(kernels(schedule, 1)) == count
        ordered = sum(op.nbytes for op in schedule.project(1) if op.kind == Kind.ELEMENTWISE)
        q, kv = (2 * 2 * 1024 * heads * 128 for heads in (32, 2 * 8))  # read and written
        assert ordered == (4 * (q + kv) + 3 * q if pass_ == "fwd" else 4 * 2 * q + 3 * (q + kv))


@pytest.mark.parametrize(("mask", "whole"), [("causal", False), ("causal_blockwise", True)])
def test_transformer_engines_fork_runs_whole_shards_under_masks_that_it_does_not_know(mask, whole):
    """Outputs of every step are merged over all 24 rows and 4 heads of a rank, though blocks see few others."""
    schedule = plan("usp", workload(mask, (96,)), cluster(8), "fwd", {"ulysses": 2}, TE_THD)
    for rank in range(8):
        merges = [op for op in schedule.project(rank) if op.kind in (Kind.MERGE, Kind.ACCUMULATE)]
        rows = [op.nbytes // (3 * 2 * 4 * 4) for op in merges]
        assert rows == [24 if whole or step <= rank // 2 else 12 for step in range(4)]


@pytest.mark.parametrize("inner", [1, 2, 4])
def test_launches_of_internevo_are_those_of_its_source(inner):
    """Rank 2 of 8 GPUs in groups of 2, whose place in the ring has a step of key heads and two of tail queries."""
    case = workload("causal_document", (2048, 2048), num_heads=32, num_kv_heads=8, head_dim=128)
    for pass_, count in (
        ("fwd", (2 * 2 + 2) + 2 + 4 + (1 + 4 + 11 + 11) + 1 + (2 + 1)),
        ("bwd", (2 + 1) + 4 + 4 + 4 + 4 * 2 + 3 + (2 * 2 + 1) + 2 * (2 + 1)),
    ):
        schedule = plan("loongtrain", case, cluster(8), pass_, {"ulysses": 2, "inner_ring": inner}, INTERNEVO)
        assert len(kernels(schedule, 2)) == count


@pytest.mark.parametrize("changing", [False, True])
def test_merges_are_fused_on_the_ranks_where_a_profiler_saw_it(changing):
    """ring-flash-attn in training, whose shapes stay, and LoongTrain's in a benchmark of documents."""
    _, *rows = map(json.loads, MERGES.read_text(encoding="utf-8").splitlines())
    case, knobs = workload("causal", (8192,), num_heads=4, num_kv_heads=2), {"ulysses": 2} if changing else {}
    code, name = (INTERNEVO, "loongtrain") if changing else (RING_FLASH_ATTN, "zigzag_ring")
    for ring in (2, 4, 16):
        schedule = plan(name, case, cluster(ring * (2 if changing else 1)), "fwd", knobs, code)
        seen = [row["fused"][-1] for row in rows if (row["ring"], row["changing"]) == (ring, changing)]
        half = 8192 // ring // 2 * (2 if changing else 4) * case.head_dim  # elements of a rank's tails
        ranks = range(0, schedule.num_ranks, schedule.num_ranks // ring)
        merges = [[op.nbytes // half for op in schedule.project(r) if op.kind == Kind.MERGE] for r in ranks]
        assert [sum(x in (10, 20) for x in rank) for rank in merges] == seen  # op by op they begin with a cast
        assert {len(rank) for rank in merges} == {ring - 1}


@pytest.mark.parametrize("inner", [1, 2, 4])
def test_internevo_has_process_groups_of_its_own_for_gradients_which_are_narrow_after_the_first_inner_ring(inner):
    case = workload("causal", (96,), "mha")
    schedule = plan("loongtrain", case, cluster(8), "bwd", {"ulysses": 2, "inner_ring": inner}, INTERNEVO)
    moves = [schedule.op(i) for i in np.flatnonzero(schedule.kind == Kind.TRANSFER).tolist()]
    gradients = [op for op in moves if not is_of_keys(op)]
    assert {op.lanes[0][1] for op in gradients} == {"grad_send"}
    assert not {op.lanes[0][1] for op in moves if is_of_keys(op)} & {"grad_send"}
    narrow = min(op.nbytes for op in moves if is_of_keys(op))
    wide = inner if inner == 4 else inner - 1
    assert [{op.nbytes // narrow for op in gradients if op.step == s} for s in range(4)] == [
        {2 if s < wide else 1} for s in range(4)
    ]


def test_a_striped_ring_of_others_cuts_its_log_sum_exp_in_every_step_with_later_keys():
    case = workload("causal", (4096,))
    schedule = plan("striped_ring", case, cluster(4), "bwd", {}, RING_FLASH_ATTN)
    copies = [kernels(schedule, rank).count(Kind.COPY) for rank in range(4)]
    assert copies == [3 + 3, 3 + 2, 3 + 1, 3]


@pytest.mark.parametrize("pass_", ALL_PASSES)
def test_rings_of_others_run_in_lockstep_on_one_communication_stream(pass_):
    """A transfer starts after the kernels of the step before; gradients share the lanes of keys and values."""
    case = workload("causal", (96,))
    schedule = plan("zigzag_ring", case, cluster(4), pass_, {}, RING_FLASH_ATTN)
    assert {STREAMS[s] for s in np.unique(schedule.lane_stream)} == {"compute", "send", "recv"}
    moves = np.flatnonzero((schedule.kind == Kind.TRANSFER) & (schedule.step > 0))
    for op in map(schedule.op, moves.tolist()):
        before = [schedule.op(d) for d in op.deps]
        assert {d.lanes[0][0] for d in before if d.lanes[0][1] == "compute"} == {rank for rank, _ in op.lanes}


@pytest.mark.parametrize("code", [RING_FLASH_ATTN, TORCH], ids=("ring-flash-attn", "torch"))
@pytest.mark.parametrize("pass_", ALL_PASSES)
def test_keys_of_later_steps_wait_for_the_kernels_that_are_launched_with_them(code, pass_):
    """Attention fills the GPUs of both ends before a transfer of default priority does."""
    schedule = plan("zigzag_ring", workload("causal", (96,)), cluster(4), pass_, {}, code)
    attends = Kind.ATTENTION if pass_ == "fwd" else Kind.ATTENTION_BACKWARD
    keys = [op for op in map(schedule.op, range(len(schedule))) if op.kind == Kind.TRANSFER and is_of_keys(op)]
    assert {op.step for op in keys} == {0, 1, 2}
    for op in keys:
        kernels_before = [schedule.op(d) for d in op.deps if schedule.kind[d] == attends]
        waits = {d.lanes[0][0] for d in kernels_before if d.step == op.step}
        assert waits == ({rank for rank, _ in op.lanes} if op.step else set())


def is_of_keys(op):
    """Whether a transfer carries keys, not gradients."""
    return not op.accesses[0][2].startswith("d")


def test_two_messages_of_a_batch_run_on_the_channels_of_one():
    rings = load_profile("h200").collective
    one, two = (float(transfer_seconds(rings, 2**28, 4, messages=number)) for number in (1, 2))
    assert two == pytest.approx(2 * float(transfer_seconds(rings, 2**27, 4)), rel=0.05)
    assert two > 1.5 * one
    assert float(transfer_seconds(rings, 2**26, 4, messages=2)) == float(transfer_seconds(rings, 2**26, 4))


@every_pass
@every_other
def test_others_send_what_ours_send(code, name, knobs, pass_):
    """Keys and values in the working type, gradients of rings in fp32, those of an all-gather in the working type."""
    if isinstance(code.ring, HeldRingCode) and pass_ == "bwd" and name != "ulysses":
        pytest.skip("gradients in the working type: see the messages of its rings below")
    case = workload("full" if knobs.get("layout") == "contiguous" else "causal", (96,), "mha")
    like = "ring" if code is TORCH else name  # its all-gather is a ring that gathers
    knobs = {"variant": "released", "solver": "greedy"} if name == "dcp" else knobs
    same = knobs if name in ("usp", "loongtrain", "magi", "dcp") else {}
    ours = plan(like, case, cluster(4), pass_, same).bytes_sent()
    sent = plan(name, case, cluster(4), pass_, knobs, code).bytes_sent()
    narrow = pass_ == "bwd" and (
        (code is RING_FLASH_ATTN and name == "allgather") or (code is INTERNEVO and knobs.get("inner_ring") == 1)
    )  # InternEvo casts gradients after its first inner ring
    assert sent == pytest.approx(ours * 2 / 3 if narrow else ours)


CUDNN = {
    "kernel": "cudnn",
    "strategy": "allgather",
    "gpus": 8,
    "cluster": "dgx-b200",
    "tokens_per_gpu": 4096,
    "heads": 64,
    "kv_heads": 8,
    "pass": "fwd",
}


def test_cudnn_runs_what_it_can_where_it_is_not_called_through_pytorch():
    """Causal masks of fewer queries than keys, and documents: priced from what was measured, and said to be."""
    documents = {"mask": "causal_document", "documents": [20000, 12768]}
    for case, words in (({}, {"fewer queries"}), (documents, {"fewer queries", "several sequences"})):
        said = predict(scenario_from({**CUDNN, **case, "implementation": "magi-attention"})).notes
        assert {word for word in ("fewer queries", "several sequences") if any(word in note for note in said)} == words
    said = predict(scenario_from({**CUDNN, "strategy": "ulysses", "implementation": "magi-attention"})).notes
    assert not any("estimated" in note for note in said)
    with pytest.raises(InfeasibleError, match="kernel cudnn has no causal call with"):
        predict(scenario_from({**CUDNN, "knobs": {"layout": "contiguous"}}))
    with pytest.raises(InfeasibleError, match="kernel cudnn takes sequences of one length a call"):
        predict(scenario_from({**CUDNN, **documents, "strategy": "ulysses"}))


def test_packed_documents_cost_cudnn_their_own_blocks_and_launched_ones_that_have_none():
    """About what their pairs say, and a little more where blocks of the short one are launched for the long one."""
    cost = {}
    for name, documents in {"whole": [32768], "halves": [16384, 16384], "uneven": [28672, 4096]}.items():
        case = {**CUDNN, "strategy": "ulysses", "implementation": "magi-attention", "mask": "full_document"}
        cost[name] = predict(scenario_from({**case, "documents": documents})).parts_s["attention fwd"]
    assert cost["halves"] / cost["whole"] == pytest.approx(1 / 2, rel=0.05)
    assert cost["uneven"] / cost["whole"] == pytest.approx((28**2 + 4**2) / 32**2, rel=0.05)


def test_magi_attention_calls_cudnn_without_gathers_and_with_keys_of_every_query_head():
    case = workload("causal", (4096,), num_heads=8, num_kv_heads=2, head_dim=128)
    theirs = MAGI.calling("cudnn")
    assert MAGI.calling("fa3") is MAGI
    counts = {}
    for code in (MAGI, theirs):
        for pass_ in ALL_PASSES:
            ops = kernels(plan("ulysses", case, cluster(2), pass_, {}, code), 0)
            counts[code.direct, pass_] = len(ops)
    assert counts[(), "fwd"] - counts[("cudnn",), "fwd"] == 3 + 4  # gathers of q, k, v; zeros and scatters
    ring = plan("zigzag_ring", case, cluster(2), "bwd", {}, theirs)
    mine = [op for op in ring.project(0) if (0, "compute") in op.lanes]
    around = [mine[i - 2 : i + 3] for i, op in enumerate(mine) if op.kind == Kind.ATTENTION_BACKWARD]
    assert len(around) == 2
    each = 2048 * (8 + 2) * 128 * 2  # bytes of all keys of a shard, read with 2 heads and written with 8, and back
    for *before, _, one, other in around:
        assert [op.nbytes for op in (*before, one, other)] == [each] * 4


@pytest.mark.parametrize(
    ("code", "name", "num_ranks", "changes", "reason"),
    [
        (RING_FLASH_ATTN, "ulysses", 2, {}, "ring-flash-attn has no ulysses; it has ring, zigzag_ring"),
        (RING_FLASH_ATTN, "ring", 1, {}, "runs on 2 GPUs or more, got 1"),
        (RING_FLASH_ATTN, "zigzag_ring", 2, {"mask": "full"}, "runs masks causal, causal_document, got full"),
        (
            RING_FLASH_ATTN,
            "zigzag_ring",
            2,
            {"mask": "causal_document", "documents": "uneven"},
            "needs document lengths divisible by 4, got 5",
        ),
        (RING_FLASH_ATTN, "striped_ring", 2, {"mask": "causal_document"}, "runs masks causal, got causal_document"),
        (RING_FLASH_ATTN, "striped_ring", 4, {"documents": (46,)}, "needs tokens divisible by 4, got 46"),
        (TORCH, "striped_ring", 2, {}, "torch has no striped_ring"),
        (YUNCHANG, "usp", 4, {}, "got 2 kv_heads and degree 4; set knob ulysses"),
        (YUNCHANG, "usp", 4, {"mask": "causal_document"}, "usp of yunchang runs masks full, causal"),
        (YUNCHANG, "ulysses", 4, {}, "does not replicate key-value heads, .* got 2 kv_heads on 4 GPUs"),
        (TORCH, "allgather", 2, {"mask": "full"}, "layout zigzag runs mask causal, got full; use another layout"),
        (TORCH, "zigzag_ring", 4, {"documents": (44,)}, "needs tokens divisible by 8, got 44"),
        (
            TE,
            "zigzag_ring",
            2,
            {"mask": "causal_document", "documents": "uneven"},
            "needs document lengths divisible by 4, got 5",
        ),
        (TE, "ulysses", 2, {"mask": "causal_document"}, "transformer-engine runs masks full, causal, full_sliding"),
        (TE, "zigzag_ring", 2, {"mask": "causal_sliding_window"}, "runs masks full, causal, full_document, causal_doc"),
        (TE, "ulysses", 2, {"mask": "causal_sliding_window", "documents": (512, 512)}, "over one document, got 2"),
        (TE, "ulysses", 4, {}, "does not replicate key-value heads, .* got 2 kv_heads on 4 GPUs"),
        (TE, "allgather", 2, {"mask": "full_document"}, "runs masks full, causal, .*got full_document"),
        (TE, "usp", 2, {}, "planned for rings of 2 GPUs or more, got degree 2 on 2 GPUs"),
        (TE, "loongtrain", 4, {}, "transformer-engine has no loongtrain"),
    ],
)
@every_pass
def test_what_others_cannot_run_says_why(code, name, num_ranks, changes, reason, pass_):
    with pytest.raises(InfeasibleError, match=reason):
        plan(name, workload(**changes), cluster(num_ranks), pass_, {}, code)


def test_predictions_of_others_name_their_kernels_and_pay_for_their_launches():
    fields = {
        "strategy": "zigzag_ring",
        "kernel": "fa2",
        "gpus": 4,
        "cluster": "h200-4",
        "tokens_per_gpu": 1024,
        "heads": 32,
        "kv_heads": 8,
        "pass": "fwd",
    }
    ours = predict(scenario_from(fields))
    others = predict(scenario_from({**fields, "implementation": "ring-flash-attn"}))
    assert others.parts_s["host"] > ours.parts_s["host"]
    assert others.time_s > ours.time_s
    with pytest.raises(InfeasibleError, match="ring-flash-attn runs kernels fa2, got fa4"):
        predict(scenario_from({**fields, "implementation": "ring-flash-attn", "kernel": "fa4"}))


@pytest.mark.parametrize("name", ["zigzag_ring", "ulysses", "allgather", "usp"])
def test_transformer_engine_is_slower_than_ours_and_faster_than_eager_merges(name):
    """Everything about the case is the same but launches and sweeps around the kernels."""
    fields = {
        "strategy": name,
        "kernel": "fa2",
        "gpus": 4,
        "cluster": "h200-4",
        "tokens_per_gpu": 8192,
        "heads": 32,
        "kv_heads": 8,
        "knobs": {"ulysses": 2} if name == "usp" else {},
    }
    apart = [
        sum(predict(scenario_from({**fields, "implementation": i, "pass": p})).time_s for p in ALL_PASSES)
        for i in ("cpsim", TE.name)
    ]
    assert 1.005 * apart[0] < apart[1] < 1.1 * apart[0]
    if name == "zigzag_ring":
        ours, theirs = (predict(scenario_from({**fields, "implementation": i})) for i in ("cpsim", TE.name))
        assert theirs.time_s < predict(scenario_from({**fields, "implementation": "ring-flash-attn"})).time_s
        assert predict(scenario_from({**fields, "implementation": TE.name, "kernel": "cudnn"})).time_s < ours.time_s
        with pytest.raises(InfeasibleError, match="transformer-engine runs kernels cudnn, fa2, fa3, got fa4"):
            predict(scenario_from({**fields, "implementation": TE.name, "kernel": "fa4"}))


def test_code_that_was_only_read_is_left_out_of_real_runs(tmp_path, capsys):
    fields = {
        "strategy": "zigzag_ring",
        "kernel": "fa3",
        "gpus": 2,
        "cluster": "dgx-h100",
        "tokens": 64,
        "heads": 8,
        "kv_heads": 8,
    }
    file = tmp_path / "cases.jsonl"
    codes = "magi-attention", "torch"
    file.write_text("".join(json.dumps(fields | {"implementation": code}) + "\n" for code in codes))
    assert [s.implementation for s in _runnable(file, 2, 1, cpu=True)] == ["torch"]
    said = capsys.readouterr().err
    assert "implementation: expected cpsim, ring-flash-attn, yunchang, torch, flash-attn; got 'magi-attention'" in said


def test_every_strategy_of_ours_has_the_code_argument_or_is_nobody_elses():
    for code in IMPLEMENTATIONS.values():
        for name in code.strategies or ():
            if name in STRATEGIES:
                with pytest.raises(InfeasibleError):
                    plan(name, workload(), cluster(2 if name == "none" else 1), "fwd", {}, code)
    assert CPSIM.strategies is None


# --- LongCA-bench and MagiAttention at their benchmark's sizes: 8192 tokens a GPU, heads 64:8, bf16 ---

KV_BYTES = 2 * 8192 * 8 * 128 * 2
"""One message of keys and values: 33.5 MB."""
Q_BYTES = 8192 * 64 * 128 * 2
every_held = pytest.mark.parametrize("code", HELD, ids=lambda code: code.name)


def benchmark(name, gpus, pass_="fwd", mask="causal", code=MAGI):
    case = workload(mask, (8192 * gpus,), num_heads=64, num_kv_heads=8, head_dim=128)
    return plan(name, case, cluster(gpus), pass_, {}, code)


def messages(schedule, rank):
    """Bytes of the transfers that a rank sends, and their streams, in order."""
    ops = [op for op in schedule.project(rank) if op.kind == Kind.TRANSFER and op.lanes[0][0] == rank]
    return [op.nbytes for op in ops], [op.lanes[0][1] for op in ops]


@every_held
@pytest.mark.parametrize("gpus", [8, 16])
def test_rings_send_keys_and_gradients_in_one_message_against_the_forward_direction(code, gpus):
    for rank in (0, gpus - 1):
        assert messages(benchmark("zigzag_ring", gpus, code=code), rank)[0] == [KV_BYTES] * (gpus - 1)
        back = benchmark("zigzag_ring", gpus, "bwd", code=code)
        assert messages(back, rank)[0] == [KV_BYTES, *[2 * KV_BYTES] * (gpus - 2), KV_BYTES]
        target = {op.lanes[1][0] for op in back.project(rank) if op.kind == Kind.TRANSFER and op.lanes[0][0] == rank}
        assert target == {(rank - 1) % gpus}


def test_messages_and_sweeps_include_padding():
    """Documents that lack 28 and 100 tokens for whole chunks on 64 GPUs; the kernels' work is what it is."""
    case = workload("causal_document", (8192 * 40 - 28, 8192 * 24 - 100), num_heads=64, num_kv_heads=8, head_dim=128)
    schedule = plan("zigzag_ring", case, cluster(64), "fwd", {}, MAGI)
    assert messages(schedule, 5)[0] == [KV_BYTES] * 63
    assert schedule.tiles.area.sum() == case.area()


@pytest.mark.parametrize(("gpus", "windows", "inner"), [(16, 1, 2), (32, 2, 2), (64, 2, 4)])
def test_double_rings_send_gradients_apart_and_between_inner_rings_by_two_hops(gpus, windows, inner):
    sent, streams = messages(benchmark("loongtrain", gpus), 0)
    assert streams.count("outer_send") == windows - 1
    assert len(sent) == windows - 1 + windows * (inner - 1)
    sent, streams = messages(benchmark("loongtrain", gpus, "bwd"), 0)
    assert streams.count("grad_send") == windows * inner + (windows if windows > 1 else 0)
    assert set(sent) == {KV_BYTES}


@pytest.mark.parametrize(("gpus", "megabytes"), [(8, 264), (16, 315), (32, 390), (64, 528)])
@every_pass
def test_ulysses_sends_replicated_keys(gpus, megabytes, pass_):
    assert benchmark("ulysses", gpus, pass_).bytes_sent()[0] / 1e6 == pytest.approx(megabytes, abs=1)


def test_usp_exchanges_as_much_on_any_number_of_nodes():
    for gpus in (8, 16, 32):
        schedule = benchmark("usp", gpus)
        exchanged = schedule.nbytes[(schedule.kind == Kind.ALL_TO_ALL)].reshape(4, -1)[:, 0].sum() * 7 / 8
        assert exchanged / 1e6 == pytest.approx(264, abs=1)


@every_held
def test_partial_outputs_are_merged_after_the_last_step(code):
    schedule = benchmark("zigzag_ring", 8, code=code)
    for rank in (0, 7):
        kinds = kernels(schedule, rank)
        last = len(kinds) - kinds[::-1].index(Kind.ATTENTION)
        assert kinds[:last].count(Kind.MERGE) == 0
        assert kinds[last:].count(Kind.MERGE) == 7
        assert kinds.count(Kind.ATTENTION) == 8


@pytest.mark.parametrize(("code", "width", "in_loop", "ahead"), [(MAGI, 4, 0, 1), (LONGCA, 8, 6, 2)])
def test_longca_bench_corrects_log_sum_exps_in_the_loop_and_in_fp64(code, width, in_loop, ahead):
    """Six kernels for every partial output but the first; transfers wait for kernels one step ago, or two."""
    schedule = benchmark("zigzag_ring", 8, code=code)
    ops = [op for op in schedule.project(0) if op.lanes[0] == (0, "compute") and op.step > 0]
    sizes = {3 * width * 64 * rows for rows in (4096, 8192)}
    last = max(i for i, op in enumerate(ops) if op.kind == Kind.ATTENTION)
    assert sum(op.nbytes in sizes for op in ops[:last]) == 6 * in_loop
    assert sum(op.nbytes in sizes for op in ops) == 6 * 7
    sent = next(op for op in schedule.project(0) if op.kind == Kind.TRANSFER and op.lanes[0][0] == 0 and op.step == 4)
    assert {schedule.op(d).step for d in sent.deps if schedule.op(d).lanes[0][1] == "compute"} == {4 - ahead}


def test_rings_of_two_send_in_one_direction_after_the_other():
    schedule = benchmark("usp", 16, "bwd")
    moves = [schedule.op(i) for i in np.flatnonzero(schedule.kind == Kind.TRANSFER).tolist()]
    for there in (op for op in moves if op.lanes[0][0] < op.lanes[1][0]):
        back = next(op for op in moves if op.step == there.step and op.lanes[0][0] == there.lanes[1][0])
        assert there.index in back.deps


def test_transformer_engine_batches_what_rings_of_two_send():
    """Both directions of a step at once; and beside rings, outputs travel again with their gradients."""
    case = workload("causal", (16384,), num_heads=64, num_kv_heads=8, head_dim=128)
    forward, backward = (plan("usp", case, cluster(4), pass_, {"ulysses": 2}, TE) for pass_ in ALL_PASSES)
    moves = set(np.flatnonzero(backward.kind == Kind.TRANSFER).tolist())
    assert len(moves) == 2 * 4
    for move in map(backward.op, moves):
        assert all(backward.op(d).step < move.step for d in set(move.deps) & moves)
    exchanged = [
        schedule.nbytes[schedule.kind == Kind.ALL_TO_ALL].reshape(-1, 2).sum(axis=0) for schedule in (forward, backward)
    ]
    q, kv = 4096 * 64 * 128 * 2, 2 * 4096 * 8 * 128 * 2
    assert [n.tolist() for n in exchanged] == [[2 * q + kv] * 2, [3 * q + kv] * 2]


@every_pass
def test_transformer_engine_orders_tensors_while_others_travel(pass_):
    """Nothing on the compute stream waits for an all-to-all before all tensors that leave together have left."""
    schedule = plan("ulysses", workload("causal", (96,), "mha"), cluster(4), pass_, {}, TE)
    ops = schedule.project(0)
    waiting = [
        any(schedule.op(d).kind == Kind.ALL_TO_ALL for d in op.deps) for op in ops if op.kind == Kind.ELEMENTWISE
    ]
    three, one = [False, False, False, True, True, True], [False, True]
    assert waiting == ([*three, *one] if pass_ == "fwd" else [*one, *three])


def test_transformer_engine_adds_gradients_of_gathered_keys_that_were_seen():
    for mask, share in (("full", 1), ("causal", (2 * 8 + 1) / (4 * 8))):
        ops = benchmark("allgather", 8, "bwd", mask, TE).project(3)
        added = sum(op.nbytes for op in ops if op.kind == Kind.ACCUMULATE)
        assert added == 2 * 3 * 8 * KV_BYTES * share


def test_every_kernel_is_wrapped_in_gathers_and_scatters():
    """A full step passes over queries and outputs five times, and twice over keys and values: 0.7 GB."""
    schedule = benchmark("zigzag_ring", 8, mask="full")
    ops = [op for op in schedule.project(0) if op.step == 3 and op.lanes[0] == (0, "compute")]
    swept = sum(op.nbytes for op in ops if op.kind in (Kind.SCATTER, Kind.COPY) and op.nbytes >= KV_BYTES)
    assert swept == 5 * Q_BYTES + 2 * KV_BYTES


def test_an_all_gather_passes_over_all_keys_for_each_of_its_two_kernels():
    for gpus in (8, 64):
        ops = benchmark("allgather", gpus).project(0)
        assert [op.kind for op in ops].count(Kind.ATTENTION) == 2
        over_keys = sum(op.nbytes for op in ops if op.kind in MEMORY_BOUND_KINDS and op.nbytes == gpus * KV_BYTES)
        assert over_keys == (2 + 2 * 2) * gpus * KV_BYTES


def test_timed_backward_passes_go_on_to_the_projections():
    """Gradients of their weights, 0.17 TFLOP a GPU; LongCA-bench's also of their inputs, and of all tokens."""
    for code, teraflops in ((MAGI, 0.17), (LONGCA, 0.34)):
        schedule = benchmark("zigzag_ring", 8, "bwd", code=code)
        for rank in (0, 7):
            ops = [op for op in schedule.project(rank) if op.kind == Kind.GEMM]
            assert sum(op.nbytes for op in ops) / 1e12 == pytest.approx(teraflops, abs=0.005)
            assert min(op.index for op in ops) > max(
                op.index for op in schedule.project(rank) if op.kind == Kind.ATTENTION_BACKWARD
            )
        assert not (benchmark("zigzag_ring", 8, code=code).kind == Kind.GEMM).any()


@every_pass
@pytest.mark.parametrize(("num_ranks", "per_node"), [(4, 2), (8, 4), (6, 3)])
def test_magi_relays_keys_inside_nodes(num_ranks, per_node, pass_):
    """Valid and exact; keys cross to another node once, however many of its ranks see them."""
    nodes = replace(cluster(num_ranks), gpus_per_node=per_node)
    for mask in PLAIN_MASKS:
        case = workload(mask, "uneven")
        schedule = plan("magi", case, nodes, pass_, {"native": True, "smallest": 2})
        validate(schedule, case, pass_)
        numeric.check(schedule, case, numeric.any_order(schedule, seed=1))
    native, packed = (plan("magi", workload("full"), nodes, "fwd", {"native": n, "stages": 1}) for n in (True, False))
    crossing = np.flatnonzero((native.kind == Kind.ALL_TO_ALL) & (np.diff(native.lane_start) == num_ranks // per_node))
    whole, once = int(packed.nbytes[packed.kind == Kind.ALL_TO_ALL][0]), int(native.nbytes[crossing[0]])
    assert once * (num_ranks - 1) == whole * (num_ranks // per_node - 1)


def test_magi_fetches_keys_that_a_rank_sees_and_no_others():
    """Documents of one chunk stay at home; under a full mask all keys of others come."""
    case = workload("causal_document", (2048,) * 32, num_heads=64, num_kv_heads=8, head_dim=128)
    assert plan("magi", case, cluster(8), "fwd", {}).bytes_sent().max() == 0
    assert benchmark("magi", 8, mask="full").bytes_sent()[0] == pytest.approx(7 * KV_BYTES, rel=1e-6)


@every_pass
def test_magi_dispatches_chunks_of_nearly_one_length(pass_):
    """Also where no chunk divides a rank's tokens: 13 of 4 ranks."""
    case = workload("causal", (52,))
    schedule = plan("magi", case, cluster(4), pass_, {"smallest": 2})
    validate(schedule, case, pass_)
    numeric.check(schedule, case, numeric.any_order(schedule, seed=1))
    ops = {t: len(plan("magi", workload("causal", (8 * t,)), cluster(8), pass_, {})) for t in (2047, 2048, 2049)}
    assert ops[2047] == ops[2048] == ops[2049]


def test_magi_copies_keys_as_often_as_kernels_read_them():
    case = workload("causal", (8 * 8192,), num_heads=8, num_kv_heads=8, head_dim=128)
    schedule = plan("magi", case, cluster(8), "fwd", {})
    written = [schedule.buffer_names[schedule.buffer_name[b]] for b in schedule.access_buffer.tolist()]
    in_order = (np.array(written) == "keys in order") & (schedule.access_mode == WRITE)
    copies, buffers = schedule.op_of_access()[in_order], schedule.access_buffer[in_order]
    assert len(copies) > 0
    assert (schedule.nbytes[copies] == 2 * schedule.buffer_nbytes[buffers]).all()
