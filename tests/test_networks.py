"""Networks of several levels, and parts of a machine that are slower than the others."""

from dataclasses import replace

import numpy as np
import pytest
import yaml

from cpsim.case.cluster import Fault, load_cluster, presets
from cpsim.case.load import scenario_from
from cpsim.errors import ScenarioError
from cpsim.models.network.links import Links
from cpsim.models.price import price
from cpsim.models.profile import load_profile
from cpsim.prediction.advise import advise
from cpsim.prediction.case import resolve
from cpsim.prediction.predict import predict
from cpsim.sim.fast import simulate
from cpsim.sim.reference import simulate_reference
from cpsim.strategies import plan

PORT = load_profile("h200").collective.port_bytes_per_s
NIC = presets()["dgx-h200"].fabric.nic_bandwidth_bytes_per_s
FIELDS = {"gpus": 32, "tokens_per_gpu": 2048, "heads": 32, "kv_heads": 8, "strategy": "zigzag_ring"}


def network(nodes=4, faults=(), **changes):
    cluster = presets()["dgx-h200"].with_gpus(8 * nodes)
    return replace(cluster, faults=faults, fabric=replace(cluster.fabric, **changes))


def used(cluster, source, target):
    """Links that one message uses."""
    flows = Links(cluster, PORT).transfers(*(np.array([i]) for i in (0, source, target)), np.array([1.0]))
    return sorted(flows.link.tolist())


def file_of(tmp_path, cluster):
    path = tmp_path / f"cluster-{len(list(tmp_path.iterdir()))}.yaml"  # files that were read are remembered
    path.write_text(yaml.safe_dump(cluster.to_dict()))
    return str(path)


LEAVES = {"nodes_per_leaf": 2, "spine_oversubscription": 4.0}
PORTS, NICS = 2 * 32, 2 * 32


def test_only_what_leaves_a_leaf_uses_the_spine():
    cluster = network(**LEAVES)
    assert used(cluster, 0, 1) == [0, 32 + 1]
    assert used(cluster, 0, 9) == [PORTS, PORTS + 32 + 9 - 0]
    spine = PORTS + NICS
    assert used(cluster, 0, 17) == [PORTS, PORTS + 32 + 17, spine, spine + 2 + 1]
    assert Links(cluster, PORT).capacity_bytes_per_s()[spine] == 2 * 8 * NIC / 4


def test_with_rails_nvlink_takes_a_message_to_the_nic_of_its_targets_place():
    cluster = network(rails=True, **LEAVES)
    same_place = [PORTS + 1, PORTS + 32 + 9]
    assert used(cluster, 1, 9) == same_place
    assert used(cluster, 0, 9) == sorted([0, 32 + 1, *same_place])
    spine = PORTS + NICS
    leaf_out, leaf_in = spine + 1, spine + 16 + 8 + 1
    assert used(cluster, 1, 17) == sorted([PORTS + 1, PORTS + 32 + 17, leaf_out, leaf_in])
    assert Links(cluster, PORT).capacity_bytes_per_s()[leaf_out] == 2 * NIC / 4


def test_messages_over_sockets_share_threads_with_those_of_their_stream_only():
    links, stream = Links(presets()["h200-2x2-sockets"].with_gpus(4), PORT, 3), np.array([1, 1, 2])
    flows = links.transfers(np.arange(3), np.array([0, 2, 0]), np.array([2, 0, 2]), np.ones(3))
    moved = links.on_streams(flows, stream)
    there, back, other = (set(moved.link[moved.op == op].tolist()) for op in range(3))
    assert there == back
    assert len(there) == len(other) == 2
    assert not there & other
    assert max(other) < len(links.capacity_bytes_per_s())


def test_messages_that_pass_no_sockets_keep_their_links():
    links = Links(network(), PORT, num_streams=2)
    flows = links.transfers(np.arange(2), np.array([0, 0]), np.array([1, 9]), np.ones(2))
    assert links.on_streams(flows, np.array([1, 1])) == flows


@pytest.mark.parametrize("rails", [False, True])
@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_an_all_to_all_is_as_much_between_leaves_as_its_messages(nodes, rails):
    links, ranks = Links(network(nodes, rails=rails, **LEAVES), PORT), np.arange(8 * nodes)
    source, target = (side.ravel() for side in np.meshgrid(ranks, ranks, indexing="ij"))
    far = links.crosses(source, target)
    messages = links.routed(0, source[far], target[far], np.ones(far.sum()))
    whole = links.collectives(np.zeros(1, np.int64), ranks[None], 0.0, 8.0 * (nodes - 1), messages=True)
    first = 2 * (8 * nodes + 8 * nodes)
    spine, there = messages.link >= first, whole.link >= first
    assert dict(zip(messages.link[spine], messages.nbytes[spine], strict=True)) == pytest.approx(
        dict(zip(whole.link[there], whole.nbytes[there], strict=True))
    )
    assert there.any() == (nodes > 2)


