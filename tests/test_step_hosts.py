"""Hosts that launch layers: by cut and experts as measured, on a line between, catching up from pass to pass."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from targets import check

from cpsim.case.resolve import parallel_of
from cpsim.case.scenario import Scenario
from cpsim.errors import InfeasibleError
from cpsim.models.profile import load_profile
from cpsim.prediction.predict import predict
from cpsim.prediction.results import Prediction
from cpsim.prediction.step.hosts import layer_seconds, update_seconds
from cpsim.prediction.step.layer import ElementwisePass
from cpsim.prediction.step.program import Node, Program
from cpsim.prediction.step.timing import Planned, Prices, Simulated, planned

HOST = load_profile("h200").host
ALONE = parallel_of(None, 1, 1, "none", "none", 1)
MODEL = {"layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 8, "ffn": 2816, "vocab": 32000}
STEP = {
    "framework": "megatron",
    "strategy": "none",
    "model": MODEL,
    "gpus": 1,
    "cluster": "dgx-h200",
    "kernel": "cudnn",
    "mask": "causal",
    "tokens": 1024,
    "parallel": {"sharding": "none"},
}


def step(**changes: object) -> Prediction:
    found = predict(Scenario.model_validate({**STEP, **changes}))
    assert isinstance(found, Prediction)
    return found


def seconds(experts: int = 0, code: str = "megatron eager", **changes: object) -> tuple[float, float]:
    found = layer_seconds(HOST, code, replace(ALONE, **changes), experts)
    assert found
    return found


def measured(name: str) -> tuple[float, float]:
    return HOST.launch_s[f"layer {name} fwd"], HOST.launch_s[f"layer {name} bwd"]


def test_what_was_measured_is_taken_as_it_is() -> None:
    assert seconds() == measured("megatron eager none")
    assert seconds(tp=2) == measured("megatron eager tp none")
    assert seconds(recompute="full") == measured("megatron eager full")
    assert seconds(code="megatron fp8") == measured("megatron fp8 none")


@pytest.mark.parametrize("experts", [4, 16])
def test_experts_are_as_measured_beside_other_ranks(experts: int) -> None:
    assert seconds(experts, dp=2, ep=2) == pytest.approx(measured(f"megatron eager {experts} experts ddp ep none"))
    assert seconds(experts) == pytest.approx(measured(f"megatron eager {experts} experts none"))


def test_other_numbers_of_experts_lie_on_a_line() -> None:
    few, some, many = (seconds(count)[0] for count in (4, 10, 16))
    assert some == pytest.approx((few + many) / 2)


def test_graphs_of_attention_leave_what_experts_add() -> None:
    whole, dense, left = seconds(8, dp=2, ep=2), seconds(dp=2), seconds(8, dp=2, ep=2, cuda_graphs="attention")
    assert left == pytest.approx((whole[0] - dense[0], whole[1] - dense[1]))


def test_cuts_that_were_not_measured_together_add_up() -> None:
    tensor, context, both = (seconds(dp=2, tp=tp, cp=cp)[0] for tp, cp in ((2, 1), (1, 2), (2, 2)))
    assert both > max(tensor, context)


def test_small_layers_wait_for_their_host_unless_they_are_graphs() -> None:
    eager, graphs = step(), step(parallel={"sharding": "none", "cuda_graphs": "layers"})
    assert eager.host_share > 0.5
    assert graphs.host_share == 0
    launched = MODEL["layers"] * sum(seconds())
    assert launched < eager.time_s < 1.5 * launched + graphs.time_s


def test_a_host_that_is_late_in_one_pass_catches_up_in_the_other() -> None:
    """Forward it is late, backward not: several microbatches take what both passes take the GPU or the host."""
    wide = {**MODEL, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008}
    how = {"model": wide, "tokens": 8 * 1536, "context": 1536}
    late = step(**how, parallel={"sharding": "none", "microbatches": 8})
    graphs = step(**how, parallel={"sharding": "none", "microbatches": 8, "cuda_graphs": "layers"})
    host = 8 * wide["layers"] * sum(seconds())
    one = step(**how | {"tokens": 1536}, parallel={"sharding": "none"})
    prompt = step(**how | {"tokens": 1536}, parallel={"sharding": "none", "cuda_graphs": "layers"})
    assert late.time_s / graphs.time_s <= one.time_s / prompt.time_s
    check("steps whose hosts catch up, over what layers take", late.time_s / max(graphs.time_s, host) - 1)


def test_adapters_take_hosts_what_was_measured_and_add_to_other_cuts() -> None:
    def adapted(**changes: object) -> tuple[float, float]:
        found = layer_seconds(HOST, "megatron fp8", replace(ALONE, **changes), adapters=True)
        assert found
        return found

    assert adapted() == measured("megatron fp8 lora none")
    more = measured("megatron fp8 tp none")[0] - measured("megatron fp8 none")[0]
    assert adapted(tp=2)[0] == pytest.approx(adapted()[0] + more)
    assert step(trainable={"lora": 16}).host_share > 0.5


def test_other_frameworks_have_no_graphs() -> None:
    with pytest.raises(InfeasibleError, match="cuda_graphs: expected framework megatron, got torch"):
        step(framework="torch", kernel="sdpa_flash", parallel={"sharding": "none", "cuda_graphs": "layers"})


class Priced:
    """Prices of ops by their bytes: a microsecond each."""

    kernel = "fa2"
    costs = SimpleNamespace(profile=load_profile("h200"))

    def parts(self, node: Node) -> dict[str, float]:
        assert isinstance(node.what, ElementwisePass)
        return {"elementwise": 1e-6 * node.what.nbytes}


def op(us: int, name: str, reads: tuple[str, ...] = (), **more: Any) -> Node:
    return Node(ElementwisePass("copy", us), reads, {name: 0}, **more)


LAUNCH: dict[str, tuple[float, ...]] = {"compute": (10e-6, 10e-6)}


def waiting(awaits: tuple[str, ...]) -> Planned:
    """Three ops of 100, 5 and 5 µs; the host may read what the first one makes before it launches the second."""
    forward = (op(100, "a"), op(5, "b", ("a",), awaits=awaits), op(5, "c", ("b",)))
    return planned(Program(forward=forward, backward=(op(200, "d", ("c",)),)), cast(Prices, Priced()))


def ends_us(found: Simulated) -> list[int]:
    return [round(1e6 * end) for end in found.timeline.end_s]


def test_a_host_that_reads_what_a_gpu_makes_launches_nothing_before() -> None:
    assert ends_us(waiting(()).simulated(({}, {}), LAUNCH)) == [110, 115, 120, 320]
    found = waiting(("a",)).simulated(({}, {}), LAUNCH)
    assert ends_us(found) == [110, 125, 135, 340]
    assert found.ahead_s == pytest.approx(200e-6)


def test_a_host_is_ahead_until_it_reads_something() -> None:
    ahead = {"ahead_s": 200e-6}
    assert ends_us(waiting(()).simulated(({}, {}), LAUNCH, **ahead)) == [100, 105, 110, 310]
    assert ends_us(waiting(("a",)).simulated(({}, {}), LAUNCH, **ahead)) == [100, 115, 125, 330]
    late = waiting(("a",)).simulated(({}, {}), LAUNCH, ahead_s=-50e-6)
    assert ends_us(late)[0] == 160


def test_biases_of_experts_take_hosts_longer_by_how_many_there_are() -> None:
    few, many = (layer_seconds(HOST, "megatron eager", ALONE, count, biased=True) for count in (4, 16))
    assert few
    assert many
    assert sum(few) > sum(seconds(4))
    assert sum(many) - sum(few) > sum(seconds(16)) - sum(seconds(4))
    assert update_seconds(HOST, "megatron eager", ALONE, 16, biased=True) > update_seconds(
        HOST, "megatron eager", ALONE, 16
    )
