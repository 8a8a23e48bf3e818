"""Network model: nccl-tests' definitions, monotone curves, group sizes beyond the measured ones."""

from dataclasses import replace

import numpy as np
import pytest

from cpsim.calibrate.fit_network import fit_collective, fit_curve
from cpsim.calibrate.measurement import load
from cpsim.calibrate.recipes import points_file
from cpsim.models.network.collective import (
    COLLECTIVES,
    Curve,
    channels,
    collective_seconds,
    fits_buffers,
    ring_channels,
    transfer_seconds,
    wire_bytes,
)
from cpsim.models.profile import load_profile
from cpsim.models.standin import StandIn


def test_wire_bytes_follow_nccl_tests():
    assert wire_bytes("all_gather", 800.0, 8) == 700.0
    assert wire_bytes("reduce_scatter", 800.0, 8) == 700.0
    assert wire_bytes("all_to_all", 800.0, 8) == 700.0
    assert wire_bytes("all_reduce", 800.0, 8) == 1400.0


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 8])
def test_collectives_never_get_cheaper_with_size(kind, num_ranks):
    sizes = np.geomspace(1e3, 1e10, 400)
    seconds = collective_seconds(load_profile("h200").collective, kind, sizes, num_ranks)
    assert np.all(np.diff(seconds) >= -1e-15)
    assert np.all(seconds > 0)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_eight_ranks_keep_the_bus_bandwidth_of_four(kind):
    network = load_profile("h200").collective
    four, eight = (float(wire_bytes(kind, 4e9, n)) / float(collective_seconds(network, kind, 4e9, n)) for n in (4, 8))
    assert eight == pytest.approx(four, rel=0.03)
    assert eight < network.port_bytes_per_s * 1.02


def test_one_rank_needs_no_time():
    assert collective_seconds(load_profile("h200").collective, "all_gather", [1e6, 1e9], 1).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_fewer_ranks_than_were_measured_keep_the_bus_bandwidth_of_the_fewest(kind):
    network = load_profile("h200").collective
    only_four = replace(network, curves={name: {4: by[4]} for name, by in network.curves.items()})
    two, four = (float(wire_bytes(kind, 4e9, n)) / float(collective_seconds(only_four, kind, 4e9, n)) for n in (2, 4))
    assert two == pytest.approx(four, rel=0.01)
    notes = replace(load_profile("h200"), collective=only_four).collective_notes(kind, 1e6, 2)
    assert notes == (f"{kind} among 2 GPUs of a node, measured from 4",)


def test_messages_alone_tell_the_port():
    points = [
        {"op": "transfer", "kind": "ring", "num_ranks": 8, "nbytes": n, "samples_s": [1e-5 + n / 3e11]}
        for n in (2**k for k in range(12, 31))
    ]
    port = fit_collective(points, points, StandIn.of(load_profile("h200"), None)).port_bytes_per_s
    assert port == pytest.approx(3e11, rel=0.01)


def test_transfers_never_get_cheaper_with_size():
    network = load_profile("h200").collective
    sizes = np.geomspace(1, 1e10, 400)
    for num_ranks in (2, 3, 4, 8, 64):
        few = ring_channels(sizes, num_ranks)
        for number in np.unique(few):  # more channels, where a message is large enough for them, are faster
            assert np.all(np.diff(transfer_seconds(network, sizes[few == number], num_ranks)) >= -1e-15)


@pytest.mark.parametrize(
    ("nbytes", "num_ranks", "num_nodes", "blocks"),
    [
        (32 * 2**20, 4, 1, 8),
        (128 * 2**20, 4, 1, 8),
        (129 * 2**20, 4, 1, 16),
        (512 * 2**20, 4, 1, 32),
        (32 * 2**20, 3, 1, 8),
        (32 * 2**20, 2, 1, 16),
        (32 * 2**20, 8, 1, 4),
        (300_000, 2, 1, 5),
        (32 * 2**20, 16, 2, 2),
        (32 * 2**20, 4, 2, 2),
        (1, 4, 1, 1),
    ],
)
def test_nccl_gives_messages_so_many_channels(nbytes, num_ranks, num_nodes, blocks):
    """Those of four ranks are the grids that a profiler shows of NCCL 2.28.9 on H200."""
    assert channels(nbytes, num_ranks, num_nodes) == blocks


@pytest.mark.parametrize(("num_ranks", "mebibytes"), [(2, 64), (4, 32), (8, 16)])
def test_a_message_leaves_its_sender_early_if_it_fits_4_mib_a_channel(num_ranks, mebibytes):
    assert fits_buffers(mebibytes * 2**20, num_ranks)
    assert not fits_buffers(mebibytes * 2**20 + 1, num_ranks)
    assert not fits_buffers(mebibytes * 2**20, 2 * num_ranks)


def test_a_message_is_faster_in_a_small_group():
    """Measured: 30 to 128 MB among two ranks take some half of what they take among four."""
    network = load_profile("h200").collective
    two, four, nodes = (float(transfer_seconds(network, 64e6, *group)) for group in ((2,), (4,), (4, 2)))
    assert 1.5 < four / two < 2
    assert 4 < nodes / four < 5


def test_above_the_last_knot_the_bandwidth_holds():
    curve = Curve(nbytes=(1e3, 1e6), seconds=(1e-5, 1e-4))
    assert float(curve(1e7)) == pytest.approx(1e-3)
    assert float(curve(10.0)) == pytest.approx(1e-5)


def test_a_fitted_curve_recovers_latency_and_bandwidth_from_noise():
    rng = np.random.default_rng(5)
    nbytes = np.geomspace(2**14, 2**30, 60)
    truth = 12e-6 + nbytes / 300e9
    curve = fit_curve(nbytes, truth * np.exp(0.03 * rng.standard_normal(60)))
    assert np.abs(np.log(curve(nbytes) / truth)).mean() < 0.03
    assert np.all(np.diff(curve.seconds) >= 0)


def test_a_fitted_curve_is_monotone_even_where_samples_are_not():
    nbytes = np.array([1e5, 1e6, 1e7, 1.2e7, 1e8])
    curve = fit_curve(nbytes, np.array([1e-5, 3e-5, 2e-4, 1e-4, 1e-3]))
    assert np.all(np.diff(curve.seconds) >= 0)


@pytest.mark.parametrize("name", ["h200x4-overlap.jsonl", "h200x2-overlap.jsonl"])
def test_a_message_beside_a_kernel_waits_for_a_forward_one_and_not_for_a_backward_one(name):
    """What ``RingCode`` assumes of transfers that are launched together with attention, on isolated overlaps: how much
    later they end than the same message that was there first, in times of the kernel."""
    points = [p for p in load(points_file(name)).of("overlap") if p["b"] == "ring" and p["a_count"] == 1]
    together: dict[tuple[str, int, str], dict[bool, float]] = {}
    for p in points:
        together.setdefault((p["a"], p["nbytes"], p["inside"]), {})[p["lead_s"] > 0] = float(
            np.median(p["b_together_s"])
        )
    alone = {p["a"]: float(np.median(p["a_alone_s"])) for p in points}
    waits: dict[str, list[float]] = {}
    for (kernel, *_), by_lead in together.items():
        if len(by_lead) == 2:
            waits.setdefault(kernel.split("_")[1], []).append((by_lead[False] - by_lead[True]) / alone[kernel])
    assert len(waits["fwd"]) >= 4
    assert 0.85 < np.mean(waits["fwd"]) < 1.0
    assert min(waits["fwd"]) > 0.7
    assert np.abs(waits["bwd"]).max() < 0.05
