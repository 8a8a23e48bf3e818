"""MLPs in chunks of the sequence: ops and tensors beside what PyTorch runs, what follows for time and memory, and what
makes no sense."""

from collections import Counter
from dataclasses import asdict, replace

import pytest

from cpsim.case.load import scenario_from
from cpsim.case.model import MODELS
from cpsim.case.scenario import ParallelSection
from cpsim.errors import InfeasibleError, ScenarioError
from cpsim.prediction.case import resolve
from cpsim.prediction.predict import predict
from cpsim.prediction.step.frameworks import HUGGING_FACE, Sizes
from cpsim.prediction.step.layer import ElementwisePass, Gemm
from cpsim.prediction.step.memory import KINDS, chunk_memory, occupancy
from cpsim.prediction.step.program import GRADIENT, SHARD, live_bytes
from cpsim.prediction.step.tiles import TILE, tiled
from cpsim.prediction.steps import StepCase
from studies.longest import MARKS, PAGE, RECIPES, Recipe

SMALL = asdict(replace(MODELS["llama3-8b"], layers=6, vocab=32000))
FULL = {"sharding": "fsdp", "recompute": "full", "loss_chunks": 8}
TOKENS = 32768


def case_of(parallel=FULL, **changes):
    base = {"gpus": 2, "cluster": "dgx-h100", "tokens": 2 * TOKENS, "model": SMALL, "framework": "huggingface"}
    return scenario_from({**base, "kernel": "fa2", "strategy": "none", "parallel": dict(parallel), **changes})


def model_of(parallel=FULL, **changes):
    case = resolve(case_of(parallel, **changes))
    steps = StepCase(case.scenario, case.cluster, case.profile)
    return steps.model(steps.parallel(), "none", {})


def products(nodes):
    return sum(node.what.flops for node in nodes if isinstance(node.what, Gemm))


def of_mlp(nodes):
    """Products of gate, up and down: those with the inner size."""
    return [n for n in nodes if isinstance(n.what, Gemm) and SMALL["ffn"] in (n.what.m, n.what.n, n.what.k)]


@pytest.mark.parametrize(("recompute", "runs", "before"), [("none", 4, 3), ("full", 5, 4 - 1 / 3)])
def test_products_run_as_often_as_deepspeed_says(recompute, runs, before):
    """Forward twice, and three times where layers are computed again, of which a whole MLP leaves out the last product;
    gradients are twice as much."""
    whole, chunks = (model_of({**FULL, "recompute": recompute, "mlp_chunks": n}).program(TOKENS) for n in (1, 4))
    once = products(of_mlp(whole.forward))
    of = [products(of_mlp((*run.forward, *run.backward))) / once for run in (whole, chunks)]
    assert of == pytest.approx([before, runs])


