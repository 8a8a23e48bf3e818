"""Readers of published tables: one for each kind, from a line to a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from cpsim.errors import CpsimError
from studies import published_lines
from studies.public.readers import attention, automodel, bridge, golden, mlperf, simumax, torchtitan
from studies.public.row import TABLES, Line, Reader, Row

READERS: Final[Mapping[str, Reader]] = {
    "mlperf": mlperf.READER,
    "torchtitan": torchtitan.READER,
    "automodel": automodel.READER,
    "megatron-bridge": bridge.READER,
    "simumax": simumax.READER,
    "megatron-golden": golden.READER,
    "ring-flash-attn": attention.RING_FLASH_ATTN,
    "yunchang": attention.YUNCHANG,
}
"""By kind."""
HOST: Final = 0.72
"""Launches on the fastest of 26 hosts over those on the mean one, as `python -m studies.windows.speed` prints them."""
OWN_HOST: Final = (
    f"hosts as fast as the fastest of ours ({HOST} of the mean), which are virtual machines that others share"
)


def rows(kinds: Sequence[str] = ()) -> Iterator[Row]:
    """Rows of our tables, of these kinds or of all."""
    for kind in kinds or READERS:
        yield from _read(kind, TABLES / READERS[kind].file, "")


def rows_of(path: Path) -> Iterator[Row]:
    """Rows of a further table, whose columns tell its kind.

    Raises:
        CpsimError: it cannot be read, or is of no kind; says what is known.
    """
    try:
        found = published_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise CpsimError(f"{path}: cannot be read as a table: {getattr(error, 'strerror', None) or error}") from None
    columns = set(found[0]) if found else set()
    kinds = [kind for kind, reader in READERS.items() if reader.columns <= columns]
    if not kinds:
        files = ", ".join(reader.file for reader in READERS.values())
        raise CpsimError(f"{path}: expected the columns of one of {files}, got {', '.join(sorted(columns)) or 'none'}")
    yield from _read(kinds[0], path, f"{path.stem} ")


def _read(kind: str, path: Path, prefix: str) -> Iterator[Row]:
    for number, line in enumerate(published_lines(path), start=1):
        yield replace(
            _on_own_host(_row(READERS[kind], line, f"{path}, row {number}")),
            kind=kind,
            number=f"{prefix}{number}",
            source=line.get("source") or "",
        )


def _on_own_host(row: Row) -> Row:
    """A step on servers that run nothing else."""
    if row.fields is None or "model" not in row.fields:
        return row
    return replace(row, fields={**row.fields, "host": HOST}, assumed=(*row.assumed, OWN_HOST))


def _row(reader: Reader, line: Line, where: str) -> Row:
    try:
        return reader.read(line)
    except (KeyError, ValueError, TypeError, ZeroDivisionError) as error:
        raise CpsimError(f"{where}: cannot be read: expected the columns of {reader.file}, got {error!r}") from None
