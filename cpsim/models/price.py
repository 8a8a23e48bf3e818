"""Prices a schedule: durations, launches, flows and interference of every op, from a profile and a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.masks.slices import Ints
from cpsim.masks.tiles import sequences
from cpsim.models.attention.calls import held_op_seconds
from cpsim.models.conditions import Conditions
from cpsim.models.cost_models import GROUPS
from cpsim.models.feasible import check_calls, limits_of
from cpsim.models.kernels import attention_seconds, kernel_costs
from cpsim.models.launches import as_launched, launch_notes, release_times
from cpsim.models.network.collective import fits_buffers
from cpsim.models.network.communication import Communication
from cpsim.models.network.holds import few_waves, held_sms
from cpsim.models.network.links import Links, as_columns
from cpsim.models.network.pressure import Messages, pressures
from cpsim.models.settle import Settled, attention_ops, settle, slowest_of_many, with_faults
from cpsim.runtime.compiled import compiled
from cpsim.schedule.schedule import Int8, Int32, Kind, Pass, Schedule
from cpsim.schedule.work import Work, waits

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_PACED: Final = np.array([group.endswith("between nodes") for group in GROUPS])
"""Cost models of ops that the network between nodes paces. Interference was measured at NVLink's rates; a kernel beside
such an op neither takes memory bandwidth that it lacks nor loses much to it, so it presses on nothing."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A schedule's costs, ready for an engine."""

    work: Work
    group: Int8
    """Index into ``GROUPS`` of every op's cost model, ``[N]``."""
    host_s: float
    """How long the slowest host takes to launch everything [s]."""
    notes: tuple[str, ...]
    """Sizes outside of what was measured."""

    def parts(self, path: Ints, start_s: Floats, end_s: Floats) -> Mapping[str, float]:
        """Seconds of a critical path by cost model: ops as long as they take alone, what they lose to others running
        beside them, and what is not covered by ops, where ranks waited for the host.

        Args:
            path: ops of the path.
            start_s, end_s: of all ops, simulated.
        """
        alone = self.work.duration_s[path]
        by_group = np.bincount(self.group[path], weights=alone, minlength=len(GROUPS))
        lost = (end_s[path] - start_s[path] - alone).sum()
        by_group[GROUPS.index("interference")] = max(0.0, float(lost))
        by_group[GROUPS.index("host")] = float(end_s.max(initial=0.0)) - by_group.sum()
        return dict(zip(GROUPS, by_group.tolist(), strict=True))


def price(schedule: Schedule, given: Conditions) -> Priced:
    """Costs of every op: what it takes alone, at the clock that its GPU settles at, and what others take from it.

    Raises:
        InfeasibleError: the kernel cannot run some attention op in one call.
        ProfileError: the profile lacks the kernel.
    """
    kinds = schedule.kinds()
    pass_: Pass = "bwd" if Kind.ATTENTION_BACKWARD in kinds else "fwd"
    if given.sparse is None:
        check_calls(given.kernel, given.dtype, given.head_dim, schedule, given.direct, given.value_dim)
    base = _base_costs(schedule, pass_, given)
    before = waits(schedule, base.eager)
    release, host_s = release_times(schedule, kinds, pass_, given)
    settled = settle(schedule, pass_, base.endless_s, base.full_clock_s, release, before, base.paced, given)
    pressure, names = pressures(schedule, base.messages, base.paced)
    slowdown = given.profile.interference.slowdown(given.kernel, names)
    held, longer = _held(schedule, pass_, base, settled, pressure, slowdown, given)
    duration = settled.duration_s
    del settled
    duration = with_faults(schedule, slowest_of_many(schedule, pass_, duration, given), given)
    duration[held] += longer
    flow_start, flow_link, flow_bytes = base.flows
    _at_least_links(duration, flow_start, flow_link, flow_bytes, base.link_bytes_per_s)
    work = Work(
        duration_s=duration,
        release_s=release,
        flow_start=flow_start,
        flow_link=flow_link,
        flow_bytes=flow_bytes,
        link_bytes_per_s=base.link_bytes_per_s,
        pressure=pressure,
        slowdown=slowdown,
        eager=base.eager,
    )
    return Priced(work, base.group, host_s, base.notes)


