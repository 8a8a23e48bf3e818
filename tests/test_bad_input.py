"""Bad scenarios: each is one line that names the field and how to mend it, and none loses the others."""

import json

import pytest

from cpsim import advise, predict
from cpsim.case.load import load_scenario, load_scenarios, scenario_from
from cpsim.case.resolve import cluster_of, workload_of
from cpsim.case.scenario import Scenario
from cpsim.errors import CpsimError, ScenarioError

GOOD = {"strategy": "ring", "gpus": 4, "cluster": "h200-4", "tokens": 4096, "heads": 8, "kv_heads": 2}

BAD_FIELDS = {
    "unknown field": ({"gpu": 4}, "gpu: unknown field; did you mean 'gpus'"),
    "field of another tool": ({"num_heads": 4}, "num_heads: unknown field; did you mean 'heads'"),
    "unknown mask": ({"mask": "casual"}, "mask: 'casual' is unknown; did you mean 'causal'"),
    "mask without a name": ({"mask": {"window": 3}}, "mask: expected a name"),
    "option of a mask without options": ({"mask": {"name": "causal", "window": 3}}, "'causal' takes no parameters"),
    "unknown option of a mask": ({"mask": {"name": "lambda", "windows": 3}}, "lambda has no option 'windows'; did you"),
    "option of a mask out of range": ({"mask": {"name": "lambda", "window": 0}}, "mask: lambda: window: expected a"),
    "option of a mask that is infinite": ({"mask": {"name": "block_sparse", "density": float("inf")}}, "from 0 to 1"),
    "nested option of a mask": ({"mask": {"name": "lambda", "window": {"a": 1}}}, "window: expected a whole number"),
    "unknown pass": ({"pass": "forward"}, "pass: expected fwd, bwd, fwd_bwd; got 'forward'"),
    "unknown protocol": ({"protocol": "async"}, "protocol: expected synced, streamed"),
    "compiled code that nobody compiles": (
        {"compile": True, "strategy": "none", "gpus": 1},
        "compile: expected strategy none of torch or flash-attn, got strategy none of cpsim; leave it out",
    ),
    "compiled rings": (
        {"compile": True, "strategy": "ring", "implementation": "torch"},
        "compile: expected strategy none of torch or flash-attn, got strategy ring of torch",
    ),
    "compiled in words": ({"compile": "yes"}, "compile: expected true or false, got 'yes'"),
    "unknown dtype": ({"dtype": "bfloat16"}, "dtype: expected bf16"),
    "unknown distribution": ({"documents": {"distribution": "prolong-512k"}}, "did you mean 'prolong512k'"),
    "unknown field of a draw": ({"documents": {"distribution": "pile", "sed": 1}}, "did you mean 'seed'"),
    "documents of a wrong kind": ({"documents": "pile"}, "documents: expected a list of lengths"),
    "documents that do not add up": ({"documents": [4000, 95]}, "sum to 4096 tokens, got 4095"),
    "no documents": ({"documents": []}, "documents: expected at least one length"),
    "document of zero tokens": ({"documents": [4096, 0]}, "documents: expected lengths of 1 to"),
    "document of true tokens": ({"documents": [4095, True]}, "number 2 is True"),
    "negative GPUs": ({"gpus": -4}, "gpus: expected greater than or equal to 1, got -4"),
    "GPUs in words": ({"gpus": "four"}, "gpus: expected a whole number, got 'four'"),
    "GPUs as a bool": ({"gpus": True}, "gpus: expected a whole number, got True"),
    "half a GPU": ({"gpus": 0.5}, "gpus: expected a whole number, got 0.5"),
    "absurd tokens": ({"tokens": 10**15}, "tokens: expected less than or equal to 1000000000"),
    "tokens that are not a number": ({"tokens": float("nan")}, "tokens: expected a whole number, got nan"),
    "uneven tokens": ({"tokens": 4098}, "expected a multiple of gpus = 4, got 4098; use 4096 or 4100"),
    "both kinds of tokens": ({"tokens_per_gpu": 1024}, "expected either tokens or tokens_per_gpu, got both"),
    "no tokens": ({"tokens": None}, "expected either tokens or tokens_per_gpu, got neither"),
    "impossible heads": ({"kv_heads": 3}, "kv_heads: expected a divisor of heads = 8, got 3"),
    "absurd head_dim": ({"head_dim": 10**6}, "head_dim: expected less than or equal to 1024"),
    "knobs of a wrong kind": ({"knobs": [1]}, "knobs: expected a mapping"),
    "knob that is infinite": ({"knobs": {"ulysses": float("inf")}}, "ulysses: expected a finite number"),
    "nested knob": ({"knobs": {"ulysses": {"a": 1}}}, "knobs: ulysses: expected a number"),
    "unknown model": ({"model": "llama-8b"}, "model: expected dimensions or a name, got 'llama-8b'; did you"),
    "model without layers": ({"model": {"hidden": 64, "heads": 8, "kv_heads": 2, "ffn": 64}}, "model: layers"),
    "heads of another model": ({"model": "llama3-8b"}, "heads: expected 32, that of the model, got 8; leave it out"),
    "step of one pass": ({"model": "llama-34b", "heads": 64, "kv_heads": 8, "pass": "fwd"}, "pass: a training step"),
    "unknown degree": ({"parallel": {"sp": 2}}, "parallel: sp: unknown field; did you mean"),
    "degree of zero": ({"parallel": {"tp": 0}}, "parallel: tp: expected greater than or equal to 1, got 0"),
    "unknown recomputation": (
        {"parallel": {"recompute": "mpl"}},
        "parallel: recompute: expected none, selective, mlp, full",
    ),
    "overlap in words": (
        {"parallel": {"tp_overlap": "yes"}},
        "parallel: tp_overlap: expected true or false, got 'yes'",
    ),
    "unknown recipe": (
        {"precision": {"fp8": "fast"}},
        "precision: expected bf16, fp8, nvfp4 or {fp8: recipe} with one of tens",
    ),
    "precision without a model": ({"precision": "fp8"}, "precision: belongs to a training step, which needs a model"),
    "cut without a model": ({"parallel": {"tp": 2}}, "parallel: belongs to a training step, which needs a model"),
    "context without a model": ({"context": 1024}, "context: belongs to a training step"),
    "future schema": ({"schema": 2}, "schema: expected 1, got 2"),
    "version of another kind": ({"version": "9.0"}, "version: expected 1, got '9.0'"),
}

