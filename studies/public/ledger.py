"""Published beside predicted: every row with its error, what was said before errors were seen, and how sites differ."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import mean, median
from typing import Final, Literal

from cpsim.runtime.processes import Progress
from studies.public.predict import Key, Predicted, identity, predict_rows
from studies.public.readers import rows, rows_of
from studies.public.row import FOLDER, SAID, Row

LEDGER: Final = FOLDER / "ledger.csv"
"""Errors of all rows as they were when this file was made; ``cpsim reproduce public --update`` makes it again."""
Quantity = Literal["time", "memory"]
QUANTITIES: Final[tuple[Quantity, ...]] = ("time", "memory")
NUMBERED: Final = (*(f"-{number}" for number in range(2, 8)), "-moe", "-lora", "-interleaved")
EARLIER: Final = tuple(f"predicted{part}.jsonl" for part in ("", *NUMBERED))
"""Files of the first predictions; later ones stand for earlier ones, and files that are not named here for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One quantity of one row: seconds or bytes."""

    row: Row
    quantity: Quantity
    published: float
    predicted: float
    low: float | None = None
    """Interval of 90 %, where there is one."""
    high: float | None = None
    said: float | None = None
    """Predicted before errors were looked at, and committed."""
    floor: float | None = None
    """By how much sites with the same layout and software differ from their median, on average; None: there is one."""

    @property
    def error(self) -> float:
        """Predicted over published, less one."""
        return self.predicted / self.published - 1

    @property
    def error_said(self) -> float | None:
        """The same of what was said before."""
        return None if self.said is None else self.said / self.published - 1

    @property
    def inside(self) -> bool | None:
        """Whether what was published lies in the interval."""
        return None if self.low is None or self.high is None else self.low <= self.published <= self.high

    @property
    def far(self) -> bool:
        """Whether it is off by more than twice the interval: a finding."""
        if self.low is None or self.high is None:
            return False
        side = self.high if self.published > self.predicted else self.low
        return abs(self.published - self.predicted) > 2 * abs(side - self.predicted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """All rows that were asked for."""

    compared: tuple[Compared, ...]
    refused: tuple[tuple[Row, Predicted], ...]
    """Rows without a prediction, and why."""

    def of(self, quantity: Quantity) -> list[Compared]:
        """Times or memory."""
        return [one for one in self.compared if one.quantity == quantity]


def ledger(
    kinds: Sequence[str] = (),
    files: Sequence[Path] = (),
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Ledger:
    """Predicts rows.

    Args:
        kinds: of our tables and of further ones; empty: all.
        files: further tables; where some are given, ours are left out.
        jobs: processes; None: as many as cores.
        progress: called after every part.

    Raises:
        CpsimError: a table cannot be read.
    """
    asked, keys = list[Row](), list[Key]()
    for path in files or (None,):
        found = list(rows_of(path) if path else rows(kinds))
        lines: dict[str, int] = {}
        for row in found:
            line = lines[row.kind] = lines.get(row.kind, -1) + 1
            if not kinds or row.kind in kinds:
                asked.append(row)
                keys.append((path, row.kind, line))
    said = {} if files else committed()
    return _ledger(asked, predict_rows(asked, keys, jobs, progress), said)


def _ledger(asked: Sequence[Row], predictions: Sequence[Predicted], said: Mapping[str, Predicted]) -> Ledger:
    floors, compared, refused = site_floors(asked), list[Compared](), list[tuple[Row, Predicted]]()
    for row, found in zip(asked, predictions, strict=True):
        before = said.get(row.key, Predicted())
        if found.why:
            refused.append((row, found))
        if row.time_s is not None and found.time_s is not None:
            compared.append(
                Compared(
                    row=row,
                    quantity="time",
                    published=row.time_s,
                    predicted=found.time_s,
                    low=found.time_s_low,
                    high=found.time_s_high,
                    said=before.time_s,
                    floor=floors.get(row.key),
                )
            )
        peak = row.peak and (found.reserved_bytes if row.peak.reserved else found.memory_bytes)
        if row.peak and peak:
            compared.append(
                Compared(
                    row=row, quantity="memory", published=row.peak.nbytes, predicted=peak, said=before.memory_bytes
                )
            )
    return Ledger(compared=tuple(compared), refused=tuple(refused))


def committed() -> dict[str, Predicted]:
    """Predictions that were committed before errors were looked at, by row."""
    found, names = dict[str, Predicted](), [each.name for each in fields(Predicted)]
    later = sorted(path.name for path in SAID.glob("*.jsonl") if path.name not in EARLIER)
    for name in (*EARLIER, *later):
        for line in SAID.joinpath(name).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            found[record["row"]] = Predicted(**{each: record[each] for each in names if each in record})
    return found


def said_line(row: Row, found: Predicted) -> str:
    """One line of a file of predictions."""
    record = {"row": row.key, "name": row.name}
    record |= {
        each.name: value for each in fields(found) if (value := getattr(found, each.name)) and each.name != "why"
    }
    record.pop("refusal", None)
    return json.dumps(record | {"scenario": portable(row)})


def portable(row: Row) -> dict[str, object]:
    """Fields of a row's scenario, without folders of this machine."""
    scenario = row.scenario
    if scenario is None:
        return {}
    found = scenario.to_dict()
    return found | {"cluster": Path(str(found["cluster"])).name}


