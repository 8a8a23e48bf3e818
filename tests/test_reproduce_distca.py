"""DistCA's 34B runs: published iterations, the three systems, and how far off predictions are."""

import json
from dataclasses import asdict, replace
from statistics import mean

import numpy as np
import pytest
from targets import check
from typer.testing import CliRunner

from cpsim.case.cluster import load_cluster
from cpsim.case.model import MODELS
from cpsim.errors import ScenarioError
from cpsim.prediction.step.frameworks import Sizes, megatron_layer
from cpsim.prediction.step.hosts import layer_seconds
from cpsim.prediction.step.placed import COPIES
from cpsim.strategies.distca.packing import head_tail, per_sequence
from cpsim.strategies.distca.tasks import TokenBytes, dispatch, make_tasks
from studies.__main__ import app
from studies.distca import pipelines_page
from studies.distca import reproduce as distca
from studies.distca import scale as distca_scale
from studies.distca.reproduce import (
    BARS,
    ITERATIONS,
    RATIO,
    Choice,
    _op_by_op,
    ablations,
    baseline_seconds,
    copied_bytes,
    cut_model,
    distca_seconds,
    gathered_attention,
    mean_errors,
    pooled,
    pooled_seconds,
    published,
    read_lengths,
    reproduce,
    step_model,
    token_bytes,
)

LONGEST = 512 * 1024


def rows_of(context, sequences, *systems):
    return [row for row in published() if row.setting == (context, sequences) and row.system in systems]


def test_every_published_run_is_there_once_with_all_iterations():
    rows = published()
    assert len({(*row.setting, row.system, row.cp) for row in rows}) == len(rows) == 25
    assert {len(row.published_s) for row in rows} == {ITERATIONS}
    means = [round(mean(row.published_s) * 1e3) for row in rows if row.system == "distca"]
    assert means == [8014, 10949, 20062, 24958]


def test_distca_and_the_best_wlb_are_within_the_bars_at_256k():
    errors = mean_errors(reproduce(rows_of(256 * 1024, 8, "distca", "wlb"), jobs=1))
    assert set(errors) == set(BARS)
    assert all(errors[name] < BARS[name] for name in BARS), errors


def test_replicas_of_one_document_are_cut_alike_by_both_baselines():
    rows = {row.system: row for row in rows_of(LONGEST, 4, "wlb", "per_sequence") if row.cp == 8}
    wlb, other = (place(np.array([LONGEST]), 8) for place in (head_tail, per_sequence))
    for name in ("home", "server", "document", "first", "tokens"):
        np.testing.assert_array_equal(getattr(wlb, name), getattr(other, name))
    one, two = (gathered_attention(step_model(rows[name]), wlb, name) for name in ("wlb", "per_sequence"))
    for a, b in zip(one.parts, two.parts, strict=True):
        assert {**a, COPIES: 0} == {**b, COPIES: 0}


def test_attention_that_runs_again_gathers_and_attends_twice_and_keeps_nothing():
    (row,) = (row for row in rows_of(LONGEST, 4, "wlb") if row.cp == 8)
    step, tasks = step_model(row), head_tail(np.array([LONGEST]), 8)
    once, twice = (gathered_attention(step, tasks, "wlb", again=again) for again in (False, True))
    assert twice.parts[0] == once.parts[0]
    assert sum(twice.parts[1].values()) == pytest.approx(once.seconds)
    assert twice.sent == pytest.approx(1.5 * once.sent)
    assert (once.kept > 0, twice.kept) == (True, 0)


def test_servers_that_attend_again_take_longer_by_their_forward_pass():
    (row,) = rows_of(LONGEST, 4, "distca")
    documents = [np.array([LONGEST]), np.array([LONGEST])]
    once, twice = (distca_seconds(step_model(row), documents, Choice(again=again)) for again in (False, True))
    assert 1.1 < twice / once < 1.3


