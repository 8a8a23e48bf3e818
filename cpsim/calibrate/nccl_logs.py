"""What nccl-tests print, of any year, as points of ours.

A log holds what `all_gather_perf`, `reduce_scatter_perf`, `alltoall_perf`, `all_reduce_perf` or `sendrecv_perf` print,
one test after another: the ranks with their hosts and GPUs, then a row for every size. Lines may carry the tag of a
launcher (`[1,0]<stdout>:`, `[0]`, `0:`, `node-1:`); what one tag printed is one stream, so programs that ran side by
side are told apart. Times of day, colours and marks of quotation before it are taken off. The JSON of `-J` is read,
too. Times are those of calls in place for all-reduce and out of place for the others, as schedules make them. They are
means over calls back to back, so small sizes look faster than they are in a program. On one host rows become points of
op `collective` or `transfer`, on several of op `fabric`; hosts that share an NVLink domain are one.

Reference: NVIDIA nccl-tests 2.0 to 2.18, src/common.cu and src/util.cu (columns, JSON), doc/PERFORMANCE.md (sizes, bus
bandwidth).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

from cpsim.calibrate.measurement import Point
from cpsim.case.files import as_profile_error, parse_json, read_text
from cpsim.errors import ProfileError, shown
from cpsim.units import Quantity

_RANK: Final = re.compile(
    r"\bRank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(?:(\S+)\s+)?device\s+\d+\s+\[[^\]]+\]\s+(.+?)\s*$"
)
_BEFORE: Final = re.compile(
    r"(?:[>\s]*>)?\s*(?=\[\d+,)"  # quoted, before a tag
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,]*(?:Z|[+-]\d\d:?\d\d)?\]? ?"
)
_COLOUR: Final = re.compile(r"\x1b\[[\d;]*m")
_TAG: Final = re.compile(
    r"(\[\d+(?:,\d+)?\](?:<std\w+>)?:?|\[\w+\d+\]:|\[pod/[\w./-]+\]|[\w.-]{1,60}:|[\w.-]{1,60} \|)(?=\s|#)\s?"
)
_ROW: Final = re.compile(r"\s*\d+\s+\d+\s+[a-z]\w*\s+\S")
_HEADER: Final = re.compile(r"#?\s*(?:size|bytes)\s+(?:count|N)\s+type\s")
_COMMAND: Final = re.compile(r"\b\w{1,60}_perf\w{0,60}\b.{0,2000}\s-")
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
_COLUMNS: Final = ("size", "count", "type", "redop", "root")
_PLACE: Final = ("time", "algbw", "busbw", "wrong")
_OTHER_NAMES: Final = {
    "bytes": "size",
    "N": "count",
    "op": "redop",
    "#wrong": "wrong",
    "error": "wrong",
    "res": "wrong",
}
NIC_BYTES_PER_S: Final = 1e11
"""Line rate of the fastest NIC of a GPU, 800 Gbit/s: hosts between which more passes share an NVLink domain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What people say of a log that it does not."""

    gpu: str | None = None
    ranks: int | None = None
    nodes: int | None = None
    domain: int | None = None
    """GPUs of an NVLink domain, where it spans hosts."""


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


NOT_MEASURED: Final = Place(None, 0.0, 0.0, False)


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
    command: str = ""
    """How it was started, where the log shows it."""
    columns: tuple[str, ...] = ()
    """As its header names them."""
    ranks: list[Rank] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Log:
    """What a log says."""

    header: dict[str, Any]
    """GPU, number of GPUs and NCCL's version."""
    points: list[Point]
    notes: list[str]
    """What was assumed or would help."""


def read_nccl_log(path: Path, said: Said | None = None) -> Log:
    """The points of a log.

    Raises:
        ProfileError: no rows, ranks that are missing or stand twice, another test, a test whose name the log does not
            tell, a GPU that it does not name, or rows that cannot be.
    """
    said = said or Said()
    with as_profile_error():
        text = read_text(path)
    tests = list(_json_tests(text, path)) if text.lstrip().startswith("{") else list(_tests(text, path))
    tests = [test for test in tests if test.rows]
    if not tests:
        raise ProfileError(
            f"{path}: expected rows of an nccl-tests log (size, count, type, ...), got none; give what all_gather_perf "
            "or another of its programs prints, or the JSON of its -J"
        )
    others = [test.name for test in tests if _other(test)]
    tests = [_with_ranks(test, said, path) for test in tests if not _other(test)]
    known = ", ".join(f"{name}_perf" for name in _TESTS)
    if not tests:
        raise ProfileError(f"{path}: {', '.join(dict.fromkeys(others))} has no model; those that have are {known}")
    notes = [f"{name} is left out: it has no model" for name in dict.fromkeys(others)]
    points = [point for test in tests for point in _points(test, said, notes, path)]
    gpus = {said.gpu} if said.gpu else {rank.gpu for test in tests for rank in test.ranks}
    if len(gpus) != 1:
        raise ProfileError(
            f"{path}: expected GPUs of one type, got {shown(sorted(map(str, gpus)))}; say --gpu where they are alike"
        )
    gpu = str(gpus.pop())
    if gpu == "NVIDIA Graphics Device":
        raise ProfileError(f"{path}: the driver calls the GPU 'NVIDIA Graphics Device'; say which it is: --gpu gb200")
    most = max(len(test.ranks) for test in tests)
    return Log({"gpu": gpu, "num_gpus": most, "nccl": _version(text)}, points, list(dict.fromkeys(notes)))


