"""Sweeps: many scenarios into a folder of Parquet files, on all cores or a Dask cluster, stopped and resumed at will.

A sweep is a file of scenarios, or a grid: ``base`` has the fields that all scenarios share, ``grid`` a list of values
for each of the others, and ``sample`` asks for some of all combinations. Scenarios are numbered. Every part of the
folder holds some of them, is written whole or not at all, and is never written again: what it holds is done.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cpsim.case.files import explain, read_documents
from cpsim.case.load import scenario_of
from cpsim.case.scenario import FIELDS, Scenario
from cpsim.errors import CpsimError, ScenarioError, nearest
from cpsim.prediction.predict import predict
from cpsim.prediction.results import NO_CASE, NUMBERS
from cpsim.runtime.processes import Progress, spread

if TYPE_CHECKING:
    import pyarrow as pa

PART: Final = 64
"""Scenarios of a part at most: what a process loses when it is killed."""
PARTS_PER_WORKER: Final = 16
"""Parts of a small sweep are smaller, so that workers end at the same time."""
MAX_SCENARIOS: Final = 100_000_000
MAX_NUMBER: Final = 2**63 - 1
"""Numbers of scenarios are columns of Parquet files."""
SWEEP_FILE: Final = "_sweep.json"
"""What a folder holds; readers of Parquet skip names with an underscore."""
AS_JSON: Final = ("knobs", "mask", "documents")
TEXTS: Final = tuple(name for name, none in NO_CASE.items() if none == "" and name not in AS_JSON)
COUNTS: Final = tuple(name for name, none in NO_CASE.items() if none == 0)


class _Sample(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    count: Annotated[int, Field(ge=1, le=MAX_SCENARIOS)]
    seed: Annotated[int, Field(ge=0)] = 0


class Grid(BaseModel):
    """A file of a sweep: all combinations of values, or a sample of them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    base: Mapping[str, Any] = Field(default_factory=dict)
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]]
    sample: _Sample | None = None

    @property
    def combinations(self) -> int:
        """All combinations, of which a sample may take some."""
        return prod(len(values) for values in self.grid.values())

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if self.sample is None and self.combinations > MAX_SCENARIOS:
            most = f"expected at most {MAX_SCENARIOS:,} combinations, got {self.combinations:.3g}"
            raise ValueError(f"grid: {most}; ask for some of them, e.g. sample: {{count: 1000}}")
        return self

    def numbers(self) -> Sequence[int]:
        """Numbers of the combinations that are wanted; of the draws, where there are more combinations than numbers."""
        count, sample = self.combinations, self.sample
        if sample is None or sample.count >= count:
            return range(count)
        if count > MAX_NUMBER:
            return range(sample.count)
        return sorted(random.Random(sample.seed).sample(range(count), sample.count))

    def fields(self, number: int) -> dict[str, Any]:
        """Fields of one combination; the last field of the grid changes first."""
        if self.sample is not None and self.combinations > MAX_NUMBER:
            number = random.Random(f"{self.sample.seed} {number}").randrange(self.combinations)
        chosen = {}
        for name, values in reversed(self.grid.items()):
            number, at = divmod(number, len(values))
            chosen[name] = values[at]
        return {**self.base, **chosen}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Numbered scenarios."""

    file: Path
    entries: Grid | list[tuple[str, Any]]
    """A grid, or (place, fields) of every scenario of a list."""

    def numbers(self) -> Sequence[int]:
        """Numbers of all scenarios."""
        return self.entries.numbers() if isinstance(self.entries, Grid) else range(len(self.entries))

    def entry(self, number: int) -> tuple[str, Any]:
        """Where a scenario is from, and its fields or what is wrong with them."""
        if isinstance(self.entries, Grid):
            return f"{self.file} point {number}", self.entries.fields(number)
        return self.entries[number]

    def digest(self) -> str:
        """A digest that only equal sweeps share."""
        entries = self.entries.model_dump() if isinstance(self.entries, Grid) else [e for _, e in self.entries]
        return sha256(json.dumps(entries, default=str).encode()).hexdigest()


def load_sweep(path: Path) -> Sweep:
    """A grid (YAML or JSON) or a file of scenarios.

    Raises:
        ScenarioError: the file cannot be read, or its grid has fields that scenarios do not have.
    """
    entries = read_documents(path)
    if len(entries) != 1 or not isinstance(entries[0][1], dict) or "grid" not in entries[0][1]:
        return Sweep(file=path, entries=entries)
    try:
        grid = Grid.model_validate(entries[0][1])
    except ValidationError as error:
        raise ScenarioError(f"{path}: {explain(error, Grid.model_fields)}") from None
    for name in (*grid.base, *grid.grid):
        if name not in FIELDS:
            raise ScenarioError(f"{path}: {name}: unknown field of a scenario; {nearest(name, FIELDS)}")
        if name in grid.base and name in grid.grid:
            raise ScenarioError(f"{path}: {name}: expected in base or in grid, got both; keep one")
    return Sweep(file=path, entries=grid)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a sweep went, earlier runs of it included."""

    num_scenarios: int
    num_predicted: int


