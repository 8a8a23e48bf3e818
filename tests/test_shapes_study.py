"""Windows, values of another size and batches: measured calls beside predictions made before, held-out fits, tables."""

import json
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy")
pytest.importorskip("torch", reason="shapes of calls lie beside what measures them")

from cpsim.calibrate.fit_shapes import fit_shapes, has_window, is_usual
from cpsim.calibrate.measurement import load
from cpsim.calibrate.recipes import points_file
from cpsim.calibrate.residuals import measured, predicted_attention
from cpsim.models.profile import load_profile
from studies.shapes.calls import calls
from studies.shapes.published import errors, is_fitted, is_odd, rows

STUDY = Path(__file__).parent.parent / "studies" / "shapes"
LONG_S = 1e-3
NAMES = (
    "kernel",
    "pass",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "value_dim",
    "q_lens",
    "k_lens",
    "window",
    "varlen",
)


@cache
def points():
    return [p for p in load(points_file("h200-shapes.jsonl")).of("attention") if not is_usual(p)]


def without_shapes(params):
    """A kernel as it was before any of these calls was measured."""
    usual = replace(params, head_dims=tuple(one for one in params.head_dims if not one.value_dim))
    return usual.everywhere(lambda one: replace(one, block_window_s=0.0, window_pair_s=0.0, shared_window_factor=1.0))


def rows_of(name):
    return [json.loads(line) for line in (STUDY / name).read_text().splitlines()]


def kind(point):
    return "192/128" if point.get("value_dim") else "window" if has_window(point) else "batch"


def test_calls_are_those_that_the_study_draws():
    drawn = [(kernel, list(shape.q_lens), shape.head_dim, list(shape.window)) for kernel, shape in calls()]
    assert [(r["kernel"], r["q_lens"], r["head_dim"], r["window"]) for r in rows_of("calls.jsonl")] == drawn


def test_what_was_predicted_before_any_call_was_measured():
    """Means of calls of a millisecond and more; what missed is named with its cause in studies/shapes/README.md."""
    before = {json.dumps([r.get(n) for n in NAMES]): r["predicted_s"] for r in rows_of("predicted-h200.jsonl")}
    found = defaultdict(list)
    for p, seconds in zip(points(), measured(points()), strict=True):
        if seconds >= LONG_S:
            said = before[json.dumps([p.get(n) for n in NAMES])]
            found[p["kernel"], p["pass"], kind(p)].append(said / seconds - 1)
    mean = {key: float(np.abs(values).mean()) for key, values in found.items()}
    assert {key for key, error in mean.items() if error > 0.05} == {
        ("fa2", "fwd", "window"),
        ("sdpa_flash", "fwd", "window"),
        ("cudnn", "bwd", "192/128"),
    }
    assert sum(error <= 0.05 for error in mean.values()) == len(mean) - 3 == 9


def test_fits_of_half_of_the_calls_predict_the_other_half():
    bare = {key: without_shapes(params) for key, params in load_profile("h200").attention.items()}
    halves = [[p for i, p in enumerate(points()) if i // 2 % 2 == half] for half in (0, 1)]
    found = defaultdict(list)
    for half in (0, 1):
        fitted = fit_shapes(bare, halves[1 - half])
        for key in {(p["kernel"], p["pass"]) for p in halves[half]}:
            mine = [p for p in halves[half] if (p["kernel"], p["pass"]) == key]
            for p, error in zip(mine, predicted_attention(fitted[key], mine) / measured(mine) - 1, strict=True):
                found[(*key, kind(p))].append(error)
    for key, values in found.items():
        if key[0] != "sdpa_flash":  # nine calls of each size, half of which tell nothing
            assert np.abs(values).mean() < 0.035, key


def test_windows_with_values_of_another_size_are_told_by_half_of_their_calls():
    """cuDNN's, measured later; before they were 10 % too fast backward, and windows of 128 keys 12 %."""
    both = load(points_file("h200-shapes-both.jsonl")).of("attention")
    before = {json.dumps([r.get(n) for n in NAMES]): r["predicted_s"] for r in rows_of("predicted-h200-both.jsonl")}
    bare = {key: without_shapes(load_profile("h200").attention[key]) for key in (("cudnn", "fwd"), ("cudnn", "bwd"))}
    then, held_out = defaultdict(list), defaultdict(list)
    for half in (0, 1):
        told = [p for some in (points(), both) for i, p in enumerate(some) if i // 2 % 2 != half]
        fitted = fit_shapes(bare, [p for p in told if p["kernel"] == "cudnn"])
        for p in (p for i, p in enumerate(both) if i // 2 % 2 == half):
            (seconds,), key = measured([p]), (p["kernel"], p["pass"])
            held_out[p["pass"], p["family"]].append(predicted_attention(fitted[key], [p])[0] / seconds - 1)
            then[p["pass"], p["family"]].append(before[json.dumps([p.get(n) for n in NAMES])] / seconds - 1)
    assert np.mean(then["bwd", "window values"]) < -0.09
    assert np.mean(then["bwd", "window"]) < -0.11
    assert {key: np.abs(errors).mean() < 0.045 for key, errors in held_out.items()} == dict.fromkeys(held_out, True)


def test_sharing_keys_costs_less_under_windows():
    """cuDNN's blocks backward; and only where a profile says so."""
    cudnn = load_profile("h200").attention["cudnn", "bwd"]
    call = next(p for p in points() if p["kernel"] == "cudnn" and p["num_heads"] > p["num_kv_heads"] and has_window(p))
    full = {name: value for name, value in call.items() if name != "window"}
    dear = cudnn.everywhere(lambda one: replace(one, shared_window_factor=1.0))
    assert predicted_attention(dear, [call])[0] > predicted_attention(cudnn, [call])[0]
    assert predicted_attention(dear, [full])[0] == predicted_attention(cudnn, [full])[0]


def test_fits_leave_all_other_calls_as_they_are():
    made = fit_shapes(load_profile("h200").attention, points())
    usual = [p for p in load(points_file("h200-kernels-0.jsonl")).of("attention") if p["kernel"] == "fa2"][:40]
    for pass_ in ("fwd", "bwd"):
        mine = [p for p in usual if p["pass"] == pass_]
        params = load_profile("h200").attention["fa2", pass_]
        assert (predicted_attention(made["fa2", pass_], mine) == predicted_attention(params, mine)).all()


def test_published_tables():
    """NVIDIA's of windows and of latent attention: 10 % in the mean."""
    mean = {name: float(np.abs(values).mean()) for name, values in errors().items() if "odd" not in name}
    assert max(mean.values()) < 0.10
    assert max(error for name, error in mean.items() if "fitted" in name) < 0.07
    assert len(mean) == 41
    assert sum(map(is_odd, rows())) == 6
    assert sum(map(is_fitted, rows())) == 95