def _version(text: str) -> str:
    found = re.search(r"nccl-library=(\d{1,9})\b|NCCL version ([\d.]{1,20})", text)
    nccl = next((v for v in found.groups() if v), "") if found else ""
    return f"{int(nccl) // 10000}.{int(nccl) // 100 % 100}.{int(nccl) % 100}" if nccl.isdigit() else nccl


# --- text ---


def _tests(text: str, path: Path) -> Iterator[Test]:
    """Tests of all streams, each in the order of the log."""
    lines = [
        (number, _bare(line)) for number, line in enumerate(text.split("\n"), start=1) if len(line) <= LONGEST_LINE
    ]
    tagged = [(number, _TAG.match(line), line) for number, line in lines]
    tags = {tag[1] for _, tag, line in tagged if tag and _prints(line[tag.end() :])}
    streams: dict[str, list[tuple[int, str]]] = {}
    for number, tag, line in tagged:
        if tag is None or tag[1] not in tags:
            streams.setdefault("", []).append((number, line))
        else:
            kept = line[tag.end() :]
            if tag[1].startswith("["):
                kept = kept.replace(tag[1], " ")  # some launchers tag what is printed, not lines
            streams.setdefault(tag[1], []).append((number, kept))
    return chain.from_iterable(_stream(some, path) for some in streams.values())


def _bare(line: str) -> str:
    """A line without what tools put before it: colours, the time of day, marks of a quotation."""
    line = _COLOUR.sub("", line)
    before = _BEFORE.match(line)
    return line[before.end() :] if before else line


def _prints(line: str) -> bool:
    """Whether a line is of what a test prints: a rank, a header, or a row."""
    return bool(_RANK.search(line) or _HEADER.match(line) or _ROW.match(line))


def _stream(lines: Sequence[tuple[int, str]], path: Path) -> Iterator[Test]:
    """Tests of one stream; a line about threads, or a list of ranks after rows, begins one."""
    name, command = path.name, ""
    test = Test(name)
    for number, line in lines:
        started = _COMMAND.search(line)
        rank, header = _RANK.search(line), _HEADER.match(line)
        if mention := re.search(r"(\w+)_perf\b", line):
            name = mention[0]
        if "nThread" in line or (test.rows and (rank or header or started)):
            if test.rows:
                yield test
            threads = re.search(r"nThread\s+(\d{1,6})\s+nGpus\s+(\d{1,6})", line)
            per_process = max(1, int(threads[1]) * int(threads[2])) if threads else 1
            test = Test(name, per_process, ranks=[] if test.rows else test.ranks)
        command = line.strip() if started else command
        if not test.rows:
            test.name, test.command = name, command
        if rank:
            test.ranks.append(Rank(number, int(rank[1]), int(rank[2] or 0), rank[3] or "host", rank[4]))
        elif header:
            test.columns = _columns(line, number, path)
        elif _ROW.match(line):
            try:
                test.rows.append(_row(line.split(), test.columns, number))
            except ValueError as error:
                raise ProfileError(f"{path} line {number}: {error}: {shown(' '.join(line.split()))}") from None
    yield test


def _columns(line: str, number: int, path: Path) -> tuple[str, ...]:
    """Names of columns, as they are called today."""
    names = [_OTHER_NAMES.get(name, name) for name in line.replace("# ", " ", 1).split()]
    if "cputime" in names:
        raise ProfileError(f"{path} line {number}: times of the processor alone (option -C); run it without -C")
    return tuple(names)


