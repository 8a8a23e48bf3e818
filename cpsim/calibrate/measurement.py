"""The measurement file: JSON Lines, a header with the provenance, then one line per measured point with raw samples.

Every point has `op`, `samples_s` (raw samples in seconds, in run order), in some files `at_s` (seconds from the start
of the processes until it was written) and the parameters of its op:

    attention     kernel, pass, num_heads, num_kv_heads, head_dim, causal, varlen, q_lens, k_lens, sm_clock_hz, and
                  `rested` where the GPU rested before every call, so that the clock was the full one, or `pause_s`,
                  the idle time between two calls; where the mask is another, its name, options and area, and q_lens
                  are its documents
    memory        as attention, and peak_bytes: inputs of a call and all that is allocated until it ends
    elementwise   kind, nbytes (read and written)
    rows          a kernel that moves rows: kind, nbytes, and where these were of several lengths: row_bytes,
                  index (type of the index), order (in order or shuffled)
    cached        as elementwise, on what the cache may hold: reused, bytes touched from one use of a byte to the next;
                  stream_s and graph_s, seconds of one of many in a row, which tell what events add to a kernel
    gemm          kind (forward, dgrad or wgrad of a linear layer), m, n, k: a product [m, k] x [k, n] in bf16
    layer_op      a memory-bound op of transformer layers: kind, variant, width (elements of a row), nbytes
    linear        a scan of a layer with a state instead of keys: kernel, pass, key_heads, value_heads, key_dim,
                  value_dim, chunk (tokens computed as products at once), q_lens, states (one comes in, one goes out)
    layer         forward and backward pass of one layer of one tensor-parallel rank: model, tp, q_lens, kernel,
                  recompute, variant, sizes: saved_bytes (kept between the passes) and peak_bytes, without weights
    host          kind (wall seconds that the host spends on one launch), and where others' calls were timed: place
    graph         of one attention call of so many tokens, captured; many_s: of `rounds` more; both_s: of as many, a
                  message of nbytes before each but the first; attention_s, message_s: both between two events; held_s:
                  of one call, launched while the GPU is kept waiting; evicted_s: and with nothing useful in its cache;
                  streamed_one_s, streamed_many_s, streamed_both_s: not captured, launched by a host that is far ahead
    collective    kind, num_ranks, nbytes (S of nccl-tests)
    transfer      kind, num_ranks, nbytes (per message)
    fabric        between (emulated) nodes: kind, nbytes, num_nodes, gpus_per_node, and flows or num_ranks, num_groups
    overlap       a computation and a communication, alone and together, one inside the other
    interference  two endless streams of ops, alone and together
    sustained     one kernel over seconds of load
    check         relative error of a kernel against plain fp32 attention
    power         watts of every GPU at the end of a second of one kind of load
    error         the point could not be measured; `failed` is its op, `message` says why

Only this module knows the format. Samples of a distributed op are maxima over its ranks.

Times of kernels lie between two CUDA events, which take longer on a host with several GPUs. A file is read as if a pair
of events had cost what it does on a host with one: `events_s` of its header, or what EVENTS_S says, is the difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

from cpsim.calibrate.points import read_fields, read_point
from cpsim.case.files import as_profile_error, parse_json, read_lines
from cpsim.errors import CpsimError, ProfileError, shown
from cpsim.runtime.files import write

SCHEMA = 1
ROUNDS = 4
"""Host calls `in steps` are timed so many times over; their samples are in the order of the rounds."""
LOAD_BYTES: Final = 2**27
"""Size of the messages of a GPU's load, whose power is measured."""
EVENTS_S: Final = (1.25e-6, 2.96e-6)
"""Between two CUDA events that the GPU meets one after the other, on a host with one GPU and on one with several: what
headers of `h100-graphs-1.jsonl` and `h100x2-graphs-1.jsonl` say, which stand for all files without `events_s`."""
_OF_KERNELS = ("attention", "elementwise", "cached", "gemm", "layer_op", "linear")
_HEADER_KEYS = ("gpu", "num_gpus", "torch", "date", "commit", "command")

Point = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """One measurement file in memory."""

    source: str
    """File name, without folder."""
    header: dict[str, Any]
    """Provenance: gpu, num_gpus, driver, cuda, nccl, torch, kernels, date, commit, command, ..."""
    points: tuple[Point, ...]
    """In run order."""

    def of(self, op: str) -> list[Point]:
        """The points of one op, in run order."""
        return [point for point in self.points if point["op"] == op]


class Writer:
    """Writes a measurement file line by line, each flushed, so that an interrupted run loses nothing."""

    def __init__(self, file: TextIO, header: dict[str, Any] | None, **always: Any) -> None:
        """Begins a file, or goes on with one.

        Args:
            file: where lines go.
            header: provenance; None where the file has a header.
            always: parameters of every point.
        """
        self._file, self._always = file, always
        if header is not None:
            self._write({"schema": SCHEMA, "format": "cpsim-measurement", **header})

    def add(self, op: str, samples_s: Iterable[float] = (), **parameters: Any) -> None:
        """Appends one point; samples are rounded to 0.1 ns."""
        self._write({"op": op, **parameters, **self._always, "samples_s": [round(s, 10) for s in samples_s]})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()


