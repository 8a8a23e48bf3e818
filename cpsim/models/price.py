"""Price a schedule: durations, launches, flows and interference of every op, from a profile and a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from numpy.typing import NDArray

from cpsim.case.cluster import Cluster
from cpsim.case.workload import BYTES_PER_ELEMENT
from cpsim.masks.slices import Ints
from cpsim.masks.tiles import sequences
from cpsim.models.attention.calls import attention_op_seconds, head_shapes, held_op_seconds
from cpsim.models.attention.kernels import AttentionParams
from cpsim.models.cache import share_cached, shares_cached, touched_bytes
from cpsim.models.cost_models import GROUPS
from cpsim.models.elementwise import elementwise_seconds
from cpsim.models.feasible import check_calls, copied_heads, limits_of, tile_visits
from cpsim.models.gemm import gemm_seconds
from cpsim.models.network.collective import fits_buffers
from cpsim.models.network.communication import Communication
from cpsim.models.network.holds import few_waves, held_sms
from cpsim.models.network.links import Flows, Links, as_columns
from cpsim.models.network.pressure import Messages, pressures
from cpsim.models.power import settled_seconds
from cpsim.models.spread import expected_maximum
from cpsim.runtime.compiled import compiled, unsigned
from cpsim.schedule.schedule import (
    ATTENTION_KINDS,
    COLLECTIVE_KINDS,
    COMMUNICATION_KINDS,
    MEMORY_BOUND_KINDS,
    READ,
    STREAMS,
    Int8,
    Kind,
    Pass,
    Schedule,
    is_one_of,
)
from cpsim.schedule.transformer import MAKER
from cpsim.schedule.work import Work, earliest, waits

if TYPE_CHECKING:
    from cpsim.case.workload import Workload
    from cpsim.models.profile import Profile
    from cpsim.strategies.others import Implementation

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Protocol = Literal["synced", "streamed"]

EDGES: Final = ("entry", "begin", "exit")
"""What a call into other people's code costs the host beside its launches: see ``Implementation.launches``."""
_MEMORY_NAMES: Final = {
    Kind.MERGE: "merge",
    Kind.ACCUMULATE: "accumulate",
    Kind.COPY: "copy",
    Kind.ELEMENTWISE: "copy",
}
_IS_ARRIVAL: Final = np.array([stream in ("recv", "grad_recv", "outer_recv") for stream in STREAMS])
"""A batched send and receive is one kernel; this end of it does not count again."""
_POWER_OF: Final = {
    **dict.fromkeys(Kind, "memory-bound"),
    Kind.TRANSFER: "transfer",
    **dict.fromkeys(COLLECTIVE_KINDS, "collective"),
    **dict.fromkeys((Kind.ATTENTION, Kind.ATTENTION_BACKWARD, Kind.BARRIER), "none"),
    Kind.GEMM: "products",
}
"""What ops draw power as, beside the attention whose clock it sets."""
_LIMITED: Final = {"products": 1.0}
"""Large products draw what the power limit allows."""
SETTLED_AFTER: Final = 8
SETTLED: Final = 1e-3
"""Rounds at most, and the relative change of an iteration's time, after which clocks are settled."""
_PACED: Final = np.array([group.endswith("between nodes") for group in GROUPS])
"""Groups of ops that the network between nodes paces: factors were measured at NVLink's rates, and a kernel beside
them neither takes memory bandwidth that they lack nor loses much to them, so they press on nothing."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A schedule's costs, ready for an engine."""

    work: Work
    group: Int8
    """Index into ``GROUPS`` of every op's cost model, ``[N]``."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """Everything that prices are made from."""

    cluster: Cluster
    profile: Profile
    kernel: str
    head_dim: int
    dtype: str
    protocol: Protocol
    launches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By kind of op, whose launches cost otherwise: see cpsim.strategies.others."""
    sweeps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The same for memory-bound kernels."""
    captured: bool = False
    """All ops of a rank are one CUDA graph, launched at once."""
    unbatched: bool = False
    """Every two ranks that send to each other have a process group of their own."""
    messages: int = 1
    """That a transfer is sent as, one after the other."""
    varlen: bool = False
    """Kernels are told the lengths of their sequences even where there is only one."""
    reads: bool = False
    """Hosts wait for their GPUs when an iteration starts."""
    alike: float = 1.0
    """GPUs that each one stands for, which do the same at the same time: the slowest is one of all of them."""

    @classmethod
    def of(
        cls,
        code: Implementation,
        strategy: str | None,
        workload: Workload,
        cluster: Cluster,
        profile: Profile,
        kernel: str,
        protocol: Protocol,
    ) -> Pricing:
        """What a code's ops cost, by the facts of it that hold for a strategy and a workload's mask."""
        support = code.support(strategy)
        return cls(
            cluster=cluster,
            profile=profile,
            kernel=kernel,
            head_dim=workload.head_dim,
            dtype=workload.dtype,
            protocol=protocol,
            launches=code.launches,
            sweeps=code.sweeps,
            captured=code.captured,
            unbatched=code.unbatched,
            messages=code.messages,
            varlen=workload.mask in support.varlen,
            reads=workload.mask in support.reads,
        )

    def price(self, schedule: Schedule) -> Priced:
        """Costs of every op.

        Raises:
            InfeasibleError: the kernel cannot run some attention op in one call.
            ProfileError: the profile lacks the kernel.
        """
        notes: dict[str, None] = {}
        kinds = schedule.kinds()
        pass_: Pass = "bwd" if Kind.ATTENTION_BACKWARD in kinds else "fwd"
        duration, full, group = self._kernels(schedule, kinds, notes)
        self._check_launches(kinds, pass_, notes)
        stream = schedule.lane_stream[schedule.lane_start[:-1]].astype(np.int64)
        links = Links(self.cluster, self.profile.collective.port_bytes_per_s, int(stream.max(initial=0)) + 1)
        messages = Messages.of(schedule, self.cluster, self.unbatched, self.messages)
        communication = Communication(self.cluster, self.profile, self.messages)
        flows = [communication.transfers(schedule, messages, links, duration, group, notes)]
        flows += communication.collectives(schedule, links, duration, group, notes)
        flows = [links.on_streams(some, stream) for some in flows]
        paced = _PACED[group]
        near = ~paced[messages.op]
        eager = np.zeros(len(schedule), np.bool_)
        eager[messages.op] = near & fits_buffers(*messages.kinds, self.messages)[messages.alike]
        release = self._releases(schedule, kinds, pass_)
        self._without_events(schedule, duration, full)
        attends = np.flatnonzero(is_one_of(schedule.kind, ATTENTION_KINDS))
        start, end = self._settle(schedule, pass_, attends, duration, full, release, eager, paced)
        self._wait_for_slowest(schedule, pass_, attends, duration)
        self._slow_down(schedule, duration)
        pressure, names = pressures(schedule, messages, paced)
        slowdown = self.profile.interference.slowdown(self.kernel, names)
        duration += self._held(schedule, pass_, attends, messages, near, start, end, pressure, slowdown)
        work = self._work(schedule, links, duration, flows, release, pressure, names, slowdown, eager)
        return Priced(work, group, tuple(notes))

    def _kernels(
        self, schedule: Schedule, kinds: Sequence[Kind], notes: dict[str, None]
    ) -> tuple[Floats, Floats, Int8]:
        """Seconds of every op that does not communicate, those of attention at the full clock, and the cost model of
        each, ``[N]``."""
        duration, full, cached = np.zeros(len(schedule)), np.zeros(len(schedule)), self._cached(schedule)
        group = np.full(len(schedule), GROUPS.index("memory-bound"), np.int8)
        for kind in kinds:
            if kind in COMMUNICATION_KINDS:
                continue
            ops = np.flatnonzero(schedule.kind == kind)
            if kind in ATTENTION_KINDS:
                which = "fwd" if kind == Kind.ATTENTION else "bwd"
                duration[ops], full[ops] = self._attention(schedule, ops, which, notes)
                group[ops] = GROUPS.index(f"attention {which}")
            elif kind == Kind.ELEMENTWISE and self.profile.layers and len(schedule.products):
                duration[ops], group[ops] = self._sweeps(schedule, ops, notes)
            elif kind in _MEMORY_NAMES:
                name = self._sweep(kind, notes)
                duration[ops] = elementwise_seconds(self.profile.elementwise, name, schedule.nbytes[ops], cached[ops])
            elif kind == Kind.GEMM:
                duration[ops] = self._products(schedule, notes)
                group[ops] = GROUPS.index("matrix products")
        return duration, full, group

    def _cached(self, schedule: Schedule) -> Floats:
        """Share of what memory-bound ops touch that the L2 cache holds, ``[N]``; other people's kernels are measured
        as they run one after the other."""
        size = self.profile.elementwise.cache_bytes
        return shares_cached(schedule, size) if size and not self.sweeps else np.zeros(len(schedule))

    def _products(self, schedule: Schedule, notes: dict[str, None]) -> Floats:
        """Seconds of all matrix products, as slow as on the slowest GPU."""
        _, m, n, k = schedule.products.T
        if self.profile.layers is None:
            notes["matrix products: not measured, at the rate of tiles of the attention kernel"] = None
            params = self.profile.attention_params(self.kernel, "fwd")  # two products of two FLOP per pair and element
            return np.asarray(2 * m * n * k * params.pair_s / (params.num_sms * 4 * params.head_dim))
        largest, most = float((2.0 * m * n * k).max()), self.profile.valid.get("matrix products", (0.0, 0.0))[1]
        if largest > most:
            notes[f"matrix products of {largest / 1e12:.0f} TFLOP, measured up to {most / 1e12:.0f}"] = None
        spread = self.profile.sigma["run to run"] * expected_maximum(schedule.num_ranks)
        return gemm_seconds(self.profile.layers.gemm, m, n, k) * (1 + spread)

    def _sweeps(self, schedule: Schedule, ops: Ints, notes: dict[str, None]) -> tuple[Floats, Ints]:
        """Seconds and cost models of elementwise ops: a layer's by what they read and make, and strided copies."""
        names = _ops_of_layer(schedule, ops)
        seconds, group = np.zeros(len(ops)), np.full(len(ops), GROUPS.index("elementwise of layers"))
        for name in np.unique(names).tolist():
            here, is_layer = names == name, bool(name)
            group[here] = GROUPS.index("elementwise of layers" if is_layer else "memory-bound")
            assert self.profile.layers is not None
            costs = self.profile.layers.ops if is_layer else self.profile.elementwise
            kind = name or self._sweep(Kind.ELEMENTWISE, notes)
            if f"{kind} in place" in costs.latency_s:
                kind = f"{kind} in place"
            elif is_layer:
                notes["memory-bound kernels of the executor's layers: not measured, taken as compiled ones"] = None
            seconds[here] = elementwise_seconds(costs, kind, schedule.nbytes[ops[here]])
        return seconds, group

    def _without_events(self, schedule: Schedule, *durations: Floats) -> None:
        """Ops without the events between which they were measured; where they are captured, with waits of streams."""
        gain = np.array([self._gain_s(kind) for kind in Kind])[schedule.kind]
        for seconds in durations:  # an op takes at least half of what was measured
            seconds -= np.minimum(gain, seconds / 2)
        if self.captured:
            crossing = _crossings(
                schedule.lane_start, schedule.lane_rank, schedule.lane_stream, schedule.dep_start, schedule.dep
            )
            for seconds in durations:
                seconds += crossing * self.profile.host.graph_cross_s

    def _gain_s(self, kind: Kind) -> float:
        """What the events add between which ops of a kind were measured."""
        host = self.profile.host
        gains = host.captured_gain_s if self.captured else host.streamed_gain_s
        if kind in COMMUNICATION_KINDS:
            return gains["message"]
        if kind in MEMORY_BOUND_KINDS:
            return gains["memory-bound"]
        pass_ = "bwd" if kind == Kind.ATTENTION_BACKWARD else "fwd"
        return gains.get(f"{self.kernel} {pass_}" if kind in ATTENTION_KINDS else pass_, gains[pass_])

    def _settle(
        self,
        schedule: Schedule,
        pass_: Pass,
        attends: Ints,
        duration: Floats,
        full: Floats,
        release: Floats,
        eager: Bools,
        paced: Bools,
    ) -> tuple[Floats, Floats]:
        """Attention ops at the clock that each GPU settles at, from what runs on it in an iteration and between two.

        Messages draw what their bytes do at the rate of a port, whatever paces them. A GPU is idle as long as the
        slowed iteration leaves it; where others are what takes long, it may make up for its clock.

        Returns:
            Start and end of every op where nothing slows another.
        """
        quick = duration.copy()
        quick[attends] = full[attends]
        before = waits(schedule, eager)
        start, end, _ = earliest(*before, quick, release)
        if not len(attends):
            return start, end
        loads = _LIMITED | dict(self.profile.load)
        load = np.array([loads.get(_POWER_OF[kind], 0.0) for kind in Kind])
        drawn, drawing = np.zeros(schedule.num_ranks), duration.copy()
        by_bytes = paced | (schedule.kind == Kind.TRANSFER)
        drawing[by_bytes] = np.minimum(drawing, schedule.nbytes / self.profile.collective.port_bytes_per_s)[by_bytes]
        lane_start, lane_rank, stream = unsigned(schedule.lane_start, schedule.lane_rank, schedule.lane_stream)
        _add_drawn(drawn, load, schedule.kind, drawing, lane_start, lane_rank, stream)
        ranks = schedule.lane_rank[schedule.lane_start[attends]].astype(np.int64)
        power = self.profile.attention_params(self.kernel, pass_).busy_power
        endless, pause = duration[attends], self.profile.host.pause_s[self.protocol]
        period = np.full(schedule.num_ranks, end.max())
        for _ in range(SETTLED_AFTER):
            duration[attends] = settled_seconds(full[attends], endless, ranks, drawn, period + pause, power)
            slowed = np.bincount(ranks, duration[attends] - full[attends], schedule.num_ranks)
            known, period = period, float(earliest(*before, duration, release)[1].max()) - slowed
            if np.allclose(known, period, rtol=SETTLED):
                break
        return start, end

    def _held(
        self,
        schedule: Schedule,
        pass_: Pass,
        ops: Ints,
        messages: Messages,
        near: Bools,
        start: Floats,
        end: Floats,
        pressure: Int8,
        slowdown: Floats,
    ) -> Floats:
        """Seconds that ops take longer because messages hold SMs at their start, beyond what their slowdown says.

        Of attention of few waves, ``[N]``; less than 0 where the last wave has room for what did not fit the first.
        ``ops`` are those of attention.
        """
        longer = np.zeros(len(schedule))
        if not (len(ops) and near.any()) or limits_of(self.kernel).any_mask:
            return longer
        params = self.profile.attention_params(self.kernel, pass_)
        tiles, tile, heads = sequences(schedule.tiles), schedule.tile[ops], schedule.heads[ops, 1]
        ops = ops[few_waves(params, tiles.queries()[tile], tiles.keys()[tile], heads)]
        held, hold_s, by = held_sms(schedule, messages, near, ops, start, end)
        beside = by >= 0
        ops, held, hold_s, by = ops[beside], held[beside], hold_s[beside], by[beside]
        loss = hold_s * np.minimum(held / params.num_sms, 1 - 1 / slowdown[pressure[ops], pressure[by]])
        alone = self._attention_seconds(params, schedule, ops)[0]
        longer[ops] = held_op_seconds(params, self.head_dim, schedule, ops, held, hold_s, self.varlen) - alone - loss
        return longer

    def _wait_for_slowest(self, schedule: Schedule, pass_: Pass, attends: Ints, duration: Floats) -> None:
        """Attention as slow as on the slowest of the GPUs that have the most of it: sooner or later all wait for it.

        GPUs of one type differ, and so does every call from the next; over the calls of a pass that partly cancels.
        """
        if not len(attends):
            return
        ranks = schedule.lane_rank[schedule.lane_start[attends]]
        busy = np.bincount(ranks, duration[attends], schedule.num_ranks)
        differs = duration[attends] * self.profile.attention_params(self.kernel, pass_).spread(duration[attends])
        of_calls = np.sqrt(np.bincount(ranks, differs**2, schedule.num_ranks))[busy.argmax()] / busy.max()
        spread = float(np.hypot(self.profile.between_gpus(self.kernel, pass_), of_calls))
        most = round(int((busy >= busy.max() * (1 - 2 * spread)).sum()) * self.alike)
        duration[attends] *= 1 + spread * expected_maximum(most)

    def _slow_down(self, schedule: Schedule, duration: Floats) -> None:
        """Kernels of GPUs with a fault; messages follow the rates of links."""
        slow = [fault for fault in self.cluster.faults if fault.part == "gpu"]
        if not slow:
            return
        rate = np.ones(schedule.num_ranks)
        for fault in slow:
            rate[fault.number] *= fault.rate
        kernels = ~is_one_of(schedule.kind, (*COMMUNICATION_KINDS, Kind.BARRIER))
        duration[kernels] /= rate[schedule.lane_rank[schedule.lane_start[:-1][kernels]]]

    def _sweep(self, kind: Kind, notes: dict[str, None]) -> str:
        """Name of the measured kernel that a memory-bound op costs as much as."""
        names = self.sweeps.get(kind.name.lower(), ())
        for name in names:
            if name in self.profile.elementwise.latency_s:
                if name != names[0]:
                    notes[f"memory-bound kernel {names[0]}: not measured, taken as {name}"] = None
                return name
        return _MEMORY_NAMES[kind]

    def _names(self, kind: str, pass_: str, first: bool = False) -> list[str]:
        """Names of host measurements for other people's launches of a kind, or for the first of them."""
        names = [n.replace("{pass}", pass_).replace("{kernel}", self.kernel) for n in self.launches.get(kind, ())]
        ends = (f" in {pass_} first", f" in {pass_}", " first", "") if first else (f" in {pass_}", "")
        return [name + end for name in names for end in ends]

    def _check_launches(self, kinds: Sequence[Kind], pass_: Pass, notes: dict[str, None]) -> None:
        for kind in (*EDGES, *(kind.name.lower() for kind in kinds)):
            names = self._names(kind, pass_)
            if names and self.profile.host.measured(names) is None:
                instead = "left out" if kind in EDGES else "taken from another"
                notes[f"host: launch of {names[-1]} not measured, {instead}"] = None

    def _work(
        self,
        schedule: Schedule,
        links: Links,
        duration: Floats,
        flows: list[Flows],
        release: Floats,
        pressure: Int8,
        names: list[str],
        slowdown: Floats,
        eager: Bools,
    ) -> Work:
        flow_start, flow_link, flow_bytes = as_columns(flows, len(schedule))
        capacity = links.capacity_bytes_per_s()
        _wait_for_links(duration, flow_start, flow_link, flow_bytes, capacity)
        return Work(
            duration_s=duration,
            release_s=release,
            flow_start=flow_start,
            flow_link=flow_link,
            flow_bytes=flow_bytes,
            link_bytes_per_s=capacity,
            pressure=pressure,
            slowdown=slowdown,
            waiting=self.profile.interference.waits(self.kernel, names),
            eager=eager,
        )

    def _attention(self, schedule: Schedule, ops: Ints, pass_: str, notes: dict[str, None]) -> tuple[Floats, Floats]:
        """Seconds without a pause, at the clock that the power limit then leaves, and at the full clock."""
        tiles = sequences(schedule.tiles)
        check_calls(self.kernel, self.dtype, self.head_dim, schedule)
        params = self.profile.attention_params(self.kernel, pass_)
        used = np.zeros(len(tiles.start) - 1, bool)
        used[schedule.tile[ops]] = True
        if params.anatomy.lists_blocks:
            masks = tile_visits(schedule, ops, self.head_dim * BYTES_PER_ELEMENT[self.dtype])
            rules = {mask.partial_rule() for mask in masks.values()}
            self.profile.check_rules(self.kernel, pass_, rules)
            notes.update(dict.fromkeys(self.profile.rule_notes(self.kernel, pass_, self.head_dim, rules)))
        seconds = self._attention_seconds(params, schedule, ops)
        if self.captured and not limits_of(self.kernel).places_results:
            seconds += self._placing(schedule, ops, notes)
        low, high = self.profile.valid.get(f"attention {pass_} {self.kernel} head_dim", (params.head_dim,) * 2)
        if not low <= self.head_dim <= high:
            notes[f"head_dim {self.head_dim}, measured {' to '.join(f'{d:g}' for d in sorted({low, high}))}"] = None
        elif (compiled_for := params.at(self.head_dim).head_dim) != self.head_dim:
            notes[f"head_dim {self.head_dim}: not measured, in proportion to {compiled_for}"] = None
        notes.update(
            dict.fromkeys(
                self.profile.attention_notes(self.kernel, pass_, *tiles.longest(used), head_shapes(schedule, ops)[0])
            )
        )
        return seconds[0], seconds[1]

    def _attention_seconds(self, params: AttentionParams, schedule: Schedule, ops: Ints) -> Floats:
        return attention_op_seconds(params, self.kernel, self.dtype, self.head_dim, schedule, ops, self.varlen)

    def _placing(self, schedule: Schedule, ops: Ints, notes: dict[str, None]) -> Floats:
        """Seconds that copies take where a kernel allocates its results, and those that PyTorch makes of its inputs."""
        costs, strided = self.profile.elementwise, "strided"
        side_by_side, apart, copies = copied_heads(self.kernel, schedule, ops)
        if strided not in costs.latency_s:
            strided = "copy"
            notes["copies of strided rows: not measured, taken as copies"] = None
        head_bytes = 2 * self.head_dim * BYTES_PER_ELEMENT[self.dtype]
        # a result waits for its copy while the rest of the call, and then of the copy, touches what else there is
        reused = (touched_bytes(schedule)[ops] + (side_by_side + apart) * head_bytes) / 2
        cached = share_cached(reused, costs.cache_bytes) / 2  # what is read; what is written is not there
        seconds = side_by_side / costs.bandwidth_bytes_per_s["copy"] + apart / costs.bandwidth_bytes_per_s[strided]
        launch = self.profile.host.captured_kernel_s or costs.latency_s["copy"]
        return np.asarray(copies * launch + seconds * head_bytes * (1 - costs.cache_gain * cached))

    def _releases(self, schedule: Schedule, kinds: Sequence[Kind], pass_: Pass) -> Floats:
        """When every op is launched: hosts launch their ranks' ops in list order, or a captured program at once.

        An iteration lasts until the host has returned, as far as the last op of a rank shows it.
        """
        lead = self.profile.host.lead_s if self.protocol == "streamed" and not self.reads else 0.0
        if self.captured:  # processes get their graphs started more or less soon, and sooner or later wait for the last
            last = self.profile.sigma["graph"] * expected_maximum(round(schedule.num_ranks * self.alike))
            host = self.profile.host
            started = max(host.graph_s * float(np.exp(last)) - lead, host.graph_queued_s)
            return np.full(len(schedule), started + host.cold_start_s)
        host, per_kind = self.profile.host, np.zeros((2, len(Kind)))
        for (i, first), kind in product(enumerate((False, True)), kinds):
            name = kind.name.lower()
            per_kind[i, kind] = host.seconds(name, self.kernel, self._names(name, pass_, first))
        # A batched send and receive is one call: half of it belongs to each of the two transfers.
        calls = np.array([2 if kind == Kind.TRANSFER else 1 for kind in Kind])
        talks = is_one_of(np.arange(len(Kind), dtype=np.int8), COMMUNICATION_KINDS)
        edges = np.array([host.measured(self._names(edge, pass_)) or 0.0 for edge in EDGES])
        starts, ranks, ops = unsigned(schedule.lane_start, schedule.lane_rank, schedule.kind)
        return np.asarray(
            _launched(starts, ranks, ops, schedule.num_ranks, per_kind / calls, calls, talks, edges, lead)
        )


