"""DCP: blocks, placements and what they move, against brute force."""

from importlib.util import find_spec

import numpy as np
import pytest
from cases import ALL_MASKS, DOCUMENTS, cluster, workload

from cpsim.case.scenario import Scenario
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.masks.slices import UNBOUNDED, Slices, dense_mask
from cpsim.models.feasible import _masks_of_tiles, through_tables, union
from cpsim.prediction.predict import predict
from cpsim.schedule.check import validate
from cpsim.schedule.schedule import Kind, Planning
from cpsim.strategies import plan
from cpsim.strategies.dcp import placing, solvers
from cpsim.strategies.dcp.blocks import Placement, cut, first_hops, judge, wanted
from cpsim.strategies.dcp.hypergraph import Level, moved_bytes
from cpsim.strategies.dcp.placing import Settings, plan_blocks
from cpsim.strategies.dcp.planning import plan_case
from cpsim.strategies.dcp.program import Cells, fetches
from cpsim.strategies.dcp.staging import stage_blocks
from cpsim.strategies.dcp.strategy import COMPUTATIONS, default_block, default_groups
from cpsim.strategies.dcp.timing import Rates
from cpsim.strategies.others import CPSIM
from studies.code.dcp import DCP

GPUS = cluster(1).gpus_per_node


def random_placement(blocks, num_ranks, seed=0):
    rng = np.random.default_rng(seed)
    return Placement(rng.integers(0, num_ranks, len(blocks)), rng.integers(0, num_ranks, blocks.computations))


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("mask", ALL_MASKS)
def test_blocks_hold_every_token_and_every_unmasked_pair_once(mask, documents):
    case = workload(mask, documents)
    blocks, seen = cut(case, 7, 2), dense_mask(case.slices(), 48)
    assert blocks.first.tolist() == (np.cumsum(blocks.tokens) - blocks.tokens).tolist()
    assert blocks.tokens.sum() == 48
    assert blocks.tokens.max() <= 7
    ends = blocks.first + blocks.tokens
    for query, key, area in zip(blocks.query, blocks.key, blocks.area, strict=True):
        part = seen[blocks.first[query] : ends[query], blocks.first[key] : ends[key]]
        assert part.sum() == area > 0
    assert blocks.area[blocks.group == 0].sum() == blocks.area[blocks.group == 1].sum() == seen.sum()


def test_blocks_cross_no_document_that_the_mask_knows():
    assert cut(workload("causal_document", "uneven"), 8, 1).tokens.tolist() == [5, 8, 8, 3, 8, 8, 8]
    assert cut(workload("causal", "uneven"), 8, 1).tokens.tolist() == [8] * 6


