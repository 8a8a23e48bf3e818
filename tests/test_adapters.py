"""Low-rank adapters in training steps: what is trained, held, run and refused; layers with a sliding window."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from test_training_step import step

from cpsim.case.load import scenario_from
from cpsim.case.model import MODELS, Lora
from cpsim.case.resolve import flops_of, workload_of
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.prediction.case import resolve
from cpsim.prediction.predict import predict
from cpsim.prediction.step.adapters import adapted
from cpsim.prediction.step.frameworks import FRAMEWORKS, HUGGING_FACE, MEGATRON, Sizes
from cpsim.prediction.step.layer import Gemm
from cpsim.prediction.step.step import deal
from cpsim.prediction.steps import StepCase

SMALL = asdict(replace(MODELS["llama3-8b"], layers=4, vocab=32000))
ONE = {"gpus": 1, "cluster": "dgx-h100", "tokens": 8192, "model": SMALL, "strategy": "none", "kernel": "fa2"}
RANK = 16


def one(**changes):
    return scenario_from({**ONE, **changes})


def simulated(**changes):
    case = resolve(one(**changes))
    steps = StepCase(case.scenario, case.cluster, case.profile)
    parallel = steps.parallel()
    model = steps.model(parallel, "none", {})
    return model, model.simulate(deal(steps.sequences(parallel), parallel))


@pytest.mark.parametrize("name", ["megatron", "huggingface"])
def test_no_frozen_weight_has_a_gradient(name):
    """Gradients of weights are of the rank's size; gradients of inputs are all there."""
    plain, lora = FRAMEWORKS[name], Lora(rank=RANK)
    sizes = Sizes(MODELS["llama3-8b"], 2, 4096)
    trained = adapted(plain, lora)

    def products(framework, kind):
        code = framework.layer(sizes, True)
        return [n.what for n in code.backward if isinstance(n.what, Gemm) and n.what.kind == kind]

    assert all(RANK in (what.m, what.n) for what in products(trained, "wgrad"))
    wide = [what for what in products(trained, "dgrad") if RANK not in (what.n, what.k)]
    assert wide == products(plain, "dgrad")
    assert not any("embedding_bwd" in str(node.what) for node in trained.first(sizes, False).backward)
    assert all(n.what.kind != "wgrad" for n in trained.last(sizes, False, 1).backward if isinstance(n.what, Gemm))


def test_parameters_of_adapters():
    """Llama 3 8B with rank 16 on every linear layer: 41.9 million by Transformers' seven, less for three fused."""
    model = MODELS["llama3-8b"]
    h, q, kv, f = 4096, 4096, 1024, 14336
    fused = RANK * (h + q + 2 * kv + q + h + h + 2 * f + f + h)
    assert Lora(rank=RANK).parameters(model, 1) == fused
    assert Lora(rank=RANK, modules=("qkv",)).parameters(model, 1) == RANK * (h + q + 2 * kv)


@pytest.mark.parametrize("name", ["megatron", "huggingface"])
def test_memory_of_frozen_weights_is_two_bytes_each(name):
    model, found = simulated(framework=name, trainable={"lora": RANK})
    (stage,) = found.memory
    parameters = model.model.parameters() - model.model.hidden
    adapters = 4 * Lora(rank=RANK).parameters(model.model, 1)
    assert stage.weights == 2 * (parameters + adapters)
    assert stage.optimizer == (12 if name == "megatron" else 4) * adapters
    _, whole = simulated(framework=name)
    assert found.peak_memory_bytes < whole.peak_memory_bytes
    assert found.time_s < whole.time_s
    assert found.flops < whole.flops


def test_fewer_adapters_take_less():
    few = predict(one(trainable={"lora": RANK, "modules": ["qkv"]}))
    every = predict(one(trainable={"lora": RANK}))
    dropped = predict(one(trainable={"lora": RANK, "dropout": 0.1}))
    assert few.time_s < every.time_s < dropped.time_s
    assert few.peak_memory_bytes < every.peak_memory_bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"precision": "fp8", "trainable": {"lora": 8}, "framework": "huggingface"},
            "precision: huggingface is predicted in bf16",
        ),
        ({"precision": "fp8", "offload": "activations"}, "precision: steps with offload"),
    ],
)
def test_what_nobody_has_put_together_is_refused(changes, message):
    with pytest.raises(InfeasibleError, match=message):
        predict(one(**changes))


