"""Measures everything that a profile of this node needs, the most informative points first; `cpsim calibrate` runs it.

    torchrun --nproc-per-node 4 --max-restarts 3 -m cpsim.real.measure.calibrate --minutes 10 --out mine.jsonl

One process group for all parts. Attention and memory-bound kernels run on all GPUs at once, every GPU with points of
its own; collectives, transfers, overlaps and power need them together. Time goes to the parts by their shares, in two
rounds, so that a profile can be fitted soon after the start. Points that the file holds are not measured again: with
the same `--out` a run goes on where an earlier one ended, also after a fault that torchrun restarts from.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cpsim.calibrate.measurement import Writer, cut_broken_end, known_points, point_key
from cpsim.cli.launch import PROGRESS
from cpsim.real.measure import cached as caches
from cpsim.real.measure import executor as executor
from cpsim.real.measure import host as others
from cpsim.real.measure import kernels as kernels_of
from cpsim.real.measure import network as network
from cpsim.real.measure.kernels import Bench
from cpsim.real.measure.shapes import (
    HEAD_DIM,
    LEAST_CALLS,
    LEAST_SIZES,
    RESTED_EVERY,
    ROUNDS,
    SHARES,
    Shape,
    draw,
    extremes_first,
    informative_order,
)
from cpsim.real.run import attention
from cpsim.real.run.node import end_process
from cpsim.schedule.schedule import Pass

NUM_SIZES = 33
"""Sizes of every kind of collective and transfer: two ends and five halvings."""
STEP_TOKENS = 4096
"""Tokens of the attention kernels that communication overlaps."""


@dataclass(frozen=True, slots=True)
class Task:
    """One point to measure."""

    key: str
    """What the file calls it."""
    measure: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Part:
    """Tasks of one kind in the order in which they inform."""

    name: str
    least: int
    """Tasks that are done however short the time, so that a profile can be fitted."""
    together: bool
    """Whether all ranks work on each task; otherwise these are this rank's own."""
    tasks: Sequence[Task]

    @property
    def share(self) -> float:
        """Share of the time; parts without one are short and always done."""
        return SHARES.get(self.name, 0.0)


class TimedWriter(Writer):
    """Says of every point when it was done, so that what points cost is known."""

    _begun = time.monotonic()

    def add(self, op: str, samples_s: Iterable[float] = (), **parameters: Any) -> None:
        """Appends one point."""
        super().add(op, samples_s, at_s=round(time.monotonic() - self._begun, 2), **parameters)


