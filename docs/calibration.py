"""Writes docs/calibration.md: how errors fall with the minutes of a calibration, replayed from committed points.

    python docs/calibration.py

Takes some minutes on two cores: it fits eight profiles, and predicts runs with each.
"""

from __future__ import annotations

import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from cpsim.calibrate.fit import fit_profile, folds, large_model
from cpsim.calibrate.measurement import Measurements, Point, load
from cpsim.calibrate.recipes import measurements, points_file, runs_file
from cpsim.calibrate.residuals import model_of, residuals, usable
from cpsim.models.profile import Profile, load_profile, save_profile
from cpsim.prediction.compare import compare, errors_of, predict_runs
from cpsim.prediction.runs import load_runs
from cpsim.real.measure.shapes import (
    LEAST_CALLS,
    LEAST_SIZES,
    RESTED_EVERY,
    ROUNDS,
    SHARES,
    Shape,
    extremes_first,
    informative_order,
)

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "calibration.md"
RUNS = [runs_file("h200.jsonl"), runs_file("h200-b.jsonl")]
REAL, REAL_RUNS = points_file("h200x2-calibration.jsonl"), [runs_file("calibrated.jsonl")]
"""A calibration of two GPUs, and runs on the same machine right after it."""
MINUTES = (1, 2, 5, 10)
NUM_GPUS = 4
KERNELS = ("fa4", "fa2", "cudnn", "sdpa_flash")
OTHER_STUDIES = ("h200-masked", "h200-head-dim", "h200-flashinfer", "h200-layers")
"""Prefixes of the names of the profile's files that no run depends on."""
HOSTS = tuple(f"h200x4-host-{n}.jsonl" for n in (1, 2, 3, 4))
"""Host time of other people's code on four machines."""
OF_MANY_HOSTS = "10, 4 hosts"
NINE, SHIPPED = "nine minutes", "`h200`"
BAR = 1.2

START_S, LAUNCHES_S, OTHERS_S, POINT_S, COMPILE_S = 25.0, 18.0, 15.0, 0.03, 2.0
"""Assumed seconds: start of processes and NCCL; host launches; calls of other people's code; tensors and launches of a
short point; compilation of flash-attn 4, once for each pass, mask, ratio of heads and entry point."""

Queues = dict[str, list[list["Task"]]]
"""Tasks in order, by part of a calibration: a queue for every GPU, or one queue where all GPUs work together."""


