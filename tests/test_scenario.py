import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import cpsim
from cpsim.case.documents import DISTRIBUTIONS
from cpsim.case.load import load_scenario, load_scenarios, scenario_from
from cpsim.case.resolve import cluster_of, notes_of, workload_of
from cpsim.case.scenario import FIELDS, DocumentDraw, Scenario
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.masks.names import MASK_NAMES
from cpsim.prediction.compare import group_key
from cpsim.prediction.runs import case_key
from cpsim.strategies import STRATEGIES

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = {"gpus": 4, "cluster": "h200-4", "tokens": 4096, "heads": 8, "kv_heads": 2}


def test_fields_are_the_documented_ones():
    names = """strategy knobs implementation kernel compile gpus cluster profile tokens_per_gpu tokens documents mask
    heads kv_heads head_dim dtype pass protocol host model context parallel framework precision trainable offload
    part value_dim cached sinks sparse"""
    assert set(FIELDS) == set(names.split())


def test_defaults():
    scenario = scenario_from(SMALL)
    assert scenario.to_dict() == SMALL | {
        "knobs": {},
        "implementation": "cpsim",
        "kernel": "fa4",
        "mask": "causal",
        "head_dim": 128,
        "dtype": "bf16",
        "pass": "fwd_bwd",
        "protocol": "synced",
    }
    assert scenario.strategy is None


def test_names_of_distributions_agree_with_what_exists():
    assert set(get_args(DocumentDraw.model_fields["distribution"].annotation)) == set(DISTRIBUTIONS)


def test_without_documents_there_is_one():
    workload = workload_of(scenario_from(SMALL))
    assert workload.documents == (4096,)
    assert (workload.num_heads, workload.num_kv_heads, workload.head_dim) == (8, 2, 128)


def test_tokens_per_gpu_count_on_every_gpu():
    fields = {key: value for key, value in SMALL.items() if key != "tokens"} | {"tokens_per_gpu": 1000}
    assert workload_of(scenario_from(fields)).num_tokens == 4000


def test_documents_are_taken_or_drawn():
    listed = scenario_from(SMALL | {"documents": [96, 4000], "mask": "causal_document"})
    assert workload_of(listed).documents == (96, 4000)
    drawn = scenario_from(SMALL | {"documents": {"distribution": "prolong64k", "seed": 3, "max_length": 512}})
    assert sum(workload_of(drawn).documents) == 4096
    assert max(workload_of(drawn).documents) <= 512


def test_cluster_has_the_scenario_s_gpus(tmp_path):
    assert cluster_of(scenario_from(SMALL | {"cluster": "dgx-h100", "gpus": 16})).num_nodes == 2
    (tmp_path / "mine.yaml").write_text("name: mine\ngpus_per_node: 4\ngpu: h200\nprofile: h200")
    (tmp_path / "case.yaml").write_text(yaml.safe_dump(SMALL | {"cluster": "mine.yaml"}))
    assert cluster_of(load_scenario(tmp_path / "case.yaml")).name == "mine"


def test_documents_that_make_no_difference_are_noted():
    documents = {"documents": [96, 4000]}
    assert "ignored, since mask causal" in notes_of(scenario_from(SMALL | documents))[0]
    assert notes_of(scenario_from(SMALL | documents | {"mask": "causal_document"})) == ()


@pytest.mark.parametrize("name", MASK_NAMES)
def test_every_mask_has_a_workload(name):
    assert workload_of(scenario_from(SMALL | {"mask": name, "documents": [96, 4000]})).area() > 0


def test_options_reach_the_mask():
    near, far = (scenario_from(SMALL | {"mask": {"name": "lambda", "window": w}}) for w in (100, 200))
    assert workload_of(near).mask_options == (("window", 100),)
    assert workload_of(near).area() < workload_of(far).area()