def test_all_is_the_default():
    assert predict(one(trainable="all")).time_s == predict(one()).time_s


def test_sharded_frozen_weights_are_gathered_and_not_scattered():
    model, found = simulated(
        gpus=8, tokens=8 * 8192, framework="huggingface", trainable={"lora": RANK}, parallel={"sharding": "fsdp"}
    )
    wide = 4 * model.model.layer_parameters(1) / 100
    sums = [
        node.what.nbytes for node in model.program(8192).backward if getattr(node.what, "kind", "") == "reduce_scatter"
    ]
    assert len(sums) == 4
    assert max(sums) < wide
    assert found.memory[0].weights < 2 * model.model.parameters()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainable": "some"}, "trainable: expected all or"),
        ({"trainable": {"lora": 0}}, "lora"),
        ({"trainable": {"lora": 8, "modules": []}}, "modules"),
        ({"trainable": {"lora": 8, "modules": ["qkv", "qkv"]}}, "modules"),
        ({"trainable": {"lora": 8, "modules": ["q"]}}, "modules"),
        ({"trainable": {"lora": 8}, "part": "layer"}, "trainable: belongs to a whole step"),
        ({"trainable": {"lora": 8}, "model": "mixtral-8x7b"}, "trainable: adapters cannot be predicted with experts"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ScenarioError, match=message):
        one(**changes)


def test_frameworks_without_adapters_say_so():
    with pytest.raises(InfeasibleError, match="trainable: torch has no adapters"):
        predict(one(framework="torch", trainable={"lora": 8}))
    assert MEGATRON.lora is HUGGING_FACE.lora is None


def test_pairs_of_windows_are_counted():
    """Beside a mask of all queries and keys."""
    model = replace(MODELS["llama3-8b"], window=100, window_pattern=4)
    i = np.arange(1000)
    seen = i[:, None] >= i
    inside = seen & (i[:, None] - i < 100)
    assert model.windowed == 0.75
    assert model.pairs(1000) == 0.75 * inside.sum() + 0.25 * seen.sum()
    assert replace(model, window=0, window_pattern=0).pairs(1000) == seen.sum()


def test_windows_take_less_and_wide_ones_take_as_long_as_none():
    plain = predict(one())
    times = [predict(one(model=SMALL | {"window": w})).time_s for w in (128, 1024, 4096, 8192)]
    assert times == sorted(times)
    assert times[0] < plain.time_s
    assert times[-1] == pytest.approx(plain.time_s, rel=0.05)
    half = predict(one(model=SMALL | {"window": 128, "window_pattern": 2})).time_s
    assert half == pytest.approx((times[0] + plain.time_s) / 2, rel=1e-3)


@pytest.mark.parametrize("strategy", ["allgather", "ulysses", "zigzag_ring"])
def test_windows_under_context_parallelism_are_the_mean_of_both_kinds_of_layers(strategy):
    def time_s(**window):
        return predict(one(model=SMALL | window, gpus=2, strategy=strategy, parallel={"cp": 2})).time_s

    whole, windowed = time_s(), time_s(window=1024)
    assert windowed < 0.95 * whole
    assert time_s(window=1024, window_pattern=2) == pytest.approx((whole + windowed) / 2, rel=1e-3)


def test_flop_of_windows():
    scenario = one(model=SMALL | {"window": 128})
    assert flops_of(scenario, workload_of(scenario)) < flops_of(one(), workload_of(one()))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": SMALL | {"window_pattern": 2}}, ScenarioError, "window_pattern: belongs to a model with windows"),
        ({"model": SMALL | {"window": 8}, "part": "layer"}, ScenarioError, "window: one layer has one mask"),
        ({"model": SMALL | {"window": 8}, "mask": "full"}, InfeasibleError, "window: expected mask causal"),
        ({"model": SMALL | {"window": 8}, "kernel": "sdpa_math"}, InfeasibleError, "window: kernel sdpa_math has no"),
    ],
)
def test_windows_that_cannot_be_predicted(changes, error, message):
    with pytest.raises(error, match=message):
        predict(one(**changes))


def test_steps_of_several_stages_train_adapters():
    found = step(gpus=8, parallel={"tp": 2, "pp": 2}, trainable={"lora": RANK})
    assert found.time_s < step(gpus=8, parallel={"tp": 2, "pp": 2}).time_s
