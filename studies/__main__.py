"""`python -m studies NAME`: one command for every published study, each with its own options."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from cpsim.cli.entry import run_app
from cpsim.cli.terminal import Jobs, Json, check_writable, console, progress_bar, refuse
from cpsim.errors import CpsimError
from cpsim.runtime.interrupts import end_at_once

if TYPE_CHECKING:
    from rich.console import RenderableType

Out = Annotated[Path | None, typer.Option(help="Write JSON to this file.")]
Html = Annotated[Path | None, typer.Option(help="Write figures to this file; it opens offline.")]
Worst = Annotated[int, typer.Option(min=0, help="Rows to list, worst first.")]
WORST = 30


class Studies(TyperGroup):
    """The studies; a name that is none of them is answered with all of them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The study that a name stands for."""
        if args[0] not in self.commands:
            *others, last = self.commands
            raise CpsimError(f"studies: expected {', '.join(others)} or {last}, got {args[0]!r}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="studies",
    cls=Studies,
    help="Predict a published study of others row by row, and say how far off the predictions are.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def magi_h100(
    out: Out = None,
    as_json: Json = False,
    jobs: Jobs = None,
    worst: Worst = WORST,
    fit: Annotated[bool, typer.Option("--fit", help="Fit the network between nodes to rows of 8 and 16 GPUs.")] = False,
) -> None:
    """MagiAttention's context-parallel benchmark: 192 rows on 8 to 64 H100."""
    from studies.magi.report import reproduction_record, reproduction_view
    from studies.magi.reproduce import CLUSTER, reproduce
    from studies.magi.reproduce import fit as fitted

    if fit:
        given = {"--out": out, "--json": as_json, "--jobs": jobs, "--worst": worst != WORST}
        refuse("studies: --fit only prints the bandwidth of a NIC", given)
        print(f"NIC of {CLUSTER}: {fitted(print) / 1e9:.1f} GB/s")
        return
    check_writable(out)
    with progress_bar("Predicting") as progress:
        rows = reproduce(jobs=jobs, progress=progress)
    record = json.dumps(reproduction_record(rows), indent=1) + "\n"
    _hand_out(record, lambda: reproduction_view(rows, worst), out, as_json)


@app.command()
def magi_b200(out: Out = None, as_json: Json = False, jobs: Jobs = None, worst: Worst = WORST) -> None:
    """The same benchmark on 8 to 64 B200, where its baselines run cuDNN."""
    from studies.magi.report import reproduction_record, reproduction_view
    from studies.magi.reproduce import published, reproduce

    check_writable(out)
    with progress_bar("Predicting") as progress:
        rows = reproduce(published("b200"), jobs=jobs, progress=progress)
    record = json.dumps(reproduction_record(rows), indent=1) + "\n"
    _hand_out(record, lambda: reproduction_view(rows, worst), out, as_json)


@app.command()
def longca_96(
    out: Annotated[Path | None, typer.Option(help="Write JSON Lines to this file.")] = None,
    html: Html = None,
    as_json: Json = False,
    jobs: Jobs = None,
) -> None:
    """LongCA-bench's study on 8 to 96 H100, and which of its findings come out."""
    from studies.longca.report import study_html, study_lines, study_view
    from studies.longca.reproduce import run

    check_writable(out, html)
    with progress_bar("Predicting batches") as progress:
        study = run(jobs=jobs, progress=progress)
    _write_page(html, lambda: study_html(study))
    _hand_out(study_lines(study), lambda: study_view(study), out, as_json)