@dataclass(frozen=True, slots=True)
class Task:
    """Points that are measured together."""

    seconds: float
    source: str
    """File that holds the points."""
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One calibration: what it measured, and mean errors by kind of held-out points, then of runs."""

    measured: tuple[str, ...]
    errors: Mapping[str, float]


# --- what a calibration would have measured ---


def timed_seconds(point: Point) -> float:
    """Seconds that `cpsim.real.measure.kernels` takes for a point: warm-up, rounds and samples, or rests."""
    t, num = float(np.median(point["samples_s"])), len(point["samples_s"])
    if point.get("rested"):
        return POINT_S + num * (max(3e-3, 4 * t) + 1e-3 + t) + 4 * t
    rounds = num / (4 if t < 0.01 else int(np.clip(0.05 / t, 1, 4)))
    return 0.15 + rounds * max(0.012, t) + num * t + 5 * t


def network_seconds(point: Point) -> float:
    """Seconds that measuring a collective or transfer takes."""
    return POINT_S + 0.011 + 23 * (float(np.median(point["samples_s"])) + 1e-4)


def queues(files: Mapping[str, Measurements]) -> Queues:
    """The points of a calibration that the files hold, in the order of a calibration."""
    network, executor, kernels = (files[f"h200{name}.jsonl"] for name in ("x4-network", "x4-executor", "-kernels-0"))
    overlaps, power, others = (files[f"h200x4-{name}.jsonl"] for name in ("overlap", "power", "host-4"))
    graphs = [p for p in executor.of("host") if p["kind"].startswith(("graph", "pause"))]
    captured = files["h200-graphs-1.jsonl"]
    host = [
        (kernels, kernels.of("host")),
        (network, network.of("host")),
        (executor, graphs),
        (captured, captured.of("graph")),
    ]
    copies = by_size(executor.of("elementwise"), ("variant",))
    messages = by_size([*network.of("collective"), *network.of("transfer")], ("op", "kind", "num_ranks"))
    overlap_s = overlaps.of("end")[0]["samples_s"][0] / len(overlaps.of("overlap"))
    beside = [p for p in overlaps.of("overlap") if p["a"] in ("merge", "copy") or p["a"].endswith("_4096")]
    attention = [attention_queue(files, gpu) for gpu in range(NUM_GPUS)]
    return {
        "host launches": [[Task(LAUNCHES_S / len(host), m.source, tuple(points)) for m, points in host]],
        "memory-bound kernels": [
            [Task(POINT_S + 16 * float(np.median(p["samples_s"])), executor.source, (p,)) for p in copies[g::NUM_GPUS]]
            for g in range(NUM_GPUS)
        ],
        "collectives and transfers": [[Task(network_seconds(p), network.source, (p,)) for p in messages]],
        "interference": [[Task(overlap_s, overlaps.source, (p,)) for p in beside]],
        "power": [[Task(p["samples_s"][0] + 1.3, power.source, (p,)) for p in power.of("power")]],
        "attention kernels": attention,
        "other people's code": [
            [
                Task(OTHERS_S, others.source, tuple(others.of("host"))),
                *(Task(timed_seconds(p), others.source, (p,)) for p in others.of("elementwise")),
            ]
        ],
    }


def by_size(points: Iterable[Point], names: Sequence[str]) -> list[Point]:
    """Points of all kinds in turn; within a kind, by the size nearest to the next place of `extremes_first`."""
    kinds: dict[tuple[Any, ...], list[Point]] = {}
    for p in points:
        kinds.setdefault(tuple(p[name] for name in names), []).append(p)
    ordered = []
    for mine in kinds.values():
        logs, order, left = np.log([p["nbytes"] for p in mine]), list[Point](), np.ones(len(mine), bool)
        for place in extremes_first(len(mine)):
            wanted = logs.min() + place * (logs.max() - logs.min())
            order.append(mine[at := int(np.where(left, np.abs(logs - wanted), np.inf).argmin())])
            left[at] = False
        ordered.append(order)
    return [p for p in chain(*zip_longest(*ordered)) if p is not None]


def attention_queue(files: Mapping[str, Measurements], gpu: int) -> list[Task]:
    """Attention tasks of one GPU: kernels in turn, the most informative shapes first."""
    shares = []
    for kernel in KERNELS:
        calls, rested = (in_order(files[f"h200-{name}-{gpu}.jsonl"], kernel) for name in ("kernels", "rested"))
        for i in range(min(len(rested), len(calls) // RESTED_EVERY), 0, -1):
            calls.insert(i * RESTED_EVERY, rested[i - 1])
        shares.append(calls)
    return [task for task in chain(*zip_longest(*shares)) if task]


def in_order(measured: Measurements, kernel: str) -> list[Task]:
    """Both passes of every shape of a kernel."""
    shapes: dict[Shape, list[Point]] = {}
    for p in measured.of("attention"):
        if p["kernel"] == kernel:
            call = {name: p[name] for name in ("num_heads", "num_kv_heads", "causal", "varlen")}
            shape = Shape(family="", q_lens=tuple(p["q_lens"]), k_lens=tuple(p["k_lens"]), **call)
            shapes.setdefault(shape, []).append(p)
    tasks, compiled, listed = list[Task](), set[Any](), list(shapes)
    for shape in (listed[i] for i in informative_order(listed)):
        seconds, variant = sum(map(timed_seconds, shapes[shape])), (shape.num_heads // shape.num_kv_heads, shape.causal)
        if kernel == "fa4" and (*variant, shape.varlen) not in compiled and not shapes[shape][0].get("rested"):
            seconds += len(shapes[shape]) * COMPILE_S
        compiled.add((*variant, shape.varlen))
        tasks.append(Task(seconds, measured.source, tuple(shapes[shape])))
    return tasks


def replay(parts: Queues, minutes: float) -> tuple[list[Task], float]:
    """What a calibration of some minutes measures, with time shared as in `cpsim.real.measure.calibrate`, and the
    seconds that it takes.
    """
    messages = [p for task in parts["collectives and transfers"][0] for p in task.points]
    least = {
        "memory-bound kernels": 14,
        "attention kernels": LEAST_CALLS * len(KERNELS),
        "collectives and transfers": LEAST_SIZES * len({(p["op"], p["kind"], p["num_ranks"]) for p in messages}),
    }
    done, clock = {name: [0] * len(mine) for name, mine in parts.items()}, START_S
    for end in ROUNDS:
        stop = START_S + end * (60 * minutes - START_S)
        for i, (name, mine) in enumerate(parts.items()):
            share, of_all = SHARES.get(name, 0.0), sum(SHARES.get(later, 0.0) for later in list(parts)[i:])
            deadline, clocks = clock + max(0.0, stop - clock) * share / of_all, []
            for queue, tasks in enumerate(mine):
                now, at = clock, done[name][queue]
                while at < len(tasks) and (not share or at < least.get(name, 0) or now <= deadline):
                    now, at = now + tasks[at].seconds, at + 1
                done[name][queue] = at
                clocks.append(now)
            clock = max(clocks)
    taken = [t for name, mine in parts.items() for tasks, n in zip(mine, done[name], strict=True) for t in tasks[:n]]
    return taken, clock


# --- how good the profiles are ---


def measured_files() -> dict[str, Measurements]:
    """The files of profile h200 that the runs depend on, by name."""
    files = sorted(measurements("h200"), key=lambda m: m.source)
    return {m.source: m for m in files if not m.source.startswith(OTHER_STUDIES)}


def split(files: Mapping[str, Measurements]) -> tuple[dict[str, Measurements], list[Point]]:
    """The files without a random fifth of their points, and the points of that fifth that count for accuracy."""
    points = [p for m in files.values() for p in m.points if usable(p) and model_of(p)]
    held = [p for p, fold in zip(points, folds(points), strict=True) if fold == 0]
    away = {id(p) for p in held}
    left = {name: replace(m, points=tuple(p for p in m.points if id(p) not in away)) for name, m in files.items()}
    asked = [p for p in held if large_model(p) and "pause_s" not in p]
    return left, [p for p in asked if p["op"] != "elementwise" or p.get("kernel") == "executor"]


def calibrations(left: Mapping[str, Measurements]) -> dict[str, tuple[tuple[str, ...], list[Measurements]]]:
    """By label: columns that say what was measured, and the measurements."""
    parts, found = queues(left), {}
    for minutes in MINUTES:
        tasks, seconds = replay(parts, minutes)
        points: dict[str, list[Point]] = {}
        for task in tasks:
            points.setdefault(task.source, []).extend(task.points)
        chosen = [replace(left[name], points=tuple(mine)) for name, mine in sorted(points.items())]
        found[str(minutes)] = (words(chosen, f"{seconds / 60:.1f}"), chosen)
    _, longest = found[str(MINUTES[-1])]
    more = [left[name] for name in HOSTS if name not in {m.source for m in longest}]
    found[OF_MANY_HOSTS] = (words(longest, "-"), [*longest, *more])
    everything = list(left.values())
    return found | {"all": (words(everything, "-"), everything)}


def words(measured: Sequence[Measurements], minutes: str) -> tuple[str, ...]:
    """Cells of a row: minutes taken, and numbers of points by kind."""
    ops = Counter(p["op"] for m in measured for p in m.points)
    counts = ops["attention"], ops["collective"] + ops["transfer"], ops["overlap"]
    return (minutes, *map(str, counts))


KINDS = {"attention": "attention", "elementwise": "memory-bound", "collective": "network", "transfer": "network"}
WHO = {"our executor": ("cpsim",), "others' code": ("ring-flash-attn", "torch", "yunchang")}
WHO["all runs"] = (*WHO["our executor"], *WHO["others' code"])


def held_out_errors(profile: Profile, held: Sequence[Point]) -> dict[str, float]:
    """Mean errors on points that a profile has not seen, by kind."""
    errors: dict[str, list[float]] = {kind: [] for kind in KINDS.values()}
    for row in residuals(profile, held):
        errors[KINDS[row.point["op"]]].append(abs(row.error))
    return {kind: float(np.mean(mine)) for kind, mine in errors.items()}


def run_errors(profile: Profile, paths: Sequence[Path]) -> dict[str, float]:
    """Mean errors on runs of 1 ms or more, by whose code ran."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "calibrated.json"
        save_profile(profile, own)
        found = [run for path in paths for run in load_runs(path)]
        runs = [replace(r, scenario=r.scenario.model_copy(update={"profile": str(own)})) for r in found]
        pairs = [pair for pair in compare(predict_runs(runs), runs).pairs if pair.is_long]
    of = {who: [pair for pair in pairs if pair.scenario.implementation in codes] for who, codes in WHO.items()}
    return {who: errors_of(mine).mean_absolute for who, mine in of.items()}