def _ops_of_layer(schedule: Schedule, ops: Ints) -> NDArray[np.str_]:
    """Names of a layer's memory-bound ops, by the tensors that they read first and make; empty for copies."""
    first, end = schedule.access_start[ops], schedule.access_start[ops + 1]
    makes = np.append(np.flatnonzero(schedule.access_mode != READ), len(schedule.access_mode))
    made, num = makes[np.searchsorted(makes, first)], len(schedule.block_tensors)
    tensor = np.append(schedule.block_tensor[schedule.access_block], num)
    pair = np.where(first < end, tensor[first], num) * (num + 1) + np.where(made < end, tensor[made], num)
    alike, of_op = np.unique(pair, return_inverse=True)
    known = (*schedule.block_tensors, "")
    given = [(known[read], MAKER.get(known[write])) for read, write in (divmod(p, num + 1) for p in alike.tolist())]
    return np.array([op.kind if op is not None and op.reads[0] == read else "" for read, op in given])[of_op]


@compiled()
def _add_drawn(drawn, load, kind, duration, lane_start, lane_rank, lane_stream):  # type: ignore[no-untyped-def]
    """Add what ops draw to what their ranks do."""
    for op in range(len(kind)):
        for entry in range(lane_start[op], lane_start[op + 1]):
            if not _IS_ARRIVAL[lane_stream[entry]]:
                drawn[lane_rank[entry]] += load[kind[op]] * duration[op]


