"""Training steps whose linear layers compute in FP8, and whose tensor parallelism runs beside products."""

import pytest
from targets import check

from cpsim.case.load import scenario_from
from cpsim.case.model import MODELS
from cpsim.case.resolve import cluster_of
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.models.gemm import FP8_BYTES, gemm_seconds, in_fp8
from cpsim.models.network.collective import wire_bytes
from cpsim.models.profile import load_profile
from cpsim.prediction.predict import predict
from cpsim.prediction.step.frameworks import FRAMEWORKS, MEGATRON, TORCH, TORCHTITAN, Sizes
from cpsim.prediction.step.layer import Collective, Copy, ElementwisePass, Gemm, flops
from cpsim.prediction.step.precision import CURRENT, DELAYED, MXFP8, ROWWISE, TENSORWISE, kept_in_fp8
from cpsim.prediction.step.program import program
from cpsim.prediction.steps import StepCase

LLAMA, TOKENS = MODELS["llama3-8b"], 16384
STEP = {
    "gpus": 32,
    "cluster": "dgx-h200",
    "model": "llama3-8b",
    "tokens": 4 * 65536,
    "context": 8192,
    "kernel": "fa2",
    "strategy": "none",
    "mask": "causal_document",
    "framework": "torch",
    "parallel": {"tp": 8, "microbatches": 8},
}
OVERLAPPED = [(MEGATRON, False), (TORCH, True), (TORCHTITAN, True)]


def layer(framework, compiled=True, tp=8, recipe=None, overlapped=False):
    """A layer as a framework runs it."""
    return framework.runs(Sizes(LLAMA, tp, TOKENS), compiled, recipe, overlapped)


def sides(code):
    return (*code.forward, *code.backward)


def ops(code):
    return [node.what for node in sides(code)]


def linears(code):
    return [op for op in ops(code) if isinstance(op, Gemm)]


def step(**changes):
    parallel = STEP["parallel"] | changes.pop("parallel", {})
    scenario = scenario_from(STEP | changes | {"parallel": parallel})
    case = StepCase(scenario, cluster_of(scenario), load_profile("h200"))
    return case.simulate(case.parallel(), "none", {})


def moved(nodes, tp):
    """Bytes that a rank receives from others of its tensor-parallel group."""
    talks = [node.what for node in nodes if node.stream == "comm"]
    copied = sum(op.nbytes for op in talks if isinstance(op, Copy))
    return copied + sum(float(wire_bytes(op.kind, op.nbytes, tp)) for op in talks if isinstance(op, Collective))


@pytest.mark.parametrize(("framework", "compiled"), OVERLAPPED)
@pytest.mark.parametrize("tp", [2, 8])
def test_chunks_are_the_whole(framework, compiled, tp):
    """Cut into chunks, products are as many FLOP, and ranks exchange as many bytes."""
    whole, chunks = (layer(framework, compiled, tp, overlapped=flag) for flag in (False, True))
    for before, after in ((whole.forward, chunks.forward), (whole.backward, chunks.backward)):
        assert flops(n.what for n in after) == flops(n.what for n in before)
        assert moved(after, tp) == pytest.approx(moved(before, tp))
    assert len(linears(chunks)) > len(linears(whole))
    made = {name: nbytes for node in sides(whole) for name, nbytes in node.makes.items() if "chunks" not in name}
    again = {name: nbytes for node in sides(chunks) for name, nbytes in node.makes.items()}
    assert {name: again[name] for name in made} == made


@pytest.mark.parametrize(("framework", "compiled"), OVERLAPPED)
def test_every_chunk_is_computed_again(framework, compiled):
    whole, chunks = (layer(framework, compiled, overlapped=flag) for flag in (False, True))
    runs = [code.again((), framework.again_to.get("full", ())) for code in (whole, chunks)]
    assert flops(node.what for node in runs[0]) == flops(node.what for node in runs[1]) > 0


@pytest.mark.parametrize(("framework", "compiled"), OVERLAPPED)
def test_a_chunk_is_read_after_the_op_that_brings_it(framework, compiled):
    made = set()
    for node in layer(framework, compiled, overlapped=True).forward:
        assert set(node.reads) - {"x", "weights"} <= made
        made |= node.makes.keys()


def test_of_pytorch_a_product_whose_result_is_summed_with_others_is_not_fused_with_its_scatter():
    code = layer(TORCH, overlapped=True)
    assert not [n for n in code.forward if isinstance(n.what, Collective)]
    assert [n.what.kind for n in code.backward if isinstance(n.what, Collective)] == ["reduce_scatter"] * 2


