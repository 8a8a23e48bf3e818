"""Sweeps: many scenarios into a folder of Parquet files, on all cores or a Dask cluster, stopped and resumed at will.

A sweep is a file of scenarios, or a grid: ``base`` has the fields that all scenarios share, ``grid`` a list of values
for each of the others, and ``sample`` asks for some of all combinations. Scenarios are numbered. Every part of the
folder holds certain ones of them, and for each a digest of what its prediction rests on: what is missing, cannot be
read or rests on something that has changed is predicted, and its part written whole or not at all. So two sweeps that
nothing keeps apart write the same.
"""

from __future__ import annotations

import json
import logging
import os
import random
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from io import BytesIO
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cpsim.case.files import explain, read_documents
from cpsim.case.load import scenario_of
from cpsim.case.scenario import FIELDS, Scenario
from cpsim.errors import CpsimError, MachineError, ScenarioError, nearest
from cpsim.prediction.basis import basis_of
from cpsim.prediction.predict import attempt
from cpsim.prediction.results import NO_CASE, NUMBERS, Infeasible, refusal
from cpsim.runtime.files import HELD, alone_in, write
from cpsim.runtime.processes import DIED, Progress, one_by_one, spread

if TYPE_CHECKING:
    import pyarrow as pa

PART: Final = 64
"""Scenarios of a part at most: what is lost when everything is killed."""
PARTS_PER_WORKER: Final = 16
"""Parts of a small sweep are smaller, so that workers end at the same time."""
MAX_SCENARIOS: Final = 100_000_000
MAX_NUMBER: Final = 2**63 - 1
"""Numbers of scenarios are columns of Parquet files."""
SWEEP_FILE: Final = "_sweep.json"
"""What a folder holds; readers of Parquet skip names with an underscore."""
SCHEMA: Final = 2
"""Of that file, and of what parts say of themselves."""
ASIDE: Final = "_unreadable-"
"""How names of parts begin that nothing could be made of."""
NOTE: Final = b"cpsim"
"""Under which a Parquet file says what the folder's file does, and what each of its rows rests on."""
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


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a sweep went, earlier runs of it included."""

    num_scenarios: int
    num_predicted: int = 0
    num_again: int = 0
    """Rows that were predicted again, because what they rest on has changed."""
    lost: dict[int, str] = field(default_factory=dict)
    """Scenarios that have no row, or one that does not hold any more, and why; ``resume`` tries them again."""


Entry = tuple[int, str, Any]
"""Number, place and fields of a scenario."""


def run_sweep(
    sweep: Sweep,
    folder: Path,
    *,
    jobs: int | None = None,
    scheduler: str | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Predict all scenarios of a sweep that a folder does not hold yet.

    Args:
        sweep: what to predict.
        folder: of Parquet files, one row for every scenario; see ``columns``. One sweep at a time may write there.
        jobs: processes of this machine; None: all cores.
        scheduler: address of a Dask cluster that is used instead.
        resume: go on with what the folder holds.
        progress: called with (done, total), earlier runs included.
        tell: called with lines on what is done again, and why.

    Raises:
        MachineError: the disk is full or the scheduler died; what was done is kept.
        CpsimError: a package is missing, the folder holds something else, or another sweep writes there.
    """
    _need("pyarrow", "sweep")
    try:
        _check_ours(folder)
        folder.mkdir(exist_ok=True)
        with alone_in(folder, tell):
            return _predict_rest(_opened(sweep, folder, jobs, resume, tell), jobs, scheduler, progress)
    except BlockingIOError as error:
        raise CpsimError(f"{folder}: {error.strerror}; wait for it, or choose another --out") from None
    except OSError as error:
        why = f"{error.filename or folder}: {error.strerror or error}"
        raise MachineError(f"{why}; what was written before is kept: mend it and go on with --resume") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A folder of a sweep, which nobody else writes to."""

    sweep: Sweep
    folder: Path
    about: Mapping[str, Any]
    """What the folder's file says."""
    held: dict[int, set[int]]
    """Scenarios whose rows are there to stay, by the first number of their part."""
    unfinished: dict[int, pa.Table]
    """Such rows of parts that lack others."""
    num_predicted: int
    """Rows to stay that are predictions."""
    num_again: int
    """Rows that do not hold any more."""

    def add(self, first: int, rows: list[dict[str, Any]]) -> None:
        """Writes a part with rows that it lacked."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        bases = {row["number"]: row["basis"] for row in rows}
        table = pa.Table.from_pylist([{k: v for k, v in row.items() if k != "basis"} for row in rows], schema=columns())
        if first in self.unfinished:
            bases |= _bases(self.unfinished[first])
            table = pa.concat_tables([self.unfinished[first].replace_schema_metadata(None), table])
        table = table.sort_by("number")
        note = json.dumps({**self.about, "basis": [bases[number] for number in table["number"].to_pylist()]})
        file = BytesIO()
        pq.write_table(table.replace_schema_metadata({NOTE: note}), file, write_page_checksum=True)
        write(self.folder / f"part-{first:010d}.parquet", file.getvalue())


def _predict_rest(opened: _Opened, jobs: int | None, scheduler: str | None, progress: Progress | None) -> Outcome:
    """Predicts and writes what a folder lacks."""
    sweep, held = opened.sweep, opened.held
    missing = {first: [n for n in part if n not in held.get(first, ())] for first, part in _plan(sweep, opened.about)}
    left = [(first, numbers) for first, numbers in missing.items() if numbers]
    random.Random(0).shuffle(left)  # so that the time that remains follows from the time that has passed
    chunks = [[(number, *sweep.entry(number)) for number in numbers] for _, numbers in left]
    done = Outcome(num_scenarios=len(sweep.numbers()), num_predicted=opened.num_predicted, num_again=opened.num_again)
    count = sum(map(len, held.values()))
    written: dict[int, str] = {}
    if progress:
        progress(count, done.num_scenarios)
    for i, rows in _rows(partial(predicted_rows, sweep.file.parent), chunks, jobs, scheduler):
        done.lost |= {row["number"]: row["lost"] for row in rows if "lost" in row}
        kept = [row for row in rows if "lost" not in row]
        if kept:
            opened.add(left[i][0], kept)
        written |= {row["number"]: row["basis"] for row in kept}
        done.num_predicted += sum("error" not in row for row in kept)
        count += len(kept)
        if progress:
            progress(count, done.num_scenarios)
    changed = "the files that it rests on are others here and now"
    done.lost |= {number: changed for number, basis in written.items() if basis != _basis(sweep, number)}
    return done


def _plan(sweep: Sweep, about: Mapping[str, Any]) -> Iterator[tuple[int, Sequence[int]]]:
    """The first number of every part, and all."""
    numbers, size = sweep.numbers(), about["part"]
    return ((numbers[i], numbers[i : i + size]) for i in range(0, len(numbers), size))


def _basis(sweep: Sweep, number: int) -> str:
    """What a scenario's prediction rests on now."""
    return basis_of(sweep.entry(number)[1], sweep.file.parent)


