"""Rows as scenarios, predictions of them, and how they compare.

A batch of two sequences is predicted as one sequence of twice as many heads, which is as many thread blocks of as many
pairs. Benchmarks run iterations back to back.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cpsim import predict
from cpsim.case.load import scenario_from
from cpsim.errors import CpsimError

FOLDER: Final = Path(__file__).parent
PREDICTED: Final = FOLDER / "predicted.jsonl"
STRATEGIES: Final = {"ring": "ring", "zigzag_ring": "zigzag_ring", "stripe": "striped_ring"}
RINGS: Final = {"basic": "ring", "zigzag": "zigzag_ring", "stripe": "striped_ring"}
FILES: Final = ("ring_flash_attn.csv", "yunchang_usp.csv")


@dataclass(frozen=True, slots=True)
class Row:
    """One published time."""

    file: str
    line: int
    scenario: Mapping[str, Any] | None
    """None where nothing here runs it."""
    reason: str
    measured_s: float


@dataclass(frozen=True, slots=True)
class Compared:
    """A row and what was predicted of it."""

    row: Row
    time_s: float
    low_s: float
    high_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.time_s / self.row.measured_s - 1

    @property
    def inside(self) -> bool:
        """Whether the published time lies in the interval."""
        return self.low_s <= self.row.measured_s <= self.high_s


def rows() -> list[Row]:
    """All published rows."""
    found: list[Row] = []
    for name in FILES:
        with (FOLDER / name).open(encoding="utf-8", newline="") as file:
            found += [_row(name, line, record) for line, record in enumerate(csv.DictReader(file), start=2)]
    return found


def _row(name: str, line: int, record: Mapping[str, str]) -> Row:
    gpu = "h800" if record["gpu"] == "H800" else "a100"
    batch, ranks = int(record.get("batch") or 1), int(record["gpus"])
    scenario: dict[str, Any] = {
        "gpus": ranks,
        "cluster": f"studies/public_attention/{gpu}.yaml",
        "kernel": "fa2",
        "tokens_per_gpu": int(record["total_tokens"]) // ranks,
        "mask": record["mask"],
        "heads": int(record["heads"]) * batch,
        "kv_heads": int(record["kv_heads"]) * batch,
        "head_dim": int(record["head_dim"]),
        "pass": record["pass_"],
        "protocol": "streamed",
    }
    if name == FILES[0]:
        scenario |= {"strategy": STRATEGIES[record["strategy"]], "implementation": "ring-flash-attn"}
        return Row(name, line, scenario, "", float(record["time_s"]))
    degree, ring = int(record["ulysses_degree"]), record["ring_impl"]
    if degree == 1:  # whose rings are those of ring-flash-attn
        scenario |= {"strategy": RINGS[ring], "implementation": "ring-flash-attn"}
    elif degree == ranks or ring in ("basic", "zigzag"):
        knobs = {"ulysses": degree, "ring": "basic" if degree == ranks else ring}  # rings of one are all alike
        scenario |= {"strategy": "usp", "knobs": knobs, "implementation": "yunchang"}
    else:
        return Row(name, line, None, f"yunchang's ring {ring} has no plan here", float(record["time_s"]))
    return Row(name, line, scenario, "", float(record["time_s"]))


def predict_all() -> list[dict[str, Any]]:
    """What is predicted of every row that can be: file, line and times, or why not."""
    made: list[dict[str, Any]] = []
    for row in rows():
        if row.scenario is None:
            continue
        about = {"file": row.file, "line": row.line}
        try:
            answer = predict(scenario_from(dict(row.scenario)))
        except CpsimError as error:
            made.append(about | {"error": str(error)})
        else:
            made.append(about | {"time_s": answer.time_s, "low_s": answer.time_s_low, "high_s": answer.time_s_high})
    return made


def compared(predictions: list[dict[str, Any]]) -> tuple[list[Compared], dict[str, int]]:
    """Rows beside predictions, and the numbers of the others by reason."""
    known = {(one["file"], one["line"]): one for one in predictions}
    found: list[Compared] = []
    left: dict[str, int] = {}
    for row in rows():
        one = known.get((row.file, row.line), {"error": row.reason})
        if "error" in one:
            left[one["error"]] = left.get(one["error"], 0) + 1
        else:
            found.append(Compared(row, one["time_s"], one["low_s"], one["high_s"]))
    return found, left


def committed() -> list[dict[str, Any]]:
    """The predictions that were committed before they were compared."""
    return [json.loads(line) for line in PREDICTED.read_text(encoding="utf-8").splitlines()]