def test_wlb_adds_up_gradients_of_keys_one_document_at_a_time():
    """Copies of many documents are those of one, but for the kernels of the sums."""
    (row,) = (row for row in rows_of(LONGEST, 4, "wlb") if row.cp == 8)
    step, count = step_model(row), 256
    tasks = head_tail(np.full(count, LONGEST // count), 8)
    each = {
        system: [parts[COPIES] for parts in gathered_attention(step, tasks, system).parts]
        for system in ("wlb", "per_sequence")
    }
    keys, queries = token_bytes(step).kv * LONGEST, token_bytes(step).q * LONGEST // 8
    seen = keys * 17 // 16  # both chunks of a rank: r + 1 and 16 - r sixteenths of every document

    def seconds(nbytes):
        return float(step.costs.swept("copy", nbytes))

    sums = 2 * 2 * count * seconds(0)  # both chunks, keys and values
    assert each["wlb"] == pytest.approx(
        [seconds(3 * keys + 2 * seen + 2 * queries), seconds(keys + 4 * (seen + queries)) + sums]
    )
    assert each["per_sequence"] == pytest.approx(
        [seconds(2 * keys + 2 * queries), seconds(3 * keys + 4 * (seen + queries))]
    )


def test_copies_around_exchanges_by_hand():
    """Two servers, a document of 4 tokens on the first, whose second half the second one computes."""
    tasks = make_tasks(*(np.array(row) for row in ([0, 0], [0, 1], [0, 0], [0, 2], [2, 2])))
    sizes = TokenBytes(q=64, kv=32, lse=16)
    home, served = copied_bytes(dispatch(tasks, 2, sizes))
    qkv, out = [2 * 64 + 2 * 32, 2 * 64 + 4 * 32], [2 * 80, 2 * 80]
    bundle = [2 * (3 * 64 + 16) + 2 * 32, 2 * (3 * 64 + 16) + 4 * 32]
    forward = [2 * sum(qkv) + 2 * sum(out), 0]
    assert home[0].tolist() == forward
    assert home[1].tolist() == [2 * sum(bundle) + 6 * sum(out) + 2 * sum(qkv), 0]
    assert served[0].tolist() == [2 * a + 4 * b for a, b in zip(qkv, out, strict=True)]
    assert served[1].tolist() == [2 * a + 6 * b + 2 * c for a, b, c in zip(bundle, out, qkv, strict=True)]


def test_no_pass_of_servers_ends_before_its_host():
    """Nano-batches of few tokens take a host as long as those of many."""
    (row,) = rows_of(256 * 1024, 8, "distca")
    step = step_model(row)
    forward, backward = layer_seconds(step.costs.profile.host, "megatron eager", step.parallel)
    tiny = [np.full(32, 64), np.full(32, 64)]
    assert distca_seconds(step, tiny, Choice()) > step.model.layers * 2 * (forward + backward)


def test_servers_balance_what_one_long_document_unbalances():
    """WLB has to give it to one of four groups, DistCA to all servers."""
    runs = {row.cp: step_model(row) for row in rows_of(LONGEST, 4, "distca", "wlb")}
    short = np.full(LONGEST // 1024, 1024)
    documents = [np.concatenate([[LONGEST], short]), np.concatenate([short, short])]
    assert baseline_seconds(runs[8], "wlb", documents) > 1.5 * distca_seconds(runs[1], documents, Choice())


def test_exchanges_cost_least_beside_computation_and_a_loose_tolerance_costs_balance():
    (row,) = rows_of(LONGEST, 4, "distca")
    (measured,) = reproduce([row], iterations=2, jobs=1)
    found = {name: shares[0] for name, shares in ablations([measured], iterations=2, jobs=1).items()}
    assert found["exchanges free"] <= 1 < found["single stream"]
    assert 1 < found["tolerance 0.2"] < found["tolerance 0.5"]


@pytest.mark.parametrize("text", ["{}", "[]", "[1, 0]", "[1.5]", "[true]"])
def test_what_is_no_list_of_lengths_is_refused(tmp_path, text):
    path = tmp_path / "lengths.json"
    path.write_text(text)
    with pytest.raises(ScenarioError, match="expected a list of document lengths"):
        read_lengths(path)


def test_a_list_that_is_too_short_is_refused():
    rows = rows_of(LONGEST, 4, "distca")
    with pytest.raises(ScenarioError, match="a list of 1 documents is too short"):
        reproduce(rows, np.array([5000]), jobs=1)
    with pytest.raises(ScenarioError, match="iteration 0 needs sequences 0 to 3"):
        reproduce(rows, np.array([5000, 5000]), jobs=1)


def test_the_command_runs_the_given_list_iteration_by_iteration(tmp_path, monkeypatch):
    lengths, out = tmp_path / "lengths.json", tmp_path / "out.json"
    lengths.write_text(json.dumps([LONGEST] * 100))
    monkeypatch.setattr(distca, "published", lambda: rows_of(LONGEST, 4, "distca", "wlb"))
    monkeypatch.setattr(distca, "ABLATIONS", {"single stream": Choice(streams=1)})
    shown = CliRunner().invoke(app, ["distca", "--lengths", str(lengths), "--out", str(out), "--jobs", "1"])
    assert shown.exit_code == 0, shown.output
    assert "by iteration" in shown.stdout
    record = json.loads(out.read_text())
    assert [len(row["predicted_iterations_s"]) for row in record["rows"]] == [ITERATIONS] * 3
    assert {len(set(row["predicted_iterations_s"])) for row in record["rows"]} == {1}
    assert set(record["mean_errors"]) == {"distca", "wlb", RATIO}


def test_every_interim_run_has_plans_that_divide_its_gpus_and_sequences():
    for run in distca_scale.published():
        setting = run.setting
        for plan in distca_scale.tried()[setting.model, setting.gpus, setting.context, setting.sequences, run.system]:
            assert setting.gpus % (distca.TP * plan.stages * plan.cp) == 0
            assert setting.sequences // 2 % plan.microbatches == 0
            assert plan.microbatches >= plan.stages or run.system == "wlb"


def test_distca_s_interim_runs_took_as_long_on_both_data_sets_and_wlb_s_did_not():
    """Why its runs of ProLong are taken to have Pretrain's documents."""
    times = {}
    for run in distca_scale.published():
        times.setdefault((run.system, replace(run.setting, data="pretrain")), {})[run.setting.data] = run.published_s
    more = {system: [] for system in distca_scale.SYSTEMS}
    for (system, _), found in times.items():
        if len(found) == 2:
            more[system].append(found["prolong"] / found["pretrain"] - 1)
    assert len(more["wlb"]) == len(more["distca"]) == 10
    assert max(map(abs, more["distca"])) < 0.05 < min(more["wlb"])


def test_interim_runs_have_a_prediction_for_every_plan_that_was_tried():
    chosen = [
        run
        for run in distca_scale.published()
        if run.setting.model == "34b" and run.setting.gpus == 128 and run.setting.data == "pretrain"
    ]
    runs = {run.system: run for run in distca_scale.reproduce(chosen, jobs=1)}
    assert {system: len(run.outcomes) for system, run in runs.items()} == {"wlb": 3, "distca": 2}
    for run in runs.values():
        assert run.predicted_s == min(outcome.time_s for outcome in run.outcomes)
    assert abs(runs["wlb"].error) < distca_scale.BAR
    assert runs["wlb"].predicted_s > runs["distca"].predicted_s
    fastest = runs["wlb"].outcomes[0]
    assert 0 < fastest.hops_s < 0.01 * fastest.time_s < fastest.gathers_s < fastest.idle_s < fastest.time_s
    found = distca_scale.worth(list(runs.values()))
    (base,), (even,) = (found["wlb"][name] for name in ("as predicted", "nobody waits: no bubbles, all even"))
    assert even < base == runs["wlb"].error
    assert set(distca_scale.OTHERWISE["distca"]) < set(found["distca"])
    names = "nothing is computed again", "keys are sent to a server once", "as predicted"
    (none,), (once,), (each,) = (found["distca"][name] for name in names)
    assert none < once < each
    check("DistCA's pipelined run on 128 GPUs", runs["distca"].error)


def test_prolong_and_pretrain_are_one_question_to_distca_s_interim_runs():
    chosen = [run for run in distca_scale.published() if run.system == "distca" and run.setting.gpus == 64]
    first = [run for run in chosen if run.setting.context == 2 * LONGEST // 8]
    found = {run.setting.data: run.predicted_s for run in distca_scale.reproduce(first, jobs=1)}
    assert found["prolong"] == found["pretrain"]


def test_the_page_of_pipelines_says_what_its_record_does():
    assert pipelines_page.PAGE.read_text(encoding="utf-8") == pipelines_page.made()
    found = pipelined_errors()
    assert [len(found[name]) for name in (*distca_scale.SYSTEMS, "known", "layers")] == [22, 22, 3, 4]
    check("WLB's pipelined runs, mean", mean(map(abs, found["wlb"])))
    check("pipelined runs of known plans, mean", mean(map(abs, found["known"] + found["layers"])))


@pytest.mark.parametrize(
    ("name", "systems", "size"),
    [
        ("DistCA's pipelined runs, mean", ["distca"], abs),
        ("runs with pipelines of DistCA's study, mean", ["wlb", "distca", "known"], abs),
        ("runs with pipelines of DistCA's study, signed", ["wlb", "distca", "known"], float),
    ],
)
def test_runs_with_pipelines_are_as_far_off_as_their_targets_say(name, systems, size):
    found = pipelined_errors()
    check(name, mean(size(error) for system in systems for error in found[system]))


def pipelined_errors():
    """Of the committed predictions, by system and of known plans."""
    record = json.loads(pipelines_page.RECORD.read_text(encoding="utf-8"))
    found = {name: [] for name in (*distca_scale.SYSTEMS, "known", "layers")}
    for run in record["interim"]:
        found[run["system"]].append(run["predicted_s"] / run["published_s"] - 1)
    for run in record["known"]:
        error = mean(run["predicted_s"]) / mean(run["published_s"]) - 1
        found["layers" if run["setting"]["layers"] else "known"].append(error)
    return found


def test_what_fitted_into_memory_tells_that_the_mlp_is_computed_again():
    """Runs that fitted need less than those that did not; with nothing computed again most would need more than a GPU
    has."""
    record = json.loads(pipelines_page.RECORD.read_text(encoding="utf-8"))["fits"]
    assert len(record) == len(distca_scale.fits()) == 24
    needed = {fitted: [run["memory_bytes"] for run in record if run["fitted"] == fitted] for fitted in (True, False)}
    gpu = load_cluster("dgx-h200").gpu.memory_bytes
    assert max(needed[True]) < min(needed[False])
    assert max(needed[True]) < 0.8 * gpu
    assert sum(run["kept_bytes"] > gpu for run in record if run["fitted"]) == 8
    smallest = [run for run in distca_scale.fits() if run.setting.sequences == 8]
    for run in distca_scale.reproduce_fits(smallest, jobs=1):  # stand-ins for documents
        stored = next(
            one for one in record if one["setting"] == asdict(run.setting) and one["plan"] == asdict(run.plan)
        )
        assert run.memory_bytes == pytest.approx(stored["memory_bytes"], rel=0.07)


def test_runs_of_later_days_take_what_is_predicted_and_loading_and_planning():
    """Also those with large nano-batches: what is left of the time from start to start grows with ticks alone."""
    record = json.loads(pipelines_page.RECORD.read_text(encoding="utf-8"))["walls"]
    assert len(record) == len(distca_scale.walls()) == 8
    assert sum(pipelines_page._nano_batch(run) == pipelines_page.LARGE for run in record) == 6
    ticks = np.array([2 * 5 * (run["plan"]["microbatches"] + run["plan"]["stages"] - 1) for run in record])
    wall, predicted = (np.array([run[name] for run in record]) for name in ("wall_s", "predicted_s"))
    rest = wall - predicted
    assert np.abs(rest - np.polyval(np.polyfit(ticks, rest, 1), ticks)).max() < 0.05 * wall.max()
    shortest = min(distca_scale.walls(), key=lambda run: run.wall_s)
    (found,) = distca_scale.reproduce_walls([shortest], jobs=1)  # stand-ins for documents
    stored = next(run for run in record if run["wall_s"] == shortest.wall_s)
    assert found.predicted_s == pytest.approx(stored["predicted_s"], rel=0.2)


def test_runs_that_are_not_understood_are_those_that_memory_holds_only_if_the_mlp_is_computed_again():
    record = json.loads(pipelines_page.RECORD.read_text(encoding="utf-8"))["interim"]
    runs = [run for run in record if run["system"] == "distca"]
    needed = {
        far: [run["kept_bytes"] for run in runs if (abs(pipelines_page._error(run)) > pipelines_page.FAR) == far]
        for far in (True, False)
    }
    assert (len(needed[True]), len(needed[False])) == (4, 18)
    assert 0 < max(needed[False]) < 0.8 * min(needed[True])


def test_exchanges_at_less_bandwidth_take_longer():
    (row,) = rows_of(LONGEST, 4, "distca")
    documents = [np.array([LONGEST]), np.array([LONGEST])]
    choices = Choice(streams=1), Choice(streams=1, bandwidth=0.5)
    full, half = (distca_seconds(step_model(row), documents, choice) for choice in choices)
    assert half > full


def test_keys_for_each_task_take_longer_and_fill_buffers():
    long = np.array([16 * 8192])
    step = cut_model("llama3-8b", 64, 16 * 8192, 8)
    once, each = (pooled(step, [(long, long)], Choice(each=each)) for each in (False, True))
    assert each.time_s > once.time_s
    assert each.buffer_bytes > once.buffer_bytes
    assert each.served_bytes == once.served_bytes


def test_unfused_kernels_take_longer_by_what_they_move():
    plain = Sizes(MODELS["llama3-8b"], 8, 8192, 1)
    fused, unfused = megatron_layer(plain, False), _op_by_op(plain, False)
    for of, name, each in (("forward", "swiglu", 10), ("backward", "dgate up", 26)):
        (before,), (after,) = ([n for n in getattr(code, of) if name in n.makes] for code in (fused, unfused))
        assert after.what.nbytes == each * 8192 * 14336 // 8 > before.what.nbytes
    assert unfused.kept - fused.kept == {"silu"}


@pytest.mark.slow
def test_runs_of_known_plans_are_predicted_by_iteration():
    """With stand-ins for the documents; iterations of short ones alone are nearly free of attention."""
    run = next(run for run in distca_scale.known() if run.setting.context == 128 * 1024)
    (found,) = distca_scale.reproduce_known([run], jobs=1)
    assert len(found.predicted_s) == len(run.published_s) == 5
    assert abs(found.error) < distca_scale.BAR
    check("DistCA's known plan, iteration of short documents", abs(found.predicted_s[4] / run.published_s[4] - 1))


def test_pipelines_of_servers_pool_the_attention_of_a_tick():
    """One document of half of the tokens: a stage alone would have it, all servers share it."""
    long, short = np.array([16 * 8192]), np.full(16, 8192)
    step = cut_model("llama3-8b", 64, 16 * 8192, 8, pp=2, microbatches=2)
    ticks = [
        pooled_seconds(step, microbatches, Choice())
        for microbatches in (
            [(long, short), (short, short)],
            [(short, short), (short, short)],
            [(long, long), (long, long)],
        )
    ]
    assert ticks[1] < ticks[0] < ticks[2]
    alone = cut_model("llama3-8b", 64, 16 * 8192, 8)
    assert pooled_seconds(alone, [(long, short)], Choice()) == distca_seconds(alone, (long, short), Choice())


def test_speed_ups_of_the_paper_s_settings_are_those_of_its_tables():
    found = distca_scale.settings()
    assert len(found) == len(set(found)) == 72
    assert {s.gpus for s in found} == {64, 128, 256, 512}
    smallest = [s for s in found if s.stages == 1 and s.gpus == 64 and s.context == 131072 and s.model == "8b"]
    for one in distca_scale.speed_ups(smallest, iterations=[0], jobs=1):
        assert 1.0 < one.predicted < 1.25


def test_the_command_draws_what_it_predicts(tmp_path, monkeypatch):
    page = tmp_path / "page.html"
    monkeypatch.setattr(distca, "published", lambda: rows_of(LONGEST, 4, "distca")[:1])
    monkeypatch.setattr(distca, "ABLATIONS", {"single stream": Choice(streams=1)})
    monkeypatch.setattr(distca_scale, "published", lambda: ())
    monkeypatch.setattr(distca_scale, "known", lambda: ())
    some = distca_scale.settings()[:1]
    monkeypatch.setattr(distca_scale, "settings", lambda: some)
    for options, words in (([], "single stream"), (["--scale"], "interim"), (["--speed-ups"], "speed-up")):
        lengths = tmp_path / "lengths.json"
        lengths.write_text(json.dumps([LONGEST] * 200))
        given = options or ["--lengths", str(lengths)]
        shown = CliRunner().invoke(app, ["distca", "--html", str(page), "--jobs", "1", *given])
        assert shown.exit_code == 0, shown.output
        assert words in page.read_text()
