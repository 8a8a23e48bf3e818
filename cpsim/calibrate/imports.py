"""Other people's measurements as points of ours: logs of nccl-tests, and tables of kernels' TFLOP/s in CSV.

A log holds what `all_gather_perf`, `reduce_scatter_perf`, `alltoall_perf`, `all_reduce_perf` or `sendrecv_perf` print,
one test after another: the ranks with their hosts and GPUs, then a row for every size. Times are those of calls in
place for all-reduce and out of place for the others, as schedules make them. They are means over calls back to back,
so small sizes look faster than they are in a program. On one host rows become points of op `collective` or
`transfer`, on several of op `fabric`.

Reference: NVIDIA nccl-tests 2.13 to 2.17, src/common.cu (columns) and doc/PERFORMANCE.md (sizes, bus bandwidth).
"""

from __future__ import annotations

import csv
import datetime
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cpsim.calibrate.measurement import Point
from cpsim.calibrate.points import read_point
from cpsim.case.files import as_profile_error, read_text
from cpsim.case.gpu import gpu_of_driver, gpus
from cpsim.errors import QUOTED, ProfileError, cut, plain, shown
from cpsim.models.attention.kernels import KERNELS
from cpsim.units import MEASURED_S, Quantity, number_or_text

_RANK: Final = re.compile(
    r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]+\]\s+(.+?)\s*$"
)
_ROW: Final = re.compile(r"\s*(\d+)\s+(\d+)\s+(\w+)\s+(\w+)\s+(-?\d+)\s+(.+)$")
LONGEST_LINE: Final = 1000
"""Characters of a line; no row is longer."""
_TIME: Final = Quantity("seconds", 1e-9, 1e4)
_SIZE: Final = Quantity("byte", 1, 1e16)
_GIGABYTES: Final = Quantity("GB/s", 0, 1e6)
_TESTS: Final = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_reduce": "all_reduce",
    "sendrecv": "sendrecv",
}


@dataclass(frozen=True, slots=True)
class Rank:
    """One line of a log's list of ranks."""

    line: int
    number: int
    group: int
    host: str
    gpu: str


