"""Proof that a schedule computes what its workload asks for and can be executed as it stands.

``validate`` checks, in this order and with the first violation as the error:

structure   columns are consistent; dependencies point backwards and share a rank with their op; every
            op is on its lanes once, and touches buffers of its own ranks only.
coverage    every unmasked (query, key) pair is computed exactly once per query head.
data        ops are run in list order on a *symbolic* memory: a buffer holds blocks, a block holds one
            64-bit number per cell (run of tokens x run of heads). Attention op i adds its random weight
            w_i to the cells of the partial results that its tile touches; merges, sums and collectives
            add; everything else moves cells. Reads must find their cells in the buffer, and outputs
            must end with the sum of w_i over exactly the attention ops that touch them, so a partial
            result that is lost or added twice is found.
ordering    two accesses of a buffer of which one writes are ordered by dependencies and lanes (vector
            clocks). A transfer orders what follows its receive after what preceded its send, but not
            the reverse: a send may be buffered and end before its receive is posted.
FLOP        equal the workload's.

Where queries choose their keys, every pair is scored once instead, by forward passes, and FLOP are not compared: which
keys attention reads depends on data.

Rules of memory. A buffer holds what its last writer left, all of it: an op that writes some blocks to a
buffer drops whatever was there. Output buffers are the exception: they are laid out for their output
block, ops may write disjoint parts of it, and two accesses conflict only where their parts overlap. A
read may name any part of a held block (a view). ``o`` is ``out`` without its log-sum-exp. Partial
gradients that an all-to-all brings together wait side by side and are added by who reads them.

Not checked: bytes against closed forms (tests do), traffic of merges and copies, the shapes of training-
step ops.

A new rule of schedules is checked here. Covered by tests/test_validate.py.
"""

from __future__ import annotations

from cpsim.case.workload import Workload
from cpsim.errors import ScheduleError
from cpsim.schedule.check.coverage import check_coverage, check_heads, check_tiles
from cpsim.schedule.check.memory import MemoryUse
from cpsim.schedule.check.ordering import check_order
from cpsim.schedule.check.structure import check_columns, check_lanes
from cpsim.schedule.schedule import Kind, Pass, Schedule

__all__ = ["validate"]


def validate(schedule: Schedule, workload: Workload, pass_: Pass) -> None:
    """Raise unless the schedule computes this pass of the workload exactly once and without races.

    Raises:
        ScheduleError: the first line says what is wrong and at which rank, stream and op; the op and its
            neighbours on that stream follow.
    """
    check_columns(schedule)
    check_lanes(schedule)
    workload = workload.by_group(schedule.head_groups)
    mask = workload.slices(schedule.stride)
    check_tiles(schedule, mask)
    check_heads(schedule, workload, pass_)
    if workload.sparse is None:
        check_coverage(schedule, mask, workload.num_heads)
    elif workload.sparse.scores and pass_ == "fwd":
        check_coverage(schedule, mask, workload.num_heads, (Kind.SELECT,))
    check_order(schedule, MemoryUse(schedule, workload, pass_).run())
    if workload.sparse is not None:
        return
    wanted, got = workload.flops(pass_), schedule.flops(workload.head_dim, workload.value_dim)
    if got != wanted:
        raise ScheduleError(f"FLOP: expected {wanted:.0f}, got {got:.0f}")