_IDENTITY = (
    "kernel",
    "pass",
    "num_heads",
    "num_kv_heads",
    "causal",
    "varlen",
    "q_lens",
    "k_lens",
    "rested",
    "kind",
    "variant",
    "which",
    "num_ranks",
    "nbytes",
    "a",
    "b",
    "inside",
    "lead_s",
    "mask",
    "options",
    "window",
    "value_dim",
    "key_heads",
    "value_heads",
    "key_dim",
    "chunk",
    "states",
    "m",
    "n",
    "k",
    "width",
    "model",
    "tp",
    "recompute",
    "reused",
)


def point_key(op: str, **parameters: Any) -> str:
    """What a point measures, equal for points that measure the same; further parameters and results do not count."""
    known = parameters | {name: parameters.get(name) or None for name in ("window", "value_dim")}  # 0 is none
    return json.dumps([op, *(known.get(name) for name in _IDENTITY)])


def known_points(path: Path) -> set[str]:
    """Keys of all points that a file holds, also of those that could not be measured."""
    asked = ({**point, "op": point.get("failed", point["op"])} for point in load(path).points)
    return {point_key(**point) for point in asked}


def check_machine(path: Path, gpu: str, num_gpus: int) -> None:
    """Whether a file, if it holds anything, is of this machine, so that a run can go on with it.

    Raises:
        ProfileError: another GPU, or another number of them.
    """
    with as_profile_error():
        first = next((line for _, line in read_lines(path)), "")
    if not first:
        return
    _check_header(path, header := _parse(path, 1, first))
    theirs = header["num_gpus"], header["gpu"]
    if theirs != (num_gpus, gpu):
        here = f"here are {num_gpus} x {gpu}; start a new file"
        raise ProfileError(f"{path}: measured on {theirs[0]} x {theirs[1]}, {here}")


def cut_broken_end(path: Path) -> None:
    """Takes away a last line that an interrupted run did not write to its end."""
    whole = path.read_bytes()
    write(path, whole[: whole.rfind(b"\n") + 1])


def load(path: str | Path) -> Measurements:
    """Reads and checks a measurement file; times of kernels are as between events on a host with one GPU.

    Raises:
        ProfileError: one line that names the file, the line and what is wrong with it.
    """
    path = Path(path)
    with as_profile_error():
        rows = [(number, _parse(path, number, line)) for number, line in _written(path)]
    if not rows:
        raise ProfileError(f"{path}: empty measurement file; expected a header line and points")
    (_, header), *points = rows
    _check_header(path, header)
    read = [_checked_point(path, number, point) for number, point in points]
    header = _fields(path, 1, read_fields, header)
    return Measurements(source=path.name, header=header, points=tuple(_as_on_one_gpu(p, header) for p in read))


def _as_on_one_gpu(point: Point, header: Mapping[str, Any]) -> Point:
    """A point with times of kernels less what events took longer than on a host with one GPU.

    A `graph` point says of how many GPUs it is.
    """
    gpus = int(header.get("gpus_of_host", header["num_gpus"]))
    more_s = float(header.get("events_s", EVENTS_S[gpus > 1])) - EVENTS_S[0]
    if header.get("clock_source") != "CUDA events" or point["op"] not in (*_OF_KERNELS, "graph"):
        return point
    timed = "attention_s" if point["op"] == "graph" else "samples_s"
    of_graph = {"num_gpus": gpus} if point["op"] == "graph" else {}
    return {**point, timed: [max(s - more_s, s / 2) for s in point[timed]], **of_graph}


def _written(path: Path) -> Iterator[tuple[int, str | CpsimError]]:
    """Lines that are not empty, with their numbers."""
    return ((number, line) for number, line in read_lines(path) if isinstance(line, CpsimError) or line.strip())


def _parse(path: Path, number: int, line: str | CpsimError) -> dict[str, Any]:
    if isinstance(line, CpsimError):
        raise ProfileError(str(line))
    with as_profile_error("; is the file cut off?"):
        row = parse_json(line, f"{path}:{number}")
    if not isinstance(row, dict):
        raise ProfileError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
    return row


def _check_header(path: Path, header: dict[str, Any]) -> None:
    if header.get("format") != "cpsim-measurement":
        raise ProfileError(f"{path}:1: expected a header with format 'cpsim-measurement'; is this a measurement file?")
    if header.get("schema") != SCHEMA:
        raise ProfileError(f"{path}:1: schema {shown(header.get('schema'))}, this version reads {SCHEMA}; update cpsim")
    missing = [key for key in _HEADER_KEYS if key not in header]
    if missing:
        raise ProfileError(f"{path}:1: header lacks {', '.join(missing)}")


def _fields(
    path: Path, number: int, read: Callable[[dict[str, Any]], dict[str, Any]], row: dict[str, Any]
) -> dict[str, Any]:
    try:
        return read(row)
    except ValueError as error:
        raise ProfileError(f"{path}:{number}: {error}") from None


def _checked_point(path: Path, number: int, point: dict[str, Any]) -> Point:
    if not isinstance(point.get("op"), str):
        raise ProfileError(f"{path}:{number}: point without 'op'")
    samples = point.get("samples_s")
    if not isinstance(samples, list) or not all(isinstance(s, int | float) and 0 <= s < 3600 for s in samples):
        raise ProfileError(f"{path}:{number}: 'samples_s' must be a list of seconds, at least 0")
    if point["op"] not in ("error", "check", "interference", "overlap", "memory") and not samples:
        raise ProfileError(f"{path}:{number}: {shown(point['op'])} point without samples")
    return _fields(path, number, read_point, point)