@dataclass(frozen=True, slots=True)
class Place:
    """What a row says of calls out of place, or in place."""

    time_s: float | None
    """None where it was not measured."""
    algorithm: float
    """Bandwidth [GB/s]: size over time."""
    bus: float
    """Bandwidth of the busiest port [GB/s]."""
    checked: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One size."""

    line: int
    nbytes: int
    redop: str
    out: Place
    inside: Place


@dataclass(slots=True)
class Test:
    """One test of a log."""

    name: str
    per_process: int = 1
    """GPUs of a process, by the line about threads."""
    ranks: list[Rank] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


def read_nccl_log(path: Path) -> tuple[dict[str, Any], list[Point]]:
    """GPU and number of GPUs, and the points of a log.

    Raises:
        ProfileError: no rows, no list of ranks, another test, a test whose name the log does not tell, ranks that are
            missing, or rows that cannot be.
    """
    text = _text(path)
    tests = [test for test in _tests(text, path) if test.rows]
    if not tests:
        raise ProfileError(f"{path}: expected rows of an nccl-tests log (size, count, type, ...), got none")
    points = [point for test in tests for point in _points(test, path)]
    gpus = sorted({rank.gpu for test in tests for rank in test.ranks})
    if len(gpus) != 1:
        raise ProfileError(f"{path}: expected GPUs of one type, got {shown(gpus)}")
    version = re.search(r"nccl-library=(\d{1,9})\b|NCCL version ([\d.]{1,20})", text)
    nccl = next((v for v in version.groups() if v), "") if version else ""
    if nccl.isdigit():
        nccl = f"{int(nccl) // 10000}.{int(nccl) // 100 % 100}.{int(nccl) % 100}"
    return {"gpu": gpus[0], "num_gpus": max(len(test.ranks) for test in tests), "nccl": nccl}, points


def _tests(text: str, path: Path) -> Iterator[Test]:
    """Tests in the order of the log; a line about threads or a list of ranks begins one."""
    named, test = path.name, None
    for number, line in enumerate(text.split("\n"), start=1):
        if len(line) > LONGEST_LINE:
            continue
        if mention := re.search(r"(\w+)_perf\b", line):
            named = mention[0]
        rank, row = _RANK.search(line), _ROW.match(line)
        if "nThread" in line or (rank and test and test.rows):
            if test:
                yield test
            threads = re.search(r"nThread\s+(\d{1,6})\s+nGpus\s+(\d{1,6})", line)
            test = Test(named, max(1, int(threads[1]) * int(threads[2])) if threads else 1)
        if rank:
            test = test or Test(named)
            test.name = named
            test.ranks.append(Rank(number, int(rank[1]), int(rank[2] or 0), rank[3], rank[4]))
        elif row and not line.lstrip().startswith("#"):
            if test is None or not test.ranks:
                raise ProfileError(f"{path}: rows without a list of ranks ('# Rank 0 Pid ...'); give the whole log")
            try:
                test.rows.append(_row(row, number))
            except ValueError as error:
                raise ProfileError(f"{path} line {number}: {error}: {shown(' '.join(line.split()))}") from None
    if test:
        yield test


def _row(found: re.Match[str], line: int) -> Row:
    cells = found[6].split()
    if len(cells) != 8:
        raise ValueError(f"expected 8 columns after the root, got {len(cells)}")
    nbytes = int(found[1])
    return Row(line, nbytes, found[4], *(_place(cells[i : i + 4], nbytes) for i in (0, 4)))


def _place(cells: Sequence[str], nbytes: int) -> Place:
    """One half of a row: time [us], algorithm and bus bandwidth [GB/s], wrong values.

    Raises:
        ValueError: it is not what a GPU can have measured.
    """
    if cells[0] == "N/A" or nbytes == 0:
        return Place(None, 0.0, 0.0, False)
    time_s = _TIME.read(float(cells[0]) * 1e-6)
    algorithm, bus = (_GIGABYTES.read(float(cell)) for cell in cells[1:3])
    by_time = _SIZE.read(nbytes) / time_s / 1e9
    if abs(by_time - algorithm) > 0.01 + 0.02 * algorithm:
        raise ValueError(f"expected the size over the time, {by_time:.4g} GB/s, as algbw, got {algorithm:g}")
    return Place(time_s, algorithm, bus, cells[3] != "N/A")


def _kind(test: Test, path: Path) -> str:
    """Which test it is: by the name in the log or of the file, else by what only one test prints."""
    named = [kind for name, kind in _TESTS.items() if name in test.name]
    if named:
        return named[0]
    row = max(test.rows, key=lambda row: row.nbytes)
    algorithm, bus = row.out.algorithm, row.out.bus
    whole = algorithm > 1 and bus > 0.995 * algorithm
    if algorithm > 1 and row.redop != "none":
        return "all_reduce" if whole else "reduce_scatter"
    if whole:
        return "sendrecv"
    if algorithm > 1 and row.out.checked:
        return "all_gather" if row.inside.checked else "all_to_all"
    names = ", ".join(f"{name}_perf" for name in _TESTS)
    raise ProfileError(f"{path}: which test is this? put its name into the name of the file: {names}")


def _check_ranks(test: Test, path: Path) -> None:
    """Whether the list of ranks is whole: counted from 0, through all groups or in each of them.

    Raises:
        ProfileError: one is missing or listed twice.
    """
    groups = [[rank for rank in test.ranks if rank.group == group] for group in {rank.group for rank in test.ranks}]
    gap = _gap(test.ranks)
    if gap and (len(groups) == 1 or any(map(_gap, groups))):
        expected, rank = gap
        raise ProfileError(
            f"{path} line {rank.line}: expected rank {expected} next, got rank {rank.number}; give the whole log of a "
            f"run with all its ranks"
        )
    if len(test.ranks) % test.per_process:
        raise ProfileError(
            f"{path} line {test.ranks[-1].line}: expected a multiple of {test.per_process} ranks, nThread x nGpus, "
            f"got {len(test.ranks)}; give the whole log"
        )


def _gap(ranks: Sequence[Rank]) -> tuple[int, Rank] | None:
    """The first number, counted from 0, that no rank has, and the rank that comes instead; None where there is none."""
    in_order = sorted(ranks, key=lambda rank: rank.number)
    return next(((number, rank) for number, rank in enumerate(in_order) if rank.number != number), None)


def _check_bus(test: Test, kind: str, num_ranks: int, path: Path) -> None:
    """Whether bus bandwidths are those of so many ranks.

    Reference: NVIDIA nccl-tests, doc/PERFORMANCE.md (bus bandwidth).

    Raises:
        ProfileError: they are not, so that ranks are missing in the list.
    """
    factor = 1.0 if kind == "sendrecv" else (2 if kind == "all_reduce" else 1) * (num_ranks - 1) / num_ranks
    for row in test.rows:
        expected = factor * row.out.algorithm
        if row.out.time_s is not None and abs(row.out.bus - expected) > 0.01 + 1e-3 * expected:
            raise ProfileError(
                f"{path} line {row.line}: expected a bus bandwidth of {expected:.2f} GB/s for {kind} of {num_ranks} "
                f"ranks, got {row.out.bus:g}; are ranks missing in the list?"
            )


def _points(test: Test, path: Path) -> Iterator[Point]:
    _check_ranks(test, path)
    groups: dict[int, list[Rank]] = {}
    for rank in test.ranks:
        groups.setdefault(rank.group, []).append(rank)
    hosts = list(dict.fromkeys(rank.host for rank in test.ranks))
    per_node, sizes = len(test.ranks) // len(hosts), {len(group) for group in groups.values()}
    spans = {len({rank.host for rank in group}) for group in groups.values()}
    if len(sizes) > 1 or len(spans) > 1 or any([r.host for r in test.ranks].count(h) != per_node for h in hosts):
        raise ProfileError(
            f"{path}: expected equal nodes and equal groups, got {len(test.ranks)} ranks on {shown(hosts)}"
        )
    num_ranks, nodes = sizes.pop(), spans.pop()
    ring = [[i, (i + 1) % num_ranks] for i in range(num_ranks)]
    if nodes not in (1, len(hosts)):
        raise ProfileError(f"{path}: expected groups on one node or on all {len(hosts)}, got {nodes}")
    kind = _kind(test, path)
    _check_bus(test, kind, num_ranks, path)
    if kind == "sendrecv":
        shared: Point = {"op": "transfer", "kind": "ring", "num_ranks": num_ranks}
    else:
        shared = {"op": "collective", "kind": kind, "num_ranks": num_ranks}
    if nodes > 1:
        shared |= {"op": "fabric", "num_nodes": nodes, "gpus_per_node": per_node}
        shared |= {"flows": ring} if kind == "sendrecv" else {"num_groups": len(groups)}
    for row in test.rows:
        in_place = kind == "all_reduce" and row.inside.time_s is not None
        time_s = row.inside.time_s if in_place else row.out.time_s
        if time_s is not None:
            yield {**shared, "nbytes": row.nbytes, "samples_s": [round(time_s, 10)]}


# --- tables of kernels ---

_COLUMNS: Final = {
    "wd": "pass",
    "seqlen": "tokens",
    "seq_len_tokens": "tokens",
    "q_heads": "heads",
    "tflop_per_s": "tflops",
    "tflops_per_s": "tflops",
}
_RATE: Final = Quantity("FLOP/s", 1e6, 1e19)
_NEEDED: Final = ("kernel", "pass", "mask", "tokens")
_MASKS: Final = {"full": False, "causal": True, "full_document": False, "causal_document": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What a table leaves out."""

    gpu: str | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int = 128
    num_sms: int | None = None


