"""GPUs as descriptions: names, what follows from them, and costs that are derived for those that nobody measured."""

from dataclasses import replace

import numpy as np
import pytest
import yaml

from cpsim.case.cluster import load_cluster, presets
from cpsim.case.gpu import Gpu, find_gpu, gpu_named, gpu_of_driver, gpus
from cpsim.errors import InfeasibleError, NotMeasuredError, ProfileError, ScenarioError
from cpsim.models.attention.params import attention_seconds
from cpsim.models.derive import DERIVED, flops_per_clock, moved, sustained_flops, unlike
from cpsim.models.gemm import gemm_seconds
from cpsim.models.network.collective import collective_seconds, transfer_seconds, wire_bytes
from cpsim.models.network.described import with_inside
from cpsim.models.profile import derived_profile, lenders, load_profile, shipped_profiles
from cpsim.prediction.predict import predict
from studies.left_out import APART, left_out, rows, table_of
from tests.targets import TARGETS, check

H200 = load_profile("h200")
SHIPPED = """a100 a100-40gb a100-pcie a100-pcie-40gb h100 h100-pcie h100-nvl h100-96gb h200 h200-nvl h800 h20 b200 gb200
b300 gb300 l40s mi300x"""


def seconds(profile, kernel, pass_="fwd", tokens=16384, heads=32):
    one = np.array([tokens])
    params = profile.attention_params(kernel, pass_)
    counts = np.array([heads])
    return float(attention_seconds(params, np.array([0, 1]), one, one, one > 0, counts, counts, 128)[0])


