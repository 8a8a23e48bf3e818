"""Measures what the executor adds to kernels and NCCL: launches, memory-bound kernels; and what draws how much power.

    torchrun --nproc-per-node 4 -m cpsim.real.measure.executor --out h200x4-executor.jsonl

Launch times: tiny cases of every strategy, so that the GPU is never behind; the time between two launches of one
program, by kind of op, waits for other streams and events included. Memory-bound kernels: random sizes on one GPU,
bytes counted as schedules count them. Power: every kind of load for `LOAD_S` on all GPUs at once, and the idle time
that timing leaves between two iterations. No time of a whole run is kept.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cpsim.calibrate.measurement import LOAD_BYTES, Writer
from cpsim.case.load import scenario_from
from cpsim.errors import InfeasibleError
from cpsim.real.others.cpsim import make
from cpsim.real.run import attention, elementwise
from cpsim.real.run.check_executor import CASES
from cpsim.real.run.iterations import iteration, keep_waiting
from cpsim.real.run.node import Node
from cpsim.real.run.timing import Clock, hold, provenance, soak, time_ops
from cpsim.schedule.schedule import Kind, Pass

KERNELS = ("fa2", "fa4", "cudnn", "sdpa_flash")
ITERATIONS = 30
LOAD_S = 1.3
"""NVML averages power over a second."""
MEMORY_BOUND = ("copy", "copy_heads", "accumulate", "accumulate_first", "merge", "merge_first", "merge_last")
HEADS, DIM = 32, 128
GRAPH_TOKENS, GRAPH_HEADS, GRAPH_ROUNDS, GRAPH_KERNEL = (1024, 1536, 2048, 3072, 4096), 8, 8, "sdpa_flash"
PASSES: tuple[Pass, ...] = ("fwd", "bwd")
STREAMED_LEAD_S = 5e-3
"""Seconds that hosts have to launch a row of calls and messages one by one."""


def launch_times(node: Node, kernels: tuple[str, ...]) -> dict[str, list[float]]:
    """Seconds of this rank's host per launch, by kind as measurement files name it."""
    found: dict[str, list[float]] = {}
    for kernel in kernels:
        for strategy, knobs in CASES:
            for pass_ in PASSES:
                scenario = scenario_from(
                    {
                        "strategy": strategy,
                        "knobs": knobs,
                        "gpus": node.size,
                        "cluster": "h200-4",
                        "tokens": 256 * node.size,
                        "mask": "causal",
                        "heads": 16,
                        "kv_heads": 4,
                        "head_dim": 128,
                        "kernel": kernel,
                        "pass": pass_,
                    }
                )
                try:
                    program = make(scenario, pass_, node).executor.program
                except InfeasibleError:
                    continue
                for i in range(ITERATIONS + 5):
                    node.synchronize()
                    node.gather(None)
                    marks: list[float] = [time.perf_counter()]
                    program.run(marks)
                    if i >= 5:
                        for kind, seconds in zip(program.kinds, np.diff(marks).tolist(), strict=True):
                            found.setdefault(_host_kind(kind, kernel), []).append(seconds)
    return found


def _host_kind(kind: Kind, kernel: str) -> str:
    passes = {Kind.ATTENTION: "fwd", Kind.ATTENTION_BACKWARD: "bwd"}
    return f"{kernel}_{passes[kind]}_executor" if kind in passes else kind.name.lower()


