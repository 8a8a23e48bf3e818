"""How fast hosts are, as measured, beside the constants of `cpsim.models.host_speed` and `cpsim.models.launches`.

    python -m studies.windows.speed

Four things are printed: how far hosts differ, and how launches follow the Python loop where both were measured
(`data/points`); what `cpsim calibrate --host` found on each machine, twice (`studies/windows/hosts`); and, where
PyTorch is installed, what a view of a tensor takes here among other views.
"""

from __future__ import annotations

import timeit
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from cpsim.calibrate.fit_host import host_phases
from cpsim.calibrate.recipes import measurements
from cpsim.models.host_speed import PYTHON, load_host
from cpsim.models.profile import load_profile

FOLDER = Path(__file__).with_name("hosts")
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
    if find_spec("torch") is not None:
        view, among = seconds_of_views(), profile.launch_s["view"]
        print(f"a view after another {view * 1e6:.2f} us here, among other calls {among * 1e6:.1f} us on H100's hosts")


if __name__ == "__main__":
    main()