def read_kernel_table(path: Path, given: Table) -> tuple[dict[str, Any], list[Point], list[str]]:
    """GPU and source, the points of a CSV table, and what was left out, in words.

    Columns: kernel, pass (fwd, bwd), mask (full, causal; with a column `documents`, lengths separated by spaces, also
    full_document, causal_document), tokens (8192 or 8k), tflops or ms, and where not given otherwise gpu, heads,
    kv_heads, head_dim; rested (yes) where pauses between calls keep the full clock. Lines that begin with # say where
    the table comes from.

    Raises:
        ProfileError: columns or values are missing or are no numbers, or the table has several GPUs.
    """
    source, table = _rows(path)
    missing = [name for name in _NEEDED if not table or name not in table[0][1]]
    if missing or not {"tflops", "ms"} & table[0][1].keys():
        wanted = ", ".join([*_NEEDED, "tflops (or ms)"])
        raise ProfileError(f"{path}: expected columns {wanted}, got no {', '.join(missing or ['tflops'])}")
    gpus = {row.get("gpu") or given.gpu for _, row in table}
    gpu = given.gpu or (gpus.pop() if len(gpus) == 1 else None)
    if gpu is None:
        raise ProfileError(f"{path}: which GPU? give --gpu, e.g. {shown(' or '.join(sorted(map(str, gpus))))}")
    points: list[Point] = []
    left: dict[str, int] = {}
    for number, row in table:
        if row.get("gpu", gpu) != gpu:
            continue
        reason = _unknown(row)
        if reason:
            left[reason] = left.get(reason, 0) + 1
            continue
        try:
            points.append(read_point(_kernel_point(row, given)))
        except ValueError as error:
            raise ProfileError(f"{path} line {number}: {error}") from None
    header = {"gpu": gpu, "num_gpus": 1, "num_sms": _num_sms(gpu, given), "published": source or path.name}
    kept = _long_enough(points)
    if len(kept) < len(points):
        left["near the shortest of their kernel, so that launches may decide"] = len(points) - len(kept)
    return header, kept, [f"{count} rows: {reason}" for reason, count in left.items()]