def test_a_default_that_is_written_down_is_the_same_case():
    cases = ["lambda", {"name": "lambda"}, {"window": 4096, "name": "lambda", "sink": 64}]
    plain, named, written = (scenario_from(SMALL | {"mask": mask}) for mask in cases)
    assert plain == named == written
    assert case_key(plain) == case_key(written)
    ordered = [{"name": "lambda", "sink": 1, "window": 9}, {"window": 9, "sink": 1, "name": "lambda"}]
    first, second = (scenario_from(SMALL | {"mask": mask}) for mask in ordered)
    assert case_key(first) == case_key(second)
    assert first.to_dict()["mask"] == ordered[0]
    assert group_key(first) != group_key(plain)


def test_copies_keep_the_fields():
    copy = scenario_from(SMALL).model_copy(update={"strategy": "ring", "pass_": "fwd"})
    assert copy.to_dict()["pass"] == "fwd"
    assert copy.strategy == "ring"


@given(
    st.fixed_dictionaries(
        {
            "gpus": st.just(4),
            "cluster": st.just("h200-4"),
            "heads": st.sampled_from([8, 32]),
            "kv_heads": st.just(8),
        },
        optional={
            "strategy": st.sampled_from(["ring", "ulysses", "none"]),
            "knobs": st.dictionaries(st.text(max_size=5), st.one_of(st.integers(-5, 5), st.text(max_size=4))),
            "mask": st.sampled_from(["full", "causal_document", {"name": "lambda", "window": 128}]),
            "pass": st.sampled_from(["fwd", "bwd", "fwd_bwd"]),
            "protocol": st.sampled_from(["synced", "streamed"]),
            "documents": st.sampled_from([[4000, 96], {"distribution": "pile", "seed": 42}]),
            "profile": st.just("h100"),
        },
    )
)
def test_scenarios_round_trip_through_json(fields):
    scenario = scenario_from(fields | {"tokens": 4096})
    again = scenario_from(json.loads(json.dumps(scenario.to_dict())))
    assert again == scenario
    assert again.to_dict() == scenario.to_dict()


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.*")), ids=lambda path: path.name)
def test_examples_load(path):
    entries = list(load_scenarios(path))
    assert entries
    for scenario in entries:
        assert isinstance(scenario, Scenario), scenario
        assert workload_of(scenario).num_tokens == scenario.num_tokens
        assert cluster_of(scenario).num_gpus == scenario.gpus


def test_the_main_example_is_the_reference_case():
    scenario = load_scenario(EXAMPLES / "llama3-8b-96gpu.yaml")
    assert (scenario.gpus, scenario.num_tokens, scenario.cluster) == (96, 786432, "dgx-h200")


def test_one_file_holds_one_or_many(tmp_path):
    for name, text in {
        "many.yaml": yaml.safe_dump([SMALL, SMALL]),
        "many.json": json.dumps([SMALL, SMALL], indent=1),
        "many.jsonl": json.dumps(SMALL) + "\n\n" + json.dumps(SMALL) + "\n",
    }.items():
        (tmp_path / name).write_text(text)
        assert list(load_scenarios(tmp_path / name)) == [scenario_from(SMALL)] * 2
        with pytest.raises(ScenarioError, match="expected one scenario, got 2"):
            load_scenario(tmp_path / name)


def test_schema_1_may_be_written_down():
    assert scenario_from({"schema": 1, **SMALL}) == scenario_from(SMALL)


def test_importing_scenario_loads_no_heavy_library():
    heavy = {"numba", "scipy", "simpy", "plotly", "torch"}
    code = f"import sys, cpsim.case.scenario; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "none"])
def test_a_table_is_no_value_of_other_knobs(strategy):
    """In one line, not as an internal error."""
    planner = STRATEGIES[strategy].plan
    knobs = [p.name for p in inspect.signature(planner).parameters.values() if p.kind is p.KEYWORD_ONLY]
    case = {"gpus": 4, "cluster": "h200-4", "tokens": 4096, "heads": 8, "kv_heads": 8, "strategy": strategy}
    for knob in set(knobs) - {"groups"}:
        scenario = scenario_from(case | {"mask": "causal_document", "knobs": {knob: [[1, 2, 3]]}})
        assert scenario.knobs[knob] == ((1, 2, 3),)
        with pytest.raises((ScenarioError, InfeasibleError), match=knob):
            cpsim.predict(scenario)