def _row(cells: list[str], columns: tuple[str, ...], line: int) -> Row:
    """A row by its columns: those of its header, where there is one."""
    names = list(columns or (*_COLUMNS, *_PLACE, *_PLACE))
    if "redop" in names and re.fullmatch(r"-?[\d.]+", cells[3]):
        names.remove("redop")  # of a test without an operation, whose cell was blank
    if not columns and len(cells) == len(names) - 1:
        names.remove("root")
    if len(cells) < len(names) or (not columns and len(cells) != len(names)):
        raise ValueError(
            f"expected {len(names)} columns, got {len(cells)}; where the log was cut off, take the line out"
        )
    starts = [i for i, name in enumerate(names) if name == "time"]
    if not starts:
        raise ValueError("expected a header with columns of times")
    nbytes = int(cells[0])
    places = [_place([cells[i + names[i : i + 6].index(name)] for name in _PLACE], nbytes) for i in starts]
    redop = cells[names.index("redop")] if "redop" in names else "none"
    return Row(line, nbytes, redop, places[0], places[1] if len(places) > 1 else NOT_MEASURED)


def _place(cells: Sequence[str], nbytes: int) -> Place:
    """One half of a row: time [us], algorithm and bus bandwidth [GB/s], wrong values.

    Raises:
        ValueError: it is not what a GPU can have measured.
    """
    if cells[0] == "N/A" or nbytes == 0:
        return NOT_MEASURED
    algorithm, bus = (_GIGABYTES.read(float(cell)) for cell in cells[1:3])
    time_s = _TIME.read(float(cells[0]) * 1e-6)
    if abs(nbytes / time_s / 1e12 - algorithm) < 0.01 + 0.02 * algorithm and algorithm > 0.05:
        time_s *= 1e3  # nccl-tests of 2019 print milliseconds
    by_time = _SIZE.read(nbytes) / time_s / 1e9
    if abs(by_time - algorithm) > 0.01 + 0.02 * algorithm:
        raise ValueError(f"expected the size over the time, {by_time:.4g} GB/s, as algbw, got {algorithm:g}")
    return Place(time_s, algorithm, bus, cells[3] != "N/A")


# --- JSON ---


def _json_tests(text: str, path: Path) -> Iterator[Test]:
    """The test of a file of option -J."""
    with as_profile_error("; is the file cut off?"):
        data = parse_json(text, str(path))
    config = data.get("config") if isinstance(data.get("config"), dict) else {}
    devices, results = config.get("devices", data.get("devices")), data.get("results")
    if not isinstance(devices, list) or not isinstance(results, list):
        raise ProfileError(f"{path}: expected 'config' with 'devices', and 'results', as nccl-tests write with -J")
    try:
        per_process = max(1, int(config.get("nthreads", 1)) * int(config.get("ngpus", 1)))
        names = (data.get("args"), data.get("program"), *(row.get("experiment_name") for row in results))
        found = next((m[0] for name in names if (m := re.search(r"(\w+)_perf", str(name)))), path.name)
        test = Test(found, per_process)
        for i, one in enumerate(devices):  # one entry for every process
            for k in range(per_process):
                number = int(one["rank"]) + k if per_process > 1 else int(one["rank"])
                test.ranks.append(Rank(i, number, int(one["group"]), str(one["hostname"]), str(one["device_info"])))
        for i, row in enumerate(results):
            places = [_json_place(row.get(name), int(row["size"])) for name in ("out_of_place", "in_place")]
            test.rows.append(Row(i, int(row["size"]), str(row["redop"]), *places))
    except (KeyError, TypeError, AttributeError) as error:
        raise ProfileError(f"{path}: expected what nccl-tests write with -J, got no {error}") from None
    except ValueError as error:
        raise ProfileError(f"{path} result {len(test.rows)}: {error}") from None
    yield test


def _json_place(place: Any, nbytes: int) -> Place:
    if place is None:
        return NOT_MEASURED
    cells = [str(place[name]) for name in ("time", "alg_bw", "bus_bw")]
    return _place([*cells, "N/A" if place.get("nwrong") is None else "0"], nbytes)


# --- what it was ---


def _with_ranks(test: Test, said: Said, path: Path) -> Test:
    """A test with a list of ranks: its own, or what its command and people say."""
    if test.ranks:
        return test
    processes, each = _option(test.command, "np|n"), _option(test.command, "g") or 1
    ranks = said.ranks or ((processes or 1) * each * (_option(test.command, "t") or 1) if test.command else None)
    if ranks is None or said.gpu is None or ranks < 2:
        more = "" if ranks is None or ranks < 2 else f", of {ranks} GPUs by its command"
        raise ProfileError(
            f"{path}: rows without a list of ranks ('# Rank 0 Pid ...'){more}; give the whole log, or say what it "
            f"lacks: --gpu h100 --ranks {ranks if ranks and ranks > 1 else 8} --nodes {said.nodes or 1}"
        )
    nodes = said.nodes or 1
    test.ranks = [Rank(0, i, 0, f"node {i * nodes // ranks}", said.gpu) for i in range(ranks)]
    return test


