"""A program as a schedule: what every op costs, and when it runs.

GPUs of a step that do the same are one rank of the schedule. Its ops run on their streams as those of attention do, in
the same engines: computation loses to communication beside it what was measured. Attention of a layer is one op, whose
time its own schedule gives. Layers repeat, so that a few are simulated and the rest follow on a line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.masks.slices import RangeSets, Slices
from cpsim.masks.tiles import ListedTiles
from cpsim.models.network.pressure import Messages, pressures
from cpsim.prediction.step.costs import PARTS, Costs, Parts
from cpsim.prediction.step.layer import Collective, Copy, ElementwisePass, Gemm
from cpsim.prediction.step.program import HostCopy, Node, Program
from cpsim.schedule.builder import Builder
from cpsim.schedule.schedule import Kind, Schedule
from cpsim.schedule.work import Work
from cpsim.sim.fast import simulate
from cpsim.sim.timeline import Timeline

Floats = NDArray[np.float64]
SIMULATED: Final = (3, 4)
"""Layers of the two programs that longer ones continue."""
_KINDS: Final = {
    "fwd": Kind.ATTENTION,
    "bwd": Kind.ATTENTION_BACKWARD,
    "all_gather": Kind.ALL_GATHER,
    "reduce_scatter": Kind.REDUCE_SCATTER,
    "all_reduce": Kind.ALL_REDUCE,
    "all_to_all": Kind.ALL_TO_ALL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What ops of a program cost."""

    costs: Costs
    kernel: str
    attention: Mapping[str, Parts]
    """Seconds of a layer's attention by pass and cost model."""
    sharded: Callable[[Collective], tuple[str, float]]
    """Cost model and seconds of a collective among replicas."""
    host_bytes_per_s: float
    """Each way between a GPU and its host."""
    launch_s: Mapping[str, tuple[float, ...]]
    """Seconds of one launch of the host, forward and backward, by stream; none where hosts are never late."""

    def parts(self, node: Node) -> Parts:
        """Seconds of an op by cost model."""
        match node.what:
            case None:
                return {}
            case HostCopy(nbytes):
                return {"transfer": nbytes / self.host_bytes_per_s}
            case str():
                return self.attention[node.what]
            case Collective() if node.stream in ("gather", "scatter"):
                where, seconds = self.sharded(node.what)
                return {where: seconds}
            case _:
                return self.costs.seconds([node.what])


@dataclass(frozen=True, slots=True)
class Simulated:
    """A program in time."""

    timeline: Timeline
    parts: tuple[Parts, ...]
    """Of every op."""
    forward: int
    """Ops of the forward pass, which come first."""

    def seconds(self) -> Floats:
        """Seconds of both passes by cost model, along the critical path of each, ``[2, len(PARTS)]``.

        The backward pass begins where the last op of the forward one ends.
        """
        start, end = self.timeline.start_s, self.timeline.end_s
        found = np.zeros((2, len(PARTS)))
        before = 0.0
        for pass_, last in enumerate((int(np.argmax(end[: self.forward])), int(np.argmax(end)))):
            for op in self.timeline.critical_path(last).tolist():
                if end[op] <= before:
                    continue
                found[pass_, PARTS.index("host")] += max(0.0, start[op] - before)
                share = (end[op] - max(start[op], before)) / (end[op] - start[op])
                for name, seconds in self.parts[op].items():
                    found[pass_, PARTS.index(name)] += share * seconds
                alone = sum(self.parts[op].values())
                found[pass_, PARTS.index("interference")] += share * max(0.0, end[op] - start[op] - alone)
                before = end[op]
        return found


def scheduled(program: Program, prices: Prices) -> Simulated:
    """Simulates a program."""
    nodes = [node for node in (*program.forward, *program.backward) if node.what is not None]
    forward = sum(node.what is not None for node in program.forward)
    parts = tuple(prices.parts(node) for node in nodes)
    duration = np.array([sum(each.values()) for each in parts])
    schedule = _schedule(nodes)
    quiet = [isinstance(node.what, Copy | HostCopy) for node in nodes]  # copy engines take nothing from SMs
    paced = np.array([any(name.endswith("between nodes") for name in each) for each in parts], np.bool_) | quiet
    none = np.zeros(0, np.int64)
    messages = Messages(none, np.zeros(0), none, none, (np.zeros(0), none, none))
    pressure, names = pressures(schedule, messages, paced)
    release = np.cumsum(_launch_seconds(nodes, forward, prices.launch_s))
    work = Work(
        duration_s=duration,
        release_s=release if prices.launch_s else np.zeros(len(nodes)),
        flow_start=np.zeros(len(nodes) + 1, np.int64),
        flow_link=np.zeros(0, np.int32),
        flow_bytes=np.zeros(0),
        link_bytes_per_s=np.zeros(0),
        pressure=pressure,
        slowdown=prices.costs.profile.interference.slowdown(prices.kernel, names),
        eager=np.zeros(len(nodes), np.bool_),
    )
    return Simulated(simulate(schedule, work), parts, forward)


