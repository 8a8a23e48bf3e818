"""The calls of one rank in launch order, each on its stream, waiting for the events of others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from cpsim.real.run.node import Node
from cpsim.schedule.schedule import ATTENTION_KINDS, COMMUNICATION_KINDS, Kind, Op

Launch = Callable[[], Any]
Call = tuple[Op, Launch]


class Program:
    """Calls in launch order, each on its stream, waiting for the events of others."""

    def __init__(self, node: Node, calls: list[Call], traced: bool) -> None:
        """Sends and receives of one step become one call.

        Args:
            node: this rank.
            calls: (op, call) in launch order; that of a transfer returns its `dist.P2POp`s.
            traced: name every op for the profiler.
        """
        batched = _batched(calls)
        self.calls = [(ops[0].name, call) for ops, call in batched]
        self.kinds = [ops[0].kind for ops, _ in batched]
        self.traced, self.on_gpu = traced, node.cuda
        if node.cuda:
            self._assign_streams([ops for ops, _ in batched])

    def _assign_streams(self, calls: list[tuple[Op, ...]]) -> None:
        """Every lane but ``compute``, which is the caller's stream, gets a stream of high priority."""
        lanes = [ops[0].lanes[0][1] for ops in calls]
        self.streams = {lane: torch.cuda.Stream(priority=-1) for lane in dict.fromkeys(lanes) if lane != "compute"}
        self.lanes = [self.streams.get(lane) for lane in lanes]
        call_of = {op.index: i for i, ops in enumerate(calls) for op in ops}
        waits = []
        for i, ops in enumerate(calls):
            needed = {call_of[d] for op in ops for d in op.deps if lanes[call_of[d]] != lanes[i]}
            last = {lanes[j]: j for j in sorted(needed)}  # a lane runs in order: its latest call is enough
            waits.append(sorted(last.values()))
        ends = {lane: i for i, lane in enumerate(lanes) if lane != "compute"}
        waited = {i: torch.cuda.Event() for i in sorted({j for w in waits for j in w} | set(ends.values()))}
        self.events = [waited.get(i) for i in range(len(calls))]
        self.waits = [[waited[j] for j in w] for w in waits]
        self.ends = [waited[i] for i in ends.values()]
        self.start = torch.cuda.Event()

    def rehearse(self) -> None:
        """Runs what this rank computes, without any communication, so that all kernels are compiled and loaded.

        Loading a kernel waits for all that the GPU has been given. Where ranks differ in what they run, one that loads
        behind a receive waits for another that loads behind a receive from the first, for ever.
        """
        for (_, call), kind in zip(self.calls, self.kinds, strict=True):
            if kind not in COMMUNICATION_KINDS:
                call()

    def attend(self) -> None:
        """Runs the attention kernels alone."""
        for (_, call), kind in zip(self.calls, self.kinds, strict=True):
            if kind in ATTENTION_KINDS:
                call()

    def run(self, marks: list[float] | None = None) -> None:
        """Launches every call; ``marks`` gets the host's clock [s] after each."""
        if not self.on_gpu:
            for name, call in self.calls:
                self._call(name, call)
                if marks is not None:
                    marks.append(time.perf_counter())
            return
        compute = torch.cuda.current_stream()
        self.start.record(compute)
        for stream in self.streams.values():
            stream.wait_event(self.start)
        for (name, call), side, waits, event in zip(self.calls, self.lanes, self.waits, self.events, strict=True):
            stream = compute if side is None else side
            for wanted in waits:
                stream.wait_event(wanted)
            if side is None:
                self._call(name, call)
            else:
                with torch.cuda.stream(side):
                    self._call(name, call)
            if event is not None:
                event.record(stream)
            if marks is not None:
                marks.append(time.perf_counter())
        for end in self.ends:
            compute.wait_event(end)

    def _call(self, name: str, call: Launch) -> None:
        if self.traced:
            with torch.profiler.record_function(name):
                call()
        else:
            call()


def computations(calls: list[Call]) -> list[Call]:
    """Calls without communication, none of which waits for any."""
    kept = [(op, call) for op, call in calls if op.kind not in COMMUNICATION_KINDS]
    known = {op.index for op, _ in kept}
    return [(replace(op, deps=tuple(d for d in op.deps if d in known)), call) for op, call in kept]


def _batched(calls: list[Call]) -> list[tuple[tuple[Op, ...], Launch]]:
    """Joins neighbouring transfers of one step into one batch of sends and receives."""
    joined: list[tuple[tuple[Op, ...], Launch]] = []
    i = 0
    while i < len(calls):
        op, call = calls[i]
        if op.kind != Kind.TRANSFER:
            joined.append(((op,), call))
            i += 1
            continue
        end = i
        while (
            end < len(calls)
            and calls[end][0].kind == Kind.TRANSFER
            and calls[end][0].step == op.step
            and (calls[end][0].lanes[0][1] == op.lanes[0][1])
        ):
            end += 1
        makes = [make for _, make in calls[i:end]]

        def exchange(makes: list[Launch] = makes) -> None:
            for work in dist.batch_isend_irecv([part for make in makes for part in make()]):
                work.wait()

        joined.append((tuple(o for o, _ in calls[i:end]), exchange))
        i = end
    return joined
