"""Makes docs/report.png with Chromium: the report of the README's example, without its tables.

python docs/report.py
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

DOCS = Path(__file__).parent
EXAMPLE, PICTURE = DOCS.parent / "examples" / "llama3-8b-96gpu.yaml", DOCS / "report.png"
SIZE = 1280, 1950
WITHOUT_TABLES = "<style>div.card, h3, ::-webkit-scrollbar { display: none }</style>"


def main() -> None:
    """Predict, draw, photograph."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("docs/report.py: expected chromium or google-chrome on PATH, found neither; install one")
    with TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        subprocess.run(
            [sys.executable, "-m", "cpsim", "advise", str(EXAMPLE), "--html", str(page)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        with page.open("a", encoding="utf-8") as file:
            file.write(WITHOUT_TABLES)
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--virtual-time-budget=15000",
                f"--window-size={SIZE[0]},{SIZE[1]}",
                f"--screenshot={PICTURE}",
                page.as_uri(),
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )
    print(f"{PICTURE} written")


if __name__ == "__main__":
    main()
