"""DistCA's other experiments: runs with pipelines, and the speed-ups that its paper states for 64 to 512 GPUs.

Interim runs are the fastest of the plans that their script tried, which ``distca-plans.csv`` lists; which of them that
was, and which did not finish, is not recorded. WLB-ideal runs 1F1B, DistCA same-phase ticks whose attention all stages
serve. Runs on 512 GPUs have one plan each. For the paper's speed-ups both systems get the fastest of several plans.

DistCA's interim runs of ProLong have Pretrain's documents, see ``DRAWN``. What programs compute again in the backward
pass and send is told by their code and by what fitted into memory, see ``INTERIM`` and ``fits``. How long later runs
took from start to start is known, too, see ``walls``.

Reference: DistCA (arXiv 2510.18121), section 6 and tables 3 and 4; hao-ai-lab/DistCA at 9cb27ea, 031ba42, 3af30df and
c6c719e, programs and records of experiments.
Differs: as in ``studies.distca.reproduce``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Final, Literal

import numpy as np

from cpsim.case.parallel import PipelineSchedule, Recompute
from cpsim.errors import CpsimError, InfeasibleError, OutOfMemoryError
from cpsim.masks.slices import Ints
from cpsim.prediction.step.step import Step, StepModel
from cpsim.runtime.processes import Progress, mapped
from cpsim.strategies.distca.batches import DataSet, Packed, iteration, sample
from cpsim.strategies.distca.packing import BREAKPOINTS
from cpsim.units import MS_PER_S
from studies import published_lines
from studies.distca.reproduce import TP, Choice, Pooled, cut_model, pooled, wlb_step

Again = Literal["none", "mlp", "attention"]

FOLDER = Path(__file__).parent

ModelName = Literal["8b", "34b"]

K: Final = 1024
MODELS: Final = {"8b": "llama3-8b", "34b": "llama-34b"}
STAGES: Final = 2
"""Of pipelines of the paper's settings, as in the runs on 512 GPUs."""
REPLACED: Final = 0.3
"""Share of ProLong's long documents that become as long as a sequence, as scripts have it where nothing else is said
(CHANGE_LONG_DOC_RATIO)."""
ITERATIONS: Final = 5
"""Of interim runs, and of those on 512 GPUs."""
SPREAD: Final = range(0, 30, 5)
"""Iterations of the paper's 30 that speed-ups are means of: ProLong's long documents come first."""
TOLERANCE: Final = 0.1
"""Of DistCA's scheduler in its program with pipelines (tests/test_util.py at 031ba42)."""
BUFFER: Final = 2 * 1024**3
"""Bytes of a buffer of DistCA's exchanges (EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB of its scripts)."""
LATER_BUFFER: Final = 2 * BUFFER
"""The same of ``fits`` (benchmarks/_250923_test_pp_34b/salloc_srun.pp_34b.v2.sh at 3af30df)."""
LATER_TOLERANCE: Final = 0.05
"""Of DistCA's scheduler in ``walls``, where it begins (MIN_TOLERANCE_FACTOR in tests/test_util.py at 3af30df)."""
BAR: Final = 0.08
"""Mean error that predictions of runs with pipelines are to stay within."""
System = Literal["wlb", "distca"]
SYSTEMS: Final[tuple[System, System]] = ("wlb", "distca")
Lists = Mapping[str, Ints]
"""Original lists of document lengths by data set [tokens]; stand-ins take the place of others."""
DRAWN: Final = {"wlb": None, "distca": "pretrain"}
"""Data set of a system's interim runs, where it is another one than the table says. DistCA's times of "ProLong" are
within 5 % of those of Pretrain in all ten pairs, seven of them within 1 %, while WLB's are 6 to 31 % longer; and its
program had no argument for the data set when the runs began (tests/test_megatron_e2e_pipeline_with_cp.py at 9cb27ea,
whose default is Pretrain)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What a system's program did, whatever the plan."""

    again: Again = "mlp"
    """What the backward pass computes once more."""
    choice: Choice = field(default_factory=Choice)
    """Of DistCA."""
    schedule: PipelineSchedule = "1f1b"
    iterations: int = ITERATIONS
    """That times of interim runs are means of."""

    def cut(self, setting: Setting, plan: Plan) -> StepModel:
        """The model of a setting, cut as a plan says.

        Raises:
            ScenarioError, InfeasibleError: the cluster does not allow it.
        """
        sizes = setting.gpus, setting.context, setting.sequences
        degrees = {"cp": plan.cp, "pp": plan.stages, "microbatches": plan.microbatches}
        recompute: Recompute = "mlp" if self.again == "mlp" else "none"
        step = cut_model(MODELS[setting.model], *sizes, **degrees, recompute=recompute, schedule=self.schedule)
        return step if setting.layers is None else replace(step, model=replace(step.model, layers=setting.layers))