def _rows(path: Path) -> tuple[str, list[tuple[int, dict[str, str]]]]:
    """What comments of a table say, and its rows by names of columns, with the numbers of their lines."""
    lines = [(number, line) for number, line in enumerate(_text(path).split("\n"), start=1) if line.strip()]
    source = " ".join(line.lstrip("# ").strip() for _, line in lines if line.startswith("#"))
    kept = [(number, line) for number, line in lines if not line.startswith("#")]
    reader, table = csv.reader(line for _, line in kept), []
    names: list[str] = []
    try:
        for cells in reader:
            number = kept[reader.line_num - 1][0]
            if not names:
                names = [_COLUMNS.get(name.strip(), name.strip()) for name in cells]
                if len(set(names)) < len(names):
                    raise ProfileError(f"{path} line {number}: expected every column once, got {shown(cells)}")
            elif len(cells) != len(names):
                raise ProfileError(
                    f"{path} line {number}: expected {len(names)} cells, got {len(cells)}: {shown(cells)}"
                )
            else:
                table.append((number, dict(zip(names, map(str.strip, cells), strict=True))))
    except csv.Error as error:
        raise ProfileError(f"{path} line {reader.line_num}: {error}") from None
    return source, table


LAUNCH_S: Final = 1e-3
LAUNCHED: Final = 2.0
"""Published tables time calls with their launches: those shorter than a time, which a backward pass from Python takes,
and a multiple of the shortest call may show nothing else."""


def _long_enough(points: Sequence[Point]) -> list[Point]:
    """Points whose time is the kernel's rather than the host's."""
    floor: dict[tuple[str, str], float] = {}
    for p in points:
        key = p["kernel"], p["pass"]
        floor[key] = min(p["samples_s"][0], floor.get(key, float("inf")))
    return [p for p in points if p["samples_s"][0] >= min(LAUNCH_S, LAUNCHED * floor[p["kernel"], p["pass"]])]


def _unknown(row: dict[str, str]) -> str:
    """Why a row becomes no point; empty where it does."""
    mask = row["mask"].removesuffix("_mask")
    if (row["kernel"], row["pass"]) not in KERNELS:
        return plain(cut(f"kernel {row['kernel']} {row['pass']}", QUOTED)) + " has no model"
    if mask not in _MASKS:
        return plain(cut(f"mask {row['mask']}", QUOTED)) + " without a model"
    return "documents without their lengths" if mask.endswith("document") and not row.get("documents") else ""


