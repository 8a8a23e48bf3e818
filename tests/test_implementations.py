"""Other people's schedules: valid, exact in numbers and bytes, and with the launches that their code makes."""

import numeric
import numpy as np
import pytest
from cases import ALL_MASKS, ALL_PASSES, HEADS, OTHERS, cluster, workload

from cpsim import predict
from cpsim.errors import InfeasibleError
from cpsim.implementations import CPSIM, IMPLEMENTATIONS
from cpsim.scenario import scenario_from
from cpsim.schedule import STREAMS, Kind
from cpsim.strategies import STRATEGIES, plan
from cpsim.validation import validate

IDS = [f"{code.name}-{name}-{'-'.join(map(str, knobs.values()))}" for code, name, knobs in OTHERS]
every_other = pytest.mark.parametrize(("code", "name", "knobs"), OTHERS, ids=IDS)
every_pass = pytest.mark.parametrize("pass_", ALL_PASSES)
RING_FLASH_ATTN, TORCH, YUNCHANG = (IMPLEMENTATIONS[n] for n in ("ring-flash-attn", "torch", "yunchang"))


@every_pass
@every_other
def test_schedules_are_valid_and_compute_dense_attention(code, name, knobs, pass_):
    count = 0
    for mask in ALL_MASKS:
        for documents in ((96,), (24, 48, 24)):
            for num_ranks in (4, 6) if name == "usp" else (2, 3, 4):
                for heads in HEADS:
                    case = workload(mask, documents, heads)
                    try:
                        schedule = plan(name, case, cluster(num_ranks), pass_, knobs, code)
                    except InfeasibleError:
                        continue
                    validate(schedule, case, pass_)
                    numeric.check(schedule, case, range(len(schedule)))
                    numeric.check(schedule, case, numeric.any_order(schedule, seed=len(schedule)))
                    count += 1
    assert count >= 6


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


@every_pass
@every_other
def test_others_send_what_ours_send(code, name, knobs, pass_):
    """Keys and values in the working type, gradients of rings in fp32, those of an all-gather in the working type."""
    case = workload("full" if knobs.get("layout") == "contiguous" else "causal", (96,), "mha")
    like = "ring" if code is TORCH else name  # its all-gather is a ring that gathers
    ours = plan(like, case, cluster(4), pass_, knobs if name == "usp" else {}).bytes_sent()
    sent = plan(name, case, cluster(4), pass_, knobs, code).bytes_sent()
    narrow = code is RING_FLASH_ATTN and name == "allgather" and pass_ == "bwd"
    assert sent == pytest.approx(ours * 2 / 3 if narrow else ours)


@pytest.mark.parametrize(
    ("code", "name", "num_ranks", "changes", "reason"),
    [
        (RING_FLASH_ATTN, "ulysses", 2, {}, "ring-flash-attn has no ulysses; it has ring, zigzag_ring"),
        (RING_FLASH_ATTN, "ring", 1, {}, "runs on 2 GPUs or more, got 1"),
        (RING_FLASH_ATTN, "zigzag_ring", 2, {"mask": "full"}, "runs masks causal, causal_document, got full"),
        (
            RING_FLASH_ATTN, "zigzag_ring", 2, {"mask": "causal_document", "documents": "uneven"},
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
    ],
)  # fmt: skip
@every_pass
def test_what_others_cannot_run_says_why(code, name, num_ranks, changes, reason, pass_):
    with pytest.raises(InfeasibleError, match=reason):
        plan(name, workload(**changes), cluster(num_ranks), pass_, {}, code)


def test_predictions_of_others_name_their_kernels_and_pay_for_their_launches():
    fields = {
        "strategy": "zigzag_ring", "kernel": "fa2", "gpus": 4, "cluster": "h200-4", "tokens_per_gpu": 1024,
        "heads": 32, "kv_heads": 8, "pass": "fwd",
    }  # fmt: skip
    ours = predict(scenario_from(fields))
    others = predict(scenario_from({**fields, "implementation": "ring-flash-attn"}))
    assert others.parts_s["host"] > ours.parts_s["host"]
    assert others.time_s > ours.time_s
    with pytest.raises(InfeasibleError, match="ring-flash-attn runs kernels fa2, got fa4"):
        predict(scenario_from({**fields, "implementation": "ring-flash-attn", "kernel": "fa4"}))


def test_every_strategy_of_ours_has_the_code_argument_or_is_nobody_elses():
    for code in IMPLEMENTATIONS.values():
        for name in code.support or ():
            if name in STRATEGIES:
                with pytest.raises(InfeasibleError):
                    plan(name, workload(), cluster(1), "fwd", {}, code)
    assert CPSIM.support is None
