"""The executor's kernels on a CPU: attention against autograd, merges against the whole softmax."""

import io
import json
import shutil
import sys
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from cases import ALL_MASKS, MASK_OPTIONS  # noqa: E402

from cpsim.calibrate.measurement import Writer  # noqa: E402
from cpsim.masks.shapes import mask_slices  # noqa: E402
from cpsim.masks.slices import dense_mask  # noqa: E402
from cpsim.real.measure import kernels as measure_kernels  # noqa: E402
from cpsim.real.run import attention, elementwise, inductor  # noqa: E402


def tensors(num_q, num_k, heads=4, kv_heads=2, dim=16):
    torch.manual_seed(0)
    make = lambda n, h: torch.randn(n, h, dim, dtype=torch.float64)  # noqa: E731
    return make(num_q, heads), make(num_k, kv_heads), make(num_k, kv_heads), make(num_q, heads)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_lens", "k_lens"), [((12,), (12,)), ((5,), (11,)), ((3, 7), (6, 7))])
def test_math_backward_equals_autograd(q_lens, k_lens, causal):
    q, k, v, dout = tensors(sum(q_lens), sum(k_lens))
    for x in (q, k, v):
        x.requires_grad_(True)
    call = attention.prepare(q_lens, k_lens, causal=causal, device="cpu")
    outs, q0, k0 = [], 0, 0
    for nq, nk in zip(q_lens, k_lens, strict=True):
        mask = torch.ones(nq, nk, dtype=torch.bool).tril(nk - nq) if causal else None
        parts = (x.transpose(0, 1) for x in (q[q0 : q0 + nq], k[k0 : k0 + nk], v[k0 : k0 + nk]))
        one = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True)
        outs.append(one.transpose(0, 1))
        q0, k0 = q0 + nq, k0 + nk
    want = torch.cat(outs)
    want.backward(dout)
    out, lse = attention.forward("math", q.detach(), k.detach(), v.detach(), call)
    torch.testing.assert_close(out, want.detach())
    grads = attention.backward("math", dout, q.detach(), k.detach(), v.detach(), out, lse, call)
    for got, x in zip(grads, (q, k, v), strict=True):
        torch.testing.assert_close(got, x.grad)


OF_ANY_MASK = [("flex", mask) for mask in ALL_MASKS] + [
    (kernel, mask) for kernel in ("sdpa_math", "math") for mask in ("lambda", "block_sparse", "global_sliding")
]


@pytest.mark.parametrize(("kernel", "mask"), OF_ANY_MASK)
def test_kernels_of_any_mask_equal_autograd(kernel, mask):
    slices = mask_slices(mask, (80, 7, 53), MASK_OPTIONS.get(mask, {}))
    q, k, v, dout = tensors(140, 140)
    seen = torch.from_numpy(dense_mask(slices, 140))
    for x in (q, k, v):
        x.requires_grad_(True)
    parts = (x.transpose(0, 1) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=seen, enable_gqa=True).transpose(0, 1)
    want[seen.any(1)].backward(dout[seen.any(1)])
    given = q.detach(), k.detach(), v.detach()
    call = attention.prepare_mask(slices, 140, 140, device="cpu")
    out, lse = attention.forward(kernel, *given, call)
    torch.testing.assert_close(out, want.detach().nan_to_num())
    for got, x in zip(attention.backward(kernel, dout, *given, out, lse, call), (q, k, v), strict=True):
        torch.testing.assert_close(got, x.grad)


@pytest.mark.parametrize("kernel", ["flex", "sdpa_math"])
@pytest.mark.parametrize(("q_lens", "k_lens"), [((150,), (290,)), ((30, 0, 170), (160, 5, 170))])
def test_kernels_of_any_mask_run_packed_sequences(kernel, q_lens, k_lens):
    q, k, v, dout = tensors(sum(q_lens), sum(k_lens))
    for causal in (False, True):
        call = attention.prepare(q_lens, k_lens, causal=causal, device="cpu")
        want = attention.forward("math", q, k, v, call)
        torch.testing.assert_close(attention.forward(kernel, q, k, v, call), want)
        grads = attention.backward("math", dout, q, k, v, *want, call)
        torch.testing.assert_close(attention.backward(kernel, dout, q, k, v, *want, call), grads)


