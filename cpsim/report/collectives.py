"""Collectives of a cluster as a table and as a record."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from cpsim.prediction.collectives import Answer, Size
from cpsim.report.fitted import table
from cpsim.report.tables import notes_view
from cpsim.units import format_count


def collectives_record(answer: Answer) -> dict[str, Any]:
    """Everything that the table shows."""
    return {
        "cluster": answer.cluster.name,
        "sizes": [_size_record(size) for size in answer.sizes],
        "compared": [_compared(kind, gpus, sizes) for kind, gpus, sizes in _tests(answer) if sizes[0].measured_s],
        "notes": [*answer.notes],
    }


def _size_record(size: Size) -> dict[str, Any]:
    measured = {} if size.measured_s is None else {"measured_s": size.measured_s, "inside": size.inside}
    return {
        "kind": size.kind,
        "gpus": size.num_gpus,
        "bytes": size.nbytes,
        "time_s": size.time_s,
        "low_s": size.low_s,
        "high_s": size.high_s,
        "algbw_bytes_per_s": size.algorithm_bytes_per_s,
        "busbw_bytes_per_s": size.bus_bytes_per_s,
        **measured,
    }


def _compared(kind: str, gpus: int, sizes: list[Size]) -> dict[str, Any]:
    errors = np.array([size.error for size in sizes])
    return {
        "kind": kind,
        "gpus": gpus,
        "sizes": len(sizes),
        "mean": float(np.abs(errors).mean()),
        "sign": float(errors.mean()),
        "inside": float(np.mean([size.inside for size in sizes])),
    }


def _tests(answer: Answer) -> list[tuple[str, int, list[Size]]]:
    groups = groupby(answer.sizes, key=lambda size: (size.kind, size.num_gpus))
    return [(kind, gpus, list(sizes)) for (kind, gpus), sizes in groups]


def collectives_view(answer: Answer) -> RenderableType:
    """Like nccl-tests' table, with the interval; beside a log what it measured, the error, and a line of means."""
    parts: list[RenderableType] = []
    for kind, gpus, sizes in _tests(answer):
        parts += [Text(f"{kind}, {gpus} GPUs of {answer.cluster.name}", style="bold"), _table(sizes)]
        if sizes[0].measured_s:
            found = _compared(kind, gpus, sizes)
            words = (
                f"mean {found['mean']:.1%}, signed {found['sign']:+.1%}, inside the 90 % interval {found['inside']:.0%}"
            )
            parts.append(Text(words, style="green" if found["mean"] < 0.1 else "yellow"))
        parts.append(Text())
    return Group(*parts, *notes_view(answer.notes))


def _table(sizes: list[Size]) -> RenderableType:
    compared = sizes[0].measured_s is not None
    columns = ["size (B)", "time (µs)", "90 % (µs)", "algbw (GB/s)", "busbw (GB/s)"]
    made = table(*((name, "right") for name in [*columns, *(["measured (µs)", "error"] if compared else [])]))
    for size in sizes:
        cells = [
            format_count(size.nbytes),
            f"{size.time_s * 1e6:,.1f}",
            f"{size.low_s * 1e6:,.0f} to {size.high_s * 1e6:,.0f}",
            f"{size.algorithm_bytes_per_s / 1e9:.2f}",
            f"{size.bus_bytes_per_s / 1e9:.2f}",
        ]
        if size.measured_s is not None:
            error = Text(f"{size.error:+.1%}", style="" if size.inside else "red")
            made.add_row(*cells, f"{size.measured_s * 1e6:,.1f}", error)
        else:
            made.add_row(*cells)
    return made