def _option(command: str, names: str) -> int | None:
    found = re.search(rf"\s-{{1,2}}(?:{names})\s+(\d{{1,7}})\b", command)
    return int(found[1]) if found else None


def _other(test: Test) -> bool:
    """Whether a log names a test that nothing here is a model of, e.g. broadcast_perf."""
    return test.name.endswith("_perf") and test.name.removesuffix("_perf") not in _TESTS


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
    """Whether the list of ranks is whole: counted from 0, through all groups or in each of them, everyone once."""
    groups: dict[int, list[Rank]] = {}
    for rank in test.ranks:
        groups.setdefault(rank.group, []).append(rank)
    for group in groups.values():
        seen: dict[int, Rank] = {}
        for rank in group:
            if rank.number in seen:
                raise ProfileError(
                    f"{path} line {rank.line}: rank {rank.number} stands twice, on {seen[rank.number].host} and "
                    f"{rank.host}: several jobs in one list, as programs built without MPI=1 print them; give the log "
                    "of each, or let `mpirun --tag-output` or `srun -l` say which line is whose"
                )
            seen[rank.number] = rank
    gap = _gap(test.ranks)
    if gap and (len(groups) == 1 or any(map(_gap, groups.values()))):
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


def _hosts(test: Test, said: Said, notes: list[str]) -> dict[str, int]:
    """The node of every host: hosts of one NVLink domain are one."""
    hosts = list(dict.fromkeys(rank.host for rank in test.ranks))
    each = max(1, len(test.ranks) // len(hosts))
    domain = said.domain
    fastest = max((row.out.algorithm for row in test.rows), default=0.0) * 1e9
    if domain is None and len(hosts) > 1 and fastest > each * NIC_BYTES_PER_S:
        domain = len(test.ranks)
        notes.append(
            f"{len(hosts)} hosts of {each} GPUs pass {fastest / 1e9:.0f} GB/s, more than NICs carry: taken as one "
            f"NVLink domain of {domain}; say --domain {each} where they are nodes"
        )
    together = max(1, (domain or each) // each)
    return {host: i // together for i, host in enumerate(hosts)}


def _points(test: Test, said: Said, notes: list[str], path: Path) -> Iterator[Point]:
    _check_ranks(test, path)
    groups: dict[int, list[Rank]] = {}
    for rank in test.ranks:
        groups.setdefault(rank.group, []).append(rank)
    node = _hosts(test, said, notes)
    count = len(set(node.values()))
    per_node, sizes = len(test.ranks) // count, {len(group) for group in groups.values()}
    spans = {len({node[rank.host] for rank in group}) for group in groups.values()}
    of_nodes = [node[rank.host] for rank in test.ranks]
    if len(sizes) > 1 or len(spans) > 1 or any(of_nodes.count(n) != per_node for n in set(of_nodes)):
        raise ProfileError(
            f"{path}: expected equal nodes and equal groups, got {len(test.ranks)} ranks on {shown(list(node))}"
        )
    num_ranks, nodes = sizes.pop(), spans.pop()
    ring = [[i, (i + 1) % num_ranks] for i in range(num_ranks)]
    if nodes not in (1, count):
        raise ProfileError(f"{path}: expected groups on one node or on all {count}, got {nodes}")
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
        time_s = row.inside.time_s if time_s is None else time_s
        if time_s is not None:
            yield {**shared, "nbytes": row.nbytes, "samples_s": [round(time_s, 10)]}


_ADDS: Final = {
    "sendrecv": "sendrecv_perf would tell what single messages get, as rings send them",
    "all_to_all": "alltoall_perf would tell what Ulysses' exchanges get",
    "all_gather": "all_gather_perf would tell what gathers of keys and of FSDP get",
}


def missing(points: Sequence[Point]) -> list[str]:
    """What tests that are not among points of networks would add, in words."""
    networks = [p for p in points if p["op"] in ("collective", "transfer", "fabric")]
    if not networks:
        return []
    have = {"sendrecv" if "flows" in p or p["op"] == "transfer" else p["kind"] for p in networks}
    return [f"no {kind}: {words}" for kind, words in _ADDS.items() if kind not in have]
