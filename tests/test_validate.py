"""Break a good schedule in one place at a time: validation must say so."""

from dataclasses import replace

import numpy as np
import pytest
from cases import ALL_KNOBS, ALL_PASSES, cluster, one_in, workload

from cpsim.errors import InfeasibleError, ScheduleError
from cpsim.masks.tiles import make_tiles
from cpsim.schedule.builder import Builder
from cpsim.schedule.check import validate
from cpsim.schedule.check.memory import MemoryUse
from cpsim.schedule.check.ordering import check_order
from cpsim.schedule.check.structure import check_columns, check_lanes
from cpsim.schedule.schedule import ATTENTION_KINDS, READ, UPDATE, Kind
from cpsim.strategies import plan, sharding

CASE = workload("causal_document", "uneven", "gqa")
SOURCES = [(name, knobs) for name in ALL_KNOBS if name != "none" for knobs in ALL_KNOBS[name]]
RINGS = [name for name in ALL_KNOBS if "ring" in name or name in ("usp", "loongtrain", "hybrid_cp")]


def few(name):
    """The fewest ranks that all knobs of a strategy allow."""
    return 4 if name in ("usp", "loongtrain") else 2


def needy(name):
    """A case in which no transfer is in vain: a plain ring moves keys that causal ranks never use."""
    return workload("full" if name == "ring" else "causal_document", "uneven", "mha")


def good(name="zigzag_ring", pass_="fwd", num_ranks=4, case=CASE, **knobs):
    schedule = plan(name, case, cluster(num_ranks), pass_, knobs)
    validate(schedule, case, pass_)
    return schedule


def changed(array, index, value):
    copy = array.copy()
    copy[index] = value
    return copy


def without(schedule, index, *columns):
    """Drop entry ``index`` of a CSR group, e.g. ``dep`` or ``access``."""
    start = getattr(schedule, f"{columns[0].split('_')[0]}_start")
    op = int(np.searchsorted(start, index, side="right")) - 1
    fewer = start.copy()
    fewer[op + 1 :] -= 1
    parts = {c: np.delete(getattr(schedule, c), index, axis=0) for c in columns}
    return replace(schedule, **parts, **{f"{columns[0].split('_')[0]}_start": fewer})


def with_ops(schedule, order):
    """The schedule's ops in another order, left out or doubled; dependencies follow."""
    new = {}
    for position, old in enumerate(order):
        new[old] = position
    parts = {}
    for group in ("lane", "dep", "access"):
        start = getattr(schedule, f"{group}_start")
        parts[group] = [np.arange(start[i], start[i + 1]) for i in order]
    if parts["dep"]:
        kept = [[e for e in entries if int(schedule.dep[e]) in new] for entries in parts["dep"]]
        parts["dep"] = [np.array(e, np.int64) for e in kept]
    flat = {g: np.concatenate(e).astype(np.int64) for g, e in parts.items()}
    start = {f"{g}_start": np.concatenate(([0], np.cumsum([len(x) for x in e]))) for g, e in parts.items()}
    order = np.asarray(order)
    return replace(
        schedule,
        kind=schedule.kind[order],
        step=schedule.step[order],
        tile=schedule.tile[order],
        head_row=schedule.head_row[order],
        nbytes=schedule.nbytes[order],
        **start,
        lane_rank=schedule.lane_rank[flat["lane"]],
        lane_stream=schedule.lane_stream[flat["lane"]],
        dep=np.array([new[int(schedule.dep[e])] for e in flat["dep"]], np.int32),
        access_buffer=schedule.access_buffer[flat["access"]],
        access_block=schedule.access_block[flat["access"]],
        access_mode=schedule.access_mode[flat["access"]],
    )


def ops_of(schedule, kind):
    return np.flatnonzero(schedule.kind == kind)


def refuse(schedule, match, pass_="fwd", case=CASE):
    with pytest.raises(ScheduleError, match=match):
        validate(schedule, case, pass_)


def is_wait_for_own_send(schedule, op, dep):
    """A kernel waits for the batch that brought its keys as a whole, its own send included."""
    ranks = schedule.ranks_of(dep)
    return (
        schedule.kind[dep] == Kind.TRANSFER
        and schedule.kind[op] != Kind.TRANSFER
        and (ranks[0] == schedule.ranks_of(op)[0])
    )


