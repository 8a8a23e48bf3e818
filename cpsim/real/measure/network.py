"""Measures collectives, transfers, their sharing and their interference with computation on N GPUs of one node.

    torchrun --nproc-per-node 4 -m cpsim.real.measure.network --minutes 4 --out h200x4-network.jsonl

Every sample is the maximum over ranks of the CUDA-event time of one operation, started together after a device-side
barrier, with the queue kept full. Sizes follow nccl-tests: S is the total array of a collective (all-gather: the
gathered array; reduce-scatter: the whole input; all-to-all and all-reduce: one rank's buffer); a transfer's size is
one message. On a CPU it runs tiny sizes over gloo, to try the script.

With `--emulate-nodes 2` the ranks play two nodes linked by sockets, and only the network between nodes is measured:

    torchrun --nproc-per-node 4 -m cpsim.real.measure.network --emulate-nodes 2 --minutes 1.4 --out h200x4-sockets.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cpsim.calibrate.measurement import Writer
from cpsim.real.run import attention, elementwise
from cpsim.real.run.node import Node
from cpsim.real.run.timing import hold, host_seconds, provenance, soak, time_ops

COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
MEMORY_BOUND = ("merge", "copy")
"""Computation beside a communication that waits."""
LEAD_S = 3e-5
"""By which a communication starts before the computation that it disturbs."""
Launch = Callable[[], object]
NetworkPoint = tuple[str, str, int, int]
"""Op, kind, ranks, bytes."""


@dataclass(frozen=True, slots=True)
class Group:
    """A process group and the global ranks in it."""

    handle: Any
    ranks: tuple[int, ...]


class Network(Node):
    """This rank with groups of the first 2, 3, ... ranks, buffers, and the writer of rank 0."""

    def __init__(self, *, cpu: bool = False, num_nodes: int = 1) -> None:
        super().__init__(cpu=cpu, num_nodes=num_nodes)
        self.groups = {n: self.communicator(tuple(range(n))) for n in range(2, self.size + 1)}
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.max_bytes = 2**30 if self.cuda else 2**21
        elements = self.max_bytes // self.dtype.itemsize
        self.send = torch.randn(elements, device=self.device, dtype=self.dtype)
        self.receive = torch.empty(elements, device=self.device, dtype=self.dtype)
        self.writer: Writer | None = None

    def communicator(self, ranks: tuple[int, ...], *, urgent: bool = False) -> Group:
        """A new group; an urgent one runs NCCL on high-priority streams."""
        options = None
        if self.cuda:
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
        handle = dist.new_group(list(ranks), pg_options=options)
        if self.rank in ranks:  # all members make the communicator now: later calls may involve only some of them
            dist.all_reduce(torch.zeros(1, device=self.device), group=handle)
        return Group(handle, ranks)

    def add(self, op: str, samples: list[float], **parameters: Any) -> None:
        """Writes a point on rank 0."""
        if self.writer is not None:
            self.writer.add(op, samples, **parameters)

    def late(self, deadline: float) -> bool:
        """Whether some rank is past the deadline (of `time.monotonic`): the same answer on all of them."""
        return bool(self.maximum([float(time.monotonic() > deadline)])[0])


def collective(node: Network, kind: str, nbytes: int, group: Group) -> Launch | None:
    """Launches one collective of S = nbytes and waits for it on the current stream."""
    if node.rank not in group.ranks:
        return None
    n, handle = len(group.ranks), group.handle
    whole = max(8, nbytes // node.dtype.itemsize // (8 * n) * 8) * n  # parts of 16 bytes: unaligned ones are slow
    x, y = node.send[:whole], node.receive[:whole]
    part = whole // n
    return {
        "all_gather": lambda: dist.all_gather_into_tensor(y, x[:part], group=handle),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(y[:part], x, group=handle),
        "all_to_all": lambda: dist.all_to_all_single(y, x, group=handle),
        "all_reduce": lambda: dist.all_reduce(y, group=handle),
    }[kind]


def transfers(
    node: Network, pairs: list[tuple[int, int]], nbytes: int, group: Group, batched: bool = True
) -> Launch | None:
    """Sends nbytes along every (source, destination) pair at once."""
    mine = [(a, b) for a, b in pairs if node.rank in (a, b)]
    if not mine:
        return None
    count = max(1, nbytes // node.dtype.itemsize)
    slots = [slice(i * count, (i + 1) * count) for i in range(len(mine))]

    def launch() -> None:
        ops = []
        for (a, b), slot in zip(mine, slots, strict=True):
            if a == node.rank:
                ops.append(dist.P2POp(dist.isend, node.send[slot], b, group=group.handle))
            else:
                ops.append(dist.P2POp(dist.irecv, node.receive[slot], a, group=group.handle))
        if batched:
            works = dist.batch_isend_irecv(ops)
        else:
            works = [op.op(op.tensor, op.peer, group=group.handle) for op in ops]
        for work in works:
            work.wait()

    return launch


def mine(launch: Launch | None) -> Launch:
    """The launch of a rank that takes part."""
    assert launch is not None
    return launch


def ring(ranks: tuple[int, ...], step: int = 1) -> list[tuple[int, int]]:
    """Every rank to the next one."""
    return [(r, ranks[(i + step) % len(ranks)]) for i, r in enumerate(ranks)]


PATTERNS: dict[str, tuple[tuple[tuple[int, int], ...], bool]] = {
    "unidirectional": (((0, 1),), True),
    "unbatched": (((0, 1),), False),
    "unbatched_bidirectional": (((0, 1), (1, 0)), False),
    "disjoint_pairs": (((0, 1), (2, 3)), True),
    "shared_source": (((0, 1), (0, 2)), True),
    "shared_destination": (((1, 0), (2, 0)), True),
    "three_destinations": (((0, 1), (0, 2), (0, 3)), True),
}


def sizes(rng: np.random.Generator, num: int, low: float, high: float) -> list[int]:
    """Log-uniform, one in each of `num` equal strata, multiples of 256 bytes."""
    edges = np.linspace(np.log(low), np.log(high), num + 1)
    return [max(1, round(float(np.exp(rng.uniform(a, b))) / 256)) * 256 for a, b in itertools.pairwise(edges)]


def measure_network(node: Network, rng: np.random.Generator, deadline: float) -> None:
    """Collectives and transfers at random sizes, in random order."""
    top, num = node.max_bytes, 34 if node.cuda else 2
    points: list[NetworkPoint] = []
    for n in node.groups:
        for kind in COLLECTIVES:
            points += [("collective", kind, n, s) for s in sizes(rng, num, 2**14, top)]
        points += [("transfer", "ring", n, s) for s in sizes(rng, num, 2**14, top / 4)]
    if node.size >= 4:
        for kind in PATTERNS:
            points += [("transfer", kind, node.size, s) for s in sizes(rng, 12 if node.cuda else 1, 2**16, top / 8)]
    rng.shuffle(points)
    for op, kind, n, nbytes in points:
        if node.late(deadline):
            break
        measure_point(node, (str(op), str(kind), int(n), int(nbytes)))


def measure_point(node: Network, point: NetworkPoint, num: int = 20) -> None:
    """One collective or transfer pattern of one size."""
    op, kind, n, nbytes = point
    parameters = {"kind": kind, "num_ranks": n, "nbytes": nbytes}
    try:
        if op == "collective":
            launch = collective(node, kind, nbytes, node.groups[n])
        elif kind == "ring":
            launch = transfers(node, ring(node.groups[n].ranks), nbytes, node.groups[n])
        else:
            pairs, batched = PATTERNS[kind]
            launch = transfers(node, list(pairs), nbytes, node.groups[node.size], batched)
        node.add(op, node.samples(launch, num), **parameters)
    except Exception as error:  # symmetric over ranks, such as a call that gloo lacks
        node.add("error", [], failed=op, message=str(error)[:300], **parameters)


def measure_between_nodes(node: Network, rng: np.random.Generator, deadline: float, num_nodes: int) -> None:
    """The network between nodes: flows alone, together and both ways, collectives of all ranks and of a rank a node.

    Flows `inside` a node, too: in a process group of several nodes NCCL gives them few channels.

    Points are of op `fabric`; several groups or flows run at once where the point says so, each with `nbytes`.
    """
    per_node = node.size // num_nodes
    ranks = tuple(range(node.size))
    first, second = ranks[:per_node], ranks[per_node : 2 * per_node]
    one_way, back = list(zip(first, second, strict=True)), list(zip(second, first, strict=True))
    flows = {
        "one_flow": one_way[:1],
        "both_directions": one_way[:1] + back[:1],
        "all_flows": one_way,
        "all_flows_both_directions": one_way + back,
        "ring": ring(ranks),
        "inside": [pair for a in ranks if a % per_node % 2 for pair in ((a - 1, a), (a, a - 1))],
    }
    if not flows["inside"]:  # nodes of one GPU
        del flows["inside"]
    columns = [node.communicator(ranks[i::per_node]) for i in range(per_node)]
    mine, world = columns[node.rank % per_node], node.groups[node.size]
    groups = {"all": (world, 1), "a_rank_a_node": (columns[0], 1), "columns": (mine, per_node)}
    low, top, num = (2**14, 2**28, 9) if node.cuda else (2**12, 2**16, 1)
    points = [(kind, "", s) for kind in flows for s in sizes(rng, num, low, top)]
    points += [(kind, group, s) for kind in COLLECTIVES for group in groups for s in sizes(rng, num, low, top)]
    rng.shuffle(points)
    for kind, name, nbytes in [(str(a), str(b), int(c)) for a, b, c in points]:
        if node.late(deadline):
            break
        if name:
            group, num_groups = groups[name]
            launch = collective(node, kind, nbytes, group)
            parameters: dict[str, Any] = {"num_ranks": len(group.ranks), "num_groups": num_groups}
        else:
            launch = transfers(node, flows[kind], nbytes, world)
            parameters = {"flows": flows[kind]}
        parameters |= {"kind": kind, "nbytes": nbytes, "num_nodes": num_nodes, "gpus_per_node": per_node}
        try:
            repeats = int(np.clip(0.3 / (1e-4 + nbytes / 2e9), 4, 20))
            node.add("fabric", node.samples(launch, repeats), **parameters)
        except Exception as error:
            node.add("error", [], failed="fabric", message=str(error)[:300], **parameters)


def compute_loads(node: Network, kernels: Sequence[tuple[str, int, int]] = ()) -> dict[str, Launch]:
    """Computation that communication runs beside: attention of ring steps and memory-bound kernels.

    Args:
        node: this rank.
        kernels: attention kernels, tokens of a step, and documents that these are of.
    """
    loads: dict[str, Launch] = {}
    dtype = torch.bfloat16 if node.cuda else torch.float32
    usual = (
        (("fa4", 4096, 1), ("fa2", 4096, 1), ("fa4", 8192, 1), ("fa4", 8192, 16))
        if node.cuda
        else (
            ("math", 64, 1),
            ("math", 64, 4),
        )
    )
    for kernel, tokens, documents in kernels or usual:

        def random(heads: int, tokens: int = tokens) -> torch.Tensor:
            return torch.randn(tokens, heads, 128, device=node.device, dtype=dtype)

        lengths = (tokens // documents,) * documents
        call = attention.prepare(lengths, lengths, causal=False, device=node.device)
        q, k, v, dout = random(32), random(8), random(8), random(32)
        try:
            out, lse = attention.forward(kernel, q, k, v, call)
        except Exception as error:
            print(f"{kernel}: {error}", flush=True)
            continue
        name = f"{kernel}_{{}}_{tokens}" + (f"/{documents}" if documents > 1 else "")
        loads[name.format("fwd")] = partial(attention.forward, kernel, q, k, v, call)
        loads[name.format("bwd")] = partial(attention.backward, kernel, dout, q, k, v, out, lse, call)
    tokens = 8192 if node.cuda else 64
    acc = torch.randn(tokens, 32, 128, device=node.device)
    part = torch.randn(tokens, 32, 128, device=node.device, dtype=dtype)
    acc_lse, part_lse = (torch.randn(32, tokens, device=node.device) for _ in range(2))
    loads["merge"] = lambda: elementwise.merge(acc, acc_lse, part, part_lse, acc)
    copy = torch.empty_like(part)
    loads["copy"] = lambda: copy.copy_(part)
    return loads


def together(node: Network, ops: list[tuple[Launch, int]], streams: list[Any]) -> list[list[float]]:
    """Runs loops of several ops at once, one stream each, all behind one gate; seconds of the ops that overlapped.

    An operation counts when it lies wholly inside the span in which all loops run. With one op it is the op alone.
    """
    gate = torch.cuda.Event() if node.cuda else None
    node.barrier()
    hold(0.01 + 2.5e-4 * sum(num for _, num in ops), node.device)
    node.barrier()
    if gate is not None:
        gate.record()
    origin = node.event()
    origin.record()
    events = []
    for (op, num), stream in zip(ops, streams, strict=False):
        with torch.cuda.stream(stream) if node.cuda else nullcontext():
            if gate is not None:
                stream.wait_event(gate)
            marks = [node.event() for _ in range(num + 1)]
            marks[0].record()
            for mark in marks[1:]:
                op()
                mark.record()
            events.append(marks)
    node.synchronize()
    ends = [np.array([origin.elapsed_time(m) / 1e3 for m in marks]) for marks in events]
    first, last = max(e[0] for e in ends), min(e[-1] for e in ends)
    inside = [(e[:-1] >= first) & (e[1:] <= last + 1e-9) for e in ends]
    return [np.diff(e)[i].tolist() for e, i in zip(ends, inside, strict=True)]


def measure_pair(node: Network, names: tuple[str, str], ops: tuple[Launch, Launch], **parameters: Any) -> None:
    """Two endless streams of ops, each alone and both together: medians of every rank, raw samples of rank 0."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()] if node.cuda else [None, None]
    target, most = (0.1, 300) if node.cuda else (0.002, 5)

    def count(op: Launch) -> int:
        per_op = float(np.median(together(node, [(op, 6)], streams)[0]))
        return int(np.clip(node.maximum([target / per_op])[0], 8 if node.cuda else 3, most))

    nums = [count(op) for op in ops]
    alone = [together(node, [(op, num)], streams)[0] for op, num in zip(ops, nums, strict=True)]
    both = together(node, list(zip(ops, nums, strict=True)), streams)
    record: dict[str, Any] = {}
    for label, runs in (("alone", alone), ("together", both)):
        for which, run in zip(("a", "b"), runs, strict=True):
            medians: list[Any] = [None] * node.size
            dist.all_gather_object(medians, float(np.median(run)) if run else 0.0)
            record[f"{which}_{label}_rank_medians_s"] = medians
            record[f"{which}_{label}_s"] = [round(s, 10) for s in run[:60]]
    node.add("interference", [], a=names[0], b=names[1], **parameters, **record)
    if node.rank == 0:
        ratio = [np.median(b) / np.median(a) if a and b else float("nan") for a, b in zip(alone, both, strict=True)]
        print(f"loops   {names[0]:14s} {names[1]:18s} {parameters} x{ratio[0]:.3f} x{ratio[1]:.3f}", flush=True)


