"""Hosts: how fast they are is an input, launches decide short iterations, and iterations back to back are steady."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import gumbel_r, norm
from test_cli import cpsim, one_line

from cpsim.calibrate import fit_host, pace
from cpsim.calibrate.fit import WINDOW_S, fit_sustained
from cpsim.calibrate.measurement import Measurements
from cpsim.case.load import load_scenario, scenario_from
from cpsim.errors import InfeasibleError
from cpsim.models.host_speed import load_host, on_host, save_host
from cpsim.models.launches import COMPILED, HOT, launch_notes, release_times
from cpsim.models.profile import load_profile
from cpsim.models.spread import NINETIES, expected_maximum, late
from cpsim.prediction.case import resolve
from cpsim.prediction.predict import predict
from cpsim.prediction.standalone import standalone
from cpsim.prediction.step.costs import Costs
from cpsim.prediction.step.layer import Gemm
from cpsim.schedule.schedule import Kind
from cpsim.strategies import plan
from cpsim.strategies.others import RING_FLASH_ATTN

EAGER = {
    "strategy": "zigzag_ring",
    "implementation": "ring-flash-attn",
    "kernel": "fa2",
    "gpus": 2,
    "cluster": "dgx-h100",
    "heads": 32,
    "kv_heads": 8,
}
SHORT, LONG = {"tokens_per_gpu": 512}, {"tokens_per_gpu": 32768}


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd_bwd"])
@pytest.mark.parametrize("protocol", ["synced", "streamed"])
def test_slower_hosts_take_longer_where_they_decide_and_nowhere_else(protocol, pass_):
    case = EAGER | {"protocol": protocol, "pass": pass_}
    short = [predict(case | SHORT | {"host": factor}).time_s for factor in (0.5, 1.0, 2.0)]
    assert short[1] == pytest.approx(2 * short[0], rel=0.1)
    assert short[2] == pytest.approx(2 * short[1], rel=0.1)
    long = [predict(case | LONG | {"host": factor}).time_s for factor in (0.5, 2.0)]
    assert long[1] == pytest.approx(long[0], rel=0.02)


def test_a_known_host_has_a_narrower_interval_than_an_unknown_one():
    known, unknown = predict(EAGER | SHORT | {"host": 1.0}), predict(EAGER | SHORT)
    assert known.time_s == unknown.time_s
    assert known.time_s_high / known.time_s_low < 0.9 * unknown.time_s_high / unknown.time_s_low


def test_a_steady_iteration_takes_as_long_as_the_slower_of_host_and_gpu():
    """A GPU that nobody keeps waiting is as fast as with a host that takes no time."""
    streamed = EAGER | {"protocol": "streamed"}
    gpu = predict(streamed | LONG | {"host": 0.1}).time_s
    assert predict(streamed | LONG).time_s == gpu
    short = predict(streamed | SHORT)
    assert short.parts_s["host"] > 0.5 * short.time_s
    assert sum(short.parts_s.values()) == pytest.approx(short.time_s)
    assert short.host_share > 0.5


def test_both_passes_of_a_steady_state_share_the_host():
    """Where the host is behind in one pass and ahead in the other, one makes up for the other."""
    fwd, bwd, both = (
        predict(EAGER | {"tokens_per_gpu": 3072, "protocol": "streamed", "pass": p}).time_s
        for p in ("fwd", "bwd", "fwd_bwd")
    )
    assert max(fwd, bwd) < both <= fwd + bwd


def test_the_second_pass_of_a_window_is_launched_while_the_first_runs():
    case = EAGER | {"tokens_per_gpu": 8192}
    fwd, bwd, both = (predict(case | {"pass": p}).time_s for p in ("fwd", "bwd", "fwd_bwd"))
    assert both < fwd + bwd - 1e-4


def test_what_is_bound_by_its_host_says_so():
    noted = [note for note in predict(EAGER | SHORT).notes if note.startswith("host-bound")]
    assert "on a fast host" in noted[0]
    assert "calibrate --host" in noted[0]
    assert not any(note.startswith("host-bound") for note in predict(EAGER | LONG).notes)
    (known,) = (n for n in predict(EAGER | SHORT | {"host": 2.0}).notes if n.startswith("host-bound"))
    assert "on a fast host" not in known


def test_our_graphs_are_launched_at_once_whatever_the_host():
    ours = {"strategy": "ring", "gpus": 2, "cluster": "dgx-h100", "heads": 32, "kv_heads": 8, "kernel": "fa2"}
    times = {predict(ours | SHORT | {"host": factor}).time_s for factor in (0.5, 2.0)}
    assert len(times) == 1


def test_views_of_tensors_cost_the_host_as_often_as_the_code_takes_them():
    """ring-flash-attn's all-gather slices every tensor for every group of heads; its plain ring passes them on. The
    first of several in a row takes longest."""
    profile, found = load_profile("h100"), {}
    for strategy, knobs in (("ring", {}), ("allgather", {"heads_per_gather": 8})):
        case = EAGER | SHORT | {"strategy": strategy, "knobs": knobs, "pass": "fwd", "mask": "full"}
        resolved = resolve(scenario_from(case))
        mine = resolved.conditions()
        plain = replace(mine, views=(0, 0))
        schedule = plan(strategy, resolved.workload, mine.cluster, "fwd", knobs, RING_FLASH_ATTN)
        kinds, calls = schedule.kinds(), int((schedule.kind == Kind.ATTENTION).sum()) / 2
        late, early = (release_times(schedule, kinds, "fwd", given)[1] for given in (mine, plain))
        threads = np.exp(profile.sigma["host thread"] * expected_maximum(2))
        found[strategy] = (late - early) / (threads * profile.host.launch_s["view"] * calls)
    assert found["ring"] == pytest.approx(1 + HOT)
    assert found["allgather"] == pytest.approx(1 + 8 * HOT)


@pytest.mark.parametrize(
    ("implementation", "kernel"), [("flash-attn", "fa2"), ("torch", "sdpa_flash"), ("torch", "cudnn")]
)
def test_plain_calls_are_kernels_that_a_host_launches(implementation, kernel):
    case = {"strategy": "none", "gpus": 1, "cluster": "dgx-h100", "heads": 32, "kv_heads": 8, "kernel": kernel}
    ours, theirs = (
        [predict(case | {"tokens": tokens, "implementation": code}) for tokens in (256, 16384)]
        for code in ("cpsim", implementation)
    )
    assert theirs[0].time_s > 3 * ours[0].time_s
    assert theirs[1].time_s == pytest.approx(ours[1].time_s, rel=0.05)


def test_plain_calls_run_on_one_gpu_with_kernels_that_their_code_has():
    case = {"strategy": "none", "cluster": "dgx-h100", "heads": 8, "kv_heads": 8, "tokens": 4096}
    with pytest.raises(InfeasibleError, match="runs kernels fa2"):
        predict(case | {"gpus": 1, "kernel": "cudnn", "implementation": "flash-attn"})
    with pytest.raises(InfeasibleError, match="1 GPU"):
        predict(case | {"gpus": 2, "kernel": "fa2", "implementation": "flash-attn"})
    with pytest.raises(InfeasibleError, match="runs masks"):
        predict(case | {"gpus": 1, "kernel": "cudnn", "implementation": "torch", "mask": "causal_document"})


PLAIN = {"strategy": "none", "gpus": 1, "cluster": "dgx-h100", "heads": 32, "kv_heads": 8, "tokens": 512}


def without_compiled(profile):
    """A profile whose hosts nobody has measured under torch.compile."""
    known = {name: s for name, s in profile.host.launch_s.items() if not name.startswith(COMPILED)}
    return replace(profile, host=replace(profile.host, launch_s=known))


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize(("implementation", "kernel"), [("flash-attn", "fa2"), ("torch", "sdpa_flash")])
def test_compiled_calls_launch_the_same_kernel_from_code_that_takes_no_views(implementation, kernel, pass_):
    case = PLAIN | {"implementation": implementation, "kernel": kernel, "pass": pass_}
    eager, compiled = (resolve(scenario_from(case | {"compile": compiles})) for compiles in (False, True))
    compiled = replace(compiled, profile=without_compiled(compiled.profile))
    schedule = plan("none", compiled.workload, compiled.cluster, pass_, {}, compiled.code)
    assert schedule.kinds() == plan("none", eager.workload, eager.cluster, pass_, {}, eager.code).kinds()
    late, early = (
        release_times(schedule, schedule.kinds(), pass_, found.conditions())[1] for found in (eager, compiled)
    )
    threads = np.exp(eager.profile.sigma["host thread"] * expected_maximum(1))
    views = eager.conditions().views[pass_ == "bwd"]
    view = eager.profile.host.launch_s["view"] * threads
    assert late - early == pytest.approx(view * (min(views, 1) + max(views - 1, 0) * HOT))


def test_compiled_calls_cost_what_was_measured_and_say_what_was_not():
    case = resolve(scenario_from(PLAIN | {"implementation": "torch", "kernel": "cudnn", "compile": True}))
    given = replace(case.conditions(), profile=without_compiled(case.profile))
    schedule = plan("none", case.workload, case.cluster, "fwd", {}, case.code)
    kinds = schedule.kinds()
    assert [note.partition(" not measured")[0] for note in launch_notes(kinds, "fwd", given)] == [
        "host: compiled entry fwd",
        "host: compiled exit fwd",
    ]
    known = given.profile.host
    edges = {"compiled entry fwd": 3e-4, "compiled exit fwd": 2e-4}
    measured = replace(given, profile=replace(given.profile, host=replace(known, launch_s=known.launch_s | edges)))
    assert launch_notes(kinds, "fwd", measured) == ()
    late, early = (release_times(schedule, kinds, "fwd", g)[1] for g in (measured, given))
    instead = sum(known.launch_s[f"autograd {edge} fwd"] for edge in ("entry", "exit"))
    threads = np.exp(given.profile.sigma["host thread"] * expected_maximum(1))
    assert late - early == pytest.approx(threads * (5e-4 - instead))


# --- steady state of GPUs ---


def test_kernels_take_longer_after_seconds_of_load_where_gpus_are_busy():
    """Of a GPU that idles a tenth of the time the limiter takes nothing."""
    profile = load_profile("h100")
    factors = profile.sustained_factor("fa2 fwd", np.array([1.0, 0.97, 0.9]))
    assert 1.01 < factors[0] < 1.04
    assert 1.0 < factors[1] < factors[0]
    assert factors[2] == 1.0
    assert profile.sustained_factor("unknown fwd") == pytest.approx(np.exp(profile.sustained["others"]))
    alone = {"strategy": "none", "gpus": 1, "cluster": "dgx-h100", "heads": 32, "kv_heads": 8, "kernel": "fa2"}
    synced, steady = (predict(alone | {"tokens": 32768, "protocol": p}) for p in ("synced", "streamed"))
    assert 1.01 < steady.time_s / synced.time_s < 1.04
    width = [answer.time_s_high / answer.time_s_low for answer in (synced, steady)]
    assert width[1] > width[0]
    slower, faster = steady.time_s_high / steady.time_s, steady.time_s / steady.time_s_low
    assert 1.07 < slower < 1.12
    assert 1.03 < faster < 1.07
    assert steady.time_s == pytest.approx(np.median(steady.draws_s), rel=5e-3)


def test_matrix_products_of_a_steady_layer_take_longer_as_attention_does_and_the_answer_says_so():
    layer = {
        "model": "llama3-8b",
        "part": "layer",
        "strategy": "none",
        "kernel": "fa2",
        "gpus": 1,
        "cluster": "dgx-h100",
    }
    synced, steady = (predict(layer | {"tokens": 8192, "protocol": p}) for p in ("synced", "streamed"))
    longer = steady.parts_s["matrix products"] / synced.parts_s["matrix products"]
    assert 1.01 < longer < np.exp(load_profile("h100").sustained["others"])  # memory-bound ops between them draw less
    told = ["as attention is" in note for answer in (synced, steady) for note in answer.notes if "matrix" in note]
    assert told == [True]
    assert not [note for note in synced.notes if "matrix" in note]


def test_matrix_products_of_a_step_are_those_of_a_gpu_under_load():
    profile = load_profile("h100")
    cold, measured = (
        replace(profile, sustained={}),
        replace(profile, sustained={"matrix products": 0.05, "others": 0.02}),
    )
    op = Gemm("forward", 8192, 4096, 4096)
    seconds = {
        name: Costs(p, 1, 1).seconds([op])["matrix products"] for name, p in {"cold": cold, "hot": measured}.items()
    }
    assert seconds["hot"] / seconds["cold"] == pytest.approx(np.exp(0.05))
    assert Costs(measured, 1, 1).notes([op]) == Costs(cold, 1, 1).notes([op]) == ()
    (note,) = Costs(profile, 1, 1).notes([op])
    assert f"{np.expm1(profile.sustained['others']):.1%}" in note


def test_hot_gpus_are_late_as_the_largest_of_many_draws_is():
    """Against SciPy's Gumbel distribution, shifted and scaled to median 0 and deviation 1."""
    shares = np.array([0.001, 0.05, 0.5, 0.95, 0.999])
    beta = np.sqrt(6) / np.pi
    expected = gumbel_r.ppf(shares, scale=beta) - gumbel_r.median(scale=beta)
    found = late(norm.ppf(shares))
    np.testing.assert_allclose(found, expected, atol=1e-9)
    assert found[3] - found[1] == pytest.approx(NINETIES)
    assert gumbel_r.std(scale=beta) == pytest.approx(1)


