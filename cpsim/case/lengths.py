"""Document lengths from files: text, NumPy, Parquet, JSON, and histograms; and how frameworks pack them."""

from __future__ import annotations

import csv
import re
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cpsim.case.files import MAX_BYTES, parse_json, read_lines, read_text
from cpsim.errors import ScenarioError, shown
from cpsim.units import TOKENS

Ints = NDArray[np.int64]
MAX_DOCUMENTS: Final = 10_000_000
_COLUMNS: Final = ("length", "lengths", "num_tokens", "n_tokens", "token_count", "tokens", "seqlen", "seq_len", "len")
"""Names of columns that hold lengths, the first of them that is there."""
_COUNTS: Final = ("count", "counts", "num_documents", "documents", "frequency", "weight", "n")
"""Names of columns of a histogram that say how many documents there are."""
PACKED: Final = 20_000
"""Documents of which packing is tried."""


def read_lengths(path: Path) -> tuple[int, ...]:
    """Lengths [tokens] of the documents of a file, in its order.

    Args:
        path: ``.npy``; ``.parquet`` with a column of lengths or of token ids; ``.json`` with a list; ``.jsonl`` with a
            number or a field ``length`` a line; text with numbers between spaces, commas or lines; or a table,
            ``.csv`` or ``.tsv``, of lengths, or of lengths and how many documents have them.

    Raises:
        ScenarioError: it cannot be read; says which line.
    """
    match path.suffix:
        case ".npy":
            found = _array(path)
        case ".parquet":
            found = _parquet(path)
        case ".json":
            found = _json(path)
        case ".jsonl" | ".ndjson":
            found = [_of_record(value, place) for place, value in _records(path)]
        case _:
            found = _text(path)
    if not found:
        raise ScenarioError(f"{path}: expected document lengths, got none")
    if len(found) > MAX_DOCUMENTS:
        raise ScenarioError(f"{path}: expected at most {MAX_DOCUMENTS:,} documents, got {len(found):,}; take a sample")
    return tuple(found)


def _array(path: Path) -> list[int]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ScenarioError(f"{path}: expected at most {MAX_BYTES // 10**6} MB; take a sample")
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ScenarioError(f"{path}: cannot be read as a NumPy array: {error}") from None
    if values.ndim != 1 or values.dtype.kind not in "iu" or (values < 1).any():
        raise ScenarioError(f"{path}: expected a row of whole lengths of 1 or more, got {values.dtype}{values.shape}")
    return [int(value) for value in values]


def _parquet(path: Path) -> list[int]:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise ScenarioError(f"{path}: needs pyarrow, which is not installed; pip install '.[sweep]'") from None
    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        chosen = next((name for name in (*_COLUMNS, "input_ids") if name in names), names[0] if len(names) == 1 else "")
        if not chosen:
            raise ScenarioError(f"{path}: expected a column length or input_ids, got {', '.join(names[:8])}")
        values = file.read(columns=[chosen]).column(chosen).to_pylist()
    except (OSError, ValueError) as error:
        if isinstance(error, ScenarioError):
            raise
        raise ScenarioError(f"{path}: cannot be read as Parquet: {error}") from None
    return [_of_record(value, f"{path} row {i}") for i, value in enumerate(values, start=1)]


def _json(path: Path) -> list[int]:
    value = parse_json(read_text(path), str(path))
    if isinstance(value, dict):
        value = next((value[name] for name in _COLUMNS if name in value), value)
    if not isinstance(value, list):
        raise ScenarioError(f"{path}: expected a list of lengths, got {shown(value)}")
    return [_of_record(one, f"{path} item {i}") for i, one in enumerate(value, start=1)]


def _records(path: Path) -> list[tuple[str, Any]]:
    from cpsim.case.files import read_json_lines

    found = []
    for place, value in read_json_lines(path):
        if isinstance(value, ScenarioError):
            raise value
        found.append((place, value))
    return found


def _of_record(value: Any, place: str) -> int:
    """A length, or that of a record or of a list of token ids."""
    if isinstance(value, dict):
        name = next((name for name in (*_COLUMNS, "input_ids") if name in value), None)
        if name is None:
            raise ScenarioError(f"{place}: expected a field length, got {shown([*value])}")
        value = value[name]
    return _length(len(value) if isinstance(value, list) else value, place)


