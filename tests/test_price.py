"""Prices of whole schedules: what they add up to, and what they refuse."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from cpsim.case.cluster import load_cluster
from cpsim.case.load import scenario_from
from cpsim.case.workload import Workload
from cpsim.errors import InfeasibleError, ProfileError
from cpsim.masks.tiles import sequences
from cpsim.models.attention.calls import attention_op_seconds
from cpsim.models.conditions import Conditions
from cpsim.models.cost_models import GROUPS
from cpsim.models.feasible import copied_heads
from cpsim.models.launches import _crossings
from cpsim.models.network.collective import channels, collective_seconds, transfer_seconds
from cpsim.models.network.communication import Communication
from cpsim.models.network.holds import held_sms
from cpsim.models.network.links import Links
from cpsim.models.network.pressure import Messages
from cpsim.models.price import price
from cpsim.models.profile import load_profile
from cpsim.models.spread import expected_maximum
from cpsim.prediction.case import resolve
from cpsim.prediction.passes import run_ranks
from cpsim.schedule.schedule import Kind
from cpsim.sim.fast import simulate
from cpsim.sim.reference import simulate_reference
from cpsim.strategies import plan
from cpsim.strategies.others.ring_flash_attn import RING_FLASH_ATTN


def workload(gpus=4, tokens=4096, mask="causal", documents=None, **changes):
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bf16", **changes}
    return Workload(documents=documents or (gpus * tokens,), mask=mask, **shape)


def pricing(gpus=4, cluster="dgx-h200", kernel="fa4", **changes):
    where = load_cluster(cluster).with_gpus(gpus)
    case = {"head_dim": 128, "dtype": "bf16", "profile": load_profile("h200"), **changes}
    return Conditions(cluster=where, kernel=kernel, **case)


def priced(name, gpus=4, pass_="fwd", knobs=None, mask="causal", documents=None, tokens=4096, **changes):
    prices = pricing(gpus, **changes)
    schedule = plan(name, workload(gpus, tokens, mask=mask, documents=documents), prices.cluster, pass_, knobs or {})
    return schedule, price(schedule, prices)


@pytest.mark.parametrize(("profile", "name"), [("b200", "ring"), ("h200", "striped_ring")])
def test_a_slower_network_never_makes_a_pass_faster(profile, name):
    """Messages that wait for it draw no more, and a GPU whose clock falls may take the time that others leave it."""
    prices, seconds = pricing(32, kernel="cudnn", profile=load_profile(profile), ahead_s=np.inf), []
    for speed in (0.85, 0.9, 0.95, 1.0, 1.1, 2.0, 100.0):
        fabric = prices.cluster.fabric
        faster = dataclasses.replace(
            fabric,
            flow_bandwidth_bytes_per_s=speed * fabric.flow_bandwidth_bytes_per_s,
            nic_bandwidth_bytes_per_s=speed * fabric.nic_bandwidth_bytes_per_s,
        )
        here = dataclasses.replace(prices, cluster=dataclasses.replace(prices.cluster, fabric=faster))
        schedule = plan(name, workload(32, 8192), here.cluster, "bwd", {})
        seconds.append(simulate(schedule, price(schedule, here).work).makespan_s)
    assert max(np.array(seconds[1:]) / np.minimum.accumulate(seconds)[:-1]) < 1.015


@pytest.mark.parametrize("nodes", [1, 2])
def test_an_all_reduce_sends_twice_what_an_all_gather_does_or_switches_add(nodes):
    prices = Communication(pricing(8 * nodes).cluster, load_profile("h200"))
    gathered, reduced = (prices.collective(kind, 1e9, 8 * nodes, nodes) for kind in (Kind.ALL_GATHER, Kind.ALL_REDUCE))
    share = (8 * nodes - 1) / (8 * nodes)
    sums = 2e9 * share if nodes > 1 else 1e9 * (1 + 1 / 8)  # once all of it, and its share of the result
    assert (gathered[1], reduced[1]) == (pytest.approx(1e9 * share), pytest.approx(sums))
    assert gathered[2] == pytest.approx(gathered[1] / 8 * (nodes > 1))
    assert reduced[2] == pytest.approx(2 * gathered[2])


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize("name", ["ring", "zigzag_ring", "allgather", "ulysses", "dcp"])
def test_engines_agree_on_priced_schedules(name, pass_):
    schedule, price = priced(name, gpus=16, pass_=pass_, documents=(30000, 500, 35036), mask="causal_document")
    fast, reference = simulate(schedule, price.work), simulate_reference(schedule, price.work)
    np.testing.assert_allclose(fast.end_s, reference.end_s, rtol=1e-9)


@pytest.mark.parametrize("name", ["ring", "zigzag_ring", "allgather", "ulysses"])
def test_every_op_but_barriers_takes_time_and_belongs_to_a_cost_model(name):
    _, price = priced(name)
    assert (price.work.duration_s > 0).all()
    assert price.group.min() >= 0
    assert price.group.max() < len(GROUPS)


def test_hosts_launch_in_list_order():
    schedule, price = priced("zigzag_ring")
    for rank in range(4):
        mine = [i for i in range(len(schedule)) if rank in schedule.ranks_of(i)]
        own = [i for i in mine if len(schedule.ranks_of(i)) == 1]
        assert (np.diff(price.work.release_s[own]) > 0).all()


def test_transfers_between_nodes_use_nics_and_those_inside_use_ports():
    schedule, price = priced("ring", gpus=16)
    links = Links(pricing(16).cluster, load_profile("h200").collective.port_bytes_per_s)
    work = price.work
    assert len(work.link_bytes_per_s) == len(links.capacity_bytes_per_s()) == 2 * 16 + 2 * 16
    for op in np.flatnonzero(schedule.kind == Kind.TRANSFER):
        source, target = schedule.ranks_of(op)
        used = work.flow_link[work.flow_start[op] : work.flow_start[op + 1]].tolist()
        assert used == ([source, 16 + target] if source // 8 == target // 8 else [32 + source, 48 + target])
        assert price.group[op] == GROUPS.index("transfer" if source // 8 == target // 8 else "transfer between nodes")


def test_no_op_alone_asks_for_more_than_its_links_carry():
    for name in ("ring", "allgather", "ulysses"):
        _, price = priced(name, gpus=16)
        work = price.work
        rate = work.flow_bytes / np.repeat(work.duration_s, np.diff(work.flow_start))
        assert (rate <= work.link_bytes_per_s[work.flow_link] * (1 + 1e-9)).all()


def test_an_oversubscribed_network_slows_what_leaves_the_node():
    free = pricing(16)
    fabric = dataclasses.replace(free.cluster.fabric, oversubscription=4.0)
    tight = dataclasses.replace(free, cluster=dataclasses.replace(free.cluster, fabric=fabric))
    schedule = plan("allgather", workload(16), free.cluster, "fwd", {})
    op = int(np.flatnonzero(schedule.kind == Kind.ALL_GATHER)[0])
    assert price(schedule, tight).work.duration_s[op] > 2 * price(schedule, free).work.duration_s[op]


def test_a_kernel_that_was_not_measured_is_named_with_those_that_were():
    with pytest.raises(ProfileError, match=r"lacks kernel 'ffa' fwd; it has cudnn, fa2, fa4, .*sdpa_flash"):
        priced("ring", kernel="ffa")


def test_calls_that_a_kernel_does_not_offer_are_refused():
    with pytest.raises(InfeasibleError, match="cudnn has no causal call with 4096 queries on 8192 keys"):
        priced("allgather", kernel="cudnn", knobs={"layout": "contiguous"})
    with pytest.raises(InfeasibleError, match="cudnn takes sequences of one length a call"):
        priced("ulysses", kernel="cudnn", mask="causal_document", documents=(4096, 12288))
    with pytest.raises(InfeasibleError, match="runs bf16 and fp16, got dtype fp32"):
        priced("ring", dtype="fp32")


def test_head_dims_that_a_kernel_does_not_have_are_refused():
    with pytest.raises(InfeasibleError, match="kernel fa4 runs head_dim up to 256, got 512"):
        priced("ring", head_dim=512)


def test_a_head_dim_that_was_not_measured_is_noted():
    _, price = priced("ring", head_dim=32)
    assert any("head_dim 32" in note for note in price.notes)


def test_a_head_dim_between_measured_ones_is_noted():
    for head_dim, noted in ((64, False), (72, True), (128, False)):
        _, price = priced("ring", head_dim=head_dim)
        found = [note for note in price.notes if "head_dim" in note]
        assert found == ["head_dim 72: not measured, in proportion to 128"] * noted


def test_streamed_hosts_run_ahead():
    _, synced = priced("zigzag_ring")
    _, streamed = priced("zigzag_ring", ahead_s=1e-3)
    assert streamed.work.release_s.max() < synced.work.release_s.max()
    assert priced("zigzag_ring", ahead_s=np.inf)[1].work.release_s.max() == 0


def test_messages_are_priced_by_the_ranks_of_their_process_group():
    profile = load_profile("h200")
    for strategy, gpus, ranks in (("ring", 2, 2), ("ring", 4, 4), ("usp", 4, 2)):
        schedule, price = priced(strategy, gpus=gpus)
        sends = schedule.kind == Kind.TRANSFER
        alone = transfer_seconds(profile.collective, schedule.nbytes[sends], ranks)
        alone -= profile.host.streamed_gain_s["message"]
        assert (price.work.duration_s[sends] >= alone).all()
        np.testing.assert_allclose(price.work.duration_s[sends], alone, rtol=0.05)


def test_a_ring_over_nodes_is_slow_inside_them_too():
    """NCCL gives every message of a process group that spans nodes two channels."""
    schedule, price = priced("ring", gpus=16)
    sends = np.flatnonzero(schedule.kind == Kind.TRANSFER)
    near = [i for i in sends.tolist() if len({rank // 8 for rank in schedule.ranks_of(i)}) == 1]
    rates = schedule.nbytes[near] / price.work.duration_s[near]
    assert 15e9 < rates.min() <= rates.max() < 45e9


def test_ranks_of_an_uneven_ring_drift_apart_where_messages_fit_the_buffers():
    uneven = (16384, 8192, 4096, 2048, 2048)  # ranks 0 and 1 compute in two steps of four, the others in one
    for pass_ in ("fwd", "bwd"):
        schedule, price = priced("ring", mask="full_document", documents=uneven, pass_=pass_)
        keys = schedule.nbytes[schedule.kind == Kind.TRANSFER].min()
        assert np.array_equal(price.work.eager, (schedule.kind == Kind.TRANSFER) & (schedule.nbytes == keys))
        bound = simulate(schedule, dataclasses.replace(price.work, eager=np.zeros(len(schedule), bool)))
        assert simulate(schedule, price.work).makespan_s < 0.85 * bound.makespan_s


def test_no_message_between_nodes_is_taken_as_gone_before_its_receiver_is_there():
    schedule, price = priced("ring", gpus=16, tokens=512)
    sends = np.flatnonzero(schedule.kind == Kind.TRANSFER)
    near = np.array([len({rank // 8 for rank in schedule.ranks_of(op)}) == 1 for op in sends.tolist()])
    assert np.array_equal(price.work.eager[sends], near)


def alike(spread=((), ()), **sigma):
    """A profile whose GPUs do not differ, and calls on one of them as given: times and how much they spread."""
    profile = load_profile("h200")
    sigma = {name: 0.0 if "GPUs" in name or name == "run to run" else s for name, s in profile.sigma.items()} | sigma
    attention = {
        key: dataclasses.replace(params, calls_s=spread[0], calls_spread=spread[1])
        for key, params in profile.attention.items()
    }
    return dataclasses.replace(profile, sigma=sigma, attention=attention)


@pytest.mark.parametrize(("strategy", "busiest"), [("ulysses", 8), ("ring", 1)])
def test_attention_is_as_slow_as_on_the_slowest_of_the_busiest_gpus(strategy, busiest):
    """Under a causal mask the last rank of a ring without zigzag has more to do than any other."""
    spread = load_profile("h200").between_gpus("fa4", "fwd")
    differ = alike(**{"attention fwd fa4 between GPUs": spread})
    schedule, price = priced(strategy, gpus=8, profile=differ)
    _, ideal = priced(strategy, gpus=8, profile=alike())
    attention = schedule.kind == Kind.ATTENTION
    slower = price.work.duration_s[attention] / ideal.work.duration_s[attention]
    np.testing.assert_allclose(slower, 1 + spread * expected_maximum(busiest), rtol=1e-9)
    assert 0.002 < spread < 0.03


@pytest.mark.parametrize(
    ("strategy", "gpus", "calls"),
    [
        ("ulysses", 1, 1),
        ("ulysses", 8, 1),
        ("zigzag_ring", 2, 2),
        ("zigzag_ring", 8, 8),
    ],
)
def test_calls_differ_from_one_to_the_next_and_all_wait_for_the_slowest_which_cancels_over_the_calls_of_a_pass(
    strategy, gpus, calls
):
    schedule, price = priced(strategy, gpus=gpus, mask="full", profile=alike(((1e-9,), (0.02,))))
    _, ideal = priced(strategy, gpus=gpus, mask="full", profile=alike())
    attention = schedule.kind == Kind.ATTENTION
    slower = price.work.duration_s[attention] / ideal.work.duration_s[attention]
    expected = 1 + 0.02 / calls**0.5 * expected_maximum(gpus)
    np.testing.assert_allclose(slower, expected, rtol=3e-4)  # messages hold SMs a little longer


def test_how_much_calls_differ_goes_by_how_long_they_take():
    params = load_profile("h200").attention_params("fa2", "fwd")
    params = dataclasses.replace(params, calls_s=(1e-4, 1e-2), calls_spread=(0.03, 0.01))
    np.testing.assert_allclose(params.spread(np.array([1e-5, 1e-4, 1e-3, 1e-2, 1.0])), [0.03, 0.03, 0.02, 0.01, 0.01])


def test_several_gpus_wait_for_the_one_whose_captured_program_starts_last():
    starts = {gpus: priced("ulysses", gpus=gpus, captured=True)[1].work.release_s.max() for gpus in (1, 2, 8)}
    profile = load_profile("h200")
    for gpus, start in starts.items():
        later = np.exp(profile.sigma["graph"] * expected_maximum(gpus))
        assert start == pytest.approx(profile.host.graph_s * later + profile.host.cold_start_s)
    assert starts[1] < starts[2] < starts[8] < 2 * starts[1]


@pytest.mark.parametrize(
    ("name", "pass_", "together", "apart"),
    [
        ("none", "fwd", 32, 0),
        ("none", "bwd", 32, 16),
        ("ulysses", "fwd", 16, 0),
        ("ulysses", "bwd", 0, 24),
    ],
)
def test_kernels_that_cannot_place_their_results_pay_for_copies_slower_ones_where_rows_lie_apart(
    name, pass_, together, apart
):
    """Heads of rows: keys' gradients lie side by side, in Ulysses those of queries beside them."""

    def attention_seconds(kernel, captured):
        gpus = 1 if name == "none" else 2
        schedule, price = priced(name, gpus, kernel=kernel, captured=captured, pass_=pass_, tokens=8192 // gpus)
        ops = np.flatnonzero(np.isin(schedule.kind, (Kind.ATTENTION, Kind.ATTENTION_BACKWARD)))
        return price.work.duration_s[ops[0]]

    extra, gain = (attention_seconds(k, True) - attention_seconds(k, False) for k in ("sdpa_flash", "fa2"))
    profile, copies = load_profile("h200"), 1 if pass_ == "fwd" else 3
    rate = profile.elementwise.bandwidth_bytes_per_s
    expected = 2 * 8192 * 128 * 2 * (together / rate["copy"] + apart / rate["strided"])  # more than the cache holds
    assert extra - gain == pytest.approx(copies * profile.host.captured_kernel_s + expected, rel=0.05)


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_cudnn_places_results_of_calls_that_go_past_pytorch(pass_):
    """Windows, and values of another size than keys; others are copied where the caller wants them."""

    def more(mask, **changes):
        case = workload(1, 8192, mask=mask, **changes)
        schedule = plan("none", case, pricing(1).cluster, pass_, {})
        dims = {"head_dim": case.head_dim, "value_dim": case.value_dim}
        made = [price(schedule, pricing(1, kernel="cudnn", captured=captured, **dims)) for captured in (True, False)]
        with_copies, without = (one.work.duration_s[-1] for one in made)
        return with_copies - without

    assert more("causal") > 5e-6
    assert more("causal_sliding_window", mask_options=(("window", 512),)) < more("causal") / 2
    assert more("causal", head_dim=192, value_dim=128) < more("causal", head_dim=192) / 2


def test_pytorchs_flash_backward_copies_outputs_that_came_with_their_queries():
    """Of many documents, the zigzag ring packs the tails of queries, outputs and their gradients side by side."""
    documents, mask = (1024,) * 8, "causal_document"
    schedule, _ = priced("zigzag_ring", 2, kernel="sdpa_flash", pass_="bwd", documents=documents, mask=mask)
    ops = [int(op) for op in np.flatnonzero(schedule.kind == Kind.ATTENTION_BACKWARD) if schedule.ranks_of(op) == [0]]
    queries = sequences(schedule.tiles).queries()[schedule.tile[ops]].tolist()
    assert queries == [4096, 2048]
    assert copied_heads("sdpa_flash", schedule, np.array(ops)).T.tolist() == [
        [4096 * 32, 2 * 4096 * 8, 3],
        [2048 * 32, 2 * 4096 * 8 + 2 * 2048 * 32, 5],
    ]


def test_the_first_call_into_other_peoples_code_delays_all_of_it():
    launches = {"entry": ("autograd fwd",)}
    _, before = priced("ring")
    _, after = priced("ring", launches=launches)
    entry = load_profile("h200").host.launch_s["autograd fwd"] * slowest_thread(4)
    np.testing.assert_allclose(after.work.release_s, before.work.release_s + entry)


def slowest_thread(num_ranks):
    """How much longer the slowest of so many hosts takes than the mean one."""
    return np.exp(load_profile("h200").sigma["host thread"] * expected_maximum(num_ranks))


def launched(pass_="fwd", host=None, **launches):
    """When ops of a ring in ring-flash-attn's code are launched, and its schedule."""
    profile = load_profile("h200")
    prices = pricing(2, profile=dataclasses.replace(profile, host=dataclasses.replace(profile.host, **host or {})))
    prices = dataclasses.replace(prices, launches={k: (name,) for k, name in launches.items()})
    schedule = plan("ring", workload(2), prices.cluster, pass_, {}, RING_FLASH_ATTN)
    return schedule, price(schedule, prices).work.release_s / slowest_thread(2)


def test_code_communicates_no_earlier_than_where_its_first_message_was_measured_and_later_if_more_runs_before():
    for begin, entry in ((1e-3, 1e-4), (1e-5, 1e-4)):
        host = {"launch_s": {"copy": 1e-5, "begin": begin, "entry": entry}, "event_s": 0.0}
        schedule, release = launched(host=host, begin="begin", entry="entry")
        first = np.flatnonzero(schedule.kind == Kind.TRANSFER)[0]
        assert first > 0, "the call into the code comes before"
        assert release[first] == pytest.approx(max(begin, entry + 1e-5) + 0.5e-5), "one of two halves of a batch"


def test_the_first_call_of_a_kind_costs_what_the_first_round_cost_and_an_iteration_lasts_until_the_host_returns():
    shared = {"copy": 1e-5, "sum in bwd": 2e-5}
    _, before = launched("bwd", host={"launch_s": shared}, accumulate="sum", exit="exit")
    _, again = launched("bwd", host={"launch_s": shared | {"sum in bwd first": 5e-5}}, accumulate="sum", exit="exit")
    assert set(np.round((again - before) * 1e6)) == {0, 30}
    _, returned = launched("bwd", host={"launch_s": shared | {"exit": 7e-5}}, accumulate="sum", exit="exit")
    assert np.count_nonzero(np.round((returned - before) * 1e6) == 70) in (1, 2)
    assert np.argmax(returned) == np.argmax(before)


def test_ops_of_a_captured_program_that_follow_another_stream_take_longer():
    host = dataclasses.replace(load_profile("h200").host, graph_cross_s=1e-3)
    slow = dataclasses.replace(load_profile("h200"), host=host)
    quick = dataclasses.replace(slow, host=dataclasses.replace(host, graph_cross_s=0.0))
    schedule = plan("ulysses", workload(), load_cluster("dgx-h200").with_gpus(4), "fwd", {})
    times = [
        price(schedule, dataclasses.replace(pricing(captured=True), profile=profile)).work.duration_s
        for profile in (slow, quick)
    ]
    follows = [Kind.ALL_TO_ALL, Kind.ATTENTION, Kind.ALL_TO_ALL, Kind.COPY]
    delayed = schedule.kind[times[0] - times[1] > 0.9e-3]
    assert sorted(set(delayed.tolist())) == sorted({int(kind) for kind in follows})
    assert len(delayed) == 1 + 4 + 1 + 4


def test_kernels_of_a_stream_do_not_pay_for_events_around_them():
    profile = load_profile("h200")
    none = dict.fromkeys(profile.host.streamed_gain_s, 0.0)
    schedule, _ = priced("ring", 2)

    def durations(**gains):
        host = dataclasses.replace(profile.host, streamed_gain_s=none | gains)
        return price(schedule, pricing(2, profile=dataclasses.replace(profile, host=host))).work.duration_s

    for name, kind in (("fwd", Kind.ATTENTION), ("memory-bound", Kind.MERGE), ("message", Kind.TRANSFER)):
        saved, of_kind = durations() - durations(**{name: 1e-6}), schedule.kind == kind
        np.testing.assert_allclose(saved[of_kind], 1e-6, rtol=0.1)  # the clock settles elsewhere
        np.testing.assert_allclose(saved[~of_kind], 0.0, atol=2e-7)
    known = durations(**{"fwd": 1e-6, "fa4 fwd": 2e-6, "fa2 fwd": 3e-6})
    np.testing.assert_allclose((durations() - known)[schedule.kind == Kind.ATTENTION], 2e-6, rtol=0.1)


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("allgather", {"heads_per_gather": 2}),
        ("zigzag_ring", {}),
        ("usp", {"ulysses": 4, "placement": "context_first"}),
        ("mesh", {"keys": 4}),
        ("dcp", {}),
    ],
)
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_ops_wait_for_another_stream_where_one_of_their_ranks_does(name, knobs, pass_):
    schedule = plan(name, workload(16), pricing(16).cluster, pass_, knobs)
    lanes = [
        dict(zip(schedule.lane_rank[a:b].tolist(), schedule.lane_stream[a:b].tolist(), strict=True))
        for a, b in pairwise(schedule.lane_start.tolist())
    ]
    waited = [schedule.dep[a:b].tolist() for a, b in pairwise(schedule.dep_start.tolist())]
    expected = [
        any(lanes[d][rank] != stream for d in deps for rank, stream in mine.items() if rank in lanes[d])
        for mine, deps in zip(lanes, waited, strict=True)
    ]
    columns = ("lane_start", "lane_rank", "lane_stream", "dep_start", "dep")
    assert any(expected)
    assert _crossings(*(getattr(schedule, column) for column in columns)).tolist() == expected


