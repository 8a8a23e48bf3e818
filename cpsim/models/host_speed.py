"""How fast one machine's hosts launch, against the hosts that a profile was measured on.

A profile has launch times of the mean host of several machines. Where a scenario or a cluster says how fast its own
hosts are, by a factor or by the file that ``cpsim calibrate --host`` writes, these times are scaled.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from cpsim.case.files import as_profile_error, explain, parse_json, read_text
from cpsim.errors import ProfileError, shown
from cpsim.models.host import HostParams
from cpsim.models.profile import Profile
from cpsim.runtime.files import noted, while_unchanged, write
from cpsim.units import CLOSED, ByName, Quantity, Seconds

FORMAT: Final = "cpsim-host"
SCHEMA: Final = 1
PYTHON: Final = "python"
"""The Python loop of ``cpsim.calibrate.pace`` among measured launches."""
USUAL_PYTHON_S: Final = 7.3e-7
"""Seconds of one call of it where launches take what a profile says; assumed, like the power."""
PYTHON_POWER: Final = 0.4
"""Launches follow the Python loop to this power: a launch is a driver's work as well. Assumed; the five hosts of which
both were measured give 0.14, with a standard error of 0.15 (``python -m studies.windows.speed``)."""
SIGMA_FACTOR: Final = 0.14
"""Standard deviation of the logarithm that a factor leaves: by so much factors of one machine differ that were measured
a minute apart (the same command)."""
SIGMA_PYTHON: Final = 0.15
"""The same where only the Python loop was timed; assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFile:
    """What ``cpsim calibrate --host`` found on a machine."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED

    gpu: str
    """As the driver names it; empty where launches were not timed."""
    cpu: str
    """As the machine names it."""
    date: str
    processes: Annotated[int, Quantity("", 1, 10_000)]
    """That ran at once."""
    python_s: Seconds
    """Seconds of one call of the Python loop, the geometric mean of all processes."""
    launch_s: ByName[Seconds]
    """Seconds of launches, as a profile names them; empty where there was no GPU."""

    def factor(self, host: HostParams) -> tuple[float, float]:
        """How much longer this machine's hosts take than a profile's, and the deviation of its logarithm."""
        common = [name for name in self.launch_s if name in host.launch_s and name != PYTHON]
        if common:
            logs = [np.log(self.launch_s[name] / host.launch_s[name]) for name in common]
            return float(np.exp(np.mean(logs))), SIGMA_FACTOR
        return python_factor(self.python_s), SIGMA_PYTHON


def python_factor(python_s: float) -> float:
    """How much longer launches take than a profile's on a host whose Python loop takes so many seconds a call."""
    return float((python_s / USUAL_PYTHON_S) ** PYTHON_POWER)


def on_host(profile: Profile, host: float | str) -> Profile:
    """A profile with launches of one machine's hosts.

    Args:
        profile: with those of the mean host.
        host: how much longer they take, or a file of ``cpsim calibrate --host``.

    Raises:
        ProfileError: the file cannot be read.
    """
    if isinstance(host, str):
        factor, sigma = load_host(host).factor(profile.host)
    else:
        factor, sigma = host, SIGMA_FACTOR
    scaled = {name: seconds * factor for name, seconds in profile.host.launch_s.items()}
    params = replace(profile.host, launch_s=scaled, event_s=profile.host.event_s * factor)
    return replace(profile, host=params, sigma={**profile.sigma, "host": sigma})


@while_unchanged
def load_host(path: str) -> HostFile:
    """A host file.

    Raises:
        ProfileError: one line that says what is wrong with it.
    """
    with as_profile_error():
        text = read_text(noted(Path(path)))
    with as_profile_error("; is the file cut off?"):
        data: Any = parse_json(text, path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ProfileError(f"host: {path}: expected a file of `cpsim calibrate --host`, format '{FORMAT}'")
    if data.get("schema") != SCHEMA:
        raise ProfileError(f"host: {path}: schema {shown(data.get('schema'))}, this version reads {SCHEMA}")
    fields = {name: value for name, value in data.items() if name not in ("format", "schema")}
    try:
        return TypeAdapter(HostFile).validate_python(fields)
    except ValidationError as error:
        raise ProfileError(f"host: {path}: {explain(error, HostFile.__dataclass_fields__)}") from None


def save_host(path: Path, gpu: str, python_s: Sequence[float], launch_s: Mapping[str, float]) -> None:
    """Writes a host file.

    Args:
        path: of the file.
        gpu: as the driver names it; empty where launches were not timed.
        python_s: seconds of one call of the Python loop, in every process.
        launch_s: seconds of launches, as a profile names them.
    """
    found = HostFile(
        gpu=gpu,
        cpu=_cpu(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        processes=len(python_s),
        python_s=float(np.exp(np.mean(np.log(python_s)))),
        launch_s=launch_s,
    )
    data = {"format": FORMAT, "schema": SCHEMA, **asdict(found)}
    write(path, json.dumps(data, indent=1) + "\n")


def _cpu() -> str:
    """The processor as the machine names it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
