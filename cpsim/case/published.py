"""Published tables of attention kernels: their rows, and the ones that ship."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cpsim.case.documents import DISTRIBUTIONS, draw_documents
from cpsim.case.files import as_profile_error, read_text
from cpsim.errors import ProfileError, shown
from cpsim.masks.names import Value, read_options
from cpsim.units import number_or_text

FOLDER: Final = Path(__file__).parent.with_name("data") / "published"
TABLES: Final = ("magi", "longca")
"""Names of those that ship: times and memory. ``support`` says what benchmarks say that kernels run."""
LAUNCH_S: Final = 1e-3
LAUNCHED: Final = 2.0
"""Published tables time calls with their launches: those shorter than a time, which a backward pass from Python takes,
and a multiple of the shortest call may show nothing else."""
OUT_OF_MEMORY: Final = "OOM"
MOST_PACKS: Final = 100
_COLUMNS: Final = {
    "wd": "pass",
    "seqlen": "tokens",
    "seq_len_tokens": "tokens",
    "q_heads": "heads",
    "tflop_per_s": "tflops",
    "tflops_per_s": "tflops",
}


def read_rows(path: Path) -> tuple[str, list[tuple[int, dict[str, str]]]]:
    """What comments of a CSV table say, and its rows by names of columns, with the numbers of their lines.

    Raises:
        ProfileError: cells are missing or too many, or a column comes twice.
    """
    with as_profile_error():
        text = read_text(path)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    source = " ".join(line.lstrip("# ").strip() for _, line in lines if line.startswith("#"))
    kept = [(number, line) for number, line in lines if not line.startswith("#")]
    reader, table = csv.reader(line for _, line in kept), []
    names: list[str] = []
    try:
        for cells in reader:
            number = kept[reader.line_num - 1][0]
            if not names:
                names = [_COLUMNS.get(name.strip(), name.strip()) for name in cells]
                if len(set(names)) < len(names):
                    raise ProfileError(f"{path} line {number}: expected every column once, got {shown(cells)}")
            elif len(cells) != len(names):
                raise ProfileError(
                    f"{path} line {number}: expected {len(names)} cells, got {len(cells)}: {shown(cells)}"
                )
            else:
                table.append((number, dict(zip(names, map(str.strip, cells), strict=True))))
    except csv.Error as error:
        raise ProfileError(f"{path} line {reader.line_num}: {error}") from None
    return source, table


def shipped_rows(name: str) -> tuple[str, list[Mapping[str, str]]]:
    """What comments of a table that ships say, and its rows."""
    source, rows = read_rows(FOLDER / f"{name}.csv")
    return source, [row for _, row in rows]


def mask_options(mask: str, text: str) -> dict[str, Value]:
    """Options of a mask in a cell, as ``block=128 density=0.5``.

    Raises:
        ValueError: which is wrong and how.
    """
    given = dict(entry.partition("=")[::2] for entry in text.split())
    return dict(read_options(mask, {name: number_or_text(value) for name, value in given.items()}))


def packs_of(text: str, tokens: int) -> list[tuple[int, ...]]:
    """Document lengths of every pack of a cell: of the one that it lists (``1000 3096``), or of drawn ones: ``magi 20 x
    1024`` are 20 packs of lengths of the distribution magi, none over 1,024 tokens. Nothing is one document.

    Raises:
        ValueError: which entry is wrong.
    """
    name, *numbers = text.split() or [str(tokens)]
    if name not in DISTRIBUTIONS:
        return [tuple(count(n, "documents") for n in (name, *numbers))]
    if len(numbers) != 3 or numbers[1] != "x":
        raise ValueError(f"documents: expected lengths, or packs as 'magi 20 x 1024', got {shown(text)}")
    packs, longest = count(numbers[0], "documents"), count(numbers[2], "documents")
    return [draw_documents(name, tokens, seed, max_length=longest) for seed in range(max(1, min(packs, MOST_PACKS)))]


def count(text: str, name: str) -> int:
    """A whole number of a cell.

    Raises:
        ValueError: it is none.
    """
    if not (text.isdecimal() and len(text) < 12):
        raise ValueError(f"{name}: expected a whole number, got {shown(text)}")
    return int(text)


def is_long(seconds: float, shortest: float) -> bool:
    """Whether a time is the kernel's rather than the host's, where a table's shortest call of it takes so long."""
    return seconds >= min(LAUNCH_S, LAUNCHED * shortest)