@pytest.mark.parametrize("messages", [True, False])
def test_collectives_that_are_alike_put_as_much_on_links_together_as_one_by_one(messages):
    links, op = Links(network(**LEAVES), PORT), np.array([3, 7])
    ranks = np.array([[0, 1, 8, 9, 24, 25], [2, 3, 16, 17, 10, 11]])
    both = links.collectives(op, ranks, 2.0, 1.0, messages)
    for i in range(2):
        alone, mine = links.collectives(op[i : i + 1], ranks[i : i + 1], 2.0, 1.0, messages), both.op == op[i]
        assert both.link[mine].tolist() == alone.link.tolist()
        assert both.nbytes[mine].tolist() == alone.nbytes.tolist()


def test_a_ring_collective_leaves_every_leaf_once():
    everyone = np.arange(32)[None]
    whole = Links(network(**LEAVES), PORT).collectives(np.zeros(1, np.int64), everyone, 0.0, 1.0, messages=False)
    spine = whole.link >= PORTS + NICS
    assert whole.nbytes[spine].tolist() == [8.0] * 4


def test_the_example_has_leaves_and_a_fault():
    cluster = load_cluster("examples/clusters/leaf-spine.yaml").with_gpus(64)
    assert str(cluster.faults[0]) == "nic 7 at 50%"
    assert len(Links(cluster, PORT).capacity_bytes_per_s()) == 2 * 64 + 2 * 64 + 2 * 2


def test_engines_agree_where_leaves_fill(tmp_path):
    free, tight = (
        predict(scenario_from(FIELDS | {"cluster": file_of(tmp_path, cluster), "strategy": "ulysses"}))
        for cluster in (network(), network(nodes_per_leaf=2, spine_oversubscription=16.0))
    )
    assert tight.time_s > 1.2 * free.time_s
    timeline = tight.timelines["fwd"]
    case = resolve(tight.scenario)
    schedule = plan("ulysses", case.workload, case.cluster, "fwd", {})
    work = price(schedule, case.conditions()).work
    np.testing.assert_array_equal(simulate(schedule, work).end_s, timeline.end_s)
    np.testing.assert_allclose(simulate_reference(schedule, work).end_s, timeline.end_s, rtol=1e-9)


def faulty(tmp_path, *faults, **changes):
    cluster = file_of(tmp_path, network(faults=faults))
    return predict(scenario_from(FIELDS | {"cluster": cluster} | changes))


def test_a_straggler_holds_up_the_whole_ring(tmp_path):
    straggler = Fault(part="gpu", number=13, rate=0.8)
    healthy, slow = (faulty(tmp_path, *faults, tokens_per_gpu=65536) for faults in ((), (straggler,)))
    attention = healthy.parts_s["attention fwd"] + healthy.parts_s["attention bwd"]
    assert attention > 0.8 * healthy.time_s
    assert healthy.time_s + 0.2 * attention < slow.time_s < 1.3 * healthy.time_s
    assert "faults: gpu 13 at 80%" in slow.notes


@pytest.mark.parametrize(("part", "number"), [("nic", 7), ("uplink", 0), ("nvlink", 3)])
def test_a_slow_link_slows_what_passes_it(tmp_path, part, number):
    healthy, slow = faulty(tmp_path), faulty(tmp_path, Fault(part=part, number=number, rate=0.05))
    assert slow.time_s > 1.05 * healthy.time_s


def test_a_slow_link_that_nobody_uses_costs_nothing(tmp_path):
    """The ring leaves node 0 by NIC 7 only."""
    healthy, slow = faulty(tmp_path), faulty(tmp_path, Fault(part="nic", number=2, rate=0.05))
    assert slow.time_s == healthy.time_s


def test_faults_of_parts_that_are_not_in_use_are_refused(tmp_path):
    path = file_of(tmp_path, network(faults=(Fault(part="gpu", number=31, rate=0.5),)))
    with pytest.raises(ScenarioError, match=r"one of the 16 of kind gpu .* got 31; leave it out"):
        predict(scenario_from(FIELDS | {"cluster": path, "gpus": 16}))


def test_a_fault_is_read_strictly(tmp_path):
    fields = network().to_dict() | {"faults": [{"part": "switch", "number": 0, "rate": 0.5}]}
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(fields))
    with pytest.raises(ScenarioError, match=r"faults.0.part: expected gpu, nvlink, nic, uplink"):
        load_cluster(str(path))


def test_advice_says_what_faults_cost_and_whether_the_best_stays(tmp_path):
    path = file_of(tmp_path, network(2, faults=(Fault(part="nic", number=7, rate=0.1),)))
    case = scenario_from({k: v for k, v in FIELDS.items() if k != "strategy"} | {"cluster": path, "gpus": 16})
    advice = advise(case.model_copy(update={"strategy": "usp"}))
    (cost,) = [note for note in advice.notes if note.startswith("slower by faults")]
    assert cost.count("usp") == len(advice.candidates)
    assert any(note.startswith("without faults") for note in advice.notes)


def test_training_steps_do_not_ignore_faults(tmp_path):
    path = file_of(tmp_path, network(faults=(Fault(part="gpu", number=1, rate=0.5),)))
    step = {"gpus": 32, "cluster": path, "tokens": 32 * 4096, "model": "llama3-8b", "strategy": "allgather"}
    with pytest.raises(ScenarioError, match="the step model would ignore them"):
        predict(scenario_from(step | {"parallel": {"tp": 4, "cp": 2}}))
