"""DistCA's other experiments: interim runs with pipelines, and the speed-ups that its paper states for 64 to 512 GPUs.

Of these neither the plans nor all times are recorded, so that every system gets the fastest of the plans that fit into
memory: microbatches, and context parallelism of WLB-ideal. Pipelines have two stages, as in the one record that names
its plan (34B on 512 GPUs: pipeline 2, context parallelism 4, five iterations). WLB-ideal runs 1F1B, DistCA same-phase
ticks whose attention all stages serve.

Reference: DistCA (arXiv 2510.18121), section 6 and tables 3 and 4; hao-ai-lab/DistCA, records of experiments.
Differs: as in ``studies.distca.reproduce``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Final, Literal

import numpy as np

from cpsim.errors import CpsimError, InfeasibleError, OutOfMemoryError
from cpsim.masks.slices import Ints
from cpsim.prediction.step.step import StepModel
from cpsim.runtime.processes import Progress, mapped
from cpsim.strategies.distca.batches import DataSet, Packed, iteration, sample
from cpsim.strategies.distca.packing import BREAKPOINTS
from cpsim.units import MS_PER_S
from studies import published_lines
from studies.distca.reproduce import TP, Choice, cut_model, pooled_seconds, wlb_seconds

FOLDER = Path(__file__).parent

ModelName = Literal["8b", "34b"]

K: Final = 1024
MODELS: Final = {"8b": "llama3-8b", "34b": "llama-34b"}
STAGES: Final = 2
"""Of pipelines."""
ITERATIONS: Final = 5
"""Of interim runs."""
SPREAD: Final = range(0, 30, 5)
"""Iterations of the paper's 30 that speed-ups are means of: ProLong's long documents come first."""
BAR: Final = 0.15
"""Mean error that predictions of interim runs are to stay within."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Interim:
    """One interim run."""

    setting: Setting
    system: Literal["wlb", "distca"]
    published_s: float
    predicted_s: float = 0.0
    plan: str = ""
    """That is fastest."""

    @property
    def error(self) -> float:
        """Predicted over published time, less one."""
        return self.predicted_s / self.published_s - 1


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
            setting=Setting(
                data=line["dataset"],  # type: ignore[arg-type]
                model=line["model"],  # type: ignore[arg-type]
                gpus=int(line["gpus"]),
                context=int(line["context"]),
                sequences=int(line["sequences"]),
                stages=STAGES,
            ),
            system=line["system"],  # type: ignore[arg-type]
            published_s=float(line["mean_ms"]) / MS_PER_S,
        )
        for line in published_lines(FOLDER / "distca-interim.csv")
    )


def plans(setting: Setting, system: str) -> Iterator[tuple[StepModel, str]]:
    """Ways to cut a setting, with their names; those that the cluster does not allow are left out."""
    servers = setting.gpus // TP
    replicas = servers // setting.stages
    for microbatches in (1, 2, 4, 8, 16) if setting.stages > 1 else (1,):
        if setting.sequences // 2 % microbatches:
            continue
        for cp in [1] if system == "distca" else [cp for cp in (1, 2, 4, 8, 16, 32) if replicas % cp == 0]:
            try:
                step = cut_model(
                    MODELS[setting.model],
                    setting.gpus,
                    setting.context,
                    setting.sequences,
                    cp=cp,
                    pp=setting.stages,
                    microbatches=microbatches,
                )
            except CpsimError:
                continue
            yield step, f"{microbatches} microbatches" + (f", CP {cp}" if system == "wlb" else "")


def fastest(setting: Setting, system: str, packed: Packed, iterations: Sequence[int]) -> tuple[float, str]:
    """Mean seconds of some iterations under the fastest plan, and its name.

    Raises:
        InfeasibleError: no plan fits into memory.
    """
    found = []
    batches = [iteration(packed, i, setting.sequences // 2) for i in iterations]
    for step, name in plans(setting, system):
        try:
            found.append((mean(_seconds(setting, system, step, batch) for batch in batches), name))
        except InfeasibleError:
            continue
    if not found:
        raise InfeasibleError(f"{system}: no plan fits into memory")
    return min(found)


def _seconds(setting: Setting, system: str, step: StepModel, nano_batches: Sequence[Ints]) -> float:
    """One iteration. DistCA's microbatches have as many sequences; both nano-batches of one follow each other."""
    if system == "wlb":
        documents = np.concatenate(nano_batches)
        if len(documents) < step.parallel.dp * step.parallel.microbatches:
            raise InfeasibleError("wlb: fewer documents than places")
        return wlb_seconds(step, documents, BREAKPOINTS[setting.model])
    tokens, parallel = setting.sequences * setting.context // step.parallel.dp, step.parallel
    stages = range(parallel.pp)
    most = max(step.stage_memory(tokens // parallel.microbatches, stage).total for stage in stages)
    if most > step.cluster.gpu.memory_bytes:
        raise OutOfMemoryError("distca: out of memory")
    parts = _cut(np.concatenate(nano_batches), 2 * parallel.microbatches)
    return pooled_seconds(step, list(zip(parts[::2], parts[1::2], strict=True)), Choice())


def _cut(documents: Ints, count: int) -> list[Ints]:
    """Equally many tokens each; sequences end at these cuts, so that no document lies across one."""
    ends, size = np.cumsum(documents), int(documents.sum()) // count
    edges = np.union1d(ends, np.arange(1, count) * size)
    lengths, part = np.diff(edges, prepend=0), (edges - 1) // size
    return [lengths[part == i] for i in range(count)]


def reproduce(
    runs: Sequence[Interim] | None = None, jobs: int | None = None, progress: Progress | None = None
) -> list[Interim]:
    """Interim runs with their predictions.

    Args:
        runs: that are wanted; None is all.
        jobs: processes; None uses all cores.
        progress: called with (done, total) runs.
    """
    chosen = published() if runs is None else runs
    times = mapped(_interim, chosen, jobs, progress)
    return [replace(run, predicted_s=seconds, plan=plan) for run, (seconds, plan) in zip(chosen, times, strict=True)]


def _interim(run: Interim) -> tuple[float, str]:
    packed = sample(run.setting.data, run.setting.context)
    return fastest(run.setting, run.system, packed, range(ITERATIONS))


def speed_ups(
    wanted: Sequence[Setting] | None = None,
    iterations: Sequence[int] = SPREAD,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[SpeedUp]:
    """Speed-ups at the settings of the paper; arguments as of ``reproduce``."""
    chosen = settings() if wanted is None else wanted
    ratios = mapped(partial(_speed_up, iterations=iterations), chosen, jobs, progress)
    return [SpeedUp(setting=setting, predicted=ratio) for setting, ratio in zip(chosen, ratios, strict=True)]


def _speed_up(setting: Setting, iterations: Sequence[int]) -> float | None:
    packed = sample(setting.data, setting.context)
    there = [i for i in iterations if (i + 1) * setting.sequences <= len(packed)]
    try:
        wlb, distca = (fastest(setting, system, packed, there)[0] for system in ("wlb", "distca"))
    except InfeasibleError:
        return None
    return wlb / distca
