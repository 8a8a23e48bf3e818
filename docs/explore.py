"""Times the explorer in Chromium, and writes the tables of docs/explore.md.

    python docs/explore.py 3
    python docs/explore.py

With a number it measures so many rounds into docs/explore.json, some minutes each; without, it only writes the tables.
Of every median the least of all rounds is kept, since others may use the machine, too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

DOCS: Final = Path(__file__).parent
FILE, PAGE = DOCS / "explore.json", DOCS / "explore.md"
Times = dict[str, float]
MARKS: Final = "<!-- times -->\n", "<!-- end of times -->"
sys.path.insert(0, str(DOCS.parent / "tests"))


def table() -> str:
    """The tables, from docs/explore.json."""
    told = json.loads(FILE.read_text(encoding="utf-8"))
    lines = ["| | first answer drawn | whole answer drawn |", "| --- | --- | --- |"]
    lines += [
        f"| {name} | {row['first_ms']:.0f} ms | {row['whole_ms']:.0f} ms |" for name, row in told["changes"].items()
    ]
    lines += ["", "| a map of 20 cells | until all are drawn | work of all processes |", "| --- | --- | --- |"]
    lines += [
        f"| {name} | {row['drawn_s']:.1f} s | {row['work_s']:.1f} s of a core |" for name, row in told["maps"].items()
    ]
    return "\n".join(lines)


def measured(rounds: int) -> dict[str, Any]:
    """Changes of controls and maps; every round begins with a page that knows no answer yet."""
    loads, changes, maps = [], [], []
    for _ in range(rounds):
        loads.append(os.getloadavg()[0])
        of_changes, of_maps = _round()
        changes.append(of_changes)
        maps.append(of_maps)
    return {
        "schema": 1,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": f"python docs/explore.py {rounds}",
        "cores": os.cpu_count(),
        "load_before_rounds": loads,
        "changes": {name: _least([one[name] for one in changes]) for name in changes[0]},
        "maps": {name: _least([one[name] for one in maps]) for name in maps[0]},
    }


def _round() -> tuple[dict[str, Times], dict[str, Times]]:
    import subprocess

    from test_explore import Page, chromium

    command = [sys.executable, "-m", "cpsim", "explore", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as served, TemporaryDirectory() as folder:
        assert served.stderr
        address, driver = served.stderr.readline().split("http://")[1].split("/")[0], chromium(folder)
        try:
            page = Page(driver, address, Path(folder))
            driver.get(f"http://{address}/")
            page.settle(600)
            return _changes(page), _maps(page)
        finally:
            driver.quit()
            served.terminate()


def _least(rows: Sequence[Times]) -> Times:
    return {name: min(row[name] for row in rows) for name in rows[0]}


def _changes(page: Any) -> dict[str, Times]:
    from test_explore import BEGIN, CHOSEN, DRAWN, OF_64_GPUS, SEEDS, STEP_CHANGES, TYPED, timed

    typed, chosen = ([(how, *one) for one in some] for how, some in (("type", TYPED), ("choose", CHOSEN)))
    seeds = [("type", *one) for one in SEEDS]
    step = OF_64_GPUS | {"documents": "one document", "sequences": 128}
    cases = {
        "attention on 96 GPUs, one document": [(BEGIN, typed), (BEGIN, chosen)],
        "attention on 96 GPUs, hundreds of documents": [(DRAWN, typed + seeds)],
        "a step on 64 GPUs": [(step, STEP_CHANGES)],
    }
    found = {}
    for name, parts in cases.items():
        times = []
        for begin, changes in parts:
            page.open(**begin)
            times += [timed(page, lambda how=how, one=one: getattr(page, how)(*one)) for how, *one in changes]
        first, whole = (median(column) * 1e3 for column in zip(*times, strict=True))
        found[name] = {"first_ms": first, "whole_ms": whole}
    return found


def _maps(page: Any) -> dict[str, Times]:
    from test_explore import BEGIN, DRAWN

    cases = {"one document": BEGIN | {"tokens_per_gpu": 4096}, "hundreds of documents": DRAWN}
    return {name: _map(page, case) for name, case in cases.items()}


def _map(page: Any, case: dict[str, Any]) -> Times:
    page.open(**case, view="ranking")
    asked = page.driver.execute_script("return Number(document.documentElement.dataset.asked)")
    begun, before = time.monotonic(), _work_s()
    page.pick("Where it changes")
    whole = (
        "const p = document.querySelector('#progress'), page = document.querySelector('#page');"
        f"return Number(page.dataset.answered) > {asked} && p.value >= p.max"
    )
    while not page.driver.execute_script(whole):
        time.sleep(0.1)
    return {"drawn_s": time.monotonic() - begun, "work_s": _work_s() - before}


def _work_s() -> float:
    """CPU time of this process and of all that it began [s]."""
    import psutil

    def spent(one: Callable[[], Any]) -> float:
        try:
            times = one()
        except psutil.Error:  # it has just ended
            return 0.0
        return float(times.user + times.system)

    me = psutil.Process()
    return sum(spent(one.cpu_times) for one in (me, *me.children(recursive=True)))


def main() -> None:
    for rounds in sys.argv[1:2]:
        FILE.write_text(json.dumps(measured(int(rounds)), indent=1) + "\n", encoding="utf-8")
    before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0], 1)
    PAGE.write_text(f"{before}{MARKS[0]}{table()}\n{MARKS[1]}{rest.split(MARKS[1], 1)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
