"""Writes docs/scale.md, cpsim's own speed, from the measurement in docs/scale.json.

    python docs/scale.py              # the page only
    python docs/scale.py --measure    # measure everything first; some minutes
    python docs/scale.py --sweep      # measure only the sweep first

Times are the least processor time of several calls, in one process on one core, after warm-up, so that neither
compilation nor other programs count. Memory is the peak of a separate process, start-up included. The sweep is
`cpsim sweep` on all cores, start-up included.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from cpsim.case.load import scenario_from
from cpsim.case.scenario import Scenario
from cpsim.models.conditions import Conditions
from cpsim.models.cost_models import GROUPS
from cpsim.models.price import price
from cpsim.prediction.case import Case, resolve
from cpsim.prediction.predict import predict
from cpsim.prediction.size import DRAWN_GPUS, KNOWN_PLACES, MOST_PLACES
from cpsim.runtime.allocator import keep_freed_memory
from cpsim.schedule.schedule import Schedule
from cpsim.schedule.work import free_work, waits
from cpsim.sim.draws import Followed
from cpsim.sim.fast import simulate
from cpsim.strategies import STRATEGIES, plan

DOCS = Path(__file__).parent
PAGE, DATA = DOCS / "scale.md", DOCS / "scale.json"
RANKS = (8, 16, 32, 64, 96, 128, 192, 256, 384)
CALLS = 20
STAGES = ("plan", "price", "simulate", "constant", "draws")
NAMES = {
    "plan": "plan",
    "price": "price",
    "simulate": "simulate, shared links and interference",
    "constant": "simulate, constant rates",
    "draws": "200 draws",
}
LARGE = (
    ("zigzag_ring", 96),
    ("zigzag_ring", 1024),
    ("zigzag_ring", 4096),
    ("usp", 1024),
    ("usp", 4096),
    ("usp", 16384),
)
NUM_DRAWS = 200
SWEPT, WANTED = 5040, 100_000
"""Scenarios of the measured sweep, every combination of the mix three times, and of the one it is extrapolated to."""


def scenario(strategy: str, gpus: int, pass_: str) -> Scenario:
    """One document, causal, 8k tokens a GPU, heads of Llama-3-8B."""
    return scenario_from(
        {
            "strategy": strategy,
            "gpus": gpus,
            "cluster": "dgx-h200",
            "tokens_per_gpu": 8192,
            "heads": 32,
            "kv_heads": 8,
            "pass": pass_,
        }
    )


def seconds(work: Callable[[], object]) -> float:
    """Least processor time of ``CALLS`` calls after a first one [s]: as many of what is small as of what is large."""
    work()
    taken: list[float] = []
    for _ in range(CALLS):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return min(taken)


def zigzag(case: Case) -> Schedule:
    """The forward pass of a zigzag ring."""
    return plan("zigzag_ring", case.workload, case.cluster, "fwd", {})


def stages(gpus: int) -> dict[str, float]:
    """Seconds of every stage of a zigzag ring's forward pass, and its number of ops."""
    case = resolve(scenario("zigzag_ring", gpus, "fwd"))
    pricing = Conditions(cluster=case.cluster, profile=case.profile, kernel="fa4", head_dim=128, dtype="bf16")
    schedule = zigzag(case)
    priced = price(schedule, pricing)
    work, free = priced.work, free_work(priced.work.duration_s, priced.work.release_s)
    timeline = simulate(schedule, work)
    ones = np.ones(NUM_DRAWS)
    factors = np.ones((len(GROUPS), NUM_DRAWS))
    jobs: dict[str, Callable[[], object]] = {
        "plan": lambda: zigzag(case),
        "price": lambda: price(schedule, pricing),
        "simulate": lambda: simulate(schedule, work),
        "constant": lambda: simulate(schedule, free),
        "draws": lambda: Followed.of(timeline, work, priced.group).makespans(factors, ones, ones),
    }
    return {"ops": len(schedule)} | {name: seconds(job) for name, job in jobs.items()}


def touched_bytes() -> dict[str, float]:
    """Bytes that the engines read or write at least once for an op of a zigzag ring on 96 GPUs."""
    schedule = zigzag(resolve(scenario("zigzag_ring", 96, "fwd")))
    num, lanes = len(schedule), len(schedule.lane_rank)
    flows = 2 * int((np.diff(schedule.lane_start) == 2).sum())
    before = len(waits(schedule, np.zeros(num, np.bool_))[1])
    results, costs = 8 + 8 + 4, 8 + 8  # start, end and cause; duration and release
    graph = 4 + 4 * before / num
    # Records of running ops stay in caches. Offsets of lanes, flows and followers; what is waited for; a class.
    fluid = 3 * 4 + 4 + 1 + (4 * lanes + (4 + 8) * flows + 4 * before) / num + costs + results
    return {"simulate": fluid, "constant": graph + costs + results}


