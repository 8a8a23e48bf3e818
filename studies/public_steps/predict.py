"""Predicts the rows: ``python -m studies.public_steps.predict FILE`` writes one line of JSON for each.

Run before errors are looked at, and committed.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from cpsim.case.scenario import Scenario
from cpsim.prediction.case import resolve
from cpsim.prediction.predict import predict
from cpsim.prediction.step.frameworks import Framework
from cpsim.prediction.step.memory import workspaces
from cpsim.prediction.step.step import Batch, StepModel, deal
from cpsim.prediction.steps import StepCase
from studies.public_steps.allocator import reserved_bytes
from studies.public_steps.rows import FOLDER, Row, rows


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


def predicted(row: Row) -> Predicted:
    """Time and memory of a row, of those that are published."""
    assert row.scenario is not None
    if row.time_s is None:
        return Predicted(memory_bytes=stage_bytes(row))
    if row.framework is not None or resolve(row.scenario).profile.layers is None:
        model, batch = step_model(row.scenario)
        step = replace(model, framework=row.framework or model.framework).simulate(batch)
        return Predicted(time_s=step.time_s, memory_bytes=step.peak_memory_bytes, reserved_bytes=_reserved(row))
    answer = predict(row.scenario)
    return Predicted(
        time_s=answer.time_s,
        time_s_low=answer.time_s_low,
        time_s_high=answer.time_s_high,
        memory_bytes=answer.peak_memory_bytes,
        reserved_bytes=_reserved(row),
    )


def _reserved(row: Row) -> int | None:
    """Where that is published."""
    assert row.scenario is not None
    return reserved(row.scenario, framework=row.framework) if row.reserved and row.memory_bytes else None


def reserved(scenario: Scenario, *, expandable: bool = True, framework: Framework | None = None) -> int:
    """Bytes that the allocator reserves for a step of FSDP2 without pipelines.

    Args:
        scenario: of the step.
        expandable: whether segments of memory are.
        framework: whose code runs it, where the scenario does not say.
    """
    model, batch = step_model(scenario)
    model = replace(model, framework=framework) if framework else model
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


def step_model(scenario: Scenario) -> tuple[StepModel, Batch]:
    """The step of a scenario, and its microbatches."""
    case = resolve(scenario)
    steps = StepCase(scenario, case.cluster, case.profile)
    parallel = steps.parallel()
    model = steps.model(parallel, str(scenario.strategy), scenario.knobs)
    return model, deal(steps.sequences(parallel), parallel)


def stage_bytes(row: Row) -> int:
    """Peak memory of a row's pipeline stage, or of the fullest; tied embeddings are there once."""
    assert row.scenario is not None
    model, batch = step_model(row.scenario)
    model = replace(model, framework=row.framework) if row.framework else model
    stages = model.memory(batch, [model.attention.of(replica) for replica in batch])
    found = max(one.total for one in stages) if row.stage is None else stages[row.stage].total
    if row.cublas is not None:  # Python's and autograd's
        found += 2 * row.cublas - workspaces(model.cluster.gpu, engine=False)
    held = model.held
    once = (held.weight + held.gradient + held.states) * (model.model.vocab // model.parallel.tp * model.model.hidden)
    return found - once * row.tied


def line_of(row: Row, found: Predicted) -> str:
    """One line of a file of predictions."""
    assert row.scenario is not None
    record = {"row": row.key, "name": row.name}
    record |= {name: value for name in found.__slots__ if (value := getattr(found, name)) is not None}
    fields = row.scenario.to_dict()
    return json.dumps(record | {"scenario": fields | {"cluster": fields["cluster"].removeprefix(f"{FOLDER}/")}})


def main() -> None:
    """Writes all predictions to the file that is named."""
    lines = [line_of(row, predicted(row)) for row in rows() if row.scenario is not None]
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
