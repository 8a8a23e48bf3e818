"""What a reader must know before relying on an answer, by what it changes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final

SUBJECTS: Final[Mapping[str, tuple[str, ...]]] = {
    "the whole answer": ("not measured",),
    "the network": (
        *("network", "among", "nic", "transfer", "collective", "rings of", "ranks", "nodes", "port"),
        *("all_gather", "reduce_scatter", "all_to_all", "all_reduce"),
    ),
    "hosts": ("host", "launch", "planning"),
    "kernels": (
        *("costs on the gpu", "attention", "kernel", "profile", "clock", "product"),
        *("queries in", "keys in", " heads, measured"),
    ),
    "memory": ("memory", "allocator"),
    "the case": (),
}
"""What a caveat changes, by words in it; the first that holds counts."""
OUTSIDE: Final = re.compile(r"(?P<what>.* )(?P<size>\d+)(?P<unit> .*), measured (?P<side>up to|from) (?P<limit>\d+)$")
"""How cost models say that they were asked for more, or less, than was measured (``cpsim.models.parameters``)."""


def caveats(notes: Iterable[str]) -> dict[str, list[str]]:
    """Notes by what they change; those on what lies outside of measured ranges are one line.

    Args:
        notes: of an answer.

    Returns:
        Lines by subject, in the order of ``SUBJECTS``; none of a subject without notes.
    """
    groups: dict[str, list[str]] = {subject: [] for subject in SUBJECTS}
    for note in notes:
        groups[_subject(note.lower())].append(note)
    return {subject: _joined(some) for subject, some in groups.items() if some}


def _subject(said: str) -> str:
    return next(subject for subject, words in SUBJECTS.items() if not words or any(word in said for word in words))


def _joined(notes: Sequence[str]) -> list[str]:
    """The same with one line for everything outside of measured ranges: of each range what lies farthest outside."""
    farthest: dict[tuple[str, str, str, str], int] = {}
    rest = []
    for note in notes:
        found = OUTSIDE.match(note)
        if found is None:
            rest.append(note)
            continue
        key, size = (found["what"], found["unit"], found["side"], found["limit"]), int(found["size"])
        farther = max if found["side"] == "up to" else min
        farthest[key] = farther(size, farthest.get(key, size))
    same: dict[str, list[str]] = {}
    for (what, unit, side, limit), size in farthest.items():
        name, _, word = what.rstrip().rpartition(" ")
        same.setdefault(f"{word} {size:,}{unit} (measured {side} {int(limit):,})", []).append(name)
    outside = "; ".join(f"{', '.join(names)} {where}".strip() for where, names in same.items())
    return rest + [f"beyond what was measured: {outside}"] * bool(outside)


def caveats_html(notes: Sequence[str]) -> str:
    """The same as HTML, folded; nothing where there is nothing."""
    there = caveats(notes)
    if not there:
        return ""
    lists = "".join(
        f"<dt>{escape(subject.capitalize())}</dt>{''.join(f'<dd>{escape(line)}</dd>' for line in some)}"
        for subject, some in there.items()
    )
    count = ", ".join(f"{len(some)} on {subject}" for subject, some in there.items())
    summary = f"Know this before you rely on it: {count}"
    return f'<details class="caveats"><summary>{escape(summary)}</summary><dl>{lists}</dl></details>'
