"""Other people's measurements as points of ours: logs of nccl-tests, and tables of kernels' TFLOP/s in CSV."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from cpsim.calibrate.measurement import Point
from cpsim.calibrate.nccl_logs import Said, missing, read_nccl_log
from cpsim.calibrate.points import read_point
from cpsim.calibrate.topology import describes_a_node
from cpsim.case.gpu import gpu_of_driver, gpus
from cpsim.case.published import OUT_OF_MEMORY, count, is_long, mask_options, packs_of, read_rows
from cpsim.errors import QUOTED, ProfileError, cut, plain, shown
from cpsim.masks.names import MASK_NAMES, Value
from cpsim.masks.shapes import mask_slices
from cpsim.masks.slices import UNCUT
from cpsim.models.attention.kernels import KERNELS
from cpsim.models.feasible import limits_of
from cpsim.units import MEASURED_S, Quantity, number_or_text

# --- tables of kernels ---

_RATE: Final = Quantity("FLOP/s", 1e6, 1e19)
_NEEDED: Final = ("kernel", "pass", "mask", "tokens")
_CAUSAL: Final = {"full": False, "causal": True, "full_document": False, "causal_document": True}
"""Masks of plain calls, and whether they are causal."""
_WINDOWS: Final = {"causal_sliding_window": 0, "full_sliding_window": UNCUT}
"""Masks of windows: keys after a query's own that it sees; UNCUT: as many as before."""
_CUDNN: Final = re.compile(r"cuDNN (\d{1,2})\.(\d{1,2})(?:\.(\d{1,2}))?\b", re.IGNORECASE)


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

    Columns: kernel, pass (fwd, bwd), mask (any of `cpsim mask`), options (of the mask, as block=128 density=0.5),
    documents (lengths separated by spaces, or packs as `packs_of` reads them, whose mean rate stands for that of the
    pack with the median area; one of all tokens where there are none), tokens (8192 or 8k), tflops or ms, and where not
    given otherwise gpu, heads, kv_heads, head_dim; value_dim where values have another size; rested (yes) where pauses
    between calls keep the full clock; device (yes) where times hold no launches; version, of which that of cuDNN is
    kept (cuDNN 9.13.1). Lines that begin with # say where the table comes from.

    Raises:
        ProfileError: columns or values are missing or are no numbers, or the table has several GPUs.
    """
    source, table = read_rows(path)
    missing = [name for name in _NEEDED if not table or name not in table[0][1]]
    if missing or not {"tflops", "ms"} & table[0][1].keys():
        wanted = ", ".join([*_NEEDED, "tflops (or ms)"])
        raise ProfileError(f"{path}: expected columns {wanted}, got no {', '.join(missing or ['tflops'])}")
    gpus = {row.get("gpu") or given.gpu for _, row in table}
    gpu = given.gpu or (gpus.pop() if len(gpus) == 1 else None)
    if gpu is None:
        raise ProfileError(f"{path}: which GPU? give --gpu, e.g. {shown(' or '.join(sorted(map(str, gpus))))}")
    points: list[Point] = []
    timed: list[Point] = []
    left: dict[str, int] = {}
    versions: dict[str, int] = {}
    for number, row in table:
        if row.get("gpu", gpu) != gpu:
            continue
        if (version := _version(row)) is not None:
            versions[row["kernel"]] = max(version, versions.get(row["kernel"], 0))
        reason = _unknown(row)
        if reason:
            left[reason] = left.get(reason, 0) + 1
            continue
        try:
            points.append(read_point(_kernel_point(row, given)))
        except ValueError as error:
            raise ProfileError(f"{path} line {number}: {error}") from None
        if _is_yes(row, "device"):
            timed.append(points.pop())
    header = {"gpu": gpu, "num_gpus": 1, "num_sms": _num_sms(gpu, given), "published": source or path.name}
    if versions:
        header["kernels"] = {kernel: str(version) for kernel, version in sorted(versions.items())}
    kept, hosts = _long_enough(points), _hosts_seconds(points)
    if len(kept) < len(points):
        left["near the shortest of their kernel, so that launches may decide"] = len(points) - len(kept)
    kept = [p | {"samples_s": [p["samples_s"][0] - hosts.get((p["kernel"], p["pass"]), 0.0)]} for p in kept]
    words = [f"{count} rows: {reason}" for reason, count in left.items()]
    for (kernel, pass_), seconds in hosts.items():
        words.append(f"{seconds * 1e3:.2f} ms of each call of {kernel} {pass_}: as long at every length, so its host's")
    return header, timed + kept, words


def _long_enough(points: Sequence[Point]) -> list[Point]:
    """Points whose time is the kernel's rather than the host's."""
    floor: dict[tuple[str, str], float] = {}
    for p in points:
        key = p["kernel"], p["pass"]
        floor[key] = min(p["samples_s"][0], floor.get(key, float("inf")))
    return [p for p in points if is_long(p["samples_s"][0], floor[p["kernel"], p["pass"]])]


ALIKE: Final = 0.2
"""Share of a call's time beyond its rate that tells of its host, and how far such times lie from their median at most,
relative, where they are the same at every length."""
FEWEST: Final = 3
"""Lengths of each mask that tell."""


def _hosts_seconds(points: Sequence[Point]) -> dict[tuple[str, str], float]:
    """Seconds that the host adds to every call of a kernel and pass, where calls show that.

    A call that is timed between two events waits for its host, whatever its length: shorter ones take as much more than
    the rate of the longest at every length, under every mask; the least of that is certainly not the kernel's. Where it
    falls with the length, launches hide behind kernels; where it grows, it is the kernel's own.
    """
    by_mask: dict[tuple[str, str], dict[bool, list[Point]]] = {}
    for p in points:
        if len(p["q_lens"]) == 1 and not ({"rested", "mask", "window"} & p.keys()):
            by_mask.setdefault((p["kernel"], p["pass"]), {}).setdefault(p["causal"], []).append(p)
    found = {}
    for key, masks in by_mask.items():
        each = [_beyond_rate(mine) for mine in masks.values()]
        together = [seconds for beyond in each for seconds in beyond]
        if min(map(len, each)) >= FEWEST and np.ptp(together) <= 2 * ALIKE * np.median(together):
            found[key] = min(together)
    return found


def _beyond_rate(points: Sequence[Point]) -> list[float]:
    """Seconds that shorter calls under one mask take beyond the rate of the longest, where that is a good part."""
    *shorter, longest = sorted(points, key=_work)
    slowness = longest["samples_s"][0] / _work(longest)
    beyond = [(p["samples_s"][0] - _work(p) * slowness, p["samples_s"][0]) for p in shorter]
    return [more for more, seconds in beyond if more > ALIKE * seconds]


def _work(point: Point) -> float:
    """Pairs of query and key times heads and their dimension."""
    area = sum(n * (n + 1) / 2 if point["causal"] else n * n for n in point["q_lens"])
    return float(area * point["num_heads"] * point["head_dim"])


def _version(row: dict[str, str]) -> int | None:
    """Of cuDNN, as it counts: 91301 for 9.13.1."""
    if row["kernel"] != "cudnn" or not (said := _CUDNN.search(row.get("version", ""))):
        return None
    major, minor, patch = (int(number or 0) for number in said.groups())
    return major * 10_000 + minor * 100 + patch


def _unknown(row: dict[str, str]) -> str:
    """Why a row becomes no point; empty where it does."""
    mask = row["mask"].removesuffix("_mask")
    if (row["kernel"], row["pass"]) not in KERNELS:
        return plain(cut(f"kernel {row['kernel']} {row['pass']}", QUOTED)) + " has no model"
    if mask not in MASK_NAMES:
        return plain(cut(f"mask {row['mask']}", QUOTED)) + " without a model"
    if (row.get("tflops") or row.get("ms") or OUT_OF_MEMORY).upper() == OUT_OF_MEMORY:
        return "no time"
    if not mask.endswith("document"):
        return ""
    if not row.get("documents"):
        return "documents without their lengths"
    return "" if limits_of(row["kernel"]).varlen else f"documents, which {row['kernel']} takes from other code alone"


def _kernel_point(row: dict[str, str], given: Table) -> Point:
    heads = _whole(row, "heads", given.heads or 0)
    if heads < 1:
        raise ValueError("how many heads? add a column or give --heads")
    kv_heads, dim = _whole(row, "kv_heads", given.kv_heads or heads), _whole(row, "head_dim", given.head_dim)
    tokens = row["tokens"].lower()
    total = count(tokens.removesuffix("k"), "tokens") * (1024 if tokens.endswith("k") else 1)
    mask = row["mask"].removesuffix("_mask")
    options = mask_options(mask, row.get("options", ""))
    packs = packs_of(row.get("documents", ""), total)
    areas = [int(mask_slices(mask, pack, options).areas().sum()) for pack in packs]
    area, lens = sorted(zip(areas, packs, strict=True))[len(packs) // 2]
    anatomy = KERNELS[row["kernel"], row["pass"]].anatomy
    call = _call(mask, options, any_mask=anatomy.lists_blocks or anatomy.gathers_keys)
    values = _whole(row, "value_dim", 0)
    of_keys, of_values = (6, 4) if row["pass"] == "bwd" else (2, 2)
    flop = float(area) * heads * (of_keys * dim + of_values * (values or dim))
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
        **call,
        "varlen": len(lens) > 1 and "mask" not in call,
        "q_lens": list(lens),
        "k_lens": list(lens),
        **({"area": area} if "mask" in call else {}),
        **({"value_dim": values} if values not in (0, dim) else {}),
        **({"rested": True} if _is_yes(row, "rested") else {}),
        "samples_s": [seconds],
    }


def _call(mask: str, options: Mapping[str, Value], *, any_mask: bool) -> dict[str, Any]:
    """Fields of a point that say its mask; of a kernel that takes any, windows are one."""
    if mask in _CAUSAL:
        return {"causal": _CAUSAL[mask]}
    if any_mask or mask not in _WINDOWS:
        return {"causal": False, "mask": mask, "options": dict(options)}
    window = int(options.get("window", MASK_NAMES[mask].options["window"].default))  # type: ignore[arg-type]
    after = window if _WINDOWS[mask] == UNCUT else _WINDOWS[mask]
    return {"causal": after == 0, "window": [window, after]}


def _is_yes(row: dict[str, str], name: str) -> bool:
    return row.get(name, "").lower() in ("yes", "true", "1")


def _whole(row: dict[str, str], name: str, otherwise: int) -> int:
    return count(row[name], name) if row.get(name) else otherwise


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


def import_files(
    paths: Sequence[Path], given: Table, command: str, said: Said | None = None
) -> tuple[dict[str, Any], list[Point], list[str], list[str]]:
    """Header and points of one measurement file from logs and tables of one GPU type, what was left out, and what else
    to know."""
    headers: list[dict[str, Any]] = []
    points: list[Point] = []
    left: list[str] = []
    notes: list[str] = []
    for path in paths:
        if path.suffix.lower() == ".csv":
            header, found, without = read_kernel_table(path, given)
            left += [f"{path}: {words}" for words in without]
        else:
            if (words := describes_a_node(path)) is not None:
                raise ProfileError(f"{path}: {words}, and no times; `cpsim init cluster {path}` reads it")
            log = read_nccl_log(path, said)
            header, found = log.header, log.points
            notes += [f"{path}: {words}" for words in log.notes]
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
    return merged, points, left, notes + missing(points)