def test_flash_kernels_refuse_other_masks():
    q, k, v, _ = tensors(8, 8)
    call = attention.prepare_mask(mask_slices("lambda", (8,), {"window": 2}), 8, 8, device="cpu")
    with pytest.raises(attention.UnsupportedCall, match="use flex"):
        attention.forward("fa4", q, k, v, call)


def test_merging_blocks_of_keys_gives_the_whole_softmax():
    q, k, v, _ = tensors(9, 24)
    whole = attention.forward("math", q, k, v, attention.prepare((9,), (24,), causal=False, device="cpu"))
    call = attention.prepare((9,), (8,), causal=False, device="cpu")
    out, lse = attention.forward("math", q, k[:8], v[:8], call)
    for at in (8, 16):
        part = attention.forward("math", q, k[at : at + 8], v[at : at + 8], call)
        elementwise.merge(out, lse, *part, out)
    torch.testing.assert_close(out, whole[0])
    torch.testing.assert_close(lse, whole[1])


def test_backward_of_blocks_with_the_whole_lse_adds_up_to_the_whole_backward():
    q, k, v, dout = tensors(9, 24)
    call = attention.prepare((9,), (24,), causal=False, device="cpu")
    out, lse = attention.forward("math", q, k, v, call)
    want = attention.backward("math", dout, q, k, v, out, lse, call)
    dq, dks, dvs = torch.zeros_like(q), [], []
    half = attention.prepare((9,), (12,), causal=False, device="cpu")
    for at in (slice(0, 12), slice(12, 24)):
        part_dq, dk, dv = attention.backward("math", dout, q, k[at], v[at], out, lse, half)
        elementwise.accumulate(dq, part_dq)
        dks.append(dk)
        dvs.append(dv)
    for got, expected in zip((dq, torch.cat(dks), torch.cat(dvs)), want, strict=True):
        torch.testing.assert_close(got, expected)


def test_merge_into_rows_that_have_seen_no_key_keeps_the_part():
    out, lse = torch.zeros(3, 2, 4), torch.full((2, 3), float("-inf"))
    part, part_lse = torch.randn(3, 2, 4), torch.randn(2, 3)
    elementwise.merge(out, lse, part, part_lse, out)
    torch.testing.assert_close(out, part)
    torch.testing.assert_close(lse, part_lse)
    empty = torch.full((2, 3), float("-inf"))
    elementwise.merge(out, empty.clone(), part, empty.clone(), out)
    assert torch.all(out == 0)


def test_rows_are_transposed_and_gathered():
    x = torch.arange(24.0).view(2, 3, 4)
    out = torch.empty(3, 2, 4)
    elementwise.transpose_rows(x, out)
    assert torch.equal(out, x.transpose(0, 1))
    rows, index, gathered = x.view(6, 4), torch.tensor([5, 0, 0, 3]), torch.empty(4, 4)
    elementwise.gather_rows(rows, index, gathered)
    assert torch.equal(gathered, rows[index])


