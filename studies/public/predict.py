"""What cpsim says of a row: time with its interval, and memory as it was published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from cpsim.case.scenario import Scenario
from cpsim.errors import InfeasibleError, ProfileError
from cpsim.prediction.case import Case, resolve
from cpsim.prediction.predict import prediction_of, step_prediction
from cpsim.prediction.step.frameworks import Framework
from cpsim.prediction.step.memory import workspaces
from cpsim.prediction.step.step import Batch, StepModel, deal
from cpsim.prediction.steps import StepCase
from cpsim.runtime.processes import Progress, mapped
from studies.public.allocator import reserved_bytes
from studies.public.readers import rows, rows_of
from studies.public.row import Code, Refusal, Row

CHUNK = 6
"""Rows that a process takes at a time."""
Key = tuple[Path | None, str, int]
"""A table of others or none, a kind of ours, and the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What cpsim says of one row."""

    time_s: float | None = None
    time_s_low: float | None = None
    time_s_high: float | None = None
    memory_bytes: int | None = None
    """What the allocator gives out at most."""
    reserved_bytes: int | None = None
    """What it reserves for that."""
    why: str = ""
    """Why it says nothing."""
    refusal: Refusal = "cannot"


def identity(row: Row) -> str:
    """Equal for rows whose predictions are."""
    code = row.code.source if row.code else ""
    memory = repr(replace(row.peak, nbytes=0.0)) if row.peak else ""
    known = dict(row.fields) if row.fields is not None else row.why
    return json.dumps([known, code, id(row.code), memory, row.time_s is None], default=str)


def predict_rows(
    rows_: Sequence[Row], keys: Sequence[Key], jobs: int | None = None, progress: Progress | None = None
) -> list[Predicted]:
    """Predictions of rows, on several processes; rows that are alike are predicted once.

    Args:
        rows_: that are asked for.
        keys: where another process finds each.
        jobs: processes; None: as many as cores.
        progress: called after every part.
    """
    first: dict[str, int] = {}
    for i, row in enumerate(rows_):
        first.setdefault(identity(row), i)
    own = sorted(first.values())
    chunks = [tuple(keys[i] for i in own[at : at + CHUNK]) for at in range(0, len(own), CHUNK)]
    found = dict(zip(own, (one for part in mapped(_chunk, chunks, jobs, progress) for one in part), strict=True))
    return [found[first[identity(row)]] for row in rows_]


def _chunk(keys: Sequence[Key]) -> list[Predicted]:
    return [predicted(_table(path, kind)[line]) for path, kind, line in keys]


@lru_cache(maxsize=64)
def _table(path: Path | None, kind: str) -> tuple[Row, ...]:
    return tuple(rows_of(path) if path else rows([kind]))


def predicted(row: Row) -> Predicted:
    """Time and memory of a row, of those that are published; or why there are none."""
    scenario = row.scenario
    if scenario is None:
        return Predicted(why=row.why, refusal=row.refusal)
    try:
        if not scenario.is_step:
            return _of_attention(scenario)
        return Predicted(memory_bytes=stage_bytes(row)) if row.time_s is None else _of_step(row, scenario)
    except InfeasibleError as reason:
        return Predicted(why=str(reason))
    except ProfileError as reason:
        return Predicted(why=str(reason), refusal="not measured")


def _of_attention(scenario: Scenario) -> Predicted:
    answer = prediction_of(resolve(scenario))
    return Predicted(time_s=answer.time_s, time_s_low=answer.time_s_low, time_s_high=answer.time_s_high)


def _of_step(row: Row, scenario: Scenario) -> Predicted:
    case = resolve(scenario)
    model, batch = step_model(case, row.code)
    answer = step_prediction(case, model.simulate(batch))
    wanted = row.peak is not None and row.peak.reserved
    return Predicted(
        time_s=answer.time_s,
        time_s_low=answer.time_s_low,
        time_s_high=answer.time_s_high,
        memory_bytes=answer.peak_memory_bytes,
        reserved_bytes=reserved(scenario, code=row.code) if wanted else None,
    )


@dataclass(frozen=True, slots=True)
class TheirCase(StepCase):
    """The step of a scenario in code that no scenario can say."""

    code: Code | None = None

    @property
    def framework(self) -> Framework:
        """Whose code runs it."""
        found = StepCase.framework.fget(self)  # type: ignore[attr-defined]
        return self.code.of(found) if self.code else found


def step_model(case: Case, code: Code | None = None) -> tuple[StepModel, Batch]:
    """The step of a case, and its microbatches; ``code``: whose it is, where the scenario does not say."""
    steps = TheirCase(case.scenario, case.cluster, case.profile, code=code)
    parallel = steps.parallel()
    model = steps.model(parallel, str(case.scenario.strategy), case.scenario.knobs)
    return model, deal(steps.sequences(parallel), parallel)


def reserved(scenario: Scenario, *, expandable: bool = True, code: Code | None = None) -> int:
    """Bytes that the allocator reserves for a step of FSDP2 without pipelines.

    Args:
        scenario: of the step.
        expandable: whether segments of memory are.
        code: whose runs it, where the scenario does not say.
    """
    model, batch = step_model(resolve(scenario), code)
    cut, shape = model.parallel, model.model
    program = model.program(sum(batch[0][0]) // cut.cp)
    q, kv = (heads * shape.head_dim // cut.tp for heads in (shape.heads, shape.kv_heads))
    of_layer = [shape.hidden * outer for outer in (q, kv, kv, q, *[shape.ffn // cut.tp] * 3)]
    words = shape.vocab // cut.tp * shape.hidden
    return reserved_bytes(
        (*program.forward, *program.backward),
        [4 * size // cut.shards for size in [words, *of_layer * shape.layers, words]],
        workspaces(model.cluster.gpu, engine=model.framework.engine),
        microbatches=cut.microbatches,
        expandable=expandable,
        roots=model.framework.lists,
    )


def stage_bytes(row: Row) -> int:
    """Peak memory of a row's pipeline stage, or of the fullest; tied embeddings are there once."""
    scenario, peak = row.scenario, row.peak
    assert scenario is not None
    assert peak is not None
    model, batch = step_model(resolve(scenario), row.code)
    stages = model.memory(batch, [model.attention.of(replica) for replica in batch])
    found = max(one.total for one in stages) if peak.stage is None else stages[peak.stage].total
    if peak.cublas is not None:  # Python's and autograd's
        found += 2 * peak.cublas - workspaces(model.cluster.gpu, engine=False)
    held = model.held
    once = (held.weight + held.gradient + held.states) * (model.model.vocab // model.parallel.tp * model.model.hidden)
    return found - once * peak.tied
