"""The run file: measured times of real runs, JSON Lines; `cpsim.real.run` writes it and `cpsim validate` reads it.

A header line with the provenance (format "cpsim-runs") says where the lines after it come from; files may be joined
one after another. Every other line is one case: `scenario`, then the keys of a prediction with measured values
(`time_s`, `tflops_per_gpu`, `peak_memory_bytes`), `samples_s`, `rank_time_s` and `passes` with the raw samples of each
pass; or `error` with the reason. Only this module knows the format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, TextIO

from cpsim.case.files import read_document, read_documents, read_lines
from cpsim.case.load import scenario_of
from cpsim.case.resolve import flops_of, workload_of
from cpsim.case.scenario import Scenario
from cpsim.errors import CpsimError, ProfileError, ScenarioError, shown
from cpsim.units import Quantity

SCHEMA = 1
FORMAT = "cpsim-runs"
_TIME: Final = Quantity("seconds", 1e-9, 3600)
_SIZE: Final = Quantity("byte", 0, 1e16)
"""0 on a CPU."""
_CLOCK: Final = Quantity("", -300, 1e13)
"""Clock [Hz], temperature [degrees Celsius] and power [W] of every rank."""
_HEADER_KEYS = ("gpu", "num_gpus", "torch", "date", "commit", "command")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRun:
    """One pass of one case, measured."""

    samples_s: tuple[float, ...]
    """The slowest rank's time of every iteration [s], in run order."""
    rank_time_s: tuple[float, ...]
    """Median of every rank [s]."""
    warmup_s: tuple[float, ...] = ()
    """The slowest rank's time of every iteration before those that count [s]."""
    peak_memory_bytes: int = 0
    """Most bytes allocated on one rank at a time, buffers included; 0 on a CPU."""
    memory_bytes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Of every rank over iterations that count: most bytes `allocated` and `reserved` by PyTorch, and `used` after
    them, what the driver says of the whole GPU; absent on a CPU and in files of older versions."""
    clock: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """SM clock [Hz], temperature [degrees Celsius] and power [W] of every rank, right after the last iteration."""
    after_gap_s: tuple[float, ...] = ()
    """Iterations after a gap between warm-up and measurement; they do not count."""
    attention_s: tuple[float, ...] = ()
    """Every rank's attention kernels alone, one after another, median [s]; where the executor knows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One case that was run, or could not be."""

    scenario: Scenario
    passes: Mapping[str, PassRun] = field(default_factory=dict)
    """By name. Of a scenario that asks for both passes either ``"fwd_bwd"``, both in one window, or ``"fwd"`` and
    ``"bwd"``, each timed apart; none where there is an error."""
    error: str | None = None
    header: Mapping[str, Any] = field(default_factory=dict)
    """Provenance of the launch: gpu, num_gpus, driver, cuda, nccl, torch, kernels, date, commit, command, ..."""

    @property
    def is_apart(self) -> bool:
        """Whether forward and backward were timed apart, each from hosts and GPUs that had nothing to do."""
        return len(self.passes) > 1

    @property
    def samples_s(self) -> tuple[float, ...]:
        """Time of every iteration [s], the sum of its passes; as many as the shortest pass has."""
        each = (run.samples_s for run in self.passes.values())
        return tuple(map(sum, zip(*each, strict=False)))

    @property
    def time_s(self) -> float:
        """Median time of an iteration [s], the slowest rank's; the sum of the medians of its passes."""
        return sum(median(run.samples_s) for run in self.passes.values())

    @property
    def rank_time_s(self) -> tuple[float, ...]:
        """Median of every rank [s], summed over the passes."""
        each = (run.rank_time_s for run in self.passes.values())
        return tuple(map(sum, zip(*each, strict=True)))

    @property
    def peak_memory_bytes(self) -> int:
        """Most bytes allocated on one rank at a time; passes run one after another, each with its own buffers."""
        return max((run.peak_memory_bytes for run in self.passes.values()), default=0)

    @property
    def key(self) -> str:
        """What a prediction of the same case has in common with it; see ``case_key``."""
        return case_key(self.scenario)

    def to_dict(self) -> dict[str, Any]:
        """One line of the file."""
        asked = {"scenario": self.scenario.to_dict()}
        if self.error is not None:
            return asked | {"error": self.error}
        total, flops = self.time_s, flops_of(self.scenario, workload_of(self.scenario))
        return asked | {
            "time_s": round(total, 9),
            "tflops_per_gpu": round(flops / self.scenario.gpus / total / 1e12, 3),
            "peak_memory_bytes": self.peak_memory_bytes,
            "samples_s": _rounded(self.samples_s),
            "rank_time_s": _rounded(self.rank_time_s),
            "passes": {name: _pass_record(run) for name, run in self.passes.items()},
        }