def test_cudnn_refuses_masks_that_it_would_align_elsewhere():
    q, k, v, _ = tensors(4, 8)
    with pytest.raises(attention.UnsupportedCall, match="top left"):
        attention.forward("cudnn", q, k, v, attention.prepare((4,), (8,), causal=True, device="cpu"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Inductor imports
def test_code_for_rows_that_lie_apart_knows_how_far_and_serves_any_number_of_them():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def keys(tokens):  # beside values, somewhere in a larger piece of memory
        return torch.randn(5000).as_strided((1, 2, tokens, 4), (9, 4, 16, 1), 8)

    fake = inductor.fake_of(keys(32), {2}, FakeTensorMode(shape_env=ShapeEnv()), "k")
    assert isinstance(fake.shape[2], torch.SymInt)
    assert all(type(stride) is int for stride in fake.stride())
    assert fake.stride()[1:] == (4, 16, 1)
    assert fake.storage_offset() == 0
    lse = inductor.fake_of(torch.randn(1, 2, 32), {2}, FakeTensorMode(shape_env=ShapeEnv()), "lse")
    assert isinstance(lse.stride()[1], torch.SymInt)  # heads lie as far apart as there are rows
    if shutil.which("g++"):  # which Inductor needs on a CPU
        compiled = inductor.compile_free(lambda k: (2 * k,), [keys(32)], [{2}])
        for k in (keys(32), keys(48)):
            torch.testing.assert_close(compiled(k)[0], 2 * k)


def test_code_that_shared_memory_cannot_hold_is_compiled_with_fewer_stages(monkeypatch):
    tried = []

    def compiled(options):
        def run(x):
            tried.append(options.get("num_stages", 3))
            if tried[-1] > 1:
                raise RuntimeError("No valid triton configs. OutOfMemoryError: out of resource: triton_tem_0")
            return (x,)

        return run

    monkeypatch.setattr(inductor, "compile_free", lambda run, *_: run())
    run, stages = inductor.compile_what_fits(compiled, [torch.ones(2)], [set()], 0)
    assert tried == [3, 2]
    assert run(torch.ones(2))[0].sum() == 2
    assert inductor.compile_what_fits(compiled, [torch.ones(2)], [set()], stages)[1] == stages
    assert tried == [3, 2, 1]  # the kind of call is known by then


def test_flashinfer_refuses_masks_that_cut_blocks_and_backward_passes():
    pytest.importorskip("flashinfer")
    q, k, v, _ = tensors(8, 8)
    call = attention.prepare_mask(mask_slices("causal", (8,), {}), 8, 8, device="cpu")
    with pytest.raises(attention.UnsupportedCall, match="use flex"):
        attention.forward("flashinfer", q, k, v, call)


@pytest.mark.parametrize(("off", "measured"), [(1.0, True), (1.5, False), (float("nan"), False)])
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("run", {"seed": 0, "deadline": float("inf"), "shapes": []}),
        ("run_rested", {"seed": 0, "deadline": float("inf")}),
        ("run_memory", {}),
    ],
)
def test_kernels_that_do_not_compute_attention_are_not_measured(monkeypatch, capsys, mode, options, off, measured):
    """As builds of flash-attention 2 for one head dimension at others."""
    math = attention.KERNELS["math"]
    odd = lambda *given: tuple(x * off for x in math.forward(*given))  # noqa: E731
    monkeypatch.setitem(attention.KERNELS, "fa2", replace(math, forward=odd))
    file = io.StringIO()
    bench = measure_kernels.Bench(Writer(file, None), torch.device("cpu"))
    monkeypatch.setattr(measure_kernels, "measure_host", lambda *_: None)
    getattr(measure_kernels, mode)(bench, ["fa2"], **options)
    points = [json.loads(line) for line in file.getvalue().splitlines()]
    assert any(p["op"] in ("attention", "memory") for p in points) == measured
    assert ("fa2 at head dimension 128 is left out" in capsys.readouterr().out) != measured


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--rested --memory", "not allowed with argument --rested"),
        ("--families equal --masked", "not allowed with argument --families"),
        ("--rested --head-dim 64", "--head-dim: does nothing"),
        ("--memory --shapes shapes.jsonl", "--shapes: does nothing"),
        ("--masks lambda", "--masks: does nothing"),
        ("--shares --rested", "--shares: does nothing"),
        ("--masked --shares --masks lambda --head-dim 64 --shapes shapes.jsonl", None),
        ("--families equal --head-dim 64", None),
        ("--warm-up --masked --head-dim 64", None),
    ],
)
def test_options_that_would_do_nothing_are_refused(words, refused, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["measure_kernels", "--out", "kernels.jsonl", *words.split()])
    if refused is None:
        assert measure_kernels.options().out
        return
    with pytest.raises(SystemExit):
        measure_kernels.options()
    assert refused in capsys.readouterr().err
