"""What commands share: options, where they print, how far they are, and what they refuse."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cpsim.errors import CpsimError
from cpsim.runtime.limits import FORCE

if TYPE_CHECKING:
    from rich.console import Console

    from cpsim.models.profile import Profile
    from cpsim.runtime.processes import Progress

LONGEST_NAME = 255
"""Bytes of a file's name that file systems take."""
LogRanks = Annotated[int | None, typer.Option("--ranks", min=2, help="GPUs of a log without its list of ranks.")]
LogNodes = Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes of such a log.")]
LogDomain = Annotated[int | None, typer.Option("--domain", min=1, help="GPUs of an NVLink domain that spans hosts.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of tables for people.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes to use; all cores where not given.")]


def _forced(value: bool) -> bool:
    if value:
        os.environ[FORCE] = "1"
    return value


Force = Annotated[
    bool, typer.Option("--force", callback=_forced, help="Predict however long it takes and however large it is.")
]
Scenarios = Annotated[Path, typer.Argument(metavar="FILE", help="Scenarios: YAML, JSON, or JSON Lines.")]
OneScenario = Annotated[Path, typer.Argument(metavar="FILE", help="One scenario: YAML or JSON.")]
RunFolder = Annotated[Path | None, typer.Option(help="Folder of run files to set predictions beside.")]


def check_writable(*paths: Path | None) -> None:
    """Refuse outputs that cannot be written before any work is done."""
    for path in filter(None, paths):
        there = path if os.path.exists(path) else path.parent
        if os.path.isdir(path) or not os.path.isdir(path.parent) or len(os.fsencode(path.name)) > LONGEST_NAME:
            raise CpsimError(f"{path}: cannot be written: expected a file name in a folder that exists")
        if not os.access(there, os.W_OK):
            raise CpsimError(f"{path}: cannot be written: {there} is read-only; expected one that you may write to")


def refuse(why: str, given: Mapping[str, object]) -> None:
    """Refuse options that would do nothing here.

    Args:
        why: the command, and what makes them useless.
        given: options, and whether they were given: their values, or that these are not the usual ones.
    """
    for option, value in given.items():
        if value:
            raise CpsimError(f"{why}; leave {option} out")


def typed(context: typer.Context, *names: str) -> dict[str, bool]:
    """Options, and whether they were typed, be it as what they are anyway."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return {f"--{name}": source is not None and source.name == "COMMANDLINE" for name, source in sources.items()}


def console() -> Console:
    """Console on stdout; 100 columns where stdout is no terminal and ``COLUMNS`` does not say how many."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=int(os.environ.get("COLUMNS", "100")))


@contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    """A progress bar on stderr with the remaining time, shown only after a second of work."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Bar(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(label, total=None)
    started = time.monotonic()

    def update(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if sys.stderr and sys.stderr.isatty() and time.monotonic() - started > 1 and not bar.live.is_started:
            bar.start()

    try:
        yield update
    finally:
        if bar.live.is_started:
            bar.stop()


@contextmanager
def part_bars(minutes: float) -> Iterator[Callable[[str, int, int], None]]:
    """Progress bars on stderr: the time, and the points of every part; no more than lines without a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar, tasks, started = Bar(*columns, console=Console(stderr=True)), {}, time.monotonic()
    clock = bar.add_task("seconds", total=round(60 * minutes))

    def update(part: str, done: int, total: int) -> None:
        if part not in tasks:
            tasks[part] = bar.add_task(part, total=total)
        bar.update(tasks[part], completed=done, total=total)
        bar.update(clock, completed=round(time.monotonic() - started))

    with bar:
        yield update


def print_profiles(shown: Sequence[Profile], as_json: bool) -> None:
    from cpsim.report.records import profile_record
    from cpsim.report.tables import profile_view

    if as_json:
        print(json.dumps([profile_record(profile) for profile in shown], indent=1))
        return
    for profile in shown:
        console().print(profile_view(profile))