def run_sweep(
    sweep: Sweep,
    folder: Path,
    *,
    jobs: int | None = None,
    scheduler: str | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Predict all scenarios of a sweep that a folder does not hold yet.

    Args:
        sweep: what to predict.
        folder: of Parquet files, one row for every scenario; see ``columns``.
        jobs: processes of this machine; None: all cores.
        scheduler: address of a Dask cluster that is used instead.
        resume: go on with what the folder holds.
        progress: called with (done, total), earlier runs included.

    Raises:
        CpsimError: a package is missing, the folder holds something else, or a process died; what was done is kept.
    """
    _need("pyarrow", "sweep")
    done = _opened(sweep, folder, resume)
    numbers = sweep.numbers()
    left = [number for number in numbers if number not in done]
    workers = jobs or os.cpu_count() or 1
    size = max(1, min(PART, len(left) // (workers * PARTS_PER_WORKER)))
    parts = [[(n, *sweep.entry(n)) for n in left[i : i + size]] for i in range(0, len(left), size)]
    random.Random(0).shuffle(parts)  # so that the time that remains follows from the time that has passed
    tasks = [(str(sweep.file.parent), part) for part in parts]
    count = len(done)
    if progress:
        progress(count, len(numbers))
    for rows in _rows(tasks, jobs, scheduler):
        _write(rows, folder)
        count += len(rows)
        if progress:
            progress(count, len(numbers))
    return Outcome(len(numbers), _num_predicted(folder))


Task = tuple[str, list[tuple[int, str, Any]]]
"""Folder of the sweep's file; number, place and fields of every scenario."""


def _rows(tasks: list[Task], jobs: int | None, scheduler: str | None) -> Iterator[list[dict[str, Any]]]:
    """Rows of all tasks, as they come."""
    if scheduler is not None:
        yield from _on_dask(tasks, scheduler)
        return
    try:
        yield from (rows for _, rows in spread(predicted_rows, tasks, jobs))
    except BrokenProcessPool:
        why = "sweep: a process died, perhaps for lack of memory; go on with --resume and fewer --jobs"
        raise CpsimError(why) from None


def _on_dask(tasks: list[Task], scheduler: str) -> Iterator[list[dict[str, Any]]]:
    """Rows of tasks that run on a Dask cluster, which runs the tasks of workers that die again."""
    _need("distributed", "dask")
    from distributed import Client, as_completed

    try:
        client = Client(scheduler, timeout="10s")  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        why = f"scheduler: expected the address of a Dask scheduler, got {scheduler!r}, where nothing answers ({error})"
        raise CpsimError(why) from None
    with client:
        waiting = client.map(predicted_rows, tasks, pure=False)
        for future in as_completed(waiting):  # type: ignore[no-untyped-call]
            yield future.result()
            future.release()


def predicted_rows(task: Task) -> list[dict[str, Any]]:
    """One row for every scenario of a task; what is wrong with one is its ``error``."""
    folder, entries = task
    return [{"number": number, **_row(scenario_of(place, value, Path(folder)))} for number, place, value in entries]


def _row(asked: Scenario | ScenarioError) -> dict[str, Any]:
    if isinstance(asked, ScenarioError):
        return {"error": str(asked)}
    fields = asked.to_dict()
    row = {name: fields.get(name) for name in (*TEXTS, *COUNTS)} | {"tokens": asked.num_tokens}
    row |= {name: json.dumps(fields[name]) for name in AS_JSON if name in fields}
    row |= {"scenario": json.dumps(fields)}
    try:
        found = predict(asked)
    except CpsimError as error:
        return row | {"error": str(error)}
    except Exception as error:  # a mistake of ours in one scenario is no reason to lose the others
        return row | {"error": f"internal error: {type(error).__name__}: {error}"}
    row |= {name: getattr(found, name) for name in NUMBERS}
    return row | {"parts_s": list(found.parts_s.items()), "notes": list(found.notes)}


def columns() -> pa.Schema:
    """Columns of the files: fields of the scenario, those of a prediction, and ``error`` where there is none."""
    import pyarrow as pa

    whole, real, text = pa.int64(), pa.float64(), pa.string()
    found = {"number": whole} | dict.fromkeys((*TEXTS, *AS_JSON, "scenario", "error"), text)
    found |= dict.fromkeys(COUNTS, whole) | dict.fromkeys(NUMBERS, real)
    return pa.schema(found | {"parts_s": pa.map_(text, real), "notes": pa.list_(text)})


def _write(rows: list[dict[str, Any]], folder: Path) -> None:
    """A part of its own, whole or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    name = f"part-{rows[0]['number']:010d}.parquet"
    unfinished = folder / f"_{name}"
    pq.write_table(pa.Table.from_pylist(rows, schema=columns()), unfinished)
    unfinished.replace(folder / name)


def _opened(sweep: Sweep, folder: Path, resume: bool) -> set[int]:
    """Numbers of the scenarios that a folder holds; makes the folder where there is none."""
    import pyarrow.parquet as pq

    about = {"file": str(sweep.file), "scenarios": len(sweep.numbers()), "digest": sweep.digest()}
    note = folder / SWEEP_FILE
    if not folder.exists():
        folder.mkdir()
    if not any(folder.iterdir()):
        note.write_text(json.dumps(about) + "\n", encoding="utf-8")
        return set()
    if not note.is_file() or json.loads(note.read_text(encoding="utf-8"))["digest"] != about["digest"]:
        raise CpsimError(f"{folder}: expected a new folder or one of this sweep, got another; choose another --out")
    held = [pq.read_table(part, columns=["number"])["number"].to_pylist() for part in _parts(folder)]
    done = {number for numbers in held for number in numbers}
    if not resume:
        raise CpsimError(f"{folder}: holds {len(done)} of {about['scenarios']} scenarios; go on with --resume")
    return done


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))


def _num_predicted(folder: Path) -> int:
    import pyarrow.parquet as pq

    return sum(pq.read_table(part, columns=["error"])["error"].null_count for part in _parts(folder))


def failures(folder: Path, most: int) -> list[str]:
    """The first errors of a sweep, with the numbers of their scenarios."""
    import pyarrow.parquet as pq

    found = []
    for part in _parts(folder):
        table = pq.read_table(part, columns=["number", "error"])
        found += [f"scenario {row['number']}: {row['error']}" for row in table.to_pylist() if row["error"] is not None]
        if len(found) >= most:
            break
    return found[:most]


def _need(package: str, extra: str) -> None:
    if find_spec(package) is None:
        raise CpsimError(f"sweep: package {package} is missing; install it with: pip install '.[{extra}]'")
