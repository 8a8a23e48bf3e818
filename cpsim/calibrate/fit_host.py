"""Fits memory-bound kernels and what the host takes to launch, of whose machines the mean counts."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpsim.calibrate.fit_layers import latency_and_bandwidth
from cpsim.calibrate.measurement import LOAD_BYTES, ROUNDS, Measurements, Point
from cpsim.calibrate.residuals import measured
from cpsim.errors import ProfileError
from cpsim.models.elementwise import ElementwiseParams
from cpsim.models.host import HostParams
from cpsim.models.host_speed import PYTHON, python_factor
from cpsim.models.standin import StandIn

Floats = NDArray[np.float64]

NO_GAINS: Final[Mapping[str, float]] = {"fwd": 0.0, "bwd": 0.0, "memory-bound": 0.0, "message": 0.0}
FIRST_CALL: Final = ("sdpa_flash", "fwd")
"""Kernel and pass in graphs that every process measured, and older ones did not name."""
PAUSES: Final = {"pause_synced": "synced", "pause_streamed": "held", "pause_held": "held"}
"""Pauses between iterations by what measurements call them."""
FEWEST_HOSTS: Final = 4
"""Machines from which on their spread is known."""
ASSUMED_SPREAD: Final = (0.2, 0.15)
OUTLIER: Final = 3.0
"""Times its median: a launch that takes longer is so rare that most iterations have none, and counts as this long."""
IN_GRAPHS: Final = ("graph", "pause")
"""How kinds begin that are whole windows rather than launches, of which the median counts."""
DISTURBED = 2.0
"""See `host_paces`: above what hosts differ by, and below what one took while it was seen to be disturbed."""


def fit_elementwise(chosen: Sequence[Point], stand_in: StandIn | None) -> ElementwiseParams:
    """Latency and bandwidth of each kind, least squares of log time."""
    points = [p for p in chosen if p["op"] == "elementwise"]
    if not points and stand_in:
        return stand_in.profile.elementwise
    if not points:
        raise ProfileError("a profile needs elementwise points: add a file of cpsim.real.measure.kernels")
    latency, bandwidth = {}, {}
    for kind in sorted({p["kind"] for p in points}):
        mine = [p for p in points if p["kind"] == kind]
        nbytes = np.array([p["nbytes"] for p in mine], float)
        latency[kind], bandwidth[kind] = latency_and_bandwidth(nbytes, measured(mine))
    return ElementwiseParams(latency_s=latency, bandwidth_bytes_per_s=bandwidth)


def fit_hosts(chosen: Sequence[Point], copies: ElementwiseParams, stand_in: StandIn | None) -> HostParams:
    """``fit_host`` of what points of all kinds say of hosts."""
    return fit_host(
        [p for p in chosen if p["op"] == "host"],
        [p for p in chosen if p["op"] == "graph"],
        [p for p in chosen if p["op"] == "cached" and "graph_s" in p],
        copies.latency_s["copy"],
        stand_in,
    )


def fit_host(
    points: Sequence[Point],
    captured: Sequence[Point],
    in_rows: Sequence[Point],
    tiny_copy_s: float,
    stand_in: StandIn | None,
) -> HostParams:
    """What hosts take for launches, and what events and graphs add.

    `captured` are attention calls and messages in graphs, which tell a graph's launch and what events around an op add.
    Kernels count on hosts with one GPU and messages between several, where there are such. Without them tiny copies
    do: a graph of a chain takes the launch and what a copy takes in a longer one; between two events it takes
    `tiny_copy_s`. A chain that goes to and from a second stream takes more. `in_rows` are memory-bound kernels, timed
    many in a row, too.
    """
    if stand_in and not points:
        return stand_in.profile.host
    launch = launch_times(points)
    graphs = {kind: launch.pop(kind) for kind in list(launch) if kind.startswith("graph")}
    pauses = {PAUSES[kind]: launch.pop(kind) for kind in list(launch) if kind in PAUSES}
    if stand_in:
        launch = {**stand_in.profile.host.launch_s, **launch}
    graph_s = cross_s = each = 0.0
    captured_gain = NO_GAINS
    streamed_gain = stand_in.profile.host.streamed_gain_s if stand_in else NO_GAINS
    if "graph_chain_16" in graphs:
        each, across = ((graphs[f"graph_{name}_64"] - graphs[f"graph_{name}_16"]) / 48 for name in ("chain", "across"))
        cross_s = max(0.0, across - each)
        graph_s = max(0.0, graphs["graph_chain_16"] - 16 * each)
        captured_gain = dict.fromkeys(NO_GAINS, max(0.0, tiny_copy_s - each))
    if captured:
        captured_gain = {**captured_gain, **_gains(captured, in_rows, "graph_s", graph_gains)}
        captured_gain["message"] += 2 * cross_s
    if launched := [p for p in captured if "streamed_many_s" in p]:
        streamed_gain = {**streamed_gain, **_gains(launched, in_rows, "stream_s", stream_gains)}
    alike = [p for p in captured if called(p) == FIRST_CALL]
    if alike:
        graph_s = float(np.median([graph_start(p) for p in _on_one_gpu(alike)]))
    held = [p for p in alike if "held_s" in p]
    small = [p for p in held if p["tokens"] == min(q["tokens"] for q in held)]  # whose operands are soon read
    queued = [float(np.median(p["held_s"])) - graph_call(p) for p in held]
    cold = [float(np.median(p["evicted_s"]) - np.median(p["held_s"])) for p in small]
    return HostParams(
        launch_s=launch,
        event_s=launch.pop("event", 0.0),
        graph_s=graph_s,
        graph_queued_s=float(np.median(queued or 0.0)),
        cold_start_s=float(np.median(cold or 0.0)),
        graph_cross_s=cross_s,
        captured_kernel_s=each,
        captured_gain_s=captured_gain,
        streamed_gain_s=streamed_gain,
        pause_s=dict.fromkeys(PAUSES.values(), 0.0) | pauses,
    )


def launch_times(points: Sequence[Point]) -> dict[str, float]:
    """Seconds by kind: an attention kernel's entry points count alike, and edges of one code with all its
    strategies and kernels; of calls of a step the first round counts apart."""
    samples: dict[str, list[float]] = {}
    for point in points:
        kind = str(point["kind"])
        if kind.endswith(("_dense", "_varlen")):  # such as sdpa_flash_fwd_dense
            kernel, pass_, _ = kind.rsplit("_", 2)
            kind = f"{kernel} {pass_}"
        elif kind == "transfer_pair":
            kind = "transfer"
        elif " begin " in kind or " end " in kind:  # such as torch sdpa_flash begin fwd
            code, *_, edge, pass_ = kind.split()
            kind = f"{code} {edge} {pass_}"
        times = point["samples_s"]
        if in_steps(point):
            samples.setdefault(f"{kind} first", []).append(_in_a_sum(times[::ROUNDS]))
            times = [t for i, t in enumerate(times) if i % ROUNDS]
        of = np.median if kind.startswith(IN_GRAPHS) else _in_a_sum
        samples.setdefault(kind, []).append(float(of(times)))
    return {kind: float(np.median(times)) for kind, times in sorted(samples.items())}


def _in_a_sum(times: Sequence[float]) -> float:
    """Seconds that a launch adds to an iteration of many: the mean, as a sum of many is as long as its parts' means
    say, and launches are now and then longer than their median but never much shorter."""
    return float(np.minimum(times, OUTLIER * float(np.median(times))).mean())


def _gains(
    captured: Sequence[Point], in_rows: Sequence[Point], in_a_row: str, of: Callable[[Point], tuple[float, float]]
) -> dict[str, float]:
    """What events around ops add, as ``HostParams`` has it; ``of`` says it of the kernel and the message of a point."""
    kernels: dict[str, list[float]] = {}
    for p in _on_one_gpu(captured):
        kernels.setdefault(" ".join(called(p)), []).append(of(p)[0])
    found = {name: float(np.median(seconds)) for name, seconds in kernels.items()}
    for pass_ in ("fwd", "bwd"):
        found[pass_] = float(np.median([s for name, s in found.items() if name.endswith(pass_)] or [*found.values()]))
    if in_rows:
        found["memory-bound"] = float(np.median(measured(in_rows) - [p[in_a_row] for p in in_rows]))
    return found | {"message": float(np.median([of(p)[1] for p in _between_gpus(captured)]))}


def called(point: Point) -> tuple[str, str]:
    """Kernel and pass of a `graph` point."""
    return point.get("kernel", FIRST_CALL[0]), point.get("pass", FIRST_CALL[1])


def _on_one_gpu(points: Sequence[Point]) -> Sequence[Point]:
    """Points of hosts with one GPU, if there are such: no rank waits for another there."""
    return [p for p in points if p["num_gpus"] == 1] or points


def _between_gpus(points: Sequence[Point]) -> Sequence[Point]:
    """Points of several GPUs, if there are such: on one a message goes to the GPU itself."""
    return [p for p in points if p["num_gpus"] > 1] or points


def graph_call(point: Point) -> float:
    """Seconds of an attention call among others in a graph, of a `graph` point."""
    one, many = (float(np.median(point[name])) for name in ("samples_s", "many_s"))
    return (many - one) / float(point["rounds"])


def graph_start(point: Point) -> float:
    """Seconds, of a `graph` point, from the launch to its first kernel."""
    return float(np.median(point["samples_s"])) - graph_call(point)


def graph_gains(point: Point) -> tuple[float, float]:
    """Seconds that, by a `graph` point, events around a kernel add; and what those around a message add, less what
    kernels lose before and after it."""
    one, both, attention, message = (
        float(np.median(point[name])) for name in ("samples_s", "both_s", "attention_s", "message_s")
    )
    each, pair = graph_call(point), (both - one) / point["rounds"]
    return attention - each, each + message - pair


def stream_gains(point: Point) -> tuple[float, float]:
    """Seconds that, by a `graph` point whose calls a host also launched one by one, events around a kernel add, and
    what those around a message add, less what kernels lose before and after it."""
    one, many, both, attention, message = (
        float(np.median(point[name]))
        for name in ("streamed_one_s", "streamed_many_s", "streamed_both_s", "attention_s", "message_s")
    )
    each, pair = ((seconds - one) / point["rounds"] for seconds in (many, both))
    return attention - each, each + message - pair


MEMORY_BOUND = ("copy", "accumulate", "merge")


def fit_load(points: Sequence[Point], port_bytes_per_s: float) -> dict[str, float]:
    """Power that ops draw above an idle GPU's, relative to what the limit allows: the most that any load draws.

    Transfers draw it for their bytes, alike among two ranks and at half the rate among four: theirs is what they would
    draw at the rate of a port.
    """
    watts = {p["kind"]: float(np.mean(p["watts"])) for p in points}
    if not {"idle", "transfer", "all_gather", *MEMORY_BOUND} < watts.keys() or not all(watts.values()):
        return {}
    share = {kind: (w - watts["idle"]) / (max(watts.values()) - watts["idle"]) for kind, w in watts.items()}
    seconds = next(float(np.median(p["samples_s"])) for p in reversed(points) if p["kind"] == "transfer")
    return {
        "memory-bound": float(np.mean([share[kind] for kind in MEMORY_BOUND])),
        "transfer": share["transfer"] * port_bytes_per_s * seconds / LOAD_BYTES,
        "collective": share["all_gather"],
    }


def on_mean_host(m: Measurements, stepped: Container[str], paces: Sequence[float]) -> Iterator[Point]:
    """The points of a file, host calls of others as the mean of all machines would make them.

    They count as they were timed among those of a step, on whatever machines they were; where nobody did so, as they
    were timed among all calls; never repeated in a row.

    Args:
        m: the file.
        stepped: calls that some file timed among those of a step.
        paces: see `host_paces`.
    """
    for p, pace in zip(m.points, paces, strict=True):
        if p["op"] == "host":
            if p.get("place") == "in a row" or (p["kind"] in stepped and not in_steps(p)):
                continue
            if str(p.get("place", "")).startswith("in loops") or p["kind"].endswith(" warm") or p["kind"] == PYTHON:
                continue
            p = p | {"samples_s": [s / pace for s in p["samples_s"]]}
        yield p


def in_steps(point: Point) -> bool:
    return str(point.get("place", "")).startswith("in steps")


def host_paces(measurements: Sequence[Measurements], gpu: str) -> dict[str, list[float]]:
    """How long the host took over the mean of this GPU's hosts, or else of all, when it made every point of each file.

    That is the machine's speed, by its launches or, where it timed none that others timed, by its Python loop. A host
    that does something else may take several times as long for a while: a step whose eager ops took more than
    `DISTURBED` times what they usually take in steps counts by these, as do all steps of a machine that timed nothing
    else.
    """
    speeds, steps = host_speeds(measurements), {m.source: _steps(m) for m in measurements}
    mine = [speeds[m.source] for m in measurements if m.header["gpu"] == gpu and m.source in speeds]
    usual_speed = float(np.exp(np.mean(np.log(mine)))) if mine else 1.0
    speeds = {source: speed / usual_speed for source, speed in speeds.items()}
    speeds = {m.source: loop for m in measurements if (loop := python_pace(m))} | speeds
    eager: dict[tuple[str, str], list[float]] = {}
    for source, of_point in steps.items():
        for op, seconds in (pair for step in of_point for pair in step.items()):
            eager.setdefault(op, []).append(seconds / speeds.get(source, 1.0))
    usual = {op: float(np.median(seconds)) for op, seconds in eager.items()}

    def pace(step: Mapping[tuple[str, str], float], speed: float | None) -> float:
        if not step:
            return speed or 1.0
        found = float(np.exp(np.mean([np.log(seconds / usual[op]) for op, seconds in step.items()])))
        return found if speed is None or found > DISTURBED * speed else speed

    return {source: [pace(step, speeds.get(source)) for step in of_point] for source, of_point in steps.items()}


def python_pace(m: Measurements) -> float | None:
    """How much longer a host's launches take than usual by its Python loop, where a file timed that."""
    return next((python_factor(float(np.median(p["samples_s"]))) for p in m.of("host") if p["kind"] == PYTHON), None)


