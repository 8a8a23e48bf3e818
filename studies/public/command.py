"""What ``cpsim reproduce public`` does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType

from cpsim.errors import check_name
from cpsim.runtime.processes import Progress
from studies.public.ledger import LEDGER, Change, Ledger, changed, ledger, table
from studies.public.readers import READERS
from studies.public.report import ledger_html, ledger_record, ledger_view
from studies.public.row import FOLDER

OPEN: str = "What is not understood"
"""Section of README.md that the page repeats."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A ledger, and what has changed since the committed one."""

    ledger: Ledger
    change: Change | None

    def record(self) -> str:
        """For machines."""
        return json.dumps(ledger_record(self.ledger, self.change), indent=1) + "\n"

    def view(self, worst: int) -> RenderableType:
        """For people; so many rows."""
        return ledger_view(self.ledger, worst, self.change)

    def html(self) -> str:
        """A page."""
        return ledger_html(self.ledger, open_questions())


def run(
    kinds: Sequence[str],
    files: Sequence[Path],
    jobs: int | None = None,
    progress: Progress | None = None,
    *,
    update: bool = False,
) -> Answer:
    """Predicts rows of kinds, of our tables or of further ones.

    Raises:
        CpsimError: a kind is not known, or a table cannot be read.
    """
    for kind in kinds:
        check_name("kind", kind, READERS)
    found = ledger(kinds, files, jobs, progress)
    before = LEDGER.read_text(encoding="utf-8") if LEDGER.exists() and not files else ""
    answer = Answer(found, changed(found, before) if before else None)
    if update:
        LEDGER.write_text(table(found), encoding="utf-8")
    return answer


def open_questions() -> list[str]:
    """Paragraphs of the README that say what is not understood."""
    text = FOLDER.joinpath("README.md").read_text(encoding="utf-8")
    if f"## {OPEN}" not in text:
        return []
    section = text.split(f"## {OPEN}", 1)[1].split("\n## ", 1)[0]
    return [" ".join(part.split()).replace("`", "") for part in section.split("\n\n") if part.strip()]
