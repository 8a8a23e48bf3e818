"""What is predicted of cases, one line each, to be committed before they run.

python -m studies.newer.say data/cases/newer-1-h200-2.jsonl > studies/newer/predicted-1-h200-2.jsonl
python -m studies.newer.say --ranks data/cases/newer-ranks-2.jsonl > studies/newer/predicted-ranks-2.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cpsim.case.load import load_scenarios
from cpsim.case.scenario import Scenario
from cpsim.errors import CpsimError
from cpsim.models.host import HELD_S
from cpsim.prediction.case import resolve
from cpsim.prediction.passes import ranks_of, run_ranks
from cpsim.prediction.predict import predict


def of_case(scenario: Scenario) -> Iterator[dict[str, Any]]:
    """A whole case, with its 90 % interval."""
    found = predict(scenario)
    times = {name: getattr(found, name) for name in ("time_s", "time_s_low", "time_s_high")}
    yield {"scenario": scenario.to_dict(), **{name: float(f"{seconds:.4g}") for name, seconds in times.items()}}


def of_ranks(scenario: Scenario) -> Iterator[dict[str, Any]]:
    """Every pass of the ranks that are measured."""
    case, ranks = resolve(scenario), ranks_of(scenario.gpus)
    for pass_ in scenario.passes:
        for rank, timeline in zip(ranks, run_ranks(case, pass_, ranks, HELD_S), strict=True):
            said = {"pass": pass_, "rank": rank, "time_s": float(f"{timeline.makespan_s:.4g}")}
            yield {"scenario": scenario.to_dict(), **said}


def main() -> None:
    """Prints predictions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", type=Path)
    parser.add_argument("--ranks", action="store_true", help="of single ranks")
    args = parser.parse_args()
    for scenario in load_scenarios(args.cases):
        if isinstance(scenario, CpsimError):
            raise scenario
        for said in (of_ranks if args.ranks else of_case)(scenario):
            print(json.dumps(said))


if __name__ == "__main__":
    main()
