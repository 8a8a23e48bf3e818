"""A program as a schedule: what every op costs, and when it runs.

GPUs of a step that do the same are one rank of the schedule. Its ops run on their streams as those of attention do, in
the same engines: computation loses to communication beside it what was measured. Attention of a layer is one op, whose
time its own schedule gives. Layers repeat, so that a few are simulated and the rest follow on a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.masks.slices import Ints, RangeSets, Slices
from cpsim.masks.tiles import ListedTiles
from cpsim.models.network.pressure import Messages, pressures
from cpsim.prediction.step.costs import PARTS, Costs, Parts, stacked
from cpsim.prediction.step.layer import Collective, Copy, ElementwisePass, Gemm
from cpsim.prediction.step.program import HostCopy, Node, Program
from cpsim.runtime.compiled import compiled
from cpsim.schedule.builder import Builder
from cpsim.schedule.schedule import STREAMS, Int8, Kind, Schedule
from cpsim.schedule.work import Bools, Work
from cpsim.sim.fast import simulate
from cpsim.sim.timeline import Timeline

Floats = NDArray[np.float64]
Launches = Mapping[str, tuple[float, ...]]
"""Seconds of one launch of the host, forward and backward, by stream; none where hosts are never late."""
_HOST: Final = PARTS.index("host")
_INTERFERENCE: Final = PARTS.index("interference")
INSTANT_S: Final = 1e-9
"""Waits of hosts that are shorter than this end the search for them."""
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
    """What ops of a program cost, attention aside."""

    costs: Costs
    kernel: str
    """Of attention."""
    sharded: Callable[[Collective], tuple[str, float]]
    """Cost model and seconds of a collective among replicas."""
    host_bytes_per_s: float
    """Each way between a GPU and its host."""

    def parts(self, node: Node) -> Parts:
        """Seconds of an op by cost model; none of attention."""
        match node.what:
            case None | str():
                return {}
            case HostCopy(nbytes):
                return {"transfer": nbytes / self.host_bytes_per_s}
            case Collective() if node.stream in ("gather", "scatter"):
                where, seconds = self.sharded(node.what)
                return {where: seconds}
            case _:
                return self.costs.seconds([node.what])


@dataclass(frozen=True, slots=True)
class Simulated:
    """A program in time."""

    timeline: Timeline
    parts: Floats
    """Of every op alone, by cost model, ``[N, len(PARTS)]``."""
    alone_s: Floats
    """Of every op alone, ``[N]``."""
    forward: int
    """Ops of the forward pass, which come first."""
    launched_s: float
    """When the host has launched the last op."""

    @property
    def ahead_s(self) -> float:
        """How long before the end of its last op the host has launched everything; negative where it is late."""
        return float(self.timeline.end_s.max()) - self.launched_s

    def seconds(self) -> Floats:
        """Seconds of both passes by cost model, along the critical path of each, ``[2, len(PARTS)]``.

        The backward pass begins where the last op of the forward one ends.
        """
        line, found = self.timeline, np.zeros((2, len(PARTS)))
        last = np.array([np.argmax(line.end_s[: self.forward]), np.argmax(line.end_s)])
        _along(found, last, line.start_s, line.end_s, line.cause, self.parts, self.alone_s, _HOST, _INTERFERENCE)
        return found


@compiled()
def _along(found, last, start, end, cause, parts, alone, host, interference):  # type: ignore[no-untyped-def]
    """Adds seconds by cost model along the critical paths that end with two ops, one after the other."""
    before, path = 0.0, np.empty(len(start), np.int64)
    for which in range(2):
        path[0], count = last[which], 1
        while cause[path[count - 1]] != path[count - 1]:
            path[count] = cause[path[count - 1]]
            count += 1
        for i in range(count - 1, -1, -1):
            op = path[i]
            if end[op] > before:
                found[which, host] += max(0.0, start[op] - before)
                share = (end[op] - max(start[op], before)) / (end[op] - start[op])
                for name in range(parts.shape[1]):
                    found[which, name] += share * parts[op, name]
                found[which, interference] += share * max(0.0, end[op] - start[op] - alone[op])
                before = end[op]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A program as a schedule, with what its ops cost. Attention costs what it costs a microbatch, and hosts are as
    fast as they are: both are said when it is simulated."""

    schedule: Schedule
    parts: Floats
    """Seconds by cost model, ``[N, len(PARTS)]``; none of attention."""
    alone_s: Floats
    """Their sums, ``[N]``."""
    attention: Mapping[str, Ints]
    """Ops that are attention, by pass."""
    unpressing: Bools
    """Ops that take nothing from others of their GPU: copies by copy engines, and what the network between nodes
    paces, ``[N]``."""
    calls: Ints
    """Launches of the host, ``[N]``."""
    launched: Ints
    """As ops of which stream it launches them: a place in ``STREAMS``, ``[N]``."""
    awaits: tuple[tuple[int, int], ...]
    """Ops before whose launch it waits for another, and that one, in order."""
    forward: int
    slowdown: Callable[[Sequence[str]], Floats]
    """Of classes of ops by each other, as ``InterferenceParams.slowdown``."""
    _pressed: dict[tuple[str, ...], tuple[Int8, Floats]] = field(default_factory=dict)
    _known: dict[str, tuple[Floats, float]] = field(default_factory=dict)

    def seconds(self, attention: tuple[Parts, Parts], launch_s: Launches, ahead_s: float = 0.0) -> Floats:
        """As ``Simulated.seconds``, worked out once; arguments as of ``simulated``."""
        return self._once(attention, launch_s, ahead_s)[0]

    def ahead_s(self, attention: tuple[Parts, Parts], launch_s: Launches) -> float:
        """As ``Simulated.ahead_s``, worked out with the seconds."""
        return self._once(attention, launch_s, 0.0)[1]

    def _once(self, attention: tuple[Parts, Parts], launch_s: Launches, ahead_s: float) -> tuple[Floats, float]:
        key = f"{attention} {launch_s} {ahead_s}"
        if key not in self._known:
            one = self.simulated(attention, launch_s, ahead_s)
            self._known[key] = one.seconds(), one.ahead_s
        return self._known[key]

    def simulated(self, attention: tuple[Parts, Parts], launch_s: Launches, ahead_s: float = 0.0) -> Simulated:
        """Simulates it.

        Args:
            attention: seconds of a layer's attention by cost model, forward and backward.
            launch_s: of hosts.
            ahead_s: how long before the GPU the host begins; negative: after it.
        """
        parts, alone_s, paced = self.parts, self.alone_s, list[str]()
        if any(attention):
            parts, alone_s = parts.copy(), alone_s.copy()
        for (name, ops), own in zip(self.attention.items(), attention, strict=True):
            if own:
                parts[ops], alone_s[ops] = stacked([own]), sum(own.values())
            if any(map(_is_paced, own)):
                paced.append(name)
        pressure, slowdown = self._pressure(tuple(paced))
        release_s = self._release_s(launch_s) - ahead_s
        run = partial(self._run, alone_s, pressure, slowdown)
        line = run(release_s)
        while launch_s and self.awaits and self._put_off(release_s, launch_s, line.end_s):
            line = run(release_s)
        return Simulated(line, parts, alone_s, self.forward, float(release_s.max(initial=-ahead_s)))

    def _run(self, alone_s: Floats, pressure: Int8, slowdown: Floats, release_s: Floats) -> Timeline:
        count, none = len(alone_s), np.zeros(0, np.int32)
        work = Work(
            duration_s=alone_s,
            release_s=np.maximum(release_s, 0.0),
            flow_start=np.zeros(count + 1, np.int32),
            flow_link=none,
            flow_bytes=np.zeros(0),
            link_bytes_per_s=np.zeros(0),
            pressure=pressure,
            slowdown=slowdown,
            eager=np.zeros(count, np.bool_),
        )
        return simulate(self.schedule, work)

    def _put_off(self, release_s: Floats, launch_s: Launches, end_s: Floats) -> bool:
        """Has hosts launch what they read something for, and all that follows, no sooner than that is made; whether
        this changes anything."""
        before, own_s = release_s.copy(), np.diff(self._release_s(launch_s), prepend=0.0)
        for op, other in self.awaits:
            release_s[op:] += max(0.0, end_s[other] + own_s[op] - release_s[op])
        return bool((release_s - before).max(initial=0.0) > INSTANT_S)

    def _pressure(self, paced: tuple[str, ...]) -> tuple[Int8, Floats]:
        """Classes of ops, and their slowdown of each other, where attention of these passes is paced, too."""
        if paced not in self._pressed:
            nothing, none = np.zeros(0, np.int64), np.zeros(0, np.int32)
            messages = Messages(none, none, (np.zeros(0), nothing, nothing), nothing)
            unpressing = self.unpressing.copy()
            for name in paced:
                unpressing[self.attention[name]] = True
            pressure, names = pressures(self.schedule, messages, unpressing)
            self._pressed[paced] = pressure, self.slowdown(names)
        return self._pressed[paced]

    def _release_s(self, launch_s: Launches) -> Floats:
        """When the host has launched every op."""
        each = np.array([launch_s.get(stream, (0.0, 0.0)) for stream in STREAMS])
        backward = (np.arange(len(self.calls)) >= self.forward).astype(np.int64)
        return np.cumsum(self.calls * each[self.launched, backward])


