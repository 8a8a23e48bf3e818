"""One pass of a case, simulated: all of it where it is small, and where it is large no more of it than differs.

Two things keep large machines affordable:

* *Folding*, exact: the GPUs of a Ulysses group do the same with other heads, so one of them is planned, priced and
  simulated, on its share of the node's links (``Cluster.folded``).
* *Continued rings*, not exact: in a ring of hundreds of places one step follows the other as the last one did, so the
  time grows with the places along a line. Rings of ``KNOWN_PLACES`` are simulated and the line is continued; how far
  the longest of them is from the line through the other two is said in a note. Only where every GPU has as much to do
  in a short ring as in a long one, or grows along a line: one document, whose mask is full, causal or a narrow window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np

from cpsim.case.workload import Workload
from cpsim.errors import CpsimError, InfeasibleError, OutOfMemoryError
from cpsim.models import settle
from cpsim.models.attention.calls import full_clock_op_seconds, working_memory
from cpsim.models.cost_models import GROUPS
from cpsim.models.feasible import limits_of
from cpsim.models.host import HELD_S
from cpsim.models.launches import event_gain_s
from cpsim.models.price import Priced, price
from cpsim.models.uncertainty import NUM_DRAWS, Draws, Floats, content
from cpsim.prediction.case import Case
from cpsim.prediction.size import DRAWN_GPUS, KNOWN_PLACES, MOST_PLACES, RINGS, grows_along_a_line
from cpsim.schedule.schedule import Kind, Pass, Planning, Schedule
from cpsim.sim.draws import Followed
from cpsim.sim.fast import simulate
from cpsim.sim.timeline import Timeline
from cpsim.strategies.others import CPSIM
from cpsim.strategies.sizes import Sizes
from cpsim.strategies.steps.layer import plan_scenario
from cpsim.strategies.usp import ulysses_degree

REPLANNED: Final = ("dcp", "distca")
"""Strategies whose backward pass may compute a tile on another rank than the forward pass."""
SURELY: Final = 0.95
"""Of attention at the full clock, what a pass takes at least: where messages hold SMs, an op may be priced a little
below what it takes alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a prediction says of a simulated schedule beside its time; a fraction of what the schedule takes."""

    parts_s: Mapping[str, float]
    exposed_s: float
    sent: Floats
    content: int
    """Equal of equal schedules, see ``cpsim.models.uncertainty.content``."""
    followed: Followed

    @classmethod
    def of(cls, timeline: Timeline, priced: Priced) -> Outcome:
        """What was simulated."""
        return cls(
            parts_s=priced.parts(timeline.critical_path(), timeline.start_s, timeline.end_s),
            exposed_s=timeline.exposed_communication_s(),
            sent=timeline.schedule.bytes_sent(),
            content=content(timeline.schedule),
            followed=Followed.of(timeline, priced.work, priced.group),
        )


@dataclass(frozen=True, kw_only=True)
class PassResult:
    """Result of one simulated pass."""

    time_s: float
    host_s: float
    """How long the slowest host takes to launch everything."""
    memory_bytes: int
    notes: tuple[str, ...]
    planning: Planning
    simulated: tuple[tuple[Timeline, Priced], ...]
    """The simulation that it is read from; of a continued ring the two rings that give the line. Empty where only the
    outcomes were kept."""
    kept: tuple[Outcome, ...] = ()
    surely_s: Mapping[Pass, float] = field(default_factory=dict)
    """What passes of the case surely take that compute what this one does, as far as somebody asked."""
    beyond: float = 0.0
    """How far a continued ring lies behind the longer of the two, in distances between them."""

    @cached_property
    def outcomes(self) -> tuple[Outcome, ...]:
        """What follows from each simulation."""
        return self.kept or tuple(Outcome.of(timeline, priced) for timeline, priced in self.simulated)

    def without_timelines(self) -> PassResult:
        """The same without schedules and when their ops run."""
        return replace(self, simulated=(), kept=self.outcomes)

    @property
    def parts_s(self) -> Mapping[str, float]:
        """Seconds on the critical path by cost model."""
        found = [one.parts_s for one in self.outcomes]
        return {name: self._at_least_none([parts[name] for parts in found]) for name in found[0]}

    @property
    def exposed_s(self) -> float:
        """Seconds in which the slowest rank computes nothing, see ``Timeline.exposed_communication_s``."""
        return self._at_least_none([one.exposed_s for one in self.outcomes])

    @property
    def sent(self) -> Floats:
        """Bytes that leave every rank, ``[ranks]``; of a continued ring those of the rank that sends most, ``[1]``."""
        found = [one.sent for one in self.outcomes]
        return found[0] if len(found) == 1 else np.array([self._at_least_none([float(one.max()) for one in found])])

    @property
    def timeline(self) -> Timeline | None:
        """None of a continued ring, and where timelines are left out."""
        return self.simulated[0][0] if len(self.simulated) == 1 else None

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """Schedules that were simulated; none where timelines are left out."""
        return tuple(timeline.schedule for timeline, _ in self.simulated)

    def makespans(self, draws: Draws) -> Floats:
        """The time with every draw of the cost models' errors, ``[NUM_DRAWS]``."""
        return self._continued([_drawn(one.followed, draws) for one in self.outcomes])

    def with_hosts(self, factors: Floats) -> Floats:
        """The time where hosts take so many times as long for their launches, ``[len(factors)]``."""
        same = np.ones(len(factors))
        groups = np.ones((len(GROUPS), len(factors)))
        return self._continued([one.followed.makespans(groups, same, factors) for one in self.outcomes])

    def _continued(self, of_rings: Sequence[Floats]) -> Floats:
        """Times from those of the simulations."""
        return of_rings[-1] + (of_rings[-1] - of_rings[0]) * self.beyond

    def _at_least_none(self, of_rings: Sequence[float]) -> float:
        return of_rings[0] if len(of_rings) == 1 else _further(of_rings[0], of_rings[1], self.beyond)