def test_head_groups_share_key_value_heads():
    assert cut(workload(heads="gqa"), 8, 2).q_bytes == 4 * 4 * 2
    alone = cut(workload(heads="gqa"), 8, 8)
    assert (alone.q_bytes, alone.kv_bytes, alone.groups_per_kv) == (4 * 2, 2 * 4 * 2, 4)
    assert alone.kv_group[alone.group == 7].tolist() == [4] * (alone.computations // 8)
    with pytest.raises(InfeasibleError, match="got 3 for 8 heads and 2 kv_heads; use head_groups: 1"):
        cut(workload(heads="gqa"), 8, 3)


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize("num_ranks", [2, 8, 32])
def test_a_placement_moves_inputs_once_to_every_rank_and_once_to_every_node(num_ranks, pass_):
    blocks = cut(workload("causal_document", "uneven"), 6, 2)
    placement = random_placement(blocks, num_ranks)
    quality = judge(blocks, placement, num_ranks, GPUS, pass_)
    got, between = np.zeros(num_ranks, np.int64), 0
    for side, (there, back) in (
        (blocks.query, blocks.query_bytes(pass_)),
        (blocks.key, blocks.key_bytes(pass_)),
    ):
        units = set(zip(side.tolist(), blocks.group.tolist(), placement.worker.tolist(), strict=True))
        nodes = {(block, group, rank // GPUS) for block, group, rank in units}
        for block, _, rank in units:
            home, tokens = placement.home[block], blocks.tokens[block]
            got[rank] += tokens * there * (rank != home)
            got[home] += tokens * back * (rank != home)
            between += tokens * back * (rank // GPUS != home // GPUS)
        between += sum(blocks.tokens[b] * there for b, _, node in nodes if node != placement.home[b] // GPUS)
    assert quality.moved.sum(axis=0).tolist() == got.tolist()
    assert quality.between_nodes.sum() == between
    assert quality.work.sum() == blocks.area.sum()
    assert quality.tokens.sum() == 48


def test_relays_take_turns_and_need_what_they_pass_on():
    blocks = cut(workload("full", "one"), 2, 2)
    placement = random_placement(blocks, 32)
    needs = wanted(blocks, placement.worker, blocks.sides[1], 32)
    home = np.repeat(placement.home, 2)
    hops = first_hops(needs, home, GPUS)
    crossings = set()
    for unit, rank in np.argwhere(needs).tolist():
        source = hops[unit, rank]
        if source // GPUS != rank // GPUS:
            assert source == home[unit]
            assert (unit, rank // GPUS) not in crossings
            crossings.add((unit, rank // GPUS))
        else:
            assert source == home[unit] or needs[unit, source]
    assert len(np.unique(hops[needs] % GPUS)) == GPUS


RATES = Rates.of(cluster(32))
SOLVERS = [
    "greedy",
    *(
        pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason=name))
        for name in ("mtkahypar", "kahypar")
    ),
]


def random_case(seed, mask):
    """A mask over random documents, and the ranks of it."""
    rng = np.random.default_rng(seed)
    num_ranks = int(rng.choice([2, 3, 5, 8, 16, 24, 48, 96]))
    lengths = rng.integers(1, 120, int(rng.integers(1, 9)))
    lengths = (*lengths.tolist(), 2 * num_ranks + int(rng.integers(0, 50)))
    heads = "gqa" if rng.random() < 0.5 else "mqa"
    return workload(mask, lengths, heads), num_ranks, int(rng.integers(1, 3)), rng


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize("mask", ALL_MASKS)
def test_any_documents_on_any_ranks_are_computed_once(mask, pass_):
    for seed in range(2):
        case, num_ranks, block, rng = random_case([seed, ALL_MASKS.index(mask)], mask)
        variant = str(rng.choice(["paper", "released"]))
        knobs = {"block": block, "variant": variant, "solver": "greedy", "stages": int(rng.integers(1, 6))}
        schedule = plan("dcp", case, cluster(num_ranks), pass_, knobs)
        validate(schedule, case, pass_)
        tensor = "out" if pass_ == "fwd" else "dq"
        tensors = np.array(schedule.block_tensors)[schedule.block_tensor[schedule.outputs[:, 1]]]
        results = schedule.outputs[tensors == tensor]
        held = schedule.sets.num_tokens()[schedule.block_set[results[:, 1]]] // schedule.head_groups
        assert held.sum() == case.num_tokens
        assert np.ptp(held) <= block


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("mask", ["causal", "lambda", "causal_document"])
def test_the_papers_constraints_hold_whatever_the_solver(mask, solver):
    blocks = cut(workload(mask, (700, 1300, 90, 2006)), 32, 2)
    settings = Settings(variant="paper", eps_inter=0.2, eps_intra=0.2, solver=solver)
    placement = plan_blocks(blocks, (2, 4), RATES, settings, 0)
    quality = judge(blocks, placement, 8, 4, "fwd")
    assert placement.solver == solver
    assert np.ptp(quality.tokens) <= 2 * 32  # one block between nodes, and one inside
    assert quality.work.reshape(2, 4).sum(axis=1).max() <= 1.2 * quality.work.sum() / 2
    assert quality.imbalance <= 1.2**2


@pytest.mark.parametrize("solver", SOLVERS)
def test_placements_repeat_by_seed(solver):
    blocks = cut(workload("causal", (4096,)), 128, 2)
    made = [
        plan_blocks(blocks, (2, 4), RATES, Settings(variant="paper", solver=solver), seed).worker for seed in (3, 3, 4)
    ]
    assert (made[0] == made[1]).all()
    assert (made[0] != made[2]).any()


@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers_move_no_more_than_zigzag_does(solver):
    """A zigzag with computations at their queries sends every key to nearly every rank."""
    blocks = cut(workload("causal", (8192,)), 128, 2)
    home = np.minimum(np.arange(64) // 4, 15 - np.arange(64) // 4)
    zigzag = judge(blocks, Placement(home, home[blocks.query]), 8, 4, "fwd")
    settings = Settings(variant="paper", eps_inter=0.3, eps_intra=0.3, solver=solver)
    quality = judge(blocks, plan_blocks(blocks, (2, 4), RATES, settings, 0), 8, 4, "fwd")
    assert quality.moved.sum() <= zigzag.moved.sum()


@pytest.mark.skipif(not find_spec("mtkahypar"), reason="needs Mt-KaHyPar")
@pytest.mark.parametrize("documents", [(512,), (500, 300)])
@pytest.mark.parametrize("kept", [False, True])
def test_orders_are_tried_until_limits_are_kept_and_the_one_that_moves_least_wins(monkeypatch, kept, documents):
    blocks, labels = cut(workload("causal_document", documents), 32, 2), solvers._labels
    given, made = [], []

    def heard(*args):
        given.append(args)
        made.append(labels(*args))
        return made[-1]

    monkeypatch.setattr(solvers, "_labels", heard)
    level = Level.of(blocks)
    weights = solvers.fold(level, 2, 0.4, 0.1)
    total, less = weights.vertex.sum(), weights.vertex[len(blocks) :].sum() + 1
    assert less < weights.vertex[: len(blocks)].min()  # so that what fits there is not enough
    most = np.array([total, total] if kept else [less, total - less])
    parts = solvers.with_mtkahypar(level, 2, solvers.Weights(weights.vertex, most), np.random.default_rng(0))
    assert len(made) == (1 if kept else solvers.ORDERS)
    moved, rng = [], np.random.default_rng(0)
    for found, (_, _, vertex, _) in zip(made, given, strict=True):
        order = rng.permutation(len(vertex))
        if len(documents) > 1:  # whose last blocks are shorter
            order = order[np.argsort(-weights.vertex[order], kind="stable")]
            assert vertex == sorted(vertex, reverse=True)
        assert vertex == weights.vertex[order].tolist()
        moved.append(moved_bytes(level, solvers.split(level, np.array(found)[np.argsort(order)].tolist()), 2))
    assert moved_bytes(level, parts, 2) == min(moved)


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("solver", ["kahypar", "mtkahypar"])
def test_nothing_stands_in_for_a_solver_that_is_not_installed(monkeypatch, variant, solver):
    monkeypatch.setattr(placing, "find_spec", lambda _: None)
    blocks = cut(workload("causal", (512,)), 32, 2)
    with pytest.raises(InfeasibleError, match=f"pip install {solver}, or use variant: cpsim"):
        plan_blocks(blocks, (1, 4), RATES, Settings(variant=variant, solver=solver), 0)
    assert plan_blocks(blocks, (1, 4), RATES, Settings(variant=variant, solver="greedy"), 0).solver == "greedy"
    assert len(plan_blocks(blocks, (1, 4), RATES, Settings(variant="cpsim", solver=solver), 0).worker)


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_stages_keep_to_their_limits(variant, pass_):
    blocks, shape = cut(workload("causal", (4096,)), 64, 2), (2, 4)
    settings = Settings(variant=variant, solver="greedy", stages=4)
    placement = plan_blocks(blocks, shape, RATES, settings, 0)
    stage = stage_blocks(blocks, placement, shape, RATES, settings, pass_)
    last, quality = stage.max(), judge(blocks, placement, 8, 4, pass_)
    local = (placement.home[blocks.query] == placement.worker) & (placement.home[blocks.key] == placement.worker)
    assert ((stage == 0) == local).all()
    assert last <= (3 if variant == "paper" else 4)
    for s in range(1, last):
        moved = np.zeros((8, 8), np.int64)
        for units, width in zip(blocks.sides, (blocks.query_bytes(pass_)[0], blocks.key_bytes(pass_)[0]), strict=True):
            now, before = (
                wanted(blocks, placement.worker[chosen], units[chosen], 8) for chosen in (stage == s, stage < s)
            )
            unit, rank = np.nonzero(now & ~before)
            home = placement.home[unit // 2]
            np.add.at(moved, (home, rank), np.where(home == rank, 0, blocks.tokens[unit // 2] * width))
        if variant == "paper":
            assert (moved <= quality.moved / 4).all()
        else:
            to_nodes = np.minimum(moved[:4, 4:].sum(axis=1), moved[:4, 4:].sum())
            assert to_nodes.max() <= 4 * 1.2 * quality.between_nodes.sum() / 8 / 4


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("heads", ["mha", "gqa"])
def test_schedules_move_what_their_placement_counts(heads, variant, pass_):
    """With every head by itself, those that share keys, too."""
    case, machine = workload("causal_document", (300, 700, 24), heads), cluster(16)
    knobs = {"variant": variant, "solver": "greedy", "block": 16, "head_groups": 8}
    schedule = plan("dcp", case, machine, pass_, knobs)
    settings = Settings(variant=variant, solver="greedy")
    planned = plan_case(case, machine, 16, 8, settings, 0)
    quality = judge(planned.blocks, planned.placement, 16, 8, pass_)
    got, source, target = np.zeros(16, np.int64), schedule.routes[:, 1], schedule.routes[:, 2]
    np.add.at(got, target, schedule.route_nbytes)
    assert got.tolist() == quality.moved.sum(axis=0).tolist()
    between = schedule.route_nbytes[source // 8 != target // 8].sum()
    assert between == quality.between_nodes.sum() > 0
    assert schedule.bytes_sent().sum() == quality.moved.sum()


def test_every_cell_crosses_to_a_node_once_and_comes_from_who_has_it():
    blocks = cut(workload("full", "one"), 2, 2)
    rng, cells = np.random.default_rng(1), Cells(blocks)
    placement = random_placement(blocks, 24)
    stage, home = rng.integers(0, 4, blocks.computations), cells.per_group(placement.home)
    needs = cells.needs(placement.worker, stage, 24)[1]
    held = home == np.arange(24)[:, None]
    crossed = np.zeros((3, len(home)), np.int64)
    for fetch, wants in zip(fetches(needs, home, GPUS), needs, strict=True):
        assert ((fetch.far | fetch.near | held) >= wants).all()
        crossed += fetch.far.reshape(3, GPUS, -1).sum(axis=1)
        rank, cell = np.nonzero(fetch.near)
        source = fetch.source[rank, cell]
        assert (source // GPUS == rank // GPUS).all()
        assert (held | fetch.far)[source, cell].all()
        held |= fetch.far | fetch.near
    assert crossed.max() == 1


def test_inputs_of_the_next_stage_are_on_their_way_before_kernels_run():
    schedule = plan("dcp", workload("causal", (512,)), cluster(8), "fwd", {"variant": "paper", "solver": "greedy"})
    arrives = {s: schedule.step[schedule.kind == Kind.ALL_TO_ALL].tolist().count(s) for s in (1, 2, 3)}
    assert all(arrives.values())
    kinds, steps = schedule.kind.tolist(), schedule.step.tolist()
    for stage in (1, 2):
        first_kernel = next(i for i, k in enumerate(kinds) if k == Kind.ATTENTION and steps[i] == stage)
        last_fetch = max(i for i, k in enumerate(kinds) if k == Kind.ALL_TO_ALL and steps[i] == stage + 1)
        assert last_fetch < first_kernel


def test_defaults_plan_in_seconds():
    small, large = (workload("causal", (tokens,), "mha") for tokens in (4 * 8192, 96 * 8192))
    assert default_block(small, 4) == 2048
    assert default_groups(small, 2048) == 8
    assert default_block(large, 96) == 4096
    assert cut(large, 4096, 1).computations * default_groups(large, 4096) <= COMPUTATIONS


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"variant": "papre"}, "variant: expected one of paper, released, cpsim, got 'papre'"),
        ({"solver": "metis"}, "solver: expected one of mtkahypar, kahypar, greedy, got 'metis'"),
        ({"eps_intra": -1}, "eps_intra: expected a number from 0 to 100, got -1"),
        ({"stages": 0}, "stages: expected a positive integer, got 0"),
        ({"block": 1.5}, "block: expected a whole number from 1, got 1.5"),
    ],
)
def test_wrong_knobs_say_what_is_possible(knobs, message):
    with pytest.raises(ScenarioError, match=message):
        plan("dcp", workload(), cluster(2), "fwd", knobs)


def test_fewer_blocks_than_ranks_are_refused_with_a_size_that_fits():
    with pytest.raises(InfeasibleError, match="got 2 of 32 tokens for 8 ranks; use block: 6"):
        plan("dcp", workload(), cluster(8), "fwd", {"block": 32})


def test_planning_is_charged_where_attention_and_processes_do_not_hide_it():
    assert Planning(seconds=3.0, share=300).exposed_s(0.02) == 0
    assert Planning(seconds=3.0, share=100).exposed_s(0.02) == pytest.approx(0.01)
    asked = {"strategy": "dcp", "kernel": "fa4", "gpus": 4, "cluster": "h200-4", "heads": 8, "kv_heads": 2}
    asked |= {"tokens": 4096}
    hidden = predict(Scenario(**asked))
    charged = predict(Scenario(**asked, knobs={"layers": 1, "planners": 1}))
    assert charged.planning_s == hidden.planning_s > hidden.time_s
    assert hidden.parts_s.get("planning", 0) == 0
    assert charged.time_s == pytest.approx(hidden.planning_s)
    assert charged.parts_s["planning"] == pytest.approx(charged.time_s - hidden.time_s)


def test_its_own_code_copies_gradients_of_every_block_of_computation():
    """Each block of queries that sees a block of keys gives gradients of it, for every query head: zeros are written,
    and then it is read and written. Sums are in the working type."""
    case, knobs = workload("causal", (64,), "gqa"), {"block": 8, "variant": "released", "solver": "greedy"}
    ours, theirs = (plan("dcp", case, cluster(2), "bwd", knobs, code) for code in (CPSIM, DCP))
    validate(theirs, case, "bwd")
    assert theirs.bytes_sent() == pytest.approx(ours.bytes_sent())
    planned = plan_case(
        case,
        cluster(2),
        8,
        default_groups(case, 8),
        Settings(variant="released", solver="greedy", eps_inter=0.4, eps_intra=0.1, stages=4),
        0,
    )
    copied, summed = (theirs.nbytes[theirs.kind == kind].sum() for kind in (Kind.ELEMENTWISE, Kind.ACCUMULATE))
    b, shared = planned.blocks, case.num_heads // case.num_kv_heads
    assert copied == 3 * b.computations * 8 * shared * b.kv_bytes
    assert 0 < summed < ours.nbytes[ours.kind == Kind.ACCUMULATE].sum()


def test_its_own_code_copies_inputs_once_and_reads_them_through_tables():
    """A rank's own tokens into blocks, tokens of others out of what has come; and what is sent, before."""
    case = workload("causal", (64,), "gqa")
    knobs = {"block": 8, "head_groups": 8, "variant": "released", "solver": "greedy"}
    ours, theirs = (plan("dcp", case, cluster(2), "fwd", knobs, code) for code in (CPSIM, DCP))
    validate(theirs, case, "fwd")
    planned = plan_case(case, cluster(2), 8, 8, Settings(variant="released", solver="greedy"), 0)
    b, placement = planned.blocks, planned.placement
    read = sum(
        int(wanted(b, placement.worker, units, 2).sum()) * 8 * nbytes
        for units, nbytes in zip(b.sides, (b.q_bytes, b.kv_bytes), strict=True)
    )
    assert theirs.bytes_sent().tolist() == ours.bytes_sent().tolist()
    assert theirs.nbytes[theirs.kind == Kind.COPY].sum() == 2 * (read + theirs.bytes_sent().sum())


def test_sequences_have_tables_of_their_own_of_the_blocks_that_they_see():
    """Two blocks of queries under a causal mask; the second one sees the keys of the first, too."""
    mask = Slices(*(np.array([n]) for n in (0, 32, 0, 32, -UNBOUNDED, 0)))
    rows = np.array([[0, 8, 16, 8, 16], [0, 16, 24, 0, 24]])
    found, num_q, num_k = through_tables(rows, mask)
    assert (num_q, num_k) == (16, 8 + 24)
    assert np.stack([found.q_start, found.q_end, found.k_start, found.k_end]).T.tolist() == [
        [0, 8, 0, 8],
        [8, 16, 8, 32],
    ]
    assert found.areas().tolist() == [8 * 9 // 2, 8 * 16 + 8 * 9 // 2]
    assert union(np.array([[30, 40], [0, 8], [8, 12], [35, 50], [0, 4]])).tolist() == [[0, 12], [30, 50]]


def test_its_own_code_computes_the_same_pairs_through_tables():
    case = workload("lambda", (96,), "gqa")
    knobs = {"block": 8, "head_groups": 8, "variant": "released", "solver": "greedy"}
    schedule = plan("dcp", case, cluster(2), "bwd", knobs, DCP)
    ops = np.flatnonzero(schedule.kind == Kind.ATTENTION_BACKWARD)
    for tile, slices, num_q, num_k in _masks_of_tiles(schedule, ops, 8):
        assert slices.areas().sum() == schedule.tiles.area[tile]
        assert (slices.q_end.max(), slices.k_end.max()) == (num_q, num_k)
    assert len(np.unique(schedule.tile[ops])) == len(ops)


def test_too_many_computation_blocks_are_refused_before_they_are_planned():
    case = workload("causal", (4096,))
    with pytest.raises(InfeasibleError, match=r"up to 400000 computation blocks, got \d+; use larger blocks"):
        plan("dcp", case, cluster(4), "fwd", {"block": 2})
