"""Layers with a state in training steps: published sizes, what layers run and keep, folding, scans and their fit."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layer_cases import there_after

from cpsim.calibrate.fit_recurrent import errors_of, fit, fit_scan, main, scan_of
from cpsim.calibrate.measurement import load
from cpsim.case.gpu import gpus
from cpsim.case.model import MODELS, Model, Recurrent
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.models.derive import moved
from cpsim.models.profile import load_profile, save_profile
from cpsim.models.recurrent import DATA, TRAFFIC, Scan, ScanParams, costs_on, design, measured
from cpsim.prediction.predict import predict
from cpsim.prediction.step.frameworks import MEGATRON, TORCH, Sizes
from cpsim.prediction.step.layer import Gemm
from cpsim.prediction.step.recurrent import cut
from cpsim.strategies.states import traffic

POINTS = Path(__file__).parents[1] / "data" / "points" / "h200" / "h200-linear.jsonl"
GDN = Recurrent(kind="gated_delta", key_heads=8, value_heads=16, key_dim=128, value_dim=128)
MAMBA = Recurrent(kind="mamba2", key_heads=8, value_heads=32, key_dim=128, value_dim=64)
KDA = Recurrent(kind="kda", key_heads=16, value_heads=16, key_dim=128, value_dim=128)
PLAIN = Model(layers=8, hidden=2048, heads=16, kv_heads=8, head_dim=128, ffn=8192, vocab=32000)
MIXED = replace(PLAIN, recurrent=GDN, attention_layers=2)
T = 8192


def seconds_of(model: Model, context: int = T, gpus: int = 1, framework: str = "megatron", **changes: object) -> Any:
    """The step of one sequence."""
    given = {"cluster": "dgx-h100", "mask": "causal", "kernel": "cudnn", "strategy": "none"}
    given |= {"gpus": gpus, "framework": framework, "model": fields(model), "tokens": context, "context": context}
    return predict(given | changes)


def fields(model: Model) -> dict[str, Any]:
    """Of a scenario."""
    return {name: value for name, value in asdict(model).items() if value or name == "gated"}


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("qwen3-next-80b-a3b", 79.6, 3.8),  # its model card: 80 B, 3 B active, which leaves embeddings out
        ("nemotron-h-8b", 8.1, 8.1),  # Nemotron-H (2025), table 1 names 8 B and 56 B; 8.1 B on the hub
        ("nemotron-h-56b", 56.3, 56.3),
        ("kimi-linear-48b-a3b", 49.1, 3.5),  # Kimi Linear (2025), section 5: 48 B, 3 B active
        ("nemotron-3-nano-30b-a3b", 31.6, 3.6),  # Nemotron 3 Nano (2025), section 2: 31.6 B, 3.6 B with embeddings
    ],
)
def test_models_have_their_published_size(name: str, total: float, active: float) -> None:
    assert MODELS[name].parameters() / 1e9 == pytest.approx(total, abs=0.05)
    assert MODELS[name].active_parameters() / 1e9 == pytest.approx(active, abs=0.05)


def test_parameters_of_a_small_layer_one_by_one() -> None:
    """fla's GatedDeltaNet and mamba-ssm's Mamba2, weight by weight."""
    hidden = 64
    gdn = Recurrent(kind="gated_delta", key_heads=2, value_heads=4, key_dim=8, value_dim=16)
    own = hidden * (2 * 16 + 64 + 64 + 4 + 4) + 64 * hidden + 4 * (2 * 16 + 64) + 4 + 4 + 16
    mamba = Recurrent(kind="mamba2", key_heads=2, value_heads=4, key_dim=8, value_dim=16)
    theirs = hidden * (2 * 64 + 2 * 16 + 4) + 64 * hidden + 5 * (64 + 2 * 16) + 3 * 4 + 64
    kda = Recurrent(kind="kda", key_heads=4, value_heads=4, key_dim=8, value_dim=16)
    wide = 2 * 32 + 64
    kimi = hidden * (wide + 4 + 2 * 16) + 16 * (32 + 64) + 64 * hidden + 4 * wide + 4 + 32 + 16
    mlp, norms = 3 * hidden * 128, 2 * hidden
    base = Model(layers=1, hidden=hidden, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=10)
    assert replace(base, recurrent=gdn).layer_parameters(1) == own + mlp + norms
    assert replace(base, recurrent=kda).layer_parameters(1) == kimi + mlp + norms
    assert replace(base, recurrent=mamba).layer_parameters(1) == theirs + mlp + norms
    assert replace(base, recurrent=mamba, bare_layers=1).layer_parameters(1) == theirs + hidden
    assert replace(base, gated=False).linears(1)["gate_up"] == (hidden, 128)


def test_shares_of_kinds_are_those_of_the_pattern() -> None:
    nano = MODELS["nemotron-3-nano-30b-a3b"]
    assert [round(share * nano.layers) for share, _ in nano.kinds] == [6, 17, 6]
    assert sum(share for share, _ in nano.kinds) == pytest.approx(1)
    whole = sum(round(share * nano.layers) * one.layer_parameters(1) for share, one in nano.kinds)
    assert nano.parameters() == whole + 2 * nano.vocab * nano.hidden + nano.hidden


@pytest.mark.parametrize("framework", [MEGATRON, TORCH], ids=lambda one: one.name)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("state", [GDN, MAMBA, KDA], ids=["gdn", "mamba", "kda"])
def test_layers_read_what_was_made_and_multiply_each_weight_three_times(framework, compiled, tp, bare, state) -> None:
    model = replace(PLAIN, recurrent=state, bare_layers=PLAIN.layers if bare else 0)
    code = framework.runs(Sizes(model, tp, T), compiled, None, False)
    there = there_after(code.forward, {"x", "weights"})
    assert "y" in there
    assert code.kept <= there
    assert "dx" in there_after(code.backward, {"x", "weights", "dy", *code.kept})
    whats = [node.what for node in (*code.forward, *code.backward)]
    products = sum(what.m * what.n * what.k for what in whats if isinstance(what, Gemm))
    assert products == 3 * T * sum(inner * outer for inner, outer in model.linears(tp).values())
    assert sum(what == "fwd" for what in whats) == sum(what == "bwd" for what in whats) == 1


def test_kept_activations_are_inputs_of_each_kernel() -> None:
    """Bytes of a token that a layer without MLP keeps, counted by hand: its input, norm, projection, what the
    convolution makes, output, normed output, and gates in fp32 with a row of a chunk's pairs."""
    model = replace(PLAIN, recurrent=GDN, bare_layers=PLAIN.layers)
    code = MEGATRON.runs(Sizes(model, 1, T), False, None, False)
    sizes = {name: nbytes for node in code.forward for name, nbytes in node.makes.items() if name in code.kept}
    channels, values = 2 * 8 * 128 + 16 * 128, 16 * 128
    projected = channels + values + 2 * 16
    assert sum(sizes.values()) == T * (2 * (2048 + projected + channels + 2 * values) + 16 * (2 * 4 + 2 * 64))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"attention_layers": 8}, "attention_layers: expected less than 8 layers"),
        ({"bare_layers": 7}, "attention_layers: expected less than 8 layers"),
        ({"recurrent": None}, "attention_layers: belongs to a model with states"),
        ({"window": 128}, "recurrent: does not go with window"),
        ({"recurrent": asdict(replace(GDN, key_heads=3))}, "key_heads: expected a divisor of value_heads = 16, got 3"),
    ],
)
def test_what_makes_no_sense_is_one_line(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ScenarioError, match=match):
        predict({"cluster": "dgx-h100", "gpus": 1, "model": fields(MIXED) | changes, "tokens": T, "strategy": "none"})