class Calibration:
    """The tasks of this rank, and what the file holds already."""

    def __init__(self, node: network.Network, out: Path, kernels: Sequence[str], command: str, commit: str) -> None:
        self.node, self.kernels = node, kernels
        begun = out.exists() and out.stat().st_size > 0
        node.gather(None)  # nobody writes before all have looked
        if node.rank == 0 and begun:
            cut_broken_end(out)
        node.gather(None)
        self.known = known_points(out) if begun else set()
        file = out.open("a", buffering=2**20, encoding="utf-8")  # a line is one write: ranks share the file
        header = None
        if node.rank == 0 and not begun:
            header = network.network_provenance(node, command, commit)
            header["kernels"] = {kernel: attention.kernel_version(kernel) for kernel in kernels}
        shared = TimedWriter(file, header)
        node.writer = shared if node.rank == 0 else None
        self.bench = Bench(TimedWriter(file, None, rank=node.rank), node.device)
        self.host_bench = Bench(shared, node.device)
        node.gather(None)

    def parts(self) -> list[Part]:
        """All parts, those that need several GPUs or power readings where there are any."""
        node, network_tasks = self.node, list(self.network())
        parts = [
            Part("host launches", 0, True, list(self.launches())),
            Part("memory-bound kernels", 2 * len(executor.MEMORY_BOUND), False, list(self.memory_bound())),
        ]
        if node.size > 1:
            least = LEAST_SIZES * len(network_tasks) // NUM_SIZES
            parts.append(Part("collectives and transfers", least, True, network_tasks))
            parts.append(Part("interference", 0, True, list(self.overlaps())))
        if node.size > 1 and node.cuda:
            parts.append(Part("power", 0, True, list(self.power())))
        parts.append(Part("attention kernels", LEAST_CALLS * len(self.kernels), False, list(self.attention())))
        if node.size > 1 and node.cuda:
            parts.append(Part("other people's code", 0, True, list(self.others())))
        return parts

    def launches(self) -> Iterator[Task]:
        node = self.node

        def graphs() -> None:
            for rank, times in enumerate(node.gather(executor.graph_times(node))):
                for kind, samples in times.items():
                    node.add("host", samples, kind=kind, rank=rank)

        def captured(tokens: int, pass_: Pass) -> None:
            found = executor.measure_graph(node, tokens, pass_)
            if node.writer is not None:
                executor.add_graph(node.writer, executor.graph_parameters(tokens, pass_), found)

        def pauses(protocol: str) -> None:
            node.add("host", executor.pause(node, protocol), kind=f"pause_{protocol}")

        def alone() -> None:
            if node.rank == 0:
                kernels_of.measure_host(self.host_bench, list(self.kernels))

        def cached(kind: str, tokens: int, num_sets: int) -> None:
            if node.writer is not None:
                caches.measure(node.writer, kind, tokens, num_sets, node.device)

        yield Task(point_key("host", kind="copy"), alone)
        for size in caches.FEW_SIZES if node.cuda else ():
            yield Task(point_key("cached", **caches.parameters(*size)), partial(cached, *size))
        if node.size > 1:
            yield Task(point_key("host", kind="all_gather"), partial(network.measure_host, node))
        yield Task(point_key("host", kind="graph_chain_16"), graphs)
        for call in product(executor.GRAPH_TOKENS if node.cuda else (), executor.PASSES):
            yield Task(point_key("graph", **executor.graph_parameters(*call)), partial(captured, *call))
        for protocol in ("synced", "held"):
            yield Task(point_key("host", kind=f"pause_{protocol}"), partial(pauses, protocol))

    def others(self) -> Iterator[Task]:
        """Host calls that only their code makes, and PyTorch's memory-bound kernels."""
        node = self.node

        def sweep(kind: str, tokens: int) -> None:
            if node.rank == 0:
                others.measure_sweep(self.host_bench, kind, tokens)

        yield Task(point_key("host", kind="autograd entry fwd"), lambda: others.measure(node, node.writer))
        for tokens, kind in product(others.SWEPT_TOKENS, others.SWEEPS):
            key = point_key("elementwise", **others.sweep_parameters(kind, tokens))
            yield Task(key, partial(sweep, kind, tokens))

    def memory_bound(self) -> Iterator[Task]:
        node, most = self.node, 65536 if self.node.cuda else 512
        for place in extremes_first(NUM_SIZES)[node.rank :: node.size]:
            tokens = round(64 * (most / 64) ** place)
            for variant in executor.MEMORY_BOUND:
                nbytes, kind = executor.moved_bytes(variant, tokens), variant.split("_")[0]
                key = point_key("elementwise", kind=kind, variant=variant, nbytes=nbytes, kernel="executor")
                yield Task(key, partial(executor.measure_size, node, self.bench.writer, variant, tokens))

    def network(self) -> Iterator[Task]:
        """Sizes from 16 KiB on; parts of a collective are multiples of 256 bytes."""
        node, num = self.node, 20 if self.node.cuda else 5
        kinds = [("collective", kind, n, node.max_bytes) for n in node.groups for kind in network.COLLECTIVES]
        kinds += [("transfer", "ring", n, node.max_bytes // 4) for n in node.groups]
        few = network.PATTERNS if node.size >= 4 else {}
        for i, place in enumerate(extremes_first(NUM_SIZES)):
            rare = [("transfer", kind, node.size, node.max_bytes // 8) for kind in few] if i < 9 else []
            for op, kind, n, top in (*kinds, *rare):
                nbytes = max(1, round(2**14 * (top / 2**14) ** place / (256 * n))) * 256 * n
                nbytes = min(nbytes, top // (256 * n) * 256 * n)
                key = point_key(op, kind=kind, num_ranks=n, nbytes=nbytes)
                yield Task(key, partial(network.measure_point, node, (op, kind, n, nbytes), num))

    def overlaps(self) -> Iterator[Task]:
        chosen = [kernel for kernel in self.kernels if kernel in LOADS] or self.kernels[:1]
        overlap = network.Overlap(self.node, [(k, STEP_TOKENS if self.node.cuda else 64, 1) for k in chosen])
        for a, b, units, inside, lead_s in overlap.cases():
            nbytes = units * overlap.unit
            key = point_key("overlap", a=a, b=b, num_ranks=self.node.size, nbytes=nbytes, inside=inside, lead_s=lead_s)
            yield Task(key, partial(overlap.measure, a, b, units, inside, lead_s))

    def power(self) -> Iterator[Task]:
        node = self.node
        for kind, op in executor.loads(node, self.kernels).items():
            yield Task(point_key("power", kind=kind), partial(executor.measure_load, node, node.writer, kind, op))

    def attention(self) -> Iterator[Task]:
        """The kernels in turn, each through its share of the shapes; some also at the full clock."""
        shares = [
            [(kernel, *call) for call in calls_of(kernel, self.node.cuda)[self.node.rank :: self.node.size]]
            for kernel in self.kernels
        ]
        for kernel, shape, rested in filter(None, chain(*zip_longest(*shares))):
            key = point_key(
                "attention",
                kernel=kernel,
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                causal=shape.causal,
                varlen=shape.varlen,
                q_lens=shape.q_lens,
                k_lens=shape.k_lens,
                rested=rested or None,
                **{"pass": "fwd"},
            )
            yield Task(key, partial(kernels_of.measure_attention, self.bench, kernel, shape, rested))

    def run(self, until: float) -> None:
        """Works until a time of `time.monotonic`."""
        started, parts = time.monotonic(), self.parts()
        for end in ROUNDS:
            stop = started + end * (until - started)
            for i, part in enumerate(parts):
                left = max(0.0, stop - time.monotonic())
                self.work(part, time.monotonic() + left * part.share / sum(later.share for later in parts[i:]))

    def work(self, part: Part, deadline: float) -> None:
        """Tasks of one part that are not done yet, until the deadline."""
        node, said = self.node, 0.0
        left = [task for task in part.tasks if task.key not in self.known]
        for done, task in enumerate(left, len(part.tasks) - len(left)):
            if part.share and done >= part.least and self.late(part, deadline):
                break
            task.measure()
            self.known.add(task.key)
            if time.monotonic() > said + 0.3:
                self.say(part)
                said = time.monotonic()
        node.gather(None)
        self.say(part)

    def late(self, part: Part, deadline: float) -> bool:
        """Whether a part's time is over; where all work together, the same on all ranks."""
        return self.node.late(deadline) if part.together else time.monotonic() > deadline

    def say(self, part: Part) -> None:
        """How far a part is: a line that `cpsim calibrate` draws."""
        if self.node.rank == 0:
            each = 1 if part.together else self.node.size
            done = sum(task.key in self.known for task in part.tasks) * each
            print(f"{PROGRESS}{json.dumps([part.name, done, len(part.tasks) * each])}", flush=True)


LOADS = ("fa4", "fa2", "math")
"""Kernels whose interference is measured; the others are of the class of one of them."""
POOL = {True: 480, False: 60}
"""Shapes of every kernel, on GPUs and on a CPU."""


def calls_of(kernel: str, cuda: bool) -> list[tuple[Shape, bool]]:
    """The calls to measure of one kernel, the most informative first, and whether the GPU rests before them.

    The same in every run. Some calls are ones that came before, now at the full clock, which a CPU does not have.
    """
    shapes = shapes_of(kernel, cuda)
    short = [shape for shape in shapes if shape.flops() <= kernels_of.RESTED_FLOPS]
    calls: list[tuple[Shape, bool]] = []
    for i, shape in enumerate(shapes, 1):
        calls.append((shape, False))
        if cuda and i % RESTED_EVERY == 0 and i // RESTED_EVERY <= len(short):
            calls.append((short[i // RESTED_EVERY - 1], True))
    return calls


def shapes_of(kernel: str, cuda: bool) -> list[Shape]:
    """Random shapes of one kernel in the order in which they inform."""
    rng, most = np.random.default_rng(20251121), kernels_of.MAX_FLOPS.get(kernel, 1e13) if cuda else 2e8
    pool: dict[Shape, None] = {}
    while len(pool) < POOL[cuda]:
        limit = most * (4 if cuda and rng.random() < 0.04 else 1) * (0.3 if rng.random() < 0.6 else 1)
        shape = draw(rng, limit, dense_only=kernel == "cudnn")
        if cuda or len(shape.q_lens) <= 16:  # plain PyTorch takes one document after another
            pool[shape] = None
    shapes = list(pool)
    return [shapes[i] for i in informative_order(shapes)]


def working(node: network.Network, kernels: Sequence[str]) -> list[str]:
    """The kernels that compute attention on this machine, on all ranks; says why the others do not."""
    found = []
    for kernel in kernels:
        reason = ""
        try:
            dense, *_ = kernels_of.checks(HEAD_DIM)
            if not kernels_of.are_right(kernels_of.relative_errors(kernel, dense, node.device)):
                reason = "expected attention, got other results"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        reasons = [text for text in node.gather(reason) if text]
        if not reasons:
            found.append(kernel)
        elif node.rank == 0:
            print(f"{kernel} left out: {reasons[0]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="measurement file; one that exists is gone on with")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--until", type=float, help="stop at this time instead [s since 1970]")
    parser.add_argument("--kernels", default="fa4,fa2,cudnn,sdpa_flash", help="those that do not work are left out")
    parser.add_argument("--cpu", action="store_true", help="gloo and plain PyTorch attention")
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    parser.add_argument("--command", default="torchrun -m cpsim.real.measure.calibrate", help="how the user said it")
    args = parser.parse_args()
    left = args.until - time.time() if args.until else 60 * args.minutes
    until = time.monotonic() + left
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    with network.Network(cpu=args.cpu) as node:
        kernels = working(node, args.kernels.split(",") if node.cuda else ["math"])
        if not kernels:
            raise SystemExit("cpsim.real.measure.calibrate: none of the kernels works here")
        Calibration(node, args.out, kernels, args.command, args.commit).run(until)


if __name__ == "__main__":
    main()
    end_process()
