"""What ``cpsim reproduce public`` does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Final

from rich.console import RenderableType

from cpsim.errors import check_name
from cpsim.runtime.processes import Progress
from studies.public.findings import finding_lines
from studies.public.ledger import GROUPS, LEDGER, QUANTITIES, Change, Ledger, bars, changed, ledger, scores, table
from studies.public.readers import READERS
from studies.public.report import (
    BAR,
    HEAD,
    ledger_html,
    ledger_record,
    ledger_view,
    refused_lines,
    score_cells,
)
from studies.public.row import FOLDER
from studies.public.scatter import scatter_svg

README: Final = FOLDER / "README.md"
PAGE: Final = FOLDER.parent.parent / "docs" / "public.md"
FIGURE: Final = PAGE.with_suffix(".svg")
BEGIN, END = "<!-- errors -->\n", "<!-- end of errors -->"
MEANING: Final = """
*Inside* is the share in the interval of 90 %. *Sites differ by* is how far sites that ran one layout with one version
of the software are from their median, on average: nobody can be better than that.
"""
OPEN: Final = "What is not understood"
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
        README.write_text(with_errors(README.read_text(encoding="utf-8"), found), encoding="utf-8")
        PAGE.write_text(page(found), encoding="utf-8")
        FIGURE.write_text(scatter_svg(found.of("time")), encoding="utf-8")
    return answer


def open_questions() -> list[str]:
    """Paragraphs of the README that say what is not understood."""
    text = README.read_text(encoding="utf-8")
    if f"## {OPEN}" not in text:
        return []
    section = text.split(f"## {OPEN}", 1)[1].split("\n## ", 1)[0]
    return [" ".join(part.split()).replace("`", "") for part in section.split("\n\n") if part.strip()]


def page(found: Ledger) -> str:
    """The page of the documentation: a scatter, a table, and what is not understood."""
    refused = Counter(one.refusal for _, one in found.refused)
    text = f"""# Published runs, predicted

Written by `cpsim reproduce public --update`. Steps and calls that others ran and published, each predicted from its
configuration; none is fitted to. First predictions were committed before errors were seen. `studies/public`, in a
checkout, has every row with its source, and what was assumed.

![Predicted over published seconds of steps and calls, by GPU](public.svg)

{len(found.of("time"))} times and {len(found.of("memory"))} peaks of memory. On the line both agree; between the dashed
lines the prediction is at most a quarter too long or a fifth too short.

"""
    after = f"""{MEANING}
Without a prediction are {refused["cannot"]} rows that no scenario says and {refused["not measured"]} of GPUs or calls
that nobody has measured.

## {OPEN}

"""
    notes = [line for note in open_questions() for line in (note, "")]
    return text + "\n".join([*error_lines(found), after + "\n".join(notes), *map("- {}".format, _far(found))]) + "\n"


def _far(found: Ledger) -> list[str]:
    return finding_lines(found.compared)


def error_lines(found: Ledger) -> list[str]:
    """The table of errors in Markdown."""
    head = ("", *HEAD, "said before")
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    for quantity in QUANTITIES:
        some = found.of(quantity)
        for name, one in scores(some, GROUPS["kind"]).items():
            said = [c.error_said for c in some if c.row.group == name and c.error_said is not None]
            before = f"{100 * mean(map(abs, said)):.1f} %" if said else ""
            lines.append(f"| {' | '.join((f'{name}, {quantity}', *score_cells(one), before))} |")
    for name, one in bars(found).items():
        aim = f" (aim: {100 * BAR[name]:.0f} %)" if name in BAR else ""
        lines.append(f"| {' | '.join((f'**{name}**{aim}', *score_cells(one), ''))} |")
    return lines


def with_errors(text: str, found: Ledger) -> str:
    """A page with the table of errors between its marks."""
    left = [f"- {line}" for line in refused_lines(found)]
    before, rest = text.split(BEGIN, 1)
    new = "\n".join([*error_lines(found), "", "Without a prediction:", "", *left, END])
    return before + BEGIN + new + rest.split(END, 1)[1]