def site_floors(asked: Iterable[Row]) -> dict[str, float]:
    """By row: what the best of predictions is off by where sites ran the same layout with the same software: how far
    they are from their median, on average."""
    alike: dict[str, list[Row]] = {}
    for row in asked:
        if row.edition and row.time_s and row.fields:
            alike.setdefault(f"{row.kind} {row.edition} {identity(row)}", []).append(row)
    found = dict[str, float]()
    for some in alike.values():
        if len(some) > 1:
            times = [row.time_s for row in some if row.time_s]
            middle = median(times)
            found |= dict.fromkeys((row.key for row in some), mean(abs(time / middle - 1) for time in times))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors of some rows."""

    rows: int
    mean: float
    signed: float
    worst: float
    inside: float | None
    """Share of the rows with an interval that lie in it."""
    floor: float | None
    """Mean over rows that several sites ran, of what nobody can be better than."""


def score(some: Sequence[Compared]) -> Score:
    """Of at least one row."""
    errors = [one.error for one in some]
    inside = [one.inside for one in some if one.inside is not None]
    floors = [one.floor for one in some if one.floor is not None]
    return Score(
        rows=len(some),
        mean=mean(map(abs, errors)),
        signed=mean(errors),
        worst=max(errors, key=abs),
        inside=mean(inside) if inside else None,
        floor=mean(floors) if floors else None,
    )


def sizes(gpus: int) -> str:
    """A class of machines."""
    for most in (8, 64, 512, 2048):
        if gpus <= most:
            return f"up to {most}"
    return "more than 2048"


GROUPS: Final[Mapping[str, Callable[[Compared], str]]] = {
    "kind": lambda one: one.row.group,
    "GPU": lambda one: one.row.gpu,
    "framework": lambda one: one.row.framework,
    "precision": lambda one: one.row.precision,
    "GPUs": lambda one: sizes(one.row.gpus),
    "context parallelism": lambda one: "cp 1" if one.row.cp == 1 else "cp 2 or more",
}
BARS: Final[Mapping[str, Callable[[Row], bool]]] = {
    "steps, bf16, dense": lambda row: row.precision == "bf16" and not row.routed,
    "steps, fp8, dense": lambda row: row.precision in ("fp8", "mxfp8") and not row.routed,
    "steps, experts or fp4": lambda row: row.routed or row.precision not in ("bf16", "fp8", "mxfp8"),
}
"""Groups of steps that have bars."""


ATTENTION: Final = ("ring-flash-attn", "yunchang")
"""Kinds of rows that are attention alone."""


def scores(some: Sequence[Compared], by: Callable[[Compared], str]) -> dict[str, Score]:
    """By group, in the order of first rows."""
    grouped: dict[str, list[Compared]] = {}
    for one in some:
        grouped.setdefault(by(one), []).append(one)
    return {name: score(group) for name, group in grouped.items()}


def bars(found: Ledger) -> dict[str, Score]:
    """Errors of the groups that have bars, of all times, and of memory."""
    times = found.of("time")
    whole = [one for one in times if one.row.kind not in ATTENTION]
    groups = {name: [one for one in whole if belongs(one.row)] for name, belongs in BARS.items()}
    groups |= {"steps with context parallelism": [one for one in whole if one.row.cp > 1]}
    groups |= {"attention alone": [one for one in times if one.row.kind in ATTENTION], "all times": times}
    groups["memory"] = found.of("memory")
    return {name: score(some) for name, some in groups.items() if some}


COLUMNS: Final = (
    "row",
    "quantity",
    "name",
    "gpu",
    "gpus",
    "cp",
    "framework",
    "precision",
    "published",
    "predicted",
    "low",
    "high",
    "error_percent",
    "said_percent",
    "why_not",
)


def table(found: Ledger) -> str:
    """All rows as CSV: seconds or GB."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for one in found.compared:
        scale = 1.0 if one.quantity == "time" else 1e9
        numbers = {name: getattr(one, name) for name in ("published", "predicted", "low", "high")}
        writer.writerow(
            _named(one.row)
            | {"quantity": one.quantity, "error_percent": f"{100 * one.error:.1f}"}
            | {name: f"{value / scale:.5g}" for name, value in numbers.items() if value is not None}
            | ({"said_percent": f"{100 * one.error_said:.1f}"} if one.error_said is not None else {})
        )
    for row, prediction in found.refused:
        writer.writerow(_named(row) | {"why_not": f"{prediction.refusal}: {prediction.why}"})
    return out.getvalue()


def _named(row: Row) -> dict[str, object]:
    return {"row": row.key} | {
        name: getattr(row, name) for name in ("name", "gpu", "gpus", "cp", "framework", "precision")
    }


def errors_of(text: str) -> dict[tuple[str, str], float]:
    """Errors of a committed table, by row and quantity."""
    lines = csv.DictReader(io.StringIO(text))
    return {(x["row"], x["quantity"]): float(x["error_percent"]) / 100 for x in lines if x["error_percent"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What has changed since the committed table."""

    moved: int
    """Rows whose error changed by more than 0.1 points."""
    new: int
    gone: int
    before: float
    """Mean error of the rows that both have."""
    now: float


def changed(found: Ledger, text: str) -> Change | None:
    """Errors beside those of a committed table; None where they have no row in common."""
    before = errors_of(text)
    now: dict[tuple[str, str], float] = {(one.row.key, one.quantity): one.error for one in found.compared}
    both = before.keys() & now.keys()
    if not both:
        return None
    return Change(
        moved=sum(abs(now[key] - before[key]) > 1e-3 for key in both),
        new=len(now.keys() - both),
        gone=len(before.keys() - both),
        before=mean(abs(before[key]) for key in both),
        now=mean(abs(now[key]) for key in both),
    )


def summary(errors: Sequence[float]) -> str:
    """Mean, signed mean and worst of some errors."""
    return f"{mean(map(abs, errors)):6.1%} {mean(errors):+6.1%} {max(errors, key=abs):+6.1%}"