@app.command()
def dcp(
    lengths: Annotated[str | None, typer.Option(help="Distribution of document lengths.")] = None,
    variant: Annotated[str | None, typer.Option(help="DCP's planner: released (measured) or paper.")] = None,
    solver: Annotated[str | None, typer.Option(help="mtkahypar, which comes with cpsim, or kahypar.")] = None,
    batches: Annotated[
        int | None, typer.Option(min=1, help="Of every bar: 5 where not given; the benchmark has 50.")
    ] = None,
    sensitivity: Annotated[
        bool,
        typer.Option("--sensitivity", help="Speed-ups under other lengths, solvers, seeds and tolerances, as ranges."),
    ] = False,
    out: Out = None,
    as_json: Json = False,
    jobs: Jobs = None,
    worst: Worst = WORST,
) -> None:
    """DCP's micro-benchmark on 32 A100."""
    from studies.dcp.report import dcp_record, dcp_view
    from studies.dcp.reproduce import BASE, BATCHES, reproduce

    check_writable(out)
    given = {name: value for name, value in (("lengths", lengths), ("variant", variant), ("solver", solver)) if value}
    if sensitivity:
        refuse(
            "studies: --sensitivity changes assumptions by itself",
            {f"--{name}": value for name, value in given.items()},
        )
        _dcp_ranges(batches, out, as_json, jobs)
        return
    assumed, count = replace(BASE, **given), batches or BATCHES
    with progress_bar("Predicting") as progress:
        rows = reproduce(assumed=assumed, count=count, jobs=jobs, progress=progress)
    record = json.dumps(dcp_record(rows, assumed, count), indent=1) + "\n"
    _hand_out(record, lambda: dcp_view(rows, assumed, worst), out, as_json)


def _dcp_ranges(batches: int | None, out: Path | None, as_json: bool, jobs: int | None) -> None:
    from studies.dcp.report import ranges_record, ranges_view, with_more
    from studies.dcp.reproduce import FEW_BATCHES
    from studies.dcp.reproduce import sensitivity as ranges

    count = batches or FEW_BATCHES
    with progress_bar("Predicting under other assumptions") as progress:
        found = ranges(count, jobs=jobs, progress=progress)
    record = json.dumps(ranges_record(found, count), indent=1) + "\n"
    _hand_out(record, lambda: ranges_view(with_more(found)), out, as_json)


@app.command()
def distca(
    lengths: Annotated[Path | None, typer.Option(help="File that lists DistCA's document lengths (JSON).")] = None,
    scale: Annotated[
        bool,
        typer.Option("--scale", help="Runs with pipelines, and what assumptions are worth."),
    ] = False,
    speed_ups: Annotated[
        bool, typer.Option("--speed-ups", help="Speed-ups of the paper's settings, on 64 to 512 GPUs.")
    ] = False,
    pretrain: Annotated[
        Path | None, typer.Option(help="With --scale or --speed-ups, the same of Pretrain; --lengths is ProLong's.")
    ] = None,
    out: Out = None,
    html: Html = None,
    as_json: Json = False,
    jobs: Jobs = None,
) -> None:
    """DistCA's 34B runs on 256 H200 beside WLB and per-sequence context parallelism, with ablations."""
    check_writable(out, html)
    if scale:
        refuse("studies: --scale has no speed-ups", {"--speed-ups": speed_ups})
        _distca_scale({"prolong": lengths, "pretrain": pretrain}, out, html, as_json, jobs)
    elif speed_ups:
        _distca_speed_ups({"prolong": lengths, "pretrain": pretrain}, out, html, as_json, jobs)
    else:
        refuse("studies: only --scale and --speed-ups have runs of Pretrain", {"--pretrain": pretrain})
        _distca_runs(lengths, out, html, as_json, jobs)


def _distca_scale(
    files: dict[str, Path | None], out: Path | None, html: Path | None, as_json: bool, jobs: int | None
) -> None:
    from studies.distca.reproduce import read_lengths
    from studies.distca.scale import reproduce, reproduce_fits, reproduce_known, reproduce_walls
    from studies.distca.scale_report import scale_html, scale_record, scale_view

    lists = {name: read_lengths(path) for name, path in files.items() if path}
    listed = len(lists) == len(files)
    with progress_bar("Predicting interim runs") as progress:
        runs = reproduce(lists=lists, jobs=jobs, progress=progress)
    with progress_bar("Predicting runs on 512 GPUs") as progress:
        known = reproduce_known(lists=lists, jobs=jobs, progress=progress)
    with progress_bar("Predicting memory") as progress:
        fits = reproduce_fits(lists=lists, jobs=jobs, progress=progress)
    with progress_bar("Predicting how long runs took") as progress:
        walls = reproduce_walls(lists=lists, jobs=jobs, progress=progress)
    _write_page(html, lambda: scale_html(runs, listed))
    record = json.dumps(scale_record(runs, known, fits, walls, listed), indent=1) + "\n"
    _hand_out(record, lambda: scale_view(runs, known, fits, walls, listed), out, as_json)