def test_the_spread_of_moments_under_load_is_that_of_windows_of_a_fifth_of_a_second():
    """A peak counts by how much of a window it takes, and samples of one window count once."""
    times = np.arange(0.05, 6.0, 0.05)
    rng = np.random.default_rng(3)
    windows = np.exp(0.02 * late(rng.standard_normal(60)))

    def point(each):
        hot = times > 0.6
        seconds = np.ones(len(times))
        seconds[hot] = each(np.floor((times[hot] - times[hot][0]) / WINDOW_S + 1e-9).astype(int), int(hot.sum()))
        return {
            "kernel": "fa2",
            "pass": "fwd",
            "op": "sustained",
            "times_s": times.tolist(),
            "samples_s": seconds.tolist(),
        }

    steady = fit_sustained([point(lambda window, _: windows[window])])[1]
    noisy = fit_sustained([point(lambda window, n: windows[window] * (1 + 0.05 * (-1.0) ** np.arange(n)))])[1]
    drawn = np.log(windows[:27])
    assert steady == pytest.approx(np.diff(np.quantile(drawn, (0.05, 0.95)))[0] / NINETIES, rel=0.05)
    assert noisy == pytest.approx(steady, rel=0.05)


def test_what_a_limiter_takes_is_read_from_the_end_of_a_run():
    times = np.arange(0.05, 4.5, 0.05)
    seconds = np.where(times < 0.7, 1.0, np.where(times < 2, 1.5, 1.03))  # its first reaction is too strong
    point = {
        "op": "sustained",
        "kernel": "fa2",
        "pass": "fwd",
        "times_s": times.tolist(),
        "samples_s": seconds.tolist(),
    }
    short = {**point, "times_s": times[:20].tolist(), "samples_s": seconds[:20].tolist()}
    found, _ = fit_sustained([point, short])
    assert found == pytest.approx({"fa2 fwd": np.log(1.03), "others": np.log(1.03)})
    assert fit_sustained([short])[0] == {}


