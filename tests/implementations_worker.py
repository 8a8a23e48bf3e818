"""What tests/test_real_implementations_cpu.py runs: other people's code on forked ranks, against dense attention."""

import importlib
import itertools
import json
import sys

import torch
from ranks import fork_ranks

from cpsim.case.load import scenario_from
from cpsim.case.resolve import workload_of
from cpsim.real.run import attention
from cpsim.real.run.node import end_process
from cpsim.strategies import sharding
from cpsim.strategies.ring.grid import make_grid


def tokens_of(scenario, rank, size):
    """Tokens of a rank in the order in which the implementations hold them."""
    lengths = workload_of(scenario).documents if "document" in scenario.mask_name else (scenario.num_tokens,)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    knobs = {"layout": "zigzag" if scenario.implementation == "torch" else "contiguous", **scenario.knobs}
    if scenario.strategy == "usp":
        grid = make_grid(size, knobs["ulysses"], knobs.get("placement", "head_first"))
        whole = bounds.new_tensor([0, scenario.num_tokens]).numpy()
        shards = sharding.zigzag_shards(whole, grid.num_places)[0]
        if knobs.get("ring") == "basic":
            shards = sharding.contiguous(scenario.num_tokens, grid.num_places)
        runs = sharding.split(shards, grid.num_parts)
        ranges = runs.of(grid.place[rank] * grid.num_parts + grid.part[rank])
    elif scenario.strategy == "zigzag_ring" or (scenario.strategy == "allgather" and knobs["layout"] == "zigzag"):
        ranges = sharding.zigzag_shards(bounds.numpy(), size)[0].of(rank)
    elif scenario.strategy == "ring":
        ranges = [(a + (b - a) * rank // size, a + (b - a) * (rank + 1) // size) for a, b in bounds.unfold(0, 2, 1)]
    else:
        ranges = sharding.contiguous(scenario.num_tokens, size).of(rank)
    held = torch.cat([torch.arange(int(a), int(b)) for a, b in ranges])
    return torch.arange(rank, scenario.num_tokens, size) if scenario.strategy == "striped_ring" else held


def dense(scenario):
    """Whole q, k, v, dout and, from the `math` kernel, out, dq, dk, dv."""
    torch.manual_seed(1)
    shape = scenario.num_tokens, scenario.head_dim
    heads = scenario.heads, scenario.kv_heads, scenario.kv_heads, scenario.heads
    q, k, v, dout = (torch.randn(shape[0], h, shape[1], dtype=torch.float64) for h in heads)
    lengths = workload_of(scenario).documents if "document" in scenario.mask_name else (scenario.num_tokens,)
    call = attention.prepare(lengths, lengths, causal="causal" in scenario.mask_name, device="cpu")
    out, lse = attention.forward("math", q, k, v, call)
    return [q, k, v, dout], [out, *attention.backward("math", dout, q, k, v, out, lse, call)]


def flash_on_cpu():
    """PyTorch's flash attention ops for a CPU, which has others: context parallel knows these."""
    from torch.nn import functional

    library = torch.library.Library("aten", "IMPL")

    def packed(x):
        return x[0].transpose(0, 1)

    def forward(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        del dropout_p, return_debug_mask, scale
        call = attention.prepare([q.shape[2]], [k.shape[2]], causal=is_causal, device="cpu")
        out, lse = attention.forward("math", packed(q), packed(k), packed(v), call)
        none = torch.zeros((), dtype=torch.int64)
        return out.transpose(0, 1)[None], lse[None], none, none, q.shape[2], k.shape[2], none, none, none

    def backward(
        grad_out, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None
    ):
        del cum_q, cum_k, max_q, max_k, dropout_p, seed, offset, scale
        call = attention.prepare([q.shape[2]], [k.shape[2]], causal=is_causal, device="cpu")
        args = (packed(x) for x in (grad_out, q, k, v, out))
        made = attention.backward("math", *args, lse[0], call)
        return tuple(x.transpose(0, 1)[None] for x in made)

    library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")

    def scaled_dot_product_attention(q, k, v, is_causal, enable_gqa):
        del enable_gqa
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    functional.scaled_dot_product_attention = scaled_dot_product_attention
    return library


MODULES = {"ring-flash-attn": "ring_flash", "yunchang": "yunchang_", "torch": "torch_cp"}


def rank_main(node, _, cases):
    """One rank runs all cases."""
    kept = flash_on_cpu()
    for scenario in cases:
        module = importlib.import_module(f"cpsim.real.others.{MODULES[scenario.implementation]}")
        given, wanted = dense(scenario)
        mine = tokens_of(scenario, node.rank, node.size)
        for pass_ in ("fwd", "bwd"):
            runner = module.make(scenario, pass_, node)
            for x, whole in zip([*runner.inputs, runner.dout], given, strict=True):
                x.data.copy_(whole[mine].reshape(x.shape))
            for _ in range(2):
                runner.prepare()
                runner.launch()
            got = [runner.out] if pass_ == "fwd" else runner.grads
            for x, whole in zip(got, wanted[:1] if pass_ == "fwd" else wanted[1:], strict=True):
                torch.testing.assert_close(
                    x.detach().double().reshape(-1, *whole.shape[1:]),
                    whole[mine],
                    rtol=2e-2,
                    atol=2e-2,
                    msg=lambda m, s=scenario, p=pass_: f"{s.to_dict()} {p}: {m}",
                )
    del kept


def main(path):
    """Runs the cases of one package on as many ranks as they ask for."""
    torch.set_num_threads(1)
    with open(path, encoding="utf-8") as file:
        cases = [scenario_from(json.loads(line)) for line in file]
    importlib.import_module(f"cpsim.real.others.{MODULES[cases[0].implementation]}")  # once for all ranks
    for num_ranks, asked in itertools.groupby(cases, lambda case: case.gpus):
        fork_ranks(rank_main, num_ranks, list(asked))
    print(len(cases))


if __name__ == "__main__":
    main(sys.argv[1])
    end_process()