def overlapped(
    node: Network,
    compute: tuple[Launch, int] | None,
    communicate: Launch | None,
    streams: list[Any],
    num: int,
    lead_s: float = LEAD_S,
) -> tuple[list[float], list[float]]:
    """Starts a communication and, `lead_s` later, a run of compute ops: as a ring step does.

    Returns:
        Seconds of the whole compute run (mean over ranks) and of the communication (maximum over ranks), per repeat.
    """
    marks = []
    for _ in range(num):
        if compute is not None:
            soak(compute[0], 0.006, 0.001)  # the clock of a running program
        hold(0.004, node.device)
        node.barrier()
        gate = node.event()
        gate.record()
        events = [node.event() for _ in range(4)]
        if communicate is not None:
            with torch.cuda.stream(streams[1]) if node.cuda else nullcontext():
                if node.cuda:
                    streams[1].wait_event(gate)
                events[2].record()
                communicate()
                events[3].record()
        if compute is not None:
            with torch.cuda.stream(streams[0]) if node.cuda else nullcontext():
                if node.cuda:
                    streams[0].wait_event(gate)
                if lead_s:
                    hold(lead_s, node.device)
                events[0].record()
                for _ in range(compute[1]):
                    compute[0]()
                events[1].record()
        if node.cuda:
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)
        marks.append(events)
    node.synchronize()
    first = [m[0].elapsed_time(m[1]) / 1e3 if compute else 0.0 for m in marks]
    second = [m[2].elapsed_time(m[3]) / 1e3 if communicate else 0.0 for m in marks]
    mean = torch.tensor(first, dtype=torch.float64, device=node.device) / node.size
    dist.all_reduce(mean)
    return mean.tolist(), node.maximum(second)