@pytest.mark.parametrize("framework", ["megatron", "torch", "torchtitan"])
def test_overlap_hides_part_of_the_communication(framework):
    sharding = {"sharding": "zero1" if framework == "megatron" else "fsdp"}
    compiled = {} if framework == "megatron" else {"compile": True}
    long = {"tokens": 4 * STEP["tokens"], "context": 4 * STEP["context"]}  # hosts are never late
    alone, beside = (
        step(framework=framework, parallel=sharding | {"tp_overlap": flag}, **long, **compiled)
        for flag in (False, True)
    )
    assert alone.time_s - alone.parts["collective"] < beside.time_s < 0.97 * alone.time_s
    assert beside.sent == pytest.approx(alone.sent)


def test_frameworks_that_cannot_overlap_say_so():
    with pytest.raises(InfeasibleError, match="huggingface does not overlap"):
        step(framework="huggingface", parallel={"tp_overlap": True})
    with pytest.raises(InfeasibleError, match="in compiled layers only; use compile: true"):
        step(compile=False, parallel={"tp_overlap": True})
    with pytest.raises(ScenarioError, match="tp_overlap"):
        step(parallel={"tp_overlap": 2})


def test_products_in_fp8_take_what_is_published_of_single_kernels():
    """Twelve products of a layer on H200, 15872 tokens: Transformer Engine's table says 31.968 and 16.785 ms."""
    params, tokens = load_profile("h200").layers.gemm, 15872
    low, seconds = in_fp8(params, "tensorwise"), [0.0, 0.0]
    for k, n in ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096)):
        for sizes in ((tokens, n, k), (tokens, k, n), (n, k, tokens)):
            seconds[0] += float(gemm_seconds(params, *sizes))
            seconds[1] += float(gemm_seconds(low, *sizes, operand_bytes=FP8_BYTES))
    check("Transformer Engine's products in FP8 over bf16", seconds[0] / seconds[1] / (31.968 / 16.785) - 1)


@pytest.mark.parametrize("recipe", [TENSORWISE, ROWWISE, DELAYED, CURRENT, MXFP8], ids=lambda one: one.name)
@pytest.mark.parametrize("tp", [1, 8])
def test_all_products_of_a_layer_are_in_fp8_and_nothing_is_lost(recipe, tp):
    framework = TORCH if recipe.name in TORCH.recipes else MEGATRON
    whole, low = (layer(framework, tp=tp, recipe=one) for one in (None, recipe))
    assert all(not op.fp8 for op in linears(whole))
    assert all(op.fp8 for op in linears(low))
    assert flops(linears(low)) == flops(linears(whole))
    made, given = {name for node in low.forward for name in node.makes}, {"x", "dy", "weights"}
    assert {name for node in low.backward for name in node.reads} <= made | given | {
        name for node in low.backward for name in node.makes
    }
    assert low.kept <= made
    last = framework.last(Sizes(LLAMA, tp, TOKENS), True, 1)
    assert all(not op.fp8 for op in linears(last))


def cast_bytes(code):
    """Bytes of casts and of what finds their scales: what is made is in FP8, or a scale."""
    names = ("fp8", "scale", "turned")
    return sum(
        node.what.nbytes
        for node in sides(code)
        if isinstance(node.what, ElementwisePass) and all(name.endswith(names) for name in node.makes)
    )


def test_tensorwise_casts_read_and_write_what_torchao_s_kernels_do():
    """Of an input 2 + 3 bytes and 3 for its transpose, of a gradient 2 + 4, of weights a transpose in FP8."""
    hidden, kv, ffn = LLAMA.hidden, LLAMA.kv_heads * LLAMA.head_dim, LLAMA.ffn
    inputs = 3 * hidden + ffn
    gradients = hidden + 2 * kv + hidden + 2 * ffn + hidden
    weights = sum(inner * outer for inner, outer in LLAMA.linears(1).values())
    expected = TOKENS * (8 * inputs + 6 * gradients) + 2 * weights
    assert cast_bytes(layer(TORCH, tp=1, recipe=TENSORWISE)) == expected


def test_tensor_parallel_ranks_gather_fp8_as_their_recipe_does():
    plain, low, rows = (layer(TORCH, recipe=one) for one in (None, TENSORWISE, ROWWISE))
    gathered = [
        sum(op.nbytes for op in ops(code) if isinstance(op, Collective) and op.kind == "all_gather")
        for code in (plain, low, rows)
    ]
    assert gathered[0] == 2 * gathered[1] == gathered[2]
    scattered = [
        sum(op.nbytes for op in ops(code) if isinstance(op, Collective) and op.kind == "reduce_scatter")
        for code in (plain, low, rows)
    ]
    assert scattered[0] == scattered[1] == scattered[2]


def test_rowwise_casts_stand_between_a_gather_and_its_products_which_are_not_fused():
    code = layer(TORCHTITAN, recipe=ROWWISE, overlapped=True)
    kinds = [node.what.kind for node in code.forward if isinstance(node.what, Collective)]
    assert kinds == ["all_gather", "all_gather"]
    assert any(isinstance(node.what, Copy) for node in code.forward)


