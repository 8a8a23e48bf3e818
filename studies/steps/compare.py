"""Whole steps that ran, beside what was predicted of them before and what today's models say.

    python -m studies.steps.compare [-v]

An error is predicted over measured, less one. *Before*: files ``predicted-*.jsonl`` here, committed before the cases
ran. Memory is what PyTorch's allocator held at most on the fullest GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Final

from cpsim.calibrate.recipes import DATA, manifest
from cpsim.case.load import scenario_from
from cpsim.case.scenario import Scenario
from cpsim.prediction.compare import grouped
from cpsim.prediction.predict import predict
from cpsim.prediction.results import MEMORY_SPREAD
from cpsim.prediction.runs import Run, case_key, load_runs

HERE: Final = Path(__file__).parent
PREDICTED: Final = {
    "h100x2-1127h": ("predicted-1-h100", "predicted-2-h100"),
    "h100x2-1127i": ("predicted-rest-2-h100",),
    "h100x2-1128k": ("predicted-rest-2-h100", "predicted-3-h100"),
    "h100x4-1128m": ("predicted-4-h100",),
    "h200x2-1129i": ("predicted-5-h200",),
    "h200x4-1128n": ("predicted-1-h200", "predicted-2-h200", "predicted-4-h200"),
    "h200x1-1128p": ("predicted-1-h200",),
    "h200x2-1128q": ("predicted-megatron-h200",),
    "h200x2-1128r": ("predicted-megatron-h200",),
    "h200x2-1128t": ("predicted-megatron-h200",),
    "h200x1-1129c": ("predicted-gpt-oss-h200",),
}
"""By machine, predictions that were committed before its cases ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step: errors of time and of memory, of what was predicted before and of today's models."""

    machine: str
    scenario: Scenario
    before: tuple[float, float]
    today: tuple[float, float]
    inside: bool
    """Whether today's interval holds the time."""
    memory_inside: bool | None
    """The same of memory; None where a run's peak held models of earlier cases, too."""

    @property
    def kind(self) -> str:
        """Framework, how layers run, and how the step is cut."""
        s, p = self.scenario, self.scenario.parallel
        assert p is not None
        compiled = "compiled" if s.compile or (s.compile is None and s.framework == "torch") else "eager"
        cuts = [f"{name} {getattr(p, name)}" for name in ("tp", "cp") if (getattr(p, name) or 1) > 1]
        if s.gpus > 1 and p.tp is None:
            cuts.append("fsdp" if p.sharding == "fsdp" else "ddp")
        return ", ".join([f"{s.framework} {compiled}", *([s.kernel] if s.kernel != "sdpa_flash" else []), *cuts])


def steps() -> list[Step]:
    """All steps that ran."""
    found = []
    for name, about in manifest()["runs"].items():
        machine = str(about["machine"])
        if machine in PREDICTED and name.endswith(".jsonl") and "left_out" not in about:
            runs = [run for run in load_runs(DATA / name) if run.scenario.parallel and not run.error]
            before = {key: record for file in PREDICTED[machine] for key, record in committed(HERE / f"{file}.jsonl")}
            for number, run in enumerate(runs):
                fresh = number == 0 or "leaked" not in about
                now, then = predict(run.scenario), before[case_key(run.scenario)]
                found.append(
                    Step(
                        machine=machine,
                        scenario=run.scenario,
                        before=errors(then["time_s"], then["peak_memory_bytes"], run),
                        today=errors(now.time_s, now.peak_memory_bytes, run),
                        inside=now.time_s_low <= run.time_s <= now.time_s_high,
                        memory_inside=holds(now.peak_memory_bytes, run) if fresh else None,
                    )
                )
    return found


def committed(path: Path) -> Iterable[tuple[str, dict[str, float]]]:
    """Keys of cases and their predictions."""
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        yield case_key(scenario_from(record["scenario"])), record


def holds(memory_bytes: float, run: Run) -> bool:
    """Whether the interval of predicted memory holds what a run had."""
    (window,) = run.passes.values()
    low, high = (factor * memory_bytes for factor in MEMORY_SPREAD)
    return low <= max(window.memory_bytes["allocated"]) <= high


def errors(time_s: float, memory_bytes: float, run: Run) -> tuple[float, float]:
    """Of time and of memory."""
    (window,) = run.passes.values()
    return time_s / run.time_s - 1, memory_bytes / max(window.memory_bytes["allocated"]) - 1


def row(name: str, some: Sequence[Step]) -> str:
    """One line of the table."""
    cells = [f"{name:32}", f"{len(some):3}"]
    for which in ("before", "today"):
        for i in range(2):
            one = [getattr(step, which)[i] for step in some if i == 0 or step.memory_inside is not None]
            cells.append(f"{mean(map(abs, one)):5.1%} {mean(one):+6.1%} {max(map(abs, one)):5.1%}" if one else " " * 19)
    inside = [mean(known) if (known := _known(some, which)) else None for which in ("inside", "memory_inside")]
    return " | ".join([*cells, " ".join("    " if share is None else f"{share:4.0%}" for share in inside)])


def _known(some: Sequence[Step], which: str) -> list[bool]:
    return [found for step in some if (found := getattr(step, which)) is not None]


def main() -> None:
    """Prints the table, and with ``-v`` every step, worst first."""
    found = steps()
    if "-v" in sys.argv:
        for step in sorted(found, key=lambda step: -abs(step.today[0])):
            s, p = step.scenario, step.scenario.parallel
            assert p is not None
            width = s.model if isinstance(s.model, str) or s.model is None else s.model.hidden
            print(
                f"{step.today[0]:+6.1%} time {'' if step.memory_inside is None else f'{step.today[1]:+6.1%}':6} memory "
                f"{step.machine} {step.kind}: {width} wide, "
                f"{s.num_tokens // s.gpus} tokens a GPU, recompute {p.recompute}, {s.protocol}"
            )
    print(f"{'':32} |   n | time before: mean sign worst | memory before | time today | memory today | inside")
    for machine, mine in sorted(grouped(found, lambda step: step.machine).items()):
        for kind, some in sorted(grouped(mine, lambda step: step.kind).items()):
            print(row(kind, some))
        print(row(machine, mine))
    print(row("all", found))


if __name__ == "__main__":
    main()