def _length(value: Any, place: str) -> int:
    try:
        found = TOKENS.read(value.strip() if isinstance(value, str) and not value.strip().isdigit() else int(value))
    except (ValueError, TypeError, OverflowError):
        raise ScenarioError(f"{place}: expected a length of 1 token or more, got {shown(value)}") from None
    if found != int(found) or isinstance(value, bool):
        raise ScenarioError(f"{place}: expected a whole length, got {shown(value)}")
    return int(found)


def _text(path: Path) -> list[int]:
    lines: list[tuple[int, str]] = []
    for number, line in read_lines(path):
        if isinstance(line, ScenarioError):
            raise line
        bare = line.split("#")[0].strip()
        if bare:
            lines.append((number, bare))
    if lines and re.search("[a-zA-Z]{2}", lines[0][1]):
        return _table(path, lines)
    return [
        _length(word, f"{path} line {number}") for number, line in lines for word in re.split(r"[\s,;]+", line) if word
    ]


def _table(path: Path, lines: Sequence[tuple[int, str]]) -> list[int]:
    """Columns with a header: lengths, or the rows of a histogram."""
    sign = "\t" if "\t" in lines[0][1] else ";" if ";" in lines[0][1] else ","
    header = [name.strip().lower() for name in next(csv.reader([lines[0][1]], delimiter=sign))]
    length = next((header.index(name) for name in (*_COLUMNS, "high", "upper") if name in header), None)
    count = next((header.index(name) for name in _COUNTS if name in header), None)
    low = header.index("low") if "low" in header and "high" in header else None
    if length is None:
        raise ScenarioError(f"{path} line {lines[0][0]}: expected a column length, got {', '.join(header[:8])}")
    found: list[int] = []
    for number, line in lines[1:]:
        cells, place = next(csv.reader([line], delimiter=sign)), f"{path} line {number}"
        if len(cells) != len(header):
            raise ScenarioError(f"{place}: expected {len(header)} columns, got {len(cells)}")
        longest = _length(cells[length], place)
        times = _count(cells[count], place) if count is not None else 1
        if len(found) + times > MAX_DOCUMENTS:
            raise ScenarioError(f"{place}: expected at most {MAX_DOCUMENTS:,} documents, got more; give smaller counts")
        shortest = _count(cells[low], place) if low is not None else longest
        spread = np.linspace(shortest, longest, times + 2)[1:-1] if shortest < longest else np.full(times, longest)
        found += [max(1, round(value)) for value in spread.tolist()]
    return found


def _count(cell: str, place: str) -> int:
    if not cell.strip().isdigit():
        raise ScenarioError(f"{place}: expected a whole number, got {shown(cell)}")
    return int(cell)


@dataclass(frozen=True, slots=True)
class Sample:
    """Documents of a step, drawn from those of a file."""

    documents: tuple[int, ...]
    """Lengths [tokens] that sum to the tokens of the step."""
    repeated: bool
    """Whether the file had fewer tokens than a step."""


def sample(lengths: Sequence[int], num_tokens: int, longest: int, seed: int = 0) -> Sample:
    """Documents of a step: those of a file in a random order, cut to a sequence, until the tokens are there."""
    order, rng = np.minimum(np.asarray(lengths, np.int64), longest), np.random.default_rng(seed)
    drawn, missing, repeated = list[int](), num_tokens, False
    while missing > 0:
        for length in rng.permutation(order).tolist():
            drawn.append(min(length, missing))
            missing -= drawn[-1]
            if missing == 0:
                return Sample(tuple(drawn), repeated)
        repeated = True
    return Sample(tuple(drawn), repeated)


@dataclass(frozen=True, slots=True)
class Waste:
    """Share of a step's tokens that are padding, by how documents come into sequences; 0 to 1."""

    cut: float
    """Documents follow one another and are cut where a sequence ends: nothing is wasted."""
    packed: float
    """Whole documents share a sequence, best fit first, longer ones are cut to it."""
    padded: float
    """A sequence for every document."""


def waste(lengths: Sequence[int], context: int) -> Waste:
    """What packing and padding waste of sequences of so many tokens; of large files, of their first documents."""
    kept = np.minimum(np.asarray(lengths[:PACKED], np.int64), context)
    total = int(kept.sum())
    return Waste(0.0, 1 - total / (bins(kept, context) * context), 1 - total / (len(kept) * context))


def bins(lengths: Ints, size: int) -> int:
    """Sequences that best fit, the longest first, fills with whole documents."""
    free, full = list[int](), 0
    for length in np.sort(lengths)[::-1].tolist():
        at = bisect_left(free, length)
        left = (free.pop(at) if at < len(free) else size) - length
        if left:
            insort(free, left)
        else:
            full += 1
    return len(free) + full