def _steps(m: Measurements) -> list[dict[tuple[str, str], float]]:
    """For every point, what the eager ops of its step took, which come first in each; empty for points of none."""
    found, last, step = list[dict[tuple[str, str], float]](), False, dict[tuple[str, str], float]()
    for p in m.points:
        in_step = p["op"] == "host" and in_steps(p)
        is_eager = in_step and str(p["kind"]).startswith("eager")
        if is_eager:
            step = step if last else {}
            step[p["kind"], p["which"]] = float(np.median(p["samples_s"]))
        last = is_eager
        found.append(step if in_step else {})
    return found


PHASES: Final = ("in turns", "in bwd", "in steps", "in steps in bwd")
"""Places of calls that one thread makes within seconds."""


def host_phases(measurements: Sequence[Measurements]) -> dict[str, list[float]]:
    """Of every file, the logarithm of how long launches took over the mean of all files, once for each phase."""
    taken: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    for m in measurements:
        for p in m.of("host"):
            if p.get("place") in PHASES:
                mine = taken.setdefault((m.source, p["place"]), {})
                mine[p["kind"], p["which"]] = float(np.log(np.median(p["samples_s"])))
    of_call: dict[tuple[str, str, str], list[float]] = {}
    for (_, place), calls in taken.items():
        for call, log in calls.items():
            of_call.setdefault((place, *call), []).append(log)
    usual = {call: float(np.mean(logs)) for call, logs in of_call.items()}
    phases: dict[str, list[float]] = {}
    for (source, place), calls in taken.items():
        phases.setdefault(source, []).append(float(np.mean([log - usual[place, *call] for call, log in calls.items()])))
    return phases