def launches_seconds(program: Program, launch_s: Mapping[str, tuple[float, ...]]) -> Floats:
    """Seconds of all launches of the host, forward and backward, ``[2]``; see ``Prices.launch_s``."""
    return np.array(
        [
            sum(_launch_seconds(program.forward, len(program.forward), launch_s)),
            sum(_launch_seconds(program.backward, 0, launch_s)),
        ]
    )


def _launch_seconds(nodes: Sequence[Node], forward: float, launch_s: Mapping[str, tuple[float, ...]]) -> list[float]:
    """Seconds of the launches of every op, the first ``forward`` of which are of the forward pass."""
    never = (0.0, 0.0)
    return [
        node.calls * launch_s.get(_launched(node), never)[i >= forward] * (node.what is not None)
        for i, node in enumerate(nodes)
    ]


def _launched(node: Node) -> str:
    """As ops of which stream the host launches it: a copy is no call of NCCL."""
    return "compute" if isinstance(node.what, Copy) else node.stream


def _schedule(nodes: Sequence[Node]) -> Schedule:
    """Ops of one rank. What reads a tensor waits for the op that makes it; what tensor-parallel ranks exchange waits
    for whatever was launched before it."""
    nothing = np.zeros(0, np.int64)
    mask = Slices(*(nothing,) * 6)
    tiles = ListedTiles(np.zeros(2, np.int64), np.zeros((0, 5), np.int32), nothing, np.zeros(1, np.int64), mask)
    b = Builder(1, RangeSets(np.zeros(1, np.int64), np.zeros((0, 2), np.int64)), tiles)
    b.interleave(np.ones((len(nodes), 1), np.bool_))
    waits, alike = _waits(nodes), dict[tuple[Kind, str], list[int]]()
    for i, node in enumerate(nodes):
        alike.setdefault((_kind(node), node.stream), []).append(i)
    for (kind, stream), ops in alike.items():  # many ops at a time, which is what the builder is for
        deps = np.full((len(ops), max(1, *(len(waits[i]) for i in ops))), -1)
        for row, i in enumerate(ops):
            deps[row, : len(waits[i])] = waits[i]
        whats, lane = [nodes[i].what for i in ops], (np.zeros(len(ops), np.int64), stream)
        if kind is Kind.GEMM:
            m, n, k = np.array([(what.m, what.n, what.k) for what in whats if isinstance(what, Gemm)]).T
            b.add(kind, lane, at=np.array(ops), product=(m, n, k), deps=[deps])
        else:
            nbytes = [0 if isinstance(what, str | Gemm | None) else what.nbytes for what in whats]
            b.add(kind, lane, at=np.array(ops), nbytes=np.array(nbytes), deps=[deps])
    return b.build()


def _kind(node: Node) -> Kind:
    """Of an op of the schedule."""
    match node.what:
        case Gemm():
            return Kind.GEMM
        case ElementwisePass():
            return Kind.ELEMENTWISE
        case Copy():
            return Kind.ALL_GATHER
        case HostCopy():
            return Kind.COPY
        case Collective() as what:
            return _KINDS[what.kind]
        case what:
            return _KINDS[str(what)]


def _waits(nodes: Sequence[Node]) -> list[list[int]]:
    """Ops that every op waits for, in order."""
    maker: dict[str, int] = {}
    computed, found = -1, []
    for i, node in enumerate(nodes):
        deps = {maker[name] for name in node.reads if name in maker}
        if node.stream == "comm" and computed >= 0:
            deps.add(computed)
        found.append(sorted(deps))
        if node.stream == "compute":
            computed = i
        maker |= dict.fromkeys(node.makes, i)
    return found


def of_layers(seconds: Callable[[int], Floats], layers: int) -> Floats:
    """Seconds of both passes of so many layers by cost model, ``[2, len(PARTS)]``, by those of a few."""
    few, more = SIMULATED
    if layers <= more:
        return seconds(layers)
    a, b = map(seconds, SIMULATED)
    return np.asarray(b + (layers - more) * (b - a) / (more - few))