def case_key(scenario: Scenario) -> str:
    """Text that is equal for two scenarios that describe the same run.

    Total and local tokens are the same thing said twice, a profile and a host change predictions only, and of a cluster
    file the name counts, not the folder.
    """
    fields = scenario.to_dict() | {"tokens": scenario.num_tokens, "cluster": Path(scenario.cluster).name}
    left_out = {"tokens_per_gpu", "profile", "host"} | (set() if scenario.compile or scenario.is_step else {"compile"})
    return json.dumps({k: v for k, v in fields.items() if k not in left_out}, sort_keys=True)


class Writer:
    """Writes a run file line by line, each flushed, so that an interrupted run loses nothing."""

    def __init__(self, file: TextIO, header: Mapping[str, Any]) -> None:
        self._file = file
        self._write({"schema": SCHEMA, "format": FORMAT, **header})

    def add(self, run: Run) -> None:
        """Appends one case."""
        self._write(run.to_dict())

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()


def holds_runs(path: Path) -> bool:
    """Whether a file is one of runs, by its first line; False where it cannot be read."""
    try:
        _, first = next(read_lines(path), (1, ""))
    except ScenarioError:
        return False
    return isinstance(first, str) and f'"{FORMAT}"' in first


def runs_in(folder: Path | None) -> list[Run]:
    """Runs that could be measured, of all run files below a folder; none of no folder.

    What the manifest of a data folder leaves out is not among those of its ``runs``.

    Raises:
        ProfileError: it is no folder, or a run file is broken.
    """
    if folder is None:
        return []
    if not folder.is_dir():
        raise ProfileError(f"runs: {folder}: expected a folder of run files")
    left_out = _left_out(folder)
    files = [path for path in sorted(folder.rglob("*.jsonl")) if holds_runs(path) and path not in left_out]
    return [run for path in files for run in load_runs(path) if run.error is None]


def _left_out(folder: Path) -> set[Path]:
    manifest = folder.parent / "manifest.yaml"
    if not manifest.exists():
        return set()
    found = read_document(manifest)
    entries = found.get("runs") if isinstance(found, dict) else None
    if not isinstance(entries, dict):  # somebody else's manifest
        return set()
    return {folder.parent / str(name) for name, about in entries.items() if "left_out" in (about or ())}


def load_runs(path: str | Path) -> list[Run]:
    """Reads and checks a run file, or several one after another; cluster files are looked up beside it.

    Raises:
        ProfileError: one line that names the file, the line and what is wrong with it.
        ScenarioError: the file cannot be read.
    """
    header: Mapping[str, Any] | None = None
    runs: list[Run] = []
    for place, line in read_documents(Path(path)):
        if isinstance(line, CpsimError):
            raise ProfileError(f"{line}; is the file cut off?")
        if not isinstance(line, dict):
            raise ProfileError(f"{place}: expected a JSON object, got {type(line).__name__}")
        if "format" in line:
            header = _header(place, line)
        elif header is None:
            raise ProfileError(f"{place}: expected a header with format '{FORMAT}'; is this a file of real runs?")
        else:
            runs.append(_run(place, line, header, Path(path).parent))
    if header is None:
        raise ProfileError(f"{path}: empty file; expected a header line and runs, as `cpsim run` writes them")
    return runs


