"""The command line: every command is a function of ``ask``, ``measure``, ``network`` or ``look``."""

from __future__ import annotations

import typer

from cpsim.cli import ask, look, measure, network
from cpsim.cli.entry import run_app

app = typer.Typer(
    help="Predicts which context-parallel attention strategy to run, how long it takes and how sure that is.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    ask.predict,
    ask.trace,
    ask.sweep,
    ask.advise,
    ask.explore,
    measure.run,
    measure.validate,
    measure.calibrate,
    measure.fit,
    measure.import_,
    measure.fit_fabric,
    network.collectives,
    look.profiles,
    look.clusters,
    look.kernels,
    look.strategies,
    look.mask,
):
    app.command(command.__name__.rstrip("_").replace("_", "-"))(command)
app.add_typer(network.init, name="init")


def main() -> None:
    """Entry point of ``cpsim``."""
    run_app(app, "cpsim")
