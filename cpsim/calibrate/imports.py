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
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cpsim.calibrate.measurement import Point
from cpsim.case.cluster import presets
from cpsim.errors import ProfileError
from cpsim.models.attention.kernels import KERNELS

_RANK: Final = re.compile(
    r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]+\]\s+(.+?)\s*$"
)
_ROW: Final = re.compile(r"\s*(\d+)\s+(\d+)\s+(\w+)\s+(\w+)\s+(-?\d+)\s+(.+)$")
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

    number: int
    group: int
    host: str
    gpu: str


@dataclass(frozen=True, slots=True)
class Row:
    """One size."""

    nbytes: int
    redop: str
    cells: tuple[str, ...]
    """Time in microseconds, algorithm and bus bandwidth in GB/s, wrong values: out of place, then in place."""


@dataclass(slots=True)
class Test:
    """One test of a log."""

    name: str
    ranks: list[Rank] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


def read_nccl_log(path: Path) -> tuple[dict[str, Any], list[Point]]:
    """GPU and number of GPUs, and the points of a log.

    Raises:
        ProfileError: no rows, no list of ranks, another test, or a test whose name the log does not tell.
    """
    text = _text(path)
    tests = [test for test in _tests(text, path) if test.rows]
    if not tests:
        raise ProfileError(f"{path}: expected rows of an nccl-tests log (size, count, type, ...), got none")
    points = [point for test in tests for point in _points(test, path)]
    gpus = sorted({rank.gpu for test in tests for rank in test.ranks})
    if len(gpus) != 1:
        raise ProfileError(f"{path}: expected GPUs of one type, got {', '.join(gpus)}")
    version = re.search(r"nccl-library=(\d+)|NCCL version ([\d.]+)", text)
    nccl = next((v for v in version.groups() if v), "") if version else ""
    if nccl.isdigit():
        nccl = f"{int(nccl) // 10000}.{int(nccl) // 100 % 100}.{int(nccl) % 100}"
    return {"gpu": gpus[0], "num_gpus": max(len(test.ranks) for test in tests), "nccl": nccl}, points


def _tests(text: str, path: Path) -> Iterator[Test]:
    """Tests in the order of the log; a line about threads or a list of ranks begins one."""
    named, test = path.name, None
    for line in text.splitlines():
        if mention := re.search(r"(\w+)_perf\b", line):
            named = mention[0]
        rank, row = _RANK.search(line), _ROW.match(line)
        if "nThread" in line or (rank and test and test.rows):
            if test:
                yield test
            test = Test(named)
        if rank:
            test = test or Test(named)
            test.name = named
            test.ranks.append(Rank(int(rank[1]), int(rank[2] or 0), rank[3], rank[4]))
        elif row and not line.lstrip().startswith("#"):
            if test is None or not test.ranks:
                raise ProfileError(f"{path}: rows without a list of ranks ('# Rank 0 Pid ...'); give the whole log")
            test.rows.append(_row(row, path))
    if test:
        yield test


def _row(found: re.Match[str], path: Path) -> Row:
    cells = tuple(found[6].split())
    if len(cells) != 8:
        raise ProfileError(f"{path}: expected 8 columns after the root, got {len(cells)}: {found[0].strip()[:80]}")
    return Row(int(found[1]), found[4], cells)


def _kind(test: Test, path: Path) -> str:
    """Which test it is: by the name in the log or of the file, else by what only one test prints."""
    named = [kind for name, kind in _TESTS.items() if name in test.name]
    if named:
        return named[0]
    row = max(test.rows, key=lambda row: row.nbytes)
    algorithm, bus, unchecked = float(row.cells[1]), float(row.cells[2]), [row.cells[i] == "N/A" for i in (3, 7)]
    whole = algorithm > 1 and bus > 0.995 * algorithm
    if algorithm > 1 and row.redop != "none":
        return "all_reduce" if whole else "reduce_scatter"
    if whole:
        return "sendrecv"
    if algorithm > 1 and not unchecked[0]:
        return "all_to_all" if unchecked[1] else "all_gather"
    names = ", ".join(f"{name}_perf" for name in _TESTS)
    raise ProfileError(f"{path}: which test is this? put its name into the name of the file: {names}")


