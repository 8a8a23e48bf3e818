"""Attention to chosen keys: counts against lists of pairs, schedules against dense attention with the same choice."""

from dataclasses import replace
from itertools import product

import numeric
import numpy as np
import pytest

from cpsim.calibrate import fit_sparse
from cpsim.case.cluster import load_cluster
from cpsim.case.gpu import find_gpu
from cpsim.case.sparse import INDEX_BYTES, PATTERNS, read_sparse, written
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError, ScenarioError, ScheduleError
from cpsim.masks.slices import RangeSets, dense_mask
from cpsim.models import sparse as costs
from cpsim.models.derive import moved
from cpsim.models.profile import load_profile, save_profile
from cpsim.prediction.predict import predict
from cpsim.schedule.check import validate
from cpsim.schedule.schedule import Kind
from cpsim.strategies import plan, sharding
from cpsim.strategies.sparse import expected_keys, plan_wanted
from studies import sparse as study

SMALL = {
    "dsa": {"top_k": 5, "index_heads": 2, "index_dim": 4, "alike": 8},
    "nsa": {"top_k": 3, "block": 8, "stride": 4, "window": 6, "alike": 8},
    "moba": {"top_k": 3, "block": 8, "alike": 8},
    "blocks": {"top_k": 2, "block": 8, "alike": 8},
}
STRATEGIES = ("allgather", "ulysses", "fetch")
TOKENS = 128


def workload(kind, documents=(TOKENS,), **more):
    latent = kind == "dsa"
    return Workload(
        documents=documents,
        mask="causal" if len(documents) == 1 else "causal_document",
        num_heads=8,
        num_kv_heads=1 if latent else 4,
        head_dim=6,
        value_dim=4 if latent else 0,
        dtype="bf16",
        sparse=read_sparse({"kind": kind, **SMALL[kind], **more}),
    )


def cluster(gpus):
    return load_cluster("h200-4").with_gpus(gpus)


