"""How fast hosts are, as measured, beside the constants of `cpsim.models.host_speed` and `cpsim.models.launches`.

    python -m studies.windows.speed

Printed are how far hosts differ, and how launches follow the Python loop where both were measured (`data/points`);
what `cpsim calibrate --host` found on each machine, several times (`studies/windows/hosts`), and how far that differs
on one machine; how far the same cases differ that one machine ran several times, each time in processes of their own
(`data/cases/repeated-*.jsonl`); and, where PyTorch is installed, what a view of a tensor takes among other views.
"""

from __future__ import annotations

import timeit
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from cpsim.calibrate.fit_host import host_phases
from cpsim.calibrate.recipes import DATA, measurements
from cpsim.models.host import HostParams
from cpsim.models.host_speed import PYTHON, load_host
from cpsim.models.profile import load_profile
from cpsim.prediction.runs import load_runs

FOLDER = Path(__file__).with_name("hosts")
RUNS = DATA / "runs"
VIEWS = 20_000


def range_of_hosts(gpu: str) -> tuple[int, float, float]:
    """Number of hosts, and what launches of the fastest and of the slowest take over the mean."""
    means = [float(np.exp(np.mean(phases))) for phases in host_phases(measurements(gpu)).values()]
    return len(means), min(means), max(means)


def python_power() -> tuple[int, float, float]:
    """Number of hosts, the power of the Python loop that launches follow, and its standard error."""
    files = measurements("h100")
    phases = host_phases(files)
    both = [
        (float(np.log(np.median(p["samples_s"]))), float(np.mean(phases[m.source])))
        for m in files
        for p in m.of("host")
        if p["kind"] == PYTHON and m.source in phases
    ]
    loop, launches = np.array(both).T
    (power, _), variances = np.polyfit(loop, launches, 1, cov=True)
    return len(both), float(power), float(np.sqrt(variances[0, 0]))


def spread_of_repeats(groups: Iterable[Sequence[float]]) -> float:
    """Standard deviation of the logarithm within groups of measurements of one thing."""
    logs = [np.log(group) for group in groups if len(group) > 1]
    return float(np.sqrt(sum(((each - each.mean()) ** 2).sum() for each in logs) / sum(len(each) - 1 for each in logs)))


def factors(host: HostParams) -> dict[str, list[float]]:
    """By machine, how much longer than a profile's its launches took each time."""
    found: dict[str, list[float]] = {}
    for path in sorted(FOLDER.glob("*.json")):
        found.setdefault(path.stem.rpartition("-")[0], []).append(load_host(str(path)).factor(host)[0])
    return found


def by_name(host: HostParams) -> float:
    """How far launches in files of hosts, which no fit reads, differ from a profile's by name: standard deviation of
    the logarithm's mean over files, less what all names of a file have in common."""
    logs: dict[str, list[float]] = {}
    for path in [*FOLDER.glob("*x[24]*.json"), *RUNS.glob("*x[24]*/host.json")]:
        found = load_host(str(path))
        common = np.log(found.factor(host)[0])
        for name, seconds in found.launch_s.items():
            if name in host.launch_s:
                logs.setdefault(name, []).append(float(np.log(seconds / host.launch_s[name]) - common))
    return float(np.std([np.mean(each) for each in logs.values()]))


def repeated_runs() -> Iterator[list[float]]:
    """Seconds of each case that one machine ran in several launches."""
    for folder in sorted({path.parent for path in RUNS.glob("*/*-repeated-*.jsonl")}):
        seconds: dict[str, list[float]] = {}
        for path in sorted(folder.glob("*-repeated-*.jsonl")):
            for run in load_runs(path):
                seconds.setdefault(run.scenario.model_dump_json(), []).append(run.time_s)
        yield from seconds.values()


def seconds_of_views() -> float:
    """Seconds of a slice of a tensor that follows another one, on this machine's CPU."""
    import torch

    x = torch.zeros(1, 512, 32, 8)
    return min(timeit.repeat(lambda: x[:, 256:], number=VIEWS, repeat=5)) / VIEWS


def main() -> None:
    """Prints all of it."""
    for gpu in ("h100", "h200"):
        count, fastest, slowest = range_of_hosts(gpu)
        print(f"{count} hosts of {gpu}: launches {fastest:.2f} to {slowest:.2f} of the mean's")
    count, power, error = python_power()
    print(f"{count} hosts: launches follow the loop to the power {power:.2f}, standard error {error:.2f}")
    profile = load_profile("h100").host
    for path in sorted(FOLDER.glob("*.json")):
        host = load_host(str(path))
        print(
            f"{path.stem}: loop {host.python_s * 1e9:.0f} ns, launches {host.factor(profile)[0]:.2f} of the profile's"
        )
    within = spread_of_repeats(factors(profile).values())
    print(f"launches of one machine differ from time to time by {within:.3f} in logarithms")
    for gpu in ("h100", "h200"):
        print(f"by name they differ from profile {gpu} by {by_name(load_profile(gpu).host):.3f}")
    runs = [*repeated_runs()]
    print(f"{len(runs)} cases differ by {spread_of_repeats(runs):.3f} from launch to launch on one machine")
    if find_spec("torch") is not None:
        view, among = seconds_of_views(), profile.launch_s["view"]
        print(f"a view after another {view * 1e6:.2f} us here, among other calls {among * 1e6:.1f} us on H100's hosts")


if __name__ == "__main__":
    main()
