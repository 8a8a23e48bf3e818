"""The front door: from a model, a framework and a cluster to what can be pasted, in one command."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from rich.console import Console
from scripts import load_script
from test_cli import cpsim, one_line

from cpsim.case.formats import launch_text, read_foreign
from cpsim.case.lengths import bins, read_lengths, sample, waste
from cpsim.case.load import load_scenario, scenario_from
from cpsim.case.resolve import parallel_of
from cpsim.errors import ScenarioError
from cpsim.prediction import step_advice
from cpsim.prediction.question import Options, ask
from cpsim.report.fitted import Column, Fitted, table

FORMATS = Path(__file__).parent / "formats"
LLAMA = ("--model", "llama3-8b", "--gpus", "64", "--cluster", "dgx-h100", "--context", "128k")


def asked(*words: object) -> dict:
    """The record of an answer."""
    return json.loads(cpsim("advise", *words, "--json"))


@pytest.fixture(scope="module")
def advised():
    """Stands for ``advise_step`` where the same is asked again, only to be shown otherwise."""
    options = Options(model="llama3-8b", gpus=64, cluster="dgx-h100", context="128k", framework="megatron")
    scenario = ask(options).scenario
    advice = step_advice.advise_step(scenario)

    def advise_step(again, _progress):
        assert again == scenario
        return advice

    return advise_step


@pytest.fixture(scope="module")
def megatron(advised):
    with mock.patch.object(step_advice, "advise_step", advised):
        return asked(*LLAMA, "--framework", "megatron", "--price", "2.5")


def test_llama_of_128k_under_megatron(megatron, tmp_path):
    assert not megatron["launch"]["wrong"]
    (tmp_path / "flags.txt").write_text(megatron["launch"]["text"])
    read = read_foreign(tmp_path / "flags.txt").fields
    best = megatron["candidates"][megatron["recommended"]]
    assert read["context"] == 131072
    assert read["parallel"]["cp"] == best["scenario"]["parallel"]["cp"]
    assert read["strategy"] == best["scenario"]["strategy"]


def test_money_and_days_follow_from_the_pace(megatron):
    best = megatron["candidates"][megatron["recommended"]]
    cost, rate = megatron["cost"], best["tokens_per_s_per_gpu"]
    assert cost["gpu_hours_per_billion_tokens"] == pytest.approx(1e9 / rate / 3600)
    assert cost["days"] == pytest.approx(1e12 / rate / 64 / 86400)
    assert cost["money"] == pytest.approx(2.5 * 1e12 / rate / 3600)


def test_the_answer_says_how_well_it_was_checked(megatron):
    shipped = json.loads(Path("cpsim/data/checked.json").read_text())["steps"]["megatron"]
    assert f"{shipped['steps']} published steps of megatron" in megatron["checked"]
    assert f"sequences of at most {shipped['context'][1]:,} tokens" in megatron["checked"]


def test_what_was_checked_is_what_the_ledger_says():
    script = load_script("docs/checked.py")
    found = {kind: script.summary(some) for kind, some in sorted(script.checked().items())}
    assert found == json.loads(Path("cpsim/data/checked.json").read_text())["steps"]
    assert sum(one["steps"] for one in found.values()) > 100


def test_only_strategies_of_the_framework_are_tried(megatron):
    named = {one["scenario"]["strategy"] for one in megatron["candidates"]}
    assert named <= {"none", "zigzag_ring", "allgather", "ulysses", "usp"}
    assert all(one["scenario"]["parallel"]["loss_chunks"] == 1 for one in megatron["candidates"])


def test_ties_are_the_fastest_and_the_simplest_is_recommended(megatron):
    candidates, tied = megatron["candidates"], megatron["tied"]
    times = [one["time_s"] for one in candidates]
    assert times == sorted(times)
    assert 1 < tied <= len(candidates)
    assert times[megatron["recommended"]] <= 1.02 * times[0]


def test_llama_of_128k_under_torchtitan_with_fsdp(tmp_path):
    answer = asked(*LLAMA, "--framework", "torchtitan")
    (tmp_path / "job.toml").write_text('[model]\nname = "llama3"\nflavor = "8B"\n' + answer["launch"]["text"])
    read = read_foreign(tmp_path / "job.toml").fields
    assert read["gpus"] == 64
    assert read["context"] == 131072
    assert answer["candidates"][0]["scenario"]["parallel"]["sharding"] == "fsdp"
    assert not answer["launch"]["wrong"]


def test_qwen_of_256k_on_32_h200_from_config_json():
    answer = asked("--model", FORMATS / "qwen3-32b.json", "--gpus", 32, "--cluster", "h200", "--context", "256k")
    assert answer["candidates"]
    assert answer["scenario"]["model"]["hidden"] == 5120
    assert any("norms of queries and keys" in line for line in answer["read"])


def test_own_lengths(tmp_path):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(map(str, np.random.default_rng(1).integers(100, 60000, 300))))
    answer = asked(*LLAMA, "--lengths", lengths, "--set", "parallel.tp=4", "--set", "parallel.pp=1")
    scenario = answer["scenario"]
    assert sum(scenario["documents"]) == scenario["tokens"]
    assert scenario["mask"] == "causal_document"
    assert answer["waste"]["padded"] > answer["waste"]["packed"] > 0
    assert {one["scenario"]["parallel"]["tp"] for one in answer["candidates"]} == {4}
    assert {one["scenario"]["strategy"] for one in answer["candidates"]} <= {"none", "zigzag_ring"}
    assert any(one["scenario"]["strategy"] == "zigzag_ring" for one in answer["candidates"])


def test_own_cluster_with_slower_cards(tmp_path):
    cluster = json.loads(json.dumps({"name": "mine", "gpus_per_node": 8, "gpu": "h100", "profile": "h100"}))
    cluster["fabric"] = {
        "nics_per_node": 4,
        "nic_bandwidth_bytes_per_s": "22 GB/s",
        "flow_bandwidth_bytes_per_s": "20 GB/s",
        "latency_s": "100 us",
        "sigma_log": 0.2,
        "flow_sigma_log": 0.3,
        "grade": "data sheet",
        "source": "4 x 200 Gb/s",
    }
    (tmp_path / "mine.json").write_text(json.dumps(cluster))
    words = ["--gpus", 16, "--model", "llama3-8b", "--context", "64k"]
    own = asked(*words, "--cluster", tmp_path / "mine.json")
    said = asked(*words, "--cluster", "dgx-h100", "--set", "cluster.nic=4x200G")
    usual = asked(*words, "--cluster", "dgx-h100")
    assert usual["candidates"][0]["time_s"] < own["candidates"][0]["time_s"]
    assert own["candidates"][0]["time_s"] == pytest.approx(said["candidates"][0]["time_s"], rel=0.02)
    assert said["scenario"]["cluster"] == "dgx-h100 nic=4x200G"


def test_a_file_of_a_framework_stands_beside_its_best_cut(tmp_path):
    saved = tmp_path / "case.yaml"
    answer = asked(FORMATS / "llama3-8b.toml", "--cluster", "h100", "--save", saved)
    assert re.match(
        r"As the file has it: [0-9.]+ s a step; the recommended one is [0-9]+ % (faster|slower)", answer["given"]
    )
    again = load_scenario(saved)
    assert again.to_dict() == answer["scenario"]
    assert again.parallel is None


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_strategy_is_cut(width, monkeypatch, megatron, advised):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(step_advice, "advise_step", advised)
    text = cpsim("advise", *LLAMA, "--framework", "megatron")
    assert "…" not in text
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    assert " ".join(megatron["launch"]["text"].split()) in " ".join(text.split())  # what is to be pasted is whole
    best = megatron["candidates"][0]["scenario"]
    assert f"usp (ulysses {best['knobs']['ulysses']}, head_first)" in text


def test_tables_cut_no_word_and_become_lists_where_they_would():
    made = table(("name", "left"), ("what it is", "left"), ("size", "right"))
    made.add_row("flashinfer_fa2", "two short words", "1,073,741,824 B")
    texts = {}
    for width in (60, 42, 24):
        console = Console(width=width, file=StringIO())
        console.print(made)
        texts[width] = console.file.getvalue()
        assert "…" not in texts[width]
        assert all(len(line) <= width for line in texts[width].splitlines())
    assert "flashinfer_fa2  two short words  1,073,741,824 B" in texts[60]
    assert re.search(r"flashinfer_fa2  two short  1,073,741,824 B\n +words", texts[42])
    assert " ".join(texts[24].split()) == "flashinfer_fa2 what it is two short words; size 1,073,741,824 B"


def test_columns_are_left_out_before_words_are_stacked():
    columns = [Column("#", worth=9), Column("name", "left", worth=9), Column("more", "left", worth=9, stacks=True)]
    fitted = Fitted([*columns, Column("extra", worth=1)], [["1", "a" * 6 + " (b)", "b" * 10, "c" * 10]], [""])
    assert fitted.chosen(80)[0] == [0, 1, 2, 3]
    assert fitted.chosen(30) == ([0, 1, 2], [["1", "aaaaaa (b)", "b" * 10, "c" * 10]])
    assert fitted.chosen(22) == ([0, 1, 2], [["1", "aaaaaa\n(b)", "b" * 10, "c" * 10]])
    assert fitted.chosen(20) == ([0, 1], [["1", "aaaaaa\n(b)\nbbbbbbbbbb", "b" * 10, "c" * 10]])


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (
            ("--model", "llama3-8b", "--gpus", 37, "--cluster", "h100"),
            2,
            "37 do not fill nodes of 8; nearest that do: 32 or 40",
        ),
        (("--model", "llama4-maverick", "--gpus", 64, "--cluster", "h100"), 2, "nearest that can: qwen3-235b-a22b"),
        (("--model", "lama3-8b", "--gpus", 64, "--cluster", "h100"), 2, "did you mean 'llama3-8b'?"),
        (("--model", "llama3-8b", "--gpus", 64), 2, "cluster: expected --cluster"),
        (("--model", "llama3-8b", "--cluster", "h100"), 2, "gpus: expected --gpus"),
        (("--gpus", 64), 2, "expected a file, or --model"),
        (("--model", "llama3-8b", "--gpus", 8, "--cluster", "h100", "--context", "lots"), 2, "context: expected 1 to"),
        (
            ("--model", "llama3-8b", "--gpus", 8, "--cluster", "h100", "--set", "cluster.nik=2x"),
            2,
            "did you mean 'nic'?",
        ),
        (
            ("--model", "llama3-8b", "--gpus", 8, "--cluster", "h100", "--framework", "jax"),
            2,
            "framework: expected one of",
        ),
    ],
)
def test_what_is_wrong_is_one_line(words, status, said):
    assert said in one_line(cpsim("advise", *words, status=status))


def test_what_does_not_fit_has_its_own_exit_code():
    words = ("--model", "llama3.1-405b", "--gpus", 8, "--cluster", "h100", "--context", "8k")
    command = [sys.executable, "-m", "cpsim", "advise", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 5
    answer = json.loads(done.stdout)
    assert answer["nearest"]
    assert {one["kind"] for one in answer["infeasible"]} >= {"does_not_fit"}


def test_words_of_people_are_fields():
    base = {"gpus": 8, "cluster": "dgx-h100"}
    heads = {"heads": 32, "kv_heads": 8}
    assert scenario_from(base | heads | {"seq_len": "128k"}).tokens == 131072
    several = scenario_from(base | heads | {"seq_len": "8k", "batch": 4})
    assert several.documents == (8192,) * 4
    assert several.mask == "causal_document"
    step = scenario_from(base | {"model": "meta-llama/Llama-3.1-8B", "seq_len": "1M", "batch": 2})
    assert (step.model, step.context, step.tokens) == ("llama3.1-8b", 2**20, 2**21)
    padded = scenario_from(base | heads | {"documents": [1000, 77], "mask": "causal_document"})
    assert padded.documents == (1000, 77, 3)
    assert padded.tokens == 1080


def test_the_usual_kernel_does_not_stand_in_the_way():
    fields = {"gpus": 8, "cluster": "dgx-h100", "heads": 32, "kv_heads": 8, "tokens": 8192}
    for name, kernel in {"torch": "sdpa_flash", "ring-flash-attn": "fa2", "yunchang": "fa2", "cpsim": "fa4"}.items():
        assert scenario_from(fields | {"implementation": name}).kernel == kernel
    assert scenario_from(fields | {"implementation": "torch", "kernel": "cudnn"}).kernel == "cudnn"


@pytest.mark.parametrize(
    ("name", "content", "lengths"),
    [
        ("a.txt", "100\n200 300, 400\n# end\n", (100, 200, 300, 400)),
        ("b.txt", "1k\n2k\n", (1024, 2048)),
        ("c.csv", "length,count\n512,3\n1024,2\n", (512, 512, 512, 1024, 1024)),
        ("d.json", "[5, 6]", (5, 6)),
        ("e.jsonl", '{"length": 7}\n{"input_ids": [1, 2, 3]}\n8\n', (7, 3, 8)),
        ("f.tsv", "id\tnum_tokens\na\t9\nb\t10\n", (9, 10)),
    ],
)
def test_lengths_are_read(tmp_path, name, content, lengths):
    (tmp_path / name).write_text(content)
    assert read_lengths(tmp_path / name) == lengths
    fields = {"gpus": 1, "cluster": "h200-4", "heads": 32, "kv_heads": 8, "documents": name}
    assert scenario_from(fields, tmp_path).documents == lengths


def test_lengths_of_arrays_are_read(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    np.save(tmp_path / "a.npy", np.array([3, 4]))
    pq.write_table(pa.table({"input_ids": [[1, 2], [1, 2, 3]]}), tmp_path / "a.parquet")
    assert read_lengths(tmp_path / "a.npy") == (3, 4)
    assert read_lengths(tmp_path / "a.parquet") == (2, 3)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "100\n2x\n", "line 2: expected a length of 1 token or more, got '2x'"),
        ("b.txt", "100\n-5\n", "line 2: expected a length"),
        ("c.csv", "words,count\n5,1\n", "line 1: expected a column length"),
        ("d.csv", "length,count\n5\n", "line 2: expected 2 columns, got 1"),
        ("e.json", '{"a": 1}', "expected a list of lengths"),
        ("f.txt", "", "expected document lengths, got none"),
        ("g.npy", "no array", "cannot be read as a NumPy array"),
    ],
)
def test_wrong_lengths_are_refused_with_their_line(tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(ScenarioError, match=re.escape(said)):
        read_lengths(tmp_path / name)


def test_packing_wastes_what_it_wastes():
    found = waste([600, 600, 400, 400], 1000)
    assert (found.cut, found.packed, found.padded) == (0, 0, 0.5)
    assert bins(np.array([700, 700, 700]), 1000) == 3
    assert waste([5000], 1000).padded == 0


def test_samples_have_the_tokens_of_a_step():
    found = sample([100, 900, 5000], 10_000, 1000, seed=3)
    assert sum(found.documents) == 10_000
    assert max(found.documents) <= 1000
    assert found.repeated
    assert found == sample([100, 900, 5000], 10_000, 1000, seed=3)


def test_the_answer_is_quick():
    """Five seconds of one core; ``test_first_answers`` of the benchmarks has the others, with their start-up."""
    started = time.process_time()
    asked(*LLAMA, "--framework", "megatron")
    assert time.process_time() - started < 5


WINDOW = {
    "gpus": 16,
    "cluster": "dgx-h200",
    "tokens": "512k",
    "heads": 32,
    "kv_heads": 8,
    "mask": {"name": "causal_sliding_window", "window": 4096},
}


def test_what_was_not_measured_is_answered_by_the_nearest_kernel(tmp_path):
    path, latent = (
        tmp_path / "latent.json",
        WINDOW | {"mask": "causal", "head_dim": 192, "value_dim": 128, "kernel": "flex"},
    )
    path.write_text(json.dumps(latent))
    found = asked(path)
    path.write_text(json.dumps(latent | {"kernel": "cudnn"}))
    cudnn = asked(path)
    assert (found["kind"], cudnn["kind"]) == ("not_measured", None)
    assert found["recommendation"].startswith("Not measured, estimated from kernel cudnn: run ")
    assert found["notes"][0].startswith("not measured: kernel flex takes values of 128 elements beside keys of 192")
    for wide, narrow in zip(found["candidates"], cudnn["candidates"], strict=True):
        assert wide["time_s"] == narrow["time_s"]
        assert wide["time_s_low"] < 0.9 * narrow["time_s_low"]
        assert wide["time_s_high"] > 1.1 * narrow["time_s_high"]


def test_windows_need_no_other_kernel(tmp_path):
    path = tmp_path / "window.json"
    path.write_text(json.dumps(WINDOW))
    assert asked(path)["kind"] is None


def test_exit_codes_say_why_there_is_no_answer(tmp_path):
    path = tmp_path / "case.json"
    path.write_text(json.dumps(WINDOW | {"implementation": "torch", "kernel": "cudnn"}))
    cpsim("advise", path, status=3)
    path.write_text(json.dumps(WINDOW | {"kernel": "fa3", "cluster": "p4de", "mask": "causal"}))
    assert asked(path)["kind"] == "not_measured"


@pytest.mark.parametrize("name", ["megatron", "Megatron", "nemo", "torchtitan", "deepspeed"])
def test_what_is_called_an_implementation_and_is_none_says_what_to_do(tmp_path, name):
    path = tmp_path / "case.json"
    path.write_text(json.dumps(WINDOW | {"implementation": name, "mask": "causal"}))
    said = one_line(cpsim("advise", path, status=2))
    assert "strategy" in said or "cpsim advise --framework" in said
    assert "did you mean" not in said


def test_all_that_is_wrong_with_numbers_is_said_at_once():
    with pytest.raises(ScenarioError, match="use gpus 32 with tokens 131072 or gpus 40 with tokens 131080"):
        scenario_from({"gpus": 37, "cluster": "dgx-h100", "tokens": "128k", "heads": 32, "kv_heads": 8})


def test_torchtitan_s_own_parser_takes_it(tmp_path):
    manager = pytest.importorskip("torchtitan.config.manager", reason="torchtitan 0.1 to 0.2", exc_type=ImportError)
    if not hasattr(manager, "JobConfig"):
        pytest.skip("torchtitan from 0.3 on has no TOML")
    path = tmp_path / "job.toml"
    path.write_text('[model]\nname = "llama3"\nflavor = "8B"\n' + written_for("torchtitan"))
    job = manager.ConfigManager().parse_args(["--job.config_file", str(path)])
    ours = read_foreign(path).fields
    assert job.parallelism.context_parallel_degree == ours["parallel"]["cp"]
    assert job.training.seq_len == ours["context"] == 32768
    assert job.training.global_batch_size == 64


def test_accelerate_s_own_parser_takes_it(tmp_path):
    launch = pytest.importorskip("accelerate.commands.launch", exc_type=ImportError)
    path = tmp_path / "fsdp.yaml"
    path.write_text(written_for("huggingface"))
    given = launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    found, *_ = launch._validate_launch_command(given)
    assert found.use_parallelism_config
    assert found.parallelism_config_cp_size == read_foreign(path).fields["parallel"]["cp"]


def test_megatron_core_has_what_is_written():
    config = pytest.importorskip("megatron.core.model_parallel_config", exc_type=ImportError)
    words = written_for("megatron").replace("\\\n", " ").split()
    names = {word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    known = {field.name for field in dataclasses.fields(config.ModelParallelConfig)}
    degrees = {name for name in names if name.endswith("_parallel_size") or name == "sequence_parallel"}
    assert len(degrees) >= 3
    assert degrees <= known


def written_for(framework):
    """What is to be pasted for a step of 64 H100."""
    fields = {"gpus": 64, "cluster": "dgx-h100", "model": "llama3-8b", "seq_len": "32k", "batch": 64}
    sharding = "zero1" if framework == "megatron" else "fsdp"
    cut = {"tp": 2, "cp": 4, "recompute": "full", "sharding": sharding}
    scenario = scenario_from(fields | {"framework": framework, "parallel": cut, "strategy": "zigzag_ring"})
    return launch_text(scenario, parallel_of(scenario.parallel, 64, scenario.num_sequences))