def mixed_scenarios(count: int) -> list[Scenario]:
    """Strategies x masks x passes x 2 to 96 GPUs x 1k to 16k tokens per GPU, documents included, in turn.

    ``dcp`` is left out, since planning one batch takes seconds.
    """
    names = [name for name in STRATEGIES if name not in ("none", "dcp")]
    gpus, tokens = (2, 4, 8, 16, 32, 64, 96), (1024, 2048, 4096, 8192, 16384)
    masks = ("causal", "causal_document", "full", "full_document")
    return [
        Scenario(
            strategy=names[i % len(names)],
            gpus=gpus[i // len(names) % 7],
            cluster="dgx-h200",
            tokens_per_gpu=tokens[i % 5],
            documents={"distribution": "prolong512k", "seed": i} if "document" in masks[i // 4 % 4] else None,
            mask=masks[i // 4 % 4],
            heads=32,
            kv_heads=8,
            **{"pass": ("fwd", "bwd", "fwd_bwd")[i // 16 % 3]},  # type: ignore[arg-type]
        )
        for i in range(count)
    ]


def swept(count: int) -> dict[str, float]:
    """`cpsim sweep` of mixed scenarios on all cores: seconds by the clock and of processors, errors, and the peak
    memory of its largest process."""
    with tempfile.TemporaryDirectory() as folder:
        cases = Path(folder) / "cases.jsonl"
        cases.write_text("".join(json.dumps(case.to_dict()) + "\n" for case in mixed_scenarios(count)))
        out, started = Path(folder) / "out", time.perf_counter()
        command = [sys.executable, "-m", "cpsim", "sweep", str(cases), "--out", str(out)]
        subprocess.run(command, check=True, capture_output=True)
        taken, used = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        rows = pq.read_table(out, columns=["error"])["error"]
    return {
        "scenarios": len(rows),
        "predicted": rows.null_count,
        "seconds": taken,
        "processor_seconds": used.ru_utime + used.ru_stime,
        "peak_bytes": 1024 * used.ru_maxrss,
        "load_average": round(os.getloadavg()[1], 1),
    }


def sweep() -> dict[str, float]:
    """What ``swept`` returns, measured in a fresh process, so that all its children belong to the sweep."""
    done = subprocess.run([sys.executable, __file__, "--swept"], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def memory_bandwidth() -> float:
    """Bytes read and written per second by a copy too large for any cache."""
    source = np.ones(1 << 25)
    target = np.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: np.copyto(target, source))


def large(strategy: str, gpus: int, pass_: str) -> dict[str, float]:
    """Seconds and peak memory of one prediction in this process, after a smaller one as warm-up."""
    predict(scenario(strategy, 512 if gpus > DRAWN_GPUS else 16, pass_))
    taken = seconds(lambda: predict(scenario(strategy, gpus, pass_)))
    return {"seconds": taken, "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def measure() -> dict[str, Any]:
    """Everything that the page shows."""
    found = []
    for strategy, gpus in LARGE:
        for pass_ in ("fwd", "fwd_bwd"):
            command = [sys.executable, __file__, "--large", strategy, str(gpus), pass_]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append({"strategy": strategy, "gpus": gpus, "pass": pass_} | json.loads(done.stdout))
    return {
        "schema": 1,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": _processor(),
        "python": platform.python_version(),
        "command": "python docs/scale.py --measure",
        "times": f"the least processor time of {CALLS} calls",
        "load_average": round(os.getloadavg()[1], 1),
        "cores": os.cpu_count(),
        "stages": {str(gpus): stages(gpus) for gpus in RANKS},
        "touched_bytes": touched_bytes(),
        "memory_bytes_per_s": memory_bandwidth(),
        "large": found,
        "sweep": sweep(),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if sys.platform == "linux" else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def exponent(data: dict[str, Any], *stages: str) -> float:
    """Exponent of the time of stages against ops, fitted from 32 ranks up, where start-up no longer shows."""
    rows = [row for gpus, row in data["stages"].items() if int(gpus) >= 32]
    taken = [sum(row[stage] for stage in stages) for row in rows]
    return float(np.polyfit(np.log([row["ops"] for row in rows]), np.log(taken), 1)[0])


def stage_row(data: dict[str, Any], stage: str) -> str:
    """One row of the table: a stage at 96 ranks."""
    at, touched = data["stages"]["96"], data["touched_bytes"].get(stage)
    cells = [NAMES[stage], f"{at[stage] * 1e3:.2f} ms", f"{at['ops'] / at[stage] / 1e6:.1f} M"]
    cells += [f"{exponent(data, stage):.2f}"]
    if touched is None:
        return f"| {' | '.join([*cells, '', '', ''])} |"
    floor = touched * at["ops"] / data["memory_bytes_per_s"]
    return f"| {' | '.join([*cells, f'{touched:.0f}', f'{floor * 1e3:.2f} ms', f'{at[stage] / floor:.0f}'])} |"


def page(data: dict[str, Any]) -> str:
    """The page of a measurement."""
    at, whole = data["stages"]["96"], ("plan", "price", "simulate")
    lines = [
        "# How fast cpsim is",
        "",
        f"Measured {data['date']} on one core ({data['machine']}, Python {data['python']}) by",
        f"`{data['command']}`. Times are {data['times']} after warm-up. The",
        f"load average of the machine's {data['cores']} cores was {data['load_average']} (1 is this process alone); "
        "other processes share its caches and slow it.",
        "",
        "## Operations a second",
        "",
        f"The forward pass of a zigzag ring on 96 GPUs has {at['ops']:,} ops. Growth is the exponent of time against",
        f"ops, fitted over 32 to {RANKS[-1]} ranks (1 is linear). The floor is the time that this machine's memory, at",
        f"{data['memory_bytes_per_s'] / 1e9:.1f} GB/s, takes to move every byte that the stage touches once.",
        "",
        "| stage | time | ops per second | growth | bytes per op | floor | time / floor |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(stage_row(data, stage) for stage in STAGES),
        "",
        f"Planning, pricing and simulating with shared links take {sum(at[stage] for stage in whole) * 1e3:.1f} ms "
        f"together, growth {exponent(data, *whole):.2f}.",
        f"{NUM_DRAWS} draws take {at['draws'] / at['simulate']:.1f} times as long as one simulation.",
        "",
        "## Growth",
        "",
        "Milliseconds for the forward pass of a zigzag ring.",
        "",
        f"| ranks | ops | {' | '.join(NAMES[stage] for stage in STAGES)} |",
        f"| --- | --- | {' | '.join('---' for _ in STAGES)} |",
        *(
            f"| {gpus} | {row['ops']:,} | {' | '.join(f'{row[stage] * 1e3:.2f}' for stage in STAGES)} |"
            for gpus, row in data["stages"].items()
        ),
        "",
        "## Large machines",
        "",
        "Whole predictions, intervals included, with 8k tokens per GPU. Peak memory is that of the process that",
        "predicts both passes, Python and compiled code included.",
        "",
        "| strategy | GPUs | forward | forward and backward | peak memory |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one, both in zip(data["large"][::2], data["large"][1::2], strict=True):
        lines.append(
            f"| `{one['strategy']}` | {one['gpus']:,} | {one['seconds']:.2f} s | {both['seconds']:.2f} s "
            f"| {both['peak_bytes'] / 2**20:,.0f} MiB |"
        )
    lines += [
        "",
        f"Above {DRAWN_GPUS} GPUs, one GPU of each Ulysses group is simulated for all of them, which is exact. Rings",
        f"of more than {MOST_PLACES} places are extrapolated from rings of {KNOWN_PLACES[1]} and {KNOWN_PLACES[2]}, "
        "which is not exact; predictions say so.",
        "`tests/test_large_machines.py` compares both with full simulations.",
        "",
        *sweep_lines(data["sweep"], data["cores"]),
    ]
    return "\n".join(lines) + "\n"


def sweep_lines(found: dict[str, Any], cores: int) -> list[str]:
    """The section on sweeps."""
    each, processor = found["seconds"] / found["scenarios"], found["processor_seconds"] / found["scenarios"]
    return [
        "## Sweeps",
        "",
        f"`cpsim sweep` predicts {found['scenarios']:,} mixed scenarios on {cores} cores and writes Parquet",
        "(`python docs/scale.py --sweep`). They combine all strategies but `dcp`; causal and full masks, with and",
        "without documents; passes; 2 to 96 GPUs; and 1k to 16k tokens per GPU. "
        f"{found['predicted']:,} of them can run. The sweep takes",
        f"{found['seconds']:.0f} s of wall time, start-up included, at a load average of {found['load_average']}: "
        f"{each * 1e3:.1f} ms per scenario, or {processor * 1e3:.1f} ms of processor",
        f"time. The largest process needs {found['peak_bytes'] / 2**20:,.0f} MiB. In proportion, {WANTED:,} such "
        f"scenarios take {each * WANTED / 60:.0f} minutes,",
        f"and {processor * WANTED / cores / 60:.0f} on otherwise idle cores.",
    ]


def main() -> None:
    """Writes the page; with --large or --swept, prints one measurement made in this process."""
    keep_freed_memory()  # as every process of cpsim does
    if sys.argv[1:2] == ["--large"]:
        print(json.dumps(large(sys.argv[2], int(sys.argv[3]), sys.argv[4])))
        return
    if sys.argv[1:2] == ["--swept"]:
        print(json.dumps(swept(SWEPT)))
        return
    if sys.argv[1:] in (["--measure"], ["--sweep"]):
        found = measure() if sys.argv[1] == "--measure" else json.loads(DATA.read_text("utf-8")) | {"sweep": sweep()}
        DATA.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(json.loads(DATA.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