@pytest.mark.parametrize(
    ("name", "mask", "varlen"),
    [
        ("allgather", "causal", True),
        ("allgather", "full_document", True),
        ("ring", "causal", False),
        ("ring", "causal_document", True),
    ],
)
def test_a_varlen_call_of_one_sequence_does_not_split_its_keys(name, mask, varlen):
    """Of few queries and one head; a dense call has more blocks than that."""
    case = {"gpus": 16, "tokens": 65536, "heads": 1, "kv_heads": 1, "cluster": "dgx-h200", "kernel": "fa2"}
    case |= {"strategy": name, "mask": mask, "implementation": "ring-flash-attn"}
    mine = resolve(scenario_from(case)).conditions()
    schedule = plan("allgather", workload(16, 4096, num_heads=1, num_kv_heads=1), mine.cluster, "fwd", {})
    last = np.flatnonzero(schedule.kind == Kind.ATTENTION)[-1]
    dense, theirs = (price(schedule, p).work.duration_s[last] for p in (dataclasses.replace(mine, varlen=False), mine))
    assert (theirs > 2.5 * dense) == varlen


def test_hosts_that_read_from_their_gpus_are_never_ahead():
    case = {"gpus": 2, "tokens": 4096, "heads": 8, "kv_heads": 8, "cluster": "h200-4", "kernel": "fa2"}
    case |= {"documents": [1024, 3072], "implementation": "ring-flash-attn", "strategy": "zigzag_ring"}
    for mask, ahead in (("causal", True), ("causal_document", False)):
        mine = [resolve(scenario_from(case | {"mask": mask, "protocol": p})) for p in ("synced", "streamed")]
        synced, streamed = (run_ranks(m, "fwd", [0])[0].makespan_s for m in mine)
        assert (streamed < 0.9 * synced) == ahead