def measure_overlap(node: Network, deadline: float) -> None:
    """Overlaps of every communication with every computation."""
    overlap = Overlap(node)
    for case in overlap.cases():
        if node.late(deadline):
            break
        overlap.measure(*case)


class Overlap:
    """How much computation and communication slow each other while both run, the communication starting first.

    In `inside: a` the communication lasts longer than the compute run, in `inside: b` the other way round; only the
    op that lies inside has its slowdown measured over its whole length. Messages of a ring come in sizes for which
    NCCL uses different numbers of channels, and also with both sides starting together (`lead_s: 0`).
    """

    def __init__(self, node: Network, kernels: Sequence[tuple[str, int, int]] = ()) -> None:
        self.node = node
        self.group, self.unit = node.groups[node.size], 2**20 if node.cuda else 2**8
        self.streams = [torch.cuda.Stream(), torch.cuda.Stream()] if node.cuda else [None, None]
        self.loads = compute_loads(node, kernels)

    def cases(self) -> list[tuple[str, str, int, str, float]]:
        """Names of computation and communication, its units of size, which of the two lies inside the other, lead."""
        rings = [("ring", *how) for how in ((512, "a"), (128, "b"), (32, "b"), (128, "a"))]
        others = [(kind, *how) for kind in COLLECTIVES[:3] for how in ((1024, "a"), (256, "b"))]
        cases = [(a, *how, LEAD_S) for how in [*rings[:2], *others, *rings[2:]] for a in self.loads]
        return cases + [(a, *how, 0.0) for how in rings for a in self.loads if a not in MEMORY_BOUND]

    def communication(self, kind: str, units: int) -> Launch | None:
        """A ring's hop or a collective of all ranks."""
        if kind == "ring":
            return transfers(self.node, ring(self.group.ranks), units * self.unit, self.group)
        return collective(self.node, kind, units * self.unit, self.group)

    def measure(self, a: str, b: str, units: int, inside: str, lead_s: float) -> None:
        """Writes one point; all ranks call."""
        node, nbytes, num = self.node, units * self.unit, 10 if self.node.cuda else 2
        op = self.communication(b, units)
        per_op = node.maximum([min(time_ops(self.loads[a], 4, node.device))])[0]
        b_alone = overlapped(node, None, op, self.streams, num)[1]
        span = float(np.median(b_alone)) * (0.6 if inside == "a" else 2.0)
        count = int(np.clip(round(span / per_op), 1, 200))
        a_alone = overlapped(node, (self.loads[a], count), None, self.streams, num)[0]
        both = overlapped(node, (self.loads[a], count), op, self.streams, num, lead_s)
        node.add(
            "overlap",
            [],
            a=a,
            b=b,
            nbytes=nbytes,
            num_ranks=node.size,
            inside=inside,
            lead_s=lead_s,
            a_count=count,
            a_alone_s=a_alone,
            b_alone_s=b_alone,
            a_together_s=both[0],
            b_together_s=both[1],
        )
        if node.rank == 0:
            x, y = (np.median(t) / np.median(s) for s, t in ((a_alone, both[0]), (b_alone, both[1])))
            print(
                f"overlap {a:14s} {b:14s} {units:4d} inside {inside} lead {lead_s * 1e6:2.0f} us: x{x:.3f} x{y:.3f}"
                f" ({np.median(a_alone) * 1e3:.2f} ms, {np.median(b_alone) * 1e3:.2f} ms)",
                flush=True,
            )


