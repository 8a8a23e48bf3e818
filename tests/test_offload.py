"""Activations in the host's memory: what leaves, what memory and time follow, and who has none."""

from dataclasses import asdict, replace

import pytest

from cpsim.case.cluster import presets
from cpsim.case.load import scenario_from
from cpsim.case.model import MODELS
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.prediction.case import resolve
from cpsim.prediction.predict import predict
from cpsim.prediction.step.memory import KINDS, chunk_memory, occupancy
from cpsim.prediction.step.program import BACK, HostCopy, live_bytes
from cpsim.prediction.step.step import Known, deal
from cpsim.prediction.steps import StepCase

LAYERS = 8
SMALL = asdict(replace(MODELS["llama3-8b"], layers=LAYERS, vocab=32000))
ONE = {"gpus": 1, "cluster": "dgx-h100", "tokens": 8192, "model": SMALL, "strategy": "none", "kernel": "fa2"}


def model_of(link=None, **changes):
    case = resolve(scenario_from({**ONE, "offload": "activations", **changes}))
    cluster = replace(case.cluster, host_link_bytes_per_s=link)
    steps = StepCase(case.scenario, cluster, case.profile)
    return steps, steps.model(steps.parallel(), "none", {})


def simulated(link=None, **changes):
    steps, model = model_of(link, **changes)
    return model.simulate(deal(steps.sequences(steps.parallel()), steps.parallel()))


def test_all_but_the_last_layer_leave_and_return():
    _, model = model_of()
    run = model.program(8192)
    leave, back = ([n for n in side if isinstance(n.what, HostCopy)] for side in (run.forward, run.backward))
    assert len(leave) == len(back) == LAYERS - 1
    assert [n.what.nbytes for n in leave] == [n.what.nbytes for n in back]
    assert all(sum(n.makes.values()) == n.what.nbytes for n in back)
    made = {name: size for node in run.forward for name, size in node.makes.items()}
    later = {name.removesuffix(BACK) for node in run.backward for name in node.reads if name.endswith(BACK)}
    assert sum(made[name] for name in later) == sum(n.what.nbytes for n in leave)


def test_nothing_that_left_is_read_before_it_is_back():
    _, model = model_of()
    run = model.program(8192)
    gone = {name for node in run.forward if isinstance(node.what, HostCopy) for name in node.reads}
    assert not gone & {name for node in run.backward for name in node.reads}


def test_memory_has_two_layers_at_most():
    """Beside all kept activations: the last layer's, and those of a second one."""
    _, model = model_of()
    plain = replace(model, offload=False, _known=Known(), _chunks={}, _memory={})
    kept = plain.stage_memory(8192, 0).activations / LAYERS
    assert model.stage_memory(8192, 0).activations < 2.6 * kept
    assert model.stage_memory(8192, 0).total < plain.stage_memory(8192, 0).total - (LAYERS - 4) * kept


def test_memory_of_many_layers_follows_from_few():
    """The line through programs of three and four layers, beside the whole program."""
    _, model = model_of()
    make = model._programs(8192, 0)
    run = make(LAYERS)
    whole = live_bytes([*run.forward, *run.backward], (), lambda _: 0, 1)[0].max()
    assert chunk_memory(lambda count: occupancy(make(count), ()), LAYERS).peak.sum() == whole
    assert len(KINDS) == 5


def test_a_fast_link_hides_and_a_slow_one_rules():
    plain = predict(scenario_from(ONE)).time_s
    fast, slow, slower = (simulated(link).time_s for link in (1e13, 1e10, 5e9))
    assert fast == pytest.approx(plain, rel=5e-3)
    _, model = model_of()
    nbytes = sum(n.what.nbytes for n in model.program(8192).forward if isinstance(n.what, HostCopy))
    assert slower - slow == pytest.approx(2 * nbytes * (1 / 5e9 - 1 / 1e10), rel=0.02)
    assert slow > 2 * nbytes / 1e10


def test_links_of_data_sheets():
    assert presets()["dgx-h100"].host_link == pytest.approx(54.9e9, rel=1e-3)
    assert presets()["p4de"].host_link == pytest.approx(0.872 * 31.5e9, rel=1e-3)
    assert any("of its data sheet" in note for note in predict(scenario_from({**ONE, "offload": "activations"})).notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"framework": "torch"}, "offload: torch"),
        ({"framework": "huggingface"}, "offload: huggingface"),
        ({"gpus": 2, "parallel": {"pp": 2}}, "offload: megatron has none with pipelines"),
        ({"parallel": {"recompute": "full"}}, "offload: megatron has none with recomputation"),
    ],
)
def test_who_has_none(changes, message):
    with pytest.raises(InfeasibleError, match=message):
        predict(scenario_from({**ONE, "offload": "activations", **changes}))


@pytest.mark.parametrize(
    ("changes", "message"), [({"part": "layer"}, "offload: belongs"), ({"offload": "all"}, "offload")]
)
def test_what_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ScenarioError, match=message):
        scenario_from({**ONE, "offload": "activations", **changes})
