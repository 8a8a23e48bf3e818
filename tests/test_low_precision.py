"""Frozen layers in FP8 beside adapters, attention in FP8, NVFP4, and experts in FP8."""

from dataclasses import asdict, replace

import pytest

from cpsim.case.gpu import gpu_named as gpu
from cpsim.case.load import scenario_from
from cpsim.case.model import MODELS, Lora
from cpsim.errors import InfeasibleError, NotMeasuredError, ScenarioError
from cpsim.models.attention.fp8 import faster
from cpsim.prediction.case import resolve
from cpsim.prediction.predict import predict
from cpsim.prediction.step.adapters import adapted, frozen_recipe
from cpsim.prediction.step.experts import Experts
from cpsim.prediction.step.frameworks import MEGATRON, Sizes
from cpsim.prediction.step.layer import BF16, Collective, ElementwisePass, Gemm
from cpsim.prediction.step.precision import DELAYED, MXFP8, NVFP4, check_gpu, in_fp8
from cpsim.prediction.steps import StepCase

SMALL = asdict(replace(MODELS["llama3-8b"], layers=4, vocab=32000))
ONE = {"gpus": 1, "cluster": "dgx-h100", "tokens": 8192, "model": SMALL, "strategy": "none", "kernel": "cudnn"}
RANK = 16
LORA = Lora(rank=RANK, drops=True, modules=("qkv", "proj"))


def one(**changes):
    return scenario_from({**ONE, **changes})


def products(code):
    return [node.what for node in (*code.forward, *code.backward) if isinstance(node.what, Gemm)]


def talks(code):
    return [node.what for node in (*code.forward, *code.backward) if isinstance(node.what, Collective)]


@pytest.mark.parametrize("tp", [1, 4])
def test_frozen_layers_multiply_in_fp8_and_adapters_in_bf16(tp):
    recipe = frozen_recipe(DELAYED, gpu("h100"))
    code = adapted(MEGATRON, LORA, recipe).layer(Sizes(MODELS["llama3-70b"], tp, 4096), False)
    thin = [what for what in products(code) if RANK in (what.m, what.n, what.k)]
    wide = [what for what in products(code) if what not in thin]
    assert len(thin) == 2 * (2 + 4)
    assert [what.kind for what in wide] == ["forward"] * 4 + ["dgrad"] * 4
    assert [what.fp8 for what in wide] == ["tensorwise"] * 4 + ["exact"] * 4
    assert not any(what.fp8 for what in thin)


def test_tensor_parallel_ranks_exchange_what_is_as_thin_as_the_rank():
    sizes = Sizes(MODELS["llama3-70b"], 4, 4096)
    plain = [what.nbytes for what in talks(adapted(MEGATRON, LORA).layer(sizes, False))]
    thin = BF16 * 4096 * RANK
    assert plain.count(thin) == 4  # of two adapters, forward and backward
    # both gathers of what products of weights' gradients would read are gone
    assert len(plain) - 4 == len(talks(MEGATRON.layer(sizes, False))) - 2


def test_only_tensor_cores_before_blackwell_want_weights_transposed():
    old, new = (frozen_recipe(DELAYED, gpu(name)) for name in ("h200", "gb200"))
    assert (old.weight_back, new.weight_back) == (2, 0)
    assert replace(old, weight_back=0, kernel_back="tensorwise") == new
    assert new.weight_step == 0


def test_frozen_weights_in_fp8_are_a_byte_each_and_take_less_time():
    low, plain = (predict(one(trainable={"lora": RANK}, precision=p)) for p in ({"fp8": "delayed"}, "bf16"))
    model = MODELS["llama3-8b"]
    assert low.memory["weights"] / plain.memory["weights"] == pytest.approx(0.5, rel=1e-3)
    assert low.time_s < 0.85 * plain.time_s
    assert low.peak_memory_bytes < plain.peak_memory_bytes - 4 * model.layer_parameters(1) // 2
    assert any("FP8 products" in note for note in low.notes)


def test_attention_in_fp8_is_as_much_faster_as_published():
    def parts(precision, **changes):
        case = resolve(one(precision=precision, **changes))
        steps = StepCase(case.scenario, case.cluster, case.profile)
        (found,) = steps.model(steps.parallel(), "none", {}).attention.of([(8192,)])
        return found.parts

    plain, low = parts({"fp8": "delayed"}), parts({"fp8": "delayed", "attention": "fp8"})
    for i, pass_ in enumerate(("fwd", "bwd")):
        name = f"attention {pass_}"
        assert plain[i][name] / low[i][name] == pytest.approx(faster("H100")[pass_])
        assert low[i]["elementwise of layers"] > 0  # casts
    with pytest.raises(NotMeasuredError, match="attention in FP8 was not measured on a100"):
        faster("a100")
    with pytest.raises(ScenarioError, match="attention: fp8"):
        one(precision={"fp8": "delayed", "attention": "bf16"})


def test_nvfp4_is_for_blackwell():
    with pytest.raises(InfeasibleError, match="h100 cannot multiply nvfp4, Blackwell can"):
        check_gpu(NVFP4, gpu("h100"))
    check_gpu(NVFP4, gpu("gb300"))
    sizes = Sizes(MODELS["llama3-70b"], 1, 8192)
    four, eight = (in_fp8(MEGATRON.layer(sizes, False), 1, recipe) for recipe in (NVFP4, MXFP8))
    assert {what.fp8 for what in products(four)} == {"nvfp4"}
    casts = [sum(n.what.nbytes for n in c.forward if isinstance(n.what, ElementwisePass)) for c in (four, eight)]
    assert casts[0] > casts[1]


def test_experts_multiply_in_fp8_and_their_router_does_not():
    sizes = Sizes(MODELS["qwen3-30b-a3b"], 1, 4096, 8)
    plain = MEGATRON.layer(sizes, False)
    code = in_fp8(plain, 1, MXFP8)
    router = [what for what in products(code) if sizes.model.experts in (what.m, what.n, what.k)]
    assert len(router) >= 3
    assert all(what.fp8 == "mxfp8" for what in products(code) if what not in router)
    assert not any(what.fp8 for what in router)
    experts = sizes.experts
    assert isinstance(experts, Experts)
    rows, hidden = sum(experts.rows), sizes.model.hidden
    casts = [
        node for node in code.forward if isinstance(node.what, ElementwisePass) and any("fp8" in x for x in node.makes)
    ]
    of_tokens = [node for node in casts if node.reads[0].startswith("sent")]
    assert [node.what.nbytes for node in of_tokens] == [MXFP8.cast * rows * hidden]  # once, of all experts
