"""When hosts have launched the ops of a schedule, and what the events between which kernels were measured add."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.models.conditions import Conditions
from cpsim.models.spread import expected_maximum
from cpsim.runtime.compiled import compiled, unsigned
from cpsim.schedule.schedule import (
    ATTENTION_KINDS,
    COMMUNICATION_KINDS,
    MEMORY_BOUND_KINDS,
    Kind,
    Pass,
    Schedule,
    is_one_of,
)

Floats = NDArray[np.float64]

COMPILED: Final = "compiled "
"""How names of measurements of compiled calls begin."""
HOT: Final = 0.15
"""Of what a view takes that follows other calls, what one takes that follows another view: 1.6 of some 10 us
(``python -m studies.windows.speed``)."""
EDGES: Final = ("entry", "begin", "exit")
"""What a call into other people's code costs the host beside its launches; see ``Implementation.launches``."""


def launch_notes(kinds: Sequence[Kind], pass_: Pass, given: Conditions) -> tuple[str, ...]:
    """Launches of other people's code that nobody has measured."""
    notes = []
    for kind in (*EDGES, *(kind.name.lower() for kind in kinds)):
        names = _names(given, kind, pass_)
        ours = [name for name in names if name.startswith(COMPILED)]
        if ours and given.profile.host.measured(ours) is None:
            notes.append(f"host: {ours[-1]} not measured, taken as {names[-1]} of calls that are not compiled")
        elif names and given.profile.host.measured(names) is None:
            instead = "left out" if kind in EDGES else "taken from another"
            notes.append(f"host: launch of {names[-1]} not measured, {instead}")
    return tuple(notes)


def release_times(schedule: Schedule, kinds: Sequence[Kind], pass_: Pass, given: Conditions) -> tuple[Floats, float]:
    """When every op has been launched [s], ``[N]``, and how long the slowest host takes for all of them [s].

    Hosts launch their ranks' ops in list order, a captured program at once. An iteration lasts until the host has
    returned, as far as the last op of a rank shows it. Threads differ in speed, and ranks wait for the slowest.
    """
    host = given.profile.host
    ahead = 0.0 if given.reads else given.ahead_s
    slowest = expected_maximum(round(schedule.num_ranks * given.alike))
    if given.captured:  # processes get their graphs started more or less soon, and sooner or later wait for the last
        begun = host.graph_s * float(np.exp(given.profile.sigma["graph"] * slowest))
        return np.full(len(schedule), max(begun - ahead, host.graph_queued_s) + host.cold_start_s), begun
    per_kind = np.zeros((2, len(Kind)))
    for (i, first), kind in product(enumerate((False, True)), kinds):
        name = kind.name.lower()
        per_kind[i, kind] = host.seconds(name, given.kernel, _names(given, name, pass_, first))
    if any(given.views):
        view = host.measured(["view in bwd", "view"] if pass_ == "bwd" else ["view"]) or 0.0
        count = given.views[pass_ == "bwd"]
        per_kind[:, list(ATTENTION_KINDS)] += min(count, 1) * view + max(count - 1, 0) * HOT * view
    # A batched send and receive is one call: half of it belongs to each of the two transfers.
    calls = np.array([2 if kind == Kind.TRANSFER else 1 for kind in Kind])
    talks = is_one_of(np.arange(len(Kind), dtype=np.int8), COMMUNICATION_KINDS)
    edges = np.array([host.measured(_names(given, edge, pass_)) or 0.0 for edge in EDGES])
    starts, ranks, ops = unsigned(schedule.lane_start, schedule.lane_rank, schedule.kind)
    launched = np.asarray(_launched(starts, ranks, ops, schedule.num_ranks, per_kind / calls, calls, talks, edges))
    launched *= float(np.exp(given.profile.sigma["host thread"] * slowest))
    return np.maximum(launched - ahead, 0.0), float(launched.max(initial=0.0))


def as_launched(schedule: Schedule, given: Conditions, *measured: Floats) -> None:
    """Change measured seconds of ops, ``[N]`` each: take out the events between which they were measured, at most half
    of them, and add what an op waits more where it is captured and follows an op of another stream.
    """
    gain = np.array([event_gain_s(kind, given) for kind in Kind])
    for seconds in measured:
        _take_out(seconds, schedule.kind, gain)
    if given.captured:
        crosses = _crossings(
            schedule.lane_start, schedule.lane_rank, schedule.lane_stream, schedule.dep_start, schedule.dep
        )
        for seconds in measured:
            seconds[crosses] += given.profile.host.graph_cross_s