# --- host files ---


def test_launches_of_a_host_file_scale_those_of_a_profile(tmp_path):
    profile = load_profile("h100")
    for factor in (0.7, 1.6):
        launches = {name: factor * seconds for name, seconds in profile.host.launch_s.items()}
        save_host(path := tmp_path / "host.json", "NVIDIA H100", [6e-7, 7e-7], launches)
        scaled = on_host(profile, str(path))
        assert scaled.host.launch_s["copy"] == pytest.approx(factor * profile.host.launch_s["copy"], rel=1e-6)
        assert scaled.sigma["host"] < profile.sigma["host"]
        assert load_host(str(path)).processes == 2


def test_without_launches_the_python_loop_tells_which_host_is_slower(tmp_path):
    profile, copies = load_profile("h100"), []
    for name, seconds in (("quick", 5e-7), ("slow", 1e-6)):
        save_host(path := tmp_path / f"{name}.json", "", [seconds], {})
        copies.append(on_host(profile, str(path)).host.launch_s["copy"])
    assert 1.2 < copies[1] / copies[0] < 2


def test_host_files_are_looked_up_beside_scenarios_and_clusters_and_travel_with_them(tmp_path):
    launches = {name: 2 * seconds for name, seconds in load_profile("h100").host.launch_s.items()}
    save_host(tmp_path / "slow.json", "NVIDIA H100", [7e-7], launches)
    (tmp_path / "mine.json").write_text(
        json.dumps({"name": "mine", "gpus_per_node": 2, "gpu": "h100", "profile": "h100", "host": "slow.json"})
    )
    fields = EAGER | SHORT
    (tmp_path / "of-scenario.json").write_text(json.dumps(fields | {"host": "slow.json"}))
    (tmp_path / "of-cluster.json").write_text(json.dumps(fields | {"cluster": "mine.json"}))
    expected = predict(fields | {"host": 2.0}).time_s
    for name in ("of-scenario.json", "of-cluster.json"):
        scenario = load_scenario(tmp_path / name)
        assert predict(scenario).time_s == pytest.approx(expected, rel=1e-5)
        folder = tmp_path / f"packed {name}"
        folder.mkdir()
        for file, text in standalone(scenario).items():
            (folder / file).write_text(text)
        assert predict(load_scenario(folder / "scenario.yaml")).time_s == predict(scenario).time_s


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", "cpsim calibrate --host"),
        ('{"format": "cpsim-host", "schema": 9}', "this version reads 1"),
        ('{"format": "cpsim-host", "schema": 1}', "gpu"),
        ('{"format": "cpsim-host", "schema": 1, "gpu": "", "cpu": "", "date": "", "processes": 1,', "cut off"),
    ],
)
def test_a_bad_host_file_is_one_line(tmp_path, text, expected):
    (tmp_path / "host.json").write_text(text)
    (tmp_path / "case.json").write_text(json.dumps(EAGER | SHORT | {"host": "host.json"}))
    assert expected in one_line(cpsim("predict", tmp_path / "case.json", status=2))