@pytest.mark.parametrize("name", [*SHIPPED.split(), "mi355x"])
def test_every_gpu_says_where_its_numbers_come_from_and_has_a_profile_with_layers(name):
    gpu = gpu_named(name)
    assert gpu.source
    assert gpu.architecture
    assert gpu.power_w
    profile = load_profile(name)
    assert gpu_of_driver(profile.gpu) == gpu
    assert profile.layers is not None
    assert set(profile.attention)
    assert all(profile.sigma[f"attention {pass_} {kernel}"] > 0 for kernel, pass_ in profile.attention)
    peak = flops_per_clock(gpu) * gpu.num_sms * gpu.clock_hz
    products = profile.layers.gemm
    assert 0.3 * peak < products.num_sms / products.flop_s <= peak
    for kernel in {kernel for kernel, _ in profile.attention} - {"sdpa_math"}:
        assert 4 * 16384**2 / 2 * 32 * 128 / seconds(profile, kernel) < peak


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("H100", "h100"),
        ("b300 SXM", "b300"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("GB200 NVL72", "gb200"),
        ("NVIDIA H20-3e", "h20"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H800 PCIe", None),
        ("NVIDIA A100-SXM-64GB", None),
        ("cpu", None),
    ],
)
def test_what_a_driver_calls_a_gpu(text, name):
    found = gpu_of_driver(text)
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100-SXM5-80GB", "h100"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("h100 nvl", "h100-nvl"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("HGX B200", "b200"),
    ],
)
def test_files_may_name_a_gpu_as_its_driver_does(text, name, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: mine\ngpus_per_node: 4\ngpu: {text}\n")
    assert load_cluster(str(path)).gpu == gpu_named(name)


@pytest.mark.parametrize("text", ["RTX 6000 Ada", "my h100", "H100 64GB", "NVIDIA H800 PCIe", "A800-SXM4-80GB"])
def test_other_gpus_are_not_taken_for_known_ones(text):
    with pytest.raises(ScenarioError, match=r"is unknown; .*known are a100, .*or describe it by its fields"):
        gpu_named(text)


def test_names_have_any_case_and_unknown_ones_list_the_nearest_and_all():
    assert gpu_named("L40s") is gpu_named("l40s")
    assert find_gpu("H100_SXM").name == "h100"
    with pytest.raises(
        ScenarioError, match=r"gpu: 'h2000' is unknown; did you mean 'h200'\?; known are a100, .*mi355x"
    ):
        gpu_named("h2000")
    with pytest.raises(
        ScenarioError, match=r"cluster: 'b201' is neither .* did you mean 'b200'\?; presets are .*GPUs a100"
    ):
        load_cluster("b201")
    with pytest.raises(ProfileError, match=r"no profile 'mi300'; did you mean 'mi300x'\?; shipped are a100"):
        load_profile("mi300")
    assert load_cluster("DGX-H200") is presets()["dgx-h200"]


def test_the_name_of_a_gpu_is_one_node_of_it():
    node = load_cluster("L40S")
    assert (node.num_gpus, node.gpu.nvlink_bytes_per_s, node.fabric) == (8, None, None)
    assert load_cluster("gb200").gpus_per_node == 72


def test_a_file_may_change_some_fields_of_a_known_gpu(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ngpus_per_node: 4\ngpu: {name: H100, power_w: 500}\n")
    gpu = load_cluster(str(path)).gpu
    assert (gpu.power_w, gpu.num_sms, gpu.architecture) == (500, 132, "hopper")


@pytest.mark.parametrize("name", ["h100", "h200", "b200"])
def test_a_gpu_with_a_profile_of_its_own_keeps_it(name):
    assert (
        derived_profile(gpu_named(name)).attention.items()
        >= {key: params for key, params in load_profile(name).attention.items() if key in _own(name)}.items()
    )


def _own(name):
    return next(lender for lender in lenders() if lender.profile.name == name).kernels


def test_moving_there_and_back_changes_nothing():
    h200, l40s = gpu_named("h200"), gpu_named("l40s")
    back = moved(moved(H200, h200, l40s), l40s, h200)
    for key in (("fa2", "fwd"), ("fa2", "bwd")):
        assert back.attention[key].pair_s == pytest.approx(H200.attention[key].pair_s)
        assert back.attention[key].block_s == pytest.approx(H200.attention[key].block_s)
    assert back.layers.gemm.flop_s == pytest.approx(H200.layers.gemm.flop_s)
    for kind, rate in H200.elementwise.bandwidth_bytes_per_s.items():
        assert back.elementwise.bandwidth_bytes_per_s[kind] == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize(
    ("field", "factor", "faster"),
    [
        ("num_sms", 2, {"fa4", "fa2", "products"}),
        ("boost_clock_hz", 1.2, {"fa4", "fa2", "products"}),
        ("memory_bandwidth_bytes_per_s", 2, {"copy"}),
        ("sustained_flops_per_s", 1.5, {"products"}),
        ("nvlink_bytes_per_s", 2, {"all_gather"}),
    ],
)
def test_more_of_something_is_faster_where_it_counts(field, factor, faster):
    base = gpu_named("h200")
    changes = {field: getattr(base, field) * factor}
    if field in ("num_sms", "boost_clock_hz"):  # and a power limit that allows for it
        changes |= {"sustained_flops_per_s": base.sustained_flops_per_s * factor}
    better = moved(H200, base, replace(base, name="better", **changes))

    def costs(profile):
        size = np.array([16384.0])
        return {
            "fa4": seconds(profile, "fa4"),
            "fa2": seconds(profile, "fa2"),
            "products": float(gemm_seconds(profile.layers.gemm, size, size, size)[0]),
            "copy": 1 / profile.elementwise.bandwidth_bytes_per_s["copy"],
            "all_gather": float(collective_seconds(profile.collective, "all_gather", 1e9, 4)),
        }

    before, after = costs(H200), costs(better)
    for what in before:
        assert after[what] <= before[what] * 1.02
        if what in faster:
            assert after[what] < 0.95 * before[what]


def test_kernels_that_a_gpu_cannot_run_are_not_there():
    assert ("fa3", "fwd") not in load_profile("l40s").attention
    with pytest.raises(NotMeasuredError, match=r"profile mi300x lacks kernel 'cudnn' fwd; it has fa2"):
        load_profile("mi300x").attention_params("cudnn", "fwd")


def test_cards_on_pcie_never_have_nvlink():
    card = load_profile("h100-pcie").collective
    assert 0.5 < card.port_bytes_per_s / 63e9 < 0.8
    for ranks in (2, 4, 8):
        flow = float(transfer_seconds(card, 2**28, ranks))
        assert flow >= 2**28 / 63e9
    case = {"strategy": "ring", "gpus": 8, "tokens_per_gpu": 16384, "heads": 32, "kv_heads": 8, "kernel": "fa2"}
    pcie, nvlink = (predict(case | {"cluster": name}) for name in ("h100-pcie", "h100"))
    assert pcie.time_s > 1.1 * nvlink.time_s
    assert any("PCIe instead of NVLink x 0.14" in note for note in pcie.notes)


def test_collectives_over_pcie_are_as_much_slower_as_their_link():
    ratio = gpu_named("h100-pcie").host_link_bytes_per_s / 450e9
    card, nvlink = (load_profile(name).collective for name in ("h100-pcie", "h100"))
    shares = [
        float(collective_seconds(card, kind, 2**30, ranks) / collective_seconds(nvlink, kind, 2**30, ranks)) * ratio
        for ranks in (2, 4, 8)
        for kind in card.curves
    ]
    check("collectives over PCIe, share of time that their link would add", max(0.0, 1 - min(shares)))


BUS_OF_CARDS = {
    "all_gather": (20.7, 13.5),
    "all_reduce": (20.8, 12.5),
    "reduce_scatter": (20.5, 11.1),
    "all_to_all": (19.1, 8.3),
}
"""Of four and of eight A100 over PCIe, GB/s, in MooreThreads/SimuMax at 4dcaae5, configs/system/a100_pcie.json."""


@pytest.mark.parametrize("where", [{}, {"inside": "pcie 31.5 GB/s"}])
def test_eight_cards_share_what_connects_two_processors(where, tmp_path):
    file = tmp_path / "cards.yaml"
    file.write_text(yaml.safe_dump({"gpu": "a100-pcie", "num_gpus": 8, "gpus_per_node": 8, **where}))
    cluster = load_cluster(str(file))
    card = with_inside(load_profile("a100-pcie"), cluster).collective
    for kind, published in BUS_OF_CARDS.items():
        for ranks, bus in zip((4, 8), published, strict=True):
            took = float(collective_seconds(card, kind, 2**30, ranks))
            moved = float(wire_bytes(kind, 2**30, ranks))
            assert moved / took / 1e9 == pytest.approx(bus, rel=0.15), (kind, ranks)
    alone, all_of_them = (float(transfer_seconds(card, 2**28, ranks)) for ranks in (4, 8))
    assert all_of_them == pytest.approx(alone * 20.8 / 12.6, rel=0.05)
    assert float(transfer_seconds(card, 2**28, 8, 2)) == alone


def test_bytes_over_pcie_take_as_long_at_every_size():
    """As on A100 over PCIe, where a latency of some 10 us and one rate describe all sizes (MooreThreads/SimuMax at
    4dcaae5, configs/system/a100_pcie.json)."""
    card, nvlink = (load_profile(name).collective for name in ("a100-pcie", "h200"))
    sizes = 2.0 ** np.arange(20, 31)
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        took, fast = (collective_seconds(params, kind, sizes, 8) for params in (card, nvlink))
        bus = sizes * 7 / 8 / took
        assert (np.diff(bus) > 0).all()
        assert bus[2] > 0.8 * bus[-1]
        assert (took > fast).all()


def test_a_faster_port_does_not_help_what_waits_for_steps():
    b200, h200 = (load_profile(name).collective for name in ("b200", "h200"))
    small, large = (
        [float(collective_seconds(params, "all_gather", nbytes, 8)) for params in (b200, h200)]
        for nbytes in (2**18, 2**32)
    )
    assert small[0] > 0.9 * small[1]
    assert large[0] == pytest.approx(large[1] / 2, rel=0.02)


def test_a_flow_on_h800_is_bound_by_its_channels_and_not_by_its_port():
    h800, h100 = (load_profile(name).collective for name in ("h800", "h100"))
    assert float(transfer_seconds(h800, 2**26, 8)) == pytest.approx(float(transfer_seconds(h100, 2**26, 8)), rel=0.02)
    assert float(transfer_seconds(h800, 2**28, 2)) > 1.8 * float(transfer_seconds(h100, 2**28, 2))
    assert float(collective_seconds(h800, "all_gather", 2**30, 4)) > 2 * float(
        collective_seconds(h100, "all_gather", 2**30, 4)
    )


def test_less_power_is_slower_products_and_only_then_attention():
    h100 = replace(gpu_named("h100"), sustained_flops_per_s=None)
    rates = [sustained_flops(replace(h100, power_w=watts)) for watts in (300, 500, 700, 1000, 3000)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(0.9 * 4096 * 132 * 1.98e9)
    half = moved(
        H200, gpu_named("h200"), replace(gpu_named("h200"), name="half", power_w=350, sustained_flops_per_s=None)
    )
    assert seconds(half, "fa4") > 1.15 * seconds(H200, "fa4")
    assert seconds(half, "fa2") < 1.25 * seconds(H200, "fa2")


def test_what_is_less_alike_is_less_sure():
    h200 = gpu_named("h200")
    assert [unlike(h200, gpu_named(name)) for name in ("h800", "h20", "b200")] == [0, 1, 2]
    assert unlike(gpu_named("b200"), gpu_named("gb300")) == 1
    for model, how in DERIVED.items():
        assert list(how) == sorted(how), model
    near, far = load_profile("h800").sigma, load_profile("mi355x").sigma
    assert near["attention fwd fa2"] < far["attention fwd fa2"]
    assert near["matrix products"] < far["matrix products"]


STEP = {
    "strategy": "none",
    "model": "llama3-8b",
    "gpus": 8,
    "tokens_per_gpu": 8192,
    "framework": "torch",
    "compile": True,
    "parallel": {"sharding": "fsdp", "recompute": "full"},
}


@pytest.mark.parametrize("name", list(gpus()))
def test_steps_run_on_every_gpu(name):
    kernel = {"kernel": "sdpa_flash"}
    bf16 = predict(STEP | kernel | {"cluster": name})
    assert bf16.time_s > 0
    assert bf16.mfu < 1
    if gpu_named(name).fp8_ratio:
        fp8 = predict(STEP | kernel | {"cluster": name, "precision": "fp8"})
        assert 0.5 * bf16.time_s < fp8.time_s < 1.02 * bf16.time_s
    else:
        with pytest.raises(InfeasibleError, match=f"{name} cannot multiply FP8"):
            predict(STEP | kernel | {"cluster": name, "precision": "fp8"})


def test_a_gpu_that_does_not_run_the_default_kernel_takes_flash_attn_2_where_none_is_named():
    case = {"strategy": "zigzag_ring", "gpus": 8, "tokens_per_gpu": 8192, "heads": 32, "kv_heads": 8}
    assert predict(case | {"cluster": "l40s"}).scenario.kernel == "fa2"
    assert predict(case | {"cluster": "h800"}).scenario.kernel == "fa4"
    with pytest.raises(NotMeasuredError, match="profile l40s lacks kernel 'fa4'"):
        predict(case | {"cluster": "l40s", "kernel": "fa4"})


def test_a_changed_description_is_never_priced_by_an_old_one(tmp_path):
    path = tmp_path / "mine.yaml"
    times = []
    for watts in (700, 250):
        path.write_text(f"name: mine\ngpus_per_node: 8\ngpu: {{name: h200, power_w: {watts}}}\n")
        times.append(predict(STEP | {"cluster": str(path), "kernel": "fa2"}).time_s)
    assert times[1] > times[0]


@pytest.fixture(scope="module")
def left_out_rows():
    return list(rows(["a100", "a100-pcie", "h20", "b200", "gb200", "gb300"]))


LEFT_OUT = [name for name in TARGETS if name.startswith("left-out ")]


@pytest.mark.parametrize("name", LEFT_OUT)
def test_left_out_gpus_are_predicted_as_well_as_was_hoped(name, left_out_rows):
    """Attention kernels and products of published tables from the other GPUs."""
    for row in left_out_rows:
        if row.key not in APART and name == f"left-out {row.gpu}, {row.model.removeprefix('attention ')}":
            check(name, row.mean_absolute)


def test_every_left_out_row_has_a_target_or_stands_apart_and_nine_of_ten_calls_are_inside(left_out_rows):
    compared = [row for row in left_out_rows if row.key not in APART]
    assert {f"left-out {row.gpu}, {row.model.removeprefix('attention ')}" for row in compared} == set(LEFT_OUT)
    inside = np.average([row.covered for row in compared], weights=[row.points for row in compared])
    assert inside >= 0.85
    text = table_of(left_out_rows)
    assert "Apart, and why" in text
    assert all(reason in text for key, reason in APART.items() if not key.startswith("h100"))


def test_code_of_one_version_says_nothing_of_another():
    b200, gb200, old = gpu_named("b200"), gpu_named("gb200"), (("cudnn", 91301),)
    new = derived_profile(b200, without="b200")
    asked = derived_profile(b200, without="b200", versions=old)
    assert seconds(new, "cudnn", "bwd") < 0.9 * seconds(asked, "cudnn", "bwd")  # Hopper's, moved
    assert seconds(new, "fa4", "bwd") == seconds(asked, "fa4", "bwd")
    nearest = moved(load_profile("b200"), b200, gb200)
    only = derived_profile(gb200, without="gb200", versions=old)
    assert only.attention["cudnn", "bwd"].pair_s == pytest.approx(nearest.attention["cudnn", "bwd"].pair_s)
    assert {lender.profile.name: lender.versions.get("cudnn") for lender in lenders()} | {"b200-magi": None} == {
        "a100": None,
        "a100-pcie": 92700,
        "b200": 91301,
        "b200-magi": None,
        "gb200": 92200,
        "gb300": 92200,
        "h100": 91900,
        "h100-fa3": None,
        "h200": 91900,
    }


def test_on_blackwell_all_ends_of_tiles_but_the_last_are_hidden():
    theirs, mine = (load_profile(name).layers.gemm for name in ("h200", "b200"))
    end_s = theirs.tile_s * 1980 / 1965
    assert mine.tile_s == 0
    assert mine.call_s == pytest.approx(theirs.call_s + end_s, rel=1e-5)
    short, long = (float(gemm_seconds(mine, 8192, 8192, k)) for k in (512, 16384))
    assert 2 * 8192**2 * 512 / short > 0.85 * 2 * 8192**2 * 16384 / long  # on GB300 0.88 (triton pull request 740)


def test_slower_tensor_cores_alone_take_as_much_longer_as_they_are_slower():
    h100, h20 = load_profile("h100"), load_profile("h20")
    for kernel in ("fa4", "cudnn"):
        before, after = (p.attention[kernel, "fwd"].pair_s * 1.98e9 for p in (h100, h20))
        assert after - before == pytest.approx((4 * 128 / 1024 - 4 * 128 / 4096) / 0.9, rel=0.01)
        assert after < 4 * before


def test_what_was_left_out_lends_nothing():
    assert "b200" not in left_out(gpu_named("b200")).grade.partition("against")[0].partition("from")[2].replace(
        "gb200", ""
    )
    assert set(shipped_profiles()) >= {"a100", "b200", "gb200", "gb300", "h100", "h200"}


def test_a_description_needs_no_more_than_a_data_sheets_first_lines():
    gpu = Gpu(name="x", memory_bytes=10**11, num_sms=100, peak_flops_per_s=1e15, memory_bandwidth_bytes_per_s=4e12)
    assert gpu.port_bytes_per_s == pytest.approx(63e9, rel=0.01)
    assert gpu.fp8_ratio == 2
    assert derived_profile(gpu).layers


def test_kernels_that_a_published_profile_lacks_are_those_of_its_family():
    a100, card = (load_profile(name) for name in ("a100", "a100-pcie"))
    per_pair = card.attention["cudnn", "fwd"].pair_s
    assert a100.attention["cudnn", "fwd"].pair_s == pytest.approx(per_pair)
    assert a100.grade.endswith("; of these cudnn from GPUs alike")
    gb300 = load_profile("gb300")
    ratio = gb300.attention["fa4", "bwd"].pair_s / load_profile("gb200").attention["fa4", "bwd"].pair_s
    assert 0.9 < ratio < 1.05
    assert "GPUs alike" not in load_profile("h100-fa3").grade
