"""The command line as a user meets it: output, exit codes, one-line errors."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from cpsim.calibrate import recipes
from cpsim.cli.app import main
from cpsim.masks.names import MASK_NAMES
from cpsim.models.profile import load_profile
from cpsim.prediction.support import KERNELS
from cpsim.strategies import STRATEGIES

EXAMPLES = Path(__file__).parent.parent / "examples"
GOOD = {"strategy": "ring", "gpus": 4, "cluster": "h200-4", "tokens": 4096, "heads": 8, "kv_heads": 2}
COMMANDS = [
    "predict",
    "sweep",
    "advise",
    "run",
    "validate",
    "calibrate",
    "import",
    "fit",
    "fit-fabric",
    "profiles",
    "clusters",
    "kernels",
    "strategies",
    "mask",
]


def cpsim(*arguments, status=0):
    """Run a command in this process and return its stdout, or its stderr where it is to fail."""
    return called(main, "cpsim", *arguments, status=status)


def called(entry, name, *arguments, status=0):
    """What an entry point prints on stdout, or on stderr where it is to fail."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", [name, *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        entry()
    assert ended.value.code == status, err.getvalue()
    return out.getvalue() if status == 0 else err.getvalue()


def process(*arguments, status=0):
    """The same in a process of its own."""
    command = [sys.executable, "-m", "cpsim", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if status == 0 else done.stderr


def one_line(error):
    assert error.count("\n") == 1, error
    assert error.startswith("cpsim: ")
    return error


@pytest.fixture
def cases(tmp_path):
    def write(*lines):
        path = tmp_path / "cases.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return path

    return write


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command):
    text = cpsim(command, "--help")
    assert "--json" in text
    assert f"`cpsim {command}" in (Path(__file__).parent.parent / "README.md").read_text()


def test_commands_are_the_documented_ones():
    text = cpsim("--help")
    assert all(f" {command} " in text for command in COMMANDS)
    assert cpsim() == text


def test_lists_are_shown_and_are_json():
    assert "dgx-h200" in cpsim("clusters")
    assert json.loads(cpsim("clusters", "--json"))[0]["name"] == "h200-4"
    assert "zigzag_ring" in cpsim("strategies")
    assert {"none", "ulysses", "ring"} <= {entry["strategy"] for entry in json.loads(cpsim("strategies", "--json"))}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["preidct", "x"], "Did you mean 'predict'?"),
        (["predict"], "Missing argument 'FILE'"),
        (["predict", "missing.yaml"], "missing.yaml: cannot be read"),
        (["advise", "--jsno", "x"], "No such option"),
        (["advise", "missing.yaml"], "missing.yaml: cannot be read"),
        (["advise", EXAMPLES / "sweep.jsonl"], "expected one scenario, got 10"),
        (["predict", EXAMPLES / "sweep.jsonl", "--out", "/no/such/folder/x.jsonl"], "cannot be written"),
        (["advise", EXAMPLES / "llama3-8b-96gpu.yaml", "--html", "/"], "/: cannot be written"),
        (["sweep", EXAMPLES / "sweep.jsonl"], "Missing option '--out'"),
        (["mask", "lamda"], "mask: 'lamda' is unknown; did you mean 'lambda'?"),
        (["mask", "lambda", "--option", "windw=3"], "lambda has no option 'windw'; did you mean 'window'?"),
        (["mask", "lambda", "--option", "window"], "option: expected K=V, e.g. window=1024, got 'window'"),
        (["mask", "lambda", "--documents", "prolong"], "documents: distribution: expected pile, prolong64k"),
        (["mask", "lambda", "--png", "/no/such/folder/x.png"], "cannot be written"),
        (["mask", "variable_block_sparse", "--option", "block=4"], "expected at least min_block = 128, got 4"),
        (["fit", "missing.json", "--out", "/tmp/profile.json"], "missing.json"),
        (["mask", "--html", "x.html"], "mask: all masks are listed where none is named; leave --html out"),
        (["mask", "--option", "window=3"], "leave --option out"),
        (["mask", "--tokens", "16384"], "leave --tokens out"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(arguments, match):
    assert match in one_line(cpsim(*arguments, status=2))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["fit", "points.jsonl", "--out", "mine.json", "--gpu", "l40s"], "without --base .*; leave --gpu out"),
        *(
            (["fit", "--all", "--out", "profiles", option, value], f"fit: --all .*; leave {option} out")
            for option, value in (("--cluster", "x.yaml"), ("--base", "h200"), ("--gpu", "l40s"))
        ),
        (["advise", EXAMPLES / "h200-4-zigzag.yaml", "--runs", "runs"], "only the page of --html .*; leave --runs out"),
        (
            ["advise", EXAMPLES / "llama3-8b-step-64gpu.yaml", "--step", "--runs", "runs"],
            "show no runs; leave --runs out",
        ),
        (["run", EXAMPLES / "h200-4-zigzag.yaml", "--out", "x", "--cpu", 2, "--gpus", 2], "run: .*; leave --gpus out"),
        (["run", EXAMPLES / "h200-4-zigzag.yaml", "--trace", "x", "--resume"], "times nothing; leave --resume out"),
        (["run", EXAMPLES / "h200-4-zigzag.yaml", "--trace", "x", "--json"], "times nothing; leave --json out"),
        (["run", EXAMPLES / "h200-4-zigzag.yaml", "--trace", "x", "--minutes", 0], "nothing; leave --minutes out"),
        (["calibrate", "--cpu", 2, "--gpus", 2], "calibrate: --cpu uses no GPUs; leave --gpus out"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(arguments, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert re.search(match, one_line(cpsim(*arguments, status=2)))
    assert not list(tmp_path.iterdir())


def test_a_process_says_and_returns_what_a_call_does(cases):
    path = cases(GOOD)
    assert process("predict", path, "--json") == cpsim("predict", path, "--json")
    assert process("predict", "missing.yaml", status=2) == one_line(cpsim("predict", "missing.yaml", status=2))


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_command_s_matrix_products_start_no_threads_that_would_take_cores_from_its_other_processes():
    code = (
        "import os, sys; from cpsim.cli.app import main; sys.argv = ['cpsim', 'strategies', '--json']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "import numpy as np; a = np.ones((600, 600)); a @ a; print(len(os.listdir('/proc/self/task')))"
    )
    asked = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    for extra, threads in (({}, 1), ({"OMP_NUM_THREADS": "2"}, min(2, os.cpu_count()))):
        said = subprocess.check_output([sys.executable, "-c", code], text=True, env=asked | extra)
        assert int(said.splitlines()[-1]) == threads


def test_predictions_come_in_order_and_bad_lines_stop_nothing(cases, tmp_path):
    path = cases(GOOD, GOOD | {"gpu": 3}, "{", GOOD | {"implementation": "distca"}, GOOD | {"pass": "fwd"})
    out = tmp_path / "predictions.jsonl"
    printed = cpsim("predict", path, "--json", "--out", out)
    assert out.read_text() == printed
    first, unknown, broken, unbuilt, last = map(json.loads, printed.splitlines())
    assert first["time_s_low"] <= first["time_s"] <= first["time_s_high"]
    assert "line 2: gpu: unknown field; did you mean 'gpus'" in unknown["error"]
    assert "line 3: not valid JSON" in broken["error"]
    assert "implementation: expected cpsim, ring-flash-attn" in unbuilt["error"]
    assert last["time_s"] < first["time_s"]
    assert last["scenario"]["pass"] == "fwd"


def test_prediction_of_one_case_is_shown_in_words():
    text = cpsim("predict", EXAMPLES / "h200-4-zigzag.yaml")
    assert "zigzag_ring, fwd_bwd" in text
    assert "TFLOP/s per GPU" in text


def test_a_file_without_any_prediction_exits_with_2(cases):
    assert "gpus: missing" in one_line(cpsim("predict", cases("{}"), "--json", status=2))
    assert "got an empty file" in one_line(cpsim("predict", cases(), status=2))


def test_a_scenario_without_strategy_is_for_advise(cases):
    fields = {key: value for key, value in GOOD.items() if key != "strategy"}
    assert "strategy" in one_line(cpsim("predict", cases(fields), status=2))


def test_sweep_writes_every_line_and_counts(tmp_path):
    out = tmp_path / "out.jsonl"
    summary = json.loads(cpsim("sweep", EXAMPLES / "sweep.jsonl", "--out", out, "--json"))
    assert summary["num_scenarios"] == len(out.read_text().splitlines()) == 10
    assert summary["num_predicted"] == 10
    assert "10 of 10 scenarios predicted in" in cpsim("sweep", EXAMPLES / "sweep.jsonl", "--out", out)


def test_advice_ranks_fastest_first_and_writes_the_report(tmp_path):
    case, report = tmp_path / "case.json", tmp_path / "report.html"
    case.write_text(json.dumps({key: value for key, value in GOOD.items() if key != "strategy"}))
    advice = json.loads(cpsim("advise", case, "--json", "--html", report))
    times = [row["time_s"] for row in advice["candidates"]]
    assert times == sorted(times)
    assert sum(row["probability_best"] for row in advice["candidates"]) == pytest.approx(1)
    assert "none" in [row["strategy"] for row in advice["infeasible"]]
    assert advice["recommendation"].startswith("Run ")
    assert 1e6 < report.stat().st_size < 3e6


def test_main_job_names_what_rests_on_published_figures():
    text = cpsim("advise", EXAMPLES / "llama3-8b-96gpu.yaml")
    assert max(map(len, text.splitlines())) <= 100
    assert "P(best)" in text
    assert "published" in text


def test_fit_remakes_a_profile_from_its_measurements(tmp_path):
    out = tmp_path / "mine.json"
    names = "h100-masked-blocks-math.jsonl", "h200x4-executor.jsonl", "h200x4-network.jsonl"
    text = cpsim("fit", *map(recipes.points_file, names), "--out", out)
    assert "mine: NVIDIA H100" in text
    assert "attention fwd sdpa_math" in text
    assert json.loads(out.read_text())["name"] == "mine"


def test_fit_all_makes_the_profiles_of_the_manifest_in_its_order(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(recipes, "make_profile", lambda name, folder: made.append((name, folder)) or load_profile(name))
    assert "h200" in cpsim("fit", "--all", "--out", tmp_path / "profiles")
    assert made == [(name, tmp_path / "profiles") for name in recipes.manifest()["profiles"]]


def test_profiles_are_shown_and_are_json():
    assert "h200" in cpsim("profiles")
    assert "h200" in [entry["name"] for entry in json.loads(cpsim("profiles", "--json"))]


def test_masks_are_listed_and_shown():
    listed = cpsim("mask")
    assert all(name in listed for name in MASK_NAMES)
    assert [entry["mask"] for entry in json.loads(cpsim("mask", "--json"))] == list(MASK_NAMES)
    shown = cpsim("mask", "lambda", "--tokens", 4096, "--option", "window=512")
    assert "lambda (window 512)" in shown
    assert "area 2,193,696 pairs" in shown
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize("mask", ["causal_document", "shared_question_document", "block_sparse"])
def test_who_can_run_a_mask_is_readable_in_80_columns(mask, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = cpsim("mask", mask)
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    assert not [name for name in (*STRATEGIES, *KERNELS) if not re.search(rf"(?<![\w-]){name}(?![a-z_-])", shown)]


@pytest.mark.parametrize(
    ("name", "values"), [("gpus", [4, 8]), ("mask", ["full", "causal"]), ("documents", [[4096], [2048, 2048]])]
)
def test_a_list_of_values_that_is_not_under_grid_says_so(name, values, cases):
    error = one_line(cpsim("predict", cases({**GOOD, name: values}), status=2))
    assert f"{name}: expected one value, got the list {values}; `cpsim sweep` tries lists that stand under" in error


@pytest.mark.parametrize("command", ["predict", "advise"])
def test_a_grid_is_for_sweeps(command):
    error = one_line(cpsim(command, EXAMPLES / "sweeps" / "96gpu.yaml", status=2))
    assert "grid: expected one scenario, got a grid of them; ask `cpsim sweep`" in error


def test_how_many_scenarios_have_no_prediction_is_said_last(cases):
    command = [sys.executable, "-m", "cpsim", "predict", cases(GOOD, GOOD | {"gpus": 3}, GOOD | {"tokens": -1})]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert said.count("\n") == 3
    assert said.splitlines()[-1] == "cpsim: 2 of 3 scenarios have no prediction"


def test_a_mask_is_drawn_to_files(tmp_path):
    png, html = tmp_path / "mask.png", tmp_path / "mask.html"
    asked = ["mask", "shared_question_document", "--documents", "1024,1024,2048", "--tokens", 4096]
    record = json.loads(cpsim(*asked, "--json", "--png", png, "--html", html))
    assert (record["documents"], record["slices"]) == (3, 3)
    assert record["area"] == 2048 * 2049 // 2 * 2 + 2048 * 1024
    assert png.read_bytes().startswith(b"\x89PNG")
    text = html.read_text()
    assert "allgather" in text
    assert "<script>" in text
    assert "<td>no 1</td>" in text
    assert "<li>the kernel " in text