def memory_bound(
    kind: str, tokens: int, device: torch.device, num_sets: int | None = None
) -> tuple[Callable[[], object], int]:
    """The op on so many tokens, and its bytes read and written; inputs rotate past the cache, or over `num_sets`."""
    row, itemsize = HEADS * DIM, 2
    if num_sets is None:
        num_sets = int(np.clip(np.ceil(240e6 / (tokens * row * 8)), 1, 16 if device.type == "cuda" else 2))
    # memory of each set: [bf16 rows | bf16 rows | fp32 rows], offsets in heads of either type
    per_set = tokens * HEADS * 4
    memory = torch.randn(num_sets * per_set * DIM * itemsize // 4, device=device).view(torch.bfloat16)
    narrow, wide = memory.view(-1, DIM), memory.view(torch.float32).view(-1, DIM)
    steps = np.arange(tokens) * HEADS

    def table(offset: int) -> torch.Tensor:
        return torch.from_numpy((steps + offset).astype(np.int32)).to(device)

    lse = torch.randn(HEADS, tokens, device=device), torch.randn(HEADS, tokens, device=device)
    column = torch.arange(tokens, dtype=torch.int32, device=device)
    ops: list[Callable[[], object]] = []
    for i in range(num_sets):
        first, second = table(i * per_set), table(i * per_set + tokens * HEADS)
        acc = table(i * per_set // 2 + tokens * HEADS)
        if kind.startswith("merge"):
            old = (second, None) if kind == "merge_first" else (None, acc)
            target = (second, None) if kind == "merge_last" else (None, acc)
            merge = elementwise.Merge(
                num_heads=HEADS, width=1, part=first, part_column=column, old=old, target=target, column=column
            )
            ops.append(partial(elementwise.merge_rows, narrow, wide, *lse, merge))
            continue
        width, source, target_rows = HEADS, first, second
        if kind == "copy_heads":  # as around an all-to-all: 4 ranks' heads of a token go to 4 places
            width = HEADS // 4
            pieces = np.arange(4)
            source = _spread(steps[:, None] + pieces * width, i * per_set, device)
            target_rows = _spread((pieces * tokens + np.arange(tokens)[:, None]) * width, i * per_set, device)
            target_rows += tokens * HEADS
        wide_target = kind.startswith("accumulate")
        tables = elementwise.Sum(
            width=width,
            source=source[None],
            source_wide=False,
            old=(None, acc if kind == "accumulate" else None),
            target=(None, acc) if wide_target else (target_rows, None),
        )
        ops.append(partial(elementwise.sum_rows, narrow, wide, tables))
    turn = iter(range(10**9))
    return lambda: ops[next(turn) % num_sets](), moved_bytes(kind, tokens)


def moved_bytes(kind: str, tokens: int) -> int:
    """Bytes that an op of `memory_bound` reads and writes."""
    per_element = {
        "copy": 4,
        "copy_heads": 4,
        "accumulate": 10,
        "accumulate_first": 6,
        "merge": 10,
        "merge_first": 8,
        "merge_last": 8,
    }[kind]
    return tokens * HEADS * DIM * per_element + (tokens * HEADS * 12 if kind.startswith("merge") else 0)


def _spread(offsets: np.ndarray, base: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy((offsets.ravel() + base).astype(np.int32)).to(device)


def measure_memory_bound(node: Node, writer: Writer, num: int) -> None:
    """Every kind at random sizes, the queue kept full."""
    rng = np.random.default_rng(1)
    for kind in MEMORY_BOUND:
        for _ in range(num):
            tokens = int(np.exp(rng.uniform(np.log(64), np.log(65536 if node.cuda else 256))))
            measure_size(node, writer, kind, tokens)


def measure_size(node: Node, writer: Writer, kind: str, tokens: int) -> None:
    """One kind of memory-bound kernel on so many tokens, on this rank."""
    op, nbytes = memory_bound(kind, tokens, node.device)
    op()
    soak(op, 0.01 if node.cuda else 1e-4, 2e-5)
    hold(2e-3, node.device)
    samples = time_ops(op, 16 if node.cuda else 4, node.device)
    writer.add("elementwise", samples, kind=kind.split("_")[0], nbytes=nbytes, variant=kind, kernel="executor")


def graph_times(node: Node) -> dict[str, list[float]]:
    """Seconds from a graph's launch to its end, for chains of tiny kernels: on one stream, and across two.

    The GPU is idle at the launch, as at the start of a synced iteration.
    """
    found: dict[str, list[float]] = {}
    if not node.cuda:
        return found
    op, _ = memory_bound("copy", 64, node.device)
    side, events = torch.cuda.Stream(), [torch.cuda.Event() for _ in range(2)]

    def across() -> None:
        main = torch.cuda.current_stream()
        events[0].record(main)
        side.wait_event(events[0])
        with torch.cuda.stream(side):
            op()
        events[1].record(side)
        main.wait_event(events[1])

    for name, call in (("chain", op), ("across", across)):
        for length in (16, 64):
            call()
            node.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(length):
                    call()
            samples = []
            for _ in range(25):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                node.synchronize()
                start.record()
                graph.replay()
                end.record()
                node.synchronize()
                samples.append(start.elapsed_time(end) / 1e3)
            found[f"graph_{name}_{length}"] = samples[5:]
    return found


def measure_graph(node: Node, tokens: int, pass_: Pass, kernel: str = GRAPH_KERNEL) -> dict[str, list[float]]:
    """Seconds of ops in graphs and between two events, the maximum over ranks.

    Attention and a message to the next rank (to this one where it is alone), each between two events; graphs of one
    attention call, of more in a row, and of as many with a message on a stream of its own before each but the first;
    and the same launched one by one, by hosts that are far ahead.
    All ranks call; nothing where there is no GPU. GPUs are idle at the launch, as at the start of a synced iteration;
    a graph of one call also is launched while they are kept waiting, as at the start of a streamed iteration, and so
    with nothing useful in the cache.
    """
    if not node.cuda:
        return {}
    random = partial(torch.randn, tokens, GRAPH_HEADS, DIM, device=node.device, dtype=torch.bfloat16)
    q, k, v, dout, got = (random() for _ in range(5))
    call = attention.prepare((tokens,), (tokens,), causal=True, device=node.device)
    attend: Callable[[], object] = partial(attention.forward, kernel, q, k, v, call)
    if pass_ == "bwd":
        out, lse = attention.forward(kernel, q, k, v, call)
        attend = partial(attention.backward, kernel, dout, q, k, v, out, lse, call)
    group, side = node.group(tuple(range(node.size)), "comm"), torch.cuda.Stream(priority=-1)
    peers = (node.rank + 1) % node.size, (node.rank - 1) % node.size

    def exchange() -> None:
        parts = [dist.P2POp(dist.isend, k, peers[0], group=group), dist.P2POp(dist.irecv, got, peers[1], group=group)]
        for work in dist.batch_isend_irecv(parts):
            work.wait()

    def aside() -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            exchange()
        main.wait_stream(side)

    def evicted() -> None:
        node.evict()
        keep_waiting(node)

    one = [attend]
    rounds = {"one": one, "many": one * (1 + GRAPH_ROUNDS), "both": one + [aside, attend] * GRAPH_ROUNDS}
    found = {"attention_s": node.samples(attend), "message_s": node.samples(exchange)}
    found |= {f"{name}_s": _replayed(node, calls) for name, calls in rounds.items()}
    found["held_s"] = _replayed(node, one, partial(keep_waiting, node))
    found["evicted_s"] = _replayed(node, one, evicted)
    rounds["both"] = one + [exchange, attend] * GRAPH_ROUNDS  # NCCL has a stream of its own
    ahead = partial(keep_waiting, node, STREAMED_LEAD_S)
    return found | {f"streamed_{name}_s": _launched(node, calls, ahead) for name, calls in rounds.items()}


def graph_parameters(tokens: int, pass_: Pass, kernel: str = GRAPH_KERNEL) -> dict[str, Any]:
    """What `measure_graph` measures."""
    nbytes = tokens * GRAPH_HEADS * DIM * torch.bfloat16.itemsize
    return {"kernel": kernel, "pass": pass_, "tokens": tokens, "nbytes": nbytes}


def add_graph(writer: Writer, parameters: dict[str, Any], found: dict[str, list[float]]) -> None:
    """Writes what `measure_graph` found."""
    others = {name: [round(s, 10) for s in seconds] for name, seconds in found.items() if name != "one_s"}
    writer.add("graph", found["one_s"], rounds=GRAPH_ROUNDS, **parameters, **others)


def _replayed(
    node: Node, calls: Sequence[Callable[[], object]], before: Callable[[], object] | None = None
) -> list[float]:
    """Seconds from the launch of a graph of calls to its end, the maximum over ranks; GPUs are idle, or do `before`."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return _launched(node, [graph.replay], before)


def _launched(
    node: Node, calls: Sequence[Callable[[], object]], before: Callable[[], object] | None = None, num: int = 20
) -> list[float]:
    """Seconds from the first of calls in a row to the end of the last, the maximum over ranks; GPUs are idle, or do
    `before`."""
    start, end, samples = *(torch.cuda.Event(enable_timing=True) for _ in range(2)), list[float]()
    for _ in range(5 + num):
        node.meet()
        if before is not None:
            before()
        start.record()
        for call in calls:
            call()
        end.record()
        node.synchronize()
        samples.append(start.elapsed_time(end) / 1e3)
    return node.maximum(samples[5:])


class Nothing:
    """A runner that does nothing."""

    def prepare(self) -> None:
        """Nothing."""

    def launch(self) -> None:
        """Nothing."""


def pause(node: Node, protocol: str) -> list[float]:
    """Seconds from the start of one iteration to that of the next where there is nothing to run."""
    nothing, samples = Nothing(), []
    for _ in range(30):
        start = time.perf_counter()
        iteration(nothing, node, protocol)
        samples.append(time.perf_counter() - start)
    return samples[10:]


def loads(node: Node, kernels: Sequence[str] = ("fa2", "fa4", "cudnn")) -> dict[str, Callable[[], object]]:
    """What GPUs can be busy with, by name."""
    small = not node.cuda
    made: dict[str, Callable[[], object]] = {"idle": lambda: time.sleep(1e-3)}
    made |= {
        kind: memory_bound(kind, 64 if small else 16384, node.device)[0] for kind in ("copy", "accumulate", "merge")
    }
    ranks = tuple(range(node.size))
    dtype = torch.float32 if small else torch.bfloat16
    group, count = node.group(ranks, "comm"), 2**12 if small else LOAD_BYTES // dtype.itemsize
    x, y = (torch.zeros(count * n, dtype=dtype, device=node.device) for n in (1, node.size))
    after, before = (node.rank + 1) % node.size, (node.rank - 1) % node.size

    def ring() -> None:
        send = dist.P2POp(dist.isend, x, after, group=group)
        for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, y[:count], before, group=group)]):
            work.wait()

    made |= {"transfer": ring, "all_gather": lambda: dist.all_gather_into_tensor(y, x, group=group)}
    tokens = 64 if small else 8192
    q, dout = (torch.randn(tokens, HEADS, DIM, device=node.device, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(tokens, HEADS // 4, DIM, device=node.device, dtype=dtype) for _ in range(2))
    call = attention.prepare((tokens,), (tokens,), causal=False, device=node.device)
    for kernel in ("math",) if small else kernels:
        out, lse = attention.forward(kernel, q, k, v, call)
        made[f"{kernel} fwd"] = partial(attention.forward, kernel, q, k, v, call)
        made[f"{kernel} bwd"] = partial(attention.backward, kernel, dout, q, k, v, out, lse, call)
    return made


def measure_power(node: Node, writer: Writer | None) -> None:
    """Watts and clock of every GPU at the end of `LOAD_S` seconds of each load, and idle."""
    for kind, op in loads(node).items():
        measure_load(node, writer, kind, op)


def measure_load(node: Node, writer: Writer | None, kind: str, op: Callable[[], object]) -> None:
    """Watts and clock of every GPU at the end of `LOAD_S` seconds of one load; all ranks call."""
    clock, load_s = Clock(node.local), LOAD_S if node.cuda else 0.02
    for _ in range(3):
        op()
    node.synchronize()
    start = time.perf_counter()
    op()
    node.synchronize()
    num = max(1, int(load_s / max(node.gather(time.perf_counter() - start))))
    start = time.perf_counter()
    for i in range(num):
        op()
        if i % 64 == 63:
            node.synchronize()  # a short queue: the reading below is made under load
    node.synchronize()
    seconds, read = (time.perf_counter() - start) / num, clock.read()
    watts, hertz = node.gather(read["power_w"]), node.gather(read["sm_clock_hz"])
    if writer is not None:
        writer.add("power", [seconds], kind=kind, watts=watts, sm_clock_hz=hertz)
        print(f"power {kind:12s} {seconds * 1e6:9.1f} us {watts} W {[h / 1e6 for h in hertz]} MHz", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", type=int, default=14, help="sizes of every memory-bound kernel")
    parser.add_argument("--parts", default="launches,memory,power", help="what to measure, separated by commas")
    parser.add_argument("--graphs", default=GRAPH_KERNEL, help="attention kernels in graphs, separated by commas")
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    args = parser.parse_args()
    with Node() as node:
        kernels = KERNELS if node.cuda else ("fa2",)
        versions = {k: attention.kernel_version(k) for k in kernels} if node.cuda else {}
        command = f"torchrun -m cpsim.real.measure.executor --parts {args.parts} --graphs {args.graphs}"
        header = provenance(node.device, node.size, versions, command, args.commit)
        times = node.gather((launch_times(node, kernels) if "launches" in args.parts else {}) | graph_times(node))
        pauses = {f"pause_{protocol}": pause(node, protocol) for protocol in ("synced", "held")}
        calls = product(GRAPH_TOKENS if node.cuda else (), PASSES, args.graphs.split(","))
        captured = [(graph_parameters(*call), measure_graph(node, *call)) for call in calls]
        writer = None
        if node.rank == 0:
            writer = Writer(args.out.open("w", encoding="utf-8"), header)
            for kind in sorted({kind for mine in times for kind in mine}):
                for rank, mine in enumerate(times):
                    samples = mine.get(kind, [])
                    if samples:
                        writer.add("host", samples[:: max(1, len(samples) // 200)], kind=kind, rank=rank)
                print(f"{kind:24s} {np.median(np.concatenate([t.get(kind, []) for t in times])) * 1e6:7.1f} us")
            for kind, samples in pauses.items():
                writer.add("host", samples, kind=kind)
            for parameters, found in captured:
                add_graph(writer, parameters, found)
            if "memory" in args.parts:
                measure_memory_bound(node, writer, args.sizes)
        node.gather(None)
        if "power" in args.parts:
            measure_power(node, writer)


if __name__ == "__main__":
    main()