def test_pytorch_runs_the_same_products_and_sums():
    """An MLP in chunks by autograd's own means, whose products, and sums into gradients, PyTorch counts."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    chunks, tokens, hidden, inner = 4, 64, 16, 48
    met = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.default:
                met[args[0].shape[0], args[1].shape[1], args[0].shape[1]] += 1
            if func is torch.ops.aten.add_.Tensor:
                met["sum", args[0].numel()] += 1
            return func(*args, **(kwargs or {}))

    class Tiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, run):
            ctx.save_for_backward(x)
            ctx.run = run
            return torch.cat([run(part) for part in x.chunk(chunks)])

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            dx = torch.zeros_like(x)
            for part, into, given in zip(x.detach().chunk(chunks), dx.chunk(chunks), dy.chunk(chunks), strict=True):
                part.requires_grad_().grad = into
                with torch.enable_grad():
                    out = ctx.run(part)
                torch.autograd.backward(out, given)
            return dx, None

    gate, up, down = (torch.nn.Linear(*size, bias=False) for size in ((hidden, inner),) * 2 + ((inner, hidden),))
    x = torch.randn(tokens, hidden, requires_grad=True)
    with Counting():
        Tiled.apply(x, lambda part: down(torch.nn.functional.silu(gate(part)) * up(part))).sum().backward()
    model = replace(MODELS["llama3-8b"], hidden=hidden, ffn=inner)
    code = tiled(HUGGING_FACE.layer(Sizes(model, 1, tokens), False), chunks)
    found = Counter()
    for node in (*code.forward, *code.backward):
        if isinstance(node.what, Gemm) and inner in (node.what.m, node.what.n, node.what.k):
            found[node.what.m, node.what.n, node.what.k] += node.what.times
        is_sum = isinstance(node.what, ElementwisePass) and node.reads[:1] and node.reads[0] == TILE + node.reads[-1]
        if is_sum:
            found["sum", node.what.nbytes // 6] += node.what.times
    between = sum(count for key, count in met.items() if key == ("sum", tokens // chunks * hidden))
    assert between >= chunks  # autograd adds gradients of gate and up there, too, or into them
    key = "sum", tokens // chunks * hidden
    met.pop(key), found.pop(key)
    assert found == met


def test_inner_tensors_are_those_of_one_chunk():
    whole, chunks = (model_of({**FULL, "mlp_chunks": n})._programs(TOKENS, -1)(1) for n in (1, 8))
    own, parts = (
        {name.split(" @")[0]: size for node in run.backward for name, size in node.makes.items()}
        for run in (whole, chunks)
    )
    for name in ("gate", "up", "silu", "product", "dproduct", "dgate", "dup"):
        assert parts[TILE + name] == own[name] / 8
    for name in ("down", "gate", "up"):
        assert parts[f"{GRADIENT} {name}"] == own[f"{GRADIENT} {name}"] == parts[f"{TILE}{GRADIENT} {name}"]


def test_kept_is_only_what_goes_into_the_mlp():
    """Without recomputation a layer keeps gate, up, and both products of SwiGLU less."""
    whole, chunks = (predict(case_of({**FULL, "recompute": "none", "mlp_chunks": n})) for n in (1, 4))
    inner = 4 * 2 * TOKENS * SMALL["ffn"]
    # the peak of a whole MLP lies where that of the last layer is on its way back
    assert whole.memory["activations"] - chunks.memory["activations"] >= (SMALL["layers"] - 1) * inner


def test_chunks_take_longer_and_hold_less():
    found = [predict(case_of({**FULL, "mlp_chunks": n})) for n in (1, 2, 8, 64)]
    times, memory = [one.time_s for one in found], [one.needed_bytes for one in found]
    assert times == sorted(times)
    assert times[0] < times[1]
    assert times[2] < times[3]
    assert memory == sorted(memory, reverse=True)
    assert memory[0] > memory[2]


def test_hosts_launch_every_chunk():
    """A host so slow that it is always late takes what its launches take, and those of chunks are more."""
    few, many = (predict(case_of({**FULL, "mlp_chunks": n}, host=10.0, tokens=2048)) for n in (2, 8))
    assert many.time_s > 1.5 * few.time_s


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("offload", [{}, {"offload": "activations"}])
def test_folded_layers_have_the_memory_of_all_of_them(recompute, offload):
    if offload and recompute == "none":
        return
    make = model_of({**FULL, "recompute": recompute, "mlp_chunks": 4}, **offload)._programs(TOKENS, 0)
    for layers in (5, 6, 9):
        run = make(layers)
        live = live_bytes([*run.forward, *run.backward], (SHARD,), lambda _: 0, 1)[0]
        assert chunk_memory(lambda count: occupancy(make(count), (SHARD,)), layers).peak.sum() == live.max()


def test_one_chunk_is_the_mlp_as_it_was():
    said, unsaid = (predict(case_of({**FULL, **more})) for more in ({"mlp_chunks": 1}, {}))
    assert said.time_s == unsaid.time_s
    assert (said.time_s_low, said.time_s_high) == (unsaid.time_s_low, unsaid.time_s_high)
    assert repr(ParallelSection(mlp_chunks=1)) == repr(ParallelSection())


def test_inputs_of_layers_wait_on_the_host():
    """Between both passes of a stage only the last layer has its input."""
    kept = []
    for offload in ({}, {"offload": "activations"}):
        found = occupancy(model_of({**FULL, "mlp_chunks": 4}, **offload)._programs(TOKENS, 0)(6), (SHARD,))
        kept.append(int(found.live[KINDS.index("activations"), found.forward]))
    layer = 2 * TOKENS * SMALL["hidden"]
    assert kept[0] - kept[1] == 5 * layer
    fast, slow = (predict(case_of(FULL, **more)).time_s for more in ({}, {"offload": "activations"}))
    assert slow >= fast


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"framework": "torch"}, "mlp_chunks: expected framework huggingface"),
        ({"framework": "megatron", "parallel": {"mlp_chunks": 4}}, "mlp_chunks: expected framework huggingface"),
        ({"compile": True}, "mlp_chunks: 4 chunks run backward within"),
        ({"parallel": {**FULL, "tp": 2, "mlp_chunks": 4}}, "mlp_chunks: chunks are predicted without tensor"),
        ({"trainable": {"lora": 8}, "parallel": {"mlp_chunks": 4}}, "mlp_chunks: .*with adapters"),
        (
            {"offload": "activations", "parallel": {"mlp_chunks": 4}},
            "offload: huggingface has none without recomputation",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(changes, match):
    with pytest.raises(InfeasibleError, match=match):
        predict(case_of(**{"parallel": {**FULL, "mlp_chunks": 4}, **changes}))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "many"])
def test_what_is_no_number_of_chunks_is_refused(wrong):
    with pytest.raises(ScenarioError, match="mlp_chunks"):
        case_of({"mlp_chunks": wrong})


def test_chunks_are_among_what_would_fit():
    """Where inner tensors are what does not fit."""
    case = Recipe(what="loss in chunks", tokens=0, ulysses=False).case(160_000)
    found = predict(case)
    assert not found.fits
    (change,) = [one for one in found.would_fit if "mlp_chunks" in one.change]
    again = predict({**case, "parallel": {**case["parallel"], **change.change}})
    assert again.fits
    assert (again.time_s, again.needed_bytes) == (pytest.approx(change.time_s), change.needed_bytes)


def test_features_are_worth_what_alst_says():
    """In the order that it publishes, and each length within a third; the page has the table."""
    found = [recipe.longest() for recipe in RECIPES]
    assert found == sorted(found)
    for recipe, longest in zip(RECIPES, found, strict=True):
        assert abs(longest / recipe.tokens - 1) < 1 / 3
    table = PAGE.read_text(encoding="utf-8").split(MARKS[0])[1].split(MARKS[1])[0]
    assert [f"{n:,}" for n in found] == [line.split(" | ")[3] for line in table.splitlines()[2:]]