@dataclass(frozen=True, slots=True)
class _BaseCosts:
    """What every op costs where it runs alone; columns of N ops."""

    endless_s: Floats
    """Seconds; of attention those of an endless run, at the clock that the power limit then leaves."""
    full_clock_s: Floats
    """Seconds of attention ops at the full clock, ``[A]``."""
    group: Int8
    eager: Bools
    paced: Bools
    messages: Messages
    link_bytes_per_s: Floats
    """Of every link."""
    flows: tuple[Int32, Int32, Floats]
    """CSR over ops: start, link and bytes."""
    notes: tuple[str, ...]


def _base_costs(schedule: Schedule, pass_: Pass, given: Conditions) -> _BaseCosts:
    """Kernels, launches, transfers and collectives, each as if it ran alone."""
    kinds = schedule.kinds()
    kernels = kernel_costs(schedule, given)
    endless, full_clock, group = kernels.endless_s, kernels.full_clock_s, kernels.group
    notes = dict.fromkeys((*kernels.notes, *launch_notes(kinds, pass_, given)))
    stream = schedule.lane_stream[schedule.lane_start[:-1]]
    links = Links(given.cluster, given.profile.collective.port_bytes_per_s, int(stream.max(initial=0)) + 1)
    messages = Messages.of(schedule, given.cluster, given.unbatched, given.messages)
    communication = Communication(given.cluster, given.profile, given.messages)
    flows = []
    for cost in (communication.transfers(schedule, messages, links), *communication.collectives(schedule, links)):
        endless[cost.op], group[cost.op] = cost.seconds, cost.group
        flows.append(links.on_streams(cost.flows, stream))
        notes.update(dict.fromkeys(cost.notes))
    as_launched(schedule, given, endless, full_clock)
    paced = _PACED[group]
    eager = np.zeros(len(schedule), np.bool_)
    fits = fits_buffers(*messages.kinds, given.messages)[messages.alike]
    eager[messages.op] = ~paced[messages.op] & fits
    return _BaseCosts(
        endless_s=endless,
        full_clock_s=full_clock[attention_ops(schedule)],
        group=group,
        eager=eager,
        paced=paced,
        messages=messages,
        link_bytes_per_s=links.capacity_bytes_per_s(),
        flows=as_columns(flows, len(schedule)),
        notes=tuple(notes),
    )


def _held(
    schedule: Schedule,
    pass_: Pass,
    base: _BaseCosts,
    settled: Settled,
    pressure: Int8,
    slowdown: Floats,
    given: Conditions,
) -> tuple[Ints, Floats]:
    """Ops that take longer because messages hold SMs at their start, and how many seconds beyond what their slowdown
    says.

    Only attention of few waves does; it is less than 0 where the last wave has room for what did not fit the first.
    """
    ops, near = attention_ops(schedule), ~base.paced[base.messages.op]
    if not (len(ops) and near.any()) or limits_of(given.kernel).any_mask or given.sparse is not None:
        return ops[:0], np.zeros(0)
    params = given.attention_params(pass_)
    tiles, tile, heads = sequences(schedule.tiles), schedule.tile[ops], schedule.heads_of(ops)[:, 1]
    ops = ops[few_waves(params, tiles.queries()[tile], tiles.keys()[tile], heads)]
    held, hold_s, by = held_sms(schedule, base.messages, near, ops, settled.start_s, settled.end_s)
    beside = by >= 0
    ops, held, hold_s, by = ops[beside], held[beside], hold_s[beside], by[beside]
    loss = hold_s * np.minimum(held / params.num_sms, 1 - 1 / slowdown[pressure[ops], pressure[by]])
    alone = attention_seconds(params, schedule, ops, given)[0]
    dims = {"head_dim": given.head_dim, "value_dim": given.value_dim}
    return ops, held_op_seconds(params, schedule, ops, held, hold_s, given.varlen, **dims) - alone - loss


@compiled(error_model="numpy")
def _at_least_links(duration, flow_start, flow_link, flow_bytes, capacity):  # type: ignore[no-untyped-def]
    """Make durations at least as long as their fullest links take."""
    for op in range(len(duration)):
        for entry in range(flow_start[op], flow_start[op + 1]):
            duration[op] = max(duration[op], flow_bytes[entry] / capacity[flow_link[entry]])
