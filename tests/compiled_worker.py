"""What tests/test_real_implementations_cpu.py runs: plain calls of PyTorch under torch.compile, on one gloo rank."""

import torch
from ranks import fork_ranks
from torch._inductor.utils import run_and_get_code

from cpsim.case.load import scenario_from
from cpsim.real.measure.host import compiled_edges
from cpsim.real.others import make
from cpsim.real.run.node import end_process

CASE = {
    "strategy": "none",
    "implementation": "torch",
    "kernel": "sdpa_flash",
    "gpus": 1,
    "cluster": "dgx-h200",
    "tokens": 96,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
}
OPERATOR = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"


def rank_main(node, _, masks):
    """Compiled results are those of calls that are not, from code that calls the operator of each pass once."""
    for mask in masks:
        for pass_ in ("fwd", "bwd", "fwd_bwd"):
            asked = CASE | {"mask": mask}
            runner, codes = run_and_get_code(make, scenario_from(asked | {"compile": True}), pass_, node)
            assert sum(code.count(f"{OPERATOR}.default(") for code in codes) == 1, codes
            assert sum(code.count(f"{OPERATOR}_backward.default(") for code in codes) == (pass_ != "fwd"), codes
            plain = make(scenario_from(asked), pass_, node)
            for x, y in zip([*runner.inputs, runner.dout], [*plain.inputs, plain.dout], strict=True):
                x.data.copy_(y.data)
            runner.out = None  # of other inputs
            for one in (plain, runner):
                one.prepare()
                one.launch()
            for got, wanted in zip((runner.out, *runner.grads), (plain.out, *plain.grads), strict=True):
                torch.testing.assert_close(got, wanted)
            runner.launch()  # the graph of a timed backward pass is kept
    found = compiled_edges(node)
    assert list(found) == [f"compiled {edge} {pass_}" for pass_ in ("fwd", "bwd") for edge in ("entry", "exit")]
    assert all(0 < min(times) < 1 for times in found.values())


if __name__ == "__main__":
    torch.set_num_threads(1)
    fork_ranks(rank_main, 1, ["causal", "full"])
    print(2)
    end_process()
