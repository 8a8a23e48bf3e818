"""Makes the pictures of docs/gallery.md with Chromium: sections of reports, photographed one by one.

    python docs/gallery.py [NAME ...]

Without names all are made, which takes some minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

DOCS: Final = Path(__file__).parent
FOLDER: Final = DOCS / "gallery"
EXAMPLE: Final = str(DOCS.parent / "examples" / "llama3-8b-96gpu.yaml")
STEP: Final = (
    *("--model", "llama3-70b", "--framework", "megatron", "--gpus", "128"),
    *("--cluster", "dgx-h100", "--context", "32k", "--batch", "128"),
)
WIDTH: Final = 1280
SAMPLES: Final = 3


@dataclass(frozen=True)
class Picture:
    """A part of a page."""

    page: Callable[[], str]
    shown: str
    """CSS selector of the children of ``main`` that are photographed."""
    height: int
    """Of the picture [px]."""


@cache
def report(*arguments: str) -> str:
    """The page that ``cpsim advise`` writes."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        command = [sys.executable, "-m", "cpsim", "advise", *arguments, "--html", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return path.read_text(encoding="utf-8")


@cache
def longca() -> str:
    """The page of LongCA-bench's study, of a few of its samples."""
    from studies.longca.report import study_html
    from studies.longca.reproduce import run

    return study_html(run(samples=SAMPLES))


@cache
def checked() -> str:
    """Errors of all runs that were compared."""
    from cpsim.report.page import figure, page
    from cpsim.report.validation import CAPTION, scatter

    return page("checked", [figure(scatter(), "checked", CAPTION)], with_plots=True)


def attention() -> str:
    return report(EXAMPLE)


def step() -> str:
    return report(*STEP)


PICTURES: Final = {
    "answer": Picture(attention, "#answer", 380),
    "map": Picture(attention, "#map", 620),
    "timeline": Picture(attention, "#timeline", 1110),
    "mask": Picture(attention, "#mask", 850),
    "step-timeline": Picture(step, "#timeline", 760),
    "step-memory": Picture(step, "#memory", 1290),
    "longca": Picture(longca, ":has(#plot-mask-causal_document)", 530),
    "checked": Picture(checked, ":has(#plot-checked)", 700),
}


def photograph(browser: str, picture: Picture, path: Path) -> None:
    """Writes a picture."""
    hidden = f"main > :not({picture.shown}), nav, .skip, ::-webkit-scrollbar {{ display: none !important }}"
    with TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(f"{picture.page()}<style>{hidden} h2, figure {{ margin-top: 0 }}</style>", encoding="utf-8")
        size = f"--window-size={WIDTH},{picture.height}"
        command = [browser, "--headless", "--no-sandbox", "--virtual-time-budget=15000", size]
        subprocess.run([*command, f"--screenshot={path}", page.as_uri()], check=True, stderr=subprocess.DEVNULL)


def main() -> None:
    """Predict, draw, photograph."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("docs/gallery.py: expected chromium or google-chrome on PATH, found neither; install one")
    if unknown := set(sys.argv[1:]) - PICTURES.keys():
        sys.exit(f"docs/gallery.py: no picture {', '.join(sorted(unknown))}; expected some of {', '.join(PICTURES)}")
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        photograph(browser, PICTURES[name], FOLDER / f"{name}.png")
        print(f"docs/gallery/{name}.png written", flush=True)


if __name__ == "__main__":
    main()
