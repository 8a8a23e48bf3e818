"""`python -m studies.plan`: planners of batches beside each other; `regret`: how close to the best they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cpsim.cli.entry import run_app
from cpsim.cli.terminal import Jobs, console, progress_bar
from cpsim.runtime.interrupts import end_at_once
from studies.plan import page, report
from studies.plan.compare import DISTRIBUTIONS, SETTINGS, cases
from studies.plan.compare import run as run_compare

app = typer.Typer(name="plan", add_completion=False, pretty_exceptions_enable=False, invoke_without_command=True)
Update = Annotated[bool, typer.Option("--update", help="Write results and docs/plan.md.")]


@app.callback()
def compare(
    context: typer.Context,
    gpus: Annotated[list[int] | None, typer.Option(help="Settings of so many GPUs alone; may be repeated.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Batches of every distribution at up to 128 GPUs.")] = 3,
    dcp: Annotated[bool, typer.Option("--dcp", help="DCP plans at 64 GPUs, too: minutes for each batch.")] = False,
    jobs: Jobs = None,
    update: Update = False,
) -> None:
    """Planners of global batches beside Megatron-Core's scheduler, at 64 to 1,024 GPUs."""
    if context.invoked_subcommand:
        return
    chosen = [setting for setting in SETTINGS if not gpus or setting.gpus in gpus]
    with progress_bar("Planning and simulating batches") as progress:
        rows = run_compare(cases(seeds, chosen), jobs=jobs, progress=progress)
    if dcp:
        few = [(setting, name, 0) for setting in chosen if setting.gpus == 64 for name in DISTRIBUTIONS]
        with progress_bar("Planning with DCP") as progress:
            more = run_compare(few, dcp=True, jobs=jobs, progress=progress)
        rows = [*rows, *(row for row in more if row.planner == "dcp")]
    console().print(report.compare_view(rows))
    if update:
        _write(page.COMPARED, report.compare_record(rows))


@app.command()
def regret(jobs: Jobs = None, update: Update = False) -> None:
    """Small batches against all plans there are, and whole ones with wrong prices."""
    from studies.plan.regret import run

    with progress_bar("Trying all plans") as progress:
        small, wrong = run(jobs=jobs, progress=progress)
    console().print(report.regret_view(small, wrong))
    if update:
        _write(page.REGRET, report.regret_record(small, wrong))


def _write(path: Path, record: dict[str, object]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    page.write()


if __name__ == "__main__":
    end_at_once()
    run_app(app, "python -m studies.plan")