# --- the page ---

INTRODUCTION = f"""# Error against minutes of calibration

Written by `python docs/calibration.py`. The script replays what `cpsim calibrate` would have measured on four H200
in 1, 2, 5 and 10 minutes, fits a profile to each, and reports two kinds of error: on points that no fit saw (a random
fifth of the committed points, those of at least 1k tokens or 1 MiB), and on the real runs of `h200.jsonl` and
`h200-b.jsonl` that take 1 ms or more. Row `all` is fitted to every measurement of profile `h200`
outside that fifth, except those of other masks, other head dimensions, FlashInfer and layers.

The committed files were not measured in the order of a calibration, so the replay puts their points into that order:
the most informative first, kernels in turn, a share of the time for each part, two rounds. The cost of a point follows
from the way it is measured (warm-up, rounds, samples or rests) and from its own times. Summed over a file of attention
points, these costs agree with the time that the file took within 10 %. Some costs are assumed: {START_S:g} s to start,
{LAUNCHES_S:g} s for host launches, {OTHERS_S:g} s for calls of other people's code,
{POINT_S:g} s for tensors and launches of a short point, and {COMPILE_S:g} s for every variant that flash-attn 4
compiles. A real calibration can draw more points than the files hold; it would go on measuring where `taken` is less
than `minutes`.

A calibration times only its own host, but the runs come from several machines, whose hosts need different times for
other people's code. Row `{OF_MANY_HOSTS}` therefore adds such calls from three more machines.
"""
REAL_ONE = """## A real calibration

`cpsim calibrate --minutes 9` ran on two H200, and right after it, on the same machine, all 64 cases of the validation
set for two GPUs (`data/runs/h200x2-1122i/calibrated.jsonl`). The table has mean errors of the runs that take 1 ms or
more, with the profile of these nine minutes and with profile `h200`, which is also fitted to their attention calls.
"""


