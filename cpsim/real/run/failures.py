"""Cases that fail or hang: reasons in one line, the watch that ends this process, and the marker that it leaves."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, Final

import torch

from cpsim.case.load import scenario_from
from cpsim.case.scenario import Scenario
from cpsim.errors import CpsimError
from cpsim.prediction.runs import Run

GRACE_S: Final = 10.0
"""How long a rank that failed waits for the others to notice."""
FRESH: Final = 75
"""Exit code that asks for fresh processes (EX_TEMPFAIL)."""


class CaseFailed(Exception):
    """All ranks failed alike; the message is the reason."""


class Broken(Exception):
    """Ranks that cannot go on together; the message is the reason."""


class Watch:
    """Ends this process where a case hangs, and leaves word in a marker file."""

    def __init__(self, marker: Path, limit_s: float) -> None:
        self.marker, self._limit_s = marker, limit_s
        self._timer: threading.Timer | None = None
        self._scenario: dict[str, Any] = {}

    def start(self, scenario: Scenario, rank: int) -> None:
        """Watches a case."""
        self._scenario = scenario.to_dict()
        if rank == 0:
            self._mark("a process died")
        self._arm(self._limit_s, f"took more than {self._limit_s:g} s, or hung")

    def hurry(self, reason: str) -> None:
        """This rank failed: the others have to notice soon, or they hang."""
        self._arm(GRACE_S, reason)

    def stop(self) -> None:
        """The case is over."""
        if self._timer:
            self._timer.cancel()
        self._timer = None

    def _arm(self, seconds: float, reason: str) -> None:
        self.stop()
        self._timer = threading.Timer(seconds, self._give_up, [reason])
        self._timer.daemon = True
        self._timer.start()

    def _give_up(self, reason: str) -> None:
        self._mark(reason)
        print(f"cpsim.real.run: {reason}; fresh processes are needed", file=sys.stderr, flush=True)
        os._exit(FRESH)

    def _mark(self, reason: str) -> None:
        whole = self.marker.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps({"scenario": self._scenario, "error": reason}), encoding="utf-8")
        whole.replace(self.marker)


def marker_of(out: Path) -> Path:
    """The marker beside a file of runs."""
    return out.with_suffix(".running")


def explain(error: Exception) -> str:
    """An exception in one line of at most 300 characters."""
    text = " ".join(str(error).split())
    if isinstance(error, CpsimError):
        return text[:300]
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return f"out of memory: {text}"[:300]
    return f"{type(error).__name__}: {text}"[:300]


def take_marker(path: Path) -> Run | None:
    """The case at which earlier processes ended, if any, with what is known of its end; removes the marker."""
    try:
        left = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        return Run(scenario=scenario_from(left["scenario"]), error=left["error"])
    except (OSError, ValueError, KeyError):  # none, or cut off
        return None