def test_uneven_all_to_alls_take_as_long_as_their_busiest_port_or_nic():
    knobs = {"variant": "paper", "solver": "greedy"}
    schedule, price = priced("dcp", gpus=16, knobs=knobs)
    prices = pricing(16)
    fabric, checked = prices.cluster.fabric, set()
    for op in np.unique(schedule.routes[:, 0]).tolist():
        mine = schedule.routes[:, 0] == op
        (source, target), nbytes = schedule.routes[mine, 1:].T, schedule.route_nbytes[mine]
        far = source // 8 != target // 8
        most = max(np.bincount(end, nbytes).max() for end in (source, target))
        if far.any():
            assert far.all()  # those within nodes are another op
            expected = fabric.latency_s + most / fabric.nic_bandwidth_bytes_per_s
        else:
            curves = prices.profile.collective
            expected = collective_seconds(curves, "all_to_all", np.array([most * 8 / 7]), 8)[0]
        gain = prices.profile.host.streamed_gain_s["message"]
        assert price.work.duration_s[op] == pytest.approx(expected - gain)
        moved = price.work.flow_bytes[price.work.flow_start[op] : price.work.flow_start[op + 1]]
        assert moved.sum() == pytest.approx(2 * nbytes.sum())
        checked.add(bool(far.any()))
    assert checked == {True, False}