def inputs() -> str:
    """Fingerprint of the files that the page is made from."""
    crc = 0
    for path in (*(points_file(name) for name in sorted(measured_files())), *RUNS, *REAL_RUNS):
        crc = zlib.crc32(path.read_bytes(), crc)
    return f"{crc:08x}"


def head(files: Mapping[str, Measurements]) -> dict[str, tuple[str, ...]]:
    """The columns of the table that need no fit, by label."""
    return {label: measured for label, (measured, _) in calibrations(split(files)[0]).items()}


def table(columns: Sequence[str], rows: Mapping[str, Row]) -> str:
    """A Markdown table with a row for every calibration."""
    lines = [[*columns, *next(iter(rows.values())).errors]]
    lines += [["---"] * len(lines[0])]
    lines += [[name, *row.measured, *(f"{error:.1%}" for error in row.errors.values())] for name, row in rows.items()]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def verdict(labels: Iterable[str], rows: Mapping[str, Row], everything: str) -> str:
    """Errors of some calibrations over those of the calibration with all points, as a Markdown list."""
    lines = []
    for label in labels:
        ratios = {who: rows[label].errors[who] / rows[everything].errors[who] for who in WHO}
        judged = (f"{who} {ratio:.2f} ({'met' if ratio <= BAR else 'not met'})" for who, ratio in ratios.items())
        lines.append(f"* {label}: {', '.join(judged)}\n")
    return f"Errors relative to those of {everything}; the goal is at most {BAR:g}:\n\n" + "".join(lines)


def page() -> str:
    """The page; fits eight profiles."""
    left, held = split(measured_files())
    rows = {}
    for label, (measured, chosen) in calibrations(left).items():
        profile = fit_profile(chosen, label, check=False)
        rows[label] = Row(measured, held_out_errors(profile, held) | run_errors(profile, RUNS))
    real = {label: Row((), run_errors(profile, REAL_RUNS)) for label, profile in real_profiles().items()}
    columns = ("minutes", "taken", "attention points", "messages", "overlaps")
    parts = (
        INTRODUCTION,
        table(columns, rows),
        verdict((str(MINUTES[-1]), OF_MANY_HOSTS), rows, "all"),
        REAL_ONE,
        table(("profile",), real),
        verdict((NINE,), real, SHIPPED),
    )
    return "\n".join([*parts, f"Made from files with CRC-32 {inputs()}.\n"])


def real_profiles() -> dict[str, Profile]:
    """Profiles of the real calibration and of cpsim, by label."""
    return {NINE: fit_profile([load(REAL)], "own", check=False), SHIPPED: load_profile("h200")}


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