def measure_interference(node: Network, deadline: float) -> None:
    """Endless streams of computation and communication, at both stream priorities; two communications at once."""
    ranks = tuple(range(node.size))
    urgent, normal, other = (node.communicator(ranks, urgent=urgent) for urgent in (True, False, True))
    mb = 2**20 if node.cuda else 2**8

    def communications(group: Group) -> dict[str, Launch]:
        made = {"ring_128": mine(transfers(node, ring(ranks), 128 * mb, group))}
        return made | {f"{kind}_256": mine(collective(node, kind, 256 * mb, group)) for kind in COLLECTIVES[:3]}

    loads, first, second, slow = compute_loads(node), *map(communications, (urgent, other, normal))
    second["ring_back_128"] = mine(transfers(node, ring(ranks, -1), 128 * mb, other))
    cases: list[tuple[tuple[str, str], tuple[Launch, Launch], dict[str, Any]]] = []
    for a, b in (
        ("ring_128", "ring_128"),
        ("ring_128", "ring_back_128"),
        ("ring_128", "all_gather_256"),
        ("ring_128", "reduce_scatter_256"),
        ("ring_128", "all_to_all_256"),
        ("all_gather_256", "reduce_scatter_256"),
        ("all_to_all_256", "all_gather_256"),
    ):
        cases.append(((a, b), (first[a], second[b]), {"priority": "high"}))
    for (priority, made), b, a in itertools.product((("high", first), ("default", slow)), slow, loads):
        cases.append(((a, b), (loads[a], made[b]), {"priority": priority}))
    for names, ops, parameters in cases:
        if node.late(deadline):
            break
        measure_pair(node, names, ops, **parameters)