def _points(test: Test, path: Path) -> Iterator[Point]:
    groups: dict[int, list[Rank]] = {}
    for rank in test.ranks:
        groups.setdefault(rank.group, []).append(rank)
    hosts = list(dict.fromkeys(rank.host for rank in test.ranks))
    per_node, sizes = len(test.ranks) // len(hosts), {len(group) for group in groups.values()}
    spans = {len({rank.host for rank in group}) for group in groups.values()}
    if len(sizes) > 1 or len(spans) > 1 or any([r.host for r in test.ranks].count(h) != per_node for h in hosts):
        raise ProfileError(f"{path}: expected equal nodes and equal groups, got {len(test.ranks)} ranks on {hosts}")
    num_ranks, nodes = sizes.pop(), spans.pop()
    ring = [[i, (i + 1) % num_ranks] for i in range(num_ranks)]
    if nodes not in (1, len(hosts)):
        raise ProfileError(f"{path}: expected groups on one node or on all {len(hosts)}, got {nodes}")
    kind = _kind(test, path)
    if kind == "sendrecv":
        shared: Point = {"op": "transfer", "kind": "ring", "num_ranks": num_ranks}
    else:
        shared = {"op": "collective", "kind": kind, "num_ranks": num_ranks}
    if nodes > 1:
        shared |= {"op": "fabric", "num_nodes": nodes, "gpus_per_node": per_node}
        shared |= {"flows": ring} if kind == "sendrecv" else {"num_groups": len(groups)}
    for row in test.rows:
        micros = row.cells[4 if kind == "all_reduce" and row.cells[4] != "N/A" else 0]
        if row.nbytes and micros != "N/A" and float(micros) > 0:
            yield {**shared, "nbytes": row.nbytes, "samples_s": [round(float(micros) * 1e-6, 10)]}


# --- tables of kernels ---

_COLUMNS: Final = {
    "wd": "pass",
    "seqlen": "tokens",
    "seq_len_tokens": "tokens",
    "q_heads": "heads",
    "tflop_per_s": "tflops",
    "tflops_per_s": "tflops",
}
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
    kv_heads, head_dim. Lines that begin with # say where the table comes from.

    Raises:
        ProfileError: columns or values are missing or are no numbers, or the table has several GPUs.
    """
    lines = _text(path).splitlines()
    source = " ".join(line.lstrip("# ").strip() for line in lines if line.startswith("#"))
    rows = list(csv.DictReader(io.StringIO("\n".join(line for line in lines if not line.startswith("#")))))
    table = [{_COLUMNS.get(name, name): value for name, value in row.items()} for row in rows]
    missing = [name for name in _NEEDED if not table or name not in table[0]]
    if missing or not {"tflops", "ms"} & table[0].keys():
        wanted = ", ".join([*_NEEDED, "tflops (or ms)"])
        raise ProfileError(f"{path}: expected columns {wanted}, got no {', '.join(missing or ['tflops'])}")
    gpus = {row.get("gpu") or given.gpu for row in table}
    gpu = given.gpu or (gpus.pop() if len(gpus) == 1 else None)
    if gpu is None:
        raise ProfileError(f"{path}: which GPU? give --gpu, e.g. {' or '.join(sorted(map(str, gpus)))}")
    points: list[Point] = []
    left: dict[str, int] = {}
    for number, row in enumerate(table, 1):
        if row.get("gpu", gpu) != gpu:
            continue
        reason = _unknown(row)
        if reason:
            left[reason] = left.get(reason, 0) + 1
            continue
        try:
            points.append(_kernel_point(row, given))
        except (TypeError, ValueError) as error:
            raise ProfileError(f"{path}: row {number}: {error}; expected numbers, got {row}") from None
    header = {"gpu": gpu, "num_gpus": 1, "num_sms": _num_sms(gpu, given), "published": source or path.name}
    kept = _long_enough(points)
    if len(kept) < len(points):
        left["near the shortest of their kernel, so that launches may decide"] = len(points) - len(kept)
    return header, kept, [f"{count} rows: {reason}" for reason, count in left.items()]


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
        return f"kernel {row['kernel']} {row['pass']} has no model"
    if mask not in _MASKS:
        return f"mask {row['mask']} without a model"
    return "documents without their lengths" if mask.endswith("document") and not row.get("documents") else ""


def _kernel_point(row: dict[str, str], given: Table) -> Point:
    heads = int(row.get("heads") or given.heads or 0)
    kv_heads, dim = int(row.get("kv_heads") or given.kv_heads or heads), int(row.get("head_dim") or given.head_dim)
    if heads < 1:
        raise ValueError("how many heads? add a column or give --heads")
    tokens = row["tokens"].lower()
    total = int(tokens.removesuffix("k")) * (1024 if tokens.endswith("k") else 1)
    lens = [int(n) for n in row["documents"].split()] if row.get("documents") else [total]
    causal = _MASKS[row["mask"].removesuffix("_mask")]
    area = sum(n * (n + 1) / 2 if causal else n * n for n in lens)
    flop = 4 * area * heads * dim * (2.5 if row["pass"] == "bwd" else 1.0)
    seconds = float(row["ms"]) / 1e3 if "ms" in row else flop / (float(row["tflops"]) * 1e12)
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
        "samples_s": [seconds],
    }


def _num_sms(gpu: str, given: Table) -> int:
    known = {cluster.gpu.name: cluster.gpu.num_sms for cluster in presets().values()}
    count = given.num_sms or next((count for name, count in known.items() if name in gpu.lower()), None)
    if count is None:
        raise ProfileError(f"how many SMs has {gpu}? give --num-sms; known are {', '.join(known)}")
    return count


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
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: cannot be read: {error}") from error