@pytest.mark.parametrize("value", [0, 11, -1, True, "", [1], {"a": 1}])
def test_a_bad_factor_is_one_line(tmp_path, value):
    (tmp_path / "case.json").write_text(json.dumps(EAGER | SHORT | {"host": value}))
    assert "host: expected" in one_line(cpsim("predict", tmp_path / "case.json", status=2))


def test_the_host_of_this_machine_is_timed_without_a_gpu(tmp_path):
    written = cpsim("calibrate", "--host", "--cpu", 1, "--name", "here", "--out", tmp_path, "--json")
    told = json.loads(written)
    assert Path(told["out"]).name == "here-host.json"
    found = load_host(told["out"])
    assert found.launch_s == {}
    assert 1e-8 < found.python_s < 1e-4
    assert told["factor"]["h100"] == pytest.approx(
        on_host(load_profile("h100"), told["out"]).host.launch_s["copy"] / load_profile("h100").host.launch_s["copy"]
    )
    refused = one_line(cpsim("calibrate", "--host", "--minutes", 3, "--out", tmp_path, status=2))
    assert "leave --minutes out" in refused


def test_the_loop_takes_longer_for_more_work(monkeypatch):
    once = min(pace.python_seconds(3))
    monkeypatch.setattr(
        pace, "_call", lambda *args, call=pace._call, **kwargs: [call(*args, **kwargs) for _ in range(4)]
    )
    assert min(pace.python_seconds(3)) > 1.5 * once


# --- spread ---


def test_the_spread_of_hosts_is_told_apart_from_that_of_their_threads():
    rng, between, within = np.random.default_rng(3), 0.3, 0.1
    files = []
    for i in range(60):
        machine, points = rng.normal(0, between), []
        for place in fit_host.PHASES:
            thread = rng.normal(0, within)
            points += [
                {
                    "op": "host",
                    "kind": kind,
                    "which": "",
                    "place": place,
                    "samples_s": [usual * np.exp(machine + thread)],
                }
                for kind, usual in (("view", 1e-5), ("empty", 2e-5))
            ]
        files.append(Measurements(source=f"{i}.jsonl", header={}, points=tuple(points)))
    found = fit_host.host_spread(files)
    assert found[0] == pytest.approx(between, rel=0.25)
    assert found[1] == pytest.approx(within, rel=0.15)
    assert fit_host.host_spread(files[:2]) == fit_host.ASSUMED_SPREAD
