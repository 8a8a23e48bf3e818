"""The command line: every command is a function of ``ask``, ``measure``, ``network`` or ``look``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import typer

from cpsim.cli import ask, look, measure, network, whatif
from cpsim.cli.entry import run_app

app = typer.Typer(
    help="Predicts which context-parallel attention strategy to run, how long it takes and how sure that is.",
    pretty_exceptions_enable=False,
)


def _show_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        print(f"cpsim {version('context-parallel-simulator')}")
        raise typer.Exit


@app.callback()
def cpsim(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say the version and end.")
    ] = False,
) -> None:
    """Options of the command itself."""
    del version  # its callback has done it


COMMANDS: Final[dict[str, tuple[Callable[..., None], ...]]] = {
    "Ask": (ask.advise, ask.explore, whatif.compare),
    "Ask more": (ask.predict, ask.sweep, ask.trace),
    "Look up": (whatif.explain, look.strategies, look.mask, look.kernels, look.profiles, look.clusters),
    "Measure and run": (
        measure.run,
        measure.validate,
        measure.calibrate,
        measure.fit,
        measure.import_,
        measure.fit_fabric,
        network.collectives,
    ),
}
"""Commands in the order of the help, by its panels."""
for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(command.__name__.rstrip("_").replace("_", "-"), rich_help_panel=panel)(command)
    if panel == "Ask":
        app.add_typer(whatif.init, name="init", rich_help_panel=panel)


forwarding = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
app.command("reproduce", context_settings=forwarding)(look.reproduce)


def main() -> None:
    """Entry point of ``cpsim``."""
    run_app(app, "cpsim")