def _distca_speed_ups(
    files: dict[str, Path | None], out: Path | None, html: Path | None, as_json: bool, jobs: int | None
) -> None:
    from studies.distca.reproduce import read_lengths
    from studies.distca.scale import speed_ups
    from studies.distca.scale_report import speed_ups_html, speed_ups_record, speed_ups_view

    lists = {name: read_lengths(path) for name, path in files.items() if path}
    listed = len(lists) == len(files)
    with progress_bar("Predicting speed-ups") as progress:
        ratios = speed_ups(lists=lists, jobs=jobs, progress=progress)
    _write_page(html, lambda: speed_ups_html(ratios, listed))
    record = json.dumps(speed_ups_record(ratios, listed), indent=1) + "\n"
    _hand_out(record, lambda: speed_ups_view(ratios, listed), out, as_json)


def _distca_runs(lengths: Path | None, out: Path | None, html: Path | None, as_json: bool, jobs: int | None) -> None:
    from studies.distca.report import distca_html, distca_record, distca_view
    from studies.distca.reproduce import ablations, read_lengths, reproduce

    listed, source = (read_lengths(lengths), str(lengths)) if lengths else (None, None)
    with progress_bar("Predicting") as progress:
        rows = reproduce(lengths=listed, jobs=jobs, progress=progress)
    with progress_bar("Predicting ablations") as progress:
        others = ablations(rows, listed, jobs=jobs, progress=progress)
    _write_page(html, lambda: distca_html(rows, others, source))
    record = json.dumps(distca_record(rows, others, source), indent=1) + "\n"
    _hand_out(record, lambda: distca_view(rows, others, source), out, as_json)


@app.command()
def public(
    kind: Annotated[list[str] | None, typer.Option(help="Kind of rows, e.g. mlperf; may be repeated.")] = None,
    rows: Annotated[
        list[Path] | None, typer.Option(help="Further table with the columns of one of ours (CSV); may be repeated.")
    ] = None,
    out: Out = None,
    html: Html = None,
    as_json: Json = False,
    jobs: Jobs = None,
    worst: Worst = WORST,
    update: Annotated[bool, typer.Option("--update", help="Write errors of all rows to ledger.csv.")] = False,
) -> None:
    """The ledger: published steps and calls of MLPerf, torchtitan, NeMo, Megatron, SimuMax and rings."""
    from studies.public.command import run

    given = {"--kind": kind, "--rows": rows}
    if update:
        refuse("studies: --update is about all rows of ours", given)
    check_writable(out, html)
    with progress_bar("Predicting") as progress:
        answer = run(kind or [], rows or [], jobs, progress, update=update)
    _write_page(html, answer.html)
    _hand_out(answer.record(), lambda: answer.view(worst), out, as_json)


def _write_page(html: Path | None, made: Callable[[], str]) -> None:
    """Writes a page, if a file is given."""
    if html:
        html.write_text(made(), encoding="utf-8")
        print(f"Page written to {html}", file=sys.stderr)


def _hand_out(record: str, view: Callable[[], RenderableType], out: Path | None, as_json: bool) -> None:
    """Writes a record to a file, if one is given, and prints it, or what people read instead."""
    if out:
        out.write_text(record, encoding="utf-8")
    if as_json:
        sys.stdout.write(record)
    else:
        console().print(view())


if __name__ == "__main__":
    end_at_once()
    run_app(app, "python -m studies")