POOLED: Final = Choice(tolerance=TOLERANCE)
EACH: Final = replace(POOLED, each=True)
INTERIM: Final[Mapping[System, Program]] = {
    "wlb": Program(again="attention"),
    "distca": Program(choice=EACH, schedule="same_phase"),
}
"""Of interim runs, whose scripts ask for the MLP to be computed again.

WLB's program leaves ``recompute_modules`` unset (tests/test_megatron_e2e.py at 9cb27ea), and Megatron-Core 0.12.1 then
takes core attention: it gathers and attends twice. From 031ba42, where results were recorded, it has the MLP computed
again (tests/test_wlb_e2e.py); that its runs came before shows where only documents differ: from Pretrain to ProLong,
ten pairs grow by 1.33 times (median) what they would if it attended once.

DistCA's program does not pass the option on either, and its attention is no module that Megatron-Core could compute
again. But the MLP it did compute again a few days later, or memory would not have held its runs, see ``fits``; two of
the interim runs would need more than a GPU has, too. Its program of 21 September (9cb27ea) has no such option at all,
and a note at 031ba42 calls a plan out of memory that would have fitted: what interim runs computed again is not known
for sure, see pipelines.md.

DistCA's keys went to a server once for every task there. Since 5d51eca, which is younger than the results, they go
once. Its scripts say so, too: 34B with 512K "need 4GB nvshmem buffer to not get stuck", and 3.8 GB are predicted to be
received at once; it would be 0.7 GB if keys were sent once.
"""
PAPER: Final[Mapping[int, Mapping[System, Program]]] = {
    1: {"wlb": Program(), "distca": Program()},
    2: {"wlb": Program(), "distca": Program(choice=POOLED, schedule="same_phase")},
}
"""Of the paper's settings, by pipeline stages: all have the MLP computed again (tests/test_e2e_combined.py and
tests/test_wlb_e2e.py at c6c719e), as runs on 512 GPUs did, and keys are sent once."""
NOTHING: Final = replace(INTERIM["distca"], again="none")
OTHERWISE: Final[Mapping[System, Mapping[str, Program]]] = {
    "wlb": {"the MLP is computed again, not attention": Program()},
    "distca": {
        "nothing is computed again": NOTHING,
        "nothing is computed again, exchanges follow computation": replace(NOTHING, choice=replace(EACH, streams=1)),
        **{
            name: replace(INTERIM["distca"], choice=choice)
            for name, choice in {
                "keys are sent to a server once": POOLED,
                "exchanges cost nothing": replace(EACH, streams=0),
                "exchanges follow computation": replace(EACH, streams=1),
                "exchanges have 4/5 of the bandwidth": replace(EACH, bandwidth=0.8),
                "its scheduler's tolerance is 0.05": replace(EACH, tolerance=0.05),
            }.items()
        },
        "only the first iteration was recorded": replace(INTERIM["distca"], iterations=1),
    },
}
"""What interim runs might have been instead."""
OWN_DATA: Final = "ProLong's runs have its documents"
"""One more of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What systems are compared at."""

    data: DataSet
    model: ModelName
    gpus: int
    context: int
    """Tokens of a sequence, MaxDocLen."""
    sequences: int
    """Of an iteration."""
    stages: int = 1
    layers: int | None = None
    """Of the model, where a run left some out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a model is cut; replicas take what is left of the GPUs."""

    stages: int
    microbatches: int
    cp: int = 1
    """Of WLB-ideal; DistCA's servers need none."""

    def __str__(self) -> str:
        parts = [f"{self.stages} stages", f"{self.microbatches} microbatches"]
        return ", ".join(parts + [f"CP {self.cp}"] * (self.cp > 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Mean of some iterations under one plan [s]."""

    plan: Plan
    replicas: int
    time_s: float
    gathers_s: float = 0.0
    """Of `time_s`, in which keys and values are gathered and their gradients scattered."""
    hops_s: float = 0.0
    """In which activations and their gradients travel between stages."""
    idle_s: float = 0.0
    """In which the mean GPU waits for others: bubbles, and uneven microbatches and replicas."""
    memory_bytes: int = 0
    """Of DistCA's fullest stage, with the buffers of its exchanges."""
    buffer_bytes: int = 0
    """Of these buffers, what the fullest one must hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interim:
    """One interim run."""

    setting: Setting
    system: System
    published_s: float
    outcomes: tuple[Outcome, ...] = ()
    """Of the plans that were tried and fit into memory, the fastest first."""
    otherwise: Mapping[str, float] = field(default_factory=dict)
    """Mean of the then fastest plan if something were otherwise [s], see ``OTHERWISE``."""
    kept_bytes: int = 0
    """Least memory that any plan of DistCA needs in its first iteration if nothing is computed again."""

    @property
    def predicted_s(self) -> float:
        """Of the fastest plan."""
        return self.outcomes[0].time_s

    @property
    def error(self) -> float:
        """Predicted over published time, less one."""
        return self.predicted_s / self.published_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A run whose plan is recorded."""

    setting: Setting
    plan: Plan
    system: System = "wlb"
    tolerance: float = TOLERANCE
    """Of DistCA's scheduler."""
    iterations: int = ITERATIONS
    replaced: float = REPLACED
    """See ``sample``."""
    published_s: tuple[float, ...]
    """Of every iteration, or their mean."""
    predicted_s: tuple[float, ...] = ()
    """Of every iteration, which are the published ones where the list of documents is."""

    @property
    def error(self) -> float:
        """Predicted over published mean time, less one."""
        return mean(self.predicted_s) / mean(self.published_s) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether a run of DistCA fitted into memory."""

    setting: Setting
    plan: Plan
    fitted: bool
    memory_bytes: int = 0
    """Predicted; see ``distca_memory``."""
    kept_bytes: int = 0
    """The same if nothing were computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wall:
    """How long a run of DistCA took, with all that it did."""

    setting: Setting
    plan: Plan
    wall_s: float
    """From its start to that of the next run."""
    predicted_s: float = 0.0
    """Of all its iterations; the first one runs twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """The fastest WLB-ideal over DistCA; None where one of them fits into no memory."""

    setting: Setting
    predicted: float | None = None


STATED: Final[dict[tuple[int, DataSet, ModelName], tuple[float, float]]] = {
    **{(1, "pretrain", model): (1.07, 1.20) for model in ("8b", "34b")},
    **{(1, "prolong", model): (1.05, 1.12) for model in ("8b", "34b")},
    (2, "pretrain", "8b"): (1.15, 1.30),
    (2, "prolong", "8b"): (1.10, 1.35),
    (2, "pretrain", "34b"): (0.90, 1.15),
    (2, "prolong", "34b"): (0.90, 1.25),
}
"""Speed-ups that the paper states, by pipeline stages, data set and model; those of 34B with pipelines are "up to", on
an axis from 0.9."""
SEQUENCES: Final[dict[tuple[int, ModelName], dict[int, dict[int, int]]]] = {
    (1, "8b"): {64: {128: 8, 256: 4, 512: 2}, 128: {128: 16, 256: 8, 512: 4}, 256: {128: 32, 256: 16, 512: 8}},
    (1, "34b"): {64: {128: 4, 256: 2, 512: 2}, 128: {128: 8, 256: 4, 512: 4}, 256: {128: 16, 256: 8, 512: 8}},
    (2, "8b"): {64: {128: 32, 256: 16, 512: 8}, 128: {128: 64, 256: 32, 512: 8}, 256: {128: 128, 256: 32, 512: 16}},
    (2, "34b"): {128: {128: 32, 256: 16, 384: 8}, 256: {128: 64, 256: 32, 384: 8}, 512: {128: 128, 256: 32, 384: 16}},
}
"""Sequences of an iteration by stages and model, GPUs, and context [K tokens]: tables 3 and 4."""


def settings() -> list[Setting]:
    """All settings of the paper's tables 3 and 4, on both data sets."""
    return [
        Setting(data=data, model=model, gpus=gpus, context=context * K, sequences=sequences, stages=stages)
        for (stages, model), by_gpus in SEQUENCES.items()
        for data in ("pretrain", "prolong")
        for gpus, by_context in by_gpus.items()
        for context, sequences in by_context.items()
    ]


@cache
def published() -> tuple[Interim, ...]:
    """Interim runs."""
    return tuple(
        Interim(
            setting=_setting(line, data=line["dataset"]),
            system=line["system"],  # type: ignore[arg-type]
            published_s=float(line["mean_ms"]) / MS_PER_S,
        )
        for line in published_lines(FOLDER / "distca-interim.csv")
    )


@cache
def known() -> tuple[Known, ...]:
    """Runs on 512 GPUs: of WLB-ideal by iteration, and of 16 layers of both systems."""
    found = [
        Known(
            setting=_setting(line, data="prolong"),
            plan=_plan(line),
            replaced=float(line["replaced"]),
            published_s=tuple(float(ms) / MS_PER_S for ms in line["times_ms"].split()),
        )
        for line in published_lines(FOLDER / "distca-512.csv")
    ]
    found += [
        Known(
            setting=replace(_setting(line, data="prolong"), layers=int(line["layers"])),
            plan=_plan(line),
            system=line["system"],  # type: ignore[arg-type]
            tolerance=float(line["tolerance"] or TOLERANCE),
            iterations=int(line["iterations"]),
            published_s=(float(line["mean_ms"]) / MS_PER_S,),
        )
        for line in published_lines(FOLDER / "distca-known.csv")
    ]
    return tuple(found)


@cache
def fits() -> tuple[Fit, ...]:
    """Runs of DistCA that fitted into memory, and that did not."""
    return tuple(
        Fit(
            setting=_setting({**line, "model": "34b"}, data="pretrain"),
            plan=Plan(stages=int(line["stages"]), microbatches=int(line["microbatches"])),
            fitted=line["status"] == "pass",
        )
        for line in published_lines(FOLDER / "distca-memory.csv")
    )


@cache
def walls() -> tuple[Wall, ...]:
    """Runs of DistCA of 34B whose start, and the next one's, is recorded."""
    return tuple(
        Wall(
            setting=_setting({**line, "model": "34b"}, data="pretrain"),
            plan=Plan(stages=int(line["stages"]), microbatches=int(line["microbatches"])),
            wall_s=float(line["wall_s"]),
        )
        for line in published_lines(FOLDER / "distca-walls.csv")
    )


@cache
def tried() -> dict[tuple[str, int, int, int, str], tuple[Plan, ...]]:
    """Plans of interim runs by model, GPUs, context, sequences and system."""
    found: dict[tuple[str, int, int, int, str], tuple[Plan, ...]] = {}
    for line in published_lines(FOLDER / "distca-plans.csv"):
        key = line["model"], int(line["gpus"]), int(line["context"]), int(line["sequences"]), line["system"]
        found[key] = *found.get(key, ()), _plan(line)
    return found


def _setting(line: Mapping[str, str], data: str) -> Setting:
    numbers = {name: int(line[name]) for name in ("gpus", "context", "sequences")}
    return Setting(data=data, model=line["model"], **numbers)  # type: ignore[arg-type]


def _plan(line: Mapping[str, str]) -> Plan:
    return Plan(**{name: int(line[name]) for name in ("stages", "microbatches", "cp")})


def plans(setting: Setting, system: System) -> list[Plan]:
    """Of which the fastest counts at a setting of the paper.

    Those of WLB-ideal have all degrees of context parallelism, and the microbatches of later scripts at these sizes
    (benchmarks2/_251025_perseq_pp at c6c719e); those of DistCA all microbatches.
    """
    stages, replicas, half = setting.stages, setting.gpus // TP // setting.stages, setting.sequences // 2
    if system == "wlb":
        microbatches = 1 if stages == 1 else 8 if setting.context == 128 * K else 4
        cps = [cp for cp in (1, 2, 4, 8, 16, 32) if replicas % cp == 0]
        return [Plan(stages=stages, microbatches=microbatches, cp=cp) for cp in cps]
    tried = [m for m in (1, 2, 4, 8, 16) if half % m == 0 and m >= stages] if stages > 1 else [1]
    return [Plan(stages=stages, microbatches=microbatches) for microbatches in tried]


def outcomes(
    setting: Setting,
    program: Program,
    system: System,
    among: Sequence[Plan],
    packed: Packed,
    iterations: Sequence[int],
) -> list[Outcome]:
    """What plans take, the fastest first; without those that the cluster does not allow, and those of DistCA that do
    not fit into memory.

    Raises:
        InfeasibleError: none is left.
    """
    batches = [iteration(packed, i, setting.sequences // 2) for i in iterations]
    found = []
    for plan in among:
        try:
            step = program.cut(setting, plan)
            found.append(_mean([_outcome(setting, program, system, plan, step, batch) for batch in batches]))
        except CpsimError:
            continue
    if not found:
        raise InfeasibleError(f"{system}: no plan fits into memory")
    return sorted(found, key=lambda outcome: outcome.time_s)


def _mean(found: Sequence[Outcome]) -> Outcome:
    seconds = {name: mean(getattr(one, name) for one in found) for name in ("time_s", "gathers_s", "hops_s", "idle_s")}
    most = {name: max(getattr(one, name) for one in found) for name in ("memory_bytes", "buffer_bytes")}
    return replace(found[0], **seconds, **most)


def _outcome(
    setting: Setting, program: Program, system: System, plan: Plan, step: StepModel, nano_batches: Sequence[Ints]
) -> Outcome:
    """One iteration. DistCA's microbatches have as many sequences; those of the second nano-batches follow those of all
    first ones."""
    parallel, documents = step.parallel, np.concatenate(nano_batches)
    if system == "wlb":
        if len(documents) < parallel.dp * parallel.microbatches:
            raise InfeasibleError("wlb: fewer documents than places")
        done = wlb_step(step, documents, BREAKPOINTS[setting.model], again=program.again == "attention")
        return Outcome(
            plan=plan,
            replicas=parallel.dp,
            time_s=done.time_s,
            gathers_s=done.parts["collective between nodes"],
            hops_s=done.parts["transfer between nodes"],
            idle_s=_idle_s(done),
        )
    found = pooled(step, _microbatches(documents, plan), program.choice)
    memory = distca_memory(step, setting.sequences * setting.context, found)
    if memory > step.cluster.gpu.memory_bytes:
        raise OutOfMemoryError("distca: out of memory")
    return Outcome(
        plan=plan,
        replicas=parallel.dp,
        time_s=found.time_s,
        memory_bytes=memory,
        buffer_bytes=found.buffer_bytes,
    )


def _microbatches(documents: Ints, plan: Plan) -> list[tuple[Ints, Ints]]:
    """Both nano-batches of each."""
    cuts, count = _cut(documents, 2 * plan.microbatches), plan.microbatches
    return list(zip(cuts[:count], cuts[count:], strict=True))


def distca_memory(step: StepModel, tokens: int, found: Pooled, buffer: int = BUFFER) -> int:
    """Bytes of the fullest stage of ``distca``, with what its servers hold and four buffers of its exchanges: to send
    from and to receive into, for either nano-batch. They have twice their size where it is not enough.

    Args:
        step: the run.
        tokens: of an iteration.
        found: its time.
        buffer: bytes of a buffer.
    """
    parallel = step.parallel
    each = tokens // parallel.dp // parallel.microbatches
    most = max(step.stage_memory(each, stage, found.served_bytes).total for stage in range(parallel.pp))
    return most + 4 * (buffer if found.buffer_bytes <= buffer else 2 * buffer)


def _idle_s(step: Step) -> float:
    return step.time_s * step.idle_share


def _cut(documents: Ints, count: int) -> list[Ints]:
    """Equally many tokens each; sequences end at these cuts, so that no document lies across one."""
    ends, size = np.cumsum(documents), int(documents.sum()) // count
    edges = np.union1d(ends, np.arange(1, count) * size)
    lengths, part = np.diff(edges, prepend=0), (edges - 1) // size
    return [lengths[part == i] for i in range(count)]


def reproduce(
    runs: Sequence[Interim] | None = None,
    lists: Lists | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Interim]:
    """Interim runs with their predictions.

    Args:
        runs: that are wanted; None is all.
        lists: original lists of documents; None takes what stands in for them.
        jobs: processes; None uses all cores.
        progress: called with (done, total) runs.
    """
    chosen = published() if runs is None else runs
    asked = list(dict.fromkeys((setting, run.system) for run in chosen for setting in (_drawn(run), run.setting)))
    found = dict(zip(asked, mapped(partial(_interim, lists=lists or {}), asked, jobs, progress), strict=True))
    answered = []
    for run in chosen:
        answer, own = found[_drawn(run), run.system], found[run.setting, run.system]
        others = answer.otherwise if own is answer else {**answer.otherwise, OWN_DATA: own.predicted_s}
        answered.append(replace(answer, setting=run.setting, published_s=run.published_s, otherwise=others))
    return answered


def _drawn(run: Interim) -> Setting:
    """What a run really was."""
    return replace(run.setting, data=DRAWN[run.system] or run.setting.data)


def _interim(asked: tuple[Setting, System], lists: Lists) -> Interim:
    setting, system = asked
    among = tried()[setting.model, setting.gpus, setting.context, setting.sequences, system]
    packed = sample(setting.data, setting.context, lengths=lists.get(setting.data))
    found = outcomes(setting, INTERIM[system], system, among, packed, range(ITERATIONS))
    run = Interim(setting=setting, system=system, published_s=0.0, outcomes=tuple(found))
    if DRAWN[system] not in (None, setting.data):
        return run  # documents that it did not have: only its time is asked for
    others: dict[str, float] = {}
    for name, program in OTHERWISE[system].items():
        given = program, system, among, packed, range(program.iterations)
        with suppress(InfeasibleError):  # it would not fit into memory
            others[name] = outcomes(setting, *given)[0].time_s
    if system == "wlb":
        return replace(run, otherwise=others)
    first = np.concatenate(iteration(packed, 0, setting.sequences // 2))
    return replace(run, otherwise=others, kept_bytes=min(_needed(setting, plan, NOTHING, first) for plan in among))


def _needed(setting: Setting, plan: Plan, program: Program, documents: Ints, buffer: int = BUFFER) -> int:
    """Bytes of the fullest stage of ``distca`` in an iteration, whether or not a GPU has them."""
    step = program.cut(setting, plan)
    found = pooled(step, _microbatches(documents, plan), program.choice)
    return distca_memory(step, setting.sequences * setting.context, found, buffer)


def reproduce_known(
    runs: Sequence[Known] | None = None,
    lists: Lists | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Known]:
    """Runs on 512 GPUs with their predictions; arguments as of ``reproduce``."""
    chosen = known() if runs is None else runs
    times = mapped(partial(_known_seconds, lists=lists or {}), chosen, jobs, progress)
    return [replace(run, predicted_s=seconds) for run, seconds in zip(chosen, times, strict=True)]


def _known_seconds(run: Known, lists: Lists) -> tuple[float, ...]:
    setting, program = run.setting, PAPER[2][run.system]
    program = replace(program, choice=replace(program.choice, tolerance=run.tolerance))
    step = program.cut(setting, run.plan)
    packed = sample(setting.data, setting.context, lengths=lists.get(setting.data), replaced=run.replaced)
    batches = [iteration(packed, i, setting.sequences // 2) for i in range(run.iterations)]
    return tuple(_outcome(setting, program, run.system, run.plan, step, batch).time_s for batch in batches)


def reproduce_fits(
    runs: Sequence[Fit] | None = None,
    lists: Lists | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Fit]:
    """Memory that DistCA's runs need in their first iteration, whether or not they have it; arguments as of
    ``reproduce``."""
    return mapped(partial(_fit, lists=lists or {}), fits() if runs is None else runs, jobs, progress)


def _fit(run: Fit, lists: Lists) -> Fit:
    setting, program = run.setting, PAPER[2]["distca"]
    packed = sample(setting.data, setting.context, lengths=lists.get(setting.data))
    documents = np.concatenate(iteration(packed, 0, setting.sequences // 2))
    again, kept = (
        _needed(setting, run.plan, replace(program, again=what), documents, LATER_BUFFER) for what in ("mlp", "none")
    )
    return replace(run, memory_bytes=again, kept_bytes=kept)


def reproduce_walls(
    runs: Sequence[Wall] | None = None,
    lists: Lists | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Wall]:
    """Times of all iterations of runs whose start is recorded; arguments as of ``reproduce``."""
    return mapped(partial(_wall, lists=lists or {}), walls() if runs is None else runs, jobs, progress)


def _wall(run: Wall, lists: Lists) -> Wall:
    setting, program = run.setting, PAPER[2]["distca"]
    packed = sample(setting.data, setting.context, lengths=lists.get(setting.data))
    program = replace(program, choice=replace(program.choice, tolerance=LATER_TOLERANCE))
    step = program.cut(setting, run.plan)
    batches = [iteration(packed, i, setting.sequences // 2) for i in (0, *range(ITERATIONS))]
    taken = (pooled(step, _microbatches(np.concatenate(batch), run.plan), program.choice).time_s for batch in batches)
    return replace(run, predicted_s=sum(taken))


def worth(runs: Sequence[Interim]) -> dict[System, dict[str, list[float]]]:
    """Errors of interim runs as predicted, if what a prediction has were not there or otherwise, and if another plan
    were the fastest to finish.

    Returns:
        by system and assumption, predicted over published time, less one, of every run that has it.
    """
    return {system: _worth([run for run in runs if run.system == system]) for system in SYSTEMS}


def _worth(runs: Sequence[Interim]) -> dict[str, list[float]]:
    def errors(seconds: Sequence[tuple[Interim, float]]) -> list[float]:
        return [taken / run.published_s - 1 for run, taken in seconds]

    best = [(run, run.outcomes[0]) for run in runs]
    names = dict.fromkeys(name for run in runs for name in run.otherwise)
    found = {"as predicted": errors([(run, one.time_s) for run, one in best])}
    found |= {name: errors([(run, run.otherwise[name]) for run in runs if name in run.otherwise]) for name in names}
    if any(one.gathers_s for _, one in best):
        more = [(run, [one for one in run.outcomes if one.replicas > 1]) for run in runs]
        found |= {
            "gathers cost nothing": errors([(run, one.time_s - one.gathers_s) for run, one in best]),
            "transfers between stages cost nothing": errors([(run, one.time_s - one.hops_s) for run, one in best]),
            "nobody waits: no bubbles, all even": errors([(run, one.time_s - one.idle_s) for run, one in best]),
            "plans of one replica did not finish": errors([(run, ones[0].time_s) for run, ones in more if ones]),
        }
    return found | {"the slowest plan that was tried": errors([(run, run.outcomes[-1].time_s) for run in runs])}


def speed_ups(
    wanted: Sequence[Setting] | None = None,
    iterations: Sequence[int] = SPREAD,
    lists: Lists | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[SpeedUp]:
    """Speed-ups at the settings of the paper; arguments as of ``reproduce``."""
    chosen = settings() if wanted is None else wanted
    ratios = mapped(partial(_speed_up, iterations=iterations, lists=lists or {}), chosen, jobs, progress)
    return [SpeedUp(setting=setting, predicted=ratio) for setting, ratio in zip(chosen, ratios, strict=True)]


def _speed_up(setting: Setting, iterations: Sequence[int], lists: Lists) -> float | None:
    packed = sample(setting.data, setting.context, lengths=lists.get(setting.data))
    there = [i for i in iterations if (i + 1) * setting.sequences <= len(packed)]
    try:
        wlb, distca = (
            outcomes(setting, PAPER[setting.stages][system], system, plans(setting, system), packed, there)[0].time_s
            for system in SYSTEMS
        )
    except InfeasibleError:
        return None
    return wlb / distca