@compiled()
def _take_out(seconds, kind, gain):  # type: ignore[no-untyped-def]
    for op in range(len(seconds)):
        seconds[op] -= min(gain[kind[op]], seconds[op] / 2)


def event_gain_s(kind: Kind, given: Conditions) -> float:
    """What the events add between which ops of a kind were measured [s]."""
    host = given.profile.host
    gains = host.captured_gain_s if given.captured else host.streamed_gain_s
    if kind in COMMUNICATION_KINDS:
        return gains["message"]
    if kind in MEMORY_BOUND_KINDS:
        return gains["memory-bound"]
    pass_ = "bwd" if kind == Kind.ATTENTION_BACKWARD else "fwd"
    return gains.get(f"{given.kernel} {pass_}" if kind in ATTENTION_KINDS else pass_, gains[pass_])


def _names(given: Conditions, kind: str, pass_: str, first: bool = False) -> list[str]:
    """Names of host measurements for other people's launches of a kind, or for the first of them."""
    names = [n.replace("{pass}", pass_).replace("{kernel}", given.kernel) for n in given.launches.get(kind, ())]
    ends = (f" in {pass_} first", f" in {pass_}", " first", "") if first else (f" in {pass_}", "")
    return [name + end for name in names for end in ends]


@compiled()
def _crossings(lane_start, lane_rank, lane_stream, dep_start, dep):  # type: ignore[no-untyped-def]
    """Whether each op follows an op of another stream of one of its ranks."""
    found = np.zeros(len(lane_start) - 1, np.bool_)
    for op in range(len(found)):
        for d in dep[dep_start[op] : dep_start[op + 1]]:
            fewer, more = (
                (op, d) if lane_start[op + 1] - lane_start[op] < lane_start[d + 1] - lane_start[d] else (d, op)
            )
            for lane in range(lane_start[fewer], lane_start[fewer + 1]):
                other = _lane_on(lane_rank[lane], lane_rank, lane_start[more], lane_start[more + 1])
                if other >= 0 and lane_stream[lane] != lane_stream[other]:
                    found[op] = True
                    break
            if found[op]:
                break
    return found


@compiled()
def _lane_on(rank, lane_rank, begin, end):  # type: ignore[no-untyped-def]
    """The lane of an op on a rank, -1 where it has none; ranks of collectives are mostly equally far apart."""
    if end - begin > 2 and lane_rank[begin + 1] != lane_rank[begin]:
        guess = begin + (rank - lane_rank[begin]) // (lane_rank[begin + 1] - lane_rank[begin])
        if begin <= guess < end and lane_rank[guess] == rank:
            return guess
    for lane in range(begin, end):
        if lane_rank[lane] == rank:
            return lane
    return -1


@compiled()
def _launched(lane_start, lane_rank, kind, num_ranks, cost, calls, talks, edges):  # type: ignore[no-untyped-def]
    """When the hosts of all its ranks have launched every op, ``[N]``; see ``release_times``."""
    clock, begun, last = np.zeros(num_ranks), np.full(num_ranks, np.inf), np.full(num_ranks, -1)
    at, done = np.zeros(len(lane_rank)), np.zeros((num_ranks, len(calls)), np.int64)
    for op in range(len(kind)):
        what = kind[op]
        for lane in range(lane_start[op], lane_start[op + 1]):
            rank = lane_rank[lane]
            if talks[what]:
                begun[rank] = min(begun[rank], clock[rank])
            clock[rank] += cost[int(done[rank, what] < calls[what]), what]
            done[rank, what] += 1
            at[lane], last[rank] = clock[rank], lane
    entry, begin, end = edges
    late, launched = np.maximum(entry, begin - begun), np.zeros(len(kind))
    for op in range(len(kind)):
        for lane in range(lane_start[op], lane_start[op + 1]):
            rank = lane_rank[lane]
            after = at[lane] + late[rank] + (end if lane == last[rank] else 0.0)
            launched[op] = max(launched[op], after)
    return launched
