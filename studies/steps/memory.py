"""Memory of whole steps that ran: what the allocator had, what it had reserved, and what the driver says was used.

    python -m studies.steps.memory

*Predicted* is ``peak_memory_bytes``, whose error is over what the allocator had. *Beside* is what the driver says less
what was reserved: the CUDA context and NCCL's communicators, which ``cpsim.prediction.step.memory`` has from here. A
process runs many steps and frees none of these, so that only the first one of a file has but its own.
"""

from __future__ import annotations

from typing import Final

from cpsim.calibrate.recipes import DATA, manifest
from cpsim.prediction.predict import predict
from cpsim.prediction.runs import Run, load_runs
from studies.steps.compare import PREDICTED, Step, errors

HEAD: Final = f"{'':46}{'predicted':>10}{'error':>7}{'allocated':>10}{'reserved':>10}{'driver':>8}{'beside':>8}"


def row(machine: str, run: Run) -> str:
    """One line of the table, in GB."""
    found = predict(run.scenario)
    (window,) = run.passes.values()
    allocated, reserved, used = (max(window.memory_bytes[name]) / 1e9 for name in ("allocated", "reserved", "used"))
    error = errors(found.time_s, found.peak_memory_bytes, run)
    step = Step(machine=machine, scenario=run.scenario, before=error, today=error, inside=True, memory_inside=True)
    kind = f"{run.scenario.gpus} GPU, {step.kind}"
    return (
        f"{kind:46}{found.peak_memory_bytes / 1e9:10.2f}{error[1]:+7.1%}{allocated:10.2f}{reserved:10.2f}{used:8.2f}"
        f"{used - reserved:8.2f}"
    )


def main() -> None:
    """Prints the table, file by file."""
    for name, about in manifest()["runs"].items():
        machine = str(about["machine"])
        if machine in PREDICTED and name.endswith(".jsonl"):
            print(f"{name}\n{HEAD}")
            for run in load_runs(DATA / name):
                if not run.error:
                    print(row(machine, run))


if __name__ == "__main__":
    main()