def kept_bytes(code, kept):
    sizes = {name: nbytes for node in code.forward for name, nbytes in node.makes.items()}
    return sum(sizes[name] for name in kept)


def test_transformer_engine_keeps_inputs_of_linear_layers_in_fp8():
    """Of three inputs one byte less for each element; what attention needs of its result stays beside the fourth."""
    plain, low = (layer(MEGATRON, tp=1, recipe=one) for one in (None, DELAYED))
    sizes = Sizes(LLAMA, 1, TOKENS)
    saved = (2 * sizes.whole + sizes.inner) // 2 - sizes.out // 2
    assert kept_bytes(plain, plain.kept) - kept_bytes(low, low.kept) == saved


def test_torchao_keeps_inputs_as_they_are():
    plain, low = (layer(TORCH, tp=1, recipe=one) for one in (None, TENSORWISE))
    assert kept_bytes(plain, plain.kept) == kept_bytes(low, low.kept)


def test_what_runs_again_is_cast_again():
    code = layer(MEGATRON, tp=1, recipe=CURRENT)
    kept = kept_in_fp8(MEGATRON.kept["mlp"], code.backward)
    run = program(code, None, None, 1, kept, again_to=MEGATRON.again_to["mlp"])
    again = [node for node in run.backward if isinstance(node.what, Gemm) and node.what.kind == "forward"]
    assert [bool(node.what.fp8) for node in again] == [True, True]
    assert "swiglu fp8 @0 again" in {name for node in run.backward for name in node.makes}


def test_fsdp_gathers_linear_layers_in_fp8_where_one_scale_is_enough():
    def gathered(precision):
        scenario = scenario_from(STEP | {"precision": precision, "compile": True})
        case = StepCase(scenario, cluster_of(scenario), load_profile("h200"))
        nodes = case.model(case.parallel(), "none", {}).program(8192).forward
        return [n.what.nbytes for n in nodes if n.stream == "gather" and isinstance(n.what, Collective)]

    plain, low, rows = (gathered(one) for one in ("bf16", {"fp8": "tensorwise"}, {"fp8": "rowwise"}))
    assert plain == rows
    assert plain[0] == low[0]  # embedding and output
    assert [2 * nbytes for nbytes in low[1:]] == plain[1:]


def test_bf16_is_what_nothing_said_is():
    assert step(precision="bf16") == step()


def test_fp8_is_faster_and_less_sure():
    scenarios = [scenario_from(STEP | {"compile": True, "precision": one}) for one in ("bf16", "fp8")]
    plain, low = (predict(scenario) for scenario in scenarios)
    assert 0.5 * plain.time_s < low.time_s < plain.time_s
    assert [note.startswith("FP8 products: ") for note in low.notes].count(True) == 1
    assert not any("FP8" in note for note in plain.notes)
    wide, narrow = ((one.time_s_high - one.time_s_low) / one.time_s for one in (low, plain))
    assert wide > narrow


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"framework": "huggingface", "precision": "fp8"}, "huggingface is predicted in bf16 only"),
        ({"framework": "torch", "precision": {"fp8": "delayed"}}, "torch has fp8 tensorwise, rowwise, got delayed"),
        ({"framework": "torch", "compile": False, "precision": "fp8"}, "of compiled layers; use compile: true"),
        ({"framework": "megatron", "precision": {"fp8": "mxfp8"}}, "h200 cannot multiply mxfp8"),
    ],
)
def test_what_cannot_run_in_fp8_says_so(changes, says):
    with pytest.raises(InfeasibleError, match=says):
        step(**changes)


def test_a_gpu_without_fp8_says_so():
    scenario = scenario_from(STEP | {"cluster": "p4de", "framework": "megatron", "precision": "fp8"})
    case = StepCase(scenario, cluster_of(scenario), load_profile("h200"))
    with pytest.raises(InfeasibleError, match="a100 cannot multiply FP8; use bf16"):
        case.simulate(case.parallel(), "none", {})


@pytest.mark.parametrize("precision", ["fp4", {"fp8": "fast"}, {"fp8": "delayed", "bf16": 1}, ["fp8"], 8, {}])
def test_other_precisions_are_refused(precision):
    with pytest.raises(ScenarioError, match="precision"):
        scenario_from(STEP | {"precision": precision})


def test_precision_belongs_to_steps():
    with pytest.raises(ScenarioError, match="precision: belongs to a whole step"):
        scenario_from(
            {key: STEP[key] for key in ("cluster", "model")}
            | {"gpus": 8, "tokens": 8192, "part": "layer", "precision": "fp8"}
        )


def test_the_first_recipe_is_the_framework_s_own():
    assert {name: next(iter(one.recipes), None) for name, one in FRAMEWORKS.items()} == {
        "megatron": "delayed",
        "torch": "tensorwise",
        "torchtitan": "tensorwise",
        "huggingface": None,
    }