def is_cast_of_one_of_several_rings(schedule, op, dep):
    """A cast waits for the hop that brought its sum home, although kernels of a later ring of the same rank have
    waited for later hops on that lane."""
    rank = schedule.ranks_of(op)[0]
    tensors = schedule.block_tensor[schedule.outputs[:, 1]]
    gradients = np.array(schedule.block_tensors)[tensors] == "dkv"
    rings = (schedule.buffer_rank[schedule.outputs[gradients, 0]] == rank).sum()
    return schedule.kind[op] == Kind.COPY and schedule.kind[dep] == Kind.TRANSFER and rings > 1


DEPENDENT = [
    (name, {"cp": 2} if name == "wlb" else knobs, num_ranks)
    for num_ranks in (2, 4)
    for name, knobs in SOURCES
    if num_ranks % (knobs.get("ulysses", 1) * knobs.get("inner_ring", 1)) == 0
    if num_ranks == 2 or "cycles" not in knobs  # four ranks have none that share no link
]
"""What can run on so many ranks, and communicates: documents of ``wlb`` with ``cp`` of 1 stay where they are."""


def with_other_dependencies(schedule, pass_, case):
    """What validates a schedule whose ops are those of a valid one, but wait for others: all that looks at what ops
    wait for. What they compute and touch stays what it was."""
    conflicts = MemoryUse(schedule, case.by_group(schedule.head_groups), pass_).run()

    def check(changed):
        check_columns(changed)
        check_lanes(changed)
        check_order(changed, conflicts)

    return check


@pytest.mark.parametrize("pass_", ALL_PASSES)
@pytest.mark.parametrize(("name", "knobs", "num_ranks"), one_in(3, DEPENDENT))
def test_every_dependency_is_needed_and_its_loss_is_a_race(name, knobs, pass_, num_ranks):
    count = 0
    for mask in ("causal", "causal_document"):
        case = workload(mask, "uneven", "mha")
        try:
            schedule = good(name, pass_, num_ranks, case, **knobs)
        except InfeasibleError:
            continue
        check = with_other_dependencies(schedule, pass_, case)
        check(schedule)
        for i in range(len(schedule.dep)):
            op = int(np.searchsorted(schedule.dep_start, i, side="right")) - 1
            if is_wait_for_own_send(schedule, op, int(schedule.dep[i])):
                continue
            if name == "hybrid_cp" and is_cast_of_one_of_several_rings(schedule, op, int(schedule.dep[i])):
                continue
            with pytest.raises(ScheduleError, match="races on rank"):
                check(without(schedule, i, "dep"))
            count += 1
    assert count


@pytest.mark.parametrize("pass_", ALL_PASSES)
@pytest.mark.parametrize(("name", "knobs"), SOURCES)
def test_every_op_is_needed(name, knobs, pass_):
    schedule = good(name, pass_, few(name), needy(name), **knobs)
    for i in range(len(schedule)):
        order = [j for j in range(len(schedule)) if j != i]
        refuse(with_ops(schedule, order), None, pass_, needy(name))


@pytest.mark.parametrize("pass_", ALL_PASSES)
@pytest.mark.parametrize(("name", "knobs"), SOURCES)
def test_every_access_is_needed(name, knobs, pass_):
    case = needy(name)
    schedule = good(name, pass_, few(name), case, **knobs)
    for i in range(len(schedule.access_buffer)):
        broken = without(schedule, i, "access_buffer", "access_block", "access_mode")
        refuse(broken, None, pass_, case)


@pytest.mark.parametrize("pass_", ALL_PASSES)
@pytest.mark.parametrize(("name", "knobs"), one_in(3, SOURCES))
def test_any_access_to_another_buffer_of_the_rank_is_found(name, knobs, pass_):
    schedule = good(name, pass_, few(name), needy(name), **knobs)
    rng = np.random.default_rng(0)
    for i in range(len(schedule.access_buffer)):
        buffer = int(schedule.access_buffer[i])
        others = np.flatnonzero(schedule.buffer_rank == schedule.buffer_rank[buffer])
        wrong = int(rng.choice(others[others != buffer]))
        broken = replace(schedule, access_buffer=changed(schedule.access_buffer, i, wrong))
        if not _holds_the_same(schedule, i, wrong):
            refuse(broken, None, pass_, needy(name))


