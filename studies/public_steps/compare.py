"""Published steps beside what cpsim said before it saw them, and what it says today."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Final

from studies.public_steps.predict import Predicted, predicted
from studies.public_steps.rows import FOLDER, Row, rows

NUMBERED: Final = (*(f"-{number}" for number in range(2, 8)), "-moe", "-lora", "-interleaved")
BEFORE: Final = ("predicted.jsonl", *(f"predicted{part}.jsonl" for part in NUMBERED))
"""Predictions that were committed before errors were looked at; later files stand for earlier ones."""
Quantity = str
QUANTITIES: Final = ("time", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One quantity of one row: seconds or bytes."""

    row: Row
    quantity: Quantity
    published: float
    before: float
    today: float

    @property
    def error(self) -> float:
        """Of today: predicted over published, less one."""
        return self.today / self.published - 1

    @property
    def error_before(self) -> float:
        """Of what was said before."""
        return self.before / self.published - 1


def committed() -> dict[str, Predicted]:
    """Predictions that were committed before, by row."""
    found = {}
    for name in BEFORE:
        for line in FOLDER.joinpath(name).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            key = record["row"]
            found[key] = Predicted(**{name: record.get(name) for name in Predicted.__slots__})
    return found


def compared() -> Iterator[Compared]:
    """All that was published of rows that a scenario says."""
    before = committed()
    for row in rows():
        if row.scenario is not None:
            then, now = before[row.key], predicted(row)
            pairs = {
                "time": (row.time_s, then.time_s, now.time_s),
                "memory": (
                    row.memory_bytes,
                    then.memory_bytes,
                    now.reserved_bytes if row.reserved else now.memory_bytes,
                ),
            }
            for quantity, (published, first, today) in pairs.items():
                if published is not None and first is not None and today is not None:
                    yield Compared(row=row, quantity=quantity, published=published, before=first, today=today)


def left_out() -> dict[tuple[str, str], int]:
    """Rows that no scenario says, by source and reason."""
    found: dict[tuple[str, str], int] = {}
    for row in rows():
        if row.left_out:
            key = row.source, row.left_out
            found[key] = found.get(key, 0) + 1
    return found


def summary(errors: Sequence[float]) -> str:
    """Mean, signed mean and worst of some errors."""
    return f"{mean(map(abs, errors)):6.1%} {mean(errors):+6.1%} {max(errors, key=abs):+6.1%}"