class TooSlowError(Exception):
    """A pass takes longer than anybody wants to know."""


def run_pass(case: Case, pass_: Pass, ahead_s: float = 0.0, most_s: float = float("inf")) -> PassResult:
    """Plans, prices and simulates one pass.

    Args:
        case: the case.
        pass_: forward or backward.
        ahead_s: how far hosts are ahead when it starts, where the protocol has them wait [s].
        most_s: it is not simulated where this and later passes of the case surely take longer [s].

    Raises:
        InfeasibleError: the strategy cannot run it, or it does not fit into memory (``OutOfMemoryError``).
        ProfileError: the profile lacks what it needs.
        TooSlowError: it takes longer than ``most_s``.
    """
    copies = _copies(case)
    if case.cluster.num_gpus // copies > MOST_PLACES and _continues(case, copies):
        return _continued(case, pass_, copies, ahead_s)
    return _simulated(case, pass_, copies, case.cluster.num_gpus, ahead_s, most_s)


def least_backward_s(case: Case, forward: PassResult) -> float:
    """Seconds that a backward pass takes at least, known before it is planned.

    It is not shorter than its forward pass, nor than what that computes takes backward, see ``_surely_s``.
    """
    if case.scenario.strategy in REPLANNED or len(forward.schedules) > 1:
        return forward.time_s
    known = forward.surely_s.get("bwd")
    return max(forward.time_s, _surely_s(case, forward.schedules[0], "bwd") if known is None else known)


def _surely_s(case: Case, schedule: Schedule, pass_: Pass) -> float:
    """Seconds that the tiles of a schedule take at least in a pass, whatever is sent: on the rank that has most pairs,
    at the full clock; 0 where that is not known."""
    given = case.conditions()
    if case.code is not CPSIM or given.sparse is not None or limits_of(given.kernel).any_mask:
        return 0.0
    ops = settle.attention_ops(schedule)
    rank, pairs = settle.ranks_of(schedule, ops), schedule.tiles.area[schedule.tile[ops]] * schedule.heads_of(ops)[:, 1]
    ops = ops[rank == np.bincount(rank, pairs, schedule.num_ranks).argmax()]
    try:
        params = given.attention_params(pass_)
    except CpsimError:  # which the pass says better
        return 0.0
    seconds = full_clock_op_seconds(params, schedule, ops, given.varlen, given.head_dim, given.value_dim)
    kind = Kind.ATTENTION if pass_ == "fwd" else Kind.ATTENTION_BACKWARD
    alone = seconds - np.minimum(event_gain_s(kind, given), seconds / 2)
    return float(SURELY * alone.sum())