def planned(program: Program, prices: Prices) -> Planned:
    """Plans and prices a program."""
    nodes = [node for node in (*program.forward, *program.backward) if node.what is not None]
    known = dict[tuple[object, str], Parts]()  # layers are alike
    for node in nodes:
        if (node.what, node.stream) not in known:
            known[node.what, node.stream] = prices.parts(node)
    parts = [known[node.what, node.stream] for node in nodes]
    quiet = [isinstance(node.what, Copy | HostCopy) for node in nodes]
    paced = [any(map(_is_paced, each)) for each in parts]
    whats = {name: [i for i, node in enumerate(nodes) if node.what == name] for name in ("fwd", "bwd")}
    return Planned(
        schedule=_schedule(nodes),
        parts=stacked(parts),
        alone_s=np.array([sum(each.values()) for each in parts], np.float64),
        attention={name: np.array(ops, np.int64) for name, ops in whats.items()},
        unpressing=np.array(quiet, np.bool_) | np.array(paced, np.bool_),
        calls=np.array([node.calls for node in nodes]),
        launched=np.array([STREAMS.index(_launched(node)) for node in nodes]),
        awaits=tuple(
            (i, other) for i, others in enumerate(_makers(nodes, lambda node: node.awaits)) for other in others
        ),
        forward=sum(node.what is not None for node in program.forward),
        slowdown=partial(prices.costs.profile.interference.slowdown, prices.kernel),
    )