BAD_LINES = {
    "broken JSON": ('{"gpus": 4', "not valid JSON"),
    "a list": ("[1, 2]", "expected the fields of a scenario"),
    "a number": ("17", "expected the fields of a scenario"),
    "nothing": ("null", "got nothing"),
    "a field given twice": ('{"gpus": 4, "gpus": 8}', "gpus is given twice"),
    "endless nesting": ("[" * 100_000, "not valid JSON"),
    "endless number": ('{"gpus": ' + "9" * 10_000 + "}", "not valid JSON"),
}


BAD_NAMES = {
    "strategy": ("zigzag", "did you mean 'zigzag_ring'"),
    "kernel": ("fa5", "kernel: expected fa2, "),
    "implementation": ("toarch", "implementation: expected cpsim, ring-flash-attn, yunchang, torch"),
}


def assert_one_line(error, match):
    text = str(error)
    assert isinstance(error, ScenarioError)
    assert match in text
    assert "\n" not in text
    assert len(text) < 400
    assert "pydantic" not in text


@pytest.mark.parametrize(("change", "match"), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_bad_field_is_one_line(change, match):
    with pytest.raises(ScenarioError) as caught:
        scenario_from(GOOD | change)
    assert_one_line(caught.value, match)


@pytest.mark.parametrize("field", BAD_NAMES)
@pytest.mark.parametrize("ask", [predict, advise])
def test_a_name_that_nothing_has_is_one_line(ask, field):
    name, match = BAD_NAMES[field]
    with pytest.raises(ScenarioError) as caught:
        ask(GOOD | {field: name})
    assert_one_line(caught.value, match)


@pytest.mark.parametrize("field", ["gpus", "cluster", "heads", "kv_heads"])
def test_missing_field_is_named(field):
    with pytest.raises(ScenarioError, match=f"{field}: missing"):
        scenario_from({key: value for key, value in GOOD.items() if key != field})


def test_one_bad_line_never_loses_the_others(tmp_path):
    bad = [json.dumps(GOOD | change) for change, _ in BAD_FIELDS.values()] + [text for text, _ in BAD_LINES.values()]
    matches = [match for _, match in (*BAD_FIELDS.values(), *BAD_LINES.values())]
    lines = [line for text in bad for line in (json.dumps(GOOD), text)]
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(lines))
    entries = list(load_scenarios(path))
    assert len(entries) == len(lines)
    assert all(isinstance(entry, Scenario) for entry in entries[::2])
    for number, (error, match) in enumerate(zip(entries[1::2], matches, strict=True), start=1):
        assert_one_line(error, match.replace("got nan", "got"))
        assert f"line {2 * number}:" in str(error)