def ranks_of(size: int) -> list[int]:
    """Those of so many ranks that are measured: the first, the one in the middle and the last."""
    return sorted({0, size // 2, size - 1})


def run_ranks(case: Case, pass_: Pass, ranks: Sequence[int], lead_s: float | None = None) -> list[Timeline]:
    """What some ranks compute in a pass, each simulated alone: nobody sends, and nobody is waited for.

    One GPU can measure it: see ``cpsim.real.measure.ranks``.

    Args:
        case: the case.
        pass_: forward or backward.
        ranks: which.
        lead_s: how long GPUs were kept waiting for their hosts before every iteration [s]; by default as the scenario's
            protocol says.

    Raises:
        InfeasibleError: the strategy cannot run it.
        ProfileError: the profile lacks what it needs.
    """
    schedule = plan_scenario(case.scenario, case.workload, case.cluster, pass_, case.code)
    alone = [schedule.computation(rank) for rank in ranks]
    given = replace(case.conditions(), alike=1 / schedule.num_ranks)  # one GPU and its host: no slowest one
    if lead_s is not None:
        given = replace(given, ahead_s=lead_s, pause_s=case.profile.host.pause_s["held"] + lead_s - HELD_S)
    return [simulate(mine, price(mine, given).work) for mine in alone]


def _copies(case: Case) -> int:
    """Replication factor: the size of a Ulysses group of consecutive GPUs of a node, where there are many GPUs."""
    scenario, cluster, knobs = case.scenario, case.cluster, case.scenario.knobs
    folds = scenario.strategy in ("usp", "loongtrain") and knobs.get("placement", "head_first") == "head_first"
    if not folds or scenario.part is not None or case.workload.sinks or cluster.num_gpus <= DRAWN_GPUS:
        return 1
    asked = knobs.get("ulysses")
    degree = ulysses_degree(str(scenario.strategy), case.workload, cluster, asked, "head_first", case.code)
    return degree if 1 < degree < cluster.num_gpus and cluster.can_fold(degree) else 1


def _simulated(
    case: Case, pass_: Pass, copies: int, num_gpus: int, ahead_s: float = 0.0, most_s: float = float("inf")
) -> PassResult:
    """A pass of a case whose GPUs stand for ``num_gpus``."""
    scenario, cluster = case.scenario, case.cluster
    if copies > 1:
        knobs = dict(scenario.knobs) | {"ulysses": copies}
        scenario, cluster = scenario.model_copy(update={"knobs": knobs}), cluster.folded(copies)
    folded = replace(case, scenario=scenario, cluster=cluster)
    own: Pass = "fwd" if "token_chunks" in scenario.knobs else pass_  # backward, a GPU holds gradients alone
    tokens = case.workload.num_tokens * num_gpus / case.cluster.num_gpus
    _check_memory(folded, least_memory(case.workload, case.cluster.num_gpus, own), tokens, "at least ")
    schedule = plan_scenario(scenario, case.workload, cluster, pass_, case.code)
    memory = _memory_of(schedule, case)
    _check_memory(folded, memory, tokens)
    surely = dict[Pass, float]()
    if most_s < float("inf"):
        again = pass_ == "fwd" and "bwd" in case.scenario.passes and scenario.strategy not in REPLANNED
        alike: tuple[Pass, ...] = (pass_, "bwd") if again else (pass_,)
        surely = {one: _surely_s(folded, schedule, one) for one in alike}
        if sum(surely.values()) > most_s:
            raise TooSlowError
    given = replace(case.conditions(), cluster=cluster, alike=num_gpus / cluster.num_gpus)
    priced = price(schedule, replace(given, ahead_s=max(ahead_s, given.ahead_s)))
    timeline = simulate(schedule, priced.work)
    notes = (f"{copies} GPUs of a node do the same each time: one of them is simulated",) if copies > 1 else ()
    return PassResult(
        time_s=timeline.makespan_s,
        host_s=priced.host_s,
        memory_bytes=memory,
        notes=(*notes, *_notes(case, schedule, pass_), *priced.notes),
        planning=schedule.planning,
        simulated=((timeline, priced),),
        surely_s=surely,
    )


def _notes(case: Case, schedule: Schedule, pass_: Pass) -> tuple[str, ...]:
    """What a strategy or somebody's code takes that is not in its time."""
    notes = list[str]()
    if case.workload.sinks and case.code is not CPSIM:
        notes.append(
            f"sinks: not measured in {case.scenario.kernel} of {case.code.name}, which takes them as arguments: "
            "taken as free, and so is the exchange of their gradients"
        )
    there = schedule.buffer_nbytes * schedule.on_host()
    if there.any():
        most = np.bincount(schedule.buffer_rank, there, schedule.num_ranks).max()
        when = "forward" if pass_ == "fwd" else "backward"
        notes.append(f"offload: {most / 1e9:.2f} GB of its host's memory for each GPU {when}, taken to be there")
    return tuple(notes)


def least_memory(workload: Workload, num_gpus: int, pass_: Pass) -> int:
    """Bytes that the fullest GPU holds at least, whatever the strategy: known before planning, which may take minutes.

    A GPU's share of queries and results, of keys and values, and in backward of the gradients of all of them.
    """
    sizes = Sizes(workload)
    queries = (workload.num_tokens - workload.cached) * 2 * sizes.query(workload.num_heads)
    held = queries + workload.num_tokens * sizes.kv(workload.num_kv_heads)
    return held * (1 if pass_ == "fwd" else 2) // num_gpus


def _memory_of(schedule: Schedule, case: Case) -> int:
    """Bytes on the fullest GPU."""
    if case.workload.sparse is not None:
        return int(schedule.memory().max())
    return int((schedule.memory() + working_memory(schedule, case.scenario.kernel, case.workload.head_dim)).max())


def _check_memory(case: Case, memory: int, tokens: float, bound: str = "") -> None:
    """Whether a GPU has as much as its fullest pass needs.

    Args:
        case: what was planned.
        memory: bytes on the fullest GPU.
        tokens: of the case that is asked about, of which ``case`` may be a smaller one.
        bound: what stands before the bytes; empty: other passes are looked at, too.

    Raises:
        OutOfMemoryError: it has not; says what all passes need, and what would fit.
    """
    limit = case.cluster.gpu.memory_bytes
    if memory <= limit:
        return
    if not bound:
        memory = max([memory, *(_planned_memory(case, pass_) for pass_ in case.scenario.passes)])
    fits = tokens * limit / memory
    about = f"{fits / 2**20:.3g}M" if fits >= 2**20 else f"{fits / 2**10:.3g}k"
    has = f"{case.cluster.gpu.name} has {limit / 1e9:.1f} GB"
    raise OutOfMemoryError(
        f"out of memory: needs {bound}{memory / 1e9:.1f} GB on one GPU, {has}; about {about} tokens would fit"
    )


def _planned_memory(case: Case, pass_: Pass) -> int:
    """Bytes on the fullest GPU in a pass that is planned for them alone; 0 where it cannot be."""
    try:
        return _memory_of(plan_scenario(case.scenario, case.workload, case.cluster, pass_, case.code), case)
    except InfeasibleError:
        return 0


def _drawn(followed: Followed, draws: Draws) -> Floats:
    factors = np.ones((len(GROUPS), NUM_DRAWS))
    for group in np.flatnonzero(np.bincount(followed.group, minlength=len(GROUPS))).tolist():
        factors[group] = draws.factor(GROUPS[group])
    return followed.makespans(factors, draws.factor("interference"), draws.factor("host"))


def _continues(case: Case, copies: int) -> bool:
    """Whether a ring's time is known from that of shorter rings with as many tokens on each GPU."""
    workload, cluster, strategy = case.workload, case.cluster, str(case.scenario.strategy)
    whole = workload.num_tokens % cluster.num_gpus == 0 and cluster.gpus_per_node // copies <= KNOWN_PLACES[0]
    ring = strategy in RINGS or (strategy == "usp" and copies > 1)
    if not (whole and ring) or len(workload.documents) > 1 or workload.cached or cluster.faults or case.scenario.part:
        return False
    tokens = workload.num_tokens // cluster.num_gpus * copies
    return grows_along_a_line(strategy, workload.mask, workload.mask_options, tokens)


def _continued(case: Case, pass_: Pass, copies: int, ahead_s: float = 0.0) -> PassResult:
    """A long ring from shorter ones: every number lies on the line through those of the two longest of them."""
    cluster, unit = case.cluster, case.cluster.gpus_per_node // copies  # places of a node
    nodes = [-(-known // unit) for known in KNOWN_PLACES]
    sizes = [max(nodes[i], nodes[0] + i) * unit * copies for i in range(len(nodes))]
    found = [_simulated(_smaller(case, size), pass_, copies, cluster.num_gpus, ahead_s) for size in sizes]

    beyond = (cluster.num_gpus - sizes[2]) / (sizes[2] - sizes[1])

    slope = (found[1].time_s - found[0].time_s) / (sizes[1] - sizes[0])
    expected = found[1].time_s + slope * (sizes[2] - sizes[1])
    off = abs(found[2].time_s / expected - 1)
    note = (
        f"rings of {cluster.num_gpus // copies} places: continued along a line from {sizes[1] // copies} and "
        f"{sizes[2] // copies} places, not simulated step by step; those are within {max(off, 1e-6):.0e} of the line "
        f"through {sizes[0] // copies} and {sizes[1] // copies}"
    )
    last = found[1:]
    memory = round(_further(last[0].memory_bytes, last[1].memory_bytes, beyond))
    _check_memory(case, memory, case.workload.num_tokens, "at least ")
    return PassResult(
        time_s=_further(last[0].time_s, last[1].time_s, beyond),
        host_s=_further(last[0].host_s, last[1].host_s, beyond),
        memory_bytes=memory,
        notes=(note, *last[1].notes),
        planning=last[1].planning,
        simulated=(*last[0].simulated, *last[1].simulated),
        beyond=beyond,
    )


def _further(shorter: float, longer: float, beyond: float) -> float:
    """Where the line through two numbers is, so many of their distances behind the second; at least 0."""
    return max(0.0, longer + (longer - shorter) * beyond)


def _smaller(case: Case, num_gpus: int) -> Case:
    """The case on fewer GPUs with as many tokens on each."""
    tokens = case.workload.num_tokens // case.cluster.num_gpus * num_gpus
    return replace(case, workload=replace(case.workload, documents=(tokens,)), cluster=case.cluster.with_gpus(num_gpus))
