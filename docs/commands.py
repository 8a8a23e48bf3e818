"""A hook of mkdocs: the page of all commands, made from the command line's own code whenever the site is built."""

from __future__ import annotations

import os
import subprocess
import sys
from html import unescape
from typing import Any

from mkdocs.structure.files import File, Files

NAME = "commands.md"


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the page to those of the site."""
    files.append(File.generated(config, NAME, content=reference()))
    return files


def reference() -> str:
    """The reference, as typer writes it."""
    command = [
        sys.executable,
        "-m",
        "typer",
        "cpsim.cli.app",
        "utils",
        "docs",
        "--name",
        "cpsim",
        "--title",
        "Commands",
    ]
    wide = os.environ | {"COLUMNS": "200"}
    return unescape(subprocess.run(command, capture_output=True, text=True, check=True, env=wide).stdout)