def test_items_of_a_list_are_counted(tmp_path):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps([GOOD, GOOD | {"gpus": 0}, GOOD]))
    first, second, third = load_scenarios(path)
    assert isinstance(first, Scenario)
    assert isinstance(third, Scenario)
    assert_one_line(second, "item 2: gpus: expected greater")


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("case.yaml", b"gpus: [1", "not valid YAML"),
        ("case.yaml", b"gpus: 4\ngpus: 8", "gpus is given twice; keep one at line 2"),
        ("case.yaml", b"a: &x [*x]", "expected"),
        ("case.yaml", b"? [1, 2]\n: 3", "not valid YAML"),
        ("case.yaml", b"3: 4", "expected"),
        ("case.yaml", b"tokens: 2024-99-99", "tokens: expected a whole number, got '2024-99-99'"),
        ("case.yaml", b"!!python/object:os.system {}", "not valid YAML"),
        ("case.yaml", b"\xff\xfe\x00binary", "expected UTF-8 text"),
        ("case.yaml", b"\x00\x01", "not valid YAML"),
        ("case.yaml", b"", "got nothing"),
        ("case.json", b"{", "not valid JSON"),
        ("case.jsonl", b"", "expected one scenario, got 0"),
        ("case.jsonl", b"{}\n{}", "expected one scenario, got 2"),
    ],
)
def test_unreadable_file_is_one_line(name, content, match, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ScenarioError) as caught:
        load_scenario(path)
    assert_one_line(caught.value, match)
    assert name in str(caught.value)


def test_missing_file_and_folder_are_one_line(tmp_path):
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(ScenarioError, match="cannot be read") as caught:
            load_scenario(path)
        assert_one_line(caught.value, str(path))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"cluster": "dgx-h20"},
            "neither a preset, nor a GPU, nor a file; did you mean 'dgx-h200'?; presets are",
        ),
        ({"gpus": 8}, "h200-4 is one machine of 4 GPUs"),
        ({"gpus": 12, "tokens": 12288, "cluster": "dgx-h100"}, "use 8 or 16"),
    ],
)
def test_impossible_cluster_is_one_line(change, match):
    with pytest.raises(CpsimError) as caught:
        cluster_of(scenario_from(GOOD | change))
    assert_one_line(caught.value, match)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"mask": {"name": "variable_block_sparse", "block": 9}}, "block: expected at least min_block = 128, got 9"),
        ({"documents": {"distribution": "pile", "min_length": 9000}}, "min_length = 9000"),
    ],
)
def test_workload_that_cannot_be_made_is_one_line(change, match):
    with pytest.raises(CpsimError) as caught:
        workload_of(scenario_from(GOOD | change)).slices()
    assert_one_line(caught.value, match)
