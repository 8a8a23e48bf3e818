"""The measurement of layers, tried on a CPU: its layer against autograd, and files that can be gone on with."""

from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from cpsim.calibrate.measurement import load  # noqa: E402
from cpsim.case.model import Model  # noqa: E402
from cpsim.real.measure.layers import TINY, main  # noqa: E402
from cpsim.real.run import attention, layer_ops  # noqa: E402
from cpsim.real.run.layer import RECOMPUTE, Layer  # noqa: E402

F64 = torch.float64


def plain(layer, x, documents, cos, sin):
    """The same layer in plain PyTorch, for autograd."""
    m: Model = layer.model

    def norm(x, w):
        return torch.nn.functional.rms_norm(x, (m.hidden,), w, layer_ops.EPS)

    def rotate(x):
        low, high = x.chunk(2, -1)
        return torch.cat((low * cos[:, None] - high * sin[:, None], high * cos[:, None] + low * sin[:, None]), -1)

    qkv = (norm(x, layer.norms[0]) @ layer.linear["qkv"].T).view(len(x), -1, m.head_dim)
    q, k, v = qkv.split((m.heads, m.kv_heads, m.kv_heads), 1)
    parts = zip(*(y.transpose(0, 1).split(documents, 1) for y in (rotate(q), rotate(k), v)), strict=True)
    attend = torch.nn.functional.scaled_dot_product_attention
    out = torch.cat([attend(*qkv, is_causal=True, enable_gqa=True) for qkv in parts], 1).transpose(0, 1)
    x = x + out.flatten(1) @ layer.linear["proj"].T
    gate, up = (norm(x, layer.norms[1]) @ layer.linear["gate_up"].T).chunk(2, -1)
    return x + (torch.nn.functional.silu(gate) * up) @ layer.linear["down"].T


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_a_layer_equals_autograd_with_every_recomputation(recompute, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x.to(F64))  # ops widen to fp32 inside
    torch.manual_seed(0)
    documents = (20, 12)
    layer = Layer(TINY, 1, torch.device("cpu"), F64, kernel="math", compiled=False)
    angle = torch.randn(32, TINY.head_dim // 2, dtype=F64)
    x = torch.randn(32, TINY.hidden, dtype=F64, requires_grad=True)
    call = attention.prepare(documents, documents, causal=True, device="cpu")
    got = layer(x, call, (angle.cos(), angle.sin()), recompute)
    want = plain(layer, x, documents, angle.cos(), angle.sin())
    torch.testing.assert_close(got, want)
    dout, inputs = torch.randn_like(want), [x, *layer.weights()]
    torch.testing.assert_close(torch.autograd.grad(got, inputs, dout), torch.autograd.grad(want, inputs, dout))


def test_the_gradient_of_the_loss_equals_autograd():
    torch.manual_seed(0)
    logits, words = torch.randn(6, 9, requires_grad=True), torch.randint(9, (6,))
    loss, lse = layer_ops.cross_entropy(logits, words)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, words, reduction="none"))
    want = torch.autograd.grad(loss.sum(), logits)[0]
    torch.testing.assert_close(layer_ops.cross_entropy_bwd(logits.detach(), words, lse.detach()), want)


def test_a_run_goes_on_with_a_file_and_repeats_nothing(tmp_path, monkeypatch):
    out = tmp_path / "layers.jsonl"
    run = ["measure_layers", "--cpu", "--minutes", "1", "--out", str(out)]
    for argv in (run, [*run, "--resume"]):
        monkeypatch.setattr("sys.argv", argv)
        main()
    points = load(out).points
    counts = Counter(point["op"] for point in points)
    assert counts["error"] == 0
    assert counts["layer"] == 2 * len(RECOMPUTE)
    assert counts["gemm"] > 9
    assert {point["kind"] for point in points if point["op"] == "layer_op"} == set(layer_ops.OPS)