def _kernel_point(row: dict[str, str], given: Table) -> Point:
    heads = _whole(row, "heads", given.heads or 0)
    if heads < 1:
        raise ValueError("how many heads? add a column or give --heads")
    kv_heads, dim = _whole(row, "kv_heads", given.kv_heads or heads), _whole(row, "head_dim", given.head_dim)
    tokens = row["tokens"].lower()
    total = _count(tokens.removesuffix("k"), "tokens") * (1024 if tokens.endswith("k") else 1)
    lens = [_count(n, "documents") for n in row["documents"].split()] if row.get("documents") else [total]
    causal = _MASKS[row["mask"].removesuffix("_mask")]
    area = sum(n * (n + 1) / 2 if causal else n * n for n in lens)
    flop = 4 * area * heads * dim * (2.5 if row["pass"] == "bwd" else 1.0)
    if "ms" in row:
        seconds = _number(row, "ms", "ms", MEASURED_S, 1e-3)
    else:
        seconds = flop / _number(row, "tflops", "TFLOP/s", _RATE, 1e12)
    return {
        "op": "attention",
        "kernel": row["kernel"],
        "pass": row["pass"],
        "family": "published",
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "causal": causal,
        "varlen": len(lens) > 1,
        "q_lens": lens,
        "k_lens": lens,
        **({"rested": True} if row.get("rested", "").lower() in ("yes", "true", "1") else {}),
        "samples_s": [seconds],
    }


def _count(text: str, name: str) -> int:
    if not (text.isdecimal() and len(text) < 12):
        raise ValueError(f"{name}: expected a whole number, got {shown(text)}")
    return int(text)


def _whole(row: dict[str, str], name: str, otherwise: int) -> int:
    return _count(row[name], name) if row.get(name) else otherwise


def _number(row: dict[str, str], name: str, unit: str, quantity: Quantity, factor: float) -> float:
    """A cell in SI units: a number of its column's unit, or with a unit of its own."""
    value = number_or_text(row[name])
    try:
        return quantity.read(value if isinstance(value, str) else value * factor)
    except (ValueError, OverflowError):
        limits = f"{quantity.low / factor:g} to {quantity.high / factor:g} {unit}"
        raise ValueError(f"{name}: expected numbers of {limits}, got {shown(row[name])}") from None


def _num_sms(gpu: str, given: Table) -> int:
    known = gpu_of_driver(gpu)
    if given.num_sms is None and known is None:
        raise ProfileError(f"how many SMs has {cut(gpu, 60)}? give --num-sms; known are {', '.join(gpus())}")
    return given.num_sms or known.num_sms  # type: ignore[union-attr]


# --- both ---


def import_files(paths: Sequence[Path], given: Table, command: str) -> tuple[dict[str, Any], list[Point], list[str]]:
    """Header and points of one measurement file from logs and tables of one GPU type, and what was left out."""
    headers, points, left = [], [], []
    for path in paths:
        if path.suffix.lower() == ".csv":
            header, found, without = read_kernel_table(path, given)
            left += [f"{path}: {words}" for words in without]
        else:
            header, found = read_nccl_log(path)
        headers.append(header)
        points += found
    gpus = sorted({header["gpu"] for header in headers})
    if len(gpus) != 1 or not points:
        raise ProfileError(f"import: expected points of one GPU type, got {len(points)} of {', '.join(gpus) or 'none'}")
    logs = [path for path in paths if path.suffix.lower() != ".csv"]
    newest = max((path.stat().st_mtime for path in logs), default=None)
    date = "" if newest is None else datetime.datetime.fromtimestamp(newest, datetime.UTC).isoformat(timespec="seconds")
    merged: dict[str, Any] = {}
    for header in headers:
        merged |= {**header, "num_gpus": max(header["num_gpus"], merged.get("num_gpus", 1))}
    files = [path.name for path in paths]
    merged |= {"torch": "", "commit": "", "command": command, "files": files, "date": date}
    return merged, points, left


def _text(path: Path) -> str:
    with as_profile_error():
        return read_text(path)