def _holds_the_same(schedule, access, buffer):
    """Reading one replica in place of another is no fault."""
    used = schedule.access_buffer == buffer
    block = schedule.access_block[access]
    same = schedule.block_tensor[schedule.access_block[used]] == schedule.block_tensor[block]
    return schedule.access_mode[access] == READ and bool(same.any())


@pytest.mark.parametrize("pass_", ALL_PASSES)
@pytest.mark.parametrize(("name", "knobs"), SOURCES)
def test_any_buffer_a_third_smaller_is_too_small(name, knobs, pass_):
    schedule = good(name, pass_, few(name), needy(name), **knobs)
    written = np.unique(np.concatenate([schedule.access_buffer, schedule.inputs[:, 0], schedule.outputs[:, 0]]))
    of_kernels = np.isin(schedule.kind, ATTENTION_KINDS).repeat(np.diff(schedule.access_start))
    two_types = np.intersect1d(
        schedule.access_buffer[of_kernels], schedule.access_buffer[schedule.access_mode == UPDATE]
    )
    roomy = {"out partial", "dq partial", "key heads", "dkv sum"} if name in RINGS else set()
    if name == "magi":  # tokens for several ranks or sequences lie there several times; some ranks send nothing
        roomy = {"kv by rank", "kv of others", "kv of relays", "keys in order", "dkv partial", "dkv by rank"}
        roomy |= {"dkv of others", "dkv sum"}
    if name == "dcp":  # keys lie there once for every sequence that sees them; sums hold two types
        roomy = {"kv in order", "dkv partial", "out", "out sum", "dq", "dq sum", "dkv sum"}
    if name == "distca":  # the same, and sums are updated in parts
        roomy = {"kv in order", "dkv of tasks", "dkv sum"}
    if name == "mesh":  # sums are updated in parts
        roomy = {"dkv sum"}
    if "cycles" in knobs:  # tokens for several sequences lie there several times; sums leave in fp32
        roomy |= {"keys in order", "dkv by rank"}
    if "token_chunks" in knobs:  # sums hold two types
        roomy = {"out of chunk", "dq sum", "dkv sum"}
    for b in written.tolist():
        if b in two_types or schedule.buffer_names[schedule.buffer_name[b]] in roomy:
            continue  # accumulators hold two types, partial results only tails on some ranks
        smaller = changed(schedule.buffer_nbytes, b, int(schedule.buffer_nbytes[b] * 2 // 3))
        refuse(replace(schedule, buffer_nbytes=smaller), None, pass_, needy(name))


def test_a_tile_computed_twice_is_found():
    schedule = good("ring", num_ranks=2, case=workload("full", "one", "gqa"))
    ops = ops_of(schedule, Kind.ATTENTION)
    twice = replace(schedule, tile=changed(schedule.tile, ops[-1], schedule.tile[ops[0]]))
    refuse(twice, r"computed (0|2) times, expected once", case=workload("full", "one", "gqa"))


def test_an_empty_tile_leaves_its_pairs_out():
    schedule = good()
    op = ops_of(schedule, Kind.ATTENTION)[3]
    refuse(replace(schedule, tile=changed(schedule.tile, op, 0)), "computed 0 times, expected once")


def test_slices_that_overlap_are_found_though_areas_add_up():
    """Two tiles swap one query row of equal area."""
    case = workload("full", (8,), "mha")
    sets = sharding.stack(sharding.contiguous(8, 2), sharding.contiguous(8, 1))
    tiles = make_tiles(case.slices(), sets, [0, 0], [2, 2])
    b = Builder(1, sets, tiles)
    heads = (0, 8, 0, 8)
    q, kv, out = (b.buffers(t, 4096) for t in ("q", "kv", "out"))
    b.input(q, b.blocks("q", [2], (0, 8)))
    b.input(kv, b.blocks("kv", [2], (0, 8)))
    b.output(out, b.blocks("out", [2], (0, 8)))
    for tile, half in ((1, 0), (2, 0)):
        b.add(
            Kind.ATTENTION,
            (np.zeros(1, int), "compute"),
            tile=tile,
            heads=heads,
            reads=[(q, b.blocks("q", [half], (0, 8))), (kv, b.blocks("kv", [2], (0, 8)))],
            writes=[(out, b.blocks("out", [half], (0, 8)))],
        )
    schedule = b.build()
    assert schedule.flops(4) == case.flops("fwd")
    refuse(schedule, "queries 0:4 x keys 0:8 are computed 2 times", case=case)


def test_wrong_areas_and_stray_slices_of_tiles_are_found():
    schedule = good()
    tiles = schedule.tiles
    refuse(replace(schedule, tiles=replace(tiles, area=changed(tiles.area, 1, 0))), "areas differ")
    stray = replace(tiles, rows=changed(tiles.rows, (0, 4), tiles.rows[0, 4] + 40))
    refuse(replace(schedule, tiles=stray), "outside its mask row")


def test_heads_must_match():
    schedule = good("ulysses")
    op = ops_of(schedule, Kind.ATTENTION)[1]
    rows = np.arange(len(schedule), dtype=np.int32)
    for column, value, why in ((2, 1, "share a key-value head"), (0, 0, "heads|computed|read")):
        heads = changed(schedule.heads, (op, column), value)
        refuse(replace(schedule, head_row=rows, head_rows=heads), why)
    refuse(schedule, "does not belong to pass bwd", "bwd")


def test_another_workload_is_not_this_one():
    refuse(good(), "computed|outside|areas", case=workload("full", "one", "gqa"))


def test_a_second_merge_of_the_same_partial_is_found():
    schedule = good()
    merge = int(ops_of(schedule, Kind.MERGE)[0])
    order = [*range(merge + 1), merge, *range(merge + 1, len(schedule))]
    refuse(with_ops(schedule, order), "not the sum of all its partial results, each once")


def test_a_merge_ahead_of_its_partial_is_found():
    schedule = good()
    merge = int(ops_of(schedule, Kind.MERGE)[0])
    rank = schedule.ranks_of(merge)[0]
    before = [i for i in range(merge) if schedule.kind[i] == Kind.ATTENTION and schedule.ranks_of(i) == [rank]]
    order = list(range(len(schedule)))
    order.insert(before[-1], order.pop(merge))
    refuse(with_ops(schedule, order), "reads out.* which holds nothing yet")


def test_transfers_that_pass_each_other_are_found():
    schedule = good("ring", num_ranks=3, case=workload("full", "one", "gqa"))
    first, second = ops_of(schedule, Kind.TRANSFER)[[0, 1]].tolist()
    order = list(range(len(schedule)))
    keys = (
        schedule.access_block[schedule.access_start[first]],
        schedule.access_block[schedule.access_start[second]],
    )
    blocks = schedule.access_block.copy()
    for op, block in ((first, keys[1]), (second, keys[0])):
        blocks[schedule.access_start[op] : schedule.access_start[op + 1]] = block
    refuse(
        with_ops(replace(schedule, access_block=blocks), order),
        "reads kv",
        case=workload("full", "one", "gqa"),
    )


def test_columns_that_make_no_sense_are_found():
    schedule = good("ring", num_ranks=3)
    dep = int(schedule.dep_start[np.flatnonzero(np.diff(schedule.dep_start))[0] + 1]) - 1
    op = int(np.searchsorted(schedule.dep_start, dep, side="right")) - 1
    faults = {
        "later op": {"dep": changed(schedule.dep, dep, op)},
        "dep has entries outside": {"dep": changed(schedule.dep, dep, len(schedule))},
        "kind has entries outside": {"kind": changed(schedule.kind, 0, 99)},
        "lane_rank has entries outside": {"lane_rank": changed(schedule.lane_rank, 0, 3)},
        "nbytes has negative": {"nbytes": changed(schedule.nbytes, 0, -1)},
        "access_start does not partition": {"access_start": schedule.access_start[:-1]},
        "two lanes on one rank": {"lane_rank": changed(schedule.lane_rank, 1, schedule.lane_rank[0])},
        "not its own": {"buffer_rank": changed(schedule.buffer_rank, int(schedule.access_buffer[0]), 2)},
        "inputs or outputs name": {"inputs": changed(schedule.inputs, (0, 0), 10_000)},
    }
    for match, parts in faults.items():
        refuse(replace(schedule, **parts), match)
    refuse(without(schedule, 0, "lane_rank", "lane_stream"), "a transfer needs 2 lanes")


def test_a_barrier_may_join_two_streams_of_one_rank():
    sets = sharding.contiguous(8, 1)
    b = Builder(2, sets, make_tiles(workload("full", (8,)).slices(), sets, [0], [0]))
    b.add(Kind.BARRIER, (np.arange(2), "compute"), (np.arange(2), "comm"))
    check_lanes(b.build())


def test_a_dependency_on_a_stranger_is_found():
    schedule = good("ring", "bwd", 4, workload("full", "one", "gqa"))
    transfer = int(ops_of(schedule, Kind.TRANSFER)[-1])
    ranks = set(schedule.ranks_of(transfer))
    stranger = next(i for i in range(transfer) if not ranks & set(schedule.ranks_of(i)))
    broken = replace(schedule, dep=changed(schedule.dep, schedule.dep_start[transfer], stranger))
    refuse(broken, "shares no rank", "bwd", workload("full", "one", "gqa"))


def test_a_buffered_send_orders_nothing_before_its_receive():
    """Rank 0 may reuse the source of a finished send, but must not conclude that the receiver has started."""
    sets = sharding.contiguous(8, 1)
    case = workload("full", (8,), "mha")
    b = Builder(2, sets, make_tiles(case.slices(), sets, [0], [0]))
    q = b.blocks("q", [0], (0, 8))
    buffers = b.buffers("q", 8 * 8 * 4 * 2), b.buffers("other", 8 * 8 * 4 * 2)
    b.input(buffers[0], q.repeat(2))
    zero, one = np.array([0]), np.array([1])
    sides = [(buffers[0][:1], q)], [(buffers[1][1:], q)]
    b.add(Kind.COPY, (one, "compute"), reads=[(buffers[0][1:], q)], writes=[(buffers[1][1:], q)])
    b.add(Kind.TRANSFER, (zero, "send"), (one, "recv"), nbytes=512, deps=[zero], reads=sides[0], writes=sides[1])
    b.add(
        Kind.TRANSFER,
        (zero, "grad_send"),
        (one, "grad_recv"),
        nbytes=512,
        deps=[one],
        reads=sides[0],
        writes=sides[1],
    )
    b.add(Kind.COPY, (zero, "compute"), deps=[one], reads=sides[0], writes=[(buffers[1][:1], q)])
    b.add(Kind.COPY, (one, "compute"), deps=[one + 1], reads=sides[1], writes=[(buffers[0][1:], q)])
    schedule = b.build()
    check_order(schedule, np.array([[0, 1, 1], [1, 2, 1], [0, 2, 1], [1, 3, 0]]))
    with pytest.raises(ScheduleError, match="races on rank 1 with op 0"):
        check_order(without(schedule, 0, "dep"), np.array([[0, 1, 1]]))


def test_errors_show_the_op_between_its_neighbours():
    schedule = good()
    with pytest.raises(ScheduleError) as error:
        validate(without(schedule, 0, "dep"), CASE, "fwd")
    first, *rest = str(error.value).splitlines()
    assert first.startswith("rank ")
    assert ", stream " in first
    assert sum(line.startswith("> ") for line in rest) == 1
    assert 2 <= len(rest) <= 5


def test_routes_that_do_not_carry_their_blocks_are_found():
    schedule = good("dcp", "fwd", 4, needy("dcp"), block=3, solver="greedy", variant="paper")
    first = int(schedule.routes[0, 0])
    more = changed(schedule.route_nbytes, 0, schedule.route_nbytes[0] + 8)
    refuse(replace(schedule, route_nbytes=more), "routes bring", "fwd", needy("dcp"))
    elsewhere = changed(schedule.routes, (0, 2), (schedule.routes[0, 2] + 1) % 4)
    refuse(replace(schedule, routes=elsewhere), "routes bring", "fwd", needy("dcp"))
    elsewhere = changed(elsewhere, (0, 0), next(i for i in range(first) if schedule.kind[i] == Kind.COPY))
    refuse(replace(schedule, routes=elsewhere), "routes", "fwd", needy("dcp"))