Work = Callable[[list[Entry]], list[dict[str, Any]]]


def _rows(
    work: Work, chunks: list[list[Entry]], jobs: int | None, scheduler: str | None
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Indices and rows of all chunks, as they come."""
    if scheduler is not None:
        return _on_dask(work, chunks, scheduler)
    lost = partial(one_by_one, work, lost=lambda entry: {"number": entry[0], "lost": DIED})
    return spread(work, chunks, jobs, lost)


def _on_dask(work: Work, chunks: list[list[Entry]], scheduler: str) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Rows of chunks that a Dask cluster predicts, which tries those of workers that die again."""
    _need("distributed", "dask")
    from distributed import Client, as_completed

    expected = f"scheduler: expected the address of a Dask scheduler, got {scheduler!r}"
    with _unlogged():
        try:
            client = Client(scheduler, timeout="10s")  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise CpsimError(f"{expected}: {error}") from None
        except Exception as error:
            raise MachineError(f"{expected}, where nothing answers ({error or type(error).__name__})") from None
        try:
            waiting = {future: i for i, future in enumerate(client.map(work, chunks, pure=False))}
            for future in as_completed(waiting):  # type: ignore[no-untyped-call]
                yield waiting[future], future.result()
                future.release()
        except (Exception, CancelledError) as error:
            why = f"scheduler {scheduler}: {error or type(error).__name__}"
            raise MachineError(f"{why}; what was written before is kept: go on with --resume") from None
        finally:
            with suppress(Exception):
                client.close(timeout="2s")  # type: ignore[no-untyped-call]


@contextmanager
def _unlogged() -> Iterator[None]:
    """Libraries say nothing by themselves within."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def predicted_rows(folder: Path, entries: list[Entry]) -> list[dict[str, Any]]:
    """One row for every scenario; what is wrong with one is its ``error``, what the machine lacks for it ``lost``.

    Args:
        folder: of the sweep's file.
        entries: what to predict.
    """
    rows = []
    for number, place, value in entries:
        basis = basis_of(value, folder)  # before files are read: who changes them meanwhile makes the row old
        rows.append({"number": number, "basis": basis, **_row(scenario_of(place, value, folder))})
    return rows


def _row(asked: Scenario | ScenarioError) -> dict[str, Any]:
    if isinstance(asked, ScenarioError):
        return {"error": str(asked)}
    fields = asked.to_dict()
    row = {name: fields.get(name) for name in (*TEXTS, *COUNTS)} | {"tokens": asked.num_tokens}
    row |= {name: json.dumps(fields[name]) for name in AS_JSON if name in fields}
    row |= {"scenario": json.dumps(fields)}
    answer = attempt(asked)
    row |= {"kind": refusal(answer)}
    match answer:
        case MachineError() as error:
            return {"lost": str(error)}
        case Infeasible() as found:
            return row | {"error": found.reason}
        case CpsimError() as error:
            return row | {"error": str(error)}
        case found:
            row |= {name: getattr(found, name) for name in NUMBERS}
            return row | {"parts_s": list(found.parts_s.items()), "notes": list(found.notes)}


def columns() -> pa.Schema:
    """Columns of the files: fields of the scenario, those of a prediction, and ``error`` where there is none; ``kind``
    as in ``cpsim.predict``'s records."""
    import pyarrow as pa

    whole, real, text = pa.int64(), pa.float64(), pa.string()
    found = {"number": whole} | dict.fromkeys((*TEXTS, *AS_JSON, "scenario", "kind", "error"), text)
    found |= dict.fromkeys(COUNTS, whole) | dict.fromkeys(NUMBERS, real)
    return pa.schema(found | {"parts_s": pa.map_(text, real), "notes": pa.list_(text)})


def _check_ours(folder: Path) -> None:
    """Whether a folder, where there is one, holds nothing that no sweep writes."""
    if not folder.exists():
        return
    names = {path.name for path in folder.iterdir()}
    foreign = {name for name in names if not name.startswith((".", "_part-", "part-", ASIDE))} - {SWEEP_FILE, HELD}
    if foreign:
        raise CpsimError(f"{folder}: expected a new folder or one of this sweep, got another; choose another --out")


def _opened(sweep: Sweep, folder: Path, jobs: int | None, resume: bool, tell: Callable[[str], None]) -> _Opened:
    """What a folder holds of a sweep; begins it where it holds nothing."""
    parts, digest, total = _parts(folder), sweep.digest(), len(sweep.numbers())
    size = max(1, min(PART, total // ((jobs or os.cpu_count() or 1) * PARTS_PER_WORKER)))
    new = {"schema": SCHEMA, "file": str(sweep.file), "scenarios": total, "digest": digest, "part": size}
    index = _read_index(folder)
    said = index or next((_note(table) for table in map(_read_part, parts) if table is not None), new)
    about = {key: said.get(key) for key in new}
    if (about["schema"], about["digest"]) != (SCHEMA, digest):
        raise CpsimError(f"{folder}: expected a new folder or one of this sweep, got another; choose another --out")
    plan, unreadable, num_rows = dict(_plan(sweep, about)), [], 0
    held, unfinished, num_predicted = {}, {}, 0
    for path in parts:
        table = _read_part(path)
        numbers = [] if table is None else table["number"].to_pylist()
        if table is None or numbers != sorted(set(numbers) & set(plan.get(_first(path), ()))):
            unreadable.append(path)
            continue
        bases = _bases(table)
        current = table.filter([bases[number] == _basis(sweep, number) for number in numbers])
        num_rows += len(table)
        num_predicted += current["error"].null_count
        held[_first(path)] = set(current["number"].to_pylist())
        if 0 < len(current) < len(plan[_first(path)]):
            unfinished[_first(path)] = current
    num_again = num_rows - sum(map(len, held.values()))
    if num_rows and not resume:
        raise CpsimError(f"{folder}: holds {num_rows} of {total} scenarios; go on with --resume")
    if unreadable:
        tell(f"{folder}: {len(unreadable)} parts cannot be read: renamed to {ASIDE}..., and predicted again")
    if num_again:
        why = "cpsim, or files that they rest on, have changed"
        tell(f"{folder}: {num_again} of {num_rows} rows are predicted again: {why}")
    for path in unreadable:
        path.replace(path.with_name(f"{ASIDE}{path.name}"))
    if index is None:
        write(folder / SWEEP_FILE, json.dumps(about) + "\n")
    return _Opened(
        sweep=sweep,
        folder=folder,
        about=about,
        held=held,
        unfinished=unfinished,
        num_predicted=num_predicted,
        num_again=num_again,
    )


def _read_index(folder: Path) -> dict[str, Any] | None:
    """What a folder's file says of it; None where there is none, or one that was not written to its end."""
    try:
        said = json.loads((folder / SWEEP_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return said if isinstance(said, dict) and "digest" in said else None


def _read_part(path: Path) -> pa.Table | None:
    """A part, or None where it is not whole or not of this version."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = path.read_bytes()
    try:
        table = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True).read()
        return table if len(_bases(table)) == len(table) and table.schema.equals(columns()) else None
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        return None


def _note(table: pa.Table) -> dict[str, Any]:
    """What a part says of its sweep and rows."""
    return dict(json.loads(table.schema.metadata[NOTE]))


def _bases(table: pa.Table) -> dict[int, str]:
    """What every row of a part rests on."""
    return dict(zip(table["number"].to_pylist(), _note(table)["basis"], strict=True))


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))


def _first(part: Path) -> int:
    """The number in a part's name; -1 where that is none."""
    text = part.stem.removeprefix("part-")
    return int(text) if text.isdecimal() else -1


def failures(folder: Path, most: int) -> list[str]:
    """The first errors of a sweep, with the numbers of their scenarios."""
    import pyarrow.parquet as pq

    found: list[str] = []
    for part in _parts(folder):
        table = pq.read_table(part, columns=["number", "error"])
        found += [f"scenario {row['number']}: {row['error']}" for row in table.to_pylist() if row["error"] is not None]
        if len(found) >= most:
            break
    return found[:most]


def _need(package: str, extra: str) -> None:
    if find_spec(package) is None:
        raise CpsimError(f"sweep: package {package} is missing; install it with: pip install '.[{extra}]'")
