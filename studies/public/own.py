"""Reserved memory of our own steps of FSDP2, whose allocator has segments that do not grow, beside what is simulated.

python -m studies.public.own
"""

from __future__ import annotations

from collections.abc import Iterator

from cpsim.calibrate.recipes import DATA, manifest
from cpsim.case.scenario import Scenario
from cpsim.prediction.runs import load_runs
from studies.public.ledger import summary
from studies.public.predict import reserved
from studies.steps.compare import PREDICTED


def steps() -> Iterator[tuple[Scenario, int, int, int]]:
    """Steps without context parallelism: bytes that were allocated and reserved at most, and that are predicted."""
    for name, about in manifest()["runs"].items():
        if about["machine"] not in PREDICTED or not name.endswith(".jsonl"):
            continue
        for run in load_runs(DATA / name):
            cut = run.scenario.parallel
            if run.error or cut is None or cut.sharding != "fsdp" or (cut.cp or 1) > 1:
                continue
            (window,) = run.passes.values()
            allocated, most = (max(window.memory_bytes[kind]) for kind in ("allocated", "reserved"))
            yield run.scenario, allocated, most, reserved(run.scenario, expandable=False)


def main() -> None:
    """Prints every step, and how far off predictions are."""
    found = list(steps())
    for scenario, allocated, most, predicted in found:
        cut = scenario.parallel
        assert cut is not None
        words = f"{scenario.framework}{', compiled' if scenario.compile else ''}, recompute {cut.recompute}"
        print(
            f"{predicted / most - 1:+6.1%} {predicted / 1e9:5.1f} of {most / 1e9:5.1f} GB reserved for "
            f"{allocated / 1e9:5.1f}: {words}"
        )
    print(f"{len(found)} steps: mean, sign, worst {summary([one / most - 1 for _, _, most, one in found])}")


if __name__ == "__main__":
    main()