def _is_paced(name: str) -> bool:
    """Whether the network between nodes decides how long what a cost model says takes."""
    return name.endswith("between nodes")


def launches_seconds(program: Program, launch_s: Launches) -> Floats:
    """Seconds of all launches of the host, forward and backward, ``[2]``."""
    sides = enumerate((program.forward, program.backward))
    return np.array(
        [
            sum(n.calls * launch_s.get(_launched(n), (0.0, 0.0))[i] for n in side if n.what is not None)
            for i, side in sides
        ]
    )


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
    computed, found = -1, _makers(nodes, lambda node: node.reads)
    for i, node in enumerate(nodes):
        if node.stream == "comm" and computed >= 0:
            found[i] = sorted({*found[i], computed})
        if node.stream == "compute":
            computed = i
    return found


def _makers(nodes: Sequence[Node], names: Callable[[Node], Iterable[str]]) -> list[list[int]]:
    """Ops that have made what every op names of tensors, in order."""
    maker: dict[str, int] = {}
    found = list[list[int]]()
    for i, node in enumerate(nodes):
        found.append(sorted({maker[name] for name in names(node) if name in maker}))
        maker |= dict.fromkeys(node.makes, i)
    return found


def of_layers(seconds: Callable[[int], Floats], layers: int) -> Floats:
    """Seconds of both passes of so many layers by cost model, ``[2, len(PARTS)]``, by those of a few."""
    few, more = SIMULATED
    if layers <= more:
        return seconds(layers)
    a, b = map(seconds, SIMULATED)
    return np.asarray(b + (layers - more) * (b - a) / (more - few))
