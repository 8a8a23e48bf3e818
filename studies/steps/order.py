"""In which order torch.compile puts attention and its messages, where a layer is context-parallel; rank by rank.

    python -m studies.steps.order [--ranks 2] [--strategy zigzag_ring|allgather]

Compiles one tiny layer on a CPU, once as every rank, with a process group that sends nothing, and prints what Inductor
schedules: m matrix product, F attention forward, B backward, x exchange, g all-gather; forward, then backward with the
forward pass recomputed. With PyTorch 2.13 all ranks but the last compute all gradients (BB) before they send any (xx);
the last one sends after each kernel (BxBx), and every exchange waits for both sides. Needs a C++ compiler; takes half a
minute a rank.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Final

MARKS: Final = {
    "extern_kernels.mm": "m",
    "flash_attention_backward": "B",
    "rng_state": "F",
    "flash_attention.default": "F",
    "all_to_all": "x",
    "all_gather": "g",
}
"""Parts of kernels' names."""


def marks(scheduler: Any) -> str:
    """One letter for each kernel that Inductor does not write itself, in the order in which they run."""
    found = []
    for group in scheduler.nodes:
        for node in group.get_nodes():
            called = getattr(node, "node", None)
            name = str(getattr(called, "python_kernel_name", None) or getattr(called, "op_overload", None) or "")
            found += [mark for part, mark in MARKS.items() if part in name][:1]
    return "".join(found)


def as_rank(rank: int, ranks: int, strategy: str) -> None:
    """Compiles the layer as one rank and prints both graphs."""
    import torch
    import torch.distributed as dist
    from torch._inductor import scheduler
    from torch.nn import functional
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from cpsim.case.load import scenario_from
    from cpsim.real.steps import make

    def forward(q: Any, *_: Any, **__: Any) -> Any:
        none = torch.zeros((), dtype=torch.int64)
        return torch.zeros_like(q), torch.zeros(q.shape[:3]), none, none, q.shape[2], q.shape[2], none, none, none

    def backward(_: Any, q: Any, k: Any, v: Any, *__: Any, **___: Any) -> Any:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    library = torch.library.Library("aten", "IMPL")  # a CPU has other ops; what is computed does not matter
    library.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")

    def scaled_dot_product_attention(q: Any, k: Any, v: Any, is_causal: bool, enable_gqa: bool) -> Any:
        del enable_gqa
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    functional.scaled_dot_product_attention = scaled_dot_product_attention  # of a GPU, which context parallelism knows
    original = scheduler.Scheduler.__init__

    def spying(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if order := marks(self):
            print(f"rank {rank}: {order}", flush=True)

    scheduler.Scheduler.__init__ = spying
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    model = {"layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64, "vocab": 96}
    scenario = {
        "model": model,
        "framework": "torch",
        "compile": True,
        "gpus": ranks,
        "cluster": "dgx-h100",
        "kernel": "sdpa_flash",
        "tokens": 32 * ranks,
        "strategy": strategy,
        "mask": "causal",
        "parallel": {"sharding": "fsdp", "cp": ranks, "recompute": "full"},
    }
    node = SimpleNamespace(cuda=False, size=ranks, rank=rank, device=torch.device("cpu"))
    runner = make(scenario_from(scenario), node)  # type: ignore[arg-type]
    with suppress(AssertionError):  # of what the op returns on a CPU; both graphs are compiled by then
        runner.backward()  # type: ignore[attr-defined]


def main() -> None:
    """Compiles as every rank, one process each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", choices=("zigzag_ring", "allgather"), default="zigzag_ring")
    parser.add_argument("--rank", type=int, help="this one alone, in this process")
    args = parser.parse_args()
    if args.rank is not None:
        as_rank(args.rank, args.ranks, args.strategy)
        return
    afresh = os.environ | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    for rank in range(args.ranks):
        given = ["--ranks", str(args.ranks), "--strategy", args.strategy, "--rank", str(rank)]
        command = [sys.executable, "-m", "studies.steps.order", *given]
        subprocess.run(command, env=afresh, stderr=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    main()