def host_spread(measurements: Sequence[Measurements]) -> tuple[float, float]:
    """Standard deviations of the logarithm of how long launches take: from machine to machine, and from thread to
    thread and second to second of one machine, whose cores share caches, clocks and execution units with whatever runs.
    """
    several = [mine for mine in host_phases(measurements).values() if len(mine) > 1]
    if len(several) < FEWEST_HOSTS:
        return ASSUMED_SPREAD
    within = float(np.mean([np.var(mine, ddof=1) for mine in several]))
    between = float(np.var([np.mean(mine) for mine in several], ddof=1)) - within / float(np.mean([*map(len, several)]))
    return max(between, 0.0) ** 0.5, within**0.5


def host_speeds(measurements: Sequence[Measurements]) -> dict[str, float]:
    """How long every machine's host takes over the mean of all, by file: for calls timed on all of them."""
    times: dict[str, dict[tuple[str, str], float]] = {}
    for m in measurements:
        for p in (p for p in m.of("host") if p.get("place") in ("in turns", "in bwd")):
            times.setdefault(m.source, {})[p["kind"], p["which"]] = float(np.median(p["samples_s"]))
    common = sorted(set.intersection(*map(set, times.values()))) if times else []
    logs = {source: float(np.mean(np.log([mine[call] for call in common]))) for source, mine in times.items() if common}
    return {source: float(np.exp(log - np.mean(list(logs.values())))) for source, log in logs.items()}