def test_held_sms_are_those_of_every_launch_that_is_under_way():
    prices = pricing(kernel="fa2")
    schedule = plan("zigzag_ring", workload(tokens=2048), prices.cluster, "bwd", {})
    rng = np.random.default_rng(2)
    begin = np.cumsum(rng.uniform(0, 1, len(schedule)))
    end = begin + rng.uniform(0, 3, len(schedule))
    messages = Messages.of(schedule, prices.cluster, unbatched=False, in_batch=1)
    number = dict(zip(messages.op.tolist(), channels(messages.nbytes, 4).tolist(), strict=True))
    ops = np.flatnonzero(schedule.kind == Kind.ATTENTION_BACKWARD)
    near = np.ones(len(messages.op), bool)
    held, hold_s, by = held_sms(schedule, messages, near, ops, begin, end)
    assert (by >= 0).any()
    for i, op in enumerate(ops.tolist()):
        (rank,) = schedule.ranks_of(op)
        under_way = {}
        for stream in range(128):
            mine = [
                m
                for m in number
                if rank in schedule.ranks_of(m)
                and begin[m] <= begin[op]
                and schedule.lane_stream[schedule.lane_start[m]] == stream
            ][-2:]
            under_way |= {m: stream for m in mine if end[m] > begin[op]}
        of_stream = {s: max(number[m] for m in under_way if under_way[m] == s) for s in under_way.values()}
        assert held[i] == sum(of_stream.values())
        assert hold_s[i] == pytest.approx(max([end[m] for m in under_way], default=begin[op]) - begin[op])
        assert (by[i] in under_way) if under_way else by[i] == -1


def test_attention_of_few_waves_takes_longer_beside_a_message_that_was_first_and_that_of_many_does_not():
    def longest(tokens):
        """Of the second step's attention, which begins beside a message, relative to what it takes alone."""
        schedule, price = priced("zigzag_ring", gpus=2, pass_="bwd", tokens=tokens, kernel="fa2", cluster="h200-4")
        ops = np.flatnonzero(schedule.kind == Kind.ATTENTION_BACKWARD)
        params = load_profile("h200").attention_params("fa2", "bwd")
        alone = attention_op_seconds(params, "fa2", "bf16", 128, schedule, ops)
        return (price.work.duration_s[ops] / alone[0]).max()

    assert longest(1024) > 1.05
    assert longest(16384) < 1.03