@pytest.mark.parametrize("framework", ["megatron", "torch"])
def test_time_of_mixed_layers_is_between_and_on_the_line(framework: str) -> None:
    """Passes of a mixed model are the mean of passes of its kinds: two mixtures lie on a line."""
    parallel = {"recompute": "full", "optimizer": False}
    times = [
        seconds_of(replace(MIXED, attention_layers=attend), framework=framework, parallel=parallel).time_s
        for attend in (1, 3, 5)
    ]
    assert times[1] - times[0] == pytest.approx(times[2] - times[1], rel=0.03, abs=2e-5)


def test_states_cost_no_more_for_longer_documents_and_attention_does() -> None:
    mamba = replace(PLAIN, recurrent=MAMBA, attention_layers=0)
    seconds = {}
    for name, model in (("plain", PLAIN), ("mamba", mamba)):
        for n in (T, 8 * T):
            found = seconds_of(model, n, tokens=8 * T, parallel={"recompute": "full", "microbatches": 8 * T // n})
            seconds[name, n] = found.time_s
    assert seconds["mamba", 8 * T] == pytest.approx(seconds["mamba", T], rel=0.06)
    assert seconds["plain", 8 * T] > 1.3 * seconds["plain", T]


def test_heads_that_do_not_divide_are_refused_and_gathers_are_not() -> None:
    model = replace(MIXED, recurrent=replace(GDN, value_heads=12, key_heads=12))
    eight = {"gpus": 8, "strategy": "zigzag_ring", "parallel": {"cp": 8}}
    with pytest.raises(InfeasibleError, match=r"divide 12 heads of layers with a state"):
        seconds_of(model, 8 * T, **eight)
    assert seconds_of(model, 8 * T, framework="torch", **eight).time_s > 0
    with pytest.raises(InfeasibleError, match="gate in the MLP"):
        seconds_of(replace(PLAIN, gated=False), framework="torch")


def test_ranks_of_a_gather_hold_consecutive_tokens() -> None:
    assert cut((10, 6), 2) == [(8,), (2, 6)]
    assert cut((16,), 4) == [(4,)] * 4
    assert [sum(part) for part in cut((5, 5, 7), 3)] == [5, 6, 6]


SCAN = Scan(kernel="gated_delta", key_heads=16, value_heads=32, key_dim=128, value_dim=128, chunk=64)


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_scans_are_linear_in_tokens_and_documents_are_free(pass_: str) -> None:
    costs = measured()
    times = [costs.scan_s(SCAN, pass_, (n,)) for n in (T, 2 * T, 4 * T, 8 * T)]
    assert all(b > a for a, b in pairwise(times))
    assert times[3] - times[2] == pytest.approx(2 * (times[2] - times[1]), rel=1e-6)
    assert costs.scan_s(SCAN, pass_, (T // 8,) * 8) <= times[0] * (1 + 1e-9)


def test_a_walk_is_as_long_as_its_longest_sequence_or_as_its_blocks() -> None:
    assert SCAN.walk((6400,), 128) == 100  # 64 blocks, all at once
    assert SCAN.walk((6400,) * 4, 128) == 200  # 256 blocks on 128 slots
    assert SCAN.walk((6400, 640), 128) == 100
    few = replace(SCAN, value_heads=4, key_heads=2)
    assert few.walk((6400,) * 4, 128) == 100


def test_a_fit_finds_what_points_were_made_of() -> None:
    truth = ScanParams(call_s=4e-5, byte_s=4e-13, step_s=2e-6, slots=132.0)
    weights, points = np.array([truth.call_s, truth.byte_s, truth.step_s]), []
    for heads in (4, 16, 32):
        for lens in ((1024,), (8192,), (65536,), (4096,) * 8, (16384, 1024, 1024)):
            sizes = {"key_heads": heads // 2, "value_heads": heads, "key_dim": 128, "value_dim": 128, "chunk": 64}
            point = {"kernel": "gated_delta", "pass": "fwd", "q_lens": list(lens), **sizes, "op": "linear"}
            seconds = float(design(scan_of(point), "fwd", lens, truth.slots) @ weights)
            points.append({**point, "samples_s": [seconds] * 3})
    found = fit_scan(points, 132)
    assert found.slots == truth.slots
    assert [found.call_s, found.byte_s, found.step_s] == pytest.approx(weights.tolist(), rel=1e-6)
    assert np.abs(errors_of(found, points)).max() < 1e-6


def test_the_shipped_costs_are_the_fit_of_the_committed_points() -> None:
    rows, errors = fit(load(POINTS), "h200")
    assert json.loads(DATA.read_text(encoding="utf-8")) == rows
    for name, each in errors.items():
        assert np.abs(each).mean() < (0.12 if name.startswith("mamba2") else 0.035), name


def test_kernels_computed_what_the_recurrence_does() -> None:
    """Outputs and gradients of every input, in bf16 against fp32."""
    found = {p["kernel"]: p["relative_errors"] for p in load(POINTS).of("check")}
    assert found.keys() == {"gated_delta", "mamba2"}
    assert max(max(errors) for errors in found.values()) < 0.01


def test_the_walk_explains_what_documents_save() -> None:
    """Published on H100, and not fitted: 8,192 tokens take 0.259 ms as one sequence, 0.221 with 6,144 of them in the
    longest, 0.184 with 4,096. Bytes are the same, so that steps of the longest sequence are all that differs."""
    costs = costs_on(gpus()["h100"], gpus()["h200"], measured())
    scan = replace(SCAN, key_heads=2, value_heads=8)
    alone, most, half = (1e3 * costs.scan_s(scan, "fwd", lens) for lens in ((8192,), (6144, 2048), (4096, 4096)))
    assert alone - most == pytest.approx(0.259 - 0.221, rel=0.25)
    assert most - half == pytest.approx(0.221 - 0.184, rel=0.3)


def test_other_gpus_follow_memory_and_clock() -> None:
    costs, h100, h200 = measured(), gpus()["h100"], gpus()["h200"]
    there = costs_on(h100, h200, costs)
    memory = h200.memory_bandwidth_bytes_per_s / h100.memory_bandwidth_bytes_per_s
    for pass_ in ("fwd", "bwd"):
        before, after = costs.scan_s(SCAN, pass_, (65536,)), there.scan_s(SCAN, pass_, (65536,))
        assert before <= after <= memory * before
    same = costs_on(h200, h200, costs)
    assert same.scan_s(SCAN, "fwd", (T,)) == pytest.approx(costs.scan_s(SCAN, "fwd", (T,)), rel=1e-12)
    twice = replace(h200, num_sms=2 * h200.num_sms, memory_bandwidth_bytes_per_s=2 * h200.memory_bandwidth_bytes_per_s)
    fast = costs_on(twice, h200, costs)
    bytes_s = [one.scans["gated_delta fwd"].byte_s for one in (costs, fast)]
    assert bytes_s[1] == pytest.approx(bytes_s[0] / 2, rel=1e-12)


def test_heads_lose_to_states_for_long_sequences() -> None:
    """All-to-alls grow with tokens and states do not: where they cross follows from the closed forms."""
    nemotron = MODELS["nemotron-h-8b"].recurrent
    assert nemotron is not None
    ranks = 8
    sent = {n: {how: traffic(how, nemotron, n, ranks).sent(ranks) for how in ("gather", "heads")} for n in (128, 8192)}
    assert sent[128]["gather"] > sent[128]["heads"]
    assert sent[8192]["gather"] < sent[8192]["heads"]


def test_every_kernel_reads_more_backward() -> None:
    for kernel in ("gated_delta", "kda", "mamba2"):
        forward, backward = TRAFFIC[kernel, "fwd"], TRAFFIC[kernel, "bwd"]
        assert backward.values > forward.values
        assert backward.states >= forward.states


def test_kimi_linear_is_the_mean_of_its_kinds() -> None:
    """20 of 27 layers have a state and 7 attend to latents, which layers with a state have none of."""
    kimi = MODELS["kimi-linear-48b-a3b"]
    (attends, latent), (scans, state) = kimi.kinds
    assert (round(27 * attends), round(27 * scans)) == (7, 20)
    assert latent.kv_rank == 512
    assert (state.kv_rank, state.rope_dim, state.value_dim) == (0, 0, 0)
    assert state.linears(1)["decay"] == state.linears(1)["norm_gate"] == (128, 4096)
    case = {"gpus": 8, "cluster": "dgx-h100", "tokens": 8 * 8192, "kernel": "cudnn", "strategy": "none"}
    found = predict(
        {**case, "model": "kimi-linear-48b-a3b", "parallel": {"ep": 8, "recompute": "full", "cuda_graphs": "layers"}}
    )
    assert any("scans of kda" in note for note in found.notes)
    assert found.parts_s["attention fwd"] < found.parts_s["attention bwd"]


def test_decays_of_kda_are_kept_and_multiplied_once_more() -> None:
    """Beside what a layer of Gated DeltaNet of as many heads keeps: decays and gates, in bf16, decays in fp32 that the
    scan saves, and a second row of pairs; its projection is narrower by what gates are made of."""
    kda = replace(PLAIN, recurrent=KDA)
    gdn = replace(PLAIN, recurrent=replace(KDA, kind="gated_delta"))
    kept = []
    for model in (kda, gdn):
        code = MEGATRON.layer(Sizes(model, 1, T), False)
        sizes = {name: size for node in code.forward for name, size in node.makes.items()}
        kept.append(sum(sizes[name] for name in code.kept))
    heads, dim = KDA.value_heads, KDA.key_dim
    narrower = 2 * (gdn.recurrent.projected - kda.recurrent.projected)  # type: ignore[union-attr]
    assert kept[0] - kept[1] == T * (2 * 2 * heads * dim + heads * (4 * (dim - 1) + 2 * 64) - narrower)


def test_a_profile_has_scans_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fitted into a file, they are read as they were written, and steps follow them; other GPUs derive from them."""
    path = tmp_path / "mine.json"
    save_profile(load_profile("h200"), path)
    monkeypatch.setattr("sys.argv", ["fit_recurrent", str(POINTS), "--into", str(path)])
    main()
    mine = load_profile(path)
    assert mine.scans is not None
    ships = measured()
    for name, one in mine.scans.scans.items():
        assert asdict(one) == pytest.approx(asdict(ships.scans[name]), rel=1e-5), name
    slow = {
        name: replace(one, call_s=3 * one.call_s, byte_s=3 * one.byte_s, step_s=3 * one.step_s)
        for name, one in ships.scans.items()
    }
    save_profile(replace(mine, scans=replace(ships, scans=slow)), path)
    case = {"gpus": 1, "cluster": "dgx-h200", "tokens": 32768, "kernel": "cudnn", "strategy": "none"}
    model = {**fields(replace(PLAIN, recurrent=KDA)), "layers": 4}
    found = [predict({**case, "model": model, "profile": str(p)}).parts_s for p in ("h200", path)]
    for pass_ in ("attention fwd", "attention bwd"):
        assert found[1][pass_] == pytest.approx(3 * found[0][pass_], rel=1e-3)
    h100, h200 = gpus()["h100"], gpus()["h200"]
    assert moved(mine, h200, h100).scans == costs_on(h100, h200, mine.scans)
