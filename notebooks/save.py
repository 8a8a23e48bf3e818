"""Runs notebooks and saves them with what they print and draw; figures as pictures, which any viewer shows.

    python notebooks/save.py [NUMBER ...]

Without numbers all are run, which takes some minutes. Needs Chromium.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import nbformat
from nbclient import NotebookClient

from cpsim.report.page import figure, page

FOLDER: Final = Path(__file__).parent
PLOTLY: Final = "application/vnd.plotly.v1+json"
WIDTH, HEIGHT = 900, 450
BARE: Final = "<style>main { padding: 0 } figure { margin: 0 } .card { border: 0; padding: 0 }</style>"


def saved(path: Path, browser: str) -> Any:
    """A notebook with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(FOLDER.parent)}}).execute()
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if PLOTLY in data:
                made = data.pop(PLOTLY)
                data["image/png"] = base64.b64encode(picture(made, browser)).decode()
    notebook.metadata = nbformat.from_dict(metadata)  # not of the Python that ran it
    return notebook


def picture(made: dict[str, Any], browser: str) -> bytes:
    """A plotly figure as PNG."""
    height = int(made["layout"].get("height") or HEIGHT)
    made["layout"]["height"] = height
    with TemporaryDirectory() as folder:
        source, target = Path(folder) / "figure.html", Path(folder) / "figure.png"
        source.write_text(page("figure", [figure(made, "figure", ""), BARE], with_plots=True), encoding="utf-8")
        size = [f"--window-size={WIDTH},{height}", f"--screenshot={target}"]
        command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=10000", *size]
        subprocess.run([*command, source.as_uri()], check=True, stderr=subprocess.DEVNULL)
        return target.read_bytes()


def main() -> None:
    """Run and save."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("notebooks/save.py: expected chromium or google-chrome on PATH, found neither; install one")
    os.environ["PLOTLY_RENDERER"] = "plotly_mimetype"
    for path in sorted(FOLDER.glob("*.ipynb")):
        if sys.argv[1:] and path.name[:2] not in sys.argv[1:]:
            continue
        nbformat.write(saved(path, browser), path)
        print(f"notebooks/{path.name} written, {path.stat().st_size // 1000} kB", flush=True)


if __name__ == "__main__":
    main()
