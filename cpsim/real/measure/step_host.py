"""What the hosts of whole steps take for a layer: layers so small that GPUs always wait.

    torchrun --nproc-per-node 2 -m cpsim.real.measure.step_host --out step-host.jsonl

Of every framework, as `cpsim run` runs it, how a layer is sharded and what it computes again: seconds from the start of
a layer until that of the next, in the forward pass and, on autograd's thread, in the backward pass (`op: host`, kinds
`layer ... fwd` and `layer ... bwd`), and what the optimizer takes for a layer's weights (`... update`). The first
layers and the last do not count.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from cpsim.calibrate.measurement import Writer
from cpsim.calibrate.pace import python_seconds
from cpsim.case.load import scenario_from
from cpsim.errors import CpsimError
from cpsim.prediction.step.hosts import EXPERTS
from cpsim.real.run.node import Node, end_process
from cpsim.real.run.timing import provenance
from cpsim.real.steps import make
from cpsim.real.steps.step import Steps

Case = dict[str, Any]
MODEL: Final[Case] = {
    "layers": 10,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "ffn": 512,
    "vocab": 512,
}
MEGATRON: Final[Case] = {"framework": "megatron"}
TOKENS: Final = 256
"""Of a GPU."""
LEFT_OUT: Final = 2
"""Layers at each end that do not count."""
WARMUP, ITERATIONS = 8, 12


def cases(gpus: int) -> Iterator[tuple[str, Case]]:
    """Names and scenarios: frameworks, how the step is cut on so many GPUs, and what it computes again."""
    codes: dict[str, Case] = {
        "torch compiled": {"framework": "torch", "compile": True},
        "torch eager": {"framework": "torch", "compile": False},
        "huggingface eager": {"framework": "huggingface"},
    }
    cuts: dict[str, Case] = {"": {"sharding": "none"}}
    if gpus > 1:
        cuts = {" fsdp": {"sharding": "fsdp"}, " tp": {"sharding": "none", "tp": gpus}, " ddp": {"sharding": "none"}}
        cuts |= {" fsdp cp": {"sharding": "fsdp", "cp": gpus}}
    for code, framework in codes.items():
        for cut, parallel in cuts.items():
            for recompute in ("none", "full", "per_op"):
                few = framework["framework"] == "huggingface" and (recompute == "per_op" or cut in (" tp", " fsdp cp"))
                eager = "eager" in code and cut == " fsdp cp"  # does not run
                if few or eager or (cut in (" ddp", " tp") and recompute != "none"):
                    continue
                strategy = "allgather" if "cp" in parallel else "none"
                yield (
                    f"layer {code}{cut} {recompute}",
                    _case(gpus, framework, {**parallel, "recompute": recompute}, strategy),
                )
    yield from _of_megatron(gpus)


def _of_megatron(gpus: int) -> Iterator[tuple[str, Case]]:
    """Dense layers in both precisions and with adapters of attention, and experts, by how many a rank has."""
    zero1 = {"sharding": "zero1"}
    cuts: dict[str, tuple[Case, str]] = {"": ({"sharding": "none"}, "none")}
    if gpus > 1:
        cuts = {" ddp": (zero1, "none"), " tp": ({"sharding": "none", "tp": gpus}, "none")}
        cuts |= {" ddp cp": ({**zero1, "cp": gpus}, "zigzag_ring")}
    for cut, (parallel, strategy) in cuts.items():
        for recompute in ("none", "full") if gpus == 1 else ("none",):
            how = {**parallel, "recompute": recompute}
            yield f"layer megatron eager{cut} {recompute}", _case(gpus, MEGATRON, how, strategy)
        if cut != " tp":
            for code, precision in (("eager", {}), ("fp8", {"precision": {"fp8": "current"}})):
                adapters = {
                    **MEGATRON,
                    **precision,
                    "trainable": {"lora": 16, "dropout": 0.1, "modules": ["qkv", "proj"]},
                }
                how = {**parallel, "recompute": "none"}
                yield f"layer megatron {code}{cut} lora none", _case(gpus, adapters, how, strategy)
        if cut in ("", " tp"):
            fp8, how = {**MEGATRON, "precision": {"fp8": "current"}}, {**parallel, "recompute": "none"}
            yield f"layer megatron fp8{cut} none", _case(gpus, fp8, how, strategy)
    for mine in EXPERTS:
        routed = {**MODEL, "experts": mine * gpus, "top_k": 2, "expert_ffn": 256}
        parallel = {**zero1, "ep": gpus} if gpus > 1 else {"sharding": "none"}
        name, how = f"layer megatron eager {mine} experts", {**parallel, "recompute": "none"}
        yield f"{name}{' ddp ep' if gpus > 1 else ''} none", _case(gpus, MEGATRON, how, "none", routed)
        if gpus == 1:
            biased = {**routed, "clamped": True, "expert_bias": True}
            yield f"{name} biased none", _case(gpus, MEGATRON, how, "none", biased)


def _case(gpus: int, framework: Case, parallel: Case, strategy: str, model: Case = MODEL) -> Case:
    return {
        "model": model,
        **framework,
        "gpus": gpus,
        "cluster": "dgx-h100",
        "kernel": "cudnn" if framework["framework"] == "megatron" else "sdpa_flash",
        "mask": "causal",
        "tokens": TOKENS * gpus,
        "strategy": strategy,
        "parallel": parallel,
    }


class Watched:
    """Notes when the layers of a step begin, in both passes."""

    def __init__(self, runner: Steps) -> None:
        self.runner = runner
        self.forward, self.backward = list[float](), list[float]()
        for block in runner.blocks:
            block.register_forward_pre_hook(self._begun, with_kwargs=True)

    def _begun(self, _block: object, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() == -1:  # not computed again
            self.forward.append(time.perf_counter())
            hidden = args[0] if args else named.get("hidden_states")
            if hidden is not None and hidden.requires_grad:
                hidden.register_hook(self._left)

    def _left(self, grad: object) -> object:
        self.backward.append(time.perf_counter())
        return grad

    def iteration(self) -> tuple[list[float], list[float], float]:
        """Seconds of every layer's forward and backward pass, and of the optimizer's step."""
        self.forward.clear()
        self.backward.clear()
        self.runner.clear()
        self.runner.backward()
        before = time.perf_counter()
        self.runner.update()
        took = time.perf_counter() - before
        return _between(self.forward), _between(self.backward), took


def _between(times: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)][LEFT_OUT:-LEFT_OUT]


def measure(node: Node, writer: Writer | None, chosen: Mapping[str, Case]) -> None:
    """Points of cases by name, their iterations in turns; the first ones do not count. All ranks call."""
    watched = {name: Watched(make(scenario_from(case), node)) for name, case in chosen.items()}
    found = {name: dict[str, list[float]](fwd=[], bwd=[], update=[]) for name in chosen}
    gc.disable()
    for number, name in itertools.product(range(WARMUP + ITERATIONS * len(chosen)), chosen):
        forward, backward, update = watched[name].iteration()
        node.synchronize()
        if number >= WARMUP:
            found[name]["fwd"] += forward
            found[name]["bwd"] += backward
            found[name]["update"].append(update / MODEL["layers"])
    gc.enable()
    for name, times in found.items():
        write(node, writer, name, times)


def write(node: Node, writer: Writer | None, name: str, found: dict[str, list[float]]) -> None:
    """Points of one case, of all ranks."""
    for rank, mine in enumerate(node.gather(found)):
        for pass_, times in mine.items():
            if writer is not None and times:
                writer.add("host", times, kind=f"{name} {pass_}", rank=rank)
                if rank == 0:
                    print(f"{name} {pass_}: {median(times) * 1e6:.1f} us ({len(times)})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="words that names of cases hold, separated by commas")
    parser.add_argument("--together", action="store_true", help="all cases in turns, so that hosts are alike for all")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no case after so many minutes")
    parser.add_argument("--cpu", action="store_true", help="to try the script")
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    args = parser.parse_args()
    with Node(cpu=args.cpu) as node:
        end_process(_run(node, args))


def _run(node: Node, args: argparse.Namespace) -> int:
    writer, deadline = None, time.time() + 60 * args.minutes
    if node.rank == 0:
        command = f"torchrun --nproc-per-node {node.size} -m cpsim.real.measure.step_host"
        writer = Writer(
            args.out.open("w", encoding="utf-8"), provenance(node.device, node.size, {}, command, args.commit)
        )
        writer.add("host", python_seconds(), kind="python")
    words = args.only.split(",")
    chosen = {name: case for name, case in cases(node.size) if any(word in name for word in words)}
    for some in [chosen] if args.together else [{name: case} for name, case in chosen.items()]:
        if max(node.gather(time.time())) > deadline:
            break
        try:
            measure(node, writer, some)
        except (CpsimError, RuntimeError) as error:  # the same on all ranks
            if writer is not None:
                name = ", ".join(some)
                writer.add("error", failed="host", kind=name, message=f"{type(error).__name__}: {error}"[:300])
                print(f"error in {name}: {error}"[:300], flush=True)
    return 0


if __name__ == "__main__":
    main()