def measure_host(node: Network) -> None:
    """Wall seconds to launch each kind of communication and to wait for it on another stream."""
    group = node.groups[node.size]
    ops = {kind: mine(collective(node, kind, 2**16, group)) for kind in COLLECTIVES}
    ops["transfer_pair"] = mine(transfers(node, ring(group.ranks), 2**16, group))
    ops["unbatched_transfer_pair"] = mine(transfers(node, ring(group.ranks), 2**16, group, batched=False))
    for kind, op in ops.items():
        try:
            for _ in range(5):
                op()
            samples = []
            for _ in range(20):
                node.barrier()
                samples.append(host_seconds(op, 10, node.device))
            node.add("host", node.maximum(samples), kind=kind)
        except Exception as error:
            node.add("error", [], failed="host", message=str(error)[:300], kind=kind)


def summary(path: Path) -> None:
    """A short table of bus bandwidths by kind, ranks and size."""
    rows: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for line in path.read_text().splitlines()[1:]:
        point = json.loads(line)
        if point["op"] in ("collective", "transfer", "fabric"):
            best = float(np.median(point["samples_s"]))
            ranks = point.get("num_ranks", 0) * point.get("num_groups", 1)
            rows.setdefault((point["kind"], ranks), []).append((point["nbytes"], best))
    for (kind, n), points in sorted(rows.items()):
        points.sort()
        picked = points[:: max(1, len(points) // 6)]
        cells = [f"{b / 2**20:.3g}MiB:{s * 1e6:.0f}us:{b / s / 1e9:.0f}GB/s" for b, s in picked]
        print(f"{kind:24s} {n}", *cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", default="network,overlap,loops")
    parser.add_argument("--commit", default="", help="commit of the tree, where git is missing")
    parser.add_argument("--emulate-nodes", type=int, default=1, metavar="N", help="measure only between these nodes")
    args = parser.parse_args()
    started = time.monotonic()
    torch.manual_seed(args.seed)
    command = (
        f"torchrun -m cpsim.real.measure.network --minutes {args.minutes:g} --seed {args.seed} --parts {args.parts}"
    )
    command += f" --emulate-nodes {args.emulate_nodes}" if args.emulate_nodes > 1 else ""
    deadline = started + 60 * args.minutes
    with Network(num_nodes=args.emulate_nodes) as node:
        if node.rank == 0:
            header = network_provenance(node, command, args.commit)
            print(json.dumps(header), flush=True)
            node.writer = Writer(args.out.open("w", encoding="utf-8"), header)
        if args.emulate_nodes > 1:
            measure_between_nodes(node, np.random.default_rng(args.seed), deadline, args.emulate_nodes)
        else:
            measure_inside(node, args.parts, args.seed, started, 60 * args.minutes)
        node.add("end", [time.monotonic() - started])
        if node.rank == 0:
            summary(args.out)
            print(f"{time.monotonic() - started:.0f} s", flush=True)


def network_provenance(node: Network, command: str, commit: str) -> dict[str, Any]:
    """Header of a file of network points."""
    kernels = {k: attention.kernel_version(k) for k in ("fa2", "fa4")}
    header = provenance(node.device, node.size, kernels, command, commit)
    return header | {"environment": {k: v for k, v in os.environ.items() if k.startswith("NCCL_")}}


def measure_inside(node: Network, parts: str, seed: int, started: float, seconds: float) -> None:
    """Launches, collectives, transfers, and what they do to computation, inside one node."""
    measure_host(node)
    if "network" in parts:
        measure_network(node, np.random.default_rng(seed), started + seconds * 0.4)
    if "overlap" in parts:
        measure_overlap(node, started + seconds * 0.75)
    if "loops" in parts:
        measure_interference(node, started + seconds)


if __name__ == "__main__":
    main()