def _header(place: str, line: dict[str, Any]) -> dict[str, Any]:
    if line["format"] != FORMAT:
        raise ProfileError(
            f"{place}: expected format '{FORMAT}', got {shown(line['format'])}; is this a file of real runs?"
        )
    if line.get("schema") != SCHEMA:
        raise ProfileError(f"{place}: schema {shown(line.get('schema'))}, this version reads {SCHEMA}; update cpsim")
    missing = [key for key in _HEADER_KEYS if key not in line]
    if missing:
        raise ProfileError(f"{place}: header lacks {', '.join(missing)}")
    for key in _HEADER_KEYS:
        if not isinstance(line[key], int if key == "num_gpus" else str):
            raise ProfileError(f"{place}: {key}: expected what `cpsim run` writes, got {shown(line[key])}")
    return {key: value for key, value in line.items() if key not in ("format", "schema")}


def _run(place: str, line: dict[str, Any], header: Mapping[str, Any], folder: Path) -> Run:
    if not isinstance(line.get("scenario"), dict):
        raise ProfileError(f"{place}: run without 'scenario'")
    scenario = scenario_of(f"{place}: scenario", line["scenario"], folder)
    if isinstance(scenario, CpsimError):
        raise ProfileError(str(scenario))
    if "error" in line:
        return Run(scenario=scenario, error=str(line["error"]), header=header)
    passes = line.get("passes")
    if not isinstance(passes, dict) or tuple(passes) not in (scenario.passes, (scenario.pass_,)):
        raise ProfileError(f"{place}: expected passes {', '.join(scenario.passes)}, or an error")
    return Run(
        scenario=scenario,
        passes={name: _pass_run(f"{place}: {name}", entry, scenario.gpus) for name, entry in passes.items()},
        header=header,
    )


def _pass_run(place: str, entry: Any, num_ranks: int) -> PassRun:
    try:
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in entry.items()}
        run = PassRun(**fields)
    except (TypeError, AttributeError):
        names = ", ".join(PassRun.__dataclass_fields__)
        raise ProfileError(f"{place}: expected {names}; is the file from another version?") from None
    for name in ("samples_s", "rank_time_s", "warmup_s", "after_gap_s", "attention_s"):
        if not _all_are(getattr(run, name), _TIME):
            raise ProfileError(f"{place}: {name} must be a list of seconds, above 0, at most {_TIME.high:g}")
    if not _all_are((run.peak_memory_bytes,), _SIZE):
        raise ProfileError(f"{place}: peak_memory_bytes must be bytes, got {shown(run.peak_memory_bytes)}")
    memory = run.memory_bytes
    if not isinstance(memory, dict) or not all(_all_are(sizes, _SIZE) for sizes in memory.values()):
        raise ProfileError(f"{place}: memory_bytes must be lists of bytes by name, got {shown(memory)}")
    if not isinstance(run.clock, dict) or not all(_all_are(values, _CLOCK) for values in run.clock.values()):
        raise ProfileError(f"{place}: clock must be lists of numbers by name, got {shown(run.clock)}")
    if not run.samples_s or len(run.rank_time_s) != num_ranks:
        raise ProfileError(f"{place}: expected samples and one rank_time_s for each of {num_ranks} ranks")
    return run


def _all_are(values: object, quantity: Quantity) -> bool:
    """Whether values are a list of numbers, each one that exists."""
    try:
        return isinstance(values, list | tuple) and all(quantity.read(v) is v for v in values)
    except ValueError:
        return False


def _pass_record(run: PassRun) -> dict[str, Any]:
    seconds = {name: _rounded(getattr(run, name)) for name in ("samples_s", "rank_time_s", "warmup_s", "attention_s")}
    return asdict(run) | seconds


def _rounded(seconds: Sequence[float]) -> list[float]:
    return [round(s, 9) for s in seconds]