def choose(w, seed=0):
    """Which keys every head's queries attend to, ``[heads, tokens, tokens]``: the pattern's, of random scores."""
    rng, sparse, seen = np.random.default_rng(seed), w.sparse, dense_mask(w.slices(), w.num_tokens)
    chosen = np.zeros((w.num_heads, *seen.shape), bool)
    starts = np.concatenate([np.full(n, at) for n, at in zip(w.documents, np.cumsum((0, *w.documents)), strict=False)])
    choosers = sparse.choosers(w.num_heads, w.num_kv_heads) if sparse.scores else w.num_heads
    for c, t in product(range(choosers), range(w.num_tokens)):
        keys, at = np.flatnonzero(seen[t]), t - starts[t]
        if sparse.kind == "dsa":
            mine = rng.permutation(keys)[: sparse.top_k]
        else:
            block = (keys - starts[t]) // sparse.block
            earlier = rng.permutation(at // sparse.block)[: sparse.top_k - 1]
            mine = keys[np.isin(block, [*earlier, at // sparse.block])]
        chosen[c * w.num_heads // choosers : (c + 1) * w.num_heads // choosers, t, mine] = True
    return chosen


class Sparse(numeric.Interpreter):
    """Attention sees chosen keys alone; candidates and choices are not followed."""

    def __init__(self, schedule, w, given, chosen):
        self.chosen = chosen
        more = {name: np.zeros((w.num_tokens, 1, 1)) for name in ("candidates", "choice")}
        super().__init__(schedule, w, given | more)

    def compute(self, i, reads, targets, old):
        if Kind(int(self.s.kind[i])) in (Kind.SELECT, Kind.ELEMENTWISE):
            return [self.empty(self.block(k), 0.0) for _, k, _ in targets]
        return super().compute(i, reads, targets, old)

    def attention(self, i, reads, targets):
        known = numeric.attend, numeric.attend_backward
        queries, keys = (np.unique(np.concatenate([t for n, t, *_ in reads if n == name])) for name in ("q", "kv"))
        first, count = self.s.heads_of(i)[:2]
        seen = self.chosen[first : first + count][:, queries][:, :, keys]
        whole = self.chosen[first : first + count][:, queries]
        assert seen.sum() == whole.sum()  # every chosen key is there
        try:
            numeric.attend = lambda q, kv, allowed: known[0](q, kv, allowed & seen)
            numeric.attend_backward = lambda *given: known[1](*given[:-1], given[-1] & seen)
            return super().attention(i, reads, targets)
        finally:
            numeric.attend, numeric.attend_backward = known


def dense(w, chosen, seed=0):
    rng = np.random.default_rng(seed)
    q, dout = (rng.normal(size=(w.num_tokens, w.num_heads, width)) for width in (w.head_dim, w.values))
    kv = rng.normal(size=(w.num_tokens, w.num_kv_heads, w.head_dim + w.values))
    allowed = chosen & dense_mask(w.slices(), w.num_tokens)
    out = numeric.attend(q, kv, allowed)
    dq, dkv = numeric.attend_backward(q, kv, out, dout, allowed)
    return {"q": q, "kv": kv, "dout": dout, "out": out, "o": out[..., :-1], "dq": dq, "dkv": dkv}


def wanted_by(chosen, shards):
    """Keys that queries of every rank chose, its own among them."""
    sets = []
    for rank in range(len(shards)):
        mine = np.concatenate([np.arange(a, b) for a, b in shards.of(rank)])
        keys = chosen[:, mine].any(axis=(0, 1))
        keys[mine] = True
        edges = np.flatnonzero(np.diff(np.concatenate([[0], keys.astype(int), [0]]))).reshape(-1, 2)
        sets.append(edges)
    return RangeSets(np.cumsum([0, *map(len, sets)]), np.concatenate(sets))


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize("documents", [(TOKENS,), (40, 88)])
def test_results_are_those_of_dense_attention_to_the_chosen_keys(kind, strategy, pass_, documents):
    w = workload(kind, documents)
    chosen = choose(w)
    if strategy == "fetch":
        shards = sharding.zigzag_shards(np.array([0, TOKENS]), 4)[0]
        schedule = plan_wanted(w, shards, wanted_by(chosen, shards), pass_)
    else:
        schedule = plan(strategy, w, cluster(4), pass_, {})
    validate(schedule, w, pass_)
    given = dense(w, chosen)
    for seed in range(2):
        run = Sparse(schedule, w, given, chosen).run(numeric.any_order(schedule, seed))
        for text, tensor, tokens, heads, array in run:
            if tensor in given:
                np.testing.assert_allclose(array, given[tensor][tokens, heads], rtol=1e-10, atol=1e-10, err_msg=text)


def test_a_key_that_was_not_fetched_is_missed():
    w = workload("moba")
    chosen, shards = choose(w), sharding.zigzag_shards(np.array([0, TOKENS]), 4)[0]
    schedule = plan_wanted(w, shards, shards, "fwd")
    with pytest.raises(AssertionError):
        Sparse(schedule, w, dense(w, chosen), chosen).run(range(len(schedule)))


@pytest.mark.parametrize("kind", SMALL)
def test_pairs_are_those_of_the_choice(kind):
    w = workload(kind, (40, 88), **({"window": 1} if kind == "nsa" else {}))
    chosen = choose(w)
    more = w.num_tokens if kind == "nsa" else 0  # the window counts apart
    assert w.pairs() == chosen[0].sum() + more
    lengths = np.array(w.documents)
    assert w.sparse.attended(np.zeros(2, int), lengths).sum() == w.pairs()
    halves = w.sparse.attended(0, lengths // 3) + w.sparse.attended(lengths // 3, lengths)
    assert (halves == w.sparse.attended(0, lengths)).all()


def test_scored_pairs_are_those_of_the_papers():
    for n in (1, 7, 8, 40):
        t = np.arange(n)
        assert workload("dsa").sparse.scored(0, n) == (t + 1).sum()
        assert workload("nsa").sparse.scored(0, n) == ((t + 1) // 4).sum()
        assert workload("moba").sparse.scored(0, n) == (t // 8).sum()


@pytest.mark.parametrize("gpus", [2, 4])
def test_bytes_sent_are_those_of_closed_forms(gpus):
    share, per_rank = (gpus - 1) / gpus, TOKENS // gpus
    for kind in SMALL:
        w = workload(kind)
        kv = TOKENS * w.num_kv_heads * w.kv_elements * 2
        candidates = {"dsa": TOKENS * 4, "nsa": TOKENS // 4 * 4 * 12, "moba": TOKENS // 8 * 4 * 6, "blocks": 0}[
            kind
        ] * 2
        sent = plan("allgather", w, cluster(gpus), "fwd", {}).bytes_sent()
        assert sent == pytest.approx(share * (kv + candidates))
        choice = w.sparse.choice_bytes(w.num_heads, w.num_kv_heads)
        spread = choice * (TOKENS if kind == "dsa" else per_rank)
        heads = w.num_heads * (w.head_dim + w.values) * 2
        copies = max(1, gpus // w.num_kv_heads) * w.num_kv_heads * w.kv_elements * 2
        sent = plan("ulysses", w, cluster(gpus), "fwd", {}).bytes_sent()
        expected = share * (candidates + spread + per_rank * (heads + copies))
        assert sent == pytest.approx(expected)


def test_a_rank_that_wants_all_keys_fetches_what_an_all_gather_brings():
    w, shards = workload("blocks"), sharding.contiguous(TOKENS, 4)
    everything = RangeSets(np.arange(5), np.tile([[0, TOKENS]], (4, 1)))
    fetched = plan_wanted(w, shards, everything, "fwd").bytes_sent()
    gathered = plan("allgather", replace(w, sparse=None), cluster(4), "fwd", {}).bytes_sent()
    assert fetched == pytest.approx(gathered)


def test_expected_keys_are_as_many_as_independent_choices_take():
    documents, shards = (8192,), sharding.contiguous(8192, 4)
    base = workload("moba", documents, block=64, top_k=3, alike=64)
    w = replace(base, num_heads=1, num_kv_heads=1)
    counts = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        takes = [rng.permutation(t)[:2] for t in range(96, 128)]
        counts.append(len({b for take in takes for b in take.tolist() if b < 96}))
    expected = expected_keys(w, shards).num_tokens()[3] - 2048
    assert expected / 64 == pytest.approx(np.mean(counts), rel=0.05)
    more = replace(w, sparse=replace(w.sparse, alike=256))
    assert expected_keys(more, shards).num_tokens()[3] < expected_keys(w, shards).num_tokens()[3]


def test_the_check_finds_queries_that_are_not_scored():
    w = workload("moba")
    schedule = plan("allgather", w, cluster(4), "fwd", {})
    tile = schedule.tile.copy()
    tile[np.flatnonzero(schedule.kind == Kind.SELECT)[0]] = 0
    with pytest.raises(ScheduleError, match="computed 0 times"):
        validate(replace(schedule, tile=tile), w, "fwd")


def test_patterns_are_read_and_written():
    for kind, pattern in PATTERNS.items():
        assert read_sparse(kind) == pattern == read_sparse(written(pattern))
        assert written(pattern) == {"kind": kind}
    assert written(read_sparse({"kind": "moba", "block": 4096, "top_k": 12})) == {
        "kind": "moba",
        "top_k": 12,
        "block": 4096,
    }
    for bad in ("dense", {"top_k": 3}, {"kind": "moba", "window": 4}, {"kind": "nsa", "block": 0}, 3):
        with pytest.raises(ValueError, match=r"expected|has"):
            read_sparse(bad)


def test_what_cannot_be_planned_says_why():
    with pytest.raises(InfeasibleError, match="sparse: chosen keys are planned for"):
        plan("zigzag_ring", workload("moba"), cluster(4), "fwd", {})
    with pytest.raises(InfeasibleError, match="keys chosen"):
        plan("allgather", replace(workload("moba"), sparse=None), cluster(4), "fwd", {"keys": "chosen"})
    with pytest.raises(ScenarioError, match="expected one of all, chosen"):
        plan("allgather", workload("moba"), cluster(4), "fwd", {"keys": "some"})
    with pytest.raises(ScenarioError, match="causal"):
        replace(workload("moba"), mask="full")
    with pytest.raises(ScenarioError, match="one for all heads"):
        replace(workload("moba"), sparse=PATTERNS["dsa"])
    assert INDEX_BYTES == 4


CASE = {"gpus": 8, "cluster": "dgx-h100", "tokens": 65536, "heads": 16, "kv_heads": 4, "strategy": "allgather"}
LATENT = {"heads": 128, "kv_heads": 1, "head_dim": 576, "value_dim": 512}


@pytest.mark.parametrize("kind", SMALL)
def test_predictions_grow_with_the_keys_that_are_chosen_and_say_what_they_rest_on(kind):
    case = CASE | (LATENT if kind == "dsa" else {})
    few, many = (predict(case | {"sparse": {"kind": kind, "top_k": k}}) for k in (8, 512))
    assert few.time_s < many.time_s
    assert few.time_s_low < few.time_s < few.time_s_high
    assert few.bytes_sent_per_gpu == many.bytes_sent_per_gpu  # all keys are gathered
    assert any(note.startswith(f"sparse {kind}") for note in few.notes)


def test_chosen_keys_send_fewer_bytes_where_many_queries_choose_alike():
    sent = [
        predict(CASE | {"sparse": {"kind": "moba", "alike": alike}, "knobs": knobs}).bytes_sent_per_gpu
        for alike, knobs in ((64, {}), (64, {"keys": "chosen"}), (4096, {"keys": "chosen"}))
    ]
    assert sent[2] < sent[1] < sent[0]


def test_what_was_not_measured_is_as_uncertain_as_a_guess():
    dense, blocks = (predict(CASE | more) for more in ({}, {"sparse": "blocks"}))
    width = [np.log(p.time_s_high / p.time_s_low) for p in (dense, blocks)]
    assert width[1] > 1.5 * width[0]


def test_other_gpus_differ_by_peak_and_bandwidth():
    h200, a100 = find_gpu("h200"), find_gpu("a100")
    here, there = costs.rates_on(h200), costs.rates_on(a100)
    assert here == costs.rates()
    flop = h200.peak_flops_per_s / a100.peak_flops_per_s
    memory = h200.memory_bandwidth_bytes_per_s / a100.memory_bandwidth_bytes_per_s
    for name, kind, ratio in (
        ("moba fwd", "flop", flop),
        ("choose_keys fwd", "pairs", memory),
        ("index fwd", "flop", memory),
    ):
        assert there[name].of_work_s[kind] == pytest.approx(here[name].of_work_s[kind] * ratio)
    wide, narrow = (
        predict(CASE | {"cluster": cluster, "sparse": "moba", "gpus": 8, "kernel": "fa2"})
        for cluster in ("p4de", "dgx-h200")
    )
    assert any("not measured on" in note for note in wide.notes)
    assert not any("sparse moba: not measured on" in note for note in narrow.notes)


def test_a_fit_finds_the_rates_that_points_were_made_with():
    made = costs.Rates(3e-5, {"flop": 2e-15, "rows": 1e-12}, 0.0)
    calls = [
        costs.Call(queries=n, pairs=n * k, heads=h, key=128, value=128)
        for n, k, h in ((4096, 64, 16), (8192, 512, 16), (16384, 1024, 64), (4096, 2048, 8))
    ]
    points = [(call, made.seconds(call), int(call.queries)) for call in calls]
    found = fit_sparse.fitted("attend_blocks fwd", points)
    assert found.call_s == pytest.approx(made.call_s, rel=1e-6)
    assert found.of_work_s == pytest.approx(made.of_work_s, rel=1e-6)
    off = [(call, seconds * 1.5 if keys == 8192 else seconds, keys) for call, seconds, keys in points]
    assert max(np.abs(fit_sparse.left_out("attend_blocks fwd", off))) > 0.2


def test_the_file_of_rates_is_what_the_fit_makes():
    found = fit_sparse.fit(study.measured())
    assert costs.DATA.read_text(encoding="utf-8") == fit_sparse.as_text(found, [path.name for path in study.POINTS])


def test_a_profile_has_rates_of_its_own(tmp_path, monkeypatch):
    """Twice as slow as those that ship: prices follow, nothing stands in, and the file is read as it was written. On
    another GPU they are moved as those that ship."""
    path, usual = tmp_path / "mine.json", load_profile("h100")
    save_profile(usual, path)
    monkeypatch.setattr("sys.argv", ["fit_sparse", *map(str, study.POINTS), "--into", str(path)])
    fit_sparse.main()
    mine = load_profile(path)
    assert mine.sparse == {name: one for name, one in costs.rates().items() if one.sigma < costs.UNMEASURED_SIGMA}
    slow = {
        n: replace(r, call_s=2 * r.call_s, of_work_s={k: 2 * s for k, s in r.of_work_s.items()})
        for n, r in mine.sparse.items()
    }
    save_profile(replace(mine, sparse=slow), path)
    case = CASE | {"sparse": "moba", "cluster": "dgx-h100", "gpus": 1, "strategy": "none"}
    once, twice = (predict(case | {"profile": str(p)}) for p in ("h100", path))
    h100, h200 = find_gpu("h100"), find_gpu("h200")
    memory = 2 * h100.memory_bandwidth_bytes_per_s / h200.memory_bandwidth_bytes_per_s
    for pass_ in ("attention fwd", "attention bwd"):  # products are as fast on both, copies are not
        assert memory < twice.parts_s[pass_] / once.parts_s[pass_] < 2
    assert any("not measured on" in note for note in once.notes)
    assert not any("not measured on" in note for note in twice.notes)
    assert (twice.time_s_high / twice.time_s_low) < (once.time_s_high / once.time_s_low)
    there = moved(load_profile(path), h100, h200)
    assert there.sparse["moba fwd"].call_s == slow["moba fwd"].call_s
    assert there.sparse["moba fwd"].of_work_s["flop"] == pytest.approx(
        slow["moba fwd"].of_work_s["flop"] * h100.peak_flops_per_s / h200.peak_flops_per_s
    )


def test_the_executor_refuses_chosen_keys():
    pytest.importorskip("torch")
    from cpsim.case.load import scenario_from
    from cpsim.real.others.cpsim import make

    with pytest.raises(InfeasibleError, match="the executor attends to all keys"):
        make(scenario_from(CASE | {"sparse": "blocks"}), "fwd", None)
    theirs = CASE | {"sparse": "moba", "implementation": "ring-flash-attn", "strategy": "zigzag_ring", "kernel": "fa2"}
    with pytest.raises(InfeasibleError, match="sparse"):
        predict(theirs)


@pytest.mark.parametrize(("layout", "most"), [("contiguous", 1.75), ("zigzag", 1.0)])
def test_scores_are_uneven_where_shards_are_contiguous_and_choices_nearly_even(layout, most):
    w = replace(workload("dsa", (4096,)), sparse=read_sparse({"kind": "dsa", "top_k": 64}))
    schedule = plan("allgather", w, cluster(4), "fwd", {"layout": layout})
    tiles = schedule.tile[schedule.kind == Kind.SELECT].tolist()
    ranges = [np.array(list(costs.ranges_of(schedule.tiles, tile))).T for tile in tiles]
    scored = np.array([w.sparse.scored(*r).sum() for r in ranges])
    assert scored.max() / scored.mean() == pytest.approx(most, rel=0.01)
    attended = np.array([w.sparse.attended(*r).sum() for r in ranges])
    assert attended.max() / attended.mean() < 1.01
    assert attended.sum() == w.pairs()


def test_what_others_publish_beside_nsa_agrees_on_dense_attention_and_the_page_says_so():
    """So it is the sparse kernels that differ: the paper's ratio is that of keys, at equal efficiency."""
    nsa = read_sparse("nsa")
    keys = (nsa.attended(0, 2**16).sum() + nsa.scored(0, 2**16).sum()) / 2**16
    assert 2**15 / keys == pytest.approx(9.0, rel=0.05)
    for name, passes in study.NSA_TIMES.items():
        if "H800" not in name and "H100" not in name:
            continue
        for pass_, (dense_ms, _) in zip(("fwd", "bwd"), passes, strict=True):
            dense, sparse = study.Claim("", {**study._NSA, "cluster": "dgx-h100"}, pass_, 1.0).predicted()
            assert 1e3 * dense == pytest.approx(dense_ms, rel=0.04)
            assert 1e3 * sparse > passes[pass_ == "bwd"][1]
    shown = study.PAGE.read_text(encoding="utf-8")
    assert all(line in shown for line in study.nsa_rows())
