"""Matrix products: waves of tiles, and a fit that finds what it was given."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpsim.calibrate.fit_layers import fit_layers
from cpsim.calibrate.measurement import load
from cpsim.calibrate.recipes import points_file
from cpsim.models.gemm import FITTED, GemmParams, gemm_seconds
from cpsim.models.profile import load_profile

H200 = load_profile("h200")
KNOWN = GemmParams(num_sms=132, flop_s=2e-13, tile_s=2e-6, call_s=3e-6, tail_share=0.4, traffic_s_per_byte=2.5e-13)
SIZES = st.integers(1, 20_000)


@settings(deadline=None)
@given(m=SIZES, n=SIZES, k=SIZES)
def test_no_product_beats_tensor_cores_or_memory(m, n, k):
    seconds = gemm_seconds(KNOWN, m, n, k)
    assert seconds >= 2 * m * n * k * KNOWN.flop_s / KNOWN.num_sms
    assert seconds >= 2 * (m * k + k * n + m * n) * KNOWN.traffic_s_per_byte


@settings(deadline=None)
@given(m=SIZES, n=SIZES, k=SIZES, factor=st.integers(2, 4))
@example(m=1, n=1, k=150, factor=3)  # three steps of k, in two parts or eight
def test_a_larger_product_takes_longer(m, n, k, factor):
    seconds = gemm_seconds(KNOWN, m, n, k)
    bigger = ((m * factor, n, k), (m, n * factor, k), (m, n, k * factor))
    assert all(gemm_seconds(KNOWN, *sizes) >= seconds for sizes in bigger)


def test_operands_may_change_places():
    assert gemm_seconds(KNOWN, 700, 5000, 300) == gemm_seconds(KNOWN, 5000, 700, 300)


def test_large_products_reach_the_rate_of_all_sms():
    flops_per_s = 2 * 16384**3 / gemm_seconds(KNOWN, 16384, 16384, 16384)
    assert flops_per_s == pytest.approx(KNOWN.num_sms / KNOWN.flop_s, rel=0.03)


def test_few_tiles_split_k():
    alone = KNOWN.call_s + (8192 / 64) * (2 * 128 * 128 * 64 * KNOWN.flop_s) + KNOWN.tile_s
    assert gemm_seconds(KNOWN, 128, 128, 8192) < 0.7 * alone


def test_nothing_takes_no_time():
    assert gemm_seconds(KNOWN, 0, 128, 128) == 0


def points(params, rng, noise):
    sizes = np.exp(rng.uniform(np.log(256), np.log(16384), (300, 3))).astype(int)
    seconds = gemm_seconds(params, *sizes.T) * np.exp(noise * rng.standard_normal(len(sizes)))
    products = [
        {"op": "gemm", "kind": "forward", "m": m, "n": n, "k": k, "samples_s": [s]}
        for (m, n, k), s in zip(sizes.tolist(), seconds.tolist(), strict=True)
    ]
    sweeps = [
        {"op": "layer_op", "kind": "add", "variant": "compiled", "nbytes": nbytes, "samples_s": [3e-6 + nbytes / 4e12]}
        for nbytes in np.geomspace(1e6, 1e9, 10)
    ]
    return products + sweeps


def test_the_fit_finds_the_parameters_that_made_noisy_points():
    found = fit_layers(points(KNOWN, np.random.default_rng(0), 0.02), 132, H200.elementwise)
    for name in FITTED:
        close = 0.15 if name in ("tail_share", "call_s", "tile_s") else 0.01
        assert getattr(found.gemm, name) == pytest.approx(getattr(KNOWN, name), rel=close), name
    assert found.ops.bandwidth_bytes_per_s["add"] == pytest.approx(4e12, rel=0.02)


def test_a_profile_without_measured_layers_has_none():
    assert fit_layers([], 132, H200.elementwise) is None


def test_a_profile_of_the_same_gpu_lends_its_layers():
    assert load_profile("h100-fa3").layers == load_profile("h100").layers


def test_products_of_an_h200_that_were_not_fitted_are_within_3_percent_on_average():
    row = next(row for row in H200.held_out if row["model"] == "matrix products")
    assert row["points"] > 400
    assert row["mean_absolute"] <= 0.03
    assert abs(row["bias"]) < 0.01


def test_the_three_products_of_a_linear_layer_take_alike():
    measured = load(points_file("h200-layers.jsonl")).of("gemm")
    assert {p["kind"] for p in measured} == {"forward", "dgrad", "wgrad"}
    rate = {
        kind: np.median(
            [
                2 * p["m"] * p["n"] * p["k"] / np.median(p["samples_s"])
                for p in measured
                if p["kind"] == kind and p["m"] * p["n"] * p["k"] > 1e12
            ]
        )
        for kind in ("forward", "dgrad", "wgrad")
    }
    assert max(rate.values()) / min(rate.values()) < 1.03