@compiled()
def _crossings(lane_start, lane_rank, lane_stream, dep_start, dep):  # type: ignore[no-untyped-def]
    """Whether each op follows an op of another stream of one of its ranks."""
    found = np.zeros(len(lane_start) - 1)
    for op in range(len(found)):
        for d in dep[dep_start[op] : dep_start[op + 1]]:
            for there in range(lane_start[d], lane_start[d + 1]):
                for here in range(lane_start[op], lane_start[op + 1]):
                    if lane_rank[here] == lane_rank[there] and lane_stream[here] != lane_stream[there]:
                        found[op] = 1.0
    return found


@compiled(error_model="numpy")
def _wait_for_links(duration, flow_start, flow_link, flow_bytes, capacity):  # type: ignore[no-untyped-def]
    """Make every op at least as long as its fullest link."""
    for op in range(len(duration)):
        for entry in range(flow_start[op], flow_start[op + 1]):
            duration[op] = max(duration[op], flow_bytes[entry] / capacity[flow_link[entry]])


@compiled()
def _launched(lane_start, lane_rank, kind, num_ranks, cost, calls, talks, edges, lead):  # type: ignore[no-untyped-def]
    """When the hosts of all its ranks have launched every op, ``[N]``; see ``_releases``."""
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
            launched[op] = max(launched[op], after - lead)
    return launched
